"""The checks of ``tandem selftest``, in the order in which they run. Those that need a server follow each other."""

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from configs.errors import did_you_mean
from launch.checks.node import Level, checks_of_node
from launch.processes.supervisor import Role, RoleFailed
from launch.roles.start import environment
from launch.selftest.bench import Bench
from launch.selftest.check import Check, CheckFailed, Found, Machine
from launch.selftest.ranks import PARTS
from parallel.planning.memory import GIB, size_text
from rollout.servers.command import ServerSpec, server_environment
from rollout.servers.share import ServerShare

FREE_SPACE = GIB
"""Bytes. The selftest itself leaves less than a tenth of them behind."""
INSTALL = "run `bash launch/install.sh` on a node like this one"
SAME_POLICY_NATS = 1e-3
"""Allowed in float32 on any sampled token, as in every run (``trainer/engine_agreement.py``)."""
SAME_POLICY_PROBABILITY = {"float32": 1e-4, "bfloat16": 0.1}
"""Allowed on any sampled token. In bfloat16 this bounds only sanity."""


def _machine(bench: Bench) -> Found:
    free = shutil.disk_usage(bench.out).free
    if free < FREE_SPACE:
        error = f"{bench.out} has {size_text(free)} left, and runs need more than {size_text(FREE_SPACE)}"
        raise CheckFailed(error, "give a --folder on a disk with more space")
    # The address matters only between nodes, and its finding names the host.
    findings = [finding for finding in checks_of_node(None, None) if finding.check != "address"]
    wrong = [finding for finding in findings if finding.level is Level.FAIL]
    if wrong:
        fixes = [one.fix for one in wrong if one.fix]
        raise CheckFailed("; ".join(one.text for one in wrong), "; ".join(fixes))
    warnings = [f"{one.check}: {one.text}; {one.fix}" for one in findings if one.level is Level.WARN]
    sound = [one for one in findings if one.level is Level.OK and one.check in ("gpus", "limits", "/dev/shm")]
    told = [f"warning: {warning}" for warning in warnings] + [f"{one.check}: {one.text}" for one in sound]
    text = " · ".join([*told, f"disk: {free / GIB:.0f} GiB free"])
    return Found(text, {"free_bytes": free, "warnings": warnings})


def packages(machine: Machine) -> dict[str, str]:
    """By the package's name, the module whose import loads the package as the roles do."""
    modules = {"Megatron-Core": "parallel.engine", "SGLang": "sglang.srt.server_args"}
    more = {"Transformer Engine": "transformer_engine.pytorch"} if machine.has_transformer_engine else {}
    return modules | more


def _packages(bench: Bench) -> Found:
    spec = ServerSpec(config=bench.config, cuda=bench.machine.gpus > 0, key=bench.folder.run_key())
    share = ServerShare(replica=0, node=0, node_rank=0, num_nodes=1, first_gpu=0, num_ranks=1)
    environments = {"SGLang": server_environment(spec, share, 0)}
    modules = packages(bench.machine)
    for name, module in modules.items():
        log = bench.folder.path / f"{module}.log"
        command = [sys.executable, "-c", f"import {module}"]
        env = environment(bench.config) | environments.get(name, {})
        try:
            bench.run(Role(name=f"import of {name}", command=command, log=log, env=env))
        except RoleFailed as failure:
            lines = str(failure).splitlines()
            said = next((line.strip() for line in reversed(lines[:-1]) if line.strip()), lines[0])
            raise CheckFailed(f"{name} cannot be imported: {said}", INSTALL, str(failure)) from failure
    text = ", ".join(modules)
    if not bench.machine.has_transformer_engine:
        text += "; Transformer Engine is not installed, which is optional"
    return Found(text)


def _gloo(bench: Bench) -> Found:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # two ranks need two GPUs or none
    return bench.measure("collectives", ranks=2, env=hidden, backend="gloo")


def _server(bench: Bench) -> Found:
    bench.start_server()
    return Found(f"ready after {bench.seconds:.0f} s, and has sampled a token", {"start_s": bench.seconds})


def _train(bench: Bench, placement: str) -> Found:
    steps = bench.train(f"launch.placement={placement}")
    return verdict_on(steps, bench.config.steps, bench.config.model.dtype)


def verdict_on(steps: Sequence[Mapping[str, Any]], expected: int, dtype: str) -> Found:
    """The finding from a run's metrics. A value that was not finite is None. Raises CheckFailed."""
    steps = [step for step in steps if step["step"] > 0]
    if [step["step"] for step in steps] != list(range(1, expected + 1)):
        raise CheckFailed(f"the run recorded steps {[step['step'] for step in steps]}, not 1 to {expected}")
    for step in steps:
        for name in ("loss/total", "optim/grad_norm", "mismatch/abs_prob_max", "mismatch/logprob_gap_max"):
            if not isinstance(value := step.get(name), int | float) or not math.isfinite(value):
                raise CheckFailed(f"step {step['step']}: {name} is {value}, not a finite number")
        if step["optim/grad_norm"] == 0:
            raise CheckFailed(f"step {step['step']}: the gradient is zero, so nothing was trained")
        if step["sync/version"] != step["step"]:
            raise CheckFailed(f"step {step['step']}: the servers were sent version {step['sync/version']}")
    gap = max(step["mismatch/abs_prob_max"] for step in steps)
    nats = max(step["mismatch/logprob_gap_max"] for step in steps)
    allowed = SAME_POLICY_PROBABILITY[dtype]
    if gap > allowed or (dtype == "float32" and nats > SAME_POLICY_NATS):
        error = f"learner and server differ by up to {gap:.1e} in a token's probability ({nats:.1e} nats)"
        raise CheckFailed(f"{error}; in {dtype} {allowed:g} is allowed")
    rate, last = steps[-1]["throughput/tokens_per_s"], steps[-1]
    figures = {
        "max_probability_gap": gap, "max_logprob_gap_nats": nats, "tokens_per_s": rate, "step_s": last["time/step"],
        "grad_norm": last["optim/grad_norm"], "reward": last["reward/mean"], "sync_s": last["time/sync"],
    }  # fmt: skip
    text = f"{expected} steps; probabilities differ by {gap:.1e} at most; last step {last['time/step']:.2f} s, {rate:,.0f} tokens/s"
    return Found(text, figures)


def _no_two_gpus(machine: Machine) -> str | None:
    if machine.gpus == 0:
        return "no GPU"
    return None if machine.gpus > 1 else "it needs two GPUs, and this machine has one"


def _no_transformer_engine(machine: Machine) -> str | None:
    if machine.gpus == 0:
        return "no GPU; its layers run only on CUDA"
    return None if machine.has_transformer_engine else "transformer_engine is not installed (it is optional)"


def _in_rank(name: str, proves: str, seconds: float, *needs: str) -> Check:
    """A check whose work is the function of its name among ``ranks.PARTS``, on one rank."""
    part = name.replace("-", "_")
    run, is_served = partial(Bench.measure, part=part), PARTS[part] == "served"
    return Check(name, proves, run, seconds, needs=needs, uses_server=is_served)


def _of_layers(name: str, by: str, seconds: float, **more: Any) -> Check:
    proves = f"the learner's log-probs, by {by} layers, are those of transformers"
    run = partial(Bench.measure, part="logprobs", layers=name.removesuffix("-layers"))
    return Check(name, proves, run, seconds, needs=("model",), **more)


CHECKS = (
    Check("machine", "limits, shared memory, disk, drivers and versions are fit for a run", _machine, 1),
    Check("packages", "both engines can be imported", _packages, seconds=18),
    _in_rank("model", "a tiny random model is written, and read back to the bit", 10),
    Check("gloo", "every number arrives in collectives of two processes", _gloo, seconds=12),
    Check(
        "nccl",
        "every number arrives in collectives of all GPUs of this node",
        lambda bench: bench.measure("collectives", ranks=bench.machine.gpus, backend="nccl"),
        seconds=30,
        why_not_here=_no_two_gpus,
    ),
    _of_layers("local-layers", "Megatron's local", 12),
    _of_layers("transformer-engine", "Transformer Engine's", 30, why_not_here=_no_transformer_engine),
    _in_rank("update", "updates are finite, lower the loss, and repeat to the same bits", 12, "model"),
    _in_rank("memory", "model, gradients, optimizer and activations take the planned memory", 11, "model"),
    Check("server", "an SGLang server starts and answers", _server, seconds=25, needs=("model",)),
    _in_rank("engines", "a server that read the model samples with the learner's log-probs", 12, "server"),
    _in_rank("transfer", "new weights reach the server to the bit; it answers as the learner", 14, "server"),
    _in_rank("flipped-bit", "a bit that changes on the way is found, and not served", 12, "transfer"),
    _in_rank("mismatch", "the gap of the engines by cause: how far each moves a probability", 13, "engines"),
    Check(
        "train",
        "`tandem train` makes two steps; learner and server have separate devices",
        lambda bench: _train(bench, "separate"),
        seconds=45,
        needs=("model",),
        why_not_here=lambda machine: _no_two_gpus(machine) if machine.gpus else None,
    ),
    Check(
        "train-colocated",
        "`tandem train` makes two steps; learner and server take turns on the same devices",
        lambda bench: _train(bench, "colocated"),
        seconds=40,
        needs=("model",),
    ),
)


def chosen(names: Sequence[str]) -> list[Check]:
    """The checks of these names and those that they need, in their order; all if no name is given. Raises ValueError."""
    by_name = {check.name: check for check in CHECKS}
    for name in names:
        if name not in by_name:
            raise ValueError(f"--only {name}: no such check; {did_you_mean(name, [*by_name], 'checks')}")
    wanted, todo = set(), list(names or by_name)
    while todo:
        wanted.add(name := todo.pop())
        todo += by_name[name].needs
    return [check for check in CHECKS if check.name in wanted]
