"""Publishing: learner weights -> servers, verified before sampling goes on.

One publish, all ranks together (the export gathers tensor-parallel shards); rank 0 talks to the servers:

    pause -> begin -> for each bucket: tell the servers, broadcast (the last flushes) -> end
          -> versions and checksums -> resume -> probe

Nothing samples between pause and the end of the probe: the learner asks for groups only after ``publish`` has returned.
Any failure raises, which ends the run: a partial update never serves a training sample.

Where checksums have shown every byte to be served, and the learner scores each step's samples by the very weights that sampled them,
the samples themselves are the probe (``check_samples``), and ``publish`` asks for none of its own.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.weight_transfer import WeightBroadcaster, make_buckets
from rollout.records import Completion
from rollout.sglang_control import SGLangControl, expected_checksums
from trainer.learner import Learner

T = TypeVar("T")

EXACT_TOLERANCE = 1e-4
"""What a float32 learner and a float32 server may differ by: nats on a probe token, probability on any sampled token."""
UNLIKELY_TOLERANCE = 1e-3
"""Nats on any sampled token, of which some are so unlikely that the rounding of their logits shows."""


class WeightSyncError(RuntimeError):
    """The servers do not serve what the learner sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    version: int
    bytes: int
    seconds: float
    max_logprob_gap: float | None
    """Nats, over the probe's tokens and all replicas; None without a probe."""


class WeightSync:
    """``control`` is None on all ranks but the first."""

    def __init__(
        self,
        learner: Learner,
        control: SGLangControl | None,
        *,
        rollout_dtype: str,
        tensor_parallel: int,
        backend: str,
        temperature: float,
        probe_prompt: list[int],
        probe_tokens: int,
        timeout_s: float,
        samples_are_probes: bool = False,
    ):
        """samples_are_probes: ``mismatch/logprob_gap_max`` of a step is of the weights that sampled it."""
        self._learner, self._control = learner, control
        self._dtype = getattr(torch, rollout_dtype)
        self._exact = rollout_dtype == "float32" and learner.engine.dtype == torch.float32
        self._temperature, self._probe_prompt, self._probe_tokens = temperature, probe_prompt, probe_tokens
        # SGLang's checksum is SHA-256 of whole tensors only on CPU at TP 1; elsewhere the probe stands alone.
        has_checksums = tensor_parallel == 1 and backend == "gloo"
        self._checks_bytes = control is not None and has_checksums
        self._samples_are_probes = samples_are_probes and has_checksums
        self._broadcaster = None
        if control is not None:
            self._broadcaster = self._join(control, tensor_parallel, backend, timeout_s)

    @staticmethod
    def _join(control: SGLangControl, tensor_parallel: int, backend: str, timeout_s: float) -> WeightBroadcaster:
        """Make the transfer group: the servers join (told over HTTP) while this process does."""
        broadcaster = WeightBroadcaster(world_size=1 + len(control.urls) * tensor_parallel, backend=backend, timeout_s=timeout_s)
        joining = control.join_group(
            master_address=broadcaster.address,
            master_port=broadcaster.port,
            world_size=broadcaster.world_size,
            group_name=broadcaster.group_name,
            backend=backend,
        )
        broadcaster.join(check=joining.raise_if_failed)
        joining.wait()
        return broadcaster

    def publish(self) -> SyncResult:
        """Send the current weights under the next version and prove that they are what the servers serve."""
        return self._send(self._learner.version + 1)

    def restore(self) -> SyncResult:
        """Send the current weights under their own version: after a resume, when the servers hold the model of the start."""
        return self._send(self._learner.version)

    def _send(self, version: int) -> SyncResult:
        started, sent = time.perf_counter(), 0
        if self._control is not None:
            self._control.pause()
            self._control.begin_update()
        expected: dict[str, str] = {}
        buckets = make_buckets(self._tap(self._learner.engine.export_hf(), expected), dtype=self._dtype)
        for bucket, is_last in with_last(buckets):
            if self._control is not None:
                # Only the last bucket names the version (and flushes): an update that breaks off is never reported under its new one.
                receiving = self._control.receive_bucket(
                    names=bucket.names, dtype=bucket.dtype, shapes=bucket.shapes, version=version if is_last else None
                )
                self._broadcaster.broadcast(bucket, check=receiving.raise_if_failed)
                receiving.wait()
                sent += bucket.bytes.numel()
        if self._control is not None:
            self._control.end_update()
            self._check_served(version, expected)
            self._control.resume()
        self._learner.version = version
        gap = None if self._samples_are_probes else self.probe(self._temperature)
        return SyncResult(version=version, bytes=sent, seconds=time.perf_counter() - started, max_logprob_gap=gap)

    def _tap(self, tensors: Iterable[tuple[str, Tensor]], expected: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Pass the exported tensors on, in the served dtype; afterwards ``expected`` holds the checksums the servers must report."""
        seen = []
        for name, tensor in tensors:
            tensor = tensor.to(self._dtype)
            if self._checks_bytes:
                seen.append((name, tensor))
            yield name, tensor
        expected.update(expected_checksums(seen))

    def _check_served(self, version: int, expected: dict[str, str]) -> None:
        served = self._control.versions()
        if set(served) != {version}:
            raise WeightSyncError(f"sent weight version {version}, but the servers report {served}")
        if not self._checks_bytes:
            return
        for url, found in zip(self._control.urls, self._control.checksums(), strict=True):
            wrong = sorted(name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name))
            if wrong or not expected:
                raise WeightSyncError(f"{url} holds other bytes than were sent as version {version}, in {len(wrong)} tensors: {wrong[:5]}")

    def probe(self, temperature: float) -> float:
        """Largest |log p_server - log p_learner| over tokens that each replica samples for the probe prompt, in nats.

        Raises WeightSyncError above 1e-4 when both engines hold float32: then only rounding order may differ.
        """
        answers: list[list[Completion] | None] = [None]
        if self._control is not None:
            answers = [self._control.probe(self._probe_prompt, max_new_tokens=self._probe_tokens, temperature=temperature)]
        dist.broadcast_object_list(answers, src=0)
        completions = answers[0]
        mine = self._learner.logprobs_of(self._probe_prompt, completions, temperature=temperature)
        theirs = [x for completion in completions for x in completion.rollout_logprobs]
        ours = [x for row in mine for x in row]
        # torch's maximum, unlike Python's, does not lose a NaN.
        gap = (torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)).abs().max().item()
        if not math.isfinite(gap):
            raise WeightSyncError(f"a probe log-prob is not finite after version {self._learner.version}: server {theirs}, learner {ours}")
        if self._exact and gap > EXACT_TOLERANCE:
            raise WeightSyncError(
                f"after version {self._learner.version}, learner and server differ by {gap:.2e} nats on the probe prompt at temperature "
                f"{temperature} (float32 on both sides allows {EXACT_TOLERANCE:g}): the server does not serve these weights or this softmax"
            )
        return gap

    def check_samples(self, metrics: Mapping[str, float]) -> None:
        """Raise WeightSyncError where a sampled token shows that the servers' policy was not the learner's (float32 on both sides)."""
        if not (self._exact and self._samples_are_probes):
            return
        for name, tolerance, unit in (("abs_prob_max", EXACT_TOLERANCE, ""), ("logprob_gap_max", UNLIKELY_TOLERANCE, " nats")):
            gap = metrics.get(f"mismatch/{name}", 0.0)
            if not gap <= tolerance:
                raise WeightSyncError(
                    f"learner and server differ by {gap:.2e}{unit} on a token sampled with version {self._learner.version - 1} "
                    f"(mismatch/{name}; float32 on both sides allows {tolerance:g}): the server did not serve these weights or this softmax"
                )

    def close(self) -> None:
        if self._control is not None:
            self._control.leave_group()
            self._control.close()
            self._broadcaster.close()


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last one."""
    iterator = iter(items)
    for item in iterator:
        for following in iterator:
            yield item, False
            item = following
        yield item, True
