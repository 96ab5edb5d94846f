"""Settings of a training run that do not go together, across its blocks: which fields, why, and what to set."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from configs.errors import Contradiction
from configs.schema.environment import AgentEnvironment, MessageEnvironment, SingleTurn
from configs.schema.learner import OptimizerConfig
from configs.schema.objective import PER_SEQUENCE_OBJECTIVES, WITHIN_GROUPS
from configs.schema.sampler import MixtureOrder
from configs.schema.task import (
    CodeReward,
    CountdownTask,
    FileTask,
    JsonlTask,
    OverlongPenalty,
    RewardByField,
    WeightedReward,
)

if TYPE_CHECKING:
    from configs.schema.run import RunConfig

OTHER_NCCL = (
    "sets NCCL's variables in the servers whatever the environment says, and a transfer group whose learner has others does not "
    "connect"
)
STALE_CACHE = "keeps keys and values outside of the server, which an update of the weights does not flush"
NEVER_WITH = {
    "enable-symm-mem": OTHER_NCCL,
    "enable-nccl-nvls": OTHER_NCCL,
    "hicache-storage-backend": STALE_CACHE,
    "enable-lmcache": STALE_CACHE,
    "enable-flexkv": STALE_CACHE,
    "enable-unified-cache-external-linker": STALE_CACHE,
    "weight-cache-mode": "shares the weights with other servers, whose copy an update would change before SGLang refuses it",
    "kt-weight-path": "computes experts from files, which no update of the weights reaches",
    "enable-eplb": "moves experts to other places of a parameter, and updates go to where they were first",
    "preferred-sampling-params": "adds sampling parameters to each request, of which log-probs and learner do not know",
    "enable-watermark": "changes what is sampled, of which log-probs and learner do not know",
    "watermark-config": "changes what is sampled, of which log-probs and learner do not know",
    "speculative-accept-threshold-single": "takes drafts that the policy would not have sampled",
    "speculative-accept-threshold-acc": "takes drafts that the policy would not have sampled",
    "allow-auto-truncate": "cuts a prompt that is too long, and the learner trains on the whole one",
    "delete-ckpt-after-loading": "deletes model.path, which learner and restarted servers read",
}
"""Flags of SGLang 0.5.23 that no run takes, and what each does."""

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

NOT_ALIGNED_FLAGS = (
    "attention-backend",
    "kv-cache-dtype",
    "torch-compile",
    "speculative",
    "lora",
    "sampling-backend",
    "dp-attention",
    "attn-dp",
    "attention-data-parallel",
    "attn-cp",
    "attention-context-parallel",
    "dcp-size",
    "decode-context-parallel",
    "dp-lm-head",
    "layernorm-sp",
    "quant-communications",
)
"""Flags of SGLang, or parts of them, that take other operations than those of ``numerics``, or sum over other ranks."""


def contradictions_of(config: "RunConfig") -> Iterator[Contradiction]:
    """Of the whole config, whose blocks are valid each by itself."""
    yield from _of_loss(config)
    yield from _of_reward(config)
    yield from _of_sampler(config)
    yield from _of_batch(config)
    yield from _of_schedules(config)
    yield from _of_server_args(config)
    yield from _of_routing(config)
    yield from _of_pieces(config)
    yield from _of_numerics(config)
    yield from _of_lora(config)
    yield from _of_truncation(config)
    yield from _of_best_checkpoint(config)
    yield from _of_trace(config)
    yield from _of_template(config)


def _of_loss(config: "RunConfig") -> Iterator[Contradiction]:
    if config.rollout.group_size == 1 and config.advantage.type in WITHIN_GROUPS:
        yield Contradiction(
            ("advantage.type", "rollout.group_size"),
            f"advantage.type={config.advantage.type} compares the siblings of a prompt, of which rollout.group_size=1 has one, so that "
            "every advantage would be 0",
            "use 2 or more (4 to 16 are usual), or advantage.type=gae or reinforce_pp",
        )
    objective = config.policy_objective.type
    if objective in PER_SEQUENCE_OBJECTIVES and config.aggregation.type != "sequence_mean_token_mean":
        yield Contradiction(
            ("aggregation.type",),
            f"objective {objective} is a loss per sequence, which aggregation.type={config.aggregation.type} would weigh by its tokens",
            "remove `aggregation`, or set aggregation.type=sequence_mean_token_mean",
        )
    weight = config.correction.weight
    if objective == "gmpo" and weight.level == "token" and weight.bound == "mask":
        yield Contradiction(
            ("correction.weight.bound", "correction.reject"),
            "objective gmpo takes the geometric mean of a sequence's weights, so that one weight of zero would drop the whole sequence "
            "(correction.weight.bound=mask)",
            "use correction.weight.bound=truncate, or a rule in correction.reject",
        )
    responses = config.rollout.prompts_per_step * config.rollout.group_size
    if config.kl.controller.type == "adaptive" and config.kl.controller.horizon <= responses:
        yield Contradiction(
            ("kl.controller.horizon",),
            f"kl.controller.horizon={config.kl.controller.horizon} is no more than the {responses} responses of one step, so that "
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
            ("advantage.type",),
            "advantage.type=gae needs the values of a critic",
            "remove `critic: null`",
        )
    if config.critic is not None and config.advantage.type != "gae":
        yield Contradiction(
            ("advantage.type",),
            f"advantage.type={config.advantage.type} asks no critic",
            "remove `critic`, or set advantage.type=gae",
        )
    if config.critic_warmup_steps >= config.steps:
        yield Contradiction(
            ("critic.warmup_steps", "steps"),
            f"critic.warmup_steps={config.critic_warmup_steps} leaves none of the run's steps={config.steps} to the policy",
        )


def _of_reward(config: "RunConfig") -> Iterator[Contradiction]:
    if config.credits_turns and isinstance(config.environment, SingleTurn | AgentEnvironment):
        yield Contradiction(
            ("advantage.credit", "environment.type"),
            f"advantage.credit=turn needs turns that earn rewards, and with environment.type={config.environment.type} a sample has one "
            "reward",
            "use credit=episode, or an environment of type tokens, chat or openenv",
        )
    if config.credits_turns and config.advantage.type == "grpo" and config.kl.place == "reward":
        yield Contradiction(
            ("advantage.credit", "kl.place"),
            "advantage.credit=turn with grpo compares the rewards of turns, which kl.place=reward would take a KL per token from",
            "use kl.place=loss, or advantage.type=reinforce_pp or gae",
        )
    parts = dict(_reward_parts("reward", config.reward))
    readers = {f"{field}.type": "code" for field, part in parts.items() if isinstance(part, CodeReward)}
    readers = {"reward.type": "by_field"} if isinstance(config.reward, RewardByField) else readers
    if readers and isinstance(config.task, CountdownTask):
        field, kind = next(iter(readers.items()))
        yield Contradiction(
            (field, "task.type"),
            f"{field}={kind} reads a field of the rows of a data file, and task.type=countdown has none",
            "use task.type=jsonl",
        )
    for field, part in parts.items():
        if isinstance(part, OverlongPenalty) and part.buffer_tokens > config.rollout.max_new_tokens:
            yield Contradiction(
                (f"{field}.buffer_tokens", "rollout.max_new_tokens"),
                f"{field}.buffer_tokens={part.buffer_tokens} is more than rollout.max_new_tokens={config.rollout.max_new_tokens}, so "
                "that every response would be punished",
                "use a fraction of it, such as a fifth",
            )


def _reward_parts(field: str, reward: object) -> Iterator[tuple[str, object]]:
    """The single rewards by their fields."""
    if isinstance(reward, RewardByField | WeightedReward):
        kind, inner = (
            ("rewards", reward.rewards) if isinstance(reward, RewardByField) else ("parts", reward.parts)
        )
        for name, part in inner.items():
            yield from _reward_parts(f"{field}.{kind}.{name}", part)
    else:
        yield field, reward


def _of_sampler(config: "RunConfig") -> Iterator[Contradiction]:
    if isinstance(config.sampler, MixtureOrder) and isinstance(config.task, CountdownTask):
        yield Contradiction(
            ("sampler.type", "task.type"),
            "sampler.type=mixture reads the sources from the records of a data file, and task.type=countdown has none",
            "use task.type=jsonl, or leave `sampler` out",
        )


def _of_batch(config: "RunConfig") -> Iterator[Contradiction]:
    prompts, parts = config.rollout.prompts_per_step, config.learner.minibatches
    sequences, stages = prompts // parts * config.rollout.group_size, config.layout.microbatch_multiple
    # layout.dp=auto: the command checks again once it knows the number of processes.
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
    if config.rollout.max_staleness and config.launch.placement == "colocated":
        yield Contradiction(
            ("rollout.max_staleness", "launch.placement"),
            f"rollout.max_staleness={config.rollout.max_staleness} samples while the learner trains, but with launch.placement=colocated "
            "they take turns on the same devices",
            "set rollout.max_staleness=0, or launch.placement=separate",
        )
    if config.rollout.weight_transfer == "memory" and config.launch.nodes is not None:
        yield Contradiction(
            ("rollout.weight_transfer", "launch.nodes"),
            "rollout.weight_transfer=memory needs learner and servers on one machine, and launch.nodes gives them nodes of their own",
            "set rollout.weight_transfer=broadcast, or remove launch.nodes",
        )
    if config.rollout.drain_s > config.launch.patience_s:
        yield Contradiction(
            ("rollout.drain_s", "launch.collective_timeout_s"),
            f"rollout.drain_s={config.rollout.drain_s:g} is longer than the learner waits for the sample role "
            f"({config.launch.patience_s:g} s, 0.9 of launch.collective_timeout_s)",
            f"use at most {config.launch.patience_s:g}",
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
    """Of a schedule that would begin to decay behind the last of ``updates``, which come from ``fields``."""
    if optimizer.schedule != "constant" and optimizer.warmup_steps >= updates:
        yield Contradiction(
            (f"{block}.warmup_steps", f"{block}.schedule", *fields),
            f"{block}.warmup_steps={optimizer.warmup_steps} leaves none of the {updates} optimizer steps ({', '.join(fields)}) to the "
            f"{optimizer.schedule} schedule",
            f"use fewer than {updates}, or {block}.schedule=constant",
        )


def _of_routing(config: "RunConfig") -> Iterator[Contradiction]:
    """Of routing replay: a pass of ``old`` that is not made or changes nothing; servers that give no experts, or not
    those that a token was sampled with."""
    if config.learner.routing == "old":
        yield from _of_old_routing(config)
    if config.learner.routing != "rollout":
        return
    fix = "remove it, or set learner.routing=own"
    if not config.rollout.sglang_plugin:
        yield Contradiction(
            ("learner.routing", "rollout.sglang_plugin"),
            "learner.routing=rollout gets the experts by Tandem's plugin of SGLang, which rollout.sglang_plugin=false leaves out",
            fix,
        )
    if config.rollout.router is not None:
        yield Contradiction(
            ("learner.routing", "rollout.router"),
            "learner.routing=rollout does not go with rollout.router: sglang-router 0.3.2 passes on the fields that it knows, and "
            "the request for experts is none of them",
            fix,
        )
    for name, value in config.rollout.server_args.items():
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


def _of_server_args(config: "RunConfig") -> Iterator[Contradiction]:
    for name, value in config.rollout.server_args.items():
        reason = NEVER_WITH.get(name.replace("_", "-"))
        if reason is not None and value is not False:
            yield Contradiction(
                (f"rollout.server_args.{name}",), f"rollout.server_args.{name}={value} {reason}", "remove it"
            )


def _of_pieces(config: "RunConfig") -> Iterator[Contradiction]:
    """Tensor-parallel sizes and pieces of ``model.numerics=aligned``, whose sums add pairs, pairs of pairs and so on."""
    given, pieces = config.model.numerics_pieces, config.numerics_pieces
    if pieces is None:
        if given is not None:
            yield Contradiction(
                ("model.numerics_pieces", "model.numerics"),
                f"model.numerics_pieces={given} has no effect with model.numerics=default",
                "remove it, or set model.numerics=aligned",
            )
        return
    sizes = {"layout.tp": config.layout.tp, "rollout.tp": config.rollout.tp}
    if given is not None:
        sizes["model.numerics_pieces"] = given
    for field, size in sizes.items():
        if size & (size - 1):
            yield Contradiction(
                (field, "model.numerics"),
                f"{field}={size} is no power of two, and model.numerics=aligned sums pairs of ranks' parts, pairs of pairs and so on",
                "use 1, 2, 4 or 8, or set model.numerics=default",
            )
        elif size > pieces:
            yield Contradiction(
                (field, "model.numerics_pieces"),
                f"{field}={size} ranks cannot share a sum of model.numerics_pieces={pieces} parts",
                f"set model.numerics_pieces={size}, or remove it",
            )


def _of_old_routing(config: "RunConfig") -> Iterator[Contradiction]:
    fix = "remove it, or set learner.routing=own"
    if config.correction.mode == "bypass":
        yield Contradiction(
            ("learner.routing", "correction.mode"),
            "learner.routing=old replays the experts of the pass before the update, and with correction.mode=bypass there is none: old "
            "is the rollout",
            "set learner.routing=rollout, which replays the experts of the rollout, or own",
        )
    elif config.learner.minibatches == 1:
        yield Contradiction(
            ("learner.routing", "learner.minibatches"),
            "learner.routing=old has no effect with learner.minibatches=1: before its one update the learner chooses as for old",
            f"{fix}, or use 2 or more minibatches",
        )


def _of_numerics(config: "RunConfig") -> Iterator[Contradiction]:
    """What ``model.numerics=aligned`` does not cover."""
    if config.model.numerics != "aligned":
        return
    rollout = config.rollout
    refused: list[tuple[str, object, object, str]] = [
        ("layout.cp", config.layout.cp, 1, "splits the attention of a sequence over ranks, and SGLang does not"),
        ("rollout.dtype", rollout.dtype, config.model.dtype, "rounds the served weights"),
        ("rollout.quantization", rollout.quantization, "none", "rounds the served weights"),
        ("rollout.precision", rollout.precision, None, "rounds the served weights"),
        ("rollout.sglang_plugin", rollout.sglang_plugin, True, "leaves SGLang's own operations in place"),
        (
            "launch.threads_per_process", config.launch.threads_per_process, 1,
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
    if config.model.dtype == "float16":
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


def _of_lora(config: "RunConfig") -> Iterator[Contradiction]:
    """Of adapters: a forward pass that is not the servers', and servers with adapters of their own."""
    lora, rollout = config.learner.lora, config.rollout
    if lora is None:
        return
    if lora.forward == "factored" and config.model.numerics == "aligned":
        yield Contradiction(
            ("learner.lora.forward", "model.numerics"),
            "learner.lora.forward=factored adds the adapters' product to that of the weight, where servers multiply once by the merged "
            "weight, so that model.numerics=aligned could not hold",
            "set learner.lora.forward=merged, or model.numerics=default",
        )
    for field in ("precision", "quantization"):
        value = getattr(rollout, field)
        if lora.forward == "merged" and value not in (None, "none"):
            yield Contradiction(
                ("learner.lora.forward", f"rollout.{field}"),
                f"learner.lora.forward=merged computes with the served weights, which rollout.{field}={value} rounds further on their way",
                "set learner.lora.forward=factored, or remove it",
            )
    for name in rollout.server_args:
        if "lora" in name:
            yield Contradiction(
                ("learner.lora", "rollout.server_args"),
                f"learner.lora sends merged weights, and rollout.server_args.{name} would have the servers add adapters to them",
                f"remove rollout.server_args.{name}",
            )


def _of_truncation(config: "RunConfig") -> Iterator[Contradiction]:
    """Of top_p, top_k and min_p: servers that do not return the kept ids."""
    rollout = config.rollout
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


def _of_best_checkpoint(config: "RunConfig") -> Iterator[Contradiction]:
    metric = config.checkpoint.keep_best
    if metric is None:
        return
    if not config.evaluation.every:
        yield Contradiction(
            ("checkpoint.keep_best", "evaluation.every"),
            f"checkpoint.keep_best={metric} chooses among evaluations, and evaluation.every=0 makes none between the ends",
            "set evaluation.every to a number of steps, or remove it",
        )
    if config.evaluation.every > config.steps and not config.evaluation.at_ends:
        yield Contradiction(
            ("checkpoint.keep_best", "evaluation.every", "evaluation.at_ends", "steps"),
            f"checkpoint.keep_best={metric} chooses among evaluations, and evaluation.every={config.evaluation.every} with at_ends=false "
            f"makes none in steps={config.steps}",
            f"use at most {config.steps}, or remove it",
        )
    if isinstance(config.task, FileTask) and config.task.heldout_path is None:
        yield Contradiction(
            ("checkpoint.keep_best", "task.heldout_path"),
            f"checkpoint.keep_best={metric} chooses among evaluations, and without task.heldout_path nothing is evaluated",
            "name a file of held-out problems, or remove it",
        )
    if metric.startswith("eval/greedy/") and not config.evaluation.greedy:
        yield Contradiction(
            ("checkpoint.keep_best", "evaluation.greedy"),
            f"checkpoint.keep_best={metric} is of answers at temperature 0, which evaluation.greedy=false does not ask for",
            "set evaluation.greedy=true, or use eval/accuracy",
        )


def _of_trace(config: "RunConfig") -> Iterator[Contradiction]:
    trace = config.tracking.trace
    if trace.steps and trace.first > config.steps:
        yield Contradiction(
            ("tracking.trace.first", "steps"),
            f"tracking.trace.first={trace.first} begins behind steps={config.steps}, so that nothing would be traced",
            f"use at most {config.steps}",
        )
    if trace.profile_rank is not None and config.layout.dp != "auto":
        size = config.layout.world_size
        if trace.profile_rank >= size:
            yield Contradiction(
                ("tracking.trace.profile_rank", "layout"),
                f"tracking.trace.profile_rank={trace.profile_rank} is no rank of a learner of {size}, which count from 0",
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
    """Of a run or a warm start that renders no chat template."""
    if arguments:
        yield Contradiction(
            ("model.chat_template_kwargs", field),
            f"model.chat_template_kwargs has {', '.join(arguments)}, but {field} has no prompts in a chat template",
            "remove it, or let the chat template render the prompts",
        )
