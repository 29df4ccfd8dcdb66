"""Count how many workers, which all need the same resources, fit on the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]
"""How Ray chooses nodes for the workers; the strict strategies fail where the others are best-effort."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a Ray cluster with its total and free resources."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def count_room(nodes: Iterable[Mapping[str, float]], bundle: Mapping[str, float], strategy: Strategy) -> int:
    """Return how many bundles can be placed on nodes that have so much each."""
    on_each = [min(int((has.get(name, 0.0) + 1e-9) // amount) for name, amount in bundle.items()) for has in nodes]
    if strategy == "STRICT_PACK":
        return max(on_each, default=0)
    if strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in on_each)
    return sum(on_each)


def explain_missing(count: int, bundle: Mapping[str, float], strategy: Strategy, nodes: Sequence[Node]) -> str:
    """Explain, node by node, why the bundles do not fit."""
    now = count_room([node.free for node in nodes], bundle, strategy)
    ever = count_room([node.total for node in nodes], bundle, strategy)
    lines = [
        f"Ray cannot place {count} bundle{'s' if count > 1 else ''} of {format_amounts(bundle)} with strategy {strategy}: "
        f"there is room for {now} now, and for {ever} on an idle cluster."
    ]
    for node in nodes:
        have = ", ".join(
            f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name} free" for name in bundle
        )
        lacking = [name for name, amount in bundle.items() if node.total.get(name, 0.0) < amount]
        never = f"; the bundle can never fit there: not enough {' or '.join(lacking)}" if lacking else ""
        lines.append(f"  node {node.address} ({node.node_id[:8]}): {have}{never}")
    if not nodes:
        lines.append("  no node is alive")
    lines.append("Free resources, add nodes, or request less with n, resources or strategy.")
    return "\n".join(lines)


def format_amounts(bundle: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items()) + "}"
