"""Every preset, objective, advantage, KL form and aggregation on the real engines: two steps each, on one
start of them. The learner's ranks compute on a pretended GPU (``tests/support/pretend_gpu``), if there is a compiler for it.

One run of ``tests/support/variant_workers.py`` serves all tests. Oracles: its own recorded batches replayed in
this process alone, with log-probs and gradients of Hugging Face's model, which shares neither engine, packing
nor ranks with the run.
"""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.presets import PRESETS
from configs.schema import RunConfig
from configs.schema.correction import ImportanceWeight
from parallel.packing import PackedBatch
from rollout.tiny_model import make_tiny_countdown_model
from rollout.tokenization import load_tokenizer
from tests.reference import advantages as slow
from tests.support import pretend_gpu
from tests.support.variant_workers import ADAPTIVE, STEPS, VARIANTS, first_step, variant_config
from tests.support.whole_runs import ROOT, assert_nothing_left, finish, processes_of
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.correction import rule_names
from trainer.algorithm.kl_reward import KLInReward
from trainer.batch.files import batch_file
from trainer.engine_agreement import EXACT_TOLERANCE
from trainer.ranks.totals import alone
from trainer.recording import read_batch
from trainer.studies.replay import Loss, LossOutput, of_logprobs, replay
from trainer.tracking.mlflow_thread import mlflow_name, store_file

DEADLINE_S = 900
pytestmark = pytest.mark.engines

DIGITS = """
def score(prompt, response, reference):
    digits = sum(map(str.isdigit, response))
    return float(digits >= 5), {"digits": digits, "plus": response.count("+")}
"""
"""A reward that about half of a random model's responses earn."""
GDPO = "parts of the reward, gdpo"
NOTHING_KEPT = [name for name in VARIANTS if name.startswith("nothing kept")]
SOME_REJECTED = [name for name in VARIANTS if name.startswith("some rejected")]
RECORDED = [name for name in VARIANTS if variant_config(name, Path("model")).learner.minibatches == 1]


def make_model(folder: Path) -> None:
    make_tiny_countdown_model(folder, seed=0)
    weights = load_file(folder / "model.safetensors")
    # Its <pad> starts as zeros, which a norm magnifies so much that this one row would be all that a
    # gradient's norm shows.
    row = weights["model.embed_tokens.weight"][1]
    row.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class Finished:
    """A run of all variants, read back."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "latest"

    @cached_property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def variants(self) -> dict[str, dict]:
        return json.loads((self.run / "variants.json").read_text())

    def steps(self, name: str) -> list[dict]:
        first = first_step(name)
        return [row for row in self.rows if first <= row["step"] < first + STEPS]

    def config(self, name: str) -> RunConfig:
        return variant_config(name, self.folder / "model")

    def recorded(self, step: int):
        return read_batch(batch_file(self.run / "batches", step))

    @cached_property
    def console(self) -> str:
        return (self.run / "console.log").read_text()

    @cached_property
    def model(self):
        from transformers import Qwen3ForCausalLM

        model = Qwen3ForCausalLM.from_pretrained(self.folder / "model", attn_implementation="eager")
        model.get_input_embeddings().padding_idx = (
            None  # an id like any other once it is sampled; it would get no gradient
        )
        return model


@pytest.fixture(scope="module")
def finished(tmp_path_factory, empty_mlflow_store) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("variants")
    make_model(folder / "model")
    (folder / "runs").mkdir()
    shutil.copy(empty_mlflow_store, folder / "runs" / "mlflow.db")
    (folder / "my_reward.py").write_text(DIGITS)
    device = pretend_gpu.build(folder)
    environment = (
        os.environ
        | {"PYTHONPATH": str(ROOT)}
        | ({} if device is None else {pretend_gpu.VARIABLE: str(device)})
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.variant_workers", "model"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said = finish(process, deadline_s=DEADLINE_S)
        assert process.returncode == 0, said
        assert_nothing_left(folder)
        yield Finished(folder)
    finally:
        for left in processes_of(folder):
            left.kill()


@pytest.mark.skipif(not pretend_gpu.can_be_built(), reason="needs g++ and Python's headers")
def test_the_pretended_gpu_refuses_what_a_gpu_refuses_and_computes_what_the_cpu_does(finished):
    device = pretend_gpu.built_in(finished.folder)
    environment = os.environ | {"PYTHONPATH": str(ROOT), pretend_gpu.VARIABLE: str(device)}
    command = [sys.executable, "-m", "tests.support.pretend_gpu.checks"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert "as a GPU" in done.stdout, done.stderr


@pytest.mark.skipif(not pretend_gpu.can_be_built(), reason="needs g++ and Python's headers")
def test_the_learner_computed_on_a_device_of_its_own(finished):
    done = [found["device_operations"] for found in finished.variants.values()]
    assert all(later - earlier > 1000 for earlier, later in pairwise([0, *done]))


# ----------------------------------------------------------------------------------------------------------------
# what is logged

BUCKET = "(le_64|le_256|le_1024|le_4096|over_4096)"
SPREAD = ("mean", "std", "min", "max")
ALWAYS = (
    *(f"loss/{term}" for term in ("total", "policy", "kl", "entropy")),
    *(f"optim/{name}" for name in ("grad_norm", "lr")),
    *(f"policy/{name}" for name in ("entropy", "ppo_kl", "ppo_kl_negative_fraction")),
    *(f"advantage/{name}" for name in SPREAD),
    *(
        f"reward/{name}"
        for name in ("mean", "std", "failed", "as_sampled", "importance_weighted", "importance_ess")
    ),
    *(
        f"mismatch/{name}"
        for name in (
            "k1",
            "k3",
            "abs_prob_mean",
            "abs_prob_max",
            "prob_pearson",
            "chi2_token",
            "chi2_sequence",
        )
    ),
    *(
        f"mismatch/{name}"
        for name in ("ess", "ess_bounded", "logprob_gap_max", "kept_fraction", "ratio_outside_fraction")
    ),
    *(f"mismatch/ratio_{name}" for name in ("mean", "min", "max")),
    *(
        f"mismatch/{kind}weight_{name}"
        for kind in ("", "raw_", "sequence_", "raw_sequence_")
        for name in SPREAD
    ),
    *(f"mismatch/ppl_{name}" for name in ("train", "rollout", "ratio")),
    *(f"mismatch/log_ppl_diff_{name}" for name in ("mean", "abs", "min", "max")),
    *(f"mismatch/response_abs_prob_{name}" for name in ("max_mean", "mean_mean", "mean_max", "over")),
    *(f"mismatch/response_abs_prob_{name}_share/le_0.001" for name in ("max", "mean")),
    *(
        f"mismatch/by_{what}/{BUCKET}/{name}"
        for what in ("length", "position")
        for name in ("abs_prob_mean", "abs_prob_max")
    ),
    *(f"mismatch/by_{what}/{BUCKET}/{name}" for what in ("length", "position") for name in ("k3", "k3_max")),
    *(f"mismatch/rejected/total/{name}" for name in ("tokens", "sequences", "touched_sequences")),
)
CRITIC = tuple(
    f"critic/{name}"
    for name in (
        "loss",
        "value_mean",
        "return_mean",
        "return_std",
        "error_std",
        "clip_fraction",
        "explained_variance",
        "grad_norm",
        "lr",
    )
)


def asked_for(config: RunConfig) -> set[str]:
    """Patterns of the metrics that a variant logs in every step."""
    correction, weight = config.correction, config.correction.weight
    names = set(ALWAYS)
    rules = rule_names(correction.reject) + ["veto"] * (correction.veto is not None)
    names |= {
        f"mismatch/rejected/{rule}/{part}"
        for rule in rules
        for part in ("tokens", "sequences", "touched_sequences")
    }
    names |= {"mismatch/veto/tokens", "mismatch/veto/sequences"} if correction.veto is not None else set()
    if isinstance(weight, ImportanceWeight):
        names |= {"mismatch/truncated_fraction"} if weight.upper is not None else set()
        names |= {"mismatch/below_lower_fraction"} if weight.lower is not None else set()
        names |= {"mismatch/weight_normaliser"} if weight.normalise else set()
    if config.policy_objective.type == "function":
        own = {"objective/ratio", "objective/clipped", "advantage/is_positive", "weight/above"}
        names |= {f"own/{what}" for what in own}
    elif config.policy_objective.type not in ("policy_gradient", "gmpo"):
        names |= {f"policy/ratio_{part}" for part in ("mean", "min", "max")}
    names |= set(CRITIC) if config.critic is not None else set()
    if config.kl.coefficient > 0:
        names |= {"policy/ref_kl"}
        names |= {"policy/kl_in_reward", "policy/kl_coefficient"} if config.kl.place == "reward" else set()
    if not config.compares_samples:
        names |= {"sync/max_logprob_gap"}
    return names


def test_every_choice_is_among_the_variants():
    from typing import get_args

    from configs.schema import objective
    from configs.schema.correction import Level

    configs = [variant_config(name, Path("model")) for name in VARIANTS]

    def types(union) -> set[str]:
        return {
            get_args(member.model_fields["type"].annotation)[0] for member in get_args(get_args(union)[0])
        }

    assert set(PRESETS) <= {
        setting.removeprefix("correction=") for settings in VARIANTS.values() for setting in settings
    }
    corrections = [c.correction for c in configs]
    assert all(PRESETS[name] in corrections for name in PRESETS)
    for minibatches in (1, 2):  # the correction is found at another time
        corrections = [c.correction for c in configs if c.learner.minibatches == minibatches]
        assert all(PRESETS[name] in corrections for name in list(PRESETS)[:8])
    assert {c.objective.type for c in configs} == types(objective.ObjectiveConfig)
    assert {c.advantage.type for c in configs} == types(objective.AdvantageConfig)
    assert {c.kl.estimator for c in configs if c.kl.place == "loss" and c.kl.coefficient} == set(
        get_args(objective.Estimator)
    )
    assert {c.kl.controller.type for c in configs if c.kl.place == "reward"} == {"fixed", "adaptive"}
    assert {c.aggregation.type for c in configs} == set(
        get_args(objective.AggregationConfig.model_fields["type"].annotation)
    )
    weights = [c.correction.weight for c in configs]
    assert {w.level for w in weights} == {"none", "function", *get_args(Level)}
    assert {w.bound for w in weights if isinstance(w, ImportanceWeight)} == {
        "truncate",
        "clip",
        "mask",
        "none",
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_logs_finite_numbers_and_its_metrics_and_moves_the_weights(finished, name):
    config, steps = finished.config(name), finished.steps(name)
    assert [row["step"] for row in steps] == [first_step(name), first_step(name) + 1]
    assert [row["sync/version"] for row in steps] == [row["step"] for row in steps]
    for row in steps:
        assert all(value is not None and math.isfinite(value) for value in row.values())
        missing = [
            wanted for wanted in asked_for(config) if not any(re.fullmatch(wanted, found) for found in row)
        ]
        if name in NOTHING_KEPT:  # a ratio over no token at all has no value
            missing = [wanted for wanted in missing if not wanted.startswith("policy/ratio_")]
        assert missing == []
        assert row["reward/failed"] == 0
        assert row["reward/as_sampled"] == pytest.approx(row["reward/mean"], abs=1e-6)
        assert row["mismatch/kept_fraction"] == pytest.approx(1 - row["mismatch/rejected/total/tokens"])
        assert (row["optim/grad_norm"] == 0) == (name in NOTHING_KEPT)
        assert math.isclose(
            row["loss/total"], row["loss/policy"] + row["loss/kl"] + row["loss/entropy"], abs_tol=1e-5
        )
    assert (finished.variants[name]["moved"] > 1e-5) == (name not in NOTHING_KEPT)


@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if variant_config(name, Path("model")).compares_samples]
)
def test_in_float32_there_is_no_gap_but_rounding(finished, name):
    config = finished.config(name)
    for row in finished.steps(name):
        assert 0 < row["mismatch/logprob_gap_max"] <= EXACT_TOLERANCE
        assert row["mismatch/ess"] == pytest.approx(1.0, abs=1e-6)
        assert row["reward/importance_weighted"] == pytest.approx(row["reward/mean"], abs=1e-3)
        assert row["mismatch/prob_pearson"] == pytest.approx(1.0, abs=1e-6)
        if name not in (*NOTHING_KEPT, *SOME_REJECTED):
            assert row["mismatch/kept_fraction"] == 1.0, "no preset may reject what agrees"
        if config.correction.mode == "decoupled" and "policy/first_ratio_max" in row:
            assert row["policy/first_ratio_max"] == row["policy/first_ratio_min"] == 1.0, (
                "current differs from old in the first minibatch"
            )
        if config.correction.mode == "decoupled" and config.learner.minibatches == 1:
            assert row["policy/ppo_kl"] == 0.0


@pytest.mark.parametrize("name", SOME_REJECTED)
def test_what_is_rejected_is_some_of_it(finished, name):
    for row in finished.steps(name):
        assert 0 < row["mismatch/kept_fraction"] < 1
        assert row["mismatch/rejected/ratio_token/tokens"] == pytest.approx(
            1 - row["mismatch/kept_fraction"]
        ), "no other rule rejects here"
        assert 0 < row["mismatch/rejected/total/touched_sequences"] <= 1


@pytest.mark.parametrize("name", NOTHING_KEPT)
def test_where_nothing_is_kept_loss_gradient_and_update_are_exact_zeros(finished, name):
    for row in finished.steps(name):
        assert row["mismatch/kept_fraction"] == 0.0
        assert row["loss/total"] == row["loss/policy"] == row["optim/grad_norm"] == 0.0
    assert finished.variants[name]["moved"] == 0.0


def test_the_console_says_where_nothing_is_kept_and_nowhere_else(finished):
    told = [
        (int(step), alarm)
        for step, alarm in re.findall(
            r"^  ! step (\d+): .*\(alarms\.(\w+)", finished.console, flags=re.MULTILINE
        )
    ]
    assert [step for step, alarm in told if alarm == "kept_min"] == [
        first_step(name) for name in NOTHING_KEPT
    ]
    agreeing = [
        name
        for name in VARIANTS
        if finished.config(name).compares_samples and name not in (*NOTHING_KEPT, *SOME_REJECTED)
    ]
    quiet = {row["step"] for name in agreeing for row in finished.steps(name)}
    assert [(step, alarm) for step, alarm in told if step in quiet] == [], "an alarm where both engines agree"


def test_whitened_advantages_have_mean_zero_and_deviation_one(finished):
    whitened = [
        name
        for name in VARIANTS
        if name.startswith(("advantage reinforce_pp", "advantage gae")) and "not whitened" not in name
    ]
    assert len(whitened) == 4
    for name in whitened:
        for row in finished.steps(name):
            tokens = row["response/tokens"]
            assert row["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
            assert row["advantage/std"] == pytest.approx(((tokens - 1) / tokens) ** 0.5, rel=1e-5)


def test_the_critic_starts_at_zero_and_learns(finished):
    for name in (name for name in VARIANTS if name.startswith("advantage gae")):
        first, second = finished.steps(name)
        assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-9), (
            "values of zero explain nothing"
        )
        assert second["critic/value_mean"] != 0.0 and second["critic/explained_variance"] != 0.0
        assert min(row["critic/grad_norm"] for row in (first, second)) > 0


def test_kl_is_zero_at_the_reference_and_its_coefficient_follows_the_formula(finished):
    for name in (
        name for name in VARIANTS if name.startswith("KL in reward") or name.endswith("KL in reward")
    ):
        first, second = finished.steps(name)
        # In bypass mode the reward's KL is of the rollout, a rounding error away from the reference.
        assert (
            first["policy/kl_in_reward"] == pytest.approx(0.0, abs=1e-6)
            and second["policy/kl_in_reward"] != 0.0
        )
        assert first["policy/kl_coefficient"] == 0.05
        responses = 16
        below_target = 1 - 0.2 * responses / ADAPTIVE["horizon"]
        assert second["policy/kl_coefficient"] == pytest.approx(
            0.05 * (below_target if name.startswith("KL in reward, adaptive") else 1)
        )
    for name in (name for name in VARIANTS if name.startswith("KL in loss")):
        first, second = finished.steps(name)
        assert second["loss/kl"] != 0.0
        if finished.config(name).learner.minibatches == 1:
            assert first["loss/kl"] == 0.0
            assert second["loss/kl"] == pytest.approx(0.05 * second["policy/ref_kl"], rel=1e-4)


def test_groups_without_signal_are_resampled(finished):
    """A group is filled in where none of four rounds had one with signal, so that each filled one was sampled anew three
    times."""
    assert sum(row["sampling/resampled_groups"] for row in finished.rows) > 10
    for row in finished.rows:
        assert row["groups/no_signal_fraction"] * 4 == row["sampling/filled_groups"]
        assert row["sampling/filled_groups"] * 3 <= row["sampling/resampled_groups"]


def test_many_learners_in_one_process_leave_no_memory_behind(finished):
    used = [found["resident_mib"] for found in finished.variants.values()]
    assert used[-1] - used[5] < 4 * (len(used) - 6), "more than 4 MiB for each learner that has gone"


def test_mlflow_holds_what_the_record_holds(finished):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{store_file(finished.run)}")
    run = client.get_run((finished.run / "mlflow_run_id").read_text())
    assert run.info.status == "FINISHED"
    names = {name for row in finished.rows for name in row} - {"step", "elapsed_s"}
    assert set(run.data.metrics) == set(map(mlflow_name, names))
    for name in names:
        history = client.get_metric_history(run.info.run_id, mlflow_name(name))
        assert {m.step: m.value for m in history} == {
            row["step"]: row[name] for row in finished.rows if name in row
        }, name


# -------------------------------------------------------------------------------------------------------
# recorded batches as oracle


def of_hugging_face(model, *, temperature: float):
    """A ``trainer.studies.replay.Gradient`` by Hugging Face's model, one sequence at a time."""

    def gradient(
        microbatches: Sequence[PackedBatch], current: Sequence[Tensor], loss: Loss
    ) -> tuple[Tensor, list[LossOutput]]:
        model.zero_grad()
        outputs = []
        for batch in microbatches:
            logits = [
                model(tokens[None]).logits[0] / temperature for tokens in batch.tokens_T.split(batch.lengths)
            ]
            logprobs_T = torch.log_softmax(torch.cat(logits), -1).gather(-1, batch.targets_T[:, None])[:, 0]
            value, told = loss(batch, logprobs_T, torch.zeros_like(logprobs_T))
            value.backward()
            outputs.append(told)
        return torch.cat([p.grad.flatten() for p in model.parameters()]), outputs

    return gradient


@pytest.mark.parametrize("name", RECORDED)
def test_loss_and_gradient_are_those_of_the_recorded_batch(finished, name):
    """The loss of both steps, and the norm of the gradient of the first, whose weights are the model's."""
    config = finished.config(name)
    for row in finished.steps(name):
        recorded = finished.recorded(row["step"])
        assert (recorded.step, recorded.version, recorded.correction) == (
            row["step"],
            row["step"] - 1,
            config.correction,
        )
        found = replay(recorded, config, name, config.correction, of_logprobs)
        assert found.loss == pytest.approx(row["loss/policy"] + row["loss/kl"], rel=1e-4, abs=2e-6)
        for metric in (
            "mismatch/kept_fraction",
            "mismatch/k3",
            "mismatch/weight_mean",
            "mismatch/raw_weight_std",
        ):
            assert found.metrics[metric] == pytest.approx(row[metric], rel=1e-4, abs=0), metric
    if config.entropy.coefficient or (name in SOME_REJECTED and config.correction.mode == "bypass"):
        return  # no part of a replay; or decided by the rounding of the engine's own log-probs
    row = finished.steps(name)[0]
    gradient = of_hugging_face(finished.model, temperature=config.rollout.temperature)
    found = replay(finished.recorded(row["step"]), config, name, config.correction, gradient)
    assert found.gradient_norm == pytest.approx(row["optim/grad_norm"], rel=1e-4)


def test_gdpo_compares_each_part_of_the_reward_by_itself(finished):
    """By plain loops over the sampled texts."""
    weights, tokenizer = finished.config(GDPO).compared_parts, load_tokenizer(finished.folder / "model")
    own = {}
    exec(DIGITS, own)
    for row in finished.steps(GDPO):
        recorded = finished.recorded(row["step"])
        batch = recorded.packed
        of_sequences = [slice(start, end) for start, end in pairwise(batch.cu_seqlens.tolist())]
        texts = [tokenizer.decode(batch.targets_T[s][batch.response_mask_T[s]]) for s in of_sequences]
        parts = [own["score"]("", text, "")[1] for text in texts]
        groups = recorded.group_ids_S.tolist()
        of_parts = {name: slow.grpo([float(p[name]) for p in parts], groups, True) for name in weights}
        sums = [sum(w * of_parts[name][i] for name, w in weights.items()) for i in range(len(texts))]
        for s, total in zip(of_sequences, sums, strict=True):
            expected = (total - statistics.fmean(sums)) / math.sqrt(statistics.variance(sums) + 1e-8)
            found_N = batch.advantages_T[s][batch.response_mask_T[s]]
            torch.testing.assert_close(found_N, torch.full_like(found_N, expected), rtol=1e-5, atol=1e-6)
        assert statistics.stdev(sums) > 0.1, "parts that do not differ would show nothing"


@pytest.mark.parametrize(
    "name",
    [name for name in RECORDED if name.startswith(("advantage", "KL in reward", "decoupled_token_is"))],
)
def test_advantages_are_those_of_the_whole_step(finished, name):
    """Two ranks, each with its share, against one process with all of it."""
    config = finished.config(name)
    for row in finished.steps(name):
        recorded = finished.recorded(row["step"])
        batch = recorded.packed
        if config.correction.mode == "bypass":
            batch = batch.with_fields(old_logprobs_T=batch.rollout_logprobs_T)
        penalty_T, _ = KLInReward(config.kl).penalty(batch, num_samples=len(recorded.rewards_S), total=alone)
        found = compute_advantages(
            batch, recorded.rewards_S, recorded.group_ids_S, config.advantage, penalty_T=penalty_T
        )
        torch.testing.assert_close(found.advantages_T, batch.advantages_T, rtol=1e-5, atol=1e-6)
        if config.critic is not None:
            torch.testing.assert_close(found.returns_T, batch.returns_T, rtol=1e-5, atol=1e-6)
