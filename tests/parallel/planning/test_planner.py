"""The planner's answers for four public models, by arithmetic done by hand; its properties; and the command
as a user meets it.

Hand numbers below are in GB of 10^9 bytes; 80 GiB are 85.9 GB, of which the planner gives the learner 90 %:
77.3 GB. P is the number of parameters. A learner in bfloat16 holds 2 P / (tp pp) of weights, 4 P / (tp pp) of
gradients and, with the distributed optimizer, 12 P / world of optimizer state, whatever the layout (world =
tp pp dp).
"""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.layout import LayoutConfig, layout_text
from configs.schema.run import RunConfig
from parallel.planning.architecture import read_architecture, read_hf_config
from parallel.planning.layout import fitting_layouts, validate_layout, validate_rollout_layout
from parallel.planning.measured import NO_TABLE, Measured, by_rule, read_measured
from parallel.planning.memory import GIB, USABLE_SHARE, worst_stage
from parallel.planning.planner import AMPLE, FEW, Cluster, NothingFits, Plan, plan
from parallel.planning.reasons import reasons
from parallel.planning.traffic import traffic
from parallel.planning.work import work_of
from parallel.weights.hf_names import hf_shapes
from tests.support.command import tandem
from tests.support.model_folders import write_tokenizer, write_weights

ROOT = Path(__file__).resolve().parents[3]
COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False}
QWEN_7B, QWEN_32B, QWEN_72B, QWEN_235B, QWEN_30B = (
    read_hf_config(ROOT / "tests" / "model_configs" / name)
    for name in (
        "Qwen2.5-7B-Instruct",
        "Qwen2.5-32B",
        "Qwen2.5-72B-Instruct",
        "Qwen3-235B-A22B",
        "Qwen3-30B-A3B",
    )
)
USABLE = 77.3e9


def run_config(**changes) -> RunConfig:
    """64 prompts of 8 responses of at most 4096 tokens, micro-batches of 16384, layers computed again."""
    content = {
        "model": {"path": "unused"},
        "task": {"type": "countdown"},
        "rollout": {"prompts_per_step": 64, "group_size": 8, "max_new_tokens": 4096},
        "learner": {"token_budget": 16384, "recompute": "full"},
    }
    return RunConfig.model_validate(content | changes)


def cluster(num_gpus: int, gib: float = 80) -> Cluster:
    return Cluster(num_gpus=num_gpus, gpu_bytes=int(gib * GIB))


def pair(each: Plan) -> str:
    return f"{layout_text(each.learner)} | tp={each.rollout_tp} x {each.replicas}"


def ranked(hf_config: dict, config: RunConfig, on: Cluster, **options) -> list[Plan]:
    return plan(read_architecture(hf_config), config, on, **options)


def needs(hf_config: dict, **layout) -> int:
    """Bytes of the fullest rank of a layout that may not fit."""
    return worst_stage(
        read_architecture(hf_config), LayoutConfig(**layout), work_of(run_config(), "cuda")
    ).total


def gigabytes(size: float) -> float:
    return pytest.approx(size * 1e9, rel=0.01)


def test_qwen_7b_on_8_gpus():
    """P = 7.616 e9: tables 2 * 152064 * 3584 = 1.090 e9; 28 layers of qkv 3584 * 36 * 128 + 4608, projection
    3584^2, MLP 3 * 3584 * 18944 and norms 7168 = 233.06 e6.

    Four GPUs for the learner, four for servers, all with tp=1:
    - weights on one server GPU: 2 P = 15.2 GB; SGLang leaves 13,904 MiB = 14.6 GB alone; cache
      85.9 - 29.8 = 56.1 GB, of 2 * 28 * 4 * 128 * 2 = 57344 bytes a token: 0.978 M tokens. 512 responses on 4
      servers of 4096 tokens take 128 * 4096 * 57344 = 30.1 GB of it: 26.0 GB = 30 % of a GPU are free.
    - tp=1 pp=1 dp=4: 6 P + 12 P / 4 = 45.7 + 22.8 = 68.5 GB, and kept inputs of layers 28 * 16384 * 3584 * 2
      = 3.3 GB. Then either the logits: their weight's gradient, 152064 * 3584 * (4 + 2), which is more than the product,
      1024 * 152064 * 2, and 16384 * 3584 * 2, in sum 3.3 + 0.1 = 3.4 GB, with the final norm and its output,
      16384 * (2 * 2 * 3584 + 4) = 0.23 GB; or, later, one layer whole: norms and what they hand on
      2 * (2 * 2 * 3584 + 4), attention 2 * 128 * (2 * 28 + 4 + 36 + 28) + 4 * 28, MLP 3 * 2 * 18944, in sum 174,200 bytes a
      token: 2.9 GB. 75.5 GB fit into 77.3 GB, but hardly leave any free.
    - tp=1 pp=2 dp=2: half of the layers and one table on each stage, 3.808 e9: 22.8 + 22.8 = 45.7 GB fits.
    """
    best = ranked(QWEN_7B, run_config(), cluster(8))[0]
    assert pair(best) == "pp=2,dp=2 | tp=1 x 4"
    memory = best.learner_memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (
        gigabytes(7.616),
        gigabytes(15.23),
        gigabytes(22.85),
    )
    assert best.rollout_memory.weights == gigabytes(15.23) and best.rollout_memory.tokens == pytest.approx(
        978_000, rel=0.01
    )
    assert best.rollout_free == pytest.approx(0.302, abs=0.005)
    assert needs(QWEN_7B, dp=4) == gigabytes(68.5 + 3.3 + 3.4 + 0.23)
    assert USABLE > needs(QWEN_7B, dp=4) > 0.97 * USABLE > needs(QWEN_7B, pp=2, dp=2)
    # 28 heads, 4 key/value heads: 8 does not divide the heads, and 7 does not go with 4
    assert {each.learner.tp for each in ranked(QWEN_7B, run_config(), cluster(8))} <= {1, 2, 4}


def test_qwen_32b_on_32_gpus():
    """P = 32.76 e9: tables 1.557 e9; 64 layers of qkv 5120 * 56 * 128 + 7168, projection 5120^2, MLP 3 * 5120
    * 27648 and norms 10240 = 487.6 e6.

    Two nodes for the learner (world 16: 12 P / 16 = 24.6 GB of optimizer state), two for servers.
    - tp=8 pp=2: 6 P / 16 = 12.3 GB and 24.6 GB; two micro-batches in flight keep the inputs of 32 layers, 2 *
      32 * 16384 * 5120 * 2 = 10.7 GB, and one layer whole. 42 % of the GPU stays free, and 34 % on the server
      side, both ample.
    - tp=8 pp=1 dp=2: 6 P / 8 = 24.6, 24.6, 64 inputs 10.7: 59.9 GB and more: fits, but under 30 % stay free.
    - tp=4 pp=1 dp=4: 6 P / 4 = 49.1, 24.6, 10.7: 84.4 GB do not fit. tp=4 needs pp=2: 24.6 + 24.6 + 10.7.
    """
    plans = ranked(QWEN_32B, run_config(), cluster(32))
    assert pair(plans[0]) == "tp=8,pp=2 | tp=8 x 2"
    memory = plans[0].learner_memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (
        gigabytes(4.095),
        gigabytes(8.19),
        gigabytes(24.57),
    )
    assert 10.7e9 < memory.activations < 10.7e9 + 2e9
    assert plans[0].free > AMPLE
    fits = {pair(each) for each in plans}
    assert "tp=8,dp=2 | tp=8 x 2" in fits and "tp=4,pp=2,dp=2 | tp=4 x 4" in fits
    assert "tp=4,dp=4 | tp=4 x 4" not in fits
    assert needs(QWEN_32B, tp=4, dp=4) > 84.4e9 > USABLE > needs(QWEN_32B, tp=8, dp=2) > 59.9e9


def test_qwen_72b_on_64_gpus():
    """P = 72.71 e9: tables 2.491 e9; 80 layers of qkv 8192 * 80 * 128 + 10240, projection 8192^2, MLP 3 *
    8192 * 29568 and norms 16384 = 877.7 e6.

    - Half of the GPUs for the learner (world 32): tp=8 dp=4 has 6 P / 8 = 54.5 GB, 12 P / 32 = 27.3 GB and 80
      inputs of 16384 * 8192 * 2 = 0.27 GB = 21.5 GB: 103 GB do not fit. tp=8 pp=4 does: 20 layers and one
      table over 8 are (17.55 + 1.25) / 8 = 2.350 e9: 14.1 and 28.2 GB, and 4 in flight * 20 inputs = 21.5 GB:
      63.8 GB.
    - Five nodes for the learner: tp=8 pp=5 (80 = 5 * 16): (14.04 + 1.25) / 8 = 1.911 e9: 11.5 + 22.9 GB, and
      5 * 16 * 0.27 = 21.5 GB, in sum 55.9 GB; three servers of tp=8 with 18.2 GB of weights per GPU have
      room too. More is free than above, but 40 GPUs to 24 is no even division, so this is later.
    """
    plans = ranked(QWEN_72B, run_config(), cluster(64))
    assert pair(plans[0]) == "tp=8,pp=4 | tp=8 x 4"
    memory = plans[0].learner_memory
    (five,) = (each for each in plans if pair(each) == "tp=8,pp=5 | tp=8 x 3")
    assert five.free > plans[0].free
    assert (memory.lasting, five.learner_memory.lasting) == (
        gigabytes(14.1 + 28.2),
        gigabytes(11.5 + 22.9),
    )
    assert 21.4e9 < memory.activations < 21.5e9 + 3e9
    assert plans[0].rollout_memory.weights == gigabytes(2 * 72.71 / 8)
    assert needs(QWEN_72B, tp=8, dp=4) > 103e9
    assert all(each.learner.pp > 1 for each in plans if not each.learner.sp)


def test_qwen_235b_on_128_gpus():
    """P = 235.1 e9, of which experts: 94 layers * 128 * 3 * 4096 * 1536 = 227.1 e9. The least is sent by 8 stages, seven of 12
    layers and one of 10, without copies of the learner. By hand here: 2 stages of 47.

    A server: 470 GB of weights over tp=4 are 117 GB a GPU, over tp=8 58.8 GB: only tp=8 fits (a node). Of 4
    key/value heads each is on two ranks: 2 * 94 * 128 * 2 = 48128 bytes a token; 85.9 - 16.1 - 59.0 =
    10.9 GB of cache, 226,000 tokens. The learner with the same tp=8, on 64 GPUs; experts need sp. Experts are never
    split by tp, so ep counts:
    - pp=2 dp=4 ep=32 (of the stage's 32 ranks): 4 experts in each of 47 layers, 4 * 47 * 18.87 e6 = 3.548 e9;
      attention 71.3 e6 / 8 and router 0.52 e6 and norms, 9.45 e6 * 47 = 0.444 e9, and a table of 0.622 e9 /
      8: 4.070 e9 on a rank. Weights and gradients 6 * 4.07 = 24.4 GB; optimizer 12 * (0.522 / 4 + 3.548 / 1)
      = 44.1 GB, since no other rank has these experts. 68.6 GB fit.
    - pp=2 dp=4 ep=16: 7.097 e9 of experts on a rank: 6 * 7.62 = 45.7 and 12 * (0.13 + 7.097 / 2) = 44.1 GB:
      89.8 GB do not fit.
    """
    plans = ranked(QWEN_235B, run_config(), cluster(128))
    assert pair(plans[0]) == "tp=8,pp=8,sp,ep=8 | tp=8 x 8"
    (best,) = (each for each in plans if pair(each) == "tp=8,pp=2,sp,ep=32,dp=4 | tp=8 x 8")
    assert {each.rollout_tp for each in plans} == {8}
    memory = best.learner_memory
    assert (memory.parameters + memory.gradients, memory.optimizer) == (gigabytes(24.4), gigabytes(44.1))
    assert best.rollout_memory.weights == gigabytes(58.96) and best.rollout_memory.kv_bytes_per_token == 48128
    assert best.rollout_memory.tokens == pytest.approx(226_000, rel=0.01)
    layout = dict(tp=8, sp=True, pp=2, dp=4)
    assert needs(QWEN_235B, ep=16, **layout) > 89.8e9 > USABLE > needs(QWEN_235B, ep=32, **layout) > 68.6e9
    assert all(128 % each.learner.ep == 0 for each in plans)
    assert not any(each.learner.tp > 1 and not each.learner.sp for each in plans)
    # same tp first: tp=4 with a server's tp=8 comes after
    assert [each.learner.tp == 8 for each in plans] == sorted(
        (each.learner.tp == 8 for each in plans), reverse=True
    )


def test_qwen_30b_on_32_gpus():
    """P = 30.53 e9: tables 2 * 151936 * 2048 = 0.622 e9; 48 layers of 128 experts of 3 * 2048 * 768, router
    2048 * 128, qkv 2048 * 40 * 128 and projection 4096 * 2048 = 623.1 e6.

    Responses of at most 8192 tokens, 512 at once. A server of tp=1: 85.9 - 61.1 - 14.6 = 10.3 GB of cache, of
    2 * 48 * 4 * 128 * 2 = 98304 bytes a token: 104,000 tokens, which are 12.8 responses, of the 32 that each of
    16 servers is asked for 39 %. So few are not worth a GPU, though tp=1 on both sides has the least
    mismatch: such pairs come last. A server of tp=2 has 85.9 - 30.5 - 14.7 = 40.7 GB, of 49152 bytes a token:
    827,000 tokens, or 100 responses.
    """
    rollout, learner = (
        {"prompts_per_step": 128, "group_size": 16, "max_new_tokens": 8192},
        {"token_budget": 24576, "recompute": "full"},
    )
    config = run_config(rollout=rollout, learner=learner)
    plans = ranked(QWEN_30B, config, cluster(32))
    few = [each.rollout_tp == 1 for each in plans]
    assert few == sorted(few) and set(few) == {False, True}
    first = few.index(True)
    assert (plans[first].learner.world_size, plans[first].replicas) == (16, 16)
    assert (
        reasons(plans)[first]
        == "servers hardly used: a cache holds 12 responses at full length, 39% of the samples in flight"
    )
    assert {each.held for each in plans if each.rollout_tp == 2} == {100}


def test_a_cache_that_is_too_small_for_all_samples_is_said_to_hold_a_part_of_them():
    """Qwen2.5-7B on 3 GPUs, one of them a server's: of 0.978 M tokens (above), 238 responses of 4096, and 512
    are sampled at once."""
    plans = ranked(QWEN_7B, run_config(), cluster(3))
    assert plans[0].replicas == plans[0].rollout_tp == 1
    assert "; a cache holds 238 responses at full length, 46% of the samples in flight; " in reasons(plans)[0]


def test_the_fuller_side_is_named():
    """Qwen2.5-7B by the hand numbers above: with pp=2 dp=2 servers of tp=1 x 4 have less free, 30 %; with dp=4 the learner
    has, 1 - 75.5 / 85.9 = 12 %."""
    plans = ranked(QWEN_7B, run_config(), cluster(8))
    (of_learner,) = (each for each in plans if pair(each) == "dp=4 | tp=1 x 4")
    assert "; 30% free on the servers' GPUs; collectives of " in reasons(plans)[0]
    assert "; 12% free on the learner's GPUs; collectives of " in reasons([of_learner])[0]
    assert reasons([plans[0], of_learner])[1] == "less memory free: 12% free on the learner's GPUs"


def colocated(**changes) -> RunConfig:
    return run_config(launch={"placement": "colocated"}, **changes)


def test_turns_by_hand():
    """Qwen2.5-7B on 4 GPUs that both sides have in turns, with the numbers above. The learner of dp=4 takes 75.5 GB in its
    turn, and servers of tp=1 have 30 % free in theirs. While weights are sent it holds 68.5 GB and two buffers of 512 MiB
    beside a server's 15.2 GB: 84.8 GB or 79.0 GiB. That fits into 80 GiB, and not into 78.9, though its own turn does:
    90 % of 78.9 GiB are 76.2 GB.
    """
    plans = ranked(QWEN_7B, colocated(), cluster(4))
    assert all(each.learner.world_size == each.rollout_gpus == 4 for each in plans)
    (found,) = (each for each in plans if pair(each) == "dp=4 | tp=1 x 4")
    assert found.both_free == pytest.approx(1 - (68.5 + 1.07 + 15.23) / 85.9, abs=0.002)
    assert found.rollout_free == pytest.approx(0.303, abs=0.005)
    assert "; 1% free between turns; " in reasons([found])[0]
    smaller = {pair(each) for each in ranked(QWEN_7B, colocated(), cluster(4, 78.9))}
    assert "dp=4 | tp=1 x 4" not in smaller and "dp=4 | tp=2 x 2" in smaller
    assert "dp=4 | tp=1 x 4" in {pair(each) for each in ranked(QWEN_7B, run_config(), cluster(8, 78.9))}


def test_turns_that_do_not_fit_say_what_both_sides_hold():
    """On one GPU: 18 P + 2 P + 1.07 GB = 153.4 GB = 143 GiB."""
    with pytest.raises(
        NothingFits, match="both hold at least 143 GiB of a GPU between their turns"
    ) as caught:
        ranked(QWEN_7B, colocated(), cluster(1))
    assert "nothing fits on 1 GPU of" in str(caught.value)
    assert "a server of rollout.tp=1 has" in str(caught.value), "none of more ranks than there are GPUs"


def test_more_gpus_or_other_settings_are_named_where_nothing_fits():
    with pytest.raises(NothingFits) as caught:
        ranked(QWEN_32B, run_config(learner={"token_budget": 16384, "recompute": "none"}), cluster(16))
    said = str(caught.value)
    for part in (
        "nothing fits on 16 GPUs of 80.0 GiB",
        "the smallest learner (tp=8,sp) needs",
        "72.0 GiB are usable",
    ):
        assert part in said
    fixes = said.rpartition("use ")[2].split(" or ")
    assert fixes, said
    for fix in fixes:
        changed, where = run_config(learner={"token_budget": 16384, "recompute": "none"}), cluster(16)
        if fix.startswith("learner."):
            path, _, value = fix.removeprefix("learner.").partition("=")
            *blocks, key = path.split(".")
            learner = {"token_budget": 16384, "recompute": "none"}
            inner: dict = learner
            for block in blocks:
                inner = inner.setdefault(block, {})
            inner[key] = yaml.safe_load(value)
            changed = run_config(learner=learner)
        elif fix.startswith("GPUs of"):
            where = cluster(16, float(fix.split()[2]))
        else:
            where = cluster(int(fix.split()[0]))
        assert ranked(QWEN_32B, changed, where), fix


def test_the_server_that_is_named_has_the_least_weights_where_none_has_room():
    with pytest.raises(NothingFits, match=r"a server of rollout\.tp=8 has .* and room for 0 tokens"):
        ranked(QWEN_32B, run_config(), cluster(16, 6))


SMALL = COMMON | {
    "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 2, "intermediate_size": 768,
}  # fmt: skip
SMALL_MOE = SMALL | {
    "model_type": "qwen3_moe",
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
models = st.sampled_from(
    [SMALL, SMALL_MOE, SMALL | {"num_attention_heads": 12, "tie_word_embeddings": True}, QWEN_7B]
)
gpus = st.sampled_from([2, 3, 4, 6, 8, 16, 24])
tries = settings(max_examples=40, deadline=None)


def plans_of(model: dict, num_gpus: int, gib: float, **changes) -> list[Plan]:
    try:
        return ranked(model, run_config(**changes), cluster(num_gpus, gib))
    except NothingFits:
        return []


@tries
@given(model=models, num_gpus=gpus, gib=st.floats(1, 100))
def test_every_plan_is_valid_fits_and_uses_all_gpus(model, num_gpus, gib):
    where, config = cluster(num_gpus, gib), run_config()
    for each in plans_of(model, num_gpus, gib):
        of_servers = each.rollout_tp * each.replicas
        validate_layout(model, each.learner, num_processes=num_gpus - of_servers)
        validate_rollout_layout(model, each.rollout_tp)
        assert each.learner_memory.total <= USABLE_SHARE * where.gpu_bytes
        assert each.rollout_memory.tokens >= config.learner.token_budget
        assert 8 % each.learner.tp == 8 % each.rollout_tp == 0
        assert num_gpus <= 8 or of_servers % 8 == 0
        # the config that the plan makes is a config
        servers = {"tp": each.rollout_tp, "replicas": each.replicas}
        run_config(layout=each.learner.model_dump(), rollout=config.rollout.model_dump() | servers)


@tries
@given(model=models, num_gpus=gpus, gib=st.floats(1, 100), more=st.floats(0, 100))
def test_more_memory_removes_no_plan(model, num_gpus, gib, more):
    before, after = ({pair(each) for each in plans_of(model, num_gpus, size)} for size in (gib, gib + more))
    assert before <= after


@tries
@given(model=models, num_gpus=gpus, gib=st.floats(1, 100))
def test_the_order_is_total_and_stable(model, num_gpus, gib):
    plans = plans_of(model, num_gpus, gib)
    keys = [each.rank_key for each in plans]
    assert all(a < b for a, b in itertools.pairwise(keys))
    assert [pair(each) for each in plans] == [pair(each) for each in plans_of(model, num_gpus, gib)]
    said = reasons(plans)
    assert len(said) == len(plans) and all(said)
    assert not re.search(r"-\d+%", " ".join(said)), "nothing is less than empty"


@tries
@given(model=models, num_gpus=gpus, gib=st.floats(1, 100))
def test_alike_beats_apart_and_no_sp_beats_sp_and_halves_beat_other_divisions(model, num_gpus, gib):
    """The order of the issue, from the sizes themselves; of pairs whose servers have room for few responses,
    after all others."""
    plans = plans_of(model, num_gpus, gib)
    few = [each.rollout_memory.tokens // 4096 < min(FEW, -(-512 // each.replicas)) for each in plans]
    assert few == sorted(few)
    for kind in (False, True):
        ranks = [
            (each.learner.tp, each.rollout_tp, each.learner.sp)
            for each, is_few in zip(plans, few, strict=True)
            if is_few == kind
        ]
        apart = [tp != rollout_tp for tp, rollout_tp, _ in ranks]
        assert apart == sorted(apart)
        alike = [each for each, is_few in zip(plans, few, strict=True) if is_few == kind]
        for _, group in itertools.groupby(alike, lambda each: by_rule(each.pair)):
            differences = [abs(num_gpus - 2 * each.rollout_tp * each.replicas) for each in group]
            assert differences == sorted(differences)
        for sizes in {rank[:2] for rank in ranks}:
            with_sp = [sp for *mine, sp in ranks if tuple(mine) == sizes]
            assert with_sp == sorted(with_sp)


def read_table(folder: Path, *rows: tuple) -> Measured:
    """Of (learner, rollout, max_mean) and, where there is a fourth, max_mean_se."""
    names = ("learner", "rollout", "max_mean", "max_mean_se")
    (folder / "measured.json").write_text(
        json.dumps({"pairs": [dict(zip(names, row, strict=False)) for row in rows]})
    )
    return read_measured(folder / "measured.json")


def pairs_in_order(measured: Measured) -> list[tuple[int, bool, int]]:
    return list(
        dict.fromkeys(each.pair for each in ranked(QWEN_7B, run_config(), cluster(8), measured=measured))
    )


def test_measured_numbers_decide_between_measured_pairs(tmp_path):
    """tp=2 with sp on both sides measured least, tp=1 with tp=1 most: against the rule."""
    measured = read_table(
        tmp_path,
        ("tp=2,sp", "tp=2", 0.01),
        ("tp=2,sp,pp=2", "tp=2", 0.02),
        ("tp=1", "tp=1", 0.4),
        ("tp=2", "tp=1", 0.03),
    )
    assert (
        measured.values == {(2, True, 2): 0.02, (1, False, 1): 0.4, (2, False, 1): 0.03}
        and measured.step == 0
    )
    order = pairs_in_order(measured)
    assert [pair for pair in order if pair in measured.values] == [(2, True, 2), (2, False, 1), (1, False, 1)]
    # what was not measured: same tp without sp is no worse than (2, True, 2) by rule, tp=1 | tp=2 the like of
    # tp=2 | tp=1
    places = [
        order.index(pair)
        for pair in [(2, False, 2), (2, True, 2), (2, False, 1), (1, False, 1), (2, True, 1)]
    ]
    assert places == sorted(places)
    plans = ranked(QWEN_7B, run_config(), cluster(8), measured=measured)
    assert any("measured mismatch 0.4" in text for text in reasons(plans))
    assert any("by rule (this is not in the measured table): TP sizes" in text for text in reasons(plans))


def test_a_measured_pair_comes_not_before_one_that_the_rule_prefers(tmp_path):
    """Only tp=1 | tp=2 measured: same tp stays first, and the table changes nothing."""
    assert pairs_in_order(read_table(tmp_path, ("tp=1", "tp=2", 0.4)))[0][::2] == (1, 1)
    assert [by_rule(pair) for pair in pairs_in_order(read_table(tmp_path, ("tp=1", "tp=2", 0.4)))] == [
        by_rule(pair) for pair in pairs_in_order(NO_TABLE)
    ]


def test_values_within_two_standard_errors_are_equal(tmp_path):
    """0.24 and 0.26 with errors of at most 0.05 are both 0.2, two steps of 0.1 that is; then the rule
    decides: no sp first."""
    rows = [("tp=2", "tp=2", 0.24, 0.01), ("tp=2,sp", "tp=2", 0.16, 0.05), ("tp=1", "tp=1", 0.36, None)]
    order = pairs_in_order(read_table(tmp_path, *rows))
    assert [pair for pair in order if pair[0] == pair[2] <= 2] == [(2, False, 2), (2, True, 2), (1, False, 1)]
    exact = pairs_in_order(read_table(tmp_path, *(row[:3] for row in rows)))
    assert [pair for pair in exact if pair in [(2, False, 2), (2, True, 2)]] == [(2, True, 2), (2, False, 2)]


some_pairs = st.tuples(st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([1, 2, 4]))


@given(
    values=st.dictionaries(some_pairs, st.floats(0, 1)),
    step=st.sampled_from([0.0, 0.1]),
    first=some_pairs,
    second=some_pairs,
)
def test_table_and_rule_never_contradict_an_order_that_one_of_them_gives_alone(values, step, first, second):
    measured = Measured(values=values, step=step)
    keys = [(measured.expected(pair), *by_rule(pair)) for pair in (first, second)]
    if first in values and second in values and values[first] < values[second]:
        assert keys[0][0] <= keys[1][0]
    if first not in values and by_rule(first) < by_rule(second):
        assert keys[0] < keys[1]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"pairs": [{"learner": "tp=2"}]}', '{"pairs": [{"learner": "tp=x", "rollout": "", "max_mean": 1}]}',
     '{"pairs": [{"learner": "tp=1", "rollout": "tp=1", "max_mean": NaN}]}'],
)  # fmt: skip
def test_a_table_that_is_none_is_named(tmp_path, content):
    (tmp_path / "m.json").write_text(content)
    with pytest.raises(ValueError, match=r"m\.json is no table of `tandem mismatch`"):
        read_measured(tmp_path / "m.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_measured(tmp_path / "none.json")


def test_traffic_by_hand():
    """SMALL on tp=2 dp=2 pp=2: 512 responses of 4096 tokens, N = 2^20 on each rank; b H N = 2 * 256 * 2^20 =
    512 MiB = h."""
    config, h, architecture = run_config(), 2**29, read_architecture(SMALL)
    found = traffic(architecture, config, LayoutConfig(tp=2, pp=2, dp=2))
    # 3 layers of a stage * 2 all-reduces * (forward, again, backward) * 2 (2 - 1) / 2
    assert found.tensor == 3 * 2 * 3 * h
    assert found.pipeline == 2 * h
    assert found.expert == 0
    split = traffic(architecture, config, LayoutConfig(tp=2, sp=True, pp=2, dp=2))
    assert (split.tensor, split.pipeline) == (3 * 2 * 3.5 * h, h)
    # a stage: three layers (256 * (8 + 4) * 32 + 8 * 32 * 256 + 3 * 256 * 768) / 2 and norms 512 + 64, a
    # table 500 * 256; the last stage has the final norm too
    of_rank = 3 * ((98304 + 65536 + 589824) // 2 + 576) + 128000 + 256
    assert found.data == (4 + 2) * of_rank // 2
    # whole, with norms once
    assert found.transfer == 2 * (3 * (98304 + 65536 + 589824 + 576) + 256000 + 256)
    assert (
        traffic(architecture, run_config(kl={"coefficient": 0.1}), LayoutConfig(tp=2, pp=2, dp=2)).pipeline
        == 3 * h
    )
    adapted = run_config(learner={"token_budget": 16384, "recompute": "full", "lora": {"rank": 4}})
    adapted_traffic = traffic(architecture, adapted, LayoutConfig(tp=2, pp=2, dp=2))
    # qkv 256 -> (8 + 4) * 32 / 2, proj 256 / 2 -> 256, fc1 256 -> 768, fc2 768 / 2 -> 256
    adapters = 3 * 4 * ((256 + 192) + (128 + 256) + (256 + 768) + (384 + 256))
    assert adapted_traffic.data == (4 + 2) * adapters // 2
    assert (adapted_traffic.transfer, adapted_traffic.tensor) == (found.transfer, found.tensor)


def test_traffic_of_split_sequences_by_hand():
    """SMALL on cp=4: N = 2^19 tokens on each rank; keys and values of 2 heads of 32 numbers of 2 bytes are 256
    bytes a token, gathered from 3 ranks of 4 in 6 layers: forward, again, and their gradients."""
    architecture, config = read_architecture(SMALL), run_config()
    found = traffic(architecture, config, LayoutConfig(cp=4, dp=1))
    assert found.context == 6 * 256 * 2**21 * 3 // 4 * 3
    assert found.tensor == found.pipeline == 0
    copies = traffic(architecture, config, LayoutConfig(dp=4))
    assert (copies.context, copies.data, copies.transfer) == (0, found.data, found.transfer)


def long_responses(token_budget: int) -> RunConfig:
    rollout = {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": token_budget - 1024}
    return run_config(rollout=rollout, learner={"token_budget": token_budget, "recompute": "full"})


def test_long_responses_are_split():
    """Qwen2.5-7B with sequences of 131072 tokens on 16 GPUs of 80 GiB: a layer computed again takes 174,200
    bytes a token, 22.8 GB, and the inputs of 28 layers 2 * 3584 bytes each, 26.3 GB. Beside 45.7 GB of weights and
    gradients a rank without cp has no room, also with half of the layers: 22.8 GB, and two micro-batches in flight.
    """
    config = long_responses(131072)
    hf_config = QWEN_7B | {"max_position_embeddings": 131072}
    plans = ranked(hf_config, config, cluster(16))
    assert pair(plans[0]) == "pp=2,cp=2,dp=2 | tp=1 x 8"
    assert not any(each.learner.cp == each.learner.tp == 1 for each in plans)
    # Where there is room without it, cp sends more and comes later.
    assert ranked(QWEN_7B, run_config(), cluster(16))[0].learner.cp == 1


def test_traffic_of_experts_by_hand():
    """SMALL_MOE on tp=2 sp, dp=2, ep=4: N = 2^20, of which each rank routes a half; 6 layers, 2 experts a
    token, 3 of 4 parts leave."""
    found = traffic(read_architecture(SMALL_MOE), run_config(), LayoutConfig(tp=2, sp=True, dp=2, ep=4))
    assert found.expert == 6 * 2 * 2 * 2**28 * 3 // 4 * 3
    assert found.tensor == 6 * 3.5 * 2**29  # attention's alone
    # the experts of a rank are on no other
    shared = 6 * ((98304 + 65536) // 2 + 576 + 256 * 12) + 2 * 500 * 256 + 256
    assert found.data == 6 * shared // 2


def test_the_busiest_stage_counts():
    """The first of two stages has a dense layer in the place of one with experts."""
    moe = read_architecture(SMALL_MOE | {"mlp_only_layers": [0]})
    layout = LayoutConfig(tp=2, sp=True, pp=2, dp=2, ep=4)
    assert moe.experts is not None and moe.experts.is_sparse == (False, *[True] * 5)
    assert traffic(moe, run_config(), layout).expert == 3 * 2 * 2 * 2**28 * 3 // 4 * 3


def test_a_plan_fits_the_critic_too():
    """Of its 5 layers four stages would have 2, 2, 1 and none."""
    config = run_config(advantage={"type": "gae"}, critic={"model": {"path": "unused"}})
    assert {p.learner.pp for p in ranked(QWEN_7B, run_config(), cluster(16))} == {1, 2, 4}
    with_critic = ranked(
        QWEN_7B, config, cluster(16), critic=read_architecture(QWEN_7B | {"num_hidden_layers": 5})
    )
    assert {p.learner.pp for p in with_critic} == {1, 2}


def write_config(folder: Path, hf_config: dict) -> Path:
    """A run whose model folder has a config.json and nothing else."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(hf_config))
    content = run_config().model_dump(mode="json", include={"task", "rollout", "learner"}) | {
        "model": {"path": "model"}
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return folder / "run.yaml"


def test_the_command_prints_a_table_and_yaml_to_paste(tmp_path):
    write_config(tmp_path, QWEN_7B)
    done = tandem("plan", "run.yaml", "--gpus", "8", "--gpu-memory", "80", "--top", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "same TP 1 on both sides, no SP" in done.stdout
        and "│ 3 " in done.stdout
        and "│ 4 " not in done.stdout
    )
    pasted = yaml.safe_load(done.stdout[done.stdout.index("layout:") :])
    assert pasted["layout"] == {"tp": 1, "pp": 2, "vpp": 1, "sp": False, "cp": 1, "ep": 1, "dp": 2}
    assert pasted["rollout"] == {"tp": 1, "replicas": 4}
    assert pasted["learner"] == {"token_budget": 16384, "logprob_chunk_tokens": 1024, "recompute": "full"}
    (tmp_path / "planned.yaml").write_text(yaml.safe_dump({"extends": "run.yaml"} | pasted))
    checked = tandem("plan", "planned.yaml", "--gpus", "8", "--gpu-memory", "80", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "2", "--gpu-memory", "24"], ["nothing fits on 2 GPUs of 24.0 GiB", "use "]),
        (["--gpus", "12", "--gpu-memory", "80"], ["--gpus 12", "multiple"]),
        (
            ["--gpus", "8", "--gpu-memory", "80", "--measured", "none.json"],
            ["tandem: --measured none.json: cannot be read"],
        ),
        (
            ["--gpus", "8", "--gpu-memory", "80", "rollout.server_args.mem-fraction-static=much"],
            [
                "run.yaml: rollout.server_args.mem-fraction-static='much' is no share of a GPU; give a number between 0 and 1"
            ],
        ),
        (["--gpus", "8", "--gpu-memory", "80", "model.path=nowhere"], ["nowhere", "config.json"]),
        (
            ["--gpus", "8", "--gpu", "h100", "model.path=models/Qwen3-235B-A22B"],
            [
                "model.path=models/Qwen3-235B-A22B: cannot read config.json (No such file or directory); "
                "nothing is downloaded automatically: "
                "`hf download Qwen/Qwen3-235B-A22B config.json --local-dir models/Qwen3-235B-A22B`"
            ],
        ),
        (
            ["--gpus", "8", "--gpu", "h100", "model.path=some/where"],
            ["`hf download some/where config.json --local-dir models/where`, then model.path=models/where"],
        ),
        (["--gpus", "1", "--gpu-memory", "80"], ["--gpus"]),
        # It would take long, and stand for no cluster.
        (
            ["--gpus", "1000000", "--gpu-memory", "80"],
            ["--gpus", "equal to 100000 "],
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, arguments, said):
    write_config(tmp_path, QWEN_7B)
    done = tandem("plan", "run.yaml", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    for part in said:
        assert part in done.stderr, done.stderr


def test_the_configs_own_layout_does_not_matter(tmp_path):
    """A dp that no minibatch of the config divides by."""
    write_config(tmp_path, QWEN_7B)
    done = tandem("plan", "run.yaml", "--gpus", "8", "--gpu-memory", "80", "layout.dp=7", cwd=tmp_path)
    assert done.returncode == 0 and "same TP 1 on both sides" in done.stdout, done.stderr


def test_equal_plans_are_said_to_be_equal():
    first, *_ = ranked(QWEN_7B, run_config(), cluster(8))
    assert reasons([first, first])[1] == "equal in all of this; ordered by name"


def test_a_config_without_a_rollout_is_refused(tmp_path):
    done = tandem(
        "plan",
        str(ROOT / "configs/recipes/countdown_tiny_sft.yaml"),
        "--gpus",
        "8",
        "--gpu-memory",
        "80",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and "kind: sft has no rollout to plan for" in done.stderr


def test_dry_run_says_what_a_rank_holds(tmp_path):
    write_config(tmp_path, SMALL | {"architectures": ["Qwen3ForCausalLM"]})
    # What a run needs beside config.json, unlike a plan.
    write_weights(tmp_path / "model" / "model.safetensors", hf_shapes(read_architecture(SMALL)))
    write_tokenizer(tmp_path / "model")
    done = tandem("train", "run.yaml", "--dry-run", "task.type=countdown", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "# memory of a learner rank: " in done.stdout and "# memory of a server rank: " in done.stdout


def test_every_layout_that_fits_is_enumerated():
    """By trying all sizes on six processes."""
    for model in (SMALL, SMALL_MOE):
        layouts = fitting_layouts(read_architecture(model), 6, context=(1, 3))
        found = {layout_text(layout) for layout in layouts}
        wanted = set()
        sizes = itertools.product(range(1, 7), range(1, 7), (1, 3), range(1, 7))
        for tp, pp, cp, dp in [each for each in sizes if math.prod(each) == 6]:
            for ep in range(1, 13):
                for sp in (False, True):
                    try:
                        layout = LayoutConfig(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, sp=sp)
                        validate_layout(model, layout, num_processes=6)
                    except ValueError:
                        continue
                    wanted.add(layout_text(layout))
        assert found == wanted
