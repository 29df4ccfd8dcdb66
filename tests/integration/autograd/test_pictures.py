"""The graph of a context on several processes, and the picture in the documentation."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import gradwire as gw
from autograd import graphs
from autograd.worlds import num_contexts
from gradwire.cluster.api import Cluster
from gradwire.testing import wait_until

SCRIPTS = Path(__file__).parents[3] / "docs" / "scripts"
PICTURE = SCRIPTS.parent / "images" / "distributed-graph.svg"


def make_importable(folder: str) -> None:
    sys.path.insert(0, folder)


def test_graph_of_a_program(cluster: Cluster) -> None:
    first, second, third = cluster.workers
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        hidden = first.call(graphs.layer, x)
        loss = (hidden + second.call(graphs.layer, hidden)).sum()
        before = ctx.graph(loss)
        ctx.backward(loss, retain_graph=True)
        wait_until(lambda: all(item.num_gradients for item in ctx.graph().workers), 10.0, "that all are told")
        after = ctx.graph(loss)
    worker = {node.id: node.worker for node in before.nodes}
    assert [(worker[item.source], worker[item.target]) for item in before.messages] == [
        ("driver", first.name),
        (first.name, "driver"),
        ("driver", second.name),
        (second.name, "driver"),
    ]
    assert [item.name for item in before.workers] == ["driver", first.name, second.name]
    assert third.name not in before.to_svg()
    assert (before.nodes, before.messages, before.links) == (after.nodes, after.messages, after.links)
    ElementTree.fromstring(after.to_svg())


def test_picture_in_the_documentation_is_what_its_script_draws(
    shared_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is meant to be another one now: ``python docs/scripts/graph_picture.py``."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for worker in shared_cluster.workers:
        worker.call(make_importable, str(SCRIPTS))
    import graph_picture

    try:
        picture = graph_picture.draw(*shared_cluster.workers[:2])
    finally:
        del sys.modules["graph_picture"]
    assert picture == PICTURE.read_text()
    wait_until(lambda: not num_contexts(shared_cluster.workers), 10.0, "that the context is released")
