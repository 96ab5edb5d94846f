"""The roles as their process runs them."""

import os
import resource
from types import SimpleNamespace

import pytest

from configs.schema.layout import parse_layout
from launch.processes.run_folder import RunFolder
from launch.roles import table


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
