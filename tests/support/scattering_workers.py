"""Ranks that scatter what they are told to. Imported by spawned ranks, so with little beside it."""

from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from trainer.ranks.scattering import scatter


def serve_rank(rank: int, world_size: int, store: str, end: Connection) -> None:
    """(shares, copies) -> this rank's share, where ``copies`` neighbours have the same."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    while True:
        shares, copies = end.recv()
        end.send(scatter(shares, lambda rank, copies=copies: rank // copies))
