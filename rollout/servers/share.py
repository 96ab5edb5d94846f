"""What of one SGLang replica runs on one node."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerShare:
    """The part of one replica that one node runs."""

    replica: int
    """Among all of the run."""
    node: int
    """Of the servers' nodes."""
    node_rank: int
    """Among the nodes of this replica; 0 answers HTTP."""
    num_nodes: int
    """Of this replica."""
    first_gpu: int
    """Of ``num_ranks`` consecutive ones on this node."""
    num_ranks: int
    """Tensor-parallel ranks here."""


def on_one_machine(replicas: int, tp: int, *, first_gpu: int = 0) -> list[ServerShare]:
    """Every replica whole, one after another on the GPUs of this machine."""
    return [
        ServerShare(replica=r, node=0, node_rank=0, num_nodes=1, first_gpu=first_gpu + r * tp, num_ranks=tp)
        for r in range(replicas)
    ]
