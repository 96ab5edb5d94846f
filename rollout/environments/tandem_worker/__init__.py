"""What runs in an environment's process. The standard library alone: ``environment.python`` (3.9 or newer) runs this
folder, which may not import another one of Tandem. Imports are relative, and the folder's name is one that no module of
the user's has.

::

    ProcessPool (processes.py) ── stdin, stdout ──> guard ── fork ──> server
                                                    kills the server and all that it started,     imports the environment;
                                                    once our end of the pipe closes               one JSON line in, one out

guard.py        the two processes, and the end of what they started
server.py       requests and answers
interfaces.py   the environment, by its interface; wrong forms are named with their line
tool_schemas.py JSON schemas of functions
failures.py     errors in one line, with the user's line
imports.py      modules of the user's
template.py     forks a Python agent behind the modules that it imports

Requests, in this order: ``start`` once, then episodes (``reset``, any number of ``step``, ``end``), then ``close``.
An answer is ``{"ok": ...}`` or ``{"error": {"kind": ..., "message": ...}}``, where kind is

start     the environment cannot be made
raised    the user's code raised
unusable  it returned something of a wrong form
reward    its reward is no finite number

What the user prints goes to the error stream. Nothing is unpickled.

With a command as arguments this folder is the guard of that command instead, which an agent is (``agent_process.py``);
with ``--template`` it forks agents.
"""
