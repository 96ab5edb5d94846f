"""What a sender of weights makes of failures: whose they are, and that the next try can begin."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from parallel.megatron import platform
from rollout.servers.control import ControlError
from trainer.stage_sender import StageSender, WeightSyncError


class Joining:
    """The servers' answer to the request to join a group."""

    def __init__(self, failure: Exception | None):
        self._failure = failure

    def raise_if_failed(self) -> None:
        """It comes when the learner has joined."""

    def wait(self) -> None:
        if self._failure is not None:
            raise self._failure


class Control:
    """Of no servers, so that a group is whole as soon as the learner is in it."""

    urls = ()

    def __init__(self, failure: Exception | None = None):
        self._failure = failure

    def join_group(self, **_unused) -> Joining:
        return Joining(self._failure)

    def leave_group(self) -> None:
        """Nobody is there."""

    def close(self) -> None:
        """There is no connection."""

    def receive_transfer(self, **_unused) -> Joining:
        return Joining(None)


def test_a_group_whose_servers_failed_to_join_can_be_made_anew():
    platform.init_distributed(60.0)
    with pytest.raises(ControlError, match="closed the connection"):
        StageSender(Control(ControlError("server closed the connection")), 1, "gloo", 10.0)
    StageSender(Control(), 1, "gloo", 10.0).close()


@pytest.mark.parametrize("of_learner", [True, False])
def test_an_error_of_the_learners_own_gathering_is_not_the_servers(monkeypatch, of_learner):
    """Its other ranks wait in the gathering: an interruption would leave them there."""
    platform.init_distributed(60.0)

    def buckets():
        yield SimpleNamespace(bytes=torch.zeros(4, dtype=torch.uint8))
        raise torch.OutOfMemoryError("while the next tensor is gathered")

    @contextmanager
    def transfer(_kind):
        def send(*_unused):
            if not of_learner:
                raise RuntimeError("connection reset by peer")

        yield SimpleNamespace(meeting=None, send=send, finish=lambda check: None)

    sender = StageSender(Control(), 1, "gloo", 10.0)
    monkeypatch.setattr(sender, "_transfer", transfer)
    plan = SimpleNamespace(counts=[1, 1], names=["a"], shapes=[[1]], form_of=lambda name: "float32")
    raised, words = (
        (torch.OutOfMemoryError, "gathered") if of_learner else (WeightSyncError, "connection reset")
    )
    with pytest.raises(raised, match=words):
        sender.send(buckets(), plan, 1)
    sender.close()
