"""``tandem check-cluster``: each problem that it looks for is caused here, and must be found and named with a fix."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from configs.loader import load_config
from configs.schema.launch import NodesConfig
from launch.checks import between_nodes as cluster_meeting
from launch.checks import node as cluster_checks
from launch.checks.between_nodes import Meeting, checks_between
from launch.checks.node import Level, checks_of_node

ROOT = Path(__file__).resolve().parents[3]


def failures(findings) -> dict[str, str]:
    return {finding.check: str(finding) for finding in findings if finding.level is not Level.OK}


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A stand-in for the driver's tool that prints the given lines."""

    def install(*lines: str) -> None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")

    return install


def test_this_machine_is_fit_for_a_run_of_its_own():
    assert failures(checks_of_node(None, None)) == {}


def config_of(recipe: str, *overrides: str):
    return load_config(ROOT / f"configs/recipes/{recipe}.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["launch.nodes={}"], "6 GPUs are visible, launch.nodes.gpus_per_node=8"),
        (["launch.slurm.gpus=7"], "6 GPUs are visible, launch.slurm.gpus=7"),
        ([], "6 GPUs are visible, the run takes 8"),
        (["layout.dp=auto", "rollout.replicas=3"], "6 GPUs are visible, the run takes 8"),
    ],
)
def test_missing_gpus_are_counted(nvidia_smi, overrides, said):
    nvidia_smi(*["NVIDIA H200, 143771, 4, 580.65"] * 6)
    config = config_of("qwen2_5_7b", *overrides)
    found = failures(checks_of_node(config.launch.nodes, config))
    assert found["gpus"].startswith("FAIL") and said in found["gpus"] and "--gres" in found["gpus"]


@pytest.mark.parametrize(
    ("recipe", "override", "level"),
    [
        ("qwen2_5_7b", "seed=0", "warn"),
        ("countdown_tiny", "seed=0", "warn"),
        ("countdown_tiny_sft", "seed=0", "warn"),
        ("countdown_tiny", "launch.slurm.gpus=0", None),
        ("countdown_tiny", "launch.nodes.gpus_per_node=0", None),
        ("countdown_tiny", "launch.slurm.gpus=3", "FAIL"),
        ("countdown_tiny", "launch.nodes.gpus_per_node=2", "FAIL"),
    ],
)
def test_a_node_without_gpus_is_pointed_out_unless_none_are_wanted(recipe, override, level):
    config = config_of(recipe, override)
    found = failures(checks_of_node(config.launch.nodes, config)).get("gpus")
    assert (found and found.split()[0]) == level


@pytest.fixture
def without_cuda(monkeypatch):
    """This machine's torch may be a build with CUDA: the index has no other for Python 3.12."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)


def test_the_driver_of_a_run_on_one_node_is_looked_at(nvidia_smi, without_cuda):
    nvidia_smi(*["NVIDIA H200, 143771, 4, 580.65"] * 8)
    found = failures(checks_of_node(None, config_of("qwen2_5_7b")))
    assert "gpus" not in found and "torch was built without CUDA" in found["driver"]


@pytest.mark.parametrize(
    ("libc", "said"),
    [
        (("glibc", "2.28"), "FAIL  libc         glibc 2.28, "),
        (("", ""), "warn  libc         this system has no glibc"),
    ],
)
def test_a_system_that_is_too_old_for_the_wheels_is_found(monkeypatch, libc, said):
    monkeypatch.setattr(cluster_checks.platform, "libc_ver", lambda: libc)
    found = failures(checks_of_node(None, None))["libc"]
    assert found.startswith(said) and "launch/containers" in found
    assert said.startswith("warn") or "needs 2.34" in found  # SGLang's


def test_every_limit_that_is_too_low_is_told(tmp_path, monkeypatch):
    limits = {
        cluster_checks.resource.RLIMIT_NOFILE: (1024, 2048),
        cluster_checks.resource.RLIMIT_MEMLOCK: (65536, 65536),
        cluster_checks.resource.RLIMIT_AS: (4 * 2**30, 4 * 2**30),
    }
    monkeypatch.setattr(cluster_checks.resource, "getrlimit", limits.get)
    monkeypatch.setattr(cluster_checks, "INFINIBAND", tmp_path)
    said = [str(finding) for finding in checks_of_node(None, None) if finding.check == "limits"]
    assert [line.split()[0] for line in said] == ["warn", "FAIL", "warn"]
    assert "2048 open files" in said[0] and "64 KiB of memory may be locked" in said[1]
    assert "4 GiB of addresses are allowed" in said[2]


def test_busy_gpus_and_a_build_without_cuda_are_found(nvidia_smi, without_cuda):
    nvidia_smi("NVIDIA H200, 143771, 4, 580.65", "NVIDIA H200, 143771, 70000, 580.65")
    found = failures(checks_of_node(None, None))
    assert "GPU 1 has 70000 MiB in use" in found["gpus"]
    assert "torch was built without CUDA" in found["driver"]


def test_what_nvidia_smi_does_not_tell_is_no_problem(nvidia_smi, monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvidia_smi("NVIDIA H200 MIG 3g.71gb, [N/A], [N/A], [N/A]")
    assert {"gpus", "driver"}.isdisjoint(failures(checks_of_node(None, None)))


def test_a_driver_older_than_torchs_cuda_is_found(nvidia_smi, monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvidia_smi("NVIDIA A100, 81920, 4, 550.54")
    assert "driver 550.54 is too old for CUDA 13.0" in failures(checks_of_node(None, None))["driver"]
    nvidia_smi("NVIDIA A100, 81920, 4, 580.1")
    assert "driver" not in failures(checks_of_node(None, None))


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("NCCL_SOCKET_IFNAME", "ib9", "FAIL"),
        ("GLOO_SOCKET_IFNAME", "eth77", "FAIL"),
        ("NCCL_P2P_DISABLE", "1", "warn"),
    ],
)
def test_a_variable_that_an_old_job_left_is_found(monkeypatch, variable, value, level):
    monkeypatch.setenv(variable, value)
    found = failures(checks_of_node(None, None))["environment"]
    assert found.startswith(level)
    assert f"{variable}={value}" in found


@pytest.mark.parametrize("value", ["lo", "=lo", "^docker", "l"])
def test_a_variable_that_names_an_interface_here_is_left_alone(monkeypatch, value):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    assert "environment" not in failures(checks_of_node(None, None))


def test_an_interface_that_does_not_exist_and_a_model_that_is_not_there_are_found(tmp_path):
    config = config_of(
        "countdown_tiny",
        "launch.nodes={gpus_per_node: 0, interface: ib9}",
        f"model.path={tmp_path / 'nowhere'}",
    )
    found = failures(checks_of_node(config.launch.nodes, config))
    assert "ib9 does not exist" in found["address"]
    assert "nowhere" in found["model"]


def test_a_version_that_was_not_tested_is_found(monkeypatch):
    real = cluster_checks.importlib.metadata.version
    monkeypatch.setattr(
        cluster_checks.importlib.metadata, "version", lambda name: "0.1" if name == "sglang" else real(name)
    )
    assert "sglang is 0.1, tested is 0.5" in failures(checks_of_node(None, None))["versions"]


def meeting(folder: Path, node: int, *, nodes: int = 2, timeout_s: float = 30.0) -> Meeting:
    return Meeting(folder=folder / "meeting", node=node, num_nodes=nodes, timeout_s=timeout_s)


def test_a_node_that_does_not_come_is_named(tmp_path):
    found = failures(
        checks_between(NodesConfig(gpus_per_node=0), meeting(tmp_path, 1, nodes=3, timeout_s=0.5))
    )
    assert "of 3 nodes, [0, 2] left no file" in found["folder"]


def test_what_a_check_left_that_was_killed_is_not_taken_for_a_node(tmp_path):
    old = tmp_path / "meeting" / "card-0.json"
    old.parent.mkdir()
    old.write_text("{}")
    os.utime(old, (1_000_000, 1_000_000))
    assert "[0] left no file" in failures(checks_between(None, meeting(tmp_path, 1, timeout_s=0.5)))["folder"]


def test_a_folder_that_cannot_be_written_is_found(tmp_path):
    (tmp_path / "file").write_text("")
    assert (
        "Not a directory" in failures(checks_between(None, meeting(tmp_path / "file", 0, nodes=1)))["folder"]
    )


def test_a_node_that_cannot_write_waits_for_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    found = list(checks_between(None, meeting(tmp_path / "file", 0)))
    assert [finding.level for finding in found] == [Level.FAIL]


def test_a_file_system_without_locks_is_found(tmp_path, monkeypatch):
    """As Lustre that is mounted without ``-o flock`` answers."""
    monkeypatch.setattr(
        fcntl,
        "flock",
        lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSYS, "Function not implemented")),
    )
    said = failures(checks_between(None, meeting(tmp_path, 0, nodes=1)))["folder"]
    assert "without file locks (Function not implemented)" in said and "-o flock" in said


@pytest.mark.parametrize(
    ("greeting", "said"),
    [(b"220 smtp", "which says '220 smtp'"), (b"\x16\x03\xff\xfe", r"which says '\x16\x03\\xff\\xfe'"), (b"", "which says ''")],
)  # fmt: skip
def test_ports_that_a_firewall_closes_are_named(greeting, said):
    """The card of the other node tells of a port where nobody answers, or somebody else does."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    card = {"host": "n9", "address": "127.0.0.1", "port": port, "written": 0.0}
    assert "n9 (127.0.0.1:" in cluster_meeting._connect(card, 5.0)
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(greeting)

        thread = threading.Thread(target=answer)
        thread.start()
        problem = cluster_meeting._connect(card | {"port": stranger.getsockname()[1]}, 5.0)
        assert problem is not None and "is answered by another program" in problem and said in problem
        thread.join(timeout=10)


@pytest.mark.engines
def test_two_nodes_meet_connect_and_reduce(tmp_path):
    """The command itself, twice; its collective is a real one over gloo."""
    command = [
        sys.executable,
        "-m",
        "launch",
        "check-cluster",
        "--folder",
        str(tmp_path),
        "--nodes",
        "2",
        "--timeout",
        "60",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    both = [
        subprocess.Popen(
            [*command, "--node", str(n)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n in range(2)
    ]
    for process in both:
        text = process.communicate(timeout=150)[0]
        assert process.returncode == 0, text
        assert "a free port of each of 1 other nodes answers" in text
        assert "all-reduce of 64 MiB over 2 nodes" in text
    assert list(tmp_path.iterdir()) == []


def test_half_an_answer_to_who_we_are_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "launch", "check-cluster", "--nodes", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--nodes and --node belong together" in done.stderr


def test_a_slurm_step_says_who_we_are(monkeypatch, tmp_path):
    from launch.commands.check_cluster import _meeting

    for name, value in {
        "SLURM_STEP_ID": "3",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_NODEID": "2",
    }.items():
        monkeypatch.setenv(name, value)
    found = _meeting(tmp_path, None, None, 5.0)
    assert (found.num_nodes, found.node, found.folder.name) == (4, 2, ".check-cluster-17.3")
