"""The model that a checkpoint of adapters belongs to, which the checkpoint itself does not hold.

``adapters.json`` in the checkpoint names it, with the adapters' settings and a fingerprint of its files. A run with
another model, or with another product than alpha / rank B A, does not load it: no shape would tell.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from configs.schema.learner import LoraConfig

ADAPTERS = "adapters.json"
END_BYTES = 2**20
"""Bytes at the beginning and at the end of each file that are hashed."""


def describe(base: Path, lora: LoraConfig) -> dict[str, Any]:
    """The content of ``adapters.json``. Raises OSError for a folder that cannot be read."""
    return {
        "base_model": str(base.absolute()),
        "base_fingerprint": fingerprint(base),
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": sorted(lora.targets),
    }


def fingerprint(folder: Path) -> str:
    """Of the names, sizes and ends of a folder's safetensors. The ends have the header and some weights of each file; all
    bytes of a large model would take minutes."""
    found = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            found.update(file.read(END_BYTES))
            file.seek(max(size - END_BYTES, 0))
            found.update(file.read(END_BYTES))
    return found.hexdigest()


def why_not(folder: Path, described: Mapping[str, Any] | None) -> str | None:
    """Why the checkpoint in ``folder`` is none of this run's model; None if it is. described: this run's,
    None for a run that trains every weight."""
    path = folder / ADAPTERS
    saved = json.loads(path.read_text()) if path.is_file() else None
    if saved is None or described is None:
        if saved is described:
            return None
        what = "every weight and no adapters" if saved is None else f"only adapters of {saved['base_model']}"
        wants = "learner.lora" if saved is None else "no learner.lora"
        return f"it holds {what}, and this run has {wants}"
    if saved["base_fingerprint"] != described["base_fingerprint"]:
        return f"its adapters belong to {saved['base_model']}, whose weights are not those of {described['base_model']}"
    changed = [name for name in ("rank", "alpha", "targets") if saved[name] != described[name]]
    if changed:
        shown = ", ".join(f"{name}={saved[name]} (now {described[name]})" for name in changed)
        return f"its adapters have learner.lora {shown}"
    return None
