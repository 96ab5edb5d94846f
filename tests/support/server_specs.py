"""Servers to start, or to write a command line for."""

from pathlib import Path

from configs.schema import RunConfig
from rollout.servers.command import ServerSpec


def server_spec(
    model_dir: Path, *, cuda: bool = False, seed: int = 0, routing: str = "own", **rollout
) -> ServerSpec:
    """The spec of servers that no run owns: requests to them prove no key."""
    task = {"type": "countdown"}
    config = RunConfig(
        model={"path": model_dir}, task=task, rollout=rollout, seed=seed, learner={"routing": routing}
    )
    return ServerSpec(config=config, cuda=cuda)
