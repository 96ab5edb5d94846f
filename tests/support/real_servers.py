"""A real SGLang server with a small model, and updates of its weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from configs.schema.rollout import Precision
from parallel.weights.transfer import Buffers, make_buckets, plan_transfer
from rollout.servers.control import SGLangControl
from rollout.servers.fleet import ServerFleet
from tests.support.server_specs import server_spec
from trainer.stage_sender import StageSender
from trainer.weight_carriers import MEMORY

EXACT = 1e-4
"""Nats that two float32 engines may differ by."""


def make_fleet(model_dir: Path, log_dir: Path, **changes) -> ServerFleet:
    rollout = {"dtype": "float32", "max_total_tokens": 4096} | changes
    return ServerFleet(server_spec(model_dir, **rollout), log_dir)


def sharpen(folder: Path) -> None:
    """Larger weights, so that the random model's distribution is far from uniform and its answers depend on
    the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = (folder / "config.json").read_text()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0 if "embed" not in name else 6.0)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)  # Olmo 3's is not that of transformers


def units_of(weights) -> list[list[tuple[str, torch.Size]]]:
    return [[(name, tensor.shape)] for name, tensor in weights]


def send(
    control: SGLangControl,
    model,
    *,
    version: int,
    in_one_request: bool = True,
    carrier: str | None = None,
    precision: Precision | None = None,
) -> list[int]:
    """Send the whole update as ``trainer.weight_sync`` does, up to ``resume``. Returns the served versions.

    The sender's side is the product's; several buckets, and tensors by themselves. carrier: None for the product's
    choice. precision: a grid, to which matrices are packed."""
    carrier = carrier or (MEMORY if in_one_request else "gloo")
    sender = StageSender(control, carrier, 60, in_one_request=in_one_request)
    try:
        plan = plan_transfer(
            units_of(model.named_parameters()),
            dtype=torch.float32,
            device="cpu",
            max_bytes=2**20,
            alone_bytes=2**17 if precision is None else 2**15,
            precision=precision,
            packs=precision is not None,
        )
        assert len(plan.buckets) > 2 and max(len(bucket.tensors) for bucket in plan.buckets) > 1
        sender.send(
            make_buckets(model.named_parameters(), plan, Buffers("cpu")), plan, version, control.open_update()
        )
        return control.close_update()
    finally:
        sender.leave()
