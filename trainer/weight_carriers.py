"""Two ways of a bucket's bytes to the servers: a broadcast in a process group, or a copy by each server out of the
learner's memory, on one machine.

Each brings the buckets of a transfer in order, and at the end their hashes, which are of the sender's own bytes. What
is in them and who asks the servers to receive is not its concern (``trainer/stage_sender.py``).
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from parallel.planning.memory import NUM_BUFFERS
from parallel.weights.transfer import UnderWay, WeightBroadcaster
from rollout.sglang_plugin.tandem_process_memory import Sending
from rollout.sglang_plugin.tandem_weight_transfer import weight_hash

Check = Callable[[], None]


class Broadcasts:
    """A transfer by broadcasts, in a group that the receivers have joined. A bucket is hashed while it is sent.

    While a method waits, ``check`` is called again and again, and ends the wait by an exception. The receivers' end of a
    bucket that breaks off raises RuntimeError or OSError.
    """

    meeting = None
    """What the receivers must know to meet the sender."""

    def __init__(self, broadcaster: WeightBroadcaster, kind: str) -> None:
        self._broadcaster, self._kind = broadcaster, kind
        self._hashes: list[Tensor] = []
        self._in_flight: deque[UnderWay[None]] = deque()

    def send(self, flat: Tensor, check: Check) -> None:
        """Begin to send a bucket's bytes. At return fewer than ``NUM_BUFFERS`` buckets are being sent, the last ones; the
        memory of all others may be filled again."""
        self._in_flight.append(self._broadcaster.start(flat))
        self._hashes.append(weight_hash(flat, self._kind))
        if len(self._in_flight) == NUM_BUFFERS[flat.device.type]:
            self._in_flight.popleft().wait(check)

    def finish(self, check: Check) -> None:
        """Send the hashes of all buckets. At return everything is sent."""
        self._broadcaster.start(torch.stack(self._hashes)).wait(check)


class FromMemory:
    """The same by servers that copy out of this process. A bucket is hashed while they do."""

    def __init__(self, sending: Sending, kind: str) -> None:
        self._sending, self._kind = sending, kind
        self.meeting = (sending.meeting.name, sending.meeting.timeout_s)
        self._hashes: list[Tensor] = []

    def send(self, flat: Tensor, check: Check) -> None:
        self._sending.offer(flat.cpu(), check)
        self._hashes.append(weight_hash(flat, self._kind))
        self._sending.wait_for_all_but(NUM_BUFFERS["cpu"] - 1, check)

    def finish(self, check: Check) -> None:
        self._sending.offer(torch.stack(self._hashes).cpu().view(torch.uint8), check)
        self._sending.wait_for_all_but(0, check)
