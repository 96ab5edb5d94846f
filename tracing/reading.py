"""The recorded spans of a run's processes on one clock, and the Chrome trace of them.

Processes of one boot of one machine share CLOCK_MONOTONIC. One pair of clocks, the first that any of them has written,
moves all of them to the wall clock, so that their order is exact. Between machines the order is as exact as the
agreement of their wall clocks: NTP or PTP must keep these together.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tracing.recorder import FOLDER, MAIN

STEP = "step"
"""The name of a learner rank's span of a whole step, with the note ``step``."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A span. Times are ns since the epoch, of the wall clock."""

    name: str
    row: str
    begin: int
    end: int
    notes: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e9


@dataclass(frozen=True, slots=True)
class Process:
    who: str
    """``sample``, or ``rank-0``, ``rank-1``, …"""
    host: str
    pid: int
    spans: list[Recorded]
    """By their begin; of two that begin together the longer one comes first."""

    @property
    def title(self) -> str:
        kind, _, number = self.who.partition("-")
        return f"learner rank {number}" if kind == "rank" else f"{self.who} role"

    @property
    def place(self) -> tuple[int, int, int]:
        """Of the process among all: the sample role, then the ranks by number."""
        number = self.who.rpartition("-")[2]
        return (1, int(number), self.pid) if number.isdigit() else (0, 0, self.pid)


@dataclass(frozen=True, slots=True)
class Trace:
    processes: list[Process]
    steps: dict[int, tuple[int, int]]
    """From the first rank's begin of each step to the last rank's end of it. Steps that no rank has finished are left
    out."""

    def last(self, count: int) -> "Trace":
        """The last ``count`` steps, and all spans that reach into them."""
        steps = dict(sorted(self.steps.items())[-count:])
        begin = min(begin for begin, _ in steps.values())
        end = max(end for _, end in steps.values())
        processes = [
            Process(p.who, p.host, p.pid, [s for s in p.spans if s.end > begin and s.begin < end])
            for p in self.processes
        ]
        return Trace([p for p in processes if p.spans], steps)


def read_trace(run: Path) -> Trace:
    """The records of a run's processes. The run may still continue: a torn last line is left out.

    Raises ValueError for a file in which another line cannot be read, or which names no clocks.
    """
    files = [(path, _lines(path)) for path in sorted((run / FOLDER).glob("*-*.jsonl"))]
    offsets: dict[str, tuple[int, int]] = {}
    found = []
    for path, lines in files:
        about = next(lines, None)
        if about is None:
            continue  # its first line is being written
        try:
            pair = (about["clock_ns"], about["wall_ns"] - about["clock_ns"])
            offsets[about["boot"]] = min(offsets.get(about["boot"], pair), pair)
            spans = [Recorded(*line) for line in lines if isinstance(line, list)]
            found.append((about["boot"], Process(about["who"], about["host"], about["pid"], spans)))
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path} is no trace of this version of tandem ({error}); remove it") from error
    processes = [
        Process(p.who, p.host, p.pid, sorted((_moved(s, offsets[boot][1]) for s in p.spans), key=_order))
        for boot, p in found
    ]
    processes.sort(key=lambda process: process.place)
    steps: dict[int, tuple[int, int]] = {}
    for s in (s for p in processes for s in p.spans if s.name == STEP and "error" not in s.notes):
        begin, end = steps.get(s.notes["step"], (s.begin, s.end))
        steps[s.notes["step"]] = min(begin, s.begin), max(end, s.end)
    return Trace(processes, dict(sorted(steps.items())))


def _lines(path: Path) -> Iterator[Any]:
    if not path.is_file():  # whoever opens a pipe waits for its writer
        raise ValueError(f"{path} is not a regular file; remove it")
    content = path.read_bytes()
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, cannot be read ({error}); remove the file") from error


def _moved(span: Recorded, offset: int) -> Recorded:
    return Recorded(span.name, span.row, span.begin + offset, span.end + offset, span.notes)


def _order(span: Recorded) -> tuple[int, int]:
    return span.begin, -span.end


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace in Chrome's format, which Perfetto opens: a process per process, a thread per row, µs since the first
    span. Source: "Trace Event Format", complete (X) and metadata (M) events."""
    events: list[dict[str, Any]] = []
    start = min((s.begin for p in trace.processes for s in p.spans), default=0)
    for number, process in enumerate(trace.processes, 1):
        label = f"{process.title} ({process.host}, pid {process.pid})"
        events.append(_about("process_name", number, 0, {"name": label}))
        events.append(_about("process_sort_index", number, 0, {"sort_index": number}))
        rows = {
            row: place for place, row in enumerate(sorted({s.row for s in process.spans}, key=_row_order), 1)
        }
        for row, place in rows.items():
            events.append(_about("thread_name", number, place, {"name": row}))
            events.append(_about("thread_sort_index", number, place, {"sort_index": place}))
        for s in process.spans:
            times = {"ts": (s.begin - start) / 1e3, "dur": (s.end - s.begin) / 1e3}
            events.append(
                {"name": s.name, "ph": "X", "pid": number, "tid": rows[s.row], **times, "args": s.notes}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"first_span_ns": str(start)}}


def _about(name: str, process: int, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": row, "args": args}


def _row_order(row: str) -> tuple[bool, str, int]:
    family, _, number = row.rpartition(" ")
    return (row != MAIN, family, int(number)) if number.isdigit() else (row != MAIN, row, 0)


def union_of(times: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The times in which at least one (begin, end) is open, none of which overlap. ``times``: in order of their begin."""
    union: list[tuple[int, int]] = []
    for begin, end in times:
        if union and begin < union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def part_of(union: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The times of a ``union_of`` that overlap the time from ``begin`` to ``end``."""
    return union[bisect_right(union, begin, key=itemgetter(1)) : bisect_left(union, end, key=itemgetter(0))]


def covered_ns(union: list[tuple[int, int]], begin: int, end: int) -> int:
    """The part of the time between ``begin`` and ``end`` that a ``union_of`` covers."""
    return sum(min(one[1], end) - max(one[0], begin) for one in part_of(union, begin, end))
