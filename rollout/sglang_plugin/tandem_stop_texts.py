"""Stop texts (``rollout.stop``), searched for only after tokens that can complete one.

After each token SGLang decodes the newest tokens of a response, one per byte of the longest stop text and one more, and searches
the texts' patterns (``rollout/servers/answers.py``) in them. A text is complete when its last character is, so the newest token
then has that character in its own text. After any other token nothing is decoded, with these exceptions:

- the newest token's own text is not certain: a part of a character, or nothing;
- a part of a character has just left the newest tokens. A tokenizer with byte tokens (Llama 2, Mistral) cannot decode any bytes
  beside a broken character, so SGLang may see a text among them only now;
- a stop text ends with white space, which some tokenizers drop;
- the tokenizer cleans up spaces, so that a token may change the text of those before it;
- a pattern is not Tandem's, or several tokens were accepted at once.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

PATTERN = re.compile(r"(.*)\|\\b\\B\.\{\d+\}", re.DOTALL)
"""Of a pattern of ``rollout.servers.answers.stop_pattern``."""
UNFINISHED = "\ufffd"
"""Stands in a decoded text for bytes that are a part of a character."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.schedule_batch.Req.tail_str", tail_to_search, HookType.AROUND)


def tail_to_search(tail_str: Callable[..., str], request: Any, new_accepted_len: int = 1) -> str:
    """``Req.tail_str``, or an empty text, in which no pattern is found."""
    sampling, token_ids = request.sampling_params, request.output_ids
    if new_accepted_len == 1 and not sampling.stop_strs:
        ends = last_characters(tuple(sampling.stop_regex_strs))
        if ends and not may_complete(request.tokenizer, token_ids[-1], ends):
            just_left = len(token_ids) - 1 - (sampling.stop_regex_max_len + 1)
            if just_left < 0 or not is_part(request.tokenizer, token_ids[just_left]):
                return ""
    return tail_str(request, new_accepted_len)


@cache
def last_characters(patterns: tuple[str, ...]) -> frozenset[str]:
    """The last characters of the texts for which these patterns search. Empty if SGLang has to search after every token."""
    texts = [text_of(pattern) for pattern in patterns]
    if not all(text and not text[-1].isspace() for text in texts):
        return frozenset()
    return frozenset(text[-1] for text in texts)


def text_of(pattern: str) -> str:
    """The text for which a pattern of Tandem's searches; empty for another pattern."""
    match = PATTERN.fullmatch(pattern)
    text = re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL) if match else ""
    return text if match and re.escape(text) == match[1] else ""


@cache
def may_complete(tokenizer: Any, token_id: int, ends: frozenset[str]) -> bool:
    """Whether a text that ends with one of ``ends`` can be complete after this token, and not before it."""
    text = tokenizer.decode([token_id])
    return not text or UNFINISHED in text or not ends.isdisjoint(text) or cleans_up(tokenizer)


@cache
def is_part(tokenizer: Any, token_id: int) -> bool:
    """Whether a token begins or ends inside a character."""
    return UNFINISHED in tokenizer.decode([token_id])


def cleans_up(tokenizer: Any) -> bool:
    """Whether decoding drops spaces before signs. For BPE transformers ignores the usual field (Llama 3's folders have it)."""
    asked = "clean_up_tokenization_spaces"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and type(backend.model).__name__ == "BPE":
        asked += "_for_bpe_even_though_it_will_corrupt_output"
    return bool(getattr(tokenizer, asked, False))
