"""The supervisor's and the learner rank's side of a stop, between real processes; learner and servers here
are a few lines of Python."""

import errno
import io
import os
import signal
import sys
import textwrap
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException, _terminate_process_handler

from launch.processes import stopping
from launch.processes.run_folder import RunFolder, read_lives, write_json
from launch.processes.stopping import (
    Finished,
    Stopped,
    StopSignals,
    ending,
    read_stopped,
    request_stop,
    stop_reason,
    wait_for_learner,
)
from launch.processes.supervisor import Interrupted, Role, RoleFailed, Supervisor
from parallel.checkpoints import files
from parallel.checkpoints.files import write_manifest

LEARNER = """
    import os, signal, sys, time
    from pathlib import Path
    from launch.processes.run_folder import RunFolder
    from launch.processes.stopping import StopListener, Stopped, report_stopped
    folder = RunFolder(Path({path!r}))
    listener = StopListener(folder, is_first_rank=True)
    deadline = time.monotonic() + 60

    def wait_until(condition):
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def stop(step=3):
        wait_until(listener.reason)
        report_stopped(folder, Stopped(step=step, reason=listener.reason()))

    def supervisor(number):
        os.kill(os.getppid(), number)

    def ready():
        folder.announce("learn", {{}})

"""
IDLE = "import time; time.sleep(300)"


@pytest.fixture(autouse=True)
def interruptible():
    """A shell starts its background jobs, such as a whole test run, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.claim()
    return found


def role(folder: RunFolder, name: str, code: str) -> Role:
    return Role(
        name=name, command=[sys.executable, "-c", textwrap.dedent(code)], log=folder.logs / f"{name}.log"
    )


def supervise(folder: RunFolder, learner: str, serve: str = IDLE, *, timeout_s: float = 60.0):
    code = textwrap.dedent(LEARNER.format(path=str(folder.path))) + textwrap.dedent(learner)
    with (
        Supervisor(grace_s=5, ending=ending(folder)) as supervisor,
        StopSignals(folder, supervisor) as signals,
    ):
        supervisor.start(role(folder, "serve", serve))
        supervisor.start(role(folder, "learn", code))
        return wait_for_learner(supervisor, signals, timeout_s=timeout_s)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_the_learner_ends_by_itself(folder, number, capsys):
    before = signal.getsignal(number)
    outcome = supervise(folder, f"ready(); supervisor({int(number)}); stop()")
    assert outcome == Stopped(step=3, reason=number.name)
    assert f"stopping ({number.name})" in capsys.readouterr().out
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.ENOSPC, "free space"), (errno.EROFS, "make the folder writable")]
)
def test_a_request_that_cannot_be_written_is_written_once_it_can(folder, monkeypatch, capsys, number, fix):
    answers = [OSError(number, os.strerror(number))] * 3

    def write_where_possible(path: Path, content: dict) -> None:
        if answers:
            raise answers.pop()
        write_json(path, content)

    monkeypatch.setattr(stopping, "write_json", write_where_possible)
    outcome = supervise(folder, "ready(); supervisor(signal.SIGTERM); stop()")
    assert outcome == Stopped(step=3, reason="SIGTERM") and not answers
    told = f"the request cannot be written into {folder.roles} ({os.strerror(number)}); {fix}: "
    assert capsys.readouterr().out.count(told) == 1


@pytest.mark.parametrize(
    "learner", ["ready()", "ready(); supervisor(signal.SIGUSR1); wait_until(listener.reason)"]
)
def test_a_run_that_ends_by_itself_is_finished_whether_or_not_it_was_to_stop(folder, learner):
    assert supervise(folder, learner) == Finished()


def gone_reader() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def closed_terminal() -> int:
    terminal, ours = os.openpty()
    os.close(terminal)
    return ours


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize(
    ("stream", "number"),
    [(gone_reader, errno.EPIPE), (closed_terminal, errno.EIO), (full_disk, errno.ENOSPC)],
)
def test_a_stop_that_nobody_hears_keeps_the_last_step_all_the_same(folder, monkeypatch, stream, number):
    with open(stream(), "wb", buffering=0) as file:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(file, write_through=True))
            with pytest.raises(OSError) as raised:
                print("a line", file=getattr(sys, name), flush=True)
            assert raised.value.errno == number, "what this stream is here to do"
        outcome = supervise(folder, "ready(); supervisor(signal.SIGUSR1); stop()")
        for heard_by_nobody in (sys.stdout, sys.stderr):  # the results, or why a job is requeued
            print("a line after the end", file=heard_by_nobody, flush=True)
        monkeypatch.undo()
    assert outcome == Stopped(step=3, reason="SIGUSR1")


SAMPLER = """
    import os, signal, time
    from pathlib import Path
    lives = Path({path!r}) / "lives"
    lives.write_text(lives.read_text() + "x")
    if len(lives.read_text()) <= {ends}:
        while not Path({path!r}, "roles", "learn.json").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
"""


@pytest.mark.parametrize(("ends", "restarts"), [(2, 2), (3, 2), (1, 0)])
def test_a_sample_role_that_ends_is_started_again_as_often_as_it_may_be(folder, capsys, ends, restarts):
    until = f"ready(); wait_until(lambda: listener.reason() or len(Path({str(folder.path)!r}, 'lives').read_text()) > {ends})"
    learner = f"{until}; stop() if listener.reason() else None"
    (folder.path / "lives").write_text("")  # the learner may read it before the sample role has begun
    code = textwrap.dedent(LEARNER.format(path=str(folder.path))) + learner
    with (
        Supervisor(grace_s=5, ending=ending(folder)) as supervisor,
        StopSignals(folder, supervisor) as signals,
    ):
        supervisor.start(role(folder, "sample", SAMPLER.format(path=str(folder.path), ends=ends)))
        supervisor.start(role(folder, "learn", code))
        wait = partial(wait_for_learner, supervisor, signals, timeout_s=60.0, sampler_restarts=restarts)
        if ends <= restarts:
            assert wait() == Finished()
        else:
            with pytest.raises(
                RoleFailed, match=r"the sample role ended with signal SIGKILL(.*\n)*.*learner did not fail"
            ):
                wait()
    said = capsys.readouterr().out
    assert said.count("restarted (") == min(ends, restarts)
    assert (folder.path / "lives").read_text() == "x" * (min(ends, restarts) + 1)


def test_a_sample_role_that_was_ready_is_started_again_also_while_the_learner_starts(folder):
    sampler = """
        import os, signal, time
        from pathlib import Path
        from launch.processes.run_folder import RunFolder
        folder = RunFolder(Path({path!r}))
        is_first = not (folder.path / "first").exists()
        (folder.path / "first").touch()
        folder.announce("sample", {{"pid": os.getpid()}})
        while is_first and not (folder.path / "seen").exists():
            time.sleep(0.02)
        if is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
    """
    waits = """
        wait_until(lambda: folder.read_address("sample") is not None)
        first = folder.read_address("sample")
        (folder.path / "seen").touch()
        wait_until(lambda: folder.read_address("sample") not in (None, first))
    """
    learner = textwrap.dedent(LEARNER.format(path=str(folder.path))) + textwrap.dedent(waits)
    with (
        Supervisor(grace_s=5, ending=ending(folder)) as supervisor,
        StopSignals(folder, supervisor) as signals,
    ):
        supervisor.start(role(folder, "sample", sampler.format(path=str(folder.path))))
        supervisor.start(role(folder, "learn", learner))
        assert wait_for_learner(supervisor, signals, timeout_s=60.0, sampler_restarts=1) == Finished()


def test_a_sample_role_that_fails_as_it_starts_is_not_started_again(folder):
    with (
        Supervisor(grace_s=5, ending=ending(folder)) as supervisor,
        StopSignals(folder, supervisor) as signals,
    ):
        supervisor.start(role(folder, "sample", "import sys; sys.exit(3)"))
        supervisor.start(role(folder, "learn", IDLE))
        with pytest.raises(RoleFailed, match="the sample role ended with exit code 3"):
            wait_for_learner(supervisor, signals, timeout_s=60.0, sampler_restarts=9)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_while_the_learner_starts_a_signal_ends_everything(folder, number):
    with pytest.raises(Interrupted):
        supervise(folder, f"supervisor({int(number)}); time.sleep(300)")
    assert stop_reason(folder) is None


def test_the_second_sigterm_ends_everything(folder):
    with pytest.raises(Interrupted):
        supervise(
            folder,
            "ready(); supervisor(signal.SIGTERM); wait_until(listener.reason); supervisor(signal.SIGTERM); time.sleep(300)",
        )
    assert read_stopped(folder) is None


def test_sigusr1_as_often_as_it_comes_is_one_request(folder):
    first = "ready(); supervisor(signal.SIGUSR1); wait_until(listener.reason); "
    assert supervise(
        folder, first + "supervisor(signal.SIGUSR1); supervisor(signal.SIGTERM); stop(7)"
    ) == Stopped(step=7, reason="SIGUSR1")


def test_a_learner_that_does_not_stop_in_time_is_ended(folder):
    with pytest.raises(Interrupted):
        supervise(folder, "ready(); supervisor(signal.SIGTERM); time.sleep(300)", timeout_s=1.0)


def test_anybody_may_ask_through_the_folder(folder):
    asked = "ready(); folder.announce('stop', {'reason': 'a person'}); stop()"
    assert supervise(folder, asked) == Stopped(step=3, reason="a person")


def test_a_learner_that_torchrun_says_has_failed_has_stopped_if_it_says_so(folder):
    """Slurm sends SIGTERM to torchrun too, whose own exit code is then 1."""
    assert supervise(folder, "ready(); supervisor(signal.SIGTERM); stop(); sys.exit(1)") == Stopped(
        step=3, reason="SIGTERM"
    )


def test_a_learner_that_fails_after_the_request_has_failed(folder):
    with pytest.raises(RoleFailed, match="the learn role ended with exit code 5"):
        supervise(folder, "ready(); supervisor(signal.SIGTERM); wait_until(listener.reason); sys.exit(5)")


def test_where_a_server_dies_the_learner_saves_its_last_step_and_the_server_is_named(folder):
    dies = f"""
        import sys, time
        from pathlib import Path
        deadline = time.monotonic() + 60
        while not Path({str(folder.address("learn"))!r}).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        sys.exit("out of memory")
    """
    with pytest.raises(
        RoleFailed, match=r"(?s)the serve role ended with exit code 1.*out of memory.*checkpoint of step 3"
    ):
        supervise(folder, "ready(); stop()", dies)
    assert stop_reason(folder) == "the serve role ended with exit code 1"


def test_a_learner_that_has_lost_a_server_is_not_named_in_its_place(folder, monkeypatch):
    """It may end before the serve role, which looks twice a second, has found its server dead."""
    check = Supervisor.check

    def seen(*args, **named):
        try:
            check(*args, **named)
        except RoleFailed:  # the learner's: the serve role waits for this
            (folder.path / "seen").touch()
            raise

    monkeypatch.setattr(Supervisor, "check", seen)
    dies = f"""
        import sys, time
        from pathlib import Path
        deadline = time.monotonic() + 60
        while not Path({str(folder.path / "seen")!r}).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        sys.exit("SGLang replica 0 (pid 7) was killed by SIGKILL")
    """
    learner = "ready(); folder.error('learn').write_text('ControlError: refused'); sys.exit(1)"
    told = r"(?s)the serve role ended with exit code 1.*replica 0 \(pid 7\) was killed.*learner ended because of it: ControlError: refused"
    with pytest.raises(RoleFailed, match=told):
        supervise(folder, learner, dies)


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        ("SamplingError: the rewards of all 8 samples failed", False),
        ("SamplingError: the sample role failed: GenerationError: 3 attempts failed", True),
        ("SamplingError: the sample role failed: KeyError: 'x'", True),
        ("SamplingError: the sample role at tcp://a:1 did not answer NextGroups in 9 s", True),
        ("SampleRoleLost: the sample role is gone", True),
    ],
)
def test_a_cause_is_looked_for_unless_the_sample_role_runs_and_has_said_what_is_wrong(
    folder, monkeypatch, error, is_loss
):
    monkeypatch.setattr(stopping, "CAUSE_TIMEOUT_S", 0.05)
    folder.roles.mkdir(exist_ok=True)
    folder.error("learn").write_text(error)
    supervisor = Mock()
    with pytest.raises(RoleFailed, match="as it was"), stopping._cause_named(supervisor, folder, ["learn"]):
        raise RoleFailed("as it was")
    assert supervisor.check.called == is_loss


AGENT = "ready(); os.kill(os.getpid(), signal.SIGTERM); stop(); {says}; sys.exit(1)"
"""A torchrun and its rank in one: the rank is sent SIGTERM, and stops in good order; then torchrun ends."""


def test_a_torchrun_that_fails_is_not_taken_for_a_request_to_stop(folder):
    with pytest.raises(
        RoleFailed,
        match=r"(?s)the learn role ended with exit code 1.*the store is gone.*checkpoint of step 3",
    ):
        supervise(folder, AGENT.format(says="print('the store is gone', file=sys.stderr)"))


def test_a_rank_may_end_before_it_has_written_its_request(folder):
    says = "report_stopped(folder, Stopped(step=3, reason='SIGTERM to learner rank 0')); sys.exit(1)"
    with pytest.raises(RoleFailed, match=r"(?s)the learn role ended with exit code 1.*checkpoint of step 3"):
        supervise(folder, f"ready(); {says}")


def test_a_torchrun_that_is_told_to_end_passes_a_request_on(folder):
    """By a person, or Slurm. The words are torchrun's own."""
    with pytest.raises(SignalException) as raised:
        _terminate_process_handler(signal.SIGTERM, None)
    assert supervise(folder, AGENT.format(says=f"print({str(raised.value)!r}, file=sys.stderr)")) == Stopped(
        step=3, reason="SIGTERM to learner rank 0"
    )


def test_where_a_server_dies_before_the_learner_is_ready_everything_ends(folder):
    with pytest.raises(RoleFailed, match=r"the serve role ended with exit code 1"):
        supervise(folder, "stop()", "raise SystemExit(1)")
    assert stop_reason(folder) is None


def test_servers_that_got_sigterm_too_do_not_turn_a_stop_into_a_failure(folder):
    leaves = f"""
        import time
        from pathlib import Path
        deadline = time.monotonic() + 60
        while not Path({str(folder.stop_request)!r}).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        Path({str(folder.path / "gone")!r}).touch()
    """
    # Half a second in which the supervisor, which looks every 0.1 s, could take the server's end for a
    # failure.
    learner = "ready(); supervisor(signal.SIGTERM); wait_until(lambda: (folder.path / 'gone').exists()); time.sleep(0.5); stop()"
    assert supervise(folder, learner, leaves) == Stopped(step=3, reason="SIGTERM")


def test_a_rank_takes_sigterm_for_a_request_however_often_it_comes_and_wherever_its_main_thread_is(folder):
    """In a collective the main thread runs no Python: the request must not wait for it. A mutex that is
    locked twice is as deaf."""
    stuck = """
        import ctypes, threading
        libc = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(64)

        def asked_twice():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            wait_until(listener.reason)
            report_stopped(folder, Stopped(step=3, reason=listener.reason()))
            os._exit(0)

        ready()
        libc.pthread_mutex_lock(mutex)
        threading.Timer(0.2, asked_twice).start()
        libc.pthread_mutex_lock(mutex)
    """
    assert supervise(folder, stuck) == Stopped(step=3, reason="SIGTERM to learner rank 0")


@pytest.mark.parametrize("why", ["the supervisor ends everything", "a peer has failed"])
def test_sigterm_ends_a_rank_at_once_where_there_is_nothing_to_wait_for(folder, why):
    peer_failed = "folder.report_error('learn', ValueError())"
    mark = peer_failed if why == "a peer has failed" else f"open({str(ending(folder))!r}, 'w')"
    interrupted = f"""
        ready()
        {mark}
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:
            sys.exit(9)
    """
    with pytest.raises(RoleFailed, match="exit code 9"):
        supervise(folder, interrupted)
    assert stop_reason(folder) is None


def test_the_supervisors_own_end_is_at_once(folder):
    learner = """
        ready()
        try:
            supervisor(signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            open(folder.path / "killed", "w")
    """
    with pytest.raises(Interrupted):
        supervise(folder, learner)
    assert (folder.path / "killed").exists() and stop_reason(folder) is None


def test_a_rank_that_starts_forgets_what_an_earlier_life_was_told(folder):
    request_stop(folder, "yesterday")
    assert supervise(folder, "assert listener.reason() is None; ready()") == Finished()


def test_the_first_request_counts(folder):
    request_stop(folder, "first")
    request_stop(folder, "second")
    assert stop_reason(folder) == "first"


def test_an_attempt_without_a_checkpoint_is_begun_anew_and_its_metrics_are_put_aside(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    folder.claim()
    assert (
        not (tmp_path / "metrics.jsonl").exists()
        and (tmp_path / "metrics.lost.jsonl").read_text() == '{"step": 0}\n'
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    folder._held.pop().close()  # the lock of that attempt, which goes with its process
    whole = tmp_path / "checkpoints" / "step_000001"
    whole.mkdir(parents=True)
    write_manifest(whole, world_size=1)
    folder.claim()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_an_announcement_that_a_shared_folder_does_not_give_at_once_is_read_again(folder, monkeypatch):
    monkeypatch.setattr(files, "READ_AGAIN_S", (0.0, 0.0))
    folder.announce("serve", {"urls": [], "lives": {"http://a:1": 2}})
    read_text, errors = Path.read_text, [errno.ESTALE, errno.EIO]

    def read(path, **named):
        if errors:
            raise OSError(errors.pop(0), "the file system says no")
        return read_text(path, **named)

    monkeypatch.setattr(Path, "read_text", read)
    assert read_lives(folder, ["serve"]) == {"http://a:1": 2}
    errors += [errno.ESTALE] * 3
    with pytest.raises(OSError, match="says no"):
        read_lives(folder, ["serve"])
