"""Programs that start Ray, or join one whose nodes have several addresses; each in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.scripts import Script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STARTS_RAY = """
    import os, signal, gradwire

    handler = signal.getsignal(signal.SIGINT)
    for number in range(2):  # a second Ray can follow the first
        with gradwire.Cluster.ray(2, resources={"CPU": 1, "slot": 1}) as cluster:
            print(cluster.workers[1].call(os.getpid) == cluster.workers[1].pid)
            print(all("tcp://127.0.0.1:" in line for line in cluster.describe().splitlines() if "listens at" in line))
    import ray
    print(ray.is_initialized(), handler is signal.getsignal(signal.SIGINT))
"""


def test_ray_is_started_and_stopped_with_the_cluster(tmp_path: Path) -> None:
    with Script(tmp_path, STARTS_RAY) as script:  # which looks for processes that are left
        code, out, err = script.finish(120.0)
    assert (code, err) == (0, "")
    assert out.split() == ["True", "True", "True", "True", "False", "True"]


NODES = """if True:
    from cluster.ray_nodes import ray_nodes, SMALL

    with ray_nodes(1) as nodes:
        nodes.add_node(num_cpus=1, node_ip_address="127.0.0.2", **SMALL)
        print(nodes.address, flush=True)
        input()
"""
JOIN = """
    import gradwire
    from gradwire.errors import ConfigurationError

    try:
        gradwire.Cluster.ray(2, strategy="STRICT_SPREAD", address={address!r})
    except ConfigurationError as error:
        print(error)
    else:
        print("accepted")
    import ray
    print(ray.is_initialized())
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray cluster without authentication, of two nodes with addresses of their own, as if on two machines."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_AUTH_MODE": "disabled"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", NODES], env=environment, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
            process.stdin.write("\n")
            process.stdin.flush()
            process.wait(60.0)
        finally:
            process.kill()


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_cluster_of_several_machines_without_authentication_is_refused(
    address: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a driver that has a token: Ray lets it join, and only the nodes know that they do not ask for one."""
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    with Script(tmp_path, JOIN.format(address=address)) as script:
        code, out, err = script.finish(60.0)
    refusal, is_connected = out.splitlines()
    assert refusal.startswith("this Ray cluster has nodes on other machines (127.0.0.2) and no token authentication"), (
        err
    )
    assert refusal.endswith("allow_unauthenticated=True")
    assert (code, is_connected) == (0, "False"), err


ACCEPT = """
    import gradwire

    with gradwire.Cluster.ray(
        2, strategy="STRICT_SPREAD", address={address!r}, allow_unauthenticated=True, port_range=(20000, 20100)
    ) as cluster:
        print(sum("tcp://127.0.0.2:20" in line for line in cluster.describe().splitlines()))
        print(*(worker.call(gradwire.rpc.get_worker_info).name for worker in cluster.workers))
    import ray
    print(ray.is_initialized())
"""


def test_it_is_accepted_if_asked_for_and_each_worker_has_its_node_s_address(address: str, tmp_path: Path) -> None:
    with Script(tmp_path, ACCEPT.format(address=address)) as script:
        code, out, err = script.finish(60.0)
    assert out.splitlines() == ["1", "worker0 worker1", "False"], err
    assert code == 0
