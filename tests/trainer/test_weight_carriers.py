"""A bucket of a GPU on its way through host memory; the host's memory stands for the GPU's."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from parallel.planning.memory import NUM_BUFFERS
from parallel.weights.transfer import Buffers
from rollout.servers.command import PLUGIN
from rollout.sglang_plugin.tandem_process_memory import Receiving, Sending
from trainer import weight_carriers

sys.path.insert(0, str(PLUGIN))
import tandem_weight_receiver as receiver

sys.path.remove(str(PLUGIN))

STAGED, TIMEOUT_S = 1000, 60.0
SIZES = [1, STAGED, 10 * STAGED + 3, STAGED - 1, 5 * STAGED]


def receive_all(meeting) -> list[torch.Tensor]:
    """The buckets, and the hashes that come behind them."""
    flats = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    with closing(Receiving(meeting)) as receiving:
        way, sent = receiver.FromMemory(receiving), torch.zeros(len(SIZES), dtype=torch.int64)
        hashes = torch.stack([way.begin(flat, "multiply-sum")() for flat in flats])
        way.receive(sent)
    assert torch.equal(hashes, sent)
    return flats


@pytest.mark.parametrize("count", [1, 3])
def test_every_byte_comes_through_pieces_whose_memory_is_used_again(monkeypatch, count):
    for module in (weight_carriers, receiver):
        monkeypatch.setattr(module, "is_of_host", lambda flat: False)
        monkeypatch.setattr(module, "STAGED_BYTES", STAGED)
    flats = [torch.randint(256, (size,), dtype=torch.uint8) for size in SIZES]
    staging = Buffers("cpu")
    taken = []
    monkeypatch.setattr(
        staging, "take", lambda *given, take=staging.take: taken.append(take(*given)) or taken[-1]
    )
    with ThreadPoolExecutor(count) as threads:
        for _ in range(2):  # the second transfer finds the memory of the first
            with closing(Sending(count, TIMEOUT_S)) as sending:
                there = [threads.submit(receive_all, sending.meeting) for _ in range(count)]
                way = weight_carriers.FromMemory(sending, "multiply-sum", staging)
                for flat in flats:
                    way.send(flat, lambda: None)
                way.finish(lambda: None)
                for received in there:
                    for flat, came in zip(flats, received.result(TIMEOUT_S), strict=True):
                        assert torch.equal(flat, came)
    assert len({memory.data_ptr() for memory in taken}) == NUM_BUFFERS["cpu"] < len(taken)
