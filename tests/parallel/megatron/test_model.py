"""The Megatron model against transformers: logits in float32, and weights there and back to the bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from parallel.megatron.rms_norm import rms_norm
from parallel.megatron.rotary import (
    plain_rotary,
    rotary_frequencies,
    rotary_frequencies_of_transformers,
    window_frequencies,
)
from parallel.planning.architecture import padded_vocab_size, read_architecture
from parallel.weights import hf_conversion, hf_files
from tests.support.layout_workers import by_hf_names
from tests.support.megatron_workers import (
    make_batch,
    make_engine,
    make_hf_model,
    run_ranks,
    weighted_loss,
    work_round_trip,
)
from tests.support.moe_workers import by_transformers, make_moe_model

LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN_ROPE = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=64)
SHAPES = [
    ("qwen2", {}), ("qwen2", dict(tied=True)), ("qwen3", {}), ("qwen3", dict(tied=True)), ("llama", {}), ("llama", dict(tied=True)),
    ("llama", dict(rope_parameters=LLAMA3_ROPE)), ("qwen3", dict(rope_parameters=YARN_ROPE)),
    ("qwen2", dict(rope_parameters=dict(rope_type="linear", rope_theta=10_000.0, factor=2.0))), ("llama", dict(num_key_value_heads=4)),
    ("mistral", dict(head_dim=16)), ("phi3", {}), ("phi3", dict(tied=True, num_key_value_heads=4)),
]  # fmt: skip


OLMO3_ROPE = {
    "full_attention": YARN_ROPE | {"rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
OWN_LAYERS = [
    ("olmo2", {}), ("olmo2", dict(tied=True, num_key_value_heads=4)), ("olmo3", {}),
    ("olmo3", dict(rope_parameters=OLMO3_ROPE, sliding_window=20)), ("glm4", {}), ("glm4", dict(attention_bias=False, tied=True)),
    ("gemma3_text", {}), ("gemma3_text", dict(rope_parameters=GEMMA_ROPE, sliding_window=20, num_key_value_heads=1)),
]  # fmt: skip


def hf_logits(folder, batch):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(row[None]).logits[0] for row in batch.tokens_T.split(batch.lengths)])


@pytest.mark.parametrize("kind, changes", SHAPES)
def test_logits_match_transformers_on_packed_batches(tmp_path, kind, changes):
    folder = make_hf_model(tmp_path / "m", kind, **changes)
    batch = make_batch([5, 130, 2, 33, 5, 71])
    engine = make_engine(folder)
    with torch.no_grad():
        found = engine.chunks[0].logits(
            tokens_T=batch.tokens_T, packed=engine.chunks[0].pack(batch.cu_seqlens, batch.positions_T)
        )
    wanted = hf_logits(folder, batch)
    assert wanted.std() > 0.1  # the model says something
    assert (found - wanted).abs().max() <= 1e-4
    _, (scored,) = engine.gradient([batch], weighted_loss, temperature=0.7)
    logp = torch.log_softmax(wanted / 0.7, -1)
    assert (scored["logprobs_T"] - logp.gather(1, batch.targets_T[:, None]).squeeze(1)).abs().max() <= 1e-4
    assert (scored["entropy_T"] + (logp.exp() * logp).sum(-1)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind, changes", OWN_LAYERS)
def test_logits_and_gradients_of_other_layers_match_transformers(tmp_path, kind, changes):
    """Norms behind attention and MLP, norms over all heads, windows, pairs of neighbours that are rotated."""
    folder = make_hf_model(tmp_path / "m", kind, **changes)
    batch = make_batch([5, 60, 2, 33, 5, 71])
    engine = make_engine(folder, distributed=False)
    packed = engine.chunks[0].pack(batch.cu_seqlens, batch.positions_T)
    with torch.no_grad():
        found = engine.chunks[0].logits(tokens_T=batch.tokens_T, packed=packed)
    wanted, gradients = by_transformers(folder, batch, 0.7, tmp_path / "gradients")
    assert wanted.std() > 0.1 and (found - wanted).abs().max() <= 1e-5
    engine.update([batch.select([0, 1, 2]), batch.select([3, 4, 5])], weighted_loss, temperature=0.7)
    mine = by_hf_names(engine, lambda p: p.main_grad)
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (mine[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_embeddings_are_multiplied_by_the_number_that_transformers_rounds(tmp_path):
    folder = make_hf_model(tmp_path / "m", "gemma3_text")
    chunk = make_engine(folder, dtype="bfloat16", distributed=False).chunks[0]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).model.embed_tokens
    tokens = torch.arange(43)
    found = chunk.embedding(input_ids=tokens[None], position_ids=None)[:, 0]
    assert torch.equal(found, theirs(tokens))
    assert not torch.equal(found, theirs.weight * 32**0.5)


@pytest.mark.parametrize("kind", ["qwen3", "olmo2"])
def test_a_pass_without_gradients_keeps_nothing_for_them(tmp_path, kind):
    batch = make_batch([5, 9])
    chunk = make_engine(make_hf_model(tmp_path / "m", kind), distributed=False).chunks[0]
    kept = []
    with (
        torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda t: t),
    ):
        chunk.logits(tokens_T=batch.tokens_T, packed=chunk.pack(batch.cu_seqlens, batch.positions_T))
    assert kept == []


def weights_on_disk(folder):
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


def assert_same_weights(left, right):
    a, b = weights_on_disk(left), weights_on_disk(right)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    "kind, tied",
    [
        ("qwen2", False), ("qwen3", True), ("llama", True), ("mistral", False), ("phi3", False), ("olmo2", True), ("olmo3", False),
        ("glm4", False), ("gemma3_text", True),
    ],
)  # fmt: skip
def test_round_trip_is_bit_identical(tmp_path, kind, tied):
    folder = make_hf_model(tmp_path / "m", kind, tied=tied)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    make_engine(folder).save_hf(tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.engines
@pytest.mark.parametrize("kind, tied", [("qwen2", True), ("qwen3", False)])
def test_round_trip_over_two_tensor_parallel_ranks(tmp_path, kind, tied):
    folder = make_hf_model(tmp_path / "m", kind, tied=tied)
    run_ranks(work_round_trip, 2, tmp_path / "ranks", folder, dict(tp=2), tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")


def test_shards_of_bounded_size_are_read_again(tmp_path):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    engine = make_engine(folder)
    hf_conversion.save_hf(engine.chunks, folder, tmp_path / "out", max_shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert_same_weights(folder, tmp_path / "out")
    make_engine(tmp_path / "out").save_hf(tmp_path / "again")
    assert_same_weights(folder, tmp_path / "again")


def test_a_failed_save_leaves_the_previous_folder(tmp_path, monkeypatch):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    engine = make_engine(folder)
    engine.save_hf(tmp_path / "out")

    def full_disk(*unused, **unused_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_files, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        engine.save_hf(tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out"]  # nothing partial


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "lacks 1 tensors.*layers.1.mlp.up_proj"),
        (
            lambda w: w.update({"model.layers.0.extra.weight": torch.zeros(2)}),
            "does not account for.*layers.0.extra",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \(3,\).*\(32,\)",
        ),
        (
            lambda w: w["model.layers.1.self_attn.k_proj.weight"][3, 5:6].fill_(torch.nan),
            "has NaN or infinity in .*layers.1.self_attn.k_proj.weight.*, as torch.float32; use a copy",
        ),
        (lambda w: w["model.norm.weight"][2:3].fill_(-torch.inf), "has NaN or infinity in model.norm.weight"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, damage, message):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        make_engine(folder)


def test_weights_that_the_dtype_cannot_hold_are_named(tmp_path):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6  # beyond float16
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    make_engine(folder, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"infinity in .*layers.0.mlp.up_proj.weight, as torch.float16"):
        make_engine(folder, dtype="float16")


@pytest.mark.parametrize("keys", [(), ("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_the_config_has_the_dtype_of_the_weights_under_every_key(tmp_path, keys):
    """transformers prefers the newer one."""
    folder = make_hf_model(tmp_path / "m", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "float32")))
    make_engine(folder, dtype="bfloat16").save_hf(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved == config | dict.fromkeys(keys or ("dtype",), "bfloat16")


def test_a_tied_model_may_repeat_its_embedding_and_nothing_else(tmp_path):
    """With another output layer transformers does not tie them, whatever config.json says."""
    folder = make_hf_model(tmp_path / "m", "qwen3", tied=True)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors", {"format": "pt"})
    make_engine(folder)
    save_file(weights | {"lm_head.weight": embedding.flip(0)}, folder / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    with pytest.raises(
        ValueError, match=r"has a lm_head.weight that is not .* set it to false, or remove lm_head"
    ):
        make_engine(folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="no readable safetensors"):
        make_engine(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="neither"):
        make_engine(folder)


def test_a_rope_type_that_depends_on_length_is_refused(tmp_path):
    folder = make_hf_model(
        tmp_path / "m", "llama", rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    )
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        make_engine(folder)


@pytest.mark.parametrize("shape", [(5, 1, 16), (7, 4, 8), (0, 2, 8)])
def test_rms_norm_matches_torch_in_float64_with_gradients(shape):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn((*shape[:-1], 2 * shape[-1]), generator=generator).requires_grad_()
    weight = torch.randn(shape[-1], generator=generator).requires_grad_()
    upstream = torch.randn(shape, generator=generator)
    x = whole[..., : shape[-1]]  # strided, as queries are
    y = rms_norm(x, weight, 1e-6)
    y.backward(upstream)
    whole64, weight64 = (t.detach().double().requires_grad_() for t in (whole, weight))
    expected = torch.nn.functional.rms_norm(whole64[..., : shape[-1]], (shape[-1],), weight64, 1e-6)
    expected.backward(upstream.double())
    assert torch.allclose(y.double(), expected, atol=1e-6)
    assert torch.allclose(whole.grad.double(), whole64.grad, atol=1e-5)
    assert torch.allclose(weight.grad.double(), weight64.grad, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(rms_norm(x, weight, 1e-6), y)


def test_vocabulary_is_padded_to_divide():
    assert [padded_vocab_size(43, size) for size in (1, 2, 4, 8)] == [43, 44, 44, 48]


MODEL_CONFIGS = sorted((Path(__file__).parents[2] / "model_configs").glob("*/config.json"))


@pytest.mark.parametrize("file", MODEL_CONFIGS, ids=lambda file: file.parent.name)
def test_rotary_frequencies_are_those_of_transformers(file):
    hf_config = json.loads(file.read_text())
    found_F, factor = rotary_frequencies(file.parent, hf_config)
    wanted_F, wanted_factor = rotary_frequencies_of_transformers(file.parent, hf_config["model_type"])
    assert torch.equal(found_F, wanted_F) and factor == wanted_factor
    assert (plain_rotary(hf_config) is None) == (hf_config.get("rope_scaling") is not None)


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, (10_000.0, 16)),
        ({"rope_parameters": None, "rope_theta": 500}, (500, 16)),
        ({"rope_theta": 500}, None),  # which of the two counts is for transformers to say
        ({"rope_parameters": None}, None),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}, None),
        ({"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}, None),
        ({"rope_parameters": None, "rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"head_dim": None}, None),  # 128, by the default of Qwen3's config class
        ({"head_dim": None, "model_type": "llama"}, (10_000.0, 8)),
        ({"rope_parameters": None, "rope_theta": 500, "model_type": "gpt_oss"}, None),  # YaRN, by the default of its class
    ],
)  # fmt: skip
def test_frequencies_that_a_config_does_not_spell_out_are_left_to_transformers(tmp_path, changes, plain):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    hf_config = json.loads((folder / "config.json").read_text()) | changes
    assert plain_rotary(hf_config) == plain
    if plain is not None:
        (folder / "config.json").write_text(json.dumps(hf_config))
        found_F, factor = rotary_frequencies(folder, hf_config)
        wanted_F, wanted_factor = rotary_frequencies_of_transformers(folder, hf_config["model_type"])
        assert torch.equal(found_F, wanted_F) and factor == wanted_factor


@pytest.mark.parametrize("kind", ["mistral", "phi3", "glm4_moe", "olmo2", "glm4"])
def test_frequencies_of_other_families_are_those_of_their_own_code(tmp_path, kind):
    """As saved by transformers, and as published, where the share of a head that is rotated is a field of its own."""
    make = make_moe_model if kind == "glm4_moe" else make_hf_model
    folder = make(tmp_path / "m", kind)
    hf_config = json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    wanted_F = model.model.rotary_emb.inv_freq
    rope = hf_config.pop("rope_parameters")
    published = hf_config | {"rope_scaling": None, "rope_theta": rope["rope_theta"]}
    if kind in ("glm4_moe", "glm4"):
        published["partial_rotary_factor"] = 0.5
    for config in (hf_config | {"rope_parameters": rope}, published):
        assert plain_rotary(config) is not None
        found_F, factor = rotary_frequencies(folder, config)
        assert torch.equal(found_F, wanted_F) and factor == 1.0
        assert 2 * len(found_F) == read_architecture(config).rotary_size
    found_F, factor = rotary_frequencies_of_transformers(folder, kind)
    assert torch.equal(found_F, wanted_F) and factor == 1.0


@pytest.mark.parametrize("factor", [None, 8.0])
def test_frequencies_by_kind_of_layer_are_those_of_gemmas_own_code(tmp_path, factor):
    """As saved by transformers, and as published."""
    full = {"rope_type": "default", "rope_theta": 1_000_000.0}
    rope = GEMMA_ROPE if factor else GEMMA_ROPE | {"full_attention": full}
    folder = make_hf_model(tmp_path / "m", "gemma3_text", rope_parameters=rope)
    hf_config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "linear", "factor": factor} if factor else None
    old = {"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "rope_scaling": scaling}
    published = {k: v for k, v in hf_config.items() if k != "rope_parameters"} | old
    for config in (hf_config, published):
        (folder / "config.json").write_text(json.dumps(config))
        wanted = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
        found_F, attention_factor = rotary_frequencies(folder, config)
        assert torch.equal(found_F, wanted.full_attention_inv_freq) and attention_factor == 1.0
        assert torch.equal(window_frequencies(config), wanted.sliding_attention_inv_freq)
        by_transformers_F, _ = rotary_frequencies_of_transformers(folder, "gemma3_text")
        assert torch.equal(by_transformers_F, wanted.full_attention_inv_freq)


def test_transformers_rotary_frequencies_survive_the_stand_ins(tmp_path):
    """A wrong order of patches leaves inv_freq of models loaded later uninitialised, without an error."""
    folder = make_hf_model(tmp_path / "m", "qwen3")
    make_engine(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    wanted = 1.0 / 10_000 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq.float(), wanted)
