"""The command as a user meets it: bad input is one clear error, exit code 2, with nothing written. Configs:
test_broken_configs.py."""

import errno
import fcntl
import importlib.metadata
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from typer.testing import CliRunner

from configs.loader import ConfigError, load_config, parse_config
from configs.schema import RunConfig, SftConfig
from launch import cli
from launch.checks import config as checks
from launch.checks.arguments import BadInput
from launch.commands import results, studies
from launch.commands import train as training
from launch.processes import run_folder
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import Interrupted, Role, RoleFailed, Supervisor
from launch.roles import start
from launch.roles import table as roles
from launch.roles.command_line import role_command
from launch.roles.summary import write_summary
from launch.slurm import inside_job as job
from parallel.checkpoints.files import write_manifest
from rollout.sampling import remote as remote_sampler
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.command import tandem

ROOT = Path(__file__).resolve().parents[2]
# What other recipes extend: without a model, so checked through them.
FRAGMENTS = {
    "grpo.yaml",
    "dapo.yaml",
    "fp8_rollout.yaml",
}
SHIPPED = [
    f
    for f in sorted((ROOT / "configs").glob("*/*.yaml"))
    if f.name not in FRAGMENTS and f.parent.name != "hardware"
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return folder


def config_file(folder: Path, model: Path, **changes) -> Path:
    content = {
        "model": {"path": str(model)},
        "task": {"type": "countdown"},
        "rollout": {"max_new_tokens": 14},
    } | changes
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def refused(tmp_path: Path, *arguments: str) -> str:
    """Run ``tandem train``, check that it was refused properly, and return what it said."""
    before = sorted(p.name for p in tmp_path.iterdir())
    done = tandem("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "pydantic" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before, "something was written"
    return done.stderr


def test_auto_is_as_many_copies_as_ep_allows_and_gpus_hold(tmp_path, model, monkeypatch):
    def world_size(gpus: int, *overrides: str) -> int:
        monkeypatch.setattr(checks, "gpus_here", lambda: gpus)
        parsed = parse_config(file, overrides)
        resolved, problems = checks._with_data_parallel_size(parsed.validated(), parsed)
        assert problems == []
        return resolved.validated().layout.world_size

    file = config_file(tmp_path, model)
    assert [
        world_size(0),
        world_size(0, "layout.ep=2"),
        world_size(0, "layout={tp: 2, sp: true, ep: 4}"),
    ] == [1, 2, 4]
    assert [world_size(gpus) for gpus in (1, 2, 5)] == [1, 1, 4], "one GPU is the server's"
    assert [world_size(gpus, "layout.ep=2") for gpus in (1, 4, 5, 6)] == [2, 2, 4, 4]
    assert [world_size(gpus, "launch.placement=colocated") for gpus in (1, 2, 4)] == [1, 2, 4], (
        "the servers have the learner's"
    )
    assert world_size(2, "launch.nodes={learner: 2, gpus_per_node: 4}", "layout.tp=2") == 8, (
        "what is here is no matter"
    )
    assert world_size(0, "launch.nodes={learner: 2, gpus_per_node: 0}") == 1


def test_one_machine_shares_its_gpus_where_they_are_too_few_for_both(tmp_path, model, monkeypatch, capsys):
    def placement(gpus: int, *overrides: str, **options) -> tuple[str, int]:
        monkeypatch.setattr(checks, "gpus_here", lambda: gpus)
        monkeypatch.setattr(checks, "memory_problems", lambda *_: ())
        monkeypatch.setattr(checks.served, "check_gpus", lambda *_: None)
        monkeypatch.setattr(checks, "device_of", lambda *_, **__: SimpleNamespace(kind="cuda"))
        parsed = parse_config(file, overrides)
        config = checks.load_checked(parsed, RunConfig, runs=checks.TRAINING, **options)
        return config.launch.placement, config.layout.world_size

    file = config_file(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    assert placement(1) == ("colocated", 1)
    said = capsys.readouterr().out
    assert "# launch.placement=colocated: learner and servers take turns" in said
    assert "separate ones would need 2 and 1 is visible" in said
    assert placement(2) == placement(0) == ("auto", 1)
    assert placement(4, "layout.tp=4", "rollout.tp=4") == ("colocated", 4)
    assert placement(1, "launch.placement=separate")[0] == "separate"
    assert placement(1, "rollout.max_staleness=1")[0] == "auto", "both sides work at once"
    assert placement(1, in_job=True)[0] == "auto", "the job's GPUs are not this machine's"


def test_too_few_gpus_are_refused_before_a_start(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (checks, studies):
        monkeypatch.setattr(module, "gpus_here", lambda: 2)
    monkeypatch.setattr(Supervisor, "start", lambda *_: pytest.fail("a process would have been started"))
    file = config_file(tmp_path, model)
    with pytest.raises(ConfigError, match=r"3 GPUs are needed, 2 for the learner .* but 2 are visible"):
        training.train(file, ["layout.dp=2", "launch.placement=separate"])
    with pytest.raises(ConfigError, match=r"3 GPUs are needed.*rollout\.replicas=3"):
        training.evaluate(file, ["rollout.replicas=3"])
    with pytest.raises(
        checks.BadInput, match="--rollout: 4 GPUs are needed, 2 for the learner or other servers"
    ):
        studies.verify_sync(file, [], ["tp=1"], ["tp=1", "tp=2"])
    with pytest.raises(ValueError, match="the layout takes 4 GPUs, but 2 are visible"):
        checks.check_learner_gpus(4, 2)
    checks.check_learner_gpus(2, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("size", ["nan", "inf"])
def test_gpus_of_no_size_are_refused(tmp_path, model, size):
    done = tandem(
        "plan", str(config_file(tmp_path, model)), "--gpus", "8", "--gpu-memory", size, cwd=tmp_path
    )
    assert done.returncode == 2 and "'--gpu-memory'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["make-tiny-model", "mine"], "FOLDER: mine exists already"),
        (["make-tiny-model", "/proc/x/y"], "FOLDER=/proc/x/y cannot be written to"),
        (["dequantise", "mine", "run"], "OUT: run exists already"),
        (["export", "run", "mine"], "OUT: mine exists already"),
        (["export", "run", "/proc/out"], "OUT=/proc/out cannot be written to"),
        (["replay", "mine", "--step", "1"], "mine is not a run folder"),
    ],
)
def test_a_wrong_folder_is_refused_before_the_seconds_that_torch_takes(
    tmp_path, monkeypatch, capsys, arguments, said
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    for module in ("rollout.tiny_model", "launch.studies.replay", "parallel.weights.quantised"):
        monkeypatch.setitem(sys.modules, module, None)  # to import it is an error
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1), error
    assert said in error


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "figures"), "; work on a copy of its folder"),
        (OSError(errno.EROFS, "Read-only file system", "figures"), "; work on a copy of its folder"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "report.html"), ""),
        # a write does not know its file's name
        (OSError(errno.ENOSPC, "No space left on device"), "; free space there"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None),
        (OSError("a bug"), None),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line_and_a_bug_keeps_its_traceback(
    monkeypatch, capsys, error, fix
):
    def fail(run):
        raise error

    monkeypatch.setattr(results, "report", fail)
    monkeypatch.setattr(sys, "argv", ["tandem", "report", "run"])
    with pytest.raises(OSError if fix is None else SystemExit) as ended:
        cli.main()
    if fix is None:
        assert ended.value is error
        return
    told = capsys.readouterr().err
    assert ended.value.code == 1 and told.startswith(f"tandem: {error}{fix}") and told.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["train"]])
def test_help_has_a_short_name_and_shows_flags_without_a_type(command):
    shown = CliRunner().invoke(cli.app, [*command, "-h"], env={"COLUMNS": "100", "TERM": "dumb"})
    assert shown.exit_code == 0 and "Show this message and exit." in shown.output
    assert "<bool>" not in shown.output
    if command:
        assert "Usage: tandem train [OPTIONS] {CONFIG} [KEY=VALUE]..." in shown.output.replace(
            "root", "tandem"
        )


def test_the_version_is_that_of_the_package():
    done = tandem("--version", cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"tandem {importlib.metadata.version('tandem-rl')}\n"), (
        done.stderr
    )


def test_a_missing_config_is_refused(tmp_path):
    assert "nowhere.yaml" in refused(tmp_path, "nowhere.yaml")


def test_an_unknown_flag_is_refused(tmp_path, model):
    assert "--wrong" in refused(tmp_path, str(config_file(tmp_path, model)), "--wrong")


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda f: f.name)
def test_every_shipped_config_is_valid(shipped):
    assert isinstance(load_config(shipped, []), RunConfig | SftConfig)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for command in (["report", "."], ["export", ".", "out"], ["learn", "."]):
        done = tandem(*command, cwd=tmp_path)
        assert done.returncode == 2 and "is not a run folder" in done.stderr


@pytest.mark.parametrize("command", ["serve", "sample", "learn", "replay-rank", "job"])
def test_a_folder_of_another_kind_is_refused(tmp_path, model, command, monkeypatch, capsys):
    """The folder of a warm start has neither servers nor samples."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({
        "kind": "sft", "model": {"path": str(model)}, "data": {"type": "countdown"}, "output": "warm",
    }))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["tandem", command, str(tmp_path)])
    monkeypatch.setattr(roles, "exit_now", lambda code: pytest.fail("the role began"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err
        == f"tandem: RUN: {tmp_path} is a run of kind sft; this command takes runs of kind train\n"
    )


def test_a_warm_start_is_neither_resumed_nor_exported(tmp_path, model):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({
        "kind": "sft", "model": {"path": str(model)}, "data": {"type": "countdown"}, "output": "warm",
    }))  # fmt: skip
    with pytest.raises(BadInput, match="is a warm start, which saves no checkpoint to continue from"):
        training.resume(tmp_path, ["steps=3"])
    for command in (training.evaluate, results.export):  # its model is not in its folder
        with pytest.raises(
            BadInput, match=r"is a warm start, whose model is .* folder warm; .* model.path=warm`"
        ):
            command(tmp_path, [] if command is training.evaluate else tmp_path / "out")


@pytest.mark.parametrize("saved", [False, True])
def test_an_interrupted_run_says_what_it_saved_and_how_it_goes_on(
    tmp_path, model, monkeypatch, capsys, saved
):
    def interrupt(supervisor, folder, config):
        raise KeyboardInterrupt

    def save_and_interrupt(supervisor, folder, config):
        step = folder.checkpoints / "step_000002"
        step.mkdir(parents=True)
        write_manifest(step, world_size=1)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "start_sampling", save_and_interrupt if saved else interrupt)
    with pytest.raises(Interrupted) as ended:
        training.train(config_file(tmp_path, model), [])
    run = Path("runs") / (tmp_path / "runs" / "latest").resolve().name
    go_on = f"tandem resume {run}" if saved else f"tandem train {run}/config.yaml"
    assert str(ended.value).startswith("interrupted; every process of the run has ended. ")
    assert str(ended.value).endswith(f"`{go_on}`") and ("Saved: step 2" in str(ended.value)) == saved
    assert "continues from" not in capsys.readouterr().out
    if saved:
        monkeypatch.setattr(training, "start_sampling", interrupt)
        monkeypatch.setattr(start, "_claimed", lambda folder: folder)  # the error above keeps the lock
        with pytest.raises(Interrupted):
            training.resume(run, [])
        assert f"continues from step 2, {run.resolve()}/checkpoints/step_000002\n" in capsys.readouterr().out


def test_a_resume_that_cannot_write_its_config_leaves_the_run_as_it_was(tmp_path, model, monkeypatch):
    """The operating system refuses files above a size, as a full disk would."""
    monkeypatch.chdir(tmp_path)
    file = config_file(tmp_path, model)
    fresh = start.folder_of(load_config(file, []))
    assert load_config(fresh.config) == load_config(file)
    run = RunFolder(fresh.release())
    before, listed = run.config.read_text(), sorted(run.path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"resume[\s\S]*cannot be written: .*File too large"):
            start.folder_of(load_config(file, [f"resume={run.path}", "steps=7"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run.config.read_text(), sorted(run.path.iterdir())) == (before, listed)
    start.folder_of(load_config(file, [f"resume={run.path}", "steps=7"])).release()
    assert load_config(run.config) == load_config(file, ["steps=7"])


def test_a_resume_says_what_it_changes_and_keeps_the_config_of_the_steps_before(
    tmp_path, model, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    file = config_file(tmp_path, model, steps=9)
    run = RunFolder(start.folder_of(load_config(file, [])).release())
    first = run.config.read_text()

    def resumed(*overrides: str) -> str:
        capsys.readouterr()
        start.folder_of(load_config(file, [f"resume={run.path}", *overrides])).release()
        assert load_config(run.config) == load_config(file, overrides)
        return capsys.readouterr().out

    checkpoint = run.checkpoints / "step_000003"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, world_size=1)
    assert resumed() == "" and not list(run.path.glob("config-*"))
    said = resumed("learner.optimizer.lr=0.5", "learner.lora={rank: 4}")
    assert "changed: learner.optimizer.lr 1e-06 -> 0.5, learner.lora.rank null -> 4, " in said
    assert said.endswith("; config-step-3.yaml has the config before\n")
    kept = run.path / "config-step-3.yaml"
    assert kept.read_text() == first
    assert "learner.optimizer.lr 0.5 -> 0.25, " in resumed("learner.optimizer.lr=0.25")
    assert kept.read_text() == first, "no step was made with 0.5"


def test_an_export_moves_what_was_written_for_it_and_copies_the_runs_own_model(
    tmp_path, monkeypatch, capsys, model
):
    def export_newest(role, *, grace_s):
        """In place of the role: it writes a model of the newest checkpoint."""
        assert json.loads(run.export_request.read_text()) == {"step": None}
        run.export_request.write_text('{"step": 1}')
        run.export.mkdir()
        (run.export / "weights").write_text("of a checkpoint")

    monkeypatch.setattr(results, "run_to_end", export_newest)
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "step_000001").mkdir(parents=True)
    write_manifest(run.checkpoints / "step_000001", world_size=1)
    run.config.write_text(config_file(tmp_path, model).read_text())
    copied = []
    monkeypatch.setattr(
        shutil,
        "copytree",
        lambda *given, copy=shutil.copytree, **named: (copied.append(given), copy(*given, **named)),
    )
    results.export(run.path, tmp_path / "new" / "out")
    assert f"exported the model of step 1 to {tmp_path / 'new' / 'out'}\n" in capsys.readouterr().out
    assert (tmp_path / "new" / "out" / "weights").read_text() == "of a checkpoint"
    assert (copied, run.export.exists()) == ([], False)
    shutil.copytree(model, run.hf)
    (run.hf / "weights").write_text("of the end")
    run.summary.write_text('{"steps": 2}')
    results.export(run.path, tmp_path / "out")
    assert f"exported the model of step 2 to {tmp_path / 'out'}\n" in capsys.readouterr().out
    assert (tmp_path / "out" / "weights").read_text() == (run.hf / "weights").read_text() == "of the end"
    (weights,) = run.hf.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(checks.BadInput, match=rf"RUN: .*{weights.name}.*; move {run.hf} away to export"):
        results.export(run.path, tmp_path / "damaged")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "damaged"))] == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_bad_input(tmp_path, model, monkeypatch, capsys, number):
    monkeypatch.chdir(tmp_path)
    config = load_config(config_file(tmp_path, model), [])
    run = RunFolder(start.folder_of(config).release())

    def refuse(*given):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    starts = [
        lambda: start.folder_of(config),
        lambda: start.folder_of(config.model_copy(update={"resume": run.path})),
    ]
    for claim in [*starts, lambda: job._claim(run, may_be_our_own=True)]:
        with pytest.raises(
            checks.BadInput,
            match=rf"/roles is on a file system without file locks \({os.strerror(number)}\).*-o flock",
        ):
            claim()
    assert run._held == []
    assert start.new_run(config, "eval").config.is_file()  # nothing goes on with it
    assert "this process continues without a lock" in capsys.readouterr().out


def without_links(path, target):
    raise PermissionError(errno.EPERM, "Operation not permitted", str(path))


@pytest.mark.parametrize("obstacle", ["a folder", "no links"])
def test_a_run_starts_where_latest_cannot_be_pointed_to_it(tmp_path, model, monkeypatch, capsys, obstacle):
    """A copy of the runs has a folder in place of the link; some file systems have no links."""
    monkeypatch.chdir(tmp_path)
    config = load_config(config_file(tmp_path, model), [])
    if obstacle == "a folder":
        (tmp_path / "runs" / "latest").mkdir(parents=True)
        (tmp_path / "runs" / "latest" / "config.yaml").touch()
    else:
        monkeypatch.setattr(Path, "symlink_to", without_links)
    folder = start.folder_of(config)
    folder.release()
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"name {folder.path} instead" in said
    left = {path.name for path in folder.path.parent.iterdir()} - {"latest"}
    assert left == {folder.path.name}


@pytest.mark.parametrize("runs_dir", ["-runs", "--help", "runs"])
def test_the_folder_of_a_run_is_an_argument_whatever_its_name(tmp_path, monkeypatch, runs_dir):
    monkeypatch.chdir(tmp_path)
    folder = run_folder.create(Path(runs_dir), "a", "name: a\nsteps: 4\n")
    done = tandem("status", str(folder.path), cwd=tmp_path)
    assert done.returncode == 0 and "run         a in" in done.stdout
    assert [path.parent for path in tmp_path.glob(f"{runs_dir}/*/config.yaml")] == [folder.path.absolute()]
    assert not role_command("sample", folder)[-1].startswith("-")


def test_help_has_its_commands_in_groups_and_each_sentence_whole():
    commands = typer.main.get_command(cli.app).commands
    shown = {name: command for name, command in commands.items() if not command.hidden}
    text = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "100", "NO_COLOR": "1"}).output
    groups = ["Train", "Look at runs", "Before a run", "Study the two engines", "Roles, one at a time"]
    assert [command.rich_help_panel for command in shown.values()] == sorted(
        (command.rich_help_panel for command in shown.values()), key=groups.index
    )
    assert re.findall(r"^╭─ (.*?) ─", text, re.MULTILINE) == ["Options", *groups]
    assert next(iter(shown)) == "quickstart"
    assert all(command.help and "\n" not in command.help for command in shown.values())
    assert all(re.search(rf"^│ {name} ", text, re.MULTILINE) for name in shown)


def test_a_foreign_package_of_our_name_is_refused(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P", "-m", "launch", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the package 'trainer' is taken from" in done.stderr


def test_the_command_works_from_another_folder(tmp_path, model):
    """`tandem` is on the user's path, not in their folder; a `trainer` folder of theirs must not be picked up
    by the entry point."""
    (tmp_path / "trainer").mkdir()
    command = shutil.which("tandem", path=str(Path(sys.executable).parent))
    assert command, "tandem is not installed beside this Python"
    done = subprocess.run(
        [command, "train", str(config_file(tmp_path, model)), "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_summary_adds_up_the_steps_and_ignores_a_torn_line(tmp_path):
    steps = [
        {"step": 0, "eval/accuracy": 0.25, "time/evaluation": 2.0},
        {"step": 1, "time/sampling": 1.5, "time/update": 0.5},
        {
            "step": 2,
            "time/sampling": 1.0,
            "time/update": 0.25,
            "time/checkpoint": 0.5,
            "eval/accuracy": 0.5,
            "time/evaluation": 1.0,
        },
    ]
    lines = [json.dumps(s) for s in steps] + ['{"step": 3, "time/sam']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    summary = write_summary(RunFolder(tmp_path), seconds={"start_up": 3.0})
    assert summary["accuracy_before"] == 0.25 and summary["accuracy_after"] == 0.5 and summary["steps"] == 2
    assert summary["seconds"] == {
        "sampling": 2.5,
        "logprobs": 0,
        "update": 0.75,
        "sync": 0,
        "evaluation": 3.0,
        "checkpoint": 0.5,
        "start_up": 3.0,
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


@pytest.mark.parametrize(("last", "said"), [(3, "after 3 steps"), (2, "after 2 of 3 steps")])
def test_the_result_tells_the_step_of_the_last_evaluation(tmp_path, capsys, last, said):
    """eval.every need not divide the number of steps. An equal evaluation before the last is not a better one."""
    folder, lines = RunFolder(tmp_path), [{"step": step} for step in range(4)]
    lines[0]["eval/accuracy"], lines[1]["eval/accuracy"], lines[last]["eval/accuracy"] = 0.25, 0.5, 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_summary(folder, seconds={})
    config = RunConfig.model_validate({"steps": 3, "model": {"path": "m"}, "task": {"type": "countdown"}})
    training.print_result(folder, config)
    out = capsys.readouterr().out
    assert f"held-out accuracy: 25.0% before, 50.0% {said}\n" in out
    assert "best:" not in out, "the last is the best"


@pytest.mark.parametrize(
    ("keep_best", "kept", "named", "said"),
    [
        (None, False, None, "no checkpoint of it was kept (checkpoint.keep_best=eval/accuracy keeps it)"),
        ("eval/accuracy", False, None, "; no checkpoint of it was kept"),
        (None, True, None, "its checkpoint is {0}/checkpoints/step_000002"),
        ("eval/reward_mean", True, 1, "its checkpoint is {0}/checkpoints/step_000002"),
        ("eval/accuracy", True, 2, " export {0} OUT --best writes its model"),
    ],
)
def test_the_result_tells_the_best_evaluation_and_where_its_weights_are(
    tmp_path, capsys, keep_best, kept, named, said
):
    folder = RunFolder(tmp_path)
    accuracies = {0: 0.75, 1: 0.5, 2: 0.625, 3: 0.7, 4: 0.25}
    lines = [{"step": step, "eval/accuracy": value} for step, value in accuracies.items()]
    lines[3]["eval/failed_fraction"] = 0.1
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = write_summary(folder, seconds={}, max_failed=0.05)
    assert (summary["accuracy_best"], summary["accuracy_best_step"]) == (0.625, 2)
    if kept:
        (folder.checkpoints / "step_000002").mkdir(parents=True)
        write_manifest(folder.checkpoints / "step_000002", world_size=1)
    if named is not None:
        (folder.checkpoints / "best.json").write_text(json.dumps({"step": named}))
    config = RunConfig.model_validate(
        {
            "steps": 4,
            "model": {"path": "m"},
            "task": {"type": "countdown"},
            "checkpoint": {"keep_best": keep_best},
            "evaluation": {"every": 1},
        }
    )
    training.print_result(folder, config)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("best:"))
    assert line.startswith("best:        62.5% after step 2; ") and line.endswith(said.format(tmp_path))


def test_the_result_names_no_report_that_could_not_be_written(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.summary.write_text('{"accuracy_after": null, "steps": 3}')
    config = RunConfig.model_validate({"steps": 3, "model": {"path": "m"}, "task": {"type": "countdown"}})
    training.print_result(folder, config)
    assert "report:      not written; " in capsys.readouterr().out
    (tmp_path / "report.html").touch()
    training.print_result(folder, config)
    assert f"report:      {tmp_path / 'report.html'} (open" in capsys.readouterr().out


def test_the_result_of_a_run_whose_summary_is_damaged_still_names_its_model(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.summary.write_text('{"accuracy_after": 0.')
    config = RunConfig.model_validate({"steps": 3, "model": {"path": "m"}, "task": {"type": "countdown"}})
    training.print_result(folder, config)
    out = capsys.readouterr().out
    assert f"{folder.summary} cannot be read (" in out and f"model:       {folder.hf} " in out


def test_the_result_of_a_job_names_the_command_that_submits_its_further_steps(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.summary.write_text('{"accuracy_after": null, "steps": 3}')
    (folder.checkpoints / "step_000003").mkdir(parents=True)
    write_manifest(folder.checkpoints / "step_000003", world_size=1)
    config = RunConfig.model_validate({"steps": 3, "model": {"path": "m"}, "task": {"type": "countdown"}})
    training.print_result(folder, config, in_job=True)
    assert f"slurm {folder.config} resume={tmp_path} steps=6 --submit\n" in capsys.readouterr().out
    training.print_result(folder, config)
    assert f" resume {tmp_path} steps=6\n" in capsys.readouterr().out


SERVES_UNTIL_SAMPLING = """
import pathlib, sys, time
from launch.processes.run_folder import RunFolder
RunFolder(pathlib.Path(sys.argv[1])).announce("serve", {"urls": []})
roles = pathlib.Path(sys.argv[1]) / "roles"
while not (roles / "asked").exists():
    time.sleep(0.01)
sys.exit(3)
"""
NEVER_ANSWERS = """
import pathlib, sys, time, zmq
from launch.processes.run_folder import RunFolder
folder, asked = RunFolder(pathlib.Path(sys.argv[1])), zmq.Context().socket(zmq.REP)
asked.curve_server = True
asked.curve_publickey, asked.curve_secretkey = folder.run_key().curve_pair("sampler")
folder.announce("sample", {"address": f"tcp://127.0.0.1:{asked.bind_to_random_port('tcp://127.0.0.1')}"})
asked.recv()
(folder.path / "roles" / "asked").touch()
time.sleep(300)
"""


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_letters_that_the_locale_lacks_end_no_command(encoding):
    """Every command and role prints through ``main``; the console line of the learner has a ``Δ``."""
    code = (
        "import sys; from launch import cli; from trainer.tracking.console import header; "
        "cli.app = lambda: print(header(100)) or print(header(100), file=sys.stderr); cli.main()"
    )
    env = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "  |?p|max" in done.stdout and "  |?p|max" in done.stderr


def test_a_role_that_fails_during_an_evaluation_ends_it(tmp_path, model, monkeypatch):
    """Whoever waits for the answer stops waiting by himself: a ZeroMQ socket must not be closed while another
    thread polls it."""
    used_by = []

    class Watched(remote_sampler.RemoteSampler):
        def evaluate(self, *arguments, **more):
            used_by.append(threading.get_ident())
            return super().evaluate(*arguments, **more)

        def close(self):
            used_by.append(threading.get_ident())
            super().close()

    def role(name: str, folder: RunFolder, config: RunConfig) -> Role:
        folder.address(name).parent.mkdir(exist_ok=True)
        code = {"serve": SERVES_UNTIL_SAMPLING, "sample": NEVER_ANSWERS}[name]
        command, log = [sys.executable, "-c", code, str(folder.path)], folder.logs / f"{name}.log"
        return Role(name=name, command=command, log=log, env={"PYTHONPATH": str(ROOT)})

    monkeypatch.setattr(remote_sampler, "RemoteSampler", Watched)
    monkeypatch.setattr(start, "role", role)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RoleFailed, match="the serve role ended with exit code 3"):
        training.evaluate(
            config_file(tmp_path, model),
            ["launch.start_timeout_s=30", "launch.collective_timeout_s=30", "rollout.request_timeout_s=10"],
        )
    assert used_by == [threading.get_ident()] * 2
