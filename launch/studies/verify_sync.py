"""``tandem verify-sync``: proves that servers which received weights by transfer answer like servers that were
started from those weights.

    servers (one fleet per rollout TP)      hold the config's model A; queried                                                (1)
    for each learner layout:                servers set back to A, which must then be as in (1)
        verify-rank, under torchrun         loads other weights (A with noise seeded by each tensor's name), exports them, sends them
                                            the export is compared with those weights, tensor by tensor; the servers queried  (2)
    servers again, started from an export   queried                                                                           (3)

An answer has log-probs of fixed prompts, greedy continuations and SGLang's checksum of every tensor on every
rank. (2) must equal (3) to the bit, for every layout and TP. (1) must differ from (3) in every tensor, otherwise
this check could not fail. All layouts export the same weights, so each server starts once. With ``rollout.precision``
the servers of (3) start from the export rounded by this process. Every part is a run folder inside one folder, with
its config, logs and exports.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import counted
from configs.loader import resolved_yaml
from configs.schema import RunConfig
from configs.schema.layout import ONE_PROCESS, LayoutConfig, as_overrides, layout_text
from launch.checks.config import LoadWith
from launch.processes.placement import ONE_MACHINE
from launch.processes.run_folder import RunFolder, read_servers, write_json
from launch.processes.supervisor import RoleFailed, Supervisor, run_to_end
from launch.roles.start import finish_study, new_study, role
from launch.studies.mismatch_plan import layout_folder, learner_layout
from parallel.planning.architecture import architecture_of, read_hf_config
from parallel.planning.layout import validate_rollout_layout
from rollout.servers.served import check_gpus
from trainer.file_system import read_required

if TYPE_CHECKING:
    from rollout.servers.control import Continuation, SGLangControl

NUM_PROMPTS = 6
CONTINUED_TOKENS = 12
SHOWN_NAMES = 4
MAX_SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers of one server. Two servers with the same weights give the same answers to the bit."""

    checksums: Mapping[str, str]
    continuations: Sequence["Continuation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """What was found for one learner layout."""

    layout: str
    export: Sequence[str]
    """Wrong tensors of its export."""
    served: Mapping[int, Sequence[str]]
    """Differences after its transfer, by rollout TP."""

    @property
    def is_good(self) -> bool:
        return not self.export and not any(self.served.values())


def make_plan(
    learners: Sequence[str], rollouts: Sequence[str], load: LoadWith, *, gpus: int
) -> tuple[dict[str, RunConfig], list[int]]:
    """(the checked config of every ``--learner`` layout, or of the config's own layout, by its name; the rollout
    TPs). ``gpus``: the number of visible GPUs; 0 for the CPU.

    Raises ValueError with the option; ConfigError with the error that a layout causes in the config.
    """
    tps, by_name = rollout_sizes(rollouts), layouts(learners)
    configs = {name: load(f"--learner {name}", as_overrides(layout)) for name, layout in by_name.items()}
    if not configs:
        config = load("", ())
        configs = {layout_text(config.layout): config}
    first = next(iter(configs.values()))
    if first.rollout.quantization != "none":
        error = "quantised servers do not hold the weights that were sent, which this command compares"
        fix = "set rollout.quantization=none"
        raise ValueError(f"rollout.quantization={first.rollout.quantization}: {error}; {fix}")
    tps = tps or [first.rollout.tp]
    largest = max(config.layout.world_size for config in configs.values())
    try:
        for number, tp in enumerate(tps):
            validate_rollout_layout(read_hf_config(first.model.path), tp)
            if gpus:  # all fleets run at the same time, on consecutive GPUs
                before = largest + first.rollout.replicas * sum(tps[:number])
                check_gpus(first.rollout.model_copy(update={"tp": tp}), before, gpus)
    except ValueError as error:
        raise ValueError(f"--rollout: {error}") from error
    return configs, tps


def layouts(texts: Sequence[str]) -> dict[str, LayoutConfig]:
    """The ``--learner`` options without repetitions, by name. Raises ValueError."""
    return {layout_text(layout): layout for layout in map(learner_layout, texts)}


def rollout_sizes(texts: Sequence[str]) -> list[int]:
    """The ``--rollout`` options, ``tp=N`` each. Raises ValueError."""
    for text in texts:
        name, _, size = text.partition("=")
        if name.strip() != "tp" or not size.strip().isdecimal() or int(size) < 1:
            raise ValueError(f"--rollout {text}: write tp=N with a whole number N above 0")
    return list(dict.fromkeys(int(text.partition("=")[2]) for text in texts))


# -------------------------------------------------------------------------------------------------------------
# in the command's process


def run(configs: Mapping[str, RunConfig], tps: Sequence[int]) -> bool:
    """Run the whole proof. ``configs``: by the name of the learner layout. Returns whether everything agreed."""
    from rollout.servers.control import ControlError

    try:
        return _prove(configs, tps)
    except ControlError as error:
        raise RoleFailed(f"a server failed: {error}") from error


def _prove(configs: Mapping[str, RunConfig], tps: Sequence[int]) -> bool:
    texts, base = list(configs), next(iter(configs.values()))
    study = new_study(base, "verify-sync")
    out = study.path
    print(f"folder: {out}", flush=True)
    exports: dict[str, list[str]] = {}
    transferred: dict[tuple[str, int], list[Answers]] = {}
    first_gpu = max(config.layout.world_size for config in configs.values())
    fleets = partial(_fleets, base, tps, out, first_gpu=first_gpu)
    with fleets("servers", base.model.path, replicas=base.rollout.replicas) as controls:
        original = {tp: _get_answers(control, base) for tp, control in controls.items()}
        for number, (text, config) in enumerate(configs.items(), 1):
            ranks = counted(config.layout.world_size, "rank")
            print(f"[{number}/{len(configs)}] learner {text}: {ranks}", flush=True)
            if number > 1:
                _set_back(controls, base, original)
            folder = _transfer(config, text, out, controls)
            transferred |= {(text, tp): _get_answers(control, base) for tp, control in controls.items()}
            exports[text] = wrong_tensors(folder.export, config)
            if number > 1:
                shutil.rmtree(folder.export)  # as large as the model, and compared with the weights already
    with fleets("reference", _as_sent(layout_folder(out, "learner", texts[0]).export, base)) as controls:
        reference = {tp: _get_answers(control, base)[0] for tp, control in controls.items()}
    _check_that_it_can_fail(original, reference)
    results = []
    for text in texts:
        served = {
            tp: [part for one in transferred[text, tp] for part in differences(one, reference[tp])]
            for tp in tps
        }
        results.append(LayoutResult(layout=text, export=exports[text], served=served))
    print(f"\n{table(results, tps)}", flush=True)
    write_json(out / "result.json", {"findings": [asdict(result) for result in results]})
    finish_study(study, base, "result.json")
    return all(result.is_good for result in results)


@contextmanager
def _fleets(
    base: RunConfig,
    tps: Sequence[int],
    out: Path,
    name: str,
    model: Path,
    *,
    first_gpu: int,
    replicas: int = 1,
) -> Iterator[dict[int, "SGLangControl"]]:
    """Inside, one fleet of servers per TP is ready, all at the same time. On CUDA their GPUs follow the learner's, from
    ``first_gpu`` on."""
    from rollout.servers.control import SGLangControl

    sizes = ", ".join(f"tp={tp}" for tp in tps)
    print(f"{name}: starting SGLang with {sizes} on {model}", flush=True)
    folders = {tp: RunFolder(out / f"{name}-tp{tp}") for tp in tps}
    served = base.model.model_copy(update={"path": model.resolve()})
    with Supervisor(grace_s=base.launch.stop_grace_s) as supervisor, ExitStack() as connections:
        for tp, folder in folders.items():
            settings = {"tp": tp, "replicas": replicas, "first_port": None, "max_server_restarts": 0}
            rollout = base.rollout.model_copy(update=settings)
            config = base.model_copy(update={"rollout": rollout, "model": served, "layout": ONE_PROCESS})
            folder.path.mkdir()
            folder.config.write_text(resolved_yaml(config))
            write_json(folder.request, {"first_gpu": first_gpu})
            supervisor.start(replace(role("serve", folder, config), name=f"serve ({folder.path.name})"))
            first_gpu += tp * replicas
        supervisor.wait_for(
            lambda: all(read_servers(folder, [ONE_MACHINE]) is not None for folder in folders.values()),
            what="the SGLang servers to be ready",
            timeout_s=base.launch.start_timeout_s,
        )
        controls = {}
        for tp, folder in folders.items():
            urls, key = read_servers(folder, [ONE_MACHINE]), folder.run_key()
            rollout = base.rollout.model_copy(update={"tp": tp})
            controls[tp] = connections.enter_context(SGLangControl(rollout, base.launch, urls, key=key))
        yield controls


def _get_answers(control: "SGLangControl", config: RunConfig) -> list[Answers]:
    """The answers of every replica."""
    prompts = fixed_prompts(read_hf_config(config.model.path)["vocab_size"])
    continuations = control.greedy(prompts, max_new_tokens=CONTINUED_TOKENS)
    pairs = zip(control.checksums(), continuations, strict=True)
    return [Answers(checksums=checksums, continuations=texts) for checksums, texts in pairs]


def fixed_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of 3, 10, 17, ... tokens. Their first tokens differ, so that no two share a cached beginning."""
    return [
        [(1 + i + 5 * j + i * j * j) % vocab_size for j in range(3 + 7 * i)]
        for i in range(min(NUM_PROMPTS, vocab_size))
    ]


def _set_back(
    controls: Mapping[int, "SGLangControl"], base: RunConfig, original: Mapping[int, Sequence[Answers]]
) -> None:
    for tp, control in controls.items():
        control.load_from_disk(base.model.path, version=0)
        for checksums, answers in zip(control.checksums(), original[tp], strict=True):
            if checksums != answers.checksums:
                wrong = _short_list(differing_tensors(checksums, answers.checksums))
                error = f"servers of tp={tp} were set back to {base.model.path}, but differ from their start"
                raise RoleFailed(f"{error}: {wrong}")


def _transfer(config: RunConfig, text: str, out: Path, controls: Mapping[int, "SGLangControl"]) -> RunFolder:
    folder = layout_folder(out, "learner", text)
    folder.path.mkdir()
    folder.config.write_text(resolved_yaml(config))
    servers = [{"tp": tp, "urls": c.urls, "key_file": str(c.key.file)} for tp, c in controls.items()]
    write_json(folder.request, {"servers": servers})
    ranks = config.layout.world_size
    # It has its own supervisor, so the servers continue after its roles have ended.
    sending = role("verify-rank", folder, config, ranks=ranks, show_stdout=True)
    run_to_end(sending, grace_s=config.launch.stop_grace_s)
    return folder


def wrong_tensors(export: Path, config: RunConfig) -> list[str]:
    """Names of the export's tensors that differ by a bit from the weights that the learner was given."""
    import torch

    from parallel.weights.hf_files import HuggingFaceWeights, PerturbedWeights
    from parallel.weights.hf_names import all_hf_names, is_kept_float32

    exported, given = HuggingFaceWeights(export), PerturbedWeights(config.model.path)
    dtype = getattr(torch, config.model.dtype)
    # The names of the architecture: the model's folder may repeat a tied embedding, or keep unused buffers.
    names = all_hf_names(architecture_of(config.model.path))
    both = exported.names & names

    def wanted(name: str) -> torch.Tensor:
        return given.read(name).to(torch.float32 if is_kept_float32(name) else dtype)

    wrong = {name for name in both if not torch.equal(exported.read(name), wanted(name))}
    return sorted((exported.names ^ names) | wrong)


def _as_sent(export: Path, config: RunConfig) -> Path:
    """The weights as the servers were sent them: the export, or a copy of it rounded to ``rollout.precision``."""
    import torch

    from parallel.weights.hf_files import HuggingFaceWeights, ShardWriter, finish_folder, hidden_folder
    from parallel.weights.precision import is_rounded, rounded

    precision = config.rollout.precision
    if precision is None:
        return export
    final, weights = export.with_name(f"{export.name}-{precision}"), HuggingFaceWeights(export)
    temporary = hidden_folder(final)
    writer = ShardWriter(temporary, number=0, max_shard_bytes=MAX_SHARD_BYTES)
    for name in sorted(weights.names):
        tensor = weights.read(name)
        writer.add(name, rounded(tensor, precision) if is_rounded(name, precision) else tensor)
    writer.flush()
    finish_folder(temporary, final, writer.shards, source=export, dtype=getattr(torch, config.model.dtype))
    return final


def differences(answers: Answers, reference: Answers) -> list[str]:
    """The parts of ``answers`` that differ from ``reference`` by a bit: tensors by SGLang's names first, then
    log-probs and continuations."""
    parts = differing_tensors(answers.checksums, reference.checksums)
    for i, (one, other) in enumerate(zip(answers.continuations, reference.continuations, strict=True)):
        if one.prompt_logprobs != other.prompt_logprobs:
            parts.append(f"log-probs of prompt {i}")
        if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs):
            parts.append(f"continuation of prompt {i}")
    return parts


def differing_tensors(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Names of tensors whose checksums differ."""
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def _check_that_it_can_fail(
    original: Mapping[int, Sequence[Answers]], reference: Mapping[int, Answers]
) -> None:
    """Check that the answers before any transfer differ from the reference in every tensor, and in some log-prob.

    Two kinds of tensors may agree. Later ranks may hold only padding rows of the vocabulary, which are the same in
    every model. ``axis_map`` says which numbers of a position are rotated, and is not a weight.
    """
    for tp, answers in original.items():
        for before in answers:
            differing = set(differing_tensors(before.checksums, reference[tp].checksums))
            same = {name for name in before.checksums.keys() - differing if not _may_agree(name)}
            if same or [*before.continuations] == [*reference[tp].continuations]:
                parts = _short_list(sorted(same)) if same else "every log-prob"
                error = f"servers of tp={tp} had the reference's {parts} before any transfer"
                raise RoleFailed(f"the check cannot fail: {error}")


def _may_agree(name: str) -> bool:
    if name.endswith(".rotary_emb.axis_map"):
        return True
    is_later_rank = name.startswith("rank") and not name.startswith("rank0/")
    return is_later_rank and name.endswith(("embed_tokens.weight", "lm_head.weight"))


def table(results: Sequence[LayoutResult], tps: Sequence[int]) -> str:
    """A Markdown table: learner layouts by rollout TPs."""
    rows = [["learner", "export", *(f"rollout tp={tp}" for tp in tps)]]
    for result in results:
        cells = [result.export, *(result.served[tp] for tp in tps)]
        rows.append([result.layout, *(_short_list(cell) or "ok" for cell in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])


def _short_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{len(names)} differ: {', '.join(names[:SHOWN_NAMES])}{more}" if names else ""


# -------------------------------------------------------------------------------------------------------------
# in each rank of a learner


def send_other_weights(folder: RunFolder, config: RunConfig) -> None:
    """Load weights that no server holds, export them, and send them to all servers of the request, like a training
    run."""
    from parallel.weights.hf_files import PerturbedWeights
    from rollout.run_key import run_key
    from rollout.servers.control import SGLangControl
    from trainer.learner import Learner
    from trainer.weight_sync import WeightSync

    learner = Learner.of_policy_alone(config)
    learner.engine.load_weights(PerturbedWeights(config.model.path))
    learner.save_hf(folder.export)
    for servers in read_required(folder.request)["servers"]:
        rollout = config.rollout.model_copy(update={"tp": servers["tp"]})
        key = run_key(Path(servers["key_file"]))
        control_of = partial(SGLangControl, rollout, config.launch, key=key)
        control = control_of(servers["urls"]) if learner.is_first_rank else None
        learner.version = 0
        sync = WeightSync(learner, control, rollout, config.launch, control_of=control_of)
        result = sync.publish()
        sync.close()
        if learner.is_first_rank:
            sent = f"{result.bytes / 2**20:.1f} MiB in {result.seconds:.2f} s to rollout tp={servers['tp']}"
            print(f"    sent {sent}, probe gap {result.max_logprob_gap:.1e} nats", flush=True)
