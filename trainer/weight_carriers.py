"""Two ways of a bucket's bytes to the servers: a broadcast in a process group, or a copy by each server out of the
learner's memory, on one machine. ``carrier_of`` says which one a run takes, unless each node's servers copy from a process of
their own node (``trainer/weight_sync.py``).

A carrier sends the buckets of a transfer in order, and at the end the hashes of the sender's own bytes. It
does not know what the buckets contain, and does not request the servers to receive
(``trainer/stage_sender.py`` does).
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema.launch import LaunchConfig
from configs.schema.rollout import RolloutConfig
from parallel.megatron.platform import collective_backend
from parallel.planning.memory import NUM_BUFFERS
from parallel.weights.transfer import Buffers, UnderWay, WeightBroadcaster
from rollout.sglang_plugin.tandem_process_memory import STAGED_BYTES, Sending, is_of_host, let_others_read
from rollout.sglang_plugin.tandem_weight_transfer import weight_hash

Check = Callable[[], None]
MEMORY = "memory"
"""The carrier that is not a backend of a process group."""


def carrier_of(rollout: RolloutConfig, launch: LaunchConfig, *, devices_are_shared: bool) -> str:
    """What carries the weights (``rollout.weight_transfer``): a backend of torch.distributed, or ``MEMORY``.

    Learner and servers with separate GPUs use NCCL, which does not go through host memory. NCCL refuses two
    ranks of a group on one GPU; gloo takes a GPU's tensors through host memory and TCP, on one machine and
    between nodes. This project has not run NCCL.

    Raises ValueError if the servers should read the learner's memory, and this machine does not allow it.
    """
    backend = "gloo" if devices_are_shared else collective_backend()
    is_suited = launch.nodes is None and rollout.sglang_plugin and backend == "gloo"
    if rollout.weight_transfer == "broadcast" or (rollout.weight_transfer == "auto" and not is_suited):
        return backend
    if let_others_read():
        return MEMORY
    if rollout.weight_transfer == "memory":
        raise ValueError(
            "rollout.weight_transfer=memory: this machine does not let a process read the user's other processes' memory (a container "
            "without process_vm_readv, or kernel.yama.ptrace_scope above 1); set rollout.weight_transfer=broadcast"
        )
    return backend


class Broadcasts:
    """A transfer by broadcasts, in a group that the receivers have joined. A bucket is hashed while it is
    sent.

    While a method waits, ``check`` is called repeatedly, and may end the wait by an exception. If the
    receivers break off a bucket, RuntimeError or OSError is raised.
    """

    meeting = None
    """The fields by which the receivers find the sender."""

    def __init__(self, broadcaster: WeightBroadcaster, kind: str) -> None:
        self._broadcaster, self._kind = broadcaster, kind
        self._hashes: list[Tensor] = []
        self._in_flight: deque[UnderWay[None]] = deque()

    def send(self, flat: Tensor, check: Check) -> None:
        """Begin to send a bucket's bytes. At return fewer than ``NUM_BUFFERS`` buckets, the last ones, are
        still being sent; the memory of all others may be filled again."""
        self._in_flight.append(self._broadcaster.start(flat))
        self._hashes.append(weight_hash(flat, self._kind))
        if len(self._in_flight) == NUM_BUFFERS[flat.device.type]:
            self._in_flight.popleft().wait(check)

    def finish(self, check: Check) -> None:
        """Send the hashes of all buckets. At return everything is sent."""
        self._broadcaster.start(torch.stack(self._hashes)).wait(check)


class FromMemory:
    """The same, by servers that copy out of this process's memory. A bucket is hashed while they copy."""

    def __init__(self, sending: Sending, kind: str, staging: Buffers) -> None:
        """staging: host memory for the pieces of a GPU's buckets, kept between transfers."""
        self._sending, self._kind, self._staging = sending, kind, staging
        self.meeting = (sending.meeting.name, sending.meeting.timeout_s)
        self._hashes: list[Tensor] = []

    def send(self, flat: Tensor, check: Check) -> None:
        if is_of_host(flat):
            self._sending.offer(flat, check)
        else:
            self._send_staged(flat, check)
        self._hashes.append(weight_hash(flat, self._kind))
        self._sending.wait_for_all_but(NUM_BUFFERS["cpu"] - 1, check)

    def _send_staged(self, flat: Tensor, check: Check) -> None:
        for piece in flat.split(STAGED_BYTES):
            # The memory of the next bucket may be filled again.
            self._sending.wait_for_all_but(NUM_BUFFERS["cpu"] - 1, check)
            staged = self._staging.take(STAGED_BYTES, torch.device("cpu"))[: piece.numel()]
            staged.copy_(piece)
            self._sending.offer(staged, check)

    def finish(self, check: Check) -> None:
        self._sending.offer(torch.stack(self._hashes).cpu().view(torch.uint8), check)
        self._sending.wait_for_all_but(0, check)
