"""``tandem clean`` on folders made here: what is listed and removed, and what never is."""

import errno
import os
from pathlib import Path

import pytest
import yaml

from launch.processes.run_folder import RunFolder, locked, write_json
from parallel.checkpoints.files import MANIFEST, write_manifest
from tests.support.command import tandem
from tests.support.unreadable import unreadable

MODEL = {"path": "m"}


@pytest.fixture(autouse=True)
def slurm_has_forgotten_every_job(tmp_path_factory, monkeypatch):
    squeue = tmp_path_factory.mktemp("bin") / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}{os.pathsep}{os.environ['PATH']}")


def make_run(path: Path, *, steps: int = 9, **changes) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir(parents=True)
    content = {"name": "tiny", "steps": steps, "model": MODEL, "task": {"type": "countdown"}}
    folder.config.write_text(yaml.safe_dump(content | changes))
    return folder


def make_checkpoint(root: Path, step: int, *, torn: bool = False) -> Path:
    folder = root / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"x" * 1000)
    write_manifest(folder, world_size=1)
    if torn:
        (folder / MANIFEST).unlink()
    return folder


def make_finished(run: RunFolder, steps: int = 9) -> None:
    run.hf.mkdir()
    (run.hf / "model.safetensors").write_bytes(b"x")
    write_json(run.summary, {"steps": steps})


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name not in ("lock", "export-lock")
    }


@pytest.fixture
def littered(tmp_path) -> tuple[RunFolder, set[str]]:
    """A finished run with everything that may go, and the names of what must stay."""
    run = make_run(tmp_path / "runs" / "a", checkpoint={"every": 1, "keep": 2})
    make_finished(run)
    (run.path / "roles").mkdir()
    for step in (8, 9):
        make_checkpoint(run.checkpoints, step)
        make_checkpoint(run.critic_checkpoints, step)
    make_checkpoint(run.checkpoints, 2)
    write_json(run.checkpoints / "best.json", {"step": 2, "metric": "eval/accuracy", "value": 0.5})
    run.logs.mkdir()
    write_json(run.job, {"job_id": "12", "nodes": [], "restart": 0})
    for name in ("learn.log", "slurm-12.log"):
        (run.logs / name).touch()
    old = run.path / ".hf.old.abc" / "hf"
    old.mkdir(parents=True)  # may be the only copy of a model
    stays = files(run.path)
    for root in (run.checkpoints, run.critic_checkpoints):
        make_checkpoint(root, 7)
    make_checkpoint(run.checkpoints, 6, torn=True)
    make_checkpoint(run.critic_checkpoints, 5)
    for name in (".step_000010.partial", "step_000004.damaged", "step_000004.damaged2"):
        (run.checkpoints / name).mkdir()
    for folder in (run.export, run.exported_adapter, run.path / ".hf.x1y2", run.path / ".export.zz"):
        folder.mkdir()
    # The request of an export is named like an export that was killed, and the write of it may be killed too.
    for name in (".config.yaml.4711", ".export.json.4711", "metrics.lost.jsonl", "logs/slurm-11.log"):
        (run.path / name).touch()
    run.batches.mkdir()
    (run.batches / ".step_000002.safetensors.4711").touch()
    return run, stays | {"batches"}


def test_what_may_go_is_listed_and_only_apply_removes_it(littered, tmp_path):
    run, stays = littered
    before = files(run.path)
    done = tandem("clean", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert files(run.path) == before and "`tandem clean runs --apply` removes them" in done.stdout
    assert "checkpoints/step_000007" in done.stdout and "checkpoint.keep=2" in done.stdout
    assert "16 can be removed" in done.stdout, done.stdout
    done = tandem("clean", "runs", "--apply", cwd=tmp_path)
    assert done.returncode == 0 and "removed 16" in done.stdout and "freed" in done.stdout
    assert files(run.path) == stays
    again = tandem("clean", "runs", "--apply", cwd=tmp_path)
    assert again.returncode == 0 and again.stdout == "nothing to remove in runs (1 run)\n"
    assert run.newest_checkpoint() is not None and run.has_final_model()


@pytest.mark.parametrize(
    ("job", "stay"),
    [("123_0", {"slurm-123_0.log"}), ("124", {"slurm-123_0.log", "slurm-99.log"})],
    ids=["element of an array", "job without a log"],
)
def test_the_newest_log_of_slurm_stays(tmp_path, job, stay):
    """A job may be known by another number than its log, and one that was cancelled in the queue has none."""
    run = make_run(tmp_path / "runs" / "a")
    make_finished(run)
    write_json(run.job, {"job_id": job, "nodes": [], "restart": 0})
    run.logs.mkdir()
    for name in ("slurm-123_0.log", "slurm-99.log"):
        (run.logs / name).touch()
    assert tandem("clean", "--apply", cwd=tmp_path).returncode == 0
    assert files(run.logs) == stay


def test_an_unfinished_run_keeps_its_checkpoints_and_the_only_ones_there_are(tmp_path):
    run = make_run(tmp_path / "runs" / "a", checkpoint={"every": 1, "keep": 1})
    for step in (1, 2, 3):
        make_checkpoint(run.checkpoints, step)
    only_torn = make_run(tmp_path / "runs" / "b")
    make_checkpoint(only_torn.checkpoints, 3, torn=True)
    (only_torn.checkpoints / "step_000002.damaged").mkdir()
    before = files(tmp_path)
    done = tandem("clean", "--apply", cwd=tmp_path)
    assert done.returncode == 0 and "nothing to remove" in done.stdout
    assert files(tmp_path) == before


def test_a_run_that_goes_on_is_left_alone(littered, tmp_path):
    run, _ = littered
    before = files(run.path)
    lock = locked(run.path / "roles" / "lock")
    done = tandem("clean", "--apply", cwd=tmp_path)
    assert "left alone: runs/a: it is being run" in done.stdout and files(run.path) == before
    lock.close()
    with locked(run.path / "roles" / "export-lock"):
        done = tandem("clean", "--apply", cwd=tmp_path)
        assert "it is being run, or exported" in done.stdout and files(run.path) == before


def test_a_run_that_may_go_on_elsewhere_is_left_alone(tmp_path):
    run = make_run(tmp_path / "runs" / "a")
    (run.path / "roles").mkdir()
    (run.path / "metrics.lost.jsonl").touch()
    (run.path / "metrics.jsonl").touch()
    done = tandem("clean", "--apply", cwd=tmp_path)
    assert "may be running on another host" in done.stdout and (run.path / "metrics.lost.jsonl").exists()
    os.utime(run.path / "metrics.jsonl", (0, 0))
    done = tandem("clean", "--apply", cwd=tmp_path)
    assert "removed 1" in done.stdout and not (run.path / "metrics.lost.jsonl").exists()


def test_a_finished_run_that_is_resumed_to_more_steps_is_not_finished(tmp_path):
    """It may go on elsewhere, it keeps the file of its sweep, and it needs the model that it began with."""
    model = tmp_path / "runs" / "quickstart-20260101-000000" / "warm"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    run = make_run(tmp_path / "runs" / "one-1", steps=20, model={"path": str(model)})
    make_finished(run, steps=9)
    sweep = tmp_path / "runs" / "tiny-sweep"
    sweep.mkdir()
    for name in ("lock", "one.yaml"):
        (sweep / name).touch()
    write_json(sweep / "sweep.json", {"runs": {"one": "one-1"}})
    (run.checkpoints / ".step_000010.partial").mkdir(parents=True)
    (run.path / "roles").mkdir()
    (run.path / "metrics.jsonl").touch()
    before = files(tmp_path)
    done = tandem("clean", "--models", "--apply", cwd=tmp_path)
    assert "may be running on another host" in done.stdout and "may still need it" in done.stdout
    assert files(tmp_path) == before


def test_links_and_folders_of_others_are_left_alone(littered, tmp_path):
    run, _ = littered
    foreign = tmp_path / "runs" / "foreign"
    (foreign / "export").mkdir(parents=True)
    (foreign / "config.yaml").write_text("model: mine\n")
    (tmp_path / "runs" / "data" / "export").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    run.path.rename(elsewhere)
    run.path.symlink_to(elsewhere)
    linked = make_run(tmp_path / "runs" / "linked", checkpoint={"every": 1, "keep": 1})
    make_finished(linked)
    linked.checkpoints.symlink_to(elsewhere / "checkpoints")
    before = files(tmp_path)
    done = tandem("clean", "--apply", cwd=tmp_path)
    assert done.returncode == 0 and "is not a config of this version" in done.stdout
    assert files(tmp_path) == before


def test_what_cannot_be_read_for_a_moment_stays_and_so_does_its_critic(littered, tmp_path, monkeypatch):
    run, stays = littered
    unreadable(monkeypatch, run.checkpoints / "step_000008" / MANIFEST, errno.ESTALE)
    assert tandem("clean", str(tmp_path / "runs"), "--apply", cwd=tmp_path).returncode == 0
    monkeypatch.undo()
    assert stays <= files(run.path)


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints"])
def test_a_run_that_cannot_be_read_stays_and_the_others_are_cleaned(littered, tmp_path, monkeypatch, name):
    private = make_run(tmp_path / "runs" / "b")
    make_finished(private)
    make_checkpoint(private.checkpoints, 9)
    before, (run, stays) = files(private.path), littered
    unreadable(monkeypatch, private.path / name, errno.EACCES)
    done = tandem("clean", str(tmp_path / "runs"), "--apply", cwd=tmp_path)
    monkeypatch.undo()
    assert (
        done.returncode == 0
        and f"left alone: {private.path}: " in done.stdout
        and "cannot be read" in done.stdout
    )
    assert (files(private.path), files(run.path)) == (before, stays)


def test_a_run_whose_summary_is_lost_is_not_finished_and_the_others_are_cleaned(littered, tmp_path):
    lost = make_run(tmp_path / "runs" / "b", checkpoint={"every": 1, "keep": 1})
    make_finished(lost)
    for step in (8, 9):
        make_checkpoint(lost.checkpoints, step)
    lost.summary.write_text("")
    before, (run, stays) = files(lost.path), littered
    done = tandem("clean", "--apply", cwd=tmp_path)
    assert (files(lost.path), files(run.path)) == (before, stays)
    assert "left alone: runs/b: runs/b/summary.json cannot be read" in done.stdout


def test_a_checkpoint_of_another_version_is_not_incomplete(littered, tmp_path):
    run, _ = littered
    other = make_checkpoint(run.checkpoints, 3, torn=True)
    (other / MANIFEST).write_text('{"format": 99, "files": {}}')
    tandem("clean", "--apply", cwd=tmp_path)
    assert other.is_dir()


def test_a_sweeps_files_of_finished_runs_may_go(tmp_path):
    run = make_run(tmp_path / "runs" / "one-1")
    make_finished(run)
    make_run(tmp_path / "runs" / "two-1")
    sweep = tmp_path / "runs" / "tiny-sweep"
    sweep.mkdir()
    for name in ("lock", "one.yaml", "one.log", "two.yaml", "two.log", "comparison.html", ".sweep.json.12"):
        (sweep / name).touch()
    write_json(sweep / "sweep.json", {"runs": {"one": "one-1", "two": "two-1"}})
    with locked(sweep / "lock"):
        assert "nothing to remove" in tandem("clean", "--apply", cwd=tmp_path).stdout
    done = tandem("clean", "--apply", cwd=tmp_path)
    assert "removed 3" in done.stdout, done.stdout
    assert {path.name for path in sweep.iterdir()} == {
        "lock", "two.yaml", "two.log", "comparison.html", "sweep.json",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["../../mine", "{folder}/mine", ".."])
def test_a_sweep_that_names_paths_elsewhere_is_left_alone(tmp_path, name):
    make_finished(make_run(tmp_path / "runs" / "one-1"))
    sweep, mine = tmp_path / "runs" / "tiny-sweep", tmp_path / "mine.yaml"
    sweep.mkdir()
    for file in (mine, sweep / "lock"):
        file.touch()
    name = name.format(folder=tmp_path)
    for runs in ({name: "one-1"}, {"one": name}):
        write_json(sweep / "sweep.json", {"runs": runs})
        done = tandem("clean", "--apply", cwd=tmp_path)
        assert (
            "left alone: runs/tiny-sweep: runs/tiny-sweep/sweep.json is not the memory of a sweep"
            in done.stdout
        )
        assert f"{name!r} is no name in a folder" in done.stdout and mine.exists()


def test_models_of_quickstarts_go_only_if_asked_and_not_needed(tmp_path):
    models = tmp_path / "runs" / "quickstart-20260101-000000"
    for name in ("random", "warm"):
        (models / name).mkdir(parents=True)
        (models / name / "config.json").touch()
    make_run(tmp_path / "runs" / "a", model={"path": str(models / "warm")})
    assert "nothing to remove" in tandem("clean", cwd=tmp_path).stdout
    done = tandem("clean", "--models", "--apply", cwd=tmp_path)
    assert "removed 1" in done.stdout and "a may still need it" in done.stdout
    assert [path.name for path in models.iterdir()] == ["warm"]


def test_what_cannot_be_removed_is_named_and_the_rest_goes(littered, tmp_path, monkeypatch):
    run, _ = littered

    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("launch.commands.clean.shutil.rmtree", refuse)
    done = tandem("clean", "--apply", cwd=tmp_path)
    assert (
        done.returncode == 1 and f"{Path('runs/a/export')} was not removed: Permission denied" in done.stderr
    )
    assert "removed 5" in done.stdout and not (run.path / "metrics.lost.jsonl").exists()


def test_a_wrong_folder_is_refused(tmp_path):
    done = tandem("clean", cwd=tmp_path)
    assert done.returncode == 2 and "runs is not a folder" in done.stderr
    (tmp_path / "runs").mkdir()
    done = tandem("clean", cwd=tmp_path)
    assert done.returncode == 2 and "runs holds no runs" in done.stderr
    assert tandem("clean", "--aply", cwd=tmp_path).returncode == 2
