"""What is checked before anything starts: the config against its models, its files, its nodes and this
machine.

Every problem that is found is reported at once, with the line that set its field. What is wrong with the
config by itself comes first: only a valid one can be compared with anything.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from configs.loader import Finding, ParsedConfig, load_config
from configs.schema import RunConfig, SftConfig
from configs.schema.launch import NodesConfig
from configs.schema.rollout import RolloutConfig
from configs.schema.task import TaskConfig
from launch.checks.device_memory import Device, device_of, gpus_here, memory_problems
from launch.checks.disk_space import disk_problems
from launch.checks.inputs import input_findings, unless
from launch.processes.placement import check_placement
from launch.processes.run_folder import RunFolder, check_can_be_made
from parallel.planning.layout import (
    check_critic_vocabulary,
    layout_problems,
    read_architecture,
    read_hf_config,
    validate_rollout_layout,
)
from parallel.planning.planner import static_share
from rollout.sampling.prompt_room import prompt_room
from rollout.servers.command import (
    check_flags_exist,
    check_has_kernels,
    check_quantization,
    check_server_args,
    choose_ports,
)

if TYPE_CHECKING:
    from rollout.tasks import Problem

TRAINING = ("serve", "sample", "learn")
EVALUATION = ("serve", "sample")
WARM_START = ("sft-rank",)
"""The roles that a command starts."""
LAST_PORT = 65535


LoadWith = Callable[[str, Sequence[str]], RunConfig]
"""(option of a command, the overrides that it stands for) -> the config with them, with all checks before a
start."""


class BadInput(Exception):
    """An argument that cannot be honoured; nothing was started. (What is wrong inside a config is a
    ConfigError.)"""


def load(
    parsed: ParsedConfig,
    kind: type,
    *,
    runs: Sequence[str] = (),
    gpu_memory: float | None = None,
    in_job: bool = False,
    instead_of_nodes: str | None = None,
) -> RunConfig | SftConfig:
    """The config, with everything checked that can be known before a process is started.

    runs: the roles to be started with it, whose devices and memory are checked too; with none, the caller
    sees to them. gpu_memory: GiB of each GPU, for planning what is to run on other machines: what this one
    has is then no matter. in_job: it is to run on a Slurm job's nodes, whose GPUs and ports are not those of
    this machine either. instead_of_nodes: of a command that starts its processes on this machine alone, what
    to do where the config has ``launch.nodes``.
    Raises ConfigError with every problem; BadInput for a config of another kind.
    """
    config = parsed.validated()
    if not isinstance(config, kind):
        (wanted,) = get_args(kind.model_fields["kind"].annotation)
        raise BadInput(
            f"{parsed.path}: kind: {config.kind} is a config for `tandem {config.kind}`; this command takes kind: {wanted}"
        )
    parsed, of_layout = _with_data_parallel_size(config, parsed)
    is_here = gpu_memory is None and not in_job and config.launch.nodes is None
    notes: list[str] = []

    def check(config: RunConfig | SftConfig) -> Iterator[Finding]:
        if instead_of_nodes is not None and config.launch.nodes is not None:
            yield "launch.nodes", f"this machine alone cannot run launch.nodes; {instead_of_nodes}"
        against_model = [*of_layout, *_of_models(config)]
        yield from against_model
        yield from input_findings(config, notes)
        yield from _of_run(config, runs) if isinstance(config, RunConfig) else _of_sft(config)
        if runs == EVALUATION and getattr(config.task, "heldout_path", "generated") is None:
            yield (
                "task.heldout_path",
                "task.heldout_path=null gives no held-out problems to evaluate on; name a file of them",
            )
        if isinstance(config, RunConfig):
            yield from _of_ports(config, is_here=is_here)
            if not of_layout:
                yield from (("launch.nodes", said) for said in check_placement(config))
        if runs and not of_layout:
            device = device_of(config, gpu_memory, in_job=in_job)
            yield from _of_devices(config, runs, device, is_here=is_here, fits_model=not against_model)
        if (
            is_here
            and not against_model
            and {"learn", "sft-rank"} & {*runs}
            and (config.model.path / "config.json").is_file()
        ):
            yield from disk_problems(config, notes)
        if gpu_memory is None and getattr(config, "resume", None) is None:
            yield from unless("launch.runs_dir", check_can_be_made, "launch.runs_dir", config.launch.runs_dir)

    config = parsed.validated(files=True, check=check, notes=notes)
    for note in notes:
        print(f"# {note}", flush=True)
    return config


# ----------------------------------------------------------------------------------------------------------
# layout.dp = auto


def _with_data_parallel_size(
    config: RunConfig | SftConfig, parsed: ParsedConfig
) -> tuple[ParsedConfig, list[Finding]]:
    """``parsed`` with a number in the place of ``layout.dp=auto``; without one where there is none, and
    why."""
    if config.layout.dp != "auto":
        return parsed, []
    nodes = config.launch.nodes if isinstance(config, RunConfig) else None
    try:
        layout = config.layout.resolved(_learner_gpus(config, nodes) or config.layout.smallest().world_size)
    except ValueError as error:
        return parsed, [("layout.dp", str(error))]
    return parsed.with_overrides([f"layout.dp={layout.dp}"]), []


def _learner_gpus(config: RunConfig | SftConfig, nodes: NodesConfig | None) -> int:
    """0 where everything runs on CPU."""
    if nodes is not None:
        return nodes.learner * nodes.gpus_per_node
    available, size = gpus_here(), config.layout.smallest().world_size
    beside = (
        config.rollout.replicas * config.rollout.tp
        if isinstance(config, RunConfig) and not _shares_gpus(config)
        else 0
    )
    free = available - beside
    return max(free - free % size, size) if available else 0


def _shares_gpus(config: RunConfig) -> bool:
    return config.launch.placement == "colocated"


# ---------------------------------------------------------------------------------------------------------
# models and layouts


def _of_models(config: RunConfig | SftConfig) -> Iterator[Finding]:
    """A model that is not there is among the missing files already."""
    if not (config.model.path / "config.json").is_file():
        return
    try:
        hf_config = read_hf_config(config.model.path)
        architecture = read_architecture(hf_config)
    except ValueError as error:
        yield "model.path", str(error)
        return
    wrong = layout_problems(architecture, config.layout)
    yield from (("layout", said) for said in wrong)
    if isinstance(config, RunConfig):
        yield from unless("rollout.tp", validate_rollout_layout, hf_config, config.rollout.tp)
        yield from unless("rollout.server_args", static_share, config)
        yield from unless("rollout.quantization", check_quantization, config.rollout, architecture.model_type)
        yield from unless(
            "rollout.max_new_tokens",
            partial(prompt_room, config, "training", max_positions=architecture.max_positions),
        )
        yield from _of_critic(config, hf_config, known=wrong)


def _of_critic(config: RunConfig, hf_config: dict[str, Any], known: Sequence[str]) -> Iterator[Finding]:
    if (
        config.critic is None
        or config.critic.model is None
        or not (config.critic.model.path / "config.json").is_file()
    ):
        return
    try:
        of_critic = read_hf_config(config.critic.model.path)
        wrong = layout_problems(read_architecture(of_critic), config.layout)
    except ValueError as error:
        yield "critic.model.path", str(error)
        return
    yield from (("layout", f"of critic.model: {said}") for said in wrong if said not in known)
    yield from unless("critic.model.path", check_critic_vocabulary, of_critic, hf_config)


# ----------------------------------------------------------------------------------------------------- files,
# rewards, servers


def _of_sft(config: SftConfig) -> Iterator[Finding]:
    if config.output.exists():
        yield "output", f"output: {config.output} exists already; name a new folder, or remove it first"
    else:
        yield from unless("output", check_can_be_made, "output", config.output)


def _of_run(config: RunConfig, runs: Sequence[str]) -> Iterator[Finding]:
    """Imports only what the config uses: the answer must come within seconds."""
    yield from _of_bounds(config)
    owned = [*unless("rollout.server_args", check_server_args, config.rollout)]
    yield from owned or unless("rollout.server_args", check_flags_exist, config.rollout)
    if config.rollout.router is not None and "sample" in runs:
        from rollout.servers.router import check_is_installed

        yield from unless("rollout.router", check_is_installed)
    if config.reward_type.type not in ("countdown", "gsm8k"):
        from rollout.rewards import check_reward

        field = "reward.function" if config.reward_type.type == "function" else "reward"
        yield from unless(
            field, check_reward, config.reward_type, partial(_first_problem, config.task), _tell
        )
    if config.resume is not None and config.resume.is_dir():
        yield from (("resume", said) for said in _of_resume(config, config.resume))


def _first_problem(task: TaskConfig) -> "Problem | None":
    """A problem to try a reward on; None where the task's file is missing or broken, which is told of it by
    itself."""
    from rollout.tasks import first_problem

    try:
        return first_problem(task)
    except (ValueError, OSError):
        return None


def _tell(text: str) -> None:
    """On the error stream: a dry run's own output is a config again."""
    print(f"# {text}", file=sys.stderr, flush=True)


def _of_bounds(config: RunConfig) -> Iterator[Finding]:
    """Where the two engines agree to the bit every ratio is 1: bounds without it would turn the correction
    against what is right."""
    weight = config.correction.weight
    of_agreement = "the ratio 1 of two engines that agree; use bounds on both sides of 1, such as [0.5, 2]"
    if weight.level != "none" and weight.bound != "none":
        lower, upper = weight.lower, weight.upper
        if lower is None and upper < 1:
            yield "correction.weight", f"correction.weight.upper={upper} lowers {of_agreement}"
        elif lower is not None and not lower <= 1 <= upper:
            side = "lower" if lower > 1 else "upper"
            yield (
                f"correction.weight.{side}",
                f"correction.weight: [{lower}, {upper}] leaves out {of_agreement}",
            )
    for number, rule in enumerate(config.correction.reject, start=1):
        if rule.rule == "ratio" and not rule.lower <= 1 <= rule.upper:
            bounds = f"[{rule.lower}, {rule.upper}] of rule {number}"
            yield "correction.reject", f"correction.reject: {bounds} leaves out {of_agreement}"


def _of_resume(config: RunConfig, resume: Path) -> Iterator[str]:
    """Whether the run can go on, and is the same run."""
    folder = RunFolder(resume)
    if not folder.config.is_file():
        yield f"resume: {resume} is not a run folder (it has no config.yaml); runs/latest is the newest run"
        return
    before = load_config(folder.config, [])
    if not isinstance(before, RunConfig):
        yield f"resume: {resume} is a run of kind {before.kind}, which leaves nothing to go on from; start anew without `resume`"
        return
    if folder.newest_checkpoint() is None:
        why = folder.why_no_checkpoint()
        yield f"resume: {resume} holds no complete checkpoint to go on from{why}; start anew without `resume`"
    elif config.critic is not None and not folder.has_critic_checkpoint():
        yield (
            f"resume: {resume} was trained without a critic, which advantage.type=gae needs; keep the run's own advantage, or start "
            "a new run from its exported model"
        )
    for part in ("seed", "model", "task"):
        if getattr(before, part) != getattr(config, part):
            yield (
                f"resume: `{part}` of {resume} is {getattr(before, part)!r}, but {getattr(config, part)!r} was given; "
                f"resume with `tandem train {resume}/config.yaml resume={resume}`, or start a new run"
            )


# -------------------------------------------------------------------------------------------------------
# ports and devices


def _of_ports(config: RunConfig, *, is_here: bool) -> Iterator[Finding]:
    """What is out of range shows anywhere; what is taken, on the machine that is to have it."""
    first, replicas = config.rollout.first_port, config.rollout.replicas
    if first is None:
        return
    if is_here:
        yield from unless("rollout.first_port", choose_ports, range(replicas), first)
    elif first + 2 * replicas - 1 > LAST_PORT:
        said = f"rollout.first_port={first} and rollout.replicas={replicas} need ports above {LAST_PORT}; choose a lower one"
        yield "rollout.first_port", said


def _of_devices(
    config: RunConfig | SftConfig, runs: Sequence[str], device: Device, *, is_here: bool, fits_model: bool
) -> Iterator[Finding]:
    if is_here:
        yield from _of_gpus(config, runs)
    if "serve" in runs:
        yield from unless(
            "rollout.quantization", partial(check_has_kernels, config.rollout, cuda=device.kind == "cuda")
        )
        if "learn" not in runs:
            yield from unless("rollout.quantization", check_served_as_saved, config, "eval")
    if fits_model and (config.model.path / "config.json").is_file():
        yield from memory_problems(config, device, runs)


def _of_gpus(config: RunConfig | SftConfig, runs: Sequence[str]) -> Iterator[Finding]:
    """Whether there are enough, where there are any."""
    available, ranks = gpus_here(), config.layout.world_size
    if not available:
        return
    if "serve" not in runs:
        yield from unless("layout", check_learner_gpus, ranks, available)
        return
    beside = ranks if "learn" in runs else 0
    if _shares_gpus(config) and beside:
        yield from unless("layout", check_learner_gpus, ranks, available)
        beside = 0
    yield from unless("rollout.replicas", check_server_gpus, config.rollout, beside, available)


def check_new_folder(argument: str, folder: Path) -> None:
    """Whether ``folder`` is not there yet and can be made. Raises BadInput."""
    if os.path.lexists(folder):
        raise BadInput(f"{argument}: {folder} exists already; name a new folder, or remove it first")
    try:
        check_can_be_made(argument, folder)
    except ValueError as error:
        raise BadInput(str(error)) from error


def check_server_gpus(servers: RolloutConfig, first_gpu: int, available: int) -> None:
    """Of servers on the GPUs from ``first_gpu`` on. Raises ValueError."""
    from rollout.servers.fleet import check_gpus

    check_gpus(servers, first_gpu=first_gpu, available=available)


def check_learner_gpus(needed: int, available: int) -> None:
    """Of a learner without servers beside it. Raises ValueError."""
    if needed > available:
        raise ValueError(
            f"the layout takes {needed} GPUs, but {available} are visible here; use a smaller one, or make more visible "
            "(CUDA_VISIBLE_DEVICES)"
        )


def check_served_as_saved(config: RunConfig, command: str) -> None:
    """For commands whose servers load the model from disk and are sent nothing. Raises ValueError."""
    if config.rollout.quantization == "fake_int8":
        raise ValueError(
            f"rollout.quantization=fake_int8: `tandem {command}` serves model.path as it stands, and only a learner that sends weights "
            "rounds them; set rollout.quantization=none"
        )
