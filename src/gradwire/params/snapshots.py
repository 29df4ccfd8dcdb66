"""Several trainers, one set of parameters: what each sees, and how a step leaves the others alone.

    "snapshot"   Each context has exact gradients for the weights that it saw: a step copies parameters which other live
                 contexts have used. A lone trainer copies nothing.
    "serialize"  A context has the parameters for itself, from its first forward call until it has stepped or is released;
                 the others wait in line. The result is that of some order, one trainer after the other.
    "hogwild"    Nothing is copied: backward uses the values of whatever moment it runs at, so gradients are not exact.

In all of them a step waits for calls under way that use the parameters, and such calls for a step (`reading`).

Parameters that contexts use outside of calls, on the worker that has them, are torch's business as ever: a step in between
is an error in backward. Copying parts a parameter from others that it shares memory with.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gradwire.errors import RpcTimeout
from gradwire.params import rwlock as guards
from gradwire.params import rwlock as reading
from gradwire.params.grads import GradClaim
from gradwire.params.rwlock import (
    EVERYTHING,
    Call,
    Change,
    Group,
    Mode,
    UsesParameters,
    call_of_thread,
    changed,
    check_mode,
    deadline_here,
    late,
    lock,
)
from gradwire.params.saved_tensors import saving
from gradwire.rpc.connection import current_request, while_waiting
from gradwire.types import creator_of

__all__ = [
    "Group",
    "Held",
    "Mode",
    "check_mode",
    "groups_of",
    "guard",
    "lending_grads",
    "mode_of",
    "recording",
    "standing_still",
    "stepping",
    "time_left",
    "using",
]


_SLICE_S = 0.2
_WAIT_S = 600.0


# -- for whoever has parameters -------------------------------------------------------------------------------------------


def guard(params: Iterable[torch.Tensor], mode: Mode) -> Group:
    """Says how contexts share parameters of this worker. A parameter keeps what was said about it first.

    Args:
        params: The parameters; only weak references are kept.
        mode: ``"snapshot"``, ``"serialize"`` or ``"hogwild"``.

    Returns:
        What they belong to, for `using`.

    Raises:
        ConfigurationError: There is no such mode.
    """
    return guards.guard(params, mode)


def groups_of(params: Iterable[torch.Tensor]) -> set[Group]:
    """All that parameters of this worker belong to: those that were guarded together first."""
    return {item.group for param in params if (item := guards.find(param)) is not None}


def mode_of(param: torch.Tensor) -> Mode | None:
    """How contexts share a parameter of this worker; None if nobody said."""
    found = guards.find(param)
    return found.group.mode if found is not None else None


class stepping:
    """Surrounds whatever changes parameters in place, such as the step of an optimizer: one at a time.

    Parameters that nobody guarded are from now on, as ``"snapshot"``. With ``"serialize"``, the contexts' turns end.

    Args:
        params: All that may be changed.
        context_ids: The contexts for whose gradients; what they saw may change, what others saw may not.

    Raises:
        RpcTimeout: Calls that use the parameters, or another step, have not ended in time.
    """

    __slots__ = ("_call", "_change", "_found", "_own", "_turns")

    def __init__(self, params: Iterable[torch.Tensor], context_ids: Iterable[int]) -> None:
        self._own = frozenset(context_ids)
        self._found = guards.find_all(params)
        self._turns = {item.group.turns for _, item in self._found}
        self._change = Change(self._turns, EVERYTHING.turns)

    def __enter__(self) -> None:
        self._call = reading.begin(self._change)
        try:
            for param, item in self._found:
                if item.users and item.group.mode != "hogwild" and item.users_except(self._own):
                    item.move(param)
        except BaseException:
            reading.end(self._change, self._call)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._on_stepped()
        finally:
            reading.end(self._change, self._call)

    def _on_stepped(self) -> None:
        """The contexts need what they saw no more; as in one process, backward after the step is an error."""
        with lock:
            for _, item in self._found:
                if item.users:
                    item.users = item.users_except(self._own)
            for turns in self._turns:
                if turns.holder in self._own:
                    turns.end_turn(turns.holder)


@contextlib.contextmanager
def standing_still(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Surrounds reading of parameters that must see all of them at one moment, between steps.

    Raises:
        RpcTimeout: A step has not ended in time.
    """
    with contextlib.ExitStack() as stack:
        call = call_of_thread() or stack.enter_context(Call(None))
        for group in groups_of(params):
            call.read(group)
        yield


class Held:
    """Holds a lock, and works without grad mode meanwhile.

    Args:
        lock: The lock.
        busy: What to say if it is not free in time.
    """

    __slots__ = ("_busy", "_lock", "_mode")

    def __init__(self, lock: Any, busy: str) -> None:
        self._lock, self._busy = lock, busy

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            limit_s = time_left()
            with while_waiting():
                if not self._lock.acquire(timeout=limit_s):
                    raise RpcTimeout(f"{self._busy} for {limit_s:g} s (phase: run)", phase="run")
        self._mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._mode)
        self._lock.release()


def lending_grads(params: Iterable[torch.Tensor]) -> Held:
    """Surrounds whatever uses or changes ``.grad`` of parameters: a step lends them the gradients of its contexts.

    Args:
        params: The parameters.

    Raises:
        RpcTimeout: Another user of one of them has not ended in time.
    """
    return Held(GradClaim(params), "another optimizer, or hooks of a pass, have been using .grad")


def time_left() -> float:
    """Seconds that the current thread may wait: until the deadline of the call that it serves."""
    request = current_request()
    if request is None or request.deadline == float("inf"):
        return _WAIT_S
    return max(0.0, min(_WAIT_S, request.deadline - time.monotonic()))


# -- for calls ------------------------------------------------------------------------------------------------------------


def announces_use(name: str) -> str:
    """Marks a function, by the name it is exposed under, that says with `using` what it uses; returns the name."""
    _announcing.add(name)
    return name


_announcing: set[str] = set()


def concerns(function: str) -> bool:
    """Whether a function may use shared parameters; those that it announces may still have to be made."""
    return guards.has_any() or function in _announcing


class recording:
    """Surrounds a function that is called within a context, on a worker with guarded parameters.

    Args:
        context: On this worker.
        function: The name of what is called.

    Raises:
        RpcTimeout: A step has not ended until the deadline of the call.
    """

    __slots__ = ("_call", "_function", "_saving")

    def __init__(self, context: UsesParameters, function: str) -> None:
        self._call = Call(context)
        self._function = function
        self._saving = saving(context, self._call.read)

    def __enter__(self) -> None:
        self._call.__enter__()
        try:
            if self._function not in _announcing:
                self._call.read(EVERYTHING)
            self._saving.__enter__()
        except BaseException:
            self._call.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._saving.__exit__(*error)
        finally:
            self._call.__exit__(*error)


class using:
    """Surrounds a function that uses whole groups, which stay as they are meanwhile; with ``"serialize"``, first waits.

    Args:
        group: What `guard` returned; with ``"serialize"``, the function waits for its turn with this one.
        others: What else parameters belong to that it uses. Later would be too late: when torch saves a parameter, nobody
            may wait until it is changed.

    Raises:
        RpcTimeout: It is another context's turn, or a step has not ended, until the deadline of the call.
    """

    __slots__ = ("_group", "_others", "_own")

    def __init__(self, group: Group, *others: Group) -> None:
        self._group = group
        self._others = others
        self._own: Call | None = None

    def __enter__(self) -> None:
        group, call = self._group, call_of_thread()
        if call is None:
            call = self._own = Call(None)
            call.__enter__()
        try:
            if group.mode == "serialize" and call.context is not None:
                _wait_turn(group, call.context)
            call.read(group)
            for other in self._others:
                call.read(other)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self._own is not None:
            self._own.__exit__(*error)


def _wait_turn(group: Group, context: UsesParameters) -> None:
    turns, context_id = group.turns, context.context_id
    with lock:  # under which a context ends its turn when it is over; nobody would end one that it takes later
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
            changed.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic())))
    context.check_alive()


def _end_turn(group: Group, context_id: int) -> None:
    with lock:
        group.turns.end_turn(context_id)
        changed.notify_all()


def _describe(context_id: int) -> str:
    request, rank = current_request(), creator_of(context_id)
    name = f"rank {rank}"
    if request is not None:
        with contextlib.suppress(Exception):  # it may be gone
            name = request.source.server.agent.worker_info(rank).name
    return f"context {context_id} of worker {name}"
