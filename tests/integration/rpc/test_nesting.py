"""Functions that wait never eat the pool, and control traffic never waits behind them."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gradwire.errors import RpcTimeout
from rpc import handlers
from rpc.puppets import Puppet


@pytest.mark.parametrize("way", ["unix", "tcp"])
@pytest.mark.parametrize("function", [handlers.bounce, handlers.bounce_future])
def test_nested_calls_with_one_thread_each(make_agents: Any, way: str, function: Any) -> None:
    a, _b = make_agents("a", "b", num_worker_threads=1, transports=(way,))
    assert a.call("b", function, ("b", "a", 50)) == 50


def test_nested_calls_that_wait_in_c_plus_plus(make_agents: Any) -> None:
    """Such waits cannot be seen, so every level needs a slot beyond the limit; that takes a tenth of a second each."""
    a, _b = make_agents("a", "b", num_worker_threads=1, rpc_timeout_s=60.0)
    assert a.call("b", handlers.bounce_wait_all, ("b", "a", 50)) == 50


def test_ring_of_three_workers(make_agents: Any) -> None:
    agents = make_agents("a", "b", "c", num_worker_threads=1)
    assert agents[0].call("b", handlers.ring, (["a", "b", "c"], 1, 30)) == 30


def test_nested_calls_between_processes(workers: Callable[..., list[Puppet]]) -> None:
    first, _second = workers(2, num_worker_threads=1)
    way = ["w1", "w0"] * 25
    assert first.do(f"rpc.rpc_sync('w1', h.pass_along, args=({way!r}, h.pid))") == first.pid


def test_nested_calls_to_oneself(make_agents: Any) -> None:
    (a,) = make_agents("a", num_worker_threads=1)
    assert a.call("a", handlers.bounce, ("a", "a", 20)) == 20


def test_a_hundred_blocked_functions_end(make_agents: Any) -> None:
    """All threads wait for an event that only a later call sets."""
    a, _b = make_agents("a", "b", num_worker_threads=4, rpc_timeout_s=60.0)
    futures = [a.submit("b", handlers.wait_gate, (60.0,)) for _ in range(100)]
    a.submit("b", handlers.open_gate).wait()
    assert [future.wait() for future in futures] == [True] * 100


def test_busy_threads_do_not_delay_control(make_agents: Any) -> None:
    a, b = make_agents("a", "b", num_worker_threads=1)
    busy = [a.submit("b", handlers.spin_until_gate), a.submit("b", handlers.wait_gate)]
    with pytest.raises(RpcTimeout) as caught:
        a.call("b", operator.add, (1, 2), None, 0.5)
    assert caught.value.phase == "queue"
    thread = threading.Thread(target=b.gathering.all_gather, args=(1, None, threading.TIMEOUT_MAX))
    thread.start()
    a.gathering.all_gather(1, None, threading.TIMEOUT_MAX)
    assert not any(future.done() for future in busy)
    handlers.gate.set()
    thread.join(10)
    assert [future.wait() for future in busy] == [True, True]


def test_barrier_passes_busy_threads_of_another_process(workers: Callable[..., list[Puppet]]) -> None:
    first, second = workers(2, num_worker_threads=1)
    first.do("fs = [rpc.rpc_async('w1', h.hold_gil, args=(1.5,)) for _ in range(3)]")
    second.start("rpc._barrier(['w0', 'w1'])")
    assert first.do("rpc._barrier(['w0', 'w1']); sum(f.done() for f in fs)") < 2  # none, unless the machine is busy
    second.result()
    assert first.do("len([f.wait() for f in fs])") == 3
