"""Values as JSON and back."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.checkpoint.tree import Encoder, decode, dict_node, items_of, join, tensor_names
from gradwire.errors import CannotSave, CheckpointDamaged


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
        (object(), "make it again"),
        ({1, 2}, "make it again"),
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
