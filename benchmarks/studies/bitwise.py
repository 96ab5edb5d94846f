"""Bitwise agreement of SGLang and Megatron on CPU: real runs with ``numerics=default`` and ``aligned``, token by token,
and the gap from each operation if the learner leaves it to torch.

The model is a tiny random Qwen3 (sharp, see ``layout_mismatch``), rewarded for length, so responses have many lengths
and every step updates the weights. A run's own samples are compared: each response token's log-prob by the server
against the learner's before its update. Then an aligned learner of one process scores the first step of an aligned run
again, with one operation at a time left to torch.

A layout is TP of the learner / TP of the servers.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks.common import announce, parser, write  # noqa: E402
from benchmarks.layout_mismatch import make_sharp_model  # noqa: E402

LAYOUTS = ("1/1", "2/2", "1/2", "2/1")
DTYPES = ("float32", "bfloat16")
MODES = ("aligned", "default")
SETTINGS = (
    "model.path=../model", "layout.dp=1", "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.max_new_tokens=128",
    "rollout.temperature=0.9", "reward.type=function", "reward.function=length_reward:score", "evaluation.every=0",
    "evaluation.at_ends=false", "checkpoint.every=0", "record_batches=all", "learner.optimizer.lr=1e-4",
    "learner.old_logprobs=always",
)  # fmt: skip
REWARD = "def score(prompt, response, reference):\n    return len(response) / 128\n"


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=50, help="of an aligned run; the others have a fifth")
    for name, known in (("layouts", LAYOUTS), ("dtypes", DTYPES), ("modes", MODES)):
        options.add_argument(f"--{name}", nargs="+", choices=known, default=list(known))
    given = options.parse_args()
    steps = 5 if given.quick else given.steps
    about = announce(steps=steps, layouts=given.layouts, dtypes=given.dtypes, modes=given.modes)
    result: dict = {**about, "runs": [], "operations": []}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_sharp_model(model)
        for layout, dtype, mode in product(given.layouts, given.dtypes, given.modes):
            count = steps if mode == "aligned" else max(1, steps // 5)
            of = {"layout": layout, "dtype": dtype}
            folder = Path(scratch) / f"{layout.replace('/', '-')}-{dtype}-{mode}"
            run = train(folder, layout, dtype, mode, count)
            report(result["runs"], of | {"numerics": mode} | compared(run))
            if mode == "aligned":
                pieces = max(map(int, layout.split("/")))
                for row in without_each(run, model, dtype, pieces):
                    report(result["operations"], of | row)
    write(result, given.json)


def report(rows: list[dict], row: dict) -> None:
    rows.append(row)
    print(json.dumps(row), flush=True)


def train(folder: Path, layout: str, dtype: str, mode: str, steps: int) -> Path:
    learner_tp, rollout_tp = layout.split("/")
    folder.mkdir()
    (folder / "length_reward.py").write_text(REWARD)
    settings = (
        f"steps={steps}",
        f"model.numerics={mode}",
        f"model.dtype={dtype}",
        f"rollout.dtype={dtype}",
        f"layout.tp={learner_tp}",
        f"rollout.tp={rollout_tp}",
    )
    recipe = ROOT / "configs/recipes/countdown_tiny.yaml"
    command = [sys.executable, "-m", "launch", "train", str(recipe), *SETTINGS, *settings]
    subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    return folder / "runs" / "latest"


def environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT)}


def compared(run: Path) -> dict:
    """Over all response tokens of all steps; seconds per 1000 response tokens are medians over the steps."""
    from trainer.batch.files import batch_file, recorded_steps
    from trainer.recording import read_batch

    folder = run / "batches"
    gaps, lengths = [], set()
    for step in recorded_steps(folder):
        batch = read_batch(batch_file(folder, step)).packed
        mask = batch.response_mask_T
        gaps.append((batch.old_logprobs_T - batch.rollout_logprobs_T)[mask].abs())
        lengths |= {
            int(mask[a:b].sum()) for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)
        }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    return (
        {"steps": len(gaps), "lengths": [min(lengths), max(lengths)]}
        | counted(torch.cat(gaps))
        | {
            f"{part}_s_per_1000_tokens": statistics.median(
                1000 * row[f"time/{part}"] / row["response/tokens"] for row in rows
            )
            for part in ("sampling", "logprobs", "update")
        }
    )


def counted(gaps: torch.Tensor) -> dict:
    return {
        "tokens": gaps.numel(),
        "differ": int((gaps != 0).sum()),
        "max_nats": gaps.max().item(),
        "mean_nats": gaps.double().mean().item(),
    }


def plain_rms_norm(x, weight, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def plain_attention(query_BRD, key_BSD, value_BSD, sees_BRS, scale):
    return F.scaled_dot_product_attention(query_BRD, key_BSD, value_BSD, attn_mask=sees_BRS, scale=scale)


def plain_linear(x, weight, bias=None, *, pieces=1):
    return F.linear(x, weight, bias)


def plain_linear_by_row(x, weight, bias=None, *, pieces=1):
    """Like a server that decodes one sequence."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.cat([F.linear(row[None], weight, bias) for row in rows])
    return out.view(*x.shape[:-1], -1)


def in_one_piece(linear, x, weight, bias=None, *, pieces=1):
    """The product that one rank computes by itself, beside ranks that share its inputs."""
    return linear(x, weight, bias)


def plain_head(hidden_CH, weight_VH, *, vocab_size, group):
    return hidden_CH @ weight_VH[:vocab_size].t()


def without_each(run: Path, model: Path, dtype: str, pieces: int):
    """Rows for the first step's tokens, which the model's weights sampled, with torch's own operations."""
    from configs.schema.layout import ONE_PROCESS
    from configs.schema.model import ModelConfig
    from numerics import aligned
    from parallel.engine import MegatronEngine
    from parallel.megatron import aligned as modules
    from parallel.megatron import platform
    from trainer.batch.files import batch_file
    from trainer.recording import read_batch

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        platform.init_distributed(60.0)
    engine = MegatronEngine(
        ModelConfig(path=model, dtype=dtype, numerics="aligned"), ONE_PROCESS, None,
        logprob_chunk_tokens=1024, seed=0, pieces=pieces,
    )  # fmt: skip
    batch = read_batch(batch_file(run / "batches", 1)).packed
    mask = batch.response_mask_T
    cases = {
        "none": (),
        "linear layers and head": ((aligned, "linear", plain_linear),),
        "linear layers and head, one row at a time": ((aligned, "linear", plain_linear_by_row),),
        "head": ((modules, "whole_logits", plain_head),),
        "attention": ((aligned, "attention", plain_attention),),
        "RMSNorm": ((aligned, "rms_norm", plain_rms_norm),),
        "SiLU": ((aligned, "silu", F.silu),),
    }
    by_row = "linear layers and head, one row at a time"
    cases["all of these"] = tuple(
        change for name, changes in cases.items() for change in changes if name != by_row
    )
    if pieces > 1:
        cases["sums over inputs in one piece"] = ((aligned, "linear", partial(in_one_piece, aligned.linear)),)
    settings = engine.chunks[0].whole_logits.keywords
    for name, changes in cases.items():
        patches = [patch.object(module, attribute, value) for module, attribute, value in changes]
        for one in patches:
            one.start()
        engine.chunks[0].whole_logits = partial(modules.whole_logits, **settings)
        (logprobs_T,) = engine.logprobs([batch], temperature=0.9)
        for one in patches:
            one.stop()
        yield {"left to torch": name} | counted((logprobs_T - batch.rollout_logprobs_T)[mask].abs())


if __name__ == "__main__":
    main()
