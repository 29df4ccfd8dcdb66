"""`Cluster`: the workers that a program started."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import torch

from gradwire import _interrupts
from gradwire.cluster.driver import CLUSTER, DRIVER, MAX_WORKERS, check_count, check_names
from gradwire.cluster.launcher import WorkerState
from gradwire.cluster.local_launcher import LocalOptions, start_local
from gradwire.cluster.log_level import level_of_workers, tell_level
from gradwire.cluster.map import MapRun
from gradwire.cluster.monitor import Member, MembershipEvent, Monitor
from gradwire.cluster.ray_placement import Strategy
from gradwire.cluster.status import ClusterStatus, WorkerStatus
from gradwire.cluster.status_socket import StatusSocket
from gradwire.cluster.supervision import Restart, SupervisionOptions
from gradwire.cluster.trace import DEFAULT_EVENTS, PathLike, TimedTraces, Trace
from gradwire.cluster.usage import CallRates, Usage, ask_usage, measure_usage
from gradwire.cluster.worker import Worker
from gradwire.config import Limits, TlsKeys, WorkerConfig
from gradwire.errors import ConfigurationError, NotInitialized, UnknownWorker, WorkerLost
from gradwire.rpc.api import current_agent, set_current_agent
from gradwire.rpc.options import DeviceMap
from gradwire.types import Trust
from gradwire.versions import GRADWIRE_VERSION
from gradwire.wire.devices import read_device_map

if TYPE_CHECKING:
    from gradwire.cluster.cluster_metrics import ClusterMetrics, ScrapedMember
    from gradwire.dashboard.web_server import Dashboard

T = TypeVar("T")

_DEFAULTS = WorkerConfig()
_GRACE_S = 5.0
_LEAVE_S = 1.0
_QUIET_POLL_S = 0.01
_SURVEY_S = 1.0


def _config(
    num_worker_threads: int,
    rpc_timeout: float,
    trust: Trust,
    limits: Limits | None,
    device_maps: Mapping[str, DeviceMap] | None,
    port_range: tuple[int, int] | None = None,
) -> WorkerConfig:
    maps = {to: read_device_map(to, devices) for to, devices in (device_maps or {}).items()}
    return WorkerConfig(
        num_worker_threads=num_worker_threads,
        rpc_timeout_s=rpc_timeout,
        trust=trust,
        limits=_DEFAULTS.limits if limits is None else limits,
        bind_port=port_range or 0,
        device_maps={to: {str(here): str(there) for here, there in found.items()} for to, found in maps.items()},
    )


class Cluster:
    """A group of workers started by this process, the driver.

    Example::

        with gradwire.Cluster.local(2) as cluster:
            cluster.workers[0].call(torch.add, x, y)

    The driver is a member as well, named ``driver``. The workers are stopped when the block is left, normally or by an
    exception or Ctrl-C, and when the driver dies for any reason.
    """

    def __init__(self, monitor: Monitor, resources: contextlib.AbstractContextManager[object]) -> None:
        """Wrap the workers that a monitor started; leaving `resources` stops all of them. Programs use `local`."""
        self._monitor = monitor
        self._agent = monitor.agent
        self._resources = resources
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()  # guards _is_closed, _dashboard and _metrics
        self._metrics: ClusterMetrics | None = None
        self._is_closed = False
        self._dashboard: Dashboard | None = None
        # Called before the workers are stopped after an exception.
        self._on_failure: Callable[[BaseException], None] | None = None
        atexit.register(self.close)
        self._agent.extensions[CLUSTER] = self
        set_current_agent(self._agent, self._shut_down)
        self._opened_at = time.monotonic()
        self._rates = CallRates()
        self._log_level: int | None = None  # of the workers; None if it was never set
        self._timed_traces = TimedTraces(self.trace)
        operations: dict[str, Callable[..., str]] = {
            "dashboard": lambda _is_gone: self.dashboard().url,
            "trace": self._timed_traces.record,
        }
        self._status_socket = StatusSocket.open(self.status, self._driver_status, operations)
        if (level := level_of_workers()) is not None:
            self._set_log_level(level)

    @property
    def name(self) -> str | None:
        """Name of this cluster in `gradwire status`, ``<script>-<pid>``; None if it cannot be shown there."""
        return None if self._status_socket is None else self._status_socket.name

    @classmethod
    def current(cls) -> Cluster | None:
        """Return the open cluster of this process, or None.

        A notebook cell that may be run again can start with ``cluster = Cluster.current() or Cluster.local(4)``.
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
        roles: Mapping[str, int] | None = None,
        num_worker_threads: int = _DEFAULTS.num_worker_threads,
        rpc_timeout: float = _DEFAULTS.rpc_timeout_s,
        threads_per_worker: int = 1,
        start_timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        trust: Trust = "code",
        limits: Limits | None = None,
        device_maps: Mapping[str, DeviceMap] | None = None,
        restart: Restart = "never",
        on_restart: Callable[[Worker], object] | None = None,
        lost_after: float | None = None,
        max_restarts: int = 10,
    ) -> Cluster:
        """Start workers on this machine.

        They inherit the driver's working folder, environment and import path. Their output appears in the driver's
        output, prefixed with their name. torch's random seeds differ between workers and are the same in every run.
        The first cluster of a process takes about two seconds to import torch; later ones start in milliseconds.

        Args:
            n: Number of workers.
            replace: Close the open cluster of this process, if any, and take its place. Calls in progress on its workers
                fail. Otherwise, a second cluster is an error.
            names: Names of the workers; ``worker0``, ``worker1`` ... if not given.
            roles: Number of workers for each role, instead of names: ``{"ps": 1, "trainer": 3}`` makes ``ps0``,
                ``trainer0``, ``trainer1`` and ``trainer2``, with the role in `Worker.role`.
            num_worker_threads: Functions that a worker runs at the same time; those waiting for another call do not count.
            rpc_timeout: Default timeout of a call in seconds; 0 for no timeout.
            threads_per_worker: Threads per torch operation.
            start_timeout_s: Seconds within which all workers must be ready.
            env: Environment variables for the workers, in addition to the driver's.
            imports: Modules that every worker imports before it serves calls.
            trust: With ``"code"``, members may send functions to each other. With ``"data"``, they may only call functions
                exposed by the modules in `imports`.
            limits: Limits on what members accept from each other, e.g. ``Limits(frame_bytes=4 << 30)`` for arguments of
                more than 1 GiB.
            device_maps: For each worker, its device for each device of the member that calls it, e.g.
                ``{"worker1": {"cuda:0": "cuda:1"}}``; the same in the driver and in all workers. Without a map for a worker,
                tensors arrive there on the device of the same name. See
                :doc:`Accelerators </guides/accelerators>`.
            restart: ``"on-loss"`` restarts a lost worker under its name and rank, as a new process without any state. With
                ``"never"`` it stays lost.
            on_restart: Called with each restarted worker, in a thread of the driver, to rebuild its state: for instance
                modules and optimizer state from the last checkpoint. If it raises, the worker is lost again.
            lost_after: Seconds without a response after which a worker counts as lost and is killed, although its process
                exists: it may be stopped, or a function may be holding the GIL. 0 for never. If not given, 30 with
                ``restart="on-loss"`` and never otherwise.
            max_restarts: Restarts of one worker within a minute; after that it stays lost. The delay before a restart
                grows if the worker is lost again soon.

        Raises:
            ConfigurationError: An option is wrong, a cluster is already open, or this is not Linux.
            WorkerStartFailed: A worker did not become ready; the message includes its output.
        """
        options = LocalOptions(
            num_workers=n,
            names=names,
            roles=roles,
            threads_per_worker=threads_per_worker,
            start_timeout_s=start_timeout_s,
            environment=env,
            imports=imports,
            config=_config(num_worker_threads, rpc_timeout, trust, limits, device_maps),
        )
        supervision = SupervisionOptions(restart=restart, lost_after_s=lost_after, max_restarts=max_restarts)
        if replace and (old := cls.current()) is not None:
            old.close(grace=0)
        return cls(*start_local(options, supervision, on_restart))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The current workers of the cluster in order of rank, including lost ones."""
        return tuple(member.worker for member in self._monitor.members())

    @classmethod
    def ray(
        cls,
        n: int,
        *,
        resources: Mapping[str, float] | None = None,
        strategy: Strategy = "SPREAD",
        roles: Mapping[str, int] | None = None,
        names: Sequence[str] | None = None,
        address: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        port_range: tuple[int, int] | None = None,
        interface: str | None = None,
        start_timeout_s: float = 300.0,
        allow_unauthenticated: bool = False,
        num_worker_threads: int = _DEFAULTS.num_worker_threads,
        rpc_timeout: float = _DEFAULTS.rpc_timeout_s,
        threads_per_worker: int = 1,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        trust: Trust = "code",
        limits: Limits | None = None,
        device_maps: Mapping[str, DeviceMap] | None = None,
        restart: Restart = "never",
        on_restart: Callable[[Worker], object] | None = None,
        lost_after: float | None = None,
        max_restarts: int = 10,
    ) -> Cluster:
        """Start workers on a Ray cluster, one per actor. See :doc:`Clusters on several machines </guides/clusters>`.

        Ray chooses the nodes, starts the processes and reports when one exits. Calls and tensors do not go through Ray:
        workers connect to each other over TLS, with keys that they generate and the driver signs.

        Args:
            n: Number of workers.
            resources: Resources that Ray reserves for each worker, ``{"CPU": 1}`` if not given. Ray does not enforce them.
            strategy: How Ray chooses nodes: ``"SPREAD"``, ``"PACK"``, ``"STRICT_SPREAD"`` (each worker on a different
                node) or ``"STRICT_PACK"`` (all on one node).
            roles: Number of workers for each role, which also names them: ``{"ps": 2, "trainer": 6}``.
            names: Names of the workers; ``worker0``, ``worker1`` ... if not given.
            address: ``"auto"`` or ``"host:port"`` of a running Ray cluster. If not given, ``RAY_ADDRESS`` is used, as in a
                submitted job; without that, Ray is started on this machine and stopped with the cluster. If this process
                has already called ``ray.init``, that connection is used and left open.
            runtime_env: Ray's runtime environment for the workers.
            port_range: First and last port on which workers and driver may listen; any free port if not given.
            interface: Network interface on which they listen, such as ``"ib0"``; Ray's own address if not given.
            start_timeout_s: Seconds within which all workers must be ready, including the start of Ray and the setup of
                `runtime_env`.
            allow_unauthenticated: Accept a multi-machine Ray cluster without token authentication.
            num_worker_threads: Functions that a worker runs at the same time; those waiting for another call do not count.
            rpc_timeout: Default timeout of a call in seconds; 0 for no timeout.
            threads_per_worker: Threads per torch operation.
            env: Environment variables for the workers, in addition to those set by Ray.
            imports: Modules that every worker imports before it serves calls.
            trust: With ``"code"``, members may send functions to each other. With ``"data"``, they may only call functions
                exposed by the modules in `imports`.
            limits: Limits on what members accept from each other.
            device_maps: For each worker, its device for each device of the member that calls it; see `local`.
            restart: ``"on-loss"`` restarts a lost worker under its name and rank, as a new actor without any state: in the
                same placement bundle, or wherever Ray moves the bundle if the node is lost.
            on_restart: Called with each restarted worker to rebuild its state; see `local`.
            lost_after: Seconds without a response after which a worker counts as lost; see `local`.
            max_restarts: Restarts of one worker within a minute; see `local`.

        Raises:
            ConfigurationError: An option is wrong, Ray is not installed, its cluster cannot be used, or a cluster is
                already open.
            WorkerStartFailed: Ray has no room for the workers, or one did not become ready; the message says why.
        """
        try:
            from gradwire.cluster.ray_scheduler import RayOptions, RayScheduler
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise ConfigurationError(
                "Cluster.ray needs Ray, which is not installed: pip install 'gradwire[ray]'"
            ) from error
        from gradwire.cluster.remote_launcher import RemoteOptions, start_remote

        options = RemoteOptions(
            num_workers=n,
            names=names,
            roles=roles,
            threads_per_worker=threads_per_worker,
            start_timeout_s=start_timeout_s,
            environment=env,
            imports=imports,
            interface=interface,
            config=_config(num_worker_threads, rpc_timeout, trust, limits, device_maps, port_range),
        )
        ray_options = RayOptions(
            resources={"CPU": 1} if resources is None else resources,
            strategy=strategy,
            address=address,
            runtime_env=runtime_env,
            port_range=port_range,
            allow_unauthenticated=allow_unauthenticated,
        )
        supervision = SupervisionOptions(restart=restart, lost_after_s=lost_after, max_restarts=max_restarts)
        return cls(*start_remote(RayScheduler(ray_options, n), options, supervision, on_restart))

    @classmethod
    def from_env(
        cls,
        *,
        names: Sequence[str] | None = None,
        roles: Mapping[str, int] | None = None,
        num_worker_threads: int = _DEFAULTS.num_worker_threads,
        rpc_timeout: float = _DEFAULTS.rpc_timeout_s,
        threads_per_worker: int = 1,
        start_timeout_s: float = 300.0,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        trust: Trust = "code",
        limits: Limits | None = None,
        device_maps: Mapping[str, DeviceMap] | None = None,
        tls: TlsKeys | None = None,
        interface: str | None = None,
        port_range: tuple[int, int] | None = None,
    ) -> Cluster:
        """Make a cluster from the ranks that a launcher started: torchrun, srun, mpirun or SkyPilot.

        Rank 0 is the driver, where this returns the cluster. In every other rank it does not return: the process is a
        worker until the driver exits, and then exits with `SystemExit`, with code 0 on success and 1 if the driver was lost
        or failed. So code after this call runs in rank 0 only; put code that every rank needs before it.

        ``GRADWIRE_RANK``, ``GRADWIRE_WORLD_SIZE`` and ``GRADWIRE_RUN_ID`` (and ``GRADWIRE_MASTER=host:port`` for several
        machines) replace a launcher. Ranks on several machines must authenticate each other, with a shared secret in a file
        (``GRADWIRE_SECRET_FILE``) or with keys (`tls`, or ``GRADWIRE_KEYS`` for a folder).

        Workers cannot be added or restarted, because the launcher owns the processes.

        Args:
            names: Names of the workers, assigned by host and rank; ``worker0``, ``worker1`` ... if not given.
            roles: Number of workers for each role, instead of names, e.g. ``{"ps": 2, "trainer": 5}``.
            num_worker_threads: Functions that a worker runs at the same time; see `local`.
            rpc_timeout: Default timeout of a call in seconds; 0 for no timeout.
            threads_per_worker: Threads per torch operation.
            start_timeout_s: Seconds to wait for the other ranks.
            env: Environment variables for the workers.
            imports: Modules that every worker imports before it serves calls.
            trust: ``"code"`` or ``"data"``; see `local`.
            limits: Limits on what members accept from each other.
            device_maps: For each worker, its device for each device of the member that calls it; see `local`.
            tls: Keys valid for every worker (`gradwire.transports.tls.make_keys`), from the same authority on every rank.
            interface: Network interface on which the workers listen, e.g. ``ib0``.
            port_range: First and last port on which they may listen; any free port if not given.

        Raises:
            ConfigurationError: No launcher was found, the ranks are on several machines and have no secret or keys, or a
                cluster is already open.
            RendezvousFailed: Rank 0 could not be reached in time.
            AuthenticationFailed: A rank has another secret or other keys, or ranks that share a folder are on different
                machines and have neither.
            WorkerStartFailed: A rank did not arrive or could not become a worker; the message names it.
            SystemExit: In every rank but 0, when the driver has exited.
        """
        from gradwire.cluster.environment_scheduler import start_from_env, tell_failed
        from gradwire.cluster.remote_launcher import RemoteOptions

        config = _config(num_worker_threads, rpc_timeout, trust, limits, device_maps, port_range)

        def make_options(num_workers: int) -> RemoteOptions:
            return RemoteOptions(
                num_workers=num_workers,
                names=names,
                roles=roles,
                threads_per_worker=threads_per_worker,
                start_timeout_s=start_timeout_s,
                environment=env,
                imports=imports,
                config=config,
                interface=interface,
            )

        cluster = cls(*start_from_env(make_options, tls))
        cluster._on_failure = partial(tell_failed, cluster._agent)
        return cluster

    @classmethod
    def slurm(
        cls,
        nodes: int = 1,
        workers_per_node: int = 1,
        *,
        time: str | int = "01:00:00",
        partition: str | None = None,
        account: str | None = None,
        prologue: Sequence[str] = (),
        extra: Sequence[str] = (),
        folder: str | Path = "logs/%j",
        executor: Literal["slurm", "local"] = "slurm",
        names: Sequence[str] | None = None,
        roles: Mapping[str, int] | None = None,
        num_worker_threads: int = _DEFAULTS.num_worker_threads,
        rpc_timeout: float = _DEFAULTS.rpc_timeout_s,
        threads_per_worker: int = 1,
        start_timeout_s: float = 300.0,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        trust: Trust = "code",
        limits: Limits | None = None,
        device_maps: Mapping[str, DeviceMap] | None = None,
        interface: str | None = None,
        port_range: tuple[int, int] | None = None,
        restart: Restart = "never",
        on_restart: Callable[[Worker], object] | None = None,
        lost_after: float | None = None,
        max_restarts: int = 10,
    ) -> Cluster:
        """Start workers in a Slurm job, with this process as their driver, on a login node or inside another job.

        submitit (``pip install 'gradwire[slurm]'``) writes and submits the job, with one task per worker. Leaving the block
        cancels it. The output of a worker appears here, prefixed with its name; until it is ready, in the logs in `folder`.

        Args:
            nodes: Number of machines.
            workers_per_node: Number of workers on each machine.
            time: Time limit of the job: minutes, or in sbatch's format, such as ``"2-12:00:00"``.
            partition: Slurm partition; the site's default if not given.
            account: Slurm account; the site's default if not given.
            prologue: Shell commands that the job runs first, e.g. ``["module load cuda"]``.
            extra: Further sbatch options, e.g. ``["--constraint=a100", "--gres=gpu:4"]``.
            folder: Folder for the job script, the logs and the startup messages, on a file system that all machines share.
                Created with mode 0700 if it does not exist; refused if others can write to it. ``%j`` is the job's id.
            executor: ``"local"`` runs the same on this machine, without Slurm.
            names: Names of the workers, assigned by host and task; ``worker0``, ``worker1`` ... if not given.
            roles: Number of workers for each role, instead of names, e.g. ``{"ps": 2, "trainer": 6}``.
            num_worker_threads: Functions that a worker runs at the same time; see `local`.
            rpc_timeout: Default timeout of a call in seconds; 0 for no timeout.
            threads_per_worker: Threads per torch operation.
            start_timeout_s: Seconds within which all workers must be ready, including the job's time in the queue.
            env: Environment variables for the workers.
            imports: Modules that every worker imports before it serves calls.
            trust: ``"code"`` or ``"data"``; see `local`.
            limits: Limits on what members accept from each other.
            device_maps: For each worker, its device for each device of the member that calls it; see `local`.
            interface: Network interface on which driver and workers listen, e.g. ``ib0``.
            port_range: First and last port on which they may listen; any free port if not given.
            restart: ``"on-loss"`` restarts a lost worker, in a new job with one task.
            on_restart: Called with each restarted worker to rebuild its state; see `local`.
            lost_after: Seconds without a response after which a worker counts as lost; see `local`.
            max_restarts: Restarts of one worker within a minute; see `local`.

        Raises:
            ConfigurationError: An option is wrong, submitit is not installed, Slurm is not available, or a cluster is
                already open.
            WorkerStartFailed: The job failed or did not start in time; the message includes its id, state and log.
        """
        from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
        from gradwire.cluster.slurm_scheduler import SlurmOptions, SlurmScheduler

        job = SlurmOptions(
            nodes=nodes,
            workers_per_node=workers_per_node,
            time=time,
            partition=partition,
            account=account,
            prologue=prologue,
            extra=extra,
            folder=folder,
            executor=executor,
        )
        options = RemoteOptions(
            num_workers=job.num_workers,
            names=names,
            roles=roles,
            threads_per_worker=threads_per_worker,
            start_timeout_s=start_timeout_s,
            environment=env,
            imports=imports,
            config=_config(num_worker_threads, rpc_timeout, trust, limits, device_maps, port_range),
            interface=interface,
        )
        supervision = SupervisionOptions(restart=restart, lost_after_s=lost_after, max_restarts=max_restarts)
        return cls(*start_remote(SlurmScheduler(job, start_timeout_s), options, supervision, on_restart))

    def __repr__(self) -> str:
        living = sum(worker.is_alive for worker in self.workers)
        state = "closed" if self._is_closed else f"{living} of {len(self.workers)} workers alive"
        return f"<Cluster {state}>"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._on_failure is not None:
            self._on_failure(error)
        self.close(_GRACE_S if error is None else 0.0)

    def map(self, function: Callable[[Any], T], items: Iterable[Any], timeout: float | None = None) -> list[T]:
        """Call a function once for each item, spread over the workers that are alive.

        A worker processes up to two items at a time, in two threads. After a second, a progress bar appears on a terminal
        or in a notebook with ipywidgets.

        Args:
            function: Called with one item.
            items: The items, consumed as workers become free.
            timeout: Seconds for all items together; if not given, each call has the cluster's `rpc_timeout`. 0 does not
                mean "no limit" here: it times out at once.

        Returns:
            The results, in the order of the items.

        Raises:
            RpcTimeout: The timeout passed.
            WorkerLost: No worker is alive, or one died during the call.
            Exception: The first exception that a call raised; the remaining calls are cancelled.
        """
        alive = [worker for worker in self.workers if worker.is_alive]
        if not alive:
            raise WorkerLost(
                "no worker of this cluster is alive: it was closed, or its workers were lost; Cluster.status() shows how"
            )
        return MapRun(alive, function, items, timeout).run()

    def add_workers(
        self, n: int, *, names: Sequence[str] | None = None, role: str = "worker", timeout: float = 60.0
    ) -> tuple[Worker, ...]:
        """Start more workers with the cluster's options; from then on, every worker can call them by name.

        Args:
            n: Number of workers.
            names: Names of the workers; the role and a number if not given: ``worker4``, ``worker5`` ...
            role: Role of the workers.
            timeout: Seconds within which they must be ready.

        Raises:
            ConfigurationError: An option is wrong, a worker has that name, or the cluster was made by `from_env`.
            WorkerStartFailed: One did not become ready; none was added.
            NotInitialized: The cluster is closed.
        """
        check_count("n", n, MAX_WORKERS)
        check_names([role] if names is None else names, 1 if names is None else n)
        return tuple(member.worker for member in self._monitor.add(n, names, role, timeout))

    def remove(self, worker: Worker | str, grace: float = _GRACE_S) -> None:
        """Stop a worker and remove it from the cluster. It is not restarted.

        Args:
            worker: The worker, or its name.
            grace: Seconds to wait for the driver's calls in progress on it.

        Raises:
            UnknownWorker: The cluster has no such worker.
            NotInitialized: The cluster is closed.
        """
        name = worker if isinstance(worker, str) else worker.name
        for member in self._monitor.members():
            if member.name == name:
                self._monitor.remove(member, grace)
                return
        known = ", ".join(item.name for item in self.workers)
        raise UnknownWorker(f"cannot remove {name!r}: this cluster has no such worker; it has: {known}")

    def wait_for_workers(self, n: int | None = None, timeout: float = 60.0) -> tuple[Worker, ...]:
        """Wait until lost workers are back or new ones have joined.

        Args:
            n: Number of workers that must serve calls; all workers of the cluster if not given.
            timeout: Seconds to wait.

        Returns:
            The workers that serve calls.

        Raises:
            RpcTimeout: Fewer than `n` workers serve calls when the timeout passes.
            WorkerLost: Fewer than `n` workers are left, and the others are not restarted.
            NotInitialized: The cluster is closed.
        """
        return tuple(member.worker for member in self._monitor.wait_for(n, timeout))

    def on_membership(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Call a function whenever a worker joins, is lost, is restarted or leaves.

        Callbacks run one at a time, in the order of the events, in a thread of the driver.

        Args:
            callback: Called with a `MembershipEvent`.

        Returns:
            A function that removes the callback.

        Raises:
            NotInitialized: The cluster is closed.
        """
        return self._monitor.on_membership(callback)

    def trace(self, *paths: PathLike, profile: bool = False, max_events: int = DEFAULT_EVENTS) -> Trace:
        """Record what happens on all workers and the driver while a block runs, and write it as one timeline.

        Example::

            with cluster.trace("run.zip"):
                train()

        Open the file in the Perfetto UI: calls and backward passes of all workers are on one timeline, with arrows from
        the worker that sends to the one that receives. The files are written when the block ends, even with an exception.
        If a worker is lost, its events are missing, and `Trace.workers` and the file say so.

        Args:
            paths: Files to write: ``.zip`` for Perfetto, ``.pftrace`` for Perfetto without the archive around it, ``.json``
                for Chrome's format.
            profile: Record the operators of torch as well, with `torch.profiler`, which makes workers slower.
            max_events: Events to keep of each worker, and as many operators; beyond that, the earliest are dropped.

        Returns:
            A context manager.

        Raises:
            ConfigurationError: A path or option is wrong, or the package perfetto is not installed. When the block is
                entered: a trace is being recorded already, or `torch.profiler` is active in this process.
            NotInitialized: When the block is entered: the cluster is closed.
        """
        return Trace(
            self._agent,
            lambda: [member.name for member in self._monitor.members() if member.worker.is_alive],
            self._monitor.on_membership,
            paths,
            profile=profile,
            max_events=max_events,
        )

    def describe(self) -> str:
        """Return a readable description of the cluster: options, processes, addresses and versions."""
        watched = self._monitor.options
        silence = f" or has not answered for {watched.silence_s:g} s" if watched.silence_s < float("inf") else ""
        restarts = f", at most {watched.max_restarts} times a minute" if watched.restart == "on-loss" else ""
        lines = [
            f"{self!r} of driver process {self._owner_pid} on {socket.gethostname()}",
            f"Python {platform.python_version()}, torch {torch.__version__}, gradwire {GRADWIRE_VERSION}",
            f'a worker is lost when its process ends{silence}; restart="{watched.restart}"{restarts}',
            self._monitor.launcher.describe(),
            *map(self._describe_member, self._monitor.members()),
        ]
        return "\n".join(lines)

    def _describe_member(self, member: Member) -> str:
        handle, info = member.handle, member.spec.info
        where = f" ({handle.place})" if handle.place else ""
        at = f", listens at {', '.join(handle.address.uris)}" if handle.address is not None else ""
        process = f"process {handle.pid} on {handle.host}{where}{at}"
        return f"  {info.name}: rank {info.id}, {member.spec.role}, {process}, {self._monitor.state_of(member)}"

    def status(self) -> ClusterStatus:
        """Return a record for each worker with its state, memory, calls and bytes; it prints as a table."""
        members = self._monitor.members()
        running = [member.name for member in members if member.handle.state is WorkerState.RUNNING]
        usage = ask_usage(self._agent, running, _SURVEY_S)
        self._rates.forget_all_but([DRIVER, *(member.name for member in members)])
        return ClusterStatus(self._status_of(member, usage.get(member.name)) for member in members)

    def _status_of(self, member: Member, usage: Usage | None) -> WorkerStatus:
        status = WorkerStatus(
            name=member.name,
            rank=member.spec.info.id,
            role=member.spec.role,
            pid=member.handle.pid,
            state=self._monitor.state_of(member),
            uptime_s=member.handle.uptime_s,
            rss_bytes=None,
            calls_served=None,
            restarts=self._monitor.num_restarts(member),
            exit_reason=self._monitor.lost_reason(member),
        )
        return status if usage is None else self._with_usage(status, usage)

    def metrics(self) -> ClusterMetrics:
        """Return the metrics of all workers and the driver, for Prometheus.

        Calls are counted and timed from the first time this method is called.
        ``cluster.metrics().serve(port=9464)`` serves them over HTTP. It needs ``pip install 'gradwire[metrics]'``.

        Raises:
            ConfigurationError: prometheus_client is not installed.
            NotInitialized: The cluster is closed.
        """
        from gradwire.cluster.cluster_metrics import ClusterMetrics

        with self._lock:
            if self._is_closed:
                raise NotInitialized("this cluster is closed; start another one")
            found = self._metrics
        if found is None:
            made = ClusterMetrics(self._agent, self._scraped_members)  # asks the workers
            with self._lock:
                found = self._metrics = self._metrics or made
        return found

    def _scraped_members(self) -> list[ScrapedMember]:
        from gradwire.cluster.cluster_metrics import ScrapedMember

        return [
            ScrapedMember(
                name=member.name,
                rank=member.spec.info.id,
                host=member.handle.host,
                is_running=member.handle.state is WorkerState.RUNNING,
                num_restarts=self._monitor.num_restarts(member),
            )
            for member in self._monitor.members()
        ]

    def _set_log_level(self, level: int) -> None:
        """Implement `gradwire.set_log_level` for the workers."""
        is_first, self._log_level = self._log_level is None, level
        if is_first:
            self._monitor.on_membership(self._tell_log_level)
        tell_level(self._agent, [worker.name for worker in self.workers if worker.is_alive], level)

    def _tell_log_level(self, event: MembershipEvent) -> None:
        if event.kind in ("joined", "restarted") and self._log_level is not None:
            tell_level(self._agent, [event.worker.name], self._log_level)

    def _driver_status(self) -> WorkerStatus:
        """Return the same about this process."""
        status = WorkerStatus(
            name=self._agent.info.name,
            rank=self._agent.info.id,
            role=DRIVER,
            pid=self._owner_pid,
            state="running",
            uptime_s=time.monotonic() - self._opened_at,
            rss_bytes=None,
            calls_served=None,
            restarts=0,
            exit_reason=None,
        )
        return self._with_usage(status, measure_usage(self._agent))

    def _with_usage(self, status: WorkerStatus, usage: Usage) -> WorkerStatus:
        rate = self._rates.rate(status.name, status.pid, status.uptime_s, usage.calls_served, time.monotonic())
        return dataclasses.replace(status, calls_per_s=rate, **msgspec.structs.asdict(usage))

    def dashboard(self, port: int = 0) -> Dashboard:
        """Open the dashboard of this cluster, on this machine's loopback.

        It shows the workers, the graph and the timeline of the latest steps, errors, references and stacks: see
        :doc:`Monitoring and tracing </guides/seeing>`. It is closed with the cluster. Needs
        ``pip install 'gradwire[dashboard]'``.

        Args:
            port: Port to listen on; any free port if not given. If the dashboard is already open, pass its port or 0.

        Returns:
            The dashboard, the same one while it is open; its `url` is a link that works once.

        Raises:
            ConfigurationError: A package is missing, the port cannot be used, or the dashboard is open on another one.
            NotInitialized: The cluster is closed.
        """
        from gradwire.dashboard.web_server import Dashboard

        with self._lock:
            if self._is_closed:
                raise NotInitialized("this cluster is closed; start another one")
            current = self._dashboard
            if current is None or current.is_closed:
                current = self._dashboard = Dashboard(self._agent, self.name or "cluster", self._dashboard_rows, port)
        if port not in (0, current.port):
            raise ConfigurationError(
                f"the dashboard of this cluster is already open on port {current.port}; pass that port, or close it first"
            )
        return current

    def _dashboard_rows(self) -> list[dict[str, Any]]:
        hosts = {member.name: member.handle.host for member in self._monitor.members()}
        found = [*self.status(), self._driver_status()]
        return [{**dataclasses.asdict(item), "host": hosts.get(item.name, socket.gethostname())} for item in found]

    def close(self, grace: float = _GRACE_S) -> None:
        """Stop all workers. Safe to call more than once.

        Args:
            grace: Seconds to wait for the driver's calls in progress. Workers then have a moment to shut down cleanly,
                and are killed if they do not.
        """
        if os.getpid() != self._owner_pid:  # a process forked by the driver must not stop its workers
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            dashboard = self._dashboard
        status_socket = self._status_socket or contextlib.nullcontext()
        # Leaving the resources stops the remaining workers if Ctrl-C interrupts one of the waits.
        with _interrupts.installed(), self._resources, status_socket:
            self._timed_traces.close()
            if dashboard is not None:
                dashboard.close()
            atexit.unregister(self.close)
            self._monitor.stop()
            deadline = time.monotonic() + grace
            # All work on the workers was started by the driver's calls, and ends with them.
            while not self._agent.is_quiet and time.monotonic() < deadline:
                _interrupts.sleep(_QUIET_POLL_S)
            handles = [member.handle for member in self._monitor.members()]
            self._monitor.launcher.terminate(handles, max(_LEAVE_S, deadline - time.monotonic()))

    def _shut_down(self, graceful: bool, timeout: float) -> None:
        """Implement `gradwire.rpc.shutdown` in the driver."""
        self.close((timeout or _GRACE_S) if graceful else 0.0)
