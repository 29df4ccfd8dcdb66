"""Serves metrics over HTTP, for Prometheus to scrape: those of one worker, or of whatever a collector knows."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from gradwire.config import check_port
from gradwire.errors import ConfigurationError, NotInitialized
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent
from gradwire.telemetry.measurements import read_numbers, start_measuring
from gradwire.telemetry.metrics import MetricsCollector, Scraped, import_prometheus
from gradwire.transports.tcp import is_loopback, is_loopback_host

_STOP_S = 2.0
_REQUEST_S = 10.0
_MOST_REQUESTS = 16  # at a time; Prometheus makes one
_POLL_S = 0.1  # how long `close` may have to wait


class MetricsServer:
    """An HTTP server for metrics, in a thread of this process. As a context manager it closes itself at the end.

    Attributes:
        url: Where to scrape.
        port: The port that it listens on.
    """

    def __init__(self, collector: MetricsCollector, host: str, port: int) -> None:
        check_port(port)
        prometheus = import_prometheus()
        registry = prometheus.CollectorRegistry(auto_describe=False)
        registry.register(collector)
        app = prometheus.make_wsgi_app(registry)
        if is_loopback(host):
            app = _for_this_machine(app)
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, app, kind, _Handler)
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve metrics at {host} port {port}: {error}; pass another port, or 0 for any free one"
            ) from error
        serve = partial(self._server.serve_forever, _POLL_S)
        self._thread = threading.Thread(target=serve, name="gradwire-metrics-http", daemon=True)
        self._thread.start()
        _open_servers.add(self)
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()  # guards _is_closed
        self._is_closed = False
        self.port: int = self._server.server_address[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/metrics"

    def __repr__(self) -> str:
        return f"<MetricsServer {self.url} {'closed' if self._is_closed else 'open'}>"

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if os.getpid() != self._owner_pid:  # a forked process has no thread that would stop, and perhaps a held lock
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        _open_servers.discard(self)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_STOP_S)

    def leave_to_parent(self) -> None:
        """Close the copy of the socket in a forked process, so that the port is free when the parent has ended."""
        self._server.socket.close()


_open_servers: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for server in tuple(_open_servers):
        server.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _MOST_REQUESTS

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(_MOST_REQUESTS)  # limits the threads
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # the thread could not be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape comes every few seconds."""

    def address_string(self) -> str:
        return str(self.client_address[0])  # without asking a name server


def _for_this_machine(app: Any) -> Any:
    """Refuse requests that were meant for another host: a page in a browser may have a name that leads here."""

    def guarded(environ: dict[str, Any], start_response: Any) -> Any:
        if not is_loopback_host(str(environ.get("HTTP_HOST", ""))):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"the Host header does not name this machine\n"]
        return app(environ, start_response)

    return guarded


def serve_metrics(port: int = 0, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of the worker of this process over HTTP, for Prometheus to scrape.

    For programs with `init_rpc`: each process serves its own worker. In the driver of a cluster, `Cluster.metrics` has those
    of all workers. Anyone who can reach the port can read the metrics, which name functions and workers.

    Args:
        port: The port to listen on; any free one if 0.
        host: The address to listen on; only this machine can reach the default.

    Returns:
        The server. It is closed with the worker.

    Raises:
        ConfigurationError: The port is in use, or prometheus_client is not installed.
        NotInitialized: This process is not a worker.
    """
    return serve_worker(current_agent(), port, host)


def serve_worker(agent: Agent, port: int, host: str) -> MetricsServer:
    """Serve the metrics of a worker of this process, until it is closed."""
    collector = MetricsCollector(lambda: [Scraped(agent.info.name, read_numbers(agent))])
    start_measuring(agent)
    return serve_until_closed(agent, collector, port, host)


def serve_until_closed(agent: Agent, collector: MetricsCollector, port: int, host: str) -> MetricsServer:
    """Serve what a collector collects, until a worker of this process is closed.

    Raises:
        ConfigurationError: The port is in use.
        NotInitialized: The worker is closed already.
    """
    server = MetricsServer(collector, host, port)
    agent.before_close.append(server.close)
    if agent.is_closed:  # it may have called back before this
        server.close()
        raise NotInitialized(f"worker {agent.info.name} has shut down and cannot serve metrics")
    return server
