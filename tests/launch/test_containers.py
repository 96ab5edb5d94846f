"""The images of ``launch/containers``, which no test builds: what they copy is there and is enough, both are one image, and
every pin is that of the requirement file."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_install import INTERPRETER, script

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "containers"
DOCKERFILE, DEFINITION = FOLDER / "Dockerfile", FOLDER / "tandem.def"


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of the Dockerfile, with lines that go on put together."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, arguments) for name, _, arguments in (line.partition(" ") for line in joined)]


def sections() -> dict[str, str]:
    """Of the Apptainer definition, by name; the header under ""."""
    text = re.sub(r"^#.*\n", "", DEFINITION.read_text(), flags=re.MULTILINE)
    header, *others = re.split(r"^%", text, flags=re.MULTILINE)
    return {"": header} | {name: body for name, _, body in (part.partition("\n") for part in others)}


def docker_copies() -> dict[str, str]:
    """{place in the image: file or folder of the repository}."""
    copies = {}
    for arguments in (arguments for name, arguments in instructions() if name == "COPY"):
        *sources, target = arguments.split()
        assert target.endswith("/") or len(sources) == 1
        for source in sources:
            copies[f"{target}{source}" if target.endswith("/") else target] = source
    return copies


def definition_copies() -> dict[str, str]:
    pairs = [line.split() for line in sections()["files"].splitlines() if line.strip()]
    return {target: source for source, target in pairs}


def test_both_are_one_image():
    header = dict(line.split(": ") for line in sections()[""].splitlines() if line)
    assert header == {"Bootstrap": "docker", "From": dict(instructions())["FROM"]}
    assert definition_copies() == docker_copies()
    runs = " ".join(arguments for name, arguments in instructions() if name == "RUN").replace("&& ", "")
    post = " ".join(re.sub(r"\\\n\s*", "", sections()["post"]).split())
    assert f"set -eu {' '.join(runs.split())}" == post
    assert dict(instructions())["ENV"] == sections()["environment"].split("export ")[1].strip()


def test_what_is_copied_is_let_through():
    lines = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(docker_copies().values())


def test_shells_and_pins():
    """No package of Python is named beside the requirement file, whose pins install.sh reads."""
    runs = [arguments for name, arguments in instructions() if name == "RUN"]
    for text in (*runs, sections()["post"], sections()["runscript"], sections()["test"]):
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0
    for text in (DOCKERFILE.read_text(), DEFINITION.read_text()):
        assert "==" not in text and "pip install" not in text
        assert text.count("bash /opt/tandem/launch/install.sh --cuda") == 1
        (python,) = set(re.findall(r"\bpython(3\.\d+)", text))
        assert python in ("3.11", "3.12")  # which install.sh takes
        assert re.search(r"nvidia/cuda:13\.\d+\.\d+-devel-", text), (
            "nvcc of the CUDA that the pinned torch is built for"
        )


@pytest.mark.parametrize("copies", [docker_copies, definition_copies])
def test_the_installation_has_all_that_it_needs(tmp_path, copies):
    """install.sh in a folder of what is copied, with a shell script for the interpreter; and the packages are all there."""
    for target, source in copies().items():
        place = tmp_path / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, place)
    root, python = tmp_path / "opt" / "tandem", tmp_path / "python"
    script(python, INTERPRETER)
    log = tmp_path / "pip.log"
    env = os.environ | {"TANDEM_PYTHON": str(python), "PIP_LOG": str(log)}
    result = subprocess.run(
        ["bash", str(root / "launch/install.sh"), "--cuda"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    files = re.findall(r"-r (\S+)", log.read_text())
    assert files == [str(root / "launch/requirements" / name) for name in ("cuda.lock", "test.txt")]
    assert (root / "launch/requirements/cuda.lock").read_bytes() == (
        ROOT / "launch/requirements/cuda.lock"
    ).read_bytes()
    names = "import setuptools; setuptools.setup = lambda **k: print(sorted(k['packages'])); import runpy; runpy.run_path('setup.py')"
    packages = [
        subprocess.run(
            [sys.executable, "-c", names], cwd=folder, capture_output=True, text=True, check=True
        ).stdout
        for folder in (root, ROOT)
    ]
    assert packages[0] == packages[1] and "trainer" in packages[0]
