"""Workers that get ready in peace: calls are held back until they serve, and a barrier lets all begin together."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gradwire import rpc
from gradwire.errors import ConfigurationError, RpcTimeout, WaitTimeout
from gradwire.rpc import Agent
from rpc import handlers
from rpc.fixtures import init_source
from rpc.puppets import Puppet, PuppetError, wait_until

Workers = Callable[..., list[Puppet]]


def _start(puppets: list[Puppet], meeting: str, world_size: int | None) -> None:
    """Makes workers of processes; all but the first hold calls back."""
    for rank, puppet in enumerate(puppets):
        source = init_source(rank, world_size, meeting)
        puppet.start(source if rank == 0 else source.removesuffix(")") + ", start_serving=False)")
    for puppet in puppets:
        puppet.result()


def test_a_worker_serves_from_where_it_says_so(make_puppets: Callable[[int], list[Puppet]], meeting: str) -> None:
    first, second = puppets = make_puppets(2)
    _start(puppets, meeting, 2)
    first.do("early = rpc.rpc_async('w1', h.what_was_seen); made = rpc.remote('w1', h.what_was_seen)")
    with pytest.raises(PuppetError, match=r"(?s)is not serving calls yet.*start_serving\(\)") as caught:
        first.do("rpc.rpc_sync('w1', h.note, args=('too early',), timeout=1.0)")
    assert caught.value.fields["phase"] == "held"
    second.do("h.note(rpc.rpc_sync('w0', operator.add, args=(1, 2)))")  # it can make calls
    second.do("h.note(rpc.rpc_sync('w1', operator.add, args=(2, 2)))")  # also to itself
    assert first.do("early.done()") is False
    second.do("rpc.start_serving()")
    assert first.do("early.wait(10)") == [3, 4]
    assert first.do("made.to_here()") == [3, 4]
    first.do("del made")
    assert first.do("rpc.rpc_sync('w1', h.what_was_seen)") == [3, 4]  # what timed out never runs
    second.do("rpc.start_serving()")
    for puppet in puppets:
        puppet.start("rpc.shutdown()")
    for puppet in puppets:
        puppet.result()


def test_a_worker_that_never_served_lets_the_others_leave(
    make_puppets: Callable[[int], list[Puppet]], meeting: str
) -> None:
    first, _ = puppets = make_puppets(2)
    _start(puppets, meeting, 2)
    first.do("f = rpc.rpc_async('w1', operator.add, args=(1, 2), timeout=0)")
    for puppet in puppets:
        puppet.start("rpc.shutdown()")
    for puppet in puppets:
        puppet.result()
    assert first.do("f.wait()") == 3


def test_calls_that_are_given_up_while_they_are_held_back(make_agents: Any) -> None:
    a, b = make_agents("a", "b")
    b.server.hold_calls()
    calls = [a.submit("b", handlers.note, (number,)) for number in range(40)]  # more than may run at once
    assert wait_until(lambda: b.statistics().num_queued == 40)
    assert not b.is_quiet
    for call in calls[::2]:
        call.cancel()
    with pytest.raises(WaitTimeout):
        calls[1].wait(0.2)  # nothing that looks for stalls lets it run
    b.server.start_serving()
    for call in calls[1::2]:
        call.wait(10)
    assert sorted(handlers.seen) == list(range(1, 40, 2))
    assert wait_until(lambda: a.is_quiet and b.is_quiet)


def test_a_barrier_lets_nobody_through_before_all_are_there(workers: Workers) -> None:
    first, second, third = workers(3)
    first.start("rpc.barrier()")
    second.start("rpc.barrier(['w0', 'w1', 'w2'])")
    assert not wait_until(lambda: first.has_answered() or second.has_answered(), 0.2)
    third.do("rpc.barrier(timeout=10)")
    first.result()
    second.result()
    third.kill()
    with pytest.raises(PuppetError, match="w2") as caught:
        first.do("rpc.barrier(timeout=10)")
    assert caught.value.kind == "WorkerLost"
    second.start("rpc.barrier(['w0', 'w1'])")
    first.do("rpc.barrier(['w1', 'w0'])")
    second.result()


def test_a_barrier_says_who_is_missing(pair: list[Agent]) -> None:
    started = time.monotonic()
    with pytest.raises(RpcTimeout, match=r"a timed out in rpc\.barrier: these workers did not make .* in time: b"):
        rpc.barrier(timeout=0.1)
    assert time.monotonic() - started < 30
    with pytest.raises(ConfigurationError, match="a is not one of"):
        rpc.barrier(["b"])
    assert pair[0].call("b", operator.add, (1, 2)) == 3


def test_where_workers_come_and_go_a_barrier_takes_names(
    make_puppets: Callable[[int], list[Puppet]], meeting: str
) -> None:
    first, second = puppets = make_puppets(2)
    _start(puppets, meeting, None)
    with pytest.raises(PuppetError, match="names of the workers"):
        first.do("rpc.barrier()")
    first.start("rpc.barrier(['w0', 'w1'])")
    second.do("rpc.barrier(['w0', 'w1'])")
    first.result()


def test_a_thread_that_waits_at_a_barrier_still_serves(pair: list[Agent]) -> None:
    thread = threading.Thread(target=rpc.barrier)
    thread.start()
    assert pair[1].call("a", operator.add, (1, 2)) == 3
    pair[1].gathering.all_gather(None, None, time.monotonic() + 10)
    thread.join(10)
    assert not thread.is_alive()
