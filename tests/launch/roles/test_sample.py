"""The sample role as its process runs it."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import rollout.tokenization
from launch.processes import run_folder, stopping
from launch.processes.run_folder import RunFolder
from launch.roles import sample as sample_role
from launch.roles.sample import sample
from rollout.guarded_process import own_folder
from rollout.sampling import role
from rollout.servers.watchdog import LIST

CONFIG = SimpleNamespace(
    launch=SimpleNamespace(nodes=None, start_timeout_s=20.0), model=SimpleNamespace(path=None)
)
EPISODE = """
import asyncio, os
from rollout.guarded_process import own_folder

async def play():
    async with own_folder("tandem-test-") as path:
        open(os.path.join(path, "file"), "w").close()
        print(path, flush=True)
        await asyncio.sleep(300)

asyncio.run(play())
"""


@pytest.fixture(autouse=True)
def without_model(monkeypatch):
    monkeypatch.setattr("launch.roles.sample.architecture_of", lambda path: None)


def test_a_sample_role_removes_the_folders_of_one_that_was_killed_and_no_others(tmp_path, monkeypatch):
    (tmp_path / "roles").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def no_episodes(config, policy, **named) -> None:
        pass

    monkeypatch.setattr(role, "run_sample_role", no_episodes)
    monkeypatch.setattr(rollout.tokenization, "import_transformers_without_torch", lambda: None)
    players = [
        subprocess.Popen([sys.executable, "-c", EPISODE], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    in_memory = [Path(f"/dev/shm/sglang_loads_{tmp_path.name}-{os.getpid()}-{n}") for n in range(2)]
    precious = tmp_path / "precious"
    for file in (*in_memory, precious):
        file.touch()
    try:
        killed, alive = (Path(player.stdout.readline().strip()) for player in players)
        players[0].kill()
        players[0].wait()
        kind, name, machine, *process, token = killed.name.split("-")
        elsewhere = killed.with_name("-".join([kind, name, "0" * len(machine), *process, token]))
        linked = killed.with_name("-".join([kind, name, machine, *process, "0" * len(token)]))
        users = killed.with_name("tandem-notes-of-mine")
        for folder in (elsewhere, users):
            shutil.copytree(killed, folder)
        linked.symlink_to(users)
        server = killed.with_name("-".join([kind, "server", machine, *process, token]))
        shutil.copytree(killed, server)
        for folder, file in zip((server, killed), in_memory, strict=True):
            (folder / LIST).write_text(f"{file}\n{precious}\n")
        sample(RunFolder(tmp_path), CONFIG, print)
        assert {*killed.parent.iterdir()} == {alive, elsewhere, linked, users}
        assert all((folder / "file").exists() for folder in (alive, elsewhere, users))
        assert [file.exists() for file in (*in_memory, precious)] == [False, True, True]
    finally:
        for player in players:
            player.kill()
            player.wait()
        for file in in_memory:
            file.unlink(missing_ok=True)


def test_a_sample_role_that_is_told_to_end_leaves_no_folder_of_its_episodes(tmp_path, monkeypatch):
    (tmp_path / "roles").mkdir()
    folder, folders = RunFolder(tmp_path), []

    async def episodes(config, policy, *, announce, **named) -> None:
        announce("tcp://127.0.0.1:1")
        async with own_folder("tandem-test-") as path:
            folders.append(path)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(20)

    monkeypatch.setattr(role, "run_sample_role", episodes)
    monkeypatch.setattr(rollout.tokenization, "import_transformers_without_torch", lambda: None)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(asyncio.CancelledError):
            sample(folder, CONFIG, print)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not os.path.exists(folders[0]) and folder.read_address("sample") is None


def test_a_sample_role_that_waits_for_space_ends_at_sigterm(tmp_path, monkeypatch):
    (tmp_path / "roles").mkdir()
    tries = []

    class Ended(Exception):
        """Instead of the signal's own effect, which would end the tests."""

    def end(number, frame):
        raise Ended

    def full_disk(path, content):
        tries.append(path)
        if len(tries) > 1:
            pytest.fail("SIGTERM had no effect")
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(errno.ENOSPC, "No space left on device")

    async def ready(config, policy, *, announce, **named) -> None:
        announce("tcp://127.0.0.1:1")

    monkeypatch.setattr(role, "run_sample_role", ready)
    monkeypatch.setattr(rollout.tokenization, "import_transformers_without_torch", lambda: None)
    monkeypatch.setattr(run_folder, "write_json", full_disk)
    monkeypatch.setattr(run_folder, "SPACE_S", 0.0)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(Ended):
            sample(RunFolder(tmp_path), CONFIG, print)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("ready", [True, False], ids=["sampling", "waiting-for-servers"])
def test_a_sample_role_that_hears_no_sigterm_ends_with_its_start_of_the_run(tmp_path, monkeypatch, ready):
    folder = RunFolder(tmp_path)
    folder.roles.mkdir()
    stopping.ending(folder).touch()
    os.utime(stopping.ending(folder), ns=(1, 1))  # of the start before

    async def episodes(config, policy, *, server_urls, **named) -> None:
        stopping.ending(folder).touch()
        if not ready:
            server_urls()
        await asyncio.sleep(20)

    monkeypatch.setattr(role, "run_sample_role", episodes)
    monkeypatch.setattr(sample_role, "LOOK_S", 0.01)
    monkeypatch.setattr(sample_role, "serve_roles", lambda config: ["serve-0"])
    monkeypatch.setattr(rollout.tokenization, "import_transformers_without_torch", lambda: None)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(asyncio.CancelledError if ready else KeyboardInterrupt):
            sample(folder, CONFIG, print)
    finally:
        signal.signal(signal.SIGTERM, before)
