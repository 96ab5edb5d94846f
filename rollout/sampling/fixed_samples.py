"""The server's side of ``tandem mismatch``: samples of a fixed set of prompts, and log-probs by prefill."""

import random
import time
from collections.abc import Callable, Sequence

import aiohttp
import orjson

from configs.schema import RunConfig
from rollout.client import GenerationClient, GenerationError
from rollout.gathering import all_or_first_error
from rollout.http_replicas import OwnServers
from rollout.records import Completion, Prompt
from rollout.run_key import RunKey
from rollout.sampling.order import epoch_order
from rollout.sampling.prompt_room import BEHIND_PROMPT, BEHIND_SEQUENCE
from rollout.servers.answers import finite_logprobs, is_too_long, neutral_sampling_params, server_message
from rollout.tasks import Task

PREFILL_TOKENS = 16_384
"""Limit of tokens in one scoring request of several sequences."""
TELL_EVERY_S = 5.0

Report = Callable[[str], None]


def fixed_prompts(task: Task, count: int, *, seed: int) -> list[Prompt]:
    """The first ``count`` training prompts of the seed's order. Raises ValueError if the task has fewer."""
    if count > len(task.train):
        raise ValueError(
            f"--prompts {count}: the task {task.name} has {len(task.train)} training prompts; use at most that number"
        )
    return [task.train[i] for i in epoch_order(len(task.train), seed=seed, epoch=0)[:count]]


async def sample_fixed(
    client: GenerationClient,
    prompts: Sequence[Prompt],
    *,
    per_prompt: int,
    max_new_tokens: int,
    temperature: float,
    stop_token_ids: Sequence[int],
    seed: int,
    name: str,
    report: Report,
) -> list[list[Completion]]:
    """``per_prompt`` responses to each prompt, in order. Raises GenerationError if one cannot be obtained."""
    began, told, done, tokens = time.perf_counter(), time.perf_counter(), 0, 0

    async def one(prompt: Prompt) -> list[Completion]:
        nonlocal done, tokens, told
        seeds = [
            random.Random(f"tandem mismatch {seed} {prompt.prompt_id} {name} {i}").getrandbits(31)
            for i in range(per_prompt)
        ]
        completions = await client.generate_group(
            prompt.token_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_token_ids=stop_token_ids,
            seeds=seeds,
        )
        done, now = done + 1, time.perf_counter()
        tokens += sum(len(completion.token_ids) for completion in completions)
        if now - told > TELL_EVERY_S or done == len(prompts):
            told = now
            report(
                f"sampled {name}: {done} of {len(prompts)} prompts, {tokens} tokens, {tokens / (now - began):,.0f} tokens/s"
            )
        return completions

    return await all_or_first_error(one(prompt) for prompt in prompts)


async def prefill_logprobs(
    url: str,
    sequences: Sequence[Sequence[int]],
    response_lengths: Sequence[int],
    *,
    vocab_size: int,
    name: str,
    timeout_s: float,
    report: Report,
    key: RunKey,
) -> list[float]:
    """Log-probs of each sequence's last ``response_lengths`` tokens, sequence after sequence, by one prefill of the whole
    sequence at temperature 1.

    SGLang gives log-probs of prompt tokens from unscaled logits, whatever the temperature of the request. The
    prefill starts at the first token, so that no key or value of an earlier decode comes from the cache.

    Raises GenerationError if the server refuses, is late or gone, or answers for other tokens or without finite log-probs.
    """
    logprobs: list[float] = []
    began, tokens, done = time.perf_counter(), 0, 0
    async with aiohttp.ClientSession(
        connector=OwnServers(), timeout=aiohttp.ClientTimeout(total=timeout_s), headers=key.http_headers
    ) as session:
        for rows in _split_into_requests(sequences):
            part = [list(sequences[row]) for row in rows]
            try:
                replies = await _request_prefill(session, url, part)
            except (aiohttp.ClientError, TimeoutError) as error:
                late = f"no answer within rollout.request_timeout_s={timeout_s:g} s"
                reason = late if isinstance(error, TimeoutError) else str(error) or type(error).__name__
                raise GenerationError(f"{url} did not score {len(part)} sequences: {reason}") from error
            counts = [response_lengths[row] for row in rows]
            for reply, ids, count in zip(replies, part, counts, strict=True):
                logprobs += _last_logprobs(reply, ids, count, vocab_size)
            tokens, done = tokens + sum(map(len, part)), done + len(part)
            report(
                f"prefilled {name}: {done} of {len(sequences)}, {tokens / (time.perf_counter() - began):,.0f} tokens/s"
            )
    return logprobs


def _split_into_requests(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows of ``sequences`` for each request."""
    requests: list[list[int]] = []
    room = 0
    for row, ids in enumerate(sequences):
        if not requests or len(ids) > room:
            requests.append([])
            room = PREFILL_TOKENS
        requests[-1].append(row)
        room -= len(ids)
    return requests


async def _request_prefill(session: aiohttp.ClientSession, url: str, part: list[list[int]]) -> list[dict]:
    sampling = neutral_sampling_params(max_new_tokens=1, temperature=1.0)
    body = {"input_ids": part, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    async with session.post(
        f"{url}/generate", data=orjson.dumps(body), headers={"Content-Type": "application/json"}
    ) as response:
        content = await response.read()
        if response.status != 200:
            message = server_message(content)
            # A server's limit is lower for prompts than for sequences, and here the whole sequence is the prompt.
            less = BEHIND_PROMPT - BEHIND_SEQUENCE
            fix = f"; lower rollout.max_new_tokens by {less}" if is_too_long(message) else ""
            raise GenerationError(
                f"{url} refused to score {len(part)} sequences with HTTP {response.status}: {message}{fix}"
            )
    return orjson.loads(content)


def _last_logprobs(reply: dict, ids: list[int], count: int, vocab_size: int) -> list[float]:
    """SGLang mistakes the vocabulary's last token for a part of an image and reports it as id 0; the log-prob is right."""
    triples = reply["meta_info"]["input_token_logprobs"]
    if [token for _, token, *_ in triples] != [token if token < vocab_size - 1 else 0 for token in ids]:
        raise GenerationError(
            f"the server gave prefill log-probs of {len(triples)} tokens, which are not the {len(ids)} tokens of the request"
        )
    return finite_logprobs(triples[-count:]).tolist()


def shortened(config: RunConfig, parts: int) -> int:
    """Limit of each of ``parts`` short responses that together have the tokens of a long one."""
    return max(1, config.rollout.max_new_tokens // parts)
