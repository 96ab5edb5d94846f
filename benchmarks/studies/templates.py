"""Whether every turn is trained on as it was sampled, for the chat templates of several families, on the real engines.

A tiny model of random weights and a byte-level tokenizer get a family's template. An agent plays episodes with tools through
the gateway: it answers calls and texts, rewrites its history (a fork), asks twice for an answer, and begins a conversation
of its own. The servers' pool of tokens is so small that running requests are retracted. Prints per family: turns that
the learner compared with what the server was sent and answered, retractions, sequences per episode, and the greatest
gap of a trained token's log-prob (float32, staleness 0).

    python benchmarks/studies/templates.py --folder templates [--families qwen3 llama3_1] [--steps 3]
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

RECIPE = ROOT / "configs/recipes/countdown_tiny.yaml"
PARSERS = {"qwen2_5": "qwen25", "qwen3": "qwen25", "llama3_1": "llama3"}
HIDDEN, LAYERS, POSITIONS = 128, 4, 2048
DEADLINE_S = 900
AGENT = """
import json, os, urllib.request
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}

def ask(messages, **fields):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps({"messages": messages, **fields}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json",
         "X-Stainless-Retry-Count": "0"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)["choices"][0]["message"]

problem = json.loads(os.environ["TANDEM_PROBLEM"])["text"]
messages = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": problem}]
texts = []
for turn in range(3):
    answer = ask(messages, tools=[TOOL])
    texts.append(answer["content"] or "")
    calls = answer.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "23"} for call in calls]
    messages += [answer, *(results or [{"role": "user", "content": f"{turn}: and then?"}])]
texts.append(ask([*messages[:3], {"role": "user", "content": "Once more."}], tools=[TOOL])["content"] or "")  # rewritten
texts.append(ask(messages[:2], tools=[TOOL])["content"] or "")  # the first question, again
texts.append(ask([{"role": "user", "content": "In short: " + problem}])["content"] or "")  # a sub-agent
print(json.dumps({"reward": len(set("".join(texts))) / 50}))
"""


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
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    run = max(runs.iterdir(), key=lambda one: one.stat().st_mtime)
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
        "calls": sum(row.get("reward/part/unread_calls", 0.0) for row in rows) / len(rows),
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
    print(
        "| template | turns compared | that differ | requests retracted | sequences per episode | greatest gap, nats |"
    )
    print("|---|---|---|---|---|---|")
    for family in given.families:
        row = play(folder, family, given)  # a turn that differs ends the run, so the command fails
        print(
            f"| {family} | {row['turns']:.0f} | 0 | {row['retracted']} | {row['sequences']:.2f} | {row['gap']:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
