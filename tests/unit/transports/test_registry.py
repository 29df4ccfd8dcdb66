"""The transports of a worker, and the best of them for an address."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError, ConnectFailed
from gradwire.transports.registry import LOCAL, choose_uri, host_identity, make_transports
from gradwire.types import WorkerAddress, WorkerInfo

URIS = ("tcp://10.0.0.4:4711?tls", "unix:///tmp/w.sock", "inproc://w")


def address(host: str, uris: tuple[str, ...] = URIS) -> WorkerAddress:
    return WorkerAddress(WorkerInfo("w", 1), 1, host, uris)


@pytest.mark.parametrize(
    ("host", "schemes", "uri"),
    [
        ("here", ("inproc", "unix", "tcp"), "inproc://w"),
        ("here", ("unix", "tcp"), "unix:///tmp/w.sock"),
        (LOCAL, ("unix", "tcp"), "unix:///tmp/w.sock"),
        ("here", ("tcp",), "tcp://10.0.0.4:4711?tls"),
        ("there", ("inproc", "unix", "tcp"), "tcp://10.0.0.4:4711?tls"),
    ],
)
def test_the_cheapest_way_is_chosen(host: str, schemes: tuple[str, ...], uri: str) -> None:
    assert choose_uri(address(host), "here", schemes) == uri


def test_a_worker_that_cannot_be_reached_from_here() -> None:
    with pytest.raises(ConnectFailed, match=r"worker w is on another machine.*TLS keys"):
        choose_uri(address("there"), "here", ("inproc", "unix"))
    with pytest.raises(ConnectFailed, match=r"no address.*; start every worker with the same transports="):
        choose_uri(address("here", ()), "here", ("unix",))


def test_transports_by_their_schemes(tmp_path: Path) -> None:
    transports = make_transports(WorkerConfig(transports=("inproc", "unix", "tcp")), "data", tmp_path)
    assert {scheme: transport.scheme for scheme, transport in transports.items()} == {
        scheme: scheme for scheme in ("inproc", "unix", "tcp")
    }
    assert list(make_transports(WorkerConfig(), "data", tmp_path)) == ["unix"]
    with pytest.raises(ConfigurationError, match="private folder"):
        make_transports(WorkerConfig(), "data", None)


def test_the_identity_of_a_host_stays_the_same() -> None:
    assert host_identity() == host_identity() != ""
