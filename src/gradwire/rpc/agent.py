"""The agent of a worker: makes calls, serves calls, and detects when other workers die.

The agent builds and owns the parts: `client` and `server` are its two halves, `peers` tracks the other workers, `reactor`
and `reader` provide the threads.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gradwire import _interrupts
from gradwire.config import WorkerConfig
from gradwire.errors import (
    AuthenticationFailed,
    DuplicateWorker,
    GradwireError,
    IdentityTaken,
    InvalidName,
    UnknownWorker,
)
from gradwire.observe.log import get_logger
from gradwire.rpc.client import Client
from gradwire.rpc.codec import Codec
from gradwire.rpc.collectives import Gathering
from gradwire.rpc.connection import Connection
from gradwire.rpc.functions import CallId
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.interceptors import Interceptor
from gradwire.rpc.oneway import Notices
from gradwire.rpc.peers import Liveness, Membership, PeerTable, StaticDirectory, To
from gradwire.rpc.pending_calls import PendingCall
from gradwire.rpc.reactor import Reactor
from gradwire.rpc.server import Server
from gradwire.rpc.traffic import Traffic
from gradwire.transports import registry
from gradwire.transports.handshake import Identity
from gradwire.transports.registry import Listener, Transport
from gradwire.transports.unix import SocketFolder
from gradwire.types import Trust, WorkerAddress, WorkerInfo, is_worker_name, make_incarnation
from gradwire.wire.devices import DeviceMap

_log = get_logger(__name__)
_ANSWER_S = 5.0  # for answers that are due when this worker closes, to workers that may not read them
_LAST_ANSWERS_S = 1.0  # until a worker that has said goodbye has closed all its connections
_TELL_S = 5.0  # how long a new connection waits until the end of an earlier one has been reported


@dataclass(frozen=True, slots=True)
class AgentStatistics:
    """A snapshot of one worker."""

    name: str
    rank: int
    incarnation: int
    num_calls_made: int
    num_calls_served: int
    num_pending: int
    num_running: int
    num_waiting: int
    num_queued: int
    num_threads: int
    num_connections: int
    bytes_sent: int
    bytes_received: int


class Agent:
    """One worker of a cluster; `gradwire.runtime.start_worker` builds it.

    Args:
        address: This worker, without its URIs, which `start` fills in.
        config: Settings of this worker.
        trust: The cluster's trust level.
        directory: Addresses of the other workers.
        transports: Transports by scheme.
        on_close: Called at the end, to remove the worker's files.

    Attributes:
        is_leaving: Whether other workers can no longer join: those that are left have agreed to shut down, or `close` has
            begun.
        is_closed: Whether `close` has begun.
    """

    def __init__(
        self,
        address: WorkerAddress,
        config: WorkerConfig,
        trust: Trust,
        directory: StaticDirectory,
        transports: dict[str, Transport],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.config = config
        self.trust: Trust = trust
        self.directory = directory
        self.transports = transports
        self.interceptors: list[Interceptor] = []
        self.codec = Codec(address.info.name, trust, config.limits, self.interceptors)
        self.device_maps = {name: DeviceMap(devices) for name, devices in config.device_maps.items()}
        self.reactor = Reactor(address.info.name, config.num_worker_threads, self._sweep)
        self.traffic = Traffic()
        self.server = Server(self, config.num_worker_threads)
        self.peers = PeerTable(self)
        self.client = Client(self)
        self.call, self.submit, self.control = self.client.call, self.client.submit, self.client.control
        self.liveness = Liveness(self)
        self._on_close = on_close
        self._listeners: list[Listener] = []
        self._membership = Membership()
        self._lost_callbacks: list[Callable[[WorkerAddress, str], None]] = []
        self._connected_callbacks: list[Callable[[WorkerAddress], None]] = []
        self.sweeps: list[Callable[[float], float]] = []  # of the layers above: called by the clock, may not wait
        self.before_close: list[Callable[[], None]] = []  # run while connections are still open, to notify others
        self.farewells: list[Callable[[float], None]] = []  # run before this worker leaves, with a deadline
        self._lock = threading.Lock()  # guards _membership, _telling and is_closed
        self._told = threading.Condition(self._lock)  # notified when the end of a worker has been reported
        self._telling: dict[str, int] = {}  # workers whose end is being reported, and the threads that do it
        self.is_leaving = self.is_closed = False
        self._closed = threading.Event()  # set when close() has ended
        self.gathering = Gathering(self)
        self.notices = Notices(self)
        self.extensions: dict[str, Any] = {}  # state of the layers above for this worker, by layer name
        self.server.register_control("cancel", self.server.cancel, CallId)

    def __repr__(self) -> str:
        return f"<Agent {self.info.name} rank {self.info.id} {'closed' if self.is_closed else 'open'}>"

    @property
    def info(self) -> WorkerInfo:
        """This worker's name and rank."""
        return self.address.info

    @property
    def identity(self) -> Identity:
        return Identity(address=self.address, trust=self.trust, token=self.config.token)

    def start(self) -> None:
        """Start listening and serving."""
        try:
            for transport in self.transports.values():
                self._listeners.append(transport.listen(self.info.name))
            self.address = msgspec.structs.replace(self.address, uris=tuple(item.uri for item in self._listeners))
            try:
                self.directory.update(self.address)
            except IdentityTaken as error:
                raise DuplicateWorker(str(error)) from error
        except Exception:
            for listener in self._listeners:
                listener.close()
            self.reactor.close()
            raise
        _interrupts.install()
        self.reactor.start()
        for listener in self._listeners:
            on_ready = functools.partial(self.server.on_listener_ready, listener)
            self.reactor.add(listener.fileno(), on_ready, armed=True)

    def ask(
        self, to: str, operation: str, args: tuple[Any, ...], timeout_s: float, answer: Any = Any
    ) -> InterruptibleFuture[Any]:
        """Run a control operation like `control`, but return a future."""
        future: InterruptibleFuture[Any] = InterruptibleFuture()

        def on_done(call: PendingCall) -> None:
            if call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(call.value)

        self.client.control(to, operation, args, timeout_s, on_done, answer)
        return future

    def ask_all(
        self, names: Iterable[str], operation: str, args: tuple[Any, ...], timeout_s: float, answer: Any = Any
    ) -> dict[str, Any]:
        """Run a control operation on several workers; return the valid answers received within `timeout_s`, by name."""
        deadline = time.monotonic() + timeout_s
        futures, answers = {}, {}
        for name in names:
            with contextlib.suppress(GradwireError):  # it died, or is too busy to be connected to
                futures[name] = self.ask(name, operation, args, max(0.01, deadline - time.monotonic()), answer)
        for name, future in futures.items():
            with contextlib.suppress(Exception):  # it raised, died or is late, or its answer is of another type
                answers[name] = future.wait()
        return answers

    def _sweep(self, now: float) -> float:
        own = (self.server.sweep, self.client.sweep, self.gathering.sweep, self.liveness.sweep)
        return min(sweep(now) for sweep in (*own, *self.sweeps))

    def worker_info(self, worker: To | None = None) -> WorkerInfo:
        """Return name and rank of a worker; of this one if none is named.

        Raises:
            UnknownWorker: No worker has that name or rank.
        """
        if worker is None:
            return self.info
        return self.directory.find(worker if isinstance(worker, str | int) else self.peers.name_of(worker)).info

    def admit(self, address: WorkerAddress) -> None:
        """Admit a worker that has authenticated."""
        if not self._membership.is_current(address):
            raise self._outdated(address)
        self.directory.update(address)

    def _outdated(self, address: WorkerAddress) -> AuthenticationFailed:
        name, reason = address.info.name, self._membership.lost_reason(address.info.name)
        if reason is not None:
            return AuthenticationFailed(f"this incarnation of worker {name} was declared lost: {reason}")
        return AuthenticationFailed(f"a newer incarnation of worker {name} is known")

    def incarnation_of(self, name: str) -> int:
        """Return the newest incarnation of a worker that was connected here, or is now; connect if there is none."""
        return self._membership.newest(name) or self.peers.address_of(name).incarnation

    def newest_incarnation(self, name: str) -> int:
        """Return the newest incarnation of a worker that was ever connected here; 0 for none."""
        return self._membership.newest(name)

    def has_ended(self, name: str) -> bool:
        """Return whether a worker was found dead and has not reconnected."""
        return self._membership.has_ended(name)

    def lost_reason(self, name: str) -> str | None:
        """Return how a worker ended according to its supervisor; None while it counts as a member."""
        return self._membership.lost_reason(name)

    def on_connected(self, address: WorkerAddress) -> int:
        """Record a connection with a worker; return the `num_ends` with which its end must be reported.

        Raises:
            AuthenticationFailed: The worker's supervisor has declared it lost since it was admitted.
        """
        num_ends = self._on_alive(address)
        for callback in list(self._connected_callbacks):
            callback(address)
        return num_ends

    def _on_alive(self, address: WorkerAddress) -> int:
        """Record that an incarnation of a worker is alive, so that an older one has ended."""
        name, own = address.info.name, threading.get_ident()
        with self._told:
            # Reports of an earlier end must come before those of this connection.
            _interrupts.wait_for(self._told, lambda: self._telling.get(name, own) == own, _TELL_S)
            if self._membership.is_dismissed(address):
                raise self._outdated(address)
            older = self._membership.on_seen(address)
            num_ends = self._membership.num_ends(address)
        self.gathering.on_returned(address.info.name)
        if older is not None and not self.is_closed:
            self._tell_end(older, "it was restarted", was_orderly=False)
        return num_ends

    def on_worker_ended(
        self, address: WorkerAddress, reason: str, *, was_orderly: bool, num_ends: int | None = None
    ) -> None:
        """Fail everything that waits for a lost worker and notify the layers above, once."""
        # num_ends: the result of `on_connected` for the connection whose end is the evidence; None if there is none.
        with self._told:
            if self.is_closed or not self._membership.on_ended(address, num_ends):
                return
            self._telling[address.info.name] = threading.get_ident()
        self._tell_noted_end(address, reason, was_orderly=was_orderly)

    def num_ends(self, address: WorkerAddress) -> int:
        """Return how many ends of that incarnation of a worker, or of its connections, were noticed."""
        with self._told:
            return self._membership.num_ends(address)

    def catch_up(self, address: WorkerAddress, num_ends: int) -> None:
        """Report the end of a worker's connections now, if that worker has noticed more ends than this one.

        Otherwise this one would notice it later, and end the new connection with the old ones.
        """
        with self._told:
            if not self._membership.catch_up(address, num_ends) or self.is_closed:
                return
            self._telling[address.info.name] = threading.get_ident()
        self._tell_noted_end(address, "it has lost its connections with this worker", was_orderly=False)

    def _tell_noted_end(self, address: WorkerAddress, reason: str, *, was_orderly: bool) -> None:
        name = address.info.name
        try:
            self._tell_end(address, reason, was_orderly=was_orderly)
        finally:
            with self._told:
                self._telling.pop(name, None)
                self._told.notify_all()

    def _tell_end(self, address: WorkerAddress, reason: str, *, was_orderly: bool) -> None:
        name = address.info.name
        if not was_orderly:
            _log.info("%s lost worker %s: %s", self.info.name, name, reason)
        peer = self.peers.by_name.get(name)
        if peer is not None:
            if was_orderly:
                peer.read_last_answers(address.incarnation, time.monotonic() + _LAST_ANSWERS_S)
            peer.end_lanes(address.incarnation, reason)
        self.server.end_incoming(name, address.incarnation)
        for callback in list(self._lost_callbacks):
            callback(address, reason)

    def on_worker_connected(self, callback: Callable[[WorkerAddress], None]) -> None:
        """Call back on every connection with a worker before anything is read from it; a lost worker may be back."""
        self._connected_callbacks.append(callback)

    def on_worker_lost(self, callback: Callable[[WorkerAddress, str], None]) -> None:
        """Call back for every worker that dies or leaves, once for each incarnation."""
        self._lost_callbacks.append(callback)

    def dismiss(self, name: str, incarnation: int, reason: str, *, is_final: bool = False) -> None:
        """Declare an incarnation of a worker and all earlier ones lost, on behalf of its supervisor.

        Calls to it fail with this reason (``killed by SIGKILL``) until a later incarnation connects. Its connections are
        refused from now on, even if it is still alive. A later incarnation is not affected.

        Args:
            name: Name of the worker.
            incarnation: The incarnation that ended or no longer belongs to the cluster.
            reason: The reason, for error messages.
            is_final: Whether the worker is no longer a member.
        """
        with self._told:
            is_newest = self._membership.on_dismissed(name, incarnation, reason)
        with contextlib.suppress(UnknownWorker):  # it joined and left before this worker learned of it
            if is_newest:
                address = msgspec.structs.replace(self.directory.find(name), incarnation=incarnation)
                self.on_worker_ended(address, reason, was_orderly=False)
                if (peer := self.peers.by_name.get(name)) is not None:
                    peer.end_lanes(incarnation, reason)
                self.server.end_incoming(name, incarnation)
        if is_final and is_newest:
            self.directory.remove(name)

    def welcome(self, address: WorkerAddress) -> None:
        """Admit a worker, new or restarted, as a member on behalf of the cluster's supervisor."""
        is_news = self._membership.is_current(address) and address.incarnation > self._membership.newest(
            address.info.name
        )
        if address.info.name == self.info.name or not is_news:
            return
        self.directory.add(address)
        with contextlib.suppress(AuthenticationFailed):  # it was declared lost in the meantime
            self._on_alive(address)

    def shutdown(self, graceful: bool = True, timeout_s: float = 0.0) -> None:
        """Leave the cluster.

        Args:
            graceful: Wait until every worker has called `shutdown` and all calls have completed.
            timeout_s: How long to wait for that; 0 waits as long as the other workers are alive.

        Raises:
            RpcTimeout: A worker did not call it in time; this one has left anyway.
        """
        try:
            if graceful and not self.is_closed:
                deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
                others = self.gathering.agree_to_leave(deadline)
                for say_farewell in self.farewells:
                    say_farewell(deadline)
                self.gathering.see_off(others, deadline)
        finally:
            self.close()

    def close(self) -> None:
        """Stop at once: pending calls fail, and results of running functions are discarded. Idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_leaving = self.is_closed = True
        with (
            contextlib.ExitStack() as steps
        ):  # runs in reverse order, each step even if Ctrl-C interrupts an earlier one
            steps.callback(_interrupts.uninstall)
            steps.callback(self._closed.set)
            steps.callback(self._on_close)
            steps.callback(self.reactor.close)
            steps.callback(self.server.close)
            steps.callback(self.client.close)
            # Before any connection closes, because that tells a worker that this one has left.
            steps.callback(lambda: self.server.wait_answered(time.monotonic() + _ANSWER_S))
            steps.callback(self._stop_listening)
            for tell in list(self.before_close):
                try:
                    tell()
                except Exception:  # of a layer above, such as an exporter of the user's
                    _log.exception("%s: a callback failed while the worker was being closed", self.info.name)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            self.reactor.remove(listener.fileno())
            listener.close()

    def abandon_after_fork(self) -> None:
        """Close the copies of the parent's descriptors in a forked child, so that the parent's end can be detected."""
        self.is_closed = True
        for descriptor in [item.fileno() for item in (*(item.stream for item in self.connections()), *self._listeners)]:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def connections(self) -> list[Connection]:
        """Return all connections, those that this worker opened and those of others."""
        return self.peers.lanes() + list(self.server.incoming)

    def wait_closed(self, timeout_s: float) -> bool:
        """Return whether the worker was closed within that time."""
        return self._closed.wait(timeout_s)

    @property
    def is_quiet(self) -> bool:
        """Whether no call from or to this worker is in progress."""
        return self.server.is_idle and not self.client.num_pending

    def statistics(self) -> AgentStatistics:
        """Return a snapshot of this worker's activity."""
        slots, traffic = self.server.slots, self.traffic.by_worker().values()
        return AgentStatistics(
            name=self.info.name,
            rank=self.info.id,
            incarnation=self.address.incarnation,
            num_calls_made=self.client.num_made,
            num_calls_served=self.server.num_served,
            num_pending=self.client.num_pending,
            num_running=slots.num_running,
            num_waiting=slots.num_waiting,
            num_queued=slots.num_queued + slots.num_held,
            num_threads=self.reactor.num_threads,
            num_connections=len(self.connections()),
            bytes_sent=sum(sent for sent, _ in traffic),
            bytes_received=sum(received for _, received in traffic),
        )


attachments: list[Callable[[Agent], None]] = []
"""Functions with which the layers above extend every new agent before it starts (control operations, interceptors)."""

_LIFE_NS = 86_400 * 10**9
"""How far ahead the incarnation of a worker starts if its clock was set back: the layers above derive ids from it, and the
previous incarnation may have used all ids of that time."""


def start_worker(
    info: WorkerInfo,
    config: WorkerConfig,
    directory: StaticDirectory,
    *,
    folder: Path | None = None,
    after: int = 0,
    on_close: Callable[[], None] = lambda: None,
) -> Agent:
    """Build a worker and start it.

    Args:
        info: Its name and rank.
        config: Settings of the worker.
        directory: Directory of the other workers.
        folder: Private folder (0700) for its socket; a temporary one if not given.
        after: The worker's earlier incarnation, if known: this one's is higher, even if the clock was set back.
        on_close: Called when the worker is closed.

    Raises:
        ConfigurationError: A setting or address cannot be used; nothing is left running.
    """
    check_name(info.name, config.limits.name_bytes)
    clean_up = contextlib.ExitStack()
    clean_up.callback(on_close)
    try:
        if folder is None:
            own_folder = SocketFolder()
            clean_up.callback(own_folder.close)
            folder = own_folder.path
        trust: Trust = config.trust or ("data" if config.tls is not None else "code")
        incarnation = make_incarnation()
        if incarnation <= after:  # the clock was set back
            incarnation = after + _LIFE_NS
        address = WorkerAddress(info, incarnation, registry.host_identity(), (), _digest_of_main())
        transports = registry.make_transports(config, trust, folder)
        agent = Agent(address, config, trust, directory, transports, clean_up.close)
        for attach in attachments.copy():
            attach(agent)
        agent.start()
    except Exception:
        clean_up.close()
        raise
    return agent


def _digest_of_main() -> str:
    """Return a digest that is equal for workers that run the same script; empty in a notebook or interactive interpreter."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32] if path else ""
    except OSError:
        return ""


def check_name(name: str, limit: int) -> None:
    """Refuse names that would be confusing in messages, paths or logs."""
    if not name:
        raise InvalidName("a worker's name must be non-empty")
    if (num_bytes := len(name.encode())) > limit:
        raise InvalidName(f"a worker's name must be at most {limit} bytes long, not {num_bytes}: {name!r}")
    if not is_worker_name(name):
        raise InvalidName(f"Worker name must match letters, digits, '-', '_', ':' and '.', but got {name!r}")
