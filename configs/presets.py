"""Named corrections: ``correction: decoupled_token_is`` in YAML, ``--correction decoupled_token_is`` in a
replay.

A preset holds only the differences from the schema's defaults, so that dependent defaults follow an
overridden key: ``weight.bound=none`` over ``decoupled_token_is`` also drops ``upper``. Layers and overrides
are laid over a preset in ``configs/reading/shorthands.py``.

The first eight and their thresholds come from the source documents: 2 for weights, 1.001 for a geometric
mean, 1e-4 for the veto beside it. The study of truncated importance sampling (Yao et al. 2025) gives no
threshold for its variants; they use 2 too.
"""

from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

from configs.other_systems.verl import REJECTED_TOKENS, VERL_PRESETS, from_verl
from configs.reading.yaml_values import show
from configs.schema.correction import CorrectionConfig

_NO_WEIGHT = {"level": "none"}
_TOKEN, _SEQUENCE = {"level": "token"}, {"level": "sequence"}
_ICEPOP = {"level": "token", "bound": "mask", "lower": 0.5, "upper": 5.0}
_GEOMETRIC = {"reject": [{"rule": "ratio", "level": "geometric", "upper": 1.001}], "veto": 1e-4}
_K3 = {"reject": [{"rule": "k3", "reduce": "mean", "upper": 0.01}]}
_BYPASS = {"mode": "bypass", "weight": _NO_WEIGHT}
_GRADIENT = {"mode": "bypass", "loss": "policy_gradient"}

_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoupled_token_is": ("a weight per token, truncated at 2", {"weight": _TOKEN}),
    "decoupled_seq_is": ("a weight per sequence, truncated at 2", {"weight": _SEQUENCE}),
    "decoupled_seq_is_rs": (
        "a weight per sequence, truncated at 2; sequences outside [0.5, 2] are rejected",
        {"weight": _SEQUENCE, "reject": [{"rule": "ratio", "level": "sequence", "upper": 2.0}]},
    ),
    "decoupled_geo_rs": (
        "sequences whose geometric mean leaves 1 by 0.1 % are rejected; veto",
        {"weight": _NO_WEIGHT, **_GEOMETRIC},
    ),
    "ppo_is_bypass": ("PPO against the rollout policy, without recomputing old log-probs", _BYPASS),
    "pg_rs": (
        "policy gradient without clipping; rejects as decoupled_geo_rs does",
        {**_GRADIENT, "weight": _NO_WEIGHT, **_GEOMETRIC},
    ),
    "pg_is": (
        "policy gradient without clipping, a weight per sequence, truncated at 2",
        {**_GRADIENT, "weight": _SEQUENCE},
    ),
    "disabled": ("metrics only: the gap is measured and left as it is", {"weight": _NO_WEIGHT}),
    "decoupled_token_icepop": ("a weight per token, 0 outside [0.5, 5] (IcePop)", {"weight": _ICEPOP}),
    "decoupled_geo_rs_token_is": (
        "decoupled_geo_rs with the weight of decoupled_token_is",
        {"weight": _TOKEN, **_GEOMETRIC},
    ),
    "decoupled_geo_rs_seq_is": (
        "decoupled_geo_rs with the weight of decoupled_seq_is",
        {"weight": _SEQUENCE, **_GEOMETRIC},
    ),
    "decoupled_k3_rs": ("sequences whose mean k3 is above 0.01 are rejected", {"weight": _NO_WEIGHT, **_K3}),
    "decoupled_k3_rs_token_is": (
        "decoupled_k3_rs with the weight of decoupled_token_is",
        {"weight": _TOKEN, **_K3},
    ),
    "decoupled_k3_rs_seq_is": (
        "decoupled_k3_rs with the weight of decoupled_seq_is",
        {"weight": _SEQUENCE, **_K3},
    ),
    "bypass_geo_rs": (
        "ppo_is_bypass with the rejection and veto of decoupled_geo_rs",
        {**_BYPASS, **_GEOMETRIC},
    ),
    "bypass_k3_rs": ("ppo_is_bypass with the rejection of decoupled_k3_rs", {**_BYPASS, **_K3}),
    "pg_geo_rs_token_is": (
        "pg_rs with a weight per token, truncated at 2",
        {**_GRADIENT, "weight": _TOKEN, **_GEOMETRIC},
    ),
    "pg_geo_rs_seq_is": (
        "pg_rs with a weight per sequence, truncated at 2",
        {**_GRADIENT, "weight": _SEQUENCE, **_GEOMETRIC},
    ),
    "pg_token_icepop": (
        "policy gradient without clipping, the weight of decoupled_token_icepop",
        {**_GRADIENT, "weight": _ICEPOP},
    ),
    "tis": (
        "the study's truncated importance sampling: decoupled_token_is by its own name",
        {"weight": _TOKEN},
    ),
    "vanilla_is": (
        "the study's importance sampling without bound",
        {"weight": {"level": "token", "bound": "none"}},
    ),
    "ppo_is": (
        "the study's PPO with the rollout's probabilities in its ratio: ppo_is_bypass by its own name",
        _BYPASS,
    ),
    "drop_outliers": (
        "a weight per token without bound; tokens above 2 are dropped instead of truncated",
        {
            "weight": {"level": "token", "bound": "none"},
            "reject": [{"rule": "ratio", "level": "token", "lower": 0.0, "upper": 2.0}],
        },
    ),
}

PRESETS: Mapping[str, CorrectionConfig] = MappingProxyType(
    {name: CorrectionConfig(**body) for name, (_, body) in _PRESETS.items()}
)
ALIASES: Mapping[str, CorrectionConfig] = MappingProxyType(
    {name: from_verl(block)[0] for name, block in VERL_PRESETS.items()}
)
"""verl's presets by verl's names. Not every one equals a preset of ours."""
DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {name: description for name, (description, _) in _PRESETS.items()}
)
"""One line each, for ``--help``, the README and tables of replays."""


def preset_body(name: str) -> dict[str, Any]:
    """A copy of the ``correction:`` block of a preset or alias. Raises KeyError for an unknown name."""
    if name not in ALIASES:
        return deepcopy(_PRESETS[name][1])
    ours = preset_name(ALIASES[name])
    return preset_body(ours) if ours else ALIASES[name].model_dump(mode="json", exclude_none=True)


def alias_notes(name: str) -> list[str]:
    """What an alias stands for, and how verl differs; empty for other names."""
    if name not in ALIASES:
        return []
    ours = preset_name(ALIASES[name])
    meaning = ours or f"{{verl: {show(dict(VERL_PRESETS[name]))}}}, which no preset of Tandem is"
    beside = [note for note in from_verl(VERL_PRESETS[name])[1] if note.startswith(REJECTED_TOKENS)]
    return [f"{name} is a preset of verl -> {meaning}", *beside]


def preset_name(correction: CorrectionConfig) -> str | None:
    """The name of the preset that equals this correction, None where none does.

    A correction with an override has no name, since it equals no preset. Of two names for the same correction
    (``tis``) it is the first in ``PRESETS``.
    """
    return next((name for name, preset in PRESETS.items() if preset == correction), None)
