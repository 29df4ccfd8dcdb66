"""Tensors that are more than their elements travel where code may: subclasses, quantised and nested tensors, storages."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from fuzz import wire_samples as samples
from gradwire.config import Limits
from gradwire.errors import CannotSend
from gradwire.types import Trust
from gradwire.wire import serialization as objects
from gradwire.wire import tensors

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


def send(value: Any, trust: Trust = "code") -> tuple[Any, objects.Packed]:
    packed = objects.pack(((value,), {}), trust, LIMITS)
    arrived = []
    for tensor in packed.tensors:
        meta, parts = tensors.describe(tensor, LIMITS)
        arrived.append(tensors.rebuild(meta, iter([bytearray(samples.bytes_of(part)) for part in parts])))
    ((made,), _) = objects.unpack(packed.codec, packed.body, arrived, trust, LIMITS)
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
    assert len(packed.body) < 1000, "elements stay outside of the pickle"


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
        assert objects.pack(value, "code", LIMITS).codec == objects.PICKLE, "a result that is nothing else"


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
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "is nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "NestedTensor"),
    ],
)
def test_none_of_them_is_plain_data(make: Callable[[], torch.Tensor], reason: str) -> None:
    value = make()
    for item in (value, [value], ((value,), {})):
        with pytest.raises(CannotSend, match=reason):
            objects.pack(item, "data", LIMITS)


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
        packed = objects.pack([row], "code", LIMITS)
        with pytest.raises(CannotSend, match="vmap"):
            tensors.describe(packed.tensors[0], LIMITS)
        with pytest.raises(CannotSend, match="vmap"):
            send([row.as_subclass(Labelled)])
        return row

    assert torch.vmap(inside)(torch.ones(2, 2)).shape == (2, 2)
