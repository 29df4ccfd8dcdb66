"""Values of every plain kind, pickles where they are allowed, and refusals that say where and why."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import operator
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from fuzz import wire_samples as samples
from gradwire.config import Limits
from gradwire.errors import CannotSend, ConfigurationError, DecodeError, GradwireError, LimitExceeded
from gradwire.types import Trust
from gradwire.wire import serialization as objects
from gradwire.wire.framing import FrameDecoder
from gradwire.wire.messages import Call
from gradwire.wire.tensors import rebuild

LIMITS = Limits()


def round_trip(value: Any, trust: Trust = "data") -> Any:
    packed = objects.pack(value, trust, LIMITS)
    return objects.unpack(packed.codec, packed.body, packed.tensors, trust, LIMITS)


@objects.register_plain_class
@dataclasses.dataclass(frozen=True)
class Step:
    size: float
    names: tuple[str, ...] = ()
    doubled: float = dataclasses.field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("negative step")
        object.__setattr__(self, "doubled", self.size * 2)


@objects.register_plain_class
class Pair(NamedTuple):
    left: Any
    right: Any


@objects.register_plain_class
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
    assert objects.pack(value, "code", LIMITS).codec != objects.PICKLE


def test_nan_and_order_of_keys() -> None:
    assert math.isnan(round_trip(math.nan))
    assert list(round_trip({"z": 1, "a": 2})) == ["z", "a"]
    assert list(round_trip({3: 1, 1: 2})) == [3, 1]


def test_no_arguments_and_none_have_no_body() -> None:
    assert objects.pack(((), {}), "data", LIMITS) == objects.Packed(objects.EMPTY, b"", [])
    assert objects.pack(None, "data", LIMITS) == objects.Packed(objects.NONE, b"", [])
    assert round_trip(((), {})) == ((), {})
    assert round_trip(None) is None


@pytest.mark.parametrize("trust", ["code", "data"])
def test_same_tensor_travels_once_and_arrives_as_one(trust: Trust) -> None:
    shared, other = torch.ones(2), torch.nn.Parameter(torch.zeros(1))
    value = ((shared, [other, shared]), {"again": shared, "size": 2})
    if trust == "code":
        value = (*value, functools.partial(operator.add, shared))
    packed = objects.pack(value, trust, LIMITS)
    assert [id(tensor) for tensor in packed.tensors] == [id(shared), id(other)]
    arrived = objects.unpack(packed.codec, packed.body, packed.tensors, trust, LIMITS)
    assert arrived[0][0] is arrived[0][1][1] is arrived[1]["again"] is shared


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
        objects.unpack(frame.message.codec, frame.body, values, "data", samples.LIMITS)


def test_cycles_and_depth_are_refused_on_both_sides() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(CannotSend, match="contains itself"):
        objects.pack(cycle, "code", LIMITS)
    deep: Any = 1
    for _ in range(LIMITS.depth):
        deep = [deep]
    packed = objects.pack(deep, "data", LIMITS)
    assert round_trip(deep) == deep
    with pytest.raises(CannotSend, match="deeper"):
        objects.pack([deep], "data", LIMITS)
    with pytest.raises(LimitExceeded, match="deeper"):
        objects.unpack(packed.codec, packed.body, [], "data", Limits(depth=LIMITS.depth - 1))


def test_too_many_items_are_refused_on_both_sides() -> None:
    small = Limits(frame_bytes=1 << 20)
    packed = objects.pack([""] * 20_000, "data", LIMITS)
    with pytest.raises(CannotSend, match="as a tensor"):
        objects.pack([""] * 20_000, "data", small)
    with pytest.raises(LimitExceeded, match="items"):
        objects.unpack(packed.codec, packed.body, [], "data", small)
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
        objects.pack(value, trust, LIMITS)


def test_refusal_looks_into_objects_and_closures() -> None:
    class Holder:
        def __init__(self) -> None:
            self.inner = {"lock": threading.Lock()}

    lock = threading.Lock()
    with pytest.raises(CannotSend, match=r"args\[0\]\.inner\['lock'\] of type _thread.lock"):
        objects.pack(((Holder(),), {}), "code", LIMITS)
    with pytest.raises(CannotSend, match=r"function\.<variable lock> of type _thread.lock"):
        objects.pack((lambda: lock, (), {}), "code", LIMITS)


@pytest.mark.parametrize(
    "value",
    [Unregistered(1), collections.OrderedDict(a=1), lambda: 1, object, print, True.__class__, "\ud800", (1).__add__],
    ids=lambda value: type(value).__name__,
)
def test_data_trust_writes_no_pickle(value: Any) -> None:
    with pytest.raises(CannotSend, match='use trust="code"'):
        objects.pack(((value,), {}), "data", LIMITS)


@pytest.mark.parametrize(
    "value", [Unregistered(1), collections.OrderedDict(a=1), "\ud800", operator.add, {"k": object}]
)
def test_code_trust_pickles_what_is_not_plain(value: Any) -> None:
    packed = objects.pack(((value,), {}), "code", LIMITS)
    assert packed.codec == objects.PICKLE
    assert round_trip(((value,), {}), "code") == ((value,), {})
    with pytest.raises(DecodeError, match="pickle"):
        objects.unpack(packed.codec, packed.body, packed.tensors, "data", LIMITS)


def test_lambdas_closures_and_local_classes_go_by_value() -> None:
    offset = torch.tensor([10.0])

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    add, made = round_trip((lambda x: x + offset, Local(3)), "code")
    assert add(1.0).item() == 11.0
    assert made.value == 3
    packed = objects.pack(lambda: offset, "code", LIMITS)
    assert packed.tensors[0] is offset


def test_modules_are_pickled_around_their_tensors() -> None:
    model = torch.nn.Linear(2, 3)
    packed = objects.pack(model, "code", LIMITS)
    assert len(packed.tensors) == 2
    arrived = objects.unpack(packed.codec, packed.body, packed.tensors, "code", LIMITS)
    assert torch.equal(arrived(torch.ones(2)), model(torch.ones(2)))


class FromMain:
    pass


def test_what_main_defines_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    by_reference = objects.pack(FromMain(), "code", LIMITS).body
    monkeypatch.setattr(FromMain, "__module__", "__main__")
    by_value = objects.pack(FromMain(), "code", LIMITS).body
    assert b"cloudpickle" in by_value
    assert b"cloudpickle" not in by_reference
    assert objects.function_name(FromMain) is None


class Reentrant:
    """Packs something else while it is pickled, as a class that makes a call would."""

    def __reduce__(self) -> Any:
        inner = objects.pack(Unregistered(5), "code", LIMITS)
        return (bytes, (inner.body,))


def test_pack_inside_of_pack_and_from_many_threads() -> None:
    body = round_trip(Reentrant(), "code")
    assert objects.unpack(objects.PICKLE, body, [], "code", LIMITS) == Unregistered(5)
    with ThreadPoolExecutor(8) as pool:
        arrived = list(pool.map(lambda i: round_trip([Unregistered(i), torch.tensor(i)], "code"), range(200)))
    assert [(item.x, tensor.item()) for item, tensor in arrived] == [(i, i) for i in range(200)]


class Refusing:
    def __reduce__(self) -> Any:
        raise CannotSend("a Refusing stays where it is")


def test_class_may_say_itself_why_it_cannot_be_sent() -> None:
    with pytest.raises(CannotSend, match="stays where it is"):
        objects.pack([Refusing()], "code", LIMITS)


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (b"", DecodeError, "not a pickle"),
        (b"\x80\x05garbage", GradwireError, "pickle|rebuilt"),
        (b"cno_such_module\nf\n.", CannotSend, "importable here"),
        (b"coperator\nno_such_function\n.", CannotSend, "importable here"),
        (b"cbuiltins\nint\n(S'x'\ntR.", CannotSend, "ValueError"),
        (b"\x80\x05K\x07Q.", DecodeError, "tensor 7"),
    ],
)
def test_bad_pickles(body: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        objects.unpack(objects.PICKLE, body, [], "code", LIMITS)


def test_registered_class_checks_its_own_arguments() -> None:
    packed = objects.pack(Step(1.0), "data", LIMITS)
    body = packed.body.replace(b"\xcb\x3f\xf0", b"\xcb\xbf\xf0")  # 1.0 becomes -1.0
    with pytest.raises(DecodeError, match="negative step"):
        objects.unpack(packed.codec, body, [], "data", LIMITS)
    with pytest.raises(DecodeError, match="3 fields, not 2"):
        objects.unpack(packed.codec, packed.body.replace(b"\x94\xc7", b"\x93\xc7")[:-9], [], "data", LIMITS)


def test_registering_refuses_what_it_cannot_rebuild() -> None:
    @dataclasses.dataclass
    class WithInitVar:
        x: dataclasses.InitVar[int]

    with pytest.raises(ConfigurationError, match="InitVar"):
        objects.register_plain_class(WithInitVar)
    with pytest.raises(ConfigurationError, match="not a dataclass"):
        objects.register_plain_class(threading.Thread)
    with pytest.raises(ConfigurationError, match="taken"):
        objects.register_plain_class(Unregistered, name=f"{__name__}:Pair")


def test_registered_type_with_its_own_functions() -> None:
    class Handle:
        def __init__(self, number: int) -> None:
            self.number = number

    objects.register_plain_type(
        Handle, "tests:Handle", lambda handle: [handle.number], lambda fields: Handle(fields[0])
    )
    assert round_trip([Handle(4)])[0].number == 4


class Worker:
    @classmethod
    def make(cls) -> str:
        return cls.__name__

    @staticmethod
    def stand() -> int:
        return 1

    def run(self) -> int:
        return 2


class Child(Worker):
    pass


def module_function() -> int:
    return 7


@pytest.mark.parametrize(
    "fn",
    [
        torch.add,
        torch.nn.functional.relu,
        torch.nn.functional.linear,
        torch.linalg.inv,
        torch.Tensor.add,
        torch.nn.Linear,
        operator.add,
        len,
        str.upper,
        math.sqrt,
    ],
    ids=lambda fn: fn.__name__,
)
def test_importable_functions_travel_by_name(fn: Any) -> None:
    name = objects.function_name(fn)
    assert name is not None
    assert objects.resolve_function(name) is fn


def test_functions_of_this_module() -> None:
    assert objects.function_name(module_function) == f"{__name__}:module_function"
    assert objects.function_name(Worker.stand) == f"{__name__}:Worker.stand"
    assert objects.function_name(Worker.run) == f"{__name__}:Worker.run"
    for fn in (Worker.make, Child.make):
        name = objects.function_name(fn)
        assert name is not None
        assert objects.resolve_function(name)() == fn()


def test_functions_without_a_name() -> None:
    def closure() -> None:
        pass

    for fn in (closure, lambda: 1, functools.partial(len, []), Worker().run, [].append, torch.nn.ReLU(), None):
        assert objects.function_name(fn) is None
    assert objects.function_name(torch.add) == "torch:add"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no_such_module_here:f", ImportError),
        ("torch:no_such_function", AttributeError),
        ("torch:nn.functional.no_such", AttributeError),
        ("torch:__version__", TypeError),
        ("torch", ImportError),
        (":f", ImportError),
        ("torch:", ImportError),
        ("", ImportError),
    ],
)
def test_names_that_resolve_to_nothing(name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        objects.resolve_function(name)
