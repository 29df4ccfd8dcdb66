"""Three hosts over TLS: what they do together, and what they make of each other when the network between them is cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.network import Hosts, hosts_or_skip
from gradwire.transports.tls import make_keys
from rpc.fixtures import init_source
from rpc.puppets import Puppet, PuppetError

pytestmark = pytest.mark.root

PORT = 29572  # in namespaces of our own, so nobody else can have it
NOTICED_S = 8.0  # by then, another machine that does not answer is taken for dead (docs/limits.md)
WAYS = {"one way": [(0, 1)], "both ways": [(0, 1), (1, 0)]}

SETUP = """
import errno, socket
from gradwire import autograd
from gradwire.testing import wait_until
from rref import tasks
agent = rpc.current_agent()
def train(first=None, second=None):
    x = torch.linspace(-2, 2, 500, requires_grad=True)
    run = lambda to, f, *args: f(*args) if to is None else rpc.rpc_sync(to, f, args=args)
    with autograd.context() as context_id:
        loss = run(second, torch.tanh, run(first, torch.mul, x, 3.0)).sum()
        if first is None:
            loss.backward()
            return x.grad.tolist()
        autograd.backward(context_id, [loss])
        return autograd.get_gradients(context_id)[x].tolist()
def is_reachable(host):
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((host, 1)) == errno.ECONNREFUSED
def use(to):
    return rpc.rpc_sync(to, h.pid, timeout=10), rpc.remote(to, tasks.make, args=(2.0,)).to_here().tolist()
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(3) as made:
        yield made


@pytest.fixture
def puppets(hosts: Hosts, make_puppets: Callable[[int], list[Puppet]], tmp_path: Path) -> list[Puppet]:
    """One worker on each host."""
    make_keys(tmp_path / "keys", names=["w0", "w1", "w2"])
    made = make_puppets(3)
    for rank, puppet in enumerate(made):
        hosts.enter(rank, puppet)
        _start(hosts, rank, puppet, tmp_path / "keys")
    for puppet in made:
        puppet.result()
        puppet.do(SETUP)
    for rank, puppet in enumerate(made):
        for other in range(3):
            assert puppet.do(f"rpc.rpc_sync({other}, h.pid)") == made[other].pid, (rank, other)
    return made


def _start(hosts: Hosts, rank: int, puppet: Puppet, keys: Path) -> None:
    puppet.do(f"from gradwire.transports.tls import keys_for; keys = keys_for({str(keys)!r}, 'w{rank}')")
    source = init_source(rank, 3, f"tcp://{hosts.addresses[0]}:{PORT}", trust="code")
    puppet.start(source.replace("trust=", "tls=keys, trust="))


def _check(puppets: list[Puppet], *ranks: int) -> None:
    """Calls, references and gradients work between these workers, the gradients as in one process."""
    for rank in ranks:
        for other in ranks:
            if other != rank:
                assert puppets[rank].do(f"use('w{other}')") == (puppets[other].pid, [2.0] * 3)
    first, *others = ranks
    assert puppets[first].do(f"train('w{others[0]}', 'w{others[-1]}')") == puppets[first].do("train()")


def _wait_lost(puppet: Puppet, name: str, timeout_s: float) -> None:
    """Wait until a call that was made before the cut ends, and the worker is taken for dead."""
    with pytest.raises(PuppetError) as caught:
        puppet.do("call.wait()", timeout_s)
    assert caught.value.kind == "WorkerLost"
    assert name in caught.value.text
    puppet.do(f"wait_until(lambda: agent.has_ended({name!r}), {timeout_s})", timeout_s + 5.0)


def test_three_hosts_work_together_and_one_is_killed_and_started_again(
    puppets: list[Puppet], hosts: Hosts, make_puppets: Callable[[int], list[Puppet]], tmp_path: Path
) -> None:
    _check(puppets, 0, 1, 2)
    for rank, puppet in enumerate(puppets):
        uri = puppet.do("agent.address.uris[-1]")
        assert uri.startswith(f"tcp://{hosts.addresses[rank]}:")
        assert uri.endswith("?tls")
    for rank in (0, 1):
        puppets[rank].do("call = rpc.rpc_async('w2', h.wait_gate, args=(60,), timeout=0)")
        puppets[2].do("h.entered.acquire(timeout=10)")
    puppets[2].kill()
    started = time.monotonic()
    for rank in (0, 1):
        _wait_lost(puppets[rank], "w2", 10.0)
    assert time.monotonic() - started < 5.0
    _check(puppets, 0, 1)
    (again,) = make_puppets(1)
    hosts.enter(2, again)
    _start(hosts, 2, again, tmp_path / "keys")
    again.result()
    again.do(SETUP)
    puppets[2] = again
    _check(puppets, 0, 1, 2)


@pytest.mark.parametrize("way", list(WAYS))
def test_a_short_cut_loses_nothing(puppets: list[Puppet], hosts: Hosts, way: str) -> None:
    """It heals before anything is taken for dead: what was under way arrives, and nothing ran twice."""
    puppets[0].do("call = rpc.rpc_async('w1', h.wait_gate, args=(60,), timeout=0)")
    puppets[1].do("h.entered.acquire(timeout=10)")
    for source, target in WAYS[way]:
        hosts.cut(source, target)
    puppets[0].do("later = [rpc.rpc_async('w1', h.note, args=(number,), timeout=60) for number in range(10)]")
    puppets[1].do("h.open_gate()")
    with pytest.raises(PuppetError, match="TimeoutError"):  # nothing comes while it lasts
        puppets[0].do("wait_until(lambda: any(item.done() for item in later), 1.0)")
    assert puppets[2].do("use('w0'), use('w1')")
    for source, target in WAYS[way]:
        hosts.heal(source, target)
    assert puppets[0].do("call.wait()") is True
    puppets[0].do("for item in later: item.wait()")
    assert sorted(puppets[1].do("h.what_was_seen()")) == list(range(10))
    assert puppets[0].do("agent.has_ended('w1')") is False
    assert puppets[1].do("agent.has_ended('w0')") is False
    _check(puppets, 0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_a_long_cut_is_noticed_on_both_sides_and_heals(puppets: list[Puppet], hosts: Hosts, way: str) -> None:
    for one, other in ((0, 1), (1, 0)):
        puppets[one].do(f"call = rpc.rpc_async('w{other}', h.wait_gate, args=(60,), timeout=0)")
        puppets[other].do("h.entered.acquire(timeout=10)")
    for source, target in WAYS[way]:
        hosts.cut(source, target)
    started = time.monotonic()
    for one, other in ((0, 1), (1, 0)):
        _wait_lost(puppets[one], f"w{other}", 30.0)
    assert time.monotonic() - started < NOTICED_S + 5.0
    assert puppets[2].do("use('w0'), use('w1')")  # it reaches both, and takes none of them for dead
    assert puppets[2].do("agent.has_ended('w0') or agent.has_ended('w1')") is False
    for source, target in WAYS[way]:
        hosts.heal(source, target)
    for puppet in puppets:
        puppet.do("h.open_gate()")
    _check(puppets, 0, 1, 2)


def _wait_reachable(puppets: list[Puppet], hosts: Hosts) -> None:
    """Wait until every host reaches every other one: for a while, the kernel still remembers that it could not."""
    for puppet in puppets:
        for address in hosts.addresses:
            puppet.do(f"wait_until(lambda: is_reachable({address!r}), 20)", 25.0)


@pytest.mark.slow
def test_an_unplugged_host_is_lost_to_all_and_comes_back(puppets: list[Puppet], hosts: Hosts) -> None:
    for rank in (0, 1):
        puppets[rank].do("call = rpc.rpc_async('w2', h.wait_gate, args=(60,), timeout=0)")
        puppets[2].do("h.entered.acquire(timeout=10)")
    puppets[2].do("call = rpc.rpc_async('w0', h.wait_gate, args=(60,), timeout=0)")
    puppets[0].do("h.entered.acquire(timeout=10)")
    hosts.unplug(2)
    started = time.monotonic()
    for rank in (0, 1):
        _wait_lost(puppets[rank], "w2", 30.0)
    _wait_lost(puppets[2], "w0", 30.0)
    puppets[2].do("wait_until(lambda: agent.has_ended('w1'), 30)", 35.0)
    assert time.monotonic() - started < NOTICED_S + 5.0
    _check(puppets, 0, 1)
    hosts.plug_in(2)
    _wait_reachable(puppets, hosts)
    _check(puppets, 0, 1, 2)
