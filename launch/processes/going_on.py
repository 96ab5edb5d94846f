"""How to continue a run that has ended: one answer for all who print it (train, status, stop and the Slurm job)."""

import re
import shlex

from configs.reading.files import text_of
from launch.processes.run_folder import RunFolder
from rollout.terminal_text import tandem_command


def next_command(folder: RunFolder, command: str = "train", *, here: bool = False) -> str:
    """The command that continues from the newest checkpoint or, without one, starts from the beginning.

    command: the command that starts such a run on this machine. here: the run continues on this machine, even if a Slurm job
    ran it before.
    """
    is_saved = folder.newest_checkpoint() is not None
    has_script = folder.script.exists()
    if has_script and not here and not _is_of_another(folder):
        return f"sbatch {shlex.quote(str(folder.script))}"
    if (has_script or folder.job.exists()) and not here:  # an element of an array has no script of its own
        return job_command(folder)
    return tandem_command("resume", folder.path) if is_saved else tandem_command(command, folder.config)


def job_command(folder: RunFolder) -> str:
    """The same, in a Slurm job with its own batch script."""
    resume = [f"resume={folder.path}"] if folder.newest_checkpoint() is not None else []
    return tandem_command("slurm", folder.config, *resume, "--submit")


def _is_of_another(folder: RunFolder) -> bool:
    """Whether the batch script runs another folder, from which this one was moved or copied."""
    runs = re.search(r" -m launch job (.+)$", text_of(folder.script), re.MULTILINE)
    return runs is not None and runs[1] != shlex.quote(str(folder.path.resolve()))


def way_on(folder: RunFolder, command: str = "train", *, here: bool = False) -> str:
    """The same, as the end of a sentence."""
    verb = "start again" if folder.newest_checkpoint() is None else "continue"
    return f"{verb} with `{next_command(folder, command, here=here)}`"
