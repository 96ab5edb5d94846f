"""Stop texts (``rollout.stop``), searched for only after tokens that can complete one.

After each token SGLang decodes the newest tokens of a response, one per byte of the longest stop text, and searches the texts'
patterns (``rollout/servers/answers.py``) in them. A text is complete when its last character is, so the newest token then has
that character in its own text. After any other token there is nothing to find, and nothing is decoded.

SGLang decides alone after a token whose own text is not certain (a part of a character, or nothing), about texts that end
with a space, which some tokenizers drop, about patterns that are not Tandem's, and where several tokens are accepted at once.
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
    sampling = request.sampling_params
    if new_accepted_len == 1 and not sampling.stop_strs:
        ends = last_characters(tuple(sampling.stop_regex_strs))
        if ends and not may_complete(request.tokenizer, request.output_ids[-1], ends):
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
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return True  # a token may then change the text of those before it
    text = tokenizer.decode([token_id])
    return not text or UNFINISHED in text or not ends.isdisjoint(text)
