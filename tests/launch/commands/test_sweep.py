"""``tandem sweep`` with runs that are a few lines of Python: what is run, skipped, resumed, stopped and told."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TextIO

import pytest
import yaml

from configs.loader import load_config, resolved_yaml
from configs.schema import RunConfig
from configs.schema.run import LONGEST_NAME
from launch.commands.sweep import _is_list
from launch.grid import run_name
from launch.processes import run_folder, sweeping
from parallel.checkpoints.files import write_manifest
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.command import tandem
from tests.support.whole_runs import ROOT, assert_nothing_left, finish, wait_for

FAKE = """
    import json, os, signal, sys, time
    from pathlib import Path
    from configs.loader import load_config, resolved_yaml
    from launch.processes import run_folder
    from launch.processes.run_folder import RunFolder, write_json
    from parallel.checkpoints.files import write_manifest
    what, given = sys.argv[1], Path(sys.argv[2])
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(f"{what} {given.name.split('-20')[0]}\\n")
    config = load_config(given if what == "train" else given / "config.yaml")
    folder = RunFolder(given)
    if what == "train":
        folder = run_folder.create(config.launch.runs_dir, config.name, resolved_yaml(config))
    folder.claim()
    print(f"run folder: {folder.path}", flush=True)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    with (folder.path / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 1, "reward/mean": 0.5, "time/step": 1.0}) + "\\n")
    if config.seed == 13 and what == "train":
        sys.exit("an error of seed 13")
    if config.seed == 7 and what == "train":
        (folder.path / "waiting").touch()
        deadline = time.monotonic() + 60
        while not asked or Path("hold").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        saved = folder.checkpoints / "step_000001"
        saved.mkdir(parents=True)
        write_manifest(saved, world_size=1)
        sys.exit(75)
    folder.hf.mkdir()
    write_json(folder.summary, {"steps": config.steps})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return folder


@pytest.fixture
def work(tmp_path, model, monkeypatch) -> Path:
    content = {
        "name": "tiny",
        "steps": 3,
        "model": {"path": str(model)},
        "task": {"type": "countdown"},
        "rollout": {"max_new_tokens": 14},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "fake.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(sweeping, "TANDEM", (sys.executable, str(tmp_path / "fake.py")))
    monkeypatch.setattr(sweeping, "POLL_S", 0.02)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path


def calls(work: Path) -> list[str]:
    return (work / "calls").read_text().split("\n")[:-1] if (work / "calls").exists() else []


def test_every_combination_is_run_once_and_compared(work):
    arguments = ["sweep", "run.yaml", "seed=0,1", "learner.optimizer.lr=1e-5,3e-5", "steps=2"]
    done = tandem(*arguments, cwd=work)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [f"tiny-seed-{seed}-lr-{lr}" for seed in (0, 1) for lr in ("1e-5", "3e-5")]
    assert calls(work) == [f"train {name}.yaml" for name in names]
    folders = json.loads((work / "runs/tiny-sweep/sweep.json").read_text())["runs"]
    assert [*folders] == names
    for name, seed, lr in zip(names, (0, 0, 1, 1), (1e-5, 3e-5) * 2, strict=True):
        config = yaml.safe_load((work / "runs" / folders[name] / "config.yaml").read_text())
        found = (config["name"], config["seed"], config["learner"]["optimizer"]["lr"], config["steps"])
        assert found == (name, seed, lr, 2)
    assert "learner.optimizer.lr" in done.stdout and (work / "runs/tiny-sweep/comparison.html").is_file()
    assert "4 of 4: tiny-seed-1-lr-3e-5 begins" in done.stdout and "left" in done.stdout
    again = tandem(*arguments, cwd=work)
    assert again.returncode == 0 and len(calls(work)) == 4, "finished runs are not run again"
    more = tandem(
        "sweep",
        "run.yaml",
        "seed=0,1,2",
        "learner.optimizer.lr=1e-5,3e-5",
        "steps=2",
        "--jobs",
        "2",
        cwd=work,
    )
    assert more.returncode == 0, more.stderr
    assert sorted(calls(work)[4:]) == ["train tiny-seed-2-lr-1e-5.yaml", "train tiny-seed-2-lr-3e-5.yaml"]
    other = tandem("sweep", "run.yaml", "seed=0,1", "learner.optimizer.lr=1e-5,3e-5", cwd=work)
    assert other.returncode == 2 and other.stderr.count("steps: 2, now 3") == 4, other.stderr
    assert len(calls(work)) == 6


def test_a_finished_run_that_was_resumed_for_further_steps_is_still_finished(work):
    first = tandem("sweep", "run.yaml", "seed=0,1", cwd=work)
    assert first.returncode == 0, first.stderr
    (folder,) = (work / "runs").glob("tiny-seed-0-2*")
    config = load_config(folder / "config.yaml")

    def resume_with(**changes) -> None:
        (folder / "config.yaml").write_text(resolved_yaml(config.model_copy(update=changes)))
        run_folder.write_json(folder / "summary.json", {"steps": changes["steps"]})

    resume_with(steps=6)
    more = tandem("sweep", "run.yaml", "seed=0,1,2", cwd=work)
    assert more.returncode == 0 and calls(work)[2:] == ["train tiny-seed-2.yaml"], more.stderr
    resume_with(steps=6, seed=5)
    other = tandem("sweep", "run.yaml", "seed=0,1", cwd=work)
    assert other.returncode == 2 and "settings:\n  tiny-seed-0: seed: 5, now 0\n" in other.stderr, (
        other.stderr
    )
    resume_with(steps=2)
    fewer = tandem("sweep", "run.yaml", "seed=0,1", cwd=work)
    assert fewer.returncode == 2 and "tiny-seed-0: steps: 2, now 3" in fewer.stderr, fewer.stderr


def test_the_memory_of_a_sweep_outlasts_a_loss_of_power(work, monkeypatch):
    flushed, fsync = list[str](), os.fsync

    def record(number: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{number}").readlink().name)
        fsync(number)

    monkeypatch.setattr(os, "fsync", record)
    assert tandem("sweep", "run.yaml", "seed=0,1", cwd=work).returncode == 0
    assert len([name for name in flushed if name.startswith(".sweep.json.")]) == 2, "once for each run"


def test_a_failed_run_ends_the_sweep_or_is_told_at_its_end(work):
    done = tandem("sweep", "run.yaml", "seed=13,0", cwd=work)
    assert done.returncode == 1 and calls(work) == ["train tiny-seed-13.yaml"]
    assert "tiny-seed-13 failed (exit code 1):" in done.stderr and "    an error of seed 13\n" in done.stderr
    assert "0 of 2 runs finished; the same command continues" in done.stderr
    done = tandem("sweep", "run.yaml", "seed=13,0", "--keep-going", cwd=work)
    assert done.returncode == 1 and calls(work)[1:] == ["train tiny-seed-13.yaml", "train tiny-seed-0.yaml"]
    assert "1 of 2 runs finished" in done.stderr and "tiny-seed-13 failed" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_saves_its_run_and_goes_on(work, number):
    """In a process of its own: the signal must reach the sweep alone, which asks its run."""
    process = start_sweep(work)
    wait_for(lambda: [*work.glob("runs/tiny-seed-7-2*/waiting")], process, "the first run to wait")
    process.send_signal(number)
    said = finish(process, deadline_s=60)
    assert process.returncode == 75, said
    assert "stopping tiny-seed-7" in said and "sweep stopped, 0 of 2 runs finished" in said
    assert_nothing_left(work)
    dry = tandem("sweep", "run.yaml", "seed=7,0", "--dry-run", cwd=work)
    assert "continues from step 1" in dry.stdout and "begins" in dry.stdout
    done = tandem("sweep", "run.yaml", "seed=7,0", cwd=work)
    assert done.returncode == 0, done.stderr
    assert calls(work) == ["train tiny-seed-7.yaml", "resume tiny-seed-7", "train tiny-seed-0.yaml"]


def test_a_sweep_that_was_killed_goes_on_once_its_run_has_saved_its_step(work):
    """The run learns of the end of its sweep, and saves its first checkpoint while the next sweep has begun."""
    (work / "hold").touch()
    process = start_sweep(work)
    wait_for(lambda: [*work.glob("runs/tiny-seed-7-2*/waiting")], process, "the first run to wait")
    wait_for((work / "runs/tiny-sweep/sweep.json").exists, process, "the memory of the run")
    process.kill()
    process.wait()
    with (work / "said").open("w") as said:
        again = start_sweep(work, stdout=said)
    told = (work / "said").read_text
    wait_for(lambda: "tiny-seed-7" in told(), again, "the next sweep to tell of its first run")
    assert "waiting for the end of tiny-seed-7, which still runs in" in told()
    (work / "hold").unlink()
    again.wait(60)
    assert again.returncode == 0, told()
    assert calls(work) == ["train tiny-seed-7.yaml", "resume tiny-seed-7", "train tiny-seed-0.yaml"]


@pytest.mark.parametrize("log", [None, "run folder: of-an-earlier-start\n"])
def test_ctrl_c_while_a_run_is_being_started_stops_the_sweep(work, monkeypatch, log):
    if log is not None:
        (work / "runs/tiny-sweep").mkdir(parents=True)
        (work / "runs/tiny-sweep/tiny-seed-0.log").write_text(log)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sweeping, "write_whole", lambda *_: signal.raise_signal(signal.SIGINT))
    done = tandem("sweep", "run.yaml", "seed=0,1", cwd=work)
    signal.signal(signal.SIGINT, before)
    assert done.returncode == 75 and "sweep stopped, 0 of 2 runs finished" in done.stderr, done.stderr
    assert calls(work) == []


def test_ctrl_c_while_the_memory_is_written_loses_no_run(work, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    write, calls_of = sweeping.write_json, []

    def interrupted(*args, **named) -> None:
        calls_of.append(args)
        if len(calls_of) == 1:
            signal.raise_signal(signal.SIGINT)
        write(*args, **named)

    monkeypatch.setattr(sweeping, "write_json", interrupted)
    done = tandem("sweep", "run.yaml", "seed=7,0", cwd=work)
    signal.signal(signal.SIGINT, before)
    assert done.returncode == 75 and len(calls_of) == 2, done.stderr
    dry = tandem("sweep", "run.yaml", "seed=7,0", "--dry-run", cwd=work)
    assert "tiny-seed-7  3 steps  continues from step 1" in dry.stdout


def test_a_full_disk_ends_a_sweep_by_its_own_name(work, monkeypatch):
    def no_space(path, content) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(sweeping, "write_whole", no_space)
    done = tandem("sweep", "run.yaml", "seed=0,1", cwd=work)
    assert done.returncode == 1, done.stderr
    assert f"No space left on device: '{work}/runs/tiny-sweep/tiny-seed-0.yaml'" in done.stderr


def start_sweep(work: Path, stdout: int | TextIO = subprocess.PIPE) -> subprocess.Popen:
    code = (
        "import sys; from launch import cli; from launch.processes import sweeping; "
        f"sweeping.TANDEM = (sys.executable, {str(work / 'fake.py')!r}); cli.main()"
    )
    (work / "sweeper.py").write_text(code)
    interruptible = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            interruptible,
            sys.executable,
            str(work / "sweeper.py"),
            "sweep",
            "run.yaml",
            "seed=7,0",
        ],
        cwd=work,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seed=0"], "no key has several values"),
        (["seed=0,0"], "a value is given twice"),
        (["learner.optimizer.lr=1e-5,0.00001"], "two of the runs have the same settings"),
        (["seed=0,1", "seed=3"], "seed has several values as well"),
        (["name=a,b"], "all runs of a sweep have one name"),
        (["launch.runs_dir=a,b"], "all runs of a sweep have one launch.runs_dir"),
        (["seed=0,1", "resume=runs/x"], "the same command continues a sweep"),
        (["seed=0,1", "rollout.first_port=30000", "--jobs", "2"], "allows one run at a time"),
        (["seed=0,1", "--jobs", "2000000"], "lower --jobs"),
        (["seed=0,1", "launch.nodes={learner: 1}"], "use `tandem slurm CONFIG --array"),
        (["seed=0,1", "--job", "2"], "No such option"),
        (["rollout.max_new_tokens=14,9999999", "steps=-1"], "field: steps"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(work, arguments, said):
    done = tandem("sweep", "run.yaml", *arguments, cwd=work)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert calls(work) == [] and not (work / "runs").exists()


def test_a_run_that_the_config_goes_on_with_is_of_no_sweep(work):
    """Every run of the sweep would train in its folder. ``resume=null`` takes it out again."""
    config = yaml.safe_load((work / "run.yaml").read_text())
    (work / "on.yaml").write_text(yaml.safe_dump(config | {"resume": "old/run"}))
    folder = run_folder.create(work / "old", "run", resolved_yaml(load_config(work / "run.yaml")))
    folder.path.rename(work / "old/run")
    saved = work / "old/run/checkpoints/step_000001"
    saved.mkdir(parents=True)
    write_manifest(saved, world_size=1)
    for arguments, said in (
        (["steps=4,5"], "the same command continues a sweep"),
        (["steps=4,5", "resume=null"], ""),
    ):
        done = tandem("sweep", "on.yaml", *arguments, "--dry-run", cwd=work)
        assert done.returncode == (2 if said else 0) and said in done.stderr, done.stderr


def test_the_problems_of_all_runs_are_told_at_once(work):
    done = tandem(
        "sweep", "run.yaml", "rollout.max_new_tokens=14,9999999", "learner.optimizer.lr=1e-5,-1.0", cwd=work
    )
    assert done.returncode == 2 and calls(work) == []
    assert "rollout.max_new_tokens" in done.stderr and "learner.optimizer.lr" in done.stderr


def test_a_dry_run_writes_nothing(work):
    done = tandem("sweep", "run.yaml", "seed=0,1", "--dry-run", cwd=work)
    assert done.returncode == 0 and done.stdout.count("begins") == 2 and "3 steps" in done.stdout
    assert not (work / "runs").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_changing_line_fits_the_terminal_and_reads_the_newest_steps_alone(tmp_path, monkeypatch):
    """It is printed twice a second, and a run may have thousands of steps."""
    sweep, folders = sweeping.Sweep(tmp_path / "sweep"), {}
    config = RunConfig.model_validate({"model": {"path": "m"}, "task": {"type": "countdown"}, "steps": 900})
    cells = [sweeping.Cell(name=f"tiny-learner.optimizer.lr-{n}e-5", config=config) for n in range(8)]
    for cell in cells:
        folder = tmp_path / f"{cell.name}-2026"
        folder.mkdir()
        (folder / "config.yaml").write_text(resolved_yaml(config))
        (folder / "metrics.jsonl").write_text('{"step": 400}\n' * 9)
        folders[cell.name] = folder.name
    sweep.folder.mkdir()
    sweep.memory.write_text(json.dumps({"runs": folders}))
    progress = sweeping._Progress(sweep, cells, 8)
    for folder in folders.values():
        with (tmp_path / folder / "metrics.jsonl").open("a") as file:
            file.writelines(f'{{"step": {step}}}\n' for step in range(401, 500))
            file.write('{"step": 500, "reward/me')
    monkeypatch.setattr("sys.stdout", out := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    loads, parsed = json.loads, []
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    progress.line(cells)
    said = out.getvalue().removeprefix("\x1b[K").removesuffix("\r")
    assert said.startswith("tiny-learner.optimizer.lr-0e-5: step 499 of 900, tiny-learner")
    assert len(said) == 79 and "…; about " in said and said.endswith(" left")
    rows = [text for text in parsed if '"step"' in text]
    assert len(rows) == 4 * len(cells), "a torn line and the newest, for the steps and for the time left"


def test_names_have_the_shortest_keys_that_differ():
    assert run_name("a", ["seed=0", "learner.optimizer.lr=1e-5"]) == "a-seed-0-lr-1e-5"
    assert run_name("a", ["x.lr=1", "y.z.lr=2"]) == "a-x.lr-1-z.lr-2"
    assert run_name("a", ["seed=0", "task.seed=1"]) == "a-seed-0-task.seed-1"
    assert run_name("a", ["task.path=data/x.jsonl"]) == "a-path-data_x.jsonl"
    many = [run_name("a", [*(f"some_long_key_{n}=0.1" for n in range(9)), f"seed={seed}"]) for seed in (0, 1)]
    assert many[0] != many[1] and {len(name) for name in many} == {LONGEST_NAME}
    assert many[0].startswith("a-some_long_key_0-0.1-some_long_key_1-0.1-")


def test_commas_inside_brackets_and_quotes_are_of_one_value():
    assert [_is_list(text) for text in ("a=1,2", "a=1", "a=[1,2]", "a={x: 1, y: 2}", 'a="x,y"')] == [
        True, False, False, False, False,
    ]  # fmt: skip
