"""Connections that end between two workers that live: old references say so, new ones work at once."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gradwire.errors import OwnerLost, RpcError, RRefError, WorkerLost
from gradwire.rpc.agent import Agent, start_worker
from gradwire.rref import context
from gradwire.rref.api import RRef, create
from gradwire.testing import wait_until
from gradwire.types import WorkerAddress
from rpc.puppets import Puppet, PuppetError
from rref import tasks

MakeAgents = Callable[..., list[Agent]]


def reset_connections(agent: Agent) -> None:
    """Ends all connections of a worker without a word, as a firewall would."""
    streams = [item.stream for item in agent.connections()]
    for stream in streams:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(stream.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)


def make_there(agent: Agent, name: str, value: float = 1.0) -> RRef[Any]:
    return create(context.of(agent), name, tasks.make, (value,), None, -1.0)


def share(agent: Agent, value: Any) -> RRef[Any]:
    known = context.of(agent)
    owned = known.make_here()
    owned.set(value)
    return RRef._of(known, owned)


class Ends:
    """Notes which workers have told their layers of the end of which others."""

    def __init__(self, *agents: Agent) -> None:
        self._told: set[tuple[str, str]] = set()
        for agent in agents:
            agent.on_worker_lost(functools.partial(self._note, agent.info.name))

    def _note(self, worker: str, address: WorkerAddress, reason: str) -> None:
        self._told.add((worker, address.info.name))

    def wait(self, *pairs: tuple[str, str]) -> None:
        """Waits until each first one takes the second one for dead."""
        wait_until(lambda: self._told.issuperset(pairs), 10.0, f"that it is noticed: {pairs}")


def wait_nothing_left(*agents: Agent) -> None:
    def left() -> list[Any]:
        counts = [context.of(agent).statistics() for agent in agents]
        return [
            found for found in counts if found.num_values + found.num_forks + found.num_children + found.num_messages
        ]

    wait_until(lambda: not left(), 20.0, "that no reference is left")


def test_new_references_work_at_once_in_both_directions(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    old = [make_there(a, "b"), make_there(b, "a")]
    for rref in old:
        assert rref._ask("gradwire.rref.fetch", (), -1.0).tolist() == [1.0] * 3
    ends = Ends(a, b)
    reset_connections(a)
    ends.wait(("a", "b"), ("b", "a"))
    for agent, name in ((a, "b"), (b, "a")):
        new = make_there(agent, name, 2.0)
        assert new.to_here().tolist() == [2.0] * 3
        assert agent.call(name, tasks.fetch, (share(agent, 3.0),)) == 3.0
    for rref, name in zip(old, "ba", strict=True):
        with pytest.raises(
            OwnerLost, match=rf"reference .* to a value of worker {name} is lost: .* Create the value again"
        ):
            rref.to_here()
    del old, rref, new
    wait_nothing_left(a, b)


def test_connection_waits_until_the_end_before_it_has_been_told(make_agents: MakeAgents) -> None:
    """Or what is made over the new connection would be lost with the old one."""
    a, b = make_agents(2)
    assert make_there(a, "b").to_here().tolist() == [1.0] * 3
    may_go_on, begun = threading.Event(), threading.Event()

    def tell_slowly(*_: Any) -> None:
        begun.set()
        assert may_go_on.wait(20.0)

    a._lost_callbacks.insert(0, tell_slowly)
    made: list[RRef[Any]] = []
    reset_connections(b)
    assert begun.wait(10.0)
    thread = threading.Thread(target=lambda: made.append(make_there(a, "b", 2.0)), name="maker")
    thread.start()
    wait_until(lambda: a._told._waiters, 10.0, "that a new connection waits")
    may_go_on.set()
    thread.join(20.0)
    assert made.pop().to_here().tolist() == [2.0] * 3


class Late:
    """Makes a worker notice the end of its connections late."""

    def __init__(self, agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_go_on, self.is_over = threading.Event(), threading.Event(), threading.Event()
        self._report = agent.on_worker_ended
        monkeypatch.setattr(agent, "on_worker_ended", self._wait)

    def _wait(self, *args: Any, **kwargs: Any) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(20.0)
        self._report(*args, **kwargs)
        self.is_over.set()


@pytest.mark.parametrize("connects_again", ["the one that had connected", "the other one"])
def test_a_worker_connects_again_before_both_have_noticed_the_end(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch, connects_again: str
) -> None:
    """Whoever has noticed less catches up first; else it would take the new connection for one of those that ended."""
    a, b = make_agents(2)
    assert make_there(a, "b").to_here().tolist() == [1.0] * 3
    first, second = (a, b) if connects_again == "the one that had connected" else (b, a)
    late = Late(b, monkeypatch)
    ends = Ends(a, b)
    reset_connections(b)
    ends.wait(("a", "b"))
    assert late.has_begun.wait(10.0)
    new = make_there(first, second.info.name, 2.0)
    assert new.to_here().tolist() == [2.0] * 3
    ends.wait(("b", "a"))
    lanes = dict(first.peers.peer(second.info.name).lanes)
    late.may_go_on.set()
    assert late.is_over.wait(10.0)
    assert new.to_here().tolist() == [2.0] * 3
    assert first.peers.peer(second.info.name).lanes == lanes
    del new
    wait_nothing_left(a, b)


def test_a_worker_that_was_found_dead_before_it_ever_connected_notices_no_end(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    b.on_worker_ended(a.address, "it cannot be reached", was_orderly=False)
    ends: list[Any] = []
    a.on_worker_lost(lambda *end: ends.append(end))
    assert a.call("b", os.getpid) == os.getpid()
    assert ends == []
    assert not b.has_ended("a")


def test_a_value_that_was_given_up_before_the_reset_is_freed(make_agents: MakeAgents) -> None:
    """Its call was cancelled by its deadline, and what says so was under way when the connection ended."""
    a, b = make_agents(2)
    tasks.gate.clear()
    known = context.of(a)
    rref = create(known, "b", tasks.wait_gate, (), None, 0.1)
    wait_until(lambda: rref._state.is_done, 10.0, "that the call is given up")
    ends = Ends(a, b)
    reset_connections(a)
    tasks.gate.set()
    ends.wait(("a", "b"), ("b", "a"))
    a.call("b", os.getpid)
    rref.close()
    wait_nothing_left(a, b)


def use_a_reference(a: Agent) -> None:
    assert a.call("b", tasks.fetch, (share(a, 2),)) == 2


def connect_again(a: Agent) -> None:
    """As a handshake does, with one of the lanes that are open already."""
    a.on_connected(a.peers.address_of("b"))


@pytest.mark.parametrize("meet", [use_a_reference, connect_again])
def test_one_that_is_struck_off_meanwhile_is_told(make_agents: MakeAgents, meet: Callable[[Agent], None]) -> None:
    """Only the owner has taken the other for dead: the holder hears that its reference is gone, not only that it fails."""
    a, b = make_agents(2)
    rref = share(a, [1])
    a.call("b", tasks.keep, ("x", rref))
    held = tasks.KEPT.pop("x")
    wait_until(lambda: not context.of(a).statistics().num_children, 10.0, "that its arrival is known")
    context.of(a)._lose(context.of(b).own, "test")
    wait_until(lambda: not context.of(a).holders(), 10.0, "that b is struck off")
    assert "broken" not in repr(held)
    meet(a)
    wait_until(lambda: "broken" in repr(held), 10.0, "that b knows")
    with pytest.raises(OwnerLost, match="its owner could not reach this worker"):
        held.to_here()
    rref.close()
    held.close()
    wait_nothing_left(a, b)


def send_around(agent: Agent, other: Agent, agents: list[Agent], to_reset: Agent | None) -> None:
    rrefs = [make_there(agent, other.info.name) for _ in range(5)]
    futures = [agent.submit(third.info.name, tasks.fetch, (rref,)) for third in agents for rref in rrefs[:2]]
    if to_reset is not None:
        reset_connections(to_reset)
    for future in futures:
        with contextlib.suppress(RpcError, RRefError):
            future.wait()


def can_make(agent: Agent, name: str) -> bool:
    try:
        return bool(make_there(agent, name).to_here().tolist() == [1.0] * 3)
    except WorkerLost:
        return False


def test_resets_in_the_middle_of_everything_leave_nothing(make_agents: MakeAgents) -> None:
    """Three workers send references around while connections end again and again.

    A function may wait for a value whose creation was lost with a connection; that wait ends with the call's deadline.
    """
    agents = make_agents(3, rpc_timeout_s=10.0)
    for number in range(30):
        agent, other = agents[number % 3], agents[(number + 1 + number // 3 % 2) % 3]
        with contextlib.suppress(RpcError):
            send_around(agent, other, agents, agents[number // 2 % 3] if number % 2 else None)
    for agent in agents:
        for other in agents:
            if agent is not other:
                wait_until(functools.partial(can_make, agent, other.info.name), 10.0, "that the last reset is noticed")
    wait_nothing_left(*agents)


SETUP = (
    "from gradwire.rpc import RRef\nfrom rref import tasks\nfrom rref.test_reconnection import Ends, reset_connections"
)
TRAIN = """
from gradwire.nn import RemoteModule
from gradwire import autograd
from gradwire.optim import DistributedOptimizer
def train(to):
    module = RemoteModule(to, torch.nn.Linear, (2, 1))
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.5)
    weight = module.get_module_rref().remote().get_parameter("weight")
    before = weight.to_here().detach().clone()
    with autograd.context() as context_id:
        autograd.backward(context_id, [module.forward(torch.ones(1, 2)).sum()])
        optimizer.step(context_id)
    return (before - weight.to_here()).round(decimals=4).tolist()  # weights are random, differences not exact
"""


@pytest.mark.slow
def test_modules_and_optimizers_work_after_a_reset(workers: Callable[..., list[Puppet]]) -> None:
    first, second = workers(2)
    for puppet in (first, second):
        puppet.do(SETUP)
        puppet.do(TRAIN)
    assert first.do("train('w1')") == [[0.5, 0.5]]
    first.do("held = rpc.remote('w1', tasks.make, args=(1.0,)); held._get_future().wait()")
    first.do("agent = rpc.current_agent(); ends = Ends(agent); reset_connections(agent)")
    first.do("ends.wait(('w0', 'w1'))")  # they may be connected again by now
    for puppet, other in ((first, "w1"), (second, "w0")):
        assert puppet.do(f"train({other!r})") == [[0.5, 0.5]]
    with pytest.raises(PuppetError) as caught:
        first.do("held.to_here()")
    assert caught.value.kind == "OwnerLost"
    for puppet in (first, second):
        puppet.start("rpc.shutdown()")
    for puppet in (first, second):
        puppet.result()


def test_nothing_is_kept_for_an_earlier_life_of_a_worker_that_was_restarted(make_agents: MakeAgents) -> None:
    """No supervisor says that it is dead, so it might come back until its next life is connected."""
    a, b = make_agents(2)
    held = [make_there(b, "a") for _ in range(3)] + [make_there(a, "b")]
    assert [rref.to_here().tolist() for rref in held] == [[1.0] * 3] * 4
    known, earlier = context.of(a), (b.info.id, b.address.incarnation)
    ends = Ends(a)
    reset_connections(b)
    b.close()
    ends.wait(("a", "b"))
    wait_until(lambda: tasks.num_remembered(known._ownership) > 0, 10.0, "that what b held is struck off")
    assert earlier in known._outbox._channels
    with contextlib.closing(start_worker(b.info, b.config, a.directory, after=earlier[1])) as again:
        again.call("a", tasks.make, (1.0,))
        assert earlier not in known._outbox._channels
        assert tasks.num_remembered(known._ownership) == 0
