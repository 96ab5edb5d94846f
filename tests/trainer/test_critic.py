"""The critic: values against transformers, gradients against autograd, layouts and splits that do not matter,
checkpoints."""

from functools import partial

import pytest
import torch
from transformers import AutoModel

from configs.schema import RunConfig
from configs.schema.critic import CriticConfig
from configs.schema.model import ModelConfig
from configs.schema.objective import AggregationConfig, GaeAdvantage
from configs.schema.task import CountdownTask
from parallel.checkpoints.checkpoint import CheckpointError
from parallel.megatron import platform
from parallel.megatron.schedule import NonFiniteError
from rollout.records import Group
from tests.support.megatron_workers import (
    clipped_loss,
    gradients_of,
    learner_config,
    make_batch,
    make_engine,
    make_hf_model,
    make_value_batch,
    make_value_engine,
    relative_difference,
    run_ranks,
    value_weights_of,
    weighted_loss,
    weights_of,
    work_critic_fits,
    work_many_value_updates,
    work_scaled_updates,
    work_value_checkpoint,
    work_value_updates,
)
from tests.support.records import trajectory
from tests.support.recurrent_models import make_recurrent_model
from trainer.critic import Critic
from trainer.learner import Learner

LENGTHS = [9, 5, 12, 9, 3, 20, 5, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("model") / "m", "qwen3")


def hidden_states(model, batch):
    """The final hidden states [T, H] of a bare transformers backbone, one sequence at a time."""
    return torch.cat([model(row[None]).last_hidden_state[0] for row in batch.tokens_T.split(batch.lengths)])


@pytest.mark.parametrize("kind, tied", [("qwen2", True), ("qwen3", False), ("llama", False)])
def test_values_are_the_heads_product_with_transformers_hidden_states(tmp_path, kind, tied):
    folder = make_hf_model(tmp_path / "m", kind, tied=tied)
    batch = make_batch([5, 130, 2, 33, 5, 71])
    engine = make_value_engine(folder)
    with torch.no_grad():
        wanted = (
            hidden_states(AutoModel.from_pretrained(folder, dtype=torch.float32), batch)
            @ engine.chunks[0].value_head.weight[0]
        )
    (found,) = engine.values([batch])
    assert wanted.std() > 0.1  # the head says something
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_value_is_of_the_state_before_its_target(folder):
    """It depends on tokens up to its own, not on the target that is to be chosen next."""
    engine, batch = make_value_engine(folder), make_batch([12])
    tokens_T = batch.tokens_T.clone()
    tokens_T[6] = (tokens_T[6] + 1) % 43
    same, changed = engine.values([batch])[0], engine.values([batch.with_fields(tokens_T=tokens_T)])[0]
    assert torch.equal(same[:6], changed[:6]) and (same[6:] != changed[6:]).all()


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_starts_at_zero_and_holds_no_vocabulary_output(tmp_path, tied):
    folder = make_hf_model(tmp_path / "m", "qwen3", tied=tied)
    engine = make_value_engine(folder, head_seed=None)
    assert engine.values([make_batch(LENGTHS)])[0].count_nonzero() == 0
    assert [name for name, p in engine.chunks[0].named_parameters() if 43 in p.shape] == [
        "embedding.word_embeddings.weight"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_score_and_train_are_bitwise_equal(folder, dtype, recompute):
    engine = make_value_engine(folder, dtype=dtype, recompute=recompute)
    batch = make_value_batch(LENGTHS)
    microbatches = [batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])]
    for _ in range(2):  # also after the weights have moved
        scored = engine.values(microbatches)
        for old, new in zip(scored, engine.update(microbatches, clipped_loss).outputs, strict=True):
            assert new.dtype == torch.float32 and torch.equal(old, new)


def test_bfloat16_values_are_not_rounded_to_bfloat16(folder):
    (found,) = make_value_engine(folder, dtype="bfloat16").values([make_batch(LENGTHS)])
    assert (found != found.bfloat16().float()).any()


def test_gradient_is_autograds_on_a_plain_reference(folder):
    """Head, final norm and embedding, of the clipped loss through transformers' backbone."""
    engine = make_value_engine(folder, distributed=False)
    batch = make_value_batch(LENGTHS)
    head = engine.chunks[0].value_head.weight.detach().clone().requires_grad_()
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32)
    loss, _ = clipped_loss(batch, hidden_states(reference, batch) @ head[0])
    loss.backward()
    norm = torch.stack([p.grad.double().norm() for p in (head, *reference.parameters())]).norm()

    result = engine.update([batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])], clipped_loss)
    found = gradients_of(engine)
    wanted = {
        "value_head.weight": head.grad,
        "decoder.final_layernorm.weight": reference.norm.weight.grad,
        "embedding.word_embeddings.weight": reference.embed_tokens.weight.grad,
    }
    assert all(gradient.norm() > 1e-3 for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert relative_difference({name: found[name]}, {name: gradient}) < 1e-5, name
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_the_first_update_moves_the_head_alone(folder):
    engine = make_value_engine(folder, head_seed=None)
    before = value_weights_of(engine)
    engine.update([make_value_batch(LENGTHS)], clipped_loss)
    assert {n for n, t in value_weights_of(engine).items() if not torch.equal(t, before[n])} == {"head"}
    engine.update([make_value_batch(LENGTHS)], clipped_loss)
    assert {n for n, t in value_weights_of(engine).items() if not torch.equal(t, before[n])} == before.keys()


def test_a_bad_value_loss_changes_nothing(folder):
    engine = make_value_engine(folder)
    before = value_weights_of(engine)
    with pytest.raises(NonFiniteError, match=r"loss is not finite on micro-batches \{0"):
        engine.update([make_value_batch(LENGTHS)], lambda b, values_T: (values_T.sum() * torch.nan, None))
    assert all(torch.equal(before[n], t) for n, t in value_weights_of(engine).items())
    assert engine.values([]) == []


def test_a_policy_and_a_critic_live_in_one_process(folder):
    """Neither's update touches the other."""
    policy, critic = make_engine(folder), make_value_engine(folder)
    before = weights_of(policy), value_weights_of(critic)
    policy.update([make_batch(LENGTHS)], weighted_loss, temperature=1.0)
    assert all(torch.equal(before[1][n], t) for n, t in value_weights_of(critic).items())
    moved = weights_of(policy)
    assert relative_difference(moved, before[0]) > 1e-3
    critic.update([make_value_batch(LENGTHS)], clipped_loss)
    assert all(torch.equal(moved[n], t) for n, t in weights_of(policy).items())


def test_a_critic_fits_constant_returns(folder):
    found = work_critic_fits(folder, 1)
    assert all(values_T.count_nonzero() == 0 for values_T in found["first"])
    losses = [m["critic/loss"] for m in found["metrics"]]
    assert losses[0] == pytest.approx(0.5 * 0.7**2) and losses[-1] < 0.05 * losses[0]
    assert found["metrics"][0]["critic/value_mean"] == 0.0
    assert found["metrics"][-1]["critic/value_mean"] == pytest.approx(0.7, abs=0.2)
    assert found["metrics"][0]["critic/return_mean"] == pytest.approx(0.7)
    assert found["metrics"][0]["critic/clip_fraction"] == 0.0
    assert found["lr"] == pytest.approx(1e-2)


def test_a_critic_of_another_vocabulary_is_refused(folder, tmp_path):
    other = make_hf_model(tmp_path / "m", "qwen3", vocab_size=40)
    with pytest.raises(ValueError, match=r"critic.model has a vocabulary of 40 tokens, the policy's has 43"):
        critic = CriticConfig(model=ModelConfig(path=other))
        Critic(
            RunConfig(
                model=ModelConfig(path=folder),
                task=CountdownTask(),
                advantage=GaeAdvantage(type="gae"),
                critic=critic,
            )
        )


@pytest.mark.parametrize(
    "dtype, distributed", [("float32", True), ("float32", False), ("bfloat16", True), ("bfloat16", False)]
)
def test_going_on_equals_never_having_stopped(folder, tmp_path, dtype, distributed):
    settings = dict(dtype=dtype, distributed=distributed, schedule="cosine", weight_decay=0.1)
    batch = make_value_batch([9, 5, 12])
    first = make_value_engine(folder, **settings)
    for _ in range(2):
        first.update([batch], clipped_loss)
    first.save(tmp_path / "step_000002", {"step": 2})
    second = make_value_engine(folder, head_seed=None, **settings)
    assert second.load(tmp_path / "step_000002") == {"step": 2}
    for _ in range(3):
        one, other = (engine.update([batch], clipped_loss) for engine in (first, second))
        assert (one.lr, one.grad_norm) == (other.lr, other.grad_norm)
    assert all(torch.equal(t, value_weights_of(second)[n]) for n, t in value_weights_of(first).items())


def test_a_policys_checkpoint_is_no_critics(folder, tmp_path):
    make_engine(folder).save(tmp_path / "step_000001", {})
    with pytest.raises(CheckpointError, match="cannot be loaded into this run"):
        make_value_engine(folder).load(tmp_path / "step_000001")


def test_a_scaled_gradient_is_a_scaled_loss(folder):
    """In one process: called once with everything that the losses handed back, before the clipping."""
    engines = [make_engine(folder, clip_grad=1e-4) for _ in range(2)]
    batch = make_batch(LENGTHS)
    parts = [batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])]
    calls = []

    def scale(outputs):
        calls.append(outputs)
        return 0.25

    def loss_of(factor):
        return lambda batch, *of_tokens: (factor * weighted_loss(batch, *of_tokens)[0], batch.num_tokens)

    scaled = engines[0].update(parts, loss_of(1.0), temperature=1.0, grad_scale=scale)
    wanted = engines[1].update(parts, loss_of(0.25), temperature=1.0)
    assert calls == [[part.num_tokens for part in parts]] == [scaled.outputs]
    assert scaled.grad_norm == wanted.grad_norm > 1e-4  # a power of two: exact
    assert all(torch.equal(t, weights_of(engines[1])[n]) for n, t in weights_of(engines[0]).items())


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_bad_scale_changes_nothing(folder, factor):
    engine = make_engine(folder)
    before = weights_of(engine)
    with pytest.raises(NonFiniteError, match="grad_scale gave"):
        engine.update(
            [make_batch(LENGTHS)], weighted_loss, temperature=1.0, grad_scale=lambda outputs: factor
        )
    assert all(torch.equal(before[n], t) for n, t in weights_of(engine).items())


@pytest.mark.engines
def test_a_normaliser_known_after_the_forward_over_two_ranks(folder, tmp_path):
    """Equal to dividing every loss by it, for both optimizers, with clipping; and equal to one process."""
    optimizers = [dict(distributed=flag, clip_grad=1e-3, weight_decay=0.1) for flag in (True, False)]
    one = work_scaled_updates(folder, 1, LENGTHS, optimizers)[0]
    for rank, found in enumerate(
        run_ranks(work_scaled_updates, 2, tmp_path / "ranks", folder, 2, LENGTHS, optimizers)
    ):
        for result in found:
            # Once per update, this rank's own.
            assert result["calls"] == [[n - 1 for n in LENGTHS[rank::2]]] * 2
            assert result["after"]["norms"] == pytest.approx(result["before"]["norms"], rel=1e-5)
            assert result["after"]["norms"] == pytest.approx(one["before"]["norms"], rel=1e-5)
            assert result["after"]["norms"][0] > 1e-3  # so that the order of scaling and clipping shows
            assert relative_difference(result["after"]["weights"], result["before"]["weights"]) < 1e-6
            assert relative_difference(result["after"]["weights"], one["before"]["weights"]) < 1e-6


EVERYTHING = [list(range(8))]
PLAIN = dict(distributed=False, clip_grad=0.05, weight_decay=0.1)


@pytest.mark.engines
@pytest.mark.parametrize("layout", [dict(dp=2), dict(tp=2)])
def test_layouts_agree_with_one_process(tmp_path, layout):
    """Tied or not, sharded optimizer or not: values, gradients, norms and three steps of weights."""
    data_parallel = "dp" in layout
    rows = [[[0, 2], [4, 6]], [[1, 3, 5], [7]]] if data_parallel else [[[0, 1, 2], [3, 4, 5, 6, 7]]]
    jobs = {}
    for tied in (False, True):
        folder = make_hf_model(tmp_path / f"tied {tied}", "qwen3", tied=tied)
        jobs[f"{tied} plain"] = (folder, layout, rows, LENGTHS, PLAIN)
        jobs[f"{tied} distributed"] = (folder, layout, rows, LENGTHS, {**PLAIN, "distributed": True})
    ranks = run_ranks(work_many_value_updates, 2, tmp_path / "ranks", jobs)
    for name, (folder, *_) in jobs.items():
        one = work_value_updates(folder, {}, [EVERYTHING], LENGTHS, PLAIN)
        for found in (rank[name] for rank in ranks):
            assert_same_updates(found, one, name)
            assert all(torch.equal(t, ranks[0][name]["weights"][n]) for n, t in found["weights"].items()), (
                name
            )
        if not data_parallel:
            torch.testing.assert_close(
                torch.cat(ranks[1][name]["values"]), one["values"][0], rtol=0, atol=1e-5
            )


def assert_same_updates(found, one, name=""):
    assert found["bitwise"] and one["bitwise"], name
    assert found["norms"] == pytest.approx(one["norms"], rel=1e-5), name
    assert relative_difference(found["weights"], one["weights"]) < 1e-6, name
    if found["gradients"]:
        # of what is not sharded: with the norm, which is over everything, and the weights, that is all there
        # is to compare
        whole = {n for n, g in one["gradients"].items() if g.shape == found["gradients"][n].shape}
        assert "value_head.weight" in whole
        gradients = ({n: side["gradients"][n] for n in whole} for side in (found, one))
        assert relative_difference(*gradients) < 1e-5, name


@pytest.mark.engines
def test_sequence_parallel_ranks_agree_with_one_process(folder, tmp_path):
    """The head then sees this rank's tokens alone, and its gradient is summed."""
    lengths = [11, 6, 13, 9]  # take 35 places: a dummy makes them as many on either rank
    arguments = ({"tp": 2, "sp": True}, [[[0, 1, 2, 3]]], lengths, PLAIN)
    one = work_value_updates(folder, {}, *arguments[1:])
    for found in run_ranks(work_value_updates, 2, tmp_path / "ranks", folder, *arguments):
        assert_same_updates(found, one)
        torch.testing.assert_close(found["values"][0], one["values"][0], rtol=0, atol=1e-5)


@pytest.mark.engines
def test_two_ranks_fit_like_one(folder, tmp_path):
    one = work_critic_fits(folder, 1)
    ranks = run_ranks(work_critic_fits, 2, tmp_path / "ranks", folder, 2)
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    for found, wanted in zip(ranks[0]["metrics"], one["metrics"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert ranks[0]["norms"][:3] == pytest.approx(one["norms"][:3], rel=1e-4)


@pytest.mark.engines
@pytest.mark.parametrize("distributed", [True, False])
def test_two_ranks_resume_bitwise_and_under_another_layout(folder, tmp_path, distributed):
    settings, target = dict(distributed=distributed), tmp_path / "step_000002"
    saved = run_ranks(work_value_checkpoint, 2, tmp_path / "a", folder, dict(dp=2), settings, target, False)
    again = run_ranks(work_value_checkpoint, 2, tmp_path / "b", folder, dict(dp=2), settings, target, True)
    for first, second in zip(saved, again, strict=True):
        for moment in ("at", "after"):
            assert all(torch.equal(t, second[moment][n]) for n, t in first[moment].items()), moment
    for rank in run_ranks(
        work_value_checkpoint, 2, tmp_path / "c", folder, dict(tp=2), settings, target, True
    ):
        assert all(torch.equal(t, rank["at"][n]) for n, t in saved[0]["at"].items())
        assert relative_difference(rank["after"], saved[0]["after"]) < 1e-5


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_critic_that_computes_samples_whole_gets_no_more_than_the_budget(tmp_path, folder, is_recurrent):
    """One prompt of 12 tokens, four responses of two. A dense critic computes the prompt once, as the policy does."""
    make = (
        partial(make_recurrent_model, kind="qwen3_5_text")
        if is_recurrent
        else partial(make_hf_model, kind="qwen3")
    )
    samples = [
        trajectory(
            group_id=0, sibling_id=sibling, prompt_id="p", token_ids=[*range(12), 2, sibling], token_versions=[0] * 14,
            response_mask=[False] * 12 + [True] * 2, rollout_logprobs=[-1.0] * 14, reward=float(sibling), reward_parts={},
        )
        for sibling in range(4)
    ]  # fmt: skip
    platform.init_distributed(60.0)
    one = {"minibatches": 1}
    config = learner_config(
        folder, data_parallel=1, aggregation=AggregationConfig(), sharded=True, learner=one
    )
    advantage, critic = (
        GaeAdvantage(type="gae"),
        CriticConfig(model=ModelConfig(path=make(tmp_path / "c"), dtype="float32")),
    )
    learner = Learner(config.model_copy(update={"advantage": advantage, "critic": critic}))
    batch = learner.receive([Group(group_id=0, prompt_id="p", trajectories=samples)])
    tokens = [microbatch.num_tokens for microbatch in batch.microbatches()]
    assert (max(tokens) > config.learner.token_budget) != is_recurrent
    assert sum(tokens) == 4 * 13
