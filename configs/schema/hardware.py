"""A kind of device for the estimate of a step's seconds (``parallel/planning/time.py``): what it could do at best, the
share of it that is attained, and what the software around it takes. ``configs/hardware/`` has descriptions."""

from typing import Annotated

from pydantic import Field

from configs.schema.base import NonNegativeSeconds, PositiveFloat, Schema

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
"""Above 0, at most 1."""


class PeakRates(Schema):
    """Dense matrix products of one device at their best, in TFLOP/s (10^12 a second, a multiplication and an addition
    being two)."""

    float32: PositiveFloat
    """Products of float32 numbers, as torch computes them by default (without TF32). TFLOP/s."""
    bfloat16: PositiveFloat
    """Products of bfloat16 numbers. TFLOP/s."""
    float16: PositiveFloat
    """Products of float16 numbers. TFLOP/s."""
    fp8: PositiveFloat | None = None
    """Products of FP8 numbers, for rollout.quantization=fp8. TFLOP/s. None: the device has none."""


class AttainedShares(Schema):
    """Shares of the peaks that are attained, between 0 and 1. They include the other operations: norms,
    activations, the softmax over the vocabulary."""

    train_matmul: Share
    """Of the peak rate, by the learner's matrix products, forward and backward."""
    train_attention: Share
    """Of the peak rate, by the learner's attention between tokens, forward and backward."""
    prefill_matmul: Share
    """Of the peak rate, by a server's matrix products, of prompts and of large decoding batches."""
    prefill_attention: Share
    """Of the peak rate, by a server's attention between tokens."""
    memory: Share
    """Of the memory's bandwidth, by decoding and by the optimizer."""
    links: Share
    """Of the links' bandwidth, by collectives and by the transfer of weights."""


class Overheads(Schema):
    """Seconds that do not shrink with faster arithmetic."""

    collective_s: NonNegativeSeconds
    """A collective of the learner or of a server, beside its bytes. Seconds."""
    pass_s: NonNegativeSeconds
    """A pass of a micro-batch through a pipeline stage, forward, backward or computed again, beside its arithmetic. Seconds."""
    optimizer_s: NonNegativeSeconds
    """An optimizer step, beside reading and writing its numbers. Seconds."""
    decode_step_s: NonNegativeSeconds
    """A step of decoding, whatever the number of responses. Seconds."""
    decode_layer_s: NonNegativeSeconds
    """A layer of a step of decoding, beside its bytes and arithmetic. Seconds."""
    decode_response_s: NonNegativeSeconds
    """A response in a step of decoding, beside its bytes and arithmetic. Seconds."""
    prompt_s: NonNegativeSeconds
    """A prompt that a server computes, beside its arithmetic. Seconds."""
    response_s: NonNegativeSeconds
    """A response's request, answer and reward, at its server. Seconds."""
    token_s: NonNegativeSeconds
    """A response token's way from the servers' answers to the learner's batch, by one process. Seconds."""
    transfer_s: NonNegativeSeconds
    """An update of the servers' weights, beside its bytes. Seconds."""
    step_s: NonNegativeSeconds
    """The rest of a step. Seconds."""


class HardwareConfig(Schema):
    """One kind of device, its links and its software, for ``tandem plan --gpu FILE.yaml``."""

    name: Annotated[str, Field(min_length=1)]
    """Its name in tables."""
    source: Annotated[str, Field(min_length=1)]
    """Where its figures come from, for readers of an estimate."""
    memory_gib: PositiveFloat
    """Memory of one device. GiB (2^30 bytes)."""
    peak_tflops: PeakRates
    memory_gb_s: PositiveFloat
    """Bandwidth of a device's memory. GB/s (10^9 bytes a second)."""
    node_link_gb_s: PositiveFloat
    """Bandwidth from one device to others of its node, in one direction (NVLink). GB/s (10^9 bytes a second)."""
    network_gb_s: PositiveFloat
    """A device's share of its node's bandwidth to other nodes, in one direction. GB/s (10^9 bytes a second)."""
    attained: AttainedShares
    overheads: Overheads
