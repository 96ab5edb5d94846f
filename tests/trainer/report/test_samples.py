"""The report's samples: escaped, self-contained, limited in size, and a note where they cannot be shown."""

import re
from pathlib import Path

from rollout.tiny_model import make_tiny_countdown_model
from tests.trainer.report.test_report import Page, few_metrics, make_config, make_run
from tests.trainer.tracking.test_transcripts import make_sample
from trainer.report.page import write_report
from trainer.report.samples import HEAD, MOST_SIBLINGS, TAIL, shown_samples
from trainer.tracking.samples import FOLDER, SampledTurn, as_lines, sample_file
from trainer.tracking.transcripts import ids_as_text


def write(folder, step: int, *samples) -> None:
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    sample_file(folder / FOLDER, step).write_bytes(as_lines(samples))


def page_of(tmp_path, monkeypatch, decode=None):
    if decode is not None:
        monkeypatch.setattr("trainer.report.samples.find_decode", lambda *_: (decode, None))
    path = write_report(make_run(tmp_path, [1, 2], metrics=few_metrics))
    return path.read_text(encoding="utf-8"), Page(path)


def test_the_first_and_the_last_step_are_shown_token_by_token(tmp_path, monkeypatch):
    for step in (1, 2, 7):
        write(tmp_path, step, make_sample(step=step, group=20 + step))
    source, page = page_of(tmp_path, monkeypatch, lambda ids: bytes(ids).decode())
    assert "Step 1 Group 21, prompt p" in page.text and "Step 7 Group 27" in page.text
    assert "Group 22" not in page.text
    assert "Sibling 0: reward 0.5, ok, 2 turns, 5 sampled tokens" in page.text
    assert 'title="0.5000 / 0.3000 / 5">g</span>' in source
    assert "<pre class=observed>e</pre>" in source, "an observation is no sampled text"
    assert re.findall(r'<pre><span class="([^"]*)"', source)[:2] == ["a0 g0", "a0 g2"]
    assert page.references == [*page.images] and not page.tags & {"script", "link", "iframe"}


def test_a_run_without_samples_has_no_section(tmp_path, monkeypatch):
    source, page = page_of(tmp_path, monkeypatch)
    assert "<h2>Samples</h2>" not in source and "token ids" not in page.text


def test_what_a_model_writes_is_never_a_tag(tmp_path, monkeypatch):
    evil = '<script>alert("x")</script></pre>&lt;' + "'\x00\x1b"
    write(tmp_path, 1, make_sample(prompt_id=evil, parts={evil: 1.0}, status=evil))
    source, page = page_of(tmp_path, monkeypatch, lambda ids: evil * len(ids))
    assert (
        "<script" not in source
        and not page.tags & {"script"}
        and "\x00" not in source
        and "\x1b" not in source
    )
    assert page.text.count('<script>alert("x")</script></pre>&lt;') >= 5
    assert source.count("<pre") == source.count("</pre>")


def long_sample(count: int, sibling: int, group: int):
    return make_sample(
        bytes(count), group=group, sibling=sibling, turns=[SampledTurn(start=9, end=count, finish_reason="length")],
        rollout_logprobs=[-1.0] * (count - 9), learner_logprobs=[-2.0] * (count - 9), versions=[(1, count - 9)],
    )  # fmt: skip


def test_many_and_long_samples_are_cut(tmp_path, monkeypatch):
    for step in (1, 2):
        write(
            tmp_path, step, *(long_sample(3000, sibling, group) for group in range(3) for sibling in range(8))
        )
    source, page = page_of(tmp_path, monkeypatch, ids_as_text)
    assert source.count("<details") == 2 * 2 * MOST_SIBLINGS + 1
    assert source.count(f"[…{3000 - 9 - HEAD - TAIL} tokens are left out…]") == 16
    assert "4 more samples are not shown" in page.text
    assert len(source.encode()) < 2_000_000


def test_a_fork_shows_what_it_began_with(tmp_path, monkeypatch):
    write(tmp_path, 1, make_sample(), make_sample(branch=1), make_sample(b"zycdefgh", branch=2))
    shown = shown_samples(tmp_path, Path("gone"))
    (group,) = shown.steps[0]["groups"]
    assert [sample["title"].partition(":")[0] for sample in group["samples"]] == [
        "Sibling 0", "Sibling 0, sequence 2", "Sibling 0, sequence 3"
    ]  # fmt: skip
    assert [sample["parts"][0]["title"].partition(",")[0] for sample in group["samples"]] == [
        "turn 1", "turn 1", "prompt"
    ]  # fmt: skip


def test_a_damaged_file_and_a_lost_tokenizer_are_notes(tmp_path, monkeypatch):
    write(tmp_path, 1, make_sample())
    write(tmp_path, 2, make_sample())
    sample_file(tmp_path / FOLDER, 1).write_bytes(b'{"step": 1')
    _, page = page_of(tmp_path, monkeypatch)
    assert "step_000001.jsonl cannot be read" in page.text
    assert "model folder model does not exist" in page.text and "token ids are shown" in page.text
    assert "97 98" in page.text


def test_the_models_own_tokenizer_makes_the_text(tmp_path):
    make_tiny_countdown_model(tmp_path / "model", seed=0)
    ids = list(range(5, 13))
    write(tmp_path, 1, make_sample(bytes(ids)))
    config = make_config(model={"path": str(tmp_path / "model")})
    shown = shown_samples(tmp_path, config.model.path)
    assert shown.notes == [] and len(shown.steps[0]["groups"][0]["prompt"]) == 2
