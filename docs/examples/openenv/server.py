"""Countdown with a second try as an environment of OpenEnv 0.10, served by it."""

import ast
import operator

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    return int(node.value)


class Answer(Action):
    expression: str


class Shown(Observation):
    text: str


class TryAgain(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, problem: str = "", **_) -> Shown:
        self.problem, self.tries = problem, 0
        return Shown(text=problem)

    def step(self, action: Answer, **_) -> Shown:
        self.tries += 1
        try:
            shown = str(value(ast.parse(action.expression, mode="eval").body))
        except (SyntaxError, AttributeError, KeyError, TypeError, ValueError):
            shown = ""
        target = self.problem.rstrip(":").partition("=")[2]  # of 3 5 8=23:
        done = self.tries == 2 or shown == target
        return Shown(text=f"({shown}) {self.problem}", done=done)


app = create_fastapi_app(TryAgain, Answer, Shown, max_concurrent_envs=512)
