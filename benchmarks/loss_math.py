"""Correction, clipped loss and metrics on packed tokens against the same mathematics on padded (B, L)
tensors: seconds and peak memory.

    speedup      = median seconds padded / median seconds packed, forward and backward
    memory_ratio = peak memory packed / peak memory padded, of all tensors that the mathematics makes; the inputs are not counted

Targets: a speedup of at least 3, a memory ratio of at most 1/3. Before anything is timed, loss, gradient,
weights, mask and every metric of both are compared (relative 1e-6). Times are CPU seconds of the one thread,
because others may share the machine; the wall clock is shown beside them. All sides run in one process, in turn,
and then again without giving freed memory back (``keep_freed_memory``). Memory: each side runs in its own process.
Counted are the bytes that torch's allocator has handed out and not got back, from the events of its profiler; the
growth of the peak resident memory is shown beside them.

Packed sequences hold their prompt, off the mask, as the trainer's do; padded tensors hold only responses, as is
usual. Both sides replace values off the mask, even NaN. A third side, also padded, trusts that its padding is zero
already. Legend: S = B responses, T packed tokens, L places of a padded row.
"""

import ctypes
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.common import announce, in_own_process, line, parser, ratios, spread, write  # noqa: E402
from configs.schema.correction import CorrectionConfig, ImportanceWeight, RatioRule  # noqa: E402
from configs.schema.objective import ClippedObjective, EntropyConfig, KLConfig  # noqa: E402
from parallel.packing import PackedBatch  # noqa: E402
from tests.reference import padded  # noqa: E402
from trainer.algorithm import correction as packed_correction  # noqa: E402
from trainer.algorithm.aggregation import GlobalCounts, aggregation_weights  # noqa: E402
from trainer.algorithm.correction import correct  # noqa: E402
from trainer.algorithm.policy_loss import policy_loss  # noqa: E402
from trainer.algorithm.segments import count_per_sequence  # noqa: E402
from trainer.ranks.metrics import values  # noqa: E402

TARGETS = {"speedup": 3.0, "memory_ratio": 1 / 3}
CONFIG = {
    "responses": 64, "median_length": 1024, "sigma": 1.0, "longest": 8192, "prompt": 256, "seed": 0,
    "correction": "decoupled, token weights truncated at 2, geometric ratio within [0.99, 1.01], veto 1e-4, mean over kept tokens",
    "objective": "clipped, 0.2 and 0.2, dual clip 3; aggregation token_mean",
}  # fmt: skip
GEOMETRIC, VETO, WEIGHT_UPPER = (0.99, 1.01), 1e-4, 2.0
CORRECTION = CorrectionConfig(
    weight=ImportanceWeight(level="token", bound="truncate", upper=WEIGHT_UPPER),
    reject=(RatioRule(level="geometric", lower=GEOMETRIC[0], upper=GEOMETRIC[1]),),
    veto=VETO,
)
OBJECTIVE, KL, ENTROPY = ClippedObjective(), KLConfig(), EntropyConfig()
TRUSTING = "padded, trusting zeros"


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=41)
    options.add_argument(
        "--median-length", type=int, default=CONFIG["median_length"], help="of the lognormal, in tokens"
    )
    options.add_argument("--memory-of", help="(internal) measure one side's memory in this process")
    given = options.parse_args()
    torch.set_num_threads(1)
    sides = prepared(given.median_length)
    if given.memory_of:
        print(json.dumps(peak_memory(sides[given.memory_of])))
        return
    check_agreement(given.median_length)
    config = CONFIG | {"median_length": given.median_length, **describe(lengths(given.median_length))}
    rounds = 5 if given.quick else given.rounds
    about = announce(threads=torch.get_num_threads(), config=config, rounds=rounds)
    seconds, wall = alternate(sides, rounds=rounds)
    keep_freed_memory()
    kept, _ = alternate(sides, rounds=rounds)
    shares = {
        name: statistics.median(column)
        for name, column in parts_of_packed(given.median_length, rounds=11).items()
    }
    median = str(given.median_length)
    memory = {
        side: in_own_process(__file__, "--memory-of", side, "--median-length", median) for side in sides
    }
    result = {
        **about, "targets": TARGETS,
        "speedup": ratio_of_medians(seconds, "padded"),
        "speedup_by_wall_clock": ratio_of_medians(wall, "padded"),
        "speedup_of_pairs": spread(ratios(seconds["padded"], seconds["packed"])),
        "freed_memory_kept": {
            "speedup": ratio_of_medians(kept, "padded"), "against_trusted_zeros": ratio_of_medians(kept, TRUSTING),
            "seconds": {side: spread(found) for side, found in kept.items()},
        },
        "memory_ratio": memory["packed"]["tensors"] / memory["padded"]["tensors"],
        "memory_ratio_resident": memory["packed"]["resident"] / memory["padded"]["resident"],
        "against_trusted_zeros": {
            "speedup": ratio_of_medians(seconds, TRUSTING), "memory_ratio": memory["packed"]["tensors"] / memory[TRUSTING]["tensors"],
        },
        "seconds": {side: spread(found) for side, found in seconds.items()},
        "wall_seconds": {side: spread(found) for side, found in wall.items()},
        "mebibytes": memory,
        "seconds_of_packed_parts": shares,
    }  # fmt: skip
    report(result, seconds)
    write(result, given.json)


def ratio_of_medians(seconds: dict[str, list[float]], side: str) -> float:
    return statistics.median(seconds[side]) / statistics.median(seconds["packed"])


def report(result: dict, seconds: dict[str, list[float]]) -> None:
    for side, found in seconds.items():
        of = result["mebibytes"][side]
        print(line(side, found), f"  peak {of['tensors']:.1f} MiB in tensors, {of['resident']:.1f} resident")
    pairs, trusting = result["speedup_of_pairs"], result["against_trusted_zeros"]
    print(
        f"speedup      {result['speedup']:.2f}   target: at least 3   (of pairs {pairs['min']:.2f} to {pairs['max']:.2f}, "
        f"by wall clock {result['speedup_by_wall_clock']:.2f}; against trusted zeros {trusting['speedup']:.2f})"
    )
    of_kept = result["freed_memory_kept"]
    print(
        f"             {of_kept['speedup']:.2f} with freed memory kept (against trusted zeros {of_kept['against_trusted_zeros']:.2f})"
    )
    print(
        f"memory ratio {result['memory_ratio']:.3f}   target: at most 0.333   (resident {result['memory_ratio_resident']:.3f}; "
        f"against trusted zeros {trusting['memory_ratio']:.3f})"
    )
    total = sum(result["seconds_of_packed_parts"].values())
    for name, part in result["seconds_of_packed_parts"].items():
        print(f"  {name:<28} {1000 * part:7.2f} ms  {part / total:4.0%}")


# ----------------------------------------------------------------------------------------------------------------------
# inputs


def lengths(median: int) -> Tensor:
    """Lengths of the responses: lognormal, at most the longest. int64 [B]"""
    generator = torch.Generator().manual_seed(CONFIG["seed"])
    drawn_B = median * (CONFIG["sigma"] * torch.randn(CONFIG["responses"], generator=generator)).exp()
    return drawn_B.round().clamp(1, CONFIG["longest"]).to(torch.int64)


def describe(lengths_B: Tensor) -> dict:
    packed = int(lengths_B.sum()) + len(lengths_B) * (CONFIG["prompt"] - 1)
    row = int(lengths_B.max())
    return {
        "mean_length": lengths_B.double().mean().item(), "drawn_median_length": lengths_B.median().item(), "longest_length": row,
        "response_tokens": int(lengths_B.sum()), "packed_places": packed, "padded_places": len(lengths_B) * row,
        "padded_over_packed": len(lengths_B) * row / packed,
    }  # fmt: skip


def inputs(lengths_B: Tensor, dtype: torch.dtype) -> tuple[padded.PaddedBatch, Tensor, Tensor]:
    """The padded batch, current log-probs and entropy. Most tokens are nearly certain, as a trained policy's
    are; a response has its own mismatch and drift, so that rules, bounds and clips all have some to act on.
    """
    generator = torch.Generator().manual_seed(CONFIG["seed"] + 1)
    B, L = len(lengths_B), int(lengths_B.max())
    mask_BL = torch.arange(L) < lengths_B[:, None]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    entropy_BL = torch.rand(B, L, generator=generator, dtype=torch.float64).pow(4)
    rollout_BL = -entropy_BL * normal(B, L).abs() * 3
    old_BL = rollout_BL + (0.002 + entropy_BL) * (0.3 * normal(B, L) + 0.02 * normal(B, 1))
    old_BL[:2, 0] -= 12.0  # for the veto
    current_BL = old_BL + (0.01 + entropy_BL) * 0.5 * normal(B, L)
    advantages_BL = normal(B, 1).expand(B, L)
    filled = [(x_BL.clamp(max=0.0) * mask_BL).to(dtype) for x_BL in (rollout_BL, old_BL, current_BL)]
    batch = padded.PaddedBatch(
        lengths_B=lengths_B, mask_BL=mask_BL, rollout_logprobs_BL=filled[0], old_logprobs_BL=filled[1],
        advantages_BL=(advantages_BL * mask_BL).to(dtype),
    )  # fmt: skip
    return batch, filled[2], (entropy_BL * mask_BL).to(dtype)


def packed_form(
    batch: padded.PaddedBatch,
) -> tuple[PackedBatch, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """(the same as a packed batch; a function that packs a padded tensor, with zeros on the prompt; a function that
    pads a packed one)."""
    places_S = batch.lengths_B + CONFIG["prompt"] - 1
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), places_S.cumsum(0)])
    positions_T = torch.cat([torch.arange(n) for n in places_S.tolist()])
    mask_T = positions_T >= CONFIG["prompt"] - 1

    def packed(x_BL: Tensor) -> Tensor:
        return x_BL.new_zeros(int(cu_seqlens[-1])).masked_scatter(mask_T, x_BL[batch.mask_BL])

    def padded_again(x_T: Tensor) -> Tensor:
        return x_T.new_zeros(batch.mask_BL.shape).masked_scatter(batch.mask_BL, x_T[mask_T])

    made = PackedBatch(
        tokens_T=torch.zeros_like(positions_T), targets_T=torch.zeros_like(positions_T), positions_T=positions_T,
        cu_seqlens=cu_seqlens.to(torch.int32), response_mask_T=mask_T, sequence_ids_S=torch.arange(len(places_S)),
        rollout_logprobs_T=packed(batch.rollout_logprobs_BL), old_logprobs_T=packed(batch.old_logprobs_BL),
        advantages_T=packed(batch.advantages_BL),
    )  # fmt: skip
    return made, packed, padded_again


# -------------------------------------------------------------------------------------------------------------------
# both sides


def run_packed(batch: PackedBatch, current_T: Tensor, entropy_T: Tensor):
    correction = correct(batch, CORRECTION)
    weighted = with_loss_weights(batch, correction)
    loss, metrics, _ = loss_of_packed(weighted, current_T, entropy_T)
    loss.backward()
    return loss, correction, correction.metrics | metrics


def with_loss_weights(batch: PackedBatch, correction: packed_correction.Correction) -> PackedBatch:
    counts = GlobalCounts.of(count_per_sequence(correction.keep_T, batch.cu_seqlens))
    aggregation_T = aggregation_weights(
        correction.keep_T, batch.cu_seqlens, mode="token_mean", constant=None, counts=counts
    )
    return batch.with_fields(importance_weights_T=correction.weights_T, aggregation_T=aggregation_T)


def loss_of_packed(batch: PackedBatch, current_T: Tensor, entropy_T: Tensor):
    return policy_loss(
        batch,
        current_T,
        entropy_T,
        objective=OBJECTIVE,
        kl=KL,
        entropy=ENTROPY,
        correction=CORRECTION,
        aggregation="token_mean",
    )


def run_padded(batch: padded.PaddedBatch, current_BL: Tensor, entropy_BL: Tensor):
    """Like the packed side: a value off the mask, even NaN, changes nothing."""
    masked = padded.with_zeros(batch, "rollout_logprobs_BL", "old_logprobs_BL")
    correction = correction_of_padded(masked)
    batch = padded.with_zeros(replace(batch, old_logprobs_BL=masked.old_logprobs_BL), "advantages_BL")
    del masked
    current_BL, entropy_BL = (torch.where(batch.mask_BL, x_BL, 0.0) for x_BL in (current_BL, entropy_BL))
    return finished(batch, correction, current_BL, entropy_BL)


def run_padded_trusting_zeros(batch: padded.PaddedBatch, current_BL: Tensor, entropy_BL: Tensor):
    """The padded side without the work that a system can save if it fills every tensor with zeros itself, and its
    responses are one stretch."""
    return finished(batch, correction_of_padded(batch), current_BL, entropy_BL)


def correction_of_padded(batch: padded.PaddedBatch) -> padded.PaddedCorrection:
    low, high = GEOMETRIC
    return padded.correct(
        batch, weight_upper=WEIGHT_UPPER, geometric_lower=low, geometric_upper=high, veto=VETO
    )


def finished(
    batch: padded.PaddedBatch, correction: padded.PaddedCorrection, current_BL: Tensor, entropy_BL: Tensor
):
    clips = {
        "clip_low": OBJECTIVE.clip_low,
        "clip_high": OBJECTIVE.clip_high,
        "dual_clip": OBJECTIVE.dual_clip,
    }
    loss, metrics = padded.policy_loss(batch, correction, current_BL, entropy_BL, **clips)
    loss.backward()
    return loss, correction, correction.metrics | metrics


def prepared(median: int) -> dict[str, Callable[[], None]]:
    """Each side as a call that does all its work once. Leaves drop their gradients afterwards, so each run allocates
    its own."""
    batch_BL, current_BL, entropy_BL = inputs(lengths(median), torch.float32)
    batch_T, packed, _ = packed_form(batch_BL)
    leaf_BL, leaf_T, entropy_T = (
        current_BL.requires_grad_(),
        packed(current_BL.detach()).requires_grad_(),
        packed(entropy_BL),
    )

    def once(run, batch, leaf: Tensor, entropy: Tensor) -> Callable[[], None]:
        def call():
            run(batch, leaf, entropy)
            leaf.grad = None

        return call

    return {
        "packed": once(run_packed, batch_T, leaf_T, entropy_T),
        "padded": once(run_padded, batch_BL, leaf_BL, entropy_BL),
        TRUSTING: once(run_padded_trusting_zeros, batch_BL, leaf_BL, entropy_BL),
    }


def check_agreement(median: int) -> None:
    """Compare everything that the sides return, from inputs of either precision, to 1e-6 relative."""
    tolerance = 1e-6
    for dtype in (torch.float64, torch.float32):
        batch_BL, current_BL, entropy_BL = inputs(lengths(median), dtype)
        batch_T, packed, padded_again = packed_form(batch_BL)
        leaf_BL, leaf_T = current_BL.clone().requires_grad_(), packed(current_BL).requires_grad_()
        loss_BL, correction_BL, metrics_BL = run_padded(batch_BL, leaf_BL, entropy_BL)
        loss_T, correction_T, metrics_T = run_packed(batch_T, leaf_T, packed(entropy_BL))
        assert (
            0 < metrics_BL["mismatch/rejected/ratio_geometric/sequences"] < 1
            and metrics_BL["mismatch/veto/sequences"] > 0
        )
        assert metrics_BL["policy/clip_fraction"] > 0 and metrics_BL["mismatch/truncated_fraction"] > 0
        assert torch.equal(padded_again(correction_T.keep_T), correction_BL.keep_BL)
        torch.testing.assert_close(
            padded_again(correction_T.weights_T), correction_BL.weights_BL, rtol=tolerance, atol=0
        )
        torch.testing.assert_close(padded_again(leaf_T.grad), leaf_BL.grad, rtol=tolerance, atol=0)
        assert not leaf_T.grad[~batch_T.response_mask_T].any()
        torch.testing.assert_close(loss_T.detach(), loss_BL.detach(), rtol=tolerance, atol=0)
        found = values(metrics_T)
        assert found.keys() == metrics_BL.keys(), found.keys() ^ metrics_BL.keys()
        wrong = {
            name: (found[name], x)
            for name, x in metrics_BL.items()
            if not math.isclose(found[name], x, rel_tol=tolerance)
        }
        assert not wrong, wrong


# ------------------------------------------------------------------------------------------------------------------
# measurements


def keep_freed_memory() -> None:
    """Make glibc keep the free end of its heap. By default it gives this memory back to the system, and the next run
    gets it again page by page. Only the padded side pays for that, because its tensors are larger. The cost depends
    on other load on the machine."""
    trim_threshold, mmap_threshold = -1, -3  # names of mallopt(3)
    libc = ctypes.CDLL(None)
    assert libc.mallopt(mmap_threshold, 2**25) and libc.mallopt(trim_threshold, 2**31 - 1)


def alternate(
    sides: dict[str, Callable[[], None]], *, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(CPU seconds, seconds by the wall clock) of each side, in turn. The first two rounds do not count."""
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(rounds + 2):
        for side, call in sides.items():
            began = time.process_time(), time.perf_counter()
            call()
            found[side].append((time.process_time() - began[0], time.perf_counter() - began[1]))
    cpu, wall = ({side: [row[clock] for row in rows[2:]] for side, rows in found.items()} for clock in (0, 1))
    return cpu, wall


def parts_of_packed(median: int, *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each part of the packed side, in runs of their own (the clock between the parts is not in
    ``alternate``)."""
    batch_BL, current_BL, entropy_BL = inputs(lengths(median), torch.float32)
    batch, packed, _ = packed_form(batch_BL)
    leaf_T, entropy_T = packed(current_BL).requires_grad_(), packed(entropy_BL)
    parts: dict[str, list[float]] = {}
    for _ in range(rounds):
        leaf_T.grad = None
        inner: dict[str, float] = {}
        with clocked(inner, "mismatch_metrics", "_weigh"):
            began = time.perf_counter()
            correction = correct(batch, CORRECTION)
            whole = time.perf_counter() - began
        marks = [time.perf_counter()]
        weighted = with_loss_weights(batch, correction)
        marks.append(time.perf_counter())
        loss, *_ = loss_of_packed(weighted, leaf_T, entropy_T)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        row = {
            "mismatch metrics": inner["mismatch_metrics"], "weights and their metrics": inner["_weigh"],
            "rejection, veto, checks": whole - sum(inner.values()), "aggregation": marks[1] - marks[0],
            "loss and metrics, forward": marks[2] - marks[1], "backward": marks[3] - marks[2],
        }  # fmt: skip
        for name, found in row.items():
            parts.setdefault(name, []).append(found)
    return parts


@contextmanager
def clocked(seconds: dict[str, float], *names: str) -> Iterator[None]:
    """Inside, functions of ``trainer.algorithm.correction`` add their time to ``seconds``."""
    originals = {name: getattr(packed_correction, name) for name in names}

    def timed(name: str, function):
        def call(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

        return call

    for name, function in originals.items():
        setattr(packed_correction, name, timed(name, function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(packed_correction, name, function)


def peak_memory(call: Callable[[], None]) -> dict:
    """Peaks above the start, in MiB: of torch's allocations in one run (``tensors``), and of resident memory in
    another run."""
    call()  # allocations of the first use do not count
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    before = resident_peak()
    call()
    resident = resident_peak() - before
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            call()
        profiled.export_chrome_trace(str(trace))
        events = [
            event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"
        ]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return {"tensors": max(itertools.accumulate(changes)) / 2**20, "resident": resident}


def resident_peak() -> float:
    status = Path("/proc/self/status").read_text()
    return int(next(row for row in status.splitlines() if row.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    main()
