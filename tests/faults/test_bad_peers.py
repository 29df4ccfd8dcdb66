"""Whoever connects without being a worker harms nobody."""

from __future__ import annotations

import operator
import os
import socket
import time
from collections.abc import Iterator

import pytest

from gradwire.config import Limits
from gradwire.errors import GradwireError
from gradwire.rpc import Agent
from gradwire.rpc.peers import StaticDirectory
from rpc.fixtures import MakeAgents
from rpc.puppets import wait_until

WAYS = ["unix", "tcp"]


def _raw(agent: Agent) -> socket.socket:
    uri = agent.address.uris[0]
    if uri.startswith("unix://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5.0)
        sock.connect(uri.removeprefix("unix://"))
        return sock
    host, _, port = uri.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5.0)


def _is_ended(sock: socket.socket) -> bool:
    """Whether the other side closes the connection (within the socket's timeout)."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture(params=WAYS)
def agents(request: pytest.FixtureRequest, make_agents: MakeAgents) -> Iterator[list[Agent]]:
    limits = Limits(handshake_timeout_s=1.5, half_open=8)
    made = make_agents("a", "b", transports=(request.param,), limits=limits)
    assert made[0].call("b", operator.add, (1, 2)) == 3
    yield made
    assert made[0].call("b", operator.add, (1, 2)) == 3
    assert made[1].call("a", operator.add, (1, 2)) == 3


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        bytes(256),
        b"\xff" * 4096,
        os.urandom(100_000),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    ],
    ids=["http", "zeros", "ones", "random", "client hello"],
)
def test_garbage_ends_its_connection_only(agents: list[Agent], garbage: bytes) -> None:
    with _raw(agents[1]) as sock:
        try:
            sock.sendall(garbage)
        except (BrokenPipeError, ConnectionResetError):
            return
        assert _is_ended(sock)
    assert wait_until(lambda: agents[1].statistics().num_connections <= 4)


def test_silence_is_ended_after_the_handshake_timeout(agents: list[Agent]) -> None:
    started = time.monotonic()
    with _raw(agents[1]) as sock:
        assert _is_ended(sock)
    assert 1.0 < time.monotonic() - started < 10.0


def test_one_byte_at_a_time_is_ended_too(agents: list[Agent]) -> None:
    """The handshake's time is for all of it, not for each byte."""
    started = time.monotonic()
    with _raw(agents[1]) as sock:
        sock.settimeout(0.05)
        while time.monotonic() - started < 20.0:
            try:
                sock.send(b"G")
                if sock.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert time.monotonic() - started < 10.0


def test_flood_of_half_open_connections_is_bounded(agents: list[Agent]) -> None:
    flood = [_raw(agents[1]) for _ in range(60)]
    try:
        assert wait_until(lambda: sum(item.is_half_open for item in list(agents[1].server.incoming)) <= 8)
        assert agents[0].call("b", operator.add, (1, 2)) == 3  # those who are in stay in
        assert wait_until(lambda: not any(item.is_half_open for item in list(agents[1].server.incoming)), 20.0)
    finally:
        for sock in flood:
            sock.close()


def test_new_worker_gets_in_during_a_flood(agents: list[Agent], make_agents: MakeAgents) -> None:
    """Strangers that keep the door busy do not keep it shut."""
    flood = [_raw(agents[1]) for _ in range(30)]
    try:
        scheme = agents[1].address.uris[0].partition(":")[0]
        shared = StaticDirectory([agents[1].address])
        (late,) = make_agents("late", directory=shared, transports=(scheme,))
        assert late.call("b", operator.add, (1, 2), None, 5.0) == 3
    finally:
        for sock in flood:
            sock.close()


def test_worker_with_another_token_is_refused(agents: list[Agent], make_agents: MakeAgents) -> None:
    scheme = agents[1].address.uris[0].partition(":")[0]
    shared = StaticDirectory([agents[1].address])
    (stranger,) = make_agents("stranger", directory=shared, transports=(scheme,), token=b"guessed")
    with pytest.raises(GradwireError, match="token") as caught:
        stranger.call("b", operator.add, (1, 2))
    assert "secret" not in str(caught.value)
    assert "guessed" not in str(caught.value)


def test_nothing_listens_beyond_this_machine(agents: list[Agent]) -> None:
    for uri in (uri for agent in agents for uri in agent.address.uris):
        assert uri.startswith(("unix:///", "tcp://127.0.0.1:"))
