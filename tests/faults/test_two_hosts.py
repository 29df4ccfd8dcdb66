"""Two hosts: network namespaces joined by a cable that can be cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.network import Hosts, hosts_or_skip
from gradwire.transports.tls import make_keys
from rpc.fixtures import init_source
from rpc.puppets import Puppet, PuppetError

pytestmark = [pytest.mark.slow, pytest.mark.root]

ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29571  # in namespaces of our own, so nobody else can have it


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two namespaces that can reach each other."""
    with hosts_or_skip(2) as made:
        yield made


@pytest.fixture
def puppets(hosts: Hosts, make_puppets: Callable[[int], list[Puppet]]) -> list[Puppet]:
    """One process on each host."""
    made = make_puppets(2)
    for number, puppet in enumerate(made):
        hosts.enter(number, puppet)
    return made


def _meet(puppets: list[Puppet], folder: Path) -> None:
    make_keys(folder, names=["w0", "w1"])
    where = f"tcp://{ADDRESSES[0]}:{PORT}"
    for rank, puppet in enumerate(puppets):
        puppet.do(f"from gradwire.config import TlsKeys; keys = TlsKeys.in_folder({str(folder)!r}, 'w{rank}')")
        puppet.start(init_source(rank, 2, where, trust="code").replace("trust=", "tls=keys, trust="))
    for puppet in puppets:
        puppet.result()


def test_calls_cross_hosts_encrypted(puppets: list[Puppet], tmp_path: Path) -> None:
    _meet(puppets, tmp_path / "keys")
    for rank, puppet in enumerate(puppets):
        other = f"w{1 - rank}"
        assert puppet.do(f"rpc.rpc_sync({other!r}, h.pid)") == puppets[1 - rank].pid
        assert puppet.do(f"rpc.rpc_sync({other!r}, torch.add, args=(torch.ones(4 << 20), 1)).sum().item()") == 8 << 20
        assert puppet.do("rpc.current_agent().address.uris[-1]").startswith(f"tcp://{ADDRESSES[rank]}:")
    for puppet in puppets:
        puppet.start("rpc.shutdown()")
    for puppet in puppets:
        puppet.result()


@pytest.mark.parametrize("state", ["pending", "idle"])
def test_cut_cable_is_noticed(puppets: list[Puppet], hosts: Hosts, tmp_path: Path, state: str) -> None:
    _meet(puppets, tmp_path / "keys")
    first, second = puppets
    first.do("rpc.rpc_sync('w1', h.pid)")
    if state == "pending":
        first.do("f = rpc.rpc_async('w1', h.wait_gate, args=(60,), timeout=0)")
        second.do("h.entered.acquire(timeout=10)")
    hosts.unplug(0)
    started = time.monotonic()
    with pytest.raises(PuppetError) as caught:
        first.do("f.wait()" if state == "pending" else "rpc.rpc_sync('w1', h.pid, timeout=0)", 30.0)
    assert caught.value.kind == "WorkerLost"
    assert time.monotonic() - started < 10.0


_SEND_EVERYWHERE = """
from gradwire.wire.messages import Goodbye
for stream in [item.stream for item in agent.connections()]:
    stream.send(Goodbye("this does not arrive"))
"""


@pytest.mark.parametrize("cut", ["own link down", "packets lost"])
def test_cut_cable_is_noticed_while_messages_without_an_answer_are_under_way(
    puppets: list[Puppet], hosts: Hosts, tmp_path: Path, cut: str
) -> None:
    """Notices and replies: the kernel does not probe meanwhile, and no call waits. Only its attempts to send them tell."""
    _meet(puppets, tmp_path / "keys")
    for puppet, other in zip(puppets, ("w1", "w0"), strict=True):
        puppet.do("from gradwire.testing import wait_until; agent = rpc.current_agent()")
        puppet.do(f"rpc.rpc_sync({other!r}, h.pid)")
    if cut == "own link down":
        hosts.unplug(0)
    else:
        hosts.cut(0, 1)
        hosts.cut(1, 0)
    for puppet in puppets:
        puppet.do(_SEND_EVERYWHERE)
    for puppet, other in zip(puppets, ("w1", "w0"), strict=True):
        puppet.do(f"wait_until(lambda: agent.has_ended({other!r}), 20.0)", 30.0)


_CUTS = {"both ways": (0, 1), "one way": (0,)}  # the hosts whose packets are lost

_SETUP = """
from gradwire.rpc import RRef
from gradwire.nn import RemoteModule
from gradwire.testing import wait_until
from rref import tasks
agent = rpc.current_agent()
def use(to):
    module = RemoteModule(to, torch.nn.Linear, (2, 1))
    return list(module.forward(torch.ones(1, 2)).shape), rpc.remote(to, tasks.make, args=(2.0,)).to_here().tolist()
"""


@pytest.mark.parametrize("way", list(_CUTS))
def test_references_work_when_a_cut_has_healed(puppets: list[Puppet], hosts: Hosts, tmp_path: Path, way: str) -> None:
    """Both hosts have taken each other for dead. Old references say so, new ones work at once, and nothing is left."""
    _meet(puppets, tmp_path / "keys")
    for puppet, other in zip(puppets, ("w1", "w0"), strict=True):
        puppet.do(_SETUP)
        puppet.do(f"held = rpc.remote({other!r}, tasks.make, args=(1.0,)); held.rpc_sync().sum().item()")
        puppet.do(f"own = RRef([1]); rpc.rpc_sync({other!r}, tasks.keep, args=('x', own))")
    for number in _CUTS[way]:
        hosts.cut(number, 1 - number)
    for puppet, other in zip(puppets, ("w1", "w0"), strict=True):
        puppet.do(f"wait_until(lambda: agent.has_ended({other!r}), 25.0)", 30.0)
    for number in _CUTS[way]:
        hosts.heal(number, 1 - number)
    for puppet, other in zip(puppets, ("w1", "w0"), strict=True):
        assert puppet.do(f"use({other!r})") == ([1, 1], [2.0] * 3)
        for old in ("held", "tasks.KEPT['x']"):
            with pytest.raises(PuppetError, match="Create the value again") as caught:
                puppet.do(f"{old}.to_here()")
            assert caught.value.kind == "OwnerLost"
    for puppet in puppets:
        puppet.do("held = own = None; tasks.KEPT.clear()")
    for puppet in puppets:
        puppet.do("wait_until(lambda: not any(tasks.counts()), 15.0, str(tasks.counts()))")


def test_without_keys_the_error_says_so(puppets: list[Puppet]) -> None:
    where = f"tcp://{ADDRESSES[0]}:{PORT}"
    for rank, puppet in enumerate(puppets):
        puppet.start(init_source(rank, 2, where, init_timeout=2.0))
    texts = []
    for puppet in puppets:
        with pytest.raises(PuppetError) as caught:
            puppet.result()
        texts.append(caught.value.text)
    assert "keys" in texts[1], texts


def test_tcp_beyond_this_machine_without_keys_does_not_start(puppets: list[Puppet]) -> None:
    where = f"tcp://{ADDRESSES[0]}:{PORT}"
    with pytest.raises(PuppetError, match="without keys") as caught:
        puppets[0].do(init_source(0, 1, where, transports=("tcp",)))
    assert caught.value.kind == "ConfigurationError"
