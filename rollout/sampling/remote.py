"""The learner's synchronous side of the sample role."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
import zmq

from rollout.connections import PEER_TIMEOUT_S, PeerLost, Requester
from rollout.records import Group
from rollout.run_key import RunKey
from rollout.sampling.messages import (
    Admit,
    Done,
    Drain,
    Evaluate,
    Evaluated,
    EvaluationResult,
    Failure,
    Groups,
    LoadState,
    NextGroups,
    Request,
    SampleRoleLost,
    SamplerState,
    SamplingError,
    SamplingStats,
    Stop,
    decode_reply,
    encode,
)

A = TypeVar("A", Groups, Evaluated, Done)
Find = Callable[[], Mapping[str, Any] | None]
"""What the current sample role has announced: its ``address``, and values that distinguish its process from others. None
while it starts."""
LOOK_UP_EVERY_S = 0.2
"""Interval of ``meanwhile`` during a wait for an answer."""
FIND_EVERY_S = 1.0
"""Interval at which the run folder, which may be on a shared file system, is polled for a successor."""


def _do_nothing() -> None:
    return None


class RemoteSampler(AbstractContextManager["RemoteSampler"]):
    """Client of the sample role at ``address`` (``tcp://host:port``); used by one thread.

    Every method raises SamplingError if the sample role reports a failure, or does not answer in
    ``timeout_s``. It raises SampleRoleLost if the role is gone: its process has ended, its host has been silent
    for ``peer_timeout_s``, or another process has replaced it (``find``). ``meanwhile`` is called repeatedly
    during a wait that can take minutes. An exception from it ends the wait, and the answer is dropped.

    Args:
        find: given if the role may be restarted. ``follow`` then connects to its successor, which knows nothing of earlier
            requests.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        key: RunKey,
        peer_timeout_s: float = PEER_TIMEOUT_S,
        find: Find | None = None,
    ) -> None:
        self._key, self._timeout_s, self._peer_timeout_s = key, timeout_s, peer_timeout_s
        self._find, self._process = find, find() if find is not None else None
        self._address = address if self._process is None else self._process["address"]
        self._found_at = time.monotonic()
        self._context = zmq.Context()
        self._channel: Requester | None = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._drop_channel()
        self._context.term()

    def follow(self, *, within_s: float, meanwhile: Callable[[], None] = _do_nothing) -> bool:
        """Connect to the role's successor once it has announced itself. Returns whether one did so ``within_s``.
        The lost role's own announcement may take up to ``peer_timeout_s`` to disappear."""
        if self._find is None:
            return False
        self._drop_channel()
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < within_s:
            present = self._find()
            if present is not None and present != self._process:
                self._process, self._address = present, present["address"]
                return True
            if present is not None and waited_s > self._peer_timeout_s:
                return False
            meanwhile()
            time.sleep(LOOK_UP_EVERY_S)
        return False

    def next_groups(
        self,
        count: int,
        *,
        newest: int,
        max_staleness: int,
        ahead: int = 0,
        meanwhile: Callable[[], None] = _do_nothing,
    ) -> tuple[list[Group], SamplingStats, dict[str, int]]:
        """The groups of the next ``count`` prompts, without a token older than ``newest - max_staleness``, and the
        sampler's state after them, as plain JSON values. From now on the groups of ``ahead`` further steps are sampled too."""
        reply = self._request_reply(NextGroups(count, newest, max_staleness, ahead), Groups, meanwhile)
        return reply.groups, reply.stats, msgspec.to_builtins(reply.state)

    def drain(self, within_s: float, meanwhile: Callable[[], None] = _do_nothing) -> None:
        """Return when no training sample is at the servers, or after ``within_s``. Further samples wait for the next
        request."""
        self._request_reply(Drain(within_s), Done, meanwhile)

    def admit(
        self, count: int, *, newest: int, ahead: int, meanwhile: Callable[[], None] = _do_nothing
    ) -> None:
        """After an update of the weights to version ``newest``: start the groups of the next ``count`` prompts and of
        ``ahead`` further steps. ``next_groups`` hands them out."""
        self._request_reply(Admit(count, newest, ahead), Done, meanwhile)

    def evaluate(self, meanwhile: Callable[[], None] = _do_nothing) -> EvaluationResult | None:
        """Evaluate on held-out problems; None if the task has none."""
        return self._request_reply(Evaluate(), Evaluated, meanwhile).result

    def load_state(self, state: dict[str, int] | None) -> None:
        """Continue from a state of the same seed and data; None: from the start of the data."""
        try:
            sampler_state = msgspec.convert(state, SamplerState | None)
        except msgspec.ValidationError as error:
            raise ValueError(f"{state} is not a state of the sampler: {error}") from error
        self._request_reply(LoadState(sampler_state), Done)

    def stop(self) -> None:
        """Tell the sample role to end."""
        self._request_reply(Stop(), Done)

    def _request_reply(
        self, request: Request, expected: type[A], meanwhile: Callable[[], None] = _do_nothing
    ) -> A:
        channel = self._open_channel()
        channel.send(encode(request))
        try:
            self._wait_for_answer(channel, request, meanwhile)
        except BaseException:
            self._drop_channel()  # a REQ socket cannot send while an answer is outstanding
            raise
        reply = decode_reply(channel.recv())
        if isinstance(reply, Failure):
            raise SamplingError(reply.message)
        if not isinstance(reply, expected):
            raise SamplingError(
                f"the sample role answered {type(request).__name__} with {type(reply).__name__}; are both of the same version?"
            )
        return reply

    def _wait_for_answer(self, channel: Requester, request: Request, meanwhile: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                if channel.poll(min(left_s, LOOK_UP_EVERY_S) * 1000):
                    return
            except PeerLost as error:
                raise SampleRoleLost(f"the sample role is gone: {error}") from error
            self._look_for_successor()
            meanwhile()
        raise SamplingError(
            f"the sample role at {self._address} did not answer {type(request).__name__} in {self._timeout_s:g} s, which "
            "launch.collective_timeout_s bounds; see its log"
        )

    def _look_for_successor(self) -> None:
        if self._find is None or time.monotonic() - self._found_at < FIND_EVERY_S:
            return
        self._found_at = time.monotonic()
        if self._find() not in (None, self._process):
            raise SampleRoleLost(
                f"the sample role at {self._address} is gone: another process has replaced it"
            )

    def _open_channel(self) -> Requester:
        if self._channel is None:
            self._channel = Requester(
                self._context, self._address, peer_timeout_s=self._peer_timeout_s, key=self._key
            )
        return self._channel

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
