"""The rule of which groups may start, and the pool that follows it: random durations, kills and resumes,
groups without signal."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout.records import Group
from rollout.sampling.pool import GroupPool, ScoredGroup, step_end


def end_by_rounds(start: int, count: int, max_rounds: int, lacks: list[bool]) -> int:
    """The slow reference: sample in rounds, each as many groups as are still missing."""
    used, good = start, 0
    for _ in range(max_rounds):
        for _ in range(count - good):
            good += not lacks[used]
            used += 1
    return used


LACKS = st.lists(st.booleans(), min_size=80, max_size=80)


@given(lacks=LACKS, start=st.integers(0, 20), count=st.integers(1, 6), max_rounds=st.integers(1, 5))
@example(lacks=[True] * 80, start=3, count=4, max_rounds=3)
def test_a_step_takes_the_groups_that_rounds_would_sample(lacks, start, count, max_rounds):
    assert step_end(start, count, max_rounds, lacks) == end_by_rounds(start, count, max_rounds, lacks)


@given(
    lacks=LACKS, known=st.lists(st.booleans(), min_size=80, max_size=80),
    count=st.integers(1, 5), max_rounds=st.integers(1, 4), steps=st.integers(1, 4),
)  # fmt: skip
def test_what_may_start_on_part_of_the_outcomes_belongs_to_the_steps_that_it_was_started_for(
    lacks, known, count, max_rounds, steps
):
    early = [lack and is_known for lack, is_known in zip(lacks, known, strict=True)]
    ends = []
    for outcomes in (early, lacks):
        end = 0
        for _ in range(steps):
            end = step_end(end, count, max_rounds, outcomes)
        ends.append(end)
    assert ends[0] <= ends[1]


@dataclass
class Simulation:
    """A learner and a pool whose groups take random numbers of turns of the event loop. A group's tokens have
    the versions that were current at their turn. Groups start at the learner's request, and with ``at_update`` also at
    once when its weights have moved, while it records and saves."""

    count: int
    staleness: int
    max_rounds: int
    seed: int
    at_update: bool = True
    newest: int = 0
    trained: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    versions: dict[int, set[int]] = field(default_factory=dict)

    def draw(self, *what) -> random.Random:
        return random.Random(f"{self.seed} {what}")

    def lacks_signal(self, number: int) -> bool:
        return self.max_rounds > 1 and self.draw("signal", number).random() < 0.4

    async def sample(self, number: int) -> ScoredGroup:
        self.started.append(number)
        if self.max_rounds == 1:
            assert number < (self.newest + self.staleness + 1) * self.count, "the rule"
        seen = {self.newest}
        for _ in range(self.draw("turns", number, len(self.started)).randrange(12)):
            await asyncio.sleep(0)
            seen.add(self.newest)
        self.versions[number] = seen
        return ScoredGroup(
            group=Group(group_id=number, prompt_id=f"p{number}", trajectories=[]),
            has_signal=not self.lacks_signal(number),
            failures=[],
            num_usable=0,
        )

    async def train(self, steps: int, *, kill_after: set[int]) -> None:
        pool = GroupPool(self.sample, max_rounds=self.max_rounds)
        saved = 0

        def admit() -> None:
            pool.admit(self.count, ahead=min(self.staleness, steps - 1 - self.newest))
            if self.max_rounds == 1:
                admitted = min(self.newest + self.staleness + 1, steps) * self.count
                assert pool.first + pool.running + pool.ready == admitted, "all that the rule allows"

        while self.newest < steps:
            admit()
            scored = await pool.next_step()
            pool.hand_out(len(scored))
            self.lags += [self.newest - v for s in scored for v in self.versions[s.group.group_id]]
            for _ in range(self.draw("train", self.newest).randrange(15)):
                await asyncio.sleep(0)
            if self.newest in kill_after:  # before the step is complete: it is done again from the start
                kill_after = kill_after - {self.newest}
                await pool.restart(0)
                pool = GroupPool(self.sample, max_rounds=self.max_rounds)
                await pool.restart(saved)
                continue
            self.trained.append([s.group.group_id for s in scored])
            saved, self.newest = pool.first, self.newest + 1
            if self.at_update and self.newest < steps:
                admit()
            for _ in range(self.draw("save", self.newest).randrange(15)):
                await asyncio.sleep(0)
        assert pool.running == pool.ready == 0


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 5), staleness=st.integers(0, 4),
    max_rounds=st.integers(1, 4), kills=st.sets(st.integers(0, 7), max_size=3), at_update=st.booleans(),
)  # fmt: skip
def test_every_group_is_trained_once_in_order_and_none_is_too_old(
    seed, count, staleness, max_rounds, kills, at_update
):
    run = Simulation(count, staleness, max_rounds, seed, at_update)
    asyncio.run(asyncio.wait_for(run.train(8, kill_after=kills), 30))
    numbers = [number for step in run.trained for number in step]
    assert numbers == list(range(len(numbers)))
    assert max(run.lags) <= staleness and min(run.lags) >= 0
    assert set(run.started) == set(numbers)  # nothing is sampled that no step takes
    synchronous = Simulation(count, 0, max_rounds, seed)
    asyncio.run(asyncio.wait_for(synchronous.train(8, kill_after=set()), 30))
    assert run.trained == synchronous.trained
    assert set(synchronous.lags) == {0}


def test_staleness_is_used_where_training_takes_time():
    run = Simulation(count=3, staleness=2, max_rounds=1, seed=0)
    asyncio.run(run.train(12, kill_after=set()))
    assert max(run.lags) == 2


def test_a_group_that_fails_is_told_of_when_its_step_is_due():
    async def sample(number: int) -> ScoredGroup:
        if number == 3:
            raise ValueError("group 3")
        group = Group(group_id=number, prompt_id="p", trajectories=[])
        return ScoredGroup(group=group, has_signal=True, failures=[], num_usable=0)

    async def steps():
        pool = GroupPool(sample, max_rounds=1)
        pool.admit(2, ahead=1)
        assert [s.group.group_id for s in await pool.next_step()] == [0, 1]
        pool.hand_out(2)
        pool.admit(2, ahead=1)
        with pytest.raises(ValueError, match="group 3"):
            await pool.next_step()
        await pool.restart(2)
        assert pool.first == 2 and pool.running == pool.ready == 0

    asyncio.run(asyncio.wait_for(steps(), 20))


def test_a_restart_ends_groups_that_would_never_be_finished():
    async def sample(number: int) -> ScoredGroup:
        await asyncio.Event().wait()
        raise AssertionError

    async def steps():
        pool = GroupPool(sample, max_rounds=1)
        pool.admit(2, ahead=1)
        await asyncio.sleep(0)  # they have started
        await pool.restart(2)
        assert pool.first == 2 and pool.running == pool.ready == 0

    asyncio.run(asyncio.wait_for(steps(), 20))


def test_a_replacement_starts_while_nobody_waits():
    """A group without signal admits a further one at once, not when the learner asks again."""
    is_handed_out, is_started = asyncio.Event(), asyncio.Event()

    async def sample(number: int) -> ScoredGroup:
        if number in (2, 3):
            await is_handed_out.wait()
        if number == 4:
            is_started.set()
        group = Group(group_id=number, prompt_id="p", trajectories=[])
        return ScoredGroup(group=group, has_signal=number != 2, failures=[], num_usable=0)

    async def steps():
        pool = GroupPool(sample, max_rounds=2)
        pool.admit(2, ahead=1)
        await pool.next_step()
        pool.hand_out(2)
        assert (pool.running, pool.ready) == (2, 0)
        is_handed_out.set()
        await is_started.wait()

    asyncio.run(asyncio.wait_for(steps(), 20))
