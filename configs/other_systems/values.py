"""Translates verl's names of values into the schema's: ``kl: {estimator: low_var_kl}``, ``objective: {type:
vanilla}``.

A name is translated only where formula and defaults are the same. A name for nearly the same formula is
refused; the error says what differs and what to write.
"""

from collections.abc import Mapping
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
            "verl divides the sum by a constant alone, Tandem by a constant and the number of sequences",
            "write `type: sequence_mean_token_sum_over_constant` with a `constant`, usually max_new_tokens",
        )
    },
    ("objective", "type"): {
        "geo_mean": (
            "verl's geo_mean is Tandem's gmpo with other bounds: 0.2 by default, where the paper and Tandem have 0.4",
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
