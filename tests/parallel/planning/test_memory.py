"""The arithmetic of memory: against what torch holds while the real engine updates a small model, and by hand
where no GPU is needed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema.layout import LayoutConfig
from configs.schema.learner import LoraConfig
from configs.schema.run import RunConfig
from parallel.planning.activations import activation_bytes, layer_activation_bytes, logits_bytes
from parallel.planning.adapters import adapter_parameters
from parallel.planning.architecture import architecture_of, last_stage_layers, read_architecture
from parallel.planning.memory import (
    BESIDE_SERVERS,
    GIB,
    describe,
    learner_memory,
    size_text,
    stage_parameters,
    worst_stage,
)
from parallel.planning.server_memory import left_by_sglang, rollout_memory
from parallel.planning.work import Work, in_flight, stage_layers, work_of
from tests.support.megatron_workers import make_hf_model, run_ranks
from tests.support.memory_workers import work_memory
from tests.support.moe_workers import LATENT_FIELDS, make_moe_model
from tests.support.recurrent_models import make_recurrent_model

LENGTHS = [80, 80, 40, 61, 33, 50]
SIZES = dict(
    vocab_size=512, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384, head_dim=32,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)
GLM = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, n_shared_experts=2, first_k_dense_replace=1,
    routed_scaling_factor=1.5, attention_bias=True, use_qk_norm=True,
)  # fmt: skip
OLMO3 = dict(sliding_window=30, layer_types=["sliding_attention"] * 3 + ["full_attention"])
GEMMA = dict(query_pre_attn_scalar=24, rope_theta=1_000_000, rope_local_base_freq=10_000)
GPT_OSS = dict(
    num_local_experts=4, num_experts_per_tok=2, intermediate_size=96, sliding_window=30,
    layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
LATENT = {name: GLM[name] for name in GLM if name not in ("attention_bias", "use_qk_norm")} | LATENT_FIELDS | {
    "q_lora_rank": 48, "kv_lora_rank": 40, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 24,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
RECURRENT = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 2,
}  # fmt: skip
WHOLE_CHUNKS = [129, 65, 65, 129]
"""The arithmetic knows of no chunk of the gated delta rule that a sequence does not fill."""
QWEN2 = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
}  # fmt: skip
GPU_WORK = Work(
    device="cuda", dtype="bfloat16", token_budget=16384, chunk_tokens=1024, recompute="full", distributed_optimizer=True,
    transfers_weights=True,
)  # fmt: skip


ALL = ("qkv", "proj", "fc1", "fc2")


@dataclass(frozen=True)
class Case:
    layout: dict[str, Any]
    dtype: str = "float32"
    recompute: str = "none"
    distributed: bool = True
    kind: str = "qwen3"
    lora: tuple[str, ...] = ()
    """The targets of adapters; none: every weight is trained."""
    forward: str = "merged"
    freeze_router: bool = False
    offload: bool = False

    @property
    def adapters(self) -> dict[str, Any] | None:
        return {"rank": 8, "targets": self.lora, "forward": self.forward} if self.lora else None

    def __str__(self) -> str:
        of_optimizer = "" if self.distributed else "-plain"
        of_optimizer += f"-{self.forward}:{','.join(self.lora)}" if self.lora else ""
        of_optimizer += "-frozen router" if self.freeze_router else ""
        of_optimizer += "-offloaded" if self.offload else ""
        return f"{self.kind}-{','.join(f'{k}={v}' for k, v in self.layout.items())}-{self.dtype}-{self.recompute}{of_optimizer}"


ONE_RANK = [
    Case({"dp": 1}), Case({"dp": 1}, dtype="bfloat16"), Case({"dp": 1}, dtype="bfloat16", recompute="full"),
    Case({"dp": 1}, recompute="full", distributed=False), Case({"dp": 1}, dtype="bfloat16", distributed=False, kind="qwen2"),
    Case({"dp": 1}, kind="qwen2"), Case({"dp": 1}, kind="qwen3_moe"), Case({"dp": 1}, dtype="bfloat16", kind="qwen3_moe"),
    Case({"dp": 1}, lora=ALL), Case({"dp": 1}, lora=ALL, forward="factored"), Case({"dp": 1}, dtype="bfloat16", lora=ALL),
    Case({"dp": 1}, dtype="bfloat16", recompute="full", lora=ALL), Case({"dp": 1}, kind="qwen2", lora=("qkv",)),
    Case({"dp": 1}, lora=("proj", "fc2"), distributed=False), Case({"dp": 1}, kind="qwen3_moe", lora=("qkv", "proj")),
    Case({"dp": 1}, kind="glm4_moe"), Case({"dp": 1}, dtype="bfloat16", kind="glm4_moe"),
    Case({"dp": 1}, dtype="bfloat16", kind="glm4_moe", lora=("qkv", "proj")), Case({"dp": 1}, kind="phi3"),
    Case({"dp": 1}, kind="deepseek_v3"), Case({"dp": 1}, dtype="bfloat16", kind="deepseek_v3"),
    Case({"dp": 1}, dtype="bfloat16", kind="deepseek_v3", freeze_router=True),
    Case({"dp": 1}, kind="qwen3_5_text"), Case({"dp": 1}, dtype="bfloat16", recompute="full", kind="qwen3_5_text"),
    Case({"dp": 1}, kind="gpt_oss"),
    Case({"dp": 1}, kind="olmo3"), Case({"dp": 1}, dtype="bfloat16", kind="olmo3"), Case({"dp": 1}, kind="glm4"),
    Case({"dp": 1}, kind="gemma3_text"), Case({"dp": 1}, dtype="bfloat16", kind="gemma3_text"),
]  # fmt: skip
TWO_RANKS = [
    Case({"tp": 2}), Case({"tp": 2}, dtype="bfloat16", recompute="full"), Case({"tp": 2, "sp": True}),
    Case({"tp": 2, "sp": True}, dtype="bfloat16"), Case({"tp": 2, "sp": True}, dtype="bfloat16", recompute="full"),
    Case({"dp": 2}), Case({"dp": 2}, dtype="bfloat16", distributed=False), Case({"dp": 2}, dtype="bfloat16", offload=True),
    Case({"pp": 2}), Case({"pp": 2}, dtype="bfloat16", recompute="full"), Case({"pp": 2, "vpp": 2}),
    Case({"cp": 2}), Case({"cp": 2}, kind="qwen2"), Case({"cp": 2}, dtype="bfloat16"),
    Case({"cp": 2}, dtype="bfloat16", recompute="full"), Case({"cp": 2}, kind="qwen3_moe"),
    Case({"tp": 2}, lora=ALL), Case({"tp": 2, "sp": True}, dtype="bfloat16", lora=ALL), Case({"dp": 2}, dtype="bfloat16", lora=ALL),
    Case({"pp": 2}, lora=ALL, forward="factored"), Case({"cp": 2}, lora=ALL),
    Case({"tp": 2, "sp": True, "ep": 2}, kind="glm4_moe"), Case({"tp": 2, "sp": True}, kind="deepseek_v3"),
    Case({"tp": 2, "sp": True}, dtype="bfloat16", kind="deepseek_v3"), Case({"cp": 2}, kind="deepseek_v3"),
    Case({"tp": 2, "sp": True}, kind="qwen3_5_text"), Case({"pp": 2}, dtype="bfloat16", kind="qwen3_5_text"),
    Case({"tp": 2, "sp": True, "ep": 2}, dtype="bfloat16", kind="gpt_oss"),
    Case({"tp": 2, "sp": True}, dtype="bfloat16", kind="gemma3_text"),
    Case({"tp": 2, "sp": True}, kind="olmo3"), Case({"tp": 2}, dtype="bfloat16", kind="olmo3"), Case({"cp": 2}, kind="olmo3"),
    Case({"dp": 2, "ep": 2}, kind="qwen3_moe"), Case({"tp": 2, "sp": True, "ep": 2}, dtype="bfloat16", kind="qwen3_moe"),
]  # fmt: skip


def job(case: Case, folder: Path) -> dict[str, Any]:
    microbatches = 2 * case.layout.get("pp", 1)
    lengths = WHOLE_CHUNKS if case.kind == "qwen3_5_text" else LENGTHS
    return dict(
        folder=folder / case.kind, layout=case.layout, lengths=lengths, microbatches=microbatches, vocab=SIZES["vocab_size"],
        dtype=case.dtype, recompute=case.recompute, distributed=case.distributed, lora=case.adapters,
        freeze_router=case.freeze_router, offload=case.offload,
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, list[dict[str, int]]]:
    """What each rank of each case held."""
    folder = tmp_path_factory.mktemp("memory")
    for kind in ("qwen2", "qwen3", "phi3", "glm4"):
        make_hf_model(folder / kind, kind, **SIZES)
    make_hf_model(folder / "olmo3", "olmo3", **SIZES | OLMO3)
    make_hf_model(folder / "gemma3_text", "gemma3_text", **SIZES | OLMO3)
    make_moe_model(folder / "gpt_oss", "gpt_oss", **SIZES | GPT_OSS)
    make_moe_model(folder / "glm4_moe", "glm4_moe", **SIZES, **GLM)
    make_moe_model(folder / "deepseek_v3", "deepseek_v3", **{**SIZES, **LATENT})
    make_moe_model(folder / "qwen3_moe", "qwen3_moe", **SIZES, **EXPERTS)
    make_recurrent_model(folder / "qwen3_5_text", "qwen3_5_text", **SIZES, **RECURRENT)
    found = {}
    for cases in (ONE_RANK, TWO_RANKS):
        jobs = {str(case): job(case, folder) for case in cases}
        ranks = run_ranks(work_memory, 1 if cases is ONE_RANK else 2, folder / "out", jobs, deadline_s=900)
        found |= {str(case): [rank[str(case)] for rank in ranks] for case in cases}
    return found


@pytest.mark.engines
@pytest.mark.parametrize("case", ONE_RANK + TWO_RANKS, ids=str)
def test_the_arithmetic_is_what_torch_holds(case, measured):
    layout = LayoutConfig(**{"dp": 1, **case.layout})
    config = {
        "model_type": case.kind,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        **SIZES,
        **{
            "glm4_moe": GLM,
            "deepseek_v3": LATENT,
            "glm4": {"attention_bias": True},
            "olmo3": OLMO3 | {"rope_theta": 500_000},
            "gemma3_text": OLMO3 | GEMMA,
            "gpt_oss": GPT_OSS | {"attention_bias": True, "swiglu_limit": 7.0, "rope_theta": 150_000},
            "qwen3_5_text": RECURRENT,
        }.get(case.kind, EXPERTS),
    }
    for rank, held in enumerate(measured[str(case)]):
        work = Work(
            device="cpu", dtype=case.dtype, token_budget=held["tokens"], chunk_tokens=7, recompute=case.recompute,
            distributed_optimizer=case.distributed, num_microbatches=2 * layout.pp,
            lora=LoraConfig.model_validate(case.adapters) if case.adapters else None, freeze_router=case.freeze_router,
            offloads_optimizer=case.offload,
        )  # fmt: skip
        memory = learner_memory(
            read_architecture(config), layout, work, stage=rank * layout.pp // layout.world_size
        )
        for item in ("parameters", "gradients", "optimizer"):
            # Megatron pads its buffers, which shows in the small ones of adapters.
            assert getattr(memory, item) == pytest.approx(held[item], rel=0.1, abs=5000), item
        if case.kind == "gpt_oss":  # an upper bound
            assert held["activations"] <= memory.activations <= 1.6 * held["activations"]
        else:
            assert memory.activations == pytest.approx(held["activations"], rel=0.03)
        assert held["left"] == 0, "the measurement lost count"


def test_sequence_parallelism_and_recompute_save_what_they_should():
    """Between matrices a rank holds T / t tokens, or of each layer its input alone: never more than without."""
    architecture = read_architecture(QWEN2)
    plain, split = LayoutConfig(tp=4, dp=1), LayoutConfig(tp=4, sp=True, dp=1)
    no_recompute = Work(
        device="cuda",
        dtype="bfloat16",
        token_budget=4096,
        chunk_tokens=64,
        recompute="none",
        distributed_optimizer=True,
    )
    kept = activation_bytes(architecture, plain, no_recompute, 0)
    # 4 b H + 8 bytes of a layer's norms and products are held for T tokens by every rank; under SP a quarter
    # of them
    assert (
        kept - activation_bytes(architecture, split, no_recompute, 0)
        == (28 * 2 * (2 * 2 * 3584 + 4) + (2 * 3584 + 4)) * 4096 * 3 // 4
    )
    assert activation_bytes(architecture, split, GPU_WORK, 0) < activation_bytes(
        architecture, plain, GPU_WORK, 0
    )


def test_context_parallelism_splits_all_but_the_gathered_keys_and_values():
    """QWEN2 on CUDA has no norm of keys, so that the qkv product is not kept either: of one layer a rank of four
    holds a fourth of the rest."""
    architecture = read_architecture(QWEN2)
    work = replace(GPU_WORK, recompute="none")
    whole, split = (layer_activation_bytes(architecture, LayoutConfig(cp=cp, dp=1), work, 0) for cp in (1, 4))
    keys_and_values, product = 2 * 4 * 128 * 2 * 16384, 2 * 128 * (28 + 2 * 4) * 16384
    assert split - keys_and_values == (whole - keys_and_values // 2 - product) // 4


@pytest.mark.parametrize(
    ("layout", "stage", "microbatches", "passes"),
    [
        (dict(), 0, None, 1),
        (dict(pp=4), 0, None, 4),
        (dict(pp=4), 3, None, 1),
        (dict(pp=4), 0, 2, 2),  # fewer than fill the pipeline
        (dict(pp=2, vpp=2), 0, None, 5),  # warm-up 2 (2 - 0 - 1) + 2 passes, and the one that runs
        (dict(pp=2, vpp=2), 1, None, 3),
        (dict(pp=2, vpp=2), 0, 2, 4),  # all there are
    ],
)
def test_passes_in_flight(layout, stage, microbatches, passes):
    assert in_flight(LayoutConfig(dp=1, **layout), stage, microbatches) == passes


def test_kept_ids_by_hand():
    """4096 ids of each of 16384 tokens, 64 Mi in all. With the logits there, an int32 copy, two int64 numbers, and for each of
    1024 tokens of a chunk an int64 and a float32. Before them, where they are smaller: an int32 twice, and what makes the rest."""
    architecture, ids = read_architecture(QWEN2), 4096 * 16384
    work = replace(GPU_WORK, recompute="none", kept_ids=4096)

    def of(work, stage=0, **layout):
        return learner_memory(architecture, LayoutConfig(dp=1, **layout), work, stage)

    whole = of(work)
    assert whole.kept_ids == 20 * ids + 12 * 4096 * 1024
    assert whole.total == of(replace(work, kept_ids=0)).total + whole.kept_ids
    assert of(work, tp=4).kept_ids == 49 * ids - of(work, tp=4).logits > 20 * ids + 12 * 4096 * 1024
    assert of(work, pp=2).kept_ids == 4 * ids and of(work, 1, pp=2).kept_ids == whole.kept_ids
    assert of(work, cp=8).kept_ids == 20 * ids // 8 + 12 * 4096 * 1024
    # Under recompute the logits find the room of a whole layer empty.
    again = replace(work, recompute="full")
    room = logits_bytes(architecture, LayoutConfig(dp=1), again) - of(again).logits
    assert room > 0 and of(again).kept_ids == whole.kept_ids
    wide = replace(again, token_budget=65536, kept_ids=20)
    layer = of(wide)
    assert layer.logits == layer.kept_ids == 0, "a whole layer is more than logits and ids"
    few = read_architecture(QWEN2 | {"vocab_size": 1000})
    assert learner_memory(few, LayoutConfig(pp=2, dp=1), work, 0).kept_ids == 4 * 1000 * 16384
    config = {"model": {"path": "m"}, "task": {"type": "countdown"}, "rollout": {"top_k": 64}}
    assert work_of(RunConfig.model_validate(config), "cuda").kept_ids == 64
    assert work_of(RunConfig.model_validate(config | {"rollout": {}}), "cuda").kept_ids == 0


@pytest.mark.parametrize(
    ("layout", "stage", "microbatches", "outputs"),
    [
        (dict(), 0, None, 0),
        (dict(pp=2), 0, None, 3),  # two sent on, and the gradient that comes back
        (dict(pp=2), 0, 1, 2),
        (dict(pp=2), 1, None, 1),
        # The last stage sends its first chunk on: warm-up 3, and the one that runs
        (dict(pp=3, vpp=2), 2, None, 5),
        (dict(pp=2, tp=2), 0, None, 3),
        (dict(pp=2, tp=4, sp=True), 0, None, 3 / 4),
    ],
)
def test_a_pipeline_keeps_what_it_sent_on(layout, stage, microbatches, outputs):
    architecture = read_architecture(QWEN2 | {"num_hidden_layers": 24})
    work = replace(GPU_WORK, num_microbatches=microbatches, transfers_weights=False)
    memory = learner_memory(architecture, LayoutConfig(dp=1, **layout), work, stage)
    assert memory.pipeline == outputs * 16384 * 3584 * 2
    assert memory.total - memory.lasting == memory.activations + memory.logits + memory.pipeline


def test_layers_of_interleaved_stages():
    architecture = read_architecture(QWEN2 | {"num_hidden_layers": 8})
    layout = LayoutConfig(pp=2, vpp=2, dp=1)
    assert [stage_layers(architecture, layout, stage) for stage in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("layers", "stages", "depths"),
    [
        (94, 4, [24, 24, 24, 22]),  # Qwen3-235B
        (61, 8, [8] * 7 + [5]),  # DeepSeek-V3
        (47, 2, [24, 23]),  # GLM-4.7-Flash
        (28, 4, [7, 7, 7, 7]),
        (10, 4, [3, 3, 3, 1]),
    ],
)
def test_the_last_stage_has_what_is_left(layers, stages, depths):
    architecture = read_architecture(QWEN2 | {"num_hidden_layers": layers})
    found = [stage_layers(architecture, LayoutConfig(pp=stages, dp=1), stage) for stage in range(stages)]
    assert [len(stage) for stage in found] == depths
    assert [layer for stage in found for layer in stage] == list(range(layers))
    assert last_stage_layers(layers, stages) == depths[-1]


@pytest.mark.parametrize(("layers", "stages", "chunks"), [(10, 6, 1), (9, 8, 1), (10, 4, 2), (9, 2, 2)])
def test_some_numbers_of_layers_do_not_split(layers, stages, chunks):
    """Into 2, 2, 2, 2, 2 and none, and chunks are equal."""
    assert last_stage_layers(layers, stages, chunks) is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_parameters_of_all_ranks_are_the_models(tied, pp, tp):
    """Qwen2.5-7B's published 7,615,616,512: every rank of a stage has a t-th of what is split; a tied table
    is there on both ends."""
    layout = LayoutConfig(tp=tp, pp=pp, dp=1)
    architecture = read_architecture(QWEN2 | {"tie_word_embeddings": tied})
    shared = [stage_parameters(architecture, layout, stage)[0] for stage in range(pp)]
    norms = 28 * 2 * 3584 + 3584  # on every tensor-parallel rank
    table = 152064 * 3584
    whole = tp * (sum(shared) - norms) + norms
    assert whole == 7_615_616_512 - (table if tied and pp == 1 else 0)


def test_experts_are_divided_and_the_rest_is_not():
    moe = dict(
        model_type="qwen3_moe", vocab_size=100, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=4, intermediate_size=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6, rms_norm_eps=1e-6,
        max_position_embeddings=64, mlp_only_layers=[0],
    )  # fmt: skip
    architecture = read_architecture(moe)
    # one layer of four experts 3 * 8 * 6; ep = 2 leaves two of them
    assert [stage_parameters(architecture, LayoutConfig(ep=ep, dp=2), 0)[1] for ep in (1, 2)] == [
        4 * 144,
        2 * 144,
    ]
    # attention (8 * 24 + 8 * 8), four norms, on both layers; a dense MLP 3 * 8 * 64; a router 8 * 4; tables 2
    # * 800; the final norm
    assert (
        stage_parameters(architecture, LayoutConfig(ep=2, dp=2), 0)[0]
        == 2 * (256 + 24) + 1536 + 32 + 1600 + 8
    )
    work = Work(
        device="cpu",
        dtype="float32",
        token_budget=8,
        chunk_tokens=4,
        recompute="none",
        distributed_optimizer=True,
    )
    # A frozen router of 8 * 4 on each of two ranks: 4 bytes of a gradient, 8 of a state that the two divide.
    layout, whole = LayoutConfig(ep=2, dp=2), replace(work, critic=architecture, critic_dtype="float32")
    plain, frozen = (
        learner_memory(architecture, layout, replace(whole, freeze_router=freeze), 0)
        for freeze in (False, True)
    )
    assert (plain.gradients - frozen.gradients, plain.optimizer - frozen.optimizer) == (4 * 32, 8 * 16)
    assert (frozen.parameters, frozen.critic) == (plain.parameters, plain.critic)
    # A shared expert of 6 is split over tensor-parallel ranks, and its gate, H numbers, is not.
    for has_gate in (False, True):
        shared_expert = replace(architecture.experts, shared_size=6, has_shared_gate=has_gate)
        beside = replace(architecture, experts=shared_expert)
        for tp in (1, 2):
            layout = LayoutConfig(tp=tp, sp=tp > 1, dp=1)
            more = stage_parameters(beside, layout, 0)[0] - stage_parameters(architecture, layout, 0)[0]
            assert more == 3 * 8 * 6 // tp + 8 * has_gate
    # Weights are fewer than buckets hold; then gate and up of one expert of each rank, or of gpt-oss a layer's experts in one
    # tensor, and its parts.
    clamped = replace(architecture, experts=replace(architecture.experts, clamp=7.0))
    for model, ep, gathered in (
        (architecture, 1, 0),
        (architecture, 2, 2),
        (clamped, 1, 4),
        (clamped, 2, 3 * 4),
    ):
        memory = learner_memory(model, LayoutConfig(ep=ep, dp=2), replace(work, transfers_weights=True), 0)
        assert memory.transfer == 4 * (3736 + 576 + gathered * 2 * 8 * 6)
    shared = stage_parameters(architecture, LayoutConfig(dp=4), 0)[0]
    for ep, of_rank, copies in ((1, 576, 4), (2, 288, 2), (4, 144, 1)):
        memory = learner_memory(architecture, LayoutConfig(ep=ep, dp=4), work, 0)
        assert memory.optimizer == 8 * (shared // 4 + of_rank // copies)
        assert memory.parameters == memory.gradients == 4 * (shared + of_rank)


def test_a_run_counts_reference_and_critic():
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "task": {"type": "countdown"},
            "kl": {"coefficient": 0.1},
            "advantage": {"type": "gae"},
        }
    )
    architecture, layout = read_architecture(QWEN2), LayoutConfig(tp=2, dp=4)
    work = work_of(config, "cuda", architecture)
    memory = learner_memory(architecture, layout, work, 0)
    assert memory.reference == memory.parameters
    teacher = read_architecture(QWEN2 | {"num_hidden_layers": 56})
    of_teacher = learner_memory(architecture, layout, work_of(config, "cuda", architecture, teacher), 0)
    assert of_teacher.reference == 2 * stage_parameters(teacher, layout, 0)[0]
    assert of_teacher.total - of_teacher.reference == memory.total - memory.reference
    # the critic has no output layer, but a head
    of_critic = stage_parameters(architecture, layout, 0)[0] - 76032 * 3584 + 3584
    assert memory.critic == 2 * of_critic + 4 * of_critic + 12 * of_critic // 4
    assert memory.lasting == (
        memory.parameters + memory.gradients + memory.optimizer + memory.reference + memory.critic
    )
    assert memory.total == memory.lasting + max(
        memory.activations + memory.logits + memory.pipeline, memory.transfer
    )


def test_adapters_by_hand():
    """Qwen2.5-7B at tp 2, rank 16: of qkv and fc1 B is split, of proj and fc2 A."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "task": {"type": "countdown"},
            "kl": {"coefficient": 0.1},
            "learner": {"lora": {"rank": 16}},
        }
    )
    architecture, layout = read_architecture(QWEN2), LayoutConfig(tp=2, pp=2, dp=4)
    qkv, proj = 3584 + (28 + 2 * 4) * 128 // 2, 3584 // 2 + 3584
    fc1, fc2 = 3584 + 2 * 18944 // 2, 18944 // 2 + 3584
    trained = 14 * 16 * (qkv + proj + fc1 + fc2)
    assert config.learner.lora is not None
    assert adapter_parameters(architecture, layout, config.learner.lora) == trained
    memory = learner_memory(architecture, layout, work_of(config, "cuda"), 0)
    whole = stage_parameters(architecture, layout, 0)[0]
    assert memory.parameters == 2 * (whole + trained)
    assert (memory.gradients, memory.optimizer) == (4 * trained, 12 * trained // 4)
    assert memory.reference == memory.critic == 0  # the reference is the policy without its adapters
    last = learner_memory(architecture, layout, work_of(config, "cuda"), 1)
    full = learner_memory(architecture, layout, replace(work_of(config, "cuda"), lora=None), 1)
    # No gradient of the output layer, whose rounding is more than the product of a chunk.
    assert full.logits - last.logits == 76032 * (3584 * 6 - 1024 * 2)


def test_a_critic_beside_adapters_is_trained_whole():
    fields = {
        "model": {"path": "m"},
        "task": {"type": "countdown"},
        "advantage": {"type": "gae"},
        "learner": {"lora": {"targets": ["proj"]}},
    }
    architecture, layout = read_architecture(QWEN2), LayoutConfig(dp=2)
    work = work_of(RunConfig.model_validate(fields), "cuda", architecture)
    memory = learner_memory(architecture, layout, work, 0)
    whole = learner_memory(architecture, layout, replace(work, lora=None), 0)
    assert (memory.critic, memory.activations) == (whole.critic, whole.activations)
    alone = learner_memory(architecture, layout, replace(work, critic=None), 0)
    assert alone.activations < memory.activations


def test_a_critic_counts_by_its_own_model_and_settings():
    """Its update is the worst moment where its model is larger, its bytes are those of its dtype, and its optimizer is
    divided where it says so."""
    small = read_architecture(QWEN2 | {"num_hidden_layers": 2, "hidden_size": 896, "intermediate_size": 4864})
    large, layout = read_architecture(QWEN2), LayoutConfig(dp=4)
    fields = {"model": {"path": "m"}, "task": {"type": "countdown"}, "advantage": {"type": "gae"}}
    found = {
        name: learner_memory(
            small, layout, work_of(RunConfig.model_validate(fields | {"critic": critic}), "cuda", large), 0
        )
        for name, critic in {
            "default": {},
            "whole": {"optimizer": {"distributed": False}},
            "float32": {"model": {"path": "c", "dtype": "float32"}},
            "offloaded": {"optimizer": {"offload": True}},
        }.items()
    }
    numbers = sum(stage_parameters(large, layout, 0, output=False))
    assert found["default"].critic == (2 + 4) * numbers + 12 * -(-numbers // 4)
    assert found["whole"].critic == (2 + 4 + 12) * numbers
    assert found["float32"].critic == (4 + 4) * numbers + 8 * -(-numbers // 4)
    work = work_of(RunConfig.model_validate(fields), "cuda")
    # Only the state of the model whose step it is is there, without activations.
    assert found["offloaded"].critic == (2 + 4) * numbers
    assert found["offloaded"].optimizer_step == 12 * -(-numbers // 4) and found["default"].optimizer_step == 0
    both = RunConfig.model_validate(
        fields | {"critic": {"optimizer": {"offload": True}}, "learner": {"optimizer": {"offload": True}}}
    )
    on_cpu = work_of(both, "cpu", large)  # where it stays in the same memory
    assert not on_cpu.offloads_optimizer and not on_cpu.critic_offloads
    away = learner_memory(small, layout, work_of(both, "cuda", large), 0)
    assert away.optimizer == 0 and away.optimizer_step == found["offloaded"].optimizer_step
    of_policy = learner_memory(
        small, layout, work_of(RunConfig.model_validate(fields), "cuda", large), 0
    ).optimizer
    assert away.on_host == of_policy + found["offloaded"].optimizer_step and found["default"].on_host == 0
    for moment in (0, away.transfer, 2 * away.optimizer_step):
        each = replace(away, activations=moment, logits=0, kept_ids=0, pipeline=0)
        assert each.total == sum(each.at_peak().values())
        assert each.total == each.lasting + max(moment, each.optimizer_step, each.transfer)
        assert each.beside_servers == sum(each.at_peak(BESIDE_SERVERS).values())
        assert each.beside_servers == each.lasting + max(each.optimizer_step, each.transfer)
    assert found["default"].activations == activation_bytes(large, layout, work, 0)
    assert found["default"].logits == 0 and found["float32"].activations > found["default"].activations
    swapped = learner_memory(large, layout, work_of(RunConfig.model_validate(fields), "cuda", small), 0)
    alone = learner_memory(large, layout, work, 0)
    assert (swapped.activations, swapped.logits) == (alone.activations, alone.logits)


MATRIX, TABLE = 3584 * 18944, 152064 * 3584
"""Numbers of QWEN2's largest matrix of a layer, and of its embedding."""
MIB = 2**20


@pytest.mark.parametrize(
    ("layout", "stage", "work", "wanted"),
    [
        # Two buckets. On one rank nothing is gathered, so that no tensor needs more.
        (dict(), 0, {}, 2 * 512 * MIB),
        (dict(), 0, {"device": "cpu"}, 3 * 16 * MIB),
        # Shards and the whole of the embedding, and gate and up, which are sent as they are.
        (dict(tp=2), 0, {}, 2 * 512 * MIB + 2 * 2 * TABLE + 2 * 2 * MATRIX),
        (dict(tp=2, pp=4), 3, {}, 2 * 512 * MIB + 2 * 2 * TABLE + 2 * 2 * MATRIX),
        (dict(tp=2, pp=4), 1, {}, 2 * 512 * MIB + 2 * 2 * (2 * MATRIX) + 2 * 2 * MATRIX),
        # In another dtype each is written to a bucket, which must hold the largest.
        (dict(tp=2), 0, {"converts_weights": True}, 2 * 2 * TABLE + 2 * 2 * TABLE),
        (dict(tp=2, pp=4), 1, {"converts_weights": True}, 2 * 512 * MIB + 2 * 2 * (2 * MATRIX)),
        (dict(), 0, {"converts_weights": True, "dtype": "float32"}, 2 * 4 * TABLE),
        (dict(pp=4), 1, {"converts_weights": True, "device": "cpu"}, 3 * 2 * MATRIX),
        (dict(tp=2), 0, {"packs_weights": True}, 2 * 512 * MIB + 2 * 2 * TABLE),
        (dict(), 0, {"packs_weights": True, "device": "cpu"}, 3 * (MATRIX + MATRIX // 8)),
        (dict(), 0, {"transfers_weights": False}, 0),
    ],
)  # fmt: skip
def test_a_transfer_by_hand(layout, stage, work, wanted):
    memory = learner_memory(
        read_architecture(QWEN2), LayoutConfig(dp=1, **layout), replace(GPU_WORK, **work), stage
    )
    assert memory.transfer == wanted


def test_a_float32_output_layer_is_a_copy_of_the_weight():
    architecture, layout = read_architecture(QWEN2), LayoutConfig()
    rows = 152064
    plain, copied = (
        logits_bytes(architecture, layout, replace(GPU_WORK, fp32_lm_head=value)) for value in (False, True)
    )
    assert copied - plain == 4 * rows * 3584
    # Without the weight's gradient, in whose place the product was not counted.
    adapted = replace(GPU_WORK, lora=LoraConfig(rank=8, alpha=16))
    assert logits_bytes(architecture, layout, replace(adapted, fp32_lm_head=True)) - logits_bytes(
        architecture, layout, adapted
    ) == rows * (4 * 3584 + 1024 * 2)
    whole = replace(GPU_WORK, dtype="float32")
    assert logits_bytes(architecture, layout, replace(whole, fp32_lm_head=True)) == logits_bytes(
        architecture, layout, whole
    )


@pytest.mark.parametrize(
    ("recompute", "pp", "waits"), [("full", 1, 2 * TABLE), ("full", 2, 0), ("none", 1, 0)]
)
def test_a_tied_output_layer_s_gradient_waits_for_the_embedding_s(recompute, pp, waits):
    """While layers are computed again; with the logits it was counted before."""
    tied, untied = (
        learner_memory(
            read_architecture(QWEN2 | {"tie_word_embeddings": is_tied}),
            LayoutConfig(pp=pp, dp=1),
            replace(GPU_WORK, recompute=recompute),
            pp - 1,
        )
        for is_tied in (True, False)
    )
    assert tied.activations - untied.activations == waits
    assert tied.logits == max(0, untied.logits - waits)


def test_the_worst_stage_is_an_end():
    """Untied tables of 545 M parameters at both ends; the first has more micro-batches in flight, the last
    the logits."""
    architecture, layout = read_architecture(QWEN2), LayoutConfig(pp=4, dp=2)
    stages = [learner_memory(architecture, layout, GPU_WORK, stage) for stage in range(4)]
    assert worst_stage(architecture, layout, GPU_WORK) == max(stages, key=lambda m: m.total)
    assert [m.logits > 0 for m in stages] == [False, False, False, True]
    assert stages[0].activations > stages[1].activations > stages[2].activations


def test_a_server_by_hand():
    """Qwen2.5-7B in bfloat16 on 80 GiB: over 4 ranks, one key/value head each; over 28, the same, copied."""
    heads, kv = 28 * 128, 128
    architecture = read_architecture(QWEN2)
    memory = rollout_memory(architecture, 4, "bfloat16", 80 * GIB)
    layer = (
        3584 * (heads // 4 + 2 * kv)
        + (heads // 4 + 2 * kv)
        + heads // 4 * 3584
        + 2 * 3584
        + 3 * 3584 * 18944 // 4
    )
    assert memory.weights == 2 * (28 * layer + 3584 + 2 * (152064 // 4) * 3584)
    # In MiB: constants, a prefill of 8192 tokens, 4 ranks, graphs of up to 512 responses, and 58 graphs of prefill.
    assert memory.reserved == (512 + 12288 + 512 + 1024 + 8 * 58) * 2**20
    assert memory.kv_bytes_per_token == 2 * 28 * 1 * 128 * 2
    assert memory.tokens == (80 * GIB - memory.reserved - memory.weights) // memory.kv_bytes_per_token
    # Copied heads.
    assert (
        rollout_memory(architecture, 28, "bfloat16", 80 * GIB).kv_bytes_per_token == memory.kv_bytes_per_token
    )
    assert rollout_memory(architecture, 4, "bfloat16", 80 * GIB, static_share=0.5).reserved == 40 * GIB
    assert rollout_memory(architecture, 1, "bfloat16", 10 * GIB).tokens == 0
    limited = rollout_memory(architecture, 4, "bfloat16", 80 * GIB, max_tokens=1000)
    assert (limited.tokens, limited.unused) == (1000, memory.kv_cache - 1000 * memory.kv_bytes_per_token)
    assert rollout_memory(architecture, 4, "bfloat16", 80 * GIB, max_tokens=10**9) == memory


def test_a_server_of_gated_delta_nets_by_hand():
    """Qwen3-Next-80B over 4 ranks: 12 layers keep keys and values, 36 a matrix of each of 8 value heads and 3 inputs of the
    convolution for each response."""
    fields = {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    architecture = read_architecture(QWEN2 | fields)
    memory = rollout_memory(architecture, 4, "bfloat16", 80 * GIB)
    assert memory.kv_bytes_per_token == 12 * 2 * 256 * 2
    of_layer = 8 * 128 * 128 * 4 + (2 * 16 + 32) * 128 // 4 * 3 * 2
    assert memory.state_bytes_per_response == 36 * of_layer
    room = 80 * GIB - memory.reserved - memory.weights
    assert memory.states == int(room * 0.9 / 1.9) and memory.kv_cache == room - memory.states
    assert memory.responses == memory.states // (36 * of_layer)
    whole = sum(stage_parameters(architecture, LayoutConfig(dp=1), 0))
    # A quarter of all but what ranks have whole, such as routers, and of the two key/value heads one on each rank.
    assert memory.weights == pytest.approx(2 * whole / 4, rel=0.003)


@pytest.mark.parametrize(
    ("gpu_mib", "ranks", "static_share"),
    [
        (81559, 1, 0.83), (81559, 4, 0.819), (81559, 8, 0.812), (81559, 16, 0.8), (143771, 1, 0.903), (183000, 4, 0.851),
        (46068, 1, 0.843), (23028, 1, 0.684),
    ],
)  # fmt: skip
def test_what_sglang_leaves_is_what_it_resolves_its_arguments_to(gpu_mib, ranks, static_share):
    """Figures of SGLang 0.5.23's own resolution, with a stand-in for the GPU: mem_fraction_static."""
    assert round(1 - left_by_sglang(gpu_mib * 2**20, ranks) / (gpu_mib * 2**20), 3) == static_share


def test_an_fp8_server_by_hand():
    """Of Qwen2.5-7B, on one GPU: a byte for each number of the layers' matrices and 4 for each of their rows;
    the rest in 2 bytes."""
    matrices, rows = 3584 * 36 * 128 + 3584 * 3584 + 3 * 3584 * 18944, 36 * 128 + 3584 + 2 * 18944 + 3584
    others = 28 * (36 * 128 + 2 * 3584) + 3584 + 2 * 152064 * 3584
    memory = rollout_memory(read_architecture(QWEN2), 1, "bfloat16", 80 * GIB, quantization="fp8")
    assert memory.weights == 28 * (matrices + 4 * rows) + 2 * others
    whole = rollout_memory(read_architecture(QWEN2), 1, "bfloat16", 80 * GIB)
    assert (
        whole.weights == 2 * (28 * matrices + others)
        and memory.kv_bytes_per_token == whole.kv_bytes_per_token
    )
    assert memory.kv_cache - whole.kv_cache == whole.weights - memory.weights


def test_sizes_in_words():
    sizes = (0, 1023, 1024, 1536, 7 * GIB // 2048, 5 * GIB // 2, 100 * GIB, 2048 * GIB)
    assert [size_text(size) for size in sizes] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "3.50 MiB", "2.50 GiB", "100 GiB", "2.00 TiB",
    ]  # fmt: skip
    memory = worst_stage(read_architecture(QWEN2), LayoutConfig(tp=4, dp=2), GPU_WORK)
    assert describe(memory).startswith(
        f"{size_text(memory.total)} (optimizer {size_text(memory.optimizer)}, "
    )
    middle = learner_memory(read_architecture(QWEN2), LayoutConfig(pp=4, dp=2), GPU_WORK, 1)
    assert [*middle.items()] == [
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "pipeline",
        "transfer",
    ]


def test_model_folders_are_read_like_everywhere(tmp_path):
    folder = make_hf_model(tmp_path / "m", "qwen2", **SIZES)
    architecture = architecture_of(folder)
    total = sum(tensor.numel() for tensor in _weights(folder))
    assert stage_parameters(architecture, LayoutConfig(dp=1), 0) == (total, 0)


def _weights(folder: Path):
    from parallel.weights.hf_conversion import HuggingFaceWeights

    weights = HuggingFaceWeights(folder)
    return [weights.read(name) for name in weights.names]
