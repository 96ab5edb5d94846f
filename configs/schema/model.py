"""The model that is trained, and its precision."""

from typing import Literal

from configs.schema.base import Count, GivenPath, Schema

Dtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Schema):
    """The model that is trained."""

    path: GivenPath
    """A Hugging Face folder (config.json, *.safetensors, tokenizer) of one of the families in docs/model.md."""
    dtype: Dtype = "bfloat16"
    """Precision of the learner's weights and activations; the optimizer keeps float32 in any case. float16
    scales the loss: a step whose scaled gradient overflows is skipped, the scale is halved, and
    ``optim/skipped`` counts the step."""
    fp32_lm_head: bool = False
    """The output projection in float32, in the learner and in SGLang alike."""
    numerics: Literal["default", "aligned"] = "default"
    """aligned: learner and SGLang compute every row of every operation in one fixed order, so that the log-prob of
    each sampled token has the same bits in both, and a step where one differs ends the run. On CPU, for dense
    models, with one thread on both sides. layout.tp and rollout.tp may be any powers of two, and differ."""
    numerics_pieces: Count | None = None
    """Aligned numerics sum over the inputs of a product in this many pieces, so that 1, 2, ... ranks that share the
    pieces get the same bits. A power of two. None: the larger of layout.tp and rollout.tp. A fixed number keeps a run's
    bits where it is resumed under another layout."""
