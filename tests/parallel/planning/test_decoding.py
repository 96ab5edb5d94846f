"""Decoding against a loop over tokens, and the lengths of responses."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.planning.decoding import (
    Decoder,
    Lengths,
    cut_lognormal_mean,
    decode,
    lognormal_scale,
    mixed,
)
from parallel.planning.sampling_time import decoder_of
from tests.support.step_times import DENSE, EXPERTS, ROUND, close, decoding_seconds, run_config, server

# ---------------------------------------------------------------------------------------------------------------------
# lengths


@settings(max_examples=60, deadline=None)
@given(
    mean=st.integers(1, 4000),
    above=st.floats(1.05, 100),
    spread=st.floats(0.05, 2.0),
    count=st.integers(1, 300),
)
def test_lengths_are_within_the_cut_and_the_mean_is_the_wanted_one(mean, above, spread, count):
    longest = math.ceil(mean * above) + 1
    found = Lengths(prompt=1, response=mean, longest=longest, spread=spread).of(count)
    assert len(found) == count and all(1 <= length <= longest for length in found)
    scale = lognormal_scale(mean, spread, longest)
    assert cut_lognormal_mean(scale, spread, longest) == pytest.approx(mean, rel=1e-6)


def test_the_mean_of_a_cut_lognormal_is_that_of_many_quantiles():
    normal_mean = cut_lognormal_mean(100, 0.7, 150)
    lengths = Lengths(prompt=1, response=1000, longest=10**6, spread=0.7).of(20_000)
    assert fmean(lengths) == pytest.approx(1000, rel=0.005)
    # The same numbers as a sum over places: the oracle of the closed form.
    from statistics import NormalDist

    places = [NormalDist().inv_cdf((i + 0.5) / 50_000) for i in range(50_000)]
    assert normal_mean == pytest.approx(fmean(min(150, 100 * math.exp(0.7 * z)) for z in places), rel=1e-4)


def test_without_spread_all_are_alike():
    assert Lengths(prompt=1, response=7, longest=9, spread=0.0).of(3) == [7, 7, 7]
    assert Lengths(prompt=1, response=9, longest=9, spread=0.5).of(3) == [9, 9, 9]


def test_mixed_values_are_the_same_and_spread_at_all_times():
    values = mixed(range(1000))
    assert sorted(values) == [*range(1000)]
    for start in range(0, 1000, 100):
        assert fmean(values[start : start + 100]) == pytest.approx(499.5, rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# decoding

seconds_of = st.floats(0, 10)
decoders = st.builds(
    Decoder,
    fixed_s=seconds_of,
    each_s=seconds_of,
    weights_s=seconds_of,
    experts_s=seconds_of,
    chosen=st.floats(0, 1),
    read_s=seconds_of,
    product_s=seconds_of,
    pair_s=seconds_of,
)


@given(
    decoder=decoders, responses=st.integers(1, 50), cached=st.integers(0, 10_000), steps=st.integers(0, 300)
)
def test_a_stretch_is_the_sum_of_its_steps(decoder, responses, cached, steps):
    slow = sum(decoding_seconds(decoder, responses, cached + i * responses) for i in range(steps))
    assert decoder.span_seconds(responses, cached, steps) == pytest.approx(slow, rel=1e-9, abs=1e-12)


def decode_slowly(lengths: list[int], prompt: int, places: int, decoder: Decoder) -> float:
    """Token by token: a list of responses under way, each with its tokens."""
    waiting, running, seconds = [*lengths], [], 0.0
    while waiting or running:
        while waiting and len(running) < places:
            length = waiting.pop(0)
            if length > 1:
                running.append([prompt + 1, prompt + length])
        if running:
            seconds += decoding_seconds(decoder, len(running), sum(now for now, _ in running))
            running = [[now + 1, end] for now, end in running if now + 1 < end]
    return seconds


@settings(max_examples=60, deadline=None)
@given(
    decoder=decoders,
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=25),
    prompt=st.integers(1, 40),
    places=st.integers(1, 30),
)
def test_decoding_is_that_of_a_loop_over_tokens(decoder, lengths, prompt, places):
    found = decode(lengths, prompt, places, decoder)
    assert found.seconds == pytest.approx(
        decode_slowly(lengths, prompt, places, decoder), rel=1e-9, abs=1e-12
    )
    assert all(1 <= running <= places for _, running in found.profile)
    assert [start for start, _ in found.profile] == sorted(start for start, _ in found.profile)


def test_decoding_by_hand():
    """Two places, responses of 3, 5 and 2 tokens, a second a step: 3 and 5 begin together and take 2 and 4 steps; where
    the first ends, the third begins, for 1 step: two run until step 3, one until step 4."""
    decoder = Decoder(
        fixed_s=1, each_s=0, weights_s=0, experts_s=0, chosen=0, read_s=0, product_s=0, pair_s=0
    )
    found = decode([3, 5, 2], 10, 2, decoder)
    assert found.seconds == 4
    assert found.profile == ((0, 2), (2, 2), (3, 1))
    assert found.mean_running == 7 / 4


def test_a_decoder_by_hand():
    """DENSE in float32: a layer's matrices 256 (8 + 2 * 4) 32 + 8 * 32 * 256 + 3 * 256 * 512 = 589,824 numbers; norms 2 *
    256 + 2 * 32 a layer and 256; the output layer 1000 * 256. Read at 500 GB/s. A token of the cache: 2 * 4 * 4 * 32
    numbers. FLOPs at 50 TFLOP/s: two for each number of the matrices; 4 * 32 * 8 a layer for each token of the cache."""
    decoder = decoder_of(DENSE, run_config(), ROUND, 1, server(DENSE))
    matrices = 4 * 589_824 + 256_000
    assert decoder.weights_s == close(4 * (matrices + 4 * (512 + 64) + 256) / 500e9)
    assert decoder.read_s == close(4 * 2 * 4 * 4 * 32 / 500e9)
    assert decoder.product_s == close(2 * matrices / 50e12)
    assert decoder.pair_s == close(4 * 4 * 32 * 8 / 50e12)
    assert (decoder.fixed_s, decoder.each_s, decoder.experts_s) == (0, 0, 0)


def test_a_decoder_of_two_ranks_sends_two_all_reduces_a_layer():
    """8 of 256 numbers, each 4 bytes, of which a rank of two sends as much as there is, at 50 GB/s; 8 ms of latency."""
    decoder = decoder_of(DENSE, run_config(), ROUND, 2, server(DENSE, 2))
    assert decoder.fixed_s == close(8e-3)
    assert decoder.each_s == close(8 * 256 * 4 / 50e9)


def test_experts_are_read_as_tokens_reach_them():
    """8 experts of 3 * 256 * 128 numbers in each of 4 layers; a token goes to a quarter of them, two to 1 - (3/4)^2."""
    decoder = decoder_of(EXPERTS, run_config(), ROUND, 1, server(EXPERTS))
    assert decoder.experts_s == close(4 * 4 * 8 * 3 * 256 * 128 / 500e9)
    reader = replace(decoder, fixed_s=0.0, each_s=0.0, product_s=0.0, pair_s=0.0)
    read = [reader.span_seconds(n, 0, 1) - decoder.weights_s for n in (1, 2, 1000)]
    assert read == [close(share * decoder.experts_s) for share in (1 / 4, 7 / 16, 1)]
    # dense weights: two norms, norms of queries and keys, attention, a router; the last norm and the output layer
    others = 4 * (512 + 64 + 196_608 + 256 * 8) + 256 + 256_000
    assert decoder.weights_s == close(4 * others / 500e9)
