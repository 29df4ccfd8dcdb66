"""A cluster whose processes a scheduler started, over TLS: what it does, and what its keys are."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from closeness import assert_close
from cluster import tasks
from cluster.process_scheduler import Machine, ProcessScheduler
from cluster.shown import Shown
from gradwire import autograd, rpc
from gradwire.cluster.api import Cluster
from gradwire.cluster.launcher import WorkerState
from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
from gradwire.config import WorkerConfig
from gradwire.errors import AuthenticationFailed
from gradwire.optim import DistributedOptimizer
from gradwire.rpc.agent import Agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.testing import wait_until
from gradwire.transports.certificates import Authority, ProcessKey
from gradwire.transports.tls import uri_of_worker
from gradwire.types import WorkerInfo

TOKEN = bytes(range(200, 232))


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """The tests of this module share a cluster, whose connections come and go; `test_remote_end` looks for what is left."""


@pytest.fixture(scope="module")
def scheduler() -> ProcessScheduler:
    return ProcessScheduler([Machine(host="node10"), Machine(host="node9")])


@pytest.fixture(scope="module")
def cluster(scheduler: ProcessScheduler) -> Iterator[Cluster]:
    options = RemoteOptions(
        num_workers=2,
        roles={"ps": 1, "trainer": 1},
        environment={"TEST_COLOUR": "green and secret"},
        imports=["cluster.tasks"],
        threads_per_worker=2,
        config=WorkerConfig(trust="code", transports=("tcp",), bind_port=(20_100, 20_900)),
        token=TOKEN,
    )
    with Cluster(*start_remote(scheduler, options)) as cluster:
        yield cluster


def test_names_and_ranks_follow_the_hosts(cluster: Cluster, scheduler: ProcessScheduler) -> None:
    ps, trainer = cluster.workers
    assert [(item.name, item.rank, item.role) for item in (ps, trainer)] == [
        ("ps0", 0, "ps"),
        ("trainer0", 1, "trainer"),
    ]
    assert [ps.pid, trainer.pid] == [scheduler.processes[1].pid, scheduler.processes[0].pid]  # node9 before node10


def test_calls_reach_every_worker_from_everywhere(cluster: Cluster) -> None:
    assert [worker.call(tasks.who_am_i) for worker in cluster.workers] == ["ps0", "trainer0"]
    assert cluster.workers[0].call(tasks.ask_who, "trainer0") == "trainer0"
    assert cluster.workers[1].call(tasks.ask_who, "ps0") == "ps0"
    assert cluster.workers[1].call(rpc.rpc_sync, "driver", torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]
    assert cluster.map(torch.sqrt, [torch.tensor(4.0), torch.tensor(9.0)]) == [2.0, 3.0]


def test_what_a_worker_gets_from_the_driver(cluster: Cluster) -> None:
    found = cluster.workers[0].call(tasks.describe_process)
    assert found["colour"] == "green and secret"
    assert found["threads"] == 2
    assert not found["sigint_is_ignored"]


def test_exceptions_come_back(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="bad day"):
        cluster.workers[0].call(tasks.fail, "bad day")


def test_gradients_and_an_optimizer_step_are_those_of_one_process(cluster: Cluster) -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 3)
    weights = [torch.randn(3, 3, requires_grad=True) for _ in cluster.workers]

    def loss_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ first) @ second).sum()

    loss_of(*weights).backward()
    optimizer = torch.optim.SGD(weights, lr=0.5)
    expected = [weight.grad.clone() for weight in weights if weight.grad is not None]
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()

    owners = [
        rpc.remote(worker.name, tasks.make_weight, (value,))
        for worker, value in zip(cluster.workers, before, strict=True)
    ]
    with autograd.context() as context:
        hidden = rpc.rpc_sync(owners[0].owner(), tasks.tanh_times, (owners[0], x))
        out = rpc.rpc_sync(owners[1].owner(), tasks.times, (owners[1], hidden))
        autograd.backward(context, [out.sum()])
        for owner, gradient in zip(owners, expected, strict=True):
            assert_close(rpc.rpc_sync(owner.owner(), tasks.gradient_of, (context, owner)), gradient)
        DistributedOptimizer(torch.optim.SGD, owners, lr=0.5).step(context)
    for owner, weight in zip(owners, weights, strict=True):
        assert_close(owner.to_here().detach(), weight.detach())


def test_output_has_the_workers_name(cluster: Cluster) -> None:
    first, second = cluster.workers
    with Shown() as shown:
        first.call(print, "one\ntwo")
        second.call(tasks.print_error, "three")
        second.call(subprocess.run, ["echo", "four"], check=True)
        wait_until(lambda: shown.out.count("\n") >= 3 and "\n" in shown.err, 20.0, "the output of the workers")
    assert sorted(shown.out.splitlines()) == ["[ps0] one", "[ps0] two", "[trainer0] four"]
    assert shown.err == "[trainer0] three\n"


def test_much_output_comes_whole(cluster: Cluster) -> None:
    with Shown() as shown:
        cluster.workers[0].call(tasks.print_lines, 5000)
        wait_until(lambda: shown.out.count("\n") >= 5000, 30.0, "all lines")
    assert shown.out.splitlines() == [f"[ps0] line {number}" for number in range(5000)]


def test_status_has_the_memory_that_workers_report(cluster: Cluster) -> None:
    first, second = cluster.status()
    assert (first.name, first.role, first.state) == ("ps0", "ps", "running")
    assert second.calls_served is not None
    assert min(first.rss_bytes or 0, second.rss_bytes or 0) > 10 << 20


def test_description_has_places_addresses_and_versions(cluster: Cluster) -> None:
    text = cluster.describe()
    assert "of the tests" in text
    for worker in cluster.workers:
        assert re.search(
            rf"{worker.name}: rank {worker.rank}, .*process {worker.pid} on node\d+ \(node\d+, slot 0\)", text
        )
    assert text.count("?tls") == 3
    assert f"torch {torch.__version__}" in text
    assert TOKEN.hex() not in text


def test_listeners_are_in_the_port_range(cluster: Cluster) -> None:
    ports = [int(port) for port in re.findall(r"tcp://127\.0\.0\.1:(\d+)\?tls", cluster.describe())]
    assert len(set(ports)) == 3
    assert all(20_100 <= port <= 20_900 for port in ports)


def test_shutdown_in_a_worker_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(gradwire.errors.RpcError, match="ps0 was started by a cluster's driver"):
        cluster.workers[0].call(rpc.shutdown)


# Keys


def test_nothing_on_the_schedulers_channel_is_secret(cluster: Cluster, scheduler: ProcessScheduler) -> None:
    traffic = b"".join(message for process in scheduler.processes for message in process.traffic)
    assert b"BEGIN CERTIFICATE REQUEST" in traffic
    assert b"PRIVATE KEY" not in traffic
    assert TOKEN not in traffic
    assert b"green and secret" not in traffic
    for worker in cluster.workers:  # the raw number of the key, however it might be encoded
        secret = worker.call(tasks.private_key_number)
        assert len(secret) == 32
        assert secret not in traffic


def test_no_key_is_on_a_disk(cluster: Cluster) -> None:
    """Neither in the folders of the sockets, nor in a file that a process of the cluster has open."""
    for pid in [os.getpid(), *(worker.pid for worker in cluster.workers)]:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            assert "gradwire-key" not in target
    for folder in Path(os.environ.get("TMPDIR", "/tmp")).glob("gradwire-*"):
        with contextlib.suppress(FileNotFoundError):  # other programs remove folders of theirs
            for file in folder.rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    assert not file.is_file() or b"PRIVATE KEY" not in file.read_bytes()


def tcp_of(cluster: Cluster, name: str) -> tuple[str, int]:
    uri = next(uri for uri in rpc.current_agent().directory.find(name).uris if uri.startswith("tcp:"))
    host, _, port = uri.removeprefix("tcp://").removesuffix("?tls").rpartition(":")
    return host, int(port)


def test_listener_wants_a_certificate(cluster: Cluster) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for name in ("driver", "ps0", "trainer0"):
        with (
            socket.create_connection(tcp_of(cluster, name), timeout=10.0) as plain,
            context.wrap_socket(plain) as sock,
            pytest.raises(OSError, match="certificate required"),
        ):
            sock.recv(1)  # with TLS 1.3 a client learns of the refusal when it reads


def stranger(cluster: Cluster, authority: Authority, name: str, info: WorkerInfo, token: bytes) -> Agent:
    """A worker that knows where all others are, with a certificate for `name`."""
    key = ProcessKey()
    known = rpc.current_agent().directory
    addresses = [known.find(item.name) for item in known.infos() if item.name != info.name]
    with key.files(authority.sign(key.request(), uri_of_worker(name)), authority.certificate) as keys:
        config = WorkerConfig(trust="code", transports=("tcp",), tls=keys, token=token)
        return start_worker(info, config, StaticDirectory(addresses))


def test_certificate_of_another_cluster_is_refused(cluster: Cluster) -> None:
    agent = stranger(cluster, Authority(), "trainer0", WorkerInfo("trainer0", 1), TOKEN)
    try:
        with pytest.raises((AuthenticationFailed, gradwire.errors.WorkerLost), match=r"certificate|TLS|alert"):
            agent.call("ps0", tasks.who_am_i, (), {})
    finally:
        agent.close()


def test_certificate_is_good_for_one_name(cluster: Cluster) -> None:
    """A worker that was given a name cannot pass for another one, nor for the driver."""
    launcher: Any = cluster._monitor.launcher
    for name in ("ps0", "driver"):
        info = rpc.current_agent().directory.find(name).info
        agent = stranger(cluster, launcher._authority, "trainer0", info, TOKEN)
        try:
            with pytest.raises(
                AuthenticationFailed, match=rf"worker '{name}' presented a certificate for \['trainer0'\]"
            ):
                agent.call("trainer0", tasks.who_am_i, (), {})
        finally:
            agent.close()


def test_certificate_without_the_token_is_refused(cluster: Cluster) -> None:
    launcher: Any = cluster._monitor.launcher
    agent = stranger(cluster, launcher._authority, "trainer0", WorkerInfo("trainer0", 1), b"guessed")
    try:
        with pytest.raises(AuthenticationFailed, match="token"):
            agent.call("ps0", tasks.who_am_i, (), {})
    finally:
        agent.close()


# Orders of the driver


@pytest.mark.parametrize("operation", ["cluster.leave", "cluster.dial"])
def test_workers_take_orders_from_the_driver_alone(cluster: Cluster, operation: str) -> None:
    args: tuple[Any, ...] = () if operation == "cluster.leave" else ([], 1.0)
    with pytest.raises(AuthenticationFailed, match="only driver may request this from ps0, not trainer0"):
        cluster.workers[1].call(tasks.ask_control, "ps0", operation, args)
    assert cluster.workers[0].call(tasks.who_am_i) == "ps0"


@pytest.mark.parametrize(
    "args", [(["x"], 1.0), ([b"\xc1"], 1.0), ([], -1.0), ([], float("inf")), (), ([b"x" * 40_000], 1.0)]
)
def test_dial_with_wrong_fields_is_refused(cluster: Cluster, args: tuple[Any, ...]) -> None:
    with pytest.raises(gradwire.errors.DecodeError):
        rpc.current_agent().ask("ps0", "cluster.dial", args, 10.0).wait()


@pytest.mark.parametrize("args", [("stdin", b"x"), ("stdout", "x"), ("stdout", b"x" * 70_000), ("stdout",)])
def test_output_with_wrong_fields_is_refused(cluster: Cluster, args: tuple[Any, ...]) -> None:
    with pytest.raises(gradwire.errors.DecodeError):
        cluster.workers[0].call(tasks.ask_control, "driver", "cluster.output", args)


def test_workers_do_not_print_for_each_other(cluster: Cluster) -> None:
    with pytest.raises(gradwire.errors.RpcError, match="unknown control operation"):
        cluster.workers[0].call(tasks.ask_control, "trainer0", "cluster.output", ("stdout", b"x"))


# A connection that breaks


def cut_connections(name: str) -> None:
    for lane in [item for item in rpc.current_agent().connections() if item.lane and item.info.name == name]:
        with contextlib.suppress(OSError):  # the end of one may have ended another
            lane.stream.channel._socket.shutdown(socket.SHUT_RDWR)


def test_a_worker_that_is_waited_for_can_be_called_after_a_cut(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    pid = worker.call(os.getpid)
    for _ in range(5):
        cut_connections("ps0")
        assert worker in cluster.wait_for_workers(timeout=10.0)
        assert worker.call(os.getpid) == pid


def test_cut_connection_comes_back_and_nothing_is_lost(cluster: Cluster) -> None:
    with Shown() as shown:
        launcher: Any = cluster._monitor.launcher
        worker = cluster.workers[0]
        pid = worker.call(os.getpid)
        worker.call(tasks.start_printing)

        def is_back() -> bool:
            with contextlib.suppress(gradwire.errors.WorkerLost):
                return bool(worker.call(os.getpid) == pid)
            return False

        for _ in range(5):
            cut_connections("ps0")
            wait_until(is_back, 10.0, "that ps0 is back")
        wait_until(lambda: launcher._members["ps0"].cut_at is None, 10.0, "that its return is noticed")
        assert launcher._members["ps0"].handle.state is WorkerState.RUNNING
        count = worker.call(tasks.stop_printing)
        expected = {f"[ps0] line {number}" for number in range(count)}
        wait_until(lambda: expected.issubset(shown.out.splitlines()), 10.0, "every line that was printed meanwhile")
