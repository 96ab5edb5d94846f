"""Hand-made traces, as processes leave them."""

import json
from pathlib import Path

NS = 1_000_000_000


def write_process(
    run: Path, who: str, spans, *, pid: int = 7, boot: str = "b", wall: float = 1000.0, clock: float = 0.0
):
    """spans: (name, row, begin, end, notes) with times in s of the process's own clock, which showed ``clock`` at
    ``wall``."""
    (run / "trace").mkdir(parents=True, exist_ok=True)
    about = {
        "who": who,
        "host": "h",
        "pid": pid,
        "boot": boot,
        "wall_ns": round(wall * NS),
        "clock_ns": round(clock * NS),
    }
    lines = [about] + [
        [name, row, round(begin * NS), round(end * NS), notes] for name, row, begin, end, notes in spans
    ]
    file = run / "trace" / f"{who}-{pid}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def step(number: int, begin: float, end: float):
    return ("step", "main", begin, end, {"step": number})


def part(name: str, begin: float, end: float, row: str = "main", **notes):
    return (name, row, begin, end, notes)


def write_run(run: Path) -> Path:
    """Two ranks and the sample role over steps 2 and 3, of 10 s and 6 s on rank 0."""
    write_process(
        run, "rank-0",
        [
            part("receive", 3, 4), part("sampling", 0, 4), part("update", 4, 9), step(2, 0, 10),
            part("sampling", 10, 12), part("update", 12, 16), step(3, 10, 16),
        ],
    )  # fmt: skip
    write_process(run, "rank-1", [part("sampling", 0, 5), step(2, 0, 11), step(3, 11, 16)], pid=8)
    requests = [
        part("request", b, e, f"requests {n}", samples=4) for n, b, e in ((1, 0, 2), (2, 1, 3), (1, 10, 11))
    ]
    requests.append(part("generate", 1.5, 2.5, "requests 2"))
    write_process(run, "sample", [part("NextGroups", 0, 4), *requests, part("late", 20, 21)], pid=9)
    return run
