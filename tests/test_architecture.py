"""The arrows of the design, read from the code itself: who may import whom, and what each import may load."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "configs": {"configs"},
    "numerics": {"numerics"},
    "tracing": {"tracing"},
    "rollout": {"rollout", "configs", "numerics", "tracing"},
    "parallel": {"parallel", "configs", "numerics", "tracing"},
    "trainer": {"trainer", "rollout", "parallel", "configs", "tracing"},
    "launch": {"launch", "trainer", "rollout", "parallel", "configs", "tracing"},
}
ENGINE_HOMES = {
    "megatron": (
        "parallel/engine.py",
        "parallel/engine_base.py",
        "parallel/megatron/",
        "parallel/checkpoints/",
        "parallel/weights/hf_conversion.py",
    ),
    "sglang": ("rollout/servers/", "rollout/sglang_plugin/"),
}


def imported(file: Path) -> set[str]:
    """Top-level names of every import statement anywhere in a file, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def files_of(package: str) -> list[Path]:
    return [f for f in sorted((ROOT / package).rglob("*.py")) if "cpu_stand_ins" not in f.parts]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_the_arrows_allow(package):
    assert files_of(package), f"no files found in {package}"
    wrong = {
        str(f.relative_to(ROOT)): sorted((imported(f) & MAY_IMPORT.keys()) - MAY_IMPORT[package])
        for f in files_of(package)
    }
    assert {f: names for f, names in wrong.items() if names} == {}


@pytest.mark.parametrize("engine", ENGINE_HOMES)
def test_engines_are_imported_only_in_their_adapters(engine):
    users = [str(f.relative_to(ROOT)) for p in MAY_IMPORT for f in files_of(p) if engine in imported(f)]
    assert [u for u in users if not u.startswith(ENGINE_HOMES[engine])] == []


def test_nothing_imports_tests_or_benchmarks():
    users = [str(f) for p in MAY_IMPORT for f in files_of(p) if imported(f) & {"tests", "benchmarks"}]
    assert users == []


LIGHT = (
    "configs.loader", "configs.schema", "launch.checks.own_parts", "launch.cli",
    "launch.commands.train", "launch.commands.plan", "launch.commands.dry_run",
    "configs.reading.hardware", "launch.commands.plan_page", "parallel.planning.decoding", "parallel.planning.flops",
    "parallel.planning.time", "parallel.planning.traffic",
    "launch.commands.clean", "launch.commands.dequantise", "launch.commands.simulate", "launch.commands.stop", "launch.commands.sweep",
    "launch.commands.trace", "launch.commands.watch", "parallel.planning.simulated",
    "parallel.planning.architecture", "parallel.planning.layout", "parallel.planning.memory", "parallel.planning.planner",
    "rollout.environments.agent_template", "rollout.environments.processes", "rollout.rewards.scorer",
    "rollout.servers.fleet", "rollout.tasks", "tracing",
)  # fmt: skip


TORN = re.compile(r"""^\s*[\])}]+[^#"']*  # (?!fmt|noqa|type:|pyright|\[)""")


def test_no_comment_stands_behind_the_end_of_a_statement_of_several_lines():
    """The formatter breaks a line that its comment makes too long, and the comment is left behind the last bracket. It belongs
    above, on a line of its own."""
    files = [file for package in (*MAY_IMPORT, "benchmarks", "tests") for file in files_of(package)]
    assert [
        f"{f}:{n}" for f in files for n, line in enumerate(f.read_text().split("\n"), 1) if TORN.match(line)
    ] == []


def test_commands_in_messages_are_quoted_for_a_shell():
    """A path in a command that people paste may hold a blank or a dollar sign: ``tandem_command`` quotes it."""
    unquoted = re.compile(r"`tandem [\w-]+ [^`]*\{")
    files = [file for package in MAY_IMPORT for file in files_of(package)]
    assert [file for file in files if any(map(unquoted.search, file.read_text().splitlines()))] == []


def test_checking_a_config_loads_no_torch():
    """Bad input must be answered within seconds, so nothing on its way may import an engine or torch."""
    code = f"""
import importlib, sys
for module in {LIGHT}:
    importlib.import_module(module)
    if heavy := sys.modules.keys() & {{'torch', 'sglang', 'megatron', 'mlflow', 'transformers'}}:
        sys.exit(f"{{module}} imports {{heavy}}")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("rollout.rewards.worker", {"configs", "pydantic", "aiohttp"}),
        ("launch.commands.train", {"aiohttp"}),
        ("rollout.servers.control", {"aiohttp"}),
    ],
)
def test_what_many_processes_import_is_no_more_than_they_use(module, unneeded):
    """A reward that is a function has many processes; each command is one, and each rank of the learner."""
    code = f"import sys, {module}; print(sorted(sys.modules.keys() & {unneeded}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_installation_holds_every_file_of_the_packages(tmp_path):
    """But for what people read: a file that is missing shows only where the installation is no editable one."""
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = {
        f.relative_to(ROOT) for package in MAY_IMPORT for f in (ROOT / package).rglob("*") if f.is_file()
    }
    wanted = {f for f in wanted if "__pycache__" not in f.parts and f.suffix != ".md"}
    assert {f.relative_to(tmp_path) for f in tmp_path.rglob("*") if f.is_file()} == wanted
