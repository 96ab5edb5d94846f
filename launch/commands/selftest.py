"""``tandem selftest``: makes the checks of ``launch/selftest/``, prints each result at once, and writes the report."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configs.errors import counted
from launch.checks.arguments import as_bad_input
from launch.processes.run_folder import check_can_be_made, new_path
from launch.processes.supervisor import Interrupted, Supervisor
from launch.selftest import report
from launch.selftest.bench import GRACE_S, Bench
from launch.selftest.check import Check, Machine, Outcome, Result, outcome_of, this_machine, why_not
from launch.selftest.checks import chosen
from launch.tables import print_over
from trainer.tracking.console import duration

WIDTH = 110
TELL_EVERY_S = 60.0


def selftest(folder: Path, names: Sequence[str], *, seed: int) -> bool:
    """Returns whether no check has failed. Its own folder is inside ``folder``."""
    with as_bad_input():
        checks = chosen(names)
        check_can_be_made("--folder", folder)
    machine, out = this_machine(), new_path(folder.resolve(), "selftest")
    line = Line(checks, machine)
    where = counted(machine.gpus, "GPU") if machine.gpus else "CPU, no GPU"
    about = f"about {duration(line.expected)} on two idle cores"
    print(f"{counted(len(checks), 'check')} on this machine ({where}), {about}", flush=True)
    print(f"everything goes into {out}", flush=True)
    outcomes, began = list[Outcome](), time.monotonic()
    bench = Bench(out, machine, seed=seed, tick=line.tick)
    try:
        with Supervisor(grace_s=GRACE_S) as interruptible:
            with bench:
                for check in checks:
                    outcomes.append(_made(check, bench, outcomes, line))
                    interruptible.raise_interrupt()
    finally:
        line.clear()
        if sys.exc_info()[0] in (Interrupted, None):
            _tell(out, outcomes, planned=len(checks), seconds=time.monotonic() - began, torch=bench.torch)
    return not any(one.result in (Result.FAIL, Result.NOT_RUN) for one in outcomes)


def _made(check: Check, bench: Bench, earlier: Sequence[Outcome], line: "Line") -> Outcome:
    if not check.uses_server:
        bench.stop_server()
    bench.begin(check)
    line.begin(check)
    by_name = {one.check.name: one for one in earlier}
    outcome = why_not(check, bench.machine, by_name) or outcome_of(check, bench)
    outcome = replace(outcome, seconds=bench.seconds)
    line.end(outcome)
    return outcome


def _tell(out: Path, outcomes: Sequence[Outcome], *, planned: int, seconds: float, torch: Mapping) -> None:
    """Print the table, then write the report. Raises OSError if that is impossible, such as on a full disk."""
    report.print_outcomes(outcomes, width=WIDTH)
    if failed := report.failures(outcomes):
        print(failed)
    print(report.verdict(outcomes, planned, seconds), flush=True)
    written = report.write(out, outcomes, planned=planned, seconds=seconds, torch=torch)
    print(f"for a bug report attach {written}", flush=True)


class Line:
    """The line of the current check, with the time left. A terminal shows it counting; elsewhere a check prints a line each
    minute and one when it is done."""

    def __init__(self, checks: Sequence[Check], machine: Machine):
        self._checks = [check for check in checks if check.why_not_here(machine) is None]
        self.expected = sum(check.seconds for check in self._checks)
        self._count, self._number = len(checks), 0
        self._check, self._done, self._spent, self._told = checks[0], 0.0, 0.0, 0.0
        self._is_terminal = sys.stdout.isatty()

    def begin(self, check: Check) -> None:
        self._check, self._number, self._told = check, self._number + 1, 0.0
        self.tick(0.0)

    @property
    def _place(self) -> str:
        return f"[{self._number:>{len(str(self._count))}}/{self._count}]"

    def tick(self, seconds: float) -> None:
        """The expected rest is corrected by the pace so far: on busy cores everything takes longer."""
        pace = max(self._spent / self._done, 0.5) if self._done >= 10 else 1.0
        rest = max(self.expected - self._done - self._check.seconds, 0.0) * pace
        left = duration(rest + max(self._check.seconds * pace - seconds, 0.0))
        text = f"{self._place} … {self._check.name} {seconds:.0f} s, about {left} left"
        if self._is_terminal:
            print_over(text)
        elif seconds >= self._told + TELL_EVERY_S:
            self._told = seconds
            print(text, flush=True)

    def end(self, outcome: Outcome) -> None:
        was_made = outcome.result in (Result.PASS, Result.FAIL)
        if was_made:
            self._done += self._check.seconds
            self._spent += outcome.seconds
        self.clear()
        seconds = f"{outcome.seconds:4.0f} s" if was_made else 6 * " "
        said = self._check.proves if was_made else outcome.text
        print(f"{self._place} {outcome.result:<8}  {self._check.name:<18} {seconds}  {said}", flush=True)

    def clear(self) -> None:
        if self._is_terminal:
            print_over("")
