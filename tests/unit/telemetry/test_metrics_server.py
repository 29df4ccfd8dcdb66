"""Metrics over HTTP: of one worker, and to whom."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import sys
import urllib.request
import warnings
from typing import Any

import pytest

from conftest import MakeAgents
from gradwire import telemetry
from gradwire.errors import ConfigurationError, NotInitialized
from gradwire.rpc import set_current_agent
from gradwire.telemetry.metrics_server import _MOST_REQUESTS, serve_worker
from gradwire.testing import wait_until


def test_a_worker_serves_its_metrics_until_it_is_closed(make_agents: MakeAgents) -> None:
    a, _ = make_agents(2)
    set_current_agent(a)
    try:
        server = telemetry.serve_metrics()
        a.call("b", max, (1, 2))
        with urllib.request.urlopen(server.url, timeout=10) as answer:
            text = answer.read().decode()
        assert 'gradwire_calls_total{function="builtins:max",outcome="ok",worker="a"} 1.0' in text
        with pytest.raises(ConfigurationError, match=rf"cannot serve metrics at 127\.0\.0\.1 port {server.port}"):
            telemetry.serve_metrics(server.port)
        wrong: Any
        for wrong in (-5, 70_000, "x", True):
            with pytest.raises(ConfigurationError, match="port must be a whole number"):
                telemetry.serve_metrics(wrong)
        a.close()
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", server.port, timeout=5).connect()
        server.close()
    finally:
        set_current_agent(None)


def test_a_forked_process_does_not_keep_the_port(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1)
    server = serve_worker(a, 0, "127.0.0.1")
    descriptor = server._server.socket.fileno()
    near, far = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        pid = os.fork()
    if pid == 0:
        os.write(far, b"open" if os.path.exists(f"/proc/self/fd/{descriptor}") else b"closed")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(near, 10) == b"closed"
    os.close(near)
    os.close(far)


def test_closing_in_a_forked_process_leaves_the_server_to_the_parent(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1)
    server = serve_worker(a, 0, "127.0.0.1")
    with server._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            server.close()
            os._exit(0)
    try:
        wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, 10.0, "that the forked process has ended")
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        assert answer.status == 200


def test_connections_beyond_the_limit_are_closed(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1)
    with serve_worker(a, 0, "127.0.0.1") as server, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            for _ in range(_MOST_REQUESTS)
        ]
        refused = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        assert refused.recv(1) == b""
        for connection in silent:
            connection.close()

        def is_served() -> bool:
            with contextlib.suppress(OSError), urllib.request.urlopen(server.url, timeout=10) as answer:
                return bool(answer.status == 200)
            return False

        wait_until(is_served, 10.0, "that a later request is served")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("localhost:1", 200),
        ("LOCALHOST", 200),
        ("[::1]:1", 200),
        ("", 403),
        ("evil.example:80", 403),
        ("127.0.0.1.evil", 403),
    ],
)
def test_requests_meant_for_another_host_are_refused(make_agents: MakeAgents, host: str, status: int) -> None:
    (a,) = make_agents(1)
    set_current_agent(a)
    try:
        with telemetry.serve_metrics() as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request("GET", "/metrics", headers={"Host": host})
            assert connection.getresponse().status == status
            connection.close()
    finally:
        set_current_agent(None)


def test_without_a_worker_there_is_nothing_to_serve() -> None:
    with pytest.raises(NotInitialized):
        telemetry.serve_metrics()


def test_without_the_package_the_error_says_what_to_install(
    make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = make_agents(1)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'gradwire\[metrics\]'"):
        serve_worker(a, 0, "127.0.0.1")
