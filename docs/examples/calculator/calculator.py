"""Countdown with a calculator: `3*5+8=` asks for the value, and `23 ` is the answer."""

import json
import random
import sys

from configs.schema.task import CountdownTask
from rollout.environments import Context, Outcome
from rollout.records import Prompt
from rollout.rewards.arithmetic import ExpressionError, evaluate
from rollout.tasks.countdown import prompt_text, random_answer, training_problems


class Calculator:
    """A turn that ends with `=` is a call. A turn that ends the response is the answer, which the reward scores."""

    async def run(self, problem: Prompt, context: Context) -> Outcome:
        equals, calls = context.encode("="), 0
        context.observe(problem.token_ids)
        while (text := context.decode(await context.act(stop_token_ids=equals))).endswith("="):
            context.observe(context.encode(shown_value(text[:-1])))
            calls += 1
        return Outcome.of(await context.score(text), calls=calls)


def shown_value(expression: str) -> str:
    try:
        return f"{evaluate(expression).value} "
    except ExpressionError:
        return ": "


def imitated_response(problem, rng: random.Random) -> str:
    """Up to three calls, the last of which has mostly reached the target, and its expression as the answer."""
    text = ""
    for _ in range(3):
        expression = random_answer(problem, noise=0.6, rng=rng)
        text += f"{expression}={shown_value(expression)}"
        if evaluate(expression).value == problem[1]:
            break
    return text + expression


if __name__ == "__main__":
    problems, draw = training_problems(CountdownTask()), random.Random(0)
    for _ in range(int(sys.argv[1])):
        drawn = draw.choice(problems)
        print(json.dumps({"prompt": prompt_text(drawn), "response": imitated_response(drawn, draw)}))
