"""The result of a study of mismatch: turns the files of its parts into mismatch.json, figures, mismatch.md and
the printed table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import RunConfig
from configs.schema.layout import LayoutConfig
from launch.processes.run_folder import error_text, write_json
from launch.studies.mismatch_plan import SHORT_PER_PROMPT, Part, Plan
from launch.tables import print_table
from trainer.file_system import read_file

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.studies.layout_statistics import Sampled

WIDTH = 160
"""Width of the tables if the output is not a terminal."""


def evaluate(
    plan: Plan, config: RunConfig, out: Path, sampled: Sequence[Part], skipped: Sequence[str]
) -> dict[str, Any]:
    """The content of mismatch.json, from the files of the parts."""
    from trainer.studies.layout_statistics import compare_layouts, read_samples, read_tensors
    from trainer.studies.layout_text import findings

    learners, scored = plan.of("learner"), plan.of("learner", "why")
    scores = {part.text: read_tensors(part.folder(out).path / "scores.safetensors") for part in scored}
    layouts = {part.text: part.config.layout for part in scored}
    rows: dict[str, list] = {"rollout": [], "mode": []}
    comparisons = []
    for part in sampled:
        sets = {length: read_samples(part.samples(out, length)) for length in ("long", "short")}
        for learner in learners:
            # Both sides compute with the same split of every matrix.
            split, tp = learner.config.layout, part.config.rollout.tp
            aligned = split.tp == tp and not split.sp and split.pp == 1
            pair = {"learner": learner.text, "rollout": part.text, "aligned": aligned}
            statistics = _pair_statistics(sets, scores[learner.text], part, plan.request.threshold)
            rows[part.kind].append(pair | statistics)
        if part.kind == "rollout":
            logprobs = {learner.text: scores[learner.text][f"{part.text}/long"] for learner in learners}
            compared = compare_layouts(part.config.rollout.tp, sets["long"], logprobs, layouts)
            comparisons += [{"rollout": part.text, **row} for row in compared]
    causes = None
    if plan.request.why:
        causes, left_out = _causes(plan, out, sampled[0], scores, layouts)
        skipped = [*skipped, *left_out]
    result = {
        "setting": _setting(plan, config),
        "threshold": plan.request.threshold,
        "pairs": rows["rollout"],
        "server_modes": rows["mode"],
        "comparisons": comparisons,
        "causes": causes,
        "skipped": list(skipped),
    }
    return result | {"findings": findings(result)}


def _pair_statistics(
    sets: Mapping[str, "Sampled"], scores: Mapping[str, "Tensor"], part: Part, threshold: float
) -> dict[str, Any]:
    from rollout.sampling.fixed_samples import shortened
    from trainer.studies.layout_statistics import equal_tokens, pair_statistics, probability_gaps

    long, short = sets["long"], sets["short"]
    by_learner = {length: scores[f"{part.text}/{length}"] for length in sets}
    gaps = {length: probability_gaps(sets[length].logprobs_N, by_learner[length]) for length in sets}
    lengths, first = long.response_lengths_R, shortened(part.config, SHORT_PER_PROMPT)
    statistics = pair_statistics(long.logprobs_N, by_learner["long"], lengths, threshold=threshold)
    return statistics | {"equal_tokens": equal_tokens(long, gaps["long"], short, gaps["short"], first=first)}


def _causes(
    plan: Plan,
    out: Path,
    base: Part,
    scores: Mapping[str, Mapping[str, "Tensor"]],
    layouts: Mapping[str, LayoutConfig],
) -> tuple[dict[str, Any], list[str]]:
    from trainer.studies import layout_statistics as statistics
    from trainer.studies.layout_text import SWITCH_TITLES

    first = next(part for part in plan.of("learner") if part.text == plan.request.learners[0])
    sampled, folder = statistics.read_samples(base.samples(out, "long")), first.folder(out)
    lengths, key = sampled.response_lengths_R, f"{base.text}/long"
    base_scores = {text: tensors[key] for text, tensors in scores.items()}
    baseline, dtype = base_scores[first.text], first.config.model.dtype
    chooses_itself = first.config.learner.routing != "rollout"
    words = {
        "dtype": dtype,
        "other": "float32" if dtype != "float32" else "bfloat16",
        "routing": "the server's experts" if chooses_itself else "the learner's own choice of experts",
    }

    rows, left_out, routing = [], [], None
    switches = folder.path / "switches.safetensors"
    for name, switched in statistics.read_tensors(switches).items() if switches.exists() else ():
        title = SWITCH_TITLES[name].format(**words)
        row = statistics.compare(sampled.logprobs_N, baseline, switched, lengths)
        if name == "routing":
            own, replayed = (baseline, switched) if chooses_itself else (switched, baseline)
            routing = statistics.share_of_gap(sampled.logprobs_N, own, replayed, lengths)
        rows.append({"cause": title, "side": "learner", **row})
    for row in statistics.compare_layouts(first.config.layout.tp, sampled, base_scores, layouts):
        title = f"{row['about'].upper()}: {row['second']} instead of {row['first']}"
        rows.append({"cause": title, "side": "learner", **row})
    if switches.exists():
        reasons = read_file(folder.path / "left_out.json", {}, left_out) or {}
        left_out += [f"cause {name}: {reason}" for name, reason in reasons.items()]
    if base.config.rollout.temperature == 1.0:
        server_rows, failed = _server_causes(plan, out, base, sampled, baseline)
        rows, left_out = rows + server_rows, left_out + failed
    else:
        error = "causes on the server: SGLang gives prefill log-probs only at temperature 1"
        left_out.append(f"{error}; use rollout.temperature=1")
    ranked = statistics.rank_causes(rows)
    return {"learner": first.text, "rollout": base.text, "ranked": ranked, "routing": routing}, left_out


def _server_causes(
    plan: Plan, out: Path, base: Part, sampled: "Sampled", learner_N: "Tensor"
) -> tuple[list[dict[str, Any]], list[str]]:
    """(causes from the servers' scores of the same tokens, causes that are left out with their reasons). Distances are
    to the learner's log-probs."""
    from trainer.studies.layout_statistics import compare, read_tensors

    lengths, servers = sampled.response_lengths_R, plan.of("rollout", "dtype")
    files = {part.text: part.folder(out).path / "prefill.safetensors" for part in servers}
    left_out = [
        f"prefill by rollout {part.text}: {error_text(part.folder(out).path / 'prefill_failed.txt')}"
        for part in servers
        if not files[part.text].exists()
    ]
    if not files[base.text].exists():
        return [], left_out
    own = read_tensors(files[base.text])
    rows = [
        ("prefill instead of decode, same server", sampled.logprobs_N, own["prefill"]),
        ("noise level: prefilled twice, nothing switched", own["prefill"], own["repeat"]),
    ]
    for text, file in files.items():
        if text != base.text and file.exists():
            title = f"prefill by {text} instead of {base.text}"
            rows.append((title, own["prefill"], read_tensors(file)["prefill"]))
    comparisons = [(name, compare(learner_N, first_N, second_N, lengths)) for name, first_N, second_N in rows]
    return [{"cause": name, "side": "server", **row} for name, row in comparisons], left_out


def _setting(plan: Plan, config: RunConfig) -> dict[str, Any]:
    import torch

    cuda, cpu = torch.cuda.is_available(), "CPU (gloo; SGLang's torch_native attention)"
    device = torch.cuda.get_device_name(0) if cuda else cpu
    exact = cuda or config.model.dtype == "float32"
    attention = "" if exact else ", its core attention in float32 on CPU"
    return {
        "model": config.model.path.name,
        "device": device,
        "learner dtype": f"{config.model.dtype}{attention}",
        "rollout dtype": config.rollout.dtype,
        "temperature": config.rollout.temperature,
        "prompts": plan.request.prompts,
        "max_new_tokens": config.rollout.max_new_tokens,
        "short responses to each prompt": SHORT_PER_PROMPT,
    }


def write(result: Mapping[str, Any], out: Path) -> None:
    """Write JSON, figures and Markdown, and print the tables and findings."""
    from trainer.studies.layout_pictures import draw_study
    from trainer.studies.layout_text import markdown

    write_json(out / "mismatch.json", dict(result))
    figures = [figure.name for figure in draw_study(result, out)]
    (out / "mismatch.md").write_text(markdown(result, figures))
    _print_result(result)
    print(f"\n{out / 'mismatch.md'}, mismatch.json, {', '.join(figures)}", flush=True)


def _print_result(result: Mapping[str, Any]) -> None:
    from trainer.studies.layout_text import CAUSE_TITLES, cause_cells, pair_cells, pair_titles

    titles, causes = pair_titles(result["threshold"]), (result["causes"] or {}).get("ranked", ())
    tables = [
        ("Mismatch by pair of layouts", titles, [pair_cells(row) for row in result["pairs"]]),
        ("Modes of the server", titles, [pair_cells(row) for row in result["server_modes"]]),
        ("Why: one thing switched at a time", CAUSE_TITLES, [cause_cells(row) for row in causes]),
    ]
    for title, titles, rows in tables[:1] + [table for table in tables[1:] if table[2]]:
        print_table(titles, rows, width=WIDTH, title=title)
    print(*result["findings"], *(f"left out: {reason}" for reason in result["skipped"]), sep="\n")
