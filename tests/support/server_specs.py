"""Servers to start, or to write a command line for."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from configs.schema.launch import LaunchConfig
from configs.schema.rollout import RolloutConfig
from rollout.run_key import run_key
from rollout.servers.command import ServerSpec
from rollout.servers.control import SGLangControl

KEY = run_key(Path(tempfile.gettempdir()) / f"tandem-tests-{os.getuid()}.yaml")
"""The key of servers and sample roles that no run owns, the same in every process of the tests."""


def server_spec(
    model_dir: Path, *, cuda: bool = False, seed: int = 0, routing: str = "own", **rollout
) -> ServerSpec:
    """The spec of servers that no run owns: requests to them prove ``KEY``."""
    task = {"type": "countdown"}
    config = RunConfig(
        model={"path": model_dir}, task=task, rollout=rollout, seed=seed, learner={"routing": routing}
    )
    return ServerSpec(config=config, cuda=cuda, key=KEY)


def make_control(
    urls: Sequence[str], *, tp: int = 1, timeout_s: float = 120.0, **named: Any
) -> SGLangControl:
    """The control of such servers."""
    launch = LaunchConfig(collective_timeout_s=timeout_s)
    return SGLangControl(RolloutConfig(tp=tp), launch, urls, key=KEY, **named)
