"""A model's architecture and the layouts that fit it: arithmetic on config.json without torch, for checks
before a start."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.schema.layout import LayoutConfig, layout_text
from parallel.planning.families import SUPPORTED, Family, family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts part of a model. Router weights are the chosen experts' scores: a softmax over all
    experts, or a sigmoid of each.

    ``norm_topk``: whether the weights are divided by their sum. ``is_sparse``: per layer, whether it has
    experts or a dense MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool
    is_sparse: tuple[bool, ...]
    score: Literal["softmax", "sigmoid"] = "softmax"
    has_bias: bool = False
    """Whether experts are chosen by score + bias. The bias is kept as it was loaded: the loss has no gradient of it."""
    scale: float = 1.0
    """By which the weights are multiplied at last."""
    shared_size: int = 0
    """Intermediate size of the MLP that every token goes through beside its experts; 0: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The numbers of config.json that decide the model. ``vocab_size`` has no padding rows.

    ``intermediate_size`` is that of dense MLPs; a model with experts in every layer does not use it.
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
    rotary_size: int
    """Numbers of each head, from the first, that are rotated."""
    experts: Experts | None = None
    """None for a dense model."""
    further_layers: int = 0
    """Layers behind the last one of a published folder that predict further tokens (multi-token prediction). They are
    neither loaded nor exported."""


MOST_LAYERS = 10_000
"""Far above any model. A larger number comes from a damaged file, whose checks would not end."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ValueError where the file is missing or no JSON object."""
    path = Path(folder) / "config.json"
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"model.path={folder}: cannot read config.json ({error.strerror}); give a Hugging Face model folder"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} nests its values too deep to be read; restore it") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds {type(loaded).__name__}, not an object")
    return loaded


def read_architecture(hf_config: Mapping[str, Any]) -> Architecture:
    """The architecture in config.json. Raises ValueError for a model or variant that this learner does not
    compute exactly, and for missing or impossible sizes."""
    kind = hf_config.get("model_type")
    family = family_of(kind)
    assert isinstance(kind, str)  # it is the name of a family
    _refuse_variants(hf_config, kind, family)
    heads, hidden_size = (
        _read_size(hf_config, "num_attention_heads", kind),
        _read_size(hf_config, "hidden_size", kind),
    )
    num_layers = _read_size(hf_config, "num_hidden_layers", kind)
    if num_layers > MOST_LAYERS:
        raise ValueError(
            f"config.json has num_hidden_layers={num_layers}, more than {MOST_LAYERS}; restore it"
        )
    kv_heads = _read_size(hf_config, "num_key_value_heads", kind, default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"config.json has num_attention_heads={heads}, not a multiple of num_key_value_heads={kv_heads}; restore it"
        )
    if hf_config.get("head_dim") is None and hidden_size % heads:
        raise ValueError(
            f"config.json has hidden_size={hidden_size}, which does not divide by num_attention_heads={heads}, and no head_dim; restore it"
        )
    head_dim = _read_size(hf_config, "head_dim", kind, default=hidden_size // heads)
    return Architecture(
        model_type=kind,
        vocab_size=_read_size(hf_config, "vocab_size", kind),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=_read_size(hf_config, "intermediate_size", kind),
        norm_eps=_read_positive_number(hf_config, "rms_norm_eps", kind),
        max_positions=_read_size(hf_config, "max_position_embeddings", kind),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        qkv_bias=_has(hf_config, family.qkv_bias),
        qk_norm=_has(hf_config, family.qk_norm),
        rotary_size=_rotary_size(hf_config, family, head_dim),
        experts=_read_experts(hf_config, kind, family, num_layers),
        further_layers=int(hf_config.get("num_nextn_predict_layers") or 0) if kind == "glm4_moe" else 0,
    )


def _has(hf_config: Mapping[str, Any], part: bool | str) -> bool:
    """``part`` of ``Family``: a fact, or the field that says so."""
    return part if isinstance(part, bool) else bool(hf_config.get(part))


def _rotary_size(hf_config: Mapping[str, Any], family: Family, head_dim: int) -> int:
    size = int(head_dim * rotated_share(hf_config, family))
    if size % 2 or size < 2:
        raise ValueError(
            f"config.json rotates {size} numbers of each head of {head_dim}, which are not pairs; restore its partial_rotary_factor"
        )
    return size


def rotated_share(hf_config: Mapping[str, Any], family: Family) -> float:
    """The share of each head that is rotated: ``partial_rotary_factor`` of config.json or of its rope parameters."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    share = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if share is None:
        return family.rotated_share or 1.0
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ValueError(
            f"config.json has partial_rotary_factor={share!r}; it must be a number above 0, at most 1"
        )
    return float(share)


def _read_experts(hf_config: Mapping[str, Any], kind: str, family: Family, num_layers: int) -> Experts | None:
    if family.experts == "glm4_moe":
        return _read_glm_experts(hf_config, kind, num_layers)
    if family.experts == "mixtral":
        size_name, norm_topk, dense, every = "intermediate_size", True, (), 1
    elif family.experts == "qwen3_moe":
        size_name, norm_topk = "moe_intermediate_size", bool(hf_config.get("norm_topk_prob", False))
        dense = hf_config.get("mlp_only_layers") or ()
        every = _read_size(hf_config, "decoder_sparse_step", kind, default=1)
    else:
        return None
    # Recent versions of transformers write Mixtral's name for either family.
    count_name = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    count, chosen = _read_counts(hf_config, count_name, kind)
    is_sparse = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
    if not any(is_sparse):
        raise ValueError(
            f"config.json has mlp_only_layers={list(dense)} and decoder_sparse_step={every}, which leave none of the {num_layers} layers "
            "with experts; restore it, or use a dense model"
        )
    return Experts(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=_read_size(hf_config, size_name, kind),
        norm_topk=norm_topk,
        is_sparse=is_sparse,
    )


def _read_glm_experts(hf_config: Mapping[str, Any], kind: str, num_layers: int) -> Experts:
    count, chosen = _read_counts(hf_config, "n_routed_experts", kind)
    dense = _read_field(hf_config, "first_k_dense_replace", kind)
    if type(dense) is not int or not 0 <= dense < num_layers:
        raise ValueError(
            f"config.json has first_k_dense_replace={dense!r}, which leaves none of the {num_layers} layers with experts, or is no "
            "number of layers; restore it, or use a dense model"
        )
    size = _read_size(hf_config, "moe_intermediate_size", kind)
    return Experts(
        num_experts=count,
        experts_per_token=chosen,
        intermediate_size=size,
        norm_topk=bool(hf_config.get("norm_topk_prob", True)),
        is_sparse=tuple(layer >= dense for layer in range(num_layers)),
        score="sigmoid",
        has_bias=True,
        scale=_read_positive_number(hf_config, "routed_scaling_factor", kind),
        shared_size=size * _read_size(hf_config, "n_shared_experts", kind),
    )


def _read_counts(hf_config: Mapping[str, Any], count_name: str, kind: str) -> tuple[int, int]:
    """(experts, experts of a token)."""
    count, chosen = (
        _read_size(hf_config, count_name, kind),
        _read_size(hf_config, "num_experts_per_tok", kind),
    )
    if chosen > count:
        raise ValueError(
            f"config.json has num_experts_per_tok={chosen}, more than its {count_name}={count}; restore it"
        )
    return count, chosen


def _read_size(hf_config: Mapping[str, Any], name: str, kind: str, *, default: int | None = None) -> int:
    """A whole number of at least 1; ``default``, if there is one, for a missing field or null."""
    if default is not None and hf_config.get(name) is None:
        return default
    value = _read_field(hf_config, name, kind)
    if type(value) is not int or value < 1:
        raise ValueError(
            f"config.json of a {kind} model has {name}={value!r}; it must be a whole number of at least 1"
        )
    return value


def _read_positive_number(hf_config: Mapping[str, Any], name: str, kind: str) -> float:
    value = _read_field(hf_config, name, kind)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"config.json of a {kind} model has {name}={value!r}; it must be a number above 0")
    return float(value)


def _read_field(hf_config: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in hf_config:
        raise ValueError(
            f"config.json of a {kind} model lacks {name!r}; restore the file that came with the model"
        )
    return hf_config[name]


def _refuse_variants(hf_config: Mapping[str, Any], kind: str, family: Family) -> None:
    check_rope_type(_rope_type(hf_config), kind)
    grouped = family.experts == "glm4_moe"
    refused = {
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
        # Mixtral has no use_sliding_window.
        "sliding_window": kind == "mixtral" and hf_config.get("sliding_window") is not None,
        "layer_types": any(t != "full_attention" for t in hf_config.get("layer_types") or ()),
        "attention_bias": family.qkv_bias is False and bool(hf_config.get("attention_bias")),
        "mlp_bias": bool(hf_config.get("mlp_bias")),
        "hidden_act": hf_config.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": family.rotated_share is None and rotated_share(hf_config, family) != 1.0,
        "quantization_config": hf_config.get("quantization_config") is not None,
        "router_jitter_noise": bool(hf_config.get("router_jitter_noise")),
        "router_bias": bool(hf_config.get("router_bias")),
        "shared_expert_intermediate_size": bool(hf_config.get("shared_expert_intermediate_size")),
        "n_shared_experts": not grouped and bool(hf_config.get("n_shared_experts")),
        "n_group": grouped and hf_config.get("n_group", 1) != 1,
    }
    for name, is_set in refused.items():
        if is_set:
            value = hf_config.get(name, rotated_share(hf_config, family))
            raise ValueError(
                f"config.json has {name}={value!r}, which the learner does not compute; use a {kind} without it"
            )
    window, positions = (hf_config.get(name) for name in ("sliding_window", "max_position_embeddings"))
    if family.has_window and window is not None and (type(positions) is not int or window < positions):
        raise ValueError(
            f"config.json has sliding_window={window!r}, which the learner does not compute, with max_position_embeddings={positions!r}; "
            f"set sliding_window to null and max_position_embeddings to at most {window!r}: up to that length both are the same"
        )


def _rope_type(hf_config: Mapping[str, Any]) -> Any:
    """The rope_type under ``rope_parameters``, or in older files under ``rope_scaling``, also as ``type``."""
    rope = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"config.json has rope parameters {rope!r}; they must be an object or null")
    return rope.get("rope_type") or rope.get("type") or "default"


def check_rope_type(rope_type: Any, model_type: str) -> None:
    """Raises ValueError for a rope_type whose frequencies depend on the sequence length (dynamic, longrope), or that the
    family has not."""
    supported = SUPPORTED[model_type].rope_types
    if rope_type not in supported:
        raise ValueError(
            f"rope_type {rope_type!r} of this {model_type} model is not supported; supported are {', '.join(supported)}"
        )


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """The vocabulary with as many padding rows as it takes to divide by the tensor-parallel size."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def validate_layout(
    hf_config: Mapping[str, Any], layout: LayoutConfig, *, num_processes: int | None = None
) -> None:
    """Refuse a layout in which the learner cannot compute the model of this config.json.

    - tp must divide the query heads and the intermediate size of dense layers and of a shared expert. It must
      divide the key/value heads, or they divide it: Megatron then copies each head to several ranks. Vocabulary and, under sp, the
      tokens of a micro-batch are padded, so that any number of them fits.
    - pp * vpp must divide the layers; all chunks are equally deep.
    - ep must divide the experts, of which a dense model has none; an expert is never split, whatever tp.
      Layers with experts and tp > 1 need sp, since tokens travel to experts from where they are split.
    - cp splits sequences of any length, of any model.
    - ``num_processes``, if given, must be the layout's product of sizes.

    Raises ValueError for a model that ``read_architecture`` refuses, and for all problems of the layout at
    once: see ``layout_problems``.
    """
    problems = layout_problems(read_architecture(hf_config), layout, num_processes)
    if problems:
        raise ValueError("\n  ".join(problems))


def check_numerics(pieces: int, architecture: Architecture) -> None:
    """Refuse aligned numerics for a model whose experts' products are not aligned, or whose heads or intermediate size
    do not divide by the pieces. Raises ValueError."""
    if architecture.experts:
        raise ValueError(
            f"model.numerics=aligned covers dense models, and this {architecture.model_type} has experts; set model.numerics=default"
        )
    sizes = {
        "num_attention_heads": architecture.num_heads,
        "intermediate_size": architecture.intermediate_size,
    }
    for name, size in sizes.items():
        if size % pieces:
            raise ValueError(
                f"model.numerics_pieces={pieces} does not divide the model's {name}={size}; use a smaller power of two"
            )


def check_aligned_servers(tensor_parallel: int, architecture: Architecture) -> None:
    """Refuse aligned numerics where SGLang on CPU pads key/value heads to a multiple of its ranks, or the intermediate
    size to one of 32 per rank. Its ranks then hold other parts of a sum than the learner's pieces, and zeros, which
    alone may change a float32 product's order. Raises ValueError."""
    sizes = {
        "num_key_value_heads": (architecture.num_kv_heads, tensor_parallel),
        "intermediate_size": (architecture.intermediate_size, 32 * tensor_parallel),
    }
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            raise ValueError(
                f"rollout.tp={tensor_parallel}: SGLang on CPU pads {name}={size} to a multiple of {multiple}, so that "
                "model.numerics=aligned could not hold; use a smaller rollout.tp, or model.numerics=default"
            )


def layout_problems(
    architecture: Architecture, layout: LayoutConfig, num_processes: int | None = None
) -> list[str]:
    """The problems of this layout, each with the nearest values of its field that solve it. If no value does,
    or there are several problems, a last line lists the nearest layouts that work."""
    misfits = _find_misfits(architecture, layout, num_processes)
    fixes = {field: _nearest_values(architecture, layout, field, num_processes) for field in misfits}
    problems = [
        f"{reason}; {f'use {fixes[field]}' if fixes[field] else f'no {field} alone mends it'}"
        for field, reason in misfits.items()
    ]
    if len(misfits) > 1 or "dp" in misfits or not all(fixes.values()):
        nearest = _nearest_layouts(architecture, layout, num_processes)
        listed = " or ".join(f"{{{layout_yaml(fitting)}}}" for fitting in nearest)
        problems[-1] += f"\n  the nearest layouts that work: {listed}"
    return problems


def _find_misfits(a: Architecture, layout: LayoutConfig, num_processes: int | None) -> dict[str, str]:
    """The problems of this layout, by the field to change."""
    misfits = {}
    if numbers := _tp_misfits(a, layout.tp):
        misfits["tp"] = f"layout.tp={layout.tp} does not divide the model's {' and '.join(numbers)}"
    if a.num_layers % (layout.pp * layout.vpp):
        chunks = f"layout.pp={layout.pp}" + (f" times layout.vpp={layout.vpp}" if layout.vpp > 1 else "")
        misfits["pp"] = f"{chunks} does not divide the model's num_hidden_layers={a.num_layers}"
    if layout.ep > 1 and a.experts is None:
        misfits["ep"] = f"layout.ep={layout.ep} splits experts, of which this {a.model_type} model has none"
    elif a.experts is not None and a.experts.num_experts % layout.ep:
        misfits["ep"] = (
            f"layout.ep={layout.ep} does not divide the model's num_experts={a.experts.num_experts}"
        )
    if a.experts is not None and layout.tp > 1 and not layout.sp:
        misfits["sp"] = (
            f"layout.tp={layout.tp} without sp: tokens travel to the model's experts from where they are split"
        )
    return misfits | _world_misfit(layout, num_processes)


def _tp_misfits(a: Architecture, size: int) -> list[str]:
    """The numbers of the model that do not split over ``size`` tensor-parallel ranks."""
    is_dense = a.experts is None or not all(a.experts.is_sparse)
    remainders = {
        f"num_attention_heads={a.num_heads}": a.num_heads % size,
        # With fewer heads than ranks Megatron splits the qkv product evenly all the same, then gathers it.
        f"num_key_value_heads={a.num_kv_heads}": (
            a.num_kv_heads % size and (size % a.num_kv_heads or 2 * a.num_kv_heads * a.head_dim % size)
        ),
        f"intermediate_size={a.intermediate_size}": is_dense and a.intermediate_size % size,
    }
    if a.experts and a.experts.shared_size:
        remainders[f"intermediate size of the shared expert, {a.experts.shared_size}"] = (
            a.experts.shared_size % size
        )
    return [number for number, remainder in remainders.items() if remainder]


def _world_misfit(layout: LayoutConfig, num_processes: int | None) -> dict[str, str]:
    if num_processes is None:
        return {}
    copies, rest = divmod(num_processes, layout.model_size)
    if rest or copies < 1 or layout.dp not in ("auto", copies):
        sizes = ", ".join(f"{name}={getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp"))
        return {"dp": f"{num_processes} processes do not fit a layout of {sizes}"}
    stage_ranks = layout.tp * layout.cp * copies
    if stage_ranks % layout.ep:
        text = f"layout.ep={layout.ep} does not divide the tp*cp*dp={stage_ranks} ranks of a pipeline stage"
        return {"ep": text}
    return {}


def _nearest_values(a: Architecture, layout: LayoutConfig, field: str, num_processes: int | None) -> str:
    """The values that solve the misfit of ``field``, with all other fields unchanged, as text; "" for none."""
    if field == "dp":
        assert num_processes is not None  # otherwise any dp fits
        return _nearest_dp(layout, num_processes)
    if field == "sp":
        changes = [("sp", True), ("tp", 1)]
    else:
        names = ("pp", "vpp") if field == "pp" and layout.vpp > 1 else (field,)
        changes = [(n, size) for n in names for size in _nearest_sizes(a, layout, n, field, num_processes)]
    valid = [(name, value) for name, value in changes if _with_field(layout, name, value)]
    return " or ".join(f"{name}={str(value).lower()}" for name, value in valid)


def _nearest_sizes(
    a: Architecture, layout: LayoutConfig, name: str, misfit: str, num_processes: int | None
) -> list[int]:
    """The nearest size ``name`` below and above the present one that solves the misfit."""
    num_experts = a.experts.num_experts if a.experts else 1
    largest = {"tp": a.num_heads, "pp": a.num_layers, "vpp": a.num_layers, "ep": num_experts}[name]

    def fits(size: int) -> bool:
        changed = _with_field(layout, name, size)
        return changed is not None and misfit not in _find_misfits(a, changed, num_processes)

    present = getattr(layout, name)
    below, above = range(min(present - 1, largest), 0, -1), range(present + 1, largest + 1)
    nearest = (next(filter(fits, below), None), next(filter(fits, above), None))
    return [size for size in nearest if size is not None]


def _nearest_dp(layout: LayoutConfig, num_processes: int) -> str:
    """A number of processes that fits the layout, and, where one exists, the dp that fits ``num_processes``."""
    copies, rest = divmod(num_processes, layout.model_size)
    dp = max(copies, 1) if layout.dp == "auto" else layout.dp
    while layout.tp * layout.cp * dp % layout.ep:
        dp += 1
    processes = f"{layout.model_size * dp} processes"
    dp_fits = rest == 0 and copies >= 1 and _with_field(layout, "dp", copies) is not None
    return f"dp={copies}, or {processes}" if dp_fits else processes


def _with_field(layout: LayoutConfig, name: str, value: int | bool) -> LayoutConfig | None:
    """The layout with one field changed; None if it is refused whatever the model."""
    sizes: dict[str, Any] = layout.model_dump() | {name: value}
    try:
        return LayoutConfig(**sizes)
    except ValueError:
        return None


def _nearest_layouts(
    a: Architecture, layout: LayoutConfig, num_processes: int | None, count: int = 3
) -> list[LayoutConfig]:
    """The nearest layouts that work on as many processes: the distance is the sum of |log2 of the ratio| over
    all sizes, and 1 for another sp.

    If neither ``num_processes`` nor dp is given, the number of processes is free and dp stays auto.
    """

    def distance(candidate: LayoutConfig) -> tuple[float, str]:
        pairs = [
            (getattr(candidate, name), getattr(layout, name)) for name in ("tp", "pp", "vpp", "ep", "cp")
        ]
        if layout.dp != "auto":
            pairs.append((candidate.dp_size, layout.dp_size))
        steps = sum(abs(math.log2(new / old)) for new, old in pairs) + (candidate.sp != layout.sp)
        return round(steps, 9), layout_text(candidate)

    world = num_processes or (layout.world_size if layout.dp != "auto" else None)
    chunks, context = sorted({1, layout.vpp}), sorted({1, layout.cp})
    return sorted(fitting_layouts(a, world, chunks=chunks, context=context), key=distance)[:count]


def fitting_layouts(
    a: Architecture, world: int | None, *, chunks: Sequence[int] = (1,), context: Sequence[int] = (1,)
) -> Iterator[LayoutConfig]:
    """Every layout of ``world`` processes (None: of any number, with dp auto) in which the learner can compute
    the model. ``chunks`` and ``context``: the values of vpp and cp to try."""
    num_experts = a.experts.num_experts if a.experts else 1
    model_sizes = (divisors(a.num_heads), divisors(a.num_layers), divisors(num_experts))
    for tp, pp, ep, cp in itertools.product(*model_sizes, context):
        if _tp_misfits(a, tp):
            continue
        dp = "auto"
        if world:
            dp, rest = divmod(world, tp * pp * cp)
            if rest or tp * cp * dp % ep:
                continue
        # sp needs tp > 1, and layers with experts need sp there.
        sp_values = [False] if tp == 1 else [True] if a.experts else [False, True]
        for vpp, sp in itertools.product(chunks, sp_values):
            if a.num_layers % (pp * vpp) == 0 and (vpp == 1 or pp > 1):
                yield LayoutConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, dp=dp, sp=sp)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layout_yaml(layout: LayoutConfig) -> str:
    """``layout_text`` as fields of a YAML block: ``tp: 2, sp: true, dp: 4``."""
    return ", ".join(
        part.replace("=", ": ") if "=" in part else f"{part}: true" for part in layout_text(layout).split(",")
    )


def check_critic_vocabulary(critic: Mapping[str, Any], policy: Mapping[str, Any]) -> None:
    """Raises ValueError where a critic's model lacks tokens of the policy's. Both are config.json."""
    critic_size, policy_size = (read_architecture(hf_config).vocab_size for hf_config in (critic, policy))
    if critic_size < policy_size:
        raise ValueError(
            f"critic.model has a vocabulary of {critic_size} tokens, the policy's has {policy_size}; "
            "give a critic of the policy's model family, or leave critic.model out"
        )


def validate_rollout_layout(hf_config: Mapping[str, Any], tensor_parallel: int) -> None:
    """Refuse a model (its config.json) that SGLang cannot serve over ``tensor_parallel`` ranks.

    The ranks must divide the query heads and the intermediate size (an expert's too). They must divide the
    key/value heads, or fewer heads divide the ranks: each head is then copied to several ranks. Any
    vocabulary fits: SGLang pads it to a multiple of the ranks.

    Raises ValueError for a model that ``read_architecture`` refuses, and for the first number that does not
    fit.
    """
    architecture = read_architecture(hf_config)
    if architecture.experts and architecture.tied:
        raise ValueError(
            f"config.json has tie_word_embeddings=true, which SGLang ignores in a {architecture.model_type} model: it would serve a random "
            "output layer; save the model with an output layer of its own (a copy of the embedding) and tie_word_embeddings=false"
        )
    misfit = _rollout_misfit(architecture, tensor_parallel)
    if misfit is not None:
        sizes = rollout_sizes(architecture)
        raise ValueError(
            f"rollout.tp={tensor_parallel} does not fit the model's {misfit}; use one of {sizes} (or another model)"
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
    if experts is not None and experts.shared_size % size:
        return f"intermediate size of the shared expert, {experts.shared_size}"
    return None
