"""Where a run writes, what it tracks, and the limits of its processes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from pydantic import AfterValidator, BeforeValidator, Field

from configs.errors import Contradiction
from configs.schema.base import (
    Count,
    GivenPath,
    NonNegativeInt,
    PositiveInt,
    Schema,
    Seconds,
    Siblings,
    Temperature,
    Tokens,
    address_of,
    at_most,
    without_credentials,
)
from configs.schema.rollout import RolloutConfig


class NodesConfig(Schema):
    """The nodes of the roles: the learner's first, then the servers'. With ``launch.placement: colocated`` both
    have the same nodes. The sample role is on the learner's first node."""

    learner: Count = 1
    """Nodes of the learner."""
    rollout: Count = 1
    """Nodes of the servers."""
    gpus_per_node: NonNegativeInt = 8
    """GPUs of every node; 0 for nodes without GPUs."""
    interface: str | None = None
    """Network interface by which the roles reach each other, on every node (also gloo's and NCCL's). None: the
    interface with the address of the node's host name, or else that of the default route."""


# What could end or change an `#SBATCH` line is refused: spaces, quotes, comments and line ends.
OneWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9._,:@+/-]+$")]
Option = Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[A-Za-z0-9._,:@+/=*\[\]()&|-]+)?$")]
_SLURM_TIME = r"^([0-9]{1,3}(:[0-5][0-9]){2}|[0-9]+-([01]?[0-9]|2[0-3])(:[0-5][0-9]){0,2})$"
"""Slurm reads more forms, but reads the first of two numbers as minutes."""


class SlurmConfig(Schema):
    """The request of ``tandem slurm`` to Slurm. None: Slurm's own default."""

    time: str = Field(default="24:00:00", pattern=_SLURM_TIME)
    """Time limit of one start, as ``hours:minutes:seconds`` or ``days-hours``. The job is requeued before the
    limit and continues."""
    partition: OneWord | None = None
    """``--partition``"""
    account: OneWord | None = None
    """``--account``"""
    qos: OneWord | None = None
    """``--qos``"""
    gpus: NonNegativeInt | None = None
    """GPUs of the node, for a run without ``launch.nodes``; 0 for a node without GPUs. None: one for each
    process of learner and servers."""
    gpu_type: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_.-]+$")
    """Type of the nodes' GPUs, if a cluster has several types, such as ``h100``, as ``sinfo -o %G`` names
    it."""
    cpus_per_node: PositiveInt | None = None
    """CPU cores of each node."""
    memory_per_node: str | None = Field(default=None, pattern=r"^\d+[KMGT]?$")
    """Memory of each node, such as ``500G``."""
    container: str | None = Field(default=None, pattern=r"^\S+$")
    """Image of every job step: a name or a file that the runtime reads. None: steps run without a
    container."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """The program that runs the image. pyxis: Slurm's plugin for enroot (``srun --container-image``).
    apptainer: ``srun apptainer exec``, with ``--nv`` on nodes with GPUs."""
    container_mounts: str | None = Field(default=None, pattern=r"^\S+$")
    """Folders of the nodes inside the container, such as ``/data:/data,/shared:/shared``. The folder that the command is
    started in, ``runs_dir``, model and data must be among them under the same paths, unless the site mounts them anyway."""
    container_python: str | None = Field(default=None, pattern=r"^/\S+$")
    """The interpreter inside the image that has Tandem, such as ``/opt/tandem/.venv/bin/python`` of
    ``launch/containers``. None: the one that ``tandem slurm`` was called with, whose folder must then be mounted."""
    setup: tuple[str, ...] = ()
    """Shell lines that the batch script runs first, such as ``module load cuda``."""
    options: tuple[Option, ...] = ()
    """Further ``#SBATCH`` options, such as ``--exclusive``."""
    notice_s: PositiveInt = 180
    """Seconds before the time limit at which the run gets the request to stop. It then finishes or drops its step,
    writes a checkpoint and is requeued."""
    max_restarts: PositiveInt = 3
    """Most starts after failures that brought no new checkpoint; then the job ends. Reaching the time limit
    without a checkpoint, because of a short notice or a long start, counts as a failure. Pre-emption does
    not."""

    def _contradictions(self) -> Iterator[Contradiction]:
        for name in ("container_python", "container_mounts"):
            if self.container is None and getattr(self, name) is not None:
                yield Contradiction(
                    (name,),
                    f"{name}={getattr(self, name)} needs a container, but launch.slurm.container names none",
                    f"set launch.slurm.container, or leave {name} out",
                )


class LaunchConfig(Schema):
    """Where a run writes, where its processes run, and their deadlines."""

    # Not validated: the default is a Path, and in strict mode pydantic takes only text from JSON.
    runs_dir: GivenPath = Field(default=Path("runs"), validate_default=False)
    """Run folders are made in it; a relative path starts at the folder that the command is started in."""
    nodes: NodesConfig | None = None
    """None: every role on this machine, on its loopback address."""
    placement: Literal["auto", "separate", "colocated"] = "auto"
    """separate: learner and servers have their own GPUs. colocated: they share GPUs, and each side frees its
    memory during the other's turn. Each of ``launch.nodes`` then has both sides. auto: colocated if one
    machine has too few GPUs for separate placement, such as a single GPU. auto is separate otherwise, also
    with ``launch.nodes``, on CPU, and if ``rollout.max_staleness`` makes both sides work at once."""
    slurm: SlurmConfig = SlurmConfig()
    threads_per_process: Count = 1
    """OMP threads of every process on CPU. Several processes with several threads each are 10-40 times
    slower."""
    start_timeout_s: Seconds = 900.0
    """Deadline for all roles to report that they are ready."""
    collective_timeout_s: Seconds = 1800.0
    """Timeout of torch.distributed and of the weight broadcast. Ranks wait in a collective while rank 0 waits
    for samples."""
    peer_timeout_s: Seconds = 60.0
    """A host that answers nothing for this long, not even its kernel's probes, is given up. Shorter network
    outages are survived. Work on a host that answers has longer limits (collective_timeout_s,
    rollout.request_timeout_s)."""
    heartbeat_timeout_s: Seconds = 40.0
    """A process that the kernel reports as stopped (SIGSTOP) for this long counts as dead and is killed; the
    check runs every 10 s. If a process is slow or a node is silent for this long, the console reports it, and
    nothing is ended."""
    stop_grace_s: Seconds = 10.0
    """Time between SIGTERM and SIGKILL to a role's process group."""
    stop_timeout_s: Seconds = 600.0
    """Time for the learner to write its checkpoint and exit after a request to stop (SIGTERM or SIGUSR1 to
    ``tandem train``). Then all processes are ended."""

    def _contradictions(self) -> Iterator[Contradiction]:
        nodes = self.nodes
        if self.takes_turns and nodes is not None and nodes.learner != nodes.rollout:
            yield Contradiction(
                ("placement", "nodes"),
                f"placement=colocated has learner and servers on the same nodes, but nodes.learner={nodes.learner} "
                f"and nodes.rollout={nodes.rollout}",
                "set both to the same number, or placement=separate",
            )

    @property
    def takes_turns(self) -> bool:
        """Whether learner and servers share GPUs. auto is decided at the start of the run, by the GPUs of the
        machine."""
        return self.placement == "colocated"

    def copies_by_node(self, rollout: RolloutConfig, *, stages: int, replicas: int, nodes: int) -> bool:
        """Whether the servers of each of several nodes may copy the weights out of a learner's process on the same node: both
        sides share the nodes, the one pipeline stage gathers the whole model on every rank, and each node has whole servers."""
        may_copy = rollout.sglang_plugin and rollout.weight_transfer != "broadcast"
        return self.takes_turns and may_copy and stages == 1 and replicas >= nodes

    @property
    def patience_s(self) -> float:
        """Time that the learner waits for the rollout side. It is shorter than the timeout of the ranks that
        meanwhile wait in a collective, so that they get the error of the rollout side."""
        return 0.9 * self.collective_timeout_s


class TraceConfig(Schema):
    """The traced steps: in them every role records where its time goes, for ``tandem trace`` and the
    report."""

    steps: Annotated[NonNegativeInt, at_most(1000, "the files would be larger than anyone can look at")] = 0
    """Number of steps, from ``first`` on; 0: none, and tracing costs nothing. A step takes about 150 bytes per span: per
    request, reward and micro-batch."""
    first: PositiveInt = 2
    """The first traced step. Step 1 of a run also warms up caches and buffers."""
    profile_rank: NonNegativeInt | None = None
    """The learner rank on which torch's profiler also records these steps, each into its own Chrome trace.
    The profiler slows the steps, and takes memory for each operation. None: no rank."""

    @property
    def end(self) -> int:
        """The step after the last traced one."""
        return self.first + self.steps

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.profile_rank is not None and not self.steps:
            yield Contradiction(
                ("profile_rank", "steps"),
                f"profile_rank={self.profile_rank} profiles the traced steps, but steps=0 traces none",
                "set steps=1, or remove profile_rank",
            )


def _without_password(uri: str | None) -> str | None:
    address = address_of(without_credentials(uri)) if uri else None
    # urlsplit ends the address at a slash, which the password of a database may hold. A port is not a
    # password.
    in_address = re.search(r"//[^/\s:@]*:(?!\d+/)\S+@", uri or "")
    if address and (in_address or "password" in parse_qs(address.query)):
        error = f"the URI of {address.hostname} holds a password, which would stay readable in the run folder"
        raise ValueError(f"{error}; leave uri out, and set MLFLOW_TRACKING_URI where the run is started")
    return uri


class WandbConfig(Schema):
    """A copy of the metrics at Weights & Biases, in a run with the run folder's name. It needs the package
    wandb. The key is that of ``wandb login`` or of WANDB_API_KEY. With WANDB_MODE=offline the copy waits in
    the run folder for ``wandb sync``."""

    project: str | None = None
    """None: ``tracking.experiment``."""
    entity: str | None = None
    """Team or user; None: the default of the account."""


class TrackingConfig(Schema):
    """Where the run is recorded besides its folder, how many samples are kept for inspection, and which steps
    are traced."""

    experiment: str = "tandem"
    """Name of the MLflow experiment, in which runs can be compared."""
    uri: Annotated[str | None, AfterValidator(_without_password)] = None
    """MLflow tracking URI, without a password. None: MLFLOW_TRACKING_URI if set, else the sqlite store
    ``launch.runs_dir``/mlflow.db of all runs there. On a network file system, whose locks sqlite cannot
    trust, each run folder has its own store."""
    wandb: WandbConfig | None = None
    """Also copy the metrics to Weights & Biases. None: no. ``tandem publish RUN --to wandb`` does it at any time."""
    tensorboard: bool = False
    """Whether the metrics are also written as TensorBoard's event files, into RUN/tensorboard. It needs the package tensorboard."""
    sample_groups: NonNegativeInt = 2
    """Groups of each step whose samples are kept in the run folder, for ``tandem samples`` and the report; 0: none.
    About 25 bytes per sampled token."""
    evaluation_problems: NonNegativeInt = 2
    """Held-out problems, the first of each set, whose samples each evaluation keeps, for ``tandem samples --evaluation``; 0: none.
    They are the same problems each time."""
    trace: TraceConfig = TraceConfig()


class EvaluationConfig(Schema):
    """When and how held-out problems are answered. ``eval/accuracy`` is the share of right responses. A
    response is right if its reward (of a weighted reward: its deciding part) is at least 1, or if the
    environment says so. ``eval/reward_mean`` is for rewards other than 0 and 1."""

    every: NonNegativeInt = 0
    """Steps between evaluations on held-out problems; 0: only before the first and after the last step."""
    at_ends: bool = True
    """Evaluate before the first and after the last step."""
    max_prompts: PositiveInt | None = None
    """None: every held-out problem. A subset is drawn by hash, the same each time."""
    samples_per_prompt: Siblings = 1
    """Responses sampled for each held-out problem. With 2 or more, ``eval/pass_at/K`` estimates the share of problems
    of which K samples hold a right one, for K = 2, 4, 8, … and this number."""
    greedy: bool = False
    """Whether each problem also gets one answer at temperature 0, recorded separately as
    ``eval/greedy/accuracy``."""
    temperature: Temperature = 1.0
    """Temperature of the softmax that evaluations sample from; independent of ``rollout.temperature``."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Evaluations sample from the fewest ids whose probabilities sum to top_p; independent of ``rollout.top_p``."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Evaluations sample from the top_k likeliest ids; independent of ``rollout.top_k``. -1: all. With both limits, top_p
    counts probabilities among all ids."""
    max_new_tokens: Tokens | None = None
    """Most tokens of a response to a held-out problem. It may be more than the learner packs, since nothing is trained on.
    In an environment it is of a turn, and ``environment.max_tokens`` limits the episode as in training. None:
    ``rollout.max_new_tokens``, which a penalty for length counts from in any case."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.top_k == 0:
            fix = "set top_k to -1 for all ids, or to 1 or more"
            yield Contradiction(("top_k",), "top_k=0 leaves no id to sample from", fix)

    def is_due(self, step: int, steps: int) -> bool:
        """Whether an evaluation follows this step of ``steps`` steps."""
        return bool(self.every and step % self.every == 0) or (self.at_ends and step == steps)

    def number_after(self, step: int, steps: int) -> int:
        """The number of evaluations after later steps."""
        periodic = steps // self.every - step // self.every if self.every else 0
        is_last_apart = self.at_ends and step < steps and not (self.every and steps % self.every == 0)
        return max(periodic, 0) + is_last_apart


class RecordEvery(Schema):
    """Some of the steps, at equal distances."""

    every: PositiveInt
    """Steps between recorded ones."""


def _one_of_three(value: Any) -> Any:
    # A union of text and block: pydantic would report errors of both members.
    if isinstance(value, dict):
        return RecordEvery.model_validate(value, strict=True)
    if value in ("none", "all") or isinstance(value, RecordEvery):
        return value
    raise ValueError("not one of the choices; write `none`, `all` or `{every: N}`")


RecordBatches = Annotated[Literal["none", "all"] | RecordEvery, BeforeValidator(_one_of_three)]
"""Which steps' batches are kept in the run folder for ``tandem replay``."""
