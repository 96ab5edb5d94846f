"""Bias and variance of the policy gradient under every correction preset, against growing mismatch and
length: which preset to pick.

A softmax policy over 3 tokens, one row of logits per prefix, so that every sequence is known; the rollout's
logits are the learner's plus normal noise. The estimate is the gradient of one batch of N sequences that the
rollout sampled, at the first update (old = current), by the trainer's own functions:

    bias    |E[estimate] - g| / |g|                 g = d E_learner[reward], the on-policy gradient
    noise   sqrt(trace of the estimate's covariance) / |g|
    error   sqrt(bias^2 + noise^2), the root mean square distance of an estimate from g in units of |g|

Nothing is Monte Carlo: expectations are sums over all sequences, and how many samples a rule accepts is
summed over its binomial law. Figures are root mean squares over a few random worlds (policy, noise, reward).

Legend: S sequences, T packed tokens, F prefixes, V vocabulary.
"""

import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, parser, table_head, table_row, write  # noqa: E402
from configs.presets import PRESETS  # noqa: E402
from configs.schema.correction import CorrectionConfig, ImportanceWeight  # noqa: E402
from tests.reference.enumerated_policy import (  # noqa: E402
    Enumeration,
    corrected_loss,
    enumerate_responses,
    moments_of_kept_mean,
    moments_of_mean,
)
from trainer.algorithm.segments import count_per_sequence  # noqa: E402

CONFIG = {
    "vocab": 3,
    "lengths": [2, 4, 6, 8],
    "noise_scales": [0.0005, 0.002, 0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.6],
    "noise_scale_for_lengths": 0.4,
    "batch": 1024,
    "worlds": 6,
    "reward": "1 where a normal score per place and token, summed over the response, is above the median of all responses, else 0",
    "advantage": "reward - E_rollout[reward]",
    "aggregation": "sequence_mean_token_sum",
    "objective": "clipped with its defaults; policy_gradient where the preset asks for it",
}
UNBOUNDED = "no preset: unbounded sequence weight"
CONFIGS = {**PRESETS, UNBOUNDED: CorrectionConfig(weight=ImportanceWeight(level="sequence", bound="none"))}
FIGURE = ROOT / "benchmarks/results/estimator_bias_variance.png"


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--figure",
        type=Path,
        help="where the PNG goes (default: benchmarks/results, with --quick the temporary folder)",
    )
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.quick:
        CONFIG.update(worlds=1, lengths=[2, 4])
    about = announce(config=CONFIG)
    began, began_cpu = time.perf_counter(), time.process_time()
    longest, scale = CONFIG["lengths"][-1], CONFIG["noise_scale_for_lengths"]
    tables = {
        f"Mismatch, length {longest}": [measure(longest, s) for s in CONFIG["noise_scales"]],
        f"Length, noise scale {scale}": [measure(length, scale) for length in CONFIG["lengths"]],
    }
    names = merge_equal([column for columns in tables.values() for column in columns])
    for title, columns in tables.items():
        print(f"\n### {title}\n\n{markdown(names, columns)}")
    draw(
        names, tables, given.figure or (Path(tempfile.gettempdir()) / FIGURE.name if given.quick else FIGURE)
    )
    seconds = {
        "wall": round(time.perf_counter() - began, 1),
        "cpu": round(time.process_time() - began_cpu, 1),
    }
    least = {title: [least_error(c) for c in columns] for title, columns in tables.items()}
    print("\n" + json.dumps({"seconds": seconds, "least_error": least}))
    write({**about, "seconds": seconds, "tables": tables, "least_error": least}, given.json)


def measure(length: int, scale: float) -> dict:
    """All presets at one length and mismatch."""
    worlds = [make_world(length, scale, seed) for seed in range(CONFIG["worlds"])]
    presets = {}
    for name, config in CONFIGS.items():
        each = [estimate(world, config) for world in worlds]
        bias, noise = (math.sqrt(statistics.fmean(e[key] ** 2 for e in each)) for key in ("bias", "noise"))
        accepted = statistics.fmean(e["accepted"] for e in each)
        presets[name] = {"bias": bias, "noise": noise, "error": math.hypot(bias, noise), "accepted": accepted}
    return {
        "length": length,
        "scale": scale,
        "kl_per_token": statistics.fmean(w.kl for w in worlds),
        "presets": presets,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    space: Enumeration
    learner_FV: Tensor
    rollout_FV: Tensor
    advantages_S: Tensor
    kl: float
    """KL(rollout || learner) in nats, per token."""


def make_world(length: int, scale: float, seed: int) -> World:
    space = enumerate_responses(CONFIG["vocab"], length)
    generator = torch.Generator().manual_seed(seed)
    learner_FV = space.random_table(generator)
    rollout_FV = learner_FV + scale * space.random_table(generator)
    scores = torch.randn(length, CONFIG["vocab"], generator=generator, dtype=torch.float64)
    scores_S = scores[torch.arange(length), torch.tensor(space.responses)].sum(-1)
    rewards_S = (scores_S > scores_S.median()).to(torch.float64)
    mu_S, pi_S = space.probs_S(rollout_FV), space.probs_S(learner_FV)
    kl = (mu_S @ (mu_S / pi_S).log()).item() / length
    return World(
        space=space,
        learner_FV=learner_FV,
        rollout_FV=rollout_FV,
        advantages_S=rewards_S - mu_S @ rewards_S,
        kl=kl,
    )


def estimate(world: World, config: CorrectionConfig) -> dict[str, float]:
    """Bias and noise of one preset in one world, and the probability that a sequence is (in part) accepted."""
    space, pi_FV = world.space, world.learner_FV
    learner_T, rollout_T = space.logprobs_T(pi_FV), space.logprobs_T(world.rollout_FV)
    current_T = learner_T.clone().requires_grad_()
    ones_S = torch.ones_like(world.advantages_S)
    loss, correction = corrected_loss(
        space,
        config,
        current_T=current_T,
        old_T=learner_T,
        rollout_T=rollout_T,
        advantages_S=world.advantages_S,
        weights_S=ones_S,
    )
    slopes_T = -torch.autograd.grad(loss, current_T)[0]
    mu_S = space.probs_S(world.rollout_FV)
    gradient_FV = space.gradient_FV(space.to_tokens(mu_S) * slopes_T, pi_FV)
    square = (mu_S @ space.squared_norms_S(slopes_T, pi_FV)).item()
    accepted = mu_S[count_per_sequence(correction.keep_T, space.batch.cu_seqlens) > 0].sum().item()
    if config.denominator == "kept":
        mean_FV, variance = moments_of_kept_mean(gradient_FV, square, accepted, CONFIG["batch"])
    else:
        mean_FV, variance = moments_of_mean(gradient_FV, square, CONFIG["batch"])
    true_FV = space.gradient_FV(space.to_tokens(space.probs_S(pi_FV) * world.advantages_S), pi_FV)
    return {
        "bias": ((mean_FV - true_FV).norm() / true_FV.norm()).item(),
        "noise": math.sqrt(max(variance, 0.0)) / true_FV.norm().item(),
        "accepted": accepted,
    }


def merge_equal(columns: list[dict]) -> dict[str, str]:
    """The rows, sorted by the geometric mean of their error: first name -> all names of the presets that are the same
    estimator in every column."""
    rows: dict[tuple, list[str]] = {}
    for name in PRESETS:
        key = tuple(f"{column['presets'][name][m]:.8f}" for column in columns for m in ("bias", "noise"))
        rows.setdefault(key, []).append(name)
    rows[()] = [UNBOUNDED]
    error = {
        names[0]: statistics.fmean(math.log(c["presets"][names[0]]["error"]) for c in columns)
        for names in rows.values()
    }
    return {
        names[0]: ", ".join(names)
        for names in sorted(rows.values(), key=lambda names: (names[0] == UNBOUNDED, error[names[0]]))
    }


def least_error(column: dict) -> str:
    return min(PRESETS, key=lambda name: column["presets"][name]["error"])


def heading(column: dict) -> str:
    return f"{column['length']} tokens, KL {column['kl_per_token']:.0e}"


def markdown(names: dict[str, str], columns: list[dict]) -> str:
    """bias / noise (accepted %) of every row."""
    lines = [table_head(["preset", *map(heading, columns)])]
    for first, label in names.items():
        cells = []
        for column in columns:
            found = column["presets"][first]
            cells.append(f"{number(found['bias'])} / {number(found['noise'])}{share(found['accepted'])}")
        lines.append(table_row([label, *cells]))
    return "\n".join(lines)


def number(value: float) -> str:
    if value < 5e-7:
        return "0"
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.2g}" if value >= 0.001 else f"{value:.0e}"


def share(accepted: float) -> str:
    if accepted > 0.995:
        return ""
    return f" ({accepted:.0%})" if accepted >= 0.005 else " (< 0.5%)"


def draw(names: dict[str, str], tables: dict[str, list[dict]], file: Path) -> None:
    """Heat maps: presets down, mismatch (above) and length (below) across, one for each of bias, noise and
    error."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    norm = LogNorm(1e-3, 3.0, clip=True)
    widths = {"width_ratios": [1, 1, 1], "wspace": 0.04, "hspace": 0.24}
    figure, axes = plt.subplots(len(tables), 3, figsize=(21, 14), gridspec_kw=widths)
    for row, (title, columns) in zip(axes, tables.items(), strict=True):
        for axis, measured in zip(row, ("bias", "noise", "error"), strict=True):
            values = [[column["presets"][first][measured] for column in columns] for first in names]
            axis.imshow(
                [[max(v, 1e-3) for v in line] for line in values], norm=norm, cmap="YlOrRd", aspect="auto"
            )
            for y, line in enumerate(values):
                for x, value in enumerate(line):
                    axis.text(
                        x,
                        y,
                        number(value),
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="white" if value > 0.35 else "black",
                    )
            if measured == "error":
                for x, column in enumerate(columns):
                    limit = 1.1 * column["presets"][least_error(column)]["error"]
                    for y, first in enumerate(names):
                        if first in PRESETS and column["presets"][first]["error"] <= limit:
                            axis.add_patch(
                                plt.Rectangle(
                                    (x - 0.46, y - 0.44),
                                    0.92,
                                    0.88,
                                    fill=False,
                                    edgecolor="#0050b0",
                                    linewidth=2,
                                )
                            )
            per_response = [number(c["kl_per_token"] * c["length"]) for c in columns]
            if len({c["length"] for c in columns}) > 1:
                across, what = [c["length"] for c in columns], "tokens per response"
            else:
                across, what = (
                    [f"{c['kl_per_token']:.0e}" for c in columns],
                    "KL(rollout || learner) per token",
                )
            axis.set_xticks(
                range(len(columns)), [f"{a}\n{kl}" for a, kl in zip(across, per_response, strict=True)]
            )
            axis.set_xlabel(f"{what};  below it: KL per response, nats")
            axis.set_yticks(range(len(names)), list(names.values()) if measured == "bias" else [])
            axis.tick_params(length=0)
            axis.set_title(f"{title}: {measured}", loc="left", fontsize=12)
    figure.suptitle(
        f"The policy gradient of {CONFIG['batch']} sampled sequences, relative to the on-policy gradient.  error² = bias² + noise²;  "
        "blue: within 10 % of the preset with the least error.  Bias 1 and noise 0: everything is rejected",
        x=0.45, y=0.92, fontsize=13,
    )  # fmt: skip
    figure.savefig(file, dpi=80, bbox_inches="tight")


if __name__ == "__main__":
    main()
