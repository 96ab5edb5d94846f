"""Messages with deadlines, against the Connection of the other end."""

import os
import threading
import time
from multiprocessing import Pipe

import pytest

from rollout.pipe import HEADER, LARGEST_ANSWER, receive, send


@pytest.fixture
def pipe():
    ours, theirs = Pipe()
    os.set_blocking(ours.fileno(), False)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [0, 1, 2**14 + 1, LARGEST_ANSWER])
def test_a_message_arrives_whole_in_either_direction(pipe, size):
    ours, theirs = pipe
    content, echoed = (
        os.urandom(size),
        threading.Thread(target=lambda: theirs.send_bytes(theirs.recv_bytes())),
    )
    echoed.start()
    send(ours, content, time.monotonic() + 60)
    assert receive(ours, time.monotonic() + 60) == content
    echoed.join()


def test_a_deadline_holds_at_each_place(pipe):
    ours, theirs = pipe
    with pytest.raises(TimeoutError):
        receive(ours, time.monotonic())
    os.write(theirs.fileno(), HEADER.pack(2) + b"a")
    with pytest.raises(TimeoutError):
        receive(ours, time.monotonic() + 0.1)
    with pytest.raises(TimeoutError):  # nobody reads
        send(ours, bytes(LARGEST_ANSWER), time.monotonic() + 0.1)


@pytest.mark.parametrize("size", [-1, LARGEST_ANSWER + 1])
def test_a_size_that_no_answer_has_is_no_message(pipe, size):
    ours, theirs = pipe
    os.write(theirs.fileno(), HEADER.pack(size))
    with pytest.raises(ValueError, match=f"a message of {size} bytes"):
        receive(ours, time.monotonic() + 60)


def test_the_end_of_the_other_process_is_told(pipe):
    ours, theirs = pipe
    theirs.close()
    with pytest.raises(EOFError):
        receive(ours, time.monotonic() + 60)
    with pytest.raises(BrokenPipeError):
        send(ours, b"a", time.monotonic() + 60)
