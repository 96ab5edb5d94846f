"""Adapters: against a plain layer of torch, against Hugging Face's model with merged weights, and against the base."""

import copy
import json
import math
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from parallel.checkpoints import base_model
from parallel.checkpoints.checkpoint import CheckpointError
from parallel.megatron.lora import LoraLinear, adapted_layers, is_adapter
from parallel.weights import hf_conversion
from tests.support.layout_workers import by_hf_names, gradients_of_update, policy_loss
from tests.support.megatron_workers import (
    make_batch,
    make_engine,
    make_hf_model,
    relative_difference,
    weighted_loss,
    weights_of,
)

LORA = {"rank": 4, "alpha": 6.0}
FORWARDS = ("factored", "merged")
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen2", tied=True)


@pytest.fixture(scope="module")
def batch():
    return make_batch([9, 5, 12, 9])


class PlainAdapter(torch.nn.Module):
    """y = W x + bias + alpha / rank B A x, as PEFT has it."""

    def __init__(self, linear: torch.nn.Linear, a: Tensor, b: Tensor, scale: float):
        super().__init__()
        self.linear, self.a, self.b, self.scale = linear, a, b, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def reference_of(engine, folder: Path) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Hugging Face's model with the engine's adapters, and these by name as leaves: q, k and v share A, as gate and up."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    model.requires_grad_(False)
    leaves: dict[str, Tensor] = {}
    shared: dict[int, Tensor] = {}
    for name, a, b in hf_conversion.export_adapters(engine.chunks):
        kept_a = shared.setdefault(a.data_ptr(), a.detach().clone().requires_grad_())
        leaves[f"{name} A"], leaves[f"{name} B"] = kept_a, b.detach().clone().requires_grad_()
        place, _, last = name.removesuffix(".weight").rpartition(".")
        parent = model.get_submodule(place)
        adapter = PlainAdapter(
            getattr(parent, last), kept_a, leaves[f"{name} B"], LORA["alpha"] / LORA["rank"]
        )
        setattr(parent, last, adapter)
    return model, leaves


def reference_loss(model: torch.nn.Module, batch) -> Tensor:
    """``policy_loss`` of the micro-batch's sequences, one by one."""
    logprobs, entropies = [], []
    for start, stop in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        logits = model(batch.tokens_T[None, start:stop]).logits[0].double() / TEMPERATURE
        logp = logits.log_softmax(-1)
        logprobs.append(logp.gather(1, batch.targets_T[start:stop, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return policy_loss(batch, torch.cat(logprobs), torch.cat(entropies))[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_gradients_are_those_of_a_plain_reference(folder, batch, forward, recompute):
    engine = make_engine(folder, lora=LORA | {"forward": forward}, recompute=recompute)
    model, leaves = reference_of(engine, folder)
    with gradients_of_update(engine) as gradients:
        engine.update([batch], policy_loss, temperature=TEMPERATURE)
    loss = reference_loss(model, batch)
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert len(gradients) == 2 * 7 * 2  # A and B of seven matrices in two layers
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        assert (gradients[name] - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_look_at_the_gradients_changes_no_later_step_of_a_model_of_two_bytes(folder, batch, lora):
    """The gradients are of four bytes."""
    plain, looked_at = (make_engine(folder, dtype="bfloat16", lora=lora) for _ in range(2))
    for _ in range(3):
        wanted = plain.update([batch], policy_loss, temperature=TEMPERATURE)
        with gradients_of_update(looked_at) as gradients:
            found = looked_at.update([batch], policy_loss, temperature=TEMPERATURE)
        assert found.grad_norm == wanted.grad_norm > 0
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    after, wanted = (by_hf_names(engine, lambda p: p) for engine in (looked_at, plain))
    assert all(torch.equal(after[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize("targets", [["qkv"], ["proj", "fc2"], ["fc1"]])
def test_only_the_targets_have_adapters(folder, batch, targets):
    engine = make_engine(folder, lora=LORA | {"targets": targets})
    before = weights_of(engine)
    engine.update([batch], weighted_loss, temperature=TEMPERATURE)
    after = weights_of(engine)
    moved = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    parts = {
        "qkv": {"q_proj", "k_proj", "v_proj"},
        "proj": {"o_proj"},
        "fc1": {"gate_proj", "up_proj"},
        "fc2": {"down_proj"},
    }
    assert moved == set().union(*(parts[target] for target in targets))


@pytest.mark.parametrize("forward", FORWARDS)
def test_the_optimizer_has_the_adapters_alone(folder, forward):
    engine = make_engine(folder, lora=LORA | {"forward": forward})
    trained = {name for name, p in engine.chunks[0].named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in engine.chunks[0].named_parameters() if is_adapter(name)}
    numbers = sum(p.numel() for p in engine.chunks[0].parameters() if p.requires_grad)
    (buffer,) = engine._trained[0].buffers
    assert numbers <= buffer.grad_data.numel() < numbers + 1000  # Megatron pads its buffers
    assert not any(hasattr(p, "main_grad") for p in engine.chunks[0].parameters() if not p.requires_grad)


@pytest.mark.parametrize(
    ("dtype", "served"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_the_merged_forward_is_that_of_the_served_weights(folder, batch, tmp_path, dtype, served):
    """To the bit: a model that is loaded from the export, and rounded as its servers round, has the same log-probs."""
    engine = make_engine(folder, lora=LORA | {"forward": "merged"}, dtype=dtype, served=served)
    engine.save_hf(tmp_path / "hf")
    plain = make_engine(tmp_path / "hf", dtype=dtype)
    if served != dtype:  # the matrices that have adapters; embedding and norms have none
        for layer in plain.chunks[0].decoder.modules():
            if type(layer).__name__ in ("ColumnParallelLinear", "RowParallelLinear"):
                layer.weight.data = layer.weight.data.to(getattr(torch, served)).to(layer.weight.dtype)
    found, wanted = (e.logprobs([batch], temperature=TEMPERATURE)[0] for e in (engine, plain))
    assert torch.equal(found, wanted)
    factored = make_engine(folder, lora=LORA | {"forward": "factored"}, dtype=dtype)
    gap = (factored.logprobs([batch], temperature=TEMPERATURE)[0] - wanted).abs().max()
    assert 0 < gap < (1e-4 if served == "float32" else 0.2)


@pytest.mark.parametrize("pieces", [1, 2])
def test_the_merged_forward_is_aligned_too(folder, batch, tmp_path, pieces):
    """Rows of a matrix that is split by inputs are summed in pieces by Tandem's own layer, adapters included."""
    engine = make_engine(folder, lora=LORA | {"forward": "merged"}, pieces=pieces)
    engine.save_hf(tmp_path / "merged")
    found, base, expected = (
        e.logprobs([batch], temperature=TEMPERATURE)[0]
        for e in (
            engine,
            make_engine(folder, pieces=pieces),
            make_engine(tmp_path / "merged", pieces=pieces),
        )
    )
    assert torch.equal(found, expected) and not torch.allclose(found, base)


def test_autograd_keeps_no_merged_weight(folder, batch, monkeypatch):
    """Between forward and backward, which makes each a second time: all layers' together would be a second model."""
    engine = make_engine(folder, lora=LORA | {"forward": "merged"})
    made: list[weakref.ref] = []
    served = LoraLinear.served

    def remembered(layer):
        tensor = served(layer)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(LoraLinear, "served", remembered)

    def loss(microbatch, logprobs_T, entropy_T):
        alive.append([tensor() is not None for tensor in made])
        return logprobs_T.sum(), None

    alive: list[list[bool]] = []
    engine.update([batch], loss, temperature=1.0)
    assert alive == [[False] * 8]  # four matrices in two layers
    assert len(made) == 16


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "phi3"])
def test_merged_weights_are_w_plus_b_a(tmp_path, kind):
    """By a slow sum in float64, one Hugging Face tensor at a time."""
    folder = make_hf_model(tmp_path / "m", kind)
    engine = make_engine(folder, lora=LORA)
    base, merged = weights_of(make_engine(folder)), weights_of(engine)
    adapters = {name: (a, b) for name, a, b in hf_conversion.export_adapters(engine.chunks)}
    assert len(adapters) == 2 * (4 if kind == "phi3" else 7)  # whose folder has fused matrices
    for name, weight in merged.items():
        wanted = base[name].double()
        if name in adapters:
            a, b = (x.double() for x in adapters[name])
            wanted = wanted + LORA["alpha"] / LORA["rank"] * torch.einsum("or,ri->oi", b, a)
            assert (wanted - base[name]).abs().max() > 1e-3
        torch.testing.assert_close(weight.double(), wanted, rtol=0, atol=1e-6)


def test_training_starts_from_the_base(folder, batch):
    """B is zero, so that policy, servers and reference are the base to the bit. A is uniform in +-1 / sqrt(inputs)."""
    from configs.schema.learner import LoraConfig
    from parallel.megatron.lora import Lora, first_a

    engine = make_engine(folder, lora=LORA | {"forward": "factored"})
    for layer in adapted_layers(engine.chunks[0]).values():
        layer.lora_b.data.zero_()
        bound = 1 / math.sqrt(layer.input_size)
        assert 0.9 * bound < layer.lora_a.abs().max() <= bound
    plain = make_engine(folder)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights_of(engine).values(), weights_of(plain).values(), strict=True)
    )
    found, wanted = (e.logprobs([batch], temperature=1.0)[0] for e in (engine, plain))
    assert torch.equal(found, wanted)
    lora = Lora(config=LoraConfig(rank=64), served_dtype=torch.float32)
    first, other_seed, other_name = (
        first_a(n, 100, lora, seed) for n, seed in (("x", 0), ("x", 1), ("y", 0))
    )
    assert not torch.equal(first, other_seed) and not torch.equal(first, other_name)
    assert first.var().item() == pytest.approx(1 / 100 / 3, rel=0.05)


@pytest.mark.parametrize("forward", FORWARDS)
def test_the_reference_is_the_policy_without_adapters(folder, batch, forward):
    engine, plain = make_engine(folder, lora=LORA | {"forward": forward}), make_engine(folder)
    wanted = plain.logprobs([batch], temperature=1.0)[0]
    before = engine.logprobs([batch], temperature=1.0)[0]
    with engine.without_adapters():
        assert torch.equal(engine.logprobs([batch], temperature=1.0)[0], wanted)
    assert torch.equal(engine.logprobs([batch], temperature=1.0)[0], before) and not torch.equal(
        before, wanted
    )


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_score_and_train_are_bitwise_equal(folder, batch, dtype, forward):
    engine = make_engine(folder, lora=LORA | {"forward": forward}, dtype=dtype)
    for _ in range(2):
        scored = engine.logprobs([batch], temperature=TEMPERATURE)[0]
        trained = engine.update([batch], weighted_loss, temperature=TEMPERATURE).outputs[0]["logprobs_T"]
        assert torch.equal(scored, trained)


def test_going_on_equals_never_having_stopped(folder, batch, tmp_path):
    first, second = (make_engine(folder, lora=LORA, dtype="bfloat16") for _ in range(2))
    for _ in range(2):
        first.update([batch], weighted_loss, temperature=1.0)
    first.save(tmp_path / "step_000002", {"at": 2})
    assert second.load(tmp_path / "step_000002") == {"at": 2}
    for _ in range(2):
        for engine in (first, second):
            engine.update([batch], weighted_loss, temperature=1.0)
    found, wanted = (by_hf_names(engine, lambda p: p) for engine in (second, first))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (
        relative_difference(
            wanted, by_hf_names(make_engine(folder, lora=LORA, dtype="bfloat16"), lambda p: p)
        )
        > 1e-3
    )
    saved = sum(path.stat().st_size for path in (tmp_path / "step_000002").glob("*.distcp"))
    full = make_engine(folder, dtype="bfloat16")
    full.save(tmp_path / "step_000003", {})
    assert saved < 0.6 * sum(path.stat().st_size for path in (tmp_path / "step_000003").glob("*.distcp"))


def test_a_checkpoint_belongs_to_its_base_and_settings(folder, tmp_path):
    engine = make_engine(folder, lora=LORA)
    engine.save(tmp_path / "step_000001", {})
    make_engine(folder, dtype="float32").save(tmp_path / "step_000002", {})
    other = make_hf_model(tmp_path / "other", "qwen2", tied=True, seed=1)
    moved = make_hf_model(tmp_path / "moved", "qwen2", tied=True)
    wrong = {
        "whose weights are not those of": (make_engine(other, lora=LORA), 1),
        r"alpha=6.0 \(now 7.0\)": (make_engine(folder, lora=LORA | {"alpha": 7.0}), 1),
        "targets=": (make_engine(folder, lora=LORA | {"targets": ["qkv"]}), 1),
        "it holds only adapters of .*, and this run has no learner.lora": (make_engine(folder), 1),
        "every weight and no adapters, and this run has learner.lora": (make_engine(folder, lora=LORA), 2),
    }
    for text, (refusing, step) in wrong.items():
        before = copy.deepcopy(by_hf_names(refusing, lambda p: p))
        with pytest.raises(CheckpointError, match=text):
            refusing.load(tmp_path / f"step_00000{step}")
        after = by_hf_names(refusing, lambda p: p)
        assert all(torch.equal(before[name], after[name]) for name in before)
    make_engine(moved, lora=LORA).load(tmp_path / "step_000001")  # the same weights in another folder


def test_a_fingerprint_is_of_names_sizes_and_both_ends(tmp_path, monkeypatch):
    """Here of four bytes; what lies between is not read."""
    monkeypatch.setattr(base_model, "END_BYTES", 4)

    def fingerprint(**files: str) -> str:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        for name, content in files.items():
            (folder / f"{name}.safetensors").write_text(content)
        return base_model.fingerprint(folder)

    same = fingerprint(a="head----tail", b="more")
    assert same == fingerprint(b="more", a="head-++-tail")
    others = [
        {"a": "Head----tail"}, {"a": "heaD----tail"}, {"a": "head----Tail"}, {"a": "head----taiL"}, {"a": "head-----tail"},
        {"b": "mor"}, {"c": ""},
    ]  # fmt: skip
    found = [fingerprint(**{"a": "head----tail", "b": "more"} | other) for other in others]
    assert len({same, *found, fingerprint(a="head----tail", c="more")}) == 9


def test_a_rank_without_use_is_refused(folder):
    with pytest.raises(
        ValueError, match=r"learner.lora.rank=33 is above 32, the smaller side of the matrix (qkv|proj)"
    ):
        make_engine(folder, lora=LORA | {"rank": 33})


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "phi3"])
def test_the_folder_for_peft(tmp_path, batch, kind):
    """Names and shapes are peft's; its sum W + lora_alpha / r B A, written out here, is the exported model. (Without peft,
    which is not installed: ``benchmarks/results/lora.md`` has its own logits.)"""
    folder = make_hf_model(tmp_path / "m", kind)
    engine = make_engine(folder, lora=LORA | {"targets": ["qkv", "fc2", "fc1"]})
    engine.save_adapter(tmp_path / "adapter")
    engine.save_hf(tmp_path / "hf")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    modules = ["down_proj", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    if kind == "phi3":
        modules = ["down_proj", "gate_up_proj", "qkv_proj"]
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 6.0, modules)
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert Path(config["base_model_name_or_path"]) == folder
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    base, merged = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf"))
    adapted = [name for name in base if name.split(".")[-2] in modules and name.endswith("weight")]
    assert tensors.keys() == {
        f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"
        for name in adapted
        for part in "AB"
    }
    for name, weight in merged.items():
        wanted = base[name].double()
        if name in adapted:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (tensors[f"{module}.lora_{part}.weight"].double() for part in "AB")
            assert a.shape == (4, weight.shape[1]) and b.shape == (weight.shape[0], 4)
            wanted = wanted + 1.5 * torch.einsum("or,ri->oi", b, a)
        torch.testing.assert_close(weight.double(), wanted, rtol=0, atol=1e-6)
