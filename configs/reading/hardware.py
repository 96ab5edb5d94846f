"""Reads a description of hardware: one of ``configs/hardware/`` by its name, or a YAML file."""

import json
from pathlib import Path

from pydantic import ValidationError

from configs.errors import COMMAND_LINE, ConfigError, did_you_mean
from configs.reading.schema_shape import Shape
from configs.reading.wording import problems_of
from configs.reading.yaml_values import read_yaml, show
from configs.schema.hardware import HardwareConfig

FOLDER = Path(__file__).resolve().parent.parent / "hardware"
OPTION = "--gpu"
_MOST_BYTES = 1_000_000


def hardware_names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def read_hardware(given: str) -> HardwareConfig:
    """The description of this name, or in this file: what ends in .yaml or .yml, or has a slash.

    Raises ConfigError with every problem of the name or the file.
    """
    is_file = given.endswith((".yaml", ".yml")) or "/" in given
    if not is_file and given not in hardware_names():
        fix = did_you_mean(given, hardware_names(), "descriptions")
        error = "no description of hardware has this name"
        raise _refusal(given, error, f"{fix}, or a file FILE.yaml of your own")
    path = Path(given) if is_file else FOLDER / f"{given}.yaml"
    tree = read_yaml(_text_of(path), str(path))
    if tree is None or not isinstance(tree.data, dict):
        value = "(empty)" if tree is None else show(tree.plain())
        error = "a description of hardware is a mapping of keys"
        raise ConfigError.of(
            str(path), "(the whole file)", value, error, f"begin with a copy of {FOLDER / 'h100.yaml'}"
        )
    try:
        return HardwareConfig.model_validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        raise ConfigError([*problems_of(error, tree, Shape.of(HardwareConfig))]) from error


def _text_of(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise _refusal(str(path), "this is no regular file", "name a YAML file")
        if path.stat().st_size > _MOST_BYTES:
            raise _refusal(str(path), "no description of hardware is that large", "name a YAML file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        fix = f"correct the name, or take one of {', '.join(hardware_names())}"
        raise _refusal(str(path), f"the file cannot be read ({reason})", fix) from error


def _refusal(given: str, error: str, fix: str) -> ConfigError:
    return ConfigError.of(COMMAND_LINE, OPTION, given, error, fix)
