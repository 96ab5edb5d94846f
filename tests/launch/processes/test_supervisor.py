"""No process outlives the supervisor: not a child that ignores SIGTERM, not a grandchild, not after SIGKILL
of the supervisor."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launch.processes.supervisor import Interrupted, Role, RoleFailed, Supervisor
from rollout.servers.watched_process import how_it_ended

DEADLINE_S = 120


@pytest.fixture
def interruptible():
    """A shell starts its background jobs, such as a whole test run, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def role(tmp_path: Path, name: str, code: str) -> Role:
    return Role(
        name=name, command=[sys.executable, "-c", textwrap.dedent(code)], log=tmp_path / f"{name}.log"
    )


def wait_until(condition, what: str):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.02)


def read_pid(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().strip(), f"{file} to appear")
    return int(file.read_text())


STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"])
    open({pid!r} + ".new", "w").write(str(child.pid)); os.rename({pid!r} + ".new", {pid!r})
    time.sleep(300)
"""


def test_stop_ends_stubborn_children_and_grandchildren(tmp_path):
    pid_file = tmp_path / "grandchild"
    with Supervisor(grace_s=0.5) as supervisor:
        supervisor.start(role(tmp_path, "stubborn", STUBBORN.format(pid=str(pid_file))))
        grandchild = read_pid(pid_file)
        assert psutil.pid_exists(grandchild)
    wait_until(lambda: not alive(grandchild), "the grandchild to end")


ORPHANING = """
    import os, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    open({pid!r} + ".new", "w").write(str(child.pid)); os.rename({pid!r} + ".new", {pid!r})
"""


def test_what_a_dead_role_left_in_a_session_of_its_own_is_ended_too(tmp_path):
    pid_file = tmp_path / "orphan"
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(role(tmp_path, "orphaning", ORPHANING.format(pid=str(pid_file))))
            supervisor.wait_until_done("orphaning")
            orphan = read_pid(pid_file)
            assert alive(orphan)
        assert not alive(orphan)
        assert bystander.poll() is None, "a process that the supervisor did not start was ended"
    finally:
        bystander.kill()
        bystander.wait()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_failed_role_is_named_with_the_end_of_its_log(tmp_path):
    with pytest.raises(RoleFailed, match=r"(?s)the broken role ended with exit code 3.*the reason"):
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(role(tmp_path, "idle", "import time; time.sleep(300)"))
            supervisor.start(
                role(tmp_path, "broken", "import sys; print('the reason', file=sys.stderr); sys.exit(3)")
            )
            supervisor.wait_until_done("idle")


def test_a_role_killed_by_a_signal_is_named_with_it(tmp_path):
    with pytest.raises(RoleFailed, match="SIGKILL"):
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(
                role(tmp_path, "killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
            )
            supervisor.wait_until_done("killed")


KILLS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
TORCHRUN_SAYS = "  rank      : 1 (local_rank: 1)\n  exitcode  : {code} (pid: 4711)"
DEATHS = {
    "a role by a signal": (KILLS_ITSELF, None, r"the learn role ended with signal SIGKILL \(its process, pid \d+\)"),
    "torchrun by a signal": ("torchrun" + KILLS_ITSELF, None, r"the learn role ended with signal SIGKILL \(its torchrun, pid \d+\)"),
    "a role by an exception": ("raise SystemExit('out of paper')", None, r"(?s)ended with exit code 1\..*    out of paper"),
    "a role that leaves a word": ("raise SystemExit(1)", "ValueError: no ink", r"ended with exit code 1\.\n    ValueError: no ink\n"),
    "a rank by a signal": (
        f"import sys; print({TORCHRUN_SAYS.format(code=-9)!r}, file=sys.stderr); sys.exit(1)",
        "RuntimeError: Connection closed by peer",
        r"\n    rank 1 of this node \(pid 4711\) was killed by SIGKILL\n    another rank, which lost it, said: RuntimeError",
    ),
    "a rank by an exception": (
        f"import sys; print({TORCHRUN_SAYS.format(code=1)!r}, file=sys.stderr); sys.exit(1)",
        "ValueError: no ink",
        r"ended with exit code 1\.\n    ValueError: no ink\n",
    ),
}  # fmt: skip


BY_TORCHRUN = (
    "W1128 06:41:56.380000 3166 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 4712 closing signal SIGTERM\n"
    "rank 0 lost a peer\nTraceback (most recent call last):\nEOFError\n"
    "E1128 06:41:56.390000 3166 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 1\n"
    "Traceback (most recent call last):\nChildFailedError:\n" + TORCHRUN_SAYS
)
LAST_WORDS = textwrap.indent(
    "a line of a step\nterminate called\nrank 0 lost a peer\nTraceback (most recent call last):\nEOFError\n",
    "    ",
)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by SIGKILL\n"),
        (-6, f"was killed by SIGABRT\n{LAST_WORDS}"),
        (3, f"ended with exit code 3\n{LAST_WORDS}"),
    ],
)
def test_a_lone_rank_that_died_is_told_without_the_lines_of_torchrun(tmp_path, code, words):
    """A killed rank leaves no error. What it and its peers printed tells why, unless it was killed from outside."""
    said = f"a line of a step\nterminate called\n{BY_TORCHRUN.format(code=code)}"
    log = tmp_path / "learn.log"
    command = [sys.executable, "-c", f"import sys; print({said!r}, file=sys.stderr); sys.exit(1)"]
    with pytest.raises(RoleFailed) as failure, Supervisor(grace_s=1) as supervisor:
        supervisor.start(Role(name="learn", command=command, log=log, error=tmp_path / "learn.error"))
        supervisor.wait_until_done("learn")
    told = f"the learn role ended with exit code 1.\n    rank 1 of this node (pid 4711) {words}Its whole log: {log}"
    assert str(failure.value) == told
    assert "ChildFailedError" in log.read_text()


@pytest.mark.parametrize("death", DEATHS)
def test_a_death_is_told_by_process_cause_and_last_words_of_this_life(tmp_path, death):
    """The log goes on from one life of a run to the next: what an earlier one died of is not told again."""
    code, words, told = DEATHS[death]
    log, error = tmp_path / "learn.log", tmp_path / "learn.error"
    log.write_text(
        f"the words of an earlier life\n{TORCHRUN_SAYS.format(code=-11).replace('4711', '1147')}\n"
    )
    if words is not None:
        error.write_text(words)
    flags = ["-m", "launch.roles.rendezvous"] if code.startswith("torchrun") else []
    command = [sys.executable, "-c", code.removeprefix("torchrun"), *flags]
    with pytest.raises(RoleFailed, match=told) as failure, Supervisor(grace_s=1) as supervisor:
        supervisor.start(Role(name="learn", command=command, log=log, error=error))
        supervisor.wait_until_done("learn")
    assert "earlier life" not in str(failure.value) and "1147" not in str(failure.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda error: error.write_bytes(b"no \xff ink"), "no \ufffd ink\n"),
        (os.mkfifo, "learn.error cannot be read (not a regular file)\n"),
    ],
)
def test_an_error_file_that_is_damaged_hides_no_failure(tmp_path, make, told):
    error = tmp_path / "learn.error"
    make(error)
    with pytest.raises(RoleFailed) as failure, Supervisor(grace_s=1) as supervisor:
        command = [sys.executable, "-c", "raise SystemExit(1)"]
        supervisor.start(Role(name="learn", command=command, log=tmp_path / "learn.log", error=error))
        supervisor.wait_until_done("learn")
    assert "the learn role ended with exit code 1.\n" in str(failure.value) and told in str(failure.value)


def test_of_a_log_that_becomes_too_large_the_end_stays_and_the_role_goes_on_behind_it(tmp_path, monkeypatch):
    """Also where an earlier life of the run wrote more than stays."""
    monkeypatch.setattr("launch.processes.supervisor.LARGEST_LOG", 10_000)
    monkeypatch.setattr("launch.processes.supervisor.KEPT_LOG", 1000)
    log = tmp_path / "noisy.log"
    log.write_text(5000 * "e")
    code = f"""
        import os, sys, time
        print(9000 * "x", file=sys.stderr)
        while os.path.getsize({str(log)!r}) > 10_000:
            time.sleep(0.01)
        sys.exit("last words")
    """
    with pytest.raises(RoleFailed, match="last words"), Supervisor(grace_s=1) as supervisor:
        supervisor.start(role(tmp_path, "noisy", code))
        supervisor.wait_until_done("noisy")
    told = b"(13001 bytes before this were dropped: a log has 10000 at most)\n"
    assert log.read_bytes() == told + 999 * b"x" + b"\nlast words\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [("", r"the disk of \S+ is full, so it could not write why"), ("no ink", "no ink\n")],
)
def test_a_role_that_left_no_word_on_a_full_disk_is_told_with_the_cause(tmp_path, monkeypatch, words, told):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4096))
    code = f"import sys; print({words!r}, end=''); sys.exit(1)"
    with pytest.raises(RoleFailed, match=rf"ended with exit code 1\.\n    {told}"):
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(role(tmp_path, "silent", code))
            supervisor.wait_until_done("silent")


LOSES_ITS_PEER = """
    import os, signal, sys, time
    import psutil
    rank, folder = os.environ["LOCAL_RANK"], sys.argv[1]
    open(f"{folder}/{rank}.new", "w").write(str(os.getpid()))
    os.rename(f"{folder}/{rank}.new", f"{folder}/{rank}")
    while len(os.listdir(folder)) < 3:
        time.sleep(0.02)
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == "2":
        time.sleep(300)
    while psutil.Process(int(open(f"{folder}/1").read())).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    sys.exit(1)
"""


def test_a_killed_rank_is_named_where_its_peer_has_ended_before_torchrun_looks(tmp_path):
    """torchrun's first line names the lowest rank of those that it finds ended, and all others get its SIGTERM."""
    program, pids, error = tmp_path / "rank.py", tmp_path / "pids", tmp_path / "learn.error"
    program.write_text(textwrap.dedent(LOSES_ITS_PEER))
    pids.mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    error.write_text("RuntimeError: Connection closed by peer")
    torchrun = [
        sys.executable,
        "-m",
        "launch.roles.rendezvous",
        "--rdzv-backend=tandem",
        "--nproc-per-node=3",
    ]
    command = [*torchrun, "--monitor-interval=3", str(program), str(pids)]
    with pytest.raises(RoleFailed) as failure, Supervisor(grace_s=5) as supervisor:
        log, env = tmp_path / "learn.log", {"TMPDIR": str(temporary)}
        supervisor.start(Role(name="learn", command=command, log=log, error=error, env=env))
        supervisor.wait_until_done("learn")
    assert [*temporary.iterdir()] == [], "torchrun's folder goes with it"
    assert "] failed (exitcode: 1) local_rank: 0" in (tmp_path / "learn.log").read_text()
    killed = f"    rank 1 of this node (pid {(pids / '1').read_text()}) was killed by SIGKILL\n"
    lost = "    another rank, which lost it, said: RuntimeError: Connection closed by peer\n"
    assert killed + lost in str(failure.value) and "rank 2" not in str(failure.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "was killed by SIGKILL"), (139, "was killed by SIGSEGV"), (3, "ended with exit code 3")],
)
def test_how_a_process_ended_in_words(code, words):
    """Above 128 it is what a watchdog, like a shell, makes of its child's signal."""
    assert how_it_ended(code) == words


def test_waiting_has_a_deadline(tmp_path):
    with pytest.raises(RoleFailed, match="waited 0 s for the moon"):
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(role(tmp_path, "idle", "import time; time.sleep(300)"))
            supervisor.wait_for(lambda: False, what="the moon", timeout_s=0.3)


def test_an_interrupt_stops_everything_and_is_reported(tmp_path, interruptible):
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    with pytest.raises(Interrupted):
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(role(tmp_path, "idle", code))
            pid = read_pid(pid_file)
            os.kill(os.getpid(), signal.SIGINT)
            supervisor.wait_until_done("idle")
    assert not alive(pid)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_an_interrupt_that_python_drops_ends_everything_all_the_same(tmp_path, interruptible, number):
    """Python drops what a signal handler raises inside a hook around a fork, such as logging's."""
    armed = [number]
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), armed.pop()) if armed else None)
    with pytest.raises(Interrupted):
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(role(tmp_path, "idle", "import time; time.sleep(20)"))
            assert not armed, "the signal came, and nothing was raised"
            supervisor.wait_until_done("idle")


def test_a_second_interrupt_as_the_end_begins_leaves_no_process(tmp_path, interruptible):
    def interrupt_the_end(frame, event, argument) -> None:
        if event == "call" and frame.f_code is Supervisor.__exit__.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(role(tmp_path, "idle", "import time; time.sleep(300)"))
            (idle,) = supervisor.processes()
            sys.setprofile(interrupt_the_end)
            signal.raise_signal(signal.SIGINT)
    assert sys.getprofile() is None, "the second one came"
    assert not alive(idle.pid)


def test_an_interrupt_as_the_end_of_a_finished_run_begins_leaves_no_process(
    tmp_path, interruptible, monkeypatch
):
    set_handler, armed = signal.signal, [signal.SIGINT]

    def interrupted(number, handler):
        if handler is signal.SIG_IGN and armed:
            signal.raise_signal(armed.pop())
        return set_handler(number, handler)

    with Supervisor(grace_s=1) as supervisor:
        supervisor.start(role(tmp_path, "idle", "import time; time.sleep(300)"))
        (idle,) = supervisor.processes()
        monkeypatch.setattr(signal, "signal", interrupted)
    assert not armed and not alive(idle.pid)


def test_an_interrupt_inside_of_a_poll_does_not_keep_the_end_waiting(tmp_path):
    """The signal's exception can leave Popen.poll with the lock of the process taken: here it is."""
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    began = time.monotonic()
    with Supervisor(grace_s=DEADLINE_S) as supervisor:
        supervisor.start(role(tmp_path, "idle", code))
        pid = read_pid(pid_file)
        assert supervisor._running["idle"].process._waitpid_lock.acquire(blocking=False)
    assert not psutil.pid_exists(pid), "neither runs nor waits to be asked for its exit code"
    assert time.monotonic() - began < DEADLINE_S


LEADER = """
    import multiprocessing, os, subprocess, sys, time
    from pathlib import Path
    from rollout.servers.watched_process import guard_session
    guard_session(timeout_s=60, note=Path({pid!r} + ".stopped"))
    manager = multiprocessing.get_context("spawn").Manager()  # with a resource tracker, as Megatron's writers have
    writer = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    writer.start()
    open({pid!r} + ".new", "w").write(str(os.getpid())); os.rename({pid!r} + ".new", {pid!r})
    time.sleep(300)
"""


def test_what_a_killed_rank_leaves_behind_ends_with_it_though_its_supervisor_is_killed_too(tmp_path):
    """Checkpoint writers, their manager and the resource tracker: none of them asks the kernel to die with
    its parent."""
    pid_file = tmp_path / "pid"
    leader = textwrap.dedent(LEADER.format(pid=str(pid_file)))
    script = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {leader!r}], start_new_session=True)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).resolve().parents[3])
    rank = psutil.Process(read_pid(pid_file))
    left = rank.children(recursive=True)
    assert len(left) >= 4, "the guard, the manager, the resource tracker, the writer"
    owner.kill()
    rank.kill()
    owner.wait(timeout=DEADLINE_S)
    wait_until(lambda: not any(alive(process.pid) for process in left), f"the end of {left}")


@pytest.mark.parametrize("ignored", [False, True])
def test_what_is_started_in_the_background_says_what_ends_it_and_sigterm_does(
    tmp_path, interruptible, capsys, ignored
):
    """By a script's `&`, nohup or cron: Ctrl-C of whatever comes later in that terminal is not for it."""
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(Interrupted), Supervisor(grace_s=1) as supervisor:
        supervisor.start(role(tmp_path, "idle", "import time; time.sleep(300)"))
        if ignored:
            os.kill(os.getpid(), signal.SIGINT)
            assert supervisor.is_running("idle")
        os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGINT)
        supervisor.wait_until_done("idle")
    said = f"started in the background, where Ctrl-C does nothing: `kill {os.getpid()}` ends this run\n"
    assert capsys.readouterr().out == (said if ignored else "")


def test_roles_end_when_the_supervisor_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    script = f"""
        import sys, time
        from pathlib import Path
        from launch.processes.supervisor import Role, Supervisor
        code = "import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
        with Supervisor(grace_s=1) as supervisor:
            supervisor.start(Role(name="idle", command=[sys.executable, "-c", code], log=Path({str(tmp_path / "log")!r})))
            supervisor.wait_until_done("idle")
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).resolve().parents[3]
    )
    pid = read_pid(pid_file)
    owner.kill()
    owner.wait(timeout=DEADLINE_S)
    wait_until(lambda: not alive(pid), "the role to end after its supervisor")
