"""Connections that this worker opened, and the calls under way on them.

A peer has two lanes: ``calls`` for user functions, ``control`` for everything that must never wait behind them. Both are
opened together, on first use. The end of the control lane is what tells of a worker's end; see `liveness`.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gradwire.errors import (
    AuthenticationFailed,
    CallCancelled,
    ConnectFailed,
    ConnectionClosed,
    ConnectionLost,
    DecodeError,
    IdentityTaken,
    NotInitialized,
    ResourceExhausted,
    RpcTimeout,
    TransportError,
    UnknownWorker,
    WorkerLost,
)
from gradwire.rpc.pending_calls import CallTable, PendingCall
from gradwire.rpc.reactor import Bell
from gradwire.rpc.reader import Reader
from gradwire.transports import registry
from gradwire.transports.handshake import CALLER_ACCEPTS, CallerHandshake
from gradwire.transports.stream import StreamConnection
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire import exceptions as failures
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Challenge, Failure, Goodbye, Lane, Message, Reply

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent


_log = logging.getLogger("gradwire")
_LANE_ACCEPTS: frozenset[type[Message]] = frozenset({Reply, Failure, Goodbye})
_ANSWERS = (Reply, Failure)
_MAX_REASON_BYTES = 1024
_LOOK_S = 0.002
_LANES: tuple[Lane, ...] = ("calls", "control")


class OpenLane:
    """One open connection to a peer.

    Args:
        peer: Whose lane it is.
        kind: What it carries.
        connection: Handshaken.
        address: Who answered the handshake.
        num_ends: What `Agent.on_connected` returned for it.
        is_on_this_machine: What was written is read, even if the connection ends right after.
    """

    def __init__(
        self,
        peer: Peer,
        kind: Lane,
        connection: StreamConnection,
        address: WorkerAddress,
        num_ends: int,
        is_on_this_machine: bool = False,
    ) -> None:
        self.peer = peer
        self.kind = kind
        self.connection = connection
        self.address = address
        self.num_ends = num_ends
        self.is_on_this_machine = is_on_this_machine
        self.shares_main = peer.agent.address.shares_main(address)
        self.calls = CallTable()
        self.room = Bell()  # rung when a call ends while somebody waits for room
        self.num_waiting_for_room = 0
        self._agent = peer.agent
        wants = self.calls.__len__ if kind == "calls" else _always
        self.reader = Reader(connection, self._agent.reactor, self._on_frame, self._on_end, wants)
        self.calls.reader = self.reader
        self.reader.is_lingered_on = kind == "calls"
        self.goodbye: str | None = None

    def _on_frame(self, frame: Frame) -> None:
        message = frame.message
        if not isinstance(message, _ANSWERS):
            assert isinstance(message, Goodbye)
            self.goodbye = failures.clean(message.reason, _MAX_REASON_BYTES)
            return
        call = self.calls.get(message.call_id)
        if call is None:
            return  # cancelled or timed out here; the answer is late
        self.peer.last_seen = time.time()
        value: Any = None
        error: Exception | None = None
        try:
            if isinstance(message, Failure):
                error = failures.rebuild_exception(message.error, self._agent.trust)
            elif frame.shortage:
                text = f"this worker has no memory for the result of {call.function} on worker {call.worker}"
                error = ResourceExhausted(f"{text}: {frame.shortage}")
            else:
                value = self._agent.codec.load_reply(frame, message, self.address.info, call.function)
        except Exception as problem:  # the result cannot be rebuilt here
            error = problem
        except BaseException as problem:
            if not self._agent.reactor.is_service_thread():
                raise  # Ctrl-C: the call is still in its table, and a service thread gets the frame again
            error = CallCancelled(f"{call!r}: rebuilding its result raised {type(problem).__name__}")
        try:
            if self.calls.pop(message.call_id, None) is not None:
                self._agent.caller.finish(call, value, error)
        except BaseException:  # Ctrl-C, maybe in a thread that reads for another one
            self._agent.caller.finish_soon(call, value, error)
            raise
        if self.num_waiting_for_room:
            self.room.ring()

    def wait_for_room(self, call: PendingCall, limit: int) -> None:
        """Blocks until fewer than `limit` calls are under way.

        Raises:
            RpcTimeout: They were not, before the call's deadline.
        """
        self.num_waiting_for_room += 1
        try:
            while len(self.calls) >= limit:
                left = call.deadline - time.monotonic()
                if left <= 0:
                    raise RpcTimeout(call.timeout_text("send", time.monotonic()), call.worker, "send")
                if not self.reader.read_until(lambda: len(self.calls) < limit, call.deadline):
                    self.room.wait(min(left, 0.01))
        finally:
            self.num_waiting_for_room -= 1

    def _on_end(self, error: Exception) -> None:
        self.peer.on_lane_end(self, error)
        self._agent.liveness.connection_ended(self.address)


def _always() -> bool:
    return True


def _give_up(connection: StreamConnection) -> None:
    """Closes a connection that was not needed after all. The other side may hold it for open, and its end for ours."""
    with contextlib.suppress(TransportError, TimeoutError, OSError):
        connection.send(Goodbye("connecting was given up"), deadline=time.monotonic())
    connection.close()


class Peer:
    """Another worker, as seen from here."""

    def __init__(self, agent: Agent, name: str) -> None:
        self.agent = agent
        self.name = name
        self.lanes: dict[str, OpenLane] = {}
        self.last_seen: float | None = None
        self.lost_reason: str | None = None  # said by whoever supervises the worker
        self._lock: Any = threading.RLock()  # one thread connects; it knows its owner: see `lane`

    def __repr__(self) -> str:
        return f"<Peer {self.name} {'connected' if self.lanes else self.lost_reason or 'not connected'}>"

    def lane(self, kind: Lane, deadline: float) -> OpenLane:
        """The open lane, connecting first if need be.

        Raises:
            RpcTimeout: No connection before the deadline.
            WorkerLost: Nobody answers there.
            AuthenticationFailed: Whoever answers is not of this cluster.
        """
        open_lane = self.lanes.get(kind)
        if open_lane is not None:
            return open_lane
        limit = min(deadline, time.monotonic() + self.agent.config.limits.handshake_timeout_s)
        try:
            if not self._lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), 1e6))):
                text = f"RPC ran for more than its time: no connection to worker {self.name} (phase: connect)"
                raise RpcTimeout(text, self.name, "connect")
            return self.lanes.get(kind) or self._open(limit)[kind]
        finally:  # in one step that may fail: Ctrl-C may hit before anybody can note that the lock was taken
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:
                pass

    def _open(self, deadline: float) -> dict[str, OpenLane]:
        """Opens the lanes that are missing; either all of them are watched and known afterwards, or none is left."""
        if self.lost_reason is not None:
            raise self.lost(self.lost_reason)
        self._check_open()
        address = self.agent.directory.find(self.name)
        lanes: dict[str, OpenLane] = {}
        try:
            try:
                self._connect(lanes, address, deadline)
            except (ConnectFailed, AuthenticationFailed):
                newer = self.agent.directory.refresh(self.name)
                if newer is None or newer == address:
                    raise
                self._connect(lanes, newer, deadline)
            for open_lane in lanes.values():
                open_lane.reader.start()
            self.lanes.update(lanes)
            self.agent.liveness.connections_opened()
            for open_lane in lanes.values():
                if open_lane.reader.has_ended:  # before it was listed, so that nobody has struck it off
                    self.forget_lane(open_lane)
            self._check_open()  # again: `close` may have looked for lanes before these were listed
            return lanes
        except TimeoutError as error:
            raise RpcTimeout(
                f"RPC ran for more than its time: worker {self.name} took the connection but did not answer "
                f"(phase: connect); it may be stopped or overloaded",
                self.name,
                "connect",
            ) from error
        except AuthenticationFailed:
            raise
        except TransportError as error:
            raise self.lost(f"it cannot be reached: {error}") from error
        except BaseException:  # Ctrl-C must not leave a lane that nobody watches, nor a closed worker one at all
            for open_lane in lanes.values():
                _give_up(open_lane.connection)
                open_lane.reader.end(ConnectionClosed("connecting was interrupted"))
            raise

    def _check_open(self) -> None:
        if self.agent.is_closed:
            raise NotInitialized(f"worker {self.agent.info.name} has shut down; it opens no more connections")

    def _connect(self, lanes: dict[str, OpenLane], address: WorkerAddress, deadline: float) -> None:
        try:
            # Looked up each time: a new incarnation that answers ends what is left of the old one's lanes.
            while missing := [kind for kind in _LANES if kind not in self.lanes and kind not in lanes]:
                lanes[missing[0]] = self._connect_lane(address, missing[0], deadline)
        except Exception:
            for open_lane in lanes.values():
                _give_up(open_lane.connection)
            lanes.clear()
            raise

    def _connect_lane(self, address: WorkerAddress, kind: Lane, deadline: float) -> OpenLane:
        agent = self.agent
        uri = registry.choose_uri(address, agent.address.host, agent.transports)
        connection = agent.transports[uri.partition(":")[0]].connect(uri, deadline)
        try:
            connection.decoder.accept = CALLER_ACCEPTS
            handshake = CallerHandshake(agent.identity, address, kind, agent.admit)
            answer: Message | None = handshake.begin()
            while answer is not None:
                connection.send(answer, deadline=deadline)
                frame = connection.receive(deadline)
                # Asked for where it counts: behind a refusal the connection may have ended already.
                is_challenge = isinstance(frame.message, Challenge)
                answer = handshake.on_message(frame.message, connection.certified_names() if is_challenge else None)
            connection.decoder.accept = _LANE_ACCEPTS
            assert handshake.peer is not None
            num_ends = agent.on_connected(handshake.peer)
            return OpenLane(self, kind, connection, handshake.peer, num_ends, not uri.startswith("tcp:"))
        except BaseException:
            _give_up(connection)
            raise

    def on_lane_end(self, ended: OpenLane, error: Exception) -> None:
        """A connection ended: its calls fail, and unless it was only this connection's fault, the other lane's too."""
        self.forget_lane(ended)
        if isinstance(error, ConnectionClosed):
            self._fail(ended, "this worker closed the connection")
            self.agent.notices.lane_ended(self.name)
            return
        if isinstance(error, DecodeError):
            self._fail(ended, f"it sent bytes that are no message ({error}); only this connection was closed")
            self.agent.notices.lane_ended(self.name)
            return
        if ended.goodbye is not None and ended.goodbye != "shutdown":
            self._fail(ended, f"it closed the connection: {ended.goodbye}")
            self.agent.notices.lane_ended(self.name)
            return
        reason = (
            "it has shut down" if ended.goodbye else "its connection ended without a goodbye: it died or was killed"
        )
        if ended.kind == "control":  # a worker that dies loses both; one that gives up on a reply only the other
            was_orderly = ended.goodbye is not None
            self.agent.on_worker_ended(ended.address, reason, was_orderly=was_orderly, num_ends=ended.num_ends)
        self._fail(ended, reason)

    def forget_lane(self, ended: OpenLane) -> None:
        """The next call opens another connection."""
        if self.lanes.get(ended.kind) is ended:
            self.lanes.pop(ended.kind, None)  # another thread may be here, too

    def end_lanes(self, incarnation: int, reason: str) -> None:
        """The worker (up to that incarnation) is gone: ends its lanes here."""
        for open_lane in self._lanes_to(incarnation):
            self._fail(open_lane, reason)
            open_lane.reader.end(ConnectionClosed(reason))

    def read_last_answers(self, incarnation: int, deadline: float) -> None:
        """Take the answers that a worker (up to that incarnation) sent before it left; it closes its connections itself.

        Its goodbye may have been read on another connection than the one that its answers lie in.
        """
        pause = threading.Event()  # never set: a wait that Ctrl-C interrupts
        for open_lane in self._lanes_to(incarnation):
            reader, calls = open_lane.reader, open_lane.calls
            while calls and not reader.has_ended and time.monotonic() < deadline:
                if not reader.read_until(partial(operator.not_, calls), deadline):  # another thread reads
                    pause.wait(_LOOK_S)

    def _lanes_to(self, incarnation: int) -> list[OpenLane]:
        return [item for item in list(self.lanes.values()) if item.address.incarnation <= incarnation]

    def _fail(self, open_lane: OpenLane, reason: str) -> None:
        arriving = {message.call_id for message in open_lane.reader.in_hand() if isinstance(message, _ANSWERS)}
        self.agent.caller.fail_all(open_lane.calls, lambda call: self.lost(reason, call), arriving)
        open_lane.room.ring()

    def lost(self, reason: str, call: PendingCall | None = None) -> WorkerLost:
        """What to raise for a call of this worker, or because it cannot be reached."""
        what = f"call of {call.function} on worker {self.name} failed" if call else f"worker {self.name} is lost"
        outcome = "; it is unknown whether the function ran there" if call else ""
        seen = f", last heard of {time.time() - self.last_seen:.1f} s ago" if self.last_seen else ""
        return WorkerLost(f"{what}: {self.lost_reason or reason}{seen}{outcome}", self.name, self.last_seen)

    def close(self, say_goodbye: Callable[[StreamConnection], None]) -> None:
        """Ends both lanes in good order."""
        for open_lane in list(self.lanes.values()):
            say_goodbye(open_lane.connection)
            open_lane.reader.end(ConnectionClosed("shutdown"))


To = str | int | WorkerInfo


class PeerTable:
    """One worker's peers."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._peers: dict[str, Peer] = {}
        self._lock = threading.Lock()  # guards _peers

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def name_of(self, to: To) -> str:
        """The name of a worker that is given by name, rank or `WorkerInfo`.

        Raises:
            UnknownWorker: There is no worker of that rank, or it is none of the three.
        """
        if isinstance(to, str):
            return to
        if isinstance(to, WorkerInfo):
            return to.name
        if isinstance(to, int):
            return self._agent.directory.find(to).info.name
        name = getattr(to, "name", None)
        if isinstance(name, str):
            return name
        raise UnknownWorker(f"a worker is named by its name, rank or WorkerInfo, not by {to!r}")

    def peer(self, name: str) -> Peer:
        """The other worker of that name.

        Raises:
            UnknownWorker: There is none.
        """
        peer = self._peers.get(name)
        if peer is None:
            self._agent.directory.find(name)
            with self._lock:
                peer = self._peers.setdefault(name, Peer(self._agent, name))
        return peer

    def known(self, name: str) -> Peer | None:
        """The other worker of that name, if anything was ever to be sent to it."""
        return self._peers.get(name)

    def lanes(self) -> list[OpenLane]:
        """All open connections for calls and control."""
        return [lane for peer in self for lane in list(peer.lanes.values())]

    def address_of(self, name: str, timeout_s: float = 10.0) -> WorkerAddress:
        """The address of the incarnation that is connected, or becomes so now.

        Raises:
            UnknownWorker: There is none of that name.
            WorkerLost, RpcTimeout: It cannot be reached.
        """
        if name == self._agent.info.name:
            return self._agent.address
        peer = self._peers.get(name) or self.peer(name)
        lane = peer.lanes.get("calls") or peer.lane("calls", time.monotonic() + timeout_s)
        return lane.address

    def is_connected(self, worker: int, incarnation: int) -> bool:
        """Whether anything may still come from that worker."""
        addresses = [lane.address for lane in self.lanes()] + self._agent.server.visitors()
        return any(item.info.id == worker and item.incarnation == incarnation for item in addresses)


class Membership:
    """What this worker knows about the lives of the others."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._ended: dict[str, int] = {}  # the newest incarnation whose end was told, by name
        self._num_ends: dict[str, int] = {}  # how many ends of each worker were told

    def is_current(self, address: WorkerAddress) -> bool:
        """Whether no newer incarnation of that worker has been seen."""
        return address.incarnation >= self.newest(address.info.name)

    def newest(self, name: str) -> int:
        """The highest incarnation seen; 0 for none."""
        return self._newest.get(name, 0)

    def has_ended(self, name: str) -> bool:
        """Whether the end of a worker's newest incarnation was noticed."""
        return self._ended.get(name, -1) >= self.newest(name)

    def num_ends(self, name: str) -> int:
        """How many ends of a worker were told. A connection that was made before the last of them is part of it."""
        return self._num_ends.get(name, 0)

    def on_seen(self, address: WorkerAddress) -> WorkerAddress | None:
        """A worker is connected: whatever was known of its end no longer counts.

        Returns:
            Its earlier incarnation, if that must have ended meanwhile and this was not told: it is to be told now.
        """
        name, known = address.info.name, self.newest(address.info.name)
        if self._ended.get(name, -1) >= address.incarnation:  # it is back
            self._ended[name] = address.incarnation - 1
        self._newest[name] = max(known, address.incarnation)
        earlier = known and known < address.incarnation
        if earlier and self.on_ended(msgspec.structs.replace(address, incarnation=known)):
            return msgspec.structs.replace(address, incarnation=known)
        return None

    def on_ended(self, address: WorkerAddress, num_ends: int | None = None) -> bool:
        """A worker's end was noticed: True the first time.

        Args:
            address: The worker.
            num_ends: What `num_ends` was when the connection was made whose end tells; None if no connection does. The
                worker may have been taken for dead and be back by the time that the last of its old connections ends.
        """
        name = address.info.name
        if self._ended.get(name, -1) >= address.incarnation or num_ends not in (None, self.num_ends(name)):
            return False
        self._ended[name] = address.incarnation
        self._num_ends[name] = self.num_ends(name) + 1
        return True


_LOOK_S = 1.0  # between two looks at a connection
_RETURN_S = 1.0  # between the end of a worker's connection and the look whether it has a control lane
_NEVER = float("inf")


class Liveness:
    """Looks after the connections of one worker, with both halves: those that it opened and those of others."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        # Workers that may have no control lane, by name, and when to look; single operations only.
        self._doubtful: dict[str, tuple[float, WorkerAddress]] = {}

    def connections_opened(self) -> None:
        """Look at new connections soon; call it when they are listed."""
        self._agent.reactor.expect(time.monotonic() + _LOOK_S)

    def connection_ended(self, address: WorkerAddress) -> None:
        """See to it that the worker has a control lane; call it when the connection is not listed any more."""
        if self._agent.is_closed:
            return
        # Not put off by the next one that ends: a worker could go on with that.
        known = self._doubtful.get(address.info.name)
        when = known[0] if known is not None else time.monotonic() + _RETURN_S
        self._doubtful[address.info.name] = when, address
        self._agent.reactor.expect(when)

    def sweep(self, now: float) -> float:
        """End connections whose machine is gone, and reach for workers without a control lane.

        Returns:
            When to look again.
        """
        wanted, agent = _NEVER, self._agent
        for reader in [*(lane.reader for lane in agent.peers.lanes()), *agent.server.readers()]:
            if reader.connection.can_vanish:
                wanted = now + _LOOK_S
                if reader.connection.is_vanished():
                    vanished = ConnectionLost("the other machine does not acknowledge anything")
                    agent.reactor.run_soon(partial(reader.end, vanished))
        for name, (when, address) in list(self._doubtful.items()):
            if when > now:
                wanted = min(wanted, when)
                continue
            self._doubtful.pop(name, None)  # before looking: what ends later is listed again
            if not self._is_settled(name):
                agent.reactor.run_soon(partial(self._reach, address))
        return wanted

    def _is_settled(self, name: str) -> bool:
        """Whether a worker has ended, or its end will be noticed."""
        peer = self._agent.peers.known(name)
        has_lane = peer is not None and "control" in peer.lanes
        return has_lane or self._agent.has_ended(name) or self._agent.server.has_control_lane_of(name)

    def _reach(self, address: WorkerAddress) -> None:
        """Open a control lane to a worker; the one that it had has ended, and it has not, as far as is known."""
        agent, name = self._agent, address.info.name
        try:
            agent.peers.peer(name).lane("control", time.monotonic() + agent.config.limits.handshake_timeout_s)
        except NotInitialized:  # this worker has shut down
            return
        except (WorkerLost, AuthenticationFailed, UnknownWorker) as error:
            if isinstance(error.__cause__, ResourceExhausted):
                self.connection_ended(address)  # look again
            elif not self._is_settled(name):
                agent.on_worker_ended(address, f"its control lane ended, and then: {error}", was_orderly=False)
        except (RpcTimeout, OSError):  # it may be stopped, or this process out of descriptors
            self.connection_ended(address)


class Directory(Protocol):
    """Finds workers by name or rank.

    Attributes:
        is_fixed: Whether the workers are all known; otherwise they come and go.
    """

    @property
    def is_fixed(self) -> bool: ...

    def find(self, worker: str | int) -> WorkerAddress:
        """The worker's address as known now.

        Raises:
            UnknownWorker: No such worker.
        """

    def refresh(self, name: str) -> WorkerAddress | None:
        """Looks again, because the worker did not answer; None if nothing new is known."""

    def update(self, address: WorkerAddress) -> None:
        """Note a worker that has shown who it is; from now on its name and its rank belong together.

        Raises:
            IdentityTaken: The name belongs to another rank, or the rank to another name.
            AuthenticationFailed: All workers are known, and it is none of them.
        """

    def infos(self) -> list[WorkerInfo]:
        """All known workers, by rank."""


class StaticDirectory:
    """Addresses that were known when the cluster was made, or of workers that have shown who they are."""

    is_fixed = True

    def __init__(self, addresses: Iterable[WorkerAddress] = ()) -> None:
        self._is_complete = False
        self._binding = threading.Lock()  # guards changes of the two tables below
        self._by_name: dict[str, WorkerAddress] = {}
        self._names: dict[int, str] = {}  # by rank
        for address in addresses:
            self.update(address)

    def complete(self) -> None:
        """All workers are known: no other is let in from now on."""
        self._is_complete = True

    def find(self, worker: str | int) -> WorkerAddress:
        """The worker of that name or rank.

        Raises:
            UnknownWorker: There is none.
        """
        name = worker if isinstance(worker, str) else self._names.get(worker)
        found = self._by_name.get(name) if name is not None else None
        if found is None:
            known = ", ".join(info.name for info in self.infos())
            raise UnknownWorker(f"could not find destination: no worker {worker!r} in this cluster; it has: {known}")
        return found

    def refresh(self, name: str) -> WorkerAddress | None:
        """Nothing new can be known here."""
        return None

    def update(self, address: WorkerAddress) -> None:
        """Binds name and rank, and remembers the address unless a newer incarnation is known.

        Raises:
            IdentityTaken: Name or rank is bound otherwise.
            AuthenticationFailed: All workers are known, and it is none of them.
        """
        name, rank = address.info.name, address.info.id
        with self._binding:
            self.check(address.info)
            known = self._by_name.get(name)
            if known is None and self._is_complete:
                raise AuthenticationFailed(
                    f"{name} of rank {rank} does not belong to this cluster of {len(self._by_name)}"
                )
            if known is None or known.incarnation <= address.incarnation:
                self._by_name[name] = address
            self._names[rank] = name

    def check(self, info: WorkerInfo) -> None:
        """Compare a name and a rank with those that are bound.

        Raises:
            IdentityTaken: They do not belong together.
        """
        known, holder = self._by_name.get(info.name), self._names.get(info.id, info.name)
        if holder != info.name or (known is not None and known.info.id != info.id):
            other = self._by_name[holder].info if holder != info.name else known.info if known is not None else info
            raise IdentityTaken(
                f"worker name or rank is not unique: {other.name} of rank {other.id} and {info.name} of rank {info.id}; "
                f"every rank needs a name of its own and every name a rank of its own"
            )

    def infos(self) -> list[WorkerInfo]:
        """All workers, by rank."""
        return sorted((address.info for address in list(self._by_name.values())), key=lambda info: info.id)
