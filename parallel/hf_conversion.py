"""Weights between a Hugging Face folder and Megatron's parameters: streaming, exact to the bit, over tensor-parallel ranks.

A Megatron tensor is one or several Hugging Face tensors: q, k and v are interleaved by key/value group, gate and up are stacked.
Both directions move one Megatron tensor at a time.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import parallel.megatron_setup  # noqa: F401  # isort: skip - before megatron.core
from megatron.core import parallel_state

from parallel.layout import padded_vocab_size
from parallel.megatron_model import PackedGPTModel

MAX_SHARD_BYTES = 4 * 1024**3
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What a folder needs beside weights to be served and trained from: copied as they are.
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_VALUE_HEAD = "value_head.weight"
_TOP = {_EMBEDDING: "model.embed_tokens.weight", "decoder.final_layernorm.weight": "model.norm.weight", _OUTPUT: "lm_head.weight"}
_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),  # Transformer Engine fuses the norm
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{x}_proj.bias" for x in "qkv"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
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
    """(name with the global layer number, parameter) of this rank; a critic's head is no part of a Hugging Face folder."""
    for name, parameter in model.named_parameters():
        if name == _VALUE_HEAD:
            continue
        if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            name = f"decoder.layers.{model.decoder.layers[int(found[1])].layer_number - 1}.{found[2]}"
        yield name, parameter


def hf_names(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors that a Megatron tensor is made of, in order."""
    if name in _TOP:
        return (_TOP[name],)
    layer, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name).groups()
    return tuple(f"model.layers.{layer}.{suffix}" for suffix in _LAYER[rest])


@torch.no_grad()
def load_hf(models: Sequence[PackedGPTModel], folder: Path) -> None:
    """Fill every parameter of this rank from ``folder``, converting to the parameter's dtype. A critic's head stays as it is.

    Raises ValueError naming tensors that are missing, of another shape than config.json says, or left over.
    """
    weights = HuggingFaceWeights(folder)
    _check_names(weights, models)
    for model in models:
        for name, parameter in parameter_names(model):
            if name == _OUTPUT and model.architecture.tied:  # the last pipeline stage's copy of the tied embedding
                name = _EMBEDDING
            parts = [weights.read(part) for part in hf_names(name)]
            _check_shapes(name, parts, parameter, model)
            parameter.copy_(_shard(name, _merge(name, parts, model), parameter))


def _check_names(weights: HuggingFaceWeights, models: Sequence[PackedGPTModel]) -> None:
    """Every rank compares the names of the whole model, whatever stage it holds."""
    architecture = models[0].architecture
    has = {"bias": architecture.qkv_bias, "qk_norm": architecture.qk_norm}
    wanted = {_TOP[_EMBEDDING], _TOP["decoder.final_layernorm.weight"]} | (set() if architecture.tied else {_TOP[_OUTPUT]})
    for layer in range(architecture.num_layers):
        for rest in _LAYER:
            needs = "bias" if rest.endswith(".bias") else "qk_norm" if re.search(r"[qk]_layernorm", rest) else None
            if has.get(needs, True):
                wanted.update(hf_names(f"decoder.layers.{layer}.{rest}"))
    missing = sorted(wanted - weights.names)
    if missing:
        raise ValueError(f"{weights.folder} lacks {len(missing)} tensors that its config.json asks for: {', '.join(missing[:5])}")
    # A tied model's folder may repeat the embedding as lm_head; config.json decides, as in transformers.
    left_over = sorted(n for n in weights.names - wanted if n != _TOP[_OUTPUT] and not _IGNORED.match(n))
    if left_over:
        shown = ", ".join(left_over[:5])
        raise ValueError(f"{weights.folder} has {len(left_over)} tensors that its config.json does not account for: {shown}")


def _check_shapes(name: str, parts: Sequence[Tensor], parameter: Tensor, model: PackedGPTModel) -> None:
    a = model.architecture
    rows = {
        "q_proj": a.num_heads * a.head_dim, "k_proj": a.num_kv_heads * a.head_dim, "v_proj": a.num_kv_heads * a.head_dim,
        "gate_proj": a.intermediate_size, "up_proj": a.intermediate_size, "o_proj": a.hidden_size, "down_proj": a.hidden_size,
        "q_norm": a.head_dim, "k_norm": a.head_dim, "embed_tokens": a.vocab_size, "lm_head": a.vocab_size,
    }  # fmt: skip
    columns = {"o_proj": a.num_heads * a.head_dim, "down_proj": a.intermediate_size}
    for part_name, part in zip(hf_names(name), parts, strict=True):
        module = part_name.split(".")[-2]
        wanted = (rows.get(module, a.hidden_size),) + ((columns.get(module, a.hidden_size),) if parameter.dim() == 2 else ())
        if tuple(part.shape) != wanted:
            raise ValueError(f"tensor {part_name} has shape {tuple(part.shape)}; config.json asks for {wanted}")


def _merge(name: str, parts: Sequence[Tensor], model: PackedGPTModel) -> Tensor:
    """The whole Megatron tensor from its Hugging Face parts."""
    if "linear_qkv" in name and len(parts) == 3:
        groups = model.config.num_query_groups
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)
    if name in (_EMBEDDING, _OUTPUT):
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
    if name in (_EMBEDDING, _OUTPUT):
        return [whole[: model.architecture.vocab_size]]
    return list(whole.chunk(2)) if name.endswith("linear_fc1.weight") else [whole]


def _is_sharded(parameter: Tensor) -> bool:
    return getattr(parameter, "tensor_model_parallel", False) and parallel_state.get_tensor_model_parallel_world_size() > 1


def _shard(name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    """This tensor-parallel rank's part of the whole."""
    if not _is_sharded(parameter):
        return whole
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if name.endswith("linear_fc1.weight"):  # gate and up are stacked: each is sharded by itself
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, parameter.partition_dim)[rank]


def _gather(name: str, parameter: Tensor) -> Tensor:
    """The whole tensor, on every tensor-parallel rank."""
    local = parameter.detach()
    if not _is_sharded(parameter):
        return local
    shards = [torch.empty_like(local) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(shards, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    if name.endswith("linear_fc1.weight"):
        return torch.cat([torch.cat([shard.chunk(2)[half] for shard in shards]) for half in (0, 1)])
    return torch.cat(shards, parameter.partition_dim)


@torch.no_grad()
def export_hf(models: Sequence[PackedGPTModel]) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) of the model on every rank, in the same order on each.

    A collective: every rank must run it to the end. Tensors are on the device, in the model's dtype, and may share memory with
    the parameters: copy what must outlive the next optimizer step. A tied model yields no lm_head. One pipeline stage only.
    """
    for model in models:
        for name, parameter in parameter_names(model):
            whole = _gather(name, parameter)
            yield from zip(hf_names(name), _split(name, whole, model), strict=True)


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
