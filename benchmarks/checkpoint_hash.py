"""Seconds of saving a checkpoint with its hashes and without them, by threads and by Megatron's forked processes, and of
checking the hashes before a load. Target of the hashes: 5 % of a save at most.

    cost = median seconds of a save with hashes / median seconds of a save without - 1

One Megatron process saves both ways in turn, so the disk's changing speed affects both. Without hashes, files are
listed only with their sizes, as they were before hashes existed. ``--place`` names the file system; on one in memory
(/dev/shm) no disk hides the hashing: that is the worst case. Hashing is also timed by itself, over the checkpoint's
files from the page cache: its cost if it came after writing.
"""

import contextlib
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, line, parser, spread, write  # noqa: E402

TARGET = 0.05
WITHOUT, WITH = "save without hashes", "save with hashes"
FORKED = "save with hashes, written by forked processes"
WAIT = "  of which waiting for hashes"
ALONE, CHECK = "hashing alone, two files at once", "checking before a load"
CONFIG = {"hidden": 1024, "layers": 2, "intermediate": 4096, "vocab": 8192, "dtype": "float32"}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument(
        "--place",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where to write (the system's temporary folder)",
    )
    given = options.parse_args()
    rounds = 2 if given.quick else given.rounds
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    about = announce(config={**CONFIG, "file_system": file_system(given.place)}, rounds=rounds)
    with tempfile.TemporaryDirectory(dir=given.place) as folder:
        seconds, size = measure(Path(folder), rounds, quick=given.quick)
    gigabytes = round(size / 1e9, 3)
    print(f"a checkpoint of {gigabytes} GB")
    for name, values in seconds.items():
        speed = f"   {size / 1e9 / statistics.median(values):.2f} GB/s" if name in (ALONE, CHECK) else ""
        print(line(name, values) + speed)
    cost = statistics.median(seconds[WITH]) / statistics.median(seconds[WITHOUT]) - 1
    waited = statistics.median(seconds[WAIT]) / statistics.median(seconds[WITHOUT])
    print(
        f"cost of hashing {cost:+.1%} of a save, of which {waited:.1%} waiting for it   target: at most {TARGET:.0%}"
    )
    print(
        f"forked processes / threads {statistics.median(seconds[FORKED]) / statistics.median(seconds[WITH]):.3f}"
    )
    result = {**about, "checkpoint_gigabytes": gigabytes, "cost": cost, "waiting": waited, "target": TARGET}
    write({**result, "seconds": {name: spread(values) for name, values in seconds.items()}}, given.json)


def measure(folder: Path, rounds: int, *, quick: bool) -> tuple[dict[str, list[float]], int]:
    """Seconds of each thing by its name, and the bytes of a checkpoint."""
    from parallel.checkpoints import checkpoint
    from parallel.checkpoints.files import hash_files, step_folder

    engine = make_engine(folder / "model", layers=1 if quick else CONFIG["layers"])
    variants = (WITHOUT, WITH, FORKED)
    seconds: dict[str, list[float]] = {name: [] for name in (*variants, WAIT, ALONE, CHECK)}
    around = {WITHOUT: without_hashes, WITH: lambda: waits_timed(seconds[WAIT]), FORKED: by_forked_processes}
    for step in range(-1, rounds):  # the first does not count
        for variant in variants if step % 2 else variants[::-1]:
            target = step_folder(folder, step + 1)
            with around[variant]():
                seconds[variant].append(timed(engine.save, target, {}))
            if variant == WITH:
                seconds[ALONE].append(
                    timed(hash_files, target, [path.name for path in target.glob("*.distcp")])
                )
                seconds[CHECK].append(timed(checkpoint.verified, target))
                size = sum(path.stat().st_size for path in target.iterdir())
            shutil.rmtree(target)
            os.sync()
    return {name: values[1:] for name, values in seconds.items()}, size


def timed(action: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - began


@contextlib.contextmanager
def waits_timed(seconds: list[float]) -> Iterator[None]:
    """Inside, the time is taken that a save waits, after its last byte is on the disk, until the hashes are
    complete."""
    from parallel.checkpoints import checkpoint

    follow = checkpoint.hashed_while_written

    @contextlib.contextmanager
    def timed_at_the_end(folder: Path, pattern: str):
        with contextlib.ExitStack() as following:
            yield following.enter_context(follow(folder, pattern))
            seconds.append(timed(following.close))

    checkpoint.hashed_while_written = timed_at_the_end
    try:
        yield
    finally:
        checkpoint.hashed_while_written = follow


@contextlib.contextmanager
def without_hashes() -> Iterator[None]:
    """Inside, saves are the same but hash nothing."""
    from parallel.checkpoints import checkpoint
    from parallel.checkpoints import files as checkpoint_files
    from parallel.checkpoints.files import FileRecord

    @contextlib.contextmanager
    def nothing_followed(folder: Path, pattern: str):
        yield {}

    before = checkpoint.hashed_while_written, checkpoint_files._hash_file
    checkpoint.hashed_while_written = nothing_followed
    checkpoint_files._hash_file = lambda path: FileRecord(path.stat().st_size, "")
    try:
        yield
    finally:
        checkpoint.hashed_while_written, checkpoint_files._hash_file = before


@contextlib.contextmanager
def by_forked_processes() -> Iterator[None]:
    """Inside, saves are the same but Megatron forks its writers."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from parallel.checkpoints import writers

    before, writers._write_by_threads = (
        writers._write_by_threads,
        FileSystemWriterAsync.write_preloaded_data_multiproc,
    )
    try:
        yield
    finally:
        writers._write_by_threads = before


def make_engine(folder: Path, *, layers: int):
    """A policy with random weights; nobody samples from it, so it needs no tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from configs.schema.layout import LayoutConfig
    from configs.schema.learner import OptimizerConfig
    from configs.schema.model import ModelConfig
    from parallel.engine import MegatronEngine
    from parallel.engine_base import Training
    from parallel.megatron import platform

    shape = Qwen3Config(
        vocab_size=CONFIG["vocab"], hidden_size=CONFIG["hidden"], num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=CONFIG["intermediate"], head_dim=CONFIG["hidden"] // 8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    platform.init_distributed(600.0)
    return MegatronEngine(
        ModelConfig(path=folder, dtype=CONFIG["dtype"]), LayoutConfig(),
        Training(optimizer=OptimizerConfig(), total_steps=10), logprob_chunk_tokens=256, seed=0, timeout_s=600.0,
    )  # fmt: skip


def file_system(place: Path) -> str:
    """The type of the file system that holds ``place``."""
    mounts = [row.split() for row in Path("/proc/mounts").read_text().splitlines()]
    holding = [(len(point), kind) for _, point, kind, *_ in mounts if place.resolve().is_relative_to(point)]
    return max(holding)[1]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
