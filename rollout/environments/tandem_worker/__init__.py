"""The code in an environment's process. ``environment.python`` (3.9 or newer) runs this folder, so it imports only the
standard library and nothing else of Tandem. Imports are relative, and the folder's name is one that no module of the
user has.

::

    ProcessPool (processes.py) ── stdin, stdout ──> guard ── fork ──> server
                                                    kills the server and all that it started,     imports the environment;
                                                    once our end of the pipe closes               one JSON line in, one out

guard.py        the two processes, and the end of what they started
server.py       requests and answers
interfaces.py   the environment, by its interface; wrong forms are named with their line
tool_schemas.py JSON schemas of functions
failures.py     errors in one line, with the user's line
imports.py      imports the user's modules
template.py     imports a Python agent's modules once, and forks agents

Requests, in this order: ``start`` once, then episodes (``reset``, any number of ``step``, ``end``), then ``close``.
An answer is ``{"ok": ...}`` or ``{"error": {"kind": ..., "message": ...}}``, where kind is

start     the environment cannot be made
raised    the user's code raised
unusable  it returned something of a wrong form
reward    its reward is not a finite number

What the user prints goes to the error stream. Nothing is unpickled.

With a command as arguments, this folder runs as the guard of that command instead, which is an agent
(``agent_process.py``). With ``--template`` it forks agents.
"""
