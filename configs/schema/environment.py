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
    """Limits of an episode. Each limit has its own status, which the metrics count."""

    max_turns: Count = 16
    """Most turns of the policy in an episode. One more ends it (``turn_limit``)."""
    max_tokens: Tokens | None = None
    """Most tokens of an episode's sequence, including the prompt and all observations. If the next turn does
    not fit, the episode ends before the request (``token_limit``). None: as many as learner.token_budget and
    the servers allow; these take 2 tokens less than the model's positions and rollout.max_total_tokens, and 7
    less before a turn."""
    timeout_s: Seconds = 600.0
    """Deadline of an episode. A later one is cancelled and not scored (``time_limit``). It does not count the
    time in which a turn waits for a place at the servers or for the restart of a server, nor the time of the
    run's ``reward``, which has its own limits."""
    max_concurrency: Count = 512
    """Episodes under way at the same time."""
    reward_at_limit: FiniteFloat | None = 0.0
    """Reward of an episode that max_turns or max_tokens ends. None: it is not scored, not trained on, and not
    part of its group's baseline."""


class TokenEnvironment(EnvironmentLimits):
    """The user's environment of tokens (``rollout/environments/protocol.py``)."""

    type: Literal["tokens"] = "tokens"
    environment: ModuleAndName
    """``module:Class``, called once with ``options``. Its ``async run(problem, context)`` plays an episode.
    The module is imported from the current folder or from the installed ones. It runs in the sample role's
    event loop: blocking work belongs in a thread."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class."""

    start_timeout_s: Seconds = 120.0
    """Time to import the module and create the environment, in the check before the start."""


class MessageEnvironment(EnvironmentLimits):
    """How messages become tokens, and texts become messages."""

    tool_call_parser: str | None = None
    """SGLang's name of the format in which the model writes calls, such as qwen25. None: for environments
    without tools."""
    reasoning_parser: str | None = None
    """SGLang's name of the format in which the model thinks, such as qwen3. Calls are then parsed only
    outside the thinking, and the environment's message has the thinking in a separate field. None: calls are
    parsed everywhere."""
    template: Literal["chat", "plain"] = "chat"
    """chat: the model's chat template, with ``model.chat_template_kwargs``. plain: the texts of the messages,
    concatenated, and nothing else."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if getattr(self, "interface", None) == "tools" and self.tool_call_parser is None:
            yield Contradiction(
                ("tool_call_parser",),
                "environment.interface=tools needs environment.tool_call_parser",
                "give SGLang's name of the format in which the model writes calls, such as qwen25",
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
    """Processes at a time, separately for training episodes and for held-out ones. None: max_concurrency, but
    at most 16 per core."""
    pass_secrets: tuple[VariableName, ...] = ()
    """Environment variables that its processes inherit although they may be secrets. The model influences
    what these processes do. So they are started without the variables that an ``api_key_variable`` of the
    config names, and without those whose value has 8 characters or more and whose name contains token,
    secret, passw, key or credential."""


class ChatEnvironment(ProcessEnvironment):
    """An environment of messages. It runs in its own processes, one episode at a time in each
    (``rollout/environments/tandem_worker``). A crash, a hang or an exception ends the episode without a
    score; the process and everything that it started are killed. ``rollout/environments/chat.py`` turns
    messages into tokens."""

    type: Literal["chat"] = "chat"
    environment: ModuleAndName
    """``module:Class``, called once per process with ``options``. The module is imported from the current
    folder or from the installed ones. The class's constructor must start what outlives an episode, such as a
    browser: after an episode all processes that the episode started are killed."""
    interface: Literal["chat", "text", "tools"] = "chat"
    """chat: ``reset(problem)`` gives messages, ``step(message)`` gives (messages, reward, done); a list ``tools`` of
    functions may be called by the policy. text: ``reset`` and ``step`` of gym or gymnasium over texts. tools: every
    public method is a tool; an answer without a call ends the episode. If the environment gives no reward,
    the run's ``reward`` scores the last answer."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, as JSON."""
    python: GivenPath | None = None
    """The Python, 3.9 or newer, that runs it; Tandem need not be installed there. None: Tandem's own."""
    start_timeout_s: Seconds = 120.0
    """Time for a process to start, import the module and create the environment."""
    reset_timeout_s: Seconds = 60.0
    """Time for ``reset``."""
    step_timeout_s: Seconds = 60.0
    """Time for a step; all tool calls of one answer are one step. A late process is killed
    (``time_limit``)."""


class AgentEnvironment(ProcessEnvironment):
    """The user's unchanged agent: a program that requests its turns from an OpenAI server. Each episode is
    one process. It gets the server's address as OPENAI_BASE_URL, its own key as OPENAI_API_KEY, and the
    problem as TANDEM_PROBLEM (JSON: prompt_id, text, messages). ``rollout/environments/gateway.py`` turns its
    requests into turns."""

    type: Literal["agent"] = "agent"
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments. ``{python}`` is Tandem's Python, which also runs a first word that ends
    with ``.py``. A word that names a file in the current folder is replaced by its full path, since each
    episode has its own working folder, which is removed after the episode."""
    preload: tuple[str, ...] = ()
    """Modules that the agent imports, if its command is a Python script. They are imported once, and each
    episode's process is forked afterwards. OpenAI's client takes a CPU second to import. Modules that start
    threads are refused. During the import a module sees the run's environment variables, not the
    episode's."""
    start_timeout_s: Seconds = 120.0
    """Time to import ``preload``."""
    reward: Literal["run", "agent"] = "run"
    """run: the run's ``reward`` scores the last answer of the policy. agent: the last line that the agent prints is
    ``{"reward": number, "parts": {name: number}, "turn_rewards": {id: number}}``. turn_rewards go by the ids of
    answers; without a reward, it is their sum. Parts and turn_rewards may be left out."""
    pass_row: bool = False
    """Whether TANDEM_PROBLEM has the whole row of the data file as ``row``. The row may hold the answer."""


class OpenEnvironment(MessageEnvironment):
    """An environment that OpenEnv serves (github.com/meta-pytorch/OpenEnv): JSON over a WebSocket, one
    session per episode. The user starts the servers; they outlive the run.
    ``rollout/environments/openenv.py`` has the messages."""

    type: Literal["openenv"] = "openenv"
    urls: Annotated[tuple[str, ...], Field(min_length=1), served_at("http://node:8000", "ws", "wss")]
    """Its servers, such as http://node:8000. An episode goes to the server with the fewest episodes. The sum
    of their max_concurrent_envs must be at least max_concurrency; an episode without room waits, up to
    reset_timeout_s."""
    interface: Literal["text", "tools"] = "text"
    """text: the policy's answer becomes ``action``. tools: the environment's tools (MCP) may be called, and
    an answer without a call ends the episode. If no step gives a reward, the run's ``reward`` scores the last
    answer."""
    action: dict[str, Any] = Field(default_factory=lambda: {"message": "{answer}"})
    """The action of interface=text. ``{answer}`` stands for the policy's answer."""
    observation: str | None = None
    """Field of an observation that the policy reads. None: the whole observation as JSON, without its metadata."""
    reset: dict[str, str] = Field(default_factory=dict)
    """Arguments of the environment's reset and their values: a field of the data's row, or ``text``,
    ``reference``, ``prompt_id``. ``seed`` is always passed: a number of the problem, the same for all of its
    samples."""
    api_key_variable: KeyVariable | None = None
    """The environment variable that holds the servers' key, which is sent as a bearer token. None: no key."""
    start_timeout_s: Seconds = 60.0
    """Time for a server to answer before the first step."""
    reset_timeout_s: Seconds = 60.0
    """Time to connect (retries included, if no server can be reached), to get a free place, and for
    ``reset``."""
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
