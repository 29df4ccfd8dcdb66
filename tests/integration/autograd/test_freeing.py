"""What contexts, passes and threads held is freed when they end, not when the garbage collector comes by."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import gradwire as gw
from autograd import graphs, worlds
from autograd.graphs import FIRST, Graph
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed
from gradwire.testing import wait_until

Tensor = torch.Tensor

_contexts: list[weakref.ref[Any]] = []  # on every worker: contexts that must go


def _watch_context() -> None:
    """Notes the context at hand, and lets nothing but the end of the last reference free it."""
    gc.collect()
    gc.disable()
    _contexts[:] = [weakref.ref(gw.autograd._current_context())]


def _is_context_freed() -> bool:
    return not any(context() is not None for context in _contexts)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("on purpose")


def _failing(x: Tensor) -> Tensor:
    return _Failing.apply(x)


def _fails_here(x: Tensor, y: Tensor) -> Tensor:
    return _failing(worlds.call(FIRST, graphs.layer, x) * y).sum()


def _fails_there(x: Tensor, y: Tensor) -> Tensor:
    return (worlds.call(FIRST, _failing, x) * y).sum()


@pytest.mark.parametrize(
    "graph",
    [graphs.skip, graphs.unused_result, graphs.nested, _fails_here, _fails_there],
    ids=lambda graph: graph.__name__,
)
def test_a_context_is_freed_without_the_garbage_collector(cluster: Cluster, graph: Graph) -> None:
    """What a pass held may be all of the memory there is."""
    x, y = worlds.make_inputs()
    try:
        with gw.autograd.context() as ctx:
            loss = graph(x, y)
            _watch_context()
            cluster.workers[0].call(_watch_context)
            with contextlib.suppress(BackwardFailed):
                ctx.backward(loss)
        del loss
        wait_until(_is_context_freed, 20.0, "that the context is freed here")
        wait_until(lambda: cluster.workers[0].call(_is_context_freed), 20.0, "that the context is freed there")
        assert _is_context_freed()
    finally:
        gc.enable()
        cluster.workers[0].call(gc.enable)


def test_threads_started_in_a_context_do_not_hold_themselves(cluster: Cluster) -> None:
    gc.collect()
    gc.disable()
    try:
        with gw.autograd.context() as ctx:
            seen: list[int] = []
            thread = threading.Thread(target=lambda: seen.append(gw.autograd._current_context()._context_id()))
            thread.start()
            thread.join(10.0)
        gone = weakref.ref(thread)
        del thread
        assert seen == [ctx]
        wait_until(lambda: gone() is None, 20.0, "that the thread is freed")
        assert gone() is None
    finally:
        gc.enable()
