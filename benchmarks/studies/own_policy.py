"""How good a trained policy is with its own weights: sampled and scored by transformers, without the engines.

A run's ``eval/accuracy`` is of its servers' weights. If the rollout is quantised, these are another policy than the
learner's, and the learner's policy is what the run trains.
"""

import json
from pathlib import Path

import torch

from configs.loader import load_config
from rollout.rewards import countdown_reward
from rollout.tasks import load_task
from rollout.tokenization import end_token_ids, load_tokenizer

SAMPLES = 2
"""Samples of each held-out problem, as in the runs."""


@torch.no_grad()
def own_accuracy(run: Path) -> float:
    """Share of right samples on the held-out problems, with the weights of ``RUN/hf``, at the temperature of the
    evaluation. The result is kept in the run folder."""
    kept = run / "own_accuracy.json"
    if kept.exists():
        return json.loads(kept.read_text())["accuracy"]
    from transformers import AutoModelForCausalLM

    config, model = (
        load_config(run / "config.yaml"),
        AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).eval(),
    )
    tokenizer = load_tokenizer(run / "hf")
    ends = torch.tensor(end_token_ids(tokenizer, run / "hf"))
    problems = load_task(config.task, tokenizer=tokenizer).heldout
    generator, right = torch.Generator().manual_seed(0), 0
    for length in {len(problem.token_ids) for problem in problems}:  # so that nothing is padded
        some = [problem for problem in problems if len(problem.token_ids) == length for _ in range(SAMPLES)]
        ids = sample(
            model,
            torch.tensor([problem.token_ids for problem in some]),
            ends,
            config.rollout.max_new_tokens,
            config.evaluation.temperature,
            generator,
        )
        for problem, row in zip(some, ids.tolist(), strict=True):
            cut = next((i for i, token in enumerate(row) if token in ends), len(row))
            right += countdown_reward(problem.reference, tokenizer.decode(row[:cut])).value >= 1
    accuracy = right / (SAMPLES * len(problems))
    kept.write_text(json.dumps({"accuracy": accuracy}))
    return accuracy


def sample(model, prompts_BL, ends, max_new_tokens: int, temperature: float, generator) -> torch.Tensor:
    """[B, at most max_new_tokens]: responses; what follows a first end token has no meaning."""
    cache, inputs, sampled = None, prompts_BL, []
    is_over = torch.zeros(len(prompts_BL), dtype=torch.bool)
    while len(sampled) < max_new_tokens and not is_over.all():
        out = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, probs_BV = out.past_key_values, (out.logits[:, -1] / temperature).softmax(-1)
        inputs = torch.multinomial(probs_BV, 1, generator=generator)
        sampled.append(inputs[:, 0])
        is_over |= torch.isin(inputs[:, 0], ends)
    return torch.stack(sampled, 1)
