"""``tandem plan --gpu`` as a user meets it: seconds in table and ranking, the page, and wrong arguments."""

import base64
import json
import re
from pathlib import Path

import pytest
import yaml

from configs.loader import load_config
from configs.reading.hardware import FOLDER, hardware_names, read_hardware
from configs.schema import RunConfig
from configs.schema.layout import ONE_PROCESS, as_overrides, layout_text
from launch.checks.device_memory import memory_lines, memory_problems, need_of
from launch.checks.devices import device_of
from launch.commands.plan_page import lanes
from launch.processes.placement import check_placement, num_nodes
from parallel.planning.architecture import architecture_of
from parallel.planning.decoding import Lengths
from parallel.planning.layout import fitting_layouts, rollout_sizes
from parallel.planning.machine import Machine
from parallel.planning.memory import learner_memory
from parallel.planning.planner import CONTEXT_SIZES, Cluster, Plan, Timing, plan
from parallel.planning.work import work_of
from tests.support.command import tandem

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "tests" / "model_configs" / "Qwen2.5-7B-Instruct"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    content = {
        "model": {"path": str(MODEL)},
        "task": {"type": "countdown"},
        "rollout": {"prompts_per_step": 64, "group_size": 8, "max_new_tokens": 4096},
        "learner": {"token_budget": 16384, "recompute": "full"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "run.yaml"


def run(config: Path, *arguments: str, gpus: int = 8):
    return tandem("plan", config.name, "--gpus", str(gpus), *arguments, cwd=config.parent)


def timed(config: Path, *overrides: str, gpus: int = 16, gpu: str = "h100", per_node: int = 8):
    loaded = load_config(config, [*overrides, "layout.dp=1"])
    assert isinstance(loaded, RunConfig)
    lengths = Lengths(prompt=256, response=2048, longest=4096, spread=0.5)
    timing = Timing(machine=Machine(hardware=read_hardware(gpu), gpus_per_node=per_node), lengths=lengths)
    cluster = Cluster(num_gpus=gpus, gpu_bytes=80 * 2**30, gpus_per_node=per_node)
    return plan(architecture_of(MODEL), loaded, cluster, timing=timing), loaded


def test_the_table_has_seconds_and_the_assumptions_follow(config):
    done = run(config, "--gpu", "h100", "--top", "3")
    assert done.returncode == 0, done.stderr
    assert "s a step" in done.stdout and "sampling " in done.stdout
    for part in (
        "h100: peaks of the data sheet; the learner's shares were fitted",
        "prompts of 256 tokens; responses of 2,048 tokens in the mean",
        "rewards and environments take no time",
        "# a step of the first, in seconds: prefill ",
    ):
        assert part in done.stdout, part
    pasted = yaml.safe_load(done.stdout[done.stdout.index("layout:") :])
    assert set(pasted) == {"layout", "rollout", "learner"}


def test_without_a_description_there_are_no_seconds(config):
    done = run(config, "--gpu-memory", "80")
    assert done.returncode == 0, done.stderr
    assert "s a step" not in done.stdout and "estimated" not in done.stdout
    said = "# add --gpu h100 (or the kind that you have) to rank by seconds; the order may change"
    assert said in done.stdout
    assert "rank by seconds" not in run(config, "--gpu", "h100").stdout


def test_a_published_quantised_model_is_planned_in_bfloat16_from_its_config_alone(config):
    """Not one of a method whose weights nothing here reads."""
    plain, folder = run(config, "--gpu-memory", "80"), config.parent / "published"
    folder.mkdir()
    hf_config = json.loads((MODEL / "config.json").read_text())
    for method, reads in (("fp8", True), ("gptq", False)):
        hf_config["quantization_config"] = {"quant_method": method, "weight_block_size": [128, 128]}
        (folder / "config.json").write_text(json.dumps(hf_config))
        done = run(config, "--gpu-memory", "80", "model.path=published")
        assert (done.returncode == 0) == reads, done.stderr
        if reads:
            said, _, rest = done.stdout.partition("\n\n")
            assert (
                said
                == "# planned for the model in bfloat16; before a run write it by `tandem dequantise FOLDER OUT`"
            )
            assert rest == plain.stdout
        else:
            assert "quant_method='gptq', which Tandem does not read" in done.stderr


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [("qwen2_5_7b", 8), ("qwen2_5_1_5b", 8), ("qwen2_5_32b", 64), ("long_responses/qwen3_30b_a3b_32k", 32)],
)
def test_the_first_without_seconds_is_hardly_slower_than_the_first_with_them(recipe, gpus):
    """The oracle is the estimate for H100: the order that needs no figures of a GPU puts a pair first which takes at most
    10 % longer than the fastest pair of the same mismatch. (By free memory first it were 41 %, 78 %, 43 % and 5 %.)"""
    config = load_config(ROOT / f"configs/recipes/{recipe}.yaml", as_overrides(ONE_PROCESS))
    assert isinstance(config, RunConfig)
    architecture = architecture_of(ROOT / "tests/model_configs" / config.model.path.name)
    longest = config.rollout.max_new_tokens
    lengths = Lengths(prompt=256, response=longest // 2, longest=longest, spread=0.5)
    timing = Timing(machine=Machine(hardware=read_hardware("h100"), gpus_per_node=8), lengths=lengths)
    cluster = Cluster(num_gpus=gpus, gpu_bytes=80 * 2**30)
    first = plan(architecture, config, cluster)[0]
    timed = plan(architecture, config, cluster, timing=timing)
    seconds = {layouts_of(each): each.time.total for each in timed if each.time is not None}
    assert timed[0].mismatch_key == first.mismatch_key
    assert seconds[layouts_of(first)] <= 1.1 * seconds[layouts_of(timed[0])]


def layouts_of(each: Plan) -> tuple[str, int, int]:
    return layout_text(each.learner), each.rollout_tp, each.replicas


COLOCATED = "launch.placement=colocated"


@pytest.mark.parametrize(("gpus", "gib"), [(4, 80), (4, 78.9), (8, 40), (2, 76)])
def test_turns_are_planned_exactly_where_the_dry_runs_check_accepts_them(config, gpus, gib):
    """All layouts of both sides on all GPUs, each as a config of its own: those of which the dry run's memory check finds
    nothing and calls nothing tight, and whose cache holds the longest sequence that the learner may get."""
    base = load_config(config, [COLOCATED, *as_overrides(ONE_PROCESS)])
    assert isinstance(base, RunConfig)
    architecture = architecture_of(MODEL)
    device, runs = device_of(base, gib), ("learn", "serve", "sample")
    wanted, fields = set(), set()
    for layout in fitting_layouts(architecture, gpus, context=CONTEXT_SIZES):
        for tp in (tp for tp in rollout_sizes(architecture) if gpus % tp == 0):
            servers = base.rollout.model_copy(update={"tp": tp, "replicas": gpus // tp})
            tried = base.model_copy(update={"layout": layout, "rollout": servers})
            findings = [field for field, _ in memory_problems(tried, device, runs)]
            server = need_of(tried, device, runs).server
            assert server is not None
            has_room = server.tokens >= base.learner.token_budget
            is_tight = any("tight" in line for line in memory_lines(tried, device, runs))
            if not findings and not is_tight and has_room:
                wanted.add((layout_text(layout), tp, gpus // tp))
            elif not is_tight:
                fields.update(findings)
    cluster = Cluster(num_gpus=gpus, gpu_bytes=int(gib * 2**30))
    assert {layouts_of(each) for each in plan(architecture_of(MODEL), base, cluster)} == wanted
    assert wanted
    if (gpus, gib) == (4, 78.9):
        assert fields == {"launch.placement"}, "the rule of both sides decides alone"


def test_turns_are_printed_with_yaml_that_says_so(config):
    done = run(config, "--gpu", "h100", "--top", "1", COLOCATED)
    assert done.returncode == 0, done.stderr
    assert "# learner and servers take turns on the same GPUs (launch.placement=colocated)" in done.stdout
    assert "moving the learner to host memory and back at every step takes no time" in done.stdout
    pasted = yaml.safe_load(done.stdout[done.stdout.index("layout:") :])
    assert pasted["launch"] == {"placement": "colocated"}
    (config.parent / "planned.yaml").write_text(yaml.safe_dump({"extends": "run.yaml"} | pasted))
    planned = load_config(config.parent / "planned.yaml")
    assert isinstance(planned, RunConfig)
    assert planned.layout.world_size == planned.rollout.tp * planned.rollout.replicas == 8
    separate = run(config, "--gpu", "h100", "--top", "1")
    assert "launch.placement=colocated plans turns on the same GPUs" in separate.stdout
    assert "placement: " not in separate.stdout


def test_turns_of_two_nodes_are_printed_with_yaml_that_loads_and_is_placed(config):
    done = run(config, "--gpu", "h100", "--top", "1", COLOCATED, "--gpus-per-node", "4")
    assert done.returncode == 0, done.stderr
    pasted = yaml.safe_load(done.stdout[done.stdout.index("layout:") :])
    nodes = {"learner": 2, "rollout": 2, "gpus_per_node": 4}
    assert pasted["launch"] == {"placement": "colocated", "nodes": nodes}
    (config.parent / "planned.yaml").write_text(yaml.safe_dump({"extends": "run.yaml"} | pasted))
    planned = load_config(config.parent / "planned.yaml")
    assert isinstance(planned, RunConfig)
    assert planned.layout.world_size == planned.rollout.tp * planned.rollout.replicas == 8
    assert (num_nodes(planned), check_placement(planned)) == (2, [])


def test_a_step_of_turns_is_sampling_then_training_of_the_same_layouts(config):
    """As on twice as many GPUs, where each side has its own: the same layouts sample and train for as long. The weights
    then go to the other node, and with turns they stay within one: also if the nodes are half as large, unless the learner has
    stages, a server takes two of them, or they are broadcast."""
    turns, _ = timed(config, COLOCATED, gpus=8)
    separate = {layouts_of(each): each.time for each in timed(config, gpus=16)[0]}
    over_nodes, broadcast = (
        {layouts_of(each): each.time for each in timed(config, COLOCATED, *more, gpus=8, per_node=4)[0]}
        for more in ([], ["rollout.weight_transfer=broadcast"])
    )
    assert len(turns) == len(over_nodes) > 5, "no tensor-parallel group is larger than the smaller nodes"
    stay = [each for each in turns if each.learner.pp == 1 and each.replicas >= 2]
    assert 0 < len(stay) < len(turns)
    for each in turns:
        apart = separate[layouts_of(each)]
        assert each.time is not None and apart is not None
        assert (each.time.sampling, each.time.training) == (apart.sampling, apart.training)
        assert each.time.transfer < apart.transfer
        spread = over_nodes[layouts_of(each)]
        assert spread is not None
        assert (spread.sampling, spread.transfer) == (
            apart.sampling, each.time.transfer if each in stay else apart.transfer,
        )  # fmt: skip
        assert broadcast[layouts_of(each)].transfer == apart.transfer
        parts = each.time.sampling.total + each.time.training.total + each.time.transfer
        assert each.time.total == pytest.approx(parts)


def test_a_cache_has_no_more_tokens_than_its_limit(config):
    """A limit below the learner's token budget bounds the longest sequence too, so that the pair still fits."""
    done = run(config, "--gpu-memory", "80", "--top", "1", "rollout.max_total_tokens=8192")
    assert done.returncode == 0, done.stderr
    assert "of cache for 8,192 tokens" in done.stdout and "unused by rollout.max_total_tokens" in done.stdout


def test_the_memory_is_the_descriptions_unless_it_is_given(config):
    small = run(config, "--gpu", "h100", "--gpu-memory", "20")
    assert small.returncode == 2 and "nothing fits on 8 GPUs of 20.0 GiB" in small.stderr
    larger = run(config, "--gpu", "h200", "--top", "1")
    assert "% free" in larger.stdout
    missing = run(config)
    assert missing.returncode == 2
    assert (
        "the memory of a GPU is missing; add --gpu (a100, cpu, h100, h200, or FILE.yaml), or --gpu-memory GiB"
        in missing.stderr
    )


def test_lengths_are_taken(config):
    given = ["--gpu", "a100", "--prompt-tokens", "17", "--response-tokens", "1000", "--response-spread", "0"]
    done = run(config, *given)
    assert "prompts of 17 tokens; responses of 1,000 tokens each" in done.stdout, done.stderr


def test_a_description_of_ones_own_is_taken(config):
    content = yaml.safe_load((FOLDER / "h100.yaml").read_text()) | {"name": "mine", "source": "measured"}
    (config.parent / "mine.yaml").write_text(yaml.safe_dump(content))
    done = run(config, "--gpu", "mine.yaml")
    assert done.returncode == 0 and "mine: measured" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h10"], ["--gpu", "h10", "did you mean `h100`?", "a100, cpu, h100, h200"]),
        (["--gpu", "none.yaml"], ["--gpu", "none.yaml", "no such file", "a100, cpu, h100, h200"]),
        (["--gpu", "wrong.yaml"], ["memory_gib", "-1", "peak_tflop", "did you mean `peak_tflops`", "required"]),
        (["--gpu", "list.yaml"], ["list.yaml", "a mapping of keys"]),
        (["--gpu", "."], ["--gpu", "no description of hardware has this name"]),
        (["--gpu", "./"], ["a folder, not a file"]),
        (["--gpu", "h100", "--response-tokens", "5000"], ["--response-tokens 5000", "max_new_tokens=4096", "lower"]),
        (["--gpu", "h100", "--response-tokens", "0"], ["--response-tokens"]),
        (["--gpu", "h100", "--prompt-tokens", "16000"], ["--prompt-tokens 16000", "token_budget", "lower it"]),
        (["--gpu", "h100", "--response-spread", "-1"], ["--response-spread"]),
        (["--gpu", "h100", "--report", "page.txt"], ["--report", "page.txt", ".html"]),
        (["--gpu-memory", "80", "--report", "page.html"], ["--report", "add --gpu (a100, cpu, h100, h200"]),
        (["--gpu-memory", "80", "--prompt-tokens", "1", "--report", "page.html"], ["--prompt-tokens", "add --gpu"]),
        (["--gpu-memory", "80", "--response-tokens", "9"], ["--response-tokens", "add --gpu"]),
        (["--gpu", "h100", "--gpus", "12", COLOCATED], ["--gpus 12", "--gpus-per-node 8", "use a multiple of it"]),
        (["--gpu", "h100", "--gpus", "1"], ["--gpus 1 is too few", "add launch.placement=colocated"]),
        (["--gpu", "a100", "rollout.quantization=fp8"], ["rollout.quantization=fp8", "peak_tflops.fp8"]),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated_is_refused(config, arguments, said):
    wrong = yaml.safe_load((FOLDER / "h100.yaml").read_text()) | {"memory_gib": -1}
    wrong["peak_tflop"] = wrong.pop("peak_tflops")
    (config.parent / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    (config.parent / "list.yaml").write_text("[1, 2]\n")
    done = run(config, *arguments)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    for part in said:
        assert part in done.stderr, done.stderr
    assert not (config.parent / "page.html").exists()


@pytest.mark.parametrize("gpu", hardware_names())
def test_mismatch_decides_first_then_time(config, gpu):
    plans, _ = timed(config, gpu=gpu)
    assert [p.has_few for p in plans] == sorted(p.has_few for p in plans)
    keys = [(p.has_few, p.mismatch_key, p.shown_seconds) for p in plans]
    assert keys == sorted(keys)
    assert len({p.shown_seconds for p in plans}) > 5
    best = min((p for p in plans if not p.has_few), key=lambda p: p.mismatch_key)
    assert plans[0].mismatch_key == best.mismatch_key


def test_time_moves_a_slow_pair_behind_a_fast_one_of_the_same_mismatch(config):
    """Without seconds a pair that gives both sides as many GPUs is first; with them, one that gives the slower side more."""
    plans, loaded = timed(config)
    alike = [p for p in plans if p.mismatch_key == plans[0].mismatch_key and not p.has_few]
    assert alike[0].shown_seconds == min(p.shown_seconds for p in alike)
    bare = plan(architecture_of(MODEL), loaded, Cluster(num_gpus=16, gpu_bytes=80 * 2**30))
    assert {p.rank_key[5:] for p in bare} <= {p.rank_key[5:] for p in plans} and len(bare) == len(plans)


def pictures(page: str) -> list[str]:
    found = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page)
    return [base64.b64decode(text).decode() for text in found]


def test_a_page_with_pictures_is_written(config):
    done = run(config, "--gpu", "h100", "--report", "out/page.html", gpus=16)
    assert done.returncode == 0, done.stderr
    page = (config.parent / "out" / "page.html").read_text()
    memory, step, running, choices = pictures(page)
    for part in ("learner, stage 0", "a server's rank", "optimizer", "cache"):
        assert part in memory, part
    for part in ("servers", "decode", "update", "waits"):
        assert part in step, part
    assert "responses" in running
    assert "same TP" in choices and "seconds of a step" in choices
    assert "A plan for 16 GPUs" in page and "the rest are assumptions" in page
    assert "both, between turns" not in memory
    assert "http" not in re.sub(r"base64,[^\"]*", "", page), "nothing is fetched"
    rows = page.split("<table>")[1].count("<tr>")
    assert rows > 5


def test_a_page_of_turns_shows_what_both_sides_hold_at_once(config):
    done = run(config, "--gpu", "h100", "--report", "page.html", COLOCATED)
    assert done.returncode == 0, done.stderr
    assert "both, between turns" in pictures((config.parent / "page.html").read_text())[0]


def test_a_page_shows_a_measured_table(config):
    pairs = [
        {"learner": "tp=1", "rollout": "tp=1", "max_mean": 0.25},
        {"learner": "tp=2", "rollout": "tp=1", "max_mean": 0.5},
    ]
    (config.parent / "measured.json").write_text(json.dumps({"pairs": pairs}))
    done = run(config, "--gpu", "h100", "--measured", "measured.json", "--report", "page.html")
    assert done.returncode == 0, done.stderr
    assert "mismatch, measured or expected" in pictures((config.parent / "page.html").read_text())[3]


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_lane_fills_the_step(config, staleness):
    """No gap, no overlap: what a lane does begins where the one before ends, and the last ends with the step."""
    plans, _ = timed(config, f"rollout.max_staleness={staleness}")
    for each in [p for p in plans if p.learner.pp > 1][:5]:
        assert each.time is not None
        found = lanes(each.time)
        assert len(found) == 1 + each.learner.pp
        for blocks in found.values():
            now = 0.0
            for block in blocks:
                assert block.start == pytest.approx(now, abs=1e-6)
                now = block.start + block.seconds
            assert now == pytest.approx(each.time.total)
            assert blocks[-1].name == "transfer"


def test_the_bars_of_memory_sum_to_the_plans_total(config):
    plans, loaded = timed(config)
    architecture = architecture_of(MODEL)
    for each in plans[:20]:
        for stage in range(each.learner.pp):
            held = learner_memory(architecture, each.learner, work_of(loaded, "cuda"), stage)
            assert sum(held.at_peak().values()) == held.total


@pytest.mark.parametrize("name", ["a100", "h100", "h200"])
def test_a_tokens_way_to_the_learner_is_that_of_its_page(name):
    """From answer to trajectory and on to the batch, of 16 million tokens, in microseconds."""
    page = (FOLDER.parents[1] / "benchmarks/results/sample_path.md").read_text()
    there, on = (
        re.search(rf"\| \*\*{part}\*\* \|.*\| \*\*([\d.]+)\*\* \(", page)
        for part in ("answer to trajectory", "trajectory to batch")
    )
    measured = (float(there[1]) + float(on[1])) * 1e-6
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert content["overheads"]["token_s"] == pytest.approx(measured, rel=0.02)
