"""Several trainers, one set of parameters: what each of them sees, and how a step does not disturb the others.

    "snapshot"   Each context has exact gradients for the weights that it saw: a step copies parameters which other live
                 contexts have used. A lone trainer copies nothing.
    "serialize"  A context has the parameters for itself, from its first forward call until it has stepped or is released;
                 the others wait in line. The result is that of some order, one trainer after the other.
    "hogwild"    Nothing is copied: backward uses the values of whatever moment it runs at, so gradients are not exact.

In all modes a step waits for running calls that use the parameters, and such calls wait for a step (`rwlock`).

torch saves the parameter itself for backward, which then raises if it was changed in place. Inside calls that are served
within a context, hooks save an alias of the parameter's memory instead. A step that changes a parameter which another
context has used moves it to other memory first, so the alias keeps its values. torch does not check versions where
there are hooks, so these do, for all tensors: any other
change in place is an error.

For parameters that contexts use outside calls, on their own worker, torch's rules apply: a step in between is an error in
backward. A copied parameter no longer shares memory with others.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from gradwire import _interrupts
from gradwire._torch import Carried, set_grad_mode
from gradwire.errors import AutogradError
from gradwire.params.grads import GradClaim
from gradwire.params.rwlock import (
    EVERYTHING,
    Cell,
    Change,
    Group,
    Guarded,
    Mode,
    ReadingCall,
    UsesParameters,
    begin,
    call_of_thread,
    changed,
    check_mode,
    deadline_here,
    end,
    find,
    find_all,
    find_by_memory,
    guard,
    late,
    lock,
)
from gradwire.rpc.connection import current_request, while_waiting
from gradwire.types import creator_of

__all__ = ["Group", "Mode", "check_mode", "guard"]  # from `rwlock`, for users of this module


_SLICE_S = 0.2
_WAIT_S = 600.0


def groups_of(params: Iterable[torch.Tensor]) -> set[Group]:
    return {item.group for param in params if (item := find(param)) is not None}


def mode_of(param: torch.Tensor) -> Mode | None:
    found = find(param)
    return found.group.mode if found is not None else None


@contextlib.contextmanager
def stepping(params: Iterable[torch.Tensor], context_ids: Iterable[int]) -> Iterator[None]:
    """Surround code that changes parameters of this worker in place, such as the step of an optimizer of your own.

    Such blocks run one at a time on the same parameters. The values that the contexts of `context_ids` saw may change;
    other contexts keep those that they saw. With ``"serialize"``, the turns of the contexts of `context_ids` end.

    Args:
        params: The parameters. Those that are not shared yet become shared, in mode ``"snapshot"``.
        context_ids: The contexts that the change is for.

    Raises:
        RpcTimeout: Calls that use the parameters, or another such block, have not finished in time.
    """
    own, found = frozenset(context_ids), find_all(params)
    all_turns = {item.group.turns for _, item in found}
    change = Change(all_turns, EVERYTHING.turns)
    call = begin(change)
    try:
        for param, item in found:
            if item.users and item.group.mode != "hogwild" and item.users_except(own):
                item.move(param)
        yield
        # The contexts no longer need their values; as in one process, backward after the step is an error.
        with lock:
            for _, item in found:
                if item.users:
                    item.users = item.users_except(own)
            for turns in all_turns:
                if turns.holder in own:
                    turns.end_turn(turns.holder)
    finally:
        end(change, call)


@contextlib.contextmanager
def standing_still(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Surround code that must read all parameters at one moment, between steps."""
    with contextlib.ExitStack() as stack:
        call = call_of_thread() or stack.enter_context(ReadingCall(None))
        for group in groups_of(params):
            call.read(group)
        yield


class Held:
    """Holds a lock, with grad mode off meanwhile."""

    __slots__ = ("_lock", "_mode", "_reason")

    def __init__(self, lock: Any, reason: str) -> None:  # why it may not be free in time
        self._lock, self._reason = lock, reason

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            deadline = time.monotonic() + time_left()
            with while_waiting():
                # In short waits: Ctrl-C inside a long one could leave a lock that is never released.
                while not self._lock.acquire(timeout=max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
                    _interrupts.deliver()
                    if time.monotonic() >= deadline:
                        raise late(self._reason)
        self._mode = torch.is_grad_enabled()
        set_grad_mode(False)

    def __exit__(self, *_: object) -> None:
        set_grad_mode(self._mode)
        self._lock.release()


def lending_grads(params: Iterable[torch.Tensor]) -> Held:
    """Surround code that uses or changes ``.grad`` of parameters: a step lends them the gradients of its contexts."""
    return Held(GradClaim(params), "another optimizer, or a hook of a backward pass, is using .grad")


def time_left() -> float:
    """Return how many seconds the current thread may wait: until the deadline of the call that it serves."""
    request = current_request()
    if request is None or request.deadline == float("inf"):
        return _WAIT_S
    return max(0.0, min(_WAIT_S, request.deadline - time.monotonic()))


Saved = tuple[torch.Tensor, int | None, Cell | None]
"""An alias, the version it must have in backward (None: any), and for parameters the cell with that version."""


OnUse = Callable[[Group], None]

# The context that the current thread saves for, and the callback for its uses. Threads of devices save in recorded passes.
_saving_for: Carried[tuple[UsesParameters | None, OnUse | None]] = Carried(
    "gradwire.params.saved_tensors", (None, None)
)


class saving:
    """Surrounds operations that save tensors for a context, and notes which parameters they use."""

    def __init__(self, context: UsesParameters, on_use: OnUse | None = None) -> None:  # None if the uses are known
        self._ours = context, on_use

    def __enter__(self) -> None:
        self._outer = _saving_for.set(self._ours)
        _hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        _hooks.__exit__(*error)
        _saving_for.set(self._outer)


def _pack(tensor: torch.Tensor) -> Saved:
    """Return an alias to save for a tensor. Not the tensor itself: a result that its own node keeps is never freed."""
    context, on_use = _saving_for.get()
    found = _guarded_by(tensor) if context is not None else []
    if context is not None:
        for item, _ in found:
            _note(context, item, on_use)
    if len(found) != 1:  # with several, it is unknown whose version it has: at worst there is a needless error
        return tensor.detach(), tensor._version, None
    guarded, cell = found[0]
    # `data` has its own version: tensors saved from this alias do not depend on the parameter's version.
    return tensor.data, None if guarded.group.mode == "hogwild" else cell.version, cell


def _guarded_by(tensor: torch.Tensor) -> Sequence[tuple[Guarded, Cell]]:
    """Return the parameter that a tensor is, is a view of, or is detached from; several if they share memory."""
    found = find(tensor)
    if found is None and tensor._base is not None:
        found = find(tensor._base)
    return find_by_memory(tensor) if found is None else ((found, found.cell),)


def _note(context: UsesParameters, guarded: Guarded, on_use: OnUse | None) -> None:
    if on_use is not None:
        on_use(guarded.group)
    user = weakref.ref(context)
    if user not in guarded.users:
        with lock:
            guarded.users = [*guarded.users_except(()), user]


def _unpack(saved: Saved) -> torch.Tensor:
    tensor, version, cell = saved
    now = tensor._version if cell is None else cell.version
    if now not in (version, None) and version is not None:
        raise AutogradError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} tensor of shape {list(tensor.shape)} is at version {now}; expected version {version} "
            f"instead. Step optimizers through gradwire.optim, or inside gradwire.optim.stepping"
        )
    return tensor


# Saved tensors keep these functions alive: with a reference to the context, it would keep itself alive.
_hooks = torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def announces_use(name: str) -> str:
    """Mark an exposed function, by name, as one that declares its parameters with `using`; return the name."""
    announcing.add(name)
    return name


announcing: set[str] = set()
"""Functions that declare which shared parameters they use: these may be created by the call itself."""


@contextlib.contextmanager
def recording(context: UsesParameters, function: str) -> Iterator[None]:
    """Surround a function that is called within a context, on a worker with guarded parameters."""
    with ReadingCall(context) as call:
        if function not in announcing:
            call.read(EVERYTHING)
        with saving(context, call.read):
            yield


@contextlib.contextmanager
def using(group: Group, *others: Group) -> Iterator[None]:
    """Surround a function that uses whole groups, which do not change meanwhile; with ``"serialize"``, wait first.

    It waits for its turn with `group`. The `others` are the other groups of the parameters that it uses: it must read
    them from the start, because it is not possible to wait for a step while torch saves a parameter.
    """
    with contextlib.ExitStack() as stack:
        call = call_of_thread() or stack.enter_context(ReadingCall(None))
        if group.mode == "serialize" and call.context is not None:
            _wait_turn(group, call.context)
        for item in (group, *others):
            call.read(item)
        yield


def _wait_turn(group: Group, context: UsesParameters) -> None:
    turns, context_id = group.turns, context.context_id
    with lock:  # a released context ends its turn under it; a turn taken after that would never end
        if context.released is None and turns.ask_turn(context_id) and group in context.turns:
            return
    if group not in context.turns:
        context.turns.add(group)
        context.call_at_end(functools.partial(_end_turn, group, context_id))
    deadline = deadline_here()
    with while_waiting(), changed:
        while context.released is None and not turns.ask_turn(context_id):
            if time.monotonic() >= deadline:
                turns.leave_line(context_id)
                raise late(f"it is the turn of {_describe(turns.holder)}, which has neither stepped nor been released")
            _interrupts.wait(changed, min(_SLICE_S, max(0.0, deadline - time.monotonic())))
    context.check_alive()


def _end_turn(group: Group, context_id: int) -> None:
    with lock:
        group.turns.end_turn(context_id)
        changed.notify_all()


def _describe(context_id: int) -> str:
    request, rank = current_request(), creator_of(context_id)
    name = f"rank {rank}"
    if request is not None:
        with contextlib.suppress(Exception):  # the worker may be lost
            name = request.source.server.agent.worker_info(rank).name
    return f"context {context_id} of worker {name}"
