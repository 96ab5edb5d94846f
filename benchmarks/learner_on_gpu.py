"""The learner's passes on one GPU: seconds and memory against the estimates of ``tandem plan``, and the share of the GPU's
peak that arithmetic attains.

    python benchmarks/learner_on_gpu.py --model tests/model_configs/Qwen3-0.6B --gpu h100 [--json FILE]

    attained = FLOPs of the pass (``parallel/planning/flops.py``) / (median seconds x peak FLOP/s of the data sheet)

The model needs only config.json: its weights are drawn at random. Each case has its own process, one micro-batch in an update
and in the pass before it, and sequences of equal length, of which the first eighth is prompt. Seconds are of the whole call,
with the host's part; AdamW, the last part of an update, is also timed alone.

At the end three figures of a description (``configs/hardware/``) are fitted to the passes in bfloat16 without adapters: the
shares of the peak that products with weights and attention attain, and the seconds of a pass that do not depend on FLOPs.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import RunConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, in_own_process, parser, spread, table_head, table_row, write  # noqa: E402

RECIPE = ROOT / "configs/recipes/qwen3_0_6b.yaml"
TITLES = (
    "sequences", "tokens", "dtype", "recompute", "score, s", "attained", "update, s", "attained", "estimated, s", "optimizer, s",
    "estimated, s", "peak", "planned", "peak / planned",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    sequences: int
    length: int
    dtype: str = "bfloat16"
    recompute: str = "none"
    lora: bool = False

    @property
    def tokens(self) -> int:
        """Input tokens: the last token of a sequence is not an input."""
        return self.sequences * (self.length - 1)

    @property
    def prompt(self) -> int:
        return self.length // 8


CASES = (
    Case(sequences=64, length=256),
    Case(sequences=32, length=512),
    Case(sequences=8, length=2048),
    Case(sequences=2, length=8192),
    Case(sequences=2, length=8192, recompute="full"),
    Case(sequences=8, length=2048, recompute="full"),
    Case(sequences=8, length=2048, lora=True),
    Case(sequences=4, length=2048, dtype="float32"),
)
QUICK = (
    Case(sequences=4, length=64, dtype="float32"),
    Case(sequences=2, length=128, recompute="full", dtype="float32"),
)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--model",
        type=Path,
        default=ROOT / "tests/model_configs/Qwen3-0.6B",
        help="a folder with config.json",
    )
    options.add_argument("--gpu", default="h100", help="a description of configs/hardware/")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--case", help="(internal) measure one case in this process")
    given = options.parse_args()
    if given.case:
        print(json.dumps(measure(Path(given.model), given.gpu, Case(**json.loads(given.case)), given.rounds)))
        return
    cases, rounds = (QUICK, 2) if given.quick else (CASES, given.rounds)
    about = announce(model=given.model.name, gpu=given.gpu, rounds=rounds)
    print(table_head(TITLES), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        weights = make_weights(given.model, Path(folder) / given.model.name)
        for case in cases:
            asked = json.dumps(asdict(case))
            own = ["--model", str(weights), "--gpu", given.gpu, "--rounds", str(rounds)]
            rows.append(row := in_own_process(__file__, "--case", asked, *own))
            print(table_row(cells(row)), flush=True)
    if fitted := [row for row in rows if row["dtype"] == "bfloat16" and not row["lora"]]:
        print(*(f"{name}: {value:.3g}" for name, value in fit(fitted).items()), sep="\n")
    write(about | {"rows": rows}, given.json)


def make_weights(model: Path, folder: Path) -> Path:
    """Random weights for a config.json, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model), dtype=torch.bfloat16
        ).save_pretrained(folder)
    return folder


def measure(model: Path, gpu: str, case: Case, rounds: int) -> dict:
    """The passes of a learner in this process, beside their estimates."""
    import torch

    import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
    from configs.loader import load_config
    from parallel.megatron import platform
    from trainer.batch.plan import pack_prompted
    from trainer.learner import Learner

    lora = ["learner.lora={rank: 16, alpha: 32}"] if case.lora else []
    config = load_config(
        RECIPE,
        [
            f"model.path={model}", f"model.dtype={case.dtype}", f"learner.recompute={case.recompute}",
            f"learner.token_budget={case.tokens}", "layout.dp=1", "rollout.replicas=1", "rollout.max_new_tokens=32",
            "launch.placement=colocated", *lora,
        ],
    )  # fmt: skip
    platform.init_distributed(600.0)
    engine = Learner.of_policy_alone(config).engine
    draw, shape = torch.Generator().manual_seed(0), (case.sequences, case.length)
    ids = torch.randint(0, engine.architecture.vocab_size, shape, generator=draw).tolist()
    batch = pack_prompted(ids, [case.prompt] * case.sequences, range(case.sequences))

    def timed(call: Callable[[], object]) -> list[float]:
        seconds = []
        for _ in range(rounds + 1):
            platform.synchronize()
            began = time.perf_counter()
            call()
            platform.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds[1:]  # the first makes the optimizer's state, and chooses kernels

    def loss(batch, logprobs_T, entropy_T):
        return -logprobs_T.sum() / case.tokens, None

    if platform.has_cuda():
        torch.cuda.reset_peak_memory_stats()
    update = timed(lambda: engine.update([batch], loss, temperature=1.0))
    peak = torch.cuda.max_memory_allocated() if platform.has_cuda() else 0
    measured = {
        "update": spread(update),
        "peak_bytes": peak,
        "score": spread(timed(lambda: engine.logprobs([batch], temperature=1.0))),
        "optimizer": spread(timed(lambda: engine._optimizer.step())),
    }
    return asdict(case) | measured | beside(config, case, gpu, measured)


def beside(config: "RunConfig", case: Case, gpu: str, measured: dict) -> dict:
    """A plan's estimates of the same passes, and the shares of the peak that were attained."""
    from configs.reading.hardware import read_hardware
    from parallel.megatron import platform
    from parallel.planning.architecture import architecture_of
    from parallel.planning.flops import Load, forward_flops, update_flops
    from parallel.planning.machine import Machine
    from parallel.planning.memory import learner_memory
    from parallel.planning.training_time import optimizer_seconds
    from parallel.planning.work import work_of

    architecture, layout = architecture_of(config.model.path), config.layout
    machine = Machine(hardware=read_hardware(gpu), gpus_per_node=8)
    load = Load(
        tokens=case.tokens,
        pairs=case.tokens * case.length // 2,
        predicted=case.sequences * (case.length - case.prompt),
    )
    of_score = forward_flops(architecture, layout, 0, load)
    of_update = update_flops(
        architecture, layout, 0, load, recompute=case.recompute, lora=config.learner.lora
    )
    work = replace(
        work_of(config, "cuda" if platform.has_cuda() else "cpu"), num_microbatches=1, transfers_weights=False
    )
    planned = learner_memory(architecture, layout, work, stage=0)
    optimizer = optimizer_seconds(architecture, config, machine, layout, 0, is_policy=True)
    score, computing = measured["score"]["median"], without_optimizer(measured)
    peak = 1e12 * getattr(machine.hardware.peak_tflops, case.dtype)
    host = passes(case.recompute) * machine.hardware.overheads.pass_s
    return {
        "tokens": case.tokens,
        "peak_flops": peak,
        "score_flops": asdict(of_score),
        "score_attained": of_score.total / score / peak,
        "update_flops": asdict(of_update),
        "update_attained": of_update.total / computing / peak,
        "estimated": machine.training_seconds(of_update, case.dtype) + host + optimizer,
        "optimizer_estimated": optimizer,
        "planned": planned.items(),
        "planned_bytes": planned.total,
    }


def passes(recompute: str) -> int:
    """Passes of an update: forward, backward, and layers that are computed again."""
    return 3 if recompute == "full" else 2


def without_optimizer(row: dict) -> float:
    return row["update"]["median"] - row["optimizer"]["median"]


def fit(rows: Sequence[dict]) -> dict[str, float]:
    """The figures whose estimates are nearest to the measured passes, by the squares of relative errors.

    Seconds of a pass = matrices / (matmul x peak) + attention / (attention x peak) + passes x pass_s.
    """
    import numpy as np
    from scipy.optimize import nnls

    columns = []
    for row in rows:
        for flops, seconds, count in (
            (row["score_flops"], row["score"]["median"], 1),
            (row["update_flops"], without_optimizer(row), passes(row["recompute"])),
        ):
            matrices = flops["matrices"] + flops["output"]
            parts = (matrices / row["peak_flops"], flops["attention"] / row["peak_flops"], count)
            columns.append([part / seconds for part in parts])
    (of_matrices, of_attention, pass_s), _ = nnls(np.array(columns), np.ones(len(columns)))
    return {"train_matmul": 1 / of_matrices, "train_attention": 1 / of_attention, "pass_s": pass_s}


def cells(row: dict) -> list[str]:
    ratio = row["peak_bytes"] / row["planned_bytes"]
    seconds = [row[name]["median"] for name in ("score", "update", "optimizer")]
    return [
        f"{row['sequences']} x {row['length']}", f"{row['tokens']}", row["dtype"] + (", adapters" if row["lora"] else ""),
        row["recompute"], f"{seconds[0]:.4f}", f"{row['score_attained']:.1%}", f"{seconds[1]:.4f}", f"{row['update_attained']:.1%}",
        f"{row['estimated']:.4f}", f"{seconds[2]:.4f}", f"{row['optimizer_estimated']:.4f}", f"{row['peak_bytes'] / 2**30:.2f} GiB",
        f"{row['planned_bytes'] / 2**30:.2f} GiB", f"{ratio:.3f}",
    ]  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
