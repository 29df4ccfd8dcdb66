"""The composition root: what a complete worker is made of.

`gradwire.rpc` builds workers that make and serve calls. The layers above it (references, autograd, optimizers) join every
worker by adding a function to `gradwire.rpc.worker.attachments` here, so that rpc need not know them; and names that people
look for in `gradwire.rpc`, but that those layers define, are put there.

Packages that many programs do not use are imported when they are used: by the program (`gradwire.__getattr__`), by another
worker that calls one of their functions or sends one of their objects, or by `torch.load`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

import gradwire.autograd.autocast
import gradwire.autograd.references
import gradwire.autograd.worker
import gradwire.rref.creation
import gradwire.rref.references
from gradwire import rpc, rref
from gradwire.rpc.worker import attachments, start_worker
from gradwire.wire.objects import set_home

__all__ = ["DEFERRED", "attachments", "import_all", "start_worker"]

DEFERRED = ("checkpoint", "optim", "shard")
"""Packages that are imported when they are used."""


def import_all() -> None:
    """Import the packages that `import gradwire` leaves out; for a process whose forks all profit from it."""
    for name in DEFERRED:
        importlib.import_module(f"gradwire.{name}")


def _load_sharded_tensor(*args: Any) -> Any:
    return importlib.import_module("gradwire.shard.travel").load_pickled(*args)


for _attach in (
    gradwire.autograd.worker.attach,
    gradwire.autograd.autocast.attach,
    gradwire.rref.references.attach,
    gradwire.rref.creation.attach,
):
    if _attach not in attachments:
        attachments.append(_attach)
for _name in ("RRef", "PyRRef", "remote"):
    setattr(rpc, _name, getattr(rref, _name))
for _name, _module in {
    "gradwire.checkpoint": "gradwire.checkpoint.owners",
    "gradwire.optim": "gradwire.optim.operations",
    "gradwire.ShardedTensor": "gradwire.shard.travel",
}.items():
    set_home(_name, _module)
# So that torch.load takes a sharded tensor without weights_only=False.
torch.serialization.add_safe_globals([(_load_sharded_tensor, "gradwire.shard.travel.load_pickled")])
