"""Packed batches: sequences end to end, never padded. The shift by one token happens here and nowhere else.

``docs/notation.md`` describes the layout. L are the layers with experts here, K the experts of a token, and M the
kept ids of all tokens (``KeptSets``).
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from parallel.kept_sets import KeptSets

INTEGERS = (torch.int64,)
FLAGS = (torch.bool,)
FLOATS = (torch.float32, torch.float64)
"""A log-prob of -8 has steps of 1/32 in bfloat16 and 1/256 in float16: ratios of such numbers are off by
percents, and exp overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """S sequences of T tokens in all, on one rank. Optional fields are set in the course of the step.

    Raises ValueError, naming the field, for a field that is not one value per token, has another dtype than
    documented below (float64 is as good as float32), or does not fit ``cu_seqlens``.
    """

    tokens_T: Tensor
    """int64, the input tokens."""
    targets_T: Tensor
    """int64, the token that follows each input token."""
    positions_T: Tensor
    """int64, place within its sequence, from 0."""
    cu_seqlens: Tensor
    """int32 [S + 1], on the CPU: sequence s takes places cu_seqlens[s]:cu_seqlens[s + 1]."""
    response_mask_T: Tensor
    """bool, True if the target is a response token."""
    rollout_logprobs_T: Tensor
    """float32 nats, of the target, by the server while sampling; arbitrary off the mask."""
    sequence_ids_S: Tensor
    """int64, number of the sequence in the whole step's batch, the same under every layout."""
    prompt_ids_S: Tensor | None = None
    """int64, on the CPU: sequences with one number begin with the same prompt, whose hidden states the model may compute
    once for all of them. None: each sequence is computed whole."""
    prompt_lengths_S: Tensor | None = None
    """int64, on the CPU: input tokens of the prompt, up to the one that predicts the first response token. None with
    ``prompt_ids_S``."""
    lag_T: Tensor | None = None
    """int16, on response tokens: updates of the weights between the sampling of the target and this step. None
    where every lag is 0 by the config."""
    experts_TLK: Tensor | None = None
    """uint8 or int16 [T, L, K]: the experts to which the server sent each input token, or with learner.routing=old the
    learner's pass before the update. None: learner.routing=own."""
    is_replayed_T: Tensor | None = None
    """bool: tokens that go to ``experts_TLK`` here too; the others go to the learner's own choice."""
    num_kept_T: Tensor | None = None
    """int32: ids that the sampler had kept when it chose the target; 0 off the mask. None: nothing was truncated."""
    kept_ids_M: Tensor | None = None
    """int32: these ids, token after token. None with ``num_kept_T``."""
    old_logprobs_T: Tensor | None = None
    """float32 nats. None if current is old: the update's forward pass gives both."""
    ref_logprobs_T: Tensor | None = None
    advantages_T: Tensor | None = None
    values_T: Tensor | None = None
    """float32, the critic's values before the update, of the states in which the targets are chosen."""
    returns_T: Tensor | None = None
    """float32, the critic's targets."""
    importance_weights_T: Tensor | None = None
    """float32, the correction's weights, only for the policy's term. None: the loss computes the correction in
    its forward pass."""
    aggregation_T: Tensor | None = None
    """float32 weights of every term, from global counts, zero on tokens that the correction rejected."""
    value_aggregation_T: Tensor | None = None
    """float32 weights of the critic's loss, like aggregation_T but over all response tokens."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_T") and value is not None:
                require_per_token(f.name, value, self.tokens_T.numel(), _DTYPES.get(f.name, FLOATS))
        for (one, other), what in _TOGETHER.items():
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} say together {what}, and one is missing; pass both")
        self._require_experts()
        self._require_kept()
        self._require_prompts()
        bounds, ids_S = self.cu_seqlens, self.sequence_ids_S
        if bounds.dim() != 1 or ids_S.shape != (bounds.numel() - 1,):
            raise ValueError(
                f"cu_seqlens has shape {tuple(bounds.shape)}, sequence_ids_S {tuple(ids_S.shape)}; S sequences have S + 1 boundaries"
            )
        if bounds[0] != 0 or bounds[-1] != self.num_tokens or (bounds.diff() < 0).any():
            raise ValueError(
                f"cu_seqlens goes from {bounds[0].item()} to {bounds[-1].item()}, the batch has {self.num_tokens} tokens; "
                "it must rise from 0 to the number of tokens"
            )

    def _require_experts(self) -> None:
        experts, num_tokens = self.experts_TLK, self.num_tokens
        if experts is not None and (experts.dim() != 3 or len(experts) != num_tokens):
            raise ValueError(
                f"experts_TLK has shape {tuple(experts.shape)}, the batch {num_tokens} tokens; pass [tokens, layers, experts per token]"
            )
        if experts is not None and experts.dtype not in (torch.uint8, torch.int16):
            raise ValueError(f"experts_TLK is {experts.dtype}; convert it to uint8 or int16")

    @property
    def kept(self) -> KeptSets | None:
        """The sets over which log-probs and entropies are taken; None: the full vocabulary."""
        if self.num_kept_T is None or self.kept_ids_M is None:
            return None
        return KeptSets(num_T=self.num_kept_T, ids_M=self.kept_ids_M)

    def _require_kept(self) -> None:
        if self.kept_ids_M is not None and self.kept_ids_M.dtype != torch.int32:
            raise ValueError(f"kept_ids_M is {self.kept_ids_M.dtype}; convert it to int32")
        _ = self.kept  # raises if counts and ids do not fit

    @property
    def prompts(self) -> tuple[Tensor, Tensor] | None:
        """(prompt_ids_S, prompt_lengths_S) of prompts that may be computed once. None: each sequence is computed whole."""
        if self.prompt_ids_S is None or self.prompt_lengths_S is None:
            return None
        return self.prompt_ids_S, self.prompt_lengths_S

    def _require_prompts(self) -> None:
        if self.prompts is None:
            return
        ids, lengths = self.prompts
        if not ids.shape == lengths.shape == self.sequence_ids_S.shape:
            raise ValueError(
                f"prompt_ids_S has shape {tuple(ids.shape)}, prompt_lengths_S {tuple(lengths.shape)}; pass one value for each of "
                f"the {self.sequence_ids_S.numel()} sequences"
            )

    def per_token(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every field that is set and has a value, or a row, per token."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith(("_T", "_TLK")) and value is not None:
                yield f.name, value

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.numel()

    @property
    def lengths(self) -> list[int]:
        return torch.diff(self.cu_seqlens).tolist()

    def with_fields(self, **tensors: Tensor) -> "PackedBatch":
        """A copy with some ``_T`` fields replaced."""
        return replace(self, **tensors)

    def select(self, rows: Sequence[int]) -> "PackedBatch":
        """The sequences at ``rows``, in that order, as a separate batch with all fields per token that are
        set."""
        bounds = self.cu_seqlens.tolist()
        empty = torch.empty(0, dtype=torch.int64)
        places = torch.cat([empty, *(torch.arange(bounds[r], bounds[r + 1]) for r in rows)])
        lengths = torch.tensor([0] + [bounds[r + 1] - bounds[r] for r in rows])
        taken = {name: value[places.to(value.device)] for name, value in self.per_token()}
        if (kept := self.kept) is not None:
            taken["kept_ids_M"] = kept.at(places.to(kept.num_T.device)).ids_M
        rows_S = torch.tensor(rows, dtype=torch.int64)
        for name in ("sequence_ids_S", "prompt_ids_S", "prompt_lengths_S"):
            if (values_S := getattr(self, name)) is not None:
                taken[name] = values_S[rows_S]
        return replace(self, **taken, cu_seqlens=lengths.cumsum(0).to(torch.int32))

    def to(self, device: torch.device) -> "PackedBatch":
        """A copy with every tensor per token on ``device``; cu_seqlens and the fields per sequence stay on
        the CPU."""
        moved = {name: value.to(device) for name, value in self.per_token()}
        if self.kept_ids_M is not None:
            moved["kept_ids_M"] = self.kept_ids_M.to(device)
        return replace(self, **moved)


_TOGETHER = {
    ("experts_TLK", "is_replayed_T"): "what is replayed",
    ("num_kept_T", "kept_ids_M"): "what was kept",
    ("prompt_ids_S", "prompt_lengths_S"): "what is shared",
}
_DTYPES = {
    **dict.fromkeys(("tokens_T", "targets_T", "positions_T"), INTEGERS),
    **dict.fromkeys(("response_mask_T", "is_replayed_T"), FLAGS),
    "lag_T": (torch.int16,),
    "num_kept_T": (torch.int32,),
}


def require_per_token(
    name: str, value: Tensor, num_tokens: int, dtypes: Sequence[torch.dtype] = FLOATS
) -> None:
    """Raises ValueError if the tensor does not have one value per token, or has none of ``dtypes``."""
    if value.shape != (num_tokens,):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, the batch {num_tokens} tokens; pass one value per token"
        )
    if value.dtype not in dtypes:
        named = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        fix = f"convert it to {named}"
        if dtypes is FLOATS:
            fix = f"compute it in {named}: rounding cannot be undone"
        raise ValueError(f"{name} is {str(value.dtype).removeprefix('torch.')}, not {named}; {fix}")


def pack_sequences(
    *,
    token_ids: Sequence[Sequence[int] | np.ndarray],
    response_masks: Sequence[Sequence[bool] | np.ndarray],
    rollout_logprobs: Sequence[Sequence[float] | np.ndarray],
    sequence_ids: Sequence[int],
    lags: Sequence[np.ndarray] | None = None,
    experts: Sequence[np.ndarray] | None = None,
    is_replayed: Sequence[np.ndarray] | None = None,
    num_kept: Sequence[np.ndarray] | None = None,
    kept_ids: Sequence[np.ndarray] | None = None,
    share_prompts: bool = False,
) -> PackedBatch:
    """Lay sequences end to end and shift by one: input ``ids[:-1]``, target, mask and log-prob ``[1:]``. Experts are
    those of the input. Kept ids are those of the target; a sequence's first token, which is no target, has none.
    share_prompts: whether to say which sequences begin with the same prompt.

    Raises ValueError for a sequence of fewer than two tokens, which predicts nothing, and for a mask or
    log-probs that are not one value per token.
    """
    for i, *rows in zip(sequence_ids, token_ids, response_masks, rollout_logprobs, strict=True):
        if len({len(row) for row in rows}) > 1:
            num_ids, num_flags, num_logprobs = map(len, rows)
            raise ValueError(
                f"sequence {i} has {num_ids} token ids, {num_flags} values of response_mask and {num_logprobs} rollout_logprobs; "
                "give each one value per token"
            )
    short = [i for i, ids in zip(sequence_ids, token_ids, strict=True) if len(ids) < 2]
    if short:
        raise ValueError(f"sequences {short} have fewer than two tokens: there is nothing to predict")
    lengths = torch.tensor([len(ids) for ids in token_ids], dtype=torch.int64)
    ids = _join(token_ids, torch.int64)
    # A sequence's last token is no input, and its first one no target.
    ends = lengths.cumsum(0)
    is_input, is_target = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool)
    is_input[ends - 1] = False
    is_target[ends - lengths] = False
    places = torch.arange(len(ids)) - (ends - lengths).repeat_interleave(lengths)
    prompts = same_prompts(token_ids, response_masks) if share_prompts else None
    return PackedBatch(
        tokens_T=ids[is_input],
        targets_T=ids[is_target],
        positions_T=places[is_input],
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths - 1]).cumsum(0).to(torch.int32),
        response_mask_T=_join(response_masks, torch.bool)[is_target],
        rollout_logprobs_T=_join(rollout_logprobs, torch.float32)[is_target],
        sequence_ids_S=torch.tensor(list(sequence_ids), dtype=torch.int64),
        lag_T=None if lags is None else _join(lags, torch.int16)[is_target],
        experts_TLK=None if experts is None else torch.from_numpy(np.concatenate(experts))[is_input],
        is_replayed_T=None if is_replayed is None else _join(is_replayed, torch.bool)[is_input],
        num_kept_T=None if num_kept is None else _join(num_kept, torch.int32)[is_target],
        kept_ids_M=None if kept_ids is None else _join(kept_ids, torch.int32),
        prompt_ids_S=None if prompts is None else torch.tensor(prompts[0], dtype=torch.int64),
        prompt_lengths_S=None if prompts is None else torch.tensor(prompts[1], dtype=torch.int64),
    )


def same_prompts(
    token_ids: Sequence[Sequence[int] | np.ndarray], response_masks: Sequence[Sequence[bool] | np.ndarray]
) -> tuple[list[int], list[int]]:
    """(a number of each sequence's prompt, its length): the tokens before the first response token. A sequence without a
    response is prompt up to its last token, which is no input. The number is a digest of 64 bits, the same on every rank."""
    ids, lengths = [], []
    for tokens, mask in zip(token_ids, response_masks, strict=True):
        mask = np.asarray(mask, dtype=bool)
        length = int(mask.argmax()) if mask.any() else len(tokens) - 1
        prompt = np.asarray(tokens[:length], dtype=np.int64)
        digest = hashlib.blake2b(prompt.data, digest_size=8).digest()
        ids.append(int.from_bytes(digest, "little", signed=True))
        lengths.append(length)
    return ids, lengths


def _join(rows: Sequence[Sequence | np.ndarray], dtype: torch.dtype) -> Tensor:
    """All rows end to end, by numpy, which reads a list faster than torch does."""
    return torch.from_numpy(np.concatenate([np.asarray(row) for row in rows], dtype=_NUMPY[dtype]))


_NUMPY = {
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
    torch.float32: np.float32,
}
