"""Where a run writes, what it tracks, and the limits of its processes."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from configs.schema.base import NonNegativeInt, PositiveFloat, PositiveInt, Schema


class LaunchConfig(Schema):
    runs_dir: Path = Path("runs")
    threads_per_process: PositiveInt = 1
    """OMP threads of every process on CPU: several processes with several threads each stall 10-40 times."""
    start_timeout_s: PositiveFloat = 900.0
    """For all roles to report that they are ready."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Of torch.distributed and of the weight broadcast; ranks wait in a collective while rank 0 waits for samples."""
    stop_grace_s: PositiveFloat = 10.0
    """Between SIGTERM and SIGKILL to a role's process group."""


class TrackingConfig(Schema):
    experiment: str = "tandem"
    uri: str | None = None
    """MLflow tracking URI; None: MLFLOW_TRACKING_URI if set, else a sqlite store inside the run folder."""


class EvaluationConfig(Schema):
    every: NonNegativeInt = 0
    """Steps between evaluations on held-out problems; 0: only before the first and after the last step."""
    at_ends: bool = True
    max_prompts: PositiveInt | None = None
    """None: every held-out problem. A subset is drawn by hash, the same each time."""
    samples_per_prompt: PositiveInt = 1
    temperature: PositiveFloat = 1.0


class RecordEvery(Schema):
    every: PositiveInt
    """Steps between recorded ones."""


def _one_of_three(value: Any) -> Any:
    # A union of text and block: pydantic would report what is wrong with it as either.
    if value in ("none", "all") or isinstance(value, RecordEvery) or (isinstance(value, dict) and value.keys() == {"every"}):
        return value
    raise ValueError("write `none`, `all` or `{every: N}`")


RecordBatches = Annotated[Literal["none", "all"] | RecordEvery, BeforeValidator(_one_of_three)]
"""Which steps' batches are kept in the run folder for ``tandem replay``."""
