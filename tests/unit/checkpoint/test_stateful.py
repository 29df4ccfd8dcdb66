"""Modules, optimizers and other objects: their state is compared before it is loaded, and loaded as torch loads it."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import checkpoint
from gradwire.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch


class Stubborn:
    """Takes no state."""

    def __init__(self) -> None:
        self.state = {"a": 1}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state
        if state["a"] != 1:
            raise ValueError("I will not")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = model(torch.arange(6.0).view(2, 3) + step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def make_training() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optim": optimizer, "sched": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    state = make_training()
    train(*state.values(), 3)
    checkpoint.save(tmp_path, {**state, "step": 3})
    expected = train(*state.values(), 5)
    other = make_training()
    train(*other.values(), 1)
    assert checkpoint.load(tmp_path, other) == {"step": 3}
    assert train(*other.values(), 5) == expected


def test_a_group_of_another_size_is_found_first(tmp_path: Path) -> None:
    state = make_training()
    train(*state.values(), 1)
    checkpoint.save(tmp_path, state)
    weight = torch.zeros(1)
    other = torch.optim.AdamW([weight])
    with pytest.raises(
        CheckpointMismatch, match=r"'optim' has groups of \[4\] parameters in the checkpoint and \[1\] here"
    ):
        checkpoint.load(tmp_path, {"optim": other, "model": state["model"]})
    assert not other.state


def test_state_of_another_shape_is_found_first(tmp_path: Path) -> None:
    """Torch itself would take it, and its fused kernel would write beyond the end."""
    optimizers = []
    for size in (8, 2):
        weight = nn.Parameter(torch.ones(size))
        weight.grad = torch.ones(size)
        optimizers.append(torch.optim.Adam([weight], fused=True))
        optimizers[-1].step()
    large, small = optimizers
    checkpoint.save(tmp_path, {"optim": small})
    with pytest.raises(
        CheckpointMismatch, match=r"'optim': state 'exp_avg' of parameter 0 has shape \[2\], and must have \[8\]"
    ):
        checkpoint.load(tmp_path, {"optim": large})
    checkpoint.load(tmp_path, {"optim": small})


def test_an_object_that_refuses_is_named_and_others_are_put_back(tmp_path: Path) -> None:
    first, second = Stubborn(), Stubborn()
    first.state = second.state = {"a": 2}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3.0)
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"optim": optimizer, "model": model, "stubborn": second})
    other = torch.optim.SGD([torch.zeros(1)], lr=4.0)
    target, here = Stubborn(), nn.Linear(2, 2)
    before = state_of(here)
    with pytest.raises(
        CheckpointError, match="'stubborn' was not loaded: Stubborn rejected its state: ValueError: I will"
    ):
        checkpoint.load(tmp_path, {"optim": other, "model": here, "stubborn": target})
    assert other.param_groups[0]["lr"] == 4.0
    assert target.state == {"a": 1}
    assert all(torch.equal(value, before[name]) for name, value in here.state_dict().items())


class Keeping(nn.Module):
    """Keeps tensors of the state that it is given: one that torch would copy, and one of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))
        self.extra = torch.zeros(2)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        self.kept = state[prefix + "kept"]

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


class KeepingExtra(nn.Linear):
    """Is loaded by torch, and keeps its extra state."""

    extra = torch.zeros(2)
    get_extra_state = Keeping.get_extra_state
    set_extra_state = Keeping.set_extra_state


def test_modules_may_keep_tensors_of_the_state(tmp_path: Path) -> None:
    model = nn.Sequential(Keeping(), KeepingExtra(2, 2))
    model[0].kept += 5
    model[0].extra, model[1].extra = torch.ones(2), torch.ones(2)
    checkpoint.save(tmp_path, {"model": model})
    other = nn.Sequential(Keeping(), KeepingExtra(2, 2))
    checkpoint.load(tmp_path, {"model": other})
    for found, value in ((other[0].kept, 5), (other[0].extra, 1), (other[1].extra, 1)):
        assert type(found) is torch.Tensor
        assert set(found.tolist()) == {value}
    assert torch.equal(other[1].weight, model[1].weight)


def test_hooks_decide_what_is_loaded(tmp_path: Path) -> None:
    """They see all that was saved, and may leave something as it is."""
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2)})
    other = nn.Linear(2, 2)
    before, seen = state_of(other), []
    other.register_load_state_dict_pre_hook(lambda _, state, *rest: seen.extend(state) or state.pop("weight"))
    other.register_load_state_dict_post_hook(lambda module, keys: seen.append(module.bias.tolist()))
    checkpoint.load(tmp_path, {"model": other})
    bias = checkpoint.read(tmp_path)["model"]["bias"].tolist()
    assert seen == ["weight", "bias", bias]
    assert torch.equal(other.weight, before["weight"])


class Cutting(Stubborn):
    """Takes a state, and takes the bytes of files away."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self.paths = paths

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state
        for path in self.paths:
            os.truncate(path, 0)


def test_a_file_that_is_cut_off_meanwhile_is_an_error_and_objects_are_put_back(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2000))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    first = Cutting([])
    first.state = {"a": 2}
    summary = checkpoint.save(tmp_path, {"first": first, "optim": optimizer})
    target, other = Cutting([tmp_path / file.name for file in summary.files]), torch.optim.Adam([parameter])
    with pytest.raises(CheckpointDamaged, match=r"on worker local at .* damaged: the file ends too early") as caught:
        checkpoint.load(tmp_path, {"first": target, "optim": other})
    assert caught.value.file == summary.files[0].name
    assert target.state == {"a": 1}
    assert not other.state


def test_loading_is_a_change_that_autograd_sees(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"model": model, "x": torch.ones(2)})
    x = torch.zeros(2, requires_grad=True)
    for target in ({"model": model}, {"x": x}):
        loss = (model(x) * x.exp() * x).sum()
        checkpoint.load(tmp_path, target)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
