"""The commands that started a run and resumed it, without secrets: ``RUN/commands.jsonl``, a line per start."""

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.reading.files import text_of
from configs.schema.base import looks_secret, without_credentials
from trainer.file_system import parse_json

HIDDEN = "…"
_SECRET_NAME = re.compile(
    r"passw|secret|credential|(^|[_-])((api|access|auth|private)?(keys?|token)|auth|authorization)$"
)
"""In a name in small letters. A secret's name ends with `key` or `token`; `token_budget` and `tokenizer` are none."""
_SECRET_VALUE = re.compile(
    r"(?P<scheme>\b(?i:bearer|authorization[\"']?\s*[:=]\s*[\"']?basic)\s+)[^\s,'\"{}\[\]]{8,}"
    r"|(?<![\w-])(?:hf_|gh[pousr]_|AKIA|sk-[\w-]*?)(?=[A-Za-z]*\d)[A-Za-z\d]{16,}[\w-]*"
    r"|(?<![\w-])(?:github_pat_|glpat-|xox[a-z]-|AIza|eyJ)(?=[\w.-]*\d)[\w.-]{16,}"
)
"""How the keys of well-known services look, whatever their names are: also JSON web tokens (eyJ). A path such as
`hf_models/Qwen2.5-7B` is none."""
_NOT_HIDDEN = re.compile(r"[-+\d._e,\s\[\]]*|true|false|null|~|.*_variables?|pass_secrets", re.IGNORECASE)
_NAMED = re.compile(
    r"""
    (?<! [\w.-] ) (?P<name> [\w.-]+ )
    (?P<sign> ["']? \s* [:=] \s* )
    (?P<value>
        " (?: \\. | [^"\\] )* "
      | ' (?: '' | [^'] )* '
      | \[ [^][]* \]
      | [^\s,{}[\]"']+ (?: [ ]+ [^\s,{}[\]"':=]+ (?= [\s,{}[\]] | $ ) )*
    )
    """,
    re.VERBOSE,
)
"""A name and its value inside an override: a text in quotes, a list or words, as in ``{api_key: "…"}``."""


def record_command(file: Path) -> None:
    """Add this process's command to the file. Bytes of names that are no UTF-8 stay as escapes. Raises OSError."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "folder": os.getcwd(),
        "command": command_text(sys.argv, os.environ),
    }
    with file.open("a", encoding="utf-8", errors="backslashreplace") as commands:
        commands.write(f"{json.dumps(line, ensure_ascii=False)}\n")


def command_text(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command as it can be pasted into a shell, but for what may be a secret: a value whose name or form says so, a user
    and a password in an address, and the value of an environment variable whose name says so."""
    program = Path(argv[0]).name
    words = ["tandem" if program == "__main__.py" else program, *argv[1:]]
    return shlex.join(_without_secrets(word, environment) for word in words)


def _without_secrets(word: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        if looks_secret(name, value):
            word = word.replace(value, HIDDEN)
    word = _SECRET_VALUE.sub(lambda found: (found["scheme"] or "") + HIDDEN, word)
    key, equals, value = word.partition("=")
    if equals and _is_secret(key, value):
        return f"{key}={HIDDEN}"
    return without_credentials(_NAMED.sub(_hide, word))


def _hide(named: re.Match[str]) -> str:
    value = HIDDEN if _is_secret(named["name"], named["value"]) else named["value"]
    return f"{named['name']}{named['sign']}{value}"


def _is_secret(key: str, value: str) -> bool:
    """``key``: dotted. A name of a variable is no secret, nor is a number: `max_new_tokens=512`."""
    name = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", key.rpartition(".")[2])
    is_named = _SECRET_NAME.search(name.lower()) is not None
    return is_named and not any(map(_NOT_HIDDEN.fullmatch, (name, value)))


def started_in(file: Path) -> Path:
    """The folder of the newest recorded command, to which the paths of the run's config are relative. The current folder, if
    that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        for command in reversed(read_commands(file)):
            if isinstance(command.get("folder"), str):
                return Path(command["folder"])
    return Path()


def read_commands(file: Path) -> list[dict[str, Any]]:
    """The recorded commands, the first one first. A line that cannot be read is left out. Raises OSError."""
    commands = []
    for line in text_of(file).split("\n"):  # a command may hold other characters that end a line
        try:
            found = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and all(isinstance(found.get(key), str) for key in ("time", "command")):
            commands.append(found)
    return commands
