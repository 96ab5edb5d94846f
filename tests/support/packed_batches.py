"""Random packed batches for the tests of the trainer's mathematics."""

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.packing import PackedBatch
from trainer.algorithm.aggregation import GlobalCounts
from trainer.algorithm.segments import count_per_sequence, valid_tokens
from trainer.ranks.metrics import Metrics


def count_valid(response_mask_T: Tensor, cu_seqlens: Tensor) -> GlobalCounts:
    """Of the sequences at hand."""
    return GlobalCounts.of(count_per_sequence(response_mask_T, cu_seqlens))


def at_valid(
    metrics: Callable[..., Metrics],
    x_T: Tensor,
    y_T: Tensor,
    mask_T: Tensor,
    cu_seqlens: Tensor,
    **bounds: float,
) -> Metrics:
    """``metrics`` of the valid tokens of both."""
    valid = valid_tokens(mask_T, cu_seqlens)
    return metrics(valid.pick(x_T), valid.pick(y_T), valid.bounds_S, **bounds)


def random_batch(
    lengths: list[int], *, seed: int, dtype: torch.dtype = torch.float32, mask_T: Tensor | None = None
) -> PackedBatch:
    """Sequences of these packed lengths; old is near rollout, all fields but the loss weights are set."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def normal(scale: float) -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64) * scale

    rollout_T = -normal(1.0).abs() - 4.0  # so far below 0 that what is near it is a log-prob too
    return PackedBatch(
        tokens_T=torch.randint(0, 50, (total,), generator=generator),
        targets_T=torch.randint(0, 50, (total,), generator=generator),
        positions_T=torch.tensor([p for n in lengths for p in range(n)], dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        response_mask_T=torch.rand(total, generator=generator) < 0.7 if mask_T is None else mask_T,
        rollout_logprobs_T=rollout_T.to(dtype),
        sequence_ids_S=torch.arange(len(lengths)) + 100,
        old_logprobs_T=(rollout_T + normal(0.4)).to(dtype),
        ref_logprobs_T=(rollout_T + normal(0.4)).to(dtype),
        advantages_T=normal(1.0).to(dtype),
    )
