"""The functions that people call: PyTorch's names, on the agent of this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gradwire.errors import AlreadyInitialized, ConfigurationError, NotInitialized
from gradwire.rpc import backend_registry
from gradwire.rpc.agent import Agent
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.gil import GilMeter
from gradwire.rpc.meeting_point import MeetingPointLost, agree_on_token, open_meeting_point
from gradwire.rpc.options import (
    DEFAULT_RPC_TIMEOUT_SEC,
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
    RpcBackendOptions,
    RpcOptions,
)
from gradwire.rpc.peer_table import To
from gradwire.rpc.rendezvous import Meeting
from gradwire.rpc.store_directory import StoreDirectory
from gradwire.rpc.worker import start_worker
from gradwire.types import WorkerInfo

_agent: Agent | None = None
_lock = threading.Lock()  # guards _agent
_thread_local_var = threading.local()  # .future_list: futures of the innermost _wait_all block, if inside one
_PREFIX = "gradwire"


def is_available() -> bool:
    """Whether calls between workers can be made on this platform."""
    return hasattr(os, "eventfd")


def current_agent() -> Agent:
    """The agent of this process.

    Raises:
        NotInitialized: There is none.
    """
    agent = _agent
    if agent is None:
        raise NotInitialized(
            "RPC has not been initialized in this process: Current RPC agent is not set! Did you initialize the RPC "
            "framework? Call gradwire.rpc.init_rpc first, or use gradwire.Cluster.local"
        )
    return agent


def set_current_agent(agent: Agent | None) -> None:
    """Makes an agent the one that the functions of this module use.

    Raises:
        ConfigurationError: Another one is running.
    """
    global _agent
    with _lock:
        if agent is not None and _agent is not None and not _agent.is_closed:
            raise AlreadyInitialized(
                f"RPC is already initialized in this process, as worker {_agent.info.name}; call shutdown() first"
            )
        _agent = agent


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker and waits for the others.

    Args:
        name: Unique in the cluster.
        backend: For programs written for PyTorch; there is one backend.
        rank: 0 to world_size - 1; from ``RANK`` if not given.
        world_size: Number of workers; from ``WORLD_SIZE`` if not given; without either, workers come and go.
        rpc_backend_options: `RpcOptions` or PyTorch's.

    Raises:
        ConfigurationError: An argument is wrong, or this process is a worker already.
        RendezvousFailed: Not every rank arrived in time; says which.
    """
    set_current_agent(None if _agent is None or _agent.is_closed else _agent)
    if backend is not None:
        backend_registry.find_backend(backend)  # raises if there is no such backend
    options = _as_options(rpc_backend_options)
    deadline = time.monotonic() + options.init_timeout
    while True:
        try:
            _meet(name, rank, world_size, options, deadline)
            return
        except MeetingPointLost:  # rank 0 was just leaving; it may come back
            if time.monotonic() >= deadline:
                raise


def _meet(name: str, rank: int, world_size: int | None, options: RpcOptions, deadline: float) -> None:
    left_s = max(0.001, deadline - time.monotonic())
    point = open_meeting_point(options.init_method, rank, world_size, left_s)
    directory = StoreDirectory(point, _PREFIX)
    info = WorkerInfo(name, point.rank)
    token = agree_on_token(point, _PREFIX)
    try:
        config, after = options.worker_config(token, point.facing_host), directory.last_incarnation(name)
        agent = start_worker(info, config, directory, after=after, on_close=lambda: directory.withdraw(info))
    except ConfigurationError as error:
        StoreDirectory(point, _PREFIX).give_up(f"rank {info.id} ({name}) cannot start: {error}")
        raise
    try:
        set_current_agent(agent)  # before others know of it: what they call may make calls of its own at once
        directory.publish(agent)
        if point.world_size is not None:
            Meeting(agent, directory, point).join(deadline)
    except BaseException:
        set_current_agent(None)
        agent.close()
        raise


def _as_options(options: RpcBackendOptions | None) -> RpcOptions:
    if options is None:
        return RpcOptions()
    if isinstance(options, RpcOptions):
        return options
    timeout = getattr(options, "rpc_timeout", DEFAULT_RPC_TIMEOUT_SEC)
    seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else float(timeout)
    more = {"num_worker_threads": options.num_worker_threads} if hasattr(options, "num_worker_threads") else {}
    return RpcOptions(rpc_timeout=seconds, init_method=options.init_method, **more)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the cluster.

    Args:
        graceful: Wait until every worker has called `shutdown` and all calls have ended. A worker that died is not
            waited for.
        timeout: Seconds to wait for that; 0 waits as long as the others live.

    Raises:
        RpcTimeout: Somebody did not come in time; this worker has left all the same.
        NotInitialized: This process is no worker.
    """
    agent = current_agent()
    try:
        agent.shutdown(graceful, timeout)
    finally:
        set_current_agent(None)


def rpc_sync(
    to: To,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs a function on another worker and returns its result.

    Args:
        to: Name, rank or `WorkerInfo`.
        func: The function; with ``trust="data"`` an exposed one, or its exposed name.
        args: Its arguments, captured now.
        kwargs: Its keyword arguments.
        timeout: Seconds; 0 for none; `UNSET_RPC_TIMEOUT` for the default. Inside a function that was itself called,
            never more than what that call has left.

    Raises:
        ConfigurationError: The timeout is negative or not a number.
        CannotSend: An argument cannot travel.
        RpcTimeout: The deadline passed; `phase` says where the call was.
        WorkerLost: The worker died or cannot be reached.
        RemoteCallFailed: The function raised something whose type is not known here.
        Exception: What the function raised, as its own type.
    """
    agent = _agent or current_agent()
    return agent.caller.call(to, func, args or (), kwargs, None if timeout == UNSET_RPC_TIMEOUT else timeout)


def rpc_async(
    to: To,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> CallFuture[Any]:
    """As `rpc_sync`, but returns a `torch.futures.Future` at once; it also has ``cancel()``.

    Raises:
        ConfigurationError: The timeout is negative or not a number.
        CannotSend: An argument cannot travel.
        RpcTimeout: No connection, or no room on it, before the deadline.
        WorkerLost: The worker cannot be reached.
    """
    agent = _agent or current_agent()
    future = agent.caller.submit(to, func, args or (), kwargs, None if timeout == UNSET_RPC_TIMEOUT else timeout)
    future_list = getattr(_thread_local_var, "future_list", None)
    if future_list is not None:
        future_list.append(future)
    return future


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Name and rank of a worker; of this one if none is named.

    Raises:
        UnknownWorker: There is none of that name.
    """
    return current_agent().worker_info(worker_name)


def get_rpc_timeout() -> float:
    """The deadline in seconds of calls that name none."""
    return current_agent().caller.default_timeout_s


def enable_gil_profiling(flag: bool) -> None:
    """Switches on or off that this worker measures how long its threads wait for Python's global lock.

    `_get_debug_info` then has the mean as ``gil_average_wait_time_us``.
    """
    reactor = current_agent().reactor
    reactor.gil_meter = GilMeter() if flag else None
    reactor.expect(0.0)


def _set_rpc_timeout(seconds: float) -> None:
    current_agent().caller.default_timeout_s = float(seconds)


def _is_current_rpc_agent_set() -> bool:
    return _agent is not None


def _get_current_rpc_agent() -> Agent:
    return current_agent()


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at the end of the block, for every `rpc_async` made inside it by this thread."""
    outer = getattr(_thread_local_var, "future_list", None)
    futures: list[CallFuture[Any]] = []
    _thread_local_var.future_list = futures
    try:
        yield
    finally:
        if outer is None:
            del _thread_local_var.future_list
        else:
            _thread_local_var.future_list = outer
    for future in futures:
        future.wait()


def _all_gather(
    obj: Any, worker_names: Sequence[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Everybody's object, by worker name; every named worker must call it.

    Raises:
        RpcTimeout: Somebody did not; says who.
        WorkerLost: Somebody died.
    """
    agent = current_agent()
    seconds = agent.caller.default_timeout_s if timeout < 0 else timeout
    deadline = time.monotonic() + seconds if seconds > 0 else float("inf")
    return agent.gathering.all_gather(obj, worker_names, deadline)


def _barrier(worker_names: Sequence[str] | None = None) -> None:
    """Returns when every named worker has called it."""
    _all_gather(None, worker_names)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Returns when every worker has called it and no call is under way anywhere."""
    deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
    current_agent().gathering.wait_all_quiet(deadline)


def _get_debug_info() -> dict[str, str]:
    """Numbers about this worker, as text."""
    agent = current_agent()
    statistics = agent.statistics()
    info = {name: str(getattr(statistics, name)) for name in statistics.__slots__}
    if agent.reactor.gil_meter is not None:
        info["gil_average_wait_time_us"] = f"{agent.reactor.gil_meter.average_us:.1f}"
    return info


def _close_at_exit() -> None:
    """A program that ends without `shutdown` still says goodbye."""
    agent = _agent
    if agent is not None:
        agent.close()


def _forget_after_fork() -> None:
    """A forked child is not a worker; the connections are its parent's."""
    global _agent
    agent, _agent = _agent, None
    if agent is not None:
        agent.abandon_after_fork()


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
