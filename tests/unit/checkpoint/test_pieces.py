"""Tensors in pieces: regions of them, what is read for these, and what is no such tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.checkpoint.tree import (
    assemble,
    bodies,
    check_node,
    decode,
    find_problem,
    form_of,
    is_covered,
    put,
    region_of,
    sharded_node,
    tensor_names,
)
from gradwire.errors import CheckpointDamaged
from gradwire.shard.layout import Box, whole

WHOLE = torch.arange(60).view(6, 10)


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]


class Files:
    """Pieces of `WHOLE`, and which of them were read."""

    def __init__(self, cuts: list[Box]) -> None:
        self.tensors = {f"piece{number}": WHOLE[box.slices_in(Box((0, 0), (6, 10)))] for number, box in enumerate(cuts)}
        self.entries = {name: Entry("int64", tuple(item.shape)) for name, item in self.tensors.items()}
        self.read: list[str] = []
        starts = [(name, box.offsets) for name, box in zip(self.tensors, cuts, strict=True)]
        self.node = sharded_node("int64", (6, 10), starts)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read_into(self, target: torch.Tensor, name: str, region: Box | None = None) -> None:
        self.read.append(name)
        saved = self.tensors[name]
        target.copy_(saved if region is None else saved[region.slices_in(whole(saved.shape))])


def grid(rows: list[int], columns: list[int]) -> list[Box]:
    """Boxes between cuts."""
    row_ends, column_ends = [*sorted(set(rows)), 6], [*sorted(set(columns)), 10]
    return [
        Box((top, left), (bottom - top, right - left))
        for top, bottom in zip([0, *row_ends], row_ends, strict=False)
        for left, right in zip([0, *column_ends], column_ends, strict=False)
    ]


cuts = st.builds(grid, st.lists(st.integers(1, 5), max_size=3), st.lists(st.integers(1, 9), max_size=3))


@given(cuts=cuts, top=st.integers(0, 5), left=st.integers(0, 9), data=st.data())
def test_a_region_reads_the_pieces_that_it_overlaps_and_no_others(
    cuts: list[Box], top: int, left: int, data: st.DataObject
) -> None:
    files = Files(cuts)
    assert find_problem(files.node["$sharded"], files.entries) == ""
    box = Box((top, left), (data.draw(st.integers(1, 6 - top)), data.draw(st.integers(1, 10 - left))))
    region = region_of(files.node, box, files.entries)
    assert form_of(region, files.entries) == ("int64", box.sizes)
    target = torch.full(box.sizes, -1)
    put(target, region, files)
    assert torch.equal(target, WHOLE[box.slices_in(Box((0, 0), (6, 10)))])
    overlapping = [f"piece{number}" for number, item in enumerate(cuts) if item.common_with(box) is not None]
    assert files.read == overlapping


def test_regions_of_regions_and_of_tensors_in_one_piece() -> None:
    entries, node = {"x": Entry("int64", (6, 10))}, {"$tensor": "x"}
    assert region_of(node, Box((0, 0), (6, 10)), entries) is node
    inner = region_of(region_of(node, Box((1, 2), (4, 6)), entries), Box((1, 1), (2, 3)), entries)
    target = torch.zeros(2, 3, dtype=torch.int64)
    files = Files([])
    files.tensors["x"] = WHOLE
    put(target, inner, files)
    assert torch.equal(target, WHOLE[2:4, 3:6])


def test_what_no_piece_covers_is_zero() -> None:
    node = sharded_node("float32", [4], [("x", [2])])
    files = Files([])
    files.tensors["x"] = torch.ones(1)
    assert assemble(node["$sharded"], files).tolist() == [0, 0, 1, 0]


def test_in_the_tree() -> None:
    files = Files(grid([2], [3]))
    node = {"a": [files.node, {"$tensor": "other"}]}
    check_node(node)
    assert list(tensor_names(node)) == [*files.tensors, "other"]
    assert len(list(bodies(node))) == 1
    found = decode(node, lambda name: name, files)
    assert torch.equal(found["a"][0], WHOLE)
    assert found["a"][1] == "other"
    with pytest.raises(CheckpointDamaged, match="a sharded tensor where none is allowed"):
        decode(node, lambda name: name)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {"dtype": "int64", "shape": [2]},
        {"dtype": 1, "shape": [2], "pieces": []},
        {"dtype": "int64", "shape": [-2], "pieces": []},
        {"dtype": "int64", "shape": [2], "pieces": [["x"]]},
        {"dtype": "int64", "shape": [2], "pieces": [["x", [2**63]]]},
        {"dtype": "int64", "shape": [2], "pieces": [[1, [0]]]},
    ],
)
def test_other_things_are_refused(body: Any) -> None:
    with pytest.raises(ValueError, match="a sharded tensor without dtype, shape and pieces"):
        check_node({"$sharded": body})


def test_pieces_that_do_not_fit_are_named() -> None:
    entries = {"x": Entry("int64", (2, 2)), "y": Entry("int64", (2, 2)), "z": Entry("int32", (2, 2))}
    for pieces, problem in (
        ([("x", [0, 0]), ("y", [1, 1])], "'x' and 'y' overlap"),
        ([("x", [3, 0])], "reaches beyond"),
        ([("x", [-1, 0])], "reaches beyond"),
        ([("z", [0, 0])], "cannot be a piece"),
        ([("x", [0])], "cannot be a piece"),
    ):
        assert problem in find_problem(sharded_node("int64", [4, 4], pieces)["$sharded"], entries)
    assert find_problem(sharded_node("int64", [4, 4], [])["$sharded"], entries) == ""


def test_whether_all_of_a_tensor_was_saved() -> None:
    """Also for an order to load a part of it, in which pieces reach beyond the part."""
    entries = {"x": Entry("int64", (2, 2)), "y": Entry("int64", (2, 2))}
    for shape, pieces, is_whole in (
        ([2, 4], [("x", [0, 0]), ("y", [0, 2])], True),
        ([2, 2], [("x", [0, -1]), ("y", [0, 1])], True),
        ([2, 4], [("x", [0, 0])], False),
        ([2, 4], [("x", [0, 0]), ("x", [0, 0])], False),
        ([2**40, 2**20], [], False),
        ([0, 4], [], True),
    ):
        assert is_covered(sharded_node("int64", shape, pieces)["$sharded"], entries) is is_whole
