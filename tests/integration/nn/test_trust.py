"""With trust="data", modules are made of classes that their owner has exposed, and no code travels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import rpc
from gradwire.errors import ConfigurationError, LimitExceeded, NotExposed
from gradwire.nn import RemoteModule
from gradwire.rpc import set_current_agent


@rpc.expose(name="test_trust.Scaled")
class Scaled(nn.Module):
    """A layer with an exposed method and another one."""

    def __init__(self, size: int, factor: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.factor = factor
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor, sign: int = 1) -> torch.Tensor:
        return self.layer(x) * self.factor * sign

    @rpc.expose(name="test_trust.half")
    def half_of(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) / 2

    def secret(self) -> int:
        return 1


@rpc.expose(name="test_trust.Around")
class Around(nn.Module):
    """A layer after a module of another worker."""

    def __init__(self, inner: RemoteModule) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(3, 1)


class Hidden(nn.Linear):
    """Nobody exposed it."""


@rpc.expose(name="test_trust.fill")
def fill(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        nn.init.constant_(part.weight, 1.0)


@rpc.expose(name="test_trust.triple")
def triple(module: nn.Module, args: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
    return result * 3


@rpc.expose(name="test_trust.nothing")
def nothing(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """A hook that changes nothing."""


@rpc.expose(name="test_trust.use")
def use(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x)
    return result.detach()


@pytest.fixture(autouse=True)
def _three_parties(make_agents: Callable[..., list[rpc.Agent]]) -> Iterator[None]:
    """Workers ``a``, ``b`` and ``c``; the test acts as ``a``."""
    agents = make_agents(3, trust="data")
    set_current_agent(agents[0])
    yield
    set_current_agent(None)


def test_exposed_classes_are_made_and_used() -> None:
    x, local = torch.ones(2, 3), Scaled(3, factor=2.0)
    for module_cls in (Scaled, "test_trust.Scaled"):
        remote = RemoteModule("b", module_cls, (3,), {"factor": 2.0})
        assert torch.equal(remote(x), local(x))
        assert torch.equal(remote(x, sign=-1), local(x, sign=-1))
        assert torch.equal(remote.forward_async(x).wait(), local(x))
        assert torch.equal(remote.half_of(x), local.half_of(x))
        assert torch.equal(rpc.rpc_sync("c", use, args=(remote, x)), local(x))


def test_gradients_and_state() -> None:
    x, local, remote = torch.ones(2, 3, requires_grad=True), Scaled(3), RemoteModule("b", Scaled, (3,))
    local(x).sum().backward()
    with gw.autograd.context() as ctx:
        ctx.backward(remote(x).sum())
        assert torch.equal(ctx.gradients()[x], x.grad)
    state = remote.state_dict()
    assert list(state) == ["layer.weight", "layer.bias"]
    state["layer.bias"].fill_(1.0)
    remote.load_state_dict(state)
    assert torch.equal(remote(x.detach()), local(x.detach()) + 1.0)
    assert remote.eval().training is False
    assert [tuple(rref.to_here().shape) for rref in remote.remote_parameters()] == [(3, 3), (3,)]
    assert remote.double().state_dict()["layer.weight"].dtype == torch.float64


def test_parameters_of_remote_modules_inside_of_others() -> None:
    outer = RemoteModule("c", Around, (RemoteModule("b", Scaled, (3,)),))
    found = [(name, rref.owner_name(), tuple(rref.to_here().shape)) for name, rref in outer.named_remote_parameters()]
    assert found == [
        ("inner.layer.weight", "b", (3, 3)),
        ("inner.layer.bias", "b", (3,)),
        ("last.weight", "c", (1, 3)),
        ("last.bias", "c", (1,)),
    ]


def test_copies() -> None:
    x, inner = torch.ones(2, 3), RemoteModule("b", Scaled, (3,))
    made, outer = copy.deepcopy(inner), copy.deepcopy(RemoteModule("c", Around, (inner,)))
    before = inner(x)
    inner.apply(fill)
    assert torch.equal(made(x), before)
    assert not torch.equal(inner(x), before)
    assert [rref.owner_name() for rref in outer.remote_parameters()] == ["b", "b", "c", "c"]


def test_exposed_functions_are_applied_and_hooked() -> None:
    x, remote = torch.ones(1, 3), RemoteModule("b", Scaled, (3,))
    remote.apply(fill)
    assert torch.equal(remote(x), torch.full((1, 3), 3.0))
    remote.apply("test_trust.fill")
    with remote.register_owner_hook("forward", triple):
        assert torch.equal(remote(x), torch.full((1, 3), 9.0))
    assert torch.equal(remote(x), torch.full((1, 3), 3.0))


def test_what_is_not_exposed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be sent; mark it with @gradwire.rpc.expose"):
        RemoteModule("b", Hidden, (3, 3))
    with pytest.raises(NotExposed, match=r"'torch.nn:Linear' is not exposed on worker "):
        RemoteModule("b", "torch.nn:Linear", (3, 3))(torch.ones(3))
    remote = RemoteModule("b", Scaled, (3,))
    with pytest.raises(NotExposed, match=r"Scaled.secret is not exposed"):
        remote.secret()
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        remote.apply(lambda part: None)


# -- what others may send ----------------------------------------------------------------------------------------------


def ask(remote: RemoteModule, operation: str, *args: object) -> object:
    return remote.module_rref._ask(operation, args, 10.0)


@pytest.mark.parametrize(
    ("operation", "args", "problem"),
    [
        ("gradwire.nn.load", ({1: 2}, {}, False), "a name in the state dict must be a str, not int"),
        ("gradwire.nn.load", ([], {}, False), "state must be a dict, not list"),
        ("gradwire.nn.load", ({}, {"": 5}, False), "an item of the metadata must be a dict, not int"),
        ("gradwire.nn.load", ({}, {}, 1), "assign must be a bool, not int"),
        ("gradwire.nn.values", (5, True), "kind must be a str, not int"),
        ("gradwire.nn.change", ("to", ["cpu"], {}), "args must be a tuple, not list"),
        ("gradwire.nn.forward_by_name", ((), ()), "kwargs must be a dict, not tuple"),
        ("gradwire.nn.forward_by_name", ((), {}, 1), "is_mapped must be a bool, not int"),
        ("gradwire.nn.invoke", (None, (), {}), "name must be a str, not NoneType"),
        ("gradwire.nn.invoke", ("forward", (), {}, "yes"), "is_mapped must be a bool, not str"),
        ("gradwire.nn.parameters", ("yes",), "recurse must be a bool, not str"),
        ("gradwire.nn.has_method", (3,), "name must be a str, not int"),
        ("gradwire.nn.hook", ("forward", "test_trust.triple", None), "options must be a dict, not NoneType"),
        ("gradwire.nn.apply", ([1],), r"gradwire\.nn\.apply needs the name of an exposed class or function, not list"),
    ],
)
def test_arguments_of_other_types_are_refused(operation: str, args: tuple[object, ...], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        ask(RemoteModule("b", Scaled, (3,)), operation, *args)


def test_values_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(ConfigurationError, match='kind must be "parameters" or "buffers", not \'weights\''):
        ask(RemoteModule("b", Scaled, (3,)), "gradwire.nn.values", "weights", True)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (((), (), {}, "cpu", "snapshot"), "needs the name of an exposed class or function, not tuple"),
        (("test_trust.Scaled", [3], {}, "cpu", "snapshot"), "args must be a tuple, not list"),
        (("test_trust.Scaled", (3,), {}, torch.float16, "snapshot"), "device must be a str, not dtype"),
        (("test_trust.Scaled", (3,), {}, "cpu", 7), "mode must be a str, not int"),
    ],
)
def test_module_is_not_made_of_arguments_of_other_types(args: tuple[object, ...], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        rpc.rpc_sync("b", "gradwire.nn.make", args=args)


def test_handle_is_not_called_as_a_class_function_or_hook() -> None:
    """It can be called, but whoever sends it could call the other worker itself."""
    remote, other = RemoteModule("b", Scaled, (3,)), RemoteModule("c", Scaled, (3,))
    with pytest.raises(TypeError, match="not RemoteModule"):
        rpc.rpc_sync("b", "gradwire.nn.make", args=(other, (torch.ones(3),), {}, "cpu", "snapshot"))
    with pytest.raises(TypeError, match="not RemoteModule"):
        ask(remote, "gradwire.nn.apply", other)
    with pytest.raises(TypeError, match="not RemoteModule"):
        ask(remote, "gradwire.nn.hook", "forward", other, {})


@pytest.mark.parametrize("name", ["gradwire.nn.make", "gradwire.rref.fetch", "gradwire.nn.unhook"])
def test_operations_of_gradwire_are_not_applied_nor_hooked(name: str) -> None:
    """They would see what the module is called with instead of what their caller sent."""
    remote = RemoteModule("b", Scaled, (3,))
    for ask_for in (lambda: remote.apply(name), lambda: remote.register_owner_hook("forward", name)):
        with pytest.raises(NotExposed, match=f"'{name}' does not name a class or function for gradwire.nn"):
            ask_for()
    assert remote(torch.ones(1, 3)).shape == (1, 3)


def test_hooks_of_a_module_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.nn.module_owner._MOST_HOOKS", 3)
    remote = RemoteModule("b", Scaled, (3,))
    hooks = [remote.register_owner_hook("forward", triple) for _ in range(3)]
    with pytest.raises(LimitExceeded, match="the module has 3 forward hooks; remove those"):
        remote.register_owner_hook("forward", triple)
    hooks[0].remove()
    remote.register_owner_hook("forward", triple).remove()
    remote.register_owner_hook("forward_pre", "test_trust.nothing").remove()
