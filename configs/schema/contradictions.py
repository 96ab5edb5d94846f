"""Settings in different blocks of a training run that contradict each other: which fields, why, and the
fix."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from configs.errors import Contradiction
from configs.schema.correction import ImportanceWeight
from configs.schema.environment import AgentEnvironment, MessageEnvironment, SingleTurn
from configs.schema.learner import OptimizerConfig
from configs.schema.objective import PER_SEQUENCE_OBJECTIVES, WITHIN_GROUPS
from configs.schema.reward import CodeReward, OverlongPenalty, RewardByField, rewards_in
from configs.schema.sampler import MixtureOrder
from configs.schema.server_contradictions import of_servers
from configs.schema.task import CountdownTask, FileTask, JsonlTask

if TYPE_CHECKING:
    from configs.schema.run import RunConfig


def contradictions_of(config: "RunConfig") -> Iterator[Contradiction]:
    """Contradictions of a whole config whose blocks are valid each by itself."""
    yield from _of_loss(config)
    yield from _of_reward(config)
    yield from _of_batch(config)
    yield from _of_schedules(config)
    yield from of_servers(config)
    yield from _of_best_checkpoint(config)
    yield from _of_trace(config)
    yield from _of_template(config)


def _of_loss(config: "RunConfig") -> Iterator[Contradiction]:
    if config.rollout.group_size == 1 and config.advantage.type in WITHIN_GROUPS:
        yield Contradiction(
            ("advantage.type", "rollout.group_size"),
            f"advantage.type={config.advantage.type} compares the siblings of a prompt, but with rollout.group_size=1 there is only "
            "one, so there is no baseline",
            "use 2 or more (4 to 16 are usual), or advantage.type=gae or reinforce_pp",
        )
    objective = config.policy_objective.type
    if objective in PER_SEQUENCE_OBJECTIVES and config.aggregation.type != "sequence_mean_token_mean":
        yield Contradiction(
            ("aggregation.type",),
            f"objective {objective} is a loss per sequence, but aggregation.type={config.aggregation.type} would weight it by its tokens",
            "remove `aggregation`, or set aggregation.type=sequence_mean_token_mean",
        )
    weight = config.correction.weight
    # A weight level of the whole sequence is meant to drop it; a weight of one token or segment is not.
    masks = isinstance(weight, ImportanceWeight) and weight.bound == "mask"
    if objective == "gmpo" and masks and weight.level not in ("sequence", "geometric"):
        yield Contradiction(
            ("correction.weight.bound", "correction.reject"),
            "objective gmpo takes the geometric mean of a sequence's weights, so one weight of zero would drop the whole sequence "
            "(correction.weight.bound=mask)",
            "set correction.weight.bound=truncate and correction.weight.lower=null; tokens are rejected by rules in correction.reject",
        )
    responses = config.rollout.prompts_per_step * config.rollout.group_size
    if config.kl.controller.type == "adaptive" and config.kl.controller.horizon <= responses:
        yield Contradiction(
            ("kl.controller.horizon",),
            f"kl.controller.horizon={config.kl.controller.horizon} is not above the {responses} responses of one step, so "
            "the coefficient would jump",
            f"use several times as many, such as {10 * responses}",
        )
    if config.rollout.dynamic_sampling.type != "none" and config.advantage.type in ("gae", "reinforce_pp"):
        yield Contradiction(
            ("advantage.type", "rollout.dynamic_sampling.type"),
            f"rollout.dynamic_sampling drops groups whose rewards are equal, but advantage.type={config.advantage.type} learns from them "
            "too",
            "set rollout.dynamic_sampling.type=none, or use an advantage within groups",
        )
    if config.learner.old_logprobs == "always" and config.correction.mode == "bypass":
        yield Contradiction(
            ("learner.old_logprobs", "correction.mode"),
            "learner.old_logprobs=always has no effect with correction.mode=bypass, where old is the rollout",
            "remove it",
        )
    if config.critic is None and config.advantage.type == "gae":
        yield Contradiction(
            ("advantage.type",), "advantage.type=gae needs the values of a critic", "remove `critic: null`"
        )
    if config.critic is not None and config.advantage.type != "gae":
        yield Contradiction(
            ("advantage.type",),
            f"advantage.type={config.advantage.type} does not use a critic",
            "remove `critic`, or set advantage.type=gae",
        )
    if config.critic_warmup_steps >= config.steps:
        yield Contradiction(
            ("critic.warmup_steps", "steps"),
            f"critic.warmup_steps={config.critic_warmup_steps} leaves none of the run's steps={config.steps} to the policy",
        )


_OF_OTHER_ANSWERS = {"countdown": ("gsm8k", "math_verify"), "gsm8k": ("countdown",)}
"""Rewards that cannot read a task's answers, by the task."""


def _of_gdpo(config: "RunConfig") -> Iterator[Contradiction]:
    if config.reward_type.type != "weighted":
        yield Contradiction(
            ("advantage.type", "reward.type"),
            f"advantage.type=gdpo compares each part of a weighted reward, and this run's reward is {config.reward_type.type}",
            "use reward={type: weighted, parts: {...}}, or advantage.type=grpo",
        )
    if not isinstance(config.environment, SingleTurn):
        yield Contradiction(
            ("advantage.type", "environment.type"),
            "advantage.type=gdpo compares each part of a weighted reward, and an environment may give rewards without these parts",
            "use advantage.type=grpo, or environment.type=single_turn",
        )
    if config.kl.in_reward:
        yield Contradiction(
            ("advantage.type", "kl.place"),
            "advantage.type=gdpo compares the parts of the reward, and kl.place=reward would subtract a KL that is none of them",
            "use kl.place=loss, or advantage.type=grpo",
        )


def _of_reward(config: "RunConfig") -> Iterator[Contradiction]:
    if config.credits_turns and isinstance(config.environment, SingleTurn):
        yield Contradiction(
            ("advantage.credit", "environment.type"),
            "advantage.credit=turn needs turns that earn rewards, and with environment.type=single_turn a sample has one reward",
            "use credit=episode, or an environment of type tokens, chat, agent or openenv",
        )
    if (
        config.credits_turns
        and isinstance(config.environment, AgentEnvironment)
        and config.environment.reward == "run"
    ):
        yield Contradiction(
            ("advantage.credit", "environment.reward"),
            "advantage.credit=turn needs turns that earn rewards, and with environment.reward=run an episode has one reward",
            "use credit=episode, or environment.reward=agent and an agent that prints turn_rewards",
        )
    if config.credits_turns and config.advantage.type == "grpo" and config.kl.in_reward:
        yield Contradiction(
            ("advantage.credit", "kl.place"),
            "advantage.credit=turn with grpo compares the rewards of turns, but kl.place=reward would subtract a KL per token from them",
            "use kl.place=loss, or advantage.type=reinforce_pp or gae",
        )
    if config.reward is not None and getattr(config.environment, "reward", None) == "agent":
        yield Contradiction(
            ("reward", "environment.reward"),
            "reward has no effect: with environment.reward=agent the agent prints the reward of its episode",
            "remove `reward`, or set environment.reward=run",
        )
    if config.advantage.type == "gdpo":
        yield from _of_gdpo(config)
    parts = list(rewards_in(config.reward_type))
    readers = [(f"{one.field}.type", "code") for one in parts if isinstance(one.reward, CodeReward)][:1]
    if isinstance(config.reward, RewardByField):
        readers = [("reward.type", "by_field")]
    if isinstance(config.sampler, MixtureOrder):
        readers.append(("sampler.type", "mixture"))
    for field, kind in readers if isinstance(config.task, CountdownTask) else ():
        yield Contradiction(
            (field, "task.type"),
            f"{field}={kind} reads a field of the rows of a data file, but task.type=countdown has none",
            "use task.type=jsonl, or leave `sampler` out" if kind == "mixture" else "use task.type=jsonl",
        )
    for field, part, _ in parts:
        if part.type in _OF_OTHER_ANSWERS.get(config.task.type, ()):
            yield Contradiction(
                (f"{field}.type", "task.type"),
                f"{field}.type={part.type} cannot compare a response with the answers of task.type={config.task.type}",
                f"use {field}.type={config.task.type}",
            )
        if isinstance(part, OverlongPenalty) and part.buffer_tokens > config.rollout.max_new_tokens:
            yield Contradiction(
                (f"{field}.buffer_tokens", "rollout.max_new_tokens"),
                f"{field}.buffer_tokens={part.buffer_tokens} is more than rollout.max_new_tokens={config.rollout.max_new_tokens}, so "
                "that every response would be punished",
                "use a fraction of it, such as a fifth",
            )


def _of_batch(config: "RunConfig") -> Iterator[Contradiction]:
    prompts, parts = config.rollout.prompts_per_step, config.learner.minibatches
    sequences, stages = prompts // parts * config.rollout.group_size, config.layout.microbatch_multiple
    # With layout.dp=auto the command checks again when it knows the number of processes.
    ranks = 1 if config.layout.dp == "auto" else config.layout.dp
    if prompts % parts:
        yield Contradiction(
            ("rollout.prompts_per_step", "learner.minibatches"),
            f"rollout.prompts_per_step={prompts} does not divide into learner.minibatches={parts}",
            f"use {prompts - prompts % parts or parts} or {prompts + parts - prompts % parts} prompts",
        )
    elif sequences % ranks:
        unit = parts * (ranks // math.gcd(config.rollout.group_size, ranks))
        fewer, more = prompts - prompts % unit, prompts - prompts % unit + unit
        yield Contradiction(
            ("rollout.prompts_per_step", "learner.minibatches", "rollout.group_size", "layout.dp"),
            f"a minibatch of {sequences} sequences (rollout.prompts_per_step={prompts} / learner.minibatches={parts} * "
            f"rollout.group_size={config.rollout.group_size}) does not divide by layout.dp={ranks}, so some ranks would get "
            "fewer sequences than others",
            f"use {f'{fewer} or ' if fewer else ''}{more} prompts, or other minibatches or ranks",
        )
    elif (sequences // ranks) % stages:
        yield Contradiction(
            ("layout.vpp", "layout.pp"),
            f"layout.vpp={config.layout.vpp} interleaves layout.pp={stages} stages, which take a multiple of {stages} micro-batches, but "
            f"each rank has {sequences // ranks} sequences of a minibatch",
            f"use a multiple of {stages}, or layout.vpp=1",
        )
    if config.rollout.max_staleness and config.launch.takes_turns:
        yield Contradiction(
            ("rollout.max_staleness", "launch.placement"),
            f"rollout.max_staleness={config.rollout.max_staleness} samples while the learner trains, but with launch.placement=colocated "
            "they take turns on the same devices",
            "set rollout.max_staleness=0, or launch.placement=separate",
        )
    rollout, nodes = config.rollout, config.launch.nodes
    if (
        nodes is not None
        and rollout.weight_transfer == "memory"
        and not config.launch.copies_by_node(
            rollout, stages=config.layout.pp, replicas=rollout.replicas, nodes=nodes.rollout
        )
    ):
        yield Contradiction(
            ("rollout.weight_transfer", "launch.nodes"),
            "rollout.weight_transfer=memory needs on each of launch.nodes the whole model and whole servers: launch.placement=colocated, "
            "layout.pp=1, and rollout.replicas of at least launch.nodes.rollout",
            "set rollout.weight_transfer=broadcast, or remove launch.nodes",
        )
    if config.rollout.drain_s > config.launch.patience_s:
        yield Contradiction(
            ("rollout.drain_s", "launch.collective_timeout_s"),
            f"rollout.drain_s={config.rollout.drain_s:g} is longer than the learner waits for the sample role "
            f"({config.launch.patience_s:g} s, 0.9 of launch.collective_timeout_s)",
            f"use at most {config.launch.patience_s:g}",
        )
    if config.rollout.late_s > config.launch.patience_s:
        yield Contradiction(
            ("rollout.request_timeout_s", "launch.collective_timeout_s"),
            f"the learner waits for samples for {config.launch.patience_s:g} s (0.9 of launch.collective_timeout_s), and would end the run "
            f"before a late request has had its attempts of rollout.request_timeout_s={config.rollout.request_timeout_s:g}",
            f"set launch.collective_timeout_s={math.ceil(config.rollout.late_s / 0.9)} or more, or lower rollout.request_timeout_s",
        )
    if config.rollout.max_new_tokens >= config.learner.token_budget:
        yield Contradiction(
            ("rollout.max_new_tokens", "learner.token_budget"),
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} leaves no room for a prompt in learner.token_budget="
            f"{config.learner.token_budget}",
            "raise the budget, since a sequence is never split over micro-batches",
        )


def _of_schedules(config: "RunConfig") -> Iterator[Contradiction]:
    parts, waits = config.learner.minibatches, config.critic_warmup_steps
    if waits < config.steps:
        fields = ("steps", "learner.minibatches", *(("critic.warmup_steps",) if waits else ()))
        updates = (config.steps - waits) * parts
        yield from endless_warmup(config.learner.optimizer, "learner.optimizer", updates, fields)
    if config.critic is not None:
        fields = ("steps", "learner.minibatches")
        yield from endless_warmup(config.critic.optimizer, "critic.optimizer", config.steps * parts, fields)


def endless_warmup(
    optimizer: OptimizerConfig, block: str, updates: int, fields: tuple[str, ...]
) -> Iterator[Contradiction]:
    """A schedule that would begin to decay only after the last of ``updates``, whose number follows from
    ``fields``."""
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= updates:
        yield Contradiction(
            (f"{block}.warmup_steps", f"{block}.schedule", *fields),
            f"{block}.warmup_steps={optimizer.warmup_steps} leaves none of the {updates} optimizer steps ({', '.join(fields)}) to the "
            f"{optimizer.schedule} schedule",
            f"use fewer than {updates}, or {block}.schedule=constant",
        )


def _of_best_checkpoint(config: "RunConfig") -> Iterator[Contradiction]:
    metric = config.checkpoint.keep_best
    if metric is None:
        return
    if not config.evaluation.every:
        yield Contradiction(
            ("checkpoint.keep_best", "evaluation.every"),
            f"checkpoint.keep_best={metric} chooses among evaluations, but evaluation.every=0 makes none between the ends",
            "set evaluation.every to a number of steps, or remove it",
        )
    if config.evaluation.every > config.steps and not config.evaluation.at_ends:
        yield Contradiction(
            ("checkpoint.keep_best", "evaluation.every", "evaluation.at_ends", "steps"),
            f"checkpoint.keep_best={metric} chooses among evaluations, but evaluation.every={config.evaluation.every} with at_ends=false "
            f"makes none in steps={config.steps}",
            f"use at most {config.steps}, or remove it",
        )
    if isinstance(config.task, FileTask) and config.task.heldout_path is None:
        yield Contradiction(
            ("checkpoint.keep_best", "task.heldout_path"),
            f"checkpoint.keep_best={metric} chooses among evaluations, but without task.heldout_path nothing is evaluated",
            "name a file of held-out problems, or remove it",
        )
    if metric.startswith("eval/greedy/") and not config.evaluation.greedy:
        yield Contradiction(
            ("checkpoint.keep_best", "evaluation.greedy"),
            f"checkpoint.keep_best={metric} needs answers at temperature 0, but evaluation.greedy=false leaves them out",
            "set evaluation.greedy=true, or use eval/accuracy",
        )


def _of_trace(config: "RunConfig") -> Iterator[Contradiction]:
    trace = config.tracking.trace
    if trace.steps and trace.first > config.steps:
        yield Contradiction(
            ("tracking.trace.first", "steps"),
            f"tracking.trace.first={trace.first} begins after steps={config.steps}, so nothing would be traced",
            f"use at most {config.steps}",
        )
    if trace.profile_rank is not None and config.layout.dp != "auto":
        size = config.layout.world_size
        if trace.profile_rank >= size:
            yield Contradiction(
                ("tracking.trace.profile_rank", "layout"),
                f"tracking.trace.profile_rank={trace.profile_rank} is not a rank: the ranks of this learner are 0 to {size - 1}",
                f"use at most {size - 1}",
            )


def _of_template(config: "RunConfig") -> Iterator[Contradiction]:
    environment = config.environment
    if isinstance(environment, MessageEnvironment):
        renders, field = environment.template == "chat", "environment.template"
        if isinstance(config.task, JsonlTask) and config.task.tools_field is not None:
            yield Contradiction(
                ("task.tools_field", "environment"),
                "task.tools_field has no effect: an environment of messages renders its own tools",
                "remove it; the environment's `start` gets the whole record",
            )
    else:
        renders, field = isinstance(config.task, FileTask) and config.task.apply_chat_template, "task"
    if not renders:
        yield from unread_template_arguments(config.model.chat_template_kwargs, field)
    for field, other in config.other_models.items():
        if other.chat_template_kwargs:
            yield Contradiction(
                (f"{field}.chat_template_kwargs",),
                f"{field}.chat_template_kwargs has no effect: this model reads the policy's tokens",
                "remove it; the policy's are model.chat_template_kwargs",
            )


def unread_template_arguments(arguments: Mapping[str, Any], field: str) -> Iterator[Contradiction]:
    """Arguments of a template that a run or a warm start does not render."""
    if arguments:
        yield Contradiction(
            ("model.chat_template_kwargs", field),
            f"model.chat_template_kwargs has {', '.join(arguments)}, but {field} has no prompts in a chat template",
            "remove it, or let the chat template render the prompts",
        )
