"""``--dry-run``: what a run would be. First, as comments, processes, data, batch, memory and what is sent;
then the resolved config.

The output is a config again. A terminal gets the facts alone: the config, of some 150 lines, would push them
out of sight. Everything follows from the config, the models' config.json and the task's files; nothing is
started, and no engine is imported.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

from configs.loader import resolved_yaml
from configs.schema import RunConfig, SftConfig
from configs.schema.launch import NodesConfig
from configs.schema.layout import LayoutConfig
from configs.schema.task import CountdownTask
from launch.checks.device_memory import Device, device_of, memory_lines
from launch.checks.disk_space import disk_lines
from launch.checks.inputs import survey_of
from launch.processes import placement
from launch.processes.run_folder import RunFolder
from launch.roles import table as roles
from launch.roles.table import Rendezvous
from parallel.planning.layout import read_architecture, read_hf_config
from parallel.planning.memory import size_text
from parallel.planning.planner import bytes_to_send

FREE_PORT = "a free port"
Row = tuple[str, ...]


def print_dry_run(
    config: RunConfig | SftConfig,
    runs: Sequence[str],
    gpu_memory: float | None = None,
    *,
    in_job: bool = False,
    further: Sequence[str] = (),
) -> None:
    """``config`` as ``checks.load`` gives it for the roles ``runs`` (``checks.TRAINING``, ...).

    gpu_memory: GiB of each GPU, where these are not the ones of this machine. in_job: it is to run on a Slurm
    job's nodes. further: lines of facts that follow the others.
    """
    device = device_of(config, gpu_memory, in_job=in_job)
    for line in [*dry_run_lines(config, runs, device), *further]:
        print(f"# {line}".rstrip())
    if sys.stdout.isatty():
        print(
            "\nThe whole config, defaults included: send the output to a file (> FILE) or a pager (| less)."
        )
    else:
        print(f"\n# the resolved config:\n{resolved_yaml(config)}")


def dry_run_lines(config: RunConfig | SftConfig, runs: Sequence[str], device: Device) -> Iterator[str]:
    yield "processes that would be started:"
    yield from _indented(
        _aligned([("role", "node", "ranks", "devices", "address"), *_processes(config, runs, device)])
    )
    yield from ("", "commands:", *_indented(_commands(config, runs)))
    if data := list(_data(config)):
        yield from ("", "data:", *_indented(_aligned(data)))
    if "learn" in runs or "sft-rank" in runs:
        yield from ("", "batch of one step:", *_indented(batch_lines(config)))
    yield ""
    yield from memory_lines(config, device, runs)
    if "learn" in runs or "sft-rank" in runs:
        yield from ("", *disk_lines(config))
    if "learn" in runs and isinstance(config, RunConfig):
        yield from ("", *_sent(config))


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _aligned(rows: Sequence[Row]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


# ------------------------------------------------------------------------------------------------------------------
# processes


def _processes(config: RunConfig | SftConfig, runs: Sequence[str], device: Device) -> Iterator[Row]:
    if "serve" in runs and isinstance(config, RunConfig):
        yield from _server_rows(config, runs, device)
    if "sample" in runs and isinstance(config, RunConfig):
        where = device.host if config.launch.nodes is None else _node("learner", 0, config.launch.nodes)
        yield "sample", where, "1 process", "CPU", FREE_PORT
        if config.rollout.router is not None:
            yield "sample: sglang-router", where, "1 process", "CPU", f"{FREE_PORT}, of this host alone"
    if "learn" in runs or "sft-rank" in runs:
        yield from _learner_rows(config, device)


def _server_rows(config: RunConfig, runs: Sequence[str], device: Device) -> Iterator[Row]:
    nodes, names = config.launch.nodes, placement.serve_roles(config)
    unused = 0 if "learn" in runs else min(share.first_gpu for share in placement.servers(config))
    for share in placement.servers(config):
        where = device.host if nodes is None else _node("rollout", share.node, nodes)
        part = f", node {share.node_rank} of {share.num_nodes}" if share.num_nodes > 1 else ""
        first = share.node_rank * share.num_ranks
        ranks = f"TP {_range(first, share.num_ranks)} of {config.rollout.tp}"
        devices = _devices(share.first_gpu - unused, share.num_ranks, device)
        yield (
            f"{names[share.node]}: SGLang {share.replica}{part}",
            where,
            ranks,
            devices,
            _server_address(config, share),
        )


def _server_address(config: RunConfig, share: placement.ServerShare) -> str:
    first = config.rollout.first_port
    if share.node_rank:
        return "that of its first node"
    meets = share.num_nodes > 1  # the ranks of one node meet in a file
    if first is None:
        return "two free ports" if meets else FREE_PORT
    http = first + 2 * share.replica
    return f"port {http} (HTTP), {http + 1} (its ranks)" if meets else f"port {http}"


def _learner_rows(config: RunConfig | SftConfig, device: Device) -> Iterator[Row]:
    nodes = config.launch.nodes
    name = "learn" if isinstance(config, RunConfig) else "sft-rank"
    each = placement.learner_ranks_per_node(config)
    for node in range(1 if nodes is None else nodes.learner):
        where = device.host if nodes is None else _node("learner", node, nodes)
        ranks = f"{_range(node * each, each)} of {config.layout.world_size}"
        yield name, where, ranks, _devices(0, each, device), _rendezvous_address(nodes, node)


def _rendezvous_address(nodes: NodesConfig | None, node: int) -> str:
    if nodes is None or nodes.learner == 1:
        return "no port: its ranks meet in a file"
    return f"{FREE_PORT if node == 0 else 'that of its first node'} (rendezvous)"


def _node(side: str, number: int, nodes: NodesConfig) -> str:
    """The learner's nodes are the first of a job."""
    return f"node {number if side == 'learner' else nodes.learner + number} ({side} {number})"


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _devices(first: int, count: int, device: Device) -> str:
    return f"GPU {_range(first, count)}" if device.kind == "cuda" else "CPU"


def _commands(config: RunConfig | SftConfig, runs: Sequence[str]) -> Iterator[str]:
    """On each node that the table has the role on (is_host: on the first); what is only known at the start is
    in capitals."""
    folder = RunFolder(config.launch.runs_dir / f"{config.name}-DATE-TIME")
    nodes = config.launch.nodes
    meeting = None
    if nodes is not None and nodes.learner > 1:
        timeout_s = config.launch.start_timeout_s
        meeting = Rendezvous(
            nodes=nodes.learner, endpoint="HOST:PORT", id=folder.path.name, timeout_s=timeout_s, is_host=True
        )
    for name in runs:
        if name in roles.MEGATRON_ROLES:
            command = roles.command(
                name, folder, ranks=placement.learner_ranks_per_node(config), rendezvous=meeting
            )
        else:
            command = [
                *roles.command(name, folder),
                *(["--node", "NODE"] if name == "serve" and nodes is not None else []),
            ]
        yield f"{name}: {' '.join(command)}"


# -----------------------------------------------------------------------------------------------------------------------
# data


def _data(config: RunConfig | SftConfig) -> Iterator[Row]:
    """Of files; the checks have read them."""
    if isinstance(config, SftConfig) or isinstance(config.task, CountdownTask):
        return
    for field in ("train_path", "heldout_path"):
        path = getattr(config.task, field)
        if path is None:
            continue
        survey = survey_of(config.task, path)
        repeated = "" if survey.distinct == survey.count else f", {survey.distinct:,} of them distinct"
        epochs = ""
        if field == "train_path":
            epochs = f"; {config.steps * config.rollout.prompts_per_step / survey.count:.3g} epochs in steps={config.steps}"
        yield f"task.{field}", str(path), f"{survey.count:,} prompts{repeated}{epochs}"


# ----------------------------------------------------------------------------------------------------------------------
# batch


def batch_lines(config: RunConfig | SftConfig) -> list[str]:
    """Prompts x siblings -> sequences -> minibatches -> ranks -> micro-batches."""
    dp = config.layout.dp_size
    if isinstance(config, SftConfig):
        size, budget = config.batch_size, config.token_budget
        rows = [
            ("sequences of an optimizer step", f"{size}"),
            ("of a data-parallel rank", f"{size // dp} = {size} / dp {dp}"),
        ]
        return [
            *_aligned(rows),
            f"micro-batches of a rank, of at most token_budget={budget} tokens: {_any_number(config, size // dp)}",
        ]
    rollout, parts = config.rollout, config.learner.minibatches
    prompts, siblings = rollout.prompts_per_step, rollout.group_size
    of_step, of_minibatch = prompts * siblings, prompts * siblings // parts
    rows = [
        ("sequences of a step", f"{of_step} = {prompts} prompts x {siblings} siblings"),
        ("of an optimizer step", f"{of_minibatch} = {of_step} / {parts} minibatches"),
        ("of a data-parallel rank", f"{of_minibatch // dp} = {of_minibatch} / dp {dp}"),
    ]
    return [*_aligned(rows), *_resampled(config), *_microbatches(config, of_minibatch // dp)]


def _resampled(config: RunConfig) -> list[str]:
    sampling = config.rollout.dynamic_sampling
    if sampling.type == "none":
        return []
    most = sampling.max_rounds * config.rollout.prompts_per_step
    return [
        f"dynamic sampling: at most {most} prompts, in {sampling.max_rounds} rounds, until enough groups carry a signal"
    ]


def _microbatches(config: RunConfig, each: int) -> list[str]:
    """A sequence takes one place less than its tokens: the last one predicts nothing."""
    budget, response = config.learner.token_budget, config.rollout.max_new_tokens
    full = _up_to(-(-each * response // budget), config.layout.microbatch_multiple)
    lines = [
        f"micro-batches of a rank, of at most learner.token_budget={budget} tokens: {_any_number(config, each)}",
        f"  at least {full} where every response has rollout.max_new_tokens={response}",
    ]
    prompt, source = _longest_prompt(config)
    longest = prompt + response - 1
    if longest <= budget:
        most = most_microbatches(
            each, longest=longest, token_budget=budget, multiple=config.layout.microbatch_multiple
        )
        lines.append(f"  at most {most} where no prompt has more than {prompt} tokens ({source})")
    return lines


def _any_number(config: RunConfig | SftConfig, sequences: int) -> str:
    return f"{config.layout.microbatch_multiple} to {sequences}, by the lengths"


def most_microbatches(sequences: int, *, longest: int, token_budget: int, multiple: int) -> int:
    """What a rank's ``sequences`` of at most ``longest`` places take at most, in multiples of ``multiple``,
    which divides ``sequences``.

    Each micro-batch that does not hold a further sequence has at least q = floor(token_budget / longest) of
    them, so that first fit, which ``trainer.batch.plan.plan_batches`` falls back to, needs no more than
    ceil(sequences / q).
    """
    return _up_to(-(-sequences // (token_budget // longest)), multiple)


def _up_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _longest_prompt(config: RunConfig) -> tuple[int, str]:
    """A token is at least a byte of text: (most tokens, why)."""
    task = config.task
    if isinstance(task, CountdownTask):
        from rollout.tasks.countdown import prompt_text

        return len(
            prompt_text(((task.max_number,) * task.num_numbers, task.max_target))
        ) + 1, "the task's longest text"
    around = len((task.system_prompt or "").encode())
    longest = survey_of(task, task.train_path).longest_bytes
    return longest + around, f"bytes of the longest of {task.train_path.name}, without the chat template"


# ---------------------------------------------------------------------------------------------------------------
# weights sent


def _sent(config: RunConfig) -> Iterator[str]:
    architecture = read_architecture(read_hf_config(config.model.path))
    layout: LayoutConfig = config.layout
    stages = bytes_to_send(architecture, config.rollout.dtype, layout)
    servers = config.rollout.replicas * config.rollout.tp
    by = f"{layout.pp} senders, one after another," if layout.pp > 1 else "one sender"
    yield f"weights sent after every step, as {config.rollout.dtype}: {size_text(sum(stages))} by {by} to {servers} server rank(s)"
    ranks_of_stage = layout.world_size // layout.pp
    for stage, size in enumerate(stages):
        yield f"  learner rank {stage * ranks_of_stage} (pipeline stage {stage}): {size_text(size)}"
    yield "  every server rank receives all of it; no time is given, since nothing is known here of the network"
