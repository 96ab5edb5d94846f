"""Spans of time of every process of a run, on one clock: recorded, read, and merged into one Chrome trace.

recorder.py   a process writes its spans, a line each, into RUN/trace/
reading.py    the spans of all processes of a run folder, and their Chrome trace
parts.py      the parts of a step by role, and the rest of its wall time
"""

from tracing.recorder import Recorder, Span, at_step, install, laps, span

__all__ = ["Recorder", "Span", "at_step", "install", "laps", "span"]
