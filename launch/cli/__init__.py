"""The ``tandem`` command: parses arguments, runs a command of ``launch/commands/``, and ends with one exit code.

The arguments of each group of commands are in a separate file, in the order in which help shows them.

Exit codes: 0 done; 1 a role failed, or a file cannot be used; 2 bad input, nothing was started; 75 stopped on
request, can be continued; 130 interrupted.
"""

import errno
import importlib.metadata
import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.cli import before, roles, runs, studies, training
from launch.cli.shared import Commands, option

app = typer.Typer(
    cls=Commands,
    help="RL post-training with a Megatron-Core learner and SGLang rollouts.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)
for part in (training, runs, before, studies, roles):
    app.add_typer(part.commands)
OUR_PACKAGES = ("configs", "numerics", "rollout", "parallel", "tracing", "trainer", "launch")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tandem {importlib.metadata.version('tandem-rl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, option("Print the version, do nothing.", "--version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def check_packages() -> None:
    """Refuse to start if another package shadows one of Tandem's, whose names are common words (``trainer``)."""
    root = Path(__file__).resolve().parents[2]
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if folder != root / name:
            sys.exit(
                f"tandem: the package {name!r} is taken from {folder}, not from {root / name}.\n"
                "Another package of that name comes first on the Python path: run from another folder, or fix PYTHONPATH."
            )


def check_current_folder() -> None:
    """Refuse to start in a folder that was removed: paths start there, and Python looks for modules there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        fix = "change to one that does, and start the command again"
        print(f"tandem: the current folder does not exist any more; {fix}", file=sys.stderr)
        sys.exit(2)


def open_closed_streams() -> None:
    """Open standard streams that the caller closed, on /dev/null: otherwise a file would take their number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
        setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
    os.close(number)


def print_any_letter() -> None:
    """Print a ``?`` for a letter that the locale's encoding lacks: the console line has a ``Δ``, and printing must not end a
    run. Roles are commands too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a caller in this process may have set another
            stream.reconfigure(errors="replace")


def main() -> None:
    open_closed_streams()
    print_any_letter()
    check_current_folder()
    check_packages()
    # In every process of the run, and for transformers too.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except BaseException as error:
        answer = None if isinstance(error, SystemExit) else _message_and_exit_code(error)
        if answer is None:
            raise
        message, code = answer
        print(f"tandem: {message}", file=sys.stderr)
        sys.exit(code)


def _message_and_exit_code(error: BaseException) -> tuple[object, int] | None:
    """None for a bug, which keeps its traceback. The classes are imported here, since help needs none."""
    from configs.errors import ConfigError
    from launch.checks.arguments import BadInput
    from launch.processes.stopping import RunStopped
    from launch.processes.supervisor import Interrupted, RoleFailed

    match error:
        case ConfigError() | BadInput():
            return error, 2
        case RoleFailed():
            return error, 1
        case OSError() if (
            error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) and error.filename is not None
        ):
            return f"{error}; work on a copy of its folder, or ask its owner for permission", 1
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{error}; free space there, then start the command again", 1
        case OSError() if error.filename is not None:
            return error, 1
        case RunStopped():
            return error, os.EX_TEMPFAIL
        case Interrupted():
            return str(error) or "interrupted; every process of the run has ended", 130
    return None
