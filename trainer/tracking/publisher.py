"""The process that copies a run's metrics to another tracker during the run (``services.py``).

It is a separate process, because wandb starts a server, handles signals, and at the end of its process waits for a network
that may not answer. Training waits for it only at the end of a run, and then for seconds.
"""

import importlib.util
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from configs.schema import RunConfig
from rollout.terminal_text import tandem_command
from trainer.tracking.mlflow_thread import Status

ServiceName = Literal["wandb", "tensorboard"]
"""Also the name of the package that it needs. Of the requirements only those of the tests have it."""


def services_of(config: RunConfig) -> list[ServiceName]:
    """The services that the config asks for."""
    asked: dict[ServiceName, bool] = {
        "wandb": config.tracking.wandb is not None,
        "tensorboard": config.tracking.tensorboard,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def missing_package(service: ServiceName) -> str | None:
    """The missing package of a service and the fix, to follow the name of the option that needs the service; None if
    nothing is missing."""
    if importlib.util.find_spec(service) is not None:
        return None
    return f"needs the package {service}, which is not installed; install it by `{sys.executable} -m pip install {service}`"


class Publisher:
    """Runs ``tandem publish RUN --to SERVICE`` during a run. It ends with this process, because its standard input ends."""

    def __init__(self, service: ServiceName, run_dir: Path):
        """Raises OSError."""
        self.service, self._run_dir = service, run_dir
        self._problem: str | None = None
        self.log_file = run_dir / "logs" / f"publish-{service}.log"
        self.log_file.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "launch", "publish", str(run_dir), "--to", service, "--until-told"]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )

    def problem(self) -> str | None:
        """The problem, if the process ended too early or could not copy everything."""
        if self._problem is None and self._process.poll() not in (None, 0):
            lines = []
            with suppress(OSError):
                lines = self.log_file.read_text(errors="replace").strip().splitlines()
            self._problem = self._incomplete(lines[-1] if lines else f"exit code {self._process.returncode}")
        return self._problem

    def tell(self, status: Status) -> None:
        """Let it copy the rest and end."""
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:  # it may have ended
            pipe.write(f"{status}\n".encode())

    def finish(self, deadline: float) -> str | None:
        """Wait for its end until ``time.monotonic()`` reaches ``deadline``, then kill it. Returns the problem, if any."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return self._incomplete("it did not end in time")
        return self.problem()

    def _incomplete(self, why: str) -> str:
        later = tandem_command("publish", self._run_dir, "--to", self.service)
        text = f"the copy of the metrics to {self.service} is not complete ({why}); training continues"
        return f"{text}, and `{later}` copies all of it at any time"
