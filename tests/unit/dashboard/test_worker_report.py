"""What a worker tells the page, and whom; and that it observes nothing when no page is open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from gradwire import autograd, rpc
from gradwire.dashboard import worker_report
from gradwire.dashboard.worker_report import REPORT, STACKS, Reporter, ThreadStacks, WorkerReport, serve_reports
from gradwire.errors import AuthenticationFailed, DecodeError
from gradwire.observe import Event, events
from gradwire.observe.recorder import decode_events
from gradwire.rpc import set_current_agent
from gradwire.rpc.agent import Agent
from gradwire.rref import remote
from gradwire.types import WorkerInfo

MakeAgents = Callable[..., list[Agent]]


@pytest.fixture
def pair(make_agents: MakeAgents) -> Iterator[list[Agent]]:
    """Worker a is the driver of b."""
    a, b = make_agents(2, "inproc", rpc_timeout_s=20.0)
    serve_reports(b, "a")
    set_current_agent(a)
    yield [a, b]
    set_current_agent(None)


def ask(agent: Agent, operation: str, kind: object = msgspec.Raw) -> object:
    return agent.ask("b", operation, (), 5.0, kind).wait()


def report_of_b(a: Agent) -> WorkerReport:
    found = ask(a, REPORT, WorkerReport)
    assert isinstance(found, WorkerReport)
    return found


def events_of_b(a: Agent) -> list[Event]:
    found = report_of_b(a).events
    return decode_events(found, "b") if found else []


def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def test_only_the_driver_may_ask(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, "inproc")
    serve_reports(b, "another")
    for operation in (REPORT, STACKS):
        with pytest.raises(AuthenticationFailed, match="only another may ask what b is doing, not a"):
            ask(a, operation)
    assert events.sink is None


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        [-1, [0, 0, 0, []], [], None, b"", 0],
        [1, [0, 0, 0, []], [], None, b"x" * ((4 << 20) + 1), 0],
        [1, [0, 0, 0, []], [], None, [], 0],
        [1, [0, 0, 0, [["x" * 300, 1]]], [], None, b"", 0],
        [1, [0, 0, 0, [["a\nb", 1]]], [], None, b"", 0],
        [1, [0, 0, 0, []], [[1, 1, 1]] * 33, None, b"", 0],
        [1, [0, 0, 0, []], [], [1, [["b"]] * 257], b"", 0],
    ],
)
def test_answers_beyond_the_bounds_are_refused(make_agents: MakeAgents, answer: object) -> None:
    a, b = make_agents(2, "inproc")
    b.server.register_control(REPORT, lambda source: answer)
    with pytest.raises(DecodeError, match="worker b sent an invalid result"):
        report_of_b(a)


def test_spans_of_calls_are_in_the_next_report(pair: list[Agent]) -> None:
    a, _ = pair
    report_of_b(a)
    assert a.call("b", triple, (torch.ones(2),)).tolist() == [3.0, 3.0]
    spans = events_of_b(a)
    assert {"run", "queue"} <= {item.kind for item in spans}
    (run,) = [item for item in spans if item.kind == "run"]
    assert (run.peer, run.outcome) == ("a", "ok")
    assert run.end_ns >= run.start_ns > 0
    assert "run" not in {item.kind for item in events_of_b(a)}  # told once


def test_more_spans_than_fit_are_counted(pair: list[Agent]) -> None:
    a, _ = pair
    report_of_b(a)
    for number in range(worker_report.MOST_EVENTS + 5):
        events.tell("run", f"f{number}", "b", 1, end_ns=2)
    found = report_of_b(a)
    told = decode_events(found.events, "b")
    assert (len(told), found.num_dropped) == (worker_report.MOST_EVENTS, 5)
    assert told[-1].name == f"f{worker_report.MOST_EVENTS + 4}"


def test_a_worker_stops_observing_when_it_is_no_longer_asked(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(worker_report, "_LEASE_NS", 0)
    report_of_b(a)
    assert events.sink is not None
    events.tell("run", "f", "b", time.monotonic_ns())
    assert events.sink is None


def test_a_closed_worker_stops_observing_with_the_next_event_of_its_process(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(worker_report, "_LEASE_NS", 0)
    report_of_b(a)
    events.tell("run", "f", "a", time.monotonic_ns())  # b itself has no more events
    assert events.sink is None


def test_a_step_is_not_held_up_when_no_page_has_asked_for_long(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(worker_report, "_LEASE_NS", 0)
    reporter = Reporter(a)
    reporter.report()
    with autograd.context():
        rpc.rpc_sync("b", triple, args=(torch.ones(2, requires_grad=True),))
    assert a.extensions["autograd"].observer is None
    assert reporter.report().step is None
    reporter.close()


def test_a_closed_reporter_answers_without_observing(pair: list[Agent]) -> None:
    a, _ = pair
    before_close = list(a.before_close)
    reporter = Reporter(a)
    reporter.report()
    for _ in range(2):
        reporter.close()
        assert reporter.report().events == b""
    assert events.sink is None
    assert a.extensions["autograd"].observer is None
    assert a.before_close == before_close


def test_an_agent_closes_all_reporters_though_they_remove_themselves(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1, "inproc")
    for reporter in [Reporter(a) for _ in range(3)]:
        reporter.report()
    a.close()
    assert events.sink is None


def test_the_graph_of_a_step_is_collected_just_before_its_end(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_report, "_CAPTURE_S", 10.0)
    a, _ = pair
    reporter = Reporter(a)
    assert reporter.report().step is None
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):  # only the first is collected
        with autograd.context() as ctx:
            loss = rpc.rpc_sync("b", triple, args=(x,)).sum()
            autograd.backward(ctx, [loss])
            found = ctx.graph(loss)
    found = reporter.report()
    assert found.step is not None
    first, second = found.step.views
    assert (first.worker, first.num_gradients, second.worker) == ("a", 1, "b")
    assert [(item.message_id, item.operators) for item in first.segments][-1] == (0, ("sum",))
    assert all(item.at_ns > 0 for view in found.step.views for item in (*view.sends, *view.recvs))
    reporter.close()
    assert a.extensions["autograd"].observer is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=WorkerReport) == found


def test_contexts_and_references_are_counted(pair: list[Agent]) -> None:
    a, b = pair
    reporter = Reporter(a)
    held = remote("b", triple, args=(torch.ones(1),))
    held.to_here()
    with autograd.context():
        rpc.rpc_sync("b", triple, args=(torch.ones(2, requires_grad=True),))
        (context,) = reporter.report().contexts
        assert (context.num_messages, context.num_passes) == (2, 0)
        assert report_of_b(a).contexts == ()  # it did not make it
    references = report_of_b(a).references
    assert (references.num_values, references.holders) == (1, (("a", 1),))
    assert b.info == WorkerInfo("b", 1)
    reporter.close()


def test_stacks_show_where_each_thread_is(pair: list[Agent]) -> None:
    a, _ = pair
    is_over = threading.Event()

    def wait_here() -> None:
        is_over.wait(20.0)

    thread = threading.Thread(target=wait_here, name="the thread to find")
    thread.start()
    try:
        found = ask(a, STACKS, ThreadStacks)
    finally:
        is_over.set()
        thread.join()
    assert isinstance(found, tuple)
    (stack,) = [item for item in found if item.name == "the thread to find"]
    assert "wait_here" in [frame.function for frame in stack.frames]
    assert all(frame.line > 0 for frame in stack.frames)
