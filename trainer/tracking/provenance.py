"""What code a run was made with: the commit of Tandem's checkout, where it is one, and the versions of what
computes."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tandem-rl", "torch", "megatron-core", "sglang", "transformers", "mlflow")
GIT_TIMEOUT_S = 20.0


def provenance(root: Path = ROOT) -> dict[str, str]:
    """Tags for MLflow, which shows the first of them as the run's version. Takes as long as git does."""
    return {**_commit(root), **_versions()}


def _commit(root: Path) -> dict[str, str]:
    """Nothing where ``root`` is not the top of a checkout: an installed package may lie inside the checkout
    of something else."""
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != root.resolve():
        return {}
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "mlflow.source.git.commit": commit,
        "tandem.uncommitted_changes": "unknown" if changed is None else str(bool(changed)).lower(),
    }


def _git(root: Path, *arguments: str) -> str | None:
    """Its answer; None where there is no git, no checkout, or no answer in time."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"tandem.version.python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[f"tandem.version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
