"""Hugging Face folders of safetensors: read a tensor at a time, written by several processes, all or nothing.

Each pipeline stage's writer (``ShardWriter``) puts its shards into one hidden folder beside the final one. The
first stage names all shards, writes the index, config and tokenizer, and renames the folder
(``finish_folder``).
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from parallel.weights.hf_headers import COMPANIONS, INDEX, SINGLE, shard_of_names

MAX_SHARD_BYTES = 4 * 1024**3
TEMPLATES = "additional_chat_templates"
"""A folder of those beside the default one, such as one that renders tools."""
_FURTHER = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


class HuggingFaceWeights:
    """The tensors of a folder's safetensors, read one at a time. Raises ValueError naming an unreadable file."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._files = self._locate_tensors()

    def _locate_tensors(self) -> dict[str, Path]:
        mapping = shard_of_names(self.folder)
        if mapping is not None:
            return {name: self.folder / file for name, file in mapping.items()}
        single = self.folder / SINGLE
        if not single.is_file():
            raise ValueError(
                f"model.path={self.folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors"
            )
        return dict.fromkeys(self._open_file(single).keys(), single)

    @staticmethod
    def _open_file(path: Path):
        try:
            return safe_open(path, framework="pt", device="cpu")
        except Exception as error:  # safetensors' own type for a broken file, OSError for a missing one
            raise ValueError(f"{path} is no readable safetensors file: {error}") from error

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def read(self, name: str) -> Tensor:
        with self._open_file(self._files[name]) as file:
            return file.get_tensor(name)


class PerturbedWeights(HuggingFaceWeights):
    """The folder's weights with noise that is seeded by each tensor's name, and so the same for all readers.

    t' = t + (0.01 + 0.05 std(t)) e, e standard normal: every tensor changes, and the model still makes sense.
    """

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        spread = tensor.float().std().item() if tensor.numel() > 1 else 0.0
        return (tensor.float() + (0.01 + 0.05 * spread) * noise).to(tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of a folder that is being written."""

    file: str
    names: tuple[str, ...]
    bytes: int
    """Bytes of its tensors."""


def hidden_folder(final: Path) -> Path:
    """A new hidden folder beside ``final`` to write into."""
    final.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))


def share_as_new(hidden: Path) -> None:
    """Give a folder of ``hidden_folder``, which only its owner can read, the mode of any new folder in its place, and its
    files that of new files: safetensors, too, writes only for the owner. A new folder shows the mode: the umask belongs to all
    threads and cannot be read without a change, and a group's folder hands on more than it."""
    fresh = hidden / ".mode"
    fresh.mkdir()
    mode = stat.S_IMODE(fresh.stat().st_mode)
    fresh.rmdir()
    for path in filter(Path.is_file, hidden.iterdir()):
        os.chmod(path, mode & 0o666)
    os.chmod(hidden, mode)


class ShardWriter:
    """Collects tensors and writes a shard whenever the next one would not fit. ``number`` is the writer's."""

    def __init__(self, folder: Path, *, number: int, max_shard_bytes: int):
        self.shards: list[Shard] = []
        self._folder, self._number, self._limit = folder, number, max_shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
            self.flush()
        self._pending[name] = tensor.cpu().clone().contiguous()
        self._pending_bytes += tensor.nbytes

    def flush(self) -> None:
        """Write the collected tensors to the disk."""
        if not self._pending:
            return
        file = f"stage-{self._number}-shard-{len(self.shards)}"
        save_file(self._pending, self._folder / file, metadata={"format": "pt"})
        _flush_path(self._folder / file)
        self.shards.append(Shard(file=file, names=tuple(self._pending), bytes=self._pending_bytes))
        self._pending, self._pending_bytes = {}, 0


def finish_folder(
    temporary: Path, final: Path, shards: Sequence[Shard], *, source: Path, dtype: torch.dtype
) -> None:
    """Complete ``temporary`` with its ``shards`` by config and tokenizer of ``source``, and rename it to
    ``final``."""
    _name_shards(temporary, shards)
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, temporary / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, temporary / TEMPLATES)
    _amend_config(temporary / "config.json", dtype)
    share_as_new(temporary)
    replace_folder(temporary, final)


def _name_shards(folder: Path, shards: Sequence[Shard]) -> None:
    if len(shards) == 1:
        os.rename(folder / shards[0].file, folder / SINGLE)
        return
    mapping: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(folder / shard.file, folder / file)
        mapping |= dict.fromkeys(shard.names, file)
    index = {"metadata": {"total_size": sum(shard.bytes for shard in shards)}, "weight_map": mapping}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _amend_config(config: Path, dtype: torch.dtype) -> None:
    """Write the weights' dtype into config.json, under ``dtype`` or ``torch_dtype``, the older key, as it has them, and that
    there are no layers for further tokens (``Architecture.further_layers``) and no quantised weights."""
    content = json.loads(config.read_text(encoding="utf-8"))
    is_quantised = content.pop("quantization_config", None) is not None
    keys = [key for key in ("dtype", "torch_dtype") if key in content] or ["dtype"]
    changes: dict[str, object] = dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    changes |= {further: 0 for further in _FURTHER if content.get(further)}
    if is_quantised or content | changes != content:
        config.write_text(json.dumps(content | changes, indent=2) + "\n")


def flush_folder(folder: Path) -> None:
    """Flush every file and directory under ``folder`` to the disk."""
    for parent, _, files in os.walk(folder):
        for path in [*(os.path.join(parent, file) for file in files), parent]:
            _flush_path(path)


def _flush_path(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(temporary: Path, final: Path) -> None:
    """Flush ``temporary`` and rename it to ``final``. An older ``final`` is moved aside, then removed."""
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
    _flush_path(final.parent)
