"""How many tokens are left to a prompt beside ``rollout.max_new_tokens``. Known without a tokenizer, so
before anything is started."""

from dataclasses import dataclass
from typing import Literal

from configs.schema import RunConfig

PromptsOf = Literal["training", "held-out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRoom:
    tokens: int
    within: str
    """The limits, by name and value."""
    fixes: str
    """What gives more room."""
    max_new_tokens: int

    def too_long(self, prompt: str, num_tokens: int) -> str:
        """What is said of a prompt of more tokens; ``prompt`` says which it is."""
        return (
            f"{prompt} has {num_tokens} tokens, but only {self.tokens} leave room for rollout.max_new_tokens={self.max_new_tokens} within "
            f"{self.within}; remove prompts of more than {self.tokens} tokens, {self.fixes}"
        )


def prompt_room(config: RunConfig, which: PromptsOf, *, max_positions: int | None) -> PromptRoom | None:
    """What the limits of a sequence leave to a prompt; None where there is no limit.

    A sequence must fit into the model's positions and the servers' KV pool, and a training sequence also into
    one micro-batch of the learner. ``max_positions`` is the model's max_position_embeddings, None where its
    config.json does not say.

    Raises:
        ValueError: no room at all, naming the limits and the fix.
    """
    limits = {"learner.token_budget": config.learner.token_budget} if which == "training" else {}
    limits |= {
        "max_position_embeddings": max_positions,
        "rollout.max_total_tokens": config.rollout.max_total_tokens,
    }
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    max_new, smallest = config.rollout.max_new_tokens, min(known.values())
    within = ", ".join(f"{name}={limit}" for name, limit in known.items())
    raised = [f"raise {name}" for name, limit in known.items() if limit == smallest and "." in name]
    fixes = " or ".join(["lower rollout.max_new_tokens", *raised])
    if smallest - max_new < 1:
        raise ValueError(
            f"rollout.max_new_tokens={max_new} leaves no room for a {which} prompt within {within}; {fixes}"
        )
    return PromptRoom(tokens=smallest - max_new, within=within, fixes=fixes, max_new_tokens=max_new)


def check_example_length(where: str, length: int, *, token_budget: int, max_positions: int) -> None:
    """Of an example of a supervised warm start: one that is too long would end the training whenever it is
    drawn, maybe hours later.

    Raises:
        ValueError: naming where it stands, its length, the limit and the fix.
    """
    takes = f"{where}: takes {length} tokens, more than"
    if length > max_positions:
        raise ValueError(f"{takes} the model's max_position_embeddings={max_positions}; shorten or drop it")
    if length > token_budget:
        raise ValueError(f"{takes} token_budget={token_budget}; raise token_budget, or shorten or drop it")
