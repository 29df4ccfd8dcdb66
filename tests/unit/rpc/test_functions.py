"""What is said about functions that others call."""

from __future__ import annotations

import secrets

import pytest
import torch

from conftest import MakeAgents
from gradwire.errors import CannotSend, ConfigurationError, NotExposed
from gradwire.rpc import functions
from gradwire.rpc.functions import async_execution, expose, exposed_function, exposed_name, is_async_execution


@pytest.fixture(autouse=True)
def _names_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "exposed", dict(functions.exposed))
    monkeypatch.setattr(functions, "_names", dict(functions._names))


def double(number: int) -> int:
    return number * 2


def answer_later(number: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(number + 1)
    return future


def test_a_function_is_exposed_under_its_own_name() -> None:
    assert expose(double) is double
    name = f"{__name__}:double"
    assert exposed_name(double) == name
    assert exposed_function(name) is double


def test_or_under_another() -> None:
    assert expose(name="twice")(double) is double
    assert (exposed_name(double), exposed_function("twice")) == ("twice", double)


def test_a_name_belongs_to_one_function() -> None:
    expose(double, name="taken")
    expose(double, name="taken")
    with pytest.raises(ConfigurationError, match="another function is already exposed as 'taken'"):
        expose(answer_later, name="taken")
    assert exposed_function("taken") is double


def test_a_notebook_cell_may_run_again() -> None:
    def define() -> object:
        def cell() -> int:
            return 1

        return expose(cell)

    first, second = define(), define()
    assert first is not second
    assert exposed_function(exposed_name(second) or "") is second


def test_control_operations_cannot_be_shadowed() -> None:
    with pytest.raises(ConfigurationError, match="~cancel"):
        expose(double, name="~cancel")
    assert exposed_function("~cancel") is None


def test_what_is_not_exposed_has_no_name() -> None:
    assert exposed_name(double) is None
    assert exposed_function("nobody:knows") is None
    assert exposed_name([]) is None  # type: ignore[arg-type]


def test_async_execution_is_a_mark_that_wraps() -> None:
    marked = async_execution(answer_later)
    assert is_async_execution(marked)
    assert not is_async_execution(answer_later)
    assert (marked.__name__, marked.__doc__) == ("answer_later", answer_later.__doc__)
    assert marked(1).wait() == 2


def test_only_exposed_functions_are_called_between_strangers(make_agents: MakeAgents) -> None:
    first, second = make_agents(2, "inproc", trust="data")
    expose(double, name="twice")
    assert first.call("b", double, (4,)) == 8
    assert second.call("a", "twice", (5,)) == 10
    with pytest.raises(CannotSend, match="expose"):
        first.call("b", answer_later, (1,))
    for name in ("os:getcwd", "builtins:eval", f"{__name__}:answer_later", "~cancel", secrets.token_hex(4)):
        with pytest.raises(NotExposed):
            first.call("b", name, ())
