"""Every command of benchmarks/ can be imported and says what it takes; what it imports later is there too. Pages of results say
when and how they were made."""

import ast
import json
import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT

COMMANDS = sorted(
    str(file.relative_to(ROOT))
    for file in (ROOT / "benchmarks").rglob("*.py")
    if "__main__" in file.read_text(encoding="utf-8")
)
NOT_BY_HAND = {"benchmarks/trl_side.py", "benchmarks/simulated_servers.py"}
"""Processes of other benchmarks: the one in TRL's own environment, the other with arguments by place, in the tests of it."""
ASK_EACH = """
import contextlib, io, json, runpy, sys
said = {}
for file in sys.argv[1:]:
    sys.argv = [file, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(file, run_name="__main__")
            said[file] = "no parser of arguments"
        except SystemExit as end:
            said[file] = out.getvalue() if end.code == 0 else f"exit code {end.code}"
        except BaseException as error:
            said[file] = repr(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """By all of them in one process, which imports torch once."""
    files = [file for file in COMMANDS if file not in NOT_BY_HAND]
    done = subprocess.run(
        [sys.executable, "-c", ASK_EACH, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_benchmark_says_what_it_takes(said):
    assert len(said) > 30 and set(COMMANDS) >= NOT_BY_HAND
    assert {file: text for file, text in said.items() if not text.startswith("usage:")} == {}


def test_what_benchmarks_import_of_the_product_is_there():
    """Inside of functions too, which no type checker reads and --help does not reach."""
    missing = []
    for file in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (ROOT / node.module.split(".")[0]).is_dir():
                source = ROOT.joinpath(*node.module.split("."))
                home = (
                    source.with_suffix(".py")
                    if source.with_suffix(".py").is_file()
                    else source / "__init__.py"
                )
                text = home.read_text(encoding="utf-8") if home.is_file() else ""
                for name in (alias.name for alias in node.names):
                    defined = rf"^(?:async def|def|class|type) {name}\b|^(?:\w+, )*{name}\b.*=|^(?:from|import) .*\b{name}\b|^    {name},$"
                    if not re.search(defined, text, re.MULTILINE) and not (source / f"{name}.py").is_file():
                        missing.append(f"{file.relative_to(ROOT)}: {name} of {node.module}")
    assert missing == []


def test_a_result_page_begins_with_when_and_how():
    pages = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    heads = {page.name: "\n".join(page.read_text(encoding="utf-8").splitlines()[:16]) for page in pages}
    asked = {"date": r"2\d{3}-\d\d-\d\d", "command": r"^```bash|`(?:python|tandem) "}
    lacking = [
        f"{name}: {what}"
        for name, head in heads.items()
        for what, pattern in asked.items()
        if not re.search(pattern, head, re.MULTILINE)
    ]
    assert len(heads) > 30 and lacking == []
