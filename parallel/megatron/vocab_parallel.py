"""Log-prob and entropy straight from hidden states, with the vocabulary sharded over tensor-parallel ranks.

Legend: H hidden size, V this rank's rows of the output projection, M kept ids of all tokens (``KeptSets``).

The output projection is fused with the log-softmax chunk by chunk. Forward and backward hold float32 logits of
C tokens at a time, never those of a whole micro-batch. Backward computes each chunk's logits again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.kept_sets import KeptSets
from parallel.megatron import accumulation

NEVER = -1e30
"""Logit of an id that the sampler had not kept. exp(NEVER - x) is exactly 0 for every real logit x, and 0 * NEVER is 0,
where infinity would make NaN: no sum and no gradient has a trace of these ids."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The arguments of ``linear_logprobs`` that have no gradient."""

    vocab_size: int
    temperature: float
    chunk_tokens: int
    group: dist.ProcessGroup | None
    with_entropy: bool
    dtype: torch.dtype
    whole_logits: Callable[[Tensor, Tensor], Tensor] | None
    kept: KeptSets | None


def linear_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = True,
    dtype: torch.dtype | None = None,
    whole_logits: Callable[[Tensor, Tensor], Tensor] | None = None,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(x)[target] and the entropy of softmax(x), for x = hidden @ weight^T / temperature over the
    full vocabulary.

    With Z = sum_v exp(x_v) over all ranks and p = exp(x) / Z:
    ``logprobs_T = x_target - log Z`` and ``entropy_T = log Z - sum_v p_v x_v``, both float32 [T], in nats.
    Gradients: d logprob / dx_v = 1[v = target] - p_v and d entropy / dx_v = -p_v (log p_v + entropy).
    SGLang divides by temperature in the same way before its own log-softmax. The projection and its backward
    run in ``dtype`` (None: that of ``hidden_TH``), to which hidden states and weight are converted; everything
    after it runs in float32. ``whole_logits`` (hidden_CH, weight_VH) gives the forward pass the logits of the full
    vocabulary, [C, vocab_size], a fresh tensor of the same values on every rank; None: torch's product of this rank's
    rows.

    ``weight_VH`` holds rows [rank V, rank V + V) of the vocabulary; rows from ``vocab_size`` on are padding
    and take no part. ``group`` is the tensor-parallel group, None (or one rank) for an unsharded vocabulary.
    A call makes two all-reduces, whatever the number of chunks, or those of ``whole_logits``. The returned values are the same on every
    rank; the gradient of ``hidden_TH`` is this rank's part, which the caller sums over the group. The log-probs
    do not depend on ``with_entropy``.

    kept: the ids over which each token's softmax, log-prob and entropy are taken, with Z = sum over the kept ids of
    all ranks; None: the full vocabulary. Gradients are the same with p = 0 elsewhere. A target outside its own set
    would have a log-prob of about ``NEVER``, or the least number of the product's dtype.

    Raises ValueError for shapes that do not fit, temperature <= 0 and chunk_tokens < 1.
    """
    dtype = dtype or hidden_TH.dtype
    settings = _Settings(
        vocab_size, temperature, chunk_tokens, group, with_entropy, dtype, whole_logits, kept
    )
    _check_inputs(hidden_TH, weight_VH, targets_T, settings)
    logprobs_T, entropy_T = _LinearLogprobs.apply(hidden_TH, weight_VH, targets_T, settings)
    return logprobs_T, entropy_T if with_entropy else None


def _check_inputs(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, settings: _Settings) -> None:
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_TH.shape)} and weight {tuple(weight_VH.shape)} must be [T, H] and [V, H] of the same H"
        )
    if targets_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"targets {tuple(targets_T.shape)} must be [T] like hidden {tuple(hidden_TH.shape)}")
    if not settings.temperature > 0:
        raise ValueError(f"temperature={settings.temperature} must be above 0")
    if settings.chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={settings.chunk_tokens} must be at least 1")
    ranks = _group_size(settings.group)
    if settings.vocab_size > weight_VH.shape[0] * ranks:
        raise ValueError(
            f"vocab_size={settings.vocab_size} exceeds the {weight_VH.shape[0]} rows on each of {ranks} ranks"
        )
    if settings.kept is not None and settings.kept.num_T.shape != targets_T.shape:
        raise ValueError(
            f"kept sets of {settings.kept.num_T.numel()} tokens do not fit {targets_T.numel()} targets; pass one per token"
        )


def _group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _product(hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
    return hidden_CH @ weight_VH.t()


def _scaled(product_CV: Tensor, temperature: float) -> Tensor:
    """float32 [C, V], a fresh tensor, or the product itself, that may be changed in place."""
    logits_CV = product_CV.float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


@dataclass(frozen=True, slots=True)
class _KeptHere:
    """The kept sets' part among this rank's rows of the vocabulary."""

    is_limited_T: Tensor
    """bool: tokens with a kept set."""
    tokens_M: Tensor
    columns_M: Tensor
    chunk_tokens: int
    bounds: list[int]
    """Chunk c has the ids bounds[c]:bounds[c + 1]."""

    @classmethod
    def of(cls, kept: KeptSets | None, first: int, count: int, chunk_tokens: int) -> "_KeptHere | None":
        if kept is None:
            return None
        columns_M, tokens_M = kept.ids_M.long() - first, kept.token_of_each()
        is_here_M = (columns_M >= 0) & (columns_M < count)
        columns_M, tokens_M = columns_M[is_here_M], tokens_M[is_here_M]
        num_tokens = kept.num_T.numel()
        starts = torch.arange(0, num_tokens + chunk_tokens, chunk_tokens, device=tokens_M.device)
        bounds = torch.searchsorted(tokens_M, starts).tolist()
        return cls(kept.num_T > 0, tokens_M, columns_M, chunk_tokens, bounds)

    def limit(self, logits_CV: Tensor, start: int) -> None:
        """Set the logits of what was not kept to ``NEVER``, or the least number of their dtype, in place. start: the chunk's
        first token."""
        chunk = start // self.chunk_tokens
        ids = slice(self.bounds[chunk], self.bounds[chunk + 1])
        places = self.tokens_M[ids] - start, self.columns_M[ids]
        kept_values = logits_CV[places]
        never = max(NEVER, torch.finfo(logits_CV.dtype).min)
        logits_CV.masked_fill_(self.is_limited_T[start : start + self.chunk_tokens, None], never)
        logits_CV[places] = kept_values


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, settings: _Settings):
        s = settings
        first = 0 if s.group is None else dist.get_rank(s.group) * weight_VH.shape[0]
        count = min(max(s.vocab_size - first, 0), weight_VH.shape[0])  # of rows without padding
        kept_here = _KeptHere.of(s.kept, first, count, s.chunk_tokens)
        if s.whole_logits is None:
            rows_VH = weight_VH[:count].to(s.dtype)
            sums = _sums(hidden_TH, rows_VH, targets_T - first, count, kept_here, s)
            log_z_T, logprobs_T, entropy_T = _combine_ranks(*sums, s.group)
        else:
            all_kept = _KeptHere.of(s.kept, 0, s.vocab_size, s.chunk_tokens)
            sums = _sums(hidden_TH, weight_VH.to(s.dtype), targets_T, s.vocab_size, all_kept, s)
            log_z_T, logprobs_T, entropy_T = _combine_ranks(*sums, None)
        kept = () if kept_here is None else (kept_here.is_limited_T, kept_here.tokens_M, kept_here.columns_M)
        # What is not saved for backward stays until the graph goes, which is in the next micro-batch's forward pass.
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, log_z_T, entropy_T, *kept)
        ctx.settings, ctx.first, ctx.count = replace(settings, kept=None), first, count
        ctx.bounds = kept_here and kept_here.bounds
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_T, grad_entropy_T):
        hidden_TH, weight_VH, targets_T, log_z_T, entropy_T, *kept = ctx.saved_tensors
        kept_here = None
        if kept:
            is_limited_T, tokens_M, columns_M = kept
            kept_here = _KeptHere(is_limited_T, tokens_M, columns_M, ctx.settings.chunk_tokens, ctx.bounds)
        dtype, temperature = ctx.settings.dtype, ctx.settings.temperature
        rows_VH = weight_VH[: ctx.count].to(dtype)
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = None  # stays so for a frozen output layer
        if ctx.needs_input_grad[1]:
            # float32, so that the sum over chunks has no roundings of bfloat16.
            grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(log_z_T)
        for start in range(0, hidden_TH.shape[0], ctx.settings.chunk_tokens):
            chunk = slice(start, start + ctx.settings.chunk_tokens)
            hidden_CH = hidden_TH[chunk].to(dtype)
            product_CV = _product(hidden_CH, rows_VH)
            if kept_here is not None:
                kept_here.limit(product_CV, start)
            grad_CV = _grad_product(
                product_CV,
                targets_T[chunk] - ctx.first,
                log_z_T[chunk],
                entropy_T[chunk],
                grad_logprobs_T[chunk],
                None if grad_entropy_T is None else grad_entropy_T[chunk],
                temperature,
            )
            grad_hidden_TH[chunk] = grad_CV @ rows_VH
            if grad_weight_VH is not None:
                accumulation.add_product(grad_weight_VH[: ctx.count], grad_CV.t(), hidden_CH)
            del product_CV, grad_CV  # before there are others
        if grad_weight_VH is not None:
            grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None


def _sums(
    hidden_TH: Tensor,
    rows_VH: Tensor,
    local_targets_T: Tensor,
    num_columns: int,
    kept_here: _KeptHere | None,
    settings: _Settings,
) -> tuple[Tensor, Tensor]:
    """(the maximum m over the columns of the product, [sum exp(x - m), x_target or 0, sum exp(x - m) (x - m)]), each
    [T]."""
    num_tokens = hidden_TH.shape[0]
    maximum_T = hidden_TH.new_full((num_tokens,), -torch.inf, dtype=torch.float32)
    sums_3T = hidden_TH.new_zeros((3, num_tokens), dtype=torch.float32)
    if num_columns == 0:
        return maximum_T, sums_3T
    product = settings.whole_logits or _product
    for start in range(0, num_tokens, settings.chunk_tokens):
        chunk = slice(start, start + settings.chunk_tokens)
        product_CV = product(hidden_TH[chunk].to(rows_VH.dtype), rows_VH)
        if kept_here is not None:
            kept_here.limit(product_CV, start)
        sums_4C = _chunk_sums(
            product_CV, local_targets_T[chunk], settings.temperature, with_entropy=settings.with_entropy
        )
        maximum_T[chunk], sums_3T[:, chunk] = sums_4C[0], sums_4C[1:]
        del product_CV  # before there is another
    return maximum_T, sums_3T


def _chunk_sums(
    product_CV: Tensor, local_targets_C: Tensor, temperature: float, *, with_entropy: bool
) -> Tensor:
    """``_sums`` of one chunk, [4, C]. The product may be changed."""
    if product_CV.is_cuda:
        from parallel.megatron import triton_kernels

        return triton_kernels.logit_sums(product_CV, local_targets_C, temperature, with_entropy=with_entropy)
    logits_CV = _scaled(product_CV, temperature)
    is_local_C, column_C1 = _local_columns(local_targets_C, logits_CV.shape[1])
    sums_4C = logits_CV.new_zeros((4, len(logits_CV)))
    sums_4C[0] = logits_CV.amax(-1)
    sums_4C[2] = torch.where(is_local_C, logits_CV.gather(1, column_C1).squeeze(1), 0.0)
    logits_CV.sub_(sums_4C[0].unsqueeze(1))
    exponentials_CV = logits_CV.exp()
    sums_4C[1] = exponentials_CV.sum(-1)
    if with_entropy:
        sums_4C[3] = exponentials_CV.mul_(logits_CV).sum(-1)
    return sums_4C


def _local_columns(local_targets_C: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """(whether a target is among this rank's columns [C], its column or 0 [C, 1])."""
    is_local_C = (local_targets_C >= 0) & (local_targets_C < num_columns)
    return is_local_C, torch.where(is_local_C, local_targets_C, 0).unsqueeze(1)


def _combine_ranks(
    maximum_T: Tensor, sums_3T: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log Z, log-prob of the target, entropy) over all ranks, each [T].

    The common maximum is subtracted first, so that large logits cost no digits.
    """
    if _group_size(group) == 1:
        total_T = maximum_T
    else:
        total_T = maximum_T.clone()
        dist.all_reduce(total_T, op=dist.ReduceOp.MAX, group=group)
        # With the common maximum M: exp(x - M) = exp(x - m) exp(m - M), and x - M = (x - m) + (m - M).
        # A rank of padding alone has m = -inf and sums of 0, which any finite shift leaves as they are.
        shift_T = torch.where(maximum_T == -torch.inf, 0.0, maximum_T - total_T)
        scale_T = shift_T.exp()
        sums_3T = torch.stack(
            (sums_3T[0] * scale_T, sums_3T[1], (sums_3T[2] + sums_3T[0] * shift_T) * scale_T)
        )
        dist.all_reduce(sums_3T, group=group)
    log_sum_T = sums_3T[0].log()
    return total_T + log_sum_T, (sums_3T[1] - total_T) - log_sum_T, log_sum_T - sums_3T[2] / sums_3T[0]


def _grad_product(
    product_CV: Tensor,
    local_targets_C: Tensor,
    log_z_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """d loss / d product, in its dtype, which may be its memory: with x = product / temperature, d loss / d x =
    g (1[target] - p) - h p (log p + entropy); g, h: gradients of log-prob and entropy."""
    if product_CV.is_cuda and product_CV.shape[1]:
        from parallel.megatron import triton_kernels

        rows = (local_targets_C, log_z_C, entropy_C, grad_logprobs_C, grad_entropy_C)
        return triton_kernels.logit_gradient_(product_CV, *rows, temperature)
    logp_CV = _scaled(product_CV, temperature).sub_(log_z_C.unsqueeze(1))
    probabilities_CV = logp_CV.exp()
    if grad_entropy_C is None:
        grad_CV = probabilities_CV.mul_(-grad_logprobs_C.unsqueeze(1))
    else:
        factor_CV = logp_CV.add_(entropy_C.unsqueeze(1)).mul_(grad_entropy_C.unsqueeze(1))
        factor_CV.add_(grad_logprobs_C.unsqueeze(1))
        grad_CV = probabilities_CV.mul_(factor_CV).neg_()
    if grad_CV.shape[1]:
        is_local_C, column_C1 = _local_columns(local_targets_C, grad_CV.shape[1])
        grad_CV.scatter_add_(1, column_C1, torch.where(is_local_C, grad_logprobs_C, 0.0).unsqueeze(1))
    return (grad_CV if temperature == 1.0 else grad_CV.div_(temperature)).to(product_CV.dtype)
