"""A task: prompts to train on and prompts to measure on, tokenised on access."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import xxhash

from rollout.records import DataPrompt, Message, Messages, Prompt, WithTools
from rollout.tasks.prompts import as_json, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt before tokenisation."""

    prompt_id: str
    """Depends only on the content, so it is the same in every run and on every machine."""
    text: str
    """What rewards read; see ``rollout.tasks.prompts.plain_text``."""
    reference: str
    messages: Messages | None = None
    """The conversation of the data, if it is more than one user message."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas that the chat template renders with the messages."""
    row: Mapping[str, Any] | None = None
    """The record of the data file, if it is kept."""
    number: int | None = None
    """Number of the line or row in the file, if there is one."""

    @property
    def prompt(self) -> DataPrompt:
        if self.tools and self.messages is not None:
            return WithTools(self.messages, self.tools)
        return self.text if self.messages is None else self.messages


class LazyPrompts(Sequence[Prompt]):
    """Prompts over any sequence of items. Each access turns an item into a problem and tokenises it. So half
    a million problems cost no time and no memory before they are used. ``where`` gives the place of a problem
    by its number, for messages.
    """

    def __init__(
        self,
        items: Sequence,
        *,
        to_problem: Callable[..., Problem],
        encode: Callable[[DataPrompt], list[int]],
        where: Callable[[int], str] | None = None,
    ):
        self._items, self._where = items, where
        self._to_problem, self._encode = to_problem, encode

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> "LazyPrompts": ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._of(self._items[index])
        problem, place = self._to_problem(self._items[index]), None
        if self._where is not None and problem.number is not None:
            place = self._where(problem.number)
        try:
            token_ids = self._encode(problem.prompt)
        except ValueError as error:
            raise ValueError(f"{place}: {error}" if place else str(error)) from error
        return Prompt(
            prompt_id=problem.prompt_id,
            token_ids=token_ids,
            text=problem.text,
            messages=problem.messages,
            reference=problem.reference,
            row=problem.row,
            place=place,
        )

    def may_exceed(self, num_tokens: int) -> Iterator[tuple[int, Prompt]]:
        """Index and prompt of all prompts with more than ``num_tokens`` tokens, and possibly of some others. Short texts are
        not tokenised.

        The method assumes a bound for the tokens around the texts of a prompt (chat template, system prompt, special
        tokens): the length of the whole first prompt with the same roles. There is no bound for a prompt with tools,
        or with a message that has further fields, such as tool calls.
        """
        around: dict[tuple, int] = {}
        for index, problem in enumerate(self.problems()):
            shape = () if problem.messages is None else shape_of(problem.prompt)
            if shape not in around:
                has_more = any(len(fields) > 1 for fields in shape)
                around[shape] = num_tokens if has_more else len(self[index].token_ids)
            if around[shape] + most_tokens(problem.prompt) > num_tokens:
                yield index, self[index]

    def without(self, indices: Collection[int]) -> "LazyPrompts":
        return self._of([item for index, item in enumerate(self._items) if index not in indices])

    def problems(self) -> Iterator[Problem]:
        """All in order, without tokenising any."""
        return map(self._to_problem, self._items)

    def _of(self, items: Sequence) -> "LazyPrompts":
        return LazyPrompts(items, to_problem=self._to_problem, encode=self._encode, where=self._where)


def most_tokens(prompt: DataPrompt | Message) -> int:
    """Upper bound of the tokens of a text, or of all texts of a conversation: the bytes of the normalised text.

    Normalisation does not change ASCII. UTF-8 of other characters grows at most elevenfold (Unicode FAQ,
    normalization, NFKC and NFKD).
    """
    text = as_json(prompt)
    return len(text) if text.isascii() else len(text) + 11 * len(text.encode())


def longer_than(prompts: Sequence[Prompt], num_tokens: int) -> dict[int, Prompt]:
    """The prompts of more than ``num_tokens`` tokens, by their indices."""
    candidates = prompts.may_exceed(num_tokens) if isinstance(prompts, LazyPrompts) else enumerate(prompts)
    return {index: prompt for index, prompt in candidates if len(prompt.token_ids) > num_tokens}


def _untokenised(prompts: Sequence[Prompt]) -> Iterable[Problem | Prompt]:
    return prompts.problems() if isinstance(prompts, LazyPrompts) else prompts


def rows_of(prompts: Sequence[Prompt]) -> list[Mapping[str, Any] | None]:
    """The data file's record of each prompt; None if it was not kept."""
    return [prompt.row for prompt in _untokenised(prompts)]


def ids_of(prompts: Sequence[Prompt]) -> Iterator[str]:
    """The ids of the prompts; of lazy ones without tokenising any."""
    return (prompt.prompt_id for prompt in _untokenised(prompts))


def digest_of(prompts: Sequence[Prompt]) -> int:
    """64 bits of XXH3 over the ids of the prompts in their order."""
    digest = xxhash.xxh3_64()
    for prompt_id in ids_of(prompts):
        digest.update(f"{prompt_id}\n".encode())
    return digest.intdigest()


def without(prompts: Sequence[Prompt], indices: Collection[int]) -> Sequence[Prompt]:
    """The prompts at other indices, in their order; lazy ones stay lazy."""
    if isinstance(prompts, LazyPrompts):
        return prompts.without(indices)
    return [prompt for index, prompt in enumerate(prompts) if index not in indices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The prompts are in a fixed order. They are not shuffled here."""

    name: str
    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    """May be empty."""
    heldout_sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """Further held-out prompts, by the names of their sets."""
    num_left_out: int = 0
    """Number of training prompts that are not in ``train`` because they are too long."""
