"""The path of a sample, from the servers' HTTP answers to the tensors of each rank, without the servers.

Real answers of SGLang are recorded once (a tiny model with random weights, responses of ``--length`` tokens) and
replayed until ``--tokens`` response tokens have gone through the product's own functions, in one process:

- answer to trajectory: ``read_answer``, the group's trajectories, the check of their versions. This is what the
  sample role does per token, without decoding the text for the reward.
- message: encoded by the sample role, decoded by the learner's rank 0.
- trajectory to batch: the plan, the bytes of all shares, what one of the ranks reads of its own, and its packed tensors.

Targets, microseconds per token: at most 0.5 from answer to trajectory, at most 0.15 from trajectory to batch; the
same at 2 and at 16 million tokens. ``--load`` adds a process that keeps a core busy.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import orjson  # noqa: E402
import torch  # noqa: E402

from benchmarks.common import announce, parser, serving, write  # noqa: E402

GROUP_SIZE, RANKS, PROMPT_TOKENS = 8, 2, 200
PARTS = {
    "answer to trajectory": ("read", "group", "versions"),
    "message": ("encode", "decode"),
    "trajectory to batch": ("split", "send", "receive one", "pack one"),
}
TARGETS = {"answer to trajectory": 0.5, "trajectory to batch": 0.15}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--tokens", type=float, default=2e6, help="response tokens of a step")
    options.add_argument("--length", type=int, default=1024, help="tokens of a response")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--load", action="store_true", help="beside a process that keeps a core busy")
    given = options.parse_args()
    torch.set_num_threads(1)
    about = announce(
        tokens=given.tokens, length=given.length, beside="a busy core" if given.load else "nothing of ours"
    )
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as ending:
        answers = record_answers(Path(scratch), given.length)
        if given.load:
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ending.callback(busy.kill)
        gc.freeze()  # as both roles do once they have started
        rounds = [replay(answers, given) for _ in range(1 if given.quick else given.rounds)]
    result = summary(rounds)
    for name, (median, low, high) in result.items():
        target = f"   target: at most {TARGETS[name]}" if name in TARGETS else ""
        print(f"{name:<24} {median:7.3f} µs/token   ({low:.3f} - {high:.3f}){target}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"peak memory of the process {peak:.0f} MiB")
    write({**about, "us_per_token": result, "peak_mib": peak}, given.json)


def record_answers(scratch: Path, length: int) -> list[bytes]:
    """The bodies of real answers, each of one group."""
    from configs.schema import RunConfig
    from rollout.servers.answers import neutral_sampling_params
    from rollout.tiny_model import make_tiny_countdown_model

    make_tiny_countdown_model(scratch / "model", seed=0)
    config = scratch / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2 * length}))
    rollout = {"dtype": "float32", "max_total_tokens": 4 * GROUP_SIZE * length}
    spec = RunConfig(model={"path": scratch / "model"}, task={"type": "countdown"}, rollout=rollout)
    with serving(spec, scratch / "logs") as (fleet, key):
        sampling = neutral_sampling_params(max_new_tokens=length, temperature=1.0) | {"ignore_eos": True}
        bodies = []
        for first in range(2):
            ids = [[3 + first, *[4] * (PROMPT_TOKENS - 1)]] * GROUP_SIZE
            body = orjson.dumps({"input_ids": ids, "sampling_params": sampling, "return_logprob": True})
            headers = {"Content-Type": "application/json"} | key.http_headers
            request = urllib.request.Request(f"{fleet.urls[0]}/generate", body, headers)
            with urllib.request.urlopen(request, timeout=600) as response:
                bodies.append(response.read())
        return bodies


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began


def replay(answers: list[bytes], given: argparse.Namespace) -> dict[str, float]:
    """Microseconds per response token of each part."""
    from rollout.environments.episodes import Sample
    from rollout.environments.protocol import Outcome
    from rollout.environments.sequence import TokenSequence
    from rollout.records import Prompt, Score
    from rollout.sampling.messages import Groups, SamplerState, SamplingStats, decode_reply, encode
    from rollout.sampling.sampler import _check_versions, _make_group
    from rollout.servers.answers import Sent, collection_paused, read_answer
    from trainer.batch.sharing_out import share_out
    from trainer.batch.step_batch import step_batch
    from trainer.ranks.scattering import packed, unpacked

    clock, groups, num_tokens = Clock(), [], 0
    while num_tokens < given.tokens:
        number = len(groups)
        prompt = Prompt(prompt_id=str(number), token_ids=[4] * PROMPT_TOKENS, text="", reference="")
        with clock("read"), collection_paused():
            asked = Sent.of(prompt.token_ids)
            completions = read_answer(answers[number % len(answers)], GROUP_SIZE, "", asked)
        with clock("group"):
            samples = [
                Sample.of(
                    [TokenSequence.of_single_turn(prompt.token_ids, c)], Outcome.of(Score(value=float(i % 2)))
                )
                for i, c in enumerate(completions)
            ]
            groups.append(_make_group(number, prompt, samples))
        num_tokens += sum(len(c.token_ids) for c in completions)
    with clock("versions"):
        _check_versions(groups, newest=0, max_staleness=0)
    stats = SamplingStats(seconds=1.0, requests=1, retries=0, failed_rewards=0)
    with clock("encode"):
        message = encode(Groups(groups, stats, SamplerState(position=0, num_prompts=1)))
    del groups
    with clock("decode"):
        groups = decode_reply(message).groups
    with clock("split"):
        shares = share_out(groups, num_minibatches=1, dp_size=RANKS, token_budget=32768)
    with clock("send"):
        sent = [packed(share) for share in shares]
    with clock("receive one"):
        share = unpacked(*sent[0])
    with clock("pack one"):
        step_batch(share)
    return {name: seconds / num_tokens * 1e6 for name, seconds in clock.seconds.items()}


def summary(rounds: list[dict[str, float]]) -> dict[str, tuple[float, float, float]]:
    """Median, least and greatest over the rounds: of each sum of parts, then of each part."""
    result = {}
    for name, parts in PARTS.items():
        sums = sorted(sum(one[part] for part in parts) for one in rounds)
        result[name] = (sums[len(sums) // 2], sums[0], sums[-1])
        for part in parts:
            values = sorted(one[part] for one in rounds)
            result[f"  {part}"] = (values[len(values) // 2], values[0], values[-1])
    return result


if __name__ == "__main__":
    main()
