"""Episodes in real processes around a deterministic engine. After each fault the other siblings are scored, only
they make the baseline, and no process is left."""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from configs.schema.environment import ChatEnvironment, TokenEnvironment
from configs.schema.objective import GrpoAdvantage
from rollout.environments import processes
from rollout.environments.chat import ChatEpisodes, Conversation, PlainRenderer
from rollout.environments.context import EpisodeLimits
from rollout.environments.episodes import Episodes, Sample
from rollout.environments.processes import (
    EnvironmentProcess,
    EnvironmentStartError,
    ProcessPool,
    check_environment,
    max_processes,
    users_variables,
)
from rollout.environments.protocol import EpisodeFailed
from rollout.records import Status
from tests.rollout.environments.test_episodes import PROMPT, TEXTS, group_of, pack, score_by_length
from tests.support.chat_environments import is_faulty
from tests.support.fake_engine import FakeEngine
from trainer.algorithm.advantages import compute_advantages

SEEDS = range(100, 110)
ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0
HANG_S = 3.0


def config_of(fault: str = "none", folder: Path | None = None, **fields) -> ChatEnvironment:
    options = {"fault": fault, "folder": None if folder is None else str(folder)}
    named = {"environment": "tests.support.chat_environments:Faulty", "options": options} | fields
    return ChatEnvironment(template="plain", **named)


def test_an_environment_of_messages_gets_no_secret_and_one_of_tokens_what_its_role_has(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    monkeypatch.setenv("JUDGE", "named by the config")
    chat, tokens = config_of(), TokenEnvironment(environment="of_tokens:E")
    assert not {"HF_TOKEN", "JUDGE"} & users_variables(chat, {"JUDGE"}).keys()
    assert "JUDGE" in users_variables(config_of(pass_secrets=("JUDGE",)), {"JUDGE"})
    assert {"HF_TOKEN", "JUDGE"} <= users_variables(tokens, {"JUDGE"}).keys()


PLAIN = Conversation(renderer_of=lambda tools: PlainRenderer(TEXTS.encode))


async def samples_of(config: ChatEnvironment, seeds: Sequence[int] = SEEDS, size: int = 2) -> list[Sample]:
    async with ProcessPool(config.model_copy(update={"max_processes": size})) as pool:
        environment = ChatEpisodes(pool, PLAIN)
        limits = EpisodeLimits(max_turns=9, max_tokens=400, max_new_tokens=6)
        maker = Episodes(environment, config=config, limits=limits, texts=TEXTS, score=score_by_length)
        async with asyncio.timeout(DEADLINE_S):
            return await maker.sample(FakeEngine(), PROMPT, list(seeds), temperature=0.5)


def first_turn(sample: Sample) -> str:
    turn = sample.sequence.turns[0]
    ids = sample.sequence.token_ids[turn.start : turn.end]
    return TEXTS.decode(ids)


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    daemons = [int(file.name.partition("-")[2]) for file in tmp_path.glob("daemon-*")]
    assert (left, [pid for pid in daemons if psutil.pid_exists(pid)]) == (set(), [])


@pytest.fixture(scope="module")
def sound() -> list[Sample]:
    """Samples without any fault."""
    samples = asyncio.run(samples_of(config_of()))
    assert {one.status for one in samples} == {Status.OK}
    assert 2 < sum(is_faulty(first_turn(one)) for one in samples) < 8
    return samples


def check_others(
    samples: Sequence[Sample], sound: Sequence[Sample], failed: Callable[[Sample], bool]
) -> None:
    """All but the failed samples are those of a sound run, and their advantages are of a group of them alone."""
    pairs = list(zip(samples, sound, strict=True))
    good = [one for one in samples if not failed(one)]
    for one, like in pairs:
        if not failed(one):
            assert group_of([one]) == group_of([like])
    advantages = []
    for group in (samples, good):
        _, batch = pack([group_of(group)])
        of_all = compute_advantages(batch.packed, batch.rewards_S, batch.group_ids_S, GrpoAdvantage())
        advantages.append(of_all.advantages_T[batch.packed.response_mask_T])
    assert torch.equal(*advantages)
    assert len(good) > 2


FAULTS = [
    ("crash", Status.FAILED, r"process \(pid \d+\) ended with exit code 3 in step"),
    ("crash_with_daemon", Status.FAILED, "ended with exit code 3 in step"),
    ("poison", Status.REWARD_FAILED, r"returned nan as reward, .* \(chat_environments.py:\d+ in step\)"),
    ("shout", Status.FAILED, r"an answer may have at most 4194304 \(chat_environments.py:\d+ in step\)"),
    ("raises", Status.FAILED, r"raised KeyError: 'x' \(chat_environments.py:\d+ in raises\)"),
    ("exits", Status.FAILED, r"raised SystemExit: bye \(chat_environments.py:\d+ in exits\)"),
    ("wrong_shape", Status.FAILED, r"returned str '7 8'; return \(messages, reward, done\) \(chat_environments"),
    ("no_json", Status.FAILED, "the environment's answer is not JSON: Object of type object"),
    ("garbage", Status.FAILED, "wrote b'7 8.n' in step, which is not an answer"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "status", "message"), FAULTS)
def test_a_fault_is_no_score_and_the_siblings_go_on(fault, status, message, sound, tmp_path):
    samples = asyncio.run(samples_of(config_of(fault, tmp_path)))
    for one in samples:
        if is_faulty(first_turn(one)):
            assert (one.reward, one.status) == (None, status)
            assert re.search(message, one.error or ""), one.error
    check_others(samples, sound, lambda one: is_faulty(first_turn(one)))


@pytest.mark.parametrize("fault", ["prints", "daemon"])
def test_what_an_episode_prints_or_leaves_over_changes_nothing(fault, sound, tmp_path):
    samples = asyncio.run(samples_of(config_of(fault, tmp_path)))
    check_others(samples, sound, lambda one: False)
    assert (fault == "daemon") == bool([*tmp_path.glob("daemon-*")])


def test_a_daemon_is_gone_before_the_next_episode_of_its_process(tmp_path):
    config = config_of("daemon", tmp_path)

    async def play():
        async with ProcessPool(config.model_copy(update={"max_processes": 1})) as pool:
            async with pool.episode() as first:
                await first.reset({"text": "1"})
                await first.step({"role": "assistant", "content": "3"})
            daemons = [int(file.name.partition("-")[2]) for file in tmp_path.glob("daemon-*")]
            alive = [pid for pid in daemons if psutil.pid_exists(pid)]
            async with pool.episode() as second:
                return second is first, len(daemons), alive

    assert asyncio.run(play()) == (True, 2, [])


def test_what_a_policy_writes_fails_no_episode():
    """Half of a surrogate pair, and a number that no machine word holds, in the arguments of a tool."""
    config = config_of(
        environment="tests.support.chat_environments:Echo",
        interface="tools",
        options={},
        tool_call_parser="p",
    )
    arguments = [{"text": "half \ud83d"}, {"text": 10**40}, {"text": "\ud83d", "fails": True}]
    calls = [{"id": "c", "function": {"name": "echo", "arguments": one}} for one in arguments]
    calls.append({"id": "c", "function": {"name": "\ud83d", "arguments": {}}})

    async def play():
        async with (
            ProcessPool(config.model_copy(update={"max_processes": 1})) as pool,
            pool.episode() as process,
        ):
            await process.reset({"messages": [], "row": {"half": "\ud83d"}})
            return await process.step({"role": "assistant", "content": "", "tool_calls": calls})

    stepped = asyncio.run(play())
    *contents, unknown = [m["content"] for m in stepped.messages]
    assert contents == ["half ?", str(10**40), "Error: ValueError: ?"]
    assert unknown.startswith("Error: there is no tool")


@pytest.mark.parametrize("fault", ["hang", "hang_with_daemon"])
def test_a_late_step_is_killed(fault, sound, tmp_path):
    samples = asyncio.run(samples_of(config_of(fault, tmp_path, step_timeout_s=HANG_S), size=len(SEEDS)))
    for one in samples:
        if is_faulty(first_turn(one)):
            assert (one.reward, one.status) == (None, Status.TIME_LIMIT)
            message = r"environment.step_timeout_s=3 s, at chat_environments.py:\d+ in hang"
            assert re.search(message, one.error or ""), one.error
    check_others(samples, sound, lambda one: is_faulty(first_turn(one)))


def test_the_current_line_is_that_of_the_whole_trace(tmp_path, monkeypatch):
    """The process writes its trace piece by piece, here with a pause behind each line."""
    config = config_of("hang", tmp_path, step_timeout_s=0.5)
    pread, pieces = os.pread, []

    def slowly(descriptor, size, offset):
        lines = pread(descriptor, size, offset).splitlines(keepends=True)
        if lines:
            pieces.append(len(lines))
        return b"".join(lines[: len(pieces)])

    async def play():
        async with (
            ProcessPool(config.model_copy(update={"max_processes": 1})) as pool,
            pool.episode() as process,
        ):
            await process.reset({"text": "1"})
            monkeypatch.setattr(os, "pread", slowly)
            await process.step({"role": "assistant", "content": "3"})

    with pytest.raises(EpisodeFailed, match=r", at chat_environments.py:\d+ in hang"):
        asyncio.run(play())


@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        ("hang_in_reset", Status.TIME_LIMIT, "environment.reset_timeout_s=3 s, at chat_environments.py"),
        ("crash_in_reset", Status.FAILED, "exit code 3 in reset"),
    ],
)
def test_a_fault_in_reset_fails_one_episode(fault, status, message, sound, tmp_path):
    samples = asyncio.run(samples_of(config_of(fault, tmp_path, reset_timeout_s=HANG_S)))
    (failed,) = (one for one in samples if one.reward is None)
    assert failed.status is status and message in (failed.error or "")
    check_others(samples, sound, lambda one: one is failed)


def test_episodes_take_turns_where_a_further_process_does_not_start(sound, tmp_path, caplog):
    """Two places, but only one process can be started."""
    samples = asyncio.run(samples_of(config_of("start_fails_later", tmp_path), seeds=SEEDS[:4]))
    check_others(samples, sound[:4], lambda one: False)
    (warning,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert "OSError: no licence left (chat_environments.py" in warning and "environment.options" in warning


BROKEN = {
    "raises_at_import": (
        "import nothing_of_the_name",
        "imports 'nothing_of_the_name', which .* does not have",
    ),
    "ends_at_import": ("import sys; sys.exit(4)", "importing ends_at_import ends the process: SystemExit: 4"),
    "crashes_at_import": (
        "import os; os._exit(5)",
        "exit code 5 in importing and making crashes_at_import:E",
    ),
    "has_no_such_class": ("", "has no class 'E'"),
    "has_no_step": ("class E:\n  def reset(self, problem): ...", r"no method step \(has_no_step.py:1 in E\)"),
    "hangs_at_import": (
        "import time; time.sleep(1000)",
        "start_timeout_s=.* s, at hangs_at_import.py:1 in <module>, and its process was killed; make it faster, "
        "or raise environment.start_timeout_s$",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_environment_that_cannot_be_started_ends_the_run(name, tmp_path, monkeypatch):
    source, message = BROKEN[name]
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    limit_s = 4.0 if "hangs" in name else 60
    config = config_of(environment=f"{name}:E", options={}, start_timeout_s=limit_s)
    with pytest.raises(EnvironmentStartError, match=message):
        asyncio.run(samples_of(config))
    with pytest.raises(ValueError, match=message):
        check_environment(config)


class FailingStarts:
    """The first start succeeds, and the next ``count`` fail."""

    def __init__(self, count: float) -> None:
        self.count, self.start, self.is_first = count, EnvironmentProcess.start, True

    async def __call__(self, config, keys):
        if not self.is_first and self.count > 0:
            self.count -= 1
            raise EnvironmentStartError("no memory")
        self.is_first = False
        return await self.start(config.model_copy(update={"start_timeout_s": DEADLINE_S}), keys)


@pytest.mark.parametrize(
    ("count", "limits", "status"),
    [(12, {}, Status.OK), (math.inf, {"start_timeout_s": 0.2}, Status.FAILED)],
)
def test_a_start_that_fails_is_tried_again(monkeypatch, count, limits, status):
    """One process is started, and then both episodes need another one."""
    starts = FailingStarts(count)
    monkeypatch.setattr(EnvironmentProcess, "start", starts)
    monkeypatch.setattr(processes, "RETRY_S", (0.001, 0.01))

    async def play() -> list[Sample]:
        config = config_of(**limits)
        async with ProcessPool(config.model_copy(update={"max_processes": 2})) as pool:
            await pool.ready()
            async with pool.episode():  # which keeps the first process
                environment = ChatEpisodes(pool, PLAIN)
                most = EpisodeLimits(max_turns=9, max_tokens=400, max_new_tokens=6)
                maker = Episodes(environment, config=config, limits=most, texts=TEXTS, score=score_by_length)
                return await maker.sample(FakeEngine(), PROMPT, [1, 2], temperature=0.5)

    for one in asyncio.run(play()):
        assert one.status is status
        assert one.error is None if status is Status.OK else "no memory" in str(one.error)
    assert starts.count in (0, math.inf)
    if starts.count:
        monkeypatch.setattr(processes, "MOST_AWAY_S", 0.1)
        starts.is_first = True
        with pytest.raises(EnvironmentStartError, match="no memory"):
            asyncio.run(play())


def test_the_check_before_a_start(tmp_path, monkeypatch):
    (tmp_path / "of_tokens.py").write_text(
        "class E:\n  async def run(self, problem, context): ...\nclass F: ..."
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert check_environment(config_of()).tools == []
    assert check_environment(TokenEnvironment(environment="of_tokens:E")).tools == []
    with pytest.raises(ValueError, match=r"F: it has no method run \(of_tokens.py:3 in F\)"):
        check_environment(TokenEnvironment(environment="of_tokens:F"))
    with pytest.raises(ValueError, match=r"environment\.python=/no/python cannot be started"):
        check_environment(config_of(python="/no/python"))


def other_python() -> str | None:
    """An interpreter of 3.9 or newer that is not ours; 3.9 where there is one."""
    found = [
        *Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python"),
        *Path("/usr/bin").glob("python3.?*"),
    ]
    for version in ("3.9", "3.10", "3.12", "3.13"):
        for python in found:
            ask = [python, "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
            if os.access(python, os.X_OK) and "config" not in python.name:
                done = subprocess.run(ask, capture_output=True, text=True, timeout=DEADLINE_S)
                if done.stdout.strip() == version != "{}.{}".format(*sys.version_info):
                    return str(python)
    return None


def test_another_python_plays_the_same_episodes(sound, monkeypatch):
    monkeypatch.chdir(ROOT)
    if (python := other_python()) is None:
        pytest.skip("no other Python of 3.9 or newer in ~/.pyenv or /usr/bin")
    check_others(asyncio.run(samples_of(config_of(python=python))), sound, lambda one: False)


@pytest.mark.parametrize("python", [None, sys.executable])
def test_a_script_of_an_environment_finds_its_own_modules(python, tmp_path, monkeypatch):
    """Not those of Tandem, which has some with usual names."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "script.py").write_text(
        "import os, trainer; print(trainer.__file__, os.environ['PYTHONPATH'])"
    )
    (tmp_path / "trainer.py").touch()
    (tmp_path / "runs_it.py").write_text(
        "import subprocess, sys\n"
        "class E:\n"
        "  def reset(self):\n"
        "    return subprocess.check_output([sys.executable, 'script.py'], text=True).strip()\n"
        "  def step(self, text): ..."
    )
    config = config_of(environment="runs_it:E", interface="text", options={}, python=python)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), "/theirs"]))  # as the roles have them
    monkeypatch.setenv("PYTHONSAFEPATH", "1")

    async def play():
        async with (
            ProcessPool(config.model_copy(update={"max_processes": 1})) as pool,
            pool.episode() as process,
        ):
            return (await process.reset({})).messages

    assert asyncio.run(play()) == [{"role": "user", "content": f"{tmp_path / 'trainer.py'} /theirs"}]


def test_a_cancelled_episode_leaves_no_process(tmp_path):
    async def play():
        playing = asyncio.ensure_future(samples_of(config_of("hang", tmp_path)))
        async with asyncio.timeout(DEADLINE_S):
            while not (tmp_path / "hanging").exists():
                await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(play())


OWNER = """
import asyncio, os, sys
from configs.schema.environment import ChatEnvironment
from rollout.environments.processes import ProcessPool

async def main():
    options = {"fault": "hang_with_daemon", "folder": sys.argv[1]}
    config = ChatEnvironment(environment="tests.support.chat_environments:Faulty", options=options)
    async with ProcessPool(config) as pool:
        async with pool.episode() as process:
            print(process.pid, flush=True)
            await process.reset({"text": "1"})
            await process.step({"role": "assistant", "content": "3"})

asyncio.run(main())
"""


def test_processes_end_with_a_killed_owner(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(daemons := [*tmp_path.glob("daemon-*")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        processes = psutil.Process(owner.pid).children(recursive=True)
        assert len(daemons) == 2 and len(processes) >= 5  # guard, server, daemons and the sleeper
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    # A process of the tree may become a zombie of this container's first process, which need not reap it.
    deadline = time.monotonic() + DEADLINE_S
    while (alive := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive == []


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_default_of_processes_follows_the_cores_and_the_concurrency():
    assert max_processes(config_of(max_concurrency=3)) == 3
    assert max_processes(config_of(max_concurrency=10**6)) == 16 * len(os.sched_getaffinity(0))
    assert max_processes(config_of(max_concurrency=10**6, max_processes=7)) == 7
