"""The serve role's watch over its servers, with an empty fleet instead of them."""

import errno
import os
import signal
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from configs.loader import load_config
from launch.processes import run_folder, stopping
from launch.processes.run_folder import RunFolder, write_json
from launch.roles import serve
from rollout import guarded_process
from rollout.guarded_process import OF_SERVERS, own_name
from rollout.servers import fleet as fleets
from rollout.servers.watchdog import LIST

RECIPE = Path(__file__).resolve().parents[3] / "configs/recipes/countdown_tiny.yaml"


class Fleet:
    """Counts what it is asked; ``polls`` ends the watch."""

    urls = ("http://a:1", "http://b:1")

    def __init__(self, stop: threading.Event, looks: int):
        self.stop, self.looks, self.deaths, self.back, self.hung = stop, looks, [], [], []

    def _look(self) -> None:
        self.looks -= 1
        if not self.looks:
            self.stop.set()

    def poll(self) -> None:
        self._look()
        if self.deaths:
            raise self.deaths.pop()

    def note_ended(self) -> bool:
        self._look()
        return bool(self.deaths)

    def restart_ended(self, most: int) -> list[Exception]:
        return [self.deaths.pop()]

    def look_at_restarted(self) -> list[int]:
        return self.back

    def kill_hung(self) -> list[int]:
        return self.hung

    def lives(self) -> dict[str, int]:
        return {"http://a:1": 1}


class Ended(Exception):
    pass


@pytest.fixture
def folder(tmp_path, monkeypatch) -> RunFolder:
    (tmp_path / "roles").mkdir()
    monkeypatch.setattr(serve, "LOOK_S", 0.0)
    return RunFolder(tmp_path)


def watch(folder: RunFolder, fleet: Fleet, *, restarts: int = 0, is_over: bool = False) -> None:
    serve.watch(fleet, folder, "serve", fleet.stop, lambda: is_over, restarts=restarts)


def announce(folder: RunFolder, fleet: Fleet) -> None:
    serve.announce(folder, "serve", fleet, fleet.stop, lambda: False)


@pytest.mark.parametrize("now", [None, {"pid": 1, "host": "elsewhere", "urls": []}])
def test_servers_of_a_start_that_the_run_has_left_behind_end(folder, now, capsys):
    fleet = Fleet(threading.Event(), looks=100)
    if now is not None:
        folder.announce("serve", now)
    watch(folder, fleet)
    assert fleet.looks == 100 and "has replaced this role" in capsys.readouterr().out


def test_servers_of_the_present_start_are_watched(folder):
    fleet = Fleet(threading.Event(), looks=3)
    announce(folder, fleet)
    announced = folder.read_address("serve")
    assert (announced["pid"], announced["host"]) == (os.getpid(), socket.gethostname())
    watch(folder, fleet)
    assert fleet.looks == 0


def test_servers_whose_supervisor_has_ended_the_run_end_without_a_signal(folder, capsys):
    fleet = Fleet(threading.Event(), looks=100)
    announce(folder, fleet)
    watch(folder, fleet, is_over=True)
    assert fleet.looks == 100 and "this start of the run has ended" in capsys.readouterr().out


def test_the_time_of_the_end_tells_an_earlier_start_from_this_one(folder):
    assert stopping.time_of_end(folder) is None
    stopping.ending(folder).touch()
    os.utime(stopping.ending(folder), ns=(1, 1))
    earlier = stopping.time_of_end(folder)
    stopping.ending(folder).touch()
    assert earlier == 1 and stopping.time_of_end(folder) > 1


def test_a_server_that_ends_is_started_again_as_often_as_the_config_says(folder, capsys):
    fleet = Fleet(threading.Event(), looks=100)
    announce(folder, fleet)
    fleet.deaths = [Ended("the third"), Ended("the second"), Ended("the first")]
    with pytest.raises(Ended, match="the third"):
        watch(folder, fleet, restarts=2)
    said = capsys.readouterr().out
    assert "(restarts left: 1): the first" in said and "(restarts left: 0): the second" in said
    assert folder.read_address("serve")["lives"] == {"http://a:1": 1}


def test_a_server_that_is_back_is_announced_once_the_disk_has_space(folder, monkeypatch, capsys):
    """Its role would end, and with it the run."""
    full = [OSError(errno.ENOSPC, "No space left on device")] * 4

    def write_where_there_is_space(path: Path, content: dict) -> None:
        if full:
            raise full.pop()
        write_json(path, content)

    monkeypatch.setattr(run_folder, "write_json", write_where_there_is_space)
    monkeypatch.setattr(run_folder, "SPACE_S", 0.0)
    monkeypatch.setattr(serve, "LOOK_S", 1000.0)
    fleet = Fleet(threading.Event(), looks=2)
    fleet.back = [0]
    with pytest.raises(OSError, match="No space"):  # of a stop, nothing is waited for
        fleet.stop.set()
        announce(folder, fleet)
    assert len(full) == 3
    fleet.stop.clear()
    with pytest.raises(OSError, match="No space"):  # before the learner has started, no step is lost
        announce(folder, fleet)
    assert len(full) == 2
    write_json(folder.address("learn"), {})
    watch(folder, fleet, restarts=1)
    assert not full and folder.read_address("serve")["lives"] == {"http://a:1": 1}
    assert capsys.readouterr().out.count("has no space for the address of serve") == 1


def of_killed(prefix: str, folder: Path) -> Path:
    """A folder of this name's kind, whose process had our id before us."""
    name = own_name(prefix).replace(f"-{guarded_process.start_of(os.getpid())}-", "-1-")
    (folder / name).mkdir()
    return folder / name


def test_a_role_on_a_node_without_a_sample_role_removes_what_killed_servers_left(tmp_path, monkeypatch):
    class NoServers(Fleet):
        def __init__(self, *unused):
            raise Ended

    monkeypatch.setattr(fleets, "ServerFleet", NoServers)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = RunFolder(tmp_path / "run")
    run.claim()
    server, program = of_killed(OF_SERVERS, tmp_path), of_killed("tandem-code-", tmp_path)
    in_memory = [Path(f"/dev/shm/sglang_loads_{tmp_path.name}-{os.getpid()}-{n}") for n in range(2)]
    for folder, file in zip((server, program), in_memory, strict=True):
        file.touch()
        (folder / LIST).write_text(f"{file}\n")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(Ended):
            serve.serve(run, load_config(RECIPE, ["model.path=model"]), print, node=0)
        assert not server.exists() and program.exists(), "a program's folder belongs to the sample role"
        assert [file.exists() for file in in_memory] == [False, True]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for file in in_memory:
            file.unlink(missing_ok=True)


def test_two_roles_of_a_machine_may_remove_the_same_folders_at_once(tmp_path, monkeypatch):
    remove = guarded_process.remove
    for _ in range(4):
        of_killed(OF_SERVERS, tmp_path)
    first, *others, last = (entry.path for entry in os.scandir(tmp_path))

    def remove_too(folder: str) -> None:
        for path in (folder, *others):  # the other role's
            remove(path)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(guarded_process, "remove", remove_too)
    guarded_process.remove_abandoned(OF_SERVERS)
    assert not os.path.exists(first) and not os.path.exists(last)
