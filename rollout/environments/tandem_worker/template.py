"""The template of a Python agent's processes: it imports the agent's modules once, and forks.

::

    AgentTemplate (agent_template.py) ── socket ──> template ── fork ──> guard ── fork ──> the agent's script
      one line: ready, or an error                  imports modules        ends as any guard; its exit code goes
      per agent: JSON and four descriptors          once                   into a pipe

A fork of a process without threads is exact; modules that start some are refused.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading

from .failures import describe
from .guard import leave_to_the_user, under_guard

DESCRIPTORS = 5
"""The request, the agent's standard streams, and the pipe for its exit code."""


def main(control, script, *modules):
    """Serve forks. -> the request, in the process of an agent; the template itself never returns."""
    connection = socket.socket(fileno=int(control))
    os.dup2(2, 1)  # what modules print
    sys.path.insert(0, os.path.dirname(script))
    answer = import_all(modules)
    connection.send(json.dumps(answer).encode())
    if "error" in answer:
        os._exit(1)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    signal.signal(signal.SIGCHLD, reap)
    while True:
        word, descriptors, _, _ = socket.recv_fds(connection, 16, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not word:  # the sample role has ended
            os._exit(0)
        try:
            pid = os.fork()
            reply = {"pid": pid}
        except OSError as error:
            pid, reply = -1, {"error": str(error)}
        if pid == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return begin(script, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(reply).encode())


def reap(number, frame):
    """Reap guards that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def import_all(modules):
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:  # a module may raise anything, or call exit()
            return {"error": f"importing {module} raised {describe(error)}"}
        others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        if others:
            return {
                "error": f"importing {module} starts threads ({', '.join(others)}), which a fork would lose"
            }
    return {}


def begin(script, request, stdin, stdout, stderr, status):
    """Run the guard, and the agent below it. -> the agent's request, only in the agent's process."""
    os.setsid()
    for descriptor, number in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with os.fdopen(request, "rb") as file:
        file.seek(0)
        content = json.load(file)
    code = under_guard()
    if code is not None:
        os.write(status, b"%d" % code)
        os._exit(code)
    os.close(status)
    leave_to_the_user()
    return {"script": script, **content}


def run(request):
    """Run the script as ``python script`` does. The interpreter then ends as usual."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = [request["script"], *request["arguments"]]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue] - a TextIOWrapper
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    runpy.run_path(request["script"], run_name="__main__")
