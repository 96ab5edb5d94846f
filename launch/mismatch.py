"""``tandem mismatch``: which pair of learner and rollout layout disagrees least, and why. Sampled once per rollout layout with the real
server, scored once per learner layout with the real engine.

    OUT/rollout-TP.../      serve + mismatch-draw: samples.long, samples.short, prefill.safetensors     one start per rollout layout,
    OUT/learner-TP.../      score-rank, under torchrun: scores.safetensors, switches.safetensors        then one per learner layout,
    OUT/mismatch.json, mismatch.md, *.png                                                               then the arithmetic, in this process

Each part is a run folder of its own, with the config of its layout and a request.json that says what to do.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import did_you_mean
from configs.loader import load_config, resolved_yaml
from configs.schema import RunConfig
from configs.schema.layout import ONE_PROCESS, LayoutConfig, layout_text, parse_layout
from launch import run_folder
from launch.run_folder import RunFolder, write_json
from launch.supervisor import Role, RoleFailed, Supervisor

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.layout_study import Sampled

SHORT_PER_PROMPT = 4
"""Short responses to a prompt, each of at most this part of max_new_tokens, beside the long one."""
ATTENTION_BACKENDS = ("fa3", "flashinfer", "triton")
"""Of SGLang on CUDA, tried one by one with --why: which of them run depends on the GPU."""
ROLLOUT_WORDS = ("tp", "dtype", "attention", "deterministic")
NO_MODES_ON_CPU = (
    "SGLang's deterministic mode and its attention backends: not on CPU, where SGLang has one attention backend (torch_native) and none of "
    "the batch-invariant kernels that its deterministic mode consists of, beside the seeds of samples, which change no probability"
)

Load = Callable[[Sequence[str]], RunConfig]
"""(further overrides) -> the config, with all checks before a start."""
StartRole = Callable[..., Role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asks for."""

    learners: tuple[str, ...]
    rollouts: tuple[str, ...]
    prompts: int
    threshold: float
    out: Path | None
    why: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One start of servers or of ranks."""

    text: str
    """The layout, as the user writes it."""
    kind: str
    """rollout, mode (a rollout layout in another mode of the server), learner, or why (a layout that only --why asks for)."""
    config: RunConfig

    def folder(self, out: Path) -> RunFolder:
        side = "learner" if self.kind in ("learner", "why") else "rollout"
        return RunFolder(out / f"{side}-{self.text.replace('=', '').replace(',', '-')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    request: Request
    parts: tuple[Part, ...]
    skipped: tuple[str, ...]

    def of(self, *kinds: str) -> list[Part]:
        return [part for part in self.parts if part.kind in kinds]


# ------------------------------------------------------------------------------------------------------------------ planning


def make_plan(request: Request, load: Load, *, cuda: bool) -> Plan:
    """Every part with its checked config. Raises ValueError, naming the option or what a layout makes of the config."""
    if request.prompts < 2:
        raise ValueError(f"--prompts {request.prompts}: give at least 2, since errors are estimated from their spread")
    if not 0 < request.threshold < 1:
        raise ValueError(f"--threshold {request.threshold}: a difference of probabilities lies between 0 and 1")
    if request.out is not None and request.out.exists():
        raise ValueError(f"--out {request.out} exists already; name a new folder, or remove it first")
    request = replace(
        request,
        learners=tuple(layout_text(_learner_layout(text)) for text in request.learners),
        rollouts=tuple(",".join(_rollout_words(text)) for text in request.rollouts),
    )
    for option, texts in (("--learner", request.learners), ("--rollout", request.rollouts)):
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ValueError(f"{option} {twice} is given twice; give each layout once")
    parts = [_rollout_part("rollout", text, load, cuda) for text in request.rollouts]
    parts += [_learner_part("learner", text, load, request.prompts) for text in request.learners]
    skipped = [] if cuda else [NO_MODES_ON_CPU]
    if request.why:
        more, left_out = _parts_of_why(request, load, cuda)
        parts, skipped = parts + more, skipped + left_out
    return Plan(request=request, parts=tuple(parts), skipped=tuple(skipped))


def _learner_layout(text: str) -> LayoutConfig:
    try:
        return parse_layout(text)
    except ValueError as error:
        raise ValueError(f"--learner: {error}") from error


def _learner_part(kind: str, text: str, load: Load, prompts: int) -> Part:
    config = load([f"layout.{name}={json.dumps(value)}" for name, value in parse_layout(text).model_dump().items()])
    if prompts % config.layout.dp:
        raise ValueError(f"--prompts {prompts} does not divide by the dp={config.layout.dp} of --learner {text}; use a multiple of it")
    return Part(text=text, kind=kind, config=config)


def _rollout_words(text: str) -> list[str]:
    """``tp=2,dtype=float32,attention=triton,deterministic``, word by word, TP first and always there. Raises ValueError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        name, given, value = word.partition("=")
        if name not in ROLLOUT_WORDS:
            raise ValueError(f"--rollout {text}: unknown word {name!r}; {did_you_mean(name, ROLLOUT_WORDS, 'words')}")
        reads = not given if name == "deterministic" else value.isdecimal() if name == "tp" else value.replace("_", "").isalnum()
        if not reads:
            raise ValueError(f"--rollout {text}: {word!r} cannot be read; write tp=N, dtype=NAME, attention=NAME or deterministic alone")
    names = [word.partition("=")[0] for word in words]
    if len(set(names)) < len(names):
        raise ValueError(f"--rollout {text} says something twice; say it once")
    return sorted(words if "tp" in names else ["tp=1", *words], key=lambda word: ROLLOUT_WORDS.index(word.partition("=")[0]))


def _rollout_part(kind: str, text: str, load: Load, cuda: bool) -> Part:
    overrides = list(ONE_PROCESS)
    for word in _rollout_words(text):
        name, _, value = word.partition("=")
        if name in ("attention", "deterministic") and not cuda:
            raise ValueError(f"--rollout {text}: {NO_MODES_ON_CPU}; leave {word!r} out")
        setting = {
            "tp": f"tp={value}",
            "dtype": f"dtype={value}",
            "attention": f"server_args.attention_backend={value}",
            "deterministic": "server_args.enable_deterministic_inference=true",
        }[name]
        overrides.append(f"rollout.{setting}")
    return Part(text=text, kind=kind, config=load(overrides))


def _parts_of_why(request: Request, load: Load, cuda: bool) -> tuple[list[Part], list[str]]:
    """Layouts and servers that only --why asks for, each one step from the first of the user's; what does not fit is left out, and said."""
    first = parse_layout(request.learners[0])
    tp = max(2, first.tp)
    wanted = [("tp", "tp=1" if first.tp > 1 else "tp=2"), ("sp", f"tp={tp}"), ("sp", f"tp={tp},sp"), ("pp", "pp=2")]
    parts, skipped, known = [], [], list(request.learners)
    for about, text in wanted:
        if text in known:
            continue
        known.append(text)
        try:
            parts.append(_learner_part("why", text, load, request.prompts))
        except ValueError as error:
            skipped.append(f"learner {text} as a cause ({about}): {error}")
    server = _rollout_part("rollout", request.rollouts[0], load, cuda).config.rollout
    other = "float32" if server.dtype != "float32" else "bfloat16"
    parts.append(_rollout_part("dtype", f"tp={server.tp},dtype={other}", load, cuda))
    if cuda:
        modes = ["deterministic", *(f"attention={name}" for name in ATTENTION_BACKENDS)]
        texts = [f"tp={server.tp},{mode}" for mode in modes]
        parts += [_rollout_part("mode", text, load, cuda) for text in texts if text not in request.rollouts]
    return parts, skipped


# ------------------------------------------------------------------------------------------------------------------- running


def run(plan: Plan, config: RunConfig, start: StartRole) -> Path:
    """Everything, from the first server to the last figure; returns the folder. ``start(name, folder, config, ...)`` makes a role."""
    out = plan.request.out or run_folder.create(config.launch.runs_dir, f"{config.name}-mismatch", resolved_yaml(config)).path
    skipped = list(plan.skipped)
    rollouts = plan.of("rollout", "mode", "dtype")
    samples: dict[str, Path] = {}
    for number, part in enumerate(rollouts, 1):
        print(f"\n[{number}/{len(rollouts)}] rollout {part.text}: starting SGLang", flush=True)
        try:
            _draw_with(part, plan, out, start, first=samples.get(plan.request.rollouts[0]))
        except RoleFailed as error:
            if part.kind != "mode":  # nobody asked for this one by name: the others stand without it
                raise
            skipped.append(f"rollout {part.text}: {str(error).splitlines()[0]}")
            continue
        if part.kind != "dtype":
            samples[part.text] = _samples(part.folder(out), "long")
    sampled = [part for part in plan.of("rollout", "mode") if part.text in samples]
    learners = plan.of("learner", "why")
    for number, part in enumerate(learners, 1):
        print(f"\n[{number}/{len(learners)}] learner {part.text}: starting {part.config.layout.world_size} rank(s)", flush=True)
        _score_with(part, plan, out, start, sampled)
    result = evaluate(plan, config, out, sampled, skipped)
    write(result, out)
    return out


def _draw_with(part: Part, plan: Plan, out: Path, start: StartRole, *, first: Path | None) -> None:
    folder = _prepared(part, out)
    own = part.kind != "dtype"
    temperature_is_one = part.config.rollout.temperature == 1.0
    prefill = plan.request.why and temperature_is_one and part.kind != "mode"
    request = {
        "prompts": plan.request.prompts,
        "sample": own,
        "prefill": str(first or _samples(folder, "long")) if prefill else None,
        "repeat": first is None,
    }
    write_json(folder.path / "request.json", request)
    with Supervisor(grace_s=part.config.launch.stop_grace_s) as supervisor:
        supervisor.start(start("serve", folder, part.config))
        supervisor.start(start("mismatch-draw", folder, part.config, show_stdout=True))
        supervisor.wait_until_done("mismatch-draw")


def _score_with(part: Part, plan: Plan, out: Path, start: StartRole, sampled: Sequence[Part]) -> None:
    folder = _prepared(part, out)
    base = _samples(sampled[0].folder(out), "long")
    sets = {f"{sampled[0].text}/long": str(base)}
    if part.kind == "learner":
        sets |= {f"{one.text}/{length}": str(_samples(one.folder(out), length)) for one in sampled for length in ("long", "short")}
    switches = plan.request.why and part.text == plan.request.learners[0]
    write_json(folder.path / "request.json", {"sets": sets, "switches": str(base) if switches else None})
    with Supervisor(grace_s=part.config.launch.stop_grace_s) as supervisor:
        supervisor.start(start("score-rank", folder, part.config, ranks=part.config.layout.world_size, show_stdout=True))
        supervisor.wait_until_done("score-rank")


def _prepared(part: Part, out: Path) -> RunFolder:
    folder = part.folder(out)
    folder.path.mkdir(parents=True)
    folder.config.write_text(resolved_yaml(part.config))
    return folder


def _samples(folder: RunFolder, length: str) -> Path:
    return folder.path / f"samples.{length}.safetensors"


# --------------------------------------------------------------------------------------------------------------------- roles


def draw(folder: RunFolder) -> None:
    """The mismatch-draw role: what request.json asks of the servers of this folder."""
    from rollout.fixed_samples import fixed_prompts
    from rollout.sampler import check_prompt_lengths, check_vocabulary
    from rollout.tasks import load_task
    from rollout.tokenization import end_token_ids, load_tokenizer

    config: RunConfig = load_config(folder.config, [])
    request = json.loads((folder.path / "request.json").read_text())
    tokenizer = load_tokenizer(config.model.path)
    check_vocabulary(tokenizer, config.model.path)
    task = load_task(config.task, tokenizer=tokenizer)
    positions = json.loads((config.model.path / "config.json").read_text()).get("max_position_embeddings")
    check_prompt_lengths(task, config, max_positions=positions)
    prompts = fixed_prompts(task, request["prompts"], seed=config.seed)
    urls = folder.wait_for_address("serve", timeout_s=config.launch.start_timeout_s, alive=_every(15.0, "  waiting for SGLang"))["urls"]
    stops = end_token_ids(tokenizer, config.model.path)
    if request["sample"]:
        asyncio.run(_sample(folder, config, prompts, urls, stops))
    if request["prefill"]:
        asyncio.run(_prefill(folder, config, Path(request["prefill"]), urls[0], repeat=request["repeat"]))


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


async def _sample(folder: RunFolder, config: RunConfig, prompts: Sequence, urls: Sequence[str], stops: Sequence[int]) -> None:
    from rollout.fixed_samples import sample_fixed, shortened
    from rollout.sglang_client import SGLangClient
    from trainer.layout_study import join_samples, write_samples

    settings = config.rollout
    lengths = {"long": (1, settings.max_new_tokens), "short": (SHORT_PER_PROMPT, shortened(config, SHORT_PER_PROMPT))}
    async with SGLangClient(
        urls, max_concurrency=settings.max_concurrency, timeout_s=settings.request_timeout_s, max_retries=settings.max_retries
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
            samples = [(which, c.token_ids, c.rollout_logprobs) for which, group in enumerate(groups) for c in group]
            write_samples(_samples(folder, name), join_samples([prompt.token_ids for prompt in prompts], samples))


async def _prefill(folder: RunFolder, config: RunConfig, samples: Path, url: str, *, repeat: bool) -> None:
    import torch

    from rollout.fixed_samples import prefill_logprobs
    from trainer.layout_study import read_samples, write_tensors

    sampled, found = read_samples(samples), {}
    for name in ("prefill", "repeat") if repeat else ("prefill",):
        rows = await prefill_logprobs(
            url,
            sampled.sequences(),
            sampled.response_lengths_R.tolist(),
            name=name,
            timeout_s=config.rollout.request_timeout_s,
            report=_say,
        )
        found[name] = torch.tensor([x for row in rows for x in row], dtype=torch.float32)
    write_tensors(folder.path / "prefill.safetensors", found)


def score(folder: RunFolder) -> None:
    """The score-rank role, all ranks: what request.json asks of the learner's engine in this folder's layout."""
    import torch.distributed as dist

    from parallel.platform import init_distributed
    from trainer.layout_scoring import Scorer, score_under_switches
    from trainer.layout_study import read_samples, write_tensors

    config: RunConfig = load_config(folder.config, [])
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
            write_tensors(folder.path / "switches.safetensors", {n: found for n, (found, _) in answers.items() if found is not None})
            write_json(folder.path / "left_out.json", {name: reason for name, (_, reason) in answers.items() if reason})
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------- the result


def evaluate(plan: Plan, config: RunConfig, out: Path, sampled: Sequence[Part], skipped: Sequence[str]) -> dict[str, Any]:
    """The content of mismatch.json, from the files of the parts."""
    from trainer.layout_study import compare_layouts, read_samples, read_tensors
    from trainer.layout_study_text import findings

    learners = plan.of("learner")
    scores = {part.text: read_tensors(part.folder(out).path / "scores.safetensors") for part in plan.of("learner", "why")}
    layouts = {part.text: part.config.layout for part in plan.of("learner", "why")}
    rows: dict[str, list] = {"rollout": [], "mode": []}
    comparisons = []
    for part in sampled:
        sets = {length: read_samples(_samples(part.folder(out), length)) for length in ("long", "short")}
        for learner in learners:
            about = {"learner": learner.text, "rollout": part.text, "aligned": _aligned(learner.config.layout, part.config)}
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


def _pair(sets: Mapping[str, "Sampled"], scores: Mapping[str, "Tensor"], part: Part, threshold: float) -> dict[str, Any]:
    from rollout.fixed_samples import shortened
    from trainer.layout_study import equal_tokens, pair_statistics, probability_gaps

    long, short = sets["long"], sets["short"]
    by_learner = {length: scores[f"{part.text}/{length}"] for length in sets}
    gaps = {length: probability_gaps(sets[length].logprobs_N, by_learner[length]) for length in sets}
    found = pair_statistics(long.logprobs_N, by_learner["long"], long.response_lengths_R, threshold=threshold)
    first = shortened(part.config, SHORT_PER_PROMPT)
    return found | {"equal_tokens": equal_tokens(long, gaps["long"], short, gaps["short"], first=first)}


def _causes(
    plan: Plan, out: Path, base: Part, scores: Mapping[str, Mapping[str, "Tensor"]], layouts: Mapping[str, LayoutConfig]
) -> tuple[dict[str, Any], list[str]]:
    from trainer.layout_study import compare, compare_layouts, rank_causes, read_samples, read_tensors
    from trainer.layout_study_text import SWITCH_TITLES

    first = next(part for part in plan.of("learner") if part.text == plan.request.learners[0])
    sampled, folder = read_samples(_samples(base.folder(out), "long")), first.folder(out)
    lengths, key = sampled.response_lengths_R, f"{base.text}/long"
    of_base = {text: found[key] for text, found in scores.items()}
    baseline, dtype = of_base[first.text], first.config.model.dtype
    words = {"dtype": dtype, "other": "float32" if dtype != "float32" else "bfloat16"}

    rows = []
    for name, switched in read_tensors(folder.path / "switches.safetensors").items():
        title = SWITCH_TITLES[name].format(**words)
        rows.append({"cause": title, "side": "learner", **compare(sampled.logprobs_N, baseline, switched, lengths)})
    for row in compare_layouts(first.config.layout.tp, sampled, of_base, layouts):
        rows.append({"cause": f"{row['about'].upper()}: {row['second']} instead of {row['first']}", "side": "learner", **row})
    left_out = [f"cause {name}: {why}" for name, why in json.loads((folder.path / "left_out.json").read_text()).items()]
    if base.config.rollout.temperature == 1.0:
        rows += _server_causes(plan, out, base, sampled, baseline)
    else:
        left_out.append("causes on the server: SGLang gives prefill log-probs at temperature 1 alone; use rollout.temperature=1")
    return {"learner": first.text, "rollout": base.text, "ranked": rank_causes(rows)}, left_out


def _server_causes(plan: Plan, out: Path, base: Part, sampled: "Sampled", learner_N: "Tensor") -> list[dict[str, Any]]:
    """The same tokens scored by the servers; the distance is to the learner's log-probs."""
    from trainer.layout_study import compare, read_tensors

    lengths = sampled.response_lengths_R
    own = read_tensors(base.folder(out).path / "prefill.safetensors")
    rows = [
        ("prefill instead of decode, same server", sampled.logprobs_N, own["prefill"]),
        ("noise level: prefilled twice, nothing switched", own["prefill"], own["repeat"]),
    ]
    for part in plan.of("rollout", "dtype"):
        if part.text != base.text:
            found = read_tensors(part.folder(out).path / "prefill.safetensors")["prefill"]
            rows.append((f"prefill by {part.text} instead of {base.text}", own["prefill"], found))
    return [{"cause": name, "side": "server", **compare(learner_N, first_N, second_N, lengths)} for name, first_N, second_N in rows]


def _setting(plan: Plan, config: RunConfig) -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU (gloo; SGLang's torch_native attention)"
    attention = "" if torch.cuda.is_available() or config.model.dtype == "float32" else ", its core attention in float32 on CPU"
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
    from trainer.layout_study_pictures import draw_study
    from trainer.layout_study_text import markdown

    write_json(out / "mismatch.json", dict(result))
    figures = draw_study(result, out)
    (out / "mismatch.md").write_text(markdown(result, [figure.name for figure in figures]))
    _print(result)
    print(f"\n{out / 'mismatch.md'}, mismatch.json, {', '.join(figure.name for figure in figures)}", flush=True)


def _print(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from trainer.layout_study_text import CAUSE_TITLES, cause_cells, pair_cells, pair_titles

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    tables = [("Mismatch by pair of layouts", pair_titles(result["threshold"]), [pair_cells(row) for row in result["pairs"]])]
    if result["server_modes"]:
        tables.append(("Modes of the server", tables[0][1], [pair_cells(row) for row in result["server_modes"]]))
    if result["causes"]:
        tables.append(("Why: one thing switched at a time", CAUSE_TITLES, [cause_cells(row) for row in result["causes"]["ranked"]]))
    for title, titles, rows in tables:
        table = Table(*titles, title=title, title_justify="left")
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    for line in [*result["findings"], *(f"left out: {what}" for what in result["skipped"])]:
        console.print(line, highlight=False, markup=False)
