"""Routing replay on the real engines: the gap between server and learner if the learner chooses experts by itself,
if it takes the server's, and, as a control, if it takes random ones.

Tiny Qwen3-MoE and Mixtral models of random weights, as they are initialised and with all matrices three times as large
("sharpened", so that probabilities are far from uniform), in bfloat16 on both sides. A server samples; a learner
scores the same samples three ways, in one process and over expert-parallel and pipeline-parallel ranks. Prints a
table per model and server, and the share of (token, layer) whose set of experts differs in the learner.

    python benchmarks/studies/routing_replay.py --folder routing [--prompts 24] [--quick]

With ``--interrupted`` an update comes in the middle of the responses. The servers continue with weights that differ by a
thousandth; the learner has these weights too. Prints a table for each model, by the version that sampled a token.

    python benchmarks/studies/routing_replay.py --folder routing --interrupted [--prompts 48]
"""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.common import announce, serving, table_head, table_row  # noqa: E402
from benchmarks.studies.served_samples import (  # noqa: E402
    Samples,
    ask,
    made_up_prompts,
    packed,
    sample,
    sharpen,
)
from configs.schema import RunConfig  # noqa: E402
from configs.schema.layout import LayoutConfig  # noqa: E402
from configs.schema.learner import LearnerConfig, OptimizerConfig  # noqa: E402
from configs.schema.model import ModelConfig  # noqa: E402
from parallel.engine import MegatronEngine  # noqa: E402
from parallel.engine_base import Training  # noqa: E402
from parallel.packing import PackedBatch  # noqa: E402
from parallel.planning.architecture import architecture_of  # noqa: E402
from rollout.servers.control import SGLangControl  # noqa: E402
from rollout.tiny_model import make_tiny_countdown_model  # noqa: E402
from tests.support.megatron_workers import run_ranks  # noqa: E402
from trainer.studies.layout_statistics import pair_statistics  # noqa: E402

NEW_TOKENS, TEMPERATURE, END = 64, 1.0, 0
WAYS = ("own", "replayed", "random")
LAYOUTS = {
    "one process": LayoutConfig(dp=1),
    "EP 2": LayoutConfig(ep=2, dp=2),
    "PP 2": LayoutConfig(pp=2, dp=1),
}
ENGINE = {"logprob_chunk_tokens": 512, "seed": 0}


def replaying_server(folder: Path, tensor_parallel: int) -> RunConfig:
    rollout = {"dtype": "bfloat16", "tp": tensor_parallel, "max_total_tokens": 65536}
    return RunConfig(
        model=ModelConfig(path=folder),
        task={"type": "countdown"},
        rollout=rollout,
        learner=LearnerConfig(routing="rollout"),
    )


def sample_with_experts(folder: Path, logs: Path, *, tensor_parallel: int, prompts: int) -> PackedBatch:
    """Samples of one server, with its experts."""
    config, experts = replaying_server(folder, tensor_parallel), architecture_of(folder).experts
    limits = {"new_tokens": NEW_TOKENS, "temperature": TEMPERATURE, "end": END}
    (samples,) = sample(config, logs, prompts=prompts, **limits, clients=[{"experts": experts}])
    return with_experts(samples)


def sample_interrupted(folder: Path, newer: Path, logs: Path, *, prompts: int) -> tuple[PackedBatch, Tensor]:
    """(the responses that an update to the weights of ``newer`` interrupts, the version of each token [T]: 0 or 1). The update
    comes after a quarter of the time that the same prompts took without it, which was the server's first work."""
    config = replaying_server(folder, 1)
    options = {"max_new_tokens": 2 * NEW_TOKENS, "temperature": TEMPERATURE, "stop_token_ids": [END]}
    asked = made_up_prompts(prompts)
    with (
        serving(config, logs) as (fleet, key),
        SGLangControl(config.rollout, config.launch, fleet.urls, key=key) as control,
    ):
        client = {"experts": architecture_of(folder).experts, "key": key}
        with ThreadPoolExecutor(1) as thread:
            begin = monotonic()
            asyncio.run(ask(fleet.urls, asked, options, client))
            answers = thread.submit(asyncio.run, ask(fleet.urls, asked, options, client))
            wait([answers], timeout=(monotonic() - begin) / 4)
            control.pause()
            control.load_from_disk(newer, version=1)
            control.resume()
            samples = [(p, c) for p, c in answers.result() if len(set(c.token_versions)) == 2]
    versions = [torch.tensor([*[0] * (len(p) - 1), *c.token_versions]) for p, c in samples]
    return with_experts(samples), torch.cat(versions)


def with_experts(samples: Samples) -> PackedBatch:
    experts_TLK = torch.cat([torch.tensor(c.experts) for _, c in samples])
    batch = packed(samples)
    return replace(batch, experts_TLK=experts_TLK, is_replayed_T=torch.ones_like(batch.response_mask_T))


def three_ways(batch: PackedBatch, num_experts: int) -> Iterator[tuple[str, PackedBatch]]:
    """(name, batch) of each of ``WAYS``."""
    assert batch.experts_TLK is not None
    generator = torch.Generator().manual_seed(1)
    shape = (*batch.experts_TLK.shape[:2], num_experts)
    random_TLK = torch.rand(shape, generator=generator).argsort(-1)[..., : batch.experts_TLK.shape[2]]
    yield "own", replace(batch, experts_TLK=None, is_replayed_T=None)
    yield "replayed", batch
    yield "random", replace(batch, experts_TLK=random_TLK.to(torch.uint8))


def score(folder: Path, layout: LayoutConfig, batch: PackedBatch) -> dict[str, Tensor]:
    """Log-probs of each way, [T] of the whole batch, on every rank."""
    engine = MegatronEngine(ModelConfig(path=folder, dtype="bfloat16"), layout, None, **ENGINE)
    experts, groups = engine.architecture.experts, engine.groups
    assert experts is not None
    mine = list(range(groups.dp_rank, len(batch.lengths), groups.dp_size))
    found = {}
    for name, way in three_ways(batch, experts.num_experts):
        (logprobs_T,) = engine.logprobs([way.select(mine)], temperature=TEMPERATURE)
        rows = dict(zip(mine, logprobs_T.split([batch.lengths[row] for row in mine]), strict=True))
        everyone: list[dict[int, Tensor]] = [{}] * groups.dp_size
        dist.all_gather_object(everyone, rows, group=groups.dp_group)
        by_row = {row: part for rows in everyone for row, part in rows.items()}
        found[name] = torch.cat([by_row[row] for row in sorted(by_row)])
    return found


@dataclass(frozen=True)
class Differing:
    """Share of response tokens and layers whose set of experts in the learner is not the server's."""

    own: float
    """The learner chooses in every layer."""
    own_tokens: float
    """Tokens with such a layer."""
    replayed: float
    """The learner's choice after layers that replay the server's."""
    by_layer: list[float]
    """``own`` for each layer."""


def differing(folder: Path, batch: PackedBatch) -> Differing:
    """In one process."""
    from megatron.core.transformer.moe.router import TopKRouter

    training = Training(optimizer=OptimizerConfig(), total_steps=1)
    engine = MegatronEngine(
        ModelConfig(path=folder, dtype="bfloat16"), LayoutConfig(dp=1), training, **ENGINE
    )
    chunk = engine.chunks[0]
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
    chosen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda *call: chosen.append(call[2][1])) for router in routers]
    engine.logprobs([replace(batch, experts_TLK=None, is_replayed_T=None)], temperature=TEMPERATURE)
    for hook in hooks:
        hook.remove()
    plan, experts_TLK = chunk.pack(batch.cu_seqlens, batch.positions_T).plan, batch.experts_TLK
    assert experts_TLK is not None
    is_other = []
    for layer, chosen_TE in enumerate(chosen):
        server_TE = torch.zeros_like(chosen_TE).scatter(
            1, plan.to_model_order(experts_TLK[:, layer]).long(), True
        )
        is_other.append(plan.to_batch_order((chosen_TE != server_TE).any(-1)))
    other_TL = torch.stack(is_other, 1)[batch.response_mask_T].double()
    result = engine.update(
        [batch], lambda b, logprobs_T, entropy_T: (logprobs_T.sum(), None), temperature=TEMPERATURE
    )
    counted = result.differing_experts
    assert counted is not None
    return Differing(
        own=other_TL.mean().item(),
        own_tokens=other_TL.amax(1).mean().item(),
        replayed=sum(counted.by_layer) / (counted.tokens * len(routers)),
        by_layer=other_TL.mean(0).tolist(),
    )


def print_table(batch: PackedBatch, scores: dict[str, dict[str, Tensor]]) -> None:
    mask_T = batch.response_mask_T
    lengths_R = torch.tensor([int(part.sum()) for part in mask_T.split(batch.lengths)])
    (one_process, ways), *others = scores.items()
    print(table_head([f"experts ({one_process})", "max Δp", "mean Δp ± se", "max nats", "k3 ± se"]))
    for name in WAYS:
        of = pair_statistics(batch.rollout_logprobs_T[mask_T], ways[name][mask_T], lengths_R)
        mean, k3 = (f"{of[key]:.2e} ± {of[f'{key}_se']:.1e}" for key in ("mean_mean", "k3"))
        print(table_row([name, f"{of['max_max']:.2e}", mean, f"{of['logprob_gap_max']:.2e}", k3]))
    print()
    for layout, of_layout in others:
        distances = [f"{(of_layout[name] - ways[name])[mask_T].abs().max():.1e} ({name})" for name in WAYS]
        print(f"{layout} against {one_process}, greatest difference in nats: {', '.join(distances)}.")


def interrupted(options: argparse.Namespace) -> None:
    """The gap of responses that an update interrupts, by the version that sampled a token."""
    for family in ("qwen3_moe", "mixtral"):
        folder, newer = (options.folder / f"{family}-{version}" for version in (0, 1))
        make_tiny_countdown_model(folder, seed=0, family=family)
        sharpen(folder, 3)
        shutil.copytree(folder, newer)
        move(newer / "model.safetensors")
        runs = options.folder / family
        batch, versions_T = sample_interrupted(folder, newer, runs / "logs", prompts=options.prompts)
        (ways,) = run_ranks(partial(score, newer), 1, runs / "score", LayoutConfig(dp=1), batch)
        print(f"\n{family} sharpened: {len(batch.lengths)} interrupted responses\n")
        print(table_head(["sampled by", "experts", "tokens", "max Δp", "mean Δp", "max nats", "k3"]))
        for version, weights in enumerate(("the old weights", "the learner's weights")):
            mask_T = batch.response_mask_T & (versions_T == version)
            for name in WAYS[:2]:
                old_N, rollout_N = ways[name][mask_T].double(), batch.rollout_logprobs_T[mask_T].double()
                gap_N, prob_N = old_N - rollout_N, (old_N.exp() - rollout_N.exp()).abs()
                k3 = (gap_N.expm1() - gap_N).mean()
                figures = [prob_N.max(), prob_N.mean(), gap_N.abs().max(), k3]
                print(table_row([weights, name, len(gap_N), *(f"{f:.2e}" for f in figures)]), flush=True)


def move(file: Path) -> None:
    """Change each number of a matrix by a thousandth of itself, as a few updates do."""
    generator = torch.Generator().manual_seed(5)
    moved = {
        name: tensor * (1 + 1e-3 * torch.randn(tensor.shape, generator=generator)) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(file).items()
    }  # fmt: skip
    save_file(moved, file, metadata={"format": "pt"})


def main() -> None:
    arguments = argparse.ArgumentParser(description="Routing replay: own, replayed and random experts")
    arguments.add_argument(
        "--folder", type=Path, required=True, help="for models and logs; it must not exist"
    )
    arguments.add_argument("--prompts", type=int, default=24)
    arguments.add_argument("--quick", action="store_true", help="one model and one server")
    arguments.add_argument("--interrupted", action="store_true", help="an update in the middle of responses")
    options = arguments.parse_args()
    options.folder.mkdir(parents=True)
    torch.set_num_threads(1)
    announce(prompts=options.prompts, quick=options.quick, interrupted=options.interrupted)
    if options.interrupted:
        return interrupted(options)
    cases = [(f, s, tp) for f in ("qwen3_moe", "mixtral") for s in (False, True) for tp in (1, 2)]
    for family, is_sharp, tensor_parallel in cases[:1] if options.quick else cases:
        name = f"{family}{' sharpened' if is_sharp else ''}"
        folder = options.folder / name.replace(" ", "-")
        if not folder.exists():
            make_tiny_countdown_model(folder, seed=0, family=family)
            if is_sharp:
                sharpen(folder, 3)
        runs = options.folder / f"{folder.name}-tp{tensor_parallel}"
        batch = sample_with_experts(
            folder, runs / "logs", tensor_parallel=tensor_parallel, prompts=options.prompts
        )
        print(f"\n{name}, server TP {tensor_parallel}: {int(batch.response_mask_T.sum())} response tokens\n")
        scores = {
            layout: run_ranks(partial(score, folder), sizes.world_size, runs / layout, sizes, batch)[0]
            for layout, sizes in LAYOUTS.items()
        }
        print_table(batch, scores)
        (found,) = run_ranks(partial(differing, folder), 1, runs / "differing", batch)
        layers = ", ".join(f"{share:.2%}" for share in found.by_layer)
        print(
            f"\nThe learner's experts differ from the server's in {found.own:.2%} of (token, layer) (by layer {layers}), in some layer of "
            f"{found.own_tokens:.2%} of the tokens; behind replayed layers its choice would in {found.replayed:.2%}.",
            flush=True,
        )


if __name__ == "__main__":
    main()
