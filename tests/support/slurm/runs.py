"""What tests on clusters ask of a run: how far it is, and that it is whole although it was interrupted."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from configs.loader import load_config
from rollout.sampling.order import epoch_order
from rollout.tasks import load_task
from rollout.tokenization import load_tokenizer
from tests.support.slurm.cluster import ROOT, Cluster
from trainer.batch.files import batch_file
from trainer.recording import read_batch

RECIPE = str(ROOT / "configs/recipes/countdown_tiny.yaml")
PROMPTS, SIBLINGS = 8, 4
SETTINGS = (
    "model.path=model", "launch.nodes={learner: 1, rollout: 1, gpus_per_node: 0}", f"rollout.prompts_per_step={PROMPTS}",
    f"rollout.group_size={SIBLINGS}", "evaluation={every: 0, at_ends: false}", "record_batches=all",
)  # fmt: skip
"""Of the quickstart's recipe; checkpoints every 50 steps, so that those of an interruption are the only ones
in a short run."""
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


def steps_of(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may still be being written
    return [json.loads(line)["step"] for line in lines]


def checkpoints_of(run: Path) -> list[int]:
    return sorted(
        int(file.parent.name.removeprefix("step_")) for file in run.glob("checkpoints/step_*/complete.json")
    )


def submit(cluster: Cluster, cwd: Path, *overrides: str) -> tuple[str, Path]:
    """The number of the job and the folder of the run."""
    said = cluster.tandem("slurm", RECIPE, *SETTINGS, *overrides, "--submit", cwd=cwd)
    run = (cwd / "runs" / "latest").resolve()
    assert str(run) in said, said
    cluster.logs += [run / "roles", run / "logs"]
    return re.search(r"^job: +(\d+)$", said, re.MULTILINE)[1], run


def wait_for_steps(cluster: Cluster, job: str, run: Path, count: int) -> None:
    def reached() -> bool:
        if cluster.job(job)["JobState"] in OVER and not steps_of(run)[count - 1 :]:
            pytest.fail(
                f"the job ended after {len(steps_of(run))} steps: {cluster.job(job)}{cluster.ends_of_logs()}"
            )
        return len(steps_of(run)) >= count

    cluster.wait_for(reached, f"{count} steps of {run}")


def assert_whole(run: Path, steps: int, cwd: Path) -> None:
    """Every step was done once, on the prompts that were its turn and by the weights of the step before it;
    and the end is written."""
    assert steps_of(run) == list(range(1, steps + 1))
    done = [
        int(number)
        for number in re.findall(rf"^ *(\d+)/{steps} ", (run / "console.log").read_text(), re.MULTILINE)
    ]
    assert done == list(range(1, steps + 1)), "a step was done twice, or not at all"
    config = load_config(run / "config.yaml", [])
    tokenizer = load_tokenizer(cwd / config.model.path)
    train = load_task(config.task, tokenizer=tokenizer).train
    order = epoch_order(len(train), seed=config.seed, epoch=0)
    for step in range(1, steps + 1):
        batch = read_batch(batch_file(run / "batches", step))
        assert batch.version == step - 1
        first = (step - 1) * PROMPTS
        expected = [
            train[order[place]].token_ids for place in range(first, first + PROMPTS) for _ in range(SIBLINGS)
        ]
        assert prompts_of(batch.packed) == expected, (
            f"step {step} was not on prompts {first} to {first + PROMPTS - 1}"
        )
    assert json.loads((run / "summary.json").read_text())["steps"] == steps
    assert (run / "hf" / "model.safetensors").stat().st_size > 0 and (run / "report.html").exists()


def prompts_of(packed) -> list[list[int]]:
    """Of every sequence, the tokens before the first of the response, which the mask marks at the place that
    predicts it."""
    found = []
    for start, end in pairwise(packed.cu_seqlens.tolist()):
        last = int(torch.nonzero(packed.response_mask_T[start:end])[0])
        found.append(packed.tokens_T[start : start + last + 1].tolist())
    return found
