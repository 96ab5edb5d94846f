"""Settings that contradict what servers do: SGLang's own flags, routing replay, aligned numerics, adapters,
and sampling from a part of the vocabulary."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from configs.errors import Contradiction

if TYPE_CHECKING:
    from configs.schema.rollout import RolloutConfig
    from configs.schema.run import RunConfig

OTHER_NCCL = (
    "overrides NCCL's variables in the servers, and a transfer group whose learner has other values does not "
    "connect"
)
STALE_CACHE = "keeps keys and values outside the server, where an update of the weights does not drop them"
NEVER_WITH = {
    "enable-symm-mem": OTHER_NCCL,
    "enable-nccl-nvls": OTHER_NCCL,
    "hicache-storage-backend": STALE_CACHE,
    "enable-lmcache": STALE_CACHE,
    "enable-flexkv": STALE_CACHE,
    "enable-unified-cache-external-linker": STALE_CACHE,
    "weight-cache-mode": "shares the weights with other servers, whose copy an update would change before SGLang refuses it",
    "kt-weight-path": "computes experts from files, which no update of the weights reaches",
    "enable-eplb": "moves experts to other places of a parameter, but updates go to the original places",
    "preferred-sampling-params": "adds sampling parameters to each request, but log-probs and learner do not take them into account",
    "enable-watermark": "changes what is sampled, but log-probs and learner do not take it into account",
    "watermark-config": "changes what is sampled, but log-probs and learner do not take it into account",
    "speculative-accept-threshold-single": "accepts drafts that the policy would not have sampled",
    "speculative-accept-threshold-acc": "accepts drafts that the policy would not have sampled",
    "allow-auto-truncate": "truncates a prompt that is too long, but the learner trains on the whole prompt",
    "delete-ckpt-after-loading": "deletes model.path, which learner and restarted servers read",
}
"""Flags of SGLang 0.5.23 that every run refuses, and what each does."""

NO_EXPERTS_WITH = {
    "chunked-prefill-size": "SGLang has a buffer for the experts of one chunk, and would crash at a longer prompt",
    "enable-hierarchical-cache": "a part of the prefix cache that is loaded back gets another place, which has the experts of other tokens",
    "disaggregation-mode": "a server that decodes does not know the experts of the prompt",
}
"""Flags of SGLang that routing replay refuses, and why."""

NO_KEPT_IDS_WITH = {
    "sampling-backend": "this backend returns no kept ids",
    "enable-deterministic-inference": "SGLang's seeded sampler refuses min_p, and the server ends",
    "sampling-mask-max-tokens": "SGLang refuses a top_k above it",
    "disaggregation-mode": "kept ids with separate prefill servers were not tried",
}
"""Flags of SGLang that top_p, top_k and min_p refuse, and why."""

NOT_ALIGNED_FLAGS = (
    "attention-backend", "kv-cache-dtype", "torch-compile", "speculative", "lora", "sampling-backend",
    "dp-attention", "attn-dp", "attention-data-parallel", "attn-cp", "attention-context-parallel", "dcp-size",
    "decode-context-parallel", "dp-lm-head", "layernorm-sp", "quant-communications",
)  # fmt: skip
"""Flags of SGLang, or parts of their names, that choose operations other than those of ``numerics``, or sum
over other ranks."""


def of_servers(config: "RunConfig") -> Iterator[Contradiction]:
    """Contradictions about servers in a config whose blocks are valid each by itself."""
    yield from _of_server_args(config)
    yield from _of_routing(config)
    yield from _of_pieces(config)
    yield from _of_numerics(config)
    yield from _of_lora(config)
    yield from _of_truncation(config)


def _of_server_args(config: "RunConfig") -> Iterator[Contradiction]:
    for name, value in config.rollout.server_args.items():
        reason = NEVER_WITH.get(name.replace("_", "-"))
        if reason is not None and value is not False:
            yield Contradiction(
                (f"rollout.server_args.{name}",), f"rollout.server_args.{name}={value} {reason}", "remove it"
            )


def _of_routing(config: "RunConfig") -> Iterator[Contradiction]:
    """Contradictions of routing replay: a pass of ``old`` that is not made or changes nothing; servers that
    return no experts, or not those that a token was sampled with."""
    if config.learner.routing == "old":
        yield from _of_old_routing(config)
    if config.learner.routing != "rollout":
        return
    fix = "remove it, or set learner.routing=own"
    if not config.rollout.sglang_plugin:
        yield Contradiction(
            ("learner.routing", "rollout.sglang_plugin"),
            "learner.routing=rollout needs Tandem's plugin of SGLang to get the experts, but rollout.sglang_plugin=false leaves it out",
            fix,
        )
    if config.rollout.router is not None:
        yield Contradiction(
            ("learner.routing", "rollout.router"),
            "learner.routing=rollout does not go with rollout.router: sglang-router 0.3.2 passes on only the fields that it knows, and "
            "drops the request for experts",
            fix,
        )
    yield from _of_flags(config.rollout, "learner.routing", "learner.routing=rollout", fix, _why_no_experts)


def _why_no_experts(flag: str, value: object) -> str | None:
    if flag.startswith("speculative-"):
        return "its steps check several tokens at once, whose experts SGLang does not tell apart"
    if flag == "chunked-prefill-size" and isinstance(value, int) and value > 0:
        return None
    return NO_EXPERTS_WITH.get(flag)


def _of_flags(
    rollout: "RolloutConfig", field: str, setting: str, fix: str, why_not: Callable[[str, object], str | None]
) -> Iterator[Contradiction]:
    """The server_args that do not go with ``setting``, a value of ``field``. ``why_not``: the reason for a flag and its value;
    None if they go together."""
    for name, value in rollout.server_args.items():
        reason = why_not(name.replace("_", "-"), value)
        if reason is not None and value is not False:
            yield Contradiction(
                (field, "rollout.server_args"),
                f"{setting} does not go with rollout.server_args.{name}={value}: {reason}",
                fix,
            )


def _of_old_routing(config: "RunConfig") -> Iterator[Contradiction]:
    fix = "remove it, or set learner.routing=own"
    if config.correction.mode == "bypass":
        yield Contradiction(
            ("learner.routing", "correction.mode"),
            "learner.routing=old replays the experts of the pass before the update, but with correction.mode=bypass there is none: old "
            "is the rollout",
            "set learner.routing=rollout, which replays the experts of the rollout, or own",
        )
    elif config.learner.minibatches == 1:
        yield Contradiction(
            ("learner.routing", "learner.minibatches"),
            "learner.routing=old has no effect with learner.minibatches=1: its only update has the same experts as old",
            f"{fix}, or use 2 or more minibatches",
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
                f"{field}={size} is not a power of two, and model.numerics=aligned sums pairs of ranks' parts, pairs of pairs and so on",
                "use 1, 2, 4 or 8, or set model.numerics=default",
            )
        elif size > pieces:
            yield Contradiction(
                (field, "model.numerics_pieces"),
                f"{field}={size} ranks cannot share a sum of model.numerics_pieces={pieces} parts",
                f"set model.numerics_pieces={size}, or remove it",
            )


def _of_numerics(config: "RunConfig") -> Iterator[Contradiction]:
    """Settings that ``model.numerics=aligned`` does not cover."""
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
            "rollout.top_k samples from a kept set, whose log-probs SGLang computes in its own order, so that "
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
    """Contradictions of adapters: a forward pass that differs from the servers', and servers with their own
    adapters."""
    lora, rollout = config.learner.lora, config.rollout
    if lora is None:
        return
    if lora.forward == "factored" and config.model.numerics == "aligned":
        yield Contradiction(
            ("learner.lora.forward", "model.numerics"),
            "learner.lora.forward=factored adds the adapters' product to that of the weight, but servers multiply once by the merged "
            "weight, so that model.numerics=aligned could not hold",
            "set learner.lora.forward=merged, or model.numerics=default",
        )
    for field in ("precision", "quantization"):
        value = getattr(rollout, field)
        if lora.forward == "merged" and value not in (None, "none"):
            yield Contradiction(
                ("learner.lora.forward", f"rollout.{field}"),
                f"learner.lora.forward=merged computes with the served weights, but rollout.{field}={value} rounds them again on their way",
                "set learner.lora.forward=factored, or remove it",
            )
    for name in rollout.server_args:
        if "lora" in name:
            yield Contradiction(
                ("learner.lora", "rollout.server_args"),
                f"learner.lora sends merged weights, and rollout.server_args.{name} would make the servers add adapters to them",
                f"remove rollout.server_args.{name}",
            )


def _of_truncation(config: "RunConfig") -> Iterator[Contradiction]:
    """Contradictions of top_p, top_k and min_p: servers that do not return the kept ids."""
    rollout = config.rollout
    if not rollout.is_truncated:
        return
    fix = "remove it, or remove rollout.top_p, top_k and min_p"
    if rollout.router is not None:
        yield Contradiction(
            ("rollout.top_k", "rollout.router"),
            f"rollout.top_k={rollout.top_k} does not go with rollout.router: sglang-router 0.3.2 passes on only the fields that it knows, "
            "and drops the request for kept ids",
            fix,
        )
    why_not = partial(_why_no_kept_ids, rollout)
    yield from _of_flags(rollout, "rollout.top_k", f"rollout.top_k={rollout.top_k}", fix, why_not)


def _why_no_kept_ids(rollout: "RolloutConfig", flag: str, value: object) -> str | None:
    if flag.startswith("speculative-"):
        return "SGLang returns kept ids with few of its drafting methods, and none of them was tried"
    if flag == "sampling-backend" and value != "ascend":
        return None
    if flag == "enable-deterministic-inference" and not rollout.min_p:
        return None
    if flag == "sampling-mask-max-tokens" and isinstance(value, int) and value >= rollout.top_k:
        return None
    return NO_KEPT_IDS_WITH.get(flag)
