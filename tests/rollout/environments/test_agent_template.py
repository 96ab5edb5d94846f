"""Agents that are forked behind their modules: they are what ``python script`` makes, and end with their owner."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from configs.schema import RunConfig
from configs.schema.environment import AgentEnvironment
from rollout.environments.agent_process import AgentProcess, AgentStarter, running
from rollout.environments.agent_template import AgentTemplate, agent_starter, check_agent
from rollout.environments.protocol import EpisodeFailed

DEADLINE_S = 30.0
TELL = """
import json, os, random, sys, helper
print(json.dumps({
    "argv": sys.argv, "file": __file__, "name": __name__, "input": sys.stdin.read(),
    "folder": os.getcwd(), "episode": os.environ.get("EPISODE"), "later": os.environ.get("LATER"),
    "python": sys.executable, "path": sys.path, "main": sys.modules["__main__"].__dict__ is globals(),
    "modules": helper.COUNT,
}))
"""


def agent(folder: Path, script: str, **fields) -> AgentEnvironment:
    (folder / "agent.py").write_text(textwrap.dedent(script))
    return AgentEnvironment(command=(str(folder / "agent.py"), "-v"), **fields)


async def played(starter: AgentStarter, **variables: str) -> tuple[int, AgentProcess]:
    async with asyncio.timeout(DEADLINE_S), running(starter, variables) as process:
        return await process.ended(), process


def codes_of(folder: Path, *scripts: str, preload: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """(exit code, last line, error output) of each script."""

    async def play(script: str) -> tuple[int, str, str]:
        async with agent_starter(agent(folder, script, preload=preload)) as starter:
            code, process = await played(starter)
        return code, process.last_line, process.errors

    return [asyncio.run(play(script)) for script in scripts]


@pytest.mark.parametrize("preload", [(), ("json",)])
def test_an_agent_gets_no_secret_of_the_run_but_those_that_the_config_passes(tmp_path, monkeypatch, preload):
    values = {
        "WANDB_API_KEY": "w" * 40,
        "JUDGE": "named by the config",
        "SEARCH_TOKEN": "for the agent",
        "MODE": "plain",
    }
    for name, value in (values | {"TOKENIZERS_PARALLELISM": "false"}).items():
        monkeypatch.setenv(name, value)
    names = [*values, "OPENAI_API_KEY", "TOKENIZERS_PARALLELISM"]
    script = f"import os; print([name for name in {names} if name in os.environ])"

    async def play() -> str:
        config = agent(tmp_path, script, preload=preload, pass_secrets=("SEARCH_TOKEN",))
        async with agent_starter(config, {"JUDGE"}) as starter:
            code, process = await played(starter, OPENAI_API_KEY="of the episode")
        assert code == 0, process.errors
        return process.last_line

    assert asyncio.run(play()) == "['SEARCH_TOKEN', 'MODE', 'OPENAI_API_KEY', 'TOKENIZERS_PARALLELISM']"


def test_the_variables_of_keys_are_found_wherever_a_config_names_them():
    judge = {
        "type": "judge",
        "urls": ["http://a/v1"],
        "model": "m",
        "prompt": "{response}",
        "score_range": [0, 1],
    }
    parts = {
        "a": judge | {"api_key_variable": "A"},
        "b": {"type": "model", "urls": ["http://b"], "api_key_variable": "B"},
    }
    config = {
        "model": {"path": "m"},
        "task": {"type": "jsonl", "train_path": "x.jsonl"},
        "reward": {"type": "by_field", "field": "f", "rewards": {"x": {"type": "weighted", "parts": parts}}},
        "environment": {"type": "openenv", "urls": ["http://c"], "api_key_variable": "C"},
    }
    assert RunConfig.model_validate(config).key_variables == {"A", "B", "C"}
    with pytest.raises(ValidationError, match="name the variable, and not its value"):
        AgentEnvironment(command=("a",), pass_secrets=("sk-123",))


def test_a_fork_is_what_a_new_process_is(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("import os\nCOUNT = 1")
    told = {}
    for preload in ((), ("helper",)):

        async def play(config: AgentEnvironment) -> str:
            async with agent_starter(config) as starter:
                monkeypatch.setenv("LATER", "of the run")
                code, process = await played(starter, EPISODE="7")
                assert code == 0, process.errors
                return process.last_line

        monkeypatch.delenv("LATER", raising=False)
        told[preload] = asyncio.run(play(agent(tmp_path, TELL, preload=preload)))
    one, other = (json.loads(text) for text in told.values())
    assert one.pop("folder") != other.pop("folder")
    assert one == other
    assert (one["episode"], one["later"], one["input"]) == ("7", "of the run", "")


def test_ends_are_those_of_a_new_process(tmp_path):
    scripts = (
        "import sys; sys.exit(3)",
        "raise ValueError('the reason')",
        "import atexit; atexit.register(print, 'at the end'); print('before')",
        "import threading; threading.Timer(0.05, print, ['of a thread']).start()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import sys; sys.exit('a text')",
    )
    new, forked = (codes_of(tmp_path, *scripts, preload=modules) for modules in ((), ("json",)))
    assert [code for code, _, _ in forked] == [code for code, _, _ in new] == [3, 1, 0, 0, 137, 1]
    assert [line for _, line, _ in forked] == [line for _, line, _ in new]
    assert all(
        errors[1].splitlines()[-1] == "ValueError: the reason" for errors in (new[1][1:], forked[1][1:])
    )


def test_modules_are_imported_once(tmp_path):
    (tmp_path / "counted.py").write_text("print('imported', file=open('%s', 'a'))" % (tmp_path / "log"))
    config = agent(tmp_path, "import counted, random; print(random.random())", preload=("counted",))

    async def play() -> list[str]:
        async with agent_starter(config) as starter:
            assert (tmp_path / "log").read_text() == "imported\n"  # which is no episode's time
            done = await asyncio.gather(*(played(starter) for _ in range(4)))
        return [process.last_line for _, process in done]

    numbers = asyncio.run(play())
    assert (tmp_path / "log").read_text() == "imported\n"
    assert len(set(numbers)) == 4  # a fork has its own random numbers


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise KeyError('x')", r"importing broken raised KeyError: 'x' \(broken.py:1 in <module>\)"),
        ("raise SystemExit(4)", "importing broken raised SystemExit: 4"),
        ("import os; os._exit(4)", "importing them ended with exit code 4"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, name='listener', daemon=True).start()",
            r"importing broken starts threads \(listener\), which a fork would lose",
        ),
        ("import time; time.sleep(1e6)", "took longer than environment.start_timeout_s=1 s"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_before_the_start(tmp_path, module, message):
    (tmp_path / "broken.py").write_text(module)
    limit_s = 1.0 if "start_timeout_s=1" in message else 60.0
    with pytest.raises(ValueError, match=rf"environment.preload=\['broken'\]: .*({message})"):
        check_agent(agent(tmp_path, "pass", preload=("broken",), start_timeout_s=limit_s))
    assert [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])] == []


def test_preload_needs_a_script():
    with pytest.raises(ValueError, match=r"environment.preload=\['json'\] needs a command that is a Python"):
        check_agent(AgentEnvironment(command=("sh", "-c", "true"), preload=("json",)))


def test_a_template_that_dies_fails_one_episode_and_no_agent_under_way(tmp_path):
    go = tmp_path / "go"
    script = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('done')"
    config = agent(tmp_path, script, preload=("json",))

    async def play() -> str:
        async with agent_starter(config) as starter, asyncio.timeout(DEADLINE_S):
            assert isinstance(starter, AgentTemplate)
            async with running(starter, {}) as first:
                assert starter._process is not None
                os.kill(starter._process.pid, signal.SIGKILL)
                with pytest.raises(EpisodeFailed, match="the agent cannot be started: its template ended"):
                    await played(starter)
                async with running(starter, {}) as second:
                    go.touch()
                    assert (await first.ended(), await second.ended()) == (0, 0)
                    return first.last_line + second.last_line

    assert asyncio.run(play()) == "donedone"


def test_an_episode_that_is_cancelled_while_the_template_starts_fails_no_other(tmp_path, monkeypatch):
    start, starting = asyncio.create_subprocess_exec, asyncio.Event()

    async def never(*command, **options):
        starting.set()
        await asyncio.Event().wait()

    async def play() -> int:
        config = agent(tmp_path, "", preload=("json",))
        async with agent_starter(config) as starter, asyncio.timeout(DEADLINE_S):
            assert isinstance(starter, AgentTemplate)
            await starter._end()
            monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
            first = asyncio.ensure_future(played(starter))
            await starting.wait()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
            return (await played(starter))[0]

    assert asyncio.run(play()) == 0


def test_agents_end_with_the_process_that_asked_for_them(tmp_path):
    """Killed in the middle: no template, no guard, no agent and none of its daemons is left."""
    agent(tmp_path, "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True).wait()")
    owner = f"""
        import asyncio
        from configs.schema.environment import AgentEnvironment
        from rollout.environments.agent_process import running
        from rollout.environments.agent_template import agent_starter

        async def main():
            config = AgentEnvironment(command=({str(tmp_path / "agent.py")!r},), preload=("subprocess",))
            async with agent_starter(config) as starter, running(starter, {{}}) as process:
                print(process.pid, flush=True)
                await process.ended()
        asyncio.run(main())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(owner)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    guard = psutil.Process(int(process.stdout.readline()))
    below = wait_for(lambda: [p for p in guard.children(recursive=True) if p.name() == "sleep"])
    tree = {guard, *guard.children(recursive=True), *psutil.Process(process.pid).children(recursive=True)}
    assert below[0] in tree and len(tree) >= 4
    process.kill()
    process.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(tree, timeout=DEADLINE_S)
    assert alive == []


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value
