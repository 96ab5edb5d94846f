"""One step of one rank of a run, on a device without memory and arithmetic: ``tandem simulate``.

The step is ``trainer/loop.py``'s own, with the learner, its engines and its batch. Two parts are replaced: the samples are
made up here instead of by the sample role, and weights for the servers end in the buckets in which they would be sent.

The step is shorter than the run's: one minibatch, with as many micro-batches as fill the pipeline. Each is filled to
``learner.token_budget`` by samples of one length that share no prompt. A memory plan is for this case.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import trainer.learner
from configs.schema import RunConfig
from parallel.engine import MegatronEngine, ValueEngine
from parallel.megatron.optimizer import gradient_buffers, own_tensors
from parallel.planning.simulated import START, Collective, MadeStep, Part, SimulatedRank, made_step
from parallel.planning.work import row_counts
from parallel.simulation.device import Memory, SimulatedDevice
from parallel.simulation.ranks import Collectives
from parallel.weights.transfer import Buffers, make_buckets, plan_transfer
from rollout.records import (
    COUNTS,
    LOGPROBS,
    MASK,
    TOKEN_IDS,
    VERSIONS,
    FinishReason,
    Group,
    Trajectory,
    Turn,
    digest,
)
from trainer.batch.plan import packed_length
from trainer.batch.sharing_out import Share
from trainer.checkpointing import Checkpointer
from trainer.learner import Learner
from trainer.loop import Run, train
from trainer.recording import Recorder
from trainer.sample_keeping import SampleKeeper
from trainer.sampling import Sampled, SharedSampler
from trainer.weight_sync import SyncResult, WeightSync


class Watch:
    """Records the cost of each part of a step. ``doing`` is called when a part begins (``Run.doing``)."""

    def __init__(self, device: SimulatedDevice, collectives: Collectives):
        self._device, self._collectives = device, collectives
        self.parts: dict[str, Part] = {}
        self._name: str | None = None
        self._began = 0.0

    def doing(self, name: str) -> None:
        self.end()
        self._name, self._began = name, time.perf_counter()
        self._device.flops = self._device.host_reads = 0
        self._collectives.calls.clear()
        self._collectives.bytes.clear()
        self._device.memory.start_peak()

    def end(self) -> None:
        """Record the part that has run until now."""
        if self._name is None:
            return
        part, memory = self.parts.setdefault(self._name, Part()), self._device.memory
        if memory.peak > part.peak:
            part.peak, part.at_peak = memory.peak, memory.at_peak
        part.flops += self._device.flops
        part.host_reads += self._device.host_reads
        part.seconds += time.perf_counter() - self._began
        part.collectives += [
            Collective(**asdict(kind), calls=calls, bytes=self._collectives.bytes[kind])
            for kind, calls in self._collectives.calls.items()
        ]
        self._name = None


def simulate(
    config: RunConfig, device: SimulatedDevice, collectives: Collectives, folder: Path
) -> SimulatedRank:
    """Build this rank's learner and run one step. Call it inside ``simulated_rank``.

    folder: an empty folder for the files of a step.
    """
    watch, short = Watch(device, collectives), _short(config)
    watch.doing(START)
    with device.memory.allocating("parameters"):
        learner = Learner(short)
    name_parts(device.memory, learner)
    device.memory.start_peak()  # what stays, now with its names
    architecture = learner.engine.architecture
    step = made_step(config, architecture)
    rows, _ = row_counts(config.layout, step.tokens)
    collectives.message = (rows, 1, architecture.hidden_size)
    sync = _Sync(learner, config, device.memory)
    device.memory.part = "activations"  # until the weights are sent
    num_kept = config.rollout.top_k if config.rollout.is_truncated else 0
    run = Run(
        config=short,
        learner=learner,
        sampler=cast(SharedSampler, _Sampler(step, learner, short, num_kept=num_kept)),
        weight_sync=cast(WeightSync, sync),
        checkpointer=Checkpointer(folder, short.checkpoint),
        recorder=Recorder(folder, "none", config.correction),
        samples=SampleKeeper(folder, short, None),
        tracker=None,
        ledger=None,
        doing=watch.doing,
        profiled=lambda step: nullcontext(),
    )
    with patch.object(trainer.learner, "scatter", _own_share):
        train(run)
    watch.end()
    return SimulatedRank(
        rank=learner.groups.rank,
        stage=learner.groups.pp_rank,
        step=step,
        parameters=sum(p.numel() for chunk in learner.engine.chunks for p in chunk.parameters()),
        parts=watch.parts,
        buckets=tuple(sync.buckets),
    )


def _own_share(shares: Sequence[Share], share_of: Callable[[int], int]) -> Share:
    """Every rank of a simulation has the samples of all ranks."""
    return shares[share_of(dist.get_rank())]


def _short(config: RunConfig) -> RunConfig:
    """The run's config for one step of one minibatch, without checkpoints, evaluations and kept samples."""
    old = "always" if config.scores_old else config.learner.old_logprobs
    return config.model_copy(
        update={
            "steps": 1,
            "learner": config.learner.model_copy(update={"minibatches": 1, "old_logprobs": old}),
            # Its one step trains the policy too.
            "critic": config.critic and config.critic.model_copy(update={"warmup_steps": 0}),
            "checkpoint": config.checkpoint.model_copy(update={"every": 0}),
            "evaluation": config.evaluation.model_copy(update={"every": 0, "at_ends": False}),
            "tracking": config.tracking.model_copy(update={"sample_groups": 0}),
        }
    )


def name_parts(memory: Memory, learner: Learner) -> None:
    """Name the tensors that stay as gradients, optimizer, reference or critic; all others are parameters."""
    engine, critic = learner.engine, learner.critic and learner.critic.engine
    memory.relabel(gradient_buffers(engine._trained), "gradients")
    memory.relabel(_optimizer_state(engine), "optimizer")
    if learner._reference is not None:
        memory.relabel(_parameters(learner._reference), "reference")
    if critic is not None:
        for tensors in (_parameters(critic), gradient_buffers(critic._trained), _optimizer_state(critic)):
            memory.relabel(tensors, "critic")


def _parameters(engine: MegatronEngine | ValueEngine) -> Iterator[torch.Tensor]:
    for chunk in engine.chunks:
        yield from chunk.parameters()


def _optimizer_state(engine: MegatronEngine | ValueEngine) -> Iterator[torch.Tensor]:
    """On the device: it may count steps on the host."""
    return (t for t in own_tensors(engine._optimizer, _parameters(engine)) if t.is_meta)


class _Sampler:
    """Hands out one step's samples, the same on every rank."""

    def __init__(self, step: MadeStep, learner: Learner, config: RunConfig, *, num_kept: int = 0):
        """num_kept: ids that the sampler kept for each token of a response; 0: it did not truncate."""
        self._step, self._count = step, step.samples * step.microbatches * config.layout.dp_size
        self._parts = config.compared_parts or {}
        self._vocab_size = learner.engine.architecture.vocab_size
        self._num_kept = num_kept

    def next_groups(self, *args, **kwargs) -> Sampled:
        samples = [self._trajectory(sibling) for sibling in range(self._count)]
        return Sampled(groups=[Group(group_id=0, prompt_id="simulated", trajectories=samples)], stats=None)

    def _trajectory(self, sibling: int) -> Trajectory:
        length = self._step.places + 1
        assert packed_length(range(length)) == self._step.places
        more, token = divmod(sibling, self._vocab_size)
        tokens = np.full(length, token, dtype=TOKEN_IDS)  # each has another prompt
        tokens[0] = (token + more) % self._vocab_size
        start = length - self._step.response
        is_response = np.arange(length) >= start
        turn = Turn(
            start=start,
            end=length,
            prompt_digest=digest(tokens[:start]),
            response_digest=digest(tokens[start:]),
            finish_reason=FinishReason.LENGTH,
        )
        num_kept, kept_ids = self._kept(tokens, is_response)
        return Trajectory(
            group_id=0,
            sibling_id=sibling,
            prompt_id="simulated",
            token_ids=tokens,
            response_mask=is_response.astype(MASK),
            rollout_logprobs=np.where(is_response, -1.0, 0.0).astype(LOGPROBS),
            token_versions=np.zeros(length, dtype=VERSIONS),
            turns=[turn],
            reward=float(sibling % 2),
            reward_parts=dict.fromkeys(self._parts, float(sibling % 2)),
            num_kept=num_kept,
            kept_ids=kept_ids,
        )

    def _kept(
        self, tokens: np.ndarray, is_response: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """The token itself, and those after it in the vocabulary."""
        if not self._num_kept:
            return None, None
        count = min(self._num_kept, self._vocab_size)
        ids = (tokens[is_response, None] + np.arange(count, dtype=TOKEN_IDS)) % self._vocab_size
        return is_response * COUNTS(count), ids.ravel()

    def drain(self, within_s: float) -> None: ...

    def admit(self, *args, **kwargs) -> None: ...

    def state(self) -> None: ...


class _Sync:
    """Fills the buckets of a transfer, and sends them nowhere."""

    def __init__(self, learner: Learner, config: RunConfig, memory: Memory):
        self._memory = memory
        self._learner = learner
        self._plan = plan_transfer(
            learner.engine.export_plan(),
            dtype=getattr(torch, config.rollout.dtype),
            device="cuda",
            precision=config.rollout.precision,
            packs=config.rollout.packs,
        )
        self.buckets: list[int] = []

    def publish(self) -> SyncResult:
        self._learner.version += 1
        with self._memory.allocating("transfer"):
            for bucket in make_buckets(self._learner.engine.export_hf(), self._plan, Buffers("cuda")):
                self.buckets.append(bucket.bytes.numel())
        return SyncResult(
            version=self._learner.version, bytes=sum(self.buckets), seconds=0.0, max_logprob_gap=None
        )

    def check_samples(self, *args) -> None: ...
