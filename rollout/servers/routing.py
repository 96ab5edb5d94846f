"""The experts to which a server sent the tokens of a sample: decoded from its answer, and checked.

An answer to a prompt of P tokens with R sampled tokens has P + R - 1 rows, one for each token that was an input: row t
belongs to input token t (``docs/notation.md``). The last token was no input, and has no row.
"""

from itertools import combinations
from typing import Protocol

import numpy as np
import pybase64

from rollout.client import GenerationError
from rollout.sglang_plugin.tandem_routed_experts import wire_type


class Experts(Protocol):
    """The part of a model's architecture that decides the rows; ``parallel.planning.architecture.Experts`` has it."""

    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def is_sparse(self) -> tuple[bool, ...]:
        """Per layer: whether it has experts."""
        ...


def bytes_per_token(experts: Experts) -> int:
    """Bytes of one row, as the learner gets it."""
    size = np.dtype(wire_type(experts.num_experts)).itemsize
    return sum(experts.is_sparse) * experts.experts_per_token * size


def decode_experts(answer: object, experts: Experts, *, rows: int) -> np.ndarray:
    """uint8 or int16 [rows, L, K]: ids of the K experts of each token in each of the L layers that have
    experts, from the base64 text of an answer, which has rows of all layers. Raises GenerationError: the
    answer has none, or another number of rows; an id is none of the model's, or twice in a row; a row of a
    layer without experts is not zero."""
    if not isinstance(answer, str):
        raise GenerationError(
            "the server's answer has no routed experts; start the servers with this config (learner.routing=rollout)"
        )
    kind = np.dtype(wire_type(experts.num_experts))
    layers, chosen = len(experts.is_sparse), experts.experts_per_token
    try:
        content = pybase64.b64decode(answer, validate=True)
    except ValueError as error:
        raise GenerationError(f"the server's routed experts are no base64: {error}") from error
    expected = rows * layers * chosen * kind.itemsize
    if len(content) != expected:
        raise GenerationError(
            f"the server's routed experts have {len(content)} bytes, but {rows} tokens in {layers} layers with {chosen} experts each, as "
            f"{kind.name}, need {expected}"
        )
    ids = np.frombuffer(content, dtype=kind).reshape(rows, layers, chosen)
    if not all(experts.is_sparse):
        is_sparse = np.array(experts.is_sparse)
        if ids[:, ~is_sparse].any():
            raise GenerationError(
                "the server's routed experts have ids in layers without experts: it serves another model"
            )
        ids = ids[:, is_sparse]
    _require_distinct(ids, experts.num_experts)
    return ids


def _require_distinct(ids: np.ndarray, num_experts: int) -> None:
    """Raises GenerationError. One pass per pair of columns: sorting each row would take much longer."""
    if ids.size and (int(ids.max()) >= num_experts or int(ids.min()) < 0):
        wrong = ids[(ids >= num_experts) | (ids < 0)][0]
        raise GenerationError(
            f"the server sent a token to expert {wrong}, but the model has experts 0 to {num_experts - 1}"
        )
    columns = np.ascontiguousarray(np.moveaxis(ids, -1, 0))
    for one, other in combinations(columns, 2):
        if (one == other).any():
            token, layer = np.argwhere(one == other)[0]
            raise GenerationError(
                f"the server sent input token {token} twice to expert {one[token, layer]}, in layer {layer} of the layers with experts"
            )
