"""Settings that contradict each other, and their neighbours that do not: a condition that is dropped, or a bound that is moved
by one, refuses a config that works or lets one through."""

import re
from pathlib import Path

import pytest

from configs.loader import ConfigError, load_config

BASE = """\
model: {path: model}
task: {type: countdown}
rollout: {prompts_per_step: 16, group_size: 4, max_new_tokens: 14}
"""
JSONL = "task={type: jsonl, train_path: a.jsonl}"
# Overrides of BASE, and a part of the fields that are refused; nothing where the config is sound.
OF_A_RUN = [
    ("rollout.group_size=1 advantage.type=reinforce_pp", ""),
    ("rollout.group_size=1 advantage.type=gae", ""),
    ("rollout.group_size=1 advantage.type=rloo", "rollout.group_size"),
    ("objective.type=gmpo correction.weight.level=sequence correction.weight.bound=mask correction.weight.upper=2", ""),
    ("objective.type=gmpo correction.weight.level=geometric correction.weight.bound=mask correction.weight.upper=2", ""),
    ("objective.type=gmpo correction.weight.level=token correction.weight.upper=2", ""),
    ("correction.weight.level=token correction.weight.bound=mask correction.weight.upper=2", ""),
    ("kl={coefficient: 0.1, place: reward, controller: {type: adaptive, target: 0.1, horizon: 65}}", ""),
    ("kl={coefficient: 0.1, place: reward, controller: {type: adaptive, target: 0.1, horizon: 64}}", "kl.controller.horizon"),
    ("rollout.dynamic_sampling.type=resample", ""),
    ("advantage.type=gae", ""),
    ("advantage.type=gae rollout.dynamic_sampling.type=resample", "rollout.dynamic_sampling"),
    ("advantage.type=reinforce_pp rollout.dynamic_sampling.type=resample", "rollout.dynamic_sampling"),
    ("learner.old_logprobs=always", ""),
    ("correction.mode=bypass", ""),
    ("learner.old_logprobs=always correction.mode=bypass", "learner.old_logprobs"),
    ("advantage.type=gae critic=null", "advantage.type"),
    ("critic.warmup_steps=1", "advantage.type"),
    ("advantage.type=gae steps=5 critic.warmup_steps=4", ""),
    ("advantage.type=gae steps=5 critic.warmup_steps=5", "critic.warmup_steps"),
    ("environment={type: tokens, environment: 'a:B'} advantage={type: grpo, credit: turn}", ""),
    ("environment={type: tokens, environment: 'a:B'} advantage={type: gae, credit: turn} kl={coefficient: 0.1, place: reward}", ""),
    ("environment={type: tokens, environment: 'a:B'} advantage={type: grpo, credit: turn} kl={coefficient: 0.1}", ""),
    ("environment={type: tokens, environment: 'a:B'} kl={coefficient: 0.1, place: reward}", ""),
    ("environment={type: agent, command: [a.py]}", ""),
    ("advantage={type: grpo, credit: turn}", "advantage.credit"),
    ("environment={type: agent, command: [./a], reward: agent}", ""),
    ("environment={type: agent, command: [./a], reward: run} reward.type=countdown", ""),
    (JSONL + " reward.type=code", ""),
    (JSONL + " reward={type: by_field, rewards: {math: {type: gsm8k}}}", ""),
    (JSONL + " reward.type=gsm8k", ""),
    ("reward.type=gsm8k", "reward.type"),
    ("reward.type=math_verify", "reward.type"),
    ("task={type: gsm8k, train_path: a.jsonl} reward.type=countdown", "reward.type"),
    ("task={type: gsm8k, train_path: a.jsonl} reward.type=math_verify", ""),
    (JSONL + " reward.type=countdown", ""),
    ("reward={type: weighted, parts: {a: {type: countdown}, b: {type: overlong, buffer_tokens: 14}}}", ""),
    ("reward={type: weighted, parts: {a: {type: countdown}, b: {type: overlong, buffer_tokens: 15}}}", "buffer_tokens"),
    (JSONL + " reward.type=gsm8k sampler={type: mixture, field: source, weights: {a: 1.0}}", ""),
    ("rollout.prompts_per_step=10 learner.minibatches=5", ""),
    ("rollout.prompts_per_step=10 learner.minibatches=4", "prompts_per_step"),
    ("layout.dp=8", ""),
    ("layout.dp=64", ""),
    ("layout.dp=3", "prompts_per_step"),
    ("layout.dp=128", "prompts"),
    ("layout={pp: 2, vpp: 2, dp: 1}", ""),
    ("layout={pp: 2, vpp: 2, dp: 1} rollout.prompts_per_step=1 rollout.group_size=3", "layout.vpp"),
    ("rollout.max_staleness=1", ""),
    ("launch.placement=colocated", ""),
    ("rollout.weight_transfer=memory", ""),
    ("rollout.max_staleness=1 rollout.drain_s=1620", ""),
    ("rollout.max_staleness=1 rollout.drain_s=1620.5", "drain_s"),
    ("rollout.max_new_tokens=255 learner.token_budget=256", ""),
    ("rollout.max_new_tokens=256 learner.token_budget=256", "token_budget"),
    ("checkpoint.keep_best=eval/accuracy evaluation.every=5", ""),
    ("checkpoint.keep_best=eval/accuracy evaluation.every=0", "evaluation.every"),
    ("steps=5 checkpoint.keep_best=eval/accuracy evaluation.every=5 evaluation.at_ends=false", ""),
    ("steps=5 checkpoint.keep_best=eval/accuracy evaluation.every=6 evaluation.at_ends=true", ""),
    ("steps=5 checkpoint.keep_best=eval/accuracy evaluation.every=6 evaluation.at_ends=false", "evaluation.every"),
    ("checkpoint.keep_best=eval/greedy/accuracy evaluation.every=5 evaluation.greedy=true", ""),
    ("checkpoint.keep_best=eval/greedy/accuracy evaluation.every=5", "evaluation.greedy"),
    (JSONL + " reward.type=gsm8k checkpoint.keep_best=eval/accuracy evaluation.every=5", "task.heldout_path"),
    (JSONL + " reward.type=gsm8k task.heldout_path=b.jsonl checkpoint.keep_best=eval/accuracy evaluation.every=5", ""),
    ("steps=5 tracking.trace={steps: 1, first: 5}", ""),
    ("steps=5 tracking.trace={steps: 1, first: 6}", "trace.first"),
    ("layout.dp=2 tracking.trace={steps: 1, profile_rank: 1}", ""),
    ("layout.dp=2 tracking.trace={steps: 1, profile_rank: 2}", "profile_rank"),
    ("layout.dp=auto tracking.trace={steps: 1, profile_rank: 2}", ""),
    (JSONL + " reward.type=gsm8k model.chat_template_kwargs={a: 1}", ""),
    (JSONL + " reward.type=gsm8k task.apply_chat_template=false model.chat_template_kwargs={a: 1}", "chat_template_kwargs"),
    ("environment={type: chat, environment: 'a:B'} model.chat_template_kwargs={a: 1}", ""),
    ("task={type: jsonl, train_path: a.jsonl, tools_field: tools} reward.type=gsm8k", ""),
    ("environment={type: chat, environment: 'a:B'} " + JSONL, ""),
    ("kl={coefficient: 0.1, model: {path: t}}", ""),
    ("kl={coefficient: 0.1, unbiased: true}", ""),
    ("kl={coefficient: 0.1, unbiased: true, estimator: k1}", ""),
    ("kl={coefficient: 0.1, unbiased: true, estimator: k2}", "kl.unbiased"),
    ("kl={coefficient: 0.1, unbiased: true, place: reward}", "kl.unbiased"),
    ("kl={unbiased: true}", "kl.unbiased"),
    ("kl={coefficient: 0.1, unbiased: true, estimator: k3_straight_through}", "kl.unbiased"),
    ("objective.type=gspo aggregation.type=token_mean", "aggregation.type"),
    ("advantage.type=gae steps=5 critic.warmup_steps=5 learner.optimizer.schedule=cosine", "critic.warmup_steps"),
    ("launch.nodes={learner: 1, rollout: 1, gpus_per_node: 1}", ""),
    ("steps=1", ""),
]  # fmt: skip
OF_SERVERS = [
    ("rollout.server_args={enable-eplb: false}", ""),
    ("rollout.server_args={enable_eplb: true}", "server_args"),
    ("learner.routing=rollout", ""),
    ("learner.routing=rollout rollout.server_args={chunked_prefill_size: 128}", ""),
    ("learner.routing=rollout rollout.server_args={chunked-prefill-size: -1}", "server_args"),
    ("learner.routing=rollout rollout.server_args={speculative-algorithm: X}", "server_args"),
    ("learner.routing=rollout rollout.server_args={disaggregation-mode: x}", "server_args"),
    ("learner.routing=rollout rollout.server_args={enable-hierarchical-cache: false}", ""),
    ("rollout.server_args={chunked-prefill-size: -1, speculative-algorithm: X}", ""),
    ("learner.routing=rollout rollout.router={}", "rollout.router"),
    ("rollout.router={}", ""),
    ("learner.routing=rollout rollout.sglang_plugin=false", "sglang_plugin"),
    ("learner.routing=old learner.minibatches=2", ""),
    ("learner.routing=old", "learner.minibatches"),
    ("learner.routing=old learner.minibatches=2 correction.mode=bypass", "correction.mode"),
    ("model.numerics=aligned", ""),
    ("model.numerics_pieces=2", "numerics_pieces"),
    ("model.numerics=aligned layout.tp=2", ""),
    ("model.numerics=aligned layout.tp=3", "layout.tp"),
    ("model.numerics=aligned rollout.tp=4 model.numerics_pieces=4", ""),
    ("model.numerics=aligned rollout.tp=4 model.numerics_pieces=2", "rollout.tp"),
    ("model.numerics=aligned model.numerics_pieces=3", "numerics_pieces"),
    ("model.numerics=aligned layout.cp=2", "layout.cp"),
    ("model.numerics=aligned model.dtype=float32 rollout.dtype=bfloat16", "rollout.dtype"),
    ("model.numerics=aligned launch.threads_per_process=2", "threads"),
    ("model.numerics=aligned rollout.top_k=5", "top_k"),
    ("model.numerics=aligned model.dtype=float16 rollout.dtype=float16", "model.dtype"),
    ("model.numerics=aligned rollout.server_args={attention-backend: x}", "server_args"),
    ("model.numerics=aligned rollout.server_args={attention_backend: x}", "server_args"),
    ("model.numerics=aligned rollout.server_args={mem-fraction-static: 0.5}", ""),
    ("rollout.server_args={attention-backend: x}", ""),
    ("learner.lora={forward: factored}", ""),
    ("learner.lora={forward: merged}", ""),
    ("model.numerics=aligned learner.lora={forward: merged}", ""),
    ("model.numerics=aligned learner.lora={forward: factored}", "lora"),
    ("learner.lora={forward: factored} rollout.precision=int8", ""),
    ("learner.lora={forward: merged} rollout.precision=int8", "lora"),
    ("learner.lora={forward: factored} rollout.quantization=fp8", ""),
    ("learner.lora={forward: merged} rollout.quantization=fp8", "lora"),
    ("rollout.precision=int8", ""),
    ("rollout.server_args={max-lora-rank: 8}", ""),
    ("learner.lora={} rollout.server_args={max-lora-rank: 8}", "lora"),
    ("rollout.top_k=5", ""),
    ("rollout.top_k=5 rollout.router={}", "router"),
    ("rollout.top_k=5 rollout.server_args={sampling-backend: pytorch}", ""),
    ("rollout.top_k=5 rollout.server_args={sampling-backend: ascend}", "server_args"),
    ("rollout.top_k=5 rollout.server_args={enable-deterministic-inference: true}", ""),
    ("rollout.top_k=5 rollout.min_p=0.1 rollout.server_args={enable-deterministic-inference: true}", "server_args"),
    ("rollout.top_k=5 rollout.min_p=0.1 rollout.server_args={enable-deterministic-inference: false}", ""),
    ("rollout.top_k=5 rollout.server_args={sampling-mask-max-tokens: 5}", ""),
    ("rollout.top_k=5 rollout.server_args={sampling-mask-max-tokens: 4}", "server_args"),
    ("rollout.top_k=5 rollout.server_args={sampling_mask_max_tokens: 4}", "server_args"),
    ("rollout.top_k=5 rollout.server_args={speculative-algorithm: X}", "server_args"),
    ("rollout.top_k=5 rollout.server_args={disaggregation-mode: x}", "server_args"),
    ("rollout.server_args={sampling-mask-max-tokens: 4, disaggregation-mode: x}", ""),
    ("learner.routing=rollout rollout.server_args={mem-fraction-static: 0.5}", ""),
    ("learner.routing=rollout rollout.server_args={speculative-num-steps: 3}", "server_args"),
    ("learner.routing=rollout rollout.server_args={chunked-prefill-size: 0}", "server_args"),
    ("learner.lora={} rollout.server_args={mem-fraction-static: 0.5}", ""),
    ("rollout.top_k=5 rollout.server_args={mem-fraction-static: 0.5}", ""),
    ("rollout.top_k=5 rollout.server_args={speculative-num-steps: 8}", "server_args"),
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("configs") / "base.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


@pytest.mark.parametrize(("overrides", "refused"), [*OF_A_RUN, *OF_SERVERS])
def test_what_contradicts_is_refused_and_what_stands_beside_it_is_not(overrides, refused, base):
    try:
        load_config(base, re.split(r" (?=[a-z_.]+=)", overrides))
    except ConfigError as error:
        (problem,) = error.problems
        assert refused and refused in problem.field, str(error)
    else:
        assert not refused
