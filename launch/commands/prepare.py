"""``tandem prepare``: a run on several nodes without Slurm. It makes the run folder, prints a command per role
and node, and starts nothing."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from configs.loader import parse_config
from configs.schema import RunConfig
from launch.checks.arguments import BadInput, as_bad_input
from launch.checks.config import TRAINING, load_checked
from launch.processes.addresses import free_port, own_address
from launch.processes.placement import learner_ranks_per_node, serve_roles
from launch.processes.run_folder import RunFolder
from launch.roles.command_line import Rendezvous, role_command
from launch.roles.start import environment, folder_of


def prepare(config_path: Path, overrides: list[str], *, endpoint: str | None = None) -> RunFolder:
    """Print one command per role and node.

    endpoint: HOST:PORT at which the learner's other nodes reach its first one; None: this host, and a port that
    is free now.
    """
    parsed = parse_config(config_path, overrides)
    unchecked = parsed.validated()
    # This check comes first: without nodes, the next ones would check the devices of this machine.
    if isinstance(unchecked, RunConfig) and unchecked.launch.nodes is None:
        raise BadInput(
            f"{config_path}: launch.nodes is not set, so this run is on one machine: start it with `tandem train`, or set "
            "launch.nodes.learner and launch.nodes.rollout"
        )
    config = load_checked(parsed, RunConfig, runs=TRAINING)
    nodes = config.launch.nodes
    assert nodes is not None  # seen above
    with as_bad_input(f"{config_path}: "):
        ranks = learner_ranks_per_node(config)
        if endpoint is not None and nodes.learner == 1:
            error = "the learner has one node (launch.nodes.learner=1), and no other has to reach it"
            raise ValueError(f"--endpoint {endpoint}: {error}; leave it out")
        is_here = endpoint is None
        endpoint = _endpoint(config, endpoint) if nodes.learner > 1 else None
    folder = RunFolder(folder_of(config).path.resolve())
    folder.logs.mkdir(exist_ok=True)
    if endpoint is not None and is_here:
        print("# first node of the learner: this host; for another one give --endpoint HOST:PORT", flush=True)
    print("\n".join(instructions(config, folder, ranks=ranks, endpoint=endpoint)), flush=True)
    return folder


def _endpoint(config: RunConfig, given: str | None) -> str:
    if given is None:
        address = own_address(config.launch.nodes)
        return f"{address}:{free_port(address)}"
    host, _, port = given.rpartition(":")
    if not re.fullmatch(r"[\w.:-]+", host, re.ASCII) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--endpoint {given}: write HOST:PORT of the learner's first node, as node1:29400")
    return given


def instructions(config: RunConfig, folder: RunFolder, *, ranks: int, endpoint: str | None) -> list[str]:
    """Shell lines, each after a comment that names its nodes.

    ranks: processes of the learner on each of its nodes. endpoint: where these nodes meet; None: the learner
    has one node.
    """
    nodes = config.launch.nodes
    assert nodes is not None
    lines = [
        f"# run folder: {folder.path} (every node must see it, and the model, under this path)",
        "# on every node, first:",
        f"cd {shlex.quote(os.getcwd())}",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment(config).items()),
    ]
    shared = ", which is one of the learner's nodes too" if config.launch.takes_turns else ""
    for node, name in enumerate(serve_roles(config)):
        lines.append(f"# node {node} of the servers{shared}:")
        lines.append(_logged_command(role_command("serve", folder, node=node), folder, name))
    lines.append("# first node of the learner:")
    lines.append(_logged_command(role_command("sample", folder), folder, "sample"))

    def learner_lines(comment: str, *, is_host: bool) -> list[str]:
        meeting, launch = None, config.launch
        if endpoint is not None:
            meeting = Rendezvous(launch=launch, endpoint=endpoint, id=folder.path.name, is_host=is_host)
        command = role_command("learn", folder, ranks=ranks, rendezvous=meeting)
        logged = _logged_command(command, folder, "learn")
        # Two hosts that append to one file of a shared file system overwrite each other's lines.
        return [comment, logged if is_host else logged.removesuffix(".log") + '-"$(hostname)".log']

    lines += learner_lines(f"# first node of the learner, {ranks} processes:", is_host=True)
    if endpoint is not None:
        others = f"# each other node of the learner ({nodes.learner - 1}), {ranks} processes on each:"
        lines += learner_lines(others, is_host=False)
    return [
        *lines,
        "# to stop: SIGTERM to the learner's processes; the servers end with Ctrl-C. The same lines again resume the run from its newest",
        "# checkpoint; without a checkpoint they start it from the beginning.",
    ]


def _logged_command(command: Sequence[str], folder: RunFolder, name: str) -> str:
    return f"{shlex.join(command)} 2>&1 | tee -a {shlex.quote(str(folder.logs / name))}.log"
