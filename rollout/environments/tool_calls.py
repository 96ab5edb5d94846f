"""Tool calls in the text of a turn, found by SGLang's own parsers.

The parsers run in one process of their own. Importing them takes 9 CPU seconds, half a GiB and torch, which the
sample role is kept free of. A server's route ``/parse_function_call`` would have them already, but a router does not
pass it on, a lost server would fail an episode, and a parser that hangs on a sampled text (they are regular
expressions) would hang the server, and with it every sample there. A separate process has a deadline, and is killed at it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from rollout.rewards.worker import START_TIMEOUT_S, AnsweringProcess
from rollout.servers import tool_call_parsers
from rollout.servers.tool_call_parsers import check_parser_name

PARSE_TIMEOUT_S = 10.0

Tools = Sequence[Mapping[str, Any]]
"""Functions in OpenAI's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """The text of a turn, taken apart."""

    content: str
    """Without calls and thinking. The whole text, without thinking, where a call could not be read."""
    calls: list[dict[str, Any]]
    """{name, arguments} each; arguments are an object of JSON."""
    error: str | None = None
    """Why a call could not be read; there are no calls then."""
    reasoning: str = ""
    """The thinking, where a parser of it is given."""


class ToolCallParser(AnsweringProcess):
    """A parser by its name in SGLang, and the process in which ``tool_call_parsers.parse`` answers.

    Args:
        parser: such as ``qwen25`` or ``llama3``.
        reasoning_parser: such as ``qwen3``. Calls are looked for outside the thinking only. None: everywhere.

    Raises:
        ValueError: SGLang has no such parser.
    """

    def __init__(self, parser: str, *, reasoning_parser: str | None = None) -> None:
        check_parser_name("tool_call_parser", parser)
        if reasoning_parser is not None:
            check_parser_name("reasoning_parser", reasoning_parser)
        super().__init__(
            "the process of SGLang's tool-call parsers", tool_call_parsers.__name__,
            timeout_s=PARSE_TIMEOUT_S, start_timeout_s=START_TIMEOUT_S,
        )  # fmt: skip
        self._names = {"parser": parser, "reasoning_parser": reasoning_parser}

    def __call__(self, text: str, tools: Tools) -> ParsedTurn:
        """A call that cannot be read, a parser that fails, and one that is late, lost or closed give an error.

        This blocks for about a millisecond, and for ``PARSE_TIMEOUT_S`` at most.

        Raises WorkerStartError: the process cannot be started.
        """
        # As JSON's ASCII, which can carry a lone surrogate: UTF-8 cannot.
        question = {"text": text, "tools": [dict(tool) for tool in tools], **self._names}
        try:
            return ParsedTurn(**self.ask(question))
        except TimeoutError:
            error = f"no answer of the parser within {self._timeout_s:g} s"
        except EOFError:
            error = "the parser's process ended"
        except CancelledError:
            error = "the parser was closed"
        return ParsedTurn(content=text, calls=[], error=error)
