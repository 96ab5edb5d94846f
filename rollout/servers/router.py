"""An ``sglang-router`` between the sample role and the servers, if ``rollout.router`` is set.

    sample role --/generate--> sglang-router (here, on the loopback interface) --/generate--> servers

The learner controls the servers directly, because the router forwards neither pauses nor weights. Tested with
sglang-router 0.3.2.
"""

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from configs.schema.rollout import RouterConfig
from rollout.client import GenerationClient, GenerationError
from rollout.connections import own_answer
from rollout.records import Completion
from rollout.run_key import RunKey
from rollout.servers.client import SGLangClient
from rollout.servers.kept_sets import Truncation
from rollout.servers.ports import LOOPBACK, Ports, choose_ports
from rollout.servers.routing import Experts
from rollout.servers.watched_process import end_watched, how_it_ended, log_tail, start_watched

POLL_S = 0.25
READY_REQUEST_TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0
"""The servers run already. The router's imports take some seconds, and it asks each server."""
PACKAGE = "sglang_router"
PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


@asynccontextmanager
async def generation_client(
    config: RunConfig,
    urls: Sequence[str],
    *,
    log_dir: Path,
    key: RunKey,
    experts: Experts | None = None,
    truncation: Truncation | None = None,
) -> AsyncIterator[GenerationClient]:
    """The sample role's client of the servers at ``urls``, or of a router before them. Raises what ``Router`` raises.

    experts, truncation: see ``SGLangClient``.
    """
    rollout = config.rollout
    with ExitStack() as stack:
        client_of: Callable[..., SGLangClient] = partial(SGLangClient, urls)
        if rollout.router is not None:
            log_file, timeout_s = log_dir / "router.log", rollout.request_timeout_s
            router = Router(rollout.router, urls, log_file=log_file, request_timeout_s=timeout_s, key=key)
            client_of = partial(_RoutedClient, stack.enter_context(router))
        async with client_of(
            max_concurrency=rollout.max_concurrency,
            timeout_s=rollout.request_timeout_s,
            max_retries=rollout.max_retries,
            peer_timeout_s=config.launch.peer_timeout_s,
            servers_restart=config.servers_may_restart,
            whole_groups=rollout.router is None and rollout.most_samples <= rollout.max_concurrency,
            key=key,
            experts=experts,
            truncation=truncation,
            stop=rollout.stop,
        ) as client:
            yield client


class _RoutedClient(SGLangClient):
    """If a request fails because the router has ended, the error says so."""

    def __init__(self, router: "Router", **options: Any) -> None:
        super().__init__([router.url], **options)
        self._router = router

    async def generate_group(self, prompt_ids: Sequence[int], **sampling: Any) -> list[Completion]:
        try:
            return await super().generate_group(prompt_ids, **sampling)
        except GenerationError as error:
            try:
                self._router.poll()
            except RouterEnded as end:
                raise GenerationError(f"{end}\n({error})") from error
            raise


class RouterEnded(RuntimeError):
    """The router ended while the run needed it; the message has the end of its log."""


class Router:
    """A router process, from now until ``stop``. As a context manager it is ready inside, and stopped on
    exit.

    Args:
        urls: addresses of the servers, which are healthy.
        request_timeout_s: our client's deadline, which comes first.
    """

    def __init__(
        self,
        config: RouterConfig,
        urls: Sequence[str],
        *,
        log_file: Path,
        request_timeout_s: float,
        key: RunKey,
    ) -> None:
        check_is_installed()
        self._urls, self._key, self._log_file = list(urls), key, log_file
        (ports,) = choose_ports([0], None)
        self._port, self.url = ports.http, f"http://{LOOPBACK}:{ports.http}"
        command = router_command(config, urls, ports=ports, request_timeout_s=request_timeout_s, key=key)
        # Unlike our clients, the router would connect to the servers through a proxy.
        environment = {name: value for name, value in os.environ.items() if name.lower() not in PROXIES}
        environment |= {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._process = start_watched(command, log_file=log_file, environment=environment)

    def __enter__(self) -> "Router":
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def wait_ready(self) -> None:
        """Return when the router has found every server healthy.

        Raises:
            RouterEnded: the router ended.
            TimeoutError: it was not ready in time; the message has the end of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            self.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"sglang-router had not found all of {self._urls} after {START_TIMEOUT_S:g} s; {self._log_end()}"
                )
            time.sleep(POLL_S)

    def poll(self) -> None:
        """Look at the process once. Raises RouterEnded."""
        code = self._process.poll()
        if code is not None:
            raise RouterEnded(
                f"sglang-router (pid {self._process.pid}) {how_it_ended(code)}; {self._log_end()}"
            )

    def _is_ready(self) -> bool:
        timeout_s = READY_REQUEST_TIMEOUT_S
        answer = own_answer(LOOPBACK, self._port, "/workers", key=self._key, timeout_s=timeout_s)
        return answer is not None and _healthy_workers(answer) == len(self._urls)

    def _log_end(self) -> str:
        return f"last lines of {self._log_file}:\n{log_tail(self._log_file, key=self._key)}"

    def stop(self) -> None:
        end_watched([self._process])


def router_command(
    config: RouterConfig, urls: Sequence[str], *, ports: Ports, request_timeout_s: float, key: RunKey
) -> list[str]:
    """The command line. Its settings, beside addresses and policy:

    - health by /model_info, every 2 s: the default asks the server for a token, which a paused server never
      gives. After half a minute every server would count as ill, and the router would answer requests with 503;
    - no retries by the router: ``SGLangClient`` repeats failed requests, and counts them;
    - a server that broke connections is tried again after 5 s instead of 60 s.
    """
    flags = {
        "--policy": config.policy,
        "--host": LOOPBACK,
        "--port": ports.http,
        "--prometheus-host": LOOPBACK,
        "--prometheus-port": ports.nccl,
        "--health-check-endpoint": "/model_info",
        "--health-check-interval-secs": 2,
        "--cb-timeout-duration-secs": 5,
        "--request-timeout-secs": math.ceil(request_timeout_s) + 1,  # the client's own comes first
        "--shutdown-grace-period-secs": 1,
        "--log-level": "warn",
    }
    arguments = [str(part) for flag in flags.items() for part in flag]
    start = [sys.executable, "-m", "rollout.servers.start_router", str(key.file)]
    return [*start, "--worker-urls", *urls, "--disable-retries", *arguments]


def check_is_installed() -> None:
    """Raises ValueError if sglang-router is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ValueError(
            "rollout.router needs the package sglang-router; pip install sglang-router==0.3.2, or leave rollout.router out"
        )


def _healthy_workers(content: bytes) -> int:
    """The number of healthy workers; 0 if ``content`` is no list of workers, because something else listens at this port."""
    try:
        return sum(worker["is_healthy"] for worker in json.loads(content)["workers"])
    except (ValueError, KeyError, TypeError):
        return 0
