"""``tandem replay``, ``tandem verify-sync`` and ``tandem mismatch``, which run ``launch/studies/``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.loader import parse_config
from configs.schema import RunConfig
from launch.checks.arguments import BadInput, as_bad_input
from launch.checks.config import LoadWith, load_checked
from launch.checks.devices import gpus_here
from launch.processes.supervisor import run_to_end
from launch.roles.start import config_of, existing_run, role

if TYPE_CHECKING:
    from launch.studies.mismatch_plan import Request

HERE = "launch.nodes=null"
"""An override for studies of layouts. They run on this machine, even if the config trains on several nodes."""


def replay(run: Path, step: int, names: list[str], *, gradients: bool, plot: bool) -> None:
    folder = existing_run(run)

    from launch.studies import replay as replays
    from trainer.batch.files import recorded_steps

    with as_bad_input():
        config = config_of(folder, RunConfig)
    steps = recorded_steps(folder.batches)
    if step not in steps:
        fix = "none is recorded; train with record_batches=all or record_batches.every=N"
        fix = f"recorded are {steps}" if steps else fix
        raise BadInput(f"--step {step}: {run} has no recorded batch of this step; {fix}")
    with as_bad_input(f"RUN {run}: "):
        corrections = replays.corrections_named(folder, names)
        if gradients:
            replays.starting_weights(folder, step)
            replays.write_request(folder, step, names)
            folder.forget("replay-rank")
            count = len(corrections) + 1
            print(f"replaying {count} corrections, each with a forward and a backward pass …", flush=True)
            run_to_end(role("replay-rank", folder, config), grace_s=config.launch.stop_grace_s)
        else:
            replays.write_results(folder, config, step, corrections, with_gradients=False)
    result = replays.read_result(folder, step)
    gradient = f"gradient of the {result['gradient_of']}, cosine to `disabled`"
    print(f"step {step} of {run}; ESS of ratios and of bounded weights; {gradient}")
    print(replays.table(result), flush=True)
    if by_lag := replays.lag_table(result):
        print(
            f"\nby the age of the tokens; for each correction the mean weight, and the share that is kept\n{by_lag}",
            flush=True,
        )
    if plot:
        path = folder.figures / f"replay_step_{step:06d}.png"
        replays.plot(result, path)
        print(f"figure: {path}", flush=True)


def verify_sync(config_path: Path, overrides: list[str], learners: list[str], rollouts: list[str]) -> bool:
    """Run ``launch/studies/verify_sync.py``. Returns whether everything agreed."""
    from launch.studies import verify_sync as verification

    with as_bad_input():
        load = _loading_with_options(config_path, overrides)
        configs, tps = verification.make_plan(learners, rollouts, load, gpus=gpus_here())
    return verification.run(configs, tps)


def _loading_with_options(config_path: Path, overrides: list[str]) -> LoadWith:
    """A function that loads the config for this machine with the overrides of an option. Files are read once,
    here."""
    parsed = parse_config(config_path, [*overrides, HERE])

    def load(option: str, more: Sequence[str]) -> RunConfig:
        return load_checked(parsed.with_overrides(more, where=option), RunConfig)

    return load


def mismatch(config_path: Path, overrides: list[str], request: "Request") -> Path:
    """Run ``launch/studies/mismatch.py``. Returns the folder with the results."""
    from launch.studies import mismatch as study
    from launch.studies.mismatch_plan import make_plan

    load = _loading_with_options(config_path, overrides)
    with as_bad_input():
        plan = make_plan(request, load, gpus=gpus_here())
    return study.run(plan)
