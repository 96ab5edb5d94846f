"""The roles of a run. Each is a separate command, which the launcher starts, or a host without the launcher."""

from typing import Annotated

import typer

from launch.cli.shared import RunPath, option, panel

commands = typer.Typer()
command = panel(commands, "Roles, one at a time")


ROLES = {
    "sample": "Run one role alone: the sampling driver of a run.",
    "learn": "Run one role alone, under torchrun: a Megatron rank of a run.",
    "sft-rank": "Under torchrun: a Megatron rank of a warm start.",
    "replay-rank": "A Megatron process that replays a step with gradients of the parameters.",
    "verify-rank": "Under torchrun: a Megatron rank that sends other weights to servers, to verify the transfer.",
    "mismatch-draw": "Sample and score prompts with the servers of a folder, for a study of mismatch.",
    "score-rank": "Under torchrun: a Megatron rank that scores samples, for a study of mismatch.",
    "selftest-rank": "Under torchrun: the work of one check of the selftest.",
    "export-rank": "A Megatron process that writes a checkpoint as a Hugging Face folder.",
}
"""The help of the roles other than serve. Help lists only those of a training run."""


def _add_role(name: str, help_text: str) -> None:
    def run(run_folder: RunPath) -> None:
        from launch.roles.start import run_role

        run_role(name, run_folder)

    command(name, help=help_text, hidden=name not in ("sample", "learn"))(run)


@command()
def serve(
    run_folder: RunPath,
    node: Annotated[
        int | None, option("Of the servers' nodes, from 0; in a Slurm step SLURM_NODEID if left out.")
    ] = None,
) -> None:
    """Run one role alone: the SGLang servers of a run, or those of one node."""
    from launch.roles.start import run_role

    run_role("serve", run_folder, node)


for _name, _help in ROLES.items():
    _add_role(_name, _help)
