"""Optimizers whose parameters are on devices, and checkpoints of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from accelerator import device, training
from gradwire.cluster.api import Cluster
from gradwire.testing import wait_until

_OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "plain": {"foreach": False},
}
_ON_DEVICE = ("fused", "capturable")  # where torch keeps the number of steps


def _split() -> tuple[list[gw.nn.RemoteModule], nn.ModuleList]:
    """Two layers on two devices of one worker and one of another; and the same in this process."""
    places = [f"worker0/{training.ZERO}", f"worker0/{training.ONE}", f"worker1/{training.ONE}"]
    remote = [gw.nn.RemoteModule(place, training.make_layer, (seed,)) for seed, place in enumerate(places)]
    return remote, nn.ModuleList(training.make_layer(seed) for seed in range(len(places)))


def _loss(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = torch.tanh(layer(x))
    return x.square().sum()


def _train(remote: Any, alone: Any, ours: Any, theirs: Any, num_steps: int = 2) -> None:
    for number in range(num_steps):
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4) * (number + 1)
        with gw.autograd.context() as ctx:
            ctx.backward(_loss(remote, x))
            ours.step(ctx)
        theirs.zero_grad()
        _loss(alone, x).backward()
        theirs.step()


def _compare(remote: Any, alone: Any, atol: float = 1e-9) -> None:
    for there, here in zip(remote, alone, strict=True):
        for name, found in there.state_dict().items():
            torch.testing.assert_close(found, here.state_dict()[name], rtol=0.0, atol=atol)


def _states(optimizer: Any) -> list[dict[str, tuple[str, str]]]:
    found: list[dict[str, tuple[str, str]]] = []
    for rref in optimizer.remote_optimizers:
        found += gw.rpc.rpc_sync(rref.owner(), training.state_of_optimizer, (rref,))
    return found


@pytest.mark.parametrize("kind", _OPTIONS)
def test_steps_and_state_are_those_of_one_process(cluster: Cluster, kind: str, tmp_path: Path) -> None:
    remote, alone = _split()
    ours = gw.optim.DistributedOptimizer(torch.optim.Adam, remote, lr=0.05, **_OPTIONS[kind])
    theirs = torch.optim.Adam(alone.parameters(), lr=0.05, foreach=False)
    _train(remote, alone, ours, theirs)
    atol = 1e-5 if kind == "capturable" else 1e-9  # torch takes powers of the number of steps in float32 then
    _compare(remote, alone, atol)
    before = _states(ours)
    for state in before:
        assert state["exp_avg"][0].startswith(device.NAME)
        assert state["step"][0].startswith(device.NAME if kind in _ON_DEVICE else "cpu")
    saved = ours.state_dict()  # in a process without the device
    assert {item.device.type for state in saved["state"].values() for item in state.values()} == {"cpu"}
    gw.checkpoint.save(tmp_path, {"model": remote, "optimizer": ours}, progress=False)

    other, _ = _split()
    again = gw.optim.DistributedOptimizer(torch.optim.Adam, other, lr=0.05, **_OPTIONS[kind])
    again.load_state_dict(copy.deepcopy(saved))
    assert _states(again) == before
    gw.checkpoint.load(tmp_path, {"model": other, "optimizer": again}, progress=False)
    assert _states(again) == before
    _train(other, alone, again, theirs)
    _compare(other, alone, atol)


def test_gradients_are_clipped_over_all_devices(cluster: Cluster) -> None:
    remote, alone = _split()
    ours = gw.optim.DistributedOptimizer(torch.optim.SGD, remote, lr=0.5)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.5)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    with gw.autograd.context() as ctx:
        ctx.backward(_loss(remote, x))
        norm = ours.clip_grad_norm_(ctx, 0.01)
        ours.step(ctx)
    _loss(alone, x).backward()
    assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01))
    theirs.step()
    _compare(remote, alone)


def test_an_infinite_gradient_on_one_device_stops_the_step_on_all(cluster: Cluster) -> None:
    remote, alone = _split()
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, remote, lr=0.5)
    scaler = gw.optim.GradScaler(init_scale=4.0)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
    for worker, on in (("worker0", training.ZERO), ("worker0", training.ONE), ("worker1", training.ONE)):
        with gw.autograd.context() as ctx:
            loss = _loss(remote, x) + gw.rpc.rpc_sync(worker, training.overflow, (_parameter(remote, worker, on),))
            ctx.backward(scaler.scale(loss))
            assert not scaler.step(optimizer, ctx)
        scaler.update()
    assert scaler.get_scale() == 0.5
    _compare(remote, alone)
    with gw.autograd.context() as ctx:
        ctx.backward(scaler.scale(_loss(remote, x)))
        assert scaler.step(optimizer, ctx)
    scaler.update()
    theirs = torch.optim.SGD(alone.parameters(), lr=0.5)
    _loss(alone, x).backward()
    theirs.step()
    _compare(remote, alone)


def _parameter(remote: Any, worker: str, on: str) -> Any:
    (found,) = [item for item in remote if (item.on, item.device) == (worker, on)]
    return found.remote_parameters()[0]


# -- checkpoints ----------------------------------------------------------------------------------------------------------


def test_random_numbers_of_devices_are_saved_and_repeat(cluster: Cluster, tmp_path: Path) -> None:
    randomness = gw.rpc.remote("worker2", training.Randomness)
    gw.checkpoint.save(tmp_path, {"random": randomness}, progress=False)
    first = cluster.workers[2].call(training.draw)
    assert cluster.workers[2].call(training.draw) != first
    gw.checkpoint.load(tmp_path, {"random": randomness}, progress=False)
    assert cluster.workers[2].call(training.draw) == first


def test_a_checkpoint_moves_between_devices_and_the_cpu(cluster: Cluster, tmp_path: Path) -> None:
    for source, target in ((f"worker0/{training.ONE}", "worker1/cpu"), ("worker1/cpu", f"worker2/{training.ZERO}")):
        saved = gw.nn.RemoteModule(source, training.make_layer, (1,))
        filled = gw.nn.RemoteModule(target, training.make_layer, (2,))
        gw.checkpoint.save(tmp_path, {"model": saved}, progress=False)
        gw.checkpoint.load(tmp_path, {"model": filled}, progress=False)
        for name, item in filled.state_dict().items():
            assert torch.equal(item, saved.state_dict()[name])
        where = gw.rpc.rpc_sync(target.partition("/")[0], training.device_of_value, (filled.remote_parameters()[0],))
        assert where == target.partition("/")[2]


def test_a_worker_needs_no_more_host_memory_than_for_a_few_tensors(cluster: Cluster, tmp_path: Path) -> None:
    largest, num_tensors = 4 << 20, 12  # bytes, of float32
    worker = cluster.workers[2]
    worker.call(training.reset_peak)
    place = f"worker2/{training.ZERO}"
    module = gw.nn.RemoteModule(place, training.make_large, ([largest // 4] * num_tensors,))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [module], lr=0.1)
    with gw.autograd.context() as ctx:
        ctx.backward(module())
        optimizer.step(ctx)
    objects = {"model": module, "optimizer": optimizer}
    expected = 3 * num_tensors * largest + (1 << 20)
    wait_until(lambda: worker.call(training.device_bytes) < expected, 10.0, "that gradients of the context are gone")
    # The stand-in's memory is the host's. A load makes new state of the optimizer on the device, and then drops the old one.
    new_state = 2 * num_tensors * largest if device.NAME == device.STAND_IN else 0
    for work, on_device in ((gw.checkpoint.save, 0), (gw.checkpoint.load, new_state)):
        found = []
        for _ in range(2):  # what the allocator has kept of earlier work counts in the first one
            before = worker.call(training.reset_peak)
            work(tmp_path, objects, progress=False)
            found.append(worker.call(training.read_peak_bytes) - before - on_device)
        on_host = min(found)
        assert on_host < 6 * largest, f"{work.__name__}: {on_host >> 20} MiB"


# -- sharded tensors ------------------------------------------------------------------------------------------------------


_SHARDS = [f"worker1/{training.ZERO}", f"worker2/{training.ONE}", f"worker1/{training.ONE}", "worker2/cpu"]


@pytest.mark.parametrize("program", training.SHARD_PROGRAMS, ids=lambda program: program.__name__)
def test_shards_on_devices_compute_as_in_one_process(cluster: Cluster, program: Any) -> None:
    cluster.workers[0].call(program, _SHARDS, training.ZERO)
    program(_SHARDS[:2], "cpu")  # this process has no device: whole tensors come to the CPU
