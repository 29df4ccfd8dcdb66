"""Where a module is to live."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.errors import ConfigurationError
from gradwire.nn.module_owner import parse_placement
from gradwire.types import WorkerInfo


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("ps", ("ps", "")),
        ("ps/cpu", ("ps", "cpu")),
        ("ps/cuda:1", ("ps", "cuda:1")),
        ("rank:3", (3, "")),
        ("rank:3/meta", (3, "meta")),
        ("rank:x", ("rank:x", "")),  # a worker may have such a name
        ("host-1.net:4/cpu", ("host-1.net:4", "cpu")),
        (2, (2, "")),
        (WorkerInfo("ps", 1), (WorkerInfo("ps", 1), "")),
    ],
)
def test_forms(where: Any, expected: Any) -> None:
    assert parse_placement(where) == expected


@pytest.mark.parametrize("where", ["", "/cpu", "ps/", "ps/cpu/0", "cpu", "cuda:0"])
def test_what_is_none(where: str) -> None:
    with pytest.raises(ConfigurationError, match="The valid format is"):
        parse_placement(where)


def test_devices_are_torchs() -> None:
    with pytest.raises(RuntimeError, match=r"Expected one of .+ device type at start of device string"):
        parse_placement("ps/foo")
