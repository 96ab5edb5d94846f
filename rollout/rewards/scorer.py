"""``Scorer``: scores responses without ever stopping a run, whatever reward code does."""

import asyncio
import importlib.util
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from configs.schema.task import RewardConfig
from rollout.records import Prompt, Score
from rollout.rewards.arithmetic import countdown_reward
from rollout.rewards.function import import_reward_function
from rollout.rewards.math_answers import gsm8k_reward
from rollout.rewards.worker import MATH_VERIFY, Job, WorkerPool

logger = logging.getLogger(__name__)

INLINE_REWARDS = {"countdown": countdown_reward, "gsm8k": gsm8k_reward}
"""Pure and quick, so they run in the event loop's own thread."""
MAX_LOGGED_ERRORS = 20
"""Failures that are logged one by one; the metrics count them all."""


def check_reward(config: RewardConfig) -> None:
    """Whether this reward can be used here, before anything is started.

    Raises:
        ValueError: the user's function cannot be imported, or math-verify is not installed.
    """
    if config.type == "function":
        import_reward_function(config.function)
    elif config.type == "math_verify" and importlib.util.find_spec("math_verify") is None:
        raise ValueError("reward.type=math_verify needs the package math-verify, which is not installed; install it or use another reward")


class Scorer:
    """Scores (prompt, response) pairs; ``close`` it, or use it as a context manager.

    Countdown and GSM8K are computed inline. math-verify and the user's function run in processes of their own, one sample at a time each,
    with ``timeout_s`` for a sample; a late or dead process is killed and replaced. Start-up and the wait for a free process do not count.
    """

    def __init__(self, config: RewardConfig, *, num_workers: int | None = None):
        self._name = config.function or config.type
        self._inline = INLINE_REWARDS.get(config.type)
        self._num_errors = 0
        if self._inline is None:
            num_workers = num_workers or max(1, min(4, (os.cpu_count() or 1) // 2))
            self._pool = WorkerPool(config.function or MATH_VERIFY, num_workers=num_workers, timeout_s=config.timeout_s)
            self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")

    async def score(self, prompt: Prompt, response_text: str) -> Score:
        """The score; where reward code failed, 0 with ``error`` saying why and for which prompt.

        Raises:
            WorkerStartError: the reward cannot be run at all in a process of its own.
            CancelledError: the scorer was closed meanwhile.
        """
        if self._inline is not None:
            score = self._score_inline(prompt, response_text)
        else:
            job = Job(prompt_text=prompt.text, response_text=response_text, reference=prompt.reference)
            score = await asyncio.get_running_loop().run_in_executor(self._threads, self._pool.call, job)
        return score if score.error is None else self._report(score, prompt)

    def _score_inline(self, prompt: Prompt, response_text: str) -> Score:
        try:
            return self._inline(prompt.reference, response_text)
        except ValueError as error:  # a reference that this reward cannot use
            return Score(value=0.0, error=f"{type(error).__name__}: {error}")

    def _report(self, score: Score, prompt: Prompt) -> Score:
        score = replace(score, error=f"reward {self._name} failed for prompt {prompt.prompt_id}: {score.error}")
        self._num_errors += 1
        if self._num_errors <= MAX_LOGGED_ERRORS:
            last = " (further failures are only counted)" if self._num_errors == MAX_LOGGED_ERRORS else ""
            logger.warning("%s; scored 0%s", score.error, last)
        return score

    def close(self) -> None:
        """End all processes; samples that are being scored raise ``CancelledError``. Safe to call twice."""
        if self._inline is None:
            self._pool.close()
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
