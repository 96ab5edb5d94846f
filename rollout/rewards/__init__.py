"""Rewards of responses. The entry point is ``Scorer`` (``scorer.py``). Rule-based rewards are pure
functions.

This file imports no more, because the processes of rewards import the package too. They need neither the
config's schema nor HTTP."""

from rollout.rewards.arithmetic import countdown_reward

__all__ = ["countdown_reward"]
