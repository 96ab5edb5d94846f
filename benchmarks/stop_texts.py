"""What a stop text (``rollout.stop``) costs a server, with the search after every token and only after tokens that can complete it.

First SGLang's own check of a request after each token, by itself, with up to three stop texts: CPU microseconds a token.

Then three servers with Tandem's plugin and the same random model sample the same prompts in turn, with the workloads of ``sampling.py``
and every response at its greatest length. The tokenizer is byte-level BPE, trained on Tandem's own files:

- ``none``: no stop text, so the server has no tokenizer;
- ``every token``: SGLang's own search (the server lacks ``rollout/sglang_plugin/tandem_stop_texts.py``);
- ``its last character``: the default.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, line, parser, servers_on_cpu, write  # noqa: E402
from benchmarks.sampling import WORKLOADS, prepare_model, sample, scheduler_of  # noqa: E402

STOP = "</answer>"
VOCABULARY = 4096
PROMPT_TOKENS = 20
TOKENS = 20_000
TEXTS = (STOP, "</search>", "\nObservation:")
NONE, EVERY, LAST = "none", "every token", "its last character"
WITHOUT_IT = """
import sys, types
sys.modules["tandem_stop_texts"] = types.SimpleNamespace(register=lambda: None)
"""


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=8)
    given = options.parse_args()
    rounds = 2 if given.quick else given.rounds
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        about = announce(vocabulary=VOCABULARY, rounds=rounds, stop=STOP)
        result = about | {"check": measure_check(model, rounds)} | measure(model, Path(folder), rounds)
    report(result)
    write(result, given.json)


def make_model(folder: Path) -> Path:
    """The quickstart's random model with a larger vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    prepare_model(folder, None)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train(
        [str(file) for file in sorted(ROOT.glob("[a-z]*/**/*.*")) if file.suffix in (".md", ".py")], trainer
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, vocab_size=VOCABULARY, eos_token_id=0, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def measure_check(model: Path, rounds: int) -> dict[str, list[float]]:
    """CPU microseconds a token of ``Req.update_finish_state``, by the number of stop texts and the way of the search."""
    import time

    from rollout.servers.answers import stop_pattern
    from rollout.servers.command import PLUGIN, STAND_INS

    sys.path += [str(STAND_INS), str(PLUGIN)]
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import tandem_stop_texts
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    tokenizer, search = get_tokenizer(str(model)), Req.tail_str
    token_ids = random.Random(0).choices(range(300, VOCABULARY), k=TOKENS)  # past the single bytes
    ways = {EVERY: search, LAST: lambda *asked: tandem_stop_texts.tail_to_search(search, *asked)}

    def one(texts: tuple[str, ...]) -> float:
        sampling = SamplingParams(
            max_new_tokens=TOKENS + 1, stop_regex=[stop_pattern(text) for text in texts] or None
        )
        sampling.normalize(tokenizer)
        request = Req("", "", [1], sampling, vocab_size=VOCABULARY, eos_token_ids={0})
        request.tokenizer = tokenizer
        began = time.process_time()
        for token_id in token_ids:
            request.output_ids.append(token_id)
            request.update_finish_state()
            request.finished_reason = None
        return (time.process_time() - began) / TOKENS * 1e6

    cases = [(f"{len(texts)} texts, {way}", texts, way) for texts in ((), (STOP,), TEXTS) for way in ways]
    used: dict[str, list[float]] = {name: [] for name, _, _ in cases}
    for round_number in range(rounds + 1):  # the first fills the cache of tokens
        for name, texts, way in cases[:: 1 if round_number % 2 else -1]:
            Req.tail_str = ways[way]
            if round_number:
                used[name].append(one(texts))
            else:
                one(texts)
    Req.tail_str = search
    return used


def measure(model: Path, folder: Path, rounds: int) -> dict:
    from configs.schema import RunConfig
    from rollout.servers.fleet import ServerFleet

    (folder / "without").mkdir()
    (folder / "without/sitecustomize.py").write_text(WITHOUT_IT)
    fleets, keys = {}, {}
    try:
        for name in (NONE, EVERY, LAST):
            rollout = {"dtype": "float32", "max_total_tokens": 32768, "stop": [] if name == NONE else [STOP]}
            config = RunConfig(model={"path": model}, task={"type": "countdown"}, rollout=rollout)
            spec = servers_on_cpu(config, folder / name)
            fleets[name], keys[name] = ServerFleet(spec, folder / name), spec.key
            os.environ["PYTHONPATH"] = str(folder / "without") if name == EVERY else ""
            fleets[name].start()
        for fleet in fleets.values():
            fleet.wait_healthy(600)
        return {name: measure_workload(name, fleets, keys, rounds) for name in WORKLOADS}
    finally:
        for fleet in fleets.values():
            fleet.stop()


def measure_workload(workload: str, fleets: dict, keys: dict, rounds: int) -> dict:
    from rollout.servers.answers import stop_pattern

    shape = WORKLOADS[workload]
    rng = random.Random(0)
    seconds, cpu = ({name: [] for name in fleets} for _ in range(2))
    for round_number in range(rounds + 1):  # the first warms up
        prompts = [rng.choices(range(1, VOCABULARY), k=PROMPT_TOKENS) for _ in range(shape["groups"])]
        for name in list(fleets)[:: 1 if round_number % 2 else -1]:
            more = {} if name == NONE else {"stop_regex": [stop_pattern(STOP)]}
            scheduler = scheduler_of(fleets[name])
            wall, used, _ = asyncio.run(
                sample(fleets[name].urls, keys[name], scheduler, prompts, shape, [], **more)
            )
            if round_number:
                seconds[name].append(wall)
                cpu[name].append(used)
    tokens = shape["groups"] * shape["group_size"] * shape["max_new_tokens"]
    return {"tokens": tokens, "seconds": seconds, "scheduler CPU": cpu}


def report(result: dict) -> None:
    for name, used in result["check"].items():
        print(
            f"check, {name:28s} median {statistics.median(used):.1f} µs a token   min {min(used):.1f}   max {max(used):.1f}"
        )
    for workload, shape in WORKLOADS.items():
        found = result[workload]
        print(f"{workload}: {shape}")
        for name, seconds in found["seconds"].items():
            used = statistics.median(found["scheduler CPU"][name])
            print(
                f"  {line(name, seconds)}   scheduler {used:.2f} CPU s, {used / found['tokens'] * 1e6:.0f} µs a token"
            )
        for what in ("seconds", "scheduler CPU"):
            none, every, last = (found[what][name] for name in (NONE, EVERY, LAST))
            ratios = [statistics.median(a / b for a, b in zip(x, none, strict=True)) for x in (every, last)]
            print(
                f"  {what}, ratio to no stop text: every token {ratios[0]:.2f}, its last character {ratios[1]:.2f}"
            )


if __name__ == "__main__":
    main()
