"""Weights between a Hugging Face folder and Megatron's parameters: streaming, exact to the bit, in every
layout.

A Megatron tensor is one or several Hugging Face tensors: q, k and v are interleaved by key/value group, gate
and up are stacked. Of a mixture of experts each rank has whole experts, a part of their list.
Both directions move one Megatron tensor at a time, and each pipeline stage its own. Files are ``hf_files``'s
concern.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from parallel.megatron.groups import is_stage_first
from parallel.megatron.model import PackedGPTModel
from parallel.megatron.moe import first_local_expert
from parallel.planning.layout import padded_vocab_size
from parallel.weights.hf_files import (
    MAX_SHARD_BYTES,
    HuggingFaceWeights,
    Shard,
    ShardWriter,
    finish_folder,
    hidden_folder,
)
from parallel.weights.hf_headers import IGNORED
from parallel.weights.hf_names import (
    EMBEDDING,
    OUTPUT,
    TOP,
    all_hf_names,
    expert_of,
    hf_names,
    hf_shapes,
    ungrouped,
    with_expert,
)

T = TypeVar("T")

_VALUE_HEAD = "value_head.weight"


def parameter_names(model: PackedGPTModel) -> Iterator[tuple[str, Tensor]]:
    """(name with the global numbers of layer and expert, parameter) of this rank; a critic's head is no part
    of a Hugging Face folder.

    A tensor for which ``expert_of(name)`` is a number is on one rank of the expert-parallel group alone, and
    whole there, whatever its ``tensor_model_parallel`` says. On rank r of n the E experts' numbers are r E/n
    to (r + 1) E/n - 1.
    """
    for name, parameter in model.named_parameters():
        if name == _VALUE_HEAD:
            continue
        if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            layer = cast(TransformerLayer, model.decoder.layers[int(found[1])])
            name = ungrouped(f"decoder.layers.{layer.layer_number - 1}.{found[2]}")
            if (local := expert_of(name)) is not None:
                name = with_expert(name, first_local_expert(layer) + local)
        yield name, parameter


def load_hf(models: Sequence[PackedGPTModel], folder: Path) -> None:
    """``load_weights`` of a folder."""
    load_weights(models, HuggingFaceWeights(folder))


@torch.no_grad()
def load_weights(models: Sequence[PackedGPTModel], weights: HuggingFaceWeights) -> None:
    """Fill every parameter of this rank from ``weights``, converting to the parameter's dtype. A critic's
    head stays as it is.

    Raises ValueError naming tensors that are missing, of another shape than config.json says, or left over.
    """
    _check_names(weights, models)
    shapes = hf_shapes(models[0].architecture)
    for model in models:
        for name, parameter in parameter_names(model):
            if (
                name == OUTPUT and model.architecture.tied
            ):  # the last pipeline stage's copy of the tied embedding
                name = EMBEDDING
            parts = {part: weights.read(part) for part in hf_names(name, model.architecture)}
            _check_shapes(parts, shapes)
            parameter.copy_(_shard(name, _merge(name, list(parts.values()), model), parameter))


def _check_names(weights: HuggingFaceWeights, models: Sequence[PackedGPTModel]) -> None:
    """Every rank compares the names of the whole model, whatever stage it holds."""
    wanted = all_hf_names(models[0].architecture)
    missing = sorted(wanted - weights.names)
    if missing:
        raise ValueError(
            f"{weights.folder} lacks {len(missing)} tensors that its config.json asks for: {', '.join(missing[:5])}"
        )
    # A tied model's folder may repeat the embedding as lm_head; config.json decides, as in transformers.
    left_over = sorted(n for n in weights.names - wanted if n != TOP[OUTPUT] and not IGNORED.match(n))
    if left_over:
        shown = ", ".join(left_over[:5])
        raise ValueError(
            f"{weights.folder} has {len(left_over)} tensors that its config.json does not account for: {shown}"
        )


def _check_shapes(parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, part in parts.items():
        if tuple(part.shape) != shapes[name]:
            raise ValueError(
                f"tensor {name} has shape {tuple(part.shape)}; config.json asks for {shapes[name]}"
            )


def _merge(name: str, parts: Sequence[Tensor], model: PackedGPTModel) -> Tensor:
    """The whole Megatron tensor from its Hugging Face parts."""
    if "linear_qkv" in name and len(parts) == 3:
        groups = model.architecture.num_kv_heads
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
    if name in (EMBEDDING, OUTPUT):
        padding = (
            padded_vocab_size(parts[0].shape[0], model.config.tensor_model_parallel_size) - parts[0].shape[0]
        )
        return torch.cat([parts[0], parts[0].new_zeros(padding, parts[0].shape[1])]) if padding else parts[0]
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _split(name: str, whole: Tensor, model: PackedGPTModel) -> list[Tensor]:
    """The Hugging Face parts of a whole Megatron tensor; the inverse of ``_merge``."""
    a = model.architecture
    if name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        dim, heads = a.head_dim, a.num_heads // a.num_kv_heads
        parts = whole.unflatten(0, (a.num_kv_heads, -1)).split([heads * dim, dim, dim], 1)
        return [part.flatten(0, 1) for part in parts]
    if name in (EMBEDDING, OUTPUT):
        return [whole[: a.vocab_size]]
    return list(whole.chunk(2)) if name.endswith("linear_fc1.weight") else [whole]


def _is_sharded(name: str, parameter: Tensor) -> bool:
    is_split = expert_of(name) is None and getattr(parameter, "tensor_model_parallel", False)
    return is_split and parallel_state.get_tensor_model_parallel_world_size() > 1


def _shard(name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    """This tensor-parallel rank's part of the whole."""
    if not _is_sharded(name, parameter):
        return whole
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    if name.endswith("linear_fc1.weight"):  # gate and up are stacked: each is sharded by itself
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, parameter.partition_dim)[rank]


def _gather(name: str, parameter: Tensor) -> Tensor:
    """The whole tensor, on every tensor-parallel rank."""
    local = parameter.detach()
    if not _is_sharded(name, parameter):
        return local
    shards = [torch.empty_like(local) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(shards, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    if name.endswith("linear_fc1.weight"):
        return torch.cat([torch.cat([shard.chunk(2)[half] for shard in shards]) for half in (0, 1)])
    return torch.cat(shards, parameter.partition_dim)


def _gather_experts(
    name: str, expert: int, parameter: Tensor, num_experts: int
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of this rank's expert and of the other expert-parallel ranks' in its place, on each of
    them."""
    size, rank = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    tensors = [torch.empty_like(parameter) for _ in range(size)]
    dist.all_gather(
        tensors, parameter.detach().contiguous(), group=parallel_state.get_expert_model_parallel_group()
    )
    step = num_experts // size
    return (
        (with_expert(name, expert + (other - rank) * step), tensor) for other, tensor in enumerate(tensors)
    )


def _wholes(name: str, parameter: Tensor, model: PackedGPTModel) -> Iterable[tuple[str, Tensor]]:
    expert, experts = expert_of(name), model.architecture.experts
    if expert is None or experts is None:
        return [(name, _gather(name, parameter))]
    return _gather_experts(name, expert, parameter, experts.num_experts)


@torch.no_grad()
def export_hf(models: Sequence[PackedGPTModel]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of this pipeline stage on every rank of it, in the same order on
    each.

    ``models`` are the stage's chunks. A collective of the stage: every rank must run it to the end. Tensors
    are on the device, in the model's dtype, and may share memory with the parameters: copy what must outlive
    the next optimizer step. A tied model yields no lm_head; its embedding is the first stage's. Gathered at a
    time: one tensor's shards, or one expert of each expert-parallel rank.
    """
    for model in models:
        for name, parameter in parameter_names(model):
            if name == OUTPUT and model.architecture.tied:  # the last stage's copy of the embedding
                continue
            for whole_name, whole in _wholes(name, parameter, model):
                yield from zip(
                    hf_names(whole_name, model.architecture), _split(whole_name, whole, model), strict=True
                )


def save_hf(
    models: Sequence[PackedGPTModel], source: Path, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a Hugging Face folder: weights in shards of at most ``max_shard_bytes``, config and tokenizer
    copied from ``source``.

    A collective of all ranks; the first rank of each pipeline stage writes that stage's shards. ``folder``
    appears complete or not at all: it is written beside, flushed and renamed, and what was there before stays
    until then. Raises OSError on every rank where any writer failed.
    """
    folder, source = Path(folder), Path(source)
    is_first = dist.get_rank() == 0
    temporary, failure = _attempt(hidden_folder, folder) if is_first else (None, None)
    temporary = _from_first_rank(temporary)
    if temporary is not None:
        try:
            shards, failure = _write_stage(models, temporary, max_shard_bytes)
            everyone: list = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, (shards, failure))
            failure = next((said for _, said in everyone if said is not None), None)
            if is_first and failure is None:
                written = [shard for shards, _ in everyone for shard in shards]
                _, failure = _attempt(
                    finish_folder,
                    temporary,
                    folder,
                    written,
                    source=source,
                    dtype=models[0].config.params_dtype,
                )
        finally:
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)  # gone already where it was finished
    failure = _from_first_rank(failure)
    if failure is not None:
        raise OSError(
            f"could not write the Hugging Face folder {folder}: {failure}; what was there before is unchanged"
        )


def _from_first_rank(value: T) -> T:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _write_stage(
    models: Sequence[PackedGPTModel], temporary: Path, max_shard_bytes: int
) -> tuple[list[Shard], str | None]:
    """This stage's tensors into shards, on its first rank. Every rank takes part to the end, also after a
    failed write."""
    writer, failure = None, None
    if is_stage_first():
        stage = parallel_state.get_pipeline_model_parallel_rank()
        writer = ShardWriter(temporary, number=stage, max_shard_bytes=max_shard_bytes)
    for name, tensor in export_hf(models):
        if writer is not None and failure is None:
            _, failure = _attempt(writer.add, name, tensor)
    if writer is not None and failure is None:
        _, failure = _attempt(writer.flush)
    return writer.shards if writer is not None else [], failure


def _attempt(action: Callable[..., T], *args, **named) -> tuple[T | None, str | None]:
    """(what ``action`` gives, None), or (None, what went wrong)."""
    try:
        return action(*args, **named), None
    except Exception as error:  # safetensors reports a full disk by a type of its own; the other ranks must hear of any failure
        return None, str(error) or repr(error)
