"""The roles of a run, each of which is a command of its own: the launcher starts them, and hosts without it."""

from typing import Annotated

import typer

from launch.cli.shared import RunPath, command_of

commands = typer.Typer()
command = command_of(commands, "Roles, one at a time")


def _role_command(name: str, help_text: str, hidden: bool = False) -> None:
    def run(run_folder: RunPath) -> None:
        from launch.roles.start import run_role

        run_role(name, run_folder)

    command(name, help=help_text, hidden=hidden)(run)


@command()
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
