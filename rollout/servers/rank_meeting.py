"""The meeting point of one replica's tensor-parallel ranks. On one node it is a file in memory, on several nodes an
address of the first.

By default SGLang's ranks meet in a store that listens on every interface without a password.
"""

import os
import socket

from rollout.servers.share import ServerShare

OVERRIDE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


class RankMeeting:
    """It is open from before the servers' start until their end. The servers get ``environment``.
    ``address``: HOST:PORT on the first node of a replica on several nodes; None for a replica on this node.
    Raises OSError: the first node cannot listen there."""

    def __init__(self, share: ServerShare, address: str | None) -> None:
        self._file, self._store = None, None
        if address is None:
            self._file = os.memfd_create("sglang-ranks")
            # Other users cannot open it. It ends with this process, which the servers never outlive.
            self.environment = {OVERRIDE: f"file:///proc/{os.getpid()}/fd/{self._file}"}
            return
        host, _, port = address.rpartition(":")
        self.environment = {
            OVERRIDE: "env://",
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if share.node_rank == 0:
            from torch._C._distributed_c10d import TCPStore  # takes seconds; other fleets never come here

            listening = socket.create_server((host, int(port)))
            self._store = TCPStore(
                host, int(port), None, True, wait_for_workers=False, master_listen_fd=listening.detach()
            )

    def close(self) -> None:
        self._store = None
        if self._file is not None:
            os.close(self._file)
            self._file = None
