"""Arguments of the commands that start runs, and of those that write configs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.cli.shared import ConfigPath, DryRun, GpuMemory, Overrides, RunPath, command_of, gib

commands = typer.Typer()
command = command_of(commands, "Train")


@command()
def quickstart(
    seed: Annotated[int, typer.Option(help="The seed of everything: model, data, training.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="The number of RL steps.")] = 150,
    study: Annotated[
        bool, typer.Option("--study", help="Then train with a quantised rollout, in two ways, and compare.")
    ] = False,
    install_seconds: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Run the whole path on one machine: tiny model, warm start, RL, evaluation, export, report."""
    from launch.commands.quickstart import run_quickstart

    run_quickstart(seed=seed, steps=steps, install_seconds=install_seconds, study=study)


@command("init")
def make_experiment(
    folder: Annotated[Path, typer.Argument(help="The folder to write.", metavar="FOLDER")],
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder, for the config's model.path.", metavar="PATH")
    ] = None,
) -> None:
    """Write a commented config, a reward function and example data: the start of an experiment of your own."""
    from launch.commands import init

    init.make_experiment(folder, model)


@command()
def schema(
    field: Annotated[
        str | None, typer.Argument(help="Only this field and those inside it, e.g. rollout.", metavar="FIELD")
    ] = None,
    kind: Annotated[
        Literal["train", "sft", "hardware"],
        typer.Option(
            help="Of a config: an RL run, or a supervised warm start; or of a description of GPUs, for `tandem plan --gpu`."
        ),
    ] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON Schema, as editors read it.")] = False,
) -> None:
    """Print every field of a config: type, default, unit and meaning."""
    from launch.commands.schema import print_schema

    print_schema(kind, field, as_json=as_json)


@command()
def train(
    config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, gpu_memory: GpuMemory = None
) -> None:
    """Train by RL: SGLang servers, the sample role and the Megatron learner, from start to report."""
    from launch.commands.train import train as run

    run(config, overrides or [], dry_run=dry_run, gpu_memory=gpu_memory)


@command()
def resume(
    run: RunPath, overrides: Overrides = None, dry_run: DryRun = False, gpu_memory: GpuMemory = None
) -> None:
    """Continue a run that was stopped or failed, from its newest complete checkpoint; overrides (such as
    steps=300) change its config."""
    from launch.commands.train import resume as resume_run

    resume_run(run, overrides or [], dry_run=dry_run, gpu_memory=gpu_memory)


@command()
def sft(
    config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, gpu_memory: GpuMemory = None
) -> None:
    """Warm-start a model by supervised training on prompts with answers."""
    from launch.commands.train import sft as run

    run(config, overrides or [], dry_run=dry_run, gpu_memory=gpu_memory)


@command("eval")
def evaluate(
    config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, gpu_memory: GpuMemory = None
) -> None:
    """Measure the accuracy of model.path on the task's held-out problems. With a run folder instead of CONFIG, measure the
    model that the run has trained."""
    from launch.commands.train import evaluate as run

    run(config, overrides or [], dry_run=dry_run, gpu_memory=gpu_memory)


@command()
def sweep(
    config: ConfigPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides; those with several values, such as seed=0,1,2, give a run for each combination.",
            metavar="KEY=V1,V2",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Run this many at a time; memory and GPUs must be enough for all.")
    ] = 1,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Continue with the others after a run has failed.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check every run, say what would be done with each, and start nothing."
        ),
    ] = False,
) -> None:
    """Train once for each combination of values, on this machine; then compare. After Ctrl-C or a failure the same
    command continues: finished runs are skipped, and stopped ones resumed."""
    from launch.commands.sweep import sweep as run

    run(config, overrides or [], jobs=jobs, keep_going=keep_going, dry_run=dry_run)


@command()
def slurm(
    config: ConfigPath,
    overrides: Overrides = None,
    submit: Annotated[bool, typer.Option("--submit", help="Also submit it, by sbatch.")] = False,
    array: Annotated[
        list[str] | None,
        typer.Option(
            help="A run for each value of a key, e.g. seed=0,1,2; several times: for each combination."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what --dry-run of train does, and the script; write nothing."),
    ] = False,
    gpu_memory: Annotated[
        float | None, gib("GiB of each of the job's GPUs, to check their memory too.")
    ] = None,
) -> None:
    """Write the batch script of this config for Slurm (launch.nodes, launch.slurm), in a new run folder."""
    from launch.checks.arguments import as_bad_input
    from launch.commands.slurm import slurm as write

    with as_bad_input(f"{config}: "):
        write(
            config, overrides or [], arrays=array or [], submit=submit, dry_run=dry_run, gpu_memory=gpu_memory
        )


@command()
def prepare(
    config: ConfigPath,
    overrides: Overrides = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Where the learner's nodes meet: its first one, by default this host.", metavar="HOST:PORT"
        ),
    ] = None,
) -> None:
    """Make the run folder of a run on several nodes (launch.nodes) and print what to start on each, for hosts
    without Slurm."""
    from launch.commands.prepare import prepare as prepare_run

    prepare_run(config, overrides or [], endpoint=endpoint)


@command(hidden=True)
def job(run: RunPath) -> None:
    """Supervise a run inside a Slurm job; the batch script of `tandem slurm` becomes this command."""
    from launch.slurm.inside_job import run_job

    raise typer.Exit(run_job(run))
