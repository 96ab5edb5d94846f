"""How one sender sends a pipeline stage's weights: a carrier to its servers, buckets one after another, and the
answers."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress

import torch
import torch.distributed as dist

from parallel.megatron.groups import Groups
from parallel.megatron.platform import device
from parallel.weights.transfer import Bucket, Buffers, TransferPlan, UnderWay, WeightBroadcaster, dtype_name
from rollout.client import RolloutError
from rollout.servers.control import Pending, SGLangControl
from rollout.sglang_plugin.tandem_process_memory import Sending, let_others_read
from rollout.sglang_plugin.tandem_weight_transfer import GIVEN_UP, TRIAL_BYTES, Announcement, hash_kind
from trainer.weight_carriers import MEMORY, Broadcasts, FromMemory

GROUP = "tandem-weights"


class WeightSyncError(RolloutError):
    """The servers do not serve what the learner sent."""


class StageSender:
    """A pipeline stage's connection to the servers of ``control``: a carrier, and the requests that belong to it."""

    def __init__(
        self,
        control: SGLangControl,
        carrier: str,
        timeout_s: float,
        address: str = "127.0.0.1",
        *,
        stage: int = 0,
        in_one_request: bool = True,
    ):
        """carrier: the backend of a transfer group, or ``MEMORY``, which needs ``in_one_request`` (the
        servers have Tandem's plugin).

        A transfer group is made here. A request over HTTP asks the servers to join it, and they join while this process does."""
        self._control, self._in_one_request, self._timeout_s = control, in_one_request, timeout_s
        self._broadcaster: WeightBroadcaster | None = None
        self._staging = Buffers("cpu")
        if carrier == MEMORY:
            return
        # The same name in every attempt of the run, so that servers that outlive a learner can leave its
        # group.
        name = f"{GROUP}-{stage}"
        self._broadcaster = WeightBroadcaster(
            world_size=1 + control.num_receivers,
            backend=carrier,
            timeout_s=timeout_s,
            address=address,
            group_name=name,
        )
        joining = control.join_group(
            master_address=self._broadcaster.address,
            master_port=self._broadcaster.port,
            group_name=self._broadcaster.group_name,
            backend=carrier,
        )
        try:
            self._broadcaster.join(check=joining.raise_if_failed)
            joining.wait()
        except BaseException as error:
            self._broadcaster.close()  # else the next try, with other servers, finds its name taken
            if isinstance(error, RuntimeError) and not isinstance(error, RolloutError):
                # From torch: all other members of this group are servers.
                raise WeightSyncError(f"the servers did not join the transfer group: {error}") from error
            raise

    def try_memory(self) -> None:
        """Have every rank of the servers, which are paused, copy a few bytes out of this process's memory. Raises RolloutError if
        one cannot."""
        if not let_others_read():
            raise WeightSyncError(
                "this machine does not let a process read the user's other processes' memory"
            )
        with _failing_as_servers():
            with closing(Sending(self._control.num_receivers, self._timeout_s)) as sending:
                meeting = (sending.meeting.name, sending.meeting.timeout_s)
                answers = Answers([self._control.try_to_read(meeting)])
                with suppress(ConnectionError):  # a rank has left; once all have, the answer says why
                    sending.offer(torch.zeros(TRIAL_BYTES, dtype=torch.uint8), answers.raise_if_failed)
                    sending.wait_for_all_but(0, answers.raise_if_failed)
            answers.wait_for_all_but(0)

    def send(
        self,
        buckets: Iterable[Bucket],
        plan: TransferPlan,
        version: int | None,
        opening: Pending | None = None,
    ) -> int:
        """Send the buckets of ``plan``; the last request names ``version``, None if a later stage's does. While
        buckets are in flight, the next is filled (by ``buckets``) and queued.

        opening: the pending answer to the opening of the update. The first answer that fails ends the transfer.
        Returns the bytes sent.
        """
        answers = Answers([] if opening is None else [opening])
        answers.raise_if_failed()
        try:
            if self._in_one_request:
                return self._send_in_one_request(buckets, plan, version, answers)
            return self._send_by_requests(buckets, version, answers)
        except BaseException:
            self._give_up()
            raise

    def _send_in_one_request(
        self, buckets: Iterable[Bucket], plan: TransferPlan, version: int | None, answers: "Answers"
    ) -> int:
        kind, sent = hash_kind(device()), 0
        with self._transfer(kind) as transfer:
            counts = tuple(len(bucket.tensors) for bucket in plan.buckets)
            announcement = Announcement(kind, counts, version is not None, transfer.meeting)
            answers.add(
                self._control.receive_transfer(
                    names=plan.names,
                    dtypes=[plan.form_of(name) for name in plan.names],
                    shapes=plan.shapes,
                    announcement=announcement,
                    version=version,
                )
            )
            for bucket in buckets:  # gathered by the learner's ranks, whose errors are their own
                with _failing_as_servers():
                    transfer.send(bucket.bytes, answers.raise_if_failed)
                sent += bucket.bytes.numel()
            with _failing_as_servers():
                transfer.finish(answers.raise_if_failed)
            answers.wait_for_all_but(0)
        return sent

    @contextmanager
    def _transfer(self, kind: str) -> Iterator[Broadcasts | FromMemory]:
        if self._broadcaster is not None:
            yield Broadcasts(self._broadcaster, kind)
            return
        with closing(Sending(self._control.num_receivers, self._timeout_s)) as sending:
            yield FromMemory(sending, kind, self._staging)

    def _send_by_requests(self, buckets: Iterable[Bucket], version: int | None, answers: "Answers") -> int:
        assert self._broadcaster is not None
        in_flight: UnderWay[None] | None = None
        sent = 0
        for bucket in buckets:
            answers.raise_if_failed()
            names_version = version is not None and bucket.is_last
            if names_version and in_flight is not None:
                _wait_for(in_flight, answers)
                # Else servers that failed to load one bucket would call the rest the new version.
                answers.wait_for_all_but(0)
            receiving = self._control.receive_bucket(
                names=bucket.names,
                dtype=dtype_name(bucket.dtype),
                shapes=bucket.shapes,
                version=version if names_version else None,
            )
            answers.add(receiving)
            lined_up = self._broadcaster.start(bucket.bytes)
            sent += bucket.bytes.numel()
            if in_flight is not None:
                _wait_for(in_flight, answers)  # the next bucket takes its buffer
                answers.wait_for_all_but(2)
            in_flight = lined_up
        if in_flight is not None:
            _wait_for(in_flight, answers)
        answers.wait_for_all_but(0)
        return sent

    def leave(self) -> None:
        """Destroy the transfer group, if there is one, on both sides at once: NCCL's ranks of one node wait for each other
        there."""
        leaving = self._control.leave_group()
        if self._broadcaster is not None:
            self._broadcaster.close()
        leaving.wait()

    def _give_up(self) -> None:
        """End the group for the servers too, which may wait in a broadcast for a server that has ended."""
        if self._broadcaster is not None:
            self._broadcaster.give_up(GIVEN_UP)

    def abandon(self) -> None:
        """Leave a group of which a server has ended."""
        self._give_up()
        with suppress(RolloutError):
            self.leave()
        self._control.close()

    def close(self) -> None:
        self.leave()
        self._control.close()


class Answers:
    """Answers that are still awaited, oldest first."""

    def __init__(self, pending: Iterable[Pending]):
        self._pending = deque(pending)

    def add(self, pending: Pending) -> None:
        self._pending.append(pending)

    def raise_if_failed(self) -> None:
        for pending in self._pending:
            pending.raise_if_failed()

    def wait_for_all_but(self, newest: int) -> None:
        """Raises ControlError if one has failed."""
        while len(self._pending) > newest:
            self._pending.popleft().wait()


def _wait_for(broadcast: UnderWay[None], answers: Answers) -> None:
    with _failing_as_servers():
        broadcast.wait(check=answers.raise_if_failed)


@contextmanager
def _failing_as_servers() -> Iterator[None]:
    """Inside, an error of torch or of a socket counts as the servers', since only servers are at the other
    ends."""
    try:
        yield
    except RolloutError:
        raise
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(f"a bucket could not be sent to the servers: {error}") from error


@contextmanager
def in_turn(groups: Groups) -> Iterator[None]:
    """The senders of the pipeline stages enter one after another, each after the stage before has left.

    Raises RolloutError if an earlier stage failed inside, so that no stage waits forever.
    """
    failed = torch.zeros(1)
    if groups.pp_rank > 0:
        dist.recv(
            failed, src=dist.get_global_rank(groups.pp_group, groups.pp_rank - 1), group=groups.pp_group
        )
    try:
        if failed.item():
            raise WeightSyncError("an earlier pipeline stage has failed to send its weights")
        yield
    except BaseException:
        failed.fill_(1)
        raise
    finally:
        if groups.pp_rank < groups.pp_size - 1:
            dist.send(
                failed, dst=dist.get_global_rank(groups.pp_group, groups.pp_rank + 1), group=groups.pp_group
            )
