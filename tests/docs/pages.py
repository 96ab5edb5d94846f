"""The documents as the tests read them: prose files, and their commands with the comment before each."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = (
    "README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "trainer/README.md",
    "launch/README.md",
    "configs/recipes/README.md",
)
"""Prose files with commands that are not under docs/: all but one are pages of the site too."""
FENCE = re.compile(r"^```bash\n(?P<commands>.*?)^```", re.MULTILINE | re.DOTALL)
SAID_BEFORE = re.compile(
    r"<!-- (?P<word>not run|exits with (?P<code>\d+)): (?P<reason>(?:(?!-->).)*) -->\n\Z", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of commands."""

    place: str
    """``FILE:LINE``"""
    commands: str
    reason: str | None
    """Why no test runs it; None: it is run."""
    exit_code: int = 0


def prose_files() -> list[Path]:
    return [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in OUTSIDE)]


def blocks_of(file: Path) -> list[Block]:
    text = file.read_text(encoding="utf-8")
    blocks = []
    for fence in FENCE.finditer(text):
        place = f"{file.relative_to(ROOT)}:{text.count(chr(10), 0, fence.start()) + 1}"
        said = SAID_BEFORE.search(text[: fence.start()])
        reason = said["reason"] if said and said["word"] == "not run" else None
        code = int(said["code"]) if said and said["code"] else 0
        blocks.append(Block(place, fence["commands"], reason, code))
    return blocks


def all_blocks() -> list[Block]:
    return [block for file in prose_files() for block in blocks_of(file)]
