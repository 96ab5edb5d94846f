"""RMSNorm, by an own forward and backward pass in three places: in float32 on CPU, on CUDA, and over tensor-parallel ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return _Float32RMSNorm.apply(x, weight, eps)
    if x.is_cuda:
        return _KernelRMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _Float32RMSNorm(torch.autograd.Function):
    """RMSNorm in few passes over memory. On CPU torch composes it and its gradient of a dozen operations, each
    of them a pass.

    With r = 1 / sqrt(mean(x^2) + eps), n = x r and g the gradient of y = n w: dL/dw = sum of g n over tokens,
    dL/dx = r (g w - n mean(g w n)).
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
        r = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        n = x * r
        ctx.save_for_backward(n, r, weight)
        return n * weight

    @staticmethod
    def backward(ctx, grad):
        n, r, weight = ctx.saved_tensors
        grad_n = (grad * n).flatten(0, -2)
        mean = torch.mv(grad_n, weight).div_(n.shape[-1]).view(r.shape)
        return torch.addcmul(grad * weight, n, mean, value=-1).mul_(r), grad_n.sum(0), None


class _KernelRMSNorm(torch.autograd.Function):
    """The same by one kernel each way, also of many short rows, such as heads, and of parts of longer ones."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        from parallel.megatron import triton_kernels

        out, root = triton_kernels.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, root)
        return out

    @staticmethod
    def backward(ctx, grad):
        from parallel.megatron import triton_kernels

        return *triton_kernels.rms_norm_gradient(grad, *ctx.saved_tensors), None


def split_rms_norm(x: Tensor, weight: Tensor, eps: float, size: int, group: dist.ProcessGroup) -> Tensor:
    """``rms_norm`` over ``size`` numbers, of which each rank of the group has its part in x and weight."""
    return _SplitRMSNorm.apply(x, weight, eps, size, group)


class _SplitRMSNorm(torch.autograd.Function):
    """The sums of ``_Float32RMSNorm`` over a group. It keeps x, where autograd would keep two float32 tensors of its size."""

    @staticmethod
    def forward(ctx, x, weight, eps, size, group):
        wide = x.float()
        squares = torch.linalg.vecdot(wide, wide).unsqueeze(-1)
        dist.all_reduce(squares, group=group)
        r = squares.div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, r, weight)
        ctx.size, ctx.group = size, group
        return (wide * r * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, r, weight = ctx.saved_tensors
        n, grad_y = x.float() * r, grad.float()
        grad_weight = (grad_y * n).flatten(0, -2).sum(0).to(weight.dtype)
        grad_n = grad_y * weight.float()
        mean = torch.linalg.vecdot(grad_n, n).unsqueeze(-1)
        dist.all_reduce(mean, group=ctx.group)
        grad_x = torch.addcmul(grad_n, n, mean.div_(ctx.size), value=-1).mul_(r)
        return grad_x.to(x.dtype), grad_weight, None, None, None
