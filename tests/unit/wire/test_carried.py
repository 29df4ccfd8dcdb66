"""Functions by value are pickled once, unless they may have changed."""

from __future__ import annotations

import gc
import math
import types
import weakref
from typing import Any

import pytest
import torch

from gradwire.config import Limits
from gradwire.errors import DecodeError
from gradwire.wire import pickling as _pickled
from gradwire.wire import serialization as objects
from gradwire.wire.pickling import CarriedFunction, carry


def define(source: str, **names: Any) -> types.FunctionType:
    """A function `f` as a script defines it."""
    space: dict[str, Any] = {"__name__": "__main__", **names}
    exec(source, space)
    found: types.FunctionType = space["f"]
    return found


@pytest.mark.parametrize(
    ("source", "names", "args", "result"),
    [
        ("def f(x): return x + 1", {}, (1,), 2),
        ("def f(x): return math.sqrt(x) * factor", {"math": math, "factor": 2.0}, (4,), 4.0),
        ("def g(x): return x * 3\ndef f(x): return g(x)", {}, (2,), 6),
        ("def f(n): return 1 if n == 0 else n * f(n - 1)", {}, (5,), 120),
        ("f = (lambda k: lambda x: x + k)(10)", {}, (1,), 11),
        ("def f(x, *, y=(1, 'a')): return (x, y)", {}, (0,), (0, (1, "a"))),
        ("def f(x): return x.to(kind)", {"kind": torch.float64}, (torch.ones(1),), torch.ones(1, dtype=torch.float64)),
    ],
)
def test_one_pickle_serves_many_calls(source: str, names: dict[str, Any], args: Any, result: Any) -> None:
    function = define(source, **names)
    carried = carry(function)
    assert carried is not None
    assert carry(function) is carried
    loaded = CarriedFunction(bytes(carried.pickle)).load()
    assert loaded(*args) == result
    assert CarriedFunction(bytes(carried.pickle)).load() is loaded


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(): return values", {"values": [1]}),
        ("def f(): return values", {"values": torch.ones(1)}),
        ("def f(): return model", {"model": torch.nn.Linear(1, 1)}),
        ("class C: pass\ndef f(): return C", {}),
        ("def f(x=[]): return x", {}),
        ("def f():\n    global n\n    n += 1\n    return n", {"n": 0}),
        ("def g():\n    global n\n    n += 1\n    return n\ndef f(): return g()", {"n": 0}),
        ("def f(): return t", {"t": (1, [2])}),
    ],
)
def test_what_may_change_is_pickled_anew(source: str, names: dict[str, Any]) -> None:
    assert carry(define(source, **names)) is None


def test_a_global_that_is_another_object_now_counts() -> None:
    function = define("def f(): return factor", factor=1)
    first = carry(function)
    function.__globals__["factor"] = 2
    second = carry(function)
    assert first is not None
    assert second is not None
    assert (first.load()(), second.load()()) == (1, 2)


def test_a_function_that_is_defined_again_counts() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def g(): return 1\ndef f(): return g()", space)
    first = carry(space["f"])
    exec("def g(): return 2", space)
    second = carry(space["f"])
    assert first is not None
    assert second is not None
    assert (first.load()(), second.load()()) == (1, 2)


def test_functions_are_not_kept_alive() -> None:
    function = define("def f(): return 1")
    assert carry(function) is not None
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None


def test_only_functions_are_carried() -> None:
    assert carry(print) is None
    assert carry(torch.nn.Linear) is None
    assert carry([].append) is None


def test_a_value_that_cannot_be_pickled_is_left_to_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("no")

    monkeypatch.setattr(_pickled, "dumps", fail)
    assert carry(define("def f(): return 1")) is None


def test_recursive_functions_are_not_kept_alive_either() -> None:
    def make() -> types.FunctionType:
        found: types.FunctionType = define(
            "def outer():\n    def f(n): return 1 if n == 0 else f(n - 1)\n    return f\nf = outer()"
        )
        return found

    function = make()
    assert carry(function) is not None
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("pickle", ["text", 5, None, [b""], bytearray(b"")])
def test_a_function_by_value_is_one_pickle(pickle: Any) -> None:
    packed = objects.pack(CarriedFunction(pickle), "data", Limits())
    with pytest.raises(DecodeError, match="one pickle"):
        objects.unpack(packed.codec, packed.body, [], "data", Limits())
