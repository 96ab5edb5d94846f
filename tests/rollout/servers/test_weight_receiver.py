"""Reception in the parameters against loaders of SGLang's kind, and the hashes against plain arithmetic."""

import itertools
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from numerics.grids import GRIDS, Packed
from parallel.megatron import platform
from parallel.weights.precision import rounded
from parallel.weights.transfer import WeightBroadcaster
from rollout.servers.command import PLUGIN
from rollout.sglang_plugin import tandem_weight_transfer as transfer

sys.path.insert(0, str(PLUGIN))
import tandem_weight_receiver as receiver

sys.path.remove(str(PLUGIN))

ROWS, COLUMNS, WORDS = 8, 6, 10


@pytest.fixture(params=[receiver.PART_BYTES, 50, 30, 10])
def part_bytes(request, monkeypatch):
    """All of a tensor at once, two rows, one, and less than a row."""
    monkeypatch.setattr(receiver, "PART_BYTES", request.param)


class Model(nn.Module):
    """One rank of a model whose loaders are like SGLang's: fused rows, split rows and columns, padded rows, a
    tensor that is converted, one of which only a value is read, and one that is computed with."""

    def __init__(self, rank: int, size: int, *, odd: bool = False):
        super().__init__()
        self.rank, self.size, self.odd = rank, size, odd
        shapes = {
            "words": (16 // size, COLUMNS),
            "fused": (2 * ROWS // size, COLUMNS),
            "out": (COLUMNS, ROWS // size),
            "norm": (COLUMNS,),
            "scale": (1,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, torch.nan), requires_grad=False))
        self.wide = nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "words":
                per_rank = 16 // self.size
                mine = tensor[self.rank * per_rank : (self.rank + 1) * per_rank]
                self.words.data[: len(mine)].copy_(mine)
                self.words.data[len(mine) :].fill_(0)
            elif name in ("gate", "up"):
                part = ROWS // self.size
                self.fused.data.narrow(0, part * (name == "up"), part).copy_(
                    tensor.chunk(self.size)[self.rank]
                )
            elif name == "out":
                self.out.data.copy_(tensor.chunk(self.size, 1)[self.rank])
            elif name == "scale" and self.odd:
                self.scale.data.fill_(tensor.item())  # fails without the content
            elif name in ("norm", "wide", "scale"):
                getattr(self, name).data.copy_(tensor * 2 if self.odd and name == "norm" else tensor)


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "words": (WORDS, COLUMNS), "gate": (ROWS, COLUMNS), "up": (ROWS, COLUMNS), "out": (COLUMNS, ROWS),
        "norm": (COLUMNS,), "wide": (COLUMNS,), "scale": (1,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Sender:
    """In the place of a process group: hands out what is broadcast, or lets it be read from memory."""

    def __init__(
        self, weights: dict[str, Tensor], counts, kind: str, flip: int | None = None, grid: str = ""
    ):
        tensors, self._flats = iter(weights.items()), []
        for count in counts:
            flats = [as_sent(name, tensor, grid) for name, tensor in itertools.islice(tensors, count)]
            self._flats.append(torch.cat(flats))
        self._flats.append(torch.stack([transfer.weight_hash(flat, kind) for flat in self._flats]))
        if flip is not None:
            self._flats[flip] = self._flats[flip].clone()
            self._flats[flip].view(torch.uint8)[0] ^= 1

    def read(self, parts, look_at) -> None:
        """The memory of a part may serve the next one."""
        flat = self._flats.pop(0).view(torch.uint8)
        for part, due in zip(flat.split([part.numel() for part in parts]), parts, strict=True):
            due.copy_(part)
            look_at(due)

    def broadcast(self, flat: Tensor, *, src: int, group: object, async_op: bool = False):
        flat.copy_(self._flats.pop(0))
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)


PACKED = ("words", "gate", "up", "out")


def as_sent(name: str, tensor: Tensor, grid: str) -> Tensor:
    if not grid or name not in PACKED:
        return tensor.flatten().view(torch.uint8)
    form = Packed(GRIDS[grid], *tensor.shape)
    packed = torch.empty(form.nbytes, dtype=torch.uint8)
    form.pack_into(packed, tensor)
    return packed


def sent_of(weights: dict[str, Tensor], grid: str = "") -> list[receiver.Sent]:
    return [
        receiver.Sent.parse(
            name, f"float32/{grid}" if grid and name in PACKED else "float32", list(tensor.shape)
        )
        for name, tensor in weights.items()
    ]


def receive(
    one: receiver.Receiver, weights, counts, monkeypatch, *, whole=True, flip=None, way="memory", grid=""
) -> str | None:
    kind = transfer.hash_kind(torch.device("cpu"))
    sender = Sender(weights, counts, kind, flip, grid)
    monkeypatch.setattr(receiver.dist, "broadcast", sender.broadcast)
    memory = receiver.FromMemory(SimpleNamespace(receive=sender.read))
    taken = memory if way == "memory" else receiver.Broadcasts(None)
    return one.receive(sent_of(weights, grid), transfer.Announcement(kind, tuple(counts), whole), taken)


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("way", ["memory", "broadcast"])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("counts", [[1] * 7, [7], [2, 1, 3, 1]])
def test_every_parameter_is_as_its_loader_would_have_it(monkeypatch, rank, size, counts, odd, way):
    mine, loaded = Model(rank, size, odd=odd), Model(rank, size, odd=odd)
    one = receiver.Receiver(mine, torch.device("cpu"), records=True)
    for seed in (0, 1):  # what was recorded serves the second time
        weights = weights_of(seed)
        loaded.load_weights(weights.items())
        assert receive(one, weights, counts, monkeypatch, way=way) is None
        for name, parameter in loaded.named_parameters():
            assert torch.equal(getattr(mine, name), parameter), name


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("way", ["memory", "broadcast"])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("counts", [[1] * 7, [7], [2, 1, 3, 1]])
@pytest.mark.parametrize("records", [True, False])
def test_packed_matrices_are_loaded_as_the_rounded_ones_would_be(
    monkeypatch, rank, size, counts, records, way
):
    """Whole, in parts and fused; with scales of rows and of groups; all by turns from one server's memory."""
    mine, loaded = Model(rank, size), Model(rank, size)
    one = receiver.Receiver(mine, torch.device("cpu"), records=records)
    for seed, grid in enumerate(["int8", "int4", "", "fp8_e4m3", "fp8_e4m3_block", "int8"]):
        weights = weights_of(seed)
        for name in PACKED if grid else ():
            weights[name] = rounded(weights[name], grid)
        loaded.load_weights(weights.items())
        sent = weights_of(seed)
        assert receive(one, sent, counts, monkeypatch, way=way, grid=grid) is None
        for name, parameter in loaded.named_parameters():
            assert torch.equal(getattr(mine, name), parameter), (name, grid)


@pytest.mark.parametrize("way", ["memory", "broadcast"])
@pytest.mark.parametrize("flip", range(3))
def test_a_changed_bit_of_packed_matrices_is_named(monkeypatch, flip, way):
    """Of a scale here: the first byte of each bucket."""
    one = receiver.Receiver(Model(0, 1), torch.device("cpu"), records=True)
    failure = receive(one, weights_of(0), [2, 1, 4], monkeypatch, flip=flip, way=way, grid="int8")
    assert f"in bucket {flip} of 3: " in failure


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("float31", [2, 2]), ("Tensor", [2]), ("float32/int9", [2, 2]), ("float32/int8", [4]), ("/int8", [2, 2]),
        ("", [2]), ("float32/fp8_e4m3", [0, 2]),
    ],
)  # fmt: skip
def test_a_form_that_nothing_has_is_refused(form, shape):
    with pytest.raises(ValueError, match="a form that it cannot have"):
        receiver.Sent.parse("up", form, shape)


def test_what_moves_is_asked_for_again_and_what_is_not_recorded_is_loaded(monkeypatch):
    for records in (True, False):
        mine = Model(0, 1)
        one = receiver.Receiver(mine, torch.device("cpu"), records=records)
        assert receive(one, weights_of(0), [1] * 7, monkeypatch) is None
        mine.out.data = torch.full_like(mine.out, torch.nan)
        assert receive(one, weights_of(1), [1] * 7, monkeypatch) is None
        assert torch.equal(mine.out, weights_of(1)["out"])


def test_tensors_of_one_broadcast_that_fill_a_part_are_received_there():
    mine = Model(0, 1)
    one = receiver.Receiver(mine, torch.device("cpu"), records=True)
    sent = sent_of(weights_of(0))
    one._look_up(sent)
    there = {tensor.name: one._place_of([tensor]) for tensor in sent}
    assert (
        there["up"].data_ptr() == mine.fused[ROWS:].data_ptr()
        and there["gate"].data_ptr() == mine.fused.data_ptr()
    )
    assert there["out"].data_ptr() == mine.out.data_ptr()
    assert there["wide"] is None, "another dtype"
    both = one._place_of(sent[1:3])
    assert both.data_ptr() == mine.fused.data_ptr() and both.numel() == mine.fused.nbytes
    assert one._place_of(sent[:2]) is None and one._place_of(sent[2:0:-1]) is None, (
        "apart, or in another order"
    )
    split = receiver.Receiver(Model(0, 2), torch.device("cpu"), records=True)
    split._look_up(sent)
    assert [tensor.name for tensor in sent if split._place_of([tensor]) is not None] == ["norm", "scale"]


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("way", ["memory", "broadcast"])
@pytest.mark.parametrize("flip", range(5))
def test_a_changed_bit_is_named(monkeypatch, flip, way):
    """In each broadcast, and in the hashes themselves."""
    one = receiver.Receiver(Model(0, 1), torch.device("cpu"), records=True)
    names = ["words to gate", "up", "out to wide", "scale", "words to gate"]
    failure = receive(one, weights_of(0), [2, 1, 3, 1], monkeypatch, flip=flip, way=way)
    assert failure.endswith(f"in bucket {flip % 4} of 4: {names[flip]}")


@pytest.mark.parametrize(("missing", "parameter"), [("gate", "fused"), ("norm", "norm"), ("words", "words")])
def test_a_parameter_that_is_left_out_is_named_by_the_last_transfer(monkeypatch, missing, parameter):
    one = receiver.Receiver(Model(0, 1), torch.device("cpu"), records=True)
    weights = weights_of(0)
    half = {name: weights.pop(name) for name in ("out", "up")}
    del weights[missing]
    assert receive(one, half, [2], monkeypatch, whole=False) is None
    failure = receive(one, weights, [4], monkeypatch)
    assert failure == f"the update did not fill 1 parameters: {parameter}"
    assert receive(one, weights_of(0), [7], monkeypatch) is None


def test_what_came_before_a_transfer_that_failed_does_not_count(monkeypatch):
    one = receiver.Receiver(Model(0, 1), torch.device("cpu"), records=True)
    weights = weights_of(0)
    half = {name: weights.pop(name) for name in ("out", "up")}
    assert receive(one, half, [2], monkeypatch, whole=False) is None
    assert "other bytes" in receive(one, weights, [5], monkeypatch, flip=0)
    assert receive(one, weights, [5], monkeypatch) == "the update did not fill 2 parameters: fused, out"


def test_a_loader_that_puts_tensors_in_the_place_of_parameters_is_left_to_itself(monkeypatch):
    class Replacing(Model):
        def load_weights(self, weights) -> None:
            for name, tensor in weights:
                if name == "norm":
                    self.norm.data = tensor.clone()
                else:
                    super().load_weights([(name, tensor)])

    mine = Replacing(0, 1)
    one = receiver.Receiver(mine, torch.device("cpu"), records=True)
    for seed in (0, 1):
        weights, loaded = weights_of(seed), Model(0, 1)
        loaded.load_weights(weights.items())
        assert receive(one, weights, [2, 1, 3, 1], monkeypatch) is None
        for name, parameter in loaded.named_parameters():
            assert torch.equal(getattr(mine, name), parameter), name


@pytest.mark.usefixtures("part_bytes")
@pytest.mark.parametrize("way", ["memory", "broadcast"])
@pytest.mark.parametrize("counts", [[1] * 7, [7], [2, 1, 3, 1]])
def test_joined_tensors_may_come_apart_and_what_follows_from_them_is_computed_at_the_end(
    monkeypatch, counts, way
):
    """As of SGLang's latent attention: two matrices are joined before they are loaded, if one call has both."""

    class Joining(Model):
        def load_weights(self, weights) -> None:
            kept = dict(weights)
            if {"gate", "up"} <= kept.keys():
                self.fused.data.copy_(torch.cat([kept["gate"], kept["up"]]))
            super().load_weights((name, kept[name]) for name in kept.keys() - {"gate", "up"})

        def post_load_weights(self) -> None:
            self.twice = 2 * self.fused

    mine = Joining(0, 1)
    one = receiver.Receiver(mine, torch.device("cpu"), records=True)
    for seed in (0, 1):
        weights, loaded = weights_of(seed), Model(0, 1)
        loaded.load_weights(weights.items())
        assert receive(one, weights, counts, monkeypatch, way=way) is None
        for name, parameter in loaded.named_parameters():
            assert torch.equal(getattr(mine, name), parameter), name
        assert torch.equal(mine.twice, 2 * loaded.fused)


def test_tensors_that_no_parameter_takes_are_refused(monkeypatch):
    one = receiver.Receiver(Model(0, 1), torch.device("cpu"), records=True)
    failure = receive(one, {"other": torch.zeros(3)}, [1], monkeypatch, whole=False)
    assert failure == "no parameter takes any of the sent tensors, such as other"


@given(content=st.binary(max_size=100), words=st.integers(1, 5), start=st.integers(0, 3))
def test_multiply_sum_by_plain_arithmetic(content, words, start):
    """W = 1 to 5 words; bytes that begin anywhere in memory."""
    flat = torch.frombuffer(bytearray(b"-" * start + content + b"-"), dtype=torch.uint8)[start:-1]
    numbers = [
        int.from_bytes(content[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(content), 8)
    ]
    keys = [splitmix(i) | 1 for i in range(words)]
    m = transfer.MULTIPLIER
    total = len(content) * m + sum(
        keys[i % words] * pow(m, i // words, 2**64) * number for i, number in enumerate(numbers)
    )
    before, transfer.WORDS = transfer.WORDS, words
    transfer._KEYS.clear()
    try:
        assert int(transfer.multiply_sum(flat)) % 2**64 == total % 2**64
    finally:
        transfer.WORDS = before
        transfer._KEYS.clear()


def splitmix(number: int) -> int:
    x = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@pytest.mark.parametrize("kind", transfer.HASHES)
@given(content=st.binary(min_size=1, max_size=64), data=st.data())
def test_a_hash_changes_with_every_bit_and_with_the_order_and_the_length(kind, content, data):
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    digest = int(transfer.weight_hash(flat, kind))
    assert digest == int(transfer.weight_hash(flat.clone(), kind))
    wrong = flat.clone()
    wrong[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest != int(transfer.weight_hash(wrong, kind))
    assert digest != int(transfer.weight_hash(torch.cat([flat, flat.new_zeros(1)]), kind))
    if len(content) >= 16 and content[:8] != content[8:16]:
        swapped = torch.cat([flat[8:16], flat[:8], flat[16:]])
        assert digest != int(transfer.weight_hash(swapped, kind))


@pytest.mark.parametrize("kind", transfer.HASHES)
def test_a_hashed_weight_can_give_its_memory_back(kind):
    """As an offloaded learner's do, of which large ones are sent as they are."""
    flat = torch.arange(100, dtype=torch.uint8)
    running = transfer.RunningHash(flat, kind)
    for part in flat.split(30):
        running.add(part)
    assert int(running.digest()) == int(transfer.weight_hash(flat, kind))
    flat.untyped_storage().resize_(0)


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple),
    is_whole=st.booleans(),
    kind=st.sampled_from(sorted(transfer.HASHES)),
    meeting=st.none()
    | st.tuples(st.from_regex("tandem-[0-9a-f]{32}", fullmatch=True), st.integers(1, 10**6)),
)
def test_announcements_are_read_as_they_were_written(counts, is_whole, kind, meeting):
    announced = transfer.Announcement(kind, counts, is_whole, meeting)
    assert transfer.Announcement.parse(announced.load_format()) == announced


@pytest.mark.parametrize(
    "text",
    ["tandem-transfer-4:xxh3:whole:1:", "tandem-transfer-5:xxh3:whole:1", "tandem-transfer-5:md5:part:1:"],
)
def test_other_versions_and_broken_announcements_are_refused(text):
    with pytest.raises(ValueError, match="this server takes tandem-transfer-5"):
        transfer.Announcement.parse(text)
    assert transfer.Announcement.parse(None) is None
    assert transfer.Announcement.parse("flattened_bucket") is None


FORK = multiprocessing.get_context("fork")
TENSORS = [receiver.Sent.parse(name, "float32", [25_000_000]) for name in "ab"]
TIMEOUT = timedelta(seconds=120)


class TwoTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(sent.shape), requires_grad=False) for sent in TENSORS)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def serve(rank: int, line) -> None:
    """A server's rank: says what became of each transfer of the groups of which it hears, and whether it holds ones."""
    torch.set_num_threads(1)  # a forked process has none of torch's others
    model = TwoTensors()
    one = receiver.Receiver(model, torch.device("cpu"), records=True)
    while True:
        port, size = line.recv()
        store = dist.PrefixStore("weights", dist.TCPStore("127.0.0.1", port, size, False, TIMEOUT))
        rest = {"group_name": "weights", "backend_options": None, "timeout": TIMEOUT}
        group, _ = _new_process_group_helper(size, rank, [], dist.Backend("gloo"), store, **rest)
        _world.pg_group_ranks[group] = {other: other for other in range(size)}
        groups = {"weights": group}
        announced = transfer.Announcement("xxh3", (1, 1), True)
        failure = receiver.receive_broadcasts(one, TENSORS, announced, groups, "weights")
        line.send((failure, bool((model.b == 1).all()), list(groups)))


def broadcaster(size: int) -> WeightBroadcaster:
    return WeightBroadcaster(world_size=size, backend="gloo", timeout_s=60, group_name="weights")


def die_in_a_broadcast(line) -> None:
    one = broadcaster(2)
    line.send(one.port)
    one.join(lambda: None)
    one.start(torch.zeros(TENSORS[0].nbytes, dtype=torch.uint8))
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_server_whose_learner_gives_a_broadcast_up_or_dies_in_it_answers_and_takes_the_next_transfer():
    """It waits for a broadcast that never comes: another server is gone; or its own connection was closed in the middle
    of one, which gloo keeps to itself."""
    platform.init_distributed(60.0)
    flat = torch.ones(TENSORS[0].shape).view(torch.uint8)
    works = [(serve, 1), (serve, 2), (die_in_a_broadcast,)]
    lines = [(server, _), (other, _), (dying, _)] = [FORK.Pipe() for _ in works]
    processes = [
        FORK.Process(target=work, args=(*rank, theirs), daemon=True)
        for (work, *rank), (_, theirs) in zip(works, lines, strict=True)
    ]

    def answer(line):
        assert line.poll(60), "it does not answer"
        return line.recv()

    def meet(*servers) -> WeightBroadcaster:
        made = broadcaster(1 + len(servers))
        for line in servers:
            line.send((made.port, made.world_size))
        made.join(lambda: None)
        return made

    try:
        for process in processes[:2]:
            process.start()
        one = meet(server, other)
        one.start(flat).wait(lambda: None)
        processes[1].kill()
        one.give_up(transfer.GIVEN_UP)
        failure, is_loaded, groups = answer(server)
        assert "has given the transfer up, or is gone" in failure and not is_loaded and not groups
        one.close()

        processes[2].start()
        server.send((answer(dying), 2))
        failure, is_loaded, groups = answer(server)
        assert "could not be received" in failure and not is_loaded and not groups

        last = meet(server)
        for sent in (flat, flat, torch.stack([transfer.weight_hash(flat, "xxh3")] * 2)):
            last.start(sent).wait(lambda: None)
        assert answer(server) == (None, True, ["weights"])
        last.close()
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def test_a_rank_that_fails_alone_lets_the_others_leave(monkeypatch):
    """As NCCL: a broadcast that one rank has left never ends, and shows the others nothing. They look into the store."""
    store, aborted, out_of_memory = HashStore(), [], torch.OutOfMemoryError("out of memory")
    monkeypatch.setattr(receiver, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(receiver, "_abort_process_group", aborted.append)
    monkeypatch.setattr(receiver, "_LEFT_BEHIND", [])
    monkeypatch.setattr(receiver, "LOOK_S", 0.0)
    monkeypatch.setattr(receiver.dist, "get_backend", lambda group: "nccl")
    looks = iter([False] * 1000)  # more of them are an error
    work = SimpleNamespace(is_completed=lambda: next(looks))
    monkeypatch.setattr(receiver.dist, "broadcast", lambda *arguments, **options: work)
    waiting = receiver.Broadcasts("a group")  # pyright: ignore[reportArgumentType]
    assert not receiver.is_given_up("a group")  # pyright: ignore[reportArgumentType]

    groups = {"weights": "a group"}
    failing = SimpleNamespace(receive=Mock(side_effect=out_of_memory))
    failure = receiver.receive_broadcasts(failing, [], Mock(), groups, "weights")  # pyright: ignore[reportArgumentType]
    assert (
        failure == "the weights could not be received (out of memory)"
        and aborted == ["a group"]
        and not groups
    )
    with pytest.raises(RuntimeError, match="another rank has given the transfer up"):
        waiting.receive(torch.empty(8, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("backend", "given_up", "ends"),
    [("gloo", True, "destroyed"), ("nccl", False, "destroyed"), ("nccl", True, "aborted")],
)
def test_a_group_of_nccl_that_the_learner_gave_up_is_not_destroyed_alone(
    monkeypatch, backend, given_up, ends
):
    """The learner has aborted its end, or is gone, and NCCL's ranks of a node wait for each other where they destroy."""
    done, updater = [], SimpleNamespace(_model_update_group={"weights": "a group"})
    monkeypatch.setattr(receiver.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(receiver, "is_given_up", lambda group: given_up)
    monkeypatch.setattr(receiver, "_abort_process_group", lambda group: done.append("aborted"))
    is_left, _ = receiver.leave(lambda *_: (True, done.append("destroyed")), updater, "weights")
    assert is_left and done == [ends]
    assert ("weights" in updater._model_update_group) == (ends == "destroyed")  # SGLang's own code forgets it
