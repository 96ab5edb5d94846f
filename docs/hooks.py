"""mkdocs hook: pages of the site that are not files of docs/.

    included    README.md, trainer/README.md, launch/README.md, ...; links lead to pages of the site
    generated   the configuration reference, from `tandem schema`; the table of metrics, from
                trainer/metric_names.py; other systems' names; the list of commands

These pages are never written into docs/, so they cannot be stale. A link to a missing file fails the build. A
link to a file of the repository that is no page becomes plain text.
"""

import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

INCLUDED = {
    "README.md": "index.md",
    "trainer/README.md": "corrections.md",
    "launch/README.md": "cluster.md",
    "configs/recipes/README.md": "recipes.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""File of the repository -> page of the site."""
RESULTS = sorted((ROOT / "benchmarks" / "results").iterdir())
MEASURED = {
    f"benchmarks/results/{file.name}": f"measured/{file.name}"
    for file in RESULTS
    if file.suffix in (".md", ".png")
}
FOLDERS = {"benchmarks/results": "measured/index.md"}
NOT_RUN = "*The commands on this page are measurements. They take minutes to hours, so no test runs them.*"
TEXT_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config) -> Files:
    for source, page in {**INCLUDED, **MEASURED}.items():
        path = ROOT / source
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            text = _after_title(text, NOT_RUN) if source in MEASURED else text
            files.append(File.generated(config, page, content=with_links_of_the_site(text, source, page)))
        else:
            files.append(File.generated(config, page, abs_src_path=str(path)))
    for page, text in generated_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Fill in ``{{ file: docs/examples/x.py }}`` and ``{{ other systems }}``."""
    markdown = re.sub(r"\{\{ file: (\S+) \}\}", lambda found: _fenced(found[1]), markdown)
    return (
        markdown.replace("{{ other systems }}", other_systems())
        if "{{ other systems }}" in markdown
        else markdown
    )


def _fenced(path: str) -> str:
    file = ROOT / path
    if not file.is_file():
        raise PluginError(f"{path} is named in a page, but there is no such file")
    language = {".py": "python", ".yaml": "yaml", ".jsonl": "json", ".jinja": "jinja"}.get(
        file.suffix, "text"
    )
    return f'```{language} title="{path}"\n{file.read_text(encoding="utf-8").rstrip()}\n```'


def _after_title(text: str, note: str) -> str:
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{note}\n{rest}"


def with_links_of_the_site(text: str, source: str, page: str) -> str:
    """A file's text as a page. Links to pages lead to them; links to other files become plain text."""
    pages = {**INCLUDED, **MEASURED, **FOLDERS}

    def link(found: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        if not (ROOT / target).exists():
            raise PluginError(f"{source} links to {found[2]}, which is not there")
        there = pages.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is None:
            return found[1]
        return f"[{found[1]}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{found[3] or ''})"

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)  # links are read outside of code
    return "".join(part if part.startswith("```") else TEXT_LINK.sub(link, part) for part in parts)


# ------------------------------------------------------------------------------------------- generated


def generated_pages() -> dict[str, str]:
    return {
        "reference.md": reference(
            "train", "Configuration reference", "Fields of a training run (`kind: train`)."
        ),
        "reference_sft.md": reference(
            "sft", "Configuration of a warm start", "Fields of a supervised warm start (`kind: sft`)."
        ),
        "commands.md": commands(),
        "metrics.md": metrics(),
        "measured/index.md": measured(),
    }


def reference(kind: str, title: str, about: str) -> str:
    """Type, default, unit and meaning of every field, from the output of ``tandem schema``."""
    lines = [
        f"# {title}",
        "",
        f"{about} This page is made from the schema while the site is built. `tandem schema FIELD` prints the same on a terminal, and "
        "`tandem schema --json` prints JSON Schema for editors.",
    ]
    section, linked = "", set()
    for path, facts, meaning in schema_entries(kind):
        top = re.split(r"[.\[]", path)[0]
        if top != section:
            section = top
            lines += ["", f"## {section}"]
        if facts is None:
            lines += ["", f"### {path}", "", _safe(meaning)]
        else:
            # Variants may share a field's name.
            anchor = "" if path in linked or path == section else f" {{: #{path} }}"
            linked.add(path)
            lines += [
                "",
                f"`{path}`{anchor}",
                f":   *{_safe(facts)}*",
                "",
                f"    {_safe(meaning)}" if meaning else "",
            ]
    return "\n".join(lines) + "\n"


def _safe(text: str) -> str:
    """Plain text as Markdown: outside of code nothing in it is markup."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\*_\[\]])", r"\\\1", part.replace("<", "&lt;"))
        for part in parts
    )


def schema_entries(kind: str) -> Iterator[tuple[str, str | None, str]]:
    """(path, type with default and unit, meaning); the second is None for the heading of a variant."""
    entry = re.compile(r"(?P<variant>-- )?(?P<path>\S+)(?:  \((?P<facts>.*)\))?")
    path, facts, meaning = "", None, []
    for line in [*tandem("schema", "--kind", kind).splitlines(), ""]:
        if line.startswith("    "):
            meaning.append(line.strip())
            continue
        if path:
            yield path, facts, " ".join(meaning)
        found = entry.fullmatch(line)
        if line and found is None:
            raise PluginError(f"tandem schema printed a line that is no field: {line!r}")
        path, facts, meaning = (found["path"], found["facts"], []) if found else ("", None, [])


def tandem(*arguments: str) -> str:
    """The output of a command of Tandem, in this process."""
    from launch.cli import app

    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
    if done.exit_code:
        raise PluginError(f"tandem {' '.join(arguments)} failed: {done.output}") from done.exception
    return done.output


def commands() -> str:
    """Every command of ``tandem --help``, with its options."""
    import typer

    from launch.cli import app

    group = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "`tandem COMMAND --help` prints the same. `CONFIG` is a YAML file; `key=value` overrides follow it.",
        "",
    ]
    lines += [
        "Exit codes: 0 done; 1 a role failed or a file cannot be used; 2 bad input, nothing was started; 75 stopped on request;"
    ]
    lines += ["130 interrupted."]
    panel = ""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            lines += ["", f"## {panel}"]
        arguments = " ".join(map(_argument, (p for p in command.params if p.param_type_name == "argument")))
        lines += [
            "",
            f"### {name}",
            "",
            f"`tandem {name} {arguments}`".replace(" `", "`"),
            "",
            command.help or "",
        ]
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        lines += [""] + [f"- `{', '.join(p.opts)}`: {' '.join((p.help or '').split())}" for p in options]
    return "\n".join(lines) + "\n"


def _argument(parameter) -> str:
    name = parameter.metavar or parameter.name.upper()
    return f"{name if parameter.required else f'[{name}]'}{'...' if parameter.nargs == -1 else ''}"


def metrics() -> str:
    """Every metric of a run, by the first part of its name."""
    from trainer.metric_names import METRICS

    lines = [
        "# Every metric",
        "",
        "Names of `metrics.jsonl`, MLflow and the report. A star stands for any text. *Reduction* is how micro-batches, ranks and "
        "minibatches are merged; a dash: one number of the whole step. [Notation](notation.md) explains the symbols.",
    ]
    part = ""
    for entry in METRICS.values():
        if entry.name.partition("/")[0] != part:
            part = entry.name.partition("/")[0]
            lines += ["", f"## {part}", "", "| metric | reduction | unit | meaning |", "|---|---|---|---|"]
        cells = (f"`{entry.name}`", entry.reduction or "–", *map(_safe, (entry.unit, entry.meaning)))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def measured() -> str:
    """The pages of benchmarks/results, each with its verdict: what its first lines have in bold."""
    lines = ["# Measured", "", "Each page has the machine, the command and the figures of one claim.", ""]
    lines += ["| page | what it found |", "|---|---|"]
    for source, page in MEASURED.items():
        if source.endswith(".md"):
            title, _, text = (ROOT / source).read_text(encoding="utf-8").partition("\n")
            verdict = re.search(r"\*\*(.+?)\*\*", "\n".join(text.splitlines()[:12]), re.DOTALL)
            told = " ".join(verdict[1].split()).rstrip(".,:") if verdict else ""
            lines.append(f"| [{title.removeprefix('# ')}]({posixpath.basename(page)}) | {told} |")
    return "\n".join(lines) + "\n"


def other_systems() -> str:
    """Tables of names: fields, values, verl's keys and presets of a correction."""
    from configs.other_systems import fields, roll, values, verl
    from configs.presets import ALIASES, preset_name

    lines = ["### Fields", "", "| there (last parts of the name) | here |", "|---|---|"]
    lines += _rows(fields.OTHER_FIELDS)
    lines += ["", "These have no counterpart:", "", "| there (last parts of the name) | why |", "|---|---|"]
    lines += _rows(fields.WITHOUT_COUNTERPART)
    lines += ["", "### Algorithms", ""]
    lines += ["An objective and an advantage make an algorithm:", ""]
    lines += [f"- {text}" for text in dict.fromkeys(values.ALGORITHMS.values())]
    lines += ["", "### Values", "", "| field | there | here |", "|---|---|---|"]
    for (block, key), names in values.OUR_NAMES.items():
        lines += [f"| `{block}.{key}` | `{theirs}` | `{ours}` |" for theirs, ours in names.items()]
    lines += [
        "",
        "These are refused, since they nearly mean the same:",
        "",
        "| field | there | difference | fix |",
        "|---|---|---|---|",
    ]
    for (block, key), names in values.NEARLY.items():
        lines += [
            f"| `{block}.{key}` | `{theirs}` | {error} | {fix} |" for theirs, (error, fix) in names.items()
        ]
    lines += [
        "",
        "### Keys of a correction",
        "",
        f"`correction: {{verl: {{...}}}}` reads {_codes(verl.VERL_KEYS)}.",
        "",
    ]
    lines += [
        f"`correction: {{roll: {{...}}}}` reads {_codes(roll.ROLL_KEYS)}, and of the newer block {_codes(roll.NEW_ROLL_KEYS)}."
    ]
    lines += ["", "### Presets of verl", "", "| preset there | here |", "|---|---|"]
    lines += [f"| `{name}` | {_preset(preset_name(block))} |" for name, block in ALIASES.items()]
    return "\n".join(lines)


def _rows(table: Mapping[str, str]) -> list[str]:
    """A row for each text of the table, with all names that have it."""
    names: dict[str, list[str]] = {}
    for name, text in table.items():
        names.setdefault(text.replace("|", "\\|"), []).append(name)
    return [f"| {_codes(theirs)} | {text} |" for text, theirs in names.items()]


def _codes(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _preset(name: str | None) -> str:
    return (
        f"`{name}`"
        if name
        else "the same name; its parts are in the [guide](corrections.md#names-of-other-systems)"
    )
