"""Buckets: what is in them, when their bytes may be overwritten, and what SGLang's checksums of them must be."""

import hashlib
import itertools
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.weights.transfer import Line, make_buckets
from rollout.servers.control import ExpectedChecksums, vocabulary_padding
from tests.support.weight_checksums import expected_checksums

SHAPES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=2), min_size=1, max_size=12)


def tensors_of(shapes: list[list[int]]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"t{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]


@given(shapes=SHAPES, max_bytes=st.integers(1, 200), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_buckets_hold_every_tensor_once_in_order_and_stay_until_the_next_but_one(shapes, max_bytes, dtype):
    tensors = tensors_of(shapes)
    found: list[tuple[str, torch.Tensor]] = []
    before = None
    for bucket in make_buckets(iter(tensors), dtype=dtype, max_bytes=max_bytes):
        assert bucket.bytes.numel() <= max_bytes or len(bucket.names) == 1
        if before is not None:  # still in flight while this one was filled
            found += [(name, tensor.clone()) for name, tensor in before.tensors()]
            assert not before.is_last
        before = bucket
    assert before.is_last
    found += before.tensors()
    assert [name for name, _ in found] == [name for name, _ in tensors]
    for (_, got), (_, sent) in zip(found, tensors, strict=True):
        assert got.dtype == dtype and torch.equal(got, sent.to(dtype))


def test_two_buffers_take_turns():
    tensors = tensors_of([[4, 4]] * 10)
    tensors = [(name, tensor.double()) for name, tensor in tensors]  # to be converted, hence copied
    places = [bucket.bytes.data_ptr() for bucket in make_buckets(tensors, dtype=torch.float32, max_bytes=64)]
    assert len(places) == 10 and len(set(places)) == 2
    assert all(a != b for a, b in itertools.pairwise(places))


def test_a_tensor_that_fills_a_bucket_is_sent_from_where_it_is():
    tensors = tensors_of([[2, 2], [4, 8], [2, 2]])
    buckets = list(make_buckets(tensors, dtype=torch.float32, max_bytes=128))
    assert [bucket.names for bucket in buckets] == [["t0"], ["t1"], ["t2"]]
    assert [
        bucket.bytes.data_ptr() == tensor.data_ptr()
        for bucket, (_, tensor) in zip(buckets, tensors, strict=True)
    ] == [False, True, False]
    (converted,) = make_buckets(tensors[1:2], dtype=torch.bfloat16, max_bytes=64)
    assert torch.equal(dict(converted.tensors())["t1"], tensors[1][1].to(torch.bfloat16))


def test_a_bucket_is_not_filled_before_it_is_asked_for():
    """What is gathered beside a bucket in flight is one more bucket, never all of them."""
    taken = []

    def tensors():
        for name, tensor in tensors_of([[4, 4]] * 6):
            taken.append(name)
            yield name, tensor

    buckets = make_buckets(tensors(), dtype=torch.float32, max_bytes=128)  # two tensors each
    next(buckets)
    assert len(taken) == 3  # the third showed that the first bucket is full
    next(buckets)
    assert len(taken) == 5


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


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 4])
def test_expected_checksums_of_several_ranks_by_slices(size, kv_heads):
    """4 heads of 2; a hidden size of 8, 12 wide; 10 words, which are filled up to 64."""
    heads, dim = 4, 2
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (10, 8),
        f"{layer}.self_attn.q_proj.weight": (heads * dim, 8),
        f"{layer}.self_attn.k_proj.weight": (kv_heads * dim, 8),
        f"{layer}.self_attn.v_proj.weight": (kv_heads * dim, 8),
        f"{layer}.self_attn.o_proj.weight": (8, heads * dim),
        f"{layer}.mlp.gate_proj.weight": (12, 8),
        f"{layer}.mlp.up_proj.weight": (12, 8),
        f"{layer}.mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
    }
    w = {name: torch.randn(shape) for name, shape in shapes.items()}
    q, k, v, o, gate, up, down = (w[name] for name in list(shapes)[1:8])
    found = expected_checksums(w.items(), tensor_parallel=size, kv_heads=kv_heads)
    words = torch.cat([w["model.embed_tokens.weight"], torch.zeros(54, 8)])
    wanted = {}
    for rank in range(size):
        wide, query = 12 // size, heads // size * dim
        if kv_heads >= size:
            rows = slice(rank * kv_heads // size * dim, (rank + 1) * kv_heads // size * dim)
        else:  # ranks whose query heads share a key/value head hold that one
            head = rank * (heads // size) // (heads // kv_heads)
            rows = slice(head * dim, (head + 1) * dim)
        mine, middle = slice(rank * query, (rank + 1) * query), slice(rank * wide, (rank + 1) * wide)
        wanted |= {
            f"rank{rank}/model.embed_tokens.weight": digest(
                words[rank * 64 // size : (rank + 1) * 64 // size]
            ),
            f"rank{rank}/{layer}.self_attn.qkv_proj.weight": digest(q[mine], k[rows], v[rows]),
            f"rank{rank}/{layer}.self_attn.o_proj.weight": digest(o[:, mine]),
            f"rank{rank}/{layer}.mlp.gate_up_proj.weight": digest(gate[middle], up[middle]),
            f"rank{rank}/{layer}.mlp.down_proj.weight": digest(down[:, middle]),
            f"rank{rank}/model.norm.weight": digest(w["model.norm.weight"]),
        }
    assert found == wanted


@pytest.mark.parametrize(
    "rows, size, wanted",
    [
        (64, 1, 0),
        (65, 2, 63),
        (10, 3, 182),
        (192, 3, 0),
        (129, 3, 63),
        (151_936, 8, 0),
        (151_936, 6, 128),
        (65, 3, 127),
        (32_000, 7, 256),
    ],
)
def test_vocabulary_padding(rows, size, wanted):
    """By hand. 10 on 3 ranks: 64 does not divide by 3, so up to 192; 151936 = 64 * 2374 on 6 up to 384 * 396;
    32000 on 7 up to 448 * 72."""
    assert vocabulary_padding(rows, size) == wanted


def test_a_vocabulary_on_three_ranks():
    embedding = torch.randn(10, 8)
    found = expected_checksums(
        {"model.embed_tokens.weight": embedding}.items(), tensor_parallel=3, kv_heads=3
    )
    parts = [torch.cat([embedding, torch.zeros(54, 8)]), torch.zeros(64, 8), torch.zeros(64, 8)]
    assert found == {f"rank{rank}/model.embed_tokens.weight": digest(part) for rank, part in enumerate(parts)}


def test_parts_of_a_fused_matrix_out_of_their_order_are_refused():
    expected = ExpectedChecksums(tensor_parallel=1, kv_heads=1)
    with pytest.raises(ValueError, match=r"k_proj\.weight is part 1 of .*qkv_proj\.weight, of which 0 parts"):
        expected.add("model.layers.0.self_attn.k_proj.weight", torch.zeros(2, 2))
