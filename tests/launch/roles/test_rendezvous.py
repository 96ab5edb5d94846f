"""Where learner ranks meet: one address that listens, or none, and nothing that is unpickled."""

import base64
import os
import pickle
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError

from launch.roles.rendezvous import OneNode, SeveralNodes, make_handler
from parallel.megatron.rank_store import STORE_VARIABLE
from rollout.servers.ports import choose_ports


def agents(nodes: int, port: int, *, run_id="run", timeout_s=60) -> list[SeveralNodes]:
    options = {"host": "127.0.0.1", "port": port, "nodes": nodes, "timeout_s": timeout_s}
    return [SeveralNodes(run_id, is_host=node == 0, **options) for node in range(nodes)]


@pytest.fixture
def port() -> int:
    return choose_ports([0], None)[0].http


def listening_here() -> set[tuple[str, int]]:
    return {tuple(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_agents_of_several_nodes_meet_at_the_one_address_that_listens(port):
    before, handlers = listening_here(), agents(3, port)
    with ThreadPoolExecutor(3) as threads:
        met = [*threads.map(SeveralNodes.next_rendezvous, handlers)]
    assert met[0].rank == 0 and sorted(info.rank for info in met) == [0, 1, 2]
    assert {info.world_size for info in met} == {3}
    assert {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in met} == {
        ("127.0.0.1", port)
    }
    assert listening_here() - before == {("127.0.0.1", port)}, "not every interface of the host"
    met[1].store.set("said", b"by the second")
    assert met[2].store.get("said") == b"by the second"


def test_a_node_that_does_not_come_and_one_too_many_are_told(port):
    lonely, _ = agents(2, port, timeout_s=1)
    with pytest.raises(
        RendezvousTimeoutError,
        match=rf"1 of 2 nodes came to 127.0.0.1:{port} in 1 s; start the others.*start_timeout_s",
    ):
        lonely.next_rendezvous()
    other = choose_ports([0], None)[0].http
    host, extra = (
        agents(1, other)[0],
        SeveralNodes("run", host="127.0.0.1", port=other, nodes=1, is_host=False, timeout_s=60),
    )
    info = host.next_rendezvous()
    with pytest.raises(RendezvousTimeoutError, match=r"1 nodes have met .* already; this one is too many"):
        extra.next_rendezvous()
    assert info.rank == 0


def test_a_name_that_stands_for_the_loopback_address_here_is_told(monkeypatch, port):
    monkeypatch.setattr(
        socket, "create_server", lambda address, real=socket.create_server: real(("127.0.0.1", address[1]))
    )
    host = SeveralNodes("run", host="node1", port=port, nodes=2, is_host=True, timeout_s=1)
    with pytest.raises(OSError, match=r"node1 resolves to 127.0.0.1 on this host.*--local-addr"):
        host.next_rendezvous()


class Harm:
    def __init__(self, marker):
        self._marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self._marker,)


def test_an_address_of_another_host_is_told_with_the_way_out(port):
    host = SeveralNodes("run", host="203.0.113.1", port=port, nodes=2, is_host=True, timeout_s=1)
    with pytest.raises(
        OSError, match=r"203.0.113.1 is not an address of this host .*; start the learner's first"
    ):
        host.next_rendezvous()


def test_what_a_stranger_writes_into_the_store_is_never_unpickled(port, tmp_path):
    """By c10d's rendezvous it was: under this name, in this form."""
    harm = base64.b64encode(pickle.dumps(Harm(tmp_path / "harm")))
    (host, other), stranger_came = agents(2, port), ThreadPoolExecutor(2)
    first = stranger_came.submit(host.next_rendezvous)
    with closing(socket.socket()):
        stranger = dist.TCPStore("127.0.0.1", port, None, False)
        for name in (
            "torch.rendezvous.run",
            "run/agent/1",
            "run/torch.rendezvous.run",
            *stranger.list_keys(),
        ):
            stranger.set(name, harm)
    second = stranger_came.submit(other.next_rendezvous)
    assert {first.result(60).rank, second.result(60).rank} == {0, 1}
    assert not (tmp_path / "harm").exists()
    pickle.loads(base64.b64decode(harm))
    assert (tmp_path / "harm").exists(), "it would have shown"


def test_ranks_of_one_node_meet_in_a_file_that_goes_with_its_owner(monkeypatch):
    monkeypatch.setenv(STORE_VARIABLE, "of another agent")  # so that what stands there before is restored
    before = listening_here()
    handler = make_handler(RendezvousParameters("tandem", "", "run", 1, 1))
    assert isinstance(handler, OneNode) and not handler.use_agent_store
    assert handler.next_rendezvous().world_size == 1
    path = os.environ[STORE_VARIABLE]
    assert os.readlink(path).startswith("/memfd:tandem-ranks"), "it has no name that another user could open"
    stores = [dist.FileStore(path, 2) for _ in range(2)]
    stores[0].set("key", b"value")
    assert stores[1].get("key") == b"value"
    assert listening_here() == before
    assert handler.shutdown()
    assert STORE_VARIABLE not in os.environ and not os.path.exists(path)
