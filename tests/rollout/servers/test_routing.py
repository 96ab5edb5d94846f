"""Experts in a server's answer: decoded to what was encoded, and refused where anything is wrong."""

import base64
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.client import GenerationError
from rollout.servers.routing import bytes_per_token, decode_experts
from rollout.sglang_plugin import tandem_routed_experts


@dataclass(frozen=True)
class Experts:
    num_experts: int
    experts_per_token: int
    is_sparse: tuple[bool, ...]


@st.composite
def answers(draw) -> tuple[Experts, np.ndarray]:
    """(a model, ids [rows, layers, K] as its server has them: zeros in layers without experts)"""
    num_experts = draw(st.sampled_from([2, 8, 256, 300]))
    chosen = draw(st.integers(1, min(num_experts, 4)))
    is_sparse = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=5).filter(any)))
    rows, seed = draw(st.integers(0, 6)), draw(st.integers(0, 2**32 - 1))
    drawn = np.random.default_rng(seed).random((rows, len(is_sparse), num_experts)).argsort(-1)[..., :chosen]
    drawn[:, ~np.array(is_sparse)] = 0
    return Experts(num_experts, chosen, is_sparse), drawn


def encoded(ids: np.ndarray, num_experts: int) -> str:
    """By SGLang's way, from what the plugin makes of its int32."""
    kind = getattr(torch, tandem_routed_experts.wire_type(num_experts))
    tensor = torch.from_numpy(ids.astype(np.int32)).to(kind)
    return base64.b64encode(tensor.numpy().tobytes()).decode()


@given(answers())
def test_ids_come_back_without_the_layers_that_have_no_experts(drawn):
    experts, ids = drawn
    found = decode_experts(encoded(ids, experts.num_experts), experts, rows=len(ids))
    assert found.dtype == (np.uint8 if experts.num_experts <= 256 else np.int16)
    assert np.array_equal(found, ids[:, np.array(experts.is_sparse)])
    assert found.nbytes == len(ids) * bytes_per_token(experts)


@given(answers(), st.data())
def test_one_wrong_id_is_refused(drawn, data):
    experts, ids = drawn
    if not len(ids):
        return
    row, layer = data.draw(st.integers(0, len(ids) - 1)), data.draw(st.integers(0, ids.shape[1] - 1))
    column = data.draw(st.integers(0, experts.experts_per_token - 1))
    wrong = ids.copy()
    if not experts.is_sparse[layer]:
        wrong[row, layer, column], message = 1, "layers without experts"
    elif experts.experts_per_token > 1 and data.draw(st.booleans()):
        wrong[row, layer, column] = wrong[row, layer, column - 1]
        message = rf"sent input token {row} twice to expert {wrong[row, layer, column]}"
    elif experts.num_experts in (256, 2):  # 256: a byte has no room for a wrong id
        return
    else:
        wrong[row, layer, column], message = experts.num_experts, f"to expert {experts.num_experts}"
    with pytest.raises(GenerationError, match=message):
        decode_experts(encoded(wrong, experts.num_experts), experts, rows=len(ids))


EIGHT = Experts(8, 2, (True, True))
ROW = [[0, 1], [7, 3]]


@pytest.mark.parametrize(
    "answer, message",
    [
        (None, r"no routed experts; start the servers with this config \(learner\.routing=rollout\)"),
        (encoded(np.array([ROW]), 8), "have 4 bytes, but 2 tokens in 2 layers with 2 experts each, as uint8, need 8"),
        (base64.b64encode(np.array([ROW] * 2, dtype=np.int32).tobytes()).decode(), "have 32 bytes, but 2 tokens"),
        ("no base64!", "no base64"),
        ("né base64", "no base64"),
        (encoded(np.array([ROW, [[0, 1], [4, 4]]]), 8), "input token 1 twice to expert 4, in layer 1"),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_refused(answer, message):
    with pytest.raises(GenerationError, match=message):
        decode_experts(answer, EIGHT, rows=2)


def test_bytes_per_token_of_large_models():
    assert bytes_per_token(Experts(128, 8, (True,) * 48)) == 384  # Qwen3-30B-A3B
    assert bytes_per_token(Experts(128, 8, (True,) * 94)) == 752  # Qwen3-235B-A22B
    assert bytes_per_token(Experts(512, 10, (False, True))) == 20


@pytest.mark.parametrize(
    ("known_by", "start"), [("4", 7), ("3", 0), (None, 7)], ids=["same weights", "newer weights", "not told"]
)
def test_the_plugin_answers_with_all_experts_where_newer_weights_sampled_the_end(
    known_by, start, monkeypatch
):
    monkeypatch.setattr(tandem_routed_experts, "served_version", lambda: "4")
    params = None if known_by is None else {tandem_routed_experts.KNOWN_BY: known_by}
    request = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=params), routed_experts_start_len=7
    )
    tandem_routed_experts.tell_all_after_an_update(None, request)
    assert request.routed_experts_start_len == start


@pytest.mark.parametrize(
    ("config", "kind"),
    [({"num_experts": 256}, torch.uint8), ({"num_experts": 257}, torch.int16), ({"num_local_experts": 8}, torch.uint8)],
)  # fmt: skip
def test_the_plugin_narrows_what_a_request_has(config, kind):
    processor = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**config)))
    request = SimpleNamespace(routed_experts=torch.tensor([[[7, 0]]], dtype=torch.int32))
    tandem_routed_experts.narrow_ids(None, processor, request)
    assert request.routed_experts.dtype == kind and request.routed_experts.tolist() == [[[7, 0]]]
    without = SimpleNamespace(routed_experts=None)
    tandem_routed_experts.narrow_ids(None, processor, without)
    assert without.routed_experts is None
