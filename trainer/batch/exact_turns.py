"""The gate: it checks that the learner trains on the sampled tokens, turn by turn and token by token.

Each turn carries two digests from the process that talked to the server: of the tokens in the request, and of
the tokens in the answer. They are compared here with the packed tensors that the learner trains on. The
prompt of a turn must be all tokens that are packed before it, so a turn that was rendered or tokenised again
is found.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from parallel.packing import PackedBatch
from rollout.client import RolloutError
from rollout.records import TOKEN_IDS, Trajectory, digest


class TurnsDiffer(RolloutError):
    """A turn's prompt or its sampled tokens differ from its trajectory."""


def require_exact_turns(trajectories: Sequence[Trajectory], packed: PackedBatch) -> None:
    """``packed`` has the trajectories end to end, in their order.

    Raises:
        TurnsDiffer: a turn's prompt or response is not what is packed, or the packed response mask is not that of
            the turns.
    """
    bounds = packed.cu_seqlens.tolist()
    tokens, targets = packed.tokens_T.numpy(), packed.targets_T.numpy()
    mask = packed.response_mask_T.numpy()
    for row, trajectory in enumerate(trajectories):
        start, end = bounds[row], bounds[row + 1]
        token_ids = np.append(tokens[start:end], targets[end - 1]).astype(TOKEN_IDS)
        wrong = _first_difference(trajectory, token_ids, mask[start:end])
        if wrong is not None:
            raise TurnsDiffer(
                f"prompt {trajectory.prompt_id}, sibling {trajectory.sibling_id}: {wrong}; nothing was trained on"
            )


def _first_difference(trajectory: Trajectory, token_ids: np.ndarray, mask: np.ndarray) -> str | None:
    """mask: of the targets, which are all tokens but the first."""
    before, hashed = hashlib.blake2b(digest_size=8), 0
    is_sampled = np.zeros(len(token_ids), dtype=bool)
    for number, turn in enumerate(trajectory.turns, start=1):
        before.update(token_ids[hashed : turn.start].data)
        hashed = turn.start
        if int.from_bytes(before.digest(), "little") != turn.prompt_digest:
            return f"turn {number} was sampled from other tokens than the {turn.start} before it"
        if digest(token_ids[turn.start : turn.end]) != turn.response_digest:
            return f"turn {number} has other tokens than the server answered with"
        is_sampled[turn.start : turn.end] = True
    expected = is_sampled[1:] if trajectory.reward is not None else np.zeros(len(mask), dtype=bool)
    if not np.array_equal(mask, expected):
        return f"{int((mask != expected).sum())} tokens of the response mask are not those of its turns"
    return None
