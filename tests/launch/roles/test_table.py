"""The roles as their process runs them."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import rollout.tokenization
from configs.schema.layout import parse_layout
from launch.processes.run_folder import RunFolder
from launch.roles import table
from rollout.guarded_process import own_folder
from rollout.sampling import role

CONFIG = SimpleNamespace(
    launch=SimpleNamespace(nodes=None),
    learner=SimpleNamespace(routing="own"),
    rollout=SimpleNamespace(is_truncated=False),
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


def test_a_sample_role_removes_the_folders_of_one_that_was_killed_and_no_others(tmp_path, monkeypatch):
    (tmp_path / "roles").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def no_episodes(config, **named) -> None:
        pass

    monkeypatch.setattr(role, "run_sample_role", no_episodes)
    monkeypatch.setattr(rollout.tokenization, "import_transformers_without_torch", lambda: None)
    players = [
        subprocess.Popen([sys.executable, "-c", EPISODE], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
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
        table.sample(RunFolder(tmp_path), CONFIG)
        assert {*killed.parent.iterdir()} == {alive, elsewhere, linked, users}
        assert all((folder / "file").exists() for folder in (alive, elsewhere, users))
    finally:
        for player in players:
            player.kill()
            player.wait()


def test_a_sample_role_that_is_told_to_end_leaves_no_folder_of_its_episodes(tmp_path, monkeypatch):
    (tmp_path / "roles").mkdir()
    folder, folders = RunFolder(tmp_path), []

    async def episodes(config, *, announce, **named) -> None:
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
            table.sample(folder, CONFIG)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not os.path.exists(folders[0]) and folder.read_address("sample") is None


def test_a_role_may_open_as_many_files_as_the_system_lets_it(monkeypatch, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    monkeypatch.setattr(
        table,
        "config_of",
        lambda *_: SimpleNamespace(launch=SimpleNamespace(nodes=None, heartbeat_timeout_s=1)),
    )
    monkeypatch.setattr(table, "role_environment", lambda _: {})
    monkeypatch.setattr(
        table, "guard_session", lambda **_: found.append(resource.getrlimit(resource.RLIMIT_NOFILE))
    )
    monkeypatch.setattr(table, "exit_now", found.append)
    monkeypatch.setitem(table.ROLES, "sample", lambda *_, **named: None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        table.run_role("sample", RunFolder(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [(min(hard, table.MOST_OPEN_FILES), hard)]


@pytest.mark.parametrize("name", table.BESIDE_A_RUN)
def test_a_command_on_a_run_that_goes_on_is_no_sign_of_life_of_it(name, monkeypatch, tmp_path):
    """It was learner rank 0 in `tandem status`, and took the beat and the note of that rank away as it ended."""
    config = SimpleNamespace(
        layout=parse_layout(""), launch=SimpleNamespace(nodes=None, heartbeat_timeout_s=1)
    )
    monkeypatch.setattr(table, "config_of", lambda *_: config)
    for patched in ("end_with_parent", "go_on_unheard", "allow_open_files", "guard_session"):
        monkeypatch.setattr(table, patched, lambda *_, **unused: None)
    monkeypatch.setattr(table, "role_environment", lambda _: {})
    monkeypatch.setattr(table, "exit_now", lambda code: pytest.fail(f"exit code {code}"))
    (tmp_path / "roles").mkdir()
    of_the_run = {"rank-0.beat": "a beat", "rank-0.stopped": "a note"}
    for file, text in of_the_run.items():
        (tmp_path / "roles" / file).write_text(text)
    monkeypatch.setitem(table.ROLES, name, lambda *_: None)
    table.run_role(name, RunFolder(tmp_path))
    assert {file.name: file.read_text() for file in (tmp_path / "roles").iterdir()} == of_the_run


@pytest.mark.parametrize(("layout", "value"), [("", None), ("pp=2", None), ("tp=2", "1"), ("tp=2,sp", "1")])
def test_ranks_of_tensor_parallelism_have_one_queue_as_megatron_asks(monkeypatch, tmp_path, layout, value):
    """Megatron looks for it in the environment, where a user may have set another value for a reason."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    config = SimpleNamespace(
        layout=parse_layout(layout), launch=SimpleNamespace(nodes=None, heartbeat_timeout_s=1)
    )
    monkeypatch.setattr(table, "config_of", lambda *_: config)
    monkeypatch.setattr(table, "role_environment", lambda _: {})
    monkeypatch.setattr(table, "guard_session", lambda **_: None)

    def stop(_signal) -> None:
        raise KeyboardInterrupt(os.environ.get(name))

    monkeypatch.setattr(table, "end_with_parent", stop)
    for found, expected in ((None, value), ("8", "8")):
        monkeypatch.setenv(name, found or "")
        if found is None:
            monkeypatch.delenv(name)
        with pytest.raises(KeyboardInterrupt) as ended:
            table.run_role("learn", RunFolder(tmp_path))
        assert ended.value.args == (expected,)
