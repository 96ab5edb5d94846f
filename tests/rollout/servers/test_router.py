"""``rollout.router``: sglang-router between the sample role and real SGLang servers."""

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

from configs.loader import load_config
from configs.schema.launch import LaunchConfig
from configs.schema.rollout import RolloutConfig, RouterConfig
from launch.checks.sockets import BY_KEY, listening
from launch.commands.dry_run import dry_run_lines
from launch.processes.run_folder import RunFolder
from rollout.client import GenerationError
from rollout.servers.router import Router, generation_client
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.fuzzing import ask_without_key, tell_to_stop, throw_at
from tests.support.process_groups import assert_all_end
from tests.support.real_servers import make_fleet
from tests.support.server_specs import KEY, make_control
from tests.support.whole_runs import (
    RECIPE,
    ROOT,
    SMALL,
    assert_nothing_left,
    finish,
    start,
    steps_of,
    wait_for,
    wait_for_steps,
)

PAUSE_S = 25.0
"""By health that asks for a token (5 s, three times, 2 s apart) a paused server counts as ill within that
time."""


def test_without_the_package_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install sglang-router==0\.3\.2"):
        Router(
            RouterConfig(), ["http://127.0.0.1:9"], log_file=tmp_path / "log", request_timeout_s=1, key=KEY
        )


@pytest.mark.engines
def test_a_router_that_finds_no_server_says_so_and_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.servers.router.START_TIMEOUT_S", 15.0)
    router = Router(
        RouterConfig(),
        ["http://127.0.0.1:9"],
        log_file=tmp_path / "router.log",
        request_timeout_s=60,
        key=KEY,
    )
    started = psutil.Process(router._process.pid)
    try:
        with pytest.raises(
            TimeoutError,
            match=r"not found all of \['http://127\.0\.0\.1:9'\] after 15 s; last lines of .*router\.log",
        ):
            router.wait_ready()
        started = [started, *started.children(recursive=True)]
        assert len(started) > 1
    finally:
        router.stop()
    assert_all_end(started)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("router")
    make_tiny_countdown_model(folder / "model", seed=0)
    return folder


@pytest.fixture(scope="module")
def fleet(folder):
    fleet = make_fleet(folder / "model", folder, replicas=2, max_total_tokens=8192)
    fleet.start()
    try:
        fleet.wait_healthy(300)
        yield fleet
    finally:
        fleet.stop()


def run_config(folder, **router):
    # The run's own servers are not started: the fixture's stand there.
    rollout = RolloutConfig(
        dtype="float32", replicas=2, router=RouterConfig(**router), request_timeout_s=60, max_retries=2
    )
    config = load_config(RECIPE, [f"model.path={folder / 'model'}"])
    return config.model_copy(update={"rollout": rollout, "launch": LaunchConfig(start_timeout_s=120)})


def prefilled(fleet) -> list[int]:
    """How often each server has begun something: the lines of its log that say so."""
    return [log.read_text().count("Prefill batch") for log in sorted(fleet._log_dir.glob("sglang-*.log"))]


def groups(client, count: int, *, seed: int = 0):
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "stop_token_ids": [0]}
    return asyncio.gather(
        *(client.generate_group([4 + i, 5, 6], **sampling, seeds=range(seed, seed + 4)) for i in range(count))
    )


@pytest.mark.engines
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_samples_come_whole_through_a_router_from_every_server(fleet, folder, policy):
    before = prefilled(fleet)

    async def scenario():
        async with generation_client(
            run_config(folder, policy=policy), fleet.urls, log_dir=folder, key=KEY
        ) as client:
            return await groups(client, 6), client.stats

    sampled, stats = asyncio.run(scenario())
    assert [len(group) for group in sampled] == [4] * 6 and stats.requests == 24 and stats.retries == 0
    completions = [completion for group in sampled for completion in group]
    assert all(
        c.token_versions.tolist() == [0] * len(c.token_ids) and 0 < len(c.token_ids) <= 8 for c in completions
    )
    assert all(len({tuple(c.token_ids) for c in group}) > 1 for group in sampled), "siblings differ"
    assert all(logprob <= 0 for c in completions for logprob in c.rollout_logprobs)
    if policy == "round_robin":
        assert all(now > then for now, then in zip(prefilled(fleet), before, strict=True)), (
            "one server had nothing to do"
        )


@pytest.mark.engines
def test_requests_wait_out_a_pause_that_is_longer_than_the_looks_at_health(fleet, folder):
    """They are paused when the router starts, as after a learner that died in the middle of an update."""
    config = run_config(folder)

    async def scenario(control):
        async with generation_client(config, fleet.urls, log_dir=folder, key=KEY) as client:
            url = client._router.url
            asked = asyncio.ensure_future(groups(client, 2))
            until = time.monotonic() + PAUSE_S
            while time.monotonic() < until:
                assert all(worker["is_healthy"] for worker in await asyncio.to_thread(workers, url))
                assert not asked.done()
                await asyncio.sleep(0.5)
            await asyncio.to_thread(control.resume)
            return await asyncio.wait_for(asked, 60), client.stats

    with make_control(fleet.urls) as control:
        control.pause()
        sampled, stats = asyncio.run(scenario(control))
    assert [len(group) for group in sampled] == [4, 4] and stats.retries == 0


def workers(url: str) -> list[dict]:
    asked = urllib.request.Request(f"{url}/workers", headers=KEY.http_headers)
    with urllib.request.urlopen(asked, timeout=20) as response:
        return json.loads(response.read())["workers"]


@pytest.mark.engines
def test_a_router_that_dies_is_named_with_its_log(fleet, folder, monkeypatch):
    # Nobody listens there, and the router must not ask it for the servers.
    for name in (
        "http_proxy",
        "HTTPS_PROXY",
    ):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def scenario():
        async with generation_client(run_config(folder), fleet.urls, log_dir=folder, key=KEY) as client:
            assert len(await groups(client, 1)) == 1
            watchdog = client._router._process
            (router,) = psutil.Process(watchdog.pid).children()
            router.kill()
            watchdog.wait(20)
            await groups(client, 1)

    ended = r"(?s)sglang-router \(pid \d+\) was killed by SIGKILL; last lines .*router\.log.*3 attempts at 1 samples failed \(max_retries"
    with pytest.raises(GenerationError, match=ended):
        asyncio.run(scenario())


def test_dry_run_lists_the_router(folder):
    from launch.checks.devices import device_of

    config = load_config(RECIPE, [f"model.path={folder / 'model'}", "rollout.router={}"])
    found = [
        line
        for line in dry_run_lines(config, ("serve", "sample", "learn"), device_of(config, None))
        if "sglang-router" in line
    ]
    assert len(found) == 1 and "on this host only" in found[0]


WAITING_REWARD = """
import time
from pathlib import Path

def score(prompt, response, reference):
    metrics = Path("runs/latest/metrics.jsonl")
    while metrics.exists() and metrics.read_text() and not Path("go-on").exists():  # after the first step
        time.sleep(0.05)
    return len(response) / 14
"""


@pytest.mark.engines
def test_a_run_of_two_replicas_behind_a_router_is_exact_whatever_strangers_send_to_its_ports(tmp_path):
    """It samples two steps ahead, and is interrupted in the middle of training, which leaves no process and exit
    code 130."""
    make_tiny_countdown_model(tmp_path / "model", seed=0)
    (tmp_path / "my_reward.py").write_text(WAITING_REWARD)
    settings = [
        "rollout.replicas=2",
        "rollout.router.policy=cache_aware",
        "rollout.max_staleness=2",
        "layout.dp=2",
        "evaluation.at_ends=false",
        "steps=1000",
    ]
    settings += ["reward={type: function, function: 'my_reward:score', timeout_s: 600}"]
    process = start("train", RECIPE, *SMALL, *settings, cwd=tmp_path)
    with contextlib.ExitStack() as ending:
        ending.callback(lambda: (tmp_path / "go-on").touch())
        wait_for(
            lambda: (tmp_path / "runs/latest/metrics.jsonl").exists() and steps_of(tmp_path),
            process,
            "the first step",
        )
        ports = listening(RunFolder((tmp_path / "runs/latest").resolve()))
        attack(ports)
        assert process.poll() is None
        listed = subprocess.run(
            [sys.executable, "-m", "launch", "check-cluster", "--run", "runs/latest"],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert listed.returncode == 0 and "FAIL" not in listed.stdout, listed
        assert len(listed.stdout.splitlines()) == len(ports)
    wait_for_steps(tmp_path, 3, process)
    process.send_signal(signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130 and "interrupted" in said, said
    steps = steps_of(tmp_path)
    assert (
        [step["step"] for step in steps]
        == [step["sync/version"] for step in steps]
        == list(range(1, len(steps) + 1))
    )
    gaps = [step.get("staleness/by_lag/le_0/logprob_gap_max") for step in steps]
    assert gaps[0] is not None and all(gap <= 1e-4 for gap in gaps if gap is not None)
    assert 1 <= max(step["staleness/max"] for step in steps) <= 2
    assert all(step["sampling/ready_groups"] + step["sampling/running_groups"] > 0 for step in steps)
    assert all(step["sampling/retries"] == 0 for step in steps if "sampling/retries" in step)
    assert (tmp_path / "runs/latest/logs/router.log").is_file()
    assert_nothing_left(tmp_path)


def attack(ports) -> None:
    """On every port that the run has open, each of which must be of this host alone."""
    assert {port.address for port in ports} == {"127.0.0.1"}, ports
    assert {"serve", "sample", "learn"} == {port.role for port in ports}
    with_key = [port for port in ports if port.protection == BY_KEY]
    assert sorted(port.what for port in with_key) == ["SGLang, HTTP"] * 2 + [
        "groups for the learner, ZeroMQ CURVE",
        "sglang-router, HTTP",
    ]
    rng = random.Random(0)
    for port in ports:
        assert throw_at((port.address, port.port), rng) > 0, port
    for port in with_key:
        if "HTTP" in port.what:
            # A router does not know all that a server does.
            refusals = {401} if "SGLang" in port.what else {401, 404, 405}
            assert ask_without_key((port.address, port.port)) <= refusals, port
        else:
            assert not tell_to_stop(f"tcp://{port.address}:{port.port}")
