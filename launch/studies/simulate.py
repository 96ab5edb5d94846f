"""Ranks of a learner without their devices, each in a process of its own: ``tandem simulate``. No torch here."""

import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import psutil

from configs.schema import RunConfig
from configs.schema.layout import LayoutConfig
from launch.processes.imports import imported_for_good
from launch.roles.start import quiet_end
from parallel.planning.simulated import SimulatedRank

SIMULATED_VARIABLE = "TANDEM_SIMULATED"
"""Equal to ``parallel.megatron.cpu.SIMULATED_VARIABLE``, whose import needs torch; a test compares the two."""
MEMORY_EACH = 2 * 2**30
"""Bytes of host memory that a process takes: torch, Megatron-Core and the numbers that shapes depend on."""


class SimulationFailed(RuntimeError):
    """The learner's code failed on a simulated rank."""


def ranks_of_stages(layout: LayoutConfig) -> list[int]:
    """The first rank of the first, a middle and the last pipeline stage."""
    stages = sorted({0, layout.pp // 2, layout.pp - 1})
    return [stage * (layout.world_size // layout.pp) for stage in stages]


def simulate_ranks(config: RunConfig, ranks: Sequence[int]) -> Iterator[SimulatedRank]:
    """Yields each rank when it is done; as many run at a time as cores and memory allow. Raises SimulationFailed."""
    at_once = max(1, min(len(ranks), os.cpu_count() or 1, psutil.virtual_memory().available // MEMORY_EACH))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(at_once, context, max_tasks_per_child=1) as pool:
        rank_of = {pool.submit(_simulate, config, rank): rank for rank in ranks}
        for done in as_completed(rank_of):
            try:
                yield done.result()
            except Exception as error:
                for waiting in rank_of:
                    waiting.cancel()
                where = f"rank {rank_of[done]} of {config.layout.world_size}"
                what = f"{type(error).__name__}: {error}"
                if isinstance(error, BrokenProcessPool):
                    what = "its process was killed"
                raise SimulationFailed(f"{where}: {what}") from error


def _simulate(config: RunConfig, rank: int) -> SimulatedRank:
    import warnings

    quiet_end()
    os.environ[SIMULATED_VARIABLE] = "1"  # in this process only, before it imports Megatron
    warnings.filterwarnings("ignore")  # of Megatron and torch, about missing devices
    with imported_for_good():
        from parallel.simulation.process import simulated_rank
        from trainer.studies.simulation import simulate

    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_rank(rank, config.layout.world_size) as (device, collectives),
    ):
        return simulate(config, device, collectives, Path(folder))
