"""`docs/errors.md` has a section for each error class, and shows messages as they really come out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gradwire as gw
from gradwire import errors, rpc
from gradwire.cluster import Worker
from gradwire.config import Limits, WorkerConfig
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.testing import local_agents, wait_until
from gradwire.transports.handshake import CallerHandshake, Identity, ListenerHandshake
from gradwire.transports.stream import StreamOptions
from gradwire.transports.unix import UnixTransport
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.versions import own_versions
from gradwire.wire.framing import FrameDecoder
from gradwire.wire.messages import Hello

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
CLASSES = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.GradwireError)]
# Others are raised as one of their subclasses.
WITHOUT_MESSAGE = {"GradwireError", "TransportError", "RpcError"}


def sections() -> dict[str, str]:
    """The text below each heading that is the name of a class, by that name."""
    found = re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) == len(dict(found))
    return dict(found)


def shown(section: str) -> str | None:
    """The message that a section shows, in one line; None if it has none."""
    found = re.search(r"^```text\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split()) if found else None


def test_every_class_has_a_section_in_the_order_of_the_tree() -> None:
    assert list(sections()) == [kind.__name__ for kind in CLASSES]


def test_docs_url_points_to_the_section() -> None:
    for kind in CLASSES:
        assert kind("x").docs_url == f"{errors.DOCS_URL}errors.html#{kind.__name__.lower()}"


@pytest.mark.parametrize("name", [kind.__name__ for kind in CLASSES])
def test_message_is_what_really_comes_out(name: str, messages: dict[str, str]) -> None:
    section = shown(sections()[name])
    if name in WITHOUT_MESSAGE:
        assert section is None
        return
    assert section is not None
    parts = [re.escape(neutral(part)) for part in section.split("...")]
    printed = neutral(" ".join(f"{name}: {messages[name]}".split()))
    assert re.fullmatch(".*".join(parts), printed), f"the page shows\n  {section}\nbut it is now\n  {printed}"


def neutral(text: str) -> str:
    """Take out what differs from run to run or machine to machine: numbers, ids, paths and the name of the host."""
    text = text.replace(f" on {socket.gethostname()},", " on node7,")
    text = re.sub(r"test_errors_page\.py:(\d+), in \w+", r"train.py:\1, in step", text)
    text = re.sub(r"/[\w./-]*/(\w+)", r"/\1", text)
    return re.sub(r"0x[0-9a-f]+|\d+-[0-9a-f]{8}|\d[\d.,:T+-]*\d|\d", "0", text)


# -- messages, each from code that makes the mistake -----------------------------------------------------------------------


class Collector:
    """Keeps the message of each kind of error."""

    def __init__(self) -> None:
        self.messages: dict[str, str] = {}

    def expect(self, kind: type[errors.GradwireError], action: Callable[[], object]) -> None:
        """Run what raises `kind`, or an error that was caused by one."""
        with pytest.raises(Exception) as caught:
            action()
        error: BaseException | None = caught.value
        while error is not None and type(error) is not kind:
            error = error.__cause__
        assert error is not None, f"no {kind.__name__} behind {caught.value!r}"
        self.messages[kind.__name__] = str(error)


@pytest.fixture(scope="module")
def messages(_own_temporary_folder: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    collector = Collector()
    folder = tmp_path_factory.mktemp("errors")
    collect_without_workers(collector, folder)
    collect_from_agents(collector)
    collect_from_a_cluster(collector, folder)
    return collector.messages


def collect_without_workers(to: Collector, folder: Path) -> None:
    to.expect(errors.ConfigurationError, lambda: gw.Cluster.local(2, num_worker_threads=0))
    to.expect(errors.NotInitialized, lambda: rpc.rpc_sync("worker0", torch.ones, args=(2,)))
    decoder = FrameDecoder(Limits(), accept=frozenset({Hello}))
    to.expect(errors.DecodeError, lambda: list(decoder.feed(b"GET / HTTP/1.1\r\nHost: worker0\r\n\r\n")))

    options = rpc.RpcOptions(init_method=f"file://{folder}/meeting", init_timeout=0.3)
    to.expect(
        errors.RendezvousFailed,
        lambda: rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options),
    )

    one = Identity(address=_address("worker0"), trust="code", token=b"token of one", versions=own_versions())
    other = Identity(address=_address("worker1"), trust="code", token=b"of the other", versions=own_versions())
    to.expect(errors.AuthenticationFailed, lambda: _shake_hands(one, other))

    checkpoint = gw.checkpoint
    to.expect(errors.CheckpointMissing, lambda: checkpoint.load(folder / "checkpoint", {}))
    to.expect(errors.CannotSave, lambda: checkpoint.save(folder / "checkpoint", {"config": {"lock": threading.Lock()}}))
    (folder / "file").write_text("")
    to.expect(errors.CheckpointWriteFailed, lambda: checkpoint.save(folder / "file" / "checkpoint", {"step": 1}))
    checkpoint.save(folder / "checkpoint", {"weight": torch.ones(4)})
    to.expect(errors.CheckpointMismatch, lambda: checkpoint.load(folder / "checkpoint", {"weight": torch.ones(2, 2)}))
    (tensors,) = (folder / "checkpoint").glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-4] + b"\0\0\0\0")
    to.expect(errors.CheckpointDamaged, lambda: checkpoint.load(folder / "checkpoint", {"weight": torch.ones(4)}))
    with (folder / "checkpoint" / ".gradwire-writer").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        to.expect(errors.CheckpointBusy, lambda: checkpoint.save(folder / "checkpoint", {"step": 1}))


def _address(name: str) -> WorkerAddress:
    return WorkerAddress(WorkerInfo(name, 0), 1, "host", ())


def _shake_hands(one: Identity, other: Identity) -> None:
    caller, listener = CallerHandshake(one, other.address, "calls"), ListenerHandshake(other, lambda address: None)
    answer = caller.on_message(listener.on_message(caller.begin(), None), None)
    assert answer is not None
    caller.on_message(listener.on_message(answer, None), None)


def collect_from_agents(to: Collector) -> None:
    with local_agents(2, trust="data") as (first, _):
        to.expect(errors.NotExposed, lambda: first.call("b", "os:getcwd"))

    directory, config = StaticDirectory(), WorkerConfig(transports=("unix",), token=b"errors")
    with contextlib.closing(start_worker(WorkerInfo("worker0", 0), config, directory)):
        to.expect(errors.DuplicateWorker, lambda: start_worker(WorkerInfo("worker0", 1), config, directory))
        to.expect(errors.IdentityTaken, lambda: directory.update(_address("worker1")))
        to.expect(errors.InvalidName, lambda: start_worker(WorkerInfo("worker 1", 1), config, directory))

    with local_agents(2, limits=Limits(frame_bytes=1 << 20)) as (first, second):
        to.expect(errors.LimitExceeded, lambda: first.call("b", torch.neg, (torch.ones(1 << 19),)))
        second.close()
        wait_until(lambda: not first.peers.peer("b").lanes, 10.0, "that the end of the connections is noticed")
        to.expect(errors.ConnectFailed, lambda: first.call("b", time.time))

    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        transport = UnixTransport(Path(folder), StreamOptions())
        listener = transport.listen("worker0")
        with _no_more_descriptors():
            to.expect(errors.ResourceExhausted, lambda: transport.connect(listener.uri, time.monotonic() + 1))
        with contextlib.closing(transport.connect(listener.uri, time.monotonic() + 1)) as connection:
            listener.close()
            to.expect(errors.ConnectionLost, connection.read_nowait)
        to.expect(errors.ConnectionClosed, connection.read_nowait)


@contextlib.contextmanager
def _no_more_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def collect_from_a_cluster(to: Collector, folder: Path) -> None:
    to.expect(errors.WorkerStartFailed, lambda: gw.Cluster.local(1, imports=["no_such_module"]))
    with gw.Cluster.local(2) as cluster:
        first, second = cluster.workers
        collect_from_calls(to, first)
        collect_from_autograd(to, first, second)
        collect_from_optimizers(to, first, second, folder)


def collect_from_calls(to: Collector, worker: Worker) -> None:
    to.expect(errors.AlreadyInitialized, lambda: rpc.init_rpc("worker9", rank=0, world_size=1))
    to.expect(errors.UnknownWorker, lambda: rpc.rpc_sync("worker7", torch.ones, args=(2,)))
    to.expect(errors.CannotSend, lambda: worker.call(print, threading.Lock()))
    to.expect(errors.RpcTimeout, lambda: worker.with_timeout(0.1).call(time.sleep, 30))
    to.expect(errors.NoSuchFunction, lambda: worker.call("math:squareroot", 2.0))

    def parse() -> None:
        import plistlib

        plistlib.loads(b"neither XML nor binary")

    sys.modules.pop("plistlib", None)  # with torch 2.8 it is imported here, and its exceptions arrive as they are
    to.expect(errors.RemoteCallFailed, lambda: worker.call(parse))

    future = worker.submit(time.sleep, 30)
    to.expect(errors.WaitTimeout, lambda: future.wait(timeout=0.01))
    future.cancel()
    to.expect(errors.CallCancelled, future.wait)

    rref = rpc.remote(worker.name, torch.ones, args=(2,))
    to.expect(errors.NotTheOwner, rref.local_value)
    to.expect(errors.RRefError, lambda: pickle.dumps(rref))


def collect_from_autograd(to: Collector, first: Worker, second: Worker) -> None:
    x = torch.ones(2, requires_grad=True)
    to.expect(errors.NoActiveContext, gw.autograd._current_context)
    with gw.autograd.context() as ctx:
        loss = first.call(torch.exp, x).sum()
    to.expect(errors.UnknownContext, lambda: ctx.backward(loss))
    with gw.autograd.context() as ctx:
        to.expect(errors.AutogradError, lambda: gw.autograd.grad(ctx, first.call(torch.exp, x).sum(), torch.ones(2)))

    def broken(y: torch.Tensor) -> torch.Tensor:
        y = y * 2
        y.register_hook(lambda gradient: gradient @ torch.ones(3))
        return y

    with gw.autograd.context() as ctx:
        loss = first.call(broken, x).sum()
        to.expect(errors.BackwardFailed, lambda: ctx.backward(loss))
    with gw.autograd.context() as ctx:
        second.call(torch.exp, x)
        loss = first.call(torch.exp, x).sum()
        to.expect(errors.UnsettledSend, lambda: ctx.backward(loss, mode="fast"))


def collect_from_optimizers(to: Collector, first: Worker, second: Worker, folder: Path) -> None:
    layers = [worker.module(torch.nn.Linear, 2, 2) for worker in (first, second)]
    to.expect(errors.OptimizerNotMade, lambda: gw.optim.DistributedOptimizer(torch.optim.SGD, layers, lr=-1.0))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, layers, lr=0.1)
    to.expect(errors.OptimizerError, lambda: pickle.dumps(optimizer))
    rref = rpc.remote(second.name, torch.ones, args=(2,))
    rref.to_here()
    with gw.autograd.context() as ctx:
        ctx.backward(layers[1](layers[0](torch.ones(2))).sum())
        future = second.submit(time.sleep, 60)
        assert second.pid is not None
        os.kill(second.pid, signal.SIGKILL)
        to.expect(errors.WorkerLost, future.wait)
        to.expect(errors.OptimizerStepFailed, lambda: optimizer.step(ctx))
    to.expect(errors.OwnerLost, rref.to_here)
    to.expect(errors.CheckpointError, lambda: gw.checkpoint.save(folder / "checkpoint", {"layers": layers}))
