"""``torchrun`` with Tandem's own rendezvous.

``python -m launch.roles.rendezvous`` takes torchrun's arguments and ``--rdzv-backend=tandem``.

torchrun's own rendezvous (``--standalone``, c10d) listens on every interface without a password, and unpickles
the content of its store: anyone who reaches the port can run code in the run. This one unpickles nothing.

- On one node no port is open. The ranks' store is a file in memory, which no other user can open, and which ends
  with torchrun.
- On several nodes the store listens on the one address that the other nodes were given. It has no password: see
  launch/README.md.
"""

import errno
import os
import socket
import sys
import tempfile
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from launch.roles.forked_ranks import COMMAND, end_with, fork_ranks
from parallel.megatron.rank_store import STORE_VARIABLE

BACKEND = "tandem"
JOIN_TIMEOUT_S = 600
"""Default of ``--rdzv-conf=join_timeout=N``."""
NO_ADDRESS = RendezvousStoreInfo("127.0.0.1", 0)
"""MASTER_ADDR and MASTER_PORT of ranks that meet in a file. They are unused, but torchrun always sets them."""


class _Rendezvous(RendezvousHandler):
    """The common part: a group of agents that meets once and never changes."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class OneNode(_Rendezvous):
    """One agent, whose ranks meet in a file of its memory (``STORE_VARIABLE`` names it)."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self._file = os.memfd_create("tandem-ranks")
        os.environ[STORE_VARIABLE] = f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        os.ftruncate(self._file, 0)
        return RendezvousInfo(dist.HashStore(), rank=0, world_size=1, bootstrap_store_info=NO_ADDRESS)

    def shutdown(self) -> bool:
        """Remove the variable with the file: ranks that met there later would read the addresses of these ranks."""
        del os.environ[STORE_VARIABLE]
        os.close(self._file)
        return True


class SeveralNodes(_Rendezvous):
    """An agent per node. The host's agent is node 0 and holds the store, which the ranks use too. The others are
    numbered in the order in which they come."""

    def __init__(
        self,
        run_id: str,
        *,
        host: str,
        port: int,
        nodes: int,
        is_host: bool,
        timeout_s: float,
        own_address: str | None = None,
    ) -> None:
        super().__init__(run_id)
        self._host, self._port, self._nodes, self._is_host = host, port, nodes, is_host
        self._own_address = own_address or host
        self._timeout = timedelta(seconds=timeout_s)

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Returns when all agents have joined. Raises RendezvousTimeoutError if some are late, and OSError if the host cannot
        listen at its address."""
        store = dist.PrefixStore(self._run_id, self._open())
        node = 0 if self._is_host else store.add("agents", 1)
        if node >= self._nodes:
            raise RendezvousTimeoutError(
                f"{self._nodes} nodes have met at {self._host}:{self._port} already; this one is too many"
            )
        store.set(f"agent/{node}", b"")
        everyone = [f"agent/{number}" for number in range(self._nodes)]
        try:
            store.wait(everyone, self._timeout)
        except dist.DistStoreError as error:
            count, seconds = sum(store.check([agent]) for agent in everyone), self._timeout.total_seconds()
            late = f"{count} of {self._nodes} nodes came to {self._host}:{self._port} in {seconds:.0f} s"
            fix = "start the others, or raise launch.start_timeout_s"
            raise RendezvousTimeoutError(f"{late}; {fix}") from error
        return RendezvousInfo(store, node, self._nodes, RendezvousStoreInfo(self._host, self._port))

    def _open(self) -> dist.TCPStore:
        # A store listens on every interface, unless it gets a socket that already listens.
        number = self._listen().detach() if self._is_host else None
        host, port, is_host, timeout = self._host, self._port, self._is_host, self._timeout
        return dist.TCPStore(
            host, port, None, is_host, timeout, wait_for_workers=False, master_listen_fd=number
        )

    def _listen(self) -> socket.socket:
        try:
            listening = socket.create_server((self._own_address, self._port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            text = f"{self._own_address} is not an address of this host ({socket.gethostname()})"
            fix = "start the learner's first node on the host that has it, or give an endpoint of this host"
            raise OSError(error.errno, f"{text}; {fix}") from error
        address = listening.getsockname()[0]
        if address.startswith("127.") and not self._own_address.startswith("127."):
            listening.close()
            error = f"{self._own_address} resolves to {address} on this host, which no other node can reach"
            raise OSError(f"{error}; give --local-addr=ADDRESS")
        return listening


def make_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    if parameters.max_nodes == 1:
        return OneNode(parameters.run_id)
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    return SeveralNodes(
        parameters.run_id,
        host=host,
        port=port,
        nodes=parameters.max_nodes,
        is_host=bool(parameters.get_as_bool("is_host")),
        timeout_s=parameters.get_as_int("join_timeout", JOIN_TIMEOUT_S),
        own_address=parameters.local_addr,
    )


def main(arguments: list[str]) -> None:
    rendezvous_handler_registry.register(BACKEND, make_handler)
    several_nodes = any(argument.startswith("--nnodes") for argument in arguments)
    if not several_nodes and " ".join(COMMAND) in " ".join(arguments):
        fork_ranks()
    # torchrun makes a folder for the ranks' errors, and does not remove it.
    with tempfile.TemporaryDirectory(prefix="torchelastic_", ignore_cleanup_errors=True) as folder:
        run.main([f"--log-dir={folder}", *arguments])


if __name__ == "__main__":
    end_with(partial(main, sys.argv[1:]))
