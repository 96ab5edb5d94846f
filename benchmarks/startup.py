"""CPU seconds until a user has an answer, and until a server answers.

- ``tandem --help`` (target: 0.5 s) and ``tandem train CONFIG --dry-run`` (target: 3 s), each as a new process.
- An SGLang server with a tiny model, from its command to its first healthy answer: forked, as
  ``rollout/sglang_plugin`` has it, and spawned, as SGLang does by itself. In turn, so both meet the same load.
  Seconds of CPU of all its processes, seconds of wall time, and their memory (PSS: shared pages count once).
- torchrun's agent and two learner ranks for one step of a warm start, from the command to its end: ranks forked from
  the agent, as on CPU, and ranks started as commands, as torchrun does by itself. In turn too.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce, line, parser, servers_on_cpu, spread, write  # noqa: E402

TARGETS = {"tandem --help": 0.5, "tandem train CONFIG --dry-run": 3.0}
RECIPE = ROOT / "configs" / "recipes" / "countdown_tiny.yaml"
SFT = RECIPE.with_name("countdown_tiny_sft.yaml")


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    rounds = 2 if given.quick else given.rounds
    about = announce(recipe=RECIPE.name, rounds=rounds)
    from rollout.tiny_model import make_tiny_countdown_model

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_tiny_countdown_model(model, seed=0)
        dry_run = ["train", str(RECIPE), "--dry-run", f"model.path={model}"]
        commands = {"tandem --help": ["--help"], "tandem train CONFIG --dry-run": dry_run}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        servers: dict[str, list[dict]] = {"forked": [], "spawned": []}
        ranks: dict[str, list[dict]] = {"forked": [], "commands": []}
        for index in range(rounds):
            for name, arguments in commands.items():
                seconds[name].append(cpu_seconds([sys.executable, "-m", "launch", *arguments], Path(folder)))
            for kind in sorted(servers, reverse=bool(index % 2)):
                servers[kind].append(
                    server_start(model, Path(folder) / f"{kind}{index}", forked=kind == "forked")
                )
            for kind in sorted(ranks, reverse=bool(index % 2)):
                ranks[kind].append(
                    warm_start(model, Path(folder) / f"{kind}{index}", forked=kind == "forked")
                )
    for name, values in seconds.items():
        print(f"{line(name, values)}   CPU   target: at most {TARGETS[name]} s")
    ratios = {"servers": report("server", servers), "ranks": report("ranks", ranks)}
    result = {**about, "seconds": {name: spread(values) for name, values in seconds.items()}}
    write({**result, "servers": servers, "ranks": ranks, "ratios": ratios}, given.json)


def report(whose: str, kinds: dict[str, list[dict]]) -> dict[str, float]:
    """Ratios of the first kind to the second, medians of pairs."""
    for kind, starts in kinds.items():
        for what in starts[0]:
            values = [start[what] for start in starts]
            print(
                f"{whose}, {kind:<8} {what:<12} median {statistics.median(values):8.1f}   min {min(values):.1f}   max {max(values):.1f}"
            )
    first, second = kinds
    pairs = [*zip(kinds[first], kinds[second], strict=True)]
    ratios = {what: statistics.median(a[what] / b[what] for a, b in pairs) for what in pairs[0][0]}
    told = ", ".join(f"{what} {ratio:.2f}" for what, ratio in ratios.items())
    print(f"{whose}, {first} / {second}, median of pairs: {told}")
    return ratios


def cpu_seconds(command: list[str], folder: Path, environment: Mapping[str, str] | None = None) -> float:
    """User and system time of a process and of all that it waited for."""
    before = os.times()
    subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment or {}),
        check=True,
        capture_output=True,
    )
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def server_start(model: Path, logs: Path, *, forked: bool) -> dict[str, float]:
    from configs.schema import RunConfig
    from rollout.servers.fleet import ServerFleet

    config = RunConfig(
        model={"path": model},
        task={"type": "countdown"},
        rollout={"dtype": "float32", "max_total_tokens": 4096, "sglang_plugin": forked},
    )
    fleet = ServerFleet(servers_on_cpu(config, logs), logs)
    began = time.perf_counter()
    fleet.start()
    try:
        fleet.wait_healthy(600)
        wall = time.perf_counter() - began
        processes = [p for p in psutil.Process().children(recursive=True) if p.is_running()]
        cpu = sum(sum(p.cpu_times()[:2]) for p in processes)
        pss = sum(p.memory_full_info().pss for p in processes)
        return {"CPU s": cpu, "wall s": wall, "memory MiB": pss / 2**20}
    finally:
        fleet.stop()


COMMANDS_FOR_RANKS = """
import runpy, sys, torch
torch.version.cuda = "as if"  # in the agent alone, which then leaves its ranks to torchrun
sys.argv = ["rendezvous", *sys.argv[1:]]
runpy.run_module("launch.roles.rendezvous", run_name="__main__")
"""


def warm_start(model: Path, folder: Path, *, forked: bool) -> dict[str, float]:
    from configs.loader import load_config
    from launch.roles import command_line, start

    settings = [f"model.path={model}", f"launch.runs_dir={folder}", f"output={folder / 'warm'}"]
    config = load_config(SFT, [*settings, "steps=1", "data.examples=128"])
    run = start.new_run(config, config.name)
    command = command_line.role_command("sft-rank", run, ranks=2)
    if not forked:
        place = command.index("-m")
        command[place : place + 2] = ["-c", COMMANDS_FOR_RANKS]
    began = time.perf_counter()
    cpu = cpu_seconds(command, folder, start.environment(config))
    return {"CPU s": cpu, "wall s": time.perf_counter() - began}


if __name__ == "__main__":
    main()
