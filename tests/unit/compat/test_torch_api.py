"""`wait_all` ends with the first error, whatever order the futures end in."""

from __future__ import annotations

import threading

import pytest
import torch

from gradwire.compat.torch_api import wait_all


def make(count: int) -> list[torch.futures.Future[int]]:
    return [torch.futures.Future() for _ in range(count)]


def test_values_come_in_order() -> None:
    futures = make(3)
    for number in (2, 0, 1):
        futures[number].set_result(number)
    assert wait_all(futures) == [0, 1, 2]
    assert wait_all([]) == []


def test_values_may_come_while_it_waits() -> None:
    futures = make(2)
    thread = threading.Thread(target=lambda: [future.set_result(5) for future in futures], name="gradwire-test-set")
    thread.start()
    assert wait_all(futures) == [5, 5]
    thread.join(10)


def test_an_error_ends_it_although_others_are_not_done() -> None:
    first, second, third = make(3)
    second.set_exception(ValueError("on purpose"))
    with pytest.raises(ValueError, match="on purpose"):
        wait_all([first, second, third])
    assert not first.done()
    third.set_result(1)
    first.set_result(1)  # what comes later disturbs nobody
    assert third.done()
