"""How a sender of weights handles failures: whose they are, and that the next try can begin."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.distributed_c10d import _get_process_group_store

from parallel.megatron import platform
from parallel.weights import transfer as transfers
from parallel.weights.transfer import PlannedBucket, TransferPlan
from rollout.servers.control import ControlError
from rollout.sglang_plugin.tandem_weight_transfer import GIVEN_UP
from trainer.stage_sender import StageSender, WeightSyncError

PLAN = TransferPlan(
    buckets=[PlannedBucket(is_alone=False, tensors=[("a", [1])])],
    dtype=torch.float32,
    precision=None,
    packs=False,
)


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

    num_receivers = 0

    def __init__(self, failure: Exception | None = None):
        self._failure = failure

    def join_group(self, **_unused) -> Joining:
        return Joining(self._failure)

    def leave_group(self) -> Joining:
        return Joining(None)  # nobody is there

    def close(self) -> None:
        """There is no connection."""

    def receive_transfer(self, **_unused) -> Joining:
        return Joining(None)


def test_a_group_whose_servers_failed_to_join_can_be_made_anew():
    platform.init_distributed(60.0)
    with pytest.raises(ControlError, match="closed the connection"):
        StageSender(Control(ControlError("server closed the connection")), "gloo", 10.0)
    StageSender(Control(), "gloo", 10.0).close()


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

    sender = StageSender(Control(), "gloo", 10.0)
    monkeypatch.setattr(sender, "_transfer", transfer)
    raised, words = (
        (torch.OutOfMemoryError, "gathered") if of_learner else (WeightSyncError, "connection reset")
    )
    with pytest.raises(raised, match=words):
        sender.send(buckets(), PLAN, 1)
    sender.close()


def nccl_sender(monkeypatch, done: list, stage: int) -> StageSender:
    """Of a group that takes itself for NCCL's; what becomes of it is told to ``done``. stage: one for each test, since an
    aborted group keeps its name here."""
    platform.init_distributed(60.0)
    sender = StageSender(Control(), "gloo", 10.0, stage=stage)
    group = sender._broadcaster._group
    sender._broadcaster._backend = "nccl"
    destroy = torch.distributed.destroy_process_group
    monkeypatch.setattr(transfers, "_abort_process_group", lambda one: done.append(("abort", one is group)))
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda one: done.append(("destroy", destroy(one)))
    )
    return sender


def test_what_nccl_has_under_way_is_aborted_where_a_server_fails(monkeypatch):
    """Its kernels would wait on the GPU for ever, and destroying their group waits for them."""
    done, ends = [], threading.Event()
    sender = nccl_sender(monkeypatch, done, 1)
    store = _get_process_group_store(sender._broadcaster._group)
    # Of a server that is gone.
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: ends.wait(10) and None)

    class Answer(Joining):
        def raise_if_failed(self) -> None:
            raise ControlError("it is gone")

    monkeypatch.setattr(sender._control, "receive_transfer", lambda **_unused: Answer(None))
    bucket = SimpleNamespace(bytes=torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ControlError, match="it is gone"):
        sender.send([bucket], PLAN, 1)
    assert done == [("abort", True)]
    assert store.check([GIVEN_UP])  # where the servers look
    ends.set()
    later = sender._broadcaster.start(bucket.bytes)
    with pytest.raises(RuntimeError, match="given up"):
        later.wait(check=lambda: None)
    sender.abandon()
    assert done == [("abort", True)]  # once, and an aborted group is not destroyed


def test_both_sides_leave_a_group_at_once(monkeypatch):
    """NCCL's ranks of one node wait for each other there."""
    done: list = []
    sender = nccl_sender(monkeypatch, done, 2)

    class Leaving(Joining):
        def wait(self) -> None:
            done.append("waited")

    monkeypatch.setattr(
        sender._control, "leave_group", lambda: done.append("asked") or Leaving(None), raising=False
    )
    sender.leave()
    assert done == ["asked", ("destroy", None), "waited"]
    sender.abandon()  # as after an answer that failed; the group is no more
    assert done == ["asked", ("destroy", None), "waited", "asked", "waited"]


def test_a_group_of_a_transfer_that_failed_is_aborted_by_both_sides_at_once(monkeypatch):
    """Nothing is under way, since a server has answered with a failure; some may still wait."""
    done: list = []
    sender = nccl_sender(monkeypatch, done, 3)
    store = _get_process_group_store(sender._broadcaster._group)
    monkeypatch.setattr(sender._control, "leave_group", lambda: done.append("asked") or Joining(None))

    def buckets():
        raise ControlError("other bytes were received than sent")
        yield

    with pytest.raises(ControlError, match="other bytes"):
        sender.send(buckets(), PLAN, 1)
    assert store.check([GIVEN_UP]) and not done
    sender.close()
    assert done == ["asked", ("abort", True)]
