"""Workers in network namespaces, as on machines of their own, which may not reach each other."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cluster import tasks
from cluster.process_scheduler import Machine, ProcessScheduler
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
from gradwire.cluster.remote_worker import DIAL
from gradwire.config import WorkerConfig
from gradwire.errors import RpcTimeout, WorkerLost, WorkerStartFailed
from gradwire.rpc.agent import Agent
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.testing import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.root]

NETWORK = "10.213.78"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces, each with a cable to this machine, which passes packets on only where a test says so."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    names = [f"gwr{os.getpid() % 100000}{letter}" for letter in "ab"]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            for index, name in enumerate(names):
                _ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
                stack.callback(_ip, "link", "del", f"{name}v")  # else it goes some time after its namespace
                _ip("addr", "add", f"{NETWORK}.{4 * index + 1}/30", "dev", f"{name}v")
                _ip("link", "set", f"{name}v", "up")
                _ip("-n", name, "addr", "add", f"{NETWORK}.{4 * index + 2}/30", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", device, "up")
        except OSError as error:
            stack.close()
            pytest.skip(f"no network namespaces here: {error}")
        yield names


def _machines(hosts: list[str]) -> list[Machine]:
    return [Machine(["ip", "netns", "exec", host], host=f"node{index}") for index, host in enumerate(hosts)]


def _route(hosts: list[str]) -> None:
    """Let each namespace reach this machine's addresses and, through it, the other namespace."""
    for index, host in enumerate(hosts):
        _ip("-n", host, "route", "add", f"{NETWORK}.0/24", "via", f"{NETWORK}.{4 * index + 1}")


@pytest.fixture
def forwarding() -> Iterator[None]:
    path = "/proc/sys/net/ipv4/ip_forward"
    with open(path) as file:
        before = file.read()
    try:
        with open(path, "w") as file:
            file.write("1")
    except OSError as error:
        pytest.skip(f"packets cannot be passed on here: {error}")
    yield
    with open(path, "w") as file:
        file.write(before)


def _start(hosts: list[str]) -> Cluster:
    scheduler = ProcessScheduler(_machines(hosts), bind_host=f"{NETWORK}.1")
    options = RemoteOptions(num_workers=2, config=WorkerConfig(trust="code"), start_timeout_s=60.0)
    return Cluster(*start_remote(scheduler, options))


def test_workers_on_three_machines(hosts: list[str], forwarding: None) -> None:
    _route(hosts)
    with _start(hosts) as cluster:
        first, second = cluster.workers
        addresses = [rpc.current_agent().directory.find(worker.name).uris[-1] for worker in cluster.workers]
        assert [address.rpartition(":")[0] for address in addresses] == [f"tcp://{NETWORK}.2", f"tcp://{NETWORK}.6"]
        assert first.call(tasks.ask_who, "worker1") == "worker1"
        assert second.call(tasks.ask_who, "worker0") == "worker0"
        assert second.call(torch.add, torch.ones(1 << 20), 1).sum().item() == 2 << 20
        assert second.pid is not None
        os.kill(second.pid, signal.SIGKILL)
        wait_until(lambda: not second.is_alive, 10.0, "that the loss is noticed")
        with pytest.raises(WorkerLost):
            first.call(tasks.ask_who, "worker1")


def test_machines_that_do_not_reach_each_other_are_named(hosts: list[str]) -> None:
    _ip("-n", hosts[1], "route", "add", f"{NETWORK}.1/32", "via", f"{NETWORK}.5")  # to the driver alone
    with pytest.raises(WorkerStartFailed) as caught:
        _start(hosts)
    text = str(caught.value)
    assert f"worker0 ({NETWORK}.2) on node0 cannot reach worker1 at tcp://{NETWORK}.6:" in text
    assert "Network is unreachable" in text
    assert "interface=" in text


def test_machine_that_does_not_say_which_others_it_reaches_is_named(
    hosts: list[str], forwarding: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = Agent.ask

    def ask_in_vain(self: Agent, to: str, operation: str, *args: Any) -> Any:
        if operation != DIAL:
            return ask(self, to, operation, *args)
        future: InterruptibleFuture[Any] = InterruptibleFuture()
        future.set_exception(RpcTimeout("timed out", to, "run"))
        return future

    monkeypatch.setattr(Agent, "ask", ask_in_vain)
    _route(hosts)
    with pytest.raises(WorkerStartFailed, match=r"worker0 .* on node0 did not report whether it can reach") as caught:
        _start(hosts)
    assert isinstance(caught.value.__cause__, RpcTimeout)


def test_machine_that_the_driver_is_not_reached_from_is_named(hosts: list[str]) -> None:
    with pytest.raises(WorkerStartFailed) as caught:
        _start(hosts)
    assert f"node1, slot 0 could not start:\nnode1 has no route to the driver at {NETWORK}.1" in str(
        caught.value
    ).replace(os.uname().nodename, "node1")
