"""``--dry-run``: describes a run. Processes, data, batch, memory and the weights that are sent come first, as
comments; then the resolved config.

The output can be used as a config. A terminal gets only the facts, since the config's 150 lines would scroll them out
of sight. Everything follows from the config, the models' config.json and the task's files; nothing is started,
and no engine is imported.
"""

import sys
from collections.abc import Iterator, Sequence

from configs.errors import counted
from configs.loader import resolved_yaml
from configs.schema import AnyConfig, RunConfig, SftConfig
from configs.schema.environment import AgentEnvironment, OpenEnvironment, ProcessEnvironment
from configs.schema.layout import LayoutConfig
from configs.schema.task import CountdownTask
from launch.checks.device_memory import memory_lines
from launch.checks.devices import Device, device_of
from launch.checks.disk_space import disk_lines
from launch.checks.inputs import survey_of
from launch.processes import placement
from launch.processes.run_folder import RunFolder
from launch.roles.command_line import MEGATRON_ROLES, Rendezvous, role_command
from launch.tables import aligned, indented
from parallel.planning.adapters import adapter_parameters
from parallel.planning.architecture import architecture_of
from parallel.planning.memory import size_text, stage_parameters
from parallel.planning.traffic import bytes_to_send
from rollout.servers import kept_sets
from rollout.servers.routing import bytes_per_token

FREE_PORT = "a free port"
NO_ERROR = "no error was found: all checks before a start have passed, and nothing was started"
Row = tuple[str, ...]


def print_dry_run(
    config: AnyConfig,
    runs: Sequence[str],
    gpu_memory: float | None = None,
    *,
    in_job: bool = False,
    further: Sequence[str] = (),
) -> None:
    """``config``: from ``load_checked`` for the roles ``runs`` (``TRAINING``, ...).

    gpu_memory: GiB of each GPU, for other machines. in_job: the run is for a Slurm job's nodes. further: lines that
    follow the other facts.
    """
    device = device_of(config, gpu_memory, in_job=in_job)
    for line in [*dry_run_lines(config, runs, device), *further]:
        print(f"# {line}".rstrip())
    if sys.stdout.isatty():
        print("\nFor the whole config with defaults send the output to a file (> FILE) or a pager (| less).")
        print(NO_ERROR)
    else:
        print(f"\n# the resolved config:\n{resolved_yaml(config)}\n# {NO_ERROR}")


def dry_run_lines(config: AnyConfig, runs: Sequence[str], device: Device) -> Iterator[str]:
    titles = ("role", "node", "ranks", "devices", "address")
    yield "processes that would be started:"
    yield from indented(aligned([titles, *_process_rows(config, runs, device)]))
    yield from ("", "commands:", *indented(_command_lines(config, runs)))
    if data := list(_data_rows(config)):
        yield from ("", "data:", *indented(aligned(data)))
    if "sample" in runs and isinstance(config, RunConfig) and (lines := [*_environment_lines(config)]):
        yield from ("", "environment:", *indented(lines))
    if "learn" in runs or "sft-rank" in runs:
        yield from ("", "batch of one step:", *indented(batch_lines(config)))
    yield ""
    yield from memory_lines(config, device, runs)
    if "learn" in runs or "sft-rank" in runs:
        yield from ("", *disk_lines(config))
    if "learn" in runs and isinstance(config, RunConfig):
        yield from ("", *_transfer_lines(config))


def _environment_lines(config: RunConfig) -> Iterator[str]:
    environment = config.environment
    if environment.type == "single_turn":
        return
    at_once = environment.max_concurrency
    if isinstance(environment, ProcessEnvironment):
        from rollout.environments.processes import max_processes

        at_once = max_processes(environment)
    if isinstance(environment, AgentEnvironment):
        behind = f", forked behind {', '.join(environment.preload)}" if environment.preload else ""
        yield f"a process per episode: {' '.join(environment.command)}{behind}"
    elif isinstance(environment, OpenEnvironment):
        yield f"OpenEnv at {', '.join(environment.urls)}, {environment.interface}"
    else:
        yield f"{environment.environment}, options {environment.options}"
    most = "" if environment.max_tokens is None else f", {counted(environment.max_tokens, 'token')}"
    yield f"an episode: at most {counted(environment.max_turns, 'turn')}{most}, {environment.timeout_s:g} s; {at_once} at once"
    at_limit = environment.reward_at_limit
    yield f"where turns or tokens run out: {'not scored' if at_limit is None else f'reward {at_limit:g}'}"


# ------------------------------------------------------------------------------------------------------------------
# processes


def _process_rows(config: AnyConfig, runs: Sequence[str], device: Device) -> Iterator[Row]:
    if "serve" in runs and isinstance(config, RunConfig):
        yield from _server_rows(config, runs, device)
    if "sample" in runs and isinstance(config, RunConfig):
        where = _node(config, "learner", 0, device)
        yield "sample", where, "1 process", "CPU", FREE_PORT
        if config.rollout.router is not None:
            yield "sample: sglang-router", where, "1 process", "CPU", f"{FREE_PORT}, on this host only"
    if "learn" in runs or "sft-rank" in runs:
        yield from _learner_rows(config, device)


def _server_rows(config: RunConfig, runs: Sequence[str], device: Device) -> Iterator[Row]:
    names = placement.serve_roles(config)
    unused = 0 if "learn" in runs else min(share.first_gpu for share in placement.servers(config))
    for share in placement.servers(config):
        where = _node(config, "rollout", share.node, device)
        part = f", node {share.node_rank} of {share.num_nodes}" if share.num_nodes > 1 else ""
        role = f"{names[share.node]}: SGLang {share.replica}{part}"
        ranks = f"TP {_range(share.node_rank * share.num_ranks, share.num_ranks)} of {config.rollout.tp}"
        devices = _devices(share.first_gpu - unused, share.num_ranks, device)
        yield role, where, ranks, devices, _server_address(config, share)


def _server_address(config: RunConfig, share: placement.ServerShare) -> str:
    first = config.rollout.first_port
    if share.node_rank:
        return "that of its first node"
    meets = share.num_nodes > 1  # ranks of one node meet in a file
    if first is None:
        return "two free ports" if meets else FREE_PORT
    http = first + 2 * share.replica
    return f"port {http} (HTTP), {http + 1} (its ranks)" if meets else f"port {http}"


def _learner_rows(config: AnyConfig, device: Device) -> Iterator[Row]:
    nodes = config.launch.nodes
    name = "learn" if isinstance(config, RunConfig) else "sft-rank"
    each = placement.learner_ranks_per_node(config)
    for node in range(1 if nodes is None else nodes.learner):
        where = _node(config, "learner", node, device)
        ranks = f"{_range(node * each, each)} of {config.layout.world_size}"
        address = f"{FREE_PORT if node == 0 else 'that of its first node'} (rendezvous)"
        if nodes is None or nodes.learner == 1:
            address = "no port: its ranks meet in a file"
        yield name, where, ranks, _devices(0, each, device), address


def _node(config: AnyConfig, side: str, number: int, device: Device) -> str:
    if config.launch.nodes is None:
        return device.host
    first = 0 if side == "learner" else placement.first_server_node(config)
    return f"node {first + number} ({side} {number})"


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _devices(first: int, count: int, device: Device) -> str:
    return f"GPU {_range(first, count)}" if device.kind == "cuda" else "CPU"


def _command_lines(config: AnyConfig, runs: Sequence[str]) -> Iterator[str]:
    """A command per role, for each node that the table lists for it (is_host: for the first). Values that are
    known only at the start are in capitals."""
    fresh = config.launch.runs_dir / f"{config.name}-DATE-TIME"
    folder = RunFolder(getattr(config, "resume", None) or fresh)
    nodes = config.launch.nodes
    meeting = None
    if nodes is not None and nodes.learner > 1:
        meeting = Rendezvous(launch=config.launch, endpoint="HOST:PORT", id=folder.path.name, is_host=True)
    for name in runs:
        if name in MEGATRON_ROLES:
            ranks = placement.learner_ranks_per_node(config)
            command = role_command(name, folder, ranks=ranks, rendezvous=meeting)
        else:
            command = role_command(name, folder)
            command += ["--node", "NODE"] if name == "serve" and nodes is not None else []
        yield f"{name}: {' '.join(command)}"


# -----------------------------------------------------------------------------------------------------------------------
# data


def _data_rows(config: AnyConfig) -> Iterator[Row]:
    """The task's files, as the checks have read them."""
    if isinstance(config, SftConfig) or isinstance(config.task, CountdownTask):
        return
    for field, path in config.task.files.items():
        survey = survey_of(config.task, path)
        repeated = "" if survey.distinct == survey.count else f", {survey.distinct:,} of them distinct"
        epochs = ""
        if field == "train_path":
            epochs = f"; {config.steps * config.rollout.prompts_per_step / survey.count:.3g} epochs in steps={config.steps}"
        yield f"task.{field}", str(path), f"{counted(survey.count, 'prompt')}{repeated}{epochs}"


# ----------------------------------------------------------------------------------------------------------------------
# batch


def batch_lines(config: AnyConfig) -> Iterator[str]:
    """Prompts x siblings -> sequences -> minibatches -> ranks -> micro-batches."""
    dp = config.layout.dp_size
    if isinstance(config, SftConfig):
        size, budget = config.batch_size, config.token_budget
        per_rank = ("of a data-parallel rank", f"{size // dp} = {size} / dp {dp}")
        yield from aligned([("sequences of an optimizer step", f"{size}"), per_rank])
        yield f"micro-batches of a rank, of at most token_budget={budget} tokens: {_microbatches(config, size // dp)}"
        return
    rollout, parts = config.rollout, config.learner.minibatches
    prompts, siblings = rollout.prompts_per_step, rollout.group_size
    step, minibatch = prompts * siblings, prompts * siblings // parts
    yield from aligned([
        ("sequences of a step", f"{step} = {counted(prompts, 'prompt')} x {counted(siblings, 'sibling')}"),
        ("of an optimizer step", f"{minibatch} = {step} / {parts} minibatch{'' if parts == 1 else 'es'}"),
        ("of a data-parallel rank", f"{minibatch // dp} = {minibatch} / dp {dp}"),
    ])  # fmt: skip
    yield from _rollout_lines(config)
    yield from _learner_lines(config)
    yield from _microbatch_lines(config, minibatch // dp)


def _rollout_lines(config: RunConfig) -> Iterator[str]:
    rollout, sampling = config.rollout, config.rollout.dynamic_sampling
    if ahead := rollout.max_staleness:
        samples = f"up to {rollout.most_samples} samples of {counted(1 + ahead, 'step')}"
        places = f"{min(rollout.most_samples, rollout.max_concurrency)} of them at the servers"
        yield f"rollout.max_staleness={ahead}: {samples} are under way, {places}; no token lags by more than {counted(ahead, 'version')}"
    if rollout.stop:
        texts = " or ".join(map(repr, rollout.stop))
        yield f"rollout.stop: every turn also ends with the token that completes {texts}, for which servers load the tokenizer"
    if rollout.rounding:
        yield f"rollout.precision={rollout.precision}: {rollout.rounding}"
    if sampling.type != "none":
        rounds = sampling.max_rounds
        most = f"at most {rounds * rollout.prompts_per_step} prompts, in {counted(rounds, 'round')}"
        yield f"dynamic sampling: {most}, until enough groups carry a signal"


def _learner_lines(config: RunConfig) -> Iterator[str]:
    rollout, lora, routing = config.rollout, config.learner.lora, config.learner.routing
    architecture = architecture_of(config.model.path)
    tokens = rollout.prompts_per_step * rollout.group_size * rollout.max_new_tokens
    if lora is not None:
        one = LayoutConfig()
        trained = adapter_parameters(architecture, one, lora)
        frozen = sum(stage_parameters(architecture, one, 0))
        share = f"{trained:,} numbers are trained, {trained / frozen:.2%} of the model's {frozen:,}, which are frozen"
        yield (
            f"learner.lora: rank {lora.rank} on {', '.join(lora.targets)}: {share}; the forward pass is {lora.forward}, and servers get "
            "merged weights"
        )
    if routing != "own":
        assert architecture.experts is not None  # checked before
        each, held = bytes_per_token(architecture.experts), tokens
        where = "from the servers to the learner's first rank"
        if routing == "old":
            held //= config.layout.dp_size
            where = "on every rank of the learner, on the device in the pass of old and in host memory until the update,"
        yield (
            f"learner.routing={routing}: {each} bytes of experts per token of prompts and responses, so {size_text(each * held)} {where} "
            "if every response has full length"
        )
    if rollout.is_truncated:
        each = kept_sets.bytes_per_token(rollout.top_k)
        yield (
            f"rollout.top_k={rollout.top_k}: at most {each} bytes of kept ids per response token, so {size_text(each * tokens)} from the "
            "servers to the learner's first rank if every response has full length; fewer with top_p or min_p. Each rank then holds its "
            f"share twice in host memory, {size_text(2 * each * tokens // config.layout.dp_size)}: packed, and in micro-batches"
        )


def _microbatch_lines(config: RunConfig, each: int) -> Iterator[str]:
    """A sequence takes one place less than its number of tokens, since the last token predicts nothing."""
    budget, response = config.learner.token_budget, config.rollout.max_new_tokens
    full = _up_to(-(-each * response // budget), config.layout.microbatch_multiple)
    yield f"micro-batches of a rank, of at most learner.token_budget={budget} tokens: {_microbatches(config, each)}"
    yield f"  at least {full} if every response has rollout.max_new_tokens={response}"
    prompt, source = _longest_prompt(config)
    longest = prompt + response - 1
    if longest <= budget:
        multiple = config.layout.microbatch_multiple
        most = most_microbatches(each, longest=longest, token_budget=budget, multiple=multiple)
        yield f"  at most {most} if no prompt has more than {prompt} tokens ({source})"


def _microbatches(config: AnyConfig, sequences: int) -> str:
    return f"{config.layout.microbatch_multiple} to {sequences}, by the lengths"


def most_microbatches(sequences: int, *, longest: int, token_budget: int, multiple: int) -> int:
    """Upper bound of the micro-batches of a rank's ``sequences``, each of at most ``longest`` places.

    A micro-batch without room for a further sequence holds at least q = floor(token_budget / longest) sequences.
    First fit, which ``trainer.batch.plan.plan_batches`` falls back to, therefore needs at most
    ceil(sequences / q), rounded up to a multiple of ``multiple``, which divides ``sequences``.
    """
    return _up_to(-(-sequences // (token_budget // longest)), multiple)


def _up_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _longest_prompt(config: RunConfig) -> tuple[int, str]:
    """(most tokens of a prompt, the source of the bound). A token is at least a byte of text."""
    task = config.task
    if isinstance(task, CountdownTask):
        from rollout.tasks.countdown import prompt_text

        text = prompt_text(((task.max_number,) * task.num_numbers, task.max_target))
        return len(text) + 1, "the task's longest text"
    longest = survey_of(task, task.train_path).longest_bytes + len((task.system_prompt or "").encode())
    return longest, f"bytes of the longest of {task.train_path.name}, without the chat template"


# ---------------------------------------------------------------------------------------------------------------
# weights sent


def _transfer_lines(config: RunConfig) -> Iterator[str]:
    layout = config.layout
    stages = bytes_to_send(architecture_of(config.model.path), config.rollout, layout)
    servers = config.rollout.replicas * config.rollout.tp
    senders = f"{layout.pp} senders, one after another," if layout.pp > 1 else "one sender"
    total = f"{size_text(sum(stages))} by {senders} to {counted(servers, 'server rank')}"
    matrices = f", matrices as {config.rollout.precision}" if config.rollout.packs else ""
    yield f"weights sent after every step, as {config.rollout.dtype}{matrices}: {total}"
    ranks_per_stage = layout.world_size // layout.pp
    for stage, size in enumerate(stages):
        yield f"  learner rank {stage * ranks_per_stage} (pipeline stage {stage}): {size_text(size)}"
    yield "  every server rank receives all of it; the time depends on the network, which is unknown here"
