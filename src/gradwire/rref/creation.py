"""The owner's side of `remote`: what a call returns becomes a value of this worker, and the caller gets none of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gradwire.errors import DecodeError
from gradwire.rpc.agent import Agent
from gradwire.rpc.functions import Later, is_async_execution
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.rref import references
from gradwire.rref.operations import check_future
from gradwire.rref.values import Owned
from gradwire.wire import failures
from gradwire.wire.messages import prepare

NOTE: Final = "rref"


class Creates(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Goes with a call whose result is to stay with the callee.

    Attributes:
        rref_id: What the value is to be called.
        fork_id: The caller's reference to it; 0 if the caller is the callee.
        incarnation: Of the caller.
    """

    rref_id: int
    fork_id: int
    incarnation: int


class CreationInterceptor(Interceptor):
    """Keeps the results of calls that come with a `Creates`."""

    name = NOTE

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def wants_calls(self) -> bool:
        """None: `remote` attaches the note itself."""
        return False

    def around(self, envelope: Envelope, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its result kept here."""
        message = parse(note)
        known = references.of(self._agent)
        owned = known.begin_making(message.rref_id, message.fork_id, (envelope.peer.id, message.incarnation))
        owned.label = envelope.function
        return functools.partial(self._make, owned, function)

    def _make(self, owned: Owned, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_async = is_async_execution(function)
        try:
            value = function(*args, **kwargs)
            if type(value) is Later:
                return Later(self._make_later(owned, value.future))
            if is_async:
                check_future(value, owned.label)
                return self._make_later(owned, value)
            owned.set(value)
        except BaseException as error:
            self._fail(owned, error)
        return _done() if is_async else None

    def _make_later(self, owned: Owned, future: Any) -> InterruptibleFuture[None]:
        answer: InterruptibleFuture[None] = InterruptibleFuture()

        def on_done(done: Any) -> None:
            try:
                owned.set(done.value() if hasattr(done, "value") else done.wait())
            except BaseException as error:
                self._fail(owned, error)
            answer.set_result(None)

        future.add_done_callback(on_done)
        return answer

    def _fail(self, owned: Owned, error: BaseException) -> None:
        agent = self._agent
        info = failures.describe_exception(error, agent.info.name, agent.config.limits)
        owned.fail(lambda: failures.rebuild_exception(info, agent.trust))


def attach(agent: Agent) -> None:
    """Lets a new worker make values for others."""
    agent.interceptors.append(CreationInterceptor(agent))


def _done() -> InterruptibleFuture[None]:
    future: InterruptibleFuture[None] = InterruptibleFuture()
    future.set_result(None)
    return future


def parse(note: Any) -> Creates:
    """
    Raises:
        DecodeError: It is no such note.
    """
    if isinstance(note, Creates):
        return note
    try:
        return msgspec.convert(note, Creates)
    except msgspec.ValidationError as error:
        raise DecodeError(f"not a valid note about a reference: {error}") from error


prepare(Creates)
