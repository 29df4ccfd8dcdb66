"""Modules, optimizers and what belongs to training, for a driver that may have no device, and for workers that have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from accelerator import device

Tensor = torch.Tensor

ZERO, ONE = f"{device.NAME}:0", f"{device.NAME}:1"


class Branches(nn.Module):
    """Takes and returns tensors in containers, and has a method besides `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, inputs: dict[str, Any], *, scale: Tensor | None = None) -> list[Any]:
        x: Tensor = inputs["x"]
        assert x.device == self.layer.weight.device
        out = self.layer(x) if scale is None else self.layer(x) * scale
        return [out, (out.tanh(), {"sum": out.sum(), "name": "branches"})]

    def encode(self, x: Tensor) -> Tensor:
        assert x.device == self.layer.weight.device
        return torch.tanh(self.layer(x))


def make_branches(seed: int = 0) -> Branches:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Branches()


def values() -> Tensor:
    return torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()


class Dropped(nn.Module):
    """Computes its activations again in the backward, with the same random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(lambda x: self.dropout(self.layer(x).tanh()), x, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


def make_dropped() -> Dropped:
    torch.manual_seed(0)
    made = Dropped()
    torch.manual_seed(1)
    return made


def run_dropped() -> tuple[Tensor, Tensor]:
    """Return the result and the gradient of such a module in one process, on the CPU."""
    alone, x = make_dropped(), values()
    out = alone(x)
    (gradient,) = torch.autograd.grad(out.sum(), [x])
    return out.detach(), gradient


def make_compiled(backend: str) -> nn.Module:
    torch.manual_seed(0)
    made: Any = torch.compile(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), backend=backend)
    assert isinstance(made, nn.Module)
    return made


def device_of(value: Tensor) -> str:
    return str(value.device)


def autocast_state() -> dict[str, str]:
    kinds = ("cpu", device.NAME)
    return {kind: str(torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)}


def call_under_autocast(worker: str) -> dict[str, str]:
    with torch.autocast(device.NAME, torch.float16):
        return gw.rpc.rpc_sync(worker, autocast_state)


def state_of_optimizer(optimizer: gw.rpc.RRef[Any]) -> list[dict[str, tuple[str, str]]]:
    """Return device and dtype of every tensor in the state of one worker's part."""
    found = optimizer.local_value()._optimizer.state.values()
    return [
        {key: (str(item.device), str(item.dtype)) for key, item in state.items() if isinstance(item, Tensor)}
        for state in found
    ]


class Randomness:
    """The state of the random numbers of a worker, for checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        backend = torch.get_device_module(device.NAME)
        return {"cpu": torch.get_rng_state(), "devices": [backend.get_rng_state(index) for index in range(2)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        for index, item in enumerate(state["devices"]):
            torch.get_device_module(device.NAME).set_rng_state(item, index)


def draw() -> list[float]:
    return [float(item) for item in torch.rand(4, device=ZERO).cpu()]


class Large(nn.Module):
    """Has several parameters of some sizes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.rand(size) for size in sizes])

    def forward(self) -> Tensor:
        return torch.stack([item.sum() for item in self.params]).sum()


def make_large(sizes: Sequence[int]) -> nn.Module:
    return Large(sizes)


def make_layer(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(4, 4, dtype=torch.float64)


def overflow(parameter: gw.rpc.RRef[Tensor]) -> Tensor:
    """Return something whose gradient by the parameter is infinite."""
    return (parameter.local_value() * float("inf")).sum().cpu()


def device_of_value(rref: gw.rpc.RRef[Tensor]) -> str:
    return str(rref.local_value().device)


# -- sharded tensors: the program runs on worker0, which has the device ---------------------------------------------------


def shard_over_devices() -> None:
    """Compares a matrix in parts on devices of two workers with one in a single process."""
    torch.manual_seed(0)
    full = torch.rand(6, 4, dtype=torch.float64)
    spec = gw.shard.ChunkShardingSpec(0, [f"worker1/{ZERO}", f"worker2/{ONE}", f"worker1/{ONE}"])
    made = gw.shard._shard_tensor(full.to(ZERO), spec)
    where = [str(shard.placement) for shard in made.metadata().shards_metadata]
    assert where == [f"worker1/{ZERO}", f"worker2/{ONE}", f"worker1/{ONE}"]
    assert torch.equal(made.full_tensor().cpu(), full)


def read_peak_bytes() -> int:
    """Return the most memory that this process has had."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def reset_peak() -> int:
    """Forget the peak, and return the memory of now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return read_peak_bytes()
