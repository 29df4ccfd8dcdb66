"""Anomaly mode crosses workers, and leaves nothing behind in the process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import anomaly_mode as anomalies
from gradwire.autograd.anomaly_mode import AnomalyFound
from gradwire.errors import BackwardFailed
from gradwire.rpc import Agent

MARK = "Traceback of forward call"


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")


def fail_in_backward(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Fails.apply(x * 2)  # type: ignore[no-untyped-call]
    return result


def make_not_a_number(x: torch.Tensor) -> torch.Tensor:
    """The gradient of the root of 0 times 0."""
    return torch.sqrt(x * 0) * 0


@pytest.fixture
def anomaly_mode() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True):
        yield
    assert not torch.is_anomaly_enabled()


def is_on() -> bool:
    return torch.is_anomaly_enabled()


def test_enabled_only_inside() -> None:
    assert not torch.is_anomaly_enabled()
    with anomalies.enabled(), anomalies.enabled():
        assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_enabled()


def test_stays_on_where_the_user_switched_it_on(anomaly_mode: None) -> None:
    with anomalies.enabled():
        assert torch.is_anomaly_enabled()
    assert torch.is_anomaly_enabled()


def test_stays_on_while_any_thread_wants_it() -> None:
    first, second = anomalies.enabled(), anomalies.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.is_anomaly_enabled()
    second.__exit__(None, None, None)
    assert not torch.is_anomaly_enabled()


def test_forward_call_is_part_of_the_error() -> None:
    with anomalies.enabled():
        loss = fail_in_backward(torch.ones(2, requires_grad=True)).sum()
        with pytest.raises(AnomalyFound, match="on purpose") as caught, anomalies.detecting():
            torch.autograd.backward(loss)
    assert MARK in str(caught.value)
    assert "in fail_in_backward" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_errors_without_a_forward_call_stay_themselves() -> None:
    with pytest.raises(KeyError), anomalies.detecting():
        raise KeyError("something else")
    assert not torch.is_anomaly_enabled()


def test_other_warnings_are_not_swallowed() -> None:
    with pytest.warns(UserWarning, match="the user's own"), anomalies.detecting():
        warnings.warn("the user's own", UserWarning, stacklevel=1)


def test_runs_that_overlap_leave_the_warnings_of_the_process_alone() -> None:
    """Whoever came first leaves first: what it found must not come back when the other one leaves."""
    show, filters = warnings.showwarning, list(warnings.filters)
    first, second = anomalies.detecting(), anomalies.detecting()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert warnings.showwarning == show
    assert list(warnings.filters) == filters
    with pytest.warns(UserWarning, match="still shown"):
        warnings.warn("still shown", UserWarning, stacklevel=1)


def test_each_thread_gets_its_own_forward_call() -> None:
    barrier = threading.Barrier(2)
    found: dict[str, str] = {}

    def run(name: str, function: Any) -> None:
        with anomalies.enabled():
            loss = function(torch.ones(2, requires_grad=True)).sum()
            try:
                with anomalies.detecting():
                    barrier.wait(10)
                    torch.autograd.backward(loss)
            except RuntimeError as error:
                found[name] = str(error)

    functions = {"raises": fail_in_backward, "is not a number": make_not_a_number}
    threads = [threading.Thread(target=run, args=item, name=item[0]) for item in functions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert "on purpose" in found["raises"]
    assert "in fail_in_backward" in found["raises"]
    assert "nan values" in found["is not a number"]
    assert "in make_not_a_number" in found["is not a number"]
    assert all(text.count(MARK) == 1 for text in found.values())


def test_mode_travels_with_the_call(trio: list[Agent], anomaly_mode: None) -> None:
    with gw.autograd.context():
        assert rpc.rpc_sync("b", is_on)
        with torch.autograd.set_detect_anomaly(False):
            assert not rpc.rpc_sync("b", is_on)


@pytest.mark.parametrize(
    ("function", "words"),
    [(fail_in_backward, ["on purpose"]), (make_not_a_number, ["SqrtBackward0", "nan values"])],
    ids=["raises", "not a number"],
)
def test_error_of_another_worker_shows_its_forward_call(
    trio: list[Agent], anomaly_mode: None, function: Any, words: list[str]
) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", function, args=(x,)).sum()
        with pytest.raises(BackwardFailed) as caught:
            ctx.backward(loss, timeout=20)
    assert caught.value.worker == "b"
    assert all(word in str(caught.value) for word in [*words, MARK, f"in {function.__name__}"])


def test_without_the_mode_nothing_is_said_of_the_forward_call(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", fail_in_backward, args=(x,)).sum()
        with pytest.raises(BackwardFailed, match=r"on purpose \(ValueError;") as caught:
            ctx.backward(loss, timeout=20)
    assert MARK not in str(caught.value)
