"""A session of the gateway: the requests of one episode become turns of its sequences, token by token.

A branch is one sequence. A request continues it if it repeats all messages of the branch, our answers included, and adds
new ones. Only the new ones are rendered. Any other request forks the episode where its tokens are still exact::

    the request has                                         tokens of the new branch
    the messages of an earlier request                      the prompt of that request; another answer is sampled
    the first messages of a branch, up to one of our        those of the branch up to there, and the rest of the
    answers                                                 request, rendered
    another beginning, or other tools                       all messages, rendered

Sampled tokens never become text and tokens again, unless an agent rewrites the history. What it rewrites is an
observation, which is not trained on.

A request that equals an earlier one gets the same answer, which was sampled once: a client repeats a request whose
answer was lost. If the client says that the request is no repetition (OpenAI's does), another answer is sampled.
"""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout.environments.chat import Conversation, Renderer, message_of
from rollout.environments.openai_form import (
    JSON,
    Refused,
    canonical,
    common_length,
    comparable,
    difference,
    for_the_wire,
    limit_reached,
    max_tokens_of,
    messages_of,
    no_session,
    run_failed,
    sampling_of,
    token_ids_of,
    tools_of,
)
from rollout.environments.protocol import Context, EpisodeEnded, EpisodeFailed
from rollout.records import TOKEN_IDS, Completion, FinishReason, Score, Status, digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn as the agent sees it."""

    message: JSON
    """In OpenAI's form. Empty for a request of tokens."""
    completion: Completion
    prompt_tokens: int
    finish_reason: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    """By which the agent may reward the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A request for a turn, by messages or by tokens."""

    keys: list[str]
    """The messages in a form that can be compared. Empty for a request of tokens."""
    messages: list[JSON] = field(compare=False)
    token_ids: list[int] | None = field(compare=False)
    """None for a request of messages."""
    tokens_digest: int = 0
    tools: list[JSON]
    options: tuple[Any, ...]
    """The other fields that change the answer."""

    @property
    def tools_key(self) -> str:
        return comparable(self.tools)

    def without_content(self) -> "_Request":
        """The part that a turn keeps. Each request repeats all before it, so whole requests would grow with the square of
        the turns."""
        return replace(self, messages=[], token_ids=None if self.token_ids is None else [])


@dataclass(slots=True, kw_only=True)
class _Turn:
    request: _Request
    start: int
    """Tokens of the prompt."""
    task: "asyncio.Task[Answer]"
    end: int | None = None
    """Tokens of prompt and answer; None before the answer."""
    sampled_end: bool = False

    @property
    def has_failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(slots=True, kw_only=True)
class _Branch:
    """One sequence of the episode."""

    context: Context
    tools_key: str
    renderer: Renderer | None
    """None for a branch of tokens."""
    messages: list[JSON] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    turns: list[_Turn] = field(default_factory=list)
    is_full: bool = False

    @property
    def ends_in_messages(self) -> bool:
        """Whether its messages cover all its tokens. Those that a request of tokens added have no message."""
        return self.renderer is not None and self.turns[-1].request.token_ids is None

    @property
    def may_continue(self) -> bool:
        """Whether its last request was answered."""
        return not self.is_full and (not self.turns or self.turns[-1].end is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A place in a branch up to which a request is equal to it."""

    branch: _Branch
    tokens: int
    messages: int
    sampled_end: bool = False


class GatewaySession:
    """One episode. Made by ``Gateway.session``."""

    def __init__(self, context: Context, conversation: Conversation, *, base_url: str, model: str) -> None:
        self.base_url, self.key, self.model = base_url, secrets.token_urlsafe(32), model
        self.refused, self.unread_calls = 0, 0
        self.last_text, self._last_context = "", context
        self.last_refusal: str | None = None
        self.limit: EpisodeEnded | None = None
        """The limit that refused the last turn. A later turn that is answered clears it."""
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done with an error that the agent did not cause: an engine's error or a defect. The owner of the episode raises it."""
        self.first_difference: str | None = None
        """Why the first fork was made."""
        self._context, self._conversation = context, conversation
        self._branches: list[_Branch] = []
        self._too_long: int | None = None
        """Tokens of the shortest prompt that had no room."""
        self._keys, self._tools = dict[str, str](), dict[str, list[JSON]]()
        self._num_calls, self._is_closed = 0, False

    @property
    def num_turns(self) -> int:
        """Answered turns."""
        return sum(turn.end is not None for turn in self._turns())

    @property
    def num_forks(self) -> int:
        """Answered sequences after the first."""
        answered = [branch for branch in self._branches if any(turn.end is not None for turn in branch.turns)]
        return max(0, len(answered) - 1)

    async def score(self) -> Score:
        """The run's reward of the last answer, with the length and the finish reason of its turn."""
        return await self._last_context.score(self.last_text)

    def reward_turns(self, rewards: Mapping[str, float]) -> None:
        """Credit turns, by the ids of their answers, with parts of the episode's reward. Raises EpisodeFailed, before any
        turn is credited: an id is of no answered turn."""
        places = {
            turn.task.result().id: (branch.context, number)
            for branch in self._branches
            for number, turn in enumerate(branch.turns)
            if turn.end is not None
        }
        if unknown := [answer for answer in rewards if answer not in places]:
            raise EpisodeFailed(
                Status.REWARD_FAILED,
                f"turn_rewards of the agent's last line has {unknown[0]!r:.80}, which is the id of none of the {len(places)} "
                "answers of this episode; give the `id` of an answer (`request_id` of generate)",
            )
        for answer, reward in rewards.items():
            context, number = places[answer]
            context.reward_turn(reward, number)

    def check_open(self) -> None:
        if self._is_closed:
            raise no_session()

    async def close(self) -> None:
        """Refuse further requests, and end those under way. Nothing is added to the context afterwards."""
        self._is_closed = True
        running = [turn.task for turn in self._turns() if not turn.task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        self.failure.cancel()

    async def chat(self, body: JSON, *, may_repeat: bool = True) -> Answer:
        """may_repeat: whether the request may be one whose answer was lost. Raises Refused."""
        messages, tools = messages_of(body), tools_of(body)
        if tools and self._conversation.parse is None:
            raise Refused(
                400, "unsupported", "tools need environment.tool_call_parser in the run's config", "tools"
            )
        if not self._writes_names_in(messages, tools):
            for message in messages:
                if message["role"] == "assistant":
                    message.pop("name", None)
        request = _Request(
            keys=[comparable(message) for message in messages],
            messages=messages,
            token_ids=None,
            tools=tools,
            options=(max_tokens_of(body, "max_completion_tokens", "max_tokens"),),
        )
        return await self._answered(self._task_of(request, may_repeat))

    def _writes_names_in(self, messages: Sequence[JSON], tools: Sequence[JSON]) -> bool:
        """Whether the names that the agent gives to our answers become tokens. Other names must not fork the episode.
        Raises Refused."""
        if not any(message["role"] == "assistant" and "name" in message for message in messages):
            return False
        try:
            return self._conversation.renderer_of(tools).writes_names
        except (ValueError, TypeError) as error:
            raise _no_tokens(error) from error

    async def generate(self, body: JSON, vocab_size: int, *, may_repeat: bool = True) -> Answer:
        """Raises Refused."""
        token_ids = token_ids_of(body, "token_ids", vocab_size)
        max_tokens, stop = sampling_of(body, vocab_size)
        if not token_ids:
            raise Refused(400, "invalid_value", "token_ids is empty; give the prompt's tokens", "token_ids")
        request = _Request(
            keys=[],
            messages=[],
            token_ids=token_ids,
            tokens_digest=digest(np.array(token_ids, dtype=TOKEN_IDS)),
            tools=[],
            options=(max_tokens, *stop),
        )
        return await self._answered(self._task_of(request, may_repeat))

    # ---------------------------------------------------------------------------------------------------
    # joining: without await, so no request sees another one half joined

    def _task_of(self, request: _Request, may_repeat: bool) -> "asyncio.Task[Answer]":
        self.check_open()
        if may_repeat:
            for turn in self._turns():
                if turn.request == request and not turn.has_failed:
                    return turn.task
        self._require_a_new_message(request)
        if self.failure.done():
            raise run_failed()
        if self.limit is not None and self.limit.status is Status.TURN_LIMIT:
            raise limit_reached(self.limit)
        try:
            branch = self._continued(request)
            if branch is None:
                self._branches.append(branch := self._forked(request))
        except EpisodeEnded as limit:  # a message that is far too long to be tokenised
            self.limit = limit
            raise limit_reached(limit) from limit
        request = self._shared(request)
        if request.token_ids is None:
            branch.messages, branch.keys = [*request.messages], [*request.keys]
        return self._start(branch, request)

    def _shared(self, request: _Request) -> _Request:
        """The request, with equal keys and tools of earlier requests instead of its own: each is kept once."""
        keys = [self._keys.setdefault(key, key) for key in request.keys]
        return replace(request, keys=keys, tools=self._tools.setdefault(request.tools_key, request.tools))

    def _continued(self, request: _Request) -> _Branch | None:
        """The branch whose whole history the request repeats, after observing what the request adds. None: no such branch."""
        found, tokens = None, 0
        for branch in self._branches:
            length = self._whole_in_common(branch, request)
            if branch.may_continue and length > tokens:
                found, tokens = branch, length
        if found is None:
            return None
        if request.token_ids is not None:
            self._observe(found.context, request.token_ids[tokens:])
            return found
        new = request.messages[len(found.keys) :]
        assert found.renderer is not None
        try:
            tokens_of_new = found.renderer.following(new, sampled_end=found.turns[-1].sampled_end)
        except (ValueError, TypeError) as error:
            raise _no_tokens(error) from error
        self._observe(found.context, tokens_of_new)
        return found

    def _whole_in_common(self, branch: _Branch, request: _Request) -> int:
        """Tokens of the branch, if the request begins with all of it; else 0."""
        so_far = branch.context.token_ids
        if request.token_ids is not None:
            is_begun = request.token_ids[: len(so_far)] == so_far.tolist()
            return len(so_far) if is_begun else 0
        is_begun = branch.ends_in_messages and branch.tools_key == request.tools_key
        return len(so_far) if is_begun and request.keys[: len(branch.keys)] == branch.keys else 0

    def _require_a_new_message(self, request: _Request) -> None:
        """Refuse a request that ends with our own answer: the policy has nothing to answer. Raises Refused."""
        for branch in self._branches:
            for turn in branch.turns:
                asked = len(turn.request.keys)
                may_be_answer = turn.end is not None and asked and asked + 1 == len(request.keys)
                if may_be_answer and branch.keys[: asked + 1] == request.keys:
                    text = "no message follows the last answer; append a user message or tool messages"
                    raise Refused(400, "invalid_value", text, "messages")

    def _forked(self, request: _Request) -> _Branch:
        """A new branch. It shares its beginning with an earlier one, if the request does."""
        for cut in self._cuts(request):
            try:
                return self._fork(cut, request)
            except (ValueError, TypeError):  # the template refuses the rest after our answer
                continue
        if request.token_ids is not None:
            return _Branch(context=self._begun(request.token_ids), tools_key="", renderer=None)
        try:
            renderer = self._conversation.renderer_of(request.tools)
            tokens = renderer.opening(request.messages)
        except (ValueError, TypeError) as error:  # TypeError: tokenizers refuse half of a surrogate pair
            raise _no_tokens(error) from error
        if not tokens:
            raise Refused(400, "no_tokens", "these messages have no tokens; give a text", "messages")
        context = self._begun(tokens)
        self._note_difference(request)
        return _Branch(context=context, tools_key=request.tools_key, renderer=renderer)

    def _begun(self, token_ids: Sequence[int]) -> Context:
        """A sequence that shares no token with an earlier one."""
        self._require_room(len(token_ids))
        context = self._context.fork(0) if self._branches else self._context
        self._observe(context, token_ids)
        return context

    def _cuts(self, request: _Request) -> list[_Cut]:
        """The places at which the request may fork a branch, those with most tokens first."""
        cuts = []
        for branch in self._branches:
            if request.token_ids is not None:
                common = common_length(request.token_ids, branch.context.token_ids.tolist())
                cuts.append(_Cut(branch=branch, tokens=common, messages=0))
            elif branch.renderer is not None and branch.tools_key == request.tools_key:
                cuts += _cuts_of_messages(branch, request.keys)
        return sorted((cut for cut in cuts if cut.tokens), key=lambda cut: cut.tokens, reverse=True)

    def _fork(self, cut: _Cut, request: _Request) -> _Branch:
        """Raises ValueError if the rest of the messages cannot follow the cut."""
        branch = cut.branch
        if request.token_ids is not None:
            context = self._forked_at(cut, request.token_ids[cut.tokens :])
            return _Branch(context=context, tools_key="", renderer=None)
        if rest := request.messages[cut.messages :]:
            assert branch.renderer is not None
            tokens = branch.renderer.following(rest, sampled_end=cut.sampled_end)
            self._note_difference(request)
        else:
            tokens = []
        context = self._forked_at(cut, tokens)
        return _Branch(context=context, tools_key=branch.tools_key, renderer=branch.renderer)

    def _forked_at(self, cut: _Cut, token_ids: Sequence[int]) -> Context:
        self._require_room(cut.tokens + len(token_ids))
        context = cut.branch.context.fork(cut.tokens)
        self._observe(context, token_ids)
        return context

    def _note_difference(self, request: _Request) -> None:
        if not self._branches or self.first_difference is not None:
            return
        nearest = max(self._branches, key=lambda branch: common_length(request.keys, branch.keys))
        same = common_length(request.keys, nearest.keys)
        self.first_difference = (
            "the tools changed"
            if nearest.tools_key != request.tools_key
            else difference(request.messages, nearest.messages, same)
        )

    def _observe(self, context: Context, token_ids: Sequence[int]) -> None:
        try:
            if token_ids:
                context.observe(token_ids)
        except EpisodeEnded as limit:  # nothing was added: a shorter message may follow
            self._note_limit(limit, len(context.token_ids) + len(token_ids))
            raise limit_reached(limit) from limit

    def _note_limit(self, limit: EpisodeEnded, prompt_tokens: int) -> None:
        self.limit = limit
        if limit.status is Status.TOKEN_LIMIT:
            self._too_long = min(self._too_long or prompt_tokens, prompt_tokens)

    def _require_room(self, prompt_tokens: int) -> None:
        """Refuse a prompt at least as long as one that had no room. An agent may send it in an endless loop, and each
        fork that is begun keeps its tokens until the episode ends. Raises Refused."""
        if self._too_long is not None and prompt_tokens >= self._too_long:
            text = f"its prompt has {prompt_tokens} tokens, but one of {self._too_long} tokens had no room"
            self.limit = EpisodeEnded(Status.TOKEN_LIMIT, text)
            raise limit_reached(self.limit)

    def _start(self, branch: _Branch, request: _Request) -> "asyncio.Task[Answer]":
        start = len(branch.context.token_ids)
        answering = self._chat_turn if request.token_ids is None else self._token_turn
        # The turn is recorded below, before its task runs.
        task = asyncio.ensure_future(answering(branch, len(branch.turns)))
        task.add_done_callback(self._note_failure)
        branch.turns.append(_Turn(request=request.without_content(), start=start, task=task))
        return task

    def _turns(self) -> Iterator[_Turn]:
        return (turn for branch in self._branches for turn in branch.turns)

    # ---------------------------------------------------------------------------------------------------
    # turns

    async def _answered(self, task: "asyncio.Task[Answer]") -> Answer:
        """The answer of a turn. The turn continues if its client disconnects."""
        await asyncio.wait([task])
        if task.cancelled():
            raise no_session()
        error = task.exception()
        if error is None:
            return task.result()
        raise limit_reached(error) if isinstance(error, EpisodeEnded) else run_failed()

    def _note_failure(self, task: "asyncio.Task[Answer]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, EpisodeEnded) and not self.failure.done():
            self.failure.set_result(error)

    async def _act(self, branch: _Branch, max_tokens: int | None, stop: Sequence[int]) -> Completion:
        before = self.limit
        try:
            completion = await branch.context.act(max_new_tokens=max_tokens, stop_token_ids=stop)
        except EpisodeEnded as limit:  # the observed tokens stay
            branch.is_full = True
            self._note_limit(limit, len(branch.context.token_ids))
            raise
        if self.limit is before:  # otherwise a later request has set it
            self.limit = None
        return completion

    async def _chat_turn(self, branch: _Branch, number: int) -> Answer:
        renderer, turn = branch.renderer, branch.turns[number]
        assert renderer is not None
        (max_tokens,) = turn.request.options
        completion = await self._act(branch, max_tokens, renderer.end_token_ids)
        parsed, sampled_end = await self._conversation.read_turn(
            branch.context, completion, renderer, turn.request.tools
        )
        self.unread_calls += parsed.error is not None
        message = canonical(message_of(parsed, first_call=self._num_calls), place="our answer")
        self._num_calls += len(parsed.calls)
        branch.messages.append(message)
        branch.keys.append(comparable(message))
        turn.end, turn.sampled_end = len(branch.context.token_ids), sampled_end
        self.last_text, self._last_context = parsed.content, branch.context
        finish = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
        return Answer(
            message=for_the_wire(message, parsed.reasoning),
            completion=completion,
            prompt_tokens=turn.start,
            finish_reason="tool_calls" if parsed.calls else finish,
        )

    async def _token_turn(self, branch: _Branch, number: int) -> Answer:
        turn = branch.turns[number]
        max_tokens, *stop_token_ids = turn.request.options
        completion = await self._act(branch, max_tokens, stop_token_ids)
        turn.end = len(branch.context.token_ids)
        self.last_text, self._last_context = branch.context.decode(completion), branch.context
        finish = "length" if completion.finish_reason is FinishReason.LENGTH else "stop"
        return Answer(message={}, completion=completion, prompt_tokens=turn.start, finish_reason=finish)


def _cuts_of_messages(branch: _Branch, keys: list[str]) -> Iterator[_Cut]:
    """Cuts before an answer to the same messages, and after each answer that the request repeats."""
    for turn in (turn for turn in branch.turns if turn.request.token_ids is None):
        asked = len(turn.request.keys)
        if turn.request.keys == keys:
            yield _Cut(branch=branch, tokens=turn.start, messages=asked)
        elif turn.end is not None and branch.keys[: asked + 1] == keys[: asked + 1] and asked + 1 < len(keys):
            yield _Cut(branch=branch, tokens=turn.end, messages=asked + 1, sampled_end=turn.sampled_end)


def _no_tokens(error: Exception) -> Refused:
    return Refused(400, "no_tokens", f"these messages cannot become tokens: {error}", "messages")
