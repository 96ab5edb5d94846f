"""Seconds of training, by hand with round numbers."""

from dataclasses import replace

import pytest

from configs.schema.layout import LayoutConfig
from parallel.planning.decoding import Lengths
from parallel.planning.flops import forward_flops, update_flops
from parallel.planning.machine import Machine
from parallel.planning.memory import stage_parameters
from parallel.planning.model_parts import Recurrent
from parallel.planning.training_time import (
    batch_of,
    bubble_share,
    optimizer_seconds,
    step_load,
    training_time,
)
from tests.support.loads import whole_samples
from tests.support.step_times import ALIKE, DENSE, ROUND, close, hardware, run_config


def test_the_batch_by_hand():
    """8 samples of 109 tokens for the model: 872, two micro-batches of 436."""
    batch = batch_of(run_config(), ALIKE, LayoutConfig(dp=1), [DENSE])
    assert (batch.load, batch.microbatches) == (whole_samples(8, 109, 100), 2)
    halved = batch_of(run_config(), ALIKE, LayoutConfig(dp=2), [DENSE])
    assert (halved.load, halved.microbatches) == (whole_samples(4, 109, 100), 1)
    assert (
        batch_of(run_config(learner={"minibatches": 2}), ALIKE, LayoutConfig(dp=1), [DENSE]).microbatches == 1
    )
    interleaved = LayoutConfig(dp=1, pp=4, vpp=2)
    assert batch_of(run_config(), ALIKE, interleaved, [DENSE]).microbatches == 4


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
    assert batch_of(shared, ALIKE, LayoutConfig(dp=1), [DENSE]).load.tokens == 4 * 10 + 8 * 99
    assert batch_of(shared, ALIKE, split, [DENSE]).load.tokens == 8 * 109
    nets = Recurrent(
        is_recurrent=(True, False) * 2, key_heads=2, value_heads=2, key_dim=8, value_dim=8, width=4
    )
    recurrent = replace(DENSE, recurrent=nets)
    for models in ([recurrent], [DENSE, recurrent]):  # all models get the same micro-batches
        assert batch_of(shared, ALIKE, LayoutConfig(dp=1), models).load.tokens == 8 * 109


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
    found = optimizer_seconds(DENSE, run_config(), ROUND, layout, 0, is_policy=True)
    assert found == close(8 * numbers / 2 / 50e9 + (36 * numbers / 2 + 4 * numbers) / 500e9)
    whole = run_config(learner={"optimizer": {"distributed": False}})
    assert optimizer_seconds(DENSE, whole, ROUND, layout, 0, is_policy=True) == close(
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
    assert optimizer_seconds(DENSE, config, ROUND, layout, 0, is_policy=True) < optimizer_seconds(
        DENSE, run_config(), ROUND, layout, 0, is_policy=True
    )
