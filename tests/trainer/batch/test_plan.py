"""The plan of a step's batch: who gets what, within which bounds, and that ranks do not change what a
minibatch is."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from configs.schema.run import AnyConfig
from parallel.packing import pack_sequences, same_prompts
from rollout.records import FinishReason
from tests.support import records
from trainer.batch.plan import (
    EVEN_ENOUGH,
    Prompts,
    Routing,
    _fill_bins,
    pack_prompted,
    pack_responses,
    pack_trajectories,
    packed_length,
    plan_batches,
)


@st.composite
def problems(draw):
    """(lengths, arguments of plan_batches) that can be planned."""
    dp_size = draw(st.sampled_from((1, 2, 3, 4)))
    sizes = draw(st.lists(st.integers(1, 12).map(lambda rows: rows * dp_size), min_size=1, max_size=3))
    count = sum(sizes)
    lengths = draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    numbers = iter(draw(st.permutations(range(count))))
    return lengths, {
        "minibatches": [sorted(itertools.islice(numbers, size)) for size in sizes],
        "dp_size": dp_size,
        "token_budget": max(lengths) + draw(st.integers(0, 150)),
    }


def shared_places(sequences, lengths, prompts) -> int:
    """Places in the model, by a list of all of them: each prompt's once."""
    places = set()
    for s in sequences:
        prompt = prompts.lengths_S[s]
        places |= {("prompt", prompts.ids_S[s], i) for i in range(prompt)}
        places |= {("own", s, i) for i in range(prompt, lengths[s])}
    return len(places)


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_with_prompts_every_sequence_once_within_the_budget_and_ranks_no_fuller_than_without(problem, data):
    lengths, arguments = problem
    ids = data.draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths)))
    of_prompt = data.draw(st.lists(st.integers(0, 30), min_size=5, max_size=5))
    # A sequence is at least as long as its prompt.
    shortest = {i: min(n for n, j in zip(lengths, ids, strict=True) if j == i) for i in set(ids)}
    prompts = Prompts(ids_S=ids, lengths_S=[min(of_prompt[i], shortest[i]) for i in ids])
    plan = plan_batches(lengths, **arguments, prompts=prompts)
    without = plan_batches(lengths, **arguments)
    for minibatch, plain, wanted in zip(
        plan.microbatches, without.microbatches, arguments["minibatches"], strict=True
    ):
        assert sequences_of(minibatch) == wanted
        assert len(minibatch) == arguments["dp_size"] and len({len(rank) for rank in minibatch}) == 1
        for microbatch in (b for rank in minibatch for b in rank):
            assert microbatch and shared_places(microbatch, lengths, prompts) <= arguments["token_budget"]
        fullest = max(sum(shared_places(b, lengths, prompts) for b in rank) for rank in minibatch)
        groups = {i: [s for s in wanted if ids[s] == i] for i in {ids[s] for s in wanted}}.values()
        copies = sum(-(-len(g) * prompts.lengths_S[g[0]] // 8) for g in groups if len(g) > 1)
        even = (shared_places(wanted, lengths, prompts) + copies) / arguments["dp_size"]
        assert fullest <= max(
            *(sum(lengths[s] for b in rank for s in b) for rank in plain), EVEN_ENOUGH * even
        )


def test_samples_of_a_prompt_stay_together_where_ranks_are_even_so():
    """By hand: four prompts of 10 places with four samples of 2 more each. Each counts 18 places, and 5 for the four copies
    of its keys and values. Two prompts a rank fit 46. With room for 23 each is a micro-batch of its own."""
    prompts = Prompts(ids_S=[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, lengths_S=[10] * 16)
    arguments = {"minibatches": [range(16)], "dp_size": 2, "prompts": prompts}
    first, second, third, fourth = (tuple(range(i, i + 4)) for i in (0, 4, 8, 12))
    ((one, two),) = plan_batches([12] * 16, token_budget=46, **arguments).microbatches
    assert (one, two) == (((*first, *third),), ((*second, *fourth),))
    ((one, two),) = plan_batches([12] * 16, token_budget=23, **arguments).microbatches
    assert {*one, *two} == {first, second, third, fourth}
    beside_one = Prompts(ids_S=[0] * 4 + [1], lengths_S=[10] * 5)
    plan = plan_batches([12] * 5, token_budget=23, minibatches=[range(5)], dp_size=1, prompts=beside_one)
    assert plan.microbatches == (((first, (4,)),),)


def test_samples_of_one_prompt_are_split_where_a_rank_would_be_idle_or_overfull():
    """By hand: two ranks and one prompt of 10 places with eight samples of 5 more: 30 places in each half, and 5 for four
    copies. A budget of 23 leaves room for two samples each: 20, and 3 for two copies."""
    prompts = Prompts(ids_S=[0] * 8, lengths_S=[10] * 8)
    arguments = {"minibatches": [range(8)], "dp_size": 2, "prompts": prompts}
    ((one, two),) = plan_batches([15] * 8, token_budget=100, **arguments).microbatches
    assert (one, two) == (((0, 1, 2, 3),), ((4, 5, 6, 7),))
    ((one, two),) = plan_batches([15] * 8, token_budget=23, **arguments).microbatches
    assert sorted((*one, *two)) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_samples_of_a_prompt_are_split_where_ranks_would_be_uneven_and_not_for_a_hundredth():
    """By hand, two ranks. Three prompts of 2 places with two samples of 10 more each: a pair counts 22, and 1 for its copies.
    Two pairs make 46 beside 23; samples by themselves, of 12 each, make 36 on both ranks. Then two prompts of 1 place: pairs of
    102 and 100, which samples by themselves would make 101 each."""
    arguments = {"dp_size": 2, "token_budget": 110}
    uneven = Prompts(ids_S=[0, 0, 1, 1, 2, 2], lengths_S=[2] * 6)
    plan = plan_batches([12] * 6, minibatches=[range(6)], prompts=uneven, **arguments)
    assert plan.microbatches == ((((0, 2, 4),), ((1, 3, 5),)),)
    even = Prompts(ids_S=[0, 0, 1, 1], lengths_S=[1] * 4)
    plan = plan_batches([51, 51, 50, 50], minibatches=[range(4)], prompts=even, **arguments)
    assert plan.microbatches == ((((0, 1),), ((2, 3),)),)


def test_an_even_share_is_that_of_the_largest_units_and_smaller_ones_may_not_fit():
    """By hand, two ranks. One prompt of 8 places with four samples counts 2000, 1000 a rank. Pairs count 1022 and
    986: 2.2 % more than 1000, and less than 2 % more than their own half. Samples by themselves make 1010 on both
    ranks. Then prompts of 16 and 8 places with four and two samples, 56 and 30 together. Three pairs of 36, 36 and
    30 fit neither two micro-batches of 56 nor four, and samples by themselves make 66 on both ranks."""
    one = Prompts(ids_S=[0] * 4, lengths_S=[8] * 4)
    plan = plan_batches(
        [518, 510, 500, 492], minibatches=[range(4)], dp_size=2, token_budget=2000, prompts=one
    )
    assert plan.microbatches == ((((0, 3),), ((1, 2),)),)
    two = Prompts(ids_S=[0] * 4 + [1] * 2, lengths_S=[16] * 4 + [8] * 2)
    plan = plan_batches([24] * 4 + [18] * 2, minibatches=[range(6)], dp_size=2, token_budget=56, prompts=two)
    assert plan.microbatches == ((((0, 1, 2, 3),), ((4, 5),)),)


def sequences_of(minibatch) -> list[int]:
    """Over all ranks, ascending."""
    return sorted(s for rank in minibatch for microbatch in rank for s in microbatch)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_every_sequence_once_in_its_minibatch_within_the_budget(problem):
    lengths, arguments = problem
    plan = plan_batches(lengths, **arguments)
    for minibatch, wanted in zip(plan.microbatches, arguments["minibatches"], strict=True):
        assert sequences_of(minibatch) == wanted, "membership depends on the layout"
        assert len(minibatch) == arguments["dp_size"]
        assert len({len(rank) for rank in minibatch}) == 1, "ranks differ in their number of micro-batches"
        bins = [microbatch for rank in minibatch for microbatch in rank]
        assert all(sum(lengths[s] for s in b) <= arguments["token_budget"] for b in bins)
        assert all(bins), "an empty micro-batch"
        for rank in minibatch:
            loads = [sum(lengths[s] for s in b) for b in rank]
            assert loads == sorted(loads, reverse=True)


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_what_is_packed_apart_shares_no_micro_batch_with_the_rest_as_far_as_it_divides(problem, data):
    lengths, arguments = problem
    apart = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    plan, dp_size = plan_batches(lengths, **arguments, apart=apart), arguments["dp_size"]
    for minibatch, wanted in zip(plan.microbatches, arguments["minibatches"], strict=True):
        assert sequences_of(minibatch) == wanted
        assert len({len(rank) for rank in minibatch}) == 1
        bins = [microbatch for rank in minibatch for microbatch in rank]
        assert all(b and sum(lengths[s] for s in b) <= arguments["token_budget"] for b in bins)
        num_apart = len(apart & set(wanted)) // dp_size * dp_size
        if not 0 < num_apart < len(wanted):
            continue
        for rank in minibatch:  # at the end of each rank's, and in as many on each
            are_apart = [set(b) <= apart for b in rank]
            assert are_apart == sorted(are_apart) or num_apart < len(apart & set(wanted))
        assert sum(len(b) for b in bins if set(b) <= apart) >= num_apart


@settings(max_examples=100, deadline=None)
@given(problems())
def test_rows_address_what_the_rank_packs(problem):
    lengths, arguments = problem
    plan = plan_batches(lengths, **arguments)
    for rank in range(arguments["dp_size"]):
        ids = plan.sequence_ids(rank)
        found = [[tuple(ids[row] for row in rows) for rows in minibatch] for minibatch in plan.rows(rank)]
        assert found == [list(minibatch[rank]) for minibatch in plan.microbatches]
        flat = [row for minibatch in plan.rows(rank) for rows in minibatch for row in rows]
        assert flat == list(range(len(ids))), "rows are not in packing order"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=4, max_size=40), st.integers(1, 4))
def test_ranks_with_room_differ_by_at_most_the_longest_sequence(lengths, dp_size):
    lengths = lengths[: len(lengths) // dp_size * dp_size]
    plan = plan_batches(
        lengths, minibatches=[range(len(lengths))], dp_size=dp_size, token_budget=sum(lengths)
    )
    loads = [sum(lengths[s] for b in rank for s in b) for rank in plan.microbatches[0]]
    assert max(loads) - min(loads) <= max(lengths)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_ranks_differ_by_no_more_than_microbatches(problem):
    lengths, arguments = problem
    for minibatch in plan_batches(lengths, **arguments).microbatches:
        sizes = [[sum(lengths[s] for s in b) for b in rank] for rank in minibatch]
        flat = [size for rank in sizes for size in rank]
        assert max(map(sum, sizes)) - min(map(sum, sizes)) <= max(flat) - min(flat)


def fewest_bins(lengths, budget):
    """By trying every assignment."""
    for count in range(1, len(lengths) + 1):
        for owners in itertools.product(range(count), repeat=len(lengths)):
            if all(
                sum(x for x, o in zip(lengths, owners, strict=True) if o == b) <= budget for b in range(count)
            ):
                return count
    raise AssertionError("unreachable")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=2, max_size=6), st.integers(0, 8), st.integers(1, 2))
def test_number_of_microbatches_against_exhaustive_search(lengths, slack, dp_size):
    lengths = lengths[: len(lengths) // dp_size * dp_size]
    budget = max(lengths) + slack
    plan = plan_batches(lengths, minibatches=[range(len(lengths))], dp_size=dp_size, token_budget=budget)
    fewest = fewest_bins(lengths, budget)
    assert -(-fewest // dp_size) <= len(plan.microbatches[0][0]) <= -(-((11 * fewest + 6) // 9) // dp_size)


def test_by_hand():
    # First minibatch: 24 tokens would fill two micro-batches of 12, but neither 9 + 4 nor 6 + 5 + 4 fits: one
    # sequence each, dealt 9 and 6, then 4 and 5. Second: equal lengths, in turn.
    plan = plan_batches(
        [9, 5, 4, 6, 3, 3, 3, 3], minibatches=[range(4), range(4, 8)], dp_size=2, token_budget=12
    )
    assert plan.microbatches == ((((0,), (2,)), ((3,), (1,))), (((4, 6),), ((5, 7),)))
    assert plan.sequence_ids(1) == [3, 1, 5, 7]
    assert plan.rows(1) == [[[0], [1]], [[2, 3]]]


def test_each_round_goes_by_what_ranks_have_in_all():
    """20 and 15, then 13 and 14, then 7 and 10: 40 and 39."""
    plan = plan_batches([20, 15, 14, 13, 10, 7], minibatches=[range(6)], dp_size=2, token_budget=20)
    assert plan.microbatches == ((((0,), (3,), (5,)), ((1,), (2,), (4,))),)


def test_if_a_multiple_of_micro_batches_has_no_room_the_next_one_is_taken():
    """20 tokens would fill two micro-batches of 10, and fit three."""
    plan = plan_batches(
        [6, 6, 6, 2], minibatches=[range(4)], dp_size=1, token_budget=10, microbatch_multiple=2
    )
    assert plan.microbatches == ((((0,), (1,), (2,), (3,)),),)


def test_first_fit_packs_what_even_packing_cannot():
    # Longest first into the emptiest: 7 4 | 5 4, and 4 is left. First fit: 7 5 | 4 4 4.
    plan = plan_batches([7, 5, 4, 4, 4], minibatches=[range(5)], dp_size=1, token_budget=12)
    assert plan.microbatches == ((((0, 1), (2, 3, 4)),),)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_no_microbatch_is_empty_even_where_each_sequence_fills_one(dp_size):
    plan = plan_batches([10] * 8, minibatches=[range(4), range(4, 8)], dp_size=dp_size, token_budget=10)
    assert [[[len(b) for b in rank] for rank in minibatch] for minibatch in plan.microbatches] == [
        [[1] * (4 // dp_size)] * dp_size
    ] * 2


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    dp_size=st.integers(1, 3),
    multiple=st.integers(1, 4),
    slack=st.integers(0, 40),
    apart=st.sets(st.integers(0, 20)),
)
@example(lengths=[8, 10, 6, 12, 9, 4, 7, 5], dp_size=1, multiple=1, slack=9, apart={0, 5, 6})
def test_an_interleaved_pipeline_gets_a_multiple_of_its_stages_and_no_microbatch_is_empty(
    lengths, dp_size, multiple, slack, apart
):
    lengths = lengths * (dp_size * multiple)
    budget = max(lengths) + slack
    arguments = dict(minibatches=[range(len(lengths))], dp_size=dp_size, token_budget=budget)
    plan = plan_batches(lengths, microbatch_multiple=multiple, apart=apart, **arguments)
    (ranks,) = plan.microbatches
    assert {len(rank) for rank in ranks} == {len(ranks[0])} and len(ranks[0]) % multiple == 0
    assert all(
        microbatch and sum(lengths[s] for s in microbatch) <= budget for rank in ranks for microbatch in rank
    )
    assert sequences_of(ranks) == list(range(len(lengths)))
    # Together: packings are heuristic, and the example fits three micro-batches apart and four together.
    together, plain = (
        plan_batches(lengths, microbatch_multiple=each, **arguments).microbatches[0][0]
        for each in (multiple, 1)
    )
    assert len(together) >= len(plain)


GOOD = {"dp_size": 1, "token_budget": 10}


@pytest.mark.parametrize(
    ("lengths", "change", "message"),
    [
        ([3, 11, 4, 5], {}, r"sequence 1 takes 11 tokens.*token_budget=10.*at least 11"),
        ([], {}, "a minibatch has no sequences"),
        (
            [3, 4, 5, 6],
            {"dp_size": 5},
            "4 sequences does not divide by 5 data-parallel ranks; use 5 sequences",
        ),
        (
            [9, 9, 9],
            {"dp_size": 2},
            "3 sequences does not divide by 2 .*use 2 or 4 sequences",
        ),
        ([3, 0], {}, "sequence 1 has packed length 0"),
        ([3, 4], {"dp_size": 0}, "dp_size=0"),
        ([3, 4], {"microbatch_multiple": 0}, "microbatch_multiple=0"),
        (
            [3, 4, 5, 6, 3, 4],
            {"dp_size": 2, "microbatch_multiple": 2},
            "3 sequences .* 2 stages .* multiple of 4 sequences per minibatch",
        ),
    ],
)
def test_errors_name_value_and_fix(lengths, change, message):
    with pytest.raises(ValueError, match=message):
        plan_batches(lengths, minibatches=[range(len(lengths))], **(GOOD | change))


@pytest.mark.parametrize(
    ("layout", "ranks_sequences"), [({"pp": 8, "vpp": 2}, 12), ({"pp": 4, "vpp": 2, "dp": 2}, 6)]
)
def test_a_run_whose_minibatches_do_not_fill_an_interleaved_pipeline_is_refused_at_load(
    layout, ranks_sequences
):
    run = {
        "kind": "train",
        "model": {"path": "m"},
        "task": {"type": "countdown"},
        "rollout": {"prompts_per_step": 4, "group_size": 3},
    }
    warm_start = {
        "kind": "sft",
        "model": {"path": "m"},
        "data": {"type": "countdown"},
        "output": "out",
        "batch_size": 12,
    }
    stages = layout["pp"]
    for config in (run, warm_start):
        with pytest.raises(
            ValueError,
            match=rf"vpp=2 interleaves layout.pp={stages} .* {ranks_sequences} sequences.*multiple of {stages}",
        ):
            TypeAdapter(AnyConfig).validate_python(config | {"layout": layout})
        TypeAdapter(AnyConfig).validate_python(config | {"layout": layout | {"vpp": 1}})


def trajectory(token_ids, **change):
    count = len(token_ids)
    return records.trajectory(**({
        "group_id": 0, "sibling_id": 1, "prompt_id": "p", "token_ids": token_ids, "response_mask": [False] + [True] * (count - 1),
        "rollout_logprobs": [0.0] + [-0.5 * i for i in range(1, count)], "token_versions": [0] * count,
        "finish_reason": FinishReason.STOP, "reward": 1.0, "reward_parts": {},
    } | change))  # fmt: skip


def test_pack_trajectories():
    samples = [trajectory([5, 6, 7]), trajectory([8, 9])]
    batch = pack_trajectories(samples, [12, 3])
    assert batch.lag_T is None and batch.num_kept_T is None and batch.prompts is None
    assert pack_trajectories(samples, [12, 3], share_prompts=True).prompt_lengths_S.tolist() == [1, 1]
    assert batch.lengths == [packed_length(t.token_ids) for t in samples] == [2, 1]
    assert batch.tokens_T.tolist() == [5, 6, 8] and batch.targets_T.tolist() == [6, 7, 9]
    assert batch.positions_T.tolist() == [0, 1, 0]
    assert batch.rollout_logprobs_T.tolist() == [-0.5, -1.0, -0.5]
    assert batch.sequence_ids_S.tolist() == [12, 3]
    assert batch.cu_seqlens.dtype == batch.select([1]).cu_seqlens.dtype == torch.int32
    elsewhere = batch.to(torch.device("meta"))
    assert all(value.is_meta for _, value in elsewhere.per_token()) and elsewhere.cu_seqlens.is_cpu
    for short, told in (
        ("response_mask", "2 mask entries and 3 log"),
        ("rollout_logprobs", "3 mask entries and 2"),
    ):
        with pytest.raises(ValueError, match=rf"sequence 4 \(prompt p, sibling 1\) has 3 tokens, {told}"):
            pack_trajectories([trajectory([1, 2, 3], **{short: [0, 1]})], [4])
    with pytest.raises(ValueError, match=r"sequences \[3\] have fewer than two tokens"):
        pack_trajectories([*samples, trajectory([1])], [12, 4, 3])


def test_behind_a_prompt_all_tokens_are_the_responses():
    packed = pack_prompted([[5, 6, 7, 8], [9, 4]], [2, 1], [3, 1])
    assert packed.response_mask_T.tolist() == [False, True, True, True]
    of_turns = pack_responses([[5, 6, 7, 8, 9]], [[range(1, 2), range(3, 4)]], [0])
    assert of_turns.response_mask_T.tolist() == [True, False, True, False]


def test_a_shared_prompt_is_what_lies_before_the_first_response_token():
    """Of a sequence without a response, all but its last token, which is no input. The ids' type does not matter."""
    prompts = {(1, 2, 5, 6): [2, 3], (1, 2, 7): [2], (1, 2, 8): [], (2, 1, 7): [2], (1, 2, 5, 7): [1, 3]}
    packed = pack_sequences(
        token_ids=[np.array(ids, dtype=kind) for ids, kind in zip(prompts, ("i4", "i8") * 3, strict=False)],
        response_masks=[[place in sampled for place in range(len(ids))] for ids, sampled in prompts.items()],
        rollout_logprobs=[[0.0] * len(ids) for ids in prompts],
        sequence_ids=range(5),
        share_prompts=True,
    )
    assert packed.prompt_lengths_S.tolist() == [2, 2, 2, 2, 1]
    first, *others = packed.prompt_ids_S.tolist()
    assert others[:2] == [first, first] and len({first, *others}) == 3
    ids, _ = same_prompts([[i, 0] for i in range(999)], [[False, True]] * 999)
    assert len(set(ids)) == 999


def test_lags_count_from_the_learners_version_on_response_tokens():
    sample = trajectory([5, 6, 7, 8], response_mask=[False, False, True, True], token_versions=[9, 9, 3, 4])
    assert pack_trajectories([sample], [0], newest=4).lag_T.tolist() == [0, 1, 0]
    assert pack_trajectories([trajectory([5, 6, 7])], [0], newest=0).lag_T.tolist() == [0, 0]


def test_a_sequence_without_kept_sets_has_none_beside_others_that_have():
    kept = {"num_kept": np.array([0, 2, 1], np.int32), "kept_ids": np.array([6, 9, 7], np.int32)}
    batch = pack_trajectories([trajectory([5, 6, 7], **kept), trajectory([8, 9])], [0, 1])
    assert batch.num_kept_T.tolist() == [2, 1, 0] and batch.kept_ids_M.tolist() == [6, 9, 7]


@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_experts_are_packed_with_their_input_tokens_and_the_rest_is_marked(dtype):
    """Three sequences: with experts, without any, and a filler of two tokens."""
    routing = Routing(layers=2, experts_per_token=2, dtype=dtype)
    ids = np.arange(4 * 4, dtype=dtype).reshape(4, 2, 2)
    fields = {"group_id": 0, "prompt_id": "p", "reward": 1.0, "reward_parts": {}}
    known, unknown = (
        records.trajectory(
            **fields, sibling_id=i, token_ids=[5, 6, 7, 8], response_mask=[False, False, True, True],
            rollout_logprobs=[0.0] * 4, token_versions=[0] * 4, **experts,
        )
        for i, experts in enumerate([{"experts": ids, "is_replayed": np.array([1, 0, 1, 0], dtype=bool)}, {}])
    )  # fmt: skip
    packed = pack_trajectories([known, unknown], [0, 1], routing=routing)
    assert packed.experts_TLK.dtype == getattr(torch, dtype) and packed.experts_TLK.shape == (6, 2, 2)
    assert packed.is_replayed_T.tolist() == [True, False, True, False, False, False]
    assert torch.equal(packed.experts_TLK[:3], torch.from_numpy(ids[:3]))  # of inputs: not of the last token
    assert not packed.experts_TLK[3:].any()
    second = packed.select([1])
    assert second.experts_TLK.shape == (3, 2, 2) and not second.is_replayed_T.any()
    assert pack_trajectories([known, unknown], [0, 1]).experts_TLK is None
    found = rf"sibling 0 has experts of the shape \(4, 2, 2\) in {dtype}, the model"
    other = {"uint8": "int16", "int16": "uint8"}[dtype]
    for change, wanted in (
        ({"layers": 3}, rf"\(4, 3, 2\) in {dtype}"),
        ({"dtype": other}, rf"\(4, 2, 2\) in {other}"),
    ):
        with pytest.raises(ValueError, match=f"{found} {wanted}"):
            pack_trajectories([known], [0], routing=replace(routing, **change))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"experts_TLK": torch.zeros(3, 2, 2, dtype=torch.uint8)}, "one is missing"),
        ({"is_replayed_T": torch.ones(3, dtype=torch.bool)}, "one is missing"),
        ({"experts_TLK": torch.zeros(3, 4, dtype=torch.uint8), "is_replayed_T": torch.ones(3).bool()}, r"shape \(3, 4\)"),
        ({"experts_TLK": torch.zeros(2, 2, 2, dtype=torch.uint8), "is_replayed_T": torch.ones(3).bool()}, "3 tokens"),
        ({"experts_TLK": torch.zeros(3, 2, 2, dtype=torch.int64), "is_replayed_T": torch.ones(3).bool()}, "uint8 or int16"),
        ({"experts_TLK": torch.zeros(3, 2, 2, dtype=torch.uint8), "is_replayed_T": torch.ones(3)}, "is_replayed_T is float32"),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_a_batch_are_refused(fields, message):
    ids, mask = [[1, 2, 3, 4]], [[False, True, True, True]]
    batch = pack_sequences(token_ids=ids, response_masks=mask, rollout_logprobs=[[0.0] * 4], sequence_ids=[0])
    with pytest.raises(ValueError, match=message):
        batch.with_fields(**fields)


def test_the_longest_sequences_are_placed_first():
    """7 + 3 and 6 + 4 fill two micro-batches. Shortest first it would take three."""
    plan = plan_batches([7, 6, 3, 4], minibatches=[range(4)], dp_size=1, token_budget=10)
    assert plan.microbatches == ((((0, 2), (1, 3)),),)


def test_an_empty_micro_batch_gets_the_shortest_of_the_fullest():
    """The first fit has 5 + 4, 3 + 3 and nothing; then 6 + 3, 5 + 5 and nothing. At last 9 alone is the fullest."""
    assert _fill_bins(range(4), [5, 4, 3, 3], 3, 9, first_fit=True) == [(0,), (2, 3), (1,)]
    assert _fill_bins(range(4), [6, 5, 5, 3], 3, 10, first_fit=True) == [(0, 3), (1,), (2,)]
    assert _fill_bins(range(3), [9, 3, 3], 3, 9, first_fit=True) == [(0,), (1,), (2,)]
    assert _fill_bins([1, 0], [4, 5], 1, 9, first_fit=True) == [(0, 1)], "ascending"


def test_a_shared_prompt_counts_once_and_an_eighth_for_each_of_several():
    prompts = Prompts(ids_S=[0, 0, 0], lengths_S=[3, 3, 3])
    assert prompts.load((0, 1, 2), [5, 6, 7]) == 3 + (2 + 3 + 4) + 2
    assert prompts.load((0, 1), [5, 6, 7]) == 3 + (2 + 3) + 1
    assert prompts.load((1,), [5, 6, 7]) == 6


def test_a_micro_batch_of_several_prompts_is_in_ascending_order():
    prompts = Prompts(ids_S=[0, 1, 0, 1], lengths_S=[1] * 4)
    plan = plan_batches([3] * 4, minibatches=[range(4)], dp_size=1, token_budget=99, prompts=prompts)
    assert plan.microbatches == ((((0, 1, 2, 3),),),)
