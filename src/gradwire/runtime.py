"""The composition root: the parts of a complete worker.

`gradwire.rpc` builds workers that make and serve calls. The layers above it (references, autograd) join every worker by
adding a function to `gradwire.rpc.agent.attachments` here, so that rpc does not depend on them. They are imported when the
first worker starts, because a launcher or a data loader also imports gradwire and never becomes a worker.

Packages that many programs do not need are imported on first use: by the program (`gradwire.__getattr__`), by another
worker that calls one of their functions or sends one of their objects, or by `torch.load`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from gradwire.rpc.agent import Agent, attachments, start_worker
from gradwire.wire.serialization import set_home

__all__ = ["DEFERRED", "attachments", "import_all", "start_worker"]

DEFERRED = ("checkpoint", "nn", "optim", "rref", "shard")
"""Packages that are imported on first use."""

_LAYERS = (
    "gradwire.autograd.engine",
    "gradwire.rref.context",
    "gradwire.rref.owner",
)
"""Modules whose `attach` is called for each new worker, in this order."""

_WORKER_PARTS = ("gradwire.autograd.rref_backward",)
"""Further modules that are imported when a worker starts."""


def import_all() -> None:
    """Import the packages that `import gradwire` leaves out; called in a process that forks workers."""
    for name in (*(f"gradwire.{name}" for name in DEFERRED), *_LAYERS, *_WORKER_PARTS):
        importlib.import_module(name)


def _attach_layers(agent: Agent) -> None:
    for name in _WORKER_PARTS:
        importlib.import_module(name)
    for name in _LAYERS:
        importlib.import_module(name).attach(agent)


def _load_sharded_tensor(*args: Any) -> Any:
    return importlib.import_module("gradwire.shard.serialization").load_pickled(*args)


if _attach_layers not in attachments:
    attachments.append(_attach_layers)
for _name, _module in {
    "gradwire.checkpoint": "gradwire.checkpoint.owner",
    "gradwire.nn": "gradwire.nn.module_owner",
    "gradwire.optim": "gradwire.optim.local",
    "gradwire.rref": "gradwire.rref.owner",
    "gradwire.rref.backward": "gradwire.autograd.rref_backward",
    "gradwire.RemoteModule": "gradwire.nn.remote_module",
    "gradwire.RRef": "gradwire.rref.api",
    "gradwire.ShardedTensor": "gradwire.shard.serialization",
}.items():
    set_home(_name, _module)
# Lets torch.load read a sharded tensor without weights_only=False.
torch.serialization.add_safe_globals([(_load_sharded_tensor, "gradwire.shard.serialization.load_pickled")])
