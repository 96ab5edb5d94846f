"""A user's objective, advantage and weight before a start: tried in a process that may hang or end, from the folder of
the command."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from configs.schema import RunConfig
from launch.checks import own_parts
from launch.checks.own_parts import check_own_parts
from rollout.rewards.trial_process import TrialProcess
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.whole_runs import ROOT

GOOD = """
import torch

def objective(current_logprobs_T, old_logprobs_T, advantages_T, scale=1.0):
    print("not ours to print")
    return -scale * advantages_T * current_logprobs_T

def advantage(rewards_S, group_ids_S):
    return rewards_S

def weight(log_ratio_N):
    return log_ratio_N.clamp(-20, 20).exp()

def order(num_prompts, seed, epoch):
    return range(num_prompts)

def hangs(current_logprobs_T, old_logprobs_T, advantages_T):
    while True:
        pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(own_parts, "_PROBLEMS", {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def problems(
    function: str, field: str = "objective", others: dict | None = None, **more
) -> list[tuple[str, str]]:
    own = {field: {"type": "function", "function": function, **more}} | (others or {})
    config = RunConfig.model_validate({"model": {"path": "m"}, "task": {"type": "countdown"}, **own})
    before = psutil.Process().children(recursive=True)
    found = list(check_own_parts(config, lambda told: None))
    assert psutil.Process().children(recursive=True) == before
    return found


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [  # the process of a sampler imports no torch
        ("objective", "import sys\nsys.exit(0)",
         r"importing broken ends the process: SystemExit: 0 \(broken.py:2 in <module>\); put a script's code"),
        ("sampler", "import os\nos._exit(3)", "importing broken: its process ended with exit code 3; correct the module"),
        ("sampler", "import time\ntime.sleep(600)",
         r"importing broken took longer than check_timeout_s=3, at broken.py:2 in <module>; .* raise its check_timeout_s"),
        ("sampler", "def wrong(): pass", "sampler function 'broken:f': broken has no 'f'; define it, or correct the name"),
    ],
)  # fmt: skip
def test_a_module_that_cannot_be_used_is_refused(folder, field, content, message, capfd):
    (folder / "broken.py").write_text(content)
    ((name, error),) = problems("broken:f", field, check_timeout_s=3.0 if "sleep" in content else 60.0)
    assert name == f"{field}.function"
    assert re.match(rf"{name}: .*{message}", error)
    assert capfd.readouterr() == ("", "") and not (folder / "__pycache__").exists()


def test_a_function_that_hangs_is_killed_and_its_line_named_and_one_process_tries_the_others(monkeypatch):
    started = []

    def start(module, **more):
        started.append(module)
        return TrialProcess(module, **more)

    monkeypatch.setattr(own_parts, "TrialProcess", start)
    others = {
        "advantage": {"type": "function", "function": "good:advantage"},
        "correction": {"weight": {"level": "function", "function": "good:weight"}},
    }
    ((field, error),) = problems("good:hangs", others=others, check_timeout_s=4.0)
    assert field == "objective.function" and started == [own_parts.LOSS] * 2
    assert "trying good:hangs on made data took longer than check_timeout_s=4, at good.py:" in error
    assert "in hangs; make it faster" in error


def test_how_much_is_tried_can_be_said():
    assert problems("missing:f", check="none") == problems("good:hangs", check="import") == []
    ((field, error),) = problems("missing:f", "advantage", check="import")
    assert field == "advantage.function" and "there is no module 'missing' in " in error


def test_a_dry_run_tries_the_three_of_them_without_torch_in_its_own_process(folder):
    make_tiny_countdown_model(folder / "model", seed=0)
    config = {
        "extends": str(ROOT / "configs/recipes/countdown_tiny.yaml"),
        "model": {"path": "model"},
        "objective": {"type": "function", "function": "good:objective", "settings": {"scale": 2}},
        "advantage": {"type": "function", "function": "good:advantage"},
        "correction": {"weight": {"level": "function", "function": "good:weight"}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    code = (
        "import sys; from launch import cli; sys.argv = ['tandem', 'train', 'run.yaml', '--dry-run', *sys.argv[1:]]\n"
        "try: cli.main()\n"
        "finally: assert not {'torch', 'good'} & sys.modules.keys()"
    )

    def dry_run(*overrides: str):
        return subprocess.run(
            [sys.executable, "-c", code, *overrides], capture_output=True, text=True, timeout=300,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )  # fmt: skip

    done = dry_run()
    assert done.returncode == 0, done.stderr
    assert "function: good:objective" in done.stdout and "not ours to print" not in done.stdout + done.stderr
    done = dry_run("objective.settings.scale=0", "correction.weight.function=good:advantage")
    assert done.returncode == 2
    assert "the gradient of loss_T to current_logprobs_T is 0 on every token" in done.stderr
    assert "correction.weight.function" in done.stderr and "it must take (log_ratio_N)" in done.stderr


def test_an_order_of_the_prompts_is_tried_too(folder):
    assert problems("good:order", field="sampler") == []
    (folder / "broken.py").write_text("def order(num_prompts, seed, epoch): return [0]")
    ((field, error),) = problems("broken:order", field="sampler")
    assert field == "sampler.function" and "it returned 1 indices" in error
