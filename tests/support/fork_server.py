"""The server of ``megatron_workers.forked_context`` imports this module. ``imported_for_good`` keeps all that is imported out
of garbage collections. Otherwise the first collection of each fork would copy its pages: a quarter of a rank's CPU time."""

from launch.processes.imports import imported_for_good

with imported_for_good():
    import tests.support.megatron_workers  # noqa: F401
