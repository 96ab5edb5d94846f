"""What ranks of ``tests/trainer/studies/test_layout_scoring.py`` do, and the samples that they score."""

import random
from pathlib import Path

import torch

from configs.schema import RunConfig
from parallel.megatron import platform
from tests.support.megatron_workers import VOCAB
from trainer.studies.layout_scoring import Scorer
from trainer.studies.layout_statistics import Sampled, join_samples


def random_samples(count: int = 8, *, seed: int = 0) -> Sampled:
    draw = random.Random(seed)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 6))] for _ in range(count)]
    responses = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))] for _ in range(count)]
    return join_samples(prompts, [(i, ids, [-1.0] * len(ids)) for i, ids in enumerate(responses)])


def run_config(folder: Path, **parts) -> RunConfig:
    """A token budget that takes several micro-batches."""
    content = {
        "model": {"path": str(folder), "dtype": "float32"},
        "task": {"type": "countdown"},
        "rollout": {"max_new_tokens": 12, "temperature": 0.7},
        "learner": {"token_budget": 40, "logprob_chunk_tokens": 7},
        "layout": {"dp": 1},
    }
    return RunConfig.model_validate(content | parts)


def work_score(folder: Path, layout: dict) -> torch.Tensor | None:
    platform.init_distributed(60.0)
    return Scorer(run_config(folder, layout=layout), lambda line: None).score("all", random_samples())
