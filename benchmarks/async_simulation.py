"""Sampling ahead with 64 servers, simulated: idle time and lag by ``rollout.max_staleness``.

The pool and its rule are the product's (``rollout/sampling/pool.py``), on an event loop whose clock jumps to the
next event. Servers, learner and lengths are models:

- a server decodes up to ``SLOTS`` samples at once, each at ``TOKENS_PER_S``; a free slot takes the next sample;
- lengths are lognormal with sigma 1 and mean ``MEAN_TOKENS``, cut at ``CUT``;
- a step trains for a fixed share of the time that the servers need for its tokens at full load;
- an update of the weights interrupts every running sample: a pause, and a prefill of what it has so far.

It shows what two cores cannot: how strict order and long responses leave servers idle, and what k gives back.
``--windows`` compares strict order with a window of W groups: a step takes the first P that are finished among the
numbers m ... m + W - 1, where m is the oldest group that is not trained on. As many groups are under way as in strict
order, and a token may be up to k + ceil((W - 1) / P) versions old. The product has no such window. It is compared with
strict order whose k is this bound.
"""

import asyncio
import math
import random
import selectors
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, parser, table_head, write  # noqa: E402
from rollout.records import Group  # noqa: E402
from rollout.sampling.pool import GroupPool, ScoredGroup  # noqa: E402

SERVERS, SLOTS, TOKENS_PER_S = 64, 32, 40.0
PROMPTS, SIBLINGS = 512, 8
MEAN_TOKENS, SIGMA, CUT = 2000, 1.0, 16_384
UPDATE_S, PREFILL_TOKENS_PER_S = 4.0, 100_000.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("the simulation waits for nothing")
        self._loop.jump(max(timeout, 0.0))
        return super().select(0)


class WindowedPool:
    """Like ``GroupPool``, but a step takes the finished groups of a window of numbers."""

    def __init__(self, sample, window: int) -> None:
        self._sample, self._window = sample, window
        self._tasks: dict[int, asyncio.Task[ScoredGroup]] = {}
        self._next, self._taken = 0, list[int]()

    def admit(self, count: int, *, ahead: int) -> None:
        self._count = count
        while len(self._tasks) < count * (1 + ahead):
            self._tasks[self._next] = asyncio.ensure_future(self._sample(self._next))
            self._next += 1

    async def next_step(self) -> list[ScoredGroup]:
        while True:
            first = min(self._tasks)
            inside = [number for number in sorted(self._tasks) if number < first + self._window]
            ready = [number for number in inside if self._tasks[number].done()][: self._count]
            if len(ready) == self._count:
                self._taken = ready
                return [self._tasks[number].result() for number in ready]
            waited = [self._tasks[number] for number in inside if not self._tasks[number].done()]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)

    def hand_out(self, number: int) -> None:
        for taken in self._taken:
            del self._tasks[taken]


@dataclass(frozen=True)
class Lag:
    """Of the tokens of a trained sample: how many versions older they are than the weights that they train."""

    mean: float
    greatest: int
    tokens: float
    is_mixed: bool


@dataclass(frozen=True)
class Step:
    seconds: float
    waited_s: float
    """Seconds of waiting for the step's samples."""
    busy_slot_s: float
    lags: list[Lag]


@dataclass
class Simulated:
    """Servers with slots, and a clock of how long slots were taken."""

    k: int
    training_s: float
    seed: int
    window: int | None = None
    newest: int = 0
    busy_slot_s: float = 0.0
    steps: list["Step"] = field(default_factory=list)
    _running: dict[int, tuple[float, int]] = field(default_factory=dict)

    async def sample_group(self, number: int) -> ScoredGroup:
        versions = await asyncio.gather(*(self._sample(number, sibling) for sibling in range(SIBLINGS)))
        self._versions[number] = versions
        return ScoredGroup(
            group=Group(group_id=number, prompt_id="p", trajectories=[]),
            has_signal=True,
            failures=[],
            num_usable=SIBLINGS,
        )

    async def _sample(self, number: int, sibling: int) -> list[tuple[int, float]]:
        """(version, tokens) of each part of a sample."""
        drawn = random.Random(f"{self.seed} {number} {sibling}").gauss(
            math.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA
        )
        left = min(max(math.exp(drawn), 1.0), CUT)
        parts, done = [], 0.0
        async with self._slots:
            while left > 0:
                await self._is_open.wait()
                version, began = self.newest, asyncio.get_running_loop().time()
                if done:
                    await asyncio.sleep(done / PREFILL_TOKENS_PER_S)
                    began = asyncio.get_running_loop().time()
                update = asyncio.ensure_future(self._update.wait())
                await asyncio.wait([update], timeout=left / TOKENS_PER_S)
                update.cancel()
                elapsed = asyncio.get_running_loop().time() - began
                self.busy_slot_s += elapsed
                made = min(elapsed * TOKENS_PER_S, left)
                left, done = (left - made if left - made > 1e-6 else 0.0), done + made
                parts.append((version, made))
        return parts

    async def run(self, steps: int) -> None:
        loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(SERVERS * SLOTS)
        self._is_open, self._update = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._versions: dict[int, list] = {}
        strict = self.window is None
        pool = (
            GroupPool(self.sample_group, max_rounds=1)
            if strict
            else WindowedPool(self.sample_group, self.window)
        )
        for step in range(steps):
            began = loop.time()
            pool.admit(PROMPTS, ahead=min(self.k, steps - 1 - step))
            scored = await pool.next_step()
            pool.hand_out(len(scored))
            waited_s = loop.time() - began
            lags = [self._lag(parts) for one in scored for parts in self._versions.pop(one.group.group_id)]
            await asyncio.sleep(self.training_s)
            self._is_open.clear()
            self._update.set()
            await asyncio.sleep(UPDATE_S)
            self.newest += 1
            self._update.clear()
            self._is_open.set()
            # The update has ended every part, so the busy seconds so far are of this step and those before it.
            busy_s = self.busy_slot_s - sum(step.busy_slot_s for step in self.steps)
            self.steps.append(Step(loop.time() - began, waited_s, busy_s, lags))

    def _lag(self, parts: list[tuple[int, float]]) -> Lag:
        tokens = sum(made for _, made in parts)
        lags = [self.newest - version for version, _ in parts]
        mean = sum(lag * made for lag, (_, made) in zip(lags, parts, strict=True)) / tokens
        return Lag(mean=mean, greatest=max(lags), tokens=tokens, is_mixed=len(set(lags)) > 1)


def simulate(k: int, training_share: float, *, steps: int, seed: int, window: int | None = None) -> dict:
    """training_share: seconds of training over seconds of sampling at full load."""
    at_full_load_s = PROMPTS * SIBLINGS * MEAN_TOKENS / (SERVERS * SLOTS * TOKENS_PER_S)
    run = Simulated(k=k, training_s=training_share * at_full_load_s, seed=seed, window=window)
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(run.run(steps))
    used = run.steps[2 * k + 2 : steps - k]  # filled, and not yet running out of steps
    total_s = sum(step.seconds for step in used)
    lags = sorted((lag for step in used for lag in step.lags), key=lambda lag: lag.tokens)
    return {
        "k": k, "training_share": training_share, "step_s": total_s / len(used),
        "learner_waits": sum(step.waited_s for step in used) / total_s,
        "slots_idle": 1 - sum(step.busy_slot_s for step in used) / (SERVERS * SLOTS * total_s),
        "lag_mean": sum(lag.mean * lag.tokens for lag in lags) / sum(lag.tokens for lag in lags),
        "lag_max": max(lag.greatest for lag in lags),
        "lag_of_longest_tenth": statistics.fmean(lag.mean for lag in lags[-(len(lags) // 10) :]),
        "mixed": statistics.fmean(lag.is_mixed for lag in lags), "full_load_s": at_full_load_s,
    }  # fmt: skip


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--windows", action="store_true", help="strict order against windows")
    given = options.parse_args()
    steps = 18 if given.quick else given.steps
    about = announce(steps=steps, seed=given.seed)
    print(f"{SERVERS} servers of {SLOTS} slots, {PROMPTS} x {SIBLINGS} samples a step")
    print(
        f"{MEAN_TOKENS} tokens a sample (lognormal, sigma {SIGMA:g}, cut at {CUT:,}), {TOKENS_PER_S:g} tokens/s"
    )
    titles = [
        "training / sampling",
        "k",
        "W / P",
        "s per step",
        "of the first",
        "learner waits",
        "slots idle",
    ]
    print(table_head([*titles, "lag, mean", "of the longest tenth", "max", "mixed"]))
    rows: list[dict] = []
    grid = [(share, k, None) for share in (0.5, 1.0) for k in (0, 1, 2, 4)]
    if given.windows:
        grid = [
            (0.5, *of) for of in ((1, None), (1, 2), (2, None), (1, 3), (2, 2), (3, None), (2, 3), (4, None))
        ]
    for share, k, window in grid:
        row = simulate(k, share, steps=steps, seed=given.seed, window=window and window * PROMPTS)
        rows.append(row)
        base = next(r for r in rows if r["training_share"] == share)["step_s"]
        shown = f"{row['step_s']:.0f} | {row['step_s'] / base:.2f} | {row['learner_waits']:.0%} | {row['slots_idle']:.0%}"
        lags = f"{row['lag_mean']:.2f} | {row['lag_of_longest_tenth']:.2f} | {row['lag_max']} | {row['mixed']:.0%}"
        print(f"| {share:g} | {k} | {window or 'strict'} | {shown} | {lags} |", flush=True)
    write({**about, "rows": rows}, given.json)


if __name__ == "__main__":
    main()
