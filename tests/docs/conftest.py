"""The folder in which the documents' commands run: recipes, a tiny model, a recorded run, ``tandem`` on PATH."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.loader import load_config, resolved_yaml
from configs.presets import PRESETS
from parallel.packing import PackedBatch
from rollout.tiny_model import make_tiny_countdown_model
from tests.docs.pages import DOCS, ROOT
from trainer.recording import RecordedBatch, batch_file, write_batch

RECORDED_STEP = 10
LENGTHS = (5, 9, 4, 7, 6, 8, 5, 9)


def recorded_batch() -> RecordedBatch:
    """Eight responses in two groups; the learner's log-probs differ from the servers' by a few percent."""
    draw = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    positions_T = torch.cat([torch.arange(length) for length in LENGTHS])
    mask_T = positions_T >= 2
    rollout_T = -torch.rand(total, generator=draw) - 0.1
    packed = PackedBatch(
        tokens_T=torch.randint(3, 20, (total,), generator=draw),
        targets_T=torch.randint(3, 20, (total,), generator=draw),
        positions_T=positions_T,
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32),
        response_mask_T=mask_T,
        rollout_logprobs_T=rollout_T,
        old_logprobs_T=rollout_T - 0.05 * torch.rand(total, generator=draw),
        advantages_T=torch.randn(total, generator=draw) * mask_T,
        sequence_ids_S=torch.arange(len(LENGTHS)),
    )
    return RecordedBatch(
        step=RECORDED_STEP,
        version=RECORDED_STEP - 1,
        packed=packed,
        rewards_S=torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0]),
        group_ids_S=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        correction=PRESETS["decoupled_token_is"],
    )


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """Made once; every block of commands gets a copy."""
    folder = tmp_path_factory.mktemp("prepared")
    make_tiny_countdown_model(folder / "models" / "tiny", seed=0)
    shutil.copytree(folder / "models" / "tiny", folder / "models" / "countdown-tiny-warm")
    run = folder / "runs" / "countdown-tiny-1"
    run.mkdir(parents=True)
    config = load_config(ROOT / "configs" / "recipes" / "countdown_tiny.yaml", ["learner.token_budget=64"])
    (run / "config.yaml").write_text(resolved_yaml(config))
    (run / "metrics.jsonl").write_text("")
    write_batch(batch_file(run / "batches", RECORDED_STEP), recorded_batch())
    (folder / "runs" / "latest").symlink_to(run.name)
    return folder


@pytest.fixture
def workspace(prepared, tmp_path) -> Path:
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder, symlinks=True)
    shutil.copytree(DOCS / "examples", folder / "docs" / "examples")
    (folder / "configs").symlink_to(ROOT / "configs")
    programs = folder / ".programs"
    programs.mkdir()
    for name, command in (("tandem", "-m launch"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (programs / name).chmod(0o755)
    return folder


@pytest.fixture
def shell(workspace) -> Callable[..., subprocess.CompletedProcess]:
    """Runs commands in the workspace, as a reader would type them."""

    def run(commands: str, *, exit_code: int = 0) -> subprocess.CompletedProcess:
        environment = os.environ | {
            "PATH": f"{workspace / '.programs'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
        }
        command = ["bash", "-euo", "pipefail", "-c", commands]
        done = subprocess.run(
            command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == exit_code, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done

    return run
