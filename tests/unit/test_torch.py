"""What gradwire relies on in torch's private names: each test fails by name when torch changes one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer

from gradwire import _torch

# -- used by shard -------------------------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "asked"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError


def test_shard_disable_torch_function_subclass() -> None:
    made = _torch.make_wrapper_subclass(Wrapper, (2, 3), dtype=torch.float64)
    assert made.dim() == "asked"
    with _torch.DisableTorchFunctionSubclass():
        assert made.dim() == 2


def test_shard_make_wrapper_subclass() -> None:
    made = _torch.make_wrapper_subclass(
        Wrapper, torch.Size([2, 3]), dtype=torch.int32, layout=torch.strided, device="cpu", requires_grad=False
    )
    assert type(made) is Wrapper
    with _torch.DisableTorchFunctionSubclass():
        assert (list(made.size()), made.dtype, made.device.type) == ([2, 3], torch.int32, "cpu")


def test_shard_has_compatible_shallow_copy_type() -> None:
    assert _torch.has_compatible_shallow_copy_type(torch.zeros(2), torch.zeros(3))


def test_shard_is_view() -> None:
    tensor = torch.zeros(4)
    assert _torch.is_view(tensor[1:])
    assert not _torch.is_view(tensor)


def test_shard_calculate_correct_fan() -> None:
    assert [_torch.calculate_correct_fan(torch.zeros(5, 3), mode) for mode in ("fan_in", "fan_out")] == [3, 5]


def test_shard_is_profiler_enabled() -> None:
    assert not _torch.is_profiler_enabled()
    with torch.autograd.profiler.profile():
        assert _torch.is_profiler_enabled()


def test_shard_children_of() -> None:
    layer = nn.Linear(1, 1)
    module = nn.Module()
    module.first, module.second = layer, layer
    module.register_module("third", None)
    assert _torch.children_of(module) == {"first": layer, "second": layer, "third": None}


@pytest.mark.parametrize("name", ["step", "state_dict", "load_state_dict"])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_shard_optimizer_hooks(name: str, when: str) -> None:
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    assert _torch.optimizer_hooks(sgd, f"{name}_{when}") == []

    def hook(*args: Any) -> None: ...

    getattr(sgd, f"register_{name}_{when}_hook")(hook)
    assert _torch.optimizer_hooks(sgd, f"{name}_{when}") == [hook]


@pytest.mark.parametrize("when", ["pre", "post"])
def test_shard_has_global_optimizer_hooks(when: str) -> None:
    assert not _torch.has_global_optimizer_hooks()
    register = getattr(optimizer, f"register_optimizer_step_{when}_hook")
    handle = register(lambda *args: None)
    assert _torch.has_global_optimizer_hooks()
    handle.remove()
    assert not _torch.has_global_optimizer_hooks()


def test_shard_default_process_group() -> None:
    with pytest.raises(ValueError, match="has not been initialized"):
        _torch.default_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert _torch.default_process_group() is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_shard_remote_device() -> None:
    rank, worker = _torch.RemoteDevice("rank:1/cpu"), _torch.RemoteDevice("worker1/cuda:0")
    assert (rank.rank(), rank.worker_name(), rank.device()) == (1, None, torch.device("cpu"))
    assert (worker.rank(), worker.worker_name(), worker.device()) == (None, "worker1", torch.device("cuda:0"))
    assert str(rank) == "rank:1/cpu"
    assert rank == _torch.RemoteDevice("rank:1/cpu")
