"""Events reach their subscribers, and nothing is done while there are none."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from gradwire import observe
from gradwire.observe import Event, events


@pytest.fixture
def told() -> Iterator[list[Event]]:
    found: list[Event] = []
    unsubscribe = observe.subscribe(found.append)
    yield found
    unsubscribe()
    assert events.sink is None


def test_nothing_is_observed_without_subscribers() -> None:
    assert events.sink is None
    events.tell("call", "f", "a", 0)


def test_every_subscriber_is_told_until_it_unsubscribes(told: list[Event]) -> None:
    others: list[Event] = []
    unsubscribe = observe.subscribe(others.append)
    again = observe.subscribe(others.append)
    events.tell("call", "f", "a", 5, end_ns=7)
    unsubscribe()
    unsubscribe()
    events.tell("call", "g", "a", 8, end_ns=9)
    again()
    assert [event.name for event in told] == ["f", "g"]
    assert [event.name for event in others] == ["f", "f", "g"]
    assert told[0].duration_s == pytest.approx(2e-9)


def test_subscriber_that_raises_is_not_called_again(told: list[Event], caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fail(event: Event) -> None:
        calls.append(event)
        raise ValueError("broken")

    unsubscribe = observe.subscribe(fail)
    with caplog.at_level(logging.ERROR, "gradwire"):
        events.tell_now("call", "f", "a")
        events.tell_now("call", "g", "a")
    unsubscribe()
    assert len(calls) == 1
    assert len(told) == 2
    assert len([record for record in caplog.records if "is not called again" in record.message]) == 1


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12, because there are threads
def test_forked_process_has_no_subscribers(told: list[Event]) -> None:
    """Another thread may hold the lock of a subscriber, or that of `subscribe`, and does not exist in the child."""
    lock = threading.Lock()

    def store(event: Event) -> None:
        with lock:
            told.append(event)

    unsubscribe = observe.subscribe(store)
    with lock, events._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # ends the child if it hangs
            events.tell_now("call", "f", "a")
            is_silent = events.sink is None and not told
            observe.subscribe(told.append)
            events.tell_now("call", "g", "a")
            os._exit(0 if is_silent and [event.name for event in told] == ["g"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    unsubscribe()


def test_span_tells_its_outcome(told: list[Event]) -> None:
    before = time.monotonic_ns()
    with events.Span("checkpoint", "save", lambda: "a", details=lambda: {"path": "p"}) as span:
        span.num_bytes = 12
    with pytest.raises(KeyError), events.Span("checkpoint", "load", lambda: "a", 3):
        raise KeyError
    first, second = told
    assert (first.kind, first.worker, first.outcome, first.num_bytes) == ("checkpoint", "a", "ok", 12)
    assert first.details == {"path": "p"}
    assert (second.outcome, second.context_id) == ("KeyError", 3)
    assert before <= first.start_ns <= first.end_ns <= second.start_ns


def test_span_that_is_not_observed_asks_for_nothing() -> None:
    asked = []
    with events.Span(
        "checkpoint", "save", lambda: asked.append("worker") or "", 0, lambda: asked.append("details") or {}
    ):  # type: ignore[func-returns-value]
        pass
    assert asked == []


def test_messages_have_ids_of_their_own() -> None:
    """Calls of two workers, or of two lives of one, and the answers to them, are not mixed up."""
    found = set()
    workers = [(rank, 1_790_000_000_000_000_000 + life) for rank in range(8) for life in range(4)]
    for rank, incarnation in workers:
        for call_id in range(1, 200):
            found |= {flow(rank, incarnation, call_id) for flow in (events.call_flow, events.reply_flow)}
    assert len(found) == len(workers) * 199 * 2
    assert all(0 <= flow < 2**64 for flow in found)
    passes = {
        events.gradient_flow(1 << 48 | number, 2 << 48 | message) for number in range(50) for message in range(50)
    }
    assert len(passes) == 2500
    assert not passes & found
