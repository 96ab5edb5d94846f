"""``tandem trace``: its table and its file, and what it says where there is nothing to show."""

import json
import re
from pathlib import Path

import pytest

from tests.support.command import tandem
from tests.tracing.made import part, write_process, write_run


@pytest.fixture
def run(tmp_path) -> Path:
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text("name: tiny\nsteps: 4\n")
    return folder


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line[:1] == "│"]


def test_the_table_has_each_role_and_its_shares_of_the_wall_time(run):
    done = tandem("trace", "run", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert cells(done.stdout) == [
        ["sample role", "the whole", "8.500", "100.0%", "", ""],
        ["", "NextGroups", "2.000", "23.5%", "0.5", ""],
        ["", "requests (any)", "2.500", "29.4%", "1.5", ""],
        ["", "generate", "0.500", "5.9%", "0.5", ""],
        ["", "outside of the parts", "6.500", "76.5%", "", ""],
        ["learner rank 0", "the whole", "8.000", "100.0%", "", "8.000 to 8.000"],
        ["", "sampling", "3.000", "37.5%", "1", "2.500 to 3.000"],
        ["", "receive", "0.500", "6.2%", "0.5", ""],
        ["", "update", "4.500", "56.2%", "1", ""],
        ["", "outside of the parts", "0.500", "6.2%", "", "0.500 to 5.500"],
    ]
    assert f"trace: {run}/trace.json; open it in https://ui.perfetto.dev" in done.stdout
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 16


def test_the_last_steps_into_a_file_of_ones_own(run):
    (run / "trace" / "torch-rank-0-step-3.json").write_text("{}")
    done = tandem("trace", "run", "--steps", "1", "-o", "mine.json", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    assert "steps 3;" in done.stdout and "torch's profiler" in done.stdout
    events = json.loads((run.parent / "mine.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "--steps", "3"), "--steps 3: .* has traced 2: 2, 3"),
        (("run", "--steps", "0"), "Invalid value for '--steps'"),
        (("run", "-o", "trace.txt"), "--out: trace.txt is not the name of a file to write"),
        (("run", "-o", "no/trace.json"), "--out: no/trace.json is not the name of a file to write"),
        (("nothing",), "RUN: nothing is not a run folder"),
    ],
)
def test_bad_input_is_refused(run, arguments, told):
    done = tandem("trace", *arguments, cwd=run.parent)
    assert done.returncode == 2
    assert_told(told, done.stderr)


def test_a_run_without_a_trace_is_told_how_to_record_one(run):
    for file in (run / "trace").iterdir():
        file.unlink()
    assert_told("run has no trace; .*tandem train CONFIG tracking.trace.steps=2", refusal(run))
    write_process(run, "rank-0", [part("sampling", 0, 1)])
    assert_told("run has traced no whole step yet", refusal(run))
    (run / "trace" / "rank-0-7.jsonl").write_text("{}\n{torn}\n")
    assert_told("rank-0-7.jsonl is no trace of this version of tandem", refusal(run))
    assert not (run / "trace.json").exists()


def refusal(run: Path) -> str:
    done = tandem("trace", "run", cwd=run.parent)
    assert done.returncode == 2
    return done.stderr


def assert_told(pattern: str, text: str) -> None:
    assert re.search(pattern, " ".join(text.split())), text
