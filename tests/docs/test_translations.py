"""The runs that ``docs/coming_from.md`` translates: each line is the same setting in every system, and a config here."""

import re
from pathlib import Path

import pytest
import yaml

from configs.loader import load_config
from configs.reading.wording import fix_for_name
from configs.schema import RunConfig
from tests.docs.pages import DOCS

SYSTEMS = ("verl", "slime", "TRL")
PROMPTS, EPOCHS = 7473, 15
OF_TRAINER = "model"
"""The one name that is an argument of TRL's trainer, and of Tandem's blocks too."""
OTHER_UNITS = {"learner.minibatches", "steps"}
"""Theirs are sizes of a part, and epochs; the last test has the sums."""
VALUES_HERE = {"token-mean": "token_mean", "low_var_kl": "k3", "dapo": "token_mean"}


def rows() -> list[dict[str, str]]:
    page = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    table = re.search(r"^\|.*?(?=\n\n)", page.split("## Three translations\n")[1], re.DOTALL | re.MULTILINE)
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table[0].splitlines()]
    assert lines[0] == [*SYSTEMS, "here"] and len(lines) > 10
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def settings(cell: str) -> dict[str, object]:
    """Name -> value of the settings in a cell; None where it gives no value."""
    found = {}
    for code in re.findall(r"`([^`]+)`", cell):
        name, _, value = code.removeprefix("--").replace("=", " ", 1).partition(" ")
        found[re.sub(r"^(actor|rollout)\.", r"actor_rollout_ref.\1.", name)] = yaml.safe_load(value or "null")
    return found


@pytest.fixture
def config(tmp_path) -> RunConfig:
    """The whole column ``here`` as one config."""
    texts = [text for row in rows() for text in re.findall(r"`([^`]+)`", row["here"])]
    blocks = [yaml.safe_load(text.replace("…", "data.jsonl")) for text in texts]
    overrides = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" if isinstance(value, dict) else f"{key}={value}"
        for block in blocks
        for key, value in block.items()
    ]  # fmt: skip
    Path(tmp_path, "run.yaml").write_text(f"{texts[0]}\ntask: {{type: countdown}}\n", encoding="utf-8")
    return load_config(tmp_path / "run.yaml", overrides)


def number(value: object) -> object:
    """YAML takes ``1e-6`` for text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d+e-\d+", value) else value


def fields_here(cell: str) -> dict[str, object]:
    """Dotted field -> value in the column ``here``."""

    def leaves(block: dict, path: str) -> dict[str, object]:
        return {
            name: leaf
            for key, value in block.items()
            for name, leaf in (
                leaves(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": number(value)}
            ).items()
        }

    blocks = [yaml.safe_load(text) for text in re.findall(r"`([^`]+)`", cell)]
    return {name: value for block in blocks for name, value in leaves(block, "").items()}


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_name_is_answered_with_the_field_of_its_line(system):
    count = 0
    for row in rows():
        here = fields_here(row["here"])
        for name in settings(row[system]):
            if name == OF_TRAINER or "×" in row[system]:  # factors, whose product is the setting
                continue
            told = fix_for_name(name, RunConfig)
            assert told is not None and "not known here" not in told, name
            assert any(f"`{field}`" in told or f"`{field}=" in told for field in here), (name, told, here)
            count += 1
    assert count >= 15


@pytest.mark.parametrize("system", SYSTEMS)
def test_values_of_one_meaning_are_equal(system):
    equal = 0
    for row in rows():
        here = fields_here(row["here"])
        if here.keys() & OTHER_UNITS or "count updates" in row[system]:
            continue
        for name, value in settings(row[system]).items():
            if value in (None, True) or name == "generation_batch_size":
                continue
            value = VALUES_HERE.get(value, number(value))
            told = fix_for_name(name, RunConfig) or ""
            assert (
                value in [ours for field, ours in here.items() if f"`{field}`" in told] or name == OF_TRAINER
            ), name
            equal += 1
    assert equal >= 7


def test_the_column_here_is_one_config_with_the_counts_of_the_others(config):
    theirs = {system: {} for system in SYSTEMS}
    for row in rows():
        for system in SYSTEMS:
            theirs[system] |= settings(row[system])
    verl, slime, trl = (theirs[system] for system in SYSTEMS)
    prompts, group = verl["data.train_batch_size"], verl["actor_rollout_ref.rollout.n"]
    assert (config.rollout.prompts_per_step, config.rollout.group_size) == (prompts, group)
    assert (slime["rollout-batch-size"], slime["n-samples-per-prompt"]) == (prompts, group)
    assert trl["generation_batch_size"] == prompts * group
    parts = config.learner.minibatches
    assert prompts / verl["actor_rollout_ref.actor.ppo_mini_batch_size"] == parts
    assert prompts * group / slime["global-batch-size"] == parts
    assert any(f"= {prompts * group // parts}" in row["TRL"] for row in rows())
    assert config.steps == slime["num-rollout"] == EPOCHS * (PROMPTS // prompts)
    assert verl["trainer.total_epochs"] == trl["num_train_epochs"] == EPOCHS
    assert (config.evaluation.every, config.checkpoint.every) == (
        slime["eval-interval"],
        slime["save-interval"],
    )
    assert (trl["eval_steps"], trl["save_steps"]) == (
        parts * config.evaluation.every,
        parts * config.checkpoint.every,
    )
    assert config.objective.type == "clipped" and config.advantage.type == "grpo"


# --------------------------------------------------------------------------------------------------------------
# defaults that differ


def default_rows() -> list[list[str]]:
    page = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    table = re.search(r"^\|.*?(?=\n\n)", page.split("## Defaults that differ\n")[1], re.DOTALL | re.MULTILINE)
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table[0].splitlines()]
    assert lines[0] == ["here", *SYSTEMS, "to have theirs"] and len(lines) > 10
    return lines[2:]


def test_the_defaults_in_the_table_are_those_of_the_schema(tmp_path):
    Path(tmp_path, "run.yaml").write_text("model: {path: m}\ntask: {type: jsonl, train_path: d}\n", "utf-8")
    config = load_config(tmp_path / "run.yaml")
    optimizer, evaluation, weight = config.learner.optimizer, config.evaluation, config.correction.weight
    told = [
        (weight.level, weight.bound, weight.upper) == ("token", "truncate", 2),
        config.objective.dual_clip == 3,
        config.aggregation.type == "token_mean",
        (config.kl.place, config.kl.estimator, config.kl.coefficient) == ("loss", "k3", 0),
        optimizer.betas == (0.9, 0.95),
        optimizer.weight_decay == 0,
        optimizer.schedule == "constant",
        config.sampler.type == "shuffle",
        config.task.apply_chat_template,
        config.rollout.max_new_tokens == 1024,
        (evaluation.temperature, evaluation.greedy) == (1, False),
        evaluation.at_ends,
        (config.checkpoint.every, config.checkpoint.keep) == (0, 2),
    ]
    assert told == [True] * len(default_rows())


def test_the_settings_that_restore_a_default_of_the_others_are_accepted(tmp_path):
    Path(tmp_path, "run.yaml").write_text("model: {path: m}\ntask: {type: jsonl, train_path: d}\n", "utf-8")
    default, count = load_config(tmp_path / "run.yaml"), 0
    for row in default_rows():
        for setting in re.findall(r"`([a-z_.]+=[^`]+)`", row[-1]):
            assert load_config(tmp_path / "run.yaml", [setting]) != default, setting
            count += 1
    assert count >= 12
