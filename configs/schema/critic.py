"""The critic of PPO: a value model with its own weights and optimizer, for advantages by GAE."""

from configs.schema.base import LearningRate, NonNegativeInt, PositiveFloat, Schema
from configs.schema.learner import OptimizerConfig
from configs.schema.model import ModelConfig


class CriticOptimizerConfig(OptimizerConfig):
    """The learner's optimizer settings with a larger default learning rate: the critic starts from a head of
    zeros and follows returns that change."""

    lr: LearningRate = 1e-5
    """Learning rate of the critic, after the warm-up."""


class CriticConfig(Schema):
    """Layout, minibatches, token budget and recomputation are the learner's. The critic takes as many optimizer
    steps per batch as the policy."""

    model: ModelConfig | None = None
    """The folder whose backbone the critic starts from, with the policy's vocabulary; None: the policy's own.
    The head starts at zero."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    value_clip: PositiveFloat | None = 0.2
    """Value clipping: the loss counts a value as at most this far from the value that the advantages were
    computed with, in the unit of rewards; null: unclipped."""
    warmup_steps: NonNegativeInt = 0
    """The first this many steps of the run train only the critic and leave the policy as it is, so that its
    first advantages are not those of an untrained critic."""
