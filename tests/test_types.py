"""The type checker finds no more errors in the product than it did before."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 51
"""Errors of basedpyright, as pyproject.toml sets it. It only goes down."""


def test_the_product_gains_no_type_errors():
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    report = json.loads(done.stdout)
    errors = [
        f"{Path(found['file']).relative_to(ROOT)}:{found['range']['start']['line'] + 1}: {found['message']}"
        for found in report["generalDiagnostics"]
        if found["severity"] == "error"
    ]
    assert report["summary"]["filesAnalyzed"] > 100, done.stderr
    assert report["summary"]["errorCount"] <= MOST, "\n".join(errors)
