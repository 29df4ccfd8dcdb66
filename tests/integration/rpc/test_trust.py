"""What workers may ask of each other."""

from __future__ import annotations

import functools
import operator
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire.errors import AuthenticationFailed, CannotSend, NotExposed
from gradwire.rpc import Agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.transports.stream import StreamConnection
from gradwire.wire import serialization as objects
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Failure
from rpc import handlers
from rpc.by_hand import connect
from rpc.puppets import Puppet


@pytest.fixture
def wary(make_agents: Any) -> list[Agent]:
    return make_agents("a", "b", trust="data")  # type: ignore[no-any-return]


def test_exposed_function_is_called_by_object_and_by_name(wary: list[Agent]) -> None:
    assert wary[0].call("b", handlers.exposed_add, (1, 2)) == 3
    assert wary[0].call("b", "double", (torch.ones(2),)).tolist() == [2.0, 2.0]
    assert wary[0].call("a", handlers.exposed_double, (4,)) == 8


def test_function_that_is_not_exposed_does_not_leave(wary: list[Agent]) -> None:
    with pytest.raises(CannotSend, match=r"echo cannot be sent; mark it with @gradwire\.rpc\.expose"):
        wary[0].call("b", handlers.echo, (1,))


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "builtins:exec",
        "builtins.eval",
        "os.system",
        "__import__",
        "double.__globals__",
        "double:__globals__",
        "rpc.handlers:exposed_add.__call__",
        "rpc.handlers:echo",
        "",
        "~cancel",
        "d\u03bfuble",  # the second letter is Greek
    ],
)
@pytest.mark.parametrize("to", ["a", "b"])
def test_other_names_are_refused(wary: list[Agent], name: str, to: str) -> None:
    with pytest.raises(NotExposed):
        wary[0].call(to, name, ("true",))


def test_argument_that_needs_pickle_is_refused_by_the_sender(wary: list[Agent]) -> None:
    served = wary[1].server.num_served
    with pytest.raises(CannotSend, match="Plain"):
        wary[0].call("b", handlers.exposed_add, (handlers.Plain(), 1))
    assert wary[1].server.num_served == served


def test_trust_levels_must_agree(make_agents: Any) -> None:
    shared = StaticDirectory()
    (wary,) = make_agents("a", directory=shared, trust="data")
    (bold,) = make_agents("b", directory=shared, trust="code")
    with pytest.raises(AuthenticationFailed, match='peer has trust="data", this worker trust="code"'):
        wary.call("b", "double", (1,))
    with pytest.raises(AuthenticationFailed, match='peer has trust="code", this worker trust="data"'):
        bold.call("a", operator.add, (1, 2))


# -- a peer that does not keep to the rules ----------------------------------------------------------------------


class Trap:
    """Notes that it was unpickled."""

    def __reduce__(self) -> Any:
        return handlers.note, ("the pickle was loaded",)


def _answer(connection: StreamConnection, call: Call, body: bytes) -> Frame:
    connection.send(call, body, deadline=time.monotonic() + 5)
    return connection.receive(time.monotonic() + 5)


def test_pickle_from_a_hostile_peer_is_never_loaded(wary: list[Agent]) -> None:
    body = pickle.dumps(((Trap(),), {}))
    connection = connect(wary[1])
    try:
        message = _answer(connection, Call(1, "double", 5.0, objects.PICKLE, len(body)), body).message
        assert isinstance(message, Failure)
        assert "DecodeError" in message.error.type_name
        assert handlers.seen == []
    finally:
        connection.close()
    assert wary[0].call("b", "double", (2,)) == 4


def test_function_in_the_body_is_never_loaded(wary: list[Agent]) -> None:
    body = pickle.dumps((Trap(), (), {}))
    connection = connect(wary[1])
    try:
        message = _answer(connection, Call(1, "", 5.0, objects.PICKLE, len(body)), body).message
        assert isinstance(message, Failure)
        assert "NotExposed" in message.error.type_name
        assert handlers.seen == []
    finally:
        connection.close()


def test_pickle_in_a_control_operation_is_never_loaded(pair: list[Agent]) -> None:
    """Not even where workers trust each other with code: control operations are plain data."""
    body = pickle.dumps((Trap(),))
    connection = connect(pair[1], "control")
    try:
        message = _answer(connection, Call(1, "~cancel", 5.0, objects.PICKLE, len(body)), body).message
        assert isinstance(message, Failure)
        assert handlers.seen == []
    finally:
        connection.close()
    assert pair[0].call("b", operator.add, (1, 2)) == 3


def test_control_operation_on_the_calls_lane_is_refused(pair: list[Agent]) -> None:
    body = objects.pack(((1,), {}), "data", pair[1].config.limits).body
    connection = connect(pair[1])
    try:
        message = _answer(connection, Call(1, "~cancel", 5.0, 0, len(body)), body).message
        assert isinstance(message, Failure)
    finally:
        connection.close()


def test_wrong_token_is_refused(pair: list[Agent]) -> None:
    with pytest.raises(AuthenticationFailed, match="token"):
        connect(pair[1], token=b"guess")
    assert pair[0].call("b", operator.add, (1, 2)) == 3


# -- workers that trust each other with code ----------------------------------------------------------------------


def test_lambdas_closures_partials_and_methods(pair: list[Agent]) -> None:
    number = 10
    assert pair[0].call("b", lambda value: value + number, (1,)) == 11
    assert pair[0].call("b", functools.partial(operator.add, 5), (1,)) == 6
    assert pair[0].call("b", handlers.Plain().method, (1,)) == 2
    assert pair[0].call("b", torch.nn.Linear(2, 3), (torch.ones(2),)).shape == (3,)


def test_functions_of_main_travel_to_another_process(workers: Callable[..., list[Puppet]]) -> None:
    first, second = workers(2)
    first.do("factor = 3\ndef scale(x):\n    return x * factor, os.getpid()")
    first.do("class Box:\n    def __init__(self, v):\n        self.v = v")
    assert first.do("rpc.rpc_sync('w1', scale, args=(2,))") == (6, second.pid)
    assert first.do("rpc.rpc_sync('w1', lambda box: box.v + 1, args=(Box(4),))") == 5
    assert first.do("rpc.rpc_sync('w1', lambda: Box(8)).v") == 8
