"""What the driver of references does once its lock is released, and in which order."""

from __future__ import annotations

import collections
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from gradwire.rpc.agent import Agent
from gradwire.rref import context
from gradwire.rref._messages import Accept
from gradwire.rref.api import create
from gradwire.rref.context import Effects
from gradwire.testing import wait_until


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


def echo(*values: Any) -> tuple[Any, ...]:
    return values


def test_a_call_without_references_enters_no_function_of_this_package(make_agents: Callable[..., list[Agent]]) -> None:
    """Only the clock may: it asks each layer when it has to do something next."""
    folder = str(Path(context.__file__).parent)
    entered: collections.Counter[str] = collections.Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder) and frame.f_code.co_name != "_sweep":
            entered[frame.f_code.co_name] += 1

    before = sys.getprofile()
    threading.setprofile(note)  # for the threads that serve
    try:
        a, _ = make_agents(2)
        assert a.call("b", echo, (1,)) == (1,)  # connects
        wait_until(lambda: context.of(a).statistics().num_messages == 0, 10.0)
        entered.clear()
        sys.setprofile(note)
        a.call("b", echo, ([1, {"a": 2}],))
        a.call("b", torch.add, (torch.ones(2), torch.ones(2)))
        a.call("b", echo, (torch.ones(2), 1))
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    assert not entered


def test_a_creation_that_is_interrupted_leaves_nothing(
    make_agents: Callable[..., list[Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = make_agents(2)
    known = context.of(a)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(a.client, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create(known, "b", echo, (), None, -1.0)
    wait_until(lambda: known.statistics().num_forks == 0, 10.0, "that the reference is gone")
