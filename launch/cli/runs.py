"""Arguments of the commands that show, use and end runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.cli.shared import RunPath, argument, option, panel, run_folder

commands = typer.Typer()
command = panel(commands, "Look at runs")


@command("list")
def list_runs(
    runs: Annotated[Path, argument("The folder of the runs (launch.runs_dir).", "RUNS")] = Path("runs"),
) -> None:
    """List the runs of a folder, newest first: state, step, held-out accuracy, reward, age."""
    from launch.commands.list_runs import run_table

    print(run_table(runs))


@command()
def status(run: RunPath) -> None:
    """Say what a run is doing: step, rate, time left, results, checkpoint, Slurm job, roles."""
    from launch.commands.status import status as status_of

    print(status_of(run_folder(run)))


@command()
def watch(
    run: RunPath,
    once: Annotated[bool, option("Print one picture and end.", "--once")] = False,
    every: Annotated[float, option("Seconds between two looks.", min=0.2)] = 2.0,
) -> None:
    """Show a run in the terminal while it runs: curves, the parts of a step, the roles, the newest samples. Ctrl-C
    ends only the view."""
    from launch.commands.watch import watch as watch_run

    watch_run(run_folder(run), once=once, every_s=every)


@command()
def logs(
    run: RunPath,
    role: Annotated[str | None, option("Only logs of this role: learn, sample, serve, sglang-0, …")] = None,
    follow: Annotated[bool, option("New lines too, until the run ends or Ctrl-C.", "--follow", "-f")] = False,
    lines: Annotated[int, option("Show this many lines of each log's end.", "--lines", "-n", min=0)] = 20,
) -> None:
    """Show the ends of a run's logs, per role and node."""
    from launch.commands.logs import log_files, show_logs

    folder = run_folder(run)
    raise typer.Exit(show_logs(folder, log_files(folder, role), lines=lines, follow=follow))


@command()
def samples(
    run: RunPath,
    step: Annotated[int | None, option("The step to show; the last one if left out.")] = None,
    group: Annotated[int | None, option("Show only this group.")] = None,
    sibling: Annotated[int | None, option("Show only this sibling of each group.")] = None,
    tokens: Annotated[bool, option("Colour tokens by |Δp|, and list the largest.", "--tokens")] = False,
    evaluation: Annotated[bool, option("Samples of the evaluation after the step.", "--evaluation")] = False,
) -> None:
    """Show what the model does: samples of a step turn by turn, with observations, reward and status."""
    from launch.commands.samples import show_samples

    folder = run_folder(run)
    show_samples(folder, step=step, group=group, sibling=sibling, tokens=tokens, evaluation=evaluation)


@command()
def trace(
    run: RunPath,
    steps: Annotated[
        int | None, option("The last N traced steps; left out: all.", min=1, metavar="N")
    ] = None,
    out: Annotated[
        Path | None,
        option("The file to write; RUN/trace.json if left out.", "--out", "-o", metavar="FILE.json"),
    ] = None,
) -> None:
    """Say where the time of the traced steps (tracking.trace) went, by role, and write a Chrome trace of all roles on one
    clock, which opens in Perfetto."""
    from launch.commands.trace import trace as write_trace

    write_trace(run_folder(run), steps=steps, out=out)


@command()
def publish(
    run: RunPath,
    to: Annotated[Literal["wandb", "tensorboard"], option("The service.", "--to")],
    follow: Annotated[bool, option("New steps too, until the run ends or Ctrl-C.", "--follow", "-f")] = False,
    project: Annotated[str | None, option("Project at W&B; that of tracking.wandb if left out.")] = None,
    entity: Annotated[str | None, option("Team or user at W&B.")] = None,
    until_told: Annotated[bool, typer.Option("--until-told", hidden=True)] = False,
) -> None:
    """Copy a run's metrics to Weights & Biases, or into TensorBoard's event files (RUN/tensorboard), during the run or
    after it, from any machine that sees the folder."""
    from launch.commands.publish import publish_run

    publish_run(run_folder(run), to, project=project, entity=entity, follow=follow, until_told=until_told)


@command()
def report(run: RunPath) -> None:
    """Write report.html and figures for a run, finished or not: all of one run. `tandem compare` has the results of
    several side by side."""
    from launch.commands import results

    results.report(run)


@command()
def compare(
    runs: Annotated[list[Path], argument("Two run folders or more.", "RUN")],
    out: Annotated[Path, option("The page to write.", metavar="FILE.html")] = Path("comparison.html"),
) -> None:
    """Compare runs, finished or not: curves over each other on one page, results and differing settings there and
    here."""
    from launch.commands import results

    results.compare(runs, out)


@command()
def export(
    run: RunPath,
    out: Annotated[Path, argument("The folder to write", "OUT")],
    adapter: Annotated[bool, option("Only the adapters (learner.lora), for peft.", "--adapter")] = False,
    best: Annotated[bool, option("Those of the best evaluation (checkpoint.keep_best).", "--best")] = False,
) -> None:
    """Write the newest weights of a run as a Hugging Face checkpoint, adapters merged."""
    from launch.commands import results

    results.export(run, out, adapter=adapter, best=best)


@command()
def stop(
    run: RunPath,
    now: Annotated[bool, option("End at once without another checkpoint, as Ctrl-C does.", "--now")] = False,
) -> None:
    """Ask a run to stop, here or as a Slurm job, and wait for its end: the step is finished or dropped, and a
    checkpoint is written, from which `tandem resume RUN` continues."""
    from launch.commands.stop import stop as stop_run

    raise typer.Exit(stop_run(run_folder(run), now=now))


@command()
def clean(
    runs: Annotated[Path, argument("The folder of the runs, or one run.", "RUNS")] = Path("runs"),
    apply: Annotated[bool, option("Remove it; without this it is only listed.", "--apply")] = False,
    models: Annotated[bool, option("Also the models between the parts of quickstarts.", "--models")] = False,
) -> None:
    """List files that runs no longer need, with size and reason: leftovers of killed processes, damaged and superfluous
    checkpoints, old logs. Active runs, and every run's newest checkpoint and model, are left alone."""
    from launch.commands.clean import clean as clean_runs

    raise typer.Exit(clean_runs(runs, apply=apply, models=models))
