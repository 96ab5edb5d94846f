"""The learner's aligned modules: gradients of the plain operations, log-probs that no batch changes."""

import pytest
import torch
import torch.nn.functional as F

from numerics import aligned as forward
from parallel.megatron import aligned
from parallel.megatron.attention import Scoring, packed_attention, plan_packing
from parallel.megatron.vocab_parallel import linear_logprobs

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_same_gradients(ours, plain, *inputs):
    """Values but for rounding, and gradients of a random weighting."""
    grads = []
    for function in (ours, plain):
        out = function(*inputs)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        grads.append((out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_products_norm_and_activation_have_plain_gradients():
    x, matrix, bias, weight = (
        random(*shape, seed=i) for i, shape in enumerate([(5, 1, 24), (40, 24), (40,), (24,)])
    )
    assert_same_gradients(lambda *inputs: aligned._Linear.apply(*inputs, 1), F.linear, x, matrix, bias)
    assert_same_gradients(lambda x, w: aligned._Linear.apply(x, w, None, 4), F.linear, x, matrix)
    assert_same_gradients(
        lambda x, w: aligned.rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, (24,), w, 1e-6), x, weight
    )
    assert_same_gradients(aligned.silu, F.silu, x)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["each its own keys", "grouped queries"])
def test_attention_has_plain_values_and_gradients(heads):
    lengths = torch.tensor([0, 3, 40, 43, 113])
    plan = plan_packing(lengths, torch.device("cpu"))
    query, key, value = (random(113, n, 16, seed=i) for i, n in enumerate((heads[0], heads[1], heads[1])))
    assert_same_gradients(
        lambda *qkv: torch.cat([aligned._bucket_attention(*qkv, bucket, 0.25) for bucket in plan.buckets]),
        lambda *qkv: packed_attention(*qkv, plan.buckets, Scoring(scale=0.25), dtype=torch.float32),
        query, key, value,
    )  # fmt: skip


def test_the_learners_logprobs_have_the_bits_of_the_servers():
    """``linear_logprobs`` in chunks against the function that the servers call on single rows, at a temperature."""
    hidden, weight = random(90, 32, seed=0).detach(), random(64, 32, seed=1).detach()
    targets = torch.randint(50, (90,), generator=torch.Generator().manual_seed(2))
    ours, _ = linear_logprobs(
        hidden, weight, targets, vocab_size=50, temperature=0.7, chunk_tokens=40,
        whole_logits=lambda hidden, weight: forward.linear(hidden, weight)[:, :50].contiguous(),
    )  # fmt: skip
    temperatures = torch.full((1, 1), 0.7)
    theirs = [
        forward.logprobs(forward.linear(hidden[i : i + 1], weight[:50]) / temperatures, targets[i : i + 1])
        for i in range(90)
    ]
    assert torch.equal(ours, torch.cat(theirs))
