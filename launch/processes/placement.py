"""Which process of a run is on which node and which devices: arithmetic on the config alone, the same on
every node.

Nodes are counted within a side: the learner's from 0, and the servers' from 0. Learner ranks fill their nodes
evenly, in order. Replicas fill the servers' nodes in order; one that is larger than a node takes several,
each with an equal share of its tensor-parallel ranks.
"""

from configs.schema import RunConfig, SftConfig
from configs.schema.launch import NodesConfig
from rollout.servers.share import ServerShare

ONE_MACHINE = "serve"


def serve_roles(config: RunConfig) -> list[str]:
    """The names of the serve roles, one per node: where each reports its address, and what its log is called."""
    nodes = config.launch.nodes
    return [ONE_MACHINE] if nodes is None else [f"serve-{node}" for node in range(nodes.rollout)]


def servers(config: RunConfig) -> list[ServerShare]:
    """Every replica's share on every node it takes, by replica. Raises ValueError where they do not fit; see
    ``check_placement``."""
    rollout, nodes = config.rollout, config.launch.nodes or NodesConfig()
    first_gpu = (
        config.layout.world_size
        if config.launch.nodes is None and config.launch.placement == "separate"
        else 0
    )
    if nodes.rollout > rollout.replicas:
        spread = _whole(nodes.rollout, rollout.replicas, "launch.nodes.rollout", "rollout.replicas")
        ranks = _whole(rollout.tp, spread, "rollout.tp", "the nodes of a replica")
        return [
            ServerShare(
                replica=r,
                node=r * spread + k,
                node_rank=k,
                num_nodes=spread,
                first_gpu=first_gpu,
                num_ranks=ranks,
            )
            for r in range(rollout.replicas)
            for k in range(spread)
        ]
    per_node = _whole(rollout.replicas, nodes.rollout, "rollout.replicas", "launch.nodes.rollout")
    return [
        ServerShare(
            replica=r,
            node=r // per_node,
            node_rank=0,
            num_nodes=1,
            first_gpu=first_gpu + r % per_node * rollout.tp,
            num_ranks=rollout.tp,
        )
        for r in range(rollout.replicas)
    ]


def servers_on(config: RunConfig, node: int) -> list[ServerShare]:
    return [share for share in servers(config) if share.node == node]


def learner_ranks_per_node(config: RunConfig | SftConfig) -> int:
    """Raises ValueError where the ranks do not fill the nodes evenly."""
    nodes = 1 if config.launch.nodes is None else config.launch.nodes.learner
    return _whole(config.layout.world_size, nodes, "the learner's processes (layout)", "launch.nodes.learner")


def num_nodes(config: RunConfig) -> int:
    """Of a job that runs this config."""
    return 1 if config.launch.nodes is None else config.launch.nodes.total


def gpus_of_node(config: RunConfig | SftConfig) -> int:
    """Of each node of a job that runs this config."""
    nodes, asked = config.launch.nodes, config.launch.slurm.gpus
    if nodes is not None:
        return nodes.gpus_per_node
    return asked if asked is not None else _ranks_of_machine(config)


def _ranks_of_machine(config: RunConfig | SftConfig) -> int:
    """GPUs that a run on one machine takes."""
    shares = servers(config) if isinstance(config, RunConfig) else []
    return max([config.layout.world_size, *(share.first_gpu + share.num_ranks for share in shares)])


def check_gpus_of_job(config: RunConfig) -> list[str]:
    """Problems with ``launch.slurm.gpus``, in the way of ``check_placement``."""
    asked = config.launch.slurm.gpus
    if asked is None:
        return []
    if config.launch.nodes is not None:
        return [
            f"launch.slurm.gpus={asked} is of a run on one node; with launch.nodes set launch.nodes.gpus_per_node, and remove it"
        ]
    needed = _ranks_of_machine(config)
    if 0 < asked < needed:
        return [
            f"launch.slurm.gpus={asked}, but learner (layout) and servers (rollout) take {needed}; ask for as many, or leave it out"
        ]
    return []


def check_placement(config: RunConfig) -> list[str]:
    """What does not fit, each in a sentence with field, value and fix; empty where all does. Of several nodes
    only: one machine's GPUs are counted when they are taken (``checks``)."""
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
    used: dict[int, int] = {}
    for share in servers(config):
        used[share.node] = used.get(share.node, 0) + share.num_ranks
    if not gpus:
        return
    if max(used.values()) > gpus:
        raise ValueError(
            f"rollout.replicas={rollout.replicas} of rollout.tp={rollout.tp} put {max(used.values())} server ranks on a node of "
            f"launch.nodes.gpus_per_node={gpus}; use more launch.nodes.rollout, or fewer or smaller replicas"
        )
    if nodes.rollout > rollout.replicas and rollout.tp <= gpus:
        raise ValueError(
            f"rollout.tp={rollout.tp} fits on one node of launch.nodes.gpus_per_node={gpus}, but launch.nodes.rollout={nodes.rollout} "
            f"nodes have only rollout.replicas={rollout.replicas}; use {nodes.rollout * (gpus // rollout.tp)} replicas, or fewer nodes"
        )


def _check_learner(config: RunConfig, nodes: NodesConfig) -> None:
    ranks, gpus, tp = learner_ranks_per_node(config), nodes.gpus_per_node, config.layout.tp
    if gpus and ranks > gpus:
        raise ValueError(
            f"the learner's {config.layout.world_size} processes (layout) put {ranks} on a node of launch.nodes.gpus_per_node={gpus}; use "
            f"launch.nodes.learner={-(-config.layout.world_size // gpus)}, or a smaller layout"
        )
    if gpus and ranks % tp:
        raise ValueError(
            f"layout.tp={tp} does not divide the {ranks} learner processes of a node, so that a tensor-parallel group would lie on two "
            "nodes; use a tp that does, and pp or dp between nodes"
        )


def _whole(count: int, parts: int, of: str, over: str) -> int:
    if count % parts:
        raise ValueError(
            f"{of}: {count} cannot be spread evenly over {over}: {parts}; use a multiple of {parts}"
        )
    return count // parts
