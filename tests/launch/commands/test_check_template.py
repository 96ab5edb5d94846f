"""``tandem check-template``: its output for templates that Tandem can use, and for those that it cannot."""

from pathlib import Path

import pytest

from configs.reading.yaml_values import read_yaml
from launch.commands import check_template
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.chat_tokenizer import chat_tokenizer, template_of
from tests.support.command import tandem

USABLE = "Tandem can use this template"


@pytest.fixture
def folder(tmp_path) -> Path:
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path


def write_template(folder: Path, template: str) -> None:
    (folder / "model/chat_template.jinja").write_text(template)


def test_rewriting_is_told_and_no_error(folder):
    done = tandem("check-template", "model", "--tools", cwd=folder)
    assert done.returncode == 0, done.stderr
    rows = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines()[1:11])
    assert len(rows) == 10
    assert {name.strip() for name, equal in rows.items() if equal == "no"} == {"thinking in an earlier turn"}
    assert "drops the thinking of earlier turns: a server that renders them again would fork" in done.stdout
    assert "Tandem    'assistant\\n[[<think>]]\\nTwo'" in done.stdout
    assert "end of the assistant's turn: '<|im_end|>' (" in done.stdout and "warning" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith(USABLE)


def test_arguments_reach_the_template(folder):
    done = tandem("check-template", "model", "--argument", "enable_thinking=false", cwd=folder)
    assert done.returncode == 0 and "another text than its generation prompt" in done.stdout


def test_an_end_at_which_the_model_does_not_stop_is_warned_of(folder):
    tokenizer = chat_tokenizer("qwen3")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder / "model")
    done = tandem("check-template", "model", cwd=folder)
    assert done.returncode == 0 and USABLE in done.stdout
    assert "warning: the model does not stop at '<|im_end|>' (" in done.stdout
    assert "add the id to eos_token_id in generation_config.json" in done.stdout
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (folder / "model/generation_config.json").write_text(f'{{"eos_token_id": [{end}]}}')
    assert "warning" not in tandem("check-template", "model", cwd=folder).stdout


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (template_of("rewrites_the_end"), "changes with an earlier turn"),
        ("{{ messages[0].content }}{{ raise_exception('no roles') }}", "TemplateError: no roles; use the template of"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_one_error(folder, template, message):
    write_template(folder, template)
    done = tandem("check-template", "model", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tandem: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_tools_are_needed_only_where_they_are_asked_for(folder):
    write_template(folder, template_of("mistral_v3").replace("message.role == 'tool'", "false"))
    done = tandem("check-template", "model", cwd=folder)
    assert done.returncode == 0 and "note: messages of role 'tool' cannot follow" in done.stdout
    done = tandem("check-template", "model", "--tools", cwd=folder)
    assert done.returncode == 1 and "role 'tool' cannot follow the assistant's turn" in done.stderr


def test_a_model_without_a_template(tmp_path):
    make_tiny_countdown_model(tmp_path / "model", seed=0)
    done = tandem("check-template", "model", cwd=tmp_path)
    assert (
        done.returncode == 1 and "has no chat template; copy the model's chat_template.jinja" in done.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone"], "MODEL: gone is not a folder"),
        (["model", "--argument", "enable_thinking"], "write KEY=VALUE"),
        (["model", "--argument", "a=[1"], "is not a value of YAML"),
    ],
)
def test_bad_input(folder, arguments, message):
    done = tandem("check-template", *arguments, cwd=folder)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(
    "value", ["no", "off", "1e-4", "90_000", "012", "2024-01-01", "[a, no]", "null", "'x'"]
)
def test_arguments_are_read_as_those_of_a_config(value):
    written = f"kind: train\nmodel: {{chat_template_kwargs: {{given: {value}}}}}\n"
    read = read_yaml(written, "a.yaml")
    assert read is not None
    assert ("given", read.plain()["model"]["chat_template_kwargs"]["given"]) == check_template._argument(
        f"given={value}"
    )
