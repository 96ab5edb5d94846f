"""Real SGLang servers: log-probs, updates, refusals, and what is left of them when they end."""

import asyncio
import itertools
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from configs.loader import load_config
from configs.schema.rollout import RolloutConfig
from launch.processes.run_folder import RunFolder
from launch.selftest import served
from launch.selftest.bench import CONFIG as SELFTEST
from launch.selftest.check import CheckFailed
from launch.studies.verify_sync import Answers, _get_answers, differences
from parallel.megatron.platform import init_distributed
from parallel.weights.hf_files import PerturbedWeights
from parallel.weights.precision import is_rounded, rounded
from parallel.weights.transfer import Buffers, WeightBroadcaster, make_buckets, plan_transfer
from rollout.client import GenerationError, PromptTooLongError
from rollout.records import Completion, FinishReason
from rollout.sampling.prompt_room import server_limit
from rollout.servers.answers import Sent, neutral_sampling_params, parse_completion
from rollout.servers.client import SGLangClient
from rollout.servers.control import ControlError, SGLangControl
from rollout.servers.fleet import ServerDied, ServerFleet
from rollout.servers.kept_sets import REQUEST, Truncation
from rollout.servers.ports import choose_ports
from rollout.servers.served import OWNED_FLAGS, check_flags_exist, flags_of_sglang
from rollout.servers.share import ServerShare
from rollout.sglang_plugin.tandem_process_memory import PLACE, Sending
from rollout.tiny_model import make_tiny_countdown_model
from rollout.tokenization import load_tokenizer
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.megatron_workers import run_forked
from tests.support.process_groups import assert_all_end, group_of
from tests.support.real_servers import EXACT, make_fleet, send, sharpen, units_of
from tests.support.server_specs import KEY, make_control, server_spec
from tests.support.server_workers import die_in_a_transfer, write_answers_of_sglang
from tests.support.weight_checksums import expected_checksums
from tests.support.whole_runs import RECIPE
from trainer import weight_sync
from trainer.stage_sender import StageSender
from trainer.weight_carriers import MEMORY

ROOT = Path(__file__).resolve().parents[3]


STOP = ("7", "unused")
"""A token has one character, or is one such as <unused_0>, in which a response runs past the text."""


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> list[Path]:
    """Two models of one shape: the first is served, the second is sent."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        make_tiny_countdown_model(folder / f"seed{seed}", seed=seed)
        sharpen(folder / f"seed{seed}")
    return [folder / "seed0", folder / "seed1"]


@pytest.fixture(scope="module")
def models(model_dirs):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in model_dirs]


@pytest.fixture(scope="module")
def fleet(model_dirs, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    fleet = make_fleet(model_dirs[0], logs, stop=STOP)
    fleet.start()
    try:
        fleet.wait_healthy(600)
        log = "".join(file.read_text() for file in logs.iterdir())
        assert "processes of this server are forked" in log and "attention is batched over sequences" in log
        members = [p for replica in fleet._replicas for p in group_of(replica.process.pid)]
        assert len(members) >= 4
        yield fleet
    finally:
        fleet.stop()
    assert_all_end(members, 0.0)


@pytest.fixture(scope="module")
def control(fleet):
    with make_control(fleet.urls) as control:
        yield control


@torch.no_grad()
def reference_logprobs(
    model,
    prompt_ids: list[int],
    token_ids: list[int],
    temperature: float,
    kept: list[list[int]] | None = None,
) -> list[float]:
    """log_softmax(logits / temperature) of the response tokens, by transformers; over the ids of ``kept``, if given."""
    logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    for row, ids in zip(logits, kept or [], strict=kept is not None):
        values = row[ids].clone()
        row.fill_(-torch.inf)
        row[ids] = values
    return torch.log_softmax(logits / temperature, -1)[torch.arange(len(token_ids)), token_ids].tolist()


@pytest.mark.engines
def test_rollout_logprobs_are_of_the_full_softmax_at_the_sampling_temperature(fleet, models, model_dirs):
    prompts = [[3 + (7 * i + j * j) % 18 for j in range(3 + 5 * i)] for i in range(8)]

    async def sample_all():
        options = {"max_concurrency": 64, "timeout_s": 120, "max_retries": 0, "key": KEY, "stop": STOP}
        async with SGLangClient(fleet.urls, **options) as client:
            shared = {"max_new_tokens": 24, "temperature": 0.7, "stop_token_ids": [5, 9]}
            # Also a group of one.
            wanted = [
                client.generate_group(p, **shared, seeds=range(1 + i % 4)) for i, p in enumerate(prompts)
            ]
            return await asyncio.gather(*wanted)

    groups = asyncio.run(sample_all())
    assert [len(group) for group in groups] == [1, 2, 3, 4] * 2
    completions = [completion for group in groups for completion in group]
    tokenizer = load_tokenizer(model_dirs[0])
    by_text = {i for i in range(len(tokenizer)) if any(text in tokenizer.decode([i]) for text in STOP)}
    ends = {0, 5, 9} | by_text  # the model's own end token stops too
    for prompt, completion in [
        (prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group
    ]:
        expected = reference_logprobs(models[0], prompt, completion.token_ids, 0.7)
        assert completion.rollout_logprobs == pytest.approx(expected, abs=EXACT)
        assert completion.token_versions.tolist() == [0] * len(completion.token_ids)
        stopped = completion.finish_reason is FinishReason.STOP
        assert (completion.token_ids[-1] in ends) == stopped
        assert not set(completion.token_ids[:-1]) & ends
        assert stopped or len(completion.token_ids) == 24
    assert len({c.finish_reason for c in completions}) == 2
    assert by_text & {int(c.token_ids[-1]) for c in completions}
    other = reference_logprobs(models[0], prompts[0], completions[0].token_ids, 1.0)
    assert completions[0].rollout_logprobs != pytest.approx(other, abs=10 * EXACT)
    assert "equal prompts of a prefill are computed once" in fleet._replicas[0].log_file.read_text()


def kept_rows(sample: Completion) -> list[list[int]]:
    return [part.tolist() for part in np.split(sample.kept_ids, sample.num_kept.cumsum())[:-1]]


@torch.no_grad()
def reference_kept_ids(model, prompt_ids: list[int], token_ids: list[int], temperature: float, truncation):
    """By transformers, one token at a time: (margin to the nearest limit, kept ids)."""
    logits = model(torch.tensor([[*prompt_ids, *token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    found = []
    for p_V in torch.softmax(logits.double() / temperature, -1):
        ordered, ids = p_V.sort(descending=True)
        before = ordered.cumsum(0) - ordered
        is_kept = (torch.arange(len(ids)) < truncation.top_k) & (before <= truncation.top_p)
        is_kept &= ordered >= truncation.min_p * ordered[0]
        margins = [
            (before - truncation.top_p).abs().min(),
            (ordered - truncation.min_p * ordered[0]).abs().min(),
        ]
        found.append((min(margins).item(), set(ids[is_kept].tolist())))
    return found


@pytest.mark.engines
@pytest.mark.parametrize(
    "limits", [(0.9, 10, 0.0), (1.0, 3, 0.0), (0.6, 21, 0.0), (1.0, 21, 0.2), (0.8, 10, 0.1)]
)
def test_kept_ids_and_log_probs_are_of_the_truncated_softmax(fleet, models, limits):
    """Against the kept set by its definition, and against a log-softmax over it: below 1e-4, where the full softmax
    is off by far more."""
    top_p, top_k, min_p = limits
    truncation = Truncation(top_p=top_p, top_k=top_k, min_p=min_p, vocab_size=models[0].config.vocab_size)
    prompts = [[3 + (7 * i + j * j) % 18 for j in range(3 + 5 * i)] for i in range(4)]

    async def sample_all():
        shared = {"max_new_tokens": 24, "temperature": 0.7, "stop_token_ids": [5]}
        options = {"max_concurrency": 64, "timeout_s": 120, "max_retries": 0, "key": KEY}
        async with SGLangClient(fleet.urls, truncation=truncation, **options) as client:
            full = client.with_own_places()  # one batch of both kinds
            asked = [client.generate_group(p, **shared, seeds=range(3)) for p in prompts]
            *groups, plain = await asyncio.gather(
                *asked, full.generate_group(prompts[0], **shared, seeds=[1])
            )
            return groups, plain

    groups, (plain,) = asyncio.run(sample_all())
    expected = reference_logprobs(models[0], prompts[0], plain.token_ids, 0.7)
    assert plain.num_kept is None and plain.rollout_logprobs == pytest.approx(expected, abs=EXACT)
    furthest, num_compared = 0.0, 0
    for prompt, sample in [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]:
        kept = kept_rows(sample)
        for (margin, wanted), ids in zip(
            reference_kept_ids(models[0], prompt, sample.token_ids, 0.7, truncation), kept, strict=True
        ):
            if margin > 1e-5:  # else rounding decides
                assert set(ids) == wanted
                num_compared += 1
        full = reference_logprobs(models[0], prompt, sample.token_ids, 0.7)
        exact = reference_logprobs(models[0], prompt, sample.token_ids, 0.7, kept)
        assert sample.rollout_logprobs == pytest.approx(exact, abs=EXACT)
        furthest = max(furthest, max(abs(a - b) for a, b in zip(sample.rollout_logprobs, full, strict=True)))
    assert num_compared > 50 and furthest > 100 * EXACT


@pytest.mark.engines
def test_siblings_of_one_prompt_differ_unless_top_p_or_top_k_leaves_one_id(fleet):
    async def sample():
        async with SGLangClient(
            fleet.urls, max_concurrency=64, timeout_s=120, max_retries=0, key=KEY
        ) as client:
            asked = {"prompt_ids": [4, 5, 6], "max_new_tokens": 8, "stop_token_ids": [0], "seeds": range(16)}
            likeliest = [client.with_own_places(top_p=1e-9), client.with_own_places(top_k=1)]
            return [
                {tuple(c.token_ids) for c in await each.generate_group(**asked, temperature=temperature)}
                for each, temperature in ((client, 1.0), *((each, 1.0) for each in likeliest), (client, 0.0))
            ]

    sampled, *likeliest, greedy = asyncio.run(sample())
    assert len(sampled) > 8 and likeliest == [greedy, greedy] and len(greedy) == 1


@pytest.mark.engines
def test_an_oversized_request_is_refused_with_the_servers_words(fleet):
    async def sample():
        async with SGLangClient(
            fleet.urls, max_concurrency=2, timeout_s=60, max_retries=3, key=KEY
        ) as client:
            try:
                await client.generate_group(
                    [4, 5], max_new_tokens=5000, temperature=1.0, stop_token_ids=[0], seeds=[1, 2]
                )
            finally:
                assert client.stats.retries == 0

    with pytest.raises(GenerationError, match=r"HTTP 400: .*maximum context length of 256"):
        asyncio.run(sample())


@pytest.mark.engines
def test_a_server_takes_the_lengths_that_prompts_and_episodes_are_held_to(fleet):
    positions = 256
    limit = server_limit("max_position_embeddings", positions)

    async def sample():
        async with SGLangClient(
            fleet.urls, max_concurrency=4, timeout_s=60, max_retries=0, key=KEY
        ) as client:

            async def lengths(prompt, max_new_tokens):
                made = await client.generate_group(
                    [5] * prompt,
                    max_new_tokens=max_new_tokens,
                    temperature=1.0,
                    stop_token_ids=[],
                    seeds=[*range(16)],
                )
                return {prompt + len(one.token_ids) for one in made}

            for prompt in (limit.prompt, limit.prompt - 20):
                assert max(await lengths(prompt, positions - prompt)) == limit.sequence
            with pytest.raises(PromptTooLongError, match="HTTP 400"):
                await lengths(limit.prompt + 1, 1)
            with pytest.raises(PromptTooLongError, match="HTTP 400"):
                await lengths(positions, 1)

    asyncio.run(sample())


@pytest.mark.engines
def test_a_control_request_that_fails_carries_the_servers_words(control):
    with pytest.raises(ControlError, match="no weight-update session is open"):
        control.close_update()
    with pytest.raises(ValueError, match="join_group first"):
        control.receive_bucket(names=["x"], dtype="float32", shapes=[[1]], version=1)


@pytest.mark.engines
def test_an_update_in_the_middle_of_a_response_is_exact_token_by_token(fleet, control, models):
    sent = check_an_update_in_a_response(control, fleet.urls, models, tensor_parallel=1)
    assert control.checksums() == [expected_checksums(sent.named_parameters())]


@pytest.mark.engines
def test_an_update_in_the_middle_of_a_response_keeps_each_tokens_kept_ids(fleet, control, models):
    truncation = Truncation(top_p=0.95, top_k=12, min_p=0.0, vocab_size=models[0].config.vocab_size)
    check_an_update_in_a_response(control, fleet.urls, models, tensor_parallel=1, truncation=truncation)


def probe_truncated(
    asking: SGLangControl,
    prompt: list[int],
    truncation: Truncation,
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[Completion]:
    """As ``SGLangControl.probe``: no token ends it."""
    sampling = neutral_sampling_params(max_new_tokens=max_new_tokens, temperature=temperature)
    sampling |= {**truncation.sampling_params, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **REQUEST}
    replies = asking._post("probe", "/generate", body).wait()
    return [parse_completion(reply, Sent.of(prompt, truncation=truncation)) for reply in replies]


def check_an_update_in_a_response(
    control, urls, models, tensor_parallel: int, truncation: Truncation | None = None
):
    """Weights arrive while a response is being sampled: each token's log-prob is of the version that it names. An
    even version is of the first model. Returns the model that the server has at the end."""
    prompt = [3, 8, 5, 14, 9]
    with (
        make_control(urls, tp=tensor_parallel) as asking,
        ThreadPoolExecutor(1) as thread,
    ):
        pause_s = 0.1
        for _ in range(20):  # again, and later, until the pause is well inside the response
            old = control.versions()[0]
            sent = models[(old + 1) % 2]
            limits = {"max_new_tokens": 240, "temperature": 1.3}
            if truncation is None:
                response = thread.submit(asking.probe, prompt, **limits)
            else:
                response = thread.submit(probe_truncated, asking, prompt, truncation, **limits)
            is_late = bool(wait([response], timeout=pause_s).done)
            pause_s = 0.1 if is_late else 2 * pause_s
            control.pause()  # before the group is made, which takes as long as the response
            assert send(control, sent, version=old + 1) == control.versions() == [old + 1]
            control.resume()
            (completion,) = response.result()
            if min(completion.token_versions.tolist().count(version) for version in (old, old + 1)) >= 10:
                break
    versions = completion.token_versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {old, old + 1}
    for version in (old, old + 1):
        kept = None if truncation is None else kept_rows(completion)
        expected = reference_logprobs(models[version % 2], prompt, completion.token_ids, 1.3, kept)
        gaps = [abs(a - b) for a, b in zip(completion.rollout_logprobs, expected, strict=True)]
        assert max(gap for gap, v in zip(gaps, versions, strict=True) if v == version) <= EXACT
        assert max(gap for gap, v in zip(gaps, versions, strict=True) if v != version) > 0.1
    return sent


@pytest.mark.engines
def test_a_probe_after_an_update_agrees_with_the_sent_model_and_not_with_the_old_one(control, models):
    version = control.versions()[0] + 1
    sent, old = models[version % 2], models[(version + 1) % 2]
    send(control, sent, version=version)
    control.resume()
    (completion,) = control.probe([3, 4, 5, 6], max_new_tokens=12, temperature=0.7)
    assert len(completion.token_ids) == 12
    assert completion.token_versions.tolist() == [version] * 12
    assert completion.rollout_logprobs == pytest.approx(
        reference_logprobs(sent, [3, 4, 5, 6], completion.token_ids, 0.7), abs=EXACT
    )
    assert completion.rollout_logprobs != pytest.approx(
        reference_logprobs(old, [3, 4, 5, 6], completion.token_ids, 0.7), abs=0.1
    )


@pytest.mark.engines
def test_a_paused_server_leaves_the_cores_to_the_learner(fleet, control):
    (leader,) = [replica.process.pid for replica in fleet._replicas]
    (scheduler,) = [p for p in group_of(leader) if "scheduler" in " ".join(p.cmdline())]
    control.pause()
    before, end = sum(scheduler.cpu_times()[:2]), time.monotonic() + 4.0
    while time.monotonic() < end:  # an idle one looks for requests once in a second
        time.sleep(0.1)
    assert sum(scheduler.cpu_times()[:2]) - before < 0.4
    control.resume()


@pytest.mark.engines
def test_one_wrong_bit_of_a_transfer_is_found_and_named(fleet, models, model_dirs):
    """By ``tandem verify-sync``: a server that has read the weights from disk, against itself after a transfer
    of those very weights, and with one bit changed on the way."""
    config = load_config(RECIPE, [f"model.path={model_dirs[0]}"])
    control = make_control(fleet.urls)
    control.load_from_disk(model_dirs[0], version=0)
    (reference,) = _get_answers(control, config)
    weights = dict(models[0].named_parameters())
    name = "model.layers.2.mlp.up_proj.weight"
    wrong = {n: t.detach().clone() for n, t in weights.items()}
    wrong[name].view(torch.int32)[5, 7] ^= 1

    def answers_after(sent: Mapping[str, torch.Tensor], version: int) -> Answers:
        send(control, SimpleNamespace(named_parameters=sent.items), version=version)
        control.resume()
        return _get_answers(control, config)[0]

    found = differences(answers_after(wrong, 1), reference)
    assert found[0] == name.replace("up_proj", "gate_up_proj") and all("prompt" in what for what in found[1:])
    assert differences(answers_after(weights, 2), reference) == []
    control.close()


@pytest.fixture
def of_selftest(fleet, control, model_dirs, tmp_path):
    """Runs the work of a selftest's check with this server."""
    init_distributed(60.0)
    request = {"urls": fleet.urls, "key_file": str(KEY.file)}

    def run(part, placement="separate"):
        config = load_config(SELFTEST, [f"model.path={model_dirs[0]}", f"launch.placement={placement}"])
        return part(RunFolder(tmp_path), config, request)

    control.load_from_disk(model_dirs[0], version=2)
    yield run
    control.load_from_disk(model_dirs[0], version=2)


@pytest.mark.engines
def test_the_selftest_finds_a_server_whose_weights_were_changed_behind_its_back(
    of_selftest, control, model_dirs
):
    found = of_selftest(served.engines).figures
    assert found["max_logprob_gap_nats"] <= EXACT and found["tokens"] == 6 * 2 * 24
    control.load_from_disk(model_dirs[1], version=2)
    with pytest.raises(
        CheckFailed, match=r"in float32 a sampled token's log-prob differs by .* 0\.0001 nats is allowed"
    ):
        of_selftest(served.engines)


@pytest.mark.engines
def test_the_selftest_finds_a_transfer_of_other_weights_and_names_their_tensor(
    of_selftest, control, monkeypatch
):
    """The bit is wrong before it is hashed: server and sender agree on it, and no log-prob shows it."""
    before = control.checksums()
    found = of_selftest(served.transfer)
    assert found.figures["mib_per_s"] > 0 and found.figures["max_logprob_gap_nats"] <= EXACT
    assert control.checksums() == before, "the server has the model's weights again"
    make = weight_sync.make_buckets

    def make_wrong(*arguments):
        for bucket in make(*arguments):
            wrong = bucket.bytes.clone()
            if bucket.is_last:
                wrong[-4] ^= 1
            yield replace(bucket, bytes=wrong)

    monkeypatch.setattr(weight_sync, "make_buckets", make_wrong)
    with pytest.raises(
        CheckFailed, match=r"^1 of \d+ tensors of the server are not those that were sent: model\."
    ):
        of_selftest(served.transfer)


@pytest.mark.engines
def test_the_selftest_finds_a_server_that_takes_other_bytes_than_were_sent(of_selftest, control, monkeypatch):
    found = of_selftest(served.flipped_bit)
    assert "other bytes were received than sent" in found.text
    monkeypatch.setattr(served, "one_bit_flipped", nullcontext)  # so that nothing is refused
    with pytest.raises(CheckFailed, match="the server took the weights"):
        of_selftest(served.flipped_bit)


@pytest.mark.engines
def test_the_selftest_on_shared_devices_asks_a_server_only_for_memory_that_it_has(of_selftest, monkeypatch):
    """On GPUs a server that is asked twice ends."""
    given_back, release, resume = set[str](), SGLangControl.release_memory, SGLangControl.resume_memory

    def release_memory(control, tags):
        assert not given_back & set(tags)
        given_back.update(tags)
        release(control, tags)

    def resume_memory(control, tags):
        assert given_back >= set(tags)
        given_back.difference_update(tags)
        resume(control, tags)

    monkeypatch.setattr(SGLangControl, "release_memory", release_memory)
    monkeypatch.setattr(SGLangControl, "resume_memory", resume_memory)
    assert "other bytes were received than sent" in of_selftest(served.flipped_bit, "colocated").text


@pytest.mark.engines
def test_the_selftest_ranks_causes_of_mismatch_and_finds_one_that_is_not_sane(of_selftest, monkeypatch):
    found = of_selftest(served.mismatch).figures
    assert found["repeat_max_probability_gap"] == 0 and found["engines_max_probability_gap"] <= EXACT
    assert found["dtype_max_probability_gap"] > 10 * found["engines_max_probability_gap"]
    causes = {
        name.removesuffix("_max_probability_gap"): gap for name, gap in found.items() if name != "tokens"
    }
    for name, gap in (
        ("engines", 2e-4),
        ("prefill", 2e-4),
        ("dtype", 0.2),
        ("packing", math.nan),
        ("repeat", 1e-9),
    ):
        with pytest.raises(CheckFailed, match=f"{gap:.1e}"):
            served.check_causes(causes | {name: gap}, "float32", is_cuda=False)
    other = served.Scorer

    def other_weights(config, report):
        scorer = other(config, report)
        scorer.engine.load_weights(PerturbedWeights(config.model.path))
        return scorer

    monkeypatch.setattr(served, "Scorer", other_weights)
    with pytest.raises(CheckFailed, match="engines moves a probability by"):
        of_selftest(served.mismatch)


@pytest.mark.engines
def test_the_server_finds_and_names_a_bit_that_changes_on_the_way_and_what_is_not_sent(
    fleet, control, models
):
    """In a tensor that goes into its parameter, in one of several, and in the hashes; in the first and in the last
    of the model."""
    control.require_plugin()
    version = control.versions()[0]
    weights = list(models[0].named_parameters())
    names = [name for name, _ in weights]
    sizes = {name: tensor.nbytes for name, tensor in weights}
    ends = (names[0], names[-1], max(sizes, key=sizes.__getitem__), min(sizes, key=sizes.__getitem__))
    for broken in (*ends, "hashes"):
        with pytest.raises(ControlError, match="other bytes were received than sent") as refused:
            send_broken(control, weights, broken)
        assert broken == "hashes" or broken in str(refused.value) or " to " in str(refused.value)
    missing = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ControlError, match="other bytes were received than sent"):
        send_broken(control, weights, names[0], carrier="gloo")
    with pytest.raises(
        ControlError, match=r"did not fill 1 parameters: model\.layers\.1\.self_attn\.qkv_proj"
    ):
        send_broken(control, [(name, tensor) for name, tensor in weights if name != missing], None)
    assert control.versions() == [version], "no server calls it the new version"
    for carrier, model in ((MEMORY, models[(version + 1) % 2]), ("gloo", models[version % 2])):
        assert send(control, model, version=version, carrier=carrier) == [version]
        assert control.checksums() == [expected_checksums(model.named_parameters())]
    check_packed_matrices_arrive_rounded(control, models[version % 2])
    assert send(control, models[version % 2], version=version) == [version]
    control.resume()


def check_packed_matrices_arrive_rounded(control: SGLangControl, model) -> None:
    """The servers hold, bit by bit, what they hold when the rounded numbers are sent as they are."""
    (version,), found = control.versions(), []
    for precision, carrier in (("int8", MEMORY), ("int4", "gloo"), ("fp8_e4m3_block", MEMORY)):
        whole = deepcopy(model)
        for name, parameter in whole.named_parameters():
            if is_rounded(name, precision):
                parameter.data = rounded(parameter.data, precision)
        send(control, whole, version=version)
        expected = control.checksums()
        send(control, model, version=version)
        assert control.checksums() != expected
        send(control, model, version=version, carrier=carrier, precision=precision)
        assert control.checksums() == expected, precision
        found.append(expected)
    assert found[0] != found[1] != found[2]


def check_that_servers_say_whether_they_can_read(control: SGLangControl) -> None:
    """One rank that cannot copy is enough, and harms nothing."""
    sender = StageSender(control, MEMORY, 60)
    sender.try_memory()
    say, calls = Sending._say, itertools.count()

    def say_elsewhere(self, connection, flat, check):
        if next(calls) == 0:
            connection.send(PLACE.pack(4096, flat.numel()))
        else:
            say(self, connection, flat, check)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Sending, "_say", say_elsewhere)
        with pytest.raises(
            ControlError, match=r"rank [01]: cannot copy out of the learner.s memory .*Bad address"
        ):
            sender.try_memory()
    sender.try_memory()


def send_broken(control: SGLangControl, weights, broken: str | None, carrier: str = MEMORY) -> None:
    """An update as version 99, of which another bit is sent than was hashed: of the tensor ``broken``, or of the hashes."""
    sender = StageSender(control, carrier, 60)
    plan = plan_transfer(units_of(weights), dtype=torch.float32, device="cpu", alone_bytes=2**17)
    last = len(plan.buckets)
    wrong = last if broken == "hashes" else -1
    for number, bucket in enumerate(plan.buckets):
        if broken in bucket.names:
            wrong = number
    assert (wrong < 0) == (broken is None)
    home, name = (WeightBroadcaster, "start") if carrier == "gloo" else (Sending, "offer")
    whole, calls = getattr(home, name), itertools.count()

    def broken_one(self, flat: torch.Tensor, *rest):
        if next(calls) == wrong:
            flat = flat.clone()
            flat.view(torch.uint8)[-4] ^= 1
        return whole(self, flat, *rest)

    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(home, name, broken_one)
            sender.send(make_buckets(weights, plan, Buffers("cpu")), plan, 99, control.open_update())
    finally:
        sender.leave()
        control.take_over()


@pytest.mark.engines
def test_servers_that_outlive_a_learner_which_died_in_a_transfer_serve_nothing_until_the_next_one_has_sent_its_weights(
    fleet, control, models, model_dirs
):
    """Paused, an update open, parts of two versions in the weights, a process group without its sender, and
    the version of before."""
    version, (url,) = control.versions()[0], control.urls
    other, mine = models[(version + 1) % 2], models[version % 2]
    for carrier in ("gloo", MEMORY):  # the next learner may die in the same place
        arguments = (model_dirs[(version + 1) % 2], url, carrier)
        assert run_forked(die_in_a_transfer, *arguments) == -signal.SIGKILL
    with (
        make_control(fleet.urls) as next_one,
        ThreadPoolExecutor(1) as thread,
    ):
        assert next_one.take_over() and next_one.take_over()
        assert next_one.versions() == [version], "nothing in its version tells"
        held, whole = (
            next_one.checksums()[0],
            [expected_checksums(model.named_parameters()) for model in (mine, other)],
        )
        assert held not in whole, "parts of two versions"
        with make_control(fleet.urls) as asking:
            response = thread.submit(asking.probe, [3, 4, 5], max_new_tokens=4, temperature=1.0)
            assert send(next_one, mine, version=version) == [version]
            assert next_one.checksums() == [expected_checksums(mine.named_parameters())]
            assert not response.done()
            next_one.resume()
            (completion,) = response.result()
        expected = reference_logprobs(mine, [3, 4, 5], completion.token_ids, 1.0)
        assert completion.rollout_logprobs == pytest.approx(expected, abs=EXACT)
        assert not next_one.take_over(), "a whole update"
        next_one.resume()


def fleets_of_one_replica(model_dir: Path, log_dir: Path, num_nodes: int) -> list[ServerFleet]:
    """Two tensor-parallel ranks, on one node or each on a node of its own."""
    plugin = num_nodes == 1  # on two nodes SGLang's own code alone
    spec = server_spec(model_dir, dtype="float32", max_total_tokens=4096, tp=2, sglang_plugin=plugin)
    (ports,) = choose_ports([0], None)
    fleets = []
    for node in range(num_nodes):
        share = ServerShare(
            replica=0, node=node, node_rank=node, num_nodes=num_nodes, first_gpu=0, num_ranks=2 // num_nodes
        )
        meeting = {0: f"127.0.0.1:{ports.nccl}"} if num_nodes > 1 else {}
        fleets.append(ServerFleet(spec, log_dir, [share], meeting))
    return fleets


@pytest.mark.engines
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_tensor_parallel_servers_take_updates_too(model_dirs, models, tmp_path, num_nodes):
    fleets = fleets_of_one_replica(model_dirs[0], tmp_path, num_nodes)
    with ExitStack() as ending:
        for fleet in fleets:
            ending.callback(fleet.stop)
            fleet.start()
        for fleet in fleets:
            fleet.wait_healthy(600)
        urls = [url for fleet in fleets for url in fleet.urls]
        assert len(urls) == 1, "a replica answers on its first node alone"
        with make_control(urls, tp=2) as control:
            before = control.checksums()[0]
            has_plugin = num_nodes == 1
            if has_plugin:
                control.require_plugin()
                check_that_servers_say_whether_they_can_read(control)
                with pytest.raises(ControlError, match=r"rank [01]: other bytes were received than sent"):
                    send_broken(control, list(models[1].named_parameters()), "model.norm.weight")
            else:
                with pytest.raises(ControlError, match="does not answer as Tandem's SGLang plugin"):
                    control.require_plugin()
            send(control, models[1], version=1, in_one_request=has_plugin)
            after = control.checksums()[0]
            if has_plugin:
                check_packed_matrices_arrive_rounded(control, models[1])
                send(control, models[1], version=1)
                assert control.checksums()[0] == after
            control.resume()
            assert {name.split("/")[0] for name in after} == {"rank0", "rank1"}
            assert all(after[name] != before[name] for name in after if "proj" in name)
            (completion,) = control.probe([3, 4, 5, 6], max_new_tokens=12, temperature=0.7)
            expected = reference_logprobs(models[1], [3, 4, 5, 6], completion.token_ids, 0.7)
            assert completion.rollout_logprobs == pytest.approx(expected, abs=EXACT)
            if has_plugin:  # by SGLang's own path it is slow, and one server's is like another's
                check_an_update_in_a_response(control, urls, models, tensor_parallel=2)
        for fleet in fleets:
            fleet.poll()


STOP_TEXTS = ("ing", "</search>", "\n### Response:", " tool", "é🙂", "<think>")


def responses_with_stop_texts(tokenizer) -> list[tuple[str, list[int]]]:
    """Random tokens around each text, which stands in the tokenizer's own tokens, in random ones, in one for each byte, or not at all."""
    generator, vocabulary = random.Random(0), tokenizer.get_vocab()
    responses = []
    for text in STOP_TEXTS * 8:
        letters = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
        spelled, rest = [], letters
        while rest:
            tokens = [rest[:n] for n in range(1, len(rest) + 1) if rest[:n] in vocabulary]
            spelled.append(vocabulary[token := generator.choice(tokens)])
            rest = rest[len(token) :]
        own = tokenizer.encode(text, add_special_tokens=False)
        for written in own, spelled, [vocabulary[letter] for letter in letters], []:
            around = [[generator.randrange(len(vocabulary)) for _ in range(12)] for _ in range(2)]
            responses.append((text, [*around[0], *written, *around[1]]))
    return responses


@pytest.fixture(scope="module")
def answers_of_sglang(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("sglang") / "answers.json"
    assert run_forked(write_answers_of_sglang, file, responses_with_stop_texts(chat_tokenizer())) == 0
    return json.loads(file.read_text())


@pytest.mark.engines
def test_a_response_ends_with_the_token_that_completes_a_stop_text_however_it_is_written(answers_of_sglang):
    """SGLang's own check after each token, against a search in the whole text; the plugin saves most of its work."""
    tokenizer = chat_tokenizer()

    def end(text: str, token_ids: list[int]) -> int | None:
        lengths = range(1, len(token_ids) + 1)
        return next((n for n in lengths if text in tokenizer.decode(token_ids[:n])), None)

    expected = [end(text, ids) for text, ids in responses_with_stop_texts(tokenizer)]
    alone, with_plugin = answers_of_sglang["alone"], answers_of_sglang["with the plugin"]
    assert alone["ends"] == expected == with_plugin["ends"]
    assert 0 < expected.count(None) < len(expected) / 3
    assert with_plugin["decoded"] < alone["decoded"] * 0.9, (
        "many of these random tokens are parts of characters"
    )


@pytest.mark.engines
def test_the_flags_that_its_sources_tell_are_those_that_sglang_reads(answers_of_sglang):
    read = {option.removeprefix("--") for option in answers_of_sglang["flags"]}
    check_flags_exist(RolloutConfig(server_args=dict.fromkeys(read, True)))
    assert len(set(flags_of_sglang()) - read) < 50
    assert read >= OWNED_FLAGS


@pytest.mark.engines
def test_a_server_that_cannot_start_is_reported_with_its_last_words(model_dirs, tmp_path):
    fleet = make_fleet(model_dirs[0], tmp_path, server_args={"no-such-flag": 3})
    fleet.start()
    try:
        ended = r"(?s)replica 0 \(pid \d+\) ended with exit code 2.*unrecognized arguments: --no-such-flag"
        with pytest.raises(ServerDied, match=ended):
            fleet.wait_healthy(600)
    finally:
        fleet.stop()


OWNER = """
import json, sys, time
from pathlib import Path
from rollout.servers.fleet import ServerFleet
from tests.support.server_specs import KEY, server_spec
fleet = ServerFleet(server_spec(Path(sys.argv[1]), dtype="float32", max_total_tokens=4096), Path(sys.argv[2]))
fleet.start()
print(json.dumps([replica.process.pid for replica in fleet._replicas]), flush=True)
time.sleep(600)
"""


@pytest.mark.engines
def test_sigkill_of_the_owner_leaves_no_process(model_dirs, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model_dirs[0]), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
    )
    with owner:
        (leader,) = json.loads(owner.stdout.readline())
        deadline = time.monotonic() + 120
        members = group_of(leader)
        while len(members) < 4 and time.monotonic() < deadline:  # watchdog, server, scheduler, detokenizer
            time.sleep(0.1)
            members = group_of(leader)
        assert len(members) >= 4
        owner.send_signal(signal.SIGKILL)
        assert_all_end(members)
        assert_all_end(group_of(leader))
