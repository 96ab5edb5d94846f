"""Countdown's answers, parsed by Python's own grammar and evaluated in exact integers, without ``eval``."""

import ast
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rollout.records import Score

MAX_CHARACTERS = 256
"""Limit of one expression. Five numbers of three digits with generous parentheses take 40 characters."""
MAX_DEPTH = 32
"""Limit of nested parentheses, far below Python's own recursion limit."""
DIGITS = frozenset("0123456789")
"""ASCII digits only: ``str.isdigit`` accepts many more."""
CHARACTERS = re.compile(r"[-+*()0-9]+")
LEADING_ZERO = re.compile(r"(?<![0-9])0[0-9]")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class ExpressionError(ValueError):
    """The text is not an expression of this grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    value: int
    numbers: tuple[int, ...]
    """Every number written in the expression, in reading order."""


def evaluate(text: str) -> Evaluated:
    """Value of an expression and the numbers in it. The text must hold nothing else, not even blanks.

    ::

        sum     := product (("+" | "-") product)*
        product := factor ("*" factor)*
        factor  := number | "(" sum ")"
        number  := "0" | [1-9][0-9]*

    Raises ExpressionError: any other text, e.g. with a unary minus, a leading zero or a blank, or a text beyond the
    two limits above.
    """
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters, more than {MAX_CHARACTERS}")
    if not CHARACTERS.fullmatch(text) or LEADING_ZERO.search(text):
        raise ExpressionError(
            f"{text!r} has more than numbers, `+`, `-`, `*` and parentheses, or a leading zero"
        )
    if max(accumulate((character == "(") - (character == ")") for character in text)) > MAX_DEPTH:
        raise ExpressionError(f"parentheses nested deeper than {MAX_DEPTH}")
    numbers: list[int] = []
    try:
        value = _value_of(ast.parse(text, mode="eval").body, numbers)
    except SyntaxError as error:
        raise ExpressionError(f"{text!r} is not an expression: {error.msg}") from error
    return Evaluated(value=value, numbers=tuple(numbers))


def _value_of(node: ast.expr, numbers: list[int]) -> int:
    """Appends the numbers of the expression to ``numbers``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return node.value
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        # Without the node's text: ``ast.unparse`` recurses thrice as deep as the tree, and the caller's stack
        # may be deep.
        raise ExpressionError("a part is neither a number nor a sum, a difference or a product")
    left, right = _value_of(node.left, numbers), _value_of(node.right, numbers)
    return OPERATORS[type(node.op)](left, right)


def format_problem(numbers: Sequence[int], target: int) -> str:
    """``2 13 14=3``, the identity of a Countdown problem in prompt, reference and held-out hash."""
    return f"{' '.join(map(str, numbers))}={target}"


def parse_problem(reference: str) -> tuple[tuple[int, ...], int]:
    """Numbers and target of ``2 13 14=3``. Raises ValueError: the text is not of that form."""
    left, equals, right = reference.partition("=")
    words = [*left.split(), right]
    if not equals or not left.split() or not all(word and DIGITS.issuperset(word) for word in words):
        raise ValueError(f"{reference!r} is not a Countdown problem; write it like `2 13 14=3`")
    return tuple(int(word) for word in words[:-1]), int(right)


def countdown_reward(reference: str, response_text: str) -> Score:
    """1 if the response is an expression that equals the target and uses each number exactly once, else 0.

    The part ``valid`` is 1 for an expression with the right numbers, whatever its value.

    Raises ValueError: ``reference`` is not a Countdown problem.
    """
    numbers, target = parse_problem(reference)
    try:
        answer = evaluate(response_text)
    except ExpressionError:
        return Score(value=0.0, parts={"valid": 0.0})
    valid = sorted(answer.numbers) == sorted(numbers)
    return Score(value=float(valid and answer.value == target), parts={"valid": float(valid)})
