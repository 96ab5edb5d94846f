"""What a newcomer meets first: the fields of a config, an experiment of one's own, and the list of runs."""

import errno
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from configs.loader import ConfigError, load_config, parse_config, resolved_yaml
from configs.schema import RunConfig, SftConfig
from configs.schema.task import JsonlTask
from launch import cli
from launch.checks.arguments import BadInput
from launch.commands import train as training
from launch.commands.init import make_experiment
from launch.commands.list_runs import run_table
from launch.commands.logs import show_logs
from launch.commands.schema import json_schema, print_schema
from launch.processes.run_folder import RunFolder, write_json
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.unreadable import unreadable

ROOT = Path(__file__).resolve().parents[2]


# ---- tandem schema


def blocks(model: type[BaseModel], seen: set) -> set:
    """Every schema class that a config may hold."""
    if model not in seen:
        seen.add(model)
        for info in model.model_fields.values():
            todo = [info.annotation]
            while todo:
                kind = todo.pop()
                todo += getattr(kind, "__args__", ())
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    blocks(kind, seen)
    return seen


def test_every_field_and_block_says_what_it_is():
    found = blocks(RunConfig, set()) | blocks(SftConfig, set())
    assert len(found) > 50
    assert [block.__name__ for block in found if "__doc__" not in vars(block) or not block.__doc__] == []
    silent = [
        f"{block.__name__}.{name}"
        for block in found
        for name, info in block.model_fields.items()
        if not info.description and not says_which_block(info.annotation) and not blocks_of(info.annotation)
    ]
    assert silent == []


def test_a_default_is_that_of_the_block_s_own_fields():
    """Else a block of which a user sets one key would get other defaults than a block that is left out, and those of no page."""
    for block in blocks(RunConfig, set()) | blocks(SftConfig, set()):
        for name, info in block.model_fields.items():
            if isinstance(info.default, BaseModel):
                given = info.default.model_dump(include=info.default.model_fields_set)
                shown = {key: kind.default for key, kind in type(info.default).model_fields.items()}
                assert given.items() <= shown.items(), f"{block.__name__}.{name}"


def says_which_block(annotation: object) -> bool:
    return getattr(annotation, "__origin__", None) is Literal and len(annotation.__args__) == 1


def blocks_of(annotation: object) -> bool:
    """Whether the field holds blocks, which say by themselves what they are."""
    inner = getattr(annotation, "__args__", (annotation,))
    return any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in inner)


def test_schema_names_type_default_unit_and_meaning(capsys):
    print_schema("train", None, as_json=False)
    text = capsys.readouterr().out
    assert (
        "rollout.request_timeout_s  (number > 0, seconds; default 600.0)\n    Deadline of one generation"
        in text
    )
    assert "task  (block by type: countdown | gsm8k | jsonl; required)" in text
    assert "learner.optimizer.lr  (number > 0; default 1e-06)\n" in text
    assert "-- reward.type=function\n    The user's function." in text
    assert "reward.parts.NAME.buffer_tokens  (whole number ≥ 1; required)" in text
    assert max(map(len, text.splitlines())) <= 200


def test_schema_of_a_part_and_of_a_misspelt_one(capsys):
    print_schema("sft", "optimizer", as_json=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("    ")]
    assert (
        lines[0].startswith("optimizer  ")
        and all(line.startswith("optimizer") for line in lines)
        and len(lines) > 5
    )
    with pytest.raises(BadInput, match=r"FIELD: rolout is not a field of kind train.*did you mean .*rollout"):
        print_schema("train", "rolout", as_json=False)


def with_numbers(value):
    """1e-6 is text for YAML 1.1, which this reader speaks, and a number for Tandem and for editors."""
    if isinstance(value, dict):
        return {key: with_numbers(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+e-?\d+", value) else value


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs" / "recipes").glob("*.yaml")), ids=lambda file: file.stem
)
def test_shipped_configs_and_their_resolved_form_fit_the_json_schema(file):
    written = with_numbers(yaml.safe_load(file.read_text()))
    validator = schema_validator(written.get("kind", "train"))
    validator.validate(written)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**written, "stepz": 3})
    if "model" in written:
        validator.validate(yaml.safe_load(resolved_yaml(load_config(file))))


@cache
def schema_validator(kind: str) -> jsonschema.Validator:
    """``jsonschema.validate`` would check the schema itself each time, which takes longer than all configs."""
    schema = json_schema(kind)
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


# ---- tandem init


def test_an_experiment_of_ones_own_passes_the_dry_run_and_gives_its_reward_the_row(tmp_path, capsys):
    make_tiny_countdown_model(tmp_path / "model", seed=0)
    make_experiment(tmp_path / "mine", tmp_path / "model")
    assert "next: cd " in capsys.readouterr().out
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "launch", "train", "experiment.yaml", "--dry-run"],
        cwd=tmp_path / "mine",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = load_config(tmp_path / "mine" / "experiment.yaml")
    assert (config.name, config.model.path) == ("mine", tmp_path / "model")
    assert isinstance(config.task, JsonlTask)
    assert (config.task.apply_chat_template, config.rollout.max_new_tokens) == (False, 128)
    text = (tmp_path / "mine" / "experiment.yaml").read_text()
    assert (
        "# the model has no chat template" in text and "# half of the model's context of 256 tokens" in text
    )
    code: dict = {}
    exec((tmp_path / "mine" / "my_reward.py").read_text(), code)
    row = json.loads((tmp_path / "mine" / "train.jsonl").read_text().splitlines()[0])
    assert code["score"](row["prompt"], "17", row["answer"], row) == (1.0, {"length": 2})
    with pytest.raises(BadInput, match="mine exists already"):
        make_experiment(tmp_path / "mine", None)


def test_an_experiment_whose_model_is_not_there_or_not_chosen_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BadInput, match=r"no such folder; .*`hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B`"
    ):
        make_experiment(Path("mine"), Path("Qwen/Qwen3-4B"))
    assert not Path("mine").exists()
    make_experiment(Path("mine"), None)
    with pytest.raises(ConfigError, match="fix:   set it to a Hugging Face folder of yours"):
        overrides = ["task.train_path=mine/train.jsonl", "task.heldout_path=null"]
        parse_config(Path("mine/experiment.yaml"), overrides).validated(files=True)


@pytest.mark.parametrize(
    "broken", [None, "tokenizer.json", "config.json"], ids=["whole", "tokenizer", "config"]
)
def test_an_experiment_with_a_chat_model_applies_its_template(tmp_path, broken):
    """Of a model that cannot be read, the dry run tells."""
    model = tmp_path / "model"
    make_tiny_countdown_model(model, seed=0)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    content = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (model / "config.json").write_text(json.dumps(content))
    if broken is not None:
        (model / broken).write_text("{")
    make_experiment(tmp_path / "mine", model)
    config = load_config(tmp_path / "mine" / "experiment.yaml")
    assert isinstance(config.task, JsonlTask)
    assert (config.task.apply_chat_template, config.rollout.max_new_tokens) == (True, 512)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("2024", "2024"),
        ("true", "true"),
        ("1e5", "1e5"),
        ("null", "null"),
        ("ünï code", "n--code"),
        ("x" * 150, "x" * 100),
        ("___", "experiment"),
    ],
)
def test_an_experiment_has_a_name_whatever_its_folder_is_called(tmp_path, folder, name):
    make_experiment(tmp_path / folder, tmp_path)
    assert load_config(tmp_path / folder / "experiment.yaml").name == name


def test_an_experiment_without_a_model_says_where_to_name_it(tmp_path, capsys):
    make_experiment(tmp_path / "mine", None)
    assert "set model.path in experiment.yaml" in capsys.readouterr().out


# ---- tandem list, resume, logs


def make_run(folder: Path, *, rows: list[dict], **config) -> RunFolder:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "a", "steps": 10, **config}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return RunFolder(folder)


def test_the_list_of_runs(tmp_path):
    rows = [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.75, "reward/before_selection": 0.113},
    ]
    stopped = make_run(tmp_path / "runs" / "a-1", rows=rows)
    damaged = '{"step": 3, "reward/mean": "high"}\n{"step": 3, "rew'  # edited, and torn by a crash
    (stopped.path / "metrics.jsonl").open("a").write(damaged)
    (stopped.path / "roles").mkdir()
    (stopped.path / "roles" / "stopped.json").write_text('{"step": 2, "reason": "asked"}')
    running = make_run(tmp_path / "runs" / "a-2", rows=[])
    make_run(tmp_path / "runs" / "warm", rows=[], kind="sft")
    evaluated = make_run(tmp_path / "runs" / "a-eval", rows=[])
    evaluated.summary.write_text('{"accuracy": 0.5, "count": 4}')
    edited = make_run(tmp_path / "runs" / "a-edited", rows=[])
    edited.summary.write_text('{"accuracy": "half"}')
    broken = make_run(tmp_path / "runs" / "broken", rows=[])
    broken.config.write_text("[" * 100_000)
    (tmp_path / "runs" / "latest").symlink_to("a-1")
    for age, name in enumerate(("a-2", "a-1", "warm", "a-eval", "a-edited", "broken")):
        for file in (tmp_path / "runs" / name).iterdir():
            os.utime(file, (1000.0 - 100 * age,) * 2)
    running.claim()
    try:
        lines = run_table(tmp_path / "runs", now=1060.0).splitlines()
    finally:
        running.release()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells == [
        ["run", "state", "step", "held out", "reward", "last written"],
        ["a-2", "running", "0/10", "-", "-", cells[1][-1]],  # claiming it puts the empty metrics aside
        ["a-1", "stopped after step 2", "2/10", "25.0%", "0.113", "2m40s ago"],
        ["warm", "(sft)", "-", "-", "-", "4m20s ago"],
        ["a-eval", "(evaluation)", "-", "50.0%", "-", "6m00s ago"],
        ["a-edited", "(evaluation)", "-", "-", "-", "7m40s ago"],
        ["broken", "config.yaml is not readable", "-", "-", "-", "9m20s ago"],
    ]
    with pytest.raises(BadInput, match="holds no runs"):
        run_table(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_run_that_cannot_be_read_hides_no_other_in_the_list(tmp_path, monkeypatch, name):
    private, own = (make_run(tmp_path / "runs" / run, rows=[]) for run in ("private", "own"))
    for run in (private, own):
        run.hf.mkdir()
        write_json(run.summary, {"steps": 10})
    unreadable(monkeypatch, private.path / name, errno.EACCES)
    lines = {line.split()[0]: line for line in run_table(tmp_path / "runs").splitlines()[1:]}
    assert {run: "not readable (Permission denied)" in line for run, line in lines.items()} == {
        "private": True, "own": False,
    }  # fmt: skip


def test_resume_is_train_with_the_config_of_the_run(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", rows=[])
    asked = []
    monkeypatch.setattr(training, "train", lambda *given, **options: asked.append((given, options)))
    monkeypatch.setattr(sys, "argv", ["tandem", "resume", str(run.path), "steps=300", "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert asked == [
        ((run.config, [f"resume={run.path}", "steps=300"]), {"dry_run": True, "gpu_memory": None})
    ]


def test_following_a_run_ends_with_it(tmp_path):
    run = make_run(tmp_path / "run", rows=[])
    run.logs.mkdir()
    (run.logs / "learn.log").write_text("one\n")
    code = "import sys; from pathlib import Path; from launch.cli import main; sys.argv = ['tandem', 'logs', sys.argv[1], '-f']; main()"

    def follow() -> subprocess.Popen:
        command = [sys.executable, "-c", code, str(run.path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)

    ended = follow().communicate(timeout=300)
    assert ended[0] == "one\n" and "the run is not active on this machine (not started)" in ended[1]

    holding = """
import pathlib, sys
from launch.processes.run_folder import RunFolder
run = RunFolder(pathlib.Path(sys.argv[1]))
run.claim()
print("held", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", holding, str(run.path)]
    holder = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    following = follow()
    assert following.stdout.readline() == "one\n"
    (run.logs / "learn.log").open("a").write("two\n")
    assert following.stdout.readline() == "two\n"
    holder.stdin.close()
    holder.wait(timeout=300)
    assert following.wait(timeout=300) == 0


def test_logs_of_a_run_that_ended_are_shown_once(tmp_path, capfdbinary):
    run = make_run(tmp_path / "run", rows=[])
    run.logs.mkdir()
    (run.logs / "learn.log").write_text("one\ntwo\nthree\nfour\n")
    assert show_logs(run, [run.logs / "learn.log"], lines=3, follow=True) == 0
    assert capfdbinary.readouterr().out == b"two\nthree\nfour\n"


def test_logs_move_no_terminal(tmp_path, capfdbinary):
    """Letters stay as they are, also where a read ends within one."""
    run = make_run(tmp_path / "run", rows=[])
    run.logs.mkdir()
    text = "\x1b[2J\x1b]0;mine\x07 10%\r\tΔ\u202e\n" + "é" * 40_000 + "x" + "é" * 40_000 + "\n"
    (run.logs / "learn.log").write_bytes(text.encode() + b"\x9b2J\n")
    assert show_logs(run, [run.logs / "learn.log"], lines=3, follow=False) == 0
    first, second, third, end = capfdbinary.readouterr().out.decode().split("\n")
    assert first == "␛[2J␛]0;mine␇ 10%␍\tΔ\\u202e" and second == text.split("\n")[1]
    assert (third, end) == ("\\x9b2J", "")


def test_help_is_light_and_lists_the_new_commands():
    command = [sys.executable, "-X", "importtime", "-m", "launch", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in ("init", "list", "resume", "schema"))
    heavy = ("torch", "mlflow", "numpy", "transformers")
    assert [line for line in done.stderr.splitlines() if line.split("|")[-1].strip() in heavy] == []


def test_healthy_processes_end_without_what_libraries_say_of_themselves():
    """A finaliser of the interpreter that writes to the error stream stands for nanobind's; a traceback is
    still there."""
    code = """
import ctypes, os
from launch.roles.start import quiet_end
quiet_end()
late = ctypes.CFUNCTYPE(None)(lambda: None)
class Noisy:
    def __del__(self, write=os.write):
        write(2, b"leaked 514 functions!")
keep = Noisy()
keep.cycle = keep
import sys
sys.noisy = keep
print("said before the end", file=sys.stderr)
"""
    for more, words in (
        ("", "said before the end\n"),
        ("raise ValueError('the cause')", "ValueError: the cause\n"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code + more], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.stderr.endswith(words), done.stderr
    loud = code.replace("quiet_end()\n", "")
    without = subprocess.run(
        [sys.executable, "-c", loud], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "leaked 514 functions!" in without.stderr, "the check can fail"
