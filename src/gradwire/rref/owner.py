"""What users of a reference ask of its owner: called by name, with plain data, at every trust level.

Ids can be guessed. With ``trust="data"`` a value is therefore there only for workers that are listed with it. Honest callers
are: the owner lists whom it sends a reference to, a third worker's fork is confirmed before it is used, and whoever had the
value made is listed when that call arrives, or is to make it.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch

from gradwire.errors import DecodeError, NotExposed, RRefError
from gradwire.rpc.agent import Agent
from gradwire.rpc.connection import current_request
from gradwire.rpc.functions import Later, expose, exposed_name, is_async_execution
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rref import context as references
from gradwire.rref._messages import Number, Worker, is_number
from gradwire.rref.context import References
from gradwire.rref.values import Owned, describe
from gradwire.types import WorkerInfo, creator_of
from gradwire.wire import exceptions as failures
from gradwire.wire.messages import prepare, read_note

FETCH = "gradwire.rref.fetch"
INVOKE = "gradwire.rref.invoke"
TYPE_OF = "gradwire.rref.type_of"


def _find(rref_id: Any, maker: Any) -> Owned:
    if not is_number(rref_id) or (maker is not None and not _is_worker(maker)):
        raise DecodeError("not the id of a reference")
    known, request = references.here(), current_request()
    if request is not None and (maker is not None or known.agent.trust == "data"):
        _check_caller(known, rref_id, maker, request.source.info)
    return known.find(rref_id, maker)


def _check_caller(known: References, rref_id: int, maker: Worker | None, info: WorkerInfo) -> None:
    """
    Raises:
        DecodeError: The caller speaks of another worker's calls.
        RRefError: It may not ask for that value, or waits for too many that its calls have not made.
    """
    agent = known.agent
    caller = known.own if info == agent.info else (info.id, agent.incarnation_of(info.name))
    if maker not in (None, caller):
        raise DecodeError(f"{info.name} named another worker as the maker of reference {describe(rref_id)}")
    access = known.access_of(caller, rref_id)
    if access.is_held or (access.is_here and agent.trust == "code"):
        return
    if (
        access.is_here or maker is None or creator_of(rref_id) != info.id
    ):  # no worker has values made under the ids of another
        raise RRefError(  # the same text for what is here and what is not: ids are not to be tried out
            f"worker {agent.info.name} does not have the value of reference {describe(rref_id)} for {info.name}: it is "
            f"gone, or {info.name} holds no reference to it. Have one sent to {info.name}"
        )
    if not access.can_expect:
        raise RRefError(
            f"worker {agent.info.name} waits for too many values that calls of {info.name} are to make, and does not wait "
            f"for that of reference {describe(rref_id)}. Wait for earlier calls first"
        )


def _is_worker(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and all(map(is_number, value))


def find_value(rref_id: Any, maker: Any) -> Any:
    """The value of that id, once it is made; at most until the deadline of the call that is being served.

    Raises:
        RRefError: It is not here.
        RpcTimeout: It was not made in time.
    """
    owned, request = _find(rref_id, maker), current_request()
    if owned.is_done:
        return owned.get()
    return references.here().wait(owned, request.deadline if request is not None else time.monotonic() + 60.0)


def when_made(owned: Owned, answer: Callable[[Any], Any]) -> Any:
    """``answer(value)``, now or when the value is there."""
    if owned.is_done:
        return answer(owned.get())
    future: InterruptibleFuture[Any] = InterruptibleFuture()

    def on_done() -> None:
        try:
            future.set_result(answer(owned.get()))
        except Exception as error:
            future.set_exception(error)

    owned.when_done(on_done)
    return Later(future)


def fetch(rref_id: int, maker: Worker | None) -> Any:
    """The value itself."""
    return when_made(_find(rref_id, maker), lambda value: value)


def type_of(rref_id: int, maker: Worker | None) -> Any:
    """The value's type."""
    return when_made(_find(rref_id, maker), type)


def invoke(rref_id: int, maker: Worker | None, name: Any, args: Any, kwargs: Any) -> Any:
    """Calls a method of the value.

    Raises:
        DecodeError: These are not a name, arguments and keyword arguments.
        NotExposed: ``trust="data"`` and the method is not marked with `gradwire.rpc.expose`.
    """
    if type(name) is not str or not isinstance(args, list | tuple) or type(kwargs) is not dict:
        raise DecodeError("not the call of a method: its name, its arguments and its keyword arguments")
    value = find_value(rref_id, maker)
    if references.here().agent.trust == "data":
        check_exposed(value, name)
    method = getattr(value, name)
    result = method(*args, **kwargs)
    return Later(result) if is_async_execution(method) else result


def check_exposed(value: Any, name: str) -> None:
    """
    Raises:
        NotExposed: The method is not marked.
    """
    function = getattr(type(value), name, None)
    if function is None or exposed_name(function) is None:
        raise NotExposed(
            f'trust="data": {type(value).__name__}.{name} is not exposed; mark it with @gradwire.rpc.expose'
        )


def check_future(value: Any, label: str) -> None:
    """
    Raises:
        RRefError: A function marked with `async_execution` returned something else than a future.
    """
    if not hasattr(value, "add_done_callback"):
        raise RRefError(
            f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but {label}, "
            f"which is marked with async_execution, returned {type(value).__name__}"
        )


for _function, _name in ((fetch, FETCH), (type_of, TYPE_OF), (invoke, INVOKE)):
    expose(_function, name=_name)


NOTE: Final = "rref"

_EARLY_BYTES: Final = 1024
_CONSTANT: Final = frozenset((bool, int, float, complex))


class Creates(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Goes with a call whose result is to stay with the callee.

    Attributes:
        rref_id: What the value is to be called.
        fork_id: The caller's reference to it; 0 if the caller is the callee.
        incarnation: Of the caller.
    """

    rref_id: Number
    fork_id: Number
    incarnation: Number


class Keeper:
    """Keeps the results of calls that come with a `Creates`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._known = references.of(agent)

    def keep(self, caller: WorkerInfo, name: str, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of a function, whose result is kept here."""
        message = read_note(note, Creates)
        owned = self._known.begin_making(message.rref_id, message.fork_id, (caller.id, message.incarnation))
        owned.label = name
        return functools.partial(self._make, owned, function, message.fork_id != 0)

    def _make(self, owned: Owned, function: Callable[..., Any], is_wanted: bool, *args: Any, **kwargs: Any) -> Any:
        is_async = is_async_execution(function)
        try:
            value = function(*args, **kwargs)
            if type(value) is Later:
                return Later(self._make_later(owned, value.future))
            if is_async:
                check_future(value, owned.label)
                return self._make_later(owned, value)
            is_early = is_wanted and is_unshared(value)
            owned.set(value)
            return value if is_early else None
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


def is_unshared(value: Any) -> bool:
    """Whether a value is small, and nobody but the caller's one variable refers to it or to its memory."""
    kind = type(value)
    if kind is not torch.Tensor:
        return kind in _CONSTANT
    if (
        sys.getrefcount(value) > _num_references
        or value.requires_grad
        or not value.is_cpu
        or value.layout is not torch.strided
        or value.nbytes > _EARLY_BYTES
    ):
        return False
    storage = value.untyped_storage()
    # Two: the tensor and the variable above; a view's memory has what it is a view of besides. Memory of others (numpy's,
    # a buffer's) cannot be resized.
    return torch._C._storage_Use_Count(storage._cdata) <= 2 and storage.resizable() and not storage.is_shared()


def _count_references(value: Any) -> int:
    return sys.getrefcount(value)


def _count_of_one_variable() -> int:
    value = torch.empty(0)
    return _count_references(value)


_num_references = _count_of_one_variable()  # as seen from inside a function that got the variable's value


def attach(agent: Agent) -> None:
    """Lets a new worker, which has references, make values for others."""
    agent.server.register_keeper(NOTE, Keeper(agent).keep)


def _done() -> InterruptibleFuture[None]:
    future: InterruptibleFuture[None] = InterruptibleFuture()
    future.set_result(None)
    return future


prepare(Creates)
