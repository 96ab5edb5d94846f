"""The order in which a run takes its training prompts (``rollout/sampling/order.py``)."""

import fractions
import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from configs.errors import Contradiction
from configs.schema.base import NonNegativeFloat, Schema
from configs.schema.own_function import OwnFunction


class ShuffledOrder(Schema):
    """Each epoch takes every prompt once, in an order that follows from ``seed`` and the epoch."""

    type: Literal["shuffle"] = "shuffle"


class FileOrder(Schema):
    """Each epoch takes every prompt once, in the order of the data (of a file: the order of its lines)."""

    type: Literal["sequential"]


MOST_TURNS = 1_000_000
"""Most prompts of one round of a mixture, which is held in memory."""


class MixtureOrder(Schema):
    """Prompts of several sources, such as math and code, in proportion to their weights, whatever their sizes
    are. At any point of the run, the number of a source's prompts so far differs from its share by less than
    one. Within a source every prompt comes once before any comes again, each time in another order, which
    follows from ``seed``. A small source repeats within an epoch, and a large one takes several epochs. [Your
    own data](data.md#mixtures) has an example."""

    type: Literal["mixture"]
    field: str
    """The field of the records that names their source, such as ``data_source``. Dots reach inner fields. Numbers and
    booleans are compared as Python writes them (``1``, ``True``)."""
    weights: dict[str, NonNegativeFloat]
    """The weight of each source by its name. Only the ratios of the weights count. All sources of the
    training file must be named; 0 leaves a source out."""

    @property
    def turns(self) -> dict[str, int]:
        """Prompts of each source in a round, the smallest whole numbers of these ratios; sources of weight 0 are left out."""
        # By their decimal digits: 0.3 is 3 / 10, not the nearest binary number.
        exact = {name: fractions.Fraction(str(weight)) for name, weight in self.weights.items() if weight > 0}
        scale = math.lcm(*(weight.denominator for weight in exact.values()))
        whole = {name: int(weight * scale) for name, weight in exact.items()}
        divisor = math.gcd(*whole.values())
        return {name: weight // divisor for name, weight in whole.items()}

    def _contradictions(self) -> Iterator[Contradiction]:
        turns = self.turns
        if not turns:
            yield Contradiction(
                ("weights",),
                "weights has no source with a weight above 0, so that no prompt would come",
                "give at least one, such as {math: 3, code: 1}",
            )
        if (total := sum(turns.values())) > MOST_TURNS:
            yield Contradiction(
                ("weights",),
                f"weights are in the ratio of whole numbers whose sum has {len(str(total))} digits; it may be {MOST_TURNS:,}",
                "round them, such as {math: 0.75, code: 0.25}",
            )


class FunctionOrder(OwnFunction):
    """The user's function, such as a curriculum."""

    type: Literal["function"]


SamplerConfig = Annotated[
    ShuffledOrder | FileOrder | MixtureOrder | FunctionOrder, Field(discriminator="type")
]
