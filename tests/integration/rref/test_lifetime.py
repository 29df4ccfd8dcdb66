"""Values live as long as anybody refers to them, and no longer."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import RpcError, RRefError
from gradwire.rpc import RRef
from gradwire.rpc.agent import Agent
from gradwire.rpc.codec import TransferStatus
from gradwire.rref import context
from gradwire.rref._ownership import Ownership
from gradwire.rref.values import Owned, UserFork
from gradwire.testing import wait_until
from rref import tasks


@pytest.fixture
def names(cluster: Cluster) -> list[str]:
    return [worker.name for worker in cluster.workers]


def rss_bytes(pid: int | str = "self") -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def num_values(name: str) -> int:
    return int(rpc.rpc_sync(name, tasks.counts)[0])


def test_the_last_holder_frees_the_value(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rpc.rpc_sync(names[1], tasks.keep, args=("a", rref))
    rpc.rpc_sync(names[1], tasks.kept_to, args=("a", names[2]))
    del rref
    rpc.rpc_sync(names[1], tasks.drop, args=("a",))
    tasks.wait_clean([names[1]])
    assert num_values(names[0]) == 1
    assert rpc.rpc_sync(names[2], tasks.kept_value, args=("a",)).tolist() == [1.0] * 3
    rpc.rpc_sync(names[2], tasks.drop, args=("a",))
    wait_until(lambda: num_values(names[0]) == 0, 20.0, "that the value is freed")


def test_the_value_itself_is_let_go_of(names: list[str]) -> None:
    value = tasks.Counter(1)
    gone = weakref.ref(value)
    rref = RRef(value)
    rpc.rpc_sync(names[0], tasks.keep, args=("a", rref))
    del value, rref
    gc.collect()
    assert gone() is not None  # the worker holds it
    assert rpc.rpc_sync(names[0], tasks.kept_value, args=("a",)).value == 1
    rpc.rpc_sync(names[0], tasks.drop, args=("a",))
    wait_until(lambda: gone() is None, 20.0, "that nothing keeps the value")


def test_a_value_that_was_never_shared_needs_nobody(names: list[str]) -> None:
    value = tasks.Counter(1)
    gone = weakref.ref(value)
    rref = RRef(value)
    del value
    assert rref.local_value().value == 1
    del rref
    assert gone() is None


def test_a_reference_that_comes_back_while_the_one_before_goes(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finalizer lets other threads run: none of them may get what is about to end."""
    known = context.here()
    in_finalizer, may_end = threading.Event(), threading.Event()
    on_dropped = known.on_dropped

    def slowly(state: Owned | UserFork) -> None:
        in_finalizer.set()
        assert may_end.wait(30)
        on_dropped(state)

    last = [RRef([1])]
    gone = last[0]._state
    assert isinstance(gone, Owned)
    rpc.rpc_sync(names[0], tasks.keep, args=("a", last[0]))
    monkeypatch.setattr(known, "on_dropped", slowly)
    thread = threading.Thread(target=last.clear)
    thread.start()
    assert in_finalizer.wait(30)
    back = rpc.rpc_sync(names[0], tasks.give, args=("a",))
    may_end.set()
    thread.join()
    rpc.rpc_sync(names[0], tasks.drop, args=("a",))
    wait_until(lambda: known.num_held == 0, 20.0, "that the worker lets go of it")
    known.take_dropped()
    assert back.local_value() == [1]
    del back
    wait_until(lambda: gone.is_freed, 20.0, "that the value is freed")


def test_an_owner_that_gets_its_reference_back_and_drops_it(names: list[str]) -> None:
    """Its own earlier reference is gone by then, but not yet noticed: the later one counts."""
    for _ in range(50):
        rref = RRef([1])
        future = rpc.rpc_async(names[0], tasks.hand_back, args=(rref,))
        del rref
        back = future.wait()
        assert back.local_value() == [1]
        assert back.is_owner()


def test_arguments_that_cannot_be_sent_leave_nothing(names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    with pytest.raises(TypeError, match="lock"):
        rpc.rpc_sync(names[1], tasks.fetch_all, args=([rref, threading.Lock()],))
    with pytest.raises(RpcError, match="nobody"):
        rpc.rpc_sync("nobody", tasks.fetch, args=(rref,))
    assert context.here().statistics().num_children == 0


@pytest.mark.usefixtures("asks_soon")
def test_a_call_that_nobody_waits_for_any_more(names: list[str]) -> None:
    """The callee may drop the call before it has looked at its arguments: whoever sent the reference asks for it."""
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    blocked = [rpc.rpc_async(names[1], tasks.wait_gate) for _ in range(20)]
    futures = [rpc.rpc_async(names[1], tasks.fetch, args=(rref,), timeout=0.3) for _ in range(5)]
    for future in futures:
        with pytest.raises((RpcError, RRefError)):
            future.wait()
    rpc.rpc_async(names[1], tasks.open_gate)
    for future in blocked:
        assert future.wait() > 0
    del future, futures
    wait_until(lambda: context.here().statistics().num_children == 0, 30.0, "that they are asked for")


@pytest.mark.slow
def test_10_000_creations_and_forwards_leave_nothing(cluster: Cluster, names: list[str]) -> None:
    def work(rounds: int) -> None:
        for _ in range(rounds):
            rrefs = [rpc.remote(names[number % 2], tasks.make, args=(1.0,)) for number in range(250)]
            fetched = rpc.rpc_sync(names[2], tasks.fetch_all, args=(rrefs,))
            assert len(fetched) == 250
            assert fetched[-1].tolist() == [1.0] * 3

    def memory() -> dict[str, int]:
        tasks.wait_clean(names)
        return {"here": rss_bytes(), **{worker.name: rss_bytes(worker.pid) for worker in cluster.workers}}

    work(8)  # so that every buffer has its size
    before = memory()
    work(40)
    grown = {name: after - before[name] for name, after in memory().items()}
    assert max(grown.values()) < 6 << 20, grown  # 600 bytes for each would be 6 MB


def test_10_000_live_references_cost_less_than_10_mib_per_side(cluster: Cluster, names: list[str]) -> None:
    warm = [rpc.remote(names[0], int) for _ in range(500)]
    assert warm[-1].to_here() == 0
    del warm
    tasks.wait_clean(names)
    gc.collect()
    pid = cluster.workers[0].pid
    assert pid is not None
    before = rss_bytes(), rss_bytes(pid)
    rrefs = [rpc.remote(names[0], int) for _ in range(10_000)]
    assert rrefs[-1].to_here() == 0
    wait_until(lambda: num_values(names[0]) == 10_000, 20.0, "that all are made")
    wait_until(lambda: all(rref.confirmed_by_owner() for rref in rrefs), 20.0, "that all are confirmed")
    here, there = rss_bytes() - before[0], rss_bytes(pid) - before[1]
    assert here < 10 << 20, f"{here / 10_000:.0f} bytes for each here"
    assert there < 10 << 20, f"{there / 10_000:.0f} bytes for each on the owner"


def test_a_large_value_is_freed_soon(cluster: Cluster, names: list[str]) -> None:
    pid = cluster.workers[0].pid
    assert pid is not None
    rref = rpc.remote(names[0], torch.ones, args=(8 << 20,))  # 32 MiB
    assert rref.rpc_sync().numel() == 8 << 20
    full = rss_bytes(pid)
    del rref
    wait_until(lambda: rss_bytes(pid) < full - (24 << 20), 20.0, "that its memory is given back")


def test_a_reference_that_comes_back_while_the_old_one_ends(make_agents: Callable[..., list[rpc.Agent]]) -> None:
    """The end of the old one is noticed after the new one has arrived, and before it is in anybody's hands."""
    a, b = make_agents(2)
    known = context.of(a)
    rref = RRef._of(known, Owned(known.new_id()))
    rref._state.set([1])  # type: ignore[union-attr]
    rref_id = rref._state.rref_id
    fork_id, _ = known.fork_for(rref._state, "b", TransferStatus())
    state = known.receive(rref_id, fork_id, known.own, context.of(b).own, None)
    del rref
    known.take_dropped()
    again = RRef._of(known, state)
    known._apply(known._ownership.delete_received(context.of(b).own, rref_id, fork_id, False))
    assert again.local_value() == [1]
    del again, state


def test_two_that_come_back_at_once_are_counted_each(make_agents: Callable[..., list[rpc.Agent]]) -> None:
    a, b = make_agents(2)
    known, other = context.of(a), context.of(b).own
    rref = RRef._of(known, Owned(known.new_id()))
    rref._state.set([1])  # type: ignore[union-attr]
    rref_id, (fork_id, _) = rref._state.rref_id, known.fork_for(rref._state, "b", TransferStatus())
    states = [known.receive(rref_id, fork_id, known.own, other, None) for _ in range(2)]
    first, second = (RRef._of(known, state) for state in states)
    del rref, second
    known._apply(known._ownership.delete_received(other, rref_id, fork_id, False))
    known.take_dropped()
    assert first.local_value() == [1]
    del first, states


def test_an_owner_that_closes_its_own_reference(names: list[str]) -> None:
    for is_shared in (False, True):
        rref = RRef([1])
        if is_shared:
            rpc.rpc_sync(names[0], tasks.keep, args=("a", rref))
        rref.close()
        rref.close()
        assert "closed" in repr(rref)
        with pytest.raises(RRefError, match="deleted"):
            rref.local_value()
        with pytest.raises(RRefError, match="deleted"):
            rref.to_here()
    assert rpc.rpc_sync(names[0], tasks.kept_value, args=("a",)) == [1]
    rpc.rpc_sync(names[0], tasks.drop, args=("a",))


def test_many_forwarded_references_take_linear_time(names: list[str]) -> None:
    rrefs = [rpc.remote(names[0], int) for _ in range(3000)]
    assert sum(rpc.rpc_sync(names[1], tasks.fetch_all, args=(rrefs,))) == 0


def make_many(count: int) -> list[RRef[int]]:
    return [RRef(number) for number in range(count)]


def check_that_all_are_freed_at_once(a: Agent, b: Agent, count: int) -> None:
    """Calls go on meanwhile, and nothing is left to be said."""
    first, second = context.of(a), context.of(b)
    held = a.call("b", make_many, (count,), timeout_s=200.0)
    assert len(held) == count
    assert second.statistics().num_values == count
    held.clear()
    gc.collect()
    for _ in range(20):
        assert a.call("b", len, ([1],)) == 1
        assert b.call("a", len, ([1],)) == 1
    wait_until(lambda: second.statistics().num_values == 0, 200.0, "that all are freed")
    for known in (first, second):
        wait_until(lambda known=known: known.statistics().num_messages == 0, 20.0, "that all is said")  # type: ignore[misc]


def test_references_in_transit_are_not_looked_through_with_every_message(
    make_agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be many of them, and messages leave every 10 ms."""
    looked: list[Ownership] = []
    children = Ownership.children

    def watched(self: Ownership) -> list[int]:
        looked.append(self)
        return children(self)

    monkeypatch.setattr(Ownership, "children", watched)
    monkeypatch.setattr(context, "_ASK_S", 600.0)
    known = context.of(make_agents(2)[0])
    for _ in range(20):
        known._on_timer()
    assert looked == [known._ownership]
    assert known._timer._flush_at < context._NEVER, "they are looked through later"
    monkeypatch.setattr(context, "_ASK_S", 0.0)
    known._on_timer()
    assert len(looked) == 2


@pytest.mark.timeout(500)
def test_more_references_than_one_message_can_name_are_freed_at_once(make_agents: Callable[..., list[Agent]]) -> None:
    check_that_all_are_freed_at_once(*make_agents(2), 40_000)


@pytest.mark.slow
@pytest.mark.timeout(500)  # it computes for seconds, in each of two workers at once
def test_a_hundred_thousand_references_are_freed_at_once(make_agents: Callable[..., list[Agent]]) -> None:
    check_that_all_are_freed_at_once(*make_agents(2), 100_000)
