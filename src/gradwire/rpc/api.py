"""The public functions of `gradwire.rpc`, with PyTorch's names, for the agent of this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from gradwire.errors import (
    AlreadyInitialized,
    ConfigurationError,
    GradwireError,
    NotInitialized,
    RpcError,
    RpcTimeout,
)
from gradwire.observe import log
from gradwire.rpc import backend_registry
from gradwire.rpc.agent import Agent, start_worker
from gradwire.rpc.device_maps import check_device_maps, report_devices
from gradwire.rpc.futures import CallFuture
from gradwire.rpc.meeting_point import open_meeting_point
from gradwire.rpc.meeting_store import MeetingPointLost
from gradwire.rpc.options import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
    RpcBackendOptions,
    RpcOptions,
)
from gradwire.rpc.peers import To
from gradwire.rpc.reactor import GilMeter
from gradwire.rpc.rendezvous import Meeting, StoreDirectory
from gradwire.types import WorkerInfo

ShutDown = Callable[[bool, float], None]
"""Implements `shutdown(graceful, timeout)`."""

_agent: Agent | None = None
_shut_down: ShutDown | None = None  # of the cluster that _agent belongs to; None if it may leave on its own
_lock = threading.Lock()  # guards _agent and _shut_down
_reserved_for: str | None = None  # the worker that a cluster started this process as
_thread_local_var = threading.local()  # .future_list: futures of the innermost _wait_all block, if inside one


def is_available() -> bool:
    """Return whether this platform supports calls between workers."""
    return hasattr(os, "eventfd")


def current_agent() -> Agent:
    """Return the agent of this process.

    Raises:
        NotInitialized: This process is not a worker.
    """
    agent = _agent
    if agent is None:
        raise NotInitialized(
            "RPC has not been initialized in this process: Current RPC agent is not set! Did you initialize the RPC "
            "framework? Call gradwire.rpc.init_rpc first, or use gradwire.Cluster.local"
        )
    return agent


def set_current_agent(agent: Agent | None, shut_down: ShutDown | None = None) -> None:
    """Set the agent that the functions of this module use.

    Args:
        agent: The agent, or None to remove it.
        shut_down: What `shutdown` does instead of `Agent.shutdown`, for an agent that a cluster started.

    Raises:
        ConfigurationError: Another agent is running.
    """
    global _agent, _shut_down
    with _lock:
        if agent is not None and agent is not _agent:
            _check_no_agent()
        _agent, _shut_down = agent, shut_down
        log.process_worker = "" if agent is None else agent.info.name


def _check_no_agent() -> None:
    if _agent is not None and not _agent.is_closed:
        raise AlreadyInitialized(
            f"RPC is already initialized in this process as worker {_agent.info.name}; call shutdown() first"
            f"{guard_hint('gradwire.rpc.init_rpc(...)')}"
        )


def reserve_process(name: str | None) -> None:
    """Reserve this process for a worker of a cluster, so that `init_rpc` and `Cluster.local` are refused.

    None releases the reservation.
    """
    global _reserved_for
    _reserved_for = name


def reserved_for() -> str | None:
    """Return the name of the worker that a cluster started this process as; None in any other process."""
    return _reserved_for


def refuse_shutdown(graceful: bool, timeout: float) -> None:
    """Implement `shutdown` in a process that a cluster started as a worker, by refusing it."""
    raise RpcError(
        f"{_reserved_for} was started by a cluster's driver and can only be shut down from there: call cluster.close() "
        "or gradwire.rpc.shutdown() in the driver"
    )


def find_import() -> FrameType | None:
    """Return the frame of the module whose import runs the current code; None if no import does."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    name = frame.f_globals.get("__name__")
    is_import = frame.f_code.co_name == "<module>" and name != "__main__" and name in sys.modules
    return frame if is_import else None


def guard_hint(statement: str) -> str:
    """Return advice to append to an error, for a script that starts workers while it is imported.

    A worker that needs something from the program's script imports it, which runs all code outside the guard.

    Args:
        statement: The statement to guard.

    Returns:
        The advice; empty if no import runs the current code.
    """
    frame = find_import()
    if frame is None:
        return ""
    return (
        f".\n{frame.f_code.co_filename}, line {frame.f_lineno}, runs because this process imports the file (as "
        f"{frame.f_globals.get('__name__')}). Guard code that only the main program should run:\n\n"
        f'    if __name__ == "__main__":\n        {statement}\n'
    )


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    start_serving: bool = True,
) -> None:
    """Make this process a worker and wait for the others.

    Args:
        name: Unique in the cluster.
        backend: Accepted for compatibility with PyTorch; there is one backend.
        rank: 0 to world_size - 1. If not given, read from ``RANK`` with ``env://``, or from ``?rank=`` in `init_method`.
        world_size: Number of workers. If not given, read from ``WORLD_SIZE`` with ``env://``, or from ``?world_size=``.
            Without any of these, workers may join and leave at any time.
        rpc_backend_options: `RpcOptions`, or PyTorch's options.
        start_serving: If False, calls from other workers are held until this one calls `start_serving`, so that they do
            not reach a worker that is still setting up. They wait until their deadline.

    Raises:
        ConfigurationError: An argument is wrong, or this process is already a worker.
        DuplicateWorker: Another rank has the same name or rank.
        RendezvousFailed: The ranks could not meet: some did not arrive in time (the message lists them), one was refused, or
            the meeting point cannot be used.
        TypeError: `rpc_backend_options` is not an options object.
    """
    _check_no_agent()
    if _reserved_for is not None:
        raise AlreadyInitialized(
            f"this process is worker {_reserved_for} of a cluster and cannot become another worker"
            f"{guard_hint('gradwire.rpc.init_rpc(...)')}"
        )
    if backend is not None:
        backend_registry.find_backend(backend)  # raises if there is no such backend
    options = _as_options(rpc_backend_options)
    deadline = time.monotonic() + options.init_timeout
    while True:
        try:
            _meet(name, rank, world_size, options, deadline, start_serving)
            return
        except MeetingPointLost:  # rank 0 was just shutting down; it may come back
            if time.monotonic() >= deadline:
                raise


def _meet(
    name: str, rank: int, world_size: int | None, options: RpcOptions, deadline: float, start_serving: bool
) -> None:
    left_s = max(0.001, deadline - time.monotonic())
    point = open_meeting_point(options.init_method, rank, world_size, left_s, options.tls, options.bind_host)
    info = WorkerInfo(name, point.rank)
    directory = StoreDirectory(point)
    agent: Agent | None = None
    has_met = has_failed = False

    def leave() -> None:
        if has_met:  # otherwise it first tells the others why not
            point.store.leave()

    try:
        config = options.worker_config(point.store.agree_on_token(), point.facing_host)
        if point.world_size is None:  # otherwise rank 0 checks those of all
            check_device_maps({name: report_devices(config)}, knows_all=False)
        after = directory.last_incarnation(name)
        try:
            agent = start_worker(info, config, directory, after=after, on_close=leave)
        except ConfigurationError as error:
            directory.give_up(f"rank {info.id} ({name}) cannot start: {error}")
            raise
        if not start_serving:
            agent.server.hold_calls()
        set_current_agent(agent)  # before others can call this worker: their functions may make calls at once
        directory.publish(agent)
        if point.world_size is not None:
            Meeting(agent, directory, point).join(deadline)
        has_met = True
    except GradwireError:
        has_failed = True
        raise
    finally:
        if not has_met:
            try:
                if agent is not None:
                    set_current_agent(None)
                    agent.close()  # now, so that no other worker can still join this one
                if has_failed:
                    directory.withdraw()
            finally:
                point.store.leave()


def _as_options(options: RpcBackendOptions | None) -> RpcOptions:
    """Return these options, which may be of one of torch's own classes."""
    if options is None:
        return RpcOptions()
    if isinstance(options, RpcOptions):
        return options
    if not hasattr(options, "init_method"):
        raise TypeError(f"rpc_backend_options must be RpcOptions, or of one of torch's own classes, not {options!r}")
    names = ("rpc_timeout", "init_method", "num_worker_threads", "device_maps", "devices")
    return RpcOptions(**{name: getattr(options, name) for name in names if hasattr(options, name)})


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the cluster.

    In the program that started a `gradwire.Cluster`, this closes the cluster like `Cluster.close`: it waits for the calls
    made by this process (`timeout` seconds, or 5 if that is 0), not for the workers to call `shutdown`.

    Args:
        graceful: Wait until every live worker has called `shutdown` and all calls have completed. Without `world_size`,
            wait only for the calls that this worker has made or is serving.
        timeout: Seconds to wait for that; 0 waits as long as the other workers are alive.

    Raises:
        RpcTimeout: A worker did not call `shutdown` in time, calls are still in progress, or other workers still hold
            references to values of this one (after at most 10 s). This worker has left anyway.
        RpcError: This process is a worker of a cluster; only its driver can shut it down.
        NotInitialized: This process is not a worker.
    """
    agent = current_agent()
    if _shut_down is not None:
        _shut_down(graceful, timeout)
        return
    if graceful:
        agent.server.start_serving()  # the others cannot leave before their calls have completed
    try:
        agent.shutdown(graceful, timeout)
    finally:
        set_current_agent(None)


def start_serving() -> None:
    """Start serving calls, in a worker made with ``init_rpc(..., start_serving=False)``.

    Calls that are being held run now. In a worker that already serves calls this has no effect.

    Raises:
        NotInitialized: This process is not a worker.
    """
    current_agent().server.start_serving()


def barrier(worker_names: Sequence[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Block until every worker has called `barrier`.

    Args:
        worker_names: The workers to wait for, all of which must pass the same names; all workers if not given, which
            includes the driver of a `gradwire.Cluster`.
        timeout: Seconds; 0 for no limit; `UNSET_RPC_TIMEOUT` for the default timeout of calls.

    Raises:
        RpcTimeout: Some workers did not call it in time; the message names them.
        WorkerLost: A worker died.
        UnknownWorker: The cluster has no worker of that name.
        NotInitialized: This process is not a worker.
        ConfigurationError: This worker is not in `worker_names`, or the names are missing although `init_rpc` was called
            without `world_size`.
    """
    agent = current_agent()
    if worker_names is None and not agent.directory.is_fixed:
        raise ConfigurationError(
            "barrier() needs the names of the workers, because init_rpc was called without world_size and workers may join "
            "and leave"
        )
    try:
        _all_gather(None, worker_names, timeout)
    except RpcTimeout as error:
        raise RpcTimeout(f"{agent.info.name} timed out in rpc.barrier: {error}", error.worker, error.phase) from error


def rpc_sync(
    to: To,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run a function on another worker and return its result.

    Args:
        to: Name, rank or `WorkerInfo`.
        func: The function; with ``trust="data"`` an exposed one, or its exposed name.
        args: Its arguments, captured when this function is called.
        kwargs: Its keyword arguments.
        timeout: Seconds; 0 for no timeout; `UNSET_RPC_TIMEOUT` for the default. Inside a function called by another
            worker, it is limited to the time that call has left.

    Raises:
        ConfigurationError: The timeout is negative or not a number.
        CannotSend: The function, an argument or the result cannot be sent.
        LimitExceeded: The message is larger than `Limits` allows.
        UnknownWorker: The cluster has no such worker.
        RpcTimeout: The deadline passed; `phase` says how far the call had got.
        WorkerLost: The worker died or cannot be reached.
        AuthenticationFailed: The worker refused the connection.
        NotExposed, NoSuchFunction: The worker does not offer the function.
        NotInitialized: This process is not a worker.
        RemoteCallFailed: The function raised an exception whose type is not known here.
        Exception: The function's exception, with its own type.
    """
    agent = _agent or current_agent()
    return agent.client.call(to, func, args or (), kwargs, None if timeout == UNSET_RPC_TIMEOUT else timeout)


def rpc_async(
    to: To,
    func: Callable[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> CallFuture[Any]:
    """Start a call like `rpc_sync` and return a `torch.futures.Future`, which also has ``cancel()``.

    Raises:
        ConfigurationError: The timeout is negative or not a number.
        CannotSend: The function or an argument cannot be sent.
        LimitExceeded: The message is larger than `Limits` allows.
        UnknownWorker: The cluster has no such worker.
        RpcTimeout: The call could not be sent before the deadline.
        WorkerLost: The worker cannot be reached.
        AuthenticationFailed: The worker refused the connection.
        NotInitialized: This process is not a worker.
    """
    agent = _agent or current_agent()
    future = agent.client.submit(to, func, args or (), kwargs, None if timeout == UNSET_RPC_TIMEOUT else timeout)
    future_list = getattr(_thread_local_var, "future_list", None)
    if future_list is not None:
        future_list.append(future)
    return future


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the name and rank of a worker; of this one if no name is given.

    Raises:
        NotInitialized: This process is not a worker.
        UnknownWorker: No worker has that name.
    """
    return current_agent().worker_info(worker_name)


def get_rpc_timeout() -> float:
    """Return the default timeout of calls, in seconds.

    Raises:
        NotInitialized: This process is not a worker.
    """
    return current_agent().client.default_timeout_s


def enable_gil_profiling(flag: bool) -> None:
    """Enable or disable measuring how long this worker's threads wait for the GIL.

    `_get_debug_info` then reports the mean as ``gil_average_wait_time_us``.

    Raises:
        NotInitialized: This process is not a worker.
    """
    reactor = current_agent().reactor
    reactor.gil_meter = GilMeter() if flag else None
    reactor.expect(0.0)


def _set_rpc_timeout(seconds: float) -> None:
    current_agent().client.default_timeout_s = float(seconds)


def _is_current_rpc_agent_set() -> bool:
    return _agent is not None


_get_current_rpc_agent = current_agent


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, at the end of the block, for every `rpc_async` that this thread made inside it."""
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
    """Return every worker's object by worker name; all named workers must call this function.

    Raises:
        RpcTimeout: A worker did not call it in time; the message names it.
        WorkerLost: A worker died.
    """
    agent = current_agent()
    seconds = agent.client.default_timeout_s if timeout < 0 else timeout
    deadline = time.monotonic() + seconds if seconds > 0 else float("inf")
    return agent.gathering.all_gather(obj, worker_names, deadline)


def _barrier(worker_names: Sequence[str] | None = None) -> None:
    """Return when every named worker has called it."""
    _all_gather(None, worker_names)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Return when every worker has called it and no call is in progress on any worker.

    It does not stand for a `shutdown`, which waits until every worker has called that.
    """
    deadline = time.monotonic() + timeout if timeout > 0 else float("inf")
    current_agent().gathering.wait_all_quiet(deadline)


def _get_debug_info() -> dict[str, str]:
    """Return statistics of this worker as text."""
    agent = current_agent()
    statistics = agent.statistics()
    info = {name: str(getattr(statistics, name)) for name in statistics.__slots__}
    if agent.reactor.gil_meter is not None:
        info["gil_average_wait_time_us"] = f"{agent.reactor.gil_meter.average_us:.1f}"
    return info


def _close_at_exit() -> None:
    """Close the agent in an orderly way when a program exits without `shutdown`."""
    agent = _agent
    if agent is not None:
        agent.close()


def _forget_after_fork() -> None:
    """Drop the agent in a forked child, which is not a worker: the connections belong to its parent."""
    global _agent, _shut_down, _reserved_for
    agent, _agent, _shut_down, _reserved_for = _agent, None, None, None
    if agent is not None:
        agent.abandon_after_fork()


atexit.register(_close_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
