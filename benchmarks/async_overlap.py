"""Seconds per step by ``rollout.max_staleness``: the time that sampling ahead saves if each engine has its own core.

Ordinary ``tandem train`` runs, in turn: k = 0 (synchronous), 1, 2 and 4, then the other way round, for several rounds.
Servers and sample role are bound to the first core, the learner (one rank) to the second.

- ``short``: the quickstart's step, 32 groups of 8 and responses of about 8 tokens, by the warm model (``--model``);
- ``long``: 8 groups of 4, by a random model whose responses end after each token with probability 1/64 (cut at
  512), so that their lengths are spread like an exponential distribution.

``bound``: the longer of sampling and training in the synchronous run, plus the update of the weights. Two engines
that never wait for one another take that long for a step. The target compares with the longer one alone: at most
``TARGET`` times its seconds at k = 1.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, parser, table_head, write  # noqa: E402

STALENESS = (0, 1, 2, 4)
TARGET = 1.10
SKIPPED_STEPS = 5
"""Steps at the beginning that do not count: caches are cold, and the sample role is not ahead yet. Nor do the last k
steps, in which nothing is sampled ahead any more."""
LONG_MEAN, LONG_CUT = 64, 512
DEADLINE_S = 900.0
WORKLOADS = {
    "short": ["rollout.prompts_per_step=32", "rollout.group_size=8"],
    "long": [
        "rollout.prompts_per_step=8", "rollout.group_size=4", f"rollout.max_new_tokens={LONG_CUT}",
        "rollout.max_total_tokens=65536", "learner.optimizer.lr=1e-7",
    ],
}  # fmt: skip
PARTS = ("step", "sampling", "logprobs", "update", "sync")


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument(
        "--model", type=Path, required=True, help="of the quickstart: runs/quickstart-*/warm"
    )
    options.add_argument(
        "--drain", type=float, default=60.0, help="rollout.drain_s of the short workload, k > 0"
    )
    options.add_argument("--workload", choices=WORKLOADS, help="one of the two")
    given = options.parse_args()
    rounds, steps = (1, 12) if given.quick else (given.rounds, given.steps)
    result = announce(steps=steps, rounds=rounds, drain_s=given.drain, workloads=WORKLOADS)
    with tempfile.TemporaryDirectory() as folder:
        models = {"short": given.model.resolve(), "long": make_long_model(Path(folder) / "long")}
        for name in [given.workload] if given.workload else WORKLOADS:
            result[name] = measure(name, models[name], Path(folder), rounds, steps, given.drain)
            report(name, result[name])
    write(result, given.json)


def make_long_model(folder: Path, mean: float = LONG_MEAN) -> Path:
    """A random model with the same probability of the end after every token: 1 / mean."""
    import math

    import torch
    from safetensors.torch import load_file, save_file

    from rollout.tiny_model import make_tiny_countdown_model
    from rollout.tokenization import end_token_ids, load_tokenizer

    make_tiny_countdown_model(folder, seed=0)
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    # A value that all tokens share dominates the last norm, so hidden states have about sqrt(width) there: the
    # logit of the end is lower by that times what its row lacks.
    rows[:, 0] = 1.0
    gap = math.log(mean / len(rows)) / math.sqrt(rows.shape[1])
    for end in end_token_ids(load_tokenizer(folder), folder):
        rows[end, 0] = torch.tensor(1.0 - gap)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


def measure(name: str, model: Path, folder: Path, rounds: int, steps: int, drain_s: float) -> dict:
    seconds: dict[int, dict[str, list[float]]] = {k: {} for k in STALENESS}
    for round_ in range(rounds):
        # The order alternates, so a drift of the machine affects all of them.
        for k in STALENESS[:: 1 if round_ % 2 == 0 else -1]:
            settings = [*WORKLOADS[name], f"rollout.max_staleness={k}", f"steps={steps}"]
            settings += [f"rollout.drain_s={drain_s}"] if k and name == "short" else []
            rows = run(model, folder / f"{name}-{round_}-{k}", settings)[SKIPPED_STEPS : steps - k]
            for metric in (*(f"time/{part}" for part in PARTS), "response/length_mean", "staleness/mean",
                           "staleness/mixed_fraction", "sampling/idle_s"):  # fmt: skip
                values = [row[metric] for row in rows if metric in row]
                seconds[k].setdefault(metric, []).extend(values)
            print(
                f"  {name}, round {round_ + 1}, k={k}: step {statistics.median(seconds[k]['time/step']):.3f} s",
                flush=True,
            )
    return {str(k): {metric: _spread(values) for metric, values in by.items()} for k, by in seconds.items()}


def _spread(values: list[float]) -> dict | None:
    if not values:
        return None
    quartiles = statistics.quantiles(values, n=4)
    return {
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "low": quartiles[0],
        "high": quartiles[2],
        "count": len(values),
    }


def run(model: Path, folder: Path, settings: list[str], *, bound: bool = True) -> list[dict]:
    """The rows of one run's steps. bound: a learner of one rank has its own core."""
    folder.mkdir()
    fixed = [
        f"model.path={model}",
        *(["layout.dp=1"] if bound else []),
        "evaluation.every=0",
        "evaluation.at_ends=false",
        "checkpoint.every=0",
    ]
    recipe = str(ROOT / "configs/recipes/countdown_tiny.yaml")
    command = [sys.executable, "-m", "launch", "train", recipe, *fixed, *settings]
    log = (folder / "log.txt").open("w")
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    deadline = time.monotonic() + DEADLINE_S
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{folder.name}: no end after {DEADLINE_S:g} s; see {folder}/log.txt")
            if bound:
                bind_to_cores(process.pid)
            time.sleep(0.5)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    if process.returncode:
        raise RuntimeError((folder / "log.txt").read_text()[-2000:])
    lines = (folder / "runs/latest/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def bind_to_cores(pid: int) -> None:
    """The learner's processes to the last core, all others of the run to the first."""
    cores = sorted(os.sched_getaffinity(0))
    for process in psutil.Process(pid).children(recursive=True):
        try:
            is_learner = "learn" in process.cmdline()
            process.cpu_affinity([cores[-1] if is_learner else cores[0]])
        except psutil.Error:
            continue


def report(name: str, by_k: dict) -> None:
    of = {k: {metric: spread and spread["median"] for metric, spread in by.items()} for k, by in by_k.items()}
    base = of["0"]
    training = base["time/logprobs"] + base["time/update"]
    longer = max(base["time/sampling"], training)
    bound = longer + base["time/sync"]
    print(f"\n{name}: responses of {base['response/length_mean']:.1f} tokens; synchronous: sampling {base['time/sampling']:.3f} s, "
          f"training {training:.3f} s, update of the weights {base['time/sync']:.3f} s; bound {bound:.3f} s")  # fmt: skip
    titles = ["k", "step, median (quartiles)", "mean", "of synchronous", "of the longer", "of the bound"]
    print(table_head([*titles, "waits: learner, servers", "lag, mean", "mixed"]))
    for k, by in by_k.items():
        step, median = by["time/step"], of[k]
        print(
            f"| {k} | {step['median']:.3f} ({step['low']:.3f} - {step['high']:.3f}) | {step['mean']:.3f} | "
            f"{step['mean'] / by_k['0']['time/step']['mean']:.2f} | {step['mean'] / longer:.2f} | {step['mean'] / bound:.2f} | "
            f"{median['time/sampling']:.3f}, {median['sampling/idle_s']:.3f} | "
            f"{median['staleness/mean'] or 0:.2f} | {median['staleness/mixed_fraction'] or 0:.2f} |"
        )
    print(
        f"k = 1, of the longer: {by_k['1']['time/step']['mean'] / longer:.2f}   target: at most {TARGET:.2f}"
    )


if __name__ == "__main__":
    main()
