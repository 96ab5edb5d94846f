"""The ``tandem`` command: parses arguments, runs a command of ``launch/commands/``, and ends with one exit code.

Exit codes: 0 done; 1 a role failed, or a file cannot be used; 2 bad input, nothing was started; 75 stopped on
request, can go on; 130 interrupted.
"""

import difflib
import errno
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """The commands. An override that is written with dashes gets another error than a misspelt option."""

    def list_commands(self, ctx):
        """The commands that help lists, and that are proposed for a misspelt one."""
        return [name for name in super().list_commands(ctx) if not self.commands[name].hidden]

    def resolve_command(self, ctx, args):
        if args[0] not in self.commands and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            close = difflib.get_close_matches(args[0], names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(names)}"
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        name, command, rest = super().resolve_command(ctx, args)
        assert command is not None  # it is None for completion alone
        options = {option for parameter in command.params for option in parameter.opts}
        if any(parameter.name == "overrides" for parameter in command.params):
            dashed = [argument for argument in rest if argument.startswith("-")]
            _refuse_dashes(argument for argument in dashed if argument.partition("=")[0] not in options)
        return name, command, rest


def _refuse_dashes(arguments: Iterable[str]) -> None:
    """Raises BadInput for an argument that is the key of a config with dashes."""
    for plain in (argument.lstrip("-") for argument in arguments):
        from configs.schema import RunConfig, SftConfig
        from launch.checks.config import BadInput

        key, equals, _ = plain.partition("=")
        if equals and key.split(".")[0] in {*RunConfig.model_fields, *SftConfig.model_fields, "extends"}:
            raise BadInput(f"--{key}: no such option; write {plain}, without dashes")


app = typer.Typer(
    cls=Commands,
    help="RL post-training with a Megatron-Core learner and SGLang rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

OUR_PACKAGES = ("configs", "numerics", "rollout", "parallel", "tracing", "trainer", "launch")
ConfigPath = Annotated[
    Path, typer.Argument(help="A YAML config, e.g. configs/recipes/countdown_tiny.yaml", metavar="CONFIG")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted overrides: learner.optimizer.lr=3e-5 seed=1", metavar="[KEY=VALUE]..."),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the processes, data, batch, memory per rank and what is sent (into a file or a pipe also the resolved config); "
        "start nothing.",
    ),
]
GpuMemory = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=1_000_000,
        help="With --dry-run: GiB of each GPU, for a run on other machines than this one.",
    ),
]
RunPath = Annotated[Path, typer.Argument(help="A run folder, e.g. runs/latest", metavar="RUN")]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tandem {importlib.metadata.version('tandem-rl')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version, do nothing."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, gpu_memory: GpuMemory = None
) -> None:
    """Train by RL: SGLang servers, the sample role and the Megatron learner, from start to report."""
    from launch.commands.train import train as run

    run(config, overrides or [], dry_run=dry_run, gpu_memory=gpu_memory)


@app.command()
def resume(
    run: RunPath, overrides: Overrides = None, dry_run: DryRun = False, gpu_memory: GpuMemory = None
) -> None:
    """Go on with a run that was stopped or failed, from its newest whole checkpoint; overrides (such as
    steps=300) change its config."""
    from launch.commands.train import resume as resume_run

    resume_run(run, overrides or [], dry_run=dry_run, gpu_memory=gpu_memory)


@app.command("init")
def make_experiment(
    folder: Annotated[Path, typer.Argument(help="The folder to write.", metavar="FOLDER")],
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder, for the config's model.path.", metavar="PATH")
    ] = None,
) -> None:
    """Write a commented config, a reward function and example data: the start of an experiment of your own."""
    from launch.commands import init

    init.make_experiment(folder, model)


@app.command()
def schema(
    field: Annotated[
        str | None,
        typer.Argument(help="Only this field and those inside it, e.g. rollout.", metavar="[FIELD]"),
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


@app.command("list")
def list_runs(
    runs: Annotated[
        Path, typer.Argument(help="The folder of the runs (launch.runs_dir).", metavar="[RUNS]")
    ] = Path("runs"),
) -> None:
    """List the runs of a folder, newest first: state, step, held-out accuracy, reward, age."""
    from launch.commands.list_runs import run_table

    print(run_table(runs))


@app.command()
def clean(
    runs: Annotated[
        Path, typer.Argument(help="The folder of the runs (launch.runs_dir), or one run.", metavar="[RUNS]")
    ] = Path("runs"),
    apply: Annotated[
        bool, typer.Option("--apply", help="Remove it; without this it is only listed.")
    ] = False,
    models: Annotated[
        bool, typer.Option("--models", help="Also the models between the parts of quickstarts.")
    ] = False,
) -> None:
    """List what runs need no more, with size and reason: leftovers of what was killed, damaged and superfluous
    checkpoints, old logs. Runs that go on, and every run's newest checkpoint and model, are left alone."""
    from launch.commands.clean import clean as clean_runs

    raise typer.Exit(clean_runs(runs, apply=apply, models=models))


@app.command()
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


@app.command()
def sft(
    config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, gpu_memory: GpuMemory = None
) -> None:
    """Warm-start a model by supervised training on prompts with answers."""
    from launch.commands.train import sft as run

    run(config, overrides or [], dry_run=dry_run, gpu_memory=gpu_memory)


@app.command("eval")
def evaluate(
    config: ConfigPath, overrides: Overrides = None, dry_run: DryRun = False, gpu_memory: GpuMemory = None
) -> None:
    """Measure the accuracy of model.path on the task's held-out problems."""
    from launch.commands.train import evaluate as run

    run(config, overrides or [], dry_run=dry_run, gpu_memory=gpu_memory)


@app.command()
def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="The folder to write", metavar="OUT")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapters alone (learner.lora), for peft.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="Write the weights of the best evaluation (checkpoint.keep_best).")
    ] = False,
) -> None:
    """Write the newest weights of a run as a Hugging Face checkpoint, adapters merged."""
    from launch.commands import results

    results.export(run, out, adapter=adapter, best=best)


@app.command()
def report(
    run: RunPath,
    against: Annotated[
        list[Path] | None, typer.Option(help="Another run to compare with; can be given several times.")
    ] = None,
) -> None:
    """Write report.html and figures for a run, finished or not: all of one run. `tandem compare` has the results of
    several side by side."""
    from launch.commands import results

    results.report(run, against or [])


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two run folders or more.", metavar="RUN RUN...")],
    out: Annotated[Path, typer.Option(help="The page to write.", metavar="FILE.html")] = Path(
        "comparison.html"
    ),
) -> None:
    """Compare runs, finished or not: curves over each other on one page, results and differing settings there and
    here. `tandem report RUN --against OTHER` puts the same curves into the report of one run."""
    from launch.commands import results

    results.compare(runs, out)


@app.command()
def status(run: RunPath) -> None:
    """Say what a run is doing: step, rate, time left, results, checkpoint, Slurm job, roles."""
    from launch.commands.status import status as status_of
    from launch.roles.start import existing_run

    print(status_of(existing_run(run)))


@app.command()
def stop(
    run: RunPath,
    now: Annotated[
        bool,
        typer.Option("--now", help="End every process at once, without another checkpoint, as Ctrl-C does."),
    ] = False,
) -> None:
    """Ask a run to stop, here or as a Slurm job, and wait for its end: the step is finished or dropped, and a
    checkpoint is written, from which `tandem resume RUN` goes on."""
    from launch.commands.stop import stop as stop_run
    from launch.roles.start import existing_run

    raise typer.Exit(stop_run(existing_run(run), now=now))


@app.command()
def logs(
    run: RunPath,
    role: Annotated[
        str | None,
        typer.Option(help="Show the logs of this role alone: learn, sample, serve, sglang-0, slurm, ..."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show new lines too, until the run ends or Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Show this many lines of the end of each log.")
    ] = 20,
) -> None:
    """Show the ends of a run's logs, per role and node."""
    from launch.commands.status import log_files, show_logs
    from launch.roles.start import existing_run

    folder = existing_run(run)
    show_logs(folder, log_files(folder, role), lines=lines, follow=follow)


@app.command()
def samples(
    run: RunPath,
    step: Annotated[int | None, typer.Option(help="The step to show; the last one if left out.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Show the last step, as without --step.")] = False,
    group: Annotated[int | None, typer.Option(help="Show this group alone.")] = None,
    sibling: Annotated[int | None, typer.Option(help="Show this sibling of each group alone.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Colour tokens by |Δp|, and list those with the largest.")
    ] = False,
) -> None:
    """Show what the model does: samples of a step turn by turn, with observations, reward and status."""
    from launch.checks.config import BadInput
    from launch.commands.samples import show_samples
    from launch.roles.start import existing_run

    if last and step is not None:
        raise BadInput("--last and --step exclude each other; give one of them")
    show_samples(existing_run(run), step=step, group=group, sibling=sibling, tokens=tokens)


@app.command()
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
    from launch.roles.start import existing_run

    write_trace(existing_run(run), steps=steps, out=out)


@app.command()
def watch(
    run: RunPath,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show a run in the terminal while it goes on: curves, the parts of a step, the roles, the newest samples. Ctrl-C
    ends the view alone."""
    from launch.commands.watch import watch as watch_run
    from launch.roles.start import existing_run

    watch_run(existing_run(run), once=once, every_s=every)


@app.command("check-cluster")
def check_cluster(
    config: Annotated[
        Path | None, typer.Argument(help="The config that is to run.", metavar="[CONFIG]")
    ] = None,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="A folder the nodes share; launch.runs_dir if left out.", metavar="FOLDER"),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="The number of nodes that run this command; known in a Slurm step."),
    ] = None,
    node: Annotated[
        int | None, typer.Option(min=0, help="The number of this node among them, from 0.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for the others, and for a collective.")
    ] = 60.0,
    run: Annotated[
        Path | None,
        typer.Option(help="A run that is going on: list what it listens on here, instead.", metavar="RUN"),
    ] = None,
) -> None:
    """Check a cluster before a first job: drivers, limits, shared folder, ports, interfaces. One call per
    node: srun --nodes 4 --ntasks-per-node 1 tandem check-cluster CONFIG"""
    from launch.commands.check_cluster import check_cluster as check
    from launch.commands.check_cluster import check_sockets
    from launch.roles.start import existing_run

    if run is not None:
        raise typer.Exit(0 if check_sockets(existing_run(run)) else 1)
    check(config, overrides or [], folder=folder, num_nodes=nodes, node=node, timeout_s=timeout)


@app.command()
def selftest(
    folder: Annotated[
        Path,
        typer.Option(
            help="A folder for models, logs and report, which get one of their own in it.", metavar="DIR"
        ),
    ] = Path("runs"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Make this check alone, and those that it needs; may be given several times.", metavar="NAME"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of models, data and samples.")] = 0,
) -> None:
    """Check this machine with the real engines, on a tiny model of its own: log-probs, transfer, memory, training. Run
    it first on new hardware, and attach its selftest.txt to a bug report."""
    from launch.commands.selftest import selftest as check_everything

    if not check_everything(folder, only or [], seed=seed):
        raise typer.Exit(1)


@app.command("check-template")
def check_template(
    model: Annotated[
        Path, typer.Argument(help="A Hugging Face folder; its tokenizer is enough.", metavar="MODEL")
    ],
    tools: Annotated[
        bool,
        typer.Option("--tools", help="As for an environment with tools: replies of tools must be possible."),
    ] = False,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            help="An argument of the template, e.g. enable_thinking=false; may be given several times.",
            metavar="KEY=VALUE",
        ),
    ] = None,
) -> None:
    """Check a model's chat template for environments of several turns: whether new messages can follow what was
    sampled, token by token, and where the template would rewrite it."""
    from launch.commands.check_template import check_template as check

    if not check(model, with_tools=tools, arguments=argument or []):
        raise typer.Exit(1)


@app.command()
def replay(
    run: RunPath,
    step: Annotated[int, typer.Option(help="A recorded step (record_batches in the config).")],
    correction: Annotated[
        list[str] | None, typer.Option(help="A preset to try; may be given several times. All if left out.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Also of the parameters, from the checkpoint before the step.")
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Also draw a figure, in the run's figures/.")] = False,
) -> None:
    """Apply other corrections to a recorded step, without an engine: weights, kept tokens, loss and gradient."""
    from launch.commands import studies

    studies.replay(run, step, correction or [], gradients=gradients, plot=plot)


@app.command("verify-sync")
def verify_sync(
    config: ConfigPath,
    overrides: Overrides = None,
    learner: Annotated[
        list[str] | None, typer.Option(help="A learner layout, e.g. tp=2,sp; may be given several times.")
    ] = None,
    rollout: Annotated[
        list[str] | None, typer.Option(help="A rollout layout, e.g. tp=2; may be given several times.")
    ] = None,
) -> None:
    """Prove the weight transfer: servers that received weights from each learner layout answer, to the bit,
    like servers started from these weights."""
    from launch.commands import studies

    if not studies.verify_sync(config, overrides or [], learner or [], rollout or []):
        raise typer.Exit(1)


@app.command()
def mismatch(
    config: ConfigPath,
    overrides: Overrides = None,
    learner: Annotated[
        list[str], typer.Option(help="A learner layout, e.g. tp=2,sp; may be given several times.")
    ] = ["tp=1"],  # noqa: B006
    rollout: Annotated[
        list[str],
        typer.Option(
            help="A rollout layout, e.g. tp=2; on CUDA also tp=2,deterministic or tp=2,attention=triton."
        ),
    ] = ["tp=1"],  # noqa: B006
    prompts: Annotated[int, typer.Option(help="Prompts of the task, the same ones for every pair.")] = 512,
    threshold: Annotated[float, typer.Option(help="Count responses with a max |Δp| above it.")] = 0.5,
    out: Annotated[
        Path | None, typer.Option(help="A new folder; in launch.runs_dir if left out.", metavar="FOLDER")
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Also switch one cause at a time, and rank them.")
    ] = False,
) -> None:
    """Measure the gap in probability between learner and rollout, for every pair of layouts, with the real
    engines."""
    from launch.commands import studies
    from launch.studies.mismatch_plan import Request

    request = Request(
        learners=tuple(learner),
        rollouts=tuple(rollout),
        prompts=prompts,
        threshold=threshold,
        out=out,
        why=why,
    )
    studies.mismatch(config, overrides or [], request)


@app.command("make-tiny-model")
def make_tiny_model(
    folder: Annotated[Path, typer.Argument(help="The folder to write", metavar="FOLDER")],
    seed: Annotated[int, typer.Option(help="The seed of the random weights.")] = 0,
    family: Annotated[
        Literal["qwen3", "qwen3_moe", "mixtral", "glm4_moe", "qwen2", "llama", "mistral", "phi3"],
        typer.Option(help="The family of the model."),
    ] = "qwen3",
) -> None:
    """Make a tiny model with random weights and a character tokenizer, for Countdown."""
    from launch.checks.config import check_new_folder

    check_new_folder("FOLDER", folder)  # before the seconds that the function's imports take

    from rollout.tiny_model import make_tiny_countdown_model

    make_tiny_countdown_model(folder, seed=seed, family=family)
    print(f"wrote {folder}")


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(help="The seed of everything: model, data, training.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="The number of RL steps.")] = 150,
    study: Annotated[
        bool,
        typer.Option("--study", help="Then train with a quantised rollout, in two ways, and compare."),
    ] = False,
    install_seconds: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Run the whole path on one machine: tiny model, warm start, RL, evaluation, export, report."""
    from launch.commands.quickstart import run_quickstart

    run_quickstart(seed=seed, steps=steps, install_seconds=install_seconds, study=study)


@app.command()
def plan(
    config: ConfigPath,
    gpus: Annotated[
        int, typer.Option(min=2, max=100_000, help="The number of GPUs, of learner and servers together.")
    ],
    overrides: Overrides = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=1, max=1_000_000, help="The memory of one GPU, in GiB. Left out: that of --gpu."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="The kind of GPU, for seconds of a step: h100, h200, a100, or a description FILE.yaml."
        ),
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, max=1024, help="GPUs of a node, within which tensor-parallel groups stay.")
    ] = 8,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt. Left out: 256, as far as there is room.")
    ] = None,
    response_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of a response in the mean. Left out: half of rollout.max_new_tokens."
        ),
    ] = None,
    response_spread: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=5,
            help="Spread of the responses' lengths: the standard deviation of their logarithm. Left out: 0.5; 0: all are alike.",
        ),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="A table of `tandem mismatch`; it decides first.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Print this many pairs.")] = 10,
    report: Annotated[
        Path | None, typer.Option(help="With --gpu: write a page with pictures, OUT.html.")
    ] = None,
) -> None:
    """Find layouts of learner and rollout that fit on some GPUs, ranked by expected mismatch, then (--gpu) by the
    estimated seconds of a step. The model's config.json is enough."""
    from launch.commands.plan import PlanOptions, print_plans

    options = PlanOptions(
        num_gpus=gpus,
        gpus_per_node=gpus_per_node,
        gpu_memory=gpu_memory,
        measured=measured,
        count=top,
        gpu=gpu,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        response_spread=response_spread,
        report=report,
    )
    print_plans(config, overrides or [], options)


@app.command()
def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            help="A rank to simulate; several times for several. Left out: the first rank of the first, a middle and the last "
            "pipeline stage."
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=1, max=1_000_000, help="GiB of each GPU: exit code 1 where a rank takes more."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.", metavar="FILE")
    ] = None,
) -> None:
    """Run the learner's code of some ranks without weights and GPUs: peak memory by part, collectives, FLOPs and what is
    sent to the servers. The model's config.json is enough."""
    from launch.commands.simulate import print_simulation

    fit = print_simulation(config, overrides or [], ranks=rank, gpu_memory=gpu_memory, json_path=json)
    raise typer.Exit(0 if fit else 1)


@app.command()
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
        float | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="GiB of each of the job's GPUs, to check their memory too.",
            metavar="GIB",
        ),
    ] = None,
) -> None:
    """Write the batch script of this config for Slurm (launch.nodes, launch.slurm), in a new run folder."""
    from launch.commands.slurm import slurm

    slurm(config, overrides or [], arrays=array or [], submit=submit, dry_run=dry_run, gpu_memory=gpu_memory)


@app.command()
def sweep(
    config: ConfigPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides; those with several values, such as seed=0,1,2, give a run for each combination.",
            metavar="KEY=V1,V2...",
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Run this many at a time; memory and GPUs must be enough for all.")
    ] = 1,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on with the others after a run has failed.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check every run, say what would become of each, and start nothing."),
    ] = False,
) -> None:
    """Train once for each combination of values, on this machine; then compare. After Ctrl-C or a failure the same
    command goes on: finished runs are skipped, and stopped ones resumed."""
    from launch.commands.sweep import sweep as run

    run(config, overrides or [], jobs=jobs, keep_going=keep_going, dry_run=dry_run)


@app.command(hidden=True)
def job(run: RunPath) -> None:
    """Supervise a run inside a Slurm job; the batch script of `tandem slurm` becomes this command."""
    from launch.slurm.inside_job import run_job

    raise typer.Exit(run_job(run))


def _role_command(name: str, help_text: str, hidden: bool = False) -> None:
    def run(run_folder: RunPath) -> None:
        from launch.roles.start import run_role

        run_role(name, run_folder)

    app.command(name, help=help_text, hidden=hidden)(run)


@app.command()
def serve(
    run_folder: RunPath,
    node: Annotated[
        int | None,
        typer.Option(help="Of the servers' nodes, from 0; in a Slurm step SLURM_NODEID if left out."),
    ] = None,
) -> None:
    """Run one role alone: the SGLang servers of a run, or those of one node."""
    from launch.roles.start import run_role

    run_role("serve", run_folder, node)


_role_command("sample", "Run one role alone: the sampling driver of a run.")
_role_command("learn", "Run one role alone, under torchrun: a Megatron rank of a run.")
_role_command("sft-rank", "Under torchrun: a Megatron rank of a warm start.", hidden=True)
_role_command(
    "replay-rank", "A Megatron process that replays a step with gradients of the parameters.", hidden=True
)
_role_command(
    "verify-rank",
    "Under torchrun: a Megatron rank that sends other weights to servers, to verify the transfer.",
    hidden=True,
)
_role_command(
    "mismatch-draw",
    "Sample and score prompts with the servers of a folder, for a study of mismatch.",
    hidden=True,
)
_role_command(
    "score-rank", "Under torchrun: a Megatron rank that scores samples, for a study of mismatch.", hidden=True
)
_role_command("selftest-rank", "Under torchrun: the work of one check of the selftest.", hidden=True)
_role_command(
    "export-rank", "A Megatron process that writes a checkpoint as a Hugging Face folder.", hidden=True
)


def check_packages() -> None:
    """Refuse to start where a package of another owner shadows one of Tandem's, whose names are plain
    (``trainer``)."""
    root = Path(__file__).resolve().parent.parent
    for name in OUR_PACKAGES:
        spec = importlib.util.find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if folder != root / name:
            sys.exit(
                f"tandem: the package {name!r} is taken from {folder}, not from {root / name}.\n"
                "Another package of that name comes first on the Python path: run from another folder, or mend PYTHONPATH."
            )


def check_current_folder() -> None:
    """Refuse to start in a folder that was removed: paths start there, and Python looks for modules there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        fix = "change to one that does, and start the command again"
        print(f"tandem: the current folder does not exist any more; {fix}", file=sys.stderr)
        sys.exit(2)


def open_closed_streams() -> None:
    """Open standard streams that the caller closed, on /dev/null: otherwise a file would take their number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        stream = open(number, "r" if number == 0 else "w", closefd=False)  # noqa: SIM115
        setattr(sys, ("stdin", "stdout", "stderr")[number], stream)
    os.close(number)


def main() -> None:
    open_closed_streams()
    check_current_folder()
    check_packages()
    # In every process of the run, and for transformers too.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except BaseException as error:
        answer = None if isinstance(error, SystemExit) else _message_and_exit_code(error)
        if answer is None:
            raise
        message, code = answer
        print(f"tandem: {message}", file=sys.stderr)
        sys.exit(code)


def _message_and_exit_code(error: BaseException) -> tuple[object, int] | None:
    """None for a bug, which keeps its traceback. The classes are imported here, since help needs none."""
    from configs.errors import ConfigError
    from launch.checks.config import BadInput
    from launch.processes.stopping import RunStopped
    from launch.processes.supervisor import Interrupted, RoleFailed

    match error:
        case ConfigError() | BadInput():
            return error, 2
        case RoleFailed():
            return error, 1
        case OSError() if error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error, 1
        case RunStopped():
            return error, os.EX_TEMPFAIL
        case Interrupted():
            return "interrupted; every process of the run has ended", 130
    return None
