"""Ranks that scatter what they are told to. Spawned ranks import this module, so it imports little."""

from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from trainer.batch.exact_turns import TurnsDiffer
from trainer.batch.step_batch import step_batch
from trainer.ranks.scattering import scatter
from trainer.ranks.totals import on_all_ranks


def serve_rank(rank: int, world_size: int, store: str, end: Connection) -> None:
    """Answers (shares, copies) with this rank's share, once all ranks have packed theirs; ``copies`` neighbours have the same
    one. If turns differ, it answers with the message of the error that ends the step on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    while True:
        shares, copies = end.recv()
        share = scatter(shares, lambda rank, copies=copies: rank // copies)
        try:
            if share.trajectories:
                on_all_ranks(partial(step_batch, share))
            end.send(share)
        except TurnsDiffer as difference:
            end.send(str(difference))
