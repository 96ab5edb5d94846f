"""Weights between a Hugging Face folder and Megatron's parameters: streaming, exact to the bit, over tensor-parallel ranks.

A Megatron tensor is one or several Hugging Face tensors: q, k and v are interleaved by key/value group, gate and up are stacked.
Of a mixture of experts each rank has whole experts, a part of their list.
Both directions move one Megatron tensor at a time.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import parallel.megatron_setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state

from parallel.hf_names import EMBEDDING, OUTPUT, TOP, all_hf_names, expert_of, hf_names, ungrouped, with_expert
from parallel.layout import padded_vocab_size
from parallel.megatron_model import PackedGPTModel
from parallel.megatron_moe import first_local_expert

MAX_SHARD_BYTES = 4 * 1024**3
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What a folder needs beside weights to be served and trained from: copied as they are.
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip

_VALUE_HEAD = "value_head.weight"
# Buffers that some published checkpoints carry and no model needs.
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq$")


class HuggingFaceWeights:
    """The tensors of a folder's safetensors, read one at a time. Raises ValueError naming what cannot be read."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._files = self._locate()

    def _locate(self) -> dict[str, Path]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                mapping = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise ValueError(f"{index} is no index of safetensors: {error!r}") from error
            missing = sorted({file for file in mapping.values() if not (self.folder / file).is_file()})
            if missing:
                raise ValueError(f"{index} names files that are not there: {missing[:5]}")
            return {name: self.folder / file for name, file in mapping.items()}
        single = self.folder / SINGLE
        if not single.is_file():
            raise ValueError(f"model.path={self.folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors")
        return dict.fromkeys(self._open(single).keys(), single)

    @staticmethod
    def _open(path: Path):
        try:
            return safe_open(path, framework="pt", device="cpu")
        except Exception as error:  # safetensors raises its own type for a broken file, OSError for a missing one
            raise ValueError(f"{path} is no readable safetensors file: {error}") from error

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def read(self, name: str) -> Tensor:
        with self._open(self._files[name]) as file:
            return file.get_tensor(name)


def parameter_names(model: PackedGPTModel) -> Iterator[tuple[str, Tensor]]:
    """(name with the global numbers of layer and expert, parameter) of this rank; a critic's head is no part of a Hugging Face folder.

    A tensor for which ``expert_of(name)`` is a number is on one rank of the expert-parallel group alone, and whole there, whatever its
    ``tensor_model_parallel`` says. On rank r of n the E experts' numbers are r E/n to (r + 1) E/n - 1.
    """
    for name, parameter in model.named_parameters():
        if name == _VALUE_HEAD:
            continue
        if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            layer = model.decoder.layers[int(found[1])]
            name = ungrouped(f"decoder.layers.{layer.layer_number - 1}.{found[2]}")
            if (local := expert_of(name)) is not None:
                name = with_expert(name, first_local_expert(layer) + local)
        yield name, parameter


@torch.no_grad()
def load_hf(models: Sequence[PackedGPTModel], folder: Path) -> None:
    """Fill every parameter of this rank from ``folder``, converting to the parameter's dtype. A critic's head stays as it is.

    Raises ValueError naming tensors that are missing, of another shape than config.json says, or left over.
    """
    weights = HuggingFaceWeights(folder)
    _check_names(weights, models)
    for model in models:
        for name, parameter in parameter_names(model):
            if name == OUTPUT and model.architecture.tied:  # the last pipeline stage's copy of the tied embedding
                name = EMBEDDING
            parts = [weights.read(part) for part in hf_names(name, model.architecture)]
            _check_shapes(name, parts, parameter, model)
            parameter.copy_(_shard(name, _merge(name, parts, model), parameter))


def _check_names(weights: HuggingFaceWeights, models: Sequence[PackedGPTModel]) -> None:
    """Every rank compares the names of the whole model, whatever stage it holds."""
    wanted = all_hf_names(models[0].architecture)
    missing = sorted(wanted - weights.names)
    if missing:
        raise ValueError(f"{weights.folder} lacks {len(missing)} tensors that its config.json asks for: {', '.join(missing[:5])}")
    # A tied model's folder may repeat the embedding as lm_head; config.json decides, as in transformers.
    left_over = sorted(n for n in weights.names - wanted if n != TOP[OUTPUT] and not _IGNORED.match(n))
    if left_over:
        shown = ", ".join(left_over[:5])
        raise ValueError(f"{weights.folder} has {len(left_over)} tensors that its config.json does not account for: {shown}")


def _check_shapes(name: str, parts: Sequence[Tensor], parameter: Tensor, model: PackedGPTModel) -> None:
    a = model.architecture
    wide = a.intermediate_size if expert_of(name) is None else a.experts.intermediate_size
    rows = {
        "q_proj": a.num_heads * a.head_dim, "k_proj": a.num_kv_heads * a.head_dim, "v_proj": a.num_kv_heads * a.head_dim,
        "gate_proj": wide, "up_proj": wide, "w1": wide, "w3": wide, "gate": a.experts and a.experts.num_experts,
        "q_norm": a.head_dim, "k_norm": a.head_dim, "embed_tokens": a.vocab_size, "lm_head": a.vocab_size,
    }  # fmt: skip
    columns = {"o_proj": a.num_heads * a.head_dim, "down_proj": wide, "w2": wide}
    for part_name, part in zip(hf_names(name, a), parts, strict=True):
        module = part_name.split(".")[-2]
        wanted = (rows.get(module, a.hidden_size),) + ((columns.get(module, a.hidden_size),) if parameter.dim() == 2 else ())
        if tuple(part.shape) != wanted:
            raise ValueError(f"tensor {part_name} has shape {tuple(part.shape)}; config.json asks for {wanted}")


def _merge(name: str, parts: Sequence[Tensor], model: PackedGPTModel) -> Tensor:
    """The whole Megatron tensor from its Hugging Face parts."""
    if "linear_qkv" in name and len(parts) == 3:
        groups = model.config.num_query_groups
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
    if name in (EMBEDDING, OUTPUT):
        padding = padded_vocab_size(parts[0].shape[0], model.config.tensor_model_parallel_size) - parts[0].shape[0]
        return torch.cat([parts[0], parts[0].new_zeros(padding, parts[0].shape[1])]) if padding else parts[0]
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _split(name: str, whole: Tensor, model: PackedGPTModel) -> list[Tensor]:
    """The Hugging Face parts of a whole Megatron tensor; the inverse of ``_merge``."""
    config = model.config
    if name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        dim, heads = config.kv_channels, config.num_attention_heads // config.num_query_groups
        parts = whole.unflatten(0, (config.num_query_groups, -1)).split([heads * dim, dim, dim], 1)
        return [part.flatten(0, 1) for part in parts]
    if name in (EMBEDDING, OUTPUT):
        return [whole[: model.architecture.vocab_size]]
    return list(whole.chunk(2)) if name.endswith("linear_fc1.weight") else [whole]


def _is_sharded(name: str, parameter: Tensor) -> bool:
    is_split = expert_of(name) is None and getattr(parameter, "tensor_model_parallel", False)
    return is_split and parallel_state.get_tensor_model_parallel_world_size() > 1


def _shard(name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    """This tensor-parallel rank's part of the whole."""
    if not _is_sharded(name, parameter):
        return whole
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
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


def _gather_experts(name: str, parameter: Tensor, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of this rank's expert and of the other expert-parallel ranks' in its place, on each of them."""
    size, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    tensors = [torch.empty_like(parameter) for _ in range(size)]
    dist.all_gather(tensors, parameter.detach().contiguous(), group=parallel_state.get_expert_model_parallel_group())
    step = num_experts // size
    return ((with_expert(name, expert_of(name) + (other - rank) * step), tensor) for other, tensor in enumerate(tensors))


def _wholes(name: str, parameter: Tensor, model: PackedGPTModel) -> Iterable[tuple[str, Tensor]]:
    if expert_of(name) is None:
        return [(name, _gather(name, parameter))]
    return _gather_experts(name, parameter, model.architecture.experts.num_experts)


@torch.no_grad()
def export_hf(models: Sequence[PackedGPTModel]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of the model on every rank, in the same order on each.

    A collective: every rank must run it to the end. Tensors are on the device, in the model's dtype, and may share memory with
    the parameters: copy what must outlive the next optimizer step. A tied model yields no lm_head. One pipeline stage only.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        raise ValueError("export needs all layers on one pipeline stage; run with a pipeline-parallel size of 1")
    for model in models:
        for name, parameter in parameter_names(model):
            for whole_name, whole in _wholes(name, parameter, model):
                yield from zip(hf_names(whole_name, model.architecture), _split(whole_name, whole, model), strict=True)


def save_hf(models: Sequence[PackedGPTModel], source: Path, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write a Hugging Face folder: weights in shards of at most ``max_shard_bytes``, config and tokenizer copied from ``source``.

    A collective; rank 0 writes. ``folder`` appears complete or not at all: it is written beside, flushed and renamed, and what
    was there before stays until then. Raises OSError on every rank where rank 0 could not write.
    """
    folder = Path(folder)
    rank = dist.get_rank()
    failure: list[str | None] = [None]
    writer = _ShardWriter(folder, max_shard_bytes) if rank == 0 else None
    for name, tensor in export_hf(models):  # every rank takes part to the end, also after a failed write
        if writer is not None and failure[0] is None:
            failure[0] = _attempt(writer.add, name, tensor)
    if writer is not None:
        if failure[0] is None:
            failure[0] = _attempt(writer.finish, Path(source), models[0].config.params_dtype)
        if failure[0] is not None:
            writer.abandon()
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise OSError(f"could not write the Hugging Face folder {folder}: {failure[0]}; what was there before is unchanged")


def _attempt(action: Callable, *args) -> str | None:
    try:
        action(*args)
    except Exception as error:  # safetensors reports a full disk by a type of its own; the other ranks must hear of any failure
        return str(error) or repr(error)
    return None


class _ShardWriter:
    """Collects tensors and writes a shard whenever the next one would not fit, into a hidden folder beside the final one."""

    def __init__(self, folder: Path, max_shard_bytes: int):
        self.folder = folder
        self.limit = max_shard_bytes
        self.temporary: Path | None = None
        self.pending: dict[str, Tensor] = {}
        self.pending_bytes = self.total_bytes = 0
        self.shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self.temporary is None:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.temporary = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.", dir=self.folder.parent))
        size = tensor.numel() * tensor.element_size()
        if self.pending and self.pending_bytes + size > self.limit:
            self._write()
        self.pending[name] = tensor.cpu().clone().contiguous()
        self.pending_bytes += size
        self.total_bytes += size

    def _write(self) -> None:
        save_file(self.pending, self.temporary / f"shard-{len(self.shards)}", metadata={"format": "pt"})
        self.shards.append(list(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def finish(self, source: Path, dtype: torch.dtype) -> None:
        self._write()
        self._name_shards()
        for name in COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, self.temporary / name)
        _set_dtype(self.temporary / "config.json", dtype)
        os.chmod(self.temporary, 0o755)
        replace_folder(self.temporary, self.folder)

    def _name_shards(self) -> None:
        if len(self.shards) == 1:
            os.rename(self.temporary / "shard-0", self.temporary / SINGLE)
            return
        mapping = {}
        for i, names in enumerate(self.shards):
            file = f"model-{i + 1:05d}-of-{len(self.shards):05d}.safetensors"
            os.rename(self.temporary / f"shard-{i}", self.temporary / file)
            mapping.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": mapping}
        (self.temporary / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))

    def abandon(self) -> None:
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """config.json says in which dtype the weights beside it are; older files call the key torch_dtype."""
    loaded = json.loads(config.read_text())
    key = "torch_dtype" if "torch_dtype" in loaded else "dtype"
    if loaded.get(key) != str(dtype).removeprefix("torch."):
        loaded[key] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(loaded, indent=2) + "\n")


def flush_folder(folder: Path) -> None:
    """Every file and directory under ``folder`` is on the disk when this returns."""
    for parent, _, files in os.walk(folder):
        for path in [*(os.path.join(parent, file) for file in files), parent]:
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def replace_folder(temporary: Path, final: Path) -> None:
    """``temporary`` becomes ``final``, flushed first. What stood there is moved aside, and removed once the new one is in place."""
    flush_folder(temporary)
    aside = None
    if final.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.old.", dir=final.parent))
        os.rename(final, aside / final.name)
    try:
        os.rename(temporary, final)
    except OSError:
        if aside is not None:
            os.rename(aside / final.name, final)
            os.rmdir(aside)
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
