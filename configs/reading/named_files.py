"""Finds the files and folders that a config names and that do not exist, with the line that names them."""

import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from configs.errors import Problem
from configs.reading.yaml_values import Value
from configs.schema import RunConfig, SftConfig
from configs.schema.run import JsonlSftData
from configs.schema.task import FileTask

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack")
"""Mostly pickles, which are not read."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder with any one of these holds a tokenizer."""
MODEL_TO_CHOOSE = Path("CHANGE/ME")
"""In the config that ``tandem init`` writes without a model."""
_MADE_HERE = {
    "countdown-tiny-random": "tandem make-tiny-model {path}",
    "countdown-tiny-warm": "tandem make-tiny-model models/countdown-tiny-random`, then `tandem sft configs/recipes/countdown_tiny_sft.yaml",
}
"""By the folder's name: the commands that make the tiny models of the recipes, which no hub has."""
_BY_OWNER = {
    "Qwen": "Qwen2.5-0.5B-Instruct Qwen2.5-1.5B-Instruct Qwen2.5-3B-Instruct Qwen2.5-7B-Instruct Qwen2.5-14B-Instruct "
    "Qwen2.5-32B Qwen2.5-72B-Instruct Qwen3-0.6B Qwen3-4B Qwen3-8B Qwen3-14B Qwen3-32B Qwen3-30B-A3B Qwen3-235B-A22B",
    "meta-llama": "Llama-3.1-8B-Instruct Llama-3.1-70B-Instruct",
}
HUB_NAMES = {name: f"{owner}/{name}" for owner, names in _BY_OWNER.items() for name in names.split()}
"""OWNER/NAME at the Hugging Face hub by the name of the folder under ``models/`` in which recipes expect the
model. A folder's name lacks the owner, and an error should have a command to paste."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SIMILAR_MODELS = 3


def check_files(config: RunConfig | SftConfig, tree: Value | None = None) -> list[Problem]:
    """A problem for each file that is missing or of the wrong kind. ``tree``: the YAML of the config, if its
    lines are known."""
    tree, problems = tree or Value({}, "config"), []
    for field, path, error, fix in _file_problems(config):
        where, error = tree.where_of(field.split(".")), f"{error}: {path.absolute()}"
        problems.append(Problem(where=where, field=field, value=str(path), error=error, fix=fix))
    return problems


def close_name(path: Path, *, is_folder: bool = False, but: Collection[Path] = ()) -> str | None:
    """A fix that names a similar file (or folder) beside ``path``, but none of ``but``; None if there is
    none."""
    unmeant = {os.path.realpath(other) for other in (path, *but)}
    try:
        beside = [p for p in path.parent.iterdir() if (p.is_dir() if is_folder else p.is_file())]
    except OSError:
        return f"the folder {path.parent} does not exist either" if not path.parent.exists() else None
    names = [p.name for p in beside if os.path.realpath(p) not in unmeant]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean `{path.parent / close[0]}`?" if close else None


def _file_problems(config: RunConfig | SftConfig) -> Iterator[tuple[str, Path, str, str]]:
    """Rows (field, path, error, fix)."""
    yield from _model_problems("model.path", config.model.path, TOKENIZERS)
    for field, model in config.other_models.items() if isinstance(config, RunConfig) else ():
        # It reads the policy's tokens, so its folder needs no tokenizer.
        yield from _model_problems(f"{field}.path", model.path, ())
    for field, path in _data_files(config):
        if not path.is_file():
            error = "a file is wanted, this is a folder" if path.is_dir() else "no such file"
            yield field, path, error, _fix_data_path(path)
    resume = config.resume if isinstance(config, RunConfig) else None
    if resume is not None and not resume.is_dir():
        fix = _fix_path(resume, "name a folder under launch.runs_dir, or remove resume", is_folder=True)
        yield "resume", resume, "no such run folder", fix


def _model_problems(
    field: str, model: Path, tokenizers: tuple[str, ...]
) -> Iterator[tuple[str, Path, str, str]]:
    if not model.is_dir():
        error = "a Hugging Face folder is wanted, this is a file" if model.exists() else "no such folder"
        yield field, model, error, fix_model_path(model)
        return
    if not (model / "config.json").is_file():
        yield field, model, "the folder has no config.json", _fix_model_folder(model)
    elif (missing := missing_weights(model)) is not None:
        yield field, model, *missing
    elif tokenizers and not any((model / name).is_file() for name in tokenizers):
        yield field, model, f"the folder has no {' or '.join(tokenizers)}", _fix_incomplete(model)


_COMPLETE_FOLDER = (
    "name the folder that holds config.json, *.safetensors and the tokenizer, or download what is missing"
)


def _fix_model_folder(model: Path, *files: str) -> str:
    """Some published models come inside another folder."""
    inside = sorted(path.parent for path in model.glob("*/config.json"))
    return f"did you mean `{inside[0]}`?" if len(inside) == 1 else _fix_incomplete(model, *files)


def _fix_incomplete(model: Path, *files: str) -> str:
    command = _download(model, *files)
    return _COMPLETE_FOLDER if command is None else f"download what is missing: `{command}`"


def _download(model: Path, *files: str) -> str | None:
    """The command that puts a model of the hub (of it the ``files`` alone, if any are given) where the config wants it;
    None where its name at the hub is not known. A path like OWNER/NAME goes under models/."""
    if is_hub_id(model):
        name, folder = str(model), _folder_of(model)
    elif model.name in HUB_NAMES:
        name, folder = HUB_NAMES[model.name], model
    else:
        return None
    return shlex.join(["hf", "download", name, *files, "--local-dir", str(folder)])


def _folder_of(hub_id: Path) -> Path:
    return Path("models") / hub_id.name


def missing_weights(model: Path) -> tuple[str, str] | None:
    """(error, fix) of a folder without the safetensors files that are read; None if it has them."""
    if any((model / name).is_file() for name in WEIGHTS):
        return None
    error = f"the folder has no {' or '.join(WEIGHTS)}"
    others = sorted(path.name for pattern in OTHER_WEIGHTS for path in model.glob(pattern))
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    if shards:
        instead = f", though it has {shards[0]}"
        fix = f"download {WEIGHTS[1]} too; a single file is to be named {WEIGHTS[0]}"
    elif others:
        instead = f", but {others[0]}, which is not read: it could run foreign code, or is of another program"
        fix = (
            "use a copy with safetensors; most models have one, and `transformers` makes one of a model that you trust: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    else:
        instead, fix = "", _fix_incomplete(model)
    return error + instead, fix


def _data_files(config: RunConfig | SftConfig) -> Iterator[tuple[str, Path]]:
    if isinstance(config, SftConfig):
        if isinstance(config.data, JsonlSftData):
            yield "data.path", config.data.path
    elif isinstance(config.task, FileTask):
        yield from ((f"task.{field}", path) for field, path in config.task.files.items())


def fix_model_path(model: Path, *files: str) -> str:
    """The fix for a model's folder that is missing, or is not a model's. ``files``: those that the command
    downloads; none: all."""
    if model.is_dir():
        return _fix_model_folder(model, *files)
    if model.exists():
        return _fix_path(model, _COMPLETE_FOLDER)
    if model == MODEL_TO_CHOOSE:
        return f"set it to a Hugging Face folder of yours{_other_models()}"
    if model.name in _MADE_HERE and not model.is_symlink():
        return f"make it: `{_MADE_HERE[model.name].format(path=shlex.quote(str(model)))}`{_other_models()}"
    command = None if model.is_symlink() else _download(model, *files)
    if command is not None:
        then = f", then model.path={_folder_of(model)}" if is_hub_id(model) else ""
        return f"nothing is downloaded automatically: `{command}`{then}{_other_models()}"
    fix = f"download the checkpoint to this disk first, and name its folder{_other_models()}"
    return _fix_path(model, fix, is_folder=True)


def _other_models() -> str:
    """The newest model folders at the usual places."""
    places = ("*", "models/*", "runs/quickstart-*/*", "runs/*/hf")
    folders = {path.parent for place in places for path in Path().glob(f"{place}/config.json")}
    newest = sorted((path for path in folders if missing_weights(path) is None), key=_age)[:_SIMILAR_MODELS]
    return f" (models that are here: {', '.join(map(str, newest))})" if newest else ""


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _fix_data_path(path: Path) -> str:
    if path.is_dir():
        patterns = ("*.jsonl", "*.parquet", "*/*.parquet")
        inside = sorted(file for pattern in patterns for file in path.glob(pattern))
        return f"name a file in it, such as {inside[0]}" if inside else "name a .jsonl or .parquet file"
    if is_hub_id(path) and path.suffix not in (".jsonl", ".parquet", ".json", ".ndjson"):
        fetch = f"`hf download {path} --repo-type dataset --local-dir data/{path.name}`"
        return f"nothing is downloaded automatically: {fetch}, then name its .jsonl or .parquet file"
    return _fix_path(path, "correct the path")


def is_hub_id(path: Path) -> bool:
    """Whether this looks like OWNER/NAME of the Hugging Face hub rather than a path."""
    if _HUB_ID.fullmatch(str(path)) is None or path.parent.exists():
        return False
    return path.parts[0] not in ("models", "data", "runs", "checkpoints")


def _fix_path(path: Path, otherwise: str, *, is_folder: bool = False) -> str:
    if path.is_symlink() and not path.exists():
        return f"this is a symbolic link to {os.readlink(path)}, which is not there; correct the link"
    if not path.exists() and path.parent.exists() and (close := close_name(path, is_folder=is_folder)):
        return close
    start = "" if path.is_absolute() else f"; relative paths start at the current folder, {Path.cwd()}"
    return f"{otherwise}{start}"
