"""Requests to an SGLang server's /generate, and its answers as records.

Answers have millions of tokens, so work per token is done by ``map`` and numpy, not by a Python loop.
"""

import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import NamedTuple, Self

import numpy as np
import orjson

from rollout.client import AttemptFailed, GenerationError, KnownExperts
from rollout.records import LOGPROBS, TOKEN_IDS, VERSIONS, Completion, FinishReason, digest
from rollout.servers.kept_sets import Truncation, decode_kept
from rollout.servers.routing import Experts, decode_experts


def neutral_sampling_params(*, max_new_tokens: int, temperature: float) -> dict[str, object]:
    """Sampling from the full distribution at ``temperature``, whatever a server's or a model's defaults are."""
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def stop_pattern(text: str) -> str:
    """``stop_regex`` for SGLang, which searches it in the text of the newest tokens after every token.

    SGLang derives the number of these tokens from the longest text that a pattern matches: one token per character. Its ``stop``
    would take the number that the tokenizer needs, and overlook a text that the model writes in more tokens. The second branch
    matches nothing. It makes room for tokens of one byte each.
    """
    return rf"{re.escape(text)}|\b\B.{{{len(text.encode())}}}"


class Sent(NamedTuple):
    """The prompt of a request."""

    digest: int
    num_tokens: int
    experts: Experts | None
    """The model's experts, if the request asks for each token's."""
    truncation: Truncation | None
    """The sampler's limits, if the request asks for each token's kept ids."""
    known_experts: KnownExperts | None
    """The first tokens, whose experts come back only if newer weights chose them."""

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        experts: Experts | None = None,
        truncation: Truncation | None = None,
        known_experts: KnownExperts | None = None,
    ) -> Self:
        prompt_digest = digest(np.array(prompt_ids, dtype=TOKEN_IDS))
        return cls(prompt_digest, len(prompt_ids), experts, truncation, known_experts)


def read_answer(content: bytes, count: int, url: str, sent: Sent) -> list[Completion]:
    """The completions of a ``/generate`` answer to a request for ``count`` samples.

    Raises:
        AttemptFailed: the server has aborted a sample.
        GenerationError: the answer has another form, or a sample is wrong (see ``parse_completion``).
    """
    try:
        return [parse_completion(reply, sent) for reply in _replies(content, count)]
    except GenerationError as error:
        raise GenerationError(f"{url}: {error}") from error
    except (ValueError, LookupError, TypeError, OverflowError) as error:  # a proxy's page, or another SGLang
        text = f"{url}: the answer does not have the form of SGLang's ({type(error).__name__}: {error})"
        raise GenerationError(text) from error


def _replies(content: bytes, count: int) -> list[Mapping]:
    replies = orjson.loads(content)
    if not isinstance(replies, list) or len(replies) != count:
        kind = f"list of {len(replies)}" if isinstance(replies, list) else f"single {type(replies).__name__}"
        raise GenerationError(
            f"a request for {count} samples was answered with a {kind}, not a list of one reply each"
        )
    for reply in replies:
        finish = reply["meta_info"]["finish_reason"]
        if finish["type"] == "abort":
            raise AttemptFailed(f"aborted: {finish.get('message') or 'no reason given'}")
    return replies


_TOO_LONG = (
    "exceeds the maximum allowed length",
    "longer than the model's context length",
    "exceeds the model's maximum context length",
    "exceeds the KV memory budget",
)
"""Parts of SGLang's messages, from managers/utils.py, managers/tokenizer_manager.py and managers/scheduler.py of 0.5.23."""

_LOGPROB, _TOKEN = itemgetter(0), itemgetter(1)
"""Parts of SGLang's triples (log-prob, id, text)."""


def parse_completion(reply: Mapping, sent: Sent) -> Completion:
    """The record of one sample of a ``/generate`` reply with log-probs. Raises GenerationError: the server
    read a prompt of another length; ids, log-probs and versions do not fit together; a log-prob is not
    finite; a version is not a decimal number; or requested experts (``decode_experts``) or kept ids
    (``decode_kept``) are missing or wrong."""
    meta = reply["meta_info"]
    triples, token_ids = meta["output_token_logprobs"], reply["output_ids"]
    if meta.get("prompt_tokens", sent.num_tokens) != sent.num_tokens:
        raise GenerationError(
            f"the server read a prompt of {meta['prompt_tokens']} tokens, but {sent.num_tokens} were sent"
        )
    scored_ids = list(map(_TOKEN, triples))
    if scored_ids != token_ids:
        raise GenerationError(
            f"the server's log-probs are of other tokens than its output: {scored_ids} and {token_ids}"
        )
    sampled_ids, logprobs, kept = np.array(token_ids, dtype=TOKEN_IDS), finite_logprobs(triples), None
    if sent.truncation is not None:
        kept = decode_kept(meta, sampled_ids, sent.truncation.vocab_size)
        logprobs = kept.logprobs
    known = sent.known_experts
    is_known = known is not None and meta["weight_versions"][-1]["version"] == str(known.version)
    rows = sent.num_tokens + len(token_ids) - 1 - (known.before if is_known else 0)
    return Completion(
        token_ids=sampled_ids,
        rollout_logprobs=logprobs,
        token_versions=_versions_per_token(meta, len(token_ids)),
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
        prompt_digest=sent.digest,
        cached_tokens=meta.get("cached_tokens", 0),
        num_retractions=meta.get("num_retractions", 0),
        experts=None
        if sent.experts is None
        else decode_experts(meta.get("routed_experts"), sent.experts, rows=rows),
        num_kept=None if kept is None else kept.num_kept,
        kept_ids=None if kept is None else kept.kept_ids,
    )


def finite_logprobs(triples: Sequence[Sequence]) -> np.ndarray:
    """The log-probs, float32 [n], of SGLang's triples (log-prob, id, text). In JSON, a log-prob that is not
    finite is null. Raises GenerationError: a log-prob is not finite; the message names the token's place."""
    logprobs = np.array(list(map(_LOGPROB, triples)), dtype=LOGPROBS)  # null becomes NaN
    finite = np.isfinite(logprobs)
    if finite.all():
        return logprobs
    place = int(finite.argmin())
    raise GenerationError(
        f"the server gave no finite log-prob for token {place + 1} of {len(triples)} (id {_TOKEN(triples[place])}); "
        "check the served weights and dtype"
    )


def _versions_per_token(meta: Mapping, num_tokens: int) -> np.ndarray:
    """A version per token, int32 [n], from spans ``{version, start, end}``, which cover the output in order.

    A response has several spans if a pause for new weights interrupted it.
    """
    spans, end = meta["weight_versions"], 0
    for part in spans:
        if part["start"] != end or part["end"] < end:
            raise GenerationError(f"weight version spans leave a gap: {spans}")
        end = part["end"]
    if end != num_tokens:
        raise GenerationError(f"weight version spans {spans} do not cover {num_tokens} tokens")
    versions = np.array([version_number(part["version"]) for part in spans], dtype=VERSIONS)
    return versions.repeat([part["end"] - part["start"] for part in spans])


def version_number(version: str) -> int:
    """A server's version of its weights. Raises GenerationError."""
    if not re.fullmatch(r"-?\d+", version):
        raise GenerationError(
            f"the server's weight version is {version!r}, not a decimal number; start it with --weight-version 0"
        )
    return int(version)


def server_message(content: bytes) -> str:
    """The server's own description of an error, whatever form its answer has."""
    try:
        reply = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")[:500]
    if isinstance(reply, dict):
        inner = reply.get("error", reply.get("message", reply.get("detail", reply)))
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return str(reply)


def is_too_long(message: str) -> bool:
    """Whether this message of SGLang refuses a prompt because there is no room for it and its answer."""
    return any(words in message for words in _TOO_LONG)


def error_code(content: bytes) -> object:
    """The router's code for an error; None if there is none."""
    try:
        return orjson.loads(content)["error"]["code"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return None


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection inside. JSON makes a list per token, and every 700 lists would start a collection: this
    took four fifths of the time to read an answer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
