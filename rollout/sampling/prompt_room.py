"""Room for a prompt beside ``rollout.max_new_tokens``, computed without a tokenizer before a start."""

from dataclasses import dataclass
from typing import Literal

from configs.schema import RunConfig
from configs.schema.task import FileTask

PromptsOf = Literal["training", "held-out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    tokens: int
    within: str
    """Names and values of the limits."""
    fixes: str
    """Further ways out."""
    max_new_tokens: int

    def too_long(self, prompt_name: str, num_tokens: int) -> str:
        """The error for a prompt of ``num_tokens`` tokens."""
        return (
            f"{prompt_name} has {num_tokens} tokens, but only {self.tokens} leave room for rollout.max_new_tokens={self.max_new_tokens} "
            f"within {self.within}; remove prompts of more than {self.tokens} tokens, {self.fixes}"
        )


def prompt_room(config: RunConfig, which: PromptsOf, *, max_positions: int | None) -> PromptRoom | None:
    """The room that the limits of a sequence leave to a prompt; None without a limit.

    A sequence must fit into the model's positions and the servers' KV pool, and a training sequence also into
    one micro-batch of the learner. ``max_positions`` is max_position_embeddings of the model's config.json, if
    it is there.

    Raises:
        ValueError: there is no room; the message names the limits and the fix.
    """
    limits = sequence_limits(config, which, max_positions=max_positions)
    if not limits:
        return None
    max_new, smallest = config.rollout.max_new_tokens, min(limits.values())
    within = ", ".join(f"{name}={limit}" for name, limit in limits.items())
    raises = [f"raise {name}" for name, limit in limits.items() if limit == smallest and "." in name]
    fixes = " or ".join(["lower rollout.max_new_tokens", *raises])
    if smallest - max_new < 1:
        raise ValueError(
            f"rollout.max_new_tokens={max_new} leaves no room for a {which} prompt within {within}; {fixes}"
        )
    leave_out = (
        "have them left out (task.too_long_prompts=leave_out), " if isinstance(config.task, FileTask) else ""
    )
    return PromptRoom(
        tokens=smallest - max_new, within=within, fixes=f"{leave_out}{fixes}", max_new_tokens=max_new
    )


def sequence_limits(config: RunConfig, which: PromptsOf, *, max_positions: int | None) -> dict[str, int]:
    """The limits of the tokens of a sequence, by their names."""
    limits = {"learner.token_budget": config.learner.token_budget} if which == "training" else {}
    limits |= {
        "max_position_embeddings": max_positions,
        "rollout.max_total_tokens": config.rollout.max_total_tokens,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def check_example_length(where: str, length: int, *, token_budget: int, max_positions: int) -> None:
    """Refuse a too long example of a supervised warm start, which would end the training when it is drawn,
    perhaps hours later.

    Raises:
        ValueError: with the place ``where``, the length, the limit and the fix.
    """
    takes = f"{where}: takes {length} tokens, more than"
    if length > max_positions:
        raise ValueError(f"{takes} the model's max_position_embeddings={max_positions}; shorten or drop it")
    if length > token_budget:
        raise ValueError(f"{takes} token_budget={token_budget}; raise token_budget, or shorten or drop it")
