"""A simulated step against the same step on real ranks, and against arithmetic."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.schema import RunConfig
from launch.commands.simulate import planned
from parallel.planning.architecture import architecture_of, padded_vocab_size
from parallel.planning.flops import forward_flops, update_flops
from parallel.planning.memory import OF_AN_UPDATE
from parallel.planning.simulated import MadeStep, Part, SimulatedRank
from parallel.planning.traffic import data_bytes, scored_passes, update_sent
from tests.launch.studies.simulated import DENSE, small_config, small_model
from tests.support.loads import whole_samples
from tests.support.megatron_workers import make_hf_model, run_ranks
from tests.support.moe_workers import make_moe_model
from tests.support.recurrent_models import make_recurrent_model
from tests.support.simulation_workers import simulate_all, work_step
from trainer.studies.simulation import _Sampler

BUDGET = 96
LAYOUTS = {
    "tp2 sp": {"tp": 2, "sp": True},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "experts ep2": {"dp": 2, "ep": 2},
}
FAMILIES = ("allreduce", "allgather", "reduce_scatter", "alltoall", "send", "recv", "broadcast")
RECURRENT = dict(
    num_hidden_layers=4, full_attention_interval=2, layer_types=["linear_attention", "full_attention"] * 2
)  # fmt: skip
LARGE = dict(
    hidden_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=8192,
)


def config_of(folder: Path, name: str) -> RunConfig:
    make = make_moe_model if "experts" in name else make_hf_model
    model = folder / name.replace(" ", "-")
    kind = "qwen3_moe" if "experts" in name else "qwen3"
    make(model, kind, num_hidden_layers=2)
    # float32: on CPU attention is in float32 whatever the model is.
    return small_config(model, "model.dtype=float32", "rollout.dtype=float32", budget=BUDGET, **LAYOUTS[name])


def sent(part: Part) -> Counter:
    """Bytes by kind of operation and group. Backends have their own names for one operation, and pack calls. How many tokens
    each expert gets is told in integers, which the real side does not count."""
    found: Counter = Counter()
    for c in part.collectives:
        (family,) = (family for family in FAMILIES if c.operation.startswith(family))
        if c.size > 1 and c.group != "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP":
            found[family, c.group] += c.bytes
    return found


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[str, RunConfig]:
    folder = tmp_path_factory.mktemp("models")
    large = small_model(folder / "large", **LARGE)
    sizes = {"tp": 2, "sp": True, "pp": 2, "dp": 2}
    others = {
        "large": small_config(large, "learner.logprob_chunk_tokens=256", budget=1024, **sizes),
        # Nearly all tokens are of responses, of which many ids are kept.
        "truncated": small_config(
            large,
            "learner.logprob_chunk_tokens=256",
            "rollout.max_new_tokens=511",
            "rollout.top_k=1024",
            "learner.optimizer.offload=true",
            budget=1024,
            **sizes,
        ),
        "dense": small_config(
            small_model(folder / "dense"),
            "advantage.type=gdpo",
            "reward={type: weighted, parts: {right: {type: countdown}, short: {type: overlong, buffer_tokens: 4}}}",
        ),
        "experts": small_config(small_model(folder / "experts", "qwen3_moe"), tp=2, sp=True, ep=2),
        "critic": small_config(
            small_model(folder / "critic"),
            "advantage.type=gae",
            "critic.warmup_steps=3",
            "correction=decoupled_geo_rs",  # which sequences it rejects depends on weights
        ),
        # Latent attention, and a pipeline whose last stage has one layer of three.
        "latent": small_config(
            make_moe_model(folder / "latent", "deepseek_v3", num_hidden_layers=3), tp=2, sp=True, pp=2
        ),
        # Samples of whole chunks.
        "recurrent": small_config(
            make_recurrent_model(folder / "recurrent", "qwen3_next", **RECURRENT),
            "rollout.max_new_tokens=127",
            budget=1024,
            tp=2,
            sp=True,
        ),
    }
    return {name: config_of(folder, name) for name in LAYOUTS} | others


@pytest.fixture(scope="module")
def simulated(configs) -> dict[tuple[str, int], SimulatedRank]:
    jobs = [
        *((name, rank) for name in LAYOUTS for rank in (0, 1)),
        ("large", 0),
        ("large", 4),
        ("truncated", 0),
        ("truncated", 4),
        ("dense", 0),
        ("experts", 0),
        ("critic", 0),
        ("latent", 0),
        ("latent", 2),
        ("recurrent", 0),
    ]
    return dict(zip(jobs, simulate_all([(configs[name], rank) for name, rank in jobs]), strict=True))


@pytest.fixture(scope="module")
def real(configs, tmp_path_factory) -> list[list[SimulatedRank]]:
    return run_ranks(work_step, 2, tmp_path_factory.mktemp("ranks"), [configs[name] for name in LAYOUTS])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_group_is_sent_what_real_ranks_send_it(name, rank, simulated, real):
    """Bytes of every kind of collective in every group, in the score pass, the update and the transfer."""
    here, there = simulated[name, rank], real[rank][list(LAYOUTS).index(name)]
    assert here.step == there.step
    assert here.buckets == there.buckets
    for part in ("logprobs", "update", "sync"):
        assert sent(here.parts[part]) == sent(there.parts[part]), part
    assert sum(sent(here.parts["update"]).values()) > 0


@pytest.mark.parametrize("name", ["large", "truncated"])
@pytest.mark.parametrize("number", [0, 4])
def test_memory_of_what_stays_is_the_plans_and_the_peak_is_near(name, number, simulated, configs):
    config, rank = configs[name], simulated[name, number]
    plan = planned(config, architecture_of(config.model.path), rank)
    at_start = rank.parts["start"].at_peak
    for name in ("parameters", "gradients", "optimizer"):
        assert at_start.get(name, 0) == pytest.approx(getattr(plan, name), rel=0.005, abs=2**17), name
    # Simulated, the optimizer's step is not one kernel: it holds a temporary of a parameter, the largest of which is a table.
    table = 4 * LARGE["vocab_size"] // config.layout.tp * LARGE["hidden_size"]
    step = plan.optimizer_step + table if config.learner.optimizer.offload else 0
    assert (plan.optimizer == 0) == config.learner.optimizer.offload
    update = plan.lasting + max(step, sum(getattr(plan, item) for item in OF_AN_UPDATE))
    # The gradients inside a layer, which are not planned, are more than the logits of so small a vocabulary; recipes are
    # within 6 % (simulated_recipes.md).
    assert 0.9 * update <= rank.parts["update"].peak <= 1.06 * update
    # The plan is of weights that are converted as they are sent, each large one into a buffer of its own.
    assert rank.parts["sync"].peak <= plan.lasting + plan.transfer


def test_flops_of_an_update_are_those_of_its_products(simulated, configs):
    """With recomputation each matrix of a layer is multiplied by the tokens four times, 2 FLOPs a number: forward, again,
    and twice backward. Of the output layer: logits of response tokens, again, and twice backward. Attention: two products
    over all pairs of a query and a key forward and again, five backward."""
    rank = simulated["dense", 0]
    step, d = rank.step, DENSE
    heads, dim = d["num_attention_heads"], d["head_dim"]
    layer = d["hidden_size"] * (heads + 2 * d["num_key_value_heads"]) * dim + heads * dim * d["hidden_size"]
    layer += 3 * d["hidden_size"] * d["intermediate_size"]
    pairs = step.samples * step.places * (step.places + 1) // 2
    attention = 2 * 2 * heads * dim * pairs
    layers = d["num_hidden_layers"] * (8 * layer * step.tokens + attention * 2 + attention * 5 // 2)
    output = padded_vocab_size(d["vocab_size"], 1) * d["hidden_size"]
    by_hand = step.microbatches * (layers + 8 * output * step.samples * step.response)
    assert rank.parts["update"].flops == by_hand == planned_flops(configs["dense"], rank)["update"]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, (0,)) for name in LAYOUTS if name != "cp2"),
        ("cp2", (0, 1)),
        ("large", (0,)),
        ("large", (4,)),
        ("experts", (0,)),
        ("latent", (0,)),
        ("latent", (2,)),
    ],
)
def test_flops_of_every_layout_are_the_plans(name, ranks, simulated, configs):
    """FLOP for FLOP: tensor, sequence, pipeline, data, context and expert parallelism, in float32 and bfloat16. Of tensor
    parallelism the first rank, which has no padding rows of the vocabulary. Context parallelism gives one rank more of a
    sample's response and another more of its prompt: there the sum of all ranks."""
    together = [simulated[name, rank] for rank in ranks]
    for part, flops in planned_flops(configs[name], together[0]).items():
        assert sum(rank.parts[part].flops for rank in together) == len(together) * flops, part


def test_flops_of_gated_delta_nets_are_nearly_the_plans(simulated, configs):
    """The first chunk of a sequence has no gradient of the state before it, which the plan does not know."""
    rank = simulated["recurrent", 0]
    assert rank.step.places % 64 == 0
    assert rank.parts["update"].flops == pytest.approx(
        planned_flops(configs["recurrent"], rank)["update"], rel=0.003
    )


def test_the_policy_is_trained_in_a_critics_warm_up_too(simulated, configs):
    """A critic's update is the policy's, without the output layer and with a head of one row: forward, and twice backward."""
    rank = simulated["critic", 0]
    step, policy = rank.step, planned_flops(configs["critic"], rank)["update"]
    output = (
        8 * padded_vocab_size(DENSE["vocab_size"], 1) * DENSE["hidden_size"] * step.samples * step.response
    )
    head = 6 * DENSE["hidden_size"] * step.tokens
    assert rank.parts["update"].flops == 2 * policy + step.microbatches * (head - output)


OF_PLAN = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "CONTEXT_PARALLEL_GROUP": "context",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "DATA_PARALLEL_GROUP_WITH_CP": "data",
}


@pytest.mark.parametrize(
    ("name", "group", "above"),
    [
        ("tp2 sp", "tensor", 0.16),  # two layers: the embedding and the logits count
        ("large", "tensor", 0.08),
        ("experts", "tensor", 0.15),
        ("latent", "tensor", 0.15),
        ("recurrent", "tensor", 0.15),
        ("latent", "pipeline", 0.01),
        ("pp2", "pipeline", 0.01),
        ("large", "pipeline", 0.01),
        ("cp2", "context", 0.01),
        ("experts ep2", "expert", 0.02),  # the router's weights
        ("experts", "expert", 0.02),
        ("dp2", "data", 0.03),  # padding
        ("cp2", "data", 0.03),
        ("large", "data", 0.001),
    ],
)
def test_what_a_rank_sends_is_the_plans_and_a_little_more(name, group, above, simulated, configs):
    """Bytes on the wire: in rings all-reduce sends 2 (n - 1) / n of a tensor, gathers and exchanges (n - 1) / n. A stage of two
    sends in one direction and receives in the other."""
    config, rank = configs[name], simulated[name, 0]
    found = 0.0
    for (family, of), size in sent(rank.parts["update"]).items():
        if OF_PLAN.get(of) == group:
            found += size * {"allreduce": 1.0, "send": 1.0, "recv": 1.0}.get(family, 0.5)
    architecture = architecture_of(config.model.path)
    if group == "data":
        plan = data_bytes(architecture, config, config.layout, rank.stage)
    else:
        tokens = rank.step.tokens // config.layout.cp
        of = (architecture, config.layout, rank.stage, tokens, config.model.dtype)
        passes = update_sent(*of, recompute=config.learner.recompute)
        plan = rank.step.microbatches * sum(each[group].bytes for each in passes)
    assert plan <= found <= (1 + above) * plan


def test_samples_share_no_prompt_where_the_vocabulary_is_smaller_than_their_number():
    step = MadeStep(microbatches=2, samples=4, places=6, response=3)
    learner: Any = SimpleNamespace(engine=SimpleNamespace(architecture=SimpleNamespace(vocab_size=3)))
    config: Any = SimpleNamespace(layout=SimpleNamespace(dp_size=1), compared_parts=None)
    (group,) = _Sampler(step, learner, config).next_groups().groups
    assert len({trajectory.turns[0].prompt_digest for trajectory in group.trajectories}) == 8


def planned_flops(config: RunConfig, rank: SimulatedRank) -> dict[str, int]:
    """Those of the passes before the update, and of the update."""
    architecture, step = architecture_of(config.model.path), rank.step
    load = whole_samples(step.samples, step.places, step.response)
    forward = forward_flops(architecture, config.layout, rank.stage, load)
    update = update_flops(architecture, config.layout, rank.stage, load, recompute=config.learner.recompute)
    return {
        "logprobs": step.microbatches * forward.total * scored_passes(config),
        "update": step.microbatches * update.total,
    }


def test_nothing_of_a_micro_batch_stays_after_it(simulated):
    """Also in layers with experts, whose dispatcher in Megatron keeps the last one's graph: the input of each layer and its
    gradient, 128 KiB here."""
    rank = simulated["experts", 0]
    after, start = rank.parts["checkpoint"].at_peak, rank.parts["start"].peak
    # Megatron's buffer for what sequence parallelism gathers.
    gathered = 2 * rank.step.tokens * DENSE["hidden_size"]
    assert after["activations"] <= gathered + 2**14
    assert rank.parts["checkpoint"].peak == start + after["activations"]
