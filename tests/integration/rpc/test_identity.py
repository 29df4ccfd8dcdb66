"""A name belongs to one rank, and a rank to one name, for the life of a cluster."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest

from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, DuplicateWorker, IdentityTaken
from gradwire.rpc import Agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.transports.tls import make_keys
from gradwire.types import WorkerAddress, WorkerInfo
from rpc.by_hand import connect
from rpc.fixtures import MakeAgents, init_source
from rpc.puppets import Puppet, PuppetError

MakePuppets = Callable[[int], list[Puppet]]


def introduce(agent: Agent, name: str, rank: int, incarnation: int = 1) -> None:
    """Connect by hand, as a worker of that name and rank."""
    connect(agent, name=name, rank=rank, incarnation=incarnation).close()


def apart(make_agents: MakeAgents, *, num: int = 3) -> list[Agent]:
    """Agents a, b and z of ranks 0, 1 and 2, each with a directory of its own."""
    made = [make_agents(name, directory=StaticDirectory(), trust="data")[0] for name in "abz"[:num]]
    for agent in made:
        for other in made:
            agent.directory.update(other.address)
    return made


def test_a_rank_cannot_be_taken(make_agents: MakeAgents) -> None:
    a, b, _ = apart(make_agents)
    with pytest.raises(IdentityTaken, match="a with rank 0 and z with rank 0"):
        introduce(b, "z", 0)
    with pytest.raises(IdentityTaken, match="a with rank 0 and new with rank 0"):
        introduce(b, "new", 0)
    assert b.directory.find(0) == a.address
    assert b.worker_info(0).name == "a"


def test_a_name_cannot_have_a_second_rank(make_agents: MakeAgents) -> None:
    a, b, _ = apart(make_agents)
    with pytest.raises(IdentityTaken, match="a with rank 0 and a with rank 7"):
        introduce(b, "a", 7, incarnation=a.address.incarnation + 1)
    assert b.directory.find("a") == a.address
    assert [info.id for info in b.directory.infos()] == [0, 1, 2]


def test_the_first_to_come_is_bound(make_agents: MakeAgents) -> None:
    b = apart(make_agents, num=2)[1]
    introduce(b, "new", 7)
    introduce(b, "new", 7, incarnation=2)  # it was restarted
    with pytest.raises(IdentityTaken, match="new with rank 7 and other with rank 7"):
        introduce(b, "other", 7)


def test_a_worker_that_answers_with_the_rank_of_another_is_refused(make_agents: MakeAgents) -> None:
    _, b, z = apart(make_agents)
    z.address = WorkerAddress(WorkerInfo("z", 0), z.address.incarnation, z.address.host, z.address.uris)
    with pytest.raises(IdentityTaken, match="a with rank 0 and z with rank 0"):
        b.call("z", "double", (1,))


def test_a_certificate_for_a_name_does_not_help(
    make_agents: MakeAgents, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As the worker z would do it that was taken over: another rank, from its own agent."""
    folder = tmp_path_factory.mktemp("keys", numbered=True)
    folder.chmod(0o700)
    make_keys(folder, ["a", "b", "z"])
    made = [
        make_agents(name, directory=StaticDirectory(), transports=("tcp",), tls=TlsKeys.in_folder(folder, name))[0]
        for name in "abz"
    ]
    for agent in made:
        for other in made:
            agent.directory.update(other.address)
    a, b, z = made
    assert b.call(0, "double", (2,)) == 4
    z.address = WorkerAddress(WorkerInfo("z", 0), z.address.incarnation, z.address.host, z.address.uris)
    with pytest.raises(IdentityTaken, match=r"b refused the connection: .* a with rank 0 and z with rank 0"):
        z.call("b", "double", (2,))
    assert b.directory.find(0) == a.address


def test_a_worker_cannot_start_with_a_name_or_rank_that_is_taken(make_agents: MakeAgents) -> None:
    shared = StaticDirectory([WorkerAddress(WorkerInfo("z", 0), 1, "elsewhere", ())])
    with pytest.raises(DuplicateWorker, match="z with rank 0 and a with rank 0"):
        make_agents("a", directory=shared)
    (other,) = make_agents("b", directory=shared)
    assert other.call("b", operator.add, (1, 2)) == 3


@pytest.mark.parametrize("has_left", [False, True])
def test_where_workers_come_and_go_ranks_stay_with_their_names(
    make_puppets: MakePuppets, meeting: str, has_left: bool
) -> None:
    first, second, third = make_puppets(3)
    first.do(init_source(0, None, meeting, name="a"))
    second.do(init_source(1, None, meeting, name="b"))
    assert second.do("rpc.rpc_sync(0, h.pid)") == first.pid
    if has_left:
        first.do("rpc.shutdown()")
        third.do(init_source(0, None, meeting, name="z"))
        with pytest.raises(PuppetError, match="a with rank 0 and z with rank 0"):
            third.do("rpc.rpc_sync('b', h.pid)")
    else:
        with pytest.raises(PuppetError, match="a with rank 0 and z with rank 0") as caught:
            third.do(init_source(0, None, meeting, name="z"))
        assert caught.value.kind == "DuplicateWorker"
        assert second.do("rpc.rpc_sync(0, h.pid)") == first.pid


def test_where_workers_come_and_go_the_store_has_the_first_word(make_puppets: MakePuppets, meeting: str) -> None:
    """A worker that is not known here yet has the rank that it has published."""
    first, second, third = make_puppets(3)
    first.do(init_source(0, None, meeting, name="a"))
    second.do(init_source(1, None, meeting, name="b"))
    third.do(init_source(2, None, meeting, name="z"))
    third.do(
        "import msgspec\nagent = rpc._get_current_rpc_agent()\n"
        "agent.address = msgspec.structs.replace(agent.address, info=type(agent.info)('z', 0))"
    )
    with pytest.raises(PuppetError, match="rank 0 already belongs to worker a"):
        third.do("rpc.rpc_sync('b', h.pid)")
    assert second.do("rpc.rpc_sync(0, h.pid)") == first.pid


def test_where_all_workers_are_known_no_other_gets_in(make_agents: MakeAgents) -> None:
    known = [
        WorkerAddress(WorkerInfo("a", 0), 0, "elsewhere", ()),
        WorkerAddress(WorkerInfo("b", 1), 0, "elsewhere", ()),
    ]
    directory = StaticDirectory(known)
    directory.complete()
    (a,) = make_agents("a", directory=directory)
    introduce(a, "b", 1)
    for rank in (1, 2, 60_000):
        with pytest.raises(AuthenticationFailed, match=f"new (with|has) rank {rank}"):
            introduce(a, "new", rank)
    assert [info.name for info in a.directory.infos()] == ["a", "b"]


def test_a_rank_beyond_the_world_is_refused(workers: Callable[..., list[Puppet]]) -> None:
    _, second, third = workers(3)
    change = (
        "import msgspec\nagent = rpc._get_current_rpc_agent()\n"
        "agent.address = msgspec.structs.replace(agent.address, info=type(agent.info)('w7', 7))"
    )
    second.do(change)
    with pytest.raises(PuppetError, match="w7 has rank 7, which is out of range for world_size=3"):
        second.do("rpc.rpc_sync('w2', h.pid)")
    assert third.do("len(rpc._get_current_rpc_agent().directory.infos())") == 3
