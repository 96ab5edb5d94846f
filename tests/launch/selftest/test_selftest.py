"""``tandem selftest``: a broken subject fails its own check by name, with a fix, and the other checks continue; what is
left behind; what the report has, and what it leaves out."""

import errno
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.checks import node
from launch.commands import selftest as command
from launch.processes.supervisor import Role
from launch.selftest import bench as benches
from launch.selftest import checks, report
from launch.selftest.bench import Bench
from launch.selftest.check import Check, CheckFailed, Found, Machine, Outcome, Result, outcome_of
from launch.selftest.checks import CHECKS, chosen, verdict_on
from launch.selftest.ranks import PARTS
from tests.support.command import tandem
from tests.support.whole_runs import assert_nothing_left, finish, start, wait_for

HERE = Machine(gpus=0, has_transformer_engine=False)
BY_NAME = {check.name: check for check in CHECKS}
PASSES = Check(name="sound", proves="it passes", run=lambda bench: Found(text="fine"), seconds=1)


def bench_in(folder: Path, machine: Machine = HERE) -> Bench:
    return Bench(folder, machine, seed=0)


def program(bench: Bench, code: str) -> None:
    """Run code in a process of the check's."""
    log = bench.folder.path / "program.log"
    bench.run(Role(name="program", command=[sys.executable, "-c", code], log=log))


def run_checks(monkeypatch, folder: Path, *made: Check) -> tuple[bool, dict[str, dict], str]:
    """(whether all is well, the checks of selftest.json by name, selftest.txt) of a whole selftest of these checks."""
    monkeypatch.setattr(command, "chosen", lambda names: list(made))
    is_good = command.selftest(folder, [], seed=0)
    (out,) = folder.glob("selftest-*")
    written = json.loads((out / "selftest.json").read_text())
    return is_good, {one["name"]: one for one in written["checks"]}, (out / "selftest.txt").read_text()


def broken(code: str, deadline_s: float = 60.0) -> Check:
    return Check(
        name="broken", proves="a process ends well", run=lambda bench: program(bench, code), seconds=1, deadline_s=deadline_s
    )  # fmt: skip


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("pid", child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "deadline_s", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", 60.0, "ended with signal SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", 60.0, "ended with signal SIGSEGV"),
        ("print('first'); raise ValueError('no such kernel')", 60.0, "ValueError: no such kernel"),
        (HANGS, 5.0, "it had not ended after 5 s"),  # beside other work it takes a second to print its pid
    ],
    ids=["killed", "segfault", "raises", "hangs"],
)
def test_a_process_that_ends_badly_fails_its_check_and_the_next_goes_on(
    monkeypatch, tmp_path, capsys, code, deadline_s, said
):
    is_good, found, text = run_checks(monkeypatch, tmp_path, broken(code, deadline_s), PASSES)
    assert not is_good
    assert found["broken"]["result"] == "FAIL" and said in found["broken"]["text"] and found["broken"]["fix"]
    assert found["sound"]["result"] == "pass"
    console = capsys.readouterr().out
    assert "[1/2] FAIL      broken" in console and "[2/2] pass      sound" in console
    assert "FAIL broken:" in console and "a process ends well" in console and "1 passed, 1 failed" in console
    assert said in text and "selftest.txt" in console
    if code == HANGS:
        pid = int(found["broken"]["details"].split("pid ")[1].split()[0])
        deadline = time.monotonic() + 10
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not psutil.pid_exists(pid), "the hung process's own child, in another session"


def test_any_exception_is_a_failure_with_its_traceback_in_the_report_alone(monkeypatch, tmp_path, capsys):
    check = Check(name="buggy", proves="it works", run=lambda bench: Found(text=str(1 // 0)), seconds=1)
    is_good, found, text = run_checks(monkeypatch, tmp_path, check, PASSES)
    assert (
        not is_good
        and found["buggy"]["text"].startswith("ZeroDivisionError")
        and found["sound"]["result"] == "pass"
    )
    assert "Traceback" in text and "Traceback" not in capsys.readouterr().out


def test_what_needs_a_failed_check_is_not_run_and_what_cannot_be_here_says_why(monkeypatch, tmp_path, capsys):
    needy = Check(name="needy", proves="-", run=lambda bench: Found(text=""), seconds=1, needs=("broken",))
    far = Check(
        name="far",
        proves="-",
        run=lambda bench: Found(text=""),
        seconds=1,
        why_not_here=lambda machine: "no GPU",
    )
    after = Check(name="after", proves="-", run=lambda bench: Found(text=""), seconds=1, needs=("far",))
    _, found, text = run_checks(monkeypatch, tmp_path, broken("raise SystemExit(3)"), needy, far, after)
    assert [found[name]["result"] for name in ("needy", "far", "after")] == [
        "not run",
        "not here",
        "not here",
    ]
    assert "it needs `broken`, which failed" in text and "it needs `far`: no GPU" in text
    assert "0 passed, 1 failed, 1 not run, 2 not here" in capsys.readouterr().out


def test_all_is_well_where_the_rest_is_not_here(monkeypatch, tmp_path):
    far = Check(
        name="far",
        proves="-",
        run=lambda bench: Found(text=""),
        seconds=1,
        why_not_here=lambda machine: "no GPU",
    )
    assert run_checks(monkeypatch, tmp_path, PASSES, far)[0]


def made(name: str, bench: Bench) -> Outcome:
    bench.begin(BY_NAME[name])
    return outcome_of(BY_NAME[name], bench)


def test_a_node_that_is_not_fit(monkeypatch, tmp_path):
    assert made("machine", bench_in(tmp_path)).result is Result.PASS
    usage = checks.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checks, "FREE_SPACE", usage.free + 2**40)
    full = made("machine", bench_in(tmp_path))
    assert (
        full.result is Result.FAIL
        and "GiB left, and runs need more than" in full.text
        and "--folder" in full.fix
    )
    monkeypatch.undo()
    monkeypatch.setattr(node, "PINNED", ("torch", "no-such-package"))
    missing = made("machine", bench_in(tmp_path))
    assert (
        missing.result is Result.FAIL
        and "no-such-package is missing" in missing.text
        and "install.sh" in missing.fix
    )


@pytest.mark.parametrize(
    "code", ["raise ImportError('libcudart.so.12: no such file')", "import os; os.kill(os.getpid(), 11)"]
)
def test_a_package_that_cannot_be_imported(monkeypatch, tmp_path, code):
    (tmp_path / "path" / "sglang").mkdir(parents=True)
    (tmp_path / "path" / "sglang" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setattr(checks, "packages", lambda machine: {"SGLang": "sglang.srt.server_args"})
    outcome = made("packages", bench_in(tmp_path))
    assert (
        outcome.result is Result.FAIL
        and "SGLang cannot be imported" in outcome.text
        and "install.sh" in outcome.fix
    )
    assert "libcudart.so.12" in outcome.text or "SIGSEGV" in outcome.text


def as_role(monkeypatch, code: str) -> None:
    """Roles run ``code`` in place of their own work, with their run folder as its argument."""

    def role(name, folder, config, **options):
        return Role(
            name=name, command=[sys.executable, "-c", code, str(folder.path)], log=folder.logs / f"{name}.log"
        )

    monkeypatch.setattr(benches, "role", role)


WRITES = "import json, pathlib, sys; folder = pathlib.Path(sys.argv[1]);"


def test_the_findings_of_ranks_and_their_own_words_come_through(monkeypatch, tmp_path):
    bench = bench_in(tmp_path)
    found = {"text": "all well", "figures": {"a_s": 1}, "torch": {"threads": 1}}
    as_role(monkeypatch, f"{WRITES} (folder / 'found.json').write_text(json.dumps({found!r}))")
    good = made("memory", bench)
    assert (good.result, good.text, good.figures, bench.torch) == (
        Result.PASS,
        "all well",
        {"a_s": 1},
        {"threads": 1},
    )
    failed = {"error": "gradients take 5 MiB", "fix": "do not trust it"}
    as_role(
        monkeypatch,
        f"{WRITES} (folder / 'failed.json').write_text(json.dumps({failed!r})); print('log'); raise SystemExit(1)",
    )
    bad = made("update", bench)
    assert (bad.result, bad.text, bad.fix, bad.details) == (
        Result.FAIL,
        "gradients take 5 MiB",
        "do not trust it",
        "log",
    )


DIES_WHEN_ASKED = """
import os, time
(folder / "roles").mkdir()
(folder / "pid").write_text(str(os.getpid()))
(folder / "roles" / "serve.json").write_text(json.dumps({"urls": []}))
while not (folder / "asked").exists():
    time.sleep(0.01)
raise RuntimeError("out of memory")
"""
LOSES_ITS_SERVER = """
import time, psutil
server = folder.parent / "server"
process = psutil.Process(int((server / "pid").read_text()))
(server / "asked").touch()
while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
raise SystemExit(1)
"""


def test_a_server_that_does_not_start_or_dies_later_is_named(monkeypatch, tmp_path):
    as_role(monkeypatch, "raise RuntimeError('no kernel image is available')")
    with bench_in(tmp_path) as bench:
        outcome = made("server", bench)
    assert (
        outcome.result is Result.FAIL
        and "the serve role" in outcome.text
        and "no kernel image" in outcome.text
    )

    as_role(monkeypatch, f"{WRITES}{DIES_WHEN_ASKED}")
    (tmp_path / "later").mkdir()
    with bench_in(tmp_path / "later") as bench:
        assert made("server", bench).result is Result.PASS
        as_role(monkeypatch, f"{WRITES}{LOSES_ITS_SERVER}")
        outcome = made("engines", bench)
    assert (
        outcome.result is Result.FAIL and "the serve role" in outcome.text and "out of memory" in outcome.text
    )


def step(number: int) -> dict:
    return {
        "step": number, "loss/total": 0.1, "optim/grad_norm": 0.5, "mismatch/abs_prob_max": 1e-6, "mismatch/logprob_gap_max": 2e-6,
        "sync/version": number, "throughput/tokens_per_s": 900.0, "time/step": 1.0, "time/sync": 0.1, "reward/mean": 0.2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([step(1)], r"recorded steps \[1\], not 1 to 2"),
        ([step(1), step(2) | {"loss/total": None}], "step 2: loss/total is None"),
        ([step(1), step(2) | {"loss/total": float("nan")}], "step 2: loss/total is nan"),
        ([step(1) | {"optim/grad_norm": 0.0}, step(2)], "step 1: the gradient is zero"),
        ([step(1), step(2) | {"sync/version": 1}], "step 2: the servers were sent version 1"),
        ([step(1), step(2) | {"mismatch/abs_prob_max": 3e-4}], "differ by up to 3.0e-04"),
        ([step(1), step(2) | {"mismatch/logprob_gap_max": 2e-3}], r"2\.0e-03 nats"),
    ],
)
@pytest.mark.parametrize("name", ["train", "train-colocated"])
def test_a_run_whose_metrics_are_wrong(monkeypatch, tmp_path, name, steps, said):
    monkeypatch.setattr(Bench, "train", lambda bench, *more: [step(0), *steps])
    outcome = made(name, bench_in(tmp_path))
    with pytest.raises(CheckFailed, match=said):
        verdict_on(steps, 2, "float32")
    assert outcome.result is Result.FAIL and outcome.fix


def test_a_good_run_and_what_bfloat16_allows():
    far = [step(1), step(2) | {"mismatch/abs_prob_max": 0.02, "mismatch/logprob_gap_max": 0.3}]
    assert verdict_on(far, 2, "bfloat16").figures["max_probability_gap"] == 0.02
    assert "2 steps" in verdict_on([step(1), step(2)], 2, "float32").text


def test_a_run_that_cannot_start_says_the_end_of_its_console(tmp_path):
    """There is no model, since its check was not made."""
    outcome = made("train", bench_in(tmp_path))
    assert outcome.result is Result.FAIL and "exit code 2" in outcome.text
    assert "model.path" in outcome.details and "no such" in outcome.details


def test_which_checks_are_here_on_which_machine():
    def not_here(machine: Machine) -> set[str]:
        return {check.name for check in CHECKS if check.why_not_here(machine) is not None}

    assert not_here(HERE) == {"nccl", "transformer-engine"}
    assert not_here(Machine(gpus=1, has_transformer_engine=False)) == {"nccl", "transformer-engine", "train"}
    assert not_here(Machine(gpus=2, has_transformer_engine=True)) == set()


def test_on_one_gpu_learner_and_server_take_turns_and_gpus_compute_in_bfloat16(tmp_path):
    by_gpus = {
        gpus: bench_in(tmp_path, Machine(gpus=gpus, has_transformer_engine=True)).config for gpus in (0, 1, 2)
    }
    assert [config.launch.placement for config in by_gpus.values()] == ["separate", "colocated", "separate"]
    assert [config.model.dtype for config in by_gpus.values()] == ["float32", "bfloat16", "bfloat16"]
    assert by_gpus[2].rollout.server_args["mem_fraction_static"] == 0.4


def test_a_choice_brings_what_it_needs_in_order():
    assert [check.name for check in chosen(["flipped-bit", "gloo"])] == [
        "model",
        "gloo",
        "server",
        "transfer",
        "flipped-bit",
    ]
    assert chosen([]) == list(CHECKS)
    serving = [check.uses_server or check.name == "server" for check in CHECKS]
    assert "".join("x" if one else " " for one in serving).strip().count(" ") == 0, "the server starts once"


def test_every_check_is_told_of_in_a_sentence_and_every_part_has_a_check():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.proves and check.seconds > 0 for check in CHECKS)
    assert {"engines", "transfer", "flipped_bit", "mismatch", "update", "memory", "model"} <= PARTS.keys()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "glo"], "--only glo: no such check; did you mean `gloo`?"),
        (["--folder", "/proc/none"], "--folder=/proc/none"),
        (["--seed", "-1"], "--seed"),
        (["--quick"], "No such option"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(tmp_path, arguments, said):
    done = tandem("selftest", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_report_keeps_names_and_secrets_to_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijk")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "key.yaml").write_text("api-key: 0123456789abcdef0123456789abcdef\n")
    details = "/home/ada/x hf_abcdefghijk 0123456789abcdef0123456789abcdef node17 by ada, of adamw"
    outcome = Outcome(check=PASSES, result=Result.FAIL, text=f"in {tmp_path}", fix="-", details=details)
    written = report.write(tmp_path, [outcome], planned=1, seconds=1.0, torch={}).read_text()
    both = written + (tmp_path / "selftest.json").read_text()
    for secret in ("/home/ada", "hf_abcdefghijk", "0123456789abcdef0", "node17", "by ada", str(tmp_path)):
        assert secret not in both
    assert "HOME/x SECRET SECRET HOST by USER, of adamw" in written and "in FOLDER" in written


def test_the_report_tells_versions_and_hardware(tmp_path):
    about = report.environment()
    assert about["packages"]["megatron-core"] and about["libc"].startswith("glibc") and about["cores"] >= 1
    assert len(about["commit"]) == 40 or about["commit"] == "unknown"


def test_a_disk_that_is_full_at_the_end_still_shows_the_table(monkeypatch, tmp_path, capsys):
    def no_space(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "selftest.json")

    monkeypatch.setattr(report, "write_json", no_space)
    with pytest.raises(OSError, match="No space left"):
        run_checks(monkeypatch, tmp_path, PASSES)
    assert "1 passed" in capsys.readouterr().out


def test_ctrl_c_leaves_a_report_and_no_process(tmp_path):
    process = start("selftest", "--folder", "runs", "--only", "gloo", cwd=tmp_path)
    wait_for(lambda: [*tmp_path.glob("runs/selftest-*/gloo/logs/*.log")], process, "the check's process")
    os.kill(process.pid, signal.SIGINT)
    said = finish(process, deadline_s=60)
    assert process.returncode == 130, said
    assert "1 not reached (interrupted)" in said and "selftest.txt" in said
    (written,) = tmp_path.glob("runs/selftest-*/selftest.txt")
    assert "environment" in written.read_text()
    assert_nothing_left(tmp_path)
