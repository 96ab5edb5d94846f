"""The key of a run: who may ask its servers and its sampler for anything.

It lies in the run folder, where only the user who runs can read it: whoever can read it is trusted. SGLang's
servers, the router and the sample role refuse those who do not prove it. It is on no command line (``ps``
shows those to everyone) and in no environment.
"""

import hashlib
import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
import zmq
from zmq.utils import z85

Side = Literal["sampler", "learner"]
FIELD = "api-key"
"""SGLang's name: the file is one that it reads itself."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """A key and the file that holds it."""

    file: Path
    secret: str = field(repr=False)

    @property
    def http_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    def curve_pair(self, side: Side) -> tuple[bytes, bytes]:
        """(public, secret), for ZeroMQ's CURVE: each side's pair follows from the key, so both know both
        public ones."""
        secret = z85.encode(hmac.digest(self.secret.encode(), f"tandem {side}".encode(), hashlib.sha256))
        return zmq.curve_public(secret), secret


def run_key(file: Path) -> RunKey:
    """The key in ``file``, made where there is none; every process of a run gets the same one.

    Raises:
        ValueError: others can read the file, or it holds no key; with the fix.
        OSError: it cannot be read or written.
    """
    if not file.exists():
        _make(file)
    if os.stat(file).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"others can read {file}, the key of the run; remove it, and the next start makes another, on a file system with permissions"
        )
    content = yaml.safe_load(file.read_text())
    secret = content.get(FIELD) if isinstance(content, dict) else None
    if not isinstance(secret, str) or len(secret) < 32:
        raise ValueError(f"{file} holds no key of a run; remove it: the next start makes another")
    return RunKey(file, secret)


def _make(file: Path) -> None:
    """Whole or not at all, and the first of several processes has made it for all of them."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as target:
            target.write(
                f'# Whoever reads this may control the servers of this run.\n{FIELD}: "{secrets.token_hex(32)}"\n'
            )
        with suppress(FileExistsError):
            os.link(fresh, file)
    finally:
        fresh.unlink()
