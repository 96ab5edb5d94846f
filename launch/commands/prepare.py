"""``tandem prepare``: a run on several nodes without Slurm. Makes the run folder and says what to start
where; starts nothing."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from configs.loader import parse_config
from configs.schema import RunConfig
from launch.checks import config as checks
from launch.checks.config import BadInput
from launch.processes.addresses import free_port, own_address
from launch.processes.placement import learner_ranks_per_node, serve_roles
from launch.processes.run_folder import RunFolder
from launch.roles import start
from launch.roles import table as roles
from launch.roles.table import Rendezvous


def prepare(config_path: Path, overrides: list[str], *, endpoint: str | None = None) -> RunFolder:
    """Prints one command per role and node.

    Args:
        endpoint: HOST:PORT at which the learner's first node can be reached by its others; None: this host,
        and a port that is free now.
    """
    parsed = parse_config(config_path, overrides)
    given = parsed.validated()
    # First: without nodes the devices that are checked would be those of this machine.
    if isinstance(given, RunConfig) and given.launch.nodes is None:
        raise BadInput(
            f"{config_path}: launch.nodes is not given, so this run is on one machine: start it with `tandem train`, or give "
            "launch.nodes.learner and launch.nodes.rollout"
        )
    config = checks.load(parsed, RunConfig, runs=checks.TRAINING)
    assert isinstance(config, RunConfig) and config.launch.nodes is not None  # seen above
    nodes = config.launch.nodes
    try:
        ranks = learner_ranks_per_node(config)
        endpoint = _endpoint(config, endpoint) if nodes.learner > 1 else None
    except ValueError as error:
        raise BadInput(f"{config_path}: {error}") from error
    folder = RunFolder(start.folder_of(config).path.resolve())
    folder.logs.mkdir(exist_ok=True)
    print("\n".join(instructions(config, folder, ranks=ranks, endpoint=endpoint)), flush=True)
    return folder


def _endpoint(config: RunConfig, given: str | None) -> str:
    if given is None:
        address = own_address(config.launch.nodes)
        return f"{address}:{free_port(address)}"
    host, _, port = given.rpartition(":")
    if not re.fullmatch(r"[\w.:-]+", host, re.ASCII) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"--endpoint {given}: write HOST:PORT, such as node1:29400, of the learner's first node"
        )
    return given


def instructions(config: RunConfig, folder: RunFolder, *, ranks: int, endpoint: str | None) -> list[str]:
    """Shell lines, and comments that say on which node each is for.

    Args:
        ranks: of the learner on each of its nodes. endpoint: where those meet; None: there is one such node.
    """
    nodes = config.launch.nodes
    assert nodes is not None
    meetings: dict[str, Rendezvous | None] = {f"# first node of the learner, {ranks} processes:": None}
    if endpoint is not None:
        others = f"# each other node of the learner ({nodes.learner - 1}), {ranks} processes on each:"
        timeout_s = config.launch.start_timeout_s
        meetings = {
            where: Rendezvous(
                nodes=nodes.learner,
                endpoint=endpoint,
                id=folder.path.name,
                timeout_s=timeout_s,
                is_host=where != others,
            )
            for where in (*meetings, others)
        }
    return [
        f"# run folder: {folder.path} (every node must see it, and the model, under this path)",
        "# on every node, first:",
        f"cd {shlex.quote(os.getcwd())}",
        *(f"export {name}={shlex.quote(value)}" for name, value in start.environment(config).items()),
        *(
            line
            for node, name in enumerate(serve_roles(config))
            for line in (
                f"# node {node} of the servers:",
                _logged(roles.command("serve", folder, node=node), folder, name),
            )
        ),
        "# first node of the learner:",
        _logged(roles.command("sample", folder), folder, "sample"),
        *(
            line
            for where, meeting in meetings.items()
            for line in (
                where,
                _logged(roles.command("learn", folder, ranks=ranks, rendezvous=meeting), folder, "learn"),
            )
        ),
        "# to stop: SIGTERM to the learner's processes; the servers end with Ctrl-C. The same lines again resume the run from its newest",
        "# checkpoint; where there is none, they begin it anew.",
    ]


def _logged(command: Sequence[str], folder: RunFolder, name: str) -> str:
    return f"{shlex.join(command)} 2>&1 | tee -a {shlex.quote(str(folder.logs / name))}.log"
