"""Simulated SGLang servers: to a client they behave like real ones of a given rate, but they have no model. One process
has several.

They answer ``/generate`` with answers that were prepared as bytes, in SGLang's own form (ids, log-probs, spans of weight
versions), and take pauses and new versions as SGLang does. They do not compute: the content of an answer has nothing to do
with its prompt.

Time of an answer: a server has ``slots``, which samples take in order of arrival. A sample of n tokens keeps its slot for
n * slots / tokens_per_s seconds, as if a decoding step took the same time for every batch. ``tokens_per_s`` is thus the
rate of a full server. 0: answers come at once, so the client is the limit. A request is answered when its last sample has
ended. A pause stops all clocks ("retract": samples continue afterwards, with the new version).

    python benchmarks/simulated_servers.py FOLDER NUMBER TOKENS_PER_S SLOTS
"""

import asyncio
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web

ANSWERS, LENGTHS = "answers.jsonl", "lengths.json"
READ_BYTES = 2**22
"""Largest request body: a group's prompt, repeated for each sibling."""


def response_lengths(number: int, *, mean: float, longest: int, seed: int) -> list[int]:
    """Tokens of ``number`` responses: an exponential distribution that is cut at ``longest`` and stretched so that its mean
    is ``mean`` to a thousandth. Raises ValueError if no lengths up to ``longest`` have such a mean."""
    if not 1 <= mean <= longest:
        raise ValueError(f"a mean of {mean:g} tokens; it must be from 1 to the longest response, {longest}")
    places = [(i + 0.5) / number for i in range(number)]
    random.Random(seed).shuffle(places)

    def lengths(scale: float) -> list[int]:
        # The quantiles of an exponential distribution: as many short and long ones in each set.
        draws = (-scale * math.log1p(-place) for place in places)
        return [min(longest, max(1, round(draw))) for draw in draws]

    low, high = 0.0, 1.0
    while sum(lengths(high)) < mean * number and high < longest * number * 100:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) < mean * number else (low, middle)
    return lengths(high)


def prepare(
    folder: Path,
    lengths: Sequence[int],
    *,
    corpus: Sequence[int],
    end: int,
    longest: int,
    text_of: Callable[[list[int]], str],
    seed: int,
) -> None:
    """Write one answer for each length into ``folder``, without the fields that depend on the request. The tokens are those
    of ``corpus``, from a random place on. A response shorter than ``longest`` ends with ``end``."""
    rng = random.Random(seed)
    with (folder / ANSWERS).open("wb") as file:
        for number, length in enumerate(lengths):
            start = rng.randrange(len(corpus))
            token_ids = list(itertools.islice(itertools.cycle(corpus), start, start + length))
            finish: dict = {"type": "length", "length": longest}
            if length < longest:
                token_ids[-1] = end
                finish = {"type": "stop", "matched": end}
            file.write(_sample(number, text_of(token_ids), token_ids, finish, rng) + b"\n")
    (folder / LENGTHS).write_text(json.dumps(list(lengths)))


def _sample(number: int, text: str, token_ids: list[int], finish: dict, rng: random.Random) -> bytes:
    """A reply up to the fields that depend on the request, which ``_closing`` gives."""
    # SGLang's log-probs are float32 numbers, which JSON writes as float64: up to 20 characters each.
    logprobs = np.array([-rng.expovariate(2.0) for _ in token_ids], dtype=np.float32).tolist()
    meta = {
        "id": f"{number:032x}",
        "finish_reason": finish,
        "num_retractions": 0,
        "cached_tokens": 0,
        "completion_tokens": len(token_ids),
        "output_token_logprobs": [[logprob, i, None] for logprob, i in zip(logprobs, token_ids, strict=True)],
    }
    reply = {"text": text, "output_ids": token_ids, "meta_info": meta}
    return orjson.dumps(reply).removesuffix(b"}}")


def _closing(prompt_tokens: int, spans: Sequence[tuple[int, int, int]]) -> bytes:
    versions = [{"version": str(version), "start": start, "end": end} for version, start, end in spans]
    meta = {
        "prompt_tokens": prompt_tokens,
        "weight_version": versions[-1]["version"],
        "weight_versions": versions,
    }
    return b"," + orjson.dumps(meta).removeprefix(b"{") + b"}"


@dataclass
class Answers:
    """Prepared answers, handed out in turn."""

    contents: list[bytes]
    lengths: list[int]
    _next: itertools.count = field(default_factory=itertools.count)

    @classmethod
    def read(cls, folder: Path) -> "Answers":
        return cls((folder / ANSWERS).read_bytes().splitlines(), json.loads((folder / LENGTHS).read_text()))

    def take(self) -> tuple[bytes, int]:
        number = next(self._next) % len(self.contents)
        return self.contents[number], self.lengths[number]


class SimulatedServer:
    """One server inside the running event loop; ``app`` serves it."""

    def __init__(self, answers: Answers, *, tokens_per_s: float, slots: int) -> None:
        self._answers, self._slots = answers, slots
        self._token_s = slots / tokens_per_s if tokens_per_s else 0.0
        self._places = asyncio.Semaphore(slots)
        self._runs, self._pauses = asyncio.Event(), asyncio.Event()
        self._runs.set()
        self.version = 0
        self.tokens = 0
        """Tokens sampled so far."""
        self.busy_s = 0.0
        """Slot-seconds of sampling so far."""
        self.app = web.Application(client_max_size=READ_BYTES)
        self.app.router.add_post("/generate", self._generate)
        self.app.router.add_get("/model_info", self._model_info)
        self.app.router.add_post("/pause_generation", self._pause)
        self.app.router.add_post("/continue_generation", self._continue)
        self.app.router.add_post("/update_weights_from_distributed", self._receive)
        self.app.router.add_get("/simulated", self._counts)
        for path in (
            "/begin_weight_update",
            "/end_weight_update",
            "/init_weights_update_group",
            "/destroy_weights_update_group",
        ):
            self.app.router.add_post(path, self._done)

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        replies = await asyncio.gather(*(self._sample(len(ids)) for ids in body["input_ids"]))
        content = b"[" + b",".join(replies) + b"]"
        return web.Response(body=content, content_type="application/json")

    async def _sample(self, prompt_tokens: int) -> bytes:
        async with self._places:
            content, length = self._answers.take()
            spans = await self._decode(length)
        self.tokens += length
        return content + _closing(prompt_tokens, spans)

    async def _decode(self, length: int) -> list[tuple[int, int, int]]:
        """(version, first token, end) of each stretch between two pauses, once ``length`` tokens have had their time."""
        spans: list[tuple[int, int, int]] = []
        done = 0
        while done < length:
            await self._runs.wait()
            version, began = self.version, time.monotonic()
            if self._token_s:
                try:
                    async with asyncio.timeout((length - done) * self._token_s):
                        await self._pauses.wait()
                except TimeoutError:
                    pass
            busy_s = time.monotonic() - began
            new = int(busy_s / self._token_s) if self._pauses.is_set() else length - done
            self.busy_s += min(busy_s, (length - done) * self._token_s)
            if new := min(new, length - done):
                spans.append((version, done, done + new))
            done += new
        return spans

    async def _pause(self, request: web.Request) -> web.Response:
        self._runs.clear()
        self._pauses.set()
        return web.json_response({})

    async def _continue(self, request: web.Request) -> web.Response:
        self._pauses.clear()
        self._runs.set()
        return web.json_response({})

    async def _receive(self, request: web.Request) -> web.Response:
        version = orjson.loads(await request.read()).get("weight_version")
        if version is not None:
            self.version = int(version)
        return web.json_response({"success": True, "message": ""})

    async def _done(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": ""})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def _counts(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self.tokens, "busy_s": self.busy_s, "slots": self._slots})


async def start(server: SimulatedServer) -> tuple[web.AppRunner, str]:
    """Serve on a free port of the loopback interface. Returns what to clean up, and the URL."""
    runner = web.AppRunner(server.app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


async def main(folder: Path, number: int, tokens_per_s: float, slots: int) -> None:
    """Serve until the standard input ends; the first line of the standard output has the URLs."""
    answers = Answers.read(folder)
    servers = [SimulatedServer(answers, tokens_per_s=tokens_per_s, slots=slots) for _ in range(number)]
    started = [await start(server) for server in servers]
    print(json.dumps([url for _, url in started]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for runner, _ in started:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
