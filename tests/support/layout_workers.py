"""One optimizer step in any layout, with results by Hugging Face names, to be compared with one process.
Imported by spawned ranks.

``step_of`` and ``by_hf_names`` take any engine; ``work_layout`` runs several jobs of one layout in one set of
processes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema.layout import LayoutConfig
from configs.schema.model import ModelConfig
from configs.schema.run import RunConfig
from parallel.engine import (
    MegatronEngine,
    ValueEngine,
)
from parallel.engine_base import finalize_model_grads
from parallel.megatron import platform
from parallel.megatron.schedule import NonFiniteError
from parallel.packing import PackedBatch
from parallel.planning.model_parts import Experts
from parallel.weights.hf_conversion import export_adapters, export_hf
from rollout.records import FinishReason, Group
from tests.support.megatron_workers import (
    clipped_loss,
    heads_of,
    make_batch,
    make_engine,
    make_value_batch,
    make_value_engine,
    weighted_loss,
)
from tests.support.records import completion
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.correction import correct
from trainer.learner import Learner
from trainer.ranks.metrics import values

LENGTHS = [9, 5, 12, 9, 3, 20, 5, 12]
OPTIMIZER = {"clip_grad": 0.05, "weight_decay": 0.1}
"""Clipping is active; ``make_engine`` sets an eps of Adam that does not blow up the rounding of tiny
gradients."""
ROWS = {1: [[[0, 1, 2], [3, 4], [5], [6, 7]]], 2: [[[0, 1, 2], [5]], [[3, 4], [6, 7]]]}
"""dp -> dp rank -> micro-batch -> rows. Unequal numbers of tokens, of which tensor parallelism does not
divide all."""
FEWER_ROWS = [[0, 1, 2, 3, 4], [5, 6, 7]]
"""The same rows in two micro-batches. Ranks of one stage wait for each other in every layer of every micro-batch."""
TEMPERATURE = 0.7


def by_hf_names(
    engine: MegatronEngine | ValueEngine, tensor_of: Callable[[torch.nn.Parameter], Tensor]
) -> dict[str, Tensor]:
    """A tensor of every parameter's shape (its weight, its gradient), whole, by the parameter's Hugging Face
    name, on every rank.

    A collective. A critic's head is ``value_head.weight``. The copy of a tied embedding on the last of
    several stages is left out: see ``tied_copies``. For an engine of adapters these are its A and B, as ``NAME A``.
    """
    trained = [p for chunk in engine.chunks for p in chunk.parameters() if p.requires_grad]
    tensors = {p: tensor_of(p).detach().clone() for p in trained}
    with _in_place_of_parameters(engine, tensors):
        exported = _adapters(engine) if has_adapters(engine) else export_hf(engine.chunks)
        mine = {name: tensor.detach().clone() for name, tensor in exported}
    if isinstance(engine, ValueEngine):
        mine.update(("value_head.weight", tensors[head]) for head in heads_of(engine))
    return _of_all_stages(engine, mine)


@contextmanager
def _in_place_of_parameters(
    engine: MegatronEngine | ValueEngine, tensors: Mapping[torch.nn.Parameter, Tensor]
) -> Iterator[None]:
    """Inside, the engine's modules have these tensors. The parameters stay as they are: ``p.data = tensor`` of another dtype
    would separate ``p`` for good from the hook that adds its gradients to ``p.main_grad``."""
    modules = [module for chunk in engine.chunks for module in chunk.modules()]
    places = [
        (module, name, p) for module in modules for name, p in module._parameters.items() if p in tensors
    ]
    stand_ins = {p: torch.nn.Parameter(tensor, requires_grad=False) for p, tensor in tensors.items()}
    for p, stand_in in stand_ins.items():
        stand_in.__dict__.update(p.__dict__)  # how it is split over ranks
    try:
        for module, name, p in places:
            module._parameters[name] = stand_ins[p]
        yield
    finally:
        for module, name, p in places:
            module._parameters[name] = p


def has_adapters(engine: MegatronEngine | ValueEngine) -> bool:
    return engine.chunks[0].lora is not None


def _adapters(engine: MegatronEngine | ValueEngine) -> Iterator[tuple[str, Tensor]]:
    for name, a, b in export_adapters(engine.chunks):
        yield f"{name} A", a
        yield f"{name} B", b


def _of_all_stages(engine: MegatronEngine | ValueEngine, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    stages: list[dict[str, Tensor]] = [{}] * engine.groups.pp_size
    dist.all_gather_object(stages, mine, group=engine.groups.pp_group)
    found = {name: tensor for stage in stages for name, tensor in stage.items()}
    if engine.chunks[0].architecture.tied:
        found.pop("lm_head.weight", None)
    return found


@contextmanager
def gradients_of_update(engine: MegatronEngine | ValueEngine) -> Iterator[dict[str, Tensor]]:
    """The gradients of the one update inside, summed over all ranks, by Hugging Face names. The update itself does not
    change.

    A distributed optimizer leaves each rank only its shard of the sum; here all of it is summed everywhere.
    """
    found: dict[str, Tensor] = {}
    trained = engine._trained
    buffers = [b.grad_data for chunk in trained for b in chunk.buffers + chunk.expert_parallel_buffers]
    kept = [chunk.config.finalize_model_grads_func for chunk in engine.chunks]

    def look(chunks, num_tokens=None, **rest) -> None:
        before = [buffer.clone() for buffer in buffers]
        finalize_model_grads(chunks, None, **(rest | {"force_all_reduce": True}))
        found.update(by_hf_names(engine, lambda p: p.main_grad))
        for buffer, data in zip(buffers, before, strict=True):
            buffer.copy_(data)
        kept[0](chunks, num_tokens, **rest)

    for chunk in engine.chunks:
        chunk.config.finalize_model_grads_func = look
    try:
        yield found
    finally:
        for chunk, function in zip(engine.chunks, kept, strict=True):
            chunk.config.finalize_model_grads_func = function
    assert found, "the update has summed no gradient"


def weights_by_hf_names(engine: MegatronEngine | ValueEngine) -> dict[str, Tensor]:
    """For an engine of adapters: the adapters, and the merged weights."""
    weights = by_hf_names(engine, lambda p: p)
    if has_adapters(engine):
        weights |= _of_all_stages(engine, {name: tensor.clone() for name, tensor in export_hf(engine.chunks)})
    return weights


def tied_copies(engine: MegatronEngine) -> dict[str, Tensor]:
    """This rank's shards of the embedding and of the output layer's weight, where it holds them."""
    found = {}
    for chunk in engine.chunks:
        if chunk.pre_process:
            found["embedding"] = chunk.embedding.word_embeddings.weight.detach().clone()
        if chunk.post_process and not chunk.pre_process:
            found["output"] = chunk.output_layer.weight.detach().clone()
    return found


def policy_loss(
    batch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor
) -> tuple[Tensor, tuple[float, Tensor]]:
    """A loss of log-probs and entropy, which also returns its value and the log-probs."""
    loss, found = weighted_loss(batch, logprobs_T, entropy_T)
    return loss, (found["loss"], found["logprobs_T"])


def critic_loss(batch: PackedBatch, values_T: Tensor) -> tuple[Tensor, tuple[float, Tensor]]:
    loss, found_T = clipped_loss(batch, values_T)
    return loss, (loss.item(), found_T)


def with_experts(batch: PackedBatch, experts: Experts, *, seed: int = 0) -> PackedBatch:
    """Random experts for every token, of which a quarter keeps the learner's own choice."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch.num_tokens, sum(experts.is_sparse), experts.num_experts)
    order_TLE = torch.rand(shape, generator=generator).argsort(-1)
    return replace(
        batch,
        experts_TLK=order_TLE[..., : experts.experts_per_token].to(torch.uint8),
        is_replayed_T=torch.rand(batch.num_tokens, generator=generator) < 0.75,
    )


def chosen_by_sequence(engine: MegatronEngine, microbatches: list[PackedBatch]) -> dict[int, Tensor]:
    """The experts that the engine's routers choose, as they record them, [t, L, K] by the number of the sequence. The
    log-probs equal those of a pass that records nothing, to the last bit."""
    own = [replace(batch, experts_TLK=None, is_replayed_T=None) for batch in microbatches]
    recorded = engine.logprobs_and_experts(own, temperature=TEMPERATURE, dtype=torch.uint8)
    chosen: dict[int, Tensor] = {}
    for batch, (logprobs_T, ids_TLK), again_T in zip(
        own, recorded, engine.logprobs(own, temperature=TEMPERATURE), strict=True
    ):
        assert torch.equal(logprobs_T, again_T)
        chosen.update(zip(batch.sequence_ids_S.tolist(), ids_TLK.split(batch.lengths), strict=True))
    return chosen


def step_of(engine: MegatronEngine | ValueEngine, microbatches: list[PackedBatch]) -> dict[str, Any]:
    """Scores, then one optimizer step of ``engine`` on this rank's micro-batches, and its gradients. If experts are given,
    also the engine's own choice before the step."""
    chosen = {}
    if isinstance(engine, ValueEngine):
        scored = engine.values(microbatches)
        with gradients_of_update(engine) as gradients:
            result = engine.update(microbatches, critic_loss)
    else:
        if microbatches[0].experts_TLK is not None:
            chosen = chosen_by_sequence(engine, microbatches)
        scored = engine.logprobs(microbatches, temperature=TEMPERATURE)
        with gradients_of_update(engine) as gradients:
            result = engine.update(microbatches, policy_loss, temperature=TEMPERATURE)
    return {
        "scores": scored,
        "bitwise": all(
            torch.equal(score_T, trained_T)
            for score_T, (_, trained_T) in zip(scored, result.outputs, strict=True)
        ),
        "loss": sum(loss for loss, _ in result.outputs),
        "norm": result.grad_norm,
        "differing": result.differing_experts,
        "chosen": chosen,
        "gradients": gradients,
        "weights": weights_by_hf_names(engine),
        "copies": tied_copies(engine) if isinstance(engine, MegatronEngine) else {},
        "dp_rank": engine.groups.dp_rank,
        "place_in_stage": engine.groups.rank % (engine.groups.world_size // engine.groups.pp_size),
    }


def build(
    kind: str, folder: Path, layout: LayoutConfig, recompute: str = "none", **optimizer: Any
) -> MegatronEngine | ValueEngine:
    make = make_engine if kind == "policy" else make_value_engine
    return make(folder, layout=layout, recompute=recompute, **(OPTIMIZER | optimizer))


def microbatches_of(
    engine: MegatronEngine | ValueEngine, *, replays: bool = False, as_one_process: bool = False
) -> list[PackedBatch]:
    """Micro-batches with shared prompts. Sequences are whole in one process, with which layouts are compared, and if experts
    are replayed. ``as_one_process``: each micro-batch has the same sequences as in one process."""
    make = make_value_batch if isinstance(engine, ValueEngine) else make_batch
    batch = make(LENGTHS, prompt_tokens=4)
    if engine.groups.world_size == 1 or replays:
        batch = replace(batch, prompt_ids_S=None, prompt_lengths_S=None)
    if replays:
        batch = with_experts(batch, engine.architecture.experts)
    groups = engine.groups
    is_one_stage = groups.pp_size == 1 and groups.dp_size == 1 and groups.world_size > 1
    rows_of = FEWER_ROWS if is_one_stage and not as_one_process else ROWS[groups.dp_size][groups.dp_rank]
    return [batch.select(rows) for rows in rows_of]


def work_step(
    layout: LayoutConfig, *, replays: bool = False, as_one_process: bool = False, **job: Any
) -> dict[str, Any]:
    engine = build(layout=layout, **job)
    return step_of(engine, microbatches_of(engine, replays=replays, as_one_process=as_one_process))


def work_save(layout: LayoutConfig, checkpoint: Path, **job: Any) -> dict[str, Any]:
    """A step, a checkpoint, and the step after it."""
    engine = build(layout=layout, **job)
    step_of(engine, microbatches_of(engine))
    engine.save(checkpoint, {"position": 1})
    return step_of(engine, microbatches_of(engine))


def work_load(
    layout: LayoutConfig, checkpoint: Path, *, as_one_process: bool = False, **job: Any
) -> dict[str, Any]:
    """The step after a checkpoint."""
    engine = build(layout=layout, **job)
    assert engine.load(checkpoint) == {"position": 1}
    return step_of(engine, microbatches_of(engine, as_one_process=as_one_process))


def work_step_of_lengths(layout: LayoutConfig, lengths: list[list[int]], **job: Any) -> dict[str, Any]:
    """A step on micro-batches of sequences of these lengths."""
    engine = build(layout=layout, **job)
    return step_of(engine, [make_batch(each, seed=i) for i, each in enumerate(lengths)])


def work_bad_loss(layout: LayoutConfig, **job: Any) -> dict[str, Any]:
    """A loss that is NaN on the second micro-batch."""
    engine = build(layout=layout, **job)
    before = weights_by_hf_names(engine)
    factors = iter([1.0, float("nan"), 1.0, 1.0])
    message = ""
    try:
        engine.update(
            microbatches_of(engine), lambda batch, lp, en: (lp.sum() * next(factors), None), temperature=1.0
        )
    except NonFiniteError as error:
        message = str(error)
    after = weights_by_hf_names(engine)
    return {"message": message, "unchanged": all(torch.equal(before[name], after[name]) for name in before)}


def work_learner(layout: LayoutConfig, config: RunConfig, groups: list[Group]) -> dict[str, Any]:
    """One RL step of the whole learner, critic included, and its probe of two completions. Rank 0 alone has
    the groups."""
    platform.init_distributed(60.0)
    learner = Learner(config.model_copy(update={"layout": layout}))
    batch = learner.score(learner.receive(groups if learner.is_first_rank else None), before_update=True)
    found = correct(batch.packed, config.correction, learner.total)
    batch = batch.with_advantages(
        compute_advantages(
            batch.packed, batch.rewards_S, batch.group_ids_S, config.advantage, total=learner.total
        )
    )
    batch = batch.with_loss_weights(found, config.aggregation, config.correction.denominator, learner.total)
    (microbatches,) = batch.minibatches()
    update = learner.update(microbatches, policy=True)
    completions = [
        completion(
            token_ids=ids,
            rollout_logprobs=[0.0] * len(ids),
            token_versions=[0] * len(ids),
            finish_reason=FinishReason.STOP,
        )
        for ids in ([3, 9, 4], [8])
    ]
    return {
        "metrics": values(update.metrics),
        "logprobs_T": batch.scattered(update.logprobs),
        "ids_S": batch.packed.sequence_ids_S,
        "lengths": batch.packed.lengths,
        "num_microbatches": len(microbatches),
        "weights": weights_by_hf_names(learner.engine),
        "critic": weights_by_hf_names(learner.critic.engine),
        "probe": learner.logprobs_of([5, 7, 1], completions, temperature=0.7),
    }


def work_frozen(layout: LayoutConfig, folder: Path, **unused: Any) -> list[Tensor]:
    """How far the log-probs of a frozen engine are from those of a trained one of the same folder, by micro-batch."""
    trained = build(kind="policy", folder=folder, layout=layout)
    frozen = MegatronEngine(
        ModelConfig(path=folder, dtype="float32"),
        layout,
        None,
        logprob_chunk_tokens=7,
        seed=0,
    )
    microbatches = microbatches_of(trained)
    scores = [engine.logprobs(microbatches, temperature=TEMPERATURE) for engine in (trained, frozen)]
    return [(own_T - other_T).abs().max() for own_T, other_T in zip(*scores, strict=True)]


WORK = {
    "frozen": work_frozen,
    "learner": work_learner,
    "step": work_step,
    "step_of_lengths": work_step_of_lengths,
    "save": work_save,
    "load": work_load,
    "bad_loss": work_bad_loss,
}


def work_layout(
    layout: LayoutConfig, jobs: dict[str, tuple[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    """Jobs (of ``WORK``, with its arguments) one after another in one set of processes: starting them costs
    more than the work."""
    return {name: partial(WORK[work], layout)(**arguments) for name, (work, arguments) in jobs.items()}
