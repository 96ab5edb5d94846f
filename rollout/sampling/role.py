"""The sample role: groups of scored responses, handed to the learner on request.

learner (rank 0)                         this process, one event loop
RemoteSampler --- request, ZeroMQ ---> serve: one request at a time
              <-- reply or Failure ---   └─ GroupSampler: one task per group generates (HTTP, bounded by the
                                            client), one task per sample decodes and scores; groups of later
                                            steps continue between two requests (``pool.py``)
"""

import gc
import hmac
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from configs.schema import RunConfig
from configs.schema.task import FileTask
from rollout.client import GenerationError
from rollout.connections import PEER_TIMEOUT_S, heartbeats
from rollout.environments.loading import sample_makers
from rollout.records import Prompt
from rollout.rewards.scorer import Scorer, may_read_rows
from rollout.rewards.served import RewardModelError
from rollout.rewards.worker import WorkerStartError
from rollout.run_key import RunKey
from rollout.sampling.messages import (
    Admit,
    Done,
    Drain,
    Evaluate,
    Evaluated,
    Failure,
    Groups,
    LoadState,
    NextGroups,
    Reply,
    Request,
    SamplingError,
    Stop,
    decode_request,
    encode,
)
from rollout.sampling.order import prompt_order
from rollout.sampling.prompt_room import PromptsOf, prompt_room
from rollout.sampling.sampler import GroupSampler
from rollout.servers.kept_sets import Truncation
from rollout.servers.router import generation_client
from rollout.servers.routing import Experts
from rollout.tasks import Task, load_task, longer_than, rows_of, without
from rollout.tokenization import check_vocabulary_size, end_token_ids, load_tokenizer
from tracing import at_step, span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LAST_REPLY_LINGER_MS = 1000


class Policy(Protocol):
    """The part of a model's architecture that sampling needs; ``parallel.planning.architecture.Architecture`` has it."""

    @property
    def max_positions(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def experts(self) -> Experts | None: ...


async def run_sample_role(
    config: RunConfig,
    policy: Policy,
    *,
    server_urls: Callable[[], Sequence[str]],
    announce: Callable[[str], None],
    log_dir: Path,
    key: RunKey,
    doing: Callable[[str], None],
    host: str = "127.0.0.1",
) -> None:
    """Serve the learner until it sends Stop.

    Args:
        policy: the model of the config.
        server_urls: waits for the servers. It is called after the data is loaded and checked and every reward model
            has answered. All of this happens while the servers start.
        announce: called once with this role's address on ``host``, as soon as it accepts requests.
        log_dir: folder for the log of a router, if the config has one.
        key: the learner proves it to this role, and this role to the servers.
        doing: called with each activity, for status reports.
        host: agents of an environment also reach the policy there.

    Raises:
        ValueError: the task, one of its prompts, the environment, the reward or the tokenizer cannot be used.
        RewardModelError: a reward model does not answer, or its answer has the wrong form.
        WorkerStartError: the process of an environment cannot be started.
    """
    tokenizer, task = load_checked_task(config, policy)
    rows = partial(rows_of, task.train)
    order = prompt_order(config.sampler, len(task.train), seed=config.seed, rows=rows)
    async with (
        Scorer(config.reward_type, max_new_tokens=config.rollout.max_new_tokens) as scorer,
        sample_makers(
            config,
            scorer=scorer,
            tokenizer=tokenizer,
            stop_token_ids=end_token_ids(tokenizer, config.model.path),
            max_positions=policy.max_positions,
            vocab_size=policy.vocab_size,
            host=host,
        ) as samples_of,
    ):
        async with generation_client(
            config,
            server_urls(),
            log_dir=log_dir,
            key=key,
            experts=policy.experts if config.learner.routing == "rollout" else None,
            truncation=Truncation.of(config.rollout, policy.vocab_size),
        ) as client:
            sampler = GroupSampler(
                client=client,
                evaluation_client=client.with_own_places(
                    top_p=config.evaluation.top_p, top_k=config.evaluation.top_k
                ),
                task=task,
                samples=samples_of("training"),
                evaluation_samples=samples_of("held-out"),
                scorer=scorer,
                order=order,
                config=config,
            )
            gc.freeze()  # the tokenizer, the prompts and the libraries stay: collections need not visit them
            timeout_s = config.launch.peer_timeout_s
            await serve(sampler, announce=announce, host=host, peer_timeout_s=timeout_s, key=key, doing=doing)


def load_checked_task(config: RunConfig, policy: Policy) -> tuple["PreTrainedTokenizerBase", Task]:
    """The model's tokenizer and the task. Raises ValueError if one of them, or a prompt, cannot be used."""
    tokenizer = load_tokenizer(config.model.path)
    check_vocabulary_size(len(tokenizer), policy.vocab_size, config.model.path)
    keep_rows = (
        may_read_rows(config.reward_type)
        or config.environment.type != "single_turn"
        or config.sampler.type == "function"
    )
    task = load_task(
        config.task,
        tokenizer=tokenizer,
        chat_template_kwargs=config.model.chat_template_kwargs,
        keep_rows=keep_rows,
        source_field=config.sampler.field if config.sampler.type == "mixture" else None,
    )
    return tokenizer, task_that_fits(task, config, max_positions=policy.max_positions)


def task_that_fits(task: Task, config: RunConfig, *, max_positions: int) -> Task:
    """The task without the prompts that leave no room for ``max_new_tokens`` (see ``prompt_room``). Such a
    prompt would end the run when it is drawn, perhaps hours later. Raises ValueError: the config does not
    allow leaving such prompts out, or all prompts are too long; with the longest prompt, its length, the
    limits and the fix."""
    fitting = partial(_fitting, config, max_positions)
    train = fitting("training", task.train)
    return replace(
        task,
        train=train,
        heldout=fitting("held-out", task.heldout),
        heldout_sets={name: fitting("held-out", prompts) for name, prompts in task.heldout_sets.items()},
        num_left_out=len(task.train) - len(train),
    )


def _fitting(
    config: RunConfig, max_positions: int, kind: PromptsOf, prompts: Sequence[Prompt]
) -> Sequence[Prompt]:
    if not prompts:
        return prompts
    room = prompt_room(config, kind, max_positions=max_positions)
    if not (too_long := longer_than(prompts, room.tokens)):
        return prompts
    leaves_out = isinstance(config.task, FileTask) and config.task.too_long_prompts == "leave_out"
    if not leaves_out or len(too_long) == len(prompts):
        longest = max(too_long.values(), key=lambda prompt: len(prompt.token_ids))
        name = f"{kind} prompt {longest.place or longest.prompt_id}"
        raise ValueError(room.too_long(name, len(longest.token_ids)))
    logger.warning("%d of %d %s prompts are too long and left out", len(too_long), len(prompts), kind)
    return without(prompts, too_long)


async def serve(
    sampler: GroupSampler,
    *,
    announce: Callable[[str], None],
    key: RunKey,
    doing: Callable[[str], None],
    host: str = "127.0.0.1",
    peer_timeout_s: float = PEER_TIMEOUT_S,
) -> None:
    """Answer requests on a free port, one at a time, until Stop. The answer to a failed request is a Failure.

    Only a learner that proves ``key`` gets an answer. ``doing`` is called with each request, and with the wait for the
    next one.
    """
    context = zmq.asyncio.Context()
    try:
        with only_learner(context, key), context.socket(zmq.REP) as channel:
            channel.curve_server = True
            channel.curve_publickey, channel.curve_secretkey = key.curve_pair("sampler")
            for option, value in (heartbeats(peer_timeout_s) | {zmq.LINGER: LAST_REPLY_LINGER_MS}).items():
                channel.setsockopt(option, value)
            port = channel.bind_to_random_port(f"tcp://{host}")
            announce(f"tcp://{host}:{port}")
            while True:
                doing("waiting for the learner")
                with span("wait for the learner"):
                    message = await channel.recv()
                try:
                    request = decode_request(message)
                # The client has proved the key: such a message comes from another version of Tandem.
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    logger.error("refused a message that is not a request: %s", error)
                    await channel.send(encode(Failure(f"this is not a request to the sample role: {error}")))
                    continue
                doing(type(request).__name__)
                if isinstance(request, NextGroups):
                    at_step(request.newest + 1)  # each step makes one version
                with span(type(request).__name__):
                    await _answer(channel, sampler, request)
                if isinstance(request, Stop):
                    return
    finally:
        await sampler.close()
        context.term()


@contextmanager
def only_learner(context: zmq.asyncio.Context, key: RunKey) -> Iterator[None]:
    """While entered, the CURVE sockets of ``context`` refuse all connections except the learner's, which proves ``key``."""
    learner, _ = key.curve_pair("learner")

    def is_learner(domain: str, public_key: bytes) -> bool:
        return hmac.compare_digest(public_key, learner)

    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(credentials_provider=SimpleNamespace(callback=is_learner))
    try:
        yield
    finally:
        authenticator.stop()


async def _answer(channel: zmq.asyncio.Socket, sampler: GroupSampler, request: Request) -> None:
    try:
        reply = await _reply_to(sampler, request)
    except Exception as error:  # a defect: report it to the learner, then end
        await channel.send(encode(_failed(error)))
        raise
    content = encode(reply)
    # The learner trains for minutes on the reply: this process keeps nothing of the step meanwhile.
    del reply
    await channel.send(content, copy=False)


async def _reply_to(sampler: GroupSampler, request: Request) -> Reply:
    if not isinstance(request, Drain):
        sampler.reopen()
    try:
        match request:
            case NextGroups(count, newest, max_staleness, ahead):
                groups, stats = await sampler.next_groups(
                    count, newest=newest, max_staleness=max_staleness, ahead=ahead
                )
                return Groups(groups, stats, sampler.state)
            case Drain(within_s):
                await sampler.drain(within_s)
                return Done()
            case Admit(count, newest, ahead):
                await sampler.admit(count, newest=newest, ahead=ahead)
                return Done()
            case Evaluate():
                return Evaluated(await sampler.evaluate())
            case LoadState(state):
                await sampler.load_state(state)
                return Done()
            case Stop():
                return Done()
    except (GenerationError, SamplingError, WorkerStartError, RewardModelError, ValueError) as error:
        logger.error("%s failed: %s", type(request).__name__, error)
        # The learner raises every failure as a SamplingError.
        return Failure(str(error)) if isinstance(error, SamplingError) else _failed(error)


def _failed(error: Exception) -> Failure:
    """The learner's supervisor tells by this beginning that the cause is here (``LOST_THE_ROLLOUT``)."""
    return Failure(f"the sample role failed: {type(error).__name__}: {error}")
