"""With trust="data" references work, and nothing runs that is not exposed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradwire import rpc
from gradwire.errors import DecodeError, NotExposed
from gradwire.rref import operations, references
from gradwire.rref.api import create

MakeAgents = Callable[..., list[rpc.Agent]]


class Adder:
    """A value with an exposed method and another one."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return self.total

    def secret(self) -> int:
        return 1


@rpc.expose(name="test_trust.make_adder")
def make_adder() -> Adder:
    return Adder()


@rpc.expose(name="test_trust.ones")
def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


@rpc.expose(name="test_trust.total")
def total(rref: rpc.RRef[torch.Tensor]) -> float:
    return float(rref.to_here().sum())


rpc.expose(Adder.add, name="test_trust.add")


def test_values_travel_as_data(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3, trust="data")
    rref = create(references.of(a), "b", ones, (3,), None, -1.0)
    assert rref.to_here().tolist() == [1.0] * 3
    assert a.call("c", total, (rref,)) == 3.0
    assert a.call("b", "test_trust.total", (rref,)) == 3.0
    assert {agent.trust for agent in (a, b, c)} == {"data"}


def test_only_exposed_methods_are_called(make_agents: MakeAgents) -> None:
    a, _ = make_agents(2, trust="data")
    rref = create(references.of(a), "b", "test_trust.make_adder", (), None, -1.0)
    assert rref.rpc_sync().add(torch.ones(2)).tolist() == [1.0, 1.0]
    for name in ("secret", "__init__", "__reduce__", "__class__"):
        with pytest.raises(NotExposed, match="not exposed"):
            a.call("b", operations.INVOKE, (rref._state.rref_id, None, name, (), {}))


def test_functions_that_are_not_exposed_make_no_value(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, trust="data")
    rref = create(references.of(a), "b", "os:getpid", (), None, -1.0)
    with pytest.raises(NotExposed, match="os:getpid"):
        rref.to_here()
    assert references.of(b).statistics().num_values == 0


@pytest.mark.parametrize(
    "args",
    [("x", None), (1.5, None), (1, (1,)), (1, ("a", "b")), (1, 5)],
    ids=["text", "float", "short", "words", "number"],
)
def test_forged_ids_are_refused(make_agents: MakeAgents, args: tuple[object, ...]) -> None:
    a, _ = make_agents(2, trust="data")
    with pytest.raises(DecodeError, match="not the id of a reference"):
        a.call("b", "gradwire.rref.fetch", args)


def test_an_id_that_nobody_gave_out(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, trust="data")
    with pytest.raises(RuntimeError, match="does not have the value of reference"):
        a.call("b", "gradwire.rref.fetch", (12345, None))
    assert references.of(b).statistics().num_values == 0
