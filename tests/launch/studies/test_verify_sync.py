"""``tandem verify-sync``: the proof on real engines, that it notices and names one wrong bit, and what it
makes of bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from configs.loader import load_config
from launch.processes.supervisor import RoleFailed
from launch.studies.verify_sync import (
    Answers,
    LayoutResult,
    _as_sent,
    _check_that_it_can_fail,
    differences,
    fixed_prompts,
    layouts,
    make_plan,
    rollout_sizes,
    table,
    wrong_tensors,
)
from parallel.weights.hf_files import HuggingFaceWeights, PerturbedWeights
from parallel.weights.precision import is_rounded, rounded
from rollout.servers.control import Continuation
from rollout.tiny_model import make_tiny_countdown_model
from tests.launch.test_cli import config_file
from tests.support.command import tandem
from tests.support.whole_runs import run

ONE = Continuation(token_ids=[3, 4], prompt_logprobs=[-1.0, -2.0], logprobs=[-0.5, -0.25])
OTHER = Continuation(token_ids=[3, 4], prompt_logprobs=[-1.0, -2.0], logprobs=[-0.5, -0.2500001])


def test_what_differs_is_named():
    wanted = Answers(checksums={"a": "1", "b": "2"}, continuations=[ONE, ONE])
    assert differences(wanted, wanted) == []
    assert differences(Answers(checksums={"a": "1", "b": "3"}, continuations=[ONE, OTHER]), wanted) == [
        "b",
        "continuation of prompt 1",
    ]
    assert differences(Answers(checksums={"a": "1", "c": "2"}, continuations=[ONE, ONE]), wanted) == [
        "b",
        "c",
    ]


def test_a_reference_that_was_served_before_is_no_reference():
    before = Answers(checksums={"a": "1", "b": "2"}, continuations=[ONE])
    _check_that_it_can_fail(
        {2: [before]}, {2: Answers(checksums={"a": "3", "b": "4"}, continuations=[OTHER])}
    )
    with pytest.raises(RoleFailed, match=r"cannot fail: servers of tp=2 had the reference's .*b before"):
        _check_that_it_can_fail(
            {2: [before]}, {2: Answers(checksums={"a": "3", "b": "2"}, continuations=[OTHER])}
        )
    with pytest.raises(RoleFailed, match="every log-prob"):
        _check_that_it_can_fail(
            {2: [before]}, {2: Answers(checksums={"a": "3", "b": "4"}, continuations=[ONE])}
        )


def test_the_table_says_ok_or_what():
    findings = [
        LayoutResult(layout="tp=2", export=[], served={1: [], 2: ["x.weight"]}),
        LayoutResult(layout="pp=2", export=["y"], served={1: [], 2: [*"abcdef"]}),
    ]
    assert [f.is_good for f in findings] == [False, False]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table(findings, [1, 2]).splitlines()
    ]
    assert rows[0] == ["learner", "export", "rollout tp=1", "rollout tp=2"]
    assert rows[2:] == [
        ["tp=2", "ok", "ok", "1 differ: x.weight"],
        ["pp=2", "1 differ: y", "ok", "6 differ: a, b, c, d and 2 more"],
    ]


def test_prompts_share_no_beginning():
    prompts = fixed_prompts(24)
    assert len({prompt[0] for prompt in prompts}) == len(prompts) == 6
    assert all(0 <= token < 24 for prompt in prompts for token in prompt)


def test_options_are_read_and_repeats_dropped():
    assert rollout_sizes(["tp=2", "tp=1", "tp=2"]) == [2, 1]
    assert list(layouts(["sp,tp=2", "tp=2,sp=true", "pp=2"])) == ["tp=2,sp", "pp=2"]
    for text in ("tp", "2", "tp=0", "tp=x", "pp=2"):
        with pytest.raises(ValueError, match=f"--rollout {text}: write tp=N"):
            rollout_sizes([text])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return folder


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--learner", "tpp=2"], ["--learner", "tpp", "did you mean `tp`"]),
        (["--learner", "tp=3"], ["\n--learner tp=3\n", "value: 3 (--learner tp=3)", "num_attention_heads"]),
        (["--rollout", "tp=8"], ["--rollout", "8"]),
        (["--rollout", "dtype=float32"], ["--rollout dtype=float32", "tp=N"]),
    ],
)
def test_bad_options_are_refused_before_anything_starts(tmp_path, model, options, expected):
    done = tandem("verify-sync", str(config_file(tmp_path, model)), *options, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert all(part in done.stderr for part in expected), done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


def test_a_wrong_export_is_named(tmp_path, model):
    config = load_config(config_file(tmp_path, model), ["model.dtype=float32"])
    export = tmp_path / "export"
    export.mkdir()
    other = PerturbedWeights(model)
    weights = {name: other.read(name) for name in other.names}
    save_file(weights, export / "model.safetensors")
    assert wrong_tensors(export, config) == []
    changed = sorted(weights)[3]
    weights[changed].view(torch.int32).flatten()[0] ^= 1
    del weights["model.norm.weight"]
    save_file(weights, export / "model.safetensors")
    assert wrong_tensors(export, config) == sorted([changed, "model.norm.weight"])


def test_servers_of_the_reference_start_from_what_was_sent(tmp_path, model):
    as_it_is = load_config(config_file(tmp_path, model), ["model.dtype=float32"])
    assert _as_sent(model, as_it_is) == model
    shutil.copytree(model, tmp_path / "export")
    config = load_config(config_file(tmp_path, model), ["model.dtype=float32", "rollout.precision=int4"])
    before, after = HuggingFaceWeights(model), HuggingFaceWeights(_as_sent(tmp_path / "export", config))
    tensors = {name: before.read(name) for name in before.names}
    expected = {name: rounded(t, "int4") if is_rounded(name, "int4") else t for name, t in tensors.items()}
    assert after.names == expected.keys()
    changed = {name for name in expected if not torch.equal(expected[name], before.read(name))}
    assert changed == {name for name in expected if name.endswith("_proj.weight")}
    assert all(torch.equal(after.read(name), tensor) for name, tensor in expected.items())


def test_servers_that_quantise_themselves_cannot_be_compared(tmp_path, model):
    config = load_config(config_file(tmp_path, model), ["rollout.quantization=fp8", "rollout.dtype=bfloat16"])
    with pytest.raises(ValueError, match="quantised servers do not hold the weights that were sent"):
        make_plan([], [], lambda option, overrides: config, gpus=1)


@pytest.mark.engines
def test_transfers_from_two_layouts_to_two_are_proved(tmp_path, model):
    arguments = ["--learner", "tp=2,sp", "--learner", "pp=2,vpp=2", "--rollout", "tp=1", "--rollout", "tp=2"]
    file = config_file(
        tmp_path, model, rollout={"max_new_tokens": 14, "dtype": "float32", "max_total_tokens": 4096}
    )
    output = run("verify-sync", str(file), "model.dtype=float32", *arguments, cwd=tmp_path)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in output.splitlines()
        if line.startswith("|")
    ]
    assert rows[2:] == [["tp=2,sp", "ok", "ok", "ok"], ["pp=2,vpp=2", "ok", "ok", "ok"]]
    (out,) = (tmp_path / "runs").iterdir()
    served = [finding["served"] for finding in json.loads((out / "result.json").read_text())["findings"]]
    assert served == [{"1": [], "2": []}] * 2
