"""``tandem plan``: pairs of layouts as a table, and the best as YAML."""

from pathlib import Path

import yaml

from configs.loader import load_config
from configs.schema import RunConfig
from configs.schema.layout import ONE_PROCESS, LayoutConfig, as_overrides, layout_text
from launch.checks.config import BadInput
from parallel.planning import memory
from parallel.planning.layout import read_hf_config
from parallel.planning.planner import NO_TABLE, Cluster, Plan, plan, read_measured, reasons

WIDTH = 170
"""Of the table where the output is no terminal."""


def print_plans(
    config_path: Path, overrides: list[str], cluster: Cluster, *, measured: Path | None, count: int
) -> None:
    """The ``count`` best pairs with their reasons, then the best as YAML. Raises BadInput where nothing fits."""
    # The config's own layout is not what is planned: it may not even fit, such as a dp that does not divide
    # the minibatches.
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
        plans = plan(
            read_hf_config(config.model.path),
            config,
            cluster,
            critic=read_hf_config(critic.path) if critic is not None else None,
            measured=table,
        )
    except ValueError as error:
        raise BadInput(f"{config_path}: {error}") from error
    _print_table(plans, count)
    if table.values:
        print(
            "\n# a pair that was not measured is expected to have the least that was measured of any pair that the rule puts no better"
        )
        if table.step:
            print(
                f"# measured values that round to the same multiple of {table.step:.2g}, two standard errors, count as equal"
            )
    print(
        f"\n# the first of {len(plans)}; its fullest learner rank holds {memory.describe(plans[0].learner_memory)}"
    )
    print(f"# each server rank: {server_text(plans[0].rollout_memory)}")
    print(to_yaml(plans[0], config), end="")


def _print_table(plans: list[Plan], count: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        *(
            "",
            "learner",
            "rollout",
            "learner rank",
            "cache of a server",
            "sent per rank and step",
            "why it stands here",
        )
    )
    for i, (each, reason) in enumerate(zip(plans[:count], reasons(plans[:count]), strict=True), 1):
        cells = (
            layout_text(each.learner),
            f"tp={each.rollout_tp} x {each.replicas}",
            f"{memory.size_text(each.learner_memory.total)}, {each.learner_free:.0%} free",
            f"{each.rollout_memory.tokens:,} tokens",
            memory.size_text(each.traffic.total),
            reason,
        )
        table.add_row(str(i), *cells)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)


def to_yaml(best: Plan, config: RunConfig) -> str:
    """Blocks to paste into a config, or to put into a file that ``extends`` it."""
    sizes = {name: getattr(best.learner, name) for name in LayoutConfig.model_fields}
    learner = {
        name: getattr(config.learner, name) for name in ("token_budget", "logprob_chunk_tokens", "recompute")
    }
    blocks = {
        "layout": sizes,
        "rollout": {"tp": best.rollout_tp, "replicas": best.replicas},
        "learner": learner,
    }
    return yaml.safe_dump(blocks, sort_keys=False, default_flow_style=None)


def server_text(found: memory.RolloutMemory) -> str:
    """A server rank's memory in words."""
    cache = f"{memory.size_text(found.kv_cache)} of cache for {found.tokens:,} tokens"
    return f"{memory.size_text(found.weights)} of weights, {cache}, {memory.size_text(found.reserved)} left to SGLang's activations"
