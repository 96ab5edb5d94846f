"""torch's profiler around a traced step."""

import json

import torch

from trainer.profiling import profiled


def test_the_operations_inside_are_in_a_chrome_trace_named_by_rank_and_step(tmp_path, capsys):
    (tmp_path / "trace").mkdir()
    with profiled(tmp_path, 3, 7):
        torch.ones(4, 5) @ torch.ones(5, 6)
    events = json.loads((tmp_path / "trace" / "torch-rank-3-step-7.json").read_text())["traceEvents"]
    (multiplied,) = [event for event in events if event.get("name") == "aten::mm"]
    assert multiplied["args"]["Input Dims"][:2] == [[4, 5], [5, 6]]
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, capsys):
    with profiled(tmp_path / "gone", 0, 1):
        pass
    assert "torch-rank-0-step-1.json cannot be written" in capsys.readouterr().out
