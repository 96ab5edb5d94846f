"""A trained model that finds the disk full: how often it is written, until when, and what the user reads."""

from pathlib import Path

import pytest

from trainer import waiting_for_space
from trainer.waiting_for_space import save_when_there_is_space

FULL = "could not write the Hugging Face folder: Error while serializing: I/O error: No space left on device (os error 28)"
TARGET = Path("run/hf")


class Clock:
    """Only pauses take time."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(waiting_for_space, "time", self)
        monkeypatch.setattr(waiting_for_space, "from_first_rank", lambda mine: mine)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def saving(failures: list[str]):
    asked = []

    def save(folder: Path) -> None:
        asked.append(folder)
        if failures:
            raise OSError(failures.pop(0))

    return save, asked


@pytest.mark.parametrize("count", [0, 1, 20])
def test_it_is_written_once_there_is_space(monkeypatch, count):
    clock, (save, asked), told = Clock(monkeypatch), saving([FULL] * count), []
    save_when_there_is_space(save, TARGET, told.append)
    assert asked == [TARGET] * (count + 1) and len(told) == count
    assert clock.now == 1000.0 + 30 * count
    assert not told or told[0] == f"{FULL}; free space: it is tried again for 10 minutes"


def test_it_gives_up_after_ten_minutes(monkeypatch):
    clock, (save, asked) = Clock(monkeypatch), saving([FULL] * 100)
    with pytest.raises(OSError, match="No space left on device"):
        save_when_there_is_space(save, TARGET, lambda text: None)
    assert clock.now == 1600.0 and len(asked) == 21


def test_a_stop_ends_the_wait(monkeypatch):
    clock, (save, asked), stops = Clock(monkeypatch), saving([FULL] * 100), iter([False, False, True])
    with pytest.raises(OSError, match="No space left on device"):
        save_when_there_is_space(save, TARGET, lambda text: None, stop_requested=lambda: next(stops))
    assert clock.now == 1060.0 and len(asked) == 3


def test_another_error_is_not_waited_for(monkeypatch):
    clock, (save, asked) = (
        Clock(monkeypatch),
        saving(["could not write the Hugging Face folder: Permission denied"]),
    )
    with pytest.raises(OSError, match="Permission denied"):
        save_when_there_is_space(save, TARGET, lambda text: None)
    assert clock.now == 1000.0 and asked == [TARGET]
