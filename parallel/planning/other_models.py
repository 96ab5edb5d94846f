"""The architectures of a run's other models, a critic and a reference from another folder, and the work with them."""

from configs.schema.run import RunConfig, SftConfig
from parallel.planning.architecture import Architecture, architecture_of
from parallel.planning.work import DeviceKind, Work, work_of


def critic_architecture(config: RunConfig | SftConfig, policy: Architecture) -> Architecture | None:
    """The policy's if the critic names no model. None: the run has no critic."""
    if not isinstance(config, RunConfig) or config.critic is None:
        return None
    model = config.critic.model
    return policy if model is None else architecture_of(model.path)


def reference_architecture(config: RunConfig | SftConfig) -> Architecture | None:
    """Of ``kl.model``. None if the reference is not another model."""
    model = config.kl.model if isinstance(config, RunConfig) else None
    return None if model is None else architecture_of(model.path)


def work_of_run(config: RunConfig | SftConfig, device: DeviceKind, policy: Architecture) -> Work:
    """``work_of`` with the run's other models, which are read from their folders."""
    return work_of(config, device, critic_architecture(config, policy), reference_architecture(config))
