"""Whether every turn is trained on as it was sampled, for the chat templates of several families, on the real engines.

A tiny model and a byte-level tokenizer get a family's template, and the model learns to call a tool in the family's form.
An agent plays episodes with tools through the gateway: it answers calls and texts, rewrites its history (a fork), asks
twice for an answer, and begins a new conversation. The server retracts running requests every few passes. Prints per
family: turns that the learner compared with the server's requests and answers, calls, retractions, sequences per episode,
and the greatest gap of a trained token's log-prob (float32, staleness 0).

    python benchmarks/studies/templates.py --folder templates [--families qwen3 llama3_1] [--steps 3]
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, table_head  # noqa: E402

RECIPE = ROOT / "configs/recipes/countdown_tiny.yaml"
PARSERS = {"qwen2_5": "qwen25", "qwen3": "qwen25", "llama3_1": "llama3"}
CALL = {"name": "add", "arguments": {"a": 8, "b": 15}}
CALLS = {  # as each family's models write them
    "qwen2_5": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "qwen3": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "llama3_1": json.dumps({"name": "add", "parameters": CALL["arguments"]}),
}
HIDDEN, LAYERS, POSITIONS = 128, 4, 2048
RETRACT_EVERY = 12
"""Passes of the server after which it retracts requests, by a setting that SGLang has for tests."""
LESSONS, LESSON_SIZE, LESSON_LR = 300, 4, 2e-3
DEADLINE_S = 900
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}  # fmt: skip
SYSTEM = "Use the tool."
AGENT = (
    f"""
import json, os, urllib.request
TOOL, SYSTEM = {TOOL!r}, {SYSTEM!r}
"""
    + """

def ask(messages, **fields):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages, **fields}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json",
         "X-Stainless-Retry-Count": "0"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["message"]

problem = json.loads(os.environ["TANDEM_PROBLEM"])["text"]
messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]
texts, num_calls = [], 0
for turn in range(3):
    answer = ask(messages, tools=[TOOL])
    texts.append(answer["content"] or "")
    calls = answer.get("tool_calls") or []
    num_calls += len(calls)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "23"} for call in calls]
    messages += [answer, *(results or [{"role": "user", "content": f"{turn}: and then?"}])]
texts.append(ask([*messages[:3], {"role": "user", "content": "Once more."}], tools=[TOOL])["content"] or "")  # rewritten
texts.append(ask(messages[:2], tools=[TOOL])["content"] or "")  # the first question, again
texts.append(ask([{"role": "user", "content": "In short: " + problem}])["content"] or "")  # a sub-agent
print(json.dumps({"reward": len(set("".join(texts))) / 50, "parts": {"calls": num_calls}}))
"""
)


def make_model(folder: Path, family: str) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.support.chat_tokenizer import chat_tokenizer

    tokenizer = chat_tokenizer(family, model_max_length=POSITIONS)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=POSITIONS,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, pad_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    teach(model, tokenizer, CALLS[family])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def teach(model, tokenizer, call: str) -> None:
    """Gradient steps on the answer of ``call`` to a question with the tool; the question is not trained on."""
    import torch

    numbers = random.Random(0)

    def lesson() -> tuple[list[int], int]:
        one, two, three, wanted = (numbers.randint(1, 99) for _ in range(4))
        question = {"role": "user", "content": f"{one} {two} {three}={wanted}:"}
        messages = [{"role": "system", "content": SYSTEM}, question]
        if wanted % 2:
            turns = [f"{turn}: and then?" for turn in range(3)] + ["Once more."]
            messages += [
                {"role": "assistant", "content": "5"},
                {"role": "user", "content": numbers.choice(turns)},
            ]
        text = tokenizer.apply_chat_template(
            messages, tools=[TOOL], add_generation_prompt=True, tokenize=False
        )
        asked = tokenizer.encode(text, add_special_tokens=False)
        answer = tokenizer.encode(call, add_special_tokens=False)
        return [*asked, *answer, tokenizer.eos_token_id], len(asked)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LESSON_LR)
    for _ in range(LESSONS):
        lessons = [lesson() for _ in range(LESSON_SIZE)]
        longest = max(len(ids) for ids, _ in lessons)
        ids = torch.tensor([row + [tokenizer.eos_token_id] * (longest - len(row)) for row, _ in lessons])
        labels = torch.full_like(ids, -100)
        for row, (tokens, start) in enumerate(lessons):
            labels[row, start : len(tokens)] = ids[row, start : len(tokens)]
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"the last lesson's loss: {loss.item():.3f} nats per token", file=sys.stderr, flush=True)


def play(folder: Path, family: str, given: argparse.Namespace) -> dict[str, float]:
    model, agent = folder / f"model-{family}", folder / "agent.py"
    if not model.exists():
        make_model(model, family)
    agent.write_text(AGENT)
    environment = (
        f"environment={{type: agent, command: [{agent}], tool_call_parser: {PARSERS[family]}, preload: [json, urllib.request], "
        f"max_turns: 6, max_tokens: {POSITIONS}, timeout_s: 600, reward: agent, reward_at_limit: null}}"
    )
    runs = folder / f"runs-{family}"
    command = [
        sys.executable, "-m", "launch", "train", str(RECIPE), f"model.path={model}", f"launch.runs_dir={runs}", environment,
        f"steps={given.steps}", "layout.dp=1", "rollout.prompts_per_step=4", "rollout.group_size=4", "evaluation.at_ends=false",
        "checkpoint.every=0", f"rollout.max_new_tokens={given.tokens}", f"rollout.max_total_tokens={given.pool}",
    ]  # fmt: skip
    with (folder / f"{family}.log").open("w") as log:
        subprocess.run(
            command, cwd=folder, stdout=log, stderr=log, check=True, timeout=DEADLINE_S,
            env=os.environ | {
                "PYTHONPATH": str(ROOT), "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(RETRACT_EVERY)
            },
        )  # fmt: skip
    run = (runs / "latest").resolve()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "episode/turns_checked" in row]
    retracted = [
        int(count)
        for file in (run / "logs").glob("*")
        for count in re.findall(r"#retracted_reqs: (\d+)", file.read_text(errors="replace"))
    ]
    return {
        "turns": sum(row["episode/turns_checked"] for row in rows),
        "retracted": sum(retracted),
        "sequences": sum(row["episode/sequences_mean"] for row in rows) / len(rows),
        "calls": sum(row["reward/part/calls"] for row in rows) / len(rows),
        "gap": max(row["mismatch/logprob_gap_max"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=PARSERS, default=[*PARSERS])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help="of a turn, at most")
    parser.add_argument("--pool", type=int, default=4096, help="tokens that the server holds")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    announce(families=given.families, steps=given.steps, tokens=given.tokens, pool=given.pool)
    titles = ["template", "turns compared", "that differ", "calls per episode", "requests retracted"]
    print(table_head([*titles, "sequences per episode", "greatest gap, nats"]))
    for family in given.families:
        row = play(folder, family, given)  # a turn that differs ends the run, so the command fails
        print(
            f"| {family} | {row['turns']:.0f} | 0 | {row['calls']:.2f} | {row['retracted']} | {row['sequences']:.2f} | {row['gap']:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
