"""Statistics of the gap between two engines: cases by hand, a slow reference in plain loops, and what must
hold for any numbers."""

import argparse
import json
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layout_mismatch import ROOT, SAME_SP, command, publish
from configs.schema.layout import LayoutConfig
from trainer.algorithm.mismatch import mismatch_metrics
from trainer.ranks.metrics import values
from trainer.studies.layout_pictures import draw_study
from trainer.studies.layout_statistics import (
    LENGTH_EDGES,
    Sampled,
    compare,
    compare_layouts,
    equal_tokens,
    join_samples,
    mean_and_error,
    one_step_apart,
    pair_statistics,
    probability_gaps,
    rank_causes,
    ratio_and_error,
    read_samples,
    read_tensors,
    verdict,
    write_samples,
)
from trainer.studies.layout_text import findings, markdown


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


# ------------------------------------------------------------------------------------------------------------------
# by hand


def test_two_responses_by_hand():
    rollout_N, learner_N = logs(0.5, 0.9, 0.2), logs(0.5, 0.3, 0.25)  # dp: 0, 0.6 | 0.05
    found = pair_statistics(rollout_N, learner_N, torch.tensor([2, 1]), threshold=0.04)
    assert (found["responses"], found["tokens"]) == (2, 3)
    assert found["max_mean"] == pytest.approx((0.6 + 0.05) / 2)
    assert found["max_mean_se"] == pytest.approx(statistics.stdev([0.6, 0.05]) / math.sqrt(2))
    assert found["max_max"] == pytest.approx(0.6)
    assert found["mean_mean"] == pytest.approx((0.3 + 0.05) / 2)
    assert (found["over_half"], found["over_half_count"]) == (0.5, 1)
    assert (found["over_threshold"], found["over_threshold_count"]) == (1.0, 2)
    assert found["over_half_se"] == pytest.approx(math.sqrt(0.25 / 2))
    assert found["k1"] == pytest.approx((math.log(0.9 / 0.3) + math.log(0.2 / 0.25)) / 3)
    ratios = [1, 0.3 / 0.9, 0.25 / 0.2]
    assert found["k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert (found["outside"], found["outside_count"]) == (pytest.approx(2 / 3), 2)
    assert found["logprob_gap_max"] == pytest.approx(math.log(3))
    assert found["response_length"] == [2, 1]


def test_the_error_of_a_ratio_by_hand():
    # 3 / 4 tokens and 1 / 2: m = 4 / 6; residuals 3 - 4 m = 1/3, 1 - 2 m = -1/3; sqrt(2 (1/9 + 1/9)) / 6
    ratio, error = ratio_and_error(torch.tensor([3.0, 1.0]), torch.tensor([4, 2]))
    assert ratio == pytest.approx(4 / 6) and error == pytest.approx(math.sqrt(2 * 2 / 9) / 6)


def test_a_single_response_has_no_error():
    found = pair_statistics(logs(0.5), logs(0.4), torch.tensor([1]))
    assert found["max_mean"] == pytest.approx(0.1) and found["max_mean_se"] is None and found["k1_se"] is None


def test_with_as_many_tokens_in_each_response_a_ratio_has_the_error_of_a_mean():
    sums = torch.tensor([1.0, 4.0, 2.0, 7.0])
    ratio, error = ratio_and_error(sums, torch.full((4,), 5))
    assert (ratio, error) == (
        pytest.approx(sums.mean().item() / 5),
        pytest.approx(mean_and_error(sums / 5)[1]),
    )


def test_near_one_probabilities_keep_their_digits():
    gap = probability_gaps(
        torch.tensor([-1e-12], dtype=torch.float64), torch.tensor([-3e-12], dtype=torch.float64)
    )
    assert gap.item() == pytest.approx(2e-12, rel=1e-9)


def sampled(prompts: list[int], responses: list[list[float]]) -> Sampled:
    samples = [
        (which, list(range(1, len(p) + 1)), [math.log(x) for x in p])
        for which, p in zip(prompts, responses, strict=True)
    ]
    return join_samples([[7, 8]] * (max(prompts) + 1), samples)


def test_equal_tokens_by_hand():
    long = sampled([0, 1], [[0.5] * 4, [0.5] * 3])
    long_gap = torch.tensor([0.1, 0.2, 0.4, 0.0, 0.3, 0.1, 0.2], dtype=torch.float64)
    short = sampled([0, 0, 1, 1], [[0.5] * 2, [0.5] * 2, [0.5], [0.5] * 2])
    short_gap = torch.tensor([0.1, 0.0, 0.3, 0.1, 0.2, 0.05, 0.1], dtype=torch.float64)
    found = equal_tokens(long, long_gap, short, short_gap, first=2)
    counts = ("prompts", "short_per_prompt", "tokens", "long_tokens", "short_tokens")
    assert [found[name] for name in counts] == [2, 2, 3.5, 3.5, 3.5]
    assert found["long_max"] == pytest.approx((0.4 + 0.3) / 2)
    assert found["long_first_max"] == pytest.approx((0.2 + 0.3) / 2)
    assert found["short_max"] == pytest.approx(((0.1 + 0.3) / 2 + (0.2 + 0.1) / 2) / 2)
    assert found["short_together_max"] == pytest.approx((0.3 + 0.2) / 2)
    assert found["long_over_short"] == pytest.approx(0.1) and found["long_over_short_se"] == pytest.approx(
        0.0, abs=1e-12
    )
    assert found["long_mean"] == pytest.approx((0.7 / 4 + 0.6 / 3) / 2)
    assert found["short_mean"] == pytest.approx((0.5 / 4 + 0.35 / 3) / 2)


def test_unequal_counts_are_cut_to_the_smaller_of_each_prompt():
    """Prompt 0: 3 tokens against 2 + 2, of which 2 + 1 count; prompt 1: 3 against 1 + 1, of which the first
    2. Greatest gaps lie beyond."""
    long = sampled([0, 1], [[0.5] * 3, [0.5] * 3])
    long_gap = torch.tensor([0.1, 0.2, 0.3, 0.1, 0.0, 0.9], dtype=torch.float64)
    short = sampled([0, 0, 1, 1], [[0.5] * 2, [0.5] * 2, [0.5], [0.5]])
    short_gap = torch.tensor([0.1, 0.0, 0.2, 0.8, 0.3, 0.1], dtype=torch.float64)
    found = equal_tokens(long, long_gap, short, short_gap, first=3)
    assert (found["tokens"], found["long_tokens"], found["short_tokens"]) == (2.5, 3, 3)
    assert found["long_max"] == pytest.approx((0.3 + 0.1) / 2) and found[
        "short_together_max"
    ] == pytest.approx((0.2 + 0.3) / 2)
    assert found["long_over_short"] == pytest.approx((0.1 - 0.2) / 2)
    assert found["long_mean"] == pytest.approx((0.6 / 3 + 0.1 / 2) / 2) and found[
        "short_mean"
    ] == pytest.approx((0.3 / 3 + 0.4 / 2) / 2)
    # whole responses, cut by nothing
    assert found["long_first_max"] == pytest.approx((0.3 + 0.9) / 2) and found["short_max"] == pytest.approx(
        (0.1 + 0.8 + 0.3 + 0.1) / 4
    )


def test_equal_tokens_need_the_same_prompts():
    long, short = sampled([0, 1], [[0.5]] * 2), sampled([0, 0], [[0.5]] * 2)
    with pytest.raises(ValueError, match="not of the same prompts"):
        equal_tokens(long, torch.zeros(2), short, torch.zeros(2), first=1)


def test_a_comparison_by_hand():
    reference, first, second = logs(0.5, 0.5, 0.5), logs(0.6, 0.5, 0.4), logs(0.5, 0.7, 0.4)
    found = compare(reference, first, second, torch.tensor([2, 1]))
    assert found["max_change"] == pytest.approx((0.1 + 0.0) / 2)  # 0.1 -> 0.2, 0.1 -> 0.1
    assert found["mean_change"] == pytest.approx((0.05 + 0.0) / 2)
    assert found["moved_mean"] == pytest.approx((0.15 + 0.0) / 2)
    assert found["moved_max"] == pytest.approx(0.2) and found["moved_response_max"] == pytest.approx(0.1)
    assert not found["bitwise"]
    assert compare(reference, first, first.clone(), torch.tensor([2, 1]))["bitwise"]


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (0.3, 0.1, "higher"),
        (-0.3, 0.1, "lower"),
        (0.2, 0.1, "undecided"),
        (0.0, 0.0, "undecided"),
        (1, None, "undecided"),
    ],
)
def test_what_counts_as_a_difference(change, error, word):
    assert verdict(change, error) == word


@pytest.mark.parametrize(
    ("first", "second", "rollout_tp", "about"),
    [
        ({"tp": 2}, {"tp": 1}, 2, "tp"),
        ({"tp": 1}, {"tp": 2}, 2, None),  # the first is the rollout's own
        ({"tp": 2, "sp": True}, {"tp": 4, "sp": True}, 2, "tp"),
        ({"tp": 2}, {"tp": 2, "sp": True}, 1, "sp"),
        ({"tp": 2, "sp": True}, {"tp": 2}, 1, None),
        ({"tp": 1}, {"tp": 2, "sp": True}, 1, None),  # two things at once
        ({}, {"pp": 2}, 1, "pp"),
        ({}, {"pp": 2, "vpp": 2}, 1, "pp"),
        ({}, {"pp": 2, "tp": 2}, 1, None),
        ({"tp": 2}, {"tp": 2, "cp": 2}, 1, "cp"),
        ({"cp": 2}, {}, 1, None),
        ({"dp": 1}, {"dp": 2}, 1, None),
        ({"dp": 2}, {"pp": 2, "dp": 1}, 1, "pp"),  # dp does not count
    ],
)
def test_which_layouts_are_compared(first, second, rollout_tp, about):
    assert one_step_apart(LayoutConfig(**first), LayoutConfig(**second), rollout_tp) == about


def test_causes_are_ranked_by_how_far_they_move():
    rows = [
        {"cause": "a", "moved_mean": 0.1},
        {"cause": "b", "moved_mean": 0.3},
        {"cause": "c", "moved_mean": 0.0},
    ]
    assert [row["cause"] for row in rank_causes(rows)] == ["b", "a", "c"]


# ------------------------------------------------------------------------------------------------------- a
# reference in loops


def slow(rollout: list[list[float]], learner: list[list[float]]) -> dict[str, float]:
    """The same of lists of log-probs, one token at a time."""
    maxima, means, k1, k3, outside, tokens = [], [], 0.0, 0.0, 0, 0
    for r, train in zip(rollout, learner, strict=True):
        gaps = [abs(math.exp(a) - math.exp(b)) for a, b in zip(r, train, strict=True)]
        maxima.append(max(gaps))
        means.append(sum(gaps) / len(gaps))
        for a, b in zip(r, train, strict=True):
            d = b - a
            bound = min(max(d, -20.0), 20.0)
            k1, k3, outside, tokens = (
                k1 - d,
                k3 + math.exp(bound) - 1 - bound,
                outside + (not 0.9 <= math.exp(bound) <= 1.1),
                tokens + 1,
            )
    return {
        "max_mean": sum(maxima) / len(maxima),
        "mean_mean": sum(means) / len(means),
        "over_half": sum(x > 0.5 for x in maxima) / len(maxima),
        "k1": k1 / tokens,
        "k3": k3 / tokens,
        "outside": outside / tokens,
    }


logprob = st.floats(-12, 0)
responses = st.lists(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=40), min_size=1, max_size=9)


def tensors(rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = torch.tensor([pair for row in rows for pair in row], dtype=torch.float64)
    return pairs[:, 0], pairs[:, 1], torch.tensor([len(row) for row in rows])


@given(responses)
@settings(max_examples=60, deadline=None)
def test_statistics_equal_plain_loops_and_the_step_metrics(rows):
    rollout_N, learner_N, lengths_R = tensors(rows)
    found = pair_statistics(rollout_N, learner_N, lengths_R)
    wanted = slow([[a for a, _ in row] for row in rows], [[b for _, b in row] for row in rows])
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_R.cumsum(0)])
    step = values(mismatch_metrics(learner_N, rollout_N, bounds))
    names = {"max_mean": "response_abs_prob_max_mean", "mean_mean": "response_abs_prob_mean_mean", "k1": "k1", "k3": "k3",
             "over_half": "response_abs_prob_over", "outside": "ratio_outside_fraction", "max_max": "abs_prob_max"}  # fmt: skip
    for name, metric in names.items():
        assert found[name] == pytest.approx(step[f"mismatch/{metric}"], rel=1e-9, abs=1e-12), name


@given(responses)
@settings(max_examples=40, deadline=None)
def test_buckets_hold_everything_once(rows):
    rollout_N, learner_N, lengths_R = tensors(rows)
    found = pair_statistics(rollout_N, learner_N, lengths_R)
    by_length, by_position = found["by_length"], found["by_position"]
    assert sum(row["responses"] for row in by_length) == len(rows)
    assert (
        sum(row["tokens"] for row in by_length)
        == sum(row["tokens"] for row in by_position)
        == rollout_N.numel()
    )
    assert sum(row["max_mean"] * row["responses"] for row in by_length) == pytest.approx(
        found["max_mean"] * len(rows)
    )
    assert max(row["max"] for row in by_position) == found["max_max"]
    total_gap = probability_gaps(rollout_N, learner_N).sum().item()
    assert sum(row["mean"] * row["tokens"] for row in by_position) == pytest.approx(total_gap)
    # Every response covers each position up to its length, and none beyond.
    for row in by_position:
        last = row["up_to"] or 10**9
        assert row["tokens"] == sum(max(0, min(len(r), last) - row["above"]) for r in rows)


@given(responses)
@settings(max_examples=30, deadline=None)
def test_one_of_the_two_moving_by_nothing_changes_nothing(rows):
    rollout_N, learner_N, lengths_R = tensors(rows)
    found = compare(rollout_N, learner_N, learner_N, lengths_R)
    assert found["bitwise"] and found["moved_max"] == found["max_change"] == found["mean_change"] == 0
    itself = pair_statistics(rollout_N, rollout_N, lengths_R)
    assert itself["max_max"] == itself["k1"] == itself["k3"] == itself["outside"] == 0
    # From the reference itself to the learner: the change of the gap is the gap.
    away = compare(rollout_N, rollout_N, learner_N, lengths_R)
    assert away["max_change"] == pytest.approx(pair_statistics(rollout_N, learner_N, lengths_R)["max_mean"])


def test_the_error_of_a_mean_covers_the_truth_as_often_as_it_should():
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(400, 50, generator=generator, dtype=torch.float64)
    found = [mean_and_error(row) for row in draws]
    assert 0.91 < sum(abs(mean - 0.5) <= 2 * error for mean, error in found) / len(found) < 0.98


def test_the_error_of_a_ratio_knows_that_tokens_of_a_response_belong_together():
    """All tokens of a response alike: as many tokens as one likes say no more than the responses do."""
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(300):
        lengths = torch.randint(1, 30, (60,), generator=generator)
        value = torch.rand(60, generator=generator, dtype=torch.float64)
        ratio, error = ratio_and_error(value * lengths, lengths)
        inside += abs(ratio - 0.5) <= 2 * error
    assert 0.90 < inside / 300 < 0.98


# --------------------------------------------------------------------------------------------------------------
# files, report


def test_samples_come_back_as_they_were_written(tmp_path):
    one = sampled([0, 1, 1], [[0.5], [0.25, 0.5], [0.1]])
    write_samples(tmp_path / "s.safetensors", one)
    again = read_samples(tmp_path / "s.safetensors")
    assert one.experts_TLK is again.experts_TLK is None
    names = [name for name in Sampled.__slots__ if name != "experts_TLK"]
    assert all(torch.equal(getattr(one, name), getattr(again, name)) for name in names)
    assert again.sequences() == [[7, 8, 1], [7, 8, 1, 2], [7, 8, 1]]
    (tmp_path / "s.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="cannot be read as tensors"):
        read_tensors(tmp_path / "s.safetensors")


def test_a_response_without_tokens_is_refused():
    with pytest.raises(ValueError, match="response to prompt 3 has no tokens"):
        join_samples([[1]] * 4, [(0, [1], [-0.1]), (3, [], [])])
    with pytest.raises(ValueError, match="one log-prob for each"):
        join_samples([[1]], [(0, [1, 2], [-0.1])])


@pytest.fixture
def result():
    """A study of two learners and two rollouts, with numbers that are no engine's."""
    generator = torch.Generator().manual_seed(0)
    layouts = {"tp=1": LayoutConfig(), "tp=2": LayoutConfig(tp=2)}
    pairs, comparisons = [], []
    for tp in (1, 2):
        lengths = [int(n) for n in torch.randint(3, 60, (12,), generator=generator)]
        long = sampled(
            list(range(12)), [(torch.rand(n, generator=generator) * 0.9 + 0.05).tolist() for n in lengths]
        )
        short = sampled(
            [i // 2 for i in range(24)],
            [(torch.rand(5, generator=generator) * 0.9 + 0.05).tolist() for _ in range(24)],
        )
        scores = {}
        for text, layout in layouts.items():
            # Aligned: small noise, else ten times as much.
            noise = 0.01 if layout.tp == tp else 0.1
            scores[text] = (
                long.logprobs_N + noise * torch.randn(long.num_tokens, generator=generator)
            ).clamp(max=0)
            of_short = short.logprobs_N * (1 + noise)
            of_length = equal_tokens(
                long,
                probability_gaps(long.logprobs_N, scores[text]),
                short,
                probability_gaps(short.logprobs_N, of_short),
                first=5,
            )
            statistics_ = pair_statistics(
                long.logprobs_N, scores[text], long.response_lengths_R, threshold=0.1
            )
            pairs.append(
                {
                    "learner": text,
                    "rollout": f"tp={tp}",
                    "aligned": layout.tp == tp,
                    **statistics_,
                    "equal_tokens": of_length,
                }
            )
        comparisons += [{"rollout": f"tp={tp}", **row} for row in compare_layouts(tp, long, scores, layouts)]
    causes = {
        "learner": "tp=1",
        "rollout": "tp=1",
        "ranked": [{"cause": "a | b", "side": "learner", **comparisons[0]}],
    }
    made = {"setting": {"model": "none"}, "threshold": 0.1, "pairs": pairs, "server_modes": [], "comparisons": comparisons,
            "causes": causes, "skipped": ["this, because of that"]}  # fmt: skip
    return made | {"findings": findings(made)}


def test_findings_say_what_the_numbers_show(result):
    first, *details = result["findings"]
    assert first.startswith(
        "The rollout's own TP against another TP: of 2 comparisons, the first had the smaller max gap in 2"
    )
    assert "rollout tp=1: learner tp=2 instead of tp=1" in details[0] and "(larger)" in details[0]
    assert "rollout tp=2: learner tp=1 instead of tp=2" in details[1]
    assert any(line.startswith("Length, at equal tokens (") for line in result["findings"])
    (why,) = (line for line in result["findings"] if line.startswith("Why"))
    assert "a | b (learner)" in why and why.endswith("to the last bit: none.")


def test_the_result_survives_json_and_is_drawn_and_written_from_it(result, tmp_path):
    again = json.loads(json.dumps(result))
    assert again == result
    figures = draw_study(again, tmp_path)
    assert [f.name for f in figures] == ["distribution.png", "length.png", "causes.png"]
    assert all(f.read_bytes().startswith(b"\x89PNG") and f.stat().st_size > 10_000 for f in figures)
    page = markdown(again, [f.name for f in figures])
    assert page.index("## What it says") < page.index("## Pairs")  # a reader wants the findings first
    assert (
        "| tp=2 | tp=1 |" in page
        and "a \\| b" in page
        and "this, because of that" in page
        and "](length.png)" in page
    )
    # Every row of a table has the columns of its head.
    for block in page.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) <= 1


def test_the_benchmarks_page_says_how_it_was_made(result, tmp_path):
    """What was used, not what would be by default; and why SP cannot differ, where it does not."""
    given = argparse.Namespace(
        model=None,
        config=ROOT / "configs/recipes/countdown_tiny.yaml",
        learner=None,
        rollout=None,
        prompts=256,
        override=[],
        results=None,
    )
    assert command(given, 16) == "python benchmarks/layout_mismatch.py --prompts 16"
    given.results = "elsewhere"
    assert command(given, 16) == "python benchmarks/layout_mismatch.py --results elsewhere --prompts 16"
    row = {"about": "sp", "first": "tp=2", "second": "tp=2,sp", "bitwise": True}
    for number, (rows, is_said) in enumerate(
        [([row], True), ([row, row | {"bitwise": False}], False), ([], False)]
    ):
        study = tmp_path / str(number)
        study.mkdir()
        (study / "mismatch.json").write_text(json.dumps(result | {"comparisons": rows}))
        publish(study, study / "page", {"weights": "of nobody"})
        page = (study / "page.md").read_text()
        assert (f"- {SAME_SP}" in page) == is_said and "- weights: of nobody\n" in page


def test_edges_ascend():
    assert list(LENGTH_EDGES) == sorted(set(LENGTH_EDGES))
