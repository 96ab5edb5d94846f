"""The clock of a step: what metrics read, and the spans of the same parts."""

import contextlib
from contextlib import contextmanager

import pytest

from tracing import Recorder, install
from tracing.parts import parts_of
from tracing.reading import read_trace
from trainer.step_clock import StepClock, clocked


@pytest.fixture
def recorded(tmp_path):
    install(Recorder(tmp_path / "trace", "rank-0", range(2, 4)))
    yield tmp_path
    install(None)


def test_parts_are_told_counted_together_and_kept_apart_from_the_step():
    told = []
    clock = StepClock(told.append)
    for part in ("sampling", "update", "sampling"):
        with clock.time(part):
            pass
    clock.end_step()
    before = clock.seconds["step"]
    with clock.time("evaluation"):
        pass
    assert told == ["sampling", "update", "sampling", "evaluation"]
    assert clock.seconds.keys() == {"sampling", "update", "step", "evaluation"}
    assert clock.seconds["step"] == before >= clock.seconds["sampling"] + clock.seconds["update"]


def test_traced_steps_have_their_parts_and_what_they_run_in(recorded):
    profiled = []

    @contextmanager
    def profile(step):
        profiled.append(step)
        yield
        profiled.append(-step)

    for _, clock in clocked(range(1, 6), print, profile):
        with clock.time("sampling"):
            pass
        clock.end_step()
    assert profiled == [2, -2, 3, -3]
    trace = read_trace(recorded)
    assert [*trace.steps] == [2, 3]
    (parts,) = parts_of(trace)
    assert [part.path for part in parts.parts] == [("sampling",)]


def test_a_step_that_breaks_off_is_marked(recorded):
    def run() -> None:
        for step, clock in clocked(range(2, 4), print, lambda step: contextlib.nullcontext()):
            with clock.time("sampling"):
                if step == 3:
                    raise KeyError

    with contextlib.suppress(KeyError):
        run()
    assert [*read_trace(recorded).steps] == [2]
