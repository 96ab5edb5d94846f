"""Rewards of responses. ``Scorer`` is the one entrance; rule-based rewards are pure functions."""

from rollout.rewards.arithmetic import countdown_reward
from rollout.rewards.scorer import Scorer, check_reward, may_read_rows
from rollout.rewards.served import RewardModelError
from rollout.rewards.worker import WorkerStartError

__all__ = [
    "RewardModelError",
    "Scorer",
    "WorkerStartError",
    "check_reward",
    "countdown_reward",
    "may_read_rows",
]
