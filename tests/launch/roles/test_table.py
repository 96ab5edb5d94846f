"""The roles as their process runs them."""

import os
import resource
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from configs.schema.layout import parse_layout
from launch.processes.run_folder import RunFolder
from launch.roles import table
from launch.roles.start import environment
from parallel.checkpoints.checkpoint import CheckpointError, DamagedCheckpoint
from parallel.checkpoints.files import step_folder


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


def test_a_role_keeps_its_docstrings(monkeypatch):
    """transformers reads its own as it is imported: without them no server started."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    config = SimpleNamespace(launch=SimpleNamespace(threads_per_process=1))
    ask = [sys.executable, "-S", "-c", "import sys; print(sys.flags.optimize)"]
    environments = (os.environ, os.environ | environment(config))
    assert [subprocess.check_output(ask, env=env, text=True).strip() for env in environments] == ["2", "0"]


@pytest.mark.parametrize(
    ("given", "of_roles"),
    [
        ("error", "default"),
        ("ignore,error::FutureWarning", "ignore,default::FutureWarning"),
        ("ignore", "ignore"),
    ],
)
def test_no_warning_of_a_library_ends_a_role(monkeypatch, given, of_roles):
    """Megatron-Core and SGLang warn as they are imported."""
    monkeypatch.setenv("PYTHONWARNINGS", given)
    assert (
        environment(SimpleNamespace(launch=SimpleNamespace(threads_per_process=1)))["PYTHONWARNINGS"]
        == of_roles
    )


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
    monkeypatch.setattr(table, "process_group", nullcontext)
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


@pytest.mark.parametrize("removed_while", ["verified", "loaded"])
def test_an_export_takes_the_next_checkpoint_where_the_run_goes_on_and_removes_the_one(
    removed_while, monkeypatch, tmp_path
):
    """The best one, which stays, is older: it is not the newest of the run."""
    folder, loaded = RunFolder(tmp_path), []

    def go_on(path) -> None:
        if path.name == "step_000002":
            path.rename(path.with_name("step_000003"))

    def verified(path):
        if removed_while == "verified":
            go_on(path)
        if not path.is_dir():
            raise DamagedCheckpoint(f"{path} is damaged")
        return SimpleNamespace(folder=path)

    def load(whole) -> None:
        go_on(whole.folder)
        if not whole.folder.is_dir():
            raise CheckpointError("no such file")
        loaded.append(whole.folder.name)

    monkeypatch.setattr("parallel.checkpoints.checkpoint.verified", verified)
    for step in (1, 2):
        step_folder(folder.checkpoints, step).mkdir(parents=True)
    assert table.load_newest(folder, SimpleNamespace(load=load)) == 3
    assert loaded[-1] == "step_000003"
    step_folder(folder.checkpoints, 4).mkdir()
    monkeypatch.setattr(
        "parallel.checkpoints.checkpoint.verified", lambda path: SimpleNamespace(folder=tmp_path / "none")
    )
    with pytest.raises(CheckpointError, match="no such file"):
        table.load_newest(folder, SimpleNamespace(load=load))
