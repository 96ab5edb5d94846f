"""Agents in processes of their own around a deterministic engine: whole episodes, faults, and what is left of them."""

import asyncio
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from configs.schema import RunConfig
from configs.schema.environment import AgentEnvironment
from configs.schema.objective import GrpoAdvantage
from rollout.client import GenerationError
from rollout.environments.agent import AgentEpisodes
from rollout.environments.agent_process import NewProcesses, command_of, running
from rollout.environments.agent_template import agent_starter, check_agent
from rollout.environments.chat import Conversation, PlainRenderer
from rollout.environments.context import EpisodeLimits, turn_seed
from rollout.environments.episodes import Episodes, Sample
from rollout.environments.gateway import Gateway
from rollout.environments.loading import sample_makers
from rollout.environments.processes import PACKAGES
from rollout.environments.protocol import EpisodeFailed, Outcome
from rollout.guarded_process import remove
from rollout.records import Prompt, Status
from tests.rollout.environments.test_episodes import (
    STOP,
    TEXTS,
    VOCAB,
    Numbers,
    WaitsForServers,
    episodes,
    group_of,
    pack,
    sample,
    score_by_length,
)
from tests.rollout.environments.test_gateway import context_of
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.fake_engine import FakeEngine, fake_tokens
from tests.support.jumping_loop import jump, run_jumping
from trainer.algorithm.advantages import compute_advantages

DEADLINE_S = 60.0
ASK = """
import json, os, subprocess, sys, time, urllib.request
problem = json.loads(os.environ["TANDEM_PROBLEM"])
messages, ids = [{"role": "user", "content": problem["text"]}], []

def ask(route="/chat/completions", key=os.environ["OPENAI_API_KEY"]):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + route, json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    ids.append(answer["id"])
    message = answer["choices"][0]["message"]
    messages.append(message)
    return message["content"]

def say(text):
    messages.append({"role": "user", "content": text})
    return ask()
"""
OPENAI = """
import json, os
import openai
problem, client = json.loads(os.environ["TANDEM_PROBLEM"]), openai.OpenAI()
messages = [{"role": "user", "content": problem["text"]}]
for text in ("7 8", None):
    answer = client.chat.completions.create(model="any", messages=messages, stream=text is None)
    if text is not None:
        messages += [answer.choices[0].message, {"role": "user", "content": text}]
said = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
print("done")
print(json.dumps({"reward": len(said), "parts": {"turns": 2}}))
"""
PROBLEM = Prompt(prompt_id="p", token_ids=[3, 4, 5], text="3 4 5", reference="secret", row={"key": "row"})


class Model(Numbers):
    def __len__(self) -> int:
        return VOCAB


def names(process: psutil.Process, folder: Path) -> bool:
    return any(str(folder) in word for word in process.info["cmdline"] or ())


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    # What was forked by a template is no child of ours. Its command line has the script.
    left |= {process for process in psutil.process_iter(["cmdline"]) if names(process, tmp_path)}
    daemons = [int(file.name.partition("-")[2]) for file in tmp_path.glob("daemon-*")]
    running = [pid for pid in daemons if psutil.pid_exists(pid)]
    assert (left, running, list(folders.iterdir())) == (set(), [], [])


@pytest.fixture(params=[(), ("json", "urllib.request")], ids=["process", "fork"], autouse=True)
def start(request, monkeypatch) -> tuple[str, ...]:
    """Every test of a whole agent holds for a process of its own, and for a fork behind its modules."""
    monkeypatch.setitem(FIELDS, "preload", request.param)
    return request.param


FIELDS: dict[str, object] = {"template": "plain", "timeout_s": 30.0}


def samples_of(
    script: str, folder: Path, *, seeds: Sequence[int] = (11, 12), engine=None, limits=None, **fields
) -> list[Sample]:
    file = folder / "agent.py"
    file.write_text(script)
    config = AgentEnvironment.model_validate({"command": ["{python}", str(file)]} | FIELDS | fields)

    async def samples() -> list[Sample]:
        async with (
            asyncio.timeout(DEADLINE_S),
            Gateway(vocab_size=VOCAB) as gateway,
            agent_starter(config) as starter,
        ):
            environment = AgentEpisodes(
                gateway,
                starter,
                config,
                Conversation(renderer_of=lambda tools: PlainRenderer(TEXTS.encode)),
            )
            outer = config.model_copy(update={"timeout_s": DEADLINE_S})
            most = limits or EpisodeLimits(max_turns=5, max_tokens=400, max_new_tokens=6)
            maker = Episodes(environment, config=outer, limits=most, texts=TEXTS, score=score_by_length)
            return await maker.sample(engine or FakeEngine(), PROBLEM, list(seeds), temperature=0.5)

    made = asyncio.run(samples())
    if all(len(one.sequence.turns) for one in made):
        pack([group_of(made)])  # every turn is what was requested
    return made


def two_turns(seed: int, second: str) -> tuple[list[int], list[int]]:
    """(tokens of the first turn, of the second)"""
    turns, ids = [], [3, 4, 5]
    for turn in range(2):
        tokens = fake_tokens(ids, turn_seed(seed, turn), max_new_tokens=6, vocab_size=VOCAB, stop=STOP)
        turns.append(tokens)
        ids = [*ids, *tokens, *TEXTS.encode(second)]
    return turns[0], turns[1]


def test_an_unchanged_agent_with_openais_client_is_an_environment(tmp_path):
    """From a config, as the sample role makes it."""
    (tmp_path / "agent.py").write_text(OPENAI)
    environment = {
        "type": "agent",
        "command": [str(tmp_path / "agent.py")],
        "template": "plain",
        "reward": "agent",
    }
    config = RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "task": {"type": "countdown"},
            "rollout": {"max_new_tokens": 6},
            "environment": environment,
        }
    )

    async def samples() -> list[Sample]:
        async with asyncio.timeout(DEADLINE_S), sample_makers(
            config, scorer=SimpleNamespace(score=None), tokenizer=Model(), stop_token_ids=[STOP], max_positions=256, vocab_size=VOCAB  # pyright: ignore
        ) as samples_of:  # fmt: skip
            return await samples_of("training").sample(FakeEngine(), PROBLEM, [11, 12], temperature=0.5)

    for seed, one in zip((11, 12), made := asyncio.run(samples()), strict=True):
        first, second = two_turns(seed, "7 8")
        assert one.sequence.token_ids.tolist() == [3, 4, 5, *first, 7, 8, *second]
        text = TEXTS.decode(one.sequence.token_ids[-len(second) :])
        assert (one.reward, one.status, one.error) == (len(text), Status.OK, None)
        assert one.parts == {"turns": 2.0, "forks": 0.0, "refused_requests": 0.0, "unread_calls": 0.0}
    pack([group_of(made)])


TOKENS = """
import json, os, urllib.request

def sampled(ids):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/generate", json.dumps({"token_ids": ids}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["token_ids"]

ids = json.loads(os.environ["TANDEM_PROBLEM"])["text"]
ids = [int(word) for word in ids.split()]
for observed in ([7], [8], []):
    ids += [*sampled(ids), *observed]
print(json.dumps({"reward": max(ids)}))
"""


def test_an_agent_gives_back_ids_that_the_tokenizer_does_not_have(tmp_path):
    """The model has more rows than the tokenizer has tokens, and samples them."""
    (tmp_path / "agent.py").write_text(TOKENS)
    config = RunConfig.model_validate(
        {
            "model": {"path": "model"},
            "task": {"type": "countdown"},
            "rollout": {"max_new_tokens": 6},
            "environment": {
                "type": "agent",
                "command": [str(tmp_path / "agent.py")],
                "template": "plain",
                "reward": "agent",
            },
        }
    )

    async def samples() -> list[Sample]:
        async with asyncio.timeout(DEADLINE_S), sample_makers(
            config, scorer=SimpleNamespace(score=None), tokenizer=Model(), stop_token_ids=[STOP], max_positions=256,  # pyright: ignore
            vocab_size=2 * VOCAB,
        ) as samples_of:  # fmt: skip
            engine = FakeEngine(vocab_size=2 * VOCAB)
            return await samples_of("training").sample(engine, PROBLEM, [11, 12], temperature=0.5)

    for one in asyncio.run(samples()):
        assert (one.error, len(one.sequences), len(one.sequence.turns)) == (None, 1, 3)
        assert one.reward is not None and VOCAB <= one.reward < 2 * VOCAB


def test_an_environment_of_messages_takes_the_template_with_the_arguments_of_the_model():
    config = RunConfig.model_validate(
        {
            "model": {"path": "model", "chat_template_kwargs": {"enable_thinkin": False}},
            "task": {"type": "countdown"},
            "environment": {"type": "agent", "command": ["true"]},
        }
    )

    async def start() -> None:
        tokenizer = chat_tokenizer("qwen3")
        async with sample_makers(
            config, scorer=SimpleNamespace(score=None), tokenizer=tokenizer, stop_token_ids=[0], max_positions=256,  # pyright: ignore
            vocab_size=len(tokenizer),
        ):  # fmt: skip
            pass

    with pytest.raises(ValueError, match="never reads enable_thinkin"):
        asyncio.run(start())


def test_the_run_scores_the_last_answer_and_the_reference_stays_here(tmp_path, monkeypatch):
    script = (
        ASK
        + f"""
assert sorted(problem) == ["messages", "prompt_id", "text"], problem
assert "secret" not in str(dict(os.environ)) and "row" not in str(problem)
assert os.getcwd() != {os.getcwd()!r} and os.listdir() == []
assert str({str(PACKAGES)!r}) not in os.environ.get("PYTHONPATH", "").split(":") and "PYTHONSAFEPATH" not in os.environ
open("left_over", "w").write("x")
ask(); say("7 8")
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))  # as the roles have them
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    for seed, one in zip((11, 12), samples_of(script, tmp_path), strict=True):
        first, second = two_turns(seed, "7 8")
        assert one.sequence.token_ids.tolist() == [3, 4, 5, *first, 7, 8, *second]
        assert one.status is Status.OK and one.reward == len(second) / 2
        assert one.parts["refused_requests"] == 0.0


def test_the_last_answer_is_scored_with_the_length_of_its_own_turn(tmp_path):
    """Also where it is of a fork."""
    script = ASK + 'ask(); messages[:] = [{"role": "user", "content": "7 8"}]; ask()'
    made = samples_of(script, tmp_path, seeds=range(11, 17))
    lengths = [[s.turns[0].end - s.turns[0].start for s in one.sequences] for one in made]
    assert any(first != second for first, second in lengths)
    assert [one.reward for one in made] == [second / 2 for _, second in lengths]


def test_hosts_that_need_no_proxy_stay(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "judge.internal")
    script = (
        ASK
        + """
assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "judge.internal,127.0.0.1", os.environ
ask()
"""
    )
    (one,) = samples_of(script, tmp_path, seeds=[1])
    assert (one.status, one.error) == (Status.OK, None)


def test_a_row_is_passed_where_the_config_says_so(tmp_path):
    script = ASK + 'ask(); print(json.dumps({"reward": problem["row"] == {"key": "row"} and 2}))'
    (one,) = samples_of(script, tmp_path, seeds=[1], pass_row=True, reward="agent")
    assert one.reward == 2.0


REWARDED = """
texts = [ask()]
kept = [*messages]
texts.append(say("7 8"))
messages[:] = kept
texts.append(say("9"))
first, _, last = [len(text.split()) / 8 for text in texts]
print(json.dumps({"turn_rewards": {ids[0]: first, ids[2]: last}} | ({"reward": 2.5} if first < last else {})))
"""


async def rewards_the_same_turns(problem, context):
    def earned(turn) -> float:
        return len(context.decode(turn).split()) / 8

    context.observe(problem.token_ids)
    context.reward_turn(first := earned(await context.act()))
    fork = context.fork()
    context.observe([7, 8])
    await context.act()
    fork.observe([9])
    fork.reward_turn(last := earned(await fork.act()))
    parts = {"forks": 1.0, "refused_requests": 0.0, "unread_calls": 0.0}
    return Outcome(reward=2.5 if first < last else first + last, parts=parts)


def test_an_agent_rewards_its_turns_by_the_ids_of_their_answers(tmp_path):
    """As an environment of tokens does, also a turn that two sequences have in common. What it does not reward earns
    nothing, and the last turn of the first sequence gets the rest."""
    seeds = range(11, 17)
    made = samples_of(ASK + REWARDED, tmp_path, seeds=seeds, reward="agent")
    group = group_of(made)
    assert group == group_of(sample(episodes(rewards_the_same_turns), seeds=seeds, prompt=PROBLEM))
    assert {one.reward == 2.5 for one in made} == {False, True}

    share, batch = pack([group], credits_turns=True)
    values = []
    for one in made:
        (first, unrewarded), (last,) = [[turn.reward for turn in s.turns] for s in one.sequences]
        assert unrewarded is None
        values.append([first, one.reward - first - last, last])
    mean, spread = statistics.fmean(chain(*values)), statistics.stdev(chain(*values)) + 1e-6
    expected_T = []
    for t in share.trajectories:
        rows = [(value - mean) / spread for value in values[t.sibling_id]]
        of_turns = [sum(rows), sum(rows[1:])] if t.branch == 0 else [sum(rows)]
        row = [0.0] * (len(t.token_ids) - 1)
        for turn, advantage in zip(t.turns, of_turns, strict=True):
            row[turn.start - 1 : turn.end - 1] = [advantage] * (turn.end - turn.start)
        expected_T += row
    found = compute_advantages(
        batch.packed, batch.rewards_S, batch.group_ids_S, GrpoAdvantage(credit="turn"),
        episode_ids_S=batch.episode_ids_S, turn_rewards=batch.turn_rewards,
    )  # fmt: skip
    assert found.advantages_T.tolist() == pytest.approx(expected_T, abs=1e-5)


def test_what_an_agent_may_do_wrong_is_no_score(tmp_path):
    """One kind of fault per seed of the problem, all at the same time."""
    faults = [
        ("raise KeyError('x')", Status.FAILED, r"ended with exit code 1; its error output ends with: .*KeyError: 'x'$"),
        ("sys.exit('\x1b[2J\\nowned')", Status.FAILED, r"its error output ends with: ␛\[2J owned$"),
        ("os.kill(os.getpid(), 9)", Status.FAILED, "the agent was killed by SIGKILL; it wrote no error output"),
        ("ask(); os.kill(os.getppid(), 15); time.sleep(1000)", Status.FAILED, "the agent was killed by SIGTERM; it wrote"),
        ("ask(); sys.exit(3)", Status.FAILED, "ended with exit code 3; it wrote no error output"),
        ("pass", Status.FAILED, "ended without a turn"),
        ("ask(key='wrong')", Status.FAILED, "exit code 1; .*401"),
        ("ask(); ask()", Status.FAILED, r"refused with 400: no message follows the last answer"),
        ("ask(); print('x' * 200000)", Status.REWARD_FAILED, "the last line that the agent printed is 'xxx"),
        ("ask(); print(json.dumps({'reward': float('nan')}))", Status.REWARD_FAILED, "needs {\"reward\": number"),
        ("ask(); print('[1]')", Status.REWARD_FAILED, r"the last line that the agent printed is '\[1\]'"),
        ("ask(); print(json.dumps({'reward': 1, 'parts': {'a': True}}))", Status.REWARD_FAILED, "last line"),
        ("ask(); print(json.dumps({'turn_rewards': {}}))", Status.REWARD_FAILED, "printed is '{\"turn_rewards\": {}}', but"),
        ("ask(); print('{\"turn_rewards\": [1], \"reward\": 1}')", Status.REWARD_FAILED, "is '{\"turn_rewards\": .1., \"reward"),
        ("ask(); print(json.dumps({'turn_rewards': {ids[0]: 1, 'x': 1}}))", Status.REWARD_FAILED, "has 'x', which is the id of none of"),
        ("ask(); print(json.dumps({'turn_rewards': {ids[0]: float('nan')}}))", Status.REWARD_FAILED, "has nan for 'chatcmpl-.*', but"),
        ("ask(); print(json.dumps({'turn_rewards': {ids[0]: True}, 'reward': 1}))", Status.REWARD_FAILED, "has True for 'chatcmpl-"),
        ("ask(); print(json.dumps({'turn_rewards': {ids[0]: -10**400}}))", Status.REWARD_FAILED, "has -1000+ for 'chatcmpl-"),
        ("ask(); print(json.dumps({'reward': 5}), end='\\n\\n')", Status.OK, None),
    ]  # fmt: skip
    bodies = [body for body, *_ in faults]
    # The engine's answers play no part: each agent takes its number from a file that it alone can make.
    script = (
        ASK
        + f"""
for number in range({len(faults)}):
    try:
        os.close(os.open(f{str(tmp_path)!r} + f"/taken-{{number}}", os.O_CREAT | os.O_EXCL))
        break
    except FileExistsError:
        pass
exec({bodies!r}[number])
"""
    )
    made = samples_of(script, tmp_path, seeds=range(len(faults)), reward="agent")
    left = list(faults)
    for one in made:
        fits = [
            f
            for f in left
            if f[1] is one.status and (f[2] is None or re.search(f[2], one.error or "", re.DOTALL))
        ]
        assert fits, one.error
        left.remove(max(fits, key=lambda fault: len(fault[2] or "")))
        assert (one.reward is None) == (one.status is not Status.OK)
        assert all(turn.reward is None for turn in one.sequence.turns)
    assert left == []


def test_waiting_for_servers_is_no_time_of_the_agent():
    """An agent that asks and then hangs: its deadline of 30 s counts behind the wait for a server."""
    config = AgentEnvironment.model_validate({"command": ["true"], "timeout_s": 30.0})
    process = SimpleNamespace(ended=asyncio.Event().wait, errors="")

    async def test():
        agents = AgentEpisodes(
            Gateway(vocab_size=VOCAB), NewProcesses(["true"], dict), config,
            Conversation(renderer_of=lambda tools: PlainRenderer(TEXTS.encode)),
        )  # fmt: skip
        context = context_of(engine=WaitsForServers(1000.0))
        context.observe([3])
        session = SimpleNamespace(failure=asyncio.get_running_loop().create_future(), last_refusal=None)
        ended = asyncio.create_task(agents._end_of(process, session, context))  # pyright: ignore
        await jump(0.0)
        await jump(10.0)
        await context.act()
        await jump(19.0)
        assert not ended.done()
        await jump(2.0)
        with pytest.raises(EpisodeFailed, match=r"the agent ran longer than environment\.timeout_s=30 s"):
            await ended

    run_jumping(test())


def test_a_hanging_agent_is_killed_with_its_daemons(tmp_path):
    script = (
        ASK
        + f"""
ask()
shell = subprocess.Popen("setsid sleep 1000 & echo $!", shell=True, stdout=subprocess.PIPE)
pids = [int(shell.stdout.readline()), subprocess.Popen(["sleep", "1000"]).pid]
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writer, str(os.getpid()).encode())
        subprocess.run(["sleep", "1000"])
    os._exit(0)
pids.append(int(os.read(reader, 100)))
for pid in pids:
    os.kill(pid, 0)
    open({str(tmp_path)!r} + f"/daemon-{{pid}}", "w")
print("on its way", file=sys.stderr)
if {{hangs}}:
    sys.stdin.read()
    subprocess.run(["sleep", "1000"])
"""
    )
    (one,) = samples_of(script.replace("{hangs}", "True"), tmp_path, seeds=[1], timeout_s=5.0)
    assert (one.reward, one.status) == (None, Status.TIME_LIMIT)
    assert one.error == (
        "the agent ran longer than environment.timeout_s=5 s, and was killed; its error output ends with: on its way"
    )
    assert len(list(tmp_path.glob("daemon-*"))) == 3
    (one,) = samples_of(script.replace("{hangs}", "False"), tmp_path, seeds=[1])
    assert (one.status, one.error) == (Status.OK, None)
    assert len(list(tmp_path.glob("daemon-*"))) == 6


def test_an_agent_that_is_cancelled_at_its_start_leaves_nothing(tmp_path):
    """The event loop is busy meanwhile, as with the templates of other episodes, so the agent is ahead of it."""
    command = ["sh", "-c", f"setsid sleep 1000 & touch {tmp_path}/daemon-$!; sleep 1000"]

    async def play():
        async def start():
            async with running(NewProcesses(command, dict), {}):
                raise AssertionError("it was cancelled")

        children = psutil.Process().children
        before, starting = children(), asyncio.ensure_future(start())
        async with asyncio.timeout(DEADLINE_S):
            while children() == before:
                await asyncio.sleep(0)
        deadline = time.monotonic() + DEADLINE_S
        while not list(tmp_path.glob("daemon-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(play())
    assert len(list(tmp_path.glob("daemon-*"))) == 1


def test_an_agent_that_kills_its_guard_ends_its_episode_alone(tmp_path, caplog):
    """What it set free holds its output, and nobody can find it; the episode ends all the same."""
    script = (
        ASK
        + f"""
daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
open({str(tmp_path / "free")!r}, "w").write(str(daemon.pid))
os.kill(os.getppid(), 9)
"""
    )
    (one,) = samples_of(script, tmp_path, seeds=[1], timeout_s=5.0)
    os.kill(int((tmp_path / "free").read_text()), signal.SIGKILL)
    assert (one.reward, one.status) == (None, Status.TIME_LIMIT)
    assert "outlives the agent's guard" in caplog.text


def test_limits_of_an_episode_are_no_fault(tmp_path):
    limits = EpisodeLimits(max_turns=2, max_tokens=400, max_new_tokens=6)
    (one,) = samples_of(ASK + "ask(); say('7'); say('8')", tmp_path, seeds=[1], limits=limits)
    assert (one.reward, one.status, one.error) == (0.0, Status.TURN_LIMIT, None)
    handled = ASK + "ask(); say('7')\ntry: say('8')\nexcept OSError: print('enough')"
    (one,) = samples_of(handled, tmp_path, seeds=[1], limits=limits)
    _, second = two_turns(1, "7")
    assert (one.reward, one.status) == (len(second) / 2, Status.TURN_LIMIT)


def test_names_of_parts_can_be_sent_to_the_learner(tmp_path):
    """Half of a surrogate pair, as JSON can write it, ended the sample role."""
    script = ASK + r"""ask(); print('{"reward": 1, "parts": {"\\ud800": 2}}')"""
    (one,) = samples_of(script, tmp_path, seeds=[1], reward="agent")
    assert one.parts["?"] == 2.0
    assert msgspec.msgpack.encode(one.parts)


def test_a_failing_engine_ends_the_run_at_once(tmp_path):
    script = ASK + 'try: ask()\nexcept OSError: subprocess.run(["sleep", "1000"])'
    with pytest.raises(GenerationError, match="asked to fail"):
        samples_of(script, tmp_path, engine=FakeEngine(fail=lambda prompt, seed: seed == 12))


def test_folders_that_may_not_be_written_are_removed():
    """As a user other than root, who may write anywhere."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        folder = tempfile.mkdtemp(dir="/tmp")
        os.makedirs(f"{folder}/closed/inner/shut")
        Path(folder, "closed/inner/file").touch()
        os.symlink("/", f"{folder}/closed/root")
        os.chmod(f"{folder}/closed/inner/shut", 0)
        os.chmod(f"{folder}/closed/inner", 0o555)
        os.chmod(f"{folder}/closed", 0o555)
        os.chmod(folder, 0)
        remove(folder)
        assert not os.path.exists(folder)
    finally:
        os.seteuid(own)


def test_an_agent_that_is_cancelled_while_its_folder_is_made_leaves_none(monkeypatch):
    """The fixture looks."""
    started, may_go = threading.Event(), threading.Event()

    def slow(function):
        def called(*arguments, **named):
            started.set()
            may_go.wait(DEADLINE_S)
            return function(*arguments, **named)

        return called

    async def play():
        async def start():
            async with running(NewProcesses(["true"], dict), {}):
                raise AssertionError("it was cancelled")

        starting = asyncio.ensure_future(start())
        await asyncio.to_thread(started.wait, DEADLINE_S)
        starting.cancel()
        asyncio.get_running_loop().call_soon(may_go.set)
        with pytest.raises(asyncio.CancelledError):
            await starting

    monkeypatch.setattr(os, "mkdir", slow(os.mkdir))
    asyncio.run(play())


def test_a_command_is_checked_before_the_start(tmp_path, monkeypatch):
    def command(*words: str) -> list[str]:
        config = AgentEnvironment(command=words)
        check_agent(config)
        return command_of(config)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()
    (tmp_path / "data.json").touch()
    agent, data = str(tmp_path / "agent.py"), str(tmp_path / "data.json")
    assert command("agent.py", "data.json", "-v") == [sys.executable, agent, data, "-v"]
    assert command("{python}", "agent.py") == [sys.executable, agent]
    assert command("sh", "-c", "true") == ["sh", "-c", "true"]
    with pytest.raises(ValueError, match=r"environment.command=.*there is no program 'nothing'"):
        command("nothing")
    with pytest.raises(ValueError, match=r"there is no file 'other.py' in"):
        command("other.py")
    with pytest.raises(ValueError, match=r"there is no file 'other.py' in"):
        command("{python}", "other.py")
    with pytest.raises(ValueError, match="tool_call_parser=nothing is unknown"):
        check_agent(AgentEnvironment(command=("agent.py",), tool_call_parser="nothing"))
    assert shutil.which("sh")
