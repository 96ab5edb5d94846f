"""The parts of the traced steps by role: their seconds, their share of the wall time, and the time outside
them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tracing.reading import STEP, Process, Recorded, Trace, covered_ns, part_of, union_of
from tracing.recorder import MAIN

Tree = dict[tuple[str, ...], list[Recorded]]
"""The spans of each path: of the names of those around a span, and its own."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of one process's steps. Parts of the main row that lie in the same one do not overlap."""

    path: tuple[str, ...]
    """The names of the spans around it, and its own; the outermost ones of a family are ``FAMILY (any)``."""
    seconds: float
    """A step's, as a mean over the steps. Of a family: the time in which at least one of its spans is open."""
    share: float
    """Of the wall time."""
    count: float
    """Spans a step."""


@dataclass(frozen=True, slots=True)
class Parts:
    process: Process
    wall_s: float
    """A step's, as a mean."""
    parts: list[Part]
    outside_s: float
    """Of the wall time: in none of the parts."""


def parts_of(trace: Trace) -> list[Parts]:
    """Of each learner rank over its own steps, and of each other process over the time from the first rank's begin of a
    step to the last rank's end."""
    return [found for process in trace.processes if (found := _parts(process, trace)) is not None]


def _parts(process: Process, trace: Trace) -> Parts | None:
    own = [s for s in process.spans if s.name == STEP and s.notes.get("step") in trace.steps]
    times = [(s.begin, s.end) for s in own] or list(trace.steps.values())
    wall, count, steps = sum(end - begin for begin, end in times), len(times), union_of(sorted(times))
    if not wall:
        return None
    main = [s for s in process.spans if s.name != STEP and s.row == MAIN]
    parts = []
    for path, spans in (*_by_tree(_of_main(main)), *_by_tree(_of_families(process))):
        inside = sum(bool(part_of(steps, s.begin, s.end)) for s in spans)
        if inside:
            taken = _taken(spans, times)
            parts.append(Part(path, taken / count / 1e9, taken / wall, inside / count))
    covered = _taken(main, times)
    return Parts(process, wall / count / 1e9, parts, (wall - covered) / count / 1e9)


def _taken(spans: Sequence[Recorded], times: Sequence[tuple[int, int]]) -> int:
    """The ns of each of the times in which at least one span is open, together."""
    union = union_of((s.begin, s.end) for s in spans)
    return sum(covered_ns(union, begin, end) for begin, end in times)


def _of_main(main: Sequence[Recorded]) -> Tree:
    tree: Tree = defaultdict(list)
    for path, s in _with_paths(main):
        tree[path].append(s)
    return tree


def _of_families(process: Process) -> Tree:
    """The spans of all rows of a family together, such as those of all samples."""
    by_row: dict[str, list[Recorded]] = defaultdict(list)
    for s in process.spans:
        if s.name != STEP and s.row != MAIN:
            by_row[s.row].append(s)
    tree: Tree = defaultdict(list)
    for row, spans in by_row.items():
        for path, s in _with_paths(spans):
            tree[f"{row.rpartition(' ')[0]} (any)", *path[1:]].append(s)
    for spans in tree.values():
        spans.sort(key=lambda s: s.begin)
    return tree


def _with_paths(spans: Sequence[Recorded]) -> Iterator[tuple[tuple[str, ...], Recorded]]:
    """Each span of one row with the names of those around it and its own. spans: in the order of a ``Process``."""
    around: list[Recorded] = []
    for s in spans:
        while around and around[-1].end <= s.begin:
            around.pop()
        around.append(s)
        yield tuple(one.name for one in around), s


def _by_tree(tree: Tree) -> Iterator[tuple[tuple[str, ...], list[Recorded]]]:
    """Each path after the one that contains it; paths inside one path in the order of their first begin."""
    first = {path: spans[0].begin for path, spans in tree.items()}
    # A path begins with the beginnings of those around it.
    yield from sorted(
        tree.items(),
        key=lambda item: [(first[item[0][:n]], item[0][n - 1]) for n in range(1, len(item[0]) + 1)],
    )
