"""The graphs that go wrong elsewhere, on real workers, against one process that runs the same functions."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from autograd import graphs, worlds
from autograd.graphs import FIRST, Graph
from gradwire.cluster.api import Cluster
from gradwire.errors import UnsettledSend

Tensor = torch.Tensor


def _name(graph: Callable[..., object]) -> str:
    return graph.__name__


@pytest.mark.parametrize("graph", [*graphs.UNUSED, *graphs.USED], ids=_name)
def test_smart(cluster: Cluster, graph: Graph) -> None:
    assert worlds.difference(worlds.gradients_there(graph), worlds.gradients_here(graph)) == ""


@pytest.mark.parametrize("graph", graphs.USED, ids=_name)
def test_fast(cluster: Cluster, graph: Graph) -> None:
    assert worlds.difference(worlds.gradients_there(graph, "fast"), worlds.gradients_here(graph)) == ""


def test_fast_with_something_unused_names_it(cluster: Cluster) -> None:
    x, y = worlds.make_inputs()
    with gw.autograd.context() as ctx:
        cluster.workers[0].call(graphs.layer, x)
        loss = cluster.workers[1].call(graphs.layer, y).sum()
        with pytest.raises(UnsettledSend, match="layer") as caught:
            ctx.backward(loss, mode="fast")
        (send,) = caught.value.sends
        assert all(word in send for word in ("graphs:layer", "test_graphs.py", "driver", FIRST))
        assert not ctx.gradients()


def test_a_graph_again_and_again(cluster: Cluster) -> None:
    """Nothing of one context shows in the next."""
    expected = worlds.gradients_here(graphs.unused_beside_skip)
    for _ in range(20):
        assert worlds.difference(worlds.gradients_there(graphs.unused_beside_skip), expected) == ""


def _processor_time(cluster: Cluster) -> float:
    return time.process_time() + sum(worker.call(time.process_time) for worker in cluster.workers)


def _cost_of_chain(cluster: Cluster, num_blocks: int) -> float:
    """Processor time, on all workers: the time on the clock depends on what else the machine does."""
    x, y = worlds.make_inputs()
    with gw.autograd.context() as ctx:
        loss = graphs.chain(num_blocks, x, y)
        before = _processor_time(cluster)
        ctx.backward(loss)
        return _processor_time(cluster) - before


def test_time_grows_linearly_with_the_number_of_blocks(cluster: Cluster) -> None:
    _cost_of_chain(cluster, 40)
    short = min(_cost_of_chain(cluster, 10) for _ in range(5))
    long = min(_cost_of_chain(cluster, 80) for _ in range(5))
    assert long < 8 * short * 3, f"10 blocks take {short:.4f} s, 80 blocks {long:.4f} s"
