"""``benchmarks/async_simulation.py`` on a case with a known answer: the learner is so slow that it never waits."""

import pytest

from benchmarks import async_simulation
from benchmarks.async_simulation import simulate


@pytest.fixture(autouse=True)
def few_servers(monkeypatch):
    for name, value in {"SERVERS": 1, "SLOTS": 4, "PROMPTS": 4, "SIBLINGS": 2}.items():
        monkeypatch.setattr(async_simulation, name, value)


@pytest.mark.parametrize("k", [0, 1])
def test_every_column_is_of_the_steps_in_the_middle(k):
    """Each sample is made whole while the step k before its own trains: a lag of exactly k, none mixed. The first
    step's has none, and would lower the mean."""
    row = simulate(k, 100.0, steps=8, seed=0)
    assert (row["lag_mean"], row["lag_max"], row["lag_of_longest_tenth"], row["mixed"]) == (k, k, k, 0)
    assert (row["learner_waits"] == 0) is bool(k)
    tokens = async_simulation.PROMPTS * async_simulation.SIBLINGS * async_simulation.MEAN_TOKENS
    busy_s = tokens / async_simulation.TOKENS_PER_S / (async_simulation.SERVERS * async_simulation.SLOTS)
    assert 1 - row["slots_idle"] == pytest.approx(busy_s / row["step_s"], rel=0.5)  # of drawn lengths
