"""A stand-in for torch's engine on one worker: the same order of work, on numbers.

As in torch, a node runs once, when everything that leads to it has run, whether or not a gradient came along. Among the
nodes that are ready any may be next (torch's order depends on threads, so none is promised), but a gate is passed only when
nothing else is ready, and only the gate of the send made last, among those left, can be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gradwire.autograd._backward_state import Component, Origin
from simulation.recording import Kind, Node, Value, weighted

Gradients = tuple[int | None, ...]
_INTERIOR = (Kind.OPERATION, Kind.RECV)


class NodeFailed(Exception):
    """The backward of a node raised."""


def reached_from(starts: Iterable[Node]) -> set[Node]:
    """These nodes, and everything behind them on the same worker."""
    seen: set[Node] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += [value.node for value in node.inputs]
    return seen


class AbstractGraph:
    """What `gradwire.autograd._graph.LocalGraph` finds in torch's graph, found here by brute force.

    Args:
        roots: Empty on workers that did not call backward.
        sends: By message id, in the order in which they were made.
    """

    def __init__(self, roots: Sequence[Node], sends: Mapping[int, Node]) -> None:
        self._roots, self._sends = list(roots), sends
        sources: list[tuple[int, ...]] = [(), *((send,) for send in sends)] if roots else [(send,) for send in sends]
        reached = [reached_from(self._starts(source == (), source)) for source in sources]
        ties = [{node for node in nodes if node.kind in _INTERIOR or node.has_hooks} for nodes in reached]
        groups: list[tuple[set[Node], list[int]]] = []
        for index, nodes in enumerate(ties):
            tied = [group for group in groups if group[0] & nodes]
            groups = [group for group in groups if not group[0] & nodes]
            groups.append(
                (nodes.union(*(group[0] for group in tied)), [*(i for group in tied for i in group[1]), index])
            )
        self.has_leaves = any(node.kind is Kind.LEAF for nodes in reached for node in nodes)
        self.components = [
            self._make_component([sources[i] for i in sorted(members)], nodes) for nodes, members in groups
        ]

    def _starts(self, has_roots: bool, sends: Collection[int]) -> list[Node]:
        return [*(self._roots if has_roots else ()), *(self._sends[send] for send in sends)]

    @staticmethod
    def _make_component(sources: list[tuple[int, ...]], nodes: set[Node]) -> Component:
        recvs = frozenset(node.message_id for node in nodes if node.kind is Kind.RECV)
        return Component(tuple(send for source in sources for send in source), recvs, () in sources)

    @property
    def untouched(self) -> dict[int, tuple[Origin, ...]]:
        """Sends of nothing but what came from others, alone in their components; with where it came from."""
        alone = [item.sends[0] for item in self.components if len(item.sends) == 1 and not item.has_roots]
        return {
            send: tuple((node.message_id, output, node.num_outputs) for node, output in self._inputs_of(send))
            for send in alone
            if all(node.kind is Kind.RECV for node, _ in self._inputs_of(send))
        }

    def _inputs_of(self, send: int) -> list[tuple[Node, int]]:
        return [(value.node, value.output) for value in self._sends[send].inputs]

    def reached_by(self, index: int, sends: Collection[int]) -> set[int]:
        """Recvs that can be reached from these sends, and from the roots if the component has them."""
        nodes = reached_from(self._starts(self.components[index].has_roots, sends))
        return {node.message_id for node in nodes if node.kind is Kind.RECV}


class LocalRun:
    """One run of the engine through a component.

    Args:
        rng: Chooses among the nodes that are ready.
        roots: With their gradients.
        ready: Sends that are settled.
        gated: Sends that are not, in the order in which they were made.
        is_settled: Asked about those.
        gradients_of: What came for a send.
        fire: Called with the message id of a recv, and its gradients.
    """

    def __init__(
        self,
        rng: random.Random,
        roots: Sequence[tuple[Value, int]],
        ready: Sequence[Node],
        gated: Sequence[Node],
        is_settled: Callable[[int], bool],
        gradients_of: Callable[[int], Gradients | None],
        fire: Callable[[int, Gradients], None],
    ) -> None:
        self._rng, self._is_settled, self._gradients_of, self._fire = rng, is_settled, gradients_of, fire
        self._gates = list(gated)
        self._buffers: dict[Node, list[int | None]] = {}
        self._num_missing: dict[Node, int] = {}
        starts = dict.fromkeys([*(value.node for value, _ in roots), *ready])
        for node in reached_from([*starts, *gated]):
            for value in node.inputs:
                self._num_missing[value.node] = self._num_missing.get(value.node, 0) + 1
        for value, gradient in roots:
            self._add(value, gradient)
        self._ready = [node for node in starts if not self._num_missing.get(node)]
        self.found: list[tuple[Node, int]] = []  # leaves with their gradients, in the order of arrival

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self._ready and not self._gates

    @property
    def is_blocked(self) -> bool:
        """Whether it stands still at a gate."""
        return not self._ready and bool(self._gates) and not self._is_settled(self._gates[-1].message_id)

    def step(self) -> None:
        """Runs one node, or passes one gate; only where the run is neither finished nor blocked.

        Raises:
            NodeFailed: The node is one that fails.
        """
        if not self._ready:
            self._ready.append(self._gates.pop())
            return
        node = self._ready.pop(self._rng.randrange(len(self._ready)))
        for value, gradient in zip(node.inputs, self._run(node), strict=True):
            if gradient is not None:
                self._add(value, gradient)
            self._num_missing[value.node] -= 1
            if not self._num_missing[value.node]:
                self._ready.append(value.node)

    def _run(self, node: Node) -> Sequence[int | None]:
        """The backward of a node: what it hands on to each of its inputs."""
        if node.fails:
            raise NodeFailed(node)
        gradients = self._buffers.pop(node, [None] * node.num_outputs)
        if node.kind is Kind.SEND:
            return self._gradients_of(node.message_id) or (None,) * len(node.inputs)
        if node.kind is Kind.RECV:
            self._fire(node.message_id, tuple(gradients))
        elif node.kind is Kind.LEAF and gradients[0] is not None:
            self.found.append((node, gradients[0]))
        return [weighted(weights, gradients) for weights in node.weights]

    def _add(self, value: Value, gradient: int) -> None:
        buffer = self._buffers.setdefault(value.node, [None] * value.node.num_outputs)
        buffer[value.output] = gradient + (buffer[value.output] or 0)
