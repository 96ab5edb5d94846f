"""The search for stop texts that leaves out tokens, against SGLang's rule, which searches after every token. A real server
that ends its responses at such texts: test_sglang.py."""

import re
import sys
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rollout.servers.answers import stop_pattern
from rollout.servers.command import PLUGIN
from tests.support.chat_tokenizer import chat_tokenizer

sys.path.append(str(PLUGIN))  # as SGLang finds it
import tandem_stop_texts as stop_texts

PIECES = (
    "▁", "a", "b", ">", "</", "s", "é", "🙂", "▁a", "ab", "b>", "a▁", "</s>", "éa", "\n", "<0xC3>", "<0xA9>", "<0x3E>", "<0x20>", "<0x61>",
)  # fmt: skip
FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
BYTES = [i for i, piece in enumerate(PIECES) if piece.startswith("<0x")]
TEXTS = st.text("ab<>/sé🙂 \n", min_size=1, max_size=4)


@cache
def sentence_pieces() -> PreTrainedTokenizerFast:
    """As Llama 2's: pieces with a sign for the space, of which decoding drops the first, and bytes."""
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    has_no_effect = {"clean_up_tokenization_spaces": True}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **has_no_effect)


def request_with(tokenizer, texts, token_ids=()):
    patterns = [stop_pattern(text) for text in texts]
    longest = max(len(text.encode()) for text in texts)
    sampling = SimpleNamespace(stop_strs=[], stop_regex_strs=patterns, stop_regex_max_len=longest)
    return SimpleNamespace(tokenizer=tokenizer, sampling_params=sampling, output_ids=list(token_ids))


def ends(tokenizer, texts: list[str], token_ids: list[int], searches) -> int | None:
    """The number of tokens after which SGLang ends the response; ``searches`` is ``Req.tail_str``."""
    request = request_with(tokenizer, texts)
    for token_id in token_ids:
        request.output_ids.append(token_id)
        text = searches(request)
        if any(re.search(pattern, text) for pattern in request.sampling_params.stop_regex_strs):
            return len(request.output_ids)
    return None


def assert_same_end(tokenizer, texts: list[str], token_ids: list[int]) -> None:
    window = 1 + max(len(text.encode()) for text in texts)
    decoded = []

    def tail_str(request, new_accepted_len=1):
        decoded.append(len(request.output_ids))
        return tokenizer.decode(request.output_ids[-window:])

    found = ends(tokenizer, texts, token_ids, lambda request: stop_texts.tail_to_search(tail_str, request))
    spared = len(decoded)
    assert found == ends(tokenizer, texts, token_ids, tail_str)
    assert spared <= len(decoded) - spared


@pytest.mark.parametrize("make_tokenizer", [sentence_pieces, chat_tokenizer])
@given(data=st.data(), texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_a_response_ends_where_a_search_after_every_token_ends_it(make_tokenizer, data, texts):
    tokenizer = make_tokenizer()
    written = [tokenizer.encode(text, add_special_tokens=False) for text in [*texts, "a b", "é🙂"]]
    in_bytes = st.lists(st.sampled_from(BYTES), min_size=1, max_size=6)
    parts = st.sampled_from(written) | st.lists(st.integers(0, len(tokenizer) - 1), max_size=4) | in_bytes
    token_ids = [token for part in data.draw(st.lists(parts, max_size=8)) for token in part]
    assert_same_end(tokenizer, texts, token_ids)


@pytest.mark.parametrize(("text", "before"), [(">", 1), ("a>", 2), ("a>", 1), ("é>", 3)])
def test_a_text_beside_a_broken_character_is_found_when_that_has_left_the_newest_tokens(text, before):
    """A tokenizer with byte tokens decodes none of a run of bytes that begins inside a character."""
    broken = ["<0xC3>", "<0xA9>", "<0xC3>"][-before:]
    token_ids = [
        PIECES.index(piece) for piece in [*broken, *(f"<0x{byte:02X}>" for byte in text.encode()), *"sabab"]
    ]
    assert_same_end(sentence_pieces(), [text], token_ids)


def test_only_tokens_with_a_last_character_or_without_a_certain_text_are_decoded_with_those_before_them():
    tokenizer = sentence_pieces()
    ends = stop_texts.last_characters((stop_pattern("</s>"), stop_pattern("ab")))
    may_complete = {PIECES[i] for i in range(len(PIECES)) if stop_texts.may_complete(tokenizer, i, ends)}
    assert may_complete == {"b", ">", "ab", "b>", "</s>", "<0x3E>"} | {"▁", "<0x20>"} | {"<0xC3>", "<0xA9>"}
    assert {PIECES[i] for i in range(len(PIECES)) if stop_texts.is_part(tokenizer, i)} == {"<0xC3>", "<0xA9>"}


@pytest.mark.parametrize(
    ("texts", "more", "accepted"),
    [
        (["a "], {}, 1),  # decoding may drop a space
        (["a"], {"stop_regex_strs": [".*"]}, 1),
        (["a"], {"stop_regex_strs": [r"a.*|\b\B.{3}"]}, 1),
        (["a"], {"stop_strs": ["b"]}, 1),
        (["a"], {}, 2),
    ],
    ids=["a space at the end", "another pattern", "another pattern with the branch", "a stop", "two tokens"],
)
def test_sglang_decides_about_everything_else(texts, more, accepted):
    request = request_with(sentence_pieces(), texts, [PIECES.index("</")] * 2)
    request.sampling_params.__dict__.update(more)
    assert stop_texts.tail_to_search(lambda request, length: f"{length} searched", request, accepted) == (
        f"{accepted} searched"
    )


@pytest.mark.parametrize("of_bpe", [False, True])
def test_after_a_tokenizer_that_changes_the_text_of_earlier_tokens_every_token_is_searched(of_bpe):
    if of_bpe:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=sentence_pieces().backend_tokenizer, **{FORCED: True}
        )
    else:
        words = Tokenizer(models.WordLevel({"a": 0, "n't": 1, "b": 2, "<unk>": 3}, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
        assert tokenizer.decode([0, 1]) == "an't"
    ends = stop_texts.last_characters((stop_pattern("an"),))
    assert all(stop_texts.may_complete(tokenizer, i, ends) for i in range(3))


@given(TEXTS | st.text(min_size=1, max_size=6))
def test_the_text_of_a_pattern_is_the_one_that_made_it(text):
    assert stop_texts.text_of(stop_pattern(text)) == text
