"""The estimate of a step's seconds (``tandem plan --gpu``) against measured steps on this machine. Target: within 30 %.

    python benchmarks/plan_time.py --model WARM [--describe FILE.yaml] [--json FILE]

1. Calibration: ordinary ``tandem train`` runs of different shapes, with a random model that never ends a response, so all
   responses have the wanted length. Each run gives the median seconds of sampling, of the passes before the update, of the
   update, of the transfer, and of the rest.
2. Fit: an estimate is a linear function of the overheads and of the seconds of a FLOP or a byte. Its columns are estimates
   for hardware that has only one of these costs. ``scipy.optimize.nnls`` weighs each row by its own size, so relative errors
   count. The fit is repeated, because one part is not linear (the larger of reading and computing).
3. Verification: the estimates of other runs are compared with their measured times: the quickstart's step, responses of 16
   and of 512 tokens, responses of spread lengths, two servers, a pipeline of two stages.

The description of the machine goes to ``--describe``, in the form of ``configs/hardware/``.
"""

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import psutil
import yaml
from scipy.optimize import nnls

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.async_overlap import LONG_CUT, make_long_model, run  # noqa: E402
from benchmarks.common import announce, parser, spread, table_head, table_row, write  # noqa: E402
from configs.loader import load_config  # noqa: E402
from configs.schema import RunConfig  # noqa: E402
from configs.schema.hardware import HardwareConfig, Overheads  # noqa: E402
from configs.schema.layout import as_overrides, parse_layout  # noqa: E402
from parallel.planning.architecture import Architecture, architecture_of  # noqa: E402
from parallel.planning.decoding import Lengths  # noqa: E402
from parallel.planning.machine import Machine  # noqa: E402
from parallel.planning.memory import GIB  # noqa: E402
from parallel.planning.server_memory import rollout_memory  # noqa: E402
from parallel.planning.time import Estimator, StepTime  # noqa: E402

TARGET = 0.3
RECIPE = ROOT / "configs/recipes/countdown_tiny.yaml"
SKIPPED_STEPS = 3
"""Steps at the beginning that do not count: caches are cold."""
NEVER = 1e9
"""Mean length of a model that does not end its responses."""
PARTS = ("sampling", "score", "update", "transfer", "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A run. Settings are overrides of the quickstart's recipe."""

    name: str
    prompts: int
    group: int
    tokens: int
    """``rollout.max_new_tokens``."""
    layout: str = "dp=1"
    others: tuple[str, ...] = ()
    model: str = "endless"
    """``endless``: every response has ``tokens`` tokens; ``long``: they end by chance; ``warm``: the quickstart's model."""

    def settings(self, steps: int) -> list[str]:
        return [
            f"rollout.prompts_per_step={self.prompts}",
            f"rollout.group_size={self.group}",
            f"rollout.max_new_tokens={self.tokens}",
            "rollout.max_total_tokens=65536",
            "learner.optimizer.lr=1e-7",  # the lengths stay as they are
            f"steps={steps}",
            *as_overrides(parse_layout(self.layout)),
            *self.others,
        ]


CALIBRATION = (
    Shape(name="short", prompts=32, group=8, tokens=8),
    Shape(name="pairs", prompts=32, group=2, tokens=24),
    Shape(name="few", prompts=4, group=2, tokens=128),
    Shape(name="middle", prompts=8, group=8, tokens=96),
    Shape(name="long", prompts=4, group=8, tokens=320),
    Shape(name="scored", prompts=16, group=4, tokens=64, others=("learner.old_logprobs=always",)),
    Shape(name="scored, long", prompts=4, group=4, tokens=256, others=("learner.old_logprobs=always",)),
    Shape(name="small micro-batches", prompts=16, group=8, tokens=32, others=("learner.token_budget=512",)),
    Shape(name="two minibatches", prompts=16, group=8, tokens=32, others=("learner.minibatches=2",)),
    Shape(name="dp 2", prompts=16, group=8, tokens=48, layout="dp=2"),
    Shape(name="tp 2", prompts=16, group=8, tokens=48, layout="tp=2,dp=1"),
    Shape(name="tp 2, small", prompts=8, group=8, tokens=32, layout="tp=2,dp=1", others=("learner.token_budget=512",)),
)  # fmt: skip
VERIFICATION = (
    Shape(name="quickstart", prompts=32, group=8, tokens=14, layout="dp=2", model="warm"),
    Shape(name="16 tokens", prompts=16, group=8, tokens=16),
    Shape(name="512 tokens", prompts=8, group=4, tokens=512),
    Shape(name="spread, at most 512", prompts=8, group=4, tokens=LONG_CUT, model="long"),
    Shape(name="two servers", prompts=16, group=8, tokens=64, others=("rollout.replicas=2",)),
    Shape(name="pipeline of two", prompts=16, group=8, tokens=64, layout="pp=2,dp=1", others=("learner.token_budget=2048",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured run."""

    shape: Shape
    config: RunConfig
    architecture: Architecture
    lengths: Lengths
    parts: Mapping[str, Sequence[float]]
    """Seconds of each part in each step, and ``step`` of the whole."""

    def median(self, part: str) -> float:
        return statistics.median(self.parts[part])


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--model", type=Path, required=True, help="of the quickstart: runs/quickstart-*/warm"
    )
    options.add_argument("--steps", type=int, default=15)
    options.add_argument("--describe", type=Path, metavar="FILE.yaml", help="write the machine's description")
    given = options.parse_args()
    steps = 6 if given.quick else given.steps
    about = announce(recipe=RECIPE.name, steps=steps)
    machine_of = about["hardware"]
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "warm": given.model.resolve(),
            "long": make_long_model(Path(folder) / "long-model"),
            "endless": make_long_model(Path(folder) / "endless-model", NEVER),
        }
        made = {
            shape: measure(shape, models[shape.model], Path(folder), steps)
            for shape in (*CALIBRATION, *VERIFICATION)
        }
    calibration = [made[shape] for shape in CALIBRATION]
    source = f"fitted to {len(calibration)} runs of benchmarks/plan_time.py on {machine_of['cores']} cores, {machine_of['cpu']}"
    found = fit(calibration, memory_gb_s=copied_gb_s(), source=source)
    if given.describe is not None:
        given.describe.write_text(yaml.safe_dump(found.model_dump(exclude_none=True), sort_keys=False))
    rows = [
        row
        for kind, shapes in (("calibration", CALIBRATION), ("verification", VERIFICATION))
        for shape in shapes
        for row in compared(kind, made[shape], parts_of(estimated(made[shape], found)))
    ]
    print(table(rows))
    print(verdict(rows))
    result = {**about, "target": TARGET, "description": found.model_dump()}
    write(result | {"rows": rows}, given.json)


# ---------------------------------------------------------------------------------------------------------------------
# runs


def measure(shape: Shape, model: Path, folder: Path, steps: int) -> Measured:
    config = load_config(RECIPE, [f"model.path={model}", *shape.settings(steps)])
    assert isinstance(config, RunConfig)
    rows = run(model, folder / shape.name.replace(" ", "-"), shape.settings(steps), bound=False)[
        SKIPPED_STEPS:
    ]
    found = Measured(
        shape=shape,
        config=config,
        architecture=architecture_of(model),
        lengths=lengths_of(shape, prompt_tokens(config), rows),
        parts=measured_parts(rows, is_scored=config.scores_old),
    )
    print(f"  {shape.name}: step {found.median('step'):.3f} s", flush=True)
    return found


def prompt_tokens(config: RunConfig) -> int:
    """Mean tokens of the first prompts."""
    from rollout.tasks import load_task
    from rollout.tokenization import load_tokenizer

    prompts = load_task(config.task, tokenizer=load_tokenizer(config.model.path)).train
    return round(statistics.fmean(len(prompts[i].token_ids) for i in range(min(200, len(prompts)))))


def lengths_of(shape: Shape, prompt: int, rows: Sequence[Mapping[str, float]]) -> Lengths:
    """The lengths of the run's responses, in the form that an estimate takes."""
    mean = statistics.fmean(row["response/length_mean"] for row in rows)
    greatest = statistics.median(row["response/length_max"] for row in rows)
    spread = spread_of(mean, greatest, shape.prompts * shape.group)
    return Lengths(prompt=prompt, response=max(1, round(mean)), longest=shape.tokens, spread=spread)


def spread_of(mean: float, greatest: float, count: int) -> float:
    """The spread of the lognormal distribution with this mean, of which ``count`` draws have this expected maximum:
    greatest = mean exp(spread z - spread^2 / 2), z the quantile 1 - 1 / (2 count). 0 if all are alike."""
    z = NormalDist().inv_cdf(1 - 0.5 / count) if count > 1 else 0.0
    ratio = math.log(max(1.0, greatest / mean))
    # The smaller solution of spread^2 / 2 - z spread + ratio = 0. If the greatest is too far out, there is none.
    return z - math.sqrt(max(0.0, z * z - 2 * ratio))


def measured_parts(rows: Sequence[Mapping[str, float]], *, is_scored: bool) -> dict[str, list[float]]:
    """Seconds of the parts of each step. A pass before the update that the run does not make belongs to the rest."""
    parts: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
    for row in rows:
        own = {
            "sampling": row["time/sampling"],
            "score": row["time/logprobs"] if is_scored else 0.0,
            "update": row["time/update"],
            "transfer": row["time/sync"],
        }
        own["rest"] = max(0.0, row["time/step"] - sum(own.values()))
        for name, seconds in {"step": row["time/step"], **own}.items():
            parts[name].append(seconds)
    return parts


def copied_gb_s(size: int = 2**28) -> float:
    """Bytes read and written a second by a copy of a large array, the best of five, in GB/s."""
    source, place = np.ones(size // 8), np.empty(size // 8)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(place, source)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best / 1e9


# ---------------------------------------------------------------------------------------------------------------------
# fit

SHARES = ("train_matmul", "train_attention", "prefill_matmul", "prefill_attention", "links")
OVERHEADS = (
    "collective_s", "pass_s", "optimizer_s", "decode_step_s", "decode_response_s", "prompt_s", "response_s", "transfer_s", "step_s",
)  # fmt: skip
UNKNOWN = (*SHARES, *OVERHEADS)
"""What is fitted. ``decode_layer_s`` and ``token_s`` cannot be told from ``decode_step_s`` and ``decode_response_s`` here."""
ENDLESS = 1e12
"""A rate that takes no time, in TFLOP/s or GB/s."""
ROUNDS = 5


def made_of(
    values: Mapping[str, float], *, memory_gb_s: float, source: str = "made", alone: bool = False
) -> HardwareConfig:
    """Hardware with these seconds: of 10^12 FLOPs, of 10^9 bytes over a link, and of the overheads; 0 for those left out.

    The peak is the fastest of the four rates, and the shares are relative to it. A rate that takes no time is the peak, and
    such a link is as fast as memory. ``alone``: neither takes any time.
    """
    of_flops = {name: values.get(name, 0.0) for name in SHARES if name != "links"}
    rates = {name: 1 / seconds for name, seconds in of_flops.items() if seconds > 0}
    peak = max(rates.values(), default=ENDLESS) if not alone else ENDLESS
    shares = {name: rates.get(name, peak) / peak for name in of_flops}
    fastest = ENDLESS if alone else memory_gb_s
    link = 1 / values["links"] if values.get("links", 0) > 0 else fastest
    return HardwareConfig.model_validate(
        {
            "name": "this machine",
            "source": source,
            "memory_gib": psutil.virtual_memory().total / GIB,
            "peak_tflops": dict.fromkeys(("float32", "bfloat16", "float16"), peak),
            "memory_gb_s": memory_gb_s,
            "node_link_gb_s": link,
            "network_gb_s": link,
            "attained": shares | {"memory": 1.0, "links": 1.0},
            "overheads": {name: values.get(name, 0.0) for name in Overheads.model_fields},
        }
    )


def fit(runs: Sequence[Measured], *, memory_gb_s: float, source: str) -> HardwareConfig:
    """The description whose estimates are nearest to the runs' medians, in squares of relative errors."""
    rows = [(each, part) for each in runs for part in PARTS if each.median(part) > 0]
    wanted = np.array([each.median(part) for each, part in rows])
    columns = np.zeros((len(rows), len(UNKNOWN)))
    for place, name in enumerate(UNKNOWN):
        of_one = _estimates(runs, made_of({name: 1.0}, memory_gb_s=ENDLESS, alone=True))
        columns[:, place] = [of_one[each.shape.name][part] for each, part in rows]
    values, beside = np.zeros(len(UNKNOWN)), np.zeros(len(rows))
    for _ in range(ROUNDS):
        values, _residual = nnls(columns / wanted[:, None], (wanted - beside) / wanted)
        # The part of the estimate that is not linear: the larger side of a maximum, and the memory's own time.
        described = made_of(dict(zip(UNKNOWN, values, strict=True)), memory_gb_s=memory_gb_s, source=source)
        whole = _estimates(runs, described)
        beside = np.array([whole[each.shape.name][part] for each, part in rows]) - columns @ values
    return described


def _estimates(runs: Sequence[Measured], described: HardwareConfig) -> dict[str, dict[str, float]]:
    return {each.shape.name: parts_of(estimated(each, described)) for each in runs}


def estimated(made: Measured, described: HardwareConfig) -> StepTime:
    config, rollout = made.config, made.config.rollout
    machine = Machine(hardware=described, gpus_per_node=10**6)
    memory = rollout_memory(
        made.architecture,
        rollout.tp,
        dtype=rollout.dtype,
        gpu_bytes=int(described.memory_gib * GIB),
        max_tokens=rollout.max_total_tokens,
    )
    estimator = Estimator(made.architecture, config, made.lengths, machine)
    return estimator.step(config.layout, tp=rollout.tp, replicas=rollout.replicas, memory=memory)


def parts_of(step: StepTime) -> dict[str, float]:
    training = step.training
    parts = {
        "sampling": step.sampling.total,
        "score": training.score,
        "update": training.compute + training.collectives + training.bubble + training.optimizer,
        "transfer": step.transfer,
        "rest": training.rest,
    }
    return parts | {"step": step.total}


# ---------------------------------------------------------------------------------------------------------------------
# result


def compared(kind: str, made: Measured, estimate: Mapping[str, float]) -> Iterator[dict]:
    """A row for the step and for each of its parts."""
    for part in ("step", *PARTS):
        seconds = made.parts[part]
        if not statistics.median(seconds):
            continue
        yield {
            "kind": kind,
            "run": made.shape.name,
            "part": part,
            "measured": spread(seconds),
            "estimated": estimate[part],
            "ratio": estimate[part] / statistics.median(seconds),
        }


def table(rows: Sequence[Mapping]) -> str:
    """A row for each run. For the step and each part: the measured seconds, and estimated / measured."""
    lines = [table_head(["runs", "run", "step, s: median (min - max)", *PARTS])]
    by_run: dict[tuple[str, str], dict[str, Mapping]] = {}
    for row in rows:
        by_run.setdefault((row["kind"], row["run"]), {})[row["part"]] = row
    for names, parts in by_run.items():
        step = parts["step"]["measured"]
        cells = [
            f"{step['median']:.3f} ({step['min']:.3f} - {step['max']:.3f}), **{parts['step']['ratio']:.2f}**"
        ]
        for part in PARTS:
            row = parts.get(part)
            cells.append(f"{row['measured']['median']:.3f}, {row['ratio']:.2f}" if row else "")
        lines.append(table_row([*names, *cells]))
    return "\n".join(lines)


def verdict(rows: Sequence[Mapping]) -> str:
    """How many steps of runs that were not fitted are within the target, and which are not."""
    steps = [row for row in rows if row["kind"] == "verification" and row["part"] == "step"]
    off = [row for row in steps if abs(row["ratio"] - 1) > TARGET]
    named = "".join(f"; {row['run']}: {row['ratio']:.2f}" for row in off)
    return f"{len(steps) - len(off)} of {len(steps)} verified steps are within {TARGET:.0%} of the measured median{named}"


if __name__ == "__main__":
    main()
