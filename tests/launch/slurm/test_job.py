"""The supervisor inside a Slurm job, with stand-ins for Slurm's commands: an ``srun`` that runs a script here
in place of the role, and a ``scontrol`` that writes down what it is asked. What the real ones do is in
test_slurm.py."""

import contextlib
import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import psutil
import pytest

from configs.loader import resolved_yaml
from configs.schema import RunConfig
from launch.checks.arguments import BadInput
from launch.processes.run_folder import RunFolder, write_json
from launch.roles import start
from launch.slurm import inside_job as supervision
from launch.slurm import job as jobs
from launch.slurm.job import Job
from launch.slurm.script import place_of_array
from parallel.checkpoints.files import Manifest, write_manifest
from tests.support.unreadable import unreadable

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 240
JOB = Job(id="17", names=frozenset({"17"}), nodes=("n1", "n2"), restart=0)

FAKES = {
    # Runs NAME.py of the folder that it lies in, NAME without its number; notes its arguments in NAME.argv.
    "srun": """
        import json, os, re, sys
        from pathlib import Path
        here = Path(__file__).parent
        name = next(a for a in sys.argv if a.startswith("--job-name=")).removeprefix("--job-name=")
        (here / f"{name}.argv").write_text(json.dumps(sys.argv[1:]))
        (here / f"{name}.env").write_text(json.dumps(dict(os.environ)))
        (here / f"{name}.fresh").write_text(str(os.getpid()))
        (here / f"{name}.fresh").rename(here / f"{name}.pid")
        os.execv(sys.executable, [sys.executable, str(here / (re.sub("-[0-9]+", "", name) + ".py")), os.environ["FAKE_RUN"], name])
    """,
    "scontrol": """
        import os, sys
        from pathlib import Path
        if sys.argv[1:3] == ["show", "hostnames"]:
            print(sys.argv[3].replace(",", chr(10)))
        else:
            with (Path(__file__).parent / "asked").open("a") as file:
                file.write(" ".join(sys.argv[1:]) + chr(10))
            if "FAKE_REFUSAL" in os.environ:
                sys.exit("scontrol: error: " + os.environ["FAKE_REFUSAL"])
    """,
    "squeue": """
        import os, sys
        if os.environ["FAKE_STATE"] == "REFUSED":
            sys.exit("slurm_load_jobs error: Access/permission denied")
        print(os.environ["FAKE_STATE"])
    """,
}
DAMAGED = (
    "",
    "[]",
    "null",
    "{}",
    '"x"',
    '{"steps": "2", "job_id": [1], "failures": "x"}',
    "[" * 3000,
    "9" * 5000,
)
WAITS = "import time; time.sleep(600)"
HEADER = """
    import json, sys, time
    from pathlib import Path
    run, name = Path(sys.argv[1]), sys.argv[2]
    def write(path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name("." + path.name)
        fresh.write_text(json.dumps(content))
        fresh.replace(path)
    def checkpoint(step):
        folder = run / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "complete.json").write_text(MANIFEST)
"""
FINISHES = """
    (run / "hf").mkdir(exist_ok=True)
    with (run / "console.log").open("a") as console:
        console.write("the last line\\n")
    write(run / "summary.json", {"steps": 2, "accuracy_before": 0.25, "accuracy_after": 0.75, "accuracy_after_step": 2})
"""
HEEDS = """
    write(run / "roles" / "learn.json", {})
    while not (run / "roles" / "stop.json").exists():
        time.sleep(0.02)
    checkpoint(1)
    write(run / "roles" / "stopped.json", {"step": 1, "reason": json.loads((run / "roles" / "stop.json").read_text())["reason"]})
"""
FAILS = """
    write(run / "roles" / "learn.json", {})
    (run / "roles" / "learn.error").write_text("ValueError: the cause")
    sys.exit(3)
"""


def config_with(*, learner: int = 1, rollout: int = 1, gpus: int = 0, **launch) -> RunConfig:
    nodes = {"learner": learner, "rollout": rollout, "gpus_per_node": gpus, "interface": "lo"}
    content = {
        "steps": 2, "model": {"path": "m"}, "task": {"type": "countdown"}, "layout": {"dp": learner}, "rollout": {"replicas": rollout},
        "launch": {"nodes": nodes, "stop_grace_s": 0.5} | launch,
    }  # fmt: skip
    return RunConfig.model_validate(content)


class Stage:
    """A run folder, the stand-ins, and the supervisor started among them."""

    def __init__(self, tmp_path: Path, config: RunConfig):
        self.folder, self.bin = RunFolder(tmp_path / "run"), tmp_path / "bin"
        self.bin.mkdir()
        self.folder.path.mkdir()
        self.folder.config.write_text(resolved_yaml(config))
        for name, code in FAKES.items():
            (self.bin / name).write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
            (self.bin / name).chmod(0o755)
        self.role("serve", WAITS)
        self.role("sample", WAITS)
        self.env: dict[str, str] = {}
        self.process: subprocess.Popen | None = None

    def role(self, name: str, code: str) -> None:
        manifest = f"MANIFEST = {Manifest(world_size=1).text()!r}\n"
        (self.bin / f"{name}.py").write_text(manifest + textwrap.dedent(HEADER) + textwrap.dedent(code))

    def start(self, nodes: str = "n1,n2", *, output: int | IO = subprocess.PIPE) -> None:
        env = os.environ | {
            "PYTHONPATH": str(ROOT), "PATH": f"{self.bin}:{os.environ['PATH']}", "FAKE_RUN": str(self.folder.path),
            "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": nodes, "SLURM_CLUSTER_NAME": "a",
        } | self.env  # fmt: skip
        command = [sys.executable, "-m", "launch", "job", str(self.folder.path)]
        self.process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)

    def end(self) -> tuple[int, str]:
        """Exit code and output. Every step must be gone then."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        assert not [pid for pid in self.steps() if psutil.pid_exists(pid)], "a step outlived the supervisor"
        return self.process.returncode, output

    def run(self, nodes: str = "n1,n2") -> tuple[int, str]:
        self.start(nodes)
        return self.end()

    def steps(self) -> list[int]:
        return [int(file.read_text()) for file in self.bin.glob("*.pid")]

    def asked(self) -> list[str]:
        file = self.bin / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for(self, file: Path) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not file.exists():
            assert time.monotonic() < deadline, f"timed out: {file}"
            assert self.process.poll() is None, self.process.stdout.read()
            time.sleep(0.02)


@pytest.fixture
def stage(tmp_path) -> Iterator[Stage]:
    made = Stage(tmp_path, config_with())
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait(DEADLINE_S)


# ------------------------------------------------------------------------------------------------------------------
# what is started


def steps_of(config: RunConfig, tmp_path: Path, *nodes: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    """Options of srun, and the command, of every step by name."""
    found = {}
    for role in supervision.job_steps(RunFolder(tmp_path), config, replace(JOB, nodes=nodes)):
        command = list(role.command)
        assert command[0] == "srun"
        start = command.index(sys.executable)
        options = [flag.removeprefix("--").partition("=")[::2] for flag in command[1:start]]
        assert dict(options)["job-name"] == role.name
        assert role.log == tmp_path / "logs" / f"{role.name}.log"
        assert role.env["TANDEM_JOB"] == "1"
        found[role.name] = (dict(options), command[start + 2 :])
    return found


PYTHON = "/opt/tandem/.venv/bin/python"


def in_container(tmp_path: Path, *, gpus: int, **slurm: str) -> list[list[str]]:
    """Of every step what srun starts, and the step's options for a container."""
    config = config_with(gpus=gpus, slurm={"container": "/images/tandem.sif", **slurm})
    found = []
    for role in supervision.job_steps(RunFolder(tmp_path), config, replace(JOB, nodes=("n1", "n2"))):
        done = subprocess.run(
            ["bash", "-n"], input=shlex.join(role.command), text=True, capture_output=True, check=False
        )
        assert done.returncode == 0
        options = [word for word in role.command if word.startswith("--container-")]
        start = next(i for i, word in enumerate(role.command) if i and not word.startswith("--"))
        found.append([*options, *role.command[start:]])
    assert len(found) == 3
    return found


def test_steps_enter_an_apptainer_image(tmp_path):
    for command in in_container(
        tmp_path, gpus=8, container_runtime="apptainer", container_mounts="/data:/data"
    ):
        entering = [
            "apptainer",
            "exec",
            "--nv",
            "--bind=/data:/data",
            f"--pwd={os.getcwd()}",
            "/images/tandem.sif",
        ]
        assert command[:8] == [*entering, sys.executable, "-m"]
    for command in in_container(tmp_path, gpus=0, container_runtime="apptainer", container_python=PYTHON):
        entering = ["apptainer", "exec", f"--pwd={os.getcwd()}", "/images/tandem.sif"]
        assert command[:6] == [*entering, PYTHON, "-m"] and sys.executable not in command


def test_steps_of_pyxis_may_have_the_images_interpreter(tmp_path):
    for command in in_container(tmp_path, gpus=8, container_python=PYTHON, container_mounts="/data:/data"):
        image = ["--container-image=/images/tandem.sif", "--container-mounts=/data:/data"]
        assert command[:5] == [*image, f"--container-workdir={os.getcwd()}", PYTHON, "-m"]
        assert sys.executable not in command


@pytest.mark.parametrize("python", [None, PYTHON])
@pytest.mark.parametrize("installed", [False, True], ids=["checkout", "installed"])
def test_the_hosts_packages_do_not_come_before_the_images(tmp_path, monkeypatch, python, installed):
    monkeypatch.setenv("PYTHONPATH", "/host/packages")  # as the batch script sets it
    if installed:
        for module in (start, supervision):
            monkeypatch.setattr(module, "PACKAGE_ROOT", Path("/host/packages"))
    slurm = {"container": "/images/tandem.sif", "container_python": python}
    steps = supervision.job_steps(RunFolder(tmp_path), config_with(slurm=slurm), JOB)
    (path,) = {step.env["PYTHONPATH"] for step in steps}
    first = "/host/packages" if installed else str(ROOT)
    # An empty one is to Python as none at all.
    assert path == ("" if installed and python else f"{first}:/host/packages")


@pytest.mark.parametrize("name, value", [("container_python", PYTHON), ("container_mounts", "/data:/data")])
def test_a_container_without_an_image_is_refused(name, value):
    with pytest.raises(
        ValueError, match=f"{name}={value} needs a container, but launch.slurm.container names none"
    ):
        config_with(slurm={name: value})


def test_each_side_is_a_step_on_its_node(tmp_path):
    steps = steps_of(config_with(), tmp_path, "n1", "n2")
    assert {name: options["nodelist"] for name, (options, _) in steps.items()} == {
        "learn-0": "n1",
        "sample": "n1",
        "serve-0": "n2",
    }
    assert all("overlap" in options and "gres" not in options for options, _ in steps.values())
    assert steps["serve-0"][1] == ["launch", "serve", str(tmp_path), "--node", "0"]
    assert steps["sample"][1] == ["launch", "sample", str(tmp_path)]
    assert "--rdzv-backend=tandem" in steps["learn-0"][1]


@pytest.mark.parametrize(("asked", "gres"), [(None, "gpu:8"), (0, None), (10, "gpu:10")])
def test_a_run_of_one_machine_has_its_steps_share_the_node(tmp_path, asked, gres):
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"}, "task": {"type": "countdown"}, "layout": {"tp": 2, "dp": 2}, "rollout": {"replicas": 2, "tp": 2},
            "launch": {"slurm": {"gpus": asked}},
        }
    )  # fmt: skip
    steps = steps_of(config, tmp_path, "n1")
    assert set(steps) == {"learn-0", "sample", "serve"}
    assert {options["nodelist"] for options, _ in steps.values()} == {"n1"}
    assert all(steps[name][0].get("gres") == gres for name in ("learn-0", "serve")), (
        "the servers take the GPUs after the learner's"
    )
    assert "--nproc-per-node=4" in steps["learn-0"][1]


def test_the_first_nodes_are_the_learners_and_meet_at_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(supervision.socket, "gethostbyname", {"b": "127.0.0.2"}.get)
    steps = steps_of(
        config_with(learner=2, rollout=3, gpus=8, slurm={"container": "a#b"}), tmp_path, *"abcde"
    )
    places = {name: options["nodelist"] for name, (options, _) in steps.items()}
    assert places == {
        "learn-0": "a",
        "learn-1": "b",
        "sample": "a",
        "serve-0": "c",
        "serve-1": "d",
        "serve-2": "e",
    }
    assert {options["gres"] for name, (options, _) in steps.items() if name != "sample"} == {"gpu:8"}
    assert steps["sample"][0]["gres"] == "none", "it would share the learner's"
    assert all(
        options["container-image"] == "a#b" and "container-mounts" not in options
        for options, _ in steps.values()
    )
    assert all(options["container-workdir"] == os.getcwd() for options, _ in steps.values())
    first, second = steps["learn-0"][1], steps["learn-1"][1]
    assert re.search(r"--rdzv-endpoint=127.0.0.1:\d+", " ".join(first))
    assert set(first) - set(second) == {"--rdzv-conf=join_timeout=900,is_host=true", "--local-addr=127.0.0.1"}
    assert set(second) - set(first) == {
        "--rdzv-conf=join_timeout=900,is_host=false",
        "--local-addr=127.0.0.2",
    }


def test_colocated_sides_are_steps_on_the_same_nodes_with_all_gpus(tmp_path):
    config = config_with(learner=2, rollout=2, gpus=8, placement="colocated")
    steps = steps_of(config, tmp_path, "a", "b")
    places = {name: (options["nodelist"], options["gres"]) for name, (options, _) in steps.items()}
    each = {f"{role}-{i}": (node, "gpu:8") for role in ("learn", "serve") for i, node in enumerate("ab")}
    assert places == each | {"sample": ("a", "none")}
    assert [steps[f"serve-{i}"][1][-2:] for i in range(2)] == [["--node", "0"], ["--node", "1"]]


def test_a_restart_does_not_meet_what_is_left_of_the_last_start(tmp_path):
    label = [
        next(
            a
            for a in supervision.job_steps(RunFolder(tmp_path), config_with(learner=2, rollout=1), job)[
                -1
            ].command
            if "rdzv-id" in a
        )
        for job in (replace(JOB, nodes=("a", "b", "c")), replace(JOB, nodes=("a", "b", "c"), restart=1))
    ]
    assert label[0] != label[1]


def test_steps_ask_for_nothing_that_an_outer_job_asked_for(stage):
    """As in a job that was submitted from the shell of an ``salloc``: sbatch hands its variables on."""
    of_outer = {
        "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "CPUS_PER_GPU", "NTASKS_PER_GPU", "NTASKS_PER_TRES",
        "TRES_PER_TASK", "MEM_PER_GPU", "GPU_BIND", "HINT", "EXACT", "WORKING_DIR",
    }  # fmt: skip
    stage.env |= {f"SLURM_{name}": "1" for name in of_outer} | {"SRUN_CPUS_PER_TASK": "1"}
    stage.env |= {"SLURM_MPI_TYPE": "none"}
    stage.role("learn", FINISHES)
    code, output = stage.run()
    assert code == 0, output
    step = json.loads((stage.bin / "learn-0.env").read_text())
    left = [name for name in step if name.removeprefix("SLURM_") in of_outer or name.startswith("SRUN_")]
    assert left == []
    assert (step["SLURM_JOB_ID"], step["SLURM_MPI_TYPE"]) == ("17", "none")


# --------------------------------------------------------------------------------------------------------------------
# how it ends


def test_a_run_that_finishes_ends_well_and_takes_the_servers_along(stage):
    (stage.folder.path / "console.log").write_text("of an earlier start\n")
    stage.role("learn", textwrap.dedent(FINISHES) + "checkpoint(2)\n")
    code, output = stage.run()
    assert code == 0, output
    assert f"slurm {stage.folder.config} resume={stage.folder.path} steps=4 --submit\n" in output
    assert stage.asked() == []
    assert output.count("the last line") == 1 and "of an earlier start" not in output
    assert "75.0% after 2 steps" in output
    recorded = {"job_id": "17", "cluster": "a", "nodes": ["n1", "n2"], "restart": 0}
    assert json.loads(stage.folder.job.read_text()) == recorded


def test_what_is_echoed_outlasts_errors_of_the_file_system_and_reads_within_a_character(
    tmp_path, monkeypatch, capsys
):
    looks = iter([errno.ENOENT, errno.ESTALE, errno.EIO, b"caf\xc3", b"caf\xc3\xa9\n"])
    seen = threading.Event()

    def look(path: Path, mode: str) -> IO[bytes]:
        found = next(looks, None)
        if found is None:
            seen.set()
        if isinstance(found, int):
            raise OSError(found, os.strerror(found))
        return io.BytesIO("café\nthe end\n".encode() if found is None else found)

    monkeypatch.setattr(supervision, "ECHO_EVERY_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", look)
        with supervision.echoed(tmp_path / "console.log"):
            assert seen.wait(DEADLINE_S)
    assert capsys.readouterr().out == "café\nthe end\n"


@pytest.mark.parametrize(("learner", "code", "requeued"), [(FINISHES, 0, []), (FAILS, 1, ["requeue 17"])])
def test_a_job_whose_log_is_on_a_full_disk_ends_as_any_other(stage, learner, code, requeued):
    stage.role("learn", learner)
    with open("/dev/full", "w") as full:
        stage.start(output=full)
    assert stage.end()[0] == code
    assert stage.asked() == requeued


def test_a_finished_run_is_not_run_again(stage):
    stage.role("learn", FINISHES)
    assert stage.run()[0] == 0
    for file in stage.bin.glob("*.argv"):
        file.unlink()
    code, output = stage.run()
    assert code == 0
    assert "there is nothing left to do" in output
    assert not list(stage.bin.glob("*.argv"))


def test_more_steps_make_a_finished_run_unfinished(stage):
    stage.role("learn", FINISHES)
    assert stage.run()[0] == 0
    assert jobs.is_finished(stage.folder, config_with())
    assert not jobs.is_finished(stage.folder, config_with().model_copy(update={"steps": 3}))


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, ["requeue 17"]), (signal.SIGTERM, [])])
def test_a_signal_stops_the_run_with_a_checkpoint(stage, number, requeued):
    """The notice before the time limit: Slurm does not start the job again by itself. SIGTERM: it does, or
    somebody wants it to end."""
    stage.role("learn", HEEDS)
    stage.start()
    stage.wait_for(stage.folder.address("learn"))
    stage.process.send_signal(signal.SIGCONT)  # Slurm sends it together with any other
    stage.process.send_signal(number)
    code, output = stage.end()
    assert code == os.EX_TEMPFAIL, output
    assert stage.asked() == requeued
    assert ("job 17 is requeued, and continues from the newest checkpoint" in output) == bool(requeued)
    assert f"stopped after step 1 on request ({number.name})" in output
    assert stage.folder.newest_checkpoint().name == "step_000001"


def test_pre_emption_in_two_signals_is_left_to_slurm(stage):
    stage.role("learn", HEEDS.replace("checkpoint(1)", "while not (run / 'go').exists(): time.sleep(0.02)"))
    stage.start()
    stage.wait_for(stage.folder.address("learn"))
    stage.process.send_signal(signal.SIGUSR1)
    stage.wait_for(stage.folder.stop_request)
    stage.process.send_signal(signal.SIGTERM)
    (stage.folder.path / "go").touch()
    code, output = stage.end()
    assert code == os.EX_TEMPFAIL, output
    assert stage.asked() == []


def test_the_notice_during_the_start_ends_everything_and_requeues(stage):
    stage.role("learn", WAITS)
    stage.start()
    stage.wait_for(stage.bin / "learn-0.pid")
    stage.process.send_signal(signal.SIGUSR1)
    code, output = stage.end()
    assert code == os.EX_TEMPFAIL, output
    assert stage.asked() == ["requeue 17"]
    assert "job 17 is requeued, and starts from the beginning, without a checkpoint" in output


def test_a_requeue_over_a_damaged_checkpoint_promises_nothing(stage):
    (stage.folder.checkpoints / "step_000001").mkdir(parents=True)
    stage.role("learn", FAILS)
    code, output = stage.run()
    assert (code, stage.asked()) == (1, ["requeue 17"])
    assert "job 17 is requeued, and finds no whole checkpoint (step_000001: " in output


@pytest.mark.parametrize(
    ("time", "requeues"), [("00:00:01", 1), ("24:00:00", 2)], ids=["limit", "pre-emption"]
)
def test_time_limits_without_a_checkpoint_are_not_repeated_for_ever_and_pre_emptions_are(
    stage, time, requeues
):
    stage.folder.config.write_text(resolved_yaml(config_with(slurm={"max_restarts": 1, "time": time})))
    stage.role("learn", WAITS)
    for count in (1, requeues):
        stage.start()
        stage.wait_for(stage.bin / "learn-0.pid")
        stage.process.send_signal(signal.SIGUSR1)
        code, output = stage.end()
        assert (code, stage.asked()) == (os.EX_TEMPFAIL, ["requeue 17"] * count)
        (stage.bin / "learn-0.pid").unlink()
    assert ("raise launch.slurm.notice_s" in output) == (requeues == 1)


def test_a_time_limit_shorter_than_a_step_is_not_repeated_for_ever(stage):
    """Each start but the first stops in order at the step that it began at."""
    config = config_with(slurm={"max_restarts": 1, "time": "00:00:01"})
    stage.folder.config.write_text(resolved_yaml(config))
    stage.role("learn", HEEDS)
    said = "raise launch.slurm.time above that of a start and a step"
    for requeues, is_last in ((1, False), (2, False), (2, True)):
        stage.folder.address("learn").unlink(missing_ok=True)
        stage.start()
        stage.wait_for(stage.folder.address("learn"))
        stage.process.send_signal(signal.SIGUSR1)
        code, output = stage.end()
        assert (code, stage.asked()) == (os.EX_TEMPFAIL, ["requeue 17"] * requeues)
        assert (said in output) == is_last


def test_a_learner_that_never_stops_is_ended_before_the_time_limit(tmp_path, stage):
    stage.folder.config.write_text(resolved_yaml(config_with(slurm={"notice_s": 1})))
    stage.role("learn", HEEDS.replace("checkpoint(1)", WAITS))
    stage.start()
    stage.wait_for(stage.folder.address("learn"))
    stage.process.send_signal(signal.SIGUSR1)
    code, output = stage.end()
    assert code == os.EX_TEMPFAIL, output
    assert stage.asked() == ["requeue 17"]


def test_a_refused_requeue_is_said_with_the_way_out(stage):
    stage.env["FAKE_REFUSAL"] = "Requested operation is presently disabled"
    (stage.folder.path / "train.sbatch").touch()
    stage.role("learn", FAILS)
    code, output = stage.run()
    assert code == 1
    assert "presently disabled" in output
    assert f"start again with `sbatch {stage.folder.path / 'train.sbatch'}`" in output


def test_a_job_that_slurm_has_requeued_itself_is_not_refused(stage):
    stage.env["FAKE_REFUSAL"] = "Job is pending execution for job 17"  # as of Slurm 22.05
    stage.role("learn", FAILS)
    code, output = stage.run()
    assert (code, stage.asked()) == (1, ["requeue 17"])
    assert "job 17 is requeued" in output and "sbatch" not in output


DOWN = "slurm_requeue error: Unable to contact slurm controller (connect failure)"  # as of Slurm 22.05


@pytest.fixture
def controller(monkeypatch) -> Callable[[Sequence[str | None]], list[str]]:
    """Takes the answers of Slurm's commands in turn: errors, but for states of jobs and None. Gives the commands that were
    asked. Time passes while the product sleeps."""
    waited, calls = list[float](), list[str]()

    def answers_with(answers: Sequence[str | None]) -> list[str]:
        def run(command: Sequence[str], **options: object) -> SimpleNamespace:
            calls.append(" ".join(command))
            answer = answers[len(calls) - 1]
            is_error = answer is not None and answer not in ("RUNNING", "COMPLETED")
            return SimpleNamespace(returncode=int(is_error), stdout=answer or "", stderr=answer)

        monkeypatch.setattr(jobs.subprocess, "run", run)
        return calls

    monkeypatch.setattr(jobs.shutil, "which", lambda name: name)
    monkeypatch.setattr(jobs, "PATIENCE_S", 2.5 * jobs.ASK_AGAIN_S)
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append))
    return answers_with


@pytest.mark.parametrize(
    ("answers", "asked", "error"),
    [
        ([DOWN, "Socket timed out on send/recv operation", None], 3, None),
        ([DOWN, "Job is pending execution for job 17"], 2, None),
        ([DOWN, "Access/permission denied"], 2, "denied"),
        ([DOWN] * 9, 4, "Unable to contact"),
    ],
    ids=["it comes back", "it had requeued", "it refuses then", "it stays away"],
)
def test_a_requeue_waits_for_a_controller_that_is_down(controller, answers, asked, error):
    calls = controller(answers)
    with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
        JOB.requeue()
    assert calls == ["scontrol requeue 17"] * asked


@pytest.mark.parametrize(
    ("answers", "job", "asked", "found"),
    [
        ([DOWN, DOWN, "RUNNING"], JOB, 3, "9"),
        ([DOWN, "COMPLETED"], JOB, 2, None),
        ([DOWN] * 9, JOB, 4, RuntimeError),
        (["Access/permission denied"], JOB, 1, RuntimeError),
        ([DOWN], None, 1, RuntimeError),
    ],
    ids=["it runs", "it has ended", "no answer", "refused", "of a user, who waits"],
)
def test_a_job_waits_for_a_controller_that_is_down_before_it_takes_a_folder(
    tmp_path, controller, answers, job, asked, found
):
    folder = RunFolder(tmp_path)
    write_json(folder.job, jobs.record("9", None))
    calls = controller(answers)
    with pytest.raises(found) if found is RuntimeError else contextlib.nullcontext():
        assert jobs.running_elsewhere(folder, job) == found
    assert len(calls) == asked


@pytest.mark.parametrize(("ends_by", "code"), [("an error", 1), ("the time limit", os.EX_TEMPFAIL)])
def test_a_run_that_ends_behind_its_model_is_not_requeued_for_its_report(stage, ends_by, code):
    stage.folder.config.write_text(resolved_yaml(config_with(slurm={"notice_s": 1})))
    end = FAILS if ends_by == "an error" else FAILS.replace("sys.exit(3)", WAITS)
    stage.role("learn", textwrap.dedent(FINISHES) + textwrap.dedent(end))
    stage.start()
    if ends_by == "the time limit":
        stage.wait_for(stage.folder.address("learn"))
        stage.process.send_signal(signal.SIGUSR1)
    assert (found := stage.end())[0] == code, found
    assert stage.asked() == [] and not stage.folder.restarts.exists()
    assert f"`tandem report {stage.folder.path}` makes the report again" in found[1]


def test_failures_are_tried_again_until_there_have_been_too_many(stage):
    stage.folder.config.write_text(resolved_yaml(config_with(slurm={"max_restarts": 1})))
    stage.role("learn", FAILS)
    code, output = stage.run()
    assert (code, stage.asked()) == (1, ["requeue 17"])
    assert "ValueError: the cause" in output
    code, output = stage.run()
    assert (code, stage.asked()) == (1, ["requeue 17"]), "it was requeued once more"
    assert "1 restart brought no newer checkpoint (launch.slurm.max_restarts=1)" in output


def test_a_requeued_start_after_failures_waits_before_it_starts_anything(stage):
    stage.role("learn", "checkpoint(1)\n" + textwrap.dedent(FAILS))
    assert stage.run()[0] == 1
    (stage.bin / "learn-0.pid").unlink()
    stage.env["SLURM_RESTART_COUNT"] = "1"
    stage.start()
    said = next(line for line in stage.process.stdout if line.startswith("starting in"))
    stage.process.send_signal(signal.SIGUSR1)
    code, output = stage.end()
    assert said == "starting in 15 s, since the last start failed\n", "it had left a checkpoint"
    assert code == os.EX_TEMPFAIL, output
    assert stage.asked() == ["requeue 17", "requeue 17"]
    assert not (stage.bin / "learn-0.pid").exists()


def test_starts_wait_longer_and_longer_until_there_is_a_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    waited = []
    for _ in range(5):
        waited.append(jobs.pause_s(folder))
        assert jobs.count_failed_start(folder, limit=9)
    assert waited == [0, 15, 30, 60, 60]
    (folder.checkpoints / "step_000001").mkdir(parents=True)
    write_manifest(folder.checkpoints / "step_000001", world_size=1)
    assert jobs.pause_s(folder) == 0


def test_a_lost_server_leaves_a_checkpoint_and_a_requeue(stage):
    stage.role("learn", HEEDS)
    stage.role("serve", "while not (run / 'roles' / 'learn.json').exists(): time.sleep(0.02)\nsys.exit(5)")
    code, output = stage.run()
    assert code == 1
    assert "the serve-0 role ended with exit code 5" in output
    assert "a checkpoint of step 1" in output
    assert stage.asked() == ["requeue 17"]


def test_one_failed_node_of_the_learner_ends_the_others(tmp_path):
    stage = Stage(tmp_path, config_with(learner=2))
    stage.role("learn", f"if name == 'learn-0':\n    {WAITS}\n" + textwrap.dedent(FAILS))
    code, output = stage.run("n1,n2,n3")
    assert code == 1
    assert "the learn-1 role ended with exit code 3" in output and "ValueError: the cause" in output
    assert stage.asked() == ["requeue 17"]


def test_a_newer_checkpoint_begins_the_count_of_failures_anew(tmp_path):
    folder = RunFolder(tmp_path)
    assert [jobs.count_failed_start(folder, 2) for _ in range(2)] == [True, True]
    checkpoint = folder.checkpoints / "step_000001"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, world_size=1)
    assert [jobs.count_failed_start(folder, 2) for _ in range(4)] == [True, True, False, True]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_of_a_run_says_nothing_and_ends_no_job(tmp_path, text):
    folder, notes = RunFolder(tmp_path), list[str]()
    folder.hf.mkdir()
    for file in (folder.summary, folder.job, folder.restarts):
        file.write_text(text)
    assert not folder.has_final_model()
    assert not jobs.is_finished(folder, config_with(), note=notes.append)
    assert [str(folder.summary) in note for note in notes] == [True]
    assert jobs.recorded_job(folder) is None
    assert jobs.pause_s(folder) == 0 and jobs.count_failed_start(folder, 1)


def test_a_summary_that_cannot_be_read_for_a_moment_is_not_the_end(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.hf.mkdir()
    write_json(folder.summary, {"steps": 2})
    unreadable(monkeypatch, folder.summary, errno.ESTALE)
    assert not jobs.is_finished(folder, config_with())
    monkeypatch.undo()
    assert jobs.is_finished(folder, config_with())


def test_a_job_whose_summary_was_lost_writes_it_again(stage):
    stage.role("learn", FINISHES)
    assert stage.run()[0] == 0
    stage.folder.summary.write_text("")
    code, output = stage.run()
    assert code == 0 and "summary.json cannot be read" in output and "75.0% after 2 steps" in output


# -----------------------------------------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize("saved", [False, True])
def test_a_job_of_other_nodes_is_refused_for_good(stage, saved):
    """The way out goes on from a checkpoint where there is one: without one `resume` would be refused."""
    if saved:
        (stage.folder.checkpoints / "step_000001").mkdir(parents=True)
        write_manifest(stage.folder.checkpoints / "step_000001", world_size=1)
    code, output = stage.run("n1,n2,n3")
    assert code == 2
    assert "takes 1 + 1 nodes, but job 17 has 3" in output
    resume = f" resume={stage.folder.path}" if saved else ""
    assert f"`tandem slurm {stage.folder.config}{resume} --submit` makes a new script" in output
    assert stage.asked() == [] and stage.steps() == []


def test_a_colocated_job_of_other_nodes_is_refused(stage):
    stage.folder.config.write_text(resolved_yaml(config_with(learner=2, rollout=2, placement="colocated")))
    code, output = stage.run("n1,n2,n3,n4")
    assert (code, stage.asked(), stage.steps()) == (2, [], [])
    assert "takes 2 nodes (launch.placement=colocated), but job 17 has 4" in output


def test_a_run_of_one_machine_is_refused_on_two_nodes(stage):
    config = config_with()
    stage.folder.config.write_text(
        resolved_yaml(config.model_copy(update={"launch": config.launch.model_copy(update={"nodes": None})}))
    )
    code, output = stage.run()
    assert (code, stage.asked()) == (2, [])
    assert "takes one node, but job 17 has 2" in output


def test_outside_a_job_it_says_what_it_is_for(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(BadInput, match="not inside a Slurm job"):
        Job.of_environment()


def test_an_element_of_an_array_is_recorded_by_the_name_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "ask_slurm", lambda *_: "n1")
    for name, value in {
        "SLURM_JOB_ID": "124",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_ARRAY_JOB_ID": "123",
        "SLURM_ARRAY_TASK_ID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    folder = RunFolder(tmp_path)
    Job.of_environment().record(folder)
    array = place_of_array(tmp_path).log
    assert array.endswith("slurm-%A_%a.log"), "which is named by what is recorded"
    assert jobs.recorded_job(folder) == "123_0"


def test_two_starts_of_one_folder_at_once_are_refused(stage):
    stage.folder.claim()
    code, output = stage.run()
    assert (code, stage.asked(), stage.steps()) == (2, [], [])
    assert "is being run by another process" in output


@pytest.mark.parametrize(
    ("other", "state", "code"),
    [
        ("9", "RUNNING", 2),
        ("9", "REFUSED", 1),
        ("9", "COMPLETED", 0),
        ("17", "RUNNING", 0),
        ("5_1", "RUNNING", 0),
    ],
)
def test_a_folder_that_another_job_runs_is_left_alone(stage, other, state, code):
    stage.role("learn", FINISHES)
    stage.folder.job.write_text(json.dumps({"job_id": other, "nodes": [], "restart": 0}))
    stage.env |= {"FAKE_STATE": state, "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    found, output = stage.run()
    assert found == code, output
    told = "Slurm does not say whether it still runs" if state == "REFUSED" else "is being run by job 9"
    assert (told in output) == bool(code)


@pytest.mark.parametrize(("job", "cluster", "code"), [("17", "b", 1), ("9", "b", 1), ("17", "A", 0)])
def test_a_job_of_another_cluster_is_another_one_whatever_its_number(stage, job, cluster, code):
    stage.role("learn", FINISHES)
    write_json(stage.folder.job, {"job_id": job, "cluster": cluster, "nodes": [], "restart": 0})
    stage.env |= {"FAKE_STATE": "COMPLETED"}
    found, output = stage.run()
    assert found == code, output
    told = f"(it belongs to the cluster {cluster}, and this one is a); try again on {cluster}, or remove"
    assert (told in output) == bool(code)
    assert bool(stage.steps()) == (code == 0)


def test_a_role_goes_on_where_its_log_is_on_a_full_disk(stage):
    program = f"""
        from pathlib import Path
        from launch.roles import table as roles
        from launch.processes.run_folder import RunFolder
        def body(folder, config, **place):
            print("a line", flush=True)
            (folder.path / "saved").touch()
        roles.ROLES["sample"] = body
        roles.run_role("sample", RunFolder(Path({str(stage.folder.path)!r})))
    """
    (stage.folder.path / "roles").mkdir()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=full,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 0 and (stage.folder.path / "saved").exists()


@pytest.mark.parametrize(
    ("role", "env", "code"),
    [("sample", {"TANDEM_JOB": "1"}, 0), ("serve", {"TANDEM_JOB": "1"}, 0), ("sample", {}, -signal.SIGTERM)],
)
def test_the_rollout_side_of_a_job_outlasts_the_sigterm_that_slurm_sends_to_all(stage, role, env, code):
    program = f"""
        import os, signal
        from pathlib import Path
        from launch.roles import table as roles
        from launch.processes.run_folder import RunFolder, write_json
        def body(folder, config, **place):
            os.kill(os.getpid(), signal.SIGTERM)
        roles.serve = roles.ROLES["sample"] = body
        roles.run_role({role!r}, RunFolder(Path({str(stage.folder.path)!r})))
    """
    (stage.folder.path / "roles").mkdir()
    env = {k: v for k, v in os.environ.items() if k != "TANDEM_JOB"} | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == code, done.stderr
