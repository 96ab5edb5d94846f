"""The key of a run: SGLang's servers, the router and the sample role refuse requests that do not prove it.

The key lies in the run folder, where only its owner can read it. A process that can read it is trusted. The key is on no
command line (``ps`` shows those to everyone) and in no environment.
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
"""SGLang's name for the key: SGLang reads this file itself."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """A key and the file that holds it."""

    file: Path
    secret: str = field(repr=False)

    @property
    def http_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    def curve_pair(self, side: Side) -> tuple[bytes, bytes]:
        """(public, secret) of one side for ZeroMQ's CURVE. Both pairs follow from the key, so both sides know
        both public keys."""
        secret = z85.encode(hmac.digest(self.secret.encode(), f"tandem {side}".encode(), hashlib.sha256))
        return zmq.curve_public(secret), secret


def run_key(file: Path) -> RunKey:
    """The key in ``file``. A missing file is made. Every process of a run gets the same key.

    Raises:
        ValueError: others can read the file, or it holds no key; with the fix.
        OSError: the file cannot be read or written.
    """
    if not file.exists():
        _create_key_file(file)
    if os.stat(file).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"others can read {file}, the key of the run; remove it (the next start makes another) and use a file system with permissions"
        )
    try:
        content = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):  # such as a file that is cut off
        content = None
    secret = content.get(FIELD) if isinstance(content, dict) else None
    if not isinstance(secret, str) or len(secret) < 32:
        raise ValueError(f"{file} holds no key of a run; remove it: the next start makes another")
    return RunKey(file, secret)


def _create_key_file(file: Path) -> None:
    """Create the file atomically. If several processes try, one succeeds, and all use its key."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as target:
            target.write(
                f'# With this key anyone can control the servers of this run.\n{FIELD}: "{secrets.token_hex(32)}"\n'
            )
        with suppress(FileExistsError):
            os.link(fresh, file)
    finally:
        fresh.unlink()
