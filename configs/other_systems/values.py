"""Values that verl names otherwise, as the names that the schema knows: ``kl: {estimator: low_var_kl}``,
``objective: {type: vanilla}``.

Only names that stand for the same formula with the same defaults are taken. A name that stands for nearly the
same is refused, with what differs and what to write.
"""

from collections.abc import Mapping

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
    """The layer with these values in our names, and a note on each. A block with a refused one is left out,
    and its problem noted."""
    for (block, key), names in OUR_NAMES.items():
        found = layer.at([block, key])
        if found is None or not isinstance(found.data, str):
            continue
        if found.data in NEARLY.get((block, key), {}):
            error, fix = NEARLY[block, key][found.data]
            problems.append(
                Problem(
                    where=found.where, field=f"{block}.{key}", value=show(found.data), error=error, fix=fix
                )
            )
            layer = Value({name: value for name, value in layer.data.items() if name != block}, layer.where)
        elif found.data in names:
            notes.append(f"{block}.{key} ({found.where}): {found.data} is verl's name -> {names[found.data]}")
            inside = layer.data[block]
            renamed = Value(
                {**inside.data, key: Value(names[found.data], found.where)},
                inside.where,
                afresh=inside.afresh,
            )
            layer = Value({**layer.data, block: renamed}, layer.where)
    return layer
