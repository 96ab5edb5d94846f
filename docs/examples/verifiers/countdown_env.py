"""Countdown with a second try as an environment of verifiers 0.4 (taskset, reward, harness), and an episode of it."""

import ast
import asyncio
import json
import operator
import os
import re

import openai
import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig

__all__ = ["Countdown", "TwoTries"]  # where verifiers looks for them
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    return int(node.value)


def value_text(answer: str) -> str:
    try:
        return str(value(ast.parse(answer, mode="eval").body))
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError):
        return ""


class Expression(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        numbers = self.data.prompt.partition("=")[0].split()
        uses_all = sorted(re.findall(r"\d+", trace.last_reply)) == sorted(numbers)
        return float(uses_all and value_text(trace.last_reply) == self.data.name)


class Countdown(vf.Taskset[Expression, vf.TasksetConfig]):
    def load(self):
        text = json.loads(os.environ["TANDEM_PROBLEM"])["text"]  # 3 5 8=23:
        yield Expression(vf.TaskData(prompt=text, name=text.rstrip(":").partition("=")[2]))


class TwoTries(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        ask = openai.AsyncOpenAI(base_url=endpoint, api_key=secret).chat.completions.create
        messages = [{"role": "user", "content": data.prompt}]
        first = (await ask(model=ctx.model, messages=messages)).choices[0].message.content
        if (shown := value_text(first)) != data.name:
            feedback = {"role": "user", "content": f"({shown}) {data.prompt}"}
            await ask(
                model=ctx.model, messages=[*messages, {"role": "assistant", "content": first}, feedback]
            )
        return vf.ProgramResult(0, "", "")


async def main() -> None:
    agent = {"harness": {"id": "countdown_env"}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": "countdown_env"}, "agent": agent}
    env = vf.load_environment(SingleAgentEnvConfig.model_validate(config))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(*env.taskset, vf.ModelContext(model="policy", client=client))
    assert episode.ok, (episode.errors, [trace.errors for trace in episode.traces])
    print(json.dumps({"reward": episode.traces[0].reward}))


if __name__ == "__main__":
    asyncio.run(main())
