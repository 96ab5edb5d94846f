"""The report against runs written here: what is drawn, what is said, and that the page needs nothing else."""

import base64
import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.loader import resolved_yaml
from configs.schema import RunConfig
from trainer.report import _PICTURES, changed_settings, smooth, write_report

ALL_FIGURES = {picture.name for picture in _PICTURES} | {"step_time"}


def make_config(**fields) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "model"}, "task": {"type": "countdown"}, "steps": 40, **fields})


def step_metrics(step: int) -> dict[str, float]:
    wave = math.sin(step)
    return {
        "reward/mean": 0.2 + step / 100 + wave / 50,
        "mismatch/abs_prob_mean": 1e-4 * (2 + wave),
        "mismatch/abs_prob_max": 1e-2 * (2 + wave),
        "mismatch/k3": 1e-6 * (2 + wave),
        "mismatch/ess": 0.99 + wave / 200,
        "mismatch/kept_fraction": 1.0,
        "policy/entropy": 1.2 - step / 100,
        "policy/ppo_kl": 0.0,
        "policy/ref_kl": 1e-3 * step,
        "policy/clip_fraction": 0.01 * (1 + wave),
        "policy/dual_clip_fraction": 0.001 * (1 + wave),
        "response/length_mean": 20 + wave,
        "response/length_max": 40 + 5 * wave,
        "response/truncated_fraction": 0.01 * (1 + wave),
        "optim/grad_norm": 0.5 + wave / 5,
        "time/sampling": 3.0,
        "time/logprobs": 0.5,
        "time/update": 1.5,
        "time/sync": 0.25,
        "time/step": 5.5,
        **({"eval/accuracy": 0.2 + step / 100, "eval/count": 400.0} if step % 10 == 0 else {}),
    }


def make_run(folder: Path, steps, config: RunConfig | None = None, summary: dict | None = None, metrics=step_metrics) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(resolved_yaml(config or make_config()), encoding="utf-8")
    lines = [json.dumps({"step": step, "elapsed_s": 6.0 * step, **metrics(step)}) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


class Page(HTMLParser):
    """References, images and plain text of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.references: list[str] = []
        self.images: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action") and value]
        self.images += [dict(attrs)["src"]] if tag == "img" else []

    def handle_data(self, data):
        self.text += f" {data}"


def test_page_holds_every_figure_and_refers_to_nothing_outside(tmp_path):
    summary = {"accuracy_before": 0.205, "accuracy_after": 0.6, "steps": 40, "seconds": {"install": 10, "rl": 300.4}}
    path = write_report(make_run(tmp_path / "run", range(41), summary=summary))
    page = Page(path)
    assert path == tmp_path / "run" / "report.html"
    assert {p.stem for p in (path.parent / "figures").iterdir()} == ALL_FIGURES
    embedded = [base64.b64decode(image.removeprefix("data:image/png;base64,")) for image in page.images]
    assert sorted(embedded) == sorted(p.read_bytes() for p in (path.parent / "figures").iterdir())
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(", source)
    assert not page.tags & {"script", "link", "iframe", "object"}
    for fact in ("Accuracy before 20.5% ± 2.0%", "Accuracy after 60.0% ± 2.4%", "Steps 40 of 40", "Seconds 310"):
        assert fact in page.text
    assert "no summary.json" not in page.text


def test_figures_have_ink(tmp_path):
    from PIL import Image

    path = write_report(make_run(tmp_path / "run", range(41)))
    for name in ALL_FIGURES:
        image = Image.open(io.BytesIO((path.parent / "figures" / f"{name}.png").read_bytes())).convert("RGB")
        coloured = sum(n for n, (r, g, b) in image.getcolors(1 << 20) if max(r, g, b) - min(r, g, b) > 60)
        assert image.width >= 1000 and coloured > 500, name


def test_unfinished_run_says_so_and_its_accuracy_is_so_far(tmp_path):
    page = Page(write_report(make_run(tmp_path / "run", range(15))))
    assert "The run has no summary.json" in page.text
    assert "Accuracy so far 30.0%" in page.text
    assert "Steps 14 of 40" in page.text
    assert "Seconds 84" in page.text


@pytest.mark.parametrize("steps", [[0], [1], [0, 1]])
def test_one_step_runs(tmp_path, steps):
    path = write_report(make_run(tmp_path / "run", steps))
    drawn = {p.stem for p in (path.parent / "figures").iterdir()}
    assert drawn == ALL_FIGURES
    if steps == [1]:
        assert "Accuracy before not measured" in Page(path).text


def test_run_without_a_step_yet(tmp_path):
    path = write_report(make_run(tmp_path / "run", []))
    page = Page(path)
    assert "No step has been recorded yet." in page.text and page.images == []
    assert list((path.parent / "figures").iterdir()) == []


def test_gaps_nulls_torn_line_and_missing_metrics_are_noted(tmp_path, caplog):
    def metrics(step):
        kept = {k: v for k, v in step_metrics(step).items() if not k.startswith(("response/", "eval/"))}
        return {**kept, "optim/grad_norm": None if step == 3 else 0.5}

    folder = make_run(tmp_path / "run", [1, 2, 3, 6, 7, 12], metrics=metrics)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 13, "rewa')
    path = write_report(folder)
    text = Page(path).text
    assert "Steps without a record: 4 to 5, 8 to 11." in text
    assert "Not recorded, so not drawn: eval/accuracy, response/length_max, response/length_mean, response/truncated_fraction." in text
    assert "optim/grad_norm is 0.5 at all 5 steps." in text
    assert "policy/ppo_kl is 0 at all 6 steps (expected with one minibatch per step" in text
    assert any("line 7 not readable" in message for message in caplog.messages)
    assert {p.stem for p in (path.parent / "figures").iterdir()} == ALL_FIGURES - {"response_length"}


def test_an_older_figure_that_is_no_longer_drawn_goes(tmp_path):
    folder = make_run(tmp_path / "run", range(3))
    write_report(folder)
    make_run(folder, range(3), metrics=lambda step: {"reward/mean": 0.5 + step})
    write_report(folder)
    assert {p.stem for p in (folder / "figures").iterdir()} == {"reward"}


def test_later_value_of_a_step_counts(tmp_path):
    folder = make_run(tmp_path / "run", [0, 1])
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 1, "elapsed_s": 7.0, "eval/accuracy": 0.75, "eval/count": 400}) + "\n")
    assert "Accuracy so far 75.0% ± 2.2%" in Page(write_report(folder)).text


def test_unreadable_summary_is_noted(tmp_path):
    folder = make_run(tmp_path / "run", [1])
    (folder / "summary.json").write_text("[", encoding="utf-8")
    assert "summary.json is not readable" in Page(write_report(folder)).text


def test_text_is_escaped_and_passwords_stay_out(tmp_path):
    config = make_config(tracking={"uri": "http://me:secret@tracker/x", "experiment": "<script>alert(1)</script>"})
    path = write_report(make_run(tmp_path / "run", [1], config=config))
    source = path.read_text(encoding="utf-8")
    assert "secret" not in source and "<script>" not in source
    assert "&lt;script&gt;" in source and "tracker/x" in source


def test_changed_settings_by_hand():
    config = make_config(
        task={"type": "countdown", "num_numbers": 5}, learner={"optimizer": {"lr": 0.001}}, correction={"weight": {"level": "none"}}
    )
    assert changed_settings(config) == [
        ("steps", "40", "100"),
        ("model.path", "model", "-"),
        ("task.type", "countdown", "-"),
        ("task.num_numbers", "5", "3"),
        ("learner.optimizer.lr", "0.001", "1e-06"),
        ("correction.weight.level", "none", "token"),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "nowhere", "is not a folder; name the folder of a run"),
        (lambda d: d, "it has no config.yaml and no metrics.jsonl"),
    ],
)
def test_a_folder_that_is_no_run(tmp_path, make, message):
    folder = make(tmp_path)
    with pytest.raises(ValueError, match=message) as raised:
        write_report(folder)
    assert str(folder) in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_config_of_another_version_is_named(tmp_path):
    folder = make_run(tmp_path / "run", [1])
    (folder / "config.yaml").write_text("model: {path: m}\ntask: {type: countdown}\nstepz: 3\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config.yaml:3\n  field: stepz"):
        write_report(folder)


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(math.nan)), min_size=1, max_size=30), st.sampled_from([1, 3, 5, 7]))
def test_smooth_is_the_mean_of_the_neighbours(values, width):
    half = width // 2
    for index, got in enumerate(smooth(values, width)):
        near = [values[i] for i in range(len(values)) if abs(i - index) <= half and not math.isnan(values[i])]
        assert math.isnan(got) if math.isnan(values[index]) else got == pytest.approx(sum(near) / len(near))


def test_importing_the_report_loads_neither_matplotlib_nor_torch():
    code = "import sys, trainer.report; assert not {'matplotlib', 'torch', 'mlflow'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
