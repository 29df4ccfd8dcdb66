"""Workers over TLS through a network that is slow, stands still for a while, or breaks connections."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from faults.network import Proxy
from gradwire import autograd, rpc
from gradwire.errors import RpcTimeout, WorkerLost
from gradwire.rpc import Agent, client, set_current_agent
from gradwire.rpc.connection import Connection
from gradwire.rpc.peers import StaticDirectory
from gradwire.transports.tls import keys_for, make_keys
from rpc import handlers
from rpc.fixtures import MakeAgents
from rpc.puppets import wait_until

DELAY_S = 0.05


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keys")
    make_keys(made / "keys", ["a", "b", "c"])
    return made / "keys"


@pytest.fixture
def network(
    make_agents: MakeAgents, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Agent], list[Proxy]]]:
    """Three workers; each is reached through a proxy of its own, at the same port of another address of loopback."""
    monkeypatch.setattr(client, "_PHASE_GRACE_S", 0.25)  # it is asked through the proxy
    with contextlib.ExitStack() as stack:
        directory, agents, proxies = StaticDirectory(), [], []
        for number, name in enumerate("abc"):
            settings = {"tls": keys_for(keys, name), "trust": "code", "advertised_host": f"127.0.0.{number + 2}"}
            (agent,) = make_agents(name, directory=directory, transports=("tcp",), **settings)
            host, _, port = agent.address.uris[0].removeprefix("tcp://").removesuffix("?tls").rpartition(":")
            proxy = Proxy(host, int(port), ("127.0.0.1", int(port)))
            stack.callback(proxy.close)
            agents.append(agent)
            proxies.append(proxy)
        set_current_agent(agents[0])
        yield agents, proxies
        for proxy in proxies:
            proxy.release()
        for agent in agents:
            agent.close()


def _train(peers: tuple[str, str] | None, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a loss through two workers; of one process if none are given."""
    x = x.clone().requires_grad_()
    if peers is None:
        torch.tanh(torch.mul(x, 3.0)).sum().backward()
        assert x.grad is not None
        return x.grad
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(peers[1], torch.tanh, args=(rpc.rpc_sync(peers[0], torch.mul, args=(x, 3.0)),)).sum()
        autograd.backward(context_id, [loss])
        return autograd.get_gradients(context_id)[x]


def test_a_slow_network_changes_no_result(network: tuple[list[Agent], list[Proxy]]) -> None:
    (a, _, _), proxies = network
    x = torch.randn(1000)
    for proxy in proxies:
        proxy.delay_s = DELAY_S
    assert a.call("b", handlers.echo, (1,)) == 1
    times = []
    for number in range(5):
        started = time.monotonic()
        assert a.call("b", handlers.echo, (number,)) == number
        times.append(time.monotonic() - started)
    assert 2 * DELAY_S <= min(times) < 10 * DELAY_S
    started = time.monotonic()
    calls = [a.submit(name, torch.add, (x, number)) for number in range(50) for name in "bc"]
    for number, call in enumerate(calls):
        assert torch.equal(call.wait(), x + number // 2)
    assert time.monotonic() - started < 100 * DELAY_S  # they share the way: one by one takes twice as long
    assert torch.equal(_train(("b", "c"), x), _train(None, x))
    held = rpc.remote("c", torch.add, args=(x, 1))
    assert torch.equal(held.to_here(), x + 1)
    large = torch.randn(1 << 19)
    assert torch.equal(a.call("c", handlers.echo, (large,)), large)


@pytest.mark.parametrize("ways", [("there",), ("back",), ("there", "back")])
def test_a_network_that_stands_still_loses_nothing(
    network: tuple[list[Agent], list[Proxy]], ways: tuple[str, ...]
) -> None:
    """Within the deadline of a call it is only late; beyond, the call ends by its deadline, and later ones work."""
    (a, b, _), (_, proxy, _) = network
    x = torch.randn(100)
    assert a.call("b", handlers.echo, (1,)) == 1
    proxy.hold(*ways)
    late = [a.submit("b", handlers.echo, (number,)) for number in range(20)]
    started = time.monotonic()
    with pytest.raises(RpcTimeout):
        a.call("b", handlers.echo, (0,), None, 0.5)
    assert time.monotonic() - started < 30.0
    assert a.call("c", handlers.echo, (3,)) == 3  # the others are not affected
    assert not any(call.done() for call in late)
    proxy.release()
    assert [call.wait() for call in late] == list(range(20))
    assert b.call("a", handlers.echo, (5,)) == 5
    assert torch.equal(_train(("b", "c"), x), _train(None, x))


def test_connections_that_are_cut_are_made_again(network: tuple[list[Agent], list[Proxy]]) -> None:
    (a, b, _), (_, proxy, _) = network
    lost_by_b: list[str] = []
    b.on_worker_lost(lambda address, reason: lost_by_b.append(address.info.name))
    x = torch.randn(100)
    for number in range(1, 6):
        call = a.submit("b", handlers.wait_gate, (60.0,))
        assert handlers.entered.acquire(timeout=10.0)
        before, lanes = proxy.num_connections, list(a.peers.by_name["b"].lanes.values())
        proxy.cut()
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="unknown whether the function ran"):
            call.wait()
        assert time.monotonic() - started < 30.0
        # Each connection is noticed by itself, and a pass fails on one that is not noticed yet.
        assert wait_until(partial(_has_dropped, a, "b", lanes), 5.0)
        assert wait_until(lambda: lost_by_b.count("a") >= number, 5.0)  # noqa: B023
        assert wait_until(lambda: _can_call(a, "b"), 5.0)
        assert proxy.num_connections > before
        assert torch.equal(_train(("b", "c"), x), _train(None, x))
        assert b.call("a", handlers.echo, (7,)) == 7
    handlers.gate.set()


def _has_dropped(agent: Agent, name: str, lanes: list[Connection]) -> bool:
    return not any(lane in lanes for lane in agent.peers.by_name[name].lanes.values())


def _can_call(agent: Agent, name: str) -> bool:
    try:
        return bool(agent.call(name, handlers.echo, (True,), None, 2.0))
    except WorkerLost:  # as long as the cut is not over
        return False


def test_a_tensor_that_is_cut_in_the_middle_arrives_whole_or_not_at_all(
    network: tuple[list[Agent], list[Proxy]],
) -> None:
    (a, _, _), (_, proxy, _) = network
    large = torch.randn(1 << 20)
    for number in range(4):
        proxy.delay_s = 0.02
        call = a.submit("b", handlers.echo, (large,))
        pause = threading.Event()
        pause.wait(0.01 * number)
        proxy.cut()
        proxy.delay_s = 0.0
        with contextlib.suppress(WorkerLost):
            assert torch.equal(call.wait(), large)
        assert wait_until(lambda: _can_call(a, "b"), 5.0)
    assert torch.equal(a.call("b", handlers.echo, (large,)), large)
