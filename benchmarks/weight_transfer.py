"""The transfer of weights from the learner into SGLang servers, integrity checked, against a bare broadcast of
the same bytes, in one run. Targets:

    median(bare) / median(to SGLang)                at least 0.80
    median(to a bare receiver) / median(to SGLang)  at least 0.95

- bare: one ``dist.broadcast`` of a buffer with all the bytes, received into memory that is allocated already.
- to a bare receiver: the work of a publish between begin and end (export from Megatron's parameters, conversion,
  buckets, hashes). The receivers are processes with a server's environment. They copy each bucket from this
  process's memory into memory that is allocated already, hash it, and load nothing.
- to SGLang: the same to a real server with Tandem's plugin.
- by broadcasts: the last two, by gloo.
- by requests (``--by-requests``): to the same server by SGLang's own path, one request per bucket, unchecked.
- rounded (``--precision``): to SGLang, with the weights rounded before they are sent (``rollout.precision``). Weights on
  a grid are packed. Also by broadcasts. Target: at most 1.15 times the same transfer without rounding.

All groups have the same size: the sender and ``--tp`` receivers. The ways alternate round by round, so a slow spell of
a shared machine affects all of them; the first round warms up and is not counted. ``--load`` adds a process that keeps
a core busy.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks.common import announce, line, parser, serving, spread, write  # noqa: E402

if TYPE_CHECKING:
    from rollout.servers.control import SGLangControl

TIMEOUT_S = 300.0
BARE, RECEIVER, SGLANG, BY_REQUESTS = (
    "bare broadcast",
    "to a bare receiver",
    "to SGLang",
    "to SGLang, by requests",
)
BROADCAST = "{}, by broadcasts"
TARGETS = {BARE: 0.80, RECEIVER: 0.95}
ROUNDED = "to SGLang, {}"
ROUNDED_TARGET = 1.15


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--moe", action="store_true", help="a model with 8 experts instead of a dense one")
    options.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the server")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument(
        "--layers", type=int, default=3, help="more layers make a larger model of the same shapes"
    )
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--by-requests", action="store_true", help="also SGLang's own path")
    options.add_argument("--precision", nargs="+", default=[], help="values of rollout.precision to time too")
    options.add_argument("--load", action="store_true", help="beside a process that keeps a core busy")
    given = options.parse_args()
    rounds = 3 if given.quick else given.rounds
    machine = announce(
        model="8 experts" if given.moe else "dense", layers=given.layers, tp=given.tp, dtype=given.dtype, rounds=rounds,
        beside="a busy core" if given.load else "nothing of ours",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as ending:
        if given.load:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ending.callback(busy.kill)
        result = machine | measure(given, rounds, Path(scratch))
    print(json.dumps({key: result[key] for key in ("mib", "tensors", "buckets", "loaded_by_sglang")}))
    for name, seconds in result["seconds"].items():
        print(f"{line(name, seconds)}   {result['mib'] / statistics.median(seconds):7.0f} MiB/s")
    for name, ratio in result["ratios"].items():
        print(f"ratio of {name} to SGLang: {ratio:.3f}   target: at least {TARGETS[name]:.2f}")
    medians = {name: statistics.median(s) for name, s in result["seconds"].items()}
    for precision in given.precision:
        rounded = ROUNDED.format(precision)
        ratio = medians[rounded] / medians[SGLANG]
        sent = medians[BROADCAST.format(rounded)] / medians[BROADCAST.format(SGLANG)]
        print(
            f"rounded to {precision}: {ratio:.3f} of as they are, by broadcasts {sent:.3f}   "
            f"target: at most {ROUNDED_TARGET:.2f}"
        )
    write(result | {"spread": {name: spread(s) for name, s in result["seconds"].items()}}, given.json)


def make_model(folder: Path, *, moe: bool, layers: int, dtype: str) -> Path:
    """276 MiB in float32 with three dense layers, 258 MiB with three of experts; random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = dict(
        vocab_size=6144, hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8, head_dim=64,
        intermediate_size=6144, max_position_embeddings=256, tie_word_embeddings=True, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(0)
    if moe:
        experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=704, norm_topk_prob=True)
        # SGLang's Qwen3-MoE always has a separate output layer.
        untied = shape | {"tie_word_embeddings": False, "vocab_size": 3072}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**untied, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def measure(given, rounds: int, scratch: Path) -> dict:
    from configs.schema.layout import LayoutConfig
    from configs.schema.model import ModelConfig
    from parallel.engine import MegatronEngine
    from parallel.megatron import platform
    from parallel.weights.transfer import Buffers, plan_transfer
    from trainer.weight_carriers import MEMORY

    model = make_model(scratch / "model", moe=given.moe, layers=given.layers, dtype=given.dtype)
    dtype = getattr(torch, given.dtype)
    torch.set_num_threads(1)
    platform.init_distributed(TIMEOUT_S)
    engine = MegatronEngine(
        ModelConfig(path=model, dtype=given.dtype), LayoutConfig(dp=1), None,
        logprob_chunk_tokens=1024, seed=0,
    )  # fmt: skip
    flat = torch.cat([tensor.flatten() for _, tensor in engine.export_hf()]).view(torch.uint8)
    plans, buffers = {}, Buffers("cpu")
    for precision in (None, *given.precision):
        plans[precision] = plan_transfer(
            engine.export_plan(), dtype=dtype, device="cpu", precision=precision, packs=True
        )
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    with Receivers(given.tp) as receivers, served(model, scratch, given) as control:
        in_memory = {"carrier": MEMORY}
        to_sglang = sender(control, **in_memory)
        by_broadcasts = sender(receivers)
        to_sglang_by_broadcasts = sender(control, stage=1)
        ways = {
            RECEIVER: (sender(receivers, **in_memory), None),
            SGLANG: (to_sglang, None),
            BROADCAST.format(RECEIVER): (by_broadcasts, None),
            BROADCAST.format(SGLANG): (to_sglang_by_broadcasts, None),
        }
        for precision in given.precision:
            rounded = ROUNDED.format(precision)
            ways |= {
                rounded: (to_sglang, precision),
                BROADCAST.format(rounded): (to_sglang_by_broadcasts, precision),
            }
        if given.by_requests:
            ways[BY_REQUESTS] = (sender(control, stage=2, in_one_request=False), None)
        control.require_plugin()
        names = [BARE, *ways]
        for number in range(rounds + 1):
            # Each round begins with another way, so the order gives no way a warmer cache.
            first = number % len(names)
            for name in names[first:] + names[:first]:
                if name == BARE:
                    timed(BARE, lambda: bare(by_broadcasts, receivers, flat))
                    continue
                to, precision = ways[name]
                opening = to._control.open_update()
                opening.wait()
                # Several senders share the control, whose group is that of the last one that joined.
                if to._broadcaster is not None:
                    to._control.group_name = to._broadcaster.group_name
                timed(name, lambda to=to, plan=plans[precision]: transfer(to, engine, plan, buffers))
                to._control.close_update()
                to._control.resume()
        for to in {id(to): to for to, _ in ways.values()}.values():
            to.leave()
    seconds = {name: s[1:] for name, s in seconds.items()}
    medians = {name: statistics.median(s) for name, s in seconds.items()}
    return {
        "mib": round(flat.numel() / 2**20, 1),
        "buckets": len(plans[None].buckets),
        "tensors": len(plans[None].names),
        "loaded_by_sglang": loaded_by_sglang(scratch / "logs"),
        "seconds": seconds,
        "ratios": {name: medians[name] / medians[SGLANG] for name in TARGETS},
    }


def loaded_by_sglang(logs: Path) -> int:
    """The number of tensors that a server's rank could not copy itself, from its log."""
    text = "".join(file.read_text() for file in logs.rglob("*") if file.is_file())
    return max(int(number) for number in re.findall(r"tensors of the learner (\d+) are loaded", text))


def sender(control, carrier: str = "gloo", **options):
    from trainer.stage_sender import StageSender

    return StageSender(control, carrier, TIMEOUT_S, **options)


def transfer(to, engine, plan, buffers) -> None:
    from parallel.weights.transfer import make_buckets

    to.send(make_buckets(engine.export_hf(), plan, buffers), plan, 1)


def bare(to, receivers: "Receivers", flat: torch.Tensor) -> None:
    answer = receivers.ask(("bare", flat.numel()))
    dist.broadcast(flat, src=0, group=to._broadcaster._group)
    answer.wait()


@contextmanager
def served(model: Path, scratch: Path, given) -> Iterator["SGLangControl"]:
    """The control of a real SGLang server."""
    from configs.schema import RunConfig
    from rollout.servers.control import SGLangControl

    rollout = {"dtype": given.dtype, "max_total_tokens": 4096, "tp": given.tp}
    config = RunConfig(model={"path": model}, task={"type": "countdown"}, rollout=rollout)
    with serving(config, scratch / "logs") as (fleet, key):
        yield SGLangControl(config.rollout, config.launch, fleet.urls, key=key)


class Receivers:
    """Processes that receive like a server's ranks and load nothing, with the part of ``SGLangControl`` that a
    sender uses."""

    group_name = ""

    def __init__(self, size: int):
        self.num_receivers = size

    def __enter__(self) -> "Receivers":
        from rollout.servers.command import REUSED_MEMORY

        context = mp.get_context("spawn")
        os.environ.update(REUSED_MEMORY)  # read by glibc as a process starts
        self._ours, self._processes = [], []
        for _ in range(self.num_receivers):
            ours, theirs = context.Pipe()
            process = context.Process(target=receive_forever, args=(theirs,), daemon=True)
            process.start()
            self._ours.append(ours)
            self._processes.append(process)
        self._pool = ThreadPoolExecutor(self.num_receivers)
        return self

    def __exit__(self, *exception) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pool.shutdown(wait=False)

    def ask(self, *requests: tuple):
        """One request for all, or one for each."""
        from rollout.servers.control import Pending

        for number, ours in enumerate(self._ours):
            ours.send(requests[number % len(requests)])
        return Pending(str(requests[0][0]), [self._pool.submit(ours.recv) for ours in self._ours], TIMEOUT_S)

    def join_group(self, **meeting):
        meeting["world_size"] = 1 + self.num_receivers
        return self.ask(*(("join", meeting | {"rank": 1 + number}) for number in range(self.num_receivers)))

    def receive_transfer(
        self, *, names, dtypes: Sequence[str], shapes: Sequence, announcement, version: int | None
    ):
        both = zip(shapes, dtypes, strict=True)
        sizes, rest = (
            [],
            iter([torch.Size(shape).numel() * getattr(torch, kind).itemsize for shape, kind in both]),
        )
        for count in announcement.counts:
            sizes.append(sum(next(rest) for _ in range(count)))
        return self.ask(("transfer", (sizes, announcement.hash_kind, announcement.meeting)))

    def open_update(self):
        return self.ask(("nothing", None))

    def close_update(self) -> None: ...

    def resume(self) -> None: ...

    def leave_group(self):
        return self.ask(("nothing", None))


def receive_forever(requests) -> None:
    torch.set_num_threads(1)
    group = None
    kept: dict[int, torch.Tensor] = {}
    with suppress(EOFError):
        while True:
            what, value = requests.recv()
            if what == "join":
                group = join(**value)
            elif what == "bare":
                receive(group, memory(kept, -1, value)).wait()
            elif what == "transfer" and value[-1] is None:
                receive_broadcasts(group, kept, *value[:2])
            elif what == "transfer":
                receive_from_memory(kept, *value)
            requests.send({})


def memory(kept: dict[int, torch.Tensor], number: int, size: int) -> torch.Tensor:
    if number not in kept:
        kept[number] = torch.zeros(size, dtype=torch.uint8)
    return kept[number]


def receive(group: dist.ProcessGroupGloo, flat: torch.Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([flat], options)


def receive_from_memory(
    kept: dict[int, torch.Tensor], sizes: Sequence[int], kind: str, meeting: tuple[str, int]
) -> None:
    from rollout.sglang_plugin.tandem_process_memory import PART_BYTES, Meeting, Receiving
    from rollout.sglang_plugin.tandem_weight_transfer import RunningHash

    hashes = []
    with closing(Receiving(Meeting(*meeting))) as receiving:
        for number, size in enumerate(sizes):
            flat = memory(kept, number, size)
            running = RunningHash(flat, kind)
            receiving.receive(flat.split(PART_BYTES), running.add)
            hashes.append(int(running.digest()))
        sent = torch.zeros(len(hashes), dtype=torch.int64)
        receiving.receive([sent.view(torch.uint8)], lambda part: None)
    if sent.tolist() != hashes:
        raise RuntimeError("other bytes were received than sent")


def receive_broadcasts(
    group: dist.ProcessGroupGloo, kept: dict[int, torch.Tensor], sizes: Sequence[int], kind: str
) -> None:
    """Two broadcasts are in flight, as in the server."""
    from rollout.sglang_plugin.tandem_weight_transfer import weight_hash

    works, hashes = [], []
    for number, size in enumerate(sizes):
        flat = memory(kept, number, size)
        works.append((receive(group, flat), flat))
        if len(works) == 2:
            work, flat = works.pop(0)
            work.wait()
            hashes.append(weight_hash(flat, kind))
    work, flat = works.pop()
    work.wait()
    hashes.append(weight_hash(flat, kind))
    sent = torch.zeros(len(hashes), dtype=torch.int64)
    receive(group, sent).wait()
    if sent.tolist() != [int(one) for one in hashes]:
        raise RuntimeError("other bytes were received than sent")


def join(
    *, rank: int, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
) -> dist.ProcessGroupGloo:
    timeout = timedelta(seconds=TIMEOUT_S)
    store: dist.Store = dist.TCPStore(
        master_address, master_port, world_size, is_master=False, timeout=timeout
    )
    # The names under which the ranks of a torch process group meet; its constructor would need a group of its
    # own here.
    for prefix in (group_name, f"{group_name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, rank, world_size, timeout)


if __name__ == "__main__":
    main()
