"""The engine's relations: score equals train bitwise, splits and layouts do not matter, nothing moves on a
bad update."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import get_scheduler

from configs.schema.layout import LayoutConfig
from configs.schema.learner import OptimizerConfig
from configs.schema.model import ModelConfig
from parallel.engine import MegatronEngine
from parallel.megatron.optimizer import optimizer_parts
from parallel.megatron.schedule import NonFiniteError
from parallel.weights import hf_conversion
from tests.support.megatron_workers import (
    gradients_of,
    make_batch,
    make_engine,
    make_hf_model,
    relative_difference,
    run_ranks,
    weighted_loss,
    weights_of,
    work_group_deadlines,
    work_many_updates,
    work_non_finite,
    work_updates,
)

LENGTHS = [9, 5, 12, 9, 3, 20, 5, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


def reference_gradient(engine, microbatches):
    """The plain sum of the micro-batches' gradients, by torch.autograd on the bare model, without Megatron's
    DDP or schedule, and without linear layers that add their own."""
    engine.chunks[0].zero_grad(set_to_none=True)
    adding = [m for m in engine.chunks[0].modules() if getattr(m, "gradient_accumulation_fusion", False)]
    assert adding
    for module in adding:
        module.gradient_accumulation_fusion = False
    parameters = dict(engine.chunks[0].named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in microbatches:
        packed = engine.chunks[0].pack(batch.cu_seqlens, batch.positions_T)
        found = engine.chunks[0].logprobs(batch, packed, temperature=0.7, with_entropy=True)
        for name, grad in zip(
            total,
            torch.autograd.grad(weighted_loss(batch, *found)[0], list(parameters.values())),
            strict=True,
        ):
            total[name] += grad
    for module in adding:
        module.gradient_accumulation_fusion = True
    return total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_score_and_train_are_bitwise_equal(folder, dtype, recompute):
    engine = make_engine(folder, dtype=dtype, recompute=recompute)
    batch = make_batch(LENGTHS)
    microbatches = [batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])]
    for _ in range(2):  # also after the weights have moved
        scored = engine.logprobs(microbatches, temperature=0.7)
        trained = engine.update(microbatches, weighted_loss, temperature=0.7).outputs
        for old, new in zip(scored, trained, strict=True):
            assert old.dtype == torch.float32 and not old.requires_grad
            assert torch.equal(old, new["logprobs_T"])


def test_gradient_is_the_plain_sum(folder):
    engine = make_engine(folder, distributed=False)
    batch = make_batch(LENGTHS)
    microbatches = [batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])]
    wanted = reference_gradient(make_engine(folder, distributed=False), microbatches)
    result = engine.update(microbatches, weighted_loss, temperature=0.7)
    assert relative_difference(gradients_of(engine), wanted) < 1e-6
    norm = sum(g.double().square().sum() for g in wanted.values()).sqrt()
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(len(LENGTHS))), cuts=st.sets(st.integers(1, len(LENGTHS) - 1), max_size=3))
def test_gradient_does_not_depend_on_the_split_or_the_order(folder, order, cuts):
    batch = make_batch(LENGTHS)
    engine = _reused_engine(folder)
    wanted = reference_gradient(engine, [batch])
    edges = [0, *sorted(cuts), len(LENGTHS)]
    parts = [batch.select(list(order)[a:b]) for a, b in itertools.pairwise(edges)]
    assert relative_difference(reference_gradient(engine, parts), wanted) < 1e-6


_ENGINES = {}


def _reused_engine(folder):
    return _ENGINES.setdefault(folder, make_engine(folder, distributed=False))


def test_distributed_and_plain_optimizers_step_alike(folder):
    batch = make_batch(LENGTHS)
    after = []
    for distributed in (True, False):
        engine = make_engine(folder, distributed=distributed, weight_decay=0.1, clip_grad=0.5)
        for _ in range(3):
            engine.update([batch], weighted_loss, temperature=1.0)
        after.append(weights_of(engine))
    assert relative_difference(*after) < 1e-6
    assert relative_difference(after[0], weights_of(make_engine(folder))) > 1e-3  # they moved


def test_one_step_is_adamw_with_clipping(folder):
    """Against torch's AdamW on the reference gradient, written out here. Matrices decay, vectors do not."""
    batch = make_batch(LENGTHS)
    engine = make_engine(folder, distributed=False, clip_grad=0.5, lr=3e-3, weight_decay=0.3)
    gradient = reference_gradient(engine, [batch])
    parameters = {n: torch.nn.Parameter(p.detach().clone()) for n, p in engine.chunks[0].named_parameters()}
    norm = float(sum(g.double().square().sum() for g in gradient.values()).sqrt())
    assert norm > 0.5
    for name, parameter in parameters.items():
        parameter.grad = gradient[name] * (0.5 / (norm + 1e-6))
    groups = [
        {"params": [p for p in parameters.values() if (p.dim() > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.3), (False, 0.0))
    ]
    torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-4).step()
    assert engine.update([batch], weighted_loss, temperature=0.7).lr == pytest.approx(3e-3)
    moved = {n: p.detach() for n, p in engine.chunks[0].named_parameters()}
    assert relative_difference(moved, {n: p.detach() for n, p in parameters.items()}) < 1e-6


@pytest.mark.parametrize(
    "schedule, wanted",
    [
        (dict(schedule="constant"), [1e-2] * 4),
        (dict(schedule="linear", min_lr=2e-3), [1e-2, 8e-3, 6e-3, 4e-3]),
        (dict(schedule="cosine", warmup_steps=2), [5e-3, 1e-2, 7.5e-3, 2.5e-3]),
        (dict(schedule="constant", warmup_steps=8), [1e-2 * k / 8 for k in (1, 2, 3, 4)]),
    ],
)
def test_learning_rate_schedule(folder, schedule, wanted):
    engine = make_engine(folder, steps=4, **schedule)
    batch = make_batch([4, 6])
    found = [engine.update([batch], weighted_loss, temperature=1.0).lr for _ in range(4)]
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (5, 0), (5, 1), (5, 4)])
def test_a_schedule_is_that_of_transformers_without_its_step_of_rate_0(folder, schedule, steps, warmup):
    """Their warm-up begins at rate 0: a step more, which is left out."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)
    given = {"num_warmup_steps": warmup, "num_training_steps": steps + (warmup > 0)}
    theirs = get_scheduler(schedule, optimizer, **given)
    wanted = []
    for _ in range(given["num_training_steps"]):
        wanted += theirs.get_last_lr()
        optimizer.step()
        theirs.step()
    engine, batch = (
        make_engine(folder, steps=steps, schedule=schedule, warmup_steps=warmup),
        make_batch([4, 6]),
    )
    found = [engine.update([batch], weighted_loss, temperature=1.0).lr for _ in range(steps)]
    assert found == pytest.approx(wanted[-steps:], abs=1e-9) and min(found) > 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_loss_changes_nothing(folder, bad):
    engine = make_engine(folder)
    batch = make_batch(LENGTHS)
    engine.update([batch], weighted_loss, temperature=1.0)
    before = weights_of(engine)
    factors = iter([1.0, bad])
    with pytest.raises(NonFiniteError, match=r"loss is not finite on micro-batches \{1"):
        engine.update([batch, batch], lambda b, lp, en: (lp.sum() * next(factors), None), temperature=1.0)
    assert all(torch.equal(before[n], t) for n, t in weights_of(engine).items())
    # optimizer and schedule are untouched too: the next step is the one that an undisturbed run takes
    engine.update([batch], weighted_loss, temperature=1.0)
    undisturbed = make_engine(folder)
    for _ in range(2):
        undisturbed.update([batch], weighted_loss, temperature=1.0)
    assert all(torch.equal(t, weights_of(engine)[n]) for n, t in weights_of(undisturbed).items())


def test_non_finite_gradient_of_a_finite_loss_changes_nothing(folder):
    engine = make_engine(folder)
    before = weights_of(engine)

    def loss(batch, logprobs_T, entropy_T):
        return (logprobs_T - logprobs_T.detach()).abs().sqrt().sum(), None  # 0, with an infinite slope

    with pytest.raises(NonFiniteError, match=r"gradient's norm is nan.*word_embeddings"):
        engine.update([make_batch([4, 5])], loss, temperature=1.0)
    assert all(torch.equal(before[n], t) for n, t in weights_of(engine).items())


@pytest.mark.parametrize("attached", [True, False])
def test_an_all_zero_loss_is_an_update_with_no_gradient(folder, attached):
    engine = make_engine(folder)
    before = weights_of(engine)
    result = engine.update(
        [make_batch([4, 5])],
        lambda b, lp, en: ((lp * 0).sum() if attached else torch.zeros(()), "seen"),
        temperature=1.0,
    )
    assert result.grad_norm == 0.0 and result.outputs == ["seen"]
    assert all(torch.equal(before[n], t) for n, t in weights_of(engine).items())


@pytest.mark.parametrize("distributed", [True, False])
def test_micro_batches_without_a_gradient_need_no_backward_pass(folder, distributed):
    """Outputs in their order, gradient and weights are those of an update with every backward pass."""
    batch = make_batch(LENGTHS)
    microbatches = [batch.select(rows) for rows in ([0, 1], [2, 3, 4], [5], [6, 7])]
    flat = (1, 3)

    def loss_fn(batch, logprobs_T, entropy_T):
        loss, found = weighted_loss(batch, logprobs_T, entropy_T)
        number = next(
            i for i, one in enumerate(microbatches) if torch.equal(one.sequence_ids_S, batch.sequence_ids_S)
        )
        tracked.append((number, logprobs_T.requires_grad))
        return (loss * 0.0 if number in flat else loss), found

    results, after = [], []
    for forward_only in ([], [i in flat for i in range(4)]):
        engine, tracked = make_engine(folder, distributed=distributed), []
        results.append(engine.update(microbatches, loss_fn, temperature=0.7, forward_only=forward_only))
        after.append(weights_of(engine))
    assert tracked == [(1, False), (3, False), (0, True), (2, True)]
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-6)
    for one, other in zip(results[0].outputs, results[1].outputs, strict=True):
        assert torch.equal(one["logprobs_T"], other["logprobs_T"])
    assert relative_difference(after[1], after[0]) < 1e-7
    with pytest.raises(ValueError, match="never all of them"):
        engine.update(microbatches, loss_fn, temperature=0.7, forward_only=[True] * 4)


def test_a_frozen_engine_scores_and_refuses_to_train(folder):
    frozen = MegatronEngine(
        ModelConfig(path=folder, dtype="float32"), LayoutConfig(), None,
        logprob_chunk_tokens=7, seed=0,
    )  # fmt: skip
    batch = make_batch(LENGTHS)
    wanted = make_engine(folder).logprobs([batch], temperature=1.0)[0]
    assert torch.equal(frozen.logprobs([batch], temperature=1.0)[0], wanted)
    assert frozen.logprobs([], temperature=1.0) == []
    for action in (
        lambda: frozen.update([batch], weighted_loss, temperature=1.0),
        lambda: frozen.save(folder, {}),
    ):
        with pytest.raises(ValueError, match="frozen"):
            action()


def mean_loss(factor):
    def loss_fn(batch, logprobs_T, entropy_T):
        loss, found = weighted_loss(batch, logprobs_T, entropy_T)
        return loss * factor / batch.num_tokens, found["logprobs_T"]

    return loss_fn


@pytest.mark.parametrize("distributed", [True, False])
def test_float16_steps_by_the_unscaled_gradient_and_skips_one_that_overflows(folder, distributed):
    batch = make_batch(LENGTHS)
    engine, exact = (
        make_engine(folder, dtype=dtype, distributed=distributed) for dtype in ("float16", "float32")
    )
    scored = engine.logprobs([batch], temperature=0.7)[0]
    found, wanted = (e.update([batch], mean_loss(0.1), temperature=0.7) for e in (engine, exact))
    assert torch.equal(found.outputs[0], scored)
    assert found.skipped is False and wanted.skipped is None
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-2)
    weights = weights_of(engine)
    assert relative_difference({n: t.float() for n, t in weights.items()}, weights_of(exact)) < 2e-3
    skipped = [engine.update([batch], mean_loss(1e6), temperature=0.7) for _ in range(2)]
    assert [(s.skipped, s.grad_norm, s.lr) for s in skipped] == [(True, float("inf"), 0.0)] * 2
    assert all(torch.equal(weights[n], t) for n, t in weights_of(engine).items())
    (scaler,) = {part.grad_scaler for part in optimizer_parts(engine._optimizer)}
    assert scaler.scale.item() == 2.0**15  # Megatron forgives the first
    scaler._scale.fill_(1.0)
    with pytest.raises(NonFiniteError, match=r"not finite at a loss scale of 1.0"):
        engine.update([batch], mean_loss(float(2**60)), temperature=0.7)
    assert all(torch.equal(weights[n], t) for n, t in weights_of(engine).items())


def test_the_gradient_of_float16_is_without_its_scale(folder):
    batch = make_batch(LENGTHS)
    engine, exact = (make_engine(folder, dtype=dtype) for dtype in ("float16", "float32"))
    found, wanted = (e.gradient([batch], mean_loss(0.1), temperature=0.7)[0] for e in (engine, exact))
    assert (found - wanted).norm() < 1e-2 * wanted.norm()
    with pytest.raises(
        NonFiniteError, match=r"gradient is not finite at a loss scale of 65536.0 \(not finite on rank 0: "
    ):
        engine.gradient([batch], mean_loss(1e6), temperature=0.7)


def test_a_failed_export_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    def broken(models):
        yield "model.norm.weight", torch.zeros(32)
        raise RuntimeError("a gather failed")

    monkeypatch.setattr(hf_conversion, "export_hf", broken)
    with pytest.raises(RuntimeError, match="a gather failed"):
        make_engine(folder).save_hf(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_float32_output_projection_leaves_the_rest_in_bfloat16(folder):
    batch = make_batch(LENGTHS)
    engine = make_engine(folder, dtype="bfloat16", fp32_lm_head=True)
    model = engine.chunks[0]
    with torch.no_grad():
        logits_TV = model.logits(
            tokens_T=batch.tokens_T, packed=model.pack(batch.cu_seqlens, batch.positions_T)
        )
    assert logits_TV.dtype == torch.float32 and model.output_layer.weight.dtype == torch.bfloat16
    scored_T = engine.logprobs([batch], temperature=0.7)[0]
    wanted_T = (logits_TV / 0.7).log_softmax(-1).gather(1, batch.targets_T[:, None]).squeeze(1)
    torch.testing.assert_close(scored_T, wanted_T, rtol=0, atol=1e-5)
    rounded_T = make_engine(folder, dtype="bfloat16").logprobs([batch], temperature=0.7)[0]
    assert (rounded_T - wanted_T).abs().max() > 1e-3
    assert torch.equal(engine.update([batch], mean_loss(1.0), temperature=0.7).outputs[0], scored_T)


def test_layout_is_checked_against_the_processes(folder):
    with pytest.raises(ValueError, match="1 processes do not fit"):
        make_engine(folder, layout=LayoutConfig(dp=2))


def test_an_update_needs_micro_batches(folder):
    with pytest.raises(ValueError, match="at least one micro-batch"):
        make_engine(folder).update([], weighted_loss, temperature=1.0)


def test_optimizer_defaults_build(folder):
    assert OptimizerConfig().distributed  # the configuration that the tests above exercise is the default
    assert make_engine(folder).groups.world_size == 1


EVERYTHING = [list(range(8))]
OVER_TWO = [[0, 2, 4, 6], [1, 3, 5, 7]]


PLAIN = dict(distributed=False, clip_grad=0.5, weight_decay=0.1)


@pytest.mark.engines
@pytest.mark.parametrize("layout", [dict(dp=2), dict(tp=2)])
def test_layouts_agree_with_one_process(tmp_path, layout):
    """Tied or not, sharded optimizer or not, another split: gradients, norms and three steps of weights."""
    data_parallel = "dp" in layout
    rows = [[r] for r in OVER_TWO] if data_parallel else [EVERYTHING]
    other_rows = [[r[:1], r[1:]] for r in OVER_TWO] if data_parallel else [[[0, 1, 2], [3, 4, 5, 6, 7]]]
    jobs = {}
    for tied in (False, True):
        folder = make_hf_model(tmp_path / f"tied {tied}", "qwen3", tied=tied)
        jobs[f"{tied} plain"] = (folder, layout, rows, LENGTHS, 3, PLAIN)
        jobs[f"{tied} distributed"] = (folder, layout, other_rows, LENGTHS, 3, {**PLAIN, "distributed": True})
    ranks = run_ranks(work_many_updates, 2, tmp_path / "ranks", jobs)
    for name, (folder, *_) in jobs.items():
        one = work_updates(folder, {}, [EVERYTHING], LENGTHS, 3, PLAIN)
        for rank in (found[name] for found in ranks):
            assert rank["bitwise"] and one["bitwise"], name
            assert rank["norms"] == pytest.approx(one["norms"], rel=1e-5), name
            assert relative_difference(rank["weights"], one["weights"]) < 1e-6, name
            assert all(torch.equal(t, ranks[0][name]["weights"][n]) for n, t in rank["weights"].items()), name
            if data_parallel and rank["gradients"]:
                assert relative_difference(rank["gradients"], one["gradients"]) < 1e-6, name
    if not data_parallel:
        logprobs = ranks[1]["True plain"]["logprobs"][0]
        torch.testing.assert_close(logprobs, one["logprobs"][0], rtol=0, atol=1e-5)


@pytest.mark.engines
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_bad_loss_on_one_rank_stops_both(tmp_path, bad_rank):
    folder = make_hf_model(tmp_path / "m", "qwen3")
    ranks = run_ranks(work_non_finite, 2, tmp_path / "ranks", folder, bad_rank)
    assert all(rank["unchanged"] for rank in ranks)
    assert (
        "micro-batches {0: nan}" in ranks[bad_rank]["message"]
        and "another rank" in ranks[1 - bad_rank]["message"]
    )


@pytest.mark.engines
def test_the_deadline_reaches_megatrons_groups_and_cpu_tensors_travel_in_the_default_one(folder, tmp_path):
    # run_ranks gives the default group 60 s.
    for found in run_ranks(work_group_deadlines, 2, tmp_path / "ranks", folder, 150.0):
        assert found["seconds"] == {"dp": 180.0, "tp": 180.0, "default": 60.0}  # whole minutes, rounded up
        assert found["total"] == 3
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]


def test_a_deadline_of_nothing_is_refused(folder):
    with pytest.raises(ValueError, match="timeout_s=0"):
        make_engine(folder, timeout_s=0)
