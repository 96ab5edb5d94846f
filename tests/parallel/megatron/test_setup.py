"""Changes to torch and Megatron before use: the stand-ins only without CUDA, the repair of the optimizer
everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel.megatron import accumulation, platform

from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32  # isort: skip - after their preparation

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import gc; gc.disable()  # an import makes no garbage
import sys, torch
torch.cuda.is_available = lambda: sys.argv[1] == "cuda"
before = torch.Tensor.cuda, torch.zeros, torch.cuda.current_device
import parallel.megatron.setup
untouched = (torch.Tensor.cuda, torch.zeros, torch.cuda.current_device) == before
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as optimizer
repaired = {m.__module__ for m in (optimizer.load_state_dict, optimizer._set_main_param_and_optimizer_states)}
unused = {"wandb", "tensorboard"} & {name.split(".")[0] for name in sys.modules}
print(untouched, *repaired, *unused)
if sys.argv[1] == "cpu":  # what was hidden can be imported afterwards
    import wandb, torch.utils.tensorboard
"""


def test_gradients_are_clipped_together_and_none_is_fine():
    """A stage of a pipeline may have no experts."""
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    for some in (parameters, []):
        clip_grad_by_total_norm_fp32(some, max_norm=1.0, total_norm=5.0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / (5.0 + 1e-6))


def test_products_are_added_in_float32():
    total, left, right = torch.full((2, 3), 0.5), torch.randn(2, 4), torch.randn(4, 3)
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        found, wanted = total.clone(), total + left.to(dtype).float() @ right.to(dtype).float()
        accumulation.add_product(found, left.to(dtype), right.to(dtype))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)


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


PACKAGES = {
    "no compiled part": {
        "transformer_engine/__init__.py": "raise RuntimeError('Found empty meta package\\nmore')"
    },
    "another torch's": {
        "transformer_engine/__init__.py": "",
        "transformer_engine/pytorch/__init__.py": "raise OSError('undefined symbol')",
    },
    "Apex": {
        "apex/__init__.py": "",
        "apex/optimizers.py": "import torch\nclass FusedAdam(torch.optim.AdamW): pass\nclass FusedSGD(torch.optim.SGD): pass\n",
    },
}
LEARNER = """
import gc; gc.disable()
import torch
from parallel.megatron import platform, transformer_engine
import parallel.engine
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
print(transformer_engine.ABSENCE)
print(optimizer.Adam.__name__, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.HAVE_APEX_OR_TE)
platform.has_cuda = lambda: True
print(*(platform.uses_transformer_engine(dtype) for dtype in (torch.bfloat16, torch.float32)))
"""


@pytest.mark.parametrize(
    ("package", "absence", "adam"),
    [
        (
            "no compiled part",
            "it is installed and does not import: RuntimeError: Found empty meta package",
            "AdamW",
        ),
        ("another torch's", "it is installed and does not import: OSError: undefined symbol", "AdamW"),
        ("Apex", "it is not installed", "FusedAdam"),
    ],
)
def test_a_transformer_engine_that_does_not_import_is_told_and_no_package_changes_the_optimizer(
    tmp_path, package, absence, adam
):
    """``adam``: what Megatron found, so that the case is the one it is meant to be."""
    for name, text in PACKAGES[package].items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", LEARNER],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [absence, f"{adam} True False", "False False"]
    assert ("does not import" in done.stderr) == ("does not import" in absence), "the log says why"


def test_layers_of_transformer_engine_are_for_narrow_floats_on_a_gpu(monkeypatch):
    monkeypatch.setattr(platform.transformer_engine, "ABSENCE", None)
    used = {}
    for has_cuda in (True, False):
        monkeypatch.setattr(platform, "has_cuda", lambda has_cuda=has_cuda: has_cuda)
        used[has_cuda] = [
            platform.uses_transformer_engine(dtype)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ]
    assert used == {True: [True, True, False], False: [False] * 3}
