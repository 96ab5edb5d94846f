"""One process on a GPU takes the step of one process on the CPU: every kind of model, the whole learner, checkpoints.

Skipped where there is no GPU. On the pretended one, by hand:

    TANDEM_PRETENDED_GPU=DEVICE.so python -m pytest tests/parallel/test_gpu_parity.py     (tests/support/pretend_gpu builds it)
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema.layout import LayoutConfig
from tests.parallel.test_layout_parity import (
    ALIGNED,
    BAD_LOSS,
    CHECKPOINT,
    FEW_TOKENS,
    LEARNER,
    RECOMPUTED,
    REPLAYED,
    TIED,
    UNTIED,
    Runs,
)
from tests.support import pretend_gpu
from tests.support.layout_workers import work_layout
from tests.support.moe_workers import make_moe_model
from tests.support.recurrent_models import make_recurrent_model
from tests.support.whole_runs import ROOT

HAS_GPU = torch.cuda.is_available() or pretend_gpu.VARIABLE in os.environ
pytestmark = [pytest.mark.engines, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
TOLERANCE = 2e-5
"""Relative to the greatest magnitude of a tensor. An H200 was within 4e-6 of gradients and 9e-6 of stepped weights."""
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", pretend_gpu.VARIABLE: ""}


def main(folder: Path) -> None:
    """What all jobs give on this process's device, into ``found.pt``."""
    torch.set_num_threads(1)
    if os.environ.get(pretend_gpu.VARIABLE):
        pretend_gpu.use()
    torch.save(on_cpu(work_layout(LayoutConfig(), jobs_in(folder))), folder / "found.pt")


def found_in(folder: Path, **environment: str) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "tests.parallel.test_gpu_parity", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=600)
    return torch.load(folder / "found.pt", weights_only=False)


def on_cpu(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: on_cpu(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [on_cpu(value) for value in found]
    return found.detach().cpu() if isinstance(found, Tensor) else found


def jobs_in(root: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    runs = Runs(root)
    jobs = {name: ("step", job) for name, job in runs.jobs.items() if name != ALIGNED}  # of the CPU's kernels
    jobs[RECOMPUTED] = ("step", runs.jobs[UNTIED] | {"recompute": "full"})
    jobs[f"{REPLAYED}, kept"] = ("step", runs.jobs[REPLAYED] | {"recompute": "none"})
    latent = make_moe_model(root / "latent", "deepseek_v3", num_hidden_layers=3)
    sinks = make_moe_model(root / "sinks", "gpt_oss", num_hidden_layers=4)
    delta_nets = make_recurrent_model(root / "delta nets", "qwen3_next")
    others = {"latent attention": latent, "sinks": sinks, "gated delta nets": delta_nets}
    for name, folder in others.items():
        jobs[name] = ("step", {"kind": "policy", "folder": folder, "recompute": "full"})
    jobs["gated delta nets, kept"] = ("step", {"kind": "policy", "folder": delta_nets})
    jobs[LEARNER] = ("learner", runs.learner)
    jobs[FEW_TOKENS] = ("step_of_lengths", runs.few_tokens)
    jobs[BAD_LOSS] = ("bad_loss", runs.jobs[UNTIED])
    saved = runs.jobs[TIED] | {"checkpoint": root / CHECKPOINT / "step_000001"}
    return jobs | {"saved": ("save", saved), "loaded": ("load", saved)}


def leaves(found: Any, name: str = "") -> dict[str, Any]:
    """Numbers and tensors by their place in nested results."""
    if isinstance(found, dict):
        return {k: v for key, value in found.items() for k, v in leaves(value, f"{name}/{key}").items()}
    if isinstance(found, list):
        return {k: v for i, value in enumerate(found) for k, v in leaves(value, f"{name}/{i}").items()}
    return {name: found}


def test_a_gpu_takes_the_cpus_step(tmp_path):
    there, here = found_in(tmp_path / "gpu"), found_in(tmp_path / "cpu", **WITHOUT_GPU)
    assert there.keys() == here.keys()
    wrong = []
    for job in here:
        mine, wanted = leaves(there[job]), leaves(here[job])
        assert mine.keys() == wanted.keys(), job
        for place, value in wanted.items():
            if not isinstance(value, Tensor | float) or (
                isinstance(value, Tensor) and not value.is_floating_point()
            ):
                same = torch.equal(mine[place], value) if isinstance(value, Tensor) else mine[place] == value
                wrong += [] if same else [(job, place, mine[place], value)]
                continue
            one, other = torch.as_tensor(mine[place]).double(), torch.as_tensor(value).double()
            if one.numel():
                apart = ((one - other).abs().max() / other.abs().max().clamp(min=1e-6)).item()
                wrong += [] if apart <= TOLERANCE else [(job, place, apart)]
    assert not wrong, wrong[:10]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
