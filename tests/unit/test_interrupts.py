"""Where Ctrl-C is raised: never in the middle of gradwire's code, and always soon after it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from gradwire import _interrupts
from gradwire.testing import wait_until

Action = Callable[[], object]

_namespace: dict[str, Any] = {"__name__": "gradwire.example", "interruptible": _interrupts.interruptible}
exec(
    """
def protected(action):
    return action()

@interruptible
def run_user_code(action):
    return action()

class Finalized:
    def __init__(self, action):
        self.action, self.cycle = action, self

    def __del__(self):
        self.action()
""",
    _namespace,
)
protected: Callable[[Action], Any] = _namespace["protected"]
run_user_code: Callable[[Action], Any] = _namespace["run_user_code"]


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    """Python's own handler, which a shell may have replaced for its background jobs, and ours in its place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    users, _interrupts._users[:] = _interrupts._users[:], []
    _interrupts.install()
    assert signal.getsignal(signal.SIGINT) is _interrupts._on_interrupt
    yield
    assert _interrupts._deferred_since is None
    _interrupts.uninstall()
    _interrupts._users[:] = users
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def run_on(first: Action = lambda: None) -> None:
    """Do something that may defer an interrupt; go on with the program's own code until it is raised there."""
    first()
    threading.Event().wait(20)
    pytest.fail("the interrupt was lost")


# -- where it is raised -------------------------------------------------------------------------------------------------


def test_in_the_program_s_own_code_it_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        press()


def test_in_gradwire_it_waits_until_the_program_goes_on() -> None:
    steps: list[str] = []

    def action() -> None:
        press()
        steps.append("not cut off")

    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(action))
    assert steps == ["not cut off"]


def test_user_code_that_gradwire_runs_is_interrupted_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        protected(lambda: run_user_code(press))


def test_gradwire_called_by_user_code_that_gradwire_runs_is_not() -> None:
    def user_code() -> None:
        protected(press)
        steps.append("not cut off")
        run_on()

    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        protected(lambda: run_user_code(user_code))
    assert steps == ["not cut off"]


def test_a_second_one_while_one_is_deferred_is_raised_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_interrupts, "_retry", lambda *_: None)  # its signal and the second one could arrive as one

    def action() -> None:
        press()
        press()
        pytest.fail("not reached")

    with pytest.raises(KeyboardInterrupt):
        protected(action)


def test_one_alone_is_never_taken_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[FrameType | None] = []
    is_protected = _interrupts._is_protected

    def look(frame: FrameType | None) -> bool:
        looks.append(frame)
        return is_protected(frame)

    monkeypatch.setattr(_interrupts, "_is_protected", look)
    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(lambda: (press(), wait_until(lambda: len(looks) > 5, 20.0, "that it is tried again"))))


def test_no_signal_is_sent_while_one_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may be in a long function of torch; with two signals the second would count as the user's."""
    sent: list[int] = []

    def action() -> None:
        press()
        pause = threading.Event()
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: sent.append(number))  # it does not arrive yet
            wait_until(lambda: sent, 20.0)
            assert not pause.wait(0.05)  # ten more turns
        assert sent == [signal.SIGINT]
        press()  # now it arrives

    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(action))


def test_a_retry_that_comes_too_late_is_dropped() -> None:
    _interrupts._is_retry = True  # sent just before a wait raised the interrupt
    press()
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_retry_that_comes_after_the_last_worker_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent, and has not arrived, when a wait raises the interrupt: Python's handler would raise another one."""
    sent: list[int] = []

    def action() -> None:
        press()
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: sent.append(number))
            wait_until(lambda: sent, 20.0)
            _interrupts.uninstall()
            _interrupts.deliver()

    with pytest.raises(KeyboardInterrupt):
        protected(action)
    assert signal.getsignal(signal.SIGINT) is _interrupts._on_interrupt
    press()  # the retry arrives
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _interrupts.install()  # for the fixture


# -- the waits ----------------------------------------------------------------------------------------------------------


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    _interrupts.acquire(lock, 20)


def wait_for_descriptor() -> None:
    _interrupts.poll(select.poll(), 20_000)


def wait_for_condition() -> None:
    condition = threading.Condition()
    try:
        with condition:
            _interrupts.wait(condition, 20)
    finally:
        assert condition.acquire(blocking=False)


def wait_for_predicate() -> None:
    with (condition := threading.Condition()):
        _interrupts.wait_for(condition, lambda: False, 20)


WAITS = [
    wait_for_lock,
    wait_for_descriptor,
    wait_for_condition,
    wait_for_predicate,
    lambda: _interrupts.wait(threading.Event()),
    lambda: _interrupts.sleep(20),
    lambda: _interrupts.get(queue.SimpleQueue(), 20),
]


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_ended(wait: Action) -> None:
    """Deferred before the wait begins; raised in it, although gradwire's code is waiting."""
    with pytest.raises(KeyboardInterrupt):
        protected(lambda: (press(), wait(), pytest.fail("the interrupt was lost")))


@pytest.mark.parametrize("is_main", [True, False])
def test_a_wait_says_whether_it_was_worth_it(is_main: bool) -> None:
    event, condition, outcomes = threading.Event(), threading.Condition(), []

    def wait() -> None:
        outcomes.extend([_interrupts.wait(event, 0), _interrupts.wait(event, 0.001)])
        with condition:
            outcomes.append(_interrupts.wait_for(condition, event.is_set, 0.001))
            outcomes.append(_interrupts.wait_for(condition, lambda: True, 0))
        event.set()
        outcomes.extend([_interrupts.wait(event, 0), _interrupts.wait(event), _interrupts.wait(event, 1)])

    if is_main:
        wait()
    else:
        run_in_thread(wait)
    assert outcomes == [False, False, False, True, True, True, True]


def test_only_the_main_thread_is_told() -> None:
    def action() -> None:
        press()
        run_in_thread(_interrupts.deliver)
        assert _interrupts._deferred_since is not None

    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(action))


def run_in_thread(action: Action) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="test")
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert errors == []


# -- what may be between the program and the handler --------------------------------------------------------------------


class Finalized:
    """Of the program, as the one in `_namespace` is of gradwire."""

    def __init__(self, action: Action) -> None:
        self.action, self.cycle = action, self

    def __del__(self) -> None:
        self.action()


@pytest.mark.parametrize("make", [_namespace["Finalized"], Finalized], ids=["gradwire", "program"])
def test_a_finalizer_that_the_collector_runs_is_not_cut_off(make: Callable[[Action], object]) -> None:
    """Python would print an exception that is raised in it, and forget it."""
    steps: list[str] = []

    def finalize() -> None:
        press()
        steps.append("finalized")

    make(finalize)
    with pytest.raises(KeyboardInterrupt):
        run_on(gc.collect)
    assert steps == ["finalized"]


def test_a_callback_of_the_collector_is_not_cut_off() -> None:
    """Libraries have such callbacks, which run while a retry is on its way; Python forgets what they raise."""
    steps: list[str] = []

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and not steps:
            press()
            steps.append("not cut off")

    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_on(gc.collect)
    finally:
        gc.callbacks.remove(callback)
    assert steps == ["not cut off"]


def test_frames_of_torch_between_hide_nothing() -> None:
    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda gradient: press())
        x.sum().backward()
        steps.append("backward is over")

    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(backward))
    with pytest.raises(KeyboardInterrupt):
        run_user_code(backward)
    assert steps == ["backward is over"]


def test_a_trace_function_does_not_count_as_the_program() -> None:
    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code is protected.__code__:  # type: ignore[attr-defined]
            press()

    def run_traced() -> None:
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            protected(lambda: results.append(3))
        finally:
            sys.settrace(before)

    results: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run_on(run_traced)
    assert results == [3]


HANDLER_LINES = range(len(inspect.getsourcelines(_interrupts._on_interrupt)[0]))


@pytest.mark.parametrize("run", [protected, run_user_code])
def test_one_that_comes_in_the_handler_itself_is_not_lost(run: Callable[[Action], Any]) -> None:
    """At each line of the handler that is reached: the two lead to one exception or two, and then all is quiet."""
    code, hits = _interrupts._on_interrupt.__code__, 0
    for offset in HANDLER_LINES:
        has_hit = False

        def trace(frame: FrameType, event: str, argument: object, line: int = code.co_firstlineno + offset) -> Any:
            nonlocal has_hit
            if frame.f_code is not code:
                return None
            if event == "line" and frame.f_lineno == line and not has_hit:
                has_hit = True
                press()
            return trace

        def interrupt_handler() -> None:
            before = sys.gettrace()
            try:
                sys.settrace(trace)
                run(press)
            finally:
                sys.settrace(before)
            run_on()

        with contextlib.suppress(KeyboardInterrupt):  # the second one, which may come at any moment from here on
            with pytest.raises(KeyboardInterrupt):
                interrupt_handler()
            wait_until(lambda: _interrupts._deferred_since is None, 20.0, "that the second one is raised")
        hits += has_hit
    assert hits >= 5


def test_the_mark_of_one_function_is_not_that_of_its_decorator() -> None:
    with pytest.raises(TypeError, match=r"apply @interruptible to .*generate before any other decorator"):

        @_interrupts.interruptible
        @contextlib.contextmanager
        def generate() -> Iterator[None]:
            yield


# -- other handlers -----------------------------------------------------------------------------------------------------


def test_notebooks_put_python_s_handler_back_before_each_cell() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _interrupts.ensure_installed()
    assert signal.getsignal(signal.SIGINT) is _interrupts._on_interrupt
    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(press))


def test_what_a_cell_deferred_is_not_raised_in_the_next() -> None:
    protected(lambda: (press(), signal.signal(signal.SIGINT, signal.SIG_IGN)))  # the kernel waits for a cell
    wait_until(lambda: _interrupts._deferred_since is None, 20.0, "that it is given up")
    _interrupts._is_retry = True  # it was sent just when the handler was taken out
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _interrupts.ensure_installed()
    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(press))


def test_a_handler_of_the_program_stays() -> None:
    seen: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, own)
    _interrupts.ensure_installed()
    protected(press)
    _interrupts.uninstall()
    _interrupts.install()
    assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


def test_a_handler_of_the_program_may_call_the_one_before() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    assert callable(before)

    def own(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, own)
    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(press))
    assert set(seen) == {signal.SIGINT}
    assert signal.getsignal(signal.SIGINT) is own


def test_asyncio_ends_with_it() -> None:
    async def main() -> None:
        protected(press)
        await asyncio.sleep(20)
        pytest.fail("the interrupt was lost")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert signal.getsignal(signal.SIGINT) is _interrupts._on_interrupt


# -- installing and removing --------------------------------------------------------------------------------------------


def test_the_last_worker_puts_python_s_handler_back() -> None:
    _interrupts.install()
    _interrupts.uninstall()
    assert signal.getsignal(signal.SIGINT) is _interrupts._on_interrupt
    _interrupts.uninstall()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _interrupts.ensure_installed()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _interrupts.install()


def test_what_is_deferred_when_the_last_worker_closes_is_raised_after_it() -> None:
    steps: list[str] = []

    def close() -> None:
        press()
        _interrupts.uninstall()
        steps.append("closed")

    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(close))
    assert steps == ["closed"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _interrupts.install()


def test_workers_that_open_and_close_in_other_threads() -> None:
    _interrupts.uninstall()
    run_in_thread(_interrupts.install)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _interrupts.ensure_installed()
    assert signal.getsignal(signal.SIGINT) is _interrupts._on_interrupt
    run_in_thread(_interrupts.uninstall)
    with pytest.raises(KeyboardInterrupt):
        run_on(lambda: protected(press))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _interrupts.install()


PROGRAM = f"""
import importlib.util, os, signal, sys, threading

spec = importlib.util.spec_from_file_location("gradwire._interrupts", {_interrupts.__file__!r})
interrupts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupts)
namespace = {{"__name__": "gradwire.example"}}
exec("def protected(action): return action()", namespace)
protected = namespace["protected"]
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupts.install()

def until_deferred():
    print("ready", flush=True)
    while interrupts._deferred_since is None:
        pass
"""
INTERRUPTED = """
def work():
    until_deferred()
    print("not cut off", flush=True)

protected(work)
threading.Event().wait(20)
"""
FORKED = """
def fork():
    until_deferred()
    return os.fork()

if protected(fork) == 0:
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("child", is_default, interrupts._deferred_since, flush=True)
    os._exit(0)
os.wait()
threading.Event().wait(20)
"""


@pytest.mark.parametrize(
    ("rest", "printed"),
    [(INTERRUPTED, "not cut off\n"), (FORKED, "child True None\n")],
    ids=["alone", "with a fork in between"],
)
def test_a_real_signal_to_a_real_process(rest: str, printed: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + rest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert out == printed
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
