"""torch's `RRef` and `remote`: gradwire's, with the texts, numbers and private names that torch's programs look for."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire import rpc, rref
from gradwire.compat.profiler import ProfiledCall, by_name, is_profiling, make_event, run_profiled
from gradwire.errors import NotTheOwner, RpcTimeout, RRefError
from gradwire.rpc.peers import To
from gradwire.rref import context as references
from gradwire.rref.values import Owned
from gradwire.types import MAX_COUNTER, creator_of, first_counter

_local_value: Callable[[Any], Any] = rref.RRef.local_value
_pack: Callable[[Any], Any] = rref.RRef._pack
_confirmed_by_owner: Callable[[Any], bool] = rref.RRef.confirmed_by_owner
_get_type: Callable[..., Any] = rref.RRef._get_type
_remote: Callable[..., Any] = rref.RRef.remote
_types: weakref.WeakKeyDictionary[Any, torch.futures.Future[type]] = weakref.WeakKeyDictionary()
_profiled: weakref.WeakKeyDictionary[Any, torch.futures.Future[Any]] = weakref.WeakKeyDictionary()


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> rref.RRef[Any]:
    """As `gradwire.rpc.remote`, known to torch's profiler.

    Raises:
        RpcError: The call could not be made.
    """
    func = by_name(func)
    if not is_profiling():
        return rref.remote(to, func, args, kwargs, timeout)
    call = ProfiledCall("remote", to, func)
    made = rref.remote(to, run_profiled, call.arguments(args or (), kwargs), timeout=timeout)
    _profiled[made] = call.follow(made._get_future())
    return made


# -- methods of RRef ------------------------------------------------------------------------------------------------------


def get_profiling_future(reference: rref.RRef[Any]) -> torch.futures.Future[Any] | None:
    """Completed when the profile has the events of the call that makes the value."""
    return _profiled.get(reference)


def set_profiling_future(reference: rref.RRef[Any], future: torch.futures.Future[Any]) -> None:
    """Keeps that future with the reference."""
    _profiled[reference] = future


def to_text(reference: rref.RRef[Any]) -> str:
    """torch's text for a reference."""
    state = reference._state
    number = _unique_id(reference, state.rref_id)
    if isinstance(state, Owned):
        return f"OwnerRRef({number})"
    return f"UserRRef(RRefId = {number}, ForkId = {_unique_id(reference, state.fork_id)})"


def _unique_id(reference: rref.RRef[Any], number: int) -> str:
    """Who made a reference, and its number there, counted from the worker's start on."""
    agent, rank = reference._known.agent, creator_of(number)
    is_own = rank == agent.info.id
    incarnation = agent.address.incarnation if is_own else agent.incarnation_of(agent.worker_info(rank).name)
    return f"GloballyUniqueId(created_on={rank}, local_id={(number & MAX_COUNTER) - first_counter(incarnation)})"


def local_value(reference: rref.RRef[Any]) -> Any:
    """The value, on its owner.

    Raises:
        NotTheOwner: It is on another worker.
    """
    state = reference._state
    if isinstance(state, Owned):
        return _local_value(reference)
    rref_id, fork_id = _unique_id(reference, state.rref_id), _unique_id(reference, state.fork_id)
    raise NotTheOwner(
        f"For UserRRef(rref_id={rref_id}, fork_id={fork_id}), can't call localValue() on user "
        f"{reference._known.agent.info}. Call it on owner {state.owner}"
    )


def confirmed_by_owner(reference: rref.RRef[Any]) -> bool:
    """Whether the owner knows of this reference. torch waits for that before it runs a function; here it is done now."""
    state = reference._state
    if not isinstance(state, Owned) and not state.is_first:
        with contextlib.suppress(RRefError, RpcTimeout):
            reference._known.maker_of(state, reference._deadline(rpc.UNSET_RPC_TIMEOUT))
    return _confirmed_by_owner(reference)


def get_type(reference: rref.RRef[Any], timeout: float = rpc.UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """The type of the value, or a future of it; asked for once, in a call that torch's profiler sees."""
    state = reference._state
    if isinstance(state, Owned) or (blocking and state.type_ is not None):
        return _get_type(reference, timeout, blocking=blocking)
    if not blocking and (known := _types.get(reference)) is not None:
        return known
    with make_event("async", _rref_typeof_on_owner, state.owner):
        found = _get_type(reference, timeout, blocking=blocking)
    if not blocking:
        _types[reference] = found
        found.add_done_callback(functools.partial(_on_type, weakref.ref(reference), state))
    return found


def _rref_typeof_on_owner() -> None:
    """Lends its name to the profiler's event: it is the one that torch's function has."""


def _on_type(reference: Callable[[], Any], state: Any, future: torch.futures.Future[type]) -> None:
    try:
        state.type_ = torch._C.Future.wait(future)
    except Exception:  # the next one may ask again
        _types.pop(reference(), None)


class CheckedProxy:
    """``rref.remote()``: torch looks at the value's type first, so that a method it does not have is an error at once.

    Args:
        reference: To the value.
        timeout: Seconds for each call.
    """

    def __init__(self, reference: rref.RRef[Any], timeout: float) -> None:
        self._reference = reference
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., rref.RRef[Any]]:
        def call(*args: Any, **kwargs: Any) -> rref.RRef[Any]:
            getattr(get_type(self._reference, self._timeout), name)
            made: rref.RRef[Any] = getattr(_remote(self._reference, self._timeout), name)(*args, **kwargs)
            return made

        return call


def remote_proxy(reference: rref.RRef[Any], timeout: float = rpc.UNSET_RPC_TIMEOUT) -> CheckedProxy:
    """``rref.remote().method(*args)`` calls a method of the value on its owner; a reference to the result."""
    return CheckedProxy(reference, timeout)


def serialize(reference: rref.RRef[Any]) -> Any:
    """What another worker needs to make a reference of its own; only inside a message.

    Raises:
        RRefError: The reference was deleted, or this is no message.
    """
    state = reference._state
    if not isinstance(state, Owned) and state.error is not None:
        raise RRefError(f"Cannot call fork an UserRRef after deletion. It was {reference!r}")
    return _pack(reference)


METHODS = {
    "__str__": to_text,
    "_get_profiling_future": get_profiling_future,
    "_get_type": get_type,
    "_serialize": serialize,
    "_set_profiling_future": set_profiling_future,
    "confirmed_by_owner": confirmed_by_owner,
    "local_value": local_value,
    "remote": remote_proxy,
}
"""What `RRef` has while torch's names are gradwire's."""


# -- all references of this worker ----------------------------------------------------------------------------------------


def get_debug_info() -> dict[str, str]:
    """Numbers about the references of this worker, as text, under torch's names."""
    known = references.here()
    counts = known.statistics()
    return {
        "num_owner_rrefs": str(known.num_held),
        "num_forks": str(sum(known.holders().values())),
        "num_pending_futures": str(counts.num_messages),
        "num_pending_users": str(counts.num_pending + counts.num_children),
    }


def delete_all(timeout: float = rpc.UNSET_RPC_TIMEOUT) -> None:
    """Deletes every reference of this worker to values elsewhere."""
    references.here().delete_all()


def find_leak() -> RRefError | None:
    """What to say if values of this worker are still referred to."""
    known = references.here()
    held = known.num_held
    holders = ", ".join(f"{name} ({count})" for name, count in known.holders().items())
    return RRefError(f"Leaking RRefs: {held} values are still referred to, by {holders}") if held else None
