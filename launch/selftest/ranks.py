"""The selftest-rank role: the work of one check, in separate processes under torchrun.

request.json names the work, and ``PARTS`` has its function. The first rank writes found.json. A rank that finds an
error writes failed.json and fails.
"""

import contextlib
import importlib
import json
from dataclasses import asdict
from typing import Any

from configs.schema import RunConfig
from launch.processes.run_folder import RunFolder, write_json
from launch.selftest.check import CheckFailed
from trainer.file_system import read_required

PARTS: dict[str, str] = {
    **dict.fromkeys(("model", "collectives", "logprobs", "update", "memory"), "alone"),
    **dict.fromkeys(("engines", "transfer", "flipped_bit", "mismatch"), "served"),
}
"""Functions (folder, config, request) -> Found, and their modules, which import torch and Megatron."""
FOUND, FAILED = "found.json", "failed.json"


def run_part(folder: RunFolder, config: RunConfig) -> None:
    import torch.distributed as dist

    request = read_required(folder.request)
    name = request["part"]
    part = getattr(importlib.import_module(f"launch.selftest.{PARTS[name]}"), name)
    try:
        found = part(folder, config, request)
    except CheckFailed as failure:
        with contextlib.suppress(FileExistsError), (folder.path / FAILED).open("x") as file:
            json.dump({"error": failure.error, "fix": failure.fix}, file)
        raise
    if dist.get_rank() == 0:
        write_json(folder.path / FOUND, asdict(found) | {"torch": torch_facts()})


def torch_facts() -> dict[str, Any]:
    """torch's build and the devices that it sees, for the report. The command itself does not import torch."""
    import torch

    built_with = [line.strip(" -") for line in torch.__config__.show().splitlines()[1:]]
    facts: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "built_with": [line for line in built_with if not line.startswith("Build settings")],
    }
    if torch.cuda.is_available():
        from torch.cuda import nccl

        facts |= {
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl.version())),
            "capability": [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())],
        }
    return facts
