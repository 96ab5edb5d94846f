"""Broken inputs through the real command line: how long the answer takes, the exit code, the message, and the files
and processes left behind.

Each case runs ``python -m launch …`` under a shell in a new folder, with a tiny model, a sound config and a sound
data file besides the broken input. A case fails by a traceback, another exit code than expected, more than 5 CPU
seconds, the limit of the wall clock, or a file or process that was not there before. ``T`` stands for the command.
A case whose input is odd but usable is expected to end with 0.

    python benchmarks/broken_inputs.py [--only WORDS] [--out FILE]
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import announce  # noqa: E402

MOST_CPU_S, LIMIT_S = 5.0, 30.0
MOST_MEMORY_KIB = 12_000_000
BAD, FAILED = 2, 1
MADE_ON_PURPOSE = re.compile(
    r"^work/run/(report\.html|figures)|^tmp/torchinductor_|/export-lock$|^work/run/roles$"
)
"""Files that may be left: a requested report, torch's own cache, and the lock of an export."""
TRY = "T train run.yaml --dry-run"
Prepare = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Case:
    group: str
    name: str
    command: str
    code: int = BAD
    prepare: Prepare = lambda folder: None


@dataclass(frozen=True, kw_only=True)
class Result:
    case: Case
    code: int | None
    wall_s: float
    cpu_s: float
    said: str
    left: tuple[str, ...]

    @property
    def wrong(self) -> list[str]:
        found = [*(f"left {name}" for name in self.left if not MADE_ON_PURPOSE.search(name))]
        if self.code is None:
            found.append(f"no answer within {LIMIT_S:g} s")
        elif self.code != self.case.code:
            found.append(f"exit code {self.code}, not {self.case.code}")
        if "Traceback" in self.said or "Fatal Python" in self.said:
            found.append("traceback")
        if self.cpu_s > MOST_CPU_S:
            found.append("slow")
        if self.case.code and not self.said.strip() and "PIPESTATUS" not in self.case.command:
            found.append("nothing said")
        return found


def file(name: str, content: str | bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


def model_with(**changes: object) -> Prepare:
    """A copy of the model whose config.json differs; a value of None takes the key away."""

    def prepare(folder: Path) -> None:
        config = json.loads((folder / "tiny" / "config.json").read_text()) | changes
        shutil.copytree(folder / "tiny", folder / "odd")
        (folder / "odd" / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if value is not None})
        )

    return prepare


def model_file(name: str, content: bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        shutil.copytree(folder / "tiny", folder / "odd")
        (folder / "odd" / name).write_bytes(content)

    return prepare


def run_with(name: str, content: bytes) -> Prepare:
    """A run folder with a sound config and one odd file."""

    def prepare(folder: Path) -> None:
        (folder / "run").mkdir()
        shutil.copy(folder / "run.yaml", folder / "run" / "config.yaml")
        file(f"run/{name}", content)(folder)

    return prepare


def reward(content: str) -> Prepare:
    return file("odd_reward.py", content)


CONFIGS = [
    ("a config that is a model", "T train tiny/model.safetensors --dry-run", None),
    ("a config in UTF-16", "T train odd.yaml --dry-run", file("odd.yaml", "steps: 3".encode("utf-16"))),
    (
        "a config that is a pipe nobody writes to",
        "T train odd.yaml --dry-run",
        lambda folder: os.mkfifo(folder / "odd.yaml"),
    ),
    ("a config that never ends", "T train /dev/zero --dry-run", None),
    (
        "a base that is a pipe",
        "T train odd.yaml --dry-run",
        lambda f: (os.mkfifo(f / "p.yaml"), file("odd.yaml", "extends: p.yaml")(f)),
    ),
    (
        "marks of a merge conflict",
        "T train odd.yaml --dry-run",
        file("odd.yaml", "<<<<<<< HEAD\nsteps: 1\n=======\nsteps: 2\n>>>>>>> b\n"),
    ),
    (
        "a tag that would run code",
        "T train odd.yaml --dry-run",
        file("odd.yaml", "steps: !!python/object/apply:os.system [touch x]\n"),
    ),
    ("a NUL character", "T train odd.yaml --dry-run", file("odd.yaml", "steps: 3\0\n")),
    (
        "a Windows path in double quotes",
        "T train odd.yaml --dry-run",
        file("odd.yaml", 'model: {path: "C:\\models\\x"}\n'),
    ),
    (
        "a base at a web address",
        "T train odd.yaml --dry-run",
        file("odd.yaml", "extends: https://example.com/grpo.yaml\n"),
    ),
    ("Markdown for YAML", "T train odd.yaml --dry-run", file("odd.yaml", "```yaml\nsteps: 3\n```\n")),
    ("a name with a slash", f"{TRY} name=a/b", None),
    ("a name with a line break", f"{TRY} $'name=a\\nb'", None),
    ("a block as text", f"{TRY} reward=countdown", None),
    ("a list for a number", f"{TRY} steps=[1,2]", None),
]
COMMANDS = [
    ("no config", "T train", None),
    ("an empty name for the config", "T train '' --dry-run", None),
    ("an empty override", f"{TRY} ''", None),
    ("an override without a key", f"{TRY} =5", None),
    ("an override with an index", f"{TRY} 'learner.optimizer.betas[0]=0.9'", None),
    ("an override that is no UTF-8", f"{TRY} $'name=\\xff\\xfe'", None),
    ("digits of another script", f"{TRY} steps=１０", None),
    ("a line break after a path", f"{TRY} $'model.path=tiny\\n'", None, 0),
    ("an override of 100 kB", f"{TRY} name=$(head -c 100000 /dev/zero | tr '\\0' x)", None),
    ("GiB with their unit", f"{TRY} --gpu-memory 80GB", None),
    ("an option after --", "T train run.yaml -- --dry-run", None),
    ("fewer than no lines", "T logs run --lines -1", run_with("logs/learn.log", b"x\n")),
    ("a role that has no log", "T logs run --role nope", run_with("logs/learn.log", b"x\n")),
    ("a step that is no number", "T replay run --step last", run_with("logs/learn.log", b"x\n")),
    ("a study of no prompts", "T mismatch run.yaml --prompts 0", None),
]
TASK = f"{TRY} task.type=jsonl task.apply_chat_template=false task.train_path="
DEEP = "[" * 20000 + "]" * 20000
DATA = [
    ("data from a pipe", f"{TASK}odd.jsonl", lambda folder: os.mkfifo(folder / "odd.jsonl")),
    (
        "data that is one pretty-printed list",
        f"{TASK}odd.jsonl",
        file("odd.jsonl", '[\n  {"prompt": "1", "answer": "2"}\n]\n'),
    ),
    ("CSV by the name of JSONL", f"{TASK}odd.jsonl", file("odd.jsonl", "prompt,answer\n1+1,2\n")),
    (
        "a record nested 20,000 deep",
        f"{TASK}odd.jsonl",
        file("odd.jsonl", '{"prompt": ' + DEEP + ', "answer": "2"}\n'),
    ),
    (
        "a number of 10,000 digits",
        f"{TASK}odd.jsonl",
        file("odd.jsonl", '{"prompt": "1", "answer": ' + "9" * 10000 + "}\n"),
    ),
    (
        "answers that are lists",
        f"{TASK}odd.jsonl",
        file("odd.jsonl", '{"prompt": "1", "answer": ["2", "3"]}\n'),
    ),
    (
        "JSONL by the name of parquet",
        f"{TASK}odd.parquet",
        file("odd.parquet", '{"prompt": "1", "answer": "2"}\n'),
    ),
    ("an empty parquet file", f"{TASK}odd.parquet", file("odd.parquet", b"")),
    (
        "a null character as the prompt",
        f"{TASK}odd.jsonl",
        file("odd.jsonl", '{"prompt": "\\u0000", "answer": "2"}\n'),
        0,
    ),
]
MODEL = f"{TRY} model.path=odd"
MODELS = [
    ("config.json cut off", MODEL, model_file("config.json", b'{"model_type": "qwen3", "hid')),
    ("config.json that is a list", MODEL, model_file("config.json", b"[1, 2]")),
    ("config.json nested 20,000 deep", MODEL, model_file("config.json", DEEP.encode())),
    ("no heads", MODEL, model_with(num_attention_heads=0)),
    ("a width that is text", MODEL, model_with(hidden_size="64")),
    ("10^12 layers", MODEL, model_with(num_hidden_layers=10**12)),
    (
        "a web page as the tokenizer",
        MODEL,
        model_file("tokenizer.json", b"<!DOCTYPE html><html>Sign in</html>"),
    ),
    (
        "a pointer of git-lfs as the weights",
        MODEL,
        model_file("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid x\n"),
    ),
    (
        "weights whose header says 2^62 bytes",
        MODEL,
        model_file("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
    ),
]
OWN = f"{TRY} reward.type=function reward.function=odd_reward:score"
SOUND = "def score(prompt, response, reference):\n    return 0.5\n"
REWARDS = [
    (
        "a reward by its file's name",
        f"{TRY} reward.type=function reward.function=odd_reward.py:score",
        reward(SOUND),
    ),
    ("a reward by its path", f"{TRY} reward.type=function reward.function=./odd_reward:score", reward(SOUND)),
    ("a module that prints 10 MB", OWN, reward("print('x' * 10_000_000)\n" + SOUND), 0),
    ("a module that interrupts", OWN, reward("raise KeyboardInterrupt\n" + SOUND)),
    ("a module that closes every file", OWN, reward("import os\nos.closerange(0, 100)\n" + SOUND)),
    (
        "a module that leaves a process",
        OWN,
        reward("import subprocess\nsubprocess.Popen(['sleep', '300'])\n" + SOUND),
        0,
    ),
    (
        "a function that calls itself for ever",
        OWN,
        reward("def score(p, r, a):\n    return score(p, r, a)\n"),
    ),
    ("a class for a function", OWN, reward("class score:\n    def __init__(self, p, r, a):\n        pass\n")),
    (
        "a function that writes to stdout's own file",
        OWN,
        reward("import os\nos.write(1, b'mine: x\\n')\n" + SOUND),
        0,
    ),
    (
        "a module of the name of one of ours",
        f"{TRY} reward.type=function reward.function=trainer:score",
        file("trainer.py", SOUND),
        FAILED,
    ),
]
RUNS = [
    ("resume of a run whose config is garbage", f"{TRY} resume=run", run_with("config.yaml", b"\x00\x01")),
    ("status of a run whose config is garbage", "T status run", run_with("config.yaml", b"\x00\x01"), 0),
    ("status where an address is garbage", "T status run", run_with("roles/serve.json", b"{"), 0),
    ("status where the job is garbage", "T status run", run_with("job.json", b"[]"), 0),
    ("status where metrics are garbage", "T status run", run_with("metrics.jsonl", b"\xff\xfe\n{]"), 0),
    ("report where metrics are garbage", "T report run", run_with("metrics.jsonl", b"\xff\xfe\n{]"), 0),
    ("report of a run without a step", "T report run", run_with("logs/learn.log", b"")),
    ("export where the summary is garbage", "T export run out", run_with("summary.json", b"{")),
    ("export of a run without weights", "T export run out", run_with("logs/learn.log", b"")),
    ("logs that are no folder", "T logs run", run_with("logs", b"x")),
    (
        "a recorded step that is garbage",
        "T replay run --step 1",
        run_with("batches/step_000001.safetensors", b"garbage"),
    ),
    ("a list of runs that are none", "T list odd", file("odd/x/config.yaml", "\0"), 0),
]
ENVIRONMENT = [
    ("no HOME", f"unset HOME; {TRY}", None, 0),
    ("no folder for temporary files", f"TMPDIR=/nowhere {TRY}", None, 0),
    ("no folder for temporary files, with a reward", f"TMPDIR=/nowhere {OWN}", reward(SOUND), 0),
    (
        "an ASCII locale and a name in Greek",
        f"LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii {TRY} name=δοκιμή",
        None,
    ),
    ("stdout closed", f"{TRY} >&-", None, 0),
    ("stdin closed", f"{TRY} <&-", None, 0),
    ("stdout on a full disk", f"{TRY} > /dev/full", None, FAILED),
    ("a reader that stops early", f"{TRY} | head -1 > /dev/null; exit ${{PIPESTATUS[0]}}", None, FAILED),
    ("24 open files", f"ulimit -n 24; {OWN}", reward(SOUND), 0),
    ("a terminal of no kind and no width", f"TERM=nonsense COLUMNS=0 {TRY}", None, 0),
    (
        "a run folder on a file system that cannot be written to",
        "T train run.yaml launch.runs_dir=/sys/runs",
        None,
    ),
    ("a time zone that does not exist", f"TZ=Nowhere/City {TRY}", None, 0),
    ("OMP_NUM_THREADS that is no number", f"OMP_NUM_THREADS=many {TRY}", None, 0),
]
CASES = [
    Case(group=group, name=row[0], command=row[1], prepare=row[2] or (lambda folder: None), code=row[3] if len(row) > 3 else BAD)
    for group, rows in [
        ("configs", CONFIGS), ("command lines", COMMANDS), ("data", DATA), ("models", MODELS), ("rewards", REWARDS), ("run folders", RUNS),
        ("environment", ENVIRONMENT),
    ]
    for row in rows
]  # fmt: skip


def run(case: Case, template: Path) -> Result:
    with tempfile.TemporaryDirectory(prefix="broken-") as scratch:
        folder, temporary = Path(scratch) / "work", Path(scratch) / "tmp"
        shutil.copytree(template, folder)
        temporary.mkdir()
        case.prepare(folder)
        before, mark = files(Path(scratch)), f"BROKEN_INPUT={os.getpid()}-{time.monotonic_ns()}"
        key, _, value = mark.partition("=")
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(temporary),
            "PYTHONDONTWRITEBYTECODE": "1",
            key: value,
        }
        # The memory is limited, so an input that never ends cannot take all of the machine's.
        script = f'ulimit -v {MOST_MEMORY_KIB}\nT() {{ "{sys.executable}" -m launch "$@"; }}\n{case.command}'
        spent, began = cpu_s(), time.monotonic()
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            said, code = shell.communicate(timeout=LIMIT_S)[0], shell.returncode
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            said, code = shell.communicate()[0], None
        took = time.monotonic() - began
        left = tuple(sorted(files(Path(scratch)) - before)) + processes(mark)
        return Result(
            case=case,
            code=code,
            wall_s=took,
            cpu_s=cpu_s() - spent,
            said=said.decode(errors="replace"),
            left=left,
        )


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def processes(mark: str) -> tuple[str, ...]:
    """The processes that carry the mark in their environment. They are ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:60]
                os.kill(int(entry.name), signal.SIGKILL)
                found.append(f"process `{command.strip()}`")
        except OSError:  # ended meanwhile
            continue
    return tuple(found)


def cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def answer(said: str) -> str:
    """The error and the fix of a config, or the last lines of any other output."""
    error, fix = re.search(r"^  error: (.*)", said, re.M), re.search(r"^  fix: +(.*)", said, re.M)
    if error and fix:
        text = f"{error[1]}; {fix[1]}"
    else:
        boxed = " ".join(line.strip("│ ") for line in said.splitlines() if line.startswith("│"))
        lines = [line for line in said.splitlines() if line.strip()]
        text = boxed or (lines[-1] if lines else "")
    text = re.sub(r"/\S*/broken-\w+/work", ".", text)
    return (
        (text if len(text) <= 200 else f"{text[:200]}…")
        .replace("|", "\\|")
        .encode("utf-8", "replace")
        .decode()
    )


def table(results: list[Result], machine: dict) -> str:
    bad = [result for result in results if result.wrong]
    slowest = max(results, key=lambda result: result.cpu_s)
    lines = [
        "# Broken inputs", "",
        f"{len(results)} inputs through the command line, {len(results) - len(bad)} answered as they should be: the expected exit code, no",
        f"traceback, at most {MOST_CPU_S:g} CPU seconds, no file and no process left. Slowest: {slowest.cpu_s:.1f} CPU seconds",
        f"({slowest.case.name}). `python benchmarks/broken_inputs.py` makes this table, and describes each input.", "",
        f"{date.today()}, {machine['commit']}: {machine['cores']} cores, {machine['cpu']}, load {machine['load']} at the start.", "",
    ]  # fmt: skip
    for group in dict.fromkeys(result.case.group for result in results):
        lines += [
            f"## {group.capitalize()}",
            "",
            "| input | exit | CPU s | wall s | answer | wrong |",
            "|---|---|---|---|---|---|",
        ]
        for result in (result for result in results if result.case.group == group):
            code = "-" if result.code is None else result.code
            said = (
                answer(result.said)
                if result.case.code
                else "(accepted)"
                if result.code == 0
                else answer(result.said)
            )
            wrong = "; ".join(result.wrong) or "no"
            lines.append(
                f"| {result.case.name} | {code} | {result.cpu_s:.1f} | {result.wall_s:.1f} | {said} | {wrong} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--only", default="", help="cases whose name or group holds these words")
    arguments.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "broken_inputs.md")
    given = arguments.parse_args()
    about = announce()["hardware"]
    with tempfile.TemporaryDirectory() as made:
        template = Path(made) / "template"
        template.mkdir()
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-m", "launch", "make-tiny-model", "tiny"],
            cwd=template,
            env=env,
            check=True,
            capture_output=True,
        )
        (template / "run.yaml").write_text(
            "model: {path: tiny}\ntask: {type: countdown}\nrollout: {max_new_tokens: 14}\n"
        )
        results = []
        for case in (case for case in CASES if given.only in f"{case.group} {case.name}"):
            results.append(run(case, template))
            last = results[-1]
            print(
                f"{case.name}: {last.code}, {last.cpu_s:.1f} s; {'; '.join(last.wrong) or 'good'}", flush=True
            )
    if not given.only:
        given.out.write_text(table(results, about))
    for result in results:
        if result.wrong or given.only:
            print(f"--- {result.case.name}: {'; '.join(result.wrong)}\n{result.said[-1500:]}")
    sys.exit(1 if any(result.wrong for result in results) else 0)


if __name__ == "__main__":
    main()
