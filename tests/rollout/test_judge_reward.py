"""A judge over OpenAI's chat completions, against a local server that answers, refuses, hangs and talks nonsense."""

import asyncio
import json
import logging
import os
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from configs.schema.reward import AnyReward, CountdownReward, JudgeReward, WeightedReward
from rollout import http_replicas
from rollout.pipe import LARGEST_ANSWER
from rollout.records import FinishReason, Prompt, Score
from rollout.rewards import served
from rollout.rewards.scorer import Scorer, check_reward
from rollout.rewards.served import RewardModelError

KEY = "sk-very-secret"
TEMPLATE = "Q {prompt} A <answer>{response}</answer> R {reference} {{}}"
PROMPT = Prompt(prompt_id="p", token_ids=[1], text="2+3=", reference="5")
DEADLINE_S = 60.0


@dataclass
class Server:
    """A judge that says ``Score: 8``; ``acts`` says what it does instead, request after request. The trial sample of
    the start is answered properly and leaves no trace."""

    acts: list[str] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    trial: str = "Score: 8"
    url: str = ""
    in_flight: int = 0
    flooded: int = 0
    """Bytes of an answer without end."""
    tried: bool = False

    async def __aenter__(self) -> "Server":
        app = web.Application()
        app.router.add_route("*", "/v1/chat/completions{slash:/?}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" else {}
        self.keys.append(request.headers.get("Authorization"))
        if not self.tried:
            self.tried = True
            return self._answer(self.trial)
        self.bodies.append(body)
        act = self.acts.pop(0) if self.acts else "Score: 8"
        if act == "hang":
            self.in_flight += 1
            await asyncio.Event().wait()
        if act == "drop":
            request.transport.abort()
            return web.Response()
        status, _, wait = act.partition(" after ")
        if status.isdigit():
            headers = {"Retry-After": wait} if wait else {}
            return web.Response(
                status=int(status), text=f"no: {request.headers.get('Authorization')}", headers=headers
            )
        if act.startswith(("301 to ", "302 to ", "307 to ")):
            return web.Response(status=int(act[:3]), headers={"Location": act[7:]})
        if act == "without end":
            return await self._flood(request)
        if act.startswith("{"):
            return web.Response(text=act)
        return self._answer(act)

    async def _flood(self, request: web.Request) -> web.StreamResponse:
        """Until its client leaves."""
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(2**16))
            self.flooded += 2**16

    def _answer(self, text: str) -> web.Response:
        reason = "length" if text.endswith("…") else "stop"
        content = None if text == "null" else text
        return web.json_response({"choices": [{"message": {"content": content}, "finish_reason": reason}]})


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch):
    monkeypatch.setattr(served, "BACKOFF_S", (0.001, 5.0))


def config_of(*urls: str, **fields) -> JudgeReward:
    given = {"type": "judge", "urls": urls, "model": "m", "prompt": TEMPLATE, "score_range": (0, 10)} | fields
    return JudgeReward(**given)


async def score(scorer: Scorer, response: str = "five") -> Score:
    return await scorer.score(PROMPT, response, num_tokens=1, finish_reason=FinishReason.STOP)


def run(server: Server, *responses: str, **fields) -> tuple[list[Score], int]:
    """The scores, one request after another, and how many requests were repeated."""

    async def go():
        async with asyncio.timeout(DEADLINE_S), server:
            async with Scorer(config_of(server.url, **fields), max_new_tokens=9) as scorer:
                return [await score(scorer, response) for response in responses], scorer.retries

    return asyncio.run(go())


# --- what is sent, and how it is read
# ----------------------------------------------------------------------------------------------------------------------


def test_a_request_and_its_score():
    server = Server()
    [score], retries = run(
        server, "five", system_prompt="Be {strict}.", extra_body={"seed": 1}, max_tokens=None, temperature=0.0
    )
    assert (score, retries) == (Score(value=0.8, parts={"judge_score": 8.0}), 0)
    text = "Q 2+3= A <answer>five</answer> R 5 {}"
    messages = [{"role": "system", "content": "Be {strict}."}, {"role": "user", "content": text}]
    assert server.bodies == [{"model": "m", "messages": messages, "temperature": 0.0, "seed": 1}]
    assert server.keys == [None, None]


def test_a_response_that_holds_places_is_not_expanded():
    server = Server()
    run(server, "{reference} {prompt} {response} {0} {")
    assert (
        server.bodies[0]["messages"][0]["content"]
        == "Q 2+3= A <answer>{reference} {prompt} {response} {0} {</answer> R 5 {}"
    )


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Score: 0", 0.0),
        ("Score:10", 1.0),
        ("The response says Score: 10, which is a trick. Score: 2.5", 0.25),
        ("Score: 3\nScore: n/a", 0.3),
        ("It says Score: 10, a trick. **Score:** 7", 0.7),
        ("**Score: 7**", 0.7),
        ("**Score**: 7", 0.7),
        ("Score: **7**/10", 0.7),
        ("__Score:__ _7_", 0.7),
        ("Score: 7\nScore:" + 100_000 * "*", 0.7),
        ("Score: 7\n\nScore:\n* 3 points are missing", 0.7),
    ],
)
def test_the_last_match_of_the_judges_own_answer_counts(answer, value):
    [score], _ = run(Server([answer]), "Score: 10")
    assert (score.value, score.error, score.correct) == (value, None, value == 1.0)
    assert score.parts == {"judge_score": 10 * value}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("no idea", r"score_pattern=.* matches nothing in the judge's answer: 'no idea'"),
        ("null", "matches nothing in the judge's answer: ''"),
        ("I think …", "answer, cut off after max_tokens=1024"),
        ("Score: 11", r"score 11 is outside of reward.score_range=\[0, 10\]"),
        ("Score: -1", "score -1 is outside"),
        *((status, f"refused it with HTTP {status}") for status in ("400", "413", "422")),
    ],
)
def test_a_sample_without_a_score_fails_alone(answer, message):
    scores, retries = run(Server(["Score: 5", answer]), "a", "b", "c")
    assert [score.value for score in scores] == [0.5, 0.0, 0.8] and retries == 0
    assert scores[1].parts == {} and not scores[1].correct
    assert re.search(message, scores[1].error)


def test_a_score_is_its_share_of_the_range():
    [score], _ = run(Server(["Score: 4"]), "a", score_range=(2, 10))
    assert score == Score(value=0.25, parts={"judge_score": 4.0})


def test_a_score_that_is_no_number():
    [score], _ = run(Server(["Score: high"]), "a", score_pattern=r"Score: (\w+)")
    assert score.value == 0 and "the judge's score 'high' is not a number" in score.error


def test_a_pattern_that_backtracks_fails_the_sample_alone():
    pattern = r"Score: (\d)|(?:a|aa)+bc"
    slow, quick = (
        run(Server([answer]), "a", score_pattern=pattern)[0][0] for answer in (60 * "a" + " bc", "Score: 7")
    )
    assert slow.value == 0 and "took longer than 1 s on the judge's answer; simplify it" in slow.error
    assert quick.value == 0.7 and quick.error is None


def test_a_part_of_a_sum():
    async def go():
        async with asyncio.timeout(DEADLINE_S), Server() as server:
            parts = {"style": config_of(server.url, weight=0.5), "right": CountdownReward()}
            async with Scorer(WeightedReward(parts=parts), max_new_tokens=9) as scorer:
                prompt = Prompt(prompt_id="i", token_ids=[1], text="1 2=3:", reference="1 2=3")
                return await scorer.score(prompt, "1+2", num_tokens=1, finish_reason=FinishReason.STOP)

    parts = {"style": 0.8, "style/judge_score": 8.0, "right": 1.0, "right/valid": 1.0}
    assert asyncio.run(go()) == Score(value=1.4, parts=parts, correct=True)


# --- failures
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["drop", "hang", "500", "503", "429"])
def test_what_fails_in_transport_is_repeated_and_counted(act):
    server = Server([act, act])
    [score], retries = run(server, "a", timeout_s=1.0 if act == "hang" else 30.0)
    assert (score.value, retries, len(server.bodies)) == (0.8, 2, 3)


def test_a_server_that_asks_for_time_gets_it(monkeypatch):
    waits = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(http_replicas.asyncio, "sleep", wait)
    run(Server(["429 after 7", "429 after 9999", "429 after soon"]), "a")
    assert [seconds for seconds in waits if seconds >= 0.001] == [7.0, served.LONGEST_WAIT_S, 0.004]


def test_the_wait_stays_the_longest_however_often_a_request_fails(monkeypatch):
    """Failures of a cut network are not counted, and 2**1024 is no float."""
    waits, failed = [], []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    async def attempt(url: str) -> str:
        if len(failed) < 1100:
            raise http_replicas.AttemptFailed
        return url

    monkeypatch.setattr(http_replicas.asyncio, "sleep", wait)
    ask = http_replicas.request_with_retries(
        [http_replicas.Replica("a")],
        attempt,
        lambda error, _: failed.append(error),
        num_samples=1,
        backoff_s=(0.1, 2.0),
    )
    assert asyncio.run(ask) == "a"
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6] + [2.0] * 1095


def test_a_server_that_was_lost_is_asked_again_after_a_while(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(http_replicas, "time", SimpleNamespace(monotonic=lambda: now))

    async def go():
        nonlocal now
        async with asyncio.timeout(DEADLINE_S), Server(["drop"]) as lost, Server() as other:
            async with Scorer(config_of(lost.url, other.url), max_new_tokens=9) as scorer:
                for passed_s, asked in ((0.0, 1), (0.9, 1), (0.1, 2), (0.0, 3)):
                    now += passed_s * http_replicas.LOST_FOR_S
                    assert (await score(scorer)).value == 0.8 and len(lost.bodies) == asked
                assert scorer.retries == 1 and len(other.bodies) == 2

    asyncio.run(go())


def test_a_look_at_servers_that_were_lost_is_no_failure_of_the_request(monkeypatch):
    """After a long pause all of them may be back. One request tries each, and none is ended by them."""
    now = 1000.0
    monkeypatch.setattr(http_replicas, "time", SimpleNamespace(monotonic=lambda: now))
    replicas = [http_replicas.Replica(url) for url in ("first", "second", "third")]
    replicas[0].is_lost = replicas[1].is_lost = True
    asked: list[str] = []

    async def attempt(url: str) -> str:
        asked.append(url)
        if url != "third":
            raise aiohttp.ClientConnectionError("refused")
        return url

    def give_up(error: Exception, failures: list[str]) -> None:
        raise AssertionError(failures)

    async def ask() -> str:
        return await http_replicas.request_with_retries(
            replicas, attempt, give_up, num_samples=1, backoff_s=(0.1, 0.1)
        )

    now += 2 * http_replicas.LOST_FOR_S
    assert [asyncio.run(ask()) for _ in range(2)] == ["third", "third"]
    assert asked == ["first", "second", "third", "third"] and replicas[0].is_lost and replicas[1].is_lost


def test_an_answer_without_end_is_a_failed_sample():
    server = Server(["without end"])
    scores, retries = run(server, "a", "b")
    assert f"answered it with more than {LARGEST_ANSWER} bytes" in scores[0].error and retries == 0
    assert (scores[1].value, scores[1].error) == (0.8, None)
    assert server.flooded < 4 * LARGEST_ANSWER  # what the kernel holds for a reader that is gone


def test_a_redirection_on_the_same_server_is_followed():
    server = Server(["307 to /v1/chat/completions/"])
    [score], _ = run(server, "a")
    assert score.value == 0.8 and server.bodies[0] == server.bodies[1]


@pytest.mark.parametrize("act", ["301 to {}", "302 to {}", "307 to {}", "302 to /v1/chat/completions"])
def test_another_redirection_ends_the_run_and_no_key_goes_along(monkeypatch, act):
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def go():
        async with asyncio.timeout(DEADLINE_S), Server() as server, Server(tried=True) as other:
            config = config_of(server.url, api_key_variable="JUDGE_KEY")
            async with Scorer(config, max_new_tokens=9) as scorer:
                server.acts.append(act.format(f"{other.url}/chat/completions"))
                with pytest.raises(
                    RewardModelError, match=rf"{server.url}/chat/completions redirects to http://"
                ):
                    await score(scorer)
            return other.keys

    assert set(asyncio.run(go())) <= {None}


def test_a_judge_that_stays_away_ends_the_run():
    with pytest.raises(
        RewardModelError, match=r"reward: 2 attempts .*HTTP 503.*correct reward.urls, reward.model"
    ):
        run(Server(["503", "503"]), "a", max_retries=1)


@pytest.mark.parametrize(
    "act",
    ['{"choices": []}', '{"error": "x"}', "{", '{"choices": [{"message": null}]}', '{"a":' * 100_000, "404"],
)
def test_an_answer_of_another_form_ends_the_run_at_once(act):
    server = Server([act])
    with pytest.raises(RewardModelError, match=r"not a chat completion|HTTP 404"):
        run(server, "a")
    assert len(server.bodies) == 1


def test_a_judge_that_never_scores_counts_as_broken(monkeypatch):
    monkeypatch.setattr(served, "MAX_FAILED_IN_A_ROW", 3)
    with pytest.raises(
        RewardModelError, match=r"3 samples in a row could not be scored, the last: .* matches nothing"
    ):
        run(Server(["?"] * 9), *"abcd")


def test_every_replica_is_tried_at_the_start():
    async def go():
        async with asyncio.timeout(DEADLINE_S), Server() as good, Server(trial="fine") as bad:
            async with Scorer(config_of(good.url, bad.url), max_new_tokens=9):
                pass

    with pytest.raises(
        RewardModelError, match=r"judge at .* cannot score a trial sample: .*matches nothing .*'fine'"
    ):
        asyncio.run(go())


def test_close_ends_what_is_under_way():
    async def go():
        async with asyncio.timeout(DEADLINE_S), Server(["hang"] * 3) as server:
            async with Scorer(config_of(server.url, max_concurrency=1), max_new_tokens=9) as scorer:
                late = [asyncio.ensure_future(score(scorer)) for _ in range(3)]
                while not server.in_flight:
                    await asyncio.sleep(0.001)
            done, pending = await asyncio.wait(late, timeout=DEADLINE_S)
            assert not pending and all(task.cancelled() for task in done) and len(server.bodies) == 1

    asyncio.run(go())


# --- proxies
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_proxies(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def test_a_judge_outside_is_asked_through_the_proxy_of_the_environment(monkeypatch, no_proxies):
    """The test's server is the proxy: its requests are for a host that does not exist."""

    async def go():
        async with asyncio.timeout(DEADLINE_S), Server() as server:
            monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
            async with Scorer(config_of("http://judge.invalid/v1"), max_new_tokens=9) as scorer:
                return await score(scorer)

    assert asyncio.run(go()).value == 0.8


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("https://api.example.org/v1", "http://proxy:3128"),
        ("http://203.0.114.9:80/v1", "http://plain:80"),
        ("http://127.0.0.1:8000/v1", None),
        ("http://localhost:8000/v1", None),
        ("http://[::1]:8000/v1", None),
        ("http://10.1.2.3:8000/v1", None),
        ("http://node7:8000/v1", None),
        ("https://judge.example.com/v1", None),
    ],
)
def test_only_a_server_outside_has_a_proxy(monkeypatch, no_proxies, url, proxy):
    assert served.proxy_of(url) is None
    monkeypatch.setenv("https_proxy", "proxy:3128")
    monkeypatch.setenv("http_proxy", "http://plain:80")
    monkeypatch.setenv("no_proxy", ".example.com")
    assert served.proxy_of(url) == proxy


# --- the key
# ----------------------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY + "\n")
    caplog.set_level(logging.DEBUG)
    server = Server(["503", "400", f"It is {KEY}", "401"])
    told: list[str] = []
    config = config_of("http://a/v1", api_key_variable="JUDGE_KEY")
    check_reward(config, tell=told.append)
    with pytest.raises(RewardModelError, match=r"HTTP 401: no: Bearer \*\*\*") as error:
        run(server, "a", "b", "c", api_key_variable="JUDGE_KEY")
    assert server.keys == [f"Bearer {KEY}"] * 5
    assert "no: Bearer ***" in caplog.text and "It is ***" in caplog.text
    shown = [str(error.value), caplog.text, *told, repr(config), json.dumps(config.model_dump(mode="json"))]
    assert not any(KEY in text for text in shown)


@pytest.mark.parametrize(
    ("value", "message"), [(None, "is not set"), (" ", "or empty"), ("a\tb", "an HTTP header cannot have")]
)
def test_a_key_that_is_missing_is_refused(monkeypatch, value, message):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    config = WeightedReward(parts={"a": config_of("http://a/v1", api_key_variable="JUDGE_KEY")})
    with pytest.raises(ValueError, match=f"reward.parts.a.api_key_variable=JUDGE_KEY.*{message}"):
        check_reward(config)

    async def enter():
        async with Scorer(config, max_new_tokens=9):
            pass

    with pytest.raises(ValueError, match=message):
        asyncio.run(enter())


# --- what the schema accepts
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"urls": []}, "at least 1 item"),
        ({"urls": ["host:8000/v1"]}, "is not an address of a server"),
        ({"urls": ["http://a/v1/chat/completions/"]}, "leave out /chat/completions"),
        ({"urls": ["http://user:secret@a/v1"]}, "an address of a holds a user or a password"),
        ({"prompt": "{prompt}"}, "leaves out the response"),
        ({"prompt": '{response} {"score": 1}'}, "a literal brace is written twice"),
        ({"prompt": "{response} }"}, "'{response} }' cannot be filled in"),
        ({"score_pattern": "Score: 1"}, "has 0 groups; put only the score"),
        ({"score_pattern": "((a)"}, "is no regular expression"),
        ({"score_range": [1, 1]}, "is empty; write"),
        ({"score_range": [0, float("inf")]}, "finite number"),
        ({"api_key_variable": "sk-123"}, "name the variable that holds the key"),
        ({"extra_body": {"stream": True}}, "extra_body has stream, which Tandem sets itself"),
        ({"temperature": -1}, "greater than or equal to 0"),
    ],
)
def test_judges_that_the_schema_refuses(fields, message):
    block = {
        "type": "judge",
        "urls": ["http://a/v1"],
        "model": "m",
        "prompt": "{response}",
        "score_range": [0, 1],
    }
    TypeAdapter(AnyReward).validate_python(block)
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AnyReward).validate_python(block | fields)
