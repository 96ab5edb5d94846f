"""Countdown with a second try, as any program would ask OpenAI: nothing of Tandem is imported."""

import ast
import json
import operator
import os

import openai

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
    raise ValueError(node)


def value_text(answer: str) -> str:
    try:
        return str(value(ast.parse(answer, mode="eval").body))
    except (SyntaxError, ValueError, RecursionError):
        return ""


client = openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are Tandem's
problem = json.loads(os.environ["TANDEM_PROBLEM"])["text"]  # 3 5 8=23:
messages = [{"role": "user", "content": problem}]
for left in (1, 0):
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
    found = value_text(answer.content)
    if not left or found == problem.partition("=")[2].rstrip(":"):
        break
    messages += [answer, {"role": "user", "content": f"({found}) {problem}"}]
