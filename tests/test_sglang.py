"""The SGLang side: the client against servers that really drop connections, the watchdog, and (marked) real SGLang servers."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import requests
import torch
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from configs.schema.rollout import RolloutConfig
from parallel.weight_transfer import WeightBroadcaster, make_buckets
from rollout import sglang_watchdog
from rollout.client import GenerationError
from rollout.records import Completion, FinishReason
from rollout.server_share import ServerShare, on_one_machine
from rollout.sglang_client import SGLangClient
from rollout.sglang_command import (
    FP8_MODELS,
    OWNED_FLAGS,
    Ports,
    check_flags_exist,
    check_quantization,
    check_server_args,
    choose_ports,
    cpu_binding,
    flags_of_sglang,
    server_command,
    server_environment,
)
from rollout.sglang_control import ControlError, Served, SGLangControl
from rollout.sglang_server import ServerDied, ServerFleet, check_gpus, check_gpus_of, visible_gpus
from rollout.tiny_model import make_tiny_countdown_model
from tests.weight_checksums import expected_checksums

ROOT = Path(__file__).resolve().parent.parent
EXACT = 1e-4


# --- a small HTTP server in place of an engine's: transport behaviour only -----------------------------------------------------------


def answer(ids=(5, 6), *, spans=None, finish="stop", logprob_ids=None) -> dict:
    """The part of a reply that is of one sample."""
    ids = list(ids)
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish, "message": "shutting down"},
            "output_token_logprobs": [[-0.5 * (i + 1), token, None] for i, token in enumerate(logprob_ids or ids)],
            "weight_versions": spans if spans is not None else [{"version": "3", "start": 0, "end": len(ids)}],
        },
    }


class LocalServer:
    """Answers /generate with ``behave(n)`` of the nth request (from 0).

    That is: a reply, one sample's part of it (then every sample gets this one), a status with a body, or None to reset the connection.
    """

    def __init__(self, behave: Callable[[int], list[dict] | dict | tuple[int, dict] | None], *, hold: asyncio.Event | None = None):
        self.behave, self.hold = behave, hold
        self.bodies: list[dict] = []
        self.running = self.most_running = 0  # samples

    async def __aenter__(self) -> "LocalServer":
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception):
        await self.runner.cleanup()

    async def generate(self, request):
        self.bodies.append(await request.json())
        behaviour = self.behave(len(self.bodies) - 1)
        count = len(self.bodies[-1]["input_ids"])
        self.running += count
        self.most_running = max(self.most_running, self.running)
        try:
            if self.hold is not None:
                await self.hold.wait()
            if behaviour is None:
                request.transport.abort()
                return web.Response()
            if isinstance(behaviour, tuple):
                return web.json_response(behaviour[1], status=behaviour[0])
            return web.json_response(behaviour if isinstance(behaviour, list) else [behaviour] * count)
        finally:
            self.running -= count


def make_client(*servers, **changes) -> SGLangClient:
    options = {"max_concurrency": 64, "timeout_s": 20.0, "max_retries": 2} | changes
    return SGLangClient([server.url for server in servers], **options)


async def ask_group(client, seeds: Sequence[int]) -> list[Completion]:
    return await client.generate_group([1, 2, 3], max_new_tokens=4, temperature=0.7, stop_token_ids=[6], seeds=seeds)


async def ask(client) -> Completion:
    (completion,) = await ask_group(client, [11])
    return completion


def seeds_of(body: dict) -> list[int]:
    return [sampling["sampling_seed"] for sampling in body["sampling_params"]]


def test_without_whole_groups_each_sample_is_a_request_with_one_set_of_parameters_in_the_order_of_the_seeds():
    async def scenario():
        async with LocalServer(lambda n: answer([5, n])) as server, make_client(server, whole_groups=False) as client:
            completions = await ask_group(client, [11, 12, 13])
            seed_of = {n: body["sampling_params"]["sampling_seed"] for n, body in enumerate(server.bodies)}
            assert [seed_of[completion.token_ids[1]] for completion in completions] == [11, 12, 13]
            assert [body["input_ids"] for body in server.bodies] == [[[1, 2, 3]]] * 3
            assert client.stats.requests == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("code", ["call_upstream_request_error", "no_available_workers"])
def test_a_router_that_does_not_reach_its_servers_is_asked_again_until_the_network_is_given_up(code):
    unreached = (503, {"error": {"type": "Service Unavailable", "code": code, "message": "nobody there"}})

    async def scenario(answers, peer_timeout_s):
        options = {"whole_groups": False, "max_retries": 0, "peer_timeout_s": peer_timeout_s}
        async with LocalServer(lambda n: answers[min(n, len(answers) - 1)]) as router, make_client(router, **options) as client:
            return (await ask(client)).token_ids, client.stats.retries

    assert asyncio.run(scenario([unreached, unreached, answer([5])], 20.0)) == ([5], 2)
    with pytest.raises(GenerationError, match="nobody there"):
        asyncio.run(scenario([unreached], 0.2))


class RefusesSeed12(LocalServer):
    async def generate(self, request):
        if (await request.json())["sampling_params"]["sampling_seed"] == 12:
            return web.json_response({"error": {"message": "not that one"}}, status=400)
        return await super().generate(request)


def test_without_whole_groups_one_refused_sample_ends_its_siblings():
    async def scenario():
        options = {"whole_groups": False, "max_concurrency": 3}
        async with RefusesSeed12(lambda n: answer([5]), hold=asyncio.Event()) as server, make_client(server, **options) as client:
            with pytest.raises(GenerationError, match="HTTP 400: not that one"):
                await ask_group(client, [11, 12, 13])
            await until(lambda: server.running == 0)
            again = asyncio.ensure_future(ask_group(client, [21, 22, 23]))
            await until(lambda: server.running == 3)  # all places were given back
            server.hold.set()
            assert len(await again) == 3

    asyncio.run(scenario())


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_completion_is_what_the_server_said_and_asked_for_neutrally():
    async def scenario():
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
        async with LocalServer(lambda n: answer([5, 6, 7], spans=spans, finish="length")) as server, make_client(server) as client:
            completion = await ask(client)
            assert completion == Completion(
                token_ids=[5, 6, 7],
                rollout_logprobs=[-0.5, -1.0, -1.5],
                token_versions=[3, 4, 4],
                finish_reason=FinishReason.LENGTH,
            )
            (body,) = server.bodies
            assert (body["input_ids"], body["return_logprob"]) == ([[1, 2, 3]], True)
            wanted = {"max_new_tokens": 4, "temperature": 0.7, "stop_token_ids": [6], "sampling_seed": 11}
            neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            (sampling,) = body["sampling_params"]
            assert sampling.items() >= (wanted | neutral).items()
            assert (client.stats.requests, client.stats.retries, client.stats.generated_tokens) == (1, 0, 3)

    asyncio.run(scenario())


def test_a_group_is_one_request_and_comes_back_in_the_order_of_its_seeds():
    async def scenario():
        server = LocalServer(lambda n: [answer([seed, seed + 1]) for seed in seeds_of(server.bodies[n])])
        async with server, make_client(server) as client:
            completions = await ask_group(client, [40, 10, 30])
            assert [completion.token_ids for completion in completions] == [[40, 41], [10, 11], [30, 31]]
            (body,) = server.bodies
            assert body["input_ids"] == [[1, 2, 3]] * 3
            assert seeds_of(body) == [40, 10, 30]
            assert (client.stats.requests, client.stats.retries, client.stats.generated_tokens) == (3, 0, 6)

    asyncio.run(scenario())


def test_a_group_larger_than_max_concurrency_is_sent_in_parts():
    async def scenario():
        server = LocalServer(lambda n: [answer([seed]) for seed in seeds_of(server.bodies[n])])
        async with server, make_client(server, max_concurrency=3) as client:
            completions = await ask_group(client, range(7))
            assert [completion.token_ids for completion in completions] == [[seed] for seed in range(7)]
            assert [seeds_of(body) for body in server.bodies] == [[0, 1, 2], [3, 4, 5], [6]]
            assert (client.stats.requests, client.stats.generated_tokens) == (7, 7)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "failure",
    [None, (503, {"error": {"message": "busy"}}), answer(finish="abort"), [answer(), answer(finish="abort")]],
    ids=["reset", "5xx", "abort", "abort of one sample"],
)
def test_a_lost_request_is_repeated_on_the_other_replica_and_counted(failure):
    async def scenario():
        async with LocalServer(lambda n: failure) as broken, LocalServer(lambda n: answer()) as sound:
            async with make_client(broken, sound) as client:
                completions = await ask_group(client, [1, 2])
                assert [completion.token_ids for completion in completions] == [[5, 6], [5, 6]]
                assert (len(broken.bodies), len(sound.bodies)) == (1, 1)
                assert seeds_of(sound.bodies[0]) == seeds_of(broken.bodies[0]) == [1, 2]
                assert (client.stats.requests, client.stats.retries, client.stats.generated_tokens) == (2, 1, 4)

    asyncio.run(scenario())


def test_a_single_replica_is_asked_again_after_a_reset():
    async def scenario():
        async with LocalServer(lambda n: None if n < 2 else answer()) as server, make_client(server) as client:
            assert (await ask(client)).token_ids == [5, 6]
            assert (len(server.bodies), client.stats.retries) == (3, 2)

    asyncio.run(scenario())


def test_retries_run_out_with_every_failure_in_the_error():
    async def scenario():
        broken = LocalServer(lambda n: (500, {"error": {"message": f"broken {n}"}}))
        async with broken as server, make_client(server, max_retries=1) as client:
            with pytest.raises(GenerationError, match=r"2 attempts at 1 samples.*max_retries=1.*HTTP 500: broken 0.*broken 1"):
                await ask(client)
            assert len(server.bodies) == 2

    asyncio.run(scenario())


def test_a_refused_connection_names_the_address():
    async def scenario():
        async with LocalServer(lambda n: answer()) as server:
            url = server.url
        async with SGLangClient([url], max_concurrency=1, timeout_s=20, max_retries=0) as client:
            with pytest.raises(GenerationError, match=url):
                await ask(client)

    asyncio.run(scenario())


def test_a_refused_request_is_an_error_at_once_with_the_servers_words():
    async def scenario():
        async with LocalServer(lambda n: (400, {"error": {"message": "too many tokens"}})) as server, make_client(server) as client:
            with pytest.raises(GenerationError, match="HTTP 400: too many tokens"):
                await ask(client)
            assert (len(server.bodies), client.stats.retries) == (1, 0)

    asyncio.run(scenario())


def test_the_deadline_of_a_request_covers_a_server_that_never_answers():
    async def scenario():
        async with LocalServer(lambda n: answer(), hold=asyncio.Event()) as server, make_client(server, timeout_s=0.2) as client:
            began = time.monotonic()
            with pytest.raises(GenerationError, match=r"request_timeout_s=0.2 s for 2 samples of a prompt of 3 tokens"):
                await ask_group(client, [1, 2])
            assert time.monotonic() - began < 5
            await until(lambda: server.running == 0)  # the server sees that nobody waits any more

    asyncio.run(scenario())


def test_requests_in_flight_are_bounded_and_spread_evenly_over_replicas():
    async def scenario():
        hold = asyncio.Event()
        async with LocalServer(lambda n: answer(), hold=hold) as a, LocalServer(lambda n: answer(), hold=hold) as b:
            async with make_client(a, b, max_concurrency=6) as client:
                asked = [asyncio.create_task(ask(client)) for _ in range(20)]
                await until(lambda: a.running + b.running == 6)
                assert (a.running, b.running) == (3, 3)
                assert len(a.bodies) + len(b.bodies) == 6
                hold.set()
                await asyncio.gather(*asked)
                assert max(a.most_running, b.most_running) <= 6
                assert len(a.bodies) + len(b.bodies) == 20

    asyncio.run(scenario())


def test_a_busy_replica_gets_nothing_while_another_is_free():
    async def scenario():
        hold = asyncio.Event()
        async with LocalServer(lambda n: answer(), hold=hold) as slow, LocalServer(lambda n: answer()) as quick:
            async with make_client(slow, quick) as client:
                first = asyncio.create_task(ask(client))
                await until(lambda: slow.running == 1)
                for _ in range(5):
                    await ask(client)
                assert (len(slow.bodies), len(quick.bodies)) == (1, 5)
                hold.set()
                await first

    asyncio.run(scenario())


def test_the_replica_with_the_fewest_samples_gets_the_next_request():
    async def scenario():
        hold = asyncio.Event()
        async with LocalServer(lambda n: answer(), hold=hold) as a, LocalServer(lambda n: answer(), hold=hold) as b:
            async with make_client(a, b) as client:
                asked = [asyncio.create_task(ask_group(client, range(count))) for count in (4, 1, 1, 1, 1)]
                await until(lambda: a.running + b.running == 8)
                assert (len(a.bodies), len(b.bodies)) == (1, 4)
                hold.set()
                await asyncio.gather(*asked)

    asyncio.run(scenario())


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), max_concurrency=st.integers(1, 6), failing=st.sets(st.integers(0, 9)))
def test_groups_of_any_sizes_get_through_with_never_too_many_samples_in_flight(sizes, max_concurrency, failing):
    async def scenario():
        server = LocalServer(lambda n: (503, {}) if n in failing else [answer([seed]) for seed in seeds_of(server.bodies[n])])
        async with server, make_client(server, max_concurrency=max_concurrency, max_retries=0) as client, asyncio.timeout(5):
            wanted = [range(100 * i, 100 * i + size) for i, size in enumerate(sizes)]
            results = await asyncio.gather(*(ask_group(client, seeds) for seeds in wanted), return_exceptions=True)
            for seeds, result in zip(wanted, results, strict=True):
                if not isinstance(result, GenerationError):
                    assert [completion.token_ids for completion in result] == [[seed] for seed in seeds]
            assert sum(isinstance(result, GenerationError) for result in results) == len([n for n in failing if n < len(server.bodies)])
            assert server.most_running <= max_concurrency

    asyncio.run(scenario())


def test_a_large_group_is_not_overtaken_by_small_ones():
    async def scenario():
        async with LocalServer(lambda n: answer()) as server, make_client(server, max_concurrency=3) as client, asyncio.timeout(5):
            sizes = [1, 3, 1, 3, 2, 3, 1, 3]  # no two neighbours have room together, so the server sees them in the order of asking
            await asyncio.gather(*(ask_group(client, range(size)) for size in sizes))
            assert [len(body["input_ids"]) for body in server.bodies] == sizes

    asyncio.run(scenario())


def test_two_groups_that_wait_do_not_each_hold_what_the_other_needs():
    async def scenario():
        hold = asyncio.Event()
        async with LocalServer(lambda n: answer(), hold=hold) as server, make_client(server, max_concurrency=2) as client:
            singles = [asyncio.create_task(ask(client)) for _ in range(2)]
            await until(lambda: server.running == 2)
            pairs = [asyncio.create_task(ask_group(client, range(2))) for _ in range(2)]
            for i, single in enumerate(singles):  # places come free one by one, each for whoever is first
                single.cancel()
                await until(lambda left=1 - i: server.running == left or len(server.bodies) > 2)
            hold.set()
            await asyncio.wait_for(asyncio.gather(*pairs), 5)

    asyncio.run(scenario())


def test_a_cancelled_group_gives_back_its_places_and_its_turn():
    async def scenario():
        hold = asyncio.Event()
        async with LocalServer(lambda n: answer(), hold=hold) as server, make_client(server, max_concurrency=4) as client:
            first = asyncio.create_task(ask_group(client, range(3)))
            await until(lambda: server.running == 3)
            waiting = asyncio.create_task(ask_group(client, range(3)))  # takes the one free place and waits for two more
            last = asyncio.create_task(ask_group(client, [0]))
            await until(lambda: client._places.locked())
            waiting.cancel()
            await until(lambda: server.running == 4)
            assert waiting.cancelled()
            first.cancel()
            await until(lambda: server.running == 1)
            hold.set()
            await last
            assert len(await ask_group(client, range(4))) == 4

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("reply", "found"),
    [([answer()], "a list of 1"), ([answer()] * 3, "a list of 3"), ((200, answer()), "a single dict")],
)
def test_a_reply_of_another_number_of_samples_is_refused_with_both_numbers(reply, found):
    async def scenario():
        async with LocalServer(lambda n: reply) as server, make_client(server) as client:
            with pytest.raises(GenerationError, match=f"{server.url} answered a request for 2 samples with {found}, not"):
                await ask_group(client, [1, 2])
            assert (len(server.bodies), client.stats.retries) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer(spans=[{"version": "default", "start": 0, "end": 2}]), "'default', not a decimal number; start it with --weight-version 0"),
        (answer(spans=[{"version": "1", "start": 0, "end": 1}]), "do not cover 2 tokens"),
        (answer(spans=[{"version": "1", "start": 1, "end": 2}]), "leave a gap"),
        (answer([5, 6], logprob_ids=[5, 7]), "log-probs are of other tokens"),
    ],
)
def test_an_answer_that_does_not_fit_together_is_refused(reply, message):
    async def scenario():
        async with LocalServer(lambda n: reply) as server, make_client(server) as client:
            with pytest.raises(GenerationError, match=message):
                await ask(client)

    asyncio.run(scenario())


# --- ports, command lines, environment ------------------------------------------------------------------------------------------------


def test_a_taken_port_is_named_with_the_fix_and_nothing_is_started(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with closing(socket.socket()) as other:
        first = choose_ports(range(2), None)[0].http
        other.bind(("127.0.0.1", first + 2))
        other.listen()
        fleet = ServerFleet(
            RolloutConfig(first_port=first, replicas=2), model_path=tmp_path, log_dir=tmp_path / "logs", threads=1, cuda=False, seed=0
        )
        with pytest.raises(ValueError, match=rf"port {first + 2} on 127.0.0.1 is taken.*choose another rollout.first_port"):
            fleet.start()
        assert fleet.urls == []
        assert not (tmp_path / "logs").exists()


def test_given_ports_are_two_apart_and_free_ones_are_distinct():
    first = choose_ports([0], None)[0].http
    assert [(p.http, p.nccl) for p in choose_ports(range(3), first)] == [(first + i, first + i + 1) for i in (0, 2, 4)]
    assert [p.http for p in choose_ports([2, 3], first)] == [first + 4, first + 6], "by the replica, also on a node that has not the first"
    free = choose_ports(range(20), None)
    assert len({port for p in free for port in (p.http, p.nccl)}) == 40
    with pytest.raises(ValueError, match=r"first_port=65000 with 300 replicas needs ports up to 65599"):
        choose_ports(range(300), 65000)


def test_the_users_flags_come_last_and_cannot_take_over_the_designs(tmp_path):
    ports, share = choose_ports([0], None)[0], on_one_machine(3, 1)[2]
    config = RolloutConfig(dtype="float32", server_args={"chunked_prefill_size": 512, "disable-radix-cache": True, "enable-metrics": False})
    command = server_command(config, share=share, model_path=tmp_path, ports=ports, cuda=False, seed=5)
    pairs = dict(pairwise(command))
    assert pairs["--chunked-prefill-size"] == "512"
    assert "--disable-radix-cache" in command
    assert "--enable-metrics" not in command
    assert (pairs["--device"], pairs["--dtype"], pairs["--random-seed"], pairs["--weight-version"]) == ("cpu", "float32", "7", "0")
    assert "--device" not in server_command(config, share=share, model_path=tmp_path, ports=ports, cuda=True, seed=5)
    names = ("port", "tp_size", "--dtype", "base_gpu_id", "nnodes", "dist_init_addr", "quantization", "load-format", "model", "config")
    for name in (*names, "nccl_init_addr", "pp_size", "data-parallel-size", "tp", "dtyp", "mod"):
        with pytest.raises(ValueError, match=f"server_args: '{name}' cannot be set there"):
            check_server_args(RolloutConfig(server_args={name: 1}))
        with pytest.raises(ValueError, match=f"server_args: '{name}' cannot be set there"):
            ServerFleet(RolloutConfig(server_args={name: 1}), model_path=tmp_path, log_dir=tmp_path, threads=1, cuda=False, seed=0)


def test_fp8_is_asked_of_a_server_that_can_take_updates_in_it(tmp_path):
    """The models are those of SGLang's own sources: whose file marks its loader so."""
    models = Path(find_spec("sglang").submodule_search_locations[0]) / "srt" / "models"
    assert {file.stem for file in models.glob("*.py") if "@supports_quantized_rl_reload" in file.read_text()} == set(FP8_MODELS)
    fp8 = RolloutConfig(quantization="fp8")
    plain, quantised, fake = (
        server_command(config, share=on_one_machine(1, 1)[0], model_path=tmp_path, ports=Ports(http=1, nccl=2), cuda=True, seed=0)
        for config in (RolloutConfig(), fp8, RolloutConfig(quantization="fake_int8"))
    )
    assert fake == plain
    assert [x for x in quantised if x not in plain] == ["--quantization", "fp8", "--load-format", "flash_rl"]
    for model_type in FP8_MODELS:
        check_quantization(fp8, model_type)
    for model_type in ("llama", "qwen3_moe", "mixtral"):
        check_quantization(RolloutConfig(), model_type)
        with pytest.raises(ValueError, match=f"cannot update a {model_type} model .* set rollout.quantization=none"):
            check_quantization(fp8, model_type)
    with pytest.raises(ValueError, match=r"rollout\.quantization=fp8 needs NVIDIA GPUs"):
        ServerFleet(fp8, model_path=tmp_path, log_dir=tmp_path, threads=1, cuda=False, seed=0)
    with pytest.raises(ValueError, match="quantization=fp8 computes with activations of 2 bytes, but dtype=float32"):
        RolloutConfig(quantization="fp8", dtype="float32")


def gpus_of(config: RolloutConfig, *, first_gpu: int, cuda: bool) -> list[range | None]:
    """Of each replica, by its command line; None where it says nothing about GPUs."""
    found = []
    shares = on_one_machine(config.replicas, config.tp, first_gpu=first_gpu)
    for share, ports in zip(shares, choose_ports(range(config.replicas), None), strict=True):
        command = server_command(config, share=share, model_path=ROOT, ports=ports, cuda=cuda, seed=0)
        pairs = dict(pairwise(command))
        base = pairs.get("--base-gpu-id")
        found.append(None if base is None else range(int(base), int(base) + int(pairs["--tp-size"])))
    return found


@pytest.mark.parametrize(("first_gpu", "replicas", "tp"), [(0, 1, 1), (1, 1, 1), (8, 2, 2), (3, 4, 1), (2, 3, 4)])
def test_learner_ranks_and_replicas_each_have_gpus_of_their_own(first_gpu, replicas, tp):
    config = RolloutConfig(replicas=replicas, tp=tp)
    used = [*range(first_gpu), *(gpu for gpus in gpus_of(config, first_gpu=first_gpu, cuda=True) for gpu in gpus)]
    assert used == list(range(first_gpu + replicas * tp))  # none twice, none skipped
    assert gpus_of(config, first_gpu=first_gpu, cuda=False) == [None] * replicas
    check_gpus(config, first_gpu=first_gpu, available=len(used))
    message = rf"{len(used)} GPUs are needed, {first_gpu} of the learner .*replicas={replicas}.*but {len(used) - 1} are visible.*use fewer"
    with pytest.raises(ValueError, match=message):
        check_gpus(config, first_gpu=first_gpu, available=len(used) - 1)


def test_a_fleet_with_too_few_gpus_starts_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first_gpu = visible_gpus()
    shares = on_one_machine(1, 2, first_gpu=first_gpu)
    fleet = ServerFleet(
        RolloutConfig(tp=2), model_path=tmp_path, log_dir=tmp_path / "logs", threads=1, cuda=True, seed=0, shares=shares
    )
    with pytest.raises(ValueError, match=rf"take GPUs {first_gpu} to {first_gpu + 1}, but {first_gpu} are visible.*fewer learner ranks"):
        fleet.start()
    assert fleet.urls == []
    assert not (tmp_path / "logs").exists()
    check_gpus_of(shares, available=first_gpu + 2)
    check_gpus_of([], available=0)


def test_each_node_of_a_replica_starts_its_own_part():
    config = RolloutConfig(tp=16, server_args={"mem-fraction-static": 0.8})
    lines = []
    for node in range(2):
        share = ServerShare(replica=1, node=2 + node, node_rank=node, num_nodes=2, first_gpu=0, num_ranks=8)
        (ports,) = choose_ports([1], None)
        lines.append(
            server_command(
                config,
                share=share,
                model_path=ROOT,
                ports=ports,
                cuda=True,
                seed=5,
                host=f"10.0.0.{3 + node}",
                meeting_point="10.0.0.3:20001",
            )
        )
    first, second = (dict(pairwise(line)) for line in lines)
    differing = {name for name in first if name.startswith("--") and first[name] != second[name]}
    assert differing == {"--host", "--port", "--nccl-port", "--node-rank"}
    assert (first["--node-rank"], second["--node-rank"], first["--nnodes"], first["--tp-size"]) == ("0", "1", "2", "16")
    assert first["--dist-init-addr"] == "10.0.0.3:20001"
    assert (first["--random-seed"], first["--base-gpu-id"]) == ("6", "0")  # one engine: its ranks must draw the same


def test_stand_ins_are_on_the_path_of_cpu_servers_alone(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    (share,) = on_one_machine(1, 2)
    on_cpu = server_environment(share, place=0, threads=1, cuda=False)
    on_cuda = server_environment(share, place=0, threads=1, cuda=True)
    assert on_cpu["PYTHONPATH"] == f"{ROOT / 'rollout' / 'cpu_stand_ins'}:/mine"
    assert on_cpu["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    first_of_two = replace(share, num_nodes=2, num_ranks=1)
    assert server_environment(first_of_two, place=0, threads=1, cuda=False)["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 0
    assert on_cuda["PYTHONPATH"] == "/mine"
    assert not {"SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND"} & on_cuda.keys() - os.environ.keys()


@pytest.mark.parametrize(
    ("cpus", "place", "num_ranks", "threads", "expected"),
    [([0, 1], 0, 2, 1, "0|1"), (list(range(8)), 1, 2, 2, "4,5|6,7"), ([3, 5], 1, 2, 1, "3|5"), ([0], 0, 2, 4, "0|0")],
)
def test_cpu_binding_by_hand(cpus, place, num_ranks, threads, expected):
    assert cpu_binding(cpus, place=place, num_ranks=num_ranks, threads=threads) == expected


# --- the watchdog, with small processes in a server's place -----------------------------------------------------------------------------

TREE = "sleep 600 & sleep 600 & echo started; wait"
"""A 'server' with two children."""


def start_tree(command: str, before: Callable[[], object] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-I", sglang_watchdog.__file__, "sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=before,
    )


def group_of(leader: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader:
                members.append(process)
        except ProcessLookupError:
            continue
    return members


def assert_all_end(processes: list[psutil.Process], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    living = processes
    while living and time.monotonic() < deadline:
        living = [p for p in living if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    assert living == []


def test_the_end_of_the_lifeline_ends_the_whole_group():
    with start_tree(TREE) as watchdog:
        watchdog.stdout.readline()
        members = group_of(watchdog.pid)
        assert len(members) >= 4
        watchdog.stdin.close()
        assert_all_end(members)


def test_a_server_that_ends_hands_on_its_code_and_leaves_nothing():
    with start_tree("sleep 600 & echo started; exit 7") as watchdog:
        watchdog.stdout.readline()
        members = group_of(watchdog.pid)
        assert watchdog.wait(20) == 7
        assert_all_end(members)


def test_a_killed_watchdog_takes_the_server_with_it():
    with start_tree("echo $$; exec sleep 600") as watchdog:
        server = psutil.Process(int(watchdog.stdout.readline()))
        watchdog.kill()
        assert_all_end([server])


HANDLER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
signal.signal(signal.SIGWINCH, lambda *_: print("going on", flush=True))
print("started", flush=True)
while True:
    signal.pause()
"""
"""A 'server' with a handler of its own for SIGTERM, as SGLang has."""


@pytest.mark.parametrize("ignored", [False, True])
def test_a_server_outlasts_sigterm_exactly_where_its_owner_ignores_it(ignored):
    command = f"exec {sys.executable} -c '{HANDLER}'"
    with start_tree(command, (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)) if ignored else None) as watchdog:
        assert watchdog.stdout.readline() == b"started\n"
        (server,) = psutil.Process(watchdog.pid).children()
        os.killpg(watchdog.pid, signal.SIGTERM)
        if ignored:
            server.send_signal(signal.SIGWINCH)  # of two that can be delivered SIGTERM would come first, by its number
            assert watchdog.stdout.readline() == b"going on\n"
            watchdog.stdin.close()
        else:
            assert watchdog.wait(20) == 3
        assert_all_end([server])


# --- real SGLang servers -------------------------------------------------------------------------------------------------------------


def make_fleet(model_dir: Path, log_dir: Path, **changes) -> ServerFleet:
    config = RolloutConfig(**({"dtype": "float32", "max_total_tokens": 4096} | changes))
    return ServerFleet(config, model_path=model_dir, log_dir=log_dir, threads=1, cuda=False, seed=0)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> list[Path]:
    """Two models of one shape: the first is served, the second is sent."""
    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        make_tiny_countdown_model(folder / f"seed{seed}", seed=seed)
        sharpen(folder / f"seed{seed}")
    return [folder / "seed0", folder / "seed1"]


def sharpen(folder: Path) -> None:
    """Larger weights, so that the random model's distribution is far from uniform and its answers depend on the prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0 if "embed" not in name else 6.0)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def models(model_dirs):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in model_dirs]


@pytest.fixture(scope="module")
def fleet(model_dirs, tmp_path_factory):
    fleet = make_fleet(model_dirs[0], tmp_path_factory.mktemp("logs"))
    fleet.start()
    try:
        fleet.wait_healthy(240)
        members = [p for replica in fleet._replicas for p in group_of(replica.process.pid)]
        assert len(members) >= 4
        yield fleet
    finally:
        fleet.stop()
    assert [p for p in members if p.is_running()] == []


@pytest.fixture(scope="module")
def control(fleet):
    with SGLangControl(fleet.urls, tensor_parallel=1, timeout_s=60) as control:
        yield control


@torch.no_grad()
def reference_logprobs(model, prompt_ids: list[int], token_ids: list[int], temperature: float) -> list[float]:
    """log_softmax(logits / temperature) of the response tokens, by transformers."""
    logits = model(torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[torch.arange(len(token_ids)), token_ids].tolist()


def send(control: SGLangControl, model, *, version: int, tensor_parallel: int = 1) -> Served:
    """The whole update as ``sglang_control`` describes it up to ``resume``, with this process as rank 0 of a gloo group of its own.

    No answer is waited for before the last request is sent: the server takes them one after the other.
    """
    broadcaster = WeightBroadcaster(world_size=1 + tensor_parallel * len(control.urls), backend="gloo", timeout_s=60)
    try:
        joining = control.join_group(
            master_address=broadcaster.address,
            master_port=broadcaster.port,
            world_size=broadcaster.world_size,
            group_name=broadcaster.group_name,
            backend="gloo",
        )
        broadcaster.join(check=joining.raise_if_failed)
        joining.wait()
        pending = [control.open_update()]
        for bucket in make_buckets(model.named_parameters(), dtype=torch.float32, max_bytes=2**20):
            receiving = control.receive_bucket(
                names=bucket.names, dtype="float32", shapes=bucket.shapes, version=version if bucket.is_last else None
            )
            pending.append(receiving)
            broadcaster.start(bucket).wait(check=lambda: [answer.raise_if_failed() for answer in pending])
        assert len(pending) > 2
        served = control.close_update(with_checksums=True)
        for answer in pending:
            answer.wait()
        control.leave_group()
        return served
    finally:
        broadcaster.close()


@pytest.mark.engines
def test_rollout_logprobs_are_of_the_full_softmax_at_the_sampling_temperature(fleet, models):
    prompts = [[3 + (7 * i + j * j) % 18 for j in range(3 + 5 * i)] for i in range(8)]

    async def sample_all():
        async with SGLangClient(fleet.urls, max_concurrency=64, timeout_s=120, max_retries=0) as client:
            shared = {"max_new_tokens": 24, "temperature": 0.7, "stop_token_ids": [5, 9]}
            wanted = [client.generate_group(p, **shared, seeds=range(1 + i % 4)) for i, p in enumerate(prompts)]  # also a group of one
            return await asyncio.gather(*wanted)

    groups = asyncio.run(sample_all())
    assert [len(group) for group in groups] == [1, 2, 3, 4] * 2
    completions = [completion for group in groups for completion in group]
    ends = {0, 5, 9}  # the model's own end token stops too
    for prompt, completion in [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]:
        expected = reference_logprobs(models[0], prompt, completion.token_ids, 0.7)
        assert completion.rollout_logprobs == pytest.approx(expected, abs=EXACT)
        assert completion.token_versions == [0] * len(completion.token_ids)
        stopped = completion.finish_reason is FinishReason.STOP
        assert (completion.token_ids[-1] in ends) == stopped
        assert not set(completion.token_ids[:-1]) & ends
        assert stopped or len(completion.token_ids) == 24
    assert len({c.finish_reason for c in completions}) == 2
    other = reference_logprobs(models[0], prompts[0], completions[0].token_ids, 1.0)
    assert completions[0].rollout_logprobs != pytest.approx(other, abs=10 * EXACT)


@pytest.mark.engines
def test_siblings_of_one_prompt_differ(fleet):
    async def sample():
        async with SGLangClient(fleet.urls, max_concurrency=64, timeout_s=120, max_retries=0) as client:
            return await client.generate_group([4, 5, 6], max_new_tokens=8, temperature=1.0, stop_token_ids=[0], seeds=range(16))

    assert len({tuple(c.token_ids) for c in asyncio.run(sample())}) > 8


@pytest.mark.engines
def test_an_oversized_request_is_refused_with_the_servers_words(fleet):
    async def sample():
        async with SGLangClient(fleet.urls, max_concurrency=2, timeout_s=60, max_retries=3) as client:
            try:
                await client.generate_group([4, 5], max_new_tokens=5000, temperature=1.0, stop_token_ids=[0], seeds=[1, 2])
            finally:
                assert client.stats.retries == 0

    with pytest.raises(GenerationError, match=r"HTTP 400: .*maximum context length of 256"):
        asyncio.run(sample())


@pytest.mark.engines
def test_a_control_request_that_fails_carries_the_servers_words(control):
    with pytest.raises(ControlError, match="no weight-update session is open"):
        control.end_update()
    with pytest.raises(ValueError, match="join_group first"):
        control.receive_bucket(names=["x"], dtype="float32", shapes=[[1]], version=1)
    with pytest.raises(ValueError, match="world_size=5"):
        control.join_group(master_address="127.0.0.1", master_port=1, world_size=5, group_name="g", backend="gloo")


@pytest.mark.engines
def test_an_update_in_the_middle_of_a_response_is_exact_token_by_token(fleet, control, models):
    """Weights arrive while a response is being sampled: each token's log-prob is of the version that it names."""
    prompt = [3, 8, 5, 14, 9]
    with SGLangControl(fleet.urls, tensor_parallel=1, timeout_s=120) as asking, ThreadPoolExecutor(1) as thread:
        for _ in range(5):  # again if the response was complete before the pause
            old = control.versions()[0]
            sent = models[(old + 1) % 2]
            response = thread.submit(asking.probe, prompt, max_new_tokens=240, temperature=1.3)
            wait_until_running(control.urls[0], response)
            served = send(control, sent, version=old + 1)
            assert served.versions == control.versions() == [old + 1]
            assert served.checksums == control.checksums() == [expected_checksums(sent.named_parameters())]
            control.resume()
            (completion,) = response.result()
            if len(set(completion.token_versions)) == 2:
                break
    versions = completion.token_versions
    assert versions == sorted(versions)
    assert set(versions) == {old, old + 1}
    for version in (old, old + 1):
        expected = reference_logprobs(models[version % 2], prompt, completion.token_ids, 1.3)
        gaps = [abs(a - b) for a, b in zip(completion.rollout_logprobs, expected, strict=True)]
        assert max(gap for gap, v in zip(gaps, versions, strict=True) if v == version) <= EXACT
        assert max(gap for gap, v in zip(gaps, versions, strict=True) if v != version) > 0.1


def wait_until_running(url: str, response: Future, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not response.done():
        loads = requests.get(f"{url}/v1/loads", timeout=10).json()["loads"]
        if any(load["num_running_reqs"] for load in loads):
            return


@pytest.mark.engines
def test_a_probe_after_an_update_agrees_with_the_sent_model_and_not_with_the_old_one(control, models):
    version = control.versions()[0] + 1
    sent, old = models[version % 2], models[(version + 1) % 2]
    send(control, sent, version=version)
    control.resume()
    (completion,) = control.probe([3, 4, 5, 6], max_new_tokens=12, temperature=0.7)
    assert len(completion.token_ids) == 12
    assert completion.token_versions == [version] * 12
    assert completion.rollout_logprobs == pytest.approx(reference_logprobs(sent, [3, 4, 5, 6], completion.token_ids, 0.7), abs=EXACT)
    assert completion.rollout_logprobs != pytest.approx(reference_logprobs(old, [3, 4, 5, 6], completion.token_ids, 0.7), abs=0.1)


def fleets_of_one_replica(model_dir: Path, log_dir: Path, num_nodes: int) -> list[ServerFleet]:
    """Two tensor-parallel ranks, on one node or each on a node of its own."""
    config = RolloutConfig(dtype="float32", max_total_tokens=4096, tp=2)
    (ports,) = choose_ports([0], None)
    fleets = []
    for node in range(num_nodes):
        share = ServerShare(replica=0, node=node, node_rank=node, num_nodes=num_nodes, first_gpu=0, num_ranks=2 // num_nodes)
        meeting = {0: f"127.0.0.1:{ports.nccl}"} if num_nodes > 1 else {}
        options = {"threads": 1, "cuda": False, "seed": 0, "shares": [share], "meeting_points": meeting}
        fleets.append(ServerFleet(config, model_path=model_dir, log_dir=log_dir, **options))
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
            fleet.wait_healthy(300)
        urls = [url for fleet in fleets for url in fleet.urls]
        assert len(urls) == 1, "a replica answers on its first node alone"
        with SGLangControl(urls, tensor_parallel=2, timeout_s=60) as control:
            before = control.checksums()[0]
            control.pause()
            send(control, models[1], version=1, tensor_parallel=2)
            after = control.checksums()[0]
            control.resume()
            assert {name.split("/")[0] for name in after} == {"rank0", "rank1"}
            assert all(after[name] != before[name] for name in after if "proj" in name)
            (completion,) = control.probe([3, 4, 5, 6], max_new_tokens=12, temperature=0.7)
        expected = reference_logprobs(models[1], [3, 4, 5, 6], completion.token_ids, 0.7)
        assert completion.rollout_logprobs == pytest.approx(expected, abs=EXACT)
        for fleet in fleets:
            fleet.poll()


@pytest.mark.engines
def test_the_flags_that_its_sources_tell_are_those_that_sglang_reads():
    code = "import argparse, json; from sglang.srt.server_args import ServerArgs; parser = argparse.ArgumentParser(add_help=False); "
    code += "ServerArgs.add_cli_args(parser); print(json.dumps(sorted(parser._option_string_actions)))"
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True)
    read = {option.removeprefix("--") for option in json.loads(done.stdout.splitlines()[-1])}
    check_flags_exist(RolloutConfig(server_args=dict.fromkeys(read, True)))
    assert len(set(flags_of_sglang()) - read) < 50
    assert read >= OWNED_FLAGS


@pytest.mark.engines
def test_a_server_that_cannot_start_is_reported_with_its_last_words(model_dirs, tmp_path):
    fleet = make_fleet(model_dirs[0], tmp_path, server_args={"no-such-flag": 3})
    fleet.start()
    try:
        with pytest.raises(ServerDied, match=r"replica 0 ended with exit code 2.*\n(.*\n)*.*unrecognized arguments: --no-such-flag"):
            fleet.wait_healthy(120)
    finally:
        fleet.stop()


OWNER = """
import json, sys, time
from pathlib import Path
from configs.schema.rollout import RolloutConfig
from rollout.sglang_server import ServerFleet
fleet = ServerFleet(RolloutConfig(dtype="float32", max_total_tokens=4096), model_path=Path(sys.argv[1]), log_dir=Path(sys.argv[2]),
                    threads=1, cuda=False, seed=0)
fleet.start()
print(json.dumps([replica.process.pid for replica in fleet._replicas]), flush=True)
time.sleep(600)
"""


@pytest.mark.engines
def test_sigkill_of_the_owner_leaves_no_process(model_dirs, tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(model_dirs[0]), str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
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
