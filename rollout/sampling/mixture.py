"""The order of a mixture: prompts of several sources in the shares of their weights. The order is an endless row of places.
Each epoch takes the next n:

    round     a fixed row of sources. With the weights as the smallest whole numbers, a source has as many places in
              it as its weight. The same round repeats, whatever the epochs
    pass      a permutation of a source's prompts, by the seed and the number of the pass. The places of a source take its
              passes one after another
"""

import heapq
import random
from collections.abc import Callable, Sequence

import numpy as np

from configs.schema.sampler import MixtureOrder

PASSES_OF_A_SEED = 256
"""Least number of prompts that one random generator shuffles, over several passes if the source is small: seeding a
generator takes as long as shuffling some dozens of prompts."""


def mixture_order(config: MixtureOrder, sources: Sequence[str], *, seed: int) -> Callable[[int], list[int]]:
    """The prompts' indices by epoch. ``sources``: the name of each prompt's source, by index.

    Raises ValueError: a source has a weight and no prompt, or prompts and no weight.
    """
    turns = dict(sorted(config.turns.items()))
    indices: dict[str, list[int]] = {name: [] for name in turns}
    for index, name in enumerate(sources):
        if name not in config.weights:
            raise ValueError(
                f"prompts of the source {name!r} are not in sampler.weights; give it a weight, 0 to leave it out"
            )
        if name in indices:
            indices[name].append(index)
    for name, of_source in indices.items():
        if not of_source:
            raise ValueError(
                f"no prompt of the source {name!r} is left, but sampler.weights names it; remove it, or add prompts of it"
            )
    in_round = source_round([*turns.values()])

    def order(epoch: int) -> list[int]:
        rounds, first = divmod(epoch * len(sources), len(in_round))
        chosen = in_round[(first + np.arange(len(sources))) % len(in_round)]
        done = np.bincount(in_round[:first], minlength=len(turns))
        result = np.empty(len(sources), np.int64)
        for number, (name, in_turn) in enumerate(turns.items()):
            places = np.flatnonzero(chosen == number)
            start = rounds * in_turn + int(done[number])
            result[places] = passes_of(indices[name], start, len(places), f"{seed} {name}")
        return result.tolist()

    return order


def source_round(turns: Sequence[int]) -> np.ndarray:
    """Numbers of the sources in the order of a round, in which source i has ``turns[i]`` places.

    A source with the share w of the round has ⌊t·w⌋ to ⌈t·w⌉ of the first t places. Its place j must
    therefore be in [⌊j / w⌋, ⌈(j + 1) / w⌉). All windows can be kept at once: spreading each source evenly
    over time keeps them in fractions, and serving the earliest end first then keeps them in whole places
    (Baruah et al. 1996, proportionate progress).
    """
    total = sum(turns)
    given, result = [0] * len(turns), np.empty(total, np.int32)
    closed = [(0, source) for source in range(len(turns))]
    opened: list[tuple[int, int]] = []
    for place in range(total):
        while closed and closed[0][0] <= place:
            _, source = heapq.heappop(closed)
            end = -(-(given[source] + 1) * total // turns[source])
            heapq.heappush(opened, (end, source))
        _, source = heapq.heappop(opened)
        result[place] = source
        given[source] += 1
        if given[source] < turns[source]:
            heapq.heappush(closed, (given[source] * total // turns[source], source))
    return result


def passes_of(indices: Sequence[int], start: int, count: int, seed: str) -> list[int]:
    """``count`` indices from the place ``start`` of a source's endless passes."""
    at_once = -(-PASSES_OF_A_SEED // len(indices))
    block, skipped = divmod(start, at_once * len(indices))
    result: list[int] = []
    while len(result) < skipped + count:
        numbers = random.Random(f"tandem mixture {seed} {block}")
        for _ in range(at_once):
            order = list(indices)
            numbers.shuffle(order)
            result += order
        block += 1
    return result[skipped : skipped + count]
