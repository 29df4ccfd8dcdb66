"""Several trainers, one set of parameters: what each sees, and how a step leaves the others alone.

    "snapshot"   Each context has exact gradients for the weights that it saw. A step waits for forward calls that are under
                 way, and copies parameters which other live contexts have used. A lone trainer copies nothing.
    "serialize"  A context has the parameters for itself, from its first forward call until it has stepped or is released;
                 the others wait in line. The result is that of some order, one trainer after the other.
    "hogwild"    Steps wait for nobody and copy nothing: values may be those of several moments, gradients too.

Where a step and a forward call meet: calls *read* groups of parameters, a step *changes* them, and both wait for each other
here. A call that waits for something else (another call, its turn) reads nothing meanwhile, so no circle can close.

Parameters that contexts use outside of calls, on the worker that has them, are torch's business as ever: a step in between
is an error in backward. So are views that share memory with other parameters: moving one to a copy parts them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Collection, Iterable, Iterator

import torch

from gradwire.autograd import guards
from gradwire.autograd.context import DistAutogradContext
from gradwire.autograd.guards import Group, Guarded, Mode, changed, check_mode
from gradwire.autograd.saving import Saver
from gradwire.errors import RpcTimeout
from gradwire.rpc._ids import creator_of
from gradwire.rpc.incoming import current_request, while_waiting

__all__ = ["Group", "Mode", "check_mode", "guard", "mode_of", "reading", "recording", "standing_still", "stepping"]

_WAIT_S = 60.0
_SLICE_S = 0.2
_PATIENCE_S = 0.05  # how long a call lets steps go first that wait for other calls


class _Local(threading.local):
    call: Call | None = None  # what the current thread serves, if it has to do with shared parameters


_local = _Local()


class Call:
    """One call that uses shared parameters: in which context, and which groups it reads now.

    Used by the thread that serves it. Whenever that thread waits for something else, it reads nothing.
    """

    __slots__ = ("_groups", "_outer", "_request", "context")

    def __init__(self, context: DistAutogradContext | None) -> None:
        self.context = context
        self._groups: set[Group] = set()
        self._request = current_request()

    def __enter__(self) -> Call:
        self._outer, _local.call = _local.call, self
        if self._request is not None:
            self._request.let_go = self.let_go
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        _local.call = self._outer
        if self._request is not None:
            self._request.let_go = None

    @property
    def is_current(self) -> bool:
        """Whether its request is what the thread serves: one that waits may serve another meanwhile."""
        return self._request is current_request()

    def read(self, group: Group) -> None:
        """From now on nobody changes the group.

        Raises:
            RpcTimeout: A step takes longer than this call may.
        """
        if group in self._groups or group.mode == "hogwild":
            return
        turns, began, deadline = group.turns, time.monotonic(), _deadline()
        with changed:
            while not turns.can_read(is_patient=not self._groups and time.monotonic() < began + _PATIENCE_S):
                if time.monotonic() >= deadline:
                    raise _late("another trainer's step on these parameters has not ended")
                changed.wait(_PATIENCE_S)
            turns.num_readers += 1
        self._groups.add(group)

    def let_go(self) -> None:
        """Steps may go on."""
        if not self._groups:
            return
        groups, self._groups = self._groups, set()
        with changed:
            for group in groups:
                group.turns.num_readers -= 1
                if group.turns.num_pending:
                    changed.notify_all()


# -- for whoever has parameters -------------------------------------------------------------------------------------------


def guard(params: Iterable[torch.Tensor], mode: Mode) -> Group:
    """Says how contexts share parameters of this worker. A parameter keeps what was said about it first.

    Args:
        params: The parameters; only weak references are kept.
        mode: ``"snapshot"``, ``"serialize"`` or ``"hogwild"``.

    Returns:
        What they belong to, for `reading`.

    Raises:
        ConfigurationError: There is no such mode.
    """
    return guards.guard(params, mode)


def mode_of(param: torch.Tensor) -> Mode | None:
    """How contexts share a parameter of this worker; None if nobody said."""
    found = guards.find(param)
    return found.group.mode if found is not None else None


@contextlib.contextmanager
def stepping(params: Iterable[torch.Tensor], context_ids: Iterable[int]) -> Iterator[None]:
    """Surrounds whatever changes parameters in place, such as the step of an optimizer: one at a time.

    Parameters that nobody guarded are from now on, as ``"snapshot"``. With ``"serialize"``, the contexts' turns end.

    Args:
        params: All that may be changed.
        context_ids: The contexts for whose gradients; what they saw may change, what others saw may not.

    Raises:
        RpcTimeout: Calls that use the parameters, or another step, have not ended in time.
    """
    own, todo = set(context_ids), list(params)
    guards.guard(todo, "snapshot")
    found = [(param, item) for param in todo if (item := guards.find(param)) is not None]
    with _changing({item.group for _, item in found}):
        for param, item in found:
            if item.group.mode != "hogwild" and _has_others(item, own):
                item.move(param)
        yield
        _forget_users(found, own)
    for group in {item.group for _, item in found if item.group.mode == "serialize"}:
        for context_id in own:
            _end_turn(group, context_id)


@contextlib.contextmanager
def standing_still(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Surrounds reading of parameters that must see all of them at one moment, between steps.

    Raises:
        RpcTimeout: A step has not ended in time.
    """
    groups = {item.group for param in params if (item := guards.find(param)) is not None}
    with _this_call() as call:
        for group in groups:
            call.read(group)
        yield


# -- for calls ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recording(context: DistAutogradContext) -> Iterator[None]:
    """Surrounds a function that is called within a context, on a worker with guarded parameters."""
    with Call(context) as call, Saver(context, call.read).hooks():
        yield


@contextlib.contextmanager
def reading(group: Group) -> Iterator[None]:
    """Surrounds a function that uses a whole group, which stays as it is meanwhile; with ``"serialize"``, first waits.

    Raises:
        RpcTimeout: It is another context's turn, or a step has not ended, until the deadline of the call.
    """
    with _this_call() as call:
        if group.mode == "serialize" and call.context is not None:
            _wait_turn(group, call.context)
        call.read(group)
        yield


def _this_call() -> contextlib.AbstractContextManager[Call]:
    """The call that this thread serves; one without a context is made, and ends with the block."""
    call = _local.call
    return contextlib.nullcontext(call) if call is not None and call.is_current else Call(None)


def _wait_turn(group: Group, context: DistAutogradContext) -> None:
    turns, context_id = group.turns, context.context_id
    with changed:
        if turns.ask_turn(context_id) and group in context.turns:
            return
    if group not in context.turns:
        context.turns.add(group)
        context.call_at_end(functools.partial(_end_turn, group, context_id))
    deadline = _deadline()
    with while_waiting(), changed:
        while context.released is None and not turns.ask_turn(context_id):
            if time.monotonic() >= deadline:
                turns.leave_line(context_id)
                raise _late(f"it is the turn of {_describe(turns.holder)}, which has neither stepped nor been released")
            changed.wait(_SLICE_S)
    context.check_alive()


def _end_turn(group: Group, context_id: int) -> None:
    with changed:
        group.turns.end_turn(context_id)
        changed.notify_all()


# -- inside ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _changing(groups: Collection[Group]) -> Iterator[None]:
    """All groups at once, so that nobody holds one and waits for another."""
    if _local.call is not None:
        _local.call.let_go()
    deadline = _deadline()
    with changed:
        _count_pending(groups, 1)
    try:
        with while_waiting(), changed:
            while not all(group.turns.can_change() for group in groups):
                if time.monotonic() >= deadline:
                    raise _late("calls that use these parameters, or another step, have not ended")
                changed.wait(_SLICE_S)
            for group in groups:
                group.turns.is_changed = True
    finally:
        with changed:
            _count_pending(groups, -1)
    try:
        yield
    finally:
        with changed:
            for group in groups:
                group.turns.is_changed = False
            changed.notify_all()


def _count_pending(groups: Iterable[Group], change: int) -> None:
    for group in groups:
        group.turns.num_pending += change


def _has_others(guarded: Guarded, own: set[int]) -> bool:
    with changed:
        return any(user.released is None and user.context_id not in own for user in guarded.users)


def _forget_users(found: Iterable[tuple[torch.Tensor, Guarded]], own: set[int]) -> None:
    """Contexts that have stepped need what they saw no more; as in one process, backward after the step is an error."""
    with changed:
        for _, item in found:
            for user in [user for user in item.users if user.context_id in own or user.released is not None]:
                item.users.discard(user)
                user.used.discard(item)


def _deadline() -> float:
    request = current_request()
    limit = time.monotonic() + _WAIT_S
    return limit if request is None or request.deadline == float("inf") else request.deadline


def _late(reason: str) -> RpcTimeout:
    request = current_request()
    worker, what = ("", "using shared parameters")
    if request is not None:
        worker, what = request.source.server.agent.info.name, request.function
    return RpcTimeout(
        f"{what} on worker {worker or 'of this process'} waited in vain: {reason} (phase: run)", worker, "run"
    )


def _describe(context_id: int) -> str:
    request, rank = current_request(), creator_of(context_id)
    name = f"rank {rank}"
    if request is not None:
        with contextlib.suppress(Exception):  # it may be gone
            name = request.source.server.agent.worker_info(rank).name
    return f"context {context_id} of worker {name}"
