"""What a model is and what a layout asks of it: pure arithmetic on config.json, without torch, so that it
runs before anything starts."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema.layout import LayoutConfig, layout_text

SUPPORTED = {
    "qwen2": "Qwen2 and Qwen2.5, dense", "qwen3": "Qwen3, dense", "llama": "Llama, dense", "qwen3_moe": "Qwen3-MoE", "mixtral": "Mixtral",
}  # fmt: skip
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary frequencies that do not depend on the length of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts part of a model. The router's weights are its softmax over all experts at the
    chosen ones.

    ``norm_topk``: they are divided by their sum. ``is_sparse``: of each layer, whether it has experts or a
    dense MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool
    is_sparse: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What of a config.json decides the model. ``vocab_size`` is the real one, without padding rows.

    ``intermediate_size`` is that of dense MLPs; a model all of whose layers have experts does not use it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None = None
    """None: dense."""


MOST_LAYERS = 10_000
"""Far above any model; a number beyond it is a damaged file, whose checks would not end."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ValueError naming the file where it is missing or no JSON
    object."""
    path = Path(folder) / "config.json"
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"model.path={folder}: cannot read config.json ({error.strerror}); give a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} nests its values too deep to be read; restore it") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not an object")
    return loaded


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """Raises ValueError for a model or variant that this learner does not compute exactly, and for missing or
    impossible sizes."""
    kind = hf_config.get("model_type")
    if kind not in SUPPORTED:
        supported = ", ".join(f"{name} ({title})" for name, title in SUPPORTED.items())
        raise ValueError(f"model_type {kind!r} is not supported; supported are {supported}")
    _refuse_variants(hf_config, kind)
    heads, hidden_size = _size(hf_config, "num_attention_heads", kind), _size(hf_config, "hidden_size", kind)
    num_layers = _size(hf_config, "num_hidden_layers", kind)
    if num_layers > MOST_LAYERS:  # each is planned for by itself
        raise ValueError(
            f"config.json has num_hidden_layers={num_layers}, more than {MOST_LAYERS}; restore it"
        )
    kv_heads = (
        heads
        if hf_config.get("num_key_value_heads") is None
        else _size(hf_config, "num_key_value_heads", kind)
    )
    if heads % kv_heads:
        raise ValueError(
            f"config.json has num_attention_heads={heads}, not a multiple of num_key_value_heads={kv_heads}; restore it"
        )
    if hf_config.get("head_dim") is None and hidden_size % heads:
        raise ValueError(
            f"config.json has hidden_size={hidden_size}, which does not divide by num_attention_heads={heads}, and no head_dim; restore it"
        )
    return Architecture(
        model_type=kind,
        vocab_size=_size(hf_config, "vocab_size", kind),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden_size // heads
        if hf_config.get("head_dim") is None
        else _size(hf_config, "head_dim", kind),
        intermediate_size=_size(hf_config, "intermediate_size", kind),
        norm_eps=_positive_number(hf_config, "rms_norm_eps", kind),
        max_positions=_size(hf_config, "max_position_embeddings", kind),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=_read_experts(hf_config, kind, num_layers),
    )


def _read_experts(hf_config: Mapping[str, Any], kind: str, num_layers: int) -> Experts | None:
    if kind == "mixtral":
        size_name, norm_topk, dense, every = "intermediate_size", True, (), 1
    elif kind == "qwen3_moe":
        size_name, norm_topk = "moe_intermediate_size", bool(hf_config.get("norm_topk_prob", False))
        dense = hf_config.get("mlp_only_layers") or ()
        every = (
            1
            if hf_config.get("decoder_sparse_step") is None
            else _size(hf_config, "decoder_sparse_step", kind)
        )
    else:
        return None
    # Today's transformers writes Mixtral's name for either family.
    count_name = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    count, chosen = _size(hf_config, count_name, kind), _size(hf_config, "num_experts_per_tok", kind)
    if chosen > count:
        raise ValueError(
            f"config.json has num_experts_per_tok={chosen}, more than its {count_name}={count}; restore it"
        )
    is_sparse = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
    if not any(is_sparse):
        raise ValueError(
            f"config.json has mlp_only_layers={list(dense)} and decoder_sparse_step={every}, which leave none of the {num_layers} layers "
            "with experts; restore it, or use a dense model"
        )
    return Experts(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=_size(hf_config, size_name, kind),
        norm_topk=norm_topk,
        is_sparse=is_sparse,
    )


def _size(hf_config: Mapping[str, Any], name: str, kind: str) -> int:
    value = _field(hf_config, name, kind)
    if type(value) is not int or value < 1:
        raise ValueError(
            f"config.json of a {kind} model has {name}={value!r}; it must be a whole number of at least 1"
        )
    return value


def _positive_number(hf_config: Mapping[str, Any], name: str, kind: str) -> float:
    value = _field(hf_config, name, kind)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"config.json of a {kind} model has {name}={value!r}; it must be a number above 0")
    return float(value)


def _field(hf_config: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in hf_config:
        raise ValueError(
            f"config.json of a {kind} model lacks {name!r}; restore the file that came with the model"
        )
    return hf_config[name]


def _refuse_variants(hf_config: Mapping[str, Any], kind: str) -> None:
    refused = {
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
        "sliding_window": kind == "mixtral"
        and hf_config.get("sliding_window") is not None,  # which has no use_sliding_window
        "layer_types": any(t != "full_attention" for t in hf_config.get("layer_types") or ()),
        "attention_bias": kind != "qwen2" and bool(hf_config.get("attention_bias")),
        "mlp_bias": bool(hf_config.get("mlp_bias")),
        "hidden_act": hf_config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": (hf_config.get("partial_rotary_factor") or 1.0) != 1.0,
        "quantization_config": hf_config.get("quantization_config") is not None,
        "router_jitter_noise": bool(hf_config.get("router_jitter_noise")),
        "router_bias": bool(hf_config.get("router_bias")),
        "shared_expert_intermediate_size": bool(hf_config.get("shared_expert_intermediate_size")),
        "n_shared_experts": bool(hf_config.get("n_shared_experts")),
    }
    for name, found in refused.items():
        if found:
            raise ValueError(
                f"config.json has {name}={hf_config[name]!r}, which the learner does not compute; use a {kind} without it"
            )
    check_rope_type(_rope_type(hf_config), kind)


def _rope_type(hf_config: Mapping[str, Any]) -> Any:
    """Under ``rope_parameters`` in today's files and ``rope_scaling`` (null: none) in earlier ones, which
    also wrote ``type``."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json has rope parameters {rope!r}; they must be an object or null")
    return rope.get("rope_type") or rope.get("type") or "default"


def check_rope_type(rope_type: Any, model_type: str) -> None:
    """Raises ValueError for a rope_type whose frequencies depend on the sequence length (dynamic, longrope)."""
    if rope_type not in STATIC_ROPE_TYPES:
        raise ValueError(
            f"rope_type {rope_type!r} of this {model_type} model is not supported; supported are {', '.join(STATIC_ROPE_TYPES)}"
        )


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The vocabulary with as many padding rows as it takes to divide by the tensor-parallel size."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def validate_layout(
    hf_config: Mapping[str, Any], layout: LayoutConfig, *, num_processes: int | None = None
) -> None:
    """Whether the learner can compute this model in this layout. ``hf_config`` is the model's config.json.

    - tp: query heads and the intermediate size of dense layers must divide by it. Key/value heads must too,
      or it by them: Megatron then copies each head to several ranks. The vocabulary is padded, and so are the
      tokens of a micro-batch under sp: any number fits.
    - pp, vpp: their product must divide the layers; all chunks are equally deep.
    - ep: must divide the experts, of which a dense model has none; an expert is never split, whatever tp.
      Layers with experts and tp > 1 need sp, since tokens travel to experts from where they are split.
    - cp: 1. Split sequences need Transformer Engine's attention, which exists on CUDA alone, and batches that
      are split over context ranks, which this learner does not do.
    - ``num_processes``, where given, must be the layout's product of sizes.

    Raises ValueError for what ``read_architecture`` refuses, and for everything of the above that does not
    hold, all at once: see ``layout_problems``.
    """
    problems = layout_problems(read_architecture(hf_config), layout, num_processes)
    if problems:
        raise ValueError("\n  ".join(problems))


def layout_problems(
    architecture: Architecture, layout: LayoutConfig, num_processes: int | None = None
) -> list[str]:
    """What keeps the learner from this layout, each with the nearest values of its field. Where these do not
    help, or there are several problems, the last one is followed by a line with the nearest layouts that
    work."""
    misfits = _misfits(architecture, layout, num_processes)
    values = {field: _nearest_values(architecture, layout, field, num_processes) for field in misfits}
    texts = [
        f"{reason}; {f'use {values[field]}' if values[field] else f'no {field} alone mends it'}"
        for field, reason in misfits.items()
    ]
    if len(misfits) > 1 or "dp" in misfits or not all(values.values()):
        found = " or ".join(
            f"{{{layout_yaml(fitting)}}}" for fitting in _nearest_layouts(architecture, layout, num_processes)
        )
        texts[-1] += f"\n  the nearest layouts that work: {found}"
    return texts


def _misfits(a: Architecture, layout: LayoutConfig, num_processes: int | None) -> dict[str, str]:
    """What keeps the learner from this layout, by the field to change."""
    found = {}
    if numbers := _tp_misfits(a, layout.tp):
        found["tp"] = f"layout.tp={layout.tp} does not divide the model's {' and '.join(numbers)}"
    if a.num_layers % (layout.pp * layout.vpp):
        chunks = f"layout.pp={layout.pp}" + (f" times layout.vpp={layout.vpp}" if layout.vpp > 1 else "")
        found["pp"] = f"{chunks} does not divide the model's num_hidden_layers={a.num_layers}"
    if layout.ep > 1 and a.experts is None:
        found["ep"] = f"layout.ep={layout.ep} splits experts, of which this {a.model_type} model has none"
    elif a.experts is not None and a.experts.num_experts % layout.ep:
        found["ep"] = f"layout.ep={layout.ep} does not divide the model's num_experts={a.experts.num_experts}"
    if a.experts is not None and layout.tp > 1 and not layout.sp:
        found["sp"] = (
            f"layout.tp={layout.tp} without sp: tokens travel to the model's experts from where they are split"
        )
    if layout.cp > 1:
        found["cp"] = (
            f"layout.cp={layout.cp} needs the attention of Transformer Engine, which exists on CUDA alone, and batches whose sequences are "
            "split over context ranks, which this learner does not do on CUDA either"
        )
    return found | _world_misfit(layout, num_processes)


def _tp_misfits(a: Architecture, size: int) -> list[str]:
    """The numbers of the model that do not split over ``size`` tensor-parallel ranks."""
    is_dense = a.experts is None or not all(a.experts.is_sparse)
    wrong = {
        f"num_attention_heads={a.num_heads}": a.num_heads % size,
        # Fewer heads than ranks: Megatron splits the qkv product evenly all the same, then gathers it.
        f"num_key_value_heads={a.num_kv_heads}": (
            a.num_kv_heads % size and (size % a.num_kv_heads or 2 * a.num_kv_heads * a.head_dim % size)
        ),
        f"intermediate_size={a.intermediate_size}": is_dense and a.intermediate_size % size,
    }
    return [number for number, remainder in wrong.items() if remainder]


def _world_misfit(layout: LayoutConfig, num_processes: int | None) -> dict[str, str]:
    if num_processes is None:
        return {}
    copies, rest = divmod(num_processes, layout.model_size)
    if rest or copies < 1 or layout.dp not in ("auto", copies):
        sizes = ", ".join(f"{name}={getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp"))
        return {"dp": f"{num_processes} processes do not fit a layout of {sizes}"}
    if layout.tp * layout.cp * copies % layout.ep:
        return {
            "ep": f"layout.ep={layout.ep} does not divide the tp*cp*dp={layout.tp * layout.cp * copies} ranks of a pipeline stage"
        }
    return {}


def _nearest_values(a: Architecture, layout: LayoutConfig, field: str, num_processes: int | None) -> str:
    """The values of one field, the others as they are, that mend its misfit: the nearest below and above. ""
    where there are none."""
    if field == "dp":
        assert num_processes is not None  # which dp does not fit
        return _nearest_dp(layout, num_processes)
    if field in ("sp", "cp"):
        candidates = [("sp", True), ("tp", 1)] if field == "sp" else [("cp", 1)]
        return " or ".join(
            f"{name}={str(value).lower()}" for name, value in candidates if _changed(layout, name, value)
        )
    most = {
        "tp": a.num_heads,
        "pp": a.num_layers,
        "vpp": a.num_layers,
        "ep": a.experts.num_experts if a.experts else 1,
    }
    texts = []
    for name in ("pp", "vpp") if field == "pp" and layout.vpp > 1 else (field,):
        now = getattr(layout, name)
        candidates = {n: _changed(layout, name, n) for n in range(1, most[name] + 1)}
        fits = [
            n
            for n, changed in candidates.items()
            if changed and field not in _misfits(a, changed, num_processes)
        ]
        near = [*[n for n in fits if n < now][-1:], *[n for n in fits if n > now][:1]]
        texts += [f"{name}={n}" for n in near]
    return " or ".join(texts)


def _nearest_dp(layout: LayoutConfig, num_processes: int) -> str:
    copies, rest = divmod(num_processes, layout.model_size)
    wanted = max(copies, 1) if layout.dp == "auto" else layout.dp
    while layout.tp * layout.cp * wanted % layout.ep:
        wanted += 1
    start = f"{layout.model_size * wanted} processes"
    return (
        start if rest or copies < 1 or _changed(layout, "dp", copies) is None else f"dp={copies}, or {start}"
    )


def _changed(layout: LayoutConfig, name: str, value: int | bool) -> LayoutConfig | None:
    """None where such a layout is refused whatever the model."""
    sizes: dict[str, Any] = layout.model_dump() | {name: value}
    try:
        return LayoutConfig(**sizes)
    except ValueError:
        return None


def _nearest_layouts(
    a: Architecture, layout: LayoutConfig, num_processes: int | None, count: int = 3
) -> list[LayoutConfig]:
    """The layouts that work on as many processes, by the sum of |log2 of the ratio| over all sizes; sp or not
    is as far as a factor 2.

    Where neither ``num_processes`` nor dp is given, on any number: dp stays auto.
    """
    world = num_processes or (layout.world_size if layout.dp != "auto" else None)
    found = []
    for candidate in fitting_layouts(a, world, chunks=sorted({1, layout.vpp})):
        steps = [
            abs(math.log2(getattr(candidate, name) / getattr(layout, name)))
            for name in ("tp", "pp", "vpp", "ep", "cp")
        ]
        if layout.dp != "auto":
            steps.append(abs(math.log2(candidate.dp_size / layout.dp_size)))
        found.append((round(sum(steps) + (candidate.sp != layout.sp), 9), layout_text(candidate), candidate))
    return [candidate for *_, candidate in sorted(found, key=lambda entry: entry[:2])[:count]]


def fitting_layouts(
    a: Architecture, world: int | None, *, chunks: Sequence[int] = (1,)
) -> Iterator[LayoutConfig]:
    """Every layout of ``world`` processes that the learner can compute the model in, with these numbers of
    chunks to a pipeline stage.

    ``world=None``: on any number, dp is auto.
    """
    experts = a.experts.num_experts if a.experts else 1
    for tp, pp, ep in itertools.product(divisors(a.num_heads), divisors(a.num_layers), divisors(experts)):
        dp, rest = divmod(world, tp * pp) if world else ("auto", 0)
        if rest or dp == 0 or _tp_misfits(a, tp) or (world and tp * dp % ep):
            continue
        for vpp, sp in itertools.product(chunks, (False, True)):
            fits_pipeline = a.num_layers % (pp * vpp) == 0 and (vpp == 1 or pp > 1)
            fits_tensors = tp > 1 if sp else tp == 1 or a.experts is None
            if fits_pipeline and fits_tensors:
                yield LayoutConfig(tp=tp, pp=pp, vpp=vpp, ep=ep, dp=dp, sp=sp)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layout_yaml(layout: LayoutConfig) -> str:
    """``layout_text`` as fields of a YAML block: ``tp: 2, sp: true, dp: 4``."""
    return ", ".join(
        part.replace("=", ": ") if "=" in part else f"{part}: true" for part in layout_text(layout).split(",")
    )


def check_critic_vocabulary(critic: Mapping[str, Any], policy: Mapping[str, Any]) -> None:
    """Raises ValueError where a critic's model (its config.json) does not know every token of the policy's."""
    ours, theirs = (read_architecture(hf_config).vocab_size for hf_config in (critic, policy))
    if ours < theirs:
        raise ValueError(
            f"critic.model has a vocabulary of {ours} tokens, the policy's has {theirs}; give a critic of the policy's model family, or "
            "leave critic.model out"
        )


def validate_rollout_layout(hf_config: Mapping[str, Any], tensor_parallel: int) -> None:
    """Whether SGLang can serve this model over ``tensor_parallel`` ranks. ``hf_config`` is the model's
    config.json.

    Query heads and the intermediate size (an expert's too) must divide by it. Key/value heads must divide by
    it too, or, where there are fewer heads than ranks, ranks by heads: each head is then copied to several
    ranks. Any vocabulary fits: SGLang pads it to a multiple of the ranks.

    Raises ValueError for what ``read_architecture`` refuses, and naming the first number that does not fit.
    """
    architecture = read_architecture(hf_config)
    if architecture.experts and architecture.tied:
        raise ValueError(
            f"config.json has tie_word_embeddings=true, which SGLang ignores in a {architecture.model_type} model: it would serve a random "
            "output layer; save the model with an output layer of its own (a copy of the embedding) and tie_word_embeddings=false"
        )
    wrong = _rollout_misfit(architecture, tensor_parallel)
    if wrong is not None:
        fitting = rollout_sizes(architecture)
        raise ValueError(
            f"rollout.tp={tensor_parallel} does not fit the model's {wrong}; use one of {fitting} (or another model)"
        )


def rollout_sizes(architecture: Architecture) -> list[int]:
    """The tensor-parallel sizes that SGLang can serve the model with."""
    return [n for n in range(1, architecture.num_heads + 1) if _rollout_misfit(architecture, n) is None]


def _rollout_misfit(architecture: Architecture, size: int) -> str | None:
    """The first number that keeps SGLang from splitting the model over ``size`` ranks."""
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % size:
        return f"num_attention_heads={heads}"
    if (kv_heads % size) if kv_heads >= size else (size % kv_heads):
        return f"num_key_value_heads={kv_heads}"
    experts = architecture.experts
    if (experts is None or not all(experts.is_sparse)) and architecture.intermediate_size % size:
        return f"intermediate_size={architecture.intermediate_size}"
    if experts is not None and experts.intermediate_size % size:
        return f"intermediate size of experts, {experts.intermediate_size}"
    return None
