"""``tandem schema``: every field of a config, or of a description of hardware, with its type, default, unit and meaning:
text for people, JSON Schema for editors."""

import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.errors import exists_as
from configs.presets import DESCRIPTIONS
from configs.schema import RunConfig, SftConfig
from configs.schema.hardware import HardwareConfig
from launch.checks.arguments import BadInput

KINDS = {"train": RunConfig, "sft": SftConfig, "hardware": HardwareConfig}
TYPES = dict(integer="whole number", number="number", string="text", boolean="true or false", null="null")
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WIDTH = 120
MOST_CLOSE = 5
"""Most names that the error about an unknown name proposes."""
Node = Mapping[str, Any]


def json_schema(kind: str) -> dict[str, Any]:
    """JSON Schema of a config file of this kind, with the keys that the loader reads beside the fields:
    ``extends`` and short corrections."""
    schema = KINDS[kind].model_json_schema()
    if kind == "hardware":
        return schema
    path = {"type": "string"}
    schema["properties"]["extends"] = {
        "description": "A config file, or several, that this one changes; a relative path starts at this file's folder.",
        "anyOf": [path, {"type": "array", "items": path}],
    }
    schema.pop("required", None)  # a file that this one extends may set them
    if "correction" in schema["properties"]:
        preset = {"enum": list(DESCRIPTIONS)}
        block = {**schema["$defs"]["CorrectionConfig"], "additionalProperties": True}
        systems = {name: {"type": "object"} for name in ("verl", "roll")}
        block["properties"] = {**block["properties"], "preset": preset, **systems}
        description = block.pop("description")
        schema["$defs"]["CorrectionConfig"] = {"description": description, "anyOf": [preset, block]}
    return schema


def print_schema(kind: str, field: str | None, *, as_json: bool) -> None:
    """Raises BadInput if there is no such field, or if JSON is requested for a part."""
    if as_json:
        if field is not None:
            raise BadInput(f"FIELD: {field} has no JSON Schema of its own; leave out --json or the field")
        print(json.dumps(json_schema(kind), indent=2))
        return
    schema = KINDS[kind].model_json_schema()
    entries = list(_entries(schema, schema, ""))
    if field is not None:
        paths, inside = [path for path, _ in entries], (f"{field}.", f"{field}[")
        entries = [(path, text) for path, text in entries if path == field or path.startswith(inside)]
        if not entries:
            # Without the titles of variants.
            known = [path for path in dict.fromkeys(paths) if "=" not in path]
            fix = _fix_of_field(field, known, kind)
            raise BadInput(f"FIELD: {field} is not a field of kind {kind}; {fix}")
    print("\n".join(text for _, text in entries))


def _fix_of_field(wrong: str, known: Sequence[str], kind: str) -> str:
    """The kind that has the name, or close names, or else the blocks to look in."""
    if places := [path for path in known if path.endswith(f".{wrong}")]:
        return exists_as(places)
    command = "tandem schema" if kind == "train" else f"tandem schema --kind {kind}"
    last = wrong.rpartition(".")[2].lower()
    by_name: dict[str, list[str]] = {}
    for path in known:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    names = [name for name in by_name if name == last or (len(last) > 2 and last in name)]
    names += difflib.get_close_matches(last, by_name, n=MOST_CLOSE, cutoff=0.75)
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.75)
    close += sorted((path for name in names for path in by_name[name]), key=len)
    if not close:
        blocks = dict.fromkeys(path.partition(".")[0] for path in known if "." in path)
        return f"`{command}` lists every field, `{command} BLOCK` those of one of: {', '.join(blocks)}"
    first, *others = list(dict.fromkeys(close))[:MOST_CLOSE]
    more = f" Also close: {', '.join(f'`{path}`' for path in others)}." if others else ""
    return f"did you mean `{first}`?{more} `{command}` lists every field"


def _entries(node: Node, root: Node, prefix: str) -> Iterator[tuple[str, str]]:
    """Pairs (path, text) of the fields of a block, each before those inside it."""
    for name, field in node["properties"].items():
        path = f"{prefix}{name}"
        yield path, _entry(path, field, root, required=name in node.get("required", ()))
        inner = f"{path}.NAME" if isinstance(field.get("additionalProperties"), dict) else path
        for tag, block in _blocks(field, root):
            if tag is not None:
                yield f"{inner}.{tag}", _titled(f"-- {inner}.{tag}", block.get("description", ""))
            # The field that only names its variant is left out.
            properties = {n: field for n, field in block["properties"].items() if "const" not in field}
            yield from _entries({**block, "properties": properties}, root, f"{inner}.")


def _entry(path: str, field: Node, root: Node, *, required: bool) -> str:
    unit = ", seconds" if path.endswith("_s") else ""
    default, own = "; required" if required else "", field.get("default")
    is_of_the_fields_inside = isinstance(own, dict) and own
    if not required and "default" in field and not is_of_the_fields_inside:
        default = f"; default {json.dumps(own)}"
    head = f"{path}  ({_type_text(field, root)}{unit}{default})"
    blocks = [block for _, block in _blocks(field, root)]
    about = field.get("description") or (blocks[0].get("description", "") if len(blocks) == 1 else "")
    return _titled(head, about)


def _titled(head: str, about: str) -> str:
    indent, about = " " * 4, " ".join(about.replace("``", "`").split())
    lines = textwrap.wrap(about, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join([head, *lines])


def _type_text(field: Node, root: Node) -> str:
    if "$ref" in field:
        return _type_text(_resolved(field, root), root)
    if "anyOf" in field:
        return ", or ".join(dict.fromkeys(_type_text(option, root) for option in field["anyOf"]))
    if "oneOf" in field:
        tag = field["discriminator"]
        return f"block by {tag['propertyName']}: {' | '.join(tag['mapping'])}"
    if "enum" in field or "const" in field:
        return " | ".join(map(str, field.get("enum") or [field["const"]]))
    if field.get("type") == "object":
        return "block"
    if field.get("type") == "array":
        return "list"
    text = "path" if field.get("format") == "path" else TYPES[field["type"]]
    bounds = [f"{sign} {field[key]:.4g}" for key, sign in BOUNDS.items() if key in field]
    return " ".join([text, " and ".join(bounds)]) if bounds else text


def _resolved(field: Node, root: Node) -> Node:
    return root["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field


def _blocks(field: Node, root: Node) -> Iterator[tuple[str | None, Node]]:
    """Pairs (variant, block) of the blocks that a field may hold. The variant is None for a single block."""
    if "oneOf" in field:
        tag, names = field["discriminator"]["propertyName"], {}
        for name, reference in field["discriminator"]["mapping"].items():
            names.setdefault(reference, []).append(name)
        for option in field["oneOf"]:
            yield f"{tag}={'|'.join(names[option['$ref']])}", _resolved(option, root)
    for option in field.get("anyOf", ()):
        yield from _blocks(option, root)
    for inner in ("items", "additionalProperties"):
        if isinstance(field.get(inner), dict) and field.get("type") in ("array", "object"):
            yield from _blocks(field[inner], root)
    if "$ref" in field and "properties" in (block := _resolved(field, root)):
        yield None, block
