"""Owners and users that die, connections that are cut, workers that leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from cluster.processes import stopped
from gradwire import rpc
from gradwire.cluster.api import Cluster, Worker
from gradwire.errors import OwnerLost, RpcError, RRefError, WorkerLost
from gradwire.rref import context
from gradwire.testing import wait_until
from rpc.fixtures import init_source
from rpc.puppets import Puppet, PuppetError
from rref import tasks

SETUP = "import torch\nfrom gradwire.rpc import RRef\nfrom gradwire.rref import context\n" + "from rref import tasks"
Workers = Callable[..., list[Puppet]]


@pytest.fixture
def names(cluster: Cluster) -> list[str]:
    return [worker.name for worker in cluster.workers]


def kill(worker: Worker) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not worker.is_alive, 10.0, f"that {worker.name} is gone")


def num_values(name: str) -> int:
    return int(rpc.rpc_sync(name, tasks.counts)[0])


def test_a_dead_owner_is_known_at_once(cluster: Cluster, names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rref.to_here()
    rpc.rpc_sync(names[1], tasks.keep, args=("a", rref))
    kill(cluster.workers[0])
    started = time.monotonic()
    with pytest.raises(OwnerLost, match=names[0]) as caught:
        rref.to_here()
    assert caught.value.worker == names[0]
    assert isinstance(caught.value, WorkerLost)
    with pytest.raises(OwnerLost, match=names[0]):
        rref.rpc_sync().sum()
    with pytest.raises(OwnerLost, match=names[0]):
        rpc.rpc_sync(names[1], tasks.kept_value, args=("a",))
    with pytest.raises((OwnerLost, WorkerLost), match=names[0]):
        rpc.rpc_sync(names[1], tasks.fetch, args=(rref,))
    assert time.monotonic() - started < 30
    rpc.rpc_sync(names[1], tasks.drop, args=("a",))


def test_a_value_that_came_early_is_lost_with_its_owner_too(cluster: Cluster, names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rref._get_future().wait()
    kill(cluster.workers[0])
    wait_until(lambda: "broken" in repr(rref), 20.0, "that the loss is noticed")
    with pytest.raises(OwnerLost, match=names[0]):
        rref.to_here()


def test_an_owner_that_dies_during_a_fetch(cluster: Cluster, names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.wait_gate)
    future = rref.rpc_async().bit_length()
    kill(cluster.workers[0])
    started = time.monotonic()
    with pytest.raises((OwnerLost, WorkerLost), match=names[0]):
        rref.to_here()
    with pytest.raises(WorkerLost, match=names[0]):
        future.wait()
    assert time.monotonic() - started < 30


def test_a_dead_user_holds_nothing(cluster: Cluster, names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(1.0,))
    rpc.rpc_sync(names[1], tasks.keep, args=("a", rref))
    del rref
    tasks.wait_clean([])
    assert num_values(names[0]) == 1
    kill(cluster.workers[1])
    wait_until(lambda: num_values(names[0]) == 0, 10.0, "that the dead worker's hold is dropped")


def test_what_a_dead_user_passed_on_lives(cluster: Cluster, names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(5.0,))
    rpc.rpc_sync(names[1], tasks.keep, args=("a", rref))
    rpc.rpc_sync(names[1], tasks.kept_to, args=("a", names[2]))
    del rref
    kill(cluster.workers[1])
    assert rpc.rpc_sync(names[2], tasks.kept_value, args=("a",)).tolist() == [5.0] * 3
    tasks.wait_clean([])
    assert num_values(names[0]) == 1
    assert rpc.rpc_sync(names[2], tasks.kept_value, args=("a",)).tolist() == [5.0] * 3
    rpc.rpc_sync(names[2], tasks.drop, args=("a",))
    wait_until(lambda: num_values(names[0]) == 0, 10.0, "that the last hold is dropped")


def test_references_to_the_driver_end_with_their_user(cluster: Cluster, names: list[str]) -> None:
    rref = rpc.RRef(torch.ones(2))
    rpc.rpc_sync(names[1], tasks.keep, args=("a", rref))
    assert context.here().holders() == {names[1]: 1}
    del rref
    kill(cluster.workers[1])
    wait_until(lambda: context.here().statistics().num_values == 0, 10.0, "that the hold is dropped")


@pytest.mark.usefixtures("asks_soon")
def test_a_creation_on_a_worker_that_dies(cluster: Cluster, names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.wait_gate)
    passed_on = rpc.rpc_async(names[1], tasks.fetch, args=(rref,))
    kill(cluster.workers[0])
    with pytest.raises((WorkerLost, RRefError)):
        rref._get_future().wait()
    with pytest.raises((WorkerLost, RRefError)):
        passed_on.wait()
    with pytest.raises((WorkerLost, RpcError)):
        rpc.remote(names[0], tasks.make, args=(1.0,))


def test_a_maker_that_dies_before_its_call_arrives(cluster: Cluster, names: list[str]) -> None:
    """Killed while its creations are queued: whoever got the references is told, and nothing is left."""
    source = cluster.workers[1]
    future = source.submit(tasks.forward_unmade, names[0], names[2])
    wait_until(lambda: source.call(tasks.has_begun), 10.0, "that it has begun")
    kill(source)
    with pytest.raises(WorkerLost):
        future.wait()
    rpc.rpc_sync(names[0], tasks.open_gate)
    wait_until(lambda: num_values(names[0]) == 0, 10.0, "that the owner has freed it")


def test_stopped_users_keep_what_they_have(cluster: Cluster, names: list[str]) -> None:
    rref = rpc.remote(names[0], tasks.make, args=(2.0,))
    rpc.rpc_sync(names[1], tasks.keep, args=("a", rref))
    wait_until(lambda: not context.here().statistics().num_children, 20.0, "that its arrival is known")
    with stopped(cluster.workers[1].pid):
        del rref
        tasks.wait_clean([])
        assert num_values(names[0]) == 1
    assert rpc.rpc_sync(names[1], tasks.kept_value, args=("a",)).tolist() == [2.0] * 3
    rpc.rpc_sync(names[1], tasks.drop, args=("a",))


def test_a_cut_connection_loses_no_message(make_agents: Callable[..., list[rpc.Agent]]) -> None:
    """What was not acknowledged when the control lane was cut is sent again."""
    a, b = make_agents(2)
    known_a, known_b = context.of(a), context.of(b)
    rref = gw.rref.api.create(known_a, "b", tasks.make, (1.0,), None, -1.0)
    assert rref.to_here().tolist() == [1.0] * 3
    peer = a.peers.peer("b")
    for lane in list(peer.lanes.values()):
        lane.stream.close()
    del rref
    wait_until(lambda: known_b.statistics().num_values == 0, 10.0, "that the deletion arrives all the same")
    wait_until(lambda: known_a.statistics().num_messages == 0, 10.0, "that it is acknowledged")


def test_shutdown_frees_everything_and_waits_for_nobody_in_vain(workers: Workers) -> None:
    """Both have references of each other in global variables when they leave.

    Neither waits in vain: the one that leaves last deletes its references before it waits until the other has left.
    """
    puppets = workers(2)
    for puppet, other in zip(puppets, ("w1", "w0"), strict=True):
        puppet.do(SETUP)
        puppet.do("import gradwire.rpc.collectives as c; c._SEE_OFF_S = context._LEAVE_S = 60")
        puppet.do(f"held = rpc.remote({other!r}, tasks.make, args=(1.0,)); own = RRef([1])")
        puppet.do(f"held.to_here(); rpc.rpc_sync({other!r}, tasks.keep, args=('a', own))")
    for puppet in puppets:
        puppet.start("known = context.here(); rpc.shutdown(); known.statistics().num_forks")
    assert [puppet.result() for puppet in puppets] == [0, 0]
    with pytest.raises(PuppetError, match="deleted"):
        puppets[0].do("held.to_here()")


def test_shutdown_names_the_holder_that_does_not_let_go(workers: Workers) -> None:
    first, second = workers(2)
    for puppet in (first, second):
        puppet.do(SETUP)
    first.do("own = RRef([1]); rpc.rpc_sync('w1', tasks.keep, args=('a', own))")
    second.do(  # a worker that leaves its references be, and stays until the other has left
        "import time\n"
        "agent = context.here().agent\n"
        "def stay(deadline):\n"
        " while not agent.has_ended('w0'): time.sleep(0.01)\n"
        "agent.farewells[:] = [stay]"
    )
    first.start("context._LEAVE_S = 0.5\nrpc.shutdown()")
    second.start("rpc.shutdown()")
    with pytest.raises(PuppetError, match=r"other workers still held references to its values: w1 \(1\)"):
        first.result()
    second.result()


def test_a_restarted_owner_does_not_know_the_old_reference(
    make_puppets: Callable[[int], list[Puppet]], meeting: str
) -> None:
    first, second = make_puppets(2)
    for rank, puppet in enumerate((first, second)):
        puppet.do(init_source(rank, None, meeting))
        puppet.do(SETUP)
    first.do("held = rpc.remote('w1', tasks.make, args=(1.0,)); held.to_here(); None")
    second.kill()
    (again,) = make_puppets(1)
    again.do(init_source(1, None, meeting))
    again.do(SETUP)
    with pytest.raises(PuppetError) as caught:
        first.do("held.to_here()")
    assert caught.value.kind == "OwnerLost"
    assert first.do("rpc.remote('w1', tasks.make, args=(2.0,)).to_here().tolist()") == [2.0] * 3
    for puppet in (first, again):
        puppet.do("rpc.shutdown(graceful=False)")
