"""The learn role: one Megatron rank, from its construction to its export. ``trainer/loop.py`` trains in between."""

import contextlib
import gc
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import RunConfig
from launch.processes.addresses import own_address
from launch.processes.imports import imported_for_good
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder, read_lives, wait_for_servers
from launch.processes.stopping import StopListener, Stopped, report_stopped
from launch.processes.supervisor import exit_now
from parallel.checkpoints.files import put_back, remove_leftovers
from rollout.terminal_text import tandem_command
from trainer.tracking.samples import forget_samples_after

if TYPE_CHECKING:
    from rollout.sampling.remote import RemoteSampler
    from rollout.servers.control import SGLangControl
    from trainer.learner import Learner
    from trainer.loop import Run
    from trainer.recording import Recorder
    from trainer.tracking.ledger import Ledger
    from trainer.tracking.tracker import Tracker
    from trainer.weight_sync import ControlOf

START_PROBE_TEMPERATURE = 0.7
"""Not 1: a server whose log-probs ignore the temperature would agree at 1."""


def learn(folder: RunFolder, config: RunConfig, doing: Callable[[str], None]) -> None:
    """Run one Megatron rank: build everything, train, export. torchrun sets RANK, WORLD_SIZE and MASTER_ADDR."""
    began = time.perf_counter()
    with imported_for_good():
        import torch.distributed as dist

        import trainer.loop  # noqa: F401 (imports nearly all that a rank needs)
        from trainer.ranks.interruption import INTERRUPTIONS, StopRequested
    rank = int(os.environ.get("RANK", "0"))
    listener = StopListener(folder, is_first_rank=rank == 0)
    run = build_run(folder, config, stop_requested=listener.reason, doing=doing)
    if run.learner.is_first_rank:
        folder.announce("learn", {"pid": os.getpid(), "host": socket.gethostname()})
    # Objects of the start-up live as long as the run: each collection would spend a tenth of a second on them.
    gc.freeze()
    try:
        _train_and_export(run, folder, began)
    except INTERRUPTIONS as interruption:
        is_stop = isinstance(interruption, StopRequested)
        if is_stop and run.learner.is_first_rank:
            report_stopped(folder, Stopped(step=run.checkpointer.complete, reason=str(interruption)))
        # Wait until the first rank has closed its tracker: torchrun ends the others as soon as one has failed.
        dist.barrier()
        if is_stop:
            # The supervisor ends the sample role, which may still be making samples that nobody needs.
            exit_now(0)
        raise
    end_run(run)


def _train_and_export(run: "Run", folder: RunFolder, began: float) -> None:
    from trainer.loop import evaluate_before, saved_where_interrupted, train

    # On exit the tracker records FINISHED, FAILED or KILLED.
    ledger = contextlib.nullcontext() if run.ledger is None else contextlib.closing(run.ledger)
    with ledger, run.tracker or contextlib.nullcontext():
        with saved_where_interrupted(run):
            run.doing("comparing the engines")
            compare_engines(run)
            started = time.perf_counter()
            evaluate_before(run)
            train(run)
            run.weight_sync.prove(run.config.rollout.temperature)
            run.devices.give_to_learner()
            run.doing("export")
        trained = time.perf_counter()
        # Requests to stop end only a wait for space from here on: the rest ends the run too.
        export(run, folder, start_up_s=started - began, training_s=trained - started)


def export(run: "Run", folder: RunFolder, *, start_up_s: float, training_s: float) -> None:
    """Write what a run is made for: model and adapter, and on the first rank summary and report."""
    from launch.roles.summary import write_summary
    from trainer.loop import tell_once
    from trainer.waiting_for_space import save_when_there_is_space

    tracker = run.tracker
    if tracker is not None:
        tracker.say("all steps are done; writing the model and the report")
    tell_once(run, "last checkpoint", run.checkpointer.save_before_export(run.learner, run.sampler))
    if tracker is not None:
        if (save_s := run.checkpointer.last_save_s) is not None:  # no further step has it in its line
            tracker.say(f"the last checkpoint took {save_s:.1f} s")
        # An earlier summary of the run. A kill before the new one is written must not leave the new model with old steps.
        folder.summary.unlink(missing_ok=True)
    for save, target in ((run.learner.save_hf, folder.hf), (run.learner.save_adapter, folder.adapter)):
        say = partial(tell_once, run, target.name)
        save_when_there_is_space(save, target, say, stop_requested=run.sampler.stop_requested)
    if tracker is not None:
        training_s += tracker.elapsed_before_s
        seconds = {"start_up": start_up_s, "training": training_s}
        write_summary(folder, seconds=seconds, max_failed=run.config.alarms.reward_failed_max)
        for artifact in (*written_report(folder, run.config, tracker), folder.summary):
            tracker.artifact(artifact)


def build_run(
    folder: RunFolder,
    config: RunConfig,
    *,
    stop_requested: Callable[[], str | None],
    doing: Callable[[str], None],
) -> "Run":
    """Build the parts of ``train`` on this rank, resumed if the run folder has a checkpoint. The first rank also removes what
    an earlier attempt has left beyond it."""
    from parallel.megatron.platform import init_distributed
    from rollout.servers.control import SGLangControl
    from trainer.checkpointing import Checkpointer
    from trainer.engine_agreement import EngineAgreement
    from trainer.loop import Run
    from trainer.recording import Recorder
    from trainer.sample_keeping import SampleKeeper
    from trainer.sampling import SharedSampler
    from trainer.tracking.ledger import Ledger
    from trainer.tracking.tracker import Tracker
    from trainer.turns import OwnDevices, SharedDevices
    from trainer.weight_sync import WeightSync

    init_distributed(timeout_s=config.launch.collective_timeout_s)
    control_of = partial(
        SGLangControl, config.rollout, config.launch, key=folder.run_key(), needs_experts=config.learner.routing == "rollout"
    )  # fmt: skip
    learner, remote, control = learner_and_rollout(folder, config, control_of)
    turns = SharedDevices(learner, control) if config.launch.takes_turns else OwnDevices()
    address = own_address(config.launch.nodes)
    agreement = EngineAgreement.of(
        config.rollout, learner.engine.dtype, is_aligned=config.model.numerics == "aligned", compares_samples=config.compares_samples
    )  # fmt: skip
    weight_sync = WeightSync(
        learner, control, config.rollout, config.launch, agreement=agreement, address=address, turns=turns, control_of=control_of,
        lives=partial(server_lives, folder, serve_roles(config)) if config.servers_may_restart else None,
        stop_requested=stop_requested,
    )  # fmt: skip
    sampler = SharedSampler(
        remote,
        stop_requested,
        weights=weight_sync if config.servers_may_restart else None,
        role_start_s=min(config.launch.start_timeout_s, config.launch.patience_s),
        say=partial(print, flush=True),
    )
    max_failed = config.alarms.reward_failed_max
    checkpointer = Checkpointer(folder.checkpoints, config.checkpoint, turns, max_failed=max_failed)
    progress = checkpointer.restore(learner, sampler)
    resumed_from = progress.step if progress else None
    recorder = Recorder(folder.batches, config.record_batches, config.correction)
    tracker = ledger = None
    if learner.is_first_rank:
        forget_lost_steps(folder, recorder, resumed_from)
        forget_trace(folder, config, resumed_from)
        checkpointer.notices += put_older_model_aside(folder, config, resumed_from)
        # The tracker comes last: an error after it is open would leave it open.
        tracker = Tracker(config, folder.path, resumed_from_step=resumed_from)
        ledger = Ledger(folder.ledger, keep_until=resumed_from or 0)
        for notice in checkpointer.notices:
            tracker.note(notice)
        warn_of_lost_lines(tracker, ledger, resumed_from or 0)
    return Run(
        config=config, learner=learner, sampler=sampler, weight_sync=weight_sync, checkpointer=checkpointer, recorder=recorder,
        samples=SampleKeeper(folder.samples, config, tracker), tracker=tracker, ledger=ledger, devices=turns,
        first_step=1 if resumed_from is None else resumed_from + 1,
        evaluation_owed=progress is not None and progress.evaluation_owed,
        doing=doing, profiled=step_profiler(folder, config, learner.groups.rank),
    )  # fmt: skip


def step_profiler(
    folder: RunFolder, config: RunConfig, rank: int
) -> Callable[[int], contextlib.AbstractContextManager[object]]:
    """What each traced step of this rank runs in: torch's profiler, on the rank that the config names."""
    if rank != config.tracking.trace.profile_rank:
        return lambda step: contextlib.nullcontext()
    from trainer.profiling import profiled

    return partial(profiled, folder.path, rank)


def forget_lost_steps(folder: RunFolder, recorder: "Recorder", resumed_from: int | None) -> None:
    """Remove the records of steps that will be done again, and interrupted writes of an earlier attempt, each as large
    as the model.

    A supervisor may not have cleared the folder. No other learner writes there."""
    for checkpoints in (folder.checkpoints, folder.critic_checkpoints):
        remove_leftovers(checkpoints, "step_*")
    for exported in (folder.hf, folder.adapter):
        put_back(exported)
        remove_leftovers(folder.path, exported.name)
    recorder.forget_after(resumed_from or 0)
    forget_samples_after(folder.samples, resumed_from or 0)
    if resumed_from is None:
        folder.put_metrics_aside()


def warn_of_lost_lines(tracker: "Tracker", ledger: "Ledger", resumed_from: int) -> None:
    """Warn if the records lack the step that the run continues from: only its checkpoint is needed to continue."""
    lacks = f"has no line of step {resumed_from}, from which the run continues"
    if tracker.last_step < resumed_from:
        lost = "report and summary use only the lines that it has"
        tracker.warn_once("lost metrics", f"metrics.jsonl {lacks}: {lost}")
    if ledger.last_step < resumed_from:
        lost = "it does not show which groups missing steps have used; the data continues by the checkpoint"
        tracker.warn_once("lost ledger", f"ledger.jsonl {lacks}: {lost}")


def forget_trace(folder: RunFolder, config: RunConfig, resumed_from: int | None) -> None:
    """Remove the trace of an earlier attempt if this one records, or does its steps again: a step has one trace. No
    process has begun a step yet."""
    if resumed_from is None or config.tracking.trace.end > resumed_from + 1:
        shutil.rmtree(folder.trace, ignore_errors=True)


def put_older_model_aside(folder: RunFolder, config: RunConfig, resumed_from: int | None) -> list[str]:
    """Rename the model of an earlier end of the run if this one continues past it. Returns the notices about it, which are
    already on the console."""
    aside = folder.put_model_aside() if (resumed_from or 0) < config.steps else []
    notices = [f"the run continues past its {path.name}/, which is now {older}" for path, older in aside]
    for notice in notices:
        print(notice, flush=True)
    return notices


def compare_engines(run: "Run") -> None:
    """Check before the first step that the servers give the learner's log-probs.

    The servers first get the weights in a resumed run, if weights are rounded, or if the servers lent their
    memory to the learner. Servers that outlived the learner of an earlier attempt get them too, unless they still
    hold the weights of the start."""
    sends = run.first_step > 1 or run.config.rollout.precision is not None or run.devices.are_shared
    run.weight_sync.take_over(sends=sends)
    gap = run.weight_sync.prove(START_PROBE_TEMPERATURE)
    if run.tracker is not None:
        probe = f"a probe prompt, sampled at its own temperature of {START_PROBE_TEMPERATURE}"
        text = f"log-probs of {probe}, differ by {gap:.1e} nats at most"
        if run.weight_sync.checks_gap:
            how = "agree"
        elif run.config.rollout.precision is not None:
            how = "differ, since the servers' weights are rounded"
        else:
            how = "differ, since they do not both compute in float32, and no limit is checked"
        run.tracker.say(f"before the first step, learner and servers {how}: {text}")


def written_report(folder: RunFolder, config: RunConfig, tracker: "Tracker") -> list[Path]:
    """Write the report; returns its page and its figures. An error is one line on the console: the run has its model and its
    metrics, from which the report can be made at any time."""
    from trainer.report.page import write_report

    try:
        return [write_report(folder.path, config), folder.figures]
    except Exception as error:  # the boundary of what only draws
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        fix = f"the run is complete, and `{tandem_command('report', folder.path)}` makes the report again"
        tracker.warn_once("report", f"the report could not be written ({why}); {fix}")
        return []


def end_run(run: "Run") -> None:
    """Tell the sample role to stop and leave every process group, all ranks together."""
    import torch.distributed as dist

    from rollout.client import RolloutError

    with contextlib.suppress(RolloutError):  # everything is written: nothing needs a role that is gone
        run.sampler.stop()
    run.weight_sync.close()
    dist.barrier()
    dist.destroy_process_group()


def server_lives(folder: RunFolder, names: Sequence[str]) -> dict[str, int]:
    """``read_lives``. Raises RolloutError if a serve role has ended, since its servers will not come back."""
    from rollout.client import RolloutError

    lives = read_lives(folder, names)
    if lives is None:
        raise RolloutError("a serve role has ended with its servers")
    return lives


def learner_and_rollout(
    folder: RunFolder, config: RunConfig, control_of: "ControlOf"
) -> "tuple[Learner, RemoteSampler | None, SGLangControl | None]":
    """This rank's learner and, on rank 0, the connections to the sample role and to the servers. A learner that shares
    the servers' devices is built once they have freed their memory."""
    import torch.distributed as dist

    from rollout.sampling.remote import RemoteSampler
    from trainer.learner import Learner
    from trainer.ranks.totals import on_first_rank
    from trainer.turns import CACHE, WEIGHTS, make_room

    takes_turns, timeout_s = config.launch.takes_turns, config.launch.start_timeout_s
    learner, remote, control = None if takes_turns else Learner(config), None, None
    # Every rank polls: waiting in a collective for rank 0 would fail after ``collective_timeout_s``, while the servers may
    # take longer to start.
    urls = wait_for_servers(folder, serve_roles(config), timeout_s=timeout_s)
    address = folder.wait_for_address("sample", timeout_s=timeout_s)["address"]
    if dist.get_rank() == 0:
        remote = RemoteSampler(
            address,
            find=partial(folder.read_address, "sample") if config.rollout.max_sampler_restarts else None,
            timeout_s=config.launch.patience_s,
            peer_timeout_s=config.launch.peer_timeout_s,
            key=folder.run_key(),
        )
        control = control_of(urls)
    if takes_turns:
        on_first_rank(lambda: make_room(control, CACHE, WEIGHTS))
    return learner or Learner(config), remote, control
