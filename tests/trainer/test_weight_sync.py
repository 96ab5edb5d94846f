"""What a publish sends, in which order it speaks to the servers, and that nothing wrong is ever served.

The learner, its weights and what carries them are real; of the servers only their HTTP is replaced, by
``FakeControl``. A replica here answers the probe from the bytes that it was sent, with transformers' own
model.
"""

import itertools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.schema.launch import LaunchConfig, NodesConfig
from configs.schema.objective import AggregationConfig
from configs.schema.rollout import RolloutConfig
from parallel.megatron import platform
from parallel.weights.precision import rounded
from parallel.weights.transfer import Line, TransferPlan, plan_transfer
from rollout.client import RolloutError
from rollout.records import Completion, FinishReason
from rollout.servers.control import ControlError, Pending
from rollout.sglang_plugin.tandem_process_memory import Meeting, Receiving
from rollout.sglang_plugin.tandem_tensor_places import Sent
from rollout.sglang_plugin.tandem_weight_transfer import TRIAL_BYTES, Announcement, differing, weight_hash
from tests.support.megatron_workers import (
    learner_config,
    make_batch,
    make_hf_model,
    run_ranks,
    weighted_loss,
    weights_of,
)
from tests.support.records import completion
from trainer import stage_sender, weight_carriers, weight_sync
from trainer.algorithm.mismatch import SampledGap
from trainer.engine_agreement import EngineAgreement, ForeignSamplesError
from trainer.learner import Learner
from trainer.ranks.interruption import StopRequested
from trainer.weight_sync import PROBE_TOKENS, SentByRank, WeightSync, WeightSyncError

TEMPERATURE = 0.7
GROUPS = itertools.count()
TIMEOUT_S = 40.0
MAX_BYTES = 8192
PROMPTLY_S = 15.0
"""Far below TIMEOUT_S, far above what a refusal takes on a busy machine."""


class Replica:
    """One server: joins the transfer group, receives a transfer or single buckets, and says what it holds. Its
    attributes can be set to make it fail."""

    def __init__(self, folder) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.version = 0
        self.is_interrupted = False
        self.refuses_to_join = False
        self.refuses_to_open = False
        self.refuses_transfer = False
        self.cannot_read = False
        self.break_received: Callable[[int, Tensor], None] = lambda broadcast, flat: None
        self.refuses_bucket: int | None = None
        self.fails_to_load: int | None = None
        self.before_broadcast: Callable[[int], None] = lambda bucket: None
        self.before_answer: Callable[[int], None] = lambda bucket: None
        self.break_after_update: Callable[[Replica], None] = lambda replica: None
        self.break_answer: Callable[[list[float]], list[float]] = lambda logprobs: logprobs
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._group: dist.ProcessGroupGloo | None = None
        self._received = 0

    def join(
        self,
        rank: int,
        *,
        master_address: str,
        master_port: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> dict:
        if self.refuses_to_join:
            raise ControlError("answered HTTP 400: no such group")
        timeout = timedelta(seconds=TIMEOUT_S)
        store: dist.Store = dist.TCPStore(
            master_address, master_port, world_size, is_master=False, timeout=timeout
        )
        # The names under which the ranks of a torch process group meet; its constructor would need a process
        # per rank.
        for prefix in (group_name, f"{group_name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        return {}

    def try_to_read(self, meeting: tuple[str, int]) -> dict:
        if self.cannot_read:
            raise ControlError("answered HTTP 400: another container")
        with closing(Receiving(Meeting(*meeting))) as receiving:
            receiving.receive([torch.empty(TRIAL_BYTES, dtype=torch.uint8)], lambda part: None)
        return {}

    def open(self) -> dict:
        if self.refuses_to_open:
            raise ControlError("answered HTTP 400: a session is open already")
        return {}

    def receive(
        self, *, names: Sequence[str], dtype: str, shapes: Sequence[Sequence[int]], version: int | None
    ) -> dict:
        self._received += 1
        if self._received - 1 == self.refuses_bucket:
            raise ControlError("answered HTTP 400: unknown tensor")
        sent = [Sent.parse(name, dtype, shape) for name, shape in zip(names, shapes, strict=True)]
        flat = self._receive_flat(self._broadcast, sent, self._received - 1)
        self.before_answer(self._received - 1)
        if self._received - 1 == self.fails_to_load:
            raise ControlError("answered HTTP 400: wrong shape")
        self._load(sent, flat, version)
        return {}

    def receive_all(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        announcement: Announcement,
        version: int | None,
    ) -> dict:
        if self.refuses_transfer:
            raise ControlError("answered HTTP 400: unknown tensor")
        if announcement.meeting is None:
            return self._receive_buckets(self._broadcast, names, dtypes, shapes, announcement, version)
        with closing(Receiving(Meeting(*announcement.meeting))) as receiving:

            def read(flat: Tensor) -> None:
                receiving.receive([flat.view(torch.uint8)], lambda part: None)

            return self._receive_buckets(read, names, dtypes, shapes, announcement, version)

    def _receive_buckets(
        self,
        fill: Callable[[Tensor], None],
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        announcement: Announcement,
        version: int | None,
    ) -> dict:
        hashes, rest = [], map(Sent.parse, names, dtypes, shapes)
        for bucket, count in enumerate(announcement.counts):
            some = list(itertools.islice(rest, count))
            flat = self._receive_flat(fill, some, bucket)
            self.break_received(bucket, flat)
            hashes.append(int(weight_hash(flat, announcement.hash_kind)))
            self._load(some, flat, None)
        sent = torch.zeros(len(hashes), dtype=torch.int64)
        fill(sent)
        if wrong := differing(sent.tolist(), hashes):
            raise ControlError(f"answered HTTP 400: other bytes in {wrong}")
        self.version = self.version if version is None else version
        return {}

    def _receive_flat(self, fill: Callable[[Tensor], None], bucket: Sequence[Sent], number: int) -> Tensor:
        flat = torch.zeros(sum(sent.nbytes for sent in bucket), dtype=torch.uint8)
        self.before_broadcast(number)
        fill(flat)
        return flat

    def _broadcast(self, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        # Kept until it has ended: gloo waits for that where the last owner leaves the group, with the interpreter's lock.
        group = self._group
        group.broadcast([flat], options).wait()

    def _load(self, bucket: Sequence[Sent], flat: Tensor, version: int | None) -> None:
        for sent, part in zip(bucket, flat.split([sent.nbytes for sent in bucket]), strict=True):
            self.tensors[sent.name] = sent.unpacked(part).clone()
        self.version = self.version if version is None else version

    def answer(self, prompt_ids: Sequence[int], num_tokens: int, temperature: float) -> Completion:
        """Likeliest tokens, each with log softmax(logits / temperature) of the received weights."""
        self._model.load_state_dict(self.tensors)
        ids, logprobs = list(prompt_ids), []
        with torch.no_grad():
            for _ in range(num_tokens):
                log_V = (self._model(torch.tensor([ids])).logits[0, -1] / temperature).log_softmax(-1)
                ids.append(int(log_V.argmax()))
                logprobs.append(float(log_V.max()))
        return completion(
            token_ids=ids[len(prompt_ids) :],
            rollout_logprobs=self.break_answer(logprobs),
            token_versions=[self.version] * num_tokens,
            finish_reason=FinishReason.LENGTH,
        )

    def leave(self) -> None:
        self._group = None


class FakeControl:
    """``SGLangControl`` without HTTP. ``calls`` is what it was asked, in order; a transfer or a bucket with the
    version that it carried."""

    def __init__(self, folder, num_replicas: int) -> None:
        self.urls = [f"replica {i}" for i in range(num_replicas)]
        self.num_receivers = num_replicas
        self.replicas = [Replica(folder) for _ in self.urls]
        self.calls: list[str] = []
        # A replica serves one request after the other. The end of the tests waits for none that never ends.
        self._lines = [Line() for _ in self.urls]

    def _everywhere(self, what: str, work: Callable[[int], dict]) -> Pending:
        begun = [line.begin(partial(work, i)) for i, line in enumerate(self._lines)]
        return Pending(what, [each._result for each in begun], TIMEOUT_S)

    def join_group(self, **meeting) -> Pending:
        size = 1 + self.num_receivers
        return self._everywhere("join", lambda i: self.replicas[i].join(1 + i, world_size=size, **meeting))

    def receive_bucket(self, *, version: int | None, **bucket) -> Pending:
        self.calls.append(f"receive_bucket version={version}")
        return self._everywhere("receive", lambda i: self.replicas[i].receive(version=version, **bucket))

    def receive_transfer(self, *, version: int | None, **transfer) -> Pending:
        self.calls.append(f"receive_transfer version={version}")
        return self._everywhere(
            "receive", lambda i: self.replicas[i].receive_all(version=version, **transfer)
        )

    def try_to_read(self, meeting: tuple[str, int]) -> Pending:
        self.calls.append("try_to_read")
        return self._everywhere("read", lambda i: self.replicas[i].try_to_read(meeting))

    def require_plugin(self) -> None:
        self.calls.append("require_plugin")

    def close_update(self) -> list[int]:
        self.calls.append("close_update")
        for replica in self.replicas:
            replica.break_after_update(replica)
        return self.versions()

    def probe(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float
    ) -> list[Completion]:
        self.calls.append("probe")
        return [replica.answer(prompt_ids, max_new_tokens, temperature) for replica in self.replicas]

    def versions(self) -> list[int]:
        return [replica.version for replica in self.replicas]

    def take_over(self) -> bool:
        self.calls.append("take_over")
        return any(replica.is_interrupted for replica in self.replicas)

    def open_update(self) -> Pending:
        self.calls.append("open_update")
        return self._everywhere("open", lambda i: self.replicas[i].open())

    def resume(self) -> None:
        self.calls.append("resume")

    def leave_group(self) -> Pending:
        for replica in self.replicas:
            replica.leave()
        return Pending("leave group", [], TIMEOUT_S)

    def close(self) -> None:
        # A replica that left ends whatever the sender may still be waiting for.
        self.leave_group()
        for line in self._lines:
            line.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


@pytest.fixture
def learner(folder) -> Learner:
    platform.init_distributed(60.0)
    return Learner(learner_config(folder, data_parallel=1, aggregation=AggregationConfig(), sharded=True))


@pytest.fixture
def make_sync(folder, learner, monkeypatch) -> Iterator[Callable[..., tuple[WeightSync, FakeControl]]]:
    """A joined WeightSync whose buckets hold at most 8 KiB, so that an update takes several."""
    monkeypatch.setattr(weight_sync, "plan_transfer", partial(plan_transfer, max_bytes=MAX_BYTES))
    # Those of the tests before may still be there.
    monkeypatch.setattr(stage_sender, "GROUP", f"test-{next(GROUPS)}")
    controls, syncs = [], []

    def make(
        num_replicas: int = 1,
        dtype: str = "float32",
        prepare: Callable[[Replica], None] = lambda replica: None,
        precision: str | None = None,
        plugin: bool = True,
        weight_transfer: str = "auto",
        lives: Callable[[], dict[str, int]] | None = None,
        max_staleness: int = 0,
        is_aligned: bool = False,
        compares_samples: bool = False,
        left: FakeControl | None = None,
    ):
        control = FakeControl(folder, num_replicas)
        controls.append(control)
        prepare(control.replicas[-1])
        rollout = RolloutConfig(
            dtype=dtype,
            temperature=TEMPERATURE,
            precision=precision,
            sglang_plugin=plugin,
            weight_transfer=weight_transfer,
            max_staleness=max_staleness,
        )
        agreement = EngineAgreement.of(
            rollout, learner.engine.dtype, is_aligned=is_aligned, compares_samples=compares_samples
        )
        launch = LaunchConfig(collective_timeout_s=TIMEOUT_S)
        syncs.append(
            WeightSync(
                learner,
                control,
                rollout,
                launch,
                control_of=lambda urls: left or pytest.fail(str(urls)),
                agreement=agreement,
                lives=lives,
            )
        )
        return syncs[-1], control

    yield make
    for sync in syncs:
        sync.close()  # its end of the group too: a replica may wait in a broadcast
    for control in controls:
        control.close()


def train(learner: Learner) -> None:
    learner.engine.update([make_batch([9, 6])], weighted_loss, temperature=1.0)


@pytest.mark.parametrize("found", ["fresh", "another version", "half an update", "whatever"])
def test_servers_that_have_outlived_a_learner_get_the_weights_of_the_next_before_they_sample(
    make_sync, learner, found
):
    """One that was interrupted in the middle of its first update still calls its weights by the version of
    the start."""
    sync, control = make_sync(2)
    control.replicas[1].version = 3 if found == "another version" else 0
    control.replicas[1].is_interrupted = found == "half an update"
    sync.take_over(sends=found == "whatever")
    if found == "fresh":
        assert control.calls == ["require_plugin", "take_over", "resume"]
        return
    assert control.calls[:3] == ["require_plugin", "take_over", "open_update"] and control.calls[-3:] == [
        "close_update",
        "resume",
        "probe",
    ]
    assert control.versions() == [0, 0] and learner.version == 0
    weights = weights_of(learner.engine)
    for replica in control.replicas:
        assert all(torch.equal(replica.tensors[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("lost", ["before the update", "in the transfer"])
def test_an_update_is_done_for_the_servers_that_are_left(make_sync, learner, folder, lost):
    lives = {"replica 0": 1, "replica 1": 1}
    sync, control = make_sync(2, lives=lambda: dict(lives))
    assert sync.publish().servers == 2
    left = FakeControl(folder, 1)
    sync._control_of = lambda urls: left if urls == ["replica 0"] else pytest.fail(str(urls))
    flip = flip_a_bit_of(1)

    def lose(place: int, received: torch.Tensor) -> None:
        lives.pop("replica 1", None)
        flip(place, received)

    if lost == "in the transfer":
        control.replicas[1].break_received = lose
    else:
        del lives["replica 1"]
    try:
        train(learner)
        result = sync.publish()
        assert (result.servers, result.version, left.versions()) == (1, 2, [2])
        assert left.calls[:3] == ["take_over", "require_plugin", "open_update"]
        assert left.calls[3:] == ["receive_transfer version=2", "close_update", "resume", "probe"]
        weights = weights_of(learner.engine)
        assert all(torch.equal(left.replicas[0].tensors[name], t) for name, t in weights.items())
        assert sync.publish().version == 3  # by the groups that there are
    finally:
        left.close()


def test_a_single_server_that_is_started_again_is_waited_for_and_gets_the_weights(
    make_sync, learner, folder, monkeypatch
):
    lives: dict[str, int] = {"replica 0": 1}
    looks = 0

    def look() -> dict[str, int]:
        nonlocal looks
        looks += 1
        if not lives and looks > 5:
            lives["replica 0"] = 3
        return dict(lives)

    sync, _ = make_sync(1, lives=look)
    assert not sync.are_needed()
    train(learner)
    assert sync.publish().version == 1
    second, third = FakeControl(folder, 1), FakeControl(folder, 1)
    later = iter([second, third])
    sync._control_of = lambda urls: next(later)
    try:
        lives["replica 0"] = 2
        assert sync.are_needed()
        assert sync.send_again().version == 1 and second.versions() == [1]
        assert not sync.are_needed()

        def probe(*arguments, **named):
            nonlocal looks
            lives.clear()
            looks = 0
            raise ControlError("it is gone")

        monkeypatch.setattr(second, "probe", probe)
        sync.prove(TEMPERATURE)
        assert third.versions() == [1] and third.calls[-1] == "probe"
    finally:
        second.close()
        third.close()


def test_others_are_needed_only_where_no_server_has_the_weights_and_one_could(make_sync):
    lives = {"replica 0": 1, "replica 1": 1}
    sync, _ = make_sync(2, lives=lambda: dict(lives))
    for found, needed in (({"replica 0": 1, "replica 1": 2}, False), ({}, False), ({"replica 0": 2}, True)):
        lives = found
        assert sync.are_needed() == needed


def test_a_report_from_another_node_is_waited_for_longer(make_sync, monkeypatch):
    sync, waits = make_sync()[0], []
    monkeypatch.setattr(sync, "_have_servers_changed", lambda *, within_s: waits.append(within_s))
    for nodes in (None, NodesConfig()):
        sync._launch = LaunchConfig(nodes=nodes)
        sync._changes_after_failure()
    assert waits == [20.0, 80.0]


def test_all_stages_are_counted_and_any_that_failed_ends_the_update(make_sync, monkeypatch):
    sync, control = make_sync(compares_samples=True)
    monkeypatch.setattr(sync, "_send_stage", lambda opening: SentByRank(bytes=3))
    monkeypatch.setattr(weight_sync, "from_all_ranks", lambda mine, group: [mine, SentByRank(bytes=5)])
    assert sync.send_again().bytes == 8
    control.calls.clear()
    failed = SentByRank(failure=ControlError("it is gone"))
    monkeypatch.setattr(weight_sync, "from_all_ranks", lambda mine, group: [failed, mine])
    with pytest.raises(ControlError, match="it is gone"):
        sync.send_again()
    assert control.calls == ["open_update"]


def test_a_server_that_is_gone_at_the_end_need_not_be_told(make_sync, monkeypatch):
    sync, control = make_sync()
    leave, close, asked = control.leave_group, control.close, []

    def refuse_once() -> Pending:
        asked.append("leave")
        if len(asked) == 1:
            raise ControlError("it is gone")
        return leave()

    monkeypatch.setattr(control, "leave_group", refuse_once)
    monkeypatch.setattr(control, "close", lambda: asked.append("close"))
    sync.close()
    close()
    assert asked[:3] == ["leave", "leave", "close"], "the others are told, and the control is closed"


@pytest.mark.parametrize(("stage", "version"), [(0, None), (1, 3)])
def test_only_the_last_stage_names_the_version(make_sync, monkeypatch, stage, version):
    sync, _ = make_sync()
    sync.close()
    monkeypatch.setattr(weight_sync, "in_turn", nullcontext)
    monkeypatch.setattr(weight_sync, "make_buckets", lambda *exported: iter(["first", "second"]))
    sync._learner = SimpleNamespace(groups=SimpleNamespace(pp_rank=stage, pp_size=2), version=3)
    sync._sender, sync._buffers = Mock(), Mock()
    sync._sender.send.return_value = 7
    assert sync._send_as_sender(iter(()), None) == SentByRank(bytes=7)
    buckets, _, named_version, _ = sync._sender.send.call_args.args
    assert [*buckets] == ["first", "second"] and named_version == version
    sync._buffers.release.assert_called_once_with()


def test_a_transfer_that_fails_frees_the_memory_of_its_buckets(make_sync, monkeypatch):
    sync, _ = make_sync()
    sync.close()
    monkeypatch.setattr(weight_sync, "in_turn", nullcontext)
    monkeypatch.setattr(weight_sync, "make_buckets", lambda *exported: iter(["first"]))
    sync._learner = SimpleNamespace(groups=SimpleNamespace(pp_rank=0, pp_size=1), version=3)
    sync._sender, sync._buffers = Mock(), Mock()
    sync._sender.send.side_effect = ControlError("it is gone")
    with pytest.raises(ControlError, match="it is gone"):
        sync._send_as_sender(iter(()), None)
    sync._buffers.release.assert_called_once_with()


def test_a_stop_ends_the_wait_for_servers(make_sync):
    lives = {"replica 0": 1}
    sync, _ = make_sync(1, lives=lambda: dict(lives))
    lives.clear()
    sync._stop_reason = lambda: "SIGUSR1"
    with pytest.raises(StopRequested, match="SIGUSR1"):
        sync.publish()


def test_groups_that_could_not_be_made_are_made_with_those_that_are_left(make_sync, folder, monkeypatch):
    """A second server ends while the learner meets those that are left of the first loss."""
    lives = {"replica 0": 1, "replica 1": 1, "replica 2": 1}
    sync, _ = make_sync(3, lives=lambda: dict(lives))
    left = FakeControl(folder, 1)

    class Gone(FakeControl):
        is_closed = False

        def take_over(self) -> bool:
            del lives["replica 1"]
            raise ControlError("connection refused")

        def close(self) -> None:
            self.is_closed = True
            super().close()

    second = Gone(folder, 2)
    controls = {("replica 0", "replica 1"): second, ("replica 0",): left}
    sync._control_of = lambda urls: controls[tuple(urls)]
    del lives["replica 2"]
    try:
        assert sync.publish().servers == 1 and left.versions() == [1] and second.is_closed
    finally:
        left.close()
        second.close()


def test_groups_that_could_not_be_made_at_first_are_made_with_the_same_servers(
    make_sync, folder, monkeypatch
):
    make, left = weight_sync.StageSender, FakeControl(folder, 1)

    def refuse_once(*arguments, **named):
        monkeypatch.setattr(weight_sync, "StageSender", make)
        raise ControlError("connection refused")

    monkeypatch.setattr(weight_sync, "StageSender", refuse_once)
    sync, _ = make_sync(lives=lambda: {"replica 0": 1}, compares_samples=True, left=left)
    try:
        assert sync.publish().version == 1 and left.versions() == [1]
    finally:
        left.close()


@pytest.mark.parametrize("ended", ["before the learner looks", "while they join", "before the probe"])
def test_a_run_begins_with_the_servers_that_are_left_of_those_that_were_ready(
    make_sync, learner, folder, monkeypatch, ended
):
    lives = {"replica 0": 1, "replica 1": 1}
    left = FakeControl(folder, 1)

    def end(*arguments, **named):
        del lives["replica 1"]
        raise ControlError("connection refused")

    if ended == "before the learner looks":
        del lives["replica 1"]
    join = end if ended == "while they join" else Replica.join
    sync, control = make_sync(
        2,
        prepare=lambda replica: setattr(replica, "join", partial(join, replica)),
        lives=lambda: dict(lives),
        weight_transfer="broadcast",
        left=left,
    )
    if ended == "before the probe":
        monkeypatch.setattr(control, "probe", end)
    try:
        sync.take_over(sends=True)
        assert sync.prove(TEMPERATURE) < 1e-4
        assert left.calls[0] == "take_over" and {"resume", "probe"} <= {*left.calls}
        assert sync.publish().servers == 1 and left.versions() == [1]
    finally:
        left.close()


def test_servers_that_never_come_back_end_the_update(make_sync, monkeypatch):
    gone = LaunchConfig(collective_timeout_s=1.0)
    lives = {"replica 0": 1}
    sync, _ = make_sync(1, lives=lambda: dict(lives))
    sync._launch = gone
    monkeypatch.setattr(weight_sync, "LOST_SERVER_S", 0.1)
    lives.clear()
    with pytest.raises(WeightSyncError, match="none was ready again after 1 s"):
        sync.publish()


def test_a_failure_without_a_lost_server_ends_the_update(make_sync, monkeypatch):
    monkeypatch.setattr(weight_sync, "LOST_SERVER_S", 0.1)
    sync, control = make_sync(2, lives=lambda: {"replica 0": 1, "replica 1": 1})
    control.replicas[1].break_received = flip_a_bit_of(1)
    with pytest.raises(ControlError, match="other bytes in"):
        sync.publish()


def test_servers_that_hold_half_an_update_stay_paused_where_the_next_one_fails(make_sync, learner):
    sync, control = make_sync()
    control.replicas[0].is_interrupted, control.replicas[0].break_received = True, flip_a_bit_of(1)
    with pytest.raises(ControlError, match=r"other bytes in \[1\]"):
        sync.take_over(sends=False)
    assert "resume" not in control.calls and "probe" not in control.calls


def plan_of(learner: Learner, dtype: torch.dtype = torch.float32) -> TransferPlan:
    return plan_transfer(learner.engine.export_plan(), dtype=dtype, device="cpu", max_bytes=MAX_BYTES)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    ("plugin", "weight_transfer"), [(True, "auto"), (True, "broadcast"), (False, "auto")]
)
def test_publish_serves_the_learners_bytes_under_the_next_version(
    make_sync, learner, plugin, weight_transfer, num_replicas
):
    sync, control = make_sync(num_replicas, plugin=plugin, weight_transfer=weight_transfer)
    assert (sync._sender._broadcaster is None) == (plugin and weight_transfer == "auto")
    sent = []
    for version in (1, 2):
        train(learner)
        control.calls.clear()
        result = sync.publish()
        weights = weights_of(learner.engine)
        num_buckets = len(plan_of(learner).buckets)
        assert num_buckets > 2
        by_requests = ["receive_bucket version=None"] * (num_buckets - 1) + [
            f"receive_bucket version={version}"
        ]
        assert control.calls == [
            *(["require_plugin"] if plugin and version == 1 else []),
            "open_update", *([f"receive_transfer version={version}"] if plugin else by_requests),
            "close_update", "resume", "probe",
        ]  # fmt: skip
        for replica in control.replicas:
            assert replica.tensors.keys() == weights.keys()
            assert all(torch.equal(replica.tensors[name], tensor) for name, tensor in weights.items())
        assert (result.version, learner.version) == (version, version)
        assert result.bytes == sum(tensor.nbytes for tensor in weights.values())
        assert 0.0 <= result.max_logprob_gap < 1e-4
        sent.append(weights)
    assert not torch.equal(sent[0]["model.norm.weight"], sent[1]["model.norm.weight"]), (
        "the two updates were the same"
    )
    sync.close()


@pytest.mark.parametrize(
    ("changes", "nodes", "shared", "cuda", "may_read", "carrier"),
    [
        ({}, None, False, False, True, "memory"),
        ({}, None, False, False, False, "gloo"),
        ({}, None, False, True, True, "nccl"),
        ({}, None, True, True, True, "memory"),
        ({}, None, True, True, False, "gloo"),
        ({}, NodesConfig(), False, False, True, "gloo"),
        ({}, NodesConfig(), False, True, True, "nccl"),
        ({}, NodesConfig(), True, True, True, "gloo"),
        ({"sglang_plugin": False}, None, False, False, True, "gloo"),
        ({"weight_transfer": "broadcast"}, None, True, True, True, "gloo"),
        ({"weight_transfer": "broadcast"}, None, False, False, True, "gloo"),
        ({"weight_transfer": "memory"}, None, False, True, True, "memory"),
        ({"weight_transfer": "memory"}, None, False, False, False, None),
    ],
)
def test_what_carries_the_weights(monkeypatch, changes, nodes, shared, cuda, may_read, carrier):
    """None: an error that names the field and the fix."""
    monkeypatch.setattr(weight_carriers, "collective_backend", lambda: "nccl" if cuda else "gloo")
    monkeypatch.setattr(weight_carriers, "let_others_read", lambda: may_read)
    rollout, launch = RolloutConfig(**changes), LaunchConfig(nodes=nodes)
    if carrier is None:
        with pytest.raises(
            ValueError, match=r"rollout\.weight_transfer=memory: .*set rollout\.weight_transfer=broadcast"
        ):
            weight_carriers.carrier_of(rollout, launch, devices_are_shared=shared)
    else:
        assert weight_carriers.carrier_of(rollout, launch, devices_are_shared=shared) == carrier


def test_restore_keeps_the_version(make_sync, learner):
    sync, control = make_sync()
    learner.version = 7
    assert sync.send_again().version == 7
    assert (learner.version, control.replicas[0].version) == (7, 7)


def test_a_served_dtype_of_fewer_bits_is_checked_by_its_own_bytes(make_sync, learner):
    sync, control = make_sync(dtype="bfloat16")
    result = sync.publish()
    held = control.replicas[0].tensors
    assert all(
        torch.equal(held[name], tensor.to(torch.bfloat16))
        for name, tensor in weights_of(learner.engine).items()
    )
    assert 1e-4 < result.max_logprob_gap < 1.0, "the probe compares, but rounding of the weights is no error"


@pytest.mark.parametrize("has_plugin", [True, False])
def test_rounded_weights_are_checked_by_their_bytes_and_not_by_exact_logprobs(make_sync, learner, has_plugin):
    """Packed for servers with the plugin; in their dtype for others."""
    sync, control = make_sync(precision="int8", plugin=has_plugin)
    result = sync.publish()
    held, own = control.replicas[0].tensors, weights_of(learner.engine)
    changed = {name for name, tensor in own.items() if not torch.equal(held[name], tensor)}
    assert changed == {name for name in own if name.endswith("_proj.weight")}
    assert all(torch.equal(held[name], rounded(own[name], "int8")) for name in changed)
    assert 1e-4 < result.max_logprob_gap < 1.0, (
        "in float32 this would end the run, were it not for the rounding"
    )
    sync.check_samples(SampledGap(probability=0.5, nats=0.5), named)


def test_with_aligned_numerics_a_last_bit_is_an_error(make_sync):
    aligned, _ = make_sync(dtype="bfloat16", compares_samples=True, is_aligned=True)
    aligned.check_samples(SampledGap(probability=0.0, nats=0.0), named)
    message = (
        r"logprob_gap_max; model.numerics=aligned allows 0\).*The farthest token is that of logprob_gap_max$"
    )
    with pytest.raises(ForeignSamplesError, match=message):
        aligned.check_samples(SampledGap(probability=0.0, nats=2.0**-30), named)

    with pytest.raises(ForeignSamplesError, match="abs_prob_max"):
        aligned.check_samples(SampledGap(probability=2.0**-30, nats=0.0), named)


def test_in_float32_samples_may_differ_by_rounding_which_an_unlikely_token_shows_most(make_sync, learner):
    sync, _ = make_sync(compares_samples=True)
    learner.version = 4
    sync.check_samples(SampledGap(probability=0.9e-4, nats=0.9e-3), named)
    sync.check_samples(None, named)
    for probability, nats, measure in (
        (2e-4, 0.0, "abs_prob_max"), (math.nan, 0.0, "abs_prob_max"),
        (0.0, 2e-3, "logprob_gap_max"), (0.0, math.nan, "logprob_gap_max"),
    ):  # fmt: skip
        with pytest.raises(ForeignSamplesError, match=rf"sampled with version 3 \({measure}"):
            sync.check_samples(SampledGap(probability=probability, nats=nats), named)
    without_plugin, _ = make_sync(compares_samples=True, plugin=False)
    without_plugin.check_samples(SampledGap(probability=0.5, nats=0.5), named)  # the probe has looked


@pytest.mark.parametrize(
    ("plugin", "samples_are_probes", "max_staleness", "is_probed"),
    [(True, True, 0, False), (True, False, 1, False), (False, True, 1, True)],
)
def test_an_update_is_probed_unless_samples_are_the_probe_or_would_be_before_it(
    make_sync, plugin, samples_are_probes, max_staleness, is_probed
):
    sync, control = make_sync(plugin=plugin, compares_samples=samples_are_probes, max_staleness=max_staleness)
    assert (sync.publish().max_logprob_gap is not None) == ("probe" in control.calls) == is_probed


def named(measure: str) -> str:
    return f"that of {measure}"


def keep_old_version(replica: Replica) -> None:
    replica.version = 0


def run_ahead(replica: Replica) -> None:
    replica.version += 1


FAULTS = {
    keep_old_version: r"sent weight version 1, but the servers report \[.*0\]",
    run_ahead: r"sent weight version 1, but the servers report \[.*2\]",
}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_server_that_holds_something_else_is_never_resumed(make_sync, learner, fault, num_replicas):
    """One replica of them is enough."""
    sync, control = make_sync(num_replicas)
    control.replicas[-1].break_after_update = fault
    with pytest.raises(WeightSyncError, match=FAULTS[fault]):
        sync.publish()
    assert "resume" not in control.calls and "probe" not in control.calls
    assert learner.version == 1, "the weights have moved, whether or not the servers took them"


def flip_a_bit_of(broken: int) -> Callable[[int, Tensor], None]:
    """The lowest bit of the last weight of one broadcast: no probe of log-probs could see it."""

    def flip(broadcast: int, flat: Tensor) -> None:
        if broadcast == broken:
            flat[-4] ^= 1

    return flip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_replicas", "weight_transfer"), [(1, "memory"), (2, "memory"), (2, "broadcast")]
)
def test_a_bit_that_changes_on_the_way_is_found_in_every_bucket(
    make_sync, learner, num_replicas, weight_transfer, dtype
):
    sync, control = make_sync(num_replicas, dtype=dtype, weight_transfer=weight_transfer)
    counts = [len(one.tensors) for one in plan_of(learner, getattr(torch, dtype)).buckets]
    for broken in range(len(counts)):
        control.calls.clear()
        control.replicas[-1].break_received = flip_a_bit_of(broken)
        with pytest.raises(ControlError, match=rf"other bytes in \[{broken}\]"):
            sync.publish()
        assert not {"close_update", "resume", "probe"} & set(control.calls)
        assert control.replicas[-1].version == 0


def off_by_a_little(logprobs: list[float]) -> list[float]:
    return [*logprobs[:-1], logprobs[-1] + 1e-3]


def replaced(place: int, value: float) -> Callable[[list[float]], list[float]]:
    return lambda logprobs: [value if i == place else x for i, x in enumerate(logprobs)]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_wrong_probe_logprob_ends_the_run(make_sync, num_replicas):
    sync, control = make_sync(num_replicas)
    control.replicas[-1].break_answer = off_by_a_little
    with pytest.raises(WeightSyncError, match=r"differ by 1\.0\de-03 nats|differ by 9\.\d\de-04 nats"):
        sync.publish()
    assert control.calls.index("close_update") < control.calls.index("resume") < control.calls.index("probe")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [0, 1, PROBE_TOKENS - 1])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_probe_logprob_that_is_no_number_ends_the_run(make_sync, dtype, place, value):
    """Wherever it stands: Python's max would lose a NaN that is not the first."""
    sync, control = make_sync(dtype=dtype)
    control.replicas[0].break_answer = replaced(place, value)
    with pytest.raises(WeightSyncError, match="not finite"):
        sync.publish()


def test_a_learner_that_moved_after_the_update_is_noticed(make_sync, learner):
    """The probe compares with the weights of now: those that were published, unless somebody trained
    meanwhile."""
    sync, _ = make_sync()
    sync.publish()
    assert sync.probe(1.3) < 1e-4
    train(learner)
    with pytest.raises(WeightSyncError, match=r"on the probe prompt at temperature 1\.3"):
        sync.probe(1.3)


@pytest.mark.parametrize("bucket", [0, 2])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_refused_bucket_ends_the_wait_for_the_broadcast(make_sync, learner, bucket, num_replicas):
    sync, control = make_sync(num_replicas, plugin=False)
    control.replicas[-1].refuses_bucket = bucket
    started = time.monotonic()
    with pytest.raises(ControlError, match="unknown tensor"):
        sync.publish()
    assert time.monotonic() - started < PROMPTLY_S
    opening, *asked = control.calls
    assert (opening, set(asked)) == ("open_update", {"receive_bucket version=None"})
    assert len(asked) - bucket in (1, 2), "the next one may be lined up already"
    assert learner.version == 1


@pytest.mark.parametrize("weight_transfer", ["memory", "broadcast"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_refused_transfer_ends_the_wait_for_its_buckets(make_sync, learner, num_replicas, weight_transfer):
    sync, control = make_sync(num_replicas, weight_transfer=weight_transfer)
    control.replicas[-1].refuses_transfer = True
    started = time.monotonic()
    with pytest.raises(ControlError, match="unknown tensor"):
        sync.publish()
    assert time.monotonic() - started < PROMPTLY_S
    assert control.calls == ["require_plugin", "open_update", "receive_transfer version=1"]
    assert learner.version == 1


@pytest.mark.parametrize("weight_transfer", ["memory", "broadcast"])
def test_a_server_that_ends_in_a_transfer_ends_it_with_its_reason(make_sync, learner, weight_transfer):
    """The other one still takes what it can get, and both take part in the next update."""
    sync, control = make_sync(2, weight_transfer=weight_transfer)

    def end(bucket: int, flat: Tensor) -> None:
        if bucket == 1:
            raise ControlError("it was killed")

    control.replicas[1].break_received = end
    started = time.monotonic()
    with pytest.raises(ControlError, match="it was killed"):
        sync.publish()
    assert time.monotonic() - started < PROMPTLY_S
    if weight_transfer == "memory":  # a group with a rank that left it must be made anew
        control.replicas[1].break_received = lambda bucket, flat: None
        assert sync.send_again().version == 1 and control.versions() == [1, 1]


def test_servers_without_the_plugin_are_refused_before_anything_is_sent(make_sync, learner):
    sync, control = make_sync()

    def refuse() -> None:
        raise ControlError("does not answer as Tandem's SGLang plugin")

    control.require_plugin = refuse
    for _ in range(2):
        with pytest.raises(ControlError, match="plugin"):
            sync.send_again()
    with pytest.raises(ControlError, match="plugin"):
        sync.take_over(sends=False)
    assert control.calls == []


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("from_end", [1, 2, 3])
def test_a_bucket_that_fails_to_load_ends_the_transfer_and_no_server_takes_the_version(
    make_sync, learner, from_end, num_replicas
):
    """Its broadcast succeeds, and its answer comes while the next bucket is under way; but not while the one
    that names the version is."""
    sync, control = make_sync(num_replicas, plugin=False)
    buckets = len(plan_of(learner).buckets)
    control.replicas[-1].fails_to_load = buckets - from_end
    control.calls.clear()
    started = time.monotonic()
    with pytest.raises(ControlError, match="wrong shape"):
        sync.publish()
    assert time.monotonic() - started < PROMPTLY_S
    assert "close_update" not in control.calls and "resume" not in control.calls
    assert ("receive_bucket version=1" in control.calls) == (from_end == 1)
    assert (control.replicas[-1].version, learner.version) == (0, 1)


def test_an_update_that_a_server_refuses_to_open_is_never_resumed(make_sync, learner):
    sync, control = make_sync(2)
    control.replicas[-1].refuses_to_open = True
    with pytest.raises(ControlError, match="a session is open already"):
        sync.publish()
    assert "resume" not in control.calls and learner.version == 1


def test_the_next_bucket_is_asked_for_while_the_last_one_is_being_loaded(make_sync, learner):
    """The first answer comes only when the second request is there; the one that names the version waits for
    all answers."""
    sync, control = make_sync(plugin=False)
    second_is_asked, answered = threading.Event(), []
    receive_bucket = control.receive_bucket

    def ask(**bucket) -> Pending:
        if control.calls.count("receive_bucket version=None") == 1:
            second_is_asked.set()
        if bucket["version"] is not None:
            assert len(answered) == control.calls.count("receive_bucket version=None")
        return receive_bucket(**bucket)

    def load(bucket: int) -> None:
        assert second_is_asked.wait(PROMPTLY_S), "nothing was asked before the first answer"
        answered.append(bucket)

    control.receive_bucket = ask
    control.replicas[0].before_answer = load
    assert sync.publish().version == 1
    assert answered == list(range(control.calls.count("receive_bucket version=None") + 1))
    assert {name: tensor.shape for name, tensor in control.replicas[0].tensors.items()} == {
        name: tensor.shape for name, tensor in weights_of(learner.engine).items()
    }


def test_one_bucket_is_lined_up_behind_the_one_in_flight_and_no_more(make_sync, learner):
    """A broadcast begins only when the next bucket has been asked for; the one after that is not filled: its
    buffer is still being sent."""
    sync, control = make_sync(plugin=False)
    wanted = weights_of(learner.engine)
    count = len(plan_of(learner).buckets)
    asked, receive_bucket = [threading.Event() for _ in range(count + 2)], control.receive_bucket
    assert count > 4

    def ask(**bucket) -> Pending:
        asked[sum(call.startswith("receive") for call in control.calls)].set()
        return receive_bucket(**bucket)

    def hold(bucket: int) -> None:
        if bucket + 2 < count:  # the last one names the version, and waits for the answers to all others
            assert asked[bucket + 1].wait(PROMPTLY_S), "nothing was asked before the broadcast"
        assert not asked[bucket + 2].wait(0.1), (
            "a bucket was filled while the one whose buffer it takes had still to be sent"
        )

    control.receive_bucket = ask
    control.replicas[0].before_broadcast = hold
    sync.publish()
    assert all(event.is_set() for event in asked[:count])
    assert all(torch.equal(control.replicas[0].tensors[name], tensor) for name, tensor in wanted.items())


def test_a_server_that_refuses_to_join_ends_the_wait_for_it(make_sync):
    def refuse(replica: Replica) -> None:
        replica.refuses_to_join = True

    started = time.monotonic()
    with pytest.raises(ControlError, match="no such group"):
        make_sync(prepare=refuse, weight_transfer="broadcast")
    assert time.monotonic() - started < PROMPTLY_S


NODES = ["127.0.0.1", "127.0.0.2"]


class WholeControl(FakeControl):
    """Rank 0's, of the servers of two nodes, which are slow to open an update. Where their nodes' senders serve them, their
    versions are in files."""

    def __init__(self, folder, root) -> None:
        super().__init__(folder, len(NODES))
        self.urls = [f"http://{node}:30000" for node in NODES]
        self.refuses_to_open = False
        self.beside: FakeControl | None = None
        """Of the first node's server."""
        self._root = root

    def open_update(self) -> Pending:
        def open_slowly(i: int) -> dict:
            if self.refuses_to_open:
                raise ControlError("answered HTTP 400: a session is open already")
            time.sleep(0.2)
            (self._root / f"open-{NODES[i]}").touch()
            return {}

        self.calls.append("open_update")
        return self._everywhere("open", open_slowly)

    def versions(self) -> list[int]:
        files = [self._root / f"version-{node}" for node in NODES]
        return [int(file.read_text()) for file in files] if files[0].exists() else super().versions()

    def probe(self, *unused, **settings) -> list[Completion]:
        return (
            super().probe(*unused, **settings)
            if self.replicas[0].tensors
            else self.beside.probe(*unused, **settings)
        )


def work_by_node(folder, root, weight_transfer: str, broken: str | None) -> dict[str, Any]:
    """A learner's rank on one of two nodes, each with one server. broken: what is set on the second node's server."""
    rank, size, controls = dist.get_rank(), dist.get_world_size(), []
    node = NODES[rank * len(NODES) // size]
    learner = Learner(
        learner_config(
            folder,
            data_parallel=size,
            aggregation=AggregationConfig(),
            sharded=True,
            learner={"minibatches": 1},
        )
    )

    def control_of(urls: Sequence[str]) -> FakeControl:
        assert urls == [f"http://{node}:30000"]
        control = FakeControl(folder, 1)
        replica = control.replicas[0]
        if node == NODES[1] and broken in ("cannot_read", "refuses_transfer"):
            setattr(replica, broken, True)
        replica.before_broadcast = lambda bucket: receive_once_open()
        controls.append(control)
        if whole is not None:
            whole.beside = control
        return control

    def receive_once_open() -> None:
        if not (root / f"open-{node}").exists():
            raise ControlError("answered HTTP 400: no update is open")
        (root / f"version-{node}").write_text(str(learner.version))

    whole = WholeControl(folder, root) if rank == 0 else None
    if whole is not None:
        controls.append(whole)
        whole.refuses_to_open = broken == "refuses_to_open"
        if broken == "is_elsewhere":
            whole.urls[1] = "http://127.0.0.3:30000"
    rollout = RolloutConfig(
        dtype="float32", temperature=TEMPERATURE, replicas=2, weight_transfer=weight_transfer
    )
    nodes = NodesConfig(learner=2, rollout=2)
    launch = LaunchConfig(collective_timeout_s=TIMEOUT_S, nodes=nodes, placement="colocated")
    said: dict[str, Any] = {}
    sync = None
    try:
        sync = WeightSync(learner, whole, rollout, launch, address=node, control_of=control_of)
        said["bytes"] = sync.publish().bytes
    except RolloutError as error:
        said["error"] = str(error)
    said["calls"] = [control.calls for control in controls]
    said["held"] = controls[-1].replicas[0].tensors if controls else None
    said["exported"] = {name: tensor.clone() for name, tensor in learner.engine.export_hf()}
    if sync is not None:
        sync.close()
    for control in controls:
        control.close()
    return said


@pytest.mark.parametrize(("weight_transfer", "size"), [("auto", 4), ("memory", 2)])
def test_servers_of_each_node_copy_from_the_learner_on_their_node(folder, tmp_path, weight_transfer, size):
    """From two senders in one update, which rank 0 opens before and closes after. Further ranks of a node send nothing."""
    ranks = run_ranks(work_by_node, size, tmp_path / "ranks", folder, tmp_path, weight_transfer, None)
    whole, *nodes = [calls for said in ranks for calls in said["calls"]]
    assert whole == ["require_plugin", "open_update", "close_update", "resume"]
    assert nodes == [
        ["try_to_read", "receive_transfer version=1", "probe"],
        ["try_to_read", "receive_transfer version=1"],
    ]
    for said in ranks:
        assert said["bytes"] == sum(tensor.nbytes for tensor in said["exported"].values())
    for said in ranks[:: size // 2]:
        assert said["held"].keys() == said["exported"].keys()
        assert all(torch.equal(said["held"][name], tensor) for name, tensor in said["exported"].items())


@pytest.mark.parametrize("broken", ["cannot_read", "is_elsewhere"])
@pytest.mark.parametrize("weight_transfer", ["auto", "memory"])
def test_a_server_that_cannot_read_its_nodes_learner_gets_a_broadcast_or_an_error(
    folder, tmp_path, weight_transfer, broken
):
    first, second = run_ranks(work_by_node, 2, tmp_path / "ranks", folder, tmp_path, weight_transfer, broken)
    if weight_transfer == "memory":
        why = {
            "cannot_read": "memory: answered HTTP 400: another container; .*set rollout.weight_transfer=broadcast",
            "is_elsewhere": "127.0.0.3:30000, and the learner's nodes have 127.0.0.1, 127.0.0.2; set launch.nodes.interface",
        }
        assert first["error"] == second["error"] and re.search(why[broken], first["error"])
        return
    assert "error" not in first and "error" not in second
    assert first["calls"][0][1:3] == ["open_update", "receive_transfer version=1"]
    assert first["calls"][1:] == [["try_to_read"]]
    assert second["calls"] == ([["try_to_read"]] if broken == "cannot_read" else [])


@pytest.mark.parametrize(
    ("broken", "why"),
    [("refuses_transfer", "unknown tensor"), ("refuses_to_open", "a session is open already")],
)
def test_a_failure_on_one_node_is_raised_on_all(folder, tmp_path, broken, why):
    ranks = run_ranks(work_by_node, 2, tmp_path / "ranks", folder, tmp_path, "auto", broken)
    assert [said["error"] for said in ranks] == [f"answered HTTP 400: {why}"] * 2
