"""What ``tandem mismatch`` will start: every layout with its checked config, before anything is started."""

from dataclasses import dataclass, replace
from pathlib import Path

from configs.errors import did_you_mean
from configs.schema import RunConfig
from configs.schema.layout import ONE_PROCESS, LayoutConfig, as_overrides, layout_text, parse_layout
from configs.schema.task import CountdownTask, TaskConfig
from launch.checks.config import LoadWith, check_learner_gpus
from launch.processes.run_folder import RunFolder

SHORT_PER_PROMPT = 4
"""Short responses to a prompt, each of at most this part of max_new_tokens, beside the long one."""
ATTENTION_BACKENDS = ("fa3", "flashinfer", "triton")
"""Of SGLang on CUDA, tried one by one with --why: which of them run depends on the GPU."""
ROLLOUT_WORDS = ("tp", "attention", "deterministic")
NO_MODES_ON_CPU = (
    "SGLang's deterministic mode and its attention backends: not on CPU, where SGLang has one attention backend (torch_native) and none of "
    "the batch-invariant kernels that its deterministic mode consists of, beside the seeds of samples, which change no probability"
)


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
    """rollout; mode (a rollout layout in another mode of the server); dtype (a server of another dtype, which
    --why has score tokens); learner; why (a learner layout that only --why asks for)."""
    config: RunConfig

    def folder(self, out: Path) -> RunFolder:
        side = "learner" if self.kind in ("learner", "why") else "rollout"
        return RunFolder(out / f"{side}-{self.text.replace('=', '').replace(',', '-')}")

    def samples(self, out: Path, length: str) -> Path:
        """Of a rollout part: its ``long`` or ``short`` responses."""
        return self.folder(out).path / f"samples.{length}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    request: Request
    parts: tuple[Part, ...]
    skipped: tuple[str, ...]

    def of(self, *kinds: str) -> list[Part]:
        return [part for part in self.parts if part.kind in kinds]


def make_plan(request: Request, load: LoadWith, *, gpus: int) -> Plan:
    """Every part with its checked config. ``gpus`` are visible, each part has all of them for itself; 0 means
    that it runs on CPU.

    Raises ValueError, naming the option or what a layout makes of the config.
    """
    if request.prompts < 2:
        raise ValueError(
            f"--prompts {request.prompts}: give at least 2, since errors are estimated from their spread"
        )
    if not 0 < request.threshold < 1:
        raise ValueError(
            f"--threshold {request.threshold}: a difference of probabilities lies between 0 and 1"
        )
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
    if not _is_plain(request.rollouts[0]):
        raise ValueError(
            f"--rollout {request.rollouts[0]}: the first one must be a layout alone, to compare modes of the server with"
        )
    parts = [
        _rollout_part("rollout" if _is_plain(text) else "mode", text, load, gpus) for text in request.rollouts
    ]
    _check_enough(request.prompts, parts[0].config.task)
    parts += [_learner_part("learner", text, load, request.prompts, gpus) for text in request.learners]
    skipped = [] if gpus else [NO_MODES_ON_CPU]
    if request.why:
        more, left_out = _parts_of_why(request, load, gpus)
        parts, skipped = parts + more, skipped + left_out
    return Plan(request=request, parts=tuple(parts), skipped=tuple(skipped))


def _check_enough(prompts: int, task: TaskConfig) -> None:
    """Of a task from files; how many problems there are to generate shows when they are generated."""
    if isinstance(task, CountdownTask):
        return
    from rollout.tasks.records import read_records

    available = sum(1 for _ in read_records(task.train_path))
    if prompts > available:
        raise ValueError(
            f"--prompts {prompts}: {task.train_path} holds {available} training prompts; ask for at most so many"
        )


def _learner_layout(text: str) -> LayoutConfig:
    """With as few copies of the model as it allows, where the text does not say: more score the same."""
    try:
        return parse_layout(text).smallest()
    except ValueError as error:
        raise ValueError(f"--learner: {error}") from error


def _learner_part(kind: str, text: str, load: LoadWith, prompts: int, gpus: int) -> Part:
    config = load(f"--learner {text}", as_overrides(_learner_layout(text)))
    if gpus:
        try:
            check_learner_gpus(config.layout.world_size, gpus)
        except ValueError as error:
            raise ValueError(f"--learner {text}: {error}") from error
    if prompts % config.layout.dp:
        raise ValueError(
            f"--prompts {prompts} does not divide by the dp={config.layout.dp} of --learner {text}; use a multiple of it"
        )
    return Part(text=text, kind=kind, config=config)


def _is_plain(rollout: str) -> bool:
    return rollout.removeprefix("tp=").isdecimal()


def _rollout_words(text: str) -> list[str]:
    """``tp=2,attention=triton,deterministic``, word by word, TP first and always there. Raises ValueError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        name, given, value = word.partition("=")
        if name not in ROLLOUT_WORDS:
            raise ValueError(
                f"--rollout {text}: unknown word {name!r}; {did_you_mean(name, ROLLOUT_WORDS, 'words')}"
            )
        reads = (
            not given
            if name == "deterministic"
            else value.isdecimal()
            if name == "tp"
            else value.replace("_", "").isalnum()
        )
        if not reads:
            raise ValueError(
                f"--rollout {text}: {word!r} cannot be read; write tp=N, attention=NAME or deterministic alone"
            )
    names = [word.partition("=")[0] for word in words]
    if len(set(names)) < len(names):
        raise ValueError(f"--rollout {text} says something twice; say it once")
    return sorted(
        words if "tp" in names else ["tp=1", *words],
        key=lambda word: ROLLOUT_WORDS.index(word.partition("=")[0]),
    )


def _rollout_part(kind: str, text: str, load: LoadWith, gpus: int) -> Part:
    overrides = as_overrides(ONE_PROCESS)
    for word in _rollout_words(text):
        name, _, value = word.partition("=")
        if name in ("attention", "deterministic") and not gpus:
            raise ValueError(f"--rollout {text}: {NO_MODES_ON_CPU}; leave {word!r} out")
        setting = {
            "tp": f"tp={value}",
            "attention": f"server_args.attention_backend={value}",
            "deterministic": "server_args.enable_deterministic_inference=true",
        }[name]
        overrides.append(f"rollout.{setting}")
    config = load(f"--rollout {text}", overrides)
    if gpus:
        from rollout.servers.fleet import check_gpus

        try:
            check_gpus(config.rollout, first_gpu=0, available=gpus)
        except ValueError as error:
            raise ValueError(f"--rollout {text}: {error}") from error
    return Part(text=text, kind=kind, config=config)


def _parts_of_why(request: Request, load: LoadWith, gpus: int) -> tuple[list[Part], list[str]]:
    """Layouts and servers that only --why asks for, each one step from the first of the user's; what does not
    fit is left out, and said."""
    first = parse_layout(request.learners[0])
    tp = max(2, first.tp)
    wanted = [
        ("tp", "tp=1" if first.tp > 1 else "tp=2"),
        ("sp", f"tp={tp}"),
        ("sp", f"tp={tp},sp"),
        ("pp", "pp=2"),
    ]
    parts, skipped, known = [], [], list(request.learners)
    for about, text in wanted:
        if text in known:
            continue
        known.append(text)
        try:
            parts.append(_learner_part("why", text, load, request.prompts, gpus))
        except ValueError as error:
            skipped.append(f"learner {text} as a cause ({about}): {error}")
    server = _rollout_part("rollout", request.rollouts[0], load, gpus).config.rollout
    other = "float32" if server.dtype != "float32" else "bfloat16"
    if server.temperature == 1.0:  # at any other, servers score nothing
        overrides = [*as_overrides(ONE_PROCESS), f"rollout.tp={server.tp}", f"rollout.dtype={other}"]
        parts.append(
            Part(text=f"tp={server.tp},dtype={other}", kind="dtype", config=load("--why", overrides))
        )
    if gpus:
        modes = ["deterministic", *(f"attention={name}" for name in ATTENTION_BACKENDS)]
        texts = [f"tp={server.tp},{mode}" for mode in modes]
        parts += [_rollout_part("mode", text, load, gpus) for text in texts if text not in request.rollouts]
    return parts, skipped
