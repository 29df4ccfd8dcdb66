"""Values that go along into the threads of torch's engine; `tests/accelerator` has such threads."""

from __future__ import annotations

import threading

from gradwire._torch import Carried


def test_every_thread_has_a_value_of_its_own() -> None:
    value: Carried[int] = Carried("tests.carried.own", 7)
    assert value.set(1) == 7
    assert value.set(2) == 1
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(value.get()))
    thread.start()
    thread.join(10.0)
    assert (value.get(), seen) == (2, [7])


def test_two_values_are_kept_apart() -> None:
    one: Carried[str] = Carried("tests.carried.one", "none")
    other: Carried[str] = Carried("tests.carried.other", "none")
    one.set("here")
    assert (one.get(), other.get()) == ("here", "none")
