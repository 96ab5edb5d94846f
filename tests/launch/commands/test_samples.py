"""What ``tandem samples`` prints, and what it says where there is nothing to print."""

import re

import pytest
import yaml
from msgspec.structs import replace

from tests.support.command import tandem
from tests.trainer.tracking.test_transcripts import make_sample
from trainer.tracking.samples import EVALUATION, FOLDER, as_lines, sample_file


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "launch.commands.samples.find_decode", lambda *_: (lambda ids: bytes(ids).decode(), None)
    )
    (tmp_path / FOLDER).mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "gone"}}))
    for step in (1, 2, 7):
        samples = [
            make_sample(f"p{step}ur[b]o1".encode()[:5] + b"f\x1bh", step=step, group=group, sibling=sibling)
            for group in (4, 5)
            for sibling in (0, 1)
        ]
        sample_file(tmp_path / FOLDER, step).write_bytes(as_lines(samples))
    return tmp_path


def said(run, *options: str, exit_code: int = 0) -> str:
    done = tandem("samples", str(run), *options, cwd=run.parent)
    assert done.returncode == exit_code, done.stderr
    return done.stderr if exit_code else done.stdout


def test_the_last_step_turn_by_turn(run):
    text = said(run)
    assert text == said(run, "--step", "7")
    assert text.startswith("step 7, sampled for version 6 of the weights\n\n━━ group 4, prompt p\np7\n")
    assert text.count("━━ group") == 2 and text.count("── sibling") == 4
    assert (
        "── sibling 1: reward 0.5, ok, 2 turns, 5 sampled tokens\nturn 1, 2 tokens, ended by stop, reward 0.25\nur\n"
        "observed, 1 token\n[\nturn 2, 3 tokens, ended by length, age 0 to 5\nf␛h\n"
    ) in text


def test_one_group_and_sibling(run):
    text = said(run, "--step", "1", "--group", "5", "--sibling", "1")
    assert text.startswith("step 1,") and "group 5" in text and "group 4" not in text
    assert text.count("── sibling") == 1 and "sibling 1:" in text


def test_a_fork_shows_what_it_began_with(run):
    first = make_sample(b"p1urxfgh", step=9)
    same = make_sample(b"p1abxfgh", step=9, branch=1)
    other = make_sample(b"zzcdxfgh", step=9, branch=2)
    sample_file(run / FOLDER, 9).write_bytes(as_lines([first, same, other]))
    text = said(run)
    assert "── sibling 0, sequence 2: reward 0.5, ok, 2 turns, 5 sampled tokens\nturn 1, 2 tokens" in text
    assert (
        "── sibling 0, sequence 3: reward 0.5, ok, 2 turns, 5 sampled tokens\nprompt, 2 tokens\nzz\nturn 1"
        in text
    )


def test_tokens_by_their_gap(run):
    text = said(run, "--group", "5", "--sibling", "1", "--tokens")
    assert "|Δp| = |p rollout - p learner|: up to 0.001  up to 0.01" in text and "over 0.5" in text
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows[:2]] == [
        ["7", "'h'", "0.5000", "1.0000", "5.0e-01", "5"],
        ["6", "'␛'", "0.5000", "0.3000", "2.0e-01", "5"],
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--step", "3"), "--step 3: no samples of this step in .*; there are those of 1, 2, 7"),
        (("--group", "9"), "--group 9: not among the samples; there are 4, 5"),
        (("--sibling", "9"), "--sibling 9: not among the samples; there are 0, 1"),
    ],
)
def test_what_is_missing_is_named_with_what_is_there(run, options, told):
    assert re.search(told, said(run, *options, exit_code=2))


def test_a_run_without_samples_and_a_damaged_file(run):
    sample_file(run / FOLDER, 7).write_bytes(b"{")
    assert "step_000007.jsonl cannot be read" in said(run, exit_code=2)
    for step in (1, 2, 7):
        sample_file(run / FOLDER, step).unlink()
    assert "has no samples yet" in said(run, exit_code=2)
    (run / "request.json").write_text("{}")
    assert "is not a training run, and has no samples of an evaluation" in said(run, exit_code=2)
    assert "is not a run folder" in said(run / "nowhere", exit_code=2)


def test_the_samples_of_an_evaluation(run):
    assert "written at the end of each evaluation" in said(run, "--evaluation", exit_code=2)
    for step in (0, 4):
        main = replace(make_sample(b"e1urxfgh", step=step), learner_logprobs=None)
        samples = [main, replace(main, group=2, heldout_set="hard")]
        sample_file(run / FOLDER, step, EVALUATION).write_bytes(as_lines(samples))
    text = said(run, "--evaluation")
    assert text.startswith(
        "evaluation after step 4, sampled for version 6 of the weights\n\n━━ group 1, prompt p\ne1\n"
    )
    assert "\n━━ group 2, prompt p, held-out set hard\n" in text
    assert said(run, "--evaluation", "--step", "0").startswith("evaluation after step 0,")
    assert "there are those of 0, 4" in said(run, "--evaluation", "--step", "7", exit_code=2)
    assert said(run).startswith("step 7,")
    (run / "request.json").write_text("{}")
    assert said(run) == text, "a run of `tandem eval` has no others"


def test_a_long_list_of_steps_is_shortened(run):
    for step in range(1, 8):
        sample_file(run / FOLDER, step).write_bytes(b"")
    assert "there are those of steps 1 to 7" in said(run, "--step", "8", exit_code=2)
    for step in range(10, 100, 2):
        sample_file(run / FOLDER, step).write_bytes(b"")
    assert "6, 7, 10, 12, 14, 16, 18, …, 76, 78" in said(run, "--step", "8", exit_code=2)


@pytest.mark.parametrize("config", ["model: [", "name: tiny", "- 3"])
def test_a_damaged_config_hides_no_sample(run, monkeypatch, config):
    monkeypatch.undo()
    (run / "config.yaml").write_text(config)
    text = said(run, "--group", "4", "--sibling", "0")
    assert "config.yaml names no model.path (" in text and "112 55\n" in text


def test_ids_where_the_tokenizer_is_gone(run, monkeypatch):
    monkeypatch.undo()
    text = said(run, "--group", "4", "--sibling", "0")
    assert "model folder gone does not exist" in text and "token ids are shown instead of text" in text
    assert "112 55\n" in text
