"""The order in which a run takes its training prompts (``rollout/sampling/order.py``)."""

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.base import Schema
from configs.schema.own_function import OwnFunction


class ShuffledOrder(Schema):
    """Each epoch takes every prompt once, in an order that follows from ``seed`` and the epoch."""

    type: Literal["shuffle"] = "shuffle"


class FileOrder(Schema):
    """Each epoch takes every prompt once, in the order of the data: of a file, that of its lines."""

    type: Literal["sequential"]


class FunctionOrder(OwnFunction):
    """A function of the user's own, such as a curriculum."""

    type: Literal["function"]


SamplerConfig = Annotated[ShuffledOrder | FileOrder | FunctionOrder, Field(discriminator="type")]
