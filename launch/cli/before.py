"""Arguments of the commands that a user calls before a run: what fits, and whether the machines are in order."""

from pathlib import Path
from typing import Annotated

import typer

from launch.cli.shared import ConfigPath, Overrides, command_of, gib, run_folder

commands = typer.Typer()
command = command_of(commands, "Before a run")


@command()
def plan(
    config: ConfigPath,
    gpus: Annotated[
        int,
        typer.Option(
            min=1,
            max=100_000,
            help="The number of GPUs for learner and servers together. With launch.placement=colocated both sides have all.",
        ),
    ],
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="The kind of GPU, for its memory and seconds of a step: h100, h200, a100, or a description FILE.yaml."
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        gib("The memory of one GPU. Left out: that of --gpu. Without --gpu there are no seconds to rank by."),
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
        num_gpus=gpus, gpus_per_node=gpus_per_node, gpu_memory=gpu_memory, gpu=gpu, measured=measured, count=top, report=report,
        prompt_tokens=prompt_tokens, response_tokens=response_tokens, response_spread=response_spread,
    )  # fmt: skip
    print_plans(config, overrides or [], options)


@command()
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
    gpu_memory: Annotated[float | None, gib("GiB of each GPU: exit code 1 where a rank takes more.")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Also write the figures into this file.", metavar="FILE")
    ] = None,
) -> None:
    """Run the learner's code of some ranks without weights and GPUs: peak memory by part, collectives, FLOPs and what is
    sent to the servers. The model's config.json is enough."""
    from launch.commands.simulate import print_simulation

    fit = print_simulation(config, overrides or [], ranks=rank, gpu_memory=gpu_memory, json_path=json)
    raise typer.Exit(0 if fit else 1)


@command()
def selftest(
    folder: Annotated[
        Path,
        typer.Option(
            help="A folder in which a new folder for models, logs and report is made.", metavar="DIR"
        ),
    ] = Path("runs"),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Make only this check and those that it needs; may be given several times.", metavar="NAME"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of models, data and samples.")] = 0,
) -> None:
    """Check this machine with the real engines, on a new tiny model: log-probs, transfer, memory, training. Run
    it first on new hardware, and attach its selftest.txt to a bug report."""
    from launch.commands.selftest import selftest as check_everything

    if not check_everything(folder, only or [], seed=seed):
        raise typer.Exit(1)


@command("check-cluster")
def check_cluster(
    config: Annotated[
        Path | None, typer.Argument(help="The config that is to run.", metavar="CONFIG")
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
        typer.Option(help="An active run: list the ports that it listens on here, instead.", metavar="RUN"),
    ] = None,
) -> None:
    """Check a cluster before a first job: drivers, limits, shared folder, ports, interfaces. One call per
    node: srun --nodes 4 --ntasks-per-node 1 tandem check-cluster CONFIG"""
    from launch.commands.check_cluster import check_cluster as check
    from launch.commands.check_cluster import check_sockets

    if run is not None:
        raise typer.Exit(0 if check_sockets(run_folder(run)) else 1)
    check(config, overrides or [], folder=folder, num_nodes=nodes, node=node, timeout_s=timeout)


@command("check-template")
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


@command("make-tiny-model")
def make_tiny_model(
    folder: Annotated[Path, typer.Argument(help="The folder to write", metavar="FOLDER")],
    seed: Annotated[int, typer.Option(help="The seed of the random weights.")] = 0,
    family: Annotated[
        str, typer.Option(help="The family of the model, a model_type of docs/model.md.")
    ] = "qwen3",
) -> None:
    """Make a tiny model with random weights and a character tokenizer, for Countdown."""
    from launch.checks.arguments import as_bad_input, check_new_folder

    with as_bad_input():
        check_new_folder("FOLDER", folder)  # before the seconds that the function's imports take

    from rollout.tiny_model import make_tiny_countdown_model

    with as_bad_input("--family: "):
        make_tiny_countdown_model(folder, seed=seed, family=family)
    print(f"wrote {folder}")


@command()
def dequantise(
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face folder with FP8 or MXFP4 weights.", metavar="FOLDER")
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write", metavar="OUT")],
) -> None:
    """Write a model that is published in FP8 (DeepSeek-V3, Qwen3-FP8) or MXFP4 (gpt-oss) in bfloat16, in which learner and
    servers load it."""
    from launch.commands.dequantise import dequantise as write_dequantised

    write_dequantised(folder, out)
