"""torch's `RRef` and `remote`: gradwire's, with the texts, numbers and private names that torch's programs look for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire import rpc, rref
from gradwire.compat._profiling import ProfiledCall, is_profiling, run_profiled
from gradwire.errors import NotTheOwner, RRefError
from gradwire.rpc._ids import MAX_COUNTER, creator_of, first_counter
from gradwire.rpc.peer_table import To
from gradwire.rref import references
from gradwire.rref.values import Owned

_local_value: Callable[[Any], Any] = rref.RRef.local_value
_pack: Callable[[Any], Any] = rref.RRef._pack
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
    "_serialize": serialize,
    "_set_profiling_future": set_profiling_future,
    "local_value": local_value,
}
"""What `RRef` has while torch's names are gradwire's."""


# -- all references of this worker ----------------------------------------------------------------------------------------


def get_debug_info() -> dict[str, str]:
    """Numbers about the references of this worker, as text, under torch's names."""
    known = references.here()
    counts = known.statistics()
    return {
        "num_owner_rrefs": str(counts.num_values),
        "num_forks": str(sum(known.holders().values())),
        "num_pending_futures": str(counts.num_messages),
        "num_pending_users": str(counts.num_pending + counts.num_children),
    }


def delete_all(timeout: float = rpc.UNSET_RPC_TIMEOUT) -> None:
    """Deletes every reference of this worker to values elsewhere."""
    references.here().delete_all()


def check_leaks() -> None:
    """Refuses to leave while values of this worker are referred to.

    Raises:
        RRefError: Some are; says whose.
    """
    known = references.here()
    if known.statistics().num_values:
        holders = ", ".join(f"{name} ({count})" for name, count in known.holders().items())
        raise RRefError(f"Leaking RRefs: {known.statistics().num_values} values are still referred to, by {holders}")
