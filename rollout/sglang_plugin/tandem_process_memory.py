"""Bytes from one process to others on its machine: the others copy them straight out of its memory. No SGLang here: both
sides import this file.

    sender     says where bucket i lies      says where i + 1 lies      waits until all have taken i; its memory is then free
    receivers       copy bucket i, say so          copy i + 1 ...

The kernel copies once, from where the bytes lie to where they go (process_vm_readv). Through shared memory they would be
copied twice. No memory has to be made, named or removed, and a process that ends leaves nothing behind.

Both ends wait at a unix socket. If one end dies, its socket closes, which the other sees at once. The socket's name is random,
and new for each transfer, so that a receiver that comes late for an ended transfer finds no sender. Both ends check that the
other belongs to the same user, as the kernel does at each copy.

This file does not know what the bytes mean, and does not check that they arrived unchanged: see
``tandem_weight_transfer.py``.
"""

import ctypes
import os
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

PART_BYTES = 2**20
"""A part of this size is still in a core's cache when it is hashed."""
STAGED_BYTES = 16 * 2**20
"""Data of a GPU goes through the host's memory in pieces of this size, which stay in the last-level cache from one process
to the other. The sender copies a piece from its GPU while the receivers copy the previous one to theirs."""
LOOK_EVERY_S = 0.05
ANSWER_S = 1.0
"""When a receiver has left: time for its HTTP answer, which says why."""
PLACE = struct.Struct("QQ")
"""Address and size of a bucket."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)

Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the receivers of one transfer meet its sender."""

    name: str
    """Name of an abstract unix socket, without the zero byte in front."""
    timeout_s: int
    """Deadline of each wait for the sender."""


class _Extent(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]


def read_memory(process: int, address: int, to: Tensor) -> None:
    """Fill ``to``, contiguous uint8 [n] on the CPU, from the memory of a process. Raises OSError."""
    done, size = 0, to.numel()
    while done < size:
        mine = _Extent(to.data_ptr() + done, size - done)
        theirs = _Extent(address + done, size - done)
        got = _libc.process_vm_readv(process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if got <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the learner's memory cannot be read: {os.strerror(number)}")
        done += got


def is_of_host(flat: Tensor) -> bool:
    """Whether other processes can copy the tensor from where it lies."""
    return flat.device.type == "cpu"


def let_others_read() -> bool:
    """Whether other processes of this user may read this one's memory. Some containers forbid the system call, and
    some machines (Yama) allow it only to debuggers. If Yama lets the process decide, this call allows it."""
    one, other = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    try:
        read_memory(os.getpid(), one.data_ptr(), other)
        scope = int(YAMA.read_text()) if YAMA.exists() else 0
    except (OSError, ValueError):
        return False
    return scope == 0 or (scope == 1 and _libc.prctl(PR_SET_PTRACER, ANY, 0, 0, 0) == 0)


def _process_of(connection: socket.socket) -> int:
    """The other end's process. Raises PermissionError if it is another user's."""
    size = struct.calcsize("3i")
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.geteuid():
        raise PermissionError(
            f"the other end of a weight transfer belongs to user {user}, not {os.geteuid()}"
        )
    return process


def _says_something(connection: socket.socket) -> bool:
    """Whether the other end sent a byte. False: it has left, perhaps with an unread bucket in its queue."""
    try:
        return bool(connection.recv(1))
    except ConnectionError:
        return False


class Sending:
    """The sender's end of one transfer.

    Its methods raise OSError if a receiver has left, or is too late. While they wait, they call ``check`` repeatedly;
    an exception from it ends the wait.
    """

    def __init__(self, num_receivers: int, timeout_s: float) -> None:
        self._num_receivers, self._timeout_s = num_receivers, timeout_s
        self.meeting = Meeting(f"tandem-{secrets.token_hex(16)}", max(1, int(timeout_s)))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.meeting.name}")
        self._listener.listen(num_receivers)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._taken: dict[socket.socket, int] = {}
        self._num_offered = 0
        self._due: deque[Tensor] = deque()
        """Buckets that were offered, and that not all receivers have taken yet."""

    def offer(self, flat: Tensor, check: Check) -> None:
        """Have all receivers take uint8 ``flat`` [n], contiguous and on the CPU. Its content must not change until they have."""
        self._look(0.0, check)
        self._num_offered += 1
        self._due.append(flat)
        for connection in self._taken:
            self._say(connection, flat, check)

    def wait_for_all_but(self, newest: int, check: Check) -> None:
        """Return when all receivers have taken all offered buckets, except the ``newest`` last ones."""
        deadline = time.monotonic() + self._timeout_s
        self._forget_what_is_taken()  # ``offer`` may have read it from the sockets
        while len(self._due) > newest:
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"a server did not take weights in {self._timeout_s:g} s")
            self._look(LOOK_EVERY_S, check)
            self._forget_what_is_taken()

    def _forget_what_is_taken(self) -> None:
        if len(self._taken) == self._num_receivers:
            while len(self._due) > self._num_offered - min(self._taken.values()):
                self._due.popleft()

    def _look(self, timeout_s: float, check: Check) -> None:
        """Accept receivers, and read which buckets they have taken."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._meet(check)
                continue
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if _says_something(connection):
                self._taken[connection] += 1
            elif self._taken[connection] == self._num_offered:
                # It may have got everything. If not, the next offer fails.
                self._selector.unregister(connection)
            else:
                self._end_without_a_receiver(check)

    def _meet(self, check: Check) -> None:
        connection, _ = self._listener.accept()
        try:
            _process_of(connection)
        except PermissionError:
            connection.close()
            return
        self._taken[connection] = 0
        self._selector.register(connection, selectors.EVENT_READ)
        for flat in self._due:
            self._say(connection, flat, check)

    def _say(self, connection: socket.socket, flat: Tensor, check: Check) -> None:
        try:
            connection.send(PLACE.pack(flat.data_ptr(), flat.numel()))
        except OSError:
            self._end_without_a_receiver(check)

    def _end_without_a_receiver(self, check: Check) -> NoReturn:
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            check()
            time.sleep(LOOK_EVERY_S)
        raise ConnectionError("a server's process has left the transfer")

    def close(self) -> None:
        """Close the sockets. Receivers that still wait see the end."""
        self._selector.close()
        for end in (self._listener, *self._taken):
            end.close()


class Receiving:
    """A receiver's end of one transfer. Its methods raise OSError if the sender has left, or is too late."""

    def __init__(self, meeting: Meeting) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.settimeout(meeting.timeout_s)
            self._connection.connect(f"\0{meeting.name}")
            self._process = _process_of(self._connection)
        except BaseException:
            self._connection.close()
            raise

    def receive(self, parts: Sequence[Tensor], look_at: Callable[[Tensor], None]) -> None:
        """Fill ``parts``, each uint8 [n], contiguous and on the CPU, one after another with the sender's next bucket.
        ``look_at`` gets each part once it is filled. The next one may lie in the same memory."""
        said = self._connection.recv(PLACE.size)
        if not said:
            raise ConnectionError("the learner has left the transfer")
        address, size = PLACE.unpack(said)
        due = sum(part.numel() for part in parts)
        if size != due:
            raise ConnectionError(f"the learner offers {size} bytes, but {due} are due")
        for part in parts:
            read_memory(self._process, address, part)
            address += part.numel()
            look_at(part)
        self._connection.send(b"\0")

    def close(self) -> None:
        self._connection.close()
