"""Checks a config before anything starts: against its models, its files, its nodes and this machine.

All problems are reported at once, each with the line that set its field. Errors inside the config come first:
only a valid config is compared with the rest.
"""

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from configs.loader import Finding, ParsedConfig
from configs.schema import AnyConfig, RunConfig, SftConfig, kind_of
from configs.schema.environment import ChatEnvironment
from launch.checks.arguments import BadInput, check_new_folder, finding_of
from launch.checks.correction import check_bounds, gap_notes
from launch.checks.device_memory import memory_problems
from launch.checks.devices import Device, device_of, gpus_here
from launch.checks.disk_space import disk_problems
from launch.checks.inputs import input_findings
from launch.checks.model_files import check_tools_template
from launch.checks.models import check_models, has_model_configs
from launch.checks.resuming import resume_problems
from launch.processes.placement import check_placement
from launch.processes.run_folder import check_can_be_made
from parallel.planning.architecture import architecture_of
from parallel.planning.layout import check_served_on_cpu
from rollout.servers import served
from rollout.servers.ports import choose_ports
from trainer.tracking.publisher import missing_package, services_of

if TYPE_CHECKING:
    from rollout.tasks import Problem

TRAINING = ("serve", "sample", "learn")
EVALUATION = ("serve", "sample")
WARM_START = ("sft-rank",)
"""The roles that training, evaluation and a warm start consist of."""
LAST_PORT = 65535
LEAST_OPEN_FILES = 256
"""With 64 the first learner rank does not start."""
Config = TypeVar("Config", RunConfig, SftConfig)

LoadWith = Callable[[str, Sequence[str]], RunConfig]
"""(option of a command, the overrides that the option stands for) -> the checked config with these overrides."""


def load_checked(
    parsed: ParsedConfig,
    kind: type[Config],
    *,
    runs: Sequence[str] = (),
    gpu_memory: float | None = None,
    in_job: bool = False,
    instead_of_nodes: str | None = None,
) -> Config:
    """The config, after every check that is possible before a process is started.

    runs: the roles to start; their devices and memory are checked too. Empty if the caller checks them.
    gpu_memory: GiB of each GPU, for a run planned for other machines; this machine's devices are then ignored.
    in_job: the run is for a Slurm job's nodes; this machine's GPUs and ports are then ignored too.
    instead_of_nodes: for a command that starts every process on this machine: the fix for a config with
    ``launch.nodes``.
    Raises ConfigError with every problem; BadInput for a config of another kind.
    """
    config = parsed.validated()
    if not isinstance(config, kind):
        raise BadInput(
            f"{parsed.path}: kind: {config.kind} is a config for `tandem {config.kind}`; this command takes kind: {kind_of(kind)}"
        )
    is_here = gpu_memory is None and not in_job and config.launch.nodes is None
    trains, notes = "learn" in runs or "sft-rank" in runs, list[str]()
    if is_here and "learn" in runs:
        parsed = _with_placement(config, parsed, notes)
        config = parsed.validated()
    parsed, size_errors = _with_data_parallel_size(config, parsed)

    def check(config: AnyConfig) -> Iterator[Finding]:
        if instead_of_nodes is not None and config.launch.nodes is not None:
            yield "launch.nodes", f"one machine cannot run a config with launch.nodes; {instead_of_nodes}"
        model_errors = [*size_errors, *check_models(config, trains=trains)]
        yield from model_errors
        yield from input_findings(config, notes)
        notes.extend(gap_notes(config))
        if isinstance(config, RunConfig):
            yield from _check_run(config, runs)
            yield from check_services(config, runs)
            yield from _check_ports(config, is_here=is_here)
            if not size_errors:
                yield from (("launch.nodes", error) for error in check_placement(config))
        else:
            yield from finding_of("output", check_new_folder, "output", config.output)
        if runs and not size_errors:
            device = device_of(config, gpu_memory, in_job=in_job)
            yield from _check_devices(config, runs, device, is_here=is_here, fits_model=not model_errors)
        if is_here and trains and not model_errors and has_model_configs(config):
            yield from disk_problems(config, notes)
        if gpu_memory is None and getattr(config, "resume", None) is None:
            runs_dir = config.launch.runs_dir
            yield from finding_of("launch.runs_dir", check_can_be_made, "launch.runs_dir", runs_dir)

    config = parsed.validated(files=True, check=check, notes=notes)
    assert isinstance(config, kind)  # seen above
    for note in notes:
        print(f"# {note}", flush=True)
    return config


def check_services(config: RunConfig, runs: Sequence[str]) -> Iterator[Finding]:
    """Checks the packages of the services to which the learner copies its metrics."""
    for service in services_of(config) if "learn" in runs else ():
        if problem := missing_package(service):
            yield f"tracking.{service}", f"tracking.{service} {problem}, or leave it out"


# ----------------------------------------------------------------------------------------------------------
# launch.placement = auto, layout.dp = auto


def _with_placement(config: AnyConfig, parsed: ParsedConfig, notes: list[str]) -> ParsedConfig:
    """``parsed``, with ``launch.placement=colocated`` if this machine has too few GPUs for separate placement."""
    if not isinstance(config, RunConfig) or config.launch.placement != "auto" or config.rollout.max_staleness:
        return parsed
    available = gpus_here()
    needed = config.layout.smallest().world_size + config.rollout.replicas * config.rollout.tp
    if not 0 < available < needed:
        return parsed
    notes.append(
        f"launch.placement=colocated: learner and servers take turns on the same GPUs, since separate ones would need {needed} and "
        f"{available} {'is' if available == 1 else 'are'} visible"
    )
    return parsed.with_overrides(["launch.placement=colocated"], where="launch.placement=auto")


def _with_data_parallel_size(config: AnyConfig, parsed: ParsedConfig) -> tuple[ParsedConfig, list[Finding]]:
    """(``parsed`` with a number instead of ``layout.dp=auto``, errors). With errors ``parsed`` is unchanged."""
    if config.layout.dp != "auto":
        return parsed, []
    nodes, size = config.launch.nodes, config.layout.smallest().world_size
    if nodes is not None and isinstance(config, RunConfig):
        gpus = nodes.learner * nodes.gpus_per_node
    elif gpus := gpus_here():
        if isinstance(config, RunConfig) and not config.launch.takes_turns:
            gpus -= config.rollout.replicas * config.rollout.tp
        gpus = max(gpus - gpus % size, size)
    try:
        layout = config.layout.resolved(gpus or size)
    except ValueError as error:
        return parsed, [("layout.dp", str(error))]
    return parsed.with_overrides([f"layout.dp={layout.dp}"], where="layout.dp=auto"), []


# -------------------------------------------------------------------------------------------------------------
# files, rewards, servers


def _check_run(config: RunConfig, runs: Sequence[str]) -> Iterator[Finding]:
    """Imports only what the config uses: the answer must come within seconds."""
    yield from check_bounds(config)
    owned = [*finding_of("rollout.server_args", served.check_server_args, config.rollout)]
    yield from owned or finding_of("rollout.server_args", served.check_flags_exist, config.rollout)
    if config.rollout.router is not None and "sample" in runs:
        from rollout.servers.router import check_is_installed

        yield from finding_of("rollout.router", check_is_installed)
    if config.reward_type.type not in ("countdown", "gsm8k"):
        from rollout.rewards.scorer import check_reward

        field = "reward.function" if config.reward_type.type == "function" else "reward"
        example = partial(_example, config)
        yield from finding_of(field, check_reward, config.reward_type, example, _print_comment)
    if runs != EVALUATION:
        from launch.checks.own_parts import check_own_parts

        yield from check_own_parts(config, _print_comment, partial(_example_row, config))
    yield from _check_environment(config)
    if config.resume is not None and config.resume.is_dir():
        yield from (("resume", error) for error in resume_problems(config, config.resume, _print_comment))
    if runs == EVALUATION and getattr(config.task, "heldout_path", "generated") is None:
        error = "task.heldout_path=null gives no held-out problems to evaluate on"
        yield "task.heldout_path", f"{error}; name a file of them"


def _check_environment(config: RunConfig) -> Iterator[Finding]:
    environment = config.environment
    if environment.type == "agent":
        from rollout.environments.agent_template import check_agent

        yield from finding_of("environment.command", check_agent, environment, config.key_variables)
    elif environment.type == "openenv":
        from rollout.environments.openenv import check_openenv
        from rollout.environments.template_probes import EXAMPLE_TOOL

        yield from finding_of("environment", check_openenv, environment)
        if environment.interface == "tools" and environment.template == "chat":
            yield from check_tools_template(config, [EXAMPLE_TOOL])  # its own are known once a server is up
    elif environment.type != "single_turn":
        from rollout.environments.processes import check_environment

        try:
            ready = check_environment(environment, _print_comment, config.key_variables)
        except ValueError as error:
            yield "environment.environment", str(error)
            return
        if ready.tools and isinstance(environment, ChatEnvironment) and environment.template == "chat":
            yield from check_tools_template(config, ready.tools)


def _example(config: RunConfig, source: str | None = None) -> "Problem | None":
    """A problem to try a function on, one of the source if rewards go by sources. None if the task's file has none, or is
    missing or broken, which another check reports."""
    from rollout.tasks import first_problem

    reward = config.reward_type
    of = (reward.field, source) if source and reward.type == "by_field" else None
    try:
        return first_problem(config.task, of)
    except (ValueError, OSError):
        return None


def _example_row(config: RunConfig) -> "Mapping[str, Any] | None":
    problem = _example(config)
    return None if problem is None else problem.row


def _print_comment(text: str) -> None:
    """Prints on the error stream, since the output of a dry run can be used as a config."""
    print(f"# {text}", file=sys.stderr, flush=True)


# -------------------------------------------------------------------------------------------------------
# ports and devices


def _check_ports(config: RunConfig, *, is_here: bool) -> Iterator[Finding]:
    """Whether the ports are in range and, for a run on this machine, free."""
    first, replicas = config.rollout.first_port, config.rollout.replicas
    if first is None:
        return
    if is_here:
        yield from finding_of("rollout.first_port", choose_ports, range(replicas), first)
    elif first + 2 * replicas - 1 > LAST_PORT:
        error = f"rollout.first_port={first} and rollout.replicas={replicas} need ports above {LAST_PORT}"
        yield "rollout.first_port", f"{error}; choose a lower one"


def _check_devices(
    config: AnyConfig, runs: Sequence[str], device: Device, *, is_here: bool, fits_model: bool
) -> Iterator[Finding]:
    if is_here:
        yield from _check_gpus(config, runs)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and most < LEAST_OPEN_FILES:
            text = f"a process may have at most {most} open files here, and a run needs {LEAST_OPEN_FILES}"
            yield "launch", f"{text}; raise the hard limit (`ulimit -Hn`), or have the administrators do so"
        if "serve" in runs:
            yield from finding_of("rollout", served.check_temporary_folder)
    cuda = device.kind == "cuda"
    if isinstance(config, RunConfig) and "serve" in runs:
        rollout, model = config.rollout, config.model
        yield from finding_of("rollout.quantization", served.check_has_kernels, rollout, cuda=cuda)
        yield from finding_of("rollout.dtype", served.check_dtype_is_served, rollout, model.path, cuda=cuda)
        yield from finding_of("model.numerics", served.check_numerics_device, model, cuda=cuda)
        yield from finding_of("rollout.server_args", served.check_samples_by_seed, rollout, cuda=cuda)
        if "learn" not in runs:
            yield from finding_of("rollout.precision", check_served_as_saved, config, "eval")
    if fits_model and has_model_configs(config):
        yield from memory_problems(config, device, runs)
        if isinstance(config, RunConfig) and "serve" in runs:
            architecture = architecture_of(config.model.path)
            if not cuda:
                has_plugin = config.rollout.sglang_plugin
                yield from finding_of("rollout.sglang_plugin", check_served_on_cpu, architecture, has_plugin)
            field = "rollout.dtype" if config.rollout.dtype == "float32" else "rollout.server_args"
            of_model = (architecture.model_type, architecture.windows)
            yield from finding_of(
                field, served.check_windows_are_served, config.rollout, *of_model, cuda=cuda
            )


def _check_gpus(config: AnyConfig, runs: Sequence[str]) -> Iterator[Finding]:
    """Whether this machine has enough GPUs; a machine without any runs everything on CPU."""
    available, ranks = gpus_here(), config.layout.world_size
    if not available:
        return
    shares = config.launch.takes_turns and "learn" in runs
    if "serve" not in runs or shares:
        yield from finding_of("layout", check_learner_gpus, ranks, available)
    if isinstance(config, RunConfig) and "serve" in runs:
        first_gpu = ranks if "learn" in runs and not shares else 0
        yield from finding_of("rollout.replicas", served.check_gpus, config.rollout, first_gpu, available)


def check_learner_gpus(needed: int, available: int) -> None:
    """Check that a learner without servers beside it fits. Raises ValueError."""
    if needed > available:
        raise ValueError(
            f"the layout takes {needed} GPUs, but {available} are visible here; use a smaller one, or make more visible "
            "(CUDA_VISIBLE_DEVICES)"
        )


def check_served_as_saved(config: RunConfig, command: str) -> None:
    """For commands whose servers load the model from disk and receive no weights. Raises ValueError."""
    if config.rollout.precision is not None:
        raise ValueError(
            f"rollout.precision={config.rollout.precision}: `tandem {command}` serves model.path unchanged, since only a learner that "
            "sends weights rounds them; leave it out"
        )
