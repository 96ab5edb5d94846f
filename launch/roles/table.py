"""The roles, each as a function of a run folder: serve (SGLang), sample (groups), learn (Megatron ranks, under
torchrun); and the process of one.

Roles find each other through ``RUN/roles/*.json``. Each can be started by itself, on any node that sees the run
folder.
"""

import os
import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import AnyConfig, RunConfig, SftConfig
from configs.schema.layout import ONE_PROCESS, LayoutConfig
from launch.processes.addresses import role_environment
from launch.processes.heartbeat import Pulse, stopped_note
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder, write_json
from launch.processes.supervisor import end_with_parent, exit_now
from launch.processes.unheard import go_on_unheard
from launch.roles.command_line import IN_JOB, MEGATRON_ROLES
from launch.roles.learn import learn
from launch.roles.sample import sample
from launch.roles.serve import serve, serving_node
from launch.roles.start import config_of
from launch.selftest.ranks import run_part
from launch.studies.mismatch import draw, score
from launch.studies.replay import answer_request
from launch.studies.verify_sync import send_other_weights
from parallel.checkpoints.files import step_folder, step_folders, step_of
from rollout.servers.watched_process import guard_session
from tracing import Recorder, install
from trainer.file_system import read_required

if TYPE_CHECKING:
    from parallel.engine import MegatronEngine

INTERRUPTED = 130
MOST_OPEN_FILES = 65_536


@contextmanager
def process_group(config: AnyConfig) -> Iterator[None]:
    """While entered, the ranks of a role are one group, which they leave together. ``learn`` makes its own group: it must
    receive requests to stop before it joins."""
    import torch.distributed as dist

    from parallel.megatron.platform import init_distributed

    init_distributed(timeout_s=config.launch.collective_timeout_s)
    yield
    dist.barrier()
    dist.destroy_process_group()


def supervised(folder: RunFolder, config: SftConfig) -> None:
    """One Megatron rank of a warm start."""
    from trainer.sft import train_sft

    train_sft(config, report=lambda line: print(line, flush=True))


def export(folder: RunFolder, config: RunConfig) -> None:
    """Export the newest checkpoint of a run, or the one that the command requests, into its ``export/`` folder, and its
    adapters into ``export-adapter/``. The request then names the step. One process does this for a checkpoint of any layout."""
    from trainer.learner import Learner

    learner = Learner.of_policy_alone(config.model_copy(update={"layout": ONE_PROCESS}))
    step = read_required(folder.export_request)["step"]
    if step is None:
        write_json(folder.export_request, {"step": load_newest(folder, learner.engine)})
    else:
        learner.engine.load(step_folder(folder.checkpoints, step))
    learner.save_hf(folder.export)
    learner.save_adapter(folder.exported_adapter)


def load_newest(folder: RunFolder, engine: "MegatronEngine") -> int | None:
    """Load the newest complete checkpoint and return its step. An active run may remove it meanwhile: it then has a newer
    one."""
    from parallel.checkpoints.checkpoint import CheckpointError, newest_whole

    while True:
        steps, problem, damaged = step_folders(folder.checkpoints), None, {}
        try:
            (whole,), damaged = newest_whole([step] for step in reversed(steps.values()))
            engine.load(whole)
        except CheckpointError as error:
            problem = error
        if (problem or damaged) and max(step_folders(folder.checkpoints), default=0) > max(steps, default=0):
            continue
        if problem:
            raise problem
        for wrong in damaged.values():
            print(f"checkpoint {wrong}; exporting {whole.folder.name} instead", flush=True)
        return step_of(whole.folder)


BESIDE_A_RUN = ("export-rank", "replay-rank")
"""Roles of a command on the folder of a run that may still be active. They have no beat: `tandem status` and `tandem stop` would
take it for a sign of life of the run."""
SIDES = ("serve", "sample", "learn")
"""The roles of a training run, which may be on different nodes."""
ROLES = {
    "serve": serve,
    "sample": sample,
    "learn": learn,
    "sft-rank": supervised,
    "export-rank": export,
    "replay-rank": answer_request,
    "verify-rank": send_other_weights,
    "mismatch-draw": draw,
    "score-rank": score,
    "selftest-rank": run_part,
}


def run_role(name: str, folder: RunFolder, node: int | None = None) -> None:
    """Run one role in this process. Its end, good or bad, is the end of the process.

    node: number of the servers' node, for the serve role. Raises ValueError, before anything is started, for a run
    of another kind, for a node that does not exist, or if the other hosts cannot reach this one.
    """
    go_on_unheard()
    run, label = ROLES[name], name
    config = config_of(folder, SftConfig) if name == "sft-rank" else config_of(folder, RunConfig)
    os.environ.update(role_environment(config.launch.nodes if name in SIDES else None))
    allow_open_files()
    if name == "serve" and isinstance(config, RunConfig):
        node = serving_node(config, node)
        run, label = partial(serve, node=node), serve_roles(config)[node]
    limit_s, is_megatron = config.launch.heartbeat_timeout_s, name in MEGATRON_ROLES
    is_rank = is_megatron and name not in BESIDE_A_RUN
    beat = f"rank-{os.environ.get('RANK', '0')}" if is_rank else label
    if is_megatron:
        os.environ.update(rank_environment(config.layout))
    else:
        folder.forget(label)
    _tie_to_run(stopped_note(folder, beat), limit_s, is_megatron=is_megatron)
    if isinstance(config, RunConfig) and name in ("sample", "learn"):
        install(recorder_of(folder, config, beat))
    try:
        is_grouped = is_megatron and name != "learn"
        with (
            nullcontext() if name in BESIDE_A_RUN else Pulse(folder, beat, timeout_s=limit_s) as pulse,
            process_group(config) if is_grouped else nullcontext(),
        ):
            if pulse is not None and name in SIDES:
                run = partial(run, doing=pulse.doing)
            run(folder, config)
    except BaseException as error:
        # Ignore SIGTERM (of a peer's failure) during shutdown, whatever else fails (a full disk).
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            if isinstance(error, Exception):
                folder.report_error(label, error)
                traceback.print_exc()
        finally:
            exit_now(1 if isinstance(error, Exception) else INTERRUPTED)


def _tie_to_run(note: Path, timeout_s: float, *, is_megatron: bool) -> None:
    """Make this process end with those that started it, and not before."""
    note.parent.mkdir(exist_ok=True)
    note.unlink(missing_ok=True)
    guard_session(timeout_s=timeout_s, note=note)
    if is_megatron:
        # torchrun puts ranks into sessions of their own, so that they would survive if it were killed.
        end_with_parent(signal.SIGKILL)
    elif IN_JOB in os.environ:
        # Slurm sends SIGTERM to everything at once, while the learner still needs this role to finish its step. The job's
        # supervisor ends it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def allow_open_files() -> None:
    """Raise this process's limit of open files, which is often 1024, as far as allowed: each connection of a server, an agent
    or a peer is an open file. The limit stays at most ``MOST_OPEN_FILES``: programs that close every possible file number
    take minutes if a billion are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def rank_environment(layout: LayoutConfig) -> dict[str, str]:
    """With one queue a GPU starts kernels in the order of the calls. Megatron-Core 0.16.1 requires this, for speed only, if
    collectives of tensor parallelism, with or without sequence parallelism, overlap with matrix products. A value that is
    already set is kept."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    return {name: "1"} if layout.tp > 1 and name not in os.environ else {}


def recorder_of(folder: RunFolder, config: RunConfig, who: str) -> Recorder | None:
    """None if no step is traced. The sample role traces from one step earlier than the learner, since samples of the first
    traced step may already be in progress then (``rollout.max_staleness``)."""
    trace = config.tracking.trace
    window = range(trace.first - (who == "sample"), trace.end)
    return Recorder(folder.trace, who, window) if trace.steps else None
