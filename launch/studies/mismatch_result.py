"""What a study of mismatch found: from the files of its parts to mismatch.json, figures, mismatch.md and the
printed table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.schema import RunConfig
from configs.schema.layout import LayoutConfig
from launch.processes.run_folder import write_json
from launch.studies.mismatch_plan import SHORT_PER_PROMPT, Part, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.studies.layout_statistics import Sampled


def evaluate(
    plan: Plan, config: RunConfig, out: Path, sampled: Sequence[Part], skipped: Sequence[str]
) -> dict[str, Any]:
    """The content of mismatch.json, from the files of the parts."""
    from trainer.studies.layout_statistics import compare_layouts, read_samples, read_tensors
    from trainer.studies.layout_text import findings

    learners = plan.of("learner")
    scores = {
        part.text: read_tensors(part.folder(out).path / "scores.safetensors")
        for part in plan.of("learner", "why")
    }
    layouts = {part.text: part.config.layout for part in plan.of("learner", "why")}
    rows: dict[str, list] = {"rollout": [], "mode": []}
    comparisons = []
    for part in sampled:
        sets = {length: read_samples(part.samples(out, length)) for length in ("long", "short")}
        for learner in learners:
            about = {
                "learner": learner.text,
                "rollout": part.text,
                "aligned": _aligned(learner.config.layout, part.config),
            }
            rows[part.kind].append(about | _pair(sets, scores[learner.text], part, plan.request.threshold))
        if part.kind == "rollout":
            of_part = {learner.text: scores[learner.text][f"{part.text}/long"] for learner in learners}
            found = compare_layouts(part.config.rollout.tp, sets["long"], of_part, layouts)
            comparisons += [{"rollout": part.text, **row} for row in found]
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


def _aligned(learner: LayoutConfig, config: RunConfig) -> bool:
    """Whether both sides compute with the same split of every matrix."""
    return learner.tp == config.rollout.tp and not learner.sp and learner.pp == 1


def _pair(
    sets: Mapping[str, "Sampled"], scores: Mapping[str, "Tensor"], part: Part, threshold: float
) -> dict[str, Any]:
    from rollout.sampling.fixed_samples import shortened
    from trainer.studies.layout_statistics import equal_tokens, pair_statistics, probability_gaps

    long, short = sets["long"], sets["short"]
    by_learner = {length: scores[f"{part.text}/{length}"] for length in sets}
    gaps = {length: probability_gaps(sets[length].logprobs_N, by_learner[length]) for length in sets}
    found = pair_statistics(long.logprobs_N, by_learner["long"], long.response_lengths_R, threshold=threshold)
    first = shortened(part.config, SHORT_PER_PROMPT)
    return found | {"equal_tokens": equal_tokens(long, gaps["long"], short, gaps["short"], first=first)}


def _causes(
    plan: Plan,
    out: Path,
    base: Part,
    scores: Mapping[str, Mapping[str, "Tensor"]],
    layouts: Mapping[str, LayoutConfig],
) -> tuple[dict[str, Any], list[str]]:
    from trainer.studies.layout_statistics import (
        compare,
        compare_layouts,
        rank_causes,
        read_samples,
        read_tensors,
    )
    from trainer.studies.layout_text import SWITCH_TITLES

    first = next(part for part in plan.of("learner") if part.text == plan.request.learners[0])
    sampled, folder = read_samples(base.samples(out, "long")), first.folder(out)
    lengths, key = sampled.response_lengths_R, f"{base.text}/long"
    of_base = {text: found[key] for text, found in scores.items()}
    baseline, dtype = of_base[first.text], first.config.model.dtype
    words = {"dtype": dtype, "other": "float32" if dtype != "float32" else "bfloat16"}

    rows, left_out = [], []
    switches = folder.path / "switches.safetensors"
    for name, switched in read_tensors(switches).items() if switches.exists() else ():
        title = SWITCH_TITLES[name].format(**words)
        rows.append(
            {"cause": title, "side": "learner", **compare(sampled.logprobs_N, baseline, switched, lengths)}
        )
    for row in compare_layouts(first.config.layout.tp, sampled, of_base, layouts):
        rows.append(
            {
                "cause": f"{row['about'].upper()}: {row['second']} instead of {row['first']}",
                "side": "learner",
                **row,
            }
        )
    if switches.exists():
        left_out += [
            f"cause {name}: {why}"
            for name, why in json.loads((folder.path / "left_out.json").read_text()).items()
        ]
    if base.config.rollout.temperature == 1.0:
        found, failed = _server_causes(plan, out, base, sampled, baseline)
        rows, left_out = rows + found, left_out + failed
    else:
        left_out.append(
            "causes on the server: SGLang gives prefill log-probs at temperature 1 alone; use rollout.temperature=1"
        )
    return {"learner": first.text, "rollout": base.text, "ranked": rank_causes(rows)}, left_out


def _server_causes(
    plan: Plan, out: Path, base: Part, sampled: "Sampled", learner_N: "Tensor"
) -> tuple[list[dict[str, Any]], list[str]]:
    """The same tokens scored by the servers; the distance is to the learner's log-probs. And what is left
    out, with its reason."""
    from trainer.studies.layout_statistics import compare, read_tensors

    lengths, servers = sampled.response_lengths_R, plan.of("rollout", "dtype")
    files = {part.text: part.folder(out).path / "prefill.safetensors" for part in servers}
    left_out = [
        f"prefill by rollout {part.text}: {(part.folder(out).path / 'prefill_failed.txt').read_text()}"
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
            rows.append(
                (f"prefill by {text} instead of {base.text}", own["prefill"], read_tensors(file)["prefill"])
            )
    found = [
        {"cause": name, "side": "server", **compare(learner_N, first_N, second_N, lengths)}
        for name, first_N, second_N in rows
    ]
    return found, left_out


def _setting(plan: Plan, config: RunConfig) -> dict[str, Any]:
    import torch

    device = (
        torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else "CPU (gloo; SGLang's torch_native attention)"
    )
    attention = (
        ""
        if torch.cuda.is_available() or config.model.dtype == "float32"
        else ", its core attention in float32 on CPU"
    )
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
    """JSON, figures and Markdown; prints the table and what it says."""
    from trainer.studies.layout_pictures import draw_study
    from trainer.studies.layout_text import markdown

    write_json(out / "mismatch.json", dict(result))
    figures = draw_study(result, out)
    (out / "mismatch.md").write_text(markdown(result, [figure.name for figure in figures]))
    _print(result)
    print(
        f"\n{out / 'mismatch.md'}, mismatch.json, {', '.join(figure.name for figure in figures)}", flush=True
    )


def _print(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from trainer.studies.layout_text import CAUSE_TITLES, cause_cells, pair_cells, pair_titles

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    tables = [
        (
            "Mismatch by pair of layouts",
            pair_titles(result["threshold"]),
            [pair_cells(row) for row in result["pairs"]],
        )
    ]
    if result["server_modes"]:
        tables.append(
            ("Modes of the server", tables[0][1], [pair_cells(row) for row in result["server_modes"]])
        )
    if result["causes"]:
        tables.append(
            (
                "Why: one thing switched at a time",
                CAUSE_TITLES,
                [cause_cells(row) for row in result["causes"]["ranked"]],
            )
        )
    for title, titles, rows in tables:
        table = Table(*titles, title=title, title_justify="left")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    for line in [*result["findings"], *(f"left out: {what}" for what in result["skipped"])]:
        console.print(line, highlight=False, markup=False)
