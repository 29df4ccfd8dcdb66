"""Loading in one process: what is wanted is found, compared and checked before anything changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import checkpoint
from gradwire.checkpoint.index import TensorEntry
from gradwire.checkpoint.loader import _shares
from gradwire.errors import CheckpointDamaged, CheckpointMismatch, CheckpointMissing


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


def test_values_come_back_and_tensors_are_filled_or_returned(tmp_path: Path) -> None:
    saved = {"a": [1, (2.5, None)], "t": torch.arange(3), "nested": {"m": nn.Linear(1, 1), "n": 4, "u": torch.ones(2)}}
    checkpoint.save(tmp_path, saved)
    target = torch.zeros(3, dtype=torch.int64)
    values = checkpoint.load(tmp_path, {"t": target, "a": None})
    assert torch.equal(target, torch.arange(3))
    assert values.keys() == {"a", "nested"}
    assert values["a"] == [1, (2.5, None)]
    assert values["nested"]["n"] == 4
    assert torch.equal(values["nested"]["u"], torch.ones(2))
    assert "m" not in values["nested"]


def test_containers_of_objects(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    checkpoint.save(tmp_path, {"models": models, "pair": (nn.Linear(1, 1), 5)})
    others = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert checkpoint.load(tmp_path, {"models": others}) == {}
    for model, other in zip(models, others, strict=True):
        assert torch.equal(model.weight, other.weight)
    with pytest.raises(CheckpointMismatch, match="'models' was not saved as 1 items"):
        checkpoint.load(tmp_path, {"models": others[:1]})


@pytest.mark.parametrize(
    ("other", "problems"),
    [
        (nn.Linear(3, 2), ["'model/weight' has shape [2, 2] in the checkpoint and [2, 3] here"]),
        (nn.Linear(2, 2, dtype=torch.float64), ["'model/weight' is float32 in the checkpoint and float64 here"]),
        (nn.Linear(2, 2, bias=False), ["'model/bias' is in the checkpoint, but not in the object"]),
        (nn.BatchNorm1d(2), ["'model/running_mean' is not in the checkpoint"]),
        (torch.zeros(2), ["'model' was not saved as a tensor"]),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), ["'model' was not saved as an optimizer of one process"]),
        (3, ["'model' was saved as a module; pass one to be filled"]),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, other: Any, problems: list[str]) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2), "good": torch.ones(3)})
    good = torch.zeros(3)
    with pytest.raises(CheckpointMismatch, match="nothing was changed") as caught:
        checkpoint.load(tmp_path, {"good": good, "model": other})
    assert set(problems) <= set(caught.value.problems)
    assert all(problem in str(caught.value) for problem in problems)
    assert good.tolist() == [0, 0, 0]


def test_missing_keys_are_named_with_what_is_there(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2), "step": 1})
    with pytest.raises(CheckpointMismatch, match=r"'modle' is not in the checkpoint; there are 'model', 'step'"):
        checkpoint.load(tmp_path, {"modle": nn.Linear(2, 2)})
    assert checkpoint.load(tmp_path, {"modle": nn.Linear(2, 2)}, strict=False) == {"step": 1}


def test_not_strict_loads_what_both_have(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    checkpoint.save(tmp_path, {"model": saved})
    other = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.BatchNorm1d(2))
    before = state_of(other)
    with pytest.raises(CheckpointMismatch, match=r"'model/1.weight' has shape"):
        checkpoint.load(tmp_path, {"model": other}, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    other = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Tanh(), nn.Linear(2, 2))
    before = state_of(other)
    checkpoint.load(tmp_path, {"model": other}, strict=False)
    assert torch.equal(other[0].weight, saved[0].weight.double())
    assert torch.equal(other[2].weight, before["2.weight"])


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    summary = checkpoint.save(tmp_path, {"a": nn.Linear(2, 2), "b": nn.Linear(20, 20), "step": 5})
    path = tmp_path / summary.files[0].name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    target = nn.Linear(2, 2), nn.Linear(20, 20)
    before = [state_of(item) for item in target]
    with pytest.raises(CheckpointDamaged, match=rf"tensor 'b/bias' in {path} is damaged: its bytes have changed"):
        checkpoint.load(tmp_path, {"a": target[0], "b": target[1]})
    for item, state in zip(target, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in item.state_dict().items())
    for call in (checkpoint.verify, checkpoint.read):
        with pytest.raises(CheckpointDamaged, match="b/bias"):
            call(tmp_path)
    checkpoint.load(tmp_path, {"a": target[0]})  # what is not damaged can be saved from the ruin
    path.unlink()
    with pytest.raises(CheckpointMissing, match=path.name):
        checkpoint.load(tmp_path, {"a": target[0]})
    assert checkpoint.load(tmp_path) == {"step": 5}


def test_each_tensor_is_checked_once_by_one_that_needs_it() -> None:
    sizes = {"large": 40, "middle": 30, "small": 10, "other": 10}
    entries = {name: TensorEntry("file", 0, "uint8", (size,), "") for name, size in sizes.items()}
    needed = [{"": ["large", "middle", "small"], "b": ["large", "small"]}, {"": ["middle", "other"]}]
    assert _shares(needed, entries) == [{"": ["large"], "b": ["small"]}, {"": ["middle", "other"]}]
