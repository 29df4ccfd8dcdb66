"""Agents in this process, and worker processes; both end with the test. Used by `tests/faults`, too."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator

import pytest

from gradwire.cluster.rank_processes import reserve_port
from gradwire.config import WorkerConfig
from gradwire.rpc import Agent, client, set_current_agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.types import WorkerInfo
from rpc import handlers
from rpc.puppets import Nursery, Puppet, wait_until

MakeAgents = Callable[..., list[Agent]]


@pytest.fixture
def make_agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeAgents]:
    """``make_agents("a", "b", transports=...)``: agents of one cluster, which `handlers.agents` knows by name.

    A name that is made again has the rank that it had.
    """
    handlers.reset()
    monkeypatch.setattr(client, "_PHASE_GRACE_S", 10.0)  # a busy machine may take long to answer how far a call got
    made: list[Agent] = []
    ranks: dict[str, int] = {}

    def make(*names: str, directory: StaticDirectory | None = None, **settings: object) -> list[Agent]:
        shared = directory or StaticDirectory()
        config = WorkerConfig(**{"transports": ("unix",), "token": b"secret", "rpc_timeout_s": 20.0, **settings})
        infos = [WorkerInfo(name, ranks.setdefault(name, len(ranks))) for name in names]
        new = [start_worker(info, config, shared) for info in infos]
        made.extend(new)
        handlers.agents.update({agent.info.name: agent for agent in new})
        return new

    yield make
    handlers.gate.set()  # whoever still waits for it
    handlers.seen.clear()
    set_current_agent(None)
    for agent in reversed(made):
        agent.close()
    left = lambda: [item.name for item in threading.enumerate() if item.name.startswith("gradwire-")]  # noqa: E731
    assert wait_until(lambda: not left(), 20.0), left()


@pytest.fixture
def pair(make_agents: MakeAgents) -> list[Agent]:
    """Two agents over Unix sockets; the first is the current one."""
    agents = make_agents("a", "b")
    set_current_agent(agents[0])
    return agents


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that forks puppets."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def make_puppets(nursery: Nursery) -> Iterator[Callable[[int], list[Puppet]]]:
    """``make_puppets(3)``: that many processes, not yet workers."""
    made: list[Puppet] = []

    def make(number: int) -> list[Puppet]:
        new = [nursery.make() for _ in range(number)]
        made.extend(new)
        return new

    yield make
    for puppet in made:
        puppet.close()


@pytest.fixture
def meeting() -> Iterator[str]:
    """A ``file://`` init method of its own."""
    folder = tempfile.mkdtemp(prefix="gwm-", dir="/tmp")
    yield f"file://{folder}/store"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port of loopback that nothing else gets during the test."""
    with reserve_port() as port:
        yield port


@pytest.fixture
def tcp_meeting(free_port: int) -> str:
    return f"tcp://127.0.0.1:{free_port}"


@pytest.fixture
def workers(make_puppets: Callable[[int], list[Puppet]], meeting: str) -> Callable[..., list[Puppet]]:
    """``workers(3, num_worker_threads=1)``: processes that have met as ``w0``, ``w1``, ``w2``."""

    def start(number: int, init_method: str = meeting, **options: object) -> list[Puppet]:
        puppets = make_puppets(number)
        for rank, puppet in enumerate(puppets):
            puppet.start(init_source(rank, number, init_method, **options))
        for puppet in puppets:
            puppet.result()
        return puppets

    return start


def init_source(rank: int, world_size: int | None, init_method: str, name: str | None = None, **options: object) -> str:
    """The line that makes a puppet a worker."""
    settings = "".join(f", {key}={value!r}" for key, value in {"init_timeout": 20, **options}.items())
    return (
        f"rpc.init_rpc({name or f'w{rank}'!r}, rank={rank}, world_size={world_size}, "
        f"rpc_backend_options=rpc.RpcOptions(init_method={init_method!r}{settings}))"
    )
