"""What a process writes: when, on which rows, and nothing where no step is traced."""

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracing import Recorder, at_step, install, laps, span


@pytest.fixture(autouse=True)
def no_recorder_left():
    yield
    install(None)


def lines_of(folder: Path) -> list:
    return [
        json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()
    ]


def spans_of(folder: Path) -> list[tuple[str, str, int, int, dict]]:
    return [tuple(line) for line in lines_of(folder) if isinstance(line, list)]


def counter() -> "itertools.count[int]":
    return itertools.count()


def test_only_the_window_is_recorded_with_notes_and_errors(tmp_path):
    install(Recorder(tmp_path / "trace", "rank-3", range(2, 4), clock=counter().__next__))
    recorded = []
    for step in range(1, 6):
        recorded.append(at_step(step))
        with contextlib.suppress(KeyError), span("part", step=step) as part:
            part.note(bytes=8)
            if step == 3:
                raise KeyError
    assert recorded == [False, True, True, False, False]
    about, *spans = lines_of(tmp_path / "trace")
    assert about["who"] == "rank-3" and about["clock_ns"] == 0 and about["wall_ns"] > 0
    assert spans == [
        ["part", "main", 1, 2, {"step": 2, "bytes": 8}],
        ["part", "main", 3, 4, {"step": 3, "bytes": 8, "error": "KeyError"}],
    ]


def test_without_a_window_nothing_is_made_and_nothing_is_written(tmp_path):
    assert span("a") is span("b", family="c", note=1), "one constant"
    with span("a") as one:
        one.note(x=1)
    assert at_step(1) is False
    install(Recorder(tmp_path / "trace", "rank-0", range(5, 6)))
    assert at_step(1) is False and span("a") is span("b")
    assert not (tmp_path / "trace").exists()


def test_laps_lie_end_to_end(tmp_path):
    install(Recorder(tmp_path / "trace", "rank-0", range(1, 2), clock=counter().__next__))
    at_step(1)
    with span("update"), laps("micro-batch") as lap:
        lap(tokens=3)
        lap(tokens=4)
    with laps("micro-batch"):
        pass
    assert spans_of(tmp_path / "trace") == [
        ("micro-batch", "main", 2, 3, {"tokens": 3}),
        ("micro-batch", "main", 4, 5, {"tokens": 4}),
        ("update", "main", 1, 6, {}),
    ]


def test_a_folder_that_cannot_be_written_ends_the_trace_and_not_the_run(tmp_path, capsys):
    (tmp_path / "trace").write_text("a file in the folder's place")
    install(Recorder(tmp_path / "trace", "rank-0", range(1, 9)))
    assert at_step(1) is False
    with span("a"):
        pass
    assert at_step(2) is False
    assert capsys.readouterr().err.count("no more is recorded") == 1


TREES = st.recursive(st.just(()), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8)
"""Spans in spans."""


@settings(max_examples=60, deadline=None)
@given(tasks=st.lists(st.tuples(TREES, st.integers(0, 3)), max_size=6), main=TREES)
def test_spans_of_a_row_nest_or_are_disjoint_and_rows_are_as_few_as_can_be(tmp_path_factory, tasks, main):
    """Of coroutines that run in any interleaving, each with a span of its own family and spans inside it."""
    folder = tmp_path_factory.mktemp("run") / "trace"
    install(Recorder(folder, "sample", range(1, 2), clock=counter().__next__))
    at_step(1)

    async def play(tree, pauses: int, name: str = "inner") -> None:
        with span(name):
            for inner in tree:
                for _ in range(pauses):
                    await asyncio.sleep(0)
                await play(inner, pauses)

    async def request(tree, pauses: int) -> None:
        for _ in range(pauses):
            await asyncio.sleep(0)
        with span("request", family="requests"):
            await play(tree, pauses)

    async def everything() -> None:
        await asyncio.gather(play(main, 1, "main"), *(request(tree, pauses) for tree, pauses in tasks))

    asyncio.run(everything())
    install(None)
    spans = spans_of(folder)
    assert sum(name == "request" for name, *_ in spans) == len(tasks)
    for (_, row, begin, end, _), (_, other, begin2, end2, _) in itertools.combinations(spans, 2):
        if row == other:
            disjoint = end <= begin2 or end2 <= begin
            nested = (begin <= begin2 and end2 <= end) or (begin2 <= begin and end <= end2)
            assert disjoint or nested
    outer = [(begin, end) for name, _, begin, end, _ in spans if name == "request"]
    most = max((sum(b <= at < e for b, e in outer) for at, _ in outer), default=0)
    assert len({row for _, row, *_ in spans if row != "main"}) == most
