"""RMSNorm, on CPU in float32 by an own forward and backward pass."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return _Float32RMSNorm.apply(x, weight, eps)
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
