"""From a tensor in one place to its shards, a few megabytes at a time.

A copy of all that goes to others would double the memory of the source. Between ranks, `moving` takes care of that. To RPC
workers, shards are cut into pieces, and pieces go on their way in rounds: one of each shard, then the next.

    shard 0   |--1--|--2--|--3--|
    shard 1   |--1--|--2--|            round 1: two pieces, round 2: two, round 3: one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch

from gradwire import rpc
from gradwire.rref import RRef
from gradwire.shard import moving
from gradwire.shard._geometry import Box, cut
from gradwire.shard.engines import Engine, Part
from gradwire.shard.group_engine import GroupEngine
from gradwire.shard.layouts import Layout, Place, whole
from gradwire.shard.worker_engine import value_of

ROUND_BYTES = 16 * 2**20
"""What is on its way at a time, of all shards together."""

_MIN_PIECE_BYTES = 2**18


def scatter(
    engine: Engine, tensor: torch.Tensor, source: Place, layout: Layout, devices: Sequence[str], has_values: bool
) -> list[Part]:
    """The parts of a tensor, each with memory of its own, as leaves.

    Args:
        engine: Knows the way to the parts.
        tensor: Of the same size and dtype for everybody; may be without data (``meta``) where it is not the source's.
        source: Whose tensor counts.
        layout: Who is to have what.
        devices: Of all boxes of the layout.
        has_values: Whether the source's tensor has data; if not, parts are whatever was in memory.
    """
    sizes = [list(layout.boxes[number].sizes) for number in engine.numbers(layout)]
    own_devices = [devices[number] for number in engine.numbers(layout)]
    with torch.no_grad():
        if has_values and isinstance(engine, GroupEngine):
            return _to_ranks(engine, tensor, int(source), layout, own_devices)
        parts = engine.run(
            make_empty, layout, sizes, own_devices, dtype=tensor.dtype, requires_grad=tensor.requires_grad
        )
        if has_values:
            _fill_on_workers(engine, tensor.detach(), layout, parts)
    return parts


def _to_ranks(
    engine: GroupEngine, tensor: torch.Tensor, source: int, layout: Layout, devices: Sequence[str]
) -> list[Part]:
    """What is moved between ranks goes in pieces anyway."""
    like = torch.empty(0, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
    held = [tensor.detach()] if engine.here == source else []
    moved = moving.move(held, Layout((whole(tensor.size()),), (source,)), layout, engine.group, like)
    return [part.to(device).requires_grad_(tensor.requires_grad) for part, device in zip(moved, devices, strict=True)]


def _fill_on_workers(engine: Engine, tensor: torch.Tensor, layout: Layout, parts: list[Part]) -> None:
    outer, here = whole(tensor.size()), engine.here
    for pieces in rounds(layout.boxes, tensor.element_size()):
        waiting = []
        for number, box in pieces:
            place, part, ranges = layout.places[number], parts[number], _ranges(box, layout.boxes[number])
            values = tensor[box.slices_in(outer)]
            if place == here:
                fill(part, ranges, values)
            else:
                waiting.append(rpc.rpc_async(place, fill, args=(part, ranges, values)))
        for future in waiting:
            future.wait()


def make_empty(sizes: list[int], device: str, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """A part that is still to be filled, where it is to be."""
    return torch.empty(sizes, device=device, dtype=dtype, requires_grad=requires_grad)


def fill(part: Part, ranges: Sequence[tuple[int, int]], values: torch.Tensor) -> None:
    """Writes a piece into a part that is here."""
    tensor: torch.Tensor = value_of(part) if isinstance(part, RRef) else part
    with torch.no_grad():
        tensor[tuple(slice(start, end) for start, end in ranges)].copy_(values)


def _ranges(box: Box, outer: Box) -> list[tuple[int, int]]:
    return [(item.start, item.stop) for item in box.slices_in(outer)]


# -- which pieces ------------------------------------------------------------------------------------------------------


def rounds(boxes: Sequence[Box], element_size: int) -> Iterator[list[tuple[int, Box]]]:
    """Pieces of all boxes, with the numbers of these; those of one list go together."""
    full = [number for number, box in enumerate(boxes) if box.num_elements]
    limit = max(_MIN_PIECE_BYTES, ROUND_BYTES // max(1, len(full))) // element_size
    for pieces in zip_longest(*(cut(boxes[number], limit) for number in full)):
        yield [(number, piece) for number, piece in zip(full, pieces, strict=True) if piece is not None]
