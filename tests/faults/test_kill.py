"""A worker is killed: everybody learns it at once, others go on, and it may come back."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gradwire.errors import AuthenticationFailed
from gradwire.rpc.peers import Peer, StaticDirectory
from rpc.fixtures import MakeAgents, init_source
from rpc.puppets import Puppet, PuppetError, wait_until

Workers = Callable[..., list[Puppet]]
NOTICED_S = 5.0
"""Usually milliseconds; nothing here has a deadline, so one who does not notice waits much longer."""


@pytest.mark.parametrize("transports", [("unix",), ("tcp",)])
def test_pending_calls_fail_at_once_and_others_go_on(workers: Workers, transports: tuple[str, ...]) -> None:
    first, second, third = workers(3, transports=transports)
    first.do("fs = [rpc.rpc_async('w1', h.wait_gate, timeout=0) for _ in range(5)]")
    first.do("other = rpc.rpc_async('w2', h.wait_gate)")
    second.do("[h.entered.acquire(timeout=10) for _ in range(5)]")
    started = time.monotonic()
    second.kill()
    texts = first.do(
        "texts = []\n"
        "for f in fs:\n"
        "    try: f.wait()\n"
        "    except WorkerLost as error: texts.append((error.worker, error.last_seen is not None, str(error)))\n"
        "texts"
    )
    assert time.monotonic() - started < NOTICED_S
    assert [text[:1] for text in texts] == [("w1",)] * 5
    reason = "connection closed unexpectedly (the process died or was killed, or the network failed)"
    assert all(reason in text[2] and "unknown whether the function ran" in text[2] for text in texts)
    third.do("h.open_gate()")
    assert first.do("other.wait()") is True


def test_new_calls_fail_at_once(workers: Workers) -> None:
    first, second = workers(2)
    first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))")
    second.kill()
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(PuppetError) as caught:
            first.do("rpc.rpc_sync('w1', operator.add, args=(1, 2))")
        assert caught.value.kind == "WorkerLost"
        assert caught.value.fields["worker"] == "w1"
    assert time.monotonic() - started < NOTICED_S


def test_worker_that_nobody_calls_is_noticed_too(workers: Workers) -> None:
    first, second = workers(2)
    first.do("lost = []; rpc.current_agent().on_worker_lost(lambda address, reason: lost.append(address.info.name))")
    second.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))")
    second.kill()
    assert wait_until(lambda: first.do("lost") == ["w1"], NOTICED_S)


def test_waiting_thread_of_a_killed_worker_wakes(workers: Workers) -> None:
    first, second = workers(2)
    first.start("rpc.rpc_sync('w1', h.wait_gate, timeout=0)")
    second.do("h.entered.acquire(timeout=10)")
    started = time.monotonic()
    second.kill()
    with pytest.raises(PuppetError) as caught:
        first.result(20.0)
    assert caught.value.kind == "WorkerLost"
    assert time.monotonic() - started < NOTICED_S


def test_death_in_the_middle_of_a_chain_names_the_dead(workers: Workers) -> None:
    first, _second, third = workers(3)
    first.start("rpc.rpc_sync('w1', h.pass_on, args=('w2', h.wait_gate))")
    third.do("h.entered.acquire(timeout=10)")
    third.kill()
    with pytest.raises(PuppetError) as caught:
        first.result(20.0)
    assert (caught.value.kind, caught.value.fields["worker"]) == ("WorkerLost", "w2")


def test_death_while_a_large_result_arrives(workers: Workers) -> None:
    first, second = workers(2, transports=("tcp",))
    first.do("fs = [rpc.rpc_async('w1', torch.ones, args=(8 << 20,)) for _ in range(8)]; fs[0].wait()[0].item()")
    second.kill()
    kinds = first.do(
        "kinds = set()\n"
        "for f in fs:\n"
        "    try: f.wait()\n"
        "    except Exception as error: kinds.add(type(error).__name__)\n"
        "kinds"
    )
    assert kinds <= {"WorkerLost"}


def test_gather_names_the_dead_and_works_again_after_a_restart(
    workers: Workers, make_puppets: Callable[[int], list[Puppet]], meeting: str
) -> None:
    first, second, third = workers(3)
    for puppet in (first, second, third):
        puppet.start("rpc._barrier()")
    for puppet in (first, second, third):
        puppet.result()
    third.kill()
    for puppet in (first, second):
        with pytest.raises(PuppetError, match="w2"):
            puppet.do("rpc._barrier()")
    (new,) = make_puppets(1)
    new.do(init_source(2, 3, meeting))
    for puppet in (first, second, new):
        puppet.start("sorted(rpc._all_gather(os.getpid()).items())")
    expected = [("w0", first.pid), ("w1", second.pid), ("w2", new.pid)]
    assert [puppet.result() for puppet in (first, second, new)] == [expected] * 3
    for puppet in (first, second, new):
        puppet.start("rpc.shutdown()")
    for puppet in (first, second, new):
        puppet.result()


@pytest.mark.parametrize("times", [3])
def test_restarted_worker_is_reached_again(
    workers: Workers, make_puppets: Callable[[int], list[Puppet]], meeting: str, times: int
) -> None:
    first, second, third = workers(3)
    for puppet in (first, third):
        assert puppet.do("rpc.rpc_sync('w1', h.pid)") == second.pid
    for _ in range(times):
        second.kill()
        (second,) = make_puppets(1)
        second.do(init_source(1, 3, meeting))
        assert second.do("rpc.rpc_sync('w0', h.pid)") == first.pid
        assert first.do("rpc.rpc_sync('w1', h.pid)") == second.pid
        assert third.do("rpc.rpc_sync('w1', h.pid)") == second.pid
    second.kill()
    with pytest.raises(PuppetError) as caught:
        third.do("rpc.rpc_sync('w1', h.pid)")
    assert caught.value.kind == "WorkerLost"


def test_old_incarnation_is_refused(make_agents: MakeAgents) -> None:
    """Two workers of one name: whoever started later counts, and the older one can no longer connect or call."""
    shared = StaticDirectory()
    (target,) = make_agents("target", directory=shared)
    (old,) = make_agents("twin", directory=StaticDirectory([target.address]))
    assert old.call("target", int, ("3",)) == 3
    (new,) = make_agents("twin", directory=StaticDirectory([target.address]))
    assert new.call("target", int, ("4",)) == 4
    assert wait_until(lambda: not old.peers.lanes())
    with pytest.raises(AuthenticationFailed, match="newer incarnation"):
        old.call("target", int, ("5",))
    assert new.call("target", int, ("6",)) == 6


def test_call_meant_for_an_old_incarnation_is_refused(make_agents: MakeAgents) -> None:
    import msgspec

    (target,) = make_agents("target")
    stale = msgspec.structs.replace(target.address, incarnation=target.address.incarnation - 1)
    (caller,) = make_agents("caller", directory=StaticDirectory([stale]))
    with pytest.raises(AuthenticationFailed, match="has restarted"):
        caller.call("target", int, ("3",))
    assert isinstance(caller.peers.peer("target"), Peer)
    assert caller.peers.peer("target").lanes == {}
