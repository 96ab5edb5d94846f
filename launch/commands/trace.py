"""``tandem trace``: where the time of a run's traced steps went, as a table, and as one Chrome trace of all roles."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.checks.arguments import BadInput, as_bad_input, check_file_to_write
from launch.processes.run_folder import RunFolder
from launch.tables import print_table
from tracing.parts import Parts, parts_of
from tracing.reading import Trace, chrome_trace, read_trace
from trainer.file_system import write_whole

COLUMNS = ("role", "part", "s a step", "of its time", "spans", "all ranks, s")


def trace(folder: RunFolder, *, steps: int | None, out: Path | None) -> None:
    """Write the Chrome trace of the last ``steps`` that were traced (None: of all) into ``out`` (None:
    ``RUN/trace.json``), and print the parts of a step by role."""
    found = recorded(folder, steps)
    out = out or folder.path / "trace.json"
    with as_bad_input():
        check_file_to_write("--out", out, ".json")
    write_whole(out, f"{json.dumps(chrome_trace(found))}\n".encode())
    print_table(COLUMNS, [*table_rows(parts_of(found))])
    print(f"steps {_listed(found)}; (any): at least one of them is open")
    print(f"trace: {out}; open it in https://ui.perfetto.dev, which keeps it on this machine", flush=True)
    if profiles := sorted(folder.trace.glob("torch-rank-*.json")):
        print(f"torch's profiler, on its own clock: {', '.join(map(str, profiles))}", flush=True)


def recorded(folder: RunFolder, steps: int | None) -> Trace:
    """Raises BadInput where nothing was recorded, or fewer steps."""
    with as_bad_input("RUN: "):
        found = read_trace(folder.path)
    if not found.steps:
        state = "has traced no whole step yet" if found.processes else "has no trace"
        raise BadInput(
            f"RUN: {folder.path} {state}; to record steps 2 and 3 use `tandem train CONFIG tracking.trace.steps=2`, or to record steps "
            "of a resumed run `tandem resume RUN tracking.trace.first=STEP tracking.trace.steps=2`"
        )
    if steps is not None and steps > len(found.steps):
        raise BadInput(f"--steps {steps}: {folder.path} has traced {len(found.steps)}: {_listed(found)}")
    return found if steps is None else found.last(steps)


def _listed(found: Trace) -> str:
    return ", ".join(map(str, found.steps))


def table_rows(found: Sequence[Parts]) -> Iterator[tuple[str, ...]]:
    """The parts of each role without ranks, and of the learner's first rank. The last column has the least and the greatest
    value of all ranks."""
    ranks = [parts for parts in found if parts.process.who.startswith("rank-")]
    for parts in [*(parts for parts in found if parts not in ranks), *ranks[:1]]:
        others = ranks if parts in ranks else []
        whole = _numbers(parts.wall_s, 1.0, None)
        yield parts.process.title, "the whole", *whole, _range([o.wall_s for o in others])
        for part in parts.parts:
            same = [p.seconds for o in others for p in o.parts if p.path == part.path]
            name = "  " * len(part.path) + part.path[-1]
            yield ("", name, *_numbers(part.seconds, part.share, part.count), _range(same))
        share = parts.outside_s / parts.wall_s
        outside = [other.outside_s for other in others]
        yield ("", "outside of the parts", *_numbers(parts.outside_s, share, None), _range(outside))


def _numbers(seconds: float, share: float, count: float | None) -> tuple[str, str, str]:
    return f"{seconds:.3f}", f"{share:.1%}", "" if count is None else f"{count:g}"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}" if len(values) > 1 else ""
