"""A real SGLang server with a small model, and updates of its weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from parallel.weights.transfer import WeightBroadcaster, make_buckets
from rollout.servers.control import Served, SGLangControl
from rollout.servers.fleet import ServerFleet
from tests.support.server_specs import server_spec

EXACT = 1e-4
"""Nats that two float32 engines may differ by."""


def make_fleet(model_dir: Path, log_dir: Path, **changes) -> ServerFleet:
    rollout = {"dtype": "float32", "max_total_tokens": 4096} | changes
    return ServerFleet(server_spec(model_dir, **rollout), log_dir)


def sharpen(folder: Path) -> None:
    """Larger weights, so that the random model's distribution is far from uniform and its answers depend on
    the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0 if "embed" not in name else 6.0)
    model.save_pretrained(folder)


def send(
    control: SGLangControl, model, *, version: int, tensor_parallel: int = 1, group_name: str | None = None
) -> Served:
    """The whole update as ``rollout.servers.control`` describes it up to ``resume``, with this process as rank 0 of a
    gloo group of its own.

    No answer is waited for before the last request is sent: the server takes them one after the other.
    """
    size = 1 + tensor_parallel * len(control.urls)
    broadcaster = WeightBroadcaster(world_size=size, backend="gloo", timeout_s=60, group_name=group_name)
    try:
        joining = control.join_group(
            master_address=broadcaster.address,
            master_port=broadcaster.port,
            world_size=broadcaster.world_size,
            group_name=broadcaster.group_name,
            backend="gloo",
        )
        broadcaster.join(check=joining.raise_if_failed)
        joining.wait()
        pending = [control.open_update()]
        for bucket in make_buckets(model.named_parameters(), dtype=torch.float32, max_bytes=2**20):
            receiving = control.receive_bucket(
                names=bucket.names,
                dtype="float32",
                shapes=bucket.shapes,
                version=version if bucket.is_last else None,
            )
            pending.append(receiving)
            broadcaster.start(bucket).wait(check=lambda: [answer.raise_if_failed() for answer in pending])
        assert len(pending) > 2
        served = control.close_update(with_checksums=True)
        for answer in pending:
            answer.wait()
        control.leave_group()
        return served
    finally:
        broadcaster.close()
