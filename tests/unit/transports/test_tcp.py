"""TCP never leaves loopback without keys, and with them only members of the cluster get in."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
import torch

from conftest import MakeAgents
from gradwire.config import TlsKeys, WorkerConfig
from gradwire.errors import AuthenticationFailed, ConfigurationError, ConnectFailed, ConnectionLost, TransportError
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.testing import wait_until
from gradwire.testing.transports import ANYTHING, Sender, end_of, send_call
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.transports.tcp import TcpListener, TcpTransport, TlsChannel, is_loopback, is_loopback_host
from gradwire.transports.tls import make_keys
from gradwire.types import WorkerInfo


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> TlsKeys:
    folder = tmp_path_factory.mktemp("keys") / "cluster"
    make_keys(folder)
    return TlsKeys.in_folder(folder)


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> TlsKeys:
    folder = tmp_path_factory.mktemp("keys") / "others"
    make_keys(folder)
    return TlsKeys.in_folder(folder)


def make_transport(keys: TlsKeys | None = None, host: str = "127.0.0.1") -> TcpTransport:
    return TcpTransport(host, 0, keys, StreamOptions())


def soon() -> float:
    return time.monotonic() + 10


def accept(listener: TcpListener) -> StreamConnection:
    accepted: list[StreamConnection] = []
    wait_until(lambda: accepted or accepted.extend(filter(None, [listener.accept_nowait()])), 10, "somebody connects")
    return accepted[0]


def listening_addresses() -> list[str]:
    """Where this process listens, as the kernel tells it: addresses in hexadecimal, without ports."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].partition(":")[0])
    return found


def _is_open(fd: str) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", "", "127.0.0.1.example.org"])
def test_nothing_listens_off_loopback_without_keys(host: str) -> None:
    with pytest.raises(ConfigurationError, match="without keys"):
        make_transport(host=host)


def test_a_worker_refuses_the_same() -> None:
    config = WorkerConfig(transports=("tcp",), bind_host="0.0.0.0", token=b"x")
    with pytest.raises(ConfigurationError, match="without keys"):
        start_worker(WorkerInfo("a", 0), config, StaticDirectory())


@pytest.mark.parametrize("uri", ["tcp://192.0.2.1:80", "tcp://example.org:80", "tcp://[2001:db8::1]:80"])
def test_nothing_is_reached_off_loopback_without_keys(uri: str) -> None:
    with pytest.raises(AuthenticationFailed, match="no keys"):
        make_transport().connect(uri, soon())


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True)])
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    assert is_loopback("localhost")
    assert not is_loopback("localhost.example.org")


@pytest.mark.parametrize(
    "header",
    ["127.0.0.1", "127.0.0.1:8000", "127.9.9.9:1", "localhost", "LOCALHOST:1", "LocalHost", "[::1]", "[::1]:9"],
)
def test_hosts_that_name_loopback(header: str) -> None:
    assert is_loopback_host(header)


@pytest.mark.parametrize(
    "header",
    [
        *("", ":80", "example.com:8000", "127.0.0.1.example.com", "localhost:80:80", "127.0.0.1:8000@example.com"),
        *("0.0.0.0:8000", "::1", "::1:80", "[::1%x]", "[127.0.0.1]", "[localhost]", "localhost:", "localhost:\u0661"),
        *("127.0.0.1,example.com", "localhost\n", "[::1", "127.1"),
    ],
)
def test_hosts_that_do_not_name_loopback(header: str) -> None:
    assert not is_loopback_host(header)


@pytest.mark.parametrize("transport", ["unix", "inproc", "tcp"])
def test_workers_listen_on_loopback_at_the_most(make_agents: MakeAgents, transport: str) -> None:
    before = listening_addresses()
    make_agents(2, transport)
    addresses = listening_addresses()[len(before) :]
    assert addresses == (["0100007F", "0100007F"] if transport == "tcp" else [])


def test_with_keys_other_addresses_may_be_bound(keys: TlsKeys) -> None:
    before = listening_addresses()
    listener = TcpTransport("127.0.0.2", 0, keys, StreamOptions(), advertised_host="127.0.0.3").listen("w")
    assert listener.uri.startswith("tcp://127.0.0.3:")
    assert listening_addresses() == [*before, "0200007F"]
    listener.close()


def test_an_address_in_use_is_named() -> None:
    listener = make_transport().listen("w")
    port = int(listener.uri.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match=f"cannot listen at tcp://127.0.0.1:{port}"):
        TcpTransport("127.0.0.1", port, None, StreamOptions()).listen("w")
    listener.close()


def test_nobody_listens() -> None:
    listener = make_transport().listen("w")
    listener.close()
    listener.close()
    with pytest.raises(ConnectFailed, match="no answer"):
        make_transport().connect(listener.uri, soon())


@pytest.mark.parametrize("uri", ["tcp://127.0.0.1:nonsense", "tcp://127.0.0.1:99999999", "tcp://127.0.0.1"])
def test_an_address_that_is_none(uri: str) -> None:
    with pytest.raises(TransportError):
        make_transport().connect(uri, soon())


def outcome(connection: StreamConnection) -> TransportError:
    """Writes, then reads until the connection has failed."""
    connection.decoder.accept = ANYTHING
    try:
        send_call(connection, 1)
    except TransportError as error:
        return error
    return end_of(connection)


def test_a_cluster_with_other_keys_is_refused(keys: TlsKeys, other_keys: TlsKeys) -> None:
    listener = make_transport(keys).listen("w")
    near = make_transport(other_keys).connect(listener.uri, soon())
    far = accept(listener)
    found: list[TransportError] = []
    with Sender(lambda: found.append(outcome(near))):
        error = outcome(far)
        far.close()
    assert isinstance(error, AuthenticationFailed | ConnectionLost)
    assert any(isinstance(item, AuthenticationFailed) for item in (error, *found))
    near.close()
    listener.close()


def test_a_client_without_tls_is_refused(keys: TlsKeys) -> None:
    listener = make_transport(keys).listen("w")
    with pytest.raises(AuthenticationFailed, match="no keys"):
        make_transport().connect(listener.uri, soon())
    near = make_transport().connect(listener.uri.removesuffix("?tls"), soon())  # as one that does not care
    far = accept(listener)
    send_call(near, 1, b"hello")
    assert isinstance(outcome(far), AuthenticationFailed)
    near.close()
    far.close()
    listener.close()


def test_a_client_without_a_certificate_is_refused(keys: TlsKeys) -> None:
    listener = make_transport(keys).listen("w")
    context = ssl.create_default_context(cafile=keys.ca)
    context.check_hostname = False
    port = int(listener.uri.removesuffix("?tls").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain:
        far = accept(listener)
        found: list[TransportError] = []
        reader = Sender(lambda: found.append(outcome(far)))
        with contextlib.suppress(OSError), context.wrap_socket(plain) as client:
            client.recv(1)
        reader.join()
        assert isinstance(found[0], AuthenticationFailed)
        far.close()
    listener.close()


def test_a_listener_without_tls_is_refused(keys: TlsKeys) -> None:
    listener = make_transport().listen("w")
    with pytest.raises(AuthenticationFailed, match="does not use TLS"):
        make_transport(keys).connect(listener.uri, soon())
    near = make_transport(keys).connect(f"{listener.uri}?tls", soon())
    far = accept(listener)
    with Sender(lambda: _answer_plainly(far)):
        assert isinstance(outcome(near), AuthenticationFailed | ConnectionLost)
    near.close()
    far.close()
    listener.close()


def _answer_plainly(connection: StreamConnection) -> None:
    connection.wait_readable(10)
    send_call(connection, 1, b"x" * 100)


def test_workers_talk_over_tls(make_agents: MakeAgents, keys: TlsKeys) -> None:
    first, second = make_agents(2, "tcp", tls=keys, trust="code", rpc_timeout_s=20)
    for num_bytes in (0, 1, 65_000, 65_536, 65_700, 1_000_000):  # 65,536: the rest of a record is left in OpenSSL
        value = torch.ones(num_bytes, dtype=torch.uint8)
        assert torch.equal(first.call(second.info, torch.clone, (value,)), value)


def test_the_descriptor_stays_while_openssl_may_use_it() -> None:
    near, far = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    wrapped = context.wrap_socket(near, server_hostname="x", do_handshake_on_connect=False)
    channel = TlsChannel(wrapped)
    with far:
        far.settimeout(10.0)
        with channel._lock:  # as a thread in the middle of a read
            closing = threading.Thread(target=channel.close)
            closing.start()
            assert far.recv(1) == b""  # the other side knows at once
            assert channel.fileno() >= 0
        closing.join(10.0)
        assert channel.fileno() == -1
