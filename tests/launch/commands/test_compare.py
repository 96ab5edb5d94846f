"""``tandem compare`` as a user meets it. The curves and tables: tests/trainer/report/test_report.py."""

import json
from pathlib import Path

import pytest
import yaml
from rich.text import Text

from launch.tables import print_table
from tests.support.command import tandem


@pytest.fixture
def runs(tmp_path) -> Path:
    """Two runs of different lengths, one without a step, and a warm start."""
    for name, steps, seed in (("a", 30, 0), ("b", 5, 1), ("new", 0, 2)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        config = {
            "name": name,
            "steps": 40,
            "seed": seed,
            "model": {"path": "m"},
            "task": {"type": "countdown"},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        lines = [{"step": n, "reward/mean": n / 40, "eval/accuracy": n / 80} for n in range(steps)]
        if lines:
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    warm = tmp_path / "runs" / "warm"
    warm.mkdir()
    data = {"type": "countdown", "task": {"type": "countdown"}}
    config = {"kind": "sft", "model": {"path": "m"}, "data": data, "output": "o"}
    (warm / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "runs" / "latest").symlink_to("b")
    return tmp_path


def test_runs_of_different_lengths_and_one_without_a_step(runs):
    done = tandem("compare", "runs/a", "runs/b", "runs/new", "runs/latest", cwd=runs)
    assert done.returncode == 0, done.stderr
    assert "comparison: comparison.html" in done.stdout and "29 of 40" in done.stdout
    page = (runs / "comparison.html").read_text()
    left_out = f"left out: {runs}/runs/new has recorded no step yet"
    assert left_out in done.stdout and left_out in page
    assert "2 runs compared" in page and "Settings in which" in page and "data:image/svg+xml" in page
    again = tandem("compare", "runs/a", "runs/b", "--out", "deep/own.html", cwd=runs)
    assert again.returncode == 0 and (runs / "deep" / "own.html").is_file()


def test_of_everything_in_the_folder_of_runs_the_training_runs_are_compared(runs):
    (runs / "runs/mlflow.db").touch()
    done = tandem("compare", *sorted(str(path) for path in (runs / "runs").iterdir()), cwd=runs)
    assert done.returncode == 0, done.stderr
    others = "left out, since they are no training runs: mlflow.db, warm"
    page = (runs / "comparison.html").read_text()
    assert others in done.stdout and others in page and "2 runs compared" in page


def test_settings_are_shown_as_they_are(capsys):
    """A system prompt with ``[/INST]`` is no markup of rich's, and moves no terminal."""
    prompts = ["[INST] Think. [/INST]", "[red]a[/data/x]", "\x1b[2J"]
    print_table(["setting", "[/a]"], [["task.system_prompt", prompt] for prompt in prompts], title="[b]")
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[INST] Think. [/INST]", "[red]a[/data/x]", "␛[2J", "[/a]", "[b]"))
    print_table(["result"], [[Text("pass", "green")], ["[dim]"]])
    assert "│ pass   │\n│ [dim]  │" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs/a"], "runs/a is the only run, so there is nothing to compare"),
        (["runs/b", "runs/latest"], "is the only run, so there is nothing to compare"),
        (["runs/a", "runs/warm"], "is a run of kind sft"),
        (["runs/a", "nowhere"], "nowhere is not a folder"),
        (["runs/a", "runs", "nowhere"], "it has no config.yaml"),
        (["runs/a", "runs/b", "nowhere"], "nowhere is not a folder"),
        (["runs/new", "runs/new/../new", "runs/warm/../new"], "is the only run"),
        (["runs/a", "runs/b", "--out", "runs/a/metrics.jsonl"], "name a file that ends with .html"),
    ],
)
def test_what_cannot_be_compared_is_refused_and_nothing_is_written(runs, arguments, said):
    done = tandem("compare", *arguments, cwd=runs)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not (runs / "comparison.html").exists()
    assert "nowhere" not in arguments or "nowhere" in done.stderr, "all problems at once"
