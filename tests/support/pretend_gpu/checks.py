"""The pretended GPU refuses what a GPU refuses, and computes what the CPU does. In a process of its own: torch takes one such
device per process, and keeps it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel.megatron import platform
from tests.support import pretend_gpu

pretend_gpu.use()
place = platform.device()
platform.init_distributed(60.0)
assert (place.type, platform.is_gpu(), platform.has_cuda()) == (pretend_gpu.NAME, True, False)

here, there = torch.arange(12.0).view(3, 4), torch.arange(12.0, device=place).view(3, 4)
for mixed in (
    lambda: here + there,
    lambda: torch.cat([here, there]),
    lambda: there.index_select(0, torch.tensor([1])),
    lambda: there @ here.T,
    lambda: torch.where(here > 2, there, there),
    lambda: np.asarray(there),
    lambda: torch.ops.aten.maximum(there, here),
    lambda: there.mul_(here),
):
    with pytest.raises((RuntimeError, TypeError)):
        mixed()
group = dist.group.WORLD._get_backend(place)
with pytest.raises(RuntimeError, match="on cpu"):
    group.allreduce([here])
with pytest.raises(RuntimeError, match="not contiguous"):
    group.allreduce([there.T])
dist.all_reduce(there)

assert torch.equal((there + 1).cpu(), here + 1) and torch.equal(
    there[torch.tensor([2, 0])].cpu(), here[[2, 0]]
)
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
