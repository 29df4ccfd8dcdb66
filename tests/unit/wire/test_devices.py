"""Devices of tensors on the wire."""

from __future__ import annotations

import torch

from gradwire.wire.devices import CPU, move_all


def test_values_are_moved_wherever_tensors_are() -> None:
    value = (torch.ones(2), [torch.ones(1), 3], {"a": (torch.zeros(1), "text")})
    moved = move_all(value, torch.device("meta"))
    assert [moved[0].device.type, moved[1][0].device.type, moved[2]["a"][0].device.type] == ["meta"] * 3
    assert (moved[1][1], moved[2]["a"][1]) == (3, "text")
    same = torch.ones(2)
    assert move_all(same, CPU) is same
