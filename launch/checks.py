"""What is checked before anything starts: the config against its model, its files and this machine."""

from collections.abc import Sequence
from pathlib import Path

from configs.loader import load_config
from configs.schema import RunConfig, SftConfig
from configs.schema.rollout import RolloutConfig
from configs.schema.run import JsonlSftData
from configs.schema.task import CountdownTask
from parallel.layout import check_critic_vocabulary, read_hf_config, validate_layout, validate_rollout_layout


class BadInput(Exception):
    """An argument that cannot be honoured; nothing was started. (What is wrong inside a config is a ConfigError.)"""


def load(path: Path, overrides: Sequence[str], kind: type) -> RunConfig | SftConfig:
    """Everything that can be known before a process is started is checked here."""
    notes: list[str] = []
    config = load_config(path, overrides, files=True, notes=notes)
    if config.layout.dp == "auto":
        notes.clear()  # the same again
        config = load_config(path, [*overrides, _data_parallel_size(config)], files=True, notes=notes)
    for note in notes:
        print(f"# {note}", flush=True)
    if not isinstance(config, kind):
        wanted = kind.model_fields["kind"].default or "sft"
        raise BadInput(f"{path}: kind: {config.kind} is a config for `tandem {config.kind}`; this command takes kind: {wanted}")
    try:
        hf_config = read_hf_config(config.model.path)
        validate_layout(hf_config, config.layout)
        if isinstance(config, RunConfig):
            _check_critic(config, hf_config)
            _check_rollout(config, hf_config)
        else:
            _check_sft(config)
    except ValueError as error:
        raise BadInput(f"{path}: {error}") from error
    return config


def _data_parallel_size(config: RunConfig | SftConfig) -> str:
    """An override for ``layout.dp=auto``: as few copies of the model as ep allows without GPUs, else as many as fit beside the servers."""
    size = config.layout.smallest().world_size
    of_servers = config.rollout.replicas * config.rollout.tp if isinstance(config, RunConfig) else 0
    free = gpus_here() - of_servers
    return f"layout.dp={config.layout.resolved(max(free - free % size, size)).dp}"


def gpus_here() -> int:
    """GPUs that this process may use; 0 means that everything runs on CPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0  # without the seconds that importing torch takes
    from rollout.sglang_server import visible_gpus

    return visible_gpus()


def check_gpus(where: Path | str, *, learner: int, servers: RolloutConfig | None = None) -> None:
    """Whether each of ``learner`` ranks and each rank of the servers has a GPU of its own, where there are any. Raises BadInput."""
    available = gpus_here()
    if not available:
        return
    try:
        if servers is None:
            check_learner_gpus(learner, available)
        else:
            from rollout import sglang_server

            sglang_server.check_gpus(servers, first_gpu=learner, available=available)
    except ValueError as error:
        raise BadInput(f"{where}: {error}") from error


def check_learner_gpus(needed: int, available: int) -> None:
    """Of a learner without servers beside it. Raises ValueError."""
    if needed > available:
        raise ValueError(
            f"the layout takes {needed} GPUs, but {available} are visible here; use a smaller one, or make more visible "
            "(CUDA_VISIBLE_DEVICES)"
        )


def _check_sft(config: SftConfig) -> None:
    if config.output.exists():
        raise ValueError(f"output: {config.output} exists already; name a new folder, or remove it first")
    if isinstance(config.data, JsonlSftData):
        from rollout.tasks import read_pairs

        read_pairs(config.data.path, config.data.prompt_field, config.data.response_field)


def _check_critic(config: RunConfig, hf_config: dict) -> None:
    if config.critic is None or config.critic.model is None:
        return
    of_critic = read_hf_config(config.critic.model.path)
    validate_layout(of_critic, config.layout)
    check_critic_vocabulary(of_critic, hf_config)


def _check_rollout(config: RunConfig, hf_config: dict) -> None:
    """Imports only what the config uses: the answer must come within seconds."""
    from rollout.sglang_command import check_server_args, choose_ports

    validate_rollout_layout(hf_config, config.rollout.tp)
    check_server_args(config.rollout)
    if config.rollout.first_port is not None and config.launch.nodes is None:
        choose_ports(range(config.rollout.replicas), config.rollout.first_port)
    if not isinstance(config.task, CountdownTask):
        from rollout.tasks import check_task_files

        check_task_files(config.task)
    if config.reward_type.type not in ("countdown", "gsm8k"):
        from rollout.rewards import check_reward

        check_reward(config.reward_type)
