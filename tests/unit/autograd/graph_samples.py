"""Graphs and answers of workers for tests, without workers."""

from __future__ import annotations

import random

from gradwire.autograd.distributed_graph import DistributedGraph, GraphMessage, GraphNode, GraphWorker
from gradwire.autograd.worker_views import MessageView, PassView, Segment, Shortcut, WaitingView, WorkerView

AWKWARD = 'a"b\'<script>&amp;]]>\\ #quot; --> |x| "; } \u202e 梯度 %% end'
"""A name with everything that some format minds."""


def small_graph(name: str = "layers:block", worker: str = "worker0") -> DistributedGraph:
    """A driver that sends to a worker, which passes something on to a third that does not answer."""
    return DistributedGraph(
        7,
        (GraphWorker("driver"), GraphWorker(worker, True, 1, 1, 2), GraphWorker("gone", answered=False)),
        (
            GraphNode("n0", "driver", "segment", ("mul",), 1, 1, 1024),
            GraphNode("n1", worker, "segment", (name, "relu"), 2, 2, 5000),
            GraphNode("n2", "driver", "segment", is_passed_on=True),
            GraphNode("n3", "gone", "unknown"),
            GraphNode("n4", "driver", "roots", ("sum",), 1),
        ),
        (
            GraphMessage(11, "n0", "n1", name, False, "train.py:3, in step", 1, 512),
            GraphMessage(12, "n1", "n2", name, True, "", 1, 2048, waits_for="driver"),
            GraphMessage(13, "n2", "n3", name, False, "train.py:4, in step", 1, None, has_arrived=False),
        ),
        (("n0", "n4"),),
        3,
    )


def random_views(seed: int) -> list[WorkerView]:
    """What workers might say, honest or not: every type is right, and nothing else need be."""
    rng = random.Random(seed)
    names = ["a", "b", "c", AWKWARD][: rng.randint(1, 4)]
    peers = [*names, "stranger"]

    def number() -> int:
        return rng.randrange(12)

    def numbers() -> tuple[int, ...]:
        return tuple(number() for _ in range(rng.randint(0, 4)))

    def messages() -> tuple[MessageView, ...]:
        return tuple(
            MessageView(number(), rng.choice(peers), rng.choice(("m:f", "", AWKWARD)), "", 1, rng.choice((0, 1 << 50)))
            for _ in range(rng.randint(0, 8))
        )

    def segments() -> tuple[Segment, ...]:
        return tuple(
            Segment(number(), numbers(), numbers(), rng.random() < 0.3, number(), ("x", AWKWARD)[: rng.randint(0, 2)])
            for _ in range(rng.randint(0, 6))
        )

    def passes() -> tuple[PassView, ...]:
        waiting = tuple(WaitingView(number(), rng.choice(peers), "m:f") for _ in range(rng.randint(0, 3)))
        offered = tuple(Shortcut(number(), number(), rng.choice(peers)) for _ in range(rng.randint(0, 3)))
        return (PassView(1, rng.choice(peers), "smart", "running", 0, (), waiting, offered, numbers()),)

    return [
        WorkerView(name, (), number(), number(), number(), messages(), messages(), segments(), passes())
        for name in names
    ]
