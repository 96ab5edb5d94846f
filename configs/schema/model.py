"""The model that is trained, and its precision."""

import json
from typing import Any, Literal

from pydantic import Field, field_validator

from configs.schema.base import Count, GivenPath, Schema

Dtype = Literal["float32", "bfloat16", "float16"]
SET_BY_TANDEM = frozenset(
    (
        "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)  # fmt: skip
"""Names that ``chat_template_kwargs`` may not have: parameters of transformers' ``apply_chat_template``, and
the variables that it passes to every template."""


class ModelConfig(Schema):
    """The model that is trained."""

    path: GivenPath
    """A Hugging Face folder (config.json, *.safetensors, tokenizer) of one of the families in docs/model.md."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model's chat template, such as ``enable_thinking: false``. They apply wherever the
    template renders a prompt: in training, evaluations, warm starts and environments. An argument that the
    template never reads is an error."""
    dtype: Dtype = "bfloat16"
    """Precision of the learner's weights and activations; the optimizer keeps float32 in any case. float16
    scales the loss: a step whose scaled gradient overflows is skipped, the scale is halved, and
    ``optim/skipped`` counts the step."""
    fp32_lm_head: bool = False
    """The output projection in float32, both in the learner and in SGLang."""
    numerics: Literal["default", "aligned"] = "default"
    """aligned: learner and SGLang compute every row of every operation in one fixed order. The log-prob of
    each sampled token then has the same bits in both; a step in which one differs ends the run. On CPU, for
    dense models, with one thread on both sides. layout.tp and rollout.tp may be any powers of two, and may
    differ."""
    numerics_pieces: Count | None = None
    """Aligned numerics sum over the inputs of a product in this many pieces, so that 1, 2, ... ranks that
    share the pieces get the same bits. A power of two. None: the larger of layout.tp and rollout.tp. A fixed
    number keeps a run's bits if it is resumed under another layout."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_of_the_template(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(arguments.keys() & SET_BY_TANDEM):
            raise ValueError(
                f"chat_template_kwargs has {', '.join(taken)}, which Tandem sets itself; leave it out"
            )
        try:
            json.dumps(arguments, allow_nan=False)
        except ValueError:  # the run's record, which every role reads, would have null instead
            raise ValueError("chat_template_kwargs has a number that is not finite; give another") from None
        return arguments
