"""Learner and servers taking turns on the same devices: who is asked what in which order, and that nothing is
lost on the way."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from configs.schema.launch import LaunchConfig
from configs.schema.objective import AggregationConfig, KLConfig
from configs.schema.rollout import RolloutConfig
from parallel.checkpoints import offload
from parallel.checkpoints.checkpoint import CheckpointError
from parallel.megatron import platform
from parallel.megatron.optimizer import gradient_buffers
from parallel.weights.hf_files import HuggingFaceWeights
from rollout.client import RolloutError
from rollout.records import Completion
from rollout.servers.command import server_command
from rollout.servers.control import ControlError, Pending
from rollout.servers.ports import Ports
from rollout.servers.share import on_one_machine
from tests.support.megatron_workers import (
    learner_config,
    make_batch,
    make_engine,
    make_hf_model,
    run_ranks,
    weighted_loss,
    weights_of,
)
from tests.support.offload_workers import bytes_there, state_bytes, work_offloaded_updates
from tests.support.server_specs import server_spec
from tests.trainer.test_weight_sync import GROUPS, TEMPERATURE, TIMEOUT_S, FakeControl, train
from trainer import stage_sender
from trainer.engine_agreement import EngineAgreement
from trainer.learner import Learner
from trainer.turns import CACHE, WEIGHTS, SharedDevices, make_room
from trainer.weight_sync import WeightSync

# --------------------------------------------------------------------------------------------------------------------
# offload

CASES = [
    {"dtype": "float32", "distributed": True},
    {"dtype": "float32", "distributed": False},
    {"dtype": "bfloat16", "distributed": True},
    {"dtype": "bfloat16", "distributed": False},
]
"""In bfloat16 the optimizer has weights of its own, distributed or not; in float32 they are the model's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


def assert_same(found: list[dict]) -> None:
    for case, ways in zip(CASES, found, strict=True):
        resident = ways.pop("resident")
        for way, offloaded in ways.items():
            assert offloaded["away"] == [0] * (12 if way == "without state" else 6), case
            assert all(offloaded["unchanged"]), case
            assert resident["norms"] == offloaded["norms"] and len(set(resident["norms"])) == 3, case
            for name in ("logprobs", "state"):
                assert all(map(torch.equal, resident[name], offloaded[name])), (case, name)
            weights = resident["weights"]
            assert all(torch.equal(weights[name], tensor) for name, tensor in offloaded["weights"].items())


@pytest.mark.parametrize("block_bytes", [offload.BLOCK_BYTES, 1000])
def test_an_offloaded_engine_takes_no_memory_and_goes_on_bitwise(folder, monkeypatch, block_bytes):
    """In blocks of which one has all tensors, and in ones that cut them anywhere."""
    monkeypatch.setattr(offload, "BLOCK_BYTES", block_bytes)
    assert_same(work_offloaded_updates(folder, CASES))


@pytest.mark.engines
def test_so_do_two_data_parallel_ranks(folder, tmp_path):
    for found in run_ranks(work_offloaded_updates, 2, tmp_path, folder, CASES):
        assert_same(found)


@pytest.mark.parametrize("without_state", [False, True])
def test_a_saved_checkpoint_of_an_engine_that_was_away_is_that_of_one_that_was_not(
    folder, tmp_path, without_state
):
    engine = make_engine(folder, dtype="bfloat16", offload=without_state)
    batch = make_batch([9, 6])
    engine.update([batch], weighted_loss, temperature=1.0)
    engine.offload()
    for use in (
        lambda: engine.update([batch], weighted_loss, temperature=1.0),
        lambda: engine.logprobs([batch], temperature=1.0),
        lambda: engine.save(tmp_path / "away", {}),
        lambda: engine.load(tmp_path / "away"),
        lambda: engine.save_hf(tmp_path / "away"),
        lambda: engine.load_weights(HuggingFaceWeights(folder)),
        engine.export_hf,
    ):
        with pytest.raises(RuntimeError, match="needs the weights, which `offload` moved to host memory"):
            use()
    engine.restore()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not write"):
        engine.save(tmp_path / "file" / "saved", {})
    engine.save(tmp_path / "saved", {"step": 1})
    assert (state_bytes(engine) == 0) == without_state
    wanted = [engine.update([batch], weighted_loss, temperature=1.0).grad_norm, weights_of(engine)]
    engine.load(tmp_path / "saved")
    found = [engine.update([batch], weighted_loss, temperature=1.0).grad_norm, weights_of(engine)]
    assert wanted[0] == found[0] and all(
        torch.equal(found[1][name], tensor) for name, tensor in wanted[1].items()
    )


def test_buffers_of_a_module_come_back_too_and_gradients_of_experts_make_room():
    """Such a buffer is what GLM's router adds to its scores."""
    module = torch.nn.Linear(3, 2)
    module.register_buffer("bias_E", torch.arange(4.0))
    shared, of_experts = (SimpleNamespace(grad_data=torch.zeros(size)) for size in (8, 5))
    trained = SimpleNamespace(buffers=[shared], expert_parallel_buffers=[of_experts])
    kept, gradients = [module.weight, module.bias, module.bias_E], [shared.grad_data, of_experts.grad_data]
    before = [tensor.clone() for tensor in kept]
    away = offload.Offloaded(kept, dropped=gradient_buffers([trained]))
    sizes = [tensor.untyped_storage().nbytes() for tensor in (*kept, *gradients)]
    away.restore()
    assert sizes == [0] * 5 and all(map(torch.equal, before, kept))
    assert [tensor.untyped_storage().nbytes() for tensor in gradients] == [32, 20]


# ----------------------------------------------------------------------------------------------------------------------
# turns


class LendingControl(FakeControl):
    """Servers that hold no more than they have memory for. ``is_gone``: they answer nothing."""

    def __init__(self, folder: Path, learner: Learner) -> None:
        super().__init__(folder, 1)
        self.held, self.samples, self.is_gone = {CACHE, WEIGHTS}, True, False
        self._learner = learner

    def pause(self) -> None:
        self._say("pause")
        self.samples = False

    def release_memory(self, tags: Sequence[str]) -> None:
        self._say(f"release {' '.join(tags)}")
        assert not self.samples and self.held >= set(tags)
        self.held -= set(tags)
        if WEIGHTS in tags:  # what comes back is memory that holds anything
            self.replicas[0].tensors = {
                name: tensor * torch.nan for name, tensor in self.replicas[0].tensors.items()
            }

    def resume_memory(self, tags: Sequence[str]) -> None:
        self._say(f"take {' '.join(tags)}")
        assert not self.held & set(tags)
        assert CACHE not in tags or learner_bytes(self._learner) == 0, (
            "the cache has no room beside the learner"
        )
        self.held |= set(tags)

    def resume(self) -> None:
        super().resume()
        assert self.held == {CACHE, WEIGHTS}
        self.samples = True

    def open_update(self) -> Pending:
        assert self.held == {WEIGHTS}
        return super().open_update()

    def probe(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float
    ) -> list[Completion]:
        assert self.samples and learner_bytes(self._learner) == 0
        return super().probe(prompt_ids, max_new_tokens=max_new_tokens, temperature=temperature)

    def _say(self, call: str) -> None:
        if self.is_gone:
            raise ControlError("connection refused")
        self.calls.append(call)


def learner_bytes(learner: Learner) -> int:
    return sum(bytes_there(engine) for engine in learner._engines)


@pytest.fixture
def learner(folder) -> Learner:
    platform.init_distributed(60.0)
    config = learner_config(folder, data_parallel=1, aggregation=AggregationConfig(), sharded=True)
    return Learner(config.model_copy(update={"kl": KLConfig(coefficient=0.1)}))


@pytest.fixture
def control(folder, learner) -> Iterator[LendingControl]:
    control = LendingControl(folder, learner)
    make_room(control, CACHE, WEIGHTS)
    assert control.calls == ["pause", "release kv_cache weights"]
    control.calls.clear()
    yield control
    control.close()


def sync_of(learner: Learner, control: LendingControl, turns: SharedDevices, *, probes: bool) -> WeightSync:
    stage_sender.GROUP = f"test-{next(GROUPS)}"  # those of the tests before may still be there
    rollout = RolloutConfig(dtype="float32", temperature=TEMPERATURE)
    agreement = EngineAgreement.of(rollout, learner.engine.dtype, compares_samples=not probes)
    launch = LaunchConfig(collective_timeout_s=TIMEOUT_S)
    return WeightSync(
        learner, control, rollout, launch, control_of=no_other_servers, agreement=agreement, turns=turns
    )


def no_other_servers(urls):
    pytest.fail("these servers stay the same")


TRANSFER = ["take weights", "open_update", "receive_transfer", "close_update", "take kv_cache", "resume"]
FIRST = [TRANSFER[0], "require_plugin", *TRANSFER[1:]]
PROBE = ["probe", "pause", "release kv_cache", "take kv_cache", "resume"]


def said(control: LendingControl) -> list[str]:
    """What the servers were asked since the last time, buckets as one."""
    calls = [name for name, _ in groupby(call.split(" version")[0] for call in control.calls)]
    control.calls.clear()
    return calls


def test_the_order_of_a_step(learner, control):
    turns = SharedDevices(learner, control)
    sync = sync_of(learner, control, turns, probes=False)
    sync.send_again()
    assert said(control) == FIRST
    for version in (1, 2):
        assert learner_bytes(learner) == 0, "while the servers sample"
        turns.give_to_learner()
        turns.give_to_learner()
        assert said(control) == ["pause", "release kv_cache weights"] and control.held == set()
        train(learner)
        sync.publish()
        assert said(control) == TRANSFER
        assert (control.replicas[0].version, control.held, control.samples) == (
            version,
            {CACHE, WEIGHTS},
            True,
        )
    with turns.learner_there():
        served = weights_of(learner.engine)
        assert said(control) == ["pause", "release kv_cache"], "the servers keep their weights meanwhile"
    assert said(control) == ["take kv_cache", "resume"] and learner_bytes(learner) == 0
    assert all(torch.equal(control.replicas[0].tensors[name], tensor) for name, tensor in served.items())
    sync.close()


def test_a_probe_compares_what_was_sampled_without_the_learner(learner, control):
    turns = SharedDevices(learner, control)
    sync = sync_of(learner, control, turns, probes=True)
    assert sync.send_again().max_logprob_gap < 1e-4
    assert said(control) == [*FIRST, *PROBE]
    turns.give_to_learner()
    train(learner)
    assert sync.publish().max_logprob_gap < 1e-4
    assert said(control) == ["pause", "release kv_cache weights", *TRANSFER, *PROBE]
    sync.close()


def test_no_server_samples_from_weights_that_were_not_sent(learner, control):
    turns = SharedDevices(learner, control)
    with pytest.raises(ValueError, match="have not been sent since the learner's turn"):
        turns.give_to_servers()
    assert said(control) == []


def test_where_the_servers_are_gone_the_learner_is_there(learner, control):
    """For a last checkpoint, whoever's turn it was."""
    turns = SharedDevices(learner, control)
    sync = sync_of(learner, control, turns, probes=False)
    sync.send_again()
    served = {name: tensor.clone() for name, tensor in control.replicas[0].tensors.items()}
    control.is_gone, written = True, []
    with pytest.raises(RolloutError, match="connection refused"), turns.learner_there():
        written.append({name: tensor.clone() for name, tensor in weights_of(learner.engine).items()})
    assert all(torch.equal(served[name], tensor) for name, tensor in written[0].items())
    with turns.learner_there():  # again, after what failed: nobody is asked any more
        assert learner_bytes(learner) > 0
    with pytest.raises(RolloutError, match="connection refused"):
        turns.give_to_both()


def test_servers_that_fail_as_their_turn_begins_find_the_learner_there_too(learner, control):
    turns = SharedDevices(learner, control)
    turns.give_to_both()
    control.is_gone, there = True, []
    with pytest.raises(RolloutError, match="connection refused"):
        turns.give_to_servers()
    with pytest.raises(RolloutError, match="connection refused"), turns.learner_there():
        there.append(learner_bytes(learner) > 0)
    assert there == [True]


def test_a_checkpoint_leaves_the_turn_of_both_which_the_learners_turn_may_follow(
    learner, control, monkeypatch
):
    """As after an update that broke off. Servers take memory only when every rank has returned its own."""
    monkeypatch.setattr(platform, "return_free_memory", lambda: control.calls.append("return"))
    monkeypatch.setattr(dist, "barrier", lambda: control.calls.append("meet"))
    turns = SharedDevices(learner, control)
    turns.give_to_both()
    with turns.learner_there():
        assert said(control) == ["return", "meet", "take weights"]
    assert said(control) == [] and learner_bytes(learner) > 0
    turns.give_to_learner()
    assert said(control) == ["release weights"] and control.held == set()


def test_only_servers_on_a_gpu_need_the_flag():
    def command(*, cuda: bool, lends_memory: bool) -> list[str]:
        (share,), spec = on_one_machine(1, 1), server_spec(Path("m"), cuda=cuda)
        launch = LaunchConfig(placement="colocated" if lends_memory else "separate")
        spec = replace(spec, config=spec.config.model_copy(update={"launch": launch}))
        return server_command(spec, share, Ports(http=2, nccl=3))

    for cuda, lends in ((False, False), (False, True), (True, False), (True, True)):
        assert ("--enable-memory-saver" in command(cuda=cuda, lends_memory=lends)) == (cuda and lends)
