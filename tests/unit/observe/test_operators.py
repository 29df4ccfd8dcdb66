"""The operators of all threads become events on the clock of the others."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from gradwire._torch import is_profiler_enabled
from gradwire.errors import ConfigurationError
from gradwire.observe import operators
from gradwire.observe.operators import OperatorProfile


def test_operators_of_threads_that_were_there_before() -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait(30)
        (torch.ones(20, 20) @ torch.ones(20, 20)).sum()
        done.set()

    thread = threading.Thread(target=work, name="worker-before")
    thread.start()
    profile = OperatorProfile()
    profile.start()
    began_ns = time.monotonic_ns()
    go.set()
    done.wait(30)
    ended_ns = time.monotonic_ns()
    thread.join(30)
    events, num_dropped = profile.stop("a", 1000)
    assert num_dropped == 0
    (product,) = [event for event in events if event.name == "aten::mm"]
    assert product.thread == thread.native_id
    assert product.worker == "a"
    assert product.kind == "operator"
    assert began_ns - 10**6 < product.start_ns < product.end_ns < ended_ns + 10**6, "a millisecond of tolerance"


def test_number_of_operators_is_bounded() -> None:
    profile = OperatorProfile()
    profile.start()
    for _ in range(20):
        torch.ones(2)
    events, num_dropped = profile.stop("a", 5)
    assert len(events) == 5
    assert num_dropped >= 15


def test_profile_that_is_too_large_says_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_MAX_FILE_BYTES", 100)
    profile = OperatorProfile()
    profile.start()
    torch.ones(2)
    with pytest.raises(ConfigurationError, match=r"all operators of torch are missing: .* at most 100 can be read"):
        profile.stop("a", 5)
    profile.close()
    assert not is_profiler_enabled()


def test_profiler_of_the_program_is_left_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(ConfigurationError, match=r"torch\.profiler is active"):
            OperatorProfile().start()
        torch.ones(2)
    assert any(event.name == "aten::ones" for event in profile.events())
