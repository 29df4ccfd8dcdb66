"""Tensors that were saved in pieces, each by the worker that had it.

    {"$sharded": {"dtype": "float32", "shape": [8, 4], "pieces": [["table~@0,0", [0, 0]], ["table~@5,0", [5, 0]]]}}

A piece is a tensor of a file, and where it begins. Pieces do not overlap; what none of them covers is zero (state of an
optimizer that a part of a parameter never had). In an order to load a part of a tensor, `shape` is that of the part, and
pieces may begin before it or reach beyond it: what is inside counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from gradwire.shard._geometry import Box, find_overlap
from gradwire.shard.layouts import whole

Node = Any

SHARDED: Final = "$sharded"
_TENSOR: Final = "$tensor"
_MAX_SIZE: Final = 2**62


class Entry(Protocol):
    """What the index says of a tensor in a file."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Source(Protocol):
    """Where the values of tensors come from, by the names of the tensors."""

    def shape_of(self, name: str) -> tuple[int, ...]: ...
    def read_into(self, target: torch.Tensor, name: str, region: Box | None = None) -> None: ...


def piece_path(path: str, offsets: Sequence[int]) -> str:
    """The path of a piece. No path of a user has this: "~" is followed by a digit there."""
    return f"{path}~@{','.join(map(str, offsets))}"


def sharded_node(dtype: str, shape: Sequence[int], pieces: Sequence[tuple[str, Sequence[int]]]) -> Node:
    """The node of a tensor in pieces: names, and where they begin."""
    return {SHARDED: {"dtype": dtype, "shape": list(shape), "pieces": [[name, list(start)] for name, start in pieces]}}


def is_tensor(node: Node) -> bool:
    """Whether it is the node of a tensor, in one piece or in several."""
    return type(node) is dict and len(node) == 1 and (_TENSOR in node or SHARDED in node)


def form_of(node: Node, entries: Mapping[str, Entry]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of the node of a tensor."""
    if _TENSOR in node:
        entry = entries[node[_TENSOR]]
        return entry.dtype, tuple(entry.shape)
    return node[SHARDED]["dtype"], tuple(node[SHARDED]["shape"])


def region_of(node: Node, box: Box, entries: Mapping[str, Entry]) -> Node:
    """The node of a part of a tensor: names only the pieces that have something of it."""
    dtype, shape = form_of(node, entries)
    if box == whole(shape):
        return node
    pieces = [(node[_TENSOR], (0,) * len(shape))] if _TENSOR in node else node[SHARDED]["pieces"]
    found = []
    for name, start in pieces:
        if Box(tuple(start), tuple(entries[name].shape)).common_with(box) is not None:
            found.append((name, [mine - outer for mine, outer in zip(start, box.offsets, strict=True)]))
    return sharded_node(dtype, box.sizes, found)


def put(target: torch.Tensor, node: Node, source: Source, is_zero: bool = False) -> None:
    """Fill a tensor of the same shape; of each piece, read only what belongs into it."""
    if _TENSOR in node:
        source.read_into(target, node[_TENSOR])
        return
    outer, num_covered = whole(target.shape), 0
    found = []
    for name, start in node[SHARDED]["pieces"]:
        box = Box(tuple(start), source.shape_of(name))
        common = box.common_with(outer)
        if common is not None:
            offsets = tuple(mine - begin for mine, begin in zip(common.offsets, start, strict=True))
            found.append((common, name, Box(offsets, common.sizes)))
            num_covered += common.num_elements
    if num_covered < target.numel() and not is_zero:
        target.zero_()
    for common, name, region in found:
        source.read_into(target[common.slices_in(outer)], name, region)


def assemble(body: Any, source: Source) -> torch.Tensor:
    """Return the tensor that a node's body stands for, with memory of its own."""
    made = torch.zeros(body["shape"], dtype=getattr(torch, body["dtype"]))  # what is not covered takes no memory yet
    put(made, {SHARDED: body}, source, is_zero=True)
    return made


# -- is it one? ----------------------------------------------------------------------------------------------------------


def is_body(body: Any) -> bool:
    """Whether it looks like what `sharded_node` makes."""
    if type(body) is not dict or body.keys() != {"dtype", "shape", "pieces"} or type(body["dtype"]) is not str:
        return False
    return _are_ints(body["shape"], 0) and type(body["pieces"]) is list and all(map(_is_piece, body["pieces"]))


def _is_piece(item: Any) -> bool:
    return type(item) is list and len(item) == 2 and type(item[0]) is str and _are_ints(item[1], -_MAX_SIZE)


def _are_ints(value: Any, least: int) -> bool:
    return type(value) is list and all(type(item) is int and least <= item <= _MAX_SIZE for item in value)


def bodies(node: Node) -> Iterator[Any]:
    """Of all tensors in pieces in a node."""
    items = node if type(node) is list else node.values() if type(node) is dict else ()
    if type(node) is dict and len(node) == 1 and SHARDED in node:
        yield node[SHARDED]
        return
    for item in items:
        yield from bodies(item)


def find_unlike(body: Any, entries: Mapping[str, Entry]) -> str:
    """Return why something cannot be a piece of a tensor; empty if all can."""
    for name, start in body["pieces"]:
        entry = entries[name]
        if entry.dtype != body["dtype"] or not len(start) == len(entry.shape) == len(body["shape"]):
            return f"'{name}' is no piece of a tensor of {body['dtype']} with shape {body['shape']}"
    return ""


def find_problem(body: Any, entries: Mapping[str, Entry]) -> str:
    """Return why pieces do not make up a tensor; empty if they do."""
    if problem := find_unlike(body, entries):
        return problem
    outer, boxes = whole(body["shape"]), _boxes(body, entries)
    for (name, _), box in zip(body["pieces"], boxes, strict=True):
        for offset, size, length in zip(box.offsets, box.sizes, outer.sizes, strict=True):
            if offset < 0 or offset + size > length:
                return f"'{name}' reaches beyond the tensor of shape {body['shape']}"
    pair = find_overlap(boxes) if boxes else None
    return f"'{body['pieces'][pair[0]][0]}' and '{body['pieces'][pair[1]][0]}' overlap" if pair else ""


def is_covered(body: Any, entries: Mapping[str, Entry]) -> bool:
    """Return whether every element is in a piece, so that the tensor is not larger than what was saved."""
    outer = whole(body["shape"])
    inside = [box.common_with(outer) for box in _boxes(body, entries)]
    found = [box for box in inside if box is not None]
    return sum(box.num_elements for box in found) == outer.num_elements and (not found or find_overlap(found) is None)


def _boxes(body: Any, entries: Mapping[str, Entry]) -> list[Box]:
    return [Box(tuple(start), tuple(entries[name].shape)) for name, start in body["pieces"]]
