"""``tandem verify-sync``: proves that servers which received weights by transfer serve what servers started
from those weights serve.

    servers (one fleet per rollout TP)      hold the config's model A; asked                                                  (1)
    for each learner layout:                servers set back to A, which must then be as in (1)
        verify-rank, under torchrun         loads other weights (A with noise seeded by each tensor's name), exports them, sends them
                                            the export is compared with those weights, tensor by tensor; the servers asked    (2)
    servers again, started from an export   asked                                                                             (3)

Asked are log-probs of fixed prompts, greedy continuations and SGLang's checksum of every tensor on every
rank. (2) must be (3) to the bit, for every layout and TP; (1) must differ from (3) in every tensor, or this
check could not fail. All layouts export the same, so each server starts once. Every part is a run folder of
its own inside one folder, with its config, logs and exports.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from configs.loader import resolved_yaml
from configs.schema import RunConfig
from configs.schema.layout import LayoutConfig, as_overrides, layout_text, parse_layout
from launch.checks.config import LoadWith, check_server_gpus
from launch.processes import run_folder
from launch.processes.placement import ONE_MACHINE
from launch.processes.run_folder import RunFolder, read_servers, write_json
from launch.processes.supervisor import RoleFailed, StartRole, Supervisor
from parallel.planning.layout import read_architecture, read_hf_config, validate_rollout_layout

if TYPE_CHECKING:
    from rollout.servers.control import Continuation, SGLangControl

NUM_PROMPTS = 6
CONTINUED_TOKENS = 12
SHOWN_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one server says; two that hold the same weights say the same to the bit."""

    checksums: Mapping[str, str]
    continuations: Sequence["Continuation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Of one learner layout."""

    layout: str
    export: Sequence[str]
    """What of its export is not as it must be."""
    served: Mapping[int, Sequence[str]]
    """By rollout TP, what differs after its transfer."""

    @property
    def is_good(self) -> bool:
        return not self.export and not any(self.served.values())


def make_plan(
    learners: Sequence[str], rollouts: Sequence[str], load: LoadWith, *, gpus: int
) -> tuple[dict[str, RunConfig], list[int]]:
    """The checked config of every ``--learner`` layout (or the config's own), by its name, and the rollout
    TPs. ``gpus`` are visible; 0: everything runs on CPU.

    Raises ValueError, naming the option; ConfigError for what a layout makes of the config.
    """
    asked, tps = layouts(learners), rollout_sizes(rollouts)
    configs = {text: load(f"--learner {text}", as_overrides(layout)) for text, layout in asked.items()}
    if not configs:
        of_config = load("", ())
        configs = {layout_text(of_config.layout): of_config}
    first = next(iter(configs.values()))
    if first.rollout.quantization != "none":
        raise ValueError(
            f"rollout.quantization={first.rollout.quantization}: what quantised servers hold is not what was sent, which is all that this "
            "command compares; set rollout.quantization=none"
        )
    tps = tps or [first.rollout.tp]
    largest = max(config.layout.world_size for config in configs.values())
    try:
        for number, tp in enumerate(tps):
            validate_rollout_layout(read_hf_config(first.model.path), tp)
            if gpus:  # all fleets at the same time, one after another on the GPUs
                before = largest + first.rollout.replicas * sum(tps[:number])
                check_server_gpus(first.rollout.model_copy(update={"tp": tp}), before, gpus)
    except ValueError as error:
        raise ValueError(f"--rollout: {error}") from error
    return configs, tps


def layouts(texts: Sequence[str]) -> dict[str, LayoutConfig]:
    """The ``--learner`` options, each once. Raises ValueError."""
    try:
        return {layout_text(layout): layout for layout in (parse_layout(text).smallest() for text in texts)}
    except ValueError as error:
        raise ValueError(f"--learner: {error}") from error


def rollout_sizes(texts: Sequence[str]) -> list[int]:
    """The ``--rollout`` options, ``tp=N`` each. Raises ValueError."""
    for text in texts:
        name, _, size = text.partition("=")
        if name.strip() != "tp" or not size.strip().isdecimal() or int(size) < 1:
            raise ValueError(f"--rollout {text}: write tp=N, N a whole number above 0")
    return list(dict.fromkeys(int(text.partition("=")[2]) for text in texts))


# ------------------------------------------------------------------------------------------------------- in
# the command's process


def run(configs: Mapping[str, RunConfig], tps: Sequence[int], start: StartRole) -> bool:
    """The whole proof, for learner layouts by the user's names. ``start(name, folder, config, ...)`` makes a
    role."""
    from rollout.servers.control import ControlError

    try:
        return _prove(configs, tps, start)
    except ControlError as error:
        raise RoleFailed(f"a server failed: {error}") from error


def _prove(configs: Mapping[str, RunConfig], tps: Sequence[int], start: StartRole) -> bool:
    texts, base = list(configs), next(iter(configs.values()))
    out = run_folder.create(base.launch.runs_dir, f"{base.name}-verify-sync", resolved_yaml(base)).path
    print(f"folder: {out}", flush=True)
    exports: dict[str, list[str]] = {}
    transferred: dict[tuple[str, int], list[Answers]] = {}
    first_gpu = max(config.layout.world_size for config in configs.values())
    serving = Serving(out=out, base=base, tps=tps, start=start, first_gpu=first_gpu)
    with Supervisor(grace_s=base.launch.stop_grace_s) as supervisor, ExitStack() as lines:
        controls = serving.begin(
            supervisor, lines, name="servers", model=base.model.path, replicas=base.rollout.replicas
        )
        original = {tp: _ask(control, base) for tp, control in controls.items()}
        for number, (text, config) in enumerate(configs.items(), 1):
            print(f"[{number}/{len(configs)}] learner {text}: {config.layout.world_size} rank(s)", flush=True)
            if number > 1:
                _set_back(controls, base, original)
            folder = _transfer_from(config, text, out, controls, start)
            transferred |= {(text, tp): _ask(control, base) for tp, control in controls.items()}
            exports[text] = wrong_tensors(folder.export, config)
            if number > 1:
                shutil.rmtree(
                    folder.export
                )  # it is as large as the model, and found to be the first one's equal or not
    with Supervisor(grace_s=base.launch.stop_grace_s) as supervisor, ExitStack() as lines:
        model = _learner_folder(out, texts[0]).export
        controls = serving.begin(supervisor, lines, name="reference", model=model, replicas=1)
        reference = {tp: _ask(control, base)[0] for tp, control in controls.items()}
    _check_that_it_can_fail(original, reference)
    findings = [_finding(text, exports[text], tps, transferred, reference) for text in texts]
    print(f"\n{table(findings, tps)}", flush=True)
    write_json(
        out / "result.json",
        {"findings": [{"layout": f.layout, "export": f.export, "served": f.served} for f in findings]},
    )
    return all(finding.is_good for finding in findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One fleet of servers per TP, all at the same time; on CUDA their GPUs come after the learner's."""

    out: Path
    base: RunConfig
    tps: Sequence[int]
    start: StartRole
    first_gpu: int

    def begin(
        self, supervisor: Supervisor, lines: ExitStack, *, name: str, model: Path, replicas: int
    ) -> dict[int, "SGLangControl"]:
        """Returns when all are ready."""
        from rollout.servers.control import SGLangControl

        print(
            f"{name}: starting SGLang with {', '.join(f'tp={tp}' for tp in self.tps)} on {model}", flush=True
        )
        folders = {tp: RunFolder(self.out / f"{name}-tp{tp}") for tp in self.tps}
        first_gpu = self.first_gpu
        for tp, folder in folders.items():
            self._start_fleet(supervisor, folder, tp, model, replicas, first_gpu)
            first_gpu += tp * replicas
        supervisor.wait_for(
            lambda: all(read_servers(folder, [ONE_MACHINE]) is not None for folder in folders.values()),
            what="the SGLang servers to be ready",
            timeout_s=self.base.launch.start_timeout_s,
        )
        timeout_s = self.base.launch.collective_timeout_s
        urls = {tp: read_servers(folder, [ONE_MACHINE]) for tp, folder in folders.items()}
        keys = {tp: folder.run_key() for tp, folder in folders.items()}
        return {
            tp: lines.enter_context(
                SGLangControl(urls[tp], tensor_parallel=tp, timeout_s=timeout_s, key=keys[tp])
            )
            for tp in self.tps
        }

    def _start_fleet(
        self, supervisor: Supervisor, folder: RunFolder, tp: int, model: Path, replicas: int, first_gpu: int
    ) -> None:
        rollout = self.base.rollout.model_copy(update={"tp": tp, "replicas": replicas, "first_port": None})
        served = self.base.model.model_copy(update={"path": model.resolve()})
        config = self.base.model_copy(
            update={"rollout": rollout, "model": served, "layout": LayoutConfig(dp=1)}
        )
        folder.path.mkdir()
        folder.config.write_text(resolved_yaml(config))
        write_json(folder.path / "request.json", {"first_gpu": first_gpu})
        role = self.start("serve", folder, config)
        supervisor.start(replace(role, name=f"serve ({folder.path.name})"))


def _ask(control: "SGLangControl", config: RunConfig) -> list[Answers]:
    """Of every replica."""
    prompts = fixed_prompts(read_hf_config(config.model.path)["vocab_size"])
    continuations = control.greedy(prompts, max_new_tokens=CONTINUED_TOKENS)
    return [
        Answers(checksums=c, continuations=x) for c, x in zip(control.checksums(), continuations, strict=True)
    ]


def fixed_prompts(vocab_size: int) -> list[list[int]]:
    """Of 3, 10, 17, ... tokens, each with another first token, so that no two share a cached beginning."""
    return [
        [(1 + i + 5 * j + i * j * j) % vocab_size for j in range(3 + 7 * i)]
        for i in range(min(NUM_PROMPTS, vocab_size))
    ]


def _set_back(
    controls: Mapping[int, "SGLangControl"], base: RunConfig, original: Mapping[int, Sequence[Answers]]
) -> None:
    for tp, control in controls.items():
        control.load_from_disk(base.model.path, version=0)
        for found, wanted in zip(control.checksums(), original[tp], strict=True):
            if found != wanted.checksums:
                wrong = _few(_differing(found, wanted.checksums))
                raise RoleFailed(
                    f"servers of tp={tp}, set back to {base.model.path}, are not as at their start: {wrong}"
                )


def _transfer_from(
    config: RunConfig, text: str, out: Path, controls: Mapping[int, "SGLangControl"], start: StartRole
) -> RunFolder:
    folder = _learner_folder(out, text)
    folder.path.mkdir()
    folder.config.write_text(resolved_yaml(config))
    servers = [
        {"tp": tp, "urls": control.urls, "key_file": str(control.key.file)}
        for tp, control in controls.items()
    ]
    write_json(folder.path / "request.json", {"servers": servers})
    with Supervisor(
        grace_s=config.launch.stop_grace_s
    ) as supervisor:  # the servers go on when this one's roles have ended
        supervisor.start(
            start("verify-rank", folder, config, ranks=config.layout.world_size, show_stdout=True)
        )
        supervisor.wait_until_done("verify-rank")
    return folder


def _learner_folder(out: Path, text: str) -> RunFolder:
    return RunFolder(out / f"learner-{text.replace('=', '').replace(',', '-')}")


def wrong_tensors(export: Path, config: RunConfig) -> list[str]:
    """Names of the export's tensors that are not, to the bit, the weights that the learner was given."""
    import torch

    from parallel.weights.hf_files import HuggingFaceWeights, PerturbedWeights
    from parallel.weights.hf_names import all_hf_names

    found, wanted = HuggingFaceWeights(export), PerturbedWeights(config.model.path)
    dtype = getattr(torch, config.model.dtype)
    # What the model has, not what its folder holds: that may repeat a tied embedding, or keep buffers that no
    # model needs.
    names = all_hf_names(read_architecture(read_hf_config(config.model.path)))
    return sorted(
        (found.names ^ names)
        | {n for n in found.names & names if not torch.equal(found.read(n), wanted.read(n).to(dtype))}
    )


def differences(found: Answers, wanted: Answers) -> list[str]:
    """What of ``found`` is not, to the bit, as ``wanted``: tensors by SGLang's names first, then what shows
    of them."""
    said = _differing(found.checksums, wanted.checksums)
    for i, (one, other) in enumerate(zip(found.continuations, wanted.continuations, strict=True)):
        if one.prompt_logprobs != other.prompt_logprobs:
            said.append(f"log-probs of prompt {i}")
        if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs):
            said.append(f"continuation of prompt {i}")
    return said


def _differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


def _check_that_it_can_fail(
    original: Mapping[int, Sequence[Answers]], reference: Mapping[int, Answers]
) -> None:
    """What was served before differs from the reference in every tensor, and in some log-prob.

    Of the vocabulary's rows the ranks after the first may hold padding alone, which is the same in any model:
    there they may agree.
    """
    for tp, answers in original.items():
        for before in answers:
            same = before.checksums.keys() - set(_differing(before.checksums, reference[tp].checksums))
            same = {name for name in same if not _may_be_padding(name)}
            unmoved = all(
                one == other
                for one, other in zip(before.continuations, reference[tp].continuations, strict=True)
            )
            if same or unmoved:
                what = _few(sorted(same)) if same else "every log-prob"
                raise RoleFailed(
                    f"the check cannot fail: servers of tp={tp} had the reference's {what} before any transfer"
                )


def _may_be_padding(name: str) -> bool:
    of_a_later_rank = name.startswith("rank") and not name.startswith("rank0/")
    return of_a_later_rank and name.endswith(("embed_tokens.weight", "lm_head.weight"))


def _finding(
    text: str,
    export: list[str],
    tps: Sequence[int],
    transferred: Mapping[tuple[str, int], list[Answers]],
    reference: Mapping[int, Answers],
) -> Finding:
    served = {
        tp: [x for answers in transferred[text, tp] for x in differences(answers, reference[tp])]
        for tp in tps
    }
    return Finding(layout=text, export=export, served=served)


def table(findings: Sequence[Finding], tps: Sequence[int]) -> str:
    """A Markdown table: learner layouts by rollout TPs."""
    rows = [["learner", "export", *(f"rollout tp={tp}" for tp in tps)]]
    rows += [
        [f.layout, _few(f.export) or "ok", *(_few(f.served[tp]) or "ok" for tp in tps)] for f in findings
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in rows
    ]
    return "\n".join([lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]])


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{len(names)} differ: {', '.join(names[:SHOWN_NAMES])}{more}" if names else ""


# ------------------------------------------------------------------------------------------------------- in
# each rank of a learner


def send_other_weights(folder: RunFolder, config: RunConfig) -> None:
    """Load weights that no server holds, export them, and send them to all servers of the request as a
    training run does."""
    import torch.distributed as dist

    from parallel.megatron.platform import init_distributed
    from parallel.weights.hf_files import PerturbedWeights
    from rollout.run_key import run_key
    from rollout.servers.control import SGLangControl
    from trainer.learner import Learner
    from trainer.weight_sync import WeightSync

    timeout_s = config.launch.collective_timeout_s
    init_distributed(timeout_s=timeout_s)
    learner = Learner.of_policy_alone(config)
    learner.engine.load_weights(PerturbedWeights(config.model.path))
    learner.save_hf(folder.export)
    for servers in json.loads((folder.path / "request.json").read_text())["servers"]:
        key, control = run_key(Path(servers["key_file"])), None
        if learner.is_first_rank:
            control = SGLangControl(
                servers["urls"], tensor_parallel=servers["tp"], timeout_s=timeout_s, key=key
            )
        learner.version = 0
        sync = WeightSync(
            learner, control, config.rollout.model_copy(update={"tp": servers["tp"]}), config.launch, key=key
        )
        result = sync.publish()
        sync.close()
        if learner.is_first_rank:
            gap, mib = result.max_logprob_gap, result.bytes / 2**20
            print(
                f"    sent {mib:.1f} MiB to rollout tp={servers['tp']} in {result.seconds:.2f} s, probe gap {gap:.1e} nats",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()
