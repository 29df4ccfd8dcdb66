"""Moves parts of a tensor between the ranks of a process group, from any layout to any other.

    scatter   one box on the source     ->  the shards
    gather    the shards                ->  one box on the destination
    all ranks get everything: the same, with a box of the whole tensor on every rank
    reshard   old shards                ->  new shards

All ranks make the same plan, so nobody has to ask: each pair of ranks exchanges one message at most, made of exactly the
elements that are on the one and belong on the other. Gradients of what was moved go the other way, and elements that went to
several ranks add up (`is_sum`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from gradwire.shard._geometry import Move, plan_moves
from gradwire.shard.layouts import Layout


@dataclass(slots=True)
class Traffic:
    """What this process has sent to others by moves."""

    num_messages: int = 0
    num_bytes: int = 0


traffic = Traffic()


@dataclass(slots=True)
class _Plan:
    """The moves that concern this rank."""

    local: list[Move] = field(default_factory=list)
    outgoing: dict[Any, list[Move]] = field(default_factory=lambda: defaultdict(list))
    incoming: dict[Any, list[Move]] = field(default_factory=lambda: defaultdict(list))


def _plan(old: Layout, new: Layout, rank: int) -> _Plan:
    plan = _Plan()
    for move in plan_moves(old.boxes, new.boxes):
        source, target = old.places[move.source], new.places[move.target]
        if source == target == rank:
            plan.local.append(move)
        elif source == rank:
            plan.outgoing[target].append(move)
        elif target == rank:
            plan.incoming[source].append(move)
    return plan


def move(
    tensors: Sequence[torch.Tensor],
    old: Layout,
    new: Layout,
    group: Any,
    like: torch.Tensor,
    is_sum: bool = False,
) -> list[torch.Tensor]:
    """This rank's boxes of the new layout, in order.

    Every rank of the group must call it with the same layouts.

    Args:
        tensors: This rank's boxes of the old layout, in order.
        old: Who has what.
        new: Who is to have what.
        group: The process group.
        like: Tells dtype and device, also where there is no tensor.
        is_sum: Whether elements that several old boxes have add up; else they must be in one only.
    """
    rank = dist.get_rank(group)
    plan = _plan(old, new, rank)
    sources = dict(zip(old.of(rank), tensors, strict=True))
    make = torch.zeros if is_sum else torch.empty
    targets = {number: make(new.boxes[number].sizes, dtype=like.dtype, device=like.device) for number in new.of(rank)}

    def put(item: Move, values: torch.Tensor) -> None:
        part = targets[item.target][item.box.slices_in(new.boxes[item.target])]
        if is_sum:
            part += values.view(item.box.sizes)
        else:
            part.copy_(values.view(item.box.sizes))

    def take(item: Move) -> torch.Tensor:
        return sources[item.source].detach()[item.box.slices_in(old.boxes[item.source])]

    messages = {peer: torch.cat([take(item).reshape(-1) for item in items]) for peer, items in plan.outgoing.items()}
    arrived = exchange(messages, {peer: _size(items) for peer, items in plan.incoming.items()}, group, like)
    for item in plan.local:
        put(item, take(item).reshape(-1))
    for peer, items in sorted(plan.incoming.items()):  # in order, so that sums are the same on every run
        start = 0
        for item in items:
            put(item, arrived[peer][start : start + item.box.num_elements])
            start += item.box.num_elements
    return list(targets.values())


def _size(items: Sequence[Move]) -> int:
    return sum(item.box.num_elements for item in items)


def exchange(
    messages: dict[int, torch.Tensor], sizes: dict[int, int], group: Any, like: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Sends one flat tensor to each of some ranks, and receives one of known size from each of others.

    Those that are empty are neither sent nor expected.
    """
    arrived = {peer: torch.empty(size, dtype=like.dtype, device=like.device) for peer, size in sizes.items()}
    operations = [
        dist.P2POp(dist.irecv, buffer.view(torch.uint8), _global(group, peer), group)
        for peer, buffer in arrived.items()
        if buffer.numel()
    ]
    for peer, message in messages.items():
        if message.numel():
            traffic.num_messages += 1
            traffic.num_bytes += message.numel() * message.element_size()
            operations.append(dist.P2POp(dist.isend, message.view(torch.uint8), _global(group, peer), group))
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return arrived


def _global(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank) if group is not None else rank
