"""Devices of tensors on the wire."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from gradwire.errors import DecodeError
from gradwire.wire.devices import CPU, move_all, read_name

META = torch.device("meta")


class _Named(NamedTuple):
    x: torch.Tensor
    number: int


def test_values_are_moved_wherever_tensors_are() -> None:
    value = (torch.ones(2), [torch.ones(1), 3], {"a": (torch.zeros(1), "text")})
    moved = move_all(value, META)
    assert [moved[0].device.type, moved[1][0].device.type, moved[2]["a"][0].device.type] == ["meta"] * 3
    assert (moved[1][1], moved[2]["a"][1]) == (3, "text")
    largest = torch.ones(2, 2).max(dim=0)
    moved = move_all([largest, _Named(torch.ones(1), 2), OrderedDict(a=torch.ones(1)), size := torch.Size([3])], META)
    assert [type(item) for item in moved] == [type(largest), _Named, OrderedDict, torch.Size]
    assert {moved[0].values.device, moved[0].indices.device, moved[1].x.device, moved[2]["a"].device} == {META}
    assert moved[3] is size
    same = torch.ones(2)
    assert move_all(same, CPU) is same


@pytest.mark.parametrize("name", ["cpu", "cuda:0", "gradacc", "privateuseone:12"])
def test_names_of_devices_that_need_not_be_here(name: str) -> None:
    assert read_name(name) == name


@pytest.mark.parametrize("name", ["", "cpu:0", "cuda:", "cuda:0\n", "Cuda", "x" * 40, "../x", None, 3, b"cpu"])
def test_what_is_not_the_name_of_a_device(name: Any) -> None:
    with pytest.raises(DecodeError, match="name of a device"):
        read_name(name)
