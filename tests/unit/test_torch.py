"""What gradwire relies on inside of torch: one test for each name, which fails when torch changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradwire import _torch

# -- used by checkpoint ---------------------------------------------------------------------------------------------------


class Overriding(nn.Linear):
    """Loads in a way of its own."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def make_nested() -> nn.Module:
    module = nn.BatchNorm1d(3)
    module.add_module("inner", nn.Linear(2, 2))
    return module


def test_own_tensors_are_parameters_and_buffers() -> None:
    module = make_nested()
    module.register_parameter("none", None)
    names = ["weight", "bias", "none", "running_mean", "running_var", "num_batches_tracked"]
    assert list(_torch.own_tensors(module)) == names
    assert _torch.own_tensors(module)["weight"] is module.weight
    assert _torch.own_tensors(module)["running_var"] is module.running_var


def test_is_method_of_module_sees_overrides() -> None:
    for module, is_torchs in ((nn.Linear(1, 1), True), (Overriding(1, 1), False)):
        assert _torch.is_method_of_module(module, _torch.LOAD_OWN_STATE_DICT) is is_torchs
        assert _torch.is_method_of_module(module, "load_state_dict")
    assert callable(nn.Module._load_from_state_dict)
    replaced = nn.Linear(1, 1)
    replaced.load_state_dict = lambda *_, **__: None
    assert not _torch.is_method_of_module(replaced, "load_state_dict")


def test_own_state_dict_leaves_submodules_out() -> None:
    module = make_nested()
    state = _torch.own_state_dict(module, keep_vars=True)
    assert list(state) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert state["weight"] is module.weight
    assert _torch.metadata_of(state) == {"": _torch.metadata_of(module.state_dict())[""]}


def test_load_own_state_dict_leaves_submodules_out_and_collects_errors() -> None:
    module, other = make_nested(), make_nested()
    inner = other.inner.weight.clone()
    with torch.no_grad():
        module.weight.fill_(5)
    _torch.load_own_state_dict(other, module.state_dict(), {"version": 2})
    assert other.weight.tolist() == [5, 5, 5]
    assert torch.equal(other.inner.weight, inner)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        _torch.load_own_state_dict(other, {"weight": torch.zeros(1)}, {})


def test_metadata_is_kept_in_state_dicts_and_reaches_modules() -> None:
    module, seen = nn.Sequential(nn.BatchNorm1d(1)), []
    state = module.state_dict()
    assert _torch.metadata_of(state)["0"]["version"] == nn.BatchNorm1d._version
    module[0].register_load_state_dict_pre_hook(lambda _, state, prefix, metadata, *rest: seen.append(metadata))
    _torch.set_metadata(state, {"": {}, "0": {"version": 7}})
    module.load_state_dict(state)
    assert [found["version"] for found in seen] == [7]
