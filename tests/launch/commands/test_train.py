"""The messages of ``tandem train`` at its start and at an early end. No role runs: in place of the roles an error ends the
run. Also the result of ``tandem eval`` in words."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch.commands import train as training
from launch.processes.supervisor import Interrupted, RoleFailed
from parallel.checkpoints.files import write_manifest
from rollout.sampling.messages import EvaluationResult


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Starts a run that ends at once: a function of the error, or of what makes it, and of overrides."""
    content = {"name": "tiny", "model": {"path": "m"}, "task": {"type": "countdown"}, "layout": {"dp": 1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setattr(training, "load_checked", lambda parsed, *_, **__: parsed.validated())

    def start(error: BaseException | Callable[[], BaseException], *overrides: str) -> None:
        def end(supervisor, folder, config) -> None:
            raise error if isinstance(error, BaseException) else error()

        monkeypatch.setattr(training, "start_sampling", end)
        training.train(tmp_path / "run.yaml", [f"launch.runs_dir={tmp_path}", *overrides])

    return start


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        (["steps=101"], True),
        (["steps=100"], False),
        (["steps=101", "checkpoint.every=50"], False),
        (["steps=101", "evaluation.every=20", "checkpoint.keep_best=eval/accuracy"], False),
    ],
)
def test_a_long_run_without_checkpoints_says_what_loses_it(train, capsys, overrides, is_told):
    with pytest.raises(RoleFailed):
        train(RoleFailed("the cause"), *overrides)
    first, *rest = capsys.readouterr().out.splitlines()
    run = first.removeprefix("run folder: ")
    lost = "checkpoint.every=0: Ctrl-C or a killed learner loses every step from here on"
    assert (f"{lost}; `tandem stop {run}` and SIGTERM save them" in rest) == is_told


@pytest.mark.parametrize("ends_by", [KeyboardInterrupt(), RoleFailed("the cause")])
def test_a_run_that_saved_nothing_names_the_command_that_starts_it_again(train, capsys, ends_by):
    with pytest.raises((Interrupted, RoleFailed)) as ended:
        train(ends_by)
    run = capsys.readouterr().out.splitlines()[0].removeprefix("run folder: ")
    assert "Nothing was saved (checkpoint.every is 0)" in str(ended.value)
    assert f"start again with `tandem train {run}/config.yaml`" in str(ended.value)


@pytest.mark.parametrize("ends_by", [KeyboardInterrupt, RoleFailed])
def test_a_run_whose_folder_was_renamed_says_so_and_names_no_command_that_would_be_refused(
    train, tmp_path, capsys, ends_by
):
    def renamed() -> BaseException:
        (run,) = tmp_path.glob("tiny-*")
        run.rename(tmp_path / "elsewhere")
        checkpoint = run / "checkpoints/step_000004"  # a learner that was asked to stop still saves its step
        checkpoint.mkdir(parents=True)
        write_manifest(checkpoint, world_size=1)
        return ends_by("the serve role ended with exit code 0.")

    with pytest.raises((Interrupted, RoleFailed)) as ended:
        train(renamed)
    run, text = capsys.readouterr().out.splitlines()[0].removeprefix("run folder: "), str(ended.value)
    assert f"removed, renamed or unmounted while the run used it: {run} has no config.yaml" in text
    assert "`tandem resume NEW_PATH`" in text and "Saved" not in text and f"resume {run}" not in text


def test_an_evaluation_tells_the_standard_error_of_every_set():
    first, second, greedy = (
        EvaluationResult(
            accuracy=accuracy, reward_mean=accuracy, count=4, length_mean=3.0, truncated_fraction=0.0, accuracy_error=error
        )
        for accuracy, error in ((0.5, 0.125), (0.25, 0.0625), (0.75, None))
    )  # fmt: skip
    summary, text = training._evaluation_summary(
        replace(first, greedy=greedy, sets={"hard": second}, sources={"sums": first}), Path("m")
    )
    assert text == (
        "accuracy 0.5000 ± 0.1250 on 4 held-out samples, at temperature 0 0.7500, hard 0.2500 ± 0.0625, sums 0.5000 ± 0.1250"
    )
    assert (summary["accuracy_error"], summary["greedy_accuracy_error"]) == (0.125, None)
    assert (summary["sets_accuracy_error"], summary["sources_accuracy_error"]) == (
        {"hard": 0.0625},
        {"sums": 0.125},
    )


def test_an_evaluation_tells_which_of_its_rewards_failed():
    sound = EvaluationResult(
        accuracy=0.5, reward_mean=0.5, count=4, length_mean=3.0, truncated_fraction=0.0, pass_at={2: 0.75}
    )
    summary, text = training._evaluation_summary(sound, Path("m"))
    assert summary["failed"] == 0 and text == "accuracy 0.5000 on 4 held-out samples, pass@2 0.7500"
    shaped, told = training._evaluation_summary(replace(sound, accuracy=0.0, reward_mean=0.4), Path("m"))
    assert shaped["reward_mean"] == 0.4
    assert told == "accuracy 0.0000 on 4 held-out samples, mean reward 0.4000, pass@2 0.7500"
    failing = replace(sound, failed=2, pass_at={})
    result = replace(
        failing, greedy=sound, sets={"hard": replace(failing, failed=1)}, first_failure="prompt h0: KeyError"
    )
    summary, text = training._evaluation_summary(result, Path("m"))
    assert (summary["failed"], summary["greedy_failed"], summary["sets_failed"]) == (2, 0, {"hard": 1})
    assert text == (
        "accuracy 0.5000 on 4 held-out samples (2 of 4 rewards failed), at temperature 0 0.5000, "
        "hard 0.5000 (1 of 4 rewards failed); a failed reward counts as wrong; the first: prompt h0: KeyError"
    )
