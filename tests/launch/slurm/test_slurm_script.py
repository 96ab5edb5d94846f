"""What `tandem slurm` writes: the script says what the config says, no config makes it say more, and nothing
is written in vain."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from configs.loader import load_config, resolved_yaml
from configs.schema import RunConfig
from configs.schema.run import LONGEST_NAME
from launch.checks.arguments import BadInput
from launch.grid import run_name
from launch.processes.going_on import next_command
from launch.processes.run_folder import RunFolder
from launch.roles.start import folder_of
from launch.slurm import script as slurm_script
from launch.slurm.script import elements, note_on_cores, place_of_array, place_of_run, script_text, seconds
from parallel.checkpoints.files import write_manifest
from rollout.tiny_model import make_tiny_countdown_model
from tests.support.command import tandem

ROOT = Path(__file__).resolve().parents[3]
DEADLINE_S = 240
NODES = {"learner": 1, "rollout": 1, "gpus_per_node": 0}


def config_with(nodes: dict | None = None, name: str = "run", **slurm) -> RunConfig:
    content = {
        "name": name,
        "model": {"path": "m"},
        "task": {"type": "countdown"},
        "layout": {"dp": 1},
        "launch": {"nodes": NODES | (nodes or {}), "slurm": slurm},
    }
    return RunConfig.model_validate(content)


def asked_of_slurm(text: str) -> dict[str, str]:
    """As sbatch reads it: options of #SBATCH lines before the first command."""
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    head = list(itertools.takewhile(lambda line: line.startswith("#") or not line.strip(), lines[1:]))
    found = [line.removeprefix("#SBATCH --") for line in head if line.startswith("#SBATCH")]
    assert sum(line.startswith("#SBATCH") for line in lines) == len(found), (
        "an #SBATCH line after the first command is ignored by Slurm"
    )
    pairs = [line.partition("=")[::2] for line in found]
    assert len(dict(pairs)) == len(pairs), "an option is asked for twice"
    return dict(pairs)


def text_of(config: RunConfig, run: Path = Path("/runs/a"), **options) -> str:
    return script_text(config, place_of_run(run), submitted_from=Path("/home/me"), **options)


# --------------------------------------------------------------------------------------------------------------
# what is asked for


@given(
    learner=st.integers(1, 64), rollout=st.integers(1, 64), gpus=st.sampled_from([0, 1, 4, 8]), notice=st.integers(1, 3600),
    time=st.sampled_from(["12:00:00", "3-00:00:00", "2-0"]), memory=st.sampled_from([None, "64G", "1000"]),
    name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z"), kind=st.sampled_from([None, "h100", "a100-80gb"]),
)  # fmt: skip
def test_the_script_asks_for_what_the_config_says(learner, rollout, gpus, notice, time, memory, name, kind):
    nodes = {"learner": learner, "rollout": rollout, "gpus_per_node": gpus}
    asked = asked_of_slurm(
        text_of(
            config_with(nodes, name=name, notice_s=notice, time=time, memory_per_node=memory, gpu_type=kind)
        )
    )
    assert asked["job-name"] == name
    assert int(asked["nodes"]) == learner + rollout
    assert asked["ntasks-per-node"] == "1"
    of_type = f"gpu:{kind}:{gpus}" if kind else f"gpu:{gpus}"
    assert asked.get("gres") == (of_type if gpus else None)
    assert asked["signal"] == f"B:USR1@{notice}"
    assert asked["time"] == time
    assert asked.get("mem") == memory
    assert asked["output"] == "/runs/a/logs/slurm-%j.log"
    assert asked["open-mode"] == "append"
    assert asked["requeue"] == ""
    assert {"partition", "account", "qos", "array", "cpus-per-task"}.isdisjoint(asked), (
        "what is not set is Slurm's to choose"
    )


def test_every_field_of_the_slurm_block_arrives():
    slurm = {
        "partition": "gpu",
        "account": "me",
        "qos": "high",
        "cpus_per_node": 32,
        "options": ["--exclusive", "--constraint=a&b"],
    }
    asked = asked_of_slurm(text_of(config_with(**slurm, setup=["module load cuda"])))
    assert (asked["partition"], asked["account"], asked["qos"], asked["cpus-per-task"]) == (
        "gpu",
        "me",
        "high",
        "32",
    )
    assert asked["exclusive"] == ""
    assert asked["constraint"] == "a&b"


@pytest.mark.parametrize(
    ("slurm", "is_warned"),
    [({}, True), ({"options": ["--constraint=a"]}, True), ({"cpus_per_node": 32}, False),
     ({"options": ["--exclusive"]}, False), ({"options": ["--exclusive=user"]}, False), ({"options": ["--cpus-per-gpu=8"]}, False)],
)  # fmt: skip
def test_cores_that_nothing_asks_for_are_warned_of(slurm, is_warned):
    note = note_on_cores(config_with(**slurm))
    assert (note is not None) == is_warned
    assert note is None or "one core for all processes" in note


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("1:00:00", 3600),
        ("24:00:00", 86400),
        ("1-0", 86400),
        ("2-12", 216000),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
    ],
)
def test_times_are_read_as_slurm_reads_them(time, expected):
    assert config_with(time=time).launch.slurm.time == time
    assert seconds(time) == expected


# -------------------------------------------------------------------------------------------------------------------
# what it runs


def run_script(text: str, tmp_path: Path, **env: str) -> list[str]:
    """The arguments that the script gives its interpreter, with a stand-in for that which prints them."""
    shown = tmp_path / "shown"
    fake = tmp_path / "python it is"
    fake.write_text(f'#!/bin/sh\npwd > "{shown}"\nfor a in "$@"; do echo "$a" >> "{shown}"; done\n')
    fake.chmod(0o755)
    assert subprocess.run(["bash", "-c", text], env=os.environ | env, timeout=DEADLINE_S).returncode == 0
    return shown.read_text().splitlines()


def test_it_becomes_the_supervisor_in_the_folder_it_was_submitted_from(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python it is"))
    here = tmp_path / "a folder; with $HOME 'and' more"
    here.mkdir()
    text = script_text(
        config_with(setup=["test -n '@RUN@'"]), place_of_run(Path("/runs/a")), submitted_from=here
    )
    assert run_script(text, tmp_path) == [str(here), "-m", "launch", "job", "/runs/a"]


def test_an_element_of_an_array_finds_its_own_run_and_log(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python it is"))
    text = script_text(config_with(), place_of_array(Path("/runs/all")), submitted_from=tmp_path, count=3)
    asked = asked_of_slurm(text)
    assert asked["array"] == "0-2"
    assert asked["output"] == "/runs/all/%a/logs/slurm-%A_%a.log"
    assert run_script(text, tmp_path, SLURM_ARRAY_TASK_ID="2")[-1] == "/runs/all/2"


def test_the_signal_to_stop_does_not_end_a_job_that_is_still_starting(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    text = script_text(
        config_with(setup=["kill -USR1 $$", "kill -CONT $$"]), place_of_run(tmp_path), submitted_from=tmp_path
    )
    assert subprocess.run(["bash", "-c", text], timeout=DEADLINE_S).returncode == 0


def test_the_shell_reads_the_script_before_anyone_waits_in_a_queue():
    slurm_script.check_script(text_of(config_with(setup=["module load cuda"])), by_slurm=False)
    with pytest.raises(ValueError, match=r"the shell refuses.*fix launch.slurm.setup"):
        slurm_script.check_script(text_of(config_with(setup=["if true"])), by_slurm=False)


# ---------------------------------------------------------------------------------------------------------------------
# injection

AWKWARD = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(
    [
        "a b",
        "a\nb",
        "a\n#SBATCH --nodes=9",
        "a;b",
        "$(id)",
        "`id`",
        "a#b",
        "'",
        '"',
        "\\",
        "a\r",
        "a\n",
        "%j",
        "a\tb",
        "é",
    ]
)


@given(
    AWKWARD, st.sampled_from(["partition", "account", "qos", "memory_per_node", "time", "options", "name"])
)
def test_no_value_becomes_another_line_or_another_option(value, field):
    expected = asked_of_slurm(text_of(config_with()))
    try:
        config = config_with(**{field: [value] if field == "options" else value})
    except ValueError:
        return
    text = text_of(config)
    asked = asked_of_slurm(text)
    changed = {key for key in asked.keys() | expected.keys() if asked.get(key) != expected.get(key)}
    assert len(changed) <= 1
    assert text.isascii()
    assert not any(set(" \t\"'\\#$`;%") & set(asked[key]) for key in changed & asked.keys())


@pytest.mark.parametrize("value", ["a b", "a\n#SBATCH --nodes=9", "a\n", "'", '"', "a#b", ""])
def test_what_no_partition_is_called_is_refused(value):
    with pytest.raises(ValueError, match="partition"):
        config_with(partition=value)


@pytest.mark.parametrize("path", ["/runs/a b", "/runs/a\nb", "/runs/%j", "/runs/'a'", "/runs/a#b"])
def test_a_folder_that_an_sbatch_line_cannot_name_is_refused(path):
    with pytest.raises(ValueError, match=r"launch.runs_dir.*use a folder"):
        text_of(config_with(), run=Path(path))


# -------------------------------------------------------------------------------------------------------------------------
# arrays


def test_an_array_is_every_combination_in_order():
    assert elements([]) == [()]
    assert elements(["seed=0,1", "a.b=x, y"]) == [
        ("seed=0", "a.b=x"),
        ("seed=0", "a.b=y"),
        ("seed=1", "a.b=x"),
        ("seed=1", "a.b=y"),
    ]


@pytest.mark.parametrize(
    "wrong",
    ["seed", "=1", "seed=", "seed=1,,2", "seed=1,1", "a=[1,2]", "launch.nodes.learner=1,2", "resume=a,b"],
)
def test_what_is_no_list_of_values_is_refused(wrong):
    with pytest.raises(ValueError, match=f"--array {wrong[:4]}".replace("[", r"\[")):
        elements([wrong])


def test_a_key_is_given_once():
    with pytest.raises(ValueError, match="twice"):
        elements(["seed=1", "seed=2"])


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3))
def test_a_run_folder_of_an_array_has_a_name_that_slurm_and_file_systems_know(values):
    name = run_name("run", [f"k={value}" for value in values])
    assert name.isascii() and not set("/% \n\"'\\") & set(name)
    assert len(name) <= LONGEST_NAME


# -------------------------------------------------------------------------------------------------------------------
# the problems


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (config_with(time="00:04:00", notice_s=180), "use a longer time, or a shorter notice"),
        (config_with(options=["--nodes=3"]), "--nodes is set by launch.nodes"),
        (config_with(options=["--time=1"]), "--time is set by launch.slurm.time"),
        (
            config_with(options=["--gpus-per-task=1"]),
            "--gpus-per-task is set by launch.nodes.gpus_per_node",
        ),
        (
            config_with(options=["--gpus-per-socket=1"]),
            "--gpus-per-socket is set by launch.nodes.gpus_per_node",
        ),
        (config_with(options=["--ntasks-per-gpu=1"]), "--ntasks-per-gpu is set by launch.nodes"),
    ],
)
def test_what_cannot_work_is_named_with_a_fix(config, says):
    (problem,) = slurm_script.check(config)
    assert says in problem


def test_a_config_without_problems_has_none():
    assert slurm_script.check(config_with(time="00:05:00", notice_s=180)) == []


# -------------------------------------------------------------------------------------------------------------------
# the command


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return folder


@pytest.fixture
def config_file(tmp_path, model) -> Path:
    content = {
        "model": {"path": str(model)}, "task": {"type": "countdown"}, "rollout": {"max_new_tokens": 14}, "launch": {"nodes": NODES}
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "run.yaml"


FAKES = {
    "sbatch": """#!/bin/sh
        case "$1" in --test-only) cat > tested; exit ${FAKE_TEST:-0};; esac
        [ -z "$FAKE_REFUSAL" ] || { echo "sbatch: error: $FAKE_REFUSAL" >&2; exit 1; }
        for script do :; done
        cp "$script" submitted; env > environment; printf '%s\\n' "$@" > requests; echo 4711
    """,
    "scontrol": """#!/bin/sh
        printf 'ClusterIdX = 1\\nClusterName             = here\\n'
    """,
    "squeue": """#!/bin/sh
        [ "$FAKE_STATE" = DOWN ] && { echo "Unable to contact slurm controller" >&2; exit 1; }
        [ -n "$FAKE_STATE" ] && { echo "$FAKE_STATE"; exit 0; }
        echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1
    """,
}


@pytest.fixture
def fake_slurm(tmp_path) -> str:
    """A PATH with commands that stand in for Slurm's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in FAKES.items():
        (folder / name).write_text("\n".join(line.strip() for line in text.splitlines()))
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def tandem_slurm(config_file: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    with mock.patch.dict(os.environ, env):
        return tandem("slurm", str(config_file), *arguments, cwd=config_file.parent)


def tandem_slurm_in_a_process(config_file: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "launch", "slurm", str(config_file), *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(
        command, cwd=config_file.parent, env=env, capture_output=True, text=True, timeout=DEADLINE_S
    )


def runs(config_file: Path) -> list[Path]:
    return sorted(p for p in (config_file.parent / "runs").glob("*") if not p.is_symlink())


def test_it_writes_a_run_folder_with_its_script(config_file):
    done = tandem_slurm(config_file, "seed=3", PATH=os.environ["PATH"])
    assert "# launch.slurm.cpus_per_node is not set" in done.stdout
    assert done.returncode == 0, done.stderr
    (run,) = runs(config_file)
    assert f"sbatch {run / 'train.sbatch'}" in done.stdout
    assert (run / "logs").is_dir(), (
        "Slurm does not make the folder of a job's log: the job would end without one"
    )
    config = load_config(run / "config.yaml")
    assert config.seed == 3
    assert (run / "train.sbatch").read_text() == script_text(
        config, place_of_run(run), submitted_from=config_file.parent
    )
    assert not (run / "job.json").exists()
    assert next_command(RunFolder(run)) == f"sbatch {run}/train.sbatch"
    moved = run.rename(run.with_name(f"{run.name[:-1]}"))  # its name is the beginning of the old one
    assert next_command(RunFolder(moved)) == f"tandem slurm {moved}/config.yaml --submit", (
        "the script runs the old folder"
    )


def test_an_array_has_a_checked_run_folder_for_each_element(config_file):
    done = tandem_slurm(config_file, "--array", "seed=0,1", "--array", "steps=5,7")
    assert done.returncode == 0, done.stderr
    (array,) = [p for p in runs(config_file) if "array" in p.name]
    found = [load_config((array / str(i)).resolve() / "config.yaml") for i in range(4)]
    assert [(c.seed, c.steps) for c in found] == [(0, 5), (0, 7), (1, 5), (1, 7)]
    assert "-seed-1-steps-7-" in (array / "3").resolve().name
    assert all((array / str(i) / "logs").is_dir() for i in range(4))
    assert asked_of_slurm((array / "train.sbatch").read_text())["array"] == "0-3"


@pytest.mark.parametrize(
    ("second", "arguments", "says"),
    [
        ("launch: {slurm: {time: '48:00:00'}}", ["extends=a.yaml,b.yaml"], "--time=48:00:00"),
        ("launch: {slurm: {setup: [module load cuda]}}", ["extends=a.yaml,b.yaml"], "module load cuda"),
        ("", ["rollout.replicas=1,4", "launch.nodes=null", "layout.dp=1"], "--gres=gpu:5"),
    ],
)
def test_an_array_whose_runs_ask_for_different_things_is_refused(config_file, second, arguments, says):
    (config_file.parent / "a.yaml").write_text("name: a")
    (config_file.parent / "b.yaml").write_text(f"name: b\n{second}")
    done = tandem_slurm(config_file, "--array", *arguments)
    assert done.returncode == 2 and nothing_written(config_file)
    assert says in done.stderr and "submit such runs one by one" in done.stderr


def test_an_array_s_runs_may_have_names_of_their_own(config_file):
    for name in "ab":
        (config_file.parent / f"{name}.yaml").write_text(f"name: {name}")
    assert tandem_slurm(config_file, "--array", "extends=a.yaml,b.yaml").returncode == 0


def test_submitting_prints_the_job_and_how_to_watch_it(config_file, fake_slurm):
    done = tandem_slurm_in_a_process(config_file, "--submit", PATH=fake_slurm)
    assert done.returncode == 0, done.stderr
    (run,) = runs(config_file)
    assert (config_file.parent / "submitted").read_text() == (run / "train.sbatch").read_text()
    for line in ("4711", f"tandem status {run}", f"tandem logs {run}", "squeue --jobs=4711", "scancel 4711"):
        assert line in done.stdout
    recorded = {"job_id": "4711", "cluster": "here", "nodes": [], "restart": 0}
    assert json.loads((run / "job.json").read_text()) == recorded


def test_the_shell_of_another_job_asks_for_nothing_in_the_script_s_place(config_file, fake_slurm):
    outer = {"SBATCH_GPUS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": "1", "SBATCH_QOS": "mine"}
    done = tandem_slurm(config_file, "--submit", PATH=fake_slurm, **outer)
    assert done.returncode == 0, done.stderr
    environment = (config_file.parent / "environment").read_text().splitlines()
    assert "SBATCH_QOS=mine" in environment
    assert not [line for line in environment if "GPUS_PER_NODE" in line]


def test_requests_of_the_environment_do_not_take_the_place_of_the_script_s(config_file, fake_slurm):
    """sbatch puts SBATCH_ACCOUNT above a script's --account, and below its own option."""
    done = tandem_slurm(config_file, "launch.slurm.account=mine", "--submit", PATH=fake_slurm)
    assert done.returncode == 0, done.stderr
    parsable, *requests, _ = (config_file.parent / "requests").read_text().splitlines()
    asked = asked_of_slurm((config_file.parent / "submitted").read_text())
    assert parsable == "--parsable" and asked["account"] == "mine" and asked["requeue"] == ""
    assert requests == [f"--{name}={value}" if value else f"--{name}" for name, value in asked.items()]


def test_a_setup_line_is_no_request(config_file, fake_slurm):
    done = tandem_slurm(config_file, "launch.slurm.setup=['#SBATCH --hold']", "--submit", PATH=fake_slurm)
    assert done.returncode == 0, done.stderr
    assert "--hold" not in (config_file.parent / "requests").read_text()


def nothing_written(config_file: Path) -> bool:
    return not (config_file.parent / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["launch.slurm.gpus=2"],
            "launch.slurm.gpus=2 is for a run on one node; with launch.nodes set launch.nodes.gpus_per_node",
        ),
        (["launch.nodes=null"], "layout.dp=auto takes the GPUs of this machine, not those of the job's node"),
        (
            ["launch.nodes=null", "layout.dp=1", "launch.slurm.gpus=1"],
            "launch.slurm.gpus=1, but learner (layout) and servers",
        ),
        (["--gpu-memory", "80"], "--gpu-memory 80: the job asks for no GPUs"),
        (["launch.slurm.time=3h"], "must be hours:minutes:seconds"),
        (["launch.slurm.partition='a b'"], "launch.slurm.partition"),
        (["--array", "seed=0,x"], "seed"),
        (["--array", "steps=5,0"], "steps"),
        (["--array", "seed"], "write key=v1,v2"),
        (["launch.slurm.setup=['if true']"], "fix launch.slurm.setup"),
        (["launch.runs_dir='a b'"], "launch.runs_dir"),
        (["resume=nowhere"], "resume"),
        (["--submit"], "there is no `sbatch` here"),
    ],
)
def test_bad_input_is_one_clear_error_and_nothing_is_written(config_file, arguments, says):
    done = tandem_slurm(
        config_file,
        *arguments,
        PATH="/usr/sbin:/bin" if "--submit" not in arguments else str(config_file.parent),
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert nothing_written(config_file)


def test_a_warm_start_is_no_job(config_file, model):
    content = {"kind": "sft", "model": {"path": str(model)}, "output": "out", "data": {"type": "countdown"}}
    (config_file.parent / "run.yaml").write_text(yaml.safe_dump(content))
    done = tandem_slurm(config_file)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and nothing_written(config_file)
    assert "this command takes kind: train" in done.stderr


def test_what_slurm_refuses_is_said_before_anything_is_written(config_file, fake_slurm):
    done = tandem_slurm(config_file, "--submit", PATH=fake_slurm, FAKE_TEST="1")
    assert done.returncode == 2
    assert "sbatch refuses the batch script" in done.stderr
    assert nothing_written(config_file)


def test_what_slurm_refuses_in_earnest_is_said_too(config_file, fake_slurm):
    done = tandem_slurm(
        config_file, "--submit", PATH=fake_slurm, FAKE_REFUSAL="Job violates accounting/QOS policy"
    )
    assert done.returncode == 2
    assert "QOS policy" in done.stderr and "the script is kept" in done.stderr
    (run,) = runs(config_file)
    assert (run / "train.sbatch").is_file() and not (run / "job.json").exists()


def test_a_dry_run_writes_nothing(config_file):
    done = tandem_slurm(config_file, "--dry-run", "--array", "seed=0,1")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --array=0-1" in done.stdout
    assert nothing_written(config_file)


def run_before(config_file: Path, *, steps: int) -> Path:
    """A run that a command of this folder has made, with a checkpoint of step 1."""
    run = config_file.parent / "runs" / "before"
    checkpoint = run / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, world_size=1)
    config = load_config(config_file, ["layout.dp=1", f"steps={steps}"])
    (run / "config.yaml").write_text(resolved_yaml(config))
    return run


@pytest.mark.parametrize("dry", [False, True], ids=["submitted", "dry"])
def test_a_finished_run_is_told_of_and_not_submitted(config_file, fake_slurm, dry):
    run = run_before(config_file, steps=1)
    (run / "hf").mkdir()
    (run / "summary.json").write_text('{"steps": 1}')
    config, before = run / "config.yaml", sorted(run.rglob("*"))
    how = "--dry-run" if dry else "--submit"
    done = tandem_slurm(config, f"resume={run}", how, PATH=fake_slurm)
    more = f"`tandem slurm {config} resume={run} steps=N --submit`"
    said = f"{'# ' * dry}{run} is finished, with steps=1; for more: {more}"
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == said, done.stderr
    assert sorted(run.rglob("*")) == before
    done = tandem_slurm(config, f"resume={run}", "steps=2", how, PATH=fake_slurm)
    assert done.returncode == 0 and "is finished" not in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("state", "code"), [("RUNNING", 2), ("PENDING", 2), ("DOWN", 2), ("COMPLETED", 0), ("", 0)]
)
def test_a_run_that_a_job_has_is_not_submitted_again(config_file, fake_slurm, state, code):
    run = run_before(config_file, steps=9)
    (run / "job.json").write_text(json.dumps({"job_id": "17", "nodes": ["n1"], "restart": 0}))
    done = tandem_slurm(run / "config.yaml", f"resume={run}", "--submit", PATH=fake_slurm, FAKE_STATE=state)
    assert done.returncode == code, done.stderr
    told = (
        f"job 17 had {run} last, and Slurm does not say"
        if state == "DOWN"
        else "belongs to job 17, which runs or is queued"
    )
    assert (told in done.stderr) == bool(code)
    if code == 0:
        assert json.loads((run / "job.json").read_text())["job_id"] == "4711"


@pytest.mark.parametrize("state", ["PENDING", "DOWN", "COMPLETED"])
def test_a_run_that_a_job_has_is_not_resumed_by_hand(config_file, fake_slurm, monkeypatch, state):
    """A job that waits in the queue holds no lock, and a lock is seen on one host alone on some file systems."""
    folder = RunFolder(config_file.parent / "runs" / "before")
    folder.path.mkdir(parents=True)
    config = load_config(config_file, ["layout.dp=1", f"resume={folder.path}"])
    folder.config.write_text(before := resolved_yaml(config.model_copy(update={"resume": None, "steps": 1})))
    folder.job.write_text(json.dumps({"job_id": "17", "nodes": [], "restart": 0}))
    monkeypatch.setenv("PATH", fake_slurm)
    monkeypatch.setenv("FAKE_STATE", state)
    if state == "COMPLETED":
        assert folder_of(config).release() == folder.path
        return
    told = (
        "17, which runs or is queued; wait for it, or end it" if state == "PENDING" else "Slurm does not say"
    )
    with pytest.raises(BadInput, match=rf"resume: .*{told}"):
        folder_of(config)
    assert folder.config.read_text() == before and not folder.roles.exists()
