"""What a CPU server's checksums of given weights must be: SGLang's names and its order of rows, written out."""

import hashlib
import re
from collections.abc import Iterable

import torch
from torch import Tensor

FUSED = (
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), ".qkv_proj.", ("q_proj", "k_proj", "v_proj")),
    (re.compile(r"\.(gate_proj|up_proj)\."), ".gate_up_proj.", ("gate_proj", "up_proj")),
)
"""Hugging Face projections that SGLang stacks into one matrix, in this order of rows."""


def expected_checksums(weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """``SGLangControl.checksums`` of one rank with a dense Qwen2, Qwen3 or Llama: 8 bytes of SHA-256."""
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights:
        fused, place = name, 0
        for pattern, replacement, order in FUSED:
            if match := pattern.search(name):
                fused, place = pattern.sub(replacement, name), order.index(match[1])
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):  # rows up to a multiple of 64
            tensor = torch.cat([tensor, tensor.new_zeros(-tensor.shape[0] % 64, tensor.shape[1])])
        parts.setdefault(fused, {})[place] = tensor
    return {
        name: hashlib.sha256(
            b"".join(p[i].detach().contiguous().numpy().tobytes() for i in sorted(p))
        ).hexdigest()[:16]
        for name, p in parts.items()
    }
