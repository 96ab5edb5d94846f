"""The guide, trainer/README.md and the README's section on corrections, against the code: presets, names of
metrics, links."""

import re
from fnmatch import filter as matching
from fnmatch import fnmatch
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.loader import load_config
from configs.presets import ALIASES, DESCRIPTIONS, PRESETS, preset_name
from configs.schema.correction import CorrectionConfig, DivergenceRule, ImportanceWeight, NoWeight, RatioRule
from trainer.metric_names import METRICS, find_entry

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "trainer" / "README.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## Corrections, objectives, advantages\n")[2].partition("\n## ")[0]


def test_every_file_of_the_folder_is_in_the_guides_tables():
    """Files beside the loop in the first table; the modules of each folder in its row of the second
    (`layout_*`: several)."""
    tables = GUIDE.partition("\n## Files\n")[2]
    files = {file.name for file in (ROOT / "trainer").glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"`(\w+\.py)`", tables))
    rows = {
        folder: set(re.findall(r"`([\w.*]+)`", words))
        for folder, words in re.findall(r"^\| `(\w+)/` \| (.+) \|$", tables, re.M)
    }
    folders = {path.parent for path in (ROOT / "trainer").glob("*/__init__.py")}
    assert rows.keys() == {folder.name for folder in folders}
    for folder in folders:
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        patterns = {name for name in rows[folder.name] if not name.endswith((".html", ".jsonl"))}
        assert {
            name for name in modules if not any(fnmatch(name, pattern) for pattern in patterns)
        } == set(), folder
        assert {
            pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in modules)
        } == set(), folder


def weight_in_words(weight: NoWeight | ImportanceWeight) -> str:
    match weight:
        case NoWeight():
            return "none"
        case ImportanceWeight(level=level, bound="truncate", upper=upper, normalise=False):
            return f"{level} ≤ {upper:g}"
        case ImportanceWeight(level=level, bound="mask", lower=lower, upper=upper, normalise=False):
            return f"{level}, 0 outside [{lower:g}, {upper:g}]"
        case ImportanceWeight(level=level, bound="none", normalise=False):
            return f"{level}, unbounded"
    raise AssertionError(f"no words for {weight}")


def rule_in_words(rule: RatioRule | DivergenceRule) -> str:
    match rule:
        case RatioRule(level=level, lower=0.0, upper=upper):
            return f"{level} ratio ≤ {upper:g}"
        case RatioRule(level=level, lower=lower, upper=upper):
            return f"{level} ratio in [{lower:.3g}, {upper:g}]"
        case DivergenceRule(rule=kind, reduce=reduce, upper=upper):
            return f"{reduce} {kind} ≤ {upper:g}"


def row_of(name: str, correction: CorrectionConfig) -> str:
    mode = (
        correction.mode
        if correction.loss == "objective"
        else f"{correction.mode}, {correction.loss.replace('_', ' ')}"
    )
    veto = [] if correction.veto is None else [f"veto at {correction.veto:g}"]
    rejection = ", ".join([*map(rule_in_words, correction.reject), *veto]) or "none"
    return (
        f"| `{name}` | {mode} | {weight_in_words(correction.weight)} | {rejection} | {DESCRIPTIONS[name]} |"
    )


def test_the_table_of_presets_is_what_the_code_says():
    table = (
        GUIDE.partition("| preset | mode, loss | weight | rejection | in words |\n")[2]
        .partition("\n\n")[0]
        .splitlines()[1:]
    )
    assert table == [row_of(name, correction) for name, correction in PRESETS.items()]


@pytest.mark.parametrize("text", [GUIDE, SECTION])
def test_every_preset_that_is_named_exists(text):
    named = set(re.findall(r"(?<!actor/)\b(?:decoupled|bypass|pg)_[a-z0-9_]*[a-z0-9]\b", text))
    assert named and named <= PRESETS.keys() | ALIASES.keys() | {"bypass_mode"}


def table_after(header: str) -> list[list[str]]:
    rows = GUIDE.partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_table_of_verls_presets_is_what_the_code_says():
    found = {cells[0].strip("`"): cells[1] for cells in table_after("| preset of verl | here |")}
    assert found.keys() == ALIASES.keys()
    for name, told in found.items():
        ours = preset_name(ALIASES[name])
        assert told == f"`{ours}`" if ours else told.startswith("the same as `") and "without veto" in told
        if not ours:
            near = PRESETS[told.split("`")[1]]
            assert (near.mode, near.loss, near.weight) == (
                ALIASES[name].mode,
                ALIASES[name].loss,
                ALIASES[name].weight,
            )


def is_metric(name: str) -> bool:
    """Whether the table has this name of the guide, written in full or without ``mismatch/``."""
    names = (name.replace("RULE", "*"), f"mismatch/{name.replace('RULE', '*')}")
    return any(find_entry(name) or matching(METRICS, name) for name in names)


def test_the_guide_names_metrics_of_the_table():
    rows = table_after("| verl | Tandem | what differs |")
    section = GUIDE.partition("## Metrics\n")[2].partition("\n## ")[0]
    named = [
        name for text in (*(cells[1] for cells in rows), section) for name in re.findall(r"`([^`]+)`", text)
    ]
    assert len(named) > 50
    assert {name for name in named if not is_metric(name)} == {"metric_names.py", "mismatch/"}


@pytest.mark.parametrize(("text", "folder"), [(GUIDE, ROOT / "trainer"), (README, ROOT)])
def test_links_lead_somewhere(text, folder):
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links and [link for link in links if not (folder / link).exists()] == []


def test_the_readme_s_corrections_are_read(tmp_path):
    yaml = re.search(r"```yaml\n(.*?)```", SECTION, re.DOTALL)[1]
    lines = [line for line in yaml.splitlines() if line.startswith("correction:")]
    assert len(lines) == len(yaml.splitlines()) >= 4  # every line is one way to choose a correction
    for line in lines:
        path = tmp_path / "config.yaml"
        path.write_text(f"model: {{path: model}}\ntask: {{type: countdown}}\n{line}\n", encoding="utf-8")
        assert load_config(path).correction != CorrectionConfig(), line


def test_the_readme_s_options_of_replay_exist():
    from launch.cli import app

    told = (
        CliRunner()
        .invoke(app, ["replay", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
        .output
    )
    options = set(re.findall(r"(?<=[ \[])--[a-z-]+", SECTION))
    assert {"--step", "--correction", "--gradients", "--plot"} <= options
    assert {option for option in options if option not in told} == set()
