"""How many workers fit on the nodes of a Ray cluster, and what is said when they do not."""

from __future__ import annotations

import pytest

from gradwire.cluster.ray_placement import Node, Strategy, count_room, explain_missing

SMALL = {"CPU": 2.0}
LARGE = {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("bundle", "strategy", "room"),
    [
        ({"CPU": 1}, "SPREAD", 10),
        ({"CPU": 1}, "PACK", 10),
        ({"CPU": 1}, "STRICT_SPREAD", 2),
        ({"CPU": 1}, "STRICT_PACK", 8),
        ({"CPU": 3}, "SPREAD", 2),
        ({"CPU": 1, "GPU": 0.5}, "SPREAD", 4),
        ({"CPU": 1, "GPU": 1}, "STRICT_SPREAD", 1),
        ({"CPU": 0.1}, "STRICT_PACK", 80),  # sums of tenths are not exact
        ({"TPU": 1}, "SPREAD", 0),
    ],
)
def test_room_by_strategy(bundle: dict[str, float], strategy: Strategy, room: int) -> None:
    assert count_room([SMALL, LARGE], bundle, strategy) == room


def test_no_node_has_no_room() -> None:
    assert {count_room([], {"CPU": 1}, "STRICT_PACK"), count_room([], {"CPU": 1}, "SPREAD")} == {0}


def test_what_is_missing_is_said_for_each_node() -> None:
    nodes = [
        Node("a" * 40, "10.0.0.4", SMALL, {"CPU": 1.0}),
        Node("b" * 40, "10.0.0.5", LARGE, {"CPU": 8.0, "GPU": 1.0}),
    ]
    assert explain_missing(3, {"CPU": 2, "GPU": 1}, "SPREAD", nodes).splitlines() == [
        "Ray cannot place 3 bundles of {CPU: 2, GPU: 1} with strategy SPREAD: there is room for 1 now, and for 2 on an idle "
        "cluster.",
        "  node 10.0.0.4 (aaaaaaaa): 1 of 2 CPU free, 0 of 0 GPU free; the bundle can never fit there: not enough GPU",
        "  node 10.0.0.5 (bbbbbbbb): 8 of 8 CPU free, 1 of 2 GPU free",
        "Free resources, add nodes, or request less with n, resources or strategy.",
    ]
    assert "no node is alive" in explain_missing(1, {"CPU": 2}, "SPREAD", [])
