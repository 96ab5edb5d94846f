"""The fused, chunked log-prob and entropy against autograd through a plain log-softmax."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics import aligned as forward
from parallel.kept_sets import KeptSets
from parallel.megatron.vocab_parallel import linear_logprobs
from tests.support.megatron_workers import run_ranks, work_linear_logprobs


def make_case(
    *, num_tokens, hidden, vocab, padding=0, temperature=1.0, chunk_tokens=3, seed=0, scale=2.0, kept=False
):
    g = torch.Generator().manual_seed(seed)
    case = dict(
        hidden=torch.randn(num_tokens, hidden, generator=g),
        # padding rows are huge: a single one that took part would show
        weight=torch.cat(
            [torch.randn(vocab, hidden, generator=g) * scale, torch.full((padding, hidden), 1e4)]
        ),
        targets=torch.randint(0, vocab, (num_tokens,), generator=g),
        g=torch.randn(num_tokens, generator=g),
        h=torch.randn(num_tokens, generator=g),
        vocab_size=vocab,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    return {**case, "kept": random_kept_sets(case["targets"], vocab, g) if kept else None}


def random_kept_sets(targets, vocab, g) -> KeptSets:
    """Of each token some ids with its target, in any order; of every fourth token none, which means all."""
    rows = []
    for t, target in enumerate(targets.tolist()):
        chosen = torch.randperm(vocab, generator=g)[
            : int(torch.randint(1, vocab + 1, (1,), generator=g))
        ].tolist()
        rows.append([] if t % 4 == 3 else [*(id_ for id_ in chosen if id_ != target), target])
    ids = torch.tensor([id_ for row in rows for id_ in row], dtype=torch.int32)
    return KeptSets(num_T=torch.tensor([len(row) for row in rows], dtype=torch.int32), ids_M=ids)


def reference(case):
    """Plain autograd in float64, with all logits at once; what was not kept is minus infinity."""
    hidden = case["hidden"].double().requires_grad_()
    weight = case["weight"].double().requires_grad_()
    logits = hidden @ weight[: case["vocab_size"]].t() / case["temperature"]
    is_kept = torch.ones_like(logits, dtype=torch.bool)
    if case["kept"] is not None:
        parts = case["kept"].ids_M.split(case["kept"].num_T.tolist())
        for t, ids in enumerate(parts):
            if len(ids):
                is_kept[t] = False
                is_kept[t, ids.long()] = True
    logp = torch.log_softmax(logits.masked_fill(~is_kept, -torch.inf), -1)
    logprobs = logp.gather(1, case["targets"][:, None]).squeeze(1)
    logp = logp.masked_fill(~is_kept, 0.0)
    entropy = -(logp.exp() * is_kept * logp).sum(-1)
    ((logprobs * case["g"]).sum() + (entropy * case["h"]).sum()).backward()
    return dict(logprobs=logprobs.detach(), entropy=entropy.detach(), hidden=hidden.grad, weight=weight.grad)


def one_ranks_logits(case):
    """Aligned, of the whole vocabulary."""
    size = case["vocab_size"]
    return lambda hidden, weight: forward.linear(hidden, weight)[:, :size].contiguous()


def fused(case, with_entropy=True, dtype=None, whole_logits=None):
    hidden, weight = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()
    names = ("vocab_size", "temperature", "chunk_tokens", "kept")
    logprobs, entropy = linear_logprobs(
        hidden, weight, case["targets"], with_entropy=with_entropy, dtype=dtype, whole_logits=whole_logits,
        **{n: case[n] for n in names},
    )  # fmt: skip
    ((logprobs * case["g"]).sum() + ((entropy * case["h"]).sum() if with_entropy else 0)).backward()
    return dict(
        logprobs=logprobs.detach(),
        entropy=entropy.detach() if with_entropy else None,
        hidden=hidden.grad,
        weight=weight.grad,
    )


def assert_close(found, wanted, case, tolerance=1e-5):
    """Relative to the value, or to what it is made of where that cancels: a certain p leaves 1 - p only
    float32's last digits."""
    upstream = (case["g"].abs().max() + case["h"].abs().max()) / case["temperature"]
    floors = {
        "logprobs": 0.05,
        "entropy": 0.05,
        "hidden": 0.1 * upstream * case["weight"][: case["vocab_size"]].norm(),
        "weight": 0.1 * upstream * case["hidden"].norm(),
    }
    for name, value in wanted.items():
        error = (found[name].double() - value).norm() / max(float(value.norm()), float(floors[name]))
        assert error < tolerance, f"{name}: relative error {error:.1e}"


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 17),
    hidden=st.integers(1, 9),
    vocab=st.integers(1, 33),
    padding=st.integers(0, 5),
    chunk_tokens=st.integers(1, 20),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    seed=st.integers(0, 1000),
    kept=st.booleans(),
)
def test_matches_autograd_through_log_softmax(**shape):
    case = make_case(**shape)
    assert_close(fused(case), reference(case), case)


def test_what_was_not_kept_has_no_trace():
    """Two kept ids of logits 1 and 3, whatever the others are: p = 1 / (1 + e^2) and 1 / (1 + e^-2)."""
    kept = KeptSets(num_T=torch.tensor([2], dtype=torch.int32), ids_M=torch.tensor([4, 1], dtype=torch.int32))
    hidden, options = torch.ones(1, 1), {"vocab_size": 5, "temperature": 0.5, "chunk_tokens": 9, "kept": kept}
    found = []
    for others in (0.0, 1e4, -1e4):
        weight = torch.tensor([[others], [1.5], [others], [others], [0.5]], requires_grad=True)
        logprobs, entropy = linear_logprobs(hidden, weight, torch.tensor([4]), **options)
        (logprobs + entropy).sum().backward()
        found.append((logprobs.item(), entropy.item(), *weight.grad.flatten().tolist()))
    p = 1 / (1 + math.e**2)
    assert found[0] == found[1] == found[2]
    assert found[0][:2] == pytest.approx(
        (math.log(p), -p * math.log(p) - (1 - p) * math.log(1 - p)), abs=1e-6
    )
    assert found[0][2] == found[0][4] == found[0][5] == 0.0
    # d(log p_4 + H) / d logit_4 = (1 - p) - p (log p + H), over the temperature
    slope = ((1 - p) - p * (math.log(p) + found[0][1])) / 0.5
    assert (found[0][6], found[0][3]) == pytest.approx((slope, -slope), abs=1e-5)


def test_a_single_kept_id_is_certain():
    kept = KeptSets(num_T=torch.tensor([1, 0], dtype=torch.int32), ids_M=torch.tensor([2], dtype=torch.int32))
    case = make_case(num_tokens=2, hidden=4, vocab=5) | {"targets": torch.tensor([2, 1]), "kept": kept}
    found = fused(case)
    assert found["logprobs"][0] == found["entropy"][0] == 0 and not found["hidden"][0].any()
    assert found["logprobs"][1] < 0 and found["hidden"][1].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kept_sets_of_a_product_of_half_precision(dtype):
    """Its numbers end long before ``NEVER``, or keep few digits of it."""
    case = make_case(num_tokens=16, hidden=8, vocab=20, chunk_tokens=5, scale=0.5, temperature=0.7, kept=True)
    case["hidden"], case["weight"] = case["hidden"].to(dtype), case["weight"].to(dtype)
    assert_close(fused(case), reference(case), case, tolerance=3e-2)


def test_the_entropy_alone_has_its_gradient():
    case = make_case(num_tokens=7, hidden=5, vocab=11, padding=2, temperature=0.7)
    hidden, weight = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()
    options = {name: case[name] for name in ("vocab_size", "temperature", "chunk_tokens")}
    logprobs, entropy = linear_logprobs(hidden, weight, case["targets"], **options)
    (entropy * case["h"]).sum().backward()
    found = dict(logprobs=logprobs.detach(), entropy=entropy.detach(), hidden=hidden.grad, weight=weight.grad)
    assert_close(found, reference({**case, "g": torch.zeros(7)}), case)


def test_a_frozen_output_layer_gets_no_gradient_and_its_inputs_get_the_same():
    case = make_case(num_tokens=7, hidden=5, vocab=11, padding=2, temperature=0.7)
    hidden, options = (
        case["hidden"].clone().requires_grad_(),
        {name: case[name] for name in ("vocab_size", "temperature", "chunk_tokens")},
    )
    logprobs, entropy = linear_logprobs(hidden, case["weight"], case["targets"], **options)
    ((logprobs * case["g"]).sum() + (entropy * case["h"]).sum()).backward()
    assert case["weight"].grad is None and torch.equal(hidden.grad, fused(case)["hidden"])


def test_a_set_of_all_ids_is_the_full_vocabulary_bitwise():
    case = make_case(num_tokens=9, hidden=6, vocab=19, padding=2, temperature=0.7)
    everything = torch.arange(19, dtype=torch.int32).repeat(9)
    kept = KeptSets(num_T=torch.full((9,), 19, dtype=torch.int32), ids_M=everything)
    for name, value in fused({**case, "kept": kept}).items():
        assert torch.equal(value, fused(case)[name]), name


def test_inputs_are_not_changed_and_padding_gets_no_gradient():
    case = make_case(num_tokens=8, hidden=4, vocab=10, padding=6)
    hidden, weight = case["hidden"].clone(), case["weight"].clone()
    found = fused(case)
    assert torch.equal(case["hidden"], hidden) and torch.equal(case["weight"], weight)
    assert found["weight"][10:].abs().max() == 0 and found["weight"][:10].abs().min() > 0


def test_logprobs_are_bitwise_the_same_without_entropy_and_without_gradient():
    case = make_case(num_tokens=11, hidden=6, vocab=19, temperature=0.7)
    with_entropy, without = fused(case), fused(case, with_entropy=False)
    with torch.no_grad():
        scored, nothing = linear_logprobs(
            case["hidden"],
            case["weight"],
            case["targets"],
            vocab_size=19,
            temperature=0.7,
            chunk_tokens=3,
            with_entropy=False,
        )
    assert nothing is None
    assert torch.equal(with_entropy["logprobs"], without["logprobs"]) and torch.equal(
        scored, without["logprobs"]
    )
    only_logprobs = reference({**case, "h": torch.zeros(11)})
    assert_close({**without, "entropy": with_entropy["entropy"]}, only_logprobs, case)


def test_large_logits_stay_finite_and_exact():
    case = make_case(num_tokens=6, hidden=5, vocab=12, scale=4000.0)
    found, wanted = fused(case), reference(case)
    assert all(value.isfinite().all() for value in found.values())
    assert_close(
        {n: found[n] for n in ("logprobs", "entropy")}, {n: wanted[n] for n in ("logprobs", "entropy")}, case
    )


def test_bfloat16_reduces_in_float32():
    case = make_case(num_tokens=64, hidden=16, vocab=50, chunk_tokens=8, scale=0.5)
    case["hidden"], case["weight"] = case["hidden"].bfloat16(), case["weight"].bfloat16()
    found = fused(case)
    assert found["logprobs"].dtype == found["entropy"].dtype == torch.float32
    assert found["hidden"].dtype == found["weight"].dtype == torch.bfloat16
    assert_close(found, reference(case), case, tolerance=1e-2)


def test_nothing_is_rounded_to_half_precision_behind_the_product():
    case = make_case(num_tokens=20, hidden=16, vocab=50, chunk_tokens=8, scale=0.5, temperature=0.7)
    case["hidden"], case["weight"] = case["hidden"].bfloat16(), case["weight"].bfloat16()
    product = torch.cat([hidden @ case["weight"].t() for hidden in case["hidden"].split(8)])
    logp = torch.log_softmax(product.double() / 0.7, -1)
    found = fused(case)
    wanted = logp.gather(1, case["targets"][:, None]).squeeze(1)
    torch.testing.assert_close(found["logprobs"].double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["entropy"].double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)


def test_a_float32_projection_of_a_bfloat16_model_is_that_of_the_same_numbers_in_float32():
    case = make_case(num_tokens=20, hidden=16, vocab=50, padding=3, chunk_tokens=8, temperature=0.7)
    case["hidden"], case["weight"] = case["hidden"].bfloat16(), case["weight"].bfloat16()
    found = fused(case, dtype=torch.float32)
    wanted = fused({**case, "hidden": case["hidden"].float(), "weight": case["weight"].float()})
    assert torch.equal(found["logprobs"], wanted["logprobs"]) and torch.equal(
        found["entropy"], wanted["entropy"]
    )
    for name in ("hidden", "weight"):
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], wanted[name].bfloat16())
    assert not torch.equal(found["logprobs"], fused(case)["logprobs"])
    by_hidden = fused({**case, "hidden": case["hidden"].float()})
    assert torch.equal(by_hidden["logprobs"], wanted["logprobs"])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(temperature=0.0), "temperature=0.0"),
        (dict(chunk_tokens=0), "chunk_tokens=0"),
        (dict(vocab_size=99), "vocab_size=99"),
        (dict(targets=torch.zeros(3, dtype=torch.int64)), "targets"),
        (dict(weight=torch.zeros(5, 4)), r"hidden \(4, 3\) and weight \(5, 4\) must be .* of the same H"),
        (dict(weight=torch.zeros(1, 3, 3)), r"weight \(1, 3, 3\) must be"),
        (dict(hidden=torch.zeros(1, 3, 3)), r"hidden \(1, 3, 3\) and"),
        (
            dict(
                kept=KeptSets(
                    num_T=torch.zeros(3, dtype=torch.int32), ids_M=torch.zeros(0, dtype=torch.int32)
                )
            ),
            "kept sets of 3 tokens",
        ),
    ],
)
def test_bad_input_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        fused({**make_case(num_tokens=4, hidden=3, vocab=5), **change})


@pytest.mark.engines
def test_two_tensor_parallel_ranks(tmp_path):
    cases = [
        make_case(num_tokens=13, hidden=5, vocab=20, chunk_tokens=4, temperature=0.7, seed=1),
        make_case(num_tokens=5, hidden=4, vocab=7, padding=1, chunk_tokens=50, seed=2),
        make_case(num_tokens=6, hidden=4, vocab=3, padding=5, seed=3),  # rank 1 has padding only
        make_case(num_tokens=6, hidden=4, vocab=8, seed=4, scale=3000.0),
        # of some tokens a rank has no kept id
        make_case(
            num_tokens=33, hidden=5, vocab=7, padding=1, chunk_tokens=4, temperature=0.7, seed=5, kept=True
        ),
        make_case(num_tokens=6, hidden=4, vocab=3, padding=5, seed=6, kept=True),
    ]
    cases += [case | {"is_aligned": True} for case in (*cases[:3], cases[4])]
    ranks = run_ranks(work_linear_logprobs, 2, tmp_path, cases)
    for i, case in enumerate(cases):
        wanted = reference(case)
        for rank in ranks:
            assert torch.equal(rank[i]["logprobs"], ranks[0][i]["logprobs"])
        if case.get("is_aligned"):
            assert torch.equal(
                ranks[0][i]["logprobs"], fused(case, whole_logits=one_ranks_logits(case))["logprobs"]
            )
        whole = {**ranks[0][i], "weight": torch.cat([rank[i]["weight"] for rank in ranks])}
        names = ("logprobs", "entropy") if i == 3 else tuple(wanted)
        assert_close({n: whole[n] for n in names}, {n: wanted[n] for n in names}, case)
