"""The roles as their process runs them."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest

import rollout.tokenization
from configs.schema.layout import parse_layout
from launch.processes.run_folder import RunFolder
from launch.roles import table
from rollout.guarded_process import own_folder
from rollout.sampling import role


def test_a_sample_role_that_is_told_to_end_leaves_no_folder_of_its_episodes(tmp_path, monkeypatch):
    config = SimpleNamespace(
        launch=SimpleNamespace(nodes=None),
        learner=SimpleNamespace(routing="own"),
        rollout=SimpleNamespace(is_truncated=False),
    )
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
            table.sample(folder, config)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not os.path.exists(folders[0]) and folder.read_address("sample") is None


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
