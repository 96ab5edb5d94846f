"""Tool calls in the text of a turn, found by SGLang's own parsers.

The parsers run in one separate process. Importing them takes 9 CPU seconds, half a GiB and torch, which the sample
role does not import. Servers have them behind the route ``/parse_function_call``. But a router does not pass that on, and
a lost server would fail an episode. The parsers are regular expressions: one that hangs on a sampled text would hang the
server with every sample there. A separate process has a deadline, at which it is killed.
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
    """Without calls and thinking. If a call could not be read, the whole text without thinking."""
    calls: list[dict[str, Any]]
    """{name, arguments} each; arguments are an object of JSON."""
    error: str | None = None
    """Why a call could not be read; there are no calls then."""
    reasoning: str = ""
    """The thinking, if there is a parser for it."""


class ToolCallParser(AnsweringProcess):
    """A parser by its name in SGLang, and the process in which ``tool_call_parsers.parse`` answers.

    Args:
        parser: such as ``qwen25`` or ``llama3``.
        reasoning_parser: such as ``qwen3``. Calls are looked for outside the thinking only. None: everywhere.

    Raises ValueError: SGLang has no such parser.
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
        """The turn has an error if a call cannot be read, or if the parser fails, is late, is lost or was closed.

        This blocks for about a millisecond, and for ``PARSE_TIMEOUT_S`` at most.

        Raises WorkerStartError: the process cannot be started.
        """
        # As JSON's ASCII, which can carry a lone surrogate: UTF-8 cannot.
        question = {"text": text, "tools": [dict(tool) for tool in tools], **self._names}
        try:
            return ParsedTurn(**self.ask(question))
        except TimeoutError:
            error = f"no answer from the parser within {self._timeout_s:g} s"
        except EOFError:
            error = "the parser's process ended"
        except CancelledError:
            error = "the parser was closed"
        return ParsedTurn(content=text, calls=[], error=error)
