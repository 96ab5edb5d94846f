"""What a layout asks of a model: pure arithmetic on config.json, no torch, so that it can be checked before anything starts."""

from collections.abc import Mapping
from typing import Any

from configs.schema.layout import LayoutConfig


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The vocabulary with as many padding rows as it takes to divide by the tensor-parallel size."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def validate_layout(hf_config: Mapping[str, Any], layout: LayoutConfig, *, num_processes: int | None = None) -> None:
    """Raises ValueError naming the first number that does not fit. ``hf_config`` is the model's config.json.

    Query heads, key/value heads and the intermediate size must divide by the tensor-parallel size; the vocabulary is padded.
    ``num_processes``, where given, must be the layout's product of sizes.
    """
    size = layout.tensor_parallel
    heads = hf_config["num_attention_heads"]
    numbers = {
        "num_attention_heads": heads,
        "num_key_value_heads": hf_config.get("num_key_value_heads") or heads,
        "intermediate_size": hf_config["intermediate_size"],
    }
    for name, number in numbers.items():
        if number % size:
            fitting = [n for n in range(1, size) if all(value % n == 0 for value in numbers.values())]
            raise ValueError(
                f"layout.tensor_parallel={size} does not divide the model's {name}={number}; use one of {fitting or [1]} (or another model)"
            )
    if num_processes is not None and num_processes != layout.world_size:
        raise ValueError(
            f"{num_processes} processes do not fit layout.data_parallel={layout.data_parallel} times "
            f"layout.tensor_parallel={layout.tensor_parallel}; start {layout.world_size} processes or change the layout"
        )
