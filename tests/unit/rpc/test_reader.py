"""Who reads a connection: service threads, callers that wait, and whoever takes over."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradwire.errors import ConnectionClosed, ConnectionLost, DecodeError
from gradwire.rpc import reader as reader_module
from gradwire.rpc.reactor import Reactor
from gradwire.rpc.reader import Reader, Until, current, release_hold, serve_together
from gradwire.testing import wait_until
from gradwire.testing.transports import ANYTHING, call_ids, send_call, write_raw
from gradwire.transports.stream import Channel, StreamConnection, StreamOptions
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Goodbye


class Setting:
    """A reader at one end of a connection, and what it was told."""

    def __init__(self, reactor: Reactor) -> None:
        first, second = socket.socketpair()
        options = StreamOptions()
        self.here = StreamConnection(Channel(first), options, slots=None, label="here")
        self.there = StreamConnection(Channel(second), options, slots=None, label="there")
        self.here.decoder.accept = ANYTHING
        self.seen: list[tuple[int, str]] = []  # which frame, and in which thread
        self.ends: list[Exception] = []
        self.is_wanted = True
        self.unrecorded: set[int] = set()  # frames that nothing may overtake
        self.on_frame: Callable[[int], object] = lambda number: None
        self.reader = Reader(self.here, reactor, self._on_frame, self.ends.append, lambda: self.is_wanted)

    def _on_frame(self, frame: Frame) -> None:
        (number,) = call_ids([frame])
        self.seen.append((number, threading.current_thread().name))
        if number not in self.unrecorded:
            self.reader.allow_take_over()
        self.on_frame(number)

    def send(self, *numbers: int) -> None:
        for number in numbers:
            send_call(self.there, number, b"x" * 10)

    def wait_seen(self, *numbers: int) -> None:
        wait_until(
            lambda: {number for number, _ in self.seen} >= set(numbers), 10, f"frames {numbers}, not {self.seen}"
        )

    @property
    def numbers(self) -> list[int]:
        return [number for number, _ in self.seen]

    def close(self) -> None:
        self.reader.end(ConnectionClosed("the test is over"))
        self.there.close()


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    reactor = Reactor("w", 4, lambda now: float("inf"))
    reactor.start()
    yield reactor
    reactor.close()


@pytest.fixture
def setting(reactor: Reactor) -> Iterator[Setting]:
    setting = Setting(reactor)
    yield setting
    setting.close()


def test_service_threads_read_in_order(setting: Setting) -> None:
    setting.reader.start()
    setting.send(*range(300))
    setting.wait_seen(299)
    assert setting.numbers == list(range(300))
    assert all(name.startswith("gradwire-w-service") for _, name in setting.seen)


def test_when_user_code_blocks_others_read_on(setting: Setting) -> None:
    release = threading.Event()
    setting.on_frame = lambda number: number < 3 and release.wait(20)
    setting.reader.start()
    setting.send(0, 1, 2, 3, 4)
    setting.wait_seen(0, 1, 2, 3, 4)  # three threads are stuck, and still
    assert len({name for number, name in setting.seen if number < 3}) == 3
    release.set()
    setting.send(5)
    setting.wait_seen(5)
    assert sorted(setting.numbers) == [0, 1, 2, 3, 4, 5]


def test_nothing_overtakes_a_frame_before_it_is_recorded(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has taken an answer may lose the interpreter before it knows whose answer it is."""
    looks: list[bool] = []
    seen_meanwhile: list[Any] = []
    look = Reader.take_over_if_stuck

    def take_over_if_stuck(reader: Reader, before: float) -> bool:
        looks.append(look(reader, before))
        return looks[-1]

    def stay(number: int) -> None:
        if number == 0:
            wait_until(lambda: len(looks) > 5, 10, "that the clock has looked")
            seen_meanwhile.append((setting.numbers, list(setting.ends)))

    monkeypatch.setattr(Reader, "take_over_if_stuck", take_over_if_stuck)
    setting.unrecorded, setting.on_frame = {0}, stay
    setting.send(0, 1)
    setting.there.close()
    setting.reader.start()
    wait_until(lambda: setting.ends and seen_meanwhile, 10, "the end is told")
    assert seen_meanwhile == [([0], [])]
    assert setting.numbers == [0, 1]
    assert [type(error) for error in setting.ends] == [ConnectionLost]


def test_what_is_unread_when_a_reply_cannot_be_sent_is_read(setting: Setting) -> None:
    """The last frames of a peer say why it leaves; a reply that was held back for it is too late."""

    def hold_back(number: int) -> None:
        if number == 0:
            setting.here.send(Goodbye("held back"), hold_back=True)
            setting.reader.must_flush = True
            setting.send(1)
            setting.there.close()

    setting.on_frame = hold_back
    setting.reader.start()
    setting.send(0)
    wait_until(lambda: setting.ends, 10, "the end is told")
    assert setting.numbers == [0, 1]
    assert [type(error) for error in setting.ends] == [ConnectionLost]


def test_a_reply_that_cannot_be_sent_does_not_overtake_what_is_unread(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that held a reply back is stuck, so that another one sends it and a third one reads on."""
    flush, has_failed, was_open = setting.here.flush, threading.Event(), []

    def flush_and_tell(deadline: float | None = None) -> None:
        try:
            flush(deadline)
        except ConnectionLost:
            has_failed.set()
            raise

    def handle(number: int) -> None:
        if number == 0:
            setting.here.send(Goodbye("held back"), hold_back=True)
            setting.reader.must_flush = True
        assert has_failed.wait(10)
        if number == 1:
            with pytest.raises(TimeoutError):
                wait_until(lambda: setting.reader.has_ended, 0.2)
            was_open.append(True)

    monkeypatch.setattr(setting.here, "flush", flush_and_tell)
    setting.on_frame, setting.unrecorded = handle, {1}
    setting.send(0, 1)
    setting.there.close()
    setting.reader.start()
    wait_until(lambda: setting.ends, 10, "the end is told")
    assert was_open == [True]
    assert setting.numbers == [0, 1]


def test_a_connection_that_cannot_be_written_to_ends_although_nothing_is_to_be_read(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_REST_S", 0.05)
    setting.reader.start()
    setting.reader.end_when_read(ConnectionLost("no buffer space"))
    assert [str(error) for error in setting.ends] == ["no buffer space"]


def test_the_clock_takes_nothing_from_a_holder_that_went_on(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock sees a holder stuck in a frame; before it acts, the holder has left the frame and reads again."""
    clock_decided, holder_reads, clock_acted, checked = (threading.Event() for _ in range(4))
    take_over, next_frames = Reader._take_over, setting.reader._next_frames

    def take_over_late(reader: Reader, *args: Any) -> None:
        if clock_decided.is_set() or not threading.current_thread().name.endswith("-clock"):
            take_over(reader, *args)
            return
        clock_decided.set()
        holder_reads.wait(10)
        take_over(reader, *args)
        clock_acted.set()

    def read_slowly(num_read: int) -> list[Frame] | None:
        if clock_decided.is_set() and not holder_reads.is_set():
            holder_reads.set()
            checked.wait(10)
        return next_frames(num_read)

    monkeypatch.setattr(Reader, "_take_over", take_over_late)
    monkeypatch.setattr(setting.reader, "_next_frames", read_slowly)
    setting.on_frame = lambda number: number == 0 and clock_decided.wait(10)
    setting.reader.start()
    setting.send(0)
    assert clock_acted.wait(10)
    has_read = setting.reader.read_until(Until(lambda: True), time.monotonic() + 10)
    checked.set()
    assert not has_read, "two threads read one connection"
    setting.send(1)
    setting.wait_seen(0, 1)


def test_a_thread_that_waits_lets_others_read_at_once(setting: Setting) -> None:
    second = threading.Event()

    def on_frame(number: int) -> None:
        if number == 0:
            assert current.holds
            release_hold()
            assert not current.holds
            assert second.wait(20)
        else:
            second.set()

    setting.on_frame = on_frame
    setting.reader.start()
    setting.send(0, 1)
    setting.wait_seen(0, 1)
    assert setting.ends == []


def test_a_waiting_caller_reads_for_itself(setting: Setting) -> None:
    setting.is_wanted = False
    setting.reader.start()
    setting.send(1, 2, 3)
    assert setting.reader.read_until(Until(lambda: 3 in setting.numbers), time.monotonic() + 10)
    assert setting.seen == [(number, threading.current_thread().name) for number in (1, 2, 3)]
    assert not current.holds


# -- several connections in one thread -------------------------------------------------------------------------------


@pytest.fixture
def pair(reactor: Reactor) -> Iterator[list[Setting]]:
    """Two connections that are watched, as those are that other workers have opened."""
    pair = [Setting(reactor), Setting(reactor)]
    for setting in pair:
        setting.reader.start()
    yield pair
    for setting in pair:
        setting.close()


def serve(pair: list[Setting], is_over: Callable[[], object], *, may_run_here: bool = True) -> bool:
    return serve_together([setting.reader for setting in pair], 10, Until(is_over), lambda frame: may_run_here)


def test_one_thread_serves_several_connections(pair: list[Setting], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "take_over_if_stuck", lambda *_: False)  # the machine may stand still for a moment
    own = threading.current_thread().name
    first, second = pair
    first.on_frame = lambda number: second.send(number + 1)
    second.on_frame = lambda number: number < 9 and first.send(number + 1)
    sent: list[None] = []

    def is_over() -> bool:
        if not sent:  # both connections are held by now
            sent.append(None)
            first.send(0)
        return 9 in second.numbers

    assert serve(pair, is_over)
    assert first.seen == [(number, own) for number in (0, 2, 4, 6, 8)]
    assert second.seen == [(number, own) for number in (1, 3, 5, 7, 9)]
    assert not current.holds
    second.send(10)  # no thread waits: the service threads read again
    second.wait_seen(10)
    assert second.seen[-1][1] != own


@pytest.mark.parametrize("waits_openly", [True, False])
def test_a_thread_that_serves_several_connections_gives_up_all_when_it_is_stuck(
    pair: list[Setting], waits_openly: bool
) -> None:
    """It says so itself before it waits, or the clock notices."""
    first, second = pair
    arrived = threading.Event()
    second.on_frame = lambda number: arrived.set()

    def on_frame(number: int) -> None:
        if waits_openly:
            release_hold()
            if threading.current_thread() is threading.main_thread():  # else that thread may hold the other connection
                assert not second.reader._held
        second.send(1)
        assert arrived.wait(20)

    first.on_frame = on_frame
    first.send(0)
    while not first.seen:  # a service thread may have been quicker
        serve(pair, lambda: first.seen)
    first.wait_seen(0)
    second.wait_seen(1)
    assert second.seen[0][1] != first.seen[0][1]
    first.on_frame = lambda number: None
    first.send(2)
    first.wait_seen(2)
    assert first.ends == second.ends == []


def test_the_end_of_one_connection_leaves_the_others_alone(pair: list[Setting]) -> None:
    first, second = pair
    serve(pair, lambda: first.there.close() or first.ends)
    wait_until(lambda: first.ends, 10, "that the end is noticed")
    second.send(1)
    serve(pair, lambda: 1 in second.numbers)
    second.wait_seen(1)
    assert second.ends == []


def test_what_may_not_run_in_the_thread_that_serves_runs_in_another(pair: list[Setting]) -> None:
    first, second = pair
    sent: list[None] = []

    def is_over() -> bool:
        if not sent:
            sent.append(None)
            first.send(1)
            second.send(2)
        return first.seen and second.seen

    serve(pair, is_over, may_run_here=False)
    first.wait_seen(1)
    second.wait_seen(2)
    assert threading.current_thread().name not in {name for _, name in first.seen + second.seen}


def test_a_waiting_caller_takes_the_reading_from_the_service_threads(setting: Setting) -> None:
    setting.reader.start()  # armed
    sent: list[None] = []

    def is_over() -> bool:
        if not sent:  # the connection is held by now
            sent.append(None)
            setting.send(7)
        return 7 in setting.numbers

    assert setting.reader.read_until(Until(is_over), time.monotonic() + 10)
    assert setting.seen[0][1] == threading.current_thread().name
    setting.send(8)  # nobody waits: the service threads read again
    setting.wait_seen(8)
    assert setting.seen[1][1].startswith("gradwire-w-service")


def test_one_at_a_time(setting: Setting) -> None:
    setting.is_wanted = False
    setting.reader.start()
    inside, release, outcome = threading.Event(), threading.Event(), []

    def on_frame(number: int) -> None:
        inside.set()
        release.wait(20)

    setting.on_frame = on_frame
    caller = threading.Thread(
        target=lambda: outcome.append(
            setting.reader.read_until(Until(lambda: 1 in setting.numbers), time.monotonic() + 10)
        )
    )
    caller.start()
    setting.send(1)
    assert inside.wait(10)
    assert not setting.reader.read_until(Until(lambda: False), time.monotonic() + 10)  # at once: another one reads
    release.set()
    caller.join(10)
    assert outcome == [True]


def test_a_caller_s_deadline(setting: Setting) -> None:
    setting.is_wanted = False
    setting.reader.start()
    for left in (0.05, 0.3):
        start = time.monotonic()
        assert setting.reader.read_until(Until(lambda: False), start + left)
        assert left * 0.9 <= time.monotonic() - start < 5
    assert setting.seen == []


def test_what_a_caller_leaves_is_read_by_others(setting: Setting) -> None:
    """Frames that came with the one the caller waited for are not forgotten."""
    setting.is_wanted = False
    setting.reader.start()
    setting.send(1, 2, 3, 4)
    assert setting.reader.read_until(Until(lambda: bool(setting.seen)), time.monotonic() + 10)
    setting.is_wanted = True
    setting.reader.ensure_watched()
    setting.wait_seen(1, 2, 3, 4)
    assert setting.numbers == [1, 2, 3, 4]


def test_nobody_watches_what_nobody_expects(setting: Setting, reactor: Reactor) -> None:
    setting.is_wanted = False
    setting.reader.start()
    setting.send(1)
    done: list[int] = []
    reactor.run_soon(lambda: done.append(1))
    wait_until(lambda: done, 10)
    assert setting.seen == []
    setting.is_wanted = True
    setting.reader.ensure_watched()
    setting.reader.ensure_watched()
    setting.wait_seen(1)
    assert setting.numbers == [1]


def test_the_end_is_told_once(setting: Setting) -> None:
    setting.reader.start()
    setting.send(1)
    setting.there.close()
    wait_until(lambda: setting.ends, 10, "the end is told")
    setting.reader.end(ConnectionClosed("again"))
    assert [type(error) for error in setting.ends] == [ConnectionLost]
    assert setting.numbers == [1]
    assert setting.here.is_closed


def test_an_end_that_comes_late_leaves_the_next_owner_of_the_descriptor_alone(
    setting: Setting, reactor: Reactor
) -> None:
    """A message that was cut off has closed the connection, and its number was given away before the reader ends."""
    setting.reader.start()
    number, seen = setting.here.fileno(), threading.Event()
    read_end, write_end = os.pipe()
    setting.is_wanted = False
    setting.here.close()
    os.dup2(read_end, number)
    reactor.add(number, seen.set, armed=True)
    setting.reader.end(ConnectionClosed("a message was interrupted while being sent"))
    os.write(write_end, b"x")
    assert seen.wait(10)
    reactor.remove(number)
    for descriptor in (number, read_end, write_end):
        os.close(descriptor)


def test_the_end_wakes_a_waiting_caller(setting: Setting) -> None:
    setting.reader.start()
    threading.Timer(0.05, setting.reader.end, args=(ConnectionClosed("over"),)).start()
    start = time.monotonic()
    setting.reader.read_until(Until(lambda: False), start + 20)
    assert time.monotonic() - start < 10
    wait_until(lambda: setting.ends, 10)  # the timer's thread may still be about to tell
    assert [str(error) for error in setting.ends] == ["over"]
    assert not setting.reader.read_until(Until(lambda: False), start + 20)


def test_the_other_side_s_end_wakes_a_waiting_caller(setting: Setting) -> None:
    setting.reader.start()
    start = time.monotonic()
    assert setting.reader.read_until(Until(setting.there.close), start + 20)  # the connection is held by then
    assert time.monotonic() - start < 10
    assert [type(error) for error in setting.ends] == [ConnectionLost]


def test_garbage_ends_the_connection(setting: Setting) -> None:
    setting.reader.start()
    write_raw(setting.there, b"this is not a frame, whoever reads it")
    wait_until(lambda: setting.ends, 10)
    assert isinstance(setting.ends[0], DecodeError)
    assert setting.here.is_closed


@pytest.mark.parametrize("kind", [KeyError, SystemExit, KeyboardInterrupt])
def test_a_handler_that_fails_ends_the_connection(
    setting: Setting, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def fail(number: int) -> None:
        raise kind("a bug of ours")

    setting.on_frame = fail
    setting.reader.start()
    with caplog.at_level(logging.ERROR, "gradwire"):
        setting.send(1)
        wait_until(lambda: setting.ends, 10)
    assert "a bug of ours" in str(setting.ends[0])
    assert "please report this" in caplog.text


def test_many_callers_share_one_connection(setting: Setting) -> None:
    """Each waits for its own frame; whoever reads handles the others' frames, too."""
    setting.is_wanted = False
    setting.reader.start()
    num_callers = 8
    arrived = [threading.Event() for _ in range(num_callers)]
    setting.on_frame = lambda number: arrived[number].set()
    done: list[int] = []

    def wait(number: int) -> None:
        deadline = time.monotonic() + 20
        while not arrived[number].is_set() and time.monotonic() < deadline:
            if not setting.reader.read_until(Until(arrived[number].is_set), deadline):
                arrived[number].wait(0.01)
        done.append(number)

    callers = [threading.Thread(target=wait, args=(number,)) for number in range(num_callers)]
    for caller in callers:
        caller.start()
    setting.send(*reversed(range(num_callers)))
    for caller in callers:
        caller.join(20)
    assert sorted(done) == list(range(num_callers))
    assert sorted(setting.numbers) == list(range(num_callers))


def test_after_the_last_answer_nobody_stays(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every further caller would wait for that thread, instead of reading its own answer."""
    waited: list[str] = []
    wait_readable = setting.reader._wait_readable

    def note(timeout_s: float) -> bool:
        waited.append(threading.current_thread().name)
        return wait_readable(timeout_s)

    monkeypatch.setattr(setting.reader, "_wait_readable", note)
    setting.on_frame = lambda number: setattr(setting, "is_wanted", False)
    setting.reader.start()
    setting.send(1)
    setting.wait_seen(1)
    wait_until(lambda: not setting.reader._held, 10, "that the service thread has left")
    assert waited == []
    setting.send(2)
    assert setting.reader.read_until(Until(lambda: 2 in setting.numbers), time.monotonic() + 10)
    assert setting.seen[-1] == (2, threading.current_thread().name)
