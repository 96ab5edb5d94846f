"""torch's profiler on one rank, for the steps that are traced: ``RUN/trace/torch-rank-0-step-2.json``.

These are separate Chrome traces of operations and kernels, which a span of the host's time does not show.
Their clock is not that of ``tandem trace``.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tracing.recorder import FOLDER


@contextmanager
def profiled(run: Path, rank: int, step: int) -> Iterator[None]:
    """The file is written after the step, whose time does not include it. A full disk loses only this
    file."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
    file = run / FOLDER / f"torch-rank-{rank}-step-{step}.json"
    with suppress(OSError, RuntimeError):  # the profiler does not raise in every such case
        profiler.export_chrome_trace(str(file))
    if not file.exists():
        print(f"trace: {file} cannot be written; look for room on its disk", flush=True)
