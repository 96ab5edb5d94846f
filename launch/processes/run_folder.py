"""The folder of a run: who writes what where. Everything a run leaves behind is inside it.

config.yaml        the resolved config, which every role reads       metrics.jsonl, console.log   one line per step
logs/ROLE.log      all that a role and its engine print              mlflow.db, mlartifacts/      of all runs, beside the run folders;
                                                                     inside on file systems of a network; none
                                                                     with a tracking URI
roles/ROLE.json    a role's address, once it is ready                checkpoints/step_000010/     resumable
                   (serve-0, serve-1, ... where servers are on several nodes)
roles/NAME.beat    what a role or a learner rank is doing, while it lives; NAME.stopped: it was stopped (launch/processes/heartbeat.py)
job.json           the Slurm job that runs it, or ran it last         restarts.json, train.sbatch   of Slurm, too
hf/                the trained model, Hugging Face format            report.html, figures/, summary.json
export/            a checkpoint's weights, in the same format        mlflow_run_id                 which a resumed run goes on with
key.yaml           the key of the run, for its owner's eyes: servers and sampler refuse whoever does not know it
batches/           recorded steps, for `tandem replay`               replay/                       what it asks and finds
request.json       what to do, of `tandem eval`, `mismatch`, ...     metrics.lost.jsonl            of an attempt without a checkpoint
"""

import contextlib
import errno
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TextIO

from configs.errors import ConfigError
from parallel.checkpoints.files import is_valid, latest_valid, missing, step_folders, step_of
from rollout.run_key import RunKey, run_key

WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What flock says where a file system, or its server, has none."""


KEY = "key.yaml"


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    _held: list = field(default_factory=list, compare=False, repr=False)
    """Open files whose lock this process holds."""

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def critic_checkpoints(self) -> Path:
        return self.checkpoints / "critic"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def job(self) -> Path:
        """Of the Slurm job that runs it, or ran it last: {job_id, nodes, restart}."""
        return self.path / "job.json"

    @property
    def restarts(self) -> Path:
        """Failed starts without a newer checkpoint in between."""
        return self.path / "restarts.json"

    def run_key(self) -> RunKey:
        """What whoever talks to this run's servers and sampler has to prove; made by the first who asks. See
        ``rollout.run_key``."""
        return run_key(self.path / KEY)

    def address(self, role: str) -> Path:
        return self.path / "roles" / f"{role}.json"

    def error(self, role: str) -> Path:
        return self.path / "roles" / f"{role}.error"

    def report_error(self, role: str, error: BaseException) -> None:
        """What ended ``role``, for the supervisor to show. The first of several ranks has the cause; the
        others lost a peer.

        Best effort: on a full disk the log has to do.
        """
        with contextlib.suppress(OSError):
            self.error(role).parent.mkdir(exist_ok=True)
            with self.error(role).open("x") as file:
                file.write(f"{type(error).__name__}: {error}")

    def forget(self, role: str) -> None:
        """For a role to call as it starts: nobody may talk to the servers of its last life, nor read its last
        error."""
        self.address(role).unlink(missing_ok=True)
        self.error(role).unlink(missing_ok=True)

    def withdraw(self, role: str) -> None:
        """For a role to call as it ends: nobody is to look for it any more."""
        self.address(role).unlink(missing_ok=True)

    def newest_checkpoint(self) -> Path | None:
        """The newest whose files are all there in full, as its manifest lists them."""
        return latest_valid(self.checkpoints)

    def why_no_checkpoint(self) -> str:
        """What is wrong with the newest one, where none is there in full; "" where there is nothing."""
        folders = [*step_folders(self.checkpoints).values()]
        return f" ({folders[-1].name}: {missing(folders[-1])})" if folders else ""

    def has_critic_checkpoint(self) -> bool:
        """Whether the newest checkpoint has a critic's beside it."""
        newest = self.newest_checkpoint()
        return newest is not None and is_valid(self.critic_checkpoints / newest.name)

    def has_final_model(self) -> bool:
        """Whether ``hf/`` is of the newest step: a run that was resumed and stopped has checkpoints that are
        newer."""
        newest = self.newest_checkpoint()
        if not self.hf.is_dir() or not self.summary.is_file():
            return False
        return newest is None or step_of(newest) <= json.loads(self.summary.read_text())["steps"]

    def claim(self) -> None:
        """Make this process the one that runs the folder; the lock goes with the process.

        Where an earlier attempt ended before its first checkpoint, the run begins anew, and what that attempt
        logged is put aside.

        Raises:
            BlockingIOError: another process is running it.
            ValueError: its file system knows no locks.
        """
        (self.path / "roles").mkdir(parents=True, exist_ok=True)
        self._held.append(locked(self.path / "roles" / "lock"))
        for file in (self.path / "roles").glob("*.*"):
            file.unlink()
        (self.path / KEY).unlink(
            missing_ok=True
        )  # each start has its own: a log shown to others tells nothing of the next
        if not step_folders(
            self.checkpoints
        ):  # where all are damaged, the learner says so, and nothing begins anew
            self.put_metrics_aside()

    def put_metrics_aside(self) -> None:
        """Of an attempt that ended before its first checkpoint."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            metrics.replace(self.path / "metrics.lost.jsonl")

    def release(self) -> Path:
        """Let another process claim the folder; returns its path."""
        while self._held:
            self._held.pop().close()
        return self.path

    def announce(self, role: str, address: dict) -> None:
        """Tell the other roles where ``role`` listens; the file appears whole or not at all."""
        write_json(self.address(role), address)

    def read_address(self, role: str) -> dict | None:
        try:
            return json.loads(self.address(role).read_text())
        except FileNotFoundError:
            return None

    def wait_for_address(
        self, role: str, *, timeout_s: float, alive: Callable[[], None] = lambda: None
    ) -> dict:
        deadline = time.monotonic() + timeout_s
        while (address := self.read_address(role)) is None:
            alive()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the {role} role did not report its address in {self.path} within {timeout_s:.0f} s"
                )
            time.sleep(0.1)
        return address


def read_servers(folder: RunFolder, names: Sequence[str]) -> list[str] | None:
    """The addresses of all replicas, in order, as the serve roles of those names report them; None until all
    have."""
    reported = [folder.read_address(name) for name in names]
    found = [address for address in reported if address is not None]
    return [url for address in found for url in address["urls"]] if len(found) == len(names) else None


def wait_for_servers(
    folder: RunFolder, names: Sequence[str], *, timeout_s: float, alive: Callable[[], None] = lambda: None
) -> list[str]:
    """``read_servers`` once all of them are there; ``alive`` is called again and again until then, and ends
    the wait by raising.

    Raises:
        TimeoutError: it names the roles that are missing, with what they left behind.
    """
    deadline = time.monotonic() + timeout_s
    while (urls := read_servers(folder, names)) is None:
        alive()
        if time.monotonic() > deadline:
            missing = [_trace(folder, name) for name in names if folder.read_address(name) is None]
            raise TimeoutError(
                f"{len(missing)} of {len(names)} serve roles did not report servers in {folder.path} within {timeout_s:.0f} s; "
                "raise launch.start_timeout_s if they only need longer. Missing: " + "; ".join(missing)
            )
        time.sleep(0.1)
    return urls


def _trace(folder: RunFolder, name: str) -> str:
    log, error = folder.logs / f"{name}.log", folder.error(name)
    if error.exists():
        return f"{name} (ended by {error.read_text()})"
    return f"{name} (its log: {log})" if log.exists() else f"{name} (no log here: was it started?)"


def create(runs_dir: Path, name: str, config_yaml: str) -> RunFolder:
    """A new folder ``runs_dir/name-DATE-TIME`` with the resolved config. Raises ConfigError where it cannot
    be written."""
    folder = RunFolder(new_path(runs_dir, name))
    with _writing_in("launch.runs_dir", runs_dir):
        write_text(folder.config, config_yaml)
    return folder


def change_config(folder: RunFolder, config_yaml: str) -> None:
    """Of a run that is resumed. Raises ConfigError where it cannot be written; then the run has the one it
    had."""
    with _writing_in("resume", folder.path):
        write_text(folder.config, config_yaml)


def new_path(runs_dir: Path, name: str) -> Path:
    """A new, empty folder ``runs_dir/name-DATE-TIME``. Raises ConfigError where it cannot be made."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    with _writing_in("launch.runs_dir", runs_dir):
        runs_dir.mkdir(parents=True, exist_ok=True)
        for attempt in range(100):
            path = runs_dir / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
        raise FileExistsError(f"{path} and 99 more of this name exist already")


@contextlib.contextmanager
def _writing_in(field: str, folder: Path) -> Iterator[None]:
    """What ``check_can_be_made`` could not foresee: a disk that is full, a name that is too long, a folder
    made in the meantime."""
    try:
        yield
    except OSError as error:
        said = f"the run folder cannot be written: {error}"
        fix = "give a folder that can be written to, on a disk that is not full"
        raise ConfigError.of("config", field, str(folder), said, fix) from error


def check_can_be_made(field: str, folder: Path) -> None:
    """Whether ``folder``, the value of ``field``, is a folder that can be written to, or can become one.
    Leaves nothing behind.

    Raises:
        ValueError: naming the field, the value, what is in its way and the fix.
    """
    absolute = folder.absolute()
    nearest = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    try:
        with contextlib.suppress(FileNotFoundError):
            absolute.lstat()  # a name may be too long
        # Permissions alone say nothing of read-only file systems, or to root. On Linux the file never has a
        # name.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        wrong = f"{field}={folder} cannot be written to: {error.strerror}, in {nearest}"
        raise ValueError(f"{wrong}; give a folder that can be written to") from error


def locked(path: Path) -> TextIO:
    """The file, made where it is missing, with a lock that goes when it is closed.

    Raises:
        BlockingIOError: another process has the lock.
        ValueError: the file system knows no locks; with the fix.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in WITHOUT_LOCKS:
            raise
        raise ValueError(
            f"{path.parent} is on a file system without file locks ({error.strerror}), which keep two processes from running one folder; "
            "have it mounted with them (Lustre: -o flock), or put launch.runs_dir elsewhere"
        ) from error
    return file


def point_latest(folder: RunFolder) -> None:
    """``latest``, beside the training runs, is the newest of them; replaced by a rename, so that it always
    points somewhere."""
    fresh = folder.path.parent / f".latest-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.path.name)
    fresh.replace(folder.path.parent / "latest")


def write_json(path: Path, content: dict) -> None:
    """Atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Atomically: a reader, or whoever comes after a failure (OSError), sees the old file or the new one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
