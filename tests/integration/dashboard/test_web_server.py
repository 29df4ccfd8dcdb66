"""The page's server over HTTP: who gets in, what is served, and how it ends. Needs no browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from gradwire import autograd, rpc
from gradwire.dashboard import web_server, worker_report
from gradwire.dashboard.web_server import STATIC, Dashboard
from gradwire.dashboard.worker_report import REPORT, serve_reports
from gradwire.errors import ConfigurationError
from gradwire.rpc import set_current_agent
from gradwire.rpc.agent import Agent
from gradwire.testing import wait_until

MakeAgents = Callable[..., list[Agent]]


def row(agent: Agent, state: str = "running", reason: str | None = None) -> dict[str, Any]:
    return {
        "name": agent.info.name,
        "rank": agent.info.id,
        "role": "worker",
        "pid": os.getpid(),
        "host": "elsewhere",  # so that py-spy is not asked
        "state": state,
        "exit_reason": reason,
    }


class Client:
    """A browser, as far as these tests need one."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self.cookie = ""

    def get(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.dashboard.port, timeout=10.0)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers={"Cookie": self.cookie, **named} if self.cookie else named)
            answer = connection.getresponse()
            answer.body = answer.read()  # type: ignore[attr-defined]
            return answer

    def log_in(self) -> Client:
        answer = self.get(path_of(self.dashboard.url))
        assert (answer.status, answer.headers["location"]) == (303, "/")
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return self

    def state(self, query: str = "") -> Any:
        answer = self.get(f"/api/state{query}")
        assert answer.status == 200
        return json.loads(answer.body)  # type: ignore[attr-defined]


def path_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"


def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@pytest.fixture
def agents(make_agents: MakeAgents) -> Iterator[list[Agent]]:
    a, b = make_agents(2, "inproc", rpc_timeout_s=20.0)
    serve_reports(b, "a")
    set_current_agent(a)
    yield [a, b]
    set_current_agent(None)


@pytest.fixture
def dashboard(agents: list[Agent]) -> Iterator[Dashboard]:
    a, b = agents
    with Dashboard(a, "train-1", lambda: [row(a), row(b)]) as dashboard:
        yield dashboard


def test_a_link_works_once_and_nothing_is_shown_without_it(dashboard: Dashboard) -> None:
    stranger, client = Client(dashboard), Client(dashboard)
    link = path_of(dashboard.url)
    first = client.get(link)
    assert first.status == 303
    for path in (
        link,
        "/",
        "/static/page.js",
        "/events",
        "/api/state",
        "/api/stacks?worker=b",
        "/?token=x",
        "/nothing",
    ):
        refusal = stranger.get(path)
        assert (refusal.status, refusal.headers["connection"]) == (403, "close"), path
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    client.cookie = cookie.partition(";")[0]
    assert client.get("/").status == 200
    assert client.get(link).status == 303  # the same browser, by the link in its history
    assert path_of(dashboard.url) != path_of(dashboard.url)
    assert client.get("/nothing").status == 404
    text = str(stranger.get(link).body)  # type: ignore[attr-defined]
    assert "This link has already been used, or belongs to another cluster." in text


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com:80", "192.168.0.1"])
def test_other_names_of_this_machine_are_refused(dashboard: Dashboard, host: str) -> None:
    """A page at example.com whose name was made to point to 127.0.0.1 is of the same origin as itself."""
    client = Client(dashboard).log_in()
    for path in ("/", "/api/state", path_of(dashboard.url)):
        refusal = client.get(path, Host=host)
        assert refusal.status == 421
        assert "only available on this machine" in str(refusal.body)  # type: ignore[attr-defined]
    assert client.get("/", Host="localhost:1234").status == 200  # a tunnel


def test_other_sites_cannot_read_or_embed_the_page(dashboard: Dashboard) -> None:
    client = Client(dashboard).log_in()
    for path in ("/api/state", "/events", "/static/page.js"):
        assert client.get(path, Sec_Fetch_Site="cross-site").status == 403, path
    for answer in (
        client.get("/"),
        client.get("/static/page.js"),
        client.get("/api/state"),
        Client(dashboard).get("/"),
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(dashboard: Dashboard, method: str) -> None:
    client = Client(dashboard).log_in()
    for path in ("/", "/api/state", "/api/stacks?worker=b"):
        assert client.get(path, method).status == 405


def test_a_token_survives_those_who_only_look_at_the_link(dashboard: Dashboard) -> None:
    link = path_of(dashboard.url)
    assert Client(dashboard).get(link, "HEAD").status == 405
    assert Client(dashboard).get(link).status == 303


@pytest.mark.parametrize(
    "path", ["/static/../web_server.py", "/static/..%2fweb_server.py", "/static//etc/passwd", "/static/"]
)
def test_only_files_of_the_page_are_served(dashboard: Dashboard, path: str) -> None:
    assert (STATIC / ".." / "web_server.py").exists()
    assert Client(dashboard).log_in().get(path).status == 404


def test_the_page_needs_nothing_from_elsewhere(dashboard: Dashboard) -> None:
    client = Client(dashboard).log_in()
    names = [
        path.relative_to(STATIC).as_posix()
        for path in STATIC.rglob("*")
        if path.suffix in (".js", ".css", ".html", ".mjs")
    ]
    assert len(names) >= 8
    for name in names:
        assert client.get(f"/static/{name}").status == 200
        if "vendor" not in name:
            text = (STATIC / name).read_text()
            assert not [line for line in text.splitlines() if "http" in line and "w3.org" not in line]
            assert "innerHTML" not in text
            assert " style=" not in text


def test_the_state_shows_workers_steps_and_references(
    dashboard: Dashboard, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_report, "_CAPTURE_S", 10.0)
    client = Client(dashboard).log_in()
    before = client.state()
    assert [item["name"] for item in before["workers"]] == ["a", "b"]
    assert all(item["has_answered"] for item in before["workers"])
    assert before["step"] is None
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as ctx:
        autograd.backward(ctx, [rpc.rpc_sync("b", triple, args=(x,)).sum()])
    after = client.state()
    assert after["step"]["id"] == str(int(ctx))
    assert after["steps"][0]["num_messages"] == 2
    assert [item["name"] for item in after["step"]["graph"]["workers"]] == ["a", "b"]
    assert all(item["time_s"] >= 0 and item["num_bytes"] == 8 for item in after["step"]["graph"]["messages"])
    expected = {("a", "call"), ("b", "run"), ("a", "backward"), ("b", "backward")}

    def has_all_spans() -> bool:
        spans = client.state(f"?step={int(ctx)}")["step"]["spans"]
        return {(item["worker"], item["kind"]) for item in spans} >= expected

    wait_until(has_all_spans, 20.0)  # the last one ends after the step
    assert client.state(f"?step={int(ctx)}")["step"]["id"] == str(int(ctx))
    assert client.state("?step=7")["step"] is None


def test_a_context_that_stays_open_is_shown_with_who_waits_for_whom(dashboard: Dashboard) -> None:
    client = Client(dashboard).log_in()
    with autograd.context() as ctx:
        rpc.rpc_sync("b", triple, args=(torch.ones(2, requires_grad=True),))
        wait_until(lambda: [item["is_open"] for item in client.state()["steps"]] == [True], 20.0)
        assert client.state()["step"]["id"] == str(int(ctx))
    wait_until(lambda: [item["is_open"] for item in client.state()["steps"]] == [False], 20.0)


def test_failures_are_listed(agents: list[Agent]) -> None:
    a, b = agents
    rows = [row(a), row(b)]
    with Dashboard(a, "train-1", lambda: rows) as dashboard:
        client = Client(dashboard).log_in()
        client.state()
        with pytest.raises(ZeroDivisionError):
            a.call("b", divmod, (1, 0))
        rows[1] = row(b, "lost", "killed by SIGKILL")
        rows[1]["name"] = "c"
        texts = {(item["worker"], item["text"]) for item in client.state()["errors"]}
        assert ("c", "lost: killed by SIGKILL") in texts
        assert ("a", "builtins:divmod on b failed: ZeroDivisionError") in texts


def test_events_that_are_not_valid_are_left_out(dashboard: Dashboard, agents: list[Agent]) -> None:
    agents[1].server.register_control(REPORT, lambda source: [1, [0, 0, 0, []], [], None, b"\x92\x01", 0])
    found = Client(dashboard).log_in().state()
    assert [item["has_answered"] for item in found["workers"]] == [True, True]
    assert found["step"] is None


def test_stacks_of_a_worker(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(dashboard).log_in()
    found = json.loads(client.get("/api/stacks?worker=b").body)  # type: ignore[attr-defined]
    assert (found["worker"], found["by"]) == ("b", "the worker")
    assert {"gradwire-b-clock", "MainThread"} <= {item["name"] for item in found["threads"]}
    assert client.get("/api/stacks?worker=%3Cb%3E").status == 404


def connect(dashboard: Dashboard, first_bytes: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", dashboard.port), timeout=10.0)
    connection.sendall(first_bytes)
    return connection


def is_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1 << 16) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_connections_without_requests_do_not_use_up_descriptors(dashboard: Dashboard) -> None:
    client = Client(dashboard).log_in()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(dashboard)) for _ in range(150)]
        ended: set[socket.socket] = set()

        def num_open() -> int:
            ended.update(item for item in silent if item not in ended and is_ended(item))
            return len(silent) - len(ended)

        wait_until(lambda: num_open() <= web_server._MOST_CONNECTIONS, 20.0)
        assert silent[-1] not in ended  # the oldest give way
        assert client.get("/").status == 200


@pytest.mark.parametrize(
    "first_bytes", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: COOKIE\r\n\r\nGET / HT"]
)
def test_a_connection_that_sends_no_request_is_closed(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch, first_bytes: bytes
) -> None:
    cookie = Client(dashboard).log_in().cookie
    monkeypatch.setattr(web_server, "_REQUEST_S", 0.1)
    with connect(dashboard, first_bytes.replace(b"COOKIE", cookie.encode())) as connection:
        wait_until(lambda: is_ended(connection), 4.0)


def test_a_stream_stays_open_for_longer_than_a_request_may_take(
    dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "_REQUEST_S", 0.1)
    monkeypatch.setattr(web_server, "INTERVAL_S", 0.2)
    with stream_of(dashboard) as stream:
        for _ in range(2):
            wait_for_tick(stream)


@contextlib.contextmanager
def stream_of(dashboard: Dashboard) -> Iterator[http.client.HTTPResponse]:
    client = Client(dashboard).log_in()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=10.0)) as connection:
        connection.request("GET", "/events", headers={"Cookie": client.cookie})
        yield connection.getresponse()


def wait_for_tick(stream: http.client.HTTPResponse) -> None:
    while line := stream.readline():
        if line.startswith(b"event: tick"):
            return
    raise AssertionError("the stream has ended")


def test_the_page_goes_on_after_errors_and_each_kind_is_logged_once(
    agents: list[Agent], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "INTERVAL_S", 0.05)
    a, b = agents
    errors: list[Exception] = [ValueError("one"), ValueError("two"), RuntimeError("three")]

    def rows() -> list[dict[str, Any]]:
        if errors:
            raise errors.pop(0)
        return [row(a), row(b)]

    with Dashboard(a, "train-1", rows) as dashboard, stream_of(dashboard) as stream:
        wait_for_tick(stream)
    logged = [item.exc_info[1] for item in caplog.records if item.exc_info]
    assert [str(item) for item in logged] == ["one", "three"]


def test_requests_at_the_same_time_share_one_collection(agents: list[Agent]) -> None:
    a, b = agents
    go_on, num_asked, num_at_once = threading.Event(), 0, 0

    def rows() -> list[dict[str, Any]]:
        nonlocal num_asked, num_at_once
        num_asked += 1
        num_at_once += 1
        assert num_at_once == 1
        go_on.wait(20.0)
        num_at_once -= 1
        return [row(a), row(b)]

    with Dashboard(a, "train-1", rows) as dashboard:
        client = Client(dashboard).log_in()
        states: list[Any] = []
        threads = [threading.Thread(target=lambda: states.append(client.state())) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(dashboard._server.server_state.tasks) == 8, 20.0)
        go_on.set()
        for thread in threads:
            thread.join(20.0)
        assert len(states) == 8
        assert num_asked == 2  # the first one, and one for all that came while it went on
        client.state()
        assert num_asked == 3  # what has just happened is in it


def test_a_page_that_cannot_be_opened_leaves_nothing_behind(dashboard: Dashboard, agents: list[Agent]) -> None:
    a, _ = agents
    handlers, before_close = list(logging.getLogger("gradwire").handlers), list(a.before_close)
    with pytest.raises(ConfigurationError):
        Dashboard(a, "another", list, dashboard.port)
    assert logging.getLogger("gradwire").handlers == handlers
    assert a.before_close == before_close
    dashboard.close()
    assert len(a.before_close) == len(before_close) - 1


def test_the_stream_sends_what_changes_and_ends_with_the_page(agents: list[Agent]) -> None:
    a, b = agents
    with Dashboard(a, "train-1", lambda: [row(a), row(b)]) as dashboard:
        client = Client(dashboard).log_in()
        connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=10.0)
        with contextlib.closing(connection):
            connection.request("GET", "/events", headers={"Cookie": client.cookie})
            stream = connection.getresponse()
            assert stream.headers["content-type"].startswith("text/event-stream")
            names = []
            while not names or names[-1] != "tick":
                line = stream.readline().decode().strip()
                if line.startswith("event: "):
                    names.append(line.removeprefix("event: "))
            assert {"cluster", "workers", "steps", "step", "errors", "references"} <= set(names)
            dashboard.close()
            assert b"event: closed" in stream.read()
    dashboard.close()
    with pytest.raises(OSError, match="refused"):
        client.get("/")


def test_a_notebook_shows_a_link_and_then_that_it_is_closed(dashboard: Dashboard) -> None:
    assert f'<a href="http://127.0.0.1:{dashboard.port}/?token=' in dashboard._repr_html_()
    dashboard.close()
    assert dashboard._repr_html_() == "<p>The page of train-1 is closed.</p>"
    assert repr(dashboard) == "<Dashboard of train-1: closed>"


def test_a_port_that_is_taken_is_named(dashboard: Dashboard, agents: list[Agent]) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen on port {dashboard.port} of this machine"):
        Dashboard(agents[0], "another", list, dashboard.port)
    wrong: Any
    for wrong in (-5, 70_000, "x", True):
        with pytest.raises(ConfigurationError, match="port must be a whole number"):
            Dashboard(agents[0], "another", list, wrong)


def test_a_missing_package_is_named_with_the_line_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gradwire.dashboard.web_server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(
        ConfigurationError, match=r"the dashboard needs the package uvicorn: run pip install 'gradwire\[dashboard\]'"
    ):
        __import__("gradwire.dashboard.web_server")


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of Python 3.12, because there are threads
def test_a_process_that_the_driver_forked_closes_nothing_and_does_not_wait(dashboard: Dashboard) -> None:
    with dashboard._lock:  # as another thread may
        child = os.fork()
        if child == 0:
            dashboard.close()
            os._exit(0)
    try:
        wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 10.0, "that the forked process has ended")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    assert Client(dashboard).get(path_of(dashboard.url)).status == 303


def test_a_process_that_the_driver_forked_does_not_keep_the_port(dashboard: Dashboard) -> None:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
        child = os.fork()
    if child == 0:
        os.write(writing, str(dashboard._listener.fileno()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"-1"
    os.waitpid(child, 0)
