"""The quickstart's study, without engines: its settings, what it runs in which order, and what it says."""

from types import SimpleNamespace

import pytest

from configs.loader import load_config
from launch.commands import quickstart
from rollout.servers.served import check_dtype_is_served


@pytest.mark.parametrize("preset", quickstart.STUDY_CORRECTIONS.values())
def test_settings_of_the_study(tmp_path, preset):
    config = load_config(
        quickstart.CONFIGS / "countdown_tiny.yaml",
        [f"model.path={tmp_path}", *quickstart.STUDY, f"correction={preset}"],
    )
    assert config.rollout.precision == "int2" and config.steps == quickstart.STUDY_STEPS
    assert config.evaluation.every == config.steps, "before and after"


def test_both_runs_are_evaluated_with_their_own_weights_and_compared(tmp_path, monkeypatch, capsys):
    calls = []

    def train(recipe, overrides):
        (name,) = [o.removeprefix("name=") for o in overrides if o.startswith("name=")]
        calls.append(("train", name, f"model.path={tmp_path / 'warm'}" in overrides, "seed=3" in overrides))
        return SimpleNamespace(path=tmp_path / name, hf=tmp_path / name / "hf")

    def evaluate(recipe, overrides):
        assert not any("precision" in override for override in overrides)
        calls.append(("evaluate", overrides[0]))
        return len(calls) / 10

    monkeypatch.setattr(quickstart, "train", train)
    monkeypatch.setattr(quickstart, "evaluate", evaluate)
    monkeypatch.setattr(quickstart, "compare", lambda runs, out: calls.append(("compare", runs, out)))
    quickstart.compare_corrections(tmp_path / "warm", 3)
    one, other = "countdown-tiny-int2-clipped-against-rollout", "countdown-tiny-int2-corrected"
    assert calls == [
        ("train", one, True, True),
        ("evaluate", f"model.path={tmp_path / one / 'hf'}"),
        ("train", other, True, True),
        ("evaluate", f"model.path={tmp_path / other / 'hf'}"),
        ("compare", [tmp_path / one, tmp_path / other], tmp_path / "comparison.html"),
    ]
    said = capsys.readouterr().out
    assert "own weights, clipped-against-rollout: 20.0%" in said and "own weights, corrected: 40.0%" in said


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_the_quickstart_fits_the_machine(tmp_path, monkeypatch, gpus):
    """Each config that it starts passes the checks of dtype and GPUs."""
    monkeypatch.setattr(quickstart, "gpus_here", lambda: gpus)
    settings = quickstart.settings_of_machine()
    config = load_config(quickstart.CONFIGS / "countdown_tiny.yaml", [f"model.path={tmp_path}", *settings])
    check_dtype_is_served(config.rollout, config.model.path, cuda=gpus > 0)
    assert config.rollout.dtype == config.model.dtype
    assert config.layout.world_size <= max(gpus, 2)
    assert gpus != 1 or config.layout.world_size == 1
