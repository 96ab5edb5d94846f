"""``reward: {type: by_field}``: each source of the data by the reward of its own."""

import asyncio
import json

import pytest
from pydantic import ValidationError

from configs.schema import RunConfig
from configs.schema.reward import RewardByField
from rollout.records import FinishReason, Prompt, Score
from rollout.rewards import scorer
from rollout.rewards.scorer import Scorer, check_reward, may_read_rows
from rollout.tasks import first_problem

OVERLONG = {"type": "overlong", "buffer_tokens": 4, "weight": 0.5}
CONFIG = RewardByField(
    type="by_field",
    field="extra.source",
    rewards={
        "openai/gsm8k": {"type": "gsm8k", "weight": 2.0},
        "short one": {"type": "weighted", "parts": {"right": {"type": "gsm8k"}, "long": OVERLONG}},
        "7": {"type": "countdown"},
    },
)
REFERENCE = {"7": "6 2=8"}


def prompt(source: object) -> Prompt:
    row = {"extra": {"source": source}}
    reference = REFERENCE.get(str(source), "12")
    return Prompt(prompt_id="p", token_ids=[1], text="?", reference=reference, row=row)


def scored(*samples: tuple[object, str, int], config: RewardByField = CONFIG) -> list[Score]:
    async def collect() -> list[Score]:
        async with Scorer(config, max_new_tokens=8) as scorer:
            return [
                await scorer.score(prompt(source), text, num_tokens=n, finish_reason=FinishReason.STOP)
                for source, text, n in samples
            ]

    return asyncio.run(collect())


def test_each_source_has_its_reward_and_a_part_of_its_name():
    right, wrong, short, number = scored(
        ("openai/gsm8k", "#### 12", 3),
        ("openai/gsm8k", "#### 11", 3),
        ("short one", "#### 12", 6),
        (7, "6+2", 3),
    )
    assert right == Score(value=2.0, parts={"openai/gsm8k": 1.0, "openai/gsm8k/found": 1.0}, correct=True)
    assert wrong == Score(value=0.0, parts={"openai/gsm8k": 0.0, "openai/gsm8k/found": 1.0})
    parts = {
        "short_one": 0.75,
        "short_one/right": 1.0,
        "short_one/right/found": 1.0,
        "short_one/long": -0.5,
    }
    assert short == Score(value=0.75, parts=parts, correct=True)
    assert number == Score(value=1.0, parts={"7": 1.0, "7/valid": 1.0}, correct=True)


def test_a_source_may_be_named_like_a_part_of_another_one(monkeypatch):
    monkeypatch.setitem(REFERENCE, "a.parts.right", "6 2=8")
    parts = {"right": {"type": "gsm8k"}, "long": OVERLONG}
    rewards = {"a": {"type": "weighted", "parts": parts}, "a.parts.right": {"type": "countdown"}}
    config = RewardByField(type="by_field", field="extra.source", rewards=rewards)
    weighted, single = scored(("a", "#### 12", 3), ("a.parts.right", "6+2", 3), config=config)
    assert (weighted.value, weighted.correct, weighted.error) == (1.0, True, None)
    assert (single.value, single.correct, single.error) == (1.0, True, None)


def test_a_reward_that_fails_has_no_part_of_its_source(monkeypatch):
    monkeypatch.setitem(REFERENCE, "7", "no reference")
    (failed,) = scored((7, "6+2", 3))
    assert (
        failed.value == 0.0 and failed.parts == {} and "reward countdown failed for prompt p" in failed.error
    )


def test_each_source_logs_its_own_first_failures(monkeypatch, caplog):
    """Failures of one source do not hide what is wrong with another. The reference 12 is none of countdown."""
    monkeypatch.setattr(scorer, "MAX_LOGGED_ERRORS", 2)
    rewards = {source: {"type": "countdown"} for source in "ab"}
    config = RewardByField(type="by_field", field="extra.source", rewards=rewards)
    scored(*[("a", "6+2", 3)] * 5, *[("b", "6+2", 3)] * 3, config=config)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 4 and all("reward countdown failed" in text for text in logged)
    assert ["further failures are only counted" in text for text in logged] == [False, True] * 2


def test_a_record_without_a_source_is_named():
    for source, told in [
        ("x", "is 'x', but reward.rewards has rewards only for 'openai/gsm8k'"),
        (None, "is null; write the name"),
    ]:
        with pytest.raises(ValueError, match=told):
            scored((source, "", 1))
    nowhere = Prompt(prompt_id="p", token_ids=[1], text="?", reference="1", row={})
    with pytest.raises(ValueError, match=r"no field `extra\.source`"):
        asyncio.run(
            Scorer(CONFIG, max_new_tokens=8).score(nowhere, "", num_tokens=1, finish_reason=FinishReason.STOP)
        )


def test_the_field_is_read_from_the_rows():
    assert may_read_rows(CONFIG) and not may_read_rows(CONFIG.rewards["7"])


def test_a_function_is_tried_on_the_first_problem_of_its_source(tmp_path, monkeypatch):
    (tmp_path / "own_rewards_by_field.py").write_text(
        "def a(prompt, response, reference, row):\n    assert row['kind'] == 'a'\n    return 1.0\n"
    )
    rows = [{"prompt": "1", "answer": "1", "kind": kind} for kind in "bba"]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    function = {"type": "function", "function": "own_rewards_by_field:a"}
    config = RunConfig(
        model={"path": "m"},
        task={"type": "jsonl", "train_path": "data.jsonl"},
        reward={"type": "by_field", "field": "kind", "rewards": {"a": function, "b": {"type": "gsm8k"}}},
    )
    check_reward(config.reward, lambda kind: first_problem(config.task, ("kind", kind)), print)
    wrong = RewardByField(type="by_field", field="kind", rewards={"b": function})
    with pytest.raises(ValueError, match=r"reward\.rewards\.b\.function: .* raised AssertionError"):
        check_reward(wrong, lambda kind: first_problem(config.task, ("kind", kind)), print)
    with pytest.raises(ValueError, match="holds no records"):
        first_problem(config.task, ("kind", "c"))


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ({}, "at least 1 item"),
        ({"": {"type": "gsm8k"}}, "'' cannot name a metric"),
        ({"a b": {"type": "gsm8k"}, "a_b": {"type": "gsm8k"}}, "'a b' is 'a_b' or its beginning in the names of metrics"),
        ({"a": {"type": "gsm8k"}, "a/b": {"type": "gsm8k"}}, "'a' is 'a/b' or its beginning"),
        ({"math": {"type": "gsm8k"}, "math/": {"type": "gsm8k"}}, "'math' is 'math/' or its beginning"),
        ({"..": {"type": "gsm8k"}}, "'..' cannot name a metric"),
        ({"a": {"type": "by_field", "rewards": {"b": {"type": "gsm8k"}}}}, "does not match any of the expected tags"),
        ({"a": {"type": "weighted", "parts": {"long": OVERLONG}}}, "parts hold an overlong penalty but no reward"),
    ],
)  # fmt: skip
def test_what_is_no_choice_of_rewards(rewards, told):
    with pytest.raises(ValidationError, match=told):
        RewardByField(type="by_field", rewards=rewards)
