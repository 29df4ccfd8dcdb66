"""With trust="data" references work, and nothing runs that is not exposed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradwire import rpc
from gradwire.errors import DecodeError, NotExposed, RpcTimeout, RRefError
from gradwire.rref import _ownership, context
from gradwire.rref.api import RRef, create
from gradwire.rref.owner import FETCH, INVOKE
from gradwire.rref.values import Owned, describe
from gradwire.testing.agents import wait_until
from gradwire.types import COUNTER_BITS

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


@rpc.expose(name="test_trust.keep")
def keep(rref: rpc.RRef[torch.Tensor]) -> None:
    _kept.append(rref)


_kept: list[rpc.RRef[torch.Tensor]] = []
rpc.expose(Adder.add, name="test_trust.add")


def share(owner: rpc.Agent, value: object) -> RRef[object]:
    """A value of a worker that its own code refers to."""
    known = context.of(owner)
    owned = Owned(known.new_id())
    owned.set(value)
    return RRef._of(known, owned)


def invented(worker: rpc.Agent, number: int) -> int:
    """An id that a worker could have given out and did not."""
    return (worker.info.id << COUNTER_BITS) + number


def test_values_travel_as_data(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3, trust="data")
    rref = create(context.of(a), "b", ones, (3,), None, -1.0)
    assert rref.to_here().tolist() == [1.0] * 3
    assert a.call("c", total, (rref,)) == 3.0
    assert a.call("b", "test_trust.total", (rref,)) == 3.0
    assert {agent.trust for agent in (a, b, c)} == {"data"}


def test_only_exposed_methods_are_called(make_agents: MakeAgents) -> None:
    a, _ = make_agents(2, trust="data")
    rref = create(context.of(a), "b", "test_trust.make_adder", (), None, -1.0)
    assert rref.rpc_sync().add(torch.ones(2)).tolist() == [1.0, 1.0]
    for name in ("secret", "__init__", "__reduce__", "__class__"):
        with pytest.raises(NotExposed, match="not exposed"):
            a.call("b", INVOKE, (rref._state.rref_id, None, name, (), {}))


def test_functions_that_are_not_exposed_make_no_value(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, trust="data")
    rref = create(context.of(a), "b", "os:getpid", (), None, -1.0)
    with pytest.raises(NotExposed, match="os:getpid"):
        rref.to_here()
    assert context.of(b).statistics().num_values == 0


@pytest.mark.parametrize(
    "args",
    [("x", None), (1.5, None), (1, (1,)), (1, ("a", "b")), (1, 5)],
    ids=["text", "float", "short", "words", "number"],
)
def test_forged_ids_are_refused(make_agents: MakeAgents, args: tuple[object, ...]) -> None:
    a, _ = make_agents(2, trust="data")
    with pytest.raises(DecodeError, match="not a valid reference id"):
        a.call("b", "gradwire.rref.fetch", args)


def test_an_id_that_nobody_gave_out(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, trust="data")
    with pytest.raises(RuntimeError, match="does not have the value of reference"):
        a.call("b", "gradwire.rref.fetch", (12345, None))
    assert context.of(b).statistics().num_values == 0


@pytest.mark.parametrize(
    ("function", "more"),
    [("fetch", ()), ("type_of", ()), ("invoke", ("sum", (), {})), ("backward", (1, False))],
    ids=["fetch", "type", "invoke", "backward"],
)
def test_only_holders_reach_a_value(make_agents: MakeAgents, function: str, more: tuple[object, ...]) -> None:
    a, b, c = make_agents(3, trust="data")
    rref = share(a, torch.tensor([42.0]))
    a.call("b", keep, (rref,))  # c never gets it
    rref_id = rref._state.rref_id
    for maker in (None, context.of(c).own):
        with pytest.raises(RRefError, match=rf"reference {describe(rref_id)} for c: .* holds no reference"):
            c.call("a", f"gradwire.rref.{function}", (rref_id, maker, *more))
    assert b.call("a", FETCH, (rref_id, None)).tolist() == [42.0]
    _kept.pop().close()
    wait_until(lambda: not context.of(a).holders(), what="b letting go of the value")
    with pytest.raises(RRefError, match="holds no reference"):
        b.call("a", FETCH, (rref_id, None))
    assert rref.to_here().tolist() == [42.0]  # type: ignore[attr-defined]


def test_what_is_not_here_is_refused_in_the_same_words(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3, trust="data")
    rref = share(a, 1)
    a.call("b", keep, (rref,))
    texts = []
    for rref_id in (rref._state.rref_id, invented(a, 7)):
        with pytest.raises(RRefError) as caught:
            c.call("a", FETCH, (rref_id, None))
        texts.append(str(caught.value).replace(describe(rref_id), "?"))
    assert texts[0] == texts[1]
    _kept.pop().close()
    assert b.trust == "data"


@pytest.mark.parametrize("trust", ["data", "code"])
def test_nobody_waits_in_the_name_of_another_worker(make_agents: MakeAgents, trust: str) -> None:
    a, b, c = make_agents(3, trust=trust)
    with pytest.raises(DecodeError, match="c gave another worker as the creator of reference 1:5"):
        c.call("a", FETCH, (invented(b, 5), context.of(b).own))
    with pytest.raises(RRefError, match="does not have the value of reference 1:5 for c"):
        c.call("a", FETCH, (invented(b, 5), context.of(c).own))
    assert context.of(a).statistics().num_values == 0


def test_number_of_values_that_never_come_is_bounded(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ownership, "_MAX_EXPECTED", 3)
    a, b, _ = make_agents(3, trust="data")
    own = context.of(b).own
    futures = [b.submit("a", FETCH, (invented(b, number), own), timeout_s=1.0) for number in range(3)]
    for future in futures:
        with pytest.raises(RpcTimeout):
            future.wait()
    with pytest.raises(RRefError, match=r"too many values created by calls from b, .* reference 1:3\. Wait"):
        b.call("a", FETCH, (invented(b, 3), own))
    assert context.of(a).statistics().num_values == 3
    rref = create(context.of(b), "a", ones, (2,), None, -1.0)  # calls that make their values are not counted
    assert b.call("a", FETCH, (rref._state.rref_id, own)).tolist() == [1.0, 1.0]
    b.close()
    wait_until(lambda: context.of(a).statistics().num_values == 0, what="a giving up")
