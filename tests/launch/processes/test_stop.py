"""A run that is stopped, or loses its rollout side, at any moment: no step is lost or done twice, and what it
learns is the same."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout.tiny_model import make_tiny_countdown_model
from tests.support.megatron_workers import make_hf_model, run_ranks
from tests.support.stop_workers import STEPS, Script, work_failing_publishes, work_lives
from trainer.batch.files import batch_file
from trainer.recording import read_batch
from trainer.tracking.ledger import LEDGER, read_ledger, summary

NOT_OF_THE_RUN = ("time/", "throughput/", "sync/", "sampling/", "staleness/", "elapsed_s")

# What goes wrong -> how the run ends, and the last complete step.
JOBS = {
    "stop while groups are sampled": (Script("sampling", 3, "stop"), "StopRequested: the test asked", 2),
    "stop before the first groups": (Script("sampling", 1, "stop"), "StopRequested: the test asked", 0),
    "stop in the first evaluation": (Script("evaluation", 1, "stop"), "StopRequested: the test asked", 0),
    "stop in the evaluation of a step": (Script("evaluation", 2, "stop"), "StopRequested: the test asked", 2),
    "stop in the last evaluation": (Script("evaluation", 3, "stop"), "StopRequested: the test asked", STEPS),
    "stop while weights are sent": (Script("publish", 3, "stop"), "StopRequested: the test asked", 3),
    "the servers fail": (Script("sampling", 2, "fail"), "SamplingError: the sample role failed: GenerationError: the servers are gone", 1),
    "the sample role is silent": (Script("sampling", 4, "silent"), "SamplingError: the sample role .* did not answer NextGroups in .*", 3),
    "the evaluation fails": (Script("evaluation", 2, "fail"), "SamplingError: .*GenerationError: the servers are gone", 2),
    "weights cannot be sent": (Script("publish", 2, "fail"), "ControlError: a server is gone", 2),
    "the last weights cannot be sent": (Script("publish", STEPS, "fail"), "ControlError: a server is gone", STEPS),
}  # fmt: skip
OWN_ERROR = "the learner fails in the middle of a step"
AHEAD = "two steps ahead, "
"""The engine in these tests gives the same tokens whenever it is asked, so that steps ahead change nothing."""
JOBS |= {
    AHEAD + name: JOBS[name]
    for name in ("stop while groups are sampled", "the servers fail", "stop while weights are sent")
}
DRAINED = AHEAD + "stop in an update that the next samples are waited for behind"
JOBS[DRAINED] = (Script("update", 2, "stop"), "StopRequested: the test asked", 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stop")


@pytest.fixture(scope="module")
def lives(root) -> dict[str, list[list[dict]]]:
    """Of each job, by rank: its life and the one after."""
    make_tiny_countdown_model(root / "model", seed=0)
    jobs = {"undisturbed": (root / "undisturbed", Script(), [])}
    jobs |= {OWN_ERROR: (root / OWN_ERROR, Script("update", 4, "die"), ["checkpoint.every=2"])}
    jobs |= {
        name: (
            root / name,
            replace(script, _times={}),
            (["rollout.max_staleness=2"] if name.startswith(AHEAD) else [])
            + (["rollout.drain_s=1"] if name == DRAINED else []),
        )
        for name, (script, _, _) in JOBS.items()
    }
    ranks = run_ranks(work_lives, 2, root / "ranks", root / "model", ["layout.dp=2"], jobs, deadline_s=900)
    return {name: [of_rank[name] for of_rank in ranks] for name in jobs}


def rows(folder: Path) -> list[dict]:
    """metrics.jsonl, but for what tells of time and of the transfer."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in line.items() if not name.startswith(NOT_OF_THE_RUN)} for line in lines
    ]


def assert_same_run(root: Path, name: str, lives: dict) -> None:
    whole, last = lives["undisturbed"], [of_rank[-1] for of_rank in lives[name]]
    assert rows(root / name) == rows(root / "undisturbed"), "every step once, with the same metrics"
    ledger, undisturbed_ledger = ([*read_ledger(root / of / LEDGER)] for of in (name, "undisturbed"))
    assert ledger == undisturbed_ledger and len(ledger) == STEPS and "NOT BALANCED" not in summary(ledger)
    for (undisturbed,), resumed in zip(whole, last, strict=True):
        assert resumed["ended"] is None
        for what in ("version", "position", "kl_coefficient"):
            assert resumed[what] == undisturbed[what], what
        assert all(
            torch.equal(resumed["weights"][key], tensor) for key, tensor in undisturbed["weights"].items()
        )
    for step in range(1, STEPS + 1):
        mine, theirs = (read_batch(batch_file(root / of / "batches", step)) for of in (name, "undisturbed"))
        assert (mine.version, mine.packed.tokens_T.tolist()) == (
            theirs.version,
            theirs.packed.tokens_T.tolist(),
        )
        assert torch.equal(mine.packed.old_logprobs_T, theirs.packed.old_logprobs_T)


@pytest.mark.engines
def test_the_undisturbed_run_is_worth_comparing_with(root, lives):
    found = rows(root / "undisturbed")
    assert [row["step"] for row in found] == list(range(STEPS + 1))
    assert [row["step"] for row in found if "eval/accuracy" in row] == [0, 2, STEPS]
    assert len({row["optim/grad_norm"] for row in found[1:]}) == STEPS and all(
        row["optim/grad_norm"] > 0 for row in found[1:]
    )
    assert len({row["policy/kl_coefficient"] for row in found[1:]}) > 1
    (life,) = lives["undisturbed"][0]
    assert life["position"]["position"] == 2 * STEPS and life["checkpoints"] == []


@pytest.mark.engines
@pytest.mark.parametrize("name", JOBS)
def test_a_run_that_is_interrupted_goes_on_as_if_it_had_not_been(root, lives, name):
    _, words, complete = JOBS[name]
    for first, second in lives[name]:
        assert re.fullmatch(words, first["ended"]), first["ended"]
        assert first["complete"] == complete
        assert first["checkpoints"] == ([f"step_{complete:06d}"] if complete else [])
        assert second["resumed"] == (complete or None)
    assert_same_run(root, name, lives)


@pytest.mark.engines
def test_an_error_of_the_learner_leaves_no_checkpoint_of_half_a_step(root, lives):
    for first, second in lives[OWN_ERROR]:
        assert first["ended"] == "ArithmeticError: a loss is not finite"
        assert (first["complete"], first["checkpoints"], second["resumed"]) == (3, ["step_000002"], 2)
    assert_same_run(root, OWN_ERROR, lives)


@pytest.mark.engines
def test_all_ranks_hear_of_a_failed_publish_and_can_go_on_together(tmp_path):
    """Wherever the servers fail the sender of a pipeline stage: the others are not left in a gathering, nor
    waiting for their turn."""
    folder = make_hf_model(tmp_path / "model", "qwen3")
    failures = {"tp=2": ["stage 0, bucket 0", "stage 0, bucket 2", "close", "resume"]}
    failures["pp=2"] = [*failures["tp=2"], "stage 1, bucket 0", "stage 1, bucket 1"]
    ranks = run_ranks(work_failing_publishes, 2, tmp_path / "ranks", folder, failures)
    for layout, places in failures.items():
        sent = {ranks[0][layout][place][3] for place in places}
        assert len(sent) == 1 and min(sent) > 0, (
            "what is sent after a failure is everything, as rank 0 counts it"
        )
        for place in places:
            for found in ranks:
                error, version, next_version, _ = found[layout][place]
                assert error == f"ControlError: {place} failed"
                assert next_version == version + 1, (
                    "the failed publish had its version, and the next one gets through"
                )
