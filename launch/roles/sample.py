"""The sample role as its process runs it: groups for the learner, until it sends stop."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine

from configs.schema import RunConfig
from launch.processes import stopping
from launch.processes.addresses import own_address
from launch.processes.placement import serve_roles
from launch.processes.run_folder import RunFolder, wait_for_servers
from parallel.planning.architecture import architecture_of

LOOK_S = 5.0
"""Interval of checks whether this start of the run has ended."""


def sample(folder: RunFolder, config: RunConfig, doing: Callable[[str], None]) -> None:
    """Give groups to the learner until it sends stop."""
    from rollout.guarded_process import remove_abandoned
    from rollout.sampling.role import run_sample_role
    from rollout.tokenization import import_transformers_without_torch

    end = stopping.EndOfStart(folder)
    import_transformers_without_torch()
    remove_abandoned()  # by now the guards have ended all processes that a killed sample role left running

    def server_urls() -> list[str]:
        timeout_s = config.launch.start_timeout_s
        return wait_for_servers(folder, serve_roles(config), timeout_s=timeout_s, alive=end.interrupt)

    def announce(address: str) -> None:
        about = {"address": address, "pid": os.getpid(), "host": socket.gethostname()}
        folder.announce("sample", about, gives_up=end.has_come)
        # Not earlier: the start blocks the event loop while it waits for servers, and here for space on the disk. SIGTERM
        # would have no effect then.
        cancel_at_sigterm()

    try:
        policy, host = architecture_of(config.model.path), own_address(config.launch.nodes)
        role = run_sample_role(
            config, policy, server_urls=server_urls, announce=announce, log_dir=folder.logs, host=host,
            key=folder.run_key(), doing=doing,
        )  # fmt: skip
        asyncio.run(until_end(role, end))
    finally:
        folder.withdraw("sample")


async def until_end(role: Coroutine, end: stopping.EndOfStart) -> None:
    """Await ``role``, and cancel it at the end of this start of the run. In a Slurm job SIGTERM does not end it."""
    task = asyncio.create_task(role)
    while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
        if await asyncio.to_thread(end.has_come):  # a shared file system may take long to answer
            print("this start of the run has ended: this role ends too", flush=True)
            task.cancel()
            break
    await task


def cancel_at_sigterm() -> None:
    """Let SIGTERM cancel the running task, which is a role's main task: running episodes have their own folders, which are
    removed as they end. A second SIGTERM ends this process at once. If SIGTERM is ignored, it stays ignored."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        task.cancel()

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGTERM, cancel)
