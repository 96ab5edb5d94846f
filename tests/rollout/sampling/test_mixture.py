"""The order of a mixture, held to its contract in every prefix of its epochs."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.schema.sampler import MOST_TURNS, MixtureOrder
from rollout.sampling.mixture import PASSES_OF_A_SEED, passes_of, source_round
from rollout.sampling.order import prompt_order

NAMES = ["math", "code", "chat", "tools", "a.b"]


def order_of(weights: dict[str, float], sources: list[str], *, seed: int = 0):
    config = MixtureOrder.model_validate({"type": "mixture", "field": "meta.source", "weights": weights})
    rows = [{"meta": {"source": name}} for name in sources]
    return prompt_order(config, len(rows), seed=seed, rows=lambda: rows)


@st.composite
def mixtures(draw):
    """(weights, the sources of the prompts)"""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    weights = {name: draw(st.integers(1, 30) | st.sampled_from([0.1, 0.25, 2.5])) for name in names}
    sources = names + draw(st.lists(st.sampled_from(names), max_size=30))
    return weights, draw(st.permutations(sources))


@settings(deadline=None)
@given(mixture=mixtures(), seed=st.integers(0, 3), epochs=st.integers(1, 8))
def test_every_prefix_has_each_source_within_one_of_its_share_and_passes_end_before_they_begin_anew(
    mixture, seed, epochs
):
    weights, sources = mixture
    order = order_of(weights, sources, seed=seed)
    taken = [index for epoch in range(epochs) for index in order(epoch)]
    assert len(taken) == epochs * len(sources)
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    counts, total = Counter(), sum(exact.values())
    for place, index in enumerate(taken, start=1):
        counts[sources[index]] += 1
        assert all(abs(counts[name] - place * share / total) < 1 for name, share in exact.items())
    for name in weights:
        of_source = [index for index in taken if sources[index] == name]
        members = [index for index, source in enumerate(sources) if source == name]
        for start in range(0, len(of_source), len(members)):
            one_pass = of_source[start : start + len(members)]
            assert len({*one_pass}) == len(one_pass)
            assert sorted(one_pass) == members or len(one_pass) < len(members)


@settings(deadline=None)
@given(mixture=mixtures(), epoch=st.integers(0, 10**6), factor=st.sampled_from([2, 7, 0.5]))
def test_an_epoch_follows_from_seed_and_epoch_and_the_ratios_of_the_weights_alone(mixture, epoch, factor):
    weights, sources = mixture
    there = order_of(weights, sources)(epoch)
    other = {name: float(Fraction(str(weight)) * Fraction(factor)) for name, weight in weights.items()}
    assert order_of(dict(reversed(other.items())), sources)(epoch) == there
    of_others = {*range(len(sources), len(sources) + 3)}
    assert not of_others & {*order_of(weights | {"no": 0}, [*sources, "no", "no", "no"])(epoch)}


@given(turns=st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_a_round_keeps_to_the_quota_of_any_number_of_sources(turns):
    counts, total = [0] * len(turns), sum(turns)
    for place, source in enumerate(source_round(turns), start=1):
        counts[source] += 1
        assert all(
            abs(count * total - place * turn) < total for count, turn in zip(counts, turns, strict=True)
        )
    assert counts == turns


def test_passes_are_shuffled_each_by_itself_and_by_the_seed():
    orders = [order_of({"math": 1}, ["math"] * 40, seed=seed) for seed in (0, 1)]
    passes = {tuple(order(epoch)) for order in orders for epoch in range(20)}
    assert len(passes) == 40 and all(sorted(one) == [*range(40)] for one in passes)


@pytest.mark.parametrize("size", [10, 12, PASSES_OF_A_SEED, 300])
def test_a_stretch_of_a_sources_passes_is_a_part_of_its_endless_row(size):
    """Wherever it begins, also behind the passes that one generator shuffles."""
    indices, count = range(size), 2 * max(size, PASSES_OF_A_SEED) + 5
    row = passes_of(indices, 0, count, "0 math")
    for start in (1, size - 1, count // 2, count - 3):
        assert passes_of(indices, start, count - start, "0 math") == row[start:]
    passes = {tuple(row[start : start + size]) for start in range(0, count - size, size)}
    assert len(passes) == len(range(0, count - size, size))


def test_the_order_of_a_seed_stays():
    """A run that another version of Tandem resumes must find it."""
    order = order_of({"math": 3, "code": 1}, ["math"] * 6 + ["code"] * 2)
    assert [order(epoch) for epoch in (0, 7)] == [[4, 5, 6, 2, 3, 0, 7, 1], [3, 1, 6, 0, 2, 5, 7, 4]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"math": 0, "code": 0.0}, "no source with a weight above 0"),
        ({}, "no source with a weight above 0"),
        ({"math": -1, "code": 2}, "greater than or equal to 0"),
        ({"math": MOST_TURNS, "code": 1}, "whole numbers whose sum has 7 digits"),
        ({"math": 1e300, "code": 1e-300}, "whole numbers whose sum has 601 digits"),
    ],
)
def test_weights_that_make_no_round_are_refused(weights, message):
    with pytest.raises(ValidationError, match=message):
        order_of(weights, ["math", "code"])


def test_prompts_and_weights_that_do_not_go_together_are_refused():
    """Those of a file are compared before a start; some of its prompts may be too long, and left out."""
    with pytest.raises(ValueError, match="no prompt of the source 'code' is left"):
        order_of({"math": 3, "code": 1}, ["math"])
    with pytest.raises(ValueError, match="the source 'chat' are not in sampler"):
        order_of({"math": 3}, ["math", "chat"])


def test_numbers_and_booleans_are_compared_as_texts():
    config = MixtureOrder(type="mixture", field="a.b", weights={"1": 1, "True": 1, "0.5": 1})
    rows = [{"a.b": 1}, {"a": {"b": True}}, {"a": {"b": 0.5}}]
    assert sorted(prompt_order(config, 3, seed=0, rows=lambda: rows)(0)) == [0, 1, 2]
