"""`torch.distributed.autograd` on gradwire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire import autograd
from gradwire.autograd.functions import RecvFunction, SendFunction

_SAME = (
    "DistAutogradContext",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "context",
    "get_gradients",
    "is_available",
)
_SPACE = "torch::distributed::autograd::"


def _init(worker_id: int) -> None:
    """Every worker of gradwire has its autograd from the start."""


def backward(context_id: Any, roots: Any, retain_graph: bool = False) -> None:
    """As `gradwire.autograd.backward`, with torch's event for the profiler and its check of types.

    Raises:
        TypeError: An argument is of another type.
        AutogradError: A root cannot be one.
        UnknownContext: The context was released, or never existed here.
        BackwardFailed: Something failed on this or another worker.
    """
    if not isinstance(context_id, int) or not isinstance(roots, Sequence | torch.Tensor):
        raise TypeError(
            f"backward(): incompatible function arguments: it takes a context id and a list of tensors, not "
            f"{type(context_id).__name__} and {type(roots).__name__}"
        )
    with torch.autograd.profiler.record_function(f"{_SPACE}backward"):
        autograd.backward(context_id, roots, retain_graph)


def make_table() -> Mapping[str, Any]:
    """The names of ``torch.distributed.autograd``."""
    same = {name: getattr(autograd, name) for name in _SAME}
    return {**same, "_init": _init, "backward": backward}


def make_node_names() -> dict[type, str]:
    """The nodes of the local graph, and what torch calls them."""
    kinds: dict[Any, str] = {SendFunction: "SendRpcBackward", RecvFunction: "RecvRpcBackward"}
    return {kind._backward_cls: f"{_SPACE}{name}" for kind, name in kinds.items()}
