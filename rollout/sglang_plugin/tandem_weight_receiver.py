"""Receives the learner's weights in SGLang's parameters.

SGLang's own path takes a request per broadcast, receives into new memory and loads from there. Here one request
announces a whole transfer (``tandem_weight_transfer``). Its buckets come by broadcasts, or are copied out of the
learner's memory. If the tensors of a bucket, one after another, are exactly a contiguous part of a parameter, the bucket
is received there. All others go through memory that is kept: a few rows at a time, which stay in a core's cache, or
else the whole bucket. Matrices that the learner has rounded come packed (``numerics/grids.py``), and are unpacked from
this memory to where they belong.

SGLang's own loader tells where a tensor belongs (``tandem_tensor_places``). If loading a tensor is more than a copy,
SGLang loads it.

Every bucket is hashed as it came, in the place where it was received, which may be the parameter. The learner sends its
hashes last. A difference fails the request, and so does a parameter that no transfer of the update has filled.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from tandem_process_memory import PART_BYTES, STAGED_BYTES, Meeting, Receiving, is_of_host
from tandem_routed_experts import WITH_EXPERTS, is_captured
from tandem_tensor_places import Memory, Places, Rows, Sent, left_out, lies_behind, record, split_rows
from tandem_weight_transfer import (
    GIVEN_UP,
    PROTOCOL,
    QUESTION,
    TRIAL_BYTES,
    Announcement,
    RunningHash,
    asked_meeting,
    differing,
    weight_hash,
)
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group, _get_process_group_store

logger = logging.getLogger(__name__)
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
RECEIVER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
LOOK_S = 1.0
"""While this process waits for a broadcast: the interval at which it checks whether the learner has given it up."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{MANAGER}.update_weights_from_distributed", answer_the_question, HookType.AROUND)
    HookRegistry.register(f"{RECEIVER}.receive_weights_from_distributed", receive, HookType.AROUND)
    HookRegistry.register(f"{RECEIVER}.destroy_weights_update_group", leave, HookType.AROUND)


def answer_the_question(original, manager, request):
    """Answers a request for the protocol with its name, and whether experts are captured, or with what keeps a rank from
    copying out of the asking process's memory. Other requests are SGLang's."""
    if not (request.load_format or "").startswith(QUESTION):
        return original(manager, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

    name, failures = PROTOCOL + WITH_EXPERTS if is_captured() else PROTOCOL, []
    if (meeting := asked_meeting(request.load_format)) is not None:
        failures = everywhere(try_to_read(Meeting(*meeting)), manager.tp_cpu_group)
    failure = next(filter(None, failures), None)
    return UpdateWeightsFromDistributedReqOutput(success=failure is None, message=failure or name)


def try_to_read(meeting: Meeting) -> str | None:
    """What keeps this process from copying out of the memory of the one at the meeting."""
    try:
        with closing(Receiving(meeting)) as receiving:
            receiving.receive([torch.empty(TRIAL_BYTES, dtype=torch.uint8)], lambda part: None)
    except OSError as error:
        return f"cannot copy out of the learner's memory ({error})"
    return None


def receive(original, updater, *, names, dtypes, shapes, group_name, load_format=None):
    """``WeightUpdater.receive_weights_from_distributed``. SGLang loads what it returns, which is nothing after a
    transfer of Tandem's."""
    announced = Announcement.parse(load_format)
    if announced is None:
        return original(
            updater, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, load_format=load_format
        )
    from sglang.srt.runtime_context import get_parallel

    tensors = [
        Sent.parse(name, dtype, shape) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
    receiver = _receiver_of(updater)
    if announced.meeting is None:
        failure = receive_broadcasts(receiver, tensors, announced, updater._model_update_group, group_name)
    else:
        failure = receive_from_memory(receiver, tensors, announced, Meeting(*announced.meeting))
    for reason in filter(None, everywhere(failure, get_parallel().tp_group.cpu_group)):
        raise RuntimeError(reason)
    return []


def receive_broadcasts(
    receiver: "Receiver",
    tensors: Sequence["Sent"],
    announced: Announcement,
    groups: dict[str, dist.ProcessGroup],
    group_name: str,
) -> str | None:
    """What failed, such as that the learner is gone: every rank must hear of that. The group is lost then."""
    try:
        return receiver.receive(tensors, announced, Broadcasts(groups[group_name]))
    except RuntimeError as error:
        group = groups.pop(group_name)
        # NCCL does not show the other ranks that this one has left, for example out of memory: they would wait for it.
        with suppress(dist.DistError):  # the store is the learner's, which may be gone
            _get_process_group_store(group).set(GIVEN_UP, "")
        leave_behind(group)
        return f"the weights could not be received ({error})"


def leave(original, updater, group_name):
    """``WeightUpdater.destroy_weights_update_group``. There NCCL's ranks of one node wait for each other. A group that
    was given up is left without that wait, because a rank may have aborted or be gone."""
    group = updater._model_update_group.get(group_name)
    if group is None or dist.get_backend(group) != "nccl" or not is_given_up(group):
        return original(updater, group_name)
    leave_behind(updater._model_update_group.pop(group_name))
    return True, "the group had been given up"


def is_given_up(group: dist.ProcessGroup) -> bool:
    """Whether the learner or a server's rank has given up the transfer in this group, or the learner is gone, and its
    store with it."""
    try:
        return _get_process_group_store(group).check([GIVEN_UP])
    except dist.DistError:
        return True


def leave_behind(group: dist.ProcessGroup) -> None:
    """Leave a group in which broadcasts may be under way that never end. Broadcasts of NCCL are aborted. gloo's threads
    stay in theirs, and the group is kept, because its end would wait for these threads."""
    _LEFT_BEHIND.append(group)
    _abort_process_group(group)


_LEFT_BEHIND: list[dist.ProcessGroup] = []


def receive_from_memory(
    receiver: "Receiver", tensors: Sequence["Sent"], announced: Announcement, meeting: Meeting
) -> str | None:
    """What failed, such as that the learner is gone: every rank must hear of that."""
    try:
        with closing(Receiving(meeting)) as receiving:
            return receiver.receive(tensors, announced, FromMemory(receiving))
    except OSError as error:
        fix = "; set rollout.weight_transfer=broadcast" if isinstance(error, PermissionError) else ""
        return f"the weights could not be copied out of the learner's memory ({error}){fix}"


class Broadcasts:
    """Buckets that come by broadcasts in a process group. While one is received, the next is begun already.

    If the learner or another server is gone, a broadcast of NCCL never ends, and one of gloo does not if the connection
    ended in the middle of it. So the host waits for each, and meanwhile checks whether the learner is still there.
    """

    num_begun = 2

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def begin(self, flat: Tensor, kind: str) -> Callable[[], Tensor]:
        """Begin to receive the next bucket in uint8 ``flat``. The returned function waits for its end, and gives its hash.
        It raises RuntimeError if the bucket cannot come."""
        wait = self._begin(flat)

        def end() -> Tensor:
            wait()
            return weight_hash(flat, kind)

        return end

    def receive(self, flat: Tensor) -> None:
        self._begin(flat)()

    def _begin(self, flat: Tensor) -> Callable[[], None]:
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group

        def wait() -> None:
            while not self._has_ended(work):
                if is_given_up(self._group):
                    raise RuntimeError("the learner or another rank has given the transfer up, or is gone")
            work.wait()

        return wait

    def _has_ended(self, work: dist.Work) -> bool:
        """Whether the broadcast ends within ``LOOK_S``."""
        if work.is_completed():
            return True
        if dist.get_backend(self._group) == "gloo":
            with suppress(RuntimeError):  # also raised at the end of the time
                work.wait(timedelta(seconds=LOOK_S))
        else:  # a timed wait for NCCL would end its communicator
            deadline = time.monotonic() + LOOK_S
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0)
        return work.is_completed()


class FromMemory:
    """Buckets that are copied out of the learner's memory. A bucket is copied only when the caller waits for its end."""

    num_begun = 1

    def __init__(self, receiving: Receiving) -> None:
        self._receiving = receiving
        self._staged: Tensor | None = None

    def begin(self, flat: Tensor, kind: str) -> Callable[[], Tensor]:
        """See ``Broadcasts.begin``."""

        def end() -> Tensor:
            running = RunningHash(flat, kind)
            self._take(flat, running.add)
            return running.digest()

        return end

    def begin_rows(self, rows: Sequence["Rows"], kind: str) -> Callable[[], Tensor]:
        """As ``begin``, for a bucket whose rows are loaded while they come."""

        def end() -> Tensor:
            running, due = RunningHash(rows[0].memory, kind), iter(rows)

            def load(part: Tensor) -> None:
                running.add(part)
                next(due).load()

            self._receiving.receive([some.memory for some in rows], load)
            return running.digest()

        return end

    def receive(self, flat: Tensor) -> None:
        self._take(flat.view(torch.uint8), lambda part: None)

    def _take(self, flat: Tensor, look_at: Callable[[Tensor], None]) -> None:
        if is_of_host(flat):
            self._receiving.receive(flat.split(PART_BYTES), look_at)
            return
        if self._staged is None:
            self._staged = torch.empty(STAGED_BYTES, dtype=torch.uint8)
        for piece in flat.split(STAGED_BYTES):
            staged = self._staged[: piece.numel()]
            self._receiving.receive([staged], lambda part: None)
            piece.copy_(staged)


def everywhere(failure: str | None, group: dist.ProcessGroup) -> list[str | None]:
    """The failures of all tensor-parallel ranks, because only the first rank answers requests."""
    failures: list[str | None] = [failure] * dist.get_world_size(group)
    if len(failures) > 1:
        dist.all_gather_object(failures, failure and f"rank {dist.get_rank(group)}: {failure}", group=group)
    return failures


def _receiver_of(updater) -> "Receiver":
    model = updater.get_model()
    if model not in _RECEIVERS:
        plain = updater.model_config.quantization is None
        _RECEIVERS[model] = Receiver(model, torch.device(updater.device), records=plain)
    return _RECEIVERS[model]


_RECEIVERS: WeakKeyDictionary = WeakKeyDictionary()


class Receiver:
    """Receives transfers for one model. ``records``: False lets SGLang load every tensor."""

    def __init__(self, model, device: torch.device, *, records: bool) -> None:
        self._model, self._device, self._records = model, device, records
        self._places = Places()
        self._layout: tuple = ()
        self._asked: set[Sent] = set()
        self._received: set[str] = set()
        self._memory: list[Tensor | None] = [None, None]
        self._rows: Memory | None = None
        self._landings: dict[tuple[Sent, ...], Tensor | list[Rows] | None] = {}
        self._complete: set[str] | None = None
        """Names of the tensors of an update that filled every parameter."""

    @torch.no_grad()
    def receive(
        self, tensors: Sequence[Sent], announced: Announcement, way: Broadcasts | FromMemory
    ) -> str | None:
        """Receive all buckets of a transfer. Returns what failed: a rank that left early would keep all others
        waiting."""
        received, self._received = self._received, set()  # a transfer that fails starts the count again
        failure = self._look_up(tensors)
        pieces, hashes = list(split(tensors, announced.counts)), []
        under_way: deque[tuple[Callable[[], Tensor], Callable[[], str | None]]] = deque()

        def finish() -> None:
            nonlocal failure
            end, load = under_way.popleft()
            hashes.append(end())
            failure = load() or failure

        for number, piece in enumerate(pieces):
            under_way.append(self._begin(piece, number % way.num_begun, announced.hash_kind, way))
            if len(under_way) == way.num_begun:
                finish()
        while under_way:
            finish()
        sent_hashes = torch.empty(len(pieces), dtype=torch.int64, device=self._device)
        way.receive(sent_hashes)
        if self._device.type != "cpu":
            self._memory = [None, None]
        for i in differing(sent_hashes.tolist(), torch.stack(hashes).tolist()):
            ends = dict.fromkeys((pieces[i][0].name, pieces[i][-1].name))
            failure = (
                f"other bytes were received than sent, in bucket {i} of {len(pieces)}: {' to '.join(ends)}"
            )
        if failure is not None:
            return failure
        self._received = received | {sent.name for sent in tensors}
        if announced.is_whole:
            self._derive()
        return self._left_out() if announced.is_whole else None

    def _begin(
        self, piece: Sequence[Sent], place: int, kind: str, way: Broadcasts | FromMemory
    ) -> tuple[Callable[[], Tensor], Callable[[], str | None]]:
        """Begin to receive a bucket. Returns a function that waits for its end and gives its hash, and one to
        call then, which loads the bucket and returns what failed."""
        landing = self._landing_of(piece)
        if isinstance(landing, Tensor):
            return way.begin(landing, kind), lambda: None
        # The hash of other devices needs all bytes of a bucket at once.
        can_split = self._device.type == "cpu" and kind == "xxh3"
        if landing is not None and can_split and isinstance(way, FromMemory):
            return way.begin_rows(landing, kind), lambda: None
        flat = self._take(sum(sent.nbytes for sent in piece), place)
        return way.begin(flat, kind), partial(self._load, flat, piece)

    def _derive(self) -> None:
        """Compute again what SGLang's loader derives from weights: at its end, such as the factors of latent attention's keys
        and values, and 1 + weight of norms."""
        if hasattr(self._model, "post_load_weights"):
            self._model.post_load_weights()
        for module in self._model.modules():
            if hasattr(module, "refresh_gemma_weight"):
                module.refresh_gemma_weight()

    def _look_up(self, tensors: Sequence[Sent]) -> str | None:
        """Record the places of tensors that were not looked up before, or whose parameters have moved. Returns what failed."""
        layout = tuple((name, p.data_ptr(), p.shape) for name, p in self._model.named_parameters())
        if layout != self._layout:
            self._layout, self._places, self._asked = layout, Places(), set()
        new = [sent for sent in tensors if sent not in self._asked]
        if new:  # a name may come with another shape
            self._landings, self._complete = {}, None
        if new and self._records:
            found = self._record(new)
            self._places.copies |= found.copies
            self._places.filled += found.filled
            told = "tandem: of %d tensors of the learner %d are loaded by SGLang's own loader"
            logger.info(told, len(new), len(new) - len(found.copies))
        self._asked.update(new)
        lost = [sent.name for sent in tensors if self._places.copies.get(sent.name) == []]
        if len(lost) < len(tensors):
            return None
        return f"no parameter takes any of the sent tensors, such as {lost[0]}"

    def _record(self, tensors: Sequence[Sent]) -> Places:
        """``record``; nothing if the loader replaces parameters by other tensors instead of copying into them."""
        before = [(parameter, parameter.data) for parameter in self._model.parameters()]
        found = record(self._model.load_weights, tensors)
        replaced = [p for p, data in before if (p.device, p.data_ptr()) != (data.device, data.data_ptr())]
        if not replaced:
            return found
        for parameter, data in before:
            parameter.data = data
        return Places()

    def _landing_of(self, piece: Sequence[Sent]) -> Tensor | list[Rows] | None:
        """Where a bucket is received: in a parameter, by rows, or, for None, as a whole in memory that is kept. Looked up
        once per bucket, because the look takes longer than the copy of a small bucket."""
        key = tuple(piece)
        if key not in self._landings:
            there = self._place_of(piece)
            self._landings[key] = self._rows_of(piece) if there is None else there
        return self._landings[key]

    def _place_of(self, piece: Sequence[Sent]) -> Tensor | None:
        """The bytes of the parameter in which a bucket can be received: the parts of its tensors lie there whole, one
        after another. None: there are none."""
        parts: list[Tensor] = []
        for sent in piece:
            copies = self._places.copies.get(sent.name, ())
            if sent.packed is not None or len(copies) != 1 or not copies[0].is_whole(sent):
                return None
            part = copies[0].part
            if parts and not lies_behind(parts[-1], part):
                return None
            parts.append(part)
        flat = parts[0].as_strided((sum(part.numel() for part in parts),), (1,))
        return flat.view(torch.uint8)

    def _rows_of(self, piece: Sequence[Sent]) -> list[Rows] | None:
        """The rows of a bucket in their order; None if it must be received as a whole."""
        if self._device.type != "cpu":
            return None
        if self._rows is None:
            self._rows = Memory(PART_BYTES)
        rows: list[Rows] = []
        for sent in piece:
            copies = self._places.copies.get(sent.name)
            some = None if copies is None else split_rows(sent, copies, self._rows)
            if some is None:
                return None
            rows += some
        return rows

    def _take(self, size: int, place: int) -> Tensor:
        """Memory of ``size`` bytes; its content stays until the next call for this place."""
        kept = self._memory[place]
        if kept is None or kept.numel() < size:
            kept = self._memory[place] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return kept[:size]

    def _load(self, flat: Tensor, piece: Sequence[Sent]) -> str | None:
        """Copy tensors from ``flat`` to where they belong. Returns what failed."""
        others = []
        for sent, part in zip(piece, flat.split([sent.nbytes for sent in piece]), strict=True):
            whole = sent.unpacked(part)
            copies = self._places.copies.get(sent.name)
            if copies is None:
                others.append((sent.name, whole))
            for copy in copies or ():
                source = copy.source
                offset = whole.storage_offset() + source.storage_offset()
                copy.part.copy_(whole.as_strided(source.shape, source.stride(), offset))
        try:
            if others:
                self._model.load_weights(others)
        except Exception as error:
            return f"SGLang could not load {others[0][0]} to {others[-1][0]}: {error}"
        return None

    def _left_out(self) -> str | None:
        """After the last transfer of an update, if every tensor's place is known: a message of the parameters it left out."""
        received, self._received = self._received, set()
        if received == self._complete or not all(name in self._places.copies for name in received):
            return None
        parts = [copy.part for name in received for copy in self._places.copies[name]]
        missing = left_out(dict(self._model.named_parameters()), parts + self._places.filled)
        self._complete = received if missing is None else self._complete
        return missing


def split(tensors: Sequence[Sent], counts: Sequence[int]) -> Iterator[Sequence[Sent]]:
    ends = [0, *accumulate(counts)]
    if ends[-1] != len(tensors):
        raise ValueError(f"{len(tensors)} tensors are announced, and {ends[-1]} in buckets")
    return (tensors[start:end] for start, end in pairwise(ends))
