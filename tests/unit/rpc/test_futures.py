"""Futures: torch's, with a `wait` that reads, lets signals through and can be cancelled."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import pytest
import torch

from gradwire.errors import RpcError
from gradwire.rpc.futures import CallFuture, InterruptibleFuture
from gradwire.rpc.pending_calls import PendingCall

Ints = InterruptibleFuture[int]


def make_future() -> Ints:
    return InterruptibleFuture()


def test_it_is_a_future_of_torch() -> None:
    first, second = make_future(), make_future()
    first.set_result(1)
    second.set_result(2)
    assert isinstance(first, torch.futures.Future)
    assert torch.futures.wait_all([first, second]) == [1, 2]
    assert torch.futures.collect_all([first]).wait()[0].value() == 1


def test_waiting_for_another_thread() -> None:
    future = make_future()
    timer = threading.Timer(0.05, future.set_result, args=(5,))
    timer.start()
    assert future.wait() == 5
    assert future.done()
    timer.join(10)


def test_an_error_keeps_its_type() -> None:
    future = make_future()
    future.set_exception(KeyError("missing"))
    with pytest.raises(KeyError, match="missing"):
        future.wait()


def test_then_gets_the_completed_future() -> None:
    future = make_future()
    doubled = future.then(lambda done: done.wait() * 2)
    assert isinstance(doubled, InterruptibleFuture)
    assert future.has_callbacks
    future.set_result(21)
    assert doubled.wait() == 42


def test_what_then_raises_is_its_error() -> None:
    future = make_future()
    chained = future.then(lambda done: done.wait() + "x").then(lambda done: done.wait())
    future.set_result(1)
    with pytest.raises(TypeError):
        chained.wait()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_then_callback_that_wants_to_end_the_program_leaves_nobody_waiting(kind: type[BaseException]) -> None:
    def end(_: Ints) -> None:
        raise kind("enough")

    future = make_future()
    derived = future.then(end)
    future.set_result(1)
    assert derived.done()
    with pytest.raises(RpcError, match=f"{kind.__name__}: enough"):
        derived.wait()


def test_then_sees_the_error() -> None:
    future = make_future()

    def recover(done: Ints) -> str:
        try:
            return str(done.wait())
        except ValueError as error:
            return f"recovered from {error}"

    recovered = future.then(recover)
    future.set_exception(ValueError("a"))
    assert recovered.wait() == "recovered from a"


def test_callbacks_run_also_when_it_is_done_already() -> None:
    future, seen = make_future(), []
    future.add_done_callback(lambda done: seen.append(done.wait()))
    future.set_result(1)
    future.add_done_callback(lambda done: seen.append(done is future))
    assert seen == [1, True]


def test_ctrl_c_interrupts_a_wait() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(Interrupted):
            make_future().wait()
        assert time.monotonic() - start < 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Keeper:
    """Ends a call as soon as somebody waits for it."""

    def __init__(self) -> None:
        self.waits: list[PendingCall] = []
        self.answers = iter([True, False])

    def wait(self, call: PendingCall) -> None:
        self.waits.append(call)
        call.future.set_result("answer")

    def cancel(self, call: PendingCall) -> bool:
        return next(self.answers)


def make_call_future(keeper: Keeper) -> CallFuture[str]:
    future: CallFuture[str] = CallFuture(keeper)
    future.call = PendingCall(1, "w", "f", 0.0, float("inf"))
    future.call.future = future
    return future


def test_a_call_future_waits_in_its_own_way() -> None:
    keeper = Keeper()
    future = make_call_future(keeper)
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == "answer"
    assert future.wait() == "answer"
    assert keeper.waits == [future.call]


def test_cancelling_asks_the_caller_s_agent() -> None:
    future = make_call_future(Keeper())
    assert future.cancel()
    assert not future.cancel()


def test_a_call_that_was_never_made_cannot_be_cancelled() -> None:
    assert not CallFuture(Keeper()).cancel()
