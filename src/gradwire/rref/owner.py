"""The owner's side of references: operations that users call, and creating values for them.

The operations are called by name, with plain data, at every trust level. Ids can be guessed. With ``trust="data"`` a value
is therefore there only for workers that are listed with it. Honest callers are: the owner lists a worker that it sends a
reference to, a third worker's fork is confirmed before it is used, and the worker that has a value made is listed when that
call arrives, or is known as its maker.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch

from gradwire._interrupts import interruptible
from gradwire._torch import storage_use_count
from gradwire.errors import DecodeError, NotExposed, RRefError
from gradwire.observe import events
from gradwire.rpc.agent import Agent
from gradwire.rpc.connection import current_request
from gradwire.rpc.functions import Later, expose, exposed_name, is_async_execution
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rref import context
from gradwire.rref._messages import Number, Worker, is_number, is_worker
from gradwire.rref.context import References
from gradwire.rref.values import Owned, describe
from gradwire.types import WorkerInfo, creator_of
from gradwire.wire.exceptions import describe_exception, rebuild_exception
from gradwire.wire.messages import prepare, read_note

FETCH: Final = "gradwire.rref.fetch"
INVOKE: Final = "gradwire.rref.invoke"
TYPE_OF: Final = "gradwire.rref.type_of"
NOTE: Final = "rref"

_EARLY_BYTES: Final = 1024
_CONSTANT: Final = frozenset((bool, int, float, complex))


def fetch(rref_id: int, maker: Worker | None) -> Any:
    return _when_made(_find(rref_id, maker), lambda value: value)


def type_of(rref_id: int, maker: Worker | None) -> Any:
    return _when_made(_find(rref_id, maker), type)


def invoke(rref_id: int, maker: Worker | None, name: Any, args: Any, kwargs: Any) -> Any:
    if type(name) is not str or not isinstance(args, list | tuple) or type(kwargs) is not dict:
        raise DecodeError("not a method call: expected a name, arguments and keyword arguments")
    value = find_value(rref_id, maker)
    if context.here().agent.trust == "data":
        check_exposed(value, name)
    method = getattr(value, name)
    result = _run(method, args, kwargs)
    return Later(result) if is_async_execution(method) else result


for _function, _name in ((fetch, FETCH), (type_of, TYPE_OF), (invoke, INVOKE)):
    expose(_function, name=_name)


def find_value(rref_id: Any, maker: Any) -> Any:
    """Return the value of that id, waiting for it until the deadline of the call being served."""
    owned, request = _find(rref_id, maker), current_request()
    if owned.is_done:
        return owned.get()
    deadline = request.deadline if request is not None else time.monotonic() + 60.0
    return owned.wait_value(deadline, context.here().agent.info.name)


def check_exposed(value: Any, name: str) -> None:
    function = getattr(type(value), name, None)
    if function is None or exposed_name(function) is None:
        worker = context.here().agent.info.name
        raise NotExposed(
            f'trust="data": {type(value).__name__}.{name} is not exposed on worker {worker}; mark it with '
            "@gradwire.rpc.expose"
        )


def _find(rref_id: Any, maker: Any) -> Owned:
    if not is_number(rref_id) or (maker is not None and not is_worker(maker)):
        raise DecodeError("not a valid reference id")
    known, request = context.here(), current_request()
    if request is not None and (maker is not None or known.agent.trust == "data"):
        _check_caller(known, rref_id, maker, request.source.info)
    return known.find(rref_id, maker)


def _check_caller(known: References, rref_id: int, maker: Worker | None, info: WorkerInfo) -> None:
    agent = known.agent
    caller = known.own if info == agent.info else (info.id, agent.incarnation_of(info.name))
    if maker not in (None, caller):
        raise DecodeError(f"{info.name} gave another worker as the creator of reference {describe(rref_id)}")
    is_here, is_held, can_expect = known.access_of(caller, rref_id)
    if is_held or (is_here and agent.trust == "code"):
        return
    # Ids are given out by the worker that has a value made, so no worker waits for those of another.
    if is_here or maker is None or creator_of(rref_id) != info.id:
        raise RRefError(  # the same text for what is here and what is not: ids must not be tried out
            f"worker {agent.info.name} does not have the value of reference {describe(rref_id)} for {info.name}: it was "
            f"freed, or {info.name} holds no reference to it. Send {info.name} a reference first"
        )
    if not can_expect:
        raise RRefError(
            f"worker {agent.info.name} is already waiting for too many values created by calls from {info.name}, and cannot "
            f"wait for the value of reference {describe(rref_id)}. Wait for earlier calls first"
        )


def _when_made(owned: Owned, answer: Callable[[Any], Any]) -> Any:
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


@interruptible  # the program's code
def _run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


class Creates(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The note of a call whose result stays on the callee."""

    rref_id: Number
    fork_id: Number  # the caller's reference to it; 0 if the caller is the callee
    incarnation: Number  # of the caller


def attach(agent: Agent) -> None:
    """Let a new worker, which has references, make values for others."""
    agent.server.register_keeper(NOTE, functools.partial(_keep, context.of(agent)))


def _keep(known: References, caller: WorkerInfo, name: str, note: Any, function: Callable[..., Any]) -> Any:
    """Return the replacement for a function whose result is kept on this worker."""
    message = read_note(note, Creates)
    owned = known.begin_making(message.rref_id, message.fork_id, (caller.id, message.incarnation))
    owned.label = name
    return functools.partial(_make, known.agent, owned, function, message.fork_id != 0)


def _make(
    agent: Agent, owned: Owned, function: Callable[..., Any], may_be_early: bool, *args: Any, **kwargs: Any
) -> Any:
    """Run a function and keep its result; return a copy of it for the caller if it is small and not shared."""
    is_async = is_async_execution(function)
    try:
        value = _run(function, args, kwargs)
        if type(value) is Later:
            return Later(_make_later(agent, owned, value.future))
        if is_async:
            if not hasattr(value, "add_done_callback"):
                raise RRefError(
                    f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
                    f"{owned.label}, which is marked with async_execution, returned {type(value).__name__}"
                )
            return _make_later(agent, owned, value)
        is_early = may_be_early and is_unshared(value)
        owned.set(value)
        if events.sink is not None:
            details = {"reference": describe(owned.rref_id), "function": owned.label}
            events.tell_now("rref", "create", agent.info.name, details=details)
        return value if is_early else None
    except BaseException as error:
        _fail(agent, owned, error)
    if not is_async:
        return None
    failed: InterruptibleFuture[None] = InterruptibleFuture()
    failed.set_result(None)
    return failed


def _make_later(agent: Agent, owned: Owned, future: Any) -> InterruptibleFuture[None]:
    answer: InterruptibleFuture[None] = InterruptibleFuture()

    def on_done(done: Any) -> None:
        try:
            owned.set(done.value() if hasattr(done, "value") else done.wait())
        except BaseException as error:
            _fail(agent, owned, error)
        answer.set_result(None)

    future.add_done_callback(on_done)
    return answer


def _fail(agent: Agent, owned: Owned, error: BaseException) -> None:
    """Make the function's exception the outcome of the value."""
    info = describe_exception(error, agent.info.name, agent.config.limits)
    owned.fail(lambda: rebuild_exception(info, agent.trust))


def is_unshared(value: Any) -> bool:
    """Return whether a value is small, and only one variable of the caller refers to it or to its memory."""
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
    # Two: the tensor and the variable above; a view's memory is also referred to by what it is a view of. Memory that others
    # own (numpy, a buffer) cannot be resized.
    return storage_use_count(storage) <= 2 and storage.resizable() and not storage.is_shared()


def _count_references(value: Any) -> int:
    return sys.getrefcount(value)


def _count_of_one_variable() -> int:
    value = torch.empty(0)
    return _count_references(value)


_num_references = _count_of_one_variable()  # as seen from inside a function that got the variable's value

prepare(Creates)
