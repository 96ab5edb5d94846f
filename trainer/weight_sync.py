"""Publishing: learner weights -> servers, verified before sampling goes on.

All ranks publish together. Each pipeline stage sends its own weights: its ranks gather one tensor after
another (over tensor- and expert-parallel ranks), and the first rank of the stage, its sender, broadcasts them
in a process group that it shares with the servers.

    rank 0             pause -> begin -> [ stage 0 ]------------------------------------> end -> versions -> resume -> probe
    sender of stage 1                      first bucket filled, waits for its turn -> [ stage 1 ] --^
    all other ranks                        gather with their sender, then wait for rank 0

    [ stage ]  announce all of it to the servers; for each bucket: queue its broadcast behind the one in flight, hash it, while
               the stage gathers the next one; then broadcast the hashes

The servers hash what they have received, in the parameters where it went there, and fail the announced request
where a hash differs from the sender's (``rollout/sglang_plugin``). Servers without the plugin get a request per
bucket, and check nothing; only the request that names the version waits for the answers to all earlier ones.

Stages take turns. Servers load one bucket at a time anyway, and the turns make known which stage is the last: its
request names the version and flushes the cache. Rank 0 alone opens and closes an update, and closes it after
all stages have told it what they sent. Each sender asks the servers itself to receive, because a server that
refuses never joins the broadcast, and only its answer says so.

Nothing samples between pause and resume. Responses that are under way then (``rollout.max_staleness``) give up
their place and their cache (SGLang's mode "retract") and go on under the new weights, from a cache that is
computed anew: every token is exactly of the version that SGLang names for it. Any failure of the rollout side
raises on all ranks together and ends the run, so a partial update never serves a training sample. A sender whose
servers failed still finishes the gathering, which its stage needs, and passes its turn on, marked as failed.

The samples themselves are the probe (``check_samples``) if the servers check every byte and the learner scores
each step's samples, those of lag 0, by the weights that sampled them. ``publish`` then sends no probe prompt.
With ``rollout.max_staleness`` it sends none either: a probe would wait behind all responses that the update has
interrupted.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema.launch import LaunchConfig
from configs.schema.rollout import RolloutConfig
from parallel.megatron.groups import Groups
from parallel.megatron.platform import collective_backend, device
from parallel.weights.fake_quantization import with_int8_matrices
from parallel.weights.transfer import (
    Bucket,
    Buffers,
    TransferPlan,
    UnderWay,
    WeightBroadcaster,
    make_buckets,
    plan_transfer,
)
from rollout.client import RolloutError
from rollout.records import Completion
from rollout.run_key import RunKey
from rollout.servers.control import Pending, SGLangControl
from rollout.sglang_plugin.tandem_weight_transfer import Announcement, hash_kind, weight_hash
from trainer.algorithm.mismatch import SampledGap
from trainer.learner import Learner
from trainer.ranks.totals import on_first_rank
from trainer.turns import OwnDevices

GROUP = "tandem-weights"
PROBE_PROMPT = [2 + i % 8 for i in range(12)]
"""Any tokens serve to compare two engines; ids this small exist in every vocabulary."""
PROBE_TOKENS = 4
EXACT_TOLERANCE = 1e-4
"""Allowed difference of a float32 learner and a float32 server: nats on a probe token, probability on any
sampled token."""
UNLIKELY_TOLERANCE = 1e-3
"""Allowed difference in nats on any sampled token. Unlikely tokens show the rounding of their logits."""


class WeightSyncError(RolloutError):
    """The servers do not serve what the learner sent."""


class ForeignSamplesError(RuntimeError):
    """A step was trained on samples of other weights, or of another softmax. This is no interruption, as the
    step's weights are not worth a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentByRank:
    """One rank's part of a transfer; a sender's covers its whole stage."""

    bytes: int = 0
    failure: RolloutError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    version: int
    bytes: int
    seconds: float
    max_logprob_gap: float | None
    """Nats, over the probe's tokens and all replicas; None without a probe."""


class WeightSync:
    """Sends weights to the servers. Every rank has one, and all call it together."""

    def __init__(
        self,
        learner: Learner,
        control: SGLangControl | None,
        rollout: RolloutConfig,
        launch: LaunchConfig,
        *,
        samples_are_probes: bool = False,
        address: str = "127.0.0.1",
        turns: OwnDevices | None = None,
        key: RunKey | None = None,
    ):
        """control: None on all ranks but the first. samples_are_probes: a step's samples are scored by the
        weights that sampled them. address: where the servers reach this rank's host, if it is a sender.
        turns: None where the servers have devices of their own. key: the run's, which the servers check."""
        self._learner, self._control, self._rollout = learner, control, rollout
        self._turns = turns or OwnDevices()
        self._dtype = getattr(torch, rollout.dtype)
        both_are_float32 = self._dtype == learner.engine.dtype == torch.float32
        self._exact = both_are_float32 and rollout.quantization == "none"
        # Servers without the plugin check no bytes; there only the probe checks the weights.
        self._samples_are_probes = samples_are_probes and rollout.sglang_plugin
        self._samples_ahead = rollout.max_staleness > 0 and rollout.sglang_plugin
        self._has_met_servers = False
        self._plan = plan_transfer(learner.engine.export_plan(), dtype=self._dtype, device=device().type)
        self._sender: StageSender | None = None
        self._buffers = Buffers()
        urls = [control.urls if control is not None else None]
        dist.broadcast_object_list(urls, src=0)
        if learner.groups.is_stage_first:
            timeout_s = launch.patience_s
            # Rank 0's control serves its own stage too.
            stage_control = control or SGLangControl(
                urls[0],
                tensor_parallel=rollout.tp,
                timeout_s=timeout_s,
                peer_timeout_s=launch.peer_timeout_s,
                key=key,
            )
            # NCCL refuses two ranks of a group on one GPU; gloo takes a GPU's tensors through host memory.
            # Not run on GPUs by this project.
            backend = "gloo" if self._turns.are_shared else collective_backend()
            with in_turn(learner.groups):
                self._sender = StageSender(
                    stage_control,
                    rollout.tp,
                    backend,
                    timeout_s,
                    address,
                    stage=learner.groups.pp_rank,
                    in_one_request=rollout.sglang_plugin,
                )

    @property
    def _servers(self) -> SGLangControl:
        """The control, which only rank 0 has."""
        assert self._control is not None
        return self._control

    def publish(self) -> SyncResult:
        """Send the current weights as the next version, and prove that the servers serve them.

        Raises RolloutError on all ranks together where a server or the transfer fails.
        """
        self._learner.version += 1
        return self._send(self._learner.version)

    def restore(self) -> SyncResult:
        """Send the current weights under their present version: a resumed run's servers hold the start model."""
        return self._send(self._learner.version)

    def take_over(self, *, sends: bool) -> None:
        """Prepare servers that may have outlived an earlier learner; all ranks together, before any sampling.

        Sends the current weights if ``sends``, if an update broke off, or if the servers hold another version.
        Until the weights are verified the servers stay paused: half an update never serves.
        """
        self._meet_servers()
        needed = [on_first_rank(self._finds_other_weights)]
        dist.broadcast_object_list(needed, src=0)
        if sends or needed[0]:
            self.restore()
        else:
            on_first_rank(lambda: self._servers.resume())

    def _finds_other_weights(self) -> bool:
        return self._servers.take_over() or set(self._servers.versions()) != {self._learner.version}

    def _meet_servers(self) -> None:
        """Once: refuse servers without this version of the plugin, if they should have it."""
        if self._rollout.sglang_plugin and not self._has_met_servers:
            on_first_rank(lambda: self._servers.require_plugin())
        self._has_met_servers = True

    def _send(self, version: int) -> SyncResult:
        started = time.perf_counter()
        groups = self._learner.groups
        self._turns.both()
        self._meet_servers()
        opening = self._control.open_update() if self._control is not None else None
        by_stage: list[SentByRank] = [SentByRank()] * groups.pp_size
        # Rank 0's pipeline group has all senders.
        dist.all_gather_object(by_stage, self._send_stage(version, opening), group=groups.pp_group)
        on_first_rank(lambda: self._close_update(version, by_stage))
        self._turns.servers()
        is_probed = not (self._samples_are_probes or self._samples_ahead)
        gap = self.probe(self._rollout.temperature) if is_probed else None
        total = sum(sent.bytes for sent in by_stage)
        return SyncResult(
            version=version, bytes=total, seconds=time.perf_counter() - started, max_logprob_gap=gap
        )

    def _send_stage(self, version: int, opening: Pending | None) -> SentByRank:
        """This rank's part of the transfer of its pipeline stage."""
        exported = self._learner.engine.export_hf()
        if self._rollout.quantization == "fake_int8":
            exported = with_int8_matrices(exported)
        sent = SentByRank()
        if self._sender is not None:
            try:
                sent = self._send_as_sender(exported, version, opening)
            except RolloutError as failure:
                sent = SentByRank(failure=failure)
        for _ in exported:  # the gathering needs every rank of the stage, to its end
            pass
        return sent

    def _send_as_sender(
        self, exported: Iterator[tuple[str, Tensor]], version: int, opening: Pending | None
    ) -> SentByRank:
        groups = self._learner.groups
        buckets = make_buckets(exported, self._plan, self._buffers)
        first = next(buckets)
        with in_turn(groups):
            # Only the last stage's request names the version (and flushes), so servers never report the new
            # version of an update that broke off.
            last_of_all = version if groups.pp_rank == groups.pp_size - 1 else None
            size = self._sender.send(chain([first], buckets), self._plan, last_of_all, opening)
        self._buffers.release()
        return SentByRank(bytes=size)

    def _close_update(self, version: int, by_stage: Sequence[SentByRank]) -> None:
        for sent in by_stage:
            if sent.failure is not None:
                raise sent.failure
        served = self._servers.close_update()
        if set(served) != {version}:
            raise WeightSyncError(f"sent weight version {version}, but the servers report {served}")
        if not self._turns.are_shared:  # else it is not the servers' turn yet
            self._servers.resume()

    def probe(self, temperature: float) -> float:
        """Largest |log p_server - log p_learner| over tokens that each replica samples for the probe prompt,
        in nats.

        Raises WeightSyncError above 1e-4 if both engines hold float32, where only the order of rounding differs.
        """

        def ask() -> list[Completion]:
            return self._servers.probe(PROBE_PROMPT, max_new_tokens=PROBE_TOKENS, temperature=temperature)

        answers = [on_first_rank(ask)]
        dist.broadcast_object_list(answers, src=0)
        completions = answers[0]
        with self._turns.learner_there():
            mine = self._learner.logprobs_of(PROBE_PROMPT, completions, temperature=temperature)
        theirs = [x for completion in completions for x in completion.rollout_logprobs]
        ours = [x for row in mine for x in row]
        # torch's maximum, unlike Python's, does not lose a NaN.
        differences = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
        gap = differences.abs().max().item()
        if not math.isfinite(gap):
            raise WeightSyncError(
                f"a probe log-prob is not finite after version {self._learner.version}: server {theirs}, learner {ours}"
            )
        if self._exact and gap > EXACT_TOLERANCE:
            raise WeightSyncError(
                f"after version {self._learner.version}, learner and server differ by {gap:.2e} nats on the probe prompt at temperature "
                f"{temperature} (float32 on both sides allows {EXACT_TOLERANCE:g}): the server does not serve these weights or this softmax"
            )
        return gap

    def check_samples(self, gap: SampledGap | None) -> None:
        """Raise ForeignSamplesError if a sampled token shows that the servers' policy was not the learner's
        (float32 on both sides)."""
        if gap is None or not (self._exact and self._samples_are_probes):
            return
        for name, value, tolerance, unit in (
            ("abs_prob_max", gap.probability, EXACT_TOLERANCE, ""),
            ("logprob_gap_max", gap.nats, UNLIKELY_TOLERANCE, " nats"),
        ):
            if not value <= tolerance:
                raise ForeignSamplesError(
                    f"learner and server differ by {value:.2e}{unit} on a token sampled with version {self._learner.version - 1} "
                    f"(mismatch/{name}; float32 on both sides allows {tolerance:g}): the server did not serve these weights or this softmax"
                )

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


class StageSender:
    """One pipeline stage's line to all servers: a transfer group, and the requests that belong to it."""

    def __init__(
        self,
        control: SGLangControl,
        tensor_parallel: int,
        backend: str,
        timeout_s: float,
        address: str = "127.0.0.1",
        *,
        stage: int = 0,
        in_one_request: bool = True,
    ):
        """Make the transfer group. The servers are told over HTTP to join it, and join while this process does.

        in_one_request: the servers have Tandem's plugin."""
        self._control, self._in_one_request = control, in_one_request
        world_size = 1 + len(control.urls) * tensor_parallel
        # The same name in every life of the run, so that servers that outlive a learner can leave its group.
        name = f"{GROUP}-{stage}"
        self._broadcaster = WeightBroadcaster(
            world_size=world_size, backend=backend, timeout_s=timeout_s, address=address, group_name=name
        )
        joining = control.join_group(
            master_address=self._broadcaster.address,
            master_port=self._broadcaster.port,
            world_size=world_size,
            group_name=self._broadcaster.group_name,
            backend=backend,
        )
        self._broadcaster.join(check=joining.raise_if_failed)
        joining.wait()

    def send(
        self,
        buckets: Iterable[Bucket],
        plan: TransferPlan,
        version: int | None,
        opening: Pending | None = None,
    ) -> int:
        """Send the buckets of ``plan``; the last request names ``version``, None if a later stage's does. While one
        bucket is in flight, the next is filled (by ``buckets``) and queued.

        opening: the pending answer to the opening of the update. The first answer that fails ends the transfer.
        Returns the bytes sent.
        """
        answers = Answers([] if opening is None else [opening])
        answers.raise_if_failed()
        if self._in_one_request:
            return self._send_in_one_request(buckets, plan, version, answers)
        return self._send_by_requests(buckets, version, answers)

    def _send_in_one_request(
        self, buckets: Iterable[Bucket], plan: TransferPlan, version: int | None, answers: "Answers"
    ) -> int:
        kind = hash_kind(device())
        announcement = Announcement(kind, tuple(plan.counts), is_whole=version is not None)
        answers.add(
            self._control.receive_transfer(
                names=plan.names,
                dtype=_dtype_name(plan.dtype),
                shapes=plan.shapes,
                announcement=announcement,
                version=version,
            )
        )
        in_flight: UnderWay[None] | None = None
        hashes, sent = [], 0
        for bucket in buckets:
            lined_up = self._broadcaster.start(bucket.bytes)
            hashes.append(weight_hash(bucket.bytes, kind))
            sent += bucket.bytes.numel()
            if in_flight is not None:
                _wait_for(in_flight, answers)  # the next bucket takes its buffer
            in_flight = lined_up
        _wait_for(self._broadcaster.start(torch.stack(hashes)), answers)
        answers.wait_for_all_but(0)
        return sent

    def _send_by_requests(self, buckets: Iterable[Bucket], version: int | None, answers: "Answers") -> int:
        in_flight: UnderWay[None] | None = None
        sent = 0
        for bucket in buckets:
            answers.raise_if_failed()
            names_version = version is not None and bucket.is_last
            if names_version and in_flight is not None:
                _wait_for(in_flight, answers)
                # Else servers that failed to load one bucket would call the rest the new version.
                answers.wait_for_all_but(0)
            receiving = self._control.receive_bucket(
                names=bucket.names,
                dtype=_dtype_name(bucket.dtype),
                shapes=bucket.shapes,
                version=version if names_version else None,
            )
            answers.add(receiving)
            lined_up = self._broadcaster.start(bucket.bytes)
            sent += bucket.bytes.numel()
            if in_flight is not None:
                _wait_for(in_flight, answers)  # the next bucket takes its buffer
                answers.wait_for_all_but(2)
            in_flight = lined_up
        if in_flight is not None:
            _wait_for(in_flight, answers)
        answers.wait_for_all_but(0)
        return sent

    def leave(self) -> None:
        """Destroy the transfer group on both sides."""
        self._control.leave_group()
        self._broadcaster.close()

    def close(self) -> None:
        self.leave()
        self._control.close()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Answers:
    """Answers that are still due, oldest first."""

    def __init__(self, pending: Iterable[Pending]):
        self._pending = deque(pending)

    def add(self, pending: Pending) -> None:
        self._pending.append(pending)

    def raise_if_failed(self) -> None:
        for pending in self._pending:
            pending.raise_if_failed()

    def wait_for_all_but(self, newest: int) -> None:
        """Raises ControlError where one has failed."""
        while len(self._pending) > newest:
            self._pending.popleft().wait()


def _wait_for(broadcast: UnderWay[None], answers: Answers) -> None:
    try:
        broadcast.wait(check=answers.raise_if_failed)
    except RolloutError:
        raise
    except RuntimeError as error:  # from torch; all other members of this group are servers
        raise WeightSyncError(f"the broadcast of a bucket to the servers failed: {error}") from error


@contextmanager
def in_turn(groups: Groups) -> Iterator[None]:
    """The senders of the pipeline stages enter one after another, each after the stage before has left.

    Raises RolloutError if an earlier stage failed inside, so that no stage waits for ever.
    """
    failed = torch.zeros(1)
    if groups.pp_rank > 0:
        dist.recv(
            failed, src=dist.get_global_rank(groups.pp_group, groups.pp_rank - 1), group=groups.pp_group
        )
    try:
        if failed.item():
            raise WeightSyncError("an earlier pipeline stage has failed to send its weights")
        yield
    except BaseException:
        failed.fill_(1)
        raise
    finally:
        if groups.pp_rank < groups.pp_size - 1:
            dist.send(
                failed, dst=dist.get_global_rank(groups.pp_group, groups.pp_rank + 1), group=groups.pp_group
            )
