"""The public functions in one process: progress, summaries, names and read-only directories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire import checkpoint


def test_names_that_mean_something_elsewhere(tmp_path: Path) -> None:
    state = {
        "__metadata__": torch.ones(1),
        "": {"weight": torch.zeros(1)},
        "weight": torch.full((1,), 2.0),
        "$tensor": 3,
    }
    checkpoint.save(tmp_path, {**state, "/": nn.Linear(1, 1)})
    found = checkpoint.load(tmp_path)
    assert found.keys() == state.keys()
    assert (found["__metadata__"].item(), found[""]["weight"].item(), found["weight"].item()) == (1, 0, 2)
    assert found["$tensor"] == 3


def test_progress_is_told_and_ends_with_all(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    checkpoint.save(tmp_path, {"a": torch.zeros(3 << 20)}, progress=lambda *now: told.append(now))
    total = 12 << 20
    assert told[-1] == (total, total)
    assert told == sorted(told)
    told.clear()
    checkpoint.load(tmp_path, {"a": torch.ones(3 << 20)}, progress=lambda *now: told.append(now))
    assert told[-1] == (total, total)


def test_nothing_is_printed_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for progress in (None, False, True):
        checkpoint.save(tmp_path, {"a": torch.zeros(8)}, progress=progress)
        checkpoint.load(tmp_path, {"a": torch.zeros(8)}, progress=progress)
    assert capfd.readouterr() == ("", "")


def test_a_summary_shows_what_is_there(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(256, 4), "step": 7, "names": ["a", "b"], "t": torch.ones(1)})
    summary = checkpoint.inspect(tmp_path)
    text = repr(summary)
    assert f"<Checkpoint {tmp_path}: 3 tensors, 4.3 KiB in 1 file; generation g0001-" in text
    assert "model  module     torch.nn.modules.linear.Linear  2 tensors, 4.0 KiB, by local" in text
    assert "step   value      7" in text
    assert "names  value      2 items" in text
    assert summary.entries[0].num_bytes == 4 * (4 * 256 + 4)
    assert [entry.kind for entry in summary.entries] == ["module", "value", "value", "tensor"]
    assert checkpoint.verify(tmp_path) == summary


def test_a_summary_prints_no_control_characters(tmp_path: Path) -> None:
    summary = checkpoint.save(tmp_path, {"\x1b[2Jname": 1})
    assert "\x1b" not in repr(summary)
    assert "?[2Jname" in repr(checkpoint.inspect(tmp_path))


def test_a_read_only_directory_can_be_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"step": 1})
    (tmp_path / ".gradwire-readers").unlink()
    tmp_path.chmod(0o555)
    try:
        assert checkpoint.load(tmp_path) == {"step": 1}
    finally:
        tmp_path.chmod(0o755)
