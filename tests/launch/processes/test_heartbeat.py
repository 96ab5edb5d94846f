"""Signs of life: stopped processes are found by their state and ended; processes that are only slow are reported
and left alone."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launch.checks.arguments import BadInput
from launch.commands.status import _activity_lines
from launch.commands.train import adding_causes
from launch.processes import heartbeat
from launch.processes.heartbeat import Pulse, StoppedProcesses, Watch, beat_file, read_beats, stopped_note
from launch.processes.run_folder import RunFolder, write_json
from launch.processes.supervisor import Role, RoleFailed, Supervisor
from launch.roles import start
from rollout.guarded_process import start_of
from rollout.servers import session_guard
from tests.support.process_groups import assert_all_end

IDLE = [sys.executable, "-c", "import time; time.sleep(300)"]
DEADLINE_S = 120
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.claim()
    return found


@contextlib.contextmanager
def child(command: list[str] = IDLE) -> Iterator[psutil.Process]:
    process = subprocess.Popen(command)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def stop(process: psutil.Process) -> None:
    process.suspend()
    deadline = time.monotonic() + DEADLINE_S
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_process_that_stays_stopped_for_the_timeout_is_found_and_no_other():
    clock = Clock()
    with child() as stopped, child() as slow, child() as gone:
        looking = StoppedProcesses(60.0, clock=clock)
        stop(stopped)
        found = {}
        for clock.now in range(0, 80, 10):
            found[clock.now] = looking.look([stopped, slow, gone])
            if clock.now == 20:
                gone.kill()
                gone.wait()
        assert {at: [stopped] for at in (60, 70)} | {at: [] for at in range(0, 60, 10)} == found


@pytest.mark.parametrize("why", ["it went on in between", "nobody looked in between"])
def test_a_process_is_not_taken_for_dead_by_two_looks_far_apart(why):
    """A whole job that the cluster suspends, its supervisor with it, is found stopped before and after."""
    clock = Clock()
    with child() as process:
        looking = StoppedProcesses(60.0, clock=clock)
        stop(process)
        assert looking.look([process]) == []
        if why == "it went on in between":
            process.resume()
            clock.now = 30
            deadline = time.monotonic() + DEADLINE_S
            while process.status() == psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline
            assert looking.look([process]) == []
            stop(process)
            clock.now = 60
        else:
            clock.now = 3600
        assert looking.look([process]) == []


def test_a_pulse_says_what_its_role_is_doing_and_whether_it_works(folder):
    pulse = Pulse(folder, "rank-3", timeout_s=60)
    pulse.look()
    pulse.doing("sync")
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    pulse.look()
    ((beat, _),) = read_beats(folder)
    assert (beat.who, beat.pid, beat.doing, beat.ended) == ("learner rank 3", os.getpid(), "sync", [])
    assert beat.cpu > 0 and 0 < beat.lasts_s < DEADLINE_S
    assert "in `sync` for 95 s, its CPU is busy" in replace(beat, cpu=0.9, since=5.0, now=100.0).text()
    assert "its CPU is idle" in replace(beat, cpu=0.01).text()


def test_a_pulse_reads_its_own_start_once(folder, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(heartbeat, "start_of", lambda pid: asked.append(pid) or "123")
    pulse = Pulse(folder, "rank-0", timeout_s=60)
    for _ in range(3):
        pulse.look()
    assert asked == [os.getpid()] and read_beats(folder)[0][0].started == "123"


def test_a_pulse_ends_a_stopped_process_of_its_role_and_leaves_word_of_it(folder, capfd):
    with child() as server:
        stop(server)
        with Pulse(folder, "serve", timeout_s=0.0):
            assert server.wait(DEADLINE_S) is not None or not server.is_running()
        ((beat, _),) = read_beats(folder)
        (line,) = beat.ended
        told = rf"a process of the serve role, .+ \(pid {server.pid}\) had been stopped \(SIGSTOP\) for 0 s, and was killed"
        assert re.fullmatch(told, line)
        assert line in capfd.readouterr().err
        assert Watch(folder, timeout_s=60).ended() == [line]


def test_a_pulse_that_ends_well_leaves_nothing(folder):
    with Pulse(folder, "sample", timeout_s=60):
        deadline = time.monotonic() + DEADLINE_S
        while not beat_file(folder, "sample").exists():
            assert time.monotonic() < deadline
    assert not beat_file(folder, "sample").exists()


def announce(folder: RunFolder, process: psutil.Process, name: str = "rank-0", **changes) -> None:
    fields = {
        "who": f"learner {name.replace('-', ' ')}", "pid": process.pid, "started": start_of(process.pid), "host": os.uname().nodename,
        "doing": "sync", "since": time.time(), "now": time.time(), "cpu": 0.0, "ended": [],
    }  # fmt: skip
    write_json(beat_file(folder, name), fields | changes)


def test_a_slow_role_is_told_of_once_and_left_alone(folder):
    said: list[str] = []
    watch = Watch(folder, timeout_s=60, say=said.append)
    with child() as rank:
        now = time.time()
        # Sync: 100 s.
        for doing, since in (
            ("sync", now - 2000),
            ("update", now - 1900),
            ("sync", now - 1000),
        ):
            announce(folder, rank, doing=doing, since=since)
            watch.look()
            watch.look()
        told = [line.split(" for ")[0] for line in said]
        assert told == [f"slow: learner rank 0 has been in `{part}`" for part in ("sync", "update", "sync")]
        assert "its CPU is idle (the longest so far took 100 s)" in said[2]
        said.clear()
        announce(folder, rank, doing="sync", since=time.time() - 250)  # less than three times the longest
        announce(folder, rank, "serve", doing="serving", since=now - 90_000)
        watch.look()
        assert said == [] and rank.is_running() and watch.ended() == []


def test_a_role_of_a_host_whose_clock_is_behind_is_not_slow(folder, monkeypatch):
    said: list[str] = []
    behind = SimpleNamespace(time=lambda: time.time() - 3600, monotonic=lambda: time.monotonic() - 3600)
    with monkeypatch.context() as patched:
        patched.setattr(heartbeat, "time", behind)
        pulse = Pulse(folder, "rank-0", timeout_s=60)
        pulse.doing("sync")
        pulse.look()
    Watch(folder, timeout_s=60, say=said.append).look()
    assert said == [] and "in `sync` for 0 s" in _activity_lines(folder, time.time())[0][1]


def test_many_slow_ranks_are_a_few_lines(folder):
    said: list[str] = []
    now = time.time()
    with child() as rank:
        for i in range(9):
            announce(folder, rank, f"rank-{i}", since=now - 1000, now=now)
        Watch(folder, timeout_s=60, say=said.append).look()
        assert len(said) == 4 and said[-1].startswith("slow: … and 6 more; `tandem status")
        lines = _activity_lines(folder, now)
        assert len(lines) == 9 and lines[-1][1].startswith("… and 1 learner ranks more")
        assert lines[0][1].startswith(
            "learner rank 0: in `sync` for 1000 s, its CPU is idle; last sign of life 0s ago (pid "
        )


@pytest.mark.parametrize(("changes", "told"), [
    ({}, r"its process is (sleeping|running)"),
    ({"pid": 2**22 - 1}, "its process is gone"),
    ({"host": "elsewhere"}, "its node is down, or cut off from the shared folder"),
])  # fmt: skip
def test_a_role_that_is_not_heard_of_is_told_of_and_left_alone(folder, monkeypatch, changes, told):
    said: list[str] = []
    monkeypatch.setattr(heartbeat, "SHARED_FOLDER_S", 0.0)
    with child() as rank:
        watch = Watch(folder, timeout_s=0.0, say=said.append)
        announce(folder, rank, doing="serving", **changes)
        for _ in range(3):
            watch.look()
        (line,) = said
        assert "has given no sign of life for" in line and re.search(told, line)
        assert rank.is_running()


@pytest.mark.parametrize("stays_stopped", [True, False])
def test_a_role_that_stays_stopped_is_ended_by_its_guard_on_whatever_host(folder, stays_stopped):
    """No supervisor takes part."""
    code = f"""
        import subprocess, time
        from pathlib import Path
        from rollout.servers.watched_process import guard_session
        guard_session(timeout_s=0.3, note=Path({str(stopped_note(folder, "rank-3"))!r}))
        child = subprocess.Popen(["sleep", "300"])
        print(child.pid, flush=True)
        time.sleep(300)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as leader:
        left = psutil.Process(int(leader.stdout.readline()))
        if stays_stopped:
            leader.send_signal(signal.SIGSTOP)
            assert leader.wait(DEADLINE_S) == -signal.SIGKILL
            assert_all_end([left], DEADLINE_S)  # what it had started
            told = f"learner rank 3 (pid {leader.pid}) had been stopped (SIGSTOP) for 0 s, and was killed"
            assert Watch(folder, timeout_s=60).ended() == [told]
        else:
            assert leader.poll() is None
            leader.terminate()
            leader.wait(DEADLINE_S)
            assert Watch(folder, timeout_s=60).ended() == []


@pytest.mark.parametrize("timeout_s", [3.0, 10.0, 25.0, 40.0])
def test_a_guard_ends_what_is_stopped_for_longer_than_the_timeout_alone(monkeypatch, timeout_s):
    """At whatever moment between two looks it is stopped, on a clock that only the guard's waits move."""

    def killed(stopped_at: float, stopped_s: float) -> bool:
        now, kills = 0.0, []

        class Poll:
            def register(self, *unused) -> None: ...

            def poll(self, milliseconds: float) -> bool:
                nonlocal now
                now += milliseconds / 1000
                return bool(kills) or now > 1000

        def state(pid: int) -> bytes:
            return b"T" if stopped_at <= now < stopped_at + stopped_s else b"S"

        monkeypatch.setattr(session_guard, "select", SimpleNamespace(poll=Poll, POLLIN=1))
        monkeypatch.setattr(session_guard, "process_state", state)
        monkeypatch.setattr(session_guard.os, "kill", lambda *of: kills.append(of))
        session_guard.wait_for_end(os.getppid(), timeout_s, os.devnull)
        assert kills in ([], [(os.getppid(), signal.SIGKILL)])
        return bool(kills)

    for stopped_at in range(100, 111):
        assert not killed(stopped_at, timeout_s - 0.1)
        assert killed(stopped_at, timeout_s + 2 * session_guard.LOOK_EVERY_S)


def test_a_role_that_is_stopped_ends_the_run_and_is_named(folder, monkeypatch):
    """Whoever stops it: it would hold the run until the collective's timeout."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    stops_itself = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    role = Role(name="serve", command=[sys.executable, "-c", stops_itself], log=folder.logs / "log")
    config = SimpleNamespace(launch=SimpleNamespace(heartbeat_timeout_s=0.0))
    stopped = (
        r"^the serve role \(its process\) \(pid \d+\) had been stopped \(SIGSTOP\) for 0 s, and was killed"
    )
    told = rf"{stopped}\nthe serve role ended with signal SIGKILL"
    with (
        pytest.raises(RoleFailed, match=told),
        Supervisor(grace_s=1) as supervisor,
        adding_causes(folder, config, supervisor),
    ):
        supervisor.start(role)
        supervisor.wait_until_done("serve")


def test_a_run_goes_on_once_the_roles_that_have_lost_their_supervisor_have_ended(folder, monkeypatch, capsys):
    """They finish and save a step: a second learner beside them would write the same files."""
    folder.release()
    with child() as role:
        about = {"who": "learner rank 0", "pid": role.pid, "started": start_of(role.pid), "doing": "update"}
        file = beat_file(folder, "rank-0")
        file.write_text(
            json.dumps(about | {"host": socket.gethostname(), "since": 0.0, "now": 0.0, "cpu": 1.0})
        )
        monkeypatch.setattr(start, "LAST_START_S", -1.0)
        for _ in range(2):  # the lock was given back
            with pytest.raises(BadInput, match=rf"still being run by learner rank 0 \(pid {role.pid}\)"):
                start._claimed(folder)
        monkeypatch.undo()
        monkeypatch.setattr(start.time, "sleep", lambda seconds: role.kill())
        start._claimed(folder)
        assert not file.exists()
        assert f"waiting for the end of learner rank 0 (pid {role.pid})" in capsys.readouterr().out


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_correction_of_the_clock_hides_no_role(folder, monkeypatch, hours):
    """A resume would not wait for a learner that still writes the folder."""
    Pulse(folder, "rank-0", timeout_s=60).look()
    boot = psutil.boot_time()
    # The kernel tells the time of its start by the corrected clock.
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 3600 * hours)
    assert [beat.pid for beat in heartbeat.living_roles(folder)] == [os.getpid()]
