"""``tandem stop``: asks a run to stop, waits until it has ended, and says what was saved.

    a run on this machine    SIGUSR1 to the process that holds the run's lock; however often it comes, it is one request
                             (launch/processes/stopping.py). With --now SIGUSR2, which acts like Ctrl-C and also works in
                             the background (launch/processes/supervisor.py)
    a Slurm job              SIGTERM only to its batch script: the run stops with a checkpoint, and is not requeued
    another host             the message names it, and nothing is done

A signal is sent only to a process that is seen to have the lock's file open. It is sent through a handle of that process
(pidfd), so it cannot reach another one that got the same number in the meantime.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from configs.loader import ConfigError, load_config
from configs.schema import AnyConfig, SftConfig
from configs.schema.launch import LaunchConfig
from launch.commands.status import status
from launch.processes import stopping
from launch.processes.going_on import way_on
from launch.processes.heartbeat import BEAT_S, MISSED, living_roles, read_beats
from launch.processes.run_folder import RunFolder
from launch.roles.start import progress_printer
from launch.slurm.job import ask_slurm, running_elsewhere
from parallel.checkpoints.files import step_of
from rollout.terminal_text import tandem_command
from trainer.file_system import SHARED_FOLDER_S, read_file

HEARD_OF_S = SHARED_FOLDER_S + MISSED * BEAT_S
"""A role whose last sign of life is at most this old may still be running on another host."""
SLURM_LOOK_S = 5.0
KILLED_S = 30.0
"""Time for the supervisor to end every process, beside the grace that these have."""


def stop(folder: RunFolder, *, now: bool) -> int:
    """Stop the run, and wait for its end. Returns the exit code: 0 if it no longer runs.

    now: end every process at once, as Ctrl-C does, without another checkpoint.
    """
    try:
        return _stop(folder, now=now)
    except KeyboardInterrupt:
        state = tandem_command("status", folder.path)
        print(f"\nno longer waiting, but the request stands; `{state}` shows its progress", file=sys.stderr)
        return 130


def _stop(folder: RunFolder, *, now: bool) -> int:
    try:
        job = running_elsewhere(folder)
    except RuntimeError as error:  # send no signal to a process here: it may be part of the job
        return _refuse(str(error))
    if job is not None:
        return _stop_job(folder, job, now=now)
    holders = folder.holders()
    if not holders:
        return _stop_none(folder)
    try:
        handle = os.pidfd_open(holders[0])
    except OSError:  # in another container, whose processes have no number here; or it has just ended
        if folder.holders():
            return _refuse(f"{folder.path} runs here in another container: call `tandem stop` there")
        return _stop_none(folder)
    number = signal.SIGUSR2 if now else signal.SIGUSR1
    try:
        if (why_not := _why_not(folder, holders[0], number)) is not None:
            return _refuse(why_not)
        signal.pidfd_send_signal(handle, number)
        return _wait(folder, lambda wait_s: bool(select.select([handle], [], [], wait_s)[0]), now=now)
    finally:
        os.close(handle)


def _why_not(folder: RunFolder, pid: int, number: signal.Signals) -> str | None:
    """Why the process must not get the signal; None if it is the run's supervisor and handles the signal."""
    who = f"pid {pid}, which runs {folder.path}"
    lock, process = folder.lock.stat(), Path(f"/proc/{pid}")
    try:
        caught = next(line for line in (process / "status").read_text().splitlines() if "SigCgt" in line)
        files = [file.stat() for file in (process / "fd").iterdir() if file.exists()]
    except PermissionError:
        owner = _name_of(process.stat().st_uid)
        return f"{who}, is of user {owner}, and you are {_name_of(os.getuid())}: only {owner} and root can stop it"
    except FileNotFoundError:
        return f"{who}, has just ended; `{tandem_command('status', folder.path)}` says how"
    if not any(os.path.samestat(lock, file) for file in files):
        return f"{who} by the kernel's table of locks, does not have its lock open: no signal was sent"
    if not int(caught.split()[1], 16) >> (number - 1) & 1:
        return f"{who}, does not accept requests yet; call `tandem stop` again in a moment"
    return None


def _name_of(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _stop_job(folder: RunFolder, job: str, *, now: bool) -> int:
    waits = status(folder).state.startswith("waiting")
    asked = stopping.stop_reason(folder) is not None
    try:
        if waits or now:
            ask_slurm("scancel", job)
        elif not asked:  # a second SIGTERM would end everything at once
            ask_slurm("scancel", "--batch", "--signal=TERM", job)
    except RuntimeError as error:
        return _refuse(f"{folder.path} is run by job {job}, and {error}")
    looked_at = -SLURM_LOOK_S

    def has_ended(wait_s: float) -> bool:
        nonlocal looked_at
        time.sleep(wait_s)
        if time.monotonic() - looked_at < SLURM_LOOK_S:
            return False
        looked_at = time.monotonic()
        try:
            return running_elsewhere(folder) is None
        except RuntimeError:  # Slurm may say at the next look
            return False

    print(f"job {job} was {'taken from the queue' if waits else 'asked to stop'}", flush=True)
    return _wait(folder, has_ended, now=now)


def _stop_none(folder: RunFolder) -> int:
    """The answer if no process of this machine and no job runs the folder."""
    state = status(folder).state
    beats = [(beat, time.time() - written) for beat, written in read_beats(folder)]
    here, alive = socket.gethostname(), living_roles(folder)
    heard = [(beat, ago) for beat, ago in beats if ago < HEARD_OF_S and (beat.host != here or beat in alive)]
    if heard and state.startswith(("not running", "running")):
        beat, ago = min(heard, key=lambda pair: pair[1])
        where = f"{beat.host} ({beat.who} gave a sign of life {max(ago, 0):.0f} s ago)"
        return _refuse(f"{folder.path} does not run here, but on {where}: call `tandem stop` there")
    print(f"{folder.path} is not running: {state}")
    return 0


def _wait(folder: RunFolder, has_ended: Callable[[float], bool], *, now: bool) -> int:
    """Wait for the end of a run that was asked to stop. ``has_ended`` takes the seconds that it may wait."""
    config = _config_of(folder)
    # A config of another version cannot be read: the schema's defaults stand in for its limits.
    limits = LaunchConfig() if config is None else config.launch
    at_once = now or _command_of(folder) != "train"  # only training leaves checkpoints
    deadline_s = limits.stop_grace_s + KILLED_S + (0.0 if at_once else limits.stop_timeout_s)
    in_order = "the step is finished or dropped, then a checkpoint is written"
    what = "every process is ended" if at_once else in_order
    is_late, began = False, time.monotonic()
    about = f"stopping {folder.path}: {what}; at most {deadline_s:.0f} s"
    with progress_printer(about, still="stopping") as show:
        while not is_late and not has_ended(0.5):
            show(waited := time.monotonic() - began)
            is_late = waited > deadline_s
    if is_late:
        return _refuse(
            f"{folder.path} has not ended within {deadline_s:.0f} s; `{tandem_command('status', folder.path)}` shows what it is "
            f"doing, and `{tandem_command('stop', folder.path, '--now')}` ends it without a checkpoint"
        )
    state = status(folder).state
    if state.startswith("not running"):
        newest = folder.newest_checkpoint()
        saved = "and nothing was saved" if newest is None else f"after it had saved step {step_of(newest)}"
        state = f"ended at once, {saved}; {way_on(folder, _command_of(folder))}"
    print(state)
    return 1 if state.startswith(("failed", "running")) else 0


def _command_of(folder: RunFolder) -> str:
    """The command that starts such a run."""
    if isinstance(_config_of(folder), SftConfig):
        return "sft"
    if not folder.request.exists():
        return "train"
    return (read_file(folder.request, {}, []) or {}).get("study", "eval")


def _config_of(folder: RunFolder) -> AnyConfig | None:
    try:
        return load_config(folder.config)
    except ConfigError:
        return None


def _refuse(text: str) -> int:
    print(f"tandem: {text}", file=sys.stderr, flush=True)
    return 1
