"""The code behind a run: the commit of Tandem's checkout, if there is one, and versions of its main packages."""

import contextlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tandem-rl", "torch", "megatron-core", "sglang", "transformers", "mlflow")
GIT_TIMEOUT_S = 20.0


def provenance(root: Path = ROOT) -> dict[str, str]:
    """Tags for MLflow, which shows the first of them as the run's version. Waits for git."""
    versions = {"python": platform.python_version(), **installed_versions(PACKAGES)}
    return _commit_tags(root) | {f"tandem.version.{name}": version for name, version in versions.items()}


def _commit_tags(root: Path) -> dict[str, str]:
    """Empty unless ``root`` is the top of a checkout: an installed package may lie in a checkout of something
    else."""
    top, commit = _git(root, "rev-parse", "--show-toplevel"), _git(root, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != root.resolve():
        return {}
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "mlflow.source.git.commit": commit,
        "tandem.uncommitted_changes": "unknown" if changed is None else str(bool(changed)).lower(),
    }


def _git(root: Path, *arguments: str) -> str | None:
    """Git's output; None without git, without a checkout, or after the timeout."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The version of each package that is installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
