"""Requests of the sample role, one line of JSON each, and their answers."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys

from .failures import Failure, describe, place_of
from .guard import descendants, end_descendants
from .interfaces import Adapter, MessageAdapter, make_environment


def serve():
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what the user prints
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server, own_pid = Server(), os.getpid()
    while True:
        line = requests.readline()
        if not line:
            return
        answer = server.answer(json.loads(line))
        if os.getpid() != own_pid:  # the user's code forked, and this is the child
            os._exit(0)
        answers.write(answer + b"\n")
        answers.flush()


class Server:
    def __init__(self):
        self.environment: Adapter | None = None
        self.kept, self.largest = frozenset(), 2**20

    def answer(self, request):
        """One line."""
        try:
            content = json_line({"ok": self._do(**request)}, self.environment)
            if len(content) > self.largest:
                what = f"gave {len(content)} bytes, but an answer may have at most {self.largest}"
                raise self._environment().unusable(request["do"], what)
        except Failure as error:
            content = json_line({"error": {"kind": error.kind, "message": str(error)}})
        except BaseException as error:  # the user's code may raise anything, or call exit()
            content = json_line({"error": {"kind": "raised", "message": describe(error)}})
        return content

    def _do(self, do, **arguments):
        if do == "start":
            self.largest = arguments.pop("largest_answer")
            # Writes the current lines on request, even from code that is not Python's.
            faulthandler.register(signal.SIGUSR1, file=arguments.pop("trace"), all_threads=False)
            self.environment = environment = make_environment(**arguments)
            self.kept = frozenset(descendants())
            return {"tools": environment.tools}
        if do == "end":
            end_descendants(self.kept)
            return {}
        environment = self._environment()
        if do == "close":
            return environment.close() or {}
        assert isinstance(environment, MessageAdapter), "one of tokens is played elsewhere"
        if do == "reset":
            messages = environment.reset(arguments["problem"])
            return {"messages": messages, "tools": environment.tools}
        return environment.step(arguments["message"])

    def _environment(self) -> Adapter:
        assert self.environment is not None, "start comes first"
        return self.environment


def json_line(content, environment=None):
    """Raises Failure, with the place of the environment's class."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        place = f" ({place_of(environment.made)})" if environment is not None else ""
        raise Failure(f"answer is not JSON: {error}{place}", "unusable") from error
