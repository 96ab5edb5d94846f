"""Seconds of sampling, by hand with round numbers."""

from dataclasses import replace

from configs.schema.run import RunConfig
from parallel.planning.decoding import Lengths
from parallel.planning.machine import Machine
from parallel.planning.model_parts import Experts, Latent
from parallel.planning.sampling_time import decoder_of, sampling_time, server_flops
from tests.support.step_times import (
    ALIKE,
    DENSE,
    ROUND,
    close,
    decoding_seconds,
    hardware,
    run_config,
    server,
)


def sampled(config: RunConfig, lengths: Lengths = ALIKE, machine: Machine = ROUND, *, replicas=1, gib=80.0):
    memory = server(DENSE, gib=gib, max_tokens=config.rollout.max_total_tokens)
    return sampling_time(DENSE, config, lengths, machine, tp=1, replicas=replicas, memory=memory)


def test_sampling_by_hand():
    """8 responses of 100 tokens to 4 prompts of 10, all at once. Decoding: 99 steps of 8 with 88, 96, ... tokens in the
    cache. A prompt is computed once, 10 tokens, logits of the last and 55 pairs; without the radix cache it is for each
    response."""
    found = sampled(run_config())
    decoder = decoder_of(DENSE, run_config(), ROUND, 1, server(DENSE))
    assert found.decode == close(sum(decoding_seconds(decoder, 8, 88 + 8 * i) for i in range(99)))
    assert (found.running, found.requests) == (8, 0)
    layers, logits = 2 * 4 * 589_824 / 50e12, 2 * 256_000 / 50e12
    assert found.prefill == close(4 * (10 * layers + logits + 55 * decoder.pair_s))
    whole = sampled(run_config(rollout={"server_args": {"disable-radix-cache": True}}))
    assert whole.prefill == close(2 * found.prefill)
    assert sampled(run_config(), replicas=2).prefill == close(found.prefill / 2)


def test_each_rank_of_a_server_computes_the_short_vectors_of_latent_attention():
    """With 2 ranks each computes half of the rest, and all of H (q + r + R) numbers a layer."""
    experts = Experts(
        num_experts=4, experts_per_token=2, intermediate_size=64, norm_topk=True, is_sparse=(True,) * DENSE.num_layers
    )  # fmt: skip
    latent = Latent(query_rank=24, rank=16, value_dim=32, is_interleaved=True, scale=1.0)
    a = replace(DENSE, experts=experts, latent=latent, rotary_size=8)
    whole = 2 * a.num_layers * a.hidden_size * (24 + 16 + 8)
    assert 2 * server_flops(a, 2).matrices == server_flops(a, 1).matrices + whole


def test_overheads_of_sampling_by_hand():
    slow = hardware(decode_step_s=1, decode_layer_s=0.1, decode_response_s=0.01, prompt_s=2, response_s=3)
    found, bare = (
        sampled(run_config(), machine=Machine(hardware=slow, gpus_per_node=8)),
        sampled(run_config()),
    )
    assert found.decode - bare.decode == close(99 * (1 + 4 * 0.1 + 8 * 0.01))
    assert found.prefill - bare.prefill == close(4 * 2 + 4 * 0.1)  # one pass of four layers
    assert found.requests == close(8 * 3)


def test_a_server_runs_as_many_as_its_cache_holds_and_its_share_allows():
    """A response takes 100 tokens and half of a prompt of 10."""
    limited = run_config(rollout={"max_total_tokens": 320})
    assert sampled(limited).running == 3
    assert sampled(run_config(rollout={"max_concurrency": 6}), replicas=2).running == 3
    assert sampled(run_config(rollout={"max_total_tokens": 1})).running == 1
    assert sampled(limited).decode > sampled(run_config()).decode


def test_sampling_ahead_fills_the_tail_and_computes_interrupted_responses_again():
    spread = Lengths(prompt=10, response=50, longest=100, spread=0.8)
    config = run_config(rollout={"max_concurrency": 8})
    ahead = run_config(rollout={"max_concurrency": 8, "max_staleness": 3})
    drained = run_config(rollout={"max_concurrency": 8, "max_staleness": 3, "drain_s": 5})
    assert sampled(ahead, spread).decode < sampled(config, spread).decode
    assert sampled(ahead, spread).decode == sampled(drained, spread).decode
    decoder = decoder_of(DENSE, config, ROUND, 1, server(DENSE))
    layers, logits = 2 * 4 * 589_824 / 50e12, 2 * 256_000 / 50e12
    again = 8 * (35 * layers + logits + 35 * 36 / 2 * decoder.pair_s)
    assert sampled(ahead, spread).prefill - sampled(drained, spread).prefill == close(again)
