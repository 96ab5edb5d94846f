"""Where a run writes, what it tracks, and the limits of its processes."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from configs.schema.base import NonNegativeInt, PositiveFloat, PositiveInt, Schema


class NodesConfig(Schema):
    """On which nodes the roles run: the learner's first, then the servers'. The sample role is on the learner's first node."""

    learner: PositiveInt = 1
    rollout: PositiveInt = 1
    gpus_per_node: NonNegativeInt = 8
    """Of every node; 0: nodes without GPUs."""
    interface: str | None = None
    """Network interface by which the roles reach each other, on every node (also gloo's and NCCL's). None: the one that a node's host name
    stands for, or else that of the default route."""

    @property
    def total(self) -> int:
        return self.learner + self.rollout


class SlurmConfig(Schema):
    """What ``tandem slurm`` asks of Slurm. None: Slurm's own default."""

    time: str = Field(default="24:00:00", pattern=r"^(\d+-)?\d{1,3}(:\d{2}){1,2}$|^\d+-\d{1,2}$")
    """Limit of one start; the job is requeued before it and goes on."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_node: PositiveInt | None = None
    memory_per_node: str | None = Field(default=None, pattern=r"^\d+[KMGT]?$")
    container: str | None = None
    """Image of every job step (``srun --container-image``, of the pyxis plugin)."""
    container_mounts: str | None = None
    setup: tuple[str, ...] = ()
    """Shell lines that the batch script runs first, such as ``module load cuda``."""
    options: tuple[str, ...] = ()
    """Further ``#SBATCH`` options, such as ``--exclusive``."""
    notice_s: PositiveInt = 180
    """Seconds before the time limit at which the run is told to stop: to finish or drop its step, write a checkpoint and be requeued."""
    max_restarts: PositiveInt = 3
    """Starts after failures that brought no new checkpoint; then the job ends. Pre-emption and time limits are not counted."""


class LaunchConfig(Schema):
    runs_dir: Path = Path("runs")
    nodes: NodesConfig | None = None
    """None: every role on this machine, on its loopback address."""
    placement: Literal["separate", "colocated"] = "separate"
    """separate: learner and servers have GPUs of their own. colocated: they share them, each giving its memory back in the other's turn."""
    slurm: SlurmConfig = SlurmConfig()
    threads_per_process: PositiveInt = 1
    """OMP threads of every process on CPU: several processes with several threads each stall 10-40 times."""
    start_timeout_s: PositiveFloat = 900.0
    """For all roles to report that they are ready."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Of torch.distributed and of the weight broadcast; ranks wait in a collective while rank 0 waits for samples."""
    stop_grace_s: PositiveFloat = 10.0
    """Between SIGTERM and SIGKILL to a role's process group."""
    stop_timeout_s: PositiveFloat = 600.0
    """From a request to stop (SIGTERM or SIGUSR1 to ``tandem train``) to the learner's end, its checkpoint written; then all are ended."""

    @model_validator(mode="after")
    def _colocated_on_the_same_nodes(self):
        if self.placement == "colocated" and self.nodes is not None:
            raise ValueError(
                "placement=colocated shares the GPUs of one machine, but nodes gives learner and servers nodes of their own; remove one"
            )
        return self


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
