"""The ids that a server's truncated sampler kept for each token of a sample: requested, decoded and checked.

SGLang's own log-probs (``output_token_logprobs``) are of the full softmax, whatever top_p, top_k and min_p are. Its
sampling mask has, for every sampled token, the ids that it was drawn from. With it comes the token's log-prob among
them: log(p_token / sum of p over the kept ids), computed from the same probabilities that the sampler used. SGLang
returns both for any request with a finite top_k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np

from configs.schema.rollout import RolloutConfig
from rollout.client import GenerationError
from rollout.records import COUNTS, LOGPROBS, TOKEN_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The sampler's limits, as SGLang applies them to softmax(logits / temperature): the ``top_k`` largest
    probabilities; of these the fewest that reach ``top_p`` of the whole; of these the ones of at least ``min_p`` times
    the largest. SGLang may keep more than top_k ids if probabilities at the limit are equal."""

    top_p: float
    top_k: int
    min_p: float
    vocab_size: int

    @classmethod
    def of(cls, rollout: RolloutConfig, vocab_size: int) -> Self | None:
        """The limits of training samples. None: they come from the full distribution."""
        limits = {"top_p": rollout.top_p, "top_k": rollout.top_k, "min_p": rollout.min_p}
        return cls(**limits, vocab_size=vocab_size) if rollout.is_truncated else None

    @property
    def sampling_params(self) -> dict[str, float | int]:
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}


REQUEST = {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
"""Fields of a request whose answer has the kept sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The kept sets of a sample of n tokens."""

    num_kept: np.ndarray
    """int32 [n]"""
    kept_ids: np.ndarray
    """int32: token after token."""
    logprobs: np.ndarray
    """float32 [n]: log-probs of the sampled tokens among the kept ones."""


def bytes_per_token(top_k: int) -> int:
    """Most bytes of one response token's kept set, as the learner gets it: ``top_k`` ids, and their number."""
    return np.dtype(TOKEN_IDS).itemsize * top_k + np.dtype(COUNTS).itemsize


def decode_kept(meta: Mapping, token_ids: np.ndarray, vocab_size: int) -> Kept:
    """The kept sets of an answer's ``meta_info``. Raises GenerationError: the answer has none, or not one per
    token; an id is outside the vocabulary; a set lacks the token that was sampled from it; a log-prob is not
    finite, or above 0."""
    masks, values = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if masks is None or values is None:
        raise GenerationError(
            "the server's answer has no sampling masks; start the servers with this config and SGLang 0.5.23, or remove rollout.top_p, "
            "top_k and min_p"
        )
    if not len(masks) == len(values) == len(token_ids):
        raise GenerationError(
            f"the server's sampling masks are of {len(masks)} tokens with {len(values)} log-probs, but it sampled {len(token_ids)}"
        )
    # No Python loop over tokens: answers have millions of them.
    num_kept = np.fromiter(map(len, masks), dtype=COUNTS, count=len(masks))
    kept_ids = np.fromiter(chain.from_iterable(masks), dtype=TOKEN_IDS, count=int(num_kept.sum()))
    logprobs = np.array(values, dtype=LOGPROBS)  # null becomes NaN
    if kept_ids.size and (int(kept_ids.max()) >= vocab_size or int(kept_ids.min()) < 0):
        wrong = kept_ids[(kept_ids >= vocab_size) | (kept_ids < 0)][0]
        raise GenerationError(
            f"the server kept token id {wrong}, but the model has ids 0 to {vocab_size - 1}"
        )
    is_sampled = kept_ids == token_ids.repeat(num_kept)
    found = np.bincount(np.arange(len(masks)).repeat(num_kept), weights=is_sampled, minlength=len(masks))
    if (found != 1).any():
        place = int((found != 1).argmax())
        raise GenerationError(
            f"token {place + 1} of {len(masks)} (id {token_ids[place]}) occurs {int(found[place])} times among the {num_kept[place]} ids "
            "from which, by the server's answer, it was sampled"
        )
    if not (logprobs <= 0).all() or not np.isfinite(logprobs).all():
        place = int((~((logprobs <= 0) & np.isfinite(logprobs))).argmax())
        raise GenerationError(
            f"the server's log-prob of token {place + 1} of {len(masks)} among its kept ids is {logprobs[place]}; it must be at most 0"
        )
    return Kept(num_kept=num_kept, kept_ids=kept_ids, logprobs=logprobs)
