"""Samples from rank 0 to the ranks that train on them.

A share travels as two messages: two numbers, then one tensor of bytes with a header and the content of the trajectories'
arrays (``rollout/columns.py``). The receiver does not copy it: its arrays are views of the received tensor.
For each sample only numbers in lists are pickled. Ranks with the same share (tensor-, context- and
pipeline-parallel siblings) get the same bytes.

``torch.distributed.scatter_object_list`` would copy every byte four times at rank 0 (pickle, tensor, padding to the longest
rank's, list), once more for each sibling.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollout.columns import ALIGNMENT, Columns, Taken, joined
from trainer.batch.sharing_out import Share


def scatter(shares: Sequence[Share] | None, share_of: Callable[[int], int]) -> Share:
    """This rank's share. A collective of all ranks.

    Args:
        shares: on rank 0, one for each data-parallel rank; None elsewhere.
        share_of: the place in ``shares`` for a rank.
    """
    if dist.get_rank():
        sizes = torch.empty(2, dtype=torch.int64)
        dist.recv(sizes, src=0)
        header, whole = sizes.tolist()
        message = torch.empty(whole, dtype=torch.uint8)
        dist.recv(message, src=0)
        return unpacked(message, header)
    assert shares is not None
    receivers: dict[int, list[int]] = {}
    for other in range(1, dist.get_world_size()):
        receivers.setdefault(share_of(other), []).append(other)
    for number, ranks in receivers.items():
        message, header = packed(shares[number])
        sizes = torch.tensor([header, len(message)])
        for sending in [dist.isend(part, dst=rank) for rank in ranks for part in (sizes, message)]:
            assert sending is not None
            sending.wait()
    return shares[share_of(0)]


def packed(share: Share) -> tuple[Tensor, int]:
    """(the bytes of a share, how many of them are the header's)."""
    taken = Taken.apart(share.trajectories)
    columns = msgspec.msgpack.encode(taken.columns)
    header = pickle.dumps((replace(share, trajectories=[]), columns), protocol=5)
    start = _content_after(len(header))
    message = np.empty(start + taken.size, dtype=np.uint8)
    message[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    taken.write(message[start:])
    return torch.from_numpy(message), len(header)


def unpacked(message: Tensor, header: int) -> Share:
    content = message.numpy()
    share, columns = pickle.loads(content[:header].data)
    columns = msgspec.msgpack.decode(columns, type=Columns)
    return replace(share, trajectories=joined(columns, content[_content_after(header) :]))


def _content_after(header: int) -> int:
    return -(-header // ALIGNMENT) * ALIGNMENT
