"""The learner's side of a study of mismatch: tokens come back in order from any layout and packing; a switch
switches one thing."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from parallel.megatron import platform
from tests.support.layout_scoring_workers import random_samples, run_config, work_score
from tests.support.megatron_workers import make_hf_model, run_ranks
from tests.support.moe_workers import EXPERTS, make_moe_model
from trainer.studies.layout_scoring import Scorer, score_under_switches
from trainer.studies.layout_statistics import read_samples, write_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


def scorer_of(config, report=lambda line: None):
    platform.init_distributed(60.0)
    return Scorer(config, report)


def by_transformers(folder, sampled, temperature: float) -> torch.Tensor:
    """One sequence at a time, by the Hugging Face model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for ids, response in zip(sampled.sequences(), sampled.response_lengths_R.tolist(), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
        rows.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[-response:, 0])
    return torch.cat(rows)


def test_scores_are_those_of_transformers_in_the_order_of_the_samples(folder):
    said = []
    sampled, scorer = random_samples(), scorer_of(run_config(folder), said.append)
    found = scorer.score("all", sampled)
    assert len(scorer.packed(sampled)) > 1, "one micro-batch shows nothing of the order"
    torch.testing.assert_close(found, by_transformers(folder, sampled, 0.7), atol=2e-5, rtol=0)
    torch.testing.assert_close(
        scorer.score("alone", sampled, scorer.alone(sampled)), found, atol=2e-5, rtol=0
    )
    assert said[0].startswith("scored all: 8 responses, ") and "tokens/s" in said[0]


@pytest.mark.engines
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2, "sp": True, "dp": 1}, {"pp": 2, "dp": 1}])
def test_every_layout_gives_the_same_tokens_on_rank_0(folder, tmp_path, layout):
    first, second = run_ranks(work_score, 2, tmp_path, folder, layout)
    assert second is None
    torch.testing.assert_close(first, by_transformers(folder, random_samples(), 0.7), atol=2e-5, rtol=0)


def switched(config):
    scorer, sampled = scorer_of(config), random_samples()
    return (
        scorer.score("baseline", sampled),
        score_under_switches(scorer, sampled),
        scorer,
    )


def test_switches_of_a_bfloat16_learner(folder):
    config = run_config(folder, model={"path": str(folder), "dtype": "bfloat16"})
    baseline, answers, scorer = switched(config)
    found = {name: logprobs for name, (logprobs, _) in answers.items()}
    exact = by_transformers(folder, random_samples(), 0.7)
    assert torch.equal(found["repeat"], baseline), "the noise level of a CPU is zero"
    error = (baseline - exact).abs().mean()
    assert (found["dtype"] - exact).abs().max() < 2e-5 < error, "float32 is the exact one"
    # A quotient of bfloat16 loses 2^-9 of a logit, so it must show; and nothing but that.
    rounding = (found["temperature_in_model_dtype"] - baseline).abs()
    assert 0 < rounding.max() < 0.1
    torch.testing.assert_close(
        found["temperature_ignored"], scorer.score("at 1", random_samples(), temperature=1.0), atol=0, rtol=0
    )
    assert (found["temperature_ignored"] - baseline).abs().mean() > 10 * error
    assert not torch.equal(found["attention"], baseline)
    assert 0 < (found["lm_head"] - baseline).abs().max() < 0.1, "the head alone rounds a logit by 2^-9 of it"
    assert torch.equal(scorer.score("after", random_samples()), baseline), "a switch was left on"
    assert "CUDA" in answers["deterministic_kernels"][1]


def test_the_rounded_quotient_is_the_one_of_plain_tensors(folder):
    """log softmax of bfloat16(logits / T), from the model's own logits of one sequence."""
    config = run_config(
        folder, model={"path": str(folder), "dtype": "bfloat16"}, learner={"token_budget": 1000}
    )
    sampled, scorer = random_samples(1), scorer_of(config)
    found, _ = score_under_switches(scorer, sampled)["temperature_in_model_dtype"]
    ids = torch.tensor(sampled.sequences()[0])
    (model,) = scorer.engine.chunks
    with torch.no_grad():
        bounds, positions = torch.tensor([0, len(ids) - 1], dtype=torch.int32), torch.arange(len(ids) - 1)
        logits = model.logits(tokens_T=ids[:-1], packed=model.pack(bounds, positions))
    assert logits.dtype == torch.bfloat16
    quotient = (logits.double() / 0.7).to(torch.bfloat16)
    wanted = quotient.float().log_softmax(-1).gather(1, ids[1:, None])[:, 0][-found.numel() :]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_what_cannot_be_switched_says_why(folder):
    _, answers, _ = switched(run_config(folder, rollout={"max_new_tokens": 12, "temperature": 1.0}))
    for name in ("temperature_in_model_dtype", "temperature_ignored"):
        logprobs, why = answers[name]
        assert logprobs is None and "temperature is 1" in why
    assert "float32" in answers["lm_head"][1]
    assert "model's dtype already" in answers["attention"][1]
    assert answers["routing"] == (None, "the model has no experts")


def test_routing_is_switched_between_the_servers_experts_and_the_learners_own(tmp_path):
    folder = make_moe_model(tmp_path / "m", "qwen3_moe", mlp_only_layers=[1], num_hidden_layers=3)
    plain, generator = random_samples(), torch.Generator().manual_seed(0)
    inputs = int((plain.prompt_lengths_R + plain.response_lengths_R - 1).sum())
    ids_TLE = torch.rand(inputs, 2, EXPERTS, generator=generator).argsort(-1)
    sampled = replace(plain, experts_TLK=ids_TLE[..., :2].to(torch.uint8))
    path = tmp_path / "samples.safetensors"
    write_samples(path, sampled)
    assert torch.equal(read_samples(path).experts_TLK, sampled.experts_TLK)
    learner = {"token_budget": 40, "logprob_chunk_tokens": 7}
    found = {}
    for routing in ("own", "rollout"):
        config = run_config(folder, learner=learner | {"routing": routing})
        scorer = scorer_of(config)
        answers = score_under_switches(scorer, sampled)
        found[routing] = scorer.score("baseline", sampled), answers["routing"][0], answers["repeat"][0]
        # One sequence alone: its experts are its own.
        alone = scorer.score("alone", sampled, scorer.alone(sampled))
        torch.testing.assert_close(alone, found[routing][0], atol=2e-5, rtol=0)
    own, switched_from_own, _ = found["own"]
    replayed, switched_from_replayed, repeated = found["rollout"]
    assert torch.equal(switched_from_own, replayed) and torch.equal(switched_from_replayed, own)
    assert torch.equal(repeated, replayed)
    assert (own - replayed).abs().max() > 0.1, "random experts"
    torch.testing.assert_close(own, by_transformers(folder, sampled, 0.7), atol=2e-5, rtol=0)
    reason = score_under_switches(scorer, plain)["routing"]
    assert reason == (None, "the server gave no experts, or not those that a token was sampled with")
