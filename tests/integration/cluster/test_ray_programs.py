"""Programs that start Ray, or join one whose nodes have several addresses; each in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.ray_nodes import nodes_of_a_program
from cluster.scripts import Script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> None:
    """The check for workers of the fork server would find those of Ray."""


STARTS_RAY = """
    import os, signal, gradwire

    handler = signal.getsignal(signal.SIGINT)
    with gradwire.Cluster.ray(1, resources={"CPU": 1, "slot": 1}) as cluster:
        print(cluster.workers[0].call(os.getpid) == cluster.workers[0].pid)
        print(all("tcp://127.0.0.1:" in line for line in cluster.describe().splitlines() if "listens at" in line))
    import ray
    print(ray.is_initialized(), handler is signal.getsignal(signal.SIGINT))
"""


def test_ray_is_started_and_stopped_with_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="gwr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        check_started_and_stopped(tmp_path)


def check_started_and_stopped(tmp_path: Path) -> None:
    with Script(tmp_path, STARTS_RAY) as script:  # which looks for processes that are left
        code, out, err = script.finish(120.0)
    assert (code, err) == (0, "")
    assert out.split() == ["True", "True", "False", "True"]


JOIN = """
    import gradwire
    from gradwire.errors import ConfigurationError

    try:
        gradwire.Cluster.ray(2, strategy="STRICT_SPREAD", address={address!r})
    except ConfigurationError as error:
        print(error)
    import ray
    print(ray.is_initialized())
"""
ACCEPT = """
    with gradwire.Cluster.ray(
        2, strategy="STRICT_SPREAD", address={address!r}, allow_unauthenticated=True, port_range=(20000, 20100)
    ) as cluster:
        print(sum("tcp://127.0.0.2:20" in line for line in cluster.describe().splitlines()))
        print(*(worker.call(gradwire.rpc.get_worker_info).name for worker in cluster.workers))
    print(ray.is_initialized())
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster without authentication, of two nodes with addresses of their own, as if on two machines."""
    nodes = ({"num_cpus": 1}, {"num_cpus": 1, "node_ip_address": "127.0.0.2"})
    with nodes_of_a_program(*nodes, RAY_AUTH_MODE="disabled") as address:
        yield address


def test_a_cluster_of_several_machines_without_authentication_is_refused_unless_accepted(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with Script(tmp_path, (JOIN + ACCEPT).format(address=address)) as script:
        code, out, err = script.finish(100.0)
    assert code == 0, err
    refusal, is_connected, num_on_second, names, is_connected_after = out.splitlines()
    assert refusal.startswith("this Ray cluster has nodes on other machines (127.0.0.2) and no token authentication")
    assert refusal.endswith("allow_unauthenticated=True")
    assert (num_on_second, names) == ("1", "worker0 worker1"), "each worker listens at the address of its node"
    assert is_connected == is_connected_after == "False"


def test_a_driver_with_a_token_is_told_that_the_cluster_has_none(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray lets it join, and then cancels its actors without naming the cause."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    with Script(tmp_path, JOIN.format(address=address)) as script:
        code, out, err = script.finish(100.0)
    assert code == 0, err
    refusal, is_connected = out.splitlines()
    assert refusal.startswith("this process has RAY_AUTH_MODE=token, but the Ray cluster has no token authentication")
    assert is_connected == "False"
