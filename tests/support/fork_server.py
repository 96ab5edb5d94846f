"""What the server of ``megatron_workers.forked_context`` imports. Its forks would copy every page of it at their first garbage
collection, which looks at all that was imported: a quarter of a rank's CPU time."""

import gc

gc.disable()
import tests.support.megatron_workers  # noqa: E402, F401

gc.freeze()
gc.enable()
