"""Arguments of the commands that show, use and end runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.cli.shared import RunPath, command_of, run_folder

commands = typer.Typer()
command = command_of(commands, "Look at runs")


@command("list")
def list_runs(
    runs: Annotated[
        Path, typer.Argument(help="The folder of the runs (launch.runs_dir).", metavar="RUNS")
    ] = Path("runs"),
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
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show a run in the terminal while it runs: curves, the parts of a step, the roles, the newest samples. Ctrl-C
    ends only the view."""
    from launch.commands.watch import watch as watch_run

    watch_run(run_folder(run), once=once, every_s=every)


@command()
def logs(
    run: RunPath,
    role: Annotated[
        str | None,
        typer.Option(help="Show only the logs of this role: learn, sample, serve, sglang-0, slurm, ..."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new lines too, until the run ends or Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Show this many lines of the end of each log.")
    ] = 20,
) -> None:
    """Show the ends of a run's logs, per role and node."""
    from launch.commands.logs import log_files, show_logs

    folder = run_folder(run)
    raise typer.Exit(show_logs(folder, log_files(folder, role), lines=lines, follow=follow))


@command()
def samples(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="The step to show; the last one if left out.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Show the last step, as without --step.")] = False,
    group: Annotated[int | None, typer.Option(help="Show only this group.")] = None,
    sibling: Annotated[int | None, typer.Option(help="Show only this sibling of each group.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Colour tokens by |Δp|, and list those with the largest.")
    ] = False,
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Show samples of the evaluation after the step.")
    ] = False,
) -> None:
    """Show what the model does: samples of a step turn by turn, with observations, reward and status."""
    from launch.checks.arguments import BadInput
    from launch.commands.samples import show_samples

    if last and step is not None:
        raise BadInput("--last and --step exclude each other; give one of them")
    show_samples(
        run_folder(run), step=step, group=group, sibling=sibling, tokens=tokens, evaluation=evaluation
    )


@command()
def trace(
    run: RunPath,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="The last N steps that were traced; all if left out.", metavar="N"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The file to write; RUN/trace.json if left out.", metavar="FILE.json"
        ),
    ] = None,
) -> None:
    """Say where the time of the traced steps (tracking.trace) went, by role, and write a Chrome trace of all roles on one
    clock, which opens in Perfetto."""
    from launch.commands.trace import trace as write_trace

    write_trace(run_folder(run), steps=steps, out=out)


@command()
def publish(
    run: RunPath,
    to: Annotated[Literal["wandb", "tensorboard"], typer.Option("--to", help="The service.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue with new steps, until the run ends or Ctrl-C.")
    ] = False,
    project: Annotated[
        str | None, typer.Option(help="Project at W&B; the run's own (tracking.wandb) if left out.")
    ] = None,
    entity: Annotated[str | None, typer.Option(help="Team or user at W&B.")] = None,
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
    runs: Annotated[list[Path], typer.Argument(help="Two run folders or more.", metavar="RUN")],
    out: Annotated[Path, typer.Option(help="The page to write.", metavar="FILE.html")] = Path(
        "comparison.html"
    ),
) -> None:
    """Compare runs, finished or not: curves over each other on one page, results and differing settings there and
    here."""
    from launch.commands import results

    results.compare(runs, out)


@command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="The folder to write", metavar="OUT")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapters (learner.lora), for peft.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Write the weights of the best evaluation (checkpoint.keep_best).")
    ] = False,
) -> None:
    """Write the newest weights of a run as a Hugging Face checkpoint, adapters merged."""
    from launch.commands import results

    results.export(run, out, adapter=adapter, best=best)


@command()
def stop(
    run: RunPath,
    now: Annotated[
        bool,
        typer.Option("--now", help="End every process at once, without another checkpoint, as Ctrl-C does."),
    ] = False,
) -> None:
    """Ask a run to stop, here or as a Slurm job, and wait for its end: the step is finished or dropped, and a
    checkpoint is written, from which `tandem resume RUN` continues."""
    from launch.commands.stop import stop as stop_run

    raise typer.Exit(stop_run(run_folder(run), now=now))


@command()
def clean(
    runs: Annotated[
        Path, typer.Argument(help="The folder of the runs (launch.runs_dir), or one run.", metavar="RUNS")
    ] = Path("runs"),
    apply: Annotated[
        bool, typer.Option("--apply", help="Remove it; without this it is only listed.")
    ] = False,
    models: Annotated[
        bool, typer.Option("--models", help="Also the models between the parts of quickstarts.")
    ] = False,
) -> None:
    """List files that runs no longer need, with size and reason: leftovers of killed processes, damaged and superfluous
    checkpoints, old logs. Active runs, and every run's newest checkpoint and model, are left alone."""
    from launch.commands.clean import clean as clean_runs

    raise typer.Exit(clean_runs(runs, apply=apply, models=models))
