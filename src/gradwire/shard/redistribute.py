"""Moves parts of a tensor between the ranks of a process group, from any layout to any other.

    scatter   one box on the source     ->  the shards
    gather    the shards                ->  one box on the destination
    all ranks get everything: the same, with a box of the whole tensor on every rank
    reshard   old shards                ->  new shards

All ranks compute the same plan without messages: each rank sends another exactly the elements that it has and that
belong there. Gradients take the opposite way, and those of elements that went to several ranks are added up (`is_sum`).

Small moves are one exchange between all ranks. Large ones are split into pieces, which are sent directly from the old
parts into the new ones where they are contiguous: fresh memory is slow, and a copy of everything needs a lot of it. Other
pieces go through two small buffers each way, of which one is filled while the other is being sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from gradwire.shard.layout import Box, Layout, Move, cut, plan_moves
from gradwire.shard.rank_loss import collective

PIECE_BYTES = 2**20
"""Bytes that one rank sends to another at a time."""

_MAX_EXCHANGE_BYTES = 2**22  # of all ranks together


@dataclass(slots=True)
class Traffic:
    """Counts what this process has sent to others by moves."""

    num_messages: int = 0
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        if num_bytes:
            self.num_messages += 1
            self.num_bytes += num_bytes


traffic = Traffic()


@dataclass(slots=True)
class _Plan:
    """The moves that concern this rank, and how many elements all ranks send."""

    local: list[Move] = field(default_factory=list)
    outgoing: dict[Any, list[Move]] = field(default_factory=lambda: defaultdict(list))
    incoming: dict[Any, list[Move]] = field(default_factory=lambda: defaultdict(list))
    num_sent: int = 0


def _plan(old: Layout, new: Layout, rank: int) -> _Plan:
    plan = _Plan()
    for move in plan_moves(old.boxes, new.boxes):
        source, target = old.places[move.source], new.places[move.target]
        plan.num_sent += move.box.num_elements if source != target else 0
        if source == target == rank:
            plan.local.append(move)
        elif source == rank:
            plan.outgoing[target].append(move)
        elif target == rank:
            plan.incoming[source].append(move)
    return plan


@dataclass(slots=True)
class _Ends:
    """Sources and destinations of moves on this rank."""

    old: Layout
    new: Layout
    sources: dict[int, torch.Tensor]
    targets: dict[int, torch.Tensor]
    is_sum: bool

    def source(self, item: Move) -> torch.Tensor:
        return self.sources[item.source][item.box.slices_in(self.old.boxes[item.source])]

    def target(self, item: Move) -> torch.Tensor:
        return self.targets[item.target][item.box.slices_in(self.new.boxes[item.target])]

    def put(self, item: Move, values: torch.Tensor) -> None:
        target = self.target(item)
        if self.is_sum:
            target += values.view(item.box.sizes)
        else:
            target.copy_(values.view(item.box.sizes))


def move(
    tensors: Sequence[torch.Tensor],
    old: Layout,
    new: Layout,
    group: Any,
    like: torch.Tensor,
    is_sum: bool = False,
) -> list[torch.Tensor]:
    """Return this rank's boxes of the new layout, in order. Every rank of the group must call it with the same layouts.

    `like` gives dtype and device, also where there is no tensor. With `is_sum`, elements in several old boxes are added up;
    otherwise each must be in one box only.
    """
    rank = dist.get_rank(group)
    plan = _plan(old, new, rank)
    make = torch.zeros if is_sum else torch.empty
    targets = {
        number: make(new.boxes[number].sizes, dtype=like.dtype, device=like.device) for number in new.numbers_at(rank)
    }
    readable = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]  # their memory is sent
    sources = dict(zip(old.numbers_at(rank), readable, strict=True))
    ends = _Ends(old, new, sources, targets, is_sum)
    for item in plan.local:
        ends.put(item, ends.source(item))
    if plan.num_sent * like.element_size() > _MAX_EXCHANGE_BYTES:
        _move_in_pieces(plan, ends, group, like)
    elif plan.num_sent:
        _move_at_once(plan, ends, group, like)
    return list(targets.values())


def _move_at_once(plan: _Plan, ends: _Ends, group: Any, like: torch.Tensor) -> None:
    ranks = range(dist.get_world_size(group))
    pieces = [ends.source(item).reshape(-1) for rank in ranks for item in plan.outgoing.get(rank, ())]
    flat = torch.cat(pieces) if pieces else like.new_empty(0)
    sent = [_size(plan.outgoing.get(rank, ())) for rank in ranks]
    arrived = exchange(flat, sent, [_size(plan.incoming.get(rank, ())) for rank in ranks], group)
    start = 0
    for rank in ranks:
        for item in plan.incoming.get(rank, ()):
            ends.put(item, arrived[start : start + item.box.num_elements])
            start += item.box.num_elements


def _size(items: Sequence[Move]) -> int:
    return sum(item.box.num_elements for item in items)


def exchange(flat: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> torch.Tensor:
    """Send a piece of a flat tensor to every rank, and return a flat tensor of a piece from every rank.

    `sent` and `received` are the numbers of elements to and from each rank; all ranks must call it.
    """
    rank, width = dist.get_rank(group), flat.element_size()
    for peer, number in enumerate(sent):
        if peer != rank:
            traffic.add(number * width)
    arrived = torch.empty(sum(received), dtype=flat.dtype, device=flat.device)
    with collective(group, "exchange between all ranks"):
        dist.all_to_all_single(
            arrived.view(torch.uint8),
            flat.view(torch.uint8),
            [number * width for number in received],
            [number * width for number in sent],
            group,
        )
    return arrived


def _move_in_pieces(plan: _Plan, ends: _Ends, group: Any, like: torch.Tensor) -> None:
    # In each round every rank sends to one other, and receives from one other.
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    pipe = _Pipe(ends, group, like)
    for distance in range(1, num_ranks):
        to, origin = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        limit = max(1, PIECE_BYTES // like.element_size())
        outgoing = _cut_all(plan.outgoing.get(to, ()), limit)
        incoming = _cut_all(plan.incoming.get(origin, ()), limit)
        with collective(group, f"exchange of parts: to rank {to}, from rank {origin}", pipe.sends):
            for sent, received in zip_longest(outgoing, incoming):
                pipe.step(to, sent, origin, received)
    with collective(group, "exchange of parts", pipe.sends):
        pipe.drain()


def _cut_all(items: Sequence[Move], limit: int) -> list[Move]:
    return [Move(item.source, item.target, box) for item in items for box in cut(item.box, limit)]


class _Pipe:
    """Sends and receives pieces, two each way at a time."""

    def __init__(self, ends: _Ends, group: Any, like: torch.Tensor) -> None:
        self._ends, self._group, self._like = ends, group, like
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._turn = 0
        self.sends: deque[Any] = deque()  # requests of pieces that may still be under way
        self._waiting: tuple[Any, Move | None, torch.Tensor | None] | None = None

    def step(self, to: int, sent: Move | None, origin: int, received: Move | None) -> None:
        """Send one piece and receive one, if there are any; return when the previous ones have arrived."""
        operations, buffer = [], None
        if received is not None:
            target = self._ends.target(received)
            buffer = None if target.is_contiguous() and not self._ends.is_sum else self._buffer("in", received.box)
            operations.append(self._operation(dist.irecv, target if buffer is None else buffer, origin))
        if sent is not None:
            source = self._ends.source(sent)
            if not source.is_contiguous():
                source = self._buffer("out", sent.box).view(sent.box.sizes).copy_(source)
            traffic.add(source.numel() * source.element_size())
            operations.append(self._operation(dist.isend, source, to))
        requests = dist.batch_isend_irecv(operations)
        if sent is not None:
            self.sends.append(requests[-1])
        self.drain()
        self._waiting = requests, received, buffer
        self._turn = 1 - self._turn

    def drain(self) -> None:
        """Wait until all pieces have been sent and received."""
        if self._waiting is None:
            return
        requests, received, buffer = self._waiting
        self._waiting = None
        for request in requests:
            request.wait()
        if self.sends and self.sends[0] is requests[-1]:
            self.sends.popleft()
        if received is not None and buffer is not None:
            self._ends.put(received, buffer)

    def _buffer(self, name: str, box: Box) -> torch.Tensor:
        size = box.num_elements
        found = self._buffers.get((name, self._turn))
        if found is None or found.numel() < size:
            found = torch.empty(size, dtype=self._like.dtype, device=self._like.device)
            self._buffers[name, self._turn] = found
        return found[:size]

    def _operation(self, kind: Any, tensor: torch.Tensor, rank: int) -> Any:
        peer = dist.get_global_rank(self._group, rank) if self._group is not None else rank
        return dist.P2POp(kind, tensor.view(-1).view(torch.uint8), peer, self._group)
