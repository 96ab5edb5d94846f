"""Signs of life: every role says what it is doing, and processes that are stopped (SIGSTOP) are found and
ended.

    role (serve, sample, each learner rank)          supervisor, and `tandem status`
    Pulse, a thread ── roles/NAME.beat, every 10 s ──> what it is doing and since when, whether its processes use the CPU
       └─ looks at its own children                  Watch, a thread: looks at what the supervisor has started, such as torchrun
    its guard, a process ── roles/NAME.stopped ──────> that the role itself was stopped
    (rollout/servers/session_guard.py)

What ends a process is its state, never time alone: one that the kernel has stopped in ``heartbeat_timeout_s``
of looks in a row is killed. From then on it is a death like any other, which whoever waits for it sees at
once. A process that runs is only told of, however slow it is: nobody can tell a long transfer from one that
hangs. On several nodes pulses and guards look on each; what they say comes through the shared folder, maybe a
minute late.
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

import psutil

from launch.processes.run_folder import RunFolder, write_json

BEAT_S = 10.0
MISSED = 3
"""Times BEAT_S between two looks after which nothing is concluded from the first: this process was stopped
itself, with the others."""
BUSY = 0.2
"""Share of one core that counts as work; a poll or a beat takes less."""
UNUSUAL = 3.0
"""Times the longest so far: how long a part of a step may take before it is told of."""
FIRST_TIME = 5.0
"""Times heartbeat_timeout_s, for a part that there is nothing to compare with."""
WAITING = ("serving", "waiting for the learner")
"""What takes as long as it takes."""
LINES = 3
"""Of one look: where all ranks are slow, one of them says enough."""
SHARED_FOLDER_S = 60.0
"""For a file of another node to be seen: clients of NFS may show an old one for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a role says of itself."""

    who: str
    pid: int
    started: float
    """Of the process, as the kernel has it: with ``pid`` it is no other's."""
    host: str
    doing: str
    since: float
    """Seconds since the epoch, as its host has them."""
    cpu: float
    """Cores that its processes have used since its last beat."""
    ended: list[str] = field(default_factory=list)
    """Processes of its own that were stopped and that it has ended."""

    def words(self, now: float) -> str:
        return f"in `{self.doing}` for {max(now - self.since, 0):.0f} s, its CPU is {'busy' if self.cpu >= BUSY else 'idle'}"


def beat_file(folder: RunFolder, name: str) -> Path:
    return folder.path / "roles" / f"{name}.beat"


def stopped_note(folder: RunFolder, name: str) -> Path:
    """Where a role's guard says that the role was stopped, and is ended."""
    return folder.path / "roles" / f"{name}.stopped"


def in_words(name: str) -> str:
    kind, _, number = name.partition("-")
    return f"learner rank {number}" if kind == "rank" else f"the {name} role"


def read_beats(folder: RunFolder) -> list[tuple[Beat, float]]:
    """All beats, each with the time of its file; one that cannot be read is left out."""
    found = []
    for file in sorted((folder.path / "roles").glob("*.beat")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append((Beat(**json.loads(file.read_text())), file.stat().st_mtime))
    return found


class StoppedProcesses:
    """Finds processes that stay stopped, looked at every BEAT_S or so. A debugger's stop is another state,
    and counts as running."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic):
        self._timeout_s, self._clock = timeout_s, clock
        self._since: dict[psutil.Process, float] = {}
        self._looked_at = -float("inf")

    def look(self, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
        """Those that have been stopped for the timeout, at every look."""
        now = self._clock()
        if now - self._looked_at > MISSED * BEAT_S:
            self._since.clear()
        self._looked_at = now
        stopped = {process for process in processes if _status(process) == psutil.STATUS_STOPPED}
        self._since = {process: self._since.get(process, now) for process in stopped}
        return [process for process, since in self._since.items() if now - since >= self._timeout_s]

    def end(self, processes: Iterable[psutil.Process], who: Callable[[psutil.Process], str]) -> list[str]:
        """Kill what ``look`` finds, and say so: a line for each."""
        said = []
        for process in self.look(processes):
            line = f"{who(process)} (pid {process.pid}) had been stopped (SIGSTOP) for {self._timeout_s:.0f} s, and was killed"
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            print(f"tandem: {line}", file=sys.stderr, flush=True)
            said.append(line)
        return said


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "gone by now"


class Pulse:
    """A role's own sign of life, while inside. A thread of its own: it goes on while the role waits in a
    collective."""

    def __init__(self, folder: RunFolder, name: str, *, timeout_s: float):
        self._file, self._who = beat_file(folder, name), in_words(name)
        self._stopped = StoppedProcesses(timeout_s)
        self._me = psutil.Process()
        self._doing, self._since = "starting", time.time()
        self._cpu, self._cpu_at = 0.0, time.monotonic()
        self._ended: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> "Pulse":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(timeout=BEAT_S)
        if not self._ended:  # else it says why this role fails
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    def doing(self, what: str) -> None:
        self._doing, self._since = what, time.time()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(
                OSError, psutil.Error
            ):  # a full disk, or a child that has just ended: the next beat will tell
                self.beat()
            if self._over.wait(BEAT_S):
                return

    def beat(self) -> None:
        children = self._me.children(recursive=True)
        self._ended += self._stopped.end(
            children, lambda process: f"a process of {self._who}, {_name(process)}"
        )
        used, now = sum(map(_cpu_seconds, [self._me, *children])), time.monotonic()
        share = max(used - self._cpu, 0.0) / max(
            now - self._cpu_at, 0.001
        )  # less than before: a child has ended
        self._cpu, self._cpu_at = used, now
        beat = Beat(
            who=self._who, pid=self._me.pid, started=self._me.create_time(), host=socket.gethostname(), doing=self._doing,
            since=self._since, cpu=round(share, 3), ended=self._ended,
        )  # fmt: skip
        write_json(self._file, asdict(beat))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


class Watch:
    """The supervisor's eye on the roles' beats, and on the processes that it has started. A context manager.

    Args:
        started: the supervisor's own processes at this moment, each with its name.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        timeout_s: float,
        started: Callable[[], Mapping[psutil.Process, str]] = dict,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ):
        self._folder, self._timeout_s, self._started, self._say = folder, timeout_s, started, say
        self._stopped = StoppedProcesses(timeout_s)
        self._ended: list[str] = []
        self._longest: dict[tuple[str, str], float] = {}
        self._last: dict[str, Beat] = {}
        self._told: set[tuple[str, str, float]] = set()
        self._changed: dict[str, tuple[float, float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(timeout=BEAT_S)

    def ended(self) -> list[str]:
        """What was stopped and has been killed, by whomever: the cause of whatever fails after it."""
        notes = sorted((self._folder.path / "roles").glob("*.stopped"))
        of_guards = [f"{in_words(note.stem)} {note.read_text()}" for note in notes]
        return [
            *self._ended,
            *of_guards,
            *(line for beat, _ in read_beats(self._folder) for line in beat.ended),
        ]

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            with contextlib.suppress(OSError, psutil.Error):
                self.look()

    def look(self) -> None:
        beats = read_beats(self._folder)
        names = self._started()
        self._ended += self._stopped.end(names, names.__getitem__)
        texts = [
            text
            for beat, written in beats
            for text in (self._slow(beat), self._silent(beat, written))
            if text
        ]
        for text in texts[:LINES]:
            self._say(f"slow: {text}")
        if len(texts) > LINES:
            self._say(f"slow: … and {len(texts) - LINES} more; `tandem status {self._folder.path}` tells all")

    def _slow(self, beat: Beat) -> str | None:
        """Of a part that takes much longer than it ever did; once."""
        last, now = self._last.get(beat.who), time.time()
        if last is not None and (last.doing, last.since) != (beat.doing, beat.since):
            part = (last.who, last.doing)
            self._longest[part] = max(self._longest.get(part, 0.0), beat.since - last.since)
        self._last[beat.who] = beat
        longest = self._longest.get((beat.who, beat.doing))
        usual = FIRST_TIME * self._timeout_s if longest is None else max(UNUSUAL * longest, self._timeout_s)
        if (
            now - beat.since <= usual
            or beat.doing in WAITING
            or not self._is_new((beat.who, beat.doing, beat.since))
        ):
            return None
        return f"{beat.who} has been {beat.words(now)}" + (
            "" if longest is None else f" (the longest so far took {longest:.0f} s)"
        )

    def _silent(self, beat: Beat, written: float) -> str | None:
        """Of a role whose beats do not come, by this host's clock alone; once."""
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
        what = state if is_here else "its node is down, or cut off from the shared folder"
        return (
            f"{beat.who} (pid {beat.pid} on {beat.host}) has not been heard of for {silent_s:.0f} s; {what}"
        )

    def _is_new(self, what: tuple[str, str, float]) -> bool:
        is_new = what not in self._told
        self._told.add(what)
        return is_new


def _process_of(beat: Beat) -> psutil.Process | None:
    """Where it is of this host and there is still that process; its number may be another's by now."""
    if beat.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(beat.pid)
        return process if abs(process.create_time() - beat.started) < 1.0 else None
    except psutil.NoSuchProcess:
        return None
