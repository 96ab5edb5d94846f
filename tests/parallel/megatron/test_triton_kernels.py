"""The GPU kernels, on a GPU if there is one, else in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.whole_runs import ROOT

CASES = ROOT / "tests/support/triton_kernel_cases.py"


@pytest.mark.engines
def test_the_kernels_are_the_plain_operations():
    """The interpreter is chosen before Triton is first imported, which may have been in this process."""
    environment = dict(os.environ) if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " skipped" not in done.stdout, done.stdout[-4000:]
