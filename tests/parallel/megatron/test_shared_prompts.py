"""Prompts that are computed once: the plan, attention against a loop over whole sequences, and a real model against the
same model on whole sequences, with gradients."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.megatron import shared_prompts
from parallel.megatron.attention import Scoring, packed_attention, plan_packing
from parallel.megatron.shared_prompts import SharedPlan, plan_shared_prompts, shared_attention
from parallel.packing import PackedBatch, pack_sequences
from tests.parallel.megatron.test_attention import bounds, naive_attention, windows
from tests.support.megatron_workers import make_engine, make_hf_model, make_value_engine, weighted_loss

CPU = torch.device("cpu")


@st.composite
def samples(draw):
    """(prompt number, its tokens, response tokens) of each sequence; some prompts have one sample, some samples no
    response, and some prompts are equal to the beginning of others."""
    prompts = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=4))
    rows = draw(
        st.lists(st.tuples(st.integers(0, len(prompts) - 1), st.integers(0, 7)), min_size=1, max_size=9)
    )
    return [(prompts[number], length) for number, length in rows]


def batch_of(rows, *, vocab: int = 43, seed: int = 0) -> PackedBatch:
    """Prompts of tokens 0 to 2, random responses."""
    generator = torch.Generator().manual_seed(seed)
    ids, masks = [], []
    for prompt, length in rows:
        response = torch.randint(3, vocab, (length,), generator=generator).tolist()
        ids.append([*prompt, *response] if length else [*prompt, 1])
        masks.append([False] * len(prompt) + [bool(length)] * max(length, 1))
    batch = pack_sequences(
        token_ids=ids,
        response_masks=masks,
        rollout_logprobs=[[0.0] * len(row) for row in ids],
        sequence_ids=range(len(ids)),
        share_prompts=True,
    )
    weights_T = (torch.rand(batch.num_tokens, generator=generator) - 0.3) * batch.response_mask_T
    aggregation_T = torch.full_like(weights_T, 1e-2) * batch.response_mask_T
    return batch.with_fields(importance_weights_T=weights_T, aggregation_T=aggregation_T)


def whole(batch: PackedBatch) -> PackedBatch:
    return batch.with_fields(prompt_ids_S=None, prompt_lengths_S=None)


def plan_of(batch: PackedBatch, multiple: int = 1):
    return plan_shared_prompts(
        batch.cu_seqlens, batch.prompt_ids_S, batch.prompt_lengths_S, CPU, multiple=multiple
    )


@settings(max_examples=100, deadline=None)
@given(rows=samples(), multiple=st.integers(1, 4))
def test_the_plan_has_each_shared_prompt_once_and_every_token(rows, multiple):
    batch = batch_of(rows)
    plan = plan_of(batch, multiple)
    assert torch.equal(plan.to_batch_order(plan.to_model_order(batch.tokens_T)), batch.tokens_T)
    assert torch.equal(plan.to_batch_order(plan.to_model_order(batch.positions_T)), batch.positions_T)
    # By hand: a prompt's tokens count once, but the sequences without a response are a prompt themselves.
    inputs = [batch.tokens_T[a:b].tolist() for a, b in pairwise(batch.cu_seqlens.tolist())]
    prompts = [tuple(i[:n]) for i, n in zip(inputs, batch.prompt_lengths_S.tolist(), strict=True)]
    places = sum(map(len, set(prompts))) + sum(len(i) - len(p) for i, p in zip(inputs, prompts, strict=True))
    length = len(plan.to_model_order(batch.tokens_T))
    assert length == places + -places % multiple == plan.cu_seqlens[-1]
    assert isinstance(plan, SharedPlan) == (len(set(prompts)) < len(prompts))
    # Hidden states of a token differ only where what comes before it does.
    place_of = {}
    for row, start in zip(inputs, batch.cu_seqlens.tolist(), strict=False):
        for i in range(len(row)):
            place = int(plan.inverse_T[start + i]) if plan.inverse_T is not None else start + i
            assert place_of.setdefault(place, row[: i + 1]) == row[: i + 1]


@settings(max_examples=60, deadline=None)
@given(
    rows=samples(),
    heads=st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    filling=st.sampled_from([0, 512]),
    multiple=st.integers(1, 3),
    window=windows,
    has_sinks=st.booleans(),
)
def test_attention_is_that_of_whole_sequences_with_gradients(
    rows, heads, filling, multiple, window, has_sinks
):
    """Values of a shared prompt are equal, so the oracle's gradients are summed over its samples."""
    batch, g = batch_of(rows), torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prompts, "MOST_FILLING", filling)
        plan = plan_of(batch, multiple)
    model_tokens = len(plan.to_model_order(batch.tokens_T))
    inputs = [torch.randn(model_tokens, h, 8, generator=g) for h in (heads[0], heads[1], heads[1])]
    upstream = torch.randn(batch.num_tokens, heads[0], 8, generator=g)
    inputs += [torch.randn(heads[0], generator=g)] if has_sinks else []
    theirs = [x.double().requires_grad_() for x in inputs]
    in_order = (plan.to_batch_order(x) for x in theirs[:3])
    expected = naive_attention(*in_order, batch.lengths, window, *theirs[3:])
    expected.backward(upstream.double())
    mine = [x.clone().requires_grad_() for x in inputs]
    scoring = Scoring(window=window, sinks_A=mine[3] if has_sinks else None)
    if isinstance(plan, SharedPlan):
        out = shared_attention(*mine[:3], plan, scoring, dtype=torch.float32)
    else:
        out = packed_attention(*mine[:3], plan.buckets, scoring, dtype=torch.float32)
    plan.to_batch_order(out).backward(upstream)
    torch.testing.assert_close(plan.to_batch_order(out).double(), expected, rtol=1e-5, atol=1e-5)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)


def test_branches_of_unlike_lengths_are_not_filled_up():
    """By hand: behind one prompt of 3 tokens, with nothing to fill up for free, 8 and 9 tokens go together (an eighth of 8
    is 1), 2 and 30 alone."""
    batch = batch_of([([1, 2, 0], n + 1) for n in (30, 8, 2, 9)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prompts, "MOST_FILLING", 0)
        branches = plan_of(batch).branches
    assert [(b.count, b.length, b.stop - b.start) for b in branches] == [(1, 2, 2), (2, 9, 17), (1, 30, 30)]
    assert [b.grid is None for b in branches] == [True, False, True]
    assert branches[1].cells.tolist() == [*range(8), *range(9, 18)]


ROWS = (
    [([1, 2, 0, 1], n) for n in (5, 1, 9, 5)]
    + [([2, 2], 3)]
    + [([0], n) for n in (6, 2)]
    + [([1, 2, 0, 1], 0)]
)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_a_policy_has_the_log_probs_and_gradients_of_whole_sequences(tmp_path, kind):
    engine = make_engine(make_hf_model(tmp_path, kind))
    batch = batch_of(ROWS)
    assert engine.shares_prompts and isinstance(engine_plan(engine, batch), SharedPlan)
    (mine, (shared,)), (theirs, (alone,)) = (
        engine.gradient([b], weighted_loss, temperature=0.7) for b in (batch, whole(batch))
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    for name in ("logprobs_T", "entropy_T"):
        torch.testing.assert_close(shared[name], alone[name], rtol=1e-5, atol=2e-6)
        mask_T = batch.response_mask_T
        assert (shared[name][~mask_T] == 0).all() and (shared[name][mask_T] != 0).all()
    # The update's forward pass has the bits of the score pass.
    (scored_T,) = engine.logprobs([batch], temperature=0.7)
    assert torch.equal(shared["logprobs_T"], scored_T)


def engine_plan(engine, batch):
    model = engine.chunks[0]
    return model.pack(batch.cu_seqlens, batch.positions_T, prompts=batch.prompts).plan


def test_sequences_are_whole_where_experts_are_replayed(tmp_path):
    """Samples of one prompt may have been sent to different experts."""
    model, batch = make_engine(make_hf_model(tmp_path, "qwen3")).chunks[0], batch_of(ROWS)
    experts = {
        "experts_TLK": torch.zeros(batch.num_tokens, 1, 1, dtype=torch.uint8),
        "is_replayed_T": torch.zeros(batch.num_tokens, dtype=torch.bool),
    }
    shared = model.pack(batch.cu_seqlens, batch.positions_T, prompts=batch.prompts)
    replayed = model.pack(batch.cu_seqlens, batch.positions_T, prompts=batch.prompts, **experts)
    assert isinstance(shared.plan, SharedPlan) and not isinstance(replayed.plan, SharedPlan)


def test_a_critic_has_the_values_of_whole_sequences(tmp_path):
    engine, batch = make_value_engine(make_hf_model(tmp_path, "llama")), batch_of(ROWS)
    (shared,), (alone,) = (engine.values([b]) for b in (batch, whole(batch)))
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=2e-6)


def test_a_selection_keeps_the_prompts(tmp_path):
    batch = batch_of(ROWS)
    part = batch.select([2, 6, 0])
    assert torch.equal(part.prompt_ids_S, batch.prompt_ids_S[[2, 6, 0]])
    assert part.prompt_lengths_S.tolist() == [4, 1, 4]
    assert torch.equal(plan_of(part).inverse_T[:4], plan_of(part).inverse_T[-part.lengths[2] :][:4])


@pytest.mark.parametrize(
    "fields", [{"prompt_ids_S": None}, {"prompt_ids_S": torch.zeros(2, dtype=torch.int64)}]
)
def test_what_does_not_fit_is_refused(fields):
    with pytest.raises(ValueError, match="prompt_ids_S"):
        batch_of(ROWS).with_fields(**fields)


def test_nothing_shared_is_the_plain_plan():
    batch = batch_of([([1, 2], 3), ([0, 1], 2)])
    plan, plain = plan_of(batch), plan_packing(batch.cu_seqlens, CPU)
    assert type(plan) is type(plain) and plan.buckets == plain.buckets
    assert bounds([4, 3]).tolist() == batch.cu_seqlens.tolist()
