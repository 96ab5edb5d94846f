"""The roots: ``RunConfig`` (kind: train) and ``SftConfig`` (kind: sft), with the checks that span several parts."""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import NonNegativeInt, PositiveInt, Schema
from configs.schema.correction import CorrectionConfig
from configs.schema.launch import EvaluationConfig, LaunchConfig, TrackingConfig
from configs.schema.layout import LayoutConfig
from configs.schema.learner import CheckpointConfig, LearnerConfig, OptimizerConfig
from configs.schema.model import ModelConfig
from configs.schema.objective import AdvantageConfig, AggregationConfig, EntropyConfig, KLConfig, ObjectiveConfig
from configs.schema.rollout import RolloutConfig
from configs.schema.task import CountdownTask, RewardConfig, TaskConfig

DEFAULT_REWARD = {"countdown": "countdown", "gsm8k": "gsm8k", "jsonl": "math_verify"}


class RunConfig(Schema):
    """One RL run."""

    kind: Literal["train"] = "train"
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: NonNegativeInt = 0
    steps: PositiveInt = 100
    model: ModelConfig
    task: TaskConfig
    reward: RewardConfig | None = None
    """None: the task's own (countdown, gsm8k; math_verify for jsonl)."""
    rollout: RolloutConfig = RolloutConfig()
    layout: LayoutConfig = LayoutConfig()
    learner: LearnerConfig = LearnerConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    correction: CorrectionConfig = CorrectionConfig()
    aggregation: AggregationConfig = AggregationConfig()
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    launch: LaunchConfig = LaunchConfig()
    resume: Path | None = None
    """A run folder to go on from: its newest valid checkpoint."""

    @model_validator(mode="after")
    def _batches_divide(self):
        prompts, parts = self.rollout.prompts_per_step, self.learner.minibatches
        if prompts % parts:
            raise ValueError(
                f"rollout.prompts_per_step={prompts} does not divide into learner.minibatches={parts}; "
                f"use {prompts - prompts % parts or parts} or {prompts + parts - prompts % parts} prompts"
            )
        sequences, ranks = prompts // parts * self.rollout.group_size, self.layout.data_parallel
        if sequences % ranks:
            unit = parts * (ranks // math.gcd(self.rollout.group_size, ranks))
            fewer, more = prompts - prompts % unit, prompts - prompts % unit + unit
            raise ValueError(
                f"a minibatch of {sequences} sequences (rollout.prompts_per_step={prompts} / learner.minibatches={parts} * "
                f"rollout.group_size={self.rollout.group_size}) does not divide by layout.data_parallel={ranks}, so some ranks would get "
                f"fewer sequences than others; use {f'{fewer} or ' if fewer else ''}{more} prompts, or other minibatches or ranks"
            )
        if self.rollout.max_new_tokens >= self.learner.token_budget:
            raise ValueError(
                f"rollout.max_new_tokens={self.rollout.max_new_tokens} leaves no room for a prompt in learner.token_budget="
                f"{self.learner.token_budget}; raise the budget, since a sequence is never split over micro-batches"
            )
        return self

    @property
    def reward_type(self) -> RewardConfig:
        return self.reward or RewardConfig(type=DEFAULT_REWARD[self.task.type])


class CountdownSftData(Schema):
    """Generated solutions; ``noise`` of them are a random wrong expression of the same numbers (room for RL)."""

    type: Literal["countdown"] = "countdown"
    task: CountdownTask = CountdownTask()
    examples: PositiveInt = 90_000
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.3


class JsonlSftData(Schema):
    """The user's own file of prompts and responses."""

    type: Literal["jsonl"]
    path: Path
    prompt_field: str = "prompt"
    response_field: str = "response"
    apply_chat_template: bool = True


SftData = Annotated[CountdownSftData | JsonlSftData, Field(discriminator="type")]


class SftConfig(Schema):
    """A supervised warm start; the result is a Hugging Face folder."""

    kind: Literal["sft"]
    name: str = Field(default="sft", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: NonNegativeInt = 0
    steps: PositiveInt = 700
    batch_size: PositiveInt = 128
    model: ModelConfig
    data: SftData
    output: Path
    """Where the trained Hugging Face folder is written."""
    layout: LayoutConfig = LayoutConfig()
    token_budget: PositiveInt = 16384
    logprob_chunk_tokens: PositiveInt = 1024
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3, min_lr=2e-4, schedule="cosine", betas=(0.9, 0.98))
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _batch_divides(self):
        if self.batch_size % self.layout.data_parallel:
            raise ValueError(f"batch_size={self.batch_size} does not divide by layout.data_parallel={self.layout.data_parallel}")
        return self


AnyConfig = Annotated[RunConfig | SftConfig, Field(discriminator="kind")]
