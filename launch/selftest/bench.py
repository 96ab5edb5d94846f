"""The bench that runs the checks: their folders, config and server, and processes with a deadline."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.loader import load_config, resolved_yaml
from configs.schema import RunConfig
from launch.checks.devices import ON_GPUS
from launch.processes.placement import ONE_MACHINE
from launch.processes.run_folder import RunFolder, read_servers, write_json
from launch.processes.supervisor import POLL_S, Role, RoleFailed, Supervisor
from launch.roles.start import environment, role
from launch.selftest.check import REPORT, Check, CheckFailed, Found, Machine
from launch.selftest.ranks import FAILED, FOUND
from rollout.servers.watched_process import log_tail

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "debug" / "selftest.yaml"
GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL. No process here has anything to save."""
LOG_LINES = 40
BESIDE_A_LEARNER = "rollout.server_args.mem_fraction_static=0.4"
"""A server must leave room to a learner on the same GPU."""


class Bench:
    """A context manager that ends its server. Each check has its own folder inside ``out``."""

    def __init__(
        self, out: Path, machine: Machine, *, seed: int, tick: Callable[[float], None] = lambda seconds: None
    ):
        """tick: called while a check waits for its processes, with the seconds of this check so far."""
        self.out, self.machine, self.seed = out, machine, seed
        self._tick = tick
        self._serving = contextlib.ExitStack()
        self._server: Supervisor | None = None
        self.torch: dict[str, Any] = {}
        """The facts about torch from the first process that imports it."""

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop_server()

    @property
    def model(self) -> Path:
        return self.out / "models" / "tiny"

    @cached_property
    def overrides(self) -> list[str]:
        """Overrides of ``CONFIG`` for this machine."""
        paths = [f"model.path={self.model}", f"launch.runs_dir={self.out / 'runs'}", f"seed={self.seed}"]
        return [*paths, *((*ON_GPUS, BESIDE_A_LEARNER) if self.machine.gpus else ())]

    @cached_property
    def config(self) -> RunConfig:
        placement = "colocated" if self.machine.gpus == 1 else "separate"
        config = load_config(CONFIG, [*self.overrides, f"launch.placement={placement}"])
        assert isinstance(config, RunConfig)
        return config

    def begin(self, check: Check) -> None:
        """Make ``check`` the current check and start its time."""
        self.check, self._began = check, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the current check so far."""
        return time.monotonic() - self._began

    @property
    def folder(self) -> RunFolder:
        """The folder of the current check; made if it is missing."""
        folder = RunFolder(self.out / self.check.name)
        folder.path.mkdir(exist_ok=True)
        return folder

    def measure(self, part: str, *, ranks: int = 1, env: Mapping[str, str] = {}, **request: Any) -> Found:
        """The findings of ``launch/selftest/ranks.py`` on some ranks. Raises CheckFailed and RoleFailed."""
        folder = self.folder
        folder.config.write_text(resolved_yaml(self.config))
        if self.check.uses_server:
            server = RunFolder(self.out / "server")
            key = server.run_key().file
            request |= {"urls": read_servers(server, [ONE_MACHINE]), "key_file": str(key)}
        write_json(folder.request, {"part": part, **request})
        work = role("selftest-rank", folder, self.config, ranks=ranks)
        try:
            self.run(replace(work, env=work.env | dict(env)))
        except RoleFailed as failure:
            if self._server is not None and not self._server.is_running("serve"):
                raise self._server.failure("serve") from failure
            if (told := folder.path / FAILED).exists():
                words = json.loads(told.read_text())
                raise CheckFailed(**words, details=log_tail(work.log, LOG_LINES)) from failure
            raise
        found = json.loads((folder.path / FOUND).read_text())
        self.torch = self.torch or found["torch"]
        return Found(found["text"], found["figures"])

    def run(self, *roles: Role) -> None:
        """Run processes side by side until all have ended well. Leaves no process behind. Raises RoleFailed, and CheckFailed
        at the deadline."""
        with Supervisor(grace_s=GRACE_S) as supervisor:
            for one in roles:
                supervisor.start(one)
            while running := [one for one in roles if supervisor.is_running(one.name)]:
                supervisor.check(may_end=[one.name for one in roles])
                self._keep_time(running[0].log)
                time.sleep(POLL_S)
            supervisor.check(may_end=[one.name for one in roles])

    def _keep_time(self, log: Path) -> None:
        self._tick(self.seconds)
        if self.seconds > self.check.deadline_s:
            error = f"it had not ended after {self.check.deadline_s:.0f} s and was stopped"
            fix = "check the load of this machine, and run only this check with `--only`"
            raise CheckFailed(error, f"{fix}; else {REPORT}", log_tail(log, LOG_LINES))

    def start_server(self) -> None:
        """Returns when the server has answered. The server runs until ``stop_server``. Raises RoleFailed, and CheckFailed at
        the deadline."""
        folder = self.folder
        folder.config.write_text(resolved_yaml(self.config))
        work = role("serve", folder, self.config)
        self._server = self._serving.enter_context(Supervisor(grace_s=GRACE_S))
        self._server.start(work)
        try:
            self._server.wait_for(
                lambda: read_servers(folder, [ONE_MACHINE]) is not None,
                what="the SGLang server to be ready",
                timeout_s=self.check.deadline_s,
                while_waiting=lambda waited: self._keep_time(work.log),
            )
        except (RoleFailed, CheckFailed):
            self.stop_server()
            raise

    def stop_server(self) -> None:
        self._server = None
        self._serving.close()

    def train(self, *more: str) -> list[dict[str, Any]]:
        """The metrics of each step of a ``tandem train`` run with further overrides. Raises RoleFailed."""
        name = f"selftest-{self.check.name}"
        arguments = ["train", str(CONFIG), *self.overrides, f"name={name}", *more]
        command = [sys.executable, "-m", "launch", *arguments]
        log = self.folder.console
        self.run(Role(name="train", command=command, log=log, env=environment(self.config)))
        (metrics,) = (self.out / "runs").glob(f"{name}-*/metrics.jsonl")
        return [json.loads(line) for line in metrics.read_text().splitlines()]
