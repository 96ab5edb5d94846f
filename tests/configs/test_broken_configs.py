"""Configs that cannot work, and what is said of each: the field, its value, what is wrong and what to write
instead.

Every one goes through the command's own entry point, which must end with exit code 2, having written and
started nothing.
"""

import errno
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.loader import ConfigError, load_config, parse_config
from configs.other_systems.fields import OTHER_FIELDS, WITHOUT_COUNTERPART
from configs.reading.schema_shape import Shape
from configs.schema import RunConfig
from configs.schema.server_contradictions import NEVER_WITH
from launch import cli
from launch.processes.supervisor import Supervisor
from parallel.checkpoints.files import write_manifest
from rollout.servers.served import flags_of_sglang
from tests.support.model_folders import make_model_folder

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_ANSWER = 5

COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "tie_word_embeddings": False}
SINKS = COMMON | {
    "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
    "attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": COMMON | {
        "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    },
    "small-vocabulary": COMMON | {
        "model_type": "qwen3", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    },
    "experts": COMMON | {
        "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "latent": COMMON | {
        "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    },
    "recurrent": COMMON | {
        "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "full_attention_interval": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    },
    "sinks": SINKS,
    "gemma": COMMON | {
        "model_type": "gemma3_text", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "query_pre_attn_scalar": 16, "sliding_window": 16,
        "rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "tie_word_embeddings": True,
    },
    "sinks_float32": SINKS | {"dtype": "float32"},
    "7b": COMMON | {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944,
    },
    "235b": COMMON | {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    },
    "few-positions": COMMON | {
        "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 64,
    },
    "other-kind": {"model_type": "gpt2"},
}  # fmt: skip
SFT = yaml.safe_dump(
    {"kind": "sft", "model": {"path": "dense"}, "data": {"type": "countdown"}, "output": "new"}
)
REWARDS = """\
def score(prompt, response, reference):
    return 0.0


def forgets(prompt, response, reference):
    pass

async def later(prompt, response, reference):
    return None
"""
JUDGE = {
    "type": "judge",
    "urls": ["http://127.0.0.1:9/v1"],
    "model": "m",
    "prompt": "{response}",
    "score_range": [0, 10],
}
BASE = {"model": {"path": "dense"}, "task": {"type": "countdown"}, "rollout": {"max_new_tokens": 14}}


@dataclass(frozen=True, kw_only=True)
class Broken:
    """``text`` is the config, BASE where it is none; ``options`` what else is on the command line. The rest
    is what must be said."""

    options: str = ""
    text: str | None = None
    command: str = "train"
    field: str
    value: str
    error: str
    fix: str


NODES = "launch.nodes={learner: 2, rollout: 2, gpus_per_node: 8}"
TABLE = {
    # ---- the file itself
    "malformed yaml": Broken(
        text="model:\n  path: x\n task: [", field="(YAML syntax)", value="task: [", error="(line 3, column 2)", fix="correct the YAML there"
    ),
    "empty": Broken(text="", field="(the whole file)", value="(empty)", error="the file is empty", fix="write at least `model:`"),
    "no such file": Broken(
        options="CONFIG=runn.yaml", field="CONFIG", value="runn.yaml", error="no such file", fix="did you mean `run.yaml`?"
    ),
    "no such base": Broken(
        text="extends: [grpoo.yaml]", field="extends", value="grpoo.yaml", error="no such file", fix="did you mean `grpo.yaml`?"
    ),
    "extends in a circle": Broken(
        options="CONFIG=circle_a.yaml", field="extends", value="circle_a.yaml", error="circle_a.yaml -> circle_b.yaml -> circle_a.yaml",
        fix="remove one of these extends",
    ),
    "repeated key": Broken(
        text="steps: 1\nsteps: 2", field="steps", value="steps: 2", error="the key is repeated; it is set first in line 1",
        fix="keep one of them",
    ),
    "no override": Broken(options="nonsense", field="(override)", value="nonsense", error="key.sub=value", fix="rollout.group_size=8"),
    "overrides first": Broken(
        options="CONFIG=steps=3 run.yaml", field="CONFIG", value="steps=3", error="this is an override",
        fix="CONFIG first: `CONFIG steps=3`",
    ),
    "a second file": Broken(
        options="grpo.yaml", field="(override)", value="grpo.yaml", error="key.sub=value", fix="`extends=FILE` lays a further file over it"
    ),
    "a name of any length": Broken(
        options=f"CONFIG={'x' * 5000}", field="CONFIG", value=f"{'x' * 97}...", error="File name too long", fix="check its name"
    ),
    "dots in a file": Broken(
        text="learner.token_budget: 8192", field="learner.token_budget", value="8192", error="unknown key",
        fix="in YAML write `learner: {token_budget: 8192}`",
    ),
    "links in a circle": Broken(
        options="CONFIG=loop.yaml", field="CONFIG", value="loop.yaml", error="links lead in a circle", fix="make the link point to a file"
    ),
    "base of links in a circle": Broken(
        text="extends: loop.yaml", field="extends", value="loop.yaml", error="links lead in a circle", fix="make the link point to a file"
    ),
    "a pipe": Broken(
        options="CONFIG=pipe.yaml", field="CONFIG", value="pipe.yaml", error="a pipe, a socket or a device", fix="name a YAML file"
    ),
    "a base that never ends": Broken(
        text="extends: /dev/zero", field="extends", value="/dev/zero", error="a pipe, a socket or a device", fix="name a YAML file"
    ),
    "a file of weights": Broken(
        options="CONFIG=large.bin", field="CONFIG", value="large.bin", error="20,000,000 bytes; no config", fix="name a YAML file"
    ),
    "a folder of a similar name": Broken(
        options="CONFIG=stopped_earli", field="CONFIG", value="stopped_earli", error="no such file", fix="correct the name"
    ),
    "model of links in a circle": Broken(
        options="model.path=loop", field="model.path", value="loop", error="no such folder", fix="a symbolic link to loop, which is not"
    ),
    # ---- overrides
    "blanks around the sign": Broken(
        options="steps = 5", field="(override)", value="steps = 5", error="the shell took this override apart", fix="steps=5"
    ),
    "a blank before the sign": Broken(
        options="steps =5", field="(override)", value="steps =5", error="the shell took this override apart", fix="steps=5"
    ),
    "a blank after the sign": Broken(
        options="steps= 5 seed=1", field="(override)", value="steps= 5", error="the shell took this override apart", fix="steps=5"
    ),
    "braces without quotes": Broken(
        options="layout={tp:\\ 2,\\ dp:\\ 1} seed=1", field="(override)", value="layout={tp: 2, dp: 1}", error="took this override apart",
        fix="quote the override, since the shell takes it apart at blanks: 'layout={tp: 2, dp: 1}'",
    ),
    "braces that the shell took": Broken(
        options="layout=tp:2", field="layout", value="tp:2", error="must be a block of keys", fix="'layout={tp: 2, ...}'"
    ),
    "no blank after a colon": Broken(
        options="task={type:jsonl}", field="task.type:jsonl", value="null", error="unknown key", fix="after the colon: `type: jsonl`"
    ),
    "a key to add": Broken(
        options="++steps=5", field="(override)", value="++steps=5", error="key.sub=value", fix="write `steps=5`: a key is set"
    ),
    "a key to take away": Broken(
        options="~critic", field="(override)", value="~critic", error="key.sub=value", fix="write `critic=null` where it may be nothing"
    ),
    "a colon for the sign": Broken(
        options="steps:5", field="(override)", value="steps:5", error="key.sub=value", fix="write `steps=5`"
    ),
    **{f"{name} of other systems": Broken(
        options=f"{name}=8", field=name, value="8", error="unknown key", fix=fix,
    ) for name, fix in [
        ("batch_size", "here it is `rollout.prompts_per_step` prompts, each with `rollout.group_size` responses"),
        ("rollout.n_samples_per_prompt", "here it is `rollout.group_size`"),
        ("learner.ppo_micro_batch_size_per_gpu", "here it is `learner.token_budget`"),
        ("learning_rate", "here it is `learner.optimizer.lr`"),
        ("ppo_mini_batch_size", "split into: train_batch_size / ppo_mini_batch_size, such as 1024 / 256 = 4"),
        ("mask_truncated_completions", "here it is `learner.truncated_responses`, mask"),
        ("max_prompt_length", "max_prompt_length has no counterpart: a prompt may be as long as"),
        # as slime writes its flags
        ("rollout-batch-size", "here it is `rollout.prompts_per_step` prompts, each with `rollout.group_size` responses"),
        ("use-tis", "here it is `correction=decoupled_token_is`"),
        ("eps-clip-high", "here it is `objective.clip_high`"),
        ("hf-checkpoint", "here it is `model.path`"),
        ("num-rollout", "here it is `steps`"),
        ("rollout-stop", "here it is `rollout.stop`"),
        ("rollout-stop-token-ids", "here it is `rollout.stop`, the texts of these tokens"),
        ("rollout.stop_strings", "here it is `rollout.stop`, texts that stay"),
        ("weight-decay", "it exists as `learner.optimizer.weight_decay` and `critic.optimizer.weight_decay`"),
    ]},
    "an own field with dashes": Broken(
        options="rollout.group-size=8", field="rollout.group-size", value="8", error="unknown key", fix="did you mean `group_size`?"
    ),
    # verl's commonest overrides, by the whole path where the last part alone is a name of Tandem's too
    **{f"verl's {name}": Broken(
        options=f"{name}=1", field=field, value="1", error="unknown key", fix=fix,
    ) for name, field, fix in [
        ("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref", "actor_rollout_ref.actor.optim.lr, here it is `learner.optimizer.lr`"),
        ("actor_rollout_ref.actor.optim.weight_decay", "actor_rollout_ref", "here it is `learner.optimizer.weight_decay`"),
        ("actor_rollout_ref.actor.strategy", "actor_rollout_ref", "actor_rollout_ref.actor.strategy has no counterpart: the learner is"),
        ("actor_rollout_ref.model.path", "actor_rollout_ref", "actor_rollout_ref.model.path, here it is `model.path`"),
        ("actor_rollout_ref.rollout.temperature", "actor_rollout_ref", "rollout.temperature, here it is `rollout.temperature`"),
        ("actor_rollout_ref.rollout.top_p", "actor_rollout_ref", "actor_rollout_ref.rollout.top_p, here it is `rollout.top_p`"),
        ("actor_rollout_ref.rollout.n", "actor_rollout_ref", "n, here it is `rollout.group_size`"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "actor_rollout_ref", "val_kwargs.n, here it is `evaluation.samples_per_prompt`"),
        ("critic.optim.lr", "critic.optim", "critic.optim.lr, here it is `critic.optimizer.lr`"),
        ("critic.grad_clip", "critic.grad_clip", "here it is `critic.optimizer.clip_grad`"),
        ("algorithm.adv_estimator", "algorithm", "adv_estimator, here it is `advantage.type`"),
        ("algorithm.gamma", "algorithm", "algorithm.gamma, here it is `advantage.gamma`"),
        ("algorithm.lam", "algorithm", "algorithm.lam, here it is `advantage.lam`"),
        ("data.train_batch_size", "data", "train_batch_size, here it is `rollout.prompts_per_step`"),
        ("trainer.total_epochs", "trainer", "total_epochs, here it is `steps`"),
        ("algorithm.nonsense", "algorithm", "not known here: nonsense"),
    ]},
    # algorithms, which are an objective and an advantage
    **{f"{block} {name}": Broken(
        options=option.format(block=block, name=name), field=block, value=name, error=error, fix=fix,
    ) for block, name, fix in [
        ("objective", "grpo", "GRPO is `advantage: {type: grpo}` with `objective: {type: clipped}`"),
        ("objective", "ppo", "PPO is `advantage: {type: gae}`"),
        ("objective", "dapo", "`objective: {type: clipped, clip_high: 0.28}`"),
        ("objective", "dr_grpo", "`advantage: {type: grpo, normalize_by_std: false}`"),
        ("objective", "drgrpo", "`aggregation: {type: sequence_mean_token_sum_over_constant, constant: 1024}`"),
        ("objective", "reinforce", "REINFORCE is `objective: {type: policy_gradient}`"),
        ("objective", "rloo", "RLOO is `advantage: {type: rloo}`"),
        ("advantage", "ppo", "PPO is `advantage: {type: gae}`"),
        ("advantage", "dr_grpo", "`advantage: {type: grpo, normalize_by_std: false}`"),
        ("advantage", "reinforce++", "REINFORCE++ is `advantage: {type: reinforce_pp}`"),
        ("advantage", "gspo", "GSPO is `objective: {type: gspo}`"),
    ] for option, error in [("{block}.type={name}", "unknown variant"), ("{block}={name}", "must be a block of keys")]},
    "a kind of task is no algorithm": Broken(
        options="task.type=grpo", field="task.type", value="grpo", error="unknown variant", fix="variants: countdown, gsm8k, jsonl"
    ),
    "true for a block that needs no key": Broken(
        options="tracking.wandb=true", field="tracking.wandb", value="true", error="must be a block of keys",
        fix="write `tracking.wandb={}`, or give it keys of: project, entity",
    ),
    "true for a block that needs no key, in a file": Broken(
        text="tracking: {wandb: true}", field="tracking.wandb", value="true", error="must be a block of keys", fix="write `wandb: {}`"
    ),
    "false for a block that is off": Broken(
        options="tracking.wandb=false", field="tracking.wandb", value="false", error="must be a block of keys",
        fix="write `tracking.wandb=null`",
    ),
    "true for a block that needs a key": Broken(
        options="kl.model=true", field="kl.model", value="true", error="must be a block of keys", fix="give a block with keys of: path"
    ),
    **{f"path with {path}": Broken(
        options=f"{field}={path}", field=field, value=path, error="is not expanded", fix=f"write the path out, {Path.home()}",
    ) for field, path in [("model.path", "$HOME/m"), ("launch.runs_dir", "~/runs"), ("resume", "${HOME}/run")]},
    "bytes that are no text": Broken(
        options="name=\udcce\udcb4", field="(override)", value="name=\\udcce", error="not UTF-8 text", fix="set LC_ALL=C.UTF-8"
    ),
    # ---- fields
    "unknown key": Broken(
        options="learner.optimiser.lr=1", field="learner.optimiser", value="{lr: 1}", error="unknown key", fix="did you mean `optimizer`?"
    ),
    "wrong type": Broken(
        options="steps=many", field="steps", value="many", error="must be a whole number", fix="correct the value (default: 100)"
    ),
    "no model": Broken(text="task: {type: countdown}", field="model", value="(not set)", error="required, but not set", fix="add `model`"),
    "unknown task": Broken(
        options="task.type=countdwn", field="task.type", value="countdwn", error="unknown variant", fix="did you mean `countdown`?"
    ),
    "unknown preset": Broken(
        options="correction=decoupled_token_iss", field="correction.preset", value="decoupled_token_iss", error="no such preset",
        fix="did you mean `decoupled_token_is`?",
    ),
    "key of another system": Broken(
        options="correction={verl: {rollout_is: token, rollout_token_veto_threshold: 1.0}}",
        field="correction.verl.rollout_token_veto_threshold", value="1.0", error="would reject what the two policies agree on", fix="1e-4",
    ),
    "stop texts and a router": Broken(
        options="rollout.stop=['1'] rollout.router={}", field="rollout.stop, rollout.router", value="rollout.stop: ['1']",
        error="drops the patterns of the texts", fix="remove one of them",
    ),
    **{f"a stop text {name}": Broken(options=f"rollout.stop={value}", field=field, value=shown, error=error, fix=fix)
       for name, value, field, shown, error, fix in [
        ("alone", "</search>", "rollout.stop", "</search>", "must be a list", "rollout.stop: [</search>]"),
        ("of nothing", "['']", "rollout.stop.0", "''", "must have at least 1 character", "correct the value"),
        ("too long for SGLang", f"[{'x' * 61}]", "rollout.stop.0", "xxx", "must have at most 60 characters", "correct the value"),
        ("too many for SGLang", f"[{','.join('x' * 33)}]", "rollout.stop", "[x, x", "must have at most 32 items", "correct the value"),
        ("that no response can have", "[</search>]", "rollout.stop", "</search>", "turns 1</search>1 into '1<unk>",
         "use a text that its tokens can write"),
    ]},
    "truncated sampling": Broken(
        options="rollout.top_p=0.9", field="rollout.top_p, rollout.top_k", value="rollout.top_p: 0.9",
        error="SGLang returns the kept ids only with a finite top_k", fix="set top_k, up to 4096, or top_p: 1.0",
    ),
    "min_p without top_k": Broken(
        options="rollout.min_p=0.1", field="rollout.min_p, rollout.top_k", value="rollout.min_p: 0.1",
        error="SGLang returns the kept ids only with a finite top_k", fix="set top_k, up to 4096, or min_p: 0.0",
    ),
    "one choice": Broken(
        options="rollout.top_k=1", field="rollout.top_k", value="1", error="leaves no choice to learn from", fix="set top_k to 2 or more",
    ),
    "an evaluation from no ids": Broken(
        options="evaluation.top_k=0", field="evaluation.top_k", value="0", error="leaves no id", fix="-1 for all ids, or to 1 or more",
    ),
    "more kept ids than SGLang returns": Broken(
        options="rollout.top_k=5000", field="rollout.top_k", value="5000", error="less than or equal to 4096", fix="at most 4096",
    ),
    **{f"kept ids with {name}": Broken(
        options=f"rollout.top_k=20 {setting}", field=f"rollout.top_k, {field}", value="rollout.top_k: 20",
        error=error, fix="remove it, or remove rollout.top_p, top_k and min_p",
    ) for name, setting, field, error in [
        ("a router", "rollout.router={}", "rollout.router", "drops the request for kept ids"),
        ("drafts", "rollout.server_args={speculative-algorithm: EAGLE}", "rollout.server_args", "few of its drafting methods"),
        ("a lower limit", "rollout.server_args={sampling_mask_max_tokens: 19}", "rollout.server_args", "SGLang refuses a top_k above it"),
        ("ascend", "rollout.server_args={sampling-backend: ascend}", "rollout.server_args", "returns no kept ids"),
        ("a seeded min_p", "rollout.min_p=0.1 rollout.server_args={enable-deterministic-inference: true}", "rollout.server_args",
         "seeded sampler refuses min_p"),
        ("separate decoding", "rollout.server_args={disaggregation_mode: decode}", "rollout.server_args", "were not tried"),
    ]},
    "siblings that cannot differ": Broken(
        options="rollout.group_size=1 rollout.dynamic_sampling={type: resample}", field="rollout.dynamic_sampling.type, rollout.group_size",
        value="rollout.group_size: 1 (command line)", error="siblings that can differ", fix="raise it, or use type: none",
    ),
    "response longer than a micro-batch": Broken(
        options="rollout.max_new_tokens=512 learner.token_budget=256", field="rollout.max_new_tokens, learner.token_budget",
        value="512 (command line)", error="leaves no room for a prompt", fix="raise the budget",
    ),
    "gae without a critic": Broken(
        options="advantage={type: gae} critic=null", field="advantage.type", value="gae", error="needs the values of a critic",
        fix="remove `critic: null`",
    ),
    "time limit": Broken(
        options="launch.slurm.time=tomorrow", field="launch.slurm.time", value="tomorrow",
        error="must be hours:minutes:seconds, such as 12:00:00", fix="correct the value (default: 24:00:00)",
    ),
    **{f"time limit {time}": Broken(
        options=f"launch.slurm.time={time}", field="launch.slurm.time", value=time, error=error,
        fix="correct the value (default: 24:00:00)",
    ) for time, error in [
        ("12:00", "must be hours:minutes:seconds"),
        ("99:99:99", "must be hours:minutes:seconds"),
        ("2-24", "must be hours:minutes:seconds"),
        ("5", "must be text"),
    ]},
    "unknown way to choose a server": Broken(
        options="rollout.router.policy=least", field="rollout.router.policy", value="least", error="not one of the choices",
        fix="round_robin",
    ),
    "port out of range": Broken(
        options="rollout.first_port=80", field="rollout.first_port", value="80", error="greater than or equal to 1024", fix="at least 1024"
    ),
    "name too long": Broken(
        options=f"name={'n' * 101}", field="name", value="n" * 90, error="at most 100 characters", fix="default: run"
    ),
    "name too long for Slurm": Broken(
        command="slurm", options=f"name={'n' * 300}", field="name", value="n" * 90, error="at most 100 characters", fix="default: run"
    ),
    "numbers of a problem": Broken(
        options="task.num_numbers=6", field="task.num_numbers", value="6", error="less than or equal to 5", fix="at most 5"
    ),
    "seed": Broken(options=f"seed={2**64}", field="seed", value=str(2**64), error="less than 9223372036854775808", fix="default: 0"),
    "negative seed": Broken(options="seed=-1", field="seed", value="-1", error="greater than or equal to 0", fix="at least 0"),
    "numbers of a problem of a warm start": Broken(
        command="sft", text=SFT, options="data.task.num_numbers=9", field="data.task.num_numbers", value="9",
        error="less than or equal to 5", fix="at most 5",
    ),
    "wrong answers of a single number": Broken(
        command="sft", text=SFT, options="data.task.num_numbers=1", field="data.noise, data.task.num_numbers",
        value="data.noise: 0.3 (default), data.task.num_numbers: 1", error="needs wrong answers", fix="use noise=0 or more numbers",
    ),
    # ---- numbers beyond reason
    **{f"beyond reason: {field}={value}": Broken(
        options=f"{field}={value}", field=field, value="(command line)", error=f"beyond reason: {error}", fix=f"use at {fix}",
    ) for field, value, error, fix in [
        ("steps", "1" + 23 * "0", "at a step a second", "most 1_000_000_000"),
        ("rollout.group_size", "1000000000", "nobody samples so many responses", "most 65_536"),
        ("rollout.prompts_per_step", "1000000000", "no cluster runs a million of these", "most 1_000_000"),
        ("rollout.temperature", "1e30", "every token is nearly as likely", "most 100"),
        ("rollout.temperature", "1e-9", "SGLang takes the likeliest token there", "least 0.001"),
        ("evaluation.temperature", "1e30", "every token is nearly as likely", "most 100"),
        ("learner.optimizer.lr", "1e6", "Adam moves every weight by about lr in a step", "most 1"),
        ("learner.token_budget", "9999999999999999999999", "positions in a batch are numbers of 32 bits", "most 2_147_483_647"),
        ("kl.coefficient", "1e6", "the rest of the loss would not count beside it", "most 1_000"),
        ("layout.tp", "1" + 23 * "0", "no cluster runs a million", "most 1_000_000"),
        ("launch.start_timeout_s", "1e30", "ZeroMQ waits for 24 days at most", "most 2_000_000"),
        ("task.max_number", "1" + 30 * "0", "no small model adds such numbers", "most 1_000_000"),
    ]},
    **{f"an answer of another form: {options}": Broken(
        options=options, field=f"{field}, task.type", value=f"{field}: {kind} (command line), task.type: countdown",
        error="cannot compare a response with the answers of task.type=countdown", fix=f"use {field}=countdown",
    ) for options, field, kind in [
        ("reward.type=gsm8k", "reward.type", "gsm8k"),
        ("reward.type=weighted reward.parts.right.type=math_verify", "reward.parts.right.type", "math_verify"),
    ]},
    "a reward that is never read": Broken(
        options="reward.type=countdown environment.type=agent environment.command=[./agent] environment.reward=agent",
        field="reward, environment.reward", value="environment.reward: agent (command line)",
        error="the agent prints the reward of its episode", fix="remove `reward`",
    ),
    "a mask of parts of a sequence beside geometric means": Broken(
        options="objective.type=gmpo correction.weight.level=segment correction.weight.bound=mask",
        field="correction.weight.bound, correction.reject", value="correction.weight.bound: mask (command line)",
        error="one weight of zero would drop the whole sequence",
        fix="set correction.weight.bound=truncate and correction.weight.lower=null",
    ),
    "a last learning rate without a decay": Broken(
        options="learner.optimizer.min_lr=1e-9", field="learner.optimizer.min_lr, learner.optimizer.schedule",
        value="learner.optimizer.min_lr: 1.0e-09 (command line)", error="schedule=constant does not decay",
        fix="remove it, or set schedule",
    ),
    "a single sibling": Broken(
        options="rollout.group_size=1", field="advantage.type, rollout.group_size", value="rollout.group_size: 1 (command line)",
        error="so there is no baseline", fix="use 2 or more",
    ),
    **{f"bounds without 1: {options}": Broken(
        options=options, field=field, value=value, error=f"{error} the ratio 1 of two engines that agree",
        fix="use bounds on both sides of 1",
    ) for options, field, value, error in [
        ("correction.weight.upper=0.5", "correction.weight.upper", "0.5", "correction.weight.upper=0.5 lowers"),
        ("correction.weight={bound: mask, lower: 2, upper: 3}", "correction.weight.lower", "2", "correction.weight: [2.0, 3.0] leaves out"),
        ("correction.weight={bound: clip, lower: 0.1, upper: 0.5}", "correction.weight.upper", "0.5", "[0.1, 0.5] leaves out"),
        (
            "correction.reject=[{rule: k3, upper: 0.1},{rule: ratio, lower: 0, upper: 0.5}]", "correction.reject", "0.5",
            "[0.0, 0.5] of rule 2 leaves out",
        ),
    ]},
    "bounds that no ratio can pass": Broken(
        options="correction.reject=[{rule: ratio, level: sequence, lower: 1e-12, upper: 100}]", field="correction.reject",
        value="1.0e-12", error="[1e-12, 100.0] is beyond the ratios that a rule sees, which are bounded to [2.1e-09, 4.9e+08]",
        fix="lower=0 for none below",
    ),
    # ---- room for a prompt
    "response longer than the model's positions": Broken(
        options="rollout.max_new_tokens=100000 learner.token_budget=200000", field="rollout.max_new_tokens, learner.token_budget",
        value="rollout.max_new_tokens: 100000", error="within learner.token_budget=200000, max_position_embeddings=32768",
        fix="lower rollout.max_new_tokens",
    ),
    "response longer than the servers' pool": Broken(
        options="rollout.max_total_tokens=14", field="rollout.max_total_tokens", value="rollout.max_total_tokens: 14 (command line)",
        error="leaves no room for a training prompt", fix="raise rollout.max_total_tokens",
    ),
    # ---- batches
    "prompts over minibatches": Broken(
        options="rollout.prompts_per_step=10 learner.minibatches=4", field="rollout.prompts_per_step, learner.minibatches",
        value="rollout.prompts_per_step: 10", error="does not divide", fix="use 8 or 12 prompts",
    ),
    "sequences over ranks": Broken(
        options="layout.dp=3", field="layout.dp", value="layout.dp: 3 (command line)", error="a minibatch of 256 sequences",
        fix="use 30 or 33 prompts",
    ),
    # ---- layouts
    "heads": Broken(
        options="layout.tp=3 layout.dp=1", field="layout.tp", value="3 (command line)", error="num_attention_heads=4",
        fix="use tp=2 or tp=4",
    ),
    "layers": Broken(
        options="layout.pp=3 layout.dp=1", field="layout.pp", value="3 (command line)", error="num_hidden_layers=4", fix="use pp=2 or pp=4"
    ),
    "chunks without a pipeline": Broken(
        options="layout.vpp=2", field="layout.vpp, layout.pp", value="layout.vpp: 2", error="of which pp=1 has one", fix="or vpp=1"
    ),
    "sp without tp": Broken(
        options="layout.sp=true", field="layout.sp, layout.tp", value="layout.sp: true", error="of which tp=1 has one",
        fix="set tp=2 or more, or sp=false",
    ),
    "experts": Broken(
        options="model.path=experts layout.ep=3 layout.dp=3 rollout.prompts_per_step=3", field="layout.ep", value="3 (command line)",
        error="does not divide the model's num_experts=8", fix="use ep=1",
    ),
    "experts of a dense model": Broken(
        options="layout.ep=2", field="layout.ep", value="2 (command line)", error="of which this qwen3 model has none", fix="use ep=1"
    ),
    "context parallel": Broken(
        options=f"--dry-run layout.cp=3 rollout.replicas=2 {NODES}", field="layout.dp", value="auto",
        error="not a multiple of the 3 that one copy of the model takes (tp=1 * cp=3 * pp=1)", fix="change these",
    ),
    "heads of a server": Broken(
        options="rollout.tp=3", field="rollout.tp", value="3 (command line)", error="num_attention_heads=4", fix="use one of [1, 2, 4]"
    ),
    # ---- files
    "the tiny model of a recipe": Broken(
        options="model.path=models/countdown-tiny-warm", field="model.path", value="models/countdown-tiny-warm", error="no such folder",
        fix="make it: `tandem make-tiny-model models/countdown-tiny-random`, then `tandem sft configs/recipes/countdown_tiny_sft.yaml`",
    ),
    "no model folder": Broken(
        options="model.path=densee", field="model.path", value="densee", error="no such folder", fix="did you mean `dense`?"
    ),
    "another kind of model": Broken(
        options="model.path=other-kind", field="model.path", value="other-kind", error="model_type 'gpt2' is not supported", fix="qwen3"
    ),
    "weights cut short": Broken(
        options="model.path=cut-short", field="model.path", value="cut-short", error="so it was cut short", fix="download or copy it again"
    ),
    "weights of a critic cut short": Broken(
        options="advantage={type: gae} critic.model={path: cut-short}", field="critic.model.path", value="cut-short",
        error="so it was cut short", fix="download or copy it again",
    ),
    "weights of a warm start of another model": Broken(
        command="sft", text=SFT, options="model.path=another-size", field="model.path", value="another-size",
        error="model.embed_tokens.weight is (64, 64), not (32, 64)", fix="use the config.json that came with these weights",
    ),
    "pickled weights": Broken(
        options="model.path=pickled", field="model.path", value="pickled", error="but pytorch_model.bin, which is not read",
        fix="a copy with safetensors",
    ),
    "folder around the folder": Broken(
        options="model.path=around", field="model.path", value="around", error="has no config.json", fix="did you mean `around/model`?"
    ),
    "more layers than any model has": Broken(
        options="model.path=endless", field="model.path", value="endless", error="num_hidden_layers=1000000000000", fix="restore it"
    ),
    "a model's config that nests too deep": Broken(
        options="model.path=deep", field="model.path", value="deep", error="nests its values too deep", fix="restore it"
    ),
    "no task file": Broken(
        options="task={type: gsm8k, train_path: trian.jsonl}", field="task.train_path", value="trian.jsonl", error="no such file",
        fix="did you mean `train.jsonl`?",
    ),
    "broken line": Broken(
        options="task={type: gsm8k, train_path: train.jsonl}", field="task.train_path", value="train.jsonl",
        error="train.jsonl:line 2: not valid JSON", fix="correct or remove it",
    ),
    "no such reward function": Broken(
        options="reward={type: function, function: my_rewards:scroe}", field="reward.function", value="my_rewards:scroe",
        error="my_rewards has no 'scroe'", fix="did you mean 'score'?",
    ),
    "reward function that returns nothing": Broken(
        options="reward={type: function, function: my_rewards:forgets}", field="reward.function", value="my_rewards:forgets",
        error="a number, not NoneType None (my_rewards.py:5 in forgets)", fix="return a finite number",
    ),
    "reward function among others": Broken(
        options="reward.type=weighted reward.parts={mine: {type: function, function: my_rewards:later}}",
        field="reward.parts.mine.function", value="my_rewards:later",
        error="a number, not NoneType None (my_rewards.py:8 in later)", fix="return a finite number",
    ),
    "reward module that ends the process": Broken(
        options="reward={type: function, function: script:score}", field="reward.function", value="script:score",
        error="ends the process: SystemExit: 0 (script.py:2", fix="under `if __name__ == '__main__':`",
    ),
    "judge without its key": Broken(
        options="reward={type: judge, urls: ['http://127.0.0.1:9/v1'], model: m, prompt: '{response}', score_range: [0, 10], "
        "api_key_variable: NO_SUCH_KEY}",
        field="reward.api_key_variable", value="NO_SUCH_KEY", error="reward.api_key_variable=NO_SUCH_KEY is not set in the environment",
        fix="export it before the start",
    ),
    "judge with a stray brace": Broken(
        text=yaml.safe_dump(BASE | {"reward": JUDGE | {"prompt": 'Answer {"score": 1}. {response}'}}), field="reward.prompt",
        value='Answer {"score": 1}', error="cannot be filled in", fix="a literal brace is written twice",
    ),
    "judge with a pattern of two groups": Broken(
        text=yaml.safe_dump(BASE | {"reward": JUDGE | {"score_pattern": "(a)(b)"}}), field="reward.score_pattern", value="(a)(b)",
        error="has 2 groups", fix="put only the score into ( )",
    ),
    "code without rows": Broken(
        options="reward={type: code}", field="reward.type, task.type", value="code", error="task.type=countdown has none",
        fix="use task.type=jsonl",
    ),
    "a mixture without records": Broken(
        options="sampler={type: mixture, field: source, weights: {math: 3, code: 1}}", field="sampler.type, task.type", value="mixture",
        error="task.type=countdown has none", fix="use task.type=jsonl, or leave `sampler` out",
    ),
    "a mixture of nothing": Broken(
        options="task={type: gsm8k, train_path: sound.jsonl} sampler={type: mixture, field: answer, weights: {math: 0}}",
        field="sampler.weights", value="{math: 0}", error="no source with a weight above 0", fix="give at least one",
    ),
    "code without tests": Broken(
        options="task={type: gsm8k, train_path: sound.jsonl} reward={type: code, sandbox: none}", field="task.train_path",
        value="sound.jsonl", error="sound.jsonl:line 1: field `tests` is missing", fix="this record has `question`, `answer`",
    ),
    "code with tests that are no tests": Broken(
        options="task={type: gsm8k, train_path: sound.jsonl} reward={type: code, sandbox: none, tests_field: question}",
        field="task.train_path", value="sound.jsonl", error="sound.jsonl:line 1: field `question` holds a test that is not Python",
        fix="correct it, or drop the record",
    ),
    "critic of another vocabulary": Broken(
        options="advantage={type: gae} critic.model={path: small-vocabulary}", field="critic.model.path", value="small-vocabulary",
        error="a vocabulary of 32 tokens, the policy's has 64", fix="give one of the policy's model family",
    ),
    "a teacher without a coefficient": Broken(
        options="kl={model: {path: dense}}", field="kl.model, kl.coefficient", value="0",
        error="kl.model is the reference of a KL, but kl.coefficient=0 computes none", fix="set kl.coefficient",
    ),
    "a teacher of another vocabulary": Broken(
        options="kl={coefficient: 1.0, model: {path: small-vocabulary}}", field="kl.model.path", value="small-vocabulary",
        error="kl.model has a vocabulary of 32 tokens, the policy's has 64", fix="give one of the policy's model family",
    ),
    "a teacher that is not there": Broken(
        options="kl={coefficient: 1.0, model: {path: dens}}", field="kl.model.path", value="dens", error="no such", fix="dense",
    ),
    "a critic that is not there": Broken(
        options="advantage={type: gae} critic.model.path=dens", field="critic.model.path", value="dens", error="no such", fix="dense",
    ),
    "a teacher's template": Broken(
        options="kl.coefficient=1.0 kl.model.path=dense kl.model.chat_template_kwargs.a=1",
        field="kl.model.chat_template_kwargs", value="a", error="this model reads the policy's tokens", fix="remove it",
    ),
    "critic of fewer positions": Broken(
        options="advantage={type: gae} critic.model={path: few-positions}", field="learner.token_budget",
        value="16384 (default)", error="critic.model has 64 positions (max_position_embeddings), and a sequence may have 16384 tokens",
        fix="lower learner.token_budget",
    ),
    "an own key that is spelt wrongly, with keys of other systems within": Broken(
        options="enviroment={type: chat, options: {n: 5}}", field="enviroment", value="n: 5", error="unknown key",
        fix="did you mean `environment`?",
    ),
    "verl's block of corrections at the top": Broken(
        options="rollout_correction={rollout_is: token, loss_type: ppo_clip}", field="rollout_correction", value="loss_type",
        error="unknown key", fix="here it is `correction: {verl: {...}}`, with verl's keys",
    ),
    "experts in float16": Broken(
        options="model={path: experts, dtype: float16}", field="model.dtype", value="float16",
        error="cannot train a model with experts", fix="use bfloat16",
    ),
    "resume without a checkpoint": Broken(
        options="resume=stopped_early", field="resume", value="stopped_early", error="has no complete checkpoint",
        fix="start again with `tandem train stopped_early/config.yaml`",
    ),
    "resume of a warm start": Broken(
        options="resume=warm_start", field="resume", value="warm_start", error="is a run of kind sft",
        fix="start again with `tandem sft warm_start/config.yaml`",
    ),
    "resume with another form of the optimizer": Broken(
        options="resume=stopped_early learner.optimizer.distributed=false", field="learner.optimizer.distributed", value="false",
        error="`learner.optimizer.distributed` of stopped_early is true, but false was given", fix="or start a new run",
    ),
    "resume with routers that were trained": Broken(
        options="resume=stopped_early learner.freeze_router=true", field="learner.freeze_router", value="true",
        error="`learner.freeze_router` of stopped_early is false, but true was given", fix="or start a new run",
    ),
    "resume of another run": Broken(
        options="resume=stopped_early seed=7", field="resume", value="stopped_early", error="`seed` of stopped_early is 0, but 7 was given",
        fix="or start a new run",
    ),
    "resume of a run of another model": Broken(
        options="resume=stopped_early model.path=7b", field="model.path", value="7b",
        error="`model.path` of stopped_early is dense, but the weights in 7b differ", fix="give the same model, or start a new run",
    ),
    "resume in another precision": Broken(
        options="resume=stopped_early model.dtype=float16", field="model.dtype", value="float16",
        error="`model.dtype` of stopped_early is bfloat16, but float16 was given", fix="or start a new run",
    ),
    "resume with fewer steps than are done": Broken(
        options="resume=stopped_late steps=6", field="resume", value="stopped_late", error="has done 7 steps, more than steps=6",
        fix="give steps=7 or more",
    ),
    "evaluation without held-out problems": Broken(
        command="eval", options="--dry-run task={type: gsm8k, train_path: sound.jsonl}", field="task.heldout_path", value="null",
        error="no held-out problems to evaluate on", fix="name a file of them",
    ),
    "runs in a file": Broken(
        options="launch.runs_dir=run.yaml/sub", field="launch.runs_dir", value="run.yaml/sub", error="Not a directory, in",
        fix="give a folder that can be written to",
    ),
    "runs where nothing can be written": Broken(
        options="--dry-run launch.runs_dir=/proc/foo", field="launch.runs_dir", value="/proc/foo",
        error=", in /proc", fix="give a folder that can be written to",
    ),
    "job's runs where nothing can be written": Broken(
        command="slurm", options="layout.dp=1 launch.runs_dir=/proc/foo", field="launch.runs_dir", value="/proc/foo",
        error=", in /proc", fix="give a folder that can be written to",
    ),
    "warm start's runs where nothing can be written": Broken(
        command="sft", text=SFT, options="launch.runs_dir=/proc/foo", field="launch.runs_dir", value="/proc/foo",
        error=", in /proc", fix="give a folder that can be written to",
    ),
    "output in a file": Broken(
        command="sft", text=SFT, options="--dry-run output=run.yaml/x", field="output", value="run.yaml/x",
        error="Not a directory, in", fix="give a folder that can be written to",
    ),
    "output where nothing can be written": Broken(
        command="sft", text=SFT, options="--dry-run output=/proc/x", field="output", value="/proc/x",
        error=", in /proc", fix="give a folder that can be written to",
    ),
    "output of a name too long": Broken(
        command="sft", text=SFT, options=f"--dry-run output={'n' * 300}", field="output", value="n" * 90,
        error="a name in it (255) may be", fix="use shorter names",
    ),
    "no examples": Broken(
        command="sft", text=SFT, options="data={type: jsonl, path: empty.jsonl}", field="data.path", value="empty.jsonl",
        error="holds no records", fix="write one per line, with the fields `prompt` and `response`",
    ),
    "turns of no conversation": Broken(
        command="sft", text=SFT, options="data={type: jsonl, path: empty.jsonl, learned_turns: all}",
        field="data.learned_turns, data.messages_field", value="data.messages_field: null (default)",
        error="needs the turns of messages_field, which names no field", fix="name the field of the conversations",
    ),
    "existing output": Broken(
        command="sft", text=SFT, options="output=dense",
        field="output", value="dense", error="dense exists already", fix="name a new folder, or remove it first",
    ),
    # ---- servers and ports
    "port taken": Broken(
        options="rollout.first_port=TAKEN", field="rollout.first_port", value="TAKEN", error="port TAKEN on 127.0.0.1 is taken",
        fix="choose another rollout.first_port",
    ),
    "too many ports": Broken(
        options=f"--dry-run {NODES} layout.tp=4 layout.dp=4 rollout.first_port=64990 rollout.replicas=400 launch.nodes.gpus_per_node=200",
        field="rollout.first_port, rollout.replicas", value="rollout.first_port: 64990", error="need ports above 65535",
        fix="choose a lower one",
    ),
    "flag that a field decides": Broken(
        options="rollout.server_args={tp_size: 2}", field="rollout.server_args", value="{tp_size: 2}",
        error="'tp_size' cannot be set there", fix="by their own config fields",
    ),
    "flag in short": Broken(
        options="rollout.server_args={tp: 2}", field="rollout.server_args", value="{tp: 2}",
        error="'tp' cannot be set there: it is short for tp-size", fix="by their own config fields",
    ),
    "flag that SGLang has not": Broken(
        options="rollout.server_args={max_runing_requests: 2}", field="rollout.server_args", value="{max_runing_requests: 2}",
        error="SGLang has no flag 'max_runing_requests'", fix="did you mean 'max-running-requests'?",
    ),
    "flag that SGLang cannot turn off": Broken(
        options="rollout.server_args={no-such-flag: true}", field="rollout.server_args", value="{no-such-flag: true}",
        error="SGLang has no flag 'no-such-flag'", fix="sglang.launch_server --help",
    ),
    "static share": Broken(
        options="rollout.server_args={mem-fraction-static: 8}", field="rollout.server_args", value="{mem-fraction-static: 8}",
        error="is no share of a GPU", fix="give a number between 0 and 1",
    ),
    # ---- aligned numerics
    **{
        f"aligned numerics, {field}": Broken(
            options=f"model.numerics=aligned model.dtype=float32 rollout.dtype=float32 {field}={value}", field=f"{field}, model.numerics",
            value=str(value), error=error, fix=f"set {field}={needed}, or model.numerics=default",
        )
        for field, value, needed, error in (
            ("layout.cp", 2, 1, "splits the attention of a sequence over ranks"),
            ("rollout.dtype", "bfloat16", "float32", "rounds the served weights"),
            ("rollout.precision", "int8", "null", "rounds the served weights"),
            ("rollout.sglang_plugin", "false", "true", "leaves SGLang's own operations in place"),
            ("launch.threads_per_process", 2, 1, "lets a kernel split a sum by its threads"),
        )
    },
    **{
        f"aligned numerics, {field} of 3": Broken(
            options=f"model.numerics=aligned model.dtype=float32 rollout.dtype=float32 {field}=3", field=f"{field}, model.numerics",
            value="3", error="is not a power of two", fix="use 1, 2, 4 or 8, or set model.numerics=default",
        )
        for field in ("layout.tp", "rollout.tp", "model.numerics_pieces")
    },
    "aligned numerics, more server ranks than key/value heads": Broken(
        options="model.numerics=aligned model.dtype=float32 rollout.dtype=float32 rollout.tp=4", field="rollout.tp", value="4",
        error="SGLang on CPU pads num_key_value_heads=2 to a multiple of 4", fix="use a smaller rollout.tp, or model.numerics=default",
    ),
    "aligned numerics, more ranks than pieces": Broken(
        options="model.numerics=aligned model.dtype=float32 rollout.dtype=float32 rollout.tp=4 model.numerics_pieces=2",
        field="rollout.tp, model.numerics_pieces", value="4", error="cannot share a sum of model.numerics_pieces=2 parts",
        fix="set model.numerics_pieces=4, or remove it",
    ),
    "aligned numerics, more pieces than heads": Broken(
        options="model.numerics=aligned model.dtype=float32 rollout.dtype=float32 model.numerics_pieces=8", field="model.numerics_pieces",
        value="8", error="model.numerics_pieces=8 does not divide the model's num_attention_heads=4", fix="use a smaller power of two",
    ),
    "pieces of default numerics": Broken(
        options="model.numerics_pieces=2", field="model.numerics_pieces, model.numerics", value="2",
        error="has no effect with model.numerics=default", fix="remove it, or set model.numerics=aligned",
    ),
    "aligned numerics in float16": Broken(
        options="model.numerics=aligned model.dtype=float16 rollout.dtype=float16", field="model.dtype, model.numerics", value="float16",
        error="was never tried with model.dtype=float16", fix="use float32 or bfloat16, or model.numerics=default",
    ),
    **{
        f"aligned numerics with {flag}": Broken(
            options=f"model.numerics=aligned rollout.server_args={{{flag}: {value}}}",
            field=f"rollout.server_args.{flag}, model.numerics", value=value, error="chooses operations of SGLang's own",
            fix="remove it, or set model.numerics=default",
        )
        for flag, value in (
            ("attention_backend", "intel_amx"), ("attention_data_parallel_size", "2"), ("enable_dp_lm_head", "true"),
        )
    },
    "aligned numerics with experts": Broken(
        options="model.numerics=aligned model.path=experts", field="model.numerics", value="aligned",
        error="covers dense models, and this qwen3_moe has experts", fix="set model.numerics=default",
    ),
    "aligned numerics on CUDA": Broken(
        options="--dry-run --gpu-memory 80 model.numerics=aligned", field="model.numerics", value="aligned",
        error="works only with CPU kernels, and this run is for GPUs", fix="set model.numerics=default",
    ),
    "aligned numerics of a warm start": Broken(
        command="sft", text=SFT, options="model.numerics=aligned", field="model.numerics", value="aligned",
        error="a warm start has no servers", fix="remove it",
    ),
    # ---- adapters
    "adapters beside aligned numerics": Broken(
        options="model.numerics=aligned learner.lora={forward: factored}", field="learner.lora.forward, model.numerics", value="factored",
        error="but servers multiply once by the merged weight", fix="set learner.lora.forward=merged, or model.numerics=default",
    ),
    **{
        f"merged adapters and {field}": Broken(
            options=f"learner.lora={{rank: 4}} rollout.{field}={value}", field=f"learner.lora.forward, rollout.{field}", value=value,
            error="computes with the served weights", fix="set learner.lora.forward=factored, or remove it",
        )
        for field, value in (("precision", "int8"), ("quantization", "fp8"))
    },
    "adapters on servers": Broken(
        options="learner.lora={rank: 4} rollout.server_args={lora_paths: x}", field="learner.lora, rollout.server_args",
        value="{lora_paths: x}", error="learner.lora sends merged weights", fix="remove rollout.server_args.lora_paths",
    ),
    "adapters twice": Broken(
        options="learner.lora={targets: [qkv, qkv]}", field="learner.lora.targets", value="[qkv, qkv]", error="names a matrix twice",
        fix="name each once",
    ),
    "adapters of nothing": Broken(
        options="learner.lora={targets: []}", field="learner.lora.targets", value="[]", error="leaves nothing to train",
        fix="name one or more",
    ),
    "adapters by other names": Broken(
        options="learner.lora={targets: [q_proj]}", field="learner.lora.targets.0", value="q_proj", error="not one of the choices",
        fix="here it is `qkv`, which is q_proj, k_proj, v_proj",
    ),
    "adapters by verl's name": Broken(
        options="learner.lora_rank=8", field="learner.lora_rank", value="8", error="unknown key", fix="here it is `learner.lora.rank`",
    ),
    "adapters of experts": Broken(
        options="model.path=experts learner.lora={rank: 2}", field="learner.lora.targets", value="[qkv, proj, fc1, fc2]",
        error="adapters of experts are not built, and this qwen3_moe has experts", fix="set learner.lora.targets=[qkv, proj]",
    ),
    "adapters of latent attention": Broken(
        options="model.path=latent learner.lora={rank: 2, targets: [qkv, proj]}", field="learner.lora", value="{rank: 2",
        error="adapters of latent attention are not built, and this deepseek_v3 has it", fix="train every weight (learner.lora=null)",
    ),
    "latent attention without the plugin": Broken(
        options="--dry-run model.path=latent rollout.sglang_plugin=false", field="rollout.sglang_plugin", value="false",
        error="computes prompts of a deepseek_v3 wrongly", fix="leave it out",
    ),
    "adapters of gated delta nets": Broken(
        options="model.path=recurrent learner.lora={rank: 2}", field="learner.lora", value="{rank: 2",
        error="adapters of gated delta nets (linear attention) are not built", fix="train every weight (learner.lora=null)",
    ),
    "gated delta nets without the plugin": Broken(
        options="--dry-run model.path=recurrent rollout.sglang_plugin=false", field="rollout.sglang_plugin", value="false",
        error="the recurrent layers of a qwen3_5_text on CPU by kernels that are not installed", fix="leave it out",
    ),
    "gated delta nets with aligned numerics": Broken(
        options="model.path=recurrent model.numerics=aligned", field="model.numerics", value="aligned",
        error="this qwen3_5_text has gated delta nets", fix="set model.numerics=default",
    ),
    "a split state": Broken(
        options="model.path=recurrent layout={cp: 2}", field="layout.cp", value="2",
        error="recurrent layers need their tokens in order", fix="use cp=1",
    ),
    "more ranks than key heads": Broken(
        options="model.path=recurrent layout={tp: 4}", field="layout.tp", value="4",
        error="does not divide the model's linear_num_key_heads=2", fix="use tp=2",
    ),
    "attention with sinks without the plugin": Broken(
        options="--dry-run model.path=sinks rollout.sglang_plugin=false", field="rollout.sglang_plugin", value="false",
        error="SGLang has no attention with sinks on CPU", fix="leave it out",
    ),
    "sinks in another dtype than the folder's": Broken(
        options="model.path=sinks_float32 rollout.dtype=bfloat16", field="rollout.dtype", value="bfloat16",
        error="SGLang makes matrices of a gpt_oss in the dtype of config.json, float32", fix="set rollout.dtype=float32",
    ),
    "embeddings that the server multiplies by a number of its own": Broken(
        options="model.path=gemma rollout.dtype=bfloat16 rollout.sglang_plugin=false", field="rollout.sglang_plugin", value="false",
        error="SGLang does not round the factor of the embeddings of a gemma3_text to bfloat16",
        fix="leave it out, so that servers use Tandem's",
    ),
    "experts in one tensor, rounded to a grid": Broken(
        options="model.path=sinks rollout.precision=int8", field="rollout.precision", value="int8",
        error="a gpt_oss stores all experts of a layer in one tensor", fix="use bf16 or fp16",
    ),
    "adapters that are no smaller": Broken(
        options="learner.lora={rank: 100000}", field="learner.lora.rank", value="100000", error="learner.lora.rank=100000 is above",
        fix="use a smaller rank, or train every weight",
    ),
    "adapters of a warm start": Broken(
        command="sft", text=SFT, options="learner.lora={rank: 2}", field="learner", value="{lora: {rank: 2}}", error="unknown key", fix="",
    ),
    "resume with adapters that were not there": Broken(
        options="resume=stopped_early learner.lora={rank: 2}", field="resume", value="stopped_early",
        error="stopped_early was trained without adapters", fix="keep its learner.lora, or start a new run from its exported model",
    ),
    # ---- nodes
    "server larger than its nodes": Broken(
        options=f"--dry-run model.path=7b rollout.tp=4 layout.dp=16 {NODES} launch.nodes.gpus_per_node=2 launch.nodes.learner=8 "
        "launch.nodes.rollout=1", field="rollout.tp", value="rollout.tp: 4", error="put 4 server ranks on a node",
        fix="use more launch.nodes.rollout",
    ),
    "replicas over nodes": Broken(
        options=f"--dry-run layout.dp=16 rollout.replicas=3 {NODES}", field="rollout.replicas, launch.nodes.rollout",
        value="rollout.replicas: 3", error="cannot be spread evenly", fix="use a multiple of 2",
    ),
    **{f"servers that have {name}": Broken(
        options=f"rollout.server_args={{{flag}: {given}}}", field="rollout.server_args", value=str(given), error=error, fix="remove it",
    ) for name, flag, given, error in [
        ("other variables of NCCL", "enable_symm_mem", "true", "has other values does not connect"),
        ("NVLS", "enable-nccl-nvls", "true", "has other values does not connect"),
        ("a cache on disk", "hicache-storage-backend", "file", "where an update of the weights does not drop them"),
        ("experts elsewhere", "kt-weight-path", "/experts", "no update of the weights reaches"),
        ("experts that move", "enable-eplb", "true", "updates go to the original places"),
        ("sampling of their own", "preferred-sampling-params", "min", "log-probs and learner do not take them into account"),
        ("loose drafts", "speculative-accept-threshold-acc", "0.9", "the policy would not have sampled"),
        ("nothing left on disk", "delete_ckpt_after_loading", "true", "deletes model.path"),
    ]},
    **{f"routing replay with {name}": Broken(
        options=f"model.path=experts learner.routing=rollout {setting}", field=f"learner.routing, {field}", value="routing: rollout",
        error=error, fix="remove it, or set learner.routing=own",
    ) for name, setting, field, error in [
        ("no plugin", "rollout.sglang_plugin=false", "rollout.sglang_plugin", "needs Tandem's plugin of SGLang to get the experts"),
        ("a router", "rollout.router={policy: round_robin}", "rollout.router", "passes on only the fields that it knows"),
        ("whole prompts", "rollout.server_args={chunked_prefill_size: -1}", "rollout.server_args", "would crash at a longer prompt"),
        ("drafts", "rollout.server_args={speculative-algorithm: EAGLE}", "rollout.server_args", "SGLang does not tell apart"),
        ("a cache on the host", "rollout.server_args={enable-hierarchical-cache: true}", "rollout.server_args", "experts of other tokens"),
        ("separate decoding", "rollout.server_args={disaggregation_mode: decode}", "rollout.server_args", "the experts of the prompt"),
    ]},
    "routing replay of a dense model": Broken(
        options="learner.routing=rollout", field="learner.routing", value="rollout", error="the qwen3 model at dense has no experts",
        fix="leave it out",
    ),
    "routing replay of old for a dense model": Broken(
        options="learner.routing=old learner.minibatches=2", field="learner.routing", value="old",
        error="the qwen3 model at dense has no experts", fix="leave it out",
    ),
    "a frozen router of a dense model": Broken(
        options="learner.freeze_router=true", field="learner.freeze_router", value="true",
        error="the qwen3 model at dense has no experts", fix="leave it out",
    ),
    "routing replay of old with one minibatch": Broken(
        options="model.path=experts learner.routing=old", field="learner.routing, learner.minibatches", value="routing: old",
        error="its only update has the same experts as old", fix="or use 2 or more minibatches",
    ),
    "routing replay of old in bypass mode": Broken(
        options="model.path=experts learner.routing=old learner.minibatches=2 correction=ppo_is_bypass",
        field="learner.routing, correction.mode", value="routing: old", error="old is the rollout", fix="set learner.routing=rollout",
    ),
    "learner over nodes": Broken(
        options=f"--dry-run layout.dp=1 rollout.replicas=2 {NODES}", field="launch.nodes.learner", value="2",
        error="the learner's processes", fix="use a multiple of 2",
    ),
    "tp over nodes": Broken(
        options=f"--dry-run layout.tp=4 layout.dp=3 rollout.prompts_per_step=3 rollout.replicas=2 {NODES}", field="layout.tp",
        value="4 (command line)", error="would lie on two nodes", fix="use a tp that does",
    ),
    "dp=auto over nodes": Broken(
        options=f"--dry-run model.path=experts layout.ep=32 rollout.replicas=2 {NODES} launch.nodes.learner=3", field="layout.dp",
        value="auto (default)", error="24 processes make dp=24", fix="use another number of processes, or a smaller ep",
    ),
    "nodes on this machine": Broken(
        options=f"layout.dp=2 rollout.replicas=2 {NODES}", field="launch.nodes", value="learner: 2",
        error="one machine cannot run a config with launch.nodes", fix="use `tandem slurm`, `tandem prepare`, or remove it",
    ),
    "evaluation on nodes": Broken(
        command="eval", options=f"layout.dp=2 rollout.replicas=2 {NODES}", field="launch.nodes", value="learner: 2",
        error="one machine cannot run a config with launch.nodes", fix="set launch.nodes=null",
    ),
    "rewards of sources of a task without records": Broken(
        options="reward.type=by_field reward.rewards.math.type=gsm8k", field="reward.type, task.type", value="countdown",
        error="task.type=countdown has none", fix="use task.type=jsonl",
    ),
    "sampling ahead on shared devices": Broken(
        options="rollout.max_staleness=1 launch.placement=colocated", field="rollout.max_staleness, launch.placement",
        value="colocated", error="samples while the learner trains", fix="set rollout.max_staleness=0, or launch.placement=separate",
    ),
    **{f"a password in {field}": Broken(options=setting, field=field, value="//…@host", error=error, fix=fix)
       for field, setting, error, fix in [
        ("reward.urls", "reward={type: model, urls: ['http://me:secret@host:1']}", "an address of host holds a user or a password",
         "leave them out"),
        ("environment.urls", "environment={type: openenv, urls: ['ws://me:secret@host']}", "an address of host holds a user or a password",
         "name a variable in api_key_variable"),
        ("tracking.uri", "tracking.uri=postgresql://me:secret@host/mlflow", "the URI of host holds a password", "set MLFLOW_TRACKING_URI"),
    ]},
    "a password with a slash": Broken(
        options="tracking.uri=postgresql://me:pa/secret@host/mlflow", field="tracking.uri", value="postgresql://…@host/mlflow",
        error="the URI of host holds a password", fix="set MLFLOW_TRACKING_URI",
    ),
    "a password with an @": Broken(
        options="reward={type: model, urls: ['ftp://me:pa@secret@host:1']}", field="reward.urls", value="ftp://…@host:1",
        error="'ftp://…@host:1' is not an address of a server", fix="write it like http://",
    ),
    "a password in the query of an URI": Broken(
        options="tracking.uri='postgresql://host/mlflow?user=me&password=secret'", field="tracking.uri",
        value="//host/mlflow?user=me&password=…", error="the URI of host holds a password", fix="set MLFLOW_TRACKING_URI",
    ),
    "an environment's address without a scheme": Broken(
        options="environment={type: openenv, urls: ['host:8000']}", field="environment.urls", value="host:8000",
        error="'host:8000' is not an address of a server", fix="write it like http://node:8000",
    ),
    "credit of an agent's turns by the run's reward": Broken(
        options="environment={type: agent, command: [agent.py]} advantage={type: grpo, credit: turn}",
        field="advantage.credit, environment.reward", value="turn", error="with environment.reward=run an episode has one reward",
        fix="use credit=episode, or environment.reward=agent",
    ),
    "rewards of turns less a KL": Broken(
        options="environment={type: tokens, environment: 'a:B'} advantage={type: grpo, credit: turn} kl={coefficient: 0.1, place: reward}",
        field="advantage.credit, kl.place", value="turn", error="compares the rewards of turns",
        fix="use kl.place=loss, or advantage.type=reinforce_pp or gae",
    ),
    "parts of a reward that has none": Broken(
        options="advantage.type=gdpo", field="advantage.type, reward.type", value="gdpo", error="this run's reward is countdown",
        fix="use reward={type: weighted, parts: {...}}, or advantage.type=grpo",
    ),
    "parts of a reward in an environment": Broken(
        options="advantage.type=gdpo reward={type: weighted, parts: {right: {type: countdown}}} "
        "environment={type: tokens, environment: 'a:B'}",
        field="advantage.type, environment.type", value="gdpo", error="an environment may give rewards without these parts",
        fix="use advantage.type=grpo",
    ),
    "parts of a reward less a KL": Broken(
        options="advantage.type=gdpo reward={type: weighted, parts: {right: {type: countdown}}} kl={coefficient: 0.1, place: reward}",
        field="advantage.type, kl.place", value="gdpo", error="would subtract a KL that is none of them", fix="use kl.place=loss",
    ),
    "arguments of a template that Tandem sets": Broken(
        options="model.chat_template_kwargs={tools: [], tokenize: false}", field="model.chat_template_kwargs", value="tools",
        error="has tokenize, tools, which Tandem sets itself", fix="leave it out",
    ),
    "an argument of a template without an end": Broken(
        options="model.chat_template_kwargs={budget: .inf}", field="model.chat_template_kwargs", value="budget",
        error="has a number that is not finite", fix="give another",
    ),
    "arguments of a template that renders nothing": Broken(
        options="model.chat_template_kwargs={enable_thinking: false}", field="model.chat_template_kwargs, task", value="enable_thinking",
        error="has enable_thinking, but task has no prompts in a chat template", fix="remove it, or let the chat template",
    ),
    "arguments of a template beside plain texts": Broken(
        options="model.chat_template_kwargs={enable_thinking: false} environment={type: chat, environment: 'a:B', template: plain}",
        field="model.chat_template_kwargs, environment.template", value="enable_thinking", error="environment.template has no prompts",
        fix="remove it",
    ),
    "arguments of a critic's template": Broken(
        options="advantage.type=gae critic.model.path=dense critic.model.chat_template_kwargs.a=1",
        field="critic.model.chat_template_kwargs", value="a", error="this model reads the policy's tokens", fix="remove it",
    ),
    "tools without a template": Broken(
        options="task={type: jsonl, train_path: a.jsonl, tools_field: tools, apply_chat_template: false} reward={type: gsm8k}",
        field="task.tools_field, task.apply_chat_template", value="tools", error="tools_field needs a chat template",
        fix="set it to true, or remove tools_field",
    ),
    "tools beside those of an environment": Broken(
        options="task={type: jsonl, train_path: a.jsonl, tools_field: tools} environment={type: chat, environment: 'a:B'}",
        field="task.tools_field, environment", value="tools", error="an environment of messages renders its own tools", fix="remove it",
    ),
    "verl's name of the template's arguments": Broken(
        options="data.apply_chat_template_kwargs.enable_thinking=false", field="data", value="enable_thinking", error="unknown key",
        fix="model.chat_template_kwargs",
    ),
    "nothing to drain": Broken(
        options="rollout.drain_s=5", field="rollout.drain_s, rollout.max_staleness", value="5",
        error="with max_staleness=0 there are none at an update", fix="remove it, or set max_staleness to 1 or more",
    ),
    "a drain that outlasts the learner's patience": Broken(
        options="rollout.max_staleness=1 rollout.drain_s=2000", field="rollout.drain_s, launch.collective_timeout_s",
        value="2000", error="is longer than the learner waits for the sample role (1620 s", fix="use at most 1620",
    ),
    "requests that outlast the learner's patience": Broken(
        options="rollout.request_timeout_s=1000", field="rollout.request_timeout_s, launch.collective_timeout_s", value="1000",
        error="the learner waits for samples for 1620 s", fix="set launch.collective_timeout_s=2223 or more, or lower",
    ),
    "shared GPUs of other nodes": Broken(
        options=f"launch.placement=colocated {NODES} launch.nodes.rollout=1", field="launch.placement, launch.nodes",
        value="colocated", error="on the same nodes, but nodes.learner=2 and nodes.rollout=1", fix="set both to the same number",
    ),
    "memory of another machine": Broken(
        options=f"rollout.weight_transfer=memory {NODES}", field="rollout.weight_transfer, launch.nodes", value="memory",
        error="needs on each of launch.nodes the whole model and whole servers",
        fix="set rollout.weight_transfer=broadcast, or remove launch.nodes",
    ),
    "memory of a stage of another machine": Broken(
        options=f"rollout.weight_transfer=memory {NODES} launch.placement=colocated layout.pp=2 rollout.replicas=2",
        field="rollout.weight_transfer, launch.nodes", value="memory", error="needs on each of launch.nodes the whole model",
        fix="set rollout.weight_transfer=broadcast, or remove launch.nodes",
    ),
    "memory for a server on two machines": Broken(
        options=f"rollout.weight_transfer=memory {NODES} launch.placement=colocated layout.dp=2 rollout.replicas=1 rollout.tp=16",
        field="rollout.weight_transfer, launch.nodes", value="memory", error="needs on each of launch.nodes the whole model",
        fix="set rollout.weight_transfer=broadcast, or remove launch.nodes",
    ),
    "memory without a reader": Broken(
        options="rollout.weight_transfer=memory rollout.sglang_plugin=false",
        field="rollout.weight_transfer, rollout.sglang_plugin", value="memory",
        error="needs Tandem's plugin in the servers", fix="set weight_transfer=broadcast, or sglang_plugin=true",
    ),
    # ---- memory
    "learner too large": Broken(
        options="--dry-run --gpu-memory 24 model.path=7b model.dtype=bfloat16 layout.tp=4 layout.dp=2 rollout.tp=4",
        field="layout.tp, layout.pp, layout.dp, learner.token_budget", value="layout.tp: 4 (command line)",
        error="the fullest learner rank needs", fix="a layout that splits the model further",
    ),
    "learner too large for the job's GPUs": Broken(
        command="slurm", options="--gpu-memory 24 model.path=7b model.dtype=bfloat16 layout.tp=4 layout.dp=2 rollout.tp=4",
        field="layout.tp, layout.pp, layout.dp, learner.token_budget", value="layout.tp: 4 (command line)",
        error="the fullest learner rank needs", fix="a layout that splits the model further",
    ),
    "server too large": Broken(
        options="--dry-run --gpu-memory 16 model.path=7b model.dtype=bfloat16 layout.tp=4 layout.dp=16 layout.pp=4",
        field="rollout.tp, rollout.max_new_tokens", value="rollout.tp: 1 (default)", error="have room for 0 tokens",
        fix="use a larger rollout.tp",
    ),
    "too large for both on one GPU": Broken(
        options="--dry-run --gpu-memory 44 model.path=7b model.dtype=bfloat16 layout.tp=2 layout.dp=4 rollout.tp=1 "
        "launch.placement=colocated learner.recompute=full", field="launch.placement", value="colocated",
        error="beside 14.2 GiB", fix="set launch.placement=separate",
    ),
    "too large for this machine": Broken(
        options="--dry-run model.path=235b", field="model.path", value="235b (command line)", error="the processes need",
        fix="use a smaller model, or plan for GPUs with --dry-run --gpu-memory GIB",
    ),
    "too many tokens for this machine": Broken(
        options="--dry-run learner.token_budget=2000000000", field="learner.token_budget", value="2000000000",
        error="1 learner rank ", fix="use a smaller learner.token_budget",
    ),
    "too many servers for this machine": Broken(
        options="--dry-run rollout.replicas=1000000", field="rollout.replicas", value="1000000", error="1,000,000 server ranks",
        fix="use a smaller rollout.replicas",
    ),
    "too large a cache for this machine": Broken(
        options="--dry-run rollout.max_total_tokens=1000000000000 rollout.replicas=2", field="rollout.max_total_tokens",
        value="1000000000000", error="2 server ranks", fix="use a smaller rollout.max_total_tokens",
    ),
    "too many learner ranks for this machine": Broken(
        options="--dry-run layout.dp=100000 rollout.prompts_per_step=100000", field="layout.dp", value="100000 (command line)",
        error="100,000 learner ranks", fix="use a smaller layout.dp",
    ),
    "too many tokens of a warm start for this machine": Broken(
        command="sft", text="kind: sft\nmodel: {path: dense}\ndata: {type: countdown}\noutput: warm\nlayout: {dp: 2}\n",
        options="--dry-run token_budget=2000000000", field="token_budget", value="2000000000",
        error="2 learner ranks", fix="use a smaller token_budget",
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: tests read them only."""
    folder = tmp_path_factory.mktemp("models")
    for name, content in MODELS.items():
        make_model_folder(folder / name, content)
    _break_models(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    endless = json.dumps(MODELS["dense"] | {"num_hidden_layers": 10**12})
    for name, content in {"endless": endless, "deep": "[" * 20000 + "]" * 20000}.items():
        shutil.copytree(tmp_path / "dense", tmp_path / name)
        (tmp_path / name / "config.json").write_text(content)
    good = json.dumps({"question": "1 + 1?", "answer": "#### 2"})
    (tmp_path / "train.jsonl").write_text(f"{good}\n{good[:-5]}\n")
    (tmp_path / "sound.jsonl").write_text(f"{good}\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "grpo.yaml").write_text("steps: 3\n")
    (tmp_path / "circle_a.yaml").write_text("extends: circle_b.yaml\n")
    (tmp_path / "circle_b.yaml").write_text("extends: circle_a.yaml\n")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "large.bin").touch()
    os.truncate(tmp_path / "large.bin", 20_000_000)
    (tmp_path / "stopped_early").mkdir()
    (tmp_path / "stopped_early" / "config.yaml").write_text(yaml.safe_dump(BASE))
    saved = tmp_path / "stopped_late" / "checkpoints" / "step_000007"
    saved.mkdir(parents=True)
    write_manifest(saved, world_size=1)
    (tmp_path / "stopped_late" / "config.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "warm_start").mkdir()
    (tmp_path / "warm_start" / "config.yaml").write_text(SFT)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def _break_models(folder: Path) -> None:
    for name in ("cut-short", "another-size", "pickled", "around/model"):
        make_model_folder(folder / name, MODELS["dense"])
    with (folder / "cut-short" / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    (folder / "another-size" / "config.json").write_text(json.dumps(MODELS["small-vocabulary"]))
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")


@pytest.fixture
def port() -> Iterator[str]:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


def refused(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> str:
    """What the command says of it, once it is known that it did nothing else."""
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    monkeypatch.setattr(Supervisor, "start", lambda *_: pytest.fail("a process would have been started"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 2, said.out + said.err
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before, "something was written"
    assert "pydantic" not in said.err
    return said.err


def problems(said: str) -> list[dict[str, str]]:
    """The blocks of an error, by their labels."""
    blocks = said.split("\n\n")[1:]
    return [
        dict(
            re.findall(
                r"^  (field|value|error|fix): +((?:.|\n(?!  (?:field|value|error|fix):))+)", block, re.M
            )
        )
        for block in blocks
    ]


def split(options: str) -> list[str]:
    """At spaces outside of braces, and at those with a backslash."""
    return [
        part
        for whole in re.findall(r"(?:\{(?:[^{}]|\{[^{}]*\})*\}|\S)+", options)
        for part in whole.split("\\ ")
    ]


@pytest.mark.parametrize("name", TABLE)
def test_a_broken_config_is_refused(name, folder, port, monkeypatch, capsys):
    case = TABLE[name]
    options = split(case.options.replace("TAKEN", port))
    config = "run.yaml"
    if case.text is not None:
        Path("broken.yaml").write_text(case.text)
        config = "broken.yaml"
    if options and options[0].startswith("CONFIG="):
        config = options.pop(0).removeprefix("CONFIG=")
    found = problems(refused([case.command, config, *options], folder, monkeypatch, capsys))
    wanted = {
        label: getattr(case, label).replace("TAKEN", port) for label in ("field", "value", "error", "fix")
    }
    assert any(all(words in block[label] for label, words in wanted.items()) for block in found), (
        f"{wanted} is none of\n{found}"
    )


@pytest.mark.parametrize(
    "written", ["--steps=3", "-steps=3", "--learner.optimizer.lr=3", "--extends=grpo.yaml"]
)
def test_an_override_with_dashes(written, folder, monkeypatch, capsys):
    said = refused(["train", "run.yaml", "--dry-run", written], folder, monkeypatch, capsys)
    assert f"no such option; write {written.lstrip('-')}, without dashes" in said


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        (["--steps", "3"], "--steps: no such option; write steps=VALUE, without dashes"),
        (["--config", "run.yaml"], "--config: no such option; write the file without an option"),
        (
            ["--record-batches=all"],
            "--record-batches: no such option; write record_batches=all, without dashes",
        ),
        (
            ["--rollout-batch-size", "32"],
            "--rollout-batch-size: no such option; here it is `rollout.prompts_per_step`",
        ),
        (["--eps-clip-high=0.28"], "--eps-clip-high: no such option; here it is `objective.clip_high`"),
        (["--use-vllm"], "--use-vllm: no such option; use-vllm has no counterpart: the servers are SGLang's"),
        (
            ["--lr", "3"],
            "--lr: no such option; it exists as `learner.optimizer.lr` and `critic.optimizer.lr`",
        ),
    ],
)
def test_an_option_of_other_trainers(written, fix, folder, monkeypatch, capsys):
    assert fix in refused(["train", "run.yaml", "--dry-run", *written], folder, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("written", "said"),
    [("--lr", "it exists as `optimizer.lr`"), ("--rollout-batch-size", "No such option")],
)
def test_an_option_of_other_trainers_before_a_warm_start(written, said, folder, monkeypatch, capsys):
    """Its fields are others than those of training by RL, which the tables name."""
    assert said in refused(["sft", "sft.yaml", written, "3"], folder, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["nope.yaml", "sub/../nope.yaml"])
def test_a_file_that_extends_what_is_not_there_is_not_told_to_extend_itself(
    name, folder, monkeypatch, capsys
):
    Path("sub").mkdir()
    Path("note.yaml").write_text(f"extends: {name}\n")
    Path("nose.yaml").write_text("extends: note.yaml\n")
    for config in ("note.yaml", "nose.yaml"):
        said = refused(["train", config, "--dry-run"], folder, monkeypatch, capsys)
        assert f"value: {name}" in said and "note.yaml`" not in said
    assert "nose.yaml`" not in said  # it leads to the other, which cannot lead back


def test_schema_says_where_a_name_exists(folder, monkeypatch, capsys):
    said = refused(["schema", "lr"], folder, monkeypatch, capsys)
    assert "it exists as `learner.optimizer.lr` and `critic.optimizer.lr`" in said
    said = refused(["schema", "learner.optimizer.lrr"], folder, monkeypatch, capsys)
    assert "did you mean `learner.optimizer.lr`?" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["warmup"], "did you mean `critic.warmup_steps`? Also close: `critic.optimizer.warmup_steps`, `learner.optimizer.warmup_steps`. "
         "`tandem schema` lists every field"),
        (["groupsize"], "did you mean `rollout.group_size`? `tandem schema` lists every field"),
        (["--kind", "sft", "fieldless"], "`tandem schema --kind sft` lists every field, `tandem schema --kind sft BLOCK` those of one of: "
         "model, data, layout, optimizer, launch\n"),
        (["foo"], "`tandem schema` lists every field, `tandem schema BLOCK` those of one of: model, task, reward, "),
        (["LR"], "did you mean `critic.optimizer.lr`? Also close: `learner.optimizer.lr`. `tandem schema` lists"),
    ],
)  # fmt: skip
def test_schema_answers_an_unknown_field_with_a_few_names(wrong, said, folder, monkeypatch, capsys):
    told = refused(["schema", *wrong], folder, monkeypatch, capsys)
    assert said in told and len(told) < 500 and "=" not in told


def test_a_pasted_block_of_another_system_is_answered_by_the_keys_within(folder, monkeypatch, capsys):
    block = "actor_rollout_ref={actor: {ppo_epochs: 2, loss: x}, rollout: {n: 5}}"
    said = refused(["train", "run.yaml", "--dry-run", block, "ckpt={}"], folder, monkeypatch, capsys)
    assert "fix:   here it is `checkpoint.every`" in said
    assert "fix:   ppo_epochs has no counterpart: a batch is learned from once" in said
    assert "\n         n, here it is `rollout.group_size`" in said
    assert "\n         not known here: actor.loss\n" in said


def test_keys_of_verls_blocks_are_answered_though_the_block_is_named_nearly_as_one_of_ours(
    folder, monkeypatch, capsys
):
    keys = ["trainer.save_freq=20", "data.max_response_length=9", "reward_model.overlong_buffer.enable=true"]
    said = refused(
        ["train", "run.yaml", "--dry-run", *keys, "algorithm.adv_estimator=grpo"], folder, monkeypatch, capsys
    )
    for name in ("save_freq", "max_response_length", "overlong_buffer"):
        assert f"fix:   {name}, here it is `" in said
    assert "fix:   adv_estimator, here it is `advantage.type`" in said


def test_fields_of_other_systems_are_told_by_fields_that_exist():
    def exists(path: str) -> bool:
        shape = Shape.of(RunConfig)
        for part in path.partition("=")[0].split("."):
            if part not in shape.names():
                return False
            shape = shape.child(part)
        return True

    tables = [*OTHER_FIELDS.values(), *WITHOUT_COUNTERPART.values()]
    named = {name for text in tables for name in re.findall(r"`([^`:]+)[^`]*`", text)}
    assert [name for name in named if not exists(name)] == []
    assert not OTHER_FIELDS.keys() & RunConfig.model_fields.keys()
    assert not OTHER_FIELDS.keys() & WITHOUT_COUNTERPART.keys()


def test_blocks_in_the_answers_to_other_systems_are_accepted(folder):
    texts = [text for table in (OTHER_FIELDS, WITHOUT_COUNTERPART) for text in table.values()]
    codes = {code for text in texts for code in re.findall(r"`(correction=[^`]+)`", text)}
    corrections = [code for code in codes if "..." not in code]
    assert len(corrections) >= 7
    for correction in corrections:
        load_config("run.yaml", [correction])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("train_batch_size", "prompts_per_step` prompts, each"),
        ("generation_batch_size", "counts responses: generation_batch_size / num_generations"),
        ("orchestrator.batch_size", "counts responses: batch_size / group_size"),
        ("rollout.batch_size", "prompts_per_step` prompts, each"),
        ("train.batch_size", "`learner.minibatches` is the number of shares"),
        ("train_dataset.batch_size", "prompts_per_step` prompts, each"),
        ("train_dataset.path", "`task.train_path`"),
        ("eval.n_samples_per_prompt", "`evaluation.samples_per_prompt`"),
        ("eval.dataset", "`task.heldout_path`"),
        ("checkpointing.save_period", "`checkpoint.every`"),
        ("policy.generation_batch_size", "no counterpart"),
        ("policy.optimizer.kwargs.lr", "`learner.optimizer.lr`"),
        ("critic.optimizer.grad_clip", "`critic.optimizer.clip_grad`"),
        ("gconfig.max_new_tokens", "`rollout.max_new_tokens`"),
        ("policy.generation.temperature", "`rollout.temperature`"),
        ("orchestrator.group_size", "`rollout.group_size`"),
        ("kl_ctl", "`kl.place` reward"),
        ("max_trajectory_age_steps", "`rollout.max_staleness`"),
        ("train.async_queue_size", "`rollout.max_staleness`"),
        ("critic.model_name_or_path", "`critic.model.path`"),
        ("actor.adam.lr", "`learner.optimizer.lr`"),
        ("critic.adam.lr", "`critic.optimizer.lr`"),
        ("opsm_delta", "without the gap of the engines"),
        ("off_policy_mask_threshold", "`correction.off_policy_mask`, in nats per token"),
        ("model.name", "`model.path`"),
        ("rollout_num_gpus_per_engine", "it is `rollout.tp`"),
        ("policy.generation.vllm_cfg.tensor_parallel_size", "it is `rollout.tp`"),
        ("policy.megatron_cfg.tensor_model_parallel_size", "it is `layout.tp`"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps", "times `learner.minibatches`"),
        ("policy.megatron_cfg.scheduler.lr_warmup_iters", "times `learner.minibatches`"),
        ("lr_warmup_iters", "a number of optimizer steps, not a share of them"),
        ("policy.sequence_packing.algorithm", "sequences are packed"),
        ("logger.mlflow.experiment_name", "`tracking.experiment`"),
        ("logger.wandb.project", "`tracking.wandb.project`"),
        ("reward_model.reward_manager", "math_verify"),
        ("reward_model.overlong_buffer.penalty_factor", "half of the penalty's factor"),
        ("saver.freq_steps", "`checkpoint.every`"),
        ("orchestrator.train.env", "a program of verifiers"),
        ("orchestrator.sampling.max_tokens", "`rollout.max_new_tokens`"),
        ("sglang-context-length", "`rollout.server_args={context_length: ...}`"),
        ("sglang.max_running_requests", "`rollout.server_args={max_running_requests: ...}`"),
        ("sglang_plugin", "it is `rollout.sglang_plugin`"),
        ("optimizer", "no counterpart: the optimizer is AdamW"),
    ],
)
def test_a_name_of_several_systems_is_answered_by_what_stands_before_it(folder, name, told):
    given = parse_config("run.yaml", [f"{name}=1"])
    with pytest.raises(ConfigError) as raised:
        given.validated()
    assert any(told in problem.fix for problem in raised.value.problems)


def test_a_misspelt_command_is_not_answered_with_a_hidden_one(folder, monkeypatch, capsys):
    said = refused(["trian"], folder, monkeypatch, capsys)
    assert "did you mean 'train'?" in said and "sft-rank" not in said
    assert "commands: " in (said := refused(["xyzzy"], folder, monkeypatch, capsys)) and "-rank" not in said


def test_closed_standard_streams_lead_nowhere(folder):
    command = [sys.executable, "-m", "launch", "train", "run.yaml", "--dry-run", "layout.dp=1"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", '"$@" <&- >&-', "sh", *command],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_current_folder_that_is_gone_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", ["tandem", "train", "run.yaml"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


def test_a_misspelt_option_is_no_override(folder, monkeypatch, capsys):
    assert "--gpu-memory" in refused(["train", "run.yaml", "--gpu-memry=80"], folder, monkeypatch, capsys)


def test_everything_that_is_wrong_is_said_at_once(folder, port, monkeypatch, capsys):
    """Of the model, the layouts of both engines, files, rewards, servers, ports and nodes; each with the line
    that sets it."""
    content = {
        "model": {"path": "dense"},
        "task": {"type": "gsm8k", "train_path": "train.jsonl", "heldout_path": "none.jsonl"},
        "reward": {"type": "function", "function": "my_rewards:scroe"},
        "rollout": {"tp": 3, "replicas": 3, "first_port": int(port), "server_args": {"port": 1}},
        "layout": {"tp": 3, "pp": 3, "dp": 1},
        "resume": "stopped_early",
    }
    Path("broken.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    said = refused(["train", "broken.yaml"], folder, monkeypatch, capsys)
    fields = [block["field"] for block in problems(said)]
    line = 1 + Path("broken.yaml").read_text().splitlines().index("layout:") + 1
    assert f"broken.yaml:{line}\n  field: layout.tp" in said
    # Before it: that an import takes long.
    assert f"tandem: {len(fields)} problems in the configuration" in said
    assert fields == [
        "task.heldout_path", "layout.tp", "layout.pp", "rollout.tp", "task.train_path", "rollout.server_args",
        "reward.function", "resume", "resume", "rollout.first_port",
    ]  # fmt: skip


def test_all_contradictions_are_said_at_once(folder, monkeypatch, capsys):
    """They are in the way of everything else, since there is no config to compare with anything."""
    options = [
        "rollout.prompts_per_step=10",
        "learner.minibatches=4",
        "rollout.max_new_tokens=512",
        "learner.token_budget=256",
    ]
    said = refused(
        ["train", "run.yaml", "critic={}", "model.path=none", *options], folder, monkeypatch, capsys
    )
    assert [block["field"] for block in problems(said)] == [
        "advantage.type", "rollout.prompts_per_step, learner.minibatches", "rollout.max_new_tokens, learner.token_budget",
    ]  # fmt: skip


def test_what_is_wrong_does_not_hide_what_fits(folder, monkeypatch, capsys):
    """The same command without the mistake is accepted."""
    monkeypatch.setattr(
        sys, "argv", ["tandem", "train", "run.yaml", "--dry-run", "layout.tp=2", "layout.pp=2", "layout.dp=1"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None), capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text", "wanted"), [("sft", None, "sft"), ("train", SFT, "train"), ("eval", SFT, "train")]
)
def test_a_config_of_another_kind_is_refused(command, text, wanted, folder, monkeypatch, capsys):
    Path("given.yaml").write_text(text or yaml.safe_dump(BASE))
    assert refused([command, "given.yaml", "--dry-run"], folder, monkeypatch, capsys).endswith(
        f"this command takes kind: {wanted}\n"
    )


@pytest.mark.parametrize("text", ["", "name: [", "- a list"])
def test_a_run_whose_config_cannot_be_read_is_not_resumed(text, folder, monkeypatch, capsys):
    run = Path("run")
    run.mkdir()
    (run / "config.yaml").write_text(text)
    assert "run/config.yaml" in refused(["resume", "run", "--dry-run"], folder, monkeypatch, capsys)


def test_a_warm_start_has_no_step_to_replay(folder, monkeypatch, capsys):
    Path("run").mkdir()
    Path("run/config.yaml").write_text(SFT)
    text = refused(["replay", "run", "--step", "1"], folder, monkeypatch, capsys)
    assert "is a run of kind sft; this command takes runs of kind train" in text


OF_ANY_CONFIG = [
    "train",
    "sft",
    "eval",
    "plan --gpus 8 --gpu-memory 80",
    "mismatch",
    "verify-sync",
    "slurm",
    "prepare",
    "check-cluster",
]


@pytest.mark.parametrize("command", OF_ANY_CONFIG)
@pytest.mark.parametrize("path", ["x" * 5000, "x/" * 2500])
def test_a_model_whose_path_is_too_long_is_no_traceback(command, path, folder, monkeypatch, capsys):
    name, *options = command.split()
    Path("given.yaml").write_text(SFT if name == "sft" else yaml.safe_dump(BASE))
    (found,) = problems(
        refused([name, "given.yaml", *options, f"model.path={path}"], folder, monkeypatch, capsys)
    )
    assert (
        found["field"] == "model.path" and "use shorter names" in found["fix"] and len(found["value"]) < 200
    )


@pytest.mark.parametrize(
    ("command", "is_refused"), [("train", True), ("eval", True), ("mismatch", False), ("verify-sync", False)]
)
def test_a_router_that_is_not_installed_is_missed_where_one_is_used(
    command, is_refused, folder, monkeypatch, capsys
):
    """Together with another mistake, so that nothing starts."""

    def check_is_installed() -> None:
        raise ValueError("sglang-router is missing; install it")

    monkeypatch.setattr("rollout.servers.router.check_is_installed", check_is_installed)
    Path("run.yaml").write_text(yaml.safe_dump(BASE))
    said = refused([command, "run.yaml", "rollout.router={}", "rollout.tp=3"], folder, monkeypatch, capsys)
    assert "rollout.tp" in said and ("sglang-router is missing" in said) == is_refused


def test_a_run_folder_that_cannot_be_made_after_all_is_no_traceback(folder, monkeypatch, capsys):
    """Such as on a disk that has filled up since it was looked at."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    (found,) = problems(refused(["train", "run.yaml", "layout.dp=1"], folder, monkeypatch, capsys))
    assert (found["field"], found["value"]) == ("launch.runs_dir", "runs") and "No space left" in found[
        "error"
    ]


def cpu_seconds_of_children() -> float:
    """Of those that have ended: on a quiet machine the time until the answer, on a busy one still the
    command's own."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


@pytest.mark.parametrize("name", ["unknown key", "no such reward function", "too large for both on one GPU"])
def test_the_answer_comes_within_seconds(name, folder):
    """In a process of its own: most of the time is that of starting Python and importing what the checks
    need."""
    began = cpu_seconds_of_children()
    command = [sys.executable, "-m", "launch", "train", "run.yaml", *split(TABLE[name].options)]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    took = cpu_seconds_of_children() - began
    assert done.returncode == 2 and TABLE[name].fix in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert took < SECONDS_TO_ANSWER, f"answered after {took:.1f} s"


def test_flags_that_no_run_takes_are_sglangs():
    assert NEVER_WITH.keys() <= set(flags_of_sglang())
