"""Token ids to text by a table of bytes, if the tokenizer's decoder does nothing else.

A byte-level tokenizer (GPT-2, Qwen, Llama 3) writes each byte of a token as one character of its own alphabet. Its decoder
turns the characters back into bytes, and the bytes of all tokens together into text. ``tokenizers`` makes a string for
each token, and ``transformers`` first checks each id in Python. Both took 0.9 of the 1.6 microseconds that the sample role
spent on a token. Here a table has the bytes of each id, and the joined bytes are the text.

Source: ``ByteLevel::decode_chain`` of tokenizers 0.23. A token with a character outside of the alphabet, such as an
added token, stands for its own UTF-8. Ids without a token stand for nothing. Each maximal part of broken UTF-8 becomes
U+FFFD, as in Unicode's recommended practice (section 3.9), which Python follows too.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[np.ndarray], str]
"""Text of token ids [n], special tokens included."""


def decoder_of(tokenizer: "PreTrainedTokenizerBase") -> Decode:
    """Decodes by a table if the tokenizer has a plain byte-level decoder, else by the tokenizer itself. The text is
    ``tokenizer.decode(ids, skip_special_tokens=False)`` in either case."""

    def by_tokenizer(token_ids: np.ndarray) -> str:
        return str(tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    if not _is_plain(tokenizer):
        return by_tokenizer
    table = bytes_of_ids(tokenizer)

    def by_table(token_ids: np.ndarray) -> str:
        if not len(token_ids):
            return ""
        # A model may have more ids than its tokenizer.
        if token_ids.min() < 0 or token_ids.max() >= len(table):
            return by_tokenizer(token_ids)
        return b"".join(map(table.__getitem__, token_ids.tolist())).decode("utf-8", errors="replace")

    return by_table


def bytes_of_ids(tokenizer: "PreTrainedTokenizerBase") -> list[bytes]:
    """The bytes of each id; none for an id without a token."""
    # Any tokenizer of transformers has loaded this module already.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    by_character = {character: value for value, character in bytes_to_unicode().items()}
    backend: Any = tokenizer.backend_tokenizer

    def bytes_of(token: str | None) -> bytes:
        try:
            return bytes(map(by_character.__getitem__, token or ""))
        except KeyError:
            return str(token).encode()

    highest = max(backend.get_vocab().values(), default=-1)
    return [bytes_of(backend.id_to_token(token_id)) for token_id in range(1 + highest)]


def _is_plain(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether ``decode`` is the byte-level decoder of ``tokenizers`` and nothing else."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if kind.decode is not plain.decode or kind._decode is not plain._decode or _cleans_up(tokenizer):
        return False
    return json.loads(backend.decoder.__getstate__())["type"] == "ByteLevel"


def _cleans_up(tokenizer: Any) -> bool:
    """Whether spaces before punctuation are removed. ``transformers`` 5 keeps them for BPE, unless ``name`` is set."""
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces and (not is_bpe or getattr(tokenizer, name, False)))
