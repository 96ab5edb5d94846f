"""The evaluator against Python's own parser, answers by hand, and reward code that raises, hangs, dies or
talks nonsense."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from configs.schema.reward import (
    AnyReward,
    CodeReward,
    CountdownReward,
    FunctionReward,
    Gsm8kReward,
    MathVerifyReward,
    OverlongPenalty,
    WeightedReward,
)
from rollout.records import FinishReason, Prompt, Score
from rollout.rewards import countdown_reward
from rollout.rewards.arithmetic import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    ExpressionError,
    evaluate,
    format_problem,
    parse_problem,
)
from rollout.rewards.function import import_reward_function
from rollout.rewards.length import overlong_penalty
from rollout.rewards.math_answers import (
    NUMBER,
    _first_number,
    _last_number,
    _to_decimal,
    gsm8k_reward,
    math_verify_reward,
)
from rollout.rewards.scorer import Scorer, _worker_pool, check_reward, default_num_workers, may_read_rows
from rollout.rewards.worker import START_TIMEOUT_S, Job, WorkerStartError, _math_verify, _Worker, end_tree
from rollout.tasks import Problem

# --- the evaluator
# -----------------------------------------------------------------------------------------------------------------


def reference_evaluate(text: str) -> tuple[int, list[int]] | None:
    """(value, numbers) by the grammar in ``evaluate``'s docstring, rule after rule; None where the text is not of it."""
    numbers: list[int] = []

    def read_sum(text: str) -> tuple[int, str]:
        value, rest = read_product(text)
        while rest[:1] in ("+", "-"):
            right, after = read_product(rest[1:])
            value, rest = value + right if rest[0] == "+" else value - right, after
        return value, rest

    def read_product(text: str) -> tuple[int, str]:
        value, rest = read_factor(text)
        while rest[:1] == "*":
            right, rest = read_factor(rest[1:])
            value *= right
        return value, rest

    def read_factor(text: str) -> tuple[int, str]:
        if text[:1] == "(":
            value, rest = read_sum(text[1:])
            if rest[:1] != ")":
                raise ValueError("not closed")
            return value, rest[1:]
        number = re.match("0|[1-9][0-9]*", text)
        if number is None:
            raise ValueError("no number")
        numbers.append(int(number[0]))
        return numbers[-1], text[number.end() :]

    try:
        value, rest = read_sum(text)
    except ValueError:
        return None
    return None if rest else (value, numbers)


def ours(text: str) -> tuple[int, list[int]] | None:
    try:
        result = evaluate(text)
    except ExpressionError:
        return None
    return result.value, list(result.numbers)


EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join), inner.map(lambda text: f"({text})")
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_expressions_have_the_value_that_the_grammar_gives_them(text):
    assert ours(text) == reference_evaluate(text) is not None


@given(EXPRESSIONS, st.data())
def test_mutated_expressions_are_accepted_exactly_where_the_grammar_does(text, data):
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(text)))
        text = (
            text[:i]
            + data.draw(st.sampled_from(["", *"0123456789+-*() ./:=a_\n²"]))
            + text[i + data.draw(st.integers(0, 2)) :]
        )
    assert ours(text) == reference_evaluate(text)


@given(st.text("0123456789+-*()", max_size=12))
@example("1**2")
@example("(1)(2)")
@example("1--2")
@example("+1")
@example("()")
@example("00")
@example("007+1")
@example("")
def test_any_text_of_our_characters(text):
    assert ours(text) == reference_evaluate(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("14-(13-2)", 3), ("2+3*4", 14), ("(2+3)*4", 20), ("10-3-2", 5), ("2*3*4-1", 23), ("((7))", 7)],
)
def test_values_by_hand(text, value):
    assert evaluate(text).value == value


@pytest.mark.parametrize(
    "text",
    [
        "1+1 ",
        " 1+1",
        "1 +1",
        "1+1:",
        "1=1",
        "-1+2",
        "(-1)",
        "01+1",
        "1/1",
        "1.0",
        "1e3",
        "٣",
        "1²",
        "1+",
        "1\n",
        "__import__('os')",
        "1_0",
    ],
)
def test_refused_texts(text):
    with pytest.raises(ExpressionError):
        evaluate(text)


@pytest.mark.parametrize(
    "text", ["-" * (MAX_CHARACTERS - 1) + "1", "1" + "**1" * 85, "1" + "(1)" * 85, "1-(-1)" + "-1" * 125]
)
def test_no_text_takes_more_of_the_stack_than_a_caller_has(text):
    """A sample role that raised RecursionError would end."""

    def far_down(steps: int):
        return far_down(steps - 1) if steps else evaluate(text)

    with pytest.raises(ExpressionError):
        far_down(500)


def test_limits_of_length_and_depth():
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    with pytest.raises(ExpressionError, match="nested deeper"):
        evaluate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))
    assert evaluate("9" * MAX_CHARACTERS).value == 10**MAX_CHARACTERS - 1
    for text in ("9" * (MAX_CHARACTERS + 1), "(" * 1_000_000, "1" + "*9" * 1_000_000):
        with pytest.raises(ExpressionError, match="characters, more than"):
            evaluate(text)


# --- Countdown
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "value", "valid"),
    [
        ("14-(13-2)", 1, 1),
        ("2-13+14", 1, 1),
        ("14-13+2", 1, 1),
        ("14+13+2", 0, 1),
        ("14-13-2", 0, 1),
        ("1+2", 0, 0),  # right value, other numbers
        ("14-13+2*1", 0, 0),
        ("14-(13-2)+2-2", 0, 0),  # a number twice
        ("3", 0, 0),
        ("14-(13-2", 0, 0),
        ("", 0, 0),
    ],
)
def test_countdown(response, value, valid):
    assert countdown_reward("2 13 14=3", response) == Score(value=value, parts={"valid": valid})


def test_countdown_counts_repeated_numbers():
    assert countdown_reward("2 2 3=7", "2*2+3").value == 1
    assert countdown_reward("2 2 3=9", "2*3+3").value == 0


@pytest.mark.parametrize("reference", ["", "1 2 3", "=3", "1 2=", "1 x=3", "1 2=3=4", "1 -2=3"])
def test_a_reference_that_is_no_problem(reference):
    with pytest.raises(ValueError, match="not a Countdown problem"):
        countdown_reward(reference, "1+2")


@given(st.lists(st.integers(1, 99), min_size=1, max_size=5), st.integers(1, 999))
def test_problems_parse_back(numbers, target):
    assert parse_problem(format_problem(numbers, target)) == (tuple(numbers), target)


# --- mathematics
# -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("#### 1002", True),
        ("It is 3. #### 1,002", True),
        ("The answer is $1,002.", True),
        ("1 and then 1002.00", True),
        ("so 2004/2 = 1002", True),
        (r"\boxed{1002}", True),
        ("2000-1002", True),
        ("answer: -1002", False),
        ("answer: -$1,002", False),
        ("1002 #### 1003", False),
        ("#### 1003 or 1002", False),
        ("1002 ####", False),
        ("1002, 7", False),
        ("10020", False),
        ("1,0020", False),
        ("", False),
        ("none", False),
    ],
)
def test_gsm8k_by_hand(response, correct):
    assert gsm8k_reward("1002", response).value == float(correct)


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["#### {}", "is {}.", "so x = {}", "${}", "1, 2 and {}!"])
)
def test_gsm8k_finds_its_own_numbers_however_written(number, form):
    written = form.format(f"{number:,}")
    assert gsm8k_reward(str(number), written).value == 1
    assert gsm8k_reward(str(number + 1), written).value == 0


TEXTS = st.text(alphabet="0123456789,.$-#) x٣", max_size=200) | st.text(max_size=30)


@given(TEXTS, st.integers(0, 300))
@example("1,234", 1)
@example("12,345,6789", 0)
@example("x-.5-", 70)
@example("-" * 100, 100)
@example("0" * 63 + ",000", 0)
def test_numbers_are_those_of_a_scan_of_the_whole_text(text, behind):
    """The first and the last of all matches from left to right, by the same pattern; ``behind`` characters without a
    number may follow, before which a search from the end must come back."""
    for whole in (text, text + "y" * behind, text + " ," * behind):
        matches = [_to_decimal(match) for match in NUMBER.finditer(whole)]
        assert _last_number(whole) == (matches[-1] if matches else None)
        assert _first_number(whole) == (matches[0] if matches else None)


def test_the_last_number_of_a_long_response_is_found_at_its_end():
    text = "so 1,234 - 5 is 1,229. " * 10_000

    def seconds() -> float:
        began = time.process_time()
        assert _last_number(text) == 1229
        return time.process_time() - began

    began = time.process_time()
    assert list(NUMBER.finditer(text))
    assert min(seconds() for _ in range(3)) < (time.process_time() - began) / 20


def test_gsm8k_finds_a_zero():
    assert gsm8k_reward("1", "#### 0") == Score(value=0.0, parts={"found": 1.0})


@pytest.mark.parametrize(
    "reference", ["72", "$72", "48/2 = 24, and 48 + 24 = <<48+24=72>>72\n#### 72", "x = 72 apples"]
)
def test_gsm8k_compares_with_the_only_number_of_the_reference(reference):
    """Of a whole solution, too, which a file of `task.type: jsonl` may have as its answer."""
    assert [gsm8k_reward(reference, f"#### {number}").value for number in (72, 48, 24)] == [1, 0, 0]


@pytest.mark.parametrize(
    ("reference", "what"),
    [("eleven", "no number"), ("1/2", "several"), ("5 and 7", "several"), ("12 #### x", "no number")],
)
def test_gsm8k_needs_one_number_to_compare_with(reference, what):
    with pytest.raises(ValueError, match=f"holds {what}"):
        gsm8k_reward(reference, "11")


@pytest.mark.parametrize(
    ("reference", "response", "correct"),
    [
        ("3/4", "It is $0.75$", True),
        (r"\frac{3}{4}", r"Hence \boxed{\frac{6}{8}}.", True),
        ("$x+1$", "$1+x$", True),
        ("12", "the answer is 12", True),
        ("12", "the answer is 13", False),
        ("12", "no idea", False),
        (r"\sqrt{2}", r"$\sqrt{2}$", True),
        ("the answer is $3$", "3", True),
        ("x<3", r"\boxed{(-\infty,3)}", True),  # but no set's relation
        (r"(-\infty,3)", r"\boxed{x<3}", False),
    ],
)
def test_math_verify(reference, response, correct):
    assert math_verify_reward(reference, response).value == float(correct)


def test_a_worker_of_math_verify_reads_the_response_and_not_the_reference():
    assert _math_verify("p", "no idea", "12") == (0.0, {"found": 0.0})
    assert _math_verify("p", "the answer is 12", "12") == (1.0, {"found": 1.0})
    assert _math_verify("p", "the answer is 13", "12") == (0.0, {"found": 1.0})


def test_math_verify_names_a_reference_it_cannot_read():
    with pytest.raises(ValueError, match="cannot read the reference"):
        math_verify_reward("$$", "1")


# --- the user's function
# -----------------------------------------------------------------------------------------------------------

USER_MODULE = '''
import asyncio, os, subprocess, sys, time
import numpy

def score(prompt_text, response_text, reference):
    """What the response asks for."""
    print("said by reward code")
    if response_text == "raise":
        raise KeyError("lost")
    if response_text == "exit":
        sys.exit(3)
    if response_text == "die":
        os._exit(7)
    if response_text == "fork":
        child = os.fork()
        if not child:
            raise KeyError("lost")
        os.waitpid(child, 0)
        return 0.25
    if response_text == "hang":
        while True:
            time.sleep(60)
    if response_text == "hang in C":
        return float(str(9 ** 9 ** 9)[0])
    if response_text.startswith("leave"):
        child = subprocess.Popen(["sleep", "600"])
        with open(response_text.split()[1], "w") as file:
            file.write(str(child.pid))
        child.wait()
    if response_text.startswith("fork and die"):
        child = os.fork()
        if child:
            with open(response_text.split()[3], "w") as file:
                file.write(str(child))
            os._exit(7)
        time.sleep(600)
    if response_text.startswith("garbage"):
        for descriptor in sorted(int(name) for name in os.listdir("/proc/self/fd"))[3:]:
            try:
                os.write(descriptor, GARBAGE[response_text])
            except OSError:
                pass
    if response_text == "pid":
        return os.getpid()
    return {
        "nan": float("nan"), "inf": -float("inf"), "none": None, "text": "1", "bool": True, "numpy": numpy.float32(0.5),
        "numpy bool": numpy.float32(1) > 0,
        "huge": 10 ** 400, "beyond": 1e39, "parts": (0.5, {"style": 1}), "bad part": (0.5, {"style": float("nan")}), "bad parts": (0.5, 3),
    }.get(response_text, float(prompt_text == "p" and reference == "r"))

async def answer(response_text):
    await asyncio.sleep(0)
    if response_text == "raise":
        raise KeyError("lost")
    if response_text == "cancelled":
        raise asyncio.CancelledError
    return 1.0

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if data_source == "openai/gsm8k" else 0.0

def of_verl_by_name(solution_str, ground_truth, data_source=None, extra_info=None):
    return 1.0

def of_trl(prompts, completions, **columns):
    return [1.0 for _ in completions]

async def coroutine(prompt_text, response_text, reference):
    return await answer(response_text)

def late_coroutine(prompt_text, response_text, reference):
    return coroutine(prompt_text, response_text, reference)

def two(prompt_text, response_text):
    return 1.0

def of_row(prompt_text, response_text, reference, row):
    return float(row["level"] == int(response_text))

def of_optional_row(prompt_text, response_text, reference, *, row=None):
    return -1.0 if row is None else float(row["level"])

def of_everything(prompt_text, response_text, reference, finish_reason, *, num_tokens, row):
    return num_tokens, {"is_cut": finish_reason == "length", "has_row": row is not None}

def unknown_fourth(prompt_text, response_text, reference, metadata):
    return 1.0

class Async:
    async def __call__(self, prompt_text, response_text, reference):
        return await answer(response_text)

async_object = Async()

number = 3
GARBAGE = {"garbage that goes on": b"\\0\\1\\0\\0[", "garbage that is text": b"hello", "garbage in form": b"\\0\\0\\0\\2[["}
'''
PROMPT = Prompt(prompt_id="jsonl:7", token_ids=[1], text="p", reference="r")


@pytest.fixture
def user_module(tmp_path, monkeypatch) -> Path:
    """A module in the current folder, under a name that no other test has imported."""
    name = f"user_rewards_{tmp_path.name.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return path


def function_config(path: Path, name: str = "score", timeout_s: float = 20.0) -> FunctionReward:
    return FunctionReward(function=f"{path.stem}:{name}", timeout_s=timeout_s)


def make_scorer(config: AnyReward) -> Scorer:
    return Scorer(config, max_new_tokens=100, num_workers=1)


async def score(
    scorer: Scorer, prompt: Prompt, response: str, *, num_tokens: int = 1, finish=FinishReason.STOP
) -> Score:
    return await scorer.score(prompt, response, num_tokens=num_tokens, finish_reason=finish)


def scores_of(
    config: AnyReward, *responses: str, prompt: Prompt = PROMPT, num_workers: int = 1
) -> list[Score]:
    async def collect():
        async with Scorer(config, max_new_tokens=100, num_workers=num_workers) as scorer:
            return await asyncio.gather(*(score(scorer, prompt, response) for response in responses))

    return asyncio.run(collect())


def children() -> set[int]:
    lines = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True
    ).stdout.splitlines()
    return {int(line.split()[0]) for line in lines if line.split()[1] != "ps"}


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Whether a process that was killed is gone soon: the kernel takes its time on a busy machine."""
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_user_function_failures_score_zero_and_the_run_goes_on(user_module, capfd):
    bad = {
        "raise": rf"KeyError: 'lost' \({user_module.name}:9 in score\)",
        "exit": "SystemExit: 3",
        "die": r"the reward's process \(pid \d+\) ended with exit code 7",
        "nan": "is nan, which is not finite",
        "inf": "is -inf, which is not finite",
        "huge": "OverflowError",
        "beyond": r"the reward is 1e\+39, and float32 ends at 3.40282e\+38",
        "none": "must be a number, not NoneType None",
        "text": "must be a number, not str '1'",
        "bad part": "part 'style' is nan",
        "bad parts": "must be a dict",
    }
    good = {"fine": 1.0, "bool": 1.0, "numpy": 0.5, "numpy bool": 1.0, "parts": 0.5}
    before = children()
    scores = dict(zip([*bad, *good], scores_of(function_config(user_module), *bad, *good), strict=True))
    for response, message in bad.items():
        assert scores[response].value == 0 and scores[response].parts == {}
        assert re.search(message, scores[response].error), (response, scores[response].error)
        assert "jsonl:7" in scores[response].error
    for response, value in good.items():
        assert (scores[response].value, scores[response].error) == (value, None)
    assert scores["parts"].parts == {"style": 1.0}
    assert "said by reward code" not in capfd.readouterr().out
    assert children() == before


def test_a_function_that_forks_does_not_answer_twice(user_module):
    """A child that comes back by an exception would answer too, and each later sample would get the reward of the one before."""
    scores = scores_of(function_config(user_module), "fork", "numpy", "fine")
    assert [(score.value, score.error) for score in scores] == [(0.25, None), (0.5, None), (1.0, None)]


@pytest.mark.parametrize("response", ["hang", "hang in C"])
def test_a_hung_worker_is_replaced(user_module, response):
    started = time.monotonic()
    first, hung, after, last = scores_of(
        function_config(user_module, timeout_s=4.0), "pid", response, "pid", "fine"
    )
    assert hung.value == 0 and "TimeoutError: no answer within 4 s" in hung.error
    assert first.value != after.value and first.error is after.error is None
    assert last.value == 1
    assert time.monotonic() - started < 60


def test_several_workers_score_at_once(user_module):
    scores = scores_of(function_config(user_module, timeout_s=10), "hang", *["pid"] * 6, num_workers=2)
    # The other worker did them all meanwhile.
    assert scores[0].error and len({score.value for score in scores[1:]}) == 1


def test_what_reward_code_started_ends_with_it(user_module, tmp_path):
    [score] = scores_of(function_config(user_module, timeout_s=5.0), f"leave {tmp_path}/child")
    assert "TimeoutError" in score.error
    assert ends(int((tmp_path / "child").read_text()))


def test_what_reward_code_started_ends_with_it_where_it_dies_by_itself(user_module, tmp_path):
    child = tmp_path / "child"

    async def die():
        async with make_scorer(function_config(user_module)) as scorer:
            died = await score(scorer, PROMPT, f"fork and die {child}")
            assert "ended with exit code 7" in died.error and ends(int(child.read_text()))

    asyncio.run(die())


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("garbage that goes on", "TimeoutError: no answer within 2 s; its process was killed"),
        ("garbage that is text", "wrote something into its pipe that is not an answer, and was killed"),
        ("garbage in form", "wrote something into its pipe that is not an answer, and was killed"),
    ],
)
def test_what_reward_code_writes_into_our_pipe_costs_one_sample(user_module, response, error):
    """Such a function writes into descriptors that it inherits."""

    async def talk():
        async with asyncio.timeout(60), make_scorer(function_config(user_module, timeout_s=2.0)) as scorer:
            return [await score(scorer, PROMPT, text) for text in (response, "numpy")]

    garbage, after = asyncio.run(talk())
    assert garbage.value == 0 and error in garbage.error and (after.value, after.error) == (0.5, None)


def test_what_its_children_started_ends_too():
    shells = "sh -c 'sleep 600 & echo $!; wait' & wait"
    process = subprocess.Popen(["sh", "-c", shells], stdout=subprocess.PIPE, text=True)
    with process:
        grandchild = int(process.stdout.readline())
        end_tree(process)
    assert ends(grandchild)


def test_close_ends_what_is_under_way(user_module):
    async def close_early():
        async with make_scorer(function_config(user_module, timeout_s=300)) as scorer:
            await score(scorer, PROMPT, "fine")
            late = [asyncio.ensure_future(score(scorer, PROMPT, response)) for response in ("hang", "fine")]
            for _ in range(3):  # lets both start, and what they start
                await asyncio.sleep(0)
            started = time.monotonic()
            await scorer.close()
            await scorer.close()
            assert time.monotonic() - started < 5
            return await asyncio.wait(late, timeout=5)

    before = children()
    done, pending = asyncio.run(close_early())
    assert not pending and all(future.cancelled() for future in done)
    assert children() == before


def test_a_worker_that_ended_between_two_jobs_is_started_anew_and_none_after_the_close(tmp_path, monkeypatch):
    (tmp_path / "worker_reward.py").write_text(
        "import time\ndef score(prompt, response, reference):\n    return 1.0 if response == 'fine' else time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = _Worker("worker_reward:score", 20.0, START_TIMEOUT_S)
    job = Job(prompt_text="p", response_text="fine", reference="r")
    try:
        assert worker.call(job) == Score(value=1.0)
        end_tree(worker._process)
        assert worker.call(job) == Score(value=1.0)
        with ThreadPoolExecutor(1) as threads:
            late = threads.submit(worker.call, replace(job, response_text="hang"))
            while not worker._asking.locked():
                time.sleep(0.01)
            worker.close()
            with pytest.raises(CancelledError):
                late.result(20)
        with pytest.raises(CancelledError):
            worker.call(job)
        assert worker.pid is None
    finally:
        worker.close()


def test_workers_end_with_a_parent_that_is_killed(user_module, tmp_path):
    script = (
        "import asyncio, os, signal, sys; sys.path.insert(0, {root!r})\n"
        "from configs.schema.reward import FunctionReward; from rollout.records import FinishReason, Prompt\n"
        "from rollout.rewards.scorer import Scorer\n"
        "p = Prompt(prompt_id='i', token_ids=[1], text='p', reference='r')\n"
        "async def main():\n"
        "    async with Scorer(FunctionReward(function={function!r}), max_new_tokens=9, num_workers=1) as scorer:\n"
        "        print(int((await scorer.score(p, 'pid', num_tokens=1, finish_reason=FinishReason.STOP)).value), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    ).format(root=str(Path(__file__).parents[2]), function=f"{user_module.stem}:score")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ends(int(result.stdout))


def test_math_verify_in_its_process():
    prompt = Prompt(prompt_id="i", token_ids=[1], text="p", reference=r"\frac{1}{2}")
    first, hard, last = scores_of(
        MathVerifyReward(timeout_s=3), "$0.5$", "$9^{9^{9^{9}}}$", r"\boxed{2/4}", prompt=prompt
    )
    assert first.value == last.value == 1 and first.error is last.error is None
    assert first.correct and last.correct and not hard.correct
    assert hard.value == 0 and "TimeoutError" in hard.error


def test_inline_rewards_start_no_process_and_report_a_bad_reference():
    async def collect():
        good = Prompt(prompt_id="a", token_ids=[1], text="1 2=3:", reference="1 2=3")
        bad = Prompt(prompt_id="b", token_ids=[1], text="?", reference="?")
        async with make_scorer(CountdownReward()) as scorer:
            scores = await score(scorer, good, "1+2"), await score(scorer, bad, "1+2")
            assert children() == before
            return scores

    before = children()
    good, bad = asyncio.run(collect())
    assert (good.value, good.correct, good.error) == (1, True, None)
    assert (
        bad.value == 0
        and not bad.correct
        and "prompt b" in bad.error
        and "not a Countdown problem" in bad.error
    )


def test_a_reward_that_cannot_be_imported_any_more_stops_the_run(user_module):
    config = function_config(user_module)
    check_reward(config)
    user_module.write_text("raise RuntimeError('changed')")
    with pytest.raises(WorkerStartError, match="RuntimeError: changed"):
        scores_of(config, "fine")


def test_a_function_that_names_row_is_given_the_record(user_module):
    prompt = replace(PROMPT, row={"prompt": "p", "answer": "r", "level": 3})
    assert [s.value for s in scores_of(function_config(user_module, "of_row"), "3", "4", prompt=prompt)] == [
        1.0,
        0.0,
    ]
    assert [
        s.value for s in scores_of(function_config(user_module, "of_optional_row"), "3", prompt=prompt)
    ] == [3.0]
    assert [s.value for s in scores_of(function_config(user_module, "of_optional_row"), "3")] == [-1.0], (
        "a task without a file has no rows"
    )
    check_reward(function_config(user_module, "of_everything"))
    (told,) = scores_of(function_config(user_module, "of_everything"), "3", prompt=prompt)
    assert (told.value, told.parts) == (1.0, {"is_cut": 0.0, "has_row": 1.0})
    cut = score_once(
        function_config(user_module, "of_everything"),
        "3",
        prompt=prompt,
        num_tokens=7,
        finish=FinishReason.LENGTH,
    )
    assert (cut.value, cut.parts) == (7.0, {"is_cut": 1.0, "has_row": 1.0}), (
        "its length, of at most 100 tokens"
    )
    with pytest.raises(ValueError, match="'metadata'"):
        check_reward(function_config(user_module, "unknown_fourth"))


def test_rows_are_kept_only_for_a_reward_that_may_ask_for_them(user_module):
    function = function_config(user_module)
    assert may_read_rows(function)
    assert may_read_rows(WeightedReward(parts={"right": CountdownReward(), "mine": function}))
    assert may_read_rows(CodeReward(type="code"))
    assert not may_read_rows(WeightedReward(parts={"right": CountdownReward()}))


def test_check_reward_finds_what_is_wrong(user_module):
    check_reward(function_config(user_module))
    check_reward(MathVerifyReward())
    stem = user_module.stem
    user_module.with_name(f"{stem}.v2.py").write_text("")
    for path, message in {
        "no_such_module_here:f": "there is no module 'no_such_module_here'",
        "no_such.sub:f": "there is no module 'no_such.sub'",
        f"{stem}:scroe": "did you mean 'score'",
        f"{stem}:number": "is a int, not a function",
        f"{stem}.py:score": f"'{stem}.py' is not the name of a module; write '{stem}'$",
        f"./{stem}.py:score": f"; write '{stem}'$",
        f"inner/{stem}:score": f"; write 'inner.{stem}'$",
        "v1.2/mine.py:score": f"; write 'mine', and set PYTHONPATH={user_module.parent}/v1.2$",
        "/else/where/mine.py:score": "; write 'mine', and set PYTHONPATH=/else/where$",
        "/else/where/my.own.py:score": "; rename the file to my_own.py, and write 'my_own', and set PYTHONPATH=/else/where$",
        **dict.fromkeys(
            (f"{stem}.v2:score", f"{stem}.v2.py:score", f"./{stem}.v2:score"),
            f"; rename the file to {stem}_v2.py, and write '{stem}_v2'$",
        ),
        f"{stem}:of_verl": "has verl's parameters.*`def score.*row.: return of_verl.row..data_source.., response, reference",
        f"{stem}:of_verl_by_name": "has verl's parameters.*: return of_verl_by_name.solution_str=response, ground_truth=reference.`",
        f"{stem}:of_trl": "has TRL's parameters.*: return of_trl.prompts=.prompt., completions=.response...0.`",
        f"{stem}:two": "must take \\(prompt, response, reference\\), and may take row, num_tokens, finish_reason",
    }.items():
        with pytest.raises(ValueError, match=message):
            import_reward_function(path)
    with pytest.raises(ValueError, match=r"reward.function: .* did you mean 'score'"):
        check_reward(FunctionReward(function=f"{stem}:scroe"))
    with pytest.raises(ValueError, match=r"reward.parts.mine.function: .* did you mean 'score'"):
        check_reward(
            WeightedReward(
                parts={"right": CountdownReward(), "mine": FunctionReward(function=f"{stem}:scroe")}
            )
        )
    with pytest.raises(ValueError, match="form module:function"):
        import_reward_function("score")


def test_modules_that_fail_to_import(user_module, tmp_path):
    (tmp_path / "needs_more.py").write_text("import surely_not_installed\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    (tmp_path / "misspelt.py").write_text("def f(:\n")
    for name, message in {
        "needs_more": "imports 'surely_not_installed', which is not installed in this environment; install it there",
        "breaks": r"raised ZeroDivisionError: division by zero \(breaks.py:1",
        "misspelt": "raised SyntaxError",
    }.items():
        with pytest.raises(ValueError, match=message):
            import_reward_function(f"{name}:f")


@pytest.mark.parametrize("name", ["coroutine", "late_coroutine", "async_object"])
def test_a_function_that_is_async_is_awaited(user_module, name):
    config = function_config(user_module, name=name)
    check_reward(config)
    scores = scores_of(config, "fine", "raise", "cancelled")
    assert [score.value for score in scores] == [1.0, 0.0, 0.0]
    assert re.search(rf"KeyError: 'lost' \({user_module.name}:\d+ in answer\)", scores[1].error)
    assert "CancelledError" in scores[2].error


# --- its trial before a start
# ------------------------------------------------------------------------------------------------------

TRIED = """
import json, os, sys, time
print("said by the module")

def none(prompt, response, reference):
    pass

def nan(prompt, response, reference):
    return float("nan")

def awaited(prompt, response, reference):
    async def later():
        return "1"
    return later()

def both(prompt, response, reference):
    return json.loads("not JSON")

def one(prompt, response, reference):
    return float(response[0] == "1")

def dies(prompt, response, reference):
    print(1000 * "many words ", "last words", sep="\\n", file=sys.stderr)
    os.kill(os.getpid(), 9)

def hangs(prompt, response, reference):
    def deeper():
        time.sleep(600)
    deeper()

def garbles(prompt, response, reference):
    for descriptor in sorted(int(name) for name in os.listdir("/proc/self/fd"))[3:]:
        try:
            os.write(descriptor, b"\\0\\1\\0\\0[")
        except OSError:
            pass

def repeats(prompt, response, reference, row):
    print(repr((prompt, response, reference, row)), file=open("asked", "a"))
    return 0.3
"""


def tried(name: str, **changes) -> list[str]:
    """What is told of a function of ``tried.py`` that can be used. Raises ValueError of one that cannot."""
    told: list[str] = []
    config = FunctionReward(function=f"{changes.pop('module', 'tried')}:{name}", **changes)
    check_reward(
        config,
        lambda source: Problem(prompt_id="i", text="the prompt", reference="the reference", row={"level": 2}),
        told.append,
    )
    return told


@pytest.fixture
def trial(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("rollout.rewards.trial._REMARKS", {})
    (tmp_path / "tried.py").write_text(TRIED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "none",
            r"reward.function: scoring an ordinary response .* not NoneType None \(tried.py:5 in none\); return a finite",
        ),
        ("nan", r"the reward is nan, which is not finite \(tried.py:8 in nan\); return a finite number"),
        ("awaited", r"not str '1' \(tried.py:11 in awaited\)"),
        (
            "both",
            r"ordinary response .* raised JSONDecodeError: .* \(tried.py:17 in both\), and scoring an empty .*; .*`check: import`",
        ),
        (
            "dies",
            "scoring an ordinary response: its process was killed by SIGKILL, after writing: last words; correct the module",
        ),
    ],
)
def test_a_function_that_no_response_excuses_is_refused(trial, monkeypatch, capfd, name, message):
    monkeypatch.setattr("rollout.rewards.trial_process.MOST_READ", 64)
    before = children()
    with pytest.raises(ValueError, match=message):
        tried(name)
    assert capfd.readouterr() == ("", ""), "what the module prints is not ours to print"
    assert children() == before and not (trial / "__pycache__").exists()


def test_a_function_that_hangs_is_killed_and_its_line_named(trial):
    before = children()
    with pytest.raises(
        ValueError, match=r"took longer than timeout_s=4, at tried.py:28 in deeper; .* raise its timeout_s"
    ):
        tried("hangs", timeout_s=4.0)
    assert children() == before


def test_a_function_that_begins_an_answer_of_its_own_is_late(trial):
    with pytest.raises(
        ValueError, match=r"wrote only a part of an answer within timeout_s=1; make it faster"
    ):
        tried("garbles", timeout_s=1.0)


def test_a_function_that_raises_on_one_response_is_only_told(trial):
    (told,) = tried("one")
    assert re.search(
        r"an empty response .* raised IndexError: .* \(tried.py:20 in one\): in a run such a response is not scored",
        told,
    )


def test_a_trial_is_of_the_tasks_own_problem(trial):
    assert tried("repeats") == []
    asked = (trial / "asked").read_text().splitlines()
    whole = all(
        line.startswith("('the prompt', '") and line.endswith("'the reference', {'level': 2})")
        for line in asked
    )
    assert len(asked) == 2 and whole
    assert "', '', '" in asked[1]


def test_how_much_is_tried_can_be_said(trial):
    assert tried("both", check="import") == tried("missing", check="none") == []
    with pytest.raises(ValueError, match="tried has no 'missing'"):
        tried("missing", check="import")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "import time\ntime.sleep(600)",
            "importing broken took longer than import_timeout_s=2.5.*; do slow work in the function's",
        ),
        (
            "import sys\nsys.exit(0)",
            r"importing broken ends the process: SystemExit: 0 \(broken.py:2 in <module>\); put a script's",
        ),
        (
            "import os\nos._exit(3)",
            "importing broken: its process ended with exit code 3; correct the module",
        ),
        ("input()", "raised EOFError: EOF when reading a line"),
    ],
)
def test_a_module_that_never_comes_back_is_refused(trial, content, message):
    (trial / "broken.py").write_text(content)
    before = children()
    with pytest.raises(ValueError, match=message):
        tried("f", module="broken", import_timeout_s=2.5 if "sleep" in content else 60.0)
    assert children() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_module_that_hangs_ends_with_a_check_that_is_killed(trial, number):
    (trial / "hangs.py").write_text(
        "import os, time\nos.write(os.open('pid', os.O_WRONLY | os.O_CREAT), b'%d.' % os.getpid())\ntime.sleep(600)"
    )
    script = (
        f"import signal, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        f"signal.signal({int(signal.SIGHUP)}, signal.SIG_DFL)\n"  # under nohup it would be ignored
        "from configs.schema.reward import FunctionReward; from rollout.rewards.trial import try_function\n"
        "try_function(FunctionReward(function='hangs:f', import_timeout_s=300), None, print)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script])
    pid, deadline = trial / "pid", time.monotonic() + 60
    while not (pid.exists() and pid.read_text().endswith(".")):
        assert owner.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    owner.send_signal(number)
    assert owner.wait(60) == -number
    assert ends(int(pid.read_text().rstrip(".")))


def test_a_slow_import_is_told_meanwhile(trial, monkeypatch):
    monkeypatch.setattr("rollout.rewards.trial_process.TELL_EVERY_S", 0.05)
    told = tried("repeats")
    assert told and all(
        re.fullmatch(r"(importing tried|scoring an .* response) … \d+ s of \w+=\d+", line) for line in told
    )


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (16, 8), (64, 32), (256, 32)])
def test_the_number_of_workers_follows_the_cores(cores, workers):
    assert default_num_workers(cores) == workers


@pytest.mark.parametrize(("import_timeout_s", "start_timeout_s"), [(5.0, START_TIMEOUT_S), (300.0, 300.0)])
def test_a_config_may_give_more_time_for_a_start(import_timeout_s, start_timeout_s):
    config = FunctionReward(function="a:b", import_timeout_s=import_timeout_s)
    pool = _worker_pool(config, 1)
    assert [worker._start_timeout_s for worker in pool._workers] == [start_timeout_s]
    pool.close()


def test_the_number_of_workers_can_be_said(user_module):
    config = function_config(user_module).model_copy(update={"num_workers": 3})

    async def collect():
        async with Scorer(config, max_new_tokens=100) as scorer:
            assert children() == before, "a worker starts when it is needed"
            await asyncio.gather(*(score(scorer, PROMPT, "fine") for _ in range(9)))
            return children() - before

    before = children()
    assert len(asyncio.run(collect())) == 3


# --- length
# ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    # L_max 20, L_cache 4.
    [
        (0, 0),
        (1, 0),
        (16, 0),
        (17, -0.25),
        (18, -0.5),
        (19, -0.75),
        (20, -1),
        (21, -1),
        (1000, -1),
    ],
)
def test_overlong_by_hand(num_tokens, penalty):
    assert overlong_penalty(num_tokens, max_tokens=20, buffer_tokens=4) == penalty


@given(st.integers(0, 200), st.integers(1, 100), st.data())
def test_overlong_is_equation_13_in_its_three_cases(num_tokens, max_tokens, data):
    buffer = data.draw(st.integers(1, max_tokens))
    if num_tokens <= max_tokens - buffer:
        expected = 0.0
    elif num_tokens <= max_tokens:
        expected = ((max_tokens - buffer) - num_tokens) / buffer
    else:
        expected = -1.0
    assert overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_tokens=buffer) == expected


# --- several rewards at once
# -------------------------------------------------------------------------------------------------------

THREE = Prompt(prompt_id="countdown:1 2=3", token_ids=[1], text="1 2=3:", reference="1 2=3")


def score_once(config: AnyReward, response: str, *, prompt: Prompt = THREE, **length) -> Score:
    async def run():
        async with make_scorer(config) as scorer:
            return await score(scorer, prompt, response, **length)

    return asyncio.run(run())


DAPO = WeightedReward(
    parts={
        "long": OverlongPenalty(buffer_tokens=20, weight=0.5),
        "right": Gsm8kReward(weight=2.0),
        "again": Gsm8kReward(weight=-0.25),
    }
)
"""The penalty of make_scorer's 100 tokens starts after 80."""


@pytest.mark.parametrize(
    ("response", "num_tokens", "finish", "value", "long", "found"),
    [
        ("3", 5, "stop", 1.75, 0.0, 1),
        ("3", 90, "stop", 1.5, -0.5, 1),
        ("3", 100, "stop", 1.25, -1.0, 1),
        ("4", 85, "stop", -0.125, -0.25, 1),
        ("?", 100, "length", -0.5, -1.0, 0),
        ("?", 7, "length", -0.5, -1.0, 0),  # cut off early
    ],
)
def test_a_weighted_sum_by_hand(response, num_tokens, finish, value, long, found):
    prompt, correct = replace(THREE, reference="3"), response == "3"
    score = score_once(DAPO, response, prompt=prompt, num_tokens=num_tokens, finish=FinishReason(finish))
    right = {"right": float(correct), "right/found": found, "again": float(correct), "again/found": found}
    assert score == Score(value=value, parts={"long": long} | right, correct=correct)


def test_whether_a_response_is_right_is_said_by_the_first_part_that_checks_an_answer():
    number, countdown = {"number": Gsm8kReward(weight=0.1)}, {"countdown": CountdownReward()}
    prompt = replace(THREE, reference="1 2=3")  # which gsm8k cannot read
    long = {"long": OverlongPenalty(buffer_tokens=100)}
    assert score_once(
        WeightedReward(parts=long | countdown | number), "1+2", prompt=prompt, num_tokens=100
    ).correct
    assert not score_once(WeightedReward(parts=long | number | countdown), "1+2", prompt=prompt).correct
    one = replace(THREE, reference="1")
    expected = Score(value=0.1, parts={"found": 1}, correct=True)
    assert score_once(Gsm8kReward(weight=0.1), "#### 1", prompt=one) == expected


def test_a_failed_part_counts_zero_and_the_others_stand(user_module):
    config = WeightedReward(
        parts={
            "mine": function_config(user_module),
            "right": CountdownReward(weight=3.0),
            "number": Gsm8kReward(),
        }
    )
    found = score_once(config, "raise", prompt=replace(THREE, reference="1 2=3"))
    assert (
        (found.value, found.correct) == (0.0, False)
        and found.parts["mine"] == 0
        and found.parts["right/valid"] == 0
    )
    assert "KeyError: 'lost'" in found.error and "countdown:1 2=3" in found.error
    bad = score_once(config, "1+2 #### 9", prompt=replace(THREE, reference="nine"))
    assert "not a Countdown problem" in bad.error and "holds no number" in bad.error and bad.value == 0
    fine = score_once(
        WeightedReward(
            parts={
                "right": CountdownReward(weight=3.0),
                "mine": function_config(user_module, name="of_row"),
            }
        ),
        "1+2",
    )
    assert (fine.value, fine.correct) == (3.0, True) and "NoneType" in fine.error


def test_a_buffer_longer_than_a_response_is_refused():
    config = WeightedReward(parts={"right": CountdownReward(), "long": OverlongPenalty(buffer_tokens=101)})
    with pytest.raises(
        ValueError, match=r"reward.parts.long.buffer_tokens=101 is more than rollout.max_new_tokens=100"
    ):
        score_once(config, "1+2")


# --- what the schema accepts
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "weighted", "parts": {}}, "at least 1 item"),
        (
            {"type": "weighted", "parts": {"long": {"type": "overlong", "buffer_tokens": 4}}},
            "parts hold an overlong penalty but no reward",
        ),
        ({"type": "weighted", "parts": {"a b": {"type": "gsm8k"}}}, "'a b' cannot name a part"),
        (
            {"type": "weighted", "parts": {"a": {"type": "weighted", "parts": {}}}},
            "does not match any of the expected tags",
        ),
        ({"type": "overlong", "buffer_tokens": 4}, "does not match any of the expected tags"),
        (
            {
                "type": "weighted",
                "parts": {
                    "a": {"type": "gsm8k"},
                    "long": {"type": "overlong", "buffer_tokens": 4, "weight": 0},
                },
            },
            "greater than 0",
        ),
        ({"type": "gsm8k", "weight": float("inf")}, "finite number"),
        ({"type": "function"}, "Field required"),
        ({"type": "function", "function": "score"}, "should match pattern"),
        ({"type": "function", "function": "module:"}, "should match pattern"),
        ({"type": "countdown", "timeout_s": 3.0}, "Extra inputs"),
        ({"type": "model", "urls": []}, "at least 1 item"),
        (
            {"type": "model", "urls": ["10.0.0.7:30000"]},
            "'10.0.0.7:30000' is not an address.*write it like http://",
        ),
        ({"type": "model", "urls": ["http://a:1", "ftp://a:1"]}, "'ftp://a:1' is not an address"),
        ({"type": "model", "urls": ["http://"]}, "'http://' is not an address"),
        ({"type": "model", "urls": ["http://[a:1"]}, "is not an address"),
        (
            {"type": "model", "urls": ["http://a"], "text": {"type": "plain", "template": "{prompt}"}},
            "leaves out the response",
        ),
        (
            {"type": "model", "urls": ["http://a"], "text": {"type": "plain", "template": "{answer}"}},
            "its placeholders are {prompt}, {response}",
        ),
        (
            {"type": "model", "urls": ["http://a"], "text": {"type": "plain", "template": "{response} }"}},
            "cannot be filled in",
        ),
    ],
)
def test_rewards_that_the_schema_refuses(block, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnyReward).validate_python(block)
