"""What a learner rank has to do, which decides its memory: settings, layers, tokens."""

from dataclasses import dataclass
from typing import Literal

from configs.schema.layout import LayoutConfig
from configs.schema.learner import LoraConfig
from configs.schema.run import RunConfig, SftConfig
from parallel.planning.architecture import Architecture

DeviceKind = Literal["cpu", "cuda"]
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COPIED = 1 / 8
"""What a shared prompt's place keeps once more for each sample (``learner.share_prompts``), of a place's activations. Measured:
0.06 to 0.13 of them (``benchmarks/results/shared_prompts.md``); memory plans are of whole sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The settings that decide a learner rank's memory, beside model and layout."""

    device: DeviceKind
    dtype: str
    token_budget: int
    chunk_tokens: int
    recompute: Literal["none", "full"]
    distributed_optimizer: bool
    offloads_optimizer: bool = False
    """Whether the optimizer's state is on the device only during a step. (Without GPUs the host's memory is the device's: it
    always counts.)"""
    num_microbatches: int | None = None
    """Micro-batches of one optimizer step on one rank; None: as many as fill the pipeline."""
    lora: LoraConfig | None = None
    freeze_router: bool = False
    kept_ids: int = 0
    """Most ids that servers keep for a token (``rollout.top_k``); 0: the full vocabulary, of which none is listed."""
    has_reference: bool = False
    """Whether a reference policy has its own weights. With adapters the reference is the policy without
    them."""
    reference: Architecture | None = None
    """Of a reference from another folder than the policy's."""
    reference_dtype: str = "bfloat16"
    fp32_lm_head: bool = False
    is_aligned: bool = False
    """``model.numerics: aligned``."""
    critic: Architecture | None = None
    critic_dtype: str = "bfloat16"
    critic_distributed: bool = True
    """Whether the critic's optimizer is distributed."""
    critic_offloads: bool = False
    """Whether the critic's optimizer is offloaded."""
    transfers_weights: bool = False
    converts_weights: bool = False
    """Whether weights are sent in another dtype, or rounded in theirs (``rollout.precision``): large ones then take buffers
    too."""
    packs_weights: bool = False
    """Whether matrices are sent with about a byte for each number."""

    @property
    def dtype_bytes(self) -> int:
        return BYTES[self.dtype]

    @property
    def attention_bytes(self) -> int:
        return 4 if self.device == "cpu" else self.dtype_bytes


def work_of(
    config: RunConfig | SftConfig,
    device: DeviceKind,
    critic: Architecture | None = None,
    reference: Architecture | None = None,
) -> Work:
    """The work of a run. ``critic`` is the architecture of the run's critic, if it has one; ``reference`` that of
    ``kl.model``."""
    is_rl = isinstance(config, RunConfig)
    of_critic = config.critic if is_rl else None
    optimizer = config.learner.optimizer if is_rl else config.optimizer
    return Work(
        device=device,
        dtype=config.model.dtype,
        token_budget=config.learner.token_budget if is_rl else config.token_budget,
        chunk_tokens=config.learner.logprob_chunk_tokens if is_rl else config.logprob_chunk_tokens,
        recompute=config.learner.recompute if is_rl else "none",
        distributed_optimizer=optimizer.distributed,
        offloads_optimizer=device == "cuda" and optimizer.offload,
        lora=config.learner.lora if is_rl else None,
        freeze_router=is_rl and config.learner.freeze_router,
        kept_ids=config.rollout.top_k if is_rl and config.rollout.is_truncated else 0,
        has_reference=is_rl and config.has_reference_weights,
        reference=reference,
        reference_dtype=((is_rl and config.kl.model) or config.model).dtype,
        fp32_lm_head=config.model.fp32_lm_head,
        is_aligned=config.model.numerics == "aligned",
        critic=critic,
        critic_dtype=((of_critic and of_critic.model) or config.model).dtype,
        critic_distributed=of_critic is None or of_critic.optimizer.distributed,
        critic_offloads=device == "cuda" and of_critic is not None and of_critic.optimizer.offload,
        transfers_weights=is_rl,
        converts_weights=is_rl
        and (
            config.rollout.dtype != config.model.dtype
            or (config.rollout.precision is not None and not config.rollout.packs)
        ),
        packs_weights=is_rl and config.rollout.packs,
    )


def stage_layers(architecture: Architecture, layout: LayoutConfig, stage: int) -> list[int]:
    """The numbers of a stage's layers. All chunks have equally many; chunk v of stage p is the model's chunk
    v pp + p. Without chunks the last stage may have fewer (``last_stage_layers``)."""
    depth = -(-architecture.num_layers // (layout.pp * layout.vpp))
    chunks = range(stage, layout.pp * layout.vpp, layout.pp)
    layers = [chunk * depth + i for chunk in chunks for i in range(depth)]
    return [layer for layer in layers if layer < architecture.num_layers]


def copies_of(layout: LayoutConfig) -> tuple[int, int]:
    """(ranks that hold the same parameters, the same parameters of experts): cp dp, and tp cp dp / ep."""
    copies = layout.cp * layout.dp_size
    return copies, layout.tp * copies // layout.ep


def in_flight(layout: LayoutConfig, stage: int, num_microbatches: int | None) -> int:
    """Greatest number of a stage's forward passes (per chunk) whose backward has not begun.

    1F1B: pp - stage, because a stage runs forward passes until its first micro-batch has come back. Interleaved:
    Megatron's warm-up of 2 (pp - stage - 1) + (vpp - 1) pp passes, and the running one. There are at most
    ``num_microbatches`` vpp passes. Source: ``get_pp_rank_microbatches`` of Megatron-Core 0.16.1.
    """
    pp, vpp = layout.pp, layout.vpp
    passes = pp - stage if vpp == 1 else 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    return passes if num_microbatches is None else min(passes, num_microbatches * vpp)


def row_counts(layout: LayoutConfig, tokens: int) -> tuple[int, int]:
    """(this rank's tokens between matrices, its tokens of the micro-batch): a C-th of all under context
    parallelism, padded to a multiple of t under sequence parallelism."""
    tokens = -(-tokens // layout.cp)
    rows = -(-tokens // layout.tp)
    return (rows, rows * layout.tp) if layout.sp else (tokens, tokens)
