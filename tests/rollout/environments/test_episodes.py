"""Episodes around a deterministic engine: exact tokens, limits, failures, and what the learner packs of them."""

import asyncio
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RunConfig
from configs.schema.environment import TokenEnvironment
from configs.schema.rollout import ResampleGroups
from rollout.client import GenerationError
from rollout.environments import Outcome, loading
from rollout.environments.context import EpisodeLimits, Texts, turn_seed
from rollout.environments.episodes import Episodes, SingleTurns
from rollout.environments.loading import make_environment, sample_makers
from rollout.environments.sequence import TokenSequence
from rollout.records import FinishReason, Group, Prompt, Score, Status
from rollout.sampling.sampler import _has_signal
from tests.support.fake_engine import FakeEngine, fake_tokens
from tests.support.jumping_loop import jump, run_jumping
from tests.support.records import completion
from trainer.batch.exact_turns import TurnsDiffer
from trainer.batch.sharing_out import share_out
from trainer.batch.step_batch import step_batch
from trainer.step_metrics import turn_metrics

STOP, VOCAB, LARGEST = 0, 20, 2**20
PROMPT = Prompt(prompt_id="p", token_ids=[3, 4, 5], text="345", reference="")


class Numbers:
    """Texts are numbers with blanks between them."""

    def __len__(self) -> int:
        return LARGEST

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


TEXTS = Texts(tokenizer=Numbers(), end_token_ids=frozenset([STOP]), vocab_size=LARGEST)


async def score_by_length(prompt: Prompt, text: str, num_tokens: int, finish_reason: FinishReason) -> Score:
    return Score(
        value=num_tokens / 2,
        parts={"stopped": float(finish_reason is FinishReason.STOP)},
        correct=text == "7",
    )


def episodes(run, *, engine=None, limits=None, score=None, end_s=0.0, **config) -> Episodes:
    class Scripted:
        async def run(self, problem, context):
            return await run(problem, context)

    return Episodes(
        Scripted(),
        config=TokenEnvironment(environment="m:C", **config),
        limits=limits or EpisodeLimits(max_turns=9, max_tokens=200, max_new_tokens=6),
        texts=TEXTS,
        score=score or score_by_length,
        end_s=end_s,
    )


def sample(maker, *, engine=None, seeds=(11, 12), prompt=PROMPT):
    return asyncio.run(maker.sample(engine or FakeEngine(), prompt, list(seeds), temperature=0.5))


def group_of(samples, number=0) -> Group:
    trajectories = [t for i, s in enumerate(samples) for t in s.trajectories(number, i, PROMPT)]
    return Group(group_id=number, prompt_id="p", trajectories=trajectories)


def pack(groups, **options):
    (share,) = share_out(groups, num_minibatches=1, dp_size=1, token_budget=10_000, **options)
    return share, step_batch(share)


def test_one_turn_of_an_environment_is_a_single_turn():
    async def one_turn(problem, context):
        context.observe(problem.token_ids)
        return Outcome.of(await context.score(context.decode(await context.act())))

    plain = SingleTurns(texts=TEXTS, max_new_tokens=6, score=score_by_length)
    seeds = range(20)
    assert group_of(sample(episodes(one_turn), seeds=seeds)) == group_of(sample(plain, seeds=seeds))


async def fails_for_long_answers(prompt, text, num_tokens, finish_reason) -> Score:
    failed = "the judge was late" if num_tokens > 3 else None
    return Score(value=0.0 if failed else 1.0, parts={"a": 1.0}, correct=num_tokens < 6, error=failed)


def test_a_failed_reward_of_a_single_turn_is_no_score_like_that_of_an_episode():
    """Beside right siblings a 0 would be a difference to learn from."""

    async def one_turn(problem, context):
        context.observe(problem.token_ids)
        return Outcome.of(await context.score(context.decode(await context.act())))

    plain = SingleTurns(texts=TEXTS, max_new_tokens=6, score=fails_for_long_answers)
    played, seeds = episodes(one_turn), range(20)
    played._score = fails_for_long_answers
    of_episodes, of_single_turns = sample(played, seeds=seeds), sample(plain, seeds=seeds)
    assert group_of(of_episodes) == group_of(of_single_turns)
    for one in of_single_turns:
        failed = one.num_sampled > 3
        assert (one.reward, one.error) == ((None, "the judge was late") if failed else (1.0, None))
        assert one.correct == (one.num_sampled < 6)  # by the part that decides
    assert [one.correct for one in of_episodes] == [one.correct for one in of_single_turns]
    assert any(one.correct for one in of_single_turns if one.error) and not all(
        one.correct for one in of_single_turns
    )
    assert 3 < sum(one.reward is None for one in of_single_turns) < 17
    for compare in ("reward", "correct"):
        assert not _has_signal(of_single_turns, ResampleGroups(type="resample", compare=compare))
    _, batch = pack([group_of(of_single_turns)])
    learned = sum(one.num_sampled for one in of_single_turns if one.reward is not None)
    assert int(batch.packed.response_mask_T.sum()) == learned


@settings(max_examples=60)
@given(
    observations=st.lists(st.lists(st.integers(1, VOCAB - 1), max_size=5), min_size=1, max_size=6),
    seeds=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4, unique=True),
    version=st.integers(0, 5),
)
def test_a_turn_continues_exactly_what_came_before(observations, seeds, version):
    """Against a slow reference that keeps one list of (token, log-prob, version, sampled) per episode."""

    async def run(problem, context):
        context.observe(problem.token_ids)
        for observed in observations:
            await context.act()
            context.observe(observed)
        return Outcome(reward=1.0)

    engine = FakeEngine(version=version)
    samples = sample(episodes(run), engine=engine, seeds=seeds)
    for seed, one in zip(seeds, samples, strict=True):
        rows = [(token, 0.0, 0, False) for token in PROMPT.token_ids]
        for turn, observed in enumerate(observations):
            ids = [row[0] for row in rows]
            assert (tuple(ids), turn_seed(seed, turn), 0.5) in engine.calls
            response = fake_tokens(ids, turn_seed(seed, turn), max_new_tokens=6, vocab_size=VOCAB, stop=STOP)
            rows += [(token, np.float32(-(1 + token) / 0.5), version, True) for token in response]
            rows += [(token, 0.0, 0, False) for token in observed]
        (t,) = one.trajectories(0, 0, PROMPT)
        found = zip(t.token_ids, t.rollout_logprobs, t.token_versions, t.response_mask, strict=True)
        assert [tuple(map(float, row)) for row in found] == [tuple(map(float, row)) for row in rows]
        assert len(t.turns) == len(observations)
    share, batch = pack([group_of(samples)])
    sampled = sum(turn.end - turn.start for t in share.trajectories for turn in t.turns)
    assert int(batch.packed.response_mask_T.sum()) == sampled


@settings(max_examples=40)
@given(st.data())
def test_a_changed_token_is_found_before_it_is_trained_on(data):
    async def run(problem, context):
        context.observe(problem.token_ids)
        await context.act()
        context.observe([9, 9])
        await context.act()
        return Outcome(reward=1.0)

    group = group_of(sample(episodes(run)))
    pack([group])
    victim = data.draw(st.integers(0, 1))
    t = group.trajectories[victim]
    place = data.draw(st.integers(0, t.turns[-1].end - 1))
    change = data.draw(st.sampled_from(["token", "mask"]))
    if change == "token":
        ids = t.token_ids.copy()
        ids[place] += 1
        changed = replace(t, token_ids=ids)
    else:
        place = max(place, 1)  # the first token is no target, so its flag is not packed
        mask = t.response_mask.copy()
        mask[place] = ~mask[place]
        changed = replace(t, response_mask=mask)
    trajectories = [changed if i == victim else other for i, other in enumerate(group.trajectories)]
    with pytest.raises(TurnsDiffer, match=f"prompt p, sibling {victim}: .*(other tokens|response mask)"):
        pack([replace(group, trajectories=trajectories)])


async def never_ends(problem, context):
    context.observe(problem.token_ids)
    while True:
        await context.act()
        context.observe([1, 2])


def forks():
    """What to do in turn, each with the number of a context so far: act, observe, or fork at a share of its tokens."""
    step = st.tuples(
        st.sampled_from(("act", "observe", "fork")), st.integers(0, 5), st.sampled_from((None, 0.0, 0.3, 1.0))
    )
    return st.lists(step, min_size=1, max_size=12)


@settings(max_examples=80)
@given(script=forks(), seed=st.integers(0, 2**31 - 1))
def test_every_sampled_token_of_an_episode_that_forks_is_trained_on_once(script, seed):
    """Against a list of [tokens, places that this sequence sampled] per context."""
    wanted = []

    async def run(problem, context):
        contexts, rows = [context], [[list(problem.token_ids), []]]
        context.observe(problem.token_ids)
        for what, number, share in script:
            number %= len(contexts)
            chosen, row = contexts[number], rows[number]
            if what == "fork":
                at = None if share is None else int(share * len(row[0]))
                contexts.append(chosen.fork(at))
                rows.append([row[0][:at], []])
            elif what == "observe" or not row[0]:
                chosen.observe([9, 9])
                row[0] += [9, 9]
            else:
                response = (await chosen.act()).token_ids.tolist()
                row[1] += range(len(row[0]), len(row[0]) + len(response))
                row[0] += response
        wanted.extend(row for row in rows if row[1])
        return Outcome(reward=1.0)

    limits = EpisodeLimits(max_turns=99, max_tokens=9_000, max_new_tokens=6)
    (one,) = sample(episodes(run, limits=limits), seeds=[seed])
    group = group_of([one])
    if not wanted:
        assert one.reward is None and "before the policy's first turn" in one.error
        return
    assert [t.branch for t in group.trajectories] == list(range(len(wanted)))
    found = [(t.token_ids.tolist(), np.flatnonzero(t.response_mask).tolist()) for t in group.trajectories]
    assert sorted(found) == sorted((ids, places) for ids, places in wanted)
    _, batch = pack([group])  # compares each turn with what was sent
    assert int(batch.packed.response_mask_T.sum()) == sum(len(places) for _, places in wanted)


def test_forks_share_the_limit_of_turns_and_have_seeds_and_an_order_of_their_own():
    async def run(problem, context):
        context.observe(problem.token_ids)
        below = [context.fork() for _ in range(3)]
        below += [below[0].fork(), context.fork(at=0)]  # the last two never act
        await asyncio.gather(*(one.act() for one in (below[2], below[0], context, below[1])))
        await below[0].act()
        return Outcome(reward=1.0)

    limits = EpisodeLimits(max_turns=5, max_tokens=200, max_new_tokens=6)
    engine = FakeEngine()
    (one,) = sample(episodes(run, limits=limits), engine=engine, seeds=[11])
    assert one.status is Status.OK and [len(s.turns) for s in one.sequences] == [1, 2, 1, 1]
    assert len({call[1] for call in engine.calls}) == 5 and engine.calls[2][1] == 11
    (again,) = sample(episodes(run, limits=limits), seeds=[11])
    assert group_of([again]) == group_of([one])
    few = EpisodeLimits(max_turns=4, max_tokens=200, max_new_tokens=6)
    assert sample(episodes(run, limits=few), seeds=[11])[0].status is Status.TURN_LIMIT


def test_each_sequence_may_be_a_fork_of_the_one_before():
    """As of an agent that shortens its last observation at each turn. A recursion would end the run at a few hundred."""

    async def run(problem, context):
        context.observe(problem.token_ids)
        for _ in range(1500):
            context = context.fork()
        await context.act()
        return Outcome(reward=1.0)

    (one,) = sample(episodes(run), seeds=[11])
    assert one.status is Status.OK and [len(s.turns) for s in one.sequences] == [1]


def test_a_turn_has_what_the_environment_says_that_it_has_earned():
    async def run(problem, context):
        context.observe(problem.token_ids)
        with pytest.raises(ValueError, match="before the first act"):
            context.reward_turn(1.0)
        await context.act()
        context.reward_turn(0.5)
        context.reward_turn(0.25)
        context.observe([9])
        await context.act()
        context.reward_turn(-0.5, turn=0)
        with pytest.raises(ValueError, match="not finite"):
            context.reward_turn(math.nan)
        for turn in (2, -3):
            with pytest.raises(ValueError, match=f"turn {turn} of a sequence with 2 turns"):
                context.reward_turn(1.0, turn=turn)
        fork = context.fork()
        await fork.act()
        fork.reward_turn(-1)
        return Outcome(reward=2.0)

    (one,) = sample(episodes(run), seeds=[11])
    first, second = one.trajectories(0, 0, PROMPT)
    assert [turn.reward for t in (first, second) for turn in t.turns] == [0.25, None, -1.0]
    assert first.reward == second.reward == 2.0
    turns = pack([group_of([one])], credits_turns=True)[1].turn_rewards
    assert turns.rewards_V.tolist() == [0.25, 2.75, -1.0] and turns.sequence_ids_V.tolist() == [0, 0, 1]
    ends = [turn.end - 2 for t in (first, second) for turn in t.turns]
    assert turns.places_V.tolist() == ends


class Holding(FakeEngine):
    """Answers the first requests only after ``release``."""

    def __init__(self, held: int) -> None:
        super().__init__()
        self.held, self.release, self.cancelled = held, asyncio.Event(), 0

    async def generate_group(self, *arguments, **named):
        self.held -= 1
        if self.held >= 0:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return await super().generate_group(*arguments, **named)


async def forks_in_a_gather(problem, context):
    context.observe(problem.token_ids)
    first = await context.act()
    await asyncio.gather(*(context.fork().act() for _ in range(len(first.token_ids) and 3)))
    return Outcome(reward=1.0)


async def forks_in_a_task_group(problem, context):
    context.observe(problem.token_ids)
    await context.act()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(context.fork().act())
    return Outcome(reward=1.0)


@pytest.mark.parametrize("run", [forks_in_a_gather, forks_in_a_task_group])
def test_a_limit_of_one_fork_ends_the_requests_of_the_others(run):
    """The first turn is answered, the next two are held, and the fourth is one too many."""

    class HoldsTheForks(Holding):
        async def generate_group(self, *arguments, **named):
            if not self.calls:
                return await FakeEngine.generate_group(self, *arguments, **named)
            return await super().generate_group(*arguments, **named)

    async def play():
        engine = HoldsTheForks(held=2)
        limits = EpisodeLimits(max_turns=3, max_tokens=200, max_new_tokens=6)
        maker = episodes(run, limits=limits, reward_at_limit=-1.0)
        (one,) = await maker.sample(engine, PROMPT, [11], temperature=0.5)
        before = [len(s.turns) for s in one.sequences]
        assert (one.status, one.reward, engine.cancelled) == (Status.TURN_LIMIT, -1.0, 2)
        engine.release.set()
        await asyncio.sleep(0)
        assert [len(s.turns) for s in one.sequences] == before == [1]

    asyncio.run(play())


def test_a_dead_engine_behind_a_task_group_ends_the_run():
    engine = FakeEngine(fail=lambda prompt, seed: len(prompt) > 3)
    with pytest.raises(GenerationError, match="asked to fail"):
        sample(episodes(forks_in_a_task_group), engine=engine, seeds=[11])


async def cancels_its_own(problem, context):
    context.observe(problem.token_ids)
    task = asyncio.ensure_future(context.act())
    task.cancel()
    await task


async def observes_too_early(problem, context):
    context.observe(problem.token_ids)
    acting = asyncio.ensure_future(context.act())
    await asyncio.sleep(0)
    context.observe([1])
    await acting


async def acts_twice(problem, context):
    context.observe(problem.token_ids)
    await asyncio.gather(context.act(), context.act())


def observing(*token_ids):
    async def run(problem, context):
        context.observe(list(token_ids))

    return run


async def asks_for_nothing(problem, context):
    context.observe(problem.token_ids)
    await context.act(max_new_tokens=0)


async def ends_with(problem, context, **outcome):
    context.observe(problem.token_ids)
    await context.act()
    return Outcome(reward=1.0, **outcome)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (cancels_its_own, "CancelledError"),
        (observes_too_early, r"observe\(\) while act\(\) is under way; await it first, or fork"),
        (acts_twice, r"act\(\) while act\(\) is under way"),
        (
            observing(1, LARGEST),
            f"{LARGEST} is not a token id; token ids are integers from 0 to {LARGEST - 1}",
        ),
        (observing(1, -1), "-1 is not a token id"),
        (observing(1.7), "1.7 is not a token id"),
        (observing(True), "True is not a token id"),
        (asks_for_nothing, "max_new_tokens=0 must be at least 1"),
        (partial(ends_with, status="done"), "the status 'done'; give a Status"),
    ],
)
def test_a_mistake_of_the_environment_fails_its_episode_alone(run, message):
    (one,) = sample(episodes(run), seeds=[1])
    assert (one.reward, one.status) == (None, Status.FAILED) and re.search(message, one.error), one.error


def test_a_context_of_an_episode_that_is_over_does_nothing_more():
    kept = []

    async def run(problem, context):
        kept.append(context)
        return await ends_with(problem, context, correct="yes")

    (one,) = sample(episodes(run), seeds=[1])
    assert one.correct is True  # a plain truth, whatever was given
    for use in (lambda: kept[0].observe([1]), kept[0].fork, lambda: asyncio.run(kept[0].act())):
        with pytest.raises(RuntimeError, match="the episode is over"):
            use()


@pytest.mark.parametrize("at", [-1, 4])
def test_a_fork_beyond_the_tokens_is_refused(at):
    async def run(problem, context):
        context.observe(problem.token_ids)
        context.fork(at)

    (one,) = sample(episodes(run), seeds=[1])
    assert one.reward is None and f"cannot fork at token {at} of 3; use 0 to 3" in one.error


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        (EpisodeLimits(max_turns=3, max_tokens=200, max_new_tokens=6), Status.TURN_LIMIT),
        (EpisodeLimits(max_turns=99, max_tokens=30, max_new_tokens=6), Status.TOKEN_LIMIT),
    ],
)
@pytest.mark.parametrize("reward", [0.0, -1.0, None])
def test_a_limit_ends_the_episode_before_the_request(limits, status, reward):
    engine = FakeEngine()
    maker = episodes(never_ends, limits=limits, reward_at_limit=reward)
    for one in sample(maker, engine=engine, seeds=range(6)):
        assert (one.status, one.reward, one.error) == (status, reward, None)
        assert len(one.sequence) <= limits.max_tokens
        assert len(one.sequence.turns) <= limits.max_turns
    assert len(engine.calls) == sum(len(one.sequence.turns) for one in sample(maker, seeds=range(6)))


def test_a_turn_gets_the_room_that_is_left():
    async def run(problem, context):
        context.observe(problem.token_ids)
        while context.token_ids.size < 8:
            await context.act(max_new_tokens=100)
        return Outcome(reward=1.0)

    limits = EpisodeLimits(max_turns=99, max_tokens=8, max_new_tokens=6)
    assert {len(one.sequence) for one in sample(episodes(run, limits=limits), seeds=range(30))} == {8}


@pytest.mark.parametrize("refuses", ["the limit", "the server"])
def test_a_turn_whose_prompt_the_servers_do_not_take_ends_its_episode_alone(refuses):
    longest = 20
    limits = EpisodeLimits(max_turns=99, max_tokens=200, max_new_tokens=2)
    engine = FakeEngine()
    if refuses == "the limit":
        limits = replace(limits, max_prompt_tokens=longest)
    else:
        engine.longest_prompt = longest
    for one in sample(episodes(never_ends, limits=limits), engine=engine, seeds=range(6)):
        assert (one.status, one.reward, one.error) == (Status.TOKEN_LIMIT, 0.0, None)
        assert max(turn.start for turn in one.sequence.turns) <= longest < len(one.sequence)
    assert refuses == "the server" or max(len(ids) for ids, *_ in engine.calls) <= longest


def test_a_prompt_that_the_servers_do_not_take_is_not_scored():
    plain = SingleTurns(texts=TEXTS, max_new_tokens=6, score=score_by_length)
    made = sample(plain, engine=FakeEngine(longest_prompt=2))
    for one in made:
        assert (one.status, one.reward, one.sequence.turns) == (Status.TOKEN_LIMIT, None, [])
        assert one.error == "asked to refuse 3 tokens"
    pack([group_of([*made, *sample(plain)])])


def test_episodes_have_the_limits_of_the_servers(monkeypatch):
    """SGLang keeps 2 places free behind a sequence, and 7 behind a prompt."""

    class NeverEnds:
        async def run(self, problem, context):
            await never_ends(problem, context)

    config = RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "task": {"type": "countdown"},
            "rollout": {"max_new_tokens": 2, "server_args": {"context_length": 50}},
            "environment": {"type": "tokens", "environment": "m:C", "max_turns": 99},
        }
    )
    monkeypatch.setattr(loading, "make_environment", lambda block: NeverEnds())

    async def play(max_positions):
        engine = FakeEngine()
        async with sample_makers(
            config, scorer=SimpleNamespace(score=None), tokenizer=Numbers(), stop_token_ids=[STOP],  # pyright: ignore
            max_positions=max_positions, vocab_size=len(Numbers()),
        ) as samples_of:  # fmt: skip
            made = await samples_of("training").sample(engine, PROMPT, list(range(40)), temperature=0.5)
        assert {one.status for one in made} == {Status.TOKEN_LIMIT}
        longest_prompt = max(turn.start for one in made for turn in one.sequence.turns)
        return longest_prompt, max(len(one.sequence) for one in made)

    for max_positions, length in [(40, 40), (64, 50)]:
        longest_prompt, longest = asyncio.run(play(max_positions))
        assert longest_prompt == length - 7 and length - 7 < longest <= length - 2


async def raises(problem, context):
    context.observe(problem.token_ids)
    await context.act()
    raise KeyError("x")


async def raises_at_once(problem, context):
    raise OSError("no such tool")


async def hangs(problem, context):
    context.observe(problem.token_ids)
    await context.act()
    await asyncio.Event().wait()


class WaitsForServers(FakeEngine):
    """Each request waits for ``seconds`` until a server is there, and is answered at once."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    async def generate_group(self, *arguments, session=None, **named):
        assert session is not None
        with session.waiting():
            await jump(self.seconds)
        return await super().generate_group(*arguments, session=session, **named)


@pytest.mark.parametrize(("thinks_s", "status"), [(0.0, Status.OK), (201.0, Status.TIME_LIMIT)])
def test_waiting_for_servers_is_no_time_of_the_episode(thinks_s, status):
    """Three turns, and the environment's own time between them."""

    async def run(problem, context):
        context.observe(problem.token_ids)
        for _ in range(3):
            await context.act()
            await jump(thinks_s)
        return Outcome(reward=1.0)

    async def play():
        maker = episodes(run, timeout_s=600.0)
        (one,) = await maker.sample(WaitsForServers(1000.0), PROMPT, [11], temperature=0.5)
        assert one.status is status, one.error

    run_jumping(play())


@pytest.mark.parametrize(("thinks_s", "status"), [(0.0, Status.OK), (301.0, Status.TIME_LIMIT)])
def test_the_reward_is_no_time_of_the_episode(thinks_s, status):
    """A judge that takes longer than an episode may: it has retries and deadlines of its own, after which the run ends."""

    async def slow_score(problem, text, **_):
        await jump(1000.0)
        return Score(value=1.0)

    async def run(problem, context):
        context.observe(problem.token_ids)
        await context.act()
        await jump(thinks_s)
        score = await context.score("")
        await jump(thinks_s)
        return Outcome.of(score)

    async def play():
        (one,) = await episodes(run, score=slow_score, timeout_s=600.0).sample(
            FakeEngine(), PROMPT, [11], temperature=0.5
        )
        assert one.status is status, one.error

    run_jumping(play())


def returns(value):
    async def run(problem, context):
        context.observe(problem.token_ids)
        await context.act()
        return value

    return run


async def gives_a_number(problem, context):
    return Outcome.of(0.25)


@pytest.mark.parametrize(
    ("run", "status", "message"),
    [
        (raises, Status.FAILED, r"the environment raised KeyError: 'x' \(test_episodes.py:\d+ in raises\)"),
        (raises_at_once, Status.FAILED, "OSError: no such tool"),
        (hangs, Status.TIME_LIMIT, "environment.timeout_s=0.05"),
        (returns(None), Status.FAILED, "returned NoneType; return an Outcome"),
        (
            gives_a_number,
            Status.FAILED,
            r"returns, not 0\.25; a reward of your own is Outcome\(reward=\.\.\.\)",
        ),
        (returns(Outcome(reward=math.nan)), Status.REWARD_FAILED, "nan, which is not finite"),
        (returns(Outcome(reward=1.0, parts={"a": math.inf})), Status.REWARD_FAILED, "part 'a' is inf"),
        (returns(Outcome(reward="high")), Status.FAILED, "must be a number"),
        (returns(Outcome(reward=None)), Status.OK, "gave no reward"),
        (
            returns(Outcome(reward=0.5, error="odd")),
            Status.FAILED,
            "the reward 0.5 with the error 'odd'.*the reward None",
        ),
    ],
)
def test_what_goes_wrong_in_an_episode_is_no_score(run, status, message):
    limit = {"timeout_s": 0.05} if run is hangs else {}
    for one in sample(episodes(run, **limit)):
        assert (one.reward, one.status, one.correct) == (None, status, False)
        assert re.search(message, one.error), one.error
    pack([group_of(sample(episodes(run, **limit)))])  # even one without a turn has a place in the batch


def test_a_late_episode_is_told_the_limit_of_the_config():
    maker = episodes(hangs, timeout_s=0.05, end_s=0.01)
    (one,) = sample(maker, seeds=[11])
    assert one.error == "no outcome within environment.timeout_s=0.05 s and 0.01 s more to end the episode"


def test_a_failure_of_the_engine_is_no_failure_of_the_episode():
    with pytest.raises(GenerationError, match="asked to fail"):
        sample(episodes(never_ends), engine=FakeEngine(fail=lambda ids, seed: len(ids) > 6))


def test_no_more_episodes_run_at_once_than_the_config_allows():
    running = most = 0

    async def run(problem, context):
        nonlocal running, most
        running += 1
        most = max(most, running)
        context.observe(problem.token_ids)
        await context.act()
        running -= 1
        return Outcome(reward=1.0)

    sample(episodes(run, max_concurrency=3), seeds=range(12))
    assert most == 3


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("no_such_module:C", {}, "no module 'no_such_module'"),
        ("math:nothing", {}, "math has no 'nothing'"),
        ("math:pi", {}, "float, not a function; name module:Class"),
        ("collections:Counter", {}, "has no run"),
        ("decimal:Decimal", {"wrong": 1}, "cannot be made with options"),
    ],
)
def test_an_environment_that_cannot_be_made_says_why(path, options, message):
    with pytest.raises(ValueError, match=message):
        make_environment(TokenEnvironment(environment=path, options=options))


def test_metrics_of_turns_by_hand():
    def of(sibling, turns, reward, status=Status.OK, branch=0):
        sequence = TokenSequence()
        sequence.observe([1, 2, 3])
        for observed, sampled, cached in turns:
            sequence.observe(observed)
            sequence.append(completion(token_ids=sampled, rollout_logprobs=[-1.0] * len(sampled),
                token_versions=[0] * len(sampled), finish_reason=FinishReason.STOP, cached_tokens=cached))  # fmt: skip
        return sequence.trajectory(
            group_id=0,
            sibling_id=sibling,
            prompt_id=PROMPT.prompt_id,
            reward=reward,
            reward_parts={},
            status=status,
            branch=branch,
        )

    samples = [
        of(0, [([], [4, 5], 3), ([6], [7], 4), ([8, 9], [4], 6)], 1.0),
        of(1, [([], [4], 0)], None, Status.TIME_LIMIT),
    ]
    found = turn_metrics(samples)
    assert found["episode/turns_checked"] == 4 and found["episode/turns_max"] == 3
    assert found["episode/turns_mean"] == 2 and found["episode/observed_tokens"] == 3
    assert found["episode/sequences_mean"] == 1
    forked = turn_metrics([samples[0], of(0, [([], [7], 0)], 1.0, branch=1), samples[1]])
    assert forked["episode/turns_checked"] == 5 and forked["episode/turns_max"] == 4
    assert forked["episode/turns_mean"] == 2.5 and forked["episode/sequences_mean"] == 1.5
    assert forked["episode/not_scored_fraction"] == forked["episode/time_limit_fraction"] == 0.5  # of samples
    turns = [replace(turn, num_retractions=n) for turn, n in zip(samples[0].turns, (2, 0, 1), strict=True)]
    of_two_groups = turn_metrics(
        [replace(samples[0], turns=turns), replace(samples[1], group_id=1, sibling_id=0)]
    )
    assert of_two_groups["episode/turns_max"] == 3 and of_two_groups["episode/retracted_turns"] == 2
    assert found["episode/cached_fraction"] == (4 + 6) / (6 + 9)  # of turns after the first
    assert found["episode/not_scored_fraction"] == found["episode/time_limit_fraction"] == 0.5
    assert found["episode/failed_fraction"] == found["episode/turn_limit_fraction"] == 0.0
