"""The worked examples do what their pages say: rewards, data, a reward model's server, a replay."""

import asyncio
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch

from configs.loader import load_config
from rollout.environments.episodes import Sample
from rollout.environments.loading import sample_makers
from rollout.records import FinishReason, Prompt, Status
from rollout.rewards.scorer import Scorer
from rollout.tasks import load_task
from rollout.tokenization import load_tokenizer
from tests.docs.conftest import RECORDED_STEP
from tests.docs.pages import DOCS
from tests.support.records import completion
from trainer.algorithm.own_parts import call, own_parts
from trainer.own_contract import check_contract

EXAMPLES = DOCS / "examples"


@pytest.mark.parametrize("page", sorted(EXAMPLES.glob("*.md")), ids=lambda page: page.stem)
def test_an_example_is_short(page):
    files = [
        file
        for file in EXAMPLES.joinpath(page.stem).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    for file in [page, *files]:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 75, file
    most = 80 if page.stem == "verifiers" else 60  # an environment of theirs, and what plays it
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= most
    named = set(re.findall(r"\{\{ file: (\S+) \}\}", page.read_text(encoding="utf-8")))
    shown = {str(file.relative_to(DOCS.parent)) for file in files}
    assert named <= shown and {name for name in shown - named if not name.endswith("heldout.jsonl")} == set()


def test_own_reward():
    spec = importlib.util.spec_from_file_location(
        "short_answers", EXAMPLES / "own_reward" / "short_answers.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    problem = "2 3 4=20"
    right, wrong = module.score("", "(2+3)*4", problem), module.score("", "2+3+4", problem)
    assert right == (pytest.approx(1.05), {"right": 1.0, "brevity": 0.5})
    assert wrong[0] == 0.0 and wrong[1]["right"] == 0.0


def test_own_loss(monkeypatch):
    """Its functions keep to their contracts, and are what their docstrings say."""
    monkeypatch.chdir(EXAMPLES / "own_loss")
    config = load_config(EXAMPLES / "own_loss" / "experiment.yaml")
    parts = own_parts(config)
    assert list(parts) == ["objective", "advantage", "correction.weight"]
    for part, own in parts.values():
        check_contract(part, own)
    log_ratios = torch.tensor([0.0, math.log(3)])
    old, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([2.0, -1.0])
    losses, told = call(*parts["objective"], old + log_ratios, old, advantages)
    spring = 2 * math.log(3) ** 2
    assert losses.tolist() == pytest.approx([-2.0, 3 + spring]) and told["spring"][1] == pytest.approx(spring)
    rewards, groups = torch.tensor([1.0, 0.0, 9.0, 5.0]), torch.tensor([4, 4, 4, -1])
    assert call(*parts["advantage"], rewards, groups)[0].tolist() == [0.0, -1.0, 8.0, 0.0]
    assert call(*parts["correction.weight"], log_ratios)[0].tolist() == pytest.approx([1.0, 1.5])


@pytest.fixture
def own_data(workspace):
    """The example's folder with the model that its page makes."""
    folder = workspace / "docs" / "examples" / "own_data"
    shutil.copytree(workspace / "models" / "tiny", folder / "model")
    shutil.copy(folder / "chat_template.jinja", folder / "model")
    return folder


def test_own_data_go_through_the_template(own_data):
    folder = own_data
    config = load_config(folder / "experiment.yaml")
    tokenizer = load_tokenizer(folder / "model")
    task = config.task.model_copy(
        update={"train_path": folder / "train.jsonl", "heldout_path": folder / "heldout.jsonl"}
    )
    loaded = load_task(task, tokenizer=tokenizer)
    assert tokenizer.decode(loaded.train[0].token_ids) == "(12+7=)" and loaded.train[0].reference == "19"
    assert len(loaded.train) == 4 and len(loaded.heldout) == 2


def test_a_broken_line_of_own_data_is_named(shell, own_data):
    data = own_data / "train.jsonl"
    data.write_text(data.read_text() + '{"prompt": "1+1="}\n')
    said = shell("cd docs/examples/own_data && tandem train experiment.yaml --dry-run", exit_code=2)
    assert "train.jsonl" in said.stderr and "line 5" in said.stderr and "answer" in said.stderr


def test_reward_model():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "reward_model" / "server.py"), str(port)], stderr=subprocess.DEVNULL
    )
    try:
        wait_for(port)
        config = load_config(EXAMPLES / "reward_model" / "experiment.yaml").reward
        digits = config.parts["digits"].model_copy(update={"urls": (f"http://127.0.0.1:{port}/score",)})
        config = config.model_copy(update={"parts": config.parts | {"digits": digits}})
        score = asyncio.run(asyncio.wait_for(ask(config, "(2+3)*4", "2 3 4=20"), 60))
    finally:
        server.kill()
        server.wait()
    assert score.value == pytest.approx(1 + 0.2 * 3 / 7)
    assert score.parts["digits"] == pytest.approx(3 / 7) and score.parts["right"] == 1.0


async def ask(config, response, reference):
    prompt = Prompt(prompt_id="p", token_ids=[1], text="2 3 4=20", reference=reference)
    async with Scorer(config, max_new_tokens=14, num_workers=1) as scorer:
        return await scorer.score(prompt, response, num_tokens=len(response), finish_reason=FinishReason.STOP)


def wait_for(port, deadline_s=30.0):
    ends = time.monotonic() + deadline_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < ends, "the server did not start"
            time.sleep(0.05)


def test_replay(shell, workspace):
    said = shell(
        f"tandem replay runs/latest --step {RECORDED_STEP} --correction decoupled_token_is --correction decoupled_k3_rs --plot"
    )
    result = json.loads(
        (workspace / "runs" / "latest" / "replay" / f"step_{RECORDED_STEP:06d}.json").read_text()
    )
    rows = {row["correction"]: row for row in result["rows"]}
    assert list(rows) == ["as trained", "disabled", "decoupled_token_is", "decoupled_k3_rs"]
    as_trained = {**rows["as trained"], "correction": "decoupled_token_is"}
    assert as_trained == rows["decoupled_token_is"] and rows["disabled"]["cosine"] == pytest.approx(1.0)
    # The learner finds these samples a little less likely.
    assert 0.9 < rows["decoupled_token_is"]["weight_mean"] < 1.0
    page = (EXAMPLES / "replay.md").read_text(encoding="utf-8")
    for column in (
        "weight",
        "max",
        "ESS",
        "bounded",
        "tokens kept",
        "sequences",
        "loss",
        "cosine",
        "as trained",
    ):
        assert column in page and column in said.stdout
    assert (
        workspace / "runs" / "latest" / "figures" / f"replay_step_{RECORDED_STEP:06d}.png"
    ).stat().st_size > 5000


class Replies:
    """An engine that answers with given texts, one after another."""

    def __init__(self, tokenizer, texts: list[str]) -> None:
        self.tokenizer, self.texts, self.prompts = tokenizer, iter(texts), []

    async def generate_group(self, prompt_ids, *, stop_token_ids, **sampling):
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        ids = self.tokenizer.encode(next(self.texts))
        assert [place for place, token in enumerate(ids) if token in stop_token_ids] == [len(ids) - 1]
        values = {"rollout_logprobs": [-1.0] * len(ids), "token_versions": [0] * len(ids)}
        return [completion(prompt_ids=prompt_ids, token_ids=ids, finish_reason=FinishReason.STOP, **values)]


def play(folder: str, problem: str, texts: list[str], workspace, *settings: str) -> tuple[list[str], Sample]:
    """The prompts of an episode in which the policy says ``texts``, and its sample."""
    config = load_config(
        EXAMPLES / folder / "experiment.yaml", [f"model.path={workspace / 'models' / 'tiny'}", *settings]
    )
    tokenizer = load_tokenizer(config.model.path)
    engine = Replies(tokenizer, texts)
    prompt = Prompt(
        prompt_id="p",
        token_ids=tokenizer.encode(problem),
        text=problem,
        reference=problem.removesuffix(":"),
    )

    async def one_episode():
        async with (
            Scorer(config.reward_type, max_new_tokens=14) as scorer,
            sample_makers(
                config,
                scorer=scorer,
                tokenizer=tokenizer,
                stop_token_ids=[tokenizer.eos_token_id],
                max_positions=256,
                vocab_size=len(tokenizer),
            ) as makers,
        ):
            return await makers("training").sample(engine, prompt, [7], temperature=1.0)

    (sample,) = asyncio.run(one_episode())
    return engine.prompts, sample


def test_the_calculator_answers_calls_and_the_reward_scores_the_rest(workspace, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "calculator")
    problem = "3 5 8=23:"
    prompts, sample = play("calculator", problem, ["8*5-3=", "3*+=", "3*5+8=", "3*5+8<eos>"], workspace)
    assert prompts == [
        problem,
        f"{problem}8*5-3=37 ",
        f"{problem}8*5-3=37 3*+=: ",
        f"{problem}8*5-3=37 3*+=: 3*5+8=23 ",
    ]
    assert (sample.reward, sample.parts, sample.correct) == (1.0, {"valid": 1.0, "calls": 3}, True)
    sampled = "8*5-3=" + "3*+=" + "3*5+8=" + "3*5+8."  # the end token is one of them
    (trajectory,) = sample.trajectories(0, 0, Prompt(prompt_id="p", token_ids=[], text="", reference=""))
    assert int(trajectory.response_mask.sum()) == len(sampled)
    _, endless = play("calculator", problem, ["1="] * 9, workspace)
    assert (endless.reward, endless.status) == (0.0, Status.TURN_LIMIT)


def test_the_second_try_follows_a_wrong_answer_alone(workspace, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "try_again")
    problem = "3 5 8=23:"
    prompts, sample = play("try_again", problem, ["8*5-3<eos>", "3*5+8<eos>"], workspace)
    assert prompts == [problem, f"{problem}8*5-3<eos>(37) {problem}"]
    assert (sample.reward, sample.parts["tries"]) == (1.0, 2)
    prompts, sample = play("try_again", problem, ["3*5+8<eos>"], workspace)
    assert (prompts, sample.reward, sample.parts["tries"]) == ([problem], 1.0, 1)
    prompts, sample = play("try_again", problem, ["8-*<eos>", "8+5<eos>"], workspace)
    assert (prompts[1], sample.reward) == (f"{problem}8-*<eos>() {problem}", 0.0)


def test_an_agent_plays_the_same_tokens_in_a_process_of_its_own(workspace, monkeypatch):
    monkeypatch.chdir(EXAMPLES / "agent")
    assert len((EXAMPLES / "agent" / "agent.py").read_text(encoding="utf-8").splitlines()) <= 40
    problem = "3 5 8=23:"
    prompts, sample = play("agent", problem, ["8*5-3<eos>", "3*5+8<eos>"], workspace)
    assert (prompts, sample.error) == ([problem, f"{problem}8*5-3<eos>(37) {problem}"], None)
    assert (sample.reward, sample.status, sample.correct) == (1.0, Status.OK, True)
    prompts, sample = play("agent", problem, ["3*5+8<eos>"], workspace)
    assert (prompts, sample.reward) == ([problem], 1.0)
    prompts, sample = play("agent", problem, ["8-*<eos>", "8+5<eos>"], workspace)
    assert (prompts[1], sample.reward) == (f"{problem}8-*<eos>() {problem}", 0.0)


def environment_python(package: str) -> str:
    """The Python of a package that Tandem's own environment cannot hold."""
    python = DOCS.parent / f".venv-{package}" / "bin" / "python"
    if not python.exists():
        pytest.skip(
            f"{package} has an environment of its own: bash launch/install_test_tools.sh --environments makes it"
        )
    return str(python)


def test_an_environment_of_verifiers_plays_the_same_tokens(workspace, monkeypatch):
    """In the environment that its page makes, with its reward."""
    python = environment_python("verifiers")
    folder = workspace / "docs" / "examples" / "verifiers"
    folder.joinpath("venv", "bin").mkdir(parents=True)
    folder.joinpath("venv", "bin", "python").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    folder.joinpath("venv", "bin", "python").chmod(0o755)
    monkeypatch.chdir(folder)
    problem = "3 5 8=23:"
    second = ["8*5-3<eos>", "3*5+8<eos>"]
    for texts, reward in ((second, 1.0), (second[1:], 1.0), (["8<eos>", "23<eos>"], 0.0)):
        prompts, sample = play("verifiers", problem, texts, workspace)
        assert (sample.error, sample.status) == (None, Status.OK)
        assert sample.reward == reward and sample.parts["forks"] == 0.0
    assert prompts == [problem, f"{problem}8<eos>(8) {problem}"]


def test_an_environment_of_openenv_plays_the_same_tokens(workspace, monkeypatch):
    """Served by its own package, as its page starts it."""
    python = environment_python("openenv")
    folder = workspace / "docs" / "examples" / "openenv"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([python, "-m", "uvicorn", "server:app", "--port", str(port)], cwd=folder)
    try:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        url = f"environment.urls=[http://127.0.0.1:{port}]"
        problem = "3 5 8=23:"
        prompts, sample = play("openenv", problem, ["8*5-3<eos>", "3*5+8<eos>"], workspace, url)
        assert (prompts, sample.error) == ([problem, f"{problem}8*5-3<eos>(37) {problem}"], None)
        assert (sample.reward, sample.status, sample.correct) == (1.0, Status.OK, True)
        prompts, sample = play("openenv", problem, ["3*5+8<eos>"], workspace, url)
        assert (prompts, sample.reward) == ([problem], 1.0)
        prompts, sample = play("openenv", problem, ["8-*<eos>", "8+5<eos>"], workspace, url)
        assert (prompts[1], sample.reward) == (f"{problem}8-*<eos>() {problem}", 0.0)
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("folder", ["calculator", "try_again"])
def test_a_warm_start_imitates_what_the_environment_would_show(folder, workspace):
    """Each printed example is an episode: played again, the environment adds what the example has."""
    made = subprocess.run(
        [sys.executable, str(EXAMPLES / folder / f"{folder}.py"), "40"], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(DOCS.parent)},
    )  # fmt: skip
    examples = [json.loads(line) for line in made.stdout.splitlines()]
    assert len(examples) == 40
    sys.path.insert(0, str(EXAMPLES / folder))
    try:
        for example in examples[:8]:
            whole = example["prompt"] + example["response"]
            problem = whole[: whole.index(":") + 1]
            said = re.split(r"(?<==)-?\d+ |\(-?\d+\) " + re.escape(problem), whole.removeprefix(problem))
            said = [text if text.endswith(("=", "<eos>")) else f"{text}<eos>" for text in said]
            prompts, sample = play(folder, problem, [*said, "1<eos>"], workspace)  # the last may be wrong
            assert prompts[len(said) - 1] + said[-1] == f"{whole}<eos>"
            assert sample.status is Status.OK
    finally:
        sys.path.remove(str(EXAMPLES / folder))
