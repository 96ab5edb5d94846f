"""Errors of a layout that config.json alone shows: refused by name before anything starts, and without torch."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from configs.schema.layout import LayoutConfig
from parallel.planning.architecture import read_architecture
from parallel.planning.layout import (
    check_aligned_servers,
    check_numerics,
    check_other_positions,
    check_other_vocabulary,
    check_served_on_cpu,
    check_trainable,
    fitting_layouts,
    layout_problems,
    layout_yaml,
    rollout_sizes,
    validate_layout,
    validate_rollout_layout,
)
from parallel.planning.model_parts import Recurrent
from tests.parallel.planning.test_architecture import CONFIG
from tests.support.megatron_workers import (
    make_hf_model,
    relative_difference,
    run_ranks,
    work_many_updates,
    work_updates,
)

MOE = CONFIG | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
}


@pytest.mark.parametrize(
    "config, layout, processes, message",
    [
        (
            CONFIG,
            dict(tp=3),
            None,
            "layout.tp=3 does not divide .*num_attention_heads=4 and num_key_value_heads=2; use tp=2 or tp=4",
        ),
        (CONFIG, dict(tp=8), None, "layout.tp=8 does not divide the model's num_attention_heads=4; use tp=4"),
        (CONFIG | {"intermediate_size": 49}, dict(tp=2), None, "intermediate_size=49; use tp=1"),
        (
            CONFIG,
            dict(pp=3),
            None,
            "layout.pp=3 leaves its last stage none of the model's num_hidden_layers=2; use pp=2",
        ),
        (
            MOE,
            dict(pp=2, vpp=2),
            None,
            r"layout.pp=2 times layout.vpp=2 does not divide .*=6; use pp=3 or vpp=1 or vpp=3$",
        ),
        (
            CONFIG,
            dict(ep=2, dp=2),
            None,
            "layout.ep=2 splits experts, of which this qwen3 model has none; use ep=1",
        ),
        (MOE, dict(ep=4, dp=4), None, "layout.ep=4 does not divide the model's num_experts=6; use ep=2$"),
        (MOE, dict(ep=4), None, "layout.ep=4 does not divide the model's num_experts=6; use ep=3 or ep=6$"),
        (
            MOE,
            dict(ep=6),
            4,
            r"layout.ep=6 does not divide the tp\*cp\*dp=4 ranks of a pipeline stage; use ep=2",
        ),
        (MOE, dict(tp=2), None, "layout.tp=2 without sp: .*; use sp=true or tp=1"),
        (
            CONFIG | {"num_hidden_layers": 4},
            dict(tp=3, pp=2, vpp=2),
            None,
            "layout.tp=3 does not divide .*; use tp=2 or tp=4$",
        ),
        (
            CONFIG,
            dict(cp=2),
            3,
            r"3 processes do not fit a layout of tp=1, cp=2, pp=1, dp=auto; use 2 processes",
        ),
        (CONFIG, dict(cp=2, dp=1), 4, r"do not fit .*cp=2.*; use dp=2, or 2 processes\n.*\{cp: 2, dp: 2\}"),
        (
            MOE,
            dict(cp=2, tp=2, sp=True, ep=6),
            8,
            r"ep=6 does not divide the tp\*cp\*dp=8 ranks .*; use ep=2",
        ),
        (
            CONFIG,
            dict(dp=2),
            3,
            r"3 processes do not fit a layout of tp=1, cp=1, pp=1, dp=2; use dp=3, or 2 processes\n.*\{dp: 3\}",
        ),
        (CONFIG, dict(tp=2), 5, "5 processes do not fit .*dp=auto; use 4 processes"),
        (CONFIG, dict(tp=2, pp=2), 3, "3 processes do not fit .*; use 4 processes"),
        (MOE, dict(tp=2, sp=True, ep=6), 3, "3 processes do not fit .*; use 6 processes"),
        (MOE, dict(pp=2, ep=2), 3, "3 processes do not fit .*; use 4 processes"),
        (CONFIG, dict(dp=2), 1, r"1 processes do not fit .*dp=2; use dp=1, or 2 processes"),
        (MOE, dict(ep=2, dp=2), 1, r"1 processes do not fit .*dp=2; use 2 processes"),
        (
            CONFIG | {"intermediate_size": 49},
            dict(tp=2, sp=True),
            None,
            r"=49; no value of tp alone fixes it\n.*that work: \{tp: 1\}",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_the_nearest_that_does(config, layout, processes, message):
    with pytest.raises(ValueError, match=message):
        validate_layout(config, LayoutConfig(**layout), num_processes=processes)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError) as caught:
        validate_layout(MOE, LayoutConfig(tp=3, pp=4, dp=2), num_processes=24)
    lines = str(caught.value).split("\n  ")
    assert [line.split(";")[0].split(" ")[0] for line in lines[:-1]] == [
        "layout.tp=3",
        "layout.pp=4",
        "layout.tp=3",
    ]
    # with experts tp needs sp; tp 3 -> 4 and pp 4 -> 3 are log2(4 / 3) = 0.415 each, tp 3 -> 2 and pp 4 -> 6
    # 0.585 each, ep 1 -> 2 1
    wanted = [
        "{tp: 4, pp: 3, sp: true, dp: 2}",
        "{tp: 2, pp: 6, sp: true, dp: 2}",
        "{tp: 4, pp: 3, sp: true, ep: 2, dp: 2}",
    ]
    assert lines[-1] == f"the nearest layouts that work: {' or '.join(wanted)}"


sizes = st.sampled_from([1, 1, 2, 3, 4, 6])
ALONE = {
    "kv_heads": 1,
    "siblings": 1,
    "intermediate": 12,
    "experts": None,
    "tp": 1,
    "cp": 1,
    "ep": 1,
    "dp": 1,
    "sp": False,
}


@example(layers=3, pp=2, vpp=1, **ALONE)
@example(layers=4, pp=3, vpp=1, **ALONE)
@example(layers=3, pp=1, vpp=2, **ALONE)
# three ranks share one key/value head, whose 32 rows they cannot split
@example(layers=1, pp=1, vpp=1, **(ALONE | {"siblings": 3, "tp": 3}))
@given(
    kv_heads=st.integers(1, 3), siblings=st.integers(1, 4), layers=st.integers(1, 8), intermediate=st.sampled_from([12, 18, 48]),
    experts=st.sampled_from([None, 2, 6]), tp=sizes, pp=sizes, vpp=sizes, cp=sizes, ep=sizes, dp=sizes, sp=st.booleans(),
)  # fmt: skip
def test_refused_is_what_cannot_be_split_and_what_is_named_works(
    kv_heads, siblings, layers, intermediate, experts, tp, pp, vpp, cp, ep, dp, sp
):
    config = CONFIG | dict(
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * siblings,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
    )
    if experts:
        config |= {
            "model_type": "qwen3_moe",
            "num_experts": experts,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 7,
        }
    try:
        layout = LayoutConfig(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, dp=dp, sp=sp)
    except ValueError:
        return  # refused whatever the model
    heads = kv_heads * siblings
    # each rank has whole query heads, and with each the key/value head it needs; whole layers; whole experts
    groups = [
        {query // siblings for query in range(rank * heads // tp, (rank + 1) * heads // tp)}
        for rank in range(tp)
    ]
    # where there are fewer key/value heads than ranks, Megatron splits their rows evenly, each 16 of a key
    # and 16 of a value
    shares_heads = kv_heads % tp == 0 or (tp % kv_heads == 0 and 32 * kv_heads % tp == 0)
    fits = heads % tp == 0 and len({len(group) for group in groups}) == 1 and shares_heads
    fits = fits and (experts is not None or intermediate % tp == 0)
    # without vpp each stage but the last has the same number of layers, and the last one has what is left
    rounded_up = -(-layers // pp)
    fits = fits and (layers % (pp * vpp) == 0 or (vpp == 1 and rounded_up * (pp - 1) < layers))
    fits = fits and (ep == 1 if experts is None else experts % ep == 0 and (tp == 1 or sp))
    if fits:
        validate_layout(config, layout, num_processes=tp * cp * pp * dp)
        return
    with pytest.raises(ValueError, match=r"layout.*(use |fixes it)") as caught:
        validate_layout(config, layout, num_processes=tp * cp * pp * dp)
    for named in re.findall(r"\{([^}]*)\}", str(caught.value)):
        validate_layout(
            config, LayoutConfig(**yaml.safe_load("{" + named + "}")), num_processes=tp * cp * pp * dp
        )
    with pytest.raises(ValueError, match=r"layout") as caught:
        validate_layout(config, layout)
    misfits = [line for line in str(caught.value).split("\n  ") if not line.startswith("the nearest layouts")]
    for name, value in (
        re.findall(r"(\w+)=(\w+)", misfits[0].rpartition("; ")[2]) if len(misfits) == 1 else ()
    ):
        validate_layout(config, LayoutConfig(**(layout.model_dump() | {name: yaml.safe_load(value)})))


DENSE, SPARSE = read_architecture(CONFIG), read_architecture(MOE | {"moe_intermediate_size": 8})
NETS = Recurrent(is_recurrent=(True, False), key_heads=2, value_heads=4, key_dim=8, value_dim=8, width=4)
FIRST_DENSE = replace(SPARSE.experts, is_sparse=(False,) + (True,) * 5)


@pytest.mark.parametrize(
    ("architecture", "fitting", "named"),
    [
        (DENSE, [1, 2, 4], ""),
        (replace(DENSE, recurrent=NETS), [1, 2], "linear_num_key_heads=2"),
        # Four ranks split the 2 * 6 rows of a single head, or the 2 * 2 of each of two.
        (replace(DENSE, num_kv_heads=1, head_dim=6), [1, 2, 4], ""),
        (replace(DENSE, num_kv_heads=2, head_dim=2), [1, 2, 4], ""),
        (replace(DENSE, model_type="olmo3"), [1, 2], "num_key_value_heads=2"),
        (replace(DENSE, intermediate_size=50), [1, 2], "intermediate_size=50"),
        (replace(SPARSE, intermediate_size=50), [1, 2, 4], ""),
        (replace(SPARSE, intermediate_size=50, experts=FIRST_DENSE), [1, 2], "intermediate_size=50"),
        (replace(SPARSE, experts=replace(SPARSE.experts, shared_size=12)), [1, 2, 4], ""),
        (
            replace(SPARSE, experts=replace(SPARSE.experts, shared_size=10)),
            [1, 2],
            "intermediate size of the shared expert, 10",
        ),
    ],
)
def test_parts_that_only_some_models_have_are_split_in_learner_and_servers(architecture, fitting, named):
    problems = {tp: layout_problems(architecture, LayoutConfig(tp=tp, sp=tp > 1)) for tp in (1, 2, 4)}
    assert [tp for tp, found in problems.items() if not found] == fitting == rollout_sizes(architecture)
    if named:
        assert problems[4] == [f"layout.tp=4 does not divide the model's {named}; use tp=2"]


def test_sequences_of_recurrent_layers_are_not_split_either_in_what_is_named():
    nets = replace(DENSE, recurrent=NETS)
    (problem,) = layout_problems(nets, LayoutConfig(cp=2))
    assert problem.startswith("layout.cp=2 splits sequences") and problem.endswith("; use cp=1")
    *_, last = layout_problems(nets, LayoutConfig(tp=3, cp=2))
    assert re.search(r"nearest layouts that work: \{tp: 2\} or ", last) and "cp:" not in last


def test_a_layout_as_yaml():
    layout = LayoutConfig(tp=2, sp=True, pp=4, ep=2, dp=8)
    assert (
        layout_yaml(layout) == "tp: 2, pp: 4, sp: true, ep: 2, dp: 8"
        and layout_yaml(LayoutConfig()) == "tp: 1"
    )
    assert LayoutConfig(**yaml.safe_load("{" + layout_yaml(layout) + "}")) == layout


@pytest.mark.engines
def test_ranks_that_share_a_key_value_head_compute_the_same(tmp_path):
    """One key/value head on two ranks, which the rule above allows: two updates equal those of one process."""
    folder = make_hf_model(tmp_path / "m", "qwen3", num_key_value_heads=1)
    rest = ([[[0, 1, 2, 3]]], [12, 9, 7, 12], 2, {})
    one = run_ranks(work_updates, 1, tmp_path / "one", folder, {}, *rest, deadline_s=900)[0]
    jobs = {f"sp={sp}": (folder, {"tp": 2, "sp": sp}, *rest) for sp in (False, True)}
    for found in run_ranks(work_many_updates, 2, tmp_path / "two", jobs, deadline_s=900)[0].values():
        assert relative_difference(found["weights"], one["weights"]) < 1e-5
        assert found["norms"] == pytest.approx(one["norms"], rel=1e-5)


@given(
    kv_heads=st.integers(1, 6), siblings=st.integers(1, 6), intermediate=st.integers(1, 40), vocab=st.integers(1, 99),
    size=st.integers(1, 40),
)  # fmt: skip
def test_rollout_layouts_by_what_each_rank_would_hold(kv_heads, siblings, intermediate, vocab, size):
    """Ranks hold equally many query heads: either all siblings of each of their key/value heads, or siblings
    of one single head."""
    heads = kv_heads * siblings
    config = CONFIG | dict(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocab,
    )
    fits = heads % size == 0 and intermediate % size == 0
    if fits:
        per_rank = heads // size
        used = [
            {query // siblings for query in range(rank * per_rank, (rank + 1) * per_rank)}
            for rank in range(size)
        ]
        fits = all(len(mine) * siblings == per_rank for mine in used) or (
            all(len(mine) == 1 for mine in used) and size % kv_heads == 0
        )
    if fits:
        validate_rollout_layout(config, size)
    else:
        with pytest.raises(ValueError, match=f"rollout.tp={size} does not fit the model's .*use one of \\[1"):
            validate_rollout_layout(config, size)


@pytest.mark.parametrize(
    ("pieces", "tp", "intermediate", "message"),
    [
        (2, 2, 64, None),
        (4, 2, 64, None),
        (8, 2, 64, "model.numerics_pieces=8 does not divide the model's num_attention_heads=4"),
        (4, 2, 62, "model.numerics_pieces=4 does not divide the model's intermediate_size=62"),
        (1, 1, 48, "rollout.tp=1: SGLang on CPU pads intermediate_size=48 to a multiple of 32,"),
        (2, 2, 96, "rollout.tp=2: SGLang on CPU pads intermediate_size=96 to a multiple of 64,"),
        (4, 4, 128, "rollout.tp=4: SGLang on CPU pads num_key_value_heads=2 to a multiple of 4,"),
    ],
)
def test_aligned_numerics_need_equal_pieces_without_padding(pieces, tp, intermediate, message):
    architecture = read_architecture(CONFIG | {"intermediate_size": intermediate})
    with nullcontext() if message is None else pytest.raises(ValueError, match=re.escape(message)):
        check_numerics(pieces, architecture)
        check_aligned_servers(tp, architecture)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (SPARSE, "covers dense models"),
        (replace(DENSE, recurrent=NETS), "covers attention, and this qwen3 has gated"),
    ],
)
def test_aligned_numerics_are_of_attention_in_dense_models(architecture, message):
    with pytest.raises(ValueError, match=message):
        check_numerics(2, architecture)


def test_a_rollout_size_that_copies_key_value_heads_fits():
    validate_rollout_layout(CONFIG, 4)
    with pytest.raises(ValueError, match=r"num_attention_heads=4; use one of \[1, 2, 4\]"):
        validate_rollout_layout(CONFIG, 8)


def test_other_models_have_the_policys_tokens_and_places_for_the_longest_sequence():
    check_other_vocabulary("kl.model", DENSE, DENSE)
    with pytest.raises(ValueError, match=f"kl.model has a vocabulary of {DENSE.vocab_size - 1} tokens"):
        check_other_vocabulary("kl.model", replace(DENSE, vocab_size=DENSE.vocab_size - 1), DENSE)
    check_other_positions("kl.model", DENSE, DENSE.max_positions)
    with pytest.raises(ValueError, match=f"a sequence may have {DENSE.max_positions + 1} tokens"):
        check_other_positions("kl.model", DENSE, DENSE.max_positions + 1)


def test_layouts_that_are_tried_by_hand():
    """Ten layers on 4 stages are 3, 3, 3, 1, and on 8 the last ones would have none; 3 is no power of two."""
    ten, four = (replace(DENSE, num_layers=layers) for layers in (10, 4))
    assert {found.pp for found in fitting_layouts(ten, None, context=(1,))} == {1, 2, 4, 5, 10}
    by_chunks = fitting_layouts(four, None, chunks=(1, 2), context=(1,))
    assert {(found.pp, found.vpp) for found in by_chunks} == {(1, 1), (2, 1), (4, 1), (2, 2)}
    split = {
        a: {(found.tp, found.sp) for found in fitting_layouts(a, None, context=(1,))} for a in (DENSE, SPARSE)
    }
    assert split[DENSE] == {(1, False), (2, False), (2, True), (4, False), (4, True)}
    assert split[SPARSE] == {(1, False), (2, True), (4, True)}


def test_half_precision_of_ieee_is_for_dense_models():
    check_trainable(DENSE, "float16")
    check_trainable(SPARSE, "bfloat16")
    with pytest.raises(ValueError, match=r"float16 cannot train a model with experts"):
        check_trainable(SPARSE, "float16")


def test_servers_have_no_tied_output_layer_of_a_model_with_experts():
    validate_rollout_layout(CONFIG | {"tie_word_embeddings": True}, 1)
    validate_rollout_layout(MOE, 1)
    with pytest.raises(ValueError, match="tie_word_embeddings=true, which SGLang ignores in a qwen3_moe"):
        validate_rollout_layout(MOE | {"tie_word_embeddings": True}, 1)


def test_servers_without_tandem_s_plugin_serve_dense_models_of_full_attention_on_cpu():
    nets = replace(DENSE, recurrent=NETS)
    check_served_on_cpu(DENSE, has_plugin=False)
    check_served_on_cpu(nets, has_plugin=True)
    with pytest.raises(
        ValueError, match="sglang_plugin=false: SGLang computes the recurrent layers of a qwen3"
    ):
        check_served_on_cpu(nets, has_plugin=False)
