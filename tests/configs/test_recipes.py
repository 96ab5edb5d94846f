"""Every shipped recipe, over both tasks, as a user would start it: read, checked against its model, planned
for 80 GiB, and dry-run.

Of the models there is config.json alone (``model_configs/``, of the public model cards); weights are headers
without numbers, the tokenizer is a small one, data a few lines in the form of the public files.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from configs.loader import ConfigError, load_config, parse_config
from configs.presets import preset_name
from configs.reading.named_files import HUB_NAMES, fix_model_path
from configs.reading.yaml_values import comments_in
from configs.schema import RunConfig
from configs.schema.layout import LayoutConfig, layout_text
from launch.checks import config as checks
from launch.cli import app
from launch.commands import train as training
from launch.processes.placement import check_placement, num_nodes
from parallel.planning.architecture import Architecture, architecture_of
from parallel.planning.memory import GIB, USABLE_SHARE, LearnerMemory, stage_parameters, worst_stage
from parallel.planning.other_models import critic_architecture
from parallel.planning.planner import Cluster, plan
from parallel.planning.server_memory import RolloutMemory, rollout_memory
from parallel.planning.work import work_of
from tests.support.model_folders import make_model_folder
from trainer.algorithm.advantages import grpo

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "configs" / "recipes"
MODEL_CONFIGS = Path(__file__).parents[1] / "model_configs"
PARTS = {"grpo", "dapo", "fp8_rollout"}
OF_MODELS = sorted(
    file.stem
    for file in RECIPES.glob("*.yaml")
    if file.stem not in PARTS and not file.stem.startswith("countdown")
)
STUDIES = sorted(f"studies/{file.stem}" for file in (RECIPES / "studies").glob("*.yaml"))
LONG = sorted(f"long_responses/{file.stem}" for file in (RECIPES / "long_responses").glob("*.yaml"))
TASKS = ["gsm8k", "dapo_math"]
LONGEST_PROMPT = 2048
SERVED_AT_ONCE = 8
"""Responses at full length that a server's cache must hold: fewer would leave its GPUs idle."""

BILLIONS = {
    "Qwen2.5-0.5B-Instruct": 0.49, "Qwen2.5-1.5B-Instruct": 1.54, "Qwen2.5-3B-Instruct": 3.09, "Qwen2.5-7B-Instruct": 7.61,
    "Qwen2.5-14B-Instruct": 14.7, "Qwen2.5-32B": 32.5, "Qwen2.5-72B-Instruct": 72.7, "Qwen3-0.6B": 0.6, "Qwen3-4B": 4.0, "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235, "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.1-70B-Instruct": 70.6,
}  # fmt: skip
"""Parameters, as the models' cards give them."""


@dataclass(frozen=True)
class Case:
    recipe: str
    overrides: tuple[str, ...] = ()
    gpu_gib: int = 80

    @property
    def file(self) -> Path:
        return RECIPES / f"{self.recipe}.yaml"

    def __str__(self) -> str:
        return "+".join(
            [self.recipe, *(text.rpartition("/")[2].removesuffix(".yaml") for text in self.overrides)]
        )


def over(part: str) -> str:
    return f"extends={RECIPES / part}.yaml"


def is_large(recipe: str) -> bool:
    return recipe in ("qwen2_5_72b", "llama3_1_70b")


CASES = [
    *(Case(recipe, (over(f"tasks/{task}"),)) for recipe in OF_MODELS for task in TASKS),
    # As the recipes of the large dense models say, their activations of sequences of 24576 tokens have to be
    # split.
    *(
        Case(recipe, (over("dapo"), *(("layout.sp=true",) if is_large(recipe) else ())))
        for recipe in OF_MODELS
    ),
    *(
        Case(recipe, (over("fp8_rollout"),))
        for recipe in OF_MODELS
        if recipe.startswith("qwen") and "_a" not in recipe
    ),
    *(Case(recipe) for recipe in LONG),
    *(Case(study, gpu_gib=48 if "0_5b" in study else 80) for study in STUDIES),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Where the recipes' relative paths lead to something."""
    folder = tmp_path_factory.mktemp("tree")
    for source in MODEL_CONFIGS.iterdir():
        make_model_folder(folder / "models" / source.name, json.loads((source / "config.json").read_text()))
    data = folder / "data"
    (data / "gsm8k").mkdir(parents=True)
    for name in ("train", "test"):
        (data / "gsm8k" / f"{name}.jsonl").write_text(
            json.dumps({"question": "1 + 1?", "answer": "One and one.\n#### 2"}) + "\n"
        )
    row = {
        "data_source": "math_dapo", "prompt": [{"content": "Solve the following math problem: 30 + 4?", "role": "user"}], "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b6eb4"},
    }  # fmt: skip
    for name in ("dapo-math-17k", "aime-2024"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), data / f"{name}.parquet")
    return folder


@pytest.fixture(autouse=True)
def inside(tree, monkeypatch) -> None:
    monkeypatch.chdir(tree)
    monkeypatch.setattr(checks, "gpus_here", lambda: 0)


def recipe_architecture(config: RunConfig) -> Architecture:
    return architecture_of(MODEL_CONFIGS / config.model.path.name)


def gpus_of(config: RunConfig) -> int:
    return config.layout.world_size + config.rollout.replicas * config.rollout.tp


def memory_of(config: RunConfig, gpu_bytes: int) -> tuple[LearnerMemory, RolloutMemory]:
    architecture, rollout = recipe_architecture(config), config.rollout
    work = work_of(config, "cuda", critic_architecture(config, architecture))
    server = rollout_memory(
        architecture, rollout.tp, rollout.dtype, gpu_bytes, quantization=rollout.quantization
    )
    return worst_stage(architecture, config.layout, work), server


def test_a_missing_model_of_a_recipe_is_fetched_by_the_command_of_its_comment(monkeypatch, tmp_path):
    """Every model that a recipe names, and no other, has a name at the hub."""
    monkeypatch.chdir(tmp_path)
    named = set()
    for recipe in OF_MODELS:
        path = load_config(RECIPES / f"{recipe}.yaml").model.path
        line = next(
            line for line in (RECIPES / f"{recipe}.yaml").read_text().splitlines() if str(path) in line
        )
        command = line.partition(" # ")[2]
        assert command.startswith("hf download ") and command.endswith(f"/{path.name} --local-dir {path}"), (
            recipe
        )
        assert fix_model_path(path) == f"nothing is downloaded automatically: `{command}`"
        named.add(path.name)
    assert named == set(HUB_NAMES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_recipe_is_valid_fits_its_gpus_and_is_planned(case):
    # Model, files of the task, layouts, reward.
    config = checks.load_checked(parse_config(case.file, case.overrides), RunConfig)
    assert config.layout.dp != "auto"
    assert check_placement(config) == []
    nodes = config.launch.nodes
    if nodes is None:
        assert gpus_of(config) == (4 if case.gpu_gib == 48 else 8)
    else:
        assert config.layout.world_size == nodes.learner * nodes.gpus_per_node
        assert config.rollout.replicas * config.rollout.tp == nodes.rollout * nodes.gpus_per_node
    assert config.layout.tp == config.rollout.tp, "aligned, or the recipe says why not"
    assert (
        config.rollout.max_new_tokens + LONGEST_PROMPT
        <= config.learner.token_budget
        <= recipe_architecture(config).max_positions
    )
    learner, server = memory_of(config, case.gpu_gib * GIB)
    assert learner.total <= USABLE_SHARE * case.gpu_gib * GIB
    assert server.tokens >= SERVED_AT_ONCE * config.rollout.max_new_tokens
    cluster = Cluster(num_gpus=gpus_of(config), gpu_bytes=case.gpu_gib * GIB)
    architecture = architecture_of(config.model.path)
    plans = plan(architecture, config, cluster, critic=critic_architecture(config, architecture))
    pair = (config.layout, config.rollout.tp, config.rollout.replicas)
    assert pair in [(each.learner, each.rollout_tp, each.replicas) for each in plans]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_recipe_is_dry_run(case, tree):
    before = sorted(path.name for path in tree.iterdir())
    done = CliRunner().invoke(
        app, ["train", str(case.file), *case.overrides, "--dry-run", "--gpu-memory", str(case.gpu_gib)]
    )
    assert done.exit_code == 0, done.output
    assert f"name: {load_config(case.file).name}" in done.output
    assert sorted(path.name for path in tree.iterdir()) == before


def test_every_size_of_the_list_has_a_recipe_and_its_card_s_size():
    configs = [load_config(RECIPES / f"{recipe}.yaml") for recipe in OF_MODELS]
    assert (
        sorted(config.model.path.name for config in configs)
        == sorted(BILLIONS)
        == sorted(path.name for path in MODEL_CONFIGS.iterdir())
    )
    for config in configs:
        parameters = sum(stage_parameters(recipe_architecture(config), LayoutConfig(), 0))
        name = config.model.path.name
        assert parameters == pytest.approx(BILLIONS[name] * 1e9, rel=0.012), name


@pytest.mark.parametrize("recipe", OF_MODELS)
def test_one_task_takes_the_whole_place_of_another(recipe):
    """Whatever task a recipe has by itself: nothing of it is left under the other."""
    file = RECIPES / f"{recipe}.yaml"
    gsm8k, dapo_math = (load_config(file, [over(f"tasks/{task}")]) for task in TASKS)
    assert load_config(file) in (gsm8k, dapo_math) and gsm8k != dapo_math
    for first, second, alone in (("gsm8k", "dapo_math", dapo_math), ("dapo_math", "gsm8k", gsm8k)):
        assert (
            load_config(file, [f"extends=[{RECIPES}/tasks/{first}.yaml, {RECIPES}/tasks/{second}.yaml]"])
            == alone
        )
    for config in (gsm8k, dapo_math):
        assert (
            config.model == gsm8k.model
            and config.layout == gsm8k.layout
            and config.correction == gsm8k.correction
        )


@pytest.mark.parametrize("file", sorted(RECIPES.rglob("*.yaml")), ids=lambda file: file.stem)
def test_no_text_of_a_recipe_ends_in_a_comment(file):
    """A comment begins with a hash and a blank; YAML also takes ` ####.` of an unquoted text for one."""
    assert all(comment.startswith("# ") for comment in comments_in(file.read_text(encoding="utf-8")))


def test_the_prompt_of_gsm8k_names_the_mark_of_its_answers():
    assert "####" in load_config(RECIPES / "qwen2_5_7b.yaml", [over("tasks/gsm8k")]).task.system_prompt


def test_the_page_s_translation_of_dapo_32b_is_dry_run_with_the_settings_of_verl_s_script(tree):
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8").split("### DAPO-32B of verl")[1]
    text = page.split("```yaml\n")[1].split("```")[0].replace("configs/recipes", str(RECIPES))
    (file := tree / "dapo_32b.yaml").write_text(text, encoding="utf-8")
    done = CliRunner().invoke(app, ["train", str(file), "--dry-run", "--gpu-memory", "80"])
    assert done.exit_code == 0, done.output
    config = load_config(file)
    rollout, learner, evaluation = config.rollout, config.learner, config.evaluation
    train_batch_size, n, mini_batch, warmup_batches = 512, 16, 32, 10
    assert (rollout.prompts_per_step, rollout.group_size) == (train_batch_size, n)
    assert learner.minibatches == train_batch_size // mini_batch
    assert learner.optimizer.warmup_steps == warmup_batches * learner.minibatches
    assert (learner.optimizer.lr, learner.optimizer.weight_decay, learner.optimizer.clip_grad) == (
        1e-6,
        0.1,
        1,
    )
    assert learner.optimizer.betas == (0.9, 0.999)
    assert (rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k) == (20480, 1, 1, -1)
    assert (rollout.dynamic_sampling.max_rounds, rollout.dynamic_sampling.compare) == (10, "correct")
    assert (config.objective.clip_low, config.objective.clip_high) == (0.2, 0.28)
    assert (config.kl.coefficient, config.entropy.coefficient) == (0, 0)
    assert config.aggregation.type == "token_mean" and config.advantage.type == "grpo"
    assert config.reward.parts["overlong"].buffer_tokens == 4096
    assert (evaluation.every, evaluation.at_ends, evaluation.top_p, evaluation.temperature) == (
        5,
        True,
        0.7,
        1,
    )
    assert (
        config.checkpoint.every == 5
        and config.correction == load_config(file, ["correction=disabled"]).correction
    )


def test_dapo_warms_up_and_punishes_as_the_paper_does():
    """arXiv 2503.14476: a warm-up of 20 rollout steps (4.1); 1 if right, -1 if wrong (2.4), less up to 1 for length (3.4)."""
    config = load_config(RECIPES / "qwen3_8b.yaml", [over("dapo")])
    assert config.learner.optimizer.warmup_steps == 20 * config.learner.minibatches
    correct, overlong = (config.reward.parts[name].weight for name in ("correct", "overlong"))
    right_and_penalty = torch.tensor([[0, 0], [1, 0], [1, -0.25], [1, -1], [0, -1]], dtype=torch.float64)
    papers = right_and_penalty @ torch.tensor([2.0, 1.0], dtype=torch.float64) - 1
    recipes = right_and_penalty @ torch.tensor([correct, overlong], dtype=torch.float64)
    group = torch.zeros(len(papers), dtype=torch.int64)
    advantages = (grpo(rewards, group, normalize_by_std=True) for rewards in (papers, recipes))
    torch.testing.assert_close(*advantages, rtol=1e-5, atol=0)


def test_corrections_fit_the_kind_of_model():
    for recipe in OF_MODELS:
        config = load_config(RECIPES / f"{recipe}.yaml")
        expected = "decoupled_token_icepop" if recipe_architecture(config).experts else "decoupled_token_is"
        assert preset_name(config.correction) == expected, recipe


def differences(first: str, second: str) -> dict[str, tuple]:
    """Dotted fields in which two studies' configs differ, but for their names."""

    def flat(value, path=()):
        if isinstance(value, dict):
            return {
                key: found
                for name, inner in value.items()
                for key, found in flat(inner, (*path, name)).items()
            }
        return {".".join(path): value}

    a, b = (flat(load_config(RECIPES / "studies" / f"{name}.yaml").model_dump()) for name in (first, second))
    return {
        key: (a.get(key), b.get(key))
        for key in a.keys() | b.keys()
        if a.get(key) != b.get(key) and key != "name"
    }


def test_studies_differ_in_what_they_study_alone():
    truncation = {
        "correction.weight.level",
        "correction.weight.bound",
        "correction.weight.upper",
        "correction.weight.lower",
    }
    for without, with_it in (("dapo_32b_bf16", "dapo_32b_bf16_tis"), ("ppo_0_5b_int8", "ppo_0_5b_int8_tis")):
        found = differences(without, with_it)
        assert found["correction.weight.upper"] == (None, 2.0)
        assert found.keys() <= truncation | {"correction.weight.normalise"}
    assert differences("ppo_0_5b_bf16", "ppo_0_5b_int8") == {"rollout.precision": (None, "int8")}
    for correction in ("ppo_is", "vanilla_is"):
        assert (
            preset_name(
                load_config(
                    RECIPES / "studies/ppo_0_5b_int8_tis.yaml", [f"correction={correction}"]
                ).correction
            )
            is not None
        )


def test_an_fp8_rollout_is_refused_without_gpus_before_a_start(tree):
    before = sorted(path.name for path in tree.iterdir())
    file = RECIPES / "qwen3_8b.yaml"
    with pytest.raises(ConfigError, match=r"rollout\.quantization=fp8 needs NVIDIA GPUs"):
        training.train(file, [over("fp8_rollout")])
    with pytest.raises(ConfigError, match="cannot update a llama model while it serves it in FP8"):
        checks.load_checked(parse_config(RECIPES / "llama3_1_8b.yaml", [over("fp8_rollout")]), RunConfig)
    with pytest.raises(ConfigError, match=r"`tandem eval` serves model\.path unchanged"):
        training.evaluate(file, ["rollout.precision=int8"])
    assert sorted(path.name for path in tree.iterdir()) == before


def row_of(file: str) -> str:
    config = load_config(RECIPES / file)
    gpu_gib = 48 if "0_5b" in file and "studies" in file else 80
    learner, server = memory_of(config, gpu_gib * GIB)
    nodes = f"{num_nodes(config)} nodes" if config.launch.nodes else "1 machine"
    servers = f"tp={config.rollout.tp} × {config.rollout.replicas}"
    task = "GSM8K" if config.task.type == "gsm8k" else "DAPO-math"
    cells = (
        f"[`{file}`]({file})", config.model.path.name, task, f"{gpus_of(config)} ({nodes})", f"`{layout_text(config.layout)}`",
        f"`{servers}`", f"{learner.total / GIB:.0f} GiB", f"{server.weights / GIB:.1f} GiB", f"{server.tokens // 1000:,}k tokens",
        f"{config.learner.token_budget}", f"`{preset_name(config.correction)}`",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def test_the_readme_s_table_is_what_the_recipes_say():
    readme = (RECIPES / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("| [`") and line.count("|") > 10]
    assert sorted(rows) == sorted(row_of(f"{name}.yaml") for name in [*OF_MODELS, *LONG, *STUDIES])
