"""`torch.distributed.nn.RemoteModule` and `torch.distributed.optim.DistributedOptimizer` on gradwire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def make_optimizer_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.optim.optimizer``."""
    from gradwire import optim

    return {"DistributedOptimizer": optim.DistributedOptimizer}


def make_remote_module_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.nn.api.remote_module``."""
    from gradwire import nn

    return {"RemoteModule": nn.RemoteModule, "_RemoteModule": nn.RemoteModule}
