"""The ``tandem`` command in this process, so that cases of bad input and short answers need no start-up each.
``tests.support.whole_runs`` runs commands that start processes or catch signals."""

import contextlib
import io
import sys
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from launch import cli


def tandem(*arguments: str, cwd: Path) -> CompletedProcess[str]:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(cwd),
        mock.patch.object(sys, "argv", ["tandem", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())
