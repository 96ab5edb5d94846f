"""Which build `launch/install.sh` takes, with a shell script in the interpreter's place: nothing is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = """#!/usr/bin/env bash
# `-m venv` makes this file the environment's interpreter; pip's arguments are written down.
case "$*" in
  "--version") echo "Python 3.11.0" ;;
  "-m venv "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  "-m pip "*) echo "$*" >> "$PIP_LOG" ;;
  *"import pip, sys"*) [ -e "$(dirname "$0")/../bin/python" ] ;;
  *) echo "(3, 11)" ;;
esac
"""


@pytest.fixture
def install(tmp_path):
    """A call of install.sh in a copy of what it reads: (arguments, number of GPUs) -> (result, pip's commands)."""
    root, tools = tmp_path / "tandem", tmp_path / "tools"
    shutil.copytree(ROOT / "launch/requirements", root / "launch/requirements")
    shutil.copy(ROOT / "launch/install.sh", root / "launch")
    shutil.copy(ROOT / "setup.py", root)
    tools.mkdir()
    script(tools / "python", INTERPRETER)

    def call(
        *arguments: str, gpus: int = 0, libc: str = "2.36"
    ) -> tuple[subprocess.CompletedProcess, list[str]]:
        lines = "".join(f"echo 'GPU {i}: made here'\n" for i in range(gpus))
        script(tools / "nvidia-smi", f"#!/usr/bin/env bash\n{lines}")
        script(tools / "getconf", f"#!/usr/bin/env bash\necho 'glibc {libc}'\n")
        log = tmp_path / "pip.log"
        log.write_text("")
        path = f"{tools}:{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "PIP_LOG": str(log), "TANDEM_PYTHON": str(tools / "python")}
        command = ["bash", str(root / "launch/install.sh"), *arguments]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        return result, log.read_text().splitlines()

    return call


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def build_of(commands: list[str]) -> str:
    is_cuda, is_cpu = (any(name in line for line in commands) for name in ("cuda.lock", "cpu-rest.txt"))
    assert is_cuda != is_cpu, commands
    return "cuda" if is_cuda else "cpu"


@pytest.mark.parametrize(("gpus", "build"), [(0, "cpu"), (1, "cuda"), (2, "cuda")])
def test_the_machine_tells_the_build(install, gpus, build):
    result, commands = install(gpus=gpus)
    assert result.returncode == 0, result.stderr
    assert build_of(commands) == build
    assert install(gpus=gpus)[1] == [], "a second call installs nothing"


def test_a_build_that_was_asked_for_is_kept_until_the_other_is(install):
    """As on a login node, where quickstart.sh and test.sh call it again without a flag."""
    assert build_of(install("--cuda")[1]) == "cuda"
    assert install()[1] == [] and install("--cuda")[1] == []
    assert build_of(install("--cpu", gpus=2)[1]) == "cpu"
    assert install(gpus=2)[1] == []


def test_what_is_there_already_can_be_asked_for(install):
    install(gpus=2)
    assert install("--cuda", gpus=2)[1] == []
    assert install(gpus=0)[1] == [], "kept, though no GPU tells it now"


@pytest.mark.parametrize("libc", ["2.28", "2.9", "2.33"])
def test_a_system_that_is_too_old_for_sglangs_wheels_is_told(install, libc):
    result, commands = install(libc=libc)
    assert result.returncode == 1 and commands == []
    assert "glibc 2.34 or newer" in result.stderr and f"this system has {libc}" in result.stderr
    assert install(libc="2.34")[0].returncode == 0


def test_the_lock_of_the_cuda_build_answers_what_is_asked_for():
    """Resolved again on both Pythons, from what the packages say of each other. Nothing is installed."""
    done = subprocess.run(
        ["bash", "launch/lock.sh", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if "Failed to fetch" in done.stderr or "error sending request" in done.stderr:
        pytest.skip(f"no package index is reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


def test_a_lock_that_no_longer_answers_is_told(tmp_path):
    """A resolver in the place of uv's, which gives what cuda.txt has."""
    shutil.copytree(ROOT / "launch/requirements", tmp_path / "launch/requirements")
    shutil.copy(ROOT / "launch/lock.sh", tmp_path / "launch")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    script(tmp_path / ".venv/bin/python", '#!/usr/bin/env bash\n[ "$2" = pip ] || grep -v "^#" "$5"\n')
    done = subprocess.run(
        ["bash", str(tmp_path / "launch/lock.sh"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "run bash launch/lock.sh" in done.stderr, done.stderr
    lines = (tmp_path / "launch/requirements/cuda.txt").read_text().splitlines()
    (tmp_path / "launch/requirements/cuda.lock").write_text("# a comment\n" + "\n".join(lines[1:]) + "\n")
    done = subprocess.run(
        ["bash", str(tmp_path / "launch/lock.sh"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--gpu"], ["cuda"], ["--cpu", "--cuda"]])
def test_another_argument_is_refused(install, arguments):
    result, commands = install(*arguments)
    assert result.returncode == 2 and commands == []
    assert "takes --cuda, --cpu or nothing" in result.stderr
