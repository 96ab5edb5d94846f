"""The command on the real engines: SGLang servers and Megatron ranks over gloo, on a tiny model made here.

Slow (a start of the engines takes half a minute), so few runs, each looked at from many sides.
"""

import contextlib
import json
import re
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.loader import load_config
from rollout.sampling.sampler import epoch_order
from rollout.tasks import load_task
from rollout.tokenization import load_tokenizer
from tests.support.whole_runs import (
    RECIPE,
    ROOT,
    SMALL,
    assert_nothing_left,
    finish,
    start,
    steps_of,
    wait_for,
    wait_for_steps,
)
from trainer.batch.files import batch_file, recorded_steps
from trainer.recording import read_batch

pytestmark = pytest.mark.engines


def test_a_float32_run_on_two_data_parallel_ranks_is_exact(folder):
    # A random model solves nothing; rewarding length gives it something to learn from the first step on.
    (folder / "my_reward.py").write_text(
        "def score(prompt, response, reference):\n    return len(response) / 14\n"
    )
    settings = [
        *SMALL,
        "checkpoint.every=2",
        "reward.type=function",
        "reward.function=my_reward:score",
        "learner.old_logprobs=always",
    ]
    process = start("train", RECIPE, *settings, "steps=3", cwd=folder)
    said = finish(process)
    assert process.returncode == 0, said
    run, steps = folder / "runs" / "latest", steps_of(folder)
    assert [s["step"] for s in steps] == [1, 2, 3]
    for step in steps:
        assert step["policy/ppo_kl"] == 0.0, "current differs from old in the first minibatch"
        assert step["policy/ratio_max"] == 1.0
        assert "sync/max_logprob_gap" not in step, "checksums and samples leave a probe nothing to show"
        assert step["mismatch/logprob_gap_max"] <= 1e-4
        assert step["sync/version"] == step["step"]
    summary = json.loads((run / "summary.json").read_text())
    assert (
        summary["steps"] == 3 and 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
    )
    assert steps[0]["optim/grad_norm"] > 0
    assert set(summary["seconds"]) >= {"sampling", "logprobs", "update", "sync", "evaluation"}
    assert (run / "report.html").stat().st_size > 10_000
    assert (run.parent / "mlflow.db").exists() and not (run / "mlflow.db").exists()
    trained, start_weights = (
        load_file(run / "hf" / "model.safetensors"),
        load_file(folder / "model" / "model.safetensors"),
    )
    assert trained.keys() == start_weights.keys()
    assert any(not torch.equal(trained[k], start_weights[k]) for k in trained), "nothing was learned"
    assert_nothing_left(folder)

    # A resumed run goes on from step 2's checkpoint: step 3 again, then step 4, each with the next four
    # prompts.
    process = start("train", RECIPE, *settings, "steps=4", f"resume={run.resolve()}", cwd=folder)
    said = finish(process)
    assert process.returncode == 0, said
    again = steps_of(folder)
    assert [s["step"] for s in again] == [1, 2, 3, 4]
    assert again[3]["sync/version"] == 4
    saved = json.loads((run / "checkpoints" / "step_000004" / "extra.json").read_text())
    assert (saved["step"], saved["version"], saved["sampler"]["position"]) == (4, 4, 16)

    # Export takes the finished model; where only a checkpoint is left, the same weights come out of that.
    final = load_file(run / "hf" / "model.safetensors")
    for out in ("from-model", "from-checkpoint"):
        exported = start("export", "runs/latest", out, cwd=folder)
        said = finish(exported)
        assert exported.returncode == 0, said
        found = load_file(folder / out / "model.safetensors")
        assert found.keys() == final.keys()
        assert all(torch.equal(found[name], final[name]) for name in final), (
            f"{out} differs from the trained weights"
        )
        shutil.rmtree(run / "hf", ignore_errors=True)
    assert_nothing_left(folder)

    # The run's own config starts a new run, not the resumed one; another seed does not go on from it.
    assert load_config(run / "config.yaml").resume is None
    refused = start("train", RECIPE, *settings, "seed=1", f"resume={run.resolve()}", cwd=folder)
    assert "seed" in finish(refused) and refused.returncode == 2


def test_every_term_at_once_on_two_tensor_parallel_ranks(folder):
    (folder / "my_reward.py").write_text(
        "def score(prompt, response, reference):\n"
        "    if len(response) % 2:\n"
        "        raise RuntimeError('odd answers are not for me')\n"
        "    return float(len(response)) / 14\n"
    )
    reward = ["reward.type=function", "reward.function=my_reward:score"]
    process = start(
        "train", str(ROOT / "configs/debug/countdown_smoke.yaml"), "model.path=model", *reward, cwd=folder
    )
    said = finish(process)
    assert process.returncode == 0, said
    steps = steps_of(folder)
    assert sum(step["reward/failed"] for step in steps) > 0, (
        "a reward that raises is scored 0 and counted, and the run goes on"
    )
    assert "odd answers are not for me" in (folder / "runs" / "latest" / "logs" / "sample.log").read_text()
    assert [s["step"] for s in steps] == [1, 2]
    for step in steps:
        assert step["mismatch/abs_prob_max"] > 1e-4, "a bfloat16 rollout must show a gap"
        assert 0 < step["mismatch/ess"] < 1
        assert step["loss/entropy"] < 0 and step["policy/entropy"] > 0
    assert steps[1]["policy/ref_kl"] > 0, "the policy has moved away from its reference"
    assert_nothing_left(folder)


def test_a_run_goes_on_in_another_layout(folder):
    """Interleaved pipeline stages send to servers of two tensor-parallel ranks; their checkpoint goes on with
    sequence parallelism."""
    settings = [
        *SMALL,
        "rollout.tp=2",
        "evaluation.at_ends=false",
        "checkpoint.every=1",
        "learner.token_budget=64",
    ]
    (folder / "my_reward.py").write_text(
        "def score(prompt, response, reference):\n    return len(response) / 14\n"
    )
    settings += ["reward.type=function", "reward.function=my_reward:score", "learner.old_logprobs=always"]
    first = ["layout.dp=1", "layout.pp=2", "layout.vpp=2", "steps=2"]
    second = ["layout.dp=1", "layout.tp=2", "layout.sp=true", "steps=3", "resume=runs/latest"]
    for layout in (first, second):
        process = start("train", RECIPE, *settings, *layout, cwd=folder)
        said = finish(process)
        assert process.returncode == 0, said
        assert_nothing_left(folder)
    steps = steps_of(folder)
    assert [s["step"] for s in steps] == [1, 2, 3]
    for step in steps:
        assert step["policy/ppo_kl"] == 0.0 and step["policy/ratio_max"] == 1.0
        assert step["mismatch/logprob_gap_max"] <= 1e-4
        assert step["optim/grad_norm"] > 0


HOLDING_REWARD = """
import pathlib, time

def score(prompt, response, reference):
    while (pathlib.Path({folder!r}) / "hold").exists():
        (pathlib.Path({folder!r}) / "holding").touch()
        time.sleep(0.02)
    return len(response) / 14
"""


def test_a_pre_empted_run_goes_on_with_the_step_that_was_being_sampled(folder):
    """SIGTERM while the third step's samples are scored: it is dropped, and the second step saved, though the
    run keeps no checkpoints."""
    (folder / "my_reward.py").write_text(HOLDING_REWARD.format(folder=str(folder)))
    settings = ["model.path=model", "steps=5", "checkpoint.every=0", "record_batches=all"]
    settings += ["launch.stop_timeout_s=120", "launch.stop_grace_s=60"]
    settings += ["reward.type=function", "reward.function=my_reward:score", "reward.timeout_s=300"]
    process = start("train", str(ROOT / "configs/debug/countdown_smoke.yaml"), *settings, cwd=folder)
    wait_for_steps(folder, 3, process)  # step 0 is the evaluation before the first
    (folder / "hold").touch()
    wait_for(lambda: (folder / "holding").exists(), process, "samples to be scored")
    process.send_signal(signal.SIGTERM)
    said = finish(process)
    assert process.returncode == 75, said
    run = (folder / "runs" / "latest").resolve()
    last = steps_of(folder)[-1]["step"]
    go_on = rf"stopped after step {last} on request; go on with `tandem resume \S*{run.name}`"
    assert "stopping (SIGTERM)" in said and re.search(go_on, said), said
    assert 2 <= last < 5 and [path.name for path in (run / "checkpoints").glob("step_*")] == [
        f"step_{last:06d}"
    ]
    assert not (run / "hf").exists() and not (run / "summary.json").exists()
    assert mlflow_statuses(run) == ["KILLED"]
    assert_nothing_left(folder)

    (folder / "hold").unlink()
    process = start("resume", str(run), cwd=folder)
    said = finish(process)
    assert process.returncode == 0, said
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    logged = [line.split()[0] for line in (run / "console.log").read_text().splitlines() if "/5 " in line]
    assert logged == ["0/5", "1/5", "2/5", "3/5", "4/5", "5/5"]
    assert mlflow_statuses(run) == ["FINISHED"], "one run, continued"
    assert recorded_prompts(run) == prompts_in_order(run, count=5 * 4)
    assert json.loads((run / "summary.json").read_text())["accuracy_after"] is not None
    assert_nothing_left(folder)


def mlflow_statuses(run: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(run.parent / "mlflow.db")) as store:
        found = store.execute(
            "select status from runs where name like ? order by start_time", (f"{run.name} %",)
        )
        return [status for (status,) in found]


def recorded_prompts(run: Path) -> list[list[int]]:
    """Of each group that was trained on, in the order of steps and groups: its prompt's tokens."""
    found = []
    for step in recorded_steps(run / "batches"):
        batch = read_batch(batch_file(run / "batches", step))
        ends = batch.packed.cu_seqlens.tolist()
        first_of_group = [
            i
            for i, group in enumerate(batch.group_ids_S.tolist())
            if group not in batch.group_ids_S[:i].tolist()
        ]
        for i in first_of_group:
            first_response = batch.packed.response_mask_T[ends[i] : ends[i + 1]].tolist().index(True)
            found.append(batch.packed.tokens_T[ends[i] : ends[i] + first_response + 1].tolist())
    return found


def prompts_in_order(run: Path, count: int) -> list[list[int]]:
    """What a run of this config draws when nothing disturbs it."""
    config = load_config(run / "config.yaml", [])
    train = load_task(config.task, tokenizer=load_tokenizer(run.parent.parent / config.model.path)).train
    order = epoch_order(len(train), seed=config.seed, epoch=0)
    return [list(train[i].token_ids) for i in order[:count]]
