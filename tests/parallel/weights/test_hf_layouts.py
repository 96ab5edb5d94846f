"""Weights leave the learner from every layout: Hugging Face -> layout -> Hugging Face to the bit; one
writer's failure is everybody's."""

import json

import pytest
import torch
from safetensors.torch import load_file

from parallel.weights.hf_files import INDEX, HuggingFaceWeights, PerturbedWeights
from tests.support.megatron_workers import make_engine, make_hf_model, run_ranks
from tests.support.transfer_workers import work_failing_writers, work_order_of_turns, work_round_trips

ON_TWO = ["tp=2", "tp=2,sp", "pp=2", "pp=2,vpp=2", "dp=2", "cp=2"]
ON_FOUR = ["tp=2,pp=2", "tp=2,pp=2,sp", "tp=2,dp=2", "tp=2,cp=2"]


def weights_in(folder):
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]), name


@pytest.mark.engines
@pytest.mark.parametrize(
    "num_ranks, layouts, kind, tied",
    [(2, ON_TWO, "qwen3", True), (4, ON_FOUR, "qwen2", False)],
    ids=["two", "four"],
)
def test_every_layout_gives_back_the_folder_and_the_same_other_weights(
    tmp_path, num_ranks, layouts, kind, tied
):
    folder = make_hf_model(tmp_path / "m", kind, tied=tied, num_hidden_layers=4)
    exported = run_ranks(
        work_round_trips, num_ranks, tmp_path / "ranks", folder, layouts, tmp_path / "out", deadline_s=900
    )
    wanted = weights_in(folder)
    other = {name: PerturbedWeights(folder).read(name) for name in wanted}
    make_engine(folder, lora={"rank": 4}).save_adapter(tmp_path / "adapter")
    adapter = weights_in(tmp_path / "adapter")
    for layout in layouts:
        assert_same(weights_in(tmp_path / "out" / f"{layout}-adapter"), adapter)
        out = tmp_path / "out" / layout
        assert_same(weights_in(out), wanted)
        assert_same(weights_in(tmp_path / "out" / f"{layout}-other"), other)
        assert HuggingFaceWeights(out).names == wanted.keys()
        assert json.loads((out / INDEX).read_text())["metadata"]["total_size"] == sum(
            t.nbytes for t in wanted.values()
        )
        of_ranks = [found[layout] for found in exported]
        stages = of_ranks[:: num_ranks // (2 if "pp" in layout else 1)]
        assert sorted(name for stage in stages for name in stage) == sorted(wanted), (
            "a tensor of two stages, or of none"
        )
        assert all(names in stages for names in of_ranks), "ranks of one stage export in different orders"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*layouts, *(f"{x}-{what}" for x in layouts for what in ("other", "adapter"))]
    ), "something partial"


@pytest.mark.engines
def test_a_full_disk_of_one_writer_is_raised_everywhere_and_leaves_nothing(tmp_path):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    of_ranks = run_ranks(
        work_failing_writers, 2, tmp_path / "ranks", folder, "pp=2", tmp_path / "save" / "out", deadline_s=900
    )
    for message in (said for of_rank in of_ranks for said in of_rank):
        assert "No space left" in message and "unchanged" in message
    assert_same(weights_in(tmp_path / "save" / "out"), weights_in(folder))
    assert [p.name for p in (tmp_path / "save").iterdir()] == ["out"]


@pytest.mark.engines
def test_stages_take_turns(tmp_path):
    run_ranks(work_order_of_turns, 3, tmp_path / "ranks", tmp_path / "log", deadline_s=900)
    assert (tmp_path / "log").read_text().split() == ["0", "0", "1", "1", "2", "2"] * 2


def test_every_perturbed_tensor_is_another_and_of_its_own(tmp_path):
    folder = make_hf_model(tmp_path / "m", "qwen2")
    plain, other = HuggingFaceWeights(folder), PerturbedWeights(folder)
    noise = {name: (other.read(name) - plain.read(name)).flatten() for name in plain.names}
    for name, e in noise.items():
        assert (e != 0).float().mean() > 0.9 and e.std() < 0.2, name  # a few are lost to rounding
        assert torch.equal(other.read(name), PerturbedWeights(folder).read(name))
    rows = [e[:8] / e[:8].norm() for e in noise.values()]
    assert all((a - b).norm() > 1e-3 for i, a in enumerate(rows) for b in rows[:i]), (
        "two tensors have the same noise"
    )
