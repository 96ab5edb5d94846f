"""The plan of ``tandem mismatch``: every layout with its checked config, before anything is started."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from configs.errors import ConfigError, did_you_mean
from configs.schema import RunConfig
from configs.schema.layout import ONE_PROCESS, LayoutConfig, as_overrides, layout_text, parse_layout
from configs.schema.task import CountdownTask, TaskConfig
from launch.checks.arguments import check_new_folder
from launch.checks.config import LoadWith, check_learner_gpus, check_served_as_saved
from launch.processes.run_folder import RunFolder
from parallel.planning.architecture import architecture_of
from rollout.servers.served import check_gpus

SHORT_PER_PROMPT = 4
"""Short responses per prompt, besides the long one. Each has at most max_new_tokens / SHORT_PER_PROMPT tokens."""
ATTENTION_BACKENDS = ("fa3", "flashinfer", "triton")
"""SGLang's backends on CUDA. --why tries each, because the GPU decides which of them run."""
ROLLOUT_WORDS = ("tp", "attention", "deterministic")
NO_MODES_ON_CPU = (
    "SGLang's deterministic mode and attention backends are not on CPU: there SGLang has one attention backend (torch_native), and its "
    "deterministic mode has no batch-invariant kernels, only seeds of samples, which change no probability"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of the command."""

    learners: tuple[str, ...]
    rollouts: tuple[str, ...]
    prompts: int
    threshold: float
    out: Path | None
    why: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One start of servers or ranks."""

    text: str
    """The layout, as the user writes it."""
    kind: str
    """rollout; mode (a rollout layout in another mode of the server); dtype (a server of another dtype, which scores
    tokens for --why); learner; why (a learner layout that only --why adds)."""
    config: RunConfig

    def folder(self, out: Path) -> RunFolder:
        side = "learner" if self.kind in ("learner", "why") else "rollout"
        return layout_folder(out, side, self.text)

    def samples(self, out: Path, length: str) -> Path:
        """The ``long`` or ``short`` responses of a rollout part."""
        return self.folder(out).path / f"samples.{length}.safetensors"


def layout_folder(out: Path, side: str, layout: str) -> RunFolder:
    """The run folder of a study for one side in one layout, such as ``learner-tp2-pp2``."""
    return RunFolder(out / f"{side}-{layout.replace('=', '').replace(',', '-')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    request: Request
    parts: tuple[Part, ...]
    skipped: tuple[str, ...]

    def of(self, *kinds: str) -> list[Part]:
        return [part for part in self.parts if part.kind in kinds]


def make_plan(request: Request, load: LoadWith, *, gpus: int) -> Plan:
    """Every part with its checked config. ``gpus``: the number of visible GPUs, which each part has for itself; 0 for
    the CPU.

    Raises ValueError with the option; ConfigError with the error that a layout causes in the config.
    """
    request = _checked(request)
    kinds = {text: "rollout" if _is_plain(text) else "mode" for text in request.rollouts}
    parts = [_rollout_part(kind, text, load, gpus) for text, kind in kinds.items()]
    check_served_as_saved(parts[0].config, "mismatch")
    _check_enough(request.prompts, parts[0].config.task)
    if parts[0].config.rollout.is_truncated:
        raise ValueError(
            "rollout.top_k: the study compares log-probs of the full softmax; set rollout.top_k=-1 rollout.top_p=1.0 rollout.min_p=0.0"
        )
    parts += [_learner_part("learner", text, load, request.prompts, gpus) for text in request.learners]
    skipped = [] if gpus else [NO_MODES_ON_CPU]
    if request.why and architecture_of(parts[0].config.model.path).experts is not None:
        try:
            parts[0] = _rollout_part("rollout", request.rollouts[0], load, gpus, ["learner.routing=rollout"])
        except (ValueError, ConfigError) as error:
            skipped.append(f"cause routing: {_reason(error)}")
    if request.why:
        more, left_out = _parts_of_why(request, load, gpus)
        parts, skipped = parts + more, skipped + left_out
    return Plan(request=request, parts=_in_equal_pieces(parts), skipped=tuple(skipped))


def _checked(request: Request) -> Request:
    """The request with each layout in its canonical form. Raises ValueError with the option."""
    if request.prompts < 2:
        why = "errors are estimated from their spread"
        raise ValueError(f"--prompts {request.prompts}: give at least 2, since {why}")
    if not 0 < request.threshold < 1:
        raise ValueError(f"--threshold {request.threshold}: differences of probabilities are between 0 and 1")
    if request.out is not None:
        check_new_folder("--out", request.out)
    request = replace(
        request,
        learners=tuple(layout_text(learner_layout(text)) for text in request.learners),
        rollouts=tuple(",".join(_rollout_words(text)) for text in request.rollouts),
    )
    for option, texts in (("--learner", request.learners), ("--rollout", request.rollouts)):
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ValueError(f"{option} {twice} is given twice; give each layout once")
    if not _is_plain(request.rollouts[0]):
        raise ValueError(
            f"--rollout {request.rollouts[0]}: the first one must be a layout without a mode, which the modes are compared with"
        )
    return request


def _reason(error: ValueError | ConfigError) -> str:
    if isinstance(error, ConfigError):
        return "; ".join(problem.error for problem in error.problems)
    return str(error)


def _in_equal_pieces(parts: Sequence[Part]) -> tuple[Part, ...]:
    """With aligned numerics, every layout sums in the pieces of the largest one, so all give the same bits."""
    pieces = max(part.config.numerics_pieces or 0 for part in parts)
    if not pieces:
        return tuple(parts)
    models = [part.config.model.model_copy(update={"numerics_pieces": pieces}) for part in parts]
    return tuple(
        replace(part, config=part.config.model_copy(update={"model": model}))
        for part, model in zip(parts, models, strict=True)
    )


def _check_enough(prompts: int, task: TaskConfig) -> None:
    """Check that a task from files has enough prompts. A generated task checks this while it generates."""
    if isinstance(task, CountdownTask):
        return
    from rollout.tasks.records import read_records

    available = sum(1 for _ in read_records(task.train_path))
    if prompts > available:
        error = f"--prompts {prompts}: {task.train_path} holds {available} training prompts"
        raise ValueError(f"{error}; ask for no more than these")


def learner_layout(text: str) -> LayoutConfig:
    """The layout of the text. If the text does not set the copies of the model, it has as few as possible: more copies
    would score the same. Raises ValueError."""
    try:
        return parse_layout(text).smallest()
    except ValueError as error:
        raise ValueError(f"--learner: {error}") from error


def _learner_part(kind: str, text: str, load: LoadWith, prompts: int, gpus: int) -> Part:
    config = load(f"--learner {text}", as_overrides(learner_layout(text)))
    if gpus:
        try:
            check_learner_gpus(config.layout.world_size, gpus)
        except ValueError as error:
            raise ValueError(f"--learner {text}: {error}") from error
    if prompts % config.layout.dp:
        error = f"--prompts {prompts} does not divide by the dp={config.layout.dp} of --learner {text}"
        raise ValueError(f"{error}; use a multiple of it")
    return Part(text=text, kind=kind, config=config)


def _is_plain(rollout: str) -> bool:
    return rollout.removeprefix("tp=").isdecimal()


def _rollout_words(text: str) -> list[str]:
    """The words of ``tp=2,attention=triton,deterministic``. tp comes first and is never missing. Raises ValueError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        name = word.partition("=")[0]
        if name not in ROLLOUT_WORDS:
            fix = did_you_mean(name, ROLLOUT_WORDS, "words")
            raise ValueError(f"--rollout {text}: unknown word {name!r}; {fix}")
        if not re.fullmatch(r"tp=\d+|attention=\w+|deterministic", word):
            fix = "write tp=N, attention=NAME, or deterministic without a value"
            raise ValueError(f"--rollout {text}: {word!r} cannot be read; {fix}")
    names = [word.partition("=")[0] for word in words]
    if len(set(names)) < len(names):
        raise ValueError(f"--rollout {text} gives a word twice; give it once")
    words = words if "tp" in names else ["tp=1", *words]
    return sorted(words, key=lambda word: ROLLOUT_WORDS.index(word.partition("=")[0]))


def _rollout_part(kind: str, text: str, load: LoadWith, gpus: int, more: Sequence[str] = ()) -> Part:
    overrides = [*as_overrides(ONE_PROCESS), *more]
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
        try:
            check_gpus(config.rollout, 0, gpus)
        except ValueError as error:
            raise ValueError(f"--rollout {text}: {error}") from error
    return Part(text=text, kind=kind, config=config)


def _parts_of_why(request: Request, load: LoadWith, gpus: int) -> tuple[list[Part], list[str]]:
    """(parts that only --why adds, the reasons why others are left out). Each part differs in one thing from the user's
    first layout."""
    first = parse_layout(request.learners[0])
    tp = max(2, first.tp)
    causes = {"tp=1" if first.tp > 1 else "tp=2": "tp"}
    for text, cause in ((f"tp={tp}", "sp"), (f"tp={tp},sp", "sp"), ("pp=2", "pp"), ("cp=2", "cp")):
        causes.setdefault(text, cause)
    parts, skipped = list[Part](), list[str]()
    for text, cause in causes.items():
        if text not in request.learners:
            make = partial(_learner_part, "why", text, load, request.prompts, gpus)
            _add(make, f"learner {text} as a cause ({cause})", parts, skipped)
    server = _rollout_part("rollout", request.rollouts[0], load, gpus).config.rollout
    other = "float32" if server.dtype != "float32" else "bfloat16"
    if server.temperature == 1.0:  # servers score tokens only at this temperature
        overrides = [*as_overrides(ONE_PROCESS), f"rollout.tp={server.tp}", f"rollout.dtype={other}"]
        _add(
            lambda: Part(text=f"tp={server.tp},dtype={other}", kind="dtype", config=load("--why", overrides)),
            "cause dtype",
            parts,
            skipped,
        )
    if gpus:
        modes = ["deterministic", *(f"attention={name}" for name in ATTENTION_BACKENDS)]
        for text in (f"tp={server.tp},{mode}" for mode in modes):
            if text not in request.rollouts:
                _add(partial(_rollout_part, "mode", text, load, gpus), f"rollout {text}", parts, skipped)
    return parts, skipped


def _add(make: Callable[[], Part], what: str, parts: list[Part], skipped: list[str]) -> None:
    """Add the part. If it cannot run, add the reason to ``skipped``: the user did not ask for this part."""
    try:
        parts.append(make())
    except (ValueError, ConfigError) as error:
        skipped.append(f"{what}: {_reason(error)}")
