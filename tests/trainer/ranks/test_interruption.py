"""Interruptions that are held back until the step is recorded."""

import pytest

from rollout.client import RolloutError
from trainer.ranks.interruption import Postponed, StopRequested


def interrupt(error: Exception):
    raise error


@pytest.mark.parametrize("first", [StopRequested("first"), RolloutError("first")])
def test_the_first_interruption_is_held_back_and_skips_what_need_not_follow_it(first):
    rest, done = Postponed(), []
    assert rest.attempt(lambda: 1) == 1
    rest.release()
    assert rest.attempt(lambda: interrupt(first)) is None
    assert rest.attempt(lambda: done.append("skipped")) is None and done == []
    assert rest.attempt(lambda: 2, in_any_case=True) == 2
    assert rest.attempt(lambda: interrupt(RolloutError("second")), in_any_case=True) is None
    with pytest.raises(type(first), match="first"):
        rest.release()


def test_any_other_error_ends_the_step_at_once():
    rest = Postponed()
    with pytest.raises(KeyError):
        rest.attempt(lambda: interrupt(KeyError("x")))
    rest.release()
