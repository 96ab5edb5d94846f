"""One growing sequence of tokens: what was observed, what was sampled, and by which request."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from rollout.client import KnownExperts
from rollout.records import (
    COUNTS,
    LOGPROBS,
    MASK,
    TOKEN_IDS,
    VERSIONS,
    Completion,
    Status,
    Trajectory,
    Turn,
    digest,
)


class TokenSequence:
    """Grows only at its end. Only this class joins prompts, responses and observations."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, Completion | None]] = []
        self._length = 0
        self._turns: list[Turn] = []
        self.known_experts: KnownExperts | None = None
        """Experts are known for all inputs before the last token of the last turn, by the weights that sampled that token. None:
        before the first turn, and after an answer without experts or tokens."""

    @classmethod
    def of_single_turn(cls, prompt_ids: Sequence[int], completion: Completion) -> Self:
        sequence = cls()
        sequence.observe(prompt_ids)
        sequence.append(completion)
        return sequence

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [n]"""
        return self._joined(TOKEN_IDS, lambda token_ids, _: token_ids)

    @property
    def turns(self) -> list[Turn]:
        return list(self._turns)

    def observe(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Append tokens that the policy did not sample."""
        self._append(np.array(token_ids, dtype=TOKEN_IDS), None)

    def beginning(self, length: int | None) -> "TokenSequence":
        """A sequence that has observed the first ``length`` tokens of this one; None: all of them.

        Sampled tokens among them are observations there, since they are trained on once, here.

        Raises ValueError: this one has fewer tokens.
        """
        length = self._length if length is None else length
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot fork at token {length} of {self._length}; use 0 to {self._length}")
        forked = TokenSequence()
        if length:
            forked.observe(self.token_ids[:length])
        return forked

    def append(self, completion: Completion) -> None:
        """Append what the policy sampled as the continuation of the tokens so far."""
        self._turns.append(
            Turn(
                start=self._length,
                end=self._length + len(completion.token_ids),
                prompt_digest=completion.prompt_digest,
                response_digest=digest(completion.token_ids),
                finish_reason=completion.finish_reason,
                cached_tokens=completion.cached_tokens,
                num_retractions=completion.num_retractions,
            )
        )
        self._append(completion.token_ids, completion)
        self.known_experts = None
        # The answer has the experts of all inputs, or of those after the known ones, by the same weights.
        if completion.experts is not None and completion.token_versions.size:
            version = int(completion.token_versions[-1])
            self.known_experts = KnownExperts(before=self._length - 1, version=version)

    def reward_turn(self, reward: float, turn: int = -1) -> None:
        """Add to the reward of a turn. Raises ValueError: there is no such turn."""
        if not self._turns:
            raise ValueError("a reward for a turn before the first act()")
        if not -len(self._turns) <= turn < len(self._turns):
            raise ValueError(f"a reward for turn {turn} of a sequence with {len(self._turns)} turns")
        rewarded = self._turns[turn]
        self._turns[turn] = replace(rewarded, reward=(rewarded.reward or 0.0) + reward)

    def trajectory(
        self,
        *,
        group_id: int,
        sibling_id: int,
        prompt_id: str,
        reward: float | None,
        reward_parts: dict[str, float],
        status: Status,
        branch: int = 0,
    ) -> Trajectory:
        """The tokens so far, with these fields of their sample."""
        experts, is_replayed = self._experts()
        num_kept, kept_ids = self._kept()
        return Trajectory(
            group_id=group_id,
            sibling_id=sibling_id,
            prompt_id=prompt_id,
            reward=reward,
            reward_parts=reward_parts,
            status=status,
            branch=branch,
            token_ids=self.token_ids,
            response_mask=self._joined(MASK, lambda _, sampled: sampled is not None),
            rollout_logprobs=self._joined_of_turns(LOGPROBS, "rollout_logprobs"),
            token_versions=self._joined_of_turns(VERSIONS, "token_versions"),
            turns=self.turns,
            experts=experts,
            is_replayed=is_replayed,
            num_kept=num_kept,
            kept_ids=kept_ids,
        )

    def _experts(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """(experts of each token, whether they are known); None if no answer had any.

        A token has the experts by the newest weights that sampled a turn after it, if an answer had them.

        After an update, even inside a turn, the server recomputes the whole sequence, and may choose other experts for its
        beginning. Later tokens were not sampled by the experts from before the update.
        """
        known = [sampled.experts for _, sampled in self._parts if sampled and sampled.experts is not None]
        if not known:
            return None, None
        experts = np.zeros((self._length, *known[0].shape[1:]), dtype=known[0].dtype)
        is_replayed, end, version = np.zeros(self._length, dtype=MASK), 0, None
        for token_ids, sampled in self._parts:
            end += len(token_ids)
            if sampled is None or not sampled.token_versions.size:
                continue
            if (sampled.token_versions != version).any():
                is_replayed[:] = False
            version = sampled.token_versions[-1]
            if sampled.experts is not None:
                places = slice(end - 1 - len(sampled.experts), end - 1)
                experts[places], is_replayed[places] = sampled.experts, True
        experts[~is_replayed] = 0
        return experts, is_replayed

    def _kept(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        known = [sampled.kept_ids for _, sampled in self._parts if sampled and sampled.kept_ids is not None]
        if not known:
            return None, None
        return self._joined_of_turns(COUNTS, "num_kept"), np.concatenate(known)

    def _append(self, token_ids: np.ndarray, sampled: Completion | None) -> None:
        self._parts.append((token_ids, sampled))
        self._length += len(token_ids)

    def _joined_of_turns(self, kind: type, field: str) -> np.ndarray:
        """A field of the completions; 0 on tokens that were observed."""
        return self._joined(kind, lambda _, sampled: 0 if sampled is None else getattr(sampled, field))

    def _joined(self, kind: type, values_of) -> np.ndarray:
        joined, end = np.empty(self._length, dtype=kind), 0
        for token_ids, sampled in self._parts:
            start, end = end, end + len(token_ids)
            joined[start:end] = values_of(token_ids, sampled)
        return joined
