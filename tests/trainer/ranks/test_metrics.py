"""Metrics merge exactly: under any split and order, over real processes, and with nothing counted."""

import math
import statistics

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.megatron_workers import forked_context
from trainer.ranks.metrics import (
    Metric,
    Reduction,
    merge_metrics,
    merge_over_ranks,
    per_minibatch,
    scale_losses,
    values,
)


def describe(values_T, mask_T):
    return {
        "mean": Metric.mean(values_T, mask_T),
        "max": Metric.max(values_T, mask_T),
        "min": Metric.min(values_T, mask_T),
        "ess": Metric.ess(values_T, mask_T),
        "sum": Metric.sum(values_T[mask_T].sum().item()),
        "std": Metric.std(values_T, mask_T),
        "pearson": Metric.pearson(values_T, values_T.square() - values_T, mask_T),
        "weighted": Metric.weighted_mean(values_T[mask_T], values_T[mask_T].abs()),
    }


# Quarters, and their fourth powers, add up without rounding, so equality is exact.
samples = st.lists(
    st.tuples(st.integers(-40, 40).map(lambda i: i / 4), st.booleans(), st.integers(0, 3)), max_size=30
)


@settings(max_examples=100, deadline=None)
@given(samples, st.permutations(range(4)))
def test_any_split_in_any_order_merges_to_the_whole(rows, order):
    values_T = torch.tensor([r[0] for r in rows])
    mask_T = torch.tensor([r[1] for r in rows], dtype=torch.bool)
    part_T = torch.tensor([r[2] for r in rows], dtype=torch.int64)
    dirty_T = values_T.masked_fill(~mask_T, torch.nan)
    merged = merge_metrics(describe(dirty_T[part_T == p], mask_T[part_T == p]) for p in order)
    assert merged == describe(values_T, mask_T)


def test_values_by_hand():
    mask_T = torch.tensor([True, True, False])
    assert values(describe(torch.tensor([1.0, 3.0, 100.0]), mask_T)) == {
        "mean": 2.0, "max": 3.0, "min": 1.0, "ess": 0.8, "sum": 4.0, "std": 1.0, "pearson": 1.0, "weighted": 2.5,
    }  # fmt: skip
    assert Metric.mean(torch.tensor([True, False, True])).value == pytest.approx(2 / 3)


def test_nothing_counted_has_no_value():
    nothing = describe(torch.tensor([1.0]), torch.tensor([False]))
    assert values(nothing) == {"sum": 0.0}
    assert values(describe(torch.tensor([]), torch.tensor([], dtype=torch.bool))) == {"sum": 0.0}
    assert values(merge_metrics([nothing, describe(torch.tensor([2.0]), torch.tensor([True]))]))["max"] == 2.0
    assert Metric.ess(torch.zeros(3)).value is None
    assert (
        Metric.quotient(0, 0).value is None
        and Metric.weighted_mean(torch.ones(2), torch.zeros(2)).value is None
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), min_size=1, max_size=20))
def test_spread_and_correlation_are_what_the_statistics_module_says(rows):
    x_T, y_T = (torch.tensor([r[i] for r in rows], dtype=torch.float64) for i in (0, 1))
    mask_T = torch.tensor([r[2] for r in rows])
    x, y = x_T[mask_T].tolist(), y_T[mask_T].tolist()
    std, pearson = (
        Metric.std(x_T.masked_fill(~mask_T, torch.nan), mask_T).value,
        Metric.pearson(x_T, y_T, mask_T).value,
    )
    assert std == (pytest.approx(statistics.pstdev(x), abs=1e-6) if x else None)
    if len(x) > 1 and min(statistics.pstdev(x), statistics.pstdev(y)) > 1e-3:
        assert pearson == pytest.approx(statistics.correlation(x, y), abs=1e-6)


def test_what_does_not_vary_has_no_correlation_and_no_spread():
    constant_T, other_T = (
        torch.full((1000,), 0.1, dtype=torch.float64),
        torch.linspace(0, 1, 1000, dtype=torch.float64),
    )
    assert (
        Metric.pearson(constant_T, other_T).value is None
        and Metric.pearson(other_T, constant_T).value is None
    )
    assert Metric.std(constant_T).value == pytest.approx(0.0, abs=1e-8)
    # Of some of them rounding leaves a variance below 0.
    for constant in torch.linspace(0.1, 0.9, 50, dtype=torch.float64):
        assert Metric.std(constant.expand(7)).value == pytest.approx(0.0, abs=1e-7)
    assert Metric.pearson(other_T, -3 * other_T).value == pytest.approx(-1.0, abs=1e-12)
    zeros_T = torch.zeros(1000)
    assert Metric.pearson(zeros_T, other_T).value is None and Metric.pearson(other_T, zeros_T).value is None


def test_rounding_takes_no_correlation_beyond_one():
    rows = torch.rand(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unbounded = [_unbounded(Metric.pearson(row, row).parts) for row in rows]
    assert max(unbounded) > 1.0, "rounding does so to some"
    assert all(1 - 1e-12 < Metric.pearson(row, row).value <= 1.0 for row in rows)
    assert all(-1.0 <= Metric.pearson(row, -row).value < 1e-12 - 1 for row in rows)


def _unbounded(parts: tuple[float, ...]) -> float:
    count, x, y, xx, yy, xy = parts
    return (count * xy - x * y) / math.sqrt(count * xx - x * x) / math.sqrt(count * yy - y * y)


def test_losses_are_sums_of_a_minibatch_and_means_over_minibatches():
    halves = [{"loss/total": Metric.loss(x), "policy/entropy": Metric.quotient(x, 1)} for x in (1.0, 2.0)]
    minibatch = merge_metrics(halves)
    assert values(minibatch) == {"loss/total": 3.0, "policy/entropy": 1.5}
    assert values(scale_losses(minibatch, 0.5)) == {"loss/total": 1.5, "policy/entropy": 1.5}
    other = {"loss/total": Metric.loss(5.0)}
    step = merge_metrics(map(per_minibatch, (minibatch, other)))
    assert values(step) == {"loss/total": 4.0, "policy/entropy": 1.5}


def test_spread_keeps_its_digits_where_values_are_near_one_and_one_is_taken_off():
    weights_T = 1 + torch.tensor([1.0, -1.0, 3.0, -3.0], dtype=torch.float64) * 1e-9
    assert Metric.std(weights_T - 1).value == pytest.approx(math.sqrt(5) * 1e-9, rel=1e-6)


def test_a_nan_that_is_counted_shows():
    broken = torch.tensor([1.0, torch.nan])
    for metric in (
        Metric.mean(broken),
        Metric.std(broken),
        Metric.pearson(broken, torch.tensor([1.0, 2.0])),
        Metric.ess(broken),
    ):
        assert math.isnan(metric.value)


def test_integers_and_booleans_are_counted_as_numbers():
    mask_T = torch.tensor([True, False, True])
    assert Metric.max(torch.tensor([1, 9, 2]), mask_T).value == 2.0
    assert Metric.mean(torch.tensor([2**40, 5, 1]), mask_T).value == (2**40 + 1) / 2
    assert Metric.mean(torch.tensor([True, True, False]), mask_T).value == 0.5


def test_a_nan_is_not_lost_whatever_the_order():
    one, broken = Metric.max(torch.tensor([1.0])), Metric.max(torch.tensor([torch.nan]))
    assert math.isnan(one.merge(broken).value) and math.isnan(broken.merge(one).value)


def test_names_that_only_some_parts_have_are_kept_and_kinds_do_not_mix():
    assert values(merge_metrics([{"a": Metric.sum(1)}, {"b": Metric.sum(2)}, {"a": Metric.sum(3)}])) == {
        "a": 4.0,
        "b": 2.0,
    }
    with pytest.raises(ValueError, match=r"mean.*sum|sum.*mean"):
        merge_metrics([{"a": Metric.sum(1)}, {"a": Metric(reduction=Reduction.MEAN, parts=(1.0, 1.0))}])


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mine = {
        "mean": Metric.mean(torch.tensor([[1.0], [2.0, 6.0]][rank])),
        f"only_{rank}": Metric.max(torch.tensor([float(rank)])),
    }
    torch.save(values(merge_over_ranks(mine, dist.group.WORLD)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_every_rank_gets_the_merge_of_all(tmp_path):
    forked_context()
    mp.start_processes(_rank, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == {"mean": 3.0, "only_0": 0.0, "only_1": 1.0}
    alone = {"a": Metric.sum(1)}
    assert merge_over_ranks(alone, None) == alone
