"""Whether a run can continue, by what is in its folder; the fields of its config are in tests/configs/test_broken_configs.py."""

from pathlib import Path

import pytest

from configs.loader import load_config, resolved_yaml
from configs.schema import RunConfig
from launch.checks.resuming import resume_problems
from parallel.checkpoints.files import step_folder, write_manifest

RECIPE = Path(__file__).resolve().parents[3] / "configs/recipes/countdown_tiny.yaml"


@pytest.fixture
def config(tmp_path) -> RunConfig:
    config = load_config(RECIPE, ["model.path=m", "advantage={type: gae}", "critic={}"])
    assert isinstance(config, RunConfig)
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    return config


@pytest.mark.parametrize(
    ("policies", "critics", "problem"),
    [
        ("10 20", "10 20", None),
        ("10 20", "10 20-", None),
        ("10 20-", "10 20", None),
        ("10 20", "10", None),
        ("10 20", "10- 20-", "has no step whose checkpoints of policy and critic are both complete"),
        ("10- 20", "10 20-", "has no step whose checkpoints of policy and critic are both complete"),
        ("10 20", "", "was trained without a critic"),
        ("10- 20-", "10 20", "has no complete checkpoint to continue from"),
    ],
)
def test_a_run_with_a_critic_goes_on_from_the_newest_step_that_is_whole_in_both(
    config, tmp_path, policies, critics, problem
):
    """20-: the files of step 20 are cut off."""
    for root, steps in (("checkpoints", policies), ("checkpoints/critic", critics)):
        for step in steps.split():
            folder = step_folder(tmp_path / root, int(step.rstrip("-")))
            folder.mkdir(parents=True)
            (folder / "weights").write_text("weights")
            write_manifest(folder, world_size=1)
            if step.endswith("-"):
                (folder / "weights").write_text("weig")
    problems = [*resume_problems(config, tmp_path, print)]
    assert [problem in text for text in problems] == [True] if problem else not problems


def test_the_steps_that_are_done_are_those_of_the_step_that_it_goes_on_from(config, tmp_path):
    for root, step in (("checkpoints", 10), ("checkpoints/critic", 10), ("checkpoints", 20)):
        folder = step_folder(tmp_path / root, step)
        folder.mkdir(parents=True)
        write_manifest(folder, world_size=1)
    asked = config.model_copy(update={"steps": 15})
    assert not [*resume_problems(asked, tmp_path, print)]
    asked = config.model_copy(update={"steps": 9})
    assert ["has done 10 steps" in text for text in resume_problems(asked, tmp_path, print)] == [True]


@pytest.fixture
def resumed(tmp_path):
    """The problems of a resume, by overrides of the run and of the resume. Its models lie in the folders a, b and of a."""
    for name in ("a", "b", "moved"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("b" if name == "b" else "a")
    run = tmp_path / "run"
    folder = step_folder(run / "checkpoints", 1)
    folder.mkdir(parents=True)
    write_manifest(folder, world_size=1)
    critic = step_folder(run / "checkpoints/critic", 1)
    critic.mkdir(parents=True)
    write_manifest(critic, world_size=1)

    def problems(before: list[str], now: list[str]) -> list[str]:
        given = [f"model.path={tmp_path}/a", "advantage={type: gae}", "critic={}"]
        (run / "config.yaml").write_text(resolved_yaml(load_config(RECIPE, [*given, *before])))
        config = load_config(RECIPE, [*given, *before, *now])
        assert isinstance(config, RunConfig)
        return [*resume_problems(config, run, print)]

    return problems


@pytest.mark.parametrize("field", ["kl.model", "critic.model"])
def test_the_models_beside_the_policy_are_those_of_the_run(resumed, tmp_path, field):
    a, b, moved = (f"{field}={{path: {tmp_path}/{name}}}" for name in ("a", "b", "moved"))
    kl = ["kl.coefficient=0.1"]
    assert not resumed([*kl, a], [])
    assert not resumed([*kl, a], [moved])
    (other,) = resumed([*kl, a], [b])
    assert (
        f"`{field}.path` of {tmp_path}/run is {tmp_path}/a, but the weights in {tmp_path}/b differ" in other
    )
    (precision,) = resumed([*kl, a], [f"{field}.dtype=float16"])
    assert f"`{field}.dtype` of {tmp_path}/run is bfloat16, but float16 was given" in precision
    for before, now in (([*kl, a], [f"{field}=null"]), (kl, [a])):
        (changed,) = resumed(before, now)
        assert f"`{field}` of {tmp_path}/run is " in changed


def test_adapters_that_are_left_out_are_told_without_a_field_that_the_config_no_longer_has(resumed):
    """The loader would show the default of ``learner.lora.rank`` as what was given."""
    (gone,) = resumed(["learner.lora={rank: 4}"], ["learner.lora=null"])
    assert "was trained with learner.lora: {rank: 4}; keep its learner.lora" in gone
