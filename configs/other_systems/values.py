"""Translates verl's names of values into the schema's: ``kl: {estimator: low_var_kl}``, ``objective: {type:
vanilla}``. For the name of an algorithm, which is more than one value here, it says what to write:
``objective: {type: grpo}``.

A name is translated only if formula and defaults are the same. A name for nearly the same formula is
refused; the error says what differs and what to write.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from configs.errors import Problem
from configs.reading.yaml_values import Value, show

OUR_NAMES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("objective", "type"): {"vanilla": "clipped"},
    ("aggregation", "type"): {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean_token_mean",
        "seq-mean-token-sum": "sequence_mean_token_sum",
    },
    ("kl", "estimator"): {
        "kl": "k1",
        "mse": "k2",
        "low_var_kl": "k3",
        "kl+": "k1_straight_through",
        "k1+": "k1_straight_through",
        "abs+": "abs_straight_through",
        "k3+": "k3_straight_through",
        "low_var_kl+": "k3_straight_through",
    },
    ("advantage", "type"): {
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    },
}

NEARLY: Mapping[tuple[str, str], Mapping[str, tuple[str, str]]] = {
    ("aggregation", "type"): {
        "seq-mean-token-sum-norm": (
            "it needs a constant, verl's loss_scale_factor or, if that is null, the padded length; verl up to January 2026 divides by "
            "it alone, later verl and Tandem also by the number of sequences",
            "write `type: sequence_mean_token_sum_over_constant` with a `constant`, usually max_new_tokens",
        )
    },
    ("objective", "type"): {
        "geo_mean": (
            "verl's geo_mean is Tandem's gmpo with other bounds: its default is 0.2, that of the paper and Tandem is 0.4",
            "write `{type: gmpo, clip_low: 0.2, clip_high: 0.2}` for those, or `type: gmpo` for the paper's",
        )
    },
    ("kl", "estimator"): {
        "full": (
            "neither system computes a divergence over the whole vocabulary",
            "use k3, or another estimator: k1, k2, abs",
        )
    },
}

_DR_GRPO = (
    "Dr. GRPO is `advantage: {type: grpo, normalize_by_std: false}` with `objective: {type: clipped}` and "
    "`aggregation: {type: sequence_mean_token_sum_over_constant, constant: 1024}`, with the run's "
    "rollout.max_new_tokens as the constant"
)
ALGORITHMS: Mapping[str, str] = {
    "grpo": "GRPO is `advantage: {type: grpo}` with `objective: {type: clipped}`, both the defaults",
    "drgrpo": _DR_GRPO,
    "dapo": (
        "DAPO is `objective: {type: clipped, clip_high: 0.28}` with `advantage: {type: grpo}`, "
        "`aggregation: {type: token_mean}` and `rollout: {dynamic_sampling: {type: resample}}`; "
        "configs/recipes/dapo.yaml has the paper's other values"
    ),
    "ppo": "PPO is `advantage: {type: gae}`, which has a critic (`critic:`), with `objective: {type: clipped}`",
    "gae": "GAE is `advantage: {type: gae}`, which has a critic (`critic:`); PPO's objective is `objective: {type: clipped}`",
    "reinforce": (
        "REINFORCE is `objective: {type: policy_gradient}`, with a baseline such as that of `advantage: {type: rloo}`"
    ),
    "rloo": "RLOO is `advantage: {type: rloo}` with `objective: {type: policy_gradient}`, or with `type: clipped`",
    "reinforceplusplus": "REINFORCE++ is `advantage: {type: reinforce_pp}` with `objective: {type: clipped}`",
    "reinforceplusplusbaseline": (
        "REINFORCE++ with a baseline is `advantage: {type: reinforce_pp_baseline}` with `objective: {type: clipped}`"
    ),
    "gdpo": (
        "GDPO is `advantage: {type: gdpo}` with `objective: {type: clipped}` and the parts that it compares, such as "
        "`reward: {type: weighted, parts: {right: {type: countdown}, form: {type: function, function: my_reward:form}}}`"
    ),
    "opo": "OPO is `advantage: {type: opo}`, with `objective: {type: clipped}` or `type: policy_gradient`",
    **{
        name: f"{name.upper()} is `objective: {{type: {name}}}`, with `advantage: {{type: grpo}}`"
        for name in ("gspo", "gmpo", "cispo", "sapo", "dppo")
    },
}
"""Algorithms that are an objective and an advantage here, by their names as ``algorithm`` reduces them."""
_OTHER_WORDS = {"reinforcepp": "reinforceplusplus", "reinforceppbaseline": "reinforceplusplusbaseline"}


def algorithm(block: Sequence[Hashable], name: str) -> str | None:
    """What to write for a block ``objective`` or ``advantage`` whose type is an algorithm's name, however that is
    spelt (``dr_grpo``, ``Dr. GRPO``, ``reinforce++``); None for any other block or name."""
    if tuple(block) not in {("objective",), ("advantage",)}:
        return None
    plain = re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "plus"))
    return ALGORITHMS.get(_OTHER_WORDS.get(plain, plain))


_TARGETS = {
    "qkv": ("q_proj", "k_proj", "v_proj", "linear_qkv"),
    "proj": ("o_proj", "linear_proj"),
    "fc1": ("gate_proj", "up_proj", "linear_fc1"),
    "fc2": ("down_proj", "linear_fc2"),
}


def adapter_target(path: Sequence[Hashable], name: str) -> str | None:
    """What to write in ``learner.lora.targets`` for a matrix by its name in transformers or Megatron-Core; None for any
    other field or name."""
    if tuple(path[:-1]) != ("learner", "lora", "targets"):
        return None
    homes = (ours for ours, theirs in _TARGETS.items() if name in theirs)
    return next((f"here it is `{ours}`, which is {', '.join(_TARGETS[ours][:-1])}" for ours in homes), None)


def in_our_names(layer: Value, problems: list[Problem], notes: list[str]) -> Value:
    """The layer with the schema's names for these values.

    notes: gets a line for each translated value. problems: gets each refused value, whose block is left out.
    """
    for (block, key), names in OUR_NAMES.items():
        value, field = layer.at([block, key]), f"{block}.{key}"
        if value is None or not isinstance(value.data, str):
            continue
        theirs, where = value.data, value.where
        if theirs in NEARLY.get((block, key), {}):
            error, fix = NEARLY[block, key][theirs]
            problems.append(Problem(where=where, field=field, value=show(theirs), error=error, fix=fix))
            layer = Value({name: other for name, other in layer.data.items() if name != block}, layer.where)
        elif theirs in names:
            notes.append(f"{field} ({where}): {theirs} is verl's name -> {names[theirs]}")
            body = {**layer.data[block].data, key: Value(names[theirs], where)}
            layer = Value({**layer.data, block: replace(layer.data[block], data=body)}, layer.where)
    return layer
