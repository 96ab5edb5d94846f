"""Ranks that train, are interrupted and continue. Learner, loop, checkpoints, tracker and the sample role's wire
are the product's. The engine of the rollout is ``FakeEngine``, so samples depend only on prompt, seed and weight
version."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from configs.loader import load_config
from configs.schema import RunConfig
from configs.schema.launch import LaunchConfig
from configs.schema.layout import parse_layout
from configs.schema.rollout import RolloutConfig
from launch.processes.run_folder import RunFolder
from parallel.megatron.groups import destroy_groups
from parallel.weights.transfer import plan_transfer
from rollout.client import GenerationError
from rollout.records import FinishReason, Prompt, Score
from rollout.sampling.order import epoch_order
from rollout.sampling.remote import RemoteSampler
from rollout.sampling.role import serve
from rollout.sampling.sampler import GroupSampler
from rollout.servers.control import ControlError, SGLangControl
from rollout.tasks import Task
from rollout.tokenization import load_tokenizer
from tests.support.fake_engine import FakeEngine, single_turns
from tests.support.megatron_workers import make_engine
from tests.support.server_specs import KEY
from trainer import weight_sync
from trainer.checkpointing import Checkpointer
from trainer.engine_agreement import EngineAgreement
from trainer.learner import Learner
from trainer.loop import Run, evaluate_before, saved_where_interrupted, train
from trainer.ranks.interruption import INTERRUPTIONS
from trainer.ranks.totals import on_first_rank
from trainer.recording import Recorder
from trainer.sample_keeping import SampleKeeper
from trainer.sampling import SharedSampler
from trainer.tracking import mlflow_thread
from trainer.tracking.ledger import LEDGER, Ledger
from trainer.tracking.tracker import Tracker
from trainer.weight_sync import SyncResult, WeightSync

RECIPE = Path(__file__).resolve().parents[2] / "configs/recipes/countdown_tiny.yaml"
STEPS = 4
SETTINGS = (
    f"steps={STEPS}", "rollout.prompts_per_step=2", "rollout.group_size=3", "rollout.max_new_tokens=6", "learner.token_budget=64",
    "evaluation={every: 2, at_ends: true}", "checkpoint.every=0", "record_batches=all",
    "kl={coefficient: 0.05, place: reward, controller: {type: adaptive, target: 0.1, horizon: 200}}",
)  # fmt: skip


@dataclass
class Script:
    """What is to go wrong: ``what`` at the ``at``-th time that ``where`` is reached in one life of the run."""

    where: str = "nowhere"
    """sampling, evaluation, update or publish."""
    at: int = 0
    what: str = ""
    """stop: a stop is requested while the sample role waits forever. fail: the rollout side fails. silent: no
    answer at all. die: the learner's own error, on every rank."""
    stop: str | None = None
    """The reason of the stop, once it is requested."""
    _times: dict[str, int] = field(default_factory=dict)

    def reached(self, where: str) -> str | None:
        self._times[where] = self._times.get(where, 0) + 1
        return self.what if where == self.where and self._times[where] == self.at else None


class EvenLength:
    retries = 0

    def source_name(self, prompt: Prompt) -> None:
        return None

    async def score(
        self, prompt: Prompt, response_text: str, *, num_tokens: int, finish_reason: FinishReason
    ) -> Score:
        await asyncio.sleep(0)
        even = len(response_text) % 2 == 0
        return Score(value=float(even) + 0.1 * num_tokens, parts={}, correct=even)


class ScriptedSampler(GroupSampler):
    script: Script

    async def next_groups(self, count: int, **limits: int):
        await self._play("sampling")
        return await super().next_groups(count, **limits)

    async def evaluate(self):
        await self._play("evaluation")
        return await super().evaluate()

    async def _play(self, where: str) -> None:
        match self.script.reached(where):
            case "stop":
                self.script.stop = "the test asked"
                await asyncio.Event().wait()
            case "silent":
                await asyncio.Event().wait()
            case "fail":
                raise GenerationError("the servers are gone")


class ScriptedSync:
    """Replaces WeightSync: the version goes to the engine, and nothing is sent."""

    def __init__(self, learner: Learner, engine: FakeEngine, script: Script):
        self._learner, self._engine, self._script = learner, engine, script
        engine.version = learner.version

    def publish(self) -> SyncResult:
        self._learner.version += 1
        on_first_rank(self._send)
        return SyncResult(version=self._learner.version, bytes=0, seconds=0.0, max_logprob_gap=None)

    def _send(self) -> None:
        match self._script.reached("publish"):
            case "stop":  # the step is nearly done
                self._script.stop = "the test asked"
            case "fail":
                raise ControlError("a server is gone")
        self._engine.version = self._learner.version

    def check_samples(self, gap, farthest) -> None:
        return None


def toy_prompts(count: int, name: str) -> list[Prompt]:
    ids = [[3 + (i + j) % 15 for j in range(1 + i % 4)] for i in range(count)]
    return [
        Prompt(prompt_id=f"{name}{i}", token_ids=ids[i], text=f"text {i}", reference=str(i))
        for i in range(count)
    ]


def start_sample_role(config: RunConfig, engine: FakeEngine, script: Script) -> RemoteSampler:
    scorer, train = EvenLength(), toy_prompts(7, "p")
    samples = single_turns(
        load_tokenizer(config.model.path), scorer, max_new_tokens=config.rollout.max_new_tokens
    )
    sampler = ScriptedSampler(
        client=engine,
        evaluation_client=engine,
        task=Task(name="toy", train=train, heldout=toy_prompts(4, "h")),
        samples=samples,
        evaluation_samples=samples,
        scorer=scorer,
        order=lambda epoch: epoch_order(len(train), seed=config.seed, epoch=epoch),
        config=config,
    )
    sampler.script = script
    addresses, ready = [], threading.Event()

    def announce(address: str) -> None:
        addresses.append(address)
        ready.set()

    # A daemon: if a request hangs, the role ends with this process, as it does with its supervisor.
    threading.Thread(
        target=lambda: asyncio.run(serve(sampler, announce=announce, key=KEY, doing=print)), daemon=True
    ).start()
    assert ready.wait(20)
    return RemoteSampler(addresses[0], timeout_s=15.0 if script.what == "silent" else 60.0, key=KEY)


def live(config: RunConfig, folder: Path, script: Script) -> dict[str, Any]:
    """One attempt of the run in ``folder``, resumed if it holds a checkpoint: how it ended, and what it had
    then."""
    learner, engine, run_folder = Learner(config), FakeEngine(), RunFolder(folder)
    if learner.is_first_rank:
        run_folder.claim()
    dist.barrier()
    remote = start_sample_role(config, engine, script) if learner.is_first_rank else None
    sampler = SharedSampler(remote, lambda: script.stop)
    checkpointer = Checkpointer(folder / "checkpoints", config.checkpoint)
    progress = checkpointer.restore(learner, sampler)
    resumed = progress.step if progress else None
    update, ended = learner.update, None

    def scripted_update(*arguments, **named):
        match script.reached("update"):
            case "die":
                raise ArithmeticError("a loss is not finite")
            case "stop":
                script.stop = "the test asked"
        return update(*arguments, **named)

    learner.update = scripted_update
    tracker = Tracker(config, folder, resumed_from_step=resumed) if learner.is_first_rank else None
    run = Run(
        config=config,
        learner=learner,
        sampler=sampler,
        weight_sync=ScriptedSync(learner, engine, script),
        checkpointer=checkpointer,
        recorder=Recorder(folder / "batches", config.record_batches, config.correction),
        samples=SampleKeeper(run_folder.samples, config, tracker),
        tracker=tracker,
        ledger=Ledger(folder / LEDGER, keep_until=resumed or 0) if learner.is_first_rank else None,
        first_step=1 if resumed is None else resumed + 1,
        evaluation_owed=progress is not None and progress.evaluation_owed,
        doing=lambda part: None,
        profiled=lambda step: contextlib.nullcontext(),
    )
    try:
        with run.tracker or contextlib.nullcontext(), saved_where_interrupted(run):
            evaluate_before(run)
            train(run)
    except (*INTERRUPTIONS, ArithmeticError) as error:
        ended = f"{type(error).__name__}: {error}"
    if learner.is_first_rank:
        remote.close()  # left to the garbage collector, its context may wait forever for a socket that is collected later
        run_folder._held.pop().close()  # the lock goes with the process, which here lives on
    dist.barrier()
    return {
        "ended": ended,
        "resumed": resumed,
        "complete": checkpointer.complete,
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").glob("step_*")),
        "version": learner.version,
        "kl_coefficient": learner.kl_in_reward.state,
        "position": sampler.state(),
        "weights": {name: tensor.clone() for name, tensor in learner.engine.export_hf()},
    }


class FakeServers:
    """The servers of the control and of every stage's sender. ``fails``: the place where they fail."""

    def __init__(self):
        self.urls, self.fails, self.version = ["server"], "", None

    def at(self, place: str) -> None:
        if place == self.fails:
            raise ControlError(f"{place} failed")

    def require_plugin(self) -> None:
        """They have it."""

    def open_update(self) -> None:
        """What the sender of the first stage waits for comes by itself."""

    def close_update(self) -> list[int]:
        self.at("close")
        return [self.version]

    def resume(self) -> None:
        self.at("resume")


class FakeSender:
    """Replaces StageSender: takes every bucket and sends none."""

    def __init__(self, servers: FakeServers, stage: int):
        self._servers, self._stage = servers, stage

    def send(self, buckets, plan, version, opening):
        sent = 0
        for number, bucket in enumerate(buckets):
            self._servers.at(f"stage {self._stage}, bucket {number}")
            sent += bucket.bytes.numel()
        return sent


def work_failing_publishes(folder: Path, failures: dict[str, list[str]]) -> dict[str, dict[str, tuple]]:
    """Publishes that fail, by layout and place, each followed by one that does not: what was raised, the
    versions, and the bytes sent."""
    weight_sync.plan_transfer = partial(plan_transfer, max_bytes=8192)
    found: dict[str, dict[str, tuple]] = {}
    rollout, launch = RolloutConfig(dtype="float32"), LaunchConfig(collective_timeout_s=60.0)
    for layout, places in failures.items():
        engine = make_engine(folder, layout=parse_layout(layout))
        learner = SimpleNamespace(engine=engine, groups=engine.groups, version=0)
        servers = FakeServers()
        weight_sync.StageSender = lambda *unused, servers=servers, stage, in_one_request: FakeSender(
            servers, stage
        )
        sync = WeightSync(
            learner,
            servers if dist.get_rank() == 0 else None,
            rollout,
            launch,
            agreement=EngineAgreement(allowed=None, samples_are_probes=True),  # these servers hold nothing
            control_of=partial(SGLangControl, rollout, launch, key=KEY),
        )
        for place in places:
            servers.fails, servers.version, error = place, learner.version + 1, None
            try:
                sync.publish()
            except ControlError as failure:
                error = f"{type(failure).__name__}: {failure}"
            failed_version = learner.version
            servers.fails, servers.version = "", learner.version + 1
            result = sync.publish()
            found.setdefault(layout, {})[place] = (error, failed_version, result.version, result.bytes)
        destroy_groups()
    return found


def work_lives(
    model: Path, overrides: list[str], jobs: dict[str, tuple[Path, Script, list[str]]]
) -> dict[str, list[dict[str, Any]]]:
    """For each job (a folder, what goes wrong, further overrides): the attempt in which it goes wrong, and the
    next one."""
    # MLflow costs every rank seconds of imports; test_tracking.py tests what it gets.
    mlflow_thread.MlflowThread.run = lambda self: None
    found = {}
    for name, (folder, script, more) in jobs.items():
        config = load_config(RECIPE, [f"model.path={model}", *SETTINGS, *overrides, *more])
        found[name] = [live(config, folder, script)]
        if script.what:
            found[name].append(live(config, folder, Script()))
    return found
