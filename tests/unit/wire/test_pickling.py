"""Pickles: tensors that are more than their elements, functions by value and by name."""

from __future__ import annotations

import copyreg
import functools
import gc
import importlib
import math
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from fuzz import wire_samples as samples
from gradwire import _interrupts
from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, GradwireError
from gradwire.testing import wait_until
from gradwire.types import Trust
from gradwire.wire import pickling, serialization, tensors
from gradwire.wire.pickling import CarriedFunction, carry

LIMITS = Limits()
LARGE = 10_000
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Labelled(torch.Tensor):
    """Adds attributes."""


class Guarded(torch.Tensor):
    """Lets no function of torch be called with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("not to be called")


class GuardedGraph(Guarded):
    """The same, and says itself how it is rebuilt."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _rebuild_guarded, (self.as_subclass(torch.Tensor),)


def _rebuild_guarded(plain: torch.Tensor) -> torch.Tensor:
    return plain.as_subclass(GuardedGraph)


class Scaled(torch.nn.Parameter):
    """A parameter of another class."""


class WithState(torch.Tensor):
    """Decides what its attributes travel as."""

    def __getstate__(self) -> dict[str, Any]:
        return {"text": "sent"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.text = state["text"] + " and set"


class Graph(torch.Tensor):
    """Edges: a wrapper around its data, as graph libraries have them, made by a constructor with more arguments."""

    _data: torch.Tensor
    num_nodes: int

    @staticmethod
    def __new__(cls, data: torch.Tensor, num_nodes: int) -> Graph:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device, requires_grad=data.requires_grad
        )
        made._data, made.num_nodes = data, num_nodes
        return made  # type: ignore[no-any-return]

    def __init__(self, data: torch.Tensor, num_nodes: int) -> None:
        """All is done in `__new__`."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = [item._data if isinstance(item, Graph) else item for item in args]
        return func(*unwrapped, **(kwargs or {}))


class ReducedGraph(Graph):
    """Says itself how it is rebuilt."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ReducedGraph, (self._data, self.num_nodes + 1)


class Registered(torch.Tensor):
    """Known to `copyreg`."""


def make_registered(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).as_subclass(Registered)


@pytest.fixture
def _registered() -> Iterator[None]:
    copyreg.pickle(Registered, lambda item: (make_registered, (item.tolist(),)))
    yield
    del copyreg.dispatch_table[Registered]


def send(value: Any, trust: Trust = "code") -> tuple[Any, serialization.Packed]:
    packed = serialization.pack(((value,), {}), trust, LIMITS)
    arrived = []
    for tensor in packed.tensors:
        meta, parts = tensors.describe(tensor, LIMITS)
        arrived.append(tensors.rebuild(meta, iter([bytearray(samples.bytes_of(part)) for part in parts])))
    ((made,), _) = serialization.unpack(packed.codec, packed.body, arrived, trust, LIMITS)
    return made, packed


def make_labelled() -> torch.Tensor:
    value: Any = torch.arange(float(LARGE)).as_subclass(Labelled)
    value.label, value.itself, value.weights = "first", value, torch.ones(LARGE)
    return value  # type: ignore[no-any-return]


def test_a_subclass_keeps_class_elements_and_attributes() -> None:
    made, packed = send(make_labelled())
    assert type(made) is Labelled
    assert made.label == "first"
    assert made.itself is made
    assert type(made.weights) is torch.Tensor
    assert torch.equal(made.as_subclass(torch.Tensor), torch.arange(float(LARGE)))
    assert [tensor.numel() for tensor in packed.tensors] == [LARGE, LARGE]
    assert len(packed.body) < 1000, "elements stay outside the pickle"


def test_the_same_tensor_twice_arrives_as_one() -> None:
    value = make_labelled()
    (first, second), packed = send((value, value))
    assert first is second
    assert len(packed.tensors) == 2


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_of_another_class_stays_a_leaf_of_it(requires_grad: bool) -> None:
    value: Any = Scaled(torch.ones(3), requires_grad=requires_grad)
    value.factor = 2
    made, _ = send(value)
    assert type(made) is Scaled
    assert isinstance(made, torch.nn.Parameter)
    assert made.is_leaf
    assert not made._is_view()
    assert made.requires_grad is requires_grad
    assert made.factor == 2


@pytest.mark.parametrize("kind", [Guarded, GuardedGraph])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_functions_of_the_class_are_not_called(kind: type[torch.Tensor], requires_grad: bool) -> None:
    made, packed = send(torch.ones(3, requires_grad=requires_grad).as_subclass(kind))
    assert type(made) is kind
    assert packed.untracked == []
    with torch._C.DisableTorchFunctionSubclass():
        assert made.tolist() == [1.0, 1.0, 1.0]
        assert made.requires_grad is requires_grad


def test_the_class_decides_about_its_state() -> None:
    made, _ = send(torch.ones(3).as_subclass(WithState))
    assert made.text == "sent and set"


@pytest.mark.parametrize(("kind", "num_nodes"), [(Graph, 5), (ReducedGraph, 6)])
def test_wrappers_travel_with_what_they_wrap(kind: type[Graph], num_nodes: int) -> None:
    made, packed = send(kind(torch.arange(2 * LARGE).view(2, LARGE), 5))
    assert type(made) is kind
    assert made.shape == (2, LARGE)
    assert made.num_nodes == num_nodes
    assert torch.equal(made._data, torch.arange(2 * LARGE).view(2, LARGE))
    assert len(packed.body) < 1000
    both, _ = send(TwoTensor(torch.ones(2), torch.zeros(2)))
    assert (both.a.tolist(), both.b.tolist()) == ([1.0, 1.0], [0.0, 0.0])


@pytest.mark.usefixtures("_registered")
def test_what_is_known_to_copyreg_is_used() -> None:
    made, packed = send(make_registered([1.0, 2.0]))
    assert type(made) is Registered
    assert made.tolist() == [1.0, 2.0]
    assert packed.tensors == []


@pytest.mark.parametrize("kind", [torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer])
def test_lazy_parameters_and_modules(kind: Callable[[], torch.Tensor]) -> None:
    made, packed = send(kind())
    assert type(made) is kind
    assert packed.untracked == [], "there is nothing to differentiate yet"
    module, _ = send(torch.nn.LazyLinear(3))
    assert module.has_uninitialized_params()
    assert module(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8])
def test_quantised_tensors(dtype: torch.dtype) -> None:
    values, scales = torch.randn(100, 100), torch.rand(100) + 0.1
    whole = torch.quantize_per_tensor(values, 0.1, 3, dtype)
    for value in (whole, torch.quantize_per_channel(values, scales, torch.zeros(100), 0, dtype), whole[3]):
        made, packed = send(value)
        assert made.dtype is dtype
        assert made.qscheme() is value.qscheme()
        assert torch.equal(made.int_repr(), value.int_repr())
        assert torch.equal(made.dequantize(), value.dequantize())
        assert len(packed.body) < 1000
        assert serialization.pack(value, "code", LIMITS).codec == serialization.PICKLE, "a result that is nothing else"


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    value = torch.nested.nested_tensor([torch.ones(2, 3), torch.arange(6.0).view(2, 3)], layout=layout)
    made, _ = send([value, value])
    for item in made:
        assert item.is_nested
        assert item.layout is layout
        assert all(torch.equal(*pair) for pair in zip(item.unbind(), value.unbind(), strict=True))


def test_storages_stay_outside_of_the_pickle() -> None:
    storage = torch.arange(float(LARGE)).untyped_storage()
    made, packed = send(storage)
    assert type(made) is torch.UntypedStorage
    assert bytes(made[:80].tolist()) == bytes(storage[:80].tolist())
    assert len(packed.body) < 1000


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(2).as_subclass(Labelled), r"Labelled .* such as x.as_subclass\(torch.Tensor\)"),
        (lambda: Graph(torch.ones(2), 1), "Graph"),
        (torch.nn.UninitializedParameter, "UninitializedParameter"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "is nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_none_of_them_is_plain_data(make: Callable[[], torch.Tensor], reason: str) -> None:
    value = make()
    for item in (value, [value], ((value,), {})):
        with pytest.raises(CannotSend, match=reason):
            serialization.pack(item, "data", LIMITS)


def test_tensors_of_one_place_stay_there() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor import DTensor

    with FakeTensorMode():
        fake = torch.empty(2)
    with pytest.raises(CannotSend, match="FakeTensor"):
        send([fake])
    distributed = torch.Tensor._make_wrapper_subclass(DTensor, (2,))  # needs no process group
    with pytest.raises(CannotSend, match=r"DTensor; send its local part, tensor.to_local\(\)"):
        send([distributed])

    def inside(row: torch.Tensor) -> torch.Tensor:
        packed = serialization.pack([row], "code", LIMITS)
        with pytest.raises(CannotSend, match="vmap"):
            tensors.describe(packed.tensors[0], LIMITS)
        with pytest.raises(CannotSend, match="vmap"):
            send([row.as_subclass(Labelled)])
        return row

    assert torch.vmap(inside)(torch.ones(2, 2)).shape == (2, 2)


def round_trip(value: Any) -> Any:
    packed = serialization.pack(value, "code", LIMITS)
    return serialization.unpack(packed.codec, packed.body, packed.tensors, "code", LIMITS)


class Unregistered(NamedTuple):
    x: int


def test_lambdas_closures_and_local_classes_go_by_value() -> None:
    offset = torch.tensor([10.0])

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    add, made = round_trip((lambda x: x + offset, Local(3)))
    assert add(1.0).item() == 11.0
    assert made.value == 3
    packed = serialization.pack(lambda: offset, "code", LIMITS)
    assert packed.tensors[0] is offset


def test_modules_are_pickled_around_their_tensors() -> None:
    model = torch.nn.Linear(2, 3)
    packed = serialization.pack(model, "code", LIMITS)
    assert len(packed.tensors) == 2
    arrived = serialization.unpack(packed.codec, packed.body, packed.tensors, "code", LIMITS)
    assert torch.equal(arrived(torch.ones(2)), model(torch.ones(2)))


class FromMain:
    pass


def test_what_main_defines_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    by_reference = serialization.pack(FromMain(), "code", LIMITS).body
    monkeypatch.setattr(FromMain, "__module__", "__main__")
    by_value = serialization.pack(FromMain(), "code", LIMITS).body
    assert b"cloudpickle" in by_value
    assert b"cloudpickle" not in by_reference
    assert serialization.function_name(FromMain) is None


class Reentrant:
    """Packs something else while it is pickled, as a class that makes a call would."""

    def __reduce__(self) -> Any:
        inner = serialization.pack(Unregistered(5), "code", LIMITS)
        return (bytes, (inner.body,))


def test_pack_inside_of_pack_and_from_many_threads() -> None:
    body = round_trip(Reentrant())
    assert serialization.unpack(serialization.PICKLE, body, [], "code", LIMITS) == Unregistered(5)
    with ThreadPoolExecutor(8) as pool:
        arrived = list(pool.map(lambda i: round_trip([Unregistered(i), torch.tensor(i)]), range(200)))
    assert [(item.x, tensor.item()) for item, tensor in arrived] == [(i, i) for i in range(200)]


class Refusing:
    def __reduce__(self) -> Any:
        raise CannotSend("a Refusing stays where it is")


def test_class_may_say_itself_why_it_cannot_be_sent() -> None:
    with pytest.raises(CannotSend, match="stays where it is"):
        serialization.pack([Refusing()], "code", LIMITS)


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (b"", DecodeError, "not a pickle"),
        (b"\x80\x05garbage", GradwireError, "pickle|rebuilt"),
        (b"cno_such_module\nf\n.", CannotSend, "importable on both workers"),
        (b"coperator\nno_such_function\n.", CannotSend, "importable on both workers"),
        (b"cbuiltins\nint\n(S'x'\ntR.", CannotSend, "ValueError"),
        (b"\x80\x05K\x07Q.", DecodeError, "tensor 7"),
    ],
)
def test_bad_pickles(body: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        serialization.unpack(serialization.PICKLE, body, [], "code", LIMITS)


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
    name = serialization.function_name(fn)
    assert name is not None
    assert serialization.resolve_function(name) is fn


def test_functions_of_this_module() -> None:
    assert serialization.function_name(module_function) == f"{__name__}:module_function"
    assert serialization.function_name(Worker.stand) == f"{__name__}:Worker.stand"
    assert serialization.function_name(Worker.run) == f"{__name__}:Worker.run"
    for fn in (Worker.make, Child.make):
        name = serialization.function_name(fn)
        assert name is not None
        assert serialization.resolve_function(name)() == fn()


def test_functions_without_a_name() -> None:
    def closure() -> None:
        pass

    for fn in (closure, lambda: 1, functools.partial(len, []), Worker().run, [].append, torch.nn.ReLU(), None):
        assert serialization.function_name(fn) is None
    assert serialization.function_name(torch.add) == "torch:add"


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
        serialization.resolve_function(name)


CIRCLE = {
    "__init__": "from circle import first",
    "first": "import importing; importing.begun.set(); assert importing.go_on.wait(30); from circle.second import f",
    "second": "from circle import first\ndef f(): return 7",
}


@pytest.mark.parametrize("how", ["by name", "in a pickle"])
def test_a_module_of_a_package_that_another_thread_is_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Where modules of a package import each other, to import one of them meanwhile fails in one of the threads."""
    (tmp_path / "circle").mkdir()
    for name, text in CIRCLE.items():
        (tmp_path / "circle" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importing: Any = types.ModuleType("importing")
    importing.begun, importing.go_on = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "importing", importing)
    identity: list[int] = []

    def find() -> Any:
        identity.append(threading.get_ident())
        if how == "by name":
            return serialization.resolve_function("circle.second:f")
        return pickling.loads(b"ccircle.second\nf\n.", [])

    def is_waiting() -> bool:
        frame = sys._current_frames().get(identity[0]) if identity else None
        return (
            frame is not None
            and "importlib._bootstrap" in frame.f_code.co_filename
            and frame.f_code.co_name == "acquire"
        )

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(importlib.import_module, "circle")
        try:
            assert importing.begun.wait(30)
            found = pool.submit(find)
            wait_until(is_waiting, 30.0, "that the second thread waits for the first")
        finally:
            importing.go_on.set()
        other.result(30)
        assert found.result(30)() == 7
    for name in [name for name in sys.modules if name.split(".")[0] == "circle"]:
        del sys.modules[name]


SLOW = "import importing\ndef f(): return g()\nimporting.begun.set(); assert importing.go_on.wait(30)\n"


@pytest.mark.parametrize(
    ("rest", "expected"),
    [("def g(): return 7", "7"), ("raise OSError('no disk')", "OSError: no disk"), ("del f", "NoSuchFunction")],
)
def test_a_function_of_a_module_that_another_thread_is_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str, expected: str
) -> None:
    """The function exists already, but not what it uses."""
    (tmp_path / "slow_module.py").write_text(SLOW + rest)
    monkeypatch.syspath_prepend(tmp_path)
    importing: Any = types.ModuleType("importing")
    importing.begun, importing.go_on = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "importing", importing)
    is_waiting = threading.Event()
    sleep = _interrupts.sleep

    def note(seconds: float) -> None:
        is_waiting.set()
        sleep(seconds)

    monkeypatch.setattr(_interrupts, "sleep", note)
    monkeypatch.setattr(pickling, "_IMPORT_S", 30.0)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(importlib.import_module, "slow_module")
        try:
            assert importing.begun.wait(30)
            found = pool.submit(serialization.resolve_function, "slow_module:f")
            wait_until(lambda: is_waiting.is_set() or found.done(), 30.0, "that the second thread waits for the first")
            assert not found.done()
        finally:
            importing.go_on.set()
        error = found.exception(30)
        assert expected in (f"{type(error).__name__}: {error}" if error else str(found.result()()))
        assert other.exception(30) is None or rest.startswith("raise")
    sys.modules.pop("slow_module", None)


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
        ("class C: pass\nkind = list[C]\ndef f(): return kind", {}),
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
    assert carry(len) is None
    assert carry(torch.nn.Linear) is None
    assert carry([].append) is None


def test_a_value_that_cannot_be_pickled_is_left_to_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("no")

    monkeypatch.setattr(pickling, "dumps", fail)
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
    packed = serialization.pack(CarriedFunction(pickle), "data", Limits())
    with pytest.raises(DecodeError, match="a single pickle"):
        serialization.unpack(packed.codec, packed.body, [], "data", Limits())
