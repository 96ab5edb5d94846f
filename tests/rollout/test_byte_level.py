"""The table of bytes against tokenizers' own decoder."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.byte_level import bytes_of_ids, decoder_of
from rollout.environments.context import Texts
from rollout.records import TOKEN_IDS
from tests.support.chat_tokenizer import chat_tokenizer

SENTENCES = [
    "Die Größe ist 4 m². Ĝi estas ĉi tie 🙂🙂 日本語",
    "\x00\x7f\xad\xa0 it isn't 1,234.5 ####  72\n\n",
]
SIZE = 330


def made_tokenizer(decoder: decoders.Decoder, **options) -> PreTrainedTokenizerFast:
    """Every byte, some merges, and added tokens: special ones and others, some outside of the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    # The first has spaces and the second letters outside of the alphabet: both stand for their own UTF-8.
    tokenizer.add_tokens(["two words", "日本", "Ġfirst", "é"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        **{"clean_up_tokenization_spaces": False} | options,
    )


PLAIN = made_tokenizer(decoders.ByteLevel())
OPTIONS = made_tokenizer(decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False))
CHAT = chat_tokenizer()
TEXT_OF_CHAT = decoder_of(CHAT)
NUM_IDS = max(PLAIN.get_vocab().values()) + 1
IDS = st.lists(st.integers(0, NUM_IDS - 1), max_size=60)


def array(ids) -> np.ndarray:
    return np.array(ids, dtype=TOKEN_IDS)


@pytest.mark.parametrize("tokenizer", [PLAIN, OPTIONS, CHAT], ids=["plain", "options", "chat"])
@given(ids=IDS)
@example(ids=[])
@example(ids=list(range(256)))
def test_text_is_the_tokenizers_own(tokenizer, ids):
    """Any ids: broken UTF-8 of every form, special tokens in the middle, tokens outside of the alphabet."""
    assert decoder_of(tokenizer)(array(ids)) == tokenizer.decode(ids, skip_special_tokens=False)


@given(text=st.text(max_size=60), cut=st.tuples(st.integers(0, 8), st.integers(0, 8)))
def test_text_of_a_part_of_a_text_is_the_tokenizers_own(text, cut):
    """Characters of several tokens, cut in the middle."""
    ids = PLAIN.encode(text)[cut[0] :]
    ids = ids[: max(0, len(ids) - cut[1])]
    assert decoder_of(PLAIN)(array(ids)) == PLAIN.decode(ids, skip_special_tokens=False)
    assert TEXT_OF_CHAT(array(CHAT.encode(text))) == text


@given(data=st.binary(max_size=24))
def test_broken_utf8_becomes_what_it_does_in_tokenizers(data):
    id_of = {token: i for i, token in enumerate(bytes_of_ids(PLAIN)) if len(token) == 1}
    ids = [id_of[bytes([byte])] for byte in data]
    assert b"".join(bytes_of_ids(PLAIN)[i] for i in ids) == data
    assert decoder_of(PLAIN)(array(ids)) == PLAIN.decode(ids, skip_special_tokens=False)


def test_ids_beyond_the_tokenizers_are_left_to_it():
    """A model's vocabulary may be padded, and such an id may be sampled."""
    ids = [5, NUM_IDS + 3, 6]
    assert decoder_of(PLAIN)(array(ids)) == PLAIN.decode(ids) == PLAIN.decode([5, 6])


class OtherText(PreTrainedTokenizerFast):
    def _decode(self, token_ids, **options):
        return "other"


def fused() -> PreTrainedTokenizerFast:
    return made_tokenizer(decoders.Fuse())


def several() -> PreTrainedTokenizerFast:
    return made_tokenizer(decoders.Sequence([decoders.Replace("4", "5"), decoders.ByteLevel()]))


def own() -> PreTrainedTokenizerFast:
    return OtherText(tokenizer_object=PLAIN.backend_tokenizer)


def cleaned() -> PreTrainedTokenizerFast:
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return made_tokenizer(decoders.ByteLevel(), clean_up_tokenization_spaces=True, **{name: True})


@pytest.mark.parametrize("make", [fused, several, own, cleaned])
def test_another_decoder_is_asked_itself(make):
    """Each of them gives another text than its bytes."""
    tokenizer = make()
    ids = PLAIN.encode("Yes . It isn 't 4 !")
    by_bytes = b"".join(bytes_of_ids(tokenizer)[i] for i in ids).decode()
    assert decoder_of(tokenizer)(array(ids)) == tokenizer.decode(ids) != by_bytes


def test_a_cleaning_that_transformers_leaves_out_keeps_the_table(monkeypatch):
    tokenizer = made_tokenizer(decoders.ByteLevel(), clean_up_tokenization_spaces=True)
    ids = tokenizer.encode("Yes . It isn 't 4 !")
    expected = tokenizer.decode(ids)
    decode = decoder_of(tokenizer)
    monkeypatch.setattr(tokenizer, "decode", None)
    assert decode(array(ids)) == expected == "Yes . It isn 't 4 !"


def test_responses_are_decoded_by_the_table_without_their_end_token(monkeypatch):
    texts, endless = (
        Texts(tokenizer=PLAIN, end_token_ids=frozenset(ends), vocab_size=NUM_IDS)
        for ends in ([PLAIN.eos_token_id], [])
    )
    monkeypatch.setattr(PLAIN, "decode", None)
    ids = PLAIN.encode("4 m²<|im_end|> 5<|im_end|>")
    assert texts.decode(array(ids)) == "4 m²<|im_end|> 5"
    assert texts.decode(array([])) == texts.decode(array(ids[-1:])) == ""
    assert endless.decode(array(ids)) == "4 m²<|im_end|> 5<|im_end|>"
