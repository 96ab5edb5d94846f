"""Presets: what each stands for, how a name in a layer merges with the layers below and above it, and the errors
for wrong names."""

from pathlib import Path

import pytest

from configs.loader import ConfigError, Problem, load_config, resolved_yaml
from configs.presets import DESCRIPTIONS, PRESETS, preset_body, preset_name
from configs.schema.correction import CorrectionConfig, DivergenceRule, ImportanceWeight, NoWeight, RatioRule

NONE = NoWeight()
TOKEN = ImportanceWeight(level="token", bound="truncate", upper=2.0)
SEQUENCE = ImportanceWeight(level="sequence", bound="truncate", upper=2.0)
UNBOUNDED = ImportanceWeight(level="token", bound="none")
ICEPOP = ImportanceWeight(level="token", bound="mask", lower=0.5, upper=5.0)
SEQUENCE_RATIO = RatioRule(level="sequence", lower=0.5, upper=2.0)
GEOMETRIC = RatioRule(level="geometric", lower=1 / 1.001, upper=1.001)
K3 = DivergenceRule(rule="k3", reduce="mean", upper=0.01)
HIGH_TOKENS = RatioRule(level="token", lower=0.0, upper=2.0)

DECOUPLED, BYPASS, GRADIENT = (
    ("decoupled", "objective"),
    ("bypass", "objective"),
    ("bypass", "policy_gradient"),
)
EXPECTED = {
    # of the documents
    "decoupled_token_is": (DECOUPLED, TOKEN, (), None),
    "decoupled_seq_is": (DECOUPLED, SEQUENCE, (), None),
    "decoupled_seq_is_rs": (DECOUPLED, SEQUENCE, (SEQUENCE_RATIO,), None),
    "decoupled_geo_rs": (DECOUPLED, NONE, (GEOMETRIC,), 1e-4),
    "ppo_is_bypass": (BYPASS, NONE, (), None),
    "pg_rs": (GRADIENT, NONE, (GEOMETRIC,), 1e-4),
    "pg_is": (GRADIENT, SEQUENCE, (), None),
    "disabled": (DECOUPLED, NONE, (), None),
    # combinations of their parts
    "decoupled_token_icepop": (DECOUPLED, ICEPOP, (), None),
    "decoupled_geo_rs_token_is": (DECOUPLED, TOKEN, (GEOMETRIC,), 1e-4),
    "decoupled_geo_rs_seq_is": (DECOUPLED, SEQUENCE, (GEOMETRIC,), 1e-4),
    "decoupled_k3_rs": (DECOUPLED, NONE, (K3,), None),
    "decoupled_k3_rs_token_is": (DECOUPLED, TOKEN, (K3,), None),
    "decoupled_k3_rs_seq_is": (DECOUPLED, SEQUENCE, (K3,), None),
    "bypass_geo_rs": (BYPASS, NONE, (GEOMETRIC,), 1e-4),
    "bypass_k3_rs": (BYPASS, NONE, (K3,), None),
    "pg_geo_rs_token_is": (GRADIENT, TOKEN, (GEOMETRIC,), 1e-4),
    "pg_geo_rs_seq_is": (GRADIENT, SEQUENCE, (GEOMETRIC,), 1e-4),
    "pg_token_icepop": (GRADIENT, ICEPOP, (), None),
    # of the study
    "tis": (DECOUPLED, TOKEN, (), None),
    "vanilla_is": (DECOUPLED, UNBOUNDED, (), None),
    "ppo_is": (BYPASS, NONE, (), None),
    "drop_outliers": (DECOUPLED, UNBOUNDED, (HIGH_TOKENS,), None),
}

BASE = """\
model: {path: model}
task: {type: countdown}
correction:
  mode: decoupled
  weight: {level: sequence, bound: clip, lower: 0.25, upper: 7.0, normalise: true}
  reject: [{rule: k2, reduce: max, upper: 3.0}]
  veto: 1e-6
  denominator: all
"""
"""Every key of a correction is set, to what no preset has."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE, encoding="utf-8")
    return tmp_path


def top(correction: str, name: str = "top.yaml", extends: str = "base.yaml") -> str:
    """A file of two lines over another one; its second is ``correction:``."""
    Path(name).write_text(f"extends: {extends}\ncorrection: {correction}\n", encoding="utf-8")
    return name


def correction_of(path: str, *overrides: str) -> CorrectionConfig:
    return load_config(path, overrides).correction


def the_problem(path: str, *overrides: str) -> Problem:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    (problem,) = raised.value.problems
    for part in (problem.where, problem.field, problem.value, problem.error, problem.fix):
        assert part and part in str(raised.value)
    return problem


# ---- what they are


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_is_what_the_documents_say(name):
    (mode, loss), weight, reject, veto = EXPECTED[name]
    expected = CorrectionConfig(
        mode=mode, loss=loss, weight=weight, reject=reject, veto=veto, denominator="kept"
    )
    assert PRESETS[name] == expected
    assert CorrectionConfig.model_validate(preset_body(name)) == expected


def test_every_preset_is_expected_and_described_in_a_line():
    assert list(PRESETS) == list(DESCRIPTIONS) == list(EXPECTED)
    assert len(set(DESCRIPTIONS.values())) == len(PRESETS)
    assert all(0 < len(text) <= 110 and "\n" not in text for text in DESCRIPTIONS.values())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_correction_knows_the_preset_that_it_is(name):
    first_of_two = {"tis": "decoupled_token_is", "ppo_is": "ppo_is_bypass"}
    assert preset_name(PRESETS[name]) == first_of_two.get(name, name)
    assert preset_name(PRESETS[name].model_copy(update={"veto": 1e-5})) is None


def test_a_body_is_a_copy():
    preset_body("decoupled_geo_rs")["reject"][0]["upper"] = 9.0
    assert preset_body("decoupled_geo_rs")["reject"][0]["upper"] == 1.001


# ---- by name, over other layers


@pytest.mark.parametrize("name", EXPECTED)
def test_a_name_starts_afresh_and_resolves_to_a_config_that_loads_back_equal(folder, name):
    config = load_config(top(name))
    assert config.correction == PRESETS[name]  # nothing of base.yaml is left
    assert load_config("base.yaml", [f"correction={name}"]).correction == PRESETS[name]
    assert load_config("base.yaml", [f"correction.preset={name}"]).correction == PRESETS[name]
    assert load_config(top(f"{{preset: {name}}}")).correction == PRESETS[name]
    Path("resolved.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config("resolved.yaml") == config
    assert "preset" not in resolved_yaml(config)


def test_keys_beside_the_name_say_otherwise(folder):
    got = correction_of(top("{preset: decoupled_geo_rs, veto: 1e-5, weight: {level: token, upper: 3.0}}"))
    assert got == CorrectionConfig(weight=ImportanceWeight(upper=3.0), reject=(GEOMETRIC,), veto=1e-5)
    assert preset_name(got) is None
    assert correction_of(top("{preset: decoupled_geo_rs, veto: null}")).veto is None
    assert correction_of(top("{preset: decoupled_geo_rs, reject: []}")).reject == ()


def test_a_key_takes_its_companions_along(folder):
    """A preset leaves to the schema what the schema would fill in, so a changed key does not contradict it."""
    assert correction_of(top("decoupled_token_is"), "correction.weight.bound=none") == PRESETS["vanilla_is"]
    clip = correction_of(
        top("decoupled_seq_is"), "correction.weight.bound=clip", "correction.weight.upper=4.0"
    ).weight
    assert clip == ImportanceWeight(level="sequence", bound="clip", lower=0.25, upper=4.0)


def test_a_weight_of_another_level_starts_afresh(folder):
    weight = correction_of(top("{preset: decoupled_token_icepop, weight: {level: sequence}}")).weight
    assert weight == SEQUENCE  # not the mask of the preset's token weight


def test_later_layers_merge_over_a_name(folder):
    top("decoupled_seq_is", "named.yaml")
    path = top("{weight: {upper: 3.0}}", extends="named.yaml")
    assert correction_of(path).weight == ImportanceWeight(level="sequence", upper=3.0)
    assert correction_of(path, "correction.weight.upper=4", "correction.veto=1e-5").weight.upper == 4.0
    assert correction_of("named.yaml", "correction.weight.upper=3").weight == ImportanceWeight(
        level="sequence", upper=3.0
    )


def test_a_later_name_replaces_an_earlier_one_with_all_that_was_said_over_it(folder):
    top("{preset: decoupled_geo_rs, veto: 1e-5, denominator: all}", "named.yaml")
    assert correction_of(top("pg_is", extends="named.yaml")) == PRESETS["pg_is"]
    assert correction_of("named.yaml", "correction=disabled") == PRESETS["disabled"]


def test_overrides_in_any_order(folder):
    for overrides in (
        ["correction=decoupled_geo_rs", "correction.veto=1e-5"],
        ["correction.veto=1e-5", "correction=decoupled_geo_rs"],
    ):
        assert correction_of("base.yaml", *overrides) == PRESETS["decoupled_geo_rs"].model_copy(
            update={"veto": 1e-5}
        )
    assert correction_of("base.yaml", "correction=pg_is", "correction=pg_rs") == PRESETS["pg_rs"]


def test_a_correction_without_a_name_merges_as_before(folder):
    got = correction_of(top("{weight: {upper: 9.0}}"))
    assert (got.weight.upper, got.weight.lower, got.veto, got.denominator) == (9.0, 0.25, 1e-6, "all")


# ---- errors


def test_an_unknown_name(folder):
    problem = the_problem(top("decoupled_token_si"))
    assert (problem.where, problem.field, problem.value) == (
        "top.yaml:2",
        "correction.preset",
        "decoupled_token_si",
    )
    assert problem.error == "no such preset"
    assert problem.fix == f"did you mean `decoupled_token_is`? presets: {', '.join(PRESETS)}"
    assert the_problem(top("zzz")).fix == f"presets: {', '.join(PRESETS)}"
    assert the_problem("base.yaml", "correction=zzz").where == "command line"
    # Its other keys are not judged without it.
    assert the_problem(top("{preset: 3, loss: policy_gradient}")).value == "3"
    assert the_problem(top("{preset: null}")).value == "null"
    assert the_problem(top("{preset: [pg_is]}")).value == "[pg_is]"


def test_more_than_one_start(folder):
    problem = the_problem(top("{preset: pg_is, verl: {rollout_is: token}}"))
    assert (problem.where, problem.field) == ("top.yaml:2", "correction.preset, correction.verl")
    assert problem.value == "{preset: pg_is, verl: {rollout_is: token}}"
    assert "starts from one" in problem.error and "keep one" in problem.fix


def test_an_error_names_the_line_of_the_key_and_of_the_preset(folder):
    Path("top.yaml").write_text(
        "extends: base.yaml\ncorrection:\n  preset: decoupled_token_is\n  mode: bypass\n", encoding="utf-8"
    )
    problem = the_problem("top.yaml")
    assert problem.where == "top.yaml:4, top.yaml:3, preset decoupled_token_is"
    assert "correction.mode: bypass (top.yaml:4)" in problem.value
    assert "correction.weight.level: token (top.yaml:3, preset decoupled_token_is)" in problem.value
    assert (
        "weight.level=token would count the gap twice" in problem.error
        and "loss: policy_gradient" in problem.fix
    )

    problem = the_problem("top.yaml", "correction.mode=decoupled", "correction.veto=2")
    assert (problem.where, problem.field, problem.value) == ("command line", "correction.veto", "2")

    problem = the_problem(top("{preset: decoupled_seq_is, reject: [{rule: rato, upper: 2.0}]}"))
    assert (problem.where, problem.field) == ("top.yaml:2", "correction.reject.0.rule")
    assert problem.fix == "did you mean `ratio`? variants: ratio, k2, k3, difference"


def test_a_key_that_the_weight_of_the_preset_does_not_have(folder):
    problem = the_problem(top("{preset: decoupled_geo_rs, weight: {upper: 3.0}}"))
    assert (problem.where, problem.field, problem.error) == (
        "top.yaml:2",
        "correction.weight.upper",
        "unknown key",
    )
    levels = "token, sequence, geometric, segment, segment_geometric"
    assert problem.fix == f"it goes with `correction.weight.level` of: {levels}; keys here: level"


def test_a_misspelt_preset_key(folder):
    problem = the_problem(top("{presett: pg_is}"))
    assert (problem.field, problem.error, problem.fix) == (
        "correction.presett",
        "unknown key",
        "did you mean `preset`?",
    )
    assert "verl, roll" in the_problem(top("{zzz: 1}")).fix
