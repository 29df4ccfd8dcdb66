"""A meeting point over TLS, and those who do not belong there; over real sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, RendezvousFailed
from gradwire.rpc import secure_store
from gradwire.rpc.meeting_store import MeetingPointLost
from gradwire.rpc.secure_store import StoreClient, StoreServer
from gradwire.transports.tls import client_context, keys_for, make_keys, server_context
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.framing import encode
from gradwire.wire.messages import Call, Goodbye
from rpc.fixtures import init_source
from rpc.puppets import Puppet, PuppetError, wait_until

LIMITS = dataclasses.replace(secure_store._LIMITS, handshake_timeout_s=1.5, half_open=8)


def address_of(name: str, rank: int, uri: str = "tcp://127.0.0.1:1?tls") -> WorkerAddress:
    return WorkerAddress(WorkerInfo(name, rank), 1, "host", (uri,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of two clusters."""
    made = tmp_path_factory.mktemp("keys")
    for cluster in ("one", "other"):
        make_keys(made / cluster, ["w0", "w1", "w2"])
    return made


@pytest.fixture
def keys(folder: Path) -> Callable[..., TlsKeys]:
    """``keys("w1")``, or ``keys("w1", "other")`` of the other cluster."""
    return lambda name, cluster="one": keys_for(folder / cluster, name)


@pytest.fixture
def server(keys: Callable[..., TlsKeys], monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """Rank 0's; it must still serve its own cluster when the test is over."""
    monkeypatch.setattr(secure_store, "_LIMITS", LIMITS)
    made = secure_store.serve("127.0.0.1", 0, keys("w0"), "the test")
    made.publish(address_of("w0", 0))
    try:
        yield made
        found = _open(made, keys("w1")).find(0)
        assert found is not None
        assert found.info.name == "w0"
    finally:
        made.close()
    assert wait_until(lambda: not any(item.name == "gradwire-meeting-point" for item in threading.enumerate()))


def _open(server: StoreServer, keys: TlsKeys, timeout_s: float = 10.0) -> StoreClient:
    client = secure_store.open_client(lambda: server.uri, keys, "the test", 1, timeout_s)
    client.rest()  # no connection is left behind
    return client


def _port(server: StoreServer) -> int:
    return int(server.uri.removesuffix("?tls").rpartition(":")[2])


def _is_ended(sock: socket.socket) -> bool:
    """Whether the other side closes the connection, and sends nothing that a stranger may not read."""
    sock.settimeout(10.0)
    try:
        return sock.recv(4096) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


# -- strangers ----------------------------------------------------------------------------------------------------------


def test_members_agree(server: StoreServer, keys: Callable[..., TlsKeys]) -> None:
    one, two = _open(server, keys("w1")), _open(server, keys("w2"))
    assert one.agree_on_token() == two.agree_on_token() == server.agree_on_token()
    one.publish(address_of("w1", 1))
    assert two.find("w1") == two.find(1) == address_of("w1", 1)
    assert two.find("w7") is None
    assert sorted(two.names()) == ["w0", "w1"]
    two.announce("something")
    assert one.note()[0] == "something"
    assert 0.0 <= one.note()[1] < 20.0


def test_a_process_without_keys_learns_nothing(server: StoreServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sock = socket.create_connection(("127.0.0.1", _port(server)), timeout=5.0)
    with sock, contextlib.suppress(OSError), context.wrap_socket(sock) as wrapped:
        wrapped.sendall(_request(b"\x91\xa8GetToken"))  # in TLS 1.3 the client is through first
        assert _is_ended(wrapped)
    assert wait_until(lambda: "127.0.0.1: TLS 1.3 handshake failed" in server.refusals())


def _request(body: bytes) -> bytes:
    return encode(Call(1, "meeting", 0.0, 1, len(body)), len(body)) + body


def test_keys_of_another_cluster_do_not_open_it(server: StoreServer, keys: Callable[..., TlsKeys]) -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousFailed, match=r"rank 1 cannot join.*keys .tls=. from the same authority"):
        _open(server, keys("w1", "other"), 60.0)
    assert time.monotonic() - started < 10.0


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n" * 4,
    bytes(256),
    os.urandom(100_000),
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(5000),
    b"\x16\x03\x01\xff\xff" + bytes(70_000),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=["http", "zeros", "random", "client hello", "long record"])
def test_garbage_ends_its_connection_only(server: StoreServer, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", _port(server)), timeout=5.0) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(garbage)
        sock.settimeout(10.0)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):  # an alert of TLS
                pass


def test_a_slow_connection_is_ended(server: StoreServer) -> None:
    """The time is for all of the handshake, not for each byte."""
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", _port(server)), timeout=5.0) as sock:
        sock.settimeout(0.05)
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")  # 512 bytes are to come
        while time.monotonic() - started < 20.0:
            try:
                sock.send(b"\0")
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert 1.0 < time.monotonic() - started < 15.0
    assert wait_until(lambda: "no request was received in time" in server.refusals())


def test_a_flood_of_connections_is_bounded_and_keeps_no_member_out(
    server: StoreServer, keys: Callable[..., TlsKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_store, "_LIMITS", dataclasses.replace(LIMITS, handshake_timeout_s=60.0))
    flood = [socket.create_connection(("127.0.0.1", _port(server)), timeout=5.0) for _ in range(40)]
    try:
        poller = select.poll()
        for sock in flood:
            poller.register(sock, select.POLLIN)
        assert wait_until(lambda: len(poller.poll(0)) == 40 - LIMITS.half_open)  # the others were ended
        assert _open(server, keys("w1")).agree_on_token() == server.agree_on_token()
    finally:
        for sock in flood:
            sock.close()


@pytest.fixture
def impostor() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """``impostor(handle)``: a process that listens where rank 0 should; its URI."""
    with contextlib.ExitStack() as stack:

        def start(handle: Callable[[socket.socket], None]) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.settimeout(0.2)
            stop = threading.Event()

            def run() -> None:
                while not stop.is_set():
                    with contextlib.suppress(OSError):
                        sock = listener.accept()[0]
                        sock.settimeout(5.0)
                        with sock:
                            handle(sock)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            stack.callback(thread.join, 10.0)
            stack.callback(stop.set)
            return f"tcp://127.0.0.1:{listener.getsockname()[1]}?tls"

        yield start


def test_a_stranger_in_place_of_rank_0_is_not_believed(
    impostor: Callable[[Callable[[socket.socket], None]], str], keys: Callable[..., TlsKeys]
) -> None:
    heard: list[bytes] = []

    def answer(sock: socket.socket) -> None:
        with server_context(keys("w0", "other")).wrap_socket(sock, server_side=True) as wrapped:
            heard.append(wrapped.recv(4096))

    uri = impostor(answer)
    with pytest.raises(RendezvousFailed, match=r"rank 1 cannot join: .*certificate"):
        secure_store.open_client(lambda: uri, keys("w1"), "the test", 1, 60.0)
    assert heard == []  # not even what a worker asks for


def test_a_server_without_tls_in_place_of_rank_0_is_named(
    impostor: Callable[[Callable[[socket.socket], None]], str], keys: Callable[..., TlsKeys]
) -> None:
    def answer(sock: socket.socket) -> None:
        sock.recv(1000)
        sock.sendall(b"the token is 1234")

    uri = impostor(answer)
    with pytest.raises(RendezvousFailed, match=r"TLS 1\.3 handshake failed"):
        secure_store.open_client(lambda: uri, keys("w1"), "the test", 1, 60.0)


def test_a_silent_server_is_waited_for_no_longer_than_asked(keys: Callable[..., TlsKeys]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri, started = f"tcp://127.0.0.1:{silent.getsockname()[1]}?tls", time.monotonic()
        with pytest.raises(RendezvousFailed, match="rank 0 never arrived"):
            secure_store.open_client(lambda: uri, keys("w1"), "the test", 1, 0.7)
        assert 0.5 < time.monotonic() - started < 12.0  # by default it is waited for 15 s


def test_ctrl_c_ends_the_wait_for_a_silent_server(make_puppets: Callable[[int], list[Puppet]], folder: Path) -> None:
    (puppet,) = make_puppets(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        puppet.do(f"from gradwire.transports.tls import keys_for; keys = keys_for({str(folder / 'one')!r}, 'w1')")
        puppet.start(init_source(1, 2, where, init_timeout=120).replace("init_timeout", "tls=keys, init_timeout"))
        silent.settimeout(10.0)
        connection = silent.accept()[0]  # it waits for an answer now
        with connection:
            connection.recv(1)
            started = time.monotonic()
            puppet.signal(signal.SIGINT)
            with pytest.raises(PuppetError, match="KeyboardInterrupt"):
                puppet.result(10.0)
    assert time.monotonic() - started < 10.0


# -- members that do what they should not ---------------------------------------------------------------------------------


def test_a_member_cannot_write_anothers_address(server: StoreServer, keys: Callable[..., TlsKeys]) -> None:
    _open(server, keys("w1")).publish(address_of("w1", 1))
    mallory = _open(server, keys("w2"))
    for name, rank in (("w1", 1), ("w0", 0), ("w2", 1), ("w2", 0)):
        with pytest.raises(AuthenticationFailed):
            mallory.publish(address_of(name, rank, "tcp://127.0.0.1:666?tls"))
    for rank in (0, 1):
        assert server.find(rank) == address_of(f"w{rank}", rank)
    assert sorted(server.names()) == ["w0", "w1"]


def test_a_member_that_serves_in_place_of_rank_0_can_only_say_that_it_is_rank_0_itself(
    server: StoreServer, keys: Callable[..., TlsKeys]
) -> None:
    false = secure_store.serve("127.0.0.1", 0, keys("w2"), "the test")
    try:
        false.publish(address_of("w0", 0, "tcp://127.0.0.1:666?tls"))
        client = _open(false, keys("w1"))
        for worker in (0, "w0"):
            with pytest.raises(MeetingPointLost, match=r"worker 'w0' presented a certificate for \['w2'\]"):
                client.find(worker)
    finally:
        false.close()


def _connect(server: StoreServer, keys: TlsKeys) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", _port(server)), timeout=5.0)
    return client_context(keys).wrap_socket(sock)


@pytest.mark.parametrize(
    "frame",
    [
        _request(b"x" * (65 << 10)),
        struct.pack("<8sIQI", _request(b"")[:8], 1 << 31, 0, 0),
        struct.pack("<8sIQI", _request(b"")[:8], 10, 1 << 62, 0),
        encode(Goodbye("not allowed here")),
        b"\x00" * 64,
    ],
    ids=["value", "header", "payload", "message", "magic"],
)
def test_what_is_too_large_or_out_of_place_ends_its_connection(
    server: StoreServer, keys: Callable[..., TlsKeys], frame: bytes
) -> None:
    with _connect(server, keys("w2")) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(frame)
        assert _is_ended(sock)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x92\xa7Publish\xc4\x01x", b"\x91\xa4Find"])
def test_a_request_that_makes_no_sense_is_refused(
    server: StoreServer, keys: Callable[..., TlsKeys], body: bytes
) -> None:
    with _connect(server, keys("w2")) as sock:
        sock.sendall(_request(body))
        assert b"DecodeError" in sock.recv(65536)
        sock.sendall(_request(b"\x91\xa8GetToken"))
        assert server.agree_on_token() in sock.recv(65536)


def test_one_member_cannot_have_many_connections(server: StoreServer, keys: Callable[..., TlsKeys]) -> None:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(_connect(server, keys("w2"))) for _ in range(10)]
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.sendall(_request(b"\x91\xa8GetToken"))
        assert wait_until(lambda: len(server._connections) == secure_store._MAX_OF_ONE)
        assert _open(server, keys("w1")).agree_on_token() == server.agree_on_token()


def test_a_member_that_does_not_read_is_ended(server: StoreServer, keys: Callable[..., TlsKeys]) -> None:
    for rank in range(3, 9):
        server.publish(address_of("w" * 100 + str(rank), rank, "tcp://" + "x" * 1000))
    with _connect(server, keys("w2")) as sock:
        sock.settimeout(0.5)
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 20.0:
                sock.sendall(_request(b"\x92\xa4Find\x03") * 100)
        assert wait_until(lambda: not server._connections)


# -- what a client makes of lost connections ----------------------------------------------------------------------------


def test_a_lost_connection_is_made_again(server: StoreServer, keys: Callable[..., TlsKeys]) -> None:
    client = secure_store.open_client(lambda: server.uri, keys("w1"), "the test", 1, 10.0)
    assert wait_until(lambda: len(server._connections) == 1)
    for incoming in list(server._connections.values()):
        with socket.socket(fileno=os.dup(incoming.descriptor)) as sock:
            sock.shutdown(socket.SHUT_RDWR)
    assert client.agree_on_token() == server.agree_on_token()
    client.leave()
    with pytest.raises(MeetingPointLost, match="has shut down"):
        client.note()


def test_a_server_that_is_gone_is_noticed(keys: Callable[..., TlsKeys]) -> None:
    server = secure_store.serve("127.0.0.1", 0, keys("w0"), "the test")
    client = secure_store.open_client(lambda: server.uri, keys("w1"), "the test", 1, 10.0)
    server.close()
    started = time.monotonic()
    with pytest.raises(MeetingPointLost):
        client.note()
    assert time.monotonic() - started < 8.0
    with pytest.raises(MeetingPointLost):
        server.note()
    client.leave()
