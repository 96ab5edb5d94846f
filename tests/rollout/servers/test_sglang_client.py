"""The client of SGLang against small HTTP servers in an engine's place, which really drop connections."""

import asyncio
import base64
import copy
import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.planning.model_parts import Experts
from rollout.client import GenerationError, KnownExperts, PromptTooLongError, Session
from rollout.http_replicas import AttemptFailed
from rollout.records import Completion, FinishReason
from rollout.servers import client as client_module
from rollout.servers.answers import Sent, parse_completion, read_answer, stop_pattern
from rollout.servers.client import SGLangClient
from rollout.servers.kept_sets import Truncation
from rollout.sglang_plugin.tandem_routed_experts import KNOWN_BY
from tests.support.jumping_loop import jump, run_jumping
from tests.support.records import completion
from tests.support.server_specs import KEY
from tracing import Recorder, at_step, install
from tracing.reading import read_trace


def answer(ids=(5, 6), *, spans=None, finish="stop", logprob_ids=None, logprobs=None) -> dict:
    """The part of a reply that is of one sample."""
    ids = list(ids)
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish, "message": "shutting down"},
            "output_token_logprobs": [
                [-0.5 * (i + 1) if logprobs is None else logprobs[i], token, None]
                for i, token in enumerate(logprob_ids or ids)
            ],
            "weight_versions": spans
            if spans is not None
            else [{"version": "3", "start": 0, "end": len(ids)}],
        },
    }


class LocalServer:
    """Answers /generate with ``behave(n)`` of the nth request (from 0).

    That is: a reply, one sample's part of it (then every sample gets this one), a status with a body, or None
    to reset the connection.
    """

    def __init__(
        self,
        behave: Callable[[int], list[dict] | dict | tuple[int, dict] | None],
        *,
        hold: asyncio.Event | None = None,
        port: int = 0,
    ):
        self.behave, self.hold, self.port = behave, hold, port
        self.bodies: list[dict] = []
        self.running = self.most_running = 0  # samples
        self.version, self.looks = "0", 0

    async def __aenter__(self) -> "LocalServer":
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/model_info", self.model_info)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, shutdown_timeout=0.1)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *exception):
        await self.runner.cleanup()

    async def model_info(self, request):
        self.looks += 1
        return web.json_response({"weight_version": self.version})

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
    options = {"max_concurrency": 64, "timeout_s": 20.0, "max_retries": 2, "key": KEY} | changes
    return SGLangClient([server.url for server in servers], **options)


async def ask_group(client, seeds: Sequence[int]) -> list[Completion]:
    return await client.generate_group(
        [1, 2, 3], max_new_tokens=4, temperature=0.7, stop_token_ids=[6], seeds=seeds
    )


async def ask(client) -> Completion:
    (completion,) = await ask_group(client, [11])
    return completion


def test_requests_are_spans_with_their_wait_their_attempts_and_tokens(tmp_path):
    """The first attempt fails. Of three groups of two samples the third waits for a place."""
    install(Recorder(tmp_path / "trace", "sample", range(1, 2)))
    at_step(1)

    async def scenario():
        async with (
            LocalServer(lambda n: (503, {}) if n == 0 else answer()) as server,
            make_client(server, max_concurrency=4) as client,
        ):
            await asyncio.gather(*(ask_group(client, [seed, seed + 1]) for seed in (1, 3, 5)))
            return server.url

    try:
        url = asyncio.run(scenario())
    finally:
        install(None)
    (sample,) = read_trace(tmp_path).processes
    by_row: dict[str, list] = {}
    for span in sample.spans:
        by_row.setdefault(span.row, []).append(span)
    assert by_row.keys() == {"requests 1", "requests 2", "requests 3"}
    attempts = []
    for request, wait, *generating in by_row.values():
        assert [request.name, wait.name] == ["request", "wait for admission"]
        assert request.notes == {"samples": 2, "prompt_tokens": 3}
        assert (
            request.begin <= wait.begin
            and wait.end <= generating[0].begin
            and generating[-1].end <= request.end
        )
        attempts += [span.notes for span in generating]
    failed = [notes for notes in attempts if "error" in notes]
    assert failed == [{"server": url, "error": "AttemptFailed"}]
    assert [notes for notes in attempts if notes not in failed] == [{"server": url, "tokens": 4}] * 3
    waited = sorted((wait.end, wait.seconds) for _, wait, *_ in by_row.values())[-1]
    assert waited[0] >= min(request.end for request, *_ in by_row.values()), "until a place was free"


def test_experts_are_asked_for_where_they_are_not_known():
    """Two sampled tokens behind a prompt of three: four input tokens, of which the first two are told only where the weights at
    the end are others than those by which they are known. A sample that the server computed again has those of that
    computation. What is not trained on comes without them."""
    experts = Experts(
        num_experts=8, experts_per_token=2, intermediate_size=1, norm_topk=True, is_sparse=(True,) * 2
    )
    ids = np.array([[[0, 1], [2, 3]], [[4, 5], [7, 6]]], dtype=np.uint8)
    reply = answer()
    reply["meta_info"] |= {"routed_experts": base64.b64encode(ids.tobytes()).decode(), "num_retractions": 0}
    again = copy.deepcopy(reply)
    again["meta_info"] |= {
        "routed_experts": base64.b64encode(ids[::-1].tobytes()).decode(),
        "num_retractions": 1,
    }
    options = {"max_new_tokens": 4, "temperature": 0.7, "stop_token_ids": [6]}
    options["known_experts"] = KnownExperts(before=2, version=3)
    whole = copy.deepcopy(reply)
    rows = base64.b64encode(np.concatenate([ids, ids]).tobytes()).decode()
    whole["meta_info"] |= {
        "routed_experts": rows,
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }

    async def scenario():
        async with (
            LocalServer(lambda n: {0: [reply, again], 3: [whole]}.get(n, [answer()])) as server,
            make_client(server, experts=experts) as client,
        ):
            first, second = await client.generate_group([1, 2, 3], **options, seeds=[1, 2])
            assert np.array_equal(first.experts, ids) and first.num_retractions == 0
            assert np.array_equal(second.experts, ids[::-1]) and second.num_retractions == 1
            evaluation = client.with_own_places()
            (plain,) = await evaluation.generate_group([1, 2, 3], **options, seeds=[1])
            assert plain.experts is None
            asked = [
                (
                    body.get("return_routed_experts"),
                    body.get("routed_experts_start_len"),
                    [sampling.get("custom_params") for sampling in body["sampling_params"]],
                )
                for body in server.bodies
            ]
            assert asked == [(True, 2, [{KNOWN_BY: "3"}] * 2), (None, None, [None])]
            with pytest.raises(GenerationError, match="no routed experts"):
                await client.generate_group([1, 2, 3], **options, seeds=[3])
            (newer,) = await client.generate_group([1, 2, 3], **options, seeds=[4])
            assert np.array_equal(newer.experts, np.concatenate([ids, ids]))

    asyncio.run(scenario())


def test_kept_ids_are_asked_for_with_the_limits_and_give_the_log_probs():
    """Samples that are not trained on come from the full distribution, or from their own top_p and top_k."""
    truncation = Truncation(top_p=0.9, top_k=3, min_p=0.1, vocab_size=50)
    reply = answer()
    ids = reply["output_ids"]
    sets, values = [[ids[0]], [*ids[1:2], 49]], [0.0, -0.25]
    reply["meta_info"] |= {"output_token_sampling_mask": sets, "output_token_sampling_logprobs": values}

    async def scenario():
        async with (
            LocalServer(lambda n: reply if n == 0 else answer()) as server,
            make_client(server, truncation=truncation) as client,
        ):
            found = await ask(client)
            assert found.num_kept.tolist() == [1, 2] and found.kept_ids.tolist() == [*ids, 49]
            assert found.rollout_logprobs.tolist() == values
            plain = await ask(client.with_own_places())
            assert plain.num_kept is None and plain.rollout_logprobs.tolist() != values
            assert (await ask(client.with_own_places(top_p=0.7, top_k=20))).num_kept is None
            limits = [
                tuple(b["sampling_params"][0][name] for name in ("top_p", "top_k", "min_p"))
                for b in server.bodies
            ]
            assert limits == [(0.9, 3, 0.1), (1.0, -1, 0.0), (0.7, 20, 0.0)]
            fields = [(b.get("return_sampling_mask"), b.get("sampling_logprobs_mode")) for b in server.bodies]
            assert fields == [(True, "selected"), (None, None), (None, None)]
            with pytest.raises(GenerationError, match="no sampling masks"):
                await ask(client)

    asyncio.run(scenario())


def test_stop_texts_go_with_every_request_and_end_a_response_like_an_end_token():
    reply = answer()
    reply["meta_info"]["finish_reason"]["matched"] = stop_pattern("</search>")

    async def scenario():
        async with (
            LocalServer(lambda n: reply) as server,
            make_client(server, stop=["</search>", "Observation:"]) as client,
        ):
            found = [await ask(client), await ask(client.with_own_places())]
            asked = [sampling["stop_regex"] for body in server.bodies for sampling in body["sampling_params"]]
            assert asked == [[stop_pattern("</search>"), stop_pattern("Observation:")]] * 2
            assert all(c.finish_reason is FinishReason.STOP and c.token_ids.tolist() == [5, 6] for c in found)
        async with LocalServer(lambda n: answer()) as server, make_client(server) as client:
            await ask(client)  # SGLang refuses the field, if it has no tokenizer
            assert "stop_regex" not in server.bodies[0]["sampling_params"][0]

    asyncio.run(scenario())


@given(st.text("ab.*|\\\\ \\n(é🙂", min_size=1, max_size=4), st.text("ab.*|\\\\ \\n(é🙂", max_size=40))
def test_a_stop_pattern_finds_its_text_and_nothing_else(stop, text):
    found = re.search(stop_pattern(stop), text)
    assert (found is not None) == (stop in text) and (found is None or found[0] == stop)


def seeds_of(body: dict) -> list[int]:
    return [sampling["sampling_seed"] for sampling in body["sampling_params"]]


def test_without_whole_groups_each_sample_is_a_request_with_one_set_of_parameters_in_the_order_of_the_seeds():
    async def scenario():
        async with (
            LocalServer(lambda n: answer([5, n])) as server,
            make_client(server, whole_groups=False) as client,
        ):
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
        async with (
            LocalServer(lambda n: answers[min(n, len(answers) - 1)]) as router,
            make_client(router, **options) as client,
        ):
            return (await ask(client)).token_ids.tolist(), client.stats.retries

    assert asyncio.run(scenario([unreached, unreached, answer([5])], 20.0)) == ([5], 2)
    with pytest.raises(GenerationError, match="nobody there"):
        asyncio.run(scenario([unreached], 0.2))


def cut(error: type[aiohttp.ClientOSError], number: int) -> aiohttp.ClientOSError:
    if error is aiohttp.ClientOSError:
        return error(number, os.strerror(number))
    return error(SimpleNamespace(host="a", port=1, ssl=True), OSError(number, os.strerror(number)))


UNREACHED = cut(aiohttp.ClientConnectorError, errno.EHOSTUNREACH)


@pytest.mark.parametrize(
    ("errors", "covered"),
    [
        ([AttemptFailed("HTTP 503"), UNREACHED, UNREACHED], [False, True, True]),
        ([cut(aiohttp.ClientOSError, errno.ECONNRESET), UNREACHED], [False, True]),
        ([cut(aiohttp.ClientConnectorError, errno.ECONNREFUSED), UNREACHED], [False, True]),
        ([cut(aiohttp.ClientOSError, errno.ETIMEDOUT), UNREACHED], [False, False]),
        ([cut(aiohttp.ClientConnectorError, errno.ETIMEDOUT), UNREACHED], [True, True]),
    ],
)
def test_the_time_for_a_cut_network_begins_with_the_first_attempt_that_reached_no_host(
    monkeypatch, errors, covered
):
    """A connection that the kernel gave up has waited for the network already."""
    now = 1000.0
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: now))
    patience = client_module._NetworkPatience(60.0)
    found = []
    for error in errors:
        found.append(patience.covers(error))
        now += 29.0
    assert found == covered
    now += 60.0
    assert not patience.covers(UNREACHED)


class RefusesSeed12(LocalServer):
    async def generate(self, request):
        if (await request.json())["sampling_params"]["sampling_seed"] == 12:
            return web.json_response({"error": {"message": "not that one"}}, status=400)
        return await super().generate(request)


def test_without_whole_groups_one_refused_sample_ends_its_siblings():
    async def scenario():
        options = {"whole_groups": False, "max_concurrency": 3}
        async with (
            RefusesSeed12(lambda n: answer([5]), hold=asyncio.Event()) as server,
            make_client(server, **options) as client,
        ):
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
        async with (
            LocalServer(lambda n: answer([5, 6, 7], spans=spans, finish="length")) as server,
            make_client(server) as client,
        ):
            found = await ask(client)
            assert found == completion(
                prompt_ids=[1, 2, 3],
                token_ids=[5, 6, 7],
                rollout_logprobs=[-0.5, -1.0, -1.5],
                token_versions=[3, 4, 4],
                finish_reason=FinishReason.LENGTH,
            )
            (body,) = server.bodies
            assert (body["input_ids"], body["return_logprob"]) == ([[1, 2, 3]], True)
            wanted = {"max_new_tokens": 4, "temperature": 0.7, "stop_token_ids": [6], "sampling_seed": 11}
            neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
            neutral |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
            (sampling,) = body["sampling_params"]
            assert sampling.items() >= (wanted | neutral).items()
            assert (client.stats.requests, client.stats.retries) == (1, 0)

    asyncio.run(scenario())


def test_a_group_is_one_request_and_comes_back_in_the_order_of_its_seeds():
    async def scenario():
        server = LocalServer(lambda n: [answer([seed, seed + 1]) for seed in seeds_of(server.bodies[n])])
        async with server, make_client(server) as client:
            completions = await ask_group(client, [40, 10, 30])
            assert [completion.token_ids.tolist() for completion in completions] == [
                [40, 41],
                [10, 11],
                [30, 31],
            ]
            (body,) = server.bodies
            assert body["input_ids"] == [[1, 2, 3]] * 3
            assert seeds_of(body) == [40, 10, 30]
            assert (client.stats.requests, client.stats.retries) == (3, 0)

    asyncio.run(scenario())


def test_a_group_larger_than_max_concurrency_is_sent_in_parts():
    async def scenario():
        server = LocalServer(lambda n: [answer([seed]) for seed in seeds_of(server.bodies[n])])
        async with server, make_client(server, max_concurrency=3) as client:
            completions = await ask_group(client, range(7))
            assert [completion.token_ids.tolist() for completion in completions] == [
                [seed] for seed in range(7)
            ]
            assert [seeds_of(body) for body in server.bodies] == [[0, 1, 2], [3, 4, 5], [6]]
            assert client.stats.requests == 7

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
                assert [completion.token_ids.tolist() for completion in completions] == [[5, 6], [5, 6]]
                assert (len(broken.bodies), len(sound.bodies)) == (1, 1)
                assert seeds_of(sound.bodies[0]) == seeds_of(broken.bodies[0]) == [1, 2]
                assert (client.stats.requests, client.stats.retries) == (2, 2)

    asyncio.run(scenario())


def test_a_single_replica_is_asked_again_after_a_reset():
    async def scenario():
        async with (
            LocalServer(lambda n: None if n < 2 else answer()) as server,
            make_client(server) as client,
        ):
            assert (await ask(client)).token_ids.tolist() == [5, 6]
            assert (len(server.bodies), client.stats.retries) == (3, 2)

    asyncio.run(scenario())


def test_retries_run_out_with_every_failure_in_the_error():
    async def scenario():
        broken = LocalServer(lambda n: (500, {"error": {"message": f"broken {n}"}}))
        async with broken as server, make_client(server, max_retries=1) as client:
            with pytest.raises(
                GenerationError, match=r"2 attempts at 1 samples.*max_retries=1.*HTTP 500: broken 0.*broken 1"
            ):
                await ask(client)
            assert len(server.bodies) == 2

    asyncio.run(scenario())


def test_a_refused_connection_names_the_address():
    async def scenario():
        async with LocalServer(lambda n: answer()) as server:
            url = server.url
        async with SGLangClient([url], max_concurrency=1, timeout_s=20, max_retries=0, key=KEY) as client:
            with pytest.raises(GenerationError, match=url):
                await ask(client)

    asyncio.run(scenario())


def test_a_refused_request_is_an_error_at_once_with_the_servers_words():
    async def scenario():
        async with (
            LocalServer(lambda n: (400, {"error": {"message": "too many tokens"}})) as server,
            make_client(server) as client,
        ):
            with pytest.raises(GenerationError, match="HTTP 400: too many tokens") as caught:
                await ask(client)
            assert not isinstance(caught.value, PromptTooLongError)
            assert (len(server.bodies), client.stats.retries) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "behave",
    [
        (400, {"error": {"message": "Input length (250 tokens) exceeds the maximum allowed length (250 tokens). Use"}}),
        (400, {"error": {"message": "The input (256 tokens) is longer than the model's context length (256 tokens)."}}),
        (400, {"error": {"message": "Request prompt exceeds the KV memory budget: input_len=90."}}),
        answer([], finish="length"),
    ],
)  # fmt: skip
def test_a_prompt_without_room_is_an_error_of_its_own(behave):
    async def scenario():
        async with LocalServer(lambda n: behave) as server, make_client(server) as client:
            with pytest.raises(PromptTooLongError):
                await ask(client)
            assert (len(server.bodies), client.stats.retries) == (1, 0)

    asyncio.run(scenario())


def test_the_deadline_of_a_request_covers_a_server_that_never_answers():
    async def scenario():
        async with (
            LocalServer(lambda n: answer(), hold=asyncio.Event()) as server,
            make_client(server, timeout_s=0.2) as client,
        ):
            began = time.monotonic()
            with pytest.raises(
                GenerationError, match=r"request_timeout_s=0.2 s for 2 samples of a prompt of 3 tokens"
            ):
                await ask_group(client, [1, 2])
            assert time.monotonic() - began < 5
            await until(lambda: server.running == 0)  # the server sees that nobody waits any more
            assert (len(server.bodies), client.stats.retries) == (2, 2)  # max_retries=2

    asyncio.run(scenario())


def test_a_late_request_is_asked_for_again_at_another_server_and_counted(caplog):
    """It is told before it is answered; once for each step."""

    async def scenario():
        answers = asyncio.Event()
        async with (
            LocalServer(lambda n: answer(), hold=asyncio.Event()) as late,
            LocalServer(lambda n: answer(), hold=answers) as other,
            make_client(late, other, timeout_s=0.2, max_retries=100) as client,
        ):
            asking = asyncio.ensure_future(ask_group(client, [1, 2]))
            told = f"{late.url}: no answer within rollout.request_timeout_s=0.2 s for 2 samples of a prompt of 3 tokens"
            await until(lambda: told in caplog.text)
            assert not asking.done()
            answers.set()
            assert len(await asking) == 2
            await until(lambda: late.running == 0)
            assert late.bodies[0] == other.bodies[0]
            assert client.stats.requests == 2 and client.stats.retries >= 2
            for step in (1, 2):
                await client.see_version(step)
                await ask_group(client, [1, 2])
                await ask_group(client, [1, 2])
                assert caplog.text.count("requested again") == 1 + step

    asyncio.run(scenario())


def test_a_session_stays_at_its_server_until_that_fails():
    async def scenario():
        async with (
            LocalServer(lambda n: answer() if n < 5 else None) as first,
            LocalServer(lambda n: answer()) as second,
            make_client(first, second) as client,
        ):

            async def turn(session: Session | None) -> None:
                await client.generate_group(
                    [1], max_new_tokens=4, temperature=1.0, stop_token_ids=[6], seeds=[1], session=session
                )

            client._replicas[0].in_flight = 1  # so the session begins at the second server
            session = Session()
            await turn(session)
            client._replicas[1].in_flight = 9
            await turn(session)
            await turn(None)
            assert (len(first.bodies), len(second.bodies)) == (1, 2)
            client._replicas[1].is_lost = True
            await turn(session)
            client._replicas[1].is_lost = False
            await turn(session)  # its server is the first one now
            assert (len(first.bodies), len(second.bodies)) == (3, 2)
            first.behave = lambda n: None
            await turn(session)
            assert session.server is client._replicas[1]

    asyncio.run(scenario())


def test_the_cached_part_of_a_prompt_is_counted_and_a_prompt_of_another_length_refused():
    reply = answer()
    reply["meta_info"] |= {"cached_tokens": 2, "prompt_tokens": 3}
    assert parse_completion(reply, Sent.of([1, 2, 3])).cached_tokens == 2
    with pytest.raises(GenerationError, match="a prompt of 3 tokens, but 4 were sent"):
        parse_completion(reply, Sent.of([1, 2, 3, 4]))


def test_requests_in_flight_are_bounded_and_spread_evenly_over_replicas():
    async def scenario():
        hold = asyncio.Event()
        async with (
            LocalServer(lambda n: answer(), hold=hold) as a,
            LocalServer(lambda n: answer(), hold=hold) as b,
        ):
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
        async with (
            LocalServer(lambda n: answer(), hold=hold) as slow,
            LocalServer(lambda n: answer()) as quick,
        ):
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
        async with (
            LocalServer(lambda n: answer(), hold=hold) as a,
            LocalServer(lambda n: answer(), hold=hold) as b,
        ):
            async with make_client(a, b) as client:
                asked = [asyncio.create_task(ask_group(client, range(count))) for count in (4, 1, 1, 1, 1)]
                await until(lambda: a.running + b.running == 8)
                assert (len(a.bodies), len(b.bodies)) == (1, 4)
                hold.set()
                await asyncio.gather(*asked)

    asyncio.run(scenario())


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    max_concurrency=st.integers(1, 6),
    failing=st.sets(st.integers(0, 9)),
)
def test_groups_of_any_sizes_get_through_with_never_too_many_samples_in_flight(
    sizes, max_concurrency, failing
):
    async def scenario():
        server = LocalServer(
            lambda n: (503, {}) if n in failing else [answer([seed]) for seed in seeds_of(server.bodies[n])]
        )
        async with (
            server,
            make_client(server, max_concurrency=max_concurrency, max_retries=0) as client,
            asyncio.timeout(60),
        ):
            wanted = [range(100 * i, 100 * i + size) for i, size in enumerate(sizes)]
            results = await asyncio.gather(
                *(ask_group(client, seeds) for seeds in wanted), return_exceptions=True
            )
            for seeds, result in zip(wanted, results, strict=True):
                if not isinstance(result, GenerationError):
                    assert [completion.token_ids.tolist() for completion in result] == [
                        [seed] for seed in seeds
                    ]
            assert sum(isinstance(result, GenerationError) for result in results) == len(
                [n for n in failing if n < len(server.bodies)]
            )
            assert server.most_running <= max_concurrency

    asyncio.run(scenario())


def test_a_large_group_is_not_overtaken_by_small_ones():
    async def scenario():
        async with (
            LocalServer(lambda n: answer()) as server,
            make_client(server, max_concurrency=3) as client,
            asyncio.timeout(60),
        ):
            # No two neighbours have room together, so the server sees them in the order of asking.
            sizes = [
                1,
                3,
                1,
                3,
                2,
                3,
                1,
                3,
            ]
            await asyncio.gather(*(ask_group(client, range(size)) for size in sizes))
            assert [len(body["input_ids"]) for body in server.bodies] == sizes

    asyncio.run(scenario())


def test_two_groups_that_wait_do_not_each_hold_what_the_other_needs():
    async def scenario():
        hold = asyncio.Event()
        async with (
            LocalServer(lambda n: answer(), hold=hold) as server,
            make_client(server, max_concurrency=2) as client,
        ):
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
        async with (
            LocalServer(lambda n: answer(), hold=hold) as server,
            make_client(server, max_concurrency=4) as client,
        ):
            first = asyncio.create_task(ask_group(client, range(3)))
            await until(lambda: server.running == 3)
            # Takes the one free place and waits for two more.
            waiting = asyncio.create_task(ask_group(client, range(3)))
            last = asyncio.create_task(ask_group(client, [0]))
            await until(lambda: client._places._free.locked())
            waiting.cancel()
            await until(lambda: server.running == 4)
            assert waiting.cancelled()
            first.cancel()
            await until(lambda: server.running == 1)
            hold.set()
            await last
            assert len(await ask_group(client, range(4))) == 4

    asyncio.run(scenario())


def test_a_drain_waits_for_what_is_at_the_servers_and_holds_the_rest_back():
    async def scenario():
        hold = asyncio.Event()
        async with (
            LocalServer(lambda n: answer(), hold=hold) as server,
            make_client(server, max_concurrency=4) as client,
        ):
            await client.drain(20)  # nothing is there: at once
            client.reopen()
            first = asyncio.create_task(ask_group(client, range(3)))
            await until(lambda: server.running == 3)
            draining = asyncio.create_task(client.drain(20))
            await asyncio.sleep(0)
            second = asyncio.create_task(ask_group(client.with_own_places(), range(2)))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not draining.done() and server.running == 3
            hold.set()
            await asyncio.gather(first, draining)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(server.bodies) == 1
            client.reopen()
            assert len(await second) == 2

    asyncio.run(scenario())


def test_a_lost_server_is_used_again_once_it_has_the_newest_weights():
    """It may have been started again, with the weights of the start."""

    async def scenario():
        async with (
            LocalServer(lambda n: None if n == 0 else answer()) as lost,
            LocalServer(lambda n: answer()) as other,
            make_client(lost, other) as client,
        ):
            await ask(client)
            assert (len(lost.bodies), len(other.bodies), client.stats.retries) == (1, 1, 1)
            for lost.version, asked in (("3", 0), ("nonsense", 0), ("5", 1)):
                await client.see_version(5)
                await asyncio.gather(*(ask(client) for _ in range(4)))
                assert (len(lost.bodies) > 1) == bool(asked), lost.version
            assert client.stats.retries == 1

    asyncio.run(scenario())


def test_a_lost_server_is_better_than_none():
    async def scenario():
        async with (
            LocalServer(lambda n: None if n == 0 else answer()) as only,
            make_client(only) as client,
        ):
            await ask(client)
            await ask(client)
            assert len(only.bodies) == 3

    asyncio.run(scenario())


def test_requests_wait_for_a_server_that_is_started_again_until_it_has_the_weights(monkeypatch, caplog):
    monkeypatch.setattr(client_module, "LOOK_EVERY_S", 0.02)

    async def scenario():
        async with (
            LocalServer(lambda n: None if n < 3 else answer()) as server,
            make_client(server, servers_restart=True, max_retries=0) as client,
        ):
            evaluation = client.with_own_places()
            server.version = "-1"
            await client.see_version(4)
            waiting = [asyncio.create_task(ask(one)) for one in (client, client, evaluation)]
            while server.looks < 5:
                await asyncio.sleep(0.01)
            assert len(server.bodies) == 3 and not any(task.done() for task in waiting)
            (told,) = caplog.messages
            assert "all servers are lost; requests wait" in told and server.url in told
            server.version = "4"
            await asyncio.gather(*waiting)
            assert client.stats.requests == 2 and client.stats.retries + evaluation.stats.retries == 3
            server.version = "-1"
            await client.see_version(5)
            await ask(client)  # it is not lost

    asyncio.run(scenario())


def test_of_the_requests_that_wait_for_a_server_one_asks_for_all():
    """In one interval each server is asked once, however many requests wait."""

    async def scenario():
        looks = 0

        async def look(replica) -> bool:
            nonlocal looks
            looks += 1
            return True

        gone = [SimpleNamespace(url=f"http://127.0.0.1:{port}") for port in (1, 2)]
        async with make_client(*gone, servers_restart=True) as client:
            client._look_at = look
            for replica in client._replicas:
                replica.is_lost = True
            waiting = [asyncio.create_task(client._some_server()) for _ in range(100)]
            await asyncio.sleep(0)
            await jump(client_module.LOOK_EVERY_S)
            for _ in waiting:  # each has had its turn
                await asyncio.sleep(0)
            assert looks == 2
            for replica in client._replicas:
                replica.is_lost = False
            await jump(client_module.LOOK_EVERY_S)
            await asyncio.gather(*waiting)

    run_jumping(scenario())


def test_a_request_that_waited_for_a_server_is_held_back_by_a_drain(monkeypatch):
    monkeypatch.setattr(client_module, "LOOK_EVERY_S", 0.005)

    async def scenario():
        hold = asyncio.Event()
        async with (
            LocalServer(lambda n: None if n == 0 else answer(), hold=hold) as server,
            make_client(server, servers_restart=True, max_retries=0) as client,
        ):
            server.version = "-1"
            waiting = asyncio.create_task(ask(client))
            hold.set()
            await until(lambda: server.looks > 0)
            hold.clear()
            await client.drain(20)  # nothing is at the servers: at once
            server.version = "4"
            await until(lambda: not client._are_all_lost())
            await client._some_server()  # the request has noticed it too
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(server.bodies) == 1
            client.reopen()
            await until(lambda: server.running == 1)
            draining = asyncio.create_task(client.drain(20))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not draining.done()
            hold.set()
            await asyncio.gather(waiting, draining)

    asyncio.run(scenario())


class Waits:
    """What a session is told of its waits."""

    def __init__(self) -> None:
        self.number, self.now = 0, 0

    @contextmanager
    def __call__(self):
        self.number, self.now = self.number + 1, self.now + 1
        try:
            yield
        finally:
            self.now -= 1


def test_a_session_knows_while_its_request_waits_for_others(monkeypatch):
    """For a place, the end of a drain, and a server that is started again; but not while it is answered."""
    monkeypatch.setattr(client_module, "LOOK_EVERY_S", 0.005)

    async def scenario():
        hold, waits = asyncio.Event(), Waits()
        async with (
            LocalServer(lambda n: None if n == 1 else answer(), hold=hold) as server,
            make_client(server, servers_restart=True, max_retries=0, max_concurrency=1) as client,
        ):
            first = asyncio.create_task(ask(client))
            await until(lambda: server.running == 1)
            sampling = {"max_new_tokens": 4, "temperature": 1.0, "stop_token_ids": [6], "seeds": [1]}
            asked = client.generate_group([1], session=Session(waiting=waits), **sampling)
            waiting = asyncio.create_task(asked)
            await until(lambda: waits.now == 1)  # for a place
            draining = asyncio.create_task(client.drain(20))
            hold.set()
            await asyncio.gather(first, draining)
            assert (waits.now, len(server.bodies)) == (1, 1)  # for the end of the drain
            hold.clear()
            client.reopen()
            await until(lambda: server.running == 1)
            assert waits.now == 0
            server.version = "-1"
            await client.see_version(4)
            hold.set()  # the connection is lost
            await until(lambda: waits.now == 1)
            hold.clear()
            server.version = "4"
            await until(lambda: server.running == 1)
            assert (waits.now, waits.number) == (0, 2)
            hold.set()
            await waiting

    asyncio.run(scenario())


def test_a_network_that_is_cut_is_waited_for_no_longer_than_a_peer(monkeypatch):
    """The host of a server that has ended refuses; one that cannot be reached says nothing."""
    monkeypatch.setattr(client_module, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(client_module, "is_unreachable", lambda error: True)

    async def scenario():
        async with LocalServer(lambda n: None) as server:
            url = server.url
        gone = SimpleNamespace(url=url)
        async with make_client(gone, servers_restart=True, peer_timeout_s=0.3) as client:
            with pytest.raises(GenerationError, match=rf"could not be reached for 0.3 s: {url}"):
                await ask(client)
            assert not await client._look_at(client._replicas[0])
            monkeypatch.undo()
            assert await client._look_at(client._replicas[0]), "it refuses"

    asyncio.run(scenario())


def of_version(version: str) -> dict:
    return answer(spans=[{"version": version, "start": 0, "end": 2}])


def test_a_server_that_came_back_unnoticed_gives_no_samples_of_the_weights_on_disk():
    """A client that is new, like that of a second sample role, has seen no server fail."""

    async def scenario():
        async with (
            LocalServer(lambda n: of_version("-1")) as back,
            LocalServer(lambda n: of_version("7")) as other,
            make_client(back, other) as client,
        ):
            back.version, other.version = "-1", "7"
            await client.see_version(7)
            found = await asyncio.gather(*(ask(client) for _ in range(6)))
            assert {version for completion in found for version in completion.token_versions} == {7}
            assert len(back.bodies) >= 1
            asked = len(back.bodies)
            await ask(client)
            assert len(back.bodies) == asked, "it is lost until it has weights"

    asyncio.run(scenario())


def test_a_successor_at_the_port_of_a_server_is_not_taken_for_it(monkeypatch):
    """The client still has a connection to the old one, and its version."""
    monkeypatch.setattr(client_module, "LOOK_EVERY_S", 0.02)

    async def scenario():
        async with LocalServer(lambda n: of_version("3")) as old:
            client = make_client(old, servers_restart=True, max_retries=0)
            await client.see_version(3)
            assert (await ask(client)).token_versions.tolist() == [3, 3]
        async with client, LocalServer(lambda n: of_version(new.version), port=old.port) as new:
            new.version = "-1"
            waiting = [asyncio.create_task(ask(client)) for _ in range(2)]
            await until(lambda: new.looks > 2)
            assert not any(task.done() for task in waiting)
            new.version = "4"
            found = await asyncio.gather(*waiting)
            assert [completion.token_versions.tolist() for completion in found] == [[4, 4]] * 2

    asyncio.run(scenario())


def test_requests_to_a_single_server_without_weights_wait_for_them(monkeypatch):
    monkeypatch.setattr(client_module, "LOOK_EVERY_S", 0.02)

    async def scenario():
        async with (
            LocalServer(lambda n: of_version(server.version)) as server,
            make_client(server, servers_restart=True, max_retries=0) as client,
        ):
            server.version = "-1"
            waiting = asyncio.create_task(ask(client))
            while server.looks < 3:
                await asyncio.sleep(0.01)
            assert not waiting.done() and len(server.bodies) == 1
            server.version = "0"
            assert (await waiting).token_versions.tolist() == [0, 0]

    asyncio.run(scenario())


def test_a_drain_gives_up_after_its_time():
    async def scenario():
        hold = asyncio.Event()
        async with LocalServer(lambda n: answer(), hold=hold) as server, make_client(server) as client:
            running = asyncio.create_task(ask(client))
            await until(lambda: server.running == 1)
            await asyncio.wait_for(client.drain(0.05), 20)
            assert not running.done()
            hold.set()
            await running

    asyncio.run(scenario())


def test_a_client_with_own_places_waits_for_nobody_else():
    async def scenario():
        hold = asyncio.Event()
        async with (
            LocalServer(lambda n: answer(), hold=hold) as server,
            make_client(server, max_concurrency=2) as client,
        ):
            other = client.with_own_places()
            tasks = [asyncio.create_task(ask(client)) for _ in range(5)]
            await until(lambda: server.running == 2)
            tasks += [asyncio.create_task(ask(other)) for _ in range(3)]
            await until(lambda: server.running == 4)
            hold.set()
            await asyncio.gather(*tasks)
            assert (client.stats.requests, other.stats.requests) == (5, 3)

    asyncio.run(scenario())


def test_idle_time_is_that_without_a_sample_at_the_servers():
    async def scenario():
        hold = asyncio.Event()
        async with LocalServer(lambda n: answer(), hold=hold) as server, make_client(server) as client:
            running = asyncio.create_task(ask(client))
            await until(lambda: server.running == 1)
            assert client.stats.idle_s == 0  # so far the learner may have started
            at_work, began = client.stats.idle_s, time.monotonic()
            await asyncio.sleep(0.02)
            assert client.stats.idle_s == at_work
            hold.set()
            await running
            ended = time.monotonic()
            await asyncio.sleep(0.02)
            idle_s = client.stats.idle_s - at_work
            assert 0.02 <= idle_s <= time.monotonic() - began and idle_s <= time.monotonic() - ended + 0.5

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("reply", "found"),
    [([answer()], "a list of 1"), ([answer()] * 3, "a list of 3"), ((200, answer()), "a single dict")],
)
def test_a_reply_of_another_number_of_samples_is_refused_with_both_numbers(reply, found):
    async def scenario():
        async with LocalServer(lambda n: reply) as server, make_client(server) as client:
            with pytest.raises(
                GenerationError, match=f"{server.url}: a request for 2 samples was answered with {found}, not"
            ):
                await ask_group(client, [1, 2])
            assert (len(server.bodies), client.stats.retries) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"<html>a proxy's page</html>", "JSONDecodeError"), (b'[{"text": "no ids"}]', "KeyError: 'meta_info'"), (b"[7]", "TypeError"),
        (b'[{"meta_info": {"finish_reason": {"type": "stop"}}, "output_ids": [5]}]', "KeyError: 'output_token_logprobs'"),
        (b'[{"meta_info": {"finish_reason": null}}]', "TypeError"),
        (b'[{"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5]]}, "output_ids": [5]}]', "IndexError"),
        (orjson.dumps([answer(spans=[{"version": "20260102030405", "start": 0, "end": 2}])]), "OverflowError"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_sglangs_is_an_error_of_the_request(content, found):
    with pytest.raises(
        GenerationError, match=f"^http://server: the answer does not have the form of SGLang's .{found}"
    ):
        read_answer(content, 1, "http://server", Sent.of([1, 2]))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            answer(spans=[{"version": "default", "start": 0, "end": 2}]),
            "'default', not a decimal number; start it with --weight-version 0",
        ),
        (answer(spans=[{"version": "1", "start": 0, "end": 1}]), "do not cover 2 tokens"),
        (answer(spans=[{"version": "1", "start": 1, "end": 2}]), "leave a gap"),
        (
            answer(spans=[{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 2}]),
            "leave a gap",
        ),
        (answer([5, 6], logprob_ids=[5, 7]), "log-probs are of other tokens"),
        # SGLang's JSON has null for what is not finite.
        (
            answer([5, 6], logprobs=[-0.5, None]),
            r"127\.0\.0\.1:\d+: .*no finite log-prob for token 2 of 2 \(id 6\); check the served",
        ),
    ],
)
def test_an_answer_that_does_not_fit_together_is_refused(reply, message):
    async def scenario():
        async with LocalServer(lambda n: reply) as server, make_client(server) as client:
            with pytest.raises(GenerationError, match=message):
                await ask(client)
            assert len(server.bodies) == 1, "asked again, for the same answer"

    asyncio.run(scenario())
