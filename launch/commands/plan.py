"""``tandem plan``: pairs of layouts as a table, and the best as YAML."""

from pathlib import Path

import yaml

from configs.loader import load_config
from configs.schema import RunConfig
from configs.schema.layout import ONE_PROCESS, as_overrides, layout_text
from launch.checks.config import BadInput
from launch.tables import print_table
from parallel.planning import memory
from parallel.planning.layout import read_hf_config
from parallel.planning.planner import NO_TABLE, Cluster, Plan, plan, read_measured, reasons

WIDTH = 170
"""Width of the table where the output is no terminal."""


def print_plans(
    config_path: Path, overrides: list[str], cluster: Cluster, *, measured: Path | None, count: int
) -> None:
    """The ``count`` best pairs with their reasons, then the best as YAML. Raises BadInput where nothing fits."""
    # The config's own layout is replaced: it may not even fit, such as a dp that does not divide the minibatches.
    config = load_config(config_path, [*overrides, *as_overrides(ONE_PROCESS)])
    if not isinstance(config, RunConfig):
        raise BadInput(
            f"{config_path}: kind: {config.kind} has no rollout to plan for; this command takes kind: train"
        )
    if cluster.num_gpus > cluster.gpus_per_node and cluster.num_gpus % cluster.gpus_per_node:
        raise BadInput(
            f"--gpus {cluster.num_gpus} fills no whole nodes of --gpus-per-node {cluster.gpus_per_node}; use a multiple of it"
        )
    critic = config.critic.model if config.critic is not None else None
    try:
        table = read_measured(measured) if measured is not None else NO_TABLE
    except ValueError as error:
        raise BadInput(str(error)) from error
    try:
        critic_hf_config = read_hf_config(critic.path) if critic is not None else None
        hf_config = read_hf_config(config.model.path)
        plans = plan(hf_config, config, cluster, critic=critic_hf_config, measured=table)
    except ValueError as error:
        raise BadInput(f"{config_path}: {error}") from error
    _print_table(plans, count)
    if table.values:
        least = "the least measured value of all pairs that the rule ranks equal or worse"
        print(f"\n# a pair that was not measured is expected to have {least}")
        if table.step:
            rounding = f"the same multiple of {table.step:.2g}, two standard errors"
            print(f"# measured values that round to {rounding}, count as equal")
    held = memory.describe(plans[0].learner_memory)
    print(f"\n# the first of {len(plans)}; its fullest learner rank holds {held}")
    print(f"# each server rank: {server_text(plans[0].rollout_memory)}")
    print(to_yaml(plans[0], config), end="")


def _print_table(plans: list[Plan], count: int) -> None:
    titles = ["", "learner", "rollout", "learner rank", "cache of a server", "sent per rank and step"]
    rows = []
    for i, (pair, reason) in enumerate(zip(plans[:count], reasons(plans[:count]), strict=True), 1):
        rows.append([
            str(i),
            layout_text(pair.learner),
            f"tp={pair.rollout_tp} x {pair.replicas}",
            f"{memory.size_text(pair.learner_memory.total)}, {pair.learner_free:.0%} free",
            f"{pair.rollout_memory.tokens:,} tokens",
            memory.size_text(pair.traffic.total),
            reason,
        ])  # fmt: skip
    print_table([*titles, "why it stands here"], rows, width=WIDTH)


def to_yaml(best: Plan, config: RunConfig) -> str:
    """Blocks to paste into a config, or to put into a file that ``extends`` it."""
    kept = ("token_budget", "logprob_chunk_tokens", "recompute")
    blocks = {
        "layout": best.learner.model_dump(),
        "rollout": {"tp": best.rollout_tp, "replicas": best.replicas},
        "learner": {name: getattr(config.learner, name) for name in kept},
    }
    return yaml.safe_dump(blocks, sort_keys=False, default_flow_style=None)


def server_text(server: memory.RolloutMemory) -> str:
    """The memory of a server rank as text."""
    size = memory.size_text
    cache = f"{size(server.kv_cache)} of cache for {server.tokens:,} tokens"
    return f"{size(server.weights)} of weights, {cache}, {size(server.reserved)} left to SGLang's activations"
