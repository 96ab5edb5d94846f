"""A file that cannot be read, such as for a moment on NFS."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def unreadable(monkeypatch: pytest.MonkeyPatch, file: Path, number: int) -> None:
    """Until ``monkeypatch.undo()``, ``file`` is listed, but reading it and its state raises the error ``number``."""

    def failing(ask: Callable[..., Any]) -> Callable[..., Any]:
        def fail_or_ask(path: Path, *given, **named):
            if path == file:
                raise OSError(number, os.strerror(number), str(path))
            return ask(path, *given, **named)

        return fail_or_ask

    for name in ("read_text", "stat"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
