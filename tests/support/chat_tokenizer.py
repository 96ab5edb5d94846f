"""A small byte-level BPE tokenizer with the special tokens of several families, and their chat templates.

The templates in ``templates/`` were written for these tests: they render to the format of their family.
"""

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "</s>",
)  # fmt: skip
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added, but no special tokens, as Qwen3 has them."""
SENTENCES = (
    "The answer is 4. What is 2 + 2? Let me see, are you sure?\n\n\nYes, the tool says:\n\n  4.\n",
    "system user assistant tool ipython <think> thinking </think> <tool_call> function arguments name",
    '### Instruction:\n\n### Response:\n\n{"name": "add", "arguments": {"a": 2, "b": 2}}',
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen and Llama 3 split text before BPE; a header's blank lines stay one token before an answer."""
BOS_AND_EOS = {
    "llama3_1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral_v3": ("<|begin_of_text|>", "</s>"),
}


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return tokenizer.to_str()


def template_of(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text()


def chat_tokenizer(
    family: str = "qwen2_5", *, template: str | None = None, **options: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer with the template of ``family``, or with another ``template``."""
    bos, eos = BOS_AND_EOS.get(family, (None, "<|im_end|>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        **options,
    )
    tokenizer.chat_template = template_of(family) if template is None else template
    return tokenizer
