"""Walks a worker's part of the autograd graph, once for each pass.

It learns which recvs and leaves the sources (roots and sends) reach, and which sources must run together because they
share an interior node. A leaf that two sources share does not tie them together, unless it has hooks: those must see the
sum of the pass, once. Hooks that look at ``.grad`` are not meant: they run at the end (`accumulators`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from gradwire.autograd._backward_state import Component, Origin
from gradwire.autograd.functions import AccumulateGrad, RecvNode

Node = Any  # torch.autograd.graph.Node, whose attributes depend on what it is
Target = torch.Tensor | tuple[int, int]
"""Where a gradient goes: a leaf, or one of the tensors that came in a message, by its id and the tensor's number."""


class Recv(Protocol):
    """A message that arrived, as the graph sees it."""

    @property
    def is_watched(self) -> bool:
        """Whether hooks want to see its gradients here."""

    @property
    def num_tensors(self) -> int:
        """How many of its tensors were recorded."""


_ROOTS = 0  # index of the roots among the sources; sends follow in the order in which they were made


class LocalGraph:
    """What the sources of one pass reach.

    Args:
        roots: Gradient functions of the roots; empty on workers that did not call backward.
        sends: The node of each send, in the order in which they were made.
        context_recvs: Recvs recorded in the context; others are no part of the pass.

    Attributes:
        components: Sources that must run together, with the recvs they reach.
        leaves: For each component, the leaf tensors it reaches.
        direct: For each component that is one send with nothing to compute behind it, where its tensors came from, in the
            order of the message; None for all others.
    """

    def __init__(self, roots: Sequence[Node], sends: Mapping[int, Node], context_recvs: Mapping[int, Recv]) -> None:
        self._starts: list[list[Node]] = [list(roots), *([node] for node in sends.values())]
        self._send_ids = list(sends)
        self._context_recvs = context_recvs
        self._owner: dict[Node, int] = {}
        self._parent = list(range(len(self._starts)))
        self._leaves: list[dict[int, torch.Tensor]] = [{} for _ in self._starts]
        self._recvs: list[list[int]] = [[] for _ in self._starts]
        for source in range(len(self._starts)):
            self._walk(source)
        self.components: list[Component] = []
        self.leaves: list[list[torch.Tensor]] = []
        self.direct: list[list[Target] | None] = []
        self._component_of: dict[int, int] = {}  # by the first of its sources
        self._collect()

    def _walk(self, source: int) -> None:
        owner, leaves = self._owner, self._leaves[source]
        stack = list(self._starts[source])
        while stack:
            node = stack.pop()
            known = owner.get(node)
            if known is not None:
                if known != source:
                    self._join(known, source)
                continue
            kind = type(node)
            if kind is AccumulateGrad:
                leaf = node.variable
                leaves[id(leaf)] = leaf
                if has_hooks(leaf):
                    owner[node] = source
                continue
            owner[node] = source
            if kind is RecvNode:
                if node.message_id in self._context_recvs:
                    self._recvs[source].append(node.message_id)
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
        for source in range(0 if self._starts[_ROOTS] else 1, len(self._starts)):
            groups.setdefault(self._find(source), []).append(source)
        for head, sources in groups.items():
            self._component_of[head] = len(self.components)
            leaves, recvs = self._leaves[head], self._recvs[head]
            for source in sources[1:]:
                leaves.update(self._leaves[source])
                recvs += self._recvs[source]
            has_roots = head == _ROOTS
            sends = tuple([self._send_ids[source - 1] for source in (sources[1:] if has_roots else sources)])
            self.components.append(Component(sends, frozenset(recvs), has_roots))
            self.leaves.append(list(leaves.values()))
            is_one_send = len(sources) == 1 and not has_roots
            self.direct.append(self._targets_of(self._starts[head][0]) if is_one_send else None)

    def _targets_of(self, send: Node) -> list[Target] | None:
        """Where a send's tensors came from, if that is nothing but leaves and other messages, and no hook wants to look."""
        found: list[Target] = []
        for node, number in send.next_functions:
            kind = type(node)
            if kind is AccumulateGrad and not has_hooks(node.variable):
                found.append(node.variable)
                continue
            recv = self._context_recvs.get(node.message_id) if kind is RecvNode else None
            if recv is None or recv.is_watched:
                return None
            found.append((node.message_id, number))
        return found

    @property
    def untouched(self) -> dict[int, tuple[Origin, ...]]:
        """Sends of nothing but tensors that came from others, of which nothing else was made; with their origins."""
        found = {}
        for component, targets in zip(self.components, self.direct, strict=True):
            came = [target for target in targets or () if isinstance(target, tuple)]
            if targets is not None and len(came) == len(targets):
                origins = [(recv, number, self._context_recvs[recv].num_tensors) for recv, number in came]
                found[component.sends[0]] = tuple(origins)
        return found

    def inputs_in(self, index: int, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of the wanted tensors that a component reaches, each once."""
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
        """Recvs of a component that can be reached from these sends, and from the roots if it has them."""
        wanted = set(sends)
        stack = list(self._starts[_ROOTS]) if self.components[index].has_roots else []
        stack += [self._starts[position][0] for position, send in enumerate(self._send_ids, 1) if send in wanted]
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
        """Gives every node a sequence number above 0, so that gates, which have 0, come after all other ready work.

        Numbers count from 0 in every thread, so few nodes have it.
        """
        for node in self._owner:
            if node._sequence_nr() == 0:
                node._set_sequence_nr(1)


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether hooks want to see the gradient of a leaf before it is accumulated."""
    return bool(leaf._backward_hooks)
