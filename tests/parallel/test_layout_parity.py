"""Every dense layout takes the step of one process: loss, each gradient, norm and updated weights, in
float32, from packed micro-batches.

A layout runs once, with all its jobs, in one set of processes; each number is compared tensor by tensor,
relative to the tensor's greatest magnitude.
"""

import pytest
import torch

from configs.schema.layout import LayoutConfig
from configs.schema.objective import AggregationConfig
from configs.schema.run import RunConfig
from parallel.megatron.groups import join_groups
from tests.parallel.megatron.test_model import GEMMA_ROPE, OLMO3_ROPE
from tests.support.layout_workers import OPTIMIZER, build, work_layout
from tests.support.megatron_workers import VOCAB, learner_config, make_hf_model, run_ranks
from tests.support.moe_workers import assert_same_choice, make_moe_model
from tests.trainer.batch.test_step_batch import make_groups

pytestmark = pytest.mark.engines
TOLERANCE = 1e-5
STEPPED = 2e-5
"""Of weights behind an AdamW step: it multiplies what rounding does to a small gradient by up to lr / eps = 100, and processors
round differently (1.08e-5 on an Intel Xeon, where the gradients agree)."""
FEW_TOKENS, FEWER_THAN_RANKS = "fewer tokens than ranks", ("cp3", "tp2 sp cp2")

LAYOUTS = {
    "tp2": LayoutConfig(tp=2, dp=1),
    "tp2 sp": LayoutConfig(tp=2, sp=True, dp=1),
    "pp2": LayoutConfig(pp=2, dp=1),
    "pp2 vpp2": LayoutConfig(pp=2, vpp=2, dp=1),
    "tp2 pp2": LayoutConfig(tp=2, pp=2, dp=1),
    "tp2 pp2 sp": LayoutConfig(tp=2, pp=2, sp=True, dp=1),
    "dp2": LayoutConfig(dp=2),
    "tp2 dp2": LayoutConfig(tp=2, dp=2),
    "pp2 dp2": LayoutConfig(pp=2, dp=2),
    "cp2": LayoutConfig(cp=2, dp=1),
    "cp3": LayoutConfig(cp=3, dp=1),
    "tp2 cp2": LayoutConfig(tp=2, cp=2, dp=1),
    "tp2 sp cp2": LayoutConfig(tp=2, sp=True, cp=2, dp=1),
    "cp2 pp2": LayoutConfig(cp=2, pp=2, dp=1),
    "cp2 pp2 vpp2": LayoutConfig(cp=2, pp=2, vpp=2, dp=1),
    "cp2 dp2": LayoutConfig(cp=2, dp=2),
}
UNTIED, TIED, CRITIC = "policy, untied", "policy, tied", "critic"
ALIGNED, IN_ONE_PIECE = "policy, aligned in two pieces", "policy, aligned in one piece"
ALIGNED_LAYOUTS = ("tp2", "tp2 sp", "tp2 pp2 sp")
REPLAYED = "policy with experts, of which most are given"
FACTORED, MERGED = "adapters, factored", "adapters, merged"
EXPERTS_FROZEN = "adapters beside experts"
FUSED = "policy, of a folder with fused matrices"
WINDOWED = "policy with windows, norms over all heads, and norms behind attention and MLP"
PAIRED = "policy with norms before and behind, and pairs of neighbours that are rotated"
SCALED = "policy with embeddings that are multiplied, norms by 1 + weight, and a rotation of windows' own"
SCALED_CRITIC, SCALED_ADAPTERS = f"{SCALED}: critic", f"{SCALED}: adapters"
STEPS = {
    **{name: (UNTIED,) for name in LAYOUTS},
    "dp2": (UNTIED, MERGED),
    "cp2": (UNTIED, TIED, CRITIC, FACTORED),
    "cp3": (UNTIED, CRITIC, REPLAYED),
    "cp2 pp2 vpp2": (UNTIED, TIED, CRITIC, REPLAYED, WINDOWED, SCALED),
    "tp2 sp cp2": (UNTIED, REPLAYED, EXPERTS_FROZEN, WINDOWED),
    "tp2": (UNTIED, ALIGNED, FACTORED, MERGED, FUSED, WINDOWED, SCALED),
    "tp2 sp": (UNTIED, TIED, CRITIC, ALIGNED, FACTORED, MERGED, PAIRED, SCALED, SCALED_ADAPTERS),
    "pp2": (UNTIED, TIED, CRITIC, FACTORED, FUSED),
    "pp2 vpp2": (UNTIED, TIED, CRITIC, REPLAYED, MERGED),
    "tp2 pp2 sp": (UNTIED, TIED, CRITIC, REPLAYED, ALIGNED, MERGED, SCALED, SCALED_CRITIC),
    # The two copies of the embedding, each sharded over data-parallel ranks by the optimizer.
    "pp2 dp2": (TIED,),
}
CHECKPOINT, BAD_LOSS, RECOMPUTED, LEARNER = "checkpoint", "bad loss", "recomputed", "learner"
FROZEN = "frozen"
LEARNER_LAYOUTS = ("pp2 vpp2", "tp2 pp2 sp", "cp2 pp2 vpp2")
FROZEN_LAYOUTS = ("tp2", "tp2 sp", "cp2")
RECOMPUTING = ("tp2 pp2 sp", "tp2 sp cp2", "cp3")
CHECKPOINTS = {
    "tp2 pp2 sp": (TIED, ("pp2 vpp2", "cp3")),
    "tp2 sp cp2": (TIED, ("pp2", "cp2 pp2 vpp2")),
    "tp2 sp": (FACTORED, ("cp2",)),
    "pp2": (FACTORED, ("tp2",)),
    "tp2 pp2": (WINDOWED, ("cp2 pp2",)),
}
"""The layout that writes a checkpoint, of which model, and those that read it, beside one process."""


OLMO3 = {
    "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPE, "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


GEMMA = {name: OLMO3[name] for name in ("num_hidden_layers", "sliding_window", "layer_types")} | {
    "rope_parameters": GEMMA_ROPE,
    "num_key_value_heads": 1,  # as Gemma 3 270M and 1B: ranks copy it
}


def learner_run(folder) -> RunConfig:
    """A critic and a reference beside the policy, rejection inside the loss (the normaliser is known after its
    forward pass), one minibatch."""
    rejecting = {
        "weight": {"level": "token", "upper": 1.5},
        "reject": [
            {"rule": "ratio", "level": "geometric", "upper": 3.0},
            {"rule": "ratio", "level": "token", "upper": 10.0},
        ],
    }
    aggregation = AggregationConfig(type="token_mean")
    config = learner_config(
        folder,
        data_parallel=1,
        aggregation=aggregation,
        sharded=True,
        correction=rejecting,
        learner={"minibatches": 1},
    )
    optimizer = {"lr": 1e-2, "eps": 1e-4}
    return RunConfig.model_validate(
        config.model_dump()
        | {"advantage": {"type": "gae"}, "critic": {"optimizer": optimizer}, "kl": {"coefficient": 0.05}}
    )


class Runs:
    """What each layout's ranks gave, run when first asked for."""

    def __init__(self, root):
        self.root = root
        self.found = {}
        self.jobs = {
            UNTIED: {
                "kind": "policy",
                "folder": make_hf_model(root / "untied", "qwen3", num_hidden_layers=4),
            },
            TIED: {
                "kind": "policy",
                "folder": make_hf_model(root / "tied", "qwen2", tied=True, num_hidden_layers=4),
            },
        }
        self.jobs[REPLAYED] = {
            "kind": "policy",
            "folder": make_moe_model(root / "experts", "qwen3_moe", num_hidden_layers=4, mlp_only_layers=[1]),
            "recompute": "full",
            "replays": True,
        }
        adapters = {"rank": 4, "alpha": 6.0}
        for name, forward, recompute in ((FACTORED, "factored", "none"), (MERGED, "merged", "full")):
            lora = adapters | {"forward": forward}
            self.jobs[name] = self.jobs[TIED] | {"lora": lora, "recompute": recompute}
        self.jobs[EXPERTS_FROZEN] = {
            "kind": "policy",
            "folder": self.jobs[REPLAYED]["folder"],
            "lora": adapters | {"targets": ["qkv", "proj"]},
        }
        fused = make_hf_model(root / "fused", "phi3", num_hidden_layers=4)
        self.jobs[FUSED] = {"kind": "policy", "folder": fused}
        windowed = make_hf_model(root / "windowed", "olmo3", **OLMO3)
        self.jobs[WINDOWED] = {"kind": "policy", "folder": windowed, "recompute": "full"}
        paired = make_hf_model(root / "paired", "glm4", tied=True, num_hidden_layers=4)
        self.jobs[PAIRED] = {"kind": "policy", "folder": paired}
        scaled = make_hf_model(root / "scaled", "gemma3_text", **GEMMA)
        self.jobs[SCALED] = {"kind": "policy", "folder": scaled}
        self.jobs[SCALED_CRITIC] = {"kind": "critic", "folder": scaled}
        self.jobs[SCALED_ADAPTERS] = self.jobs[SCALED] | {"lora": adapters | {"forward": "factored"}}
        self.jobs[CRITIC] = {"kind": "critic", "folder": self.jobs[TIED]["folder"]}
        self.jobs[ALIGNED] = self.jobs[TIED] | {"pieces": 2}
        groups = make_groups(
            [[9, 5, 14], [12, 3, 20], [7, 16, 2], [11, 4, 8]], [[1.0, 0.0, 0.1]] * 4, seed=3, vocab=VOCAB
        )
        self.few_tokens = self.jobs[UNTIED] | {"lengths": [[2], [9, 5, 20]]}
        self.learner = {"config": learner_run(self.jobs[UNTIED]["folder"]), "groups": groups}

    def one_process(self) -> dict:
        if "one process" not in self.found:
            torch.set_num_threads(1)  # as in the ranks, whose bits are compared
            jobs = {name: ("step", job) for name, job in self.jobs.items()}
            for name in (REPLAYED, WINDOWED):
                jobs[name] = ("step", self.jobs[name] | {"recompute": "none"})
            jobs[RECOMPUTED] = ("step", self.jobs[UNTIED] | {"recompute": "full"})
            jobs[IN_ONE_PIECE] = ("step", self.jobs[TIED] | {"pieces": 1})
            jobs[LEARNER] = ("learner", self.learner)
            jobs[FEW_TOKENS] = ("step_of_lengths", self.few_tokens)
            self.found["one process"] = work_layout(LayoutConfig(), jobs)
        return self.found["one process"]

    def of(self, layout: str) -> list[dict]:
        if layout not in self.found:
            self.found[layout] = self._run(layout)
        return self.found[layout]

    def _run(self, layout: str) -> list[dict]:
        jobs = {name: ("step", self.jobs[name]) for name in STEPS[layout]}
        if layout in FROZEN_LAYOUTS:
            jobs[FROZEN] = ("frozen", self.jobs[UNTIED])
        if layout == "pp2":
            jobs[BAD_LOSS] = ("bad_loss", self.jobs[UNTIED])
        if layout in LEARNER_LAYOUTS:
            jobs[LEARNER] = ("learner", self.learner)
        if layout in RECOMPUTING:
            jobs[RECOMPUTED] = ("step", self.jobs[UNTIED] | {"recompute": "full"})
        if layout in FEWER_THAN_RANKS:
            jobs[FEW_TOKENS] = ("step_of_lengths", self.few_tokens)
        if layout in CHECKPOINTS:
            jobs[CHECKPOINT] = ("save", self.checkpoint_job(layout))
        for writer, (_, readers) in CHECKPOINTS.items():
            if layout in readers:
                self.of(writer)
                jobs[checkpoint_of(writer)] = ("load", self.checkpoint_job(writer))
        sizes = LAYOUTS[layout]
        return run_ranks(work_layout, sizes.world_size, self.root / layout, sizes, jobs, deadline_s=900)

    def checkpoint_job(self, writer: str) -> dict:
        job = self.jobs[CHECKPOINTS[writer][0]]
        return job | {"checkpoint": self.root / checkpoint_of(writer) / "step_000001"}

    def loaded_in_one_process(self, writer: str) -> dict:
        self.of(writer)
        jobs = {CHECKPOINT: ("load", self.checkpoint_job(writer))}
        return work_layout(LayoutConfig(), jobs)[CHECKPOINT]


def checkpoint_of(writer: str) -> str:
    return f"checkpoint of {writer}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("layouts"))


def greatest_difference(found, wanted):
    """Over all tensors: the largest difference relative to the tensor's largest magnitude."""
    assert found.keys() == wanted.keys()
    return max(
        ((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item() for name in wanted
    )


def total_loss(ranks, name):
    """Over data-parallel ranks; the others of each repeat its part."""
    return sum({rank[name]["dp_rank"]: rank[name]["loss"] for rank in ranks}.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_one_process(runs, layout, record_property):
    ranks = runs.of(layout)
    recomputed = [RECOMPUTED] if layout in RECOMPUTING else []
    few_tokens = [FEW_TOKENS] if layout in FEWER_THAN_RANKS else []
    for name in [*STEPS[layout], *recomputed, *few_tokens]:
        wanted = runs.one_process()[name]
        assert wanted["norm"] > 2 * OPTIMIZER["clip_grad"]  # clipping is active
        assert total_loss(ranks, name) == pytest.approx(wanted["loss"], rel=1e-6), name
        assert (wanted["differing"] is not None) == (name == REPLAYED)
        for rank in (found[name] for found in ranks):
            assert rank["differing"] == wanted["differing"]
            assert bool(wanted["chosen"]) == (name == REPLAYED)
            assert_same_choice([rank], wanted)
            assert rank["bitwise"], (
                f"{name}: the update's own forward pass gave other numbers than the score pass"
            )
            assert rank["norm"] == pytest.approx(wanted["norm"], rel=TOLERANCE), name
            differences = {
                part: greatest_difference(rank[part], wanted[part]) for part in ("gradients", "weights")
            }
            record_property(name, differences)
            assert max(differences.values()) < TOLERANCE, f"{name}: {differences}"


@pytest.mark.parametrize("layout", ALIGNED_LAYOUTS)
def test_aligned_scores_have_the_bits_of_one_process(runs, layout):
    """And gradients of plain operations, but for rounding. In one piece one process has other bits."""
    one = runs.one_process()
    wanted = torch.cat(one[ALIGNED]["scores"])
    for rank in (found[ALIGNED] for found in runs.of(layout)):
        assert torch.equal(torch.cat(rank["scores"]), wanted)
        assert greatest_difference(rank["gradients"], one[TIED]["gradients"]) < TOLERANCE
    for other in (TIED, IN_ONE_PIECE):
        assert not torch.equal(torch.cat(one[other]["scores"]), wanted)


@pytest.mark.parametrize("layout", ["pp2", "pp2 vpp2", "tp2 pp2 sp", "cp2 pp2 vpp2", "pp2 dp2"])
def test_both_copies_of_a_tied_embedding_stay_one(runs, layout):
    ranks = [found[TIED] for found in runs.of(layout)]
    first, last = (
        {r["place_in_stage"]: r["copies"][part] for r in ranks if part in r["copies"]}
        for part in ("embedding", "output")
    )
    assert first.keys() == last.keys() and len(first) + len(last) == len(ranks)
    assert all(torch.equal(first[place], last[place]) for place in first)


@pytest.mark.parametrize("layout", ["pp2", "tp2 pp2 sp"])
def test_every_rank_of_a_pipeline_gets_the_same_scores(runs, layout):
    ranks = [found[UNTIED] for found in runs.of(layout)]
    wanted = runs.one_process()[UNTIED]
    for rank in ranks:
        assert all(torch.equal(a, b) for a, b in zip(rank["scores"], ranks[0]["scores"], strict=True))
        torch.testing.assert_close(torch.cat(rank["scores"]), torch.cat(wanted["scores"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (writer, reader)
        for writer, (_, readers) in CHECKPOINTS.items()
        for reader in ("one process", *readers)
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(runs, writer, reader):
    """The next step has the loss and ends at the weights of the one that wrote it."""
    wanted = runs.of(writer)[0][CHECKPOINT]
    one_process = reader == "one process"
    found = runs.loaded_in_one_process(writer) if one_process else runs.of(reader)[0][checkpoint_of(writer)]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert greatest_difference(found["weights"], wanted["weights"]) < TOLERANCE


@pytest.mark.parametrize("layout", LEARNER_LAYOUTS)
def test_the_learner_steps_like_one_process(runs, layout):
    wanted = runs.one_process()[LEARNER]
    assert 0.1 < wanted["metrics"]["mismatch/kept_fraction"] < 1
    logprobs_S = per_sequence(wanted)
    for found in (rank[LEARNER] for rank in runs.of(layout)):
        assert found["num_microbatches"] % LAYOUTS[layout].microbatch_multiple == 0
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4, abs=1e-6)
        for sequence, logprobs_T in per_sequence(found).items():
            torch.testing.assert_close(logprobs_T, logprobs_S[sequence], rtol=0, atol=1e-5)
        assert max(greatest_difference(found[part], wanted[part]) for part in ("weights", "critic")) < STEPPED
        assert [p for row in found["probe"] for p in row] == pytest.approx(
            [p for row in wanted["probe"] for p in row], rel=TOLERANCE, abs=TOLERANCE
        )


def per_sequence(found):
    return dict(zip(found["ids_S"].tolist(), found["logprobs_T"].split(found["lengths"]), strict=True))


@pytest.mark.parametrize("layout", FROZEN_LAYOUTS)
def test_a_frozen_copy_has_the_bits_of_the_policy(runs, layout):
    """The reference of the first step: its KL is zero, and no advantage follows from rounding."""
    for found in runs.of(layout):
        assert not any(found[FROZEN])


def test_a_bad_loss_on_the_last_stage_stops_all(runs):
    ranks = [found[BAD_LOSS] for found in runs.of("pp2")]
    assert all(rank["unchanged"] for rank in ranks)
    assert "another rank" in ranks[0]["message"] and "micro-batches {1: nan} of rank 1" in ranks[1]["message"]


def test_a_second_engine_must_have_the_same_sizes(runs):
    build(layout=LayoutConfig(), **runs.jobs[UNTIED])
    with pytest.raises(
        ValueError,
        match="already runs a layout of tp=1, pp=1, vpp=1, cp=1, ep=1; a second engine cannot have tp=1, pp=2",
    ):
        join_groups(LayoutConfig(pp=2), 0, 60.0)
