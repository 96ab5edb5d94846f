"""A node's share of an SGLang replica."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShare:
    """The part of one replica that one node runs."""

    replica: int
    """Number of the replica in the run."""
    node: int
    """Number of the node among the servers' nodes."""
    node_rank: int
    """Rank of the node among the nodes of this replica; 0 answers HTTP."""
    num_nodes: int
    """Nodes of this replica."""
    first_gpu: int
    """The first of ``num_ranks`` consecutive GPUs of this node."""
    num_ranks: int
    """Tensor-parallel ranks on this node."""


def on_one_machine(replicas: int, tp: int, *, first_gpu: int = 0) -> list[ServerShare]:
    """Whole replicas, one after another on the GPUs of this machine."""
    return [
        ServerShare(replica=r, node=0, node_rank=0, num_nodes=1, first_gpu=first_gpu + r * tp, num_ranks=tp)
        for r in range(replicas)
    ]
