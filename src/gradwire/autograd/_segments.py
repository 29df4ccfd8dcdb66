"""Finds the operators that a worker ran between the messages of a context, for `graph`.

Sends are walked in the order in which they were made, the roots of a pass last. A node belongs to the first that reaches
it, so each segment is what was computed for a send beyond what earlier ones had needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from gradwire.autograd.functions import AccumulateGrad, RecvNode
from gradwire.autograd.messages import NO_ID
from gradwire.autograd.worker_views import MOST_OPERATORS, Segment, first
from gradwire.types import MOST_CHARS

_MOST_NODES: Final = 20_000  # looked at for one answer: some 20 ms
_VIEWS: Final = {"t", "view", "unsafe_view", "expand", "alias", "reshape_alias"}  # not worth naming beside others


class Send(Protocol):
    @property
    def behind(self) -> Sequence[Any]: ...  # nodes, or leaves


class Recv(Protocol):
    @property
    def is_watched(self) -> bool: ...


class _Walk:
    """The part of the graph that one source reaches."""

    def __init__(self, message_id: int, start: Iterable[Any]) -> None:
        self.message_id = message_id
        self.stack = list(start)
        self.recvs: dict[int, None] = {}
        self.builds_on: dict[int, None] = {}
        self.operators: dict[str, None] = {}  # from the last to the first
        self.num_operators = 0
        self.leaves: dict[int, torch.Tensor] = {}


def find_segments(
    sends: Mapping[int, Send],  # in the order in which they were made
    recvs: Mapping[int, Recv],
    roots: Sequence[torch.Tensor] = (),
    *,
    has_contents: bool = True,
) -> tuple[Segment, ...]:
    """Return a segment for each send, and one for the roots if there are any.

    Args:
        sends: Those of the context, by id.
        recvs: Likewise.
        roots: Of a pass that may come.
        has_contents: Say which operators and how many parameters there are, too.
    """
    walks = [_Walk(message_id, send.behind) for message_id, send in sends.items()]
    if roots:
        walks.append(_Walk(NO_ID, [root.grad_fn or root for root in roots]))
    owner: dict[Any, int] = {}
    num_left = _MOST_NODES
    for walk in walks:
        num_left -= _follow(walk, owner, recvs, num_left)
    users: dict[int, int] = {}
    for walk in walks:
        for recv in walk.recvs:
            users[recv] = users.get(recv, 0) + 1
    return tuple(_segment(walk, recvs, users, has_contents) for walk in walks)


def _follow(walk: _Walk, owner: dict[Any, int], recvs: Mapping[int, Recv], most: int) -> int:
    """Walk from one source up to nodes of other sources; return how many nodes were visited."""
    count = 0
    while walk.stack and count < most:
        node = walk.stack.pop()
        count += 1
        if isinstance(node, torch.Tensor):
            walk.leaves[id(node)] = node
        elif type(node) is AccumulateGrad:
            walk.leaves[id(node.variable)] = node.variable
        elif type(node) is RecvNode:
            if node.message_id in recvs:
                walk.recvs[node.message_id] = None
        elif node in owner:
            if owner[node] != walk.message_id:
                walk.builds_on[owner[node]] = None
        else:
            owner[node] = walk.message_id
            walk.num_operators += 1
            walk.operators[operator_name(type(node).__name__)] = None
            walk.stack += [following for following, _ in node.next_functions if following is not None]
    return count


def _segment(walk: _Walk, recvs: Mapping[int, Recv], users: Mapping[int, int], has_contents: bool) -> Segment:
    is_bare = bool(walk.recvs) and not (walk.num_operators or walk.leaves or walk.builds_on)
    is_passed_on = is_bare and all(users[recv] == 1 and not recvs[recv].is_watched for recv in walk.recvs)
    ids = (walk.message_id, first(walk.recvs), first(walk.builds_on), is_passed_on and walk.message_id != NO_ID)
    if not has_contents:
        return Segment(*ids)
    names = list(walk.operators)[::-1]
    told = [name for name in names if name not in _VIEWS] or names
    leaves = walk.leaves.values()
    num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves if leaf.layout is torch.strided)
    return Segment(*ids, walk.num_operators, tuple(told[:MOST_OPERATORS]), len(leaves), num_bytes)


def operator_name(node: str) -> str:
    """Return the name of an operator from that of its node: ``LogSoftmaxBackward0`` is ``log_softmax``."""
    name, is_builtin = re.subn(r"Backward\d+$", "", node)
    if is_builtin:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return name.removesuffix("Backward")[:MOST_CHARS] or node[:MOST_CHARS]
