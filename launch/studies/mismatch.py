"""``tandem mismatch``: finds the pair of learner and rollout layout with the least disagreement, and its causes.
Each rollout layout samples once with the real server, and each learner layout scores once with the real engine.

    OUT/rollout-TP.../      serve + mismatch-draw: samples.long, samples.short, prefill.safetensors     one start per rollout layout,
    OUT/learner-TP.../      score-rank, under torchrun: scores.safetensors, switches.safetensors        then one per learner layout,
    OUT/mismatch.json, mismatch.md, *.png                                                               then the arithmetic, in this process
    OUT/config.yaml, request.json, summary.json                                                         where OUT is in launch.runs_dir

Each part is a run folder of its own, with the config of its layout and the request in request.json.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from configs.errors import counted
from configs.loader import resolved_yaml
from configs.schema import RunConfig
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder, wait_for_servers, write_json
from launch.processes.supervisor import RoleFailed, run_to_end
from launch.roles.start import finish_study, new_study, progress_printer, role
from launch.studies.mismatch_plan import SHORT_PER_PROMPT, Part, Plan
from launch.studies.mismatch_result import evaluate, write
from parallel.planning.architecture import architecture_of, read_hf_config
from trainer.file_system import read_required


def run(plan: Plan) -> Path:
    """Run the study, from the first server to the last figure. Returns the folder with the results."""
    config, out = plan.parts[0].config, plan.request.out
    folder = new_study(config, "mismatch") if out is None else RunFolder(out)
    out, skipped = folder.path.resolve(), list(plan.skipped)
    sampled = _draw_all(plan, out, skipped)
    plan = _score_all(plan, out, sampled, skipped)
    result = evaluate(plan, config, out, sampled, skipped)
    write(result, out)
    if plan.request.out is None:  # a folder that the user names has no config and is not a run folder
        finish_study(folder, config, "mismatch.md")
    return out


def _draw_all(plan: Plan, out: Path, skipped: list[str]) -> list[Part]:
    """Sample with one rollout after another. Returns the rollouts whose samples the learners score; ``skipped`` gets those
    that cannot run here."""
    rollouts = plan.of("rollout", "mode", "dtype")
    samples: dict[str, Path] = {}
    for number, part in enumerate(rollouts, 1):
        print(f"\n[{number}/{len(rollouts)}] rollout {part.text}: starting SGLang", flush=True)
        try:
            _draw_with(part, plan, out, first=samples.get(plan.request.rollouts[0]))
        except RoleFailed as error:
            if part.kind != "mode" or part.text in plan.request.rollouts:
                raise
            # The user did not name this one, and the others do not need it.
            skipped.append(f"rollout {part.text}: {str(error).splitlines()[0]}")
            continue
        if part.kind != "dtype":
            samples[part.text] = part.samples(out, "long")
    return [part for part in plan.of("rollout", "mode") if part.text in samples]


def _score_all(plan: Plan, out: Path, sampled: Sequence[Part], skipped: list[str]) -> Plan:
    """Score the samples with one learner after another. Returns the plan without the learners that cannot run here;
    ``skipped`` gets those."""
    learners = plan.of("learner", "why")
    for number, part in enumerate(learners, 1):
        ranks = counted(part.config.layout.world_size, "rank")
        print(f"\n[{number}/{len(learners)}] learner {part.text}: starting {ranks}", flush=True)
        try:
            _score_with(part, plan, out, sampled)
        except RoleFailed as error:
            # The pairs do not need the parts that --why alone adds.
            if _has_switches(part, plan) and (part.folder(out).path / "scores.safetensors").exists():
                skipped.append(f"causes switched in learner {part.text}: {str(error).splitlines()[0]}")
            elif part.kind == "why":
                skipped.append(f"learner {part.text} as a cause: {str(error).splitlines()[0]}")
                plan = replace(plan, parts=tuple(other for other in plan.parts if other is not part))
            else:
                raise
    return plan


def _draw_with(part: Part, plan: Plan, out: Path, *, first: Path | None) -> None:
    folder = _prepared(part, out)
    own = part.kind != "dtype"
    prefill = plan.request.why and part.config.rollout.temperature == 1.0 and part.kind != "mode"
    prefilled = str(first or part.samples(out, "long")) if prefill else None
    request = {"prompts": plan.request.prompts, "sample": own, "prefill": prefilled, "repeat": first is None}
    write_json(folder.request, request | {"first_gpu": 0})  # no learner runs beside these servers
    serving = role("serve", folder, part.config)
    drawing = role("mismatch-draw", folder, part.config, show_stdout=True)
    run_to_end(serving, drawing, grace_s=part.config.launch.stop_grace_s)


def _score_with(part: Part, plan: Plan, out: Path, sampled: Sequence[Part]) -> None:
    folder = _prepared(part, out)
    base = sampled[0].samples(out, "long")
    sets = {f"{sampled[0].text}/long": str(base)}
    if part.kind == "learner":
        lengths = [(rollout, length) for rollout in sampled for length in ("long", "short")]
        sets |= {f"{rollout.text}/{length}": str(rollout.samples(out, length)) for rollout, length in lengths}
    switches = str(base) if _has_switches(part, plan) else None
    write_json(folder.request, {"sets": sets, "switches": switches})
    ranks = part.config.layout.world_size
    scoring = role("score-rank", folder, part.config, ranks=ranks, show_stdout=True)
    run_to_end(scoring, grace_s=part.config.launch.stop_grace_s)


def _has_switches(part: Part, plan: Plan) -> bool:
    return plan.request.why and part.text == plan.request.learners[0]


def _prepared(part: Part, out: Path) -> RunFolder:
    folder = part.folder(out)
    folder.path.mkdir(parents=True)
    folder.config.write_text(resolved_yaml(part.config))
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# roles


def draw(folder: RunFolder, config: RunConfig) -> None:
    """The mismatch-draw role: serves request.json with the servers of this folder."""
    from rollout.client import GenerationError
    from rollout.sampling.fixed_samples import fixed_prompts
    from rollout.sampling.role import load_checked_task
    from rollout.tokenization import end_token_ids

    request = read_required(folder.request)
    tokenizer, task = load_checked_task(config, architecture_of(config.model.path))
    prompts = fixed_prompts(task, request["prompts"], seed=config.seed)
    timeout_s = config.launch.start_timeout_s
    names, began = serve_roles(config), time.monotonic()
    with progress_printer("  waiting for SGLang", still="waiting for SGLang") as show:
        urls = wait_for_servers(
            folder, names, timeout_s=timeout_s, alive=lambda: show(time.monotonic() - began)
        )
    stops = end_token_ids(tokenizer, config.model.path)
    if request["sample"]:
        asyncio.run(_sample(folder, config, prompts, urls, stops))
    if request["prefill"]:
        try:
            asyncio.run(_prefill(folder, config, Path(request["prefill"]), urls[0], repeat=request["repeat"]))
        except GenerationError as error:  # the pairs do not need it
            _print_indented(f"left out prefill: {error}")
            (folder.path / "prefill_failed.txt").write_text(str(error))


def _print_indented(line: str) -> None:
    print(f"  {line}", flush=True)


async def _sample(
    folder: RunFolder, config: RunConfig, prompts: Sequence, urls: Sequence[str], stops: Sequence[int]
) -> None:
    from rollout.sampling.fixed_samples import sample_fixed, shortened
    from rollout.servers.client import SGLangClient
    from trainer.studies.layout_statistics import join_groups, write_samples

    settings = config.rollout
    lengths = {
        "long": (1, settings.max_new_tokens),
        "short": (SHORT_PER_PROMPT, shortened(config, SHORT_PER_PROMPT)),
    }
    replays = config.learner.routing == "rollout"
    experts = architecture_of(config.model.path).experts if replays else None
    async with SGLangClient(
        urls, key=folder.run_key(), max_concurrency=settings.max_concurrency, experts=experts,
        timeout_s=settings.request_timeout_s, max_retries=settings.max_retries, stop=settings.stop,
    ) as client:  # fmt: skip
        for name, (per_prompt, max_new_tokens) in lengths.items():
            groups = await sample_fixed(
                client, prompts, per_prompt=per_prompt, max_new_tokens=max_new_tokens, name=name, seed=config.seed,
                temperature=settings.temperature, stop_token_ids=stops, report=_print_indented,
            )  # fmt: skip
            joined = join_groups([prompt.token_ids for prompt in prompts], groups)
            write_samples(folder.path / f"samples.{name}.safetensors", joined)


async def _prefill(folder: RunFolder, config: RunConfig, samples: Path, url: str, *, repeat: bool) -> None:
    import torch

    from rollout.sampling.fixed_samples import prefill_logprobs
    from trainer.studies.layout_statistics import read_samples, write_tensors

    sampled, logprobs = read_samples(samples), {}
    vocab_size = read_hf_config(config.model.path)["vocab_size"]
    for name in ("prefill", "repeat") if repeat else ("prefill",):
        values = await prefill_logprobs(
            url, sampled.sequences(), sampled.response_lengths_R.tolist(), vocab_size=vocab_size, name=name,
            timeout_s=config.rollout.request_timeout_s, report=_print_indented, key=folder.run_key(),
        )  # fmt: skip
        logprobs[name] = torch.tensor(values, dtype=torch.float32)
    write_tensors(folder.path / "prefill.safetensors", logprobs)


def score(folder: RunFolder, config: RunConfig) -> None:
    """The score-rank role, on all ranks: serves request.json with the learner's engine in this folder's layout."""
    import torch.distributed as dist

    from trainer.studies.layout_scoring import Scorer, score_under_switches
    from trainer.studies.layout_statistics import read_samples, write_tensors

    request = read_required(folder.request)
    first = dist.get_rank() == 0
    scorer = Scorer(config, _print_indented)
    scores = {name: scorer.score(name, read_samples(Path(path))) for name, path in request["sets"].items()}
    if first:
        write_tensors(folder.path / "scores.safetensors", scores)
    if request["switches"]:
        sampled = read_samples(Path(request["switches"]))
        answers = score_under_switches(scorer, sampled)
        if first:
            switched = {name: logprobs for name, (logprobs, _) in answers.items() if logprobs is not None}
            write_tensors(folder.path / "switches.safetensors", switched)
            left_out = {name: reason for name, (_, reason) in answers.items() if reason}
            write_json(folder.path / "left_out.json", left_out)
