"""``tandem logs``: the ends of a run's logs."""

import codecs
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launch.checks.arguments import BadInput
from launch.commands.status import brief_state
from launch.processes.run_folder import RunFolder
from rollout.terminal_text import tandem_command, visible


def log_files(folder: RunFolder, role: str | None) -> list[Path]:
    """The logs of a run, or those of one role: ``serve`` stands for serve-0, serve-1, …. Raises BadInput with the
    names of all roles."""
    files = folder.log_files()
    if not files:
        state = tandem_command("status", folder.path)
        raise BadInput(f"RUN: {folder.path} has no logs yet; `{state}` shows its state")
    if role is None:
        return files
    chosen = [file for file in files if file.stem == role or file.stem.startswith(f"{role}-")]
    if not chosen:
        stems = ", ".join(file.stem for file in files)
        raise BadInput(f"--role {role}: no such log in {folder.logs}; there are {stems}")
    return chosen


def show_logs(folder: RunFolder, files: Sequence[Path], *, lines: int, follow: bool) -> int:
    """Show the ends of ``files`` by coreutils' tail. Control characters are made visible, since agents and rewards may print
    a model's text. With ``follow`` show new lines too, until the run ends or Ctrl-C. Returns tail's exit status."""
    options = _follow_options(folder) if follow else []
    command = ["tail", f"--lines={lines}", *options, *map(str, files)]
    with suppress(KeyboardInterrupt), subprocess.Popen(command, stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode
        while chunk := os.read(tail.stdout.fileno(), 65536):
            sys.stdout.buffer.write(visible(decode(chunk)).encode())
            sys.stdout.buffer.flush()
        return tail.wait()
    return 0


def _follow_options(folder: RunFolder) -> list[str]:
    """Options for tail; none for a run that has ended. tail cannot see the end of a run on another machine."""
    if holders := [pid for pid in folder.holders() if pid > 0]:
        return ["--follow=name", "--retry", f"--pid={holders[0]}"]
    state = brief_state(folder)
    if state.startswith(("running", "waiting", "unknown", "ending")):
        return ["--follow=name", "--retry"]
    print(f"the run is not active on this machine ({state}): no new lines will come", file=sys.stderr)
    return []
