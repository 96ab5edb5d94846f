"""Bytes that other processes copy out of this one's memory; and ends that die, stall, come late or are a stranger's."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.sglang_plugin import tandem_process_memory as memory
from rollout.sglang_plugin.tandem_process_memory import Meeting, Receiving, Sending
from rollout.sglang_plugin.tandem_weight_transfer import RunningHash, weight_hash

FORK = multiprocessing.get_context("fork")
SIZES = [1, 7, memory.PART_BYTES, memory.PART_BYTES + 1, 3 * memory.PART_BYTES + 5, 64, 2]
TIMEOUT_S, PROMPTLY_S = 60.0, 15.0


def nothing() -> None: ...


def flats() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        yield torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


@contextmanager
def receivers(count: int, target, meeting: Meeting, *arguments) -> Iterator[list]:
    """Processes, and what each says at its end."""
    talks = [FORK.Pipe(duplex=False) for _ in range(count)]
    processes = [
        FORK.Process(target=target, args=(meeting, said, *arguments), daemon=True) for _, said in talks
    ]
    for process, (_, said) in zip(processes, talks, strict=True):
        process.start()
        said.close()
    try:
        yield [(process, heard) for process, (heard, _) in zip(processes, talks, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive_all(meeting: Meeting, said) -> None:
    """Says the hashes of what is there after it was copied."""
    torch.set_num_threads(1)  # a forked process has none of torch's others
    hashes = []
    with closing(Receiving(meeting)) as receiving:
        for size in SIZES:
            flat = torch.zeros(size, dtype=torch.uint8)
            running = RunningHash(flat, "xxh3")
            receiving.receive(flat.split(memory.PART_BYTES), running.add)
            assert int(running.digest()) == int(weight_hash(flat, "xxh3"))
            hashes.append(int(running.digest()))
    said.send(hashes)


def receive_one(meeting: Meeting, said) -> None:
    with closing(Receiving(meeting)) as receiving:
        receiving.receive([torch.zeros(SIZES[0], dtype=torch.uint8)], lambda part: None)
        said.send("one")
        time.sleep(2 * TIMEOUT_S)


@pytest.mark.parametrize("count", [1, 3])
def test_every_receiver_gets_every_byte_though_memory_is_used_again(count):
    """The content of a buffer changes as soon as the sender may."""
    with closing(Sending(count, TIMEOUT_S)) as sending:
        buffers = [torch.zeros(max(SIZES), dtype=torch.uint8) for _ in range(2)]
        with receivers(count, receive_all, sending.meeting) as all_of_them:
            for number, flat in enumerate(flats()):
                buffer = buffers[number % 2][: flat.numel()]
                buffer.copy_(flat)
                sending.offer(buffer, nothing)
                sending.wait_for_all_but(1, nothing)
            sending.wait_for_all_but(0, nothing)
            wanted = [int(weight_hash(flat, "xxh3")) for flat in flats()]
            assert [heard.recv() for _, heard in all_of_them] == [wanted] * count


def test_a_sender_that_is_slower_than_its_receivers_waits_for_nothing():
    """The offer of the second bucket hears that the first is taken."""

    def check() -> None:
        raise AssertionError("there is nothing to wait for")

    with closing(Sending(1, TIMEOUT_S)) as sending:
        with receivers(1, receive_one, sending.meeting) as [(_, heard)]:
            sending.offer(next(flats()), nothing)
            while not sending._taken:
                sending._look(TIMEOUT_S, nothing)  # it comes
            assert heard.recv() == "one"
            sending.offer(torch.zeros(5, dtype=torch.uint8), nothing)
            sending.wait_for_all_but(1, check)


@pytest.mark.parametrize("way", ["dies", "stalls", "is asked of"])
def test_a_receiver_that_takes_no_more_ends_the_wait(way):
    """By its end, by the deadline, or by its HTTP answer, whichever comes first."""
    asked = []

    def check() -> None:
        asked.append(time.monotonic())
        if way == "is asked of":
            raise PermissionError("it has refused")

    with closing(Sending(2, 1.0 if way == "stalls" else TIMEOUT_S)) as sending:
        with receivers(2, receive_one, sending.meeting) as both:
            sending.offer(next(flats()), nothing)
            sending.wait_for_all_but(0, nothing)
            started, second = time.monotonic(), torch.zeros(5, dtype=torch.uint8)
            if way == "dies":
                os.kill(both[1][0].pid, signal.SIGKILL)
                both[1][0].join()
            error = {"dies": ConnectionError, "stalls": TimeoutError, "is asked of": PermissionError}[way]
            with pytest.raises(error, match=r"has left the transfer|in 1 s|has refused"):
                sending.offer(second, check)
                sending.wait_for_all_but(0, check)
            assert time.monotonic() - started < PROMPTLY_S
            assert len(asked) < 20 * (time.monotonic() - started) + 10, "it sleeps in between"


def test_a_server_that_never_comes_ends_the_wait_for_it():
    with closing(Sending(1, 0.3)) as sending:
        sending.offer(torch.zeros(3, dtype=torch.uint8), nothing)
        with pytest.raises(TimeoutError, match=r"did not take weights in 0\.3 s"):
            sending.wait_for_all_but(0, nothing)


def offer_one(names) -> None:
    sending = Sending(1, TIMEOUT_S)
    names.send(sending.meeting)
    sending.offer(torch.zeros(SIZES[0], dtype=torch.uint8), nothing)
    sending.wait_for_all_but(0, nothing)
    names.send("taken")
    time.sleep(2 * TIMEOUT_S)


def test_a_sender_that_is_killed_is_seen_at_once_and_leaves_nothing():
    heard, names = FORK.Pipe(duplex=False)
    sender = FORK.Process(target=offer_one, args=(names,), daemon=True)
    sender.start()
    meeting = heard.recv()
    with closing(Receiving(meeting)) as receiving:
        flat = torch.ones(SIZES[0], dtype=torch.uint8)
        receiving.receive([flat], lambda part: None)
        assert heard.recv() == "taken" and flat.item() == 0
        killing = threading.Timer(0.2, sender.kill)
        killing.start()
        started = time.monotonic()
        with pytest.raises(ConnectionError, match="the learner has left the transfer"):
            receiving.receive([flat], lambda part: None)
        assert time.monotonic() - started < PROMPTLY_S
        killing.join()
    sender.join()
    assert meeting.name not in Path("/proc/net/unix").read_text()
    with pytest.raises(ConnectionRefusedError):
        Receiving(meeting)


def test_a_receiver_that_comes_for_a_transfer_that_is_over_finds_nobody():
    with closing(Sending(1, TIMEOUT_S)) as sending:
        meeting = sending.meeting
    with closing(Sending(1, TIMEOUT_S)), pytest.raises(ConnectionRefusedError):
        Receiving(meeting)


def test_other_sizes_than_announced_are_refused_before_anything_is_copied():
    with closing(Sending(1, TIMEOUT_S)) as sending:
        sending.offer(torch.zeros(4, dtype=torch.uint8), nothing)
        with closing(Receiving(sending.meeting)) as receiving:
            sending._look(1.0, nothing)
            flat = torch.ones(5, dtype=torch.uint8)
            with pytest.raises(ConnectionError, match="offers 4 bytes, but 5 are due"):
                receiving.receive([flat], lambda part: None)
            assert flat.tolist() == [1] * 5


def come_as_a_stranger(meeting: Meeting, said) -> None:
    os.setgid(65534)
    os.setuid(65534)
    with pytest.raises(PermissionError, match="belongs to user 0, not 65534"):
        Receiving(meeting)
    said.send("refused the sender")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_on_both_sides():
    with closing(Sending(1, 0.5)) as sending, receivers(1, come_as_a_stranger, sending.meeting) as strangers:
        assert strangers[0][1].recv() == "refused the sender"
        sending.offer(torch.zeros(3, dtype=torch.uint8), nothing)
        with pytest.raises(TimeoutError):
            sending.wait_for_all_but(0, nothing)
        assert sending._taken == {}


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(OSError, match="the learner's memory cannot be read: Bad address"):
        memory.read_memory(os.getpid(), 4096, torch.zeros(8, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("scope", "may"), [(None, True), ("0", True), ("2", False), ("3", False), ("?", False)]
)
def test_what_the_machine_allows_is_found_before_anything_is_sent(monkeypatch, tmp_path, scope, may):
    yama = tmp_path / "ptrace_scope"
    if scope is not None:
        yama.write_text(f"{scope}\n")
    monkeypatch.setattr(memory, "YAMA", yama)
    assert memory.let_others_read() == may


def test_a_container_that_forbids_the_system_call_is_found(monkeypatch):
    def forbidden(*arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(memory, "read_memory", forbidden)
    assert not memory.let_others_read()
