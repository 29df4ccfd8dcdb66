"""Walks a worker's part of the autograd graph, once for each pass.

It learns which recvs and leaves the sources (roots and sends) reach, and which sources must run together because they
share an interior node. A leaf that two sources share does not tie them together, unless it has hooks: those must see the
sum of the pass, once. Hooks that look at ``.grad`` are not meant: they run at the end (`local_engine.run_accumulators`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from gradwire._torch import leaf_hooks, sequence_number, set_sequence_number
from gradwire.autograd._backward_state import Component, Origin
from gradwire.autograd.functions import AccumulateGrad, RecvNode

Node = Any  # torch.autograd.graph.Node, whose attributes depend on what it is
Target = torch.Tensor | tuple[int, int]
"""Destination of a gradient: a leaf, or a received tensor by its message's id and its number in the message."""


class Recv(Protocol):
    @property
    def is_watched(self) -> bool: ...  # whether hooks are registered on its tensors
    @property
    def num_tensors(self) -> int: ...


_ROOTS = 0  # index of the roots among the sources; sends follow in the order in which they were made


class LocalGraph:
    """The part of this worker's graph that the sources of one pass reach."""

    def __init__(
        self,
        roots: Sequence[Node],  # empty on workers that did not call backward
        sends: Mapping[int, Node | list[torch.Tensor]],  # in the order in which they were made; `RecordedSend.start`
        context_recvs: Mapping[int, Recv],  # others are not part of the pass
    ) -> None:
        self._starts: list[Sequence[Node]] = [roots]
        self._bare: dict[int, list[torch.Tensor]] = {}  # by source: sends of nothing but leaves, without hooks
        for source, start in enumerate(sends.values(), 1):
            if type(start) is list:
                self._bare[source] = start
                self._starts.append(())
            else:
                self._starts.append((start,))
        self._send_ids = list(sends)
        self._context_recvs = context_recvs
        self._owner: dict[Node, int] = {}
        self._parent: list[int] = list(range(len(self._starts)))
        self._leaves: list[dict[int, torch.Tensor]] = []
        self._recvs: list[list[int]] = []
        self._walk()
        self.components: list[Component] = []
        self.leaves: list[list[torch.Tensor]] = []  # for each component, those it reaches
        self.has_leaves = False  # whether any component reaches one
        # For each component that is one send with nothing to compute behind it, where its tensors came from, in the order
        # of the message; None for all others.
        self.direct: list[list[Target] | None] = []
        # Sends of received tensors only, which nothing else here uses; with their origins.
        self.untouched: dict[int, tuple[Origin, ...]] = {}
        self._component_of: dict[int, int] = {}  # by the first of its sources
        self._collect()

    def _walk(self) -> None:
        owner = self._owner
        for source, start in enumerate(self._starts):
            leaves: dict[int, torch.Tensor] = {}
            recvs: list[int] = []
            self._leaves.append(leaves)
            self._recvs.append(recvs)
            for leaf in self._bare.get(source, ()):
                leaves[id(leaf)] = leaf
            stack = list(start)
            while stack:
                node = stack.pop()
                if node in owner:
                    if owner[node] != source:
                        self._join(owner[node], source)
                    continue
                kind = type(node)
                if kind is AccumulateGrad:
                    leaf = node.variable
                    leaves[id(leaf)] = leaf
                    if leaf_hooks(leaf):
                        owner[node] = source
                    continue
                owner[node] = source
                if kind is RecvNode:
                    if node.message_id in self._context_recvs:
                        recvs.append(node.message_id)
                    continue
                for following, _ in node.next_functions:
                    if following is not None:
                        stack.append(following)

    def _find(self, source: int) -> int:
        while self._parent[source] != source:
            self._parent[source] = self._parent[self._parent[source]]
            source = self._parent[source]
        return source

    def _join(self, one: int, other: int) -> None:
        first, second = sorted((self._find(one), self._find(other)))
        self._parent[second] = first

    def _collect(self) -> None:
        groups: dict[int, list[int]] = {}
        for source, parent in enumerate(self._parent):
            if source != _ROOTS or self._starts[_ROOTS]:
                head = source if parent == source else self._find(source)
                groups.setdefault(head, []).append(source)
        for head, sources in groups.items():
            self._component_of[head] = len(self.components)
            leaves, recvs, sends = self._leaves[head], self._recvs[head], []
            for source in sources:
                if source != head:
                    leaves.update(self._leaves[source])
                    recvs += self._recvs[source]
                if source != _ROOTS:
                    sends.append(self._send_ids[source - 1])
            self.components.append(Component(tuple(sends), frozenset(recvs), head == _ROOTS))
            self.leaves.append(list(leaves.values()))
            self.has_leaves = self.has_leaves or bool(leaves)
            if head in self._bare:
                self.direct.append([*self._bare[head]])
            elif len(sources) == 1 and head != _ROOTS:
                self.direct.append(self._targets_of(sends[0], self._starts[head][0]))
            else:
                self.direct.append(None)

    def _targets_of(self, send: int, node: Node) -> list[Target] | None:
        """Return the origins of a send's tensors, if these are only leaves and received tensors without hooks."""
        found: list[Target] = []
        origins: list[Origin] = []
        for following, number in node.next_functions:
            kind = type(following)
            if kind is AccumulateGrad and not leaf_hooks(following.variable):
                found.append(following.variable)
                continue
            recv = self._context_recvs.get(following.message_id) if kind is RecvNode else None
            if recv is None or recv.is_watched:
                return None
            found.append((following.message_id, number))
            origins.append((following.message_id, number, recv.num_tensors))
        if len(origins) == len(found):
            self.untouched[send] = tuple(origins)
        return found

    def inputs_in(self, index: int, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the wanted tensors that a component reaches, each once."""
        leaves = {id(leaf) for leaf in self.leaves[index]}
        found = []
        for tensor in dict.fromkeys(wanted):
            if tensor.grad_fn is None:
                is_here = id(tensor) in leaves
            else:
                source = self._owner.get(tensor.grad_fn)
                is_here = source is not None and self._component_of[self._find(source)] == index
            if is_here:
                found.append(tensor)
        return found

    def reached_by(self, index: int, sends: Collection[int]) -> set[int]:
        """Return the recvs of a component that can be reached from these sends, and from its roots if it has any."""
        wanted = set(sends)
        stack = list(self._starts[_ROOTS]) if self.components[index].has_roots else []
        for position, send in enumerate(self._send_ids, 1):
            if send in wanted:
                stack += self._starts[position]
        seen: set[Node] = set()
        reached: set[int] = set()
        while stack:
            node = stack.pop()
            if node in seen or type(node) is AccumulateGrad:
                continue
            seen.add(node)
            if type(node) is RecvNode:
                reached.add(node.message_id)
                continue
            stack.extend(following for following, _ in node.next_functions if following is not None)
        return reached

    def make_room_below(self) -> None:
        """Give every node a sequence number above 0, so that gates, which have 0, come after all other ready work.

        Numbers count from 0 in every thread, so few nodes have it.
        """
        for node in self._owner:
            if sequence_number(node) == 0:
                set_sequence_number(node, 1)
