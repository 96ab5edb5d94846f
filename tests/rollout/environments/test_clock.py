"""Deadlines of an episode: by hand, and against a slow account of random waits."""

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.environments.clock import EpisodeClock
from tests.support.jumping_loop import jump, run_jumping


async def expires(clock: EpisodeClock, seconds: float) -> None:
    async with clock.deadline(seconds):
        await asyncio.Event().wait()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["run", "wait", "end"]), st.integers(1, 50)), min_size=1, max_size=12
    ),
    limits=st.lists(st.integers(1, 200), min_size=1, max_size=3),
)
def test_a_deadline_counts_the_time_without_waits(steps, limits):
    async def scenario():
        clock, waits, counted = EpisodeClock(), [], 0
        tasks = [asyncio.create_task(expires(clock, limit + 0.5)) for limit in limits]
        await jump(0)
        for what, seconds in steps:
            if what == "wait":
                waits.append(ExitStack())
                waits[-1].enter_context(clock.stopped())
            elif what == "end" and waits:
                waits.pop(0).close()
            await jump(seconds)
            counted += 0 if waits else seconds
            assert [task.done() for task in tasks] == [counted > limit for limit in limits]
        for wait in waits:
            wait.close()
        await jump(1000)
        for task in tasks:
            with pytest.raises(TimeoutError):
                task.result()

    run_jumping(scenario())


def test_a_deadline_that_begins_during_a_wait_begins_to_count_behind_it():
    async def scenario():
        clock = EpisodeClock()
        with clock.stopped():
            task = asyncio.create_task(expires(clock, 10.0))
            await jump(100)
        await jump(9)
        assert not task.done()
        await jump(2)
        with pytest.raises(TimeoutError):
            await task

    run_jumping(scenario())
