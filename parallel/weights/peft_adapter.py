"""The adapters of a model as a folder that ``peft`` loads: adapter_config.json and adapter_model.safetensors.

A matrix that Megatron fuses becomes those of Hugging Face, each with its own rows of B and a copy of A. peft computes
W x + lora_alpha / r B (A x) with the base model that the config names; this is what ``learner.lora.forward: factored``
computes, and merged it is W + lora_alpha / r B A, what servers get. The names are those of peft 0.21 for a causal model.
"""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from configs.schema.learner import LoraConfig
from parallel.megatron.groups import groups_of_this_process
from parallel.megatron.model import PackedGPTModel
from parallel.rank_objects import raise_on_all_ranks
from parallel.weights.hf_conversion import export_adapters, try_call
from parallel.weights.hf_files import hidden_folder, replace_folder, share_as_new
from parallel.weights.hf_headers import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PREFIX = "base_model.model."


def adapter_config(lora: LoraConfig, base: Path, modules: Sequence[str]) -> dict[str, object]:
    """The content of adapter_config.json. modules: the last names of the matrices that have adapters."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.absolute()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def save_adapter(models: Sequence[PackedGPTModel], lora: LoraConfig, base: Path, folder: Path) -> None:
    """Write the adapters of all pipeline stages into ``folder``, which appears complete or not at all. A collective of all
    ranks. Raises OSError on every rank if the write failed."""
    mine = {}
    for name, a, b in export_adapters(models):
        module = PREFIX + name.removesuffix(".weight")
        mine[f"{module}.lora_A.weight"], mine[f"{module}.lora_B.weight"] = a.cpu().clone(), b.cpu().clone()
    groups = groups_of_this_process()
    # Rank 0's pipeline has a rank of every stage.
    stages: list[Any] | None = [None] * groups.pp_size if groups.rank == 0 else None
    if groups.is_stage_first:
        dist.gather_object(mine, stages, dst=0, group=groups.pp_group)
    failure = None
    if stages is not None:
        tensors = {name: tensor for stage in stages for name, tensor in stage.items()}
        _, failure = try_call(partial(_write, tensors, lora, base, Path(folder)))
    raise_on_all_ranks(failure, f"the adapter {folder}")


def _write(tensors: dict[str, Tensor], lora: LoraConfig, base: Path, folder: Path) -> None:
    temporary = hidden_folder(folder)
    try:
        save_file(tensors, temporary / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
        content = json.dumps(adapter_config(lora, base, sorted(modules)), indent=2)
        (temporary / ADAPTER_CONFIG).write_text(content + "\n")
        share_as_new(temporary)
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
