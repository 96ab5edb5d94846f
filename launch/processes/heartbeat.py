"""Signs of life: every role reports its activity, and processes that are stopped (SIGSTOP) are found and
killed.

    role (serve, sample, each learner rank)          supervisor, and `tandem status`
    Pulse, a thread ── roles/NAME.beat, every 10 s ──> its activity and since when, whether its processes use the CPU
       └─ looks at its own children                  Watch, a thread: looks at the supervisor's processes, such as torchrun
    its guard, a process ── roles/NAME.stopped ──────> that the role itself was stopped
    (rollout/servers/session_guard.py)

A process is killed for its state, never only for time: the kernel must report it as stopped at every look of
``heartbeat_timeout_s``. Processes that wait for it then notice its death at once. A slow running process is only
reported, since a long transfer and a hanging one look alike. On several nodes, pulses and guards run on each; their
files come through the shared folder, up to a minute late.
"""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import psutil

from configs.reading.files import text_of
from launch.processes.run_folder import RunFolder, error_text, write_json
from rollout.guarded_process import start_of
from rollout.terminal_text import tandem_command
from trainer.file_system import SHARED_FOLDER_S

Content = TypeVar("Content")
Other = TypeVar("Other")
BEAT_S = 10.0
MISSED = 3
"""Times BEAT_S. After a longer gap between two looks the first does not count: this process was itself stopped, with the
others."""
BUSY = 0.2
"""Share of one core above which a process counts as busy; a poll or a beat takes less."""
UNUSUAL = 3.0
"""Times the longest duration so far: an activity that takes longer is reported."""
FIRST_TIME = 5.0
"""Times heartbeat_timeout_s: limit for an activity without an earlier duration."""
WAITING = ("serving", "waiting for the learner")
"""Activities without a limit."""
LINES = 3
"""Most lines of one look: if all ranks are slow, a few of them are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A role's report on itself."""

    who: str
    pid: int
    started: str | None
    """When the process started, in the kernel's ticks; with ``pid`` it identifies the process. A time of the day would change
    with each correction of the clock."""
    host: str
    doing: str
    since: float
    now: float
    """When the activity began, and when this was written: seconds by this role's own clock. The clocks of two hosts may
    differ by minutes."""
    cpu: float
    """Cores that its processes have used since its last beat."""
    ended: list[str] = field(default_factory=list)
    """A line for each of its processes that was stopped (SIGSTOP) and that it has therefore killed."""

    @property
    def lasts_s(self) -> float:
        return max(self.now - self.since, 0.0)

    def text(self) -> str:
        load = "busy" if self.cpu >= BUSY else "idle"
        return f"in `{self.doing}` for {self.lasts_s:.0f} s, its CPU is {load}"


def beat_file(folder: RunFolder, name: str) -> Path:
    return folder.roles / f"{name}.beat"


def stopped_note(folder: RunFolder, name: str) -> Path:
    """The file in which a role's guard notes that it killed the role because it was stopped."""
    return folder.roles / f"{name}.stopped"


def role_text(name: str) -> str:
    kind, _, number = name.partition("-")
    return f"learner rank {number}" if kind == "rank" else f"the {name} role"


def read_beats(folder: RunFolder) -> list[tuple[Beat, float]]:
    """Pairs (beat, time of its file), without beats that cannot be read."""
    beats = []
    for file in sorted(folder.roles.glob("*.beat")):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            beats.append((Beat(**json.loads(text_of(file))), file.stat().st_mtime))
    return beats


def living_roles(folder: RunFolder) -> list[Beat]:
    """The beats of roles that run on this machine. After a supervisor is killed, roles live on until the learner has finished
    and saved its step."""
    here = [beat for beat, _ in read_beats(folder) if beat.host == socket.gethostname()]
    ended = (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return [beat for beat in here if (process := _process_of(beat)) and _status(process) not in ended]


class StoppedProcesses:
    """Finds processes that stay stopped, by a look about every BEAT_S. A process that a debugger has stopped counts as
    running."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic):
        self._timeout_s, self._clock = timeout_s, clock
        self._since: dict[psutil.Process, float] = {}
        self._looked_at = -float("inf")

    def look(self, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
        """The processes that were stopped at every look for the timeout."""
        now = self._clock()
        if now - self._looked_at > MISSED * BEAT_S:
            self._since.clear()
        self._looked_at = now
        stopped = {process for process in processes if _status(process) == psutil.STATUS_STOPPED}
        self._since = {process: self._since.get(process, now) for process in stopped}
        return [process for process, since in self._since.items() if now - since >= self._timeout_s]

    def end(self, processes: Iterable[psutil.Process], who: Callable[[psutil.Process], str]) -> list[str]:
        """Kill the processes that ``look`` finds, and print and return a line for each."""
        lines = []
        for process in self.look(processes):
            line = f"{who(process)} (pid {process.pid}) had been stopped (SIGSTOP) for {self._timeout_s:.0f} s, and was killed"
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            print(f"tandem: {line}", file=sys.stderr, flush=True)
            lines.append(line)
        return lines


def _unless_gone(read: Callable[[], Content], otherwise: Other) -> Content | Other:
    """What a process tells about itself, or ``otherwise`` if it is gone."""
    try:
        return read()
    except psutil.NoSuchProcess:
        return otherwise


def _status(process: psutil.Process) -> str | None:
    return _unless_gone(process.status, None)


class _Looking:
    """A context manager in which a thread calls ``look``, at once and every ``BEAT_S`` seconds."""

    def __init__(self, name: str):
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(timeout=BEAT_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            # A full disk, or a process that has just ended: the next look tries again.
            with contextlib.suppress(OSError, psutil.Error):
                self.look()
            is_over = self._over.wait(BEAT_S)

    def look(self) -> None:
        raise NotImplementedError


class Pulse(_Looking):
    """Reports this role while entered, from a thread, since the role may wait in a collective."""

    def __init__(self, folder: RunFolder, name: str, *, timeout_s: float):
        super().__init__("pulse")
        self._file, self._who = beat_file(folder, name), role_text(name)
        self._stopped = StoppedProcesses(timeout_s)
        self._me = psutil.Process()
        self._started = start_of(self._me.pid)
        self._doing, self._since = "starting", time.monotonic()
        self._cpu, self._cpu_at = 0.0, time.monotonic()
        self._ended: list[str] = []

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if not self._ended:  # otherwise the file has the cause of the role's failure
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def doing(self, activity: str) -> None:
        self._doing, self._since = activity, time.monotonic()

    def look(self) -> None:
        children = self._me.children(recursive=True)
        self._ended += self._stopped.end(
            children, lambda child: f"a process of {self._who}, {_unless_gone(child.name, 'gone by now')}"
        )
        times = [_unless_gone(process.cpu_times, (0.0, 0.0)) for process in (self._me, *children)]
        used, now = sum(user + system for user, system, *_ in times), time.monotonic()
        # The sum shrinks when a child ends.
        share = max(used - self._cpu, 0.0) / max(now - self._cpu_at, 0.001)
        self._cpu, self._cpu_at = used, now
        beat = Beat(
            who=self._who, pid=self._me.pid, started=self._started, host=socket.gethostname(), doing=self._doing,
            since=self._since, now=now, cpu=round(share, 3), ended=self._ended,
        )  # fmt: skip
        write_json(self._file, asdict(beat))


class Watch(_Looking):
    """While entered, watches the roles' beats and the supervisor's own processes.

    started: gives the supervisor's own processes at this moment, with their names.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        timeout_s: float,
        started: Callable[[], Mapping[psutil.Process, str]] = dict,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ):
        super().__init__("watch")
        self._folder, self._timeout_s, self._started, self._say = folder, timeout_s, started, say
        self._stopped = StoppedProcesses(timeout_s)
        self._ended: list[str] = []
        self._longest: dict[tuple[str, str], float] = {}
        self._last: dict[str, Beat] = {}
        self._reported: set[tuple[str, str, float]] = set()
        self._changed: dict[str, tuple[float, float]] = {}

    def ended(self) -> list[str]:
        """A line for each process that was stopped and has been killed, by this watch, a role or a guard. These
        are the causes of later failures."""
        notes = sorted(self._folder.roles.glob("*.stopped"))
        guard_lines = [f"{role_text(note.stem)} {error_text(note)}" for note in notes]
        role_lines = [line for beat, _ in read_beats(self._folder) for line in beat.ended]
        return [*self._ended, *guard_lines, *role_lines]

    def look(self) -> None:
        beats = read_beats(self._folder)
        names = self._started()
        self._ended += self._stopped.end(names, names.__getitem__)
        reports = ((self._slow(beat), self._silent(beat, written)) for beat, written in beats)
        texts = [text for pair in reports for text in pair if text is not None]
        for text in texts[:LINES]:
            self._say(f"slow: {text}")
        if len(texts) > LINES:
            all_of_them = tandem_command("status", self._folder.path)
            self._say(f"slow: … and {len(texts) - LINES} more; `{all_of_them}` shows all")

    def _slow(self, beat: Beat) -> str | None:
        """A report on an activity that takes much longer than ever before. Each is reported once."""
        last = self._last.get(beat.who)
        if last is not None and (last.doing, last.since) != (beat.doing, beat.since):
            activity = (last.who, last.doing)
            self._longest[activity] = max(self._longest.get(activity, 0.0), beat.since - last.since)
        self._last[beat.who] = beat
        longest = self._longest.get((beat.who, beat.doing))
        limit = FIRST_TIME * self._timeout_s if longest is None else max(UNUSUAL * longest, self._timeout_s)
        if beat.doing in WAITING or beat.lasts_s <= limit:
            return None
        if not self._is_new((beat.who, beat.doing, beat.since)):
            return None
        before = "" if longest is None else f" (the longest so far took {longest:.0f} s)"
        return f"{beat.who} has been {beat.text()}{before}"

    def _silent(self, beat: Beat, written: float) -> str | None:
        """A report on a role whose beats stopped coming, only by this host's clock. Each is reported once."""
        now = time.monotonic()
        seen, since = self._changed.get(beat.who, (None, now))
        self._changed[beat.who] = (written, since if seen == written else now)
        is_here = beat.host == socket.gethostname()
        silent_s = now - self._changed[beat.who][1]
        late = silent_s >= self._timeout_s + (0.0 if is_here else SHARED_FOLDER_S)
        if not late or not self._is_new((beat.who, "silent", written)):
            return None
        process = _process_of(beat) if is_here else None
        state = f"its process is {_status(process)}" if process is not None else "its process is gone"
        cause = state if is_here else "its node is down, or cut off from the shared folder"
        who = f"{beat.who} (pid {beat.pid} on {beat.host})"
        return f"{who} has given no sign of life for {silent_s:.0f} s; {cause}"

    def _is_new(self, report: tuple[str, str, float]) -> bool:
        is_new = report not in self._reported
        self._reported.add(report)
        return is_new


def _process_of(beat: Beat) -> psutil.Process | None:
    """The process of a beat of this host. None if it is gone, even if another process has its number now."""
    try:
        return psutil.Process(beat.pid) if start_of(beat.pid) == beat.started else None
    except psutil.NoSuchProcess:
        return None
