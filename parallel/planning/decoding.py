"""Lengths of responses, and seconds in which a server decodes them. Pure functions of numbers, without torch.

Legend: n responses that a server decodes at once, c tokens that they have in the cache.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

SPREAD = 0.5
"""Default standard deviation of the logarithm of responses' lengths."""
_GOLDEN = (math.sqrt(5) - 1) / 2


# ---------------------------------------------------------------------------------------------------------------------
# lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of prompts and responses. All prompts are of one length."""

    prompt: int
    response: int
    """The mean, after the cut."""
    longest: int
    """Where longer responses are cut."""
    spread: float
    """Standard deviation of the logarithm of the length before the cut; 0: all are of one length."""

    def of(self, count: int) -> list[int]:
        """The lengths of ``count`` responses: quantiles of a lognormal distribution that is cut at ``longest`` and has
        the mean ``response`` then, in an order that mixes short and long ones evenly."""
        if self.spread == 0 or self.response >= self.longest:
            return [min(self.response, self.longest)] * count
        middle = math.log(lognormal_scale(self.response, self.spread, self.longest))
        normal = NormalDist()
        logs = (middle + self.spread * normal.inv_cdf((place + 0.5) / count) for place in range(count))
        return mixed([max(1, min(self.longest, round(math.exp(min(log, 40.0))))) for log in logs])


def mixed(by_size: Sequence[int]) -> list[int]:
    """The values in an order in which short and long ones alternate evenly, at all times: multiples of the golden section
    modulo 1, sorted, visit places so."""
    order = sorted(range(len(by_size)), key=lambda place: (place * _GOLDEN) % 1.0)
    values = [0] * len(by_size)
    for place, value in zip(order, by_size, strict=True):
        values[place] = value
    return values


def cut_lognormal_mean(scale: float, spread: float, cut: float) -> float:
    """The mean of min(X, cut) for X = scale exp(spread Z), Z standard normal:
    scale exp(spread^2 / 2) Phi(z - spread) + cut (1 - Phi(z)), z = log(cut / scale) / spread."""
    normal, z = NormalDist(), math.log(cut / scale) / spread
    return scale * math.exp(spread**2 / 2) * normal.cdf(z - spread) + cut * (1 - normal.cdf(z))


def lognormal_scale(mean: float, spread: float, cut: float) -> float:
    """The median of the lognormal distribution whose mean, after the cut, is ``mean``, below ``cut``. By bisection: the
    mean rises with the median, up to ``cut``."""
    low, high = math.log(mean) - 20 * spread - 20, math.log(cut) + 20 * spread + 20
    for _ in range(100):
        middle = (low + high) / 2
        if cut_lognormal_mean(math.exp(middle), spread, cut) < mean:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


# ---------------------------------------------------------------------------------------------------------------------
# decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Seconds of a step of decoding n responses with c tokens in the cache:

    fixed + each n + max(weights + experts (1 - (1 - chosen)^n) + read c, product n + pair c)

    The left side of the maximum reads memory. Of a model with experts it reads those that one of the n tokens or more
    goes to, by chance. The right side computes.
    """

    fixed_s: float
    each_s: float
    weights_s: float
    experts_s: float
    chosen: float
    """Share of a layer's experts that a token goes to."""
    read_s: float
    product_s: float
    pair_s: float

    def span_seconds(self, responses: int, cached: float, steps: int) -> float:
        """The sum of ``steps`` steps, each with n tokens more in the cache than the one before.

        Both sides of the maximum rise along a line, so that they cross once at most.
        """
        reading = self.weights_s + self.experts_s * (1 - (1 - self.chosen) ** responses)
        computing = self.product_s * responses
        read, pair = self.read_s, self.pair_s
        ahead = reading + read * cached - computing - pair * cached  # of the first step
        change = (read - pair) * responses  # of each next one
        crossing = -ahead / change if ahead * change < 0 else math.inf
        before = steps if crossing >= steps else math.floor(crossing) + 1
        reads_first = ahead > 0 or (ahead == 0 and change >= 0)
        parts = (
            (reads_first, before, cached),
            (not reads_first, steps - before, cached + before * responses),
        )
        total = steps * (self.fixed_s + self.each_s * responses)
        for reads, count, start in parts:
            base, slope = (reading, read) if reads else (computing, pair)
            total += count * (base + slope * start) + slope * responses * count * (count - 1) / 2
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Responses of one server, decoded."""

    seconds: float
    profile: tuple[tuple[float, int], ...]
    """(seconds since the beginning, responses that run from then on), wherever their number changes."""

    @property
    def mean_running(self) -> float:
        """Responses that run, over the time."""
        ends = [start for start, _ in self.profile[1:]] + [self.seconds]
        area = sum(n * (end - start) for (start, n), end in zip(self.profile, ends, strict=True))
        return area / self.seconds if self.seconds else 0.0


def decode(lengths: Sequence[int], prompt: int, places: int, decoder: Decoder) -> Decoded:
    """Responses of these lengths in their order, ``places`` at a time: when one ends, the next one begins.

    The first token of each comes from its prompt's pass: a response of L tokens takes L - 1 steps. Between two ends the
    number of responses stays, so that a stretch is one sum (``Decoder.span_seconds``).
    """
    # (step of the end, tokens in the cache at the end), the next end first
    running: list[tuple[int, int]] = []
    now = cached = next_one = 0
    seconds, profile = 0.0, []
    while next_one < len(lengths) or running:
        while next_one < len(lengths) and len(running) < places:
            steps = lengths[next_one] - 1
            next_one += 1
            if steps:
                heapq.heappush(running, (now + steps, prompt + 1 + steps))
                cached += prompt + 1
        if not running:
            break
        count, steps = len(running), running[0][0] - now
        profile.append((seconds, count))
        seconds += decoder.span_seconds(count, cached, steps)
        now, cached = now + steps, cached + count * steps
        while running and running[0][0] == now:
            cached -= heapq.heappop(running)[1]
    return Decoded(seconds=seconds, profile=tuple(profile))
