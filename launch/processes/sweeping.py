"""Runs a list of training runs on this machine, one after another or several at a time, and remembers them.

    SWEEP/sweep.json         {"runs": {name: its newest run folder, beside SWEEP}}, the memory of the sweep
    SWEEP/NAME.yaml, .log    the config of a run, complete, as it was checked; what its `tandem train` prints
    SWEEP/lock               held while the sweep runs

The state of a run is read only from its folder: a finished run is not run again, one with a checkpoint continues, any other
starts from the beginning. Each run is a ``tandem train`` in its own session. A signal to the sweep, or its death, is a
request to stop for all of them (launch/processes/stopping.py).
"""

import contextlib
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.loader import ConfigError, load_config, resolved_yaml
from configs.reading.files import text_of
from configs.schema import RunConfig
from launch.processes.heartbeat import living_roles
from launch.processes.run_folder import RunFolder, write_json
from launch.processes.supervisor import KILL_TIMEOUT_S, Role, RoleFailed, Supervisor
from launch.roles.start import environment
from launch.slurm.job import is_finished
from launch.tables import print_over
from parallel.checkpoints.files import step_of
from rollout.terminal_text import tandem_command
from trainer.file_system import write_whole
from trainer.tracking.console import duration
from trainer.tracking.metrics_file import rows_from_the_end

TANDEM = (sys.executable, "-m", "launch")
POLL_S = 0.5
LAST_LINES = 15
STOPPED = (os.EX_TEMPFAIL, 130)
"""Exit codes of a run that was asked to stop, or interrupted."""
FOLDER_LINE = re.compile(r"^run folder: (.+)$", re.MULTILINE)
"""The first output of ``tandem train``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One run of a sweep."""

    name: str
    config: RunConfig


@dataclass(frozen=True, slots=True)
class Ended:
    """How an unfinished run ended."""

    text: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Sweep:
    folder: Path
    """In launch.runs_dir, beside the folders of the runs."""

    @property
    def memory(self) -> Path:
        return self.folder / "sweep.json"

    def runs(self) -> dict[str, str]:
        """The name of the newest run folder of each run that was started. Raises ValueError if the file is damaged, or names a
        path elsewhere."""
        try:
            items = json.loads(text_of(self.memory))["runs"].items()
            runs = {str(name): str(folder) for name, folder in items}
            for name in [*runs, *runs.values()]:
                if name in ("", "..") or Path(name).name != name:
                    raise ValueError(f"{name!r} is no name in a folder")
            return runs
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            fix = "remove it to start every run from the beginning"
            raise ValueError(f"{self.memory} is not the memory of a sweep ({error!r}); {fix}") from error

    def run_folder(self, name: str) -> RunFolder | None:
        """The newest run folder of a run; None where there is none any more."""
        found = self.runs().get(name)
        folder = None if found is None else RunFolder(self.folder.parent / found)
        return folder if folder is not None and folder.config.is_file() else None

    def is_finished(self, cell: Cell) -> bool:
        folder = self.run_folder(cell.name)
        return folder is not None and is_finished(folder, cell.config)

    def state(self, cell: Cell) -> str:
        """What this call would do with the run, in words."""
        folder = self.run_folder(cell.name)
        if folder is None:
            return "begins"
        if self.is_finished(cell):
            return "is finished"
        newest = folder.newest_checkpoint()
        return "starts from the beginning" if newest is None else f"continues from step {step_of(newest)}"

    def changed(self, cell: Cell) -> list[str]:
        """The settings in which the run, as it was started, differs from the cell: ``seed: 1, now 2``. A finished run that was
        resumed for more steps still counts as the cell's."""
        from trainer.report.comparison import differing_settings

        folder = self.run_folder(cell.name)
        try:
            before = None if folder is None else load_config(folder.config)
        except ConfigError:
            return [f"{folder.config if folder else ''} is not a config of this version"]
        if not isinstance(before, RunConfig):
            return []
        if self.is_finished(cell) and before.steps > cell.config.steps:
            before = before.model_copy(update={"steps": cell.config.steps})
        rows = differing_settings([before, cell.config])
        return [f"{field}: {old}, now {new}" for field, (old, new) in rows]

    def run(
        self, cells: Sequence[Cell], *, jobs: int, keep_going: bool, devices: Sequence[str | None]
    ) -> list[Ended]:
        """Run the cells that are not finished, ``jobs`` at a time, with progress and time left. Returns those that did
        not finish; after the first of them the others are stopped, unless ``keep_going``.

        devices: the value of CUDA_VISIBLE_DEVICES of each run at a time; None: that of this process.
        Raises Interrupted on Ctrl-C or SIGTERM, after every run has stopped.
        """
        # A run that is asked to stop ends by itself within these limits.
        limits = [cell.config.launch for cell in cells]
        grace_s = max((s.stop_timeout_s + s.stop_grace_s + 2 * KILL_TIMEOUT_S for s in limits), default=0.0)
        self._wait_for_earlier(cells, grace_s)
        left = [cell for cell in cells if not self.is_finished(cell)]
        running: dict[Cell, int] = {}  # each with its place among the devices
        show = _Progress(self, left, len(cells))
        ended: list[Ended] = []
        try:
            with Supervisor(grace_s=grace_s) as supervisor, _interruption_told(running):
                while left or running:
                    while left and len(running) < jobs:
                        cell = left.pop(0)
                        running[cell] = place = min({*range(jobs)} - {*running.values()})
                        show.begins(cell, self._start(supervisor, cell, devices[place]))
                    ended += self._take_ended(supervisor, running, show)
                    if ended and not keep_going:
                        break
                    show.line([*running])
                    time.sleep(POLL_S)
        finally:
            # A signal may come before the first look at a log, or while a run that has no log yet is being started.
            # Report the error that ended the sweep, not a second one of the same full disk.
            with contextlib.suppress(OSError):
                for cell in running:
                    self._note_folder(cell, show)
        return ended

    def _wait_for_earlier(self, cells: Sequence[Cell], limit_s: float) -> None:
        """Wait for runs of a killed sweep that may still finish and save a step, to continue from it. Raises RoleFailed."""
        deadline = time.monotonic() + limit_s
        for cell in cells:
            told, folder = False, self.run_folder(cell.name)
            while folder is not None and (folder.holders() or living_roles(folder)):
                runs = f"still runs in {folder.path}"
                if not told:
                    print(f"waiting for the end of {cell.name}, which {runs}", flush=True)
                if time.monotonic() > deadline:
                    end = tandem_command("stop", folder.path)
                    raise RoleFailed(f"{cell.name} {runs}; end it by `{end}`")
                told = True
                time.sleep(POLL_S)

    def _take_ended(self, supervisor: Supervisor, running: dict[Cell, int], show: "_Progress") -> list[Ended]:
        """Remove ended runs from ``running``. Returns those of them that did not finish."""
        ended = []
        for cell in [*running]:
            is_running = supervisor.is_running(cell.name)
            self._note_folder(cell, show)  # after the look, so that the log of an ended run is whole
            if is_running:
                continue
            del running[cell]
            code = supervisor.exit_code(cell.name) or 0
            show.ends(cell, code)
            if code:
                ended.append(self._ended(supervisor, cell, code))
        return ended

    def _start(self, supervisor: Supervisor, cell: Cell, devices: str | None) -> int:
        """Start the run. Returns the size of its log before."""
        folder, file = self.run_folder(cell.name), self.folder / f"{cell.name}.yaml"
        write_whole(file, resolved_yaml(cell.config).encode())
        goes_on = folder is not None and folder.newest_checkpoint() is not None
        what = ["resume", str(folder.path)] if folder is not None and goes_on else ["train", str(file)]
        env = environment(cell.config) | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})
        log = self.folder / f"{cell.name}.log"
        size = log.stat().st_size if log.exists() else 0
        command = [*TANDEM, *what]
        supervisor.start(Role(name=cell.name, command=command, log=log, env=env))
        return size

    def _note_folder(self, cell: Cell, show: "_Progress") -> None:
        """Remember the run's folder, once its log names it."""
        if cell.name in show.folders or cell.name not in show.starts:
            return
        with (self.folder / f"{cell.name}.log").open(errors="replace") as log:
            log.seek(show.starts[cell.name])
            if (found := FOLDER_LINE.search(log.read())) is not None:
                folder = Path(found[1]).resolve()
                write_json(self.memory, {"runs": self.runs() | {cell.name: folder.name}}, flush=True)
                show.folders[cell.name] = folder  # last, since a signal may come while the memory is written

    def _ended(self, supervisor: Supervisor, cell: Cell, code: int) -> Ended:
        last = textwrap.indent(supervisor.last_lines(cell.name, LAST_LINES), "    ")
        log = f"its whole log: {self.folder / f'{cell.name}.log'}"
        how = "was stopped" if code in STOPPED else "failed"
        return Ended(f"{cell.name} {how} (exit code {code}):\n{last}\n{log}", how == "failed")


@contextlib.contextmanager
def _interruption_told(running: Mapping[Cell, int]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        names = ", ".join(cell.name for cell in running)
        how = "the step is finished or dropped, then a checkpoint is written; `tandem stop RUN --now` ends it at once"
        print(f"\nstopping {names}: {how}", flush=True)
        raise


class _Progress:
    """Prints a line when a run begins or ends and, on a terminal, a changing line in between with the time left: the
    remaining steps at the pace of this call, starts of engines included."""

    def __init__(self, sweep: Sweep, left: Sequence[Cell], count: int):
        self._sweep, self._cells, self._count = sweep, [*left], count
        self._number, self._began, self._began_cell = count - len(left), time.monotonic(), dict[str, float]()
        self._before = self._done()
        self.starts, self.folders = dict[str, int](), dict[str, Path]()

    def begins(self, cell: Cell, start: int) -> None:
        self._number += 1
        self.starts[cell.name], self._began_cell[cell.name] = start, time.monotonic()
        self._print(f"{self._number} of {self._count}: {cell.name} {self._sweep.state(cell)}")

    def ends(self, cell: Cell, code: int) -> None:
        how = {0: "finished", **dict.fromkeys(STOPPED, "stopped")}.get(code, f"failed, exit code {code}")
        took = duration(time.monotonic() - self._began_cell[cell.name])
        self._print(f"{cell.name}: {how} after {took}{self._time_left()}")

    def _print(self, text: str) -> None:
        if sys.stdout.isatty():
            print_over("")
        print(text, flush=True)

    def line(self, cells: Sequence[Cell]) -> None:
        if sys.stdout.isatty() and cells:
            steps = (f"{cell.name}: step {self._step(cell)} of {cell.config.steps}" for cell in cells)
            print_over(", ".join(steps), self._time_left())

    def _time_left(self) -> str:
        done, total = self._done(), sum(cell.config.steps for cell in self._cells)
        made = done - self._before
        if made <= 0 or done >= total:
            return ""
        return f"; about {duration((time.monotonic() - self._began) / made * (total - done))} left"

    def _done(self) -> int:
        return sum(map(self._step, self._cells))

    def _step(self, cell: Cell) -> int:
        """The newest step of the run's folder."""
        folder = self._sweep.run_folder(cell.name)
        metrics = None if folder is None else folder.metrics
        if metrics is None or not metrics.is_file():
            return 0
        return next((row["step"] for row in rows_from_the_end(metrics)), 0)
