"""The loader: how layers merge, that a resolved config loads back equal, and the error for each kind of bad
input."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.loader import ConfigError, Problem, check_files, load_config, parse_config, resolved_yaml
from configs.presets import PRESETS, preset_body
from configs.reading.schema_shape import Shape
from configs.reading.wording import PATTERNS
from configs.schema import RunConfig, SftConfig
from configs.schema.hardware import HardwareConfig
from configs.schema.server_contradictions import NEVER_WITH

BASE = """\
model: {path: model}
task:
  type: countdown
  num_numbers: 4
rollout:
  group_size: 4
  prompts_per_step: 16
learner:
  optimizer:
    lr: 1e-4
    betas: [0.9, 0.99]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    return tmp_path


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def problems_of(path, overrides=(), **options) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as raised:
        parse_config(path, overrides).validated(**options)
    for problem in raised.value.problems:  # each part is in the text that the user sees
        for part in (problem.where, problem.field, problem.value, problem.error, problem.fix):
            assert part and part in str(raised.value)
    return raised.value.problems


def the_problem(path, overrides=(), **options) -> Problem:
    (problem,) = problems_of(path, overrides, **options)
    return problem


def test_a_partly_given_block_keeps_the_defaults_of_the_rest(folder):
    """What the optimizer of a warm start, of the policy and of the critic is without a block, it is with one too."""
    sft = write("sft.yaml", "kind: sft\nmodel: {path: m}\noutput: out\ndata: {type: countdown}\n")
    given = load_config(sft, ["optimizer={weight_decay: 0.1}"]).optimizer
    assert given == load_config(sft).optimizer.model_copy(update={"weight_decay": 0.1})
    assert (given.lr, given.min_lr, given.schedule, given.betas) == (2e-3, 0.0, "cosine", (0.9, 0.98))


# ---- merging


def test_without_kind_it_is_a_training_run(folder):
    config = load_config("base.yaml")
    assert isinstance(config, RunConfig)
    assert config.learner.optimizer.lr == 1e-4 and config.learner.optimizer.betas == (0.9, 0.99)


def test_sft(folder):
    config = load_config(
        write(
            "sft.yaml",
            "kind: sft\nmodel: {path: m}\noutput: out\ndata: {type: countdown, examples: 90_000}\n",
        )
    )
    assert isinstance(config, SftConfig) and config.data.examples == 90_000 and config.output == Path("out")


def test_layers_left_to_right_then_the_file_then_overrides(folder):
    write(
        "a.yaml",
        "steps: 1\nseed: 1\nname: a\nrollout: {group_size: 2, temperature: 0.5}\nlearner: {optimizer: {betas: [0.1, 0.2]}}\n",
    )
    write("b.yaml", "steps: 2\nseed: 2\nrollout: {max_new_tokens: 7}\n")
    # Relative to the file that names them.
    write("sub/top.yaml", "extends: [../base.yaml, ../a.yaml, ../b.yaml]\nsteps: 3\n")
    config = load_config("sub/top.yaml", ["seed=4", "rollout.replicas=2"])
    assert (config.steps, config.seed, config.name) == (3, 4, "a")
    rollout = config.rollout
    assert (rollout.group_size, rollout.temperature, rollout.max_new_tokens, rollout.replicas) == (
        2,
        0.5,
        7,
        2,
    )
    assert rollout.prompts_per_step == 16  # still from base.yaml
    assert config.learner.optimizer.betas == (0.1, 0.2)  # a list replaces
    assert config.learner.optimizer.lr == 1e-4


def test_two_files_may_extend_the_same_base(folder):
    write("a.yaml", "extends: base.yaml\nsteps: 5\n")
    write("b.yaml", "extends: base.yaml\nseed: 6\n")
    config = load_config(write("top.yaml", "extends: [a.yaml, b.yaml]\n"))
    assert (config.steps, config.seed) == (5, 6)


def test_a_file_is_laid_over_another_on_the_command_line(folder):
    write("a.yaml", "seed: 1\nsteps: 1\nname: a\n")
    write("sub/c.yaml", "name: c\n")
    write("sub/b.yaml", "extends: c.yaml\nsteps: 2\n")
    top = write("sub/top.yaml", "extends: ../base.yaml\nseed: 9\nsteps: 9\n")
    # Relative to the current folder, whatever the order.
    config = load_config(top, ["steps=3", "extends=[a.yaml, sub/b.yaml]"])
    assert (config.seed, config.steps, config.name, config.rollout.group_size) == (1, 3, "c", 4)
    assert load_config(top, ["extends=a.yaml"]).steps == 1
    one_by_one = load_config(top, ["extends=a.yaml", "steps=3", "extends=sub/b.yaml"])
    assert one_by_one == config and load_config(top, ["extends=sub/b.yaml", "extends=a.yaml"]).steps == 1
    problem = the_problem(top, ["extends=c.yaml"])
    assert (problem.where, problem.field, problem.value) == ("command line", "extends", "c.yaml") and str(
        Path.cwd()
    ) in problem.error
    assert "must be the name of a file" in the_problem(top, ["extends=3"]).error
    assert {p.field for p in problems_of(top, ["extends=gone.yaml", "nonsense"])} == {"extends", "(override)"}


def test_overrides_are_one_layer(folder):
    flat = ["task.type=gsm8k", "task.train_path=x.jsonl"]
    expected = load_config("base.yaml", flat)
    assert expected.task.type == "gsm8k"
    assert load_config("base.yaml", flat[::-1]) == expected
    assert load_config("base.yaml", ["task={type: gsm8k, train_path: x.jsonl}"]) == expected
    assert load_config("base.yaml", ["steps=5", "steps=6"]).steps == 6


def test_a_block_that_changes_its_variant_starts_afresh(folder):
    path = write("top.yaml", "extends: base.yaml\ntask: {type: jsonl, train_path: a.jsonl}\n")
    # num_numbers of countdown is gone.
    assert load_config(path).task.model_fields_set == {
        "type",
        "train_path",
    }
    assert load_config("base.yaml", ["task.type=countdown"]).task.num_numbers == 4  # the same variant: kept
    weights = write("w.yaml", "extends: base.yaml\ncorrection: {weight: {upper: 3.0}}\n")
    assert load_config(weights).correction.weight.level == "token"  # without a level: that of the default
    assert load_config(weights).correction.weight.upper == 3.0
    assert load_config(weights, ["correction.weight.level=none"]).correction.weight.level == "none"


def test_kind_is_not_changed_by_a_later_layer(folder):
    write("train.yaml", f"kind: train\n{BASE}")
    problem = the_problem("train.yaml", ["kind=sft"])
    assert (problem.where, problem.field, problem.value) == ("command line", "kind", "sft")
    assert "`kind` is 'train' in train.yaml:1" in problem.error and "name a config of kind sft" in problem.fix


def test_null_replaces_a_block(folder):
    path = write("top.yaml", "extends: base.yaml\nreward: {type: countdown}\n")
    assert load_config(path).reward.type == "countdown"
    assert load_config(path, ["reward=null"]).reward is None


def test_yaml_anchors_and_merge_keys(folder):
    text = "extends: base.yaml\nkl: &shared {coefficient: 0.5}\nentropy: *shared\nevaluation: {<<: {every: 5, max_prompts: 7}, every: 6}\n"
    config = load_config(write("top.yaml", text))
    assert config.kl.coefficient == config.entropy.coefficient == 0.5
    assert (config.evaluation.every, config.evaluation.max_prompts) == (6, 7)


def test_keys_that_are_merged_in_again_and_again_stay_one_each(folder):
    """Each merge of nine times the one before: 9 ** 30 pairs, unless equal keys are dropped on the way. The
    nearest one counts."""
    merged = "{every: 5, max_prompts: 7}"
    for level in range(30):
        merged = f"{{<<: [&a{level} {merged}{f', *a{level}' * 8}], every: {level}}}"
    config = load_config(write("top.yaml", f"extends: base.yaml\nevaluation: {merged}\n"))
    assert (config.evaluation.every, config.evaluation.max_prompts) == (29, 7)


def test_a_block_that_merges_and_overrides_can_be_used_twice(folder):
    text = "extends: base.yaml\nkl: &a {<<: {coefficient: 0.5}, coefficient: 0.25}\nentropy: *a\n"
    config = load_config(write("top.yaml", text))
    assert config.kl.coefficient == config.entropy.coefficient == 0.25


# ---- YAML 1.2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        ("2.", 2.0),
        (".5", 0.5),
        ("3", 3.0),
        ("1_000.5", 1000.5),
        ("0.25e1", 2.5),
    ],
)
def test_numbers_in_files_and_overrides(folder, text, value):
    top = write("top.yaml", f"extends: base.yaml\nlearner: {{optimizer: {{eps: {text}}}}}\n")
    assert load_config(top).learner.optimizer.eps == value
    assert load_config("base.yaml", [f"learner.optimizer.eps={text}"]).learner.optimizer.eps == value


@pytest.mark.parametrize(
    "text", ["on", "no", "yes", "2024-01-01", "1e", "x1", "12:30:45", "1.2.3", "e5", "nan-run"]
)
def test_what_stays_text(folder, text):
    assert load_config("base.yaml", [f"tracking.experiment={text}"]).tracking.experiment == text


@settings(deadline=None)
@given(
    st.one_of(st.floats(allow_nan=False), st.integers(-(10**30), 10**30), st.booleans(), st.text(max_size=20))
)
def test_override_values_round_trip(value):
    written = json.dumps(value).replace("Infinity", ".inf") if isinstance(value, float) else json.dumps(value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.yaml")
        path.write_text(BASE, encoding="utf-8")
        got = load_config(path, [f"rollout.server_args.key={written}"]).rollout.server_args["key"]
    assert got == value and type(got) is type(value)


@settings(deadline=None)
@given(st.floats(min_value=1e-300, max_value=1e300))
def test_any_way_to_write_a_float_is_read(value):
    for written in (repr(value), f"{value:e}", f"{value:.17g}", f"{value:E}"):
        (parsed,) = yaml_of([written])
        assert parsed == float(written)


def yaml_of(texts):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.yaml")
        path.write_text(BASE, encoding="utf-8")
        return [load_config(path, [f"learner.optimizer.eps={text}"]).learner.optimizer.eps for text in texts]


# ---- resolved_yaml

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
texts = st.text(min_size=1, max_size=25)
tricky = st.sampled_from(
    [
        "1e-4",
        "null",
        "~",
        "yes",
        "on",
        "0x1F",
        "1_000",
        "- a",
        "a: b",
        "#c",
        "'",
        '"',
        " x ",
        "\n",
        "\x85",
        "a\u2028b",
        ".inf",
        "0o7",
        "<<",
    ]
)
# Which paths may not be.
paths = (
    st.one_of(texts, tricky)
    .map(Path)
    .filter(lambda path: not str(path).startswith(("~", "$")) and "\0" not in str(path))
)
positive = st.floats(min_value=1e-12, max_value=1e12)
scalars = st.one_of(st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False), texts, tricky)


def is_finite(value) -> bool:
    return value not in (float("inf"), float("-inf"))


levels = st.sampled_from(["token", "sequence", "geometric", "segment"])
weights = st.one_of(
    st.just({"level": "none"}),
    st.fixed_dictionaries({"level": levels, "bound": st.just("none"), "normalise": st.booleans()}),
    st.fixed_dictionaries({"level": levels, "upper": positive}, optional={"normalise": st.booleans()}),
    st.fixed_dictionaries(
        {"level": levels, "bound": st.sampled_from(["clip", "mask"]), "upper": st.floats(1, 1e6)},
        optional={"lower": st.floats(0, 1)},
    ),
)
rules = st.one_of(
    st.fixed_dictionaries(
        {"rule": st.just("ratio"), "level": levels, "upper": st.floats(1, 1e6)},
        optional={"lower": st.just(0.0) | st.floats(1e-8, 1)},
    ),
    st.fixed_dictionaries(
        {
            "rule": st.sampled_from(["k2", "k3"]),
            "reduce": st.sampled_from(["token", "sum", "mean", "max"]),
            "upper": positive,
        }
    ),
)
corrections = st.one_of(
    st.sampled_from(list(PRESETS)).map(preset_body),
    st.fixed_dictionaries(
        {"weight": weights, "reject": st.lists(rules, max_size=3)},
        optional={"veto": st.floats(1e-9, 0.99), "denominator": st.sampled_from(["kept", "all"])},
    ),
)


# Hypothesis draws texts from the code under test too, so that names that are refused come up.
flags = st.one_of(texts, tricky).filter(lambda name: name.replace("_", "-") not in NEVER_WITH)


@st.composite
def run_configs(draw) -> RunConfig:
    options = {"system_prompt": st.none() | texts | tricky, "heldout_path": st.none() | paths}
    countdown = {
        "type": st.just("countdown"),
        "num_numbers": st.integers(1, 5),
        "heldout_fraction": st.floats(0.01, 0.99),
    }
    gsm8k = {"type": st.just("gsm8k"), "train_path": paths, **options}
    jsonl = {"type": st.just("jsonl"), "train_path": paths, "prompt_field": texts, **options}
    task = draw(
        st.one_of(
            st.fixed_dictionaries(countdown), st.fixed_dictionaries(gsm8k), st.fixed_dictionaries(jsonl)
        )
    )
    minibatches = draw(st.integers(1, 4))
    return RunConfig.model_validate(
        {
            "name": draw(names),
            "model": {
                "path": draw(paths),
                "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
                "chat_template_kwargs": {}
                if task["type"] == "countdown"
                else draw(st.dictionaries(st.one_of(texts, tricky), scalars.filter(is_finite), max_size=3)),
            },
            "task": task,
            "rollout": {
                "server_args": draw(st.dictionaries(flags, scalars, max_size=4)),
                "prompts_per_step": 8 * minibatches,
                "temperature": draw(st.floats(1e-3, 100)),
                "first_port": draw(st.none() | st.integers(1024, 65000)),
            },
            "learner": {
                "minibatches": minibatches,
                "optimizer": {"lr": draw(st.floats(1e-12, 1)), "betas": (draw(st.floats(0, 0.999)), 0.5)},
            },
            "objective": {"type": "clipped", "dual_clip": draw(st.none() | st.floats(1.001, 100))},
            "correction": draw(corrections),
            "tracking": {"experiment": draw(st.one_of(texts, tricky)), "uri": draw(st.none() | texts)},
            "resume": draw(st.none() | paths),
        }
    )


@settings(deadline=None)
@given(run_configs())
def test_resolved_config_loads_back_equal(config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(resolved_yaml(config), encoding="utf-8")
        again = load_config(path)
    assert again == config
    assert [type(v) for v in again.rollout.server_args.values()] == [
        type(v) for v in config.rollout.server_args.values()
    ]


@settings(deadline=None)
@given(run_configs())
def test_resolved_config_reads_the_same_with_plain_yaml(config):
    """Other tools, with YAML 1.1, agree on every text (floats like 1e-05 are written so that they do too)."""
    assert yaml.safe_load(resolved_yaml(config)) == config.model_dump(mode="json")


def test_resolved_sft_config_loads_back_equal(folder):
    config = load_config(
        write("s.yaml", "kind: sft\nmodel: {path: m}\noutput: o\ndata: {type: jsonl, path: d.jsonl}\n")
    )
    assert load_config(write("again.yaml", resolved_yaml(config))) == config


# ---- errors in the content

BAD_VALUES = [
    # override, field, value shown, in the error, in the fix
    ("rollout.group_sze=8", "rollout.group_sze", "8", "unknown key", "did you mean `group_size`?"),
    ("rollot.group_size=8", "rollot", "{group_size: 8}", "unknown key", "did you mean `rollout`?"),
    ("kl.zzz=8", "kl.zzz", "8", "unknown key", "keys here: coefficient, place, estimator"),
    (
        "lr=3",
        "lr",
        "3",
        "unknown key",
        "it exists as `learner.optimizer.lr` and `critic.optimizer.lr`; keys here: kind, name",
    ),
    (
        "betas=[1]",
        "betas",
        "[1]",
        "unknown key",
        "it exists as `learner.optimizer.betas` and `critic.optimizer.betas`; keys here: kind",
    ),
    ("task.num_numbrs=3", "task.num_numbrs", "3", "unknown key", "did you mean `num_numbers`?"),
    ("task.type=gsm8", "task.type", "gsm8", "unknown variant", "did you mean `gsm8k`?"),
    ("task.type=zzz", "task.type", "zzz", "unknown variant", "variants: countdown, gsm8k, jsonl"),
    (
        "correction.weight.level=tokn",
        "correction.weight.level",
        "tokn",
        "unknown variant",
        "did you mean `token`?",
    ),
    (
        "task.train_path=x",
        "task.train_path",
        "x",
        "unknown key",
        "it goes with `task.type` of: gsm8k, jsonl; keys here: type, num_numbers",
    ),
    (
        "correction=decoupled_token_si",
        "correction.preset",
        "decoupled_token_si",
        "no such preset",
        "did you mean `decoupled_token_is`?",
    ),
    (
        "correction=token_is",
        "correction.preset",
        "token_is",
        "no such preset",
        "did you mean `decoupled_token_is`?",
    ),
    (
        "objective.type=trpo",
        "objective.type",
        "trpo",
        "unknown variant",
        "variants: clipped, gspo, gmpo, cispo, sapo, dppo, policy_gradient",
    ),
    (
        "advantage.type=trpo",
        "advantage.type",
        "trpo",
        "unknown variant",
        "variants: grpo, gdpo, rloo, opo, reinforce_pp, rei",
    ),
    (
        "record_batches=sometimes",
        "record_batches",
        "sometimes (command line)",
        "not one of the choices",
        "`all` or `{every: N}`",
    ),
    (
        "record_batches.every=0",
        "record_batches.every",
        "0",
        "must be greater than or equal to 1",
        "use a value at least 1",
    ),
    ("record_batches.every='3'", "record_batches.every", "'3'", "must be a whole number", "without quotes"),
    ("record_batches={every: 10, x: 1}", "record_batches.x", "1", "unknown key", "keys here: every"),
    (
        "correction.rollout_is=token",
        "correction.rollout_is",
        "token",
        "unknown key",
        "here it is a key of `correction: {verl: {...}}`",
    ),
    (
        "correction.verl.rollout_is=geometric",
        "correction.verl.rollout_is",
        "geometric",
        "not one of the choices",
        "token, sequence",
    ),
    (
        "correction.veto=1.0",
        "correction.veto",
        "1.0",
        "must be less than 1",
        "use a value below 1.0 (default: null)",
    ),
    ("task.type=gsm8k", "task.train_path", "(not set)", "required", "add `task.train_path`"),
    (
        "reward.type=function",
        "reward.function",
        "(not set)",
        "required",
        "add `reward.function`: `module:function`, called as `f(",
    ),
    ("kl.estimator=k4", "kl.estimator", "k4", "not one of the choices", "k1"),
    ("model.dtype=bfloat", "model.dtype", "bfloat", "not one of the choices", "did you mean `bfloat16`?"),
    ("steps='8'", "steps", "'8'", "must be a whole number", "write it without quotes: `steps: 8`"),
    ("steps=8.0", "steps", "8.0", "must be a whole number", "write `steps: 8`"),
    ("steps=8.5", "steps", "8.5", "must be a whole number", "default: 100"),
    ("steps=true", "steps", "true", "must be a whole number", "default: 100"),
    ("steps=0", "steps", "0", "must be greater than or equal to 1", "use a value at least 1 (default: 100)"),
    ("steps.a=1", "steps", "{a: 1}", "must be a whole number", "default: 100"),
    ("learner.optimizer.lr=fast", "learner.optimizer.lr", "fast", "must be a number", "default: 1.0e-06"),
    ("learner.optimizer.lr=true", "learner.optimizer.lr", "true", "must be a number", "default: 1.0e-06"),
    ("learner.optimizer.lr='1e-4'", "learner.optimizer.lr", "'1e-4'", "must be a number", "without quotes"),
    (
        "learner.optimizer.distributed=yes",
        "learner.optimizer.distributed",
        "yes",
        "must be true or false",
        "default: true",
    ),
    ("name='a b'", "name", "a b", "must be letters, digits, `.`, `_` and `-`, the first", "default: run"),
    (
        "model.path=''",
        "model.path",
        "'' (command line)",
        "an empty path",
        "name a file or folder, `.` for the current folder",
    ),
    (
        "task={type: jsonl, train_path: a, heldout_path: b, heldout_sets: {'a b': c}}",
        "task.heldout_sets.a b",
        "a b",
        "the name must be letters, digits, `_` and `-`",
        "correct the name",
    ),
    (r'resume="a\0b"', "resume", r'"a\0b" (command line)', "cannot hold the character NUL", "remove it"),
    ("layout=null", "layout", "null", "must be a block of keys", "remove `layout:`"),
    ("layout=3", "layout", "3", "must be a block of keys", "dp"),
    (
        "advantage=rloo",
        "advantage",
        "rloo",
        "must be a block of keys",
        "`advantage.type=rloo` on the command",
    ),
    (
        "correction.weight=token",
        "correction.weight",
        "token",
        "must be a block",
        "correction.weight.level=token",
    ),
    ("objective=my:f", "objective", "my:f", "must be a block", '{type: function, function: "my:f"}'),
    ("objective=grp", "objective", "grp", "must be a block of keys", "variants: clipped"),
    (
        "learner.optimizer.betas=0.9",
        "learner.optimizer.betas",
        "0.9",
        "must be a list",
        "default: [0.9, 0.95]",
    ),
    (
        "learner.optimizer.betas=[0.9]",
        "learner.optimizer.betas",
        "[0.9]",
        "must be a list of 2 values",
        "default: [0.9, 0.95]",
    ),
    (
        "learner.optimizer.betas=[]",
        "learner.optimizer.betas",
        "[]",
        "must be a list of 2 values",
        "default: [0.9, 0.95]",
    ),
    (
        "learner.optimizer.betas=[0.9, 0.9, 0.9]",
        "learner.optimizer.betas",
        "[0.9, 0.9, 0.9]",
        "must be a list of 2 values",
        "[0.9, 0.95]",
    ),
    (
        "reward={type: weighted, parts: {}}",
        "reward.parts",
        "{}",
        "must not be empty",
        "give one or more: The rewards by name, e.g. `correct: {",
    ),
    ("layout.dp=Auto", "layout.dp", "Auto", "must be a whole number or `auto`", "default: auto"),
    ("layout.dp=0", "layout.dp", "0", "must be greater than or equal to 1", "default: auto"),
    (
        "correction.reject={upper: 2}",
        "correction.reject",
        "{upper: 2}",
        "must be a list",
        "write a list: `correction.reject: [{up",
    ),
    (
        "launch.slurm.setup=module load cuda",
        "launch.slurm.setup",
        "module load cuda",
        "must be a list",
        "setup: [module load cuda]`",
    ),
    (
        "rollout.server_args.x=[1]",
        "rollout.server_args.x",
        "[1]",
        "must be text, a whole number, a number or true or false",
        "correct",
    ),
    (
        "objective.dual_clip=0.5",
        "objective.dual_clip",
        "0.5",
        "must be greater than 1",
        "above 1.0 (default: 3.0)",
    ),
    ("kind=trian", "kind", "trian", "unknown kind", "did you mean `train`?"),
    # validators of the schema: every field that they name
    (
        "rollout.top_p=0.9",
        "rollout.top_p, rollout.top_k",
        "rollout.top_p: 0.9 (command line), rollout.top_k: -1 (default)",
        "truncated distribution",
        "or top_p: 1.0",
    ),
    (
        "learner.optimizer.min_lr=1.0",
        "learner.optimizer.min_lr, learner.optimizer.lr",
        "learner.optimizer.min_lr: 1.0 (command line), learner.optimizer.lr: 0.0001 (c.yaml:10)",
        "min_lr=1.0 is above lr=0.0001",
        "change or remove one of",
    ),
    (
        "learner.minibatches=3",
        "rollout.prompts_per_step, learner.minibatches",
        "rollout.prompts_per_step: 16 (c.yaml:7), learner.minibatches: 3 (command line)",
        "does not divide",
        "use 15 or 18 prompts",
    ),
    (
        "layout.dp=128",
        "rollout.prompts_per_step, learner.minibatches, rollout.group_size, layout.dp",
        "rollout.prompts_per_step: 16 (c.yaml:7), learner.minibatches: 1 (default), rollout.group_size: 4 (c.yaml:6), "
        "layout.dp: 128 (command line)",
        "a minibatch of 64 sequences",
        "use 32 prompts",
    ),
    (
        "layout.dp=24",
        "rollout.prompts_per_step, learner.minibatches, rollout.group_size, layout.dp",
        "rollout.prompts_per_step: 16 (c.yaml:7), learner.minibatches: 1 (default), rollout.group_size: 4 (c.yaml:6), "
        "layout.dp: 24 (command line)",
        "does not divide by layout.dp=24",
        "use 12 or 18 prompts",
    ),
]


def as_nested(override: str) -> str:
    """An override as the lines of a YAML file."""
    key, _, value = override.partition("=")
    parts = key.split(".")
    return (
        "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(parts[:-1]))
        + f"{'  ' * (len(parts) - 1)}{parts[-1]}: {value}\n"
    )


@pytest.mark.parametrize(
    ("override", "field", "value", "error", "fix"), BAD_VALUES, ids=[case[0] for case in BAD_VALUES]
)
def test_bad_value_on_the_command_line_and_in_a_file(folder, override, field, value, error, fix):
    write("c.yaml", BASE)
    problem = the_problem("c.yaml", [override])
    assert "command line" in problem.where
    assert (problem.field, problem.value) == (field, value)
    assert error in problem.error and fix in problem.fix

    text = "# a comment\nextends: c.yaml\n" + as_nested(override)
    line = text.count("\n") if value != "{group_size: 8}" and value != "{a: 1}" else 3
    problem = the_problem(write("top.yaml", text))
    # Of its block.
    line = line - 1 if field in ("task.train_path", "reward.function") and value == "(not set)" else line
    assert f"top.yaml:{line}" in problem.where
    assert problem.field == field and error in problem.error and fix in problem.fix
    assert problem.value == value.replace("command line", f"top.yaml:{line}")


def test_all_contradictions_of_a_block_are_reported_at_once(folder):
    write("c.yaml", BASE)
    overrides = ["rollout.drain_s=5", "rollout.top_k=1"]
    fields = [{name.strip() for name in p.field.split(",")} for p in problems_of("c.yaml", overrides)]
    alone = [{name.strip() for name in the_problem("c.yaml", [one]).field.split(",")} for one in overrides]
    assert fields == alone and {"rollout.drain_s", "rollout.max_staleness"} in fields


@pytest.mark.parametrize("field", ["name", "model.path"])
@pytest.mark.parametrize(("written", "read"), [("3", "3"), ("1.10", "1.1"), ("2024_01", "202401")])
def test_a_number_in_the_place_of_text_keeps_its_text_in_the_fix(folder, field, written, read):
    """The shell takes away the quotes of ``name="3"``, so an override needs others around them."""
    write("c.yaml", BASE)
    problem = the_problem("c.yaml", [f"{field}={written}"])
    assert (problem.field, problem.value) == (field, read) and problem.error.endswith("text")
    assert problem.fix == f"put it in quotes that the shell leaves: '{field}=\"{written}\"'"
    assert shlex.split(problem.fix.partition(": ")[2])[0] == f'{field}="{written}"'
    problem = the_problem(write("top.yaml", "extends: c.yaml\n" + as_nested(f"{field}={written}")))
    assert problem.fix == f'put it in quotes: `{field}: "{written}"`'


def test_the_line_is_that_of_the_layer_that_set_the_key(folder):
    write("low.yaml", "extends: base.yaml\n\nkl: {estimator: k9}\nsteps: nine\n")
    write("top.yaml", "extends: low.yaml\nsteps: ten\n")
    wheres = {p.field: (p.where, p.value) for p in problems_of("top.yaml")}
    assert wheres == {"kl.estimator": ("low.yaml:3", "k9"), "steps": ("top.yaml:2", "ten")}


def test_a_cross_field_error_names_both_places(folder):
    problem = the_problem(write("top.yaml", "extends: base.yaml\nlearner:\n  minibatches: 3\n"))
    assert problem.where == "base.yaml:7, top.yaml:3"


def test_missing_blocks(folder):
    problems = problems_of(write("c.yaml", "steps: 3\n"))
    assert [(p.where, p.field, p.value) for p in problems] == [
        ("c.yaml", "model", "(not set)"),
        ("c.yaml", "task", "(not set)"),
    ]
    assert "add `model`" in problems[0].fix and "one `type` of: countdown, gsm8k, jsonl" in problems[1].fix
    problem = the_problem(write("d.yaml", "model: {}\ntask: {type: countdown}\n"))
    assert (problem.where, problem.field) == ("d.yaml:1", "model.path")
    assert "A Hugging Face folder" in problem.fix
    problem = the_problem(write("e.yaml", "model: {path: m}\ntask:\n  num_numbers: 3\n"))
    assert (problem.where, problem.field, problem.value) == ("e.yaml:2", "task.type", "(not set)")
    assert problem.fix == "set it to one of: countdown, gsm8k, jsonl"


def test_all_problems_are_reported_at_once(folder):
    top = write("top.yaml", "extends: base.yaml\nstepz: 3\nrollout: {top_k: 1}\nkl: {estimator: k9}\n")
    problems = problems_of(top, ["--seed=1", "name", "layout.dp=0"])
    assert {p.field for p in problems} == {
        "(override)",
        "stepz",
        "rollout.top_k",
        "kl.estimator",
        "layout.dp",
    }
    assert len(problems) == 6


def test_every_pattern_of_the_schema_has_words():
    schemas = (RunConfig, SftConfig, HardwareConfig)
    text = json.dumps([schema.model_json_schema() for schema in schemas])
    found = re.findall(r'"pattern(?:Properties)?": (?:{)?("[^"]*")', text)
    assert set(map(json.loads, found)) == PATTERNS.keys()


def test_a_check_s_error_does_not_repeat_its_field(folder):
    for text in ("model.path: is gone; look", "model.path=m/x: is gone; look"):
        with pytest.raises(ConfigError) as raised:
            parse_config("base.yaml").validated(check=lambda config, text=text: [("model.path", text)])
        (problem,) = raised.value.problems
        assert (problem.field, problem.error, problem.fix) == ("model.path", "is gone", "look")


def test_json_s_escapes_of_a_character_beyond_16_bits_are_read(folder):
    text = json.dumps({"model": {"path": "\U0001f600"}, "rollout": {"server_args": {"\U0001f600": "a"}}})
    assert r"\ud83d\ude00" in text
    config = load_config("base.yaml", [f"extends={write('dump.json', text)}"])
    assert config.model.path == Path("\U0001f600") and config.rollout.server_args == {"\U0001f600": "a"}


# ---- errors in files and overrides


def nested_block(depth: int) -> str:
    return "\n".join(" " * level + "a:" for level in range(depth))


def nested_aliases(depth: int, count: int) -> str:
    """Lists inside each other, each of ``count`` times the one before: a few lines that stand for count **
    depth values."""
    lists = [", ".join(["1"] * count), *(", ".join([f"*a{level}"] * count) for level in range(depth - 1))]
    return "\n".join(f"a{level}: &a{level} [{items}]" for level, items in enumerate(lists))


@pytest.mark.parametrize(
    ("text", "line", "field", "value", "error", "fix"),
    [
        ("steps: [1\nseed: 2\n", 2, "(YAML syntax)", "seed: 2", "line 2, column 5", "correct the YAML"),
        ("steps: 1\n\tseed: 2\n", 2, "(YAML syntax)", "seed: 2", "malformed YAML", "tabs"),
        ("name: 'a\n", 2, "(YAML syntax)", "(end of the file)", "malformed YAML", "closed quotes"),
        ("a: 1\n b: 2\n", 2, "(YAML syntax)", "b: 2", "line 2, column 3", "correct the YAML"),
        (
            "steps: 1\nkl:\n  estimator: k1\n  estimator: k3\n",
            4,
            "kl.estimator",
            "estimator: k3",
            "first in line 3",
            "keep one of them",
        ),
        (
            "kl: {estimator: k1, estimator: k3}\n",
            1,
            "kl.estimator",
            "kl: {estimator: k1, estimator: k3}",
            "repeated",
            "keep one",
        ),
        ("1: 2\n", 1, "(top level)", "1: 2", "the key 1 is not text", "write the key in quotes"),
        ("1" * 1001 + ": 2\n", 1, "(top level)", "1" * 97 + "...", "it has 1001 digits", "correct the value"),
        ('name: "\\ud800"\n', 1, "name", 'name: "\\ud800"', "half of a surrogate pair", "correct the value"),
        (
            'kl: {"\\udc00x": 1}\n',
            1,
            "kl",
            'kl: {"\\udc00x": 1}',
            "half of a surrogate pair",
            "correct the value",
        ),
        ("a: &x [*x]\n", 1, "a.0", "a: &x [*x]", "contains itself", "remove the alias"),
        (
            "? [a]\n: 1\n",
            1,
            "(top level)",
            "? [a]",
            "a key that is a list or a block",
            "write text as the key",
        ),
        (
            "seed: " + "[" * 3000,
            1,
            "(YAML syntax)",
            "seed: " + "[" * 91 + "...",
            "more than 100 blocks inside each other",
            "nest less",
        ),
        (
            nested_block(3000),
            100,
            "(YAML syntax)",
            "a:",
            "more than 100 blocks inside each other",
            "nest less",
        ),
        (
            nested_aliases(300, 1),
            1,
            "(YAML syntax)",
            "a0: &a0 [1]",
            "more than 100 blocks inside each other",
            "nest less",
        ),
        (
            "seed: [" + "1," * 20_000 + "]",
            1,
            "(YAML syntax)",
            "seed: [" + "1," * 45 + "...",
            "more than 10000 values, aliases written out (line 1",
            "name a config, or remove aliases of aliases",
        ),
        (
            "seed: [" + "1," * 15_000 + "]",
            1,
            "seed.9998",
            "seed: [" + "1," * 45 + "...",
            "more than 10000 values, aliases written out",
            "name a config, or remove aliases of aliases",
        ),
        (
            nested_aliases(9, 9),
            1,
            "a4.0.2.0.5.2",
            "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]",
            "more than 10000 values, aliases written out",
            "name a config, or remove aliases of aliases",
        ),
        (
            "a: !!python/name:os.system x\n",
            1,
            "(YAML syntax)",
            "a: !!python/name:os.system x",
            "could not determine a constructor",
            "YAML",
        ),
        (
            "a: !!timestamp 2024-01-01\n",
            1,
            "a",
            "a: !!timestamp 2024-01-01",
            "not used in configs",
            "write text",
        ),
        ("a: !!int x\n", 1, "a", "a: !!int x", "cannot be read as", "correct the value"),
        ("a: 1\n---\nb: 2\n", 2, "(YAML syntax)", "---", "a second document begins", "remove the `---`"),
        (
            f"a: {'9' * 5000}\n",
            1,
            "a",
            f"a: {'9' * 94}...",
            "cannot be read as int: it has 5000 digits",
            "correct the value",
        ),
        (
            f"a: 0x{'f' * 5000}\n",
            1,
            "a",
            f"a: 0x{'f' * 92}...",
            "cannot be read as int: it has 5002 digits",
            "correct the value",
        ),
        ("- 1\n", 1, "(the whole file)", "[1]", "this file holds a list", "key: value"),
        ("hello\n", 1, "(the whole file)", "hello", "this file holds only the value hello", "key: value"),
    ],
)
def test_malformed_files(folder, text, line, field, value, error, fix):
    problem = the_problem(write("bad.yaml", text))
    assert (problem.where, problem.field, problem.value) == (f"bad.yaml:{line}", field, value)
    assert error in problem.error and fix in problem.fix
    problem = the_problem(write("top.yaml", "extends: bad.yaml\n"))
    assert problem.where == f"bad.yaml:{line}"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_empty_files(folder, text):
    problem = the_problem(write("empty.yaml", text))
    assert (problem.where, problem.value, problem.error) == ("empty.yaml", "(empty)", "the file is empty")
    assert "at least `model:` and `task:`" in problem.fix
    assert "remove it from extends" in the_problem(write("top.yaml", "extends: empty.yaml\n")).fix


def test_missing_files(folder):
    problem = the_problem("bse.yaml")
    assert (problem.where, problem.field, problem.value) == ("command line", "CONFIG", "bse.yaml")
    assert "no such file" in problem.error and problem.fix == "did you mean `base.yaml`?"
    problem = the_problem(write("sub/top.yaml", "steps: 1\nextends:\n  - ../bsae.yaml\n"))
    assert (problem.where, problem.field, problem.value) == ("sub/top.yaml:3", "extends", "sub/../bsae.yaml")
    assert problem.fix == "did you mean `sub/../base.yaml`?"
    assert "does not exist either" in the_problem("nowhere/c.yaml").fix


def test_folders_and_other_bytes(folder):
    Path("dir").mkdir()
    assert "this is a folder" in the_problem("dir").error
    Path("latin.yaml").write_bytes("name: ä\n".encode("latin-1"))
    problem = the_problem("latin.yaml")
    assert "not UTF-8" in problem.error and problem.fix == "save it as UTF-8"


def test_a_cycle_names_its_chain(folder):
    write("a.yaml", "extends: sub/b.yaml\n")
    write("sub/b.yaml", "extends: [../base.yaml, ../a.yaml]\n")
    problem = the_problem("a.yaml")
    assert (problem.where, problem.field) == ("sub/b.yaml:1", "extends")
    assert "a.yaml -> sub/b.yaml -> sub/../a.yaml" in problem.error
    assert "each other" in the_problem(write("self.yaml", "extends: self.yaml\n")).error


@pytest.mark.parametrize("value", ["3", "[base.yaml, 3]", "{a: 1}", "''"])
def test_extends_of_another_type(folder, value):
    problem = the_problem(write("top.yaml", f"{BASE}extends: {value}\n"))
    assert problem.where == f"top.yaml:{BASE.count(chr(10)) + 1}"
    assert (
        problem.field == "extends"
        and "must be the name of a file" in problem.error
        and "[a.yaml, b.yaml]" in problem.fix
    )


@pytest.mark.parametrize(
    ("override", "field", "value", "error", "fix"),
    [
        ("steps", "(override)", "steps", "must have the form key.sub=value", "rollout.group_size=8"),
        ("=3", "(override)", "=3", "must have the form key.sub=value", "rollout.group_size=8"),
        ("a..b=3", "(override)", "a..b=3", "must have the form key.sub=value", "rollout.group_size=8"),
        (
            "--steps=3",
            "(override)",
            "--steps=3",
            "must have the form key.sub=value",
            "write `steps=3`, without dashes",
        ),
        (
            "+steps=3",
            "(override)",
            "+steps=3",
            "must have the form key.sub=value",
            "write `steps=3`: a key is set",
        ),
        ("steps=", "steps", "(nothing)", "no value after the `=`", "write one, or leave the override out"),
        (
            "extends=",
            "extends",
            "(nothing)",
            "no value after the `=`",
            "write one, or leave the override out",
        ),
        ("resume=", "resume", "(nothing)", "no value after the `=`", "write resume=null for no value"),
        (
            "tracking.uri=",
            "tracking.uri",
            "(nothing)",
            "no value after",
            "uri=null for no value or tracking.uri='\"\"' for empty text",
        ),
        (
            "tracking.experiment=run #3",
            "tracking.experiment",
            "run #3",
            "`#3` for a comment",
            "'tracking.experiment=\"run #3\"'",
        ),
        ("name=#3", "name", "#3", "`#3` for a comment", "'name=\"#3\"'"),
        ("kl.estimator=[k1", "kl.estimator", "[k1", "malformed YAML", "correct the YAML"),
        (
            "kl={estimator: k1, estimator: k2}",
            "kl.estimator",
            "{estimator: k1, estimator: k2}",
            "repeated",
            "keep one of them",
        ),
    ],
)
def test_malformed_overrides(folder, override, field, value, error, fix):
    problem = the_problem("base.yaml", [override])
    assert (problem.where, problem.field, problem.value) == ("command line", field, value)
    assert error in problem.error and fix in problem.fix


def test_a_sign_of_another_syntax_and_the_key_behind_it_are_answered_at_once(folder):
    signs, key = problems_of("base.yaml", ["+trainer.total_epochs=3"])
    assert "write `trainer.total_epochs=3`: a key is set" in signs.fix
    assert key.error == "unknown key" and "here it is `steps`" in key.fix


@pytest.mark.parametrize(
    ("name", "text", "system"),
    [
        ("rl.toml", '[model]\nname = "M"\n', "prime-rl"),
        ("run.sh", "python3 -m verl.trainer.main_ppo data.train_batch_size=8\n", "verl or slime"),
        ("train.py", "from trl import GRPOTrainer\n", "TRL"),
    ],
)
def test_a_config_that_is_no_yaml(folder, name, text, system):
    write(name, text)
    for problem in (the_problem(name), the_problem(write("top.yaml", f"extends: {name}\n"))):
        assert problem.value == name and f"a {Path(name).suffix} file, and a config is YAML" in problem.error
        assert f"`tandem init DIR` writes one; coming from {system}, see docs/coming_from.md" in problem.fix
    Path(name).unlink()
    assert "no such file" in the_problem(name).error


@pytest.mark.parametrize("value", ["run#3", '"run #3"', "'#3'", "|\n  run #3"])
def test_a_hash_within_a_text_is_no_comment(folder, value):
    config = load_config("base.yaml", [f"tracking.experiment={value}"])
    assert config.tracking.experiment == yaml.safe_load(value)


# ---- the files that a config names


def make_model(path: str) -> None:
    Path(path).mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        Path(path, name).write_text("{}", encoding="utf-8")


def test_files_that_are_there(folder):
    make_model("model")
    write("train.jsonl", "{}\n")
    config = parse_config("base.yaml", ["task={type: jsonl, train_path: train.jsonl}"]).validated(files=True)
    assert check_files(config) == []


def test_files_that_are_not_there(folder):
    write("train.jsonl", "{}\n")
    overrides = ["task={type: jsonl, train_path: trian.jsonl, heldout_path: .}", "resume=runs/x"]
    problems = {p.field: p for p in problems_of("base.yaml", overrides, files=True)}
    assert set(problems) == {"model.path", "task.train_path", "task.heldout_path", "resume"}
    assert problems["model.path"].where == "base.yaml:1"
    assert problems["model.path"].error == f"no such folder: {folder / 'model'}"
    assert "relative paths start at the current folder" in problems["model.path"].fix
    assert problems["task.train_path"].where == "command line"
    assert problems["task.train_path"].fix == "did you mean `train.jsonl`?"
    assert "this is a folder" in problems["task.heldout_path"].error
    assert [p.field for p in check_files(load_config("base.yaml", overrides))] == list(problems)


def test_model_folder_without_config_json(folder):
    Path("model").mkdir()
    problem = the_problem("base.yaml", files=True)
    assert (problem.field, problem.value) == ("model.path", "model")
    assert "has no config.json" in problem.error and "tokenizer" in problem.fix
    assert "this is a file" in the_problem("base.yaml", ["model.path=base.yaml"], files=True).error
    assert "not expanded" in the_problem("base.yaml", ["model.path=~/m"], files=True).error


@pytest.mark.parametrize(
    ("missing", "error"),
    [
        ("model.safetensors", "the folder has no model.safetensors or model.safetensors.index.json"),
        ("tokenizer.json", "the folder has no tokenizer.json or tokenizer.model or vocab.json or vocab.txt"),
    ],
)
def test_model_folder_without_weights_or_tokenizer(folder, missing, error):
    make_model("model")
    Path("model", missing).unlink()
    problem = the_problem("base.yaml", files=True)
    assert (problem.field, problem.error) == ("model.path", f"{error}: {folder / 'model'}")
    assert "download what is missing" in problem.fix
    assert load_config("base.yaml").model.path == Path("model"), "a plan needs config.json alone"


def test_a_sharded_model_is_complete_and_a_critic_needs_no_tokenizer(folder):
    make_model("model")
    Path("model", "model.safetensors").rename("model/model.safetensors.index.json")
    make_model("critic")
    Path("critic", "tokenizer.json").unlink()
    critic = ["advantage.type=gae", "critic.model.path=critic"]
    parse_config("base.yaml", critic).validated(files=True)
    Path("critic", "model.safetensors").unlink()
    assert the_problem("base.yaml", critic, files=True).field == "critic.model.path"


def test_sft_data_file(folder):
    make_model("model")
    path = write(
        "s.yaml", "kind: sft\nmodel: {path: model}\noutput: o\ndata:\n  type: jsonl\n  path: d.jsonl\n"
    )
    problem = the_problem(path, files=True)
    assert (problem.where, problem.field, problem.value) == ("s.yaml:6", "data.path", "d.jsonl")


def test_the_loader_imports_neither_torch_nor_anything_heavy():
    code = "import sys, configs.loader; assert not {'torch', 'numpy', 'mlflow'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_contradictions_name_fields_of_the_block_that_finds_them():
    named = []
    for file in (Path(__file__).parents[2] / "configs/schema").glob("*.py"):
        module = importlib.import_module(f"configs.schema.{file.stem}")
        for block in (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)):
            for call in (node for node in ast.walk(block) if isinstance(node, ast.Call)):
                if ast.unparse(call.func) == "Contradiction" and isinstance(call.args[0], ast.Tuple):
                    names = [name.value for name in call.args[0].elts if isinstance(name, ast.Constant)]
                    named += [(getattr(module, block.name), name.split(".")) for name in names]
    assert len(named) > 50
    for block, path in named:
        shape = Shape.of(block)
        for part in path:
            assert part in shape.names(), f"{block.__name__} has no {'.'.join(path)}"
            shape = shape.child(part)


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ([], True),
        (["rollout.replicas=2"], True),
        (["rollout.max_server_restarts=0"], False),
        (["rollout.router={}"], False),
        (["launch.placement=colocated"], False),
    ],
)
def test_a_run_may_get_a_server_back_that_is_its_own(settings, may):
    config = load_config(Path(__file__).parents[2] / "configs/recipes/countdown_tiny.yaml", settings)
    assert config.servers_may_restart is may


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("{steps: 2, first: 61}", r"tracking.trace.first=61 begins after steps=60"),
        ("{profile_rank: 0}", r"profile_rank=0 profiles the traced steps, but steps=0 traces none"),
        (
            "{steps: 1, profile_rank: 2}",
            r"profile_rank=2 is not a rank: the ranks of this learner are 0 to 1",
        ),
        ("{steps: 1001}", "larger than anyone can look at"),
        ("{steps: 1, first: 0}", "tracking.trace.first"),
    ],
)
def test_a_trace_of_nothing_is_refused(settings, told):
    recipe = Path(__file__).parents[2] / "configs/recipes/countdown_tiny.yaml"
    given = ["steps=60", "layout.dp=2", "layout.tp=1"]
    with pytest.raises(ConfigError, match=told):
        load_config(recipe, [*given, f"tracking.trace={settings}"])
    trace = load_config(recipe, [*given, "tracking.trace={steps: 2, profile_rank: 1}"]).tracking.trace
    assert (trace.first, trace.end) == (2, 4)


@pytest.mark.parametrize(
    ("given", "block", "updates"),
    [
        (["steps=5"], "learner.optimizer", 5),
        (["steps=5", "learner.minibatches=4"], "learner.optimizer", 20),
        (["steps=5", "learner.minibatches=4", "advantage.type=gae"], "critic.optimizer", 20),
        (
            ["steps=5", "learner.minibatches=4", "advantage.type=gae", "critic.warmup_steps=2"],
            "learner.optimizer",
            12,
        ),
        (
            ["steps=5", "learner.minibatches=4", "advantage.type=gae", "critic.warmup_steps=2"],
            "critic.optimizer",
            20,
        ),
    ],
)
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_schedule_begins_to_decay_before_the_run_ends(folder, given, block, updates, schedule):
    """The learner counts updates: minibatches of every step, of the policy without those of the critic's warm-up."""
    given = [*given, f"{block}.schedule={schedule}"]
    load_config("base.yaml", [*given, f"{block}.warmup_steps={updates - 1}"])
    load_config("base.yaml", [*given, f"{block}.warmup_steps={updates}", f"{block}.schedule=constant"])
    problem = the_problem("base.yaml", [*given, f"{block}.warmup_steps={updates}"])
    assert f"{block}.warmup_steps" in problem.field
    assert (
        f"none of the {updates} optimizer steps" in problem.error and f"fewer than {updates}" in problem.fix
    )


def test_a_warm_start_decays_before_it_ends(folder):
    text = "kind: sft\nsteps: 5\nmodel: {path: m}\noutput: out\ndata: {type: countdown}\n"
    load_config(write("sft.yaml", text), ["optimizer.warmup_steps=4"])
    problem = the_problem("sft.yaml", ["optimizer.warmup_steps=5"])
    assert "optimizer.warmup_steps" in problem.field and "none of the 5 optimizer steps" in problem.error
