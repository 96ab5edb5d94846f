"""Seconds of a step: by hand with round numbers, and relations that hold for any hardware."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.reading.hardware import hardware_names, read_hardware
from configs.schema.layout import LayoutConfig
from configs.schema.run import RunConfig
from parallel.planning.architecture import architecture_of
from parallel.planning.decoding import Lengths
from parallel.planning.machine import Machine, spanned
from parallel.planning.memory import GIB, stage_parameters
from parallel.planning.sampling_time import decoder_of
from parallel.planning.server_memory import rollout_memory
from parallel.planning.time import Estimator, assumptions, seconds_text, transfer_seconds
from parallel.planning.training_time import training_time
from tests.support.step_times import (
    ALIKE,
    DENSE,
    MODELS,
    ROUND,
    close,
    decoding_seconds,
    hardware,
    run_config,
    server,
)


def estimate(config: RunConfig, layout: LayoutConfig, machine: Machine = ROUND, lengths: Lengths = ALIKE):
    return Estimator(DENSE, config, lengths, machine).step(layout, tp=1, replicas=1, memory=server(DENSE))


def test_a_step_is_the_sum_and_with_samples_ahead_the_longer_side():
    config, layout = run_config(), LayoutConfig(dp=1)
    step = estimate(config, layout)
    assert step.total == close(step.sampling.total + step.training.total + step.transfer)
    assert sum(step.parts().values()) == close(step.total)
    assert step.server_waits == close(step.training.total)
    ahead = estimate(run_config(rollout={"max_staleness": 1}), layout)
    longer = max(ahead.sampling.total, ahead.training.total)
    assert ahead.total == close(longer + ahead.transfer)
    assert ahead.server_waits == pytest.approx(longer - ahead.sampling.total, abs=1e-12)


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
    assert found.name == name and "assumptions" in found.source
    machine = Machine(hardware=found, gpus_per_node=8)
    qwen = architecture_of(MODELS / "Qwen2.5-7B-Instruct")
    config = run_config(model={"dtype": "bfloat16"}, rollout={"dtype": "bfloat16"})
    memory = rollout_memory(qwen, 1, dtype="bfloat16", gpu_bytes=int(found.memory_gib * GIB))
    one = decoding_seconds(decoder_of(qwen, config, machine, 1, memory), 1, 100)
    assert 60 < 1 / one < 400, "tokens a second of one response"
    assert found.memory_gib > 70 and found.network_gb_s < found.node_link_gb_s < found.memory_gb_s
