"""The evaluator against Python's own parser, answers by hand, and reward code that raises, hangs, dies or talks nonsense."""

import ast
import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from configs.schema.task import RewardConfig
from rollout.records import Prompt, Score
from rollout.rewards import (
    Scorer,
    WorkerStartError,
    check_reward,
    countdown_reward,
    gsm8k_reward,
    import_reward_function,
    math_verify_reward,
)
from rollout.rewards.arithmetic import MAX_CHARACTERS, MAX_DEPTH, ExpressionError, evaluate, format_problem, parse_problem

# --- the evaluator -----------------------------------------------------------------------------------------------------------------


def reference_evaluate(text: str) -> tuple[int, list[int]] | None:
    """(value, numbers) by Python's parser; None where the text is not of our grammar."""
    if not re.fullmatch(r"[0-9+\-*()]+", text) or re.search(r"(?<![0-9])0[0-9]", text):
        return None
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None

    def walk(node):
        if isinstance(node, ast.Constant):
            return node.value, [node.value]
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
            raise ValueError("another kind of node")
        (a, numbers_a), (b, numbers_b) = walk(node.left), walk(node.right)
        value = a + b if isinstance(node.op, ast.Add) else a - b if isinstance(node.op, ast.Sub) else a * b
        return value, numbers_a + numbers_b

    try:
        return walk(tree)
    except ValueError:
        return None


def ours(text: str) -> tuple[int, list[int]] | None:
    try:
        result = evaluate(text)
    except ExpressionError:
        return None
    return result.value, list(result.numbers)


EXPRESSIONS = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.one_of(st.tuples(inner, st.sampled_from("+-*"), inner).map("".join), inner.map(lambda text: f"({text})")),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_expressions_have_the_value_that_python_gives_them(text):
    assert ours(text) == reference_evaluate(text) is not None


@given(EXPRESSIONS, st.data())
def test_mutated_expressions_are_accepted_exactly_where_python_does(text, data):
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(text)))
        text = text[:i] + data.draw(st.sampled_from(["", *"0123456789+-*() ./:=a_\n²"])) + text[i + data.draw(st.integers(0, 2)) :]
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
    ("text", "value"), [("14-(13-2)", 3), ("2+3*4", 14), ("(2+3)*4", 20), ("10-3-2", 5), ("2*3*4-1", 23), ("((7))", 7)]
)
def test_values_by_hand(text, value):
    assert evaluate(text).value == value


@pytest.mark.parametrize(
    "text",
    ["1+1 ", " 1+1", "1 +1", "1+1:", "1=1", "-1+2", "(-1)", "01+1", "1/1", "1.0", "1e3", "٣", "1²", "1+", "1\n", "__import__('os')", "1_0"],
)
def test_refused_texts(text):
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_limits_of_length_and_depth():
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    with pytest.raises(ExpressionError, match="nested deeper"):
        evaluate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))
    assert evaluate("9" * MAX_CHARACTERS).value == 10**MAX_CHARACTERS - 1
    for text in ("9" * (MAX_CHARACTERS + 1), "(" * 1_000_000, "1" + "*9" * 1_000_000):
        with pytest.raises(ExpressionError, match="characters, more than"):
            evaluate(text)


# --- Countdown ---------------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="no Countdown problem"):
        countdown_reward(reference, "1+2")


@given(st.lists(st.integers(1, 99), min_size=1, max_size=5), st.integers(1, 999))
def test_problems_parse_back(numbers, target):
    assert parse_problem(format_problem(numbers, target)) == (tuple(numbers), target)


# --- mathematics -------------------------------------------------------------------------------------------------------------------


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


@given(st.integers(-(10**9), 10**9), st.sampled_from(["#### {}", "is {}.", "so x = {}", "${}", "1, 2 and {}!"]))
def test_gsm8k_finds_its_own_numbers_however_written(number, form):
    written = form.format(f"{number:,}")
    assert gsm8k_reward(str(number), written).value == 1
    assert gsm8k_reward(str(number + 1), written).value == 0


def test_gsm8k_needs_a_number_to_compare_with():
    with pytest.raises(ValueError, match="holds no number"):
        gsm8k_reward("eleven", "11")


@pytest.mark.parametrize(
    ("reference", "response", "correct"),
    [
        ("3/4", "It is $0.75$", True),
        (r"\frac{3}{4}", r"Hence \boxed{\frac{6}{8}}.", True),
        ("$x+1$", "$1+x$", True),
        ("12", "the answer is 12", True),
        ("12", "the answer is 13", False),
        ("12", "no idea", False),
    ],
)
def test_math_verify(reference, response, correct):
    assert math_verify_reward(reference, response).value == float(correct)


def test_math_verify_names_a_reference_it_cannot_read():
    with pytest.raises(ValueError, match="cannot read the reference"):
        math_verify_reward("$$", "1")


# --- the user's function -----------------------------------------------------------------------------------------------------------

USER_MODULE = '''
import os, subprocess, sys, time
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
    if response_text == "pid":
        return os.getpid()
    return {
        "nan": float("nan"), "inf": -float("inf"), "none": None, "text": "1", "bool": True, "numpy": numpy.float32(0.5),
        "huge": 10 ** 400, "parts": (0.5, {"style": 1}), "bad part": (0.5, {"style": float("nan")}), "bad parts": (0.5, 3),
    }.get(response_text, float(prompt_text == "p" and reference == "r"))

async def coroutine(prompt_text, response_text, reference):
    return 1.0

def two(prompt_text, response_text):
    return 1.0

number = 3
'''
PROMPT = Prompt(prompt_id="jsonl:7", token_ids=[1], text="p", task="jsonl", reference="r")


@pytest.fixture
def user_module(tmp_path, monkeypatch) -> Path:
    """A module in the current folder, under a name that no other test has imported."""
    name = f"user_rewards_{tmp_path.name.replace('-', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return path


def function_config(path: Path, name: str = "score", timeout_s: float = 20.0) -> RewardConfig:
    return RewardConfig(type="function", function=f"{path.stem}:{name}", timeout_s=timeout_s)


def scores_of(config: RewardConfig, *responses: str, num_workers: int = 1) -> list[Score]:
    async def collect(scorer):
        return await asyncio.gather(*(scorer.score(PROMPT, response) for response in responses))

    with Scorer(config, num_workers=num_workers) as scorer:
        return asyncio.run(collect(scorer))


def children() -> set[int]:
    lines = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True).stdout.splitlines()
    return {int(line.split()[0]) for line in lines if line.split()[1] != "ps"}


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_user_function_failures_score_zero_and_the_run_goes_on(user_module, capfd):
    bad = {
        "raise": rf"KeyError: 'lost' \({user_module.name}:9 in score\)",
        "exit": "SystemExit: 3",
        "die": "process died with exit code 7",
        "nan": "is nan, which is not finite",
        "inf": "is -inf, which is not finite",
        "huge": "OverflowError",
        "none": "must be a number, not <class 'NoneType'>",
        "text": "must be a number, not str '1'",
        "bad part": "part 'style' is nan",
        "bad parts": "must be a dict",
    }
    good = {"fine": 1.0, "bool": 1.0, "numpy": 0.5, "parts": 0.5}
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


@pytest.mark.parametrize("response", ["hang", "hang in C"])
def test_a_hung_worker_is_replaced(user_module, response):
    started = time.monotonic()
    first, hung, after, last = scores_of(function_config(user_module, timeout_s=1.5), "pid", response, "pid", "fine")
    assert hung.value == 0 and "TimeoutError: no answer within 1.5 s" in hung.error
    assert first.value != after.value and first.error is after.error is None
    assert last.value == 1
    assert time.monotonic() - started < 20


def test_several_workers_score_at_once(user_module):
    scores = scores_of(function_config(user_module, timeout_s=3), "hang", *["pid"] * 6, num_workers=2)
    assert scores[0].error and len({score.value for score in scores[1:]}) == 1  # the other worker did them all meanwhile


def test_what_reward_code_started_ends_with_it(user_module, tmp_path):
    [score] = scores_of(function_config(user_module, timeout_s=1.0), f"leave {tmp_path}/child")
    assert "TimeoutError" in score.error
    assert not alive(int((tmp_path / "child").read_text()))


def test_close_ends_what_is_under_way(user_module):
    async def close_early():
        scorer = Scorer(function_config(user_module, timeout_s=300), num_workers=1)
        await scorer.score(PROMPT, "fine")
        late = [asyncio.ensure_future(scorer.score(PROMPT, response)) for response in ("hang", "fine")]
        await asyncio.sleep(0)  # lets both start
        started = time.monotonic()
        scorer.close()
        scorer.close()
        assert time.monotonic() - started < 5
        return await asyncio.wait(late, timeout=5)

    before = children()
    done, pending = asyncio.run(close_early())
    assert not pending and all(future.cancelled() for future in done)
    assert children() == before


def test_workers_end_with_a_parent_that_is_killed(user_module, tmp_path):
    script = (
        "import asyncio, os, signal, sys; sys.path.insert(0, {root!r})\n"
        "from configs.schema.task import RewardConfig; from rollout.records import Prompt; from rollout.rewards import Scorer\n"
        "scorer = Scorer(RewardConfig(type='function', function={function!r}), num_workers=1)\n"
        "p = Prompt(prompt_id='i', token_ids=[1], text='p', task='t', reference='r')\n"
        "print(int(asyncio.run(scorer.score(p, 'pid')).value), flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
    ).format(root=str(Path(__file__).parents[1]), function=f"{user_module.stem}:score")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    worker, deadline = int(result.stdout), time.monotonic() + 10
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(worker)


def test_math_verify_in_its_process():
    config = RewardConfig(type="math_verify", timeout_s=3)
    prompt = Prompt(prompt_id="i", token_ids=[1], text="p", task="jsonl", reference=r"\frac{1}{2}")

    async def collect(scorer):
        return [await scorer.score(prompt, response) for response in ("$0.5$", "$9^{9^{9^{9}}}$", r"\boxed{2/4}")]

    with Scorer(config, num_workers=1) as scorer:
        first, hard, last = asyncio.run(collect(scorer))
    assert first.value == last.value == 1 and first.error is last.error is None
    assert hard.value == 0 and "TimeoutError" in hard.error


def test_inline_rewards_start_no_process_and_report_a_bad_reference():
    async def collect(scorer):
        good = Prompt(prompt_id="a", token_ids=[1], text="1 2=3:", task="countdown", reference="1 2=3")
        bad = Prompt(prompt_id="b", token_ids=[1], text="?", task="jsonl", reference="?")
        return await scorer.score(good, "1+2"), await scorer.score(bad, "1+2")

    before = children()
    with Scorer(RewardConfig(type="countdown")) as scorer:
        good, bad = asyncio.run(collect(scorer))
        assert children() == before
    assert (good.value, good.error) == (1, None)
    assert bad.value == 0 and "prompt b" in bad.error and "no Countdown problem" in bad.error


def test_a_reward_that_cannot_be_imported_any_more_stops_the_run(user_module):
    config = function_config(user_module)
    check_reward(config)
    user_module.write_text("raise RuntimeError('changed')")
    with pytest.raises(WorkerStartError, match="RuntimeError: changed"):
        scores_of(config, "fine")


def test_check_reward_finds_what_is_wrong(user_module):
    check_reward(function_config(user_module))
    check_reward(RewardConfig(type="math_verify"))
    stem = user_module.stem
    for path, message in {
        "no_such_module_here:f": "there is no module 'no_such_module_here'",
        "no_such.sub:f": "there is no module 'no_such.sub'",
        f"{stem}:scroe": "did you mean 'score'",
        f"{stem}:number": "is a int, not a function",
        f"{stem}:two": "must take \\(prompt_text, response_text, reference\\)",
    }.items():
        with pytest.raises(ValueError, match=message):
            check_reward(RewardConfig(type="function", function=path))
    with pytest.raises(ValueError, match="form module:function"):
        import_reward_function("score")


def test_modules_that_fail_to_import(user_module, tmp_path):
    (tmp_path / "needs_more.py").write_text("import surely_not_installed\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    (tmp_path / "misspelt.py").write_text("def f(:\n")
    for name, message in {
        "needs_more": "imports 'surely_not_installed', which is not installed",
        "breaks": r"raised ZeroDivisionError: division by zero \(breaks.py:1",
        "misspelt": "raised SyntaxError",
    }.items():
        with pytest.raises(ValueError, match=message):
            import_reward_function(f"{name}:f")


def test_a_coroutine_is_no_reward(user_module):
    [score] = scores_of(function_config(user_module, name="coroutine"), "fine")
    assert score.value == 0 and "coroutine" in score.error
