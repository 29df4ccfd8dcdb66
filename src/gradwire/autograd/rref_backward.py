"""Backward passes that start from the value of a reference, on any worker."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.autograd import api
from gradwire.errors import RRefError
from gradwire.rpc.functions import expose
from gradwire.rref import RRef
from gradwire.rref.api import set_backward
from gradwire.rref.owner import find_value

BACKWARD = "gradwire.rref.backward"


def backward_from(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Run a backward pass from the value of a reference; see `RRef.backward`."""
    if rref.is_owner():
        _run(rref.local_value(), context_id, retain_graph)
    elif context_id == -1:
        raise RRefError(
            f"{rref!r}: User RRefs require 'dist_autograd_ctx_id' to be specified; without it, call backward on the "
            f"owner"
        )
    else:
        with torch.no_grad():  # the call itself is not part of the graph
            rref._ask(BACKWARD, (context_id, retain_graph), -1.0)


def _backward_here(rref_id: int, maker: Any, context_id: int, retain_graph: bool) -> None:
    if type(context_id) is not int or type(retain_graph) is not bool:
        raise TypeError(f"{BACKWARD} needs a context id (int) and retain_graph (bool)")
    _run(find_value(rref_id, maker), context_id, retain_graph)


def _run(value: Any, context_id: int, retain_graph: bool) -> None:
    if not isinstance(value, torch.Tensor):
        raise RRefError(f"RRef should contain a tensor for .backward(), not {type(value).__name__}")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        api.backward(context_id, [value], retain_graph)


expose(_backward_here, name=BACKWARD)
set_backward(backward_from)
