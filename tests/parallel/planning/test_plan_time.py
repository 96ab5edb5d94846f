"""The fit of ``benchmarks/plan_time.py`` on made runs, whose seconds come from a machine that is known."""

import json
import math
import random
from dataclasses import replace
from statistics import NormalDist

import pytest
import yaml

from benchmarks import learner_on_gpu
from benchmarks.plan_time import (
    CALIBRATION,
    PARTS,
    RECIPE,
    UNKNOWN,
    VERIFICATION,
    Measured,
    Shape,
    compared,
    copied_gb_s,
    estimated,
    fit,
    lengths_of,
    made_of,
    measured_parts,
    parts_of,
    spread_of,
    table,
    verdict,
)
from configs.loader import load_config
from configs.reading.hardware import read_hardware
from configs.schema import RunConfig
from parallel.planning.architecture import read_architecture
from parallel.planning.decoding import Lengths

TINY = {
    "model_type": "qwen3", "vocab_size": 48, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 384, "rms_norm_eps": 1e-6, "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # fmt: skip
TRUTH = {
    "train_matmul": 30.0, "train_attention": 90.0, "prefill_matmul": 20.0, "prefill_attention": 60.0, "links": 1.5, "collective_s": 4e-4,
    "pass_s": 0.01, "optimizer_s": 0.02, "decode_step_s": 0.006, "decode_response_s": 1e-4, "prompt_s": 0.003, "response_s": 0.001,
    "transfer_s": 0.02, "step_s": 0.015,
}  # fmt: skip
"""Seconds of 10^12 FLOPs and of 10^9 bytes, and overheads: about those of a core."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def made_run(shape: Shape, folder, noise: float = 0.0, seed: int = 0) -> Measured:
    """A run of this shape on the known machine."""
    config = load_config(RECIPE, [f"model.path={folder}", *shape.settings(10)])
    assert isinstance(config, RunConfig)
    bare = Measured(
        shape=shape,
        config=config,
        architecture=read_architecture(TINY),
        lengths=Lengths(prompt=12, response=max(1, shape.tokens * 3 // 4), longest=shape.tokens, spread=0.1),
        parts={},
    )
    parts = parts_of(estimated(bare, made_of(TRUTH, memory_gb_s=12.0)))
    draw = random.Random(f"{seed} {shape.name}")
    noisy = {
        name: [seconds * (1 + noise * draw.uniform(-1, 1)) for _ in range(9)]
        for name, seconds in parts.items()
    }
    return Measured(
        shape=shape, config=config, architecture=bare.architecture, lengths=bare.lengths, parts=noisy
    )


def test_names_are_those_of_the_schema():
    assert set(TRUTH) == set(UNKNOWN)
    names = [shape.name for shape in (*CALIBRATION, *VERIFICATION)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.01), (0.1, 0.15)])
def test_the_fit_finds_a_machine_whose_estimates_are_the_known_ones(folder, noise, within):
    """On runs of other shapes than those that it was fitted to."""
    found = fit([made_run(shape, folder, noise) for shape in CALIBRATION], memory_gb_s=12.0, source="made")
    for shape in VERIFICATION:
        wanted = made_run(shape, folder)
        estimate = parts_of(estimated(wanted, found))
        for part in ("step", "sampling", "update"):
            assert estimate[part] == pytest.approx(wanted.median(part), rel=within), (shape.name, part)


def test_a_description_is_one_that_tandem_plan_reads(folder, tmp_path):
    found = fit([made_run(shape, folder) for shape in CALIBRATION], memory_gb_s=12.0, source="made")
    (tmp_path / "machine.yaml").write_text(
        yaml.safe_dump(found.model_dump(exclude_none=True), sort_keys=False)
    )
    assert read_hardware(str(tmp_path / "machine.yaml")) == found


def test_one_unknown_alone_takes_all_the_time(folder):
    """The estimate is linear in it: twice the seconds, twice the part."""
    shape = made_run(CALIBRATION[-1], folder)
    for name in UNKNOWN:
        one, two = (
            parts_of(estimated(shape, made_of({name: value}, memory_gb_s=1e12, alone=True)))
            for value in (1.0, 2.0)
        )
        for part in PARTS:
            assert two[part] == pytest.approx(2 * one[part], rel=1e-6, abs=1e-6), (name, part)
        assert one["step"] > 0, name


def test_as_many_responses_run_as_the_limit_of_the_cache_holds(folder):
    """600 tokens hold 7 responses of 72 tokens and their prompts of 12."""
    limited = replace(CALIBRATION[3], others=("rollout.max_total_tokens=600",))
    running = [
        estimated(made_run(shape, folder), made_of(TRUTH, memory_gb_s=12.0)).sampling.running
        for shape in (limited, CALIBRATION[3])
    ]
    assert running == [7, 64]


def test_parts_sum_to_the_step_and_a_pass_that_is_not_made_is_of_the_rest():
    row = {
        "time/step": 1.0,
        "time/sampling": 0.5,
        "time/logprobs": 0.125,
        "time/update": 0.25,
        "time/sync": 0.0625,
    }
    scored, bare = (measured_parts([row], is_scored=is_scored) for is_scored in (True, False))
    assert {name: values[0] for name, values in scored.items()} == {
        "step": 1.0, "sampling": 0.5, "score": 0.125, "update": 0.25, "transfer": 0.0625, "rest": 0.0625,
    }  # fmt: skip
    assert (bare["score"], bare["rest"]) == ([0.0], [0.1875])


@pytest.mark.parametrize(
    ("spread", "count"), [(0.0, 2), (0.3, 2), (0.0, 32), (0.8, 32), (0.3, 256), (1.5, 256)]
)
def test_the_spread_is_the_one_whose_greatest_value_is_there(spread, count):
    z = NormalDist().inv_cdf(1 - 0.5 / count)
    greatest = 50 * math.exp(spread * z - spread**2 / 2)
    assert spread_of(50, greatest, count) == pytest.approx(spread, abs=1e-6)


def test_lengths_of_a_run_are_its_own():
    rows = [
        {"response/length_mean": 7.6, "response/length_max": 7.6},
        {"response/length_mean": 8.0, "response/length_max": 8.0},
    ]
    found = lengths_of(Shape(name="x", prompts=4, group=2, tokens=14), 11, rows)
    assert (found.prompt, found.response, found.longest) == (11, 8, 14)
    assert found.spread == pytest.approx(0, abs=0.01)
    assert copied_gb_s(2**20) > 0


def test_the_table_and_the_verdict(folder):
    run = made_run(VERIFICATION[0], folder)
    near = [*compared("verification", run, {name: values[0] * 1.2 for name, values in run.parts.items()})]
    far = [*compared("verification", run, {name: values[0] * 1.5 for name, values in run.parts.items()})]
    assert verdict(near) == "1 of 1 verified steps are within 30% of the measured median"
    assert verdict([*near, *far]).endswith(
        "1 of 2 verified steps are within 30% of the measured median; quickstart: 1.50"
    )
    lines = table([*near, *far]).splitlines()
    assert len(lines) == 3 and "**1.50**" in lines[2]  # a row for each run, here of one name
    assert table(near).splitlines()[2].count(", 1.20") == len(near) - 1
    assert {row["part"] for row in near} == {"step", "sampling", "update", "transfer", "rest"}


@pytest.mark.parametrize(("matmul", "attention", "pass_s"), [(0.37, 0.65, 0.05), (0.6, 0.2, 0.001)])
def test_shares_of_a_gpu_are_found_again_from_passes_that_take_them(matmul, attention, pass_s):
    """benchmarks/learner_on_gpu.py"""
    rows = []
    for recompute, tokens, pairs in (("none", 1.0, 1.0), ("none", 1.0, 9.0), ("full", 4.0, 2.0)):
        passes = 3 if recompute == "full" else 2
        score = {"matrices": 2e14 * tokens, "output": 1e14 * tokens, "attention": 1e14 * pairs}
        update = {name: 3 * flops for name, flops in score.items()}

        def seconds(flops, count):
            products = (flops["matrices"] + flops["output"]) / (1e15 * matmul)
            return products + flops["attention"] / (1e15 * attention) + count * pass_s

        rows.append(
            {
                "recompute": recompute, "peak_flops": 1e15, "score_flops": score, "update_flops": update,
                "score": {"median": seconds(score, 1)}, "update": {"median": seconds(update, passes) + 0.03},
                "optimizer": {"median": 0.03},
            }
        )  # fmt: skip
    found = learner_on_gpu.fit(rows)
    assert found == pytest.approx(
        {"train_matmul": matmul, "train_attention": attention, "pass_s": pass_s}, rel=1e-6
    )
