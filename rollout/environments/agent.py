"""Episodes of an unchanged agent: a separate program that requests its turns from the gateway.

The agent gets OPENAI_BASE_URL, OPENAI_API_KEY and TANDEM_PROBLEM. It calls the gateway as it would call OpenAI,
and its requests become the turns of an episode (``gateway_session.py``). The episode ends when the agent ends.
"""

import asyncio
import json
import math
import os
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from configs.schema.environment import AgentEnvironment
from rollout.environments.agent_process import AgentProcess, AgentStarter, running
from rollout.environments.chat import Conversation, problem_fields
from rollout.environments.gateway import Gateway
from rollout.environments.gateway_session import GatewaySession
from rollout.environments.processes import plain_value
from rollout.environments.protocol import Context, EpisodeFailed, Outcome
from rollout.records import Prompt, Status
from rollout.rewards.function import LARGEST
from rollout.servers.watched_process import how_it_ended
from rollout.terminal_text import on_one_visible_line

LARGEST_PROBLEM = 2**17 - 2**10
"""Bytes of TANDEM_PROBLEM: Linux allows 128 KiB for one variable."""
LONGEST_TAIL = 1000
"""Characters of an agent's error output in an error."""


class AgentEpisodes:
    """An ``Environment``. Each episode is a separate process."""

    def __init__(
        self,
        gateway: Gateway,
        starter: AgentStarter,
        config: AgentEnvironment,
        conversation: Conversation,
    ) -> None:
        self._gateway, self._starter, self._config = gateway, starter, config
        self._conversation = conversation

    def check(self) -> None:
        """Raises ValueError if the template cannot be used."""
        self._conversation.renderer_of(())

    async def run(self, problem: Prompt, context: Context) -> Outcome:
        told = self._told(problem)
        async with self._gateway.session(context, self._conversation) as session:
            async with running(self._starter, self._variables(session, told)) as process:
                code = await self._end_of(process, session, context)
        if code != 0:
            raise session.limit or EpisodeFailed(
                Status.FAILED, f"the agent {how_it_ended(code)}{_why(process, session)}"
            )
        if not session.num_turns:
            raise session.limit or EpisodeFailed(
                Status.FAILED,
                f"the agent ended without a turn: no request to OPENAI_BASE_URL was answered{_why(process, session)}",
            )
        outcome = await self._outcome(process, session)
        # An agent that exits with 0 after a limit is scored, and the metrics count the limit.
        return outcome if session.limit is None else replace(outcome, status=session.limit.status)

    async def _end_of(self, process: AgentProcess, session: GatewaySession, context: Context) -> int:
        """The agent's exit code. Raises the session's failure, if that comes first."""
        ended = asyncio.ensure_future(process.ended())
        try:
            async with context.deadline(self._config.timeout_s):
                await asyncio.wait({ended, session.failure}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise EpisodeFailed(
                Status.TIME_LIMIT,
                f"the agent ran longer than environment.timeout_s={self._config.timeout_s:g} s, and was killed{_why(process, session)}",
            ) from None
        finally:
            if not ended.done():
                ended.cancel()
        if session.failure.done():
            raise session.failure.result()
        return ended.result()

    async def _outcome(self, process: AgentProcess, session: GatewaySession) -> Outcome:
        counts = {
            "forks": float(session.num_forks),
            "refused_requests": float(session.refused),
            "unread_calls": float(session.unread_calls),
        }
        if self._config.reward == "run":
            return Outcome.of(await session.score(), **counts)
        reward, parts, turn_rewards = _reward_of(process.last_line)
        session.reward_turns(turn_rewards)
        return Outcome(reward=reward, parts={**parts, **counts})

    def _told(self, problem: Prompt) -> str:
        fields = problem_fields(problem, self._conversation.system_prompt)
        del fields["reference"]
        if not self._config.pass_row:
            del fields["row"]
        told = json.dumps(fields, default=plain_value)
        if len(told) > LARGEST_PROBLEM:
            row = "; leave out environment.pass_row" if self._config.pass_row else ""
            raise EpisodeFailed(
                Status.FAILED,
                f"problem {problem.prompt_id} has {len(told)} bytes as JSON, but TANDEM_PROBLEM holds {LARGEST_PROBLEM}{row}",
            )
        return told

    def _variables(self, session: GatewaySession, told: str) -> dict[str, str]:
        # The machine's proxy does not know this server. Programs read the name in either case, many only in lower case.
        known = [os.environ.get("no_proxy"), os.environ.get("NO_PROXY"), urlsplit(session.base_url).hostname]
        direct = ",".join(dict.fromkeys(filter(None, known)))
        return {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.key,
            "OPENAI_MODEL": session.model,
            "TANDEM_PROBLEM": told,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }


def _why(process: AgentProcess, session: GatewaySession) -> str:
    """The last refused request, and the end of the agent's error output, which may hold a model's text."""
    refusal = f"; a request was refused with {session.last_refusal}" if session.last_refusal else ""
    errors = on_one_visible_line(process.errors)
    shown = errors if len(errors) <= LONGEST_TAIL else f"…{errors[-LONGEST_TAIL:]}"
    return refusal + (f"; its error output ends with: {shown}" if errors else "; it wrote no error output")


def _reward_of(line: str) -> tuple[float, dict[str, float], dict[str, float]]:
    """(reward, parts, turn rewards by the ids of answers) of an agent's last line. Without a reward it is the sum of the
    turn rewards. Raises EpisodeFailed."""
    try:
        given: Any = json.loads(line)
        parts: Any = given.get("parts") or {}
        turn_rewards = {
            answer: _turn_reward(answer, value) for answer, value in (given.get("turn_rewards") or {}).items()
        }
        reward = given["reward"] if "reward" in given or not turn_rewards else sum(turn_rewards.values())
        if not _is_number(reward) or not all(map(_is_number, parts.values())):
            raise ValueError("no finite number")
        return float(reward), {str(name): float(value) for name, value in parts.items()}, turn_rewards
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise EpisodeFailed(
            Status.REWARD_FAILED,
            f"the last line that the agent printed is {line[:200]!r}, but environment.reward=agent needs "
            '{"reward": number, "parts": {name: number}, "turn_rewards": {id: number}}',
        ) from error


def _turn_reward(answer: str, value: Any) -> float:
    """Raises EpisodeFailed."""
    # A huge int is compared exactly, and NaN is not below anything.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= LARGEST:
        raise EpisodeFailed(
            Status.REWARD_FAILED,
            f"turn_rewards of the agent's last line has {value!r:.60} for {answer!r:.80}, but needs a finite number in float32",
        )
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
