"""Which request runs when: slots, and calls that are held back."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeAgents
from gradwire.rpc import client, server
from gradwire.rpc.server import Slots, busyness, parse_busyness
from gradwire.testing import wait_until


def test_as_many_run_as_there_are_slots() -> None:
    slots: Slots[str] = Slots(2)
    assert [slots.on_request(name) for name in "abcd"] == [True, True, False, False]
    assert (slots.num_running, slots.num_queued) == (2, 2)
    assert repr(slots) == "<Slots 2/2 running, 0 waiting, 2 queued>"


def test_whoever_came_first_runs_first() -> None:
    slots: Slots[str] = Slots(1)
    for name in "abc":
        slots.on_request(name)
    assert [slots.on_finished(), slots.on_finished(), slots.on_finished()] == ["b", "c", None]
    assert (slots.num_running, slots.num_queued) == (0, 0)


def test_whoever_waits_lends_the_slot() -> None:
    slots: Slots[str] = Slots(1)
    slots.on_request("a")
    slots.on_request("b")
    assert slots.on_wait() == "b"
    assert (slots.num_running, slots.num_waiting) == (1, 1)
    slots.on_wait_over()
    assert slots.num_running == 2  # for a moment: nobody queues twice
    slots.on_request("c")
    assert slots.on_finished() is None
    assert slots.on_finished() == "c"


def test_what_is_cancelled_in_the_queue_never_runs() -> None:
    slots: Slots[str] = Slots(1)
    for name in "abc":
        slots.on_request(name)
    assert slots.on_cancelled("b")
    assert not slots.on_cancelled("b")
    assert not slots.on_cancelled("a")  # it runs
    assert slots.on_finished() == "c"


def test_a_stall_grants_one_more_at_a_time() -> None:
    slots: Slots[str] = Slots(1)
    assert slots.on_stall() == []
    for name in "abc":
        slots.on_request(name)
    assert [slots.on_stall(), slots.on_stall()] == [["b"], ["c"]]
    assert slots.on_stall() == []  # nobody is queued
    assert slots.num_running == 3


def test_a_worker_that_does_not_serve_yet_holds_the_requests_of_others_back() -> None:
    slots: Slots[str] = Slots(2)
    slots.on_hold()
    assert [slots.on_request(name) for name in "abcd"] == [False] * 4
    assert slots.on_request("own", is_own=True)
    assert (slots.num_running, slots.num_queued, slots.num_held) == (1, 0, 4)
    assert repr(slots) == "<Slots 1/2 running, 0 waiting, 0 queued, 4 held back>"
    assert slots.on_stall() == slots.on_stall() == []
    assert slots.on_cancelled("b")
    assert slots.on_finished() is None
    assert slots.on_serve() == ["a", "c"]
    assert (slots.num_running, slots.num_queued, slots.num_held) == (2, 1, 0)
    assert slots.on_serve() == []
    assert slots.on_finished() == "d"
    assert not slots.on_request("e")
    assert slots.on_finished() == "e"


def test_progress_is_no_stall() -> None:
    slots: Slots[str] = Slots(2)
    for name in "abcdef":
        slots.on_request(name)
    assert slots.on_stall() == []  # the first look
    assert slots.on_finished() == "c"
    assert slots.on_stall() == []  # something has finished since
    assert slots.on_stall() == ["d"]


def test_work_is_no_stall() -> None:
    slots: Slots[str] = Slots(1)
    for name in "abcdef":
        slots.on_request(name)
    assert slots.on_stall() == []  # the first look
    assert [slots.on_stall(), slots.on_stall()] == [["b"], ["c", "d"]]
    assert [slots.on_stall(is_working=True) for _ in range(3)] == [[], [], []]
    assert slots.on_stall() == ["e"]  # they wait again: one at first
    assert slots.num_running == 5


class Model:
    """Drives `Slots` as the server does, and keeps its own books."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.slots: Slots[int] = Slots(limit)
        self.arrived = 0
        self.queued: list[int] = []
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.ended: list[int] = []
        self.num_excess = 0  # functions beyond the limit: granted by stalls, or back from waiting

    def start(self, request: int | None) -> None:
        if request is not None:
            assert request == self.queued[0]
            self.running.append(self.queued.pop(0))

    def on_request(self, pick: int) -> None:
        request, self.arrived = self.arrived, self.arrived + 1
        has_room = len(self.running) < self.limit
        assert self.slots.on_request(request) is has_room
        (self.running if has_room else self.queued).append(request)

    def on_finished(self, pick: int) -> None:
        if self.running:
            self.ended.append(self.running.pop(pick % len(self.running)))
            self.start(self.slots.on_finished())

    def on_wait(self, pick: int) -> None:
        if self.running:
            self.waiting.append(self.running.pop(pick % len(self.running)))
            self.start(self.slots.on_wait())

    def on_wait_over(self, pick: int) -> None:
        if self.waiting:
            self.running.append(self.waiting.pop(pick % len(self.waiting)))
            self.slots.on_wait_over()
            self.num_excess += 1

    def on_cancelled(self, pick: int) -> None:
        if self.arrived:
            request = pick % self.arrived
            was_queued = request in self.queued
            assert self.slots.on_cancelled(request) is was_queued
            if was_queued:
                self.queued.remove(request)
                self.ended.append(request)

    def on_stall(self, pick: int) -> None:
        before = len(self.running)
        for request in self.slots.on_stall():
            self.start(request)
        self.num_excess += len(self.running) - before

    def check(self) -> None:
        known = sorted(self.queued + self.running + self.waiting + self.ended)
        assert known == list(range(self.arrived)), "a request was lost, or runs twice"
        numbers = (self.slots.num_running, self.slots.num_waiting, self.slots.num_queued)
        assert numbers == (len(self.running), len(self.waiting), len(self.queued))
        assert len(self.running) <= self.limit + self.num_excess
        assert not self.queued or len(self.running) >= self.limit, "somebody queues beside a free slot"


EVENTS = ["on_request", "on_finished", "on_wait", "on_wait_over", "on_cancelled", "on_stall"]
STEPS = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 50)), max_size=60)


@settings(deadline=None)  # the machine may be busy
@given(limit=st.integers(1, 4), steps=STEPS)
def test_nothing_is_lost_or_run_twice(limit: int, steps: list[tuple[str, int]]) -> None:
    model = Model(limit)
    for event, pick in steps:
        getattr(model, event)(pick)
        model.check()
    assert len(model.ended) <= model.arrived


@settings(deadline=None)  # the machine may be busy
@given(limit=st.integers(1, 4), steps=STEPS)
def test_without_waiting_and_stalls_the_limit_holds(limit: int, steps: list[tuple[str, int]]) -> None:
    model = Model(limit)
    for event, pick in steps:
        if event in ("on_request", "on_finished", "on_cancelled"):
            getattr(model, event)(pick)
            assert len(model.running) <= limit
            model.check()
    while model.running:
        model.on_finished(0)
    assert sorted(model.ended) == list(range(model.arrived))


@pytest.mark.parametrize("limit", [1, 2])
def test_a_crowd_that_only_waits_is_served_to_the_end(limit: int) -> None:
    model = Model(limit)
    for _ in range(50):
        model.on_request(0)
    while model.running:
        model.on_wait(0)
    assert len(model.waiting) == 50
    while model.waiting:
        model.on_wait_over(0)
        model.on_finished(0)
    model.check()
    assert len(model.ended) == 50


_go_on = threading.Event()


def _compute_until_told() -> None:
    while not _go_on.is_set():  # without waiting: a function that waits gives its slot away after a moment
        sum(range(100))


def _messages(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


def test_a_call_that_is_queued_for_long_is_logged_once_with_its_reason(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "REPORT_INTERVAL_S", 0.0)
    _go_on.clear()
    a, b = make_agents(2, num_worker_threads=1)
    running = a.submit("b", _compute_until_told)
    wait_until(lambda: b.server.slots.num_running == 1, 10.0, "the first call")
    queued = [a.submit("b", function, (1, 2)) for function in (max, min)]
    wait_until(lambda: b.server.slots.num_queued == 2, 10.0, "both calls")
    monkeypatch.setattr(server, "LONG_WAIT_S", 0.2)
    try:
        wait_until(lambda: _messages(caplog, "queued"), 20.0, "the line in the log")
        looks = b.server._next_stall_check
        wait_until(lambda: b.server._next_stall_check > looks + 0.6, 20.0, "further looks")
    finally:
        _go_on.set()
    for call in (running, *queued):
        call.wait()
    (text,) = _messages(caplog, "builtins:max")  # the other one may be logged when it is the oldest
    assert re.match(r"builtins:max, called by a, has been queued for \d+ s \(calls in the queue: 2\): ", text)
    assert re.search(r": 1 function is running \(num_worker_threads=1\): \S*_compute_until_told of a \(\d+ s\); ", text)
    assert text.endswith("; pass a larger num_worker_threads; for a Cluster, `gradwire top` shows the calls")


def test_a_queued_function_that_travels_by_value_is_called_a_call(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "LONG_WAIT_S", 0.2)
    _go_on.clear()
    a, b = make_agents(2, num_worker_threads=1)
    running = a.submit("b", _compute_until_told)
    wait_until(lambda: b.server.slots.num_running == 1, 10.0, "the first call")
    queued = a.submit("b", lambda: 3)
    try:
        wait_until(lambda: _messages(caplog, "queued"), 20.0, "the line in the log")
    finally:
        _go_on.set()
    running.wait()
    assert queued.wait() == 3
    assert re.match(
        r"a call from a has been queued for \d+ s \(calls in the queue: 1\): ", _messages(caplog, "queued")[0]
    )


def test_a_call_to_a_worker_that_does_not_serve_yet_is_logged(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "LONG_WAIT_S", 0.0)
    a, b = make_agents(2)
    b.server.hold_calls()
    call = a.submit("b", max, (1, 2))
    wait_until(lambda: _messages(caplog, "it has to call gradwire.rpc.start_serving()"), 20.0, "the line in the log")
    b.server.start_serving()
    assert call.wait() == 2


def test_a_call_that_is_not_answered_for_long_is_logged_as_information(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "LONG_CALL_S", 0.0)
    a, _ = make_agents(2)
    with caplog.at_level(logging.INFO, "gradwire"):
        _go_on.clear()
        call = a.submit("b", _wait_until_told)
        try:
            wait_until(lambda: _messages(caplog, "has not been answered"), 20.0, "the line in the log")
        finally:
            _go_on.set()
        call.wait()
    (text,) = _messages(caplog, "has not been answered")
    assert "_wait_until_told on worker b" in text


def test_long_calls_of_all_connections_are_logged(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connections are checked in turn, and the first one has the later call."""
    monkeypatch.setattr(client, "_REPORT_INTERVAL_S", 0.0)
    a, _ = make_agents(2)
    with caplog.at_level(logging.INFO, "gradwire"):
        _go_on.clear()
        calls = [a.submit("b", _wait_until_told), a.submit("a", _wait_until_told)]
        monkeypatch.setattr(client, "LONG_CALL_S", 0.0)
        try:
            for name in ("a", "b"):
                wait_until(lambda name=name: _messages(caplog, f"told on worker {name} has not been"), 20.0, "a line")
        finally:
            _go_on.set()
        for call in calls:
            call.wait()
    assert len(_messages(caplog, "has not been answered")) == 2


def _wait_until_told() -> bool:
    return _go_on.wait(20.0)


def test_a_thread_is_busy_while_it_waits_for_a_processor() -> None:
    """Two threads on one processor each run for half of the time; both count as busy for all of it."""
    processor, data = min(os.sched_getaffinity(0)), bytes(1 << 20)
    both_run, found = threading.Barrier(2), []

    def compute() -> None:
        os.sched_setaffinity(threading.get_native_id(), {processor})
        both_run.wait(10.0)
        before, end = busyness(threading.get_native_id()).ticks, time.monotonic() + 0.5
        while time.monotonic() < end:
            hashlib.sha256(data)  # without the interpreter's lock
        found.append(busyness(threading.get_native_id()).ticks - before)

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sum(found) > 75, "hundredths of a second, of 100; processor time alone is at most 50"


def test_a_thread_that_waits_is_not_busy() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=(20.0,))
    thread.start()
    wait_until(lambda: over._cond._waiters, 10.0, "that it waits")  # type: ignore[attr-defined]
    assert thread.native_id is not None
    before, end = busyness(thread.native_id).ticks, time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    assert busyness(thread.native_id).ticks - before <= 1
    over.set()
    thread.join(20.0)


def test_a_thread_that_has_ended_is_not_busy() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join(20.0)
    wait_until(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists(), 20.0, "its end")
    assert thread.native_id is not None
    assert busyness(thread.native_id) == (0, False)


_STAT = b"42 (a) thr\xc3) %s 1 1 1 0 -1 64 11 0 0 0 7 5 0 0 20 0 9 0 100"  # the kernel cuts names within characters


@pytest.mark.parametrize("state", [b"R", b"S"])
def test_a_thread_that_waits_for_a_processor_all_the_time_is_busy(state: bytes) -> None:
    """The kernel adds a wait to its count only when it is over."""
    found = [parse_busyness(_STAT % state, schedstat) for schedstat in (b"40000000 90000000 3\n",) * 2]
    assert found == [(13, state == b"R")] * 2


@pytest.mark.parametrize("schedstat", [b"", b"0 0 0\n", b"1 2\n"])
def test_where_the_kernel_does_not_count_waits_the_time_on_the_processor_counts(schedstat: bytes) -> None:
    assert parse_busyness(_STAT % b"S", schedstat) == (12, False)
