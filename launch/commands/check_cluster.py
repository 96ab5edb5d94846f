"""``tandem check-cluster``: the node that it runs on, and its output."""

import os
import socket
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NoReturn

from configs.loader import load_config
from configs.schema.launch import LaunchConfig, NodesConfig
from launch.checks.arguments import BadInput
from launch.checks.between_nodes import Meeting, checks_between, leave
from launch.checks.node import Level, NodeFinding, checks_of_node
from launch.checks.sockets import sockets_of
from launch.processes.run_folder import RunFolder


def check_cluster(
    config_path: Path | None,
    overrides: Sequence[str],
    *,
    folder: Path | None,
    num_nodes: int | None,
    node: int | None,
    timeout_s: float,
) -> NoReturn:
    """Print the findings of this node one by one, and end the process: with 1 where one is a FAIL, else 0."""
    config = None if config_path is None else load_config(config_path, overrides)
    launch = LaunchConfig() if config is None else config.launch
    meeting = _meeting(folder or launch.runs_dir, num_nodes, node, timeout_s)
    # A check of several nodes needs addresses that others can reach, also without a config.
    nodes = launch.nodes or (NodesConfig(gpus_per_node=0) if meeting.num_nodes > 1 else None)
    worst = 0
    name = f"{socket.gethostname()}: " if meeting.num_nodes > 1 else ""
    findings: Iterable[NodeFinding] = [*checks_of_node(nodes, config)]
    if not any(finding.level is Level.FAIL and finding.check == "address" for finding in findings):
        findings = chain(findings, checks_between(nodes, meeting))
    for finding in findings:
        print(f"{name}{finding}", flush=True)
        worst |= finding.level is Level.FAIL
    leave(meeting)
    sound, broken = "nothing found that would keep a run from working", "see FAIL above: a run would not work"
    print(f"{name}{broken if worst else sound}", flush=True)
    os._exit(worst)  # a collective that hangs may have left its thread behind


def check_sockets(folder: RunFolder) -> bool:
    """Print the ports that a run listens on here. Returns whether all are where they should be."""
    findings = list(sockets_of(folder))
    print(*findings, sep="\n", flush=True)
    return all(finding.level is not Level.FAIL for finding in findings)


def _meeting(folder: Path, num_nodes: int | None, node: int | None, timeout_s: float) -> Meeting:
    """The meeting of the options, or else of the Slurm step, or else of only this node."""
    if (num_nodes is None) != (node is None):
        raise BadInput(
            "--nodes and --node belong together: `tandem check-cluster --nodes 2 --node 0` on one node, `--node 1` on the other"
        )
    in_step = "SLURM_STEP_ID" in os.environ
    if num_nodes is None or node is None:
        num_nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) if in_step else 1
        node = int(os.environ.get("SLURM_NODEID", "0")) if in_step else 0
    if node >= num_nodes:
        raise BadInput(f"--node {node} is not one of --nodes {num_nodes}, which are counted from 0")
    # The name of the step keeps files of an earlier check apart.
    name = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}" if in_step else "by-hand"
    place = folder.resolve() / f".check-cluster-{name}"
    return Meeting(folder=place, node=node, num_nodes=num_nodes, timeout_s=timeout_s)
