"""Room for a prompt beside ``rollout.max_new_tokens``, computed without a tokenizer before a start.

SGLang 0.5.23 accepts less than the positions of the model and the size of its KV pool. With L the smaller of the two, it
refuses a prompt of L - 6 tokens or more, and it cuts a sequence off at L - 2 (``max_req_len`` and ``max_req_input_len`` in
managers/tp_worker.py, ``init_req_max_new_tokens`` in managers/scheduler.py). If the pool has pages of P tokens, it
reserves two of them, one for a prompt's last page (``max_new_tokens_for_memory`` in mem_cache/allocator/base.py). A
request that needs the last page waits forever.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from configs.schema import RunConfig
from configs.schema.rollout import RolloutConfig
from configs.schema.task import FileTask

PromptsOf = Literal["training", "held-out"]

BEHIND_SEQUENCE = 2
"""Places that a server keeps free after a whole sequence."""
BEHIND_PROMPT = 7
"""Places that a server keeps free after a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLimit:
    name: str
    value: int
    sequence: int
    """Most tokens of a whole sequence."""
    prompt: int
    """Most tokens that a turn may continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    tokens: int
    within: str
    """Names and values of the limits."""
    fixes: str
    """Further fixes, for the message."""
    limit: str
    """Name and value of the limit of a response."""

    def too_long(self, prompt_name: str, num_tokens: int) -> str:
        """The error for a prompt of ``num_tokens`` tokens."""
        return (
            f"{prompt_name} has {num_tokens} tokens, but only {self.tokens} leave room for {self.limit} "
            f"within {self.within}; remove prompts of more than {self.tokens} tokens, {self.fixes}"
        )


def response_limit(config: RunConfig, which: PromptsOf) -> tuple[str, int]:
    """The field that limits the tokens of a response, and its value."""
    if which == "held-out" and config.evaluation.max_new_tokens is not None:
        return "evaluation.max_new_tokens", config.evaluation.max_new_tokens
    return "rollout.max_new_tokens", config.rollout.max_new_tokens


def prompt_room(config: RunConfig, which: PromptsOf, *, max_positions: int) -> PromptRoom:
    """The room for a prompt within the limits of a sequence.

    A sequence must fit into the model's positions and the servers' KV pool, and a training sequence also into
    one micro-batch of the learner. ``max_positions`` is max_position_embeddings of the model's config.json.

    Raises ValueError: there is no room; the message names the limits and the fix.
    """
    limits = sequence_limits(config, which, max_positions=max_positions)
    field, max_new = response_limit(config, which)
    rooms = {limit.name: min(limit.sequence - max_new, limit.prompt) for limit in limits}
    room = min(rooms.values())
    within = ", ".join(_in_words(limit) for limit in limits)
    of_model = " in the model's config.json, if the model is meant for longer ones"
    raises = [
        f"raise {name}{'' if '.' in name else of_model}" for name, left in rooms.items() if left == room
    ]
    fixes = " or ".join([f"lower {field}", *raises])
    if room < 1:
        raise ValueError(f"{field}={max_new} leaves no room for a {which} prompt within {within}; {fixes}")
    leave_out = (
        "have them left out (task.too_long_prompts=leave_out), " if isinstance(config.task, FileTask) else ""
    )
    return PromptRoom(tokens=room, within=within, fixes=f"{leave_out}{fixes}", limit=f"{field}={max_new}")


def _in_words(limit: SequenceLimit) -> str:
    if limit.sequence == limit.value:
        return f"{limit.name}={limit.value}"
    return f"{limit.name}={limit.value} (SGLang takes sequences of {limit.sequence} and prompts of {limit.prompt})"


def sequence_limits(config: RunConfig, which: PromptsOf, *, max_positions: int) -> list[SequenceLimit]:
    """The limits of the tokens of a sequence."""
    budget = config.learner.token_budget
    of_learner = SequenceLimit(name="learner.token_budget", value=budget, sequence=budget, prompt=budget - 1)
    return [*([of_learner] if which == "training" else []), *_server_limits(config.rollout, max_positions)]


def _server_limits(rollout: RolloutConfig, max_positions: int) -> Iterator[SequenceLimit]:
    flags = rollout.server_flags
    yield server_limit("max_position_embeddings", max_positions)
    if (length := _whole(flags.get("context-length"))) is not None:
        yield server_limit("rollout.server_args.context-length", length)
    if rollout.max_total_tokens is not None:
        page = _whole(flags.get("page-size")) or 1
        yield server_limit("rollout.max_total_tokens", rollout.max_total_tokens, page=page)


def server_limit(name: str, value: int, *, page: int = 1) -> SequenceLimit:
    """What a server accepts with ``value`` places, in pages of ``page``."""
    sequence = value // page * page - BEHIND_SEQUENCE * page
    return SequenceLimit(
        name=name, value=value, sequence=sequence, prompt=min(value - BEHIND_PROMPT, sequence - 1)
    )


def _whole(flag: object) -> int | None:
    """The number of a flag; None if it is not a number, which SGLang refuses at its start."""
    try:
        return int(str(flag))
    except ValueError:
        return None


def check_example_length(where: str, length: int, *, token_budget: int, max_positions: int) -> None:
    """Refuse an example of a supervised warm start that is too long. It would end the training when it is
    drawn, perhaps hours later. Raises ValueError: with the place ``where``, the length, the limit and the
    fix."""
    takes = f"{where}: takes {length} tokens, more than"
    if length > max_positions:
        raise ValueError(f"{takes} the model's max_position_embeddings={max_positions}; shorten or drop it")
    if length > token_budget:
        raise ValueError(f"{takes} token_budget={token_budget}; raise token_budget, or shorten or drop it")
