"""Micro-batches through Megatron's schedules: forward passes for scores, forward and backward passes for gradients.

Losses and scores are computed on the last pipeline stage, which sends them to all others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core.pipeline_parallel import get_forward_backward_func

from parallel.megatron import platform
from parallel.megatron.groups import Groups
from parallel.packing import PackedBatch
from tracing import laps

Forward = Callable[[Any, PackedBatch], Any]
"""(chunk of the model, micro-batch) -> of the last chunk the loss's further arguments, a tuple of [T] tensors;
of any other chunk the hidden states for the next."""

_AttachLoss = Callable[[PackedBatch], Callable]
"""micro-batch -> Megatron's loss function: forward's output -> (loss, number of tokens, output of the loss)."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient is NaN or infinite. All ranks raise it, before weights or optimizer state change."""


class Schedule:
    """Runs one data-parallel rank's micro-batches, in the pipeline of ``groups``.

    ``chunks``: this rank's part of the model, in Megatron's ``DistributedDataParallel`` if it is trained.
    ``microbatch_multiple``: an interleaved pipeline takes a multiple of so many micro-batches.
    """

    def __init__(self, chunks: Sequence[Any], groups: Groups, microbatch_multiple: int):
        self._chunks = list(chunks)
        self._groups = groups
        self._microbatch_multiple = microbatch_multiple

    @torch.no_grad()
    def scores(self, microbatches: Sequence[PackedBatch], forward: Forward) -> list[Tensor]:
        """The one float32 tensor of ``forward`` for each micro-batch, on every rank.

        All ranks of a data-parallel group pass the same number of micro-batches: any number.
        """
        if not microbatches:
            return []
        fill = -len(microbatches) % self._microbatch_multiple
        results = self._run([*microbatches, *[microbatches[-1]] * fill], forward, None)[: len(microbatches)]
        if self._groups.pp_size == 1:
            return results
        lengths = [batch.num_tokens for batch in microbatches]
        if self._groups.pp_rank == self._groups.pp_size - 1:
            packed_T = torch.cat(results)
        else:
            packed_T = torch.empty(sum(lengths), dtype=torch.float32, device=platform.device())
        dist.broadcast(packed_T, src=self._last_stage, group=self._groups.pp_group)
        return list(packed_T.split(lengths))

    def add_gradient(
        self,
        microbatches: Sequence[PackedBatch],
        forward: Forward,
        loss_fn: Callable[..., tuple[Tensor, Any]],
        forward_only: Sequence[bool] = (),
    ) -> list[Any]:
        """Add the gradient of the summed losses to the gradient buffers. Returns the losses' outputs, on every rank.

        ``forward_only``: see ``MegatronEngine.update``. Raises NonFiniteError on all ranks if a loss is not finite,
        ValueError for a number of micro-batches that the pipeline cannot take.
        """
        if not microbatches:
            raise ValueError("update needs at least one micro-batch on every rank")
        if len(microbatches) % self._microbatch_multiple:
            raise ValueError(
                f"an interleaved pipeline of {self._groups.pp_size} stages updates on a multiple of "
                f"{self._microbatch_multiple} micro-batches, got {len(microbatches)}; see trainer.batch.plan.plan_batches"
            )
        losses: list[Tensor] = []

        def attach_loss(batch: PackedBatch) -> Callable:
            def compute(output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Any]:
                loss, loss_output = loss_fn(batch, *output)
                losses.append(loss.detach())
                if not loss.requires_grad:  # a constant; the empty sum ties it to the graph
                    loss = loss + output[0][:0].sum()
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), loss_output

            return compute

        if any(forward_only):
            outputs = self._run_apart(microbatches, forward, attach_loss, forward_only)
        else:
            outputs = self._run(microbatches, forward, attach_loss)
        self._check(losses)
        if self._groups.pp_size == 1:
            return outputs
        box = [outputs]
        dist.broadcast_object_list(box, src=self._last_stage, group=self._groups.pp_group)
        return box[0]

    def _run_apart(
        self,
        microbatches: Sequence[PackedBatch],
        forward: Forward,
        attach_loss: _AttachLoss,
        forward_only: Sequence[bool],
    ) -> list:
        """The losses' outputs; those of skipped micro-batches come from a forward pass without backward."""
        if self._groups.pp_size > 1 or all(forward_only):
            raise ValueError(
                "micro-batches are skipped only in a pipeline of one stage, and never all of them"
            )
        outputs: list = [None] * len(microbatches)
        # Megatron sums gradients over ranks at the end of the pass with backward, so that one comes last.
        for skips in (True, False):
            places = [i for i, is_one in enumerate(forward_only) if is_one == skips]
            with torch.no_grad() if skips else nullcontext():
                chosen = [microbatches[i] for i in places]
                results = self._run(chosen, forward, attach_loss, backward=not skips)
            for place, result in zip(places, results, strict=True):
                outputs[place] = result
        return outputs

    def _run(
        self,
        microbatches: Sequence[PackedBatch],
        forward: Forward,
        attach_loss: _AttachLoss | None,
        *,
        backward: bool = True,
    ) -> list:
        """Forward and backward of all micro-batches with ``attach_loss``, else only forward. backward: False leaves
        it out with ``attach_loss`` too.

        Returns the losses' outputs, or ``forward``'s, on the last pipeline stage; nothing on the others.
        """

        def forward_step(batches: Iterator[PackedBatch], chunk):
            batch = next(batches)
            lap(tokens=batch.num_tokens)
            batch = batch.to(platform.device())
            output = forward(getattr(chunk, "module", chunk), batch)
            if attach_loss is None and isinstance(output, tuple):
                (output,) = output  # Megatron reads output.device for a model with experts
            return output, attach_loss(batch) if attach_loss else (lambda result, non_loss_data: result)

        # A lap ends where the next forward pass begins. In a pipeline it also has the backward pass of an earlier one.
        with laps("micro-batch") as lap:
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(microbatches) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(microbatches),
                seq_length=max(batch.num_tokens for batch in microbatches),
                micro_batch_size=1,
                forward_only=attach_loss is None or not backward,
                collect_non_loss_data=attach_loss is None,
            )

    @property
    def _last_stage(self) -> int:
        """The last rank of this rank's pipeline."""
        return dist.get_global_rank(self._groups.pp_group, self._groups.pp_size - 1)

    def _check(self, losses: Sequence[Tensor]) -> None:
        """Raise NonFiniteError on all ranks if any of them has a loss that is not finite."""
        values = torch.stack([loss.float() for loss in losses] or [torch.zeros((), device=platform.device())])
        bad = (~values.isfinite()).any().float()
        if self._groups.world_size > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad.item():
            own = {i: value for i, value in enumerate(values.tolist()) if not math.isfinite(value)}
            where = f"micro-batches {own} of rank {self._groups.rank}" if own else "another rank"
            raise NonFiniteError(f"the loss is not finite on {where}; nothing was updated")
