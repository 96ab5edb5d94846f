"""The ``tandem`` command in this process: for bad input and for what prints and ends, without a second of start-up
for each case. Whatever starts processes or catches signals is run by ``tests.support.whole_runs``."""

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
