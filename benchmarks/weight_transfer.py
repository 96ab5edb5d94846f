"""The transfer of weights from the learner against a bare broadcast of the same bytes, in one run. Target: at
least 0.80 of its bandwidth.

    ratio = median(bare) / median(transfer)

- bare: one ``dist.broadcast`` of a buffer with all the bytes, learner's process to one other, received into
  memory that is there.
- transfer: what a publish does between begin and end: export from Megatron's parameters, conversion and copy
  into buckets, the request and the broadcast of each bucket, to a process with a server's environment that
  allocates and receives as SGLang does and loads nothing.
- transfer with checksums: the same, with the SHA-256 of every tensor that a publish of a dense model on CPU
  takes meanwhile. Beside.
- transfer to SGLang: the same to a real server, which also copies the tensors into its model. That work is
  SGLang's; it is shown beside.

All are between two processes, in groups of the same size, and alternate round by round, so that a slow spell
of a shared machine hits them alike; the first round warms up and is not counted.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks.common import hardware, line, parser, spread, write  # noqa: E402

TARGET = 0.80
TIMEOUT_S = 300.0


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument(
        "--model",
        type=Path,
        help="a Hugging Face folder; one of 276 MiB with random weights where none is given",
    )
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument(
        "--bucket-mib", type=int, help="of the transfer; the product's size where none is given"
    )
    options.add_argument("--no-sglang", action="store_true", help="leave the real server out")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model or make_model(Path(scratch) / "model")
        result = measure(
            model,
            3 if given.quick else given.rounds,
            given.bucket_mib,
            Path(scratch),
            with_sglang=not given.no_sglang,
        )
    print(
        json.dumps(
            {"hardware": result["hardware"], "mib": result["mib"], "bucket_mib": result["bucket_mib"]},
            indent=2,
        )
    )
    for name, seconds in result["seconds"].items():
        print(f"{line(name, seconds)}   {result['mib'] / statistics.median(seconds):7.0f} MiB/s")
    for name, ratio in result["ratios"].items():
        print(f"ratio, {name}: {ratio:.3f}   target: at least {TARGET}")
    write(result | {"spread": {name: spread(s) for name, s in result["seconds"].items()}}, given.json)


def make_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=6144, hidden_size=1024, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
        intermediate_size=6144, max_position_embeddings=256, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def measure(model: Path, rounds: int, bucket_mib: int | None, scratch: Path, *, with_sglang: bool) -> dict:
    from configs.schema.layout import LayoutConfig
    from configs.schema.model import ModelConfig
    from parallel.engine import MegatronEngine
    from parallel.megatron import platform
    from parallel.weights import transfer as weight_transfer

    max_bytes = bucket_mib * 2**20 if bucket_mib else weight_transfer.BUCKET_BYTES["cpu"]
    buffers = weight_transfer.Buffers()
    torch.set_num_threads(1)
    platform.init_distributed(TIMEOUT_S)
    engine = MegatronEngine(
        ModelConfig(path=model, dtype="float32"), LayoutConfig(dp=1), None,
        total_optimizer_steps=1, logprob_chunk_tokens=1024, recompute="none", seed=0,
    )  # fmt: skip
    flat = torch.cat([tensor.flatten() for _, tensor in engine.export_hf()]).view(torch.uint8)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    with Receiver() as receiver, servers(model, scratch, with_sglang) as control:
        to_receiver, to_sglang = sender(receiver), sender(control) if control else None
        ways = {
            "transfer": (receiver, to_receiver, False),
            "transfer with checksums": (receiver, to_receiver, True),
        }
        ways |= {"transfer to SGLang": (control, to_sglang, False)} if control else {}
        for _ in range(rounds + 1):
            timed("bare broadcast", lambda: bare(to_receiver, receiver, flat))
            for name, (line_to, to, hashed) in ways.items():
                line_to.pause()
                line_to.begin_update()
                timed(
                    name, lambda to=to, hashed=hashed: transfer(to, engine, max_bytes, buffers, hashed=hashed)
                )
                line_to.end_update()
                line_to.resume()  # at once: the scheduler of a paused server keeps a core busy, which the others would miss
        for one in filter(None, (to_receiver, to_sglang)):
            one.close()
    seconds = {name: s[1:] for name, s in seconds.items()}
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    ratios = {name: medians["bare broadcast"] / medians[name] for name in ways}
    return {
        "hardware": hardware(),
        "mib": flat.numel() / 2**20,
        "bucket_mib": max_bytes / 2**20,
        "seconds": seconds,
        "ratios": ratios,
    }


def sender(control):
    from trainer.weight_sync import StageSender

    return StageSender(control, 1, "gloo", TIMEOUT_S)


def transfer(to, engine, max_bytes: int, buffers, *, hashed: bool) -> None:
    from parallel.weights.transfer import make_buckets
    from rollout.servers.control import ExpectedChecksums

    buckets = make_buckets(engine.export_hf(), dtype=torch.float32, max_bytes=max_bytes, buffers=buffers)
    expected = (
        ExpectedChecksums(tensor_parallel=1, kv_heads=engine.architecture.num_kv_heads) if hashed else None
    )
    to.send(next(buckets), buckets, None, expected)


def bare(to, receiver: "Receiver", flat: torch.Tensor) -> None:
    answer = receiver.ask(("bare", flat.numel()))
    dist.broadcast(flat, src=0, group=to._broadcaster._group)
    answer.wait()


class servers:
    """A real SGLang server's control, or None."""

    def __init__(self, model: Path, scratch: Path, wanted: bool):
        from configs.schema import RunConfig
        from rollout.servers.command import ServerSpec
        from rollout.servers.fleet import ServerFleet

        self._fleet = None
        if wanted:
            rollout = {"dtype": "float32", "max_total_tokens": 4096}
            config = RunConfig(model={"path": model}, task={"type": "countdown"}, rollout=rollout)
            self._fleet = ServerFleet(ServerSpec(config=config, cuda=False), scratch / "logs")

    def __enter__(self):
        from rollout.servers.control import SGLangControl

        if self._fleet is None:
            return None
        self._fleet.start()
        self._fleet.wait_healthy(900)
        return SGLangControl(self._fleet.urls, tensor_parallel=1, timeout_s=TIMEOUT_S)

    def __exit__(self, *exception) -> None:
        if self._fleet is not None:
            self._fleet.stop()


class Receiver:
    """A process that receives as SGLang does and loads nothing, with as much of ``SGLangControl`` as a sender
    asks for."""

    urls = ("receiver",)

    def __enter__(self) -> "Receiver":
        from rollout.servers.command import REUSED_MEMORY

        context = mp.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=receive_forever, args=(theirs,), daemon=True)
        os.environ.update(REUSED_MEMORY)  # read by glibc as the process starts
        self._process.start()
        self._pool = ThreadPoolExecutor(1)
        return self

    def __exit__(self, *exception) -> None:
        self._process.kill()
        self._process.join()
        self._pool.shutdown(wait=False)

    def ask(self, request: tuple):
        from rollout.servers.control import Pending

        self._ours.send(request)
        return Pending(str(request[0]), [self._pool.submit(self._ours.recv)], TIMEOUT_S)

    def join_group(self, **meeting):
        return self.ask(("join", meeting))

    def receive_bucket(
        self, *, names: Sequence[str], dtype: str, shapes: Sequence[Sequence[int]], version: int | None
    ):
        return self.ask(
            ("bucket", sum(torch.Size(shape).numel() for shape in shapes) * getattr(torch, dtype).itemsize)
        )

    def pause(self) -> None: ...

    def begin_update(self) -> None: ...

    def end_update(self) -> None: ...

    def resume(self) -> None: ...

    def leave_group(self) -> None: ...

    def close(self) -> None: ...


def receive_forever(requests) -> None:
    torch.set_num_threads(1)
    group, kept = None, torch.empty(0, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    while True:
        what, value = requests.recv()
        if what == "join":
            group = join(**value)
        else:
            if what == "bare" and kept.numel() != value:
                kept = torch.zeros(value, dtype=torch.uint8)
            flat = kept if what == "bare" else torch.empty(value, dtype=torch.uint8)
            group.broadcast([flat], options).wait()
        requests.send({})


def join(
    *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
) -> dist.ProcessGroupGloo:
    timeout = timedelta(seconds=TIMEOUT_S)
    store: dist.Store = dist.TCPStore(
        master_address, master_port, world_size, is_master=False, timeout=timeout
    )
    # The names under which the ranks of a torch process group meet; its constructor would need a group of its
    # own here.
    for prefix in (group_name, f"{group_name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, 1, world_size, timeout)


if __name__ == "__main__":
    main()
