"""The schema, one module per part of a run; ``RunConfig`` is the root of a training run, ``SftConfig`` of a
warm start."""

from configs.schema.run import AnyConfig, RunConfig, SftConfig, kind_of

__all__ = ["AnyConfig", "RunConfig", "SftConfig", "kind_of"]
