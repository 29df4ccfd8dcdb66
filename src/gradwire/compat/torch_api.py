"""Torch's functions and classes where programs rely on details that gradwire's own lack: checks, texts, private names.

Everything here has torch's name for it; `gradwire.compat.tables` lists the modules. All other names are gradwire's own.
Programs and tests replace some of these functions in `torch.distributed.rpc.api`, so they are looked up there each time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from gradwire import autograd, rpc, rref
from gradwire._interrupts import interruptible
from gradwire._torch import call_when_done, qualified_name, wait_for
from gradwire.compat.profiler import ProfiledCall, is_profiling, make_event, run_profiled
from gradwire.errors import InvalidName, NotTheOwner, RpcError, RpcTimeout, RRefError, WorkerLost
from gradwire.rpc.agent import Agent, check_name
from gradwire.rpc.backend_registry import BackendType
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.options import RpcBackendOptions, RpcOptions, TensorPipeRpcBackendOptions
from gradwire.rpc.peers import To
from gradwire.rref import RRef
from gradwire.rref import context as rref_context
from gradwire.rref.api import Proxy
from gradwire.rref.values import Owned
from gradwire.types import MAX_COUNTER, creator_of, first_counter
from gradwire.types import WorkerInfo as GradwireWorkerInfo

AUTOGRAD_NAMESPACE = "torch::distributed::autograd::"
_MAX_NAME = 128

Function = Callable[..., Any]


@interruptible
def _run_users(function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# -- the agent -------------------------------------------------------------------------------------------------------------


class RpcAgent:
    """The interface of torch's agents."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._agent!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RpcAgent) and other._agent is self._agent

    def __hash__(self) -> int:
        return hash(self._agent)

    def get_worker_info(self, worker: str | int | None = None) -> GradwireWorkerInfo:
        return self._agent.worker_info(worker)

    def get_worker_infos(self) -> list[GradwireWorkerInfo]:
        return self._agent.directory.infos()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no call is running anywhere; with `shutdown`, leave the cluster."""
        rpc._wait_all_workers(timeout)
        if shutdown:
            self.shutdown()

    def sync(self) -> None:
        rpc._barrier()

    def shutdown(self) -> None:
        self._agent.close()

    def get_debug_info(self) -> dict[str, str]:
        """Return numbers about the agent, as text, under torch's names where it has one."""
        numbers = self._agent.statistics()
        info = {f"agent.{name}": str(getattr(numbers, name)) for name in numbers.__slots__}
        info["agent.thread_pool_size"] = str(self._agent.config.num_worker_threads)
        info["agent.num_idle_threads"] = str(max(0, numbers.num_threads - numbers.num_running))
        info["agent.num_pending_requests"] = str(numbers.num_pending)
        meter = self._agent.reactor.gil_meter
        if meter is not None:
            info["agent.gil_average_wait_time_us"] = f"{meter.average_us:.1f}"
        return info

    get_metrics = get_debug_info

    def _get_device_map(self, dst: Any) -> dict[Any, Any]:
        return {}


class TensorPipeAgent(RpcAgent):
    """The agent, under the name of torch's default agent."""

    @property
    def is_static_group(self) -> bool:
        return self._agent.directory.is_fixed

    def _get_backend_options(self) -> rpc.TensorPipeRpcBackendOptions:
        config = self._agent.config
        return rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=config.num_worker_threads, rpc_timeout=self._agent.client.default_timeout_s
        )


class _Instances(type):
    """Makes `isinstance` accept gradwire's objects."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, GradwireWorkerInfo)


class WorkerInfo(metaclass=_Instances):
    """Creates gradwire's `WorkerInfo`, after a check of the name."""

    def __new__(cls, name: str, id: int) -> GradwireWorkerInfo:  # type: ignore[misc]
        if (num_bytes := len(name.encode())) >= _MAX_NAME:
            raise InvalidName(f"a worker's name must be shorter than {_MAX_NAME} bytes, not {num_bytes}: {name!r}")
        check_name(name, _MAX_NAME)
        return GradwireWorkerInfo(name, id)


def _get_current_rpc_agent() -> RpcAgent:
    return TensorPipeAgent(rpc.current_agent())


def _get_debug_info() -> dict[str, str]:
    """Return numbers about references, agent and autograd of this worker, as text."""
    agent = _get_current_rpc_agent()
    return {**_rref_context_get_debug_info(), **agent.get_debug_info(), **autograd._get_debug_info()}


# -- starting and ending a worker ------------------------------------------------------------------------------------------


def _api() -> Any:
    return importlib.import_module("torch.distributed.rpc.api")


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Call `gradwire.rpc.init_rpc`, with torch's type checks, or a backend that the program registered.

    Raises:
        TypeError: The backend or its options have the wrong type.
    """
    options = rpc_backend_options
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError(f"Argument backend must be a member of BackendType, not {backend!r}")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError(f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {options!r}")
    if backend is None and not isinstance(options, RpcOptions | None):
        raise TypeError(f"Could not infer backend for options {options}; pass backend=")
    backend = backend or BackendType.TENSORPIPE
    if backend not in (BackendType.TENSORPIPE, BackendType.GRADWIRE):
        _start_other(backend, name, rank, world_size, options)
        return
    if backend is BackendType.TENSORPIPE and not isinstance(options, RpcOptions | None):
        wanted = TensorPipeRpcBackendOptions.__name__
        raise TypeError(f"`rpc_backend_options` must be a `{wanted}`, not {type(options).__name__}")
    rpc.init_rpc(name, backend, rank, world_size, options)


def _start_other(
    backend: BackendType, name: str, rank: int, world_size: int | None, options: RpcBackendOptions | None
) -> None:
    options = options or rpc.backend_registry.construct_rpc_backend_options(backend)
    store, rank, world = next(rendezvous(options.init_method, rank, -1 if world_size is None else world_size))
    start = backend.value.init_backend_handler
    agent = _run_users(start, store=store, name=name, rank=rank, world_size=world, rpc_backend_options=options)
    _api()._set_and_start_rpc_agent(agent)


def _init_rpc_backend(
    backend: BackendType = BackendType.TENSORPIPE,
    store: Any = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Call `init_rpc`. The store is not used: the workers meet at the address in the options."""
    init_rpc(name, backend, rank, world_size, rpc_backend_options)


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Make an agent the current one; gradwire's own agents are already started."""
    rpc.set_current_agent(agent._agent if isinstance(agent, RpcAgent) else agent)


def _reset_current_rpc_agent() -> None:
    rpc.set_current_agent(None)


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = rpc.UNSET_RPC_TIMEOUT) -> None:
    rref_context.here().delete_all()


def shutdown(graceful: bool = True, timeout: float = rpc.DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Call `gradwire.rpc.shutdown`, with steps that a program has replaced.

    Raises:
        RRefError: A replaced step left references behind, and leaks are not ignored.
    """
    api = _api()
    wait, delete = api._wait_all_workers, api._delete_all_user_and_unforked_owner_rrefs
    is_whole = wait is rpc._wait_all_workers and delete is _delete_all_user_and_unforked_owner_rrefs
    if is_whole or not graceful:
        rpc.shutdown(graceful, timeout)
        return
    try:
        _run_users(wait, timeout)
        _run_users(delete)
        leak = None if api._ignore_rref_leak else _find_leak()
        with contextlib.suppress(RpcError):  # the others check, too, before any worker leaves
            rpc._wait_all_workers(timeout)
        if leak is not None:
            raise leak
    finally:
        rpc.shutdown(graceful=False)


def _find_leak() -> RRefError | None:
    known = rref_context.here()
    held = known.num_held
    holders = ", ".join(f"{name} ({count})" for name, count in known.holders().items())
    return (
        RRefError(f"Leaking RRefs: other workers still have references to values of this one ({held}): {holders}")
        if held
        else None
    )


# -- calls -----------------------------------------------------------------------------------------------------------------


def rpc_sync(
    to: To,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> Any:
    """Call `gradwire.rpc.rpc_sync`, with events for torch's profiler."""
    func = _callable(func)
    if is_profiling():
        return _call_profiled("sync", to, func, args, kwargs, timeout).wait()
    return rpc.rpc_sync(to, func, args, kwargs, timeout)


def rpc_async(
    to: To,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Call `gradwire.rpc.rpc_async`, with events for torch's profiler; an unreachable worker fails the future."""
    func = _callable(func)
    if is_profiling():
        return _call_profiled("async", to, func, args, kwargs, timeout)
    try:
        return rpc.rpc_async(to, func, args, kwargs, timeout)
    except (RpcTimeout, WorkerLost) as error:  # with torch, the future has the error
        failed: InterruptibleFuture[Any] = InterruptibleFuture()
        failed.set_exception(error)
        return failed


def remote(
    to: To,
    func: Function,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = rpc.UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Call `gradwire.rpc.remote`, with events for torch's profiler."""
    func = _by_name(func)
    if not is_profiling():
        return rref.remote(to, func, args, kwargs, timeout)
    call = ProfiledCall("remote", to, func)
    made = rref.remote(to, run_profiled, call.arguments(args, kwargs), timeout=timeout)
    _profiled[made] = call.follow(made._get_future())
    return made


def _callable(function: Function) -> Function:
    if not callable(function):
        raise TypeError(f"function should be callable, not {function!r}")
    return _by_name(function)


def _by_name(function: Function) -> Function:
    """Return the function; for one of TorchScript, which cannot be sent, a function that finds it by name."""
    if not isinstance(function, torch.jit.ScriptFunction):
        return function
    return functools.partial(_run_script, qualified_name(function))


def _run_script(name: str, *args: Any, **kwargs: Any) -> Any:
    module, _, attribute = name.removeprefix("__torch__.").rpartition(".")
    return _run_users(getattr(importlib.import_module(module), attribute), *args, **kwargs)


def _call_profiled(
    mode: str, to: To, function: Function, args: Any, kwargs: Any, timeout: float
) -> torch.futures.Future[Any]:
    call = ProfiledCall(mode, to, function)
    return call.follow(rpc.rpc_async(to, run_profiled, call.arguments(args, kwargs), timeout=timeout))


# -- references ------------------------------------------------------------------------------------------------------------

_types: weakref.WeakKeyDictionary[Any, torch.futures.Future[type]] = weakref.WeakKeyDictionary()
_profiled: weakref.WeakKeyDictionary[Any, torch.futures.Future[Any]] = weakref.WeakKeyDictionary()  # have their events
# The methods that `RREF_METHODS` replaces.
_gradwire_confirmed_by_owner: Function = RRef.confirmed_by_owner
_gradwire_get_type: Function = RRef._get_type
_gradwire_local_value: Function = RRef.local_value
_gradwire_remote: Function = RRef.remote


def _get_profiling_future(reference: RRef[Any]) -> torch.futures.Future[Any] | None:
    return _profiled.get(reference)


def _set_profiling_future(reference: RRef[Any], future: torch.futures.Future[Any]) -> None:
    _profiled[reference] = future


def _to_text(reference: RRef[Any]) -> str:
    state = reference._state
    number = _unique_id(reference, state.rref_id)
    if isinstance(state, Owned):
        return f"OwnerRRef({number})"
    return f"UserRRef(RRefId = {number}, ForkId = {_unique_id(reference, state.fork_id)})"


def _unique_id(reference: RRef[Any], number: int) -> str:
    agent, rank = reference._known.agent, creator_of(number)
    is_own = rank == agent.info.id
    incarnation = agent.address.incarnation if is_own else agent.incarnation_of(agent.worker_info(rank).name)
    return f"GloballyUniqueId(created_on={rank}, local_id={(number & MAX_COUNTER) - first_counter(incarnation)})"


def _local_value(reference: RRef[Any]) -> Any:
    state = reference._state
    if isinstance(state, Owned):
        return _gradwire_local_value(reference)
    rref_id, fork_id = _unique_id(reference, state.rref_id), _unique_id(reference, state.fork_id)
    raise NotTheOwner(
        f"For UserRRef(rref_id={rref_id}, fork_id={fork_id}), can't call localValue() on user "
        f"{reference._known.agent.info}. Call it on owner {state.owner}"
    )


def _confirmed_by_owner(reference: RRef[Any]) -> bool:
    """Return whether the owner knows this reference. torch waits for that before it runs a function; here it is now."""
    state = reference._state
    if not isinstance(state, Owned) and not state.is_first:
        with contextlib.suppress(RRefError, RpcTimeout):
            reference._known.maker_of(state, reference._deadline(rpc.UNSET_RPC_TIMEOUT))
    found: bool = _gradwire_confirmed_by_owner(reference)
    return found


def _get_type(reference: RRef[Any], timeout: float = rpc.UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """Return the type of the value, or a future for it; asked for once, with an event for torch's profiler."""
    state = reference._state
    if isinstance(state, Owned) or (blocking and state.type_ is not None):
        return _gradwire_get_type(reference, timeout, blocking=blocking)
    if not blocking and (known := _types.get(reference)) is not None:
        return known
    with make_event("async", _rref_typeof_on_owner, state.owner):
        found = _gradwire_get_type(reference, timeout, blocking=blocking)
    if not blocking:
        _types[reference] = found
        found.add_done_callback(functools.partial(_on_type, weakref.ref(reference), state))
    return found


def _rref_typeof_on_owner() -> None:
    """Provide the name of the profiler's event, which is that of torch's function."""


def _on_type(reference: Callable[[], Any], state: Any, future: torch.futures.Future[type]) -> None:
    try:
        state.type_ = wait_for(future)
    except Exception:  # the next one may ask again
        _types.pop(reference(), None)


def _remote(reference: RRef[Any], timeout: float = rpc.UNSET_RPC_TIMEOUT) -> Proxy:
    """Implement ``rref.remote()``: torch checks the value's type first, so that an unknown method fails at once."""

    def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        getattr(_get_type(reference, timeout), name)
        return getattr(_gradwire_remote(reference, timeout), name)(*args, **kwargs)

    return Proxy(call)


def _serialize(reference: RRef[Any]) -> Any:
    """Return the fields for another worker's reference; only inside a message."""
    state = reference._state
    if not isinstance(state, Owned) and state.error is not None:
        raise RRefError(f"Cannot call fork an UserRRef after deletion. It was {reference!r}")
    return reference._pack()


RREF_METHODS: dict[str, Function] = {
    "__str__": _to_text,
    "_get_profiling_future": _get_profiling_future,
    "_get_type": _get_type,
    "_serialize": _serialize,
    "_set_profiling_future": _set_profiling_future,
    "confirmed_by_owner": _confirmed_by_owner,
    "local_value": _local_value,
    "remote": _remote,
}
"""Methods of `RRef` while compat is installed."""


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return numbers about the references of this worker, as text, under torch's names."""
    known = rref_context.here()
    counts = known.statistics()
    return {
        "num_owner_rrefs": str(known.num_held),
        "num_forks": str(sum(known.holders().values())),
        "num_pending_futures": str(counts.num_messages),
        "num_pending_users": str(counts.num_pending + counts.num_children),
    }


# -- autograd and futures --------------------------------------------------------------------------------------------------


def _init(worker_id: int) -> None:
    """Do nothing: every worker of gradwire has distributed autograd from the start."""


def backward(context_id: Any, roots: Any, retain_graph: bool = False) -> None:
    """Call `gradwire.autograd.backward`, with torch's profiler event and type checks.

    Raises:
        TypeError: An argument has the wrong type.
    """
    if not isinstance(context_id, int) or not isinstance(roots, Sequence | torch.Tensor):
        raise TypeError(
            f"backward(): incompatible function arguments: it takes a context id and a list of tensors, not "
            f"{type(context_id).__name__} and {type(roots).__name__}"
        )
    with torch.autograd.profiler.record_function(f"{AUTOGRAD_NAMESPACE}backward"):
        autograd.backward(context_id, roots, retain_graph)


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Return the values of all futures, in their order; an error is raised at once, without waiting for the others."""
    first_failed: InterruptibleFuture[Any] = InterruptibleFuture()  # None once all are done and none has failed
    left = list(futures)  # a removal from a list is one step, so no lock is needed

    def on_done(future: torch.futures.Future[Any]) -> None:
        try:
            wait_for(future)
        except Exception:
            finish(future)
        left.pop()
        if not left:
            finish(None)

    def finish(failed: torch.futures.Future[Any] | None) -> None:
        if not first_failed.done():
            with contextlib.suppress(RuntimeError):  # another thread was faster
                first_failed.set_result(failed)

    for future in futures:
        call_when_done(future, on_done)
    if not futures:
        return []
    failed = first_failed.wait()
    return [wait_for(future) for future in ([failed] if failed is not None else futures)]
