"""Asking many workers at once."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator

import pytest

from conftest import MakeAgents
from gradwire.errors import RpcTimeout, UnknownWorker
from gradwire.rpc.fanout import ask_all, gather

gate = threading.Event()


def wait_at_gate() -> bool:
    return gate.wait(20)


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    gate.clear()
    yield
    gate.set()


def test_all_answers_by_worker_in_the_order_given(make_agents: MakeAgents) -> None:
    a, *_ = make_agents(3)
    names = ["c", "a", "b"]
    answers = gather(names, lambda name: a.submit(name, operator.add, (name, "!")), timeout_s=10.0)
    assert list(answers.items()) == [("c", "c!"), ("a", "a!"), ("b", "b!")]


def test_an_error_of_one_leaves_the_answers_of_the_others(make_agents: MakeAgents) -> None:
    a, *_ = make_agents(3)
    divisors = {"b": 0, "c": 2, "unknown": 1}
    outcomes = ask_all(divisors, lambda name: a.submit(name, operator.floordiv, (4, divisors[name])))
    assert outcomes["c"].value == 2
    assert outcomes["c"].error is None
    assert isinstance(outcomes["b"].error, ZeroDivisionError)
    assert isinstance(outcomes["unknown"].error, UnknownWorker)
    with pytest.raises(ZeroDivisionError):
        gather(["b", "c"], lambda name: a.submit(name, operator.floordiv, (4, divisors[name])))


def test_one_deadline_counts_for_all_and_late_calls_are_given_up(make_agents: MakeAgents) -> None:
    a, *_ = make_agents(3)
    functions = {"b": wait_at_gate, "c": threading.get_ident}
    outcomes = ask_all(functions, lambda name: a.submit(name, functions[name]), timeout_s=0.2)
    assert outcomes["c"].error is None
    assert isinstance(outcomes["b"].error, RpcTimeout)
    assert "worker b did not answer within 0.2 s" in str(outcomes["b"].error)
    assert a.client.num_pending == 0


def test_control_operations_can_be_asked_for(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3)
    b.server.register_control("number", lambda source: 7)
    c.server.register_control("number", lambda source: "seven")
    outcomes = ask_all(["b", "c"], lambda name: a.ask(name, "number", (), 5.0, int))
    assert outcomes["b"].value == 7
    assert "what c answered to ~number is not valid" in str(outcomes["c"].error)
