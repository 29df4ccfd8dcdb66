"""The driver asks workers for their numbers, and has them serve these."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from conftest import MakeAgents
from gradwire.cluster.cluster_metrics import METRICS, SERVE_METRICS, ClusterMetrics, ScrapedMember, serve_numbers
from gradwire.errors import AuthenticationFailed, ConfigurationError, DecodeError, NotInitialized
from gradwire.rpc import Agent


def metrics_of(driver: Agent, *names: str) -> ClusterMetrics:
    members = [ScrapedMember(name, rank, "", name != "lost", 0) for rank, name in enumerate(names)]
    return ClusterMetrics(driver, lambda: members)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_metrics_of_all_workers(make_agents: MakeAgents) -> None:
    a, b, c = make_agents(3)
    for agent in (b, c):
        serve_numbers(agent, "a")
    metrics = metrics_of(a, "b", "c", "lost")
    assert repr(metrics) == "<ClusterMetrics of a and 3 workers>"
    assert repr(metrics_of(a, "b")) == "<ClusterMetrics of a and 1 worker>"
    a.call("b", max, (1, 2))
    b.call("c", min, (1, 2))
    text = metrics.render().decode()
    assert 'gradwire_calls_total{function="builtins:max",outcome="ok",worker="a"} 1.0' in text
    assert 'gradwire_calls_total{function="builtins:min",outcome="ok",worker="b"} 1.0' in text
    assert [f'gradwire_worker_up{{worker="{name}"}} {up}' in text for name, up in (("c", 1.0), ("lost", 0.0))] == [
        True
    ] * 2
    with metrics.serve() as server:
        assert 'worker="c"' in read(server.url)
    urls = metrics_of(a, "b", "c").serve_workers()
    assert 'worker="b"' in read(urls["b"])
    assert 'worker="b"' not in read(urls["c"]).replace('peer="b"', "")


def test_a_port_that_is_in_use_is_an_error_of_that_worker(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    serve_numbers(b, "a")
    metrics = metrics_of(a, "b")
    with metrics.serve() as server, pytest.raises(ConfigurationError, match="cannot serve metrics"):
        metrics.serve_workers(server.port)
    wrong: Any
    for wrong in (-5, "x", True):
        with pytest.raises(ConfigurationError, match="port must be a whole number"):
            metrics.serve_workers(wrong)
    with pytest.raises(ConfigurationError, match=r"port 65535 plus the highest rank \(\d+\) exceeds 65535"):
        metrics_of(a, "b", "b2").serve_workers(65_535)


def test_a_closed_driver_serves_nothing(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1)
    metrics = metrics_of(a)
    a.close()
    with pytest.raises(NotInitialized, match="worker a has shut down and cannot serve metrics"):
        metrics.serve()


def test_only_the_driver_may_ask(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    serve_numbers(b, "driver")
    for operation, args in ((METRICS, ()), (SERVE_METRICS, ("127.0.0.1", 0))):
        with pytest.raises(AuthenticationFailed, match="only driver may ask for the metrics of this worker, not a"):
            a.ask("b", operation, args, 5.0).wait()


@pytest.mark.parametrize("args", [(), ("127.0.0.1",), ("127.0.0.1", 65_536), ("127.0.0.1", -1), ("x" * 300, 0), (0, 0)])
def test_the_address_is_checked(make_agents: MakeAgents, args: tuple[Any, ...]) -> None:
    a, b = make_agents(2)
    serve_numbers(b, "a")
    with pytest.raises(DecodeError):
        a.ask("b", SERVE_METRICS, args, 5.0).wait()
