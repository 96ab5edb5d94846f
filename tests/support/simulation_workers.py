"""The step of a simulation on real ranks, whose collectives are counted as they happen. Imported by spawned ranks."""

import multiprocessing
import os
import tempfile
import unittest.mock
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from configs.schema import RunConfig
from launch.studies.simulate import SIMULATED_VARIABLE, _simulate
from parallel.megatron.groups import destroy_groups
from parallel.planning.simulated import SimulatedRank
from parallel.simulation.device import SimulatedDevice
from parallel.simulation.ranks import Collectives
from trainer.studies.simulation import simulate


class Counted(Collectives):
    """Counts what ranks send each other, and lets them send it."""

    def __call__(self, device: Any, func: Any, args: tuple, kwargs: dict) -> Any:
        self.count(func, args)
        return func(*args, **kwargs)

    def counts(self, value: Any) -> bool:
        """Numbers, and the shape of a message between stages; pickled objects are of the host."""
        return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.numel() == 3)


def simulate_all(jobs: list[tuple[RunConfig, int]]) -> list[SimulatedRank]:
    """One rank of each config, one after another in one process, which takes most of its time to import the engines."""
    context = multiprocessing.get_context("spawn")
    with (
        unittest.mock.patch.dict(os.environ, {SIMULATED_VARIABLE: "1"}),
        ProcessPoolExecutor(1, context) as pool,
    ):
        return pool.submit(_simulate_all, jobs).result()


def _simulate_all(jobs: list[tuple[RunConfig, int]]) -> list[SimulatedRank]:
    return [_simulate(config, rank) for config, rank in jobs]


def work_step(configs: list[RunConfig]) -> list[SimulatedRank]:
    found = []
    for config in configs:
        with tempfile.TemporaryDirectory() as folder, SimulatedDevice(counted := Counted()) as device:
            found.append(simulate(config, device, counted, Path(folder)))
        destroy_groups()
    return found
