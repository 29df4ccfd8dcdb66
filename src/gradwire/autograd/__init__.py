"""Distributed autograd: gradients through calls to other workers."""

from __future__ import annotations

from gradwire.autograd.api import (
    ContextId,
    _current_context,
    _get_debug_info,
    _get_max_id,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    backward,
    context,
    explain,
    get_gradients,
    grad,
    graph,
    is_available,
)
from gradwire.autograd.context import AutogradStatistics, DistAutogradContext
from gradwire.autograd.distributed_graph import DistributedGraph, GraphMessage, GraphNode, GraphWorker
from gradwire.autograd.explanation import Explanation

__all__ = [
    "AutogradStatistics",
    "ContextId",
    "DistAutogradContext",
    "DistributedGraph",
    "Explanation",
    "GraphMessage",
    "GraphNode",
    "GraphWorker",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "context",
    "explain",
    "get_gradients",
    "grad",
    "graph",
    "is_available",
]
