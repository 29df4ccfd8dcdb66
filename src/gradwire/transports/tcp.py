"""Transport between machines: ``tcp://host:port?tls`` with mutual TLS 1.3, or ``tcp://host:port`` without keys.

Without keys only loopback can be bound or reached. The kernel watches the other host (a keep-alive probe every second, four
unanswered ones end an idle connection), so a vanished machine is noticed while Python is busy, too. While bytes are under
way the kernel does not probe, and would try for many minutes; `TcpChannel.is_vanished` counts its attempts instead. (The
kernel's own limit, TCP_USER_TIMEOUT, would also end connections to a worker that is alive and just not reading.)
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Sequence

from gradwire import _interrupts
from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, ConfigurationError, ConnectFailed, ConnectionLost, TransportError
from gradwire.transports import tls
from gradwire.transports.stream import Buffer, Channel, SocketListener, StreamConnection, StreamOptions, check_exhausted

_NUM_PROBES = 4
_NUM_ATTEMPTS = 5  # with doubling pauses from 0.2 s on: about six seconds without an acknowledgement
_RECORD_BYTES = 16 << 10
_TLS = "?tls"  # behind the address of a listener with keys


class TcpChannel(Channel):
    """Bytes over a TCP connection without encryption; loopback only."""

    can_vanish = True

    def is_vanished(self) -> bool:
        """Return whether the kernel has repeatedly retried sending without a response.

        Bytes that have left this machine are retransmitted. Bytes that have not, because the other side had no room or
        this machine had no route, stay behind a probe, which has a count of its own. An answer sets either back to zero.
        """
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
        except OSError:
            return True
        _state, _congestion, num_retransmissions, num_probes = info[:4]  # the beginning of struct tcp_info
        return max(num_retransmissions, num_probes) >= _NUM_ATTEMPTS


class TlsChannel(TcpChannel):
    """Channel over TLS. OpenSSL must not read and write a connection concurrently, so a lock guards each short step."""

    hides_bytes = True
    _socket: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._lock = threading.Lock()  # guards the OpenSSL connection; never held while waiting
        self._wants_read = False
        self._holds_unsent = False

    def read_into(self, buffer: Buffer) -> int | None:
        view = memoryview(buffer).cast("B")
        num_bytes = 0
        # OpenSSL keeps decrypted bytes that epoll cannot see: read until it has none, or the buffer is full.
        while num_bytes < len(view):
            try:
                with self._lock:
                    step = self._socket.recv_into(view[num_bytes:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except (OSError, ValueError) as error:  # ValueError: closed by another thread
                if num_bytes:
                    break
                raise _translate(error) from error
            if step == 0:
                return num_bytes
            num_bytes += step
        return num_bytes or None

    def write(self, buffers: Sequence[Buffer], descriptors: Sequence[int]) -> int | None:
        self._wants_read = self._holds_unsent = False
        written = 0
        for buffer in _records(buffers):
            try:
                with self._lock:
                    step = self._socket.send(buffer)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                self._wants_read = isinstance(error, ssl.SSLWantReadError)
                # Once the handshake is over, OpenSSL has made a record of the bytes and insists on sending it next.
                self._holds_unsent = self._socket.version() is not None
                break
            except (OSError, ValueError) as error:
                raise _translate(error) from error
            written += step
            if step < len(buffer):
                break
        return written or None

    def write_waits_for_reading(self) -> bool:
        return self._wants_read

    def holds_unsent(self) -> bool:
        return self._holds_unsent

    def has_hidden_bytes(self) -> bool:
        with self._lock:
            return self._socket.pending() > 0

    def certified_names(self) -> frozenset[str] | None:
        with self._lock:
            return tls.certified_names(self._socket)

    def close(self) -> None:
        # OpenSSL reads and writes by the descriptor's number. Closed in the middle of a step, the number could belong to the
        # next connection, which would lose bytes to this one.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            super().close()


def _records(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Join small neighbours, so that they share a TLS record; leave large ones as they are."""
    if len(buffers) == 1:
        return list(buffers)
    joined: list[Buffer] = []
    small: list[Buffer] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if size + len(view) <= _RECORD_BYTES:
            small.append(view)
            size += len(view)
            continue
        if small:
            joined.append(b"".join(small))
        small, size = ([view], len(view)) if len(view) <= _RECORD_BYTES else ([], 0)
        if not small:
            joined.append(view)
    if small:
        joined.append(b"".join(small))
    return joined


def _translate(error: Exception) -> TransportError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationFailed(f"the peer's certificate does not belong to this cluster: {error.verify_message}")
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return AuthenticationFailed(
            f"TLS 1.3 handshake failed ({error.reason or error}); both sides need keys from the same cluster authority"
        )
    return ConnectionLost(f"the connection broke: {error}")


class TcpListener(SocketListener):
    """Listens at one address of this machine."""

    def __init__(
        self, host: str, port: int | tuple[int, int], options: StreamOptions, context: ssl.SSLContext | None
    ) -> None:
        self._context = context
        first, last = port if isinstance(port, tuple) else (port, port)
        try:
            sock = _listen(host, first, last)
        except OSError as error:
            where = first if first == last else f"{first}-{last}"
            raise ConfigurationError(f"cannot listen at tcp://{host}:{where}: {error}") from error
        super().__init__(sock, make_uri(host, sock.getsockname()[1], context is not None), options)

    def accept_nowait(self) -> StreamConnection | None:
        sock = self.accept_socket()
        if sock is None:
            return None
        try:
            return _make_connection(sock, self._options, self._context, self.uri, server_side=True)
        except OSError:
            sock.close()
            return None


def _listen(host: str, first: int, last: int) -> socket.socket:
    """Return a listener on the first free port of a range."""
    family = socket.getaddrinfo(host, first, type=socket.SOCK_STREAM)[0][0]
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                raise
    raise AssertionError("a port range needs at least one port")


class TcpTransport:
    """Connects workers over a network.

    Args:
        host: Address to bind; must be loopback without `keys`.
        port: Port to bind; 0 for any, ``(first, last)`` for a range.
        advertised_host: Address that others connect to if `host` is a wildcard.
    """

    scheme = "tcp"

    def __init__(
        self,
        host: str,
        port: int | tuple[int, int],
        keys: TlsKeys | None,
        options: StreamOptions,
        advertised_host: str | None = None,
    ) -> None:
        if keys is None and not is_loopback(host):
            raise ConfigurationError(
                f"tcp would listen on {host} without keys, so that anyone could connect; make keys with "
                f"gradwire.transports.tls.make_keys and pass tls=, or bind 127.0.0.1"
            )
        self._host, self._port = host, port
        self._options = options
        self._advertised_host = advertised_host
        self._server = tls.server_context(keys) if keys is not None else None
        self._client = tls.client_context(keys) if keys is not None else None

    def listen(self, worker: str) -> TcpListener:
        listener = TcpListener(self._host, self._port, self._options, self._server)
        if self._advertised_host is not None:
            listener.uri = make_uri(self._advertised_host, _split_uri(listener.uri)[1], self._server is not None)
        return listener

    def connect(self, uri: str, deadline: float) -> StreamConnection:
        host, port, is_tls = _split_uri(uri)
        if self._client is None and is_tls:
            raise AuthenticationFailed(f"{uri} requires TLS, but this worker has no keys; pass tls= to every worker")
        if self._client is not None and not is_tls:
            raise AuthenticationFailed(f"{uri} does not use TLS, but this worker has keys; pass tls= to every worker")
        if self._client is None and not is_loopback(host):
            raise AuthenticationFailed(f"{uri} is on another machine, but this worker has no keys; pass tls=")
        try:
            sock = _connect(host, int(port), deadline)
        except (OSError, ValueError, OverflowError) as error:  # the latter two: that is not a port
            if isinstance(error, OSError):
                check_exhausted(error)
            raise ConnectFailed(f"no answer at {uri}: {error}") from error
        return _make_connection(sock, self._options, self._client, uri, server_side=False)


@_interrupts.interruptible
def _connect(host: str, port: int, deadline: float) -> socket.socket:
    return socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))


def _make_connection(
    sock: socket.socket, options: StreamOptions, context: ssl.SSLContext | None, label: str, *, server_side: bool
) -> StreamConnection:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
    sock.setblocking(False)
    if context is None:
        channel = TcpChannel(sock)
    else:
        channel = TlsChannel(context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False))
    return StreamConnection(channel, options, slots=None, label=label)


def is_loopback(host: str) -> bool:
    """Return whether the host is this machine's loopback, by number or as ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback_host(header: str) -> bool:
    """Return whether a Host header of HTTP names loopback, with any port: a tunnel may have another one than the server."""
    found = re.fullmatch(r"(?:\[([0-9a-f:]+)\]|([^:\[\]]+))(?::[0-9]+)?", header.lower())
    return found is not None and is_loopback(found[1] or found[2])


def make_uri(host: str, port: int | str, is_tls: bool) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}{_TLS if is_tls else ''}"


def _split_uri(uri: str) -> tuple[str, str, bool]:
    """Return host, port, and whether the address uses TLS."""
    host, _, port = uri.removeprefix("tcp://").removesuffix(_TLS).rpartition(":")
    return host.strip("[]"), port, uri.endswith(_TLS)
