"""Ranks that take weights out of the learner, in several layouts one after another in one set of processes."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from configs.schema.layout import LayoutConfig, parse_layout
from parallel.engine import MegatronEngine
from parallel.megatron.groups import destroy_groups
from parallel.weights import hf_conversion, hf_files
from parallel.weights.hf_files import PerturbedWeights
from tests.support.megatron_workers import make_engine
from trainer.weight_sync import in_turn


def engines(folder: Path, layouts: Sequence[str]) -> Iterator[tuple[LayoutConfig, MegatronEngine]]:
    for text in layouts:
        yield parse_layout(text), make_engine(folder, layout=parse_layout(text))
        destroy_groups()


def work_round_trips(folder: Path, layouts: Sequence[str], out: Path) -> dict[str, list[str]]:
    """The folder through each layout and out again, to ``out/LAYOUT``; perturbed, to ``out/LAYOUT-other``; adapters to it, to
    ``out/LAYOUT-adapter``. What this rank exported."""
    exported = {}
    for text, (layout, engine) in zip(layouts, engines(folder, layouts), strict=True):
        shapes = [(name, tuple(tensor.shape)) for name, tensor in engine.export_hf()]
        assert list(chain.from_iterable(engine.export_plan())) == shapes
        exported[text] = [name for name, _ in shapes]
        hf_conversion.save_hf(engine.chunks, folder, out / text, max_shard_bytes=20_000)
        hf_conversion.load_weights(engine.chunks, PerturbedWeights(folder))
        engine.save_hf(out / f"{text}-other")
        make_engine(folder, layout=layout, lora={"rank": 4}).save_adapter(out / f"{text}-adapter")
    return exported


def work_failing_writers(folder: Path, layout: str, out: Path) -> list[str]:
    """Several saves, each with a full disk on another rank. Returns the errors on this rank."""
    ((_, engine),) = [next(engines(folder, [layout]))]
    engine.save_hf(out)
    save_file, said = hf_files.save_file, []

    def full_disk(*unused, **unused_named):
        raise OSError(28, "No space left on device")

    for bad_rank in range(dist.get_world_size()):
        hf_files.save_file = full_disk if dist.get_rank() == bad_rank else save_file
        try:
            engine.save_hf(out)
            said.append("")
        except OSError as error:
            said.append(str(error))
    return said


def work_order_of_turns(log: Path) -> None:
    """Each of three senders writes down when it is inside; the first is slow, and the others would overtake
    it if they could."""
    groups = SimpleNamespace(
        pp_rank=dist.get_rank(), pp_size=dist.get_world_size(), pp_group=dist.group.WORLD
    )
    for _ in range(2):
        with in_turn(groups):
            for _ in range(2):
                with log.open("a") as file:
                    file.write(f"{groups.pp_rank} ")
                if groups.pp_rank == 0:
                    torch.randn(1000, 1000) @ torch.randn(1000, 1000)
        dist.barrier()
