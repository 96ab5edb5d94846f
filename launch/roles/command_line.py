"""The command lines of the roles, for the code that starts them."""

import math
import sys
from dataclasses import dataclass

from configs.schema.launch import LaunchConfig
from launch.processes.run_folder import RunFolder

MEGATRON_ROLES = (
    "learn", "sft-rank", "export-rank", "replay-rank", "verify-rank", "score-rank", "selftest-rank",
)  # fmt: skip
IN_JOB = "TANDEM_JOB"
"""An environment variable of every role of a Slurm job, set by ``launch/slurm/inside_job.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The meeting place of the torchrun agents, one on each of the learner's nodes."""

    launch: LaunchConfig
    """With the number of nodes, and the time for all agents to come."""
    endpoint: str
    """HOST:PORT of the learner's first node, whose agent listens there."""
    is_host: bool
    """Whether this agent is on the first node. It cannot find out by itself if the name of its host resolves to another
    address."""
    address: str | None = None
    """Address of this agent's node, at which its ranks are met if they are the first. None: the host's own name,
    which may be localhost."""
    id: str
    """The same for all agents of one start of one run."""


def role_command(
    role: str,
    folder: RunFolder,
    *,
    ranks: int = 1,
    node: int | None = None,
    rendezvous: Rendezvous | None = None,
) -> list[str]:
    """The command line that starts ``role``; Megatron roles run under torchrun.

    ranks: of a Megatron role, on each node. node: number of the servers' node, where there are several.
    rendezvous: of a Megatron role on several nodes; None: all ranks are on this node.
    """
    arguments = ["-m", "launch", role, str(folder.path), *([] if node is None else ["--node", str(node)])]
    if role not in MEGATRON_ROLES:
        return [sys.executable, *arguments]
    torchrun = [sys.executable, "-m", "launch.roles.rendezvous", *_rendezvous_options(rendezvous)]
    return [*torchrun, f"--nproc-per-node={ranks}", *arguments]


def _rendezvous_options(rendezvous: Rendezvous | None) -> list[str]:
    if rendezvous is None:
        return ["--rdzv-backend=tandem"]
    assert rendezvous.launch.nodes is not None
    join_timeout_s, is_host = math.ceil(rendezvous.launch.start_timeout_s), str(rendezvous.is_host).lower()
    # No --node-rank: the host is node 0, and the others are numbered in the order in which they come.
    return [
        f"--nnodes={rendezvous.launch.nodes.learner}",
        "--rdzv-backend=tandem",
        f"--rdzv-endpoint={rendezvous.endpoint}",
        f"--rdzv-id={rendezvous.id}",
        f"--rdzv-conf=join_timeout={join_timeout_s},is_host={is_host}",
        *([] if rendezvous.address is None else [f"--local-addr={rendezvous.address}"]),
    ]
