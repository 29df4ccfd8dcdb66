"""Every transport keeps the contract of `gradwire.testing.check_transport`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradwire.config import TlsKeys
from gradwire.testing import TRANSPORT_CHECKS, ConnectionPair, TransportCheck, wait_until
from gradwire.transports.inproc import InprocTransport
from gradwire.transports.registry import Listener, Transport
from gradwire.transports.stream import StreamConnection, StreamOptions
from gradwire.transports.tcp import TcpTransport
from gradwire.transports.tls import make_keys
from gradwire.transports.unix import UnixTransport

MakeTransport = Callable[[StreamOptions], Transport]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> TlsKeys:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "cluster")
    return TlsKeys.in_folder(folder / "cluster")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s-") as path:  # mode 0700, and short
        yield Path(path)


@pytest.fixture(params=["inproc", "unix", "tcp", "tcp+tls"])
def make_transport(request: pytest.FixtureRequest, folder: Path, keys: TlsKeys) -> MakeTransport:
    makers: dict[str, MakeTransport] = {
        "inproc": InprocTransport,
        "unix": lambda options: UnixTransport(folder, options),
        "tcp": lambda options: TcpTransport("127.0.0.1", 0, None, options),
        "tcp+tls": lambda options: TcpTransport("127.0.0.1", 0, keys, options),
    }
    return makers[request.param]


def accept(listener: Listener) -> StreamConnection:
    accepted: list[StreamConnection] = []

    def has_come() -> bool:
        connection = listener.accept_nowait()
        accepted.extend([connection] if connection is not None else [])
        return bool(accepted)

    wait_until(has_come, 10, "somebody connects")
    return accepted[0]


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_transport(check: TransportCheck, make_transport: MakeTransport) -> None:
    num_pairs = 0

    def make_pair(options: StreamOptions) -> ConnectionPair:
        nonlocal num_pairs
        num_pairs += 1
        transport = make_transport(options)
        listener = transport.listen(f"worker{num_pairs}")
        try:
            near = transport.connect(listener.uri, time.monotonic() + 10)
            return ConnectionPair(near, accept(listener))
        finally:
            listener.close()

    check(make_pair)
    assert num_pairs > 0
