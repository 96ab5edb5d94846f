"""Countdown with a second try: after a wrong answer the policy sees its value, and the problem again."""

import json
import random
import sys

from configs.schema.task import CountdownTask
from rollout.environments import Context, Outcome
from rollout.records import Prompt
from rollout.rewards.arithmetic import ExpressionError, evaluate
from rollout.tasks.countdown import prompt_text, random_answer, training_problems


class TryAgain:
    def __init__(self, tries: int = 2) -> None:
        self.tries = tries

    async def run(self, problem: Prompt, context: Context) -> Outcome:
        context.observe(problem.token_ids)
        for number in range(1, self.tries + 1):
            answer = context.decode(await context.act())
            score = await context.score(answer)
            if score.correct or number == self.tries:
                break
            context.observe(context.encode(feedback(answer, problem.text)))
        return Outcome.of(score, tries=number)


def feedback(answer: str, problem: str) -> str:
    """`(27) 3 5 8=23:` after an answer with the value 27."""
    try:
        return f"({evaluate(answer).value}) {problem}"
    except ExpressionError:
        return f"() {problem}"


def imitated(problem, rng: random.Random) -> tuple[str, str]:
    """Half of the examples are a second try: the prompt then holds the first one and its feedback."""
    prompt = prompt_text(problem)
    if rng.random() < 0.5:
        wrong = random_answer(problem, noise=1.0, rng=rng)
        prompt += f"{wrong}<eos>{feedback(wrong, prompt)}"
    return prompt, random_answer(problem, noise=0.4, rng=rng)


if __name__ == "__main__":
    problems, draw = training_problems(CountdownTask()), random.Random(0)
    for _ in range(int(sys.argv[1])):
        prompt, response = imitated(draw.choice(problems), draw)
        print(json.dumps({"prompt": prompt, "response": response}))
