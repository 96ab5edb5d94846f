"""``tandem init``: writes a small experiment with its own data and reward, as a start for the user's."""

import contextlib
import re
import shlex
from pathlib import Path

import yaml

from configs.reading.named_files import MODEL_TO_CHOOSE, fix_model_path
from launch.checks.arguments import BadInput, as_bad_input, check_new_folder
from parallel.planning.architecture import architecture_of
from rollout.tokenizer_files import TokenizerFiles

CONFIG = "experiment.yaml"
NEW_TOKENS = 512

_YAML = """\
# An RL experiment on your own data, with your own reward. `tandem schema` explains every field; fields left out have their default.
# Relative paths start at the folder in which you call `tandem`: call it in this folder.
name: {name}
steps: 100

model:
  path: {model}                      # a Hugging Face folder: config.json, *.safetensors, tokenizer
  # chat_template_kwargs: {{enable_thinking: false}}   # arguments of its chat template

task:
  type: jsonl                        # or a .parquet file: a problem per line or row
  train_path: train.jsonl
  heldout_path: heldout.jsonl        # measured before, during and after training; leave it out to measure nothing
  prompt_field: prompt
  answer_field: answer               # the reward's `reference`; text or a number, never empty
  apply_chat_template: {template}
  # system_prompt: You are a careful mathematician.

reward:                              # the default for jsonl is math_verify: 1 for the reference's number or formula, else 0
  type: function
  function: my_reward:score          # my_reward.py, in this folder
  timeout_s: 10                      # of one call; a later result is not scored
# Several rewards, each with a factor:
#   type: weighted
#   parts:
#     right: {{type: function, function: "my_reward:score"}}
#     short: {{type: overlong, buffer_tokens: 64, weight: 0.5}}

rollout:
  prompts_per_step: 32
  group_size: 8                      # responses per prompt
  max_new_tokens: {new_tokens}
learner:
  token_budget: 8192                 # most tokens of one forward pass
  optimizer: {{lr: 1.0e-6}}

evaluation: {{every: 20}}              # steps
checkpoint: {{every: 20}}              # steps; `tandem resume RUN` continues from the newest
"""

_REWARD = '''\
"""The reward of this experiment."""


def score(prompt, response, reference, row):
    """1 for a right answer, else 0. Held-out accuracy is the share of responses with a reward of at least 1.

    prompt, response, reference: text. row: the whole record of the data file, a dict; leave the parameter out if you do not need it.
    Returns a number, or (number, parts) with parts a dict of numbers, which are recorded as reward/part/NAME.
    """
    right = response.strip() == reference
    return float(right), {"length": len(response)}
'''


def make_experiment(folder: Path, model: Path | None) -> None:
    """Write the folder and print the next commands. Raises BadInput if the folder already exists, or if the model's does
    not."""
    with as_bad_input():
        check_new_folder("FOLDER", folder)
    if model is not None and not model.is_dir():
        raise BadInput(f"--model {model}: no such folder; {fix_model_path(model)}")
    path = MODEL_TO_CHOOSE if model is None else model.resolve()
    name = re.sub(r"[^A-Za-z0-9]", "-", folder.name).strip("-")[:100] or "experiment"  # as RunName
    folder.mkdir(parents=True)
    # Quoted, since a name may look like a number.
    quoted_name, quoted_path = (yaml.safe_dump(text, default_style='"').strip() for text in (name, str(path)))
    values = {"template": _template(path), "new_tokens": _new_tokens(path)}
    (folder / CONFIG).write_text(_YAML.format(name=quoted_name, model=quoted_path, **values))
    (folder / "my_reward.py").write_text(_REWARD)
    for file, numbers in (("train.jsonl", range(10, 42)), ("heldout.jsonl", range(42, 50))):
        row = '{{"prompt": "{a}+{b}=", "answer": "{sum}", "level": {level}}}\n'.format
        rows = (row(a=a, b=b, sum=a + b, level=a // 10) for a in numbers for b in (7, 25))
        (folder / file).write_text("".join(rows))
    change = f"set model.path in {CONFIG}, " if model is None else ""
    print(f"wrote {folder}: {CONFIG}, my_reward.py, train.jsonl, heldout.jsonl (examples, to be replaced)")
    steps = f"cd {shlex.quote(str(folder))}; {change}tandem train {CONFIG} --dry-run"
    print(f"next: {steps}; then the same without --dry-run")


def _template(model: Path) -> str:
    """The value of ``apply_chat_template`` that fits the model, and why. A model that cannot be read is left to the checks
    before a start."""
    with contextlib.suppress(ValueError):
        if TokenizerFiles.reads(model) and not TokenizerFiles(model).chat_template:
            return "false         # the model has no chat template: the prompt's text stands as it is"
    return "true          # false for a base model: the prompt's text stands as it is"


def _new_tokens(model: Path) -> str:
    """The value of ``max_new_tokens`` that leaves room for prompts, with the reason if it is not the usual one."""
    with contextlib.suppress(ValueError):
        context = architecture_of(model).max_positions
        if context < 2 * NEW_TOKENS:
            return f"{context // 2:<18} # half of the model's context of {context} tokens; the rest is for prompts"
    return str(NEW_TOKENS)
