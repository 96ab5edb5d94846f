"""The sample role around a deterministic engine: order, grouping, alignment, versions, resume, and the wire
to the learner."""

import asyncio
import hashlib
import itertools
import json
import logging
import math
import re
import statistics
import threading
import time
import weakref
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RunConfig
from configs.schema.launch import EvaluationConfig, TrackingConfig
from configs.schema.reward import ModelReward
from configs.schema.rollout import ResampleGroups, RolloutConfig
from configs.schema.sampler import MixtureOrder
from parallel.planning.architecture import architecture_of
from rollout.client import GenerationError
from rollout.records import FinishReason, Group, Prompt, Score, Status
from rollout.rewards.served import RewardModelError
from rollout.rewards.worker import WorkerStartError
from rollout.run_key import run_key
from rollout.sampling import remote as remote_module
from rollout.sampling import role as role_module
from rollout.sampling.messages import (
    BeforeSelection,
    Done,
    Evaluated,
    Groups,
    SampleRoleLost,
    SamplerState,
    SamplingError,
    decode_reply,
    encode,
)
from rollout.sampling.mixture import mixture_order
from rollout.sampling.order import epoch_order
from rollout.sampling.prompt_room import prompt_room
from rollout.sampling.remote import RemoteSampler
from rollout.sampling.role import load_checked_task, run_sample_role, serve, task_that_fits
from rollout.sampling.sampler import (
    GroupSampler,
    _has_signal,
    _pass_at,
    _summarise_samples,
    choose_heldout,
    pass_at,
)
from rollout.tasks import Problem, Task, digest_of, longer_than, without
from rollout.tasks.task import LazyPrompts
from rollout.tiny_model import make_tiny_countdown_model
from rollout.tokenization import check_vocabulary_size, load_tokenizer
from tests.support.fake_engine import FakeEngine, fake_tokens, single_turns
from tests.support.server_specs import KEY
from trainer.sampling import SharedSampler

STOP = 0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


class LengthScorer:
    """Right (1) when the text has an even length; fails for texts that hold ``forbidden``."""

    retries = 0

    def __init__(self, forbidden: str | None = None):
        self.forbidden = forbidden
        self.seen: list[tuple[str, str]] = []
        self.lengths: list[tuple[int, FinishReason]] = []

    def source_name(self, prompt: Prompt) -> str | None:
        return None

    async def score(
        self, prompt: Prompt, response_text: str, *, num_tokens: int, finish_reason: FinishReason
    ) -> Score:
        await asyncio.sleep(0)
        self.seen.append((prompt.prompt_id, response_text))
        self.lengths.append((num_tokens, finish_reason))
        if self.forbidden is not None and self.forbidden in response_text:
            return Score(value=0.0, error=f"cannot stand {self.forbidden}")
        even = len(response_text) % 2 == 0
        return Score(value=float(even), parts={"length": float(len(response_text))}, correct=even)


class OneFails(LengthScorer):
    """Of the first prompts."""

    async def score(self, prompt, response_text, **length):
        score = await super().score(prompt, response_text, **length)
        return Score(value=0.0, error="lost") if prompt.prompt_id in ("p0", "h0") else score


def make_prompts(count: int, name: str = "p") -> list[Prompt]:
    ids = [[3 + (i + j) % 15 for j in range(1 + i % 4)] for i in range(count)]
    return [
        Prompt(prompt_id=f"{name}{i}", token_ids=ids[i], text=f"text {i}", reference=str(i))
        for i in range(count)
    ]


def state_at(position: int, num_prompts: int = 5) -> SamplerState:
    return SamplerState(
        position=position, num_prompts=num_prompts, prompts=digest_of(make_prompts(num_prompts))
    )


def make_sampler(
    tokenizer,
    *,
    engine=None,
    scorer=None,
    seed=0,
    num_train=5,
    num_heldout=4,
    heldout_sets=None,
    order=None,
    group_size=3,
    evaluation=None,
    evaluation_client=None,
    evaluation_samples=None,
    kept_problems=0,
    **rollout,
) -> GroupSampler:
    scorer, client = scorer or LengthScorer(), engine or FakeEngine()
    samples = single_turns(tokenizer, scorer, max_new_tokens=6)
    rollout = RolloutConfig(group_size=group_size, max_new_tokens=6, temperature=0.5, **rollout)
    return GroupSampler(
        client=client,
        evaluation_client=evaluation_client or client,
        evaluation_samples=evaluation_samples or samples,
        task=Task(
            name="toy",
            train=make_prompts(num_train),
            heldout=make_prompts(num_heldout, "h"),
            heldout_sets=heldout_sets or {},
        ),
        samples=samples,
        scorer=scorer,
        order=order or (lambda epoch: epoch_order(num_train, seed=seed, epoch=epoch)),
        config=RunConfig.model_construct(
            rollout=rollout,
            evaluation=evaluation or EvaluationConfig(),
            tracking=TrackingConfig(evaluation_problems=kept_problems),
            seed=seed,
        ),
    )


def next_groups(sampler, count, *, newest=0):
    return asyncio.run(sampler.next_groups(count, newest=newest, max_staleness=0))


def test_a_group_holds_the_siblings_of_one_prompt_each_aligned_with_its_own_tokens(tokenizer):
    engine, scorer = FakeEngine(version=7), LengthScorer()
    sampler = make_sampler(tokenizer, engine=engine, scorer=scorer)
    groups, stats = next_groups(sampler, 4, newest=7)
    prompts = {p.prompt_id: p for p in make_prompts(5)}
    seeds = iter(engine.calls)
    assert [g.group_id for g in groups] == [0, 1, 2, 3]
    for group in groups:
        prompt = prompts[group.prompt_id]
        assert [t.sibling_id for t in group.trajectories] == [0, 1, 2]
        for t in group.trajectories:
            _, seed, temperature = next(seeds)
            response = fake_tokens(prompt.token_ids, seed, max_new_tokens=6, vocab_size=20, stop=STOP)
            text = tokenizer.decode(response[:-1] if response[-1] == STOP else response)
            assert temperature == 0.5
            assert (t.group_id, t.prompt_id) == (group.group_id, group.prompt_id)
            assert t.token_ids.tolist() == prompt.token_ids + response
            assert t.response_mask.tolist() == [False] * len(prompt.token_ids) + [True] * len(response)
            assert t.rollout_logprobs.tolist() == [0.0] * len(prompt.token_ids) + [
                -(1 + token) / 0.5 for token in response
            ]
            assert t.token_versions.tolist() == [0] * len(prompt.token_ids) + [7] * len(response)
            assert t.finish_reason is (FinishReason.STOP if response[-1] == STOP else FinishReason.LENGTH)
            assert (t.reward, t.reward_parts, t.status) == (
                float(len(text) % 2 == 0),
                {"length": float(len(text))},
                Status.OK,
            )
            assert "<eos>" not in text
            assert (prompt.prompt_id, text) in scorer.seen
    assert stats.requests == 12
    assert stats.failed_rewards == stats.resampled_groups == stats.filled_groups == 0
    assert Counter(scorer.lengths) == Counter(
        (sum(t.response_mask), t.finish_reason) for g in groups for t in g.trajectories
    )


def test_siblings_and_repeated_prompts_get_seeds_of_their_own(tokenizer):
    engine = FakeEngine()
    next_groups(make_sampler(tokenizer, engine=engine), 10)  # two epochs of five prompts
    seeds = [seed for _, seed, _ in engine.calls]
    assert len(set(seeds)) == len(seeds) == 30
    order = [*epoch_order(5, seed=0, epoch=0), *epoch_order(5, seed=0, epoch=1)]
    named = [
        json.dumps([0, f"p{i}", sibling, group_id])
        for group_id, i in enumerate(order)
        for sibling in range(3)
    ]
    # A run stays the same over releases.
    assert seeds == [int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) // 2 for name in named]
    other = FakeEngine()
    next_groups(make_sampler(tokenizer, engine=other, seed=1), 10)
    assert not {seed for _, seed, _ in other.calls} & set(seeds)


def test_the_stats_of_a_reply_count_that_reply_alone(tokenizer):
    scorer = LengthScorer()
    sampler = make_sampler(tokenizer, scorer=scorer)
    scorer.retries = 2
    began = time.perf_counter()
    _, first = next_groups(sampler, 2)
    scorer.retries = 5
    _, second = next_groups(sampler, 3)
    assert 0 < first.seconds + second.seconds < time.perf_counter() - began
    assert (first.requests, second.requests) == (6, 9)
    assert (first.reward_retries, second.reward_retries) == (2, 3)


def test_the_client_is_told_of_the_learners_version_before_a_token_is_sampled(tokenizer):
    class Told(FakeEngine):
        async def see_version(self, newest: int) -> None:
            assert not self.calls
            self.version = newest

    next_groups(make_sampler(tokenizer, engine=Told()), 2, newest=7)  # which refuses tokens of version 0


def test_a_group_is_scored_while_another_one_is_still_being_sampled(tokenizer):
    """The engine keeps one group back until the others are scored, which would never end if scoring waited
    for every group."""
    scored = asyncio.Event()

    class Engine(FakeEngine):
        async def generate_group(self, prompt_ids, **asked):
            if not self.calls:
                self.calls.append((tuple(prompt_ids), 0, 0.0))
                await scored.wait()
            return await super().generate_group(prompt_ids, **asked)

    class WatchingScorer(LengthScorer):
        async def score(self, prompt, response_text, **length):
            score = await super().score(prompt, response_text, **length)
            if len(self.seen) == 3 * 3:
                scored.set()
            return score

    sampler = make_sampler(tokenizer, engine=Engine(), scorer=WatchingScorer())
    groups, _ = asyncio.run(asyncio.wait_for(sampler.next_groups(4, newest=0, max_staleness=0), 20))
    assert groups == next_groups(make_sampler(tokenizer), 4)[0]


def test_a_reward_that_cannot_run_fails_the_request_and_cancels_the_others(tokenizer):
    cancelled = []

    class BrokenScorer(LengthScorer):
        async def score(self, prompt, response_text, **length):
            self.seen.append((prompt.prompt_id, response_text))
            if len(self.seen) == 12:
                raise WorkerStartError("no worker can be started")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(prompt.prompt_id)
                raise

    sampler = make_sampler(tokenizer, scorer=BrokenScorer())
    with pytest.raises(WorkerStartError, match="no worker can be started"):
        asyncio.run(asyncio.wait_for(sampler.next_groups(4, newest=0, max_staleness=0), 20))
    assert len(cancelled) == 11
    assert sampler.state.position == 0


@settings(deadline=None, max_examples=30)
@given(num=st.integers(1, 40), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_visits_every_prompt_once_in_an_order_of_its_own(num, seed, epoch):
    order = epoch_order(num, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(num))
    assert order == epoch_order(num, seed=seed, epoch=epoch)
    if num >= 20:
        assert order != epoch_order(num, seed=seed, epoch=epoch + 1)
        assert order != epoch_order(num, seed=seed + 1, epoch=epoch)


@settings(deadline=None, max_examples=25)
@given(
    counts=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    split=st.integers(0, 4),
    seed=st.integers(0, 3),
)
def test_any_resume_continues_the_same_groups(tokenizer, counts, split, seed):
    """However requests are cut and wherever a sampler is replaced by one that loads its state, the same
    groups come."""
    whole, _ = next_groups(make_sampler(tokenizer, seed=seed), sum(counts))
    sampler, pieces = make_sampler(tokenizer, seed=seed), []
    for i, count in enumerate(counts):
        if i == split:
            state, sampler = sampler.state, make_sampler(tokenizer, seed=seed)
            asyncio.run(sampler.load_state(state))
        pieces += next_groups(sampler, count)[0]
    assert pieces == whole
    visits = Counter(g.prompt_id for g in pieces)
    assert max(visits.values()) - min(visits[f"p{i}"] for i in range(5)) <= 1


def test_a_state_of_other_data_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"9 training prompts.*now has 5"):
        asyncio.run(make_sampler(tokenizer).load_state(SamplerState(position=3, num_prompts=9)))
    for others in (make_prompts(5, "q"), make_prompts(5)[::-1]):
        with pytest.raises(
            ValueError, match=r"other training prompts.*still has 5.*resume with the same data"
        ):
            asyncio.run(make_sampler(tokenizer).load_state(replace(state_at(3), prompts=digest_of(others))))


def test_a_state_of_an_earlier_version_has_no_digest_and_is_loaded(tokenizer):
    sampler = make_sampler(tokenizer)
    asyncio.run(sampler.load_state(SamplerState(position=3, num_prompts=5)))
    assert sampler.state == state_at(3)


@pytest.mark.parametrize(
    ("served", "newest", "staleness", "fine"),
    [(3, 3, 0, True), (2, 3, 0, False), (2, 3, 1, True), (4, 3, 1, False)],
)
def test_tokens_of_a_wrong_version_are_an_error_and_the_position_stays(
    tokenizer, served, newest, staleness, fine
):
    sampler = make_sampler(tokenizer, engine=FakeEngine(version=served))
    request = sampler.next_groups(2, newest=newest, max_staleness=staleness)
    if fine:
        asyncio.run(request)
        assert sampler.state.position == 2
        return
    with pytest.raises(SamplingError, match=rf"weight version {served}.*learner is at {newest}"):
        asyncio.run(request)
    assert sampler.state == state_at(0)


def test_a_failed_completion_fails_the_request_and_the_position_stays(tokenizer):
    sampler = make_sampler(tokenizer, engine=FakeEngine(fail=lambda prompt_ids, seed: seed % 7 == 0))
    with pytest.raises(GenerationError, match="asked to fail"):
        next_groups(sampler, 5)
    assert sampler.state.position == 0


def test_a_failed_reward_is_no_score_is_counted_and_named_in_the_log(tokenizer, caplog):
    clean, _ = next_groups(make_sampler(tokenizer), 5)
    texts = {
        (g.prompt_id, t.sibling_id): tokenizer.decode(
            [i for i, r in zip(t.token_ids, t.response_mask, strict=True) if r], skip_special_tokens=True
        )
        for g in clean
        for t in g.trajectories
    }
    forbidden = next(text for text in texts.values() if text)[0]
    expected = {key for key, text in texts.items() if forbidden in text}
    assert 0 < len(expected) < len(texts)
    with caplog.at_level(logging.WARNING):
        groups, stats = next_groups(make_sampler(tokenizer, scorer=LengthScorer(forbidden)), 5)
    failed = {
        (g.prompt_id, t.sibling_id)
        for g in groups
        for t in g.trajectories
        if t.status is Status.REWARD_FAILED
    }
    assert failed == expected
    assert (stats.failed_rewards, stats.scored) == (len(expected), len(texts))
    assert stats.before_selection is None, "nothing is left out"
    assert stats.first_failure in caplog.text
    for t in (t for g in groups for t in g.trajectories):
        assert (t.reward is None) == (t.status is Status.REWARD_FAILED)
    prompt_id, sibling = next(
        iter(sorted(expected, key=lambda key: [g.prompt_id for g in groups].index(key[0])))
    )
    assert f"prompt {prompt_id}, sibling {sibling}, not scored: cannot stand {forbidden}" in caplog.text


@pytest.mark.parametrize("what", ["groups", "an evaluation", "a later round"])
def test_where_every_reward_fails_nothing_is_handed_out(tokenizer, what, caplog):
    """Zeros all over would train, or evaluate, to the end without a word. The first failures are in the log."""
    dynamic = {"dynamic_sampling": resample(3)} if what == "a later round" else {}
    twice = EvaluationConfig(samples_per_prompt=2)
    sampler = make_sampler(tokenizer, scorer=LengthScorer(""), evaluation=twice, **dynamic)
    with pytest.raises(
        SamplingError,
        match=r"rewards of all \d+ samples failed.*first: prompt [ph]\d, sibling 0, not scored: cannot stand",
    ):
        asyncio.run(sampler.evaluate()) if what == "an evaluation" else next_groups(sampler, 4)
    assert sampler.state.position == 0
    logged, others = {"groups": (8, 4), "an evaluation": (8, None), "a later round": (8, 28)}[what]
    assert caplog.text.count("a sample failed: prompt") == logged
    assert re.findall(r"(-?\d+) further samples failed", caplog.text) == ([str(others)] if others else [])


def test_a_prompt_of_which_every_reward_fails_is_one_of_the_step_like_the_others(tokenizer):
    groups, stats = next_groups(make_sampler(tokenizer, scorer=OneFails()), 5)
    assert (len(groups), stats.failed_rewards) == (5, 3)


def test_the_line_of_a_failed_sample_is_one_line_that_a_terminal_does_not_obey(tokenizer):
    failed = Mock(reward=None, error="the agent said:\n\x1b[2Jstep 9")
    failed.trajectories.return_value = []
    sampler = make_sampler(tokenizer)
    sampler._samples = Mock(sample=AsyncMock(return_value=[failed] * 3))
    with pytest.raises(SamplingError, match=r"not scored: the agent said: ␛\[2Jstep 9$"):
        next_groups(sampler, 4)


def test_samples_that_all_reached_a_limit_are_no_failed_rewards(tokenizer):
    sampler, unscored = make_sampler(tokenizer), Mock(reward=None, error=None)
    unscored.trajectories.return_value = []
    sampler._samples = Mock(sample=AsyncMock(return_value=[unscored] * 3))
    with pytest.raises(
        SamplingError, match=r"none of the 12 samples has a score.*environment.reward_at_limit"
    ):
        next_groups(sampler, 4)


def test_an_evaluation_of_which_a_reward_fails_counts_it_as_wrong(tokenizer):
    found = asyncio.run(make_sampler(tokenizer, scorer=OneFails()).evaluate())
    sound = asyncio.run(make_sampler(tokenizer).evaluate())
    assert (found.count, found.failed) == (sound.count, 1)
    assert (sound.failed, sound.first_failure) == (0, None)
    assert found.first_failure.startswith("prompt h0, sibling 0, ") and found.first_failure.endswith(": lost")


def test_failed_rewards_are_counted_where_they_are_in_sets_greedy_answers_and_sources(tokenizer):
    class OneFailsInTwoSources(OneFails):
        def source_name(self, prompt: Prompt) -> str:
            return "even" if int(prompt.reference) % 2 == 0 else "odd"

    evaluation = EvaluationConfig(samples_per_prompt=2, greedy=True)
    sampler = make_sampler(
        tokenizer,
        scorer=OneFailsInTwoSources(),
        evaluation=evaluation,
        heldout_sets={"sound": make_prompts(2, "s"), "lost": make_prompts(1, "h")},
    )
    found = asyncio.run(sampler.evaluate())
    assert (found.failed, found.greedy.failed) == (2, 1)
    assert {name: (one.failed, one.greedy.failed) for name, one in found.sets.items()} == {
        "sound": (0, 0),
        "lost": (2, 1),
    }
    assert {name: one.failed for name, one in found.sources.items()} == {"even": 2, "odd": 0}
    assert decode_reply(encode(Evaluated(found))) == Evaluated(found)


# --- dynamic sampling
# --------------------------------------------------------------------------------------------------------------


def resample(max_rounds: int, compare: str = "reward") -> ResampleGroups:
    return ResampleGroups(max_rounds=max_rounds, compare=compare)


def differs(group: Group) -> bool:
    return len({t.reward for t in group.trajectories}) > 1


def reference_step(plain: list[Group], used: int, count: int, max_rounds: int) -> tuple[list[Group], int]:
    """The groups of one step out of all groups in order, of which ``used`` are gone, and how many are gone
    after it."""
    good, dull = [], []
    for _ in range(max_rounds):
        missing = count - len(good)
        for group in plain[used : used + missing]:
            (good if differs(group) else dull).append(group)
        used += missing
    chosen = good + dull[: count - len(good)]
    return sorted(chosen, key=lambda group: group.group_id), used


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99), counts=st.lists(st.integers(1, 5), min_size=1, max_size=4), max_rounds=st.integers(2, 4),
    size=st.integers(2, 3), split=st.integers(0, 4),
)  # fmt: skip
def test_dynamic_sampling_takes_the_plain_order_and_leaves_out_groups_without_signal(
    tokenizer, seed, counts, max_rounds, size, split
):
    """Seeds, ids and positions are those of plain sampling, whatever is left out and wherever a resumed
    sampler takes over."""
    plain, _ = next_groups(make_sampler(tokenizer, seed=seed, group_size=size), sum(counts) * max_rounds)
    engine, used = FakeEngine(), 0

    def make():
        return make_sampler(
            tokenizer, engine=engine, seed=seed, group_size=size, dynamic_sampling=resample(max_rounds)
        )

    sampler = make()
    for i, count in enumerate(counts):
        if i == split:
            state, sampler = sampler.state, make()
            asyncio.run(sampler.load_state(state))
        before = used
        expected, used = reference_step(plain, used, count, max_rounds)
        groups, stats = next_groups(sampler, count)
        assert groups == expected
        assert sampler.state == state_at(used)
        assert (stats.resampled_groups, stats.filled_groups) == (
            used - before - count,
            sum(not differs(group) for group in expected),
        )
        assert stats.requests == stats.scored == (used - before) * size and len(engine.calls) == used * size
        assert (stats.first_group, stats.prompts) == (before, [g.prompt_id for g in plain[before:used]])
        assert stats.without_signal == sorted({*range(before, used)} - {g.group_id for g in groups})
        every = [t for g in plain[before:used] for t in g.trajectories]
        assert stats.before_selection == BeforeSelection(
            reward_mean=pytest.approx(statistics.fmean(t.reward for t in every)),
            no_signal_fraction=statistics.fmean(not differs(g) for g in plain[before:used]),
            tokens=sum(len(t.token_ids) - t.turns[0].start for t in every),
        )
        assert decode_reply(encode(Groups(groups, stats, sampler.state))) == Groups(
            groups, stats, sampler.state
        )


class ByPrompt:
    """Siblings differ by 1 in value for the prompts in ``values``, and in being right for those in ``right``;
    others never differ."""

    retries = 0

    def __init__(self, *, values=(), right=()):
        self.values, self.right, self.asked = values, right, Counter()

    async def score(
        self, prompt: Prompt, response_text: str, *, num_tokens: int, finish_reason: FinishReason
    ) -> Score:
        self.asked[prompt.prompt_id] += 1
        first = self.asked[prompt.prompt_id] % 2 == 1
        return Score(
            value=float(first and prompt.prompt_id in self.values),
            correct=first and prompt.prompt_id in self.right,
        )


@pytest.mark.parametrize("compare", ["reward", "correct"])
def test_a_sample_without_a_score_is_no_signal(compare):
    def sample(value: float | None) -> SimpleNamespace:
        return SimpleNamespace(reward=value, correct=value == 1.0)

    for values, signal in (((1.0, 1.0, None), False), ((1.0, 0.0, None), True), ((None, None), False)):
        assert _has_signal([sample(value) for value in values], resample(2, compare)) == signal


def test_an_evaluation_counts_a_sample_without_a_score_as_zero():
    right, unscored = (
        SimpleNamespace(reward=reward, correct=bool(reward), is_truncated=False, num_sampled=2, error=error)
        for reward, error in ((1.0, None), (None, "the environment raised"))
    )
    found = _summarise_samples([[right, unscored]])
    assert (found.accuracy, found.reward_mean, found.count, found.failed) == (0.5, 0.5, 2, 1)
    assert found.accuracy_error is None, "of one problem there is none"
    # Shares of 1/2 and 1: their standard deviation is the root of 1/8, and that of their mean the root of 1/16.
    of_two = _summarise_samples([[right, unscored], [right, right]])
    assert of_two.accuracy_error == pytest.approx(0.25)


def test_lengths_and_cuts_of_an_evaluation_are_those_of_samples_with_a_turn():
    """As in training. An episode that failed before its first turn has neither."""
    samples = [
        SimpleNamespace(reward=0.0, correct=False, is_truncated=cut, num_sampled=tokens, error=None)
        for tokens, cut in ((3, True), (5, False), (0, False))
    ]
    found = _summarise_samples([samples])
    assert (found.length_mean, found.truncated_fraction, found.count) == (4.0, 0.5, 3)
    of_one, of_none = _summarise_samples([samples[:1]]), _summarise_samples([samples[-1:]])
    assert (of_one.length_mean, of_one.truncated_fraction, of_none.length_mean) == (3.0, 1.0, 0)


def test_rounds_and_the_bound_by_hand(tokenizer, caplog):
    order = [f"p{i}" for i in epoch_order(9, seed=0, epoch=0)]

    def step(*signal: int, max_rounds: int):
        sampler = make_sampler(
            tokenizer,
            scorer=ByPrompt(values=[order[i] for i in signal]),
            num_train=9,
            group_size=2,
            dynamic_sampling=resample(max_rounds),
        )
        groups, stats = next_groups(sampler, 3)
        assert [g.group_id for g in groups] == [order.index(g.prompt_id) for g in groups]
        return (
            [g.group_id for g in groups],
            sampler.state.position,
            stats.resampled_groups,
            stats.filled_groups,
        )

    assert step(0, 1, 2, max_rounds=2) == ([0, 1, 2], 3, 0, 0)
    assert step(1, 3, 4, max_rounds=2) == ([1, 3, 4], 5, 2, 0)  # 0 and 2 are dull, 3 and 4 take their places
    assert step(1, 4, 5, max_rounds=3) == ([1, 4, 5], 6, 3, 0)  # round 2: 3 4, round 3: 5
    assert not caplog.records
    # No third round: the first dull one comes along, in its place.
    assert step(1, 4, 5, max_rounds=2) == (
        [0, 1, 4],
        5,
        2,
        1,
    )
    assert "only 2 of 3 groups have siblings that differ after 5 prompts" in caplog.text
    assert step(max_rounds=2) == ([0, 1, 2], 6, 3, 3)


def test_what_is_compared_is_the_whole_reward_or_whether_it_is_right(tokenizer):
    everyone = [f"p{i}" for i in range(6)]

    def filled(compare: str, **differing) -> int:
        sampler = make_sampler(
            tokenizer,
            scorer=ByPrompt(**differing),
            num_train=6,
            group_size=2,
            dynamic_sampling=resample(3, compare),
        )
        return next_groups(sampler, 2)[1].filled_groups

    assert (filled("reward", values=everyone), filled("correct", values=everyone)) == (0, 2)
    assert (filled("reward", right=everyone), filled("correct", right=everyone)) == (2, 0)


def test_a_failure_in_a_later_round_leaves_the_position_where_it_was(tokenizer):
    late = epoch_order(9, seed=0, epoch=0)[4]
    ids = make_prompts(9)[late].token_ids
    assert all(make_prompts(9)[i].token_ids != ids for i in epoch_order(9, seed=0, epoch=0)[:4])
    engine = FakeEngine(fail=lambda prompt_ids, seed: list(prompt_ids) == ids)
    sampler = make_sampler(
        tokenizer, engine=engine, scorer=ByPrompt(), num_train=9, group_size=2, dynamic_sampling=resample(2)
    )
    with pytest.raises(GenerationError, match="asked to fail"):
        next_groups(sampler, 3)
    assert len(engine.calls) > 6
    assert sampler.state == state_at(0, 9)


def test_single_siblings_cannot_differ():
    with pytest.raises(ValueError, match="needs siblings that can differ, but group_size=1"):
        RolloutConfig(group_size=1, dynamic_sampling=resample(2))
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        resample(1)


# --- evaluation
# --------------------------------------------------------------------------------------------------------------------


def test_accuracy_counts_what_is_right_whatever_the_reward(tokenizer):
    class Halved(LengthScorer):
        async def score(self, prompt, response_text, **length):
            score = await super().score(prompt, response_text, **length)
            return replace(score, value=score.value / 2 - 0.25)

    plain, halved = (
        asyncio.run(make_sampler(tokenizer, scorer=scorer).evaluate())
        for scorer in (LengthScorer(), Halved())
    )
    assert halved.accuracy == plain.accuracy > 0
    assert halved.reward_mean == pytest.approx(plain.reward_mean / 2 - 0.25)


def test_evaluation_is_the_plain_mean_over_heldout_samples_and_moves_nothing(tokenizer):
    engine, scorer = FakeEngine(), LengthScorer()
    evaluation = EvaluationConfig(samples_per_prompt=3, max_prompts=2, temperature=0.25)
    sampler = make_sampler(tokenizer, engine=engine, scorer=scorer, evaluation=evaluation)
    before = sampler.state
    result = asyncio.run(sampler.evaluate())
    responses = [fake_tokens(p, s, max_new_tokens=6, vocab_size=20, stop=STOP) for p, s, _ in engine.calls]
    assert {name for name, _ in scorer.seen} == {p.prompt_id for p in choose_heldout(make_prompts(4, "h"), 2)}
    assert {t for *_, t in engine.calls} == {0.25}
    assert result.count == len(scorer.seen) == 6
    assert result.accuracy == result.reward_mean == sum(len(text) % 2 == 0 for _, text in scorer.seen) / 6
    assert result.length_mean == sum(map(len, responses)) / 6
    assert result.truncated_fraction == sum(tokens[-1] != STOP for tokens in responses) / 6
    assert asyncio.run(sampler.evaluate()).accuracy == result.accuracy
    assert sampler.state == before


def test_an_evaluation_asks_a_client_of_its_own_for_samples_of_its_own(tokenizer):
    engine, own, scorer = FakeEngine(), FakeEngine(), LengthScorer()
    samples = single_turns(tokenizer, scorer, max_new_tokens=6)
    sampler = make_sampler(tokenizer, engine=engine, evaluation_client=own, evaluation_samples=samples)
    asyncio.run(sampler.evaluate())
    assert not engine.calls and len(own.calls) == len(scorer.seen) == 4


@pytest.mark.parametrize(
    ("samples", "right", "k"), [(n, c, k) for n in range(1, 7) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(samples, right, k):
    is_right = [place < right for place in range(samples)]
    draws = [*itertools.combinations(is_right, k)]
    assert pass_at(k, samples=samples, right=right) == pytest.approx(
        sum(map(any, draws)) / len(draws), abs=1e-12
    )


def test_pass_at_k_by_hand_and_for_many_samples():
    assert pass_at(2, samples=4, right=1) == pytest.approx(1 - 3 / 6)  # 1 - C(3, 2) / C(4, 2)
    assert pass_at(3, samples=10, right=2) == pytest.approx(1 - 56 / 120)  # 1 - C(8, 3) / C(10, 3)
    assert pass_at(64, samples=65536, right=1) == pytest.approx(64 / 65536)
    assert pass_at(8, samples=8, right=1) == 1.0 and pass_at(8, samples=8, right=0) == 0.0


def test_pass_at_k_is_unbiased():
    """Its mean over the binomial number of right samples is 1 - (1 - p)^k exactly, for every k and p."""
    for p, n in ((0.1, 5), (0.7, 8)):
        weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        for k in range(1, n + 1):
            mean = sum(w * pass_at(k, samples=n, right=c) for c, w in enumerate(weights))
            assert mean == pytest.approx(1 - (1 - p) ** k)


def test_an_evaluation_has_pass_at_powers_of_two_and_all_samples(tokenizer):
    engine, scorer = FakeEngine(), LengthScorer()
    evaluation = EvaluationConfig(samples_per_prompt=6)
    result = asyncio.run(
        make_sampler(tokenizer, engine=engine, scorer=scorer, evaluation=evaluation).evaluate()
    )
    assert list(result.pass_at) == [2, 4, 6] and result.greedy is None
    by_prompt = Counter(name for name, text in scorer.seen if len(text) % 2 == 0)
    for k, found in result.pass_at.items():
        wanted = [
            1 - math.comb(6 - by_prompt[p.prompt_id], k) / math.comb(6, k) for p in make_prompts(4, "h")
        ]
        assert found == pytest.approx(sum(wanted) / 4)
    assert result.accuracy <= result.pass_at[2] <= result.pass_at[4] <= result.pass_at[6]
    alone = asyncio.run(make_sampler(tokenizer).evaluate())
    assert alone.pass_at == {}
    assert list(_pass_at([[True] * 8])) == [2, 4, 8]


def test_an_evaluation_keeps_the_samples_of_the_first_problems_of_each_set(tokenizer):
    engine, scorer = FakeEngine(version=7), LengthScorer()
    options = {
        "heldout_sets": {"other": make_prompts(3, "o")},
        "evaluation": EvaluationConfig(samples_per_prompt=2, greedy=True),
    }
    result = asyncio.run(
        make_sampler(tokenizer, engine=engine, scorer=scorer, kept_problems=2, **options).evaluate()
    )
    names = [
        f"{name}{way}"
        for kind in "ho"
        for way in ("", ", at temperature 0")
        for name in (f"{kind}0", f"{kind}1")
    ]
    assert [group.prompt_id for group in result.groups] == names
    assert result.groups_from == [None] * 4 + ["other"] * 4
    answered = {(tuple(prompt), seed, temperature) for prompt, seed, temperature in engine.calls}
    for group in result.groups:
        temperature, count = (0.0, 1) if "temperature" in group.prompt_id else (1.0, 2)
        assert [sample.sibling_id for sample in group.trajectories] == [*range(count)]
        for sample in group.trajectories:
            (turn,) = sample.turns
            prompt, response = tuple(sample.token_ids[: turn.start]), sample.token_ids[turn.start :].tolist()
            assert response in [
                fake_tokens(p, seed, max_new_tokens=6, vocab_size=20, stop=STOP)
                for p, seed, asked_at in answered
                if (p, asked_at) == (prompt, temperature)
            ]
            assert set(sample.token_versions[sample.response_mask]) == {7}
    whole = asyncio.run(make_sampler(tokenizer, **options).evaluate())
    assert result == whole and whole.groups == whole.groups_from == []
    everything = asyncio.run(make_sampler(tokenizer, kept_problems=99, **options).evaluate()).groups
    rewards = [t.reward for group in everything[:4] for t in group.trajectories]
    assert len(everything) == 2 * (4 + 3) and sum(rewards) / len(rewards) == pytest.approx(whole.reward_mean)


def test_greedy_answers_are_one_for_each_problem_and_change_nothing_else(tokenizer):
    engine, scorer = FakeEngine(), LengthScorer()
    evaluation = EvaluationConfig(samples_per_prompt=2, temperature=0.25, greedy=True)
    result = asyncio.run(
        make_sampler(tokenizer, engine=engine, scorer=scorer, evaluation=evaluation).evaluate()
    )
    plain = evaluation.model_copy(update={"greedy": False})
    assert replace(result, greedy=None) == asyncio.run(make_sampler(tokenizer, evaluation=plain).evaluate())
    prompts = [tuple(p.token_ids) for p in make_prompts(4, "h")]
    asked = [(prompt, seed) for prompt, seed, temperature in engine.calls if temperature == 0.0]
    assert [prompt for prompt, _ in asked] == prompts and len(engine.calls) == 12
    responses = [fake_tokens(p, s, max_new_tokens=6, vocab_size=20, stop=STOP) for p, s in asked]
    assert (result.count, result.greedy.count, result.greedy.pass_at) == (8, 4, {})
    assert result.greedy.length_mean == sum(map(len, responses)) / 4
    assert decode_reply(encode(Evaluated(result))) == Evaluated(result)


def test_a_sampler_takes_its_prompts_in_the_order_and_a_resumed_one_goes_on_there(tokenizer):
    def order(epoch: int) -> list[int]:
        return [4, 4, 1, 0, 3] if epoch == 0 else [2, 2, 2, 2, 2]

    def taken(sampler, count):
        groups, _ = next_groups(sampler, count)
        return [group.prompt_id for group in groups]

    whole = taken(make_sampler(tokenizer, order=order), 7)
    assert whole == [make_prompts(5)[i].prompt_id for i in [*order(0), *order(1)[:2]]]
    first, second = make_sampler(tokenizer, order=order), make_sampler(tokenizer, order=order)
    begun = taken(first, 3)
    asyncio.run(second.load_state(first.state))
    assert begun + taken(second, 4) == whole


def test_a_mixture_goes_on_at_its_place_also_with_other_weights(tokenizer):
    """The position counts groups, whatever their order is."""
    sources = ["math", "code", "math", "math", "code"]

    def order(**weights):
        return mixture_order(MixtureOrder(type="mixture", field="of", weights=weights), sources, seed=0)

    def taken(sampler, count):
        return [group.prompt_id for group in next_groups(sampler, count)[0]]

    def expected(order):
        return [f"p{i}" for epoch in range(3) for i in order(epoch)]

    before, after = order(math=3, code=1), order(math=1, code=2)
    first = make_sampler(tokenizer, order=before)
    assert taken(first, 7) == expected(before)[:7]
    for now in (before, after):
        resumed = make_sampler(tokenizer, order=now)
        asyncio.run(resumed.load_state(first.state))
        assert taken(resumed, 8) == expected(now)[7:]


@pytest.mark.parametrize("greedy", [False, True])
def test_each_heldout_set_is_evaluated_as_if_it_were_the_only_one(tokenizer, greedy):
    evaluation = EvaluationConfig(samples_per_prompt=2, greedy=greedy, max_prompts=3)
    sets = {"b": make_prompts(2, "b"), "c": make_prompts(5, "c")}
    whole = asyncio.run(make_sampler(tokenizer, heldout_sets=sets, evaluation=evaluation).evaluate())
    assert replace(whole, sets={}) == asyncio.run(make_sampler(tokenizer, evaluation=evaluation).evaluate())
    for name, prompts in sets.items():
        sampler = make_sampler(tokenizer, evaluation=evaluation)
        sampler._task = replace(sampler._task, heldout=prompts)
        assert whole.sets[name] == asyncio.run(sampler.evaluate())
    assert [result.count for result in (whole, *whole.sets.values())] == [6, 4, 6]
    assert decode_reply(encode(Evaluated(whole))) == Evaluated(whole)


def test_each_source_is_evaluated_as_if_its_problems_were_the_only_ones(tokenizer):
    class OfTwoSources(LengthScorer):
        def source_name(self, prompt: Prompt) -> str:
            return "even" if int(prompt.reference) % 2 == 0 else "odd"

    evaluation = EvaluationConfig(samples_per_prompt=2, greedy=True)
    others = {"heldout_sets": {"b": make_prompts(2, "b")}, "evaluation": evaluation}
    sampler = make_sampler(tokenizer, scorer=OfTwoSources(), num_heldout=7, **others)
    whole = asyncio.run(sampler.evaluate())
    assert [*whole.sources] == ["even", "odd"] and whole.sets["b"].sources == {}
    for parity, source in enumerate(whole.sources):
        alone = make_sampler(tokenizer, num_heldout=7, evaluation=EvaluationConfig(samples_per_prompt=2))
        alone._task = replace(alone._task, heldout=alone._task.heldout[parity::2])
        assert whole.sources[source] == asyncio.run(alone.evaluate())
    assert whole.accuracy == pytest.approx(
        (4 * whole.sources["even"].accuracy + 3 * whole.sources["odd"].accuracy) / 7
    )
    assert decode_reply(encode(Evaluated(whole))) == Evaluated(whole)


def test_without_heldout_prompts_nothing_is_evaluated(tokenizer):
    assert asyncio.run(make_sampler(tokenizer, num_heldout=0).evaluate()) is None


def test_the_heldout_subset_does_not_depend_on_the_order_of_the_file():
    prompts = make_prompts(30)
    chosen = choose_heldout(prompts, 7)
    assert choose_heldout(prompts[::-1], 7) == chosen
    assert len({p.prompt_id for p in chosen}) == 7
    assert chosen != prompts[:7]


def test_no_other_held_out_prompts_are_tokenised_than_those_that_are_asked():
    tokenised = []

    def encode(text: str) -> list[int]:
        tokenised.append(text)
        return [1]

    def to_problem(number: int) -> Problem:
        return Problem(prompt_id=f"h{number}", text=f"text {number}", reference="")

    lazy = LazyPrompts(range(500), to_problem=to_problem, encode=encode)
    chosen = choose_heldout(lazy, 7)
    assert [prompt.text for prompt in chosen] == tokenised and len(tokenised) == 7
    assert [p.prompt_id for p in chosen] == [p.prompt_id for p in choose_heldout(make_prompts(500, "h"), 7)]


def test_an_evaluation_lets_go_of_the_tokens_of_what_it_has_graded(tokenizer):
    """All its problems are asked at once, and their tokens together are gigabytes."""
    maker = single_turns(tokenizer, LengthScorer(), max_new_tokens=6)
    alive, most, one_at_a_time = weakref.WeakSet(), 0, asyncio.Lock()

    class Watched:
        async def sample(self, *arguments, **named):
            nonlocal most
            async with one_at_a_time:
                samples = await maker.sample(*arguments, **named)
                alive.update(sequence for one in samples for sequence in one.sequences)
                most = max(most, len(alive))
                return samples

    evaluation = EvaluationConfig(samples_per_prompt=2)
    options = {"num_heldout": 40, "evaluation": evaluation}
    found = asyncio.run(make_sampler(tokenizer, evaluation_samples=Watched(), **options).evaluate())
    assert found == asyncio.run(make_sampler(tokenizer, **options).evaluate())
    assert found.count == 80 and most <= 8


def test_a_task_without_training_prompts_is_refused(tokenizer):
    with pytest.raises(ValueError, match="toy has no training prompts"):
        make_sampler(tokenizer, num_train=0)


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=f"has {len(tokenizer)} tokens, but the model's vocab_size is 5"):
        check_vocabulary_size(len(tokenizer), 5, tmp_path)


def run_config(
    model_dir=Path("m"), *, token_budget=100, max_new_tokens=40, task=None, **rollout
) -> RunConfig:
    return RunConfig.model_validate({
        "model": {"path": model_dir}, "task": task or {"type": "countdown"}, "learner": {"token_budget": token_budget},
        "rollout": {"max_new_tokens": max_new_tokens, **rollout},
    })  # fmt: skip


def task_of(*, train, heldout=()) -> Task:
    prompts = [
        [Prompt(prompt_id=f"{name}{n}", token_ids=[1] * n, text="?", reference="") for n in lengths]
        for name, lengths in (("train", train), ("heldout", heldout))
    ]
    return Task(name="toy", train=prompts[0], heldout=prompts[1])


def test_prompts_that_fit_exactly_are_accepted():
    task = task_of(train=[60, 3], heldout=[86])
    assert task_that_fits(task, run_config(), max_positions=128) == task
    task = task_of(train=[1])
    assert task_that_fits(task, run_config(), max_positions=43) == task


def longer(config: RunConfig, more: int) -> RunConfig:
    rollout = config.rollout.model_copy(update={"max_new_tokens": config.rollout.max_new_tokens + more})
    return config.model_copy(update={"rollout": rollout})


@pytest.mark.parametrize(
    ("max_new_tokens", "rollout", "max_positions", "room"),
    [
        (40, {}, 128, 86),  # a sequence ends 2 tokens before the last position
        (5, {}, 128, 121), (6, {}, 128, 120), (1, {}, 128, 121),  # no prompt of the last 6 is taken
        (40, {"server_args": {"context-length": 100}}, 128, 58),
        (40, {"server_args": {"context_length": "100"}}, 128, 58),
        (40, {"max_total_tokens": 100}, 128, 58),
        (40, {"max_total_tokens": 100, "server_args": {"page-size": 1}}, 128, 58),
        (40, {"max_total_tokens": 127, "server_args": {"page-size": 16}}, 128, 40),  # of 112 places, two pages stay free
        (1, {"max_total_tokens": 127, "server_args": {"page-size": 16}}, 128, 79),
        (40, {"server_args": {"page-size": 16}}, 128, 86),
    ],
)  # fmt: skip
def test_the_room_for_a_prompt_is_what_the_servers_take(max_new_tokens, rollout, max_positions, room):
    config = run_config(max_new_tokens=max_new_tokens, token_budget=999, **rollout)
    for which in ("training", "held-out"):
        found = prompt_room(config, which, max_positions=max_positions)
        assert found.tokens == room
    assert "SGLang takes sequences of " in found.within
    own = config.model_copy(update={"evaluation": EvaluationConfig(max_new_tokens=max_new_tokens + 3)})
    assert prompt_room(own, "training", max_positions=max_positions).tokens == room
    found = prompt_room(own, "held-out", max_positions=max_positions)
    assert (
        found.tokens == prompt_room(longer(own, 3), "training", max_positions=max_positions).tokens
        and found.limit == f"evaluation.max_new_tokens={max_new_tokens + 3}"
    )


@pytest.mark.parametrize(
    ("task", "limits", "message"),
    [
        (
            task_of(train=[7, 65, 61]), {},
            r"training prompt train65 has 65 tokens, but only 60 .*max_new_tokens=40 within learner.token_budget=100, "
            r"max_position_embeddings=128 \(SGLang takes sequences of 126 and prompts of 121\); "
            r"remove .*more than 60 tokens, lower .* or raise learner.token_budget",
        ),
        (task_of(train=[61]), {"token_budget": 999, "max_positions": 100}, r"train61 .*max_position_embeddings=100 .*_tokens or raise m"),
        (task_of(train=[61]), {"token_budget": 999, "max_total_tokens": 100}, r"train61 .*only 58 .*raise rollout.max_total_tokens$"),
        (task_of(train=[5], heldout=[90, 89]), {}, r"held-out prompt heldout90 has 90 tokens, but only 86 "),
        (task_of(train=[1]), {"max_positions": 42}, r"max_new_tokens=40 leaves no room for a training prompt.*max_position_embeddings=42"),
    ],
)  # fmt: skip
def test_a_prompt_without_room_for_its_answer_is_named_with_the_limits_and_the_fix(task, limits, message):
    changes = {name: value for name, value in limits.items() if name != "max_positions"}
    with pytest.raises(ValueError, match=message):
        task_that_fits(task, run_config(**changes), max_positions=limits.get("max_positions", 128))


LEAVES_OUT = {
    "type": "jsonl",
    "train_path": "p.jsonl",
    "heldout_path": "h.jsonl",
    "too_long_prompts": "leave_out",
}


def test_too_long_prompts_are_left_out_and_counted_where_the_config_says_so():
    task = replace(
        task_of(train=[7, 65, 60, 61], heldout=[90, 86]), heldout_sets={"b": task_of(train=[89, 3]).train}
    )
    kept = task_that_fits(task, run_config(task=LEAVES_OUT), max_positions=128)
    ids = [
        [prompt.prompt_id for prompt in prompts]
        for prompts in (kept.train, kept.heldout, kept.heldout_sets["b"])
    ]
    assert ids == [["train7", "train60"], ["heldout86"], ["train3"]]
    assert kept.num_left_out == 2


@pytest.mark.parametrize("task", [task_of(train=[61, 62]), task_of(train=[7], heldout=[89])])
def test_a_file_of_which_nothing_would_be_left_is_refused(task):
    with pytest.raises(
        ValueError, match=r"(train62|heldout89) has .* more than \d+ tokens, have them left out"
    ):
        task_that_fits(task, run_config(task=LEAVES_OUT), max_positions=128)


def write_problems(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
    return path


def test_the_sample_role_refuses_an_overlong_prompt_before_it_asks_for_servers(model_dir, tmp_path):
    path = write_problems(tmp_path / "p.jsonl", ["1+2", "1" * 62, "3"])
    task = {"type": "jsonl", "train_path": path, "apply_chat_template": False}
    asked = []
    config = run_config(model_dir, task=task)
    with pytest.raises(ValueError, match=r"training prompt \S+/p\.jsonl:line 2 has 62 tokens, but only 60 "):
        asyncio.run(
            run_sample_role(
                config,
                architecture_of(model_dir),
                server_urls=lambda: asked.append(1) or [],
                announce=asked.append,
                log_dir=tmp_path,
                key=KEY,
                doing=print,
            )
        )
    assert asked == []


@pytest.mark.parametrize(("longest", "error"), [(60, None), (62, "no prompt of the source 'code' is left")])
def test_the_sample_role_mixes_what_is_not_left_out(model_dir, tmp_path, longest, error):
    path = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "1", "answer": "1", "of": "math"},
        {"prompt": "1" * longest, "answer": "1", "of": "code"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = LEAVES_OUT | {"train_path": path, "heldout_path": None, "apply_chat_template": False}
    mixture = MixtureOrder(type="mixture", field="of", weights={"math": 1, "code": 3})
    config = run_config(model_dir, task=task).model_copy(update={"sampler": mixture})
    asked = []
    with pytest.raises((ValueError, RuntimeError), match=error or "asked"):

        def server_urls():
            asked.append(1)
            raise RuntimeError("asked")

        asyncio.run(
            run_sample_role(
                config,
                architecture_of(model_dir),
                server_urls=server_urls,
                announce=asked.append,
                log_dir=tmp_path,
                key=KEY,
                doing=print,
            )
        )
    assert asked == ([] if error else [1])


def test_prompts_and_those_held_out_obey_the_arguments_of_the_template(tmp_path):
    make_tiny_countdown_model(tmp_path / "tiny", seed=0)
    (tmp_path / "tiny/chat_template.jinja").write_text("{{ messages[0].content }}{{ ending }}")
    path = write_problems(tmp_path / "p.jsonl", ["1+2", "3"])
    config = run_config(tmp_path / "tiny", task={"type": "jsonl", "train_path": path, "heldout_path": path})
    model = config.model.model_copy(update={"chat_template_kwargs": {"ending": "="}})
    tokenizer, task = load_checked_task(
        config.model_copy(update={"model": model}), architecture_of(model.path)
    )
    for prompts in (task.train, task.heldout):
        assert [tokenizer.decode(prompt.token_ids) for prompt in prompts] == ["1+2=", "3="]


def test_the_sample_role_asks_its_reward_model_before_it_waits_for_servers(model_dir, tmp_path):
    path = write_problems(tmp_path / "p.jsonl", ["1+2"])
    config = run_config(model_dir, task={"type": "jsonl", "train_path": path, "apply_chat_template": False})
    config = config.model_copy(update={"reward": ModelReward(urls=("http://127.0.0.1:9",), max_retries=0)})
    asked = []
    with pytest.raises(
        RewardModelError, match=r"reward: 1 attempts .*http://127\.0\.0\.1:9/classify.*correct reward\.urls"
    ):
        asyncio.run(
            run_sample_role(
                config,
                architecture_of(model_dir),
                server_urls=lambda: asked.append(1) or [],
                announce=asked.append,
                log_dir=tmp_path,
                key=KEY,
                doing=print,
            )
        )
    assert asked == []


def test_the_sample_role_takes_its_servers_once_the_data_is_checked_and_serves(
    model_dir, tmp_path, monkeypatch
):
    """Evaluations have limits of their own: a response may be longer than the learner packs."""
    path = write_problems(tmp_path / "p.jsonl", ["1+2", "1" * 60, "3"])
    task = {"type": "jsonl", "train_path": path, "heldout_path": path, "apply_chat_template": False}
    config = run_config(model_dir, task=task, prompts_per_step=3)
    evaluation = EvaluationConfig(top_p=0.7, top_k=20, max_new_tokens=66)
    config = config.model_copy(update={"evaluation": evaluation})
    announced, ready, asked = [], threading.Event(), set()

    class Limited(FakeEngine):
        limits = (1.0, -1)

        def with_own_places(self, *, top_p, top_k):
            other = Limited()
            other.limits = (top_p, top_k)
            return other

        async def generate_group(self, prompt_ids, *, max_new_tokens, **given):
            asked.add((*self.limits, max_new_tokens))
            return await super().generate_group(prompt_ids, max_new_tokens=max_new_tokens, **given)

    @asynccontextmanager
    async def limited_client(config, urls, **given):
        assert urls == ["http://127.0.0.1:9"]
        yield Limited()

    monkeypatch.setattr(role_module, "generation_client", limited_client)

    def announce(address):
        announced.append(address)
        ready.set()

    role = run_sample_role(
        config,
        architecture_of(model_dir),
        server_urls=lambda: ["http://127.0.0.1:9"],
        announce=announce,
        log_dir=tmp_path,
        key=KEY,
        doing=print,
    )
    thread = threading.Thread(target=asyncio.run, args=(role,), daemon=True)
    thread.start()
    assert ready.wait(60)
    with RemoteSampler(announced[0], timeout_s=20, key=KEY) as remote:
        digest = digest_of(load_checked_task(config, architecture_of(model_dir))[1].train)
        remote.load_state({"position": 0, "num_prompts": 3, "prompts": digest})  # other numbers are refused
        remote.next_groups(3, newest=0, max_staleness=0)
        assert asked == {(1.0, -1, 40)}
        assert remote.evaluate().count == 3
        assert asked == {(1.0, -1, 40), (0.7, 20, 66)}
        remote.stop()
    thread.join(20)
    assert not thread.is_alive()


alphabets = st.one_of(st.text(st.sampled_from("0123 +="), max_size=30), st.text(max_size=30))


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(alphabets.filter(bool), min_size=1, max_size=8),
    limit=st.integers(0, 60),
    around=st.integers(0, 3),
)
def test_lazy_prompts_tell_the_longer_ones_as_if_all_were_tokenised(texts, limit, around):
    """The reference tokenises everything: one token per byte, the most that a tokenizer makes of a text, and
    some around it."""
    encoded = []

    def encode(text):
        encoded.append(text)
        return [0] * (around + len(text.encode()))

    items = [Problem(prompt_id=str(i), text=text, reference="") for i, text in enumerate(texts)]
    prompts = LazyPrompts(items, to_problem=lambda problem: problem, encode=encode)
    lengths = [around + len(text.encode()) for text in texts]
    found = longer_than(prompts, limit)
    longer = {index: length for index, length in enumerate(lengths) if length > limit}
    assert {index: len(prompt.token_ids) for index, prompt in found.items()} == longer
    ids = [prompt.prompt_id for prompt in without(prompts, found)]
    assert ids == [str(index) for index in range(len(texts)) if index not in longer]


roles = st.sampled_from(["system", "user", "assistant"])
conversations = st.lists(st.tuples(roles, alphabets, st.none() | st.just(["call"])), min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(
    drawn=st.lists(st.none() | conversations, min_size=1, max_size=8),
    limit=st.integers(0, 150),
    around=st.dictionaries(st.sampled_from(["system", "user", "assistant", "call"]), st.integers(0, 20)),
)
def test_longer_conversations_are_told_as_if_all_were_tokenised(drawn, limit, around):
    """Around a message stand as many tokens as its role has, and around a call of a tool any number."""

    def encode(prompt):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [0] * sum(
            around.get(m["role"], 1) + len(m["content"].encode()) + ("calls" in m) * around.get("call", 0)
            for m in messages
        )

    items = []
    for number, conversation in enumerate(drawn):
        messages = conversation and tuple(
            {"role": role, "content": text} | ({} if calls is None else {"calls": calls})
            for role, text, calls in conversation
        )
        items.append(Problem(prompt_id=str(number), text="12", reference="", messages=messages))
    prompts = LazyPrompts(items, to_problem=lambda problem: problem, encode=encode)
    lengths = [len(encode(item.prompt)) for item in items]
    assert {index: len(prompt.token_ids) for index, prompt in longer_than(prompts, limit).items()} == {
        index: length for index, length in enumerate(lengths) if length > limit
    }


def test_short_texts_are_not_tokenised_to_know_that_they_fit():
    encoded = []

    def encode(text):
        encoded.append(text)
        return [0] * len(text)

    items = [Problem(prompt_id=str(i), text="x" * (1 + i % 50), reference="") for i in range(20_000)]
    prompts = LazyPrompts(items, to_problem=lambda problem: problem, encode=encode)
    assert longer_than(prompts, 51) == {}
    assert len(encoded) == 1  # the first, for what stands around a text


class Served:
    """Sample roles, each in a thread of its own."""

    def __init__(self, key):
        self._key, self._roles = key, []

    def __call__(self, sampler, timeout_s=20.0) -> RemoteSampler:
        """Start a role for ``sampler``. Returns the learner's side."""
        addresses, ready = [], threading.Event()

        def announce(address):
            addresses.append(address)
            ready.set()

        thread = threading.Thread(
            target=lambda: asyncio.run(serve(sampler, announce=announce, key=self._key, doing=print)),
            daemon=True,
        )
        thread.start()
        assert ready.wait(20)
        remote = RemoteSampler(addresses[0], timeout_s=timeout_s, key=self._key)
        self._roles.append((remote, thread))
        return remote

    def stop(self):
        """Stop every role that still runs, and wait until it has ended."""
        while self._roles:
            remote, thread = self._roles.pop()
            with remote:
                if thread.is_alive():
                    remote.stop()
                thread.join(20)
                assert not thread.is_alive()


@pytest.fixture
def served(tmp_path):
    roles = Served(run_key(tmp_path / "key.yaml"))
    yield roles
    roles.stop()


def test_the_learner_gets_the_same_groups_over_the_wire(tokenizer, served):
    remote, local = served(make_sampler(tokenizer)), make_sampler(tokenizer)
    expected, expected_stats = next_groups(local, 3)
    groups, stats, state = remote.next_groups(3, newest=0, max_staleness=0)
    assert groups == expected
    assert stats.requests == expected_stats.requests == 9
    assert state == asdict(state_at(3))
    again, *_ = remote.next_groups(2, newest=0, max_staleness=0)
    remote.load_state(state)
    assert remote.next_groups(2, newest=0, max_staleness=0)[0] == again == next_groups(local, 2)[0]
    assert remote.evaluate().accuracy == asyncio.run(local.evaluate()).accuracy


def test_the_role_keeps_nothing_of_a_step_while_the_learner_trains_on_it(tokenizer, served, monkeypatch):
    sampler, arrays = make_sampler(tokenizer), []
    sample = sampler.next_groups

    async def watched(*args, **options):
        groups, stats = await sample(*args, **options)
        arrays.extend(weakref.ref(t.token_ids) for group in groups for t in group.trajectories)
        return groups, stats

    monkeypatch.setattr(sampler, "next_groups", watched)
    groups, *_ = served(sampler).next_groups(3, newest=0, max_staleness=0)
    assert len(arrays) == sum(len(group.trajectories) for group in groups)
    deadline = time.monotonic() + 20
    while any(array() is not None for array in arrays):
        assert time.monotonic() < deadline, "the role still has samples"
        time.sleep(0.01)


def test_a_learner_that_begins_anew_gets_the_first_groups_again(tokenizer, served):
    remote = served(make_sampler(tokenizer))
    first, *_ = remote.next_groups(3, newest=0, max_staleness=0)
    SharedSampler(remote).load_state(None)
    assert remote.next_groups(3, newest=0, max_staleness=0)[0] == first


def test_a_role_that_is_replaced_is_noticed_and_its_successor_followed(tokenizer, served):
    first, second = served(make_sampler(tokenizer)), served(make_sampler(tokenizer))
    announced = {"address": first._address, "pid": 1}
    with RemoteSampler(
        first._address, timeout_s=20, peer_timeout_s=0.3, key=first._key, find=lambda: announced
    ) as remote:
        groups, *_ = remote.next_groups(3, newest=0, max_staleness=0)
        assert not remote.follow(within_s=20), "the same announcement, for longer than peer_timeout_s"
        with RemoteSampler(
            "tcp://127.0.0.1:1", timeout_s=20, peer_timeout_s=0.3, key=first._key, find=lambda: announced
        ) as late:
            late.drain(0.0)  # at the address that was announced after the one was read
        announced = None
        assert not remote.follow(within_s=0.3)
        announced = {"address": second._address, "pid": 2}
        engine = Gated(free=0)
        stuck = served(make_sampler(tokenizer, engine=engine))
        remote._address = stuck._address  # as before the change: it never answers
        with pytest.raises(SampleRoleLost, match="another process has replaced it"):
            remote.next_groups(3, newest=0, max_staleness=0)
        assert remote.follow(within_s=20)
        assert remote.next_groups(3, newest=0, max_staleness=0)[0] == groups
        engine.gate.set()
    assert not first.follow(within_s=20), "it was not told where to look"


def test_a_successor_at_the_same_address_is_told_by_its_process(monkeypatch):
    monkeypatch.setattr(remote_module, "FIND_EVERY_S", 0.0)
    monkeypatch.setattr(remote_module, "LOOK_UP_EVERY_S", 0.01)
    announced, looks, found = {"address": "tcp://127.0.0.1:1", "pid": 1}, [], []

    def find():
        found.append(announced)
        return announced

    with RemoteSampler("tcp://127.0.0.1:1", timeout_s=1, key=KEY, find=find) as remote:
        remote._look_for_successor()
        announced = None
        remote._look_for_successor()  # one that starts is none yet
        announced = {"address": "tcp://127.0.0.1:1", "pid": 2}
        with pytest.raises(SampleRoleLost, match="another process has replaced it"):
            remote._look_for_successor()
        assert remote.follow(within_s=20)
        remote._look_for_successor()  # it is the present one now
        assert not remote.follow(within_s=0.03, meanwhile=lambda: looks.append("look")) and looks
        monkeypatch.setattr(remote_module, "FIND_EVERY_S", 100.0)
        remote._found_at -= 100.0
        found.clear()
        remote._look_for_successor()
        remote._look_for_successor()
        assert len(found) == 1


def test_an_answer_to_another_request_is_no_answer(tokenizer, served, monkeypatch):
    remote = served(make_sampler(tokenizer))
    with monkeypatch.context() as patched:
        patched.setattr(remote_module, "decode_reply", lambda content: Done())
        with pytest.raises(SamplingError, match="answered Evaluate with Done; are both of the same version"):
            remote.evaluate()


def test_a_failure_reaches_the_learner_with_its_reason_and_the_role_lives_on(tokenizer, served):
    engine = FakeEngine(fail=lambda prompt_ids, seed: True)
    remote = served(make_sampler(tokenizer, engine=engine))
    with pytest.raises(SamplingError, match=r"^the sample role failed: GenerationError: asked to fail"):
        remote.next_groups(1, newest=0, max_staleness=0)
    with pytest.raises(SamplingError, match="9 training prompts"):
        remote.load_state({"position": 0, "num_prompts": 9})
    with pytest.raises(ValueError, match="not a state of the sampler"):
        remote.load_state({"position": "x"})
    engine.fail = lambda prompt_ids, seed: False
    assert len(remote.next_groups(1, newest=0, max_staleness=0)[0]) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_ends_the_role_and_reaches_the_learner_as_a_failure_of_the_role(
    tokenizer, served, monkeypatch
):
    """The supervisor then looks for the role's own error (``LOST_THE_ROLLOUT``)."""
    sampler = make_sampler(tokenizer)
    monkeypatch.setattr(sampler, "evaluate", Mock(side_effect=KeyError("x")))
    with pytest.raises(SamplingError, match=r"^the sample role failed: KeyError: 'x'$"):
        served(sampler).evaluate()
    ((_, thread),) = served._roles
    thread.join(20)
    assert not thread.is_alive()


def test_an_error_of_sampling_itself_is_the_learners_too(tokenizer, served):
    with pytest.raises(SamplingError, match=r"^the rewards of all") as own:
        next_groups(make_sampler(tokenizer, scorer=LengthScorer("")), 2)
    with pytest.raises(SamplingError) as learners:
        served(make_sampler(tokenizer, scorer=LengthScorer(""))).next_groups(2, newest=0, max_staleness=0)
    assert str(learners.value) == str(own.value)


def test_a_reward_model_that_is_gone_reaches_the_learner_as_a_failure(tokenizer, served):
    class Gone(LengthScorer):
        async def score(self, prompt, response_text, **length):
            raise RewardModelError("4 attempts failed")

    with pytest.raises(SamplingError, match="RewardModelError: 4 attempts failed"):
        served(make_sampler(tokenizer, scorer=Gone())).next_groups(1, newest=0, max_staleness=0)


def test_whoever_waits_may_give_up_and_ask_anew(tokenizer, served):
    """The role still makes what nobody waits for, and its position moves; the learner's state is that of what
    it took."""
    gate, enough = threading.Event(), ValueError("enough")

    class Slow(FakeEngine):
        async def generate_group(self, *prompt, **sampling):
            while not gate.is_set():
                await asyncio.sleep(0.01)
            return await super().generate_group(*prompt, **sampling)

    def give_up():
        raise enough

    remote = served(make_sampler(tokenizer, engine=Slow()))
    for ask in (
        lambda: remote.next_groups(2, newest=0, max_staleness=0, meanwhile=give_up),
        lambda: remote.evaluate(meanwhile=give_up),
        lambda: remote.drain(0.0, meanwhile=give_up),
    ):
        with pytest.raises(ValueError, match="enough"):
            ask()
    gate.set()
    assert remote.next_groups(1, newest=0, max_staleness=0)[2]["position"] == 3
    remote.load_state(asdict(state_at(0)))
    assert remote.next_groups(2, newest=0, max_staleness=0)[0] == next_groups(make_sampler(tokenizer), 2)[0]


# --- ahead of the learner
# --------------------------------------------------------------------------------------------------------------


class Gated(FakeEngine):
    """Groups from the ``free``-th on wait until the gate opens; counts those that were given up."""

    def __init__(self, free: int):
        super().__init__()
        self.free, self.cancelled, self.waiting = free, 0, 0
        self.gate = threading.Event()

    async def generate_group(self, prompt_ids, *, seeds, **sampling):
        self.free -= 1
        if self.free < 0:
            self.waiting += 1
            try:
                while not self.gate.is_set():
                    await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return await super().generate_group(prompt_ids, seeds=seeds, **sampling)


def ask(remote, count, *, newest, ahead, staleness=2):
    return remote.next_groups(count, newest=newest, max_staleness=staleness, ahead=ahead)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_groups_are_the_same_however_far_ahead_they_are_sampled(tokenizer, served, ahead):
    remote, local = served(make_sampler(tokenizer)), make_sampler(tokenizer)
    for step, left in enumerate((3, 2, 1, 0)):
        groups, stats, state = ask(remote, 3, newest=min(step, 2), ahead=min(ahead, left))
        assert groups == next_groups(local, 3)[0]
        assert state == asdict(state_at(3 * (step + 1)))
        assert stats.running_groups + stats.ready_groups == 3 * min(ahead, left)
        if ahead and left:
            remote.admit(3, newest=min(step + 1, 2), ahead=min(ahead, left - 1))
        assert remote.evaluate().accuracy == asyncio.run(make_sampler(tokenizer).evaluate()).accuracy


def test_a_step_does_not_wait_for_the_groups_of_the_next(tokenizer, served):
    engine = Gated(free=3)
    remote = served(make_sampler(tokenizer, engine=engine))
    groups, stats, _ = ask(remote, 3, newest=0, ahead=2)
    assert [g.group_id for g in groups] == [0, 1, 2]
    assert (stats.running_groups, stats.ready_groups) == (6, 0)
    engine.gate.set()
    assert [g.group_id for g in ask(remote, 3, newest=0, ahead=1)[0]] == [3, 4, 5]


def test_groups_under_way_are_given_up_where_the_position_changes_and_at_the_end(tokenizer, served):
    engine = Gated(free=3)
    remote = served(make_sampler(tokenizer, engine=engine))
    first, *_ = ask(remote, 3, newest=0, ahead=1)
    remote.load_state(None)
    assert engine.cancelled == engine.waiting == 3
    engine.free = 3
    assert ask(remote, 3, newest=0, ahead=2)[0] == first
    served.stop()
    assert engine.cancelled == engine.waiting == 9


def test_a_close_gives_up_what_is_under_way(tokenizer):
    async def close() -> tuple[int, int]:
        engine = Gated(free=3)
        sampler = make_sampler(tokenizer, engine=engine)
        await sampler.next_groups(3, newest=0, max_staleness=1, ahead=1)
        await sampler.close()
        return engine.cancelled, engine.waiting

    assert asyncio.run(close()) == (3, 3)


def test_a_group_ahead_that_fails_is_told_of_when_its_step_is_due(tokenizer, served):
    failing = make_prompts(5)[epoch_order(5, seed=0, epoch=0)[4]].token_ids
    engine = FakeEngine(fail=lambda prompt_ids, seed: list(prompt_ids) == failing)
    remote = served(make_sampler(tokenizer, engine=engine))
    assert len(ask(remote, 3, newest=0, ahead=1)[0]) == 3
    with pytest.raises(SamplingError, match="asked to fail"):
        ask(remote, 3, newest=0, ahead=1)
    engine.fail = lambda prompt_ids, seed: False
    assert [g.group_id for g in ask(remote, 3, newest=0, ahead=0)[0]] == [3, 4, 5]


class Draining(FakeEngine):
    """``told``: drains, openings and versions, in their order."""

    def __init__(self):
        super().__init__()
        self.told = []

    async def drain(self, within_s):
        self.told.append(within_s)

    def reopen(self):
        self.told.append("open")

    async def see_version(self, newest):
        self.told.append(f"version {newest}")


def test_a_drain_ends_before_the_update_and_the_next_request_opens_again(tokenizer, served):
    engine = Draining()
    remote = served(make_sampler(tokenizer, engine=engine))
    ask(remote, 2, newest=0, ahead=1)
    remote.drain(2.5)
    ask(remote, 2, newest=0, ahead=0)
    assert engine.told == ["open", "version 0", 2.5, "open", "version 0"]


def test_an_update_opens_again_and_starts_the_groups_that_it_allows_before_the_learner_asks(
    tokenizer, served
):
    """The learner then evaluates, records and saves, perhaps for minutes."""
    engine = Draining()
    remote = served(make_sampler(tokenizer, engine=engine, num_heldout=0))

    def wait_for(groups: int) -> None:
        deadline = time.monotonic() + 20
        while len(engine.calls) < groups * 3:
            assert time.monotonic() < deadline, f"{len(engine.calls) // 3} groups have started"
            time.sleep(0.005)

    ask(remote, 2, newest=0, ahead=1)
    wait_for(4)
    remote.drain(2.5)
    engine.version = 1
    remote.admit(2, newest=1, ahead=1)
    wait_for(6)
    assert engine.told == ["open", "version 0", 2.5, "open", "version 1"]
    groups, stats, _ = ask(remote, 2, newest=1, ahead=1, staleness=1)
    assert [g.group_id for g in groups] == [2, 3] and stats.running_groups + stats.ready_groups == 2
    groups, *_ = ask(remote, 2, newest=1, ahead=0, staleness=0)
    assert [g.group_id for g in groups] == [4, 5], "of the new weights alone"
    assert len(engine.calls) == 6 * 3


def test_a_silent_sample_role_is_an_error_naming_address_and_deadline():
    began = time.monotonic()
    with RemoteSampler("tcp://127.0.0.1:9", timeout_s=0.2, key=KEY) as remote:
        with pytest.raises(SamplingError, match=r"tcp://127.0.0.1:9 did not answer Drain in 0.2 s"):
            remote.drain(0.0)
    assert time.monotonic() - began < 20
