"""Reward models over HTTP, against local servers that score, refuse, drop connections, hang, and talk
nonsense, and (marked) SGLang's."""

import asyncio
import json
import logging
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
import requests
import torch
from aiohttp import web
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from configs.schema.reward import ChatText, CountdownReward, ModelReward, PlainText, WeightedReward
from rollout.records import FinishReason, Prompt, Score
from rollout.rewards import model as model_module
from rollout.rewards import served
from rollout.rewards.model import RewardModel
from rollout.rewards.scorer import Scorer, check_reward
from rollout.rewards.served import MAX_FAILED_IN_A_ROW, RewardModelError
from rollout.servers.command import server_command, server_environment
from rollout.servers.ports import choose_ports
from rollout.servers.share import on_one_machine
from rollout.servers.watched_process import end_watched, log_tail, start_watched
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.server_specs import server_spec


def prompt(text: str = "2+3=", reference: str = "5") -> Prompt:
    return Prompt(prompt_id=f"id of {text}", token_ids=[1], text=text, reference=reference)


def length_of(text: str) -> float:
    """What the servers here think of a text."""
    return len(text) / 4


@dataclass
class Server:
    """A reward model whose answer is the length of the text; ``acts`` says what it does instead, request
    after request.

    The first request is the trial sample of the start: it is answered properly and leaves no trace.
    """

    protocol: str = "sglang"
    acts: list[str] = field(default_factory=list)
    score: Callable[[str], object] = length_of
    refuses: Callable[[str], bool] = lambda text: False
    requests: list[dict] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    in_flight: int = 0
    most_in_flight: int = 0
    gate: asyncio.Event | None = None
    """While it is not set, no request is answered."""
    url: str = ""
    tried: bool = False

    @property
    def batches(self) -> list[list[str]]:
        return [
            [item["text"] for item in r["items"]] if "items" in r else r.get("text", r.get("input_ids"))
            for r in self.requests
        ]

    async def __aenter__(self) -> "Server":
        app = web.Application()
        app.router.add_post("/classify" if self.protocol == "sglang" else "/score", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}" + ("" if self.protocol == "sglang" else "/score")
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.keys.add(request.headers.get("Authorization"))
        texts = (
            [item["text"] for item in body["items"]]
            if "items" in body
            else body.get("text", body.get("input_ids"))
        )
        if not self.tried:
            self.tried = True
            return self._reply([1.0])
        self.requests.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.gate is not None:
                await self.gate.wait()
            return await self._act(self.acts.pop(0) if self.acts else "score", request, texts)
        finally:
            self.in_flight -= 1

    async def _act(self, act: str, request: web.Request, texts: list[str]) -> web.StreamResponse:
        if act == "drop":
            request.transport.abort()
            return web.Response()
        if act == "cut off":
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b"[")
            request.transport.abort()
            return response
        if act == "hang":
            await asyncio.Event().wait()
        if act.isdigit():
            return web.Response(status=int(act), text="the reason")
        if act == "echo":
            return web.json_response([{"told": request.headers.get("Authorization")}] * len(texts))
        if act == "echo as text":
            return web.Response(text=str(request.headers.get("Authorization")))
        if act == "garbage":
            return web.Response(body=b"<html>busy</html>")
        if act == "deep":
            return web.Response(body=b"[" * 100_000)
        if act == "object":
            return web.json_response({"embedding": [1.0]})
        if any(self.refuses(text) for text in texts):
            return web.json_response({"error": {"message": "too long for the context"}}, status=400)
        scores = [self.score(text) for text in texts]
        return self._reply({"short": scores[:-1], "long": scores * 2}.get(act, scores))

    def _reply(self, scores: list[object]) -> web.Response:
        if self.protocol == "json":
            return web.json_response({"scores": scores})
        return web.json_response(
            [
                {"embedding": [] if s is None else s if isinstance(s, list) else [s], "meta_info": {}}
                for s in scores
            ]
        )


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr(served, "BACKOFF_S", (0.001, 5.0))


def config_of(*servers: Server, **fields) -> ModelReward:
    return ModelReward(
        **(
            {"urls": tuple(s.url for s in servers), "protocol": servers[0].protocol, "timeout_s": 20.0}
            | fields
        )
    )


def test_a_key_is_sent_where_a_variable_holds_one(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "of the servers")

    async def go(**fields) -> set[str | None]:
        async with asyncio.timeout(20.0), Server() as server:
            (score,) = await ask(config_of(server, **fields), "four")
            assert score.error is None
            return server.keys

    assert asyncio.run(go(api_key_variable="REWARD_KEY")) == {"Bearer of the servers"}
    assert asyncio.run(go()) == {None}
    monkeypatch.delenv("REWARD_KEY")
    config = ModelReward(urls=("http://a",), api_key_variable="REWARD_KEY")
    with pytest.raises(ValueError, match=r"reward\.api_key_variable=REWARD_KEY is not set"):
        check_reward(config, tell=lambda remark: None)


@pytest.mark.parametrize("act", ["echo", "echo as text"])
def test_a_key_that_the_server_repeats_is_not_shown(monkeypatch, act):
    monkeypatch.setenv("REWARD_KEY", "of the servers")
    with pytest.raises(RewardModelError, match=r"sent .*Bearer \*\*\*"):
        run(Server(acts=[act]), "four", api_key_variable="REWARD_KEY")


async def ask(config: ModelReward, *responses: str) -> list[Score]:
    """The scores, in the order of the responses; or the first error, after all have ended."""
    model = RewardModel(config)
    try:
        await model.start()
        found = await asyncio.gather(
            *(model.score(prompt(), response) for response in responses), return_exceptions=True
        )
    finally:
        await model.close()
    for score in found:
        if isinstance(score, BaseException):
            raise score
    return found


def run(server: Server, *responses: str, **fields) -> list[Score]:
    async def go():
        async with server:
            return await ask(config_of(server, **fields), *responses)

    return asyncio.run(go())


# --- what is sent, and how it is read
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["sglang", "json"])
def test_every_response_gets_the_score_of_its_own_text(protocol):
    server = Server(protocol)
    responses = ["x" * i for i in range(11)]
    scores = run(server, *responses, batch_size=4)
    assert scores == [Score(value=length_of("2+3=" + response)) for response in responses]
    assert [len(batch) for batch in server.batches] == [4, 4, 3]
    assert [text for batch in server.batches for text in batch] == [
        "2+3=" + response for response in responses
    ]


def test_the_plain_protocol_sends_the_parts_and_the_text():
    server = Server("json")
    run(server, "five", text=PlainText(template="Q {prompt} A {response} R {reference} {{}}"))
    assert server.requests == [
        {"items": [{"prompt": "2+3=", "response": "five", "reference": "5", "text": "Q 2+3= A five R 5 {}"}]}
    ]


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    """A tokenizer that puts a begin token before every text, as its chat template does too."""
    folder = tmp_path_factory.mktemp("rm") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '(' if m.role == 'user' else ')' }}{{ m.content }}{% endfor %}"
    )
    chat = folder.parent / "chat"
    tokenizer.save_pretrained(chat)
    return folder, chat


def test_a_conversation_is_written_by_the_reward_models_own_template(chat_tokenizer):
    _, chat = chat_tokenizer
    tokenizer = PreTrainedTokenizerFast.from_pretrained(chat)
    server = Server("json")
    run(server, "5", text=ChatText(tokenizer=chat))
    assert server.batches == [["(2+3=)5"]]
    server = Server(score=lambda ids: float(len(ids)))
    assert run(server, "5", text=ChatText(tokenizer=chat)) == [Score(value=7.0)]
    assert server.requests == [{"input_ids": [tokenizer.encode("(2+3=)5", add_special_tokens=False)]}]


def test_a_reward_model_reads_all_messages_of_the_data(chat_tokenizer):
    _, chat = chat_tokenizer
    messages = tuple(
        {"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "2"), ("user", "3"))
    )
    model = RewardModel(ModelReward(urls=("http://a",), protocol="json", text=ChatText(tokenizer=chat)))
    assert model._make_item("3", "4", reference="4", messages=messages)["text"] == "(1)2(3)4"


def test_a_tokenizer_without_a_template_or_a_folder_is_refused(chat_tokenizer, tmp_path):
    plain, chat = chat_tokenizer
    with pytest.raises(ValueError, match=r"has no chat template; use text: \{type: plain\}"):
        RewardModel(ModelReward(urls=("http://a",), text=ChatText(tokenizer=plain)))
    check_reward(ModelReward(urls=("http://a",), text=ChatText(tokenizer=chat)))
    with pytest.raises(ValueError, match=r"reward\.text\.tokenizer=.* is not a folder"):
        check_reward(ModelReward(urls=("http://a",), text=ChatText(tokenizer=tmp_path / "none")))


# --- batches, places and replicas
# --------------------------------------------------------------------------------------------------


def test_no_more_requests_are_in_flight_than_allowed():
    async def go():
        async with Server(gate=asyncio.Event()) as server:
            asked = asyncio.ensure_future(
                ask(config_of(server, batch_size=2, max_concurrency=4), *["x"] * 20)
            )
            while server.in_flight < 4:
                await asyncio.sleep(0.001)
            server.gate.set()
            await asked
            assert server.most_in_flight == 4 and len(server.requests) == 10

    asyncio.run(asyncio.wait_for(go(), 20))


def test_the_least_loaded_replica_is_asked():
    async def go():
        gate = asyncio.Event()
        async with Server(gate=gate) as first, Server(gate=gate) as second:
            asked = asyncio.ensure_future(
                ask(config_of(first, second, batch_size=2, max_concurrency=4), *["x"] * 8)
            )
            while first.in_flight + second.in_flight < 4:
                await asyncio.sleep(0.001)
            assert (first.in_flight, second.in_flight) == (2, 2)
            gate.set()
            await asked

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_few_samples_do_not_wait_for_a_full_batch():
    server = Server()
    assert len(run(server, "a", "b", "c", batch_size=1000)) == 3
    assert [len(batch) for batch in server.batches] == [3]


def test_a_caller_that_gave_up_disturbs_nobody():
    async def go():
        async with Server(gate=asyncio.Event()) as server:
            model = RewardModel(config_of(server, batch_size=2))
            await model.start()
            gone, stays = (asyncio.ensure_future(model.score(prompt(), response)) for response in ("a", "bb"))
            while not server.in_flight:
                await asyncio.sleep(0.001)
            gone.cancel()
            server.gate.set()
            assert await stays == Score(value=length_of("2+3=bb"))
            await model.close()

    asyncio.run(asyncio.wait_for(go(), 20))


def test_close_ends_what_is_under_way():
    async def go():
        async with Server(gate=asyncio.Event()) as server:
            model = RewardModel(config_of(server, batch_size=1, max_concurrency=1))
            await model.start()
            late = [asyncio.ensure_future(model.score(prompt(), response)) for response in "abc"]
            while not server.in_flight:
                await asyncio.sleep(0.001)
            await model.close()
            await model.close()
            done, pending = await asyncio.wait(late, timeout=5)
            assert not pending and all(future.cancelled() for future in done)

    asyncio.run(asyncio.wait_for(go(), 20))


def test_close_ends_what_waits_for_a_full_batch(monkeypatch):
    monkeypatch.setattr(model_module, "LINGER_S", 60.0)

    async def go():
        async with Server() as server:
            model = RewardModel(config_of(server, batch_size=4))
            await model.start()
            late = asyncio.ensure_future(model.score(prompt(), "a"))
            await asyncio.sleep(0)
            await model.close()
            await asyncio.wait([late], timeout=5)
            assert late.cancelled()

    asyncio.run(asyncio.wait_for(go(), 20))


# --- what fails for a while
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["drop", "cut off", "hang", "500", "503", "429"])
def test_what_fails_in_transport_is_repeated_and_counted(act, caplog):
    async def go():
        async with Server(acts=[act, act]) as server:
            scorer = Scorer(config_of(server, timeout_s=1.0 if act == "hang" else 20.0), max_new_tokens=9)
            async with scorer:
                score = await scorer.score(prompt(), "xx", num_tokens=1, finish_reason=FinishReason.STOP)
            return score, scorer.retries, len(server.requests)

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(go()) == (Score(value=1.5, correct=True), 2, 3)
    assert sum("failed, trying again" in record.message for record in caplog.records) == 2


def test_the_next_attempt_goes_to_another_replica():
    async def go():
        async with Server(acts=["503"] * 9) as bad, Server() as good:
            scores = await ask(config_of(bad, good, max_retries=1, batch_size=1), *["x"] * 4)
            assert scores == [Score(value=1.25)] * 4
            assert bad.requests and len(good.requests) == 4

    asyncio.run(go())


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("drop", "[Dd]isconnected"),
        ("hang", r"no answer within timeout_s=1 s"),
        ("503", "HTTP 503: the reason"),
        ("429", "HTTP 429"),
    ],
)
def test_a_model_that_stays_away_is_one_clear_error_for_all_who_wait(act, message):
    async def go():
        async with Server(acts=[act] * 3) as server:
            model = RewardModel(
                config_of(server, max_retries=2, timeout_s=1.0 if act == "hang" else 20.0),
                name="reward.parts.helpful",
            )
            await model.start()
            found = await asyncio.gather(
                *(model.score(prompt(), r) for r in ("a", "b")), return_exceptions=True
            )
            await model.close()
            assert len(server.requests) == 3 and server.url in str(found[0])
            return found

    first, second = asyncio.run(go())
    assert isinstance(first, RewardModelError) and first is second
    assert str(first).startswith(
        "reward.parts.helpful: 3 attempts to score 2 samples failed (max_retries=2): "
    )
    assert re.search(message, str(first)) and "correct reward.parts.helpful.urls" in str(first)


# --- what is wrong for good
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "act", "message"),
    [
        ("sglang", "short", r"sent 1 instead of 2 scores as \[\{.embedding.*\]"),
        ("json", "short", r"sent 1 instead of 2 scores as \{.scores.*\}"),
        ("json", "long", r"sent 4 instead of 2 scores as \{.scores.*\}"),
        ("sglang", "garbage", "<html>busy"),
        ("json", "garbage", "<html>busy"),
        ("json", "deep", r" sent '\[\["),
        ("sglang", "object", " sent '{"),
        ("json", "object", " sent '{"),
        ("sglang", "404", "answered HTTP 404: the reason"),
        ("json", "401", "answered HTTP 401"),
    ],
)
def test_an_answer_of_another_form_ends_the_run_at_once(protocol, act, message):
    server = Server(protocol, acts=[act])
    with pytest.raises(RewardModelError, match=message):
        run(server, "a", "b")
    assert len(server.requests) == 1


@pytest.mark.parametrize("logits", [[0.3, 0.7], [0.1, 0.2, 0.7]])
def test_a_model_with_several_labels_is_no_reward_model(logits):
    with pytest.raises(
        RewardModelError,
        match=f"sent {len(logits)} numbers for a text, not one score; serve a reward model with a single label",
    ):
        run(Server(score=lambda text: logits), "a")


# --- single samples
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["sglang", "json"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (float("nan"), "is nan, which is not finite"),
        (float("inf"), "is inf"),
        (None, "gave no score"),
        ("high", "must be a number"),
    ],
)
def test_a_score_that_is_no_number_fails_its_own_sample_only(protocol, bad, message):
    server = Server(protocol, score=lambda text: bad if "bad" in text else length_of(text))
    good, failed, last = run(server, "good", "bad", "fine")
    assert good == last == Score(value=2.0)
    assert failed.value == 0 and message in failed.error


def test_a_text_that_is_refused_fails_alone_however_it_was_batched():
    server = Server(refuses=lambda text: "long" in text)
    responses = ["a", "long", "b", "c", "d", "e", "long too"]
    scores = run(server, *responses, batch_size=7)
    assert [score.error is not None for score in scores] == ["long" in response for response in responses]
    assert all(score.value == (0 if score.error else 1.25) for score in scores)
    assert "HTTP 400" in scores[1].error and "too long for the context" in scores[1].error
    assert len(server.requests) < 2 * len(responses)


def test_an_empty_text_is_not_sent_to_sglang(chat_tokenizer, tmp_path):
    only_response = PlainText(template="{response}")
    server = Server()
    empties = [""] * (MAX_FAILED_IN_A_ROW + 1)  # the server is not to blame for them
    good, *failed, last = run(server, "good", *empties, "last", text=only_response)
    assert good == last == Score(value=1.0)
    assert {score.value for score in failed} == {0.0} and all("is empty" in score.error for score in failed)
    assert server.batches == [["good", "last"]]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(chat_tokenizer[1])
    tokenizer.chat_template = "{{ messages[1].content }}"
    tokenizer.save_pretrained(tmp_path)
    server = Server(score=len)
    empty, two = run(server, "", "10", text=ChatText(tokenizer=tmp_path))
    assert two == Score(value=2.0) and "is empty" in empty.error
    assert server.requests == [{"input_ids": [tokenizer.encode("10")]}]
    own = Server("json")
    assert run(own, "", text=only_response) == [Score(value=0.0)]
    assert own.batches == [[""]]


def test_a_model_that_scores_nothing_any_more_ends_the_run():
    nan = Server("json", score=lambda text: float("nan"))
    with pytest.raises(
        RewardModelError,
        match=f"{MAX_FAILED_IN_A_ROW} samples in a row could not be scored, the last: .*not finite",
    ):
        run(nan, *["x"] * MAX_FAILED_IN_A_ROW)
    rare = Server("json", score=lambda text: 1.0 if text.endswith("good") else float("nan"))
    responses = [*["x"] * (MAX_FAILED_IN_A_ROW - 1), "good", *["x"] * (MAX_FAILED_IN_A_ROW - 1)]
    assert sum(score.error is None for score in run(rare, *responses, max_concurrency=1)) == 1


# --- start-up, and among other rewards
# ---------------------------------------------------------------------------------------------


def enter(config) -> None:
    async def go():
        async with Scorer(config, max_new_tokens=9):
            pass

    asyncio.run(go())


def test_a_server_that_is_not_there_is_found_at_the_start(unused_url):
    with pytest.raises(RewardModelError) as error:
        enter(ModelReward(urls=(unused_url,), max_retries=1))
    assert unused_url in str(error.value) and "2 attempts" in str(error.value)
    assert "--is-embedding" in str(error.value) and "correct reward.urls" in str(error.value)


@pytest.fixture
def unused_url():
    async def once():
        async with Server() as server:
            return server.url

    return asyncio.run(once())


def test_every_replica_is_tried_at_the_start_and_a_part_is_named(unused_url):
    async def go():
        async with Server() as server:
            model = ModelReward(urls=(server.url, unused_url), max_retries=0)
            async with Scorer(
                WeightedReward(parts={"right": CountdownReward(), "helpful": model}), max_new_tokens=9
            ):
                pass

    with pytest.raises(RewardModelError, match=r"^reward\.parts\.helpful: 1 attempts"):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            400,
            {"error": {"message": "Please add `--is-embedding`"}},
            "refused it with HTTP 400.*Please add `--is-embedding`",
        ),
        (405, {}, "answered HTTP 405"),
        (200, [{"embedding": [float("nan")]}], "cannot score a trial sample: ValueError: the reward is nan"),
        (200, [{"embedding": [0.5] * 768}], "768 numbers"),
    ],
)
def test_a_server_that_is_no_reward_model_is_found_at_the_start(status, body, message):
    async def go():
        async def answer(request):
            return web.Response(status=status, text=json.dumps(body))

        app = web.Application()
        app.router.add_post("/classify", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            async with Scorer(ModelReward(urls=(f"http://127.0.0.1:{port}/",)), max_new_tokens=9):
                pass
        finally:
            await runner.cleanup()

    with pytest.raises(RewardModelError, match=message):
        asyncio.run(go())


def test_a_model_beside_a_rule_by_hand():
    async def go():
        async with Server() as server:
            config = WeightedReward(
                parts={"helpful": config_of(server, weight=0.5), "right": CountdownReward(weight=2.0)}
            )
            problem = Prompt(prompt_id="c", token_ids=[1], text="1 2=3:", reference="1 2=3")
            async with Scorer(config, max_new_tokens=9) as scorer:
                return [
                    await scorer.score(problem, r, num_tokens=3, finish_reason=FinishReason.STOP)
                    for r in ("1+2", "1-2", "1+2+0")
                ]

    right, wrong, invalid = asyncio.run(go())
    assert right == Score(
        value=0.5 * 9 / 4 + 2.0, parts={"helpful": 9 / 4, "right": 1, "right/valid": 1}, correct=True
    )
    assert wrong == Score(
        value=0.5 * 9 / 4, parts={"helpful": 9 / 4, "right": 0, "right/valid": 1}, correct=False
    )
    assert (invalid.value, invalid.correct) == (0.5 * 11 / 4, False)


def test_a_model_that_dies_ends_the_scoring_of_a_combination_too():
    async def go():
        async with Server(acts=["503"]) as server:
            config = WeightedReward(
                parts={"right": CountdownReward(), "helpful": config_of(server, max_retries=0)}
            )
            async with Scorer(config, max_new_tokens=9) as scorer:
                await scorer.score(prompt(), "x", num_tokens=1, finish_reason=FinishReason.STOP)

    with pytest.raises(RewardModelError, match="HTTP 503"):
        asyncio.run(go())


def test_the_reference_servers_of_this_file_are_what_they_say():
    """Of the server that the other tests trust: scores come back in sglang's shape, and a dropped connection
    is one."""

    async def go():
        async with Server(acts=["score", "drop"], tried=True) as server, aiohttp.ClientSession() as session:
            async with session.post(f"{server.url}/classify", json={"text": ["abcd", "ab"]}) as response:
                assert [reply["embedding"] for reply in await response.json()] == [[1.0], [0.5]]
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.post(f"{server.url}/classify", json={"text": ["abcd"]})

    asyncio.run(go())


# --- a real SGLang server
# ----------------------------------------------------------------------------------------------------------

EXACT = 1e-4
CONTEXT = 64
RESPONSES = ("5", "6", "2+3", "(2+3)*1", "5 5 5 5", "", "= 5 - 0 * 7", "0", "9" * 40, "7*(8-1)")


def make_tiny_reward_model(folder: Path) -> None:
    """A random Qwen3 with one label in float32, whose tokenizer puts <unused_0> before a text, as its chat
    template does too."""
    make_tiny_countdown_model(folder, seed=0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<unused_0>"})
    begin = [("<unused_0>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unused_0> $A", special_tokens=begin
    )
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ '(' if m.role == 'user' else ')' }}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=CONTEXT,
        num_labels=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3ForSequenceClassification(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)  # so that the scores of different texts are far apart
    # See rollout/rewards/model.py.
    model.save_pretrained(folder, state_dict=model.state_dict() | {"score.bias": torch.zeros(1)})


@dataclass(frozen=True)
class RealServer:
    url: str
    process: subprocess.Popen
    folder: Path
    expected: Callable[[str], float]

    def config(self, **fields) -> ModelReward:
        return ModelReward(**({"urls": (self.url,), "timeout_s": 60.0, "max_retries": 0} | fields))


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang")
    model_dir, log_file = folder / "model", folder / "sglang.log"
    make_tiny_reward_model(model_dir)
    model = AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    @torch.no_grad()
    def expected(text: str) -> float:
        return model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits.item()

    spec = server_spec(model_dir, dtype="float32", max_total_tokens=4096, server_args={"is-embedding": True})
    (ports,), (share,) = choose_ports([0], None), on_one_machine(1, 1)
    command = server_command(spec, share, ports)
    command.remove("--skip-tokenizer-init")  # here the server turns text into tokens
    at = command.index("--config")
    del command[at : at + 2]  # a reward model's server is no run's, and asks for no run's key
    url = f"http://127.0.0.1:{ports.http}"
    process = start_watched(command, log_file=log_file, environment=server_environment(spec, share, place=0))
    try:
        wait_until_healthy(url, process, log_file)
        yield RealServer(url, process, model_dir, expected)
    finally:
        end_watched([process])


def wait_until_healthy(url: str, process: subprocess.Popen, log_file: Path, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log_tail(log_file)
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health_generate", timeout=60).status_code == 200:
                return
        time.sleep(0.25)  # between looks at the server


@pytest.mark.engines
@pytest.mark.parametrize("text", ["plain", "chat"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_sglang_gives_the_scores_of_transformers(sglang, batch_size, text):
    if text == "plain":
        texts, form = [f"2+3={response}" for response in RESPONSES], PlainText()
    else:
        texts, form = [f"(2+3=){response}" for response in RESPONSES], ChatText(tokenizer=sglang.folder)
    expected = [sglang.expected(text) for text in texts]
    assert min(b - a for a, b in pairwise(sorted(expected))) > 10 * EXACT  # or the order would not show
    scores = asyncio.run(ask(sglang.config(batch_size=batch_size, text=form), *RESPONSES))
    assert [score.error for score in scores] == [None] * len(RESPONSES)
    assert [score.value for score in scores] == pytest.approx(expected, abs=EXACT)


@pytest.mark.engines
@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("text", ["plain", "chat"])
def test_sglang_refuses_a_text_beyond_its_context_and_its_neighbours_keep_their_scores(
    sglang, batch_size, text
):
    form, before = (PlainText(), "2+3=") if text == "plain" else (ChatText(tokenizer=sglang.folder), "(2+3=)")
    # SGLang takes one token less than the context, and the first is <unused_0>.
    longest = "1" * (CONTEXT - 2 - len(before))
    responses = ["5", longest + "1", longest, "6", "7" * 1000, "8", "9"]
    scores = asyncio.run(ask(sglang.config(batch_size=batch_size, text=form), *responses))
    for response, score in zip(responses, scores, strict=True):
        if len(response) > len(longest):
            assert (
                score.value == 0.0
                and f"longer than the model's context length ({CONTEXT} tokens)" in score.error
            )
        else:
            assert score.error is None
            assert score.value == pytest.approx(sglang.expected(before + response), abs=EXACT)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("path", "message"),
    [("/v2", "/v2/classify answered HTTP 404"), ("/v1", "/v1/classify refused it with HTTP 400")],
)
def test_a_wrong_address_on_an_sglang_server_is_found_at_the_start(sglang, path, message):
    with pytest.raises(RewardModelError, match=message + ".*correct reward.urls"):
        enter(sglang.config(urls=(sglang.url + path,), max_retries=2))


@pytest.mark.engines
def test_sglang_beside_a_rule(sglang):
    async def go():
        config = WeightedReward(
            parts={"helpful": sglang.config(weight=0.5), "right": CountdownReward(weight=2.0)}
        )
        problem = Prompt(prompt_id="c", token_ids=[1], text="1 2=3:", reference="1 2=3")
        async with Scorer(config, max_new_tokens=9) as scorer:
            return await scorer.score(problem, "1+2", num_tokens=3, finish_reason=FinishReason.STOP)

    score, helpful = asyncio.run(go()), sglang.expected("1 2=3:1+2")
    assert score.value == pytest.approx(0.5 * helpful + 2.0, abs=EXACT)
    assert score.parts["helpful"] == pytest.approx(helpful, abs=EXACT)
    assert score.correct


@pytest.mark.engines
def test_an_sglang_server_that_is_killed_while_it_scores_ends_the_run(sglang):
    """The last of its server: it does not survive."""

    async def go():
        config = sglang.config(batch_size=4, max_concurrency=2, max_retries=2)
        async with Scorer(config, max_new_tokens=9) as scorer:
            score = await scorer.score(prompt(), "5", num_tokens=1, finish_reason=FinishReason.STOP)
            assert math.isclose(score.value, sglang.expected("2+3=5"), abs_tol=EXACT)
            os.killpg(sglang.process.pid, signal.SIGSTOP)  # from here on nothing is answered
            responses = ["1"] * 12  # three requests, of which two may be in flight
            asked = [
                asyncio.ensure_future(
                    scorer.score(prompt(), r, num_tokens=1, finish_reason=FinishReason.STOP)
                )
                for r in responses
            ]
            done, _ = await asyncio.wait(asked, timeout=0.5)
            assert not done
            os.killpg(sglang.process.pid, signal.SIGKILL)
            return await asyncio.gather(*asked, return_exceptions=True), scorer.retries

    errors, retries = asyncio.run(asyncio.wait_for(go(), 60))
    assert all(isinstance(error, RewardModelError) for error in errors)
    assert "3 attempts to score 4 samples failed (max_retries=2)" in str(errors[0]) and sglang.url in str(
        errors[0]
    )
    assert retries == 2 * 3
    with pytest.raises(
        RewardModelError, match=f"1 attempts to score 1 samples failed.*{sglang.url}/classify.*start it"
    ):
        enter(sglang.config())
