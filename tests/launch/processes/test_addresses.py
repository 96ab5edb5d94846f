"""Addresses of a run on several nodes: where this host is reached, what gloo is told, who has reported
servers, and what to start where."""

import importlib.util
import os
import re
import shlex
import socket
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml

from configs.loader import ConfigError, load_config
from configs.schema.launch import NodesConfig
from launch.checks.arguments import BadInput
from launch.commands.prepare import prepare
from launch.processes import addresses
from launch.processes.addresses import AS_IN_SERVERS, free_port, own_address, role_environment
from launch.processes.run_folder import RunFolder, read_servers, wait_for_servers, write_json
from launch.roles import serve as serving
from rollout.tiny_model import make_tiny_countdown_model

OTHERS = {"eth7": ["10.9.0.4"], "lo": ["127.0.0.1"], "ib0": []}


@pytest.fixture
def network(monkeypatch):
    """A host of given interfaces, whose name stands for given addresses, and from which the default route
    leaves from one or is missing."""

    def make(interfaces: dict[str, list[str]], *, name: list[str], route: str | None = None) -> None:
        monkeypatch.setattr(addresses, "_addresses", lambda: interfaces)
        monkeypatch.setattr(addresses, "_default_route_address", lambda: route)

        def look_up(host, *rest):
            if not name:
                raise socket.gaierror("no such name")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in name]

        monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)

    return make


def test_one_machine_stays_on_its_loopback_address():
    assert own_address(None) == "127.0.0.1"
    assert role_environment(None) == AS_IN_SERVERS | dict.fromkeys(
        ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"
    )


def test_a_real_interface_gives_its_address_and_is_what_gloo_and_nccl_are_told():
    (address,) = {entry.address for entry in psutil.net_if_addrs()["lo"] if entry.family == socket.AF_INET}
    nodes = NodesConfig(interface="lo")
    assert own_address(nodes) == address
    assert role_environment(nodes) == AS_IN_SERVERS | {
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }


def test_learner_and_servers_tell_nccl_the_same(monkeypatch):
    """SGLang sets these in its own processes alone, unless the environment has them; a group of both then fails to connect."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    engine = (Path(package) / "srt/entrypoints/engine.py").read_text()
    set_by_sglang = set(re.findall(r'"(NCCL_\w+)" not in os\.environ', engine))
    # Context-parallel decoding, which Tandem never asks for.
    of_other_features = {"NCCL_GRAPH_MIXING_SUPPORT"}
    assert AS_IN_SERVERS.keys() == set_by_sglang - of_other_features
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    for nodes in (None, NodesConfig(interface="lo")):
        told = role_environment(nodes)
        assert told["NCCL_NVLS_ENABLE"] == "0" and "NCCL_CUMEM_ENABLE" not in told


@pytest.mark.parametrize(
    ("name", "route", "expected"),
    [
        (["10.9.0.4"], "10.8.0.1", "10.9.0.4"),
        (["127.0.1.1", "10.9.0.4"], "10.8.0.1", "10.9.0.4"),
        (["127.0.1.1"], "10.8.0.1", "10.8.0.1"),  # Debian's default for a machine's own name
        (["10.5.5.5"], "10.8.0.1", "10.8.0.1"),  # an address that this host no longer has
        ([], "10.8.0.1", "10.8.0.1"),
    ],
)
def test_without_an_interface_the_name_comes_before_the_default_route(network, name, route, expected):
    network(OTHERS | {"eth0": ["10.8.0.1"]}, name=name, route=route)
    assert own_address(NodesConfig()) == expected


def test_gloo_is_told_the_interface_of_that_address_unless_the_environment_says_one(network, monkeypatch):
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    network(OTHERS, name=["10.9.0.4"])
    eth7 = {"GLOO_SOCKET_IFNAME": "eth7", "TP_SOCKET_IFNAME": "eth7"}
    assert role_environment(NodesConfig()) == AS_IN_SERVERS | eth7
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")
    assert role_environment(NodesConfig()) == AS_IN_SERVERS | {"TP_SOCKET_IFNAME": "eth7"}


@pytest.mark.parametrize(("interface", "what"), [("eth9", "does not exist"), ("ib0", "has no IPv4 address")])
def test_an_interface_that_cannot_be_used_is_named_with_the_ones_that_can(network, interface, what):
    network(OTHERS, name=[])
    with pytest.raises(
        ValueError,
        match=rf"launch.nodes.interface: {interface} {what} on .*use one of: eth7 \(10.9.0.4\), lo \(127",
    ):
        own_address(NodesConfig(interface=interface))


def test_a_host_without_any_way_out_says_so(network):
    network(OTHERS, name=["127.0.1.1"])
    with pytest.raises(
        ValueError,
        match=r"no address that others can reach.*no default route; set launch.nodes.interface to .*eth7",
    ):
        own_address(NodesConfig())


def test_a_free_port_can_be_bound():
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", free_port("127.0.0.1")))


# --- who has reported
# -----------------------------------------------------------------------------------------------------------------


def test_servers_are_read_in_the_order_of_the_replicas_once_every_role_has_reported(tmp_path):
    folder, names = RunFolder(tmp_path), ["serve-0", "serve-1", "serve-2"]
    folder.announce("serve-2", {"urls": ["http://c:1"]})
    folder.announce("serve-0", {"urls": ["http://a:1", "http://a:2"]})
    assert read_servers(folder, names) is None
    folder.announce("serve-1", {"urls": []})  # the second node of a replica: it answers on the first one
    assert read_servers(folder, names) == ["http://a:1", "http://a:2", "http://c:1"]
    assert wait_for_servers(folder, names, timeout_s=0) == ["http://a:1", "http://a:2", "http://c:1"]


def test_the_missing_roles_are_named_with_what_they_left_behind(tmp_path):
    folder, names = RunFolder(tmp_path), [f"serve-{node}" for node in range(4)]
    folder.announce("serve-0", {"urls": ["http://a:1"]})
    folder.logs.mkdir()
    (folder.logs / "serve-1.log").write_text("loading")
    folder.report_error("serve-3", ValueError("no GPU"))
    with pytest.raises(TimeoutError) as error:
        wait_for_servers(folder, names, timeout_s=0.2)
    text = str(error.value)
    assert "3 of 4 serve roles did not report" in text and "launch.start_timeout_s" in text
    assert f"serve-1 (its log: {folder.logs / 'serve-1.log'}); serve-2 (no log here: was it started?)" in text
    assert "serve-3 (ended by ValueError: no GPU)" in text
    assert "serve-0" not in text


def test_a_wait_ends_when_the_last_role_reports_and_when_the_waiting_is_pointless(tmp_path):
    folder = RunFolder(tmp_path)
    later = threading.Timer(0.2, lambda: folder.announce("serve", {"urls": ["http://a:1"]}))
    later.start()
    assert wait_for_servers(folder, ["serve"], timeout_s=30) == ["http://a:1"]
    later.join()

    def gone() -> None:
        raise RuntimeError("the supervisor says stop")

    with pytest.raises(RuntimeError, match="says stop"):
        wait_for_servers(folder, ["serve-0"], timeout_s=30, alive=gone)


# --- which node, which GPUs, what to start
# --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return folder


def config_file(folder: Path, model: Path, **changes) -> Path:
    content = {
        "name": "hosts",
        "model": {"path": str(model)},
        "task": {"type": "countdown"},
        "rollout": {"max_new_tokens": 14, "replicas": 2},
        "layout": {"dp": 4},
        "launch": {
            "runs_dir": str(folder / "runs"),
            "nodes": {"learner": 2, "rollout": 2, "interface": "lo"},
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content | changes))
    return folder / "run.yaml"


def test_the_node_is_the_one_asked_for_or_the_place_in_the_slurm_step(tmp_path, model, monkeypatch):
    several = load_config(config_file(tmp_path, model), [])
    one = load_config(config_file(tmp_path, model), ["launch.nodes=null"])
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    assert serving.serving_node(several, None) == 0
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert serving.serving_node(several, None) == 1
    assert serving.serving_node(several, 0) == 0
    assert serving.serving_node(one, None) == 0, "a run on one machine, inside a job of many"
    with pytest.raises(ValueError, match=r"--node 2: the servers of this run are on 2 nodes"):
        serving.serving_node(several, 2)
    monkeypatch.setenv("SLURM_NODEID", "3")
    with pytest.raises(ValueError, match="SLURM_NODEID=3"):
        serving.serving_node(several, None)


def test_servers_of_several_fleets_on_one_machine_move_to_the_gpus_of_their_request(tmp_path, model):
    config = load_config(config_file(tmp_path, model), ["launch.nodes=null"])
    folder = RunFolder(tmp_path)
    assert [share.first_gpu for share in serving.shares_of(folder, config, 0)] == [4, 5]
    write_json(tmp_path / "request.json", {"first_gpu": 0})
    assert [share.first_gpu for share in serving.shares_of(folder, config, 0)] == [0, 1]


def test_the_nodes_of_a_replica_meet_at_its_first_one(tmp_path, model):
    config = load_config(config_file(tmp_path, model), ["rollout.tp=2", "rollout.replicas=1"])
    folder = RunFolder(tmp_path)
    found: list[dict[int, str]] = []
    shares = [serving.shares_of(folder, config, node) for node in range(2)]
    later = threading.Thread(
        target=lambda: found.append(serving.meeting_points(folder, config, shares[1], "127.0.0.2")),
        daemon=True,
    )
    later.start()
    at_first = serving.meeting_points(folder, config, shares[0], "127.0.0.1")
    later.join(timeout=30)
    assert found == [at_first]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", at_first[0])
    assert serving.meeting_points(folder, config, [], "127.0.0.1") == {}


def test_servers_forget_where_their_replicas_met_in_an_earlier_life(tmp_path, model, monkeypatch):
    """A file that a killed first node left behind would send the others to an address at which nobody is."""
    config = load_config(config_file(tmp_path, model), ["rollout.tp=2", "rollout.replicas=1"])
    folder = RunFolder(tmp_path)

    class Looked(Exception):
        pass

    def look(*_):
        raise Looked(folder.read_address("replica-0"))

    monkeypatch.setattr(serving, "own_address", lambda _: "127.0.0.1")
    monkeypatch.setattr(serving, "meeting_points", look)
    monkeypatch.setattr(serving.signal, "getsignal", lambda _: serving.signal.SIG_IGN)
    for node, left in ((1, {"address": "dead:1"}), (0, None)):  # the second node has no say in it
        folder.announce("replica-0", {"address": "dead:1"})
        with pytest.raises(Looked) as looked:
            serving.serve(folder, config, print, node=node)
        assert looked.value.args == (left,)


def parsed(lines: list[str]) -> dict[str, list[str]]:
    """The arguments of the command after each comment."""
    return {
        comment: shlex.split(line.partition(" 2>&1")[0])
        for comment, line in pairwise(lines)
        if comment.startswith("#") and not line.startswith(("#", "cd ", "export "))
    }


def test_prepare_makes_the_folder_and_names_each_command_and_its_node(tmp_path, model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = prepare(config_file(tmp_path, model), ["steps=3"], endpoint="first-node:29400")
    lines = capsys.readouterr().out.splitlines()
    found = parsed(lines)
    run = str(folder.path)
    assert load_config(folder.config, []).steps == 3 and folder.path.is_absolute()
    assert found["# node 0 of the servers:"][1:] == ["-m", "launch", "serve", run, "--node", "0"]
    assert found["# node 1 of the servers:"][-1] == "1"
    assert found["# first node of the learner:"][1:] == ["-m", "launch", "sample", run]
    learn, other = (found[f"# {where}:"] for where in
                    ("first node of the learner, 2 processes", "each other node of the learner (1), 2 processes on each"))  # fmt: skip
    # is_host.
    assert [(a[-5:], b[-5:]) for a, b in zip(learn, other, strict=True) if a != b] == [("=true", "false")]
    assert learn[1:3] == ["-m", "launch.roles.rendezvous"]
    assert {
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=tandem",
        "--rdzv-endpoint=first-node:29400",
    } <= set(learn)
    assert f"--rdzv-id={folder.path.name}" in learn
    assert learn[-4:] == ["-m", "launch", "learn", run]
    assert f"cd {tmp_path}" in lines and any(line.startswith("export OMP_NUM_THREADS=") for line in lines)
    assert folder.logs.is_dir()  # the commands write there
    logs = [line.partition(" | tee -a ")[2] for line in lines if " launch learn " in line]
    assert logs == [f"{folder.logs}/learn.log", f'{folder.logs}/learn-"$(hostname)".log'], (
        "two hosts, one log"
    )
    assert "this host" not in "".join(lines)
    assert not list((folder.path / "roles").glob("*.json")), "nothing was started"


def test_prepare_takes_this_host_where_no_endpoint_is_given_and_none_for_a_single_learner_node(
    tmp_path, model, capsys
):
    prepare(config_file(tmp_path, model), [])
    several = capsys.readouterr().out
    assert re.search(r"--rdzv-endpoint=127\.0\.0\.1:\d+ ", several)
    assert "# first node of the learner: this host; for another one give --endpoint HOST:PORT" in several
    prepare(config_file(tmp_path, model), ["launch.nodes.learner=1"])
    assert "--rdzv-backend=tandem --nproc-per-node=4 -m launch learn" in capsys.readouterr().out
    prepare(config_file(tmp_path, model), ["launch.placement=colocated"])
    assert "# node 1 of the servers, which is one of the learner's nodes too:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "endpoint", "message"),
    [
        (["launch.nodes=null"], None, "launch.nodes is not set.*tandem train"),
        # Not: too large for this machine.
        (
            ["launch.nodes=null", "rollout.replicas=1000000"],
            None,
            "launch.nodes is not set",
        ),
        ([], "node1", "--endpoint node1: write HOST:PORT"),
        ([], "node1:0", "--endpoint node1:0: write HOST:PORT"),
        ([], "node 1:29400", "--endpoint node 1:29400: write HOST:PORT"),
        (
            ["launch.nodes.learner=1"],
            "node1:29400",
            "--endpoint node1:29400: the learner has one node.*leave it out",
        ),
        (["launch.nodes.interface=eth77"], None, "launch.nodes.interface: eth77 does not exist"),
        (["launch.nodes.learner=3"], None, "cannot be spread evenly over launch.nodes.learner: 3"),
    ],
)
def test_prepare_refuses_what_cannot_be_started_before_it_writes_anything(
    tmp_path, model, overrides, endpoint, message
):
    file = config_file(tmp_path, model)
    before = set(os.listdir(tmp_path))
    with pytest.raises((BadInput, ConfigError), match=message):
        prepare(file, overrides, endpoint=endpoint)
    assert set(os.listdir(tmp_path)) == before
