"""The layouts that fit a model's architecture: arithmetic without torch, for checks before a start."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.schema.layout import LayoutConfig, layout_text
from parallel.planning.architecture import Architecture, last_stage_layers, read_architecture


def validate_layout(
    hf_config: Mapping[str, Any], layout: LayoutConfig, *, num_processes: int | None = None
) -> None:
    """Refuse a layout in which the learner cannot compute the model of this config.json.

    - tp must divide the query heads and the intermediate size of dense layers and of a shared expert. It must
      divide the key/value heads, or they divide it: Megatron then copies each head to several ranks. Vocabulary and, under sp, the
      tokens of a micro-batch are padded, so that any number of them fits.
    - pp * vpp must divide the layers, since all chunks are equally deep; without vpp the last stage may have fewer.
    - ep must divide the experts, of which a dense model has none; an expert is never split, whatever tp.
      Layers with experts and tp > 1 need sp, since tokens travel to experts from where they are split.
    - cp splits sequences of any length, of any model without recurrent layers. tp must divide the key heads of such layers.
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
    if architecture.recurrent:
        raise ValueError(
            f"model.numerics=aligned covers attention, and this {architecture.model_type} has gated delta nets (linear attention); set "
            "model.numerics=default"
        )
    if architecture.experts:
        raise ValueError(
            f"model.numerics=aligned covers dense models, and this {architecture.model_type} has experts; set model.numerics=default"
        )
    if architecture.needs_own_layers:
        raise ValueError(
            f"model.numerics=aligned covers layers of Llama's form, and those of this {architecture.model_type} have windows, norms behind "
            "attention and MLP, or pairs of neighbours that are rotated; set model.numerics=default"
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
    """Refuse aligned numerics if SGLang on CPU pads key/value heads to a multiple of its ranks, or the
    intermediate size to one of 32 per rank. Its ranks then hold other parts of a sum than the learner's
    pieces, and zeros. These zeros may change the order of a float32 product. Raises ValueError."""
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
        f"{reason}; {f'use {fixes[field]}' if fixes[field] else f'no value of {field} alone fixes it'}"
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
    if last_stage_layers(a.num_layers, layout.pp, layout.vpp) is None:
        if layout.vpp > 1:
            reason = f"layout.pp={layout.pp} times layout.vpp={layout.vpp} does not divide"
        else:
            reason = f"layout.pp={layout.pp} leaves its last stage none of"
        misfits["pp"] = f"{reason} the model's num_hidden_layers={a.num_layers}"
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
    if a.recurrent is not None and layout.cp > 1:
        misfits["cp"] = (
            f"layout.cp={layout.cp} splits sequences, but recurrent layers need their tokens in order (this is a {a.model_type})"
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
    if a.family.whole_qk_norm:  # a head that several ranks have would count several times in the norm
        remainders[f"num_key_value_heads={a.num_kv_heads}"] = a.num_kv_heads % size
    if a.experts and a.experts.shared_size:
        remainders[f"intermediate size of the shared expert, {a.experts.shared_size}"] = (
            a.experts.shared_size % size
        )
    if a.recurrent is not None:
        remainders[f"linear_num_key_heads={a.recurrent.key_heads}"] = a.recurrent.key_heads % size
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
    largest = {"tp": a.num_heads, "pp": a.num_layers, "vpp": a.num_layers, "ep": num_experts, "cp": 1}[name]

    def fits(size: int) -> bool:
        changed = _with_field(layout, name, size)
        return changed is not None and misfit not in _find_misfits(a, changed, num_processes)

    present = getattr(layout, name)
    below, above = range(min(present - 1, largest), 0, -1), range(present + 1, largest + 1)
    nearest = (next(filter(fits, below), None), next(filter(fits, above), None))
    return [size for size in nearest if size is not None]


def _nearest_dp(layout: LayoutConfig, num_processes: int) -> str:
    """A number of processes that fits the layout, and, if one exists, the dp that fits ``num_processes``."""
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


def _nearest_layouts(a: Architecture, layout: LayoutConfig, num_processes: int | None) -> list[LayoutConfig]:
    """The three nearest layouts that work on as many processes: the distance is the sum of |log2 of the ratio| over
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
    return sorted(fitting_layouts(a, world, chunks=chunks, context=context), key=distance)[:3]


def fitting_layouts(
    a: Architecture, world: int | None, *, chunks: Sequence[int] = (1,), context: Sequence[int]
) -> Iterator[LayoutConfig]:
    """Every layout of ``world`` processes (None: of any number, with dp auto) in which the learner can compute
    the model; of pipelines with a shorter last stage those of a power of two. ``chunks`` and ``context``: the values of vpp and
    cp to try."""
    num_experts = a.experts.num_experts if a.experts else 1
    stages = [n for n in range(1, a.num_layers + 1) if a.num_layers % n == 0 or n.bit_count() == 1]
    model_sizes = (divisors(a.num_heads), stages, divisors(num_experts))
    for tp, pp, ep, cp in itertools.product(*model_sizes, context):
        if _tp_misfits(a, tp) or (cp > 1 and a.recurrent is not None):
            continue
        dp = "auto"
        if world:
            dp, rest = divmod(world, tp * pp * cp)
            if rest or tp * cp * dp % ep:
                continue
        # sp needs tp > 1, and layers with experts need sp there.
        sp_values = [False] if tp == 1 else [True] if a.experts else [False, True]
        for vpp, sp in itertools.product(chunks, sp_values):
            if last_stage_layers(a.num_layers, pp, vpp) is not None and (vpp == 1 or pp > 1):
                yield LayoutConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, dp=dp, sp=sp)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layout_yaml(layout: LayoutConfig) -> str:
    """``layout_text`` as fields of a YAML block: ``tp: 2, sp: true, dp: 4``."""
    return ", ".join(
        part.replace("=", ": ") if "=" in part else f"{part}: true" for part in layout_text(layout).split(",")
    )


def check_other_vocabulary(field: str, other: Architecture, policy: Architecture) -> None:
    """Raises ValueError if a model that reads the policy's tokens, of the config's ``field``, lacks some."""
    if other.vocab_size < policy.vocab_size:
        raise ValueError(
            f"{field} has a vocabulary of {other.vocab_size} tokens, the policy's has {policy.vocab_size}; "
            f"give one of the policy's model family, or leave {field} out"
        )


def check_other_positions(field: str, other: Architecture, longest: int) -> None:
    """Raises ValueError if such a model lacks positions of the longest sequence."""
    if other.max_positions < longest:
        raise ValueError(
            f"{field} has {other.max_positions} positions (max_position_embeddings), and a sequence may have {longest} tokens; "
            "give one with as many, or lower learner.token_budget or rollout.max_total_tokens"
        )


def check_trainable(architecture: Architecture, dtype: str) -> None:
    """Raises ValueError if the model cannot be trained in this dtype."""
    if dtype == "float16" and architecture.experts is not None:
        # Megatron gives the experts' optimizer its own loss scale, which would differ from the loss's.
        raise ValueError(
            "model.dtype=float16 cannot train a model with experts, whose gradients have two loss scales; use bfloat16"
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
            "output layer; save the model with its own output layer (a copy of the embedding) and tie_word_embeddings=false"
        )
    misfit = _rollout_misfit(architecture, tensor_parallel)
    if misfit is not None:
        sizes = rollout_sizes(architecture)
        raise ValueError(
            f"rollout.tp={tensor_parallel} does not fit the model's {misfit}; use one of {sizes} (or another model)"
        )


def check_served_on_cpu(architecture: Architecture, has_plugin: bool) -> None:
    """Raises ValueError for a model that SGLang 0.5.23 by itself serves wrongly on CPU, or not at all: one of latent attention, with
    sinks, or with recurrent layers."""
    kind = architecture.model_type
    lack = None
    if architecture.family.has_sinks:
        lack = f"SGLang has no attention with sinks on CPU, which a {kind} needs"
    elif architecture.latent:
        lack = f"SGLang's own attention on CPU computes prompts of a {kind} wrongly"
    elif architecture.recurrent:
        lack = f"SGLang computes the recurrent layers of a {kind} on CPU by kernels that are not installed"
    if lack is not None and not has_plugin:
        raise ValueError(f"rollout.sglang_plugin=false: {lack}; leave it out, so that servers use Tandem's")


def rollout_sizes(architecture: Architecture) -> list[int]:
    """The tensor-parallel sizes that SGLang can serve the model with."""
    return [n for n in range(1, architecture.num_heads + 1) if _rollout_misfit(architecture, n) is None]


def _rollout_misfit(architecture: Architecture, size: int) -> str | None:
    """The first number that keeps SGLang from splitting the model over ``size`` ranks."""
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % size:
        return f"num_attention_heads={heads}"
    # SGLang would normalise over a head once for each rank that has it.
    if (kv_heads % size) if kv_heads >= size or architecture.family.whole_qk_norm else (size % kv_heads):
        return f"num_key_value_heads={kv_heads}"
    if architecture.recurrent is not None and architecture.recurrent.key_heads % size:
        return f"linear_num_key_heads={architecture.recurrent.key_heads}"
    experts = architecture.experts
    if (experts is None or not all(experts.is_sparse)) and architecture.intermediate_size % size:
        return f"intermediate_size={architecture.intermediate_size}"
    if experts is not None and experts.intermediate_size % size:
        return f"intermediate size of experts, {experts.intermediate_size}"
    if experts is not None and experts.shared_size % size:
        return f"intermediate size of the shared expert, {experts.shared_size}"
    return None
