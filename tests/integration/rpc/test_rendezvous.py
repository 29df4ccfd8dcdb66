"""How workers find each other, and what they say when they do not."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire import rpc
from gradwire.errors import ConfigurationError, RendezvousFailed
from gradwire.transports.tls import make_keys
from rpc.fixtures import init_source
from rpc.puppets import Nursery, Puppet, PuppetError, wait_until

Make = Callable[[int], list[Puppet]]


def _meet(puppets: list[Puppet], init_method: str, world_size: int | None = -1, **options: object) -> None:
    size = len(puppets) if world_size == -1 else world_size
    for rank, puppet in enumerate(puppets):
        puppet.start(init_source(rank, size, init_method, **options))
    for puppet in puppets:
        puppet.result()


def _shut_down(puppets: list[Puppet]) -> None:
    for puppet in puppets:
        puppet.start("rpc.shutdown()")
    for puppet in puppets:
        puppet.result()


def _check(puppets: list[Puppet]) -> None:
    for rank, puppet in enumerate(puppets):
        pids = [puppet.do(f"rpc.rpc_sync({other}, h.pid)") for other in range(len(puppets))]
        assert pids == [item.pid for item in puppets]
        assert puppet.do("rpc.get_worker_info().id") == rank


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_meet_leave_and_meet_again(make_puppets: Make, meeting: str, tcp_meeting: str, scheme: str) -> None:
    puppets, where = make_puppets(3), meeting if scheme == "file" else tcp_meeting
    for _ in range(3):
        _meet(puppets, where)
        _check(puppets)
        _shut_down(puppets)


def test_meet_again_in_other_roles(make_puppets: Make, tcp_meeting: str) -> None:
    """Whoever was rank 0 served the store; when it has left, another process can."""
    puppets = make_puppets(2)
    _meet(puppets, tcp_meeting)
    _shut_down(puppets)
    puppets.reverse()
    _meet(puppets, tcp_meeting)
    _check(puppets)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_meet_again_without_waiting_for_the_others(
    make_puppets: Make, meeting: str, tcp_meeting: str, scheme: str
) -> None:
    """Each process goes on as soon as it can; the store of the last meeting may be about to close."""
    puppets, where = make_puppets(3), meeting if scheme == "file" else tcp_meeting
    for rank, puppet in enumerate(puppets):
        once = f"{init_source(rank, 3, where)}; rpc.rpc_sync((rpc.get_worker_info().id + 1) % 3, h.pid); rpc.shutdown()"
        puppet.start(f"for _ in range(5): {once}")
    for puppet in puppets:
        puppet.result(60)
    assert all(puppet.do("rpc._is_current_rpc_agent_set()") is False for puppet in puppets)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_join_no_world_that_is_shutting_down(
    make_puppets: Make, meeting: str, tcp_meeting: str, tmp_path: Path, scheme: str
) -> None:
    """Rank 0 waits for rank 2 to leave, while rank 1 has left and wants to meet again."""
    puppets, where = make_puppets(3), meeting if scheme == "file" else tcp_meeting
    _meet(puppets, where)
    first, second, third = puppets
    joins, may_leave = tmp_path / "joins", tmp_path / "may_leave"
    first.do("import gradwire.rpc.collectives as c; c._SEE_OFF_S = 60")
    third.do("import pathlib, time")
    stay = f"while not pathlib.Path({str(may_leave)!r}).exists(): time.sleep(0.01)"
    third.do(f"def stay(deadline):\n {stay}")
    third.do("rpc.api.current_agent().farewells.append(stay)")
    second.do(
        "from gradwire.rpc.rendezvous import Meeting\n"
        "take = Meeting._take\n"
        "def take_and_tell(meeting, answer):\n"
        " has_joined = take(meeting, answer)\n"
        f" open({str(joins)!r}, 'a').write(f'{{has_joined}} ')\n"
        " return has_joined\n"
        "Meeting._take = take_and_tell"
    )
    for puppet in puppets:
        puppet.start("rpc.shutdown()")
    second.result()
    second.start(init_source(1, 3, where))
    assert wait_until(lambda: joins.exists() and joins.read_text())
    may_leave.touch()
    for rank, puppet in ((0, first), (2, third)):
        puppet.result()
        puppet.start(init_source(rank, 3, where))
    for puppet in puppets:
        puppet.result()
    assert set(joins.read_text().split()[:-1]) == {"False"}
    _check(puppets)


def test_environment(make_puppets: Make, free_port: int) -> None:
    puppets = make_puppets(2)
    for rank, puppet in enumerate(puppets):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
        puppet.do(f"os.environ.update({variables!r})")
        puppet.start(f"rpc.init_rpc('w{rank}')")
    for puppet in puppets:
        puppet.result()
    _check(puppets)
    _shut_down(puppets)


def test_environment_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="environment variable RANK"):
        rpc.init_rpc("a")
    with pytest.raises(ConfigurationError, match="environment variable MASTER_ADDR"):
        rpc.init_rpc("a", rank=0, world_size=1)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_workers_come_and_go_without_a_world_size(
    make_puppets: Make, meeting: str, tcp_meeting: str, scheme: str
) -> None:
    where = meeting if scheme == "file" else tcp_meeting
    first, second, third = make_puppets(3)
    first.do(init_source(0, None, where))
    with pytest.raises(PuppetError, match="no worker 'w1'"):
        first.do("rpc.rpc_sync('w1', h.pid)")
    second.do(init_source(1, None, where))
    assert first.do("rpc.rpc_sync('w1', h.pid)") == second.pid
    assert second.do("rpc.rpc_sync(0, h.pid)") == first.pid
    second.do("rpc.shutdown()")
    with pytest.raises(PuppetError) as caught:
        first.do("rpc.rpc_sync('w1', h.pid)")
    assert caught.value.kind in ("WorkerLost", "UnknownWorker")
    third.do(init_source(1, None, where))
    assert first.do("rpc.rpc_sync('w1', h.pid)") == third.pid


def test_query_names_rank_and_world(make_puppets: Make, meeting: str) -> None:
    (puppet,) = make_puppets(1)
    options = f"rpc.RpcOptions(init_method='{meeting}?rank=0&world_size=1')"
    assert puppet.do(f"rpc.init_rpc('w0', rpc_backend_options={options}); rpc.get_worker_info().id") == 0


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_missing_rank_is_named(make_puppets: Make, meeting: str, tcp_meeting: str, scheme: str) -> None:
    puppets, where = make_puppets(2), meeting if scheme == "file" else tcp_meeting
    for puppet in puppets:
        puppet.do("1")  # they are ready, and start at the same time
    for rank, puppet in enumerate(puppets):
        puppet.start(init_source(rank, 3, where, init_timeout=2.0))
    for rank, puppet in enumerate(puppets):
        with pytest.raises(PuppetError, match=rf"rank 2 never arrived at {where}: rank {rank} \(w{rank}\)") as caught:
            puppet.result(20.0)
        assert caught.value.kind == "RendezvousFailed"
        assert puppet.do("rpc._is_current_rpc_agent_set()") is False


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_missing_rank_zero_is_named(make_puppets: Make, meeting: str, tcp_meeting: str, scheme: str) -> None:
    (puppet,), where = make_puppets(1), meeting if scheme == "file" else tcp_meeting
    started = time.monotonic()
    with pytest.raises(PuppetError, match=rf"rank 0 never arrived.*{where}") as caught:
        puppet.do(init_source(1, 2, where, init_timeout=1.0))
    assert caught.value.kind == "RendezvousFailed"
    assert time.monotonic() - started < 15.0


def test_late_ranks_are_waited_for(make_puppets: Make, tcp_meeting: str) -> None:
    first, second = make_puppets(2)
    second.start(init_source(1, 2, tcp_meeting))
    assert not wait_until(second.has_answered, 0.5)
    first.do(init_source(0, 2, tcp_meeting))
    second.result()
    _check([first, second])


def test_equal_names_are_refused(make_puppets: Make, meeting: str) -> None:
    first, second = make_puppets(2)
    first.start(init_source(0, 2, meeting, name="same", init_timeout=2.0))
    second.start(init_source(1, 2, meeting, name="same", init_timeout=2.0))
    texts = []
    for puppet in (first, second):
        with pytest.raises(PuppetError) as caught:
            puppet.result()
        texts.append(caught.value.text)
    assert any("same" in text and "rank" in text for text in texts), texts


def test_equal_ranks_are_refused(make_puppets: Make, meeting: str) -> None:
    first, second, third = make_puppets(3)
    first.start(init_source(0, 3, meeting, init_timeout=2.0))
    second.start(init_source(1, 3, meeting, name="x", init_timeout=2.0))
    third.start(init_source(1, 3, meeting, name="y", init_timeout=2.0))
    texts = []
    for puppet in (first, second, third):
        with pytest.raises(PuppetError) as caught:
            puppet.result()
        texts.append(caught.value.text)
    assert any("give every worker its own name" in text for text in texts), texts


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_all_who_wait_are_told_that_names_clash(
    make_puppets: Make, meeting: str, tcp_meeting: str, scheme: str
) -> None:
    puppets, meeting = make_puppets(4), meeting if scheme == "file" else tcp_meeting
    began = time.monotonic()
    for rank, (puppet, name) in enumerate(zip(puppets, ["a", "b", "c", "a"], strict=True)):
        puppet.start(init_source(rank, 4, meeting, name=name, init_timeout=60.0))
    for puppet in puppets:
        with pytest.raises(PuppetError, match=r"(?s)DuplicateWorker.*is not unique"):
            puppet.result()
    assert time.monotonic() - began < 30
    for rank, (puppet, name) in enumerate(zip(puppets, "abcd", strict=True)):
        puppet.start(init_source(rank, 4, meeting, name=name, init_timeout=20.0))
    for puppet in puppets:  # they may try again at once
        puppet.result()
    _check(list(puppets))


def test_other_world_size_is_refused(make_puppets: Make, meeting: str) -> None:
    first, second = make_puppets(2)
    first.start(init_source(0, 2, meeting, init_timeout=2.0))
    with pytest.raises(PuppetError, match="w1 has world_size=3, but rank 0 has 2"):
        second.do(init_source(1, 3, meeting, init_timeout=2.0))
    with pytest.raises(PuppetError, match="RendezvousFailed"):
        first.result()


@pytest.mark.parametrize(
    ("rank", "world_size", "init_method", "words"),
    [
        (2, 2, "file:///tmp/x", "rank 2 is out of range for world_size=2"),
        (-1, 2, "file:///tmp/x", "rank parameter missing"),
        (70000, None, "file:///tmp/x", "rank must be between"),
        (0, 1, "http://x", "init_method must be"),
        (0, 1, "tcp://localhost", "init_method must be"),
    ],
)
def test_arguments_that_make_no_sense(rank: int, world_size: int | None, init_method: str, words: str) -> None:
    options = rpc.RpcOptions(init_method=init_method, init_timeout=1.0)
    with pytest.raises(ConfigurationError, match=words):
        rpc.init_rpc("a", rank=rank, world_size=world_size, rpc_backend_options=options)


@pytest.mark.parametrize("name", ["", "x" * 200, "a b", "a/b", "a\nb"])
def test_names_that_confuse_are_refused(meeting: str, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?i)name must"):
        rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=rpc.RpcOptions(init_method=meeting))


def test_folder_that_does_not_exist(tmp_path: Any) -> None:
    options = rpc.RpcOptions(init_method=f"file://{tmp_path}/none/store", init_timeout=1.0)
    with pytest.raises((RendezvousFailed, ConfigurationError), match="none/store"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)


def test_second_init_is_refused_and_the_first_lives(meeting: str) -> None:
    options = rpc.RpcOptions(init_method=meeting)
    rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with pytest.raises(ConfigurationError, match=r"already initialized in this process as worker a.*shutdown"):
            rpc.init_rpc("b", rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync("a", os.getpid) == os.getpid()
    finally:
        rpc.shutdown()


def test_what_a_killed_run_left_in_the_file_is_harmless(make_puppets: Make, meeting: str) -> None:
    """The next run gives the names other ranks."""
    old = make_puppets(2)
    _meet(old, meeting)
    for puppet in old:
        puppet.kill()
    first, second = make_puppets(2)
    first.start(init_source(0, 2, meeting, name="w1"))
    second.start(init_source(1, 2, meeting, name="w0"))
    first.result()
    second.result()
    assert first.do("rpc.rpc_sync('w0', h.pid)") == second.pid


@pytest.mark.slow
def test_forty_workers(make_puppets: Make, meeting: str, capsys: pytest.CaptureFixture[str]) -> None:
    puppets = make_puppets(40)
    started = time.monotonic()
    _meet(puppets, meeting, init_timeout=60)
    elapsed = time.monotonic() - started
    assert puppets[7].do("sorted({rpc.rpc_sync(rank, h.pid) for rank in range(40)})") == sorted(p.pid for p in puppets)
    with capsys.disabled():
        print(f"\n40 workers met in {elapsed:.2f} s")
    _shut_down(puppets)


def test_rank_0_restarts(make_puppets: Make, meeting: str) -> None:
    """The others have met already and do not join again; the new rank 0 learns that from them."""
    puppets = make_puppets(3)
    _meet(puppets, meeting)
    puppets[0].kill()
    (again,) = make_puppets(1)
    again.do(init_source(0, 3, meeting))
    assert again.do("rpc.rpc_sync(2, h.pid)") == puppets[2].pid
    assert puppets[1].do("rpc.rpc_sync('w0', h.pid)") == again.pid


def test_a_clock_that_was_set_back_does_not_make_a_restart_older(make_puppets: Make, meeting: str) -> None:
    puppets = make_puppets(2)
    _meet(puppets, meeting)
    assert puppets[0].do("rpc.rpc_sync(1, h.pid)") == puppets[1].pid
    puppets[1].kill()
    (again,) = make_puppets(1)
    again.do("import gradwire.rpc.agent as w\nw.make_incarnation = lambda: 1")
    again.do(init_source(1, 2, meeting))
    assert puppets[0].do("rpc.rpc_sync(1, h.pid)") == again.pid


# -- ranks that are not let in ------------------------------------------------------------------------------------------


@pytest.fixture
def keys() -> Iterator[Callable[[str], str]]:
    """``keys("one")``: the source of `TlsKeys` from an authority of that name."""
    with tempfile.TemporaryDirectory(prefix="gwk-", dir="/tmp") as path:

        def make(authority: str) -> str:
            folder = Path(path) / authority
            if not folder.exists():
                make_keys(folder, ["worker"])
            return f"gradwire.config.TlsKeys.in_folder({str(folder)!r})"

        yield make


def _start_to_meet(puppets: list[Puppet], where: str, options: list[str], init_timeout: float = 120.0) -> None:
    for rank, (puppet, more) in enumerate(zip(puppets, options, strict=True)):
        puppet.do("import gradwire.config; from gradwire.transports.tls import keys_for")
        source = init_source(rank, len(puppets), where, init_timeout=init_timeout)
        puppet.start(source[:-2] + f", {more}))" if more else source)


def _failure(puppet: Puppet) -> PuppetError:
    with pytest.raises(PuppetError) as caught:
        puppet.result(60.0)
    assert puppet.do("rpc._is_current_rpc_agent_set()") is False
    return caught.value


def _fail_to_meet(puppets: list[Puppet], where: str, options: list[str]) -> list[PuppetError]:
    """What each rank raises; none of them may wait for the others."""
    began = time.monotonic()
    _start_to_meet(puppets, where, options)
    errors = [_failure(puppet) for puppet in puppets]
    assert time.monotonic() - began < 30.0
    return errors


@pytest.mark.parametrize(
    ("scheme", "wrong", "reason"),
    [
        ("file", "tls={other}, transports=('tcp',)", "certificate"),
        ("file", "", 'peer has trust="code", this worker trust="data"'),
        ("file", "transports=('tcp',)", "this worker has no keys"),
        ("file", "tls=gradwire.config.TlsKeys.in_folder('/tmp/no such folder'), transports=('tcp',)", "no such folder"),
        ("tcp", "tls={good}, trust='code'", 'peer has trust="code", this worker trust="data"'),
    ],
    ids=["another authority", "no keys", "no keys for tcp", "keys that are missing", "another trust level"],
)
def test_a_rank_that_is_not_let_in_is_named_at_once_on_all_ranks(
    make_puppets: Make, meeting: str, tcp_meeting: str, keys: Callable[[str], str], scheme: str, wrong: str, reason: str
) -> None:
    where = meeting if scheme == "file" else tcp_meeting
    good = f"tls={keys('one')}, transports=('tcp',)" if "tcp" in wrong else f"tls={keys('one')}"
    options = [good, wrong.format(other=keys("other"), good=keys("one")), good]
    for rank, error in enumerate(_fail_to_meet(make_puppets(3), where, options)):
        assert re.search(r"rank 1 \(w1\)", error.text) or rank == 1, error
        assert re.search(reason, error.text), error
        assert error.kind in ("RendezvousFailed", "ConfigurationError")


@pytest.mark.parametrize(
    ("wrong", "init_timeout", "reason", "refusal"),
    [
        ("tls={other}", 2.5, "rank 1 cannot join: .*certificate", "127.0.0.1: .*the same cluster authority"),
        (
            "",
            6.0,
            "rank 0 serves the meeting point .* with TLS, but rank 1 has no keys",
            "127.0.0.1: TLS 1.3 handshake failed",
        ),
        ("tls=gradwire.config.TlsKeys.in_folder('/tmp/no such folder')", 1.0, "no such folder", ""),
    ],
    ids=["another authority", "no keys", "keys that are missing"],
)
def test_a_rank_without_the_keys_of_a_secure_meeting_is_told_at_once(
    make_puppets: Make,
    tcp_meeting: str,
    keys: Callable[[str], str],
    wrong: str,
    init_timeout: float,
    reason: str,
    refusal: str,
) -> None:
    """It is a stranger to the others: what it does must not end their meeting, so they wait, and say who was refused."""
    puppets, good = make_puppets(2), f"tls={keys('one')}"
    _start_to_meet(puppets, tcp_meeting, [good, wrong.format(other=keys("other"))], init_timeout)
    began = time.monotonic()
    error = _failure(puppets[1])
    assert re.search(reason, error.text), error
    assert time.monotonic() - began < init_timeout + 5.0
    error = _failure(puppets[0])
    assert re.search("rank 1 never arrived", error.text), error
    assert not refusal or re.search(f"The meeting point refused these connections: .*{refusal}", error.text), error


def test_a_rank_zero_with_other_keys_is_not_believed(
    make_puppets: Make, tcp_meeting: str, keys: Callable[[str], str]
) -> None:
    puppets = make_puppets(2)
    _start_to_meet(puppets, tcp_meeting, [f"tls={keys('other')}", f"tls={keys('one')}"], init_timeout=2.5)
    assert re.search("rank 1 cannot join: .*certificate", _failure(puppets[1]).text)
    assert re.search("rank 1 never arrived .*the same cluster authority", _failure(puppets[0]).text)


def test_a_rank_with_the_certificate_of_another_is_not_let_in(
    make_puppets: Make, tcp_meeting: str, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys", ["w0", "w1"])
    shown = f"tls=keys_for({str(tmp_path / 'keys')!r}, 'w0')"
    for error in _fail_to_meet(make_puppets(2), tcp_meeting, [shown, shown]):
        assert re.search(r"rank 1 \(w1\) cannot join .* start it with one for its own name", error.text), error


def test_a_rank_with_the_certificate_of_another_is_not_logged_over_and_over(
    make_puppets: Make, meeting: str, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys", ["w0", "w1"])
    puppets, log = make_puppets(2), tmp_path / "log"
    puppets[0].do(f"os.dup2(os.open({str(log)!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)")
    shown = f"tls=keys_for({str(tmp_path / 'keys')!r}, 'w0'), transports=('tcp',)"
    for error in _fail_to_meet(puppets, meeting, [shown, shown]):
        assert re.search(r"rank 1 \(w1\) cannot join .* start it with one for its own name", error.text), error
    assert 1 <= log.read_text().count("w0 refused a connection") <= 4


# -- ends ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh_nursery() -> Iterator[Nursery]:
    made = Nursery(is_fresh=True)
    yield made
    made.close()


@pytest.mark.parametrize("is_graceful", [True, False])
@pytest.mark.parametrize("world_size", [4, None])
def test_programs_that_end_one_after_the_other_print_nothing(
    fresh_nursery: Nursery, tcp_meeting: str, tmp_path: Path, is_graceful: bool, world_size: int | None
) -> None:
    """Rank 0, which serves the store, ends first where it can."""
    puppets = [fresh_nursery.make() for _ in range(4)]
    for rank, puppet in enumerate(puppets):
        puppet.do(f"os.dup2(os.open({str(tmp_path / str(rank))!r}, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)")
        if world_size is None:
            puppet.do(init_source(rank, None, tcp_meeting))
        else:
            puppet.start(init_source(rank, world_size, tcp_meeting))
    for puppet in puppets if world_size is not None else []:
        puppet.result()
    for puppet in puppets:
        assert puppet.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))") == 3
    if is_graceful:
        _shut_down(puppets)
        for puppet in puppets:
            puppet.leave()
    else:
        for rank, puppet in enumerate(puppets):
            if rank:  # a worker that has left is asked for: the store is gone with it
                with pytest.raises(PuppetError, match="WorkerLost"):
                    puppet.do("rpc.rpc_sync('w0', operator.add, args=(1, 2))")
                with pytest.raises(PuppetError, match="UnknownWorker"):
                    puppet.do("rpc.rpc_sync('unknown', operator.add, args=(1, 2))")
            puppet.do("rpc.shutdown(graceful=False)")
            puppet.leave()
    for puppet in puppets:
        puppet.close()
    printed = {rank: (tmp_path / str(rank)).read_text() for rank in range(4)}
    assert not any(printed.values()), printed


_SLOW_JOIN = """
from gradwire.rpc.connection import Connection
send = Connection.reply
def reply(self, request, value):
    if request.function == "~join":
        agent = self.server.agent
        wait_until(lambda: agent.is_closed)
        agent.wait_closed(0.3)  # as if this thread got no processor time
    send(self, request, value)
Connection.reply = reply
"""


def test_a_rank_zero_that_leaves_at_once_has_let_the_others_in(make_puppets: Make, meeting: str) -> None:
    """Its own answer is there before that of the rank which came last is written."""
    puppets = make_puppets(2)
    puppets[0].do("from gradwire.testing import wait_until")
    puppets[0].do(_SLOW_JOIN)
    for rank, puppet in enumerate(puppets):
        puppet.start(f"{init_source(rank, 2, meeting, init_timeout=8.0)}; rpc.shutdown(graceful=False)")
    for puppet in puppets:
        puppet.result(30.0)


def test_a_wrong_device_map_of_one_rank_is_an_error_of_all(make_puppets: Make, meeting: str) -> None:
    puppets = make_puppets(3)
    for maps, words in (
        ({"w2": {"cuda:7": "cpu"}}, "Node w1 has source devices with invalid indices in its device map for w2"),
        ({"w2": {"cpu": "cuda:7"}}, "Node w1 has target devices with invalid indices in its device map for w2"),
        ({"none": {"cpu": "cpu"}}, "Node w1 has invalid target node names in its device maps"),
    ):
        for rank, puppet in enumerate(puppets):
            puppet.start(init_source(rank, 3, meeting, device_maps=maps if rank == 1 else {}))
        for puppet in puppets:
            with pytest.raises(PuppetError, match=words):
                puppet.result()
    _meet(puppets, meeting, device_maps={"w2": {"cpu": "cpu"}})
    _shut_down(puppets)


def test_without_a_world_size_a_worker_checks_its_own_devices(meeting: str) -> None:
    options = rpc.RpcOptions(init_method=meeting, device_maps={"later": {"cuda:7": "cuda:0"}})
    with pytest.raises(ConfigurationError, match="Node a has source devices with invalid indices"):
        rpc.init_rpc("a", rank=0, rpc_backend_options=options)
