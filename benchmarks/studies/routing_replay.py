"""Routing replay on the real engines: the gap between server and learner where the learner chooses experts by itself,
where it takes the server's, and, as a control, where it takes random ones.

Tiny Qwen3-MoE and Mixtral models of random weights, as they are initialised and with all matrices three times as large
("sharpened", so that probabilities are far from uniform), in bfloat16 on both sides. A server samples; a learner
scores the same samples three ways, in one process and over expert-parallel and pipeline-parallel ranks. Prints a
table per model and server, and the share of (token, layer) whose set of experts is another in the learner.

    python benchmarks/studies/routing_replay.py --folder routing [--prompts 24] [--quick]
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.common import announce, table_head, table_row  # noqa: E402
from benchmarks.studies.served_samples import packed, sample, sharpen  # noqa: E402
from configs.schema import RunConfig  # noqa: E402
from configs.schema.layout import LayoutConfig  # noqa: E402
from configs.schema.learner import LearnerConfig, OptimizerConfig  # noqa: E402
from configs.schema.model import ModelConfig  # noqa: E402
from parallel.engine import MegatronEngine  # noqa: E402
from parallel.engine_base import Training  # noqa: E402
from parallel.packing import PackedBatch  # noqa: E402
from parallel.planning.architecture import architecture_of  # noqa: E402
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


def sample_with_experts(folder: Path, logs: Path, *, tensor_parallel: int, prompts: int) -> PackedBatch:
    """Samples of one server, with its experts."""
    rollout = {"dtype": "bfloat16", "tp": tensor_parallel, "max_total_tokens": 8192}
    config = RunConfig(
        model=ModelConfig(path=folder),
        task={"type": "countdown"},
        rollout=rollout,
        learner=LearnerConfig(routing="rollout"),
    )
    experts = architecture_of(folder).experts
    limits = {"new_tokens": NEW_TOKENS, "temperature": TEMPERATURE, "end": END}
    (samples,) = sample(config, logs, prompts=prompts, **limits, clients=[{"experts": experts}])
    batch, experts_TLK = packed(samples), torch.cat([torch.from_numpy(c.experts) for _, c in samples])
    return replace(batch, experts_TLK=experts_TLK, is_replayed_T=torch.ones_like(batch.response_mask_T))


def three_ways(batch: PackedBatch, num_experts: int) -> Iterator[tuple[str, PackedBatch]]:
    """By the names of ``WAYS``."""
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
        ((logprobs_T, _),) = engine.logprobs([way.select(mine)], temperature=TEMPERATURE)
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
    """Where the learner chooses in every layer."""
    own_tokens: float
    """Tokens with such a layer."""
    replayed: float
    """The learner's choice behind layers that replay the server's."""
    by_layer: list[float]
    """As ``own``."""


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


def main() -> None:
    arguments = argparse.ArgumentParser(description="Routing replay: own, replayed and random experts")
    arguments.add_argument(
        "--folder", type=Path, required=True, help="for models and logs; it must not exist"
    )
    arguments.add_argument("--prompts", type=int, default=24)
    arguments.add_argument("--quick", action="store_true", help="one model and one server")
    options = arguments.parse_args()
    options.folder.mkdir(parents=True)
    torch.set_num_threads(1)
    announce(prompts=options.prompts, quick=options.quick)
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
