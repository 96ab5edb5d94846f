"""Replayed experts in the learner's step, in one process: those of its pass before the update (``learner.routing: old``)
against the same ids given explicitly, which come from transformers; and those of a recorded batch."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.schema.objective import AggregationConfig
from configs.schema.run import RunConfig
from parallel.megatron import platform
from tests.support.layout_workers import weights_by_hf_names, with_experts
from tests.support.megatron_workers import VOCAB, learner_config
from tests.support.moe_workers import make_moe_model
from tests.trainer.batch.test_step_batch import make_groups
from trainer.algorithm.advantages import compute_advantages
from trainer.algorithm.correction import correct
from trainer.batch.step_batch import StepBatch
from trainer.learner import Learner, Update
from trainer.ranks.metrics import values
from trainer.recording import RecordedBatch, in_order, read_batch, write_batch
from trainer.studies.replay import of_parameters, replay

GROUPS = make_groups(
    [[9, 5, 14], [12, 3, 20], [7, 16, 2], [11, 4, 8]], [[1.0, 0.0, 0.1]] * 4, seed=3, vocab=VOCAB
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "m"
    return make_moe_model(folder, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])


def config_of(folder, **learner) -> RunConfig:
    config = learner_config(
        folder, data_parallel=1, aggregation=AggregationConfig(), sharded=True, learner=learner
    )
    changes = {"kl": {"coefficient": 0.05}, "entropy": {"coefficient": 0.0}}
    return RunConfig.model_validate(config.model_dump() | changes)


def chosen_by_transformers(folder, batch: StepBatch) -> Tensor:
    """uint8 [T, L, K], sequence by sequence."""
    model, packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), batch.packed
    parts = []
    with torch.no_grad():
        for start, end in pairwise(packed.cu_seqlens.tolist()):
            out = model(packed.tokens_T[None, start:end], output_router_logits=True)
            parts.append(torch.stack([logits_TE.topk(2).indices for logits_TE in out.router_logits], 1))
    return torch.cat(parts).to(torch.uint8)


def step(learner: Learner, *, given_TLK: Tensor | None = None) -> tuple[StepBatch, list[Update]]:
    """The scored batch and its updates. given_TLK: experts that are put into the batch before it is scored."""
    config, batch = learner._config, learner.receive(GROUPS)
    if given_TLK is not None:
        every_T = torch.ones(batch.packed.num_tokens, dtype=torch.bool)
        batch = batch.with_fields(experts_TLK=given_TLK, is_replayed_T=every_T)
    batch = learner.score(batch, before_update=True)
    correction = correct(batch.packed, config.correction, learner.total)
    advantages = compute_advantages(
        batch.packed, batch.rewards_S, batch.group_ids_S, config.advantage, total=learner.total
    )
    batch = batch.with_advantages(advantages).with_loss_weights(
        correction, config.aggregation, config.correction.denominator, learner.total
    )
    return batch, [learner.update(minibatch, policy=True) for minibatch in batch.minibatches()]


def test_the_update_replays_the_experts_of_the_pass_before_it(folder):
    platform.init_distributed(60.0)
    replaying = Learner(config_of(folder, routing="old"))
    given_TLK = chosen_by_transformers(folder, replaying.receive(GROUPS))
    batch, updates = step(replaying)
    assert torch.equal(batch.packed.experts_TLK, given_TLK) and batch.packed.is_replayed_T.all()
    explicit = Learner(config_of(folder))
    same_batch, same_updates = step(explicit, given_TLK=given_TLK)
    for name in ("old_logprobs_T", "ref_logprobs_T"):
        assert torch.equal(getattr(batch.packed, name), getattr(same_batch.packed, name)), name
    for update, same in zip(updates, same_updates, strict=True):
        assert values(update.metrics) == values(same.metrics)
        assert all(torch.equal(a, b) for a, b in zip(update.logprobs, same.logprobs, strict=True))
    weights = weights_by_hf_names(replaying.engine)
    for name, weight in weights_by_hf_names(explicit.engine).items():
        assert torch.equal(weights[name], weight), name
    # The first minibatch chooses by the weights of old. Later ones choose otherwise, if they may.
    first, second = (values(update.metrics)["mismatch/experts_differ"] for update in updates)
    assert first == 0.0 < second
    free = Learner(config_of(folder))
    free_batch, free_updates = step(free)
    assert free_batch.packed.experts_TLK is None
    assert torch.equal(free_batch.packed.old_logprobs_T, batch.packed.old_logprobs_T)
    own, ours = (values(each[0].metrics) for each in (free_updates, updates))
    assert own == {name: ours[name] for name in own}
    assert ours.keys() - own.keys() == {name for name in ours if "experts_differ" in name}
    assert not all(
        torch.equal(a, b) for a, b in zip(free_updates[1].logprobs, updates[1].logprobs, strict=True)
    )


def test_a_teacher_scores_the_same_tokens_by_its_own_experts(folder, tmp_path):
    """A reference from another folder: other layers, other experts, those of the policy's replay ignored."""
    teacher = make_moe_model(tmp_path / "teacher", "qwen3_moe", num_hidden_layers=2, num_experts=6, seed=1)
    config = config_of(folder, routing="old", minibatches=2)
    kl = {"coefficient": 0.05, "model": {"path": teacher, "dtype": "float32"}}
    learner = Learner(RunConfig.model_validate(config.model_dump() | {"kl": kl}))
    packed = step(learner)[0].packed
    assert packed.experts_TLK is not None
    model, parts = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32), []
    with torch.no_grad():
        for tokens in packed.tokens_T.split(packed.lengths):
            parts.append((model(tokens[None]).logits[0] / 0.7).log_softmax(-1))
    wanted_T = torch.cat(parts).gather(1, packed.targets_T[:, None]).squeeze(1)
    mask_T = packed.response_mask_T
    assert (packed.ref_logprobs_T - wanted_T)[mask_T].abs().max() <= 1e-5
    assert (packed.ref_logprobs_T - packed.old_logprobs_T)[mask_T].abs().max() > 0.1
    adapters = RunConfig.model_validate(
        config.model_dump()
        | {"kl": kl, "learner": config.learner.model_dump() | {"lora": {"rank": 2, "targets": ["qkv"]}}}
    )
    with_adapters = step(Learner(adapters))[0].packed
    assert torch.equal(with_adapters.ref_logprobs_T[mask_T], packed.ref_logprobs_T[mask_T])
    small = make_moe_model(tmp_path / "small", "qwen3_moe", vocab_size=VOCAB - 1)
    with pytest.raises(ValueError, match=r"kl.model has a vocabulary of 42 tokens, the policy's has 43"):
        Learner(RunConfig.model_validate(config.model_dump() | {"kl": kl | {"model": {"path": small}}}))


def test_a_recorded_batch_is_replayed_with_its_experts(folder, tmp_path):
    """The gradient of the step that recorded it, which has one minibatch."""
    platform.init_distributed(60.0)
    config = config_of(folder, minibatches=1, old_logprobs="always")
    learner = Learner(config)
    batch = learner.receive(GROUPS)
    given = with_experts(batch.packed, learner.engine.architecture.experts)
    batch, (update,) = step(learner, given_TLK=given.experts_TLK)
    recorded = RecordedBatch(
        step=1,
        version=0,
        packed=in_order([batch.packed]),
        rewards_S=batch.rewards_S,
        group_ids_S=batch.group_ids_S,
        correction=config.correction,
    )
    write_batch(tmp_path / "step.safetensors", recorded)
    recorded = read_batch(tmp_path / "step.safetensors")
    gradient = of_parameters(Learner.of_policy_alone(config).engine, temperature=config.rollout.temperature)
    found = replay(recorded, config, "as trained", config.correction, gradient)
    wanted = values(update.metrics)
    assert found.gradient_norm == pytest.approx(wanted["optim/grad_norm"], rel=1e-5)
    assert found.loss == pytest.approx(wanted["loss/total"], rel=1e-5)
    without = replace(recorded.packed, experts_TLK=None, is_replayed_T=None)
    other = replay(replace(recorded, packed=without), config, "free", config.correction, gradient)
    assert other.gradient_norm != pytest.approx(wanted["optim/grad_norm"], rel=1e-2)
