"""The gateway's share of an agent's turn: everything but the sampling.

An engine without delay answers requests of a client in another process, over HTTP. Conversations grow by a question of
``--question`` tokens and an answer of ``--answer`` tokens per turn, and every request repeats the whole conversation, as
OpenAI's API requires.

- work: CPU time of the gateway's process per turn, the median over rounds. This is what bounds the turns per second.
- start: CPU time of an agent that imports OpenAI's client and makes one, with its guard: as a process of its own, and as
  a fork behind ``preload: [openai.resources.chat]``.
- answer: time of a request as its client sees it, the median over all turns. With 256 sessions and no sampling
  between two requests, it is the time in the queue behind the other 255.

Target: at most 5 ms of work per turn, with 1 and with 256 sessions at once.
"""

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402
import numpy as np  # noqa: E402

from configs.schema.environment import AgentEnvironment  # noqa: E402
from rollout.environments.agent_process import running  # noqa: E402
from rollout.environments.agent_template import AgentTemplate, agent_starter  # noqa: E402

TARGET_MS = 5.0
STARTS = 5
WORDS = "The answer is 4. What is 2 + 2? Let me see, are you sure? Yes, the tool says: "


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        asyncio.run(client(json.loads(sys.stdin.readline())))
        return
    from benchmarks.common import announce, parser, write

    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--turns", type=int, default=8, help="of a session")
    options.add_argument("--question", type=int, default=100, help="tokens of a user's message, about")
    options.add_argument("--answer", type=int, default=200, help="tokens of an answer")
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    rounds = 1 if given.quick else given.rounds
    about = announce(rounds=rounds, turns=given.turns)
    result: dict = {}
    for template in ("plain", "chat"):
        for sessions in (1, 256):
            # As many turns for one session: its rounds are short otherwise.
            repeats = 1 if sessions > 1 else 4 if given.quick else 32
            asyncio.run(measure(template, sessions, 1, given))  # warm
            rows = [asyncio.run(measure(template, sessions, repeats, given)) for _ in range(rounds)]
            work = [row["work_ms"] for row in rows]
            answers = [seconds for row in rows for seconds in row["answers"]]
            quartiles = statistics.quantiles(answers, n=20)
            result[f"{template}, {sessions}"] = row = {
                "turns": len(answers),
                "work_ms": [statistics.median(work), min(work), max(work)],
                "answer_ms": [
                    1000 * value for value in (statistics.median(answers), quartiles[0], quartiles[-1])
                ],
            }
            print(
                f"{template:<6} {sessions:>4} sessions   work {row['work_ms'][0]:6.2f} ms per turn "
                f"({row['work_ms'][1]:.2f} - {row['work_ms'][2]:.2f})   answer {row['answer_ms'][0]:7.2f} ms "
                f"(5 %: {row['answer_ms'][1]:.2f}, 95 %: {row['answer_ms'][2]:.2f}), {len(answers)} turns   "
                f"target: at most {TARGET_MS:g} ms of work"
            )
    for name, preload in (("process", ()), ("fork", ("openai.resources.chat",))):
        starts = [start_of_an_agent(preload) for _ in range(rounds)]
        result[f"start_s, {name}"] = seconds = [statistics.median(starts), min(starts), max(starts)]
        print("start of an agent, {}: {:.2f} CPU s ({:.2f} - {:.2f})".format(name, *seconds))
    write({**about, "result": result}, given.json)


def start_of_an_agent(preload: tuple[str, ...]) -> float:
    """CPU seconds of an agent: the mean of ``STARTS``, one after another. Importing ``preload`` is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "agent.py"
        script.write_text("import openai; openai.OpenAI(api_key='k').chat.completions")
        block = AgentEnvironment(command=(str(script),), preload=preload)
        return (cpu_of_starts(block, STARTS) - cpu_of_starts(block, 0)) / STARTS


def cpu_of_starts(block: AgentEnvironment, number: int) -> float:
    async def start() -> None:
        async with agent_starter(block) as starter:
            if isinstance(starter, AgentTemplate):
                await starter.ready()
            for _ in range(number):
                async with running(starter, {}) as process:
                    assert await process.ended() == 0, process.errors

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    asyncio.run(start())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class InstantEngine:
    """Answers with the same tokens each time, without delay."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = np.array(token_ids, dtype=np.int32)

    async def generate_group(self, prompt_ids, *, max_new_tokens, **sampling):
        from rollout.records import Completion, FinishReason, digest

        tokens = self._token_ids[:max_new_tokens]
        return [
            Completion(
                token_ids=tokens,
                rollout_logprobs=np.zeros(len(tokens), dtype=np.float32),
                token_versions=np.zeros(len(tokens), dtype=np.int32),
                finish_reason=FinishReason.STOP,
                prompt_digest=digest(np.array(prompt_ids, dtype=np.int32)),
            )
        ]


async def measure(template: str, sessions: int, repeats: int, given: argparse.Namespace) -> dict:
    """One round: CPU time per turn, and the client's times."""
    from functools import partial

    from rollout.environments.chat import Conversation, PlainRenderer
    from rollout.environments.context import EpisodeContext, EpisodeLimits, Texts
    from rollout.environments.gateway import Gateway
    from rollout.environments.rendering import ChatRenderer
    from rollout.records import Prompt
    from tests.support.chat_tokenizer import chat_tokenizer

    tokenizer = chat_tokenizer("qwen2_5")
    plain = PlainRenderer(partial(tokenizer.encode, add_special_tokens=False))
    renderer = plain if template == "plain" else ChatRenderer(tokenizer)
    answer = (tokenizer.encode(WORDS) * given.answer)[: given.answer - 1]
    (end,) = tokenizer.encode("<|im_end|>")
    problem = Prompt(prompt_id="p", token_ids=[1], text="?", reference="")
    question = tokenizer.decode((tokenizer.encode(WORDS) * given.question)[: given.question])
    async with AsyncExitStack() as exits:
        gateway = await exits.enter_async_context(Gateway(vocab_size=len(tokenizer)))
        opened = []
        for _ in range(sessions * repeats):
            context = EpisodeContext(
                client=InstantEngine([*answer, end]),  # pyright: ignore[reportArgumentType] - the part that is used
                problem=problem,
                seed=0,
                temperature=1.0,
                limits=EpisodeLimits(max_turns=10**6, max_tokens=10**6, max_new_tokens=given.answer),
                texts=Texts(tokenizer=tokenizer, end_token_ids=frozenset([end]), vocab_size=len(tokenizer)),
                score=None,  # pyright: ignore[reportArgumentType] - nothing is scored
            )
            conversation = Conversation(renderer_of=lambda tools: renderer)
            session = await exits.enter_async_context(gateway.session(context, conversation))
            opened.append((session.base_url, session.key))
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**26
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        task = {"sessions": opened, "at_once": sessions, "turns": given.turns, "question": question}
        process.stdin.write(json.dumps(task).encode() + b"\n")
        await process.stdout.readline()  # it has started
        began = time.process_time()
        process.stdin.write(b"go\n")
        line = await process.stdout.readline()
        spent = time.process_time() - began
        await process.wait()
    answers = json.loads(line)
    assert len(answers) == sessions * repeats * given.turns
    return {"work_ms": 1000 * spent / len(answers), "answers": answers}


async def client(task: dict) -> None:
    """Plays all sessions, so many at once, and prints the seconds of each request."""
    seconds, places = [], asyncio.Semaphore(task["at_once"])
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def play(url: str, key: str) -> None:
            messages = []
            async with places:
                for _ in range(task["turns"]):
                    messages.append({"role": "user", "content": task["question"]})
                    body = json.dumps({"model": "m", "messages": messages}).encode()
                    began = time.perf_counter()
                    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
                    async with http.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                        answer = await response.read()
                    seconds.append(time.perf_counter() - began)
                    assert response.status == 200, answer
                    messages.append(json.loads(answer)["choices"][0]["message"])

        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        async with asyncio.TaskGroup() as tasks:
            for url, key in task["sessions"]:
                tasks.create_task(play(url, key))
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
