"""Arguments of the commands that measure how far the engines disagree, and whether the weights arrive."""

from pathlib import Path
from typing import Annotated

import typer

from launch.cli.shared import ConfigPath, Overrides, RunPath, option, panel

commands = typer.Typer()
command = panel(commands, "Study the two engines")


@command()
def mismatch(
    config: ConfigPath,
    overrides: Overrides = None,
    learner: Annotated[list[str], option("A learner layout, e.g. tp=2,sp; may be repeated.")] = ["tp=1"],  # noqa: B006
    rollout: Annotated[
        list[str],
        option("A rollout layout, e.g. tp=2; on CUDA also tp=2,deterministic or tp=2,attention=triton."),
    ] = ["tp=1"],  # noqa: B006
    prompts: Annotated[int, option("Prompts of the task, the same ones for every pair.")] = 512,
    threshold: Annotated[float, option("Count responses with a max |Δp| above it.")] = 0.5,
    out: Annotated[Path | None, option("New; in launch.runs_dir if left out.", metavar="FOLDER")] = None,
    why: Annotated[bool, option("Also switch one cause at a time, and rank them.", "--why")] = False,
) -> None:
    """Measure the gap in probability between learner and rollout, for every pair of layouts, with the real
    engines."""
    from launch.commands import studies
    from launch.studies.mismatch_plan import Request

    learners, rollouts = tuple(learner), tuple(rollout)
    request = Request(
        learners=learners, rollouts=rollouts, prompts=prompts, threshold=threshold, out=out, why=why
    )
    studies.mismatch(config, overrides or [], request)


@command("verify-sync")
def verify_sync(
    config: ConfigPath,
    overrides: Overrides = None,
    learner: Annotated[list[str] | None, option("A learner layout, e.g. tp=2,sp; may be repeated.")] = None,
    rollout: Annotated[list[str] | None, option("A rollout layout, e.g. tp=2; may be repeated.")] = None,
) -> None:
    """Prove the weight transfer: servers that received weights from each learner layout answer, to the bit,
    like servers started from these weights."""
    from launch.commands import studies

    if not studies.verify_sync(config, overrides or [], learner or [], rollout or []):
        raise typer.Exit(1)


@command()
def replay(
    run: RunPath,
    step: Annotated[int, option("A recorded step (record_batches in the config).")],
    correction: Annotated[
        list[str] | None,
        option("A preset, or keys over the run's own correction; may be repeated. Left out: all presets."),
    ] = None,
    gradients: Annotated[
        bool, option("Also of the parameters, from the checkpoint before the step.", "--gradients")
    ] = False,
    plot: Annotated[bool, option("Also draw a figure, in the run's figures/.", "--plot")] = False,
) -> None:
    """Apply other corrections to a recorded step, without an engine: weights, kept tokens, loss and gradient."""
    from launch.commands import studies

    studies.replay(run, step, correction or [], gradients=gradients, plot=plot)
