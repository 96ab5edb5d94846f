"""Who has the devices: the learner or the servers, where they share them (``launch.placement: colocated``).

    turn                        servers' weights   their cache   learner
    SERVERS   sampling                there           there      in host memory
    BOTH      transfer, probe         there             -        there
    LEARNERS  score, update             -               -        there

From the learner's turn to that of both the servers' weights come back as memory that holds anything: they are
sent anew (each step does).

CUDA graphs of the servers stay where they are: they are small beside weights and cache, and refer to these by
addresses, which SGLang's memory saver keeps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

import torch.distributed as dist

from parallel.megatron import platform
from rollout.servers.control import SGLangControl
from trainer.learner import Learner
from trainer.ranks.interruption import Postponed
from trainer.ranks.totals import on_first_rank

CACHE, WEIGHTS = "kv_cache", "weights"


class OwnDevices:
    """Learner and servers have devices of their own: nobody waits for a turn."""

    are_shared = False

    def learners(self) -> None:
        """The learner's turn: it is there, and has all memory."""

    def both(self) -> None:
        """The turn of both: learner and servers' weights are there, and nothing is sampled."""

    def servers(self) -> None:
        """The servers' turn: they sample. Not right after the learner's: their weights have to be sent in
        between."""

    @contextmanager
    def learner_there(self) -> Iterator[None]:
        """For what needs the learner between two requests of the servers, such as a checkpoint; then whose
        turn it was goes on."""
        yield


class _Turn(Enum):
    SERVERS = auto()
    BOTH = auto()
    LEARNERS = auto()


class SharedDevices(OwnDevices):
    """Every method is a collective, and does nothing where it is that turn already.

    A server that fails raises RolloutError on all ranks together; where it was to make room for the learner,
    the learner is there then, and the turn is its own: what is gone needs no memory.

    Args:
        control: None on all ranks but the first. Its servers have been asked to ``make_room`` before the
        learner was built.
    """

    are_shared = True

    def __init__(self, learner: Learner, control: SGLangControl | None):
        self._learner, self._control = learner, control
        self._turn = _Turn.LEARNERS

    def learners(self) -> None:
        if self._turn is _Turn.SERVERS:
            self._bring_learner(CACHE, WEIGHTS)
        elif self._turn is _Turn.BOTH:
            self._ask(lambda control: control.release_memory([WEIGHTS]))
        self._turn = _Turn.LEARNERS

    def both(self) -> None:
        if self._turn is _Turn.SERVERS:
            self._bring_learner(CACHE)
        elif self._turn is _Turn.LEARNERS:
            platform.return_free_memory()  # the update's activations are gone, but torch keeps their place
            dist.barrier()
            self._ask(lambda control: control.resume_memory([WEIGHTS]))
        self._turn = _Turn.BOTH

    def servers(self) -> None:
        if self._turn is _Turn.LEARNERS:
            raise ValueError("the servers' weights have not been sent since the learner's turn")
        if self._turn is _Turn.BOTH:
            self._learner.offload()
            self._turn = _Turn.SERVERS
            self._ask(_sample_again)

    @contextmanager
    def learner_there(self) -> Iterator[None]:
        if self._turn is not _Turn.SERVERS:
            yield
            return
        made_room = Postponed()  # a checkpoint is written all the same where the servers are gone
        made_room.attempt(self.both)
        yield
        made_room.release()
        self.servers()

    def _bring_learner(self, *tags: str) -> None:
        self._turn = _Turn.LEARNERS
        try:
            self._ask(lambda control: make_room(control, *tags))
        finally:
            self._learner.restore()

    def _ask(self, work: Callable[[SGLangControl], None]) -> None:
        on_first_rank(lambda: work(self._control))


def make_room(control: SGLangControl, *tags: str) -> None:
    """Nothing may run in what is given back: paused servers hold their requests."""
    control.pause()
    control.release_memory(tags)


def _sample_again(control: SGLangControl) -> None:
    control.resume_memory([CACHE])
    control.resume()
