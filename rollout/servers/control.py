"""Synchronous control of the SGLang servers by the learner: pause, receive weights, verify, resume.

Rank 0 of the learner calls everything but ``join_group``, ``try_to_read``, ``receive_transfer``, ``receive_bucket`` and
``leave_group``. For these every sender of the learner has its own ``SGLangControl``: while a rank waits until the
servers take a bucket, it must see at once that a server has refused it.

One update, in order; indented calls run in the servers and in the caller at the same time:

    open_update()     pause                   no token is sampled any more; running requests go back to the queue
                      begin
        receive_transfer(...) || buckets      once per pipeline stage; the last one carries the version
        (the last one flushes the cache)      no key or value of the old weights is reused
    close_update()    end
                      versions                to be verified while nothing is sampled
    resume()
    probe(...)                                after resume: a paused server does not generate

Servers without Tandem's plugin get ``receive_bucket`` once per bucket instead of ``receive_transfer``, and check
no bytes.

Servers may outlive the learner that opened an update. The next learner calls ``take_over`` first: the
interrupted update stays open, and paused servers stay paused, until a whole update has replaced it.

Paused servers also lend their device's memory (``release_memory``) until they are resumed.

Every server handles the requests of a control one by one in the order of the calls (``ControlLine``), even if the caller
does not wait for the answers. Before another control asks it to receive, ``open_update`` must have been answered.

The caller's end of the transfer and the content of the weights are not this file's concern.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.schema.launch import LaunchConfig
from configs.schema.rollout import RolloutConfig
from rollout.client import GenerationError
from rollout.records import Completion
from rollout.run_key import RunKey
from rollout.servers.answers import (
    Sent,
    finite_logprobs,
    neutral_sampling_params,
    parse_completion,
    version_number,
)
from rollout.servers.control_line import ControlError, ControlLine
from rollout.sglang_plugin.tandem_routed_experts import WITH_EXPERTS
from rollout.sglang_plugin.tandem_weight_transfer import PROTOCOL, Announcement, question

NO_UPDATE = "must run between begin_weight_update() and end_weight_update()"
"""SGLang 0.5.23's message if no update is open."""
NO_GROUP = "tandem-no-group"
"""Name of a group that does not exist."""
RECEIVE_PATH = "/update_weights_from_distributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A greedy continuation of a prompt. Log-probs are in nats."""

    token_ids: list[int]
    prompt_logprobs: list[float]
    """Log-probs of the prompt's tokens from the second on."""
    logprobs: list[float]


class Pending:
    """Requests under way on every replica while the caller does its own part of the same collective."""

    def __init__(self, action: str, futures: Sequence[Future], timeout_s: float) -> None:
        self._action, self._futures, self._timeout_s = action, list(futures), timeout_s

    def raise_if_failed(self) -> None:
        """Look once, without waiting: a server that refused will never join the caller's collective. Raises
        ControlError: a replica has failed already."""
        for future in self._futures:
            if future.done():
                future.result()

    def wait(self) -> list[dict]:
        """The replies in order of the requests and of the replicas. Raises ControlError: the first failure,
        with the server's message, or a missed deadline."""
        done, missing = wait_futures(self._futures, timeout=self._timeout_s, return_when="FIRST_EXCEPTION")
        for future in self._futures:
            if future in done:
                future.result()
        if missing:
            raise ControlError(
                f"{self._action}: {len(missing)} of {len(self._futures)} answers did not come in {self._timeout_s:g} s"
            )
        return [future.result() for future in self._futures]


class SGLangControl(AbstractContextManager["SGLangControl"]):
    """Control of all replicas of a run at once, for one thread. A call raises ControlError after ``launch.patience_s``.

    needs_experts: whether ``require_plugin`` refuses servers that capture no routed experts.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        launch: LaunchConfig,
        urls: Sequence[str],
        *,
        key: RunKey,
        needs_experts: bool = False,
    ) -> None:
        if not urls:
            raise ValueError("urls is empty; give the address of at least one SGLang server")
        self._needs_experts = needs_experts
        self.urls = [url.rstrip("/") for url in urls]
        self.key = key
        self.group_name: str | None = None
        self._is_open = [False] * len(self.urls)
        """Per replica: whether another learner opened an update and never closed it."""
        self._tensor_parallel = rollout.tp
        self._timeout_s = launch.patience_s
        # With the margin the socket's own deadline comes first, and its message is the one that is raised.
        self._patience_s = launch.patience_s + 5.0
        limits = {"timeout_s": launch.patience_s, "peer_timeout_s": launch.peer_timeout_s}
        self._lines = [ControlLine(url, **limits, key=key) for url in self.urls]

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for line in self._lines:
            line.close()

    @property
    def num_receivers(self) -> int:
        """Server ranks in a broadcast group; with the sender, rank 0, its size is one more."""
        return len(self.urls) * self._tensor_parallel

    def join_group(self, *, master_address: str, master_port: int, group_name: str, backend: str) -> Pending:
        """Have all server ranks join a process group. Replica i has the ranks from 1 + i * tp on. The caller
        joins as rank 0 while this is pending.

        Args:
            backend: ``gloo`` or ``nccl``.
            group_name: if an earlier learner left a group of this name behind, it is destroyed first, because
                SGLang would refuse the name.
        """
        self.group_name = group_name
        # A server without such a group refuses this request; the refusal is ignored.
        self._send_all("POST", "/destroy_weights_update_group", {"group_name": group_name})
        common = {
            "master_address": master_address,
            "master_port": master_port,
            "world_size": 1 + self.num_receivers,
            "group_name": group_name,
            "backend": backend,
        }
        futures = [
            line.ask(
                "POST", "/init_weights_update_group", common | {"rank_offset": 1 + i * self._tensor_parallel}
            )
            for i, line in enumerate(self._lines)
        ]
        return self._as_pending(f"join group {group_name}", futures)

    def leave_group(self) -> Pending:
        """Have every server leave the group of ``join_group``, if it was called; the caller leaves while this is pending."""
        name, self.group_name = self.group_name, None
        if name is None:
            return self._as_pending("leave group", [])
        return self._post("leave group", "/destroy_weights_update_group", {"group_name": name})

    def pause(self) -> None:
        """Stop sampling and hold new requests.

        SGLang's mode ``retract`` puts running requests back into the queue. They keep their tokens (and the
        tokens' versions). After ``resume`` their cache is computed again with the new weights. Mode ``abort``
        would throw running responses away. ``in_place`` would continue with keys and values of the old weights,
        and refuses to flush them.
        """
        self._post("pause", "/pause_generation", {"mode": "retract"}).wait()

    def take_over(self) -> bool:
        """Pause servers that an earlier learner left in an unknown state. Returns whether one of them is in
        the middle of an update.

        Such a server holds parts of two versions. It must not be resumed before the next update, which
        continues the open one. If the open update were closed first, the server would briefly report a version
        that its weights do not have.
        """
        self.pause()
        # SGLang does not report whether an update is open. This request to receive always fails and changes
        # nothing; the reason of the refusal shows it.
        body = _announced([], [], [], NO_GROUP, "flattened_bucket")
        refusals = [line.ask("POST", RECEIVE_PATH, body).exception(self._patience_s) for line in self._lines]
        for refusal in refusals:
            is_known = NO_UPDATE in str(refusal) or NO_GROUP in str(refusal)
            if not isinstance(refusal, ControlError) or not is_known:
                raise ControlError(f"take over: a server's answer cannot be read ({refusal})")
        self._is_open = [NO_UPDATE not in str(refusal) for refusal in refusals]
        return any(self._is_open)

    def open_update(self) -> Pending:
        """Start to pause the servers and to begin an update. An update that ``take_over`` found open is continued."""
        pausing = self._send_all("POST", "/pause_generation", {"mode": "retract"})
        closed = [line for line, is_open in zip(self._lines, self._is_open, strict=True) if not is_open]
        beginning = [line.ask("POST", "/begin_weight_update", {}) for line in closed]
        return self._as_pending("pause and begin weight update", [*pausing, *beginning])

    def require_plugin(self) -> None:
        """Pause the servers, and check that each has this version of Tandem's plugin. Raises ControlError: a
        server has another version, or none, or captures no routed experts that are needed."""
        self.pause()  # otherwise the question would wait for the running requests
        futures = self._send_all("POST", RECEIVE_PATH, _announced([], [], [], NO_GROUP, question()))
        for url, future in zip(self.urls, futures, strict=True):
            error = future.exception(self._patience_s)
            answer = str(error) if error is not None else future.result().get("message")
            if answer == PROTOCOL and self._needs_experts:
                raise ControlError(
                    f"{url} does not return routed experts, and learner.routing=rollout replays them; start the servers with this config, "
                    "or set learner.routing=own"
                )
            if answer not in (PROTOCOL, PROTOCOL + WITH_EXPERTS):
                raise ControlError(
                    f"{url} does not answer as Tandem's SGLang plugin with {PROTOCOL}, but: {answer}; start the servers with this version "
                    "of Tandem, or set rollout.sglang_plugin=false"
                )

    def try_to_read(self, meeting: tuple[str, int]) -> Pending:
        """Have every server rank copy ``TRIAL_BYTES`` out of the memory of the sender at the meeting. The servers must be
        paused. The answer fails if a rank cannot."""
        body = _announced([], [], [], NO_GROUP, question(meeting))
        return self._post("copy out of the learner's memory", RECEIVE_PATH, body)

    def receive_transfer(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        announcement: Announcement,
        version: int | None,
    ) -> Pending:
        """Have every server receive a pipeline stage's weights: uint8 bytes for each of the announcement's counts,
        then their hashes as int64. They come by broadcasts from rank 0 of the joined group or, if the announcement
        names a meeting, out of the caller's memory. The servers compare the hashes with what they received, and fail
        the request if one differs.

        The caller sends while this is pending, and polls ``raise_if_failed``, because a server that refused never
        takes anything. The arguments are those of ``receive_bucket``, for all the stage's tensors. All tensors of a
        bucket have the same one of the ``dtypes``.

        Raises ValueError: no group was joined for broadcasts, or names and shapes do not fit together.
        """
        action = f"receive {len(names)} tensors in {len(announcement.counts)} buckets"
        group_name = self.group_name if announcement.meeting is None else NO_GROUP
        body = _announced(names, dtypes, shapes, group_name, announcement.load_format())
        return self._receive(action, body, version)

    def receive_bucket(
        self, *, names: Sequence[str], dtype: str, shapes: Sequence[Sequence[int]], version: int | None
    ) -> Pending:
        """Have every server receive one uint8 broadcast from rank 0 of the joined group and load its tensors, by
        SGLang's own code.

        The bucket is the concatenation of the tensors' bytes in the given order, all of one dtype. The caller
        broadcasts while this is pending and polls ``raise_if_failed``.

        Args:
            names: Hugging Face names.
            dtype: ``float32``, ``bfloat16`` or ``float16``.
            shapes: of the whole (unsharded) tensors.
            version: the new version, for the last request of an update, which also flushes the cache. None for
                all others, so that a server never reports the new version after an incomplete update.

        Raises ValueError: no group was joined, or names and shapes do not fit together.
        """
        action = f"receive a bucket of {len(names)} tensors"
        body = _announced(names, [dtype] * len(names), shapes, self.group_name, "flattened_bucket")
        return self._receive(action, body, version)

    def _receive(self, action: str, body: dict, version: int | None) -> Pending:
        if body["group_name"] is None:
            raise ValueError("the servers have joined no group for the weights; call join_group first")
        names, dtypes, shapes = (body[field] for field in ("names", "dtypes", "shapes"))
        if not names or not len(names) == len(dtypes) == len(shapes):
            raise ValueError(
                f"a transfer needs at least one name, and a dtype and a shape for each: {len(names)} names, {len(dtypes)} dtypes, "
                f"{len(shapes)} shapes"
            )
        if version is not None:
            # A request to /flush_cache would also collect garbage, which takes 0.4 s on CPU.
            body |= {"weight_version": str(version), "flush_cache": True}
        return self._post(action, RECEIVE_PATH, body)

    def close_update(self) -> list[int]:
        """End the update and return the served version of each replica. Raises ControlError: also for an
        unreadable answer."""
        ending = self._post("end weight update", "/end_weight_update", {})
        versions = self._request_versions()
        ending.wait()
        self._is_open = [False] * len(self._lines)
        return _parse_versions(versions.wait())

    def resume(self) -> None:
        self._post("resume", "/continue_generation", {}).wait()

    def release_memory(self, tags: Sequence[str]) -> None:
        """Free the device memory of ``tags`` (``kv_cache``, ``weights``) and drop its content. The servers
        must be paused.

        On CPU, where SGLang has no such memory, this only empties the cache.
        """
        action = f"release the memory of {' and '.join(tags)}"
        self._post(action, "/release_memory_occupation", {"tags": list(tags)}).wait()

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of ``tags`` again, at the same addresses. The cache is then empty; weights are
        undefined until the learner has sent them."""
        action = f"take the memory of {' and '.join(tags)}"
        self._post(action, "/resume_memory_occupation", {"tags": list(tags)}).wait()

    def versions(self) -> list[int]:
        """The weight version of each replica. Raises ControlError: a version is not a decimal number."""
        return _parse_versions(self._request_versions().wait())

    def _request_versions(self) -> Pending:
        return self._as_pending("read versions", self._send_all("GET", "/model_info", None))

    def probe(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float
    ) -> list[Completion]:
        """One sampled response of each replica, of exactly ``max_new_tokens`` tokens (no token ends it).
        Raises ControlError: also for an unreadable answer."""
        sampling = neutral_sampling_params(max_new_tokens=max_new_tokens, temperature=temperature)
        sampling["ignore_eos"] = True
        body = {"input_ids": list(prompt_ids), "sampling_params": sampling, "return_logprob": True}
        replies = self._post("probe", "/generate", body).wait()
        with _parsing_answers("probe"):
            return [parse_completion(reply, Sent.of(prompt_ids)) for reply in replies]

    def checksums(self) -> list[dict[str, str]]:
        """Per replica, SGLang's checksum of every parameter: 16 hex digits by SGLang's own (fused) names.

        On CPU a checksum is the first 8 bytes of SHA-256 over the tensor's bytes in row-major order. With TP > 1
        each rank hashes its shard and the names begin with ``rank<r>/``. On CUDA SGLang hashes with its own
        kernel. Checksums compare servers with one another and one update with the next.
        """
        replies = self._post("checksums", "/weights_checker", {"action": "checksum"}).wait()
        with _parsing_answers("checksums"):
            return [
                {
                    (name if len(reply["ranks"]) == 1 else f"rank{rank}/{name}"): digest
                    for rank, report in enumerate(reply["ranks"])
                    for name, digest in report["checksums"].items()
                }
                for reply in replies
            ]

    def load_from_disk(self, folder: Path, *, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder of the same model, and flush the cache."""
        body = {
            "model_path": str(Path(folder).resolve()),
            "weight_version": str(version),
            "flush_cache": True,
        }
        self._post("load weights from disk", "/update_weights_from_disk", body).wait()

    def greedy(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[Continuation]]:
        """Per replica, the likeliest continuation of each prompt. Prompts run one at a time and from an empty
        cache, so that the numbers depend only on the weights, and not on the batch. Raises ControlError: also
        for an unreadable answer, such as log-probs that are not finite: these would compare as equal."""
        # Within the timeout, requests that are about to end can end, such as the health check's.
        self._post("flush the cache", f"/flush_cache?timeout={self._timeout_s:g}", {}).wait()
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        continuations = []
        for prompt in prompts:
            body = {
                "input_ids": list(prompt),
                "sampling_params": sampling,
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            replies = self._post("greedy continuation", "/generate", body).wait()
            with _parsing_answers("greedy continuation"):
                continuations.append([_parse_continuation(reply) for reply in replies])
        return [list(by_prompt) for by_prompt in zip(*continuations, strict=True)]

    def _post(self, action: str, path: str, body: dict) -> Pending:
        return self._as_pending(action, self._send_all("POST", path, body))

    def _send_all(self, method: str, path: str, body: dict | None) -> list[Future]:
        return [line.ask(method, path, body) for line in self._lines]

    def _as_pending(self, action: str, futures: Sequence[Future]) -> Pending:
        return Pending(action, futures, self._patience_s)


def _announced(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    group_name: str | None,
    load_format: str,
) -> dict:
    """The body of a request to receive weights."""
    return {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group_name,
        "load_format": load_format,
        "flush_cache": False,
        "torch_empty_cache": False,
    }


def _parse_versions(replies: Sequence[dict]) -> list[int]:
    with _parsing_answers("read versions"):
        return [version_number(reply["weight_version"]) for reply in replies]


@contextmanager
def _parsing_answers(action: str) -> Iterator[None]:
    """Inside, an error of reading an answer becomes a ControlError: it is then the server's failure, which every rank
    hears of."""
    try:
        yield
    except (GenerationError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ControlError(
            f"{action}: a server's answer cannot be read ({type(error).__name__}: {error})"
        ) from error


def _parse_continuation(reply: dict) -> Continuation:
    meta = reply["meta_info"]
    of_prompt = meta["input_token_logprobs"][1:]  # the first token has none
    return Continuation(
        token_ids=list(reply["output_ids"]),
        prompt_logprobs=finite_logprobs(of_prompt).tolist(),
        logprobs=finite_logprobs(meta["output_token_logprobs"]).tolist(),
    )
