"""``checkpoint.keep_best`` and ``tandem export --best``: what is refused, and which step is taken."""

import pytest

from configs.errors import ConfigError
from configs.loader import load_config, resolved_yaml
from launch.checks.arguments import BadInput
from launch.commands.results import _best_step
from launch.processes.run_folder import RunFolder
from parallel.checkpoints.files import step_folder, write_manifest
from tests.support.whole_runs import ROOT

RECIPE = ROOT / "configs/recipes/countdown_tiny.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["evaluation.every=0"], "evaluation.every=0 makes none between the ends"),
        (["checkpoint.keep_best=eval/greedy/accuracy"], "evaluation.greedy=false leaves them out"),
        (["steps=1", "evaluation.at_ends=false"], "every=2 with at_ends=false makes none in steps=1"),
        (["task={type: gsm8k, train_path: a}"], r"without task\.heldout_path nothing is evaluated"),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused(overrides, message):
    given = ["checkpoint.keep_best=eval/accuracy", "evaluation.every=2"]
    load_config(RECIPE, given)
    load_config(RECIPE, [*given, "steps=2", "evaluation.at_ends=false"])
    load_config(RECIPE, [*given, "task={type: gsm8k, train_path: a, heldout_path: b}"])
    with pytest.raises(ConfigError, match=message):
        load_config(RECIPE, [*given, *overrides])


def test_the_best_step_is_the_one_that_is_named_and_complete(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(BadInput) as refused:
        _best_step(folder)
    reason = "its config names no checkpoint.keep_best, such as eval/accuracy"
    assert (
        str(refused.value) == f"--best: {tmp_path} has no best checkpoint, since {reason}; leave --best out"
    )
    config = load_config(RECIPE, ["checkpoint.keep_best=eval/accuracy"])
    folder.config.write_text(resolved_yaml(config))
    with pytest.raises(
        BadInput,
        match=r"^--best: .* has no best checkpoint, since checkpoint\.keep_best=eval/accuracy has found no evaluation after a step "
        r"where at most 0\.05 of the rewards failed \(alarms\.reward_failed_max\); leave --best out$",
    ):
        _best_step(folder)
    folder.checkpoints.mkdir()
    (folder.checkpoints / "best.json").write_text('{"step": 4, "metric": "eval/accuracy", "value": 0.5}')
    with pytest.raises(
        BadInput, match=r"the checkpoint of step 4 is not complete \(complete.json is missing\)"
    ):
        _best_step(folder)
    for step in (4, 6):
        step_folder(folder.checkpoints, step).mkdir()
        write_manifest(step_folder(folder.checkpoints, step), world_size=1)
    assert _best_step(folder) == 4
    (folder.checkpoints / "best.json").write_text("{")
    with pytest.raises(BadInput, match=r"best\.json cannot be read"):
        _best_step(folder)
