"""Every row has the same bits in every batch, and equals plain torch's up to rounding."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics import aligned

SIZES = (8, 24, 64, 96, 384)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS = 200
EPS = 1e-6


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def parts(draw):
    """A batch's rows as they may stand in another batch: some of them, in any order, behind others."""
    count = draw(st.integers(1, ROWS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randperm(ROWS, generator=generator)[:count]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@settings(max_examples=40, deadline=None)
@given(rows=parts(), size=st.sampled_from(SIZES), dtype=DTYPES, seed=st.integers(0, 2**31))
def test_a_token_has_the_same_bits_in_every_batch(rows, size, dtype, seed):
    x = random(ROWS, size, seed=seed, dtype=dtype)
    weight = random(size, seed=seed + 1, dtype=dtype)
    matrix, bias = random(40, size, seed=seed + 2, dtype=dtype), random(40, seed=seed + 3, dtype=dtype)
    for operation in (
        lambda x: aligned.linear(x, matrix, bias),
        lambda x: aligned.rms_norm(x, weight, EPS),
        aligned.silu,
    ):
        assert torch.equal(operation(x[rows]), operation(x)[rows])


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from(SIZES), dtype=DTYPES, seed=st.integers(0, 2**31))
def test_a_column_of_a_product_has_the_same_bits_wherever_its_weights_stand(size, dtype, seed):
    """Megatron interleaves queries, keys and values by group; SGLang has them one after another."""
    x, matrix = random(70, size, seed=seed, dtype=dtype), random(384, size, seed=seed + 1, dtype=dtype)
    order = torch.randperm(384, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(aligned.linear(x, matrix[order]), aligned.linear(x, matrix)[:, order])


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from(SIZES), first=st.integers(0, 100), count=st.integers(1, 200), dtype=DTYPES, seed=st.integers(0, 2**31)
)  # fmt: skip
def test_a_rank_with_some_outputs_has_the_bits_of_the_whole(size, first, count, dtype, seed):
    """Also with fewer columns than a kernel takes at once."""
    x, matrix = random(70, size, seed=seed, dtype=dtype), random(300, size, seed=seed + 1, dtype=dtype)
    columns = slice(first, first + count)
    assert torch.equal(aligned.linear(x, matrix[columns]), aligned.linear(x, matrix)[:, columns])


@settings(max_examples=20, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    pieces=st.sampled_from([1, 2, 4, 8]),
    dtype=DTYPES,
    seed=st.integers(0, 2**31),
)
def test_ranks_that_share_the_inputs_sum_to_the_bits_of_one_rank(size, pieces, dtype, seed):
    x, matrix = random(70, size, seed=seed, dtype=dtype), random(40, size, seed=seed + 1, dtype=dtype)
    whole = aligned.linear(x, matrix, pieces=pieces)
    assert whole.dtype == dtype
    for ranks in (r for r in (1, 2, 4, 8) if r <= pieces):
        shares = zip(x.chunk(ranks, -1), matrix.chunk(ranks, -1), strict=True)
        parts = [aligned.linear(mine, part, pieces=pieces // ranks) for mine, part in shares]
        assert torch.equal(aligned.tree_sum(parts), whole)


def test_the_number_of_pieces_decides_the_bits_and_the_bias_is_added_last():
    x, matrix, bias = random(70, 96, seed=0), random(40, 96, seed=1), random(40, seed=2)
    halves = [F.linear(*half) for half in zip(x.split(48, -1), matrix.split(48, -1), strict=True)]
    assert torch.equal(aligned.linear(x, matrix, bias, pieces=2), (halves[0] + halves[1]) + bias)
    assert not torch.equal(aligned.linear(x, matrix, pieces=2), aligned.linear(x, matrix))


def test_what_has_no_equal_shares_is_refused():
    parts = [torch.ones(2)] * 3
    with pytest.raises(ValueError, match="shorter"):
        aligned.tree_sum(parts)
    with pytest.raises(RuntimeError, match="unflatten"):
        aligned.linear(torch.ones(3, 10), torch.ones(4, 10), pieces=4)


def test_a_weight_that_starts_anywhere_in_memory_gives_the_same_bits():
    """The learner's weights are parts of one buffer."""
    x, matrix = random(70, 96, seed=0), random(48, 96, seed=1)
    buffer = torch.empty(matrix.numel() + 16)
    for start in range(16):
        view = buffer[start : start + matrix.numel()].view_as(matrix).copy_(matrix)
        assert torch.equal(aligned.linear(x, view), aligned.linear(x, matrix))


@settings(max_examples=20, deadline=None)
@given(rows=parts(), vocabulary=st.sampled_from([24, 97, 1000]), seed=st.integers(0, 2**31))
def test_a_logprob_has_the_same_bits_in_every_batch(rows, vocabulary, seed):
    logits = random(ROWS, vocabulary, seed=seed, scale=5.0)
    tokens = torch.randint(vocabulary, (ROWS,), generator=torch.Generator().manual_seed(seed))
    whole = aligned.logprobs(logits, tokens)
    assert torch.equal(aligned.logprobs(logits[rows], tokens[rows]), whole[rows])
    torch.testing.assert_close(
        whole, logits.log_softmax(-1)[torch.arange(ROWS), tokens], rtol=1e-5, atol=1e-5
    )


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 150), size=st.sampled_from([8, 24, 64]), dtype=DTYPES, seed=st.integers(0, 2**31),
    data=st.data(),
)  # fmt: skip
def test_decoding_has_the_bits_of_a_prefill_of_the_whole(length, size, dtype, seed, data):
    """Queries [start, stop) of the second of three sequences, with the keys that they see, alone and with others."""
    query, key, value = (random(3, length, size, seed=seed + i, dtype=dtype) for i in range(3))
    sees = torch.ones(length, length, dtype=torch.bool).tril()[None]
    whole = aligned.attention(query, key, value, sees, size**-0.5)
    stop = data.draw(st.integers(1, length))
    start = data.draw(st.integers(0, stop - 1))
    alone = aligned.attention(
        query[1:2, start:stop], key[1:2, :stop], value[1:2, :stop], sees[:, start:stop, :stop], size**-0.5
    )
    assert torch.equal(alone, whole[1:2, start:stop])


def test_the_operations_are_those_of_torch_but_for_rounding():
    x, weight, matrix = random(70, 96, seed=0), random(96, seed=1), random(48, 96, seed=2)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(aligned.linear(x, matrix), F.linear(x, matrix), **close)
    for y in (x, x * 1e-3):  # eps is added to the mean square, not to its root
        torch.testing.assert_close(
            aligned.rms_norm(y, weight, EPS), F.rms_norm(y, (96,), weight, EPS), **close
        )
    torch.testing.assert_close(aligned.silu(x * 30), F.silu(x * 30), **close)
    query, key, value = (random(2, 100, 16, seed=i) for i in range(3))
    sees = torch.ones(100, 100, dtype=torch.bool).tril()[None]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(aligned.attention(query, key, value, sees, 0.25), expected, **close)
    far = torch.full((1, 3, 16), 100.0)  # every score is -40,000
    low = aligned.attention(far, -far, value[:1, :3], torch.ones(1, 3, 3, dtype=torch.bool), 0.25)
    torch.testing.assert_close(low, value[:1, :3].mean(1, keepdim=True).expand(1, 3, 16), **close)


def test_numbers_behind_the_rotated_ones_stay():
    heads, angles = random(3, 2, 10, seed=0), random(3, 1, 4, seed=1)
    found = aligned.rotated(heads, angles.cos(), angles.sin())
    a, b = heads[..., :4], heads[..., 4:8]
    turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(a, b)
    torch.testing.assert_close(found[..., :8], torch.cat([turned.real, turned.imag], -1))
    assert torch.equal(found[..., 8:], heads[..., 8:])
