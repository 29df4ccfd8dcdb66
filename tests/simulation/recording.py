"""What workers recorded in a forward program, as graphs of numbers.

Every node is linear in what it was made from, so a gradient is a sum over paths of products of small whole numbers: exact,
and cheap to compute by other means. A gradient that is 0 because paths cancel differs from none at all, as in torch.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Steps = Generator[None, None, None]


class Exchange(NamedTuple):
    """A message that one worker has recorded."""

    message_id: int
    peer: int
    is_send: bool


class Kind(enum.Enum):
    """What a node stands for."""

    LEAF = "leaf"
    OPERATION = "operation"
    SEND = "send"
    RECV = "recv"


@dataclass(frozen=True, slots=True)
class Value:
    """One output of a node: what a tensor that requires grad is in torch."""

    node: Node
    output: int = 0


@dataclass(eq=False, slots=True)
class Node:
    """A step of the forward program.

    Attributes:
        worker: Where it is.
        inputs: What it was made from.
        weights: For each input, the derivative of each output by it.
        message_id: Of sends and recvs.
        has_hooks: Of leaves: somebody looks at the gradient.
        fails: Whether its backward raises.
    """

    kind: Kind
    worker: int
    inputs: tuple[Value, ...] = ()
    weights: tuple[tuple[int, ...], ...] = ()
    num_outputs: int = 1
    message_id: int = 0
    has_hooks: bool = False
    fails: bool = False

    def __repr__(self) -> str:
        return f"<{self.kind.value} {self.message_id or hex(id(self))} on {self.worker}>"


@dataclass(slots=True)
class Record:
    """What one worker has recorded so far."""

    leaves: list[Node] = field(default_factory=list)
    kept: list[Value] = field(default_factory=list)  # left behind by one call for the next ones
    exchanges: list[Exchange] = field(default_factory=list)
    sends: dict[int, Node] = field(default_factory=dict)
    recvs: dict[int, Node] = field(default_factory=dict)


class Recording:
    """A forward program that has come as far as its loss.

    Args:
        root: Rank of the worker that calls backward.
        records: By rank; with leaves.

    Attributes:
        roots: Where backward begins, and the gradients given there.
        sends: All sends, by message id.
        operations: All operations.
        tasks: Calls that are still under way; each `next` is one step.
    """

    def __init__(self, root: int, records: list[Record]) -> None:
        self.root = root
        self.records = records
        self.roots: list[tuple[Value, int]] = []
        self.sends: dict[int, Node] = {}
        self.operations: list[Node] = []
        self.tasks: list[Steps] = []

    # -- recording -------------------------------------------------------------------------------------------------

    def operate(self, worker: int, inputs: Sequence[Value], weights: Sequence[tuple[int, ...]]) -> list[Value]:
        """Records an operation; its outputs."""
        node = Node(Kind.OPERATION, worker, tuple(inputs), tuple(weights), len(weights[0]))
        self.operations.append(node)
        return [Value(node, output) for output in range(node.num_outputs)]

    def record_send(self, worker: int, peer: int, values: Sequence[Value]) -> int:
        """Records a message; 0 if nothing in it requires grad."""
        if not values:
            return 0
        message_id = len(self.sends) + 1
        node = Node(Kind.SEND, worker, tuple(values), message_id=message_id)
        self.sends[message_id] = self.records[worker].sends[message_id] = node
        self.records[worker].exchanges.append(Exchange(message_id, peer, is_send=True))
        return message_id

    def record_recv(self, worker: int, peer: int, message_id: int) -> list[Value]:
        """Records that a message arrived; what is in it."""
        if not message_id:
            return []
        node = Node(Kind.RECV, worker, num_outputs=len(self.sends[message_id].inputs), message_id=message_id)
        self.records[worker].recvs[message_id] = node
        self.records[worker].exchanges.append(Exchange(message_id, peer, is_send=False))
        return [Value(node, output) for output in range(node.num_outputs)]

    # -- the oracle ------------------------------------------------------------------------------------------------

    def gradients_in_one_process(self) -> list[dict[Node, int]]:
        """By rank: the gradient of each leaf that has one, found without workers, messages or passes."""
        order: list[Node] = []
        seen: set[Node] = set()

        def visit(node: Node) -> None:
            if node not in seen:
                seen.add(node)
                for value in self._behind(node):
                    visit(value.node)
                order.append(node)

        for value, _ in self.roots:
            visit(value.node)
        totals: dict[Value, int] = {}
        for value, gradient in self.roots:
            totals[value] = totals.get(value, 0) + gradient
        for node in reversed(order):
            for number, value in enumerate(self._behind(node)):
                found = self._gradient_along(node, number, totals)
                if found is not None:
                    totals[value] = totals.get(value, 0) + found
        return [{leaf: totals[Value(leaf)] for leaf in item.leaves if Value(leaf) in totals} for item in self.records]

    def _behind(self, node: Node) -> tuple[Value, ...]:
        return self.sends[node.message_id].inputs if node.kind is Kind.RECV else node.inputs

    @staticmethod
    def _gradient_along(node: Node, number: int, totals: dict[Value, int]) -> int | None:
        if node.kind is Kind.RECV:
            return totals.get(Value(node, number))
        return weighted(node.weights[number], [totals.get(Value(node, output)) for output in range(node.num_outputs)])


def weighted(weights: Sequence[int], gradients: Sequence[int | None]) -> int | None:
    """What a node hands on to one of its inputs; None if none of its outputs has a gradient."""
    found = [weight * gradient for weight, gradient in zip(weights, gradients, strict=True) if gradient is not None]
    return sum(found) if found else None
