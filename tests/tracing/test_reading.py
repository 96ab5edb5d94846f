"""Files of several processes on one clock, their Chrome trace, and the parts of a step, against calculations by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tracing.made import NS, part, step, write_process, write_run
from tracing.parts import parts_of
from tracing.reading import Process, Recorded, Trace, chrome_trace, covered_ns, read_trace, union_of


def test_processes_of_one_boot_keep_their_order_and_other_hosts_come_by_the_wall_clock(tmp_path):
    """Rank 1 read its pair of clocks after somebody had set the wall clock back by 3 s; rank 2 is on another host, whose
    own clock begins elsewhere."""
    write_process(tmp_path, "rank-0", [step(1, 50, 60)], pid=1, wall=1000.0, clock=50.0)
    write_process(tmp_path, "rank-1", [step(1, 51, 61)], pid=2, wall=1001.0 - 3.0, clock=51.0)
    write_process(tmp_path, "rank-2", [step(1, 7, 17)], pid=3, wall=1000.5, clock=7.0, boot="other")
    trace = read_trace(tmp_path)
    begins = {p.who: p.spans[0].begin / NS for p in trace.processes}
    assert begins == {"rank-0": 1000.0, "rank-1": 1001.0, "rank-2": 1000.5}
    assert trace.steps == {1: (1000 * NS, 1011 * NS)}


def test_a_torn_last_line_is_left_out_and_a_torn_line_within_is_an_error(tmp_path):
    file = write_process(tmp_path, "rank-0", [step(1, 0, 1), step(2, 1, 2)])
    whole = file.read_text()
    file.write_text(whole[:-5])
    assert [*read_trace(tmp_path).steps] == [1]
    lines = whole.splitlines(keepends=True)
    file.write_text(lines[0] + lines[1][:9] + "\n" + lines[2])
    with pytest.raises(ValueError, match=r"rank-0-7.jsonl, line 2, cannot be read"):
        read_trace(tmp_path)
    file.write_text('{"who": "rank-0"}\n')
    with pytest.raises(ValueError, match=r"no trace of this version of tandem.*remove it"):
        read_trace(tmp_path)
    file.write_text(lines[0][:9])
    assert read_trace(tmp_path) == Trace([], {})


def test_a_step_that_broke_off_is_no_step(tmp_path):
    write_process(
        tmp_path, "rank-0", [step(1, 0, 1), ("step", "main", 1, 2, {"step": 2, "error": "StopRequested"})]
    )
    assert [*read_trace(tmp_path).steps] == [1]


def test_processes_come_as_roles_then_ranks_by_number(tmp_path):
    for number in (10, 2, 0):
        write_process(tmp_path, f"rank-{number}", [step(1, 0, 1)], pid=number + 1)
    write_process(tmp_path, "sample", [part("NextGroups", 0, 1)], pid=99)
    assert [p.who for p in read_trace(tmp_path).processes] == ["sample", "rank-0", "rank-2", "rank-10"]


def test_the_chrome_trace_has_a_row_for_each_row_and_microseconds_from_the_first_span(tmp_path):
    events = chrome_trace(read_trace(write_run(tmp_path)))["traceEvents"]
    json.dumps(events, allow_nan=False)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert titles[1] == "sample role (h, pid 9)" and titles[2] == "learner rank 0 (h, pid 7)"
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 7 + 3 + 6
    assert {names[e["pid"], e["tid"]] for e in spans} == {"main", "requests 1", "requests 2"}
    second = next(e for e in spans if e["name"] == "request" and names[1, e["tid"]] == "requests 2")
    assert (second["ts"], second["dur"], second["args"]) == (1e6, 2e6, {"samples": 4})


def test_the_last_steps_keep_what_reaches_into_them(tmp_path):
    last = read_trace(write_run(tmp_path)).last(1)
    assert [*last.steps] == [3]
    by_who = {p.who: [(s.name, s.begin // NS - 1000) for s in p.spans] for p in last.processes}
    assert by_who["sample"] == [("request", 10)]
    assert by_who["rank-0"] == [("step", 10), ("sampling", 10), ("update", 12)]
    # Rank 0 is in its third step while rank 1 still is in the second.
    assert by_who["rank-1"] == [("step", 0), ("step", 11)]


def test_parts_by_role(tmp_path):
    sample, first, second = parts_of(read_trace(write_run(tmp_path)))
    assert (first.wall_s, first.outside_s) == (8.0, 0.5)
    numbers = {p.path: (p.seconds, p.share, p.count) for p in first.parts}
    assert numbers == {
        ("sampling",): (3.0, 6 / 16, 1.0),
        ("sampling", "receive"): (0.5, 1 / 16, 0.5),
        ("update",): (4.5, 9 / 16, 1.0),
    }
    assert [p.path[-1] for p in first.parts] == ["sampling", "receive", "update"], "in the order of the step"
    assert (second.wall_s, second.outside_s) == (8.0, 5.5)
    # Of the time from the first rank's begin to the last rank's end: 0 to 11 and 10 to 16.
    assert sample.wall_s == 8.5 and sample.outside_s == pytest.approx((17 - 4) / 2)
    assert {p.path: (p.seconds, p.count) for p in sample.parts} == {
        ("NextGroups",): (2.0, 0.5),
        ("requests (any)",): (pytest.approx((3 + 1 + 1) / 2), 1.5),
        ("requests (any)", "generate"): (0.5, 0.5),
    }


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_the_union_counts_each_instant_once(spans, begin, length):
    made = sorted((Recorded("a", "r 1", b, b + n, {}) for b, n in spans), key=lambda s: (s.begin, -s.end))
    instants = {at for s in made for at in range(s.begin, s.end)} & {*range(begin, begin + length)}
    union = union_of((s.begin, s.end) for s in made)
    assert covered_ns(union, begin, begin + length) == len(instants)


def test_the_parts_of_twice_the_steps_are_twice_the_work():
    looks = 0

    class Counted(Recorded):
        def __getattribute__(self, name: str):
            nonlocal looks
            looks += name in ("begin", "end")
            return super().__getattribute__(name)

    def work(steps: int) -> int:
        nonlocal looks
        spans = [Counted("request", f"requests {n % 4}", 10 * n, 10 * n + 25, {}) for n in range(10 * steps)]
        looks = 0
        trace = Trace([Process("sample", "h", 1, spans)], {n: (100 * n, 100 * n + 99) for n in range(steps)})
        (found,) = parts_of(trace)
        assert found.parts[0].path == ("requests (any)",)
        return looks

    assert work(80) < 3 * work(40)


TREES = st.recursive(st.integers(0, 3), lambda inner: st.lists(inner, max_size=4), max_leaves=12)
"""A leaf lasts as long as its number; a list is a span with others in it, and a second of its own before each."""


def seconds_of(tree) -> int:
    return tree if isinstance(tree, int) else sum(1 + seconds_of(inner) for inner in tree)


def laid_out(tree, begin: int, depth: int) -> list:
    spans = [part(f"part {depth} {seconds_of(tree) % 2}", begin, begin + seconds_of(tree))]
    for inner in [] if isinstance(tree, int) else tree:
        spans += laid_out(inner, begin + 1, depth + 1)
        begin += 1 + seconds_of(inner)
    return spans


@given(st.lists(TREES, max_size=5))
def test_outermost_parts_and_what_is_outside_of_them_are_the_wall_time(tmp_path_factory, trees):
    run, spans, at = tmp_path_factory.mktemp("run"), [], 1
    for tree in trees:
        spans += laid_out(tree, at, 0)
        at += seconds_of(tree) + 1
    write_process(run, "rank-0", [*reversed(spans), step(1, 0, at)])
    (found,) = parts_of(read_trace(run))
    outermost = sum(p.seconds for p in found.parts if len(p.path) == 1)
    assert outermost == pytest.approx(sum(map(seconds_of, trees)))
    assert outermost + found.outside_s == pytest.approx(found.wall_s) == pytest.approx(at)
    for p in found.parts:
        inside = sum(q.seconds for q in found.parts if q.path[:-1] == p.path)
        assert inside <= p.seconds + 1e-9
