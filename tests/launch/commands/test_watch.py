"""``tandem watch``: one picture of run folders in several states, and an end by a signal that leaves the terminal clean."""

import contextlib
import json
import math
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from launch.commands import status as looks
from launch.commands import watch
from launch.commands.watch import BARS, sparkline
from launch.processes.run_folder import RunFolder
from tests.support.command import tandem
from tests.trainer.tracking.test_transcripts import make_sample
from trainer.tracking.metrics_file import GrowingMetrics
from trainer.tracking.samples import FOLDER, as_lines, sample_file
from trainer.tracking.transcripts import ids_as_text

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "run" / FOLDER).mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(
        yaml.safe_dump({"name": "tiny", "steps": 9, "model": {"path": "gone"}})
    )
    return tmp_path / "run"


def train(run: Path, steps: int) -> None:
    rows = [{"step": 0, "eval/accuracy": 0.125}]
    for n in range(1, steps + 1):
        rows.append(
            {
                "step": n,
                "reward/mean": n / 10,
                "mismatch/ess": None,
                "time/step": 4.0,
                "time/sampling": 2.5,
                "time/update": 1.0,
                "time/evaluation": 0.75,
                "time/checkpoint": 0.25,
            }
        )
    # Its last line is being written.
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "rew')


def picture(run: Path) -> list[str]:
    done = tandem("watch", "run", "--once", cwd=run.parent)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.strip("│ ") for line in done.stdout.splitlines()]


def test_one_picture_of_curves_parts_and_samples(run):
    train(run, 8)
    for step in (3, 7):
        samples = [make_sample(b"p1urxf\x1bh", step=step, group=4, sibling=n) for n in range(6)]
        sample_file(run / FOLDER, step).write_bytes(as_lines(samples))
    lines = picture(run)
    text = "\n".join(lines)
    assert "state       not started" in lines and "step        8 of 9 (89%), 4.0 s a step" in lines
    assert "reward    ▁▂▃▄▅▆▇█  0.800  0.100 to 0.800" in lines
    assert "held out  ▁         12.5%  12.5% to 12.5%" in lines
    assert "ESS" not in text, "it was never finite"
    shares = {line.split()[0]: line.split()[1:4] for line in lines if " s  " in line and "█" in line}
    assert shares == {
        "sampling": ["2.50", "s", "50%"],
        "update": ["1.00", "s", "20%"],
        "evaluation": ["0.75", "s", "15%"],
        "checkpoint": ["0.25", "s", "5%"],
        "other": ["0.50", "s", "10%"],
    }
    assert "step 7, sampled for version 6" in text and "step 3" not in text
    assert text.count("── sibling") == 4 and "\x1b" not in text


def test_a_run_that_has_just_begun_and_one_with_damaged_samples(run):
    assert picture(run).count("no step yet") == 2 and "none yet" in picture(run)
    sample_file(run / FOLDER, 1).write_text("{torn")
    assert "cannot be read as samples" in " ".join(picture(run))


def test_a_look_reads_new_metrics_and_decodes_new_samples_alone(run, monkeypatch):
    """Also where a resumed run writes the step anew."""
    decoded, metrics = [], GrowingMetrics(run / "metrics.jsonl")
    monkeypatch.setattr(looks, "read_metrics", None)  # all of them at each look

    def decoding(ids):
        decoded.append(ids)
        return ids_as_text(ids)

    train(run, 2)
    file = sample_file(run / FOLDER, 3)

    def decode():
        return decoding

    file.write_bytes(as_lines([make_sample(step=3)]))
    os.utime(file, ns=(1, 1))
    watch._parts(RunFolder(run), metrics.read(), decode)
    count = len(decoded)
    assert count > 0
    watch._parts(RunFolder(run), metrics.read(), decode)
    assert len(decoded) == count
    os.utime(file, ns=(2, 2))
    watch._parts(RunFolder(run), metrics.read(), decode)
    assert len(decoded) == 2 * count


def test_a_damaged_config_hides_neither_curves_nor_samples(run):
    train(run, 8)
    sample_file(run / FOLDER, 7).write_bytes(as_lines([make_sample(step=7)]))
    (run / "config.yaml").write_text("name: [")
    lines = picture(run)
    assert any(line.startswith("damaged") for line in lines)
    assert any("sampled for version" in line for line in lines) and "reward" in " ".join(lines)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nothing", "--once"), "RUN: nothing is not a run folder"),
        (("run",), "watch needs a terminal; add --once"),
        (("run", "--every", "0"), "Invalid value for '--every'"),
    ],
)
def test_bad_input_is_refused(run, arguments, told):
    done = tandem("watch", *arguments, cwd=run.parent)
    assert done.returncode == 2 and told in " ".join(done.stderr.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_view_with_zero_and_gives_the_screen_back(run, number):
    """On a terminal, in a process of its own, whose parent ignores Ctrl-C like a script that starts background jobs."""
    train(run, 3)
    terminal, inside = pty.openpty()
    ignoring = ["bash", "-c", "trap '' INT; exec \"$@\"", "bash"]
    command = [*ignoring, sys.executable, "-m", "launch", "watch", str(run), "--every", "0.2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=env, cwd=run.parent)
    os.close(inside)
    written, deadline = b"", time.monotonic() + 120
    while b"held out" not in written:
        assert time.monotonic() < deadline and process.poll() is None, written
        written += os.read(terminal, 65536)
    process.send_signal(number)
    late = threading.Timer(60, process.kill)
    late.start()
    with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
        while more := os.read(terminal, 65536):
            written += more
    late.cancel()
    os.close(terminal)
    assert process.wait(timeout=60) == 0
    assert b"Traceback" not in written
    entered, left = written.rfind(b"\x1b[?1049h"), written.rfind(b"\x1b[?1049l")
    assert 0 <= entered < left, "the screen of before is shown again"
    assert written.rfind(b"\x1b[?25l") < written.rfind(b"\x1b[?25h"), "and the cursor"


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 60))
@example([0.0, 5e-324], 2)  # of which a scale would be infinite
def test_a_sparkline_keeps_order_and_width(values, width):
    line = sparkline(values, width)
    assert len(line) == min(len(values), width) and set(line) <= set(BARS)
    if len(values) <= width:
        levels = [BARS.index(bar) for bar in line]
        for a, level in zip(values, levels, strict=True):
            for b, other in zip(values, levels, strict=True):
                assert a > b or level <= other
        if len(set(values)) > 1:
            assert min(levels) == 0 and max(levels) == len(BARS) - 1
    assert sparkline([math.nan, *values], width) == line
