"""What the driver of references does once its lock is released, and in which order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from gradwire.rpc.agent import Agent
from gradwire.rref import context
from gradwire.rref._messages import Accept
from gradwire.rref.context import Effects


def test_effects_happen_in_order_when_the_lock_is_released() -> None:
    lock, done = Effects(threading.Lock()), []
    with lock:
        lock.defer(lambda: done.append("first"))
        lock.defer(lambda: done.append("second"))
        assert done == []
    assert done == ["first", "second"]
    with lock:
        pass
    assert done == ["first", "second"]


def test_an_effect_that_fails_keeps_no_other_from_happening(caplog: pytest.LogCaptureFixture) -> None:
    lock, done = Effects(threading.Lock()), []

    def fail() -> None:
        done.append("failed")
        raise ValueError

    with caplog.at_level(logging.ERROR, "gradwire"), lock:
        lock.defer(fail)
        lock.defer(lambda: done.append("later"))
    assert done == ["failed", "later"]
    assert "a callback of a reference failed" in caplog.text


def test_other_threads_do_not_cause_effects_of_what_is_still_being_decided() -> None:
    lock, done, entered = Effects(threading.Lock()), [], threading.Event()

    def use() -> None:
        entered.set()
        with lock:
            pass

    other = threading.Thread(target=use)
    with lock:
        lock.defer(lambda: done.append(threading.current_thread()))
        other.start()
        assert entered.wait(10)
        assert done == []
    other.join()
    assert done == [threading.current_thread()]


def test_an_effect_may_take_the_lock() -> None:
    lock, done = Effects(threading.Lock()), []

    def nested() -> None:
        with lock:
            lock.defer(lambda: done.append("nested"))

    with lock:
        lock.defer(nested)
    assert done == ["nested"]


def test_messages_are_planned_before_callbacks_run(make_agents: Callable[..., list[Agent]]) -> None:
    """A callback may wait for an answer to them."""
    a, b = make_agents(2)
    known, planned = context.of(a), []
    with known._effects:
        known._effects.defer(lambda: planned.append(known._timer._flush_at < float("inf")))
        known._apply([Accept(context.of(b).own, 7)])
    assert planned == [True]
