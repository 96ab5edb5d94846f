"""The ledger: written by steps, cut at a resume, and its balance by hand."""

import tracemalloc

import pytest

from rollout.sampling.messages import SamplingStats
from trainer.tracking.ledger import LEDGER, Ledger, LedgerLine, read_ledger, summary


def stats(first: int, count: int, *without_signal: int, failed: int = 0) -> SamplingStats:
    return SamplingStats(
        seconds=1.0, requests=1, retries=0, failed_rewards=failed,
        first_group=first, prompts=[f"p{i % 5}" for i in range(first, first + count)],
        without_signal=list(without_signal),
    )  # fmt: skip


def line(step: int, first: int, count: int, *without_signal: int) -> LedgerLine:
    return LedgerLine(
        step=step, first=first, prompts=["p"] * count, without_signal=list(without_signal), failed_rewards=0
    )


def test_lines_of_steps_that_are_done_again_go_and_a_torn_one_does_too(tmp_path):
    path = tmp_path / LEDGER
    ledger = Ledger(path, keep_until=0)
    for step, first in ((1, 0), (2, 4), (3, 8)):
        ledger.enter(step, stats(first, 4))
    with path.open("a") as file:
        file.write('{"step": 4, "first": 12, "pro')
    resumed = Ledger(path, keep_until=2)
    assert [at.step for at in read_ledger(path)] == [1, 2]
    resumed.enter(3, stats(8, 6, 9, 10, failed=3))
    lines = [*read_ledger(path)]
    assert [(at.step, at.first, at.end, at.trained) for at in lines] == [
        (1, 0, 4, 4),
        (2, 4, 8, 4),
        (3, 8, 14, 4),
    ]
    assert lines[2].prompts == ["p3", "p4", "p0", "p1", "p2", "p3"]
    told = "12 groups trained on, each in one step; 2 left out, since their siblings do not differ; 3 rewards failed"
    assert summary(lines) == told
    Ledger(path, keep_until=0)
    assert summary(read_ledger(path)) == "no group yet"


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([line(1, 0, 4), line(3, 4, 4)], "step 3 follows step 1"),
        ([line(1, 0, 4), line(2, 6, 4)], "no step has used the groups 4 to 5, between steps 1 and 2"),
        ([line(1, 0, 4), line(2, 3, 4)], "steps 1 and 2 have both used the groups 3 to 3"),
        ([line(1, 0, 4, 7)], "step 1 leaves out groups that it does not have: [7]"),
    ],
)
def test_what_is_wrong_is_named(lines, wrong):
    assert summary(lines) == f"NOT BALANCED: {wrong}"


def test_a_long_ledger_is_summed_up_line_by_line(tmp_path):
    """All its prompts would be a gigabyte."""
    path = tmp_path / LEDGER
    ledger = Ledger(path, keep_until=0)
    for step in range(1, 101):
        ledger.enter(step, stats(1000 * (step - 1), 1000))
    ledger.close()
    tracemalloc.start()
    try:
        assert summary(read_ledger(path)) == "100,000 groups trained on, each in one step"
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 4
    finally:
        tracemalloc.stop()


def test_a_run_that_was_begun_by_an_older_version_is_balanced_from_its_first_line_on():
    told = "8 groups trained on, each in one step; the ledger begins with step 11"
    assert summary([line(11, 40, 4), line(12, 44, 4)]) == told
