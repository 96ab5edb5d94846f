"""What a resumed run continues from: the critic beside the policy, the moved KL coefficient, its own recorded
batches. Engines here only record their calls; real ones are resumed in
tests/parallel/checkpoints/test_checkpoint.py, tests/trainer/test_critic.py and end to end.
"""

import errno
import itertools
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from configs.loader import load_config
from configs.schema.correction import CorrectionConfig
from configs.schema.launch import RecordEvery
from configs.schema.learner import CheckpointConfig
from configs.schema.objective import KLConfig
from launch.processes.run_folder import RunFolder
from launch.roles import learn as learning
from parallel.checkpoints.checkpoint import CheckpointError, DiskFull, WholeCheckpoint
from parallel.checkpoints.files import (
    MANIFEST,
    best_step,
    is_valid,
    latest_valid,
    prune,
    step_folder,
    valid_checkpoints,
    write_manifest,
)
from parallel.megatron import platform
from parallel.weights.hf_files import hidden_folder, replace_folder
from tests.support.megatron_workers import run_ranks
from tests.support.packed_batches import random_batch
from tests.support.unreadable import unreadable
from tests.trainer.studies.test_replay import recorded, same, with_random_experts
from trainer import checkpointing as resume
from trainer import learner as trainer_learner
from trainer.algorithm.kl_reward import KLInReward
from trainer.batch.files import batch_file, recorded_steps
from trainer.batch.step_batch import StepBatch
from trainer.checkpointing import Checkpointer, Progress
from trainer.ranks.metrics import values
from trainer.ranks.totals import alone
from trainer.recording import Recorder, read_batch, write_batch
from trainer.sampling import SharedSampler
from trainer.tracking.samples import FOLDER, sample_file, sampled_steps
from trainer.turns import SharedDevices, _Turn

RECIPE = Path(__file__).resolve().parents[2] / "configs/recipes/countdown_tiny.yaml"
ADAPTIVE = KLConfig(
    coefficient=0.1, place="reward", controller={"type": "adaptive", "target": 0.01, "horizon": 1000}
)
FIXED = KLConfig(coefficient=0.3, place="reward")


@dataclass
class Saves:
    """In an engine's place: a folder with a manifest, as a complete checkpoint has."""

    loaded: list[Path] = field(default_factory=list)

    def save(self, folder: Path, extra: dict) -> None:
        folder.mkdir(parents=True)
        (folder / "extra.json").write_text(json.dumps(extra))
        write_manifest(folder, world_size=1)

    def load(self, whole: WholeCheckpoint) -> dict:
        self.loaded.append(whole.folder)
        return json.loads((whole.folder / "extra.json").read_text())


class Data:
    def __init__(self, *, stop: bool = False):
        self.at, self._stop = "wherever it was left", stop

    def state(self):
        return {"position": 7}

    def stop_requested(self):
        return self._stop

    def load_state(self, state):
        self.at = state


def learner(*, critic: bool, kl: KLConfig = ADAPTIVE) -> SimpleNamespace:
    critic = SimpleNamespace(engine=Saves()) if critic else None
    return SimpleNamespace(
        engine=Saves(), critic=critic, version=5, is_first_rank=True, kl_in_reward=KLInReward(kl)
    )


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    if dist.is_initialized():  # by a test of the engines before, in this very process
        yield
        return
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_a_run_goes_on_from_policy_critic_data_and_coefficient(tmp_path):
    first, checkpointer = learner(critic=True), Checkpointer(tmp_path, CheckpointConfig(every=2, keep=2))
    first.kl_in_reward.coefficient = 0.125
    for step in range(1, 8):
        checkpointer.after_step(step, first, Data())
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000004", "step_000006"]
    assert sorted(p.name for p in (tmp_path / "critic").iterdir()) == ["step_000004", "step_000006"]
    again, data, checkpointer = learner(critic=True), Data(), Checkpointer(tmp_path, CheckpointConfig())
    progress = checkpointer.restore(again, data)
    assert progress == Progress(step=6, version=5, sampler={"position": 7}, kl_coefficient=0.125)
    assert (again.version, data.at, again.kl_in_reward.coefficient) == (5, {"position": 7}, 0.125)
    assert again.critic.engine.loaded == [tmp_path / "critic" / "step_000006"]
    checkpointer.save_last(again)  # which is there already
    checkpointer.save(9, again)
    assert Checkpointer(tmp_path, CheckpointConfig()).restore(again, data).sampler == {"position": 7}


def test_a_policys_checkpoint_has_its_critic_wherever_the_writing_breaks_off(tmp_path):
    run = learner(critic=True)
    run.critic.engine.save = Mock(side_effect=OSError("no space left"))
    with pytest.raises(OSError, match="no space left"):
        Checkpointer(tmp_path, CheckpointConfig()).save(2, run)
    assert not step_folder(tmp_path, 2).exists()


def test_the_first_rank_alone_removes_old_checkpoints(tmp_path):
    run, checkpointer = learner(critic=False), Checkpointer(tmp_path, CheckpointConfig(keep=1))
    run.is_first_rank = False
    for step in (1, 2):
        checkpointer.save(step, run)
    assert [*valid_checkpoints(tmp_path)] == [1, 2]
    run.is_first_rank = True
    checkpointer.save(3, run)
    assert [*valid_checkpoints(tmp_path)] == [3]


def test_without_a_checkpoint_the_data_begins_anew_and_what_the_lost_steps_left_is_put_aside(tmp_path):
    """By the role's own hand: it may be started without a supervisor, beside a sample role that has gone on."""
    folder, data = RunFolder(tmp_path), Data()
    folder.batches.mkdir()
    folder.samples.mkdir()
    for step in (1, 2):
        write_batch(batch_file(folder.batches, step), recorded())
        sample_file(folder.samples, step).write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert Checkpointer(folder.checkpoints, CheckpointConfig()).restore(learner(critic=False), data) is None
    assert data.at is None
    recorder = Recorder(folder.batches, "all", recorded().correction)
    learning.forget_lost_steps(folder, recorder, 1)
    assert recorded_steps(folder.batches) == [1] and (tmp_path / "metrics.jsonl").exists()
    assert sampled_steps(folder.samples) == [1] and folder.samples == tmp_path / FOLDER
    learning.forget_lost_steps(folder, recorder, None)
    assert recorded_steps(folder.batches) == [] == sampled_steps(folder.samples)
    assert (
        not (tmp_path / "metrics.jsonl").exists()
        and (tmp_path / "metrics.lost.jsonl").read_text() == '{"step": 0}\n'
    )


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_every_rank_looks_for_servers_and_sample_role_by_itself(tmp_path, monkeypatch, placement):
    """In a collective with rank 0, which also waits for them, the others would give up after
    collective_timeout_s."""
    config = load_config(RECIPE, ["model.path=model", f"launch.placement={placement}"])
    folder, asked = RunFolder(tmp_path), []

    class Ready(Exception):
        """Both were looked for."""

    def wait_for_address(self, role, **unused):
        raise Ready(role)

    monkeypatch.setattr(platform, "init_distributed", lambda **unused: None)
    monkeypatch.setattr(trainer_learner, "Learner", lambda config: SimpleNamespace(is_first_rank=False))
    monkeypatch.setattr(learning, "wait_for_servers", lambda folder, names, **unused: asked.extend(names))
    monkeypatch.setattr(RunFolder, "wait_for_address", wait_for_address)
    with pytest.raises(Ready, match="sample"):
        learning.build_run(folder, config, stop_requested=lambda: None, doing=print)
    assert asked == ["serve"]


def test_what_a_killed_writer_has_left_goes_with_the_next_start(tmp_path):
    """Of the model and of checkpoints, the critic's too; whatever else is there stays."""
    folder = RunFolder(tmp_path)
    left = [
        folder.checkpoints / ".step_000004.partial", folder.checkpoints / ".step_000002.old.x1" / "step_000002",
        folder.critic_checkpoints / ".step_000004.partial", hidden_folder(folder.hf), folder.path / ".hf.old.x2" / "hf",
    ]  # fmt: skip
    kept = [
        folder.checkpoints / "step_000003",
        folder.critic_checkpoints / "step_000003",
        folder.hf,
        hidden_folder(folder.export),
    ]
    for path in (*left, *kept):
        path.mkdir(parents=True, exist_ok=True)
        (path / "weights").write_text("many")
    learning.forget_lost_steps(folder, Recorder(folder.batches, "none", recorded().correction), 3)
    assert [path for path in left if path.exists()] == []
    assert {file.parent for file in tmp_path.rglob("weights")} == set(kept)


@pytest.mark.parametrize("kill_at", (0, 1))
def test_a_kill_while_a_model_replaces_another_loses_none_of_them_both(tmp_path, monkeypatch, kill_at):
    """kill_at: the rename before which it comes."""
    folder, rename, done = RunFolder(tmp_path), os.rename, itertools.count()
    folder.hf.mkdir()
    (folder.hf / "weights").write_text("old")
    fresh = hidden_folder(folder.hf)
    (fresh / "weights").write_text("new")

    def rename_or_end(old: Path, new: Path) -> None:
        if next(done) == kill_at:
            raise KeyboardInterrupt
        rename(old, new)

    monkeypatch.setattr(os, "rename", rename_or_end)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(fresh, folder.hf)
    monkeypatch.undo()
    learning.forget_lost_steps(folder, Recorder(folder.batches, "none", recorded().correction), 3)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"] and (
        folder.hf / "weights"
    ).read_text() == "old"


@pytest.mark.parametrize(
    ("every", "stop", "complete", "found"),
    [
        (2, False, 3, ["step_000002", "step_000003"]),
        (2, False, 2, ["step_000002"]),  # there is one already
        (0, True, 3, ["step_000003"]),
        (0, False, 3, []),  # nobody asked for checkpoints, nor for a stop
        (2, True, 0, []),
    ],
)
def test_before_the_export_the_last_step_is_saved_where_it_could_be_lost(
    tmp_path, every, stop, complete, found
):
    run, data, checkpointer = (
        learner(critic=False),
        Data(stop=stop),
        Checkpointer(tmp_path, CheckpointConfig(every=every)),
    )
    for step in range(1, complete + 1):
        checkpointer.after_step(step, run, data)
    checkpointer.save_before_export(run, data)
    assert sorted(p.name for p in tmp_path.glob("step_*")) == found
    assert (checkpointer.last_save_s is not None) == bool(found)


@pytest.mark.parametrize(
    ("summary", "steps", "resumed_from", "found"),
    [
        ('{"steps": 8}', 12, 8, {"hf-step-8": "of step 8", "adapter-step-8": "of step 8"}),
        ('{"steps": 8}', 8, 8, {"hf": "of step 8", "adapter": "of step 8"}),  # the end alone is done again
        ("", 12, 8, {"hf-older": "of step 8", "adapter-older": "of step 8"}),
        ('{"steps": 8}', 12, None, {"hf-step-8": "of step 8", "adapter-step-8": "of step 8"}),
    ],
)
def test_the_model_of_an_earlier_end_does_not_pass_for_that_of_later_steps(
    tmp_path, capsys, summary, steps, resumed_from, found
):
    folder, config = RunFolder(tmp_path), load_config(RECIPE, ["model.path=m", f"steps={steps}"])
    for exported in (folder.hf, folder.adapter):
        exported.mkdir()
        (exported / "model.safetensors").write_text("of step 8")
    folder.summary.write_text(summary)
    older = folder.path / "hf-step-8"
    older.mkdir()  # the same step, before it was done again
    notices = learning.put_older_model_aside(folder, config, resumed_from)
    left = {path.name: path for path in tmp_path.iterdir() if path.is_dir() and any(path.iterdir())}
    assert {name: (path / "model.safetensors").read_text() for name, path in left.items()} == found
    assert len(notices) == (0 if "hf" in found else 2)
    assert capsys.readouterr().out.splitlines() == notices


def test_a_kill_while_the_model_is_written_leaves_no_steps_of_an_older_one(tmp_path):
    """They would name the new model's folder, and count it as that of a finished run, or of an unfinished one."""

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    folder = RunFolder(tmp_path)
    folder.summary.write_text('{"steps": 8}')
    run = SimpleNamespace(
        tracker=Mock(),
        checkpointer=Mock(),
        learner=SimpleNamespace(save_hf=killed, save_adapter=Mock()),
        sampler=Mock(),
    )
    run.checkpointer.save_before_export.return_value = None
    run.checkpointer.last_save_s = 1.26
    with pytest.raises(KeyboardInterrupt):
        learning.export(run, folder, start_up_s=0.0, training_s=0.0)
    assert not folder.summary.exists()
    run.tracker.say.assert_called_with("the last checkpoint took 1.3 s")  # no further step has it in its line


ACCURACIES = {0: 0.1, 2: 0.5, 4: 0.5, 6: 0.7, 8: 0.6}


def best_steps(tmp_path, run, steps, **settings) -> Checkpointer:
    config = CheckpointConfig(every=3, keep=1, keep_best="eval/accuracy", **settings)
    checkpointer = Checkpointer(tmp_path, config)
    checkpointer.restore(run, Data())
    for step in steps:
        evaluated = {"eval/accuracy": ACCURACIES[step]} if step in ACCURACIES else {}
        checkpointer.after_step(step, run, Data(), evaluated=evaluated)
    return checkpointer


def steps_kept(tmp_path) -> list[int]:
    assert [*valid_checkpoints(tmp_path)] == [*valid_checkpoints(tmp_path / "critic")]
    return [*valid_checkpoints(tmp_path)]


def test_the_best_step_has_a_checkpoint_that_stays(tmp_path):
    """Of equal evaluations the first is the best; a better one takes its place; it survives a resume."""
    best = {"metric": "eval/accuracy"}
    best_steps(tmp_path, learner(critic=True), range(1, 6))
    assert steps_kept(tmp_path) == [2, 3]
    assert json.loads((tmp_path / "best.json").read_text()) == best | {"step": 2, "value": 0.5}
    run = learner(critic=True)
    best_steps(tmp_path, run, [4, 5])
    assert run.engine.loaded == [step_folder(tmp_path, 3)] and steps_kept(tmp_path) == [2, 3]
    best_steps(tmp_path, learner(critic=True), range(4, 13))
    assert steps_kept(tmp_path) == [6, 12]
    assert json.loads((tmp_path / "best.json").read_text()) == best | {"step": 6, "value": 0.7}


def test_an_evaluation_that_a_resumed_run_made_up_for_can_be_the_best(tmp_path):
    best_steps(tmp_path, learner(critic=True), range(1, 6))
    run, config = learner(critic=True), CheckpointConfig(every=3, keep=1, keep_best="eval/accuracy")
    checkpointer = Checkpointer(tmp_path, config)
    checkpointer.restore(run, Data())
    checkpointer.after_owed_evaluation(run, {"eval/accuracy": 0.9})
    found = json.loads((tmp_path / "best.json").read_text())
    assert found == {"step": 3, "metric": "eval/accuracy", "value": 0.9}


def test_a_full_disk_ends_no_run_and_costs_no_checkpoint(tmp_path):
    """But at a stop, where nothing comes after it: at the end the model does, which needs less space. The critic's, which has
    no policy then, makes room."""
    run, checkpointer = learner(critic=True), Checkpointer(tmp_path, CheckpointConfig(every=1, keep=1))
    assert checkpointer.after_step(1, run, Data()) is None
    save, run.engine.save = run.engine.save, Mock(side_effect=DiskFull("could not write step_000002"))
    problem = checkpointer.after_step(2, run, Data())
    assert problem.startswith(
        "step 2: could not write step_000002; free space: the run continues, and tries again"
    )
    assert steps_kept(tmp_path) == [1]
    assert "step_000002; the model is written" in checkpointer.save_before_export(run, Data())
    with pytest.raises(DiskFull, match="step_000002"):
        checkpointer.save_last(run)
    run.engine.save = save
    assert checkpointer.after_step(3, run, Data()) is None and steps_kept(tmp_path) == [3]


def test_a_best_step_that_found_no_space_is_not_the_best(tmp_path):
    run = learner(critic=True)
    checkpointer = best_steps(tmp_path, run, [0])
    save, run.engine.save = run.engine.save, Mock(side_effect=DiskFull("full"))
    assert checkpointer.after_step(1, run, Data(), evaluated={"eval/accuracy": 0.6}) is not None
    run.engine.save = save
    checkpointer.after_step(2, run, Data(), evaluated={"eval/accuracy": 0.5})
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 2 and steps_kept(tmp_path) == [2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_that_takes_the_checkpoint_but_not_best_json_ends_no_run(tmp_path, monkeypatch, number):
    """The file may then name an older best, which stays until the next checkpoint writes it."""
    run = learner(critic=True)
    checkpointer = best_steps(tmp_path, run, [2])
    full = Mock(side_effect=OSError(number, os.strerror(number), "best.json"))
    with monkeypatch.context() as patch:
        patch.setattr(resume, "write_whole", full)
        for act in (
            lambda: checkpointer.after_step(6, run, Data(), evaluated={"eval/accuracy": 0.7}),
            lambda: checkpointer.after_owed_evaluation(run, {"eval/accuracy": 0.8}),
            lambda: checkpointer.after_step(7, run, Data()) or checkpointer.save_last(run),
        ):
            assert f"could not write best.json: {os.strerror(number)}; free space: the run continues" in act()
    assert steps_kept(tmp_path) == [2, 6, 7] and best_step(tmp_path) == 2
    assert checkpointer.after_step(9, run, Data()) is None
    assert steps_kept(tmp_path) == [6, 9] and best_step(tmp_path) == 6
    full.side_effect = OSError(errno.EIO, "broken")
    monkeypatch.setattr(resume, "write_whole", full)
    with pytest.raises(OSError, match="broken"):
        checkpointer.save(10, run)


def test_servers_get_their_turn_back_where_a_checkpoint_found_no_space(tmp_path):
    run, turns = learner(critic=False), SharedDevices(Mock(), Mock())
    turns._turn, turns.give_to_both, turns.give_to_servers = _Turn.SERVERS, Mock(), Mock()
    run.engine.save = Mock(side_effect=DiskFull("full"))
    assert Checkpointer(tmp_path, CheckpointConfig(every=1), turns).after_step(1, run, Data()) is not None
    turns.give_to_servers.assert_called_once_with()


def test_groups_that_were_dropped_before_an_update_are_sampled_again(tmp_path):
    """The sampler is past them when the last complete step is saved."""
    run, data, checkpointer = learner(critic=False), Data(), Checkpointer(tmp_path, CheckpointConfig())
    checkpointer.after_step(1, run, data)
    data.state = lambda: {"position": 8}
    checkpointer.save_last(run)
    assert Checkpointer(tmp_path, CheckpointConfig()).restore(run, Data()).sampler == {"position": 7}


def test_what_is_no_better_or_no_number_is_not_the_best(tmp_path):
    run, checkpointer = learner(critic=False), best_steps(tmp_path, learner(critic=False), [1, 2])
    assert not checkpointer.is_best(3, {"eval/accuracy": math.nan}) and not checkpointer.is_best(3, {})
    assert checkpointer.is_best(3, {"eval/accuracy": 0.9}) and not checkpointer.is_best(
        4, {"eval/accuracy": 0.9}
    )
    checkpointer.save(5, run)
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 3
    by_reward = Checkpointer(tmp_path, CheckpointConfig(keep_best="eval/reward_mean"))
    by_reward.restore(run, Data())
    assert by_reward.is_best(6, {"eval/reward_mean": 0.1}), "0.9 was of another metric"
    without = Checkpointer(tmp_path, CheckpointConfig(every=1))
    assert not without.is_best(6, {"eval/accuracy": 1.0})


@pytest.mark.parametrize(("max_failed", "best"), [(0.05, False), (0.5, True), (None, True)])
def test_an_evaluation_of_failed_rewards_is_not_the_best(tmp_path, max_failed, best):
    config = CheckpointConfig(keep_best="eval/greedy/reward_mean")
    checkpointer = Checkpointer(tmp_path, config, max_failed=max_failed)
    evaluated = {"eval/greedy/reward_mean": 0.5, "eval/greedy/failed_fraction": 0.5}
    assert checkpointer.is_best(1, evaluated) == best
    assert checkpointer.is_best(2, evaluated | {"eval/greedy/failed_fraction": 0.05}) != best


def work_best(root: Path) -> list[bool]:
    """What each rank thinks of evaluations that rank 0 alone knows."""
    checkpointer = Checkpointer(root, CheckpointConfig(keep_best="eval/accuracy"))
    known = [{"eval/accuracy": value} if dist.get_rank() == 0 else {} for value in (0.2, 0.1, 0.3)]
    return [checkpointer.is_best(step, evaluated) for step, evaluated in enumerate(known)]


def test_every_rank_hears_of_a_stop_as_the_first_one_sees_it():
    remote = SimpleNamespace()
    assert SharedSampler(remote, lambda: "SIGTERM").stop_requested() is True
    assert SharedSampler(remote, lambda: None).stop_requested() is False
    assert SharedSampler(None, lambda: "not the first rank's to say").stop_requested() is False


def test_a_critic_without_its_policy_is_never_kept_in_the_place_of_one_with_it(tmp_path):
    """A crash between the two saves leaves a critic's checkpoint alone; after the resume it must not push out
    the one that is needed."""
    run, checkpointer = learner(critic=True), Checkpointer(tmp_path, CheckpointConfig(every=1, keep=1))
    checkpointer.save(3, run)
    run.critic.engine.save(tmp_path / "critic" / "step_000009", {"step": 9})
    checkpointer.save(4, run)
    assert [p.name for p in (tmp_path / "critic").iterdir()] == ["step_000004"]


@pytest.mark.parametrize("number", (errno.ESTALE, errno.EIO))
def test_a_critic_stays_where_its_policys_manifest_cannot_be_read_for_a_moment(tmp_path, monkeypatch, number):
    data, saver = Data(), Checkpointer(tmp_path, CheckpointConfig(every=1, keep=2))
    saver.after_step(1, learner(critic=True), data)
    unreadable(monkeypatch, step_folder(tmp_path, 1) / MANIFEST, number)
    saver.after_step(2, learner(critic=True), data)
    monkeypatch.undo()
    assert [*valid_checkpoints(tmp_path / "critic")] == [*valid_checkpoints(tmp_path)] == [1, 2]


def test_the_newest_checkpoint_is_by_number_and_of_a_format_that_can_be_read(tmp_path):
    """Before a start, too: what is checked then is what the learner will load."""
    folder = RunFolder(tmp_path)
    for step in (999_998, 999_999, 1_000_000):
        Saves().save(step_folder(folder.checkpoints, step), {})
    assert (
        folder.newest_checkpoint() == latest_valid(folder.checkpoints) == folder.checkpoints / "step_1000000"
    )
    assert [*valid_checkpoints(folder.checkpoints)] == [999_998, 999_999, 1_000_000]
    (folder.checkpoints / "step_1000000" / "complete.json").write_text('{"format": 1, "files": {}}')
    assert folder.newest_checkpoint() == folder.checkpoints / "step_999999"
    prune(folder.checkpoints, keep=1)
    assert [*valid_checkpoints(folder.checkpoints)] == [999_999]


def work_stale_listing(root: Path) -> tuple[list[Path], list[Path]]:
    """What each rank loads where rank 1's node still knows the folder as it was before the newest checkpoint,
    for a while."""
    run = learner(critic=True)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            looks = itertools.count()
            patch.setattr(resume, "POLL_S", 0.01)
            patch.setattr(resume, "step_folders", lambda folder: {2: folder / "step_000002"})
            patch.setattr(resume, "is_valid", lambda folder: next(looks) >= 5 and is_valid(folder))
        Checkpointer(root, CheckpointConfig()).restore(run, Data())
    return run.engine.loaded, run.critic.engine.loaded


@pytest.mark.engines
def test_all_ranks_load_the_checkpoint_that_the_first_one_chose(tmp_path):
    root, run = tmp_path / "checkpoints", learner(critic=True)
    for step in (2, 4):
        Checkpointer(root, CheckpointConfig()).save(step, run)
    found = run_ranks(work_stale_listing, 2, tmp_path / "ranks", root)
    assert found == [([root / "step_000004"], [root / "critic" / "step_000004"])] * 2


@pytest.mark.engines
def test_all_ranks_agree_on_the_best_step(tmp_path):
    assert run_ranks(work_best, 2, tmp_path / "ranks", tmp_path) == [[True, False, True]] * 2


def test_a_damaged_policy_takes_the_critic_of_its_step_along(tmp_path, capsys):
    run = learner(critic=True)
    for step in (1, 2, 3):
        Checkpointer(tmp_path, CheckpointConfig(keep=3)).save(step, run)
    for step in (2, 3):
        (tmp_path / f"step_00000{step}" / "extra.json").write_text("x")
    assert Checkpointer(tmp_path, CheckpointConfig()).restore(run, Data()).step == 1
    assert run.critic.engine.loaded == [tmp_path / "critic" / "step_000001"]
    assert sorted(path.name for path in (tmp_path / "critic").iterdir()) == [
        "step_000001",
        "step_000002.damaged",
        "step_000003.damaged",
    ]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        f"checkpoint {tmp_path}/step_00000{step} is damaged" for step in (3, 2)
    ]


def test_a_missing_critic_is_an_error_before_the_policy_is_touched(tmp_path):
    Checkpointer(tmp_path, CheckpointConfig()).save(2, learner(critic=False))
    run = learner(critic=True)
    with pytest.raises(CheckpointError, match=r"critic/step_000002 is damaged: complete\.json is missing"):
        Checkpointer(tmp_path, CheckpointConfig()).restore(run, Data())
    assert run.engine.loaded == []


@pytest.mark.parametrize(("saved", "now", "coefficient"), [
    (ADAPTIVE, ADAPTIVE, 0.05),
    (ADAPTIVE, FIXED, 0.3),  # what nothing moves is the config's
    (FIXED, ADAPTIVE, 0.1),
    (FIXED, FIXED.model_copy(update={"coefficient": 0.4}), 0.4),
    (ADAPTIVE, KLConfig(coefficient=0.2), 0.0),  # moved into the loss
    (ADAPTIVE, KLConfig(), 0.0),
    (KLConfig(), FIXED, 0.3),
])  # fmt: skip
def test_the_coefficient_is_the_controllers_or_the_configs(saved, now, coefficient):
    before, after = KLInReward(saved), KLInReward(now)
    if saved is ADAPTIVE:
        before.coefficient = 0.05
    after.load_state(json.loads(json.dumps(before.state)))
    assert after.coefficient == coefficient


def test_a_checkpoint_of_an_older_version_says_nothing_of_the_coefficient():
    assert Progress(step=1, version=1, sampler={}).kl_coefficient is None


def test_the_penalty_and_the_next_coefficient_by_hand():
    batch = random_batch([4, 3], seed=3)
    term = KLInReward(ADAPTIVE)
    of_another_rank = torch.tensor([2.0, 3.0], dtype=torch.float64)  # sum of KL, and tokens
    penalty_T, metrics = term.penalty(batch, num_samples=100, total=lambda sums: sums + of_another_rank)
    kl_T = (batch.old_logprobs_T - batch.ref_logprobs_T) * batch.response_mask_T
    torch.testing.assert_close(penalty_T, 0.1 * kl_T)
    measured = ((kl_T.sum() + 2.0) / (batch.response_mask_T.sum() + 3)).item()
    assert values(metrics) == pytest.approx(
        {"policy/kl_coefficient": 0.1, "policy/kl_in_reward": measured}, rel=1e-6
    )
    error = min(max(measured / 0.01 - 1, -0.2), 0.2)
    assert term.coefficient == pytest.approx(0.1 * (1 + error * 100 / 1000))
    moved, all_masked = term.coefficient, batch.with_fields(response_mask_T=torch.zeros(7, dtype=torch.bool))
    penalty_T, _ = term.penalty(all_masked, num_samples=100, total=alone)
    assert not penalty_T.any() and term.coefficient == moved, "no token measures a KL of zero"
    assert KLInReward(KLConfig(coefficient=0.2)).penalty(batch, num_samples=100, total=alone) == (None, {})


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
@pytest.mark.parametrize("scored", [True, False])
def test_what_is_recorded_is_the_learners_own_log_probs(tmp_path, mode, scored):
    packed = recorded(seed=5).packed
    own_T = packed.old_logprobs_T
    old_T = packed.rollout_logprobs_T if mode == "bypass" else own_T
    of_step = {"rewards_S": torch.rand(4), "group_ids_S": torch.arange(4)}
    batch = StepBatch(packed=packed.with_fields(old_logprobs_T=old_T), rows=[[[0, 1], [2, 3]]], **of_step)
    if not scored and mode == "decoupled":
        batch = batch.with_fields(old_logprobs_T=None)
    run = SimpleNamespace(
        logprobs=lambda given: own_T, groups=SimpleNamespace(dp_size=1, dp_group=dist.group.WORLD),
        is_first_rank=True, version=4,
    )  # fmt: skip
    recorder = Recorder(tmp_path, RecordEvery(every=2), CorrectionConfig(mode=mode))
    for step in (1, 2, 3, 4):
        recorder.record(step, batch, run)
    assert recorded_steps(tmp_path) == [2, 4]
    again = read_batch(batch_file(tmp_path, 4))
    assert torch.equal(again.packed.old_logprobs_T, own_T)
    assert torch.equal(again.packed.rollout_logprobs_T, packed.rollout_logprobs_T)
    assert (again.step, again.version) == (4, 4)
    recorder.forget_after(2)
    assert recorded_steps(tmp_path) == [2]
    file = batch_file(tmp_path, 6)
    file.with_name(f".{file.name}.{os.getpid()}").symlink_to("/dev/full")
    assert f"{file}: the batch of step 6 cannot be recorded (No space left on device)" in recorder.record(
        6, batch, run
    )


def test_the_first_rank_records_what_all_ranks_have(tmp_path, monkeypatch):
    packed = recorded(seed=5).packed
    packed = with_random_experts(packed.with_fields(values_T=torch.rand(packed.num_tokens)))
    shares = [packed.select([2, 0]), packed.select([3, 1])]
    monkeypatch.setattr(dist, "all_gather_object", lambda out, mine, group: out.__setitem__(slice(2), shares))
    of_step = {
        "rewards_S": torch.rand(4), "group_ids_S": torch.tensor([0, 0, 1, 1]), "episode_ids_S": torch.tensor([0, 0, 1, 2])
    }  # fmt: skip
    batch, groups = (
        StepBatch(packed=shares[1], rows=[[[0, 1]]], **of_step),
        SimpleNamespace(dp_size=2, dp_group=None),
    )
    for folder, is_first in ((tmp_path / "second", False), (tmp_path / "first", True)):
        run = SimpleNamespace(groups=groups, is_first_rank=is_first, version=4)
        Recorder(folder, "all", recorded().correction).record(1, batch, run)
    assert not (tmp_path / "second").exists()
    again = read_batch(batch_file(tmp_path / "first", 1))
    assert same(again.packed, packed)
    assert all(torch.equal(getattr(again, name), value) for name, value in of_step.items())


def test_nothing_is_recorded_unless_asked(tmp_path):
    write_batch(batch_file(tmp_path, 1), recorded())
    Recorder(tmp_path / "none", "none", recorded().correction).record(1, None, None)
    assert not (tmp_path / "none").exists()
