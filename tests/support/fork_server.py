"""What the server of ``megatron_workers.forked_context`` imports. Its forks would copy every page of it at their first garbage
collection, which looks at all that was imported: a quarter of a rank's CPU time."""

from launch.processes.imports import imported_for_good

with imported_for_good():
    import tests.support.megatron_workers  # noqa: F401
