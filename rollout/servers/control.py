"""Synchronous control of the SGLang servers by the learner: pause, receive weights, verify, resume.

The learner's rank 0 does all of it, but for ``join_group``, ``receive_bucket`` and ``leave_group``: each of
the learner's senders has a ``SGLangControl`` of its own for these, since whoever waits in a broadcast must
see at once that a server has refused it.

One update, in order; what is indented runs in the servers and in the caller at the same time:

    open_update()     pause                   no token is sampled any more; running requests go back to the queue
                      begin
        receive_bucket(...)  ||  broadcast    once per bucket; the last one carries the version
        (the last bucket flushes the cache)   no key or value of the old weights is reused
    close_update()    end
                      versions, checksums     to be verified while nothing is sampled
    resume()
    probe(...)                                after resume: a paused server does not generate

Servers may outlive the learner that opened an update. The next one calls ``take_over`` first: the interrupted
update stays open, and paused servers stay paused, until a whole update has been loaded in its place.

Paused servers also lend their device's memory (``release_memory``), and take it back before they are resumed.

Every server serves its requests in the order of the calls, and one after the other (``ControlLine``): what is
not waited for is done first.

Not its concern: the caller's end of the broadcast, and what the weights are.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rollout.client import GenerationError
from rollout.connections import PEER_TIMEOUT_S
from rollout.records import Completion
from rollout.run_key import RunKey
from rollout.servers.client import finite_logprobs, neutral_sampling_params, parse_completion
from rollout.servers.control_line import ControlError, ControlLine

NO_UPDATE = "must run between begin_weight_update() and end_weight_update()"
"""SGLang 0.5.23's words for a server without an open update."""
NO_GROUP = "tandem-no-group"
"""A group that no server is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A greedy one. Log-probs are in nats."""

    token_ids: list[int]
    prompt_logprobs: list[float]
    """Of the prompt's tokens from the second on."""
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the replicas hold after an update, in their order."""

    versions: list[int]
    checksums: list[dict[str, str]] | None
    """None where they were not asked for."""


class Pending:
    """Requests under way on every replica, while the caller does its own part of the same collective."""

    def __init__(self, what: str, futures: Sequence[Future], timeout_s: float) -> None:
        self._what, self._futures, self._timeout_s = what, list(futures), timeout_s

    def raise_if_failed(self) -> None:
        """Look once, without waiting: a server that refused will never join the collective that the caller
        waits in.

        Raises:
            ControlError: a replica has failed already.
        """
        for future in self._futures:
            if future.done():
                future.result()

    def wait(self) -> list[dict]:
        """The replies in order of the requests and of the replicas.

        Raises:
            ControlError: the first failure, with the server's message, or the deadline passed.
        """
        done, missing = wait_futures(self._futures, timeout=self._timeout_s, return_when="FIRST_EXCEPTION")
        for future in self._futures:
            if future in done:
                future.result()
        if missing:
            raise ControlError(
                f"{self._what}: {len(missing)} of {len(self._futures)} answers did not come in {self._timeout_s:g} s"
            )
        return [future.result() for future in self._futures]


class SGLangControl:
    """Control of every replica at once; used by one thread. Each call waits at most ``timeout_s`` and then
    raises ControlError."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        tensor_parallel: int,
        timeout_s: float,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        key: RunKey | None = None,
    ) -> None:
        if not urls:
            raise ValueError("urls is empty; give the address of at least one SGLang server")
        self.urls = [url.rstrip("/") for url in urls]
        self.key = key
        self.group_name: str | None = None
        self._is_open = [False] * len(self.urls)
        """Of each replica: an update that another learner opened and never closed."""
        self._tensor_parallel = tensor_parallel
        self._timeout_s = timeout_s
        self._lines = [
            ControlLine(url, timeout_s=timeout_s, peer_timeout_s=peer_timeout_s, key=key) for url in self.urls
        ]

    def __enter__(self) -> "SGLangControl":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for line in self._lines:
            line.close()

    @property
    def num_receivers(self) -> int:
        """Ranks of the servers in a broadcast group, whose size is 1 + this (the sender is rank 0)."""
        return len(self.urls) * self._tensor_parallel

    def join_group(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> Pending:
        """Have every server's ranks join a process group; replica i's are 1 + i * tp onwards. Rank 0 joins
        while this is pending.

        Args:
            backend: ``gloo`` or ``nccl``. world_size: of senders and receivers together. group_name: a group
            of this name that an earlier
                learner has left behind is destroyed first; SGLang would refuse the name.
        """
        if world_size != 1 + self.num_receivers:
            raise ValueError(
                f"world_size={world_size} of group {group_name!r}, but one sender and {self.num_receivers} server ranks join"
            )
        self.group_name = group_name
        self._ask(
            "POST", "/destroy_weights_update_group", {"group_name": group_name}
        )  # refused where there is none, which is well
        common = {
            "master_address": master_address,
            "master_port": master_port,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        offsets = [1 + replica * self._tensor_parallel for replica in range(len(self._lines))]
        return self._pending(
            f"join group {group_name}",
            [
                line.ask("POST", "/init_weights_update_group", common | {"rank_offset": offset})
                for line, offset in zip(self._lines, offsets, strict=True)
            ],
        )

    def leave_group(self) -> None:
        """Have every server leave the group of ``join_group``; nothing to do where none was joined."""
        if self.group_name is not None:
            self._post_all("leave group", "/destroy_weights_update_group", {"group_name": self.group_name})
            self.group_name = None

    def pause(self) -> None:
        """Stop sampling and hold new requests, mode ``retract``.

        Of SGLang's modes, ``abort`` would throw running responses away, and ``in_place`` would go on with
        keys and values of the old weights and refuses to flush them. ``retract`` puts running requests back
        into the queue: they keep their tokens (and those tokens' versions) and their cache is computed anew,
        with the new weights, after ``resume``.
        """
        self._post_all("pause", "/pause_generation", {"mode": "retract"})

    def take_over(self) -> bool:
        """Pause servers that an earlier learner may have left in any state; whether one of them is in the
        middle of an update.

        Such a server holds parts of two versions. It must not be resumed before the next update, which goes
        on in the open session: ending the session first would leave a moment in which nothing tells that the
        weights are no version at all.
        """
        self.pause()
        # SGLang has no question for it. A request to receive that cannot succeed changes nothing, and is
        # refused for one of two reasons.
        body = {
            "names": [],
            "dtypes": [],
            "shapes": [],
            "group_name": NO_GROUP,
            "load_format": "flattened_bucket",
        }
        refusals = [
            line.ask("POST", "/update_weights_from_distributed", body).exception(self._timeout_s + 5.0)
            for line in self._lines
        ]
        for refusal in refusals:
            if not isinstance(refusal, ControlError) or not (
                NO_UPDATE in str(refusal) or NO_GROUP in str(refusal)
            ):
                raise ControlError(f"take over: a server's answer cannot be read ({refusal})")
        self._is_open = [NO_UPDATE not in str(refusal) for refusal in refusals]
        return any(self._is_open)

    def begin_update(self) -> None:
        self._post_all("begin weight update", "/begin_weight_update", {})

    def open_update(self) -> Pending:
        """``pause`` and ``begin_update``, under way; an update that ``take_over`` has found open is gone on
        with."""
        pausing = self._ask("POST", "/pause_generation", {"mode": "retract"})
        closed = [line for line, is_open in zip(self._lines, self._is_open, strict=True) if not is_open]
        beginning = [line.ask("POST", "/begin_weight_update", {}) for line in closed]
        return self._pending("pause and begin weight update", [*pausing, *beginning])

    def receive_bucket(
        self, *, names: Sequence[str], dtype: str, shapes: Sequence[Sequence[int]], version: int | None
    ) -> Pending:
        """Have every server receive one uint8 broadcast from rank 0 of the joined group and load the tensors
        in it.

        The bucket is the concatenation of the tensors' bytes in the given order, all of one dtype. The caller
        broadcasts while this is pending; it should look at ``raise_if_failed`` if its broadcast does not get
        through, since a server that refused never joins in.

        Args:
            names: Hugging Face names. dtype: ``float32``, ``bfloat16`` or ``float16``. shapes: of the whole
            (unsharded) tensors. version: what the weights are called from here on: None for every bucket but
            the last of an update, so that an update
                that breaks off is never reported under its new version. The bucket that names it also flushes
                the cache.

        Raises:
            ValueError: no group was joined, or names and shapes do not fit together.
        """
        if self.group_name is None:
            raise ValueError("the servers have joined no group to receive weights in; call join_group first")
        if not names or len(names) != len(shapes):
            raise ValueError(
                f"a bucket needs at least one name and a shape for each: {len(names)} names, {len(shapes)} shapes"
            )
        body = {
            "names": list(names),
            "dtypes": [dtype] * len(names),
            "shapes": [list(shape) for shape in shapes],
            "group_name": self.group_name,
            "load_format": "flattened_bucket",
            # Once, with the last bucket, and without the garbage collection of /flush_cache, which takes 0.4
            # s on CPU.
            "flush_cache": version is not None,
            "torch_empty_cache": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        return self._post(
            f"receive a bucket of {len(names)} tensors", "/update_weights_from_distributed", body
        )

    def end_update(self) -> None:
        self._post_all("end weight update", "/end_weight_update", {})

    def close_update(self, *, with_checksums: bool) -> Served:
        """End the update and say what is served now; ``with_checksums``: every parameter too.

        Raises:
            ControlError: also where an answer cannot be read.
        """
        ending = self._post("end weight update", "/end_weight_update", {})
        versions = self._asked_versions()
        checksums = self._asked_checksums() if with_checksums else None
        ending.wait()
        self._is_open = [False] * len(self._lines)
        return Served(
            versions=_versions(versions.wait()),
            checksums=None if checksums is None else _checksums(checksums.wait()),
        )

    def resume(self) -> None:
        self._post_all("resume", "/continue_generation", {})

    def release_memory(self, tags: Sequence[str]) -> None:
        """Give the device's memory of ``tags`` back, ``kv_cache`` or ``weights``, and what is in it up. The
        servers must be paused.

        On CPU, where SGLang has no such memory, it only empties the cache.
        """
        self._post_all(
            f"release the memory of {' and '.join(tags)}", "/release_memory_occupation", {"tags": list(tags)}
        )

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take it again, at the same addresses; it holds anything: weights are to be sent before, and the
        cache is empty."""
        self._post_all(
            f"take the memory of {' and '.join(tags)}", "/resume_memory_occupation", {"tags": list(tags)}
        )

    def versions(self) -> list[int]:
        """What each replica calls its weights.

        Raises:
            ControlError: one of them is not a decimal number.
        """
        return _versions(self._asked_versions().wait())

    def _asked_versions(self) -> Pending:
        return self._pending("read versions", self._ask("GET", "/model_info", None))

    def probe(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float
    ) -> list[Completion]:
        """One sampled response of each replica, of exactly ``max_new_tokens`` tokens (no token ends it).

        Raises:
            ControlError: also where an answer cannot be read.
        """
        sampling = neutral_sampling_params(max_new_tokens=max_new_tokens, temperature=temperature) | {
            "ignore_eos": True
        }
        body = {"input_ids": list(prompt_ids), "sampling_params": sampling, "return_logprob": True}
        replies = self._post_all("probe", "/generate", body)
        with _as_expected("probe"):
            return [parse_completion(reply) for reply in replies]

    def checksums(self) -> list[dict[str, str]]:
        """Per replica, SGLang's checksum of every parameter: 16 hex digits by SGLang's own (fused) names.

        On CPU a checksum is the first 8 bytes of SHA-256 over the tensor's bytes in row-major order, and
        ``ExpectedChecksums`` computes the same. With TP > 1 each rank hashes its shard and the names carry
        ``rank<r>/``; on CUDA SGLang hashes with a kernel of its own, which still compares replicas with one
        another and one update with the next.
        """
        return _checksums(self._asked_checksums().wait())

    def _asked_checksums(self) -> Pending:
        return self._post("checksums", "/weights_checker", {"action": "checksum"})

    def load_from_disk(self, folder: Path, *, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder of the same model; nothing of the old ones
        stays cached."""
        body = {
            "model_path": str(Path(folder).resolve()),
            "weight_version": str(version),
            "flush_cache": True,
        }
        self._post_all("load weights from disk", "/update_weights_from_disk", body)

    def greedy(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[Continuation]]:
        """Per replica, the likeliest continuation of each prompt. One at a time and from an empty cache:
        nothing but the weights, not even the batch, makes a difference to the numbers.

        Raises:
            ControlError: also where an answer cannot be read, such as log-probs that are not finite, which
            would equal one another.
        """
        # It waits for requests that are just ending, such as the one by which a server was found healthy.
        self._post_all("flush the cache", f"/flush_cache?timeout={self._timeout_s:g}", {})
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        of_prompts = []
        for prompt in prompts:
            body = {
                "input_ids": list(prompt),
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            replies = self._post_all("greedy continuation", "/generate", body)
            with _as_expected("greedy continuation"):
                of_prompts.append([_continuation(reply) for reply in replies])
        return [list(of_replica) for of_replica in zip(*of_prompts, strict=True)]

    def _post_all(self, what: str, path: str, body: dict) -> list[dict]:
        return self._post(what, path, body).wait()

    def _post(self, what: str, path: str, body: dict) -> Pending:
        return self._pending(what, self._ask("POST", path, body))

    def _ask(self, method: str, path: str, body: dict | None) -> list[Future]:
        return [line.ask(method, path, body) for line in self._lines]

    def _pending(self, what: str, futures: Sequence[Future]) -> Pending:
        # The socket's own deadline comes first; the margin lets its message through.
        return Pending(what, futures, self._timeout_s + 5.0)


def _versions(replies: Sequence[dict]) -> list[int]:
    with _as_expected("read versions"):
        reported = [reply["weight_version"] for reply in replies]
        are_numbers = all(re.fullmatch(r"\d+", version) for version in reported)
    if not are_numbers:
        raise ControlError(
            f"servers call their weights {reported}, not decimal numbers; start them with --weight-version 0"
        )
    return [int(version) for version in reported]


def _checksums(replies: Sequence[dict]) -> list[dict[str, str]]:
    with _as_expected("checksums"):
        return [_by_name(reply["ranks"]) for reply in replies]


@contextmanager
def _as_expected(what: str) -> Iterator[None]:
    """An answer that cannot be read is the server's failure, which every rank hears of, and not the reader's
    own."""
    try:
        yield
    except (GenerationError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ControlError(
            f"{what}: a server's answer cannot be read ({type(error).__name__}: {error})"
        ) from error


def _continuation(reply: dict) -> Continuation:
    found = reply["meta_info"]
    return Continuation(
        token_ids=list(reply["output_ids"]),
        prompt_logprobs=finite_logprobs(found["input_token_logprobs"][1:]),  # the first token has none
        logprobs=finite_logprobs(found["output_token_logprobs"]),
    )


def _by_name(ranks: Sequence[dict]) -> dict[str, str]:
    """``ranks`` come in order of the tensor-parallel rank."""
    return {
        _of_rank(rank, len(ranks), name): digest
        for rank, report in enumerate(ranks)
        for name, digest in report["checksums"].items()
    }


def _of_rank(rank: int, size: int, name: str) -> str:
    return name if size == 1 else f"rank{rank}/{name}"


FUSED = (
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), ".qkv_proj.", ("q_proj", "k_proj", "v_proj")),
    (re.compile(r"\.(gate_proj|up_proj)\."), ".gate_up_proj.", ("gate_proj", "up_proj")),
)
"""Hugging Face projections that SGLang keeps as one matrix, and their order from the first row down."""
SPLIT_BY_COLUMNS = (".o_proj.weight", ".down_proj.weight")
VOCABULARIES = ("embed_tokens.weight", "lm_head.weight")


def vocabulary_padding(rows: int, size: int) -> int:
    """Rows of zeros that SGLang adds to embedding and output head on ``size`` ranks: up to a multiple of 64,
    or of 64 * size where the former does not divide by size (its VocabParallelEmbedding)."""
    padding = -rows % 64
    return padding if (rows + padding) % size == 0 else -rows % (64 * size)


class ExpectedChecksums:
    """What ``checksums`` says of a server on CPU that holds the weights that were ``add``ed, for dense Qwen2,
    Qwen3 and Llama.

    Nothing is kept of a tensor but what has been hashed: parts of a fused matrix must come in their order, as
    an export has them.

    Args:
        tensor_parallel: SGLang's. kv_heads: of the model; where there are fewer of them than ranks, several
        ranks hold the same one.
    """

    def __init__(self, *, tensor_parallel: int, kv_heads: int) -> None:
        self._size, self._kv_heads = tensor_parallel, kv_heads
        self._hashers: dict[str, list] = {}
        self._parts: dict[str, int] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """A Hugging Face tensor, whole, in the served dtype. No ``lm_head.weight`` where it is tied: SGLang
        lists a shared one once.

        Raises:
            ValueError: a part of a fused matrix comes out of its order.
        """
        fused, place = _fused_name(name)
        if self._parts.get(fused, 0) != place:
            raise ValueError(
                f"{name} is part {place} of {fused}, of which {self._parts.get(fused, 0)} parts have been given"
            )
        self._parts[fused] = place + 1
        hashers = self._hashers.setdefault(fused, [hashlib.sha256() for _ in range(self._size)])
        for hasher, shard in zip(hashers, self._shards(name, tensor), strict=True):
            hasher.update(shard.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _shards(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Of each of SGLang's ranks."""
        if name.endswith(VOCABULARIES):
            padding = tensor.new_zeros(vocabulary_padding(tensor.shape[0], self._size), tensor.shape[1])
            return (
                torch.cat([tensor, padding]).chunk(self._size) if len(padding) else tensor.chunk(self._size)
            )
        if ".k_proj." in name or ".v_proj." in name:
            heads = min(self._kv_heads, self._size)
            return [tensor.chunk(heads)[rank * heads // self._size] for rank in range(self._size)]
        if name.endswith(SPLIT_BY_COLUMNS):
            return tensor.chunk(self._size, 1)
        return tensor.chunk(self._size) if _fused_name(name)[0] != name else [tensor] * self._size

    def by_name(self) -> dict[str, str]:
        """By the names of ``SGLangControl.checksums``: the first 8 bytes of each SHA-256."""
        return {
            _of_rank(rank, self._size, name): hasher.digest()[:8].hex()
            for name, hashers in self._hashers.items()
            for rank, hasher in enumerate(hashers)
        }


def _fused_name(name: str) -> tuple[str, int]:
    """SGLang's name, and which part of that matrix this is."""
    for pattern, replacement, order in FUSED:
        match = pattern.search(name)
        if match:
            return pattern.sub(replacement, name), order.index(match.group(1))
    return name, 0
