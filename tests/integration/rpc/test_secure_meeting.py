"""Workers with keys meet at a store of rank 0's own, over TLS."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.transports.tls import make_keys
from rpc.fixtures import init_source
from rpc.puppets import Puppet, PuppetError, wait_until

Make = Callable[[int], list[Puppet]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keys")
    make_keys(made / "one", ["w0", "w1", "w2", "worker"])
    make_keys(made / "other", ["worker"])
    return made


def _init(rank: int, world_size: int | None, where: str, folder: Path, key: str | None = None, **more: object) -> str:
    keys = f"keys_for({str(folder / 'one')!r}, {key or f'w{rank}'!r})"
    line = init_source(rank, world_size, where, trust="code", **more).replace("trust=", f"tls={keys}, trust=")
    return f"from gradwire.transports.tls import keys_for\n{line}"


def _ready(puppets: list[Puppet]) -> list[Puppet]:
    """Have them import what they need, so that they start at the same time."""
    for puppet in puppets:
        puppet.start("import gradwire.transports.certificates")
    for puppet in puppets:
        puppet.result(60.0)
    return puppets


def _meet(puppets: list[Puppet], where: str, folder: Path, key: str | None = None) -> None:
    for rank, puppet in enumerate(puppets):
        puppet.start(_init(rank, len(puppets), where, folder, key))
    for puppet in puppets:
        puppet.result()


def _leave(puppets: list[Puppet]) -> None:
    for puppet in puppets:
        puppet.start("rpc.shutdown()")
    for puppet in puppets:
        puppet.result()


def _check(puppets: list[Puppet]) -> None:
    for puppet in puppets:
        assert [puppet.do(f"rpc.rpc_sync({rank}, h.pid)") for rank in range(len(puppets))] == [p.pid for p in puppets]


class AgentStore:
    """What torchrun serves at MASTER_PORT, in a process of its own."""

    def __init__(self, puppet: Puppet) -> None:
        self._puppet = puppet
        puppet.do("from datetime import timedelta; from torch.distributed import TCPStore")
        puppet.do("store = TCPStore('127.0.0.1', 0, None, True, timedelta(seconds=30), wait_for_workers=False)")
        self.port = puppet.do("store.port")

    def set(self, key: str, value: str) -> None:
        self._puppet.do(f"store.set({key!r}, {value!r})")

    def get(self, key: str) -> str:
        return str(self._puppet.do(f"store.get({key!r}).decode() if store.check([{key!r}]) else ''"))


@pytest.fixture
def agent_store(make_puppets: Make) -> AgentStore:
    return AgentStore(make_puppets(1)[0])


@pytest.mark.parametrize("key", [None, "worker"], ids=["a certificate each", "one for all"])
def test_meet_leave_and_meet_again(make_puppets: Make, tcp_meeting: str, folder: Path, key: str | None) -> None:
    puppets = make_puppets(3)
    for puppet in puppets:
        puppet.do("def no_store(*args, **more): raise AssertionError('a plain store')")
        puppet.do("import gradwire.rpc.meeting_store as m; m.TCPStore = no_store")
    for _ in range(2):
        _meet(puppets, tcp_meeting, folder, key)
        _check(puppets)
        _leave(puppets)
    for puppet in puppets:
        puppet.do("own_threads = lambda: [t.name for t in threading.enumerate() if t.name.startswith('gradwire')]")
        puppet.do(
            "from gradwire.testing import wait_until; wait_until(lambda: not own_threads(), 10.0, 'no thread is left')"
        )
        assert puppet.do("len([f for f in os.listdir('/proc/self/fd')])") < 40


def test_workers_come_and_go_and_are_started_again(make_puppets: Make, tcp_meeting: str, folder: Path) -> None:
    first, second, third = make_puppets(3)
    first.do(_init(0, None, tcp_meeting, folder))
    with pytest.raises(PuppetError, match="no worker 'w1'"):
        first.do("rpc.rpc_sync('w1', h.pid)")
    second.do(_init(1, None, tcp_meeting, folder))
    assert first.do("rpc.rpc_sync('w1', h.pid)") == second.pid
    assert first.do("[info.name for info in rpc.current_agent().directory.infos()]") == ["w0", "w1"]
    assert second.do("[info.name for info in rpc.current_agent().directory.infos()]") == ["w0", "w1"]
    second.kill()
    third.do(_init(1, None, tcp_meeting, folder))
    assert first.do("rpc.rpc_sync('w1', h.pid)") == third.pid


def test_a_rank_of_a_fixed_world_is_started_again(make_puppets: Make, tcp_meeting: str, folder: Path) -> None:
    puppets = make_puppets(3)
    _meet(puppets, tcp_meeting, folder)
    _check(puppets)
    puppets[1].kill()
    (again,) = make_puppets(1)
    again.do(_init(1, 3, tcp_meeting, folder))
    puppets[1] = again
    _check(puppets)


def test_equal_names_are_refused_everywhere(make_puppets: Make, tcp_meeting: str, folder: Path) -> None:
    puppets = _ready(make_puppets(3))
    for rank, (puppet, name) in enumerate(zip(puppets, ["a", "b", "a"], strict=True)):
        puppet.start(_init(rank, 3, tcp_meeting, folder, "worker", name=name, init_timeout=60.0))
    for puppet in puppets:
        with pytest.raises(PuppetError, match=r"(?s)DuplicateWorker.*is not unique"):
            puppet.result()


def test_all_learn_of_equal_names_that_rank_0_finds_when_it_publishes_itself(
    make_puppets: Make, tcp_meeting: str, folder: Path
) -> None:
    """The store ends with rank 0, so that it has to stay until the others know why there will be no meeting."""
    puppets = _ready(make_puppets(3))
    puppets[0].do("from gradwire.rpc.rendezvous import StoreDirectory; from gradwire.testing import wait_until")
    puppets[0].do("publish = StoreDirectory.publish")
    puppets[0].do("def late(self, agent): wait_until(lambda: self.at_rank(2), 20.0); publish(self, agent)")
    puppets[0].do("StoreDirectory.publish = late")
    for rank, (puppet, name) in enumerate(zip(puppets, ["a", "b", "a"], strict=True)):
        puppet.start(_init(rank, 3, tcp_meeting, folder, "worker", name=name, init_timeout=60.0))
    for puppet in puppets:
        with pytest.raises(PuppetError, match=r"(?s)DuplicateWorker.*is not unique"):
            puppet.result()


def test_all_give_up_at_once_when_a_member_cannot_join_whatever_its_clock_says(
    make_puppets: Make, tcp_meeting: str, folder: Path
) -> None:
    puppets = _ready(make_puppets(2))
    puppets[1].do("real = time.time_ns; time.time_ns = lambda: real() - 3600 * 10**9")
    puppets[0].start(_init(0, 2, tcp_meeting, folder, init_timeout=60.0))
    puppets[1].start(_init(1, 2, tcp_meeting, folder, init_timeout=60.0).replace("trust='code'", "trust='data'"))
    for puppet in puppets:
        with pytest.raises(PuppetError, match=r"(?s)RendezvousFailed.*trust="):
            puppet.result(20.0)


def test_a_missing_rank_is_named(make_puppets: Make, tcp_meeting: str, folder: Path) -> None:
    puppets = _ready(make_puppets(2))
    for rank, puppet in enumerate(puppets):
        puppet.start(_init(rank, 3, tcp_meeting, folder, init_timeout=2.5))
    for puppet in puppets:
        with pytest.raises(PuppetError, match=rf"rank 2 never arrived at {tcp_meeting}"):
            puppet.result()


def test_a_port_that_is_taken_is_named(make_puppets: Make, folder: Path, agent_store: AgentStore) -> None:
    (puppet,) = make_puppets(1)
    with pytest.raises(PuppetError, match=r"rank 0 cannot open the meeting point .* choose another port"):
        puppet.do(_init(0, 2, f"tcp://127.0.0.1:{agent_store.port}", folder))


def test_a_forked_child_does_not_keep_the_port(make_puppets: Make, tcp_meeting: str, folder: Path) -> None:
    (puppet,) = make_puppets(1)
    puppet.do(_init(0, 1, tcp_meeting, folder))
    puppet.do("r, w = os.pipe(); child = os.fork()\nif child == 0:\n    os.close(w); os.read(r, 1); os._exit(0)")
    puppet.do("os.close(r); rpc.shutdown()")
    puppet.do(_init(0, 1, tcp_meeting, folder))
    puppet.do("rpc.shutdown(); os.close(w); os.waitpid(child, 0)[1]")


# -- under torchrun -----------------------------------------------------------------------------------------------------


def _start_under_torchrun(
    puppets: list[Puppet], store: AgentStore, folder: Path, key: str | None = None, init_timeout: float = 20.0
) -> None:
    for rank, puppet in enumerate(puppets):
        _set_environment(puppet, rank, len(puppets), store)
        puppet.start(_init(-1, None, "env://", folder, key or f"w{rank}", name=f"w{rank}", init_timeout=init_timeout))


def _set_environment(puppet: Puppet, rank: int, world_size: int, store: AgentStore) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = True
    puppet.do(f"os.environ.update({ {key: str(value) for key, value in variables.items()} })")


def test_rank_0_leaves_a_hint_in_torchruns_store_and_nothing_else(
    make_puppets: Make, folder: Path, agent_store: AgentStore
) -> None:
    puppets = make_puppets(3)
    _start_under_torchrun(puppets, agent_store, folder)
    for puppet in puppets:
        puppet.result()
    _check(puppets)
    assert agent_store.get("gradwire/secure").startswith("tcp://127.0.0.1:")
    assert not any(agent_store.get(f"gradwire/{key}") for key in ("token", "name/w0", "rank/1", "members"))
    _leave(puppets)


def test_a_hint_that_an_earlier_run_left_is_passed_over(
    make_puppets: Make, free_port: int, folder: Path, agent_store: AgentStore
) -> None:
    agent_store.set("gradwire/secure", f"tcp://127.0.0.1:{free_port}?tls")
    first, second = make_puppets(2)
    for rank, puppet in enumerate((first, second)):
        _set_environment(puppet, rank, 2, agent_store)
    second.start(_init(-1, None, "env://", folder, "w1", name="w1"))
    assert not wait_until(second.has_answered, 0.5)
    first.do(_init(-1, None, "env://", folder, "w0", name="w0"))
    second.result()
    _check([first, second])


@pytest.mark.parametrize("hint", ["tcp://127.0.0.1:{port}?tls", "tcp://127.0.0.1:{port}", "nonsense", "x" * 5000])
def test_a_false_hint_leads_nowhere(
    make_puppets: Make, free_port: int, folder: Path, agent_store: AgentStore, hint: str
) -> None:
    """At the port a store listens that has the keys of another cluster."""
    puppets = make_puppets(2)
    keys = f"tls=keys_for({str(folder / 'other')!r}), trust="
    line = init_source(0, 2, f"tcp://127.0.0.1:{free_port}", trust="code", init_timeout=30).replace("trust=", keys)
    puppets[0].start(f"from gradwire.transports.tls import keys_for\n{line}")
    agent_store.set("gradwire/secure", hint.format(port=free_port))
    _set_environment(puppets[1], 1, 2, agent_store)
    started = time.monotonic()
    with pytest.raises(PuppetError, match="RendezvousFailed"):
        puppets[1].do(_init(-1, None, "env://", folder, "w1", name="w1", init_timeout=4.0))
    assert time.monotonic() - started < 10.0
