"""The record of the commands that started and resumed a run, and what it leaves out."""

import json
import shlex

import pytest

from configs.errors import ConfigError
from launch.commands.status import status
from launch.processes import run_folder
from launch.processes.run_folder import RunFolder
from launch.processes.started_by import command_text, read_commands, record_command

ENVIRONMENT = {"HF_TOKEN": "hf_0123456789", "HOME": "/home/somebody", "SHORT_KEY": "1"}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("seed=1", "seed=1"),
        ("rollout.max_new_tokens=512", "rollout.max_new_tokens=512"),
        ("correction=decoupled_token_is", "correction=decoupled_token_is"),
        ("correction={verl: {rollout_rs: token_k1}}", "correction={verl: {rollout_rs: token_k1}}"),
        ("reward.api_key_variable=MY_KEY", "reward.api_key_variable=MY_KEY"),
        ("learner.flag_token=true", "learner.flag_token=true"),
        ("reward.arguments.api_key=sk-12", "reward.arguments.api_key=…"),
        ("reward.arguments.password=two words", "reward.arguments.password=…"),
        ("reward={arguments: {api_key: sk-12, k: 3}}", "reward={arguments: {api_key: …, k: 3}}"),
        ('reward={arguments: {"api_key": "sk 12", k: 3}}', 'reward={arguments: {"api_key": …, k: 3}}'),
        ("reward={arguments: {password: two words, k: 3}}", "reward={arguments: {password: …, k: 3}}"),
        ("reward={arguments: {api_keys: [sk-1, sk-2], k: 3}}", "reward={arguments: {api_keys: …, k: 3}}"),
        ('reward={arguments: {api_key: "a\\"b", k: 3}}', "reward={arguments: {api_key: …, k: 3}}"),
        ("reward={arguments: {api_key: 'a''b', k: 3}}", "reward={arguments: {api_key: …, k: 3}}"),
        ("reward.arguments.say=hello there api_key=sk-12", "reward.arguments.say=hello there api_key=…"),
        ("reward={arguments: {names: [a, b], k: 3}}", "reward={arguments: {names: [a, b], k: 3}}"),
        ("rollout.stop_token_ids=[1, 2]", "rollout.stop_token_ids=[1, 2]"),
        ("tracking.uri=postgresql://me:word@host/db", "tracking.uri=postgresql://…@host/db"),
        ("reward.arguments.header=Bearer hf_0123456789", "reward.arguments.header=Bearer …"),
        ("reward.tokenizer=models/other", "reward.tokenizer=models/other"),
        ("reward.arguments={loss: token_mean, token_level: mean, key_field: id, monkey: see}",) * 2,
        ("environment.pass_secrets=[MY_SECRET]", "environment.pass_secrets=[MY_SECRET]"),
        ("reward.arguments.apiKey=sk-12", "reward.arguments.apiKey=…"),
        (
            "reward.arguments={accessToken: abc, hf-token: abc}",
            "reward.arguments={accessToken: …, hf-token: …}",
        ),
        (
            "reward.arguments.header=Authorization: Bearer abc-12345",
            "reward.arguments.header=Authorization: Bearer …",
        ),
        (
            "reward.arguments.header=Authorization: Basic bWU6d29yZA==",
            "reward.arguments.header=Authorization: Basic …",
        ),
        ('reward.arguments={header: "bearer abc-12345"}', 'reward.arguments={header: "bearer …"}'),
        (
            "reward.arguments={headers: {Authorization: Basic bWU6d29yZA==}}",
            "reward.arguments={headers: {Authorization: …}}",
        ),
        ("reward.arguments.about=hello sk-proj-0123456789abcdef", "reward.arguments.about=hello …"),
        ("reward.arguments.with=ghp_0123456789abcdefABCD", "reward.arguments.with=…"),
        ("reward.arguments.with=[hf_transfer, the bearer of news]",) * 2,
        ("reward.arguments.with=a sk-ant-api03-A_b-0123456789abcdef-_x", "reward.arguments.with=a …"),
        ("reward.arguments.with=hf_abcdefABCD0123456789,", "reward.arguments.with=…,"),
        ("model.path=/data/hf_models/Qwen2.5-0.5B-Instruct",) * 2,
        ("name=hf_baseline_of_2026_11_28",) * 2,
        ("name=sk-learn-baseline-of-2026-11",) * 2,
        ("--dry-run", "--dry-run"),
        ("name=1", "name=1"),
    ],
)
def test_a_recorded_command_holds_no_secret(given, kept):
    text = command_text(["/somewhere/bin/tandem", "train", "a config.yaml", given], ENVIRONMENT)
    assert shlex.split(text) == ["tandem", "train", "a config.yaml", kept]
    assert command_text(["/x/launch/__main__.py", "list"], ENVIRONMENT) == "tandem list"


def test_every_start_of_a_run_is_recorded_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tandem", "train", "config.yaml", "reward.arguments.key=sk-1"])
    monkeypatch.chdir(tmp_path)
    folder = run_folder.create(tmp_path / "runs", "tiny", "name: tiny\nsteps: 4\n")
    shown = dict(status(folder).lines)
    assert shown["started by"].startswith("tandem train config.yaml 'reward.arguments.key=…' (20")
    assert "resumed by" not in shown
    for steps in (8, 16):
        monkeypatch.setattr("sys.argv", ["tandem", "resume", "runs/latest", f"steps={steps}"])
        run_folder.change_config(folder, f"name: tiny\nsteps: {steps}\n")
    found = read_commands(folder.commands)
    assert [each["command"].split()[1] for each in found] == ["train", "resume", "resume"]
    assert {each["folder"] for each in found} == {str(tmp_path)}
    shown = dict(status(folder).lines)
    assert shown["started by"].startswith("tandem train ")
    assert shown["resumed by"].startswith("tandem resume runs/latest steps=16 (20")
    assert shown["resumed by"].endswith("), and 1 time before")


def test_a_command_that_is_no_utf8_or_has_ends_of_lines_is_recorded(tmp_path, monkeypatch):
    name = "a\udcff\u2028\x85\nb"
    monkeypatch.setattr("sys.argv", ["tandem", "train", name])
    file = tmp_path / "commands.jsonl"
    for _ in range(2):
        record_command(file)
    assert [shlex.split(each["command"])[2:] for each in read_commands(file)] == [[name]] * 2
    folder = RunFolder(tmp_path)
    folder.config.write_text("name: tiny\nsteps: 4\n")
    dict(status(folder).lines)["started by"].encode()


def test_a_resume_whose_command_cannot_be_recorded_keeps_the_config(tmp_path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("name: tiny\nsteps: 4\n")
    folder.commands.mkdir()
    with pytest.raises(ConfigError, match="the run folder cannot be written"):
        run_folder.change_config(folder, "name: tiny\nsteps: 8\n")
    assert folder.config.read_text() == "name: tiny\nsteps: 4\n"


def test_a_damaged_record_of_commands_is_a_line_less(tmp_path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("name: tiny\nsteps: 4\n")
    assert "started by" not in dict(status(folder).lines), "an older version's run has none"
    sound = json.dumps({"time": "2026-01-01", "folder": "/", "command": "tandem train\n\x1b[2Ja"})
    folder.commands.write_text(f'{{"torn\n[1]\n{{"command": 3}}\n{sound}\n')
    assert len(read_commands(folder.commands)) == 1
    assert "\x1b" not in str(status(folder)) and "\n" not in dict(status(folder).lines)["started by"]
