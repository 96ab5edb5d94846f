"""Buckets on their way to the servers, whose memory is used again. Host memory stands for a GPU's."""

import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from parallel.planning.memory import NUM_BUFFERS
from parallel.weights.transfer import Buffers
from rollout.servers.command import PLUGIN
from rollout.sglang_plugin.tandem_process_memory import Meeting, Receiving, Sending
from rollout.sglang_plugin.tandem_weight_transfer import weight_hash
from trainer import weight_carriers

sys.path.insert(0, str(PLUGIN))
import tandem_weight_receiver as receiver

sys.path.remove(str(PLUGIN))

STAGED, TIMEOUT_S = 1000, 60.0
SIZES = [1, STAGED, 10 * STAGED + 3, STAGED - 1, 5 * STAGED]


def nothing() -> None: ...


class LateReceivers:
    """In the place of ``Sending`` and of ``WeightBroadcaster``: they copy what they are sent only when it is waited for."""

    meeting = Meeting("nowhere", 1)

    def __init__(self) -> None:
        self._due: deque[Tensor] = deque()
        self.came: list[Tensor] = []
        self.under_way: list[int] = []
        """Beside each that was sent."""

    def offer(self, flat: Tensor, check) -> None:
        assert check is nothing
        self.under_way.append(len(self._due))
        self._due.append(flat)

    def wait_for_all_but(self, newest: int, check) -> None:
        assert check is nothing
        while len(self._due) > newest:
            self.came.append(self._due.popleft().view(torch.uint8).clone())

    def start(self, flat: Tensor) -> SimpleNamespace:
        self.offer(flat, nothing)
        place = len(self.came) + len(self._due)
        return SimpleNamespace(
            wait=lambda check: self.wait_for_all_but(len(self.came) + len(self._due) - place, check)
        )


@pytest.mark.parametrize("way", ["broadcasts", "memory", "a GPU's memory"])
def test_memory_is_filled_again_only_when_the_latest_receiver_has_its_content(monkeypatch, way):
    """A bucket's memory by the sender's caller, a piece's by the sender. Meanwhile the others are under way."""
    device = "cuda" if way == "a GPU's memory" else "cpu"
    monkeypatch.setattr(weight_carriers, "is_of_host", lambda flat: device == "cpu")
    monkeypatch.setattr(weight_carriers, "STAGED_BYTES", STAGED)
    late, buffers, sent = LateReceivers(), Buffers(device), []
    from_memory = weight_carriers.FromMemory(late, "xxh3", Buffers("cpu"))
    carrier = weight_carriers.Broadcasts(late, "xxh3") if way == "broadcasts" else from_memory
    for size in SIZES:
        flat = buffers.take(size, torch.device("cpu"))[:size]
        sent.append(flat.copy_(torch.randint(256, (size,))).clone())
        carrier.send(flat, nothing)
    carrier.finish(nothing)
    hashes = torch.stack([weight_hash(flat, "xxh3") for flat in sent])
    assert torch.equal(torch.cat(late.came), torch.cat([*sent, hashes.view(torch.uint8)]))
    num_pieces = sum(-(-size // STAGED) for size in SIZES) if device == "cuda" else len(SIZES)
    assert late.under_way == [min(place, NUM_BUFFERS["cpu"] - 1) for place in range(num_pieces + 1)]


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
                way = weight_carriers.FromMemory(sending, "multiply-sum", staging)
                there = [threads.submit(receive_all, Meeting(*way.meeting)) for _ in range(count)]
                for flat in flats:
                    way.send(flat, nothing)
                way.finish(nothing)
                for received in there:
                    for flat, came in zip(flats, received.result(TIMEOUT_S), strict=True):
                        assert torch.equal(flat, came)
    assert len({memory.data_ptr() for memory in taken}) == NUM_BUFFERS["cpu"] < len(taken)
