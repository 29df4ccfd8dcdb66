"""Values as JSON and back; tensors in pieces, and what is read for regions of them."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.checkpoint.tree import (
    Encoder,
    assemble,
    bodies,
    check_node,
    decode,
    dict_node,
    find_problem,
    form_of,
    is_covered,
    items_of,
    join,
    put,
    region_of,
    sharded_node,
    tensor_names,
)
from gradwire.errors import CannotSave, CheckpointDamaged
from gradwire.shard.layout import Box, whole


class Colour(enum.IntEnum):
    RED = 1


def there_and_back(value: Any) -> Any:
    """Through the text of JSON."""
    tensors: dict[str, torch.Tensor] = {}

    def place(path: str, tensor: torch.Tensor) -> str:
        assert path not in tensors
        tensors[path] = tensor
        return path

    node = Encoder(place).encode(value, "")
    return decode(json.loads(json.dumps(node, allow_nan=False)), tensors.__getitem__)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down: 1, 1.0 and True are equal in Python."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(a, c) and same(b, d) for (a, b), (c, d) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        float("inf"),
        -float("inf"),
        2**53,
        -(2**200),
        bytearray(b"ab"),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        {"$tensor": 1},
        {"$": {"a": 1}},
        {1: "a", "1": "b", None: "c"},
    ],
)
def test_special_values_come_back_as_they_were(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_not_a_number_and_counters_come_back() -> None:
    assert math.isnan(there_and_back(float("nan")))
    found = there_and_back(Counter([5, 5, 9]))
    assert type(found) is Counter
    assert found == Counter([5, 5, 9])


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Colour.RED, ".value or .name"),
        (np.float64(1.0), ".item()"),
        (object(), "create it again"),
        ({1, 2}, "create it again"),
        (test_not_a_number_and_counters_come_back, "cannot be saved"),
        (Colour, "cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_place(value: Any, advice: str) -> None:
    with pytest.raises(CannotSave, match=r"'a/b/1' is a ") as caught:
        there_and_back({"a": {"b": [0, value]}})
    assert advice in str(caught.value)


def test_a_list_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CannotSave, match="does it contain itself"):
        there_and_back(endless)


def test_every_tensor_has_a_path_of_its_own() -> None:
    tensors = [torch.full((1,), float(number)) for number in range(6)]
    one, two, three, four, five, six = tensors
    value = {"a": {"b/c": one, "b": {"c": two}}, "a/b": {"c": three}, "d": {0: four, "0": five, "~2": six}}
    found = there_and_back(value)
    assert torch.cat([found["a"]["b/c"], found["a"]["b"]["c"], found["a/b"]["c"]]).tolist() == [0, 1, 2]
    assert torch.cat([found["d"][0], found["d"]["0"], found["d"]["~2"]]).tolist() == [3, 4, 5]


def test_paths_escape_what_joins_them() -> None:
    assert join("a", "b") == "a/b"
    assert join("", "b") == "b"
    assert join("a", "b/c~d") == "a/b~1c~0d"
    assert join("", "") == "~3"


def test_what_is_claimed_is_not_looked_into() -> None:
    claimed = []

    def claim(path: str, value: Any) -> Any:
        if not isinstance(value, object) or type(value) in (dict, int):
            return None
        claimed.append(path)
        return {"$object": {"kind": "module", "state": {"w": {"$tensor": "t"}}}}

    node = Encoder(lambda path, _: path, claim).encode({"m": object(), "n": 1}, "")
    assert claimed == ["m"]
    assert list(tensor_names(node)) == ["t"]
    assert decode(node, lambda name: name) == {"m": {"w": "t"}, "n": 1}


@pytest.mark.parametrize(
    "node", [{"$nonsense": 1}, {"$dtype": "nn"}, {"$int": "x"}, {"$complex": [1, 2, 3]}, {"$bytes": 7}]
)
def test_unknown_nodes_are_damage(node: Any) -> None:
    with pytest.raises(CheckpointDamaged, match="unknown form"):
        decode(node, lambda name: name)


def test_dicts_of_nodes() -> None:
    assert items_of({"a": 1}) == {"a": 1}
    assert items_of({"$dict": [[1, 2]]}) == {1: 2}
    assert items_of([1]) is None
    assert items_of({"$tuple": []}) is None
    assert items_of(dict_node({"$a": 1, "b": 2})) == {"$a": 1, "b": 2}


# -- tensors in pieces -------------------------------------------------------------------------------------------------


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
