"""Check of a Hugging Face folder's weights against its config.json, only by the files' headers: in
milliseconds, without torch.

Names and shapes are those that ``hf_conversion`` reads: a folder that passes fills all parameters of the learner.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from parallel.planning.architecture import Architecture
from parallel.weights.hf_names import OUTPUT, TOP, all_hf_names, hf_shapes, is_left_out

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Of a folder of ``peft``."""
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files that a folder needs beside weights for serving and training."""
FLOATING = ("F64", "F32", "F16", "BF16")
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq$")
"""Buffers of some published checkpoints that models do not need."""
_OF_MISTRAL = "consolidated.safetensors"
_FEW = 3
_LFS_POINTER = b"version https://git-lfs"
_DOWNLOAD_AGAIN = "download or copy it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    shape: tuple[int, ...]
    dtype: str
    """Name in safetensors: F32, BF16, ..."""


class WeightsUnreadable(ValueError):
    """A file of the folder is missing or broken; the message names it and the fix."""


def weight_problems(folder: Path, architecture: Architecture) -> list[str]:
    """The reasons why the learner cannot load the folder's weights, each as "problem; fix"."""
    try:
        headers = read_headers(folder)
    except WeightsUnreadable as error:
        return str(error).split("\n")
    return header_problems(headers, architecture, Path(folder))


def header_problems(
    headers: Mapping[str, TensorHeader], architecture: Architecture, folder: Path
) -> list[str]:
    """The reasons why the learner cannot load tensors of these ``headers``, each as "problem; fix"."""
    problems = name_problems(headers.keys(), architecture, folder)
    return [*problems, *_shape_problems(headers, hf_shapes(architecture), folder)]


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of the folder, by its name. Raises WeightsUnreadable, with a line for each broken file."""
    mapping = shard_of_names(folder)
    files = sorted({SINGLE} if mapping is None else set(mapping.values()))
    _refuse_rivals(Path(folder), files, has_index=mapping is not None)
    all_headers: dict[str, TensorHeader] = {}
    broken, unnamed = [], []
    for file in files:
        try:
            headers = read_header(Path(folder) / file)
        except WeightsUnreadable as error:
            broken.append(str(error))
        else:
            named = {n for n in headers if mapping is None or mapping.get(n) == file}
            all_headers |= {n: headers[n] for n in named}
            unnamed += [(file, n) for n in sorted(headers.keys() - named) if not IGNORED.match(n)]
    if len(broken) > _FEW:
        broken[_FEW:] = [f"{len(broken) - _FEW} further broken files; {_DOWNLOAD_AGAIN}"]
    if broken:
        raise WeightsUnreadable("\n".join(broken))
    lost = sorted((mapping or {}).keys() - all_headers.keys())
    if mapping and lost:
        file = mapping[lost[0]]
        raise WeightsUnreadable(
            f"{INDEX} says that {file} holds {lost[0]}, which it does not ({len(lost)} such tensors); index and files are of two models: "
            "download or copy the folder again"
        )
    if unnamed:
        file, name = unnamed[0]
        elsewhere = f"in {mapping[name]}" if mapping and name in mapping else "nowhere"
        raise WeightsUnreadable(
            f"{file} holds {name}, which by {INDEX} is {elsewhere} ({len(unnamed)} such tensors), and SGLang loads both; index and files "
            "are of two models: download or copy the folder again"
        )
    return all_headers


def _refuse_rivals(folder: Path, files: Sequence[str], *, has_index: bool) -> None:
    """Without an index SGLang loads every file, one over the other, but not what Mistral's own programs read. Beside one
    transformers loads the single file."""
    visible = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith(".")}
    rivals = visible & {SINGLE} if has_index else visible - {_OF_MISTRAL}
    if wrong := sorted(rivals - {*files}):
        names = f"the files of {INDEX}" if has_index else SINGLE
        raise WeightsUnreadable(
            f"{folder} has {', '.join(wrong[:_FEW])} beside {names}, and programs differ in which of them they load; move away what is not "
            "this model"
        )


def shard_of_names(folder: Path) -> dict[str, str] | None:
    """{tensor: file} of the folder's index; None if there is no index. Raises WeightsUnreadable."""
    index = Path(folder) / INDEX
    if not index.is_file():
        return None
    try:
        mapping = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsUnreadable(
            f"{index} is no index of safetensors ({_error_text(error)}); {_DOWNLOAD_AGAIN}"
        ) from error
    files = mapping.values() if isinstance(mapping, dict) else ()
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise WeightsUnreadable(f"{index} names no files of the folder under `weight_map`; {_DOWNLOAD_AGAIN}")
    missing = sorted({file for file in files if not (Path(folder) / file).is_file()})
    if missing:
        shown = ", ".join(missing[:_FEW])
        raise WeightsUnreadable(
            f"{INDEX} names {len(missing)} files that are not there: {shown}; download or copy them into {folder}"
        )
    return mapping


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file. Raises WeightsUnreadable naming the file, the problem and the fix.

    The library compares every offset with the file's size: a truncated file does not open.
    """
    try:
        with safe_open(path, framework="np") as file:
            slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - no mapping
            return {
                name: TensorHeader(shape=tuple(part.get_shape()), dtype=part.get_dtype())
                for name, part in slices
            }
    except (SafetensorError, OSError) as error:
        raise WeightsUnreadable(
            f"{path} is no readable safetensors file: {_failure_text(path, error)}; {_DOWNLOAD_AGAIN}"
        ) from error


def _failure_text(path: Path, error: Exception) -> str:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as unreadable:
        return unreadable.strerror or str(unreadable)
    if size == 0:
        return "it is empty"
    if start == _LFS_POINTER:
        return "it is a pointer of Git LFS, not the weights themselves (`git lfs pull` fetches them)"
    text = _error_text(error)
    if "incomplete metadata" in text or "not fully covered" in text:
        return f"its {size:,} bytes do not fit its header, so it was cut short or overwritten"
    return f"{text.removeprefix('Error while deserializing header: ')} ({size:,} bytes)"


Shapes = Mapping[str, tuple[int, ...]]


def name_problems(names: Set[str], architecture: Architecture, folder: Path) -> Iterator[str]:
    """The tensors that the whole model lacks, and those that no part of it is made of, each as "problem; fix"."""
    expected = all_hf_names(architecture)
    if missing := sorted(expected - names):
        yield f"{folder} lacks {len(missing)} tensors that its config.json asks for: {_list_text(missing)}; {_TWO_MODELS}"
    # A tied model's folder may repeat the embedding as lm_head. Whether it is the same is seen when it is loaded.
    left_over = sorted(
        name
        for name in names - expected
        if name != TOP[OUTPUT] and not IGNORED.match(name) and not is_left_out(name, architecture)
    )
    if left_over:
        yield f"{folder} has {len(left_over)} tensors that its config.json does not account for: {_list_text(left_over)}; {_TWO_MODELS}"


_TWO_MODELS = "use the config.json that came with these weights"


def _shape_problems(headers: Mapping[str, TensorHeader], shapes: Shapes, folder: Path) -> Iterator[str]:
    wrong = [name for name in sorted(shapes.keys() & headers.keys()) if headers[name].shape != shapes[name]]
    if wrong:
        shown = _list_text([f"{name} is {headers[name].shape}, not {shapes[name]}" for name in wrong])
        yield f"{len(wrong)} tensors of {folder} have another shape than its config.json asks for: {shown}; {_TWO_MODELS}"
    other = [
        f"{name} ({headers[name].dtype})"
        for name in sorted(shapes.keys() & headers.keys())
        if headers[name].dtype not in FLOATING
    ]
    if other:
        yield f"{len(other)} tensors of {folder} are quantised: {_list_text(other)}; use the model as it was before, in F32, F16 or BF16"


def _list_text(items: list[str]) -> str:
    return ", ".join(items[:_FEW]) + (", ..." if len(items) > _FEW else "")


def _error_text(error: Exception) -> str:
    text = str(error) if not isinstance(error, KeyError) else f"no key {error}"
    return text if len(text) <= 160 else f"{text[:160]}..."
