"""Countdown's answers, checked with exact integers by a recursive-descent evaluator, without ``eval``."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.records import Score

MAX_CHARACTERS = 256
"""Limit of one expression. Five numbers of three digits with generous parentheses take 40 characters."""
MAX_DEPTH = 32
"""Limit of nested parentheses, far below Python's own recursion limit."""
DIGITS = frozenset("0123456789")
"""ASCII digits only: ``str.isdigit`` accepts many more."""


class ExpressionError(ValueError):
    """The text is no expression of this grammar; the message names the first wrong character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    value: int
    numbers: tuple[int, ...]
    """Every number written in the expression, in reading order."""


def evaluate(text: str) -> Evaluated:
    """Value of an expression and the numbers in it. The text must be nothing else, blanks included.

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
    parser = _Parser(text)
    value = parser.sum(depth=0)
    if parser.position != len(text):
        raise parser.error("an operator or the end")
    return Evaluated(value=value, numbers=tuple(parser.numbers))


@dataclass(slots=True)
class _Parser:
    """One method per rule of the grammar; each reads from ``position`` and moves it on."""

    text: str
    position: int = 0
    numbers: list[int] = field(default_factory=list)

    def sum(self, depth: int) -> int:
        value = self.product(depth)
        while (operator := self.peek()) in ("+", "-"):
            self.position += 1
            right = self.product(depth)
            value = value + right if operator == "+" else value - right
        return value

    def product(self, depth: int) -> int:
        value = self.factor(depth)
        while self.peek() == "*":
            self.position += 1
            value *= self.factor(depth)
        return value

    def factor(self, depth: int) -> int:
        if self.peek() != "(":
            return self.number()
        if depth == MAX_DEPTH:
            raise ExpressionError(f"parentheses nested deeper than {MAX_DEPTH}")
        self.position += 1
        value = self.sum(depth + 1)
        if self.peek() != ")":
            raise self.error("`)`")
        self.position += 1
        return value

    def number(self) -> int:
        start = self.position
        while self.peek() in DIGITS:
            self.position += 1
        digits = self.text[start : self.position]
        if not digits:
            raise self.error("a number or `(`")
        if len(digits) > 1 and digits[0] == "0":
            raise ExpressionError(f"leading zero in {digits} at character {start + 1}")
        self.numbers.append(int(digits))
        return self.numbers[-1]

    def peek(self) -> str:
        """The next character, or "" at the end."""
        return self.text[self.position : self.position + 1]

    def error(self, expected: str) -> ExpressionError:
        actual = f"`{self.peek()}`" if self.peek() else "the end"
        return ExpressionError(f"expected {expected} at character {self.position + 1}, found {actual}")


def format_problem(numbers: Sequence[int], target: int) -> str:
    """``2 13 14=3``, the identity of a Countdown problem in prompt, reference and held-out hash."""
    return f"{' '.join(map(str, numbers))}={target}"


def parse_problem(reference: str) -> tuple[tuple[int, ...], int]:
    """Numbers and target of ``2 13 14=3``. Raises ValueError: the text is not of that form."""
    left, equals, right = reference.partition("=")
    words = [*left.split(), right]
    if not equals or not left.split() or not all(word and DIGITS.issuperset(word) for word in words):
        raise ValueError(f"{reference!r} is no Countdown problem; write it like `2 13 14=3`")
    return tuple(int(word) for word in words[:-1]), int(right)


def countdown_reward(reference: str, response_text: str) -> Score:
    """1 if the response is an expression that equals the target and uses each number exactly once, else 0.

    The part ``valid`` is 1 for an expression with the right numbers, whatever its value.

    Raises ValueError: ``reference`` is no Countdown problem.
    """
    numbers, target = parse_problem(reference)
    try:
        answer = evaluate(response_text)
    except ExpressionError:
        return Score(value=0.0, parts={"valid": 0.0})
    valid = sorted(answer.numbers) == sorted(numbers)
    return Score(value=float(valid and answer.value == target), parts={"valid": float(valid)})
