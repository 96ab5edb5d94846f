"""The work of checks without a server: a model's files, collectives, the learner's log-probs, updates and memory.

Each function is (folder, config, request) -> Found. It runs on every rank and raises CheckFailed.
"""

import math
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from configs.schema import RunConfig
from launch.checks.between_nodes import COLLECTIVE_BYTES
from launch.processes.run_folder import RunFolder
from launch.selftest.check import REPORT, CheckFailed, Found
from parallel.held_memory import KeptBytes, lasting_bytes
from parallel.megatron import platform
from parallel.packing import PackedBatch
from parallel.planning.architecture import architecture_of, read_hf_config
from parallel.planning.memory import learner_memory, size_text
from parallel.planning.work import work_of
from parallel.weights.hf_files import HuggingFaceWeights
from parallel.weights.hf_names import all_hf_names
from rollout.terminal_text import tandem_command
from rollout.tiny_model import make_tiny_countdown_model
from trainer.batch.plan import pack_prompted
from trainer.engine_agreement import EXACT_TOLERANCE
from trainer.learner import Learner
from trainer.studies.layout_scoring import frozen_engine
from trainer.studies.layout_statistics import probability_gaps

SPREAD = 0.12
"""Standard deviation of the weights. With smaller weights, the answers hardly depend on the prompt."""
LENGTHS = (90, 41, 7, 66, 23, 90, 12, 58)
SANE_PROBABILITY = 0.1
UPDATES = 3
PLAN_TOLERANCE = 0.05


def model(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    path = config.model.path
    make_tiny_countdown_model(path, seed=config.seed, initializer_range=SPREAD)
    weights, names = HuggingFaceWeights(path), all_hf_names(architecture_of(path))
    if missing := sorted(names - weights.names):
        raise CheckFailed(f"the files of {path} lack {', '.join(missing[:3])}")
    again = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    wrong = sorted(name for name in names if not torch.equal(weights.read(name), again[name]))
    if wrong:
        raise CheckFailed(f"transformers reads other weights than the files hold: {', '.join(wrong[:3])}")
    count = sum(weights.read(name).numel() for name in names)
    return Found(f"Qwen3 of {count / 1e6:.2f} M parameters, {len(names)} tensors", {"parameters": count})


def collectives(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    backend, rank, size = request["backend"], dist.get_rank(), dist.get_world_size()
    place = platform.device() if backend == "nccl" else torch.device("cpu")
    base = torch.arange(COLLECTIVE_BYTES[backend] // 4, device=place).remainder(251).float()
    sent, summed = base + rank, base + rank
    dist.broadcast(sent, src=size - 1)
    _check_numbers(sent, base + size - 1, f"a broadcast by {backend}")
    began = time.perf_counter()
    dist.all_reduce(summed)
    platform.synchronize()
    seconds = time.perf_counter() - began
    _check_numbers(summed, size * base + size * (size - 1) // 2, f"an all-reduce by {backend}")
    rate = COLLECTIVE_BYTES[backend] / seconds / 1e9
    text = f"all-reduce of {COLLECTIVE_BYTES[backend] // 2**20} MiB over {size} processes: {rate:.2f} GB/s"
    return Found(text, {"all_reduce_gb_per_s": rate, "processes": size})


def _check_numbers(found: Tensor, expected: Tensor, what: str) -> None:
    if wrong := int((found != expected).sum()):
        fix = "check the memory of this machine; for NCCL set NCCL_DEBUG=INFO and read the driver's errors (dmesg)"
        raise CheckFailed(f"{what} over {dist.get_world_size()} processes gave {wrong} wrong numbers", fix)


def logprobs(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    """Log-probs of random sequences against transformers', which computes in float32."""
    if request["layers"] == "local":
        platform.uses_transformer_engine = lambda dtype: False
    batch, ids = random_batch(config)
    reference_T = reference_logprobs(config, ids)
    mask_T, figures = batch.response_mask_T, {}
    for dtype in ("float32", "bfloat16") if request["layers"] == "local" else ("bfloat16",):
        engine = frozen_engine(config, config.model.model_copy(update={"dtype": dtype}))
        (scored_T,) = engine.logprobs([batch], temperature=1.0)
        mine, theirs = scored_T.cpu()[mask_T], reference_T[mask_T]
        nats = (mine - theirs).abs().max().item()
        gap = probability_gaps(mine, theirs).max().item()
        figures |= {f"{dtype}_max_logprob_gap_nats": nats, f"{dtype}_max_probability_gap": gap}
        fix = f"run `{tandem_command('selftest', '--only', folder.path.name)}` again; {REPORT}"
        check_gap("a log-prob differs from transformers'", nats, gap, dtype, fix)
    nats = figures.get("float32_max_logprob_gap_nats")
    exact = f"float32: {nats:.1e} nats at most; " if nats is not None else ""
    gap = figures["bfloat16_max_probability_gap"]
    return Found(f"{exact}bfloat16: {gap:.1e} in probability at most", figures)


def check_gap(what: str, nats: float, gap: float, dtype: str, fix: str) -> None:
    """nats, gap: the greatest difference of log-probs, and of probabilities. Raises CheckFailed if float32 log-probs differ by
    more than ``EXACT_TOLERANCE``, or probabilities of another dtype by more than ``SANE_PROBABILITY``."""
    is_exact = dtype == "float32"
    if not (nats <= EXACT_TOLERANCE if is_exact else gap <= SANE_PROBABILITY):
        allowed = f"{EXACT_TOLERANCE:g} nats" if is_exact else f"{SANE_PROBABILITY:g} in probability"
        error = f"in {dtype} {what} by {nats:.1e} nats ({gap:.1e} in probability)"
        raise CheckFailed(f"{error}; {allowed} is allowed", fix)


def random_batch(config: RunConfig) -> tuple[PackedBatch, list[list[int]]]:
    """Sequences of random tokens. Only the first token of each is prompt."""
    draw = torch.Generator().manual_seed(config.seed)
    vocab_size = read_hf_config(config.model.path)["vocab_size"]
    ids = [torch.randint(0, vocab_size, (n,), generator=draw).tolist() for n in LENGTHS]
    return pack_prompted(ids, [1] * len(ids), range(len(ids))), ids


@torch.no_grad()
def reference_logprobs(config: RunConfig, ids: list[list[int]]) -> Tensor:
    """transformers' log-probs of each sequence's tokens from the second on, end to end."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    rows = []
    for row in ids:
        tokens = torch.tensor([row])
        every = model(tokens).logits[0, :-1].log_softmax(-1)
        rows.append(every.gather(1, tokens[0, 1:, None]).squeeze(1))
    return torch.cat(rows)


def update(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    """A few updates raise the likelihood of a fixed batch. They run twice from the same start."""
    batch, _ = random_batch(config)
    losses, norms, weights = updated(config, batch)
    if not all(map(math.isfinite, (*losses, *norms))) or not all(norms):
        raise CheckFailed(f"losses {losses}, norms of the gradient {norms}: not all are finite and above 0")
    if losses[-1] >= losses[0]:
        change = f"{losses[0]:.6f} before, {losses[-1]:.6f} after"
        raise CheckFailed(f"{UPDATES} updates on one batch did not lower the loss: {change}")
    _, _, again = updated(config, batch)
    differing = [name for name in weights if not torch.equal(weights[name], again[name])]
    # Attention's backward pass on CUDA adds in an order that is not fixed.
    if differing and not platform.has_cuda():
        error = f"{UPDATES} updates gave other weights when repeated: {len(differing)} tensors differ"
        raise CheckFailed(f"{error}, {differing[0]} first", f"check the memory of this machine; {REPORT}")
    same = f", {len(differing)} of {len(weights)} tensors differ" if differing else " to the bit"
    text = f"loss {losses[0]:.4f} → {losses[-1]:.4f} in {UPDATES} updates; repeated{same}"
    return Found(text, {"losses": losses, "grad_norms": norms, "differing_tensors": len(differing)})


def updated(config: RunConfig, batch: PackedBatch) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """(loss before each update, norm of each gradient, weights after the last) of a new learner."""
    count = int(batch.response_mask_T.sum())

    def loss_fn(batch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor) -> tuple[Tensor, float]:
        loss = -logprobs_T.sum() / count  # 0 off the response mask
        return loss, loss.item()

    learner = Learner.of_policy_alone(config.model_copy(update={"steps": UPDATES}))
    done = [learner.engine.update([batch], loss_fn, temperature=1.0) for _ in range(UPDATES)]
    weights = {name: tensor.detach().cpu().clone() for name, tensor in learner.engine.export_hf()}
    return [one.outputs[0] for one in done], [one.grad_norm for one in done], weights


def memory(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    """What torch holds after an update, and what autograd keeps during it, against the plan of ``--dry-run``."""
    batch, _ = random_batch(config)
    kind = "cuda" if platform.has_cuda() else "cpu"
    work = replace(work_of(config, kind), token_budget=batch.num_tokens, num_microbatches=1)
    planned = learner_memory(architecture_of(config.model.path), config.layout, work, stage=0)
    learner = Learner.of_policy_alone(config)
    kept = KeptBytes(p for chunk in learner.engine.chunks for p in chunk.parameters())
    with kept.watch():
        learner.engine.update(
            [batch], lambda b, logprobs_T, entropy_T: (logprobs_T.sum(), None), temperature=1.0
        )
    held = lasting_bytes(learner.engine) | {"activations": kept.peak}
    plan = {name: getattr(planned, name) for name in held}
    for name, size in held.items():
        # On CUDA the activations depend on the kernels and were never measured: reported, not judged.
        is_judged = name != "activations" or kind == "cpu"
        if is_judged and abs(size - plan[name]) > PLAN_TOLERANCE * plan[name]:
            error = f"{name} take {size_text(size)}, and the plan says {size_text(plan[name])}"
            fix = f"do not trust the memory of --dry-run here; {REPORT}"
            raise CheckFailed(f"{error}; {PLAN_TOLERANCE:.0%} is allowed", fix)
    ratios = ", ".join(f"{name} {size / plan[name]:.1%}" for name, size in held.items())
    figures = {f"{name}_bytes": size for name, size in held.items()}
    figures |= {f"planned_{name}_bytes": size for name, size in plan.items()}
    if kind == "cuda":
        figures["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    return Found(f"of the plan: {ratios}", figures)
