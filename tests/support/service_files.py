"""What TensorBoard's own reader and a reader of W&B's offline files find in a run folder."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[tuple[int, str], float]
"""By step and name."""


def values_of(rows: list[dict]) -> Values:
    return {
        (row["step"], name): value
        for row in rows
        for name, value in row.items()
        if name not in ("step", "elapsed_s") and value is not None
    }


def tensorboard_values(folder: Path) -> tuple[Any, Values]:
    """TensorBoard's reader of the one event file, and all scalars."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (folder / "tensorboard").iterdir()
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    return events, {(event.step, name): event.value for name in names for event in events.Scalars(name)}


def wandb_records(folder: Path) -> Iterator:
    """The records of an offline run: a log of LevelDB's form behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        whole, place = whole + content[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_runs(folder: Path) -> list[tuple[str, dict]]:
    """(id, values by step and name) of each copy, the oldest first."""
    runs = []
    for copy in sorted((folder / "wandb").glob("offline-run-*")):
        records = list(wandb_records(copy))
        values = {
            (record.history.step.num, "/".join(item.nested_key) or item.key): json.loads(item.value_json)
            for record in records
            for item in record.history.item
        }
        (run,) = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
        runs.append((run, {place: value for place, value in values.items() if not place[1].startswith("_")}))
    return runs
