"""Tensors that are read when torch copies from them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradwire.checkpoint.safetensors_io import StoredTensor, stored
from gradwire.errors import CheckpointDamaged, CheckpointError

SAVED = torch.arange(6.0).view(2, 3)


class File:
    """Where `SAVED` is, and what it was read into."""

    def __init__(self) -> None:
        self.targets: list[torch.Tensor] = []

    def fill(self, target: torch.Tensor) -> None:
        self.targets.append(target)
        with torch.no_grad():
            target.copy_(SAVED)


@pytest.fixture
def file() -> File:
    return File()


@pytest.fixture
def tensor(file: File) -> StoredTensor:
    return stored((2, 3), torch.float32, file.fill, [])


def test_a_module_is_filled_without_memory_in_between(file: File, tensor: StoredTensor) -> None:
    module = nn.Linear(3, 2, bias=False)
    module.load_state_dict({"weight": tensor})
    assert [target is module.weight for target in file.targets] == [True]
    assert type(module.weight) is nn.Parameter
    assert torch.equal(module.weight.detach(), SAVED)


def test_hooks_see_its_values(file: File, tensor: StoredTensor) -> None:
    module = nn.Linear(3, 2, bias=False)
    module.register_load_state_dict_pre_hook(lambda _, state, *rest: state.update(weight=state["weight"] * 2 + 1))
    module.load_state_dict({"weight": tensor})
    assert torch.equal(module.weight.detach(), SAVED * 2 + 1)
    assert len(file.targets) == 1


def test_changes_in_place_stay(tensor: StoredTensor) -> None:
    tensor.mul_(3)
    target = torch.zeros(2, 3)
    target.copy_(tensor)
    assert torch.equal(target, SAVED * 3)
    assert torch.equal(tensor[1], SAVED[1] * 3)


def test_it_looks_like_what_was_saved(file: File, tensor: StoredTensor) -> None:
    assert tensor.shape == (2, 3)
    assert file.targets == []
    assert (tensor.dtype, tensor.device, tensor.is_meta) == (torch.float32, torch.device("cpu"), False)
    for found in (
        tensor.clone(),
        tensor.detach(),
        tensor.to(torch.float32),
        copy.deepcopy(tensor),
        torch.stack([tensor])[0],
    ):
        assert type(found) is torch.Tensor
        assert torch.equal(found, SAVED)
    target = torch.zeros(4, 2, 3)
    target.copy_(tensor)  # is expanded
    assert torch.equal(target[3], SAVED)
    assert len(file.targets) == 1


def test_errors_are_kept_because_torch_makes_text_of_them() -> None:
    failures: list[CheckpointError] = []
    error = CheckpointDamaged("the file ends too early")

    def fail(_: torch.Tensor) -> None:
        raise error

    with pytest.raises(RuntimeError, match="the file ends too early"):
        nn.Linear(3, 2, bias=False).load_state_dict({"weight": stored((2, 3), torch.float32, fail, failures)})
    assert failures == [error]
