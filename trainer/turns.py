"""Turns of learner and servers on devices that they share (``launch.placement: colocated``).

    turn                        servers' weights   their cache   learner
    SERVERS   sampling                there           there      in host memory
    BOTH      transfer, probe         there             -        there
    LEARNERS  score, update             -               -        there

From LEARNERS to BOTH the servers' weight memory comes back with arbitrary content; each step sends the
weights again. The servers' CUDA graphs stay: they are small, and SGLang's memory saver keeps the addresses
that they refer to.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

import torch.distributed as dist

from parallel.megatron import platform
from rollout.servers.control import SGLangControl
from tracing import span
from trainer.learner import Learner
from trainer.ranks.interruption import Postponed
from trainer.ranks.totals import on_first_rank

CACHE, WEIGHTS = "kv_cache", "weights"


class OwnDevices:
    """Learner and servers have their own devices, and take no turns."""

    are_shared = False

    def give_to_learner(self) -> None:
        """The learner's turn: it is on the devices and has all memory."""

    def give_to_both(self) -> None:
        """The turn of both: learner and servers' weights are on the devices, and nothing is sampled."""

    def give_to_servers(self) -> None:
        """The servers' turn: they sample. It cannot directly follow the learner's turn, since the weights
        must be sent in between."""

    @contextmanager
    def learner_there(self) -> Iterator[None]:
        """The learner is on the devices inside, for example for a checkpoint. The turn is restored after."""
        yield


class _Turn(Enum):
    SERVERS = auto()
    BOTH = auto()
    LEARNERS = auto()


class SharedDevices(OwnDevices):
    """Every method is a collective, and does nothing if it is already that turn.

    A server that fails raises RolloutError on all ranks together. If it failed while making room, the learner
    returns to the devices and has the turn: a server that has ended needs no memory.

    control: None on all ranks but the first. Its servers must ``make_room`` before the learner is built.
    """

    are_shared = True

    def __init__(self, learner: Learner, control: SGLangControl | None):
        self._learner, self._control = learner, control
        self._turn = _Turn.LEARNERS

    def give_to_learner(self) -> None:
        if self._turn is _Turn.SERVERS:
            self._bring_learner(CACHE, WEIGHTS)
        elif self._turn is _Turn.BOTH:
            self._ask_servers(lambda control: control.release_memory([WEIGHTS]))
        self._turn = _Turn.LEARNERS

    def give_to_both(self) -> None:
        if self._turn is _Turn.SERVERS:
            self._bring_learner(CACHE)
        elif self._turn is _Turn.LEARNERS:
            platform.return_free_memory()  # torch caches the memory of the update's activations
            dist.barrier()
            self._ask_servers(lambda control: control.resume_memory([WEIGHTS]))
        self._turn = _Turn.BOTH

    def give_to_servers(self) -> None:
        if self._turn is _Turn.LEARNERS:
            raise ValueError("the servers' weights have not been sent since the learner's turn")
        if self._turn is _Turn.BOTH:
            self._learner.offload()
            self._turn = _Turn.SERVERS
            self._ask_servers(_sample_again)

    @contextmanager
    def learner_there(self) -> Iterator[None]:
        if self._turn is not _Turn.SERVERS:
            yield
            return
        made_room = Postponed()  # the checkpoint is written even if the servers are gone
        made_room.attempt(self.give_to_both)
        yield
        made_room.release()
        self.give_to_servers()

    def _bring_learner(self, *tags: str) -> None:
        self._turn = _Turn.LEARNERS
        try:
            self._ask_servers(lambda control: make_room(control, *tags))
        finally:
            self._learner.restore()

    def _ask_servers(self, work: Callable[[SGLangControl], None]) -> None:
        with span("servers' memory"):
            on_first_rank(lambda: work(self._control))


def make_room(control: SGLangControl, *tags: str) -> None:
    """Pause the servers first: nothing may run in memory that is released."""
    control.pause()
    control.release_memory(tags)


def _sample_again(control: SGLangControl) -> None:
    control.resume_memory([CACHE])
    control.resume()
