"""Fixtures of whole runs."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.tiny_model import make_tiny_countdown_model
from tests.support.whole_runs import processes_of


@pytest.fixture
def folder(tmp_path, empty_mlflow_store) -> Iterator[Path]:
    make_tiny_countdown_model(tmp_path / "model", seed=0)
    (tmp_path / "runs").mkdir()
    shutil.copy(empty_mlflow_store, tmp_path / "runs" / "mlflow.db")
    yield tmp_path
    for process in processes_of(tmp_path):  # of a test that failed
        process.kill()
