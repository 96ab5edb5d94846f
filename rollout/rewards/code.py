"""Scores of programs: the last fenced block of Python of a response, run against the tests of the data's row.

    Scorer ── score ──> a free place ──> program_runner.py, a process per response ──> the program, once per test

The runner limits time, memory, processes, output and files of the program, in one of ``SANDBOXES``. Only bubblewrap
among them is a security boundary.
"""

import ast
import asyncio
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from configs.schema.reward import CodeReward
from rollout.gathering import TasksToEnd
from rollout.guarded_process import guarded_process
from rollout.records import Prompt, Score, field_of

logger = logging.getLogger(__name__)

RUNNER = Path(__file__).with_name("program_runner.py")
MARGIN_S = 30.0
"""Time for the runner's own work, beyond the deadlines of the tests."""
NO_BOUNDARY = "This is not a security boundary: install bubblewrap, or run in a container"
SANDBOXES = {
    "bubblewrap": "under bubblewrap: without network, and with no files but Python's, the system's and a folder that is removed",
    "namespaces": "in their own namespaces: without network and other processes, but with this user's files. "
    + NO_BOUNDARY,
    "none": "under limits only: with the network, and with this user's files and processes. " + NO_BOUNDARY,
}
"""How programs run, the strictest way first."""
FENCED = re.compile(
    r"^[ \t]*```(?P<language>[^`\n]*)(?:\n|\Z)(?P<program>.*?)(?P<closed>^[ \t]*```|\Z)",
    re.MULTILINE | re.DOTALL,
)
"""It also matches a block without its closing fence, which the response's end cuts off."""
LANGUAGES = ("", "python", "python3", "py")
TRIAL = """
import socket
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
except OSError as error:
    print(error.errno)
"""
"""Without a network there is no route to this address (error 101, ENETUNREACH). Nothing is sent."""
TRIAL_S = 10.0
"""Shortest deadline of a trial: a busy machine must not change the choice."""


class _NotStarted(Exception):
    """No program can be started in this way."""


def find_program(response: str) -> str | None:
    """The last fenced block of Python; None if there is none, or if that block is not closed. The response
    was then cut off inside it, and the earlier blocks no longer count."""
    last = None
    for block in FENCED.finditer(response):
        language = block["language"].strip().lower()
        # A fence with nothing after it.
        is_stray = not (block["closed"] or language or block["program"].strip())
        if language in LANGUAGES and not is_stray:
            last = block
    return last["program"] if last is not None and last["closed"] else None


def parse_tests(value: Any) -> list[dict[str, str]]:
    """The tests of a row, as the runner takes them: ``{"input": ..., "output": ...}`` or ``{"code": ...}``. Raises
    ValueError: the value holds no tests."""
    tests = value if isinstance(value, list) else [value]
    if not tests:
        raise ValueError("holds no tests; add one, or drop the record")
    return [_parse_test(test) for test in tests]


def _parse_test(test: Any) -> dict[str, str]:
    if isinstance(test, str) and test.strip():
        return {"code": test}
    if isinstance(test, Mapping) and all(isinstance(test.get(name), str) for name in ("input", "output")):
        return {"input": test["input"], "output": test["output"]}
    raise ValueError(
        'holds a test that is neither text nor {"input": text, "output": text}; write it in one of these forms'
    )


def check_tests(value: Any) -> None:
    """Refuse tests that no program can pass, or that every program passes. Raises ValueError."""
    for code in (test["code"] for test in parse_tests(value) if "code" in test):
        if _is_json(code):
            raise ValueError("holds JSON as text, which as Python would always pass; write it as a list")
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(code)
                compile(tree, "test", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"holds a test that is not Python ({error}); correct it, or drop the record"
            ) from error
        if not tree.body:
            raise ValueError("holds a test with only comments, which would always pass; write assertions")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class ProgramTests:
    """Runs programs, at most ``num_workers`` at a time; used inside one event loop, after ``start`` until ``close``."""

    def __init__(self, config: CodeReward, *, num_workers: int, name: str = "reward") -> None:
        """name: the config field that holds this reward, for messages."""
        self._config, self._name = config, name
        self._places = asyncio.Semaphore(num_workers)
        self._sandbox = "none"
        self._programs = TasksToEnd()

    async def start(self) -> None:
        """Choose the sandbox, and log which. Raises ValueError if programs cannot be run."""
        self._sandbox = await choose_sandbox(self._config, self._name)
        logger.info("%s: programs run %s", self._name, SANDBOXES[self._sandbox])

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """The score of the response's program by the tests of the prompt's row. A row without usable tests,
        or a program that cannot be started, is a failed sample."""
        program = find_program(response_text)
        if program is None:
            return Score(value=0.0, parts={"no_code": 1.0, "passed": 0.0, "timed_out": 0.0})
        try:
            tests = parse_tests(field_of(prompt.row or {}, self._config.tests_field))
        except LookupError:
            return Score(error=f"its row has no field `{self._config.tests_field}`")
        except ValueError as error:
            return Score(error=f"field `{self._config.tests_field}` {error}")
        return await self._programs.start(self._score(program, tests))

    async def close(self) -> None:
        """End all programs; calls under way raise ``CancelledError``. Safe to call twice."""
        await self._programs.end()

    async def _score(self, program: str, tests: list[dict[str, str]]) -> Score:
        async with self._places:
            try:
                outcomes = await run_program(self._config, self._sandbox, program, tests)
            except _NotStarted as error:
                return Score(error=str(error))
        share = outcomes.count("passed") / len(tests)
        value = share if self._config.score == "fraction" else float(share == 1.0)
        parts = {"no_code": 0.0, "passed": share, "timed_out": float("timed_out" in outcomes)}
        return Score(value=value, parts=parts)


async def choose_sandbox(config: CodeReward, name: str) -> str:
    """The strictest allowed sandbox that works here, found by trials. Raises ValueError: none works."""
    reason = ""
    for sandbox in SANDBOXES if config.sandbox == "auto" else [config.sandbox]:
        try:
            await _try_sandbox(config, sandbox)
        except _NotStarted as error:
            reason = str(error)
        else:
            return sandbox
    if config.sandbox == "bubblewrap":
        raise ValueError(
            f"{name}.sandbox=bubblewrap does not work here: {reason}; install bubblewrap and allow user namespaces, or use auto"
        )
    raise ValueError(
        f"{name}: no program can be run here: {reason}; raise {name}.memory_mib, or fix the reason"
    )


async def _try_sandbox(config: CodeReward, sandbox: str) -> None:
    program = "print(101)" if sandbox == "none" else TRIAL
    config = config.model_copy(update={"timeout_s": max(TRIAL_S, config.timeout_s)})
    outcomes = await run_program(config, sandbox, program, [{"input": "", "output": "101"}])
    if outcomes != ["passed"]:
        raise _NotStarted(f"a trial program has {outcomes[0].replace('_', ' ')}")


async def run_program(
    config: CodeReward, sandbox: str, program: str, tests: Sequence[Mapping[str, str]]
) -> list[str]:
    """Outcomes of the tests that were run. Raises _NotStarted: the program cannot be started."""
    bwrap = shutil.which("bwrap")
    if sandbox == "bubblewrap" and bwrap is None:
        raise _NotStarted("there is no program bwrap on PATH")
    job = {
        "program": program,
        "tests": tests,
        "sandbox": sandbox,
        "bwrap": bwrap,
        "bwrap_version": _version_of(bwrap) if sandbox == "bubblewrap" and bwrap else [],
        "python": sys.executable,
        "python_folders": _python_folders(),
        "stop_at_failure": config.score == "all",
        **config.model_dump(include={"timeout_s", "memory_mib", "max_processes"}),
    }
    variables = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    command = [sys.executable, "-I", "-S", "-B", str(RUNNER)]
    try:
        async with guarded_process(command, prefix="tandem-code-", variables=variables) as runner:
            assert runner.stdin is not None and runner.stdout is not None
            async with asyncio.timeout(len(tests) * config.timeout_s + MARGIN_S):
                runner.stdin.write(json.dumps(job).encode() + b"\n")
                await runner.stdin.drain()
                answer = json.loads(await runner.stdout.read() or b"{}")
    except TimeoutError:
        raise _NotStarted("the process that runs the program did not answer in time") from None
    except OSError as error:
        raise _NotStarted(f"the process that runs the program cannot be used: {error}") from error
    if "outcomes" not in answer:
        raise _NotStarted(answer.get("error", "the process that runs the program ended without an answer"))
    return answer["outcomes"]


@cache
def _version_of(bwrap: str) -> list[int]:
    """The version of bubblewrap, such as [0, 8, 0]. Empty if it prints none, or is setuid and so refuses some
    options."""
    with suppress(OSError, subprocess.SubprocessError):
        if os.stat(bwrap).st_mode & stat.S_ISUID:
            return []
        asked = subprocess.run(
            [bwrap, "--version"], capture_output=True, text=True, timeout=TRIAL_S, check=False
        )
        return [int(part) for part in re.findall(r"\d+", asked.stdout)]
    return []


def _python_folders() -> list[str]:
    """Where this interpreter and its packages lie."""
    real = Path(sys.executable).resolve().parent.parent
    return list(dict.fromkeys([sys.prefix, sys.base_prefix, str(real)]))
