"""The roots ``RunConfig`` (kind: train) and ``SftConfig`` (kind: sft), with the checks that span several
blocks."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.errors import Contradiction, Contradictions
from configs.schema.alarms import AlarmsConfig
from configs.schema.base import Count, GivenPath, PositiveInt, Schema, Steps, Tokens, at_most
from configs.schema.correction import CorrectionConfig
from configs.schema.critic import CriticConfig
from configs.schema.environment import AgentEnvironment, EnvironmentConfig, SingleTurn
from configs.schema.launch import EvaluationConfig, LaunchConfig, RecordBatches, TrackingConfig
from configs.schema.layout import LayoutConfig
from configs.schema.learner import CheckpointConfig, LearnerConfig, OptimizerConfig
from configs.schema.model import ModelConfig
from configs.schema.objective import (
    AdvantageConfig,
    AggregationConfig,
    ClippedObjective,
    CreditedAdvantage,
    EntropyConfig,
    GrpoAdvantage,
    KLConfig,
    ObjectiveConfig,
    PolicyGradientObjective,
)
from configs.schema.rollout import RolloutConfig
from configs.schema.task import (
    AnyReward,
    CodeReward,
    CountdownReward,
    CountdownTask,
    Gsm8kReward,
    MathVerifyReward,
    TaskConfig,
    WeightedReward,
)

DEFAULT_REWARD = {"countdown": CountdownReward(), "gsm8k": Gsm8kReward(), "jsonl": MathVerifyReward()}
PER_SEQUENCE_OBJECTIVES = ("gspo", "gmpo")
WITHIN_GROUPS = ("grpo", "rloo", "opo", "reinforce_pp_baseline")
"""Advantages that compare a response with its siblings."""
MEAN_OF_SEQUENCES = (*PER_SEQUENCE_OBJECTIVES, "sapo")
"""Objectives whose papers average over the tokens of a sequence, then over sequences."""

NO_EXPERTS_WITH = {
    "chunked-prefill-size": "SGLang has a buffer for the experts of one chunk, and would end at a longer prompt",
    "enable-hierarchical-cache": "a part of the prefix cache that comes back has another place, with the experts of other tokens",
    "disaggregation-mode": "a server that decodes does not know the experts of the prompt",
}
"""Flags of SGLang that routing replay refuses, and why."""

NO_KEPT_IDS_WITH = {
    "sampling-backend": "this backend returns no kept ids",
    "enable-deterministic-inference": "SGLang's seeded sampler refuses min_p, and ends",
    "sampling-mask-max-tokens": "SGLang refuses a top_k above it",
    "disaggregation-mode": "kept ids between separate servers were not tried",
}
"""Flags of SGLang that top_p, top_k and min_p refuse, and why."""

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
"""A run folder's name also holds the date and the overrides of a job array; file names have at most 255
bytes."""
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
"""Below 2**63: torch takes seeds below 2**64, and Megatron adds offsets."""


NOT_ALIGNED_FLAGS = (
    "attention-backend",
    "kv-cache-dtype",
    "torch-compile",
    "speculative",
    "lora",
    "sampling-backend",
)
"""Flags of SGLang, or parts of them, that take other operations than those of ``numerics``."""


class RunConfig(Schema):
    """One RL run."""

    kind: Literal["train"] = "train"
    """train: this file is an RL run; a supervised warm start is ``kind: sft``."""
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
    """None: the task's own (countdown, gsm8k; math_verify for jsonl)."""
    environment: EnvironmentConfig = SingleTurn()
    """What happens between a problem and its reward. Without it the policy answers once."""
    rollout: RolloutConfig = RolloutConfig()
    layout: LayoutConfig = LayoutConfig()
    learner: LearnerConfig = LearnerConfig()
    advantage: AdvantageConfig = GrpoAdvantage()
    critic: CriticConfig | None = Field(
        default_factory=lambda data: CriticConfig() if _is(data, "advantage", "gae") else None
    )
    """The value model of ``advantage: {type: gae}``, and of no other advantage."""
    objective: ObjectiveConfig = ClippedObjective()
    correction: CorrectionConfig = CorrectionConfig()
    aggregation: AggregationConfig = Field(default_factory=lambda data: _default_aggregation(**data))
    """sequence_mean_token_mean where it is left out and the objective is gspo, gmpo or sapo."""
    kl: KLConfig = KLConfig()
    entropy: EntropyConfig = EntropyConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    record_batches: RecordBatches = "none"
    """The steps that are recorded for ``tandem replay``: none, all, or ``{every: N}``. A record takes about 50
    bytes per token, and those of the experts that are replayed, in the run folder."""
    launch: LaunchConfig = LaunchConfig()
    resume: GivenPath | None = None
    """The folder of a run to go on with, from its newest valid checkpoint."""

    @model_validator(mode="after")
    def _parts_fit(self):
        loss, reward = self._loss_contradictions(), self._reward_contradictions()
        if contradictions := [
            *loss,
            *reward,
            *self._batch_contradictions(),
            *self._routing_contradictions(),
            *self._numerics_contradictions(),
            *self._truncation_contradictions(),
        ]:
            raise Contradictions(contradictions)
        return self

    def _loss_contradictions(self) -> Iterator[Contradiction]:
        if self.rollout.group_size == 1 and self.advantage.type in WITHIN_GROUPS:
            yield Contradiction(
                ("advantage.type", "rollout.group_size"),
                f"advantage.type={self.advantage.type} compares the siblings of a prompt, of which rollout.group_size=1 has one, so that "
                "every advantage would be 0",
                "use 2 or more (4 to 16 are usual), or advantage.type=gae or reinforce_pp",
            )
        objective = self.policy_objective.type
        if objective in PER_SEQUENCE_OBJECTIVES and self.aggregation.type != "sequence_mean_token_mean":
            yield Contradiction(
                ("aggregation.type",),
                f"objective {objective} is a loss per sequence, which aggregation.type={self.aggregation.type} would weigh by its tokens",
                "remove `aggregation`, or set aggregation.type=sequence_mean_token_mean",
            )
        weight = self.correction.weight
        if objective == "gmpo" and weight.level == "token" and weight.bound == "mask":
            yield Contradiction(
                ("correction.weight.bound", "correction.reject"),
                "objective gmpo takes the geometric mean of a sequence's weights, so that one weight of zero would drop the whole sequence "
                "(correction.weight.bound=mask)",
                "use correction.weight.bound=truncate, or a rule in correction.reject",
            )
        responses = self.rollout.prompts_per_step * self.rollout.group_size
        if self.kl.controller.type == "adaptive" and self.kl.controller.horizon <= responses:
            yield Contradiction(
                ("kl.controller.horizon",),
                f"kl.controller.horizon={self.kl.controller.horizon} is no more than the {responses} responses of one step, so that "
                "the coefficient would jump",
                f"use several times as many, such as {10 * responses}",
            )
        if self.rollout.dynamic_sampling.type != "none" and self.advantage.type in ("gae", "reinforce_pp"):
            yield Contradiction(
                ("advantage.type", "rollout.dynamic_sampling.type"),
                f"rollout.dynamic_sampling drops groups whose rewards are equal, but advantage.type={self.advantage.type} learns from them "
                "too",
                "set rollout.dynamic_sampling.type=none, or use an advantage within groups",
            )
        if self.learner.old_logprobs == "always" and self.correction.mode == "bypass":
            yield Contradiction(
                ("learner.old_logprobs", "correction.mode"),
                "learner.old_logprobs=always has no effect with correction.mode=bypass, where old is the rollout",
                "remove it",
            )
        if self.critic is None and self.advantage.type == "gae":
            yield Contradiction(
                ("advantage.type",),
                "advantage.type=gae needs the values of a critic",
                "remove `critic: null`",
            )
        if self.critic is not None and self.advantage.type != "gae":
            yield Contradiction(
                ("advantage.type",),
                f"advantage.type={self.advantage.type} asks no critic",
                "remove `critic`, or set advantage.type=gae",
            )
        if self.critic_warmup_steps >= self.steps:
            yield Contradiction(
                ("critic.warmup_steps", "steps"),
                f"critic.warmup_steps={self.critic_warmup_steps} leaves none of the run's steps={self.steps} to the policy",
            )

    def _reward_contradictions(self) -> Iterator[Contradiction]:
        if self.credits_turns and isinstance(self.environment, SingleTurn | AgentEnvironment):
            yield Contradiction(
                ("advantage.credit", "environment.type"),
                f"advantage.credit=turn needs turns that earn rewards, and with environment.type={self.environment.type} a sample has one "
                "reward",
                "use credit=episode, or an environment of type tokens, chat or openenv",
            )
        if self.credits_turns and self.advantage.type == "grpo" and self.kl.place == "reward":
            yield Contradiction(
                ("advantage.credit", "kl.place"),
                "advantage.credit=turn with grpo compares the rewards of turns, which kl.place=reward would take a KL per token from",
                "use kl.place=loss, or advantage.type=reinforce_pp or gae",
            )
        parts = self.reward.parts if isinstance(self.reward, WeightedReward) else {}
        needs_rows = [f"reward.parts.{name}.type" for name, part in parts.items() if part.type == "code"]
        if isinstance(self.reward, CodeReward):
            needs_rows = ["reward.type"]
        if needs_rows and isinstance(self.task, CountdownTask):
            yield Contradiction(
                (needs_rows[0], "task.type"),
                f"{needs_rows[0]}=code reads the tests from the rows of a data file, and task.type=countdown has none",
                "use task.type=jsonl",
            )
        for name, part in parts.items():
            if part.type == "overlong" and part.buffer_tokens > self.rollout.max_new_tokens:
                yield Contradiction(
                    (f"reward.parts.{name}.buffer_tokens", "rollout.max_new_tokens"),
                    f"reward.parts.{name}.buffer_tokens={part.buffer_tokens} is more than rollout.max_new_tokens="
                    f"{self.rollout.max_new_tokens}, so that every response would be punished",
                    "use a fraction of it, such as a fifth",
                )

    def _batch_contradictions(self) -> Iterator[Contradiction]:
        prompts, parts = self.rollout.prompts_per_step, self.learner.minibatches
        sequences, stages = prompts // parts * self.rollout.group_size, self.layout.microbatch_multiple
        # layout.dp=auto: the command checks again once it knows the number of processes.
        ranks = 1 if self.layout.dp == "auto" else self.layout.dp
        if prompts % parts:
            yield Contradiction(
                ("rollout.prompts_per_step", "learner.minibatches"),
                f"rollout.prompts_per_step={prompts} does not divide into learner.minibatches={parts}",
                f"use {prompts - prompts % parts or parts} or {prompts + parts - prompts % parts} prompts",
            )
        elif sequences % ranks:
            unit = parts * (ranks // math.gcd(self.rollout.group_size, ranks))
            fewer, more = prompts - prompts % unit, prompts - prompts % unit + unit
            yield Contradiction(
                ("rollout.prompts_per_step", "learner.minibatches", "rollout.group_size", "layout.dp"),
                f"a minibatch of {sequences} sequences (rollout.prompts_per_step={prompts} / learner.minibatches={parts} * "
                f"rollout.group_size={self.rollout.group_size}) does not divide by layout.dp={ranks}, so some ranks would get "
                "fewer sequences than others",
                f"use {f'{fewer} or ' if fewer else ''}{more} prompts, or other minibatches or ranks",
            )
        elif (sequences // ranks) % stages:
            yield Contradiction(
                ("layout.vpp", "layout.pp"),
                f"layout.vpp={self.layout.vpp} interleaves layout.pp={stages} stages, which take a multiple of {stages} micro-batches, but "
                f"each rank has {sequences // ranks} sequences of a minibatch",
                f"use a multiple of {stages}, or layout.vpp=1",
            )
        if self.rollout.max_staleness and self.launch.placement == "colocated":
            yield Contradiction(
                ("rollout.max_staleness", "launch.placement"),
                f"rollout.max_staleness={self.rollout.max_staleness} samples while the learner trains, but with launch.placement=colocated "
                "they take turns on the same devices",
                "set rollout.max_staleness=0, or launch.placement=separate",
            )
        if self.rollout.drain_s > self.launch.patience_s:
            yield Contradiction(
                ("rollout.drain_s", "launch.collective_timeout_s"),
                f"rollout.drain_s={self.rollout.drain_s:g} is longer than the learner waits for the sample role "
                f"({self.launch.patience_s:g} s, 0.9 of launch.collective_timeout_s)",
                f"use at most {self.launch.patience_s:g}",
            )
        if self.rollout.max_new_tokens >= self.learner.token_budget:
            yield Contradiction(
                ("rollout.max_new_tokens", "learner.token_budget"),
                f"rollout.max_new_tokens={self.rollout.max_new_tokens} leaves no room for a prompt in learner.token_budget="
                f"{self.learner.token_budget}",
                "raise the budget, since a sequence is never split over micro-batches",
            )

    def _routing_contradictions(self) -> Iterator[Contradiction]:
        """Of routing replay: servers that give no experts, or not those that a token was sampled with."""
        if self.learner.routing == "own":
            return
        fix = "remove it, or set learner.routing=own"
        if not self.rollout.sglang_plugin:
            yield Contradiction(
                ("learner.routing", "rollout.sglang_plugin"),
                "learner.routing=rollout gets the experts by Tandem's plugin of SGLang, which rollout.sglang_plugin=false leaves out",
                fix,
            )
        if self.rollout.router is not None:
            yield Contradiction(
                ("learner.routing", "rollout.router"),
                "learner.routing=rollout does not go with rollout.router: sglang-router 0.3.2 passes on the fields that it knows, and "
                "the request for experts is none of them",
                fix,
            )
        for name, value in self.rollout.server_args.items():
            flag = name.replace("_", "-")
            reason = NO_EXPERTS_WITH.get(flag)
            if flag.startswith("speculative-"):
                reason = "its steps check several tokens at once, whose experts SGLang does not tell apart"
            is_chunked = flag == "chunked-prefill-size" and isinstance(value, int) and value > 0
            if reason is not None and value is not False and not is_chunked:
                yield Contradiction(
                    ("learner.routing", "rollout.server_args"),
                    f"learner.routing=rollout does not go with rollout.server_args.{name}={value}: {reason}",
                    fix,
                )

    def _numerics_contradictions(self) -> Iterator[Contradiction]:
        """What ``model.numerics=aligned`` does not cover."""
        if self.model.numerics != "aligned":
            return
        rollout, one = self.rollout, "which is aligned on one rank alone"
        sums = "sums the parts of several ranks"
        refused: list[tuple[str, object, object, str]] = [
            ("layout.tp", self.layout.tp, 1, f"{sums}, {one}"),
            ("layout.cp", self.layout.cp, 1, "splits the attention of a sequence over ranks, and SGLang does not"),
            ("rollout.tp", rollout.tp, 1, f"{sums}, {one}"),
            ("rollout.dtype", rollout.dtype, self.model.dtype, "rounds the served weights"),
            ("rollout.quantization", rollout.quantization, "none", "rounds the served weights"),
            ("rollout.precision", rollout.precision, None, "rounds the served weights"),
            ("rollout.sglang_plugin", rollout.sglang_plugin, True, "leaves SGLang's own operations in place"),
            (
                "launch.threads_per_process", self.launch.threads_per_process, 1,
                "lets a kernel split a sum by its threads",
            ),
        ]  # fmt: skip
        for field, value, needed, reason in refused:
            if value != needed:
                shown, fix = (str(x).lower() if isinstance(x, bool) else x for x in (value, needed))
                yield Contradiction(
                    (field, "model.numerics"),
                    f"{field}={shown} {reason}, so that model.numerics=aligned could not hold",
                    f"set {field}={'null' if fix is None else fix}, or model.numerics=default",
                )
        if rollout.is_truncated:
            yield Contradiction(
                ("rollout.top_k", "model.numerics"),
                "rollout.top_k samples from a kept set, whose log-probs SGLang computes in an order of its own, so that "
                "model.numerics=aligned could not hold",
                "remove rollout.top_p, top_k and min_p, or set model.numerics=default",
            )
        if self.model.dtype == "float16":
            yield Contradiction(
                ("model.dtype", "model.numerics"),
                "model.numerics=aligned was never tried with model.dtype=float16",
                "use float32 or bfloat16, or model.numerics=default",
            )
        for name in rollout.server_args:
            flag = name.replace("_", "-")
            if any(part in flag for part in NOT_ALIGNED_FLAGS):
                yield Contradiction(
                    (f"rollout.server_args.{name}", "model.numerics"),
                    f"rollout.server_args.{name} chooses operations of SGLang's own, so that model.numerics=aligned could not hold",
                    "remove it, or set model.numerics=default",
                )

    def _truncation_contradictions(self) -> Iterator[Contradiction]:
        """Of top_p, top_k and min_p: servers that do not return the kept ids."""
        rollout = self.rollout
        if not rollout.is_truncated:
            return
        fix = "remove it, or remove rollout.top_p, top_k and min_p"
        if rollout.router is not None:
            yield Contradiction(
                ("rollout.top_k", "rollout.router"),
                f"rollout.top_k={rollout.top_k} does not go with rollout.router: sglang-router 0.3.2 passes on the fields that it knows, "
                "and the request for kept ids is none of them",
                fix,
            )
        for name, value in rollout.server_args.items():
            flag = name.replace("_", "-")
            reason = NO_KEPT_IDS_WITH.get(flag)
            if flag.startswith("speculative-"):
                reason = "SGLang returns kept ids for few of its ways to draft, and none was tried"
            if flag == "sampling-backend" and value != "ascend":
                reason = None
            if flag == "enable-deterministic-inference" and not rollout.min_p:
                reason = None
            if flag == "sampling-mask-max-tokens" and isinstance(value, int) and value >= rollout.top_k:
                reason = None
            if reason is not None and value is not False:
                yield Contradiction(
                    ("rollout.top_k", "rollout.server_args"),
                    f"rollout.top_k={rollout.top_k} does not go with rollout.server_args.{name}={value}: {reason}",
                    fix,
                )

    @property
    def policy_objective(self) -> ObjectiveConfig:
        """The objective that trains the policy: ``objective``, unless the correction replaces it by a policy
        gradient."""
        if self.correction.loss == "policy_gradient":
            return PolicyGradientObjective(type="policy_gradient")
        return self.objective

    @property
    def credits_turns(self) -> bool:
        """Whether a turn is credited with what is earned from then on, and not with its whole episode."""
        return isinstance(self.advantage, CreditedAdvantage) and self.advantage.credit == "turn"

    @property
    def scores_old(self) -> bool:
        """Whether a forward pass before the update computes ``old``; see ``learner.old_logprobs``.

        Three settings need ``old`` before the update: several minibatches, since the policy moves between them;
        weights normalised over the whole step; KL(old || ref) in the reward.
        """
        if self.correction.mode == "bypass":
            return False
        normalises = self.correction.weight.level != "none" and self.correction.weight.normalise
        kl_in_reward = self.kl.place == "reward" and self.kl.coefficient > 0
        is_needed = self.learner.minibatches > 1 or normalises or kl_in_reward
        return is_needed or self.learner.old_logprobs == "always"

    @property
    def compares_samples(self) -> bool:
        """Whether a step's mismatch metrics are computed with the weights that sampled it, and not with a policy
        that has moved between minibatches."""
        return self.correction.mode == "decoupled" or self.learner.minibatches == 1

    @property
    def servers_may_restart(self) -> bool:
        """Whether a server that ends is started again, and the run goes on."""
        separate = self.launch.placement == "separate"
        return self.rollout.max_server_restarts > 0 and self.rollout.router is None and separate

    @property
    def rejects(self) -> bool:
        """Whether a rule or the veto may take tokens or responses out of the loss."""
        return bool(self.correction.reject) or self.correction.veto is not None

    @property
    def rejects_from_mean(self) -> bool:
        """Whether the loss is a mean over fewer tokens than were sampled."""
        return self.rejects and self.correction.denominator == "kept"

    @property
    def critic_warmup_steps(self) -> int:
        return self.critic.warmup_steps if self.critic is not None else 0

    @property
    def reward_type(self) -> AnyReward:
        return self.reward or DEFAULT_REWARD[self.task.type]


def _is(data: dict[str, Any], field: str, *types: str) -> bool:
    """Whether a field before this one is a variant of these types."""
    return getattr(data.get(field), "type", None) in types


def _default_aggregation(
    *, objective: ObjectiveConfig | None = None, correction: CorrectionConfig | None = None, **others: Any
) -> AggregationConfig:
    replaced = correction is not None and correction.loss == "policy_gradient"
    per_sequence = objective is not None and not replaced and objective.type in MEAN_OF_SEQUENCES
    return AggregationConfig(type="sequence_mean_token_mean" if per_sequence else "token_mean")


class CountdownSftData(Schema):
    """Generated solutions. A share ``noise`` of them is a random wrong expression of the same numbers, which
    leaves room for RL."""

    type: Literal["countdown"] = "countdown"
    task: CountdownTask = CountdownTask()
    """The problems; those that are held out are not used."""
    examples: Annotated[PositiveInt, at_most(10**8, "they are all held in memory")] = 90_000
    """Number of solutions that are generated before any of them repeats."""
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """Share of the examples, from 0 to below 1, whose answer is wrong."""

    @model_validator(mode="after")
    def _wrong_answers_exist(self):
        if self.noise > 0 and self.task.num_numbers == 1:
            raise Contradiction(
                ("noise", "task.num_numbers"),
                f"noise={self.noise} needs wrong answers, but task.num_numbers=1 has none",
                "use noise=0 or more numbers",
            )
        return self


class JsonlSftData(Schema):
    """The user's own file of prompts and responses."""

    type: Literal["jsonl"]
    path: GivenPath
    """A ``.jsonl`` or ``.parquet`` file; a relative path starts at the folder that the command is started in.
    """
    prompt_field: str = "prompt"
    """The name of the field with the prompt; a field inside others is named with dots."""
    response_field: str = "response"
    """The name of the field with the response to learn."""
    apply_chat_template: bool = True
    """Whether a prompt becomes a user's message in the model's chat template. false: prompt and response are
    used as they are."""


SftData = Annotated[CountdownSftData | JsonlSftData, Field(discriminator="type")]


class SftConfig(Schema):
    """A supervised warm start; the result is a Hugging Face folder."""

    kind: Literal["sft"]
    """sft: this file is a supervised warm start; an RL run is ``kind: train``."""
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
    optimizer: OptimizerConfig = OptimizerConfig(lr=2e-3, min_lr=2e-4, schedule="cosine", betas=(0.9, 0.98))
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _has_no_servers(self):
        if self.model.numerics == "aligned":
            raise Contradiction(
                ("model.numerics",),
                "model.numerics=aligned makes learner and servers agree, and a warm start has no servers",
                "remove it",
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self):
        if self.layout.dp != "auto" and self.batch_size % self.layout.dp:
            raise Contradiction(
                ("batch_size", "layout.dp"),
                f"batch_size={self.batch_size} does not divide by layout.dp={self.layout.dp}",
            )
        stages = self.layout.microbatch_multiple
        per_rank = self.batch_size // (1 if self.layout.dp == "auto" else self.layout.dp)
        if per_rank % stages:
            raise Contradiction(
                ("layout.vpp", "layout.pp", "batch_size"),
                f"layout.vpp={self.layout.vpp} interleaves layout.pp={stages} stages, which take a multiple of {stages} micro-batches, but "
                f"each rank has {per_rank} sequences of batch_size={self.batch_size}",
                f"use a multiple of {stages}, or layout.vpp=1",
            )
        return self


AnyConfig = Annotated[RunConfig | SftConfig, Field(discriminator="kind")]
