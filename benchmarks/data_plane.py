"""The path of all samples, between many servers and the learner's ranks, at full load: which process is the limit?

The real sample role and the real hand-over (requests over HTTP, the pool, text, reward, ZeroMQ with the run's key, sharing
out, scatter, packing, the gate of exact turns) work against ``--servers`` simulated servers
(``simulated_servers.py``), and updates of the weights are the real calls of ``SGLangControl``. Neither side
computes: the learner's update takes ``--update-s`` seconds.

    simulated servers, ``--per-process`` each   sample role   rank 0 ... rank R - 1, gloo

For each ``--staleness`` k it leaves out the first 1 + k steps, after which each process does one step's work per step. Of the
other steps it prints:

- CPU of each process in microseconds per response token of the step, over all threads; the simulated servers are one row.
  The inverse is the rate that the process can carry on its own core. The lowest rate is the next limit. Divided by a server's
  rate it is the knee: that many servers keep the process busy, and further servers wait.
- tokens per second by the clock, and the idle share of the servers' slots.
- memory: peak of each process above its memory when it was ready, against the bytes of a step's samples.

With ``--tokens-per-s 0`` answers come at once, and the tokens per second are the rate that this machine carries. If it has
fewer cores than processes, they share cores. CPU time per token then still holds for other machines, but the clock does not.

Target: 1 million tokens per second, so at most 1 microsecond per token in every process.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

TARGET_US = 1.0
FULL = {"prompts": 128, "mean": 8192.0, "longest": 16384}
"""1024 responses of 8k tokens."""
PREPARED = 64
"""Answers that the servers repeat."""
VOCABULARY = 16_384
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    if "--role" in sys.argv[1:2]:
        play(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
        return
    from benchmarks.common import announce, parser, write

    options = parser(__doc__.splitlines()[0])
    options.add_argument("--servers", type=int, default=8)
    options.add_argument("--per-process", type=int, default=32, help="simulated servers in one process")
    options.add_argument("--prompts", type=int, default=64, help="of a step")
    options.add_argument("--group", type=int, default=8, help="responses to a prompt")
    options.add_argument("--mean", type=float, default=2048.0, help="tokens of a response")
    options.add_argument("--longest", type=int, default=8192, help="tokens of the longest response")
    options.add_argument("--tokens-per-s", type=float, default=0.0, help="of a full server; 0: at once")
    options.add_argument("--slots", type=int, default=64, help="samples at once in a server")
    options.add_argument("--staleness", type=int, nargs="+", default=[0])
    options.add_argument("--steps", type=int, default=4, help="measured, after 1 + staleness others")
    options.add_argument("--update-s", type=float, default=0.0, help="time of the learner's update")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--copies", type=int, default=1, help="ranks with the same share")
    options.add_argument("--digests", action="store_true", help="shared prompts: learner.share_prompts")
    options.add_argument(
        "--parts", action="store_true", help="measure single parts instead, as they are and as they were"
    )
    options.add_argument("--full", action="store_true", help="1024 responses of 8k tokens a step")
    given = options.parse_args()
    if given.quick:
        given.servers, given.prompts, given.mean, given.longest, given.steps = 2, 4, 64.0, 256, 1
    if given.full:
        vars(given).update(FULL)
    if given.ranks % given.copies:
        options.error(f"--ranks {given.ranks} is not a multiple of --copies {given.copies}")
    about = announce(given={k: v for k, v in vars(given).items() if k not in ("json", "quick", "full")})
    results = []
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(Path(folder), given)
        if given.parts:
            tell_parts(Path(folder))
            return
        for staleness in given.staleness:
            results.append({"staleness": staleness} | measure(Path(folder), given, staleness))
            tell(results[-1], given)
    write({**about, "results": results}, given.json)


# Inputs


def make_inputs(folder: Path, given: argparse.Namespace) -> None:
    """A model folder with a byte-level tokenizer, problems of the form of GSM8K, and the servers' answers."""
    from benchmarks.simulated_servers import prepare, response_lengths

    texts = [file.read_text() for file in sorted(ROOT.glob("**/*.md")) if ".venv" not in file.parts]
    tokenizer, end = _tokenizer(texts), VOCABULARY - 1
    model = folder / "model"
    tokenizer.save_pretrained(model)
    config = {"max_position_embeddings": 2 * given.longest + 1024, "vocab_size": VOCABULARY}
    (model / "config.json").write_text(json.dumps(config))
    words = " ".join(texts).split()
    problems = (
        {"question": " ".join(words[60 * i : 60 * i + 60]), "answer": f"It is so. #### {i}"}
        for i in range(min(len(words) // 60, 2 * given.prompts))
    )
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, problems)))
    lengths = response_lengths(PREPARED, mean=given.mean, longest=given.longest, seed=0)
    corpus = tokenizer.encode("\n".join(texts))
    prepare(folder, lengths, corpus=corpus, end=end, longest=given.longest, text_of=tokenizer.decode, seed=0)


def _tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level BPE tokenizer of the usual form, of the words of ``texts``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    fill = [f" filling{i}" for i in range(VOCABULARY - 1 - made.get_vocab_size())]
    made.add_tokens(fill)
    made.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )


# One measurement


def measure(folder: Path, given: argparse.Namespace, staleness: int) -> dict:
    """Start all processes, and return what rank 0 has measured."""
    run = folder / f"staleness-{staleness}"
    run.mkdir()
    plan = vars(given) | {"staleness": staleness, "folder": str(folder)}
    with ExitStack() as ending:
        servers, urls = [], []
        for first in range(0, given.servers, given.per_process):
            number = min(given.per_process, given.servers - first)
            command = [
                "simulated_servers.py",
                str(folder),
                str(number),
                str(given.tokens_per_s),
                str(given.slots),
            ]
            process = ending.enter_context(started(command))
            servers.append(process.pid)
            urls += json.loads(process.stdout.readline())
        (run / "plan.json").write_text(json.dumps(plan | {"urls": urls}, default=str))
        sampler = ending.enter_context(started(["data_plane.py", "--role", "sample", str(run)]))
        address = json.loads(sampler.stdout.readline())
        pids = {"servers": servers, "sample role": [sampler.pid]}
        (run / "peers.json").write_text(json.dumps({"address": address, "pids": pids}))
        ranks = [
            ending.enter_context(started(["data_plane.py", "--role", "rank", str(run), str(rank)]))
            for rank in range(given.ranks)
        ]
        line = ranks[0].stdout.readline()
        if not line:
            raise SystemExit("rank 0 ended without a result; see its error above")
        for process in ranks:
            process.wait()
        return json.loads(line)


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[subprocess.Popen]:
    """A process of this folder's file. Its standard input ends with the block or with its parent, and so does the process."""
    command = [sys.executable, str(ROOT / "benchmarks" / arguments[0]), *arguments[1:]]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tell(result: dict, given: argparse.Namespace) -> None:
    """Print one measurement."""
    from benchmarks.common import cell

    print(
        f"\nstaleness {result['staleness']}: {result['tokens']:,} response tokens a step, "
        f"{result['sample_mib']:.0f} MiB of samples"
    )
    wall = [tokens / s for tokens, s in zip(result["tokens_of_steps"], result["wall_s"], strict=True)]
    print(f"  {'by the clock':<16} {cell(wall, '{:,.0f}')} tokens/s")
    if given.tokens_per_s:
        print(f"  {'servers idle':<16} {result['idle']:.1%} of their slots")
    for name, cpu_s in result["cpu_s"].items():
        micros = [1e6 * s / tokens for tokens, s in zip(result["tokens_of_steps"], cpu_s, strict=True)]
        over, peak = result["peak_mib"][name]
        print(
            f"  {name:<16} {cell(micros, '{:.3f}')} µs/token   peak {peak:.0f} MiB, {over:.0f} of them "
            f"({over / result['sample_mib']:.1f} x the samples) since it was ready"
        )
    own = {name: sum(cpu_s) for name, cpu_s in result["cpu_s"].items() if name != "servers"}  # a process each
    slowest = max(own, key=own.__getitem__)
    micros = 1e6 * own[slowest] / sum(result["tokens_of_steps"])
    knee = f", {1e6 / micros / given.tokens_per_s:.0f} such servers" if given.tokens_per_s else ""
    print(
        f"  limit: {slowest}, {micros:.3f} µs/token, so {1e6 / micros:,.0f} tokens/s on a core of its own{knee}"
        f"   target: at most {TARGET_US:g}",
        flush=True,
    )


# Single parts


def tell_parts(folder: Path) -> None:
    """Print CPU time per token of the parts that were made faster, on the prepared answers: the least of several rounds."""
    from benchmarks.simulated_servers import Answers
    from rollout.byte_level import decoder_of
    from rollout.records import TOKEN_IDS
    from rollout.rewards.math_answers import NUMBER, _last_number
    from rollout.tokenization import load_tokenizer

    tokenizer, answers = load_tokenizer(folder / "model"), Answers.read(folder)
    replies = [json.loads(content + b"}}") for content in answers.contents]
    ids = [np.array(reply["output_ids"], dtype=TOKEN_IDS) for reply in replies]
    by_table = decoder_of(tokenizer)
    texts = [by_table(one) for one in ids]
    parts = {
        "text, by the tokenizer": lambda: [tokenizer.decode(one.tolist()) for one in ids],
        "text, by the table": lambda: [by_table(one) for one in ids],
        "last number, of all of them": lambda: [list(NUMBER.finditer(text))[-1:] for text in texts],
        "last number, from the end": lambda: [_last_number(text) for text in texts],
    }
    for name, part in parts.items():
        seconds = []
        for _ in range(7):
            began = time.process_time()
            part()
            seconds.append(time.process_time() - began)
        micros = [1e6 * s / sum(answers.lengths) for s in seconds]
        print(f"{name:<30} {min(micros):.4f} µs/token   (median {statistics.median(micros):.4f})")


# Processes


def play(name: str, run: Path, rank: int = 0) -> None:
    plan = json.loads((run / "plan.json").read_text())
    if name == "sample":
        sample_role(run, plan)
    else:
        Rank(run, plan, rank).play()


def config_of(plan: dict) -> Any:
    from configs.schema import RunConfig

    folder = Path(plan["folder"])
    in_flight = (1 + plan["staleness"]) * plan["prompts"] * plan["group"]
    rollout = {
        "prompts_per_step": plan["prompts"],
        "group_size": plan["group"],
        "max_new_tokens": plan["longest"],
        "max_staleness": plan["staleness"],
        "max_concurrency": in_flight,
        "request_timeout_s": 3600,
    }
    return RunConfig(
        model={"path": folder / "model"},
        task={"type": "gsm8k", "train_path": folder / "train.jsonl", "apply_chat_template": False},
        rollout=rollout,
        learner={"token_budget": max(32768, 2 * plan["longest"])},
        launch={"collective_timeout_s": 8000.0},
    )


def sample_role(run: Path, plan: dict) -> None:
    from rollout.tokenization import import_transformers_without_torch

    import_transformers_without_torch()
    from rollout.run_key import run_key
    from rollout.sampling.role import run_sample_role

    config = config_of(plan)
    saved = json.loads((config.model.path / "config.json").read_text())
    role = run_sample_role(
        config,
        SimpleNamespace(
            max_positions=saved["max_position_embeddings"], vocab_size=saved["vocab_size"], experts=None
        ),
        server_urls=lambda: plan["urls"],
        announce=lambda address: print(json.dumps(address), flush=True),
        log_dir=run,
        key=run_key(run / "key.yaml"),
        doing=lambda activity: None,
    )
    with profiled(run / "sample.prof"):
        asyncio.run(role)


@contextmanager
def profiled(file: Path) -> Iterator[None]:
    """If TANDEM_PROFILE=FOLDER is in the environment, write cProfile's statistics of the block into that folder."""
    folder = os.environ.get("TANDEM_PROFILE")
    if folder is None:
        yield
        return
    import cProfile

    profile = cProfile.Profile(time.process_time)  # the clock would count the waits for a core
    try:
        profile.runcall(lambda: None)
        profile.enable()
        yield
    finally:
        profile.disable()
        profile.dump_stats(Path(folder) / file.name)


class Processes:
    """CPU seconds and peaks of memory of the processes of a measurement, from /proc."""

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self._pids = pids
        self._before = {name: self._memory(name, "VmRSS") for name in pids}

    def cpu_s(self) -> dict[str, float]:
        return {name: sum(map(_cpu_s, pids)) for name, pids in self._pids.items()}

    def peak_mib(self) -> dict[str, tuple[float, float]]:
        """(peak above the memory at the start, whole peak)"""
        peaks = {name: self._memory(name, "VmHWM") for name in self._pids}
        return {name: (peak - self._before[name], peak) for name, peak in peaks.items()}

    def _memory(self, name: str, field: str) -> float:
        return sum(_memory_mib(pid, field) for pid in self._pids[name])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _memory_mib(pid: int, field: str) -> float:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(field)) / 1024


class Rank:
    """One rank of the learner, without a model."""

    def __init__(self, run: Path, plan: dict, rank: int) -> None:
        import torch.distributed as dist

        import trainer.batch.step_batch
        import trainer.ranks.scattering  # noqa: F401 - before memory is counted
        from rollout.run_key import run_key
        from rollout.sampling.remote import RemoteSampler
        from rollout.servers.control import SGLangControl
        from trainer.sampling import SharedSampler

        self._plan, self._rank, self._version = plan, rank, 0
        peers = json.loads((run / "peers.json").read_text())
        dist.init_process_group(
            "gloo", init_method=f"file://{run}/store", rank=rank, world_size=plan["ranks"]
        )
        self._pids: list[Any] = [None] * plan["ranks"]
        dist.all_gather_object(self._pids, os.getpid())
        self._all_pids = peers["pids"] | {f"rank {i}": [pid] for i, pid in enumerate(self._pids)}
        remote, self._control = None, None
        if rank == 0:
            key = run_key(run / "key.yaml")
            remote = RemoteSampler(peers["address"], timeout_s=3600, key=key)
            config = config_of(plan)
            self._control = SGLangControl(config.rollout, config.launch, plan["urls"], key=key)
            self._control.group_name = "simulated"
        self._sampler = SharedSampler(remote)

    def play(self) -> None:
        import gc

        gc.freeze()
        processes = Processes(self._all_pids)
        for _ in range(1 + self._plan["staleness"]):  # until as much is sampled in a step as is handed out
            self._step()
        if self._rank:
            for _ in range(self._plan["steps"]):
                self._step()
            return
        rows = []
        for _ in range(self._plan["steps"]):
            began, before, slots = time.perf_counter(), processes.cpu_s(), self._slots()
            groups = self._step()
            rows.append(
                {
                    "wall_s": time.perf_counter() - began,
                    "cpu_s": {n: s - before[n] for n, s in processes.cpu_s().items()},
                    "busy_s": self._slots() - slots,
                    "tokens": sum(int(t.response_mask.sum()) for g in groups for t in g.trajectories),
                    "bytes": sum(_bytes(t) for g in groups for t in g.trajectories),
                }
            )
            del groups
        wall = sum(row["wall_s"] for row in rows)
        slots = self._plan["servers"] * self._plan["slots"]
        result = {
            "tokens": round(statistics.mean(row["tokens"] for row in rows)),
            "tokens_of_steps": [row["tokens"] for row in rows],
            "wall_s": [row["wall_s"] for row in rows],
            "cpu_s": {name: [row["cpu_s"][name] for row in rows] for name in rows[0]["cpu_s"]},
            "idle": 1 - sum(row["busy_s"] for row in rows) / (slots * wall),
            "sample_mib": max(row["bytes"] for row in rows) / 2**20,
            "peak_mib": processes.peak_mib(),
        }
        print(json.dumps(result), flush=True)
        self._sampler.stop()
        self._control.close()

    def _step(self) -> Any:
        """Returns the step's groups on rank 0."""
        plan = self._plan
        sampled = self._sampler.next_groups(
            plan["prompts"], newest=self._version, max_staleness=plan["staleness"], ahead=plan["staleness"]
        )
        batch = hand_over(sampled.groups, plan, self._version)
        assert batch.packed.num_tokens
        time.sleep(plan["update_s"])
        self._version += 1
        if self._control is not None:
            self._control.open_update().wait()
            weight = {"names": ["weight"], "dtype": "bfloat16", "shapes": [[1]]}
            self._control.receive_bucket(**weight, version=self._version).wait()
            assert set(self._control.close_update()) == {self._version}
            self._control.resume()
        return sampled.groups

    def _slots(self) -> float:
        """Slot-seconds in which the servers have sampled."""
        from urllib.request import urlopen

        counts = (json.loads(urlopen(f"{url}/simulated").read()) for url in self._plan["urls"])
        return sum(count["busy_s"] for count in counts)


def _bytes(trajectory: Any) -> int:
    arrays = (
        trajectory.token_ids, trajectory.response_mask, trajectory.rollout_logprobs, trajectory.token_versions,
    )  # fmt: skip
    return sum(array.nbytes for array in arrays)


def hand_over(groups: Any, plan: dict, version: int) -> Any:
    """As ``Learner.receive``, for a layout without Megatron's groups: ranks with the same share are neighbours."""
    from trainer.batch.sharing_out import share_out
    from trainer.batch.step_batch import step_batch
    from trainer.ranks.scattering import scatter
    from trainer.ranks.totals import on_all_ranks

    shares = None
    if groups is not None:
        shares = share_out(
            groups,
            num_minibatches=1,
            dp_size=plan["ranks"] // plan["copies"],
            token_budget=max(32768, 2 * plan["longest"]),
            needs_siblings=True,
            shares_prompts=plan["digests"],
        )
    share = scatter(shares, lambda rank: rank // plan["copies"])
    newest = version if plan["staleness"] else None
    return on_all_ranks(lambda: step_batch(share, newest=newest, share_prompts=plan["digests"]))


if __name__ == "__main__":
    main()
