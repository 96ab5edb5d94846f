"""A device without memory and arithmetic: its counts by hand, its known numbers against torch's own."""

import gc

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from parallel.megatron.attention import Scoring, lower_right_causal_attention
from parallel.simulation.device import BLOCK_BYTES, MOST_KNOWN, NotKnown, SimulatedDevice
from parallel.simulation.kernels import attention_flops, fused

META = torch.device("meta")


def test_memory_is_that_of_live_storages_in_whole_blocks():
    with SimulatedDevice() as device:
        a = torch.zeros(1000, device=META)
        view = a.view(10, 100)[3]
        b = a + 1
        assert device.memory.total == 2 * 4096  # views have no memory of their own
        del a
        assert device.memory.total == 2 * 4096  # a view keeps its storage
        del view
        assert device.memory.total == 4096
        small = torch.zeros(1, device=META)
        assert device.memory.total == 4096 + BLOCK_BYTES
        del b, small
        gc.collect()
        assert device.memory.total == 0
        assert device.memory.peak == 2 * 4096


def test_memory_is_counted_by_parts():
    with SimulatedDevice() as device:
        weights = torch.zeros(512, device=META)
        with device.memory.allocating("activations"):
            kept = weights * 2
        device.memory.relabel([weights], "parameters")
        device.memory.start_peak()
        assert device.memory.at_peak == {"parameters": 2048, "activations": 2048}
        del kept
        device.memory.start_peak()
        assert device.memory.at_peak == {"parameters": 2048}
        other = torch.zeros(128, device=META)
        device.memory.to_host([weights, weights.view(2, 256)])
        assert device.memory.total == 512
        device.memory.relabel([weights], "optimizer")
        device.memory.start_peak()
        assert device.memory.at_peak == {"other": 512}
        device.memory.from_host([weights, other])
        assert device.memory.at_peak == {"other": 512, "optimizer": 2048}
        device.memory.to_host([weights])
        del weights
        assert device.memory.total == 512


def test_flops_are_torchs_own():
    layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 8))
    with FlopCounterMode(display=False) as counted:
        layers(torch.randn(5, 32)).sum().backward()
    simulated = torch.nn.Sequential(*(layer for layer in layers)).to(META)
    with SimulatedDevice() as device:
        simulated(torch.randn(5, 32).to(META)).sum().backward()
    assert device.flops == counted.get_total_flops() > 0


OPERATIONS = {
    "sum": lambda x, m: x.cumsum(0),
    "where": lambda x, m: torch.where(m, x, 0),
    "select": lambda x, m: x[m],
    "sort": lambda x, m: x.sort().values,
    "places": lambda x, m: m.nonzero().flatten(),
    "repeat": lambda x, m: x.repeat_interleave(m.long() + 1),
    "unique": lambda x, m: x.unique(),
    "add": lambda x, m: x + m,
    "in place": lambda x, m: x.clone().add_(3),
    "histogram": lambda x, m: torch.zeros(7, dtype=torch.int64, device=x.device).index_add(
        0, x % 7, torch.ones_like(x)
    ),
}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
    st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=3),
)
def test_what_comes_from_the_host_stays_known(rows, names):
    """The numbers, and the shapes that depend on them, are those of the same operations on the CPU."""
    numbers, mask = torch.tensor([n for n, _ in rows]), torch.tensor([m for _, m in rows])
    with SimulatedDevice():
        on_host, there = numbers, numbers.to(META)
        for name in names:
            if len(on_host) == len(mask):
                on_host, there = OPERATIONS[name](on_host, mask), OPERATIONS[name](there, mask.to(META))
        assert there.is_meta
        assert there.shape == on_host.shape
        assert there.tolist() == on_host.tolist()


def test_reads_by_the_host_are_counted():
    with SimulatedDevice() as device:
        x = torch.tensor([1.0, 2.0]).to(META)
        assert x.sum().item() == 3.0
        assert (x > 1).cpu().tolist() == [False, True]
        assert device.host_reads == 2


def test_an_unknown_number_is_0_and_an_unknown_shape_an_error():
    with SimulatedDevice():
        weights = torch.empty(4, device=META)
        assert weights.sum().item() == 0.0
        assert bool(weights.isfinite().all())  # whatever the numbers
        with pytest.raises(NotKnown, match="depends on weights"):
            (weights > 0).nonzero()
        with pytest.raises(NotKnown, match="selection by a mask"):
            weights[weights > 0]
        with pytest.raises(NotKnown, match="asks the device"):
            bool((weights > 0).any())


def test_weights_of_any_size_are_finite():
    """An embedding of a large model has more elements than there are numbers known."""
    with SimulatedDevice() as device:
        weights = torch.empty(MOST_KNOWN + 1, device=META)
        finite = weights.isfinite()
        assert bool(finite.all()) and not bool((~finite).any())
        assert device.numbers(finite).untyped_storage().nbytes() == 1
        few = weights[:4].isfinite()
        few[1:3] = False
        assert few.nonzero().shape == (2, 1), "numbers of a part are those of the whole"


def test_numbers_that_are_changed_by_unknown_ones_are_forgotten():
    with SimulatedDevice() as device:
        x = torch.zeros(4, device=META)
        assert device.numbers(x) is not None
        x.add_(torch.empty(4, device=META))
        assert device.numbers(x) is None


def test_tensors_of_both_devices_do_not_mix():
    """As on a GPU."""
    with SimulatedDevice():
        there = torch.ones(3, device=META)
        assert (there * torch.tensor(2.0)).tolist() == [2.0] * 3  # a number without a dimension may
        with pytest.raises(RuntimeError, match="on the device and on the CPU"):
            there + torch.ones(3)


def test_the_choice_of_experts_is_even():
    with SimulatedDevice():
        chosen = torch.empty(8, 4, device=META).topk(2, -1).indices
        assert torch.zeros(4, dtype=torch.int64, device=META).index_add(
            0, chosen.flatten(), torch.ones(16, dtype=torch.int64, device=META)
        ).tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (2, 6), (1, 1)])
def test_attention_keeps_what_flash_attention_keeps(queries, keys):
    """Inputs, output and a float32 sum a query; FLOPs by the pairs of a query and a key."""
    with SimulatedDevice() as device, fused(device):
        q = torch.empty(2, 8, queries, 64, device=META, dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.empty(2, 4, keys, 64, device=META, dtype=torch.bfloat16, requires_grad=True) for _ in "kv"
        )
        before = device.memory.total
        out = lower_right_causal_attention(q, k, v, Scoring())
        blocks = [2 * 8 * queries * 64 * 2, 2 * 8 * queries * 4]
        assert device.memory.total - before == sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in blocks)
        pairs = sum(keys - queries + i + 1 for i in range(queries))
        assert device.flops == attention_flops(q, k) == 2 * 8 * pairs * (2 * 64 + 2 * 64)
        out.sum().backward()
        assert (q.grad.shape, k.grad.shape, v.grad.shape) == (q.shape, k.shape, v.shape)
        assert device.flops == pytest.approx(3.5 * attention_flops(q, k))


def test_a_mask_of_numbers_is_kept_and_hides_no_flops():
    with SimulatedDevice() as device, fused(device):
        q, k = (
            torch.empty(2, 8, n, 64, device=META, dtype=torch.bfloat16, requires_grad=True) for n in (3, 9)
        )
        out = F.scaled_dot_product_attention(q, k, k, attn_mask=q.new_zeros(3, 9))
        assert device.flops == attention_flops(q, k, is_causal=False) == 2 * 8 * 3 * 9 * (2 * 64 + 2 * 64)
        out.sum().backward()
        assert q.grad.shape == q.shape and k.grad.shape == k.shape


def test_attention_without_a_causal_mask_is_not_simulated():
    with SimulatedDevice() as device, fused(device):
        q = torch.empty(1, 1, 2, 8, device=META)
        with pytest.raises(NotKnown, match="causal"):
            F.scaled_dot_product_attention(q, q, q)


def test_real_tensors_keep_their_kernels():
    x, weight = torch.randn(3, 8), torch.randn(8)
    q = torch.randn(1, 2, 4, 8)
    expected = F.rms_norm(x, (8,), weight, 1e-6), F.scaled_dot_product_attention(q, q, q)
    with SimulatedDevice() as device, fused(device):
        assert torch.equal(F.rms_norm(x, (8,), weight, 1e-6), expected[0])
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), expected[1])
        assert device.memory.peak == device.flops == 0
