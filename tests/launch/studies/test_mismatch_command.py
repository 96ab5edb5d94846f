"""``tandem mismatch`` as a user meets it: what it refuses, with nothing started; what it plans; and one small
run of both engines."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from configs.loader import parse_config
from configs.schema import RunConfig
from launch.checks import config as checks
from launch.commands import studies
from launch.commands.list_runs import run_table
from launch.commands.status import status
from launch.processes.run_folder import RunFolder
from launch.processes.supervisor import Role, RoleFailed
from launch.studies import mismatch
from launch.studies.mismatch_plan import Plan, Request, make_plan
from launch.studies.mismatch_result import evaluate, write
from rollout.client import GenerationError
from rollout.records import Prompt
from rollout.sampling.fixed_samples import _last_logprobs, _split_into_requests, fixed_prompts, shortened
from rollout.tasks import Task
from rollout.tiny_model import make_tiny_countdown_model
from tests.launch.test_cli import config_file
from tests.support.command import tandem
from tests.support.whole_runs import assert_nothing_left, finish, processes_of, start
from trainer.studies.layout_statistics import (
    join_samples,
    read_samples,
    read_tensors,
    write_samples,
    write_tensors,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return folder


# -------------------------------------------------------------------------------------------------------------------
# errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--learner", "tp=3"],
            [
                "\n--learner tp=3\n",
                "value: 3 (--learner tp=3)",
                "layout.tp=3",
                "num_attention_heads=4",
                "use tp=",
            ],
        ),
        (["--learner", "tq=2"], ["--learner", "unknown field 'tq'", "fields: tp"]),
        (["--learner", "sp"], ["--learner", "sp=true", "tp=1"]),
        (["--learner", "tp=2", "--learner", "tp=2"], ["--learner tp=2 is given twice"]),
        (["--learner", "tp=1", "--learner", "dp=1"], ["--learner tp=1 is given twice"]),
        (["--rollout", "tp=1", "--rollout", ""], ["--rollout tp=1 is given twice"]),
        (["--rollout", "tp=3"], ["\n--rollout tp=3\n", "rollout.tp=3", "use one of"]),
        (["--rollout", "tp=two"], ["--rollout tp=two", "cannot be read", "tp=N"]),
        (["--rollout", "pp=2"], ["--rollout pp=2", "unknown word", "tp"]),
        (["--rollout", "tp=1,attention="], ["'attention=' cannot be read"]),
        (["rollout.dtype=float8"], ["\ncommand line\n", "rollout.dtype", "float8"]),
        (["--rollout", "tp=1,deterministic=yes"], ["'deterministic=yes' cannot be read"]),
        (["--prompts", "1"], ["--prompts 1", "at least 2"]),
        (["--prompts", "15", "--learner", "dp=2"], ["--prompts 15", "dp=2", "multiple"]),
        (["--threshold", "1.5"], ["--threshold 1.5", "between 0 and 1"]),
        (["--out", "run.yaml"], ["--out: run.yaml exists already", "name a new folder"]),
        (["rollout.top_p=0.9"], ["top_p", "full one"]),
        (["rollout.top_k=20"], ["rollout.top_k", "of the full softmax", "set rollout.top_k=-1"]),
    ],
)
def test_bad_options_are_one_clear_error_with_nothing_started(tmp_path, model, options, expected):
    config_file(tmp_path, model)
    done = tandem("mismatch", "run.yaml", *options, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for words in expected:
        assert words in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"], "something was written"


# ------------------------------------------------------------------------------------------------------------------
# the plan


def request(**changes) -> Request:
    defaults = {
        "learners": ("tp=1",),
        "rollouts": ("tp=1",),
        "prompts": 8,
        "threshold": 0.5,
        "out": None,
        "why": False,
    }
    return Request(**defaults | changes)


def loading(file):
    parsed = parse_config(file)
    return lambda option, more: checks.load_checked(parsed.with_overrides(more, option), RunConfig)


def loaded(tmp_path, model):
    return loading(config_file(tmp_path, model))


def test_each_layout_is_a_part_with_its_own_config(tmp_path, model):
    plan = make_plan(
        request(learners=("tp=2, sp", "pp=2"), rollouts=("tp=2",)), loaded(tmp_path, model), gpus=0
    )
    assert [(p.kind, p.text) for p in plan.parts] == [
        ("rollout", "tp=2"),
        ("learner", "tp=2,sp"),
        ("learner", "pp=2"),
    ]
    rollout, sequence_parallel, pipeline = plan.parts
    assert (rollout.config.rollout.tp, rollout.config.layout.world_size) == (2, 1)
    assert (sequence_parallel.config.layout.sp, sequence_parallel.config.layout.world_size) == (True, 2)
    assert (pipeline.config.layout.pp, pipeline.config.rollout.tp) == (2, 1)
    assert len({p.folder(Path("out")).path for p in plan.parts}) == 3
    assert any("not on CPU" in what for what in plan.skipped)


def test_aligned_layouts_sum_in_the_pieces_of_the_largest(tmp_path, model, monkeypatch):
    """And a cause that they do not know is left out with its reason."""
    asked, plans = request(learners=("tp=1", "tp=4"), rollouts=("tp=2", "tp=1"), why=True), list[Plan]()
    monkeypatch.setattr(mismatch, "run", plans.append)
    studies.mismatch(config_file(tmp_path, model), ["model.numerics=aligned"], asked)
    (plan,) = plans
    assert {part.config.numerics_pieces for part in plan.parts} == {4}
    assert [(part.config.layout.tp, part.config.rollout.tp) for part in plan.of("rollout", "learner")] == [
        (1, 2), (1, 1), (1, 1), (4, 1)
    ]  # fmt: skip
    assert any("rollout.dtype" in reason for reason in plan.skipped)
    assert any("learner cp=2 as a cause" in reason and "layout.cp" in reason for reason in plan.skipped)
    for module in (checks, studies):
        monkeypatch.setattr(module, "gpus_here", lambda: 8)
    studies.mismatch(config_file(tmp_path, model), ["model.numerics=aligned"], asked)
    modes = [reason for reason in plans[1].skipped if reason.startswith("rollout tp=2,")]
    assert len(modes) == 3 and [part.text for part in plans[1].of("mode")] == ["tp=2,deterministic"]


def test_why_adds_what_it_compares_with_once(tmp_path, model):
    plan = make_plan(request(learners=("tp=1", "tp=2"), why=True), loaded(tmp_path, model), gpus=0)
    assert [p.text for p in plan.of("learner")] == ["tp=1", "tp=2"]
    assert [p.text for p in plan.of("why")] == ["tp=2,sp", "pp=2", "cp=2"]
    assert [p.text for p in plan.of("dtype")] == ["tp=1,dtype=float32"]
    assert plan.of("mode") == []


def test_why_asks_the_first_server_for_experts_where_the_model_has_them(tmp_path, model):
    folder = tmp_path / "experts"
    make_tiny_countdown_model(folder, seed=0, family="mixtral")
    rollouts = ("tp=1", "tp=2")
    plan = make_plan(request(rollouts=rollouts, why=True), loaded(tmp_path, folder), gpus=0)
    routings = {(p.kind, p.text): p.config.learner.routing for p in plan.parts}
    assert {part for part, routing in routings.items() if routing == "rollout"} == {("rollout", "tp=1")}
    assert any(
        "learner tp=2 as a cause (tp)" in text and "layout.tp=2 without sp" in text for text in plan.skipped
    )
    for changes, which in (({"why": False}, folder), ({"why": True}, model)):
        plan = make_plan(request(rollouts=rollouts, **changes), loaded(tmp_path, which), gpus=0)
        assert {p.config.learner.routing for p in plan.parts} == {"own"}


def test_modes_of_the_server_are_for_cuda(tmp_path, model):
    with pytest.raises(ValueError, match=r"not on CPU.*leave 'deterministic' out"):
        make_plan(request(rollouts=("tp=1", "tp=1,deterministic")), loaded(tmp_path, model), gpus=0)
    with pytest.raises(ValueError, match="the first one must be a layout without a mode"):
        make_plan(request(rollouts=("tp=1,deterministic",)), loaded(tmp_path, model), gpus=8)
    plan = make_plan(
        request(rollouts=("tp=1", "tp=1,deterministic"), why=True), loaded(tmp_path, model), gpus=8
    )
    assert [p.text for p in plan.of("rollout")] == ["tp=1"], "the planner reads pairs of layouts alone"
    named, *backends = plan.of("mode")
    assert named.config.rollout.server_args == {"enable_deterministic_inference": True}
    assert [p.config.rollout.server_args for p in backends] == [
        {"attention_backend": name} for name in ("fa3", "flashinfer", "triton")
    ]


def test_learners_are_as_small_as_they_can_be_and_fit(tmp_path, model, monkeypatch):
    """With as many copies as GPUs beside a server, seven, nothing would divide; and one GPU is enough: each
    part has it for itself."""
    monkeypatch.setattr(checks, "gpus_here", lambda: 8)
    plan = make_plan(request(learners=("tp=1", "dp=2"), rollouts=("tp=4",)), loaded(tmp_path, model), gpus=8)
    assert [part.config.layout.world_size for part in plan.parts] == [1, 1, 2]
    make_plan(request(), loaded(tmp_path, model), gpus=1)
    with pytest.raises(ValueError, match="--learner tp=2: the layout takes 2 GPUs, but 1 are visible"):
        make_plan(request(learners=("tp=2",)), loaded(tmp_path, model), gpus=1)
    with pytest.raises(ValueError, match="--rollout tp=2: 2 GPUs are needed, 0 for the learner"):
        make_plan(request(rollouts=("tp=2",)), loaded(tmp_path, model), gpus=1)
    why = make_plan(request(why=True), loaded(tmp_path, model), gpus=1)
    assert why.of("why") == [] and sum("as a cause" in what for what in why.skipped) == 4


def test_more_prompts_than_a_file_holds_are_refused(tmp_path, model):
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "answer": "1"}) + "\n" for i in range(8))
    )
    task = {"type": "jsonl", "train_path": str(tmp_path / "train.jsonl"), "apply_chat_template": False}
    file = config_file(tmp_path, model, task=task, reward={"type": "gsm8k"})

    load = loading(file)
    make_plan(request(prompts=8), load, gpus=0)
    with pytest.raises(
        ValueError, match=r"--prompts 9: .*train\.jsonl holds 8 training prompts; ask for no more than these"
    ):
        make_plan(request(prompts=9), load, gpus=0)


# -------------------------------------------------------------------------------------------------------
# prompts and prefill


def test_prompts_are_the_same_for_everyone_and_enough(tmp_path):
    prompts = [Prompt(prompt_id=str(i), token_ids=[i], text="", reference="") for i in range(20)]
    task = Task(name="t", train=prompts, heldout=[])
    first = fixed_prompts(task, 8, seed=3)
    assert first == fixed_prompts(task, 12, seed=3)[:8] and first != fixed_prompts(task, 8, seed=4)
    with pytest.raises(ValueError, match="--prompts 21: the task t has 20"):
        fixed_prompts(task, 21, seed=3)


def test_prefill_answers_are_checked_against_the_tokens():
    reply = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None], [-0.25, 7, None]]}}
    assert _last_logprobs(reply, [5, 6, 7], 2, 20) == [-0.5, -0.25]
    with pytest.raises(GenerationError, match="which are not the"):
        _last_logprobs(reply, [5, 6, 8], 2, 20)
    renamed = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 0, None], [-0.25, 7, None]]}}
    assert _last_logprobs(renamed, [5, 19, 7], 2, 20) == [-0.5, -0.25], (
        "the last id of a vocabulary of 20 comes back as 0"
    )
    with pytest.raises(GenerationError, match="which are not the"):
        _last_logprobs(renamed, [5, 18, 7], 2, 20)


def test_scoring_requests_hold_a_bounded_number_of_tokens_and_every_row():
    sequences = [[0] * n for n in (10_000, 7_000, 10, 50_000, 5)]
    assert _split_into_requests(sequences) == [[0], [1, 2], [3], [4]]


def test_the_short_limit_is_a_part_of_the_long_one(tmp_path, model):
    config = loaded(tmp_path, model)("", ["rollout.max_new_tokens=14"])
    assert (shortened(config, 4), shortened(config, 20)) == (3, 1)


# ---------------------------------------------------------------------------------------------------------------
# the result


def pretend(plan, out: Path) -> None:
    """The files that the parts would leave: tokens of chance, and log-probs with a known distance from those
    of the servers."""
    generator = torch.Generator().manual_seed(0)

    def near(logprobs_N: torch.Tensor, distance: float) -> torch.Tensor:
        return logprobs_N - distance * torch.rand(logprobs_N.shape, generator=generator)

    sets = {}
    for part in plan.of("rollout"):
        for length, count, tokens in (("long", 8, 12), ("short", 32, 3)):
            rows = [
                (i * 8 // count, [1] * tokens, (-torch.rand(tokens, generator=generator) - 0.1).tolist())
                for i in range(count)
            ]
            sets[f"{part.text}/{length}"] = join_samples([[1]] * 8, rows)
            write_samples(part.samples(out, length), sets[f"{part.text}/{length}"])
    base_N = sets["tp=1/long"].logprobs_N
    for part, distance in zip(plan.of("rollout", "dtype"), (0.01, 0.02, 0.3), strict=True):
        prefilled = near(base_N, distance)
        write_tensors(
            part.folder(out).path / "prefill.safetensors", {"prefill": prefilled, "repeat": prefilled.clone()}
        )
    baseline = {}
    for part in plan.of("learner", "why"):
        of_all = {name: near(sampled.logprobs_N, 0.05) for name, sampled in sets.items()}
        baseline.setdefault("tp=1/long", of_all["tp=1/long"])
        kept = of_all if part.kind == "learner" else {"tp=1/long": of_all["tp=1/long"]}
        write_tensors(part.folder(out).path / "scores.safetensors", kept)
    folder = plan.of("learner")[0].folder(out).path
    base_N = baseline["tp=1/long"]
    sampled_N = sets["tp=1/long"].logprobs_N
    switches = {"repeat": base_N.clone(), "dtype": near(base_N, 0.2), "packing": near(base_N, 0.001)}
    switches["routing"] = sampled_N + (base_N - sampled_N) / 4
    write_tensors(folder / "switches.safetensors", switches)
    (folder / "left_out.json").write_text('{"lm_head": "there is none"}')


def test_the_files_of_the_parts_become_pairs_and_ranked_causes(tmp_path, model, capsys):
    load = loaded(tmp_path, model)
    plan = make_plan(request(learners=("tp=1", "tp=2"), rollouts=("tp=1", "tp=2"), why=True), load, gpus=0)
    pretend(plan, tmp_path)
    sampled = plan.of("rollout")
    result = evaluate(plan, load("", []), tmp_path, sampled, plan.skipped)
    write(result, tmp_path)
    said = json.loads((tmp_path / "mismatch.json").read_text())
    assert [(pair["learner"], pair["rollout"], pair["aligned"]) for pair in said["pairs"]] == [
        ("tp=1", "tp=1", True), ("tp=2", "tp=1", False), ("tp=1", "tp=2", False), ("tp=2", "tp=2", True)
    ]  # fmt: skip
    assert [(row["rollout"], row["first"], row["second"]) for row in said["comparisons"]] == [
        ("tp=1", "tp=1", "tp=2"), ("tp=2", "tp=2", "tp=1")
    ]  # fmt: skip
    causes = {row["cause"]: row for row in said["causes"]["ranked"]}
    order = [row["moved_mean"] for row in said["causes"]["ranked"]]
    assert order == sorted(order, reverse=True)
    assert causes["noise level: scored twice, nothing switched"]["bitwise"]
    assert causes["noise level: prefilled twice, nothing switched"]["bitwise"]
    other, packed = (
        causes["dtype: float32 instead of bfloat16"],
        causes["packing: every sequence alone, not packed"],
    )
    assert other["moved_mean"] > 50 * packed["moved_mean"] > 0
    assert causes["prefill by tp=1,dtype=float32 instead of tp=1"]["side"] == "server"
    assert {
        "TP: tp=2 instead of tp=1",
        "SP: tp=2,sp instead of tp=2",
        "PP: pp=2 instead of tp=1",
    } <= causes.keys()
    routing = said["causes"]["routing"]
    assert routing["share"] == pytest.approx(1 - routing["replayed"] / routing["own"])
    assert routing["share"] == pytest.approx(0.75, abs=0.02) and "routing: the server's experts" in causes
    assert any("the choice of experts makes 7" in sentence for sentence in said["findings"])
    assert "cause lm_head: there is none" in said["skipped"]
    assert "Why: one thing switched at a time" in capsys.readouterr().out


def test_a_server_that_could_not_score_is_left_out_by_name(tmp_path, model):
    load = loaded(tmp_path, model)
    plan = make_plan(request(learners=("tp=1",), rollouts=("tp=1", "tp=2"), why=True), load, gpus=0)
    pretend(plan, tmp_path)
    folder = plan.of("rollout")[1].folder(tmp_path).path
    (folder / "prefill.safetensors").unlink()
    (folder / "prefill_failed.txt").write_text("no such tokens")
    result = evaluate(plan, load("", []), tmp_path, plan.of("rollout"), plan.skipped)
    assert "prefill by rollout tp=2: no such tokens" in result["skipped"]
    assert "prefill by tp=1,dtype=float32 instead of tp=1" in {
        row["cause"] for row in result["causes"]["ranked"]
    }


def pretending(plan: Plan, there: Path, *, fails: str, leaves: tuple[str, ...] = ()) -> Callable[..., Role]:
    """Starts processes that do nothing, with the files of the parts; the one of the folder ``fails`` ends in
    error and ``leaves`` some."""
    pretend(plan, there)
    (there / fails).mkdir(exist_ok=True, parents=True)

    def start(name: str, folder, config, **_) -> Role:
        broken = folder.path.name == fails and name != "serve"
        if name != "serve":
            for file in (there / folder.path.name).iterdir():
                if not broken or file.name in leaves:
                    shutil.copy(file, folder.path)
        command = ["sleep", "60"] if name == "serve" else ["false" if broken else "true"]
        return Role(name=name, command=command, log=folder.logs / f"{name}.log")

    return start


def study(tmp_path, model, monkeypatch, **failing) -> dict:
    asked = request(learners=("tp=1", "tp=2"), rollouts=("tp=1", "tp=2"), why=True, out=tmp_path / "out")
    plan = make_plan(asked, loaded(tmp_path, model), gpus=0)
    monkeypatch.setattr(mismatch, "role", pretending(plan, tmp_path / "pretended", **failing))
    mismatch.run(plan)
    return json.loads((tmp_path / "out" / "mismatch.json").read_text())


def test_status_and_list_say_what_the_folder_of_a_study_is(tmp_path, model, monkeypatch):
    """While it runs, and when it has ended."""
    monkeypatch.chdir(tmp_path)
    asked = request(learners=("tp=1", "tp=2"), rollouts=("tp=1", "tp=2"), why=True)
    plan = make_plan(asked, loaded(tmp_path, model), gpus=0)
    pretended, seen = pretending(plan, tmp_path / "pretended", fails="nothing"), []

    def start(name: str, *arguments, **options) -> Role:
        (folder,) = (tmp_path / "runs").iterdir()
        seen.append((status(RunFolder(folder)).state, run_table(Path("runs")).splitlines()[1].split()[1:3]))
        return pretended(name, *arguments, **options)

    monkeypatch.setattr(mismatch, "role", start)
    out = mismatch.run(plan)
    assert {(state, *row) for state, row in seen} == {("running", "running", "(mismatch)")}
    found = status(RunFolder(out))
    lines = dict(found.lines)
    assert (found.state, lines["study"], lines["result"]) == (
        "finished",
        "mismatch",
        str(out / "mismatch.md"),
    )
    assert "step" not in lines and "checkpoint" not in lines
    assert run_table(Path("runs")).splitlines()[1].split()[1:5] == ["(mismatch)", "-", "-", "-"]


def test_a_learner_that_nobody_named_may_fail(tmp_path, model, monkeypatch):
    result = study(tmp_path, model, monkeypatch, fails="learner-pp2")
    assert len(result["pairs"]) == 4
    assert any(what.startswith("learner pp=2 as a cause: ") for what in result["skipped"])
    causes = {row["cause"] for row in result["causes"]["ranked"]}
    assert "SP: tp=2,sp instead of tp=2" in causes and not any("pp=2" in cause for cause in causes)
    request_of_servers = json.loads((tmp_path / "out" / "rollout-tp1" / "request.json").read_text())
    assert request_of_servers["first_gpu"] == 0, "no learner runs beside these servers"


def test_a_switch_may_fail_after_the_scores(tmp_path, model, monkeypatch):
    result = study(tmp_path, model, monkeypatch, fails="learner-tp1", leaves=("scores.safetensors",))
    assert len(result["pairs"]) == 4
    assert any(what.startswith("causes switched in learner tp=1: ") for what in result["skipped"])
    assert "TP: tp=2 instead of tp=1" in {row["cause"] for row in result["causes"]["ranked"]}


def test_a_learner_that_was_asked_for_may_not_fail(tmp_path, model, monkeypatch):
    with pytest.raises(RoleFailed):
        study(tmp_path, model, monkeypatch, fails="learner-tp2", leaves=("scores.safetensors",))


# -------------------------------------------------------------------------------------------------------------
# both engines


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    for process in processes_of(tmp_path):  # of a test that failed
        process.kill()


@pytest.mark.engines
def test_two_learner_layouts_on_one_rollout(folder, model):
    content = {
        "model": {"path": str(model), "dtype": "float32"},
        "task": {"type": "countdown"},
        "rollout": {"dtype": "float32", "max_new_tokens": 24, "max_total_tokens": 8192, "temperature": 0.7},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    layouts = ["--learner", "tp=1", "--learner", "tp=2", "--rollout", "tp=1"]
    process = start("mismatch", "run.yaml", *layouts, "--prompts", "8", "--out", "study", cwd=folder)
    said = finish(process, deadline_s=600)  # three starts of an engine, one after another
    assert process.returncode == 0, said
    out = folder / "study"
    result = json.loads((out / "mismatch.json").read_text())
    assert [(pair["learner"], pair["rollout"]) for pair in result["pairs"]] == [
        ("tp=1", "tp=1"),
        ("tp=2", "tp=1"),
    ]
    long = read_samples(out / "rollout-tp1" / "samples.long.safetensors")
    short = read_samples(out / "rollout-tp1" / "samples.short.safetensors")
    assert (long.num_responses, short.num_responses) == (8, 32) and int(short.response_lengths_R.max()) <= 6
    for pair in result["pairs"]:
        assert pair["responses"] == 8 and pair["tokens"] == long.num_tokens
        # float32 on both sides, at a temperature that is not 1: the engines compute the same distribution.
        assert 0 < pair["logprob_gap_max"] <= 1e-4
        assert pair["max_mean"] <= 1e-4 and pair["over_half_count"] == pair["outside_count"] == 0
    (compared,) = result["comparisons"]
    assert (compared["about"], compared["first"], compared["second"]) == ("tp", "tp=1", "tp=2")
    assert not compared["bitwise"], (
        "TP 2 adds up in another order; the same bits would mean that it was not TP 2"
    )
    of_tp2 = read_tensors(out / "learner-tp2" / "scores.safetensors")
    of_tp1 = read_tensors(out / "learner-tp1" / "scores.safetensors")
    apart = (of_tp2["tp=1/long"].double().exp() - of_tp1["tp=1/long"].double().exp()).abs().max().item()
    assert math.isclose(compared["moved_max"], apart, rel_tol=1e-6)
    assert all(
        (out / name).read_bytes().startswith(b"\x89PNG") for name in ("distribution.png", "length.png")
    )
    assert "| tp=2 | tp=1 |" in (out / "mismatch.md").read_text()
    assert "Mismatch by pair of layouts" in said and "tokens/s" in said
    assert_nothing_left(folder)
