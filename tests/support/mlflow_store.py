"""An MLflow store without runs, made once for all tests of a session: its tables cost two CPU seconds."""

import fcntl
import logging
import os
from pathlib import Path

import pytest


def make_empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, for tests to copy. Workers share it."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    store = folder / "empty-mlflow.db"
    with store.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not store.exists():
            _make_tables(store)
    return store


def _make_tables(store: Path) -> None:
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    being_made = store.with_suffix(".part")
    being_made.unlink(missing_ok=True)
    client = MlflowClient(tracking_uri=f"sqlite:///{being_made}")
    assert client.search_experiments()
    client._tracking_client.store.engine.dispose()  # nothing stays in a journal
    being_made.rename(store)
