"""Names of other systems: verl's presets and values, each the same algorithm or an error; ROLL's
``train_infer_correction`` block.

ROLL's formulas stand here as its configuration describes them, in plain loops. Legend: S sequences, L padded
length.
"""

import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.loader import ConfigError, Problem, load_config, parse_config, resolved_yaml
from configs.other_systems.roll import from_roll
from configs.other_systems.values import ALGORITHMS, NEARLY, OUR_NAMES, algorithm
from configs.other_systems.verl import VERL_PRESETS, from_verl
from configs.presets import ALIASES, PRESETS, alias_notes, preset_body
from configs.schema.correction import (
    CorrectionConfig,
    DifferenceRule,
    DivergenceRule,
    ImportanceWeight,
    NoWeight,
    RatioRule,
)
from launch.processes.run_folder import RunFolder
from launch.studies.replay import corrections_named
from tests.support.packed_batches import random_batch
from trainer.algorithm.correction import correct

NONE, TOKEN, SEQUENCE = (
    NoWeight(),
    ImportanceWeight(level="token", upper=2.0),
    ImportanceWeight(level="sequence", upper=2.0),
)
GEOMETRIC = RatioRule(level="geometric", lower=1 / 1.001, upper=1 / 0.999)
"""0.999 <= 1 / rho <= 1.001"""
K3 = DivergenceRule(rule="k3", reduce="mean", upper=0.01)
CLIP, GRADIENT = {"mode": "bypass", "loss": "objective"}, {"mode": "bypass", "loss": "policy_gradient"}

EXPECTED = {
    "decoupled_geo_rs_token_tis": CorrectionConfig(weight=TOKEN, reject=(GEOMETRIC,)),
    "decoupled_geo_rs_seq_tis": CorrectionConfig(weight=SEQUENCE, reject=(GEOMETRIC,)),
    "decoupled_k3_rs_token_tis": CorrectionConfig(weight=TOKEN, reject=(K3,)),
    "decoupled_k3_rs_seq_tis": CorrectionConfig(weight=SEQUENCE, reject=(K3,)),
    "bypass_ppo_clip": CorrectionConfig(weight=NONE, **CLIP),
    "bypass_ppo_clip_geo_rs": CorrectionConfig(weight=NONE, reject=(GEOMETRIC,), **CLIP),
    "bypass_ppo_clip_k3_rs": CorrectionConfig(weight=NONE, reject=(K3,), **CLIP),
    "bypass_pg_is": CorrectionConfig(weight=SEQUENCE, **GRADIENT),
    "bypass_pg_geo_rs": CorrectionConfig(weight=NONE, reject=(GEOMETRIC,), **GRADIENT),
    "bypass_pg_geo_rs_token_tis": CorrectionConfig(weight=TOKEN, reject=(GEOMETRIC,), **GRADIENT),
    "bypass_pg_geo_rs_seq_tis": CorrectionConfig(weight=SEQUENCE, reject=(GEOMETRIC,), **GRADIENT),
}
SAME_AS_OURS = {
    "decoupled_k3_rs_token_tis": "decoupled_k3_rs_token_is",
    "decoupled_k3_rs_seq_tis": "decoupled_k3_rs_seq_is",
    "bypass_ppo_clip": "ppo_is_bypass",
    "bypass_ppo_clip_k3_rs": "bypass_k3_rs",
    "bypass_pg_is": "pg_is",
}
"""The others have a preset beside them with a veto and with bounds on rho: another algorithm."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("model: {path: model}\ntask: {type: countdown}\n", encoding="utf-8")
    return tmp_path


def the_problem(*overrides: str) -> Problem:
    with pytest.raises(ConfigError) as raised:
        load_config("base.yaml", overrides)
    (problem,) = raised.value.problems
    return problem


# -------------------------------------------------------------------------------------------------------------
# verl's presets


def test_every_alias_is_expected_and_none_hides_a_preset_of_ours():
    assert ALIASES.keys() == VERL_PRESETS.keys() == EXPECTED.keys()
    assert not ALIASES.keys() & PRESETS.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_an_alias_is_what_verl_s_preset_is(folder, name):
    notes: list[str] = []
    config = parse_config("base.yaml", [f"correction={name}"]).validated(notes=notes)
    assert config.correction == ALIASES[name] == from_verl(VERL_PRESETS[name])[0] == EXPECTED[name]
    assert CorrectionConfig.model_validate(preset_body(name)) == EXPECTED[name]
    assert (
        load_config("base.yaml", [f"correction={{preset: {name}, denominator: all}}"]).correction.denominator
        == "all"
    )
    Path("resolved.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config("resolved.yaml") == config
    assert notes == [f"correction.preset (command line): {note}" for note in alias_notes(name)]
    rejects_in_bypass = config.correction.mode == "bypass" and config.correction.reject
    assert any("denominator: all" in note for note in notes) == bool(rejects_in_bypass)
    Path("config.yaml").write_text(resolved_yaml(load_config("base.yaml")), encoding="utf-8")
    assert corrections_named(RunFolder(Path()), [name])[name] == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_note_names_our_preset_where_it_is_the_same_and_no_other(name):
    if name in SAME_AS_OURS:
        assert ALIASES[name] == PRESETS[SAME_AS_OURS[name]]
        assert alias_notes(name)[0] == f"{name} is a preset of verl -> {SAME_AS_OURS[name]}"
    else:
        assert ALIASES[name] not in PRESETS.values()
        assert "which no preset of Tandem is" in alias_notes(name)[0]
    assert alias_notes("pg_is") == []


def test_a_misspelt_alias_is_not_answered_with_another_algorithm(folder):
    assert the_problem("correction=bypass_pg_iss").fix.startswith(
        "did you mean `bypass_pg_is`? presets: decoupled_token_is"
    )


# --------------------------------------------------------------------------------------------------------------
# verl's values


CASES = [(*place, theirs, ours) for place, names in OUR_NAMES.items() for theirs, ours in names.items()]


@pytest.mark.parametrize(("block", "key", "theirs", "ours"), CASES)
def test_a_value_in_verl_s_name_is_ours(folder, block, key, theirs, ours):
    notes: list[str] = []
    config = parse_config("base.yaml", [f"{block}.{key}={theirs}"]).validated(notes=notes)
    assert config == load_config("base.yaml", [f"{block}.{key}={ours}"])
    assert notes == [f"{block}.{key} (command line): {theirs} is verl's name -> {ours}"]


def test_names_of_the_source_are_known():
    """Of the KL estimators, aggregations and loss of the guide to verl's losses."""
    assert (
        OUR_NAMES["kl", "estimator"] | {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
        == OUR_NAMES["kl", "estimator"]
    )
    assert {"token-mean", "seq-mean-token-mean", "seq-mean-token-sum"} <= OUR_NAMES[
        "aggregation", "type"
    ].keys()
    assert OUR_NAMES["objective", "type"]["vanilla"] == "clipped"


def test_values_in_a_file_and_beside_other_keys(folder):
    Path("top.yaml").write_text(
        "extends: base.yaml\nobjective: {type: vanilla, clip_high: 0.28}\nkl: {estimator: low_var_kl, coefficient: 0.1}\n",
        encoding="utf-8",
    )
    config = load_config("top.yaml", ["objective.clip_low=0.1"])
    assert (config.objective.type, config.objective.clip_low, config.objective.clip_high) == (
        "clipped",
        0.1,
        0.28,
    )
    assert (config.kl.estimator, config.kl.coefficient) == ("k3", 0.1)


@pytest.mark.parametrize(
    ("block", "key", "theirs"), [(*place, name) for place, names in NEARLY.items() for name in names]
)
def test_what_is_nearly_the_same_is_refused_with_what_differs(folder, block, key, theirs):
    problem = the_problem(f"{block}.{key}={theirs}")
    assert (problem.where, problem.field, problem.value) == ("command line", f"{block}.{key}", theirs)
    assert (problem.error, problem.fix) == NEARLY[block, key][theirs]


VERL_RUN = """
data:
  tokenizer: null
  train_files: data/gsm8k/train.parquet
  val_files: data/gsm8k/test.parquet
  prompt_key: prompt
  reward_fn_key: data_source
  max_prompt_length: 512
  max_response_length: 1024
  train_batch_size: 1024
  val_batch_size: null
  return_raw_chat: true
  shuffle: true
  seed: 1
  filter_overlong_prompts: true
  truncation: error
  image_key: images
  custom_cls: {path: null, name: null}
  apply_chat_template_kwargs: {enable_thinking: false}
actor_rollout_ref:
  hybrid_engine: true
  model:
    path: models/qwen3-8b
    enable_gradient_checkpointing: true
    use_remove_padding: true
    trust_remote_code: false
    lora_rank: 0
    lora_alpha: 16
    target_modules: all-linear
    override_config: {}
  actor:
    strategy: megatron
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 32
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 24576
    grad_clip: 1.0
    clip_ratio: 0.2
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    clip_ratio_c: 10.0
    policy_loss: {loss_mode: vanilla}
    loss_agg_mode: token-mean
    entropy_coeff: 0
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    use_torch_compile: true
    ppo_epochs: 1
    shuffle: false
    ulysses_sequence_parallel_size: 1
    checkpoint: {save_contents: [model, optimizer]}
    optim:
      lr: 1.0e-6
      lr_warmup_steps: 10
      min_lr_ratio: 0.0
      warmup_style: constant
      total_training_steps: -1
      weight_decay: 0.1
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1, param_offload: true}
    fsdp_config: {param_offload: false, optimizer_offload: false, fsdp_size: -1, wrap_policy: {min_num_params: 0}}
  ref:
    strategy: megatron
    log_prob_micro_batch_size_per_gpu: 32
    log_prob_use_dynamic_bsz: true
    fsdp_config: {param_offload: true}
  rollout:
    name: sglang
    mode: async
    temperature: 1.0
    top_k: -1
    top_p: 1
    n: 8
    dtype: bfloat16
    gpu_memory_utilization: 0.6
    enforce_eager: false
    free_cache_engine: true
    load_format: dummy
    tensor_model_parallel_size: 2
    max_num_batched_tokens: 8192
    max_model_len: null
    log_prob_micro_batch_size_per_gpu: 32
    calculate_log_probs: true
    val_kwargs: {temperature: 1.0, top_p: 0.7, top_k: 20, n: 4, do_sample: true}
    multi_turn: {enable: false, max_assistant_turns: null, format: hermes}
    agent: {num_workers: 8}
algorithm:
  adv_estimator: grpo
  gamma: 1.0
  lam: 1.0
  norm_adv_by_std_in_grpo: true
  use_kl_in_reward: false
  kl_penalty: kl
  kl_ctrl: {type: fixed, kl_coef: 0.001, horizon: 10000, target_kl: 0.1}
  filter_groups: {enable: true, metric: acc, max_num_gen_batches: 10}
  rollout_correction: {rollout_is: token, rollout_is_threshold: 2.0, bypass_mode: false}
critic:
  strategy: fsdp
  optim: {lr: 1.0e-5, lr_warmup_steps_ratio: 0.0, weight_decay: 0.01}
  model: {path: models/qwen3-8b}
  ppo_micro_batch_size_per_gpu: 32
  cliprange_value: 0.5
reward_model:
  enable: false
  reward_manager: dapo
  launch_reward_fn_async: false
  overlong_buffer: {enable: true, len: 4096, penalty_factor: 1.0}
custom_reward_function: {path: my_reward.py, name: score}
trainer:
  balance_batch: true
  total_epochs: 15
  total_training_steps: null
  project_name: gsm8k
  experiment_name: qwen3-8b
  logger: [console, wandb]
  log_val_generations: 10
  nnodes: 1
  n_gpus_per_node: 8
  save_freq: 20
  test_freq: 5
  val_before_train: true
  critic_warmup: 0
  resume_mode: auto
  default_local_dir: checkpoints
  max_actor_ckpt_to_keep: 2
  esi_redundant_time: 0
ray_kwargs: {ray_init: {num_cpus: null}}
"""
"""A GRPO run by the names of verl's ppo_trainer.yaml, with those of other versions that scripts have."""
NOT_KNOWN = {
    "data": "return_raw_chat custom_cls.path custom_cls.name",
    "actor_rollout_ref": (
        "actor.checkpoint.save_contents actor.fsdp_config.wrap_policy.min_num_params rollout.load_format rollout.agent.num_workers"
    ),
    "reward_model": "launch_reward_fn_async",
    "trainer": "esi_redundant_time",
}
ANSWERED = {
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.optim.lr": "learner.optimizer.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "learner.optimizer.weight_decay",
    "algorithm.filter_groups.metric": "rollout.dynamic_sampling.compare",
    "max_num_gen_batches": "rollout.dynamic_sampling.max_rounds",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tp",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "layout.tp",
    "actor_rollout_ref.rollout.val_kwargs.n": "evaluation.samples_per_prompt",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "evaluation.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_k": "evaluation.top_k",
    "n": "rollout.group_size",
    "critic.optim.lr": "critic.optimizer.lr",
    "critic.optim.weight_decay": "critic.optimizer.weight_decay",
    "adv_estimator": "advantage.type",
    "algorithm.gamma": "advantage.gamma",
    "algorithm.lam": "advantage.lam",
    "train_batch_size": "rollout.prompts_per_step",
    "total_epochs": "steps",
    "ppo_mini_batch_size": "learner.minibatches",
    "use_kl_loss": "kl.coefficient",
    "clip_ratio_high": "objective.clip_high",
    "data.shuffle": "sampler.type",
}
"""A name as the answer has it: of a name that Tandem has too, or that verl has twice, the whole path."""


def leaves_of(block: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(block, dict) or not block:
        return [path]
    return [leaf for key, inner in block.items() for leaf in leaves_of(inner, (*path, key))]


def test_every_leaf_of_a_verl_file_is_answered_or_listed_as_not_known(folder):
    Path("verl.yaml").write_text(f"extends: base.yaml\n{VERL_RUN}", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_config("verl.yaml")
    answers: dict[str, str] = {}  # of a name within a block, or of the whole key
    not_known: dict[str, list[str]] = {}
    for problem in raised.value.problems:
        assert problem.error == "unknown key"
        lines = [line.strip() for line in problem.fix.splitlines()]
        assert len(set(lines)) == len(lines) and "did you mean" not in problem.fix
        texts = [re.sub(r"^.*?(here it is|here they are|no counterpart)", "", line) for line in lines]
        assert len(set(texts)) == len(texts), "names of one answer share a line"
        for line in lines:
            if line.startswith("not known here: "):
                assert line == lines[-1]
                not_known[problem.field] = line.removeprefix("not known here: ").split(", ")
            elif line.startswith("here it is "):
                answers[problem.field] = line
            else:
                names, text = re.split(r", here (?:it is|they are) | (?:has|have) no counterpart: ", line)
                answers |= dict.fromkeys(re.split(r", | and ", names), text)
    assert {field: " ".join(names) for field, names in not_known.items()} == NOT_KNOWN
    assert {name: text for name, text in ANSWERED.items() if f"`{text}`" not in answers.get(name, "")} == {}
    ours = {("critic", "model", "path")}
    for leaf in leaves_of(yaml.safe_load(VERL_RUN)):
        if leaf in ours:
            continue
        starts = {".".join(leaf[:end]) for end in range(1, len(leaf) + 1)}
        listed = ".".join(leaf[1:]) in not_known.get(leaf[0], ())
        assert listed != bool(answers.keys() & {*starts, *leaf}), leaf


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_told_of_an_algorithm_is_a_config(folder, name):
    told = re.findall(r"`(\w+): (\{[^`]*\})`", ALGORITHMS[name])
    config = load_config("base.yaml", [f"{block}={value}" for block, value in told])
    wanted = {block: yaml.safe_load(value) for block, value in told}
    assert wanted["objective"]["type"] == config.objective.type
    assert wanted["advantage"]["type"] == config.advantage.type
    assert config.rollout.max_new_tokens == 1024 == (config.aggregation.constant or 1024)


@pytest.mark.parametrize(
    "written",
    ["grpo", "GRPO", "dr_grpo", "Dr. GRPO", "dr-grpo", "reinforce++", "REINFORCE_plus_plus", "reinforce_pp"],
)
def test_an_algorithm_by_any_spelling(written):
    told = algorithm(("objective",), written)
    assert told is not None and algorithm(("task",), written) is None
    assert ("normalize_by_std" in told) == (written[0] in "dD") and ("reinforce_pp" in told) == (
        written[0] in "rR"
    )


@pytest.mark.parametrize(
    ("key", "home"), [("loss_agg_mode", "aggregation.type"), ("clip_ratio_c", "objective.dual_clip")]
)
def test_a_field_of_verl_is_told_its_name_here(folder, key, home):
    assert the_problem(f"{key}=3").fix == f"here it is `{home}`"


# -------------------------------------------------------------------------------------------------------
# train_infer_correction


def groups_of(mask: list[bool], level: str) -> list[list[int]]:
    places = [i for i, valid in enumerate(mask) if valid]
    if level == "token":
        return [[i] for i in places]
    if level != "segment":
        return [places] if places else []
    return split_at_gaps(places)


def split_at_gaps(places: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def aggregated(x: list[float], mask: list[bool], level: str) -> list[float]:
    """The value itself, its sum over the sequence, or its mean over the sequence (geometric) or segment; 0
    off the mask."""
    out = [0.0] * len(x)
    for group in groups_of(mask, level):
        total = math.fsum(x[i] for i in group)
        for i in group:
            out[i] = total if level in ("token", "sequence") else total / len(group)
    return out


LEVELS = ("token", "segment", "geometric", "sequence")
one_filter = st.fixed_dictionaries(
    {"enabled": st.just(True)},
    optional={
        "agg_type": st.sampled_from(LEVELS),
        "ratio_enabled": st.booleans(),
        "ratio_low": st.sampled_from((0.0, 0.6, 0.9)),
        "ratio_high": st.sampled_from((1.05, 1.7)),
        "diff_enabled": st.booleans(),
        "diff_low": st.sampled_from((-0.01, -0.1)),
        "diff_high": st.sampled_from((0.002, 0.05)),
    },
)


@settings(max_examples=120, deadline=None)
@given(
    level=st.sampled_from((None, *LEVELS)), upper=st.sampled_from((None, 1.2, 3.0)), filters=st.lists(one_filter, max_size=3),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 999),
)  # fmt: skip
def test_rolls_newer_block_weighs_and_keeps_as_it_does_there(level, upper, filters, lengths, seed):
    is_weight = {"enabled": level is not None, "upper_bound": upper} | (
        {} if level is None else {"weight_type": level}
    )
    config, _ = from_roll(
        {
            "train_infer_correction": {"is_weight": is_weight, "filters": filters},
            "enable_old_logprobs_recompute": True,
        }
    )
    batch = random_batch(lengths, seed=seed, dtype=torch.float64)
    found = correct(batch, config)
    tensors = (
        batch.old_logprobs_T,
        batch.rollout_logprobs_T,
        batch.response_mask_T,
        found.weights_T,
        found.keep_T,
    )
    rows = [x_T.split(lengths) for x_T in tensors]
    for old, rollout, mask, weights, kept in zip(
        *([row.tolist() for row in part] for part in rows), strict=True
    ):
        ratios = {a: aggregated([o - r for o, r in zip(old, rollout, strict=True)], mask, a) for a in LEVELS}
        gaps = {
            a: aggregated([math.exp(o) - math.exp(r) for o, r in zip(old, rollout, strict=True)], mask, a)
            for a in LEVELS
        }
        for i, valid in enumerate(mask):
            weight = 1.0 if level is None else min(math.exp(ratios[level][i]), upper or math.inf)
            assert weights[i] == pytest.approx(weight if valid else 0.0, rel=1e-9)
            passed = True
            for f in filters:
                at = f.get("agg_type", "token")
                if f.get("ratio_enabled", True):
                    passed &= f.get("ratio_low", 0.8) <= math.exp(ratios[at][i]) <= f.get("ratio_high", 1.2)
                if f.get("diff_enabled", False):
                    passed &= f.get("diff_low", -0.2) <= gaps[at][i] <= f.get("diff_high", 0.2)
            assert kept[i] == (valid and passed)


def test_rolls_newer_block_in_a_config(folder):
    Path("top.yaml").write_text(
        "extends: base.yaml\ncorrection:\n  roll:\n    train_infer_correction:\n      is_weight: {enabled: true, weight_type: segment}\n"
        "      filters:\n        - {enabled: true, agg_type: segment, diff_enabled: true, ratio_low: 0.8, ratio_high: 1.05}\n"
        "        - {enabled: false, ratio_high: 3.0}\n",
        encoding="utf-8",
    )
    notes: list[str] = []
    config = parse_config("top.yaml").validated(notes=notes)
    assert config.correction == CorrectionConfig(
        weight=ImportanceWeight(level="segment_geometric", upper=1.2),
        reject=(
            RatioRule(level="segment_geometric", lower=0.8, upper=1.05),
            DifferenceRule(rule="difference", reduce="segment_mean", lower=-0.2, upper=0.2),
        ),
        denominator="all",
    )
    assert [note.partition(": ")[2] for note in notes] == [
        "enabled: true, weight_type: segment -> weight: {level: segment_geometric, bound: truncate, upper: 1.2}",
        "enabled: true, agg_type: segment, diff_enabled: true, ratio_low: 0.8, ratio_high: 1.05 -> reject: "
        "{rule: ratio, level: segment_geometric, upper: 1.05, lower: 0.8}, "
        "{rule: difference, reduce: segment_mean, upper: 0.2, lower: -0.2}",
        "ratio_high: 3.0 -> no effect: the filter's `enabled` is false",
        "enable_old_logprobs_recompute is left out, and false by default -> denominator: all; "
        "ROLL then filters in the loss, after it has counted tokens",
    ]
    Path("resolved.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config("resolved.yaml") == config


def test_rolls_newer_block_switched_off_measures_only():
    for block in ({}, {"is_weight": {}, "filters": []}, {"is_weight": None, "filters": None}):
        assert from_roll({"train_infer_correction": block})[0] == PRESETS["disabled"]


@pytest.mark.parametrize(("block", "field", "value", "told"), [
    ({"is_weight": {"enabled": True, "detach": False}}, "is_weight.detach", "false", "weights carry no gradient here"),
    ({"is_weight": {"enabled": True, "weight_type": "turn"}}, "is_weight.weight_type", "turn", "not one of the choices"),
    ({"is_weight": {"enabled": True, "upper_bound": -1}}, "is_weight.upper_bound", "-1", "must be a number"),
    ({"is_weight": 3}, "is_weight", "3", "must be a block of keys"),
    ({"is_weights": {}}, "is_weights", "{}", "unknown key"),
    ({"filters": {"enabled": True}}, "filters", "{enabled: true}", "must be a list of blocks"),
    ({"filters": [{}, {"enabled": True, "ratio_low": 2.0}]}, "filters.1.ratio_low", "2.0", "above the upper bound 1.2"),
    ({"filters": [{"enabled": True, "ratio_lo": 2.0}]}, "filters.0.ratio_lo", "2.0", "unknown key"),
    ({"filters": [{"enabled": True, "diff_enabled": True, "diff_low": 0.1}]}, "filters.0.diff_low", "0.1", "policies agree on"),
    ({"filters": [{"enabled": True, "diff_high": "0.1"}]}, "filters.0.diff_high", "'0.1'", "must be a number"),
])  # fmt: skip
def test_what_rolls_newer_block_cannot_say_here(folder, block, field, value, told):
    with pytest.raises(ConfigError) as raised:
        from_roll({"train_infer_correction": block})
    (problem,) = raised.value.problems
    assert (problem.field, problem.value) == (f"train_infer_correction.{field}", value)
    assert told in problem.error and problem.fix


def test_both_of_rolls_blocks_at_once(folder):
    problem = the_problem("correction={roll: {train_infer_correction: {}, infer_is_mode: token}}")
    assert problem.field == "correction.roll.infer_is_mode" and problem.fix == "keep one of the two"
    assert "correction: {roll: {...}}" in the_problem("train_infer_correction={filters: []}").fix


def test_a_problem_of_a_filter_names_its_line(folder):
    Path("top.yaml").write_text(
        "extends: base.yaml\ncorrection:\n  roll:\n    train_infer_correction:\n      filters:\n        - enabled: true\n"
        "          agg_type: turn\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError) as raised:
        load_config("top.yaml")
    (problem,) = raised.value.problems
    assert (problem.where, problem.field) == (
        "top.yaml:7",
        "correction.roll.train_infer_correction.filters.0.agg_type",
    )
