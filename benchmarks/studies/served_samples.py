"""Shared by studies that score a real server's samples: made-up prompts, their samples, and the samples packed for the
learner."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import serving
from configs.schema import RunConfig
from parallel.packing import PackedBatch, pack_sequences
from rollout.records import Completion
from rollout.servers.client import SGLangClient

SIBLINGS = 4
Samples = list[tuple[list[int], Completion]]
"""(prompt, response)."""


def sharpen(folder: Path, factor: float) -> None:
    """Multiply all matrices by ``factor``, so that probabilities are far from uniform. This changes the file, in which each
    expert's matrices are separate."""
    weights = load_file(folder / "model.safetensors")
    sharp = {name: tensor * factor if tensor.dim() == 2 else tensor for name, tensor in weights.items()}
    save_file(sharp, folder / "model.safetensors", metadata={"format": "pt"})


def sample(
    config: RunConfig,
    logs: Path,
    *,
    prompts: int,
    new_tokens: int,
    temperature: float,
    end: int,
    clients: Sequence[dict[str, Any]] = ({},),
) -> list[Samples]:
    """The samples of one server: ``SIBLINGS`` to each prompt, again for each of ``clients``, which are a client's options."""
    asked = made_up_prompts(prompts)
    options = {"max_new_tokens": new_tokens, "temperature": temperature, "stop_token_ids": [end]}
    with serving(config, logs) as (fleet, key):
        return [asyncio.run(ask(fleet.urls, asked, options, each | {"key": key})) for each in clients]


def made_up_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 20, (10 + i % 30,), generator=generator).tolist() for i in range(count)]


async def ask(
    urls: Sequence[str], prompts: list[list[int]], options: dict[str, Any], client_options: dict[str, Any]
) -> Samples:
    async with SGLangClient(
        urls, max_concurrency=256, timeout_s=600, max_retries=0, **client_options
    ) as client:
        groups = await asyncio.gather(
            *(client.generate_group(p, **options, seeds=range(SIBLINGS)) for p in prompts)
        )
    return [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]


def packed(samples: Samples, **kept: Any) -> PackedBatch:
    """kept: the sampler's kept ids, as ``pack_sequences`` takes them."""
    return pack_sequences(
        token_ids=[[*p, *c.token_ids] for p, c in samples],
        response_masks=[[False] * len(p) + [True] * len(c.token_ids) for p, c in samples],
        rollout_logprobs=[[*[0.0] * len(p), *c.rollout_logprobs] for p, c in samples],
        sequence_ids=range(len(samples)),
        **kept,
    )
