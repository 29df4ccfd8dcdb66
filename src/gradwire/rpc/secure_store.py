"""The store of a rendezvous between machines, served by rank 0 over mutual TLS 1.3 with certificates of the cluster.

    worker --Call: one of the requests below--> rank 0
           <--Reply: the answer, or Failure----

`Entries` decides which worker may write what, and how much. A worker can only publish itself: its certificate must be valid
for the name, and a name and a rank stay bound to each other. Only the process that serves the store can be rank 0.
`StoreServer` and `StoreClient` exchange the messages, in the frames of `gradwire.wire.framing`.

A client without a certificate of the cluster gets no further than the TLS handshake, and can occupy only a few connections
for a few seconds. A member can prevent a meeting, but can neither impersonate another nor read more than it may.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from gradwire import _interrupts
from gradwire.config import KIB, MIB, Limits, TlsKeys
from gradwire.errors import (
    AuthenticationFailed,
    ConfigurationError,
    ConnectFailed,
    DecodeError,
    GradwireError,
    IdentityTaken,
    LimitExceeded,
    RendezvousFailed,
    ResourceExhausted,
    TransportError,
)
from gradwire.observe.log import get_logger
from gradwire.rpc.meeting_store import ANSWER_S, LOOK_S, START_RANK_0, MeetingPointLost
from gradwire.rpc.peers import not_unique_text
from gradwire.transports import tls as certificates
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.transports.tcp import TcpListener, TcpTransport, make_uri
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire import serialization
from gradwire.wire.exceptions import clean, describe_exception, rebuild_exception
from gradwire.wire.messages import Call, Failure, Reply, decode_address, encode_address

_log = get_logger(__name__)
T = TypeVar("T")

_LIMITS = Limits(frame_bytes=64 * KIB, header_bytes=16 * KIB, num_tensors=1, error_text_bytes=4 * KIB)
_MAX_ADDRESS_BYTES = 32 * KIB
_MAX_BYTES = 64 * MIB  # of all addresses
_MAX_NOTE = 4 * KIB
_PAGE = 256  # names in one answer
_MAX_CONNECTIONS = 1024
_MAX_OF_ONE = 4  # connections of one worker, where certificates name one
_IDLE_S = 60.0  # a worker asks several times a second, and opens another connection if need be
_SEND_S = 0.5
_END_S = 2.0
_MEETING_ANSWER_S = 10.0
_REFUSED_S = 1.0  # a refusal that lasts so long is from rank 0, or from a process in its place
_SILENT_S = 15.0  # the same for silence: a busy machine, or a server without TLS
_FUNCTION = "meeting"
_MAX_REFUSALS = 16  # that are remembered

_Index = Annotated[int, Meta(ge=0, le=1 << 20)]
_Rank = Annotated[int, Meta(ge=0, le=65_535)]
_Name = Annotated[str, Meta(max_length=1024)]


# What is asked for


class _Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class GetToken(_Request, frozen=True):
    pass


class Publish(_Request, frozen=True):
    address: Annotated[bytes, Meta(max_length=_MAX_ADDRESS_BYTES)]


class Find(_Request, frozen=True):
    worker: _Name | _Rank


class ListNames(_Request, frozen=True):
    start: _Index  # how many are known already


class Announce(_Request, frozen=True):
    note: Annotated[str, Meta(max_length=_MAX_NOTE)]


class GetNote(_Request, frozen=True):
    pass


class Withdraw(_Request, frozen=True):
    rank: _Rank


class HasWithdrawn(_Request, frozen=True):
    rank: _Rank


Request = GetToken | Publish | Find | ListNames | Announce | GetNote | Withdraw | HasWithdrawn

_requests = msgspec.msgpack.Decoder(Request)
_answers: dict[type[Request], msgspec.msgpack.Decoder[Any]] = {
    GetToken: msgspec.msgpack.Decoder(bytes),
    Publish: msgspec.msgpack.Decoder(None),
    Find: msgspec.msgpack.Decoder(bytes | None),
    ListNames: msgspec.msgpack.Decoder(list[_Name]),
    Announce: msgspec.msgpack.Decoder(None),
    GetNote: msgspec.msgpack.Decoder(tuple[Annotated[str, Meta(max_length=_MAX_NOTE)], float]),
    Withdraw: msgspec.msgpack.Decoder(None),
    HasWithdrawn: msgspec.msgpack.Decoder(bool),
}
_encode = msgspec.msgpack.Encoder().encode


class Entries:
    """The contents of the store, and the rules for adding to it. No sockets, no threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._token = secrets.token_hex(32).encode()
        self._addresses: dict[str, bytes] = {}  # encoded, by name, in the order in which they came
        self._names: dict[int, str] = {}  # by rank
        self._ranks: dict[str, int] = {}
        self._num_bytes = 0
        self._note = ""
        self._noted_at = clock()
        self._withdrawn: set[int] = set()  # ranks

    def __repr__(self) -> str:
        return f"<Entries of {len(self._addresses)} workers, {self._num_bytes:,} bytes>"

    def handle(self, request: Request, certified: frozenset[str] | None) -> Any:
        """Return the answer to a request.

        Args:
            request: The request.
            certified: The names that the client's certificate is valid for; None for this process.

        Raises:
            AuthenticationFailed: The worker may not write that.
            LimitExceeded: There is no room for it.
            DecodeError: It is not an address.
        """
        if isinstance(request, GetToken):
            return self._token
        if isinstance(request, Publish):
            self._publish(request.address, certified)
            return None
        if isinstance(request, Find):
            name = request.worker if isinstance(request.worker, str) else self._names.get(request.worker, "")
            return self._addresses.get(name)
        if isinstance(request, ListNames):
            return list(self._addresses)[request.start : request.start + _PAGE]
        if isinstance(request, Announce):
            self._note, self._noted_at = clean(request.note, _MAX_NOTE), self._clock()
            return None
        if isinstance(request, GetNote):
            return self._note, self._clock() - self._noted_at
        if isinstance(request, Withdraw):
            self._withdrawn.add(request.rank)
            return None
        return request.rank in self._withdrawn

    def _publish(self, raw: bytes, certified: frozenset[str] | None) -> None:
        info = decode_address(raw, _LIMITS).info
        if certified is not None:
            certificates.check_identity(certified, info.name)
            if info.id == 0:
                raise AuthenticationFailed(f"{info.name} cannot be rank 0: this store is served by rank 0 itself")
        holder, rank = self._names.get(info.id, info.name), self._ranks.get(info.name, info.id)
        if holder != info.name or rank != info.id:
            raise IdentityTaken(not_unique_text(WorkerInfo(holder, self._ranks[holder]), info))
        num_bytes = self._num_bytes - len(self._addresses.get(info.name, b"")) + len(raw)
        if num_bytes > _MAX_BYTES:
            raise LimitExceeded(f"the meeting point is full: its addresses would take {num_bytes:,} bytes")
        self._addresses[info.name] = raw
        self._names[info.id], self._ranks[info.name], self._num_bytes = info.name, info.id, num_bytes


class _Store:
    """`MeetingStore` in terms of requests."""

    def _ask(self, request: Request) -> Any:
        raise NotImplementedError

    def agree_on_token(self) -> bytes:
        token: bytes = self._ask(GetToken())
        return token

    def publish(self, address: WorkerAddress) -> None:
        self._ask(Publish(encode_address(address)))

    def find(self, worker: str | int) -> WorkerAddress | None:
        raw = self._ask(Find(worker))
        return decode_address(raw, _LIMITS) if raw is not None else None

    def names(self) -> list[str]:
        found: list[str] = []
        while page := self._ask(ListNames(len(found))):
            found += page
        return found

    def announce(self, note: str) -> None:
        self._ask(Announce(clean(note, _MAX_NOTE)[:_MAX_NOTE]))

    def note(self) -> tuple[str, float]:
        text, age_s = self._ask(GetNote())
        return text, age_s

    def withdraw(self, rank: int) -> None:
        self._ask(Withdraw(rank))

    def has_withdrawn(self, rank: int) -> bool:
        return bool(self._ask(HasWithdrawn(rank)))


class _Incoming:
    """A connection of another worker, or of a stranger."""

    def __init__(self, stream: StreamConnection, host: str, now: float) -> None:
        self.stream = stream
        self.descriptor = stream.fileno()
        self.host = host
        self.since = now  # its last request, or its beginning
        self.certified: frozenset[str] | None = None  # None until its first request

    @property
    def deadline(self) -> float:
        return self.since + (_LIMITS.handshake_timeout_s if self.certified is None else _IDLE_S)


class StoreServer(_Store):
    """The store in the process of rank 0. One thread serves all connections and never blocks on one of them for long.

    Attributes:
        uri: Its address for other workers.
    """

    is_served_here = True

    def __init__(self, listener: TcpListener, where: str) -> None:
        self.uri = listener.uri
        self._listener = listener
        self._where = where
        self._entries = Entries()
        self._lock = threading.Lock()  # guards the entries, and _wake against being closed while it is written to
        self._refusals: dict[str, None] = {}  # the latest last; single operations only
        self._connections: dict[int, _Incoming] = {}  # by descriptor; belongs to the thread
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        self._ended = threading.Event()  # set when the thread has closed everything
        _servers.add(self)
        threading.Thread(target=self._run, name="gradwire-meeting-point", daemon=True).start()

    def __repr__(self) -> str:
        return f"<StoreServer {self.uri} {'closed' if self._is_closed else 'open'}, {self._entries!r}>"

    def refusals(self) -> str:
        return "; ".join(list(self._refusals))

    def rest(self) -> None:
        """Do nothing: the store keeps serving workers that join later."""

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and free the port. Idempotent."""
        with self._lock:  # else the thread could close _wake before it is written to
            if not self._is_closed:
                self._is_closed = True
                os.eventfd_write(self._wake, 1)
        _interrupts.wait(self._ended, _END_S)

    def abandon_after_fork(self) -> None:
        """Close the copies of the parent's descriptors in a forked child, so that its port is free when it exits."""
        self._is_closed = True
        self._ended.set()
        for descriptor in (self._listener.fileno(), *self._connections, self._wake):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _ask(self, request: Request) -> Any:
        if self._is_closed:
            raise MeetingPointLost(f"the meeting point {self._where} has closed: this worker has shut down")
        with self._lock:
            return self._entries.handle(request, None)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._listener.fileno(), select.POLLIN)
        try:
            while not self._is_closed:
                deadlines = [item.deadline for item in self._connections.values()]
                ready = poller.poll(max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None)
                now = time.monotonic()
                for descriptor, _ in ready:
                    incoming = self._connections.get(descriptor)
                    if incoming is not None:
                        self._serve(incoming, now, poller)
                    elif descriptor == self._listener.fileno():
                        self._accept(now, poller)
                for incoming in [item for item in self._connections.values() if now >= item.deadline]:
                    self._end(incoming, poller, "no request was received in time" if incoming.certified is None else "")
        except Exception:
            _log.exception("the meeting point %s stopped unexpectedly; please report this", self._where)
        finally:
            self._is_closed = True
            for incoming in list(self._connections.values()):
                incoming.stream.close()
            self._connections.clear()
            self._listener.close()
            _servers.discard(self)
            with self._lock:
                os.close(self._wake)
            self._ended.set()

    def _accept(self, now: float, poller: select.poll) -> None:
        while True:
            try:
                stream = self._listener.accept_nowait()
            except ResourceExhausted as error:  # the oldest gives way
                _log.warning("the meeting point %s: %s", self._where, error)
                if self._connections:
                    self._end(min(self._connections.values(), key=lambda item: item.since), poller)
                return
            if stream is None:
                return
            half_open = [item for item in self._connections.values() if item.certified is None]
            if len(half_open) >= _LIMITS.half_open:
                self._end(min(half_open, key=lambda item: item.since), poller, "too many connections at once")
            elif len(self._connections) >= _MAX_CONNECTIONS:
                self._end(min(self._connections.values(), key=lambda item: item.since), poller)
            stream.decoder.accept = frozenset({Call})
            incoming = _Incoming(stream, _host_of(stream), now)
            self._connections[incoming.descriptor] = incoming
            poller.register(incoming.descriptor, select.POLLIN)

    def _serve(self, incoming: _Incoming, now: float, poller: select.poll) -> None:
        stream = incoming.stream
        try:
            while (frames := stream.read_nowait()) is not None:
                for frame in frames:
                    if incoming.certified is None:
                        incoming.certified = stream.channel.certified_names() or frozenset()
                        self._make_room_for(incoming, poller)
                    incoming.since = now
                    assert isinstance(frame.message, Call)
                    self._answer(stream, frame.message, bytes(frame.body), incoming.certified)
                if not stream.has_hidden_bytes():
                    return
        except (TransportError, TimeoutError) as error:
            is_refusal = isinstance(error, AuthenticationFailed | DecodeError)
            self._end(incoming, poller, str(error) if is_refusal else "")

    def _answer(self, stream: StreamConnection, call: Call, body: bytes, certified: frozenset[str]) -> None:
        try:
            with self._lock:
                answer = self._entries.handle(_read(_requests, body), certified)
            packed = _encode(answer)
            reply: Reply | Failure = Reply(call.call_id, serialization.PLAIN, len(packed))
        except GradwireError as error:
            _log.warning("the meeting point %s refused a request: %s", self._where, error)
            packed, reply = b"", Failure(call.call_id, describe_exception(error, "the meeting point", _LIMITS))
        stream.send(reply, packed, deadline=time.monotonic() + _SEND_S)

    def _make_room_for(self, newest: _Incoming, poller: select.poll) -> None:
        if newest.certified is None or certificates.ANY_WORKER in newest.certified:
            return  # one certificate for many workers
        same = [item for item in self._connections.values() if item.certified == newest.certified]
        for item in sorted(same, key=lambda item: item.since)[: max(0, len(same) - _MAX_OF_ONE)]:
            self._end(item, poller)

    def _end(self, incoming: _Incoming, poller: select.poll, reason: str = "") -> None:
        """Close a connection; a `reason` is logged, once for each host."""
        if self._connections.get(incoming.descriptor) is not incoming:
            return
        del self._connections[incoming.descriptor]
        poller.unregister(incoming.descriptor)
        incoming.stream.close()
        text = f"{incoming.host}: {clean(reason, 512)}"
        if reason and text not in self._refusals:
            self._refusals[text] = None
            if len(self._refusals) <= _MAX_REFUSALS:
                _log.warning("the meeting point %s refused a connection from %s", self._where, text)
            else:
                self._refusals.pop(next(iter(self._refusals)), None)


def _host_of(stream: StreamConnection) -> str:
    try:
        with socket.socket(fileno=os.dup(stream.fileno())) as sock:
            return str(sock.getpeername()[0])
    except OSError:
        return "a disconnected host"


def _read(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise DecodeError(f"not a valid message for a meeting point: {error}") from error


class StoreClient(_Store):
    """The store as seen from the other ranks. It connects on first use, and again if the connection is lost.

    Args:
        find_uri: Returns the address at which rank 0 may serve the store; None while it is not known.
        transport: A transport with the keys of this worker.
        where: The address, for error messages.
        on_rest: Called when this worker has met the others.
    """

    is_served_here = False

    def __init__(
        self,
        find_uri: Callable[[], str | None],
        transport: TcpTransport,
        where: str,
        on_rest: Callable[[], None] = lambda: None,
    ) -> None:
        self._find_uri = find_uri
        self._transport = transport
        self._where = where
        self._on_rest = on_rest
        self._turn = threading.Lock()  # held by the thread that asks; guards the three fields below
        self._stream: StreamConnection | None = None
        self._last_id = 0
        self._is_left = False
        self._answer_s = _MEETING_ANSWER_S
        self._is_resting = False

    def __repr__(self) -> str:
        return f"<StoreClient {self._where} {'connected' if self._stream is not None else 'not connected'}>"

    def find(self, worker: str | int) -> WorkerAddress | None:
        found = super().find(worker)
        if found is not None and (found.info.id != worker if isinstance(worker, int) else found.info.name != worker):
            raise MeetingPointLost(f"the meeting point {self._where} returned a worker other than {worker}")
        return found

    def refusals(self) -> str:
        return ""

    def rest(self) -> None:
        self._answer_s, self._is_resting = ANSWER_S, True
        self._drop_if_unused()
        self._on_rest()

    def leave(self) -> None:
        self._is_left = True
        self._drop_if_unused()

    def connect(self, rank: int, timeout_s: float) -> None:
        """Wait until rank 0 answers.

        Raises:
            RendezvousFailed: It does not, or does not have keys of this cluster.
        """
        deadline = time.monotonic() + timeout_s
        refused_at = time.monotonic()  # or when it was last not there at all
        while True:
            self._answer_s = min(_MEETING_ANSWER_S, max(0.001, deadline - time.monotonic()))
            try:
                self._ask(GetToken())
                self._answer_s = _MEETING_ANSWER_S
                return
            except MeetingPointLost as error:
                cause = error.__cause__
            now = time.monotonic()
            patience_s = _REFUSED_S if isinstance(cause, AuthenticationFailed) else _SILENT_S
            if not isinstance(cause, AuthenticationFailed | TimeoutError):
                refused_at = now
            if now >= refused_at + patience_s:
                raise RendezvousFailed(
                    f"rank {rank} cannot join: the process at {self._where} does not belong to this cluster, or "
                    "does not admit "
                    f"this rank: {cause}. Start every rank with keys (tls=) from the same authority"
                ) from cause
            if now >= deadline:
                raise RendezvousFailed(
                    f"rank 0 never arrived: rank {rank} waited for it at {self._where} for {timeout_s:g} s ({cause}). "
                    f"{START_RANK_0}"
                ) from cause
            _interrupts.sleep(LOOK_S)

    def _drop_if_unused(self) -> None:
        if self._turn.acquire(False):  # else the thread that asks closes it
            self._close()
            self._turn.release()

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _ask(self, request: Request) -> Any:
        deadline = time.monotonic() + self._answer_s
        while not self._turn.acquire(timeout=max(0.0, min(LOOK_S, deadline - time.monotonic()))):
            _interrupts.deliver()
            if time.monotonic() >= deadline:
                raise self._lost(TimeoutError("it is not responding"))
        is_done = False
        try:
            if self._is_left:
                raise self._lost(ConnectFailed("this worker has shut down"))
            was_connected = self._stream is not None
            try:
                answer = self._exchange(request, deadline)
            except TransportError:
                if not was_connected:
                    raise
                self._close()  # the server closes connections that have been idle
                answer = self._exchange(request, deadline)
            is_done = True
        except (TransportError, TimeoutError) as error:
            raise self._lost(error) from error
        finally:
            # Whatever ended it, Ctrl-C included: half an exchange leaves an answer behind.
            if not is_done or self._is_left or self._is_resting:
                self._close()
            self._turn.release()
        if isinstance(answer, Failure):
            raise rebuild_exception(answer.error, "data")
        return answer

    def _exchange(self, request: Request, deadline: float) -> Any:
        """Send a request and return the reply or `Failure`."""
        if self._stream is None:
            uri = self._find_uri()
            if uri is None:
                raise ConnectFailed("rank 0 has not published its address")
            self._stream = self._transport.connect(uri, deadline)
            self._stream.decoder.accept = frozenset({Reply, Failure})
        stream, self._last_id = self._stream, self._last_id + 1
        body = _encode(request)
        stream.send(Call(self._last_id, _FUNCTION, 0.0, serialization.PLAIN, len(body)), body, deadline=deadline)
        frame = stream.receive(deadline)
        message = frame.message
        assert isinstance(message, Reply | Failure)
        if message.call_id != self._last_id:
            raise DecodeError(f"received a reply to request {message.call_id}, expected {self._last_id}")
        if isinstance(message, Failure):
            return message
        answer = _read(_answers[type(request)], bytes(frame.body))
        if isinstance(request, Find) and answer is not None:
            address = decode_address(answer, _LIMITS)
            if address.info.id == 0:  # the process that serves the store is rank 0
                certificates.check_identity(stream.channel.certified_names() or (), address.info.name)
        return answer

    def _lost(self, cause: BaseException) -> MeetingPointLost:
        error = MeetingPointLost(f"lost the meeting point {self._where}: {cause}")
        error.__cause__ = cause
        return error


# Opening


def serve(host: str, port: int, tls: TlsKeys, where: str, advertised_host: str | None = None) -> StoreServer:
    """Serve a store.

    Raises:
        ConfigurationError: The keys cannot be used.
        RendezvousFailed: Nothing can listen there.
    """
    try:
        try:
            listener = _transport(tls, host, port, advertised_host).listen("meeting point")
        except ConfigurationError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRNOTAVAIL:
                raise
            # Others see this machine under an address that it does not have itself: behind a service or a gateway.
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = _transport(tls, "::" if family == socket.AF_INET6 else "0.0.0.0", port, host).listen("")
    except ConfigurationError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise RendezvousFailed(
            f"rank 0 cannot open the meeting point {where}: {error}. If another program or torch's process group is "
            f"listening there, choose another port, e.g. init_method='tcp://{host}:<port>'"
        ) from error
    return StoreServer(listener, where)


def open_client(
    find_uri: Callable[[], str | None],
    tls: TlsKeys,
    where: str,
    rank: int,
    timeout_s: float,
    on_rest: Callable[[], None] = lambda: None,
) -> StoreClient:
    """Return the store that rank 0 serves, once it is there.

    Raises:
        ConfigurationError: The keys cannot be used.
        RendezvousFailed: It is not there in time, or does not have keys of this cluster.
    """
    client = StoreClient(find_uri, _transport(tls), where, on_rest)
    client.connect(rank, timeout_s)
    return client


def uri_of(host: str, port: int) -> str:
    return make_uri(host, port, is_tls=True)


def _transport(
    tls: TlsKeys, host: str = "127.0.0.1", port: int = 0, advertised_host: str | None = None
) -> TcpTransport:
    return TcpTransport(host, port, tls, StreamOptions(limits=_LIMITS), advertised_host)


_servers: set[StoreServer] = set()  # that are open; single operations only
_abandoned: list[StoreServer] = []  # kept, because closing their sockets would close descriptors that have been reused


def _forget_after_fork() -> None:
    for server in list(_servers):
        server.abandon_after_fork()
        _abandoned.append(server)
    _servers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
