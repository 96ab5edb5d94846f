"""Buckets: what is in them, and when their bytes may be overwritten; and leaving a group whose broadcast never ends."""

import itertools
import threading
import time
import weakref
from collections import deque
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parallel.megatron import platform
from parallel.planning.memory import NUM_BUFFERS
from parallel.weights.precision import packed_form, rounded
from parallel.weights.transfer import (
    Buffers,
    Line,
    TransferPlan,
    WeightBroadcaster,
    make_buckets,
    plan_transfer,
)

SHAPES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=2), min_size=1, max_size=12)


def tensors_of(shapes: list[list[int]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]


def plan_of(
    tensors, dtype=torch.float32, *, max_bytes: int, alone_bytes: int = 2**20, sizes=None, **rounding
) -> TransferPlan:
    """sizes: tensors of each unit."""
    rest = iter([(name, tensor.shape) for name, tensor in tensors])
    units = [list(itertools.islice(rest, size)) for size in sizes or [1] * len(tensors)]
    return plan_transfer(
        units, dtype=dtype, device="cpu", max_bytes=max_bytes, alone_bytes=alone_bytes, **rounding
    )


def content(tensors) -> bytes:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return flat.view(torch.uint8).numpy().tobytes()


@given(
    shapes=SHAPES,
    max_bytes=st.integers(1, 200),
    alone_bytes=st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["apart", "together", "strided"]),
    data=st.data(),
)
def test_buckets_hold_every_tensor_once_and_stay_while_their_buffers_are_kept(
    shapes, max_bytes, alone_bytes, dtype, layout, data
):
    """Whatever the units, and wherever in memory the tensors lie."""
    tensors = tensors_of(shapes)
    if layout == "together":
        whole = torch.cat([tensor.flatten() for _, tensor in tensors])
        parts = whole.split([tensor.numel() for _, tensor in tensors])
        tensors = [
            (name, part.view(tensor.shape)) for (name, tensor), part in zip(tensors, parts, strict=True)
        ]
    if layout == "strided":
        tensors = [(name, tensor.repeat_interleave(2, -1)[..., ::2]) for name, tensor in tensors]
    sizes, left = [], len(tensors)
    while left:
        sizes.append(data.draw(st.integers(1, min(left, 3))))
        left -= sizes[-1]
    plan = plan_of(tensors, dtype, max_bytes=max_bytes, alone_bytes=alone_bytes, sizes=sizes)
    wanted = {name: tensor.to(dtype) for name, tensor in tensors}
    before, names, counts = deque(maxlen=NUM_BUFFERS["cpu"]), [], []
    for bucket in make_buckets(iter(tensors), plan, Buffers("cpu")):
        assert not any(one.is_last for one in before)
        before.append(bucket)
        for one in before:  # still in flight while this one was filled
            assert one.bytes.numpy().tobytes() == content(wanted[name] for name in one.names)
        names += bucket.names
        counts.append(len(bucket.names))
    assert before[-1].is_last and names == plan.names
    assert counts == [len(bucket.tensors) for bucket in plan.buckets]
    assert sorted(names) == sorted(wanted)
    assert plan.shapes == [list(wanted[name].shape) for name in names]


@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=20), max_bytes=st.integers(4, 200))
def test_small_units_fill_buckets_past_the_large_ones(sizes, max_bytes):
    tensors = [(f"t{i}", torch.zeros(size)) for i, size in enumerate(sizes)]
    plan = plan_of(tensors, max_bytes=max_bytes, alone_bytes=100)
    small = []
    for planned in plan.buckets:
        numbers = [int(name[1:]) for name in planned.names]
        bucket = [4 * sizes[number] for number in numbers]
        assert numbers == sorted(numbers)
        if planned.is_alone:
            assert len(bucket) == 1 and bucket[0] >= min(100, max_bytes)
        else:
            assert sum(bucket) <= max_bytes and max(bucket) < 100
            small.append(bucket)
    for one, other in itertools.pairwise(small):
        assert sum(one) + other[0] > max_bytes


def test_buffers_take_turns_and_are_kept():
    # Converted, hence copied.
    tensors = [(name, tensor.double()) for name, tensor in tensors_of([[4, 2]] * 20)]
    plan, buffers = plan_of(tensors, max_bytes=65), Buffers("cpu")
    places = [bucket.bytes.data_ptr() for _ in range(2) for bucket in make_buckets(tensors, plan, buffers)]
    kept = NUM_BUFFERS["cpu"]
    assert len(places) == 20 and len(set(places)) == kept
    assert all(len({*places[start : start + kept]}) == kept for start in range(20 - kept + 1))


def test_what_lies_together_is_sent_from_where_it_is():
    tensors = tensors_of([[2, 2], [4, 8], [4, 8], [2, 2], [2, 1]])
    both = torch.cat([tensors[1][1], tensors[2][1]])
    tensors[1:3] = [("t1", both[:4]), ("t2", both[4:])]
    plan = plan_of(tensors, max_bytes=512, alone_bytes=128, sizes=[1, 2, 1, 1])
    buckets = list(make_buckets(tensors, plan, Buffers("cpu")))
    assert [bucket.names for bucket in buckets] == [["t1", "t2"], ["t0", "t3", "t4"]]
    assert buckets[0].bytes.data_ptr() == both.data_ptr() and buckets[0].bytes.numel() == both.nbytes
    assert buckets[1].bytes.data_ptr() not in {tensor.data_ptr() for _, tensor in tensors}
    plan = plan_of(tensors[1:2], torch.bfloat16, max_bytes=64)
    (converted,) = make_buckets(tensors[1:2], plan, Buffers("cpu"))
    assert torch.equal(converted.bytes.view(torch.bfloat16).view(4, 8), tensors[1][1].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_rounded_is_rounded_into_kept_memory_and_nothing_else_changes(dtype):
    """q, k and v lie together, and are one bucket; the norms share another."""
    names = [f"layers.{i}.{name}.weight" for i in range(3) for name in ("norm", "q_proj", "k_proj")]
    tensors = [(name, torch.randn([64] if "norm" in name else [64, 40])) for name in names]
    before = [tensor.clone() for _, tensor in tensors]
    plan = plan_of(tensors, dtype, max_bytes=2**20, alone_bytes=2**12, sizes=[1, 2] * 3, precision="int4")
    buffers, places = Buffers("cpu"), []
    for _ in range(2):
        found = {}
        for bucket in make_buckets(tensors, plan, buffers):
            flat = bucket.bytes.clone().view(dtype)
            places += [bucket.bytes.data_ptr()] if len(bucket.names) == 2 else []
            for name, shape in zip(bucket.names, bucket.shapes, strict=True):
                size = torch.Size(shape).numel()
                found[name], flat = flat[:size].view(shape), flat[size:]
        for name, tensor in tensors:
            sent = tensor if "norm" in name else rounded(tensor, "int4")
            assert torch.equal(found[name], sent.to(dtype)), name
    assert len(places) == 6 and len(set(places)) == NUM_BUFFERS["cpu"]
    assert all(torch.equal(tensor, old) for (_, tensor), old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["int8", "int4", "fp8_e4m3", "fp8_e4m3_block"])
@pytest.mark.parametrize("alone_bytes", [2**9, 2**20])
def test_packed_matrices_are_buckets_of_their_own_or_share_them_with_what_is_not_rounded(
    dtype, precision, alone_bytes
):
    """What lies together before it is packed is apart then, and an odd number of bytes shifts nothing."""
    names = [f"layers.{i}.{name}.weight" for i in range(3) for name in ("norm", "q_proj", "k_proj")]
    tensors = [(name, torch.randn([3] if "norm" in name else [33, 39])) for name in names]
    rounding = {"precision": precision, "packs": True}
    plan = plan_of(tensors, dtype, max_bytes=2**20, alone_bytes=alone_bytes, sizes=[1, 2] * 3, **rounding)
    assert len(plan.buckets) == (7 if alone_bytes == 2**9 else 1)
    forms = {name: plan.form_of(name) for name in names}
    there = str(dtype).removeprefix("torch.")
    assert forms == {name: there if "norm" in name else f"{there}/{precision}" for name in names}
    found = {}
    for bucket in make_buckets(tensors, plan, Buffers("cpu")):
        flat = bucket.bytes.clone()
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            form = packed_form(name, shape, precision)
            size = torch.Size(shape).numel() * dtype.itemsize if form is None else form.nbytes
            part, flat = flat[:size], flat[size:]
            found[name] = part.clone().view(dtype) if form is None else torch.empty(shape, dtype=dtype)
            if form is not None:
                form.unpack_into(found[name], form.scales_of(part), form.numbers_of(part))
        assert not flat.numel()
    for name, tensor in tensors:
        assert torch.equal(
            found[name], tensor.to(dtype) if "norm" in name else rounded(tensor, precision).to(dtype)
        )


@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_that_was_not_planned_or_is_missing_is_refused(place):
    tensors = tensors_of([[2, 2], [3]])
    plan = plan_of(tensors, max_bytes=64)
    for name, tensor in (("other", tensors[place][1]), (f"t{place}", torch.zeros(4, 4))):
        other = [*tensors]
        other[place] = (name, tensor)
        with pytest.raises(ValueError, match=f"{name} of shape .* was not planned"):
            list(make_buckets(other, plan, Buffers("cpu")))
    with pytest.raises(ValueError, match="1 planned tensors did not come, such as t1"):
        list(make_buckets(tensors[:1], plan, Buffers("cpu")))


def test_a_bucket_is_not_filled_before_it_is_asked_for():
    """What is gathered beside a bucket in flight is one more bucket, never all of them."""
    taken, all_tensors = [], tensors_of([[4, 4]] * 6)

    def tensors():
        for name, tensor in all_tensors:
            taken.append(name)
            yield name, tensor

    plan = plan_of(all_tensors, max_bytes=129, alone_bytes=129)  # two tensors each
    buckets = make_buckets(tensors(), plan, Buffers("cpu"))
    next(buckets)
    assert len(taken) == 2
    next(buckets)
    assert len(taken) == 4


def test_work_in_line_is_done_in_order_and_hands_over_its_result_and_its_error():
    line, gate, done = Line(), threading.Event(), []
    first = line.begin(lambda: gate.wait(60) and done.append("first"))
    failing = line.begin(lambda: (_ for _ in ()).throw(TimeoutError("its own")))
    last = line.begin(lambda: done.append("last") or 3)
    line.close()
    checks = []
    with pytest.raises(RuntimeError, match="looked"):
        last.wait(check=lambda: checks.append(list(done)) or (_ for _ in ()).throw(RuntimeError("looked")))
    gate.set()
    with pytest.raises(TimeoutError, match="its own"):
        failing.wait(check=lambda: None)
    assert last.wait(check=lambda: None) == 3
    first.wait(check=lambda: None)
    assert (checks, done) == ([[]], ["first", "last"])


def test_a_line_keeps_nothing_of_what_it_has_done():
    """Not even while it waits for more: it would be the memory of a bucket."""
    line, flat = Line(), torch.zeros(8)
    seen = weakref.ref(flat)
    line.begin(lambda held=flat: held.sum()).wait(check=lambda: None)
    del flat
    deadline = time.monotonic() + 10
    while seen() is not None:  # the thread comes round to its queue again
        assert time.monotonic() < deadline, "the thread holds what it has done"
        time.sleep(0.01)
    line.close()


def test_a_group_whose_broadcast_never_ends_is_left_at_once():
    """A receiver has died or stands still; gloo's group waits for the broadcast when its last owner leaves it."""
    platform.init_distributed(60.0)
    timeout = timedelta(seconds=30)
    sender = WeightBroadcaster(world_size=2, backend="gloo", timeout_s=30, group_name="given up")
    store: dist.Store = dist.TCPStore(sender.address, sender.port, 2, is_master=False, timeout=timeout)
    for prefix in ("given up", "given up/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    joined = Line().begin(lambda: dist.ProcessGroupGloo(store, 1, 2, timeout))
    sender.join(lambda: None)
    receiver = joined.wait(lambda: None)
    sending = sender.start(torch.zeros(2**26, dtype=torch.uint8))  # more than the sockets hold
    with pytest.raises(RuntimeError, match="looked"):
        sending.wait(check=lambda: (_ for _ in ()).throw(RuntimeError("looked")))
    began = time.monotonic()
    sender.give_up("given up")
    sender.close()
    del sender, sending
    assert time.monotonic() - began < 15
    assert store.check([]) and receiver.rank() == 1, "the receiver was there all the time"
