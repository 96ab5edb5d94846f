"""``--dry-run``: its output is a config again; its figures are those of the run, by hand or by what computes
them in a run."""

import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from configs.loader import ConfigError, load_config, resolved_yaml
from configs.schema import RunConfig
from configs.schema.layout import LayoutConfig
from configs.schema.rollout import RolloutConfig
from launch import cli
from launch.checks import config as checks
from launch.checks.arguments import BadInput
from launch.checks.correction import gap_notes
from launch.checks.device_memory import memory_lines, memory_problems, need_of
from launch.checks.devices import Device, _smallest_gpu
from launch.commands import train as training
from launch.commands.dry_run import batch_lines, dry_run_lines, most_microbatches
from launch.processes import run_folder
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import Supervisor
from parallel.checkpoints.files import write_manifest
from parallel.planning.architecture import architecture_of, read_hf_config
from parallel.planning.layout import validate_layout
from parallel.planning.memory import GIB, size_text, stage_parameters, worst_stage
from parallel.planning.server_memory import rollout_memory
from parallel.planning.traffic import bytes_to_send
from parallel.planning.work import work_of
from parallel.weights.precision import packed_form
from rollout.tiny_model import make_tiny_countdown_model
from tests.configs.test_broken_configs import BASE, MODELS
from tests.support.model_folders import make_model_folder
from trainer.batch.plan import plan_batches

ROOT = Path(__file__).resolve().parents[3]
FP8 = ["rollout.dtype=bfloat16", "rollout.quantization=fp8"]
CPU = Device(kind="cpu", bytes=64 * GIB, name="this machine")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("dense", "experts", "7b"):
        make_model_folder(tmp_path / name, MODELS[name])
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    sft = {"kind": "sft", "model": {"path": "dense"}, "data": {"type": "countdown"}, "output": "warm"}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(sft))
    return tmp_path


def config(*overrides: str) -> RunConfig:
    return load_config("run.yaml", ["layout.dp=1", *overrides])


def gpu(gib: float) -> Device:
    return Device(kind="cuda", bytes=int(gib * GIB), name="a GPU")


# -------------------------------------------------------------------------------------------------------------
# the whole output


@pytest.mark.parametrize(
    ("arguments", "overrides", "says"),
    [
        (
            ["train", "run.yaml"],
            ["layout.dp=2"],
            ["0-1 of 2", "--nproc-per-node=2", "batch of one step", "weights sent after every step"],
        ),
        (
            ["train", "run.yaml", "--gpu-memory", "80"],
            ["layout.tp=2", "layout.dp=8", "rollout.replicas=2", "launch.nodes={learner: 2, rollout: 2}"],
            ["--nnodes=2", "node 3 (rollout 1)", "80.0 GiB of a GPU (--gpu-memory)", "--node NODE"],
        ),
        (
            ["train", "run.yaml"],
            ["layout.dp=2", "launch.nodes={gpus_per_node: 4}"],
            ["whose size is unknown here"],
        ),
        (
            ["slurm", "run.yaml"],
            ["layout.dp=2"],
            ["the job's node", "GPU 0-1", "(give --gpu-memory GIB)", "--gres=gpu:3"],
        ),
        (
            ["slurm", "run.yaml", "--gpu-memory", "80"],
            ["layout.dp=2"],
            ["the job's node", "80.0 GiB of a GPU (--gpu-memory)"],
        ),
        (
            ["slurm", "run.yaml"],
            ["layout.dp=2", "launch.slurm.gpus=0"],
            ["the job's node", "CPU", "memory of a learner rank"],
        ),
        (["sft", "sft.yaml"], ["layout.dp=2"], ["sft-rank", "64 = 128 / dp 2", "memory of a learner rank"]),
        (["eval", "run.yaml"], ["layout.dp=1"], ["SGLang 0", "memory of a server rank"]),
    ],
)
def test_the_output_is_the_resolved_config_and_says_what_would_be_started(
    folder, monkeypatch, capsys, arguments, overrides, says
):
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments, *overrides, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr().out
    assert not ended.value.code and sorted(folder.rglob("*")) == before
    Path("printed.yaml").write_text(printed)
    assert load_config("printed.yaml") == load_config(arguments[1], overrides)
    assert printed.splitlines()[-1].startswith("# no error was found: ")
    assert [words for words in says if words not in printed] == []
    facts, _, _ = printed.partition("# the resolved config:")
    notes, _, facts = facts.partition("# processes that would be started:")
    assert facts and (
        "launch.slurm.cpus_per_node is not set" in notes if arguments[0] == "slurm" else not notes
    )
    assert ("learn" in facts) == (arguments[0] != "eval")
    assert arguments[0] != "slurm" or "this machine" not in printed, "a job is not here"


def test_the_evaluation_of_a_run_is_of_the_model_that_it_has_trained(folder, capsys):
    """Its config names the model that it began with."""
    run = run_folder.create(Path("runs"), "done", resolved_yaml(config()))
    with pytest.raises(BadInput, match=r"has not written its trained model; `tandem export \S+done\S* OUT`"):
        training.evaluate(run.path, [], dry_run=True)
    shutil.copytree(config().model.path, run.hf)
    run.summary.write_text('{"steps": 3}')
    training.evaluate(run.path, ["evaluation.greedy=true"], dry_run=True)
    Path("printed.yaml").write_text(capsys.readouterr().out)
    printed = load_config("printed.yaml")
    assert printed.model.path == run.hf.resolve() and printed.evaluation.greedy


def test_a_terminal_shows_the_facts_alone(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    training.train(Path("run.yaml"), ["layout.dp=1"], dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# processes that would be started:" and "> FILE" in lines[-2] and len(lines) < 60
    assert lines[-1] == "no error was found: all checks before a start have passed, and nothing was started"


def test_what_the_data_hold(folder):
    rows = [json.dumps({"question": str(i // 2), "answer": "#### 2"}) + "\n" for i in range(100)]
    Path("train.jsonl").write_text("".join(rows))
    task = "task={type: gsm8k, train_path: train.jsonl, apply_chat_template: false}"
    lines = list(dry_run_lines(config(task, "steps=50", "rollout.prompts_per_step=4"), checks.TRAINING, CPU))
    assert "  task.train_path  train.jsonl  100 prompts, 50 of them distinct; 2 epochs in steps=50" in lines


def test_stop_texts_are_told(folder):
    lines = list(dry_run_lines(config("rollout.stop=['1+', '=2']"), checks.TRAINING, CPU))
    told = "  rollout.stop: every turn also ends with the token that completes '1+' or '=2', for which servers load the tokenizer"
    assert told in lines


def test_gpus_of_other_machines_are_for_planning_alone(folder):
    with pytest.raises(checks.BadInput, match=r"--gpu-memory 80 .* use it with --dry-run"):
        training.train(Path("run.yaml"), [], gpu_memory=80)


@pytest.fixture
def stopped(folder) -> RunFolder:
    """A run that has stopped after 7 of its 9 steps."""
    run = RunFolder(folder / "runs" / "before")
    saved = run.checkpoints / "step_000007"
    saved.mkdir(parents=True)
    write_manifest(saved, world_size=1)
    run.config.write_text(yaml.safe_dump(BASE | {"steps": 9, "layout": {"dp": 1}}))
    return run


def test_a_run_goes_on_in_its_own_folder_whatever_its_name(stopped, capsys):
    training.resume(stopped.path, ["name=other", "launch.runs_dir=elsewhere"], dry_run=True)
    printed = capsys.readouterr().out
    assert f"learn: {sys.executable}" in printed and f" {stopped.path}\n" in printed
    assert "other-DATE-TIME" not in printed


def test_a_run_goes_on_after_its_model_has_moved(stopped, folder, capsys):
    """The run names it as dense. What has moved is known by its weights, where both are here; else it is told."""
    shutil.copytree("dense", "copy")
    training.resume(stopped.path, ["model.path=copy"], dry_run=True)
    assert "is unknown" not in capsys.readouterr().err
    Path("dense").rename("moved")
    training.resume(stopped.path, ["model.path=moved"], dry_run=True)
    assert f"# the weights of dense, the model of {stopped.path}, are not here" in capsys.readouterr().err
    Path("dense").mkdir()
    (Path("dense") / "model.safetensors").symlink_to("nowhere")  # of a cache that was emptied
    training.resume(stopped.path, ["model.path=moved"], dry_run=True)
    assert f"# the weights of dense, the model of {stopped.path}, are not here" in capsys.readouterr().err
    shutil.rmtree("dense")
    Path("copy").rename("dense")
    with pytest.raises(ConfigError, match=r"`model\.path` .* is dense, but the weights in experts differ"):
        training.resume(stopped.path, ["model.path=experts"], dry_run=True)


def test_a_finished_run_is_told_of_and_begun_no_more(stopped, monkeypatch, capsys):
    """By whatever starts it again, and without an error: only with more steps does it go on."""
    monkeypatch.setattr(Supervisor, "start", lambda *_: pytest.fail("a process would have been started"))
    (stopped.path / "hf").mkdir()
    stopped.summary.write_text('{"steps": 7}')
    told = f"{stopped.path} is finished, with steps=7; for more: `tandem resume {stopped.path} steps=N`"
    before = sorted(stopped.path.rglob("*"))
    assert training.train(stopped.config, [f"resume={stopped.path}", "steps=7"]).path == stopped.path
    assert capsys.readouterr().out == f"{told}\n"
    training.resume(stopped.path, ["steps=7"], dry_run=True)
    assert capsys.readouterr().out == f"# {told}\n" and sorted(stopped.path.rglob("*")) == before
    training.resume(stopped.path, [], dry_run=True)
    assert "processes that would be started" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"has done 7 steps, more than steps=6\s+fix: +give steps=7 or more"
    ):
        training.resume(stopped.path, ["steps=6"], dry_run=True)


def test_a_dry_run_imports_no_engine(folder):
    code = (
        "import sys; from launch import cli\n"
        "sys.argv = ['tandem', 'train', 'run.yaml', '--dry-run']\n"
        "try: cli.main()\n"
        "except SystemExit as ended: print('\\n', ended.code, sorted(sys.modules.keys() & {'torch', 'sglang', 'megatron', 'transformers'}))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("0 []\n"), done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------------------
# processes


def table(
    config: RunConfig, runs: tuple[str, ...] = checks.TRAINING, device: Device | None = None
) -> list[list[str]]:
    lines = list(dry_run_lines(config, runs, device or gpu(80)))
    return [re.split(r"  +", line.strip()) for line in lines[2 : lines.index("")]]


def test_one_machine(folder):
    found = table(config("layout.dp=2", "rollout.tp=2", "rollout.replicas=2", "rollout.first_port=30000"))
    here = "this machine"
    assert found == [
        ["serve: SGLang 0", here, "TP 0-1 of 2", "GPU 2-3", "port 30000"],
        ["serve: SGLang 1", here, "TP 0-1 of 2", "GPU 4-5", "port 30002"],
        ["sample", here, "1 process", "CPU", "a free port"],
        ["learn", here, "0-1 of 2", "GPU 0-1", "no port: its ranks meet in a file"],
    ]
    devices = [row[3] for row in table(config("layout.dp=2", "rollout.tp=2", "launch.placement=colocated"))]
    assert devices == ["GPU 0-1", "CPU", "GPU 0-1"], "both sides have the same GPUs"
    assert [row[3] for row in table(config("layout.dp=2", "rollout.tp=2"), checks.EVALUATION)] == [
        "GPU 0-1",
        "CPU",
    ], "no learner is there"
    assert [row[3] for row in table(config("layout.dp=2"), device=CPU)] == ["CPU", "CPU", "CPU"]


def test_a_server_on_several_nodes(folder):
    nodes = "launch.nodes={learner: 2, rollout: 4, gpus_per_node: 2}"
    found = table(config("layout.dp=4", "rollout.tp=4", "rollout.replicas=2", nodes))
    assert found == [
        ["serve-0: SGLang 0, node 0 of 2", "node 2 (rollout 0)", "TP 0-1 of 4", "GPU 0-1", "two free ports"],
        [
            "serve-1: SGLang 0, node 1 of 2",
            "node 3 (rollout 1)",
            "TP 2-3 of 4",
            "GPU 0-1",
            "that of its first node",
        ],
        ["serve-2: SGLang 1, node 0 of 2", "node 4 (rollout 2)", "TP 0-1 of 4", "GPU 0-1", "two free ports"],
        [
            "serve-3: SGLang 1, node 1 of 2",
            "node 5 (rollout 3)",
            "TP 2-3 of 4",
            "GPU 0-1",
            "that of its first node",
        ],
        ["sample", "node 0 (learner 0)", "1 process", "CPU", "a free port"],
        ["learn", "node 0 (learner 0)", "0-1 of 4", "GPU 0-1", "a free port (rendezvous)"],
        ["learn", "node 1 (learner 1)", "2-3 of 4", "GPU 0-1", "that of its first node (rendezvous)"],
    ]


def test_colocated_sides_of_two_nodes(folder):
    nodes = "launch.nodes={learner: 2, rollout: 2, gpus_per_node: 2}"
    sides = ["layout.dp=4", "rollout.tp=2", "rollout.replicas=2", "launch.placement=colocated"]
    assert [(row[0], row[1], row[3]) for row in table(config(*sides, nodes))] == [
        ("serve-0: SGLang 0", "node 0 (rollout 0)", "GPU 0-1"),
        ("serve-1: SGLang 1", "node 1 (rollout 1)", "GPU 0-1"),
        ("sample", "node 0 (learner 0)", "CPU"),
        ("learn", "node 0 (learner 0)", "GPU 0-1"),
        ("learn", "node 1 (learner 1)", "GPU 0-1"),
    ]


# -----------------------------------------------------------------------------------------------------------------------
# batch


def test_the_batch_by_hand(folder):
    """6 prompts of 4 siblings: 24 sequences; 12 in each minibatch; 6 on each of two ranks. A sequence of 14
    response tokens after a prompt of up to 14 takes up to 27 places: 2 fit into 60, so that 3 micro-batches
    are enough; 6 responses of 14 take 84, which is more than one.
    """
    lines = batch_lines(
        config(
            "layout.dp=2",
            "rollout.prompts_per_step=6",
            "rollout.group_size=4",
            "learner.minibatches=2",
            "learner.token_budget=60",
        )
    )
    text = "\n".join(lines)
    for words in (
        "24 = 6 prompts x 4 siblings",
        "12 = 24 / 2 minibatches",
        "6 = 12 / dp 2",
        "1 to 6, by the lengths",
    ):
        assert words in text
    assert "at least 2 if every response has rollout.max_new_tokens=14" in text
    assert "at most 3 if no prompt has more than 14 tokens" in text


def test_what_is_known_of_prompts_from_a_file(folder):
    lines = [json.dumps({"question": question, "answer": "#### 2"}) for question in ("a" * 50, "é" * 30)]
    Path("train.jsonl").write_text("\n".join(lines))
    task = "task={type: gsm8k, train_path: train.jsonl, system_prompt: answer}"
    text = "\n".join(
        batch_lines(config(task, "reward={type: gsm8k}", "rollout.dynamic_sampling={type: resample}"))
    )
    assert (
        "no prompt has more than 66 tokens (bytes of the longest of train.jsonl, without the chat template)"
        in text
    )
    assert "at most 128 prompts, in 4 rounds" in text


def test_sampling_ahead_is_told_with_what_is_under_way(folder):
    lines = batch_lines(
        config("rollout.prompts_per_step=32", "rollout.group_size=8", "rollout.max_staleness=2")
    )
    (ahead,) = [line for line in lines if "max_staleness" in line]
    assert "=2: up to 768 samples of 3 steps are under way, 512 of them at the servers" in ahead
    assert ahead.endswith("no token lags by more than 2 versions")
    assert not [line for line in batch_lines(config()) if "max_staleness" in line]


def test_rounded_weights_are_told_as_weight_only(folder):
    (line,) = [line for line in batch_lines(config("rollout.precision=int4")) if "precision" in line]
    assert "rollout.precision=int4: weight-only: the learner rounds the layers' matrices to INT4" in line
    assert not [line for line in batch_lines(config()) if "precision" in line]


WIDE = "correction={mode: decoupled, weight: {level: token}, reject: [{rule: ratio, level: geometric, upper: 1.2}]}"


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (["rollout.max_staleness=1", "correction=disabled"], "without a correction"),
        (["rollout.max_staleness=1", "correction=decoupled_token_is"], None),
        (["rollout.max_staleness=1", "correction=decoupled_k3_rs"], None),
        (["rollout.max_staleness=1", "correction=decoupled_geo_rs"], "a geometric ratio up to 1.001"),
        (["rollout.max_staleness=1", "correction=bypass_geo_rs"], "a geometric ratio up to 1.001"),
        (["rollout.max_staleness=1", WIDE], None),
        (["rollout.max_staleness=1", "correction=ppo_is_bypass"], None),
        (["correction=disabled"], None),
        (["correction=decoupled_geo_rs"], None),
        (["rollout.precision=int2", "correction=ppo_is"], "clips against the rounded policy"),
        (["rollout.precision=int4", "correction=decoupled_geo_rs_token_is"], "(998 of 1,000 at int2"),
        (
            [*FP8, "correction=decoupled_geo_rs"],
            "rollout.quantization=fp8 it rejects most responses (17 of 20",
        ),
        ([*FP8, "correction=ppo_is"], None),
        (["rollout.precision=int2", "correction=disabled"], None),
        (["rollout.precision=int2", "correction=pg_is"], None),
        (["rollout.precision=int2", "correction=decoupled_seq_is"], None),
        (["rollout.precision=int8", "correction=ppo_is"], None),
        (["rollout.precision=bf16", "correction=decoupled_geo_rs"], None),
        (["objective={type: dppo}"], "where its paper bounds it from the rollout's"),
        (["objective={type: dppo}", "correction=ppo_is_bypass"], None),
    ],
)
def test_samples_of_another_policy_that_the_correction_does_not_suit_are_warned_of(folder, options, warned):
    notes = list(gap_notes(config(*options)))
    assert [warned in note for note in notes] == ([True] if warned else [])


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6))
def test_no_plan_of_a_batch_takes_more_micro_batches_nor_fewer(data, dp, multiple, rounds):
    """Against the packing that a run does, for any lengths within the bounds."""
    each = multiple * rounds
    response = data.draw(st.integers(1, 20))
    longest = data.draw(st.integers(response, 30))
    budget = data.draw(st.integers(longest, 100))
    lengths = data.draw(st.lists(st.integers(response, longest), min_size=each * dp, max_size=each * dp))
    plan = plan_batches(
        lengths,
        minibatches=[range(each * dp)],
        dp_size=dp,
        token_budget=budget,
        microbatch_multiple=multiple,
    )
    taken = len(plan.microbatches[0][0])
    assert taken <= most_microbatches(each, longest=longest, token_budget=budget, multiple=multiple) <= each
    assert taken * budget >= each * response and taken % multiple == 0


# ----------------------------------------------------------------------------------------------------------------------
# memory


def test_memory_is_that_of_the_fullest_ranks(folder):
    asked = config(
        "model.path=7b",
        "model.dtype=bfloat16",
        "layout.tp=4",
        "layout.pp=2",
        "rollout.tp=2",
        "learner.recompute=full",
    )
    architecture = architecture_of(asked.model.path)
    learner = worst_stage(architecture, asked.layout, work_of(asked, "cuda"))
    server = rollout_memory(architecture, 2, "bfloat16", 80 * GIB)
    lines = memory_lines(asked, gpu(80), checks.TRAINING)
    title = f"memory of the fullest learner rank (pipeline stage {learner.stage} of 2): {size_text(learner.total)} of the 80.0 GiB of a GPU"
    assert lines[0].startswith(title)
    itemised = dict(re.findall(r"^  (\w+) +(\d\S* \w+)$", "\n".join(lines), re.M))
    assert itemised.items() >= {name: size_text(size) for name, size in learner.items().items()}.items()
    assert any(f"cache for {server.tokens:,} tokens" in line for line in lines)


def test_a_limit_of_the_servers_cache_is_kept(folder):
    asked = config(*["model.path=7b", "model.dtype=bfloat16", "rollout.max_total_tokens=65536"])
    lines = "\n".join(memory_lines(asked, gpu(80), checks.EVALUATION))
    assert "cache for 65,536 tokens" in lines and "unused, by rollout.max_total_tokens" in lines
    small = config(*["model.path=7b", "model.dtype=bfloat16", "rollout.max_total_tokens=8"])
    assert list(memory_problems(small, gpu(80), checks.EVALUATION)) == [], (
        "a larger rollout.tp would not help"
    )


def test_on_cpu_all_processes_share_the_machine(folder):
    """Every rank of every stage, and each server rank with a cache of max_total_tokens."""
    asked = config(
        "layout.pp=2", "layout.dp=2", "rollout.tp=2", "rollout.replicas=3", "rollout.max_total_tokens=1000"
    )
    need = need_of(asked, CPU, checks.TRAINING)
    architecture = architecture_of(asked.model.path)
    server = rollout_memory(architecture, 2, "bfloat16", 0)
    # Key and value, 4 layers, 1 of 2 heads, 16 numbers of 2 bytes.
    of_servers = 6 * (server.weights + 1000 * 2 * 4 * 1 * 16 * 2)
    assert need.on_one_machine - need.learner_total == of_servers
    assert need.learner.total < need.learner_total <= 4 * need.learner.total
    exactly = Device(kind="cpu", bytes=need.on_one_machine, name="this machine")
    assert list(memory_problems(asked, exactly, checks.TRAINING)) == []
    less = Device(kind="cpu", bytes=need.on_one_machine - 1, name="this machine")
    assert [field for field, _ in memory_problems(asked, less, checks.TRAINING)] == ["learner.token_budget"]
    assert list(memory_problems(asked, less, checks.EVALUATION)) == [], "no learner is started"


def test_the_fix_for_a_learner_that_does_not_fit_fits(folder):
    """At every size of GPU where a change of the config is offered, that change is enough."""
    offered = 0
    overrides = [
        "model.path=7b",
        "model.dtype=bfloat16",
        "layout.tp=4",
        "layout.dp=2",
        "rollout.tp=4",
        "rollout.max_new_tokens=2048",
    ]
    for gib in range(16, 121, 4):
        problems = [
            said
            for field, said in memory_problems(config(*overrides), gpu(gib), checks.WARM_START)
            if field == "layout"
        ]
        for changes in re.findall(r"; use ((?:\w+\.\S+=\S+(?: and )?)+) or", "\n".join(problems)):
            offered += 1
            assert (
                list(
                    memory_problems(config(*overrides, *changes.split(" and ")), gpu(gib), checks.WARM_START)
                )
                == []
            )
    assert offered >= 2


def test_a_tight_learner_says_what_would_make_room(folder):
    """Sizes of GPU at which a rank takes more than 90 %, with and without layers that are computed again
    already; a single copy of the model cannot split its sequences over another's ranks. The state of an optimizer matters less
    than activations where it is that of adapters, or is there only in a step and divided by eight."""
    said = set()
    for recompute, dp, more in (
        ("none", 2, []),
        ("full", 2, []),
        ("full", 8, ["learner.optimizer.offload=true"]),
        ("full", 1, ["learner.optimizer.offload=true", "learner.lora={}"]),
    ):
        overrides = [
            "model.path=7b",
            "model.dtype=bfloat16",
            "layout.tp=4",
            f"layout.dp={dp}",
            f"learner.recompute={recompute}",
            *more,
        ]
        # No lower budget is offered.
        overrides += [
            "learner.token_budget=16384",
            "rollout.max_new_tokens=8192",
        ]
        total = need_of(config(*overrides), gpu(80), checks.WARM_START).learner.total
        for share in (0.89, 0.91):
            device = Device(kind="cuda", bytes=int(total / share), name="a GPU")
            lines = memory_lines(config(*overrides), device, checks.WARM_START)
            tight = [line for line in lines if line.startswith("  tight: use ")]
            assert len(tight) == lines[0].endswith(", tight") == (share > 0.9)
            for changes in re.findall(r"use ((?:\w+\.\S+=\S+(?: and )?)+) or", "\n".join(tight)):
                said.add(changes)
                assert not memory_lines(
                    config(*overrides, *changes.split(" and ")), device, checks.WARM_START
                )[0].endswith(", tight")
    assert said == {
        "learner.recompute=full",
        "learner.optimizer.offload=true",
        "layout.cp=2 and layout.dp=4",
        "layout.sp=true",
    }


@pytest.mark.parametrize("own", ["model.path=recurrent", "model.numerics=aligned"])
def test_no_change_is_offered_that_is_refused_for_another_reason(folder, own):
    """Neither recurrent layers nor equal bits go with sequences that are split over ranks."""
    make_model_folder(folder / "recurrent", MODELS["recurrent"])
    overrides = ["layout.dp=2", "learner.recompute=full", "learner.token_budget=512", own]
    overrides += ["rollout.max_new_tokens=256", "learner.optimizer.offload=true"]
    with pytest.raises((ConfigError, ValueError)):
        changed = config(*overrides, "layout.cp=2", "layout.dp=1")
        validate_layout(read_hf_config(changed.model.path), changed.layout, num_processes=2)
    total = need_of(config(*overrides), gpu(80), checks.WARM_START).learner.total
    device = Device(kind="cuda", bytes=int(total / 0.91), name="a GPU")
    lines = memory_lines(config(*overrides), device, checks.WARM_START)
    assert any(line.startswith("  tight: use a layout that splits the model further") for line in lines), (
        lines
    )


@pytest.mark.parametrize("dp", [1, 8])
def test_an_offloaded_optimizer_says_what_it_takes_of_the_machine(folder, dp):
    """12 bytes a parameter: two moments and a float32 copy. Data-parallel ranks divide them."""
    overrides = ["model.path=7b", "model.dtype=bfloat16", f"layout.dp={dp}"]
    lines = memory_lines(config(*overrides), gpu(80), checks.WARM_START)
    assert not any("of the machine's memory" in line for line in lines)
    lines = memory_lines(config(*overrides, "learner.optimizer.offload=true"), gpu(80), checks.WARM_START)
    total = 12 * sum(stage_parameters(architecture_of(folder / "7b"), config(*overrides).layout, 0))
    node = f", {size_text(total)} on a node of {dp} ranks" if dp > 1 else ""
    assert f"  of the machine's memory (optimizer.offload): {size_text(total // dp)}{node}" in lines, lines


@pytest.mark.parametrize("offload", [False, True])
def test_learner_and_servers_take_turns_on_a_gpu_that_has_room_for_both_models(folder, offload):
    """An optimizer's state that was offloaded is beside the servers' weights too, while a checkpoint is written."""
    overrides = [
        "model.path=7b",
        "model.dtype=bfloat16",
        "layout.tp=2",
        "layout.dp=4",
        "learner.recompute=full",
    ]
    overrides += ["launch.placement=colocated", f"learner.optimizer.offload={str(offload).lower()}"]
    refused = []
    for gib in range(40, 61, 2):
        need = need_of(config(*overrides), gpu(gib), checks.TRAINING)
        assert (need.learner.optimizer_step > need.learner.transfer) == offload
        moving = max(need.learner.transfer, need.learner.optimizer_step)
        both = need.learner.lasting + moving + need.server.weights
        found = [field for field, _ in memory_problems(config(*overrides), gpu(gib), checks.TRAINING)]
        assert found == (["launch.placement"] if both > gib * GIB else [])
        refused.append(bool(found))
    assert refused == sorted(refused, reverse=True) and set(refused) == {True, False}


def test_the_smallest_gpu_counts_and_none_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _smallest_gpu() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA H100, 81559, 4, 580.1\necho NVIDIA A100, 40960, 4, 580.1\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    assert _smallest_gpu() == 40 * GIB
    tool.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert _smallest_gpu() is None


# ----------------------------------------------------------------------------------------------------------------
# weights sent


def tensor_bytes(file: Path) -> int:
    """Of all tensors, by the header of a safetensors file."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_what_is_sent_is_the_whole_model_whatever_the_layout(tmp_path, family):
    make_tiny_countdown_model(tmp_path / "model", seed=0, family=family)
    architecture = architecture_of(tmp_path / "model")
    whole = tensor_bytes(tmp_path / "model" / "model.safetensors")
    for sizes in ({}, {"tp": 2, "sp": True}, {"pp": 2}, {"pp": 2, "vpp": 2, "tp": 2, "sp": True}):
        layout = LayoutConfig(**sizes, dp=1)
        stages = bytes_to_send(architecture, RolloutConfig(dtype="float32"), layout)
        assert len(stages) == layout.pp and sum(stages) == whole and min(stages) > 0
        assert sum(bytes_to_send(architecture, RolloutConfig(dtype="bfloat16"), layout)) == whole // 2
        for precision in ("int4", "int8", "fp8_e4m3_block"):
            packed, scales = packed_bytes(tmp_path / "model" / "model.safetensors", precision)
            left_out = 0 if precision == "int4" else scales
            rollout = RolloutConfig(dtype="float32", precision=precision)
            assert sum(bytes_to_send(architecture, rollout, layout)) == packed - left_out
        by_sglang = RolloutConfig(dtype="float32", precision="int8", sglang_plugin=False)
        assert sum(bytes_to_send(architecture, by_sglang, layout)) == whole


def packed_bytes(file: Path, precision: str) -> tuple[int, int]:
    """What the tensors of a file take when it is packed, and the scales among it."""
    total = scales = 0
    for name, tensor in load_file(file).items():
        form = packed_form(name, tensor.shape, precision)
        total += tensor.nbytes if form is None else form.scale_bytes + tensor.numel()
        scales += form.scale_bytes if form is not None else 0
    return total, scales


def test_the_bytes_of_experts_are_told_where_they_are_replayed(folder):
    """Two of eight experts in each of four layers, a byte each; at most 16 responses of 50 tokens."""
    make_tiny_countdown_model(folder / "tiny", seed=0, family="qwen3_moe")
    sizes = ("rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=50")
    settings = ("model.path=tiny", *sizes)
    (line,) = (x for x in batch_lines(config(*settings, "learner.routing=rollout")) if "routing" in x)
    assert "8 bytes of experts per token" in line and size_text(8 * 16 * 50) in line
    of_old = ("learner.routing=old", "learner.minibatches=2", "layout.dp=2")
    (line,) = (x for x in batch_lines(config(*settings, *of_old)) if "routing" in x)
    assert "8 bytes of experts per token" in line and size_text(8 * 8 * 50) in line and "every rank" in line
    assert not [x for x in batch_lines(config(*settings)) if "routing" in x]


def test_adapters_are_told(folder):
    """The counts are those of the real model."""
    from tests.support.megatron_workers import make_engine

    make_tiny_countdown_model(folder / "tiny", seed=0)
    settings = ("model.path=tiny", "rollout.prompts_per_step=4", "rollout.group_size=4")
    (line,) = (x for x in batch_lines(config(*settings, "learner.lora={rank: 4}")) if "lora" in x)
    engine = make_engine(folder / "tiny", lora={"rank": 4})
    trained, frozen = (
        sum(p.numel() for p in engine.chunks[0].parameters() if p.requires_grad is wanted)
        for wanted in (True, False)
    )
    assert f"{trained:,} numbers are trained, {trained / frozen:.2%} of the model's {frozen:,}" in line
    assert "rank 4 on qkv, proj, fc1, fc2" in line and "forward pass is merged" in line
    assert not [x for x in batch_lines(config(*settings)) if "lora" in x]
