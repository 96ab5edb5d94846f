"""Writes a trained model once the disk has space for it."""

import time
from collections.abc import Callable
from pathlib import Path

from parallel.checkpoints.checkpoint import tells_of_no_space
from parallel.rank_objects import from_first_rank

WITHIN_S = 600.0
"""How long a full disk is waited for, by rank 0's clock."""
AGAIN_S = 30.0
"""Pause between two attempts, each of which may fill a disk that others use too."""


def save_when_there_is_space(
    save: Callable[[Path], None],
    target: Path,
    say: Callable[[str], None],
    *,
    stop_requested: Callable[[], bool] = lambda: False,
) -> None:
    """Call ``save(target)``, a collective of all ranks that raises OSError on all of them. If the disk is full, try again for
    ``WITHIN_S``, in which somebody may free space. Otherwise the work of a whole run could be lost.

    ``stop_requested`` is a collective too; a request ends the wait. Raises the last OSError.
    """
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            return save(target)
        except OSError as error:
            if not tells_of_no_space(str(error)) or stop_requested():
                raise
            left_s = from_first_rank(deadline - time.monotonic())
            if left_s <= 0:
                raise
            say(f"{error}; free space: it is tried again for {left_s / 60:.0f} minutes")
        time.sleep(AGAIN_S)
