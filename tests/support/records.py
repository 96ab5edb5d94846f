"""Records of samples from plain lists."""

from typing import Any

import numpy as np

from rollout.records import LOGPROBS, MASK, TOKEN_IDS, VERSIONS, Completion, Trajectory

KINDS = {
    "token_ids": TOKEN_IDS,
    "rollout_logprobs": LOGPROBS,
    "token_versions": VERSIONS,
    "response_mask": MASK,
}


def completion(**fields: Any) -> Completion:
    return Completion(**as_arrays(fields))


def trajectory(**fields: Any) -> Trajectory:
    return Trajectory(**as_arrays(fields))


def as_arrays(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, those per token as arrays of their kinds."""
    return {
        name: np.array(value, dtype=KINDS[name]) if name in KINDS else value for name, value in fields.items()
    }
