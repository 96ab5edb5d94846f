"""Compares a config with the models that it names: layouts, and what learner and servers compute with them."""

from collections.abc import Iterator, Mapping, Sequence

from configs.loader import Finding
from configs.schema import AnyConfig, RunConfig
from launch.checks.arguments import finding_of
from parallel.planning import layout
from parallel.planning.adapters import check_lora
from parallel.planning.architecture import Architecture, architecture_of, read_architecture, read_hf_config
from parallel.planning.families import check_served_class
from parallel.planning.server_memory import static_share
from rollout.sampling.prompt_room import prompt_room, sequence_limits
from rollout.servers.served import check_quantization
from rollout.tokenizer_files import check_same_tokens


def has_model_configs(config: AnyConfig) -> bool:
    """Whether every model has its config.json, also those of critic and reference."""
    others = config.other_models.values() if isinstance(config, RunConfig) else ()
    return all((model.path / "config.json").is_file() for model in (config.model, *others))


def check_models(config: AnyConfig, *, trains: bool) -> Iterator[Finding]:
    if not (config.model.path / "config.json").is_file():
        return  # reported with the missing files
    try:
        hf_config = read_hf_config(config.model.path)
        architecture = read_architecture(hf_config)
    except ValueError as error:
        yield "model.path", str(error)
        return
    layout_errors = layout.layout_problems(architecture, config.layout)
    yield from (("layout", error) for error in layout_errors)
    if trains:
        yield from finding_of("model.dtype", layout.check_trainable, architecture, config.model.dtype)
    if isinstance(config, RunConfig):
        yield from _check_learned(config, architecture)
        yield from _check_served(config, architecture, hf_config)
        for field in config.other_models if trains else ():
            yield from _check_other_model(config, field, architecture, reported=layout_errors)


def _check_learned(config: RunConfig, architecture: Architecture) -> Iterator[Finding]:
    """Whether the learner computes what the config asks of this model, and sequences have room."""
    learner, limits = config.learner, {"rollout.max_new_tokens": "training"}
    if config.numerics_pieces is not None:
        yield from finding_of("model.numerics", layout.check_numerics, config.numerics_pieces, architecture)
    if architecture.experts is None:
        dense = f"the {architecture.model_type} model at {config.model.path} has no experts to choose; leave it out"
        if learner.routing != "own":
            yield "learner.routing", f"learner.routing={learner.routing}: {dense}"
        if learner.freeze_router:
            yield "learner.freeze_router", f"learner.freeze_router=true: {dense}"
    if learner.lora is not None:
        yield from finding_of("learner.lora", check_lora, learner.lora, architecture)
    if config.evaluation.max_new_tokens is not None:
        limits["evaluation.max_new_tokens"] = "held-out"
    for field, which in limits.items():
        yield from finding_of(field, prompt_room, config, which, max_positions=architecture.max_positions)


def _check_served(config: RunConfig, architecture: Architecture, hf_config: Mapping) -> Iterator[Finding]:
    """Whether SGLang serves the model with these settings, and computes what the learner does."""
    rollout, kind = config.rollout, architecture.model_type
    yield from finding_of("model.path", check_served_class, hf_config, kind)
    yield from finding_of("rollout.tp", layout.validate_rollout_layout, hf_config, rollout.tp)
    if config.numerics_pieces is not None:
        yield from finding_of("rollout.tp", layout.check_aligned_servers, rollout.tp, architecture)
    yield from finding_of("rollout.server_args", static_share, config)
    yield from finding_of("rollout.quantization", check_quantization, rollout, kind)
    saved = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if architecture.family.has_sinks and saved not in (None, rollout.dtype):
        yield (
            "rollout.dtype",
            f"rollout.dtype={rollout.dtype}: SGLang makes matrices of a {kind} in the dtype of config.json, {saved}, and fails at its "
            f"first token; set rollout.dtype={saved}, or save the model in {rollout.dtype}",
        )
    if architecture.family.has_sinks and rollout.precision not in (None, "bf16", "fp16"):
        yield (
            "rollout.precision",
            f"rollout.precision={rollout.precision}: a {kind} stores all experts of a layer in one tensor, which Tandem cannot round to "
            "a grid; use bf16 or fp16, or leave it out",
        )
    if architecture.family.is_gemma and not rollout.sglang_plugin and rollout.dtype != "float32":
        yield (
            "rollout.sglang_plugin",
            f"rollout.sglang_plugin=false: SGLang does not round the factor of the embeddings of a {kind} to "
            f"{rollout.dtype}, as the learner does; leave it out, so that servers use Tandem's plugin",
        )


def _check_other_model(
    config: RunConfig, field: str, policy: Architecture, reported: Sequence[str]
) -> Iterator[Finding]:
    """Errors of a critic's or a reference's model. ``reported``: layout errors of the policy, which are not repeated."""
    model = config.other_models[field]
    if not (model.path / "config.json").is_file():
        return
    try:
        other = architecture_of(model.path)
        layout_errors = layout.layout_problems(other, config.layout)
    except ValueError as error:
        yield f"{field}.path", str(error)
        return
    yield from (("layout", f"of {field}: {error}") for error in layout_errors if error not in reported)
    if field == "critic.model":
        yield from finding_of(f"{field}.dtype", layout.check_trainable, other, model.dtype)
    yield from finding_of(f"{field}.path", layout.check_other_vocabulary, field, other, policy)
    yield from finding_of(f"{field}.path", check_same_tokens, field, config.model.path, model.path)
    limits = sequence_limits(config, "training", max_positions=policy.max_positions)
    longest = min(limit.sequence for limit in limits)
    yield from finding_of(f"{field}.path", layout.check_other_positions, field, other, longest)
