"""`Cluster.ray`: Ray places, starts and watches the processes; gradwire's messages do not go through it.

    driver -- placement group: one bundle for each worker --> Ray
           -- one actor in each bundle -----------------> actor process: RemoteWorker, and the agent in it
           <-- the end of the actor's `serve` ----------

An actor is a process that holds its bundle and runs `gradwire.cluster.remote_worker.RemoteWorker`. It is never restarted by
Ray: a restart is a new actor in the same bundle, with a new incarnation.
``docs/internals/adr/0026-the-agent-in-a-ray-actor.md`` lists what Ray does that one would not expect, and where that is
dealt with.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RuntimeEnvSetupError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gradwire import _interrupts
from gradwire.cluster import _ray
from gradwire.cluster.ray_placement import Node, Strategy, count_room, explain_missing, format_amounts
from gradwire.cluster.remote_worker import RemoteWorker
from gradwire.cluster.scheduler import RemoteProcess, Scheduler
from gradwire.errors import ConfigurationError, WorkerStartFailed

_STARTS_RAY = "local"
_CLIENT = "ray://"
_RAY_PORTS = range(10_002, 20_000)  # where Ray's own workers listen
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes: gradwire keeps nothing there
_CONCURRENCY = 4  # `serve` lasts as long as the worker, `handle` while it starts; the rest is for a second `serve`
_SLICE_S = 0.1  # how long a wait lasts before it checks for Ctrl-C
_POLL_S = 0.05
_REARM_S = 1.0
_JOIN_S = 5.0
_MODE_S = 10.0
_MAX_REASON_CHARS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """The Ray options of `gradwire.Cluster.ray`, checked when they are created."""

    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    strategy: Strategy = "SPREAD"
    address: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    port_range: tuple[int, int] | None = None
    allow_unauthenticated: bool = False

    def __post_init__(self) -> None:
        if not self.resources or not all(_is_amount(amount) for amount in self.resources.values()):
            raise ConfigurationError(
                f'resources must give the needs of each worker, such as {{"CPU": 2, "GPU": 1}}, not {self.resources!r}'
            )
        if self.strategy not in get_args(Strategy):
            raise ConfigurationError(f"strategy must be one of {', '.join(get_args(Strategy))}, not {self.strategy!r}")
        if self.port_range is not None:
            _check_ports(self.port_range)
        if self.target.startswith(_CLIENT):
            raise ConfigurationError(_no_client(f"{self.target} is"))

    @property
    def target(self) -> str:
        """The cluster to join, or ``"local"`` for one started on this machine."""
        return self.address or os.environ.get("RAY_ADDRESS") or _STARTS_RAY

    @property
    def bundle(self) -> dict[str, float]:
        return {name: float(amount) for name, amount in self.resources.items()}

    def actor_options(self) -> dict[str, Any]:
        """Return what every actor gets: exactly its bundle, because Ray asks for other amounts where one is left out."""
        rest = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU", "memory")}
        return {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            **({"memory": self.resources["memory"]} if "memory" in self.resources else {}),
            "resources": rest,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _CONCURRENCY,
        }


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _check_ports(ports: object) -> None:
    if not isinstance(ports, tuple | list) or len(ports) != 2 or not all(isinstance(port, int) for port in ports):
        raise ConfigurationError(f"port_range must be (first, last), not {ports!r}")
    first, last = ports
    if not 1 <= first <= last <= 65_535:
        raise ConfigurationError(f"port_range must be (first, last) with 1 <= first <= last <= 65,535, not {ports!r}")
    if first < _RAY_PORTS.stop and last >= _RAY_PORTS.start:
        raise ConfigurationError(
            f"port_range {first}-{last} overlaps {_RAY_PORTS.start}-{_RAY_PORTS.stop - 1}, where Ray's own workers listen; "
            "choose ports above or below"
        )


def _no_client(what: str) -> str:
    return (
        f"{what} Ray Client, a proxy: the driver is not on the cluster's network, so workers could not connect to it. "
        "Run the program on a node of the cluster, with `ray job submit -- python <program>` or directly, and pass "
        'address="auto"'
    )


# ------------------------------------------------------------------------------------------------------------------
# In the actor's process.


@dataclass(frozen=True, slots=True)
class ActorState:
    """State that a running actor reports about itself."""

    pid: int
    requires_token: bool  # whether its node's Ray wants one
    accelerators: Mapping[str, Sequence[str]]


class GradwireWorker:
    """The actor. Its methods run in threads of Ray, never in the main thread; no process is forked here."""

    def __init__(self, address: str | None, local_index: int) -> None:
        self._worker = RemoteWorker(address=address, local_index=local_index)
        self._lock = threading.Lock()  # guards _is_serving
        self._is_serving = False
        self._has_ended = threading.Event()
        self._lost_reason: str | None = None

    def state(self) -> ActorState:
        return ActorState(os.getpid(), _ray.requires_token(), ray.get_runtime_context().get_accelerator_ids())

    def handle(self, message: bytes) -> bytes:
        return self._worker.handle(message)

    def serve(self) -> str | None:
        """Return when the driver releases the worker, or with a reason when the driver is lost.

        The call lasts as long as the worker, so that Ray reports the end of the process as the end of the call. It may be
        made again, after Ray has lost sight of the first one.
        """
        with self._lock:
            is_first, self._is_serving = not self._is_serving, True
        if is_first:
            try:
                self._lost_reason = self._worker.serve()
            finally:
                self._has_ended.set()
        self._has_ended.wait()  # no deadline: it lasts as long as the worker
        return self._lost_reason


# ------------------------------------------------------------------------------------------------------------------
# In the driver's process.


class RayProcess(RemoteProcess):
    """One actor, in one bundle of a placement group."""

    def __init__(self, actor: Any, group: Any, bundle_index: int, node: Node, local_index: int) -> None:
        self.actor = actor
        self.group = group
        self.bundle_index = bundle_index
        self.local_index = local_index
        self.place = f"Ray node {node.address} ({node.node_id[:8]}), bundle {bundle_index}"
        self.state: ActorState | None = None
        self.service = actor.serve.remote()  # ends when the worker does
        self._end: str | None = None  # written once, by the thread that watches
        self._is_killed = False

    def __repr__(self) -> str:
        return f"<RayProcess {self.place}: {self._end or 'runs'}>"

    def exchange(self, message: bytes, deadline: float) -> bytes:
        answer: bytes = self.result(self.actor.handle.remote(message), deadline)
        return answer

    def result(self, ref: Any, deadline: float) -> Any:
        """Wait for a call of the actor.

        Raises:
            WorkerStartFailed: The actor has died, or the call failed.
            TimeoutError: The deadline has passed.
        """
        while not _wait_any([ref], deadline):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.place} did not respond in time")
        try:
            return ray.get(ref)
        except RayError as error:
            raise WorkerStartFailed(f"{self.place}: {why_failed(error)}") from error

    def end_reason(self) -> str | None:
        return self._end

    def kill(self) -> None:
        self._is_killed = True
        with contextlib.suppress(RayError, ValueError):  # it is gone, or its Ray is
            ray.kill(self.actor, no_restart=True)

    def holds(self, other: RayProcess) -> bool:
        """Return whether both have the same bundle."""
        return self.group == other.group and self.bundle_index == other.bundle_index

    def on_service_ended(self) -> bool:
        """Record how the worker ended; return False if it may come back and must be watched again."""
        try:
            lost = ray.get(self.service)
            self._end = "left" if lost is None else f"ended: it lost the driver ({lost})"
        except ActorUnavailableError:
            return False
        except RayError as error:
            self._end = "killed by the driver" if self._is_killed else why_failed(error)
        return True

    def watch_again(self) -> None:
        self.service = self.actor.serve.remote()


def _wait_any(refs: Sequence[Any], deadline: float) -> Sequence[Any]:
    """Return one that has ended, or none after a short time or at the deadline."""
    _interrupts.deliver()
    timeout_s = max(0.0, min(_SLICE_S, deadline - time.monotonic()))
    done: Sequence[Any] = ray.wait(list(refs), timeout=timeout_s, fetch_local=False)[0]
    return done


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WHY_DEAD = re.compile(r"The actor is dead because (.*)", re.DOTALL)
_NOISE = re.compile(r"Worker exit type: \w+ Worker exit detail: |\s*Some common causes include.*", re.DOTALL)


def why_failed(error: RayError) -> str:
    """Return in one or a few lines why a call of an actor failed, in Ray's words."""
    if isinstance(error, RuntimeEnvSetupError):
        return f"runtime_env could not be set up: {error}"
    text = _COLOUR.sub("", str(error))
    if isinstance(error, ActorDiedError) and (found := _WHY_DEAD.search(text)):
        reason = " ".join(_NOISE.sub("", found[1]).split())[:_MAX_REASON_CHARS]
        return f"its node was preempted: {reason}" if error.preempted else reason
    if isinstance(error, RayActorError) and "No module named 'gradwire" in text:
        return (
            f'gradwire is not installed on that node; install it, or pass runtime_env={{"pip": ["gradwire"]}}.\n{text}'
        )
    return text


class RayScheduler(Scheduler):
    """Starts one actor for each worker. Connects to Ray when it is first used."""

    def __init__(self, options: RayOptions, num_workers: int) -> None:
        self._options = options
        self._num_workers = num_workers
        self._lock = threading.Lock()  # guards the four below, and what Ray is asked to start
        self._groups: list[Any] = []
        self._processes: list[RayProcess] = []
        self._watcher: threading.Thread | None = None
        self._is_closed = False
        self._is_connected = False
        self._has_connected = False  # whether this made the connection, and ends it
        self._stop = threading.Event()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "connected" if self._is_connected else "not connected"
        return f"<RayScheduler {self._options.target}, {state}, {len(self._processes)} processes>"

    def bind_host(self) -> str:
        self._connect()
        # In a Ray that was started for this program all is on this machine, and need not be reachable from others.
        return "127.0.0.1" if self._starts_ray else _own_address()

    def launch(self, count: int, deadline: float, replaces: RemoteProcess | None = None) -> Sequence[RemoteProcess]:
        self._connect()
        if isinstance(replaces, RayProcess):
            return self._replace(replaces, deadline)
        with self._new_group(count) as group:
            self._wait_placed(group, range(count), deadline)
            places = self._places(group)
            order = sorted(range(count), key=lambda index: (places[index].address, places[index].node_id, index))
            return self._start_actors(
                [(group, index, places[index], position) for position, index in enumerate(order)], deadline
            )

    def describe(self) -> str:
        if not self._is_connected or self._is_closed:
            return f"Ray at {self._options.target}: not connected"
        how = "started for this program" if self._starts_ray else "joined" if self._has_connected else "of this program"
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.actor_options().items())
        lines = [
            f"Ray {ray.__version__} at {ray.get_runtime_context().gcs_address}, {how}",
            f"one bundle {format_amounts(self._options.bundle)} for each worker, placed with strategy "
            f"{self._options.strategy}",
            f"one actor {GradwireWorker.__name__} in each bundle: {options}, runtime_env={self._options.runtime_env!r}",
        ]
        with self._lock:
            processes = list(self._processes)
        for process in processes:
            state = process.state
            if state is not None and process.end_reason() is None:
                used = "".join(f", {kind} {' '.join(ids)}" for kind, ids in state.accelerators.items() if ids)
                token = "token" if state.requires_token else "no authentication"
                lines.append(f"  {process.place}: process {state.pid}{used} (Ray's own ports: {token})")
        return "\n".join(lines)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            groups, processes, watcher = self._groups, self._processes, self._watcher
        if ray.is_initialized():
            for process in processes:
                if process.end_reason() is None:
                    process.kill()
            for group in groups:
                _remove(group)
        self._stop.set()
        if watcher is not None:
            watcher.join(_JOIN_S)
        if self._has_connected:
            ray.shutdown()

    @property
    def _starts_ray(self) -> bool:
        return self._has_connected and self._options.target == _STARTS_RAY

    def _connect(self) -> None:
        if self._is_connected:
            return
        if ray.is_initialized() or _ray.is_client():
            self._check_connection_of_the_program()
        else:
            self._has_connected = True  # before it is: what was half started is ended, too
            self._init()
        self._is_connected = True
        # Ray refuses a driver without a token where it wants one. So this cluster wants none.
        if not _ray.requires_token():
            self._check_authentication([False])

    def _check_connection_of_the_program(self) -> None:
        if _ray.is_client():
            raise ConfigurationError(_no_client("this process is connected to Ray by"))
        has, wants = ray.get_runtime_context().gcs_address, self._options.address
        if wants not in (None, "auto", _STARTS_RAY, has):
            raise ConfigurationError(
                f"this process is already connected to the Ray cluster at {has}, not {wants}: leave address out to use it, "
                "or call ray.shutdown() first"
            )

    def _init(self) -> None:
        target = self._options.target
        sizes: dict[str, Any] = {}
        if target == _STARTS_RAY:  # it has room for all workers, as this machine has for those of Cluster.local
            needed = {name: amount * self._num_workers for name, amount in self._options.resources.items()}
            sizes = {
                "num_cpus": max(os.cpu_count() or 1, -int(-needed.pop("CPU", 0) // 1)),
                "resources": {name: amount for name, amount in needed.items() if name not in ("GPU", "memory")},
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
            }
        try:
            # Workers' output comes over gradwire's own connections, so Ray's logs are not shown as well.
            ray.init(
                address=target,
                runtime_env=dict(self._options.runtime_env) if self._options.runtime_env else None,
                logging_level="error",
                log_to_driver=False,
                **sizes,
            )
        except (ConnectionError, RuntimeError, RayError, ValueError, OSError) as error:
            if target == _STARTS_RAY:
                raise WorkerStartFailed(f"cannot start Ray on this machine: {error}") from error
            raise WorkerStartFailed(
                f"cannot join the Ray cluster at {target}: {error}\n"
                "The driver must run on a node of the cluster, as with `ray job submit`."
            ) from error

    def _check_authentication(self, required: Sequence[bool]) -> None:
        """Refuse a cluster that lets anyone in, if it is more than this machine."""
        elsewhere = sorted({node.address for node in _nodes()} - {_own_address()})
        if all(required) or not elsewhere or self._options.allow_unauthenticated:
            return
        raise ConfigurationError(
            f"this Ray cluster has nodes on other machines ({', '.join(elsewhere[:3])}) and no token authentication: "
            "anyone who can reach its ports can run programs as you. Start it with RAY_AUTH_MODE=token on every node "
            "(`ray get-auth-token --generate` creates a token), or accept this with allow_unauthenticated=True"
        )

    @contextlib.contextmanager
    def _new_group(self, count: int) -> Iterator[Any]:
        with self._lock:  # from here on `close` removes it, and with it the actors that are started there
            self._check_open()
            try:
                group = placement_group([self._options.bundle] * count, strategy=self._options.strategy)
            except ValueError as error:
                raise ConfigurationError(
                    f"Ray rejected resources={dict(self._options.resources)!r}: {error}"
                ) from error
            self._groups.append(group)
        with contextlib.ExitStack() as undo:
            undo.callback(self._drop, group)
            yield group
            undo.pop_all()

    def _drop(self, group: Any) -> None:
        with self._lock:
            if not self._is_closed:  # else it is removed already, and Ray may be shut down
                self._groups.remove(group)
                _remove(group)

    def _check_open(self) -> None:
        """Raise if this is closed, because a call would then start a new Ray; the caller holds the lock."""
        if self._is_closed:
            raise WorkerStartFailed("no actor was started: the cluster is closed")

    def _wait_placed(self, group: Any, indices: Sequence[int], deadline: float) -> None:
        """Wait until the bundles are placed on live nodes; Ray does not report bundles that can never be placed."""
        is_final = not self._can_grow()
        while not self._are_placed(group, indices):
            with self._lock:
                self._check_open()
            nodes = _nodes()
            bundle, strategy = self._options.bundle, self._options.strategy
            most = count_room([node.total for node in nodes], bundle, strategy)
            is_hopeless = is_final and most < len(group.bundle_specs) and len(indices) == len(group.bundle_specs)
            if is_hopeless or time.monotonic() >= deadline:
                raise WorkerStartFailed(explain_missing(len(indices), bundle, strategy, nodes))
            _interrupts.sleep(_POLL_S)

    def _can_grow(self) -> bool:
        return not self._starts_ray and _ray.can_grow()

    def _are_placed(self, group: Any, indices: Sequence[int]) -> bool:
        where = placement_group_table(group)["bundles_to_node_id"]
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return all(where.get(index) in alive for index in indices)

    def _places(self, group: Any) -> dict[int, Node]:
        nodes = {node.node_id: node for node in _nodes()}
        where = placement_group_table(group)["bundles_to_node_id"]
        return {index: nodes.get(node_id, Node(node_id, "unknown", {}, {})) for index, node_id in where.items()}

    def _replace(self, old: RayProcess, deadline: float) -> Sequence[RemoteProcess]:
        with self._lock:
            holders = [process for process in (old, *self._processes) if process.holds(old)]
        for process in holders:  # also one that was started there and did not become a worker
            process.kill()
        self._wait_placed(old.group, [old.bundle_index], deadline)
        node = self._places(old.group)[old.bundle_index]
        return self._start_actors([(old.group, old.bundle_index, node, old.local_index)], deadline)

    def _start_actors(self, places: Sequence[tuple[Any, int, Node, int]], deadline: float) -> Sequence[RayProcess]:
        with contextlib.ExitStack() as undo:
            processes = []
            for group, index, node, local_index in places:
                actor = self._make_actor(group, index, node, local_index)
                processes.append(RayProcess(actor, group, index, node, local_index))
                undo.callback(processes[-1].kill)
            try:
                self._wait_running(processes, deadline)
            except WorkerStartFailed as error:
                with self._lock:
                    self._check_open()
                _check_same_mode(error)
                raise
            self._check_authentication([process.state.requires_token for process in processes if process.state])
            self._watch(processes)
            undo.pop_all()
            return processes

    def _make_actor(self, group: Any, index: int, node: Node, local_index: int) -> Any:
        options = self._options.actor_options()
        if self._options.runtime_env and not self._has_connected:
            options["runtime_env"] = dict(self._options.runtime_env)  # else it was given to ray.init
        address = None if self._starts_ray else node.address  # what the node was told, and not a guess
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        with self._lock:
            self._check_open()
            try:
                return ray.remote(scheduling_strategy=strategy, **options)(GradwireWorker).remote(address, local_index)
            except (ValueError, TypeError) as error:
                raise ConfigurationError(f"Ray rejected the options of the actor: {error}") from error

    def _wait_running(self, processes: Sequence[RayProcess], deadline: float) -> None:
        waiting = {process.actor.state.remote(): process for process in processes}
        while waiting:
            for ref in _wait_any(list(waiting), deadline):
                process = waiting.pop(ref)
                process.state = process.result(ref, deadline)
            if waiting and time.monotonic() >= deadline:
                late = ", ".join(process.place for process in waiting.values())
                raise WorkerStartFailed(
                    f"Ray has not started the process in time: {late}. If it installs a runtime_env, raise start_timeout_s "
                    "(or timeout, for add_workers); `ray list actors` and `ray status` show what Ray is waiting for"
                )

    def _watch(self, processes: Sequence[RayProcess]) -> None:
        with self._lock:
            self._processes = [process for process in self._processes if process.end_reason() is None]
            self._processes += processes
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._run_watcher, name="gradwire-driver-ray-watcher", daemon=True
                )
                self._watcher.start()

    def _run_watcher(self) -> None:
        """Watch for workers that have ended according to Ray. The thread ends with the scheduler."""
        blind: dict[RayProcess, float] = {}  # those that Ray cannot reach now, and when to try again
        while not self._stop.is_set():
            with self._lock:
                living = [process for process in self._processes if process.end_reason() is None]
            for process in [process for process, at in blind.items() if at <= time.monotonic()]:
                del blind[process]
                process.watch_again()
            watched = {process.service: process for process in living if process not in blind}
            if not watched:
                self._stop.wait(_SLICE_S)
                continue
            try:
                for ref in ray.wait(list(watched), timeout=_SLICE_S, fetch_local=False)[0]:
                    if not watched[ref].on_service_ended():
                        blind[watched[ref]] = time.monotonic() + _REARM_S
            except (RayError, ConnectionError, RuntimeError):  # the program has disconnected from Ray
                return


def _check_same_mode(failure: WorkerStartFailed) -> None:
    """Report if an actor cannot start because the driver uses a token and the cluster does not."""

    def requires_token() -> bool:  # nested, so that its code is sent by value and no node needs gradwire for it
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        return bool(is_token_auth_enabled())

    if not _ray.requires_token():
        return
    with contextlib.suppress(RayError, ImportError):
        answer = ray.remote(num_cpus=0, max_retries=0)(requires_token).remote()
        if not ray.get(answer, timeout=_MODE_S):
            raise ConfigurationError(
                "this process has RAY_AUTH_MODE=token, but the Ray cluster has no token authentication, so it cannot "
                "report actors to this process. Start the cluster with RAY_AUTH_MODE=token on every node (`ray "
                "get-auth-token --generate` makes a token)"
            ) from failure


def _remove(group: Any) -> None:
    with contextlib.suppress(RayError, ConnectionError, RuntimeError):  # the program has disconnected from Ray
        remove_placement_group(group)


def _nodes() -> list[Node]:
    free = _ray.free_by_node()
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])
        if node["Alive"]
    ]


def _own_address() -> str:
    """Return Ray's address for this machine: the one given to `ray start`, if any."""
    own = ray.get_runtime_context().get_node_id()
    return next((node.address for node in _nodes() if node.node_id == own), ray.util.get_node_ip_address())
