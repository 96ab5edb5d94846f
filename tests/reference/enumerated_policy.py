"""A softmax policy with so few sequences that all of them can be written down: expectations are sums,
gradients are exact.

Legend: S sequences (all there are), T packed tokens, F prefixes, V vocabulary. A policy is a table of logits
[F, V], one row per prefix that a response can have; log-probs are nats, everything is float64.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.schema.correction import CorrectionConfig
from configs.schema.objective import ClippedObjective, EntropyConfig, KLConfig, PolicyGradientObjective
from parallel.packing import PackedBatch
from trainer.algorithm.correction import Correction, correct, correct_current
from trainer.algorithm.policy_loss import policy_loss
from trainer.algorithm.segments import spread, sum_per_sequence

PROMPT = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    """Every response, in one batch. A sequence's first place predicts a prompt token: off the mask, its
    log-probs are NaN."""

    responses: list[tuple[int, ...]]
    batch: PackedBatch
    prefixes: list[tuple[int, ...]]
    vocab: int
    prefix_T: Tensor
    """int64, which row of the table chooses the token; anything off the mask."""

    def logprobs_T(self, logits_FV: Tensor) -> Tensor:
        """With gradient to the table."""
        logprobs_T = logits_FV.log_softmax(-1)[self.prefix_T, self.batch.targets_T]
        return torch.where(self.batch.response_mask_T, logprobs_T, torch.nan)

    def probs_S(self, logits_FV: Tensor) -> Tensor:
        """Of whole responses; they add up to 1."""
        logprobs_T = torch.where(self.batch.response_mask_T, self.logprobs_T(logits_FV), 0.0)
        return sum_per_sequence(logprobs_T, self.batch.cu_seqlens).exp()

    def to_tokens(self, x_S: Tensor) -> Tensor:
        return spread(x_S, self.batch.cu_seqlens)

    def places(self, rows: Sequence[int]) -> Tensor:
        """Of these sequences' tokens, in the order of ``batch.select(rows)``."""
        bounds = self.batch.cu_seqlens.tolist()
        return torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in rows])

    def random_table(self, generator: torch.Generator) -> Tensor:
        return torch.randn(len(self.prefixes), self.vocab, generator=generator, dtype=torch.float64)

    def gradient_FV(self, slopes_T: Tensor, logits_FV: Tensor) -> Tensor:
        """d / d logits of sum_t slopes_t log pi(t), written out: each token adds slope (onehot - pi) to its
        prefix's row."""
        mask_T = self.batch.response_mask_T
        places = (self.prefix_T[mask_T], self.batch.targets_T[mask_T])
        table_FV = torch.zeros_like(logits_FV).index_put(places, slopes_T[mask_T], accumulate=True)
        return table_FV - table_FV.sum(-1, keepdim=True) * logits_FV.softmax(-1)

    def squared_norms_S(self, slopes_T: Tensor, logits_FV: Tensor) -> Tensor:
        """|gradient|^2 of each sequence by itself. No prefix occurs twice in a sequence, so its tokens' rows
        add up as squares."""
        probs_FV = logits_FV.softmax(-1)
        row_T = (
            1 - 2 * probs_FV[self.prefix_T, self.batch.targets_T] + probs_FV.square().sum(-1)[self.prefix_T]
        )
        squares_T = torch.where(self.batch.response_mask_T, slopes_T.square() * row_T, 0.0)
        return sum_per_sequence(squares_T, self.batch.cu_seqlens)


def enumerate_responses(vocab: int, length: int, *, end: int | None = None) -> Enumeration:
    """All responses of ``length`` tokens, or, where there is an ``end`` token, that are cut short by it."""
    responses, prefixes = [], [()]
    growing = [()]
    for _ in range(length):
        grown = [(*prefix, token) for prefix, token in itertools.product(growing, range(vocab))]
        responses += [r for r in grown if r[-1] == end or len(r) == length]
        growing = [r for r in grown if r[-1] != end and len(r) < length]
        prefixes += growing
    rows = {prefix: row for row, prefix in enumerate(prefixes)}
    lengths = [len(r) + 1 for r in responses]
    packed = [(PROMPT[-1:] + r, [0] + [rows[r[:i]] for i in range(len(r))]) for r in responses]
    targets_T = torch.tensor([token for targets, _ in packed for token in targets])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions_T = torch.tensor([p for n in lengths for p in range(n)])
    batch = PackedBatch(
        tokens_T=torch.tensor([token for r in responses for token in (PROMPT + r)[:-1]]),
        targets_T=targets_T,
        positions_T=positions_T,
        cu_seqlens=cu_seqlens,
        response_mask_T=positions_T > 0,
        rollout_logprobs_T=torch.full((targets_T.numel(),), torch.nan, dtype=torch.float64),
        sequence_ids_S=torch.arange(len(responses)),
    )
    prefix_T = torch.tensor([row for _, prefix_rows in packed for row in prefix_rows])
    return Enumeration(responses=responses, batch=batch, prefixes=prefixes, vocab=vocab, prefix_T=prefix_T)


def corrected_loss(
    space: Enumeration,
    config: CorrectionConfig,
    *,
    current_T: Tensor,
    old_T: Tensor,
    rollout_T: Tensor,
    advantages_S: Tensor,
    weights_S: Tensor,
    objective: ClippedObjective | PolicyGradientObjective | None = None,
) -> tuple[Tensor, Correction]:
    """sum_s weights_s loss_s by the trainer's own functions, with gradient to current_T, where loss_s is the
    loss of a batch that holds s alone (the sum over its kept tokens). Probabilities as weights make it the
    expected loss. ``objective`` is the one that the correction asks for unless it is given.
    """
    bypass = config.mode == "bypass"
    batch = space.batch.with_fields(
        rollout_logprobs_T=rollout_T,
        old_logprobs_T=rollout_T if bypass else old_T,
        advantages_T=space.to_tokens(advantages_S),
    )
    correction = correct_current(batch, current_T, config) if bypass else correct(batch, config)
    batch = batch.with_fields(
        importance_weights_T=correction.weights_T,
        aggregation_T=space.to_tokens(weights_S) * correction.keep_T,
    )
    asked = (
        PolicyGradientObjective(type="policy_gradient")
        if config.loss == "policy_gradient"
        else ClippedObjective()
    )
    loss, *_ = policy_loss(
        batch,
        current_T,
        torch.zeros_like(current_T),
        objective=objective or asked,
        kl=KLConfig(),
        entropy=EntropyConfig(),
        correction=config,
        aggregation="token_mean",
    )
    return loss, correction


def moments_of_mean(gradient: Tensor, square: float, num_samples: int) -> tuple[Tensor, float]:
    """Expectation and variance (trace of the covariance) of the mean of N samples, from E[g] and E[|g|^2] of
    one."""
    return gradient, (square - gradient.square().sum().item()) / num_samples


def moments_of_kept_mean(
    gradient: Tensor, square: float, accepted: float, num_samples: int
) -> tuple[Tensor, float]:
    """The same of the mean over those of N samples that were accepted, zero where none was.

    gradient = E[g] and square = E[|g|^2] hold a zero for a rejected sample; ``accepted`` is its probability
    P. K = k samples are accepted with binomial probability b_k, and these are independent draws given
    acceptance, with mean m = E[g] / P and variance v = E[|g|^2] / P - |m|^2. Hence
        expectation = (1 - b_0) m,    variance = v sum_{k >= 1} b_k / k + b_0 (1 - b_0) |m|^2.
    """
    if accepted == 0:
        return torch.zeros_like(gradient), 0.0
    mean = gradient / accepted
    norm = mean.square().sum().item()
    b = _binomial(num_samples, accepted)
    within = (square / accepted - norm) * sum(b_k / k for k, b_k in enumerate(b) if k)
    return (1 - b[0]) * mean, within + b[0] * (1 - b[0]) * norm


def _binomial(n: int, p: float) -> list[float]:
    """Probabilities of 0..n successes; by logs, since n over k leaves float64 at n = 1030."""
    if p >= 1:
        return [0.0] * n + [1.0]
    logs = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1))
    return [math.exp(log + k * math.log(p) + (n - k) * math.log1p(-p)) for k, log in enumerate(logs)]
