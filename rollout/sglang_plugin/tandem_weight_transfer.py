"""The protocol between the learner's sender and the receiver in the servers. No SGLang here: both sides import this file.

A transfer is one request that announces all tensors of a pipeline stage in buckets, then bucket after bucket, then
the 64-bit hashes of all buckets. Each comes by a broadcast or, on one machine, out of the learner's memory
(``tandem_process_memory.py``).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

PROTOCOL = "tandem-transfer-5"
"""Name and version; both sides must have the same."""
QUESTION = "tandem-transfer?"
"""The load format of a request that asks for ``PROTOCOL``. SGLang knows no such format and refuses it. With a meeting behind
it, every rank of the server first copies ``TRIAL_BYTES`` out of the memory of the process that waits there."""
TRIAL_BYTES = 8
GIVEN_UP = "tandem-given-up"
"""The key that the learner sets in the store of a transfer group if it gives up a transfer by broadcasts."""
WORDS = 2**20
"""8-byte words that ``multiply_sum`` takes at a time."""
MULTIPLIER = 6364136223846793005


@dataclass(frozen=True, slots=True)
class Announcement:
    """The part of a request that does not fit into SGLang's own fields."""

    hash_kind: str
    counts: tuple[int, ...]
    """Tensors in each bucket."""
    is_whole: bool
    """Whether this transfer, with those before it, completes the model."""
    meeting: tuple[str, int] | None = None
    """Name and timeout_s of the ``Meeting`` with a sender whose memory is read. None: a broadcast for each bucket."""

    def load_format(self) -> str:
        extent, counts = "whole" if self.is_whole else "part", ",".join(map(str, self.counts))
        return ":".join([PROTOCOL, self.hash_kind, extent, counts, _meeting_text(self.meeting)])

    @classmethod
    def parse(cls, load_format: str | None) -> "Announcement | None":
        """None for one of SGLang's own load formats. Raises ValueError for another version, or a broken text."""
        protocol, *fields = (load_format or "").split(":")
        if not protocol.startswith("tandem"):
            return None
        if protocol != PROTOCOL or len(fields) != 4 or fields[0] not in HASHES:
            raise ValueError(
                f"the transfer is announced as {load_format!r:.60}, but this server takes {PROTOCOL}"
            )
        kind, extent, counts, meeting = fields
        numbers = tuple(int(count) for count in counts.split(","))
        return cls(kind, numbers, extent == "whole", _meeting_of(meeting))


def question(meeting: tuple[str, int] | None = None) -> str:
    """The load format of ``QUESTION``. meeting: as in ``Announcement``."""
    return QUESTION if meeting is None else f"{QUESTION}:{_meeting_text(meeting)}"


def asked_meeting(load_format: str) -> tuple[str, int] | None:
    """The meeting of a ``question``."""
    return _meeting_of(load_format.removeprefix(QUESTION).removeprefix(":"))


def _meeting_text(meeting: tuple[str, int] | None) -> str:
    return "" if meeting is None else "{}/{}".format(*meeting)


def _meeting_of(text: str) -> tuple[str, int] | None:
    name, _, timeout_s = text.partition("/")
    return (name, int(timeout_s)) if name else None


def hash_kind(device: torch.device) -> str:
    """The hash for bytes on a device: on a CPU XXH3, the fastest there; elsewhere one that torch computes on the device."""
    return "xxh3" if device.type == "cpu" else "multiply-sum"


def weight_hash(flat: Tensor, kind: str) -> Tensor:
    """The 64-bit hash of uint8 ``flat`` [n], contiguous, as int64 [] on its device. The host does not wait for a GPU."""
    return HASHES[kind](flat)


class RunningHash:
    """``weight_hash`` of uint8 ``flat``, whose parts come one after another. XXH3 reads each part while it is in the cache."""

    def __init__(self, flat: Tensor, kind: str) -> None:
        self._flat, self._kind = flat, kind
        self._xxh3 = xxhash.xxh3_64() if kind == "xxh3" else None

    def add(self, part: Tensor) -> None:
        if self._xxh3 is not None:
            here = part.cpu()
            self._xxh3.update(_memory_of(here))

    def digest(self) -> Tensor:
        """int64 []."""
        if self._xxh3 is None:
            return weight_hash(self._flat, self._kind)
        return torch.tensor(_as_int64(self._xxh3.intdigest()), device=self._flat.device)


def xxh3(flat: Tensor) -> Tensor:
    """XXH3 with 64 bits (Collet). It misses a change with a probability of about 2^-64."""
    here = flat.cpu()
    return torch.tensor(_as_int64(xxhash.xxh3_64_intdigest(_memory_of(here))), device=flat.device)


def _memory_of(here: Tensor) -> ctypes.Array:
    """The bytes of a tensor in this process's memory, valid while the tensor lives. A ``numpy`` view would forbid torch to
    resize the storage. That storage may be a weight's own, which an offloaded learner gives back."""
    assert here.dtype == torch.uint8 and here.is_contiguous()
    return (ctypes.c_ubyte * here.numel()).from_address(here.data_ptr())


def multiply_sum(flat: Tensor) -> Tensor:
    """sum_i k_(i mod W) m^(i div W) x_i mod 2^64 over the 8-byte words x_i of the bytes, padded with zeros, plus
    the number of bytes times m.

    W is ``WORDS``, m is ``MULTIPLIER``. All k are odd and pseudo-random, and m is odd: a change within one word
    always changes the sum. It misses other changes with a probability of about 2^-64.
    """
    size = flat.numel()
    if size % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = torch.cat([flat, flat.new_zeros(-size % 8)])
    words = flat.view(torch.int64)
    keys = _keys(flat.device)
    total, power = torch.tensor(size, device=flat.device) * MULTIPLIER, 1
    for part in words.split(WORDS):
        total += (part * keys[: len(part)]).sum() * power
        power = _as_int64(power * MULTIPLIER)
    return total


def _keys(device: torch.device) -> Tensor:
    """k: the odd numbers that splitmix64 (Steele et al. 2014) makes of 0, 1, 2, ..."""
    if device not in _KEYS:
        x = torch.arange(1, WORDS + 1, device=device) * _as_int64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _as_int64(factor)
        _KEYS[device] = x | 1
    return _KEYS[device]


_KEYS: dict[torch.device, Tensor] = {}


def _as_int64(number: int) -> int:
    """The signed number of the same 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


HASHES = {"xxh3": xxh3, "multiply-sum": multiply_sum}


def differing(sent: Sequence[int], received: Sequence[int]) -> list[int]:
    """The buckets whose hashes differ."""
    return [i for i, pair in enumerate(zip(sent, received, strict=True)) if pair[0] != pair[1]]
