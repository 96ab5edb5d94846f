"""The environment: what happens between a problem and its reward."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.schema.base import Count, Schema, Seconds, Tokens


class SingleTurn(Schema):
    """The policy answers the prompt once, and the run's ``reward`` scores the answer."""

    type: Literal["single_turn"] = "single_turn"


class EnvironmentLimits(Schema):
    """Limits of an episode. Each has a status of its own, which the metrics count."""

    max_turns: Count = 16
    """Most turns of the policy in an episode. One more ends it (``turn_limit``)."""
    max_tokens: Tokens | None = None
    """Most tokens of an episode's sequence, the prompt and all observations included. What does not fit ends the
    episode before a request (``token_limit``). None: as many as learner.token_budget, the model's positions and
    rollout.max_total_tokens allow."""
    timeout_s: Seconds = 600.0
    """Deadline of an episode. A later one is cancelled and not scored (``time_limit``)."""
    max_concurrency: Count = 512
    """Episodes under way at the same time."""
    reward_at_limit: Annotated[float, Field(allow_inf_nan=False)] | None = 0.0
    """Reward of an episode that max_turns or max_tokens ends. None: it is not scored, so it is not trained on and its
    group's baseline is without it."""


class TokenEnvironment(EnvironmentLimits):
    """An environment of the user's own that handles tokens (``rollout/environments/protocol.py``)."""

    type: Literal["tokens"] = "tokens"
    environment: str
    """``module:Class``, called once with ``options``. Its ``async run(problem, context)`` plays an episode. The module
    is looked for in the current folder, and among the installed ones. It runs in the sample role's event loop: what
    blocks belongs into a thread."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""

    @field_validator("environment")
    @classmethod
    def _module_and_name(cls, environment: str) -> str:
        if environment.count(":") != 1:
            raise ValueError(f"environment {environment!r} is not of the form module:name")
        return environment


EnvironmentConfig = Annotated[SingleTurn | TokenEnvironment, Field(discriminator="type")]
