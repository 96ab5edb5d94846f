"""Rewards of responses. ``Scorer`` (``scorer.py``) is the one entrance; rule-based rewards are pure functions.

No more is imported here: the processes of rewards import this package too, and need neither the config's schema nor
HTTP."""

from rollout.rewards.arithmetic import countdown_reward

__all__ = ["countdown_reward"]
