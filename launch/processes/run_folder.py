"""The folder of a run. It holds everything that the run leaves behind.

config.yaml        the resolved config, which every role reads       metrics.jsonl, console.log   one line per step
logs/ROLE.log      all that a role and its engine print              mlflow.db, mlartifacts/      of all runs, beside the run folders;
                                                                     inside on file systems of a network; none
                                                                     with a tracking URI
roles/ROLE.json    a role's address, once it is ready                checkpoints/step_000010/     resumable
                   (serve-0, serve-1, ... where servers are on several nodes)
roles/NAME.beat    activity of a role or learner rank, while it lives; NAME.stopped: it was stopped (launch/processes/heartbeat.py)
job.json           the Slurm job that runs it, or ran it last         restarts.json, train.sbatch   of Slurm, too
hf/                the trained model, Hugging Face format            report.html, figures/, summary.json
hf-step-8/         that of step 8, if the run continued after it     adapter-step-8/               and its adapters
config-step-8.yaml the config up to step 8, after which a resume changed it
commands.jsonl     the commands that started and resumed it, without secrets (launch/processes/started_by.py)
export/            a checkpoint's weights, in the same format        mlflow_run_id                 a resumed run continues it
adapter/           the trained adapters, in peft's format            export-adapter/               a checkpoint's adapters
key.yaml           the key of the run, which only its owner can read: servers and sampler refuse requests without it
tensorboard/       event files, where asked for                     wandb/, wandb_run.json        of W&B
ledger.jsonl       the fate of every group of responses, one line per step
samples/           samples of a few groups of each step, for `tandem samples` and the report
trace/             spans of every role, for `tandem trace` and the report (tracing/); torch's profiles
batches/           recorded steps, for `tandem replay`               replay/                       what it asks and finds
request.json       the request of `tandem eval`, `mismatch`, ...     metrics.lost.jsonl            of an attempt without a checkpoint
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TextIO, TypeVar

from configs.errors import ConfigError
from configs.reading.files import text_of
from launch.processes.locks import holders_of, locked
from launch.processes.started_by import record_command
from parallel.checkpoints import files as checkpoints
from rollout.run_key import RunKey, run_key
from rollout.terminal_text import visible
from trainer.file_system import NO_SPACE, read_file, write_whole

KEY = "key.yaml"
SPACE_S = 1.0
"""Interval of attempts to write on a full disk."""
Content = TypeVar("Content")


class RunFolder:
    """The paths inside a run's folder. ``path`` itself need not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yaml"
        self.commands = path / "commands.jsonl"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.console = path / "console.log"
        self.report = path / "report.html"
        self.roles = path / "roles"
        self.lock = self.roles / "lock"
        """Held by the process that runs the folder."""
        self.export_lock = self.roles / "export-lock"
        """Held by the command that exports from it."""
        self.stop_request = self.roles / "stop.json"
        self.stop_outcome = self.roles / "stopped.json"
        self.checkpoints = path / "checkpoints"
        self.critic_checkpoints = self.checkpoints / "critic"
        self.ledger = path / "ledger.jsonl"
        self.batches = path / "batches"
        self.samples = path / "samples"
        self.trace = path / "trace"
        self.hf = path / "hf"
        self.export = path / "export"
        self.export_request = path / ".export.json"
        """The step that a command wants its export role to export, None for the newest, whose step the role fills in; removed
        once that role has ended."""
        self.adapter = path / "adapter"
        self.exported_adapter = path / "export-adapter"
        self.figures = path / "figures"
        self.summary = path / "summary.json"
        self.job = path / "job.json"
        """The Slurm job that runs the folder, or ran it last: {job_id, cluster, nodes, restart}."""
        self.script = path / "train.sbatch"
        """The batch script of ``tandem slurm``; the runs of an array have one together, elsewhere."""
        self.restarts = path / "restarts.json"
        """The number of failed starts without a newer checkpoint in between."""
        self.request = path / "request.json"
        """The request of `tandem eval`, or of a study; a training run has none."""
        self._held: list[TextIO] = []
        """Open files whose locks this process holds."""

    def run_key(self) -> RunKey:
        """The key that this run's servers and sampler require; the first call makes it. See ``rollout.run_key``."""
        return run_key(self.path / KEY)

    def address(self, role: str) -> Path:
        return self.roles / f"{role}.json"

    def log_files(self) -> list[Path]:
        return sorted(self.logs.glob("*.log"))

    def error(self, role: str) -> Path:
        return self.roles / f"{role}.error"

    def report_error(self, role: str, error: BaseException) -> None:
        """Record the error that ended ``role``, for the supervisor to show. Of several ranks only the first records it: it
        has the cause, and the others lost a peer.

        Control characters are made visible, since the text may hold a model's output. On a full disk nothing is recorded; the
        log has the error too.
        """
        with contextlib.suppress(OSError):
            self.error(role).parent.mkdir(exist_ok=True)
            with self.error(role).open("x") as file:
                file.write(visible(f"{type(error).__name__}: {error}"))

    def forget(self, role: str) -> None:
        """Remove the address and error of an earlier life of ``role``, when it starts."""
        self.withdraw(role)
        self.error(role).unlink(missing_ok=True)

    def withdraw(self, role: str) -> None:
        """Remove the address of ``role``, when it ends."""
        self.address(role).unlink(missing_ok=True)

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint whose files are complete, by its manifest."""
        return checkpoints.latest_valid(self.checkpoints)

    def damage_of_newest(self) -> str:
        """What is wrong with the newest checkpoint; "" if it is complete, or there is none."""
        folders = [*checkpoints.step_folders(self.checkpoints).values()]
        wrong = checkpoints.missing(folders[-1]) if folders else None
        return f" ({folders[-1].name}: {wrong})" if wrong else ""

    def newest_with_critic(self) -> Path | None:
        """The newest step whose checkpoints of policy and critic are both complete. A run with a critic continues from it."""
        policy, critic = map(checkpoints.valid_checkpoints, (self.checkpoints, self.critic_checkpoints))
        steps = policy.keys() & critic.keys()
        return checkpoints.step_folder(self.checkpoints, max(steps)) if steps else None

    def has_final_model(self) -> bool:
        """Whether ``hf/`` is of the newest step. A run that was resumed and stopped has newer checkpoints.

        Whether all steps are done is another question: see ``launch.slurm.job.is_finished``.
        """
        newest, done = self.newest_checkpoint(), self.steps_of_model([])
        return done is not None and (newest is None or (checkpoints.step_of(newest) or 0) <= done)

    def steps_of_model(self, damaged: list[str]) -> int | None:
        """The number of steps that made the model in ``hf/``. None if there is no model or it cannot be read; it then does not
        count as the model of a finished run. ``damaged`` gets the reason."""
        if not self.hf.is_dir():
            return None
        result = read_file(self.summary, {"steps": int}, damaged)
        return None if result is None else result["steps"]

    def put_model_aside(self) -> list[tuple[Path, Path]]:
        """Rename ``hf/`` and ``adapter/`` to ``hf-step-8`` and ``adapter-step-8`` before the run continues, so that they are
        not taken for the model of later steps. Returns (path before, path now) of each."""
        done = self.steps_of_model([])
        older = f"step-{done}" if done is not None else "older"
        aside = []
        for folder in filter(Path.is_dir, (self.hf, self.adapter)):
            target = folder.with_name(f"{folder.name}-{older}")
            shutil.rmtree(target, ignore_errors=True)  # of the same step, done again
            aside.append((folder, folder.rename(target)))
        return aside

    def claim(self, wait: Callable[[], object] = lambda: None) -> None:
        """Make this process the one that runs the folder. The lock ends with the process.

        If an earlier attempt ended before its first checkpoint, the run starts from the beginning, and the metrics of that
        attempt are put aside. Raises BlockingIOError if another process runs the folder, and ValueError on a
        file system without locks.

        wait: called with the lock held, before the files of the roles are removed. If it raises, the lock is released.
        """
        self.roles.mkdir(parents=True, exist_ok=True)
        self._held.append(locked(self.lock))
        try:
            wait()
        except BaseException:
            self.release()
            raise
        for file in self.roles.glob("*.*"):
            file.unlink()
        # Each start has its own key, so an old log reveals nothing about the next start.
        (self.path / KEY).unlink(missing_ok=True)
        # Damaged checkpoints count: the learner reports them, and the run does not start from the beginning.
        if not checkpoints.step_folders(self.checkpoints):
            self.put_metrics_aside()

    def holders(self) -> list[int]:
        """The processes of this machine that run the folder."""
        return holders_of(self.lock)

    def put_metrics_aside(self) -> None:
        """Rename the metrics of an attempt that ended before its first checkpoint."""
        if self.metrics.exists():
            self.metrics.replace(self.path / "metrics.lost.jsonl")

    def release(self) -> Path:
        """Let another process claim the folder. Returns its path."""
        while self._held:
            self._held.pop().close()
        return self.path

    def announce(self, role: str, address: dict, *, gives_up: Callable[[], bool] = lambda: True) -> None:
        """Tell the other roles where ``role`` listens. The file appears complete or not at all.

        gives_up: asked while the disk is full; the error is raised once it says so. A role that is started again during a run
        waits for space: its learner continues once there is some. Without a learner nothing is lost, and the error is raised
        at once.
        """
        has_told = False
        while True:
            try:
                return write_json(self.address(role), address)
            except OSError as error:
                if error.errno not in NO_SPACE or gives_up() or self.read_address("learn") is None:
                    raise
            if not has_told:
                print(
                    f"{self.roles} has no space for the address of {role}; it is written once there is some",
                    flush=True,
                )
            has_told = True
            time.sleep(SPACE_S)

    def read_address(self, role: str) -> dict | None:
        """What ``role`` has announced; None if it has not. Raises what ``read_present`` raises."""
        return read_present(self.address(role))

    def wait_for_address(self, role: str, *, timeout_s: float) -> dict:
        address = _wait_for(lambda: self.read_address(role), timeout_s)
        if address is None:
            late = f"within {timeout_s:.0f} s"
            raise TimeoutError(f"the {role} role did not report its address in {self.path} {late}")
        return address


def read_present(file: Path) -> dict | None:
    """The object in a file that another process writes; None if there is no file. Raises OSError if the file system does not
    deliver the file in several reads."""

    def read() -> dict | None:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(text_of(file))

    return checkpoints.read_again(read, whatever=True)


def read_servers(folder: RunFolder, names: Sequence[str]) -> list[str] | None:
    """The addresses of all replicas, in order, as the serve roles report them; None until all roles have."""
    addresses = [folder.read_address(name) for name in names]
    urls = [url for address in addresses if address is not None for url in address["urls"]]
    return None if None in addresses else urls


def read_lives(folder: RunFolder, names: Sequence[str]) -> dict[str, int] | None:
    """The addresses of the replicas that can receive weights, each with the number of its life; None if a serve role has
    ended."""
    addresses = [address for name in names if (address := folder.read_address(name)) is not None]
    lives = {url: life for address in addresses for url, life in address["lives"].items()}
    return lives if len(addresses) == len(names) else None


def wait_for_servers(
    folder: RunFolder, names: Sequence[str], *, timeout_s: float, alive: Callable[[], None] = lambda: None
) -> list[str]:
    """``read_servers``, once all roles have reported. ``alive`` is called meanwhile, and may end the wait by
    raising. Raises TimeoutError with the missing roles and the traces that they left."""
    urls = _wait_for(lambda: read_servers(folder, names), timeout_s, alive)
    if urls is None:
        missing = [_trace_of(folder, name) for name in names if folder.read_address(name) is None]
        late = f"{len(missing)} of {len(names)} serve roles did not report servers in {folder.path} within {timeout_s:.0f} s"
        fix = "raise launch.start_timeout_s if they only need longer"
        raise TimeoutError(f"{late}; {fix}. Missing: {'; '.join(missing)}")
    return urls


def _wait_for(
    read: Callable[[], Content | None], timeout_s: float, alive: Callable[[], None] = lambda: None
) -> Content | None:
    """The first value of ``read`` that is not None; None after the timeout."""
    deadline = time.monotonic() + timeout_s
    while (content := read()) is None:
        alive()
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return content


def error_text(file: Path) -> str:
    """What a process wrote into this file of ``roles/`` as it ended; "" without a file. A file that cannot be read raises
    nothing, since its reader has another error to report."""
    try:
        return text_of(file, errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"


def _trace_of(folder: RunFolder, name: str) -> str:
    log, error = folder.logs / f"{name}.log", folder.error(name)
    if error.exists():
        return f"{name} (ended by {error_text(error)})"
    return f"{name} (its log: {log})" if log.exists() else f"{name} (no log here: was it started?)"


def create(runs_dir: Path, name: str, config_yaml: str) -> RunFolder:
    """A new folder ``runs_dir/name-DATE-TIME`` with the resolved config. Raises ConfigError where it cannot
    be written."""
    folder = RunFolder(new_path(runs_dir, name))
    with _writing_in("launch.runs_dir", runs_dir):
        write_whole(folder.config, config_yaml.encode(), flush=True)
        record_command(folder.commands)
    return folder


def keep_config(folder: RunFolder) -> Path:
    """Copy the config of the steps so far to ``config-step-8.yaml``, before a resume changes it. If an earlier resume from this
    step kept one, it stays: no step of the later config is left. Raises ConfigError where it cannot be written."""
    newest = folder.newest_checkpoint()
    kept = folder.path / f"config-step-{checkpoints.step_of(newest) if newest is not None else 0}.yaml"
    if not kept.exists():
        with _writing_in("resume", folder.path):
            write_whole(kept, folder.config.read_bytes(), flush=True)
    return kept


def change_config(folder: RunFolder, config_yaml: str) -> None:
    """Replace the config of a resumed run, and record the command. Raises ConfigError where it cannot be written; the old
    config then stays."""
    with _writing_in("resume", folder.path):
        record_command(folder.commands)
        write_whole(folder.config, config_yaml.encode(), flush=True)


def new_path(runs_dir: Path, name: str) -> Path:
    """A new, empty folder ``runs_dir/name-DATE-TIME``. Raises ConfigError where it cannot be made."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    with _writing_in("launch.runs_dir", runs_dir):
        if str(runs_dir).startswith("-"):  # commands would take it for an option
            runs_dir = runs_dir.absolute()
        runs_dir.mkdir(parents=True, exist_ok=True)
        for attempt in range(100):
            path = runs_dir / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
        raise FileExistsError(f"{path} and 99 more of this name exist already")


@contextlib.contextmanager
def _writing_in(field: str, folder: Path) -> Iterator[None]:
    """Turns errors that ``check_can_be_made`` cannot foresee into ConfigError: a full disk, a long name, a folder that was made
    in the meantime."""
    try:
        yield
    except OSError as error:
        reason = f"the run folder cannot be written: {error}"
        fix = "give a folder that can be written to, on a disk that is not full"
        raise ConfigError.of("config", field, str(folder), reason, fix) from error


def may_be_run(path: Path) -> bool:
    """Whether ``path`` is a run folder. A folder that this user cannot open counts as one: reading it gives the error."""
    try:
        return (path / "config.yaml").is_file()
    except PermissionError:
        return True


def check_can_be_made(field: str, folder: Path) -> None:
    """Check that ``folder``, the value of ``field``, can be written to, or can be made. Leaves nothing behind.

    Raises ValueError with the field, the value, the obstacle and the fix.
    """
    absolute = folder.absolute()
    nearest = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    try:
        with contextlib.suppress(FileNotFoundError):
            absolute.lstat()  # a name may be too long
        # Permissions do not reveal read-only file systems, and root ignores them. On Linux the file never has a name.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        wrong = f"{field}={folder} cannot be written to: {error.strerror}, in {nearest}"
        raise ValueError(f"{wrong}; give a folder that can be written to") from error


def point_latest(folder: RunFolder) -> None:
    """Point the link ``latest``, beside the training runs, to this run. A rename replaces it, so it always exists. If it
    cannot be made, a note says so: the run does not need it."""
    fresh, latest = (folder.path.parent / name for name in (f".latest-{os.getpid()}", "latest"))
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.path.name)
        fresh.replace(latest)
    except OSError as error:  # a folder of that name, or a file system without links
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        print(f"{latest} stays as it is ({error.strerror}): name {folder.path} instead", flush=True)


def write_json(path: Path, content: dict, *, flush: bool = False) -> None:
    """See ``write_whole``."""
    write_whole(path, f"{json.dumps(content, indent=2)}\n".encode(), flush=flush)
