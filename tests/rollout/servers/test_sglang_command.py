"""How SGLang servers are started: ports, command lines, environments, GPUs; none is."""

import contextlib
import json
import os
import socket
import tempfile
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from configs.schema.learner import LearnerConfig
from configs.schema.rollout import RolloutConfig
from rollout.servers.command import cpu_binding, files_of_other_models, server_command, server_environment
from rollout.servers.fleet import ServerFleet, visible_gpus
from rollout.servers.ports import Ports, choose_ports
from rollout.servers.served import (
    FP8_MODELS,
    check_dtype_is_served,
    check_gpus,
    check_gpus_of,
    check_quantization,
    check_samples_by_seed,
    check_server_args,
    check_temporary_folder,
    check_windows_are_served,
)
from rollout.servers.share import ServerShare, on_one_machine
from tests.support.server_specs import server_spec

ROOT = Path(__file__).resolve().parents[3]


def test_a_taken_port_is_named_with_the_fix_and_nothing_is_started(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with closing(socket.socket()) as other:
        first = choose_ports(range(2), None)[0].http
        other.bind(("127.0.0.1", first + 2))
        other.listen()
        fleet = ServerFleet(server_spec(tmp_path, first_port=first, replicas=2), tmp_path / "logs")
        with pytest.raises(
            ValueError, match=rf"port {first + 2} on 127.0.0.1 is taken.*choose another rollout.first_port"
        ):
            fleet.start()
        assert fleet.urls == []
        assert not (tmp_path / "logs").exists()


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused_and_nothing_is_started(
    tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text("{}")
    fleet = ServerFleet(server_spec(tmp_path), tmp_path / "logs")
    with (
        tempfile.TemporaryDirectory() as short,
        zmq.Context() as context,
        context.socket(zmq.PULL) as longest,
    ):
        folder = Path(f"{short}/".ljust(95, "x"))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        check_temporary_folder()
        with tempfile.NamedTemporaryFile() as file:
            name = file.name
        longest.bind(f"ipc://{name}")
    monkeypatch.setattr(tempfile, "tempdir", f"{folder}x")
    says = (
        "has 96 characters, too many for the paths of the sockets .* set TMPDIR to a folder with at most 95"
    )
    with pytest.raises(ValueError, match=says):
        fleet.start()
    assert fleet.urls == [] and not (tmp_path / "logs").exists()


def test_servers_return_experts_where_the_learner_replays_them(tmp_path):
    ports, share = choose_ports([0], None)[0], on_one_machine(1, 1)[0]
    spec = server_spec(tmp_path)
    assert "--enable-return-routed-experts" not in server_command(spec, share, ports)
    replays = spec.config.model_copy(update={"learner": LearnerConfig(routing="rollout")})
    on_cpu = server_command(replace(spec, config=replays), share, ports)
    assert "--enable-return-routed-experts" in on_cpu and "--moe-runner-backend" not in on_cpu
    # On Blackwell SGLang chooses kernels that route by themselves, and captures nothing.
    on_gpus = server_command(replace(spec, config=replays, cuda=True), share, ports)
    assert on_gpus[on_gpus.index("--moe-runner-backend") + 1] == "triton"
    with pytest.raises(ValueError, match="cannot be set there"):
        check_server_args(RolloutConfig(server_args={"enable_return_routed_experts": True}))


def test_servers_load_the_tokenizer_only_for_stop_texts(tmp_path):
    ports, share = choose_ports([0], None)[0], on_one_machine(1, 1)[0]
    for stop, skips in ((), True), (("</search>",), False):
        command = server_command(server_spec(tmp_path, stop=stop), share, ports)
        assert ("--skip-tokenizer-init" in command) == skips


def test_servers_of_recurrent_layers_keep_states_for_as_many_responses_as_are_asked_for(tmp_path):
    ports, share = choose_ports([0], None)[0], on_one_machine(1, 1)[0]
    spec = server_spec(tmp_path, max_concurrency=48, dtype="float32")
    flags = ("--disable-radix-cache", "--max-mamba-cache-size", "--disable-shared-experts-fusion")
    assert not set(flags) & set(server_command(spec, share, ports))
    (tmp_path / "config.json").write_text('{"linear_num_value_heads": 4}')
    on_cpu = server_command(spec, share, ports)
    assert flags[0] in on_cpu and on_cpu[on_cpu.index(flags[1]) + 1] == "48" and flags[2] not in on_cpu
    on_gpus = server_command(replace(spec, cuda=True), share, ports)
    assert flags[2] in on_gpus and not set(flags[:2]) & set(on_gpus)
    assert server_environment(spec, share, place=0)["SGLANG_MAMBA_CONV_DTYPE"] == "float32"


def first_of_four() -> int:
    """The first port of four replicas, all of whose ports are free: servers of other tests take ports too."""
    for _ in range(50):
        first = choose_ports([0], None)[0].http
        with contextlib.suppress(ValueError):
            return choose_ports(range(4), first)[0].http
    raise AssertionError("no eight neighbouring ports are free")


def test_given_ports_are_two_apart_and_free_ones_are_distinct():
    first = first_of_four()
    assert [(p.http, p.nccl) for p in choose_ports(range(3), first)] == [
        (first + i, first + i + 1) for i in (0, 2, 4)
    ]
    assert [p.http for p in choose_ports([2, 3], first)] == [first + 4, first + 6], (
        "by the replica, also on a node that has not the first"
    )
    free = choose_ports(range(20), None)
    assert len({port for p in free for port in (p.http, p.nccl)}) == 40
    with pytest.raises(ValueError, match=r"first_port=65000 with 300 replicas needs ports up to 65599"):
        choose_ports(range(300), 65000)


def test_the_users_flags_come_last_and_cannot_take_over_the_designs(tmp_path):
    ports, share = choose_ports([0], None)[0], on_one_machine(3, 1)[2]
    spec = server_spec(
        tmp_path,
        seed=5,
        dtype="float32",
        server_args={"chunked_prefill_size": 512, "disable-radix-cache": True, "enable-metrics": False},
    )
    command = server_command(spec, share, ports)
    pairs = dict(pairwise(command))
    assert pairs["--chunked-prefill-size"] == "512"
    assert "--disable-radix-cache" in command
    assert "--enable-metrics" not in command
    assert (pairs["--device"], pairs["--dtype"], pairs["--random-seed"], pairs["--weight-version"]) == (
        "cpu",
        "float32",
        "7",
        "0",
    )
    assert "--device" not in server_command(replace(spec, cuda=True), share, ports)
    names = (
        "port",
        "tp_size",
        "--dtype",
        "base_gpu_id",
        "nnodes",
        "dist_init_addr",
        "quantization",
        "load-format",
        "model",
        "config",
    )
    for name in (*names, "nccl_init_addr", "pp_size", "data-parallel-size", "tp", "dtyp", "mod"):
        with pytest.raises(ValueError, match=f"server_args: '{name}' cannot be set there"):
            check_server_args(RolloutConfig(server_args={name: 1}))
        with pytest.raises(ValueError, match=f"server_args: '{name}' cannot be set there"):
            ServerFleet(server_spec(tmp_path, server_args={name: 1}), tmp_path)


@pytest.mark.parametrize(
    ("architecture", "file"),
    [
        ("Qwen2ForCausalLM", "qwen2"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("LlamaForCausalLM", "llama"),
        ("Qwen3MoeForCausalLM", "qwen3_moe"),
        ("MixtralForCausalLM", "mixtral"),
    ],
)
def test_a_server_imports_the_code_of_its_own_model_alone(tmp_path, architecture, file):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    others = files_of_other_models(tmp_path)
    assert len(others) > 100 and file not in others and ("llama" in others) == (file != "llama")


@pytest.mark.parametrize("text", ['{"architectures": ["NoSuchModel"]}', '{"architectures": null}', "[]", "{"])
def test_an_architecture_that_is_not_found_leaves_all_models_in(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert files_of_other_models(tmp_path) == []
    assert files_of_other_models(tmp_path / "nowhere") == []


def test_fp8_is_asked_of_a_server_that_can_take_updates_in_it(tmp_path):
    """The models are those of SGLang's own sources: whose file marks its loader so."""
    models = Path(find_spec("sglang").submodule_search_locations[0]) / "srt" / "models"
    assert {
        file.stem for file in models.glob("*.py") if "@supports_quantized_rl_reload" in file.read_text()
    } == set(FP8_MODELS)
    fp8 = RolloutConfig(quantization="fp8")
    plain, quantised, rounded = (
        server_command(
            server_spec(tmp_path, cuda=True, **rollout), on_one_machine(1, 1)[0], Ports(http=1, nccl=2)
        )
        for rollout in ({}, {"quantization": "fp8"}, {"precision": "int8"})
    )
    assert rounded == plain
    assert [x for x in quantised if x not in plain] == ["--quantization", "fp8", "--load-format", "flash_rl"]
    for model_type in FP8_MODELS:
        check_quantization(fp8, model_type)
    for model_type in ("llama", "qwen3_moe", "mixtral"):
        check_quantization(RolloutConfig(), model_type)
        with pytest.raises(
            ValueError, match=f"cannot update a {model_type} model .* set rollout.quantization=none"
        ):
            check_quantization(fp8, model_type)
    with pytest.raises(ValueError, match=r"rollout\.quantization=fp8 needs NVIDIA GPUs"):
        ServerFleet(server_spec(tmp_path, quantization="fp8"), tmp_path)
    with pytest.raises(
        ValueError, match="quantization=fp8 computes with activations of 2 bytes, but dtype=float32"
    ):
        RolloutConfig(quantization="fp8", dtype="float32")
    with pytest.raises(ValueError, match="precision=int8 would round weights that SGLang rounds again"):
        RolloutConfig(quantization="fp8", precision="int8")


@pytest.mark.parametrize(
    ("name", "value", "is_refused"),
    [
        ("enable-deterministic-inference", True, True),
        ("enable_deterministic_inference", True, True),
        ("enable-deterministic-inference", False, False),
        ("disable-radix-cache", True, False),
    ],
)
def test_the_deterministic_mode_is_refused_on_cpu(name, value, is_refused):
    config = RolloutConfig(server_args={name: value})
    check_samples_by_seed(config, cuda=True)
    if not is_refused:
        return check_samples_by_seed(config, cuda=False)
    with pytest.raises(ValueError, match="enable-deterministic-inference needs NVIDIA GPUs"):
        check_samples_by_seed(config, cuda=False)


def test_float32_on_gpus_is_served_by_exact_products_and_refused_for_gated_delta_nets(tmp_path):
    """SGLang would choose fa3 or flashinfer, whatever the dtype, and neither takes float32. Triton rounds to TF32 by default."""
    share = ServerShare(replica=0, node=0, node_rank=0, num_nodes=1, first_gpu=0, num_ranks=1)
    ports = Ports(http=1, nccl=2)
    for dtype, own, backend in (
        ("float32", {}, "triton"),
        ("bfloat16", {}, None),
        ("float32", {"attention_backend": "torch_native"}, "torch_native"),
    ):
        spec = server_spec(tmp_path, cuda=True, dtype=dtype, server_args=own)
        flags = dict(pairwise(server_command(spec, share, ports)))
        assert flags.get("--attention-backend") == backend
        of_products = server_environment(spec, share, 0).get("TRITON_F32_DEFAULT")
        assert of_products == ("ieee" if dtype == "float32" else None)
    check_dtype_is_served(RolloutConfig(dtype="float32"), tmp_path, cuda=True)
    (tmp_path / "config.json").write_text(json.dumps({"linear_num_value_heads": 4}))
    check_dtype_is_served(RolloutConfig(), tmp_path, cuda=True)
    check_dtype_is_served(RolloutConfig(dtype="float32"), tmp_path, cuda=False)
    with pytest.raises(ValueError, match=r"rollout\.dtype=float32: SGLang's GPU kernels of gated delta nets"):
        check_dtype_is_served(RolloutConfig(dtype="float32"), tmp_path, cuda=True)


def test_windows_are_refused_where_sglang_would_cut_them_short():
    for own in ({}, {"attention_backend": "fa3"}):
        check_windows_are_served(RolloutConfig(server_args=own), "olmo3", (16, None), cuda=True)
    triton = RolloutConfig(server_args={"attention-backend": "triton"})
    check_windows_are_served(triton, "olmo3", (16, None), cuda=False)
    for windows in ((), (None, None)):
        check_windows_are_served(triton, "olmo2", windows, cuda=True)
    both = RolloutConfig(server_args={"attention_backend": "triton", "decode_attention_backend": "fa3"})
    check_windows_are_served(both, "olmo3", (16, None), cuda=True)
    of_decode = RolloutConfig(server_args={"decode_attention_backend": "triton"})
    for config in (triton, of_decode, RolloutConfig(dtype="float32")):
        with pytest.raises(
            ValueError, match=r"leaves out the oldest token of a window .* this olmo3 has windows"
        ):
            check_windows_are_served(config, "olmo3", (16, None), cuda=True)


def gpus_of(config: RolloutConfig, *, first_gpu: int, cuda: bool) -> list[range | None]:
    """Of each replica, by its command line; None where it says nothing about GPUs."""
    found = []
    shares = on_one_machine(config.replicas, config.tp, first_gpu=first_gpu)
    for share, ports in zip(shares, choose_ports(range(config.replicas), None), strict=True):
        command = server_command(server_spec(ROOT, cuda=cuda, tp=config.tp), share, ports)
        pairs = dict(pairwise(command))
        base = pairs.get("--base-gpu-id")
        found.append(None if base is None else range(int(base), int(base) + int(pairs["--tp-size"])))
    return found


@pytest.mark.parametrize(
    ("first_gpu", "replicas", "tp"), [(0, 1, 1), (1, 1, 1), (8, 2, 2), (3, 4, 1), (2, 3, 4)]
)
def test_learner_ranks_and_replicas_each_have_gpus_of_their_own(first_gpu, replicas, tp):
    config = RolloutConfig(replicas=replicas, tp=tp)
    used = [
        *range(first_gpu),
        *(gpu for gpus in gpus_of(config, first_gpu=first_gpu, cuda=True) for gpu in gpus),
    ]
    assert used == list(range(first_gpu + replicas * tp))  # none twice, none skipped
    assert gpus_of(config, first_gpu=first_gpu, cuda=False) == [None] * replicas
    check_gpus(config, first_gpu=first_gpu, available=len(used))
    message = rf"{len(used)} GPUs are needed, {first_gpu} for the learner .*replicas={replicas}.*but {len(used) - 1} are visible.*use fewer"
    with pytest.raises(ValueError, match=message):
        check_gpus(config, first_gpu=first_gpu, available=len(used) - 1)


def test_a_fleet_with_too_few_gpus_starts_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first_gpu = visible_gpus()
    shares = on_one_machine(1, 2, first_gpu=first_gpu)
    fleet = ServerFleet(server_spec(tmp_path, cuda=True, tp=2), tmp_path / "logs", shares)
    with pytest.raises(
        ValueError,
        match=rf"take GPUs {first_gpu} to {first_gpu + 1}, but {first_gpu} are visible.*fewer learner ranks",
    ):
        fleet.start()
    assert fleet.urls == []
    assert not (tmp_path / "logs").exists()
    check_gpus_of(shares, available=first_gpu + 2)
    check_gpus_of([], available=0)


def test_each_node_of_a_replica_starts_its_own_part():
    spec = server_spec(ROOT, cuda=True, seed=5, tp=16, server_args={"mem-fraction-static": 0.8})
    lines = []
    for node in range(2):
        share = ServerShare(replica=1, node=2 + node, node_rank=node, num_nodes=2, first_gpu=0, num_ranks=8)
        (ports,) = choose_ports([1], None)
        lines.append(server_command(replace(spec, host=f"10.0.0.{3 + node}"), share, ports, "10.0.0.3:20001"))
    first, second = (dict(pairwise(line)) for line in lines)
    differing = {name for name in first if name.startswith("--") and first[name] != second[name]}
    assert differing == {"--host", "--port", "--nccl-port", "--node-rank"}
    assert (first["--node-rank"], second["--node-rank"], first["--nnodes"], first["--tp-size"]) == (
        "0",
        "1",
        "2",
        "16",
    )
    assert first["--dist-init-addr"] == "10.0.0.3:20001"
    # One engine: its ranks must draw the same.
    assert (first["--random-seed"], first["--base-gpu-id"]) == (
        "6",
        "0",
    )


def test_the_plugin_is_on_every_servers_path_and_stand_ins_on_those_of_cpu_servers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    (share,) = on_one_machine(1, 2)
    spec = server_spec(ROOT)
    on_cpu = server_environment(spec, share, place=0)
    on_cuda = server_environment(replace(spec, cuda=True), share, place=0)
    ours = [str(ROOT / folder) for folder in ("rollout/cpu_stand_ins", "rollout/sglang_plugin", "")]
    assert on_cpu["PYTHONPATH"].split(":") == [*ours, "/mine"]
    assert on_cpu["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    first_of_two = replace(share, num_nodes=2, num_ranks=1)
    assert "|" not in server_environment(spec, first_of_two, place=0)["SGLANG_CPU_OMP_THREADS_BIND"]
    assert on_cuda["PYTHONPATH"].split(":") == [*ours[1:], "/mine"]
    without = server_environment(server_spec(ROOT, sglang_plugin=False), share, place=0)
    assert without["PYTHONPATH"].split(":") == [ours[0], "/mine"]
    assert not {"SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND"} & on_cuda.keys() - os.environ.keys()


@pytest.mark.parametrize(
    ("cpus", "place", "num_ranks", "threads", "expected"),
    [
        ([0, 1], 0, 2, 1, "0|1"),
        (list(range(8)), 1, 2, 2, "4,5|6,7"),
        ([3, 5], 1, 2, 1, "3|5"),
        ([0], 0, 2, 4, "0|0"),
    ],
)
def test_cpu_binding_by_hand(cpus, place, num_ranks, threads, expected):
    assert cpu_binding(cpus, place=place, num_ranks=num_ranks, threads=threads) == expected
