"""Countdown: reach the target with all numbers of the problem and ``+ - *``. Problems and solutions are
enumerated, not guessed.

Expressions are counted and drawn in a normal form that gives each text exactly one derivation. It has
parentheses only where precedence needs them: the right side of ``+`` is never a sum (``a+(b+c)`` is written
``a+b+c``), and the right side of ``*`` never a product.
"""

import ast
import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache, partial
from itertools import accumulate, combinations, combinations_with_replacement
from typing import TYPE_CHECKING

from configs.schema.task import CountdownTask
from rollout.rewards.arithmetic import format_problem
from rollout.tasks.task import LazyPrompts, Problem, Task
from rollout.tokenization import encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Numbers = tuple[int, ...]
"""Sorted, with repetition."""

MAX_CHOICES = {1: 100_000, 2: 100_000, 3: 20_000, 4: 10_000, 5: 400}
"""Limit of enumerated choices of that many numbers, a few seconds of work. Beyond it a fixed random subset
is taken."""
CHARACTERS = "0123456789+-*()=: "
"""Every character of Countdown's prompts and answers."""


class Kind(IntEnum):
    NUMBER = 0
    SUM = 1
    """The outermost operator is + or -."""
    PRODUCT = 2


ANY_KIND = tuple(Kind)
RESULT_KIND = {"+": Kind.SUM, "-": Kind.SUM, "*": Kind.PRODUCT}
RIGHT_KINDS = {"+": (Kind.NUMBER, Kind.PRODUCT), "-": ANY_KIND, "*": (Kind.NUMBER, Kind.SUM)}
"""Kinds that the normal form allows on the right side of an operator; the left side may be of any kind."""


def load_countdown(config: CountdownTask, *, tokenizer: "PreTrainedTokenizerBase") -> Task:
    """All solvable problems of ``config``, split into training and held-out ones by their hashes. Raises ValueError:
    the tokenizer lacks a character of the task, or no problem is left to train on."""
    check_characters(tokenizer)
    train, heldout = [], []
    for problem in solvable_problems(config):
        (heldout if is_heldout(problem, config.heldout_fraction) else train).append(problem)
    if not train:
        raise _no_problem_error(config)

    encode = partial(encode_prompt, tokenizer, system_prompt=None, apply_chat_template=False)

    def prompts(problems: list[tuple[Numbers, int]]) -> LazyPrompts:
        return LazyPrompts(problems, to_problem=_to_problem, encode=encode)

    return Task(name="countdown", train=prompts(train), heldout=prompts(heldout))


def first_countdown_problem(config: CountdownTask) -> Problem:
    """The first solvable problem, held out or not. Raises ValueError if there is none."""
    problem = next(solvable_problems(config), None)
    if problem is None:
        raise ValueError(f"no Countdown problem can be made with {config!r}; raise max_number or max_target")
    return _to_problem(problem)


def _to_problem(problem: tuple[Numbers, int]) -> Problem:
    reference = format_problem(*problem)
    return Problem(prompt_id=f"countdown:{reference}", text=prompt_text(problem), reference=reference)


def prompt_text(problem: tuple[Numbers, int]) -> str:
    return f"{format_problem(*problem)}:"


def long_prompt(config: CountdownTask) -> str:
    """One of the longest prompts: the highest numbers with the highest target that they reach; "" if they
    reach none."""
    numbers = _number_choices(config)[-1]
    targets = reachable(numbers, config.max_target)
    return prompt_text((numbers, max(targets))) if targets else ""


def check_problems(config: CountdownTask) -> None:
    """Raises ValueError if no problem is left to train on."""
    if all(is_heldout(problem, config.heldout_fraction) for problem in solvable_problems(config)):
        raise _no_problem_error(config)


def _no_problem_error(config: CountdownTask) -> ValueError:
    return ValueError(
        f"no Countdown problem is left to train on with {config!r}; raise max_number or max_target"
    )


def check_characters(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a tokenizer that loses a character next to digits, as in a prompt or an answer. Raises
    ValueError."""
    missing = []
    for character in CHARACTERS:
        text = f"1{character}1"
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.unk_token_id in ids or tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
            missing.append(character)
    if missing:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} cannot write {missing} that Countdown needs; "
            "use a model whose vocabulary has them"
        )


def is_heldout(problem: tuple[Numbers, int], fraction: float) -> bool:
    """Whether the problem's md5, read as a number in [0, 1), lies below ``fraction``, whatever the seed."""
    digest = hashlib.md5(format_problem(*problem).encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def solvable_problems(config: CountdownTask) -> Iterator[tuple[Numbers, int]]:
    """Every ``(numbers, target)`` within the limits of ``config`` that has a solution, in ascending order."""
    for numbers in _number_choices(config):
        for target in sorted(reachable(numbers, config.max_target)):
            yield numbers, target


def _number_choices(config: CountdownTask) -> list[Numbers]:
    """All multisets of ``num_numbers`` from 1..max_number, or a fixed subset of MAX_CHOICES of them."""
    size, highest = config.num_numbers, config.max_number
    if math.comb(highest + size - 1, size) <= MAX_CHOICES[size]:
        return list(combinations_with_replacement(range(1, highest + 1), size))
    rng = random.Random(f"countdown {size} {highest}")  # every run gets the same problems
    chosen: set[Numbers] = set()
    while len(chosen) < MAX_CHOICES[size]:
        # Multisets of 1..highest are the strictly ascending tuples of 1..highest+size-1, each element lowered
        # by its index.
        ascending = sorted(rng.sample(range(1, highest + size), size))
        chosen.add(tuple(number - i for i, number in enumerate(ascending)))
    return sorted(chosen)


@lru_cache(maxsize=8192)
def splits(numbers: Numbers) -> tuple[tuple[Numbers, Numbers], ...]:
    """Every way to deal ``numbers`` to a left and a right side, neither empty; equal numbers count as one."""
    indices = range(len(numbers))
    lefts = (left for size in indices[1:] for left in combinations(indices, size))
    sides = {
        (tuple(numbers[i] for i in left), tuple(numbers[i] for i in indices if i not in left))
        for left in lefts
    }
    return tuple(sorted(sides))


def reachable(numbers: Numbers, max_target: int) -> set[int]:
    """Values in 1..max_target of the expressions of all the numbers."""
    if len(numbers) == 1:
        return {n for n in numbers if n <= max_target}
    values = set()
    for left, right in splits(numbers):
        for a in value_counts(left):
            # The normal form loses no value, so the right side may be of any kind here.
            for b in value_counts(right):
                values.update((a + b, a - b, a * b))
    return {value for value in values if 1 <= value <= max_target}


@lru_cache(maxsize=6144)
def value_counts(numbers: Numbers, kinds: tuple[Kind, ...] = ANY_KIND) -> dict[int, int]:
    """{value: number of distinct expressions with it, of all the numbers and of these kinds}."""
    if len(numbers) == 1:
        return {numbers[0]: 1} if Kind.NUMBER in kinds else {}
    counts: Counter[int] = Counter()
    for left, right in splits(numbers):
        for operator in _operators(kinds):
            for a, count_a in value_counts(left).items():
                for b, count_b in value_counts(right, RIGHT_KINDS[operator]).items():
                    counts[_apply(operator, a, b)] += count_a * count_b
    return dict(counts)


def _operators(kinds: tuple[Kind, ...]) -> tuple[str, ...]:
    return tuple(operator for operator, kind in RESULT_KIND.items() if kind in kinds)


def _apply(operator: str, a: int, b: int) -> int:
    return a + b if operator == "+" else a - b if operator == "-" else a * b


@lru_cache(maxsize=16384)
def _ways_to_reach(numbers: Numbers, value: int, kinds: tuple[Kind, ...]) -> tuple[list[tuple], list[int]]:
    """Outermost steps (left, a, operator, right, b) of the expressions with this value, and the cumulative
    counts of these expressions."""
    ways, counts = [], []
    for left, right in splits(numbers):
        for operator in _operators(kinds):
            right_counts = value_counts(right, RIGHT_KINDS[operator])
            for a, count_a in value_counts(left).items():
                for b in _right_values(operator, a, value, right_counts):
                    ways.append((left, a, operator, right, b))
                    counts.append(count_a * right_counts[b])
    return ways, list(accumulate(counts))


def _right_values(operator: str, a: int, value: int, candidates: dict[int, int]) -> list[int]:
    """The candidates b with ``a operator b == value``."""
    if operator == "*":
        if a == 0:
            return list(candidates) if value == 0 else []
        b, remainder = divmod(value, a)
        return [b] if remainder == 0 and b in candidates else []
    b = value - a if operator == "+" else a - value
    return [b] if b in candidates else []


def random_solution(
    numbers: Numbers, value: int, rng: random.Random, kinds: tuple[Kind, ...] = ANY_KIND
) -> str:
    """An expression of all the numbers with this value, uniformly among the distinct ones. Raises ValueError: there
    is none."""
    if len(numbers) == 1 and value == numbers[0] and Kind.NUMBER in kinds:
        return str(value)
    ways, cumulated = _ways_to_reach(numbers, value, kinds)
    if not ways:
        raise ValueError(f"no expression of {numbers} equals {value}")
    left, a, operator, right, b = rng.choices(ways, cum_weights=cumulated)[0]
    return _join(
        random_solution(left, a, rng), operator, random_solution(right, b, rng, RIGHT_KINDS[operator])
    )


@lru_cache(maxsize=8192)
def _outermost_steps(numbers: Numbers, kinds: tuple[Kind, ...]) -> tuple[list[tuple], list[int]]:
    """Outermost steps (left, operator, right) of the expressions of these kinds, and the cumulative counts of
    these expressions."""
    steps = [(left, operator, right) for left, right in splits(numbers) for operator in _operators(kinds)]
    counts = [
        sum(value_counts(left).values()) * sum(value_counts(right, RIGHT_KINDS[operator]).values())
        for left, operator, right in steps
    ]
    return steps, list(accumulate(counts))


def random_expression(
    numbers: Numbers, rng: random.Random, kinds: tuple[Kind, ...] = ANY_KIND
) -> tuple[str, int]:
    """An expression of all the numbers and its value, uniformly among the distinct expressions."""
    if len(numbers) == 1:
        return str(numbers[0]), numbers[0]
    steps, cumulated = _outermost_steps(numbers, kinds)
    left, operator, right = rng.choices(steps, cum_weights=cumulated)[0]
    left_text, a = random_expression(left, rng)
    right_text, b = random_expression(right, rng, RIGHT_KINDS[operator])
    return _join(left_text, operator, right_text), _apply(operator, a, b)


def _join(left: str, operator: str, right: str) -> str:
    """The joined expression, with parentheses around a sum in a product and around a subtracted sum."""
    if operator == "*" and _is_sum(left):
        left = f"({left})"
    if operator != "+" and _is_sum(right):
        right = f"({right})"
    return f"{left}{operator}{right}"


def _is_sum(text: str) -> bool:
    """Whether an operator + or - stands outside all parentheses."""
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth == 0 and character in "+-":
            return True
    return False


def random_wrong_expression(numbers: Numbers, target: int, rng: random.Random) -> str:
    """An expression of all the (two or more) numbers with another value than the target, uniformly drawn."""
    while True:  # this ends: the sum and the difference of positive numbers are not both equal to the target
        text, value = random_expression(numbers, rng)
        if value != target:
            return text


def is_tidy(text: str) -> bool:
    """Whether the terms of every sum and the factors of every product stand in descending order."""
    return _tidy_value(ast.parse(text, mode="eval").body) is not None


def _tidy_value(node: ast.expr) -> int | None:
    """The value of a tidy expression, else None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    assert isinstance(node, ast.BinOp)
    a, b = _tidy_value(node.left), _tidy_value(node.right)
    if a is None or b is None:
        return None
    if isinstance(node.op, ast.Sub):
        return a - b
    # In a chain such as 9+5+3 the neighbour of 3 is 5, not 9+5.
    left = node.left
    is_chain = isinstance(left, ast.BinOp)
    neighbour = _tidy_value(left.right) if is_chain and type(left.op) is type(node.op) else a
    if neighbour is None or neighbour < b:
        return None
    return a + b if isinstance(node.op, ast.Add) else a * b


def generate_sft_examples(
    config: CountdownTask, *, count: int, noise: float, seed: int
) -> list[tuple[str, str]]:
    """``count`` pairs (prompt text, answer text) of random training problems.

    With probability ``noise`` an answer is a wrong expression of the same numbers, which leaves RL something
    to improve; otherwise it is a solution. Both are drawn uniformly from the distinct tidy ones: a small
    model that need not learn all orders of a sum learns more arithmetic from the same number of examples. The
    seed decides everything. ``noise`` above 0 needs two numbers or more: one number has no wrong expression.

    Raises ValueError: there is no training problem.
    """
    problems, rng = training_problems(config), random.Random(seed)
    examples = []
    for _ in range(count):
        problem = rng.choice(problems)
        examples.append((prompt_text(problem), random_answer(problem, noise=noise, rng=rng)))
    return examples


def training_problems(config: CountdownTask) -> list[tuple[Numbers, int]]:
    """Raises ValueError if there is none."""
    problems = [p for p in solvable_problems(config) if not is_heldout(p, config.heldout_fraction)]
    if not problems:
        raise _no_problem_error(config)
    return problems


def random_answer(problem: tuple[Numbers, int], *, noise: float, rng: random.Random) -> str:
    """A tidy expression of the problem's numbers: a wrong one with probability ``noise``, else a solution."""
    draw = random_wrong_expression if rng.random() < noise else random_solution
    while not is_tidy(answer := draw(*problem, rng)):
        pass  # this ends: every expression has a tidy form of the same value
    return answer
