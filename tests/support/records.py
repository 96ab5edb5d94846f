"""Records of samples from plain lists."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.records import (
    LOGPROBS,
    MASK,
    TOKEN_IDS,
    VERSIONS,
    Completion,
    FinishReason,
    Trajectory,
    Turn,
    digest,
)

KINDS = {
    "token_ids": TOKEN_IDS,
    "rollout_logprobs": LOGPROBS,
    "token_versions": VERSIONS,
    "response_mask": MASK,
}


def completion(*, prompt_ids: Sequence[int] = (), **fields: Any) -> Completion:
    return Completion(**as_arrays(fields), prompt_digest=digest(np.array(prompt_ids, dtype=TOKEN_IDS)))


def trajectory(*, finish_reason: FinishReason = FinishReason.STOP, **fields: Any) -> Trajectory:
    """With the turns that follow from its response mask: one per run of sampled tokens."""
    arrays = as_arrays(fields)
    return (
        Trajectory(**arrays, turns=turns_of(arrays, finish_reason))
        if "turns" not in fields
        else Trajectory(**arrays)
    )


def turns_of(arrays: dict[str, Any], finish_reason: FinishReason) -> list[Turn]:
    ids, mask = arrays["token_ids"], np.pad(arrays["response_mask"].astype(int), 1)
    starts, ends = np.flatnonzero(np.diff(mask) == 1), np.flatnonzero(np.diff(mask) == -1)
    return [
        Turn(
            start=int(start),
            end=int(end),
            prompt_digest=digest(ids[:start]),
            response_digest=digest(ids[start:end]),
            finish_reason=finish_reason,
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def as_arrays(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, those per token as arrays of their kinds."""
    return {
        name: np.array(value, dtype=KINDS[name]) if name in KINDS else value for name, value in fields.items()
    }
