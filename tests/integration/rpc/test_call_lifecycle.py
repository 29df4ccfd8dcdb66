"""What happens around a call: callbacks, memory, threads and slots, refusals, interrupts, notes, lookups in stores."""

from __future__ import annotations

import gc
import operator
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from gradwire import rpc
from gradwire.config import Limits
from gradwire.errors import (
    AlreadyInitialized,
    CannotSend,
    ConfigurationError,
    DecodeError,
    RpcTimeout,
    WorkerLost,
)
from gradwire.rpc import Agent
from gradwire.rpc.connection import LoopbackStream
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.rpc.meeting_point import MeetingPoint
from gradwire.rpc.meeting_store import TorchStore
from gradwire.rpc.reader import Reader
from gradwire.rpc.rendezvous import StoreDirectory
from gradwire.rpc.server import Slots
from gradwire.testing.transports import write_raw
from gradwire.transports.stream import StreamConnection
from rpc import handlers
from rpc.fixtures import MakeAgents
from rpc.puppets import Puppet, wait_until

_crowd_lock = threading.Lock()  # guards _crowd
_crowd = {"now": 0, "most": 0}


def burn(seconds: float) -> None:
    """Uses the processor, and counts how many do at once."""
    with _crowd_lock:
        _crowd["now"] += 1
        _crowd["most"] = max(_crowd["most"], _crowd["now"])
    handlers.hold_gil(seconds)
    with _crowd_lock:
        _crowd["now"] -= 1


def bounce_then(here: str, there: str, depth: int) -> int:
    """Calls back and forth, and waits for what `then` returned."""
    if depth == 0:
        return 0
    inner = handlers.agents[here].submit(there, bounce_then, (there, here, depth - 1))
    return int(inner.then(lambda done: done.wait() + 1).wait())


def switch_grad_off() -> int:
    torch.set_grad_enabled(False)
    return threading.get_ident()


def grad_mode() -> tuple[int, bool]:
    return threading.get_ident(), torch.is_grad_enabled()


@pytest.fixture
def without_gc() -> Iterator[None]:
    """What is freed in the test is freed because nobody refers to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- order -------------------------------------------------------------------------------------------------------------


def test_calls_of_a_worker_to_itself_get_slots_in_their_order(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the service thread that is to run the second is faster than the one for the first."""
    (a,) = make_agents("a", num_worker_threads=1)
    tasks: list[Callable[[], object]] = []
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "on_stall", lambda *args: [])  # none runs beyond the limit
        patch.setattr(a.reactor, "run_soon", tasks.append)
        futures = [a.submit("a", handlers.note, (number,)) for number in range(3)]
        for task in reversed(tasks):
            task()
    for future in futures:
        future.wait()
    assert handlers.seen == [0, 1, 2]


def test_a_call_gets_its_slot_before_another_thread_may_read_the_next(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_agents("a", "b")
    assert a.call("b", operator.add, (1, 2)) == 3  # connects
    (there,) = [item for item in b.server.incoming if item.lane == "calls"]
    found: list[int] = []
    allow_take_over = Reader.allow_take_over

    def look(reader: Reader) -> None:
        if reader is there.reader:
            found.append(b.server.slots.num_running)
        allow_take_over(reader)

    monkeypatch.setattr(Reader, "allow_take_over", look)
    assert a.call("b", operator.add, (1, 2)) == 3
    assert found == [1]


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_callbacks_never_run_in_the_clock(make_agents: MakeAgents) -> None:
    """A call to oneself that times out is ended by the clock, which does not see the callbacks of `collect_all`."""
    (a,) = make_agents("a")
    names: list[str] = []

    def call_again(done: Any) -> str:
        names.append(threading.current_thread().name)
        with pytest.raises(RpcTimeout):  # needs the clock
            a.call("a", handlers.wait_gate, (), None, 0.1)
        return "ended"

    late = a.submit("a", handlers.wait_gate, (), None, 1.0)
    derived = torch.futures.collect_all([late]).then(call_again)
    assert wait_until(lambda: names)
    assert names[0].startswith("gradwire-a-service-")
    assert wait_until(derived.done, 20.0)
    assert derived.wait() == "ended"
    with pytest.raises(RpcTimeout):
        a.call("a", handlers.wait_gate, (), None, 0.1)


def test_waiting_for_a_future_with_a_callback_takes_no_longer(pair: list[Agent]) -> None:
    """The thread that reads the answer leaves the callback to another one, and must not go on reading meanwhile."""
    times = []
    for _ in range(7):
        started = time.monotonic()
        future = pair[0].submit("b", handlers.echo, (1,))
        future.add_done_callback(lambda done: handlers.hold_gil(0.01))
        assert future.wait() == 1
        times.append(time.monotonic() - started)
    assert sorted(times)[1] < 0.1, times  # a busy machine may delay some of them


def test_graceful_shutdown_waits_for_callbacks(pair: list[Agent]) -> None:
    entered, release = threading.Event(), threading.Event()

    def callback(done: Any) -> Any:
        entered.set()
        release.wait(10)
        return pair[0].call("b", handlers.echo, (int(done.wait()) + 6,))

    derived = pair[0].submit("b", handlers.wait_gate).then(callback)
    handlers.gate.set()  # not before: a callback of a future that is done runs in this thread
    assert entered.wait(10)
    leaving = [threading.Thread(target=agent.shutdown) for agent in pair]
    for thread in leaving:
        thread.start()
    was_closed = wait_until(lambda: pair[0].is_closed or pair[1].is_closed, 0.3)
    release.set()
    for thread in leaving:
        thread.join(10)
    assert not was_closed
    assert all(agent.is_closed for agent in pair)
    assert derived.wait() == 7


def test_close_completes_what_no_thread_came_to_complete(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = make_agents("a")
    late = a.submit("a", handlers.wait_gate, (), None, 1.0)
    derived = late.then(lambda done: done.wait())
    assert handlers.entered.acquire(timeout=10)
    with monkeypatch.context() as patch:
        patch.setattr(a.reactor, "_wake", lambda: None)  # service threads do not hear of the callback
        assert wait_until(lambda: a.reactor._tasks)
    handlers.gate.set()
    a.close()
    assert derived.done()  # with the timeout, or with the value if the function was quicker than the end of the worker


def test_then_gives_the_slot_back(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slots, "on_stall", lambda *args: [])  # nobody runs beyond the limit
    a, _b = make_agents("a", "b", num_worker_threads=1)
    assert a.call("b", bounce_then, ("b", "a", 10), None, 5.0) == 10


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("with_callback", [False, True])
@pytest.mark.parametrize("to", ["a", "b"])
def test_results_are_freed_at_once(pair: list[Agent], to: str, with_callback: bool) -> None:
    future = pair[0].submit(to, handlers.echo, (torch.ones(10),))
    if with_callback:
        future.then(lambda done: None).wait()
    refs = [weakref.ref(future), weakref.ref(future.wait())]
    del future
    assert wait_until(lambda: not any(ref() is not None for ref in refs), 20.0), refs


@pytest.mark.usefixtures("without_gc")
def test_arguments_of_a_call_that_failed_are_freed_at_once(pair: list[Agent]) -> None:
    value = torch.ones(3)
    ref = weakref.ref(value)
    with pytest.raises(TypeError) as caught:
        pair[0].call("b", operator.index, (value,))
    del caught, value
    assert wait_until(lambda: ref() is None, 20.0)


# -- threads and slots -------------------------------------------------------------------------------------------------


def test_a_thread_that_cannot_be_started_costs_nothing(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both threads of b wait for a call that a third would have read."""
    a, b = make_agents("a", "b")
    assert a.call("b", handlers.echo, (1,)) == 1
    start, refused = threading.Thread.start, []

    def start_later(thread: threading.Thread) -> None:
        if thread.name.startswith("gradwire-b-service") and len(refused) < 2:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    blocked = [a.submit("b", handlers.wait_gate) for _ in range(4)]
    a.call("b", handlers.open_gate, (), None, 5.0)
    assert [future.wait() for future in blocked] == [True] * 4
    assert len(refused) == 2
    b.close()
    assert b.wait_closed(0)
    assert b.reactor.num_threads == 0


def test_functions_that_compute_stay_within_the_limit(make_agents: MakeAgents) -> None:
    _crowd.update(now=0, most=0)
    a, _b = make_agents("a", "b", num_worker_threads=1)
    futures = [a.submit("b", burn, (0.4,)) for _ in range(5)]
    for future in futures:
        future.wait()
    assert _crowd == {"now": 0, "most": 1}


def test_functions_that_wait_are_passed(make_agents: MakeAgents) -> None:
    a, _b = make_agents("a", "b", num_worker_threads=1)
    futures = [a.submit("b", handlers.wait_gate) for _ in range(3)]
    a.call("b", handlers.open_gate, (), None, 10.0)
    assert [future.wait() for future in futures] == [True] * 3


def test_calls_that_timed_out_leave_room(make_agents: MakeAgents) -> None:
    a, b = make_agents("a", "b", limits=Limits(calls_in_flight=2))
    for _ in range(2):
        with pytest.raises(RpcTimeout) as caught:
            a.call("b", handlers.wait_gate, (), None, 0.5)
        assert caught.value.phase == "run"
    assert b.statistics().num_running == 2
    assert [a.call("b", handlers.echo, (number,), None, 5.0) for number in range(3)] == [0, 1, 2]


def test_grad_mode_is_not_inherited_from_the_last_function(make_agents: MakeAgents) -> None:
    a, _b = make_agents("a", "b", num_worker_threads=1)
    switched = {a.call("b", switch_grad_off) for _ in range(4)}
    seen = [a.call("b", grad_mode) for _ in range(8)]
    assert any(thread in switched for thread, _ in seen), "no thread ran both"
    assert all(is_on for _, is_on in seen)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["a", "b"])
def test_what_cannot_be_sent_harms_no_other_call(pair: list[Agent], to: str) -> None:
    bystander = pair[0].submit("b", handlers.wait_gate)
    assert rpc.rpc_sync(to, handlers.echo, args=(3,), timeout=float("inf")) == 3
    for wrong in (float("nan"), -2.0, float("-inf")):
        with pytest.raises(ConfigurationError, match="timeout"):
            pair[0].call(to, handlers.echo, (), None, wrong)
        with pytest.raises(ConfigurationError, match="timeout"):
            rpc.rpc_async(to, handlers.echo, timeout=wrong)
    with pytest.raises(CannotSend, match="name"):
        pair[0].call(to, "x" * 500)
    assert not bystander.done()
    handlers.gate.set()
    assert bystander.wait() is True


def test_an_infinite_default_timeout_means_none(make_agents: MakeAgents) -> None:
    a, _b = make_agents("a", "b", rpc_timeout_s=float("inf"))
    assert [a.call(to, handlers.echo, (to,)) for to in "ab"] == ["a", "b"]


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_the_caller_is_told_why_its_connection_was_closed(make_agents: MakeAgents, way: str) -> None:
    a, b = make_agents("a", "b", transports=(way,))
    lost: list[str] = []
    a.on_worker_lost(lambda address, reason: lost.append(reason))
    pending = a.submit("b", handlers.wait_gate)
    assert handlers.entered.acquire(timeout=10)
    peer = a.peers.by_name.get("b")
    assert peer is not None
    control = peer.lanes["control"]
    write_raw(peer.lanes["calls"].stream, b"this is not a frame, whoever reads it" * 4)
    with pytest.raises(WorkerLost, match="cannot read the received data"):
        pending.wait()
    assert peer.lanes["control"] is control
    assert a.call("b", handlers.echo, (1,)) == 1
    assert b.call("a", handlers.echo, (2,)) == 2
    assert lost == []


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_tensors_go_to_others_and_to_oneself(pair: list[Agent]) -> None:
    value = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for to in ("a", "b"):
        assert torch.equal(pair[0].call(to, handlers.echo, (value,)).int_repr(), value.int_repr())


def test_what_cannot_travel_is_refused_by_calls_to_oneself_too(pair: list[Agent]) -> None:
    said = []
    for to in ("a", "b"):
        with pytest.raises(CannotSend, match="uint4") as caught:
            pair[0].call(to, handlers.echo, (torch.empty(2, dtype=torch.uint4),))
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_init_twice_and_unknown_backends(pair: list[Agent]) -> None:
    with pytest.raises(AlreadyInitialized, match="already initialized") as caught:
        rpc.init_rpc("again", rank=0, world_size=1)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)
    assert rpc.current_agent() is pair[0]
    rpc.set_current_agent(None)
    with pytest.raises(ConfigurationError, match="NOPE"):
        rpc.init_rpc("w0", backend="NOPE", rank=0, world_size=1)  # type: ignore[arg-type]


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["a", "b"])
def test_ctrl_c_gives_the_call_up(pair: list[Agent], to: str) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        assert handlers.entered.acquire(timeout=10)
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    helper = threading.Thread(target=interrupt)
    try:
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            pair[0].call(to, handlers.wait_gate)
    finally:
        signal.signal(signal.SIGINT, before)
    helper.join(10)
    _check_given_up(pair, to)


@pytest.mark.parametrize("to", ["a", "b"])
def test_ctrl_c_gives_up_a_call_that_has_just_been_sent(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """The signal comes while gradwire's code runs, which ends its work first: the call is given up where it waits."""
    kind = LoopbackStream if to == "a" else StreamConnection
    original = kind.send

    def send(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if "wait_gate" in str(getattr(args[1], "function", "")):
            assert handlers.entered.acquire(timeout=10)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(kind, "send", send)
    with pytest.raises(KeyboardInterrupt):
        pair[0].call(to, handlers.wait_gate)
    _check_given_up(pair, to)


def _check_given_up(pair: list[Agent], to: str) -> None:
    assert wait_until(lambda: pair[0].client.num_pending == 0)
    agent = pair["ab".index(to)]
    sources = [agent.client.loopback] if to == "a" else list(agent.server.incoming)
    calls = lambda: [item for source in sources for item in source.requests.values()]  # noqa: E731
    assert wait_until(lambda: all(request.is_dropped for request in calls()))
    assert pair[0].call(to, handlers.echo, (1,)) == 1


# -- interceptors ------------------------------------------------------------------------------------------------------


class Noting(Interceptor):
    """Attaches its own name to calls, and keeps what it is told with the reply."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[Any] = []

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> Any:
        if envelope.kind == "call":
            return f"from {self.name}"
        self.told.append(envelope.note)
        return None


@pytest.mark.parametrize("to", ["a", "b"])
def test_interceptors_get_their_own_note_back(pair: list[Agent], to: str) -> None:
    for agent in pair:
        agent.interceptors.extend([Noting("first"), Noting("second")])
    assert pair[0].call(to, handlers.echo, (1,)) == 1
    told = [item.told for item in pair["ab".index(to)].interceptors if isinstance(item, Noting)]
    assert told == [["from first"], ["from second"]]


class Size(msgspec.Struct, frozen=True, array_like=True):
    num_tensors: int


class Counting(Interceptor):
    """Attaches a struct of its own, which nobody has made known beforehand."""

    name = "counting"
    note_type = Size

    def __init__(self) -> None:
        self.came: list[Any] = []

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> Any:
        return Size(len(tensors)) if envelope.kind == "call" else ["no size"]

    def incoming(self, envelope: Envelope, note: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        self.came.append(note)
        return tensors


def test_notes_are_checked_against_the_type_of_their_interceptor(pair: list[Agent]) -> None:
    for agent in pair:
        agent.interceptors.append(Counting())
    with pytest.raises(DecodeError, match="not a valid Size"):
        pair[0].call("b", handlers.echo, (torch.ones(2),))  # the reply's is of another kind
    (there,) = [item for item in pair[1].interceptors if isinstance(item, Counting)]
    assert there.came == [Size(1)]


# -- stores ------------------------------------------------------------------------------------------------------------


def _listens_at(pid: int) -> list[str]:
    """Local addresses, in hexadecimal, at which a process accepts TCP connections."""
    inodes = set()
    for item in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(item.readlink()))
        except OSError:  # closed meanwhile
            continue
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().split("\n")
    ]
    return [line[1] for line in lines if len(line) > 9 and line[3] == "0A" and f"socket:[{line[9]}]" in inodes]


def test_a_store_on_loopback_cannot_be_reached_from_elsewhere(
    workers: Callable[..., list[Puppet]], free_port: int
) -> None:
    first, second = workers(2, f"tcp://127.0.0.1:{free_port}")
    assert _listens_at(first.pid) == [f"0100007F:{free_port:04X}"]
    assert _listens_at(second.pid) == []


class _SlowStore:
    """Takes the place of torch's store."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.asked += keys
        self.release.wait(10)
        return False

    def directory(self) -> StoreDirectory:
        store = TorchStore(self, "nowhere", 2.0)
        return StoreDirectory(MeetingPoint(store, "nowhere", "127.0.0.1", 0, 2))


def test_a_store_that_does_not_answer_holds_no_call_up(make_agents: MakeAgents) -> None:
    store = _SlowStore()
    a, b = make_agents("a", "b", directory=store.directory())
    b.close()
    started = time.monotonic()
    try:
        for _ in range(2):  # the second is not asked for: the first is still on its way
            with pytest.raises(WorkerLost):
                a.call("b", handlers.echo, (1,))
        assert time.monotonic() - started < 8.0  # the store holds each question for 10 s
        assert store.asked == ["gradwire/name/b"]
    finally:
        store.release.set()


def test_a_store_is_asked_again_after_a_thread_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = _SlowStore()
    store.release.set()
    directory = store.directory()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert directory.refresh("b") is None
    assert store.asked == []
    assert directory.refresh("b") is None
    assert store.asked == ["gradwire/name/b"]
