"""The lines of samples: read back as written, and refused where they do not fit together."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rollout.records import FinishReason, Status
from tests.support.records import trajectory
from trainer.tracking.samples import (
    as_lines,
    forget_samples_after,
    read_samples,
    sample_file,
    sampled_steps,
    samples_of,
)

TWO_TURNS = trajectory(
    group_id=22, sibling_id=1, prompt_id="p7",
    token_ids=[5, 6, 7, 8, 9, 4, 3, 2], response_mask=[0, 0, 1, 1, 0, 1, 1, 1],
    rollout_logprobs=[0, 0, -0.1234567, -1.0, 0, -0.25, -2.0, -3.0], token_versions=[0, 0, 4, 4, 0, 4, 5, 5],
    finish_reason=FinishReason.STOP, reward=1.1, reward_parts={"correct": 1.0, "format": 0.1},
)  # fmt: skip


def written(tmp_path, *trajectories, logprobs=None):
    samples = samples_of(trajectories, logprobs or {}, step=12, version=6)
    path = sample_file(tmp_path, 12)
    path.write_bytes(as_lines(samples))
    assert read_samples(path) == samples
    return path


def test_a_line_has_what_was_sampled_turn_by_turn(tmp_path):
    own = np.array([9, -0.1, -1.1, 9, -0.2, -2.5, -3.5], dtype=np.float32)
    first, second = TWO_TURNS.turns
    path = written(
        tmp_path, replace(TWO_TURNS, turns=[first, replace(second, reward=0.1)]), logprobs={0: own}
    )
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {
        "step": 12, "version": 6, "group": 22, "sibling": 1, "branch": 0, "prompt_id": "p7", "status": "ok",
        "reward": 1.1, "parts": {"correct": 1.0, "format": 0.1},
        "turns": [
            {"start": 2, "end": 4, "finish_reason": "stop"},
            {"start": 5, "end": 8, "finish_reason": "stop", "reward": 0.1},
        ],
        "token_ids": [5, 6, 7, 8, 9, 4, 3, 2],
        "rollout_logprobs": [-0.123457, -1.0, -0.25, -2.0, -3.0],
        "learner_logprobs": [-0.1, -1.1, -0.2, -2.5, -3.5],
        "versions": [[4, 3], [5, 2]],
    }  # fmt: skip
    assert path.name == "step_000012.jsonl"


def test_without_score_turns_and_finite_numbers(tmp_path):
    nothing = trajectory(
        group_id=1, sibling_id=0, prompt_id="p", token_ids=[5, 6], response_mask=[0, 0],
        rollout_logprobs=[0, 0], token_versions=[0, 0], reward=None, reward_parts={},
    )  # fmt: skip
    strange = replace(TWO_TURNS, reward_parts={"own": float("nan")})
    path = written(tmp_path, replace(nothing, status=Status.FAILED))
    (sample,) = read_samples(path)
    assert (sample.status, sample.reward, sample.turns, sample.versions) == ("failed", None, [], [])
    path.write_bytes(as_lines(samples_of([strange], {0: np.full(7, -np.inf, np.float32)}, step=1, version=1)))
    (sample,) = read_samples(path)
    assert sample.parts == {"own": None} and sample.learner_logprobs == [None] * 5


@pytest.mark.parametrize(
    "change",
    [
        lambda line: b"",
        lambda line: line[: len(line) // 2],
        lambda line: b"\xff" + line,
        lambda line: line.replace(b'"end":4', b'"end":6'),
        lambda line: line.replace(b'"end":8', b'"end":9'),
        lambda line: line.replace(b"[4,3]", b"[4,2]"),
        lambda line: line.replace(b'"rollout_logprobs":[', b'"rollout_logprobs":[0.0,'),
        lambda line: line.replace(b'"token_ids":[5', b'"token_ids":["x"'),
    ],
)
def test_what_is_no_sample_is_one_clear_error(tmp_path, change):
    path = written(tmp_path, TWO_TURNS)
    changed = change(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=r"step_000012\.jsonl cannot be read as samples of a step"):
        read_samples(path)


def test_a_resumed_run_forgets_the_steps_that_it_does_again(tmp_path):
    for step in (1, 2, 3, 1_000_000):
        sample_file(tmp_path, step).write_bytes(b"")
    (tmp_path / "step_odd.jsonl").write_bytes(b"")
    assert sampled_steps(tmp_path) == [1, 2, 3, 1_000_000]
    forget_samples_after(tmp_path, 2)
    assert sampled_steps(tmp_path) == [1, 2]
    forget_samples_after(tmp_path / "nowhere", 0)
    assert sampled_steps(tmp_path / "nowhere") == []
