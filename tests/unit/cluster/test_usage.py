"""What workers report about themselves, and to whom."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import gradwire
from conftest import MakeAgents
from gradwire.cluster.usage import USAGE, CallRates, ask_usage, measure_device, measure_usage, serve_usage
from gradwire.errors import AuthenticationFailed
from gradwire.testing import wait_until

_TIMEOUT_S = 20.0
_gate = threading.Event()


def _wait_for_gate() -> bool:
    return _gate.wait(_TIMEOUT_S)


def test_a_process_without_an_accelerator_computes_on_the_processor() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert measure_device() == ("cpu", None)


def test_calls_in_progress_are_named_with_their_callers(make_agents: MakeAgents) -> None:
    a, b = make_agents(2, num_worker_threads=1)
    serve_usage(b, "a")
    _gate.clear()
    running = a.submit("b", _wait_for_gate)
    queued = a.submit("b", max, (1, 2))
    wait_until(lambda: measure_usage(b).num_queued == 1 or queued.done(), _TIMEOUT_S, "the second call")
    found = ask_usage(a, ["b"], 5.0)["b"]
    first = found.calls[0]
    assert first.function.endswith("_wait_for_gate")
    assert (first.caller, first.phase) == ("a", "run")
    _gate.set()
    running.wait()
    queued.wait()
    wait_until(lambda: ask_usage(a, ["b"], 5.0)["b"].calls == (), _TIMEOUT_S, "the end of the calls")
    wait_until(lambda: ask_usage(a, ["b"], 5.0)["b"].calls_served == 2, _TIMEOUT_S, "that both are counted")


def test_bytes_count_shared_memory_and_connections_that_have_ended(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    value = torch.ones(1 << 20)
    for _ in range(3):  # the first one offers shared memory
        a.call("b", torch.neg, (value,))
    sent, received = a.traffic.by_worker()["b"]
    assert min(sent, received) >= 3 * value.nbytes
    assert b.traffic.by_worker()["a"][0] >= 3 * value.nbytes
    connection = a.peers.by_name["b"].lanes["calls"]
    connection.say_goodbye("a test")
    connection.end(gradwire.errors.ConnectionClosed("a test"))
    wait_until(lambda: "calls" not in a.peers.by_name["b"].lanes, _TIMEOUT_S, "the end of the connection")
    assert a.traffic.by_worker()["b"][0] >= sent
    a.call("b", torch.neg, (value,))
    assert a.traffic.by_worker()["b"][0] >= sent + value.nbytes


def test_only_the_driver_may_ask(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    serve_usage(b, "driver")
    with pytest.raises(AuthenticationFailed, match="only driver may ask what this worker does, not a"):
        a.ask("b", USAGE, (), 5.0).wait()


_CALL = {"function": "f", "caller": "a", "phase": "run", "seconds": float("inf")}
_ENDLESS = [1, None, "cpu", None, 0, 0, 0, 0, [_CALL], []]


@pytest.mark.parametrize("answer", ["many", None, [1], 1.5, [-1, None, "cpu", None, 0, 0, 0, 0, [], []], _ENDLESS])
def test_an_answer_of_another_type_counts_as_none(make_agents: MakeAgents, answer: Any) -> None:
    a, b = make_agents(2)
    b.server.register_control(USAGE, lambda _: answer)
    assert ask_usage(a, ["b"], 5.0) == {}


def test_a_rate_is_that_of_the_last_seconds() -> None:
    rates = CallRates()
    assert rates.rate("w", 1, 10.0, 50, 100.0) == 5.0, "since the start"
    assert rates.rate("w", 1, 11.0, 150, 101.0) == 100.0, "since the look before"
    assert rates.rate("w", 1, 11.1, 150, 101.1) == pytest.approx(100 / 1.1), "not since a look a moment ago"
    assert rates.rate("w", 1, 111.0, 150, 201.0) == 0.0
    assert rates.rate("w", 1, 112.0, 160, 202.0) == 10.0
    assert rates.rate("w", 2, 2.0, 4, 203.0) == 2.0, "another process of that name"
    rates.forget_all_but(["other"])
    assert rates.rate("w", 2, 4.0, 4, 205.0) == 1.0
