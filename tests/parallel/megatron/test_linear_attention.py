"""Gated delta nets (Qwen3.5): the learner against transformers, layouts against one process, and a real SGLang server."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.schema.layout import LayoutConfig
from rollout.servers.control import SGLangControl
from rollout.tiny_model import make_tiny_countdown_model
from tests.parallel.megatron.test_model import assert_same_weights
from tests.parallel.megatron.test_moe import assert_same_step, gap
from tests.support.layout_workers import by_hf_names, work_layout
from tests.support.megatron_workers import make_batch, make_engine, run_ranks, weighted_loss
from tests.support.moe_workers import by_transformers, work_layouts
from tests.support.real_servers import EXACT, make_fleet, send
from tests.support.recurrent_models import make_recurrent_model

SHAPES = [
    ("qwen3_5_text", {}),
    ("qwen3_5_text", dict(tied=True, linear_num_key_heads=4, num_key_value_heads=1)),
]


@pytest.mark.parametrize("kind, changes", SHAPES)
def test_logits_and_gradients_match_transformers_on_packed_batches(tmp_path, kind, changes):
    """Sequences of one chunk and of several, and of fewer tokens than the convolution sees."""
    folder = make_recurrent_model(tmp_path / "m", kind, **changes)
    batch = make_batch([5, 60, 2, 33, 5, 151, 3])
    engine = make_engine(folder, distributed=False)
    model = engine.chunks[0]
    with torch.no_grad():
        found = model.logits(tokens_T=batch.tokens_T, packed=model.pack(batch.cu_seqlens, batch.positions_T))
    wanted, wanted_gradients = by_transformers(folder, batch, 0.7, tmp_path / "gradients")
    assert wanted.std() > 0.1  # the model says something
    assert (found - wanted).abs().max() <= 1e-5
    engine.update([batch.select([0, 1, 2]), batch.select([3, 4, 5, 6])], weighted_loss, temperature=0.7)
    gradients = by_hf_names(engine, lambda p: p.main_grad)
    assert gradients.keys() == wanted_gradients.keys()
    for name, wanted_gradient in wanted_gradients.items():
        assert (gradients[name] - wanted_gradient).norm() <= 1e-5 * wanted_gradient.norm(), name


@pytest.mark.parametrize("kind, changes", SHAPES)
def test_round_trip_is_bit_identical(tmp_path, kind, changes):
    folder = make_recurrent_model(tmp_path / "m", kind, **changes)
    make_engine(folder).save_hf(tmp_path / "out")
    assert_same_weights(folder, tmp_path / "out")


@pytest.mark.parametrize("dtype, recompute", [("float32", "none"), ("bfloat16", "full")])
def test_score_and_train_are_bitwise_equal(tmp_path, dtype, recompute):
    engine = make_engine(
        make_recurrent_model(tmp_path / "m", "qwen3_5_text"), dtype=dtype, recompute=recompute
    )
    batch = make_batch([9, 5, 12, 90, 3, 20])
    microbatches = [batch.select([0, 1, 2]), batch.select([3, 4, 5])]
    for _ in range(2):  # also after the weights have moved
        scored = engine.logprobs(microbatches, temperature=0.7)
        trained = engine.update(microbatches, weighted_loss, temperature=0.7).outputs
        assert all(torch.equal(old, new["logprobs_T"]) for (old, _), new in zip(scored, trained, strict=True))


# --- layouts against one process
# -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """The first of two pipeline stages has recurrent layers alone."""
    folder = tmp_path_factory.mktemp("models")
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    changes = {"num_hidden_layers": 4, "full_attention_interval": 3, "layer_types": kinds}
    # A key/value head on several ranks.
    return {
        "qwen3_5_text": make_recurrent_model(
            folder / "dense", "qwen3_5_text", num_key_value_heads=1, **changes
        )
    }


TWO_RANKS = {
    "tp2 sp": dict(tp=2, sp=True),
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "pp2 vpp2": dict(pp=2, vpp=2),
}


@pytest.fixture(scope="module")
def alone(models, tmp_path_factory) -> dict[str, dict]:
    checkpoint = tmp_path_factory.mktemp("alone") / "step_000001"
    jobs = {name: ("step", dict(kind="policy", folder=folder)) for name, folder in models.items()}
    jobs["saved"] = ("save", dict(kind="policy", folder=models["qwen3_5_text"], checkpoint=checkpoint))
    return work_layout(LayoutConfig(), jobs) | {"folder": checkpoint}


@pytest.mark.engines
def test_one_step_of_two_ranks_equals_that_of_one_process(models, alone, tmp_path):
    """Every gradient and weight; the folder out again; and the step after a checkpoint of one process."""
    jobs = {name: ("step", dict(kind="policy", folder=folder)) for name, folder in models.items()}
    jobs["loaded"] = (
        "load",
        dict(kind="policy", folder=models["qwen3_5_text"], checkpoint=alone["folder"], recompute="full"),
    )
    cases = {
        case: (layout, jobs, {folder: tmp_path / case / name for name, folder in models.items()})
        for case, layout in TWO_RANKS.items()
    }
    ranks = run_ranks(work_layouts, 2, tmp_path / "ranks", cases, deadline_s=900)
    for case in TWO_RANKS:
        for name, folder in models.items():
            assert_same_step([found[case][name] for found in ranks], alone[name])
            assert_same_weights(folder, tmp_path / case / name)
        assert_same_step([found[case]["loaded"] for found in ranks], alone["saved"])


# --- a real SGLang server
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.engines
@pytest.mark.parametrize("family, tensor_parallel", [("qwen3_5_text", 2)])
def test_a_server_computes_what_the_learner_computes(tmp_path, family, tensor_parallel):
    """Prompts in pieces of a few tokens, several requests at a time, and weights of another model and back."""
    for seed in (0, 1):
        make_tiny_countdown_model(tmp_path / f"{seed}", seed=seed, family=family, initializer_range=0.1)
    engines = [make_engine(tmp_path / f"{seed}") for seed in (0, 1)]
    fleet = make_fleet(
        tmp_path / "0", tmp_path / "logs", tp=tensor_parallel, server_args={"chunked_prefill_size": 8}
    )
    try:
        fleet.start()
        fleet.wait_healthy(400)
        with SGLangControl(fleet.urls, tensor_parallel=tensor_parallel, timeout_s=120) as control:
            (from_disk,) = control.checksums()
            assert gap(fleet.urls, engines[0], replays=False) <= EXACT
            for version, engine in ((1, engines[1]), (2, engines[0])):
                exported = SimpleNamespace(named_parameters=engine.export_hf)
                send(control, exported, version=version, tensor_parallel=tensor_parallel)
                (received,) = control.checksums()
                control.resume()
                same = {name for name in received if received[name] == from_disk[name]}
                assert received.keys() == from_disk.keys()
                # Of the other model, norms and steps are the same, and a rank's part of the vocabulary that is all padding.
                moved = [n for n in same if any(part in n for part in ("proj", "conv1d", "A_log"))]
                assert same == set(from_disk) if version == 2 else not moved, moved
                assert gap(fleet.urls, engine, replays=False) <= EXACT
    finally:
        fleet.stop()
