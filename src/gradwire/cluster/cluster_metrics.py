"""`Cluster.metrics`: the metrics of all workers, collected by the driver; and each worker's own server, on request.

driver -- cluster.metrics() ------------------> worker      its numbers; counted from the first question on
       -- cluster.serve_metrics(host, port) -->             starts an HTTP server there; the answer is its port
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from gradwire.config import check_port
from gradwire.errors import ConfigurationError
from gradwire.rpc.agent import Agent
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.telemetry.measurements import WorkerNumbers, read_numbers, start_measuring
from gradwire.telemetry.metrics import MetricsCollector, Scraped
from gradwire.telemetry.metrics_server import MetricsServer, serve_until_closed, serve_worker
from gradwire.types import Text, WorkerInfo

if TYPE_CHECKING:
    from prometheus_client.core import Metric

METRICS = "cluster.metrics"
SERVE_METRICS = "cluster.serve_metrics"

_ANSWER_S = 2.0
_START_S = 10.0

_Port = Annotated[int, Meta(ge=0, le=65_535)]


# The worker's side


def serve_numbers(agent: Agent, driver: str) -> None:
    """Let the driver ask for the numbers of this worker, and for a server of its own."""

    def on_metrics(_: WorkerInfo) -> Any:
        return msgspec.to_builtins(read_numbers(agent))

    def on_serve(_: WorkerInfo, host: str, port: int) -> InterruptibleFuture[int]:
        answer: InterruptibleFuture[int] = InterruptibleFuture()
        agent.reactor.run_soon(partial(_serve, agent, host, port, answer))  # importing the server takes a moment
        return answer

    purpose = "ask for the metrics of this worker"
    agent.server.register_control(METRICS, on_metrics, only_for=driver, purpose=purpose)
    agent.server.register_control(SERVE_METRICS, on_serve, Text, _Port, only_for=driver, purpose=purpose)


def _serve(agent: Agent, host: str, port: int, answer: InterruptibleFuture[int]) -> None:
    try:
        server = serve_worker(agent, port, host)
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result(server.port)


# The driver's side


class ScrapedMember(NamedTuple):
    """A worker of the cluster, as the driver knows it."""

    name: str
    rank: int
    host: str
    is_running: bool
    num_restarts: int


class ClusterMetrics:
    """The metrics of all workers of a cluster, and of its driver.

    It is a collector of prometheus_client, too: ``prometheus_client.REGISTRY.register(cluster.metrics())``.
    """

    def __init__(self, agent: Agent, members: Callable[[], Sequence[ScrapedMember]]) -> None:
        self._agent = agent
        self._members = members
        self._collector = MetricsCollector(self._scrape)
        start_measuring(agent)
        self._ask()  # what the workers do is counted from now on

    def __repr__(self) -> str:
        num_workers = len(self._members())
        return f"<ClusterMetrics of {self._agent.info.name} and {num_workers} worker{'s' if num_workers != 1 else ''}>"

    def _ask(self) -> dict[str, WorkerNumbers]:
        names = [member.name for member in self._members() if member.is_running]
        return self._agent.ask_all(names, METRICS, (), _ANSWER_S, WorkerNumbers)

    def _scrape(self) -> list[Scraped]:
        found = self._ask()
        workers = [Scraped(member.name, found.get(member.name), member.num_restarts) for member in self._members()]
        return [*workers, Scraped(self._agent.info.name, read_numbers(self._agent))]

    def render(self) -> bytes:
        """Return the current metrics in Prometheus' text format, for a web server of the program."""
        return self._collector.render()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics; called by a registry of prometheus_client."""
        return self._collector.collect()

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering this does not ask the workers."""
        return []

    def serve(self, port: int = 0, host: str = "127.0.0.1") -> MetricsServer:
        """Serve the metrics of all workers over HTTP, in this process, until the cluster is closed.

        Anyone who can reach the port can read them; they name functions and workers.

        Args:
            port: The port to listen on; any free one if 0.
            host: The address to listen on; only this machine can reach the default.

        Raises:
            ConfigurationError: The port is in use.
            NotInitialized: The cluster was closed.
        """
        return serve_until_closed(self._agent, self._collector, port, host)

    def serve_workers(self, port: int = 0, host: str = "127.0.0.1") -> dict[str, str]:
        """Start an HTTP server in each running worker, with the metrics of that worker alone.

        Anyone who can reach the ports can read them. A worker that is restarted has no server until this is called again.

        Args:
            port: The port of rank 0; each worker adds its rank. Any free ports if 0.
            host: The address to listen on, on each worker's machine; only that machine can reach the default.

        Returns:
            The URL of each worker's metrics, by name.

        Raises:
            ConfigurationError: A port is in use, or prometheus_client is not installed there; other workers may serve.
            NotInitialized: The cluster is closed.
            WorkerLost: A worker was lost meanwhile.
            RpcTimeout: A worker did not start its server within 10 s.
        """
        check_port(port)
        members = [member for member in self._members() if member.is_running]
        last = max((member.rank for member in members), default=0)
        if port and port + last > 65_535:
            raise ConfigurationError(f"port {port} plus the highest rank ({last}) exceeds 65535; pass a lower port")
        asked = {}
        for member in members:
            args = (host, port + member.rank if port else 0)
            asked[member] = self._agent.ask(member.name, SERVE_METRICS, args, _START_S, _Port)
        is_any = host in ("", "0.0.0.0", "::")
        urls = {}
        for member, answer in asked.items():
            shown = (member.host or "127.0.0.1") if is_any else host
            urls[member.name] = f"http://{f'[{shown}]' if ':' in shown else shown}:{answer.wait()}/metrics"
        return urls
