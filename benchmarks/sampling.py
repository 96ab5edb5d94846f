"""Sampling on CPU with Tandem's plugin in the server (``rollout/sglang_plugin``) and without it.

Two servers with the same model sample the same prompts in turn. The cache is flushed before:

- ``step``: the quickstart's step, 32 groups of 8, responses of up to 14 tokens;
- ``long``: 16 samples of 512 tokens, none ended early.

Reports samples per second, CPU seconds of the scheduler, and the largest difference between a server's log-probs
and those of transformers for the same tokens. ``--model``: the quickstart's warm model, whose responses end by
themselves; without it a random model is made. ``--config``: a recipe's servers instead of the benchmark's:

    python benchmarks/sampling.py --config configs/recipes/countdown_tiny.yaml rollout.server_args.chunked_prefill_size=2048
"""

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, line, parser, servers_on_cpu, write  # noqa: E402

WORKLOADS = {
    "step": {"groups": 32, "group_size": 8, "max_new_tokens": 14},
    "long": {"groups": 16, "group_size": 1, "max_new_tokens": 512},
}
POSITIONS = 1024
Sampled = list[tuple[float, int]]
"""Log-prob and id of each token."""


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--model", type=Path, help="of the quickstart: models/countdown-tiny-warm")
    options.add_argument("--config", type=Path, help="a recipe, whose rollout both servers get")
    options.add_argument("override", nargs="*", help="KEY=VALUE of that recipe, as for tandem train")
    given = options.parse_args()
    if given.override and not given.config:
        options.error("overrides are of a recipe: give --config")
    rounds = 2 if given.quick else given.rounds
    with tempfile.TemporaryDirectory() as folder:
        model = prepare_model(Path(folder) / "model", given.model)
        configs = {
            "with the plugin": config_of(model, True, given.config, given.override),
            "SGLang alone": config_of(model, False, given.config, given.override),
        }
        told = ("dtype", "max_total_tokens", "server_args")
        of_servers = {name: getattr(configs["SGLang alone"].rollout, name) for name in told}
        about = announce(model=given.model or "random", rounds=rounds, rollout=of_servers)
        result = about | measure(configs, Path(folder), rounds)
    report(result)
    write(result, given.json)


def prepare_model(folder: Path, source: Path | None) -> Path:
    """A copy with room for the long responses: rotary embeddings have no table of limited length."""
    import shutil

    from rollout.tiny_model import make_tiny_countdown_model

    if source is None:
        make_tiny_countdown_model(folder, seed=0)
    else:
        shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    return folder


def config_of(model: Path, plugin: bool, recipe: Path | None, overrides: list[str]):
    """The config of one server. Without a recipe: SGLang's own settings, in float32."""
    from configs.loader import load_config
    from configs.schema import RunConfig

    if recipe is not None:
        fixed = [f"model.path={model}", f"rollout.sglang_plugin={str(plugin).lower()}", "rollout.replicas=1"]
        return load_config(recipe, [*overrides, *fixed])
    rollout = {"dtype": "float32", "max_total_tokens": 32768, "sglang_plugin": plugin}
    return RunConfig(model={"path": model}, task={"type": "countdown"}, rollout=rollout)


def measure(configs: dict, folder: Path, rounds: int) -> dict:
    from rollout.servers.fleet import ServerFleet

    model = next(iter(configs.values())).model.path
    specs = {name: servers_on_cpu(config, folder / name) for name, config in configs.items()}
    fleets = {name: ServerFleet(spec, folder / name) for name, spec in specs.items()}
    keys = {name: spec.key for name, spec in specs.items()}
    try:
        for fleet in fleets.values():
            fleet.start()
        for fleet in fleets.values():
            fleet.wait_healthy(600)
        return {name: measure_workload(name, fleets, keys, model, rounds) for name in WORKLOADS}
    finally:
        for fleet in fleets.values():
            fleet.stop()


def measure_workload(workload: str, fleets: dict, keys: dict, model: Path, rounds: int) -> dict:
    from configs.schema.task import CountdownTask
    from rollout.tasks import load_task
    from rollout.tokenization import end_token_ids, load_tokenizer

    tokenizer = load_tokenizer(model)
    train = load_task(CountdownTask(), tokenizer=tokenizer).train
    stops = list(end_token_ids(tokenizer, model)) if workload == "step" else []
    shape = WORKLOADS[workload]
    rng = random.Random(0)
    seconds, cpu, tokens, last = ({name: [] for name in fleets} for _ in range(4))
    for round_number in range(rounds + 1):  # the first warms up
        prompts = [train[rng.randrange(len(train))].token_ids for _ in range(shape["groups"])]
        for name in list(fleets)[:: 1 if round_number % 2 else -1]:
            scheduler = scheduler_of(fleets[name])
            asked = sample(fleets[name].urls, keys[name], scheduler, prompts, shape, stops)
            wall, used, groups = asyncio.run(asked)
            last[name] = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
            if round_number:
                seconds[name].append(wall)
                cpu[name].append(used)
                tokens[name].append(sum(len(sampled) for _, sampled in last[name]))
    errors = {name: largest_error(model, pairs) for name, pairs in last.items()}
    samples = shape["groups"] * shape["group_size"]
    return {
        "samples": samples,
        "seconds": seconds,
        "scheduler CPU": cpu,
        "tokens": tokens,
        "log-prob error": errors,
    }


def scheduler_of(fleet):
    import psutil

    (leader,) = [replica.process.pid for replica in fleet._replicas]
    children = psutil.Process(leader).children(recursive=True)
    return next(child for child in children if "scheduler" in " ".join(child.cmdline()))


async def sample(
    urls, key, scheduler, prompts, shape, stops, **more
) -> tuple[float, float, list[list[Sampled]]]:
    """(seconds, the scheduler's CPU seconds, each group's samples). Without ``stops`` each sample has the greatest
    length. Flushing the cache, which collects garbage, is not counted. ``more``: sampling parameters."""
    import aiohttp

    length = {"max_new_tokens": shape["max_new_tokens"], "stop_token_ids": stops, "ignore_eos": not stops}
    parameters = [length | {"temperature": 1.0} | more for _ in range(shape["group_size"])]

    async def group(session, prompt) -> list[Sampled]:
        ids = [list(prompt)] * len(parameters)
        body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
        async with session.post(f"{urls[0]}/generate", json=body) as answer:
            answer.raise_for_status()
            rows = [one["meta_info"]["output_token_logprobs"] for one in await answer.json()]
        return [[(logprob, token) for logprob, token, *_ in row] for row in rows]

    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=limit, headers=key.http_headers) as session:
        async with session.post(f"{urls[0]}/flush_cache", params={"timeout": 30}) as answer:
            answer.raise_for_status()
        began, before = time.perf_counter(), sum(scheduler.cpu_times()[:2])
        groups = await asyncio.gather(*(group(session, prompt) for prompt in prompts))
        return time.perf_counter() - began, sum(scheduler.cpu_times()[:2]) - before, groups


def largest_error(model: Path, pairs) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst = 0.0
    with torch.no_grad():
        for prompt, sampled in pairs:
            logprobs, ids = (torch.tensor(column) for column in zip(*sampled, strict=True))
            logits = reference(torch.tensor([[*prompt, *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, -1)[torch.arange(len(ids)), ids]
            worst = max(worst, (expected - logprobs).abs().max().item())
    return worst


def report(result: dict) -> None:
    for workload, shape in WORKLOADS.items():
        found = result[workload]
        print(f"{workload}: {shape}")
        for name, seconds in found["seconds"].items():
            wall, cpu = statistics.median(seconds), statistics.median(found["scheduler CPU"][name])
            rates = f"{found['samples'] / wall:.0f} samples/s   {statistics.median(found['tokens'][name]) / wall:.0f} tokens/s"
            print(
                f"  {line(name, seconds)}   scheduler {cpu:.2f} CPU s   {rates}   log-prob error {found['log-prob error'][name]:.1e}"
            )
        for what in ("seconds", "scheduler CPU"):
            ours, theirs = found[what].values()
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            print(f"  {what}, with / without, median of pairs: {ratio:.2f}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
