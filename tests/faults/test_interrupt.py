"""Ctrl-C reaches a program wherever it waits, and the worker can go on."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.transports.tls import make_keys
from rpc.fixtures import init_source
from rpc.puppets import Puppet, PuppetError, is_alive, wait_until

Workers = Callable[..., list[Puppet]]


def _interrupt(puppet: Puppet) -> float:
    """Sends SIGINT to a puppet that waits; seconds until it had noticed."""
    puppet.wait_begun()
    assert not wait_until(puppet.has_answered, 0.4)  # it has had time to get as far as the wait
    started = time.monotonic()
    puppet.signal(signal.SIGINT)
    with pytest.raises(PuppetError) as caught:
        puppet.result(20.0)
    assert caught.value.kind == "KeyboardInterrupt", caught.value.traceback
    return time.monotonic() - started


@pytest.mark.parametrize(
    "source",
    [
        "rpc.rpc_sync('w1', h.wait_gate, timeout=0)",
        "rpc.rpc_async('w1', h.wait_gate, timeout=0).wait()",
        "rpc.rpc_async('w1', h.wait_gate, timeout=0).then(lambda f: f.wait()).wait()",
        "rpc.rpc_sync('w0', h.wait_gate, timeout=0)",
        "rpc._barrier()",
    ],
)
def test_waiting_for_a_call(workers: Workers, source: str) -> None:
    first, second = workers(2)
    first.start(source)
    assert _interrupt(first) < 5.0
    for puppet in (first, second):
        puppet.do("h.open_gate()")
    assert first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))") == 3
    assert second.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))") == 3


def test_in_shutdown(workers: Workers) -> None:
    first, second = workers(2)
    first.start("rpc.shutdown()")
    assert _interrupt(first) < 8.0
    assert first.do("[t.name for t in threading.enumerate() if t.name.startswith('gradwire')]") == []
    with pytest.raises(PuppetError) as caught:
        second.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))")
    assert caught.value.kind == "WorkerLost"
    first.leave()
    assert not is_alive(first.pid)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scheme", ["file", "tcp", "tls"])
def test_in_init(
    make_puppets: Callable[[int], list[Puppet]],
    meeting: str,
    tcp_meeting: str,
    tmp_path: Path,
    scheme: str,
    rank: int,
) -> None:
    where = meeting if scheme == "file" else tcp_meeting
    make_keys(tmp_path / "keys")

    def init(rank: int) -> str:
        line = init_source(rank, 2, where, trust="code")
        if scheme == "tls":
            line = line.replace("trust=", f"tls=TlsKeys.in_folder({str(tmp_path / 'keys')!r}), trust=")
        return line

    (puppet,) = make_puppets(1)
    puppet.do("from gradwire.config import TlsKeys")  # it is ready: a signal that comes before is not for the program
    puppet.start(init(rank))
    assert _interrupt(puppet) < 5.0
    assert puppet.do("rpc._is_current_rpc_agent_set()") is False
    assert puppet.do("[t.name for t in threading.enumerate() if t.name == 'gradwire-meeting-point']") == []
    (other,) = make_puppets(1)
    other.do("from gradwire.config import TlsKeys")
    puppet.start(init(rank))
    other.do(init(1 - rank))
    puppet.result()
    assert puppet.do(f"rpc.rpc_sync({1 - rank}, h.pid)") == other.pid


_STORE = """
from gradwire.rpc.meeting_store import TorchStore
gate = threading.Event()
class Silent:
    def check(self, keys): return not gate.wait(60)
    def get(self, key): return b""
store = TorchStore(Silent(), "nowhere", 60.0)
"""


def test_waiting_for_a_store_of_torch_s(make_puppets: Callable[[int], list[Puppet]]) -> None:
    """Its operations are C++ code that cannot be interrupted. The next question is answered when the first has ended."""
    (puppet,) = make_puppets(1)
    puppet.do(_STORE)
    puppet.start("store.find('w1')")
    assert _interrupt(puppet) < 2.0
    puppet.start("store.find('w1')")  # waits for its turn
    assert _interrupt(puppet) < 2.0
    assert puppet.do("gate.set(); store.find('w1')") is None


# Only a signal that hits inside a call raises: the loop around it is the test's, and would need care of its own. One
# that comes while another is deferred is left out, too: a user who insists is let through wherever the program is.
STORM = """
from gradwire import _interrupts
state = {"interrupts": 0, "calls": 0, "wrong": []}
def call(value):
    state["calls"] += 1
    number, result = rpc.rpc_sync('w1', h.echo, args=((state["calls"], value),), timeout=3)
    if number != state["calls"] or not is_same(value, result):
        state["wrong"].append((state["calls"], number))
    del result  # to give memory back can be interrupted, too
def is_same(value, result):
    return result is None if value is None else torch.equal(value, result)
def on_interrupt(number, frame):
    outer = frame
    while outer is not None:
        if outer.f_code is call.__code__:
            if _interrupts._is_retry or _interrupts._deferred_since is None:
                _interrupts._on_interrupt(number, frame)
            return
        outer = outer.f_back
def storm(wanted, value):
    while state["interrupts"] < wanted:
        try:
            call(value)
        except KeyboardInterrupt:
            state["interrupts"] += 1
        except Exception as error:
            state["wrong"].append(repr(error))
_previous = signal.signal(signal.SIGINT, on_interrupt)
"""


@pytest.mark.parametrize("transports", [("unix",), ("tcp",)])
@pytest.mark.parametrize("value", ["None", "torch.ones(100_000)"])
def test_storm_of_interrupts(workers: Workers, transports: tuple[str, ...], value: str) -> None:
    """Wherever the signal hits, the next call works: no lock is left taken, no connection held or out of step."""
    first, second = workers(2, transports=transports)
    first.do(STORM)
    first.start(f"storm(60, {value})")
    pause, dice, deadline = threading.Event(), random.Random(5), time.monotonic() + 30.0
    while not first.has_answered() and time.monotonic() < deadline:
        pause.wait(dice.random() * 0.02)  # the moments at which the signal hits are the test
        first.signal(signal.SIGINT)
    first.result()
    assert first.do("state['wrong']") == []
    assert first.do("state['interrupts']") == 60
    assert first.do("state['calls']") > 60
    assert first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))") == 3
    assert first.do("rpc.rpc_async('w1', h.echo, args=(torch.ones(100_000),)).wait().sum().item()") == 100_000
    assert second.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))") == 3
    assert wait_until(lambda: first.do("rpc.current_agent().is_quiet"))
