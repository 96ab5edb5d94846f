"""Reads a description of hardware: one of ``configs/hardware/`` by its name, or a YAML file."""

import json
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from configs.errors import COMMAND_LINE, ConfigError, Problem, did_you_mean
from configs.loader import read_mapping
from configs.reading.schema_shape import Shape
from configs.reading.wording import problems_of
from configs.schema.hardware import HardwareConfig

FOLDER = Path(__file__).resolve().parent.parent / "hardware"
OPTION = "--gpu"


def hardware_names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def read_hardware(given: str) -> HardwareConfig:
    """The description of this name, or in this file: a text that ends in .yaml or .yml, or has a slash, names
    a file.

    Raises ConfigError with every problem of the name or the file.
    """
    is_file = given.endswith((".yaml", ".yml")) or "/" in given
    if not is_file and given not in hardware_names():
        fix = did_you_mean(given, hardware_names(), "descriptions")
        error = "no description of hardware has this name"
        raise ConfigError.of(COMMAND_LINE, OPTION, given, error, f"{fix}, or your own file FILE.yaml")
    path = Path(given) if is_file else FOLDER / f"{given}.yaml"
    try:
        tree = read_mapping(path, COMMAND_LINE, OPTION)
    except ConfigError as error:
        raise ConfigError([*map(_with_names, error.problems)]) from error
    try:
        return HardwareConfig.model_validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        raise ConfigError([*problems_of(error, tree, Shape.of(HardwareConfig))]) from error


def _with_names(problem: Problem) -> Problem:
    """With the descriptions that are there in its fix, where it is of the file's name."""
    if problem.field != OPTION:
        return problem
    return replace(problem, fix=f"{problem.fix}, or take one of {', '.join(hardware_names())}")
