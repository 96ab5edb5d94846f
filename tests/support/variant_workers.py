"""Every variant of the algorithm, two steps each, on one start of the engines: the list, and the processes
that run it.

    python -m tests.support.variant_workers MODEL     like ``tandem train``, with this module in the learner's place (torchrun, --rank RUN)

Each variant has its own learner, which starts from the model's weights. All variants share the servers, the sample
role, one run folder and one tracker. Step numbers and weight versions continue from one variant to the next.
"""

import argparse
import contextlib
import gc
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil

from configs.loader import ParsedConfig, load_config, parse_config, resolved_yaml
from configs.schema import RunConfig
from tests.support import pretend_gpu

CONFIG = Path(__file__).resolve().parents[2] / "configs/debug/variants.yaml"
SCORE = "type: function, function: 'my_reward:score'"
REWARD = (f"reward={{{SCORE}}}",)
STEPS = 2
"""Of each variant: from its starting weights, and from weights that it has moved."""
ADAPTIVE = {"target": 0.1, "horizon": 200}

NOTHING = "correction.reject=[{rule: ratio, level: sequence, lower: 0, upper: 0.5}]"
"""The same weights on both sides make every ratio 1, so no response passes."""
SOME = "correction.reject=[{rule: ratio, level: token, lower: 0, upper: 1.0}]"
"""Rounding puts the ratio of a token on either side of 1."""
TWO = "learner.minibatches=2"
KL = "kl.coefficient=0.05"
KL_IN_REWARD = (KL, "kl.place=reward")
EVERY_GROUP = "rollout.dynamic_sampling.type=none"
"""What the learner's config must say for these estimators; the sample role, started once, resamples for them
too."""
OWN = "tests.support.own_functions"
BY_SEQUENCE = "aggregation.type=sequence_mean_token_mean"

VARIANTS: dict[str, tuple[str, ...]] = {
    # With one minibatch a correction is found in the update's own forward pass, with two before the first
    # update (in bypass never).
    **{
        name: (f"correction={name}",)
        for name in (
            "decoupled_token_is", "decoupled_geo_rs", "ppo_is_bypass", "pg_rs", "disabled", "bypass_k3_rs", "pg_geo_rs_token_is",
            "pg_geo_rs_seq_is",
        )
    },
    **{f"{name}, two minibatches": (f"correction={name}", TWO) for name in ("decoupled_token_is", "ppo_is_bypass", "pg_rs", "pg_is")},
    # The other presets, each with a choice of another part of the loss, on which a correction does not depend.
    "advantage rloo, tis": ("advantage.type=rloo", "correction=tis"),
    "parts of the reward, gdpo": (
        "advantage={type: gdpo}", f"reward={{type: weighted, parts: {{digits: {{{SCORE}, weight: 0.5}}, plus: {{{SCORE}, weight: 2}}}}}}",
    ),
    "advantage opo, vanilla_is": ("advantage.type=opo", "correction=vanilla_is"),
    "advantage reinforce_pp_baseline, decoupled_geo_rs_token_is": (
        "advantage.type=reinforce_pp_baseline", "correction=decoupled_geo_rs_token_is"
    ),
    "advantage reinforce_pp, decoupled_token_icepop": ("advantage.type=reinforce_pp", EVERY_GROUP, "correction=decoupled_token_icepop"),
    "advantage gae, decoupled_geo_rs_seq_is": ("advantage.type=gae", EVERY_GROUP, "correction=decoupled_geo_rs_seq_is"),
    "advantage gae, decoupled_k3_rs, KL in reward": ("advantage.type=gae", *KL_IN_REWARD, EVERY_GROUP, "correction=decoupled_k3_rs"),
    "advantage gae, not whitened, decoupled_geo_rs, two minibatches": (
        "advantage={type: gae, gamma: 0.9, lam: 0.95, whiten: false}", "critic.value_clip=null", TWO, EVERY_GROUP,
        "correction=decoupled_geo_rs",
    ),
    "advantage grpo, no std, drop_outliers": ("advantage.normalize_by_std=false", "correction=drop_outliers"),
    "objective gspo, decoupled_k3_rs_seq_is": ("objective.type=gspo", "correction=decoupled_k3_rs_seq_is"),
    "objective gmpo, decoupled_k3_rs_token_is": ("objective.type=gmpo", "correction=decoupled_k3_rs_token_is"),
    "objective dppo, decoupled_seq_is, two minibatches": ("objective.type=dppo", "correction=decoupled_seq_is", TWO),
    "objective policy_gradient, decoupled_seq_is_rs, two minibatches": (
        "objective.type=policy_gradient", "correction=decoupled_seq_is_rs", TWO
    ),
    "clip higher, no dual clip, disabled, two minibatches": (
        "objective.clip_high=0.28", "objective.dual_clip=null", "correction=disabled", TWO
    ),
    "KL in reward, bypass, pg_is": ("correction=pg_is", *KL_IN_REWARD, "kl.estimator=k3"),
    "entropy, ppo_is": ("entropy.coefficient=0.01", "correction=ppo_is"),  # as ppo_is_bypass, whose gradient has an oracle
    "aggregation sequence_mean_token_mean, decoupled_seq_is_rs": (BY_SEQUENCE, "correction=decoupled_seq_is_rs"),
    "aggregation sequence_mean_token_sum, bypass_geo_rs": ("aggregation.type=sequence_mean_token_sum", "correction=bypass_geo_rs"),
    "aggregation over a constant, pg_token_icepop": (
        "aggregation={type: sequence_mean_token_sum_over_constant, constant: 14}", "correction=pg_token_icepop"
    ),
    "functions of the user's own": (
        f"objective={{type: function, function: '{OWN}:clipped', settings: {{clip_low: 0.2, clip_high: 0.2, dual_clip: 3.0}}}}",
        f"advantage={{type: function, function: '{OWN}:grpo', settings: {{normalize_by_std: true}}}}",
        f"correction.weight={{level: function, function: '{OWN}:truncate', settings: {{upper: 2.0}}}}",
    ),
    # Further forms of KL, with further objectives and weights.
    **{
        f"KL in loss, {name}, objective {objective}": (KL, f"kl.estimator={name}", f"objective.type={objective}", TWO)
        for name, objective in (("k1", "gspo"), ("k2", "gmpo"), ("k3", "cispo"), ("abs", "sapo"))
    },
    **{
        f"KL in loss, {name}_straight_through, {what}": (KL, f"kl.estimator={name}_straight_through", *weight)
        for name, what, *weight in (
            ("k1", "normalise, token", "correction.weight.normalise=true", "correction.weight.level=token"),
            ("k3", "normalise, sequence", "correction.weight.normalise=true", "correction.weight.level=sequence"),
            ("abs", "level segment_geometric", "correction.weight={level: segment_geometric, upper: 1.2}"),
        )
    },
    "KL in reward, fixed, old recomputed": (*KL_IN_REWARD, "learner.old_logprobs=always"),
    "KL in reward, adaptive, normalise, geometric": (
        *KL_IN_REWARD, f"kl.controller={{type: adaptive, target: {ADAPTIVE['target']}, horizon: {ADAPTIVE['horizon']}}}", TWO,
        "correction.weight={level: geometric, bound: clip, upper: 1.5, normalise: true}",
    ),
    "some rejected": (SOME,),
    "some rejected, two minibatches": (SOME, TWO),
    "some rejected, all counted": (SOME, "correction.denominator=all"),
    "some rejected, turn_mean": ("aggregation.type=turn_mean", SOME),
    "some rejected, gspo": ("objective.type=gspo", SOME),
    "some rejected, bypass": ("correction=ppo_is_bypass", SOME, TWO),
    "some rejected, policy gradient": ("correction=pg_geo_rs_token_is", SOME, BY_SEQUENCE),
    # Each comes after one that keeps something, because an alarm is printed when it begins.
    "nothing kept": (NOTHING,),
    "full recomputation of activations, decoupled_seq_is": (
        "learner.recompute=full", "correction=decoupled_seq_is", "learner.optimizer.offload=true",
    ),
    # Only adapters are trained: the reference is the policy without them.
    "KL in loss, adapters, merged": (KL, TWO, "learner.lora={rank: 4, alpha: 8}"),
    "adapters, factored": (TWO, "learner.lora={rank: 4, alpha: 8, forward: factored, targets: [qkv, fc2]}"),
    "nothing kept, two minibatches": (NOTHING, TWO),
    "normalise, segment, two minibatches": ("correction.weight={level: segment, bound: mask, upper: 3.0, normalise: true}", TWO),
    "nothing kept, policy gradient": ("correction=pg_is", NOTHING),
}  # fmt: skip


def first_step(name: str) -> int:
    return 1 + STEPS * list(VARIANTS).index(name)


@cache
def parsed_config() -> ParsedConfig:
    """The files, which all variants share."""
    return parse_config(CONFIG)


@cache
def variant_config(name: str, model: Path) -> RunConfig:
    reward = () if any(setting.startswith("reward=") for setting in VARIANTS[name]) else REWARD
    overrides = [f"model.path={model}", *reward, f"steps={first_step(name) + STEPS - 1}", *VARIANTS[name]]
    return parsed_config().with_overrides(overrides).validated()


def supervise(model: Path) -> None:
    """Start the roles of a run in ``runs/``, with this module in the learner's place, and wait for it."""
    from launch.processes import run_folder
    from launch.processes.supervisor import Supervisor
    from launch.roles import start

    config = load_config(CONFIG, [f"model.path={model}", *REWARD, f"steps={STEPS * len(VARIANTS)}"])
    folder = run_folder.create(config.launch.runs_dir, config.name, resolved_yaml(config))
    run_folder.point_latest(folder)
    learn = start.role("learn", folder, config, ranks=config.layout.world_size, show_stdout=True)
    torchrun = learn.command[: learn.command.index("launch")]
    with Supervisor(grace_s=config.launch.stop_grace_s) as supervisor:
        start.start_sampling(supervisor, folder, config)
        supervisor.start(
            replace(
                learn,
                command=[*torchrun, "tests.support.variant_workers", str(model), "--rank", str(folder.path)],
            )
        )
        supervisor.wait_until_done("learn")


def run_rank(path: Path) -> None:
    """One learner rank: every variant in turn. Writes ``variants.json``: how far the weights moved, and the memory in use and the
    operations on a pretended GPU after it."""
    pretend_gpu.use()
    from launch.processes.run_folder import RunFolder, write_json
    from launch.roles import learn as learning

    folder = RunFolder(path)
    config = load_config(folder.config)
    run = learning.build_run(folder, config, stop_requested=lambda: None, doing=lambda part: None)
    assert "transformers" not in sys.modules, "three CPU seconds of every rank's start"
    starting = dict(run.learner.engine.export_hf())
    found = {}
    with run.tracker or contextlib.nullcontext():
        for name in VARIANTS:
            trained = run_variant(name, run, folder)
            if not found:
                gc.collect()
                gc.freeze()  # as in the product: each collection below would look at all that was imported
            moved = max((trained[key] - starting[key]).abs().max().item() for key in starting)
            gc.collect()  # a model and its optimizer hold each other
            found[name] = {
                "moved": moved,
                "resident_mib": psutil.Process().memory_info().rss / 2**20,
                "device_operations": pretend_gpu.operations(),
            }
    if run.learner.is_first_rank:
        write_json(folder.path / "variants.json", found)
    learning.end_run(run)


def run_variant(name: str, run, folder) -> dict:
    """A fresh learner, published and trained; returns its weights."""
    from trainer.learner import Learner
    from trainer.loop import train
    from trainer.recording import Recorder

    config = variant_config(name, run.config.model.path)
    learner = Learner(config)
    learner.version = first_step(name) - 1
    # Not a sync of its own: the servers take as long to join a transfer group as a step does.
    run.weight_sync._learner = learner
    run.weight_sync._agreement = replace(
        run.weight_sync._agreement, samples_are_probes=config.compares_samples
    )
    run.weight_sync.send_again()
    recorder = Recorder(
        folder.batches, "all" if config.learner.minibatches == 1 else "none", config.correction
    )
    train(replace(run, config=config, learner=learner, recorder=recorder, first_step=first_step(name)))
    return {key: tensor.clone() for key, tensor in learner.engine.export_hf()}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("model", type=Path)
    options.add_argument("--rank", type=Path, help="be one learner rank of this run folder")
    given = options.parse_args()
    if given.rank:
        run_rank(given.rank)
    else:
        supervise(given.model)
