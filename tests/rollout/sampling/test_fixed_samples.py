"""Log-probs by prefill, from a small HTTP server in an engine's place."""

import asyncio

import pytest

from rollout.client import GenerationError
from rollout.sampling.fixed_samples import prefill_logprobs
from rollout.sampling.prompt_room import server_limit
from tests.rollout.servers.test_sglang_client import LocalServer
from tests.support.server_specs import KEY


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("Input length (62 tokens) exceeds the maximum allowed length (58 tokens). Use", "; lower rollout.max_new_tokens by 5"),
        ("no such model", ""),
    ],
)  # fmt: skip
def test_a_sequence_that_has_no_room_as_a_prompt_is_refused_with_the_fix(message, fix):
    limit = server_limit("max_position_embeddings", 64)
    assert (limit.sequence, limit.prompt) == (62, 57)  # 5 less

    async def scenario():
        async with LocalServer(lambda n: (400, {"error": {"message": message}})) as server:
            with pytest.raises(GenerationError) as refused:
                await prefill_logprobs(
                    server.url, [[1] * 62], [4], vocab_size=9, name="prefill", timeout_s=20, report=print, key=KEY
                )  # fmt: skip
            assert str(refused.value).endswith(f"with HTTP 400: {message}{fix}")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("behaves", "hold", "error"),
    [
        ([], True, r"did not score 1 sequences: no answer within rollout\.request_timeout_s=0\.2 s"),
        (None, False, "did not score 1 sequences: .*"),
        ([{"meta_info": {"input_token_logprobs": [[None, 1, None], [None, 2, None]]}}], False, "no finite log-prob for token 1 of 1"),
    ],
)  # fmt: skip
def test_a_server_that_is_late_or_gone_or_has_no_number_is_an_error_of_sampling(behaves, hold, error):
    """``tandem mismatch`` goes on without the prefill then."""

    async def scenario():
        async with LocalServer(lambda n: behaves, hold=asyncio.Event() if hold else None) as server:
            with pytest.raises(GenerationError, match=error):
                await prefill_logprobs(
                    server.url, [[1, 2]], [1], vocab_size=9, name="prefill", timeout_s=0.2, report=print, key=KEY
                )  # fmt: skip

    asyncio.run(scenario())
