"""Random programs (`autograd.programs`) over the CPU and two devices of each worker."""

from __future__ import annotations

import torch

from accelerator import device
from autograd import worlds
from autograd.programs import Setting
from autograd.running import check_program
from gradwire import rpc
from gradwire.autograd.api import current_engine
from gradwire.cluster.api import Cluster
from gradwire.wire.devices import DeviceMap

_WORKERS = ("worker0", "worker1", "worker2")
_ZERO, _ONE = (f"{device.NAME}:{number}" for number in range(device.NUM_DEVICES))
SETTING = Setting(_WORKERS, _WORKERS, 1 + device.NUM_DEVICES)


def prepare(cluster: Cluster) -> None:
    """Let the workers have devices, and let what the first one sends to the second arrive on the other device."""
    for worker in cluster.workers:
        worker.call(_prepare_worker)


def _prepare_worker() -> None:
    device.load()
    worlds.DEVICES[:] = ["cpu", _ZERO, _ONE]
    if rpc.get_worker_info().name == _WORKERS[0]:
        current_engine()._agent.device_maps[_WORKERS[1]] = DeviceMap({_ZERO: _ONE, _ONE: _ZERO})


def check(seed: int) -> str:
    """Run the program of a seed, on workers and in one process; return what is wrong, or nothing."""
    return check_program(seed, setting=SETTING)


def send_from_zero_and_back() -> list[str]:
    """Send a tensor from the first device to the second worker; return where it was there, and where it is here."""
    tensor = torch.ones(1, device=_ZERO)
    where, back = rpc.rpc_sync(_WORKERS[1], _look_at, args=(tensor,))
    return [where, str(back.device)]


def _look_at(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return str(tensor.device), tensor
