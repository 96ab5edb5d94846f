"""A plugin of SGLang for its CPU servers (entry point group ``sglang.srt.plugins``).

``rollout/servers/command.py`` puts this folder on a CPU server's path, where SGLang finds the entry point in
``tandem_sglang-1.dist-info``. SGLang loads it in each of its processes before it starts another one.

Forked processes: SGLang spawns its scheduler and its detokenizer, so each of them imports SGLang, torch and
transformers again. Forked, they share the imports of the server process, in time and in memory. CUDA cannot be
used in a forked process, so this is for CPU servers only.
"""

import logging
import multiprocessing
import threading

logger = logging.getLogger(__name__)
FORKED = "tandem: processes of this server are forked, not spawned"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", fork_processes, HookType.AFTER
    )


def fork_processes(result: object, *args: object, **kwargs: object) -> object:
    """After SGLang has chosen to spawn: fork, unless this process has other threads, whose locks a fork would
    leave locked for ever."""
    if threading.active_count() == 1:
        multiprocessing.set_start_method("fork", force=True)
        logger.info(FORKED)
    return result
