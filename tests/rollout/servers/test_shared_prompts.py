"""Equal prompts of one prefill, against a search by hand. A real server that computes each once: test_sglang.py."""

import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.servers.command import PLUGIN

sys.path.append(str(PLUGIN))  # as SGLang finds it
import tandem_shared_prompts as shared

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12)


@given(prompts, st.data())
def test_each_prompt_is_computed_once_and_copied_token_by_token(prompts, data):
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    prefixes = data.draw(st.lists(st.sampled_from([b"", b"s"]), min_size=len(prompts), max_size=len(prompts)))
    pairs = list(zip(prefixes, prompts, strict=True))
    where = [(sequence, i) for sequence, prompt in enumerate(prompts) for i in range(len(prompt))]
    first = [pairs.index(pair) for pair in pairs]
    sharing = shared.find_equal(ids, [len(prompt) for prompt in prompts], prefixes)
    if len(set(first)) == len(prompts):
        assert sharing is None
        return
    assert sharing.computed == sorted(set(first))
    assert [sharing.computed[place] for place in sharing.place_S] == first
    assert [where[t] for t in sharing.computed_tokens] == [w for w in where if w[0] == first[w[0]]]
    copies = [w for w in where if w[0] != first[w[0]]]
    assert [where[t] for t in sharing.copied_tokens] == copies
    assert [where[t] for t in sharing.source_tokens] == [(first[sequence], i) for sequence, i in copies]


@dataclass
class Batch:
    """Of SGLang's fields those that a prefill of text has."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    extend_seq_lens: torch.Tensor
    extend_prefix_lens: torch.Tensor
    extend_start_loc: torch.Tensor
    extend_seq_lens_cpu: list[int]
    extend_prefix_lens_cpu: list[int]
    rids: list[str]
    batch_size: int
    seq_lens_sum: int
    extend_num_tokens: int
    orig_seq_lens: torch.Tensor | None = None
    req_pool_indices_cpu: torch.Tensor | None = None
    extend_logprob_start_lens_cpu: list[int] | None = None
    top_logprobs_nums: list[int] | None = None
    token_ids_logprobs: list[None] | None = None
    lora_ids: list[None] | None = None
    mm_inputs: list[object] | None = None
    mrope_positions: torch.Tensor | None = None
    global_num_token_non_padded_cpu: int | None = None
    split_index: int = 0


def batch_of(prompts: list[list[int]], numbers: list[int]) -> Batch:
    """A prefill of these prompts, in which each sequence has its number wherever it can be told by it."""
    lengths = [len(prompt) for prompt in prompts]
    numbered = torch.tensor(numbers)
    return Batch(
        input_ids=torch.tensor([token for prompt in prompts for token in prompt]),
        positions=torch.tensor([i for prompt in prompts for i in range(len(prompt))]),
        out_cache_loc=torch.tensor(
            [100 * n + i for n, prompt in zip(numbers, prompts, strict=True) for i in range(len(prompt))]
        ),
        req_pool_indices=numbered,
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        extend_prefix_lens=torch.zeros(len(prompts), dtype=torch.int32),
        extend_start_loc=torch.tensor([sum(lengths[:i]) for i in range(len(lengths))], dtype=torch.int32),
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=[0] * len(prompts),
        rids=[f"request {n}" for n in numbers],
        batch_size=len(prompts),
        seq_lens_sum=sum(lengths),
        extend_num_tokens=sum(lengths),
        global_num_token_non_padded_cpu=sum(lengths),
    )


@given(prompts)
def test_the_smaller_prefill_is_that_of_the_different_prompts_alone(prompts):
    numbers = list(range(len(prompts)))
    batch = batch_of(prompts, numbers)
    sharing = shared.find_equal(batch.input_ids, batch.extend_seq_lens_cpu, [b""] * len(prompts))
    if sharing is None:
        return
    computed = [i for i in numbers if prompts.index(prompts[i]) == i]
    smaller, expected = shared.reduced(batch, sharing), batch_of([prompts[i] for i in computed], computed)
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(smaller, name), value, rtol=0, atol=0)
        else:
            assert getattr(smaller, name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [("mm_inputs", [None, object()]), ("mrope_positions", torch.zeros(3, 4)), ("split_index", 1)],
)
def test_a_field_of_which_nothing_is_known_leaves_the_prefill_to_sglang(name, value):
    batch = batch_of([[1, 2], [1, 2]], [0, 1])
    batch.mm_inputs = [None, None]
    assert shared.unknown_fields(batch) == []
    setattr(batch, name, value)
    assert shared.unknown_fields(batch) == [name]


def test_prefixes_are_equal_where_their_slots_are():
    batch = batch_of([[1], [1], [1], [1]], [0, 1, 2, 3])
    assert shared.cached_prefixes(torch.zeros(4, 9, dtype=torch.int32), batch) == [b""] * 4
    batch.extend_prefix_lens_cpu = [2, 2, 2, 1]
    table = torch.tensor([[5, 6, 7], [5, 6, 8], [5, 9, 7], [5, 6, 7]], dtype=torch.int32)
    first, second, third, fourth = shared.cached_prefixes(table, batch)
    assert first == second and len({first, third, fourth}) == 3
