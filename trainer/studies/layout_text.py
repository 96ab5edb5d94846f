"""Findings of a study of mismatch, in sentences and as a Markdown page, from mismatch.json alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import counted
from trainer.studies.layout_statistics import verdict

Row = Mapping[str, Any]

ABOUT = {
    "tp": "the rollout's own TP against another TP",
    "sp": "no sequence parallelism against SP at equal TP",
    "pp": "no pipeline against a pipeline",
    "cp": "whole sequences against sequences split by context parallelism",
}
PAIR_COLUMNS = (
    "learner", "rollout", "max Δp", "mean Δp", "> 0.5", "> {threshold:g}", "k1", "k3", "outside [0.9, 1.1]", "max |d|",
)  # fmt: skip
SWITCH_TITLES = {
    "repeat": "noise level: scored twice, nothing switched",
    "packing": "packing: every sequence alone, not packed",
    "dtype": "dtype: {other} instead of {dtype}",
    "lm_head": "LM head: the other of float32 and {dtype}",
    "attention": "core attention: {dtype} instead of float32",
    "routing": "routing: {routing}",
    "temperature_in_model_dtype": "temperature: logits / T rounded to {dtype}",
    "temperature_ignored": "temperature: ignored, scored at T = 1",
    "deterministic_kernels": "deterministic kernels (torch)",
}
"""Switches of the learner; ``trainer/studies/layout_scoring.py`` implements them."""
NOTES = """\
Δp = |p_rollout - p_learner| of a sampled token. *max Δp*, *mean Δp*: mean over responses of the greatest and of the mean Δp of each.
k1, k3: estimates of KL(rollout || learner) in nats per token; d: the log-prob gap in nats; *outside*: share of tokens whose ratio of
probabilities lies outside [0.9, 1.1]. After ±: one standard error, plain (s / sqrt(n) over responses or prompts; for k1, k3 and outside
the linearised error of a ratio with responses as clusters), not bootstrapped. A difference counts as one beyond two standard errors, so
one comparison in twenty will show a difference by chance."""


def number(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g}"


def with_error(row: Row, name: str) -> str:
    error = row[f"{name}_se"]
    return number(row[name]) + ("" if error is None else f" ± {number(error, 1)}")


def pair_cells(row: Row) -> list[str]:
    return [
        row["learner"],
        row["rollout"],
        with_error(row, "max_mean"),
        with_error(row, "mean_mean"),
        f"{row['over_half_count']} ({row['over_half']:.1%})",
        f"{row['over_threshold_count']} ({row['over_threshold']:.1%})",
        with_error(row, "k1"),
        with_error(row, "k3"),
        f"{row['outside']:.2%} ({row['outside_count']})",
        number(row["logprob_gap_max"]),
    ]


def pair_titles(threshold: float) -> list[str]:
    return [title.format(threshold=threshold) for title in PAIR_COLUMNS]


# ----------------------------------------------------------------------------------------------------------------
# findings


def findings(result: Row) -> list[str]:
    """Sentences, the most important first: alignment, then length, then size."""
    sentences = []
    for about in ABOUT:
        rows = [row for row in result["comparisons"] if row["about"] == about]
        if rows:
            sentences += [_alignment(about, rows), *(f"  - {_comparison(row)}" for row in rows)]
    causes = [_cause_sentence(result["causes"]["ranked"])] if result["causes"] else []
    if result["causes"] and result["causes"].get("routing"):
        causes.append(_routing_sentence(result["causes"]["routing"]))
    return [*sentences, _length_sentence(result["pairs"]), *causes, _size_sentence(result["pairs"])]


def _alignment(about: str, rows: Sequence[Row]) -> str:
    verdicts = [verdict(row["max_change"], row["max_change_se"]) for row in rows]
    same = sum(row["bitwise"] for row in rows)
    text = (
        f"{ABOUT[about][0].upper()}{ABOUT[about][1:]}: of {counted(len(rows), 'comparison')}, the first had the smaller "
        f"max gap in {verdicts.count('higher')}, the larger in {verdicts.count('lower')}, and "
        f"{verdicts.count('undecided')} cannot be told apart"
    )
    return text + (f" ({same} of them the same to the last bit)." if same else ".")


def _comparison(row: Row) -> str:
    if row["bitwise"]:
        return f"rollout {row['rollout']}: learner {row['second']} gives the same log-probs as {row['first']}, to the last bit."
    word = {"higher": "larger", "lower": "smaller", "undecided": "no different"}[
        verdict(row["max_change"], row["max_change_se"])
    ]
    return (
        f"rollout {row['rollout']}: learner {row['second']} instead of {row['first']} changes the mean max gap by "
        f"{with_error(row, 'max_change')} ({word}), the mean gap by {with_error(row, 'mean_change')}; the two learners are "
        f"{number(row['moved_mean'])} apart on average."
    )


def _length_sentence(pairs: Sequence[Row]) -> str:
    rows = [pair["equal_tokens"] for pair in pairs]
    verdicts = [verdict(row["long_over_short"], row["long_over_short_se"]) for row in rows]
    one = rows[0]
    return (
        f"Length, at equal tokens ({one['tokens']:.1f} to a prompt, of {one['long_tokens']:.1f} in one long response and "
        f"{one['short_tokens']:.1f} in {one['short_per_prompt']:.0f} short ones): the long response had the larger max gap in "
        f"{verdicts.count('higher')} of {len(verdicts)} pairs, the smaller in {verdicts.count('lower')}, "
        f"undecided in {verdicts.count('undecided')}."
    )


def _cause_sentence(ranked: Sequence[Row]) -> str:
    moving = [
        f"{row['cause']} ({row['side']}) {number(row['moved_mean'], 2)}"
        for row in ranked
        if not row["bitwise"]
    ]
    still = [row["cause"] for row in ranked if row["bitwise"]]
    text = f"Why, by how far a switch moves p on average: {'; '.join(moving) or 'nothing moves it'}"
    return f"{text}. Moves nothing, to the last bit: {'; '.join(still) or 'none'}."


def _routing_sentence(routing: Row) -> str:
    return (
        f"Routing: with the server's experts the mean gap is {number(routing['replayed'])}, with the learner's own choice "
        f"{number(routing['own'])}: the choice of experts makes {routing['share']:.0%} of it."
    )


def _size_sentence(pairs: Sequence[Row]) -> str:
    low, high = min(pairs, key=lambda p: p["max_mean"]), max(pairs, key=lambda p: p["max_mean"])
    over = sum(p["over_half_count"] for p in pairs)
    return (
        f"Size: the mean max gap goes from {with_error(low, 'max_mean')} (learner {low['learner']}, rollout {low['rollout']}) to "
        f"{with_error(high, 'max_mean')} (learner {high['learner']}, rollout {high['rollout']}); {over} of "
        f"{sum(p['responses'] for p in pairs)} responses over all pairs had a max above 0.5."
    )


# -----------------------------------------------------------------------------------------------------------------
# the page


def markdown(result: Row, figures: Sequence[str] = ()) -> str:
    pairs = result["pairs"]
    parts = [
        f"# Mismatch of rollout and learner, by layout: {result['setting']['model']}",
        "\n".join(f"- {name}: {value}" for name, value in result["setting"].items()),
        "## What it says",
        "\n".join(line if line.startswith("  -") else f"- {line}" for line in result["findings"]),
        "## Pairs",
        _table(pair_titles(result["threshold"]), [pair_cells(row) for row in pairs]),
        NOTES,
        "## Length",
        _length_table(pairs),
    ]
    if modes := result["server_modes"]:
        table = _table(pair_titles(result["threshold"]), [pair_cells(row) for row in modes])
        parts += ["## Modes of the server", table]
    if result["causes"]:
        parts += ["## Why", *_causes(result["causes"])]
    if result["skipped"]:
        parts += ["## Left out", "\n".join(f"- {line}" for line in result["skipped"])]
    parts += [f"![{name}]({name})" for name in figures]
    return "\n\n".join(parts) + "\n"


def _length_table(pairs: Sequence[Row]) -> str:
    columns = {
        "short_max": "short",
        "short_together_max": "short together",
        "long_max": "long",
        "long_first_max": "long, first part",
        "long_over_short": "long − together",
        "short_mean": "mean, short",
        "long_mean": "mean, long",
    }
    titles = ["learner", "rollout", *columns.values()]
    rows = [
        [p["learner"], p["rollout"], *(with_error(p["equal_tokens"], name) for name in columns)]
        for p in pairs
    ]
    one = pairs[0]["equal_tokens"]
    about = (
        f"Max dp of: one short response; all {one['short_per_prompt']:.0f} short responses to a prompt together (of "
        f"{one['short_tokens']:.1f} tokens); one long response (of {one['long_tokens']:.1f}); the first {one['first']} tokens of the long "
        f"one. A maximum grows with the count of tokens. So for each prompt *short together*, *long* and the means use the first tokens of "
        f"both sides, as many as the smaller side has: {one['tokens']:.1f}. Means over {one['prompts']} prompts."
    )
    return f"{about}\n\n{_table(titles, rows)}"


CAUSE_TITLES = (
    "cause", "side", "moves p by (mean)", "(max of a response)", "(greatest)", "max gap changes by", "mean gap changes by",
)  # fmt: skip


def cause_cells(row: Row) -> list[str]:
    moved = ["0 (bitwise)"] * 3 if row["bitwise"] else [
        with_error(row, "moved_mean"), with_error(row, "moved_response_max"), number(row["moved_max"])
    ]  # fmt: skip
    return [row["cause"], row["side"], *moved, with_error(row, "max_change"), with_error(row, "mean_change")]


def _causes(causes: Row) -> list[str]:
    about = (
        f"Weights and tokens are fixed (the long responses of rollout {causes['rollout']}, learner {causes['learner']}); one thing is "
        "switched at a time. *Moves*: how far the probabilities of the tokens move; the rows are ranked by it. *Changes*: the effect on "
        "the gap between the engines. A cause may move the probabilities far without closing the gap, if other causes are as large. The "
        "noise level is the same scored twice: a move that is not larger is noise."
    )
    return [about, _table(CAUSE_TITLES, [cause_cells(row) for row in causes["ranked"]])]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [list(titles), ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)
