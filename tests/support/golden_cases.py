"""Answers of an independent implementation to seeded random inputs (``tests/golden``), turned into packed tensors.

Legend: B rows and W columns of the padded arrays as stored, T packed tokens. Rows are cut after their last valid token and laid end to
end; what lies off the mask within a row becomes NaN in inputs, so that every golden test also shows that it does not matter.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class GoldenCase:
    name: str
    params: dict
    arrays: dict[str, np.ndarray]
    scalars: dict[str, float]

    @property
    def mask_T(self) -> Tensor:
        return self._pack(self.arrays["mask"]).bool()

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self._lengths()]).cumsum(0).to(torch.int32)

    @property
    def width(self) -> int:
        return self.arrays["mask"].shape[1]

    def input_T(self, name: str) -> Tensor:
        return torch.where(self.mask_T, self._pack(self.arrays[name]), torch.nan)

    def output_T(self, name: str) -> Tensor:
        return self._pack(self.arrays[f"out_{name}"])

    def _lengths(self) -> list[int]:
        return [int(row.nonzero()[0].max(initial=0)) + 1 for row in self.arrays["mask"]]

    def _pack(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(
            np.concatenate([row[:n] for row, n in zip(array, self._lengths(), strict=True)])
        )


def load(kind: str) -> list[GoldenCase]:
    """All stored cases of a kind: advantage, correction, kl or policy_loss."""
    found = [c for c in json.loads((FOLDER / "cases.json").read_text()) if c["kind"] == kind]
    if not found:
        raise ValueError(f"no golden case of kind {kind!r} in {FOLDER}")
    return [
        GoldenCase(
            name=c["name"],
            params=c["params"],
            arrays=dict(np.load(FOLDER / f"{c['name']}.npz")),
            scalars=c["scalars"],
        )
        for c in found
    ]
