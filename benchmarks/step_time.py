"""A whole RL step against the bare work inside it, measured side by side in one run. Target: ratio at most
1.05.

    ratio = median(step) / (median(bare generation) + median(bare update))

- step: ``trainer.loop.train`` for one step: sampling, rewards, packing, old log-probs, correction, update,
  weight broadcast, checks, metrics to metrics.jsonl, console and MLflow.
- bare generation: the prompts of that step straight to SGLang's /generate, one request with all of them per
  server and the step's sampling parameters, no log-probs, no rewards. Responses end by themselves, as in the
  step. The samples are not the step's, but come from the same weights and have about the same total length. The
  servers have just taken an update, as before the step, so they hold no prompt's keys and values.
- the same with lengths forced: every response is exactly as long as in the step, and the server does not look for
  its end. That saves work which real generation needs. Shown for comparison.
- both again immediately, while the servers still hold the prompts' keys and values. No step has that advantage.
  Shown for comparison.
- bare update: Megatron forward, backward and optimizer step of the same packed micro-batches with a plain
  negative log-likelihood. Micro-batches without signal get no backward pass, as in the step.

The step does more than the sum: the old log-prob pass, the server's log-probs, the weight broadcast and its
probe. The three alternate round by round, so a slow spell of a shared machine affects all of them; the first
round warms up and is not counted.
"""

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, line, parser, spread, write  # noqa: E402

TARGET = 1.05
NATURAL, FORCED, CACHED = "bare generation", "bare generation, lengths forced", ", prompts cached"
RATIOS = {
    "ratio": NATURAL,
    "to forced lengths": FORCED,
    "to cached prompts": NATURAL + CACHED,
    "to both": FORCED + CACHED,
}
"""The ratio's name, and the generation that the step is compared with (plus the update)."""
PARTS = ("sampling", "logprobs", "update", "sync")


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--config", type=Path, default=ROOT / "configs/recipes/countdown_tiny.yaml")
    options.add_argument(
        "--model",
        type=Path,
        help="a Hugging Face folder; a tiny model with random weights if none is given",
    )
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--rank", type=Path, help="(internal) run as one learner rank of this run folder")
    options.add_argument("override", nargs="*", help="KEY=VALUE, as for tandem train")
    given = options.parse_args()
    rounds = 3 if given.quick else given.rounds
    if given.rank:
        measure_rank(given.rank, rounds)
        return
    result = supervise(given.config, given.model, given.override, rounds)
    for name, seconds in result["seconds"].items():
        print(
            f"{name}: median {spread(seconds)['median']:.0f}"
            if name.startswith("tokens")
            else line(name, seconds)
        )
    print(
        "   ".join(f"{name} {ratio:.3f}" for name, ratio in result["ratios"].items())
        + f"   target of the first: at most {TARGET}"
    )
    write(result | {"spread": {name: spread(s) for name, s in result["seconds"].items()}}, given.json)


def supervise(config_path: Path, model: Path | None, overrides: list[str], rounds: int) -> dict:
    """Start the roles of a run, with this module in the learner's place."""
    from configs.loader import load_config, resolved_yaml
    from launch.processes import run_folder
    from launch.processes.supervisor import Supervisor
    from launch.roles import start
    from rollout.tiny_model import make_tiny_countdown_model

    with tempfile.TemporaryDirectory() as scratch:
        if model is None:
            model = Path(scratch) / "model"
            make_tiny_countdown_model(model, seed=0)
        no_extras = ["evaluation.every=0", "evaluation.at_ends=false", "checkpoint.every=0"]
        fixed = [f"model.path={model}", f"launch.runs_dir={scratch}", f"steps={rounds + 1}", *no_extras]
        config = load_config(config_path, [*fixed, *overrides])
        told = ("prompts_per_step", "group_size", "max_new_tokens", "dtype", "replicas", "tp", "server_args")
        about = announce(
            config={name: getattr(config.rollout, name) for name in told}
            | {"layout": config.layout.model_dump(), "overrides": overrides, "rounds": rounds}
        )
        folder = run_folder.create(config.launch.runs_dir, "benchmark", resolved_yaml(config))
        learn = start.role("learn", folder, config, ranks=config.layout.world_size)
        torchrun = learn.command[: learn.command.index("launch")]
        ours = ["benchmarks.step_time", "--rank", str(folder.path), "--rounds", str(rounds)]
        with Supervisor(grace_s=config.launch.stop_grace_s) as supervisor:
            start.start_sampling(supervisor, folder, config)
            supervisor.start(replace(learn, command=[*torchrun, *ours]))
            supervisor.wait_until_done("learn")
        seconds = json.loads((folder.path / "benchmark.json").read_text())
    medians = {name: spread(values)["median"] for name, values in seconds.items()}
    return {
        **about,
        "seconds": seconds,
        "ratios": {
            name: medians["step"] / (medians[generation] + medians["bare update"])
            for name, generation in RATIOS.items()
        },
        "target": TARGET,
    }


def measure_rank(path: Path, rounds: int) -> None:
    """One learner rank: step, bare generation, bare update, in turn."""
    from configs.loader import load_config
    from launch.processes.run_folder import RunFolder
    from launch.roles import learn as learning
    from trainer.loop import train

    folder = RunFolder(path)
    config = load_config(folder.config)
    run = learning.build_run(folder, config, stop_requested=lambda: None, doing=lambda part: None)
    gc.freeze()  # as learning.learn does
    watch = Watch(run.learner, run.tracker)
    seconds: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    for number in range(1, rounds + 2):
        one_step = run.config.model_copy(update={"steps": number})
        tracker = watch if run.learner.is_first_rank else None
        began = start_together()
        train(replace(run, config=one_step, first_step=number, tracker=tracker))
        step = time.perf_counter() - began
        generation = {}
        for name, forced in ((NATURAL, False), (FORCED, True))[:: 1 if number % 2 else -1]:
            run.weight_sync.send_again()  # as before the step's own generation
            start_together()
            if run.learner.is_first_rank:
                for state in ("", CACHED):
                    generation[name + state] = asyncio.run(
                        bare_generation(folder, run.config, watch.groups, forced=forced)
                    )
        began = start_together()
        bare_update(run.learner, watch.minibatches, run.config.rollout.temperature)
        start_together()
        update = time.perf_counter() - began
        run.weight_sync.send_again()  # the bare update moved the weights: the servers must hold what the learner does
        if number > 1 and run.learner.is_first_rank:
            note("step", step)
            for name, (taken, tokens) in generation.items():
                note(name, taken)
                note(f"tokens of {name}", tokens)
            note("bare update", update)
            for part in PARTS:
                note(f"  of the step: {part}", watch.metrics[f"time/{part}"])
    if run.learner.is_first_rank:
        (folder.path / "benchmark.json").write_text(json.dumps(seconds))
        run.tracker.close("FINISHED")
    learning.end_run(run)


class Watch:
    """Keeps what the last step received, trained on and logged. Logged metrics also go to the tracker."""

    def __init__(self, learner, tracker):
        self._tracker = tracker
        self._receive, self._update = learner.receive, learner.update
        learner.receive, learner.update = self.receive, self.update

    def receive(self, groups):
        self.groups, self.minibatches = groups, []
        return self._receive(groups)

    def update(self, minibatch, *, policy):
        self.minibatches.append(minibatch)
        return self._update(minibatch, policy=policy)

    def log(self, step, metrics):
        self.metrics = metrics
        self._tracker.log(step, metrics)

    def __getattr__(self, name):
        return getattr(self._tracker, name)


def start_together() -> float:
    import torch.distributed as dist

    dist.barrier()
    return time.perf_counter()


def bare_update(learner, minibatches, temperature: float) -> None:
    num_tokens = sum(int(part.response_mask_T.sum()) for minibatch in minibatches for part in minibatch)
    scale = 1.0 / max(1, num_tokens)

    def loss_fn(microbatch, logprobs_T, entropy_T):
        return -(logprobs_T * microbatch.response_mask_T).sum() * scale, None

    for minibatch in minibatches:
        skips = learner.have_no_gradient(minibatch)
        learner.engine.update(minibatch, loss_fn, temperature=temperature, forward_only=skips)


async def bare_generation(folder, config, groups, *, forced: bool) -> tuple[float, int]:
    """(seconds, tokens) of one batched /generate per server for the step's prompts. ``forced``: each response has
    its length in the step."""
    import aiohttp

    from launch.processes.placement import serve_roles
    from launch.processes.run_folder import read_servers
    from rollout.tokenization import end_token_ids, load_tokenizer

    stop_token_ids = end_token_ids(load_tokenizer(config.model.path), config.model.path)
    urls = read_servers(folder, serve_roles(config))
    samples = [t for g in groups for t in g.trajectories]

    def parameters(sample) -> dict:
        length = {"max_new_tokens": config.rollout.max_new_tokens, "stop_token_ids": stop_token_ids}
        if forced:
            length = {"max_new_tokens": int(sample.response_mask.sum()), "ignore_eos": True}
        return {"temperature": config.rollout.temperature} | length

    def body(part):
        return {
            "input_ids": [s.token_ids[~s.response_mask].tolist() for s in part],
            "sampling_params": [parameters(s) for s in part],
        }

    async def post(session, url, part):
        async with session.post(f"{url}/generate", json=body(part)) as answer:
            answer.raise_for_status()
            return await answer.json()

    headers, deadline = folder.run_key().http_headers, aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=deadline, headers=headers) as session:
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(post(session, url, samples[i :: len(urls)]) for i, url in enumerate(urls))
        )
        seconds = time.perf_counter() - began
    return seconds, sum(one["meta_info"]["completion_tokens"] for answer in answers for one in answer)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
