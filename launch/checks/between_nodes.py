"""Checks between the nodes before a first job: shared folder, clocks, ports, collectives.

Every node writes its card (host, address, port) into the folder of the check, waits for the cards of the
others, and connects to their ports. Then the nodes run one all-reduce with gloo, and one with NCCL where there
are GPUs.
"""

import contextlib
import json
import os
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from configs.schema.launch import NodesConfig
from launch.checks.node import Level, NodeFinding, fail, ok, warn
from launch.processes.addresses import free_port, own_address, role_environment
from launch.processes.locks import locked
from launch.processes.run_folder import write_json
from parallel.planning.memory import GIB

FREE_SPACE = 50 * GIB
CLOCK_SKEW_S = 5.0
COLLECTIVE_BYTES = {"gloo": 64 * 2**20, "nccl": GIB}
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The place where the nodes of one check find each other."""

    folder: Path
    """A new folder for this check only, on the file system of the run folders."""
    node: int
    num_nodes: int
    timeout_s: float


def checks_between(nodes: NodesConfig | None, meeting: Meeting) -> Iterator[NodeFinding]:
    """Findings of several nodes together. Each waits ``meeting.timeout_s`` for the others, and names those that
    are missing."""
    writable = _check_folder(meeting.folder)
    yield writable
    if meeting.num_nodes == 1 or writable.level is Level.FAIL:
        return
    address = own_address(nodes)
    with _listening(address) as port:
        card = {"host": socket.gethostname(), "address": address, "port": port}
        cards = _exchange(meeting, "card", card | {"written": time.time()})
        missing = sorted(set(range(meeting.num_nodes)) - cards.keys())
        if missing:
            same_path = "use a folder that every node sees at the same path"
            text = f"of {meeting.num_nodes} nodes, {missing} left no file in {meeting.folder}"
            yield fail("folder", text, f"{same_path}, and start this command on every node at the same time")
            return
        yield _check_clocks(cards)
        yield from _check_ports(cards, meeting)
        connected = _exchange(meeting, "connected", {})
        if len(connected) < meeting.num_nodes:
            lost = sorted(cards.keys() - connected.keys())
            yield fail("ports", f"nodes {lost} gave up before the collective")
            return
    yield from _check_collectives(nodes, meeting, cards[0]["address"])


def _check_folder(folder: Path) -> NodeFinding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"try-{socket.gethostname()}-{os.getpid()}") as file:
            file.write("something")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return fail("folder", f"{folder}: {error}", "give --folder a place that every node may write to")
    except ValueError as error:
        return fail("folder", str(error))
    if free < FREE_SPACE:
        text = f"{folder.parent} has {free / GIB:.0f} GiB left"
        return warn("folder", text, "checkpoints of a 7B model take about 100 GiB each")
    return ok("folder", f"{folder.parent} is writable, {free / GIB:.0f} GiB free")


def _exchange(meeting: Meeting, name: str, content: dict) -> dict[int, dict]:
    """The ``content`` of every node by its number, this one included; nodes that are late are missing."""
    mine = meeting.folder / f"{name}-{meeting.node}.json"
    write_json(mine, content)
    since = mine.stat().st_mtime - meeting.timeout_s  # older files were left by a check that was killed
    deadline = time.monotonic() + meeting.timeout_s
    contents: dict[int, dict] = {}
    while len(contents) < meeting.num_nodes and time.monotonic() < deadline:
        for node in set(range(meeting.num_nodes)) - contents.keys():
            try:
                file = meeting.folder / f"{name}-{node}.json"
                if file.stat().st_mtime > since:
                    contents[node] = json.loads(file.read_text())
            except FileNotFoundError:
                continue
        time.sleep(POLL_S)
    return contents


def leave(meeting: Meeting) -> None:
    """Leave the meeting. The first node removes the folder when every node has left, or the time is up."""
    with contextlib.suppress(OSError):
        if meeting.node == 0:
            _exchange(meeting, "done", {})
            shutil.rmtree(meeting.folder)
        else:
            write_json(meeting.folder / f"done-{meeting.node}.json", {})


def _check_clocks(cards: dict[int, dict]) -> NodeFinding:
    """Compares the times at which the nodes wrote their cards by their own clocks. The spread is an upper bound
    of the skew, since nodes may also start at different times."""
    times = [card["written"] for card in cards.values()]
    spread = max(times) - min(times)
    if spread > CLOCK_SKEW_S:
        text = f"the nodes wrote their files up to {spread:.1f} s apart by their own clocks"
        return warn("clocks", text, "if they started together, have their clocks synchronised (chrony, ntp)")
    return ok("clocks", f"at most {spread:.1f} s apart")


@contextlib.contextmanager
def _listening(address: str) -> Iterator[int]:
    """Yields a port. While entered, every connection to it is answered with the port's number."""

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(str(self.request.getsockname()[1]).encode())

    with socketserver.ThreadingTCPServer((address, 0), Answer) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def _check_ports(cards: dict[int, dict], meeting: Meeting) -> Iterator[NodeFinding]:
    others = [card for node, card in sorted(cards.items()) if node != meeting.node]
    with ThreadPoolExecutor(max_workers=max(len(others), 1)) as pool:
        problems = [*filter(None, pool.map(lambda card: _connect(card, meeting.timeout_s), others))]
    fix = "open TCP ports above 1024 between the nodes, or set launch.nodes.interface"
    yield from (fail("ports", problem, fix) for problem in problems)
    if not problems:
        yield ok("ports", f"a free port of each of {len(others)} other nodes answers")


def _connect(card: dict, timeout_s: float) -> str | None:
    where = f"{card['host']} ({card['address']}:{card['port']})"
    try:
        with socket.create_connection((card["address"], card["port"]), timeout=timeout_s) as connection:
            answer = connection.recv(16).decode(errors="backslashreplace")  # a stranger's may be no text
    except OSError as error:
        return f"{where} cannot be reached: {error}"
    if answer == str(card["port"]):
        return None
    return f"{where} is answered by another program, which says {answer!r}"


def _check_collectives(nodes: NodesConfig | None, meeting: Meeting, head: str) -> Iterator[NodeFinding]:
    """One all-reduce with gloo and, if there are GPUs, one with NCCL, each with its own deadline."""
    os.environ.update(role_environment(nodes))
    import torch

    for backend in ("gloo", "nccl") if torch.cuda.is_available() else ("gloo",):
        offered = _exchange(meeting, backend, {"port": free_port(head)} if meeting.node == 0 else {})
        if 0 not in offered:
            yield fail(backend, "the first node offered no port for the collective")
            return
        work = partial(_all_reduce, backend, meeting, head, offered[0]["port"])
        yield _run_within(meeting.timeout_s * 2, backend, work)


def _all_reduce(backend: str, meeting: Meeting, head: str, port: int) -> NodeFinding:
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(0)
    limit = timedelta(seconds=meeting.timeout_s)
    address, rank, size = f"tcp://{head}:{port}", meeting.node, meeting.num_nodes
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=limit)
    values = torch.ones(COLLECTIVE_BYTES[backend] // 4, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(torch.ones(1, device=values.device))  # the first one connects
    began = time.perf_counter()
    dist.all_reduce(values)
    total = values[-1].item()  # waits for a GPU too
    seconds = time.perf_counter() - began
    dist.destroy_process_group()
    if total != size:
        return fail(backend, f"an all-reduce of ones over {size} nodes gave {total}")
    mib, rate = COLLECTIVE_BYTES[backend] // 2**20, COLLECTIVE_BYTES[backend] / seconds / 1e9
    return ok(backend, f"all-reduce of {mib} MiB over {size} nodes: {rate:.2f} GB/s")


def _run_within(seconds: float, check: str, work: Callable[[], NodeFinding]) -> NodeFinding:
    """``work()`` in a thread that may be left behind, since a collective that hangs cannot be interrupted."""
    result: list[NodeFinding] = []

    def run() -> None:
        try:
            result.append(work())
        except (RuntimeError, OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            result.append(fail(check, first, "see the interface above; NCCL_DEBUG=INFO says more"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        cause = "the nodes reach each other by TCP (see ports), so the library has chosen another interface"
        return fail(check, f"no answer within {seconds:.0f} s", f"{cause}: set launch.nodes.interface")
    return result[0]
