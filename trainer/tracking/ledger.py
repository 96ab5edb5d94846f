"""``RUN/ledger.jsonl``: the fate of every group of responses, a line per step.

A group is a prompt with its responses, and its number is its place in the order of the data. Each group up to
the newest step was either trained on in exactly one step, or left out for lack of signal (dynamic sampling).
Responses of a group share its fate, except that a response whose reward failed is not trained on. Groups that
were sampled ahead when a run was interrupted are in no line: the resumed run samples them again, under the
same numbers.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.errors import counted
from configs.reading.files import openable
from rollout.sampling.messages import SamplingStats
from trainer.file_system import LineFile, write_whole

LEDGER = "ledger.jsonl"


class LedgerLine(BaseModel):
    """The groups that one step has used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    first: int
    """Number of the first group; the others follow without a gap."""
    prompts: list[str]
    """The id of each group's prompt."""
    without_signal: list[int]
    """Numbers of the groups that were left out, because dynamic sampling found no difference between their siblings."""
    failed_rewards: int
    """Responses of these groups whose reward failed."""

    @property
    def end(self) -> int:
        """The number of the next step's first group."""
        return self.first + len(self.prompts)

    @property
    def trained(self) -> int:
        return len(self.prompts) - len(self.without_signal)


class Ledger:
    """Writes the ledger of a run, in one process only.

    keep_until: the last step to keep. Later steps run again, so their lines are removed.
    """

    def __init__(self, path: Path, *, keep_until: int):
        self.last_step = 0
        """The step of the newest line that was kept."""
        write_whole(path, "".join(self._kept(path, keep_until)).encode(), flush=True)
        self._file = LineFile(path)

    def _kept(self, path: Path, keep_until: int) -> Iterator[str]:
        for line in read_ledger(path) if path.exists() else ():
            if line.step <= keep_until:
                self.last_step = line.step
                yield f"{json.dumps(line.model_dump())}\n"

    def enter(self, step: int, stats: SamplingStats) -> None:
        """On a full disk the line is written with the next one. The tracker's lines wait too, and it warns."""
        line = LedgerLine(
            step=step,
            first=stats.first_group,
            prompts=stats.prompts,
            without_signal=stats.without_signal,
            failed_rewards=stats.failed_rewards,
        )
        self._file.write(json.dumps(line.model_dump()))

    def close(self) -> None:
        self._file.close()


def read_ledger(path: Path) -> Iterator[LedgerLine]:
    """The complete lines, one at a time, because all lines of a long run take a gigabyte. A line that a crash has
    torn is left out. Raises OSError."""
    with openable(path).open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with suppress(ValidationError):
                yield LedgerLine.model_validate_json(text)


def _wrong_behind(before: LedgerLine | None, line: LedgerLine) -> str | None:
    """The problem of a line: a missing step, or a group that no step has used or that two steps have used.
    ``before``: the line before it, if there is one."""
    if before is not None:
        if line.step != before.step + 1:
            return f"step {line.step} follows step {before.step}"
        if line.first > before.end:
            return f"no step has used the groups {before.end} to {line.first - 1}, between steps {before.step} and {line.step}"
        if line.first < before.end:
            return f"steps {before.step} and {line.step} have both used the groups {line.first} to {before.end - 1}"
    if strangers := set(line.without_signal) - set(range(line.first, line.end)):
        return f"step {line.step} leaves out groups that it does not have: {sorted(strangers)[:5]}"
    return None


def summary(lines: Iterable[LedgerLine]) -> str:
    """A sentence on the fate of all groups, or on the first problem if a group does not have exactly one
    fate."""
    trained = left_out = failed = 0
    before, wrong, first_step = None, None, None
    for line in lines:
        first_step = first_step or line.step
        trained, left_out = trained + line.trained, left_out + len(line.without_signal)
        failed += line.failed_rewards
        wrong = wrong or _wrong_behind(before, line)
        before = line
    if before is None:
        return "no group yet"
    text = f"{counted(trained, 'group')} trained on, each in one step"
    text += f"; {left_out:,} left out, since their siblings do not differ" if left_out else ""
    text += f"; {counted(failed, 'reward')} failed" if failed else ""
    text += f"; the ledger begins with step {first_step}" if first_step != 1 else ""
    return text if wrong is None else f"NOT BALANCED: {wrong}"
