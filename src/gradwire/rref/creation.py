"""The owner's side of `remote`: what a call returns becomes a value of this worker.

The caller gets a small value along with the answer if nothing but the new reference can change it: nobody else refers to the
object or its memory. As long as the caller has used the reference for nothing else, that is the value, and `to_here` need
not ask for it (`values.UserFork.early`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch

from gradwire.rpc.agent import Agent
from gradwire.rpc.functions import Later, is_async_execution
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rref import references
from gradwire.rref._actions import Number
from gradwire.rref.operations import check_future
from gradwire.rref.values import Owned
from gradwire.types import WorkerInfo
from gradwire.wire import failures
from gradwire.wire.messages import prepare, read_note

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
