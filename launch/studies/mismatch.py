"""``tandem mismatch``: which pair of learner and rollout layout disagrees least, and why. Sampled once per
rollout layout with the real server, scored once per learner layout with the real engine.

    OUT/rollout-TP.../      serve + mismatch-draw: samples.long, samples.short, prefill.safetensors     one start per rollout layout,
    OUT/learner-TP.../      score-rank, under torchrun: scores.safetensors, switches.safetensors        then one per learner layout,
    OUT/mismatch.json, mismatch.md, *.png                                                               then the arithmetic, in this process

Each part is a run folder of its own, with the config of its layout and a request.json that says what to do.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from configs.loader import resolved_yaml
from configs.schema import RunConfig
from launch.processes import run_folder
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder, wait_for_servers, write_json
from launch.processes.supervisor import RoleFailed, StartRole, Supervisor
from launch.studies.mismatch_plan import SHORT_PER_PROMPT, Part, Plan
from launch.studies.mismatch_result import evaluate, write


def run(plan: Plan, start: StartRole) -> Path:
    """Everything, from the first server to the last figure; returns the folder."""
    config = plan.parts[0].config
    out = (
        plan.request.out
        or run_folder.create(config.launch.runs_dir, f"{config.name}-mismatch", resolved_yaml(config)).path
    )
    out = out.resolve()
    skipped = list(plan.skipped)
    rollouts = plan.of("rollout", "mode", "dtype")
    samples: dict[str, Path] = {}
    for number, part in enumerate(rollouts, 1):
        print(f"\n[{number}/{len(rollouts)}] rollout {part.text}: starting SGLang", flush=True)
        try:
            _draw_with(part, plan, out, start, first=samples.get(plan.request.rollouts[0]))
        except RoleFailed as error:
            if part.kind != "mode" or part.text in plan.request.rollouts:
                raise
            # Nobody asked for this one by name: the others stand without it.
            skipped.append(f"rollout {part.text}: {str(error).splitlines()[0]}")
            continue
        if part.kind != "dtype":
            samples[part.text] = part.samples(out, "long")
    sampled = [part for part in plan.of("rollout", "mode") if part.text in samples]
    learners = plan.of("learner", "why")
    for number, part in enumerate(learners, 1):
        print(
            f"\n[{number}/{len(learners)}] learner {part.text}: starting {part.config.layout.world_size} rank(s)",
            flush=True,
        )
        try:
            _score_with(part, plan, out, start, sampled)
        except RoleFailed as error:
            # What --why alone asked for: the pairs stand without it.
            if _has_switches(part, plan) and (part.folder(out).path / "scores.safetensors").exists():
                skipped.append(f"causes switched in learner {part.text}: {str(error).splitlines()[0]}")
            elif part.kind == "why":
                skipped.append(f"learner {part.text} as a cause: {str(error).splitlines()[0]}")
                plan = replace(plan, parts=tuple(other for other in plan.parts if other is not part))
            else:
                raise
    result = evaluate(plan, config, out, sampled, skipped)
    write(result, out)
    return out


def _draw_with(part: Part, plan: Plan, out: Path, start: StartRole, *, first: Path | None) -> None:
    folder = _prepared(part, out)
    own = part.kind != "dtype"
    prefill = plan.request.why and part.config.rollout.temperature == 1.0 and part.kind != "mode"
    request = {
        "prompts": plan.request.prompts,
        "sample": own,
        "prefill": str(first or part.samples(out, "long")) if prefill else None,
        "repeat": first is None,
        "first_gpu": 0,  # no learner runs beside these servers
    }
    write_json(folder.path / "request.json", request)
    with Supervisor(grace_s=part.config.launch.stop_grace_s) as supervisor:
        supervisor.start(start("serve", folder, part.config))
        supervisor.start(start("mismatch-draw", folder, part.config, show_stdout=True))
        supervisor.wait_until_done("mismatch-draw")


def _score_with(part: Part, plan: Plan, out: Path, start: StartRole, sampled: Sequence[Part]) -> None:
    folder = _prepared(part, out)
    base = sampled[0].samples(out, "long")
    sets = {f"{sampled[0].text}/long": str(base)}
    if part.kind == "learner":
        sets |= {
            f"{one.text}/{length}": str(one.samples(out, length))
            for one in sampled
            for length in ("long", "short")
        }
    write_json(
        folder.path / "request.json",
        {"sets": sets, "switches": str(base) if _has_switches(part, plan) else None},
    )
    with Supervisor(grace_s=part.config.launch.stop_grace_s) as supervisor:
        supervisor.start(
            start("score-rank", folder, part.config, ranks=part.config.layout.world_size, show_stdout=True)
        )
        supervisor.wait_until_done("score-rank")


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
    """The mismatch-draw role: what request.json asks of the servers of this folder."""
    from rollout.client import GenerationError
    from rollout.sampling.fixed_samples import fixed_prompts
    from rollout.sampling.role import load_checked_task
    from rollout.tokenization import end_token_ids

    request = json.loads((folder.path / "request.json").read_text())
    tokenizer, task = load_checked_task(config)
    prompts = fixed_prompts(task, request["prompts"], seed=config.seed)
    timeout_s = config.launch.start_timeout_s
    urls = wait_for_servers(
        folder, serve_roles(config), timeout_s=timeout_s, alive=_every(15.0, "  waiting for SGLang")
    )
    stops = end_token_ids(tokenizer, config.model.path)
    if request["sample"]:
        asyncio.run(_sample(folder, config, prompts, urls, stops))
    if request["prefill"]:
        try:
            asyncio.run(_prefill(folder, config, Path(request["prefill"]), urls[0], repeat=request["repeat"]))
        except GenerationError as error:  # the pairs stand without it
            _say(f"left out prefill: {error}")
            (folder.path / "prefill_failed.txt").write_text(str(error))


def _every(period_s: float, text: str) -> Callable[[], None]:
    began, said = time.monotonic(), 0

    def tell() -> None:
        nonlocal said
        waited = time.monotonic() - began
        if waited // period_s > said:
            said = int(waited // period_s)
            print(f"{text} … {waited:.0f} s", flush=True)

    return tell


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


async def _sample(
    folder: RunFolder, config: RunConfig, prompts: Sequence, urls: Sequence[str], stops: Sequence[int]
) -> None:
    from rollout.sampling.fixed_samples import sample_fixed, shortened
    from rollout.servers.client import SGLangClient
    from trainer.studies.layout_statistics import join_samples, write_samples

    settings = config.rollout
    lengths = {
        "long": (1, settings.max_new_tokens),
        "short": (SHORT_PER_PROMPT, shortened(config, SHORT_PER_PROMPT)),
    }
    async with SGLangClient(
        urls,
        max_concurrency=settings.max_concurrency,
        timeout_s=settings.request_timeout_s,
        max_retries=settings.max_retries,
        key=folder.run_key(),
    ) as client:
        for name, (per_prompt, max_new_tokens) in lengths.items():
            groups = await sample_fixed(
                client,
                prompts,
                per_prompt=per_prompt,
                max_new_tokens=max_new_tokens,
                temperature=settings.temperature,
                stop_token_ids=stops,
                seed=config.seed,
                name=name,
                report=_say,
            )
            samples = [
                (which, c.token_ids, c.rollout_logprobs) for which, group in enumerate(groups) for c in group
            ]
            write_samples(
                folder.path / f"samples.{name}.safetensors",
                join_samples([prompt.token_ids for prompt in prompts], samples),
            )


async def _prefill(folder: RunFolder, config: RunConfig, samples: Path, url: str, *, repeat: bool) -> None:
    import torch

    from rollout.sampling.fixed_samples import prefill_logprobs
    from trainer.studies.layout_statistics import read_samples, write_tensors

    sampled, found = read_samples(samples), {}
    for name in ("prefill", "repeat") if repeat else ("prefill",):
        rows = await prefill_logprobs(
            url,
            sampled.sequences(),
            sampled.response_lengths_R.tolist(),
            vocab_size=json.loads((config.model.path / "config.json").read_text())["vocab_size"],
            name=name,
            timeout_s=config.rollout.request_timeout_s,
            report=_say,
            key=folder.run_key(),
        )
        found[name] = torch.tensor([x for row in rows for x in row], dtype=torch.float32)
    write_tensors(folder.path / "prefill.safetensors", found)


def score(folder: RunFolder, config: RunConfig) -> None:
    """The score-rank role, all ranks: what request.json asks of the learner's engine in this folder's layout."""
    import torch.distributed as dist

    from parallel.megatron.platform import init_distributed
    from trainer.studies.layout_scoring import Scorer, score_under_switches
    from trainer.studies.layout_statistics import read_samples, write_tensors

    request = json.loads((folder.path / "request.json").read_text())
    init_distributed(timeout_s=config.launch.collective_timeout_s)
    first = dist.get_rank() == 0
    scorer = Scorer(config, _say)
    scores = {name: scorer.score(name, read_samples(Path(path))) for name, path in request["sets"].items()}
    if first:
        write_tensors(folder.path / "scores.safetensors", scores)
    if request["switches"]:
        answers = score_under_switches(config, scorer, read_samples(Path(request["switches"])), _say)
        if first:
            write_tensors(
                folder.path / "switches.safetensors",
                {n: found for n, (found, _) in answers.items() if found is not None},
            )
            write_json(
                folder.path / "left_out.json",
                {name: reason for name, (_, reason) in answers.items() if reason},
            )
    dist.barrier()
    dist.destroy_process_group()
