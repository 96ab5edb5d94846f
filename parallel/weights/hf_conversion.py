"""Conversion between a Hugging Face folder and Megatron's parameters, exact to the bit, in every layout.

A Megatron tensor consists of one or several Hugging Face tensors: q, k and v are interleaved by key/value
group, gate and up are stacked. Some families' folders have q, k and v, or gate and up, in one tensor. Each rank
has a part of the experts, each expert whole. Both directions move one Megatron tensor at a time, and each pipeline
stage its own. ``hf_files`` reads and writes the files.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

import parallel.megatron.setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from parallel.megatron.groups import groups_of_this_process
from parallel.megatron.lora import adapted_layers, first_a, is_adapter
from parallel.megatron.model import PackedGPTModel
from parallel.planning.architecture import Architecture, padded_vocab_size
from parallel.rank_objects import from_all_ranks, from_first_rank, raise_on_all_ranks
from parallel.weights.hf_files import (
    MAX_SHARD_BYTES,
    HuggingFaceWeights,
    Shard,
    ShardWriter,
    finish_folder,
    hidden_folder,
)
from parallel.weights.hf_headers import name_problems
from parallel.weights.hf_names import (
    CONVOLUTION,
    EMBEDDING,
    LINEAR_IN,
    OUTPUT,
    TOP,
    expert_of,
    hf_names,
    hf_shapes,
    is_kept_float32,
    is_of_all_experts,
    ungrouped,
    with_expert,
)

T = TypeVar("T")
_shapes_of = lru_cache(maxsize=2)(hf_shapes)

_VALUE_HEAD = "value_head.weight"
QKV = ("linear_qkv.weight", "linear_qkv.bias")
GROUPED = (*QKV, LINEAR_IN, CONVOLUTION)
"""Tensors whose rows are interleaved by key/value group, or by key head."""


def parameter_names(model: PackedGPTModel) -> Iterator[tuple[str, Tensor]]:
    """(name with the global numbers of layer and expert, parameter) of this rank, without a critic's head and without
    adapters. A router's bias, which is no parameter, comes last.

    A tensor with a number ``expert_of(name)`` is on only one rank of the expert-parallel group, and whole
    there, whatever its ``tensor_model_parallel``. Rank r of n has the experts r E/n to (r + 1) E/n - 1 of E.
    """
    kept = ((name, buffer) for name, buffer in model.named_buffers() if is_kept_float32(name))
    for name, parameter in chain(model.named_parameters(), kept):
        if name == _VALUE_HEAD or is_adapter(name):
            continue
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            layer = cast(TransformerLayer, model.decoder.layers[int(match[1])])
            name = ungrouped(f"decoder.layers.{layer.layer_number - 1}.{match[2]}")
            if (local := expert_of(name)) is not None:
                name = with_expert(name, layer.mlp.local_expert_indices[local])
        yield name, parameter


def load_hf(models: Sequence[PackedGPTModel], folder: Path) -> None:
    """``load_weights`` of a folder. Raises ValueError also for an output layer that config.json says it has not."""
    weights = HuggingFaceWeights(folder)
    _check_tied_output(weights, models[0].architecture)
    load_weights(models, weights)


def _check_tied_output(weights: HuggingFaceWeights, architecture: Architecture) -> None:
    """A tied model's folder may repeat the embedding as lm_head. Where that is another matrix, transformers does not tie them,
    and SGLang does."""
    if not architecture.tied or TOP[OUTPUT] not in weights.names:
        return
    embedding, output = weights.read(TOP[EMBEDDING]), weights.read(TOP[OUTPUT])
    if not torch.equal(embedding.to(output.dtype), output):
        raise ValueError(
            f"{weights.folder} has a {TOP[OUTPUT]} that is not its {TOP[EMBEDDING]}, but config.json has tie_word_embeddings=true; set it "
            f"to false, or remove {TOP[OUTPUT]} from the files"
        )


@torch.no_grad()
def load_weights(models: Sequence[PackedGPTModel], weights: HuggingFaceWeights) -> None:
    """Fill every parameter of this rank but a critic's head and adapters from ``weights``, converted to its dtype.

    Raises ValueError for tensors that are missing, left over, of another shape than in config.json, or not finite.
    """
    shapes = _shapes_of(models[0].architecture)
    problem = next(name_problems(weights.names, models[0].architecture, weights.folder), None)
    if problem is not None:
        raise ValueError(problem)
    read_once = lru_cache(maxsize=4)(weights.read)  # matrices and biases of a layer's experts
    for model in models:
        for name, parameter in parameter_names(model):
            if name == OUTPUT and model.architecture.tied:  # the last pipeline stage's copy of the embedding
                name = EMBEDDING
            parts = {
                part: (read_once if is_of_all_experts(part) else weights.read)(part)
                for part in hf_names(name, model.architecture)
            }
            _check_shapes(parts, shapes)
            parameter.copy_(_local_shard(name, _merge_parts(name, list(parts.values()), model), parameter))
            extremes = torch.stack(torch.aminmax(parameter))  # where there is NaN, both are NaN
            if not extremes.isfinite().all():
                raise ValueError(
                    f"{weights.folder} has NaN or infinity in {' or '.join(parts)}, as {parameter.dtype}; use a copy of the model that is "
                    "whole"
                )


def _check_shapes(parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, part in parts.items():
        if tuple(part.shape) != shapes[name]:
            raise ValueError(
                f"tensor {name} has shape {tuple(part.shape)}; config.json asks for {shapes[name]}"
            )


def _merge_parts(name: str, parts: Sequence[Tensor], model: PackedGPTModel) -> Tensor:
    """The whole Megatron tensor from its Hugging Face parts."""
    if is_of_all_experts(hf_names(name, model.architecture)[0]):
        part = parts[0][expert_of(name)]
        rows = part.t() if part.dim() == 2 else part
        return torch.cat((rows[::2], rows[1::2])) if "linear_fc1" in name else rows
    if name.endswith(GROUPED):
        pieces = _pieces(name, parts, model.architecture)
        rest = parts[0].shape[1:]
        return torch.cat([piece.reshape(len(piece), -1, *rest) for piece in pieces], 1).flatten(0, 1)
    if name in (EMBEDDING, OUTPUT):
        rows, columns = parts[0].shape
        padding = padded_vocab_size(rows, model.config.tensor_model_parallel_size) - rows
        return torch.cat([parts[0], parts[0].new_zeros(padding, columns)]) if padding else parts[0]
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _split_whole(name: str, whole: Tensor, model: PackedGPTModel) -> list[Tensor]:
    """The Hugging Face parts of a whole Megatron tensor; the inverse of ``_merge_parts``."""
    shapes = _shapes_of(model.architecture)
    rows = [shapes[part][0] for part in hf_names(name, model.architecture)]
    if not name.endswith(GROUPED):
        return list(whole[: sum(rows)].split(rows))  # padding rows come last
    # One after another in one memory, to be sent together.
    joined = torch.empty_like(whole).split(rows)
    pieces = _pieces(name, joined, model.architecture)
    groups = whole.unflatten(0, (len(pieces[0]), -1))
    of_group = [piece[0].numel() // whole[0].numel() for piece in pieces]
    for part, piece in zip(groups.split(of_group, 1), pieces, strict=True):
        piece.copy_(part.reshape(piece.shape))
    return list(joined)


def _pieces(name: str, parts: Sequence[Tensor], a: Architecture) -> list[Tensor]:
    """Views of the Hugging Face parts of a tensor whose rows are interleaved by group, [groups, ..], in the order of a
    group's rows."""
    if name.endswith(QKV):
        groups = a.num_kv_heads
        if len(parts) == 1:  # of a family without gates
            heads, kv_heads = a.num_heads * a.head_dim, groups * a.head_dim
            parts = parts[0].split([heads, kv_heads, kv_heads])
        if a.recurrent is not None:  # each query head with its gate
            queries = parts[0].unflatten(0, (groups, -1, 2, a.head_dim))
            return [
                queries[:, :, 0],
                queries[:, :, 1],
                *(part.unflatten(0, (groups, -1)) for part in parts[1:]),
            ]
    else:
        assert a.recurrent is not None  # only recurrent layers have these tensors
        groups = a.recurrent.key_heads
        if len(parts) != 2:  # of which queries, keys and values are not in groups
            parts = [*parts[0].split([groups * rows for rows in a.recurrent.group_rows[:3]]), *parts[1:]]
    return [part.unflatten(0, (groups, -1)) for part in parts]


def _is_sharded(name: str, parameter: Tensor) -> bool:
    is_split = expert_of(name) is None and getattr(parameter, "tensor_model_parallel", False)
    return is_split and parallel_state.get_tensor_model_parallel_world_size() > 1


def _local_shard(name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    """This tensor-parallel rank's part of the whole."""
    if not _is_sharded(name, parameter):
        return whole
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if name.endswith("linear_fc1.weight"):  # gate and up are stacked: each is sharded by itself
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, parameter.partition_dim)[rank]


def _gather_whole(name: str, parameter: Tensor, local: Tensor) -> Tensor:
    """The whole of ``local``, a tensor that is split over ranks as ``parameter`` is, on every tensor-parallel rank. name:
    of the parameter, or of the weight whose outputs are its rows."""
    if not _is_sharded(name, parameter):
        return local
    shards = [torch.empty_like(local) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(shards, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    if name.endswith("linear_fc1.weight"):
        return torch.cat([torch.cat([shard.chunk(2)[half] for shard in shards]) for half in (0, 1)])
    return torch.cat(shards, parameter.partition_dim)


def _gather_experts(parameter: Tensor) -> list[Tensor]:
    """This rank's expert and its counterparts on the other expert-parallel ranks, on all."""
    local, size = parameter.detach().contiguous(), parallel_state.get_expert_model_parallel_world_size()
    if size == 1:
        return [local]
    tensors = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(tensors, local, group=parallel_state.get_expert_model_parallel_group())
    return tensors


def _of_all_experts(name: str, own: Sequence[Tensor]) -> Tensor:
    """The Hugging Face tensor of a layer's experts [E, ...], of this rank's parameters ``own``, on all expert-parallel ranks."""
    parts = []
    for parameter in own:
        rows = parameter.detach()
        if "linear_fc1" in name:  # gate and up in turn
            rows = torch.stack(rows.chunk(2), 1).flatten(0, 1)
        parts.append(rows.t() if rows.dim() == 2 else rows)
    gathered = _gather_experts(torch.stack(parts))
    return gathered[0] if len(gathered) == 1 else torch.cat(gathered)


def _whole_names(name: str, model: PackedGPTModel) -> list[str]:
    """The name, or those of an expert and of its counterparts on the other expert-parallel ranks."""
    expert, experts = expert_of(name), model.architecture.experts
    if expert is None or experts is None:
        return [name]
    size = parallel_state.get_expert_model_parallel_world_size()
    step = experts.num_experts // size
    first = expert - parallel_state.get_expert_model_parallel_rank() * step
    return [with_expert(name, first + rank * step) for rank in range(size)]


def _exported_parameters(
    models: Sequence[PackedGPTModel],
) -> Iterator[tuple[PackedGPTModel, list[Tensor], list[str]]]:
    """(model, parameters, names of the whole tensors that are gathered with them), in the order of the export. There is one
    parameter, but of experts that one Hugging Face tensor has together."""
    for model in models:
        of_experts: dict[str, list[Tensor]] = {}
        for name, parameter in parameter_names(model):
            if name == OUTPUT and model.architecture.tied:  # the last stage's copy of the embedding
                continue
            together = hf_names(name, model.architecture)[0]
            if not is_of_all_experts(together):
                yield model, [parameter], _whole_names(name, model)
                continue
            own = of_experts.setdefault(together, [])
            own.append(parameter)
            assert model.architecture.experts is not None
            size = parallel_state.get_expert_model_parallel_world_size()
            if len(own) == model.architecture.experts.num_experts // size:
                yield model, of_experts.pop(together), [name]


@torch.no_grad()
def initialise_adapters(models: Sequence[PackedGPTModel], seed: int) -> None:
    """Set each A to its value at the start of training (``lora.first_a``). B is constructed as zero."""
    for model in models:
        layers = adapted_layers(model)
        for name, parameter in parameter_names(model):
            if parameter in layers:
                layer = layers[parameter]
                whole_a = first_a(name, layer.input_size, layer.lora, seed)
                layer.lora_a.copy_(_local_shard(name, whole_a, layer.lora_a))


@torch.no_grad()
def export_adapters(models: Sequence[PackedGPTModel]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (Hugging Face name of the weight, whole A [r, inputs], whole B [outputs, r]) of this pipeline stage, on all
    its ranks. The parts of a fused matrix share A. A collective of the stage, as ``export_hf``."""
    for model in models:
        layers = adapted_layers(model)
        for name, parameter in parameter_names(model):
            if parameter not in layers:
                continue
            a, b = layers[parameter].lora_a, layers[parameter].lora_b
            whole_a, whole_b = (_gather_whole(name, p, p.detach()) for p in (a, b))
            parts = _split_whole(name, whole_b, model)
            for hf_name, part in zip(hf_names(name, model.architecture), parts, strict=True):
                yield hf_name, whole_a, part


def export_plan(models: Sequence[PackedGPTModel]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """(name, shape) of what ``export_hf`` yields, in its order; without a collective. The tensors of one list are the
    parts of one Megatron tensor, and lie in memory one after another."""
    shapes = _shapes_of(models[0].architecture)
    return [
        [(part, shapes[part]) for part in hf_names(name, model.architecture)]
        for model, _, names in _exported_parameters(models)
        for name in names
    ]


@torch.no_grad()
def export_hf(models: Sequence[PackedGPTModel]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of this pipeline stage, in the same order on all its ranks.

    ``models`` are the stage's chunks. A collective of the stage: every rank must run it to the end. Tensors
    are on the device, in the model's dtype, and may share memory with the parameters: the next optimizer step
    may change them. A tied model yields no lm_head; its embedding is the first stage's. At a time the shards of
    one tensor, or one expert of each expert-parallel rank, are gathered. Weights with an adapter are merged, each rank
    its part, one at a time.
    """
    layers = {weight: layer for model in models for weight, layer in adapted_layers(model).items()}
    for model, parameters, names in _exported_parameters(models):
        (together, *_), parameter = hf_names(names[0], model.architecture), parameters[0]
        if is_of_all_experts(together):
            yield together, _of_all_experts(names[0], parameters)
            continue
        if expert_of(names[0]) is not None:
            wholes = _gather_experts(parameter)
        else:
            local = layers[parameter].merged() if parameter in layers else parameter.detach()
            wholes = [_gather_whole(names[0], parameter, local)]
        for name, whole in zip(names, wholes, strict=True):
            yield from zip(hf_names(name, model.architecture), _split_whole(name, whole, model), strict=True)


def save_hf(
    models: Sequence[PackedGPTModel], source: Path, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a Hugging Face folder: weights in shards of at most ``max_shard_bytes``, config and tokenizer
    copied from ``source``.

    A collective of all ranks; the first rank of each pipeline stage writes that stage's shards. ``folder``
    appears complete or not at all: it is written beside, flushed and renamed, and replaces an older one only
    then. Raises OSError on every rank if any writer failed.
    """
    folder, source = Path(folder), Path(source)
    is_first = dist.get_rank() == 0
    temporary, failure = try_call(hidden_folder, folder) if is_first else (None, None)
    temporary = from_first_rank(temporary)
    if temporary is not None:
        try:
            shards, failure = _write_stage(models, temporary, max_shard_bytes)
            results = from_all_ranks((shards, failure))
            failure = next((text for _, text in results if text is not None), None)
            if is_first and failure is None:
                written = [shard for shards, _ in results for shard in shards]
                finish = partial(finish_folder, source=source, dtype=models[0].config.params_dtype)
                _, failure = try_call(finish, temporary, folder, written)
        finally:
            if is_first:
                shutil.rmtree(temporary, ignore_errors=True)  # finish_folder has renamed it
    raise_on_all_ranks(failure, f"the Hugging Face folder {folder}")


def _write_stage(
    models: Sequence[PackedGPTModel], temporary: Path, max_shard_bytes: int
) -> tuple[list[Shard], str | None]:
    """Write this stage's tensors as shards, on its first rank. Every rank takes part to the end, even after a
    failed write."""
    writer, failure, groups = None, None, groups_of_this_process()
    if groups.is_stage_first:
        writer = ShardWriter(temporary, number=groups.pp_rank, max_shard_bytes=max_shard_bytes)
    for name, tensor in export_hf(models):
        if writer is not None and failure is None:
            _, failure = try_call(writer.add, name, tensor)
    if writer is not None and failure is None:
        _, failure = try_call(writer.flush)
    return writer.shards if writer is not None else [], failure


def try_call(action: Callable[..., T], *args) -> tuple[T | None, str | None]:
    """(result of ``action``, None), or (None, error): the other ranks must hear of any failure."""
    try:
        return action(*args), None
    except Exception as error:  # safetensors reports a full disk with its own type
        return None, str(error) or repr(error)
