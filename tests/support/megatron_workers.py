"""Tiny models, batches and multi-process runs for the learner's tests. Functions named ``work_*`` run in
every spawned rank."""

import contextlib
import logging
import multiprocessing.forkserver
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from configs.schema.correction import CorrectionConfig
from configs.schema.critic import CriticConfig
from configs.schema.layout import LayoutConfig
from configs.schema.learner import LearnerConfig, LoraConfig, OptimizerConfig
from configs.schema.model import ModelConfig
from configs.schema.objective import AggregationConfig, EntropyConfig, GaeAdvantage
from configs.schema.rollout import RolloutConfig
from configs.schema.run import RunConfig, SftConfig
from configs.schema.task import CountdownTask
from parallel.engine import MegatronEngine, ValueEngine
from parallel.engine_base import Training
from parallel.megatron import aligned, platform
from parallel.megatron.lora import Lora, adapted_layers
from parallel.megatron.vocab_parallel import linear_logprobs
from parallel.packing import PackedBatch, pack_sequences
from parallel.weights import hf_conversion
from rollout.records import Group
from rollout.servers.ports import choose_ports
from rollout.tiny_model import write_olmo3_rope
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.correction import correct
from trainer.algorithm.value_loss import value_loss
from trainer.critic import Critic
from trainer.learner import Learner
from trainer.ranks.metrics import merge_over_ranks, values
from trainer.sft import train_sft

KINDS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}
OLMO3_LAYERS = ["sliding_attention", "full_attention"]
VOCAB = 43  # divides by nothing: tensor parallelism needs padding rows


def make_hf_model(folder: Path, kind: str, *, tied: bool = False, seed: int = 0, **changes) -> Path:
    """A tiny random model in ``folder``. Norm weights and biases are random too, so that a wrong one shows."""
    config_class, model_class = KINDS[kind]
    fields = dict(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.15, head_dim=16,
    )  # fmt: skip
    # Their head_dim is independent of hidden_size; the others' is hidden_size / heads.
    if kind not in (
        "qwen3",
        "glm4",
        "gemma3_text",
    ):
        fields["head_dim"] = 8
    fields |= {"sliding_window": None} if kind == "mistral" else {}
    # Their defaults are beyond this vocabulary.
    if kind in ("phi3", "olmo2", "olmo3", "glm4", "gemma3_text"):
        fields |= {"pad_token_id": None, "eos_token_id": None}
    fields |= {"layer_types": OLMO3_LAYERS, "sliding_window": 7} if kind == "olmo3" else {}
    fields |= {"attention_bias": True} if kind == "glm4" else {}
    if kind == "gemma3_text":
        own = {"tie_word_embeddings": True, "query_pre_attn_scalar": 24, "bos_token_id": None}
        fields |= own | {"layer_types": OLMO3_LAYERS, "sliding_window": 7}
    torch.manual_seed(seed)
    model = model_class(config_class(**{**fields, **changes})).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                around_zero = name.endswith("bias") or kind == "gemma3_text"
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.0 if around_zero else 1.0))
    model.save_pretrained(folder)
    if kind == "olmo3":
        write_olmo3_rope(folder)
    return folder


def make_batch(
    lengths: list[int], *, seed: int = 0, vocab: int = VOCAB, prompt_tokens: int = 1
) -> PackedBatch:
    """Random sequences of ``lengths`` tokens (one more than the places they take). All prompts of more than one token are
    the same shared prompt. A sequence without room for a response after it has a prompt of one token."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    prompts = [prompt_tokens if n > prompt_tokens else 1 for n in lengths]
    if prompt_tokens > 1:
        ids = [[*ids[0][:p], *row[p:]] for p, row in zip(prompts, ids, strict=True)]
    batch = pack_sequences(
        token_ids=ids,
        response_masks=[[False] * p + [True] * (n - p) for p, n in zip(prompts, lengths, strict=True)],
        rollout_logprobs=[[0.0] * n for n in lengths],
        sequence_ids=range(len(ids)),
        share_prompts=prompt_tokens > 1,
    )
    weights_T = torch.rand(batch.num_tokens, generator=generator) - 0.3
    return batch.with_fields(importance_weights_T=weights_T, aggregation_T=torch.full_like(weights_T, 1e-2))


def make_engine(
    folder: Path, *, layout: LayoutConfig | None = None, dtype: str = "float32", steps: int = 10, recompute: str = "none",
    timeout_s: float = 120.0, fp32_lm_head: bool = False, pieces: int | None = None, lora: dict[str, Any] | None = None,
    served: str | None = None, freeze_router: bool = False, **optimizer,
) -> MegatronEngine:  # fmt: skip
    """pieces: of aligned numerics; None: default numerics. lora: fields of ``LoraConfig``, for an engine of adapters, whose
    B is random instead of zero (a gradient of A needs it). served: the dtype of the servers' weights, if it is not
    ``dtype``."""
    platform.init_distributed(60.0)
    adapters = lora and Lora(
        config=LoraConfig.model_validate(lora), served_dtype=getattr(torch, served or dtype)
    )
    settings = OptimizerConfig(**{"lr": 1e-2, "eps": 1e-4, "clip_grad": 1e9, **optimizer})
    engine = MegatronEngine(
        ModelConfig(
            path=folder,
            dtype=dtype,
            fp32_lm_head=fp32_lm_head,
            numerics="aligned" if pieces else "default",
        ),
        layout or LayoutConfig(),
        Training(optimizer=settings, total_steps=steps, recompute=recompute, freeze_router=freeze_router),
        logprob_chunk_tokens=7,
        seed=0,
        timeout_s=timeout_s,
        pieces=pieces,
        lora=adapters,
    )
    if adapters is not None:
        randomise_b(engine)
    return engine


@torch.no_grad()
def randomise_b(engine: MegatronEngine, *, spread: float = 0.05) -> None:
    """Give every B normal numbers that do not depend on the layout."""
    for chunk in engine.chunks:
        layers = adapted_layers(chunk)
        for name, weight in hf_conversion.parameter_names(chunk):
            if weight in layers:
                b = layers[weight].lora_b
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                sharded = getattr(b, "tensor_model_parallel", False)
                rows = len(b) * (parallel_state.get_tensor_model_parallel_world_size() if sharded else 1)
                whole = torch.randn(rows, b.shape[1], generator=generator) * spread
                b.copy_(hf_conversion._local_shard(name, whole, b))
    engine._optimizer.reload_model_params()


def weighted_loss(batch: PackedBatch, logprobs_T: torch.Tensor, entropy_T: torch.Tensor):
    """Some loss with both gradients, which also returns its value and its inputs."""
    loss = -(logprobs_T * batch.importance_weights_T).sum() - (entropy_T * batch.aggregation_T).sum()
    found = {"logprobs_T": logprobs_T.detach().clone(), "entropy_T": entropy_T.detach().clone()}
    return loss, {"loss": loss.item(), **found}


def make_value_engine(
    folder: Path, *, layout: LayoutConfig | None = None, dtype: str = "float32", recompute: str = "none", head_seed: int | None = 0,
    **optimizer,
) -> ValueEngine:  # fmt: skip
    """Its head is random (None: zero, as a critic starts), so that the backbone has a gradient."""
    platform.init_distributed(60.0)
    settings = OptimizerConfig(**{"lr": 1e-2, "eps": 1e-4, "clip_grad": 1e9, **optimizer})
    engine = ValueEngine(
        ModelConfig(path=folder, dtype=dtype),
        layout or LayoutConfig(),
        Training(optimizer=settings, total_steps=10, recompute=recompute),
        seed=0,
    )
    if head_seed is not None:
        for head in heads_of(engine):
            head.data.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(head_seed)) * 0.3)
        engine._optimizer.reload_model_params()
    return engine


def heads_of(engine: ValueEngine) -> list[torch.nn.Parameter]:
    """The head, on the last pipeline stage; none elsewhere."""
    return [chunk.value_head.weight for chunk in engine.chunks if chunk.post_process]


def make_value_batch(lengths: list[int], *, seed: int = 0, prompt_tokens: int = 1) -> PackedBatch:
    """A batch that a critic has scored, some of its values far enough off to be clipped."""
    batch = make_batch(lengths, seed=seed, prompt_tokens=prompt_tokens)
    old_T, returns_T, weights_T = torch.randn(
        3, batch.num_tokens, generator=torch.Generator().manual_seed(seed + 1)
    )
    return batch.with_fields(
        values_T=old_T, returns_T=returns_T, value_aggregation_T=weights_T.abs() / batch.num_tokens
    )


def clipped_loss(batch: PackedBatch, values_T: torch.Tensor):
    """The critic's loss, which also returns its values."""
    return value_loss(batch, values_T, value_clip=0.5)[0], values_T.detach().clone()


def value_weights_of(engine: ValueEngine) -> dict[str, torch.Tensor]:
    """The backbone's whole tensors by their Hugging Face names, and the head."""
    found = {name: tensor.detach().clone() for name, tensor in hf_conversion.export_hf(engine.chunks)}
    return found | {"head": engine.chunks[0].value_head.weight.detach().clone()}


def weights_of(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.export_hf()}


def gradients_of(engine: MegatronEngine | ValueEngine) -> dict[str, torch.Tensor]:
    """The summed gradients of the last update of a plain (not distributed) optimizer."""
    return {
        name: parameter.main_grad.detach().clone()
        for name, parameter in engine.chunks[0].named_parameters()
        if parameter.requires_grad
    }


def relative_difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, all tensors as one vector."""
    assert found.keys() == wanted.keys()
    difference = sum((found[n] - wanted[n]).double().square().sum() for n in wanted)
    return float((difference / sum(wanted[n].double().square().sum() for n in wanted)).sqrt())


def forked_context() -> ForkServerContext:
    """The context of processes forked from a server that has only imported this module. A spawned process takes six CPU
    seconds to import torch and Megatron."""
    multiprocessing.set_forkserver_preload(["tests.support.fork_server"])
    return multiprocessing.get_context("forkserver")


def run_ranks(
    work, num_ranks: int, folder: Path, *arguments: Any, deadline_s: float = 600.0, own_output: bool = False
) -> list[Any]:
    """``work(*arguments)`` in ``num_ranks`` fresh processes of one group; what each returned, by rank. Fails
    past the deadline.

    They come from ``forked_context``, so they write where its server does, which the first test that needed it started.
    With ``own_output`` they are spawned, and write where this process does.
    """
    # Not from the range of outgoing connections, one of which could take it meanwhile.
    port = choose_ports([0], None)[0].http
    folder.mkdir(parents=True, exist_ok=True)
    if not own_output:
        forked_context()
    context = mp.start_processes(
        _rank_main,
        (dict(os.environ), work, num_ranks, port, folder, arguments),
        nprocs=num_ranks,
        join=False,
        start_method="spawn" if own_output else "forkserver",
    )
    end = time.monotonic() + deadline_s
    try:
        while not context.join(timeout=max(0.1, end - time.monotonic())):
            assert time.monotonic() < end, f"{work.__name__} on {num_ranks} ranks ran past {deadline_s} s"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def run_forked(work, *arguments: Any, deadline_s: float = 300.0) -> int | None:
    """``work(*arguments)`` in a fresh process outside of any group, forked from the server of ``run_ranks``: its exit
    code. None past the deadline."""
    process = forked_context().Process(target=_forked_main, args=(dict(os.environ), work, arguments))
    process.start()
    process.join(deadline_s)
    if process.is_alive():
        process.kill()
        return None
    return process.exitcode


def _forked_main(environment: dict, work, arguments: tuple) -> None:
    os.environ.clear()  # the server's, which it was started with
    os.environ.update(environment)
    torch.set_num_threads(1)
    work(*arguments)


def _rank_main(
    rank: int, environment: dict, work, num_ranks: int, port: int, folder: Path, arguments: tuple
) -> None:
    os.environ.clear()  # the server's, which it was started with
    os.environ.update(
        environment,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    platform.init_distributed(60.0)
    torch.save(work(*arguments), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def work_linear_logprobs(cases: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Each case on this rank's shard of the vocabulary; the gradient of hidden summed over ranks, as the
    model does it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for case in cases:
        whole_logits = None
        if case.get("is_aligned"):
            whole_logits = partial(
                aligned.whole_logits, vocab_size=case["vocab_size"], group=dist.group.WORLD
            )
        hidden = case["hidden"].clone().requires_grad_()
        weight = case["weight"].chunk(size)[rank].clone().requires_grad_()
        logprobs, entropy = linear_logprobs(
            hidden, weight, case["targets"], vocab_size=case["vocab_size"], temperature=case["temperature"],
            chunk_tokens=case["chunk_tokens"], group=dist.group.WORLD, kept=case.get("kept"),
            whole_logits=whole_logits,
        )  # fmt: skip
        ((logprobs * case["g"]).sum() + (entropy * case["h"]).sum()).backward()
        dist.all_reduce(hidden.grad)
        results.append(
            dict(logprobs=logprobs.detach(), entropy=entropy.detach(), hidden=hidden.grad, weight=weight.grad)
        )
    return results


def work_updates(
    folder: Path,
    layout: dict[str, int],
    microbatch_rows: list[list[list[int]]],
    lengths: list[int],
    num_updates: int,
    optimizer: dict,
) -> dict[str, Any]:
    """Updates on one batch, split as ``microbatch_rows[dp_rank]`` says: first gradients, losses, norms and
    final weights."""
    engine = make_engine(folder, layout=LayoutConfig(**layout), **optimizer)
    batch = make_batch(lengths)
    mine = [batch.select(rows) for rows in microbatch_rows[engine.groups.dp_rank]]
    before = engine.logprobs(mine, temperature=0.7)
    results = [engine.update(mine, weighted_loss, temperature=0.7)]
    first = results[0].outputs
    # now: after further steps rounding has moved the weights apart, and these would be gradients at different
    # points
    gradients = gradients_of(engine) if not optimizer.get("distributed", True) else None
    results += [engine.update(mine, weighted_loss, temperature=0.7) for _ in range(num_updates - 1)]
    return {
        "bitwise": all(torch.equal(old, new["logprobs_T"]) for old, new in zip(before, first, strict=True)),
        "logprobs": before,
        "norms": [r.grad_norm for r in results],
        "weights": weights_of(engine),
        "gradients": gradients,
        "coordinates": (engine.groups.dp_rank, engine.groups.tp_rank),
    }


def work_many_updates(jobs: dict[str, tuple]) -> dict[str, dict[str, Any]]:
    """Several ``work_updates`` of one layout in one set of processes: starting them costs more than the work."""
    return {name: work_updates(*arguments) for name, arguments in jobs.items()}


def work_round_trip(folder: Path, layout: dict[str, int], out: Path) -> bool:
    """Load, export, save with small shards and load again."""
    engine = make_engine(folder, layout=LayoutConfig(**layout))
    engine.save_hf(out)
    return True


def work_non_finite(folder: Path, bad_rank: int) -> dict[str, Any]:
    """A NaN loss on one rank only: both must raise, neither must move."""
    engine = make_engine(folder, layout=LayoutConfig(dp=2))
    before = weights_of(engine)
    batch = make_batch([9, 7])

    def loss(b, logprobs_T, entropy_T):
        return logprobs_T.sum() * (float("nan") if dist.get_rank() == bad_rank else 1.0), None

    message = ""
    try:
        engine.update([batch], loss, temperature=1.0)
    except ArithmeticError as error:
        message = str(error)
    return {
        "message": message,
        "unchanged": all(torch.equal(before[n], t) for n, t in weights_of(engine).items()),
    }


@contextlib.contextmanager
def warnings_of_megatron() -> Iterator[list[str]]:
    """What Megatron's loggers say inside."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("megatron").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("megatron").removeHandler(handler)


def work_checkpoint(
    folder: Path, layout: dict[str, int], optimizer: dict, checkpoint: Path, resume: bool
) -> dict[str, Any]:
    """Two updates, a checkpoint, a third update; or resume at the checkpoint and only that third update."""
    engine = make_engine(folder, layout=LayoutConfig(**layout), **optimizer)
    batch = make_batch([12, 9, 7, 12])
    size = engine.groups.dp_size
    mine = batch.select([row for row in range(4) if row % size == engine.groups.dp_rank])
    with warnings_of_megatron() as said:
        if resume:
            assert engine.load(checkpoint) == {"position": 2}
        else:
            for _ in range(2):
                engine.update([mine], weighted_loss, temperature=1.0)
            engine.save(checkpoint, {"position": 2})
    at_checkpoint = weights_of(engine)
    engine.update([mine], weighted_loss, temperature=1.0)
    return {"at": at_checkpoint, "after": weights_of(engine), "said": said}


def work_value_updates(
    folder: Path,
    layout: dict[str, int],
    microbatch_rows: list[list[list[int]]],
    lengths: list[int],
    optimizer: dict,
) -> dict[str, Any]:
    """Like ``work_updates``, of a critic: three updates."""
    engine = make_value_engine(folder, layout=LayoutConfig(**layout), **optimizer)
    batch = make_value_batch(lengths)
    mine = [batch.select(rows) for rows in microbatch_rows[engine.groups.dp_rank]]
    before = engine.values(mine)
    results = [engine.update(mine, clipped_loss)]
    gradients = gradients_of(engine) if not optimizer["distributed"] else None
    results += [engine.update(mine, clipped_loss) for _ in range(2)]
    return {
        "bitwise": all(torch.equal(old, new) for old, new in zip(before, results[0].outputs, strict=True)),
        "values": before,
        "norms": [r.grad_norm for r in results],
        "weights": value_weights_of(engine),
        "gradients": gradients,
    }


def work_many_value_updates(jobs: dict[str, tuple]) -> dict[str, dict[str, Any]]:
    return {name: work_value_updates(*arguments) for name, arguments in jobs.items()}


def work_scaled_updates(
    folder: Path, data_parallel: int, lengths: list[int], optimizers: list[dict]
) -> list[dict[str, Any]]:
    """Per optimizer, two updates of a policy: losses divided by a count of all ranks, known before and known
    after the forward."""
    return [_scaled_updates(folder, data_parallel, lengths, optimizer) for optimizer in optimizers]


def _scaled_updates(folder: Path, data_parallel: int, lengths: list[int], optimizer: dict) -> dict[str, Any]:
    batch = make_batch(lengths)
    calls: list[list[int]] = []

    def divided_before(microbatch: PackedBatch, logprobs_T: torch.Tensor, entropy_T: torch.Tensor):
        return weighted_loss(microbatch, logprobs_T, entropy_T)[0] / batch.num_tokens, microbatch.num_tokens

    def not_divided(microbatch: PackedBatch, logprobs_T: torch.Tensor, entropy_T: torch.Tensor):
        return weighted_loss(microbatch, logprobs_T, entropy_T)[0], microbatch.num_tokens

    def one_over_count(outputs: list[int]) -> float:
        calls.append(outputs)
        total = torch.tensor(sum(outputs))
        dist.all_reduce(total)
        return 1.0 / total.item()

    results: dict[str, Any] = {"calls": calls}
    for way, loss_fn, grad_scale in (
        ("before", divided_before, None),
        ("after", not_divided, one_over_count),
    ):
        engine = make_engine(folder, layout=LayoutConfig(dp=data_parallel), **optimizer)
        mine = [batch.select([row]) for row in range(engine.groups.dp_rank, len(lengths), data_parallel)]
        updates = [engine.update(mine, loss_fn, temperature=0.7, grad_scale=grad_scale) for _ in range(2)]
        results[way] = {"norms": [u.grad_norm for u in updates], "weights": weights_of(engine)}
    return results


def work_value_checkpoint(
    folder: Path, layout: dict[str, int], optimizer: dict, checkpoint: Path, resume: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """Like ``work_checkpoint``, of a critic."""
    engine = make_value_engine(
        folder, layout=LayoutConfig(**layout), head_seed=None if resume else 0, **optimizer
    )
    batch = make_value_batch([12, 9, 7, 12])
    mine = [batch.select(list(range(engine.groups.dp_rank, 4, engine.groups.dp_size)))]
    if resume:
        assert engine.load(checkpoint) == {"position": 2}
    else:
        for _ in range(2):
            engine.update(mine, clipped_loss)
        engine.save(checkpoint, {"position": 2})
    at_checkpoint = value_weights_of(engine)
    engine.update(mine, clipped_loss)
    return {"at": at_checkpoint, "after": value_weights_of(engine)}


def work_critic_fits(folder: Path, data_parallel: int) -> dict[str, Any]:
    """A critic on returns that are all alike, on this rank's half of the sequences."""
    platform.init_distributed(60.0)
    optimizer = {"lr": 1e-2, "eps": 1e-4}
    config = RunConfig(
        model=ModelConfig(path=folder, dtype="float32"), task=CountdownTask(), layout=LayoutConfig(dp=data_parallel),
        advantage=GaeAdvantage(type="gae"), critic=CriticConfig(optimizer=optimizer, value_clip=None), steps=20,
    )  # fmt: skip
    critic = Critic(config)
    batch = make_value_batch([9, 5, 12, 9])
    weights_T = batch.response_mask_T / batch.response_mask_T.sum()
    batch = batch.with_fields(returns_T=torch.full_like(batch.returns_T, 0.7), value_aggregation_T=weights_T)
    mine = [batch.select([row]) for row in range(critic.engine.groups.dp_rank, 4, data_parallel)]
    first = critic.score(mine)
    updates = []
    for _ in range(20):
        scored = [
            b.with_fields(values_T=values_T.cpu())
            for b, values_T in zip(mine, critic.score(mine), strict=True)
        ]
        updates.append(critic.update(scored))
    return {
        "first": first,
        "metrics": [values(metrics) for metrics, _ in updates],
        "norms": [update.grad_norm for _, update in updates],
        "lr": updates[-1][1].lr,
    }


def learner_config(
    folder: Path,
    *,
    data_parallel: int,
    aggregation: AggregationConfig,
    sharded: bool,
    correction: dict | None = None,
    learner: dict | None = None,
    entropy: float = 0.05,
) -> RunConfig:
    """Two minibatches per step, unless ``learner`` says otherwise.

    Adam's eps is large enough that a rounding error of a tiny gradient is not blown up to a whole step.
    """
    return RunConfig(
        model=ModelConfig(path=folder, dtype="float32"),
        task=CountdownTask(),
        rollout=RolloutConfig(
            prompts_per_step=4, group_size=3, max_new_tokens=20, temperature=0.7, dtype="float32"
        ),
        layout=LayoutConfig(dp=data_parallel),
        learner=LearnerConfig(
            token_budget=24,
            logprob_chunk_tokens=7,
            optimizer=OptimizerConfig(lr=1e-2, eps=1e-4, clip_grad=1e9, distributed=sharded),
            **{"minibatches": 2} | (learner or {}),
        ),
        correction=CorrectionConfig.model_validate(correction or {}),
        aggregation=aggregation,
        entropy=EntropyConfig(coefficient=entropy),
        steps=1,
    )


def work_learner_steps(
    data_parallel: int, folder: Path, groups: list[Group], jobs: list[dict[str, Any]]
) -> list[dict]:
    """One whole RL step of a fresh learner per job (aggregation, correction, sharded optimizer), from groups
    that rank 0 alone has."""
    platform.init_distributed(60.0)
    return [_learner_step(data_parallel, folder, groups, **job) for job in jobs]


def _learner_step(
    data_parallel: int,
    folder: Path,
    groups: list[Group],
    *,
    sharded: bool = False,
    flat: Sequence[int] = (),
    **options: Any,
) -> dict[str, Any]:
    """flat: groups whose samples all get the same reward."""
    groups = [
        replace(group, trajectories=[replace(t, reward=1.0) for t in group.trajectories])
        if i in flat
        else group
        for i, group in enumerate(groups)
    ]
    config = learner_config(folder, data_parallel=data_parallel, sharded=sharded, **options)
    learner = Learner(config)
    before = weights_of(learner.engine)
    batch = learner.score(learner.receive(groups if learner.is_first_rank else None), before_update=True)
    batch = batch.with_advantages(
        compute_advantages(
            batch.packed, batch.rewards_S, batch.group_ids_S, config.advantage, total=learner.total
        )
    )
    found = correct(batch.packed, config.correction, learner.total)
    batch = batch.with_loss_weights(found, config.aggregation, config.correction.denominator, learner.total)
    updates, gradients = [], []
    for minibatch in batch.minibatches():
        updates.append(learner.update(minibatch, policy=True))
        gradients += [] if sharded else [gradients_of(learner.engine)]
    metrics = [update.metrics for update in updates]
    if found.metrics:
        metrics = [merge_over_ranks(found.metrics, learner.groups.dp_group) | m for m in metrics]
    return {
        "norms": [m["optim/grad_norm"].value for m in metrics],
        "losses": [m["loss/total"].value for m in metrics],
        "kept": [m["mismatch/kept_fraction"].value for m in metrics],
        "skipped": [
            m["policy/skipped_fraction"].value if "policy/skipped_fraction" in m else None for m in metrics
        ],
        "values": [values(m) for m in metrics],
        "gradients": gradients,
        "before": before,
        "weights": weights_of(learner.engine),
    }


def work_group_deadlines(folder: Path, timeout_s: float) -> dict[str, Any]:
    """The deadline of each of the engine's groups in seconds, of the default group, and what CPU tensors and
    objects become in it."""
    engine = make_engine(folder, layout=LayoutConfig(tp=2), timeout_s=timeout_s)
    tensor_parallel = parallel_state.get_tensor_model_parallel_group()
    groups = {"dp": engine.groups.dp_group, "tp": tensor_parallel, "default": dist.group.WORLD}
    place = torch.device("cuda" if platform.has_cuda() else "cpu")
    seconds = {
        name: group._get_backend(place).options._timeout.total_seconds() for name, group in groups.items()
    }
    total, objects = torch.tensor([dist.get_rank() + 1]), [None] * dist.get_world_size()
    dist.all_reduce(total)
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    return {"seconds": seconds, "total": total.item(), "objects": objects}


def work_sft(config: SftConfig) -> list[str]:
    """A whole warm start; what this rank reported."""
    platform.init_distributed(60.0)
    lines: list[str] = []
    train_sft(config, report=lines.append)
    return lines
