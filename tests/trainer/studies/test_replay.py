"""Recorded batches, and what other corrections would have made of them: files, errors, and the loss of the
trainer as the oracle."""

import json
import os
import random
from dataclasses import replace

import pytest
import torch

from configs.loader import ConfigError, load_config, resolved_yaml
from configs.presets import PRESETS
from configs.schema import RunConfig
from configs.schema.correction import CorrectionConfig
from launch.processes.run_folder import RunFolder
from launch.studies.replay import (
    UNCORRECTED,
    corrections_named,
    lag_table,
    plot,
    read_result,
    table,
    write_results,
)
from parallel.packing import PackedBatch
from tests.support.packed_batches import random_batch
from trainer.algorithm.aggregation import Counted, kept_factor
from trainer.algorithm.policy_loss import policy_loss
from trainer.batch.files import batch_file, recorded_steps
from trainer.recording import RecordedBatch, in_order, read_batch, write_batch
from trainer.studies.replay import as_one_minibatch, of_logprobs, replay


def config_of(**parts) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "task": {"type": "countdown"}} | parts)


def folder_of(tmp_path, **parts) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.config.write_text(resolved_yaml(config_of(**parts)))
    return folder


def recorded(lengths=(5, 9, 4, 7), *, seed=0) -> RecordedBatch:
    batch = random_batch(list(lengths), seed=seed)
    batch = batch.with_fields(advantages_T=batch.advantages_T * batch.response_mask_T)
    packed = PackedBatch(
        **{name: getattr(batch, name) for name in batch.__slots__}
        | {"sequence_ids_S": torch.arange(len(lengths))}
    )
    rewards_S = torch.rand(len(lengths), generator=torch.Generator().manual_seed(seed))
    group_ids_S = torch.zeros(len(lengths), dtype=torch.int64)
    return RecordedBatch(
        step=3,
        version=2,
        packed=packed,
        rewards_S=rewards_S,
        group_ids_S=group_ids_S,
        correction=PRESETS["decoupled_geo_rs"],
    )


def same(a: PackedBatch, b: PackedBatch) -> bool:
    return all(
        (getattr(a, name) is None and getattr(b, name) is None)
        or torch.equal(getattr(a, name), getattr(b, name))
        for name in a.__slots__
    )


# -------------------------------------------------------------------------------------------------------------------
# recording


def with_random_experts(packed: PackedBatch) -> PackedBatch:
    experts_TLK = torch.randint(0, 8, (packed.num_tokens, 3, 2), dtype=torch.uint8)
    return packed.with_fields(experts_TLK=experts_TLK, is_replayed_T=torch.rand(packed.num_tokens) < 0.5)


@pytest.mark.parametrize("episodes, replays", [(None, False), (torch.tensor([0, 1, 1, 2]), True)])
def test_a_batch_comes_back_as_it_was_written(tmp_path, episodes, replays):
    batch = replace(recorded(), episode_ids_S=episodes)
    batch = replace(batch, packed=with_random_experts(batch.packed)) if replays else batch
    path = batch_file(tmp_path / "batches", 3)
    write_batch(path, batch)
    again = read_batch(path)
    assert same(again.packed, batch.packed)
    assert torch.equal(again.rewards_S, batch.rewards_S) and torch.equal(again.group_ids_S, batch.group_ids_S)
    assert again.episode_ids_S is episodes is None or torch.equal(again.episode_ids_S, episodes)
    assert (again.step, again.version, again.correction) == (3, 2, PRESETS["decoupled_geo_rs"])
    (path.parent / "step_x.safetensors").touch()
    assert recorded_steps(tmp_path / "batches") == [3]
    assert recorded_steps(tmp_path / "nowhere") == []


def test_shares_of_ranks_are_joined_by_sequence_id():
    whole = recorded().packed
    assert same(in_order([whole.select([2, 0]), whole.select([3, 1])]), whole)


def test_what_follows_from_the_correction_is_not_recorded(tmp_path):
    batch = recorded()
    weights_T = torch.ones(batch.packed.num_tokens)
    with_weights = batch.packed.with_fields(
        importance_weights_T=weights_T, aggregation_T=weights_T, value_aggregation_T=weights_T
    )
    write_batch(
        batch_file(tmp_path, 3),
        RecordedBatch(**{n: getattr(batch, n) for n in batch.__slots__} | {"packed": with_weights}),
    )
    assert same(read_batch(batch_file(tmp_path, 3)).packed, batch.packed)


def test_a_flipped_bit_is_never_replayed(tmp_path):
    path, draw = tmp_path / "step_000003.safetensors", random.Random(3)
    batch = recorded()
    write_batch(path, batch)
    content = path.read_bytes()
    for _ in range(200):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"damaged|cannot be read|no batch of this version"):
            read_batch(path)


def test_a_file_that_is_no_batch_is_one_clear_error(tmp_path):
    path = tmp_path / "step_000001.safetensors"
    path.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match="cannot be read as a recorded batch"):
        read_batch(path)
    batch = recorded()
    write_batch(path, batch)
    path.write_bytes(path.read_bytes().replace(b"tandem batch 5", b"tandem batch 1"))
    with pytest.raises(ValueError, match="no batch of this version"):
        read_batch(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_says_what_to_do_and_leaves_nothing(tmp_path):
    path = tmp_path / "step_000003.safetensors"
    path.with_name(f".{path.name}.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot be recorded .*No space left.*record_batches=none"):
        write_batch(path, recorded())
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# replay


@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_gradient_are_the_trainers(name):
    """The whole batch in one micro-batch, by hand: weights and mask from the learner's log-probs, loss at
    current = them."""
    from trainer.algorithm.correction import correct_current

    batch, config, correction = recorded(seed=4), config_of(), PRESETS[name]
    found = replay(batch, config, name, correction, of_logprobs)
    packed = batch.packed
    fix = correct_current(packed, packed.old_logprobs_T, correction)
    current_T = packed.old_logprobs_T.clone().requires_grad_()
    old_T = packed.rollout_logprobs_T if correction.mode == "bypass" else packed.old_logprobs_T
    kept = fix.keep_T.sum().clamp(min=1)
    by_hand = packed.with_fields(
        old_logprobs_T=old_T, importance_weights_T=fix.weights_T, aggregation_T=fix.keep_T / kept
    )
    objective = config.model_copy(update={"correction": correction}).policy_objective
    loss, *_ = policy_loss(
        by_hand,
        current_T,
        torch.zeros_like(current_T),
        objective=objective,
        kl=config.kl,
        entropy=config.entropy,
        correction=correction,
        aggregation=config.aggregation.type,
    )
    loss.backward()
    assert found.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    # The replay packs sequences in an order of its own; norms and sums do not care.
    assert found.gradient_norm == pytest.approx(current_T.grad.norm().item(), rel=1e-5, abs=1e-9)
    assert found.metrics["mismatch/kept_fraction"] == pytest.approx(
        (fix.keep_T.sum() / packed.response_mask_T.sum()).item()
    )


def test_functions_of_the_users_own_replay_as_the_built_in_ones_and_are_recorded(tmp_path):
    own = "tests.support.own_functions"
    clip = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    objective = {"type": "function", "function": f"{own}:clipped", "settings": clip}
    weight = {"level": "function", "function": f"{own}:truncate", "settings": {"upper": 2.0}}
    correction = CorrectionConfig.model_validate({"weight": weight})
    write_batch(batch_file(tmp_path, 3), replace(recorded(seed=4), correction=correction))
    batch = read_batch(batch_file(tmp_path, 3))
    assert batch.correction == correction
    found = replay(batch, config_of(objective=objective), "own", batch.correction, of_logprobs)
    wanted = replay(batch, config_of(), "built in", PRESETS["decoupled_token_is"], of_logprobs)
    assert found.loss == wanted.loss and torch.equal(found.gradient, wanted.gradient)
    assert found.metrics["own/objective/ratio"] == wanted.metrics["policy/ratio_mean"] == 1.0
    assert found.metrics["own/weight/above"] == wanted.metrics["mismatch/truncated_fraction"]


def test_micro_batches_do_not_show():
    batch = recorded((6, 8, 3, 9, 5), seed=7)
    correction = CorrectionConfig.model_validate({
        "mode": "bypass", "loss": "policy_gradient", "weight": {"level": "sequence"},
        "reject": [{"rule": "ratio", "level": "geometric", "upper": 1.1}],
    })  # fmt: skip
    whole, parts = (
        replay(
            batch,
            config_of(learner={"token_budget": budget}, rollout={"max_new_tokens": 8}),
            "x",
            correction,
            of_logprobs,
        )
        for budget in (10_000, 9)
    )
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-6)
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-6, abs=1e-9)
    assert 0 < whole.metrics["mismatch/kept_fraction"] < 1


def test_the_cosine_is_of_the_angle_between_gradients():
    batch, config = recorded(seed=1), config_of()
    plain = replay(batch, config, "disabled", PRESETS["disabled"], of_logprobs)
    weighted = replay(batch, config, "tis", PRESETS["tis"], of_logprobs)
    nothing = replay(
        batch,
        config,
        "x",
        CorrectionConfig.model_validate({"reject": [{"rule": "k3", "upper": 1e-12}]}),
        of_logprobs,
    )
    assert plain.cosine(plain) == pytest.approx(1.0)
    by_hand = torch.nn.functional.cosine_similarity(
        plain.gradient.double(), weighted.gradient.double(), dim=0
    ).item()
    assert 0.5 < weighted.cosine(plain) < 1 and weighted.cosine(plain) == pytest.approx(by_hand)
    assert nothing.loss == 0.0 and nothing.gradient_norm == 0.0 and nothing.cosine(plain) is None


def test_the_entropy_bonus_is_left_out_and_kl_is_not():
    batch = recorded(seed=2)
    plain = replay(batch, config_of(), "tis", PRESETS["tis"], of_logprobs)
    assert (
        replay(batch, config_of(entropy={"coefficient": 0.5}), "tis", PRESETS["tis"], of_logprobs).loss
        == plain.loss
    )
    assert (
        replay(batch, config_of(kl={"coefficient": 0.5}), "tis", PRESETS["tis"], of_logprobs).loss
        > plain.loss
    )


# ------------------------------------------------------------------------------------------------------------
# names, table, figure


def test_the_uncorrected_one_is_always_there_to_compare_with(tmp_path):
    folder = folder_of(tmp_path)
    assert list(corrections_named(folder, ["tis"])) == [UNCORRECTED, "tis"]
    assert corrections_named(folder, []) == dict(PRESETS)
    with pytest.raises(ConfigError, match=r"(?s)--correction\n.*tiz\n.*no such preset\n.*did you mean `tis`"):
        corrections_named(folder, ["tiz"])


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("{off_policy_mask: 0.1}", "correction={off_policy_mask: 0.1}"),
        ("weight.upper=3.0", "correction.weight.upper=3.0"),
        ("{preset: tis, weight: {upper: 3.0}}", "correction={preset: tis, weight: {upper: 3.0}}"),
        ("{verl: {rollout_is: sequence}}", "correction={verl: {rollout_is: sequence}}"),
    ],
)
def test_a_correction_is_read_as_a_run_of_this_config_reads_it(tmp_path, text, override):
    folder = folder_of(tmp_path, correction={"weight": {"level": "token", "upper": 5.0}})
    run = load_config(folder.config, [override])
    assert corrections_named(folder, [text])[text] == run.correction
    assert run.correction != load_config(folder.config).correction


def test_a_mask_of_off_policy_sequences_is_replayed(tmp_path):
    """By hand: a token of negative advantage has no gradient where its response's mean of log rollout - log current is above."""
    folder, batch = folder_of(tmp_path, correction={"weight": {"level": "none"}}), recorded(seed=1)
    mask = "off_policy_mask=0.05"
    corrections = corrections_named(folder, [mask])
    plain, masked = (replay(batch, config_of(), n, corrections[n], of_logprobs) for n in (UNCORRECTED, mask))
    packed = as_one_minibatch(batch, config_of()).packed
    mask_T, drift_T = packed.response_mask_T, packed.rollout_logprobs_T - packed.old_logprobs_T
    is_far_T = torch.cat([
        torch.full_like(there_T, (drift[there_T].mean() > 0.05).item())
        for there_T, drift in zip(mask_T.split(packed.lengths), drift_T.split(packed.lengths), strict=True)
    ])  # fmt: skip
    is_cut_T = mask_T & is_far_T & (packed.advantages_T < 0)
    assert 0 < is_cut_T.sum() < mask_T.sum() and (plain.gradient[is_cut_T] != 0).all()
    assert torch.equal(masked.gradient, plain.gradient * ~is_cut_T)


def test_every_preset_is_replayed_where_the_run_itself_could_not_train_with_it(tmp_path):
    """In bypass mode there is no pass of ``old`` for a run to ask for; the recorded one is no contradiction."""
    for learner in ({"old_logprobs": "always"}, {"routing": "old", "minibatches": 2}):
        folder = folder_of(tmp_path, learner=learner)
        with pytest.raises(ConfigError, match=r"correction\.mode=bypass"):
            load_config(folder.config, ["correction=ppo_is_bypass"])
        assert corrections_named(folder, []) == dict(PRESETS)


def test_table_and_figure_stand_a_missing_number(tmp_path):
    row = {"correction": "tis", "weight_mean": 1.0, "weight_max": 2.0, "ess": 0.5, "ess_bounded": 0.75, "tokens_kept": 0.25,
           "sequences_kept": 0.5, "loss": -0.125, "gradient_norm": 0.0, "cosine": None}  # fmt: skip
    result = {"step": 3, "gradient_of": "log-probs", "rows": [row]}
    text = table(json.loads(json.dumps(result)))
    assert text.splitlines()[1].split() == [
        "tis",
        "1.000",
        "2",
        "0.500",
        "0.750",
        "25.0%",
        "50.0%",
        "-0.125",
        "0",
        "-",
    ]
    plot(result, tmp_path / "figures" / "x.png")
    assert (tmp_path / "figures" / "x.png").stat().st_size > 5000


def test_tokens_are_told_apart_by_their_age(tmp_path):
    batch = recorded(seed=4)
    lags = torch.randint(
        0, 3, batch.packed.rollout_logprobs_T.shape, generator=torch.Generator().manual_seed(1)
    )
    packed = batch.packed.with_fields(lag_T=lags.to(torch.int16))
    folder = RunFolder(tmp_path)
    write_batch(batch_file(folder.batches, 3), replace(batch, packed=packed))
    (tmp_path / "replay").mkdir()
    corrections = {name: PRESETS[name] for name in (UNCORRECTED, "decoupled_token_is", "decoupled_geo_rs")}
    write_results(folder, config_of(), 3, corrections, with_gradients=False)
    result = read_result(folder, 3)
    lines = lag_table(result).splitlines()
    assert lines[0].split() == ["lag", "up", "to", "0", "up", "to", "1", "up", "to", "2"]
    # By hand: the tokens of lag 1, their gap and what is kept of them.
    here = packed.response_mask_T & (lags == 1)
    gap = (packed.rollout_logprobs_T.exp() - packed.old_logprobs_T.exp()).abs()[here]
    of_one = result["by_lag"]["le_1"]
    assert of_one["tokens"] == here.sum().item()
    assert of_one["abs_prob_mean"] == pytest.approx(gap.double().mean().item(), rel=1e-5)
    assert lines[1].split() == ["tokens", *(f"{result['by_lag'][f'le_{k}']['tokens']:.0f}" for k in range(3))]
    rows = {row["correction"]: row["by_lag"]["le_1"] for row in result["rows"]}
    assert rows[UNCORRECTED]["kept_fraction"] == rows["decoupled_token_is"]["kept_fraction"] == 1.0
    assert rows[UNCORRECTED]["weight_mean"] == 1.0 != rows["decoupled_token_is"]["weight_mean"]
    assert rows["decoupled_geo_rs"]["kept_fraction"] < 1.0
    assert len(lines) == 6 + 4 and lines[6].startswith("as trained")
    assert lag_table({"rows": []}) == "", "recorded by a version without lags"


def test_kept_factor_of_nothing_is_one():
    assert kept_factor([]) == kept_factor([Counted(3, 0), None]) == 1.0
