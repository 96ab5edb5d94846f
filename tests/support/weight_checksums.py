"""What a server's checksums of given weights must be."""

from collections.abc import Iterable

from torch import Tensor

from rollout.servers.control import ExpectedChecksums


def expected_checksums(
    weights: Iterable[tuple[str, Tensor]], *, tensor_parallel: int = 1, kv_heads: int = 1
) -> dict[str, str]:
    """``ExpectedChecksums`` of all of ``weights``. kv_heads matters only for several ranks."""
    expected = ExpectedChecksums(tensor_parallel=tensor_parallel, kv_heads=kv_heads)
    for name, tensor in weights:
        expected.add(name, tensor)
    return expected.by_name()
