"""``tandem simulate`` as a user sees it. Its children are real: each runs the learner's code of a rank."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.errors import ConfigError
from launch.checks.arguments import BadInput, check_file_to_write
from launch.cli import app
from launch.studies import simulate
from launch.studies.simulate import SimulationFailed, ranks_of_stages, simulate_ranks
from parallel.megatron import cpu
from parallel.planning.architecture import architecture_of
from parallel.planning.memory import stage_parameters
from parallel.planning.simulated import made_step
from tests.launch.studies.simulated import DENSE, small_config, small_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_model(tmp_path / "model")


def run(*arguments: str):
    return CliRunner().invoke(app, ["simulate", *arguments])


def config_file(folder: Path, *lines: str) -> str:
    file = folder.parent / "config.yaml"
    text = f"kind: train\nmodel: {{path: {folder}, dtype: bfloat16}}\ntask: {{type: countdown}}\n"
    file.write_text("\n".join([text, *lines]))
    return str(file)


def test_both_sides_know_the_same_variable():
    assert simulate.SIMULATED_VARIABLE == cpu.SIMULATED_VARIABLE


@pytest.mark.parametrize(("pp", "ranks"), [(1, [0]), (2, [0, 4]), (4, [0, 8, 12])])
def test_first_middle_and_last_stage_are_simulated(tmp_path, pp, ranks):
    assert ranks_of_stages(small_config(small_model(tmp_path / "m"), tp=2, dp=2, pp=pp).layout) == ranks


def test_micro_batches_are_filled_with_the_longest_samples(tmp_path):
    folder = small_model(tmp_path / "model")
    step = made_step(small_config(folder), architecture_of(folder))
    # 64 of a response and 1024 of a prompt are above the budget of 256: one sample of 256
    assert (step.samples, step.places, step.response, step.microbatches) == (1, 256, 64, 2)


def test_a_table_the_details_and_a_file_are_written(folder, tmp_path, capfd):
    file = config_file(
        folder,
        "layout: {tp: 2, pp: 2, dp: 1}",
        "learner: {token_budget: 256}",
        "rollout: {max_new_tokens: 64}",
    )
    out = tmp_path / "out.json"
    done = run(file, "--gpu-memory", "80", "--json", str(out))
    assert done.exit_code == 0, done.output
    # Else later children of this process would be simulated.
    assert simulate.SIMULATED_VARIABLE not in os.environ
    assert "2 of 4 ranks" in done.output
    assert "TENSOR_MODEL_PARALLEL_GROUP" in done.output
    assert "fits: " in done.output
    assert "leaked" not in capfd.readouterr().err, "of nanobind, at the end of each child"
    ranks = json.loads(out.read_text())
    assert [(rank["rank"], rank["stage"]) for rank in ranks] == [(0, 0), (2, 1)]
    architecture = architecture_of(folder)
    for rank in ranks:
        layout = small_config(folder, tp=2, pp=2).layout
        assert rank["parameters"] == sum(stage_parameters(architecture, layout, rank["stage"]))
        # every parameter is sent whole by its stage's first rank
        whole = small_config(folder, pp=2).layout
        assert sum(rank["buckets"]) == 2 * sum(stage_parameters(architecture, whole, rank["stage"]))


def test_memory_that_does_not_fit_is_exit_code_1(folder, monkeypatch):
    file = config_file(
        folder, "layout: {dp: 1}", "learner: {token_budget: 256}", "rollout: {max_new_tokens: 64}"
    )
    monkeypatch.setattr("launch.commands.simulate.USABLE_SHARE", 1e-6)
    done = run(file, "--gpu-memory", "1")
    assert done.exit_code == 1
    assert "rank 0 takes" in done.output
    assert "layout.tp, layout.pp or layout.ep" in done.output
    assert "learner.token_budget" in done.output


@pytest.mark.parametrize(
    ("lines", "arguments", "error"),
    [
        (("layout: {tp: 3, dp: 1}",), (), "tp=3"),
        (("layout: {pp: 3, dp: 1}",), (), "pp=3"),
        (("layout: {ep: 3, dp: 3}",), (), "ep"),
        (("layout: {dp: auto}",), (), "layout.dp=auto"),
        (("layout: {dp: 2}",), ("--rank", "2"), "--rank 2: the layout has ranks 0 to 1"),
        (("layout: {dp: 2}", "learner: {token_budgte: 3}"), (), "token_budget"),
        (
            ("layout: {dp: 2}",),
            ("--json", "no/out.json"),
            "--json: no/out.json is not the name of a file to write",
        ),
    ],
    ids=str,
)
def test_bad_input_is_named_before_anything_runs(folder, lines, arguments, error):
    done = run(config_file(folder, *lines), *arguments)
    assert isinstance(done.exception, BadInput | ConfigError)
    assert error in str(done.exception)


def test_a_pipe_of_the_shell_can_be_written_to():
    """As of ``--json >(jq .)``: no file can be made in its folder."""
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w"):
        check_file_to_write("--json", Path(f"/dev/fd/{writing}"))
    with pytest.raises(ValueError, match="cannot be written to"):
        check_file_to_write("--json", Path("/proc/self/fd/out.json"))


def test_experts_that_do_not_split_are_named(tmp_path):
    folder = small_model(tmp_path / "moe", "qwen3_moe")
    done = run(config_file(folder, "layout: {ep: 8, dp: 8}"))
    assert isinstance(done.exception, BadInput)
    assert "ep=8" in str(done.exception)


def test_a_failure_inside_a_rank_names_the_rank(tmp_path):
    broken = small_model(
        tmp_path / "broken", **DENSE | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    )
    with pytest.raises(SimulationFailed, match=r"rank 1 of 2: ValueError: .*dynamic"):
        list(simulate_ranks(small_config(broken, dp=2), [1]))
