"""`Cluster` and `Worker`: the workers that a program started, as it uses them."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from gradwire import _interrupts
from gradwire.cluster.launcher import Launcher, WorkerHandle, WorkerState
from gradwire.cluster.local_launcher import CLUSTER, LocalOptions, start_local
from gradwire.cluster.map import MapRun
from gradwire.cluster.status import ClusterStatus, WorkerStatus, ask_calls_served
from gradwire.cluster.status_socket import StatusSocket
from gradwire.config import Limits, WorkerConfig
from gradwire.errors import NotInitialized, WorkerLost
from gradwire.nn import RemoteModule
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent, set_current_agent
from gradwire.rpc.futures import CallFuture
from gradwire.types import Trust, WorkerInfo

P = ParamSpec("P")
T = TypeVar("T")

_DEFAULTS = WorkerConfig()
_GRACE_S = 5.0
_LEAVE_S = 1.0
_QUIET_POLL_S = 0.01
_SURVEY_S = 1.0


class Worker:
    """One worker of a cluster, to call functions on."""

    def __init__(self, agent: Agent, handle: WorkerHandle, timeout_s: float | None = None) -> None:
        self._agent = agent
        self._handle = handle
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        reason = f": {self._handle.exit_reason}" if self._handle.exit_reason else ""
        return f"<Worker {self.name} rank={self.rank} pid={self.pid} {self._handle.state.value}{reason}>"

    @property
    def info(self) -> WorkerInfo:
        """Name and rank, as the functions of `gradwire.rpc` take them."""
        return self._handle.info

    @property
    def name(self) -> str:
        """The name; unique in the cluster."""
        return self._handle.info.name

    @property
    def rank(self) -> int:
        """The number, from 0."""
        return self._handle.info.id

    @property
    def pid(self) -> int | None:
        """The process id."""
        return self._handle.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return not self._handle.state.is_over

    def with_timeout(self, timeout: float | None) -> Worker:
        """Return the same worker, for calls with another deadline: ``worker.with_timeout(5).call(f)``.

        Args:
            timeout: Seconds; 0 for no deadline, None for the cluster's `rpc_timeout`.
        """
        return Worker(self._agent, self._handle, timeout)

    @overload
    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    def call(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function on this worker and return its result.

        Args:
            function: The function, or the name that it is exposed under.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Raises:
            CannotSend: An argument or the result cannot travel.
            RpcTimeout: The deadline passed.
            WorkerLost: The worker died.
            Exception: The one that the function raised, as its own type where that is known here.
        """
        return self._agent.call(self.name, function, args, kwargs, self._timeout_s)

    @overload
    def submit(self, function: str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]: ...

    @overload
    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...

    def submit(self, function: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Start a function on this worker and return a `torch.futures.Future`; takes what `call` takes.

        Raises:
            CannotSend: An argument cannot travel.
            WorkerLost: The worker died.
        """
        return self._agent.submit(self.name, function, args, kwargs, self._timeout_s)

    def module(self, module_cls: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> RemoteModule:
        """Make a module on this worker and return a handle on it, which is used like the module.

        `gradwire.nn.RemoteModule` does the same with a device and a choice of how trainers share the parameters.

        Args:
            module_cls: The class, or any function that returns a module.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Raises:
            CannotSend: An argument cannot travel.
            WorkerLost: The worker died.
        """
        return RemoteModule(self.name, module_cls, args, kwargs)


class Cluster:
    """Workers that this process, the driver, started.

        with gradwire.Cluster.local(2) as cluster:
            cluster.workers[0].call(torch.add, x, y)

    The driver is a member, too, by the name ``driver``. Leaving the block ends the workers; so do an exception, Ctrl-C
    and the death of the driver by any means.
    """

    def __init__(
        self,
        launcher: Launcher,
        agent: Agent,
        handles: Sequence[WorkerHandle],
        resources: contextlib.AbstractContextManager[object],
    ) -> None:
        """Wrap what a launcher started; leaving `resources` ends all of it. Programs use `local`."""
        self._launcher = launcher
        self._agent = agent
        self._handles = handles
        self._resources = resources
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()  # guards _is_closed
        self._is_closed = False
        self.workers = tuple(Worker(agent, handle) for handle in handles)
        atexit.register(self.close)
        agent.extensions[CLUSTER] = self
        set_current_agent(agent, self._shut_down)
        self._status_socket = StatusSocket.open(self.status)

    @property
    def name(self) -> str | None:
        """What `gradwire status` calls this cluster, ``<script>-<pid>``; None where it cannot be shown."""
        return None if self._status_socket is None else self._status_socket.name

    @classmethod
    def current(cls) -> Cluster | None:
        """Return the cluster that is open in this process, or None.

        A cell of a notebook that may run again can begin with ``cluster = Cluster.current() or Cluster.local(4)``.
        """
        try:
            agent = current_agent()
        except NotInitialized:
            return None
        cluster: Cluster | None = agent.extensions.get(CLUSTER)
        return cluster

    @classmethod
    def local(
        cls,
        n: int,
        *,
        replace: bool = False,
        names: Sequence[str] | None = None,
        num_worker_threads: int = _DEFAULTS.num_worker_threads,
        rpc_timeout: float = _DEFAULTS.rpc_timeout_s,
        threads_per_worker: int = 1,
        start_timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        trust: Trust = "code",
        limits: Limits | None = None,
    ) -> Cluster:
        """Start workers on this machine.

        They have the driver's working folder, environment and import path. What they print appears in the driver's
        output with their name in front. torch's random numbers differ between workers and repeat from run to run.
        The first cluster of a process takes about two seconds, for importing torch; later ones start in milliseconds.

        Args:
            n: How many.
            replace: Close the cluster that is open in this process, if there is one, and take its place. Calls that are
                under way on its workers fail. Without it, a second cluster is an error.
            names: Their names; ``worker0``, ``worker1`` ... if not given.
            num_worker_threads: Functions that one worker runs at once; those that wait for another call do not count.
            rpc_timeout: Seconds that a call may take if it names no other time; 0 for no deadline.
            threads_per_worker: Threads of one torch operation.
            start_timeout: Seconds that all of this may take.
            env: Environment variables for the workers, on top of the driver's.
            imports: Modules that every worker imports before it serves anything.
            trust: ``"code"`` lets members send functions to each other. With ``"data"`` they may only call what is
                exposed, by modules named in `imports`.
            limits: What members accept from each other, e.g. ``Limits(frame_bytes=4 << 30)`` for arguments of more than
                1 GiB.

        Raises:
            ConfigurationError: An option is wrong, a cluster is open already, or this is not Linux.
            WorkerStartFailed: A worker did not get ready; the message has what it printed.
        """
        options = LocalOptions(
            num_workers=n,
            names=names,
            threads_per_worker=threads_per_worker,
            start_timeout_s=start_timeout,
            environment=env,
            imports=imports,
            config=WorkerConfig(
                num_worker_threads=num_worker_threads,
                rpc_timeout_s=rpc_timeout,
                trust=trust,
                limits=_DEFAULTS.limits if limits is None else limits,
            ),
        )
        if replace and (old := cls.current()) is not None:
            old.close(grace=0)
        return cls(*start_local(options))

    def __repr__(self) -> str:
        living = sum(worker.is_alive for worker in self.workers)
        state = "closed" if self._is_closed else f"{living} of {len(self.workers)} workers alive"
        return f"<Cluster {state}>"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(_GRACE_S if error is None else 0.0)

    def map(self, function: Callable[[Any], T], items: Iterable[Any], timeout: float | None = None) -> list[T]:
        """Call a function once for each item, spread over the workers that are alive.

        A worker has up to two items at a time, in two threads. A progress bar appears on a terminal, or in a
        notebook with ipywidgets, if it takes longer than a second.

        Args:
            function: Called with one item.
            items: Read as workers become free.
            timeout: Seconds for the whole; without it each call has the cluster's `rpc_timeout`.

        Returns:
            The results in the order of the items.

        Raises:
            RpcTimeout: The time is up.
            WorkerLost: No worker is alive, or one died on the way.
            Exception: The first that a call raised; the rest is cancelled.
        """
        alive = [worker for worker in self.workers if worker.is_alive]
        if not alive:
            raise WorkerLost("no worker of this cluster is alive; Cluster.status() shows how they ended")
        return MapRun(alive, function, items, timeout).run()

    def status(self) -> ClusterStatus:
        """Return one record for each worker, with its state, memory and calls; printed, it is a table."""
        running = [handle.info.name for handle in self._handles if handle.state is WorkerState.RUNNING]
        served = ask_calls_served(self._agent, running, _SURVEY_S)
        return ClusterStatus(
            WorkerStatus(
                name=handle.info.name,
                rank=handle.info.id,
                pid=handle.pid,
                state=handle.state.value,
                uptime_s=handle.uptime_s,
                rss_bytes=self._launcher.rss_bytes(handle),
                calls_served=served.get(handle.info.name),
                exit_reason=handle.exit_reason,
            )
            for handle in self._handles
        )

    def close(self, grace: float = _GRACE_S) -> None:
        """End all workers. May be called again.

        Args:
            grace: Seconds that calls of the driver which are under way get to end. Workers then have a moment to leave
                in good order, and are killed if they do not.
        """
        with self._lock:
            is_copy = os.getpid() != self._owner_pid  # a process that the driver forked must not end its workers
            if self._is_closed or is_copy:
                return
            self._is_closed = True
        # The resources end what is left if Ctrl-C ends one of the waits.
        with _interrupts.installed(), self._resources, self._status_socket or contextlib.nullcontext():
            atexit.unregister(self.close)
            deadline = time.monotonic() + grace
            # The work of the other workers ends with the driver's calls, which began it all.
            while not self._agent.is_quiet and time.monotonic() < deadline:
                _interrupts.sleep(_QUIET_POLL_S)
            self._launcher.terminate(self._handles, max(_LEAVE_S, deadline - time.monotonic()))

    def _shut_down(self, graceful: bool, timeout: float) -> None:
        """Do what `gradwire.rpc.shutdown` asks for in the driver."""
        self.close((timeout or _GRACE_S) if graceful else 0.0)
