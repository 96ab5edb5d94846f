"""The command on the real engines: SGLang servers and Megatron ranks over gloo, on a tiny model made here.

Slow (a start of the engines takes half a minute), so few runs, each looked at from many sides.
"""

import contextlib
import json
import math
import re
import shutil
import sqlite3
import statistics
from collections import defaultdict
from itertools import groupby, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.loader import load_config
from rollout.sampling.order import epoch_order
from rollout.tasks import load_task
from rollout.tiny_model import make_tiny_countdown_model
from rollout.tokenization import load_tokenizer
from tests.support.command import tandem
from tests.support.service_files import tensorboard_values, values_of, wandb_runs
from tests.support.whole_runs import (
    RECIPE,
    SMALL,
    assert_nothing_left,
    finish,
    run,
    start,
    steps_of,
    wait_for,
)
from tracing.parts import parts_of
from tracing.reading import Trace, read_trace
from trainer.batch.files import batch_file, recorded_steps
from trainer.engine_agreement import EXACT_TOLERANCE
from trainer.recording import read_batch
from trainer.tracking.samples import EVALUATION, read_samples, sample_file, sampled_steps

pytestmark = pytest.mark.engines


LENGTH_REWARD = "def score(prompt, response, reference):\n    return len(response) / 14\n"
"""A random model solves nothing; rewarding length gives it something to learn from the first step on."""
HOLDING_REWARD = """
import time
from pathlib import Path

def score(prompt, response, reference):
    metrics = Path("runs/latest/metrics.jsonl")
    while not Path("go-on").exists() and metrics.exists() and len(metrics.read_text().splitlines()) > 3:
        Path("holding").touch()  # in the fourth step, behind the evaluation before the first and three steps
        time.sleep(0.02)
    if len(response) % 2:
        raise RuntimeError("odd answers are not for me")
    return len(response) / 14
"""
REWARD = ["reward.type=function", "reward.function=my_reward:score"]
KL, HORIZON = 0.05, 100


def test_a_pre_empted_run_with_a_critic_is_exact_resumes_exports_and_is_replayed(folder):
    """Float32 with aligned numerics on two data-parallel ranks, from a server of two tensor-parallel ranks, with a critic,
    an adaptive KL penalty in the reward, and a reward that fails for some responses.

    `tandem stop` while the fourth step's samples are scored: it is dropped, and the third step saved, though it is no
    multiple of two.
    """
    (folder / "my_reward.py").write_text(HOLDING_REWARD)
    settings = [
        *SMALL, *REWARD, "checkpoint.every=2", "checkpoint.keep=5", "learner.old_logprobs=always", "record_batches=all",
        "model.numerics=aligned", "rollout.tp=2",
        "advantage.type=gae", "critic.warmup_steps=1", "learner.minibatches=1", "kl.place=reward", f"kl.coefficient={KL}",
        f"kl.controller={{type: adaptive, target: 0.1, horizon: {HORIZON}}}", "steps=4", "reward.timeout_s=300",
        "launch.stop_timeout_s=120", "launch.stop_grace_s=60", "tracking.sample_groups=4",
    ]  # fmt: skip
    process = start("train", RECIPE, *settings, cwd=folder)
    wait_for(lambda: (folder / "holding").exists(), process, "the samples of the fourth step to be scored")
    stop = tandem("stop", "runs/latest", cwd=folder)
    said = finish(process)
    assert (stop.returncode, process.returncode) == (0, 75), stop.stderr + said
    assert re.search(r"stopped after step 3: SIGUSR1; it continues with `tandem resume ", stop.stdout), (
        stop.stdout
    )
    path, steps = (folder / "runs" / "latest").resolve(), steps_of(folder)
    assert [s["step"] for s in steps] == [1, 2, 3]
    go_on = rf"stopped after step 3 on request; continue with `tandem resume \S*{path.name}`"
    assert "stopping (SIGUSR1)" in said and re.search(go_on, said), said
    assert {file.name for file in (path / "checkpoints").glob("step_*")} == {"step_000002", "step_000003"}
    assert not (path / "hf").exists() and not (path / "summary.json").exists()
    assert mlflow_statuses(path) == ["KILLED"]
    assert_nothing_left(folder)
    for step in steps:
        assert 0 < step["reward/failed"] < 16
        assert "sync/max_logprob_gap" not in step, "checksums and samples leave a probe nothing to show"
        assert step["mismatch/logprob_gap_max"] == 0.0, "both engines give every token the same bits"
        assert step["response/length_mean"] < step["response/length_max"], "responses of several lengths"
        assert step["sync/version"] == step["step"]
    warming_up, *training = steps
    assert "optim/grad_norm" not in warming_up and "loss/total" not in warming_up, (
        "the first step trains the critic alone"
    )
    assert warming_up["critic/value_mean"] == 0.0 and warming_up["critic/grad_norm"] > 0
    for step in training:
        assert step["policy/ppo_kl"] == 0.0, "current differs from old in the first minibatch"
        assert step["policy/ratio_max"] == 1.0
        assert step["optim/grad_norm"] > 0 and step["critic/value_mean"] != 0.0
    # The measured KL stays below its target, so each step that trains the policy takes a fifth of 16 / horizon off the coefficient.
    coefficients = [KL * (1 - 0.2 * 16 / HORIZON) ** n for n in (0, 0, 1, 2)]
    assert [step["policy/kl_coefficient"] for step in steps] == pytest.approx(coefficients[:3])
    # A resumed run goes on from its last step, with the next four prompts.
    (folder / "go-on").touch()
    run("resume", str(path), cwd=folder)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 4], (
        "one evaluation before the first step"
    )
    logged = [line.split()[0] for line in (path / "console.log").read_text().splitlines() if "/4 " in line]
    assert logged == ["0/4", "1/4", "2/4", "3/4", "4/4"]
    assert mlflow_statuses(path) == ["FINISHED"], "one run, continued"
    trained_on, drawn = recorded_prompts(path), iter(prompts_in_order(path, count=4 * 4))
    assert all(prompt in drawn for prompt in trained_on), "the prompts follow one another as they were drawn"
    samples = [
        sample for step in (1, 2, 3, 4) for sample in read_samples(sample_file(path / "samples", step))
    ]
    assert sampled_steps(path / "samples", EVALUATION) == [0, 4]
    scored = {sample.group for sample in samples if sample.reward is not None}
    assert {sample.group for sample in samples} == {*range(16)}
    assert len(trained_on) == len(scored), "no group is missing but where the rewards of all siblings failed"
    again = steps_of(folder)
    assert [step["policy/kl_coefficient"] for step in again] == pytest.approx(coefficients), (
        "the coefficient is not that of the checkpoint"
    )
    for step in again[3:]:
        assert step["critic/value_mean"] != 0.0, "a critic that starts anew values everything at zero"
        assert step["mismatch/logprob_gap_max"] == 0.0
    assert again[3]["sync/version"] == 4
    saved = json.loads((path / "checkpoints" / "step_000004" / "extra.json").read_text())
    assert (saved["step"], saved["version"], saved["sampler"]["position"]) == (4, 4, 16)
    kept = {file.name for file in (path / "checkpoints" / "critic").glob("step_*")}
    assert kept == {"step_000002", "step_000003", "step_000004"}
    summary = json.loads((path / "summary.json").read_text())
    assert (
        summary["steps"] == 4 and 0 <= summary["accuracy_before"] <= 1 and 0 <= summary["accuracy_after"] <= 1
    )
    assert set(summary["seconds"]) >= {"sampling", "logprobs", "update", "sync", "evaluation"}
    assert "Traceback" not in (path / "logs" / "sglang-0.log").read_text(), "a false trail"
    assert (path / "report.html").stat().st_size > 10_000
    assert (path.parent / "mlflow.db").exists() and not (path / "mlflow.db").exists()
    trained, start_weights = (
        load_file(path / "hf" / "model.safetensors"),
        load_file(folder / "model" / "model.safetensors"),
    )
    assert trained.keys() == start_weights.keys()
    assert any(not torch.equal(trained[k], start_weights[k]) for k in trained), "nothing was learned"

    assert_replay_agrees(folder, again[2])

    # Export takes the finished model; where only a checkpoint is left, the same weights come out of that.
    final = load_file(path / "hf" / "model.safetensors")
    for out in ("from-model", "from-checkpoint"):
        run("export", "runs/latest", out, cwd=folder)
        exported = load_file(folder / out / "model.safetensors")
        assert exported.keys() == final.keys()
        assert all(torch.equal(exported[name], final[name]) for name in final), (
            f"{out} differs from the trained weights"
        )
        shutil.rmtree(path / "hf", ignore_errors=True)

    # The run's own config starts a new run, not the resumed one; another seed does not go on from it.
    assert load_config(path / "config.yaml").resume is None
    refused = run("train", RECIPE, *settings, "seed=1", f"resume={path.resolve()}", cwd=folder, exit_code=2)
    assert "seed" in refused


def assert_replay_agrees(folder: Path, trained: dict) -> None:
    """``tandem replay`` of a step with gradients, against what the run itself logged of it."""
    corrections = ("decoupled_seq_is", "pg_geo_rs_token_is")
    options = [option for name in corrections for option in ("--correction", name)]
    output = run("replay", "runs/latest", "--step", str(trained["step"]), "--gradients", *options, cwd=folder)
    file = folder / "runs" / "latest" / "replay" / f"step_{trained['step']:06d}.json"
    rows = {row["correction"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["as trained", "disabled", *corrections] and all(name in output for name in rows)
    as_trained = rows["as trained"]
    assert as_trained["gradient_norm"] == pytest.approx(trained["optim/grad_norm"], rel=1e-4)
    assert as_trained["loss"] == pytest.approx(trained["loss/total"], rel=1e-4, abs=2e-6)
    # Engines that agree to rounding: at ratios of one a policy gradient and the clipped objective have one
    # gradient.
    for name in ("as trained", *corrections):
        assert rows[name]["cosine"] == pytest.approx(1.0, abs=1e-4), name


CONTROL = re.compile(
    r"POST /(\w*(?:pause|continue)_generation|\w+_memory_occupation|\w+_weight_update|update_weights_from_distributed) "
)
STEP = [
    "pause_generation", "release_memory_occupation", "resume_memory_occupation", "pause_generation", "begin_weight_update",
    "update_weights_from_distributed", "end_weight_update", "resume_memory_occupation", "continue_generation",
]  # fmt: skip
TAKEN_OVER = ["pause_generation", "update_weights_from_distributed"] * 2
"""Whether the servers have the plugin, and whether an earlier learner has left an update open: that request is
refused, as it should be."""
BESIDE = ["pause_generation", "release_memory_occupation", "resume_memory_occupation", "continue_generation"]
"""A probe's or a checkpoint's need of the learner."""


def control_calls(log: Path) -> list[str]:
    return [name for name, _ in groupby(CONTROL.findall(log.read_text()))]


TWO_TURNS = """
import asyncio
from rollout.environments import Outcome

class TwoTurns:
    async def run(self, problem, context):
        context.observe(problem.token_ids)
        first = await context.act(max_new_tokens=6, stop_token_ids=context.encode("="))
        context.reward_turn(first.token_ids[0] / 100)
        forks = [context.fork()] if first.token_ids[0] % 2 else []
        context.observe(context.encode(f"({len(first.token_ids)}) "))
        second, *_ = await asyncio.gather(*(one.act(max_new_tokens=8) for one in [context, *forks]))
        score = await context.score(context.decode(second))
        return Outcome(reward=score.value + first.token_ids[0] / 100, parts={"last": score.value})
"""


def test_a_run_goes_on_in_another_layout_and_colocated(folder, monkeypatch):
    """Episodes of two turns, some of which fork, of a model with experts, which the learner replays. So it does with the
    ids that top_p and top_k kept: the gap is rounding at a temperature, under both layouts. Interleaved
    pipeline stages send to servers of two tensor-parallel ranks. Their checkpoint goes on with sequence parallelism,
    taking turns with the servers on the same devices.

    On CPU the servers have no memory to give back, but everything is asked of them and of the learner as on a
    GPU. Both lives copy their metrics to W&B, whose run goes on, and to TensorBoard.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    (folder / "my_reward.py").write_text(LENGTH_REWARD)
    (folder / "my_turns.py").write_text(TWO_TURNS)
    settings = [
        *SMALL, *REWARD, "environment={type: tokens, environment: my_turns:TwoTurns}", "rollout.tp=2",
        "advantage={type: grpo, credit: turn}", "evaluation.at_ends=false", "learner.token_budget=64", "learner.old_logprobs=always",
        "kl.coefficient=0.01", "layout.dp=1", "record_batches={every: 4}",
        "rollout.top_p=0.9", "rollout.top_k=10", "rollout.temperature=0.7", "tracking.wandb={}", "tracking.tensorboard=true",
    ]  # fmt: skip
    make_tiny_countdown_model(folder / "experts", seed=0, family="qwen3_moe")
    settings += ["model.path=experts", "learner.routing=rollout"]
    # The last step is saved, though it is no multiple of three.
    pipeline = ["layout.pp=2", "layout.vpp=2", "checkpoint.every=3", "steps=2", "tracking.trace.steps=1"]
    run("train", RECIPE, *settings, *pipeline, cwd=folder)
    assert_traced(folder, steps=[2])
    colocated = [
        "launch.placement=colocated",
        "rollout.server_args.log_level_http=info",
        "checkpoint.every=2",
        "tracking.trace={first: 4, steps: 2, profile_rank: 1}",
    ]
    tensor = ["layout.tp=2", "layout.sp=true", "steps=5", "resume=runs/latest"]
    run("train", RECIPE, *settings, *tensor, *colocated, cwd=folder)
    steps = steps_of(folder)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
    for step in steps:
        assert step["policy/ppo_kl"] == 0.0 and step["policy/ratio_max"] == 1.0
        assert step["mismatch/logprob_gap_max"] <= EXACT_TOLERANCE
        assert step["optim/grad_norm"] > 0
        forks = 16 * (step["episode/sequences_mean"] - 1)
        assert step["episode/turns_checked"] == 2 * 16 + forks and 0 <= forks <= 16
        assert step["episode/observed_tokens"] == 4 * 16
        assert step["mismatch/replayed_fraction"] == 1.0 and step["episode/retracted_turns"] == 0
        assert 2 < step["mismatch/kept_ids"] <= 10
        assert 0 < step["policy/entropy"] <= math.log(10)
        # Float32 engines choose alike, but for ties within rounding.
        by_layer = [step[f"mismatch/experts_differ/layer_{number}"] for number in range(4)]
        assert step["mismatch/experts_differ"] == pytest.approx(sum(by_layer) / 4) and max(by_layer) < 0.01
    # Not all episodes of a step, so that its groups differ in their sequences.
    assert any(1 < step["episode/sequences_mean"] < 2 for step in steps)
    assert steps[1]["policy/ref_kl"] > 0, "the policy has moved away from its reference"
    assert all(step["policy/ref_kl"] > steps[1]["policy/ref_kl"] for step in steps[3:]), (
        "a reference of its own"
    )
    path = folder / "runs" / "latest"
    assert_copied(path, steps)
    assert_traced(folder, steps=[4, 5])
    for step in (4, 5):
        profile = json.loads((path / "trace" / f"torch-rank-1-step-{step}.json").read_text())
        assert any("aten::" in event.get("name", "") for event in profile["traceEvents"])
    assert (path / "figures" / "timeline.png").stat().st_size > 5_000
    assert_credit_of_turns(path, step=4)
    saved = json.loads((path / "checkpoints" / "step_000004" / "extra.json").read_text())
    assert saved["version"] == 4
    assert (path / "hf" / "model.safetensors").stat().st_size > 0
    # The start: room for the learner, a look at the servers, then its weights, and a probe. The end: a probe,
    # and room for the export.
    first = [*STEP[:2], *TAKEN_OVER, *STEP[2:]]
    assert control_calls(path / "logs" / "sglang-0.log") == [
        *first, *BESIDE, *STEP, *STEP, *BESIDE, *STEP, *BESIDE, *STEP[:2]
    ]  # fmt: skip


def assert_copied(path: Path, steps: list[dict]) -> None:
    """TensorBoard has every metric of both lives, and W&B's one run has each once."""
    wanted = values_of(steps)
    _, values = tensorboard_values(path)
    assert {place: values[place] for place in wanted} == {
        place: pytest.approx(value, rel=1e-6) for place, value in wanted.items()
    }
    (first, before), (second, after) = wandb_runs(path)
    assert (
        first == second
        and {step for step, _ in before} == {1, 2}
        and {step for step, _ in after} == {3, 4, 5}
    )
    found = before | after
    assert {place: found[place] for place in wanted} == wanted


def assert_traced(folder: Path, steps: list[int]) -> None:
    """The parts of each traced step add up to its wall time on each of two learner ranks, and the sample role's requests
    lie within the learner's waits."""
    trace = read_trace(folder / "runs" / "latest")
    assert [p.who for p in trace.processes] == ["sample", "rank-0", "rank-1"] and [*trace.steps] == steps
    sample, *ranks = trace.processes
    for number, times in trace.steps.items():
        for parts in parts_of(Trace(ranks, {number: times})):
            assert 0 <= parts.outside_s <= 0.05 * parts.wall_s, (number, parts)
            assert 0.95 <= sum(part.share for part in parts.parts if len(part.path) == 1) <= 1.0 + 1e-9
            names = {part.path[-1] for part in parts.parts}
            assert names >= {
                "sampling", "receive", "logprobs", "score old", "score ref", "correction", "advantages", "update", "micro-batch",
                "optimizer step", "keep samples", "sync", "servers paused", "send", "metrics", "checkpoint",
            }  # fmt: skip
    waits = [s for s in ranks[0].spans if s.name == "sampling"]
    requests = [s for s in sample.spans if s.name == "request"]
    in_time = [r for r in requests if any(w.begin <= r.begin and r.end <= w.end for w in waits)]
    # Each sample asks twice, and those that fork once more. The role records from a step before the learner.
    assert len(in_time) >= 2 * 16 * len(steps)
    answered = [s for s in sample.spans if s.name == "generate"]
    assert len(answered) >= len(requests) and all(s.notes["tokens"] > 0 for s in answered)
    assert {s.notes["server"].split(":")[0] for s in answered} == {"http"}
    assert sum(s.name == "reward" for s in sample.spans) >= 16 * len(steps)
    written = run("trace", "runs/latest", "--steps", "1", cwd=folder)
    assert f"steps {steps[-1]};" in written and "learner rank 0" in written
    events = json.loads((folder / "runs" / "latest" / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"].split(" (")[0] for e in events if e["name"] == "process_name"} == {
        "sample role", "learner rank 0", "learner rank 1",
    }  # fmt: skip


def assert_credit_of_turns(path: Path, step: int) -> None:
    """Of a recorded step: both turns of an episode are compared with all rewards of turns of their group, and the first
    is credited with the second's reward too."""
    batch = read_batch(batch_file(path / "batches", step))
    packed, rows = batch.packed, defaultdict(list)
    for row, (begin, end) in enumerate(pairwise(packed.cu_seqlens.tolist())):
        turns = [
            (packed.targets_T[begin + place].item(), packed.advantages_T[begin + place].item())
            for place in turn_starts(packed.response_mask_T[begin:end].tolist())
        ]
        if len(turns) == 2:  # a fork has one
            earned = turns[0][0] / 100
            rows[batch.group_ids_S[row].item()].append((earned, batch.rewards_S[row].item() - earned, turns))
    assert sum(map(len, rows.values())) == 16
    for episodes in rows.values():
        rewards = [reward for *both, _ in episodes for reward in both]
        mean, spread = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-6
        for first, second, ((_, of_first), (_, of_second)) in episodes:
            assert of_second == pytest.approx((second - mean) / spread, abs=1e-5)
            assert of_first - of_second == pytest.approx((first - mean) / spread, abs=1e-5)


def turn_starts(mask: list[bool]) -> list[int]:
    return [place for place, (before, now) in enumerate(pairwise([False, *mask])) if now and not before]


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
            if group >= 0 and group not in batch.group_ids_S[:i].tolist()  # -1: a sample whose reward failed
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
