"""The roots ``RunConfig`` (kind: train) and ``SftConfig`` (kind: sft). ``contradictions.py`` has the checks that span
several blocks."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from configs.errors import Contradiction
from configs.schema.alarms import AlarmsConfig
from configs.schema.base import Count, GivenPath, LearningRate, PositiveInt, Schema, Steps, Tokens, at_most
from configs.schema.contradictions import contradictions_of, endless_warmup, unread_template_arguments
from configs.schema.correction import CorrectionConfig, ImportanceWeight
from configs.schema.critic import CriticConfig
from configs.schema.environment import EnvironmentConfig, SingleTurn
from configs.schema.launch import EvaluationConfig, LaunchConfig, RecordBatches, TrackingConfig
from configs.schema.layout import LayoutConfig
from configs.schema.learner import CheckpointConfig, LearnerConfig, OptimizerConfig
from configs.schema.model import ModelConfig
from configs.schema.objective import (
    MEAN_OF_SEQUENCES,
    ZERO_FOR_EQUAL_REWARDS,
    AdvantageConfig,
    AggregationConfig,
    ClippedObjective,
    CreditedAdvantage,
    EntropyConfig,
    GaeAdvantage,
    GrpoAdvantage,
    KLConfig,
    ObjectiveConfig,
    PolicyGradientObjective,
)
from configs.schema.reward import AnyReward, CountdownReward, Gsm8kReward, MathVerifyReward
from configs.schema.rollout import RolloutConfig
from configs.schema.sampler import SamplerConfig, ShuffledOrder
from configs.schema.task import CountdownTask, TaskConfig

DEFAULT_REWARD = {"countdown": CountdownReward(), "gsm8k": Gsm8kReward(), "jsonl": MathVerifyReward()}
LONGEST_NAME = 100
"""Most characters of a run's name. A grid adds its values to it, and the folder's name a date."""
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_NAME)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
"""Below 2**63: torch takes seeds below 2**64, and Megatron adds offsets."""


class RunConfig(Schema):
    """One RL run."""

    kind: Literal["train"] = "train"
    """train: an RL run; a supervised warm start is ``kind: sft``."""
    name: RunName = "run"
    """The run folder is named after it, ``NAME-DATE-TIME``, and so is the run in MLflow."""
    seed: Seed = 0
    """Seed of the order of the data, of the learner, and of servers that sample deterministically."""
    steps: Steps = 100
    """Training steps of the whole run, those before a resume included. A step samples once and makes
    ``learner.minibatches`` updates."""
    model: ModelConfig
    task: TaskConfig
    reward: AnyReward | None = None
    """None: the task's own reward (countdown, gsm8k; math_verify for jsonl)."""
    environment: EnvironmentConfig = SingleTurn()
    """What happens between a problem and its reward. Without it the policy answers once."""
    sampler: SamplerConfig = ShuffledOrder()
    """The order of the training prompts."""
    rollout: RolloutConfig = RolloutConfig()
    layout: LayoutConfig = LayoutConfig()
    learner: LearnerConfig = LearnerConfig()
    advantage: AdvantageConfig = GrpoAdvantage()
    critic: CriticConfig | None = Field(
        default_factory=lambda data: (
            CriticConfig() if isinstance(data.get("advantage"), GaeAdvantage) else None
        )
    )
    """The value model; only for ``advantage: {type: gae}``."""
    objective: ObjectiveConfig = ClippedObjective()
    correction: CorrectionConfig = CorrectionConfig()
    aggregation: AggregationConfig = Field(default_factory=lambda data: _default_aggregation(**data))
    """If it is left out and the objective is gspo, gmpo or sapo: sequence_mean_token_mean."""
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    record_batches: RecordBatches = "none"
    """The steps that are recorded in the run folder for ``tandem replay``: none, all, or ``{every: N}``. A
    record takes about 50 bytes per token, and in addition the bytes of replayed experts."""
    launch: LaunchConfig = LaunchConfig()
    resume: GivenPath | None = None
    """The folder of a run to continue from its newest valid checkpoint."""

    def _contradictions(self) -> Iterator[Contradiction]:
        return contradictions_of(self)

    @property
    def other_models(self) -> dict[str, ModelConfig]:
        """Models from folders other than the policy's, by field. They read the policy's tokens."""
        models = {"critic.model": self.critic and self.critic.model, "kl.model": self.kl.model}
        return {field: model for field, model in models.items() if model is not None}

    @property
    def key_variables(self) -> frozenset[str]:
        """The environment variables that hold keys of servers."""

        def named_in(block: Any) -> Iterator[str]:
            if isinstance(block, Mapping):
                if isinstance(variable := block.get("api_key_variable"), str):
                    yield variable
                block = tuple(block.values())
            if isinstance(block, (list, tuple)):
                for part in block:
                    yield from named_in(part)

        return frozenset(named_in(self.model_dump()))

    @property
    def policy_objective(self) -> ObjectiveConfig:
        """The objective that trains the policy: ``objective``, unless the correction replaces it by a policy
        gradient."""
        if self.correction.loss == "policy_gradient":
            return PolicyGradientObjective(type="policy_gradient")
        return self.objective

    @property
    def has_reference_weights(self) -> bool:
        """Whether the reference of the KL has its own weights. With adapters the reference is the policy
        without them, unless ``kl.model`` is set."""
        return self.kl.coefficient > 0 and (self.learner.lora is None or self.kl.model is not None)

    @property
    def credits_turns(self) -> bool:
        """Whether a turn is credited with the rewards from this turn on, instead of those of its whole
        episode."""
        return isinstance(self.advantage, CreditedAdvantage) and self.advantage.credit == "turn"

    @property
    def numerics_pieces(self) -> int | None:
        """Parts in which aligned numerics sum over the inputs of row-parallel products; None: default numerics."""
        if self.model.numerics != "aligned":
            return None
        return self.model.numerics_pieces or max(self.layout.tp, self.rollout.tp)

    @property
    def scores_old(self) -> bool:
        """Whether a forward pass before the update computes ``old``; see ``learner.old_logprobs``.

        Three settings need ``old`` before the update: several minibatches, since the policy moves between them;
        weights normalised over the whole step; KL(old || ref) in the reward. Without them a decoupled step still makes the
        pass where an episode forked or the critic alone is trained (``Learner.score``).
        """
        if self.correction.mode == "bypass":
            return False
        weight = self.correction.weight
        normalises = isinstance(weight, ImportanceWeight) and weight.normalise
        is_needed = self.learner.minibatches > 1 or normalises or self.kl.in_reward
        return is_needed or self.learner.old_logprobs == "always"

    @property
    def skips_zero_gradients(self) -> bool:
        """Whether micro-batches with zero advantages have a zero gradient of the policy and get no backward
        pass; see ``learner.skip_zero_gradients``. Not in a pipeline, where a separate pass would cost more
        bubbles."""
        other_terms = (
            self.kl.in_loss or self.entropy.coefficient > 0 or self.policy_objective.type == "function"
        )
        return self.learner.skip_zero_gradients and self.layout.pp == 1 and not other_terms

    @property
    def packs_no_signal_apart(self) -> bool:
        """Whether groups whose samples all have the same reward, and masked samples, get their own micro-batches,
        since these are skipped. Not with KL in the reward or rewards of turns, by which their samples differ."""
        has_zeros = self.advantage.type in ZERO_FOR_EQUAL_REWARDS and not self.credits_turns
        return self.skips_zero_gradients and has_zeros and not self.kl.in_reward

    @property
    def compared_parts(self) -> dict[str, float] | None:
        """The parts of the reward that siblings are compared by, each by itself, and their weights. None: by the sum."""
        if self.advantage.type != "gdpo" or self.reward_type.type != "weighted":
            return None
        return {name: part.weight for name, part in self.reward_type.parts.items()}

    @property
    def compares_samples(self) -> bool:
        """Whether a step's mismatch metrics are computed with the weights that sampled it. Otherwise they are
        computed with a policy that has changed between minibatches."""
        return self.correction.mode == "decoupled" or self.learner.minibatches == 1

    @property
    def servers_may_restart(self) -> bool:
        """Whether a server that ends is started again, and the run continues."""
        has_own_gpus = not self.launch.takes_turns
        return self.rollout.max_server_restarts > 0 and self.rollout.router is None and has_own_gpus

    @property
    def critic_warmup_steps(self) -> int:
        return self.critic.warmup_steps if self.critic is not None else 0

    @property
    def reward_type(self) -> AnyReward:
        return self.reward or DEFAULT_REWARD[self.task.type]


def _default_aggregation(
    *, objective: ObjectiveConfig | None = None, correction: CorrectionConfig | None = None, **others: Any
) -> AggregationConfig:
    replaced = correction is not None and correction.loss == "policy_gradient"
    per_sequence = objective is not None and not replaced and objective.type in MEAN_OF_SEQUENCES
    return AggregationConfig(type="sequence_mean_token_mean" if per_sequence else "token_mean")


class CountdownSftData(Schema):
    """Generated solutions. A share ``noise`` of them are random wrong expressions of the same numbers, which
    leaves room for RL."""

    type: Literal["countdown"] = "countdown"
    task: CountdownTask = CountdownTask()
    """The problems; held-out ones are not used."""
    examples: Annotated[PositiveInt, at_most(10**8, "they are all held in memory")] = 90_000
    """Number of solutions that are generated before any of them repeats."""
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of the examples, from 0 to below 1, whose answer is wrong."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.noise > 0 and self.task.num_numbers == 1:
            yield Contradiction(
                ("noise", "task.num_numbers"),
                f"noise={self.noise} needs wrong answers, but task.num_numbers=1 has none",
                "use noise=0 or more numbers",
            )


class JsonlSftData(Schema):
    """The user's file of prompts and responses."""

    type: Literal["jsonl"]
    path: GivenPath
    """A ``.jsonl`` or ``.parquet`` file; a relative path starts at the folder that the command is started in.
    """
    prompt_field: str = "prompt"
    """The name of the field with the prompt, text or a conversation as of ``task.prompt_field``; a field inside others is
    named with dots."""
    response_field: str = "response"
    """The name of the field with the response to learn: text, which is used as it is, or a list with one
    message of the assistant, which the chat template renders."""
    messages_field: str | None = None
    """The name of a field with a whole conversation, as TRL's ``messages``. The last message is the response, those before
    it are the prompt; ``prompt_field`` and ``response_field`` are not read."""
    learned_turns: Literal["last", "all"] = "last"
    """The turns of ``messages_field`` that are learned: only the last message, or all of the assistant's.
    ``all`` needs a chat template that keeps earlier turns as they are when others follow; other records are
    refused."""
    tools_field: str | None = None
    """The name of a field with tools for the chat template, as ``task.tools_field``."""
    apply_chat_template: bool = True
    """Whether a prompt becomes a user's message in the model's chat template. false: prompt and response are
    used as they are."""

    def _contradictions(self) -> Iterator[Contradiction]:
        for field in ("messages_field", "tools_field"):
            if getattr(self, field) is not None and not self.apply_chat_template:
                yield Contradiction(
                    (field, "apply_chat_template"),
                    f"{field} needs a chat template, but apply_chat_template=false",
                    f"set it to true, or remove {field}",
                )
        if self.learned_turns == "all" and self.messages_field is None:
            yield Contradiction(
                ("learned_turns", "messages_field"),
                "learned_turns=all needs the turns of messages_field, which names no field",
                "name the field of the conversations, or remove learned_turns",
            )


SftData = Annotated[CountdownSftData | JsonlSftData, Field(discriminator="type")]


class SftOptimizerConfig(OptimizerConfig):
    """The learner's optimizer settings with the defaults of a warm start."""

    lr: LearningRate = 2e-3
    """Learning rate, after the warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Decay from ``lr`` to ``min_lr`` over the warm start: none, along a cosine, or along a line."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of AdamW's two moments."""


class SftConfig(Schema):
    """A supervised warm start; the result is a Hugging Face folder."""

    kind: Literal["sft"]
    """sft: a supervised warm start; an RL run is ``kind: train``."""
    name: RunName = "sft"
    """The run folder is named after it, ``NAME-DATE-TIME``."""
    seed: Seed = 0
    """Seed of the order of the data."""
    steps: Steps = 700
    """Optimizer steps of the whole warm start."""
    batch_size: Count = 128
    """Examples of one step, over all ranks."""
    model: ModelConfig
    data: SftData
    output: GivenPath
    """The Hugging Face folder to write."""
    layout: LayoutConfig = LayoutConfig()
    token_budget: Tokens = 16384
    """Most tokens of one packed micro-batch on one rank."""
    logprob_chunk_tokens: Tokens = 1024
    """Tokens whose float32 logits exist at once."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def learns_all_turns(self) -> bool:
        """Whether earlier turns of the assistant are learned too."""
        return isinstance(self.data, JsonlSftData) and self.data.learned_turns == "all"

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.model.numerics == "aligned":
            yield Contradiction(
                ("model.numerics",),
                "model.numerics=aligned makes learner and servers agree, and a warm start has no servers",
                "remove it",
            )
        stages = self.layout.microbatch_multiple
        per_rank = self.batch_size // (1 if self.layout.dp == "auto" else self.layout.dp)
        if self.layout.dp != "auto" and self.batch_size % self.layout.dp:
            yield Contradiction(
                ("batch_size", "layout.dp"),
                f"batch_size={self.batch_size} does not divide by layout.dp={self.layout.dp}",
            )
        elif per_rank % stages:
            yield Contradiction(
                ("layout.vpp", "layout.pp", "batch_size"),
                f"layout.vpp={self.layout.vpp} interleaves layout.pp={stages} stages, which take a multiple of {stages} micro-batches, but "
                f"each rank has {per_rank} sequences of batch_size={self.batch_size}",
                f"use a multiple of {stages}, or layout.vpp=1",
            )
        renders = isinstance(self.data, JsonlSftData) and self.data.apply_chat_template
        if not renders:
            yield from unread_template_arguments(self.model.chat_template_kwargs, "data")
        yield from endless_warmup(self.optimizer, "optimizer", self.steps, ("steps",))


AnyConfig = Annotated[RunConfig | SftConfig, Field(discriminator="kind")]


def kind_of(config_class: type[RunConfig | SftConfig]) -> str:
    """The ``kind`` that a file of this class has."""
    (kind,) = get_args(config_class.model_fields["kind"].annotation)
    return kind
