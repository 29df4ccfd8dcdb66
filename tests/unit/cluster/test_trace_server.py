"""A trace ends on every worker that was asked for it, and a worker's answer harms its own part alone."""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gradwire.cluster import trace as traces
from gradwire.cluster.trace import Trace
from gradwire.cluster.trace_server import (
    END,
    PIECE,
    START,
    STOP,
    Recorded,
    Recording,
    Started,
    TraceServer,
    serve_traces,
)
from gradwire.errors import ConfigurationError
from gradwire.observe import events
from gradwire.observe.recorder import PIECE_EVENTS
from gradwire.rpc import Agent
from gradwire.testing import wait_until

MakeAgents = Callable[..., list[Agent]]


class Members:
    """Workers of a cluster, which can change."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.callbacks: list[Callable[[Any], object]] = []

    def subscribe(self, callback: Callable[[Any], object]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return partial(self._remove, callback)

    def _remove(self, callback: Callable[[Any], object]) -> None:
        if callback in self.callbacks:
            self.callbacks.remove(callback)

    def join(self, name: str) -> None:
        event = types.SimpleNamespace(kind="joined", worker=types.SimpleNamespace(name=name), reason=None)
        for callback in list(self.callbacks):
            callback(event)


@pytest.fixture
def agents(make_agents: MakeAgents) -> Iterator[list[Agent]]:
    """The driver and two workers; all record in this process, so `events.sink` shows whether any of them does."""
    found = make_agents(3)
    for agent in found[1:]:
        serve_traces(agent, "a")
    yield found
    assert events.sink is None
    assert traces._active == {}


def make_trace(agents: list[Agent], path: Path, members: Members | None = None, max_events: int = 1000) -> Trace:
    members = Members(["b", "c"]) if members is None else members
    return Trace(agents[0], lambda: members.names, members.subscribe, [path], profile=False, max_events=max_events)


def is_recorded() -> bool:
    return events.sink is not None


def test_trace_given_up_while_it_starts_ends_on_all_workers(agents: list[Agent], tmp_path: Path) -> None:
    trace = make_trace(agents, tmp_path / "run.json")

    def interrupt(names: object) -> None:
        raise KeyboardInterrupt

    trace._measure_each = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trace.__enter__()
    assert not is_recorded()
    with make_trace(agents, tmp_path / "run.json") as other:
        pass
    assert [item.problem for item in other.workers] == [None, None, None]


def test_trace_interrupted_before_it_is_collected_ends_on_all_workers(agents: list[Agent], tmp_path: Path) -> None:
    trace = make_trace(agents, tmp_path / "run.json")
    trace.__enter__()
    assert is_recorded()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    trace._measure_each = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trace.__exit__()
    assert not is_recorded()
    assert list(tmp_path.iterdir()) == []


def test_worker_that_joins_while_a_trace_ends_does_not_record(agents: list[Agent], tmp_path: Path) -> None:
    members = Members(["b"])
    trace = make_trace(agents, tmp_path / "run.json", members)
    collect = trace._collect

    def join_late(name: str, found: Recorded) -> Any:
        members.join("c")
        return collect(name, found)

    trace._collect = join_late  # type: ignore[method-assign]
    with trace:
        (callback,) = members.callbacks
    assert [item.name for item in trace.workers] == ["a", "b"]
    members.callbacks.append(callback)  # an event that was on its way
    members.join("c")
    assert not is_recorded()


def test_worker_that_joins_records_and_does_not_delay_other_callbacks(agents: list[Agent], tmp_path: Path) -> None:
    members, may_start = Members(["b"]), threading.Event()
    server = TraceServer(agents[2], "a")
    start = server._start

    def start_late(*args: Any) -> Started:
        may_start.wait(30.0)
        return start(*args)

    server._start = start_late  # type: ignore[method-assign]
    server.register()
    trace = make_trace(agents, tmp_path / "run.json", members)
    with trace:
        members.join("c")  # returns, although that worker has not begun
        assert "c" not in trace._started
        may_start.set()
    found = {item.name: item.problem for item in trace.workers}
    assert found == {"a": None, "b": None, "c": None}


def test_worker_that_is_asked_twice_keeps_its_events(agents: list[Agent], tmp_path: Path) -> None:
    """It joined while the trace began: it is among the workers, and an event tells of it."""
    members = Members(["b"])
    with make_trace(agents, tmp_path / "run.json", members) as trace:
        agents[0].call("b", abs, (-1,))
        members.join("b")
    assert "run abs" in (tmp_path / "run.json").read_text()
    assert [(item.name, item.problem) for item in trace.workers] == [("a", None), ("b", None)]


def test_worker_that_closes_stops_recording(make_agents: MakeAgents) -> None:
    driver, worker = make_agents(2)
    serve_traces(worker, "a")
    driver.ask("b", START, (7, 100, False), 10.0).wait()
    assert is_recorded()
    worker.close()
    assert not is_recorded()


def test_end_of_a_trace_that_was_not_stopped(agents: list[Agent]) -> None:
    agents[0].ask("b", START, (7, 100, False), 10.0).wait()
    agents[0].ask("b", END, (6,), 10.0).wait()
    assert is_recorded()
    agents[0].ask("b", END, (7,), 10.0).wait()
    assert not is_recorded()
    with pytest.raises(ConfigurationError, match="trace 7 has ended"):  # a request that was late
        agents[0].ask("b", START, (7, 100, False), 10.0).wait()


def test_worker_that_does_not_tell_its_clock_is_asked_once(agents: list[Agent], tmp_path: Path) -> None:
    trace, asked = make_trace(agents, tmp_path / "run.json"), []

    def ask(name: str) -> Any:
        asked.append(name)
        raise TimeoutError

    trace._ask_clock = ask  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="did not answer"):
        trace._measure("b")
    assert asked == ["b"]


GOOD_EVENT: list[Any] = ["run", "f", 0, 1, 1, "", 0, [], [], 0, "ok", None]


def answer_with(agent: Agent, started: Any, recorded: Any, event: list[Any], asked: list[int]) -> None:
    """Let a worker answer as a compromised one may."""
    piece = msgspec.msgpack.encode([event])
    register = agent.server.register_control
    register(START, lambda source, *_: msgspec.to_builtins(started), int, int, bool)
    register(STOP, lambda source, number: msgspec.to_builtins(recorded), int)
    register(PIECE, lambda source, number, index: asked.append(index) or piece, int, int)  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("pid", "num_pieces", "event"),
    [
        (2**40, 1, GOOD_EVENT),
        (1, 2 * 1000 // PIECE_EVENTS + 3, GOOD_EVENT),
        (1, 1, [*GOOD_EVENT[:9], 2**64 - 1, "ok", None]),
        (1, 1, [*GOOD_EVENT[:3], 2**64 - 1, *GOOD_EVENT[4:]]),
        (1, 1, [*GOOD_EVENT[:4], 2**64 - 1, *GOOD_EVENT[5:]]),
    ],
    ids=["pid", "pieces", "bytes", "time", "thread"],
)
@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_answer_out_of_bounds_is_a_problem_of_that_worker(
    agents: list[Agent], tmp_path: Path, suffix: str, pid: int, num_pieces: int, event: list[Any]
) -> None:
    asked: list[int] = []
    answer_with(agents[2], Started(pid, "host"), Recorded(num_pieces, 0, []), event, asked)
    with make_trace(agents, tmp_path / f"run{suffix}") as trace:
        agents[0].call("b", abs, (-1,))
    found = {item.name: item for item in trace.workers}
    assert found["a"].problem is found["b"].problem is None
    assert found["b"].num_events > 0
    assert found["c"].problem is not None
    assert found["c"].num_events == 0
    assert len(asked) <= 1
    assert (tmp_path / f"run{suffix}").stat().st_size > 100


@pytest.mark.parametrize(("clock_ns", "time_ns"), [(2**62, 0), (0, 2**63 - 1)])
def test_times_far_from_the_clock_can_be_written(
    agents: list[Agent], tmp_path: Path, clock_ns: int, time_ns: int
) -> None:
    event = [*GOOD_EVENT[:2], time_ns, time_ns, *GOOD_EVENT[4:]]
    answer_with(agents[2], Started(1, "host"), Recorded(1, 0, []), event, [])
    agents[2].server.register_control(traces.CLOCK, lambda source: clock_ns)
    with make_trace(agents, tmp_path / "run.pftrace") as trace:
        pass
    assert [(item.name, item.num_events) for item in trace.workers][2] == ("c", 1)


def test_lost_operators_are_a_problem(agents: list[Agent], tmp_path: Path) -> None:
    text = "all operators of torch are missing"
    answer_with(agents[2], Started(1, "host"), Recorded(1, 0, [], text), GOOD_EVENT, [])
    with make_trace(agents, tmp_path / "run.json") as trace:
        pass
    found = {item.name: item for item in trace.workers}
    assert (found["c"].num_events, found["c"].problem) == (1, text)


def test_file_of_another_user_is_not_written_to(agents: list[Agent], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".run.json.{os.getpid()}.unfinished").symlink_to(victim)
    with make_trace(agents, tmp_path / "run.json"):
        pass
    assert victim.read_text() == "precious"
    assert (tmp_path / "run.json").is_file()
    assert not (tmp_path / "run.json").is_symlink()


def test_trace_that_cannot_stop_recording_makes_room_for_the_next(
    agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Recording.close

    def fail(self: Recording) -> None:
        close(self)
        raise RuntimeError("the profiler is broken")

    trace = make_trace(agents, tmp_path / "run.json")
    trace.__enter__()
    monkeypatch.setattr(Recording, "close", fail)
    with pytest.raises(RuntimeError, match="broken"):
        trace.__exit__()
    monkeypatch.undo()
    with make_trace(agents, tmp_path / "run.json") as other:
        with pytest.raises(ConfigurationError, match="already"):
            other.__enter__()
        trace._close()  # again: the other one stays
        with pytest.raises(ConfigurationError, match="already"):
            trace.__enter__()
    wait_until(lambda: not is_recorded())


def test_a_trace_can_be_recorded_again(agents: list[Agent], tmp_path: Path) -> None:
    trace = make_trace(agents, tmp_path / "run.json")
    for _ in range(2):
        with trace:
            agents[0].call("b", abs, (-1,))
        assert [(item.name, item.problem) for item in trace.workers] == [("a", None), ("b", None), ("c", None)]
        assert all(item.num_events > 0 for item in trace.workers[:2])
