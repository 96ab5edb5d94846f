"""Places the processes of a run on nodes and devices, by arithmetic on only the config, which gives the same
result on every node.

Nodes are counted within a side: the learner's from 0, and the servers' from 0. Colocated, both sides have the
same nodes and GPUs. Learner ranks fill their nodes evenly, in order. Replicas fill the servers' nodes in order. A
replica that is larger than a node takes several, each with an equal share of its tensor-parallel ranks.
"""

from collections import Counter

from configs.schema import AnyConfig, RunConfig
from configs.schema.launch import NodesConfig
from rollout.servers.share import ServerShare

ONE_MACHINE = "serve"


def serve_roles(config: RunConfig) -> list[str]:
    """The names of the serve roles, one per node, which are also those of their address files and logs."""
    nodes = config.launch.nodes
    return [ONE_MACHINE] if nodes is None else [f"serve-{node}" for node in range(nodes.rollout)]


def servers(config: RunConfig) -> list[ServerShare]:
    """Every replica's share on every node it takes, by replica. Raises ValueError if they do not fit; see
    ``check_placement``."""
    rollout, nodes = config.rollout, config.launch.nodes or NodesConfig()
    beside_learner = config.launch.nodes is None and not config.launch.takes_turns
    gpu = config.layout.world_size if beside_learner else 0
    each = n = 1  # replicas of a node, and nodes of a replica: one of them is 1
    if nodes.rollout > rollout.replicas:
        n = _split_evenly(nodes.rollout, rollout.replicas, "launch.nodes.rollout", "rollout.replicas")
    else:
        each = _split_evenly(rollout.replicas, nodes.rollout, "rollout.replicas", "launch.nodes.rollout")
    ranks = _split_evenly(rollout.tp, n, "rollout.tp", "the nodes of a replica")
    return [
        ServerShare(
            replica=r, node=r // each * n + k, node_rank=k, num_nodes=n, first_gpu=gpu + r % each * ranks, num_ranks=ranks
        )
        for r in range(rollout.replicas)
        for k in range(n)
    ]  # fmt: skip


def servers_on(config: RunConfig, node: int) -> list[ServerShare]:
    return [share for share in servers(config) if share.node == node]


def learner_ranks_per_node(config: AnyConfig) -> int:
    """Raises ValueError if the ranks do not fill the nodes evenly."""
    ranks, nodes = config.layout.world_size, 1 if config.launch.nodes is None else config.launch.nodes.learner
    return _split_evenly(ranks, nodes, "the learner's processes (layout)", "launch.nodes.learner")


def first_server_node(config: AnyConfig) -> int:
    """The servers' first node among those of the job, which begin with the learner's."""
    nodes = config.launch.nodes
    return 0 if nodes is None or config.launch.takes_turns else nodes.learner


def num_nodes(config: RunConfig) -> int:
    """Nodes of a job that runs this config."""
    nodes = config.launch.nodes
    return 1 if nodes is None else first_server_node(config) + nodes.rollout


def gpus_of_node(config: AnyConfig) -> int:
    """GPUs of each node of a job that runs this config."""
    nodes, asked = config.launch.nodes, config.launch.slurm.gpus
    if nodes is not None:
        return nodes.gpus_per_node
    return asked if asked is not None else ranks_of_machine(config)


def ranks_of_machine(config: AnyConfig) -> int:
    """GPUs that a run on one machine takes."""
    shares = servers(config) if isinstance(config, RunConfig) else []
    return max([config.layout.world_size, *(share.first_gpu + share.num_ranks for share in shares)])


def check_gpus_of_job(config: RunConfig) -> list[str]:
    """Problems of ``launch.slurm.gpus``, each in a sentence with field, value and fix."""
    asked = config.launch.slurm.gpus
    if asked is None:
        return []
    if config.launch.nodes is not None:
        fix = "with launch.nodes set launch.nodes.gpus_per_node, and remove it"
        return [f"launch.slurm.gpus={asked} is for a run on one node; {fix}"]
    needed = ranks_of_machine(config)
    if 0 < asked < needed:
        error = f"launch.slurm.gpus={asked}, but learner (layout) and servers (rollout) take {needed}"
        return [f"{error}; ask for as many, or leave it out"]
    return []


def check_placement(config: RunConfig) -> list[str]:
    """Problems of the placement on several nodes, each in a sentence with field, value and fix. The GPUs of one
    machine are counted elsewhere (``launch/checks/``)."""
    nodes = config.launch.nodes
    if nodes is None:
        return []
    problems = []
    for check in (_check_servers, _check_learner):
        try:
            check(config, nodes)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _check_servers(config: RunConfig, nodes: NodesConfig) -> None:
    rollout, gpus = config.rollout, nodes.gpus_per_node
    if gpus and nodes.rollout > rollout.replicas and rollout.tp <= gpus:
        raise ValueError(
            f"rollout.tp={rollout.tp} fits on one node of launch.nodes.gpus_per_node={gpus}, but launch.nodes.rollout={nodes.rollout} "
            f"nodes have only rollout.replicas={rollout.replicas}; use "
            f"rollout.replicas={nodes.rollout * (gpus // rollout.tp)}, or fewer nodes"
        )
    ranks = Counter[int]()
    for share in servers(config):
        ranks[share.node] += share.num_ranks
    if gpus and (most := max(ranks.values())) > gpus:
        raise ValueError(
            f"rollout.replicas={rollout.replicas} of rollout.tp={rollout.tp} put {most} server ranks on a node of "
            f"launch.nodes.gpus_per_node={gpus}; use more launch.nodes.rollout, or fewer or smaller replicas"
        )


def _check_learner(config: RunConfig, nodes: NodesConfig) -> None:
    ranks, gpus, tp = learner_ranks_per_node(config), nodes.gpus_per_node, config.layout.tp
    if gpus and ranks > gpus:
        needed = -(-config.layout.world_size // gpus)
        more = f"launch.nodes.learner={needed}"
        more += f" and launch.nodes.rollout={needed}" if config.launch.takes_turns else ""
        raise ValueError(
            f"the learner's {config.layout.world_size} processes (layout) put {ranks} on a node of launch.nodes.gpus_per_node={gpus}; use "
            f"{more}, or a smaller layout"
        )
    if gpus and ranks % tp:
        raise ValueError(
            f"layout.tp={tp} does not divide the {ranks} learner processes of a node, so that a tensor-parallel group would lie on two "
            "nodes; use a tp that does, and cp, pp or dp between nodes"
        )


def _split_evenly(count: int, parts: int, counted: str, over: str) -> int:
    if count % parts:
        error = f"{counted}: {count} cannot be spread evenly over {over}: {parts}"
        raise ValueError(f"{error}; use a multiple of {parts}")
    return count // parts
