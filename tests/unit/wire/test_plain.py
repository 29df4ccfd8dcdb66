"""Values of every plain kind keep their types; registered classes check what came."""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
from typing import Any, NamedTuple

import pytest
import torch

from gradwire.config import Limits
from gradwire.errors import ConfigurationError, DecodeError
from gradwire.types import Trust
from gradwire.wire import serialization

LIMITS = Limits()


def round_trip(value: Any, trust: Trust = "data") -> Any:
    packed = serialization.pack(value, trust, LIMITS)
    return serialization.unpack(packed.codec, packed.body, packed.tensors, trust, LIMITS)


@serialization.register_plain_class
@dataclasses.dataclass(frozen=True)
class Step:
    size: float
    names: tuple[str, ...] = ()
    doubled: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("negative step")
        object.__setattr__(self, "doubled", self.size * 2)


@serialization.register_plain_class
class Pair(NamedTuple):
    left: Any
    right: Any


@serialization.register_plain_class
class Mode(enum.Enum):
    FAST = 1
    SMART = 2


class Unregistered(NamedTuple):
    x: int


PLAIN_VALUES = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    2**64 - 1,
    2**64,
    -(2**63),
    -(2**63) - 1,
    3**500,
    1.5,
    -0.0,
    math.inf,
    1 + 2j,
    "",
    "héllo \U0001f600",
    b"\x00\xff",
    bytearray(b"ab"),
    [],
    (),
    {},
    set(),
    [1, [2, (3, [4])]],
    ((),),
    ([],),
    [()],
    (1, (2, (3,))),
    {"a": {"b": [1, (2,)]}},
    {1: "a", (2, 3): "b", None: "c", 2.5: "d", frozenset({1}): "e"},
    {"b": 1, "a": 2},
    {1, "x", (2, 3)},
    frozenset({1, 2}),
    slice(None),
    slice(1, "x", [2]),
    range(2, 10, 3),
    torch.Size([2, 3]),
    torch.float8_e4m3fn,
    torch.qint8,
    torch.device("cuda", 1),
    torch.sparse_csr,
    torch.channels_last,
    Step(2.0, ("a",)),
    Pair(1, [Pair(2, 3)]),
    Mode.SMART,
    ((), {"k": 1}),
    ((1,), {}),
]


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=lambda value: type(value).__name__)
def test_plain_values_keep_their_types(value: Any) -> None:
    arrived = round_trip(value)
    assert arrived == value
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value) or isinstance(value, set | frozenset | dict)
    assert serialization.pack(value, "code", LIMITS).codec != serialization.PICKLE


def test_nan_and_order_of_keys() -> None:
    assert math.isnan(round_trip(math.nan))
    assert list(round_trip({"z": 1, "a": 2})) == ["z", "a"]
    assert list(round_trip({3: 1, 1: 2})) == [3, 1]


def test_registered_class_checks_its_own_arguments() -> None:
    packed = serialization.pack(Step(1.0), "data", LIMITS)
    body = packed.body.replace(b"\xcb\x3f\xf0", b"\xcb\xbf\xf0")  # 1.0 becomes -1.0
    with pytest.raises(DecodeError, match="negative step"):
        serialization.unpack(packed.codec, body, [], "data", LIMITS)
    with pytest.raises(DecodeError, match="3 fields, not 2"):
        serialization.unpack(packed.codec, packed.body.replace(b"\x94\xc7", b"\x93\xc7")[:-9], [], "data", LIMITS)


def test_registering_refuses_what_it_cannot_rebuild() -> None:
    @dataclasses.dataclass
    class WithInitVar:
        x: dataclasses.InitVar[int]

    with pytest.raises(ConfigurationError, match="InitVar"):
        serialization.register_plain_class(WithInitVar)
    with pytest.raises(ConfigurationError, match="not a dataclass"):
        serialization.register_plain_class(threading.Thread)
    with pytest.raises(ConfigurationError, match="already registered"):
        serialization.register_plain_class(Unregistered, name=f"{__name__}:Pair")


def test_registered_type_with_its_own_functions() -> None:
    class Handle:
        def __init__(self, number: int) -> None:
            self.number = number

    serialization.register_plain_type(
        Handle, "tests:Handle", lambda handle: [handle.number], lambda fields: Handle(fields[0])
    )
    assert round_trip([Handle(4)])[0].number == 4
