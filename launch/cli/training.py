"""Arguments of the commands that start runs, and of those that write configs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.cli.shared import ConfigPath, DryRun, GpuMemory, Overrides, RunPath, argument, gib, option, panel

commands = typer.Typer()
command = panel(commands, "Train")


@command()
def quickstart(
    seed: Annotated[int, option("The seed of everything: model, data, training.")] = 0,
    steps: Annotated[int, option("The number of RL steps.", min=1)] = 150,
    study: Annotated[bool, option("Then compare two runs with a quantised rollout.", "--study")] = False,
    install_seconds: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Run the whole path on one machine: tiny model, warm start, RL, evaluation, export, report."""
    from launch.commands.quickstart import run_quickstart

    run_quickstart(seed=seed, steps=steps, install_seconds=install_seconds, study=study)


@command("init")
def make_experiment(
    folder: Annotated[Path, argument("The folder to write.", "FOLDER")],
    model: Annotated[Path | None, option("A Hugging Face folder, as model.path.", metavar="PATH")] = None,
) -> None:
    """Write a commented config, a reward function and example data: the start of an experiment of your own."""
    from launch.commands import init

    init.make_experiment(folder, model)


@command()
def schema(
    field: Annotated[str | None, argument("This field and those inside it, e.g. rollout.", "FIELD")] = None,
    kind: Annotated[
        Literal["train", "sft", "hardware"],
        option("Of a config: of an RL run or a warm start; or of the GPUs of `tandem plan --gpu`."),
    ] = "train",
    as_json: Annotated[bool, option("Print JSON Schema, as editors read it.", "--json")] = False,
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
        argument(
            "Overrides; those with several values, such as seed=0,1,2, give a run for each combination.",
            "KEY=V1,V2",
        ),
    ] = None,
    jobs: Annotated[int, option("Run this many at a time; all must fit into memory and GPUs.", min=1)] = 1,
    keep_going: Annotated[bool, option("Continue with the others after a failure.", "--keep-going")] = False,
    dry_run: Annotated[
        bool, option("Check every run, say what would be done with each, and start nothing.", "--dry-run")
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
    submit: Annotated[bool, option("Also submit it, by sbatch.", "--submit")] = False,
    array: Annotated[
        list[str] | None,
        option("A run for each value of a key, e.g. seed=0,1,2; several times: for each combination."),
    ] = None,
    dry_run: Annotated[bool, option("Print a dry run and the script; write nothing.", "--dry-run")] = False,
    gpu_memory: Annotated[
        float | None, gib("GiB of each of the job's GPUs; checks their memory too.")
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
        option("Where the learner's nodes meet: its first one, by default this host.", metavar="HOST:PORT"),
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
