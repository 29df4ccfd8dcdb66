"""`RRef` and `remote`: the public API of references, with PyTorch's names."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

import torch

from gradwire.errors import CannotSend, NotTheOwner, OwnerLost, RpcTimeout, RRefError, WorkerLost
from gradwire.observe import events
from gradwire.rpc.codec import EVERY_WORKER, transfers
from gradwire.rpc.futures import CallFuture, InterruptibleFuture
from gradwire.rpc.options import UNSET_RPC_TIMEOUT
from gradwire.rpc.peers import To
from gradwire.rref import context
from gradwire.rref._messages import is_number, is_worker
from gradwire.rref._ownership import ForkPhase
from gradwire.rref.context import References
from gradwire.rref.owner import FETCH, INVOKE, NOTE, TYPE_OF, Creates
from gradwire.rref.values import Owned, UserFork, deleted, describe, lost_text
from gradwire.types import WorkerInfo
from gradwire.wire.serialization import register_plain_type

T = TypeVar("T")

_NEVER = float("inf")

Backward = Callable[["RRef[Any]", int, bool], None]
_backward: list[Backward] = []  # set by the autograd layer, on which this one must not depend


class Proxy:
    """Forward method calls: ``proxy.name(*args, **kwargs)`` calls ``call(name, args, kwargs)``."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __repr__(self) -> str:
        return "<Proxy of the value of an RRef: call any of its methods>"

    def __getattr__(self, name: str) -> Any:
        return functools.partial(_forward, self._call, name)


def _forward(call: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    return call(name, args, kwargs)


class RRef(Generic[T]):
    """A reference to a value on some worker.

    References can be sent in arguments and results. The value lives as long as a reference to it exists.

    Args:
        value: A value on this worker, which becomes its owner.
        type_hint: Accepted for compatibility with PyTorch; not used.

    Raises:
        NotInitialized: This process is not a worker.
    """

    __slots__ = ("__weakref__", "_is_open", "_known", "_state")

    _known: References
    _state: Owned | UserFork
    _is_open: bool  # deleted on close, so that only one of two threads that close it succeeds

    def __init__(self, value: T, type_hint: Any = None) -> None:
        known = context.here()
        owned = Owned(known.new_id())
        owned.set(value)
        self._known, self._is_open, self._state = known, True, owned

    @classmethod
    def _of(cls, known: References, state: Owned | UserFork) -> RRef[Any]:
        made = cls.__new__(cls)
        made._known, made._is_open, made._state = known, True, state
        return made

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None and state.is_shared and not self._is_closed:
            self._known.on_dropped(state)

    @property
    def _is_closed(self) -> bool:
        return not hasattr(self, "_is_open")

    def __repr__(self) -> str:
        state = self._state
        if isinstance(state, UserFork):
            where = f"owned by {state.owner.name}, {state.phase.value}"
        else:
            phase = "closed" if self._is_closed else "ready" if state.is_done else "being made"
            where = f"owned here by {self._known.agent.info.name}, {phase}"
        return f"<RRef {describe(state.rref_id)} {where}>"

    def is_owner(self) -> bool:
        """Return whether the value is on this worker."""
        return isinstance(self._state, Owned)

    def owner(self) -> WorkerInfo:
        """Return the worker that owns the value."""
        state = self._state
        return state.owner if isinstance(state, UserFork) else self._known.agent.info

    def owner_name(self) -> str:
        """Return the name of the worker that owns the value."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner has registered this reference."""
        state = self._state
        if isinstance(state, UserFork) and not state.is_done:
            self._known.watch(state)
        return isinstance(state, Owned) or state.phase is ForkPhase.CONFIRMED

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Return the value itself on its owner, or a copy on another worker.

        Inside an autograd context the fetch is recorded like any call.

        Args:
            timeout: Seconds to wait, including for the value to be created; 0 for no limit.

        Raises:
            RpcTimeout: The value did not arrive in time.
            OwnerLost: The owner was lost.
            RRefError: This reference was deleted, or the value was never created.
            Exception: The exception of the function that should have created the value.
        """
        state = self._state
        if isinstance(state, Owned):
            return self._wait(state, timeout)  # type: ignore[no-any-return]
        if not state.is_used:
            deadline, call = self._deadline(timeout), state.call
            if call is not None:
                self._known.agent.client.wait_until(call, deadline)
            state.check()
            early = state.use()
            if early is not None:
                return early  # type: ignore[no-any-return]
            if deadline < _NEVER:
                seconds, timeout = self._seconds(timeout), deadline - time.monotonic()
                if timeout <= 0:
                    name = state.owner.name
                    what = f"the value of reference {describe(state.rref_id)} was not created on worker {name}"
                    text = f"{what} within {seconds:.3g} s (phase: run)"
                    advice = "Pass a larger timeout to to_here(), or raise rpc_timeout"
                    raise RpcTimeout(f"RPC ran for more than set timeout: {text}. {advice}", name, "run")
        began_ns = time.monotonic_ns() if events.sink is not None else 0
        value = self._ask(FETCH, (), timeout)
        if began_ns:
            details = {"reference": describe(state.rref_id)}
            worker, owner = self._known.agent.info.name, state.owner.name
            events.tell("rref", "fetch", worker, began_ns, peer=owner, details=details)
        return value  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """Return the value on its owner.

        Raises:
            NotTheOwner: Another worker owns the value.
            RRefError: This reference was deleted.
            RpcTimeout: The value was not created within the default timeout of calls.
            Exception: The exception of the function that should have created the value.
        """
        state = self._state
        if isinstance(state, UserFork):
            raise NotTheOwner(
                f"Cannot call localValue() on a non-local reference. Call it on {state.owner.name}, or use to_here()"
            )
        return self._wait(state, UNSET_RPC_TIMEOUT)  # type: ignore[no-any-return]

    def _wait(self, owned: Owned, timeout: float) -> Any:
        if self._is_closed:
            raise deleted(owned.rref_id)()
        return owned.wait_value(self._deadline(timeout), self._known.agent.info.name)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, a tensor with one element, on its owner.

        Args:
            dist_autograd_ctx_id: The context. Without one, which is possible only on the owner, gradients go to ``.grad``.
            retain_graph: Keep the graph for another pass.

        Raises:
            RRefError: The value is not a tensor, or no context is given and another worker owns the value.
            AutogradError: The value has more than one element, or does not require grad.
            RuntimeError: The same, without a context.
            UnknownContext: The context was released.
            BackwardFailed: The pass failed.
            RpcTimeout: The owner did not finish within the default timeout of calls.
            OwnerLost: The owner was lost.
        """
        _backward[0](self, int(dist_autograd_ctx_id), retain_graph)

    def close(self) -> None:
        """Release the reference now instead of when this object is collected. Safe to call more than once."""
        try:
            del self._is_open
        except AttributeError:
            return
        state = self._state
        if isinstance(state, UserFork):  # other objects may share it; takes no lock, because finalizers may call this
            self._state = state.closed()
        if state.is_shared:
            self._known.on_dropped(state)

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.rpc_sync().method(*args)`` calls a method on the owner and returns its result.

        The call raises what the method raises, `RpcTimeout` or `OwnerLost`.

        Args:
            timeout: Seconds for each call; 0 for no limit; the default timeout of calls if not given.
        """
        return Proxy(lambda *call: self._ask(INVOKE, call, timeout))

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.rpc_async().method(*args)`` calls a method on the owner and returns a future.

        Args:
            timeout: Seconds for each call; 0 for no limit; the default timeout of calls if not given.
        """
        return Proxy(lambda *call: self._submit(INVOKE, call, timeout))

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Return a proxy: ``rref.remote().method(*args)`` calls a method and returns a reference to its result.

        Args:
            timeout: Seconds for each call; 0 for no limit; the default timeout of calls if not given.
        """

        def call(*parts: Any) -> RRef[Any]:
            name, args = self._prepare(parts, timeout)
            return create(self._known, name, INVOKE, args, None, timeout, keep=self)

        return Proxy(call)

    # -- private names of PyTorch's class ------------------------------------------------------------------------------

    @overload
    def _get_type(self, timeout: float = ..., blocking: Literal[True] = ...) -> type: ...
    @overload
    def _get_type(self, timeout: float = ..., *, blocking: Literal[False]) -> torch.futures.Future[type]: ...
    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, or a future for it."""
        state = self._state
        if isinstance(state, UserFork) and state.type_ is None:
            future = self._submit(TYPE_OF, (), timeout)
            if not blocking:
                return future
            state.type_ = future.wait()
        known = state.type_ if isinstance(state, UserFork) else type(self.local_value())
        if blocking:
            return known
        done: InterruptibleFuture[Any] = InterruptibleFuture()
        done.set_result(known)
        return done

    def _get_future(self) -> torch.futures.Future[None]:
        """Return a future that completes when the owner has answered the call that creates the value."""
        future: InterruptibleFuture[None] = InterruptibleFuture()
        state = self._state

        def on_done() -> None:
            error = state.error
            future.set_exception(error()) if error is not None else future.set_result(None)

        state.when_done(on_done)
        if isinstance(state, UserFork):
            self._known.watch(state)
        return future

    def __reduce__(self) -> Any:
        return _rebuild, (self._pack(),)

    def _pack(self) -> tuple[Any, ...]:
        """Return the fields from which another worker makes its own reference."""
        transfer, state, known = transfers.outgoing, self._state, self._known
        if transfer is None or transfer.tracker is not known:
            raise RRefError(
                "Can not pickle rref in python pickler, rref can only be pickled when using RPC: "
                "pass it in the arguments or the result of a call, or pickle the result of to_here()"
            )
        if transfer.peer == EVERY_WORKER:
            raise CannotSend(f"{self!r} cannot be sent in a collective; pass it to each worker in a call")
        if transfer.contents is None:
            transfer.contents = {}
        owner = state.owner_life if isinstance(state, UserFork) else known.own
        if transfer.peer == known.agent.info.name:
            if isinstance(state, Owned):
                known.share(state)
            transfer.contents[id(self)] = self  # stays alive while the message is in transit
            return state.rref_id, state.fork_id, owner, known.own, None
        if id(self) not in transfer.contents:
            transfer.contents[id(self)], maker = known.fork_for(state, transfer.peer, transfer.status)
            transfer.contents[-id(self)] = (self, maker)  # keeps it alive, so that its id is not reused
        return state.rref_id, transfer.contents[id(self)], owner, known.own, transfer.contents[-id(self)][1]

    def _deadline(self, timeout: float) -> float:
        seconds = self._seconds(timeout)
        return time.monotonic() + seconds if seconds > 0 else _NEVER

    def _seconds(self, timeout: float) -> float:
        return self._known.agent.client.default_timeout_s if timeout < 0 else timeout

    def _prepare(self, args: Sequence[Any], timeout: float) -> tuple[str, tuple[Any, ...]]:
        """Return the worker to call, and the full arguments."""
        state = self._state
        if isinstance(state, UserFork):
            state.use()
            maker = None if state.phase is ForkPhase.CONFIRMED else self._known.maker_of(state, self._deadline(timeout))
            return state.owner.name, (state.rref_id, maker, *args)
        self._known.share(state)
        return self._known.agent.info.name, (state.rref_id, None, *args)

    def _ask(self, function: str, args: Sequence[Any], timeout: float) -> Any:
        name, full = self._prepare(args, timeout)
        try:
            value = self._known.agent.client.call(name, function, full, None, None if timeout < 0 else timeout)
        except WorkerLost as lost:
            if lost.worker != name or isinstance(lost, OwnerLost):
                raise
            raise OwnerLost(lost_text(self._state.rref_id, name, lost), lost.worker, lost.last_seen) from lost
        except RRefError:
            self._state.check()  # raises the more precise reason if this worker knows it
            raise
        if isinstance(self._state, UserFork) and not self._state.is_done:  # the reply to the creation is on its way
            self._known.on_created(self._state)
        return value

    def _submit(self, function: str, args: Sequence[Any], timeout: float) -> CallFuture[Any]:
        name, full = self._prepare(args, timeout)
        future = self._known.agent.client.submit(name, function, full, None, None if timeout < 0 else timeout)
        future.keeps = self  # the value must live until the call has arrived
        return future


PyRRef = RRef


def remote(
    to: To,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Start a function on a worker, which keeps the result, and return a reference to that result.

    Exceptions of the function are raised by `RRef.to_here`.

    Args:
        to: Name, rank or `WorkerInfo`; may be this worker.
        func: The function; with ``trust="data"`` an exposed one, or its exposed name.
        args: Its arguments, captured when this function is called.
        kwargs: Its keyword arguments.
        timeout: Seconds for the function to run; 0 for no limit. A negative number means the default timeout.

    Raises:
        ConfigurationError: The timeout is NaN.
        CannotSend: The function or an argument cannot be sent.
        LimitExceeded: The message is larger than `Limits` allows.
        UnknownWorker: The cluster has no such worker.
        RpcTimeout: The worker could not be reached in time.
        WorkerLost: The worker cannot be reached.
        AuthenticationFailed: The worker refused the connection.
        NotInitialized: This process is not a worker.
    """
    known = context.here()
    name = to if type(to) is str else known.agent.peers.name_of(to)
    return create(known, name, func, args or (), kwargs, timeout)


def create(
    known: References,
    name: str,
    function: Callable[..., Any] | str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
    timeout: float,
    keep: Any = None,
) -> RRef[Any]:
    """Start the call that creates a value and return a reference to it; `keep` lives until the call has completed."""
    agent = known.agent
    is_here = name == agent.address.info.name
    state = known.make_here() if is_here else known.create_fork(agent.peers.address_of(name))
    state.keeps = keep
    rref = RRef._of(known, state)
    note = Creates(state.rref_id, state.fork_id, known.own[1])
    on_done = functools.partial(known.on_answered, state)
    timeout_s = None if timeout < 0 else timeout
    call = None
    try:
        call = agent.client.start(name, function, args, kwargs, timeout_s, on_done=on_done, notes={NOTE: note})
    except Exception as error:
        known.on_failed(state, error)
        raise
    finally:
        if call is None:  # Ctrl-C, or the error above, which takes precedence
            known.on_failed(state, RRefError(f"the call that creates the value of {rref!r} was interrupted"))
    state.call = call
    if call.is_done:  # possibly before the line above
        state.call = None
    return rref


def set_backward(run: Backward) -> None:
    """Set the implementation of `RRef.backward`, which belongs to the autograd layer."""
    _backward[:] = [run]


def _rebuild(fields: Sequence[Any]) -> RRef[Any]:
    """Rebuild a reference that arrived in a message."""
    transfer = transfers.incoming
    if transfer is None or transfer.tracker is None:
        raise RRefError("a reference can only be unpickled from a message of gradwire.rpc")
    known: References = transfer.tracker  # type: ignore[assignment]
    rref_id, fork_id, owner, sender, maker = fields
    is_valid = is_number(rref_id) and is_number(fork_id) and is_worker(owner) and is_worker(sender)
    if (
        not is_valid
        or not (maker is None or is_worker(maker))
        or known.agent.worker_info(sender[0]).name != transfer.peer
    ):
        raise ValueError("not a reference")
    if transfer.contents is None:
        transfer.contents = {}
    key = (rref_id, fork_id)
    if key not in transfer.contents:
        transfer.contents[key] = RRef._of(known, known.receive(rref_id, fork_id, owner, sender, maker))
    found: RRef[Any] = transfer.contents[key]
    return found


register_plain_type(RRef, "gradwire.RRef", RRef._pack, _rebuild)
