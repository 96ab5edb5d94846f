"""The work of checks that need the server of the selftest: log-probs, transfer, a flipped bit, mismatch by cause.

Each function is (folder, config, request) -> Found. It runs on one rank and raises CheckFailed.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import RunConfig
from launch.processes.run_folder import RunFolder
from launch.selftest.alone import SANE_PROBABILITY, check_gap
from launch.selftest.check import REPORT, CheckFailed, Found
from launch.studies.verify_sync import differing_tensors, fixed_prompts
from parallel.planning.architecture import read_hf_config
from parallel.weights.hf_files import HuggingFaceWeights, PerturbedWeights
from parallel.weights.transfer import WeightBroadcaster
from rollout.client import RolloutError
from rollout.run_key import RunKey, run_key
from rollout.sampling.fixed_samples import prefill_logprobs
from rollout.servers.client import SGLangClient
from rollout.servers.control import SGLangControl
from rollout.sglang_plugin.tandem_process_memory import Sending
from trainer.engine_agreement import EXACT_TOLERANCE
from trainer.learner import Learner
from trainer.studies.layout_scoring import Scorer, score_under_switches
from trainer.studies.layout_statistics import Sampled, join_groups, probability_gaps
from trainer.turns import CACHE, WEIGHTS, OwnDevices, SharedDevices, make_room
from trainer.weight_sync import WeightSync

TEMPERATURES = (1.0, 0.7)
PROBE_TOKENS = 24
TRANSFERS = 3
SAMPLES_PER_PROMPT = 8
FOUND_BY_SERVER = "other bytes were received than sent"
DO_NOT_TRAIN = f"do not train here; {REPORT}"


Checksums = Mapping[str, str]
"""By SGLang's name of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A learner, and the server that it sends weights to."""

    learner: Learner
    control: SGLangControl
    sync: WeightSync
    turns: OwnDevices


@contextmanager
def joined(config: RunConfig, request: Mapping[str, Any]) -> Iterator[Joined]:
    """On one GPU, learner and server take turns as in a colocated run, and the server first gets the learner's weights."""
    control, key = _control(config, request)
    control_of = partial(SGLangControl, config.rollout, config.launch, key=key)
    is_shared = config.launch.takes_turns
    with control:
        if is_shared:
            make_room(control, CACHE, WEIGHTS)
        learner = Learner.of_policy_alone(config)
        learner.version = control.versions()[0]
        turns = SharedDevices(learner, control) if is_shared else OwnDevices()
        sync = WeightSync(learner, control, config.rollout, config.launch, turns=turns, control_of=control_of)
        try:
            sync.take_over(sends=is_shared)
            yield Joined(learner=learner, control=control, sync=sync, turns=turns)
        finally:
            sync.close()


def _control(config: RunConfig, request: Mapping[str, Any]) -> tuple[SGLangControl, RunKey]:
    key = run_key(Path(request["key_file"]))
    return SGLangControl(config.rollout, config.launch, request["urls"], key=key), key


def engines(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    with joined(config, request) as there:
        nats, gap, count = gaps(there, config)
    fix = f"the server does not serve this model or this softmax; {REPORT}"
    check_gap("a sampled token's log-prob differs", nats, gap, config.model.dtype, fix)
    text = f"{count} tokens at temperatures {' and '.join(map(str, TEMPERATURES))}: {nats:.1e} nats at most"
    return Found(text, {"max_logprob_gap_nats": nats, "max_probability_gap": gap, "tokens": count})


def gaps(there: Joined, config: RunConfig) -> tuple[float, float, int]:
    """(greatest difference in nats, in probability, number of tokens) of learner and server, on tokens that the server
    samples."""
    mine, theirs = list[float](), list[float]()
    for prompt in fixed_prompts(read_hf_config(config.model.path)["vocab_size"]):
        for temperature in TEMPERATURES:
            completions = there.control.probe(prompt, max_new_tokens=PROBE_TOKENS, temperature=temperature)
            theirs += [x for one in completions for x in one.rollout_logprobs.tolist()]
            with there.turns.learner_there():
                scored = there.learner.logprobs_of(prompt, completions, temperature=temperature)
            mine += [x for row in scored for x in row]
    learner_N, rollout_N = torch.tensor(mine), torch.tensor(theirs)
    # torch's maximum does not lose a NaN.
    return (
        (learner_N - rollout_N).abs().max().item(),
        probability_gaps(rollout_N, learner_N).max().item(),
        len(mine),
    )


def transfer(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    """Send other weights, then let the server read them from disk. It must hold the same bits both times."""
    with joined(config, request) as there:
        control, learner = there.control, there.learner
        (before,) = control.checksums()
        with there.turns.learner_there():
            learner.engine.load_weights(PerturbedWeights(config.model.path))
            learner.save_hf(folder.export)
        sent = [there.sync.publish() for _ in range(TRANSFERS)]
        (received,) = control.checksums()
        nats, gap, _ = gaps(there, config)
        control.load_from_disk(folder.export, version=learner.version)
        (expected,) = control.checksums()
        check_received(before, received, expected)
        with there.turns.learner_there():
            learner.engine.load_weights(HuggingFaceWeights(config.model.path))
        there.sync.publish()
        (back,) = control.checksums()
    check_received(expected, back, before)
    fastest = min(sent, key=lambda one: one.seconds)
    mib = fastest.bytes / 2**20
    text = f"{len(received)} tensors, {mib:.1f} MiB in {fastest.seconds:.3f} s with its proof ({mib / fastest.seconds:,.0f} MiB/s)"
    figures = {
        "bytes": fastest.bytes, "seconds": fastest.seconds, "mib_per_s": mib / fastest.seconds,
        "all_seconds": [one.seconds for one in sent], "max_logprob_gap_nats": nats, "max_probability_gap": gap,
    }  # fmt: skip
    return Found(f"{text}; then {nats:.1e} nats at most", figures)


def check_received(before: Checksums, received: Checksums, expected: Checksums) -> None:
    """Before a transfer, after it, and after the same weights were read from disk."""
    if wrong := differing_tensors(received, expected):
        error = f"{len(wrong)} of {len(expected)} tensors of the server are not those that were sent: {', '.join(wrong[:3])}"
        raise CheckFailed(error, DO_NOT_TRAIN)
    if same := sorted(before.keys() - set(differing_tensors(before, expected))):
        raise CheckFailed(f"the check proves nothing: the server held {same[0]} before it was sent")


def flipped_bit(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    """Change one bit of one broadcast after the sender has hashed it. The server must refuse the update."""
    with joined(config, request) as there:
        there.sync.send_again()
        (before,) = there.control.checksums()
        (version,) = there.control.versions()
        with one_bit_flipped():
            try:
                there.sync.publish()
            except RolloutError as refused:
                told = str(refused)
            else:
                fix = f"do not train here: transfers are not checked; {REPORT}"
                raise CheckFailed("a bit was changed on the way, and the server took the weights", fix)
        (served,) = there.control.versions()
        there.turns.give_to_servers()  # the next learner takes their memory, and they can give back only what they hold
    if FOUND_BY_SERVER not in told:
        raise CheckFailed(f"the server refused the update for another reason: {told}")
    if served != version:
        raise CheckFailed(f"the server calls the refused update version {served}", DO_NOT_TRAIN)
    with joined(config, request) as there:  # a new group, as after a learner that failed
        there.sync.send_again()
        (after,) = there.control.checksums()
    if wrong := differing_tensors(after, before):
        raise CheckFailed(f"the next update did not repair {', '.join(wrong[:3])}", DO_NOT_TRAIN)
    return Found(f"refused ({FOUND_BY_SERVER}), version {version} stays; the next update repaired it")


@contextmanager
def one_bit_flipped() -> Iterator[None]:
    """Inside, one bit of a transfer's first bucket changes on the way, after the sender has hashed the bucket."""
    start, offer, is_done = WeightBroadcaster.start, Sending.offer, False

    def flipped(flat: Tensor) -> Tensor:
        nonlocal is_done
        if not is_done:
            is_done, flat = True, flat.clone()
            flat[len(flat) // 2] ^= 1
        return flat

    WeightBroadcaster.start = lambda self, flat: start(self, flipped(flat))
    Sending.offer = lambda self, flat, check: offer(self, flipped(flat), check)
    try:
        yield
    finally:
        WeightBroadcaster.start, Sending.offer = start, offer


def mismatch(folder: RunFolder, config: RunConfig, request: dict[str, Any]) -> Found:
    """As ``tandem mismatch --why``: the same tokens scored by learner and server, and under one switch at a time."""
    control, key = _control(config, request)
    with control:
        control.load_from_disk(config.model.path, version=control.versions()[0])
    sampled, prefilled = asyncio.run(_sample(config, request["urls"], key))
    scorer = Scorer(config, print)
    learner_N = scorer.score("samples", sampled)
    assert learner_N is not None  # of the only rank
    causes = {"engines": (sampled.logprobs_N, learner_N), "prefill": (sampled.logprobs_N, prefilled)}
    for name, (switched_N, _) in score_under_switches(scorer, sampled).items():
        if switched_N is not None:
            causes[name] = (learner_N, switched_N)
    found = {name: probability_gaps(*pair).max().item() for name, pair in causes.items()}
    check_causes(found, config.model.dtype, is_cuda=learner_N.is_cuda or torch.cuda.is_available())
    ranked = sorted(found.items(), key=lambda item: -item[1])
    causes_text = ", ".join(f"{name} {gap:.1e}" for name, gap in ranked if name != "engines")
    text = f"max |Δp| of {sampled.num_tokens} tokens: the engines {found['engines']:.1e}; one switch alone: {causes_text}"
    figures = {f"{name}_max_probability_gap": gap for name, gap in found.items()}
    return Found(text, figures | {"tokens": sampled.num_tokens})


def check_causes(found: Mapping[str, float], dtype: str, *, is_cuda: bool) -> None:
    """found: the greatest difference in probability, by cause. Raises CheckFailed."""
    if not is_cuda and found["repeat"] != 0:
        error = f"the learner scored the same tokens twice, and probabilities differ by {found['repeat']:.1e}"
        raise CheckFailed(error, f"check the memory of this machine; {REPORT}")
    limits = dict.fromkeys(found, SANE_PROBABILITY)
    if dtype == "float32":
        limits |= dict.fromkeys(found.keys() & {"engines", "prefill", "packing"}, EXACT_TOLERANCE)
    for name, gap in found.items():
        if not gap <= limits[name]:
            raise CheckFailed(f"{name} moves a probability by {gap:.1e}; {limits[name]:g} is allowed")


async def _sample(config: RunConfig, urls: list[str], key: RunKey) -> tuple[Sampled, Tensor]:
    """Samples of the fixed prompts, and the server's own log-probs of them by a prefill. N"""
    vocab_size, settings = read_hf_config(config.model.path)["vocab_size"], config.rollout
    prompts = fixed_prompts(vocab_size)
    async with SGLangClient(
        urls,
        key=key,
        max_concurrency=settings.max_concurrency,
        timeout_s=settings.request_timeout_s,
        max_retries=0,
    ) as client:
        groups = [
            await client.generate_group(
                prompt,
                max_new_tokens=PROBE_TOKENS,
                temperature=1.0,
                stop_token_ids=[],
                seeds=range(SAMPLES_PER_PROMPT),
            )
            for prompt in prompts
        ]
    sampled = join_groups(prompts, groups)
    prefilled = await prefill_logprobs(
        urls[0], sampled.sequences(), sampled.response_lengths_R.tolist(), vocab_size=vocab_size, name="samples",
        timeout_s=settings.request_timeout_s, report=print, key=key,
    )  # fmt: skip
    return sampled, torch.tensor(prefilled, dtype=torch.float32)
