"""Seconds of a step: each part by hand with round numbers, decoding against a loop over tokens, and relations that hold for
any hardware.

``ROUND`` computes 100 TFLOP/s of float32, half of it attained, reads 1000 GB/s, half of it attained, and sends 100 GB/s
within a node and 10 between, half of both; a collective takes 1 ms. Overheads are 0 unless a test sets them.
"""

import itertools
import math
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.reading.hardware import hardware_names, read_hardware
from configs.schema.hardware import HardwareConfig, Overheads
from configs.schema.layout import LayoutConfig
from configs.schema.run import RunConfig
from parallel.planning.decoding import (
    Decoder,
    Lengths,
    cut_lognormal_mean,
    decode,
    lognormal_scale,
    mixed,
)
from parallel.planning.flops import forward_flops, update_flops, whole_samples
from parallel.planning.layout import Architecture, read_architecture, read_hf_config
from parallel.planning.machine import Machine, spanned
from parallel.planning.memory import GIB, RolloutMemory, rollout_memory, stage_parameters
from parallel.planning.sampling_time import decoder_of, sampling_time
from parallel.planning.time import Estimator, assumptions, seconds_text, transfer_seconds
from parallel.planning.training_time import (
    batch_of,
    bubble_share,
    optimizer_seconds,
    step_load,
    training_time,
)

MODELS = Path(__file__).resolve().parents[3] / "tests" / "model_configs"
TINY = {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 4, "intermediate_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
DENSE = read_architecture(TINY)
EXPERTS = read_architecture(
    TINY
    | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    }
)
NO_OVERHEADS: dict[str, float] = dict.fromkeys(Overheads.model_fields, 0.0)


def hardware(collective_s: float = 1e-3, attained: float = 0.5, **changes) -> HardwareConfig:
    overheads = {name: changes.pop(name) for name in [*changes] if name in NO_OVERHEADS}
    shares = ("train_matmul", "train_attention", "prefill_matmul", "prefill_attention", "memory", "links")
    content = {
        "name": "round",
        "source": "made",
        "memory_gib": 80,
        "peak_tflops": {"float32": 100, "bfloat16": 200, "float16": 200},
        "memory_gb_s": 1000,
        "node_link_gb_s": 100,
        "network_gb_s": 10,
        "attained": dict.fromkeys(shares, attained),
        "overheads": NO_OVERHEADS | {"collective_s": collective_s} | overheads,
    }
    return HardwareConfig.model_validate(content | changes)


ROUND = Machine(hardware=hardware(), gpus_per_node=8)
ALIKE = Lengths(prompt=10, response=100, longest=100, spread=0.0)


def run_config(**changes) -> RunConfig:
    """4 prompts of 2 responses, float32, no shared prompts, layers not computed again."""
    content = {
        "model": {"path": "unused", "dtype": "float32"},
        "task": {"type": "countdown"},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 100, "dtype": "float32"},
        "learner": {"token_budget": 436, "share_prompts": False},
    }
    for name, block in changes.items():
        content[name] = {**content.get(name, {}), **block}
    return RunConfig.model_validate(content)


def server(architecture: Architecture, tp: int = 1, gib: float = 80) -> RolloutMemory:
    return rollout_memory(architecture, tp, dtype="float32", gpu_bytes=int(gib * GIB))


def close(seconds: float) -> float:
    return pytest.approx(seconds, rel=1e-9)


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
    slow = sum(decoder.seconds(responses, cached + i * responses) for i in range(steps))
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
            seconds += decoder.seconds(len(running), sum(now for now, _ in running))
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
    assert (found.seconds, found.steps) == (4, 4)
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
    read = [decoder.sides(n)[0] - decoder.weights_s for n in (1, 2, 1000)]
    assert read == [close(share * decoder.experts_s) for share in (1 / 4, 7 / 16, 1)]
    # dense weights: two norms, norms of queries and keys, attention, a router; the last norm and the output layer
    others = 4 * (512 + 64 + 196_608 + 256 * 8) + 256 + 256_000
    assert decoder.weights_s == close(4 * others / 500e9)


# ---------------------------------------------------------------------------------------------------------------------
# sampling


def sampled(config: RunConfig, lengths: Lengths = ALIKE, machine: Machine = ROUND, *, replicas=1, gib=80.0):
    return sampling_time(
        DENSE, config, lengths, machine, tp=1, replicas=replicas, memory=server(DENSE, gib=gib)
    )


def test_sampling_by_hand():
    """8 responses of 100 tokens to 4 prompts of 10, all at once. Decoding: 99 steps of 8 with 88, 96, ... tokens in the
    cache. A prompt is computed once, 10 tokens, logits of the last and 55 pairs; without the radix cache it is for each
    response."""
    found = sampled(run_config())
    decoder = decoder_of(DENSE, run_config(), ROUND, 1, server(DENSE))
    assert found.decode == close(sum(decoder.seconds(8, 88 + 8 * i) for i in range(99)))
    assert (found.running, found.requests) == (8, 0)
    layers, logits = 2 * 4 * 589_824 / 50e12, 2 * 256_000 / 50e12
    assert found.prefill == close(4 * (10 * layers + logits + 55 * decoder.pair_s))
    whole = sampled(run_config(rollout={"server_args": {"disable-radix-cache": True}}))
    assert whole.prefill == close(2 * found.prefill)
    assert sampled(run_config(), replicas=2).prefill == close(found.prefill / 2)


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


# ---------------------------------------------------------------------------------------------------------------------
# training


def test_the_batch_by_hand():
    """8 samples of 109 tokens for the model: 872, two micro-batches of 436."""
    batch = batch_of(run_config(), ALIKE, LayoutConfig(dp=1))
    assert (batch.load, batch.microbatches) == (whole_samples(8, 109, 100), 2)
    halved = batch_of(run_config(), ALIKE, LayoutConfig(dp=2))
    assert (halved.load, halved.microbatches) == (whole_samples(4, 109, 100), 1)
    assert batch_of(run_config(learner={"minibatches": 2}), ALIKE, LayoutConfig(dp=1)).microbatches == 1
    interleaved = LayoutConfig(dp=1, pp=4, vpp=2)
    assert batch_of(run_config(), ALIKE, interleaved).microbatches == 4


def test_shared_prompts_are_counted_once_with_an_eighth_for_each_sample():
    """Pairs by a loop over all tokens of the model: a response's token sees its prompt and what it said."""
    lengths = Lengths(prompt=16, response=20, longest=60, spread=0.6)
    load, counted = step_load(lengths, 3, 4, shares=True)
    responses = lengths.of(12)
    tokens = 3 * 16 + sum(length - 1 for length in responses)
    pairs = 3 * sum(range(1, 17)) + sum(16 + place for length in responses for place in range(1, length))
    assert (load.tokens, load.pairs, load.predicted) == (tokens, pairs, sum(responses))
    assert counted == tokens + 12 * 16 / 8
    shared, split = run_config(learner={"share_prompts": True}), LayoutConfig(cp=2, dp=1)
    assert batch_of(shared, ALIKE, LayoutConfig(dp=1)).load.tokens == 4 * 10 + 8 * 99
    assert batch_of(shared, ALIKE, split).load.tokens == 8 * 109


def test_training_on_one_rank_by_hand():
    """Per token 589,824 * 4 numbers in matrices, forward and twice backward, at 50 TFLOP/s; attention two products, then
    five; logits four times. AdamW reads and writes 36 bytes for each number and zeroes 4, at 500 GB/s."""
    found = training_time(DENSE, run_config(), ALIKE, ROUND, LayoutConfig(dp=1))
    matrices = 872 * 4 * 589_824 * 2 * 3
    attention = 4 * 4 * 32 * 8 * 8 * (109 * 110 // 2) * 7 // 2
    logits = 2 * 800 * 256 * 1000 * 4
    assert found.compute == close((matrices + attention + logits) / 50e12)
    assert (found.score, found.collectives, found.bubble, found.rest) == (0, 0, 0, 0)
    numbers = sum(stage_parameters(DENSE, LayoutConfig(dp=1), 0))
    assert found.optimizer == close(40 * numbers / 500e9)
    assert found.stages == (close(found.compute),)


def test_overheads_of_training_by_hand():
    """Two micro-batches of two passes, and a third where layers are computed again; ``old`` has one each."""
    slow = Machine(hardware=hardware(pass_s=1, optimizer_s=10, step_s=100, token_s=1), gpus_per_node=8)

    def times(**learner):
        config, layout = run_config(learner=learner), LayoutConfig(dp=1)
        with_them = training_time(DENSE, config, ALIKE, slow, layout)
        without = training_time(DENSE, config, ALIKE, ROUND, layout)
        return {
            name: round(getattr(with_them, name) - getattr(without, name), 6)
            for name in ("score", "compute", "optimizer", "rest")
        }

    assert times() == {"score": 0, "compute": 2 * 2, "optimizer": 10, "rest": 100 + 800}
    assert times(recompute="full")["compute"] == 2 * 3
    assert times(old_logprobs="always")["score"] == 2
    # two minibatches of one micro-batch each, and ``old`` comes before them
    assert times(minibatches=2) == {"score": 2, "compute": 2 * 2, "optimizer": 20, "rest": 900}


def test_collectives_by_hand():
    """tp=2: 8 all-reduces of 4 * 256 * 872 bytes forward and backward, of which a rank sends as much, at 50 GB/s, and 1 ms
    for each of 2 * 8 calls of two micro-batches."""
    layout = LayoutConfig(tp=2, dp=1)
    found = training_time(DENSE, run_config(), ALIKE, ROUND, layout)
    size = 4 * 256 * 872
    assert found.collectives == close(2 * 8 * size / 50e9 + 2 * 2 * 8 * 1e-3)
    # Over the network it takes ten times as long.
    apart = training_time(DENSE, run_config(), ALIKE, Machine(hardware=hardware(), gpus_per_node=1), layout)
    assert apart.collectives == close(2 * 8 * size / 5e9 + 2 * 2 * 8 * 1e-3)


def test_data_parallel_ranks_sum_gradients_and_gather_weights():
    """Of P numbers a rank of two sends half: 4 bytes of a gradient, 4 of a weight."""
    layout = LayoutConfig(dp=2)
    numbers = sum(stage_parameters(DENSE, layout, 0))
    found = optimizer_seconds(DENSE, run_config(), ROUND, layout, 0)
    assert found == close(8 * numbers / 2 / 50e9 + (36 * numbers / 2 + 4 * numbers) / 500e9)
    whole = run_config(learner={"optimizer": {"distributed": False}})
    assert optimizer_seconds(DENSE, whole, ROUND, layout, 0) == close(
        8 * numbers / 2 / 50e9 + 40 * numbers / 500e9
    )


def test_the_bubble_by_hand():
    """Two stages and two micro-batches: a stage works for two and waits for one, half of its time."""
    assert bubble_share(LayoutConfig(pp=2, dp=1), 2) == 1 / 2
    assert bubble_share(LayoutConfig(pp=4, vpp=2, dp=1), 8) == 3 / 16
    found = training_time(DENSE, run_config(), ALIKE, ROUND, LayoutConfig(pp=2, dp=1))
    assert found.bubble == close(max(found.stages) / 2)
    assert found.compute + found.collectives == close(max(found.stages))
    assert found.stages[1] > found.stages[0], "the last stage has the logits"


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (2, 1), (2, 4), (4, 4), (4, 9), (8, 3)])
def test_the_bubble_is_that_of_a_pipeline_that_is_played(pp, microbatches):
    """1F1B, event by event: a stage's next pass begins where both it and what it needs are ready. Forward takes 1,
    backward 2."""
    ends: dict[tuple[int, str, int], float] = {}
    orders = []
    for stage in range(pp):
        ahead = min(pp - 1 - stage, microbatches)
        order = [("f", i) for i in range(ahead)]
        for i in range(microbatches):
            order += [("f", ahead + i)] if ahead + i < microbatches else []
            order += [("b", i)]
        orders.append(order)
    free, places = [0.0] * pp, [0] * pp
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage in range(pp):
            if places[stage] == len(orders[stage]):
                continue
            kind, i = orders[stage][places[stage]]
            before = (stage - 1, "f", i) if kind == "f" else (stage + 1, "b", i)
            is_first = before[0] in (-1, pp)
            if not is_first and before not in ends:
                continue
            start = max(free[stage], 0.0 if is_first else ends[before])
            free[stage] = ends[stage, kind, i] = start + (1 if kind == "f" else 2)
            places[stage] += 1
    work = 3 * microbatches
    assert max(free) == close(work * (1 + bubble_share(LayoutConfig(pp=pp, dp=1), microbatches)))


def test_a_critic_trains_too():
    """As large as the policy, without logits; one pass before the update."""
    config = run_config(advantage={"type": "gae"})
    alone = training_time(DENSE, config, ALIKE, ROUND, LayoutConfig(dp=1))
    both = training_time(DENSE, config, ALIKE, ROUND, LayoutConfig(dp=1), critic=DENSE)
    load = whole_samples(8, 109, 100)
    forward = forward_flops(DENSE, LayoutConfig(dp=1), 0, load, output=False)
    assert both.score - alone.score == close(forward.total / 50e12)
    assert alone.compute < both.compute < 2 * alone.compute


def test_frozen_weights_have_no_gradients():
    """Backward has one product for two, of adapters by factors; merged ones take the gradient of the merged weight."""
    layout, load = LayoutConfig(dp=1), whole_samples(8, 109, 100)

    def of(**lora):
        config = run_config(learner={"lora": {"rank": 4, **lora}})
        return update_flops(DENSE, layout, 0, load, recompute="none", lora=config.learner.lora)

    whole = update_flops(DENSE, layout, 0, load, recompute="none")
    assert of(forward="factored").matrices * 3 == whole.matrices * 2
    assert of(forward="merged").matrices == whole.matrices
    assert of().output * 4 == whole.output * 3
    config = run_config(learner={"lora": {"rank": 4}})
    assert optimizer_seconds(DENSE, config, ROUND, layout, 0) < optimizer_seconds(
        DENSE, run_config(), ROUND, layout, 0
    )


# ---------------------------------------------------------------------------------------------------------------------
# the step


def estimate(config: RunConfig, layout: LayoutConfig, machine: Machine = ROUND, lengths: Lengths = ALIKE):
    return Estimator(DENSE, config, lengths, machine).step(layout, tp=1, replicas=1, memory=server(DENSE))


def test_a_step_is_the_sum_and_with_samples_ahead_the_longer_side():
    config, layout = run_config(), LayoutConfig(dp=1)
    step = estimate(config, layout)
    assert step.total == close(step.sampling.total + step.training.total + step.transfer)
    assert sum(step.parts().values()) == close(step.total)
    assert (step.server_waits, step.learner_waits) == (close(step.training.total), close(step.sampling.total))
    ahead = estimate(run_config(rollout={"max_staleness": 1}), layout)
    longer = max(ahead.sampling.total, ahead.training.total)
    assert ahead.total == close(longer + ahead.transfer)
    assert min(ahead.server_waits, ahead.learner_waits) == pytest.approx(0, abs=1e-12)


def test_the_transfer_by_hand():
    """All numbers, 4 bytes each: over NVLink within a node, over the network on two; ranks gather at 50 GB/s meanwhile."""
    size = 4 * sum(stage_parameters(DENSE, LayoutConfig(dp=1), 0))
    found = [
        transfer_seconds(DENSE, run_config(), ROUND, LayoutConfig(dp=1), num_gpus) for num_gpus in (8, 16)
    ]
    assert found == [close(size / 50e9), close(size / 5e9)]
    apart = Machine(hardware=hardware(network_gb_s=1000), gpus_per_node=8)
    assert transfer_seconds(DENSE, run_config(), apart, LayoutConfig(tp=2, dp=1), 16) == close(size / 50e9)


def test_the_span_of_a_group_is_its_ranks_in_megatrons_order():
    """By listing the ranks of rank 0's groups: tp varies fastest, then cp, dp, pp."""
    layout = LayoutConfig(tp=2, cp=2, pp=2, dp=3)
    sizes = {"tensor": 2, "context": 2, "data": 3, "pipeline": 2}
    places = [*itertools.product(range(2), range(3), range(2), range(2))]  # pp, dp, cp, tp
    axis = {"pipeline": 0, "data": 1, "context": 2, "tensor": 3}
    for group, size in sizes.items():
        ranks = [
            rank
            for rank, place in enumerate(places)
            if all(value == 0 for i, value in enumerate(place) if i != axis[group])
        ]
        assert len(ranks) == size
        assert max(ranks) < spanned(layout, group), group
        smallest = {"tensor": 1, "context": 2, "data": 8, "pipeline": 12}[group]
        assert max(ranks) == smallest


FASTER = {
    "memory_gb_s": {"memory_gb_s": 2000},
    "node_link_gb_s": {"node_link_gb_s": 200},
    "network_gb_s": {"network_gb_s": 20},
    "peak_tflops": {"peak_tflops": {"float32": 200, "bfloat16": 400, "float16": 400}},
    "attained": {"attained": 0.9},
    "collective_s": {"collective_s": 5e-4},
}
layouts = st.sampled_from(
    [
        LayoutConfig(dp=1),
        LayoutConfig(tp=2, dp=2),
        LayoutConfig(tp=2, sp=True, pp=2, dp=1),
        LayoutConfig(cp=2, dp=2),
        LayoutConfig(pp=4, dp=4),
    ]
)
staleness = st.sampled_from([{}, {"max_staleness": 2}])


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts, ahead=staleness, change=st.sampled_from([*FASTER]), per_node=st.sampled_from([1, 2, 8])
)
def test_faster_hardware_is_never_slower(layout, ahead, change, per_node):
    config = run_config(rollout=ahead)
    before = estimate(config, layout, Machine(hardware=hardware(), gpus_per_node=per_node))
    after = estimate(config, layout, Machine(hardware=hardware(**FASTER[change]), gpus_per_node=per_node))
    assert after.total <= before.total * (1 + 1e-12)
    for name, seconds in after.parts().items():
        assert seconds <= before.parts()[name] * (1 + 1e-12), name


@settings(max_examples=40, deadline=None)
@given(
    layout=layouts,
    prompt=st.integers(1, 50),
    response=st.integers(1, 99),
    more=st.integers(0, 50),
    spread=st.sampled_from([0.0, 0.6]),
)
def test_more_tokens_take_no_less(layout, prompt, response, more, spread):
    def seconds(p: int, r: int) -> float:
        lengths = Lengths(prompt=p, response=min(r, 100), longest=100, spread=spread)
        return estimate(run_config(), layout, lengths=lengths).total

    before = seconds(prompt, response)
    assert seconds(prompt + more, response) >= before * (1 - 1e-9)
    assert seconds(prompt, response + more) >= before * (1 - 1e-9)


def test_twice_the_work_of_a_step_takes_twice_the_training():
    """Without overheads and with full micro-batches: prompts doubled."""
    one = training_time(DENSE, run_config(), ALIKE, ROUND, LayoutConfig(tp=2, dp=1))
    two = training_time(
        DENSE, run_config(rollout={"prompts_per_step": 8}), ALIKE, ROUND, LayoutConfig(tp=2, dp=1)
    )
    assert two.compute == close(2 * one.compute)
    assert two.collectives == close(2 * one.collectives)
    assert two.optimizer == close(one.optimizer)


def test_an_estimator_that_is_asked_twice_says_the_same():
    estimator = Estimator(DENSE, run_config(), ALIKE, ROUND)
    pairs = [(LayoutConfig(dp=1), 1), (LayoutConfig(tp=2, dp=1), 1), (LayoutConfig(dp=1), 2)]
    steps = [estimator.step(layout, tp=1, replicas=n, memory=server(DENSE)).total for layout, n in pairs * 2]
    assert steps[:3] == steps[3:]
    assert len(set(steps)) == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (0.0123, "0.012"), (0.0996, "0.10"), (0.1, "0.10"), (1, "1.0"), (9.96, "10"), (12.4, "12"), (1234, "1,200")],
)  # fmt: skip
def test_seconds_have_two_digits(seconds, text):
    assert seconds_text(seconds) == text


def test_assumptions_say_the_lengths_and_what_is_left_out():
    ahead = run_config(
        rollout={"max_staleness": 2, "dynamic_sampling": {"type": "resample"}, "max_new_tokens": 200},
        learner={"share_prompts": True},
    )
    lengths = Lengths(prompt=10, response=100, longest=200, spread=0.4)
    said = "\n".join(assumptions(ahead, lengths, ROUND))
    for part in (
        "round: made",
        "memory 50%",
        "collective_s 0.001",
        "prompts of 10 tokens; responses of 100 tokens in the mean, lognormal with a spread of 0.4",
        "cut at 200",
        "max_staleness=2",
        "compute interrupted ones again",
        "computed once",
        "no group is sampled again",
    ):
        assert part in said, part
    plain = "\n".join(assumptions(run_config(), ALIKE, ROUND))
    assert "responses of 100 tokens each" in plain
    assert "every group has signal" in plain
    whole = run_config(learner={"skip_zero_gradients": False})
    assert "every group has signal" not in "\n".join(assumptions(whole, ALIKE, ROUND))
    assert not any(part in plain for part in ("max_staleness", "computed once", "sampled again"))


def test_the_description_of_two_cpu_cores_is_measured():
    found = read_hardware("cpu")
    assert found.name == "cpu" and "benchmarks/plan_time.py" in found.source


@pytest.mark.parametrize("name", [name for name in hardware_names() if name != "cpu"])
def test_descriptions_are_of_plausible_gpus(name):
    """A check of slips by a power of ten: Qwen2.5-7B decodes and trains at rates that such machines are known for."""
    found = read_hardware(name)
    assert found.name == name and "compared with no GPU" in found.source
    machine = Machine(hardware=found, gpus_per_node=8)
    qwen = read_architecture(read_hf_config(MODELS / "Qwen2.5-7B-Instruct"))
    config = run_config(model={"dtype": "bfloat16"}, rollout={"dtype": "bfloat16"})
    memory = rollout_memory(qwen, 1, dtype="bfloat16", gpu_bytes=int(found.memory_gib * GIB))
    one = decoder_of(qwen, config, machine, 1, memory).seconds(1, 100)
    assert 60 < 1 / one < 400, "tokens a second of one response"
    assert found.memory_gib > 70 and found.network_gb_s < found.node_link_gb_s < found.memory_gb_s
