"""Values with the codec that fits them, and refusals that say where and why."""

from __future__ import annotations

import collections
import functools
import operator
import threading
import traceback
from typing import Any, NamedTuple

import pytest
import torch

from fuzz import wire_samples as samples
from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, LimitExceeded
from gradwire.types import Trust
from gradwire.wire import serialization
from gradwire.wire.framing import FrameDecoder
from gradwire.wire.messages import Call
from gradwire.wire.tensors import rebuild

LIMITS = Limits()


def round_trip(value: Any, trust: Trust = "data") -> Any:
    packed = serialization.pack(value, trust, LIMITS)
    return serialization.unpack(packed.codec, packed.body, packed.tensors, trust, LIMITS)


class Unregistered(NamedTuple):
    x: int


def test_no_arguments_and_none_have_no_body() -> None:
    assert serialization.pack(((), {}), "data", LIMITS) == serialization.Packed(serialization.EMPTY, b"", [])
    assert serialization.pack(None, "data", LIMITS) == serialization.Packed(serialization.NONE, b"", [])
    assert round_trip(((), {})) == ((), {})
    assert round_trip(None) is None


@pytest.mark.parametrize("trust", ["code", "data"])
def test_same_tensor_travels_once_and_arrives_as_one(trust: Trust) -> None:
    shared, other = torch.ones(2), torch.nn.Parameter(torch.zeros(1))
    value = ((shared, [other, shared]), {"again": shared, "size": 2})
    if trust == "code":
        value = (*value, functools.partial(operator.add, shared))
    packed = serialization.pack(value, trust, LIMITS)
    assert [id(tensor) for tensor in packed.tensors] == [id(shared), id(other)]
    arrived = serialization.unpack(packed.codec, packed.body, packed.tensors, trust, LIMITS)
    assert arrived[0][0] is arrived[0][1][1] is arrived[1]["again"] is shared


@pytest.mark.parametrize("second", [torch.ones(2), {}, {"k": 1}, (), None], ids=repr)
def test_pairs_that_are_not_the_arguments_of_a_call(second: Any) -> None:
    first, arrived = round_trip((torch.ones(2), second))
    assert torch.equal(first, torch.ones(2))
    assert torch.equal(arrived, second) if isinstance(second, torch.Tensor) else arrived == second


def test_many_tensors() -> None:
    values = [torch.tensor(i) for i in range(200)]
    assert [tensor.item() for tensor in round_trip(values)] == list(range(200))


@pytest.mark.parametrize("name", samples.bad_values())
def test_bad_values_are_refused(name: str) -> None:
    (frame,) = FrameDecoder(samples.LIMITS, accept=samples.ALL_TYPES).feed(samples.bad_values()[name])
    assert isinstance(frame.message, Call)
    buffers = iter(frame.buffers)
    with pytest.raises((DecodeError, CannotSend)):  # noqa: PT012  the tensors come first, as on the wire
        values = [rebuild(meta, buffers) for meta in frame.message.tensors]
        serialization.unpack(frame.message.codec, frame.body, values, "data", samples.LIMITS)


def test_cycles_and_depth_are_refused_on_both_sides() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(CannotSend, match="contains itself"):
        serialization.pack(cycle, "code", LIMITS)
    deep: Any = 1
    for _ in range(LIMITS.depth):
        deep = [deep]
    packed = serialization.pack(deep, "data", LIMITS)
    assert round_trip(deep) == deep
    with pytest.raises(CannotSend, match="deep"):
        serialization.pack([deep], "data", LIMITS)
    with pytest.raises(LimitExceeded, match="deep"):
        serialization.unpack(packed.codec, packed.body, [], "data", Limits(depth=LIMITS.depth - 1))


def test_too_many_items_are_refused_on_both_sides() -> None:
    small = Limits(frame_bytes=1 << 20)
    packed = serialization.pack([""] * 20_000, "data", LIMITS)
    with pytest.raises(CannotSend, match="as a tensor"):
        serialization.pack([""] * 20_000, "data", small)
    with pytest.raises(LimitExceeded, match="items"):
        serialization.unpack(packed.codec, packed.body, [], "data", small)
    assert round_trip([1.5] * 20_000 + [{str(i): i for i in range(5000)}])[-1]["4999"] == 4999


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (((1, {"lock": threading.Lock()}), {}), r"args\[1\]\['lock'\] of type _thread.lock"),
        (((), {"f": [1, threading.Lock()]}), r"kwargs\['f'\]\[1\] of type _thread.lock"),
        ([threading.Lock()], r"value\[0\] of type _thread.lock"),
        (threading.Lock(), r"value of type _thread.lock"),
    ],
)
@pytest.mark.parametrize("trust", ["code", "data"])
def test_refusal_names_the_place(value: Any, where: str, trust: Trust) -> None:
    with pytest.raises(CannotSend, match=where):
        serialization.pack(value, trust, LIMITS)


def test_refusal_looks_into_objects_and_closures() -> None:
    class Holder:
        def __init__(self) -> None:
            self.inner = {"lock": threading.Lock()}

    lock = threading.Lock()
    with pytest.raises(CannotSend, match=r"args\[0\]\.inner\['lock'\] of type _thread.lock"):
        serialization.pack(((Holder(),), {}), "code", LIMITS)
    with pytest.raises(CannotSend, match=r"function\.<variable lock> of type _thread.lock"):
        serialization.pack((lambda: lock, (), {}), "code", LIMITS)


@pytest.mark.parametrize(
    "value",
    [Unregistered(1), collections.OrderedDict(a=1), lambda: 1, object, print, True.__class__, "\ud800", (1).__add__],
    ids=lambda value: type(value).__name__,
)
def test_data_trust_writes_no_pickle(value: Any) -> None:
    with pytest.raises(CannotSend, match='use trust="code"'):
        serialization.pack(((value,), {}), "data", LIMITS)


@pytest.mark.parametrize(
    "value", [Unregistered(1), collections.OrderedDict(a=1), "\ud800", operator.add, {"k": object}]
)
def test_code_trust_pickles_what_is_not_plain(value: Any) -> None:
    packed = serialization.pack(((value,), {}), "code", LIMITS)
    assert packed.codec == serialization.PICKLE
    assert round_trip(((value,), {}), "code") == ((value,), {})
    with pytest.raises(DecodeError, match="pickle"):
        serialization.unpack(packed.codec, packed.body, packed.tensors, "data", LIMITS)


class FailsToReduce:
    def __reduce__(self) -> Any:
        raise LookupError("no such part")


def test_a_refusal_shows_the_traceback_of_user_code_and_no_other() -> None:
    with pytest.raises(CannotSend) as caught:
        serialization.pack([threading.Lock()], "code", LIMITS)
    assert "Traceback" not in "".join(traceback.format_exception(caught.value)).removeprefix("Traceback")
    with pytest.raises(CannotSend) as caught:
        serialization.pack([FailsToReduce()], "code", LIMITS)
    cause = caught.value.__cause__
    assert isinstance(cause, LookupError)
    assert cause.__context__ is None
