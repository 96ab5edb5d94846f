"""Arguments of the commands that a user calls before a run: what fits, and whether the machines are in order."""

from pathlib import Path
from typing import Annotated

import typer

from launch.cli.shared import ConfigPath, Overrides, argument, gib, option, panel, run_folder

commands = typer.Typer()
command = panel(commands, "Before a run")


@command()
def plan(
    config: ConfigPath,
    gpus: Annotated[
        int,
        option(
            "The number of GPUs for learner and servers together. With launch.placement=colocated both sides have all.",
            min=1,
            max=100_000,
        ),
    ],
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        option("For its memory and the seconds of a step: h100, h200, a100, or a description FILE.yaml."),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        gib("The memory of one GPU. Left out: that of --gpu. Without --gpu there are no seconds to rank by."),
    ] = None,
    gpus_per_node: Annotated[
        int, option("GPUs of a node, which holds whole TP groups.", min=1, max=1024)
    ] = 8,
    prompt_tokens: Annotated[int | None, option("Tokens of a prompt; up to 256 if left out.", min=1)] = None,
    response_tokens: Annotated[
        int | None,
        option("Tokens of a response in the mean. Left out: half of rollout.max_new_tokens.", min=1),
    ] = None,
    response_spread: Annotated[
        float | None,
        option(
            "Spread of the responses' lengths: the standard deviation of their logarithm. Left out: 0.5; 0: all are alike.",
            min=0,
            max=5,
        ),
    ] = None,
    measured: Annotated[Path | None, option("A table of `tandem mismatch`; it decides first.")] = None,
    top: Annotated[int, option("Print this many pairs.", min=1)] = 10,
    report: Annotated[Path | None, option("With --gpu: write a page with pictures, OUT.html.")] = None,
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
        option(
            "A rank to simulate; several times for several. Left out: the first rank of the first, a middle and the last "
            "pipeline stage."
        ),
    ] = None,
    gpu_memory: Annotated[float | None, gib("GiB of each GPU: exit code 1 where a rank takes more.")] = None,
    json: Annotated[Path | None, option("Also write the figures into this file.", metavar="FILE")] = None,
) -> None:
    """Run the learner's code of some ranks without weights and GPUs: peak memory by part, collectives, FLOPs and what is
    sent to the servers. The model's config.json is enough."""
    from launch.commands.simulate import print_simulation

    fit = print_simulation(config, overrides or [], ranks=rank, gpu_memory=gpu_memory, json_path=json)
    raise typer.Exit(0 if fit else 1)


@command()
def selftest(
    folder: Annotated[
        Path, option("A folder in which a new folder for models, logs and report is made.", metavar="DIR")
    ] = Path("runs"),
    only: Annotated[
        list[str] | None,
        option("Make only this check and those that it needs; may be repeated.", metavar="NAME"),
    ] = None,
    seed: Annotated[int, option("The seed of models, data and samples.", min=0)] = 0,
) -> None:
    """Check this machine with the real engines, on a new tiny model: log-probs, transfer, memory, training. Run
    it first on new hardware, and attach its selftest.txt to a bug report."""
    from launch.commands.selftest import selftest as check_everything

    if not check_everything(folder, only or [], seed=seed):
        raise typer.Exit(1)


@command("check-cluster")
def check_cluster(
    config: Annotated[Path | None, argument("The config that is to run.", "CONFIG")] = None,
    overrides: Overrides = None,
    folder: Annotated[
        Path | None, option("A folder the nodes share; launch.runs_dir if left out.", metavar="FOLDER")
    ] = None,
    nodes: Annotated[int | None, option("Nodes that run this command; known in a Slurm step.", min=1)] = None,
    node: Annotated[int | None, option("The number of this node among them, from 0.", min=0)] = None,
    timeout: Annotated[float, option("Seconds to wait for the others, and for a collective.", min=1)] = 60.0,
    run: Annotated[
        Path | None, option("An active run: list the ports that it listens on here, instead.", metavar="RUN")
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
    model: Annotated[Path, argument("A Hugging Face folder; its tokenizer is enough.", "MODEL")],
    tools: Annotated[bool, option("As for an environment with tools, and their replies.", "--tools")] = False,
    argument: Annotated[
        list[str] | None,
        option("Of the template, e.g. enable_thinking=false; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Check a model's chat template for environments of several turns: whether new messages can follow what was
    sampled, token by token, and where the template would rewrite it."""
    from launch.commands.check_template import check_template as check

    if not check(model, with_tools=tools, arguments=argument or []):
        raise typer.Exit(1)


@command("make-tiny-model")
def make_tiny_model(
    folder: Annotated[Path, argument("The folder to write", "FOLDER")],
    seed: Annotated[int, option("The seed of the random weights.")] = 0,
    family: Annotated[str, option("The family of the model, a model_type of docs/model.md.")] = "qwen3",
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
    folder: Annotated[Path, argument("A Hugging Face folder with FP8 or MXFP4 weights.", "FOLDER")],
    out: Annotated[Path, argument("The folder to write", "OUT")],
) -> None:
    """Write a model that is published in FP8 (DeepSeek-V3, Qwen3-FP8) or MXFP4 (gpt-oss) in bfloat16, in which learner and
    servers load it."""
    from launch.commands.dequantise import dequantise as write_dequantised

    write_dequantised(folder, out)
