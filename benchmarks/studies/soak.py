"""One long run under random faults: every step once, the ledger balanced, no process left, and how long each kind of
fault takes to recover from.

    python benchmarks/studies/soak.py --model runs/quickstart-*/warm --folder soak --faults 200 [--seed 0]

The run has two servers, two learner ranks, a step of lag and a checkpoint every other step. A fault comes at a random
moment; the next one comes after the run has recovered: new steps are recorded, and both servers have the newest
weights. Faults that end the run are followed by ``tandem resume``. The kinds and their order depend on ``--seed`` alone; the
moments at which they meet the run do not. ``--undisturbed`` makes as many steps without faults afterwards, whose
accuracy is compared. Ctrl-C stops the soak, and the same command continues it. With fewer ``--faults`` the command ends it.

``full disk`` needs its own file system. If this process may mount one (root), the run is on a tmpfs, which stays there until
it is unmounted. Otherwise this kind is left out, with a message.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, table_head  # noqa: E402
from trainer.tracking.console import duration  # noqa: E402
from trainer.tracking.ledger import read_ledger, summary  # noqa: E402

RECIPE = ROOT / "configs/recipes/countdown_tiny.yaml"
SETTINGS = (
    "rollout.replicas=2", "rollout.max_staleness=1", "rollout.prompts_per_step=8", "rollout.group_size=4",
    "rollout.max_server_restarts=100000", "rollout.max_sampler_restarts=100000", "learner.optimizer.lr=5e-5",
    "evaluation.every=0", "checkpoint.every=2", "checkpoint.keep=3", "launch.heartbeat_timeout_s=5",
    "launch.stop_grace_s=5",
)  # fmt: skip
RECOVERY_S = 300.0
"""Deadline of every wait."""
NEW_STEPS = 2
"""Steps that a run records before it counts as recovered."""
QUIET_S = 3 * 3600.0
MOST_MEANWHILE = 10
"""Steps that a run may record while its files are read."""
GAP = 1e-4
"""Nats by which learner and servers may differ on a token of lag 0 (float32 on both sides)."""
DISK = "4g"


class SoakError(Exception):
    """The run did not do what it should."""


class LongRun:
    """A run that may be stopped, killed and resumed. One file has the console of all attempts."""

    def __init__(self, folder: Path, settings: Sequence[str]):
        self.folder, self._settings = folder, list(settings)
        self.console = folder / "console.txt"
        self._process: subprocess.Popen | None = None

    @property
    def path(self) -> Path:
        return self.folder / "runs/latest"

    def start(self, *settings: str) -> None:
        arguments = ["train", str(RECIPE), *self._settings]
        if self.path.exists():
            arguments = ["resume", str(self.path.resolve())]
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        code = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", code, sys.executable, "-m", "launch", *arguments, *settings]
        with self.console.open("ab") as console:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip

    @property
    def supervisor(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def wait_for_end(self, within_s: float = RECOVERY_S) -> int:
        """The exit code. Raises SoakError if a process is left."""
        assert self._process is not None
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise SoakError(f"the run did not end in {within_s:.0f} s") from None
        deadline = time.monotonic() + 30
        while left := list(self.processes()):
            if time.monotonic() > deadline:
                raise SoakError(f"left after the end: {[process.cmdline() for process in left]}")
            time.sleep(0.1)
        return code

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self) -> Iterator[psutil.Process]:
        """All processes that work in this folder or for a run in it, except this process and its ancestors."""
        ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                is_ours = str(self.folder) in " ".join([*process.cmdline(), process.cwd()])
                if is_ours and process.pid not in ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def processes_with(self, *words: str, without: str = "\0") -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                line = " ".join(process.cmdline())
                if all(word in line for word in words) and without not in line:
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def steps(self) -> list[dict]:
        """The recorded steps, without a line that is being written."""
        try:
            text = (self.path / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        rows = map(json.loads, text[: text.rfind("\n") + 1].splitlines())
        return [row for row in rows if row["step"] > 0]

    def learner(self) -> int | None:
        """Process id of the first learner rank, once it trains: from then on no steps of an earlier attempt are recorded."""
        try:
            return json.loads((self.path / "roles/learn.json").read_text())["pid"]
        except FileNotFoundError:
            return None

    def last_step(self) -> int:
        steps = self.steps()
        return steps[-1]["step"] if steps else 0

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + RECOVERY_S
        while not condition():
            if self._process.poll() is not None:
                raise SoakError(f"the run ended with {self._process.returncode} while it should have {what}")
            if time.monotonic() > deadline:
                raise SoakError(f"the run has not {what} in {RECOVERY_S:.0f} s")
            time.sleep(0.1)

    def check(self, *, has_ended: bool = False) -> None:
        """Raise SoakError for a step or a group that is missing or there twice, a token that is too old, or
        servers that sample from other weights than the learner's."""
        lines = [*read_ledger(self.path / "ledger.jsonl")]  # before the metrics, because the run continues
        steps = self.steps()
        for number, row in enumerate(steps, start=1):
            version = row.get("sync/version", number)  # the last step of an attempt may end before its update
            if not row["step"] == version == number:
                raise SoakError(f"line {number} is of step {row['step']}, version {version}")
            if row["staleness/max"] > 1:
                raise SoakError(f"step {number} has a token of lag {row['staleness/max']}")
            gap = row.get("staleness/by_lag/le_0/logprob_gap_max") or 0.0
            if not gap <= GAP:
                raise SoakError(f"step {number}: a token of lag 0 differs by {gap:g} nats")
        if (told := summary(lines)).startswith("NOT BALANCED"):
            raise SoakError(f"the ledger is {told}")
        # A step is recorded in the metrics, then in the ledger. A fault may fall in between.
        lacking = len(steps) - len(lines)
        if not (lines and lines[0].first == 0 and 0 <= lacking <= (1 if has_ended else MOST_MEANWHILE)):
            raise SoakError(f"the ledger has {len(lines)} steps, the metrics {len(steps)}")


# ---------------------------------------------------------------------------------------------------------------
# faults

Draw = random.Random


def _server_killed(run: LongRun, draw: Draw) -> None:
    draw.choice(_servers(run)).kill()


def _server_stopped(run: LongRun, draw: Draw) -> None:
    draw.choice(_servers(run)).suspend()


def _servers_killed(run: LongRun, draw: Draw) -> None:
    for process in _servers(run):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _transfer_broken(run: LongRun, draw: Draw) -> None:
    """Stop a server for a while, so that updates wait for it, and then kill it."""
    victim = draw.choice(_servers(run))
    victim.suspend()
    time.sleep(draw.uniform(1.0, 3.0))
    victim.kill()


def _sampler_killed(run: LongRun, draw: Draw) -> None:
    draw.choice(run.processes_with("launch sample")).kill()


def _sampler_stopped(run: LongRun, draw: Draw) -> None:
    draw.choice(run.processes_with("launch sample")).suspend()


def _sigterm(run: LongRun, draw: Draw) -> None:
    run.supervisor.terminate()


def _sigterm_twice(run: LongRun, draw: Draw) -> None:
    run.supervisor.terminate()
    time.sleep(draw.uniform(0.0, 0.5))
    with contextlib.suppress(psutil.NoSuchProcess):
        run.supervisor.terminate()


def _supervisor_killed(run: LongRun, draw: Draw) -> None:
    run.supervisor.kill()


def _rank_killed(run: LongRun, draw: Draw) -> None:
    draw.choice(run.processes_with("launch learn", without="launch.roles.rendezvous")).kill()


def _torchrun_killed(run: LongRun, draw: Draw) -> None:
    draw.choice(run.processes_with("launch.roles.rendezvous")).kill()


def _serve_role_killed(run: LongRun, draw: Draw) -> None:
    draw.choice(run.processes_with("launch serve")).kill()


def _checkpoint_truncated(run: LongRun, draw: Draw) -> None:
    run.supervisor.kill()
    run.wait_for_end()
    whole = [path.parent for path in sorted(run.path.glob("checkpoints/step_*/complete.json"))]
    if len(whole) > 1:  # a single one is all that the run has
        files = sorted(path for path in whole[-1].rglob("*") if path.is_file() and path.stat().st_size)
        victim = draw.choice(files)
        os.truncate(victim, draw.randrange(victim.stat().st_size))


def _disk_filled(run: LongRun, draw: Draw) -> None:
    filler = run.folder / "runs/filler"
    try:
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**20))
                file.flush()
        run.wait_for_end()
    finally:
        filler.unlink(missing_ok=True)


def _servers(run: LongRun) -> list[psutil.Process]:
    """Every process of every server: watchdog, HTTP, scheduler, detokenizer."""
    return run.processes_with("tandem_launch_server")


@dataclass(frozen=True)
class Kind:
    inject: Callable[[LongRun, Draw], None]
    ends: bool = False
    """Whether the fault ends the run, which is then resumed."""


KINDS = {
    "server killed": Kind(_server_killed),
    "server stopped": Kind(_server_stopped),
    "both servers killed": Kind(_servers_killed),
    "transfer broken": Kind(_transfer_broken),
    "sample role killed": Kind(_sampler_killed),
    "sample role stopped": Kind(_sampler_stopped),
    "SIGTERM": Kind(_sigterm, ends=True),
    "SIGTERM twice": Kind(_sigterm_twice, ends=True),
    "supervisor killed": Kind(_supervisor_killed, ends=True),
    "learner rank killed": Kind(_rank_killed, ends=True),
    "torchrun killed": Kind(_torchrun_killed, ends=True),
    "serve role killed": Kind(_serve_role_killed, ends=True),
    "checkpoint truncated": Kind(_checkpoint_truncated, ends=True),
    "full disk": Kind(_disk_filled, ends=True),
}


@dataclass(frozen=True)
class Recovery:
    kind: str
    at_step: int
    first_step_s: float
    """Seconds from the fault to the next recorded step, which some faults do not delay."""
    recovered_s: float
    """Seconds to the second new step by which both servers have the newest weights."""
    lost_steps: int
    """Recorded steps that had to run again."""


def soak(run: LongRun, kinds: Sequence[str], draw: Draw, tell: Callable[[Recovery], None]) -> None:
    """Start the run or continue it, and let faults of these kinds happen to it, one after another. Raises
    SoakError."""
    begin(run, after=run.learner())
    wait_for_recovery(run, run.last_step())
    for kind in kinds:
        time.sleep(draw.uniform(0.0, 2.0))
        before, began = run.last_step(), time.monotonic()
        learner = run.learner()
        KINDS[kind].inject(run, draw)
        if KINDS[kind].ends:
            run.wait_for_end()
            begin(run, after=learner)
        kept = run.last_step()
        reached = wait_for_recovery(run, kept)
        took = time.monotonic() - began
        run.check()
        tell(Recovery(kind, before, reached - began, took, max(0, before - kept)))


def begin(run: LongRun, *, after: int | None) -> None:
    """Start the run, or resume it, and wait until it has a learner other than ``after``."""
    run.start()
    run.wait_until(lambda: run.learner() not in (None, after), "begun again")


def wait_for_recovery(run: LongRun, kept: int) -> float:
    """Wait until ``NEW_STEPS`` steps after step ``kept`` are recorded and both servers have the last one. Returns the time
    of the first of them."""
    run.wait_until(lambda: run.last_step() > kept, f"recorded a step after step {kept}")
    first = time.monotonic()

    def is_well() -> bool:
        steps = run.steps()
        return len(steps) >= kept + NEW_STEPS and steps[-1].get("sync/servers") == 2

    run.wait_until(is_well, "got both servers back")
    return first


# ---------------------------------------------------------------------------------------------------------------
# the command


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, required=True, help="the quickstart's warm model")
    options.add_argument("--folder", type=Path, required=True, help="an empty folder, or a new one")
    options.add_argument("--faults", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], metavar="KIND")
    options.add_argument("--undisturbed", action="store_true", help="also run as many steps without faults")
    given = options.parse_args()
    folder, draw = given.folder.resolve(), random.Random(given.seed)
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in given.kinds if kind != "full disk" or _mount(folder / "runs")]
    settings = [
        *SETTINGS,
        f"model.path={given.model.resolve()}",
        f"seed={given.seed}",
        "evaluation.at_ends=true",
    ]
    announce(settings=settings, faults=given.faults, kinds=kinds)
    run = LongRun(folder, [*settings, "steps=1000000"])
    log = folder / "recoveries.jsonl"
    recoveries = (
        [Recovery(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
    )
    earlier, began = len(recoveries), time.monotonic()

    def tell(recovery: Recovery) -> None:
        recoveries.append(recovery)
        done = len(recoveries) - earlier
        left = (time.monotonic() - began) / done * (given.faults - len(recoveries))
        print(
            f"{len(recoveries)} of {given.faults}: {recovery.kind} at step {recovery.at_step}, recovered in {recovery.recovered_s:.1f} s; "
            f"about {duration(left)} left",
            flush=True,
        )
        with log.open("a") as file:
            file.write(f"{json.dumps(asdict(recovery))}\n")

    # Each kind as often as any other, in random order.
    drawn = (kinds * -(-given.faults // len(kinds)))[: given.faults]
    draw.shuffle(drawn)
    try:
        soak(run, drawn[earlier:], draw, tell)
        _sigterm(run, draw)
        run.wait_for_end()
        last = run.last_step() + 1
        run.start(f"steps={last}")
        if (code := run.wait_for_end()) != 0:
            raise SoakError(f"the last steps ended with exit code {code}")
        run.check(has_ended=True)
    except SoakError as error:
        print(
            f"FAILED after {len(recoveries)} faults: {error}\n{run.console.read_text()[-3000:]}", flush=True
        )
        raise SystemExit(1) from error
    finally:
        run.kill()
    print(table(recoveries))
    took = f"{len(recoveries) - earlier} of them now, in {duration(time.monotonic() - began)}"
    print(f"{last} steps, each once; {len(recoveries)} faults, {took}")
    print(f"held-out accuracy after them: {_accuracy(run):.1%}")
    if given.undisturbed:
        quiet = LongRun(folder / "undisturbed", [*settings, f"steps={last}"])
        quiet.folder.mkdir()
        quiet.start()
        quiet.wait_for_end(QUIET_S)
        print(f"of a run without faults: {_accuracy(quiet):.1%}")


def _mount(folder: Path) -> bool:
    """Whether ``folder`` now has its own file system."""
    folder.mkdir(exist_ok=True)
    if folder.is_mount():
        return True
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    is_mounted = shutil.which("mount") is not None and not subprocess.run(command, check=False).returncode
    if not is_mounted:
        print("full disk: left out, because this process may not mount a file system", flush=True)
    return is_mounted


def _accuracy(run: LongRun) -> float:
    return [row["eval/accuracy"] for row in run.steps() if row.get("eval/accuracy") is not None][-1]


def table(recoveries: Sequence[Recovery]) -> str:
    titles = ["fault", "times", "first step after it, s", "recovered, s", "most", "steps done again"]
    lines = [table_head(titles)]
    for kind in KINDS:
        of_kind = [recovery for recovery in recoveries if recovery.kind == kind]
        if of_kind:
            first = statistics.median(recovery.first_step_s for recovery in of_kind)
            took = [recovery.recovered_s for recovery in of_kind]
            lost = statistics.fmean(recovery.lost_steps for recovery in of_kind)
            lines.append(
                f"| {kind} | {len(of_kind)} | {first:.1f} | {statistics.median(took):.1f} | {max(took):.1f} | {lost:.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
