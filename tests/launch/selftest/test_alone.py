"""Each check without a server passes on a sound learner, and fails where its subject is broken."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.loader import load_config
from configs.schema import RunConfig
from launch.processes.run_folder import RunFolder
from launch.selftest import alone
from launch.selftest.bench import CONFIG
from launch.selftest.check import CheckFailed
from parallel.megatron.platform import init_distributed
from parallel.weights.hf_files import PerturbedWeights


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig:
    init_distributed(60.0)
    path = tmp_path_factory.mktemp("selftest") / "model"
    config = load_config(CONFIG, [f"model.path={path}"])
    assert isinstance(config, RunConfig)
    found = alone.model(RunFolder(path.parent), config, {})
    assert found.figures["parameters"] == 790_912
    return config


@pytest.fixture(autouse=True)
def choice_of_layers(monkeypatch):
    """Restored after each test: in its own process a check may choose the layers for good."""
    monkeypatch.setattr(alone.platform, "uses_transformer_engine", alone.platform.uses_transformer_engine)


def asked(part, config: RunConfig, folder: Path, **request):
    return part(RunFolder(folder), config, request)


def test_a_model_that_reads_otherwise_than_it_was_written(config, tmp_path, monkeypatch):
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": tmp_path / "model"})})
    read = alone.AutoModelForCausalLM.from_pretrained

    def read_wrongly(*arguments, **named):
        model = read(*arguments, **named)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.view(torch.int32)[3, 4] ^= 1
        return model

    monkeypatch.setattr(alone.AutoModelForCausalLM, "from_pretrained", read_wrongly)
    with pytest.raises(
        CheckFailed, match=r"other weights than the files hold: model\.layers\.1\.mlp\.up_proj\.weight$"
    ):
        asked(alone.model, other, tmp_path)


def test_collectives_that_lose_a_number(config, tmp_path, monkeypatch):
    monkeypatch.setitem(alone.COLLECTIVE_BYTES, "gloo", 4096)
    assert "GB/s" in asked(alone.collectives, config, tmp_path, backend="gloo").text
    monkeypatch.setattr(alone.dist, "all_reduce", lambda values: values[7].add_(1))
    with pytest.raises(CheckFailed, match="an all-reduce by gloo over 1 processes gave 1 wrong numbers"):
        asked(alone.collectives, config, tmp_path, backend="gloo")
    monkeypatch.setattr(alone.dist, "broadcast", lambda values, src: values.zero_())
    with pytest.raises(CheckFailed, match="a broadcast by gloo"):
        asked(alone.collectives, config, tmp_path, backend="gloo")


def test_a_learner_with_another_weight(config, tmp_path, monkeypatch):
    found = asked(alone.logprobs, config, tmp_path, layers="local").figures
    assert 0 < found["float32_max_logprob_gap_nats"] < 1e-5 < found["bfloat16_max_logprob_gap_nats"]
    build = alone.frozen_engine

    def build_with_another_weight(*arguments):
        engine = build(*arguments)
        engine.load_weights(PerturbedWeights(config.model.path))
        return engine

    monkeypatch.setattr(alone, "frozen_engine", build_with_another_weight)
    with pytest.raises(
        CheckFailed, match=r"in float32 a log-prob differs from transformers' by .* 0\.0001 nats is allowed"
    ):
        asked(alone.logprobs, config, tmp_path, layers="local")


def test_the_layers_of_transformer_engine_are_asked_for_in_bfloat16_alone(config, tmp_path, monkeypatch):
    """Here it takes the local layers in their place, and must find the same gap."""
    text = asked(alone.logprobs, config, tmp_path, layers="transformer-engine").text
    assert text.startswith("bfloat16")
    monkeypatch.setattr(
        alone, "reference_logprobs", lambda config, ids: torch.zeros(sum(map(len, ids)) - len(ids))
    )
    with pytest.raises(CheckFailed, match="in bfloat16 a log-prob differs"):
        asked(alone.logprobs, config, tmp_path, layers="transformer-engine")


def test_an_update_that_teaches_nothing_or_another_thing_each_time(config, tmp_path, monkeypatch):
    losses = asked(alone.update, config, tmp_path).figures["losses"]
    assert len(losses) == alone.UPDATES and losses == sorted(losses, reverse=True)
    optimizer = config.learner.optimizer.model_copy(update={"lr": 1e-30})
    idle = config.model_copy(update={"learner": config.learner.model_copy(update={"optimizer": optimizer})})
    with pytest.raises(CheckFailed, match="3 updates on one batch did not lower the loss"):
        asked(alone.update, idle, tmp_path)

    calls = iter(
        [
            ([2.0, 1.0], [1.0, 1.0], {"w": torch.zeros(2)}),
            ([2.0, 1.0], [1.0, 1.0], {"w": torch.tensor([0.0, 1e-30])}),
        ]
    )
    monkeypatch.setattr(alone, "updated", lambda config, batch: next(calls))
    with pytest.raises(CheckFailed, match="gave other weights when repeated: 1 tensors differ, w first"):
        asked(alone.update, config, tmp_path)
    monkeypatch.setattr(alone, "updated", lambda config, batch: ([2.0, float("nan")], [1.0, 1.0], {}))
    with pytest.raises(CheckFailed, match="not all are finite"):
        asked(alone.update, config, tmp_path)


@pytest.mark.parametrize("item", ["parameters", "gradients", "optimizer", "activations"])
def test_a_plan_that_is_off_by_a_fifth(config, tmp_path, monkeypatch, item):
    plan = alone.learner_memory

    def plan_too_little(*arguments, **named):
        planned = plan(*arguments, **named)
        return replace(planned, **{item: int(getattr(planned, item) / 1.2)})

    monkeypatch.setattr(alone, "learner_memory", plan_too_little)
    with pytest.raises(CheckFailed, match=rf"{item} take .* MiB, and the plan says .* MiB; 5% is allowed"):
        asked(alone.memory, config, tmp_path)


def test_the_plan_as_it_is(config, tmp_path):
    found = asked(alone.memory, config, tmp_path).figures
    for item in ("parameters", "gradients", "optimizer", "activations"):
        assert found[f"{item}_bytes"] == pytest.approx(found[f"planned_{item}_bytes"], rel=0.01)
