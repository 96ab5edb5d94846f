"""The pretended GPU refuses what a GPU refuses, and computes what the CPU does. In a process of its own: torch takes one such
device per process, and keeps it."""

import os
import subprocess
import sys

import pytest

from tests.support import pretend_gpu
from tests.support.whole_runs import ROOT

CHECKS = """
import numpy as np, pytest, torch, torch.distributed as dist
from tests.support import pretend_gpu
from parallel.megatron import platform
pretend_gpu.use()
place = platform.device()
platform.init_distributed(60.0)
assert (place.type, platform.is_gpu(), platform.has_cuda()) == (pretend_gpu.NAME, True, False)

here, there = torch.arange(12.0).view(3, 4), torch.arange(12.0, device=place).view(3, 4)
for mixed in (lambda: here + there, lambda: torch.cat([here, there]), lambda: there.index_select(0, torch.tensor([1])),
              lambda: there @ here.T, lambda: torch.where(here > 2, there, there), lambda: np.asarray(there),
              lambda: torch.ops.aten.maximum(there, here), lambda: there.mul_(here)):
    with pytest.raises((RuntimeError, TypeError)):
        mixed()
group = dist.group.WORLD._get_backend(place)
with pytest.raises(RuntimeError, match="on cpu"):
    group.allreduce([here])
with pytest.raises(RuntimeError, match="not contiguous"):
    group.allreduce([there.T])
dist.all_reduce(there)

assert torch.equal((there + 1).cpu(), here + 1) and torch.equal(there[torch.tensor([2, 0])].cpu(), here[[2, 0]])
there[1:, 2] = 7.0  # through a view
there.view(-1)[0] = 5.0
assert there.tolist() == [[5, 1, 2, 3], [4, 5, 7, 7], [8, 9, 7, 11]]
x, y = (t.clone().requires_grad_() for t in (here, torch.arange(12.0, device=place).view(3, 4)))
for t in (x, y):
    (t.softmax(1) @ t.T).logsumexp(1).sum().backward()
assert torch.equal(x.grad, y.grad.cpu()) and pretend_gpu.operations() > 10
layer = torch.nn.Linear(2, 2)
layer.weight.sequence_parallel = True
assert layer.to(place).weight.sequence_parallel and layer.weight.device == place
print("as a GPU")
"""


@pytest.mark.skipif(not pretend_gpu.can_be_built(), reason="needs g++ and Python's headers")
@pytest.mark.engines
def test_it_refuses_what_a_gpu_refuses_and_computes_what_the_cpu_does(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        pretend_gpu.VARIABLE: str(pretend_gpu.build(tmp_path)),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECKS], env=environment, capture_output=True, text=True, timeout=600
    )
    assert "as a GPU" in done.stdout, done.stderr
