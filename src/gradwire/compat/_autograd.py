"""`torch.distributed.autograd` on gradwire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire import autograd

_SAME = (
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "context",
    "get_gradients",
    "is_available",
)


def _init(worker_id: int) -> None:
    """Every worker of gradwire has its autograd from the start."""


def make_tables() -> dict[str, Mapping[str, Any]]:
    """By torch module, the values of its names."""
    return {"torch.distributed.autograd": {**{name: getattr(autograd, name) for name in _SAME}, "_init": _init}}
