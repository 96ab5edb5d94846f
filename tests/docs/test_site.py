"""The site builds strictly, fetches nothing, lists every field, and names only things that exist."""

import ast
import html
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest
import yaml
from packaging.requirements import Requirement
from pydantic import BaseModel

from configs.schema import RunConfig, SftConfig
from tests.docs.pages import DOCS, OUTSIDE, ROOT, prose_files
from trainer.metric_names import METRICS, find_entry

PACKAGES = ("configs", "numerics", "rollout", "parallel", "tracing", "trainer", "launch")


def build(folder: Path, site: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    done = subprocess.run(
        ["bash", "launch/docs.sh", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_strictly_with_every_page_of_its_menu(site):
    pages = [
        page.removesuffix(".md") + ".html"
        for page in pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    ]
    assert len(pages) > 20 and [page for page in pages if not (site / page).is_file()] == []


def pages_of(menu: object) -> Iterator[str]:
    match menu:
        case str():
            yield menu
        case dict():
            for inner in menu.values():
                yield from pages_of(inner)
        case list():
            for inner in menu:
                yield from pages_of(inner)


BROKEN = {
    "links and anchors": {
        "docs/step.md": ["[x](nowhere.md)", "[x](reference.md#nothing)"],
        "trainer/README.md": ["[x](../launch/README.md#nothing-either)"],
    },
    "a link of an included page": {"launch/README.md": ["[x](nowhere.txt)"]},
    "the file of an example": {"docs/step.md": ["{{ file: docs/nothing.py }}"]},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reference_fails_the_build(name, tmp_path):
    repository = tmp_path / "repository"
    ignored = shutil.ignore_patterns(".*", "site", "runs", "models", "__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT, repository, ignore=ignored)
    targets = []
    for file, texts in BROKEN[name].items():
        with (repository / file).open("a") as page:
            page.write("".join(f"\n{text}\n" for text in texts))
        targets += [re.search(r"(?:#|docs/|\()(no[\w.-]+)", text)[1] for text in texts]
    done = build(repository, tmp_path / "site")
    said = done.stdout + done.stderr
    assert done.returncode != 0 and [target for target in targets if target not in said] == []


def test_pages_fetch_nothing(site):
    loads = re.compile(
        r'<(?:script|img|iframe|source)[^>]*\bsrc="(https?:|//)|<link[^>]*\bhref="(https?:|//)'
    )
    assert [
        page.name for page in site.rglob("*.html") if loads.search(page.read_text(encoding="utf-8"))
    ] == []
    assert [
        style
        for style in site.rglob("*.css")
        if re.search(r"@import|url\(['\"]?(https?:|//)", style.read_text())
    ] == []


# -------------------------------------------------------------------------------------------- reference


def fields_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted path, pydantic's field) of every field and variant, without any help of the generator."""
    for name, info in model.model_fields.items():
        if prefix and get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
            continue  # it says which variant a block is
        yield f"{prefix}{name}", info
        for block, is_named in blocks_in(info.annotation):
            yield from fields_of(block, f"{prefix}{name}.{'NAME.' if is_named else ''}")


def blocks_in(annotation: object, is_named: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_named
    elif get_origin(annotation) is Annotated:
        yield from blocks_in(get_args(annotation)[0], is_named)
    else:
        for inner in get_args(annotation):
            yield from blocks_in(inner, is_named or get_origin(annotation) is dict)


@pytest.mark.parametrize(
    ("page", "model"), [("reference.html", RunConfig), ("reference_sft.html", SftConfig)]
)
def test_the_reference_lists_every_field_with_its_default(site, page, model):
    text = (site / page).read_text(encoding="utf-8")
    entries = re.findall(r"<dt[^>]*><code>([^<]+)</code></dt>\s*<dd>\s*(.*?)</dd>", text, re.DOTALL)
    listed: dict[str, list[str]] = {}
    for path, told in entries:
        listed.setdefault(path, []).append(html.unescape(re.sub(r"<[^>]+>", "", told)))
    fields = list(fields_of(model))
    assert len(fields) > (200 if model is RunConfig else 20)
    assert {path for path, _ in fields} == listed.keys()
    for path, info in fields:
        if info.is_required():
            assert any("required" in told for told in listed[path]), path
        elif isinstance(info.default, bool | int | str) and not isinstance(info.default, Path):
            assert any(f"default {json.dumps(info.default)}" in told for told in listed[path]), path
        if path.endswith("_s"):
            assert all("seconds" in told for told in listed[path]), path
        if info.description:
            first = re.split(r"[`*_<\[]", " ".join(info.description.split()))[0].strip()
            assert any(first in " ".join(told.split()) for told in listed[path]), path


def test_the_tables_of_other_systems_are_whole(site):
    text = html.unescape((site / "coming_from.html").read_text(encoding="utf-8"))
    from configs.presets import ALIASES

    names = [
        "ppo_mini_batch_size",
        "eps_clip",
        "num_generations",
        "low_var_kl",
        "rollout_is_threshold",
        "kl_loss_coef",
        *ALIASES,
    ]
    assert [name for name in names if f"<code>{name}</code>" not in text] == []


def test_the_index_for_language_models_names_every_page(site):
    links = re.findall(r"\]\((\S+?)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    menu = {
        page.removesuffix(".md") + ".html"
        for page in pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    }
    assert set(links) == menu and len(links) == len(menu)


# ---------------------------------------------------------------------------------------------- honesty


def said_by_the_code() -> set[str]:
    """The texts in the product's code, without what is filled in."""
    texts = set()
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return texts


def test_the_messages_of_troubleshooting_are_said_by_the_code():
    rows = [
        line
        for line in (DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    messages = [re.match(r"\| `([^`]+)`", row)[1] for row in rows]
    messages = [message for message in messages if "/" not in message and not message.startswith("step_")]
    texts = said_by_the_code()
    assert len(messages) > 20
    assert [message for message in messages if not any(message in text for text in texts)] == []


def test_names_that_the_contributors_guide_gives_are_there():
    """Functions, classes and tables in the recipes of CONTRIBUTING.md."""
    recipes = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## How to add")[2]
        .partition("## Changes")[0]
    )
    names = {name for name in re.findall(r"`(\w+)`", recipes) if name != "Task"}
    defined = "\n".join(
        file.read_text(encoding="utf-8")
        for package in (*PACKAGES, "tests")
        for file in (ROOT / package).rglob("*.py")
    )
    missing = [
        name
        for name in names
        if not re.search(rf"(?:def|class) {name}\b|^{name}\b.*=", defined, re.MULTILINE)
    ]
    assert len(names) > 8 and missing == []


def test_files_that_the_documents_name_are_there():
    named = re.compile(
        r"`((?:configs|numerics|rollout|parallel|trainer|launch|tests|benchmarks|docs)/[\w./-]+?)`"
    )
    files = [*(file for file in prose_files() if file.name != "CHANGELOG.md"), ROOT / "CHANGELOG.md"]
    missing = [
        f"{file.relative_to(ROOT)}: {path}"
        for file in files
        for path in named.findall(file.read_text(encoding="utf-8"))
        if not (ROOT / path).exists() and not (file.parent / path).exists()
    ]
    assert missing == []


NO_FIELD = re.compile(r"rollout\.(server_args\.|environments)|.*\.(py|json|jsonl|yaml)$")
"""Names with dots that are flags of SGLang, a package or a file."""


def test_fields_and_metrics_that_the_documents_name_are_there():
    """In code type, fields with dots and metrics without a star, on all pages but that of other systems' names."""
    fields = {path for model in (RunConfig, SftConfig) for path, _ in fields_of(model)}
    blocks = {path.split(".")[0] for path in fields}
    groups = {name.split("/")[0] for name in METRICS}
    missing, found = [], 0
    for file in (file for file in prose_files() if file.name != "coming_from.md"):
        for code in re.findall(r"`([^`\n]+)`", file.read_text(encoding="utf-8")):
            dotted = re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)(?!\.?\w)", code)
            named = [name for name in dotted if name.split(".")[0] in blocks and not NO_FIELD.match(name)]
            missing += [f"{file.name}: {name}" for name in named if name not in fields]
            metrics = re.findall(r"(?<![\w./-])([a-z]+(?:/\w+)+)(?![\w*/.])", code)
            metrics = [name for name in metrics if name.split("/")[0] in groups]
            missing += [f"{file.name}: {name}" for name in metrics if find_entry(name) is None]
            found += len(named) + len(metrics)
    assert found > 200 and missing == []


@pytest.mark.parametrize("file", [*OUTSIDE, "CHANGELOG.md", "docs"])
def test_prose_names_no_registry_and_no_path_of_a_machine(file):
    texts = [
        file.read_text(encoding="utf-8")
        for file in ([ROOT / file] if (ROOT / file).is_file() else sorted(DOCS.rglob("*.md")))
    ]
    assert [
        found for text in texts for found in re.findall(r"pypi\.\S+|/work/\S+|/home/\S+|/root/\S+", text)
    ] == []


# --------------------------------------------------------------------------------------------- the pins


def test_the_pins_are_installed_and_whole():
    """Every package that the site is built with has the pinned version, and finds what it needs."""
    lines = (ROOT / "launch" / "requirements" / "docs.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {name: importlib.metadata.version(name) for name in pins} == pins
    needs = {Requirement(text) for name in pins for text in importlib.metadata.requires(name) or ()}
    needs = {need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})}
    assert [
        str(need) for need in needs if not need.specifier.contains(importlib.metadata.version(need.name))
    ] == []
    tests = (ROOT / "launch" / "requirements" / "test.txt").read_text(encoding="utf-8")
    assert "-r docs.txt" in tests.splitlines()
