"""A plugin of SGLang (entry point group ``sglang.srt.plugins``).

``rollout/servers/command.py`` puts this folder on a server's path, where SGLang finds the entry point in
``tandem_sglang-1.dist-info``. Each process of SGLang loads it before it starts another one. Without it
(``rollout.sglang_plugin: false``) a server is unmodified SGLang.

- The learner's weights are received in the parameters, and hashed: ``tandem_weight_receiver.py``.
- Routed experts are captured on CPU too, and returned in few bytes: ``tandem_routed_experts.py``.
- Gemma 3's embeddings are multiplied by a rounded number: ``tandem_gemma3.py``.
- Stop texts are searched for only after tokens that can complete one: ``tandem_stop_texts.py``.
- Megatron is not imported.

Only on CPU servers:

- Forked processes: SGLang spawns its scheduler and its detokenizer, so each of them imports SGLang, torch and
  transformers again. Forked processes share the imports of the server process, which saves time and memory. (A forked
  process could not use CUDA.)
- The server process imports without garbage collections (``tandem_launch_server.py``), and the forked processes
  leave its objects out of theirs: modules stay, and every collection would look at all of them again.
- Batched attention: ``tandem_batched_attention.py``.
- Latent attention (MLA), which SGLang computes wrongly there: ``tandem_latent_attention.py``.
- Gated delta nets (linear attention), for which SGLang's only CPU kernels need AMX: ``tandem_linear_attention.py``.
- gpt-oss, which SGLang refuses there: ``tandem_gpt_oss.py``.
- Equal prompts of one prefill are computed once: ``tandem_shared_prompts.py``.
- With ``model.numerics: aligned``, the learner's operations: ``tandem_aligned.py``.
- A server without a warm-up sends itself a request to leave its objects out of garbage collections. Here it does so once it
  listens. SGLang does so at once, which mostly fails, with a traceback in the log.
- A paused scheduler sleeps. SGLang's polls for requests and keeps a core busy that the learner needs to send weights.
"""

import gc
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)
FORKED = "tandem: processes of this server are forked, not spawned"
BATCHED = "tandem: attention is batched over sequences"
LISTENS_WITHIN_S = 30.0


def register() -> None:
    import tandem_gemma3
    import tandem_routed_experts
    import tandem_stop_texts
    import tandem_weight_receiver

    # If it is installed, SGLang's debug dumper imports it, for 0.4 CPU seconds of every scheduler.
    sys.modules.setdefault("megatron", None)  # pyright: ignore[reportArgumentType] - None means: there is no such module
    on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    tandem_weight_receiver.register()
    tandem_routed_experts.register(on_cpu=on_cpu)
    tandem_gemma3.register()
    tandem_stop_texts.register()
    if on_cpu:
        register_for_cpu()


def register_for_cpu() -> None:
    import tandem_gpt_oss
    import tandem_latent_attention
    import tandem_linear_attention
    import tandem_shared_prompts
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if (pieces := aligned_pieces()) is not None:
        import tandem_aligned

        tandem_aligned.register(pieces)
    register_attention_backend("torch_native")(batched_attention)
    tandem_gpt_oss.register(batched_attention)
    tandem_latent_attention.register()
    tandem_linear_attention.register()
    tandem_shared_prompts.register()
    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config", fork_processes, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
        sleep_until_a_request,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup", when_it_listens, HookType.AROUND
    )


def batched_attention(runner):
    from tandem_batched_attention import make_backend
    from tandem_linear_attention import replace_kernels_of_triton

    logger.info(BATCHED)
    replace_kernels_of_triton()
    if runner.use_mla_backend:
        from tandem_latent_attention import compute_in_latent_space

        compute_in_latent_space()
    if aligned_pieces() is not None:
        from tandem_aligned import attention

        return make_backend(runner, attention)
    return make_backend(runner)


def aligned_pieces() -> int | None:
    """``RunConfig.numerics_pieces`` from the environment, where it is written as ``aligned:2``. None: SGLang's own operations."""
    mode, _, pieces = os.environ.get("TANDEM_NUMERICS", "").partition(":")
    return int(pieces) if mode == "aligned" else None


def fork_processes(result: object, *args: object, **kwargs: object) -> object:
    """After SGLang has chosen to spawn: fork, unless this process has other threads. A fork would leave locks that
    they hold locked forever."""
    gc.freeze()
    gc.enable()
    if threading.active_count() == 1:
        multiprocessing.set_start_method("fork", force=True)
        logger.info(FORKED)
    return result


def when_it_listens(freeze: Callable, server_args) -> None:
    """Calls ``freeze`` once the server listens. Runs in a thread of the server process, which starts before its HTTP server."""
    deadline = time.monotonic() + LISTENS_WITHIN_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((server_args.host, server_args.port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    freeze(server_args)


def sleep_until_a_request(result: object, scheduler) -> None:
    """Once per turn of a paused scheduler's loop: wait for a request as an idle scheduler does, at most a second.
    Of several tensor-parallel ranks the first waits, and the others wait for the requests that it passes on."""
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.poller.poll(1000)
