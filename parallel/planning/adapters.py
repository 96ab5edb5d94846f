"""Sizes of LoRA's adapters, and whether they fit a model: arithmetic, without torch.

Legend: as in ``memory.py``; r the rank. A target is a matrix of a layer with ``inputs`` columns and ``outputs`` rows:

    qkv    H -> (A + 2 K) D        proj   A D -> H        fc1   H -> 2 I        fc2   I -> H

Its adapter has A [r, inputs] and B [outputs, r]. qkv and fc1 are split over tensor-parallel ranks by outputs, and so is
their B; proj and fc2 by inputs, and so is their A. The other one is on every rank.
"""

from configs.schema.layout import LayoutConfig
from configs.schema.learner import LoraConfig, LoraTarget
from parallel.planning.architecture import Architecture

SPLIT_BY_OUTPUTS = ("qkv", "fc1")


def target_sizes(architecture: Architecture) -> dict[LoraTarget, tuple[int, int]]:
    """{target: (inputs, outputs)} of the whole matrices."""
    a = architecture
    heads = a.num_heads * a.head_dim
    return {
        "qkv": (a.hidden_size, heads + 2 * a.num_kv_heads * a.head_dim),
        "proj": (heads, a.hidden_size),
        "fc1": (a.hidden_size, 2 * a.intermediate_size),
        "fc2": (a.intermediate_size, a.hidden_size),
    }


def adapter_parameters(architecture: Architecture, layout: LayoutConfig, lora: LoraConfig) -> int:
    """Numbers in the adapters on one rank of the pipeline stage that has most layers."""
    sizes = target_sizes(architecture)
    each = 0
    for target in lora.targets:
        inputs, outputs = sizes[target]
        if target in SPLIT_BY_OUTPUTS:
            outputs //= layout.tp
        else:
            inputs //= layout.tp
        each += lora.rank * (inputs + outputs)
    return each * -(-architecture.num_layers // layout.pp)


def check_lora(lora: LoraConfig, architecture: Architecture) -> None:
    """Raises ValueError for adapters that the model cannot have."""
    if architecture.latent or architecture.recurrent:
        kind = "latent attention" if architecture.latent else "gated delta nets (linear attention)"
        raise ValueError(
            f"learner.lora: adapters of {kind} are not built, and this {architecture.model_type} has "
            f"{'it' if architecture.latent else 'them'}; train every weight (learner.lora=null)"
        )
    if architecture.experts and {"fc1", "fc2"} & set(lora.targets):
        raise ValueError(
            f"learner.lora.targets={list(lora.targets)}: adapters of experts are not built, and this {architecture.model_type} has "
            "experts; set learner.lora.targets=[qkv, proj]"
        )
    sizes = target_sizes(architecture)
    target, most = min(((t, min(sizes[t])) for t in lora.targets), key=lambda pair: pair[1])
    if lora.rank > most:
        raise ValueError(
            f"learner.lora.rank={lora.rank} is above {most}, the smaller side of the matrix {target}: the adapter would be larger than "
            "what it replaces; use a smaller rank, or train every weight (learner.lora=null)"
        )
