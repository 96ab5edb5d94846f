"""Environments of messages, sound and broken, for tests. They need only Python 3.9 and the standard library. Texts are
numbers with blanks between them."""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path


def look(key: int) -> str:
    """Look."""
    return str(key)


class Faulty:
    """Two turns; the reward is the first number of the second one. If the first turn begins with a multiple of
    three, ``fault`` happens in its step."""

    def __init__(self, fault="none", folder=None, tools=False):
        self.tools = [look] if tools else []
        self.fault, self.folder, self.turn = fault, folder and Path(folder), 0
        if fault == "start_fails_later" and not self.is_first("start"):
            raise OSError("no licence left")

    def is_first(self, name):
        """Whether no process was here before."""
        try:
            (self.folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def reset(self, problem):
        self.turn = 0
        if self.fault == "hang_in_reset" and self.is_first("hanging"):
            time.sleep(1000)
        if self.fault == "crash_in_reset" and self.is_first("crashed"):
            os._exit(3)
        return [{"role": "user", "content": problem["text"]}]

    def step(self, message):
        self.turn += 1
        first = int(message["content"].split()[0]) if message["content"] else 1
        if self.turn == 2:
            return [], first, True
        fault = getattr(self, self.fault, None)
        returned = fault() if fault is not None and is_faulty(message["content"]) else None
        return returned or ([{"role": "user", "content": "7 8"}], 0.0, False)

    def crash(self):
        os._exit(3)

    def crash_with_daemon(self):
        self.daemon()
        os._exit(3)

    def hang(self):
        (self.folder / "hanging").touch()
        time.sleep(1000)

    def hang_with_daemon(self):
        self.daemon()
        time.sleep(1000)

    def daemon(self):
        """Two forks and a session of its own; a process group, with a shell between; and one that nobody waits for."""
        subprocess.Popen(["sleep", "1000"])
        shell = subprocess.Popen(
            "setsid sleep 1000 & echo $!", shell=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        pids = [int(shell.stdout.readline())]
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(writer, str(os.getpid()).encode())
                while True:
                    time.sleep(1000)
            os._exit(0)
        pids.append(int(os.read(reader, 100)))
        for pid in pids:
            os.kill(pid, 0)  # it runs
            (self.folder / f"daemon-{pid}").touch()

    def poison(self):
        return [], float("nan"), True

    def shout(self):
        return [{"role": "user", "content": "7 " * 4_000_000}], 0.0, False

    def prints(self):
        print("to stdout")
        os.write(1, b"to the descriptor of stdout\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        sys.stdout.write("x" * 1_000_000 + "\n")

    def garbage(self):
        for descriptor in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"7 8\n")

    def raises(self):
        raise KeyError("x")

    def exits(self):
        sys.exit("bye")

    def wrong_shape(self):
        return "7 8"

    def no_json(self):
        return [{"role": "user", "content": "7", "extra": object()}], 0.0, False


class LateTools(Faulty):
    """Chooses its tools in ``reset``."""

    def reset(self, problem):
        self.tools = [look]
        return super().reset(problem)


def is_faulty(text):
    return bool(text) and int(text.split()[0]) % 3 == 0


class FlakyTools:
    """A tool that fails on three of ten keys."""

    def reset(self):
        self.found = 0
        return None

    def lookup(self, key: int) -> str:
        """Look up a key.

        Args:
            key: a number
        """
        if fails(key):
            raise ConnectionError(f"no answer for {key}")
        self.found += 1
        return f"value {key}"

    def reward(self):
        return self.found


def fails(key):
    return random.Random(key).random() < 0.3


class Unscored:
    """Tools without a reward of their own."""

    def reset(self, **row):
        return f" 6 {len(row)}"

    def lookup(self, key: int) -> str:
        """Look up a key."""
        return str(key)


class Echo:
    """A tool that gives its argument back, or fails with it."""

    def reset(self):
        return None

    def echo(self, text: str, fails: bool = False) -> str:
        """Echo."""
        if fails:
            raise ValueError(text)
        return text


class Countdown:
    """In gym's form."""

    def reset(self, text):
        self.left = 2
        return text, {}

    async def step(self, text):
        self.left -= 1
        return "7 8", 0.5, self.left == 0, False, {"parts": {"steps": 1.0}}
