"""Gemma 3 on SGLang's servers: the factor of the embeddings, which is the square root of the hidden size.

The model was trained with this factor rounded to bfloat16. Transformers and the learner round it to the model's dtype (25.25
for a hidden size of 640). SGLang 0.5.23 multiplies by the exact factor (25.298), 0.2 % more.
"""

import os

MODEL = "sglang.srt.models.gemma3_causal"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "gemma3_causal" in os.environ.get("SGLANG_DISABLED_MODEL_ARCHS", "").split(","):
        return  # a server of another model: the hook would import the code of this one
    HookRegistry.register(f"{MODEL}.Gemma3TextScaledWordEmbedding.__init__", _round_scale, HookType.AFTER)


def _round_scale(result, embedding, *arguments, **options) -> None:
    """Runs after ``Gemma3TextScaledWordEmbedding.__init__``, which has made the weight in the model's dtype."""
    import torch

    embedding.embed_scale = torch.tensor(embedding.embed_scale, dtype=embedding.weight.dtype).item()
