"""`Cluster`: the workers that a program started, as it uses them."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from gradwire import _interrupts
from gradwire.cluster.driver import CLUSTER, MAX_WORKERS, check_count, check_names
from gradwire.cluster.launcher import WorkerState
from gradwire.cluster.local_launcher import LocalOptions, start_local
from gradwire.cluster.map import MapRun
from gradwire.cluster.monitor import Member, MembershipEvent, Monitor
from gradwire.cluster.ray_placement import Strategy
from gradwire.cluster.status import ClusterStatus, WorkerStatus, ask_usage
from gradwire.cluster.status_socket import StatusSocket
from gradwire.cluster.supervision import Restart, SupervisionOptions
from gradwire.cluster.worker import Worker
from gradwire.config import Limits, TlsKeys, WorkerConfig
from gradwire.errors import ConfigurationError, NotInitialized, UnknownWorker, WorkerLost
from gradwire.rpc.api import current_agent, set_current_agent
from gradwire.types import Trust
from gradwire.versions import GRADWIRE_VERSION

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
    port_range: tuple[int, int] | None = None,
) -> WorkerConfig:
    return WorkerConfig(
        num_worker_threads=num_worker_threads,
        rpc_timeout_s=rpc_timeout,
        trust=trust,
        limits=_DEFAULTS.limits if limits is None else limits,
        bind_port=port_range or 0,
    )


class Cluster:
    """Workers that this process, the driver, started.

    Example::

        with gradwire.Cluster.local(2) as cluster:
            cluster.workers[0].call(torch.add, x, y)

    The driver is a member, too, by the name ``driver``. Leaving the block ends the workers; so do an exception, Ctrl-C
    and the death of the driver by any means.
    """

    def __init__(self, monitor: Monitor, resources: contextlib.AbstractContextManager[object]) -> None:
        """Wrap the workers that a monitor started; leaving `resources` ends all of them. Programs use `local`."""
        self._monitor = monitor
        self._agent = monitor.agent
        self._resources = resources
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()  # guards _is_closed
        self._is_closed = False
        # Called before the workers leave after an exception.
        self._on_failure: Callable[[BaseException], None] | None = None
        atexit.register(self.close)
        self._agent.extensions[CLUSTER] = self
        set_current_agent(self._agent, self._shut_down)
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
        roles: Mapping[str, int] | None = None,
        num_worker_threads: int = _DEFAULTS.num_worker_threads,
        rpc_timeout: float = _DEFAULTS.rpc_timeout_s,
        threads_per_worker: int = 1,
        start_timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        trust: Trust = "code",
        limits: Limits | None = None,
        restart: Restart = "never",
        on_restart: Callable[[Worker], object] | None = None,
        lost_after: float | None = None,
        max_restarts: int = 10,
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
            roles: How many workers have each role, in place of names: ``{"ps": 1, "trainer": 3}`` makes ``ps0``,
                ``trainer0``, ``trainer1`` and ``trainer2``, whose `Worker.role` says so.
            num_worker_threads: Functions that one worker runs at once; those that wait for another call do not count.
            rpc_timeout: Seconds that a call may take if it names no other time; 0 for no deadline.
            threads_per_worker: Threads of one torch operation.
            start_timeout_s: Seconds that all of this may take.
            env: Environment variables for the workers, on top of the driver's.
            imports: Modules that every worker imports before it serves anything.
            trust: ``"code"`` lets members send functions to each other. With ``"data"`` they may only call what is
                exposed, by modules named in `imports`.
            limits: What members accept from each other, e.g. ``Limits(frame_bytes=4 << 30)`` for arguments of more than
                1 GiB.
            restart: ``"on-loss"`` starts a worker that is lost again, under its name and rank, as a new process that holds
                nothing. With ``"never"`` it stays lost.
            on_restart: Called with each worker that was started again, in a thread of the driver, to rebuild what it held:
                modules and optimizer state, from the last checkpoint for instance. If it raises, the worker is lost again.
            lost_after: Seconds without an answer after which a worker counts as lost although its process is there, because
                it is stopped or a function in it does not let other threads run; it is then killed. 0 for never. 30 with
                ``restart="on-loss"`` and never otherwise, if not given.
            max_restarts: How many times one worker is started again within a minute; after that it stays lost. The pauses
                before each start grow if it is lost soon after the last one.

        Raises:
            ConfigurationError: An option is wrong, a cluster is open already, or this is not Linux.
            WorkerStartFailed: A worker did not get ready; the message has what it printed.
        """
        options = LocalOptions(
            num_workers=n,
            names=names,
            roles=roles,
            threads_per_worker=threads_per_worker,
            start_timeout_s=start_timeout_s,
            environment=env,
            imports=imports,
            config=_config(num_worker_threads, rpc_timeout, trust, limits),
        )
        supervision = SupervisionOptions(restart=restart, lost_after_s=lost_after, max_restarts=max_restarts)
        if replace and (old := cls.current()) is not None:
            old.close(grace=0)
        return cls(*start_local(options, supervision, on_restart))

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers that belong to the cluster now, in the order of their ranks; those that are lost included."""
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
        restart: Restart = "never",
        on_restart: Callable[[Worker], object] | None = None,
        lost_after: float | None = None,
        max_restarts: int = 10,
    ) -> Cluster:
        """Start workers on a Ray cluster, one in each actor. ``docs/guides/clusters.md`` says more.

        Ray chooses the nodes, starts the processes and tells when one ends. Calls and tensors do not go through Ray: workers
        connect to each other with TLS, with keys that they make themselves and the driver signs.

        Args:
            n: How many.
            resources: What Ray reserves for each worker, ``{"CPU": 1}`` if not given. Ray counts; it does not enforce.
            strategy: How Ray chooses nodes: ``"SPREAD"``, ``"PACK"``, ``"STRICT_SPREAD"`` (each worker on a node of its own)
                or ``"STRICT_PACK"`` (all on one node).
            roles: Roles with how many workers each has, which gives them their names: ``{"ps": 2, "trainer": 6}``.
            names: Their names; ``worker0``, ``worker1`` ... if not given.
            address: ``"auto"`` or ``"host:port"`` joins a running Ray cluster. Without it, the one in ``RAY_ADDRESS`` is
                joined, as in a submitted job; or else Ray is started on this machine, and stopped with the cluster. If this
                process has called ``ray.init`` already, that connection is used and left open.
            runtime_env: Ray's description of what workers need installed or copied.
            port_range: First and last port that workers and driver may listen on; any free one if not given.
            interface: Network interface that they listen on, such as ``"ib0"``; Ray's own address if not given.
            start_timeout_s: Seconds that all of this may take, the start of Ray and of a `runtime_env` included.
            allow_unauthenticated: Accept a Ray cluster of several machines that does not ask for a token.
            num_worker_threads: Functions that one worker runs at once; those that wait for another call do not count.
            rpc_timeout: Seconds that a call may take if it names no other time; 0 for no deadline.
            threads_per_worker: Threads of one torch operation.
            env: Environment variables for the workers, on top of those that Ray gives them.
            imports: Modules that every worker imports before it serves anything.
            trust: ``"code"`` lets members send functions to each other. With ``"data"`` they may only call what is
                exposed, by modules named in `imports`.
            limits: What members accept from each other.
            restart: ``"on-loss"`` starts a worker that is lost again, under its name and rank, as a new actor that holds
                nothing: in the same place, or where Ray moves the place to if the node is gone.
            on_restart: Called with each worker that was started again, to rebuild what it held; as in `local`.
            lost_after: Seconds without an answer after which a worker counts as lost; as in `local`.
            max_restarts: How often one worker is started again within a minute; as in `local`.

        Raises:
            ConfigurationError: An option is wrong, Ray is not installed, its cluster cannot be used, or a cluster is open
                already.
            WorkerStartFailed: Ray has no room for the workers, or one did not get ready; says what is missing.
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
            config=_config(num_worker_threads, rpc_timeout, trust, limits, port_range),
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
        tls: TlsKeys | None = None,
        interface: str | None = None,
        port_range: tuple[int, int] | None = None,
    ) -> Cluster:
        """Make a cluster of a program that a launcher has started on every rank: torchrun, srun, mpirun, SkyPilot.

        Rank 0 is the driver: there this returns the cluster. In every other rank it does not return: the process is a
        worker until the driver ends, and then ends itself with `SystemExit`, with the code 0 if all went well and 1 if the
        driver was lost or failed. So the code after it runs in rank 0 alone, and what every rank needs comes before it.

        ``GRADWIRE_RANK``, ``GRADWIRE_WORLD_SIZE`` and ``GRADWIRE_RUN_ID`` (and ``GRADWIRE_MASTER=host:port`` for several
        machines) say the same without a launcher. Ranks on several machines need a proof that they belong together: a
        file with a secret (``GRADWIRE_SECRET_FILE``), or keys (`tls`, or ``GRADWIRE_KEYS`` for a folder).

        Workers cannot be added or started again: the launcher owns the processes.

        Args:
            names: Names of the workers, ``worker0``, ``worker1`` ... if not given; sorted by host and rank.
            roles: How many workers have each role instead, e.g. ``{"ps": 2, "trainer": 5}``.
            num_worker_threads: As for `local`, like the following.
            rpc_timeout: Seconds that a call may take if it names no other time; 0 for no deadline.
            threads_per_worker: Threads of one torch operation.
            start_timeout_s: Seconds to wait for the other ranks.
            env: Environment variables for the workers.
            imports: Modules that every worker imports before it serves anything.
            trust: ``"code"`` or ``"data"``.
            limits: What members accept from each other.
            tls: Keys that are good for every worker (`gradwire.transports.tls.make_keys`), the same authority on every rank.
            interface: Network interface that the workers listen on, e.g. ``ib0``.
            port_range: Ports that they listen on, from first to last; any free one if not given.

        Raises:
            ConfigurationError: No launcher is found, or the ranks are on several machines and have no proof.
            WorkerStartFailed: A rank did not arrive or could not become a worker; says which.
            SystemExit: In every rank but 0, when the driver has ended.
        """
        from gradwire.cluster.environment_scheduler import start_from_env, tell_failed
        from gradwire.cluster.remote_launcher import RemoteOptions

        config = _config(num_worker_threads, rpc_timeout, trust, limits, port_range)

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
        interface: str | None = None,
        port_range: tuple[int, int] | None = None,
        restart: Restart = "never",
        on_restart: Callable[[Worker], object] | None = None,
        lost_after: float | None = None,
        max_restarts: int = 10,
    ) -> Cluster:
        """Start workers in a job of Slurm, and be their driver: on a login node, or inside another job.

        submitit (``pip install gradwire[slurm]``) writes and submits the job: one task for each worker. Leaving the block
        cancels it. What a worker prints appears here with its name in front; before that, in the logs in `folder`.

        Args:
            nodes: How many machines.
            workers_per_node: How many workers on each.
            time: Limit of the job: minutes, or as sbatch takes it, ``"2-12:00:00"``.
            partition: Where to queue; the site's default if not given.
            account: Who pays; the site's default if not given.
            prologue: Lines of shell that the job runs first, e.g. ``["module load cuda"]``.
            extra: More options of sbatch, e.g. ``["--constraint=a100", "--gres=gpu:4"]``.
            folder: For the job script, logs, and the messages at the start, on a file system that all machines share.
                Made with mode 0700 if it does not exist; one that others can write to is refused. ``%j`` is the job's id.
            executor: ``"local"`` runs the same on this machine, without Slurm.
            names: Names of the workers, ``worker0``, ``worker1`` ... if not given; sorted by host and task.
            roles: How many workers have each role instead, e.g. ``{"ps": 2, "trainer": 6}``.
            num_worker_threads: As for `local`, like the following.
            rpc_timeout: Seconds that a call may take if it names no other time; 0 for no deadline.
            threads_per_worker: Threads of one torch operation.
            start_timeout_s: Seconds for all of this, the time that the job waits in the queue included.
            env: Environment variables for the workers.
            imports: Modules that every worker imports before it serves anything.
            trust: ``"code"`` or ``"data"``.
            limits: What members accept from each other.
            interface: Network interface that driver and workers listen on, e.g. ``ib0``.
            port_range: Ports that they listen on, from first to last; any free one if not given.
            restart: ``"on-loss"`` starts a worker that is lost again, in a job of its own with one task.
            on_restart: As for `local`, like the following.
            lost_after: Seconds without an answer after which a worker counts as lost.
            max_restarts: How often one worker is started again within a minute.

        Raises:
            ConfigurationError: An option is wrong, submitit is not installed, or Slurm is not there.
            WorkerStartFailed: The job failed or did not start in time; the message has its id, its state and its log.
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
            config=_config(num_worker_threads, rpc_timeout, trust, limits, port_range),
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
            raise WorkerLost("no worker of this cluster is alive; see Cluster.status() for how they exited")
        return MapRun(alive, function, items, timeout).run()

    def add_workers(
        self, n: int, *, names: Sequence[str] | None = None, role: str = "worker", timeout: float = 60.0
    ) -> tuple[Worker, ...]:
        """Start more workers, like those that the cluster has; every worker can call them by name from then on.

        Args:
            n: How many.
            names: Their names; the role and a number if not given: ``worker4``, ``worker5`` ...
            role: What they are for.
            timeout: Seconds that the start may take.

        Raises:
            ConfigurationError: An option is wrong, or a worker has that name.
            WorkerStartFailed: One did not get ready; none was added.
        """
        check_count("n", n, MAX_WORKERS)
        check_names([role] if names is None else names, 1 if names is None else n)
        return tuple(member.worker for member in self._monitor.add(n, names, role, timeout))

    def remove(self, worker: Worker | str, grace: float = _GRACE_S) -> None:
        """End a worker and take it out of the cluster. It is not started again.

        Args:
            worker: The worker, or its name.
            grace: Seconds that calls of the driver which are under way on it get to end.

        Raises:
            UnknownWorker: The cluster has no such worker.
        """
        name = worker if isinstance(worker, str) else worker.name
        for member in self._monitor.members():
            if member.name == name:
                self._monitor.remove(member, grace)
                return
        known = ", ".join(item.name for item in self.workers)
        raise UnknownWorker(f"cannot remove {name!r}: this cluster has no such worker; it has: {known}")

    def wait_for_workers(self, n: int | None = None, timeout: float = 60.0) -> tuple[Worker, ...]:
        """Wait until workers that were lost are back, or others have joined.

        Args:
            n: How many have to serve calls; all that belong to the cluster if not given.
            timeout: Seconds to wait.

        Returns:
            Those that serve calls.

        Raises:
            RpcTimeout: Fewer than `n` serve when the time is up.
            WorkerLost: Fewer than `n` are left, and those that are missing are not started again.
        """
        return tuple(member.worker for member in self._monitor.wait_for(n, timeout))

    def on_membership(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Call back whenever a worker joins, is lost, was restarted or has left.

        Callbacks run one after the other, in the order of the events, in a thread of the driver.

        Args:
            callback: Called with a `MembershipEvent`.

        Returns:
            A function that ends this.
        """
        return self._monitor.on_membership(callback)

    def describe(self) -> str:
        """Return what was started, in lines for people: options, processes, addresses and versions."""
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
        """Return one record for each worker, with its state, memory and calls; printed, it is a table."""
        members = self._monitor.members()
        running = [member.name for member in members if member.handle.state is WorkerState.RUNNING]
        usage = ask_usage(self._agent, running, _SURVEY_S)
        return ClusterStatus(
            WorkerStatus(
                name=member.name,
                rank=member.spec.info.id,
                role=member.spec.role,
                pid=member.handle.pid,
                state=self._monitor.state_of(member),
                uptime_s=member.handle.uptime_s,
                rss_bytes=usage[member.name].rss_bytes if member.name in usage else None,
                calls_served=usage[member.name].calls_served if member.name in usage else None,
                restarts=self._monitor.num_restarts(member),
                exit_reason=self._monitor.lost_reason(member),
            )
            for member in members
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
        status_socket = self._status_socket or contextlib.nullcontext()
        # The resources end what is left if Ctrl-C ends one of the waits.
        with _interrupts.installed(), self._resources, status_socket:
            atexit.unregister(self.close)
            self._monitor.stop()
            deadline = time.monotonic() + grace
            # The work of the other workers ends with the driver's calls, which began it all.
            while not self._agent.is_quiet and time.monotonic() < deadline:
                _interrupts.sleep(_QUIET_POLL_S)
            handles = [member.handle for member in self._monitor.members()]
            self._monitor.launcher.terminate(handles, max(_LEAVE_S, deadline - time.monotonic()))

    def _shut_down(self, graceful: bool, timeout: float) -> None:
        """Do what `gradwire.rpc.shutdown` asks for in the driver."""
        self.close((timeout or _GRACE_S) if graceful else 0.0)
