"""Settings of all tests."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.mlflow_store import make_empty_store

# As launch/test.sh: with more threads the same sum has other last bits, and workers of two cores slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test is timed: the machines are shared, and an example that is slow today says nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

LONGEST = (
    "end_to_end/test_two_hosts.py",
    "end_to_end/test_end_to_end.py",
    "rollout/servers/test_router.py",
    "launch/studies/test_verify_sync.py",
    "end_to_end/test_variants_end_to_end.py",
    "rollout/servers/test_sglang.py",
    "end_to_end/test_lost_server.py",
    "launch/studies/test_mismatch_command.py",
    "test_types.py",
    "trainer/test_weight_sync.py",
    "rollout/test_rewards.py",
    "parallel/megatron/test_moe.py",
    "parallel/test_layout_parity.py",
    "trainer/report/test_report.py",
    "launch/processes/test_stop.py",
    "docs/test_commands.py",
    "end_to_end/test_ends.py",
)
"""The files that take a worker a minute or more, by their time (benchmarks/results/test_suite.md)."""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without garbage collections: each would look at both engines and thousands of tests, which stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that look for leaks at the end find what a last collection would have freed


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests. The longest files come first, then the others that start engines: a long one that came
    last would be waited for by one worker alone."""
    folder = Path(__file__).parent
    place = {folder / name: number for number, name in enumerate(LONGEST)}
    if missing := [str(file) for file in place if not file.is_file()]:
        raise pytest.UsageError(f"LONGEST in tests/conftest.py names files that are not there: {missing}")
    slow_files = set()
    for item in items:
        if item.get_closest_marker("engines"):
            slow_files.add(item.path)
        elif not item.get_closest_marker("cluster"):
            item.add_marker("quick")
    items.sort(key=lambda item: (place.get(item.path, len(place)), item.path not in slow_files))


@pytest.fixture(autouse=True)
def meeting_points_left_as_they_were() -> Iterator[None]:
    """A variable that says where processes meet, and that a test leaves behind, sends the processes of a later
    test of the same worker there. Libraries may set others."""
    before = meeting_points()
    yield
    assert meeting_points() == before, "a test leaves the environment's names of meeting points as they were"


def meeting_points() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("TANDEM_")}


@pytest.fixture(scope="session")
def empty_mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it in the folder of the runs spares them the making of its tables."""
    return make_empty_store(tmp_path_factory)
