"""With trust="data", modules are made of classes that their owner has exposed, and no code travels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import rpc
from gradwire.errors import ConfigurationError, NotExposed
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
    with pytest.raises(NotExposed, match=r"'torch.nn:Linear' is not exposed on this worker"):
        RemoteModule("b", "torch.nn:Linear", (3, 3))(torch.ones(3))
    remote = RemoteModule("b", Scaled, (3,))
    with pytest.raises(NotExposed, match=r"Scaled.secret is not exposed"):
        remote.secret()
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        remote.apply(lambda part: None)
