"""`torch.distributed.nn.RemoteModule` and `torch.distributed.optim.DistributedOptimizer` on gradwire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire import nn, optim


def make_tables() -> dict[str, Mapping[str, Any]]:
    """By torch module, the values of its names."""
    return {
        "torch.distributed.optim.optimizer": {"DistributedOptimizer": optim.DistributedOptimizer},
        "torch.distributed.nn.api.remote_module": {"RemoteModule": nn.RemoteModule, "_RemoteModule": nn.RemoteModule},
    }
