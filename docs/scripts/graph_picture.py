"""Draw docs/images/distributed-graph.svg: the autograd graph of a small model on two workers.

python docs/scripts/graph_picture.py [another file]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import gradwire as gw

PICTURE = Path(__file__).parents[1] / "images" / "distributed-graph.svg"
layers = nn.ModuleDict({"embed": nn.Linear(32, 64), "block": nn.Linear(64, 64), "head": nn.Linear(64, 10)})


def embed(x: torch.Tensor) -> torch.Tensor:
    return layers["embed"](x)


def block(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(layers["block"](x))


def head(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(layers["head"](x), dim=1)


def draw(first: gw.cluster.Worker, second: gw.cluster.Worker) -> str:
    """Run the forward pass on two workers, and return the picture of what it recorded."""
    with gw.autograd.context() as ctx:
        x = first.call(embed, torch.ones(16, 32))
        x = x + second.call(block, x)  # a skip connection
        loss = nn.functional.nll_loss(first.call(head, x), torch.zeros(16, dtype=torch.long))
        return ctx.graph(loss).to_svg()


if __name__ == "__main__":
    # Under its own name, so that workers import it: each has the layers, and no function takes them along.
    import graph_picture

    with gw.Cluster.local(2) as cluster:
        Path(*sys.argv[1:2] or [PICTURE]).write_text(graph_picture.draw(*cluster.workers))
