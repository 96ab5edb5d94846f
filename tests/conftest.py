"""Settings of all tests."""

import gc
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.mlflow_store import make_empty_store

# No test is timed: the machines are shared, and an example that is slow today says nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
    """Mark the quick tests. Files that start engines come first: a long one that came last would be waited for by
    one worker alone."""
    slow_files = set()
    for item in items:
        if item.get_closest_marker("engines"):
            slow_files.add(item.path)
        elif not item.get_closest_marker("cluster"):
            item.add_marker("quick")
    items.sort(key=lambda item: item.path not in slow_files)


@pytest.fixture(scope="session")
def empty_mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it in the folder of the runs spares them the making of its tables."""
    return make_empty_store(tmp_path_factory)
