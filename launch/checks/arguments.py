"""Wrong arguments of a command, what a check of a config finds, and checks of the folders and pages to be written."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.loader import Finding
from launch.processes.run_folder import check_can_be_made


class BadInput(Exception):
    """A wrong argument; nothing was started. (An error inside a config is a ConfigError.)"""


@contextmanager
def as_bad_input(about: str = "") -> Iterator[None]:
    """While entered, a ValueError becomes BadInput, with ``about`` before its message."""
    try:
        yield
    except ValueError as error:
        raise BadInput(f"{about}{error}") from error


def finding_of(field: str, check: Callable, *arguments: object, **named: object) -> Iterator[Finding]:
    """The finding of a check, if it raises ValueError."""
    try:
        check(*arguments, **named)
    except ValueError as error:
        yield field, str(error)


def check_new_folder(argument: str, folder: Path) -> None:
    """Check that ``folder`` does not exist yet and can be made. Raises ValueError."""
    if os.path.lexists(folder):
        raise ValueError(f"{argument}: {folder} exists already; name a new folder, or remove it first")
    check_can_be_made(argument, folder)


def check_file_to_write(option: str, file: Path, suffix: str = "") -> None:
    """Check that ``file`` can be written into a folder that exists. Raises ValueError."""
    if not file.name.endswith(suffix) or file.is_dir() or not file.parent.is_dir():
        ends = f" that ends with {suffix}" if suffix else ""
        error = f"{option}: {file} is not the name of a file to write"
        raise ValueError(f"{error}; name one{ends} in a folder that exists")
    # A pipe of the shell's, /dev/fd/63, lies in no folder that can be written to.
    if not os.access(file, os.W_OK):
        check_can_be_made(option, file.parent)


def check_new_page(option: str, page: Path) -> None:
    """Check that ``page`` is the name of a page that can be written. Raises ValueError."""
    if page.suffix != ".html" or page.is_dir():
        raise ValueError(f"{option}: {page} is not the name of a page; name a file that ends with .html")
    check_can_be_made(option, page.parent)
