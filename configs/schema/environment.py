"""The environment: what happens between a problem and its reward."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from configs.errors import Contradiction
from configs.schema.base import (
    Count,
    FiniteFloat,
    GivenPath,
    KeyVariable,
    Schema,
    Seconds,
    Tokens,
    VariableName,
    served_at,
)
from configs.schema.own_function import ModuleAndName


class SingleTurn(Schema):
    """The policy answers the prompt once, and the run's ``reward`` scores the answer."""

    type: Literal["single_turn"] = "single_turn"


class EnvironmentLimits(Schema):
    """Limits of an episode. Each has a status of its own, which the metrics count."""

    max_turns: Count = 16
    """Most turns of the policy in an episode. One more ends it (``turn_limit``)."""
    max_tokens: Tokens | None = None
    """Most tokens of an episode's sequence, the prompt and all observations included. What does not fit ends the
    episode before a request (``token_limit``). None: as many as learner.token_budget and the servers allow; these take 2
    tokens less than the model's positions and rollout.max_total_tokens, and 7 less in front of a turn."""
    timeout_s: Seconds = 600.0
    """Deadline of an episode. A later one is cancelled and not scored (``time_limit``). Time in which a turn waits for a
    place at the servers, or for a server that is started again, does not count, nor does the time of the run's ``reward``,
    which has limits of its own."""
    max_concurrency: Count = 512
    """Episodes under way at the same time."""
    reward_at_limit: FiniteFloat | None = 0.0
    """Reward of an episode that max_turns or max_tokens ends. None: it is not scored, so it is not trained on and its
    group's baseline is without it."""


class TokenEnvironment(EnvironmentLimits):
    """An environment of the user's own that handles tokens (``rollout/environments/protocol.py``)."""

    type: Literal["tokens"] = "tokens"
    environment: ModuleAndName
    """``module:Class``, called once with ``options``. Its ``async run(problem, context)`` plays an episode. The module
    is looked for in the current folder, and among the installed ones. It runs in the sample role's event loop: what
    blocks belongs into a thread."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""

    start_timeout_s: Seconds = 120.0
    """Time to import and make it, in the check before a start."""


class MessageEnvironment(EnvironmentLimits):
    """Messages to tokens, and texts to messages."""

    tool_call_parser: str | None = None
    """SGLang's name of the form in which the model writes calls, such as qwen25. None: for environments without
    tools."""
    reasoning_parser: str | None = None
    """SGLang's name of the form in which the model thinks, such as qwen3. Calls are then looked for outside the
    thinking, which the environment's message has apart. None: everywhere."""
    template: Literal["chat", "plain"] = "chat"
    """chat: the model's chat template, with ``model.chat_template_kwargs``. plain: the texts of the messages one after
    another, and nothing else."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if getattr(self, "interface", None) == "tools" and self.tool_call_parser is None:
            yield Contradiction(
                ("tool_call_parser",),
                "environment.interface=tools needs environment.tool_call_parser",
                "give SGLang's name of the form in which the model writes calls, such as qwen25",
            )
        if self.reasoning_parser is not None and self.tool_call_parser is None:
            yield Contradiction(
                ("reasoning_parser", "tool_call_parser"),
                "environment.reasoning_parser needs environment.tool_call_parser",
                "name it, or leave both out",
            )


class ProcessEnvironment(MessageEnvironment):
    """Episodes in processes of their own."""

    max_processes: Count | None = None
    """Processes at a time, of training episodes and of held-out ones each. None: max_concurrency, but at most 16 per
    core."""
    pass_secrets: tuple[VariableName, ...] = ()
    """Environment variables that its processes inherit although they may be secrets. A model has a say in what these
    processes do, so they are started without the variables that an ``api_key_variable`` of the config names, and without
    those of 8 characters or more whose names hold token, secret, passw, key or credential."""


class ChatEnvironment(ProcessEnvironment):
    """An environment of messages. It runs in processes of its own, one episode at a time in each
    (``rollout/environments/tandem_worker``). A crash, a hang or an exception ends the episode without a score; its process
    is killed with everything that it started. ``rollout/environments/chat.py`` turns messages into tokens."""

    type: Literal["chat"] = "chat"
    environment: ModuleAndName
    """``module:Class``, called once per process with ``options``. The module is looked for in the current folder, and
    among the installed ones. What must outlive an episode, such as a browser, is started by the class: after an
    episode everything that it started since is killed."""
    interface: Literal["chat", "text", "tools"] = "chat"
    """chat: ``reset(problem)`` gives messages, ``step(message)`` gives (messages, reward, done); a list ``tools`` of
    functions may be called by the policy. text: ``reset`` and ``step`` of gym or gymnasium over texts. tools: every
    public method is a tool; an answer without a call ends the episode. Where no reward is given, the run's ``reward``
    scores the last answer."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, as JSON."""
    python: GivenPath | None = None
    """A Python of 3.9 or newer that runs it; it needs no Tandem. None: Tandem's own."""
    start_timeout_s: Seconds = 120.0
    """Time for a process to start, and to import and make the environment."""
    reset_timeout_s: Seconds = 60.0
    """Time for ``reset``."""
    step_timeout_s: Seconds = 60.0
    """Time for a step; all tool calls of one answer are a step. A process that is late is killed (``time_limit``)."""


class AgentEnvironment(ProcessEnvironment):
    """An agent of the user's own, unchanged: a program that asks an OpenAI server for its turns. Each episode is a process
    of it, which gets the server's address as OPENAI_BASE_URL, a key of its own as OPENAI_API_KEY, and the problem as
    TANDEM_PROBLEM (JSON: prompt_id, text, messages). ``rollout/environments/gateway.py`` turns its requests into turns."""

    type: Literal["agent"] = "agent"
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments. ``{python}`` is Tandem's Python, which also runs a first word that ends with
    ``.py``. A word that names a file in the current folder becomes its whole path, since an agent has a working folder of
    its own, which is removed after its episode."""
    preload: tuple[str, ...] = ()
    """Modules that the agent imports, for a command that is a Python script: they are imported once, and each episode's
    process is forked behind them. OpenAI's client takes a CPU second to import. Modules that start threads are refused,
    and what a module reads while it is imported (its environment variables) is the run's."""
    start_timeout_s: Seconds = 120.0
    """Time to import ``preload``."""
    reward: Literal["run", "agent"] = "run"
    """run: the run's ``reward`` scores the last answer of the policy. agent: the last line that the agent prints is
    ``{"reward": number, "parts": {name: number}}``; parts may be left out."""
    pass_row: bool = False
    """Whether TANDEM_PROBLEM has the whole row of the data file as ``row``. It may hold the answer."""


class OpenEnvironment(MessageEnvironment):
    """An environment that OpenEnv serves (github.com/meta-pytorch/OpenEnv): JSON over a WebSocket, one session per
    episode. The servers are started beside the run, and outlive it. ``rollout/environments/openenv.py`` has the
    messages."""

    type: Literal["openenv"] = "openenv"
    urls: Annotated[tuple[str, ...], Field(min_length=1), served_at("http://node:8000", "ws", "wss")]
    """Its servers, such as http://node:8000. An episode goes to the one with the fewest. Their max_concurrent_envs
    together must be at least max_concurrency; an episode without room waits, up to reset_timeout_s."""
    interface: Literal["text", "tools"] = "text"
    """text: the policy's answer becomes ``action``. tools: the environment's tools (MCP) may be called, and an answer
    without a call ends the episode. Where no step gives a reward, the run's ``reward`` scores the last answer."""
    action: dict[str, Any] = Field(default_factory=lambda: {"message": "{answer}"})
    """The action of interface=text. ``{answer}`` stands for the policy's answer."""
    observation: str | None = None
    """Field of an observation that the policy reads. None: the whole observation as JSON, without its metadata."""
    reset: dict[str, str] = Field(default_factory=dict)
    """Arguments of the environment's reset, and what they get: a field of the data's row, or ``text``, ``reference``,
    ``prompt_id``. ``seed`` is given without being named: a number of the problem, the same for all of its samples."""
    api_key_variable: KeyVariable | None = None
    """The environment variable that holds the servers' key, which is sent as a bearer token. None: no key."""
    start_timeout_s: Seconds = 60.0
    """Time for a server to answer before the first step."""
    reset_timeout_s: Seconds = 60.0
    """Time to connect, also while no server can be reached, to get a free place, and for ``reset``."""
    step_timeout_s: Seconds = 60.0
    """Time for a step."""

    def _contradictions(self) -> Iterator[Contradiction]:
        yield from super()._contradictions()
        if self.interface == "text" and "{answer}" not in str(self.action):
            yield Contradiction(
                ("action",), f"{self.action} has no place for the policy's answer", "write {answer} there"
            )


EnvironmentConfig = Annotated[
    SingleTurn | TokenEnvironment | ChatEnvironment | AgentEnvironment | OpenEnvironment,
    Field(discriminator="type"),
]
