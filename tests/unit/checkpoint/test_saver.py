"""Saving in one process: ties, and values that cannot be saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import _interrupts, checkpoint
from gradwire.checkpoint import directory
from gradwire.errors import CannotSave


class Tied(nn.Module):
    """Two names for one parameter, a buffer, and state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.note = "none"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_a_tied_weight_is_saved_once_and_stays_tied(tmp_path: Path) -> None:
    model = Tied()
    model.note = "kept"
    model.norm(torch.randn(4, 3))
    summary = checkpoint.save(tmp_path, {"model": model})
    assert summary.num_tensors == 6
    found = checkpoint.read(tmp_path)["model"]
    assert found["first.weight"] is found["second.weight"]
    assert found["_extra_state"] == {"note": "kept"}
    other = Tied()
    checkpoint.load(tmp_path, {"model": other})
    assert other.second.weight is other.first.weight
    assert torch.equal(other.first.weight, model.first.weight)
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)
    assert other.note == "kept"


def test_what_cannot_be_saved_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"step": 1})
    files = set(tmp_path.iterdir())
    for bad in (object(), {"x": [nn.Linear]}, torch.eye(2).to_sparse(), nn.Linear(1, 1, device="meta")):
        with pytest.raises(CannotSave, match=r"'bad'|'bad/x/0'|tensor 'bad"):
            checkpoint.save(tmp_path, {"step": 2, "bad": bad})
    with pytest.raises(CannotSave, match="needs a dict"):
        checkpoint.save(tmp_path, [1])  # type: ignore[arg-type]
    assert checkpoint.load(tmp_path) == {"step": 1}
    assert {path for path in tmp_path.iterdir() if path.name != ".gradwire-readers"} == files - {
        tmp_path / ".gradwire-readers"
    }


@pytest.fixture
def _interrupts_deferred() -> Iterator[None]:
    _interrupts.install()
    yield
    _interrupts.uninstall()


@pytest.mark.usefixtures("_interrupts_deferred")
@pytest.mark.parametrize("point", ["announced", "opened", "half"])
def test_ctrl_c_during_a_save_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    before = checkpoint.save(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(3)})
    passed: list[str] = []

    def interrupt(name: str) -> None:
        passed.append(name)
        if name == point:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(directory, "failpoint_hook", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, {"a": torch.ones(3), "b": torch.ones(3)})
    assert "synced" not in passed
    assert checkpoint.verify(tmp_path) == before
    assert {path.name for path in tmp_path.glob("g*")} == {file.name for file in before.files}
