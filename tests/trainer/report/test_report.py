"""The report against runs written here: what is drawn, what is said, and that the page needs nothing else."""

import base64
import io
import json
import math
import re
import resource
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.loader import resolved_yaml
from configs.schema import RunConfig
from configs.schema.alarms import AlarmsConfig
from launch.processes.run_folder import RunFolder
from launch.roles.learn import written_report
from rollout.sampling.sampler import accuracy_error
from tests.tracing.made import write_run as write_trace
from trainer.report import comparison, timeline
from trainer.report import page as page_module
from trainer.report.drawing import COLORS, MOST_BARS, draw, draw_legend, draw_lines, draw_stack, new_figure
from trainer.report.page import changed_settings, write_comparison, write_report
from trainer.report.pictures import PICTURES, Lines
from trainer.report.recorded_run import alarm_histories
from trainer.report.series import MOST_POINTS, Recorded, Series, smooth, thinned
from trainer.tracking import alarms

ALL_FIGURES = {picture.name for picture in PICTURES} | {"step_time"}
RULES = ("ratio_geometric", "veto", "total")
MAX_BINS = ("le_0.001", "le_0.01", "le_0.1", "le_0.25", "le_0.5", "over_0.5")


def make_config(**fields) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "model"}, "task": {"type": "countdown"}, "steps": 40, **fields}
    )


def step_metrics(step: int) -> dict[str, float]:
    wave = math.sin(step)
    return {
        "reward/mean": 0.2 + step / 100 + wave / 50,
        "reward/importance_weighted": 0.2 + step / 90 + wave / 40,
        "reward/importance_ess": 0.9 + wave / 20,
        "reward/part/correct": 0.3 + wave / 50,
        "reward/part/overlong": -0.1 + wave / 50,
        "groups/no_signal_fraction": 0.5 + wave / 4,
        "sampling/resampled_groups": 4.0 + step % 3,
        "sampling/filled_groups": 1.0,
        "mismatch/response_abs_prob_max_mean": 3e-3 * (2 + wave),
        "mismatch/response_abs_prob_mean_max": 1e-3 * (2 + wave),
        "mismatch/response_abs_prob_over": 0.01 * (1 + wave) / 2,
        "mismatch/prob_pearson": 1 - 1e-4 * (2 + wave),
        "mismatch/experts_differ": 0.01 + wave / 500,
        "mismatch/experts_differ/layer_0": 0.01 + wave / 400,
        "mismatch/experts_differ/layer_2": 0.01 + wave / 600,
        "mismatch/replayed_fraction": 0.9 + wave / 20,
        "mismatch/chi2_token": 1e-4 * wave,
        "mismatch/chi2_sequence": 0.02 + wave / 50,
        "mismatch/log_ppl_diff_mean": wave / 1000,
        "mismatch/log_ppl_diff_abs": 0.002 + wave / 1000,
        "mismatch/ppl_train": 3 + wave,
        "mismatch/ppl_rollout": 3.1 + wave,
        "mismatch/ess_bounded": 0.995,
        **{
            f"mismatch/{w}weight_{name}": value
            for w in ("raw_", "")
            for name, value in (("max", 2.0), ("mean", 1.0), ("std", 0.1))
        },
        **{
            f"mismatch/rejected/{rule}/{of}": 0.02 + wave / 60
            for rule in RULES
            for of in ("tokens", "sequences", "touched_sequences")
        },
        **{f"mismatch/response_abs_prob_max_share/{bin}": 1 / 6 for bin in MAX_BINS},
        **{
            f"mismatch/by_{what}/{bucket}/abs_prob_{name}": value * (2 + wave)
            for what in ("length", "position")
            for bucket in ("le_64", "le_256")
            for name, value in (("mean", 1e-4), ("max", 1e-2))
        },
        "policy/kl_in_reward": 2e-3 * step,
        "policy/kl_coefficient": 0.01,
        "critic/loss": 0.2 + wave / 20,
        "critic/explained_variance": 0.3 + wave / 20,
        "critic/value_mean": 0.2 + wave / 20,
        "critic/return_mean": 0.25 + wave / 20,
        "mismatch/abs_prob_mean": 1e-4 * (2 + wave),
        "mismatch/abs_prob_max": 1e-2 * (2 + wave),
        "mismatch/k3": 1e-6 * (2 + wave),
        "mismatch/ess": 0.99 + wave / 200,
        "mismatch/kept_fraction": 0.95 + wave / 50,
        "policy/entropy": 1.2 - step / 100,
        "policy/ppo_kl": 1e-4 * wave,
        "policy/ppo_kl_negative_fraction": 0.25 * (step % 3),
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
        "time/checkpoint": 1.0 if step % 4 == 1 else 0.0,
        "time/step": 5.5,
        **(evaluation(0.2 + step / 100, count=400) if step % 10 == 0 else {}),
    }


def evaluation(accuracy: float, count: int) -> dict[str, float]:
    """One answer to each problem."""
    error = (accuracy * (1 - accuracy) / count) ** 0.5
    return {"eval/accuracy": accuracy, "eval/accuracy_error": error, "eval/count": float(count)}


def few_metrics(step: int) -> dict[str, float]:
    """For tests of the page's text, and of a figure that no metric draws: one figure."""
    return {"reward/mean": 0.2 + step / 100}


def some_metrics(step: int) -> dict[str, float]:
    """Three figures, an accuracy now and then."""
    names = (
        "reward/mean",
        "optim/grad_norm",
        "policy/entropy",
        "eval/accuracy",
        "eval/accuracy_error",
        "eval/count",
    )
    return {name: value for name, value in step_metrics(step).items() if name in names}


def make_run(
    folder: Path, steps, config: RunConfig | None = None, summary: dict | None = None, metrics=step_metrics
) -> Path:
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
        self.references += [
            value for name, value in attrs if name in ("src", "href", "srcset", "data", "action") and value
        ]
        self.images += [dict(attrs)["src"]] if tag == "img" else []

    def handle_data(self, data):
        self.text += f" {data}"


@pytest.fixture(scope="module")
def full_page(tmp_path_factory) -> Path:
    """The page of a finished run that has everything. Its drawing takes seconds."""
    seconds = {"install": 10, "sampling": 99, "start_up": 20, "training": 300.4}
    summary = {"accuracy_before": 0.205, "accuracy_after": 0.6, "steps": 40, "seconds": seconds}
    folder = make_run(tmp_path_factory.mktemp("full") / "run", range(41), summary=summary)
    path = write_report(folder)
    assert path == folder / "report.html"
    return path


def test_page_holds_every_figure_and_refers_to_nothing_outside(full_page):
    path, page = full_page, Page(full_page)
    assert {p.stem for p in (path.parent / "figures").iterdir()} == ALL_FIGURES
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in page.references)
    embedded = [
        base64.b64decode(image.removeprefix("data:image/svg+xml;base64,")).decode() for image in page.images
    ]
    assert len(embedded) > 2 * len(ALL_FIGURES), "a panel each"
    assert all(ElementTree.fromstring(image).tag.endswith("}svg") for image in embedded)
    titles = {picture.title for picture in PICTURES} | {"Where the time of a step goes"}
    assert not any(f">{title}<" in image for title in titles for image in embedded), (
        "the page has the title already"
    )
    assert len(path.read_bytes()) < 3_000_000
    source = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(", source)
    assert not page.tags & {"script", "link", "iframe", "object"}
    for fact in (
        "Accuracy before 20.5% ± 2.0% at step 0",
        "Accuracy after 60.0% ± 2.4% at step 40",
        "Steps 40 of 40",
        "Running time 5m20s",
        "In a weighted reward only the part that decides counts",
        "sync 10.2 4% checkpoint 10.0 4% other",
    ):
        assert fact in page.text
    assert "no summary.json" not in page.text


def test_figures_have_ink(full_page):
    from PIL import Image

    for name in ALL_FIGURES:
        file = full_page.parent / "figures" / f"{name}.png"
        image = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
        coloured = sum(n for n, (r, g, b) in image.getcolors(1 << 20) if max(r, g, b) - min(r, g, b) > 60)
        assert image.width >= 1000 and coloured > 500, name


def test_unfinished_run_says_so_and_its_accuracy_is_so_far(tmp_path):
    page = Page(write_report(make_run(tmp_path / "run", range(15), metrics=some_metrics)))
    assert "The run has no summary.json" in page.text
    assert "Accuracy so far 30.0% ± 2.3% at step 10" in page.text
    assert "Steps 14 of 40" in page.text
    assert "Running time so far 1m24s" in page.text


@pytest.mark.parametrize("recorded", [20, 25])
def test_a_finished_run_that_goes_on_to_more_steps_is_not_finished(tmp_path, recorded):
    """Its summary is that of the earlier end, until it is written anew."""
    summary = {"accuracy_before": 0.1, "accuracy_after": 0.9, "steps": 20, "seconds": {"training": 1e4}}
    folder = make_run(tmp_path / "run", range(recorded + 1), summary=summary, metrics=some_metrics)
    text = Page(write_report(folder)).text
    assert "summary.json is of step 20, before the run continued: it is not finished" in text
    assert f"Steps {recorded} of 40" in text and "Accuracy so far 40.0%" in text
    assert f"Running time so far {recorded // 10}m" in text and "Accuracy after" not in text


@pytest.mark.parametrize("steps", [[0], [1], [0, 1]])
def test_one_step_runs(tmp_path, steps):
    """All pictures are drawn, and those of the page's own metrics are written, too."""
    for picture in PICTURES:
        for axes in drawn(picture.name, step_metrics, steps).values():
            axes.figure.draw_without_rendering()
            break

    def few(step):
        return {
            k: v for k, v in step_metrics(step).items() if k.startswith(("time/", "eval/", "reward/mean"))
        }

    path = write_report(make_run(tmp_path / "run", steps, metrics=few))
    written = {p.stem for p in (path.parent / "figures").iterdir()}
    assert written >= {"step_time", "reward"}
    if steps == [1]:
        assert "Accuracy before not measured" in Page(path).text


def test_a_traced_step_is_drawn_on_one_clock(tmp_path):
    folder = make_run(tmp_path / "run", range(1, 4), metrics=few_metrics)
    write_trace(folder)
    path = write_report(folder)
    assert (path.parent / "figures" / "timeline.png").stat().st_size > 5_000
    assert "One step on one clock" in Page(path).text
    trace = timeline.last_step(folder)
    (axes,) = timeline.draw_timeline(trace, "", width=8).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "learner rank 0",
        "learner rank 1",
        "requests (≤ 1)",
    ]
    assert axes.get_xlim() == (0, 6) and axes.get_xlabel() == "seconds since the start of step 3"
    bars = [path.get_extents() for bar in axes.collections[:2] for path in bar.get_paths()]
    assert [(bar.x0, bar.x1) for bar in bars] == [(0, 2), (2, 6)], "sampling and update of rank 0"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["sampling", "update"]


def test_a_trace_that_cannot_be_read_is_left_out_with_a_note(tmp_path):
    folder = make_run(tmp_path / "run", range(1, 4), metrics=few_metrics)
    write_trace(folder)
    (folder / "trace" / "rank-0-7.jsonl").write_text("{}\n")
    path = write_report(folder)
    assert "The trace was left out:" in Page(path).text
    assert not (path.parent / "figures" / "timeline.png").exists()


def test_run_without_a_step_yet(tmp_path):
    path = write_report(make_run(tmp_path / "run", []))
    page = Page(path)
    assert "No step has been recorded yet." in page.text and page.images == []
    assert list((path.parent / "figures").iterdir()) == []


def test_steps_before_the_first_line_are_noted(tmp_path):
    """Of a run whose metrics.jsonl was lost before it went on."""
    text = Page(write_report(make_run(tmp_path / "run", [7, 8, 9], metrics=few_metrics))).text
    assert "Steps without a record: 1 to 6." in text


def test_a_summary_with_numbers_that_are_none_is_left_out_with_a_note(tmp_path):
    folder = make_run(tmp_path / "run", range(1, 4), metrics=few_metrics)
    (folder / "summary.json").write_text('{"steps": 3, "seconds": {"training": NaN, "start_up": 1.0}}')
    assert "summary.json is not readable and was left out." in Page(write_report(folder)).text


def test_gaps_nulls_torn_line_and_missing_metrics_are_noted(tmp_path, caplog):
    def metrics(step):
        kept = {
            k: v
            for k, v in step_metrics(step).items()
            if not k.startswith(("response/", "eval/", "critic/", "mismatch/by_"))
        }
        return {**kept, "optim/grad_norm": None if step == 3 else 0.5, "policy/clip_fraction": 0.0}

    folder = make_run(tmp_path / "run", [1, 2, 3, 6, 7, 12], metrics=metrics)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 13, "rewa')
    path = write_report(folder)
    text = Page(path).text
    assert "Steps without a record: 4 to 5, 8 to 11." in text
    assert (
        "Not recorded, so not drawn: eval/accuracy, response/length_max, response/length_mean, response/truncated_fraction."
        in text
    )
    assert "optim/grad_norm is 0.5 at all 5 steps." in text
    assert "policy/clip_fraction is 0 at all 6 steps (expected with one minibatch per step" in text
    assert any("line 7 not readable" in message for message in caplog.messages)
    assert {p.stem for p in (path.parent / "figures").iterdir()} == ALL_FIGURES - {"critic"}


def test_what_never_happened_is_said_and_not_drawn(tmp_path):
    calm = {
        "mismatch/kept_fraction": 1.0,
        "policy/ppo_kl": 0.0,
        "policy/ppo_kl_negative_fraction": 0.0,
        "sampling/resampled_groups": 0.0,
    }
    rejected = {f"mismatch/rejected/total/{of}": 0.0 for of in ("tokens", "sequences", "touched_sequences")}
    path = write_report(
        make_run(
            tmp_path / "run", [1, 2], metrics=lambda step: {**calm, **rejected, "optim/grad_norm": 1.0 + step}
        )
    )
    text = Page(path).text
    assert {p.stem for p in (path.parent / "figures").iterdir()} == {"update"}
    assert "mismatch/kept_fraction is 1 (the correction rejects no token)" in text
    assert re.search(
        r"The same at every step, so not drawn: sampling/resampled_groups is 0; .*mismatch/rejected/total/tokens is 0",
        text,
    )


@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_update_that_never_clips_is_explained_by_one_minibatch_where_there_is_one(tmp_path, minibatches):
    config = make_config(learner={"minibatches": minibatches})
    folder = make_run(
        tmp_path / "run", range(1, 7), config, metrics=lambda step: {"policy/clip_fraction": 0.0}
    )
    text = Page(write_report(folder)).text
    assert "policy/clip_fraction is 0" in text and ("expected with one minibatch" in text) == (
        minibatches == 1
    )


def test_gaps_of_rounding_are_said_and_not_drawn_as_a_trend(tmp_path):
    gap = {
        "mismatch/k3": 1e-13,
        "mismatch/weight_std": 4e-7,
        "mismatch/by_length/le_64/abs_prob_mean": 1e-8,
        "mismatch/by_length/le_64/abs_prob_max": 4e-7,
        "optim/grad_norm": 1.0,
    }
    bins = dict.fromkeys(MAX_BINS, 0.0) | {"le_0.001": 1.0}
    at_rest = {f"mismatch/response_abs_prob_max_share/{part}": share for part, share in bins.items()}

    def metrics(step):
        around_one = {"mismatch/weight_max": 1 + 2e-6 * step, "mismatch/ess": 1 - 1e-12 * step}
        return {**{name: value * (1 + step) for name, value in gap.items()}, **around_one, **at_rest}

    path = write_report(make_run(tmp_path / "run", range(1, 20), metrics=metrics))
    assert {p.stem for p in (path.parent / "figures").iterdir()} == {"update"}
    text, rounding = Page(path).text, "mismatch/k3, mismatch/weight_max, mismatch/weight_std, mismatch/ess"
    assert f"around the value at rest, so not drawn: mismatch/by_length/*, {rounding}." in text
    assert "mismatch/response_abs_prob_max_share is 1 in the first bin (≤ 0.001)" in text


def test_the_error_of_accuracy_goes_from_problem_to_problem(tmp_path):
    """Two answers to a problem that are always alike say as much as one."""
    assert accuracy_error([[True, True], [False, False]] * 50) == pytest.approx(0.5 / 99**0.5)
    assert accuracy_error([[True, False]] * 50) == 0
    assert accuracy_error([[True], [False]]) == pytest.approx(0.5)
    assert accuracy_error([[True, False]]) is None
    evaluation = {"eval/accuracy": 0.5, "eval/count": 200.0}
    errors = {0: 0.05, 1: 0.04}
    path = write_report(
        make_run(
            tmp_path / "run", [0, 1], metrics=lambda step: {**evaluation, "eval/accuracy_error": errors[step]}
        )
    )
    text = Page(path).text
    assert "Accuracy before 50.0% ± 5.0% at step 0" in text
    assert "Accuracy so far 50.0% ± 4.0% at step 1" in text


def test_an_accuracy_that_was_first_measured_after_some_steps_is_none_from_before(tmp_path):
    """With ``evaluation: {every: 3, at_ends: false}``, and of a run whose last steps had no evaluation."""
    accuracies = {3: 0.25, 6: 0.5}

    def metrics(step):
        return evaluation(accuracies[step], count=100) if step in accuracies else {}

    folder = make_run(tmp_path / "run", range(1, 9), metrics=metrics)
    text = Page(write_report(folder)).text
    assert "Accuracy before not measured Accuracy so far 50.0% ± 5.0% at step 6 Steps 8 of 40" in text
    summary = {
        "accuracy_before": None, "accuracy_after": 0.5, "accuracy_after_step": 6, "steps": 40, "seconds": {},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    text = Page(write_report(folder)).text
    assert "Accuracy before not measured Accuracy after 50.0% ± 5.0% at step 6 Steps 40 of 40" in text


def make_recorded(**series) -> Recorded:
    steps = sorted({step for values in series.values() for step in values})
    return Recorded(
        steps=steps,
        series={name: Series(list(values), list(values.values())) for name, values in series.items()},
    )


def test_stars_and_complements_in_names():
    recorded = make_recorded(
        **{
            "mismatch/rejected/x/tokens": {1: 0.5},
            "mismatch/rejected/y/tokens": {1: 0.25, 2: 1.0},
            "mismatch/rejected/x/sequences": {1: 0.0},
            "reward/mean": {1: 0.0},
            "staleness/by_lag/le_0/kept_fraction": {1: 0.75},
        }
    )
    wanted = {"mismatch/rejected/*/tokens": "rule *", "reward/mean": "o", "nowhere": "n"}
    assert recorded.labelled(wanted) == {
        "mismatch/rejected/x/tokens": "rule x", "mismatch/rejected/y/tokens": "rule y", "reward/mean": "o"
    }  # fmt: skip
    kept = recorded.labelled({"1 - staleness/by_lag/*/kept_fraction": "*"})
    assert kept == {"1 - staleness/by_lag/le_0/kept_fraction": "le_0"}
    assert recorded.get(*kept) == Series([1], [0.25])
    assert recorded.get("1 - mismatch/rejected/y/tokens") == Series([1, 2], [0.75, 0.0])
    assert not recorded.get("1 - nowhere")


def test_sources_and_parts_with_a_slash_in_their_name_are_drawn():
    """As data sets are called; what has an entry of its own is no source or set of that name."""
    metrics = {
        "eval/accuracy": 0.5,
        "eval/set/hard/accuracy": 0.4,
        "eval/set/hard/greedy/accuracy": 0.3,
        "eval/set/a/b/accuracy": 0.2,
        "eval/source/openai/gsm8k/accuracy": 0.1,
        "reward/part/code/tests": 0.1,
    }
    axes = drawn("reward", lambda step: metrics, [1, 2])["Held-out accuracy"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["accuracy", "a/b", "hard", "openai/gsm8k"]
    axes = drawn("reward_parts", lambda step: metrics, [1, 2])["Parts of the reward"]
    assert [line.get_label() for line in axes.lines] == ["code/tests"]


def test_bins_are_in_the_order_of_their_edges():
    recorded = make_recorded(
        **{f"share/{bin}": {1: 0.0} for bin in ("over_0.5", "le_0.5", "le_1e-05", "le_0.001")}
    )
    assert list(recorded.edges("share").items()) == [
        ("le_1e-05", "≤ 1e-05"), ("le_0.001", "≤ 0.001"), ("le_0.5", "≤ 0.5"), ("over_0.5", "> 0.5")
    ]  # fmt: skip


def drawn(picture: str, metrics, steps) -> dict[str, object]:
    """The axes of a picture by the titles of its panels."""
    rows = {step: metrics(step) for step in steps}
    recorded = make_recorded(
        **{
            name: {s: row[name] for s, row in rows.items() if name in row}
            for row in rows.values()
            for name in row
        }
    )
    figure = draw(next(p for p in PICTURES if p.name == picture), recorded, make_config())
    return {
        axes.get_title(loc="left") or axes.get_legend().get_title().get_text(): axes for axes in figure.axes
    }


def test_buckets_show_the_mean_of_the_means_and_the_greatest_maximum_of_the_last_ten_steps():
    def metrics(step):
        return {
            **{f"mismatch/by_length/{b}/abs_prob_mean": 1e-3 * step for b in ("le_64", "over_4096")},
            **{
                f"mismatch/by_length/{b}/abs_prob_max": 0.9 if step == 2 else 0.01 * step
                for b in ("le_64", "over_4096")
            },
        }

    axes = drawn("mismatch_where", metrics, range(1, 16))["Δp by response length"]
    means, maxima = ([bar.get_height() for bar in bars] for bars in axes.containers)
    assert means == pytest.approx([1e-3 * sum(range(6, 16)) / 10] * 2) and maxima == pytest.approx([0.15] * 2)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["≤ 64", "> 4096"]


def test_a_bucket_of_which_no_maximum_was_finite_has_the_bar_of_its_mean_alone():
    buckets = {"le_64": {"mean": 1e-3, "max": 0.1}, "over_4096": {"mean": 1e-3}}
    row = {f"mismatch/by_length/{b}/abs_prob_{n}": v for b, of in buckets.items() for n, v in of.items()}
    axes = drawn("mismatch_where", lambda step: row, range(1, 16))["Δp by response length"]
    means, maxima = ([bar.get_height() for bar in bars] for bars in axes.containers)
    assert means == pytest.approx([1e-3] * 2) and maxima == pytest.approx([0.1, math.nan], nan_ok=True)
    with warnings.catch_warnings(action="error"):
        page_module.as_svg(axes.figure)


def test_shares_are_stacked_to_one_with_a_gap_where_no_step_is():
    shares = dict(zip(MAX_BINS, (0.5, 0.2, 0.1, 0.1, 0.05, 0.05), strict=True))
    axes = drawn(
        "mismatch_where",
        lambda step: {f"mismatch/response_abs_prob_max_share/{b}": s for b, s in shares.items()},
        [1, 2, 5],
    )
    (axes,) = axes.values()
    bars = axes.patches[-1].get_path().to_polygons()
    assert sorted((bar[:, 0].min(), bar[:, 0].max()) for bar in bars) == [(0.5, 2.5), (4.5, 5.5)]
    assert max(bar[:, 1].max() for bar in bars) == pytest.approx(1)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((1e-4, 1e-1), "log"),
        ((1e-4, 2e-4), "linear"),
        ((-1e-4, 1e-3), "linear"),
        ((-1e-3, 50.0), "symlog"),
        ((0.5, 0.5), "linear"),
    ],
)
def test_the_scale_follows_the_values(values, scale):
    axes = drawn("divergence", lambda step: {"mismatch/chi2_token": values[step]}, [0, 1])["Chi-squared"]
    assert axes.get_yscale() == scale


@pytest.mark.parametrize(("ess", "has_level"), [((0.9, 0.2), True), ((0.99, 0.95), False)])
def test_an_alarm_level_is_drawn_where_the_data_come_near_it(ess, has_level):
    axes = drawn("weights", lambda step: {"mismatch/ess": ess[step]}, [0, 1])["Effective sample size"]
    assert ("alarm level 0.3 (before the bound)" in axes.get_legend_handles_labels()[1]) == has_level


@pytest.mark.parametrize(
    "values", [(1e-7, 3e-7), (0.99999997, 0.99999999), (1e-13, 5e-13), (12345.0, 12346.0), (1.0, 1.0)]
)
def test_ticks_are_in_full_and_differ(values):
    axes = drawn("critic", lambda step: {"critic/explained_variance": values[step]}, [0, 1])[
        "Explained variance"
    ]
    axes.figure.draw_without_rendering()
    labels = [label.get_text().replace("\N{MINUS SIGN}", "-") for label in axes.get_yticklabels()]
    assert len(set(labels)) == len(labels) and [float(label) for label in labels] == pytest.approx(
        list(axes.get_yticks()), rel=1e-9
    )
    assert (
        axes.get_ylim()[0] < min(values) <= max(values) < axes.get_ylim()[1]
        and axes.yaxis.get_offset_text().get_text() == ""
    )


def test_legends_stand_off_the_data():
    for picture in PICTURES:
        recorded = make_recorded(
            **{
                name: {s: step_metrics(s)[name] for s in range(1, 30)}
                for name in step_metrics(1)
                if not name.startswith("eval/")
            }
        )
        figure = draw(picture, recorded, make_config())
        figure.draw_without_rendering()
        for axes in figure.axes:
            if axes.get_legend() is not None:
                legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
                assert legend.y0 >= inside.y1 - 1 or legend.x0 >= inside.x1 - 1, picture.name


@pytest.mark.parametrize(
    "label", ["$", "a $ or $$ b", "$a_{b$", r"\$x\$", "_format", "__", "$_", "_a^{$", "\u0394p ≤ 1"]
)
def test_labels_are_shown_letter_by_letter(label):
    """Names of rewards, which may be any text, are labels."""
    lines = drawn(
        "reward_parts", lambda step: {f"reward/part/{label}": 0.5 + step, "reward/part/z": 0.5}, range(1, 5)
    )
    figure, (stack,) = new_figure(1, "")
    draw_stack(stack, [1, 2], {label: [1.0, 2.0], "z": [1.0, 1.0]}, COLORS[:2], title="")
    draw_legend(figure, [label, "z"])
    (axes,) = lines.values()
    for legend in (axes.get_legend(), stack.get_legend(), *figure.legends):
        texts = legend.get_texts()
        assert sorted(text._preprocess_math(text.get_text())[0].lstrip("\u200b") for text in texts) == sorted(
            [label, "z"]
        )
        assert not any(text._preprocess_math(text.get_text())[1] for text in texts), "nothing is a formula"
    for each in (axes.figure, figure):
        with warnings.catch_warnings(action="error"):  # of a letter that the font lacks
            each.draw_without_rendering()


@pytest.mark.parametrize("runs", [(), [f"run {number}" for number in range(20)]])
@pytest.mark.parametrize("steps", [range(1, 60, 2), [*range(1, 40), 50, 52]], ids=["all", "some"])
def test_a_value_without_a_neighbour_is_a_point(steps, runs):
    """No line goes to it, as lines break where steps are missing."""
    _, (axes,) = new_figure(1, "")
    series, label = Series([*steps], [float(step) for step in steps]), runs[0] if runs else "a"
    draw_lines(
        axes, Lines(title="", metrics={"reward/mean": "a"}), [(label, series)], make_config(), runs=runs
    )
    lonely = {step for step in steps if not {step - 1, step + 1} & {*steps}}
    assert lonely and len(axes.lines) == (1 if runs else 2)
    for line in axes.lines:
        assert line.get_marker() == "o"
        assert {line.get_xdata()[place] for place in line.get_markevery()} == lonely
        assert not any(math.isnan(line.get_ydata()[place]) for place in line.get_markevery())


def test_a_report_that_fails_is_told_in_a_line_and_fails_no_run(tmp_path, monkeypatch):
    told = []
    tracker = SimpleNamespace(warn_once=lambda about, text: told.append(text))
    folder = RunFolder(make_run(tmp_path / "run", [1, 2], metrics=few_metrics))
    assert written_report(folder, make_config(), tracker) == [folder.path / "report.html", folder.figures]
    monkeypatch.setattr(page_module, "shown_samples", lambda *_: 1 // 0)
    assert told == [] and written_report(folder, make_config(), tracker) == []
    (text,) = told
    assert "(ZeroDivisionError: " in text and "\n" not in text
    assert f"the run is complete, and `tandem report {folder.path}` makes the report again" in text


@pytest.mark.parametrize("has_figures", [True, False])
def test_a_report_that_finds_no_space_names_the_file_and_leaves_the_one_before(
    tmp_path, monkeypatch, has_figures
):
    page = write_report(make_run(tmp_path / "run", [1, 2], metrics=few_metrics))
    figures = page.parent / "figures"
    before = {file: file.read_bytes() for file in (page, *figures.iterdir())}
    if not has_figures:
        monkeypatch.setattr(page_module, "_draw_all", lambda run: iter(()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may be larger, as if the disk were full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as raised:
            write_report(page.parent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(raised.value.filename).parent == (figures if has_figures else page.parent)
    assert {file: file.read_bytes() for file in before} == before


def test_every_alarm_level_and_line_of_a_panel_is_in_the_config():
    panels = [panel for picture in PICTURES for panel in picture.panels if isinstance(panel, Lines)]
    assert {panel.alarm for panel in panels} - {None} <= AlarmsConfig.model_fields.keys()
    for field in {panel.line for panel in panels if panel.line is not None}:
        assert attrgetter(field)(make_config()) > 0


def test_an_alarm_level_stands_for_all_lines_of_its_panel_or_names_the_one_it_judges():
    judged = {rule.name: rule.metrics for rule in alarms._RULES}
    panels = [panel for picture in PICTURES for panel in picture.panels if isinstance(panel, Lines)]
    for panel in (panel for panel in panels if panel.alarm is not None):
        # The line of a star that is named is that of the rule's metric: rejected/*/tokens and rejected/total/tokens.
        lines = {name.replace("*", panel.alarm_of or "*"): label for name, label in panel.metrics.items()}
        named = [
            name for name, label in lines.items() if panel.alarm_of in (None, label, name.split("/")[-2])
        ]
        assert named and {*named} <= {*judged[panel.alarm]}, panel.title


# ---- alarms


def test_alarm_histories_by_hand():
    rows = [
        {"step": 0, "eval/accuracy": 0.1, "eval/failed_fraction": 0.5},  # only evaluates
        {"step": 1, "mismatch/ess": 0.29, "mismatch/k1": -0.3, "mismatch/k3": 0.01},
        {
            "step": 2,
            "mismatch/ess": 0.9,
            "mismatch/k1": 0.2,
            "policy/first_ratio_max": 1.1,
            "policy/first_ratio_min": 1.0,
        },
        {
            "step": 4,
            "mismatch/ess": 0.1,
            "mismatch/k1": 0.15,
            "policy/first_ratio_max": 1.0,
            "policy/first_ratio_min": 0.8,
        },
        {"step": 5, "mismatch/ess": 0.3, "mismatch/k1": 0.0, "mismatch/chi2_token": None},
    ]
    found = {h.name: (h.steps, h.worst_step) for h in alarm_histories(rows, AlarmsConfig())}
    assert found == {
        "kl_max": ([1, 2, 4], 1), "ess_min": ([1, 4], 4), "first_ratio_tolerance": ([2, 4], 4), "chi2_token_max": ([5], 5),
        "reward_failed_max": ([0], 0),
    }  # fmt: skip
    assert alarm_histories(rows, AlarmsConfig())[0].name == "kl_max"
    assert {h.name for h in alarm_histories(rows, AlarmsConfig(kl_max=None, ess_min=0.2))} == set(found) - {
        "kl_max"
    }


def test_a_value_that_is_not_finite_is_the_worst():
    rows = [
        {"step": s, "mismatch/weight_mean": value} for s, value in ((1, 9.0), (2, None), (3, 1e30), (4, 1.0))
    ]
    histories = {h.name: h for h in alarm_histories(rows, AlarmsConfig())}
    assert histories["weight_mean_max"].steps == [1, 2, 3] and histories["weight_mean_max"].worst_step == 2
    assert histories["weight_mean_min"].steps == [2]


def test_the_worst_spread_of_advantages_is_the_least():
    rows = [{"step": s, "advantage/std": value} for s, value in ((1, 9e-7), (2, 0.0), (3, 5e-7), (4, 0.5))]
    (history,) = alarm_histories(rows, AlarmsConfig())
    assert (history.name, history.steps, history.worst_step) == ("advantage_std_min", [1, 2, 3], 2)


def test_the_page_tells_alarms_in_full(tmp_path):
    def metrics(step):
        return {
            "mismatch/ess": 0.2 - step / 1000 if step > 30 else 0.9,
            "mismatch/k3": None if step == 7 else 1e-6,
        }

    text = Page(
        write_report(
            make_run(tmp_path / "run", range(41), make_config(alarms={"rejected_max": None}), metrics=metrics)
        )
    ).text
    ess, k3 = (
        text.index("ess_min : 10 of 40 steps (25%), first at step 31; worst 0.16 at step 40."),
        text.index("kl_max : 1 of 40 steps"),
    )
    assert ess < k3
    assert "(2%), first at step 7; worst not finite at step 7." in text
    assert "mismatch/ess is 0.16 (alarms.ess_min: 0.3): before the bound, few samples carry" in text
    assert "Usual cause: heavy-tailed ratios" in text and "Try: a lower level of weights" in text
    assert "Turned off: rejected_max." in text and "No alarms" not in text


def test_a_run_without_alarms_says_so(tmp_path):
    text = Page(write_report(make_run(tmp_path / "run", range(5), metrics=few_metrics))).text
    assert "No alarms: no metric left its level in the 4 recorded steps." in text and "Turned off" not in text


# ---- the rest of the page


@pytest.mark.parametrize(
    ("correction", "written"),
    [
        ({}, "decoupled_token_is a weight per token, truncated at 2"),
        ({"weight": {"level": "none"}}, "disabled metrics only"),
        (
            {"weight": {"level": "token", "upper": 3.0}, "veto": 0.001},
            "{mode: decoupled, loss: objective, weight: {level: token, bound: truncate, upper: 3.0, normalise: false}, veto: 0.001, "
            "denominator: kept}",
        ),
    ],
)
def test_the_head_says_what_is_corrected_and_trained(tmp_path, correction, written):
    config = make_config(correction=correction, objective={"type": "gspo"}, advantage={"type": "rloo"})
    text = Page(write_report(make_run(tmp_path / "run", [1], config, metrics=few_metrics))).text
    head = text[: text.index("Accuracy before")]
    assert f"correction {written}" in head
    assert "objective gspo {clip_low: 0.0003, clip_high: 0.0004}" in head and "advantage rloo" in head


def test_a_rollout_of_rounded_weights_is_called_weight_only(tmp_path):
    config = make_config(rollout={"precision": "int8"})
    text = Page(write_report(make_run(tmp_path / "run", [1], config, metrics=few_metrics))).text
    head = text[: text.index("Accuracy before")]
    assert "rollout precision int8 weight-only: the learner rounds the layers' matrices to INT8" in head


def test_a_policy_gradient_in_the_place_of_the_objective_is_named(tmp_path):
    config = make_config(
        correction={"mode": "bypass", "loss": "policy_gradient", "weight": {"level": "sequence"}}
    )
    text = Page(write_report(make_run(tmp_path / "run", [1], config, metrics=few_metrics))).text
    assert "correction pg_is" in text and "objective policy_gradient" in text


def test_other_is_what_the_parts_leave_of_the_step_which_the_evaluation_comes_after(tmp_path):
    def metrics(step: int) -> dict[str, float]:
        seconds = {
            "sampling": 4.0,
            "logprobs": 1.0,
            "update": 2.0,
            "sync": 1.0,
            "evaluation": 0.0 if step % 2 else 5.0,
            "step": 10.0,
        }
        return {f"time/{part}": value for part, value in seconds.items()}

    page = Page(write_report(make_run(tmp_path / "run", [1, 2], metrics=metrics)))
    assert (
        "sampling 8.0 32% logprobs 2.0 8% update 4.0 16% sync 2.0 8% evaluation 5.0 20% other 4.0 16%"
        in page.text
    )


def test_an_older_figure_that_is_no_longer_drawn_goes(tmp_path):
    folder = make_run(tmp_path / "run", range(3), metrics=some_metrics)
    write_report(folder)
    assert {p.stem for p in (folder / "figures").iterdir()} > {"reward"}
    make_run(folder, range(3), metrics=lambda step: {"reward/mean": 0.5 + step})
    write_report(folder)
    assert {p.stem for p in (folder / "figures").iterdir()} == {"reward"}


def test_later_value_of_a_step_counts(tmp_path):
    folder = make_run(tmp_path / "run", [0, 1], metrics=lambda step: {"eval/accuracy": 0.25 + step})
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 1, "elapsed_s": 7.0, **evaluation(0.75, count=400)}) + "\n")
    assert "Accuracy so far 75.0% ± 2.2%" in Page(write_report(folder)).text


def test_unreadable_summary_is_noted(tmp_path):
    folder = make_run(tmp_path / "run", [1], metrics=few_metrics)
    (folder / "summary.json").write_text("[", encoding="utf-8")
    assert "summary.json is not readable" in Page(write_report(folder)).text


def test_text_is_escaped(tmp_path):
    config = make_config(tracking={"uri": "http://tracker/x", "experiment": "<script>alert(1)</script>"})
    path = write_report(make_run(tmp_path / "run", [1], config=config, metrics=few_metrics))
    source = path.read_text(encoding="utf-8")
    assert "<script>" not in source
    assert "&lt;script&gt;" in source and "tracker/x" in source


def test_changed_settings_by_hand():
    config = make_config(
        task={"type": "countdown", "num_numbers": 5},
        learner={"optimizer": {"lr": 0.001}},
        correction={"weight": {"level": "none"}},
    )
    assert changed_settings(config) == [
        ("steps", "40", "100"),
        ("model.path", "model", "-"),
        ("task.type", "countdown", "-"),
        ("task.num_numbers", "5", "3"),
        ("learner.optimizer.lr", "0.001", "1e-06"),
        ("correction.weight.level", "none", "token"),
    ]


def test_changed_settings_of_a_task_with_defaults_from_a_factory():
    task = {"type": "jsonl", "train_path": "t.jsonl", "heldout_path": "h.jsonl"}
    rows = {
        ("task.type", "jsonl", "-"),
        ("task.train_path", "t.jsonl", "-"),
        ("task.heldout_path", "h.jsonl", "null"),
    }

    def changed_of_task(**further):
        changed = changed_settings(make_config(task=task | further))
        return {row for row in changed if row[0].startswith("task.")}

    assert changed_of_task() == rows
    with_sets = changed_of_task(heldout_sets={"hard": "x.jsonl"})
    assert with_sets == rows | {("task.heldout_sets.hard", "x.jsonl", "-")}


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
    (folder / "config.yaml").write_text(
        "model: {path: m}\ntask: {type: countdown}\nstepz: 3\n", encoding="utf-8"
    )
    with pytest.raises(ValueError, match=r"config.yaml:3\n  field: stepz"):
        write_report(folder)


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.floats(0, 1e3), st.floats(0, 1e300), st.just(math.nan)), min_size=1, max_size=40),
    st.sampled_from([1, 3, 5, 7, 51]),
    st.sampled_from([1, -1]),
)
def test_smooth_is_the_mean_of_the_neighbours(values, width, sign):
    """Also of small values after large ones. All of one sign: the order of a sum matters to its bits alone."""
    values, half = [sign * value for value in values], width // 2
    for index, got in enumerate(smooth(values, width)):
        near = [values[i] for i in range(len(values)) if abs(i - index) <= half and not math.isnan(values[i])]
        assert (
            math.isnan(got)
            if math.isnan(values[index])
            else got == pytest.approx(sum(near) / len(near), rel=1e-9, abs=0)
        )


class Counted(float):
    """A float that counts its additions."""

    additions = 0

    def __add__(self, other):
        Counted.additions += 1
        return Counted(float(self) + float(other))

    __radd__ = __add__


def test_smoothing_adds_as_often_for_each_step_of_a_long_run(monkeypatch):
    monkeypatch.setattr(Counted, "additions", 0)
    smooth([Counted(1.0)] * 3000, 201)
    assert 0 < Counted.additions <= 3 * 3200


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(math.nan)), min_size=1, max_size=40),
    st.integers(100, 400),
)
def test_a_long_line_keeps_its_ends_extremes_and_long_gaps(values, times):
    values = [value for value in values for _ in range(times)]
    steps = [*range(7, 7 + len(values))]
    kept_steps, kept = thinned(steps, values)
    assert len(kept) <= MOST_POINTS + 2 and (kept_steps[0], kept_steps[-1]) == (steps[0], steps[-1])
    whole = dict(zip(steps, values, strict=True))
    assert kept_steps == sorted({*kept_steps}) and all(
        value is whole[step] for step, value in zip(kept_steps, kept, strict=True)
    )
    finite, left = ([value for value in each if not math.isnan(value)] for each in (values, kept))
    assert (min(left), max(left)) == (min(finite), max(finite)) if finite else not left
    assert [math.isnan(v) for v, _ in groupby(values, math.isnan)] == [
        math.isnan(v) for v, _ in groupby(kept, math.isnan)
    ]


def test_a_panel_of_a_long_run_is_no_larger_than_that_of_a_shorter_one():
    def sizes(count: int) -> list[int]:
        steps = [*range(1, count + 1)]
        values = [1.0 + math.sin(step) for step in steps]
        figures, (lines, points, stack) = zip(
            *((f, a[0]) for f, a in (new_figure(1, "") for _ in range(3))), strict=True
        )
        for axes, sparse in ((lines, False), (points, True)):
            panel = Lines(title="", metrics={"reward/mean": "a"}, sparse=sparse)
            draw_lines(axes, panel, [("a", Series(steps, values))], make_config())
        draw_stack(stack, steps, {"a": values, "b": values}, COLORS[:2], title="")
        return [len(page_module.as_svg(figure)) for figure in figures]

    for long, short in zip(sizes(24_000), sizes(8000), strict=True):
        assert long < 1.5 * short


def test_a_bar_of_a_long_stack_is_the_mean_of_its_steps_and_says_so():
    _, (axes,) = new_figure(1, "")
    steps = [*range(1, 2 * MOST_BARS - 99), *range(2 * MOST_BARS - 49, 2 * MOST_BARS + 1)]
    values = [float(step % 2) for step in steps]
    draw_stack(axes, steps, {"a": values, "b": [1 - value for value in values]}, COLORS[:2], title="")
    lower, upper = (each.get_path().to_polygons() for each in axes.patches)
    assert axes.get_xlabel() == "step (each bar: mean of 2)"
    spans = sorted((edges[:, 0].min(), edges[:, 0].max()) for edges in lower)
    end = 2 * MOST_BARS + 0.5
    assert spans == [(0.5, end - 100), (end - 50, end)], "a gap where steps are missing"
    assert {y for edges in lower for y in edges[:, 1]} == {0.0, 0.5}
    assert {y for edges in upper for y in edges[:, 1]} == {0.5, 1.0}


def test_importing_the_report_loads_neither_matplotlib_nor_torch():
    code = "import sys, trainer.report; assert not {'matplotlib', 'torch', 'mlflow'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_runs_are_compared_line_by_line_and_setting_by_setting(tmp_path):
    one = make_config(name="one", rollout={"precision": "int4"})
    two = make_config(name="two", learner={"minibatches": 4})
    folders = [
        make_run(tmp_path / c.name, range(1, 5), c, metrics=m)
        for c, m in ((one, some_metrics), (two, few_metrics))
    ]
    write_comparison(folders, tmp_path / "page.html")
    text = Page(tmp_path / "page.html").text
    table = text[text.index("Settings in which the compared runs differ") : text.index("Curves")]
    assert "field one two" in table and "rollout.precision int4 null" in table
    assert "learner.minibatches 1 4" in table and "launch.runs_dir" not in table


def test_differing_settings_and_labels_by_hand():
    same = make_config(name="same", steps=3)
    other = make_config(name="same", steps=4, launch={"runs_dir": "elsewhere"})
    assert comparison.differing_settings([same, other]) == [("steps", ["3", "4"])]
    assert comparison.labels_of([("a-1", same), ("b-2", other)]) == ["a-1", "b-2"]
    assert comparison.labels_of([("a-1", same), ("b-2", make_config(name="b"))]) == ["same", "b"]


def test_a_metric_that_is_rounding_in_every_run_is_not_compared():
    flat = Recorded(steps=[1, 2], series={"mismatch/k3": Series([1, 2], [1e-9, 2e-9])})
    high = Recorded(steps=[1, 2], series={"mismatch/k3": Series([1, 2], [1e-9, 2e-2])})
    assert not list(comparison.draw({"a": flat, "b": flat}, make_config()))
    (panel,) = comparison.draw({"a": flat, "b": high}, make_config())
    legend = panel.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    assert legend.get_title().get_text() == "KL of the two engines, k3"


def test_the_table_of_results_by_hand():
    series = {
        "eval/accuracy": Series([0, 2, 4], [0.5, 0.75, 0.75]),
        "time/step": Series([1, 2, 3, 4], [9.0, 1.0, 2.0, 3.0]),
        "mismatch/abs_prob_max": Series([1, 2, 3, 4], [0.5, 0.1, 0.1, 0.1]),
        "reward/mean": Series([*range(1, 13)], [float(n) for n in range(1, 13)]),
    }
    full, empty = Recorded(steps=[0, 1, 2, 3, 4], series=series), Recorded(steps=[0], series={})
    config = make_config()
    titles, *rows = comparison.results_table({"a": (full, config), "b": (empty, config)})
    assert titles == [
        "run", "steps", "held out, last", "held out, best", "s a step", "reward", "k3", "ESS", "|Δp| max",
    ]  # fmt: skip
    assert rows[0] == ["a", "4 of 40", "75.0% at 4", "75.0% at 2", "2.5", "7.500", "-", "-", "5.0e-01"]
    assert rows[1] == ["b", "0 of 40", *"-------"]
    selecting = Recorded(
        steps=full.steps, series=series | {"reward/before_selection": Series([1, 2], [0.25, 0.5])}
    )
    assert comparison.results_table({"a": (selecting, config)})[1][5] == "0.375"
    failing = Recorded(
        steps=full.steps, series=series | {"eval/failed_fraction": Series([0, 2, 4], [0.0, 0.06, 0.05])}
    )
    assert comparison.results_table({"a": (failing, config)})[1][3] == "75.0% at 4"
    (_, first), *_ = comparison._lines_of(comparison.PANELS[0], {"a": selecting, "b": full})
    assert comparison.PANELS[0].title == "Reward, as sampled" and first.values == [0.25, 0.5]


def test_the_reward_before_selection_is_a_line_and_its_absence_no_note(tmp_path):
    def metrics(step):
        return {"reward/mean": 0.2 + step / 100, "reward/before_selection": 0.1 + step / 100}

    labels = [text.get_text() for text in drawn("reward", metrics, [1, 2])["Reward"].get_legend().get_texts()]
    assert labels == ["trained on", "before selection"]
    text = Page(write_report(make_run(tmp_path / "run", [1, 2], metrics=few_metrics))).text
    assert "Not recorded, so not drawn: reward/importance_weighted, eval/accuracy" in text
    assert "clip_fraction" not in text  # which only objectives that clip record


def test_settings_go_down_or_runs_where_these_are_more():
    configs = [make_config(seed=seed, steps=steps) for seed, steps in ((0, 1), (1, 2), (2, 3))]
    assert comparison.settings_table(["a", "b"], configs[:2]) == [
        ["field", "a", "b"], ["seed", "0", "1"], ["steps", "1", "2"],
    ]  # fmt: skip
    assert comparison.settings_table(["a", "b", "c"], configs) == [
        ["run", "seed", "steps"], ["a", "0", "1"], ["b", "1", "2"], ["c", "2", "3"],
    ]  # fmt: skip


@pytest.mark.parametrize("count", [15, 40])
def test_many_runs_share_one_legend_and_keep_their_style_in_every_panel(count):
    def recorded(number: int) -> Recorded:
        reward = {"reward/mean": Series([1, 2], [0.0, float(number + 1)])}
        entropy = {"policy/entropy": Series([1, 2], [1.0, float(number + 1)])}
        return Recorded(steps=[1, 2], series=reward if number == 0 else reward | entropy)

    runs = {f"run {number}": recorded(number) for number in range(count)}
    legend, *panels = comparison.draw(runs, make_config())
    styles = []
    for panel in panels:
        (axes,) = panel.axes
        assert axes.get_legend() is None
        styles.append({line.get_label(): (line.get_color(), line.get_linestyle()) for line in axes.lines})
    assert [len(found) for found in styles] == [count, count - 1]
    assert all(styles[0][label] == style for label, style in styles[1].items())
    dashes = [line.get_linestyle() + str(line._dash_pattern) for line in panels[0].axes[0].lines]
    colors = [str(line.get_color()) for line in panels[0].axes[0].lines]
    assert len({*zip(colors, dashes, strict=True)}) == count, "no two runs look alike"
    (found,) = legend.legends
    assert [text.get_text() for text in found.get_texts()] == [*runs]
    legend.draw_without_rendering()
    box, room = found.get_window_extent(), legend.bbox
    assert box.x0 >= 0 and box.x1 <= room.width and box.y0 >= 0 and box.y1 <= room.height
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the command would print it
        page_module.as_svg(legend)
