"""What a task is: prompts to train on and prompts to measure on, turned into token ids only when they are
asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from rollout.records import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt before tokenisation."""

    prompt_id: str
    """Stable over runs and machines: it comes from the content alone."""
    text: str
    reference: str
    row: Mapping[str, Any] | None = None
    """The record it was made of, where it is kept."""
    number: int | None = None
    """Of its line or row, where it is from a file."""


class LazyPrompts(Sequence[Prompt]):
    """Prompts over any sequence of items: an item becomes a problem, and is tokenised, on each access.

    Half a million problems cost neither time nor memory before they are used.
    """

    def __init__(
        self,
        items: Sequence,
        *,
        task: str,
        to_problem: Callable[..., Problem],
        encode: Callable[[str], list[int]],
        where: Callable[[int], str] | None = None,
    ):
        """where: the place of the problem of such a number, for messages."""
        self._items = items
        self._task = task
        self._to_problem = to_problem
        self._encode = encode
        self._where = where

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> "LazyPrompts": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            items = self._items[index]
            return LazyPrompts(
                items, task=self._task, to_problem=self._to_problem, encode=self._encode, where=self._where
            )
        problem = self._to_problem(self._items[index])
        return Prompt(
            prompt_id=problem.prompt_id,
            token_ids=self._encode(problem.text),
            text=problem.text,
            task=self._task,
            reference=problem.reference,
            row=problem.row,
            place=self._where(problem.number)
            if self._where is not None and problem.number is not None
            else None,
        )

    def may_exceed(self, num_tokens: int) -> Iterator[Prompt]:
        """Every prompt of more than ``num_tokens`` tokens, and maybe others; texts that are too short for
        that are not tokenised.

        What stands around a text (chat template, system prompt, special tokens) is at most what the first
        prompt has in all.
        """
        around = len(self[0].token_ids) if self._items else 0
        for index, item in enumerate(self._items):
            if around + most_tokens(self._to_problem(item).text) > num_tokens:
                yield self[index]


def most_tokens(text: str) -> int:
    """No tokenizer makes more tokens than there are bytes once it has normalised the text.

    ASCII stays as it is; UTF-8 of other characters grows at most elevenfold (Unicode FAQ, normalization, NFKC
    and NFKD).
    """
    return len(text) if text.isascii() else len(text) + 11 * len(text.encode())


def longest_above(prompts: Sequence[Prompt], num_tokens: int) -> Prompt | None:
    """The longest of the prompts with more than ``num_tokens`` tokens; None where there is none."""
    candidates = prompts.may_exceed(num_tokens) if isinstance(prompts, LazyPrompts) else prompts
    too_long = (prompt for prompt in candidates if len(prompt.token_ids) > num_tokens)
    return max(too_long, key=lambda prompt: len(prompt.token_ids), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """``train`` and ``heldout`` are in a fixed order of their own (nothing is shuffled here); ``heldout`` may
    be empty."""

    name: str
    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
