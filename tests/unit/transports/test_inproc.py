"""Workers inside one process, by name."""

from __future__ import annotations

import time

import pytest

from gradwire.errors import ConfigurationError, ConnectFailed
from gradwire.transports.inproc import InprocTransport
from gradwire.transports.stream import StreamOptions


def test_a_name_is_used_once_until_its_listener_closes() -> None:
    transport = InprocTransport(StreamOptions())
    listener = transport.listen("w")
    with pytest.raises(ConfigurationError, match="in use"):
        transport.listen("w")
    listener.close()
    listener.close()
    transport.listen("w").close()


def test_a_name_that_nothing_listens_at() -> None:
    with pytest.raises(ConnectFailed, match=r"inproc://w"):
        InprocTransport(StreamOptions()).connect("inproc://w", time.monotonic() + 1)


def test_a_connection_that_was_not_accepted_ends_with_its_listener() -> None:
    transport = InprocTransport(StreamOptions())
    listener = transport.listen("w")
    connection = transport.connect(listener.uri, time.monotonic() + 1)
    listener.close()
    with pytest.raises(ConnectionError):
        connection.read_nowait()
    connection.close()
