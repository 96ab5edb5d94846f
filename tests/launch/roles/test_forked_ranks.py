"""A fork of torchrun's agent as a rank: it is what a command would be. Whole runs on CPU have such ranks too
(``tests/end_to_end``)."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from unittest import mock

import psutil
import pytest
import torch

from launch.roles.forked_ranks import ForkedRank

DEADLINE_S = 60.0


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever() -> None:
    threading.Event().wait()


def fork(monkeypatch: pytest.MonkeyPatch, main: Callable[[], object], **environment: str) -> ForkedRank:
    monkeypatch.setattr("launch.cli.main", main)
    return ForkedRank(["learn", "runs/a run"], environment)


def test_a_fork_has_session_signals_environment_and_arguments_of_a_command(tmp_path, monkeypatch):
    seen = tmp_path / "seen.json"

    def main() -> None:
        handlers = {
            number.name: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        }
        facts = {
            "argv": sys.argv,
            "environment": dict(os.environ),
            "leads its session": os.getsid(0) == os.getpid(),
            "title": psutil.Process().cmdline(),
            "by default": [name for name, handler in handlers.items() if handler == signal.SIG_DFL],
            "interruptible": handlers["SIGINT"] is signal.default_int_handler,
        }
        seen.write_text(json.dumps(facts))

    with mock.patch.dict(os.environ):
        pass  # which has removed each variable, and set it again elsewhere
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for number in before:
            signal.signal(number, lambda number, frame: None)  # as torchrun
        rank = fork(monkeypatch, main, RANK="1")
        assert rank.wait(DEADLINE_S) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    facts = json.loads(seen.read_text())
    assert facts["argv"] == ["tandem", "learn", "runs/a run"]
    assert facts["environment"] == {"RANK": "1"}
    assert facts["leads its session"] and facts["interruptible"]
    assert facts["by default"] == ["SIGTERM", "SIGHUP"]
    assert " ".join(facts["title"]).strip() == f"{sys.executable} -m launch learn runs/a run"
    assert os.environ.get("RANK") != "1" and sys.argv[0] != "tandem", "the agent stays as it is"


@pytest.mark.parametrize(
    ("main", "code", "said"),
    [
        (lambda: None, 0, ""),
        (lambda: sys.exit(75), 75, ""),
        (lambda: sys.exit("tandem: no such run"), 1, "tandem: no such run"),
        (lambda: {}["missing"], 1, "KeyError: 'missing'"),
        (kill_itself, -signal.SIGKILL, ""),
    ],
    ids=["returns", "a code", "a message", "an error", "a signal"],
)
def test_it_ends_as_a_command_would(main, code, said, monkeypatch, capfd):
    rank = fork(monkeypatch, main)
    assert rank.wait(DEADLINE_S) == code == rank.poll() == rank.returncode
    assert said in capfd.readouterr().err


def test_waiting_has_a_deadline(monkeypatch):
    rank = fork(monkeypatch, wait_for_ever)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.1)
        assert rank.poll() is None
    finally:
        os.kill(rank.pid, signal.SIGTERM)
    assert rank.wait(DEADLINE_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("setting", "may"),
    [
        ("", True),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
        ("import os; del os.environ['OMP_NUM_THREADS']", False),
        ("import torch; torch.version.cuda = '13.0'", False),
    ],
    ids=["CPU", "a further thread", "threads not said", "CUDA"],
)
def test_where_a_fork_would_not_be_the_same_ranks_are_commands(setting, may):
    code = f"{setting}\nfrom launch.roles.forked_ranks import may_fork\nprint(may_fork())"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert said.stdout.strip() == str(may and torch.version.cuda is None), said.stderr
