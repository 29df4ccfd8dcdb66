"""Futures of calls behave as torch's, and callbacks may make calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import operator
import threading
from typing import Any

import pytest
import torch

from gradwire.errors import CallCancelled, ConfigurationError, RpcTimeout, WaitTimeout
from gradwire.rpc import Agent
from rpc import handlers
from rpc.puppets import wait_until


def test_future_is_torchs(pair: list[Agent]) -> None:
    future = pair[0].submit("b", operator.add, (1, 2))
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == 3
    assert future.done()
    assert future.value() == 3


def test_then_and_done_callbacks(pair: list[Agent]) -> None:
    called: list[Any] = []
    future = pair[0].submit("b", operator.add, (1, 2))
    future.add_done_callback(lambda done: called.append(done.wait()))
    assert future.then(lambda done: done.wait() * 2).then(lambda done: done.wait() + 1).wait() == 7
    assert wait_until(lambda: called == [3])


def test_callbacks_added_after_the_end_run_at_once(pair: list[Agent]) -> None:
    future = pair[0].submit("b", operator.add, (1, 2))
    future.wait()
    assert future.then(lambda done: done.wait() + 1).wait() == 4


def test_wait_all_and_collect_all(pair: list[Agent]) -> None:
    futures = [pair[0].submit("b", operator.mul, (number, 2)) for number in range(10)]
    assert torch.futures.wait_all(futures) == [number * 2 for number in range(10)]
    futures = [pair[0].submit("b", operator.mul, (number, 3)) for number in range(10)]
    collected = torch.futures.collect_all(futures).wait()
    assert [future.wait() for future in collected] == [number * 3 for number in range(10)]


def test_wait_all_raises_what_a_call_raised(pair: list[Agent]) -> None:
    futures = [pair[0].submit("b", handlers.fail, (ValueError, "one of them")), pair[0].submit("b", handlers.echo)]
    with pytest.raises(ValueError, match="one of them"):
        torch.futures.wait_all(futures)


def test_calls_made_while_a_callback_runs_leave_although_it_waits_for_them(pair: list[Agent]) -> None:
    """Calls are held back while somebody handles answers, who sends them together; a callback must not hold them up."""
    is_running, has_answer = threading.Event(), threading.Event()

    def wait_for_the_other(_: Any) -> bool:
        is_running.set()
        return has_answer.wait(10)

    first = pair[0].submit("b", handlers.wait_gate)
    outcome = first.then(wait_for_the_other)
    pair[0].call("b", handlers.open_gate)
    assert is_running.wait(10)
    later = [pair[0].submit("b", operator.add, (number, 2)) for number in range(3)]
    assert wait_until(lambda: all(future.done() for future in later))
    has_answer.set()
    assert outcome.wait() is True
    assert [future.wait() for future in later] == [2, 3, 4]


def test_error_passes_through_then(pair: list[Agent]) -> None:
    future = pair[0].submit("b", handlers.fail, (KeyError, "gone")).then(lambda done: done.wait())
    with pytest.raises(KeyError, match="gone"):
        future.wait()


def test_exception_in_a_callback_is_the_new_futures(pair: list[Agent]) -> None:
    def raise_it(_: Any) -> None:
        raise ZeroDivisionError("in the callback")

    future = pair[0].submit("b", operator.add, (1, 2))
    derived = future.then(raise_it)
    with pytest.raises(ZeroDivisionError, match="in the callback"):
        derived.wait()
    assert future.wait() == 3
    assert pair[0].call("b", operator.add, (2, 2)) == 4


def test_exception_in_a_done_callback_harms_nobody(pair: list[Agent]) -> None:
    def raise_it(_: Any) -> None:
        raise ZeroDivisionError("in the callback")

    future = pair[0].submit("b", operator.add, (1, 2))
    future.add_done_callback(raise_it)
    assert future.wait() == 3
    assert pair[0].call("b", operator.add, (2, 2)) == 4


def test_callback_makes_a_call_to_the_same_worker(pair: list[Agent]) -> None:
    futures = [pair[0].submit("b", operator.add, (number, 1)) for number in range(20)]
    chained = [future.then(lambda done: pair[0].call("b", operator.mul, (done.wait(), 10))) for future in futures]
    assert [future.wait() for future in chained] == [(number + 1) * 10 for number in range(20)]


def test_callback_of_collect_all_makes_a_call_while_somebody_waits(pair: list[Agent]) -> None:
    """The waiting thread reads all answers; the callback of the last one runs in it and needs an answer itself."""
    first = pair[0].submit("b", handlers.wait_gate)
    second = pair[0].submit("b", handlers.wait_gate)
    both = torch.futures.collect_all([first, second])
    chained = both.then(lambda done: pair[0].call("b", operator.add, (len(done.wait()), 1), None, 5.0))
    threading.Timer(0.1, handlers.gate.set).start()
    assert second.wait() is True
    assert chained.wait() == 3


def test_sixteen_threads_call_one_worker(pair: list[Agent]) -> None:
    wrong: list[Any] = []

    def call_often(number: int) -> None:
        results = [pair[0].call("b", operator.add, (number, step)) for step in range(40)]
        wrong.extend(result for step, result in enumerate(results) if result != number + step)

    threads = [threading.Thread(target=call_often, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)
    assert pair[0].is_quiet
    assert wait_until(lambda: pair[1].is_quiet)


def test_two_thousand_calls_under_way(pair: list[Agent]) -> None:
    futures = [pair[0].submit("b", operator.add, (number, 1)) for number in range(2000)]
    assert [future.wait() for future in futures] == list(range(1, 2001))
    assert wait_until(lambda: pair[0].is_quiet and pair[1].is_quiet)


def test_several_threads_wait_for_one_future(pair: list[Agent]) -> None:
    future = pair[0].submit("b", handlers.wait_gate)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    handlers.gate.set()
    for thread in threads:
        thread.join(10)
    assert results == [True] * 4


@pytest.mark.parametrize("is_derived", [False, True])
def test_a_thread_may_stop_waiting_while_the_call_goes_on(pair: list[Agent], is_derived: bool) -> None:
    call = pair[0].submit("b", handlers.wait_gate)
    future = call.then(lambda done: done.wait()) if is_derived else call
    for timeout in (0, 0.05):
        with pytest.raises(WaitTimeout, match="wait again"):
            future.wait(timeout=timeout)
    for wrong in (-1, float("nan")):
        with pytest.raises(ConfigurationError, match="must be None or a number of seconds"):
            future.wait(wrong)
    assert not call.done()
    handlers.gate.set()
    assert future.wait(timeout=10) is True
    assert future.wait(timeout=0) is True


def test_the_end_of_a_wait_is_not_the_end_of_the_call(pair: list[Agent]) -> None:
    future = pair[0].submit("b", handlers.wait_gate, (), None, 0.5)
    with pytest.raises(WaitTimeout, match=r"worker b has not answered the call to .*wait_gate"):
        future.wait(0.01)
    with pytest.raises(RpcTimeout) as caught:
        future.wait(10)
    assert not isinstance(caught.value, WaitTimeout)
    assert caught.value.phase == "run"


def test_a_called_function_that_stops_waiting_goes_on(pair: list[Agent]) -> None:
    assert pair[0].call("b", _wait_a_moment, ("a",)) == "gave up"


def _wait_a_moment(name: str) -> Any:
    try:
        return handlers.agents["b"].submit(name, handlers.wait_gate).wait(0.05)
    except WaitTimeout:
        return "gave up"


def test_coroutines_await_calls_side_by_side(pair: list[Agent]) -> None:
    async def one(number: int) -> Any:
        return await pair[0].submit("b", operator.add, (number, 1))

    async def main() -> tuple[Any, ...]:
        gated = asyncio.ensure_future(pair[0].submit("b", handlers.wait_gate))
        first = await asyncio.gather(*(one(number) for number in range(50)))
        assert not gated.done()
        derived = pair[0].submit("b", operator.add, (1, 2)).then(lambda done: done.wait() * 2)
        with pytest.raises(KeyError, match="gone"):
            await pair[0].submit("b", handlers.fail, (KeyError, "gone"))
        completed = pair[0].submit("b", operator.add, (2, 2))
        completed.wait()
        handlers.gate.set()  # the loop was not blocked by the call that waits for it
        return first, await derived, await completed, await gated

    assert asyncio.run(main()) == (list(range(1, 51)), 6, 4, True)


def test_a_cancelled_coroutine_gives_up_its_call(pair: list[Agent]) -> None:
    futures: list[Any] = []

    async def main() -> None:
        futures.append(pair[0].submit("b", handlers.wait_gate))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(futures[0], 0.05)
        futures.append(pair[0].submit("b", handlers.wait_gate))
        task = asyncio.ensure_future(asyncio.shield(asyncio.ensure_future(futures[1])))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not futures[1].done()
        assert wait_until(futures[0].done)  # another thread gives the call up
        handlers.gate.set()
        assert await futures[1] is True

    asyncio.run(main())
    with pytest.raises(CallCancelled):
        futures[0].wait(10)


def test_a_call_that_ends_after_the_event_loop_was_closed(pair: list[Agent], capfd: pytest.CaptureFixture[str]) -> None:
    loop = asyncio.new_event_loop()
    call = pair[0].submit("b", handlers.wait_gate)
    waiting = call.__await__()

    async def begin() -> None:
        waiting.send(None)

    loop.run_until_complete(begin())
    loop.close()
    handlers.gate.set()
    assert call.wait(10) is True
    assert wait_until(lambda: pair[0].is_quiet)
    assert capfd.readouterr() == ("", ""), "torch prints what a callback raises"


def test_futures_for_code_that_takes_those_of_the_standard_library(pair: list[Agent]) -> None:
    calls = [pair[0].submit("b", operator.add, (number, 1)) for number in range(5)]
    made = [call.as_concurrent() for call in calls]
    assert sorted(future.result(0) for future in concurrent.futures.as_completed(made, timeout=10)) == [1, 2, 3, 4, 5]
    failed = pair[0].submit("b", handlers.fail, (KeyError, "gone")).as_concurrent()
    assert isinstance(failed.exception(10), KeyError)
    late = pair[0].submit("b", handlers.wait_gate).then(lambda done: done.wait()).as_concurrent()
    with pytest.raises(concurrent.futures.TimeoutError):
        late.result(0.01)
    handlers.gate.set()

    async def main() -> Any:
        return await asyncio.wrap_future(late)

    assert asyncio.run(main()) is True


def test_cancelling_a_standard_future_gives_up_the_call(pair: list[Agent]) -> None:
    call = pair[0].submit("b", handlers.wait_gate)
    made = call.as_concurrent()
    assert made.cancel()
    done, _ = concurrent.futures.wait([made], timeout=10)
    assert done == {made}
    with pytest.raises(CallCancelled):
        call.wait(10)
    handlers.gate.set()
    assert wait_until(lambda: pair[0].is_quiet and pair[1].is_quiet)
