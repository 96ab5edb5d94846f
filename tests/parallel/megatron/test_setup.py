"""What is changed of torch and Megatron before use: the stand-ins without CUDA alone, the optimizer's repair
everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys, torch
torch.cuda.is_available = lambda: sys.argv[1] == "cuda"
before = torch.Tensor.cuda, torch.zeros, torch.cuda.current_device
import parallel.megatron.setup
untouched = (torch.Tensor.cuda, torch.zeros, torch.cuda.current_device) == before
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as optimizer
repaired = {m.__module__ for m in (optimizer.load_state_dict, optimizer._set_main_param_and_optimizer_states)}
print(untouched, *repaired)
"""


@pytest.mark.parametrize("device, untouched", [("cpu", False), ("cuda", True)])
def test_stand_ins_are_for_cpu_alone_and_the_repair_is_for_all(device, untouched):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, device],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(untouched), "parallel.megatron.setup"]
