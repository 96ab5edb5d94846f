"""Checks whether a run can continue: its folder has a checkpoint, and the config is that of the same run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from configs.loader import load_config
from configs.reading.yaml_values import show
from configs.schema import RunConfig
from launch.processes.going_on import way_on
from launch.processes.run_folder import RunFolder
from parallel.checkpoints.base_model import fingerprint
from parallel.checkpoints.files import step_folders, step_of
from rollout.terminal_text import tandem_command


def resume_problems(config: RunConfig, resume: Path, say: Callable[[str], None]) -> Iterator[str]:
    """Why the run in ``resume`` cannot continue with this config. ``say`` gets notes on what could not be checked."""
    folder = RunFolder(resume)
    if not folder.config.is_file():
        yield f"resume: {resume} is not a run folder (it has no config.yaml); `tandem list` names those of runs/"
        return
    before = load_config(folder.config)
    if not isinstance(before, RunConfig):
        yield f"resume: {resume} is a run of kind {before.kind}, which saves no checkpoints; {way_on(folder, before.kind)}"
        return
    newest = folder.newest_checkpoint()
    if newest is None:
        reason = folder.damage_of_newest()
        yield f"resume: {resume} has no complete checkpoint to continue from{reason}; {way_on(folder)}"
    elif config.critic is not None and not step_folders(folder.critic_checkpoints):
        yield (
            f"resume: {resume} was trained without a critic, which advantage.type=gae needs; keep the run's own advantage, or start "
            "a new run from its exported model"
        )
    elif config.critic is not None and (newest := folder.newest_with_critic()) is None:
        yield (
            f"resume: {resume} has no step whose checkpoints of policy and critic are both complete; restore one from a copy, "
            "or start a new run from the run's exported model"
        )
    if newest is not None and config.steps < (done := step_of(newest) or 0):
        yield f"resume: {resume} has done {done} steps, more than steps={config.steps}; give steps={done} or more"
    if changed := _changed_adapters(before, config):
        yield f"resume: {resume} was trained {changed}"
    for field, old, new in _changed_fields(before, config):
        yield (
            f"resume: `{field}` of {resume} is {show(old)}, but {show(new)} was given; "
            f"resume with `{tandem_command('resume', resume)}`, or start a new run"
        )
    old_models, new_models = ({"model": each.model, **each.other_models} for each in (before, config))
    for field in [name for name in old_models if name in new_models]:
        yield from _check_moved_model(field, old_models[field].path, new_models[field].path, resume, say)


def _changed_fields(before: RunConfig, config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """(field, value of the run, value now) of all settings that would make it another run. The model may have moved."""
    old_parts, new_parts = map(_parts_compared, (before, config))
    for part in [name for name in old_parts if name in new_parts]:
        old, new = old_parts[part], new_parts[part]
        fields = {part: (old, new)}
        if isinstance(old, dict) and isinstance(new, dict) and old.get("type") == new.get("type"):
            fields = {f"{part}.{name}": (old[name], new[name]) for name in new}
        yield from (
            (field, *both)
            for field, both in fields.items()
            if both[0] != both[1] and not field.endswith("model.path")
        )
    # Its state on disk has another form, or lacks parameters.
    for block in ("learner", "critic"):
        old, new = (getattr(each, block) for each in (before, config))
        if old and new and old.optimizer.distributed != new.optimizer.distributed:
            yield f"{block}.optimizer.distributed", old.optimizer.distributed, new.optimizer.distributed
    if before.learner.freeze_router != config.learner.freeze_router:
        yield "learner.freeze_router", before.learner.freeze_router, config.learner.freeze_router


def _parts_compared(config: RunConfig) -> dict[str, Any]:
    """Plain values by field. A critic has a model if there is a critic; another check reports an added or removed critic."""
    whole = config.model_dump(mode="json", include={"seed", "model", "task", "kl", "critic"})
    parts = {part: whole[part] for part in ("seed", "model", "task")} | {"kl.model": whole["kl"]["model"]}
    return parts | ({"critic.model": whole["critic"]["model"]} if whole["critic"] else {})


def _check_moved_model(
    field: str, old: Path, new: Path, resume: Path, say: Callable[[str], None]
) -> Iterator[str]:
    """The policy's weights come from the checkpoint. Weights that are read from the model's folder, such as those of ``ref``,
    must be the ones that the run began with."""
    weights = _weights_of(new)
    if old == new or weights is None:  # another check reports missing files of the model
        return
    before = _weights_of(old)
    if before is None:
        say(f"the weights of {old}, the {field} of {resume}, are not here: those in {new} may be others")
    elif before != weights:
        yield (
            f"resume: `{field}.path` of {resume} is {old}, but the weights in {new} differ; give the same model, or start "
            "a new run"
        )


def _weights_of(folder: Path) -> str | None:
    """The fingerprint of a model's weights; None if none can be read."""
    try:
        return fingerprint(folder) if any(folder.glob("*.safetensors")) else None
    except OSError:
        return None


def _changed_adapters(before: RunConfig, config: RunConfig) -> str:
    """How the run was trained if its adapters differ from the config's, and the fix; empty if they are equal. The forward
    pass may change."""
    old, new = before.learner.lora, config.learner.lora
    if old is None or new is None:
        how = "without adapters" if old is None else f"with learner.lora: {{rank: {old.rank}}}"
        differ = old is not new
    else:
        names = [name for name in ("rank", "alpha") if getattr(old, name) != getattr(new, name)]
        names += ["targets"] if set(old.targets) != set(new.targets) else []
        how = "with " + ", ".join(f"learner.lora.{name}={getattr(old, name)!r}" for name in names)
        differ = bool(names)
    return f"{how}; keep its learner.lora, or start a new run from its exported model" if differ else ""
