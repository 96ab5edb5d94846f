"""The benchmark's simulated servers against the real client and control of servers."""

import asyncio
import json
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import pytest

from benchmarks import data_plane
from benchmarks.simulated_servers import (
    Answers,
    SimulatedServer,
    prepare,
    response_lengths,
    start,
)
from rollout.records import FinishReason
from rollout.servers.client import SGLangClient
from tests.support.server_specs import KEY, make_control

END, LONGEST = 99, 40


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Answers:
    folder = tmp_path_factory.mktemp("answers")
    texts = {"text_of": lambda ids: " ".join(map(str, ids))}
    prepare(folder, [5, LONGEST, 20], corpus=range(60), end=END, longest=LONGEST, seed=0, **texts)
    return Answers.read(folder)


@asynccontextmanager
async def served(answers: Answers, **options):
    server = SimulatedServer(answers, **{"tokens_per_s": 0.0, "slots": 8} | options)
    runner, url = await start(server)
    try:
        async with SGLangClient([url], max_concurrency=64, timeout_s=20.0, max_retries=0, key=KEY) as client:
            yield server, url, client
    finally:
        await runner.cleanup()


def ask(client: SGLangClient, count: int):
    return client.generate_group(
        [1, 2, 3], max_new_tokens=LONGEST, temperature=1.0, stop_token_ids=[END], seeds=range(count)
    )


def test_the_client_reads_what_was_prepared(answers):
    async def scenario():
        async with served(answers) as (server, _, client):
            server.version = 3
            return server, await ask(client, 3)

    server, completions = asyncio.run(scenario())
    assert sorted(len(c.token_ids) for c in completions) == [5, 20, LONGEST]
    for completion in completions:
        is_cut = len(completion.token_ids) == LONGEST
        assert completion.finish_reason is (FinishReason.LENGTH if is_cut else FinishReason.STOP)
        assert is_cut or completion.token_ids[-1] == END
        assert (completion.token_versions == 3).all() and (completion.rollout_logprobs <= 0).all()
    assert server.tokens == 5 + 20 + LONGEST


def test_an_answer_takes_the_time_of_its_longest_sample_and_waits_for_slots(answers):
    """Steps of 2 slots / 400 tokens/s = 5 ms. Three samples in two slots: at least (5 + 20 + 40) / 2 steps, and at least 40."""

    async def scenario():
        async with served(answers, tokens_per_s=400.0, slots=2) as (server, _, client):
            began = time.monotonic()
            await ask(client, 3)
            return server.busy_s, time.monotonic() - began

    busy_s, wall_s = asyncio.run(scenario())
    assert wall_s >= 0.2
    assert busy_s >= 0.999 * 65 * 0.005


def test_an_update_in_the_middle_is_seen_in_the_versions_of_tokens(answers):
    """By the real calls of a pause, new weights and a continuation. The first answer is there after 0.5 s and the last one
    would be after 4; what is left of it is then sampled at once."""

    def update(server: SimulatedServer, url: str) -> list[int]:
        with make_control([url]) as control:
            control.group_name = "simulated"
            control.open_update().wait()
            control.receive_bucket(names=["w"], dtype="bfloat16", shapes=[[1]], version=1).wait()
            versions = control.close_update()
            sampled = server.tokens, server.busy_s
            server._token_s = 1e-4
            time.sleep(0.1)
            assert (server.tokens, server.busy_s) == sampled, "a paused server samples nothing"
            control.resume()
            return versions

    async def scenario():
        async with served(answers, tokens_per_s=80.0) as (server, url, client):
            sampling = asyncio.create_task(ask(client, 3))
            while not server.tokens:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(update, server, url) == [1]
            return await asyncio.wait_for(sampling, 20.0)

    completions = asyncio.run(scenario())
    longest = max(completions, key=lambda c: len(c.token_ids)).token_versions.tolist()
    assert set(longest) == {0, 1} and longest == sorted(longest)


@pytest.mark.parametrize(("mean", "longest"), [(1, 40), (20.0, 40), (40, 40), (2048.0, 8192)])
def test_lengths_have_the_mean_that_was_asked_for(mean, longest):
    lengths = response_lengths(64, mean=mean, longest=longest, seed=0)
    assert sum(lengths) / 64 == pytest.approx(mean, rel=0.02)
    assert min(lengths) >= 1 and max(lengths) <= longest
    if 1 < mean < longest:
        assert len(set(lengths)) > 10
    assert lengths == response_lengths(64, mean=mean, longest=longest, seed=0)


def test_lengths_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="from 1 to the longest"):
        response_lengths(4, mean=41, longest=40, seed=0)


def test_the_benchmark_of_the_whole_path_plays_a_step(tmp_path):
    """The sample role, its clients and the ranks' share of a step, as the product calls them."""
    command = [sys.executable, data_plane.__file__, "--quick", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["tokens"] > 0 and result["cpu_s"]
