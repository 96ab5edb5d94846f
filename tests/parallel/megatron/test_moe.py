"""Qwen3-MoE, Mixtral, GLM-4.5 and DeepSeek-V3: the learner against transformers, expert parallelism against one process, and a real
SGLang server."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from typer.testing import CliRunner

from configs.schema.layout import LayoutConfig
from configs.schema.rollout import RolloutConfig
from launch.checks.arguments import BadInput
from launch.cli import app
from parallel.megatron.attention import plan_packing
from parallel.megatron.context_parallel import split_context
from parallel.megatron.model import _recording
from parallel.packing import PackedBatch, pack_sequences
from parallel.planning.architecture import architecture_of, read_architecture, read_hf_config
from parallel.planning.layout import validate_rollout_layout
from parallel.planning.model_parts import Experts, Latent
from parallel.planning.traffic import bytes_to_send
from parallel.weights.hf_headers import weight_problems
from parallel.weights.hf_names import all_hf_names, expert_of, hf_names, ungrouped, with_expert
from parallel.weights.transfer import Buffers, make_buckets, plan_transfer
from rollout.servers.client import SGLangClient
from rollout.servers.control_line import ControlError
from rollout.tiny_model import make_tiny_countdown_model
from tests.parallel.megatron.test_model import assert_same_weights
from tests.support.layout_workers import (
    by_hf_names,
    gradients_of_update,
    weights_by_hf_names,
    with_experts,
    work_layout,
)
from tests.support.megatron_workers import (
    make_batch,
    make_engine,
    relative_difference,
    run_ranks,
    weighted_loss,
)
from tests.support.moe_workers import (
    LATENT_FIELDS,
    assert_is_transformers,
    assert_same_choice,
    by_transformers,
    make_moe_model,
    work_layouts,
)
from tests.support.real_servers import EXACT, make_fleet, send, sharpen
from tests.support.server_specs import KEY, make_control

MIXED = dict(num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=2)
"""Layer 3 alone has experts."""


# --- config.json
# ---------------------------------------------------------------------------------------------------------------------


def moe_config(**changes) -> dict:
    return {
        "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
    } | changes  # fmt: skip


def mixtral_config(**changes) -> dict:
    config = moe_config(model_type="mixtral", num_local_experts=8, sliding_window=None)
    for name in ("moe_intermediate_size", "num_experts", "norm_topk_prob"):
        del config[name]
    return config | changes


def glm_config(**changes) -> dict:
    config = moe_config(
        model_type="glm4_moe", n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=1,
        attention_bias=True, num_nextn_predict_layers=1,
    )  # fmt: skip
    del config["num_experts"]
    return config | changes


def gpt_oss_config(**changes) -> dict:
    layers = ["sliding_attention", "full_attention"] * 3
    own = {"attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 4, "layer_types": layers}
    return moe_config(model_type="gpt_oss") | own | changes


def deepseek_config(**changes) -> dict:
    config = glm_config(model_type="deepseek_v3", head_dim=8, num_key_value_heads=4)
    return config | LATENT_FIELDS | {"attention_bias": False, "n_group": 4, "topk_group": 2} | changes


def test_experts_of_a_config():
    found = read_architecture(moe_config(mlp_only_layers=[3], decoder_sparse_step=2, norm_topk_prob=False))
    assert found.qk_norm and not found.qkv_bias and found.intermediate_size == 48
    sparse = (False, True, False, False, False, True)
    assert found.experts == Experts(
        num_experts=8, experts_per_token=2, intermediate_size=24, norm_topk=False, is_sparse=sparse
    )
    found = read_architecture(mixtral_config())
    assert not found.qk_norm
    assert found.experts == Experts(
        num_experts=8, experts_per_token=2, intermediate_size=48, norm_topk=True, is_sparse=(True,) * 6
    )
    saved_again = moe_config(num_local_experts=8)
    del saved_again["num_experts"]
    assert read_architecture(saved_again) == read_architecture(moe_config())
    assert read_architecture(moe_config(model_type="qwen3")).experts is None
    found = read_architecture(glm_config())
    assert found.qkv_bias and not found.qk_norm and (found.head_dim, found.rotary_size) == (16, 8)
    assert found.experts == Experts(
        num_experts=8, experts_per_token=2, intermediate_size=24, norm_topk=True, is_sparse=(False, *(True,) * 5),
        score="sigmoid", float32_logits=True, has_bias=True, scale=2.5, shared_size=48,
    )  # fmt: skip
    in_rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    found = read_architecture(glm_config(rope_parameters=in_rope, use_qk_norm=True, attention_bias=False))
    assert found.qk_norm and not found.qkv_bias and found.rotary_size == 4


def test_a_model_with_sinks():
    found = read_architecture(gpt_oss_config())
    assert found.family.has_sinks and found.qkv_bias and found.windows == (4, None) * 3
    assert found.experts == Experts(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=48,
        norm_topk=True,
        is_sparse=(True,) * 6,
        clamp=7.0,
    )


def test_heads_of_latent_attention():
    """YaRN's factor of DeepSeek-V3 is 40, of which 0.1 log(40) + 1 = 1.36888."""
    found = read_architecture(deepseek_config())
    latent = Latent(query_rank=20, rank=24, value_dim=12, is_interleaved=True, scale=24**-0.5)
    assert found.latent == latent and (found.head_dim, found.rotary_size, found.value_dim) == (24, 8, 12)
    assert (found.num_kv_heads, found.qk_norm, found.qkv_bias, found.further_layers) == (4, False, False, 1)
    assert (found.experts.num_groups, found.experts.top_groups) == (4, 2)
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    found = read_architecture(deepseek_config(rope_scaling=yarn, q_lora_rank=None, rope_interleave=False))
    assert found.latent.scale == pytest.approx(24**-0.5 * 1.3688879**2)
    assert (found.latent.query_rank, found.latent.is_interleaved) == (None, False)
    for plain in (
        {"type": "yarn", "factor": 40},
        {"rope_type": "default", "mscale_all_dim": 1.0, "factor": 40},
    ):
        assert read_architecture(deepseek_config(rope_scaling=plain)).latent == latent


@pytest.mark.parametrize(
    "config, message",
    [
        (moe_config(num_experts=0), "num_experts=0; it must be"),
        (moe_config(num_experts_per_tok=9), "num_experts_per_tok=9, more than its num_experts=8"),
        (moe_config(mlp_only_layers=[0, 1, 2, 3, 4, 5]), "leave none of the 6 layers with experts"),
        (moe_config(mlp_only_layers=2), "mlp_only_layers=2; it must be a list of numbers of its 6 layers"),
        (moe_config(mlp_only_layers=["2"]), r"mlp_only_layers=\['2'\]; it must be a list"),
        (moe_config(mlp_only_layers=[6]), r"mlp_only_layers=\[6\]; it must be a list"),
        (moe_config(norm_topk_prob="false"), "norm_topk_prob='false'; it must be true or false"),
        (
            {k: v for k, v in deepseek_config().items() if k != "q_lora_rank"},
            "lacks 'q_lora_rank'",
        ),
        (moe_config(decoder_sparse_step=7), "decoder_sparse_step=7, which leave none"),
        (
            moe_config(shared_expert_intermediate_size=64),
            "shared_expert_intermediate_size=64, which the learner does not compute",
        ),
        (
            mixtral_config(router_jitter_noise=0.1),
            "router_jitter_noise=0.1, which the learner does not compute",
        ),
        (
            mixtral_config(sliding_window=128),
            "sliding_window=128, which SGLang does not compute in a mixtral",
        ),
        (moe_config(n_shared_experts=1), "n_shared_experts=1, which the learner does not compute"),
        (glm_config(n_group=3), "n_group=3 and topk_group=1, which do not fit n_routed_experts=8"),
        (glm_config(n_group=4, topk_group=5), "n_group=4 and topk_group=5, which do not fit"),
        (glm_config(n_group=8, topk_group=2), "n_group=8 and topk_group=2, which do not fit"),
        (
            glm_config(n_group=4, num_experts_per_tok=3),
            "topk_group=1, which do not fit .*num_experts_per_tok=3",
        ),
        (glm_config(mlp_layer_types=["dense"] * 6), "which first_k_dense_replace=1 contradicts"),
        (
            deepseek_config(scoring_func="softmax"),
            "scoring_func='softmax', which the learner does not compute",
        ),
        (deepseek_config(topk_method="greedy"), "topk_method='greedy', which the learner does not compute"),
        (
            deepseek_config(model_type="deepseek_v2"),
            "scoring_func='sigmoid', which the learner does not compute; use a deepseek_v2",
        ),
        (
            deepseek_config(model_type="deepseek_v2", scoring_func="softmax", topk_method="greedy"),
            "norm_topk_prob=True, which the learner does not compute; use a deepseek_v2",
        ),
        (
            deepseek_config(
                model_type="deepseek_v2", scoring_func="softmax", topk_method="greedy", norm_topk_prob=False
            ),
            "n_group=4, which topk_method='greedy' contradicts",
        ),
        (deepseek_config(topk_group=None), "topk_group=None; it must be"),
        (
            deepseek_config(
                model_type="deepseek_v2",
                scoring_func="softmax",
                topk_method="greedy",
                norm_topk_prob=False,
                n_group=1,
                topk_group=1,
                rope_interleave=False,
            ),
            "rope_interleave=False, which the learner does not compute; use a deepseek_v2",
        ),
        (
            gpt_oss_config(quantization_config={"quant_method": "mxfp4"}),
            "quant_method='mxfp4', which the learner does not read; .* `tandem dequantise FOLDER OUT`",
        ),
        (gpt_oss_config(attention_bias=False), "attention_bias=False; it must be true"),
        (gpt_oss_config(swiglu_alpha=1.5), "swiglu_alpha=1.5, which the learner does not compute"),
        (gpt_oss_config(swiglu_limit=None), "swiglu_limit=None; it must be"),
        (deepseek_config(moe_layer_freq=2), "moe_layer_freq=2, which the learner does not compute"),
        (
            {name: value for name, value in deepseek_config().items() if name != "topk_method"},
            "config.json lacks 'topk_method'; restore",
        ),
        (deepseek_config(attention_bias=True), "attention_bias=True, which the learner does not compute"),
        (deepseek_config(kv_lora_rank=None), "kv_lora_rank=None; it must be"),
        (deepseek_config(qk_rope_head_dim=7), "qk_rope_head_dim=7 and v_head_dim=12; the first must be even"),
        (deepseek_config(v_head_dim=25), "v_head_dim=25; the first must be even, and the second at most 24"),
        (
            deepseek_config(rope_scaling={"type": "yarn", "factor": 4, "truncate": False}),
            "truncate=False in its rope parameters, of which transformers and SGLang make different frequencies",
        ),
        (
            deepseek_config(rope_scaling={"type": "yarn", "factor": 4, "mscale_all_dim": "1"}),
            "mscale_all_dim='1' in its rope parameters",
        ),
        (
            deepseek_config(rope_scaling={"type": "yarn", "factor": 4, "mscale": 0, "mscale_all_dim": 1.0}),
            "of which transformers and SGLang make different factors",
        ),
        (deepseek_config(num_nextn_predict_layers=[1]), r"num_nextn_predict_layers=\[1\]; it must be"),
        (deepseek_config(num_nextn_predict_layers=-1), "num_nextn_predict_layers=-1; it must be"),
        (deepseek_config(mlp_layer_types=3), "mlp_layer_types=3, which first_k_dense_replace=1 contradicts"),
        (glm_config(first_k_dense_replace=6), "first_k_dense_replace=6, which leaves none of the 6 layers"),
        (glm_config(n_shared_experts=0), "n_shared_experts=0; it must be"),
        (glm_config(routed_scaling_factor=None), "routed_scaling_factor=None; it must be"),
        (glm_config(partial_rotary_factor=1.5), "partial_rotary_factor=1.5; it must be"),
        (glm_config(partial_rotary_factor=0.2), "rotates 3 numbers of each head of 16, which are not pairs"),
        (
            glm_config(rope_scaling={"type": "yarn"}),
            "rope_type 'yarn' of this glm4_moe model is not supported; supported are default$",
        ),
    ],
)
def test_what_is_not_computed_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(config)


def test_what_sglang_would_serve_wrongly_is_refused():
    validate_rollout_layout(moe_config(), 2)
    with pytest.raises(ValueError, match="tie_word_embeddings=true, which SGLang ignores in a qwen3_moe"):
        validate_rollout_layout(moe_config(tie_word_embeddings=True), 1)
    with pytest.raises(
        ValueError,
        match=r"rollout.tp=2 does not fit the model's intermediate size of experts, 25; use one of \[1\]",
    ):
        validate_rollout_layout(moe_config(moe_intermediate_size=25), 2)


def test_names_of_experts():
    name = "decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight"
    assert expert_of(name) == 17 and with_expert(name, 4) == name.replace("17", "4")
    assert ungrouped("decoder.layers.3.mlp.experts.linear_fc1.weight17") == name == ungrouped(name)
    others = [
        "decoder.layers.3.mlp.linear_fc1.weight",
        "decoder.layers.3.mlp.router.weight",
        "output_layer.weight",
    ]
    assert [expert_of(other) for other in others] == [None] * 3 and [
        ungrouped(other) for other in others
    ] == others
    qwen3_moe, mixtral = read_architecture(moe_config()), read_architecture(mixtral_config())
    assert hf_names(name, qwen3_moe) == tuple(
        f"model.layers.3.mlp.experts.17.{part}_proj.weight" for part in ("gate", "up")
    )
    assert hf_names(name, mixtral) == tuple(
        f"model.layers.3.block_sparse_moe.experts.17.{part}.weight" for part in ("w1", "w3")
    )
    # embedding, norm and output layer; of each layer 2 norms, 4 projections, 2 norms of q and k, the router,
    # 3 matrices per expert
    assert len(all_hf_names(qwen3_moe)) == 3 + 6 * (2 + 4 + 2 + 1 + 3 * 8)


# --- one process against transformers
# ------------------------------------------------------------------------------------------------

YARN = dict(
    rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1, mscale=0.7,
    mscale_all_dim=1.0,
)  # fmt: skip
SHAPES = [
    ("qwen3_moe", {}), ("qwen3_moe", dict(norm_topk_prob=False, tied=True)), ("qwen3_moe", MIXED), ("mixtral", {}),
    ("mixtral", dict(tied=True, num_experts_per_tok=3)), ("glm4_moe", dict(num_hidden_layers=3)),
    ("glm4_moe", dict(norm_topk_prob=False, first_k_dense_replace=0, use_qk_norm=False, attention_bias=False, routed_scaling_factor=1.0)),
    ("deepseek_v3", dict(num_hidden_layers=3)), ("deepseek_v3", dict(rope_parameters=YARN, n_group=1, v_head_dim=24)),
    ("deepseek_v3", dict(q_lora_rank=None, rope_interleave=False)), ("glm4_moe_lite", {}), ("deepseek_v2", {}),
    ("gpt_oss", {}), ("gpt_oss", dict(num_experts_per_tok=3, swiglu_limit=0.5, num_hidden_layers=3)),
    ("deepseek_v2", dict(topk_method="group_limited_greedy", n_group=2, topk_group=1, q_lora_rank=None, rope_parameters=YARN)),
]  # fmt: skip


@pytest.mark.parametrize("kind, changes", SHAPES)
def test_logits_and_gradients_match_transformers_on_packed_batches(tmp_path, kind, changes):
    folder = make_moe_model(tmp_path / "m", kind, **changes)
    assert_is_transformers(folder, [5, 60, 2, 33, 5, 71], tmp_path / "gradients")


@pytest.mark.parametrize("norm_topk", [True, False])
def test_the_router_chooses_like_that_of_transformers_in_bfloat16(tmp_path, norm_topk):
    """The same rounding of logits, so the same experts even where bfloat16 makes near ties."""
    changes = dict(num_experts=16, num_experts_per_tok=4, norm_topk_prob=norm_topk, num_hidden_layers=1)
    engine = make_engine(make_moe_model(tmp_path / "m", "qwen3_moe", **changes), dtype="bfloat16")
    router = engine.chunks[0].decoder.layers[0].mlp.router
    other = Qwen3MoeTopKRouter(SimpleNamespace(hidden_size=32, **changes)).bfloat16()
    other.weight.data.copy_(router.weight)
    hidden_TH = torch.randn(500, 1, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        weights_TE, is_chosen_TE = router(hidden_TH)
        _, wanted_TK, chosen_TK = other(hidden_TH.squeeze(1))
    assert torch.equal(is_chosen_TE, torch.zeros_like(is_chosen_TE).scatter(1, chosen_TK, True))
    assert weights_TE.dtype == torch.float32
    assert torch.equal(weights_TE.gather(1, chosen_TK).bfloat16(), wanted_TK)  # which rounds them at the end
    assert (weights_TE != 0).sum() == 4 * 500


def test_a_sigmoid_router_chooses_like_that_of_transformers_in_bfloat16(tmp_path):
    """Its scores and its bias are float32 in either."""
    changes = dict(n_routed_experts=16, num_experts_per_tok=4, first_k_dense_replace=0, num_hidden_layers=1)
    engine = make_engine(make_moe_model(tmp_path / "m", "glm4_moe", **changes), dtype="bfloat16")
    router = engine.chunks[0].decoder.layers[0].mlp.router
    assert router.weight.dtype == torch.bfloat16 and router.correction_bias.dtype == torch.float32
    weights = load_file(tmp_path / "m" / "model.safetensors")
    assert torch.equal(router.correction_bias, weights["model.layers.0.mlp.gate.e_score_correction_bias"])
    other = Glm4MoeTopkRouter(AutoConfig.from_pretrained(tmp_path / "m"))
    other.weight.data = router.weight.detach().clone()
    other.e_score_correction_bias.copy_(router.correction_bias)
    hidden_TH = torch.randn(500, 1, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        weights_TE, is_chosen_TE = router(hidden_TH)
        _, wanted_TK, chosen_TK = other(hidden_TH.squeeze(1))
        router.correction_bias.zero_()
        without_TE = router(hidden_TH)[1]
    assert torch.equal(is_chosen_TE, torch.zeros_like(is_chosen_TE).scatter(1, chosen_TK, True))
    assert not torch.equal(is_chosen_TE, without_TE), "the bias decides"
    torch.testing.assert_close(weights_TE.gather(1, chosen_TK), wanted_TK, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights_TE.sum(1), torch.full((500,), 1.5))  # routed_scaling_factor


def test_a_router_of_deepseek_v2_chooses_like_that_of_transformers_in_bfloat16(tmp_path):
    """By a softmax, but of float32 logits; within groups."""
    changes = dict(n_routed_experts=16, num_experts_per_tok=4, first_k_dense_replace=0, num_hidden_layers=1)
    changes |= {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    engine = make_engine(make_moe_model(tmp_path / "m", "deepseek_v2", **changes), dtype="bfloat16")
    router = engine.chunks[0].decoder.layers[0].mlp.router
    other = DeepseekV2TopkRouter(AutoConfig.from_pretrained(tmp_path / "m"))
    other.weight.data = router.weight.detach().clone()
    hidden_TH = torch.randn(500, 1, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        weights_TE, is_chosen_TE = router(hidden_TH)
        _, wanted_TK, chosen_TK = other(hidden_TH.squeeze(1))
    assert torch.equal(is_chosen_TE, torch.zeros_like(is_chosen_TE).scatter(1, chosen_TK, True))
    torch.testing.assert_close(weights_TE.gather(1, chosen_TK), wanted_TK, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "dtype, recompute, replays",
    [("float32", "none", False), ("bfloat16", "full", False), ("bfloat16", "full", True)],
)
def test_score_and_train_are_bitwise_equal(tmp_path, dtype, recompute, replays):
    kind = "glm4_moe" if recompute == "full" else "mixtral"
    engine = make_engine(make_moe_model(tmp_path / "m", kind), dtype=dtype, recompute=recompute)
    batch = make_batch([9, 5, 12, 9, 3, 20])
    batch = with_experts(batch, engine.architecture.experts) if replays else batch
    microbatches = [batch.select([0, 1, 2]), batch.select([3, 4, 5])]
    for _ in range(2):  # also after the weights have moved
        scored = engine.logprobs(microbatches, temperature=0.7)
        trained = engine.update(microbatches, weighted_loss, temperature=0.7).outputs
        assert all(torch.equal(old, new["logprobs_T"]) for old, new in zip(scored, trained, strict=True))


@pytest.mark.parametrize("kind, changes", [("qwen3_moe", MIXED), ("glm4_moe", {}), ("gpt_oss", {})])
def test_frozen_routers_keep_every_bit_and_all_else_steps_as_beside_trained_ones(tmp_path, kind, changes):
    """Without clipping a weight's first step depends on its own gradient alone."""
    folder = make_moe_model(tmp_path / "m", kind, **changes)
    batch = make_batch([9, 5, 12, 9, 3, 20])
    norms, gradients, weights = {}, {}, {}
    for freeze_router in (False, True):
        engine = make_engine(folder, freeze_router=freeze_router, weight_decay=0.1)
        before = weights_by_hf_names(engine)
        with gradients_of_update(engine) as gradients[freeze_router]:
            norms[freeze_router] = engine.update([batch], weighted_loss, temperature=0.7).grad_norm
        weights[freeze_router] = weights_by_hf_names(engine)
    routers = {name for name in before if ".mlp.gate." in name or ".mlp.router." in name}
    bias = {"glm4_moe": "gate.e_score_correction_bias", "gpt_oss": "router.bias"}.get(kind, "gate.weight")
    assert any(name.endswith(bias) for name in routers)
    of_routers = 0.0
    for name, start in before.items():
        moved = weights[False][name]
        if name in routers:
            assert torch.equal(weights[True][name], start), name
            if not name.endswith("e_score_correction_bias"):
                assert not torch.equal(moved, start), name
                of_routers += float(gradients[False][name].square().sum())
        else:
            assert not torch.equal(moved, start), name
            assert torch.equal(weights[True][name], moved), name
            assert torch.equal(gradients[True][name], gradients[False][name]), name
    assert norms[True] ** 2 == pytest.approx(norms[False] ** 2 - of_routers, rel=1e-5)


# --- routing replay
# -----------------------------------------------------------------------------------------------------------------------


def own_choice(engine, batch) -> PackedBatch:
    """The batch with the experts that the engine's routers choose, in their order, given to every token."""
    layers = [
        layer.mlp.router for layer in engine.chunks[0].decoder.layers if isinstance(layer.mlp, MoELayer)
    ]
    weights: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda *call: weights.append(call[2][0])) for router in layers]
    engine.logprobs([batch], temperature=0.7)
    for hook in hooks:
        hook.remove()
    plan = engine.chunks[0].pack(batch.cu_seqlens, batch.positions_T).plan
    ids = [plan.to_batch_order(weights_TE.topk(layers[0].topk, -1).indices) for weights_TE in weights]
    every = torch.ones(batch.num_tokens, dtype=torch.bool)
    return replace(batch, experts_TLK=torch.stack(ids, 1).to(torch.uint8), is_replayed_T=every)


def logprobs_of(engine, batch) -> torch.Tensor:
    (logprobs_T,) = engine.logprobs([batch], temperature=0.7)
    return logprobs_T


@pytest.mark.parametrize("kind, changes", SHAPES)
def test_a_replay_of_the_routers_own_choice_changes_no_bit_and_another_one_does(tmp_path, kind, changes):
    engine = make_engine(make_moe_model(tmp_path / "m", kind, **changes), distributed=False)
    batch = make_batch([9, 5, 12, 9, 3, 20])
    own, random = own_choice(engine, batch), with_experts(batch, engine.architecture.experts)
    alone_T = logprobs_of(engine, batch)
    assert torch.equal(logprobs_of(engine, own), alone_T)
    ((recorded_T, ids_TLK),) = engine.logprobs_and_experts([batch], temperature=0.7, dtype=torch.uint8)
    assert torch.equal(recorded_T, alone_T)
    # A router with a bias writes them down in another order than that of their weights.
    assert torch.equal(ids_TLK.sort(-1).values, own.experts_TLK.sort(-1).values)
    ((_, wide_TLK),) = engine.logprobs_and_experts([batch], temperature=0.7, dtype=torch.int16)
    assert wide_TLK.dtype == torch.int16 and torch.equal(wide_TLK, ids_TLK)
    nothing = replace(random, is_replayed_T=torch.zeros_like(random.is_replayed_T))
    assert torch.equal(logprobs_of(engine, nothing), alone_T)
    difference_T = (logprobs_of(engine, random) - alone_T).abs()
    assert difference_T.max() > 0.1
    # A token sees those before it: up to the first one that is given experts, nothing changes.
    for row, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        first = random.is_replayed_T[start:end].nonzero()
        same = int(first[0]) if len(first) else end - start
        assert (difference_T[start : start + same] == 0).all(), row
    wanted, found = {}, {}
    for name, used in (("alone", batch), ("own", own)):
        used_engine = make_engine(engine.source, distributed=False)
        result = used_engine.update([used], weighted_loss, temperature=0.7)
        found[name], wanted[name] = result.differing_experts, by_hf_names(used_engine, lambda p: p.main_grad)
    assert found["alone"] is None and set(found["own"].by_layer) == {0}
    assert found["own"].tokens == int(batch.response_mask_T.sum())
    assert all(torch.equal(tensor, wanted["own"][name]) for name, tensor in wanted["alone"].items())


def test_each_rank_writes_the_choice_of_its_own_tokens_and_a_dummy_writes_nothing():
    """Three context-parallel ranks of two sequence-parallel ones each, one after another, of which some have dummies."""
    lengths, cpu = torch.tensor([1, 4, 2, 9]), torch.device("cpu")
    whole = plan_packing(F.pad(lengths.cumsum(0), (1, 0)), cpu)
    generator = torch.Generator().manual_seed(0)
    wanted_TLK = torch.randint(1, 200, (int(lengths.sum()), 2, 3), dtype=torch.uint8, generator=generator)
    joined_TLK, num_dummies = torch.zeros_like(wanted_TLK), 0
    for rank in range(3):
        plan = split_context(whole, cpu, size=3, rank=rank, group=None, multiple=2)
        recording = _recording(plan, torch.zeros_like(wanted_TLK))
        is_dummy_T = ~plan.without_dummies(torch.ones(len(plan.order_T), dtype=torch.bool))
        num_dummies += int(is_dummy_T.sum())
        own_TLK = plan.to_model_order(wanted_TLK).masked_fill(is_dummy_T[:, None, None], 255)
        for layer in range(2):
            for place, part_TK in enumerate(own_TLK[:, layer].long().chunk(2)):
                group = SimpleNamespace(rank=lambda place=place: place)
                assert recording.choose(part_TK, layer, group) is part_TK
        joined_TLK = torch.maximum(joined_TLK, recording.experts_TLK)
    assert num_dummies > 0 and torch.equal(joined_TLK, wanted_TLK)


@pytest.mark.parametrize("kind, changes", SHAPES)
def test_logprobs_and_gradients_of_given_experts_match_transformers(tmp_path, kind, changes):
    folder = make_moe_model(tmp_path / "m", kind, **changes)
    engine = make_engine(folder, distributed=False)
    batch = with_experts(make_batch([5, 33, 2, 12]), engine.architecture.experts)
    found_T = logprobs_of(engine, batch)
    logits_TV, wanted = by_transformers(folder, batch, 0.7, tmp_path / "gradients")
    wanted_T = (logits_TV / 0.7).log_softmax(-1).gather(1, batch.targets_T[:, None]).squeeze(1)
    assert (found_T - wanted_T).abs().max() <= 1e-5
    engine.update([batch.select([0, 1]), batch.select([2, 3])], weighted_loss, temperature=0.7)
    gradients = by_hf_names(engine, lambda p: p.main_grad)
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    routers = [
        tensor for name, tensor in gradients.items() if name.endswith(("gate.weight", "router.weight"))
    ]
    assert len(routers) == batch.experts_TLK.shape[1] and all(tensor.norm() > 1e-3 for tensor in routers)


@pytest.mark.parametrize("norm_topk", [True, False])
def test_the_routers_gradient_under_replay_is_that_of_finite_differences(tmp_path, norm_topk):
    """With given experts the loss is smooth in the router's weights: the weights of its choice move, its choice does
    not. (Scores that were cut before they are gathered would give no gradient.)"""
    folder = make_moe_model(tmp_path / "m", "qwen3_moe", norm_topk_prob=norm_topk)
    engine = make_engine(folder, distributed=False)
    batch = with_experts(make_batch([9, 5, 12]), engine.architecture.experts)
    batch = replace(batch, is_replayed_T=torch.ones_like(batch.is_replayed_T))
    router = engine.chunks[0].decoder.layers[1].mlp.router
    gradient, _ = engine.gradient([batch], lambda *call: (weighted_loss(*call)[0], None), temperature=0.7)
    assert gradient.norm() > 0
    direction = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1))
    slope = float((router.weight.main_grad * direction).sum())
    losses, weight, step = [], router.weight.detach().clone(), 1e-2
    for sign in (1, -1):
        router.weight.data.copy_(weight + sign * step * direction)
        _, (found,) = engine.gradient([batch], weighted_loss, temperature=0.7)
        loss, _ = weighted_loss(batch, found["logprobs_T"].double(), found["entropy_T"].double())
        losses.append(loss.item())
    assert abs(slope) > 0.05
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-2)


def test_float16_is_refused_for_training(tmp_path):
    with pytest.raises(
        ValueError, match=r"model\.dtype=float16 cannot train a model with experts.*use bfloat16"
    ):
        make_engine(make_moe_model(tmp_path / "m", "mixtral"), dtype="float16")


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("qwen3_moe", MIXED), ("mixtral", dict(tied=True)), ("glm4_moe", {}), ("deepseek_v3", {}),
        ("glm4_moe_lite", dict(q_lora_rank=None)), ("gpt_oss", {}),
    ],
)  # fmt: skip
def test_round_trip_is_bit_identical(tmp_path, kind, changes):
    folder = make_moe_model(tmp_path / "m", kind, **changes)
    make_engine(folder).save_hf(tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_layers_for_further_tokens_are_left_out_and_the_bias_stays_float32(tmp_path):
    """In bfloat16, of a folder as it is published: with a layer behind the last one."""
    folder = make_moe_model(tmp_path / "m", "glm4_moe", num_nextn_predict_layers=1)
    assert architecture_of(folder).further_layers == 1
    weights = load_file(folder / "model.safetensors")
    assert not any(name.startswith("model.layers.2.") for name in weights)
    further = {
        "model.layers.2.eh_proj.weight": torch.ones(32, 64),
        "model.layers.2.mlp.gate.weight": torch.ones(3, 32),
    }
    save_file(weights | further, folder / "model.safetensors", metadata={"format": "pt"})
    assert weight_problems(folder, architecture_of(folder)) == []
    engine = make_engine(folder, dtype="bfloat16")
    engine.save_hf(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        wanted = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        assert written[name].dtype == wanted.dtype and torch.equal(written[name], wanted), name
    assert read_hf_config(tmp_path / "out")["num_nextn_predict_layers"] == 0
    plan = plan_transfer(engine.export_plan(), dtype=torch.bfloat16, device="cpu")
    buckets = list(make_buckets(engine.export_hf(), plan, Buffers("cpu")))
    sent = {name: bucket.dtype for bucket in buckets for name in bucket.names}
    assert {name for name, dtype in sent.items() if dtype == torch.float32} == {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }
    (bias,) = (bucket for bucket in buckets if bucket.dtype == torch.float32)
    assert torch.equal(bias.bytes.view(torch.float32), weights[bias.names[0]])
    assert sum(bucket.bytes.numel() for bucket in buckets) == sum(
        bytes_to_send(engine.architecture, RolloutConfig(dtype="bfloat16"), LayoutConfig())
    )


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda w: w.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            "lacks 1 tensors.*layers.1.mlp.experts.3.up_proj",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.experts.4.up_proj.weight": torch.zeros(2)}),
            "does not account for.*experts.4.up_proj",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.gate.weight": torch.zeros(3, 32)}),
            r"mlp.gate.weight has shape \(3, 32\).*\(4, 32\)",
        ),
        (
            lambda w: w.update({"model.layers.0.mlp.experts.1.down_proj.weight": torch.zeros(32, 48)}),
            r"experts.1.down_proj.weight has shape \(32, 48\).*\(32, 24\)",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, damage, message):
    folder = make_moe_model(tmp_path / "m", "qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        make_engine(folder)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"]
)
def test_tiny_models(tmp_path, family):
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_countdown_model(tmp_path / folder, seed=seed, family=family)
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "a", tmp_path / "c")
    config = read_hf_config(tmp_path / "a")
    experts = read_architecture(config).experts
    assert (experts.num_experts, experts.experts_per_token) == (8, 2)
    assert experts.is_sparse == (family in ("qwen3_moe", "mixtral", "gpt_oss"), True, True, True)
    validate_rollout_layout(config, 2)
    assert json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"


def test_an_unknown_family_is_refused(tmp_path):
    told = CliRunner().invoke(app, ["make-tiny-model", str(tmp_path / "m"), "--family", "gpt"])
    assert isinstance(told.exception, BadInput)
    assert "--family: family 'gpt' is unknown; use one of qwen3, qwen3_moe, mixtral" in str(told.exception)
    with pytest.raises(ValueError, match="'gpt' is unknown; use one of qwen3, qwen3_moe, mixtral, glm4_moe"):
        make_tiny_countdown_model(tmp_path / "m", seed=0, family="gpt")
    assert not (tmp_path / "m").exists()


def test_the_command_makes_a_family(tmp_path):
    assert (
        CliRunner().invoke(app, ["make-tiny-model", str(tmp_path / "m"), "--family", "mixtral"]).exit_code
        == 0
    )
    assert read_hf_config(tmp_path / "m")["model_type"] == "mixtral"


# --- expert parallelism against one process
# ------------------------------------------------------------------------------------------


def assert_same_step(ranks: list[dict], wanted: dict) -> None:
    """Every rank's results of a job against one process's."""
    if wanted["differing"] is not None:
        by_rank = {found["dp_rank"]: found["differing"] for found in ranks}.values()
        assert sum(found.tokens for found in by_rank) == wanted["differing"].tokens
        totals = tuple(map(sum, zip(*(found.by_layer for found in by_rank), strict=True)))
        assert totals == wanted["differing"].by_layer and min(totals) > 0
    assert bool(wanted["chosen"]) == (wanted["differing"] is not None)
    assert_same_choice(ranks, wanted)
    of_dp = {found["dp_rank"]: found["loss"] for found in ranks}
    assert sum(of_dp.values()) == pytest.approx(wanted["loss"], rel=1e-5)
    for found in ranks:
        assert found["bitwise"]  # scores and training
        assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
        for kind in ("gradients", "weights"):
            assert relative_difference(found[kind], wanted[kind]) <= 1e-5
            for name, tensor in wanted[kind].items():
                # Decays are small sums of large numbers of both signs: 1.15e-5 on a CPU without AVX-512.
                bound = 3e-5 if name.endswith(("A_log", "dt_bias")) else 1e-5
                assert (found[kind][name] - tensor).norm() <= bound * tensor.norm(), name


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    shapes = {
        "qwen3_moe": {},
        "mixed": MIXED,
        "mixtral": {},
        "tied": dict(tied=True),
        "glm4_moe": dict(num_hidden_layers=4),
        "gpt_oss": dict(num_hidden_layers=4),
        # Two layers and one in a pipeline of two.
        "deepseek_v3": dict(num_hidden_layers=3, rope_parameters=YARN),
    }
    kinds = {"mixed": "qwen3_moe", "tied": "mixtral"}
    made = {
        name: make_moe_model(folder / name, kinds.get(name, name), **changes)
        for name, changes in shapes.items()
    }
    return made | {REPLAYED: made["mixed"]}


REPLAYED = "mixed, with experts that are given"
TWO_RANKS = {
    "ep2": (dict(ep=2, dp=2), ["mixed", "tied", "glm4_moe", "gpt_oss", REPLAYED]),
    "ep2 tp2 sp": (
        dict(ep=2, tp=2, sp=True),
        ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", REPLAYED],
    ),
    "tp2 sp": (dict(tp=2, sp=True), ["qwen3_moe"]),  # all experts on both ranks, which see different tokens
    "ep2 cp2": (dict(ep=2, cp=2), ["mixed", "deepseek_v3", "gpt_oss"]),
}


def step_jobs(models, names, **optimizer) -> dict[str, tuple]:
    return {
        name: ("step", dict(kind="policy", folder=models[name], replays=name == REPLAYED, **optimizer))
        for name in names
    }


def saves_of(models, names, folder: Path) -> dict[Path, Path]:
    return {models[name]: folder / name for name in names if name != REPLAYED}


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory) -> dict[str, dict]:
    """One process: a step of each model, and the step after a checkpoint, which is at "folder"."""
    checkpoint = tmp_path_factory.mktemp("alone") / "step_000001"
    job = dict(kind="policy", folder=models["mixed"], checkpoint=checkpoint)
    uneven = dict(
        kind="policy", folder=models["deepseek_v3"], checkpoint=checkpoint.parent / "uneven" / checkpoint.name
    )
    biased = dict(
        kind="policy", folder=models["gpt_oss"], checkpoint=checkpoint.parent / "biased" / checkpoint.name
    )
    frozen = job | {"checkpoint": checkpoint.parent / "frozen" / checkpoint.name, "freeze_router": True}
    saves = {
        "saved": ("save", job),
        "saved uneven": ("save", uneven),
        "saved biased": ("save", biased),
        "saved frozen": ("save", frozen),
    }
    folders = {
        "folder": checkpoint,
        "frozen": frozen["checkpoint"],
        "uneven": uneven["checkpoint"],
        "biased": biased["checkpoint"],
    }
    return work_layout(LayoutConfig(), step_jobs(models, models) | saves) | folders


@pytest.fixture(scope="module")
def on_two_ranks(models, alone, tmp_path_factory):
    """(by rank what each case of TWO_RANKS gave, the folder with what they wrote)"""
    folder = tmp_path_factory.mktemp("two")
    cases = {
        case: (layout, step_jobs(models, names), saves_of(models, names, folder / case))
        for case, (layout, names) in TWO_RANKS.items()
    }
    job = dict(kind="policy", folder=models["mixed"])
    cases["ep2"][1].update(
        {
            "plain": ("step", job | {"distributed": False}),
            "loaded": ("load", job | {"checkpoint": alone["folder"]}),
            "loaded frozen": ("load", job | {"checkpoint": alone["frozen"], "freeze_router": True}),
            "saved": ("save", job | {"checkpoint": folder / "step_000001"}),
        }
    )
    biased = dict(kind="policy", folder=models["gpt_oss"])
    cases["ep2 tp2 sp"][1].update(
        {
            "loaded": ("load", biased | {"checkpoint": alone["biased"]}),
            "saved": ("save", biased | {"checkpoint": folder / "biased" / "step_000001"}),
        }
    )
    return run_ranks(work_layouts, 2, folder / "ranks", cases, deadline_s=900), folder


@pytest.mark.engines
@pytest.mark.parametrize("case", TWO_RANKS)
def test_one_step_equals_that_of_one_process(on_two_ranks, alone, models, case):
    """Loss, scores, every gradient, norm, clipping and weights, with unequal token counts per rank; and the
    folder out again."""
    ranks, folder = on_two_ranks
    for name in TWO_RANKS[case][1]:
        assert_same_step([found[case][name] for found in ranks], alone[name])
        if name != REPLAYED:
            assert_same_weights(models[name], folder / case / name)


@pytest.mark.engines
def test_an_optimizer_that_is_not_distributed_steps_alike(on_two_ranks, alone):
    assert_same_step([found["ep2"]["plain"] for found in on_two_ranks[0]], alone["mixed"])


@pytest.mark.engines
def test_a_checkpoint_loads_with_and_without_expert_parallelism(on_two_ranks, alone, models):
    ranks, folder = on_two_ranks
    assert_same_step([found["ep2"]["loaded"] for found in ranks], alone["saved"])
    assert_same_step([found["ep2"]["loaded frozen"] for found in ranks], alone["saved frozen"])
    assert_same_step([found["ep2 tp2 sp"]["loaded"] for found in ranks], alone["saved biased"])
    jobs = {
        "saved": ("load", dict(kind="policy", folder=models["mixed"], checkpoint=folder / "step_000001")),
        "saved biased": (
            "load",
            dict(kind="policy", folder=models["gpt_oss"], checkpoint=folder / "biased" / "step_000001"),
        ),
    }
    for name, found in work_layout(LayoutConfig(), jobs).items():
        assert_same_step([found], alone[name])


@pytest.mark.engines
def test_pipeline_stages_with_and_without_experts(alone, models, tmp_path):
    """The first stage of the mixed model has none. Its checkpoints: one to one process, one of one process,
    one of a plain optimizer. Another model has more layers in the first stage than in the last."""
    names = ["mixed", "tied", "deepseek_v3", "gpt_oss", REPLAYED]
    saves = saves_of(models, names, tmp_path)
    job = dict(kind="policy", folder=models["mixed"])
    plain = job | {"distributed": False, "checkpoint": tmp_path / "plain" / "step_000001"}
    jobs = step_jobs(models, names) | {
        "saved": ("save", job | {"checkpoint": tmp_path / "step_000001"}),
        "loaded": ("load", job | {"checkpoint": alone["folder"]}),
        "loaded uneven": (
            "load",
            dict(kind="policy", folder=models["deepseek_v3"], checkpoint=alone["uneven"]),
        ),
        "saved plain": ("save", plain),
        "loaded plain": ("load", plain),
    }
    cases = {"pp2": (dict(ep=2, dp=2, pp=2), jobs, saves)}
    # Beside it, in the same processes: experts over ranks that split matrices and sequences.
    cases["tp2 cp2"] = (dict(ep=4, tp=2, sp=True, cp=2), step_jobs(models, ["qwen3_moe", "deepseek_v3"]), {})
    ranks = run_ranks(work_layouts, 4, tmp_path / "ranks", cases, deadline_s=900)
    for name in names:
        assert_same_step([found["pp2"][name] for found in ranks], alone[name])
    for model, out in saves.items():
        assert_same_weights(model, out)
    for name in ("saved", "loaded", "saved plain", "loaded plain"):
        assert_same_step([found["pp2"][name] for found in ranks], alone["saved"])
    assert_same_step([found["pp2"]["loaded uneven"] for found in ranks], alone["saved uneven"])
    for name in ("qwen3_moe", "deepseek_v3"):
        assert_same_step([found["tp2 cp2"][name] for found in ranks], alone[name])
    loaded = work_layout(
        LayoutConfig(), {"loaded": ("load", job | {"checkpoint": tmp_path / "step_000001"})}
    )["loaded"]
    assert_same_step([loaded], alone["saved"])


# --- real SGLang servers
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.engines
def test_servers_of_all_kinds_of_layers_take_the_learners_weights_exactly(tmp_path):
    """After another model's weights have come and gone, every byte is that of the folder; log-probs are the
    learner's throughout, also where it replays the servers' experts, which are its own. One family has latent attention,
    whose loader joins matrices, and derives others from them. Three have no experts: with windows, which are shorter than the
    sequences, and norms behind attention and MLP. One has the whole embedding on each rank of a server."""
    fleets = {}
    families = {"deepseek_v3": 2, "mixtral": 1, "olmo3": 2, "glm4": 1, "gpt_oss": 2, "gemma3_text": 2}
    try:
        for family, tensor_parallel in families.items():
            for seed in (0, 1):
                make_tiny_countdown_model(tmp_path / f"{family}{seed}", seed=seed, family=family)
                sharpen(tmp_path / f"{family}{seed}")
            routing = "rollout" if family in ("deepseek_v3", "gpt_oss") else "own"
            logs = tmp_path / "logs" / family
            fleets[family] = make_fleet(tmp_path / f"{family}0", logs, tp=tensor_parallel, routing=routing)
            fleets[family].start()
        for family, tensor_parallel in families.items():
            fleets[family].wait_healthy(400)
            has_experts = family in ("deepseek_v3", "mixtral", "gpt_oss")
            needs = {"tp": tensor_parallel, "needs_experts": has_experts}
            with make_control(fleets[family].urls, **needs) as control:
                if family == "deepseek_v3":
                    control.require_plugin()
                    control.resume()
                    folders = [tmp_path / f"{family}{seed}" for seed in (0, 1)]
                    check_an_interruption(control, fleets[family].urls, folders)
                elif family == "mixtral":
                    with pytest.raises(
                        ControlError, match=r"does not return routed experts.*learner\.routing=own"
                    ):
                        control.require_plugin()
                control.resume()
            serve(
                fleets[family].urls,
                tensor_parallel,
                [make_engine(tmp_path / f"{family}{seed}") for seed in (0, 1)],
                replays=family in ("deepseek_v3", "gpt_oss"),
            )
            fleets[family].stop()
    finally:
        for fleet in fleets.values():
            fleet.stop()


def serve(urls, tensor_parallel, engines, *, replays: bool) -> None:
    with make_control(urls, tp=tensor_parallel) as control:
        (from_disk,) = control.checksums()
        assert any("experts" in name for name in from_disk) == (engines[0].architecture.experts is not None)
        assert gap(urls, engines[0], replays=replays) <= EXACT
        for version, engine in ((1, engines[1]), (2, engines[0])):
            exported = SimpleNamespace(named_parameters=engine.export_hf)
            send(control, exported, version=version)
            (received,) = control.checksums()
            control.resume()
            assert received.keys() == from_disk.keys()
            same = {name for name in received if received[name] == from_disk[name]}
            # Of the other model, norms are the same (ones), biases (zeros), and a rank's part of the vocabulary where it is
            # all padding.
            assert (
                same == set(from_disk)
                if version == 2
                else not [
                    name
                    for name in same
                    if ("experts" in name or "proj" in name) and not name.endswith("bias")
                ]
            )
            assert gap(urls, engine, replays=replays) <= EXACT


def check_an_interruption(control, urls, folders) -> None:
    """A response that an update interrupts comes with the experts by which its last token was sampled: those that the new
    weights choose for all its tokens, from an empty cache."""
    prompt, experts = [3, 8, 5, 14, 9], architecture_of(folders[0]).experts

    def sample(token_ids: list[int], max_new_tokens: int):
        async def ask():
            async with SGLangClient(
                urls, experts=experts, max_concurrency=1, timeout_s=120, max_retries=0, key=KEY
            ) as client:
                options = {"max_new_tokens": max_new_tokens, "temperature": 1.3, "stop_token_ids": []}
                return await client.generate_group(token_ids, **options, seeds=[0])

        return asyncio.run(ask())[0]

    def load(folder, version):
        control.pause()
        control.load_from_disk(folder, version=version)
        control.resume()

    with ThreadPoolExecutor(1) as thread:
        for attempt in range(40):  # again, and later, until the update is inside the response
            load(folders[0], 0)
            response = thread.submit(sample, prompt, 240)
            wait([response], timeout=0.02 * (attempt + 1))
            load(folders[1], 1)
            completion = response.result()
            if completion.num_retractions and set(completion.token_versions) == {0, 1}:
                break
    assert set(completion.token_versions) == {0, 1}
    inputs = [*prompt, *completion.token_ids.tolist()][:-1]
    load(folders[1], 1)
    assert np.array_equal(completion.experts, sample(inputs, 1).experts)
    load(folders[0], 0)
    assert (completion.experts != sample(inputs, 1).experts).any(), "the old weights choose others"


def gap(urls, engine, *, replays: bool) -> float:
    """Largest difference in log-probs between the server and the learner, over freshly sampled responses."""
    experts = engine.architecture.experts if replays else None
    prompts = [[3 + (7 * i + j * j) % 18 for j in range(3 + 5 * i)] for i in range(3)]

    async def sample():
        places = {"max_concurrency": 64, "timeout_s": 120, "max_retries": 0, "key": KEY}
        async with SGLangClient(urls, experts=experts, **places) as client:
            options = {"max_new_tokens": 24, "temperature": 0.7, "stop_token_ids": [5]}
            return await asyncio.gather(
                *(client.generate_group(prompt, **options, seeds=range(4)) for prompt in prompts)
            )

    pairs = [(prompt, c) for prompt, group in zip(prompts, asyncio.run(sample()), strict=True) for c in group]
    batch = pack_sequences(
        token_ids=[[*prompt, *c.token_ids] for prompt, c in pairs],
        response_masks=[[False] * len(prompt) + [True] * len(c.token_ids) for prompt, c in pairs],
        rollout_logprobs=[[*[0.0] * len(prompt), *c.rollout_logprobs] for prompt, c in pairs],
        sequence_ids=range(len(pairs)),
    )
    if replays:
        chosen_TLK = torch.cat([torch.from_numpy(c.experts) for _, c in pairs])
        own = own_choice(engine, batch)
        is_same_TL = (own.experts_TLK.sort(-1).values == chosen_TLK.sort(-1).values).all(-1)
        assert is_same_TL.double().mean() > 0.99  # all but ties within rounding
        batch = replace(own, experts_TLK=chosen_TLK)
    (logprobs_T,) = engine.logprobs([batch], temperature=0.7)
    return float((logprobs_T - batch.rollout_logprobs_T)[batch.response_mask_T].abs().max())
