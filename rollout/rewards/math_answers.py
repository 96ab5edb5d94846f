"""Rewards of mathematical answers: the final number of GSM8K, and symbolic equality by math-verify."""

import logging
import re
from decimal import Decimal

from rollout.records import Score

ANSWER_MARK = "####"
"""GSM8K's solutions end with a line of this mark and the answer."""
# A minus right after a digit, a letter or a closing parenthesis subtracts; elsewhere it is a sign. Commas count
# only between thousands.
NUMBER = re.compile(
    r"(?P<minus>(?<![\w)])-)?\$?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
_DIGIT = re.compile("[0-9]")
_COMMA_IN_NUMBER = re.compile("[0-9],[0-9]")
_OF_NUMBERS = frozenset("0123456789,.$-")
"""All characters that NUMBER can match. It also looks at one character before them, of any kind."""
_LAST_CHARACTERS = 64
"""The end of a response in which the last number is searched first."""


def gsm8k_reference(answer: str) -> str:
    """The final answer of a GSM8K solution: the text after ``####``, without commas between thousands.

    Raises ValueError: there is no mark, not exactly one number after it, or a comma between digits that does
    not separate thousands."""
    _, mark, tail = answer.rpartition(ANSWER_MARK)
    if not mark:
        raise ValueError(f"has no `{ANSWER_MARK}`; a GSM8K answer ends with `{ANSWER_MARK} <number>`")
    if NUMBER.search(tail) is None:
        raise ValueError(
            f"has no number after `{ANSWER_MARK}` but {tail.strip()[:40]!r}; write e.g. `{ANSWER_MARK} 72`"
        )
    plain = NUMBER.sub(lambda match: match[0].replace(",", ""), tail.strip())
    if _COMMA_IN_NUMBER.search(plain):
        raise ValueError(
            f"has a comma after `{ANSWER_MARK}` that is not between thousands: {tail.strip()[:40]!r}; write e.g. "
            f"`{ANSWER_MARK} 1,002` or `{ANSWER_MARK} 10.5`"
        )
    only_number(plain)
    return plain


def gsm8k_reward(reference: str, response_text: str) -> Score:
    """1 if the response's final number equals that of the reference exactly, as a decimal number, else 0.

    The reference is a text with one number, or a solution that ends with ``####`` and its number. The final number of
    the response is the first one after its last ``####``; without that mark, its last number. Thousands' commas,
    ``$``, a closing dot and zeros at the end of a fraction do not matter. The part ``found`` is 1 if there is a
    number.

    Raises ValueError: the reference holds no number, or several.
    """
    expected = only_number(reference)
    _, mark, tail = response_text.rpartition(ANSWER_MARK)
    answer = _first_number(tail) if mark else _last_number(response_text)
    return Score(value=float(answer == expected), parts={"found": float(answer is not None)})


def only_number(reference: str) -> Decimal:
    """The number that ``gsm8k_reward`` compares with. Raises ValueError: the reference holds none, or
    several."""
    numbers = [*NUMBER.finditer(reference.rpartition(ANSWER_MARK)[2])]
    if len(numbers) != 1:
        what = "several numbers" if numbers else "no number"
        raise ValueError(
            f"holds {what}, but the reward gsm8k needs exactly one: {reference[-60:]!r}; write the number alone, or "
            f"`{ANSWER_MARK} 72` at the end"
        )
    return _to_decimal(numbers[0])


def _first_number(text: str) -> Decimal | None:
    digit = _DIGIT.search(text)  # many times faster than the whole pattern, and responses are long
    match = digit and NUMBER.search(text, _run_start(text, digit.start()))
    return match and _to_decimal(match)


def _last_number(text: str) -> Decimal | None:
    """The last number of the text. The function scans longer and longer ends of the text until one has a
    digit. If a scan does not begin inside a number, it finds the same numbers as a scan of the whole text."""
    start, size = len(text), _LAST_CHARACTERS
    while start > 0:
        start = _run_start(text, max(0, len(text) - size))
        if _DIGIT.search(text, start):
            *_, last = NUMBER.finditer(text, start)
            return _to_decimal(last)
        size = 4 * (len(text) - start)
    return None


def _run_start(text: str, place: int) -> int:
    """Where the run of number characters begins that ends just before ``place``."""
    while place > 0 and text[place - 1] in _OF_NUMBERS:
        place -= 1
    return place


def _to_decimal(match: re.Match[str]) -> Decimal:
    return Decimal((match["minus"] or "") + match["digits"].replace(",", ""))


def math_verify_reward(reference: str, response_text: str) -> Score:
    """1 if math-verify finds the response's final expression equal to the reference, else 0.

    The reference may be bare (``3/4``, ``\\frac{3}{4}``) or marked up (``$...$``, ``\\boxed{...}``). There is
    no time limit here, and a few expressions keep sympy busy forever: run the function in a process that can
    be killed (see ``Scorer``).

    Raises ValueError: math-verify cannot read the reference.
    """
    from math_verify import parse, verify  # loads sympy, which only the worker process needs

    # Without this, math-verify warns in each process that its time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    marked_up = any(mark in reference for mark in ("$", "\\boxed", "\\(", "\\["))
    expected = parse(reference if marked_up else f"\\boxed{{{reference}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not expected:
        raise ValueError(f"math-verify cannot read the reference {reference!r}; write a number or LaTeX")
    answer = parse(response_text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    correct = bool(answer) and verify(expected, answer, timeout_seconds=None)
    return Score(value=float(correct), parts={"found": float(bool(answer))})
