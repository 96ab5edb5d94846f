"""Errors that a model's config.json alone shows: refused by name before anything starts, and without torch."""

import json

import pytest
from transformers import CONFIG_MAPPING

from configs.schema.layout import LayoutConfig
from parallel.planning.architecture import architecture_of, read_architecture, read_hf_config
from parallel.planning.families import SUPPORTED
from parallel.planning.layout import check_numerics, validate_layout, validate_rollout_layout
from rollout.tiny_model import FAMILIES
from tests.support.megatron_workers import make_hf_model

CONFIG = {
    "model_type": "qwen3", "vocab_size": 43, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
}  # fmt: skip
CHECKS = [
    read_architecture,
    lambda config: validate_layout(config, LayoutConfig()),
    lambda config: validate_rollout_layout(config, 1),
]
OPTIONAL = ("num_key_value_heads", "head_dim")


def without(name):
    return {key: value for key, value in CONFIG.items() if key != name}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "phi3"])
def test_what_transformers_writes_is_read(tmp_path, kind):
    architecture = architecture_of(make_hf_model(tmp_path / "m", kind, tied=True))
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.num_layers) == (4, 2, 2)
    assert (architecture.head_dim, architecture.vocab_size, architecture.tied) == (
        16 if kind == "qwen3" else 8,
        43,
        True,
    )
    assert (architecture.qkv_bias, architecture.qk_norm) == (kind == "qwen2", kind == "qwen3")


@pytest.mark.parametrize("kind", SUPPORTED)
def test_head_dim_is_left_out_where_transformers_makes_the_same_of_it(kind):
    config_class, own = CONFIG_MAPPING[kind], FAMILIES[kind]
    fields = {name: value for name, value in own.items() if name != "head_dim"}
    made = config_class(**fields | {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4})
    is_latent = SUPPORTED[kind].is_latent  # head_dim is another size there
    assert is_latent or SUPPORTED[kind].needs_head_dim == (getattr(made, "head_dim", None) not in (None, 32))


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if isinstance(SUPPORTED[kind].qkv_bias, str)])
def test_biases_are_there_by_transformers_default_where_the_file_does_not_say(kind):
    field, config_class, own = SUPPORTED[kind].qkv_bias, CONFIG_MAPPING[kind], FAMILIES[kind]
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    written = config_class(**own | sizes).to_dict()
    found = read_architecture({name: value for name, value in written.items() if name != field})
    assert found.qkv_bias == getattr(config_class(), field)


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if SUPPORTED[kind].is_latent])
@pytest.mark.parametrize("head_dim", [None, 8, 16])
def test_a_size_of_rotated_parts_that_transformers_takes_and_sglang_does_not_is_refused(kind, head_dim):
    config_class, own = CONFIG_MAPPING[kind], FAMILIES[kind]
    written = dict(config_class(**own, num_hidden_layers=4).to_dict(), head_dim=head_dim)
    taken = config_class(**written).head_dim
    if taken == written["qk_rope_head_dim"]:
        assert read_architecture(written).rotary_size == taken
    else:
        with pytest.raises(
            ValueError, match=f"head_dim={head_dim!r} beside qk_rope_head_dim=16.*remove head_dim"
        ):
            read_architecture(written)


def test_a_window_that_covers_every_position_hides_nothing():
    for kind in ("mistral", "phi3"):
        for window in (None, 256, 4096):
            assert read_architecture(CONFIG | {"model_type": kind, "sliding_window": window}).num_layers == 2


def test_optional_sizes_follow_from_the_others():
    config = {k: v for k, v in CONFIG.items() if k not in OPTIONAL} | {"model_type": "llama"}
    architecture = read_architecture(config)
    assert (architecture.num_kv_heads, architecture.head_dim) == (4, 8)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", [name for name in CONFIG if name not in (*OPTIONAL, "model_type")])
def test_a_missing_field_is_named(check, name):
    with pytest.raises(ValueError, match=f"config.json lacks '{name}'"):
        check(without(name))


@pytest.mark.parametrize("config", [{}, without("model_type")])
def test_a_config_without_a_model_type_lists_the_supported_ones(config):
    with pytest.raises(
        ValueError, match=r"model_type None is not supported; supported are qwen2 .*, qwen3 .*, llama"
    ):
        validate_layout(config, LayoutConfig())


OLMO3 = {
    "model_type": "olmo3", "head_dim": None, "rope_theta": 500_000, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def test_windows_and_norms_of_a_config():
    found = read_architecture(CONFIG | OLMO3)
    assert (found.windows, found.family.whole_qk_norm, found.family.norms) == ((9, None), True, "behind")
    assert found.split_vectors == (4 + 2) * 8 and found.layer_norms == 2
    with pytest.raises(ValueError, match=r"layout.tp=4 does not divide the model's num_key_value_heads=2"):
        validate_layout(CONFIG | OLMO3, LayoutConfig(tp=4))
    with pytest.raises(ValueError, match=r"rollout.tp=4 does not fit the model's num_key_value_heads=2"):
        validate_rollout_layout(CONFIG | OLMO3, 4)
    with pytest.raises(ValueError, match="aligned covers layers of Llama's form"):
        check_numerics(1, found)


GEMMA = {
    "model_type": "gemma3_text", "sliding_window": 9, "query_pre_attn_scalar": 64, "rope_theta": 1_000_000, "rope_local_base_freq": 10_000,
    "rope_scaling": None, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def test_a_gemma_of_a_published_config():
    """Of which layers have windows, a 1B's file does not say, nor that the embeddings are the output layer."""
    config = (
        {k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"} | GEMMA | {"num_hidden_layers": 7}
    )
    found = read_architecture(config)
    assert found.windows == (9, 9, 9, 9, 9, None, 9) and found.tied and found.score_scale == 1 / 8
    assert read_architecture(config | {"sliding_window_pattern": 2}).windows == (9, None) * 3 + (9,)
    assert found.family.is_gemma and found.family.centred_norms and found.layer_norms == 4
    with pytest.raises(ValueError, match="aligned covers layers of Llama's form"):
        check_numerics(1, found)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0, which the learner does not"),
        (dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0, which the learner does not"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention=True, which the learner"),
        (dict(attention_bias=True), "attention_bias=True"),
        (
            dict(hidden_activation="gelu"),
            "hidden_activation='gelu', which SGLang does not compute; it must be",
        ),
        (dict(tie_word_embeddings=False), "tie_word_embeddings=False, which SGLang does not compute"),
        (dict(head_dim=None), "head_dim=None; it must be a whole number"),
        (dict(query_pre_attn_scalar=0), "query_pre_attn_scalar=0; it must be a number above 0"),
        (dict(rope_local_base_freq=None), "rope_local_base_freq=None; it must be a number above 0"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "rope_type 'yarn' .* are default, linear$"),
        (
            dict(rope_parameters=BY_KIND, rope_scaling={"rope_type": "linear", "factor": 8.0}),
            "has rope_parameters and rope_scaling",
        ),
        (dict(rope_parameters={"rope_theta": 1e6}), "it must be an object of full_attention and sliding_att"),
        (
            dict(rope_parameters=BY_KIND | {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}),
            "rope_type='linear' of sliding_attention, where SGLang scales nothing",
        ),
        (
            dict(rope_parameters=BY_KIND | {"full_attention": {"rope_type": "linear", "rope_theta": 1e6}}),
            "lacks 'factor'",
        ),
    ],
)
def test_a_gemma_that_would_be_computed_otherwise_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(CONFIG | {"tie_word_embeddings": True} | GEMMA | change)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ALIKE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model_type="tandem"), "'tandem' is not supported; supported are qwen2"),
        (dict(model_type="minicpm3"), r"'minicpm3' is not supported: .*\(MLA\).*; supported are qwen2"),
        (
            dict(model_type="mistral", sliding_window=255),
            "sliding_window=255, .* set sliding_window to null and max_position_embeddings to at most 255",
        ),
        (dict(model_type="phi3", sliding_window=64), "sliding_window=64, .* set sliding_window to null"),
        (
            dict(model_type="phi3", rope_scaling={"type": "longrope"}),
            "rope_type 'longrope' .* supported are default$",
        ),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (
            dict(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
            "partial_rotary_factor=0.5",
        ),
        (dict(use_sliding_window=True), "use_sliding_window"),
        (
            OLMO3 | {"layer_types": ["full_attention"]},
            r"layer_types=\['full_attention'\]; it must be a list of 2",
        ),
        (
            OLMO3 | {"layer_types": ["full_attention", "chunked"]},
            "it must be a list of 2 names, of full_attention and",
        ),
        (OLMO3 | {"sliding_window": 0}, "sliding_window=0; it must be a whole number"),
        (
            OLMO3 | {"rope_theta": 1e4},
            "rope_theta=10000.0, which transformers uses only in layers without a window",
        ),
        (
            OLMO3 | {"rope_parameters": {"rope_theta": 5e5}},
            "has rope_parameters, which SGLang does not read there",
        ),
        (OLMO3 | {"head_dim": 16}, "head_dim=16, of which SGLang's olmo3 knows nothing; it must be 8"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(layer_types=["sliding_attention"]), "layer_types"),
        (
            dict(quantization_config={"bits": 4}),
            "quant_method=None, .* use the model as it was before it was quantised",
        ),
        (dict(quantization_config={"quant_method": "fp8"}), "`tandem dequantise FOLDER OUT`, and use OUT"),
        (
            dict(text_config={"hidden_size": 64}),
            "text_config={'hidden_size': 64}, which the learner does not",
        ),
        (
            dict(rope_parameters={"rope_type": "dynamic"}),
            r"rope_type 'dynamic'.*supported are default, linear, llama3, yarn",
        ),
        (dict(rope_scaling={"type": "longrope"}), "rope_type 'longrope'"),
        (
            dict(rope_parameters={"rope_theta": 1e6}, rope_scaling={"type": "yarn", "factor": 4.0}),
            "rope_parameters and rope_scaling=.*'yarn'.*, of which transformers reads only the latter",
        ),
        (
            dict(rope_scaling=YARN | {"attention_factor": 0.7}),
            "attention_factor=0.7 in its rope parameters, of which",
        ),
        (dict(rope_scaling=YARN | {"attn_factor": 0.7}), "attn_factor=0.7 in its rope parameters, of which"),
        (dict(rope_scaling=YARN | {"extrapolation_factor": 0}), "extrapolation_factor=0 in its rope"),
        (dict(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0}), "mscale=1.0 in its rope parameters"),
        (dict(rope_scaling=YARN | {"beta_slow": None}), "beta_slow=None in its rope parameters, of which"),
        (
            dict(rope_scaling=YARN, original_max_position_embeddings=32),
            "original_max_position_embeddings=32 beside its rope parameters, of which transformers and SGLang",
        ),
        (dict(model_type="mixtral", rope_scaling=YARN), "rope_type 'yarn' .* supported are default$"),
        (dict(dual_chunk_attention_config={"chunk_size": 64}), "dual_chunk_attention_config="),
        (dict(rope_is_neox_style=False), "rope_is_neox_style=False"),
        (dict(is_causal=False), "is_causal=False"),
        (dict(rope_scaling=[8]), r"rope parameters \[8\]"),
        (dict(rope_scaling={"type": "yarn"}), "lacks 'factor'"),
        (dict(rope_scaling={"type": "yarn", "factor": 4, "beta_fast": "32"}), "beta_fast='32' in its rope"),
        (dict(rope_theta="1e4"), "rope_theta='1e4' in its rope"),
        (dict(layer_types=3), "layer_types=3"),
        (dict(num_attention_heads="4"), "num_attention_heads='4'; it must be a whole number"),
        (dict(vocab_size=None), "vocab_size=None"),
        (dict(num_key_value_heads=0), "num_key_value_heads=0"),
        (dict(hidden_size=True), "hidden_size=True"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan"),
        (dict(head_dim=None), "head_dim=None; it must be a whole number"),
        (dict(tie_word_embeddings="false"), "tie_word_embeddings='false'; it must be true or false"),
        (dict(rope_parameters={"rope_theta": None}), "rope_theta=None; it must be a number above 0"),
        (dict(rope_parameters=False), "rope parameters False; they must be an object"),
        (dict(model_type="mistral", sliding_window="4"), "sliding_window='4'; it must be a whole number"),
        # transformers' default, where the file has none
        (
            dict(model_type="mistral", max_position_embeddings=4097),
            "sliding_window=4096, which SGLang does not compute",
        ),
        (dict(num_key_value_heads=3), "num_attention_heads=4, not a multiple of num_key_value_heads=3"),
        (dict(hidden_size=30, head_dim=None), "hidden_size=30, which does not divide"),
    ],
)
def test_what_the_learner_cannot_compute_is_refused_by_name(change, message):
    config = CONFIG | change
    for check in CHECKS:
        with pytest.raises(ValueError, match=message):
            check(config)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e4}},
        {"rope_parameters": ALIKE, "rope_scaling": ALIKE},
        # 0.1 log 4 + 1, as published files write it.
        {
            "rope_scaling": YARN | {"attention_factor": 1.138629436111989},
            "original_max_position_embeddings": 64,
        },
        {
            "rope_scaling": YARN
            | {"mscale": 0.5, "mscale_all_dim": 1.0, "attention_factor": 1.0693147 / 1.1386294}
        },
    ],
)
def test_static_rope_types_are_accepted_in_either_spelling(rope):
    read_architecture(CONFIG | rope)


@pytest.mark.parametrize(
    "text, message",
    [(None, r"cannot read config\.json"), ("{", "is not valid JSON"), ("[1]", "holds list, not an object")],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_hf_config(tmp_path)


def test_config_is_read_as_it_stands(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_hf_config(tmp_path) == CONFIG
