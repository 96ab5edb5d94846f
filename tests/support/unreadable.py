"""A file that a network file system does not give, such as for a moment on NFS."""

import os
from pathlib import Path

import pytest


def unreadable(monkeypatch: pytest.MonkeyPatch, file: Path, number: int) -> None:
    """Until ``monkeypatch.undo()``, ``file`` is listed, and its text and state end in the error ``number``."""
    for name in ("read_text", "stat"):

        def ask(path: Path, *given, _ask=getattr(Path, name), **named):
            if path == file:
                raise OSError(number, os.strerror(number), str(path))
            return _ask(path, *given, **named)

        monkeypatch.setattr(Path, name, ask)
