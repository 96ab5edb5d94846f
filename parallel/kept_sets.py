"""The token ids that a truncated sampler (top_k, top_p, min_p) has kept for each token: ragged rows, end to end.

Legend: M kept ids of all tokens, token after token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSets:
    """Token t has ``num_T[t]`` ids of ``ids_M``, after those of the tokens before it. A token with none has
    the full vocabulary: nothing was truncated there, or nothing was sampled."""

    num_T: Tensor
    """int32"""
    ids_M: Tensor
    """int32, distinct within a token"""

    def __post_init__(self) -> None:
        if (self.num_T < 0).any():
            raise ValueError(
                f"num_kept_T has a count of {int(self.num_T.min())}; a token has at least 0 kept ids"
            )
        if int(self.num_T.sum()) != self.ids_M.numel():
            raise ValueError(
                f"num_kept_T counts {int(self.num_T.sum())} kept ids, but kept_ids_M has {self.ids_M.numel()}; give as many as are counted"
            )

    def at(self, places: Tensor) -> "KeptSets":
        """Those of the tokens at ``places`` (int64), in that order."""
        all_ends, num_T = self.num_T.cumsum(0), self.num_T[places]  # int64, in which torch sums int32
        ends = num_T.cumsum(0)
        # An id's place is its token's first place here, plus its distance from its token's first place there.
        shift_T = (all_ends[places] - num_T) - (ends - num_T)
        chosen = shift_T.repeat_interleave(num_T) + torch.arange(int(num_T.sum()), device=num_T.device)
        return KeptSets(num_T=num_T, ids_M=self.ids_M[chosen])

    def token_of_each(self) -> Tensor:
        """int64 [M], ascending: the token that each id belongs to."""
        tokens = torch.arange(self.num_T.numel(), device=self.num_T.device)
        return tokens.repeat_interleave(self.num_T)
