"""Fields of a model's config.json: numbers, and the parameters of its rotary frequencies. Without torch.

Functions raise a ValueError that names the field, its value and the fix. ``config_parts.py`` and ``architecture.py`` make a model of them.
"""

import math
from collections.abc import Mapping
from typing import Any

from parallel.planning.families import SUPPORTED, Family

_ROPE_NUMBERS = (
    "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim", "attention_factor",
)  # fmt: skip
"""The numbers of rope parameters."""


def field_error(fault: str) -> ValueError:
    """fault: a field with its value, what is wrong, and the fix."""
    return ValueError(f"config.json has {fault}")


def read_size(hf_config: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    """A whole number of at least 1; ``default``, if there is one, for a missing field or null."""
    if default is not None and hf_config.get(name) is None:
        return default
    value = read_field(hf_config, name)
    if type(value) is not int or value < 1:
        raise field_error(f"{name}={value!r}; it must be a whole number of at least 1")
    return value


def read_flag(hf_config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """true or false; ``default`` for a missing field or null. A text such as "false" would count as true."""
    value = hf_config.get(name)
    if value is not None and type(value) is not bool:
        raise field_error(f"{name}={value!r}; it must be true or false")
    return default if value is None else value


def read_windows(hf_config: Mapping[str, Any], num_layers: int, family: Family) -> tuple[int | None, ...]:
    """By layer the tokens that a token sees, itself included, from ``layer_types``; None: all before it."""
    known = ("full_attention", "sliding_attention")
    if family.is_gemma and hf_config.get("layer_types") is None:
        every = read_size(hf_config, "sliding_window_pattern", default=6)
        types = [known[(layer + 1) % every != 0] for layer in range(num_layers)]
    else:
        types = read_field(hf_config, "layer_types")
    if not isinstance(types, list) or len(types) != num_layers or not all(name in known for name in types):
        raise field_error(
            f"layer_types={types!r}; it must be a list of {num_layers} names, of {known[0]} and {known[1]}; restore it"
        )
    window = read_size(hf_config, "sliding_window")
    return tuple(window if name == "sliding_attention" else None for name in types)


def read_positive_number(hf_config: Mapping[str, Any], name: str) -> float:
    """A finite number above 0."""
    value = read_field(hf_config, name)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise field_error(f"{name}={value!r}; it must be a number above 0")
    return float(value)


def read_field(hf_config: Mapping[str, Any], name: str) -> Any:
    """A field that the file must have."""
    if name not in hf_config:
        raise ValueError(f"config.json lacks {name!r}; restore the file that came with the model")
    return hf_config[name]


def rotary_size_of(hf_config: Mapping[str, Any], family: Family, head_dim: int) -> int:
    """The numbers of each head, from the first, that are rotated."""
    size = int(head_dim * rotated_share(hf_config, family))
    if size % 2 or size < 2:
        raise ValueError(
            f"config.json rotates {size} numbers of each head of {head_dim}, which are not pairs; restore its partial_rotary_factor"
        )
    return size


def rotated_share(hf_config: Mapping[str, Any], family: Family) -> float:
    """The share of each head that is rotated: ``partial_rotary_factor`` of config.json or of its rope parameters."""
    rope = rope_of(hf_config)
    share = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if share is None:
        return family.rotated_share or 1.0
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise field_error(f"partial_rotary_factor={share!r}; it must be a number above 0, at most 1")
    return float(share)


def check_rope_by_layers(hf_config: Mapping[str, Any]) -> None:
    """Raises ValueError if transformers and SGLang would rotate the layers of an Olmo 3 differently: SGLang
    reads the fields of the published files, of which transformers takes ``rope_theta`` for layers without a
    window alone."""
    if hf_config.get("rope_parameters") is not None:
        raise field_error(
            "rope_parameters, which SGLang does not read there; write rope_theta and rope_scaling as the published files have them"
        )
    if read_field(hf_config, "rope_theta") != 500_000:
        raise field_error(
            f"rope_theta={hf_config['rope_theta']!r}, which transformers uses only in layers without a window; it must be 500000"
        )


def check_rope_by_kind(hf_config: Mapping[str, Any]) -> None:
    """Raises ValueError for rope parameters of a Gemma 3 that are neither transformers', by kind of layer, nor those of the
    published files."""
    by_kind = hf_config.get("rope_parameters")
    if by_kind is not None:
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(by_kind, Mapping) or not all(isinstance(by_kind.get(k), Mapping) for k in kinds):
            raise field_error(
                f"rope_parameters={by_kind!r}; it must be an object of {' and '.join(kinds)}; restore it"
            )
        rope_type = by_kind["sliding_attention"].get("rope_type", "default")
        if rope_type != "default":
            raise field_error(
                f"rope_type={rope_type!r} of sliding_attention, where SGLang scales nothing; restore it"
            )
    read_positive_number(hf_config if by_kind is None else by_kind["full_attention"], "rope_theta")
    window_theta(hf_config)


def window_theta(hf_config: Mapping[str, Any]) -> float:
    """The base of rotary frequencies in a Gemma 3's layers with a window."""
    by_kind = hf_config.get("rope_parameters")
    if by_kind is not None:
        return read_positive_number(by_kind["sliding_attention"], "rope_theta")
    return read_positive_number(hf_config, "rope_local_base_freq")


def yarn_scale(hf_config: Mapping[str, Any]) -> float:
    """0.1 m log(factor) + 1 of YaRN (arXiv 2309.00071) with m = ``mscale_all_dim``, by which DeepSeek's models multiply
    queries and keys; 1 without it."""
    rope = rope_of(hf_config)
    if rope_type_of(hf_config) == "default":
        return 1.0
    one, all_dims = rope.get("mscale", 1), rope.get("mscale_all_dim") or 0
    if (not one if all_dims else one != 1) or rope.get("attention_factor") is not None:
        raise field_error(
            f"rope parameters {rope!r}, of which transformers and SGLang make different factors; they must have "
            "both mscale and mscale_all_dim or neither, and no attention_factor"
        )
    return 0.1 * all_dims * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0


def check_rope_type(rope_type: Any, model_type: str) -> None:
    """Raises ValueError for a rope_type whose frequencies depend on the sequence length (dynamic, longrope), or that the
    family has not."""
    supported = SUPPORTED[model_type].rope_types
    if rope_type not in supported:
        raise ValueError(
            f"rope_type {rope_type!r} of this {model_type} model is not supported; supported are {', '.join(supported)}"
        )


def check_rope_numbers(hf_config: Mapping[str, Any]) -> None:
    """Raises ValueError for numbers of the rope parameters that are missing or none."""
    rope = rope_of(hf_config)
    if rope_type_of(hf_config) != "default":
        read_positive_number(rope, "factor")
    if "rope_theta" in rope:  # transformers has a default for a missing one, not for null
        read_positive_number(rope, "rope_theta")
    numbers = {name: rope.get(name) for name in _ROPE_NUMBERS} | {
        "rope_theta": rope.get("rope_theta", hf_config.get("rope_theta"))
    }
    for name, value in numbers.items():
        if value is None or (value == 0 and name.startswith("mscale")):  # without it
            continue
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise field_error(f"{name}={value!r} in its rope parameters; it must be a number above 0")


def check_served_rope(hf_config: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError for numbers of scaled frequencies that only one of transformers and SGLang 0.5.23 reads, or that they
    read differently."""
    rope, is_latent = rope_of(hf_config), SUPPORTED[kind].is_latent
    if rope_type_of(hf_config) not in ("yarn", "llama3"):
        return
    original, scales = "original_max_position_embeddings", (rope.get("mscale"), rope.get("mscale_all_dim"))
    is_other = {
        # Beside the rope parameters: transformers uses it instead of theirs. SGLang does so only in Llama's code.
        original: hf_config.get(original) not in (None, rope.get(original)),
        "attention_factor": not is_latent and not _is_served_factor(rope),
        "mscale": not is_latent and None not in scales and 0 in scales,
        "truncate": is_latent and not rope.get("truncate", True),
        # Only in SGLang.
        "attn_factor": rope.get("attn_factor", 1) != 1,
        "extrapolation_factor": rope.get("extrapolation_factor", 1) != 1,
        "apply_yarn_scaling": is_latent and not rope.get("apply_yarn_scaling", True),
        # transformers then takes its default.
        "beta_fast": rope.get("beta_fast", 32) is None,
        "beta_slow": rope.get("beta_slow", 1) is None,
    }
    for name in filter(is_other.get, is_other):
        place, fields = ("beside", hf_config) if name == original else ("in", rope)
        raise field_error(
            f"{name}={fields[name]!r} {place} its rope parameters, of which transformers and SGLang make different "
            f"frequencies; use a {kind} without it"
        )


def _is_served_factor(rope: Mapping[str, Any]) -> bool:
    """Whether YaRN's ``attention_factor``, which SGLang does not read, is unset or has the value that follows
    from the other numbers."""
    given, log = rope.get("attention_factor"), math.log(max(rope["factor"], 1))
    one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    served = (0.1 * one * log + 1) / (0.1 * all_dims * log + 1) if one and all_dims else 0.1 * log + 1
    return given is None or math.isclose(given, served, rel_tol=1e-6)


def rope_type_of(hf_config: Mapping[str, Any]) -> Any:
    """The rope_type under ``rope_parameters``, or in older files under ``rope_scaling``, also as ``type``."""
    rope = rope_of(hf_config)
    return rope.get("rope_type") or rope.get("type") or "default"


def rope_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters``, or in older files ``rope_scaling``; empty where there are none. Of parameters by kind of layer those
    without a window.

    Raises ValueError if there are both: transformers then reads only ``rope_scaling``, and with it another
    rope_theta."""
    new, old = hf_config.get("rope_parameters"), hf_config.get("rope_scaling")
    if new and old and new != old:
        raise field_error(
            f"rope_parameters and rope_scaling={old!r}, of which transformers reads only the latter; write all numbers "
            "into rope_parameters, and remove rope_scaling"
        )
    for rope in (new, old):
        if rope is not None and not isinstance(rope, Mapping):
            raise field_error(f"rope parameters {rope!r}; they must be an object or null")
    rope = new or old or {}
    full = rope.get("full_attention")
    return full if isinstance(full, Mapping) else rope
