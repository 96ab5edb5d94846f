"""Programs of responses in real processes: right and wrong ones, and ones that hang, hog, fork, hide and print forever."""

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from pydantic import TypeAdapter, ValidationError

from configs.schema.reward import AnyReward, CodeReward, MathVerifyReward, WeightedReward
from rollout.records import FinishReason, Prompt, Score
from rollout.rewards import code, program_runner
from rollout.rewards.code import (
    SANDBOXES,
    ProgramTests,
    check_tests,
    choose_sandbox,
    find_program,
    parse_tests,
    run_program,
)
from rollout.rewards.scorer import Scorer, check_reward, may_read_rows
from rollout.tasks.files import check_field

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
LATE_S = 1.5
"""Deadline of a program that is meant to be late."""
AMPLE_S = 60.0
EACH = pytest.mark.parametrize("sandbox", SANDBOXES)


@cache
def works(sandbox: str) -> str:
    """Why a sandbox does not work here; an empty text where it does."""
    config = CodeReward(type="code")
    try:
        asyncio.run(code._try_sandbox(config, sandbox))
    except code._NotStarted as error:
        return str(error)
    return ""


def config_of(**fields) -> CodeReward:
    return CodeReward(**({"type": "code", "timeout_s": AMPLE_S} | fields))


def outcomes(sandbox: str, program: str, *tests: object, **fields) -> list[str]:
    """Of the program in a sandbox, and no process or folder is left."""
    if reason := works(sandbox):
        pytest.skip(f"{sandbox} does not work here: {reason}")
    tests = tuple(parse_tests(list(tests or ["assert True"])))
    found = asyncio.run(
        asyncio.wait_for(run_program(config_of(**fields), sandbox, program, tests), DEADLINE_S)
    )
    assert leftovers() == []
    return found


def leftovers() -> list[str]:
    """Folders, and processes that have one on their command line, whoever their parent is now."""
    folder = tempfile.gettempdir()
    commands = (" ".join(cmdline(process)) for process in psutil.process_iter())
    return [*os.listdir(folder), *(command for command in commands if folder in command)]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    """Of the temporary folders: other tests make some at the same time."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


# --- programs and their tests
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("Try\n```python\na\n```\nor better\n  ```py\nb\nc\n  ```\nDone.", "b\nc\n"),
        ("```\na\n```\n```output\nb\n```", "a\n"),
        ("```Python3 \r\na\r\n```", "a\r\n"),
        ("```python\na\n```\n```python\ncut off", None),
        ("```python\na\n```\nNo:\n```\ncut off", None),
        ("```python\na\n```\n  ```python", None),
        ("```python\na\n```\n```output\ncut off", "a\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n``` \n", "a\n"),
        ("```python\na\n```\n```and``` so on", "a\n"),
        ("```python\ncut off", None),
        ("a = 1", None),
        ("```python a ```", None),
        ("```cpp\na\n```", None),
        ("", None),
    ],
)
def test_the_last_fenced_block_of_python_is_the_program(response, program):
    assert find_program(response) == program


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ("assert f(1) == 2", [{"code": "assert f(1) == 2"}]),
        (["assert a", "assert b"], [{"code": "assert a"}, {"code": "assert b"}]),
        ([{"input": "1", "output": "2", "more": 3}], [{"input": "1", "output": "2"}]),
        ({"input": "", "output": ""}, [{"input": "", "output": ""}]),
    ],
)
def test_forms_of_tests(value, tests):
    assert parse_tests(value) == tests
    check_tests(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "holds no tests"),
        (None, "neither text nor"),
        (" ", "neither text nor"),
        ([{"input": "1"}], "neither text nor"),
        ([{"input": "1", "output": 2}], "neither text nor"),
        ("assert f(", "is not Python"),
        ("return 1", "is not Python"),
        ("#### 2", "with only comments"),
        ('[{"input": "1", "output": "2"}]', "holds JSON as text"),
    ],
)
def test_tests_that_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        check_tests(value)


def test_a_row_without_usable_tests_is_named(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"info": {"tests": "assert 1"}}, {"info": {"tests": ""}}, {"other": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        ValueError, match=r"data.jsonl:line 2: field `info.tests` holds a test that is neither"
    ):
        check_field(path, "info.tests", check_tests)
    path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[2]) + "\n")
    with pytest.raises(
        ValueError, match=r"data.jsonl:line 2: field `info.tests` is missing; this record has `other`"
    ):
        check_field(path, "info.tests", check_tests)


@EACH
def test_programs_that_read_and_print(sandbox):
    program = "import sys\nfor line in sys.stdin:\n    print(2 * int(line), end='  \\n')\nprint()"
    tests = [
        {"input": "1\n20\n", "output": "2\n40"},
        {"input": "", "output": ""},
        {"input": "3", "output": "7"},
    ]
    assert outcomes(sandbox, program, *tests) == ["passed", "passed", "failed"]
    assert outcomes(sandbox, program, *tests[::-1], score="all") == ["failed"]
    assert outcomes(sandbox, program, *tests[::-1], score="fraction") == ["failed", "passed", "passed"]


@EACH
def test_programs_with_assertions(sandbox):
    tests = ["assert f(1) == 2", "assert f(2) == 9", "def check(g):\n    assert g(0) == 1\ncheck(f)"]
    program = (
        "from __future__ import annotations\ndef f(x: int) -> int:\n    print('noise')\n    return x + 1"
    )
    assert outcomes(sandbox, program, *tests, score="fraction") == ["passed", "failed", "passed"]


@pytest.mark.parametrize(
    "program",
    ["exit(0)", "import os; os._exit(0)", "def f(:", "1 / 0", "input()", "import sys; sys.stdout.close()"],
)
def test_a_program_that_ends_before_its_assertions_fails(program):
    assert outcomes("none", program, "assert False") == ["failed"]


@pytest.mark.parametrize("crash", ["1 / 0", "import os; os.kill(os.getpid(), 9)"])
def test_a_right_output_does_not_excuse_a_crash(crash):
    assert outcomes("none", f"print(1, flush=True)\n{crash}", {"input": "", "output": "1"}) == ["failed"]


def test_blanks_before_an_output_count():
    assert outcomes("none", "print(' 1')", {"input": "", "output": "1"}) == ["failed"]


# --- limits
# ----------------------------------------------------------------------------------------------------------------------


@EACH
def test_a_late_program_is_ended_and_the_tests_after_it_are_not_run(sandbox):
    for program in ("while True:\n    pass", "import time\ntime.sleep(600)"):
        began = time.monotonic()
        assert outcomes(sandbox, program, *["assert True"] * 9, timeout_s=LATE_S, score="fraction") == [
            "timed_out"
        ]
        assert time.monotonic() - began < 9 * LATE_S + AMPLE_S / 2


@EACH
def test_memory_is_limited(sandbox):
    program = "try:\n    x = bytearray({} * 2**20)\nexcept MemoryError:\n    raise SystemExit(1)"
    assert outcomes(sandbox, program.format(20), memory_mib=256) == ["passed"]
    assert outcomes(sandbox, program.format(400), memory_mib=256) == ["failed"]


FILES_IN_MEMORY = """
import os, resource
path = f"/dev/shm/{NAME}"
assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 64 * 2**20
try:
    for number in range(2):
        with open(f"{path}-{number}", "wb") as file:
            for _ in range(40):
                file.write(b"x" * 2**20)
except OSError as error:
    raise SystemExit(error.errno != {ERROR})
finally:
    print("tried")
raise SystemExit("80 MiB")
"""


@pytest.mark.parametrize("sandbox", ["bubblewrap", "namespaces"])
def test_files_in_memory_are_limited_and_gone_with_the_program(sandbox, tmp_path):
    """The kernel counts them as no process's memory."""
    program = FILES_IN_MEMORY.replace("{NAME}", tmp_path.name).replace("{ERROR}", str(errno.ENOSPC))
    assert outcomes(sandbox, program, {"input": "", "output": "tried"}) == ["passed"]
    assert [*Path("/dev/shm").glob(f"{tmp_path.name}*")] == []


@pytest.mark.parametrize("sandbox", ["bubblewrap", "namespaces"])
def test_a_program_makes_no_namespaces_in_which_it_could_mount_more_memory(sandbox):
    program = "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) != 0"
    assert outcomes(sandbox, program) == ["passed"]


CALLS = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
for name, arguments in {
    "memfd_create": (b"x", 0), "shmget": (0, 4096, 0o1600), "semget": (0, 1, 0o1600), "msgget": (0, 0o1600)
}.items():
    answer = getattr(libc, name)(*arguments)
    assert answer == -1 and ctypes.get_errno() == errno.EPERM, name
try:
    socket.socket(socket.AF_UNIX)
except PermissionError:
    socket.socket(socket.AF_INET).close()
    for one in socket.socketpair():
        one.close()
    print("refused")
"""


@EACH
def test_memory_without_a_limit_and_sockets_with_a_path_are_refused(sandbox):
    """Memory of these calls is no process's own; processes of this machine listen at paths."""
    assert outcomes(sandbox, CALLS, {"input": "", "output": "refused"}) == ["passed"]


def test_numbers_of_another_machine_are_not_guessed(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    assert program_runner.refused_calls() == b""


def test_a_bubblewrap_that_knows_no_size_leaves_no_files_in_memory(monkeypatch):
    monkeypatch.setattr(code, "_version_of", lambda bwrap: [0, 4, 0])
    program = (
        "import errno\n"
        "for path in ('/dev/shm/x', '/dev/x'):\n"
        "    try:\n"
        "        open(path, 'w')\n"
        "    except OSError as error:\n"
        "        assert error.errno == errno.EROFS\n"
        "        continue\n"
        "    raise SystemExit(path)\n"
        "open('/dev/null', 'w').write('x')\n"
    )
    assert outcomes("bubblewrap", program) == ["passed"]


@EACH
def test_processes_of_a_program_share_memory_and_locks(sandbox):
    program = (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    lock = multiprocessing.get_context('fork').Lock()\n"
        "    assert lock.acquire(timeout=5)\n"
    )
    assert outcomes(sandbox, program) == ["passed"]


@EACH
def test_a_program_that_prints_for_ever_is_ended(sandbox):
    tests = [{"input": "", "output": "x" * 10}]
    assert outcomes(sandbox, "while True:\n    print('x' * 10_000)", *tests) == ["too_much_output"]


@EACH
def test_a_program_that_forks_for_ever_is_ended(sandbox):
    program = (
        "import os, time\ntry:\n    while True:\n        os.fork()\nexcept OSError:\n    time.sleep(600)"
    )
    assert outcomes(sandbox, program, max_processes=8, timeout_s=20.0)[0] in (
        "too_many_processes",
        "timed_out",
    )


@EACH
def test_a_program_may_have_one_process(sandbox):
    program = "import os, time\nif os.fork() == 0:\n    time.sleep(600)\nos.wait()"
    assert outcomes(sandbox, "import time\ntime.sleep(0.2)", max_processes=1) == ["passed"]
    assert outcomes(sandbox, program, max_processes=1)[0] in ("too_many_processes", "failed")  # fork may fail


@EACH
def test_a_daemon_is_ended(sandbox):
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    assert outcomes(sandbox, program) == ["passed"]  # and `outcomes` finds no process


@EACH
def test_a_large_file_is_refused_and_the_folder_is_empty(sandbox):
    program = "import os\nassert os.listdir('.') == ['program.py']\nopen('x', 'wb').write(b'1' * {})"
    assert (
        outcomes(sandbox, program.format(10), "assert open('x').read() == '1' * 10", "assert True")
        == ["passed"] * 2
    )
    assert outcomes(sandbox, program.format(2**26 + 2**20)) == ["failed"]


DEEP = """
import os
for _ in range(3000):
    os.mkdir("deeper")
    os.chdir("deeper")
"""


@EACH
def test_folders_that_are_nested_deeper_than_pythons_stack_are_removed(sandbox):
    assert outcomes(sandbox, DEEP) == ["passed"]


@EACH
def test_a_program_gets_no_variable_of_the_run(sandbox, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    program = "import os\nassert 'JUDGE_KEY' not in os.environ and os.environ['HOME'] == os.getcwd()"
    assert outcomes(sandbox, program) == ["passed"]


# --- sandboxes
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sandbox", ["bubblewrap", "namespaces"])
def test_there_is_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert outcomes(sandbox, program) == ["failed"]
        assert outcomes("none", program) == ["passed"]


@pytest.mark.parametrize("sandbox", ["bubblewrap", "namespaces"])
def test_other_processes_are_out_of_reach(sandbox):
    program = (
        f"import os\npid = {os.getpid()}\n"
        "for reach in (lambda: os.kill(pid, 0), lambda: open(f'/proc/{pid}/environ', 'rb').read()):\n"
        "    try:\n"
        "        reach()\n"
        "    except OSError:\n"
        "        continue\n"
        "    raise SystemExit('it is in reach')\n"
    )
    assert outcomes(sandbox, program) == ["passed"]


def test_bubblewrap_hides_files_and_lets_none_be_written(tmp_path):
    (tmp_path / "key.yaml").write_text("secret")
    program = (
        "import os\n"
        f"assert not os.path.exists({str(tmp_path / 'key.yaml')!r})\n"
        "for path in ('/y', '/usr/y', '/etc/y'):\n"
        "    try:\n"
        "        open(path, 'w')\n"
        "    except OSError:\n"
        "        continue\n"
        "    raise SystemExit(path)\n"
    )
    assert outcomes("bubblewrap", program) == ["passed"]


def test_the_strictest_sandbox_that_works_is_chosen_and_told():
    best = next(sandbox for sandbox in SANDBOXES if not works(sandbox))
    told: list[str] = []
    check_reward(config_of(), tell=told.append)
    assert told == [f"reward: programs run {SANDBOXES[best]}"]
    assert ("not a security boundary" in told[0]) == (best != "bubblewrap")
    assert asyncio.run(choose_sandbox(config_of(sandbox="none"), "reward")) == "none"


def test_a_trial_takes_its_time_whatever_a_program_may(monkeypatch):
    asyncio.run(code._try_sandbox(config_of(timeout_s=0.001), "none"))
    monkeypatch.setattr(code, "run_program", AsyncMock(return_value=["timed_out"]))
    with pytest.raises(code._NotStarted, match="a trial program has timed out"):
        asyncio.run(code._try_sandbox(config_of(), "none"))


def test_bubblewrap_is_refused_where_it_does_not_work(monkeypatch, tmp_path):
    config = WeightedReward(parts={"tests": config_of(sandbox="bubblewrap")})
    monkeypatch.setenv("PATH", "")
    match = r"reward.parts.tests.sandbox=bubblewrap does not work here: there is no program bwrap on PATH; install"
    with pytest.raises(ValueError, match=match):
        check_reward(config)
    assert asyncio.run(choose_sandbox(config_of(), "reward")) != "bubblewrap"
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"does not work here: bwrap: Creating new namespace failed; install"
    ):
        check_reward(config)


@EACH
@pytest.mark.parametrize(
    "words", ["bwrap: no", "tandem: the program cannot be started: no", '{"error": "no"}']
)
def test_a_program_cannot_say_that_it_was_not_started(sandbox, words):
    """It would count as a failed reward, and not as a wrong answer, and its words would go to the console."""
    say = f"import os, sys\nsys.stderr.write({words!r})\n"
    tell = f"for fd in range(3, 64):\n    try:\n        os.write(fd, {words.encode()!r})\n    except OSError:\n        pass\n"
    assert outcomes(sandbox, f"{say}{tell}sys.exit(1)") == ["failed"]


def test_bubblewrap_that_cannot_run_the_interpreter_says_so(tmp_path):
    """The folder of the test lies outside of what a program sees."""
    if reason := works("bubblewrap"):
        pytest.skip(reason)
    job = {
        "program": "", "tests": parse_tests("assert True"), "sandbox": "bubblewrap", "bwrap": shutil.which("bwrap"),
        "bwrap_version": [0, 8],
        "python": str(tmp_path / "python"), "python_folders": [], "stop_at_failure": True, "timeout_s": AMPLE_S,
        "memory_mib": 256, "max_processes": 1,
    }  # fmt: skip
    # Its input stays open: the end of it would end the program.
    with subprocess.Popen(
        [sys.executable, "-I", str(code.RUNNER)], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as runner:
        assert runner.stdin is not None and runner.stdout is not None
        runner.stdin.write(json.dumps(job).encode() + b"\n")
        runner.stdin.flush()
        answer = json.loads(runner.stdout.readline())
    assert answer == {"error": f"bwrap: execvp {tmp_path}/python: No such file or directory"}


# --- the reward
# ----------------------------------------------------------------------------------------------------------------------

RIGHT, HALF = "```python\ndef f(x): return x + 1\n```", "```python\ndef f(x): return 3\n```"


def prompt_of(**row: object) -> Prompt:
    return Prompt(prompt_id="i", token_ids=[1], text="p", reference="r", row=row)


def scores_of(config: AnyReward, *responses: str, prompt: Prompt | None = None) -> list[Score]:
    prompt = prompt or prompt_of(tests=["assert f(1) == 2", "assert f(2) == 3"])

    async def collect():
        async with asyncio.timeout(DEADLINE_S), Scorer(config, max_new_tokens=9, num_workers=2) as scorer:
            asked = (
                scorer.score(prompt, r, num_tokens=1, finish_reason=FinishReason.STOP) for r in responses
            )
            return await asyncio.gather(*asked)

    scores = asyncio.run(collect())
    assert leftovers() == []
    return scores


@pytest.mark.parametrize(("score", "half"), [("all", 0.0), ("fraction", 0.5)])
def test_all_tests_or_their_share(score, half):
    """``HALF`` fails the first test and passes the second, which runs only where shares count."""
    right, some, none = scores_of(config_of(score=score, sandbox="none"), RIGHT, HALF, "I cannot.")
    assert right == Score(value=1.0, parts={"no_code": 0.0, "passed": 1.0, "timed_out": 0.0}, correct=True)
    assert some == Score(value=half, parts={"no_code": 0.0, "passed": half, "timed_out": 0.0})
    assert none == Score(value=0.0, parts={"no_code": 1.0, "passed": 0.0, "timed_out": 0.0})


def test_tests_that_were_not_run_did_not_pass(monkeypatch):
    async def stop_at_the_second(*job) -> list[str]:
        return ["passed", "timed_out"]

    monkeypatch.setattr(code, "run_program", stop_at_the_second)
    programs = ProgramTests(CodeReward(type="code", score="fraction"), num_workers=1)
    found = asyncio.run(programs.score(prompt_of(tests=["assert True"] * 4), RIGHT))
    assert found == Score(value=0.25, parts={"no_code": 0.0, "passed": 0.25, "timed_out": 1.0})
    assert not programs._programs._running, "a score that is there is forgotten"


@pytest.mark.parametrize(
    ("error", "told"), [(TimeoutError(), "did not answer in time"), (OSError("no memory"), "used: no memory")]
)
def test_a_runner_that_fails_is_a_failed_sample(monkeypatch, error, told):
    monkeypatch.setattr(code, "guarded_process", Mock(side_effect=error))
    programs = ProgramTests(config_of(), num_workers=1)
    found = asyncio.run(programs.score(prompt_of(tests=["assert True"]), RIGHT))
    assert found.value == 0.0 and found.error and told in found.error


def test_a_part_of_a_sum_reads_nested_tests_and_decides():
    parts = {"tests": config_of(tests_field="info.tests", weight=2.0), "answer": MathVerifyReward(weight=0.0)}
    config = WeightedReward(parts=parts)
    [score] = scores_of(config, RIGHT, prompt=prompt_of(info={"tests": "assert f(1) == 2"}))
    assert (score.value, score.correct, score.parts["tests/passed"]) == (2.0, True, 1.0)
    assert may_read_rows(config)


def test_a_row_without_tests_is_a_failed_sample():
    [missing] = scores_of(config_of(sandbox="none"), RIGHT, prompt=prompt_of(other=1))
    [empty] = scores_of(config_of(sandbox="none"), RIGHT, prompt=prompt_of(tests=[]))
    [no_row] = scores_of(config_of(sandbox="none"), RIGHT, prompt=replace(prompt_of(), row=None))
    assert missing == no_row and missing.value == empty.value == 0.0
    assert "its row has no field `tests`" in missing.error and "field `tests` holds no tests" in empty.error


def sleepers() -> list[psutil.Process]:
    """Processes below this one that have reached their program."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "/program.py" in " ".join(cmdline(child)[-1:])]


SLEEPS = "```python\nimport time\ntime.sleep(600)\n```"


@pytest.mark.parametrize("end", ["cancel", "close"])
@EACH
def test_no_program_outlives_its_score(end, sandbox, monkeypatch):
    if reason := works(sandbox):
        pytest.skip(f"{sandbox} does not work here: {reason}")

    async def choose(config: CodeReward, name: str) -> str:
        return sandbox

    monkeypatch.setattr(code, "choose_sandbox", choose)

    async def go():
        async with asyncio.timeout(DEADLINE_S):
            async with Scorer(config_of(timeout_s=500.0), max_new_tokens=9, num_workers=1) as scorer:
                ask = scorer.score
                prompt = prompt_of(tests="assert True")
                late = [
                    asyncio.ensure_future(ask(prompt, SLEEPS, num_tokens=1, finish_reason=FinishReason.STOP))
                    for _ in range(2)
                ]
                while not sleepers():
                    await asyncio.sleep(0.01)
                if end == "cancel":
                    late[0].cancel()
                    await asyncio.wait(late[:1])
                    while not sleepers():  # its place is free
                        await asyncio.sleep(0.01)
                await scorer.close()
                assert leftovers() == []
                await asyncio.wait(late)
                assert all(task.cancelled() for task in late)

    asyncio.run(go())


@EACH
def test_programs_end_with_a_run_that_is_killed(sandbox):
    if reason := works(sandbox):
        pytest.skip(f"{sandbox} does not work here: {reason}")
    script = (
        f"import asyncio, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from configs.schema.reward import CodeReward; from rollout.rewards.code import run_program\n"
        "program = 'import time\\ntime.sleep(600)'\n"
        f"config = CodeReward(type='code', timeout_s=500.0)\n"
        f"asyncio.run(run_program(config, {sandbox!r}, program, [{{'code': 'assert True'}}]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        tree: list[psutil.Process] = []
        deadline = time.monotonic() + DEADLINE_S
        while not any("program.py" in " ".join(cmdline(child)[-1:]) for child in tree):
            assert time.monotonic() < deadline and process.poll() is None
            tree = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(tree, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_mib": 1}, "use at least 64"),
        ({"sandbox": "docker"}, "'auto', 'bubblewrap' or 'none'"),
        ({"score": "any"}, "'all' or 'fraction'"),
        ({"timeout_s": 0}, "greater than 0"),
    ],
)
def test_blocks_that_the_schema_refuses(fields, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnyReward).validate_python({"type": "code"} | fields)
