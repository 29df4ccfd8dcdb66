"""Service threads, tasks and the clock."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gradwire.rpc.reactor import Reactor, busy
from gradwire.testing import wait_until


def never(now: float) -> float:
    return float("inf")


class Pipe:
    """Something to watch."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()

    def write(self) -> None:
        os.write(self.write_end, b"x")

    def read(self) -> None:
        os.read(self.read_end, 1)

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self.write_end)


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("w", 2, never)
    reactor.start()
    yield reactor
    reactor.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def gradwire_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire-w-")]


def test_threads_have_names_and_end(pipe: Pipe) -> None:
    reactor = Reactor("w", 2, never)
    assert gradwire_threads() == []
    reactor.start()
    assert sorted(gradwire_threads()) == ["gradwire-w-clock", "gradwire-w-service-1", "gradwire-w-service-2"]
    reactor.close()
    reactor.close()
    assert gradwire_threads() == []
    assert reactor.num_threads == 0


def test_a_reactor_that_never_started_can_be_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    reactor = Reactor("w", 2, never)
    assert len(os.listdir("/proc/self/fd")) > before
    reactor.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_handler_runs_once_for_each_arming(reactor: Reactor, pipe: Pipe) -> None:
    names: list[str] = []
    reactor.add(pipe.read_end, lambda: names.append(threading.current_thread().name), armed=True)
    pipe.write()
    wait_until(lambda: names, 10, "the handler runs")
    done: list[int] = []
    reactor.run_soon(lambda: done.append(1))  # behind any further event of the pipe
    wait_until(lambda: done, 10)
    assert len(names) == 1  # the byte is still there, but nobody armed it again
    reactor.arm(pipe.read_end)
    wait_until(lambda: len(names) == 2, 10, "the handler runs again")
    assert all(name.startswith("gradwire-w-service-") for name in names)


def test_what_is_not_armed_or_was_removed_is_left_alone(reactor: Reactor, pipe: Pipe) -> None:
    seen: list[int] = []
    reactor.add(pipe.read_end, lambda: seen.append(1), armed=False)
    pipe.write()
    run_tasks(reactor, 3)
    assert seen == []
    reactor.arm(pipe.read_end)
    wait_until(lambda: seen, 10)
    reactor.disarm(pipe.read_end)
    reactor.remove(pipe.read_end)
    reactor.remove(pipe.read_end)
    reactor.arm(pipe.read_end)  # too late, and harmless
    run_tasks(reactor, 3)
    assert seen == [1]


def run_tasks(reactor: Reactor, num_tasks: int) -> None:
    done: list[int] = []
    for _ in range(num_tasks):
        reactor.run_soon(lambda: done.append(1))
    wait_until(lambda: len(done) == num_tasks, 10, "the tasks run")


def test_every_task_runs(reactor: Reactor) -> None:
    run_tasks(reactor, 500)
    assert reactor.num_threads >= 2


def test_blocked_threads_are_replaced_and_the_number_shrinks_back(reactor: Reactor) -> None:
    release, blocked = threading.Event(), threading.Semaphore(0)

    def block() -> None:
        blocked.release()
        release.wait(20)

    for _ in range(20):
        reactor.run_soon(block)
    for _ in range(20):
        assert blocked.acquire(timeout=10)  # all of them run at once
    run_tasks(reactor, 1)  # and somebody is left
    assert reactor.num_threads >= 21
    release.set()
    wait_until(lambda: reactor.num_threads <= 3, 10, "the number of threads shrinks")
    wait_until(lambda: len(gradwire_threads()) <= 4, 10, "the threads end")
    run_tasks(reactor, 10)


def test_a_handler_that_raises_ends_no_thread(reactor: Reactor, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise SystemExit("not a way to end a thread")

    with caplog.at_level(logging.ERROR, "gradwire"):
        for _ in range(5):
            reactor.run_soon(fail)
        run_tasks(reactor, 5)
        wait_until(lambda: len(caplog.records) == 5, 10)
    assert {(item.getMessage(), getattr(item, "worker", "")) for item in caplog.records} == {
        ("a handler failed; please report this", "w")
    }
    assert reactor.num_threads >= 2


def test_service_threads_know_their_reactor(reactor: Reactor) -> None:
    other = Reactor("other", 2, never)
    seen: list[tuple[bool, bool]] = []
    reactor.run_soon(lambda: seen.append((reactor.is_service_thread(), other.is_service_thread())))
    wait_until(lambda: seen, 10)
    assert seen == [(True, False)]
    assert not reactor.is_service_thread()
    other.close()


def test_closing_from_a_service_thread(reactor: Reactor) -> None:
    closed = threading.Event()

    def close() -> None:
        reactor.close()
        closed.set()

    reactor.run_soon(close)
    assert closed.wait(10)
    wait_until(lambda: not gradwire_threads(), 10, "the closing thread ends, too")


def test_after_the_end_nothing_is_written_to_a_descriptor_of_others() -> None:
    reactor = Reactor("w", 2, never)
    reactor.start()
    reactor.close()
    pipes = [Pipe() for _ in range(8)]  # they take the numbers that have become free
    reactor.run_soon(lambda: None)
    for pipe in pipes:
        os.set_blocking(pipe.read_end, False)
        with pytest.raises(BlockingIOError):
            os.read(pipe.read_end, 8)
        pipe.close()


# -- the clock -------------------------------------------------------------------------------------------------------


class Sweeps:
    """Notes when the sweep was called; asks for the next one as it is told."""

    def __init__(self, wanted: Callable[[float], float] = never) -> None:
        self.times: list[float] = []
        self._wanted = wanted

    def __call__(self, now: float) -> float:
        self.times.append(now)
        return self._wanted(now)


def test_the_sweep_comes_when_it_is_expected() -> None:
    wanted: list[float] = []
    sweeps = Sweeps(lambda now: next((when for when in wanted if when > now), float("inf")))
    reactor = Reactor("w", 2, sweeps)
    reactor.start()
    assert sweeps.times == []
    when = time.monotonic() + 0.5
    wanted.append(when)
    reactor.expect(when)
    wait_until(lambda: sweeps.times and sweeps.times[-1] >= when, 10, "the sweep at its time")
    assert sweeps.times[0] < when  # the first one only found out when the next is wanted
    reactor.close()


def test_no_expectation_is_lost() -> None:
    """Threads that expect a sweep while one is going on are not overlooked."""
    lock, due = threading.Lock(), []

    def sweep(now: float) -> float:
        with lock:
            due[:] = [when for when in due if when > now]
            return min(due, default=float("inf"))

    reactor = Reactor("w", 2, sweep)
    reactor.start()
    for _ in range(300):
        when = time.monotonic() + 0.0005
        with lock:
            due.append(when)
        reactor.expect(when)
    wait_until(lambda: not due, 10, "every expectation is met")
    assert due == []
    reactor.close()


def test_a_sweep_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def fail(now: float) -> float:
        raise KeyError("broken")

    sweeps = Sweeps(fail)
    reactor = Reactor("w", 2, sweeps)
    with caplog.at_level(logging.ERROR, "gradwire"):
        reactor.start()
        reactor.expect(time.monotonic())
        wait_until(lambda: len(sweeps.times) >= 2, 10, "the sweep is tried again")
        reactor.close()
    assert "the deadline sweep failed" in caplog.text


class Stuck:
    """Something that is busy until it has been looked after often enough."""

    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.is_stuck = False
        self.looks: list[float] = []

    @property
    def num_looks(self) -> int:
        return len(self.looks)

    def take_over_if_stuck(self, before: float) -> bool:
        assert before < time.monotonic()
        self.looks.append(time.monotonic())
        return self.is_stuck

    def shortest_pause_s(self, num_looks: int) -> float:
        """Of so many looks from now on."""
        began = len(self.looks)
        wait_until(lambda: len(self.looks) > began + num_looks, 10, "the clock looks")
        looks = self.looks[began:]
        return min(later - sooner for sooner, later in itertools.pairwise(looks))


def test_the_clock_looks_after_what_is_busy_and_sleeps_otherwise(reactor: Reactor) -> None:
    stuck = Stuck(reactor)
    busy.add(stuck)
    reactor.clock.wake()
    assert reactor.busy_readers() == [stuck]
    wait_until(lambda: stuck.num_looks >= 3, 10, "the clock looks")
    busy.discard(stuck)
    assert reactor.busy_readers() == []
    wait_until(lambda: not reactor.clock.is_awake, 10, "the clock falls asleep")
    looks = stuck.num_looks
    busy.add(stuck)
    reactor.clock.wake()
    wait_until(lambda: stuck.num_looks > looks, 10, "the clock wakes up")
    busy.discard(stuck)


def test_the_clock_looks_seldom_while_no_reader_is_stuck(reactor: Reactor) -> None:
    """Being woken costs as much as a small call, in every process that serves one."""
    short = Stuck(reactor)
    busy.add(short)
    reactor.clock.wake()
    wait_until(lambda: short.num_looks >= 5, 10, "the clock has looked")
    assert short.shortest_pause_s(3) > 0.014
    short.is_stuck = True
    wait_until(lambda: short.shortest_pause_s(1) < 0.01, 10, "it looks often where readers get stuck")
    busy.discard(short)


def test_the_late_end_of_a_descriptor_leaves_the_next_one_of_its_number_alone(reactor: Reactor, pipe: Pipe) -> None:
    """One thread forgets a descriptor that is closed already, while another one adds what has its number by now."""

    def handler() -> None:
        raise AssertionError("nothing was written")

    def add() -> None:
        reactor.add(pipe.read_end, handler, armed=True)

    class Slow(dict[int, Callable[[], None]]):
        """Another thread adds the new one as soon as the old one was looked at, if it can."""

        adding: threading.Thread | None = None

        def get(self, key: int, default: object = None) -> object:  # type: ignore[override]
            found = super().get(key, default)
            if self.adding is None:
                self.adding = threading.Thread(target=add, name="gradwire-w-test-adding")
                self.adding.start()
                self.adding.join(0.2)
            return found

    old = lambda: None  # noqa: E731
    reactor._handlers = handlers = Slow({pipe.read_end: old})
    reactor.remove(pipe.read_end, old)
    assert handlers.adding is not None
    handlers.adding.join(20)
    assert handlers[pipe.read_end] is handler
    reactor.remove(pipe.read_end)


# -- closing ------------------------------------------------------------------------------------------------------------


def _threads(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"gradwire-{name}-")]


def test_a_task_that_takes_the_wake_up_call_passes_it_on() -> None:
    """The task runs while `close` rings: its thread has read the event, and the others never see it."""
    reactor = Reactor("swallow", 4, lambda now: float("inf"))
    reactor.start()
    running, go_on = threading.Event(), threading.Event()

    def task() -> None:
        running.set()
        assert go_on.wait(10)

    reactor.run_soon(task)
    assert running.wait(10)
    wake = reactor._wake
    is_first = True

    def wake_in_vain() -> None:
        """The first call is swallowed, as by a thread that reads the event for its task."""
        nonlocal is_first
        if is_first:
            is_first = False
            go_on.set()
        else:
            wake()

    reactor._wake = wake_in_vain  # type: ignore[method-assign]
    reactor.close()
    assert not is_first
    wait_until(lambda: not _threads("swallow"), 20.0, "that no thread is left")
