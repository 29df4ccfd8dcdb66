"""Modules, optimizers and what belongs to training, for a driver that may have no device, and for workers that have."""

from __future__ import annotations

import ctypes
import tempfile
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
    """Return the result and the gradient of such a module in one process."""
    alone, x = make_dropped().to(ONE), values()
    out = alone(x.to(ONE))
    (gradient,) = torch.autograd.grad(out.sum(), [x])
    return out.detach().cpu(), gradient


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


def make_float_layer() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(3, 2)


def cast_on_the_device(worker: str) -> None:
    """Results and gradients of a module under autocast are those of the same module in one process."""
    module, alone = gw.nn.RemoteModule(f"{worker}/{ONE}", make_float_layer), make_float_layer().to(ONE)
    x, own = values().detach().float().requires_grad_(), values().detach().float().requires_grad_()
    with torch.autocast(device.NAME, torch.float16), gw.autograd.context() as ctx:
        out, expected = module(x), alone(own.to(ONE))
        assert out.dtype == expected.dtype == torch.float16
        assert torch.equal(out, expected.cpu())
        ctx.backward(out.sum())
        (gradient,) = torch.autograd.grad(expected.sum(), [own])
        assert torch.equal(ctx.gradients()[x], gradient)


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


def device_bytes() -> int:
    return int(torch.get_device_module(device.NAME).memory_allocated(0))


def read_peak_bytes() -> int:
    """Return the most memory that this process has had."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


_M_MMAP_THRESHOLD = -3


def reset_peak() -> int:
    """Forget the peak, and return the memory of now. Memory of tensors that are freed is given back at once from here on."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return read_peak_bytes()


# -- sharded tensors: the program runs on a worker, or in the driver, and compares with one process ------------------------


def _matrix() -> Tensor:
    return torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).reshape(6, 4)


def _devices(tensor: gw.shard.ShardedTensor) -> list[str]:
    return [str(shard.placement) for shard in tensor.metadata().shards_metadata]


def _make_shards(places: list[str], on: str) -> gw.shard.ShardedTensor:
    made = gw.shard.ChunkShardingSpec(0, places).shard(_matrix().to(on))
    made.requires_grad_()
    return made


def compute_with_shards(places: list[str], on: str) -> None:
    """Elementwise operations, reductions, the whole, and another division."""
    full, sharded = _matrix(), _make_shards(places, on)
    assert _devices(sharded) == places
    with torch.no_grad():
        for function in (torch.sum, torch.amax, torch.linalg.vector_norm):
            found = function(sharded)
            assert str(found.device) == on
            assert torch.allclose(found.cpu(), function(full))
        tripled = sharded * 2 + sharded
        assert torch.equal(sharded.cpu().full_tensor().cpu(), full)
        again = sharded.redistribute(gw.shard.ChunkShardingSpec(1, places))
        first, on_cpu = places[0].partition("/")[2], [f"{place.partition('/')[0]}/cpu" for place in places]
        for made, expected in (
            (tripled, places),
            (again, places),
            (sharded.redistribute(gw.shard.ChunkShardingSpec(0, on_cpu)), on_cpu),
            (sharded.redistribute(gw.shard.ChunkShardingSpec(1, on_cpu)), on_cpu),
            (sharded.to(first), [f"{place.partition('/')[0]}/{first}" for place in places]),
        ):
            assert _devices(made) == expected
            assert torch.allclose(made.full_tensor().cpu(), full * 3 if made is tripled else full)
            remote = [item for items in made.remote_shards().values() for item in items]
            where = [gw.rpc.rpc_sync(item.owner(), _where_shard_is, (item,)) for item in remote]
            assert sorted(where) == sorted(expected)


def _where_shard_is(shard: Any) -> str:
    return f"{gw.rpc.get_worker_info().name}/{shard.local_value().tensor.device}"


def differentiate_shards(places: list[str], on: str) -> None:
    """Gradients through a product and a lookup."""
    x, ids = values()[:, :1].detach() * torch.ones(4, dtype=torch.float64), torch.tensor([0, 5, 3, 3])
    own, full = x.clone().to(on).requires_grad_(), _matrix().requires_grad_()
    sharded, alone = _make_shards(places, on), x.clone().requires_grad_()
    with gw.autograd.context() as ctx:
        product: Any = nn.functional.linear(own, sharded)
        rows = nn.functional.embedding(ids.to(on), sharded)
        assert str(rows.device) == on
        ctx.backward(product.full_tensor().square().sum() + rows.square().sum())
        found = ctx.gradients()[own]
    assert str(found.device) == on
    torch.autograd.backward(
        nn.functional.linear(alone, full).square().sum() + nn.functional.embedding(ids, full).square().sum()
    )
    assert alone.grad is not None
    assert torch.allclose(found.cpu(), alone.grad)


def step_shards(places: list[str], on: str) -> None:
    """Steps of an optimizer, and its state."""
    full, sharded = _matrix().requires_grad_(), _make_shards(places, on)
    ours = gw.optim.DistributedOptimizer(torch.optim.Adam, [sharded], lr=0.1)
    theirs = torch.optim.Adam([full], lr=0.1)
    for _ in range(2):
        with gw.autograd.context() as ctx:
            ctx.backward((sharded * sharded).sum())
            ours.step(ctx)
        theirs.zero_grad()
        torch.autograd.backward((full * full).sum())
        theirs.step()
    with torch.no_grad():
        assert torch.allclose(sharded.full_tensor().cpu(), full)
    state = ours.state_dict()["state"][0]
    assert torch.allclose(state["exp_avg"].cpu(), theirs.state_dict()["state"][0]["exp_avg"])
    ours.load_state_dict(ours.state_dict())


def save_shards(places: list[str], on: str) -> None:
    """A checkpoint of a sharded tensor fills another, with other devices."""
    saved, others = _make_shards(places, on), list(reversed(places))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        filled = gw.shard.ChunkShardingSpec(0, others).shard(torch.zeros_like(_matrix()))
        gw.checkpoint.save(folder, {"table": saved}, progress=False)
        gw.checkpoint.load(folder, {"table": filled}, progress=False)
        assert _devices(filled) == others
        assert torch.equal(filled.full_tensor().cpu(), _matrix())


SHARD_PROGRAMS = (compute_with_shards, differentiate_shards, step_shards, save_shards)
