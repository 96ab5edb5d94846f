"""A process reads each file of its config once, and hands the config on."""

import inspect
from collections import Counter
from pathlib import Path

import pytest
import yaml

from configs import loader
from launch.commands import studies
from launch.commands import train as training
from launch.processes.run_folder import RunFolder
from launch.roles import table
from rollout.sampling import role
from tests.configs.test_broken_configs import BASE, MODELS
from tests.support.model_folders import make_model_folder


@pytest.fixture
def readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often each file of a config was read, by its name; a config's files are in the current folder."""
    counted, read_mapping = Counter(), loader.read_mapping

    def counting(path: Path, *arguments):
        counted[path.name] += 1
        return read_mapping(path, *arguments)

    monkeypatch.chdir(tmp_path)
    make_model_folder(tmp_path / "dense", MODELS["dense"])
    Path("base.yaml").write_text(yaml.safe_dump(BASE))
    Path("more.yaml").write_text("steps: 3\n")
    Path("config.yaml").write_text("extends: base.yaml\n")
    monkeypatch.setattr(loader, "read_mapping", counting)
    return counted


def test_a_dry_run_reads_each_file_once(readings, capsys):
    training.train(Path("config.yaml"), ["extends=more.yaml", "layout.dp=auto"], dry_run=True)
    assert readings == {"config.yaml": 1, "base.yaml": 1, "more.yaml": 1}
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert (resolved["steps"], resolved["layout"]["dp"]) == (3, 1)


def test_layouts_of_a_study_are_made_of_one_reading(readings):
    load = studies._loading_with_options(Path("config.yaml"), [])
    assert [load(f"--learner dp={dp}", [f"layout.dp={dp}"]).layout.dp for dp in (1, 2)] == [1, 2]
    assert readings == {"config.yaml": 1, "base.yaml": 1}


def test_a_role_is_handed_the_config_that_was_read_to_start_it(tmp_path, readings, monkeypatch):
    handed = []

    async def run_sample_role(config, policy, *, server_urls, announce, **unused):
        handed.append(config)

    monkeypatch.setattr(role, "run_sample_role", run_sample_role)
    monkeypatch.setattr(table, "guard_session", lambda **unused: None)
    monkeypatch.setattr(table, "role_environment", lambda _: {})  # it is of the whole process
    table.run_role("sample", RunFolder(tmp_path))
    assert readings == {"config.yaml": 1, "base.yaml": 1}
    assert handed == [loader.load_config("config.yaml")]
    for name, run in table.ROLES.items():
        assert [*inspect.signature(run).parameters][:2] == ["folder", "config"], name
        assert not hasattr(inspect.getmodule(run), "load_config"), name
