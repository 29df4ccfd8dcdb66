"""What users of a reference ask of its owner: called by name, with plain data, at every trust level.

Ids can be guessed. With ``trust="data"`` a value is therefore there only for workers that are listed with it. Honest callers
are: the owner lists whom it sends a reference to, a third worker's fork is confirmed before it is used, and whoever had the
value made is listed when that call arrives, or is to make it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gradwire.errors import DecodeError, NotExposed, RRefError
from gradwire.rpc._ids import creator_of
from gradwire.rpc.functions import Later, expose, exposed_name, is_async_execution
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.incoming import current_request
from gradwire.rref import references
from gradwire.rref._actions import Worker, is_number
from gradwire.rref.references import References
from gradwire.rref.values import Owned, describe
from gradwire.types import WorkerInfo

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
